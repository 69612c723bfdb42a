//! Folding the journal into the tree, and reopening the tree when its disk failed.
//!
//! Invariants: a segment's file is released only after the fold that contains it is durable. Only records
//! that every copy of the store holds are folded: the tree is never rolled back.

use crate::base::{Base, ENTRY_BYTES, Folded, Tree};
use crate::change::{Change, Delta};
use crate::core::{Core, Sealed};
use crate::crash_points;
use crate::journal::lock;
use crate::recover::Kept;
use std::sync::Arc;
use weir_proto::{Error, ErrorKind, Result};

/// Space that a fold leaves on the file system.
const FOLD_SPARE_BYTES: u64 = 1 << 20;
/// A page of the tree.
const PAGE_BYTES: u64 = 4096;

/// The most that a fold of these changes takes on the disk: pages are half full, and for each change the page
/// with its key is copied, and one above it.
fn fold_bytes(deltas: &[Arc<Delta>], tree_bytes: u64) -> u64 {
    let (mut bytes, mut count) = (0, 0u64);
    for (key, change) in deltas.iter().flat_map(|d| &d.changes) {
        let value = if let Change::Put(value) = change { value.len() } else { 8 };
        bytes += (key.len() + value) as u64 + ENTRY_BYTES;
        count += 1;
    }
    2 * bytes + (2 * PAGE_BYTES * count).min(tree_bytes) + FOLD_SPARE_BYTES
}

impl Core {
    /// Moves the sealed deltas that are durable into the tree and releases their segments. Returns their
    /// number.
    pub(crate) fn fold(&self) -> Result<usize> {
        let mut tree = lock(&self.tree);
        let (mut deltas, mut segments) = {
            let state = self.state();
            (state.sealed.clone(), lock(&self.sealed).iter().cloned().collect::<Vec<_>>())
        };
        assert!(deltas.len() == segments.len(), "a sealed delta is a segment");
        if segments.is_empty() {
            return Ok(0);
        }
        self.journal.check()?;
        self.journal.flush()?;
        let durable = self.journal.durable();
        let count = segments.iter().take_while(|s| s.last <= durable).count();
        segments.truncate(count);
        deltas.truncate(count);
        if deltas.is_empty() {
            return Ok(0);
        }
        let tree_bytes = self.tree_file.len().unwrap_or(0);
        let need = |deltas: &[Arc<Delta>]| fold_bytes(deltas, tree_bytes);
        if !self.space_for_fold(need(&deltas), need(&deltas[..1]))? {
            segments.truncate(1);
            deltas.truncate(1);
        }
        let count = deltas.len();
        let Some(newest) = segments.last() else { return Ok(0) };
        let folded = Folded { seq: newest.last, segment: newest.segment.number, epoch: newest.epoch };
        let base = self.fold_into(&mut tree, &deltas, folded);
        self.note_fold(base.as_ref().err());
        let base = base?;
        let kept = |s: &Sealed| Kept {
            number: s.segment.number,
            path: s.segment.path.clone(),
            bytes: s.segment.bytes,
            last: s.last,
        };
        lock(&self.reserve).kept.extend(segments.iter().map(kept));
        let (old_base, old_deltas) = {
            let mut state = self.state_mut();
            let old: Vec<_> = state.sealed.drain(..count).collect();
            lock(&self.sealed).drain(..count);
            (std::mem::replace(&mut state.base, Ok(base)), old)
        };
        self.env.tasks.crash_point(crash_points::FOLDED);
        drop((old_base, old_deltas, deltas)); // slow: readers need not wait for it
        self.note_tree(tree.as_ref().and_then(|tree| tree.bytes().unwrap_or(None)));
        self.abandon()?;
        self.renew_ballast();
        Ok(count)
    }

    fn fold_into(
        &self,
        tree: &mut Option<Tree>,
        deltas: &[Arc<Delta>],
        folded: Folded,
    ) -> Result<Option<Base>> {
        let Some(open) = tree.as_ref() else {
            return Err(Error::unavailable("the state tree is being opened again: its disk failed"));
        };
        let done = open.fold(deltas, folded).and_then(|()| open.snapshot());
        if let Err(e) = &done {
            if e.kind == ErrorKind::NoSpace {
                if let Err(failed) = self.reopen(tree) {
                    self.journal.fail(failed);
                }
            } else if !open.is_lost() {
                self.journal.fail(e.clone());
            }
        }
        done
    }

    /// After a failed read. Writes made meanwhile are in the journal.
    pub(crate) fn repair(&self) -> Result<()> {
        let mut tree = lock(&self.tree);
        match &*tree {
            Some(tree) if !tree.is_lost() => Ok(()),
            _ => self.reopen(&mut tree),
        }
    }

    /// redb refuses every call after an I/O error, reads too: reopens it, at its last commit.
    fn reopen(&self, tree: &mut Option<Tree>) -> Result<()> {
        let mut state = self.state_mut();
        state.base = Err(Error::unavailable("the state tree is being opened again: its disk failed"));
        *tree = None;
        let opened = Tree::open(self.tree_file.clone(), self.cache_bytes)?;
        state.base = Ok(opened.snapshot()?);
        *tree = Some(opened);
        Ok(())
    }

    /// Keeps the newest files for copies that are behind, one for the next segment, and removes the others.
    fn abandon(&self) -> Result<()> {
        let mut reserve = lock(&self.reserve);
        let sizes = lock(&self.means).sizes;
        // Kept segments never make space short.
        let is_scarce = self.free_bytes()? < 2 * sizes.low_bytes;
        let keep_bytes = if is_scarce { 0 } else { sizes.keep_bytes };
        let most = (keep_bytes / self.shelf.segment_bytes) as usize;
        while reserve.kept.len() > most {
            let Some(Kept { path, bytes, .. }) = reserve.kept.pop_front() else { break };
            if reserve.spare.is_none() && bytes == self.shelf.segment_bytes {
                reserve.spare = Some(path);
            } else {
                let removed = self.shelf.disk.remove_file(&path);
                removed.map_err(|e| Error::from_io(format!("remove the journal {}", path.display()), &e))?;
            }
        }
        Ok(())
    }
}
