//! The contents of a simulated disk: a tree in memory that tracks which data a power cut would lose.
//!
//! As strict as POSIX: bytes are durable after the sync of their file, names after that of their directory.
use super::pages::{PAGE_BYTES, Pages, pages_of};
use super::rng::SplitMix;
use crate::OpenMode;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path};
use std::time::Duration;

/// Faults of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskFaults {
    /// Reads that fail with EIO, per million.
    pub read_errors_per_million: u32,
    /// Writes that fail with EIO, per million.
    pub write_errors_per_million: u32,
    /// Syncs of files that fail with EIO, per million; a power cut loses the data that they should have made
    /// durable.
    pub sync_errors_per_million: u32,
    /// Writes that are acknowledged and dropped, per million.
    pub lost_writes_per_million: u32,
    /// Writes that go to another offset of the same file, per million.
    pub misdirected_writes_per_million: u32,
    /// Lost and misdirected writes affect only files whose names have this prefix.
    pub silent_in: &'static str,
    /// Added to each blocking task.
    pub delay: Duration,
    /// No blocking task starts or completes.
    pub hangs: bool,
}

impl DiskFaults {
    pub(super) fn is_any(&self) -> bool {
        *self != DiskFaults::default()
    }
}

/// A misdirected write hits the beginning of its file, which has data.
const MISDIRECTED_PAGES_MAX: u64 = 1024;

pub(super) type Ino = u64;

pub(super) const ROOT: Ino = 1;

pub(super) struct DiskState {
    pub(super) inodes: BTreeMap<Ino, Inode>,
    pub(super) last_ino: Ino,
    pub(super) last_handle: u64,
    /// Number of power cuts: handles of an earlier era are closed.
    pub(super) era: u64,
    /// An inode lost its name since the last sweep.
    pub(super) unnamed: bool,
    pub(super) capacity_bytes: u64,
    pub(super) used_pages: u64,
    pub(super) faults: DiskFaults,
    /// Writes and syncs that failed with EIO.
    pub(super) failed: u64,
    /// Number of faults that took effect: these, failed reads, silent damage, refusals for lack of space.
    pub(super) hits: u64,
    pub(super) rng: SplitMix,
}

/// A copy of a disk, such as an administrator may have made.
pub struct DiskCopy {
    inodes: BTreeMap<Ino, Inode>,
    last_ino: Ino,
    used_pages: u64,
}

#[derive(Clone)]
pub(super) struct Inode {
    pub(super) body: Body,
    /// A name leads to it (there are no hard links).
    pub(super) named: bool,
    pub(super) opens: u32,
    pub(super) lock: Option<u64>,
}

#[derive(Clone)]
pub(super) enum Body {
    Dir(Dir),
    File(Pages),
}

#[derive(Clone, Default)]
pub(super) struct Dir {
    pub(super) live: BTreeMap<String, Ino>,
    pub(super) durable: BTreeMap<String, Ino>,
}

impl DiskState {
    pub(super) fn new(rng: SplitMix, capacity_bytes: u64) -> DiskState {
        let root = Inode { body: Body::Dir(Dir::default()), named: true, opens: 0, lock: None };
        DiskState {
            inodes: BTreeMap::from([(ROOT, root)]),
            last_ino: ROOT,
            last_handle: 0,
            era: 0,
            unnamed: false,
            capacity_bytes,
            used_pages: 0,
            faults: DiskFaults::default(),
            failed: 0,
            hits: 0,
            rng,
        }
    }

    pub(super) fn set_capacity(&mut self, bytes: u64) {
        self.capacity_bytes = bytes;
    }

    /// The process ended: its locks are released.
    pub(super) fn unlock_all(&mut self) {
        self.inodes.values_mut().for_each(|i| i.lock = None);
    }

    pub(super) fn power_cut(&mut self) {
        self.unlock_all();
        self.era += 1;
        // Metadata is journaled in order: all of it survived, or (the strict case) only the synced part.
        let names_kept = self.rng.below(3) == 0;
        for inode in self.inodes.values_mut() {
            match &mut inode.body {
                Body::Dir(dir) if names_kept => dir.durable = dir.live.clone(),
                Body::Dir(dir) => dir.live = dir.durable.clone(),
                Body::File(pages) => pages.power_cut(&mut self.rng),
            }
        }
        self.sweep(false);
        self.used_pages = self.inodes.values().map(Inode::used_pages).sum();
    }

    pub(super) fn flip_bit(&mut self, path: &Path, offset: u64, bit: u8) -> io::Result<()> {
        let ino = self.lookup(path)?;
        let pages = self.pages_mut(ino)?;
        if offset >= pages.len {
            return Err(os(libc::EINVAL));
        }
        pages.flip_bit(offset, bit);
        Ok(())
    }

    pub(super) fn lookup(&self, path: &Path) -> io::Result<Ino> {
        names(path)?
            .into_iter()
            .try_fold(ROOT, |at, name| self.dir(at)?.live.get(name).copied().ok_or_else(|| os(libc::ENOENT)))
    }

