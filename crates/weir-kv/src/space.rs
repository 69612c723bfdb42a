//! A store's space on its disk: files that give way, and the ballast.
//!
//! When space is needed, the folded segments that are kept for other copies go first, the oldest before the
//! newer ones, then the ballast: a file without content that keeps a fold, and with it a removal, possible
//! when others have filled the disk.
//!
//! Knows nothing of records and trees.

use crate::core::Core;
use crate::journal::{Shelf, lock};
use crate::means::{CHECK_EVERY, DISK_SHARE, PAUSE_MAX, PAUSE_MIN, REFUSED_LATELY, Sizes, tree_free};
use crate::recover::Kept;
use std::path::PathBuf;
use weir_env::{Instant, OpenMode, Space};
use weir_proto::{Error, ErrorKind, Result};

pub(crate) fn ballast(shelf: &Shelf) -> PathBuf {
    shelf.dir.join("ballast")
}

impl Core {
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        let dir = &self.shelf.dir;
        let space: std::io::Result<Space> = self.shelf.disk.space(dir);
        space
            .map(|space| space.free)
            .map_err(|e| Error::from_io(format!("ask for the space in {}", dir.display()), &e))
    }

    /// Whether `bytes` are free, after kept segments gave way if they had to.
    pub(crate) fn has_free(&self, bytes: u64) -> Result<bool> {
        while self.free_bytes()? < bytes {
            let oldest = lock(&self.reserve).kept.pop_front();
            let Some(Kept { path, .. }) = oldest else { return Ok(false) };
            let removed = self.shelf.disk.remove_file(&path);
            removed.map_err(|e| Error::from_io(format!("remove the journal {}", path.display()), &e))?;
        }
        Ok(true)
    }

    /// Of folds that need these bytes, for all segments and for the oldest one: true: all are to be folded;
    /// false: the oldest one. An error: there is no space, and the last attempt was a short while ago.
    pub(crate) fn space_for_fold(&self, all: u64, oldest: u64) -> Result<bool> {
        if self.has_free(all)? {
            return Ok(true);
        }
        if self.has_free(oldest)? {
            return Ok(false);
        }
        self.drop_ballast();
        let free = self.free_bytes()?;
        if free >= oldest {
            return Ok(false);
        }
        // A fold into pages that the tree has freed needs less, and frees the segment.
        if self.env.clock.now() >= lock(&self.means).not_before {
            return Ok(false);
        }
        let dir = self.shelf.dir.display();
        Err(Error::no_space(format!("folding the journal in {dir} needs {oldest} bytes, {free} are free"))
            .hint("free space on that file system"))
    }

    /// Records the end of a fold.
    pub(crate) fn note_fold(&self, failed: Option<&Error>) {
        let now = self.env.clock.now();
        let mut means = lock(&self.means);
        match failed {
            None => means.pause = PAUSE_MIN,
            Some(e) if e.kind == ErrorKind::NoSpace => {
                means.not_before = now + means.pause;
                means.pause = (means.pause * 2).min(PAUSE_MAX);
            }
            Some(_) => {}
        }
    }

    /// Records the size of the tree's content. Its file also keeps the space of removed entries.
    pub(crate) fn note_tree(&self, content_bytes: Option<u64>) {
        // The file may have holes: it has no more than the disk has used.
        let used =
            self.shelf.disk.space(&self.shelf.dir).map_or(0, |space| space.total.saturating_sub(space.free));
        let file_bytes = self.tree_file.len().unwrap_or(0).min(used);
        lock(&self.means).tree_free = content_bytes.map_or(0, |content| tree_free(file_bytes, content));
    }

    /// The space of the ballast is used from now on.
    pub(crate) fn drop_ballast(&self) {
        let mut means = lock(&self.means);
        means.checked = None;
        if std::mem::take(&mut means.has_ballast) {
            let path = ballast(&self.shelf);
            if let Err(e) = self.shelf.disk.remove_file(&path) {
                tracing::warn!("remove {}: {e}", path.display());
            }
        }
    }

    /// Makes the ballast if it is missing and the disk has more than it needs. Without one the store works,
    /// too.
    pub(crate) fn renew_ballast(&self) {
        let mut means = lock(&self.means);
        let Sizes { ballast_bytes, low_bytes, .. } = means.sizes;
        if means.has_ballast || ballast_bytes == 0 {
            return;
        }
        let path = ballast(&self.shelf);
        let disk = &self.shelf.disk;
        let is_there = || disk.open(&path, OpenMode::READ)?.len().map(|len| len >= ballast_bytes);
        if is_there().unwrap_or(false) {
            means.has_ballast = true;
            return;
        }
        let tree_free = means.tree_free;
        let is_enough =
            |free: u64| free >= 2 * ballast_bytes && free + tree_free >= 2 * ballast_bytes + low_bytes;
        if self.free_bytes().is_ok_and(is_enough) {
            let made = || disk.open(&path, OpenMode::WRITE)?.allocate(0, ballast_bytes);
            means.has_ballast = made().is_ok();
            if !means.has_ballast {
                let _ = disk.remove_file(&path); // the part that was taken is free again
            }
        }
    }

    /// Whether only changes that free space should be made.
    pub(crate) fn is_space_short(&self) -> bool {
        let now = self.env.clock.now();
        let means = lock(&self.means);
        if let Some((at, short)) = means.checked
            && now.since(at) < CHECK_EVERY
        {
            return short;
        }
        let was_short = means.checked.is_some_and(|(_, short)| short);
        drop(means);
        self.renew_ballast(); // others may have freed space since the last fold
        let mut means = lock(&self.means);
        let ballast = means.has_ballast || means.sizes.ballast_bytes == 0;
        let disk = self.free_bytes().unwrap_or(u64::MAX);
        let (all, low) = (disk.saturating_add(means.tree_free), means.sizes.low_bytes);
        // A large disk need not have made its ballast yet.
        let short = disk < low / DISK_SHARE || all < low || !ballast && all < 4 * low;
        means.checked = Some((now, short));
        if short && !was_short {
            self.wake_folder.notify_one();
        }
        short
    }

    /// Records whether a change was refused for want of space.
    pub(crate) fn note_refusal<T>(&self, done: &Result<T>) {
        let now = self.env.clock.now();
        let before = self.refuses_since();
        let mut means = lock(&self.means);
        match done {
            Ok(_) => means.refused = None,
            Err(e) if e.kind == ErrorKind::NoSpace => means.refused = Some((before.unwrap_or(now), now)),
            Err(_) => {}
        }
    }

    pub(crate) fn refuses_since(&self) -> Option<Instant> {
        let now = self.env.clock.now();
        let refused = lock(&self.means).refused;
        refused.filter(|(_, last)| now.since(*last) < REFUSED_LATELY).map(|(first, _)| first)
    }
}