    pub(super) fn parent<'p>(&self, path: &'p Path) -> io::Result<(Ino, &'p str)> {
        let mut names = names(path)?;
        let name = names.pop().ok_or_else(|| os(libc::EBUSY))?; // the root itself
        let dir = names.into_iter().try_fold(ROOT, |at, name| {
            self.dir(at)?.live.get(name).copied().ok_or_else(|| os(libc::ENOENT))
        })?;
        self.dir(dir)?;
        Ok((dir, name))
    }

    pub(super) fn dir(&self, ino: Ino) -> io::Result<&Dir> {
        match &self.inodes[&ino].body {
            Body::Dir(dir) => Ok(dir),
            Body::File(_) => Err(os(libc::ENOTDIR)),
        }
    }

    pub(super) fn dir_mut(&mut self, ino: Ino) -> io::Result<&mut Dir> {
        match &mut self.inodes.get_mut(&ino).ok_or_else(|| os(libc::ENOENT))?.body {
            Body::Dir(dir) => Ok(dir),
            Body::File(_) => Err(os(libc::ENOTDIR)),
        }
    }

    pub(super) fn pages_mut(&mut self, ino: Ino) -> io::Result<&mut Pages> {
        match self.inodes.get_mut(&ino).map(|i| &mut i.body) {
            Some(Body::File(pages)) => Ok(pages),
            Some(Body::Dir(_)) => Err(os(libc::EISDIR)),
            None => Err(os(libc::ESTALE)),
        }
    }

    pub(super) fn add(&mut self, dir: Ino, name: &str, body: Body) -> io::Result<Ino> {
        self.last_ino += 1;
        let ino = self.last_ino;
        self.dir_mut(dir)?.live.insert(name.into(), ino);
        self.inodes.insert(ino, Inode { body, named: true, opens: 0, lock: None });
        Ok(ino)
    }

    pub(super) fn open(&mut self, path: &Path, mode: OpenMode) -> io::Result<Ino> {
        let (dir, name) = self.parent(path)?;
        let ino = match self.dir(dir)?.live.get(name).copied() {
            Some(_) if mode.create && mode.exclusive => return Err(os(libc::EEXIST)),
            Some(ino) => ino,
            None if mode.create => self.add(dir, name, Body::File(Pages::default()))?,
            None => return Err(os(libc::ENOENT)),
        };
        self.pages_mut(ino)?;
        if mode.truncate {
            self.change(ino, |pages| pages.set_len(0))?;
        }
        self.inodes.get_mut(&ino).expect("just found").opens += 1;
        Ok(ino)
    }

    /// Changes a file and updates the used space.
    pub(super) fn change<T>(&mut self, ino: Ino, change: impl FnOnce(&mut Pages) -> T) -> io::Result<T> {
        let pages = self.pages_mut(ino)?;
        let before = pages.space.count();
        let result = change(pages);
        let after = pages.space.count();
        self.used_pages = self.used_pages + after - before;
        Ok(result)
    }

    /// Takes space for `offset..offset + len`, or fails if there is none.
    pub(super) fn reserve(&mut self, ino: Ino, offset: u64, len: u64) -> io::Result<()> {
        let (start, end) = pages_of(offset, len);
        let free = (self.capacity_bytes / PAGE_BYTES).saturating_sub(self.used_pages);
        let added = end - start - self.pages_mut(ino)?.space.count_in(start, end);
        if added > free {
            self.hits += 1;
            return Err(os(libc::ENOSPC));
        }
        self.pages_mut(ino)?.space.insert(start, end);
        self.used_pages += added;
        Ok(())
    }

    /// An empty disk of the same size, with a new era: handles of the old one are closed.
    pub(super) fn replace(&mut self) {
        let era = self.era + 1;
        *self = DiskState {
            era,
            last_handle: self.last_handle,
            ..DiskState::new(self.rng.clone(), self.capacity_bytes)
        };
    }

    /// The present contents. Its machine is off.
    pub(super) fn copy(&self) -> DiskCopy {
        DiskCopy { inodes: self.inodes.clone(), last_ino: self.last_ino, used_pages: self.used_pages }
    }
    /// An older state of this disk, with a new era: handles of the present one are closed.
    pub(super) fn put_back(&mut self, copy: &DiskCopy) {
        self.era += 1;
        self.inodes = copy.inodes.clone();
        self.inodes.values_mut().for_each(|i| (i.opens, i.lock) = (0, None));
        (self.last_ino, self.used_pages) = (copy.last_ino, copy.used_pages);
    }

    /// The actual offset of a write.
    pub(super) fn place_of(&mut self, name: &str, ino: Ino, offset: u64) -> io::Result<Option<u64>> {
        let faults = self.faults;
        if !name.starts_with(faults.silent_in) {
            return Ok(Some(offset));
        }
        if self.rng.per_million(faults.lost_writes_per_million) {
            self.hits += 1;
            return Ok(None);
        }
        if !self.rng.per_million(faults.misdirected_writes_per_million) {
            return Ok(Some(offset));
        }
        let pages = self.pages_mut(ino)?.len / PAGE_BYTES;
        self.hits += 1;
        Ok(Some(self.rng.below(pages.min(MISDIRECTED_PAGES_MAX)) * PAGE_BYTES))
    }

    pub(super) fn write(&mut self, ino: Ino, data: &[u8], offset: u64) -> io::Result<()> {
        if self.rng.per_million(self.faults.write_errors_per_million) {
            (self.failed, self.hits) = (self.failed + 1, self.hits + 1);
            return Err(os(libc::EIO));
        }
        self.reserve(ino, offset, data.len() as u64)?;
        self.pages_mut(ino)?.write(data, offset);
        Ok(())
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let (from_dir, from_name) = self.parent(from)?;
        let (to_dir, to_name) = self.parent(to)?;
        let moved = *self.dir(from_dir)?.live.get(from_name).ok_or_else(|| os(libc::ENOENT))?;
        let moved_is_dir = matches!(self.inodes[&moved].body, Body::Dir(_));
        if moved_is_dir && names(to)?.starts_with(&names(from)?) && names(to)? != names(from)? {
            return Err(os(libc::EINVAL));
        }
        match self.dir(to_dir)?.live.get(to_name).copied() {
            Some(old) if old == moved => return Ok(()),
            Some(old) => {
                match (&self.inodes[&old].body, moved_is_dir) {
                    (Body::Dir(_), false) => return Err(os(libc::EISDIR)),
                    (Body::File(_), true) => return Err(os(libc::ENOTDIR)),
                    (Body::Dir(dir), true) if !dir.live.is_empty() => return Err(os(libc::ENOTEMPTY)),
                    _ => {}
                }
                self.unname(old);
            }
            None => {}
        }
        self.dir_mut(from_dir)?.live.remove(from_name);
        self.dir_mut(to_dir)?.live.insert(to_name.into(), moved);
        Ok(())
    }

    pub(super) fn remove(&mut self, path: &Path, whole_dirs: bool) -> io::Result<()> {
        let (dir, name) = self.parent(path)?;
        let ino = *self.dir(dir)?.live.get(name).ok_or_else(|| os(libc::ENOENT))?;
        match (&self.inodes[&ino].body, whole_dirs) {
            (Body::Dir(_), false) => return Err(os(libc::EISDIR)),
            (Body::File(_), true) => return Err(os(libc::ENOTDIR)),
            _ => {}
        }
        self.dir_mut(dir)?.live.remove(name);
        self.unname(ino);
        Ok(())
    }

    /// No name leads to `ino` any more, nor to its entries. Its bytes stay while a power cut could restore
    /// the name, or while it is open; its space is free at once, or at its last close.
    pub(super) fn unname(&mut self, ino: Ino) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.named = false;
        self.unnamed = true;
        let below = match &mut inode.body {
            Body::Dir(dir) => std::mem::take(&mut dir.live).into_values().collect(),
            Body::File(pages) => {
                if inode.opens == 0 {
                    self.used_pages -= pages.space.count();
                }
                Vec::new()
            }
        };
        below.into_iter().for_each(|child| self.unname(child));
    }

    pub(super) fn close(&mut self, ino: Ino, handle: u64, era: u64) {
        if era != self.era {
            return;
        }
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.opens -= 1;
        if inode.lock == Some(handle) {
            inode.lock = None;
        }
        if !inode.named && inode.opens == 0 {
            self.used_pages -= inode.used_pages();
        }
    }

    /// Frees inodes that no name, durable or not, leads to (and, unless the power was cut, that are not
    /// open).
    pub(super) fn sweep(&mut self, keep_open: bool) {
        let mut reached = BTreeSet::from([ROOT]);
        let mut todo = vec![ROOT];
        if keep_open {
            reached.extend(self.inodes.iter().filter(|(_, i)| i.opens > 0).map(|(ino, _)| *ino));
        }
        while let Some(ino) = todo.pop() {
            if let Some(Inode { body: Body::Dir(dir), .. }) = self.inodes.get(&ino) {
                todo.extend(dir.live.values().chain(dir.durable.values()).filter(|i| reached.insert(**i)));
            }
        }
        self.inodes.retain(|ino, _| reached.contains(ino));
        self.unnamed = false;
        if !keep_open {
            for inode in self.inodes.values_mut() {
                (inode.named, inode.opens) = (true, 0);
            }
        }
    }
}

impl Inode {
    pub(super) fn used_pages(&self) -> u64 {
        match &self.body {
            Body::Dir(_) => 0,
            Body::File(pages) => pages.space.count(),
        }
    }
}

pub(super) fn os(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

pub(super) fn names(path: &Path) -> io::Result<Vec<&str>> {
    path.components()
        .filter(|c| !matches!(c, Component::RootDir | Component::CurDir))
        .map(|c| match c {
            Component::Normal(name) => name.to_str().ok_or_else(|| os(libc::EILSEQ)),
            _ => Err(os(libc::EINVAL)),
        })
        .collect()
}
