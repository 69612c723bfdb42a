//! A node's simulated file system: a tree in memory that knows what a power cut would take.
//!
//! Strict where POSIX is: bytes are durable after the file's `sync_data`, names after their directory's `sync_dir`.
//! A killed process loses nothing that it wrote.

use super::{
    core::SplitMix,
    node::Here,
    pages::{PAGE_BYTES, Pages, pages_of},
};
use crate::{DirEntry, Disk, File, OpenMode, Space, disk::check_direct};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Component, Path},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// What goes wrong with a disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFaults {
    /// Reads that fail with EIO, of a million.
    pub read_errors_per_million: u32,
    /// Writes that fail with EIO, of a million.
    pub write_errors_per_million: u32,
    /// Syncs of files that fail with EIO, of a million; what they should have made durable is lost by a power cut.
    pub sync_errors_per_million: u32,
    /// Writes that are said to be done and are not, of a million.
    pub lost_writes_per_million: u32,
    /// Writes that go to another place of the same file, of a million.
    pub misdirected_writes_per_million: u32,
    /// Lost and misdirected writes happen to files whose names begin so.
    pub silent_in: &'static str,
    /// Added to each piece of blocking work.
    pub delay: Duration,
    /// No piece of blocking work ends, nor begins.
    pub hangs: bool,
}

/// A misdirected write hits the beginning of its file, where there is something.
const MISDIRECTED_PAGES_MAX: u64 = 1024;

type Ino = u64;
const ROOT: Ino = 1;

pub(super) struct DiskState {
    inodes: BTreeMap<Ino, Inode>,
    last_ino: Ino,
    last_handle: u64,
    /// Counts power cuts: handles of an earlier era are closed already.
    era: u64,
    /// Something lost its name since the last sweep.
    unnamed: bool,
    capacity_bytes: u64,
    used_pages: u64,
    pub(super) faults: DiskFaults,
    /// Writes and syncs that failed with EIO.
    pub(super) failed: u64,
    /// Everything that went wrong as told: these, failed reads, silent damage, refusals for want of space.
    pub(super) hits: u64,
    rng: SplitMix,
}

/// A copy of a disk, as an administrator may have made one.
pub struct DiskCopy {
    inodes: BTreeMap<Ino, Inode>,
    last_ino: Ino,
    used_pages: u64,
}

#[derive(Clone)]
struct Inode {
    body: Body,
    /// A name leads here now (there are no hard links).
    named: bool,
    opens: u32,
    lock: Option<u64>,
}

#[derive(Clone)]
enum Body {
    Dir(Dir),
    File(Pages),
}

#[derive(Clone, Default)]
struct Dir {
    live: BTreeMap<String, Ino>,
    durable: BTreeMap<String, Ino>,
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

    /// The process ended: its locks go.
    pub(super) fn unlock_all(&mut self) {
        self.inodes.values_mut().for_each(|i| i.lock = None);
    }

    pub(super) fn power_cut(&mut self) {
        self.unlock_all();
        self.era += 1;
        // Metadata is journaled in order: all of it made it, or (the strict case) only what was synced.
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

    fn lookup(&self, path: &Path) -> io::Result<Ino> {
        names(path)?
            .into_iter()
            .try_fold(ROOT, |at, name| self.dir(at)?.live.get(name).copied().ok_or_else(|| os(libc::ENOENT)))
    }

    fn parent<'p>(&self, path: &'p Path) -> io::Result<(Ino, &'p str)> {
        let mut names = names(path)?;
        let name = names.pop().ok_or_else(|| os(libc::EBUSY))?; // the root itself
        let dir = names.into_iter().try_fold(ROOT, |at, name| {
            self.dir(at)?.live.get(name).copied().ok_or_else(|| os(libc::ENOENT))
        })?;
        self.dir(dir)?;
        Ok((dir, name))
    }

    fn dir(&self, ino: Ino) -> io::Result<&Dir> {
        match &self.inodes[&ino].body {
            Body::Dir(dir) => Ok(dir),
            Body::File(_) => Err(os(libc::ENOTDIR)),
        }
    }

    fn dir_mut(&mut self, ino: Ino) -> io::Result<&mut Dir> {
        match &mut self.inodes.get_mut(&ino).ok_or_else(|| os(libc::ENOENT))?.body {
            Body::Dir(dir) => Ok(dir),
            Body::File(_) => Err(os(libc::ENOTDIR)),
        }
    }

    fn pages_mut(&mut self, ino: Ino) -> io::Result<&mut Pages> {
        match self.inodes.get_mut(&ino).map(|i| &mut i.body) {
            Some(Body::File(pages)) => Ok(pages),
            Some(Body::Dir(_)) => Err(os(libc::EISDIR)),
            None => Err(os(libc::ESTALE)),
        }
    }

    fn add(&mut self, dir: Ino, name: &str, body: Body) -> io::Result<Ino> {
        self.last_ino += 1;
        let ino = self.last_ino;
        self.dir_mut(dir)?.live.insert(name.into(), ino);
        self.inodes.insert(ino, Inode { body, named: true, opens: 0, lock: None });
        Ok(ino)
    }

    fn open(&mut self, path: &Path, mode: OpenMode) -> io::Result<Ino> {
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

    /// Changes a file and keeps count of the space it takes.
    fn change<T>(&mut self, ino: Ino, change: impl FnOnce(&mut Pages) -> T) -> io::Result<T> {
        let pages = self.pages_mut(ino)?;
        let before = pages.space.count();
        let result = change(pages);
        let after = pages.space.count();
        self.used_pages = self.used_pages + after - before;
        Ok(result)
    }

    /// Takes space for `offset..offset + len`, or says that there is none.
    fn reserve(&mut self, ino: Ino, offset: u64, len: u64) -> io::Result<()> {
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

    /// An empty disk of the same size, of an era of its own: handles of the old one are closed.
    pub(super) fn replace(&mut self) {
        let era = self.era + 1;
        *self = DiskState {
            era,
            last_handle: self.last_handle,
            ..DiskState::new(self.rng.clone(), self.capacity_bytes)
        };
    }

    /// What is on it now. Its machine is off.
    pub(super) fn copy(&self) -> DiskCopy {
        DiskCopy { inodes: self.inodes.clone(), last_ino: self.last_ino, used_pages: self.used_pages }
    }
    /// An older state of this disk, in an era of its own: handles of the present one are closed.
    pub(super) fn put_back(&mut self, copy: &DiskCopy) {
        self.era += 1;
        self.inodes = copy.inodes.clone();
        self.inodes.values_mut().for_each(|i| (i.opens, i.lock) = (0, None));
        (self.last_ino, self.used_pages) = (copy.last_ino, copy.used_pages);
    }

    /// Where a write really goes.
    fn place_of(&mut self, name: &str, ino: Ino, offset: u64) -> io::Result<Option<u64>> {
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

    fn write(&mut self, ino: Ino, data: &[u8], offset: u64) -> io::Result<()> {
        if self.rng.per_million(self.faults.write_errors_per_million) {
            (self.failed, self.hits) = (self.failed + 1, self.hits + 1);
            return Err(os(libc::EIO));
        }
        self.reserve(ino, offset, data.len() as u64)?;
        self.pages_mut(ino)?.write(data, offset);
        Ok(())
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
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

    fn remove(&mut self, path: &Path, whole_dirs: bool) -> io::Result<()> {
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

    /// No name leads to `ino` any more, nor to what is below it. Its bytes stay while a power cut could bring the name
    /// back, or while it is open; its space is free at once, or at its last close.
    fn unname(&mut self, ino: Ino) {
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

    fn close(&mut self, ino: Ino, handle: u64, era: u64) {
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

    /// Forgets inodes that no name, durable or not, leads to (and, unless the power was cut, that nobody has open).
    fn sweep(&mut self, keep_open: bool) {
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
    fn used_pages(&self) -> u64 {
        match &self.body {
            Body::Dir(_) => 0,
            Body::File(pages) => pages.space.count(),
        }
    }
}

fn os(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

fn names(path: &Path) -> io::Result<Vec<&str>> {
    path.components()
        .filter(|c| !matches!(c, Component::RootDir | Component::CurDir))
        .map(|c| match c {
            Component::Normal(name) => name.to_str().ok_or_else(|| os(libc::EILSEQ)),
            _ => Err(os(libc::EINVAL)),
        })
        .collect()
}

/// A disk as one life of its node sees it (`here`), or as the test harness does.
#[derive(Clone)]
pub(super) struct SimDisk {
    pub(super) here: Option<Here>,
    pub(super) state: Arc<Mutex<DiskState>>,
}

impl SimDisk {
    fn lock(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        if let Some(here) = &self.here {
            here.check_alive()?;
        }
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
    fn trace(&self, event: &str, numbers: &[u64]) {
        if let Some(here) = &self.here {
            let numbers: Vec<u64> = [here.node as u64].iter().chain(numbers).copied().collect();
            here.trace(event, &numbers);
        }
    }
}

impl Disk for SimDisk {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        let mut state = self.lock()?;
        let ino = state.open(path, mode)?;
        state.last_handle += 1;
        let (handle, era) = (state.last_handle, state.era);
        drop(state);
        let name = names(path)?.last().copied().unwrap_or_default().to_owned();
        Ok(Arc::new(SimFile { disk: self.clone(), name, ino, handle, era, mode }))
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        let mut state = self.lock()?;
        let mut at = ROOT;
        for name in names(path)? {
            at = match state.dir(at)?.live.get(name).copied() {
                Some(ino) => ino,
                None => state.add(at, name, Body::Dir(Dir::default()))?,
            };
        }
        state.dir(at).map(|_| ()).map_err(|_| os(libc::EEXIST))
    }
    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let state = self.lock()?;
        let dir = state.dir(state.lookup(path)?)?;
        let entry = |(name, ino): (&String, &Ino)| DirEntry {
            name: name.clone(),
            is_dir: matches!(state.inodes[ino].body, Body::Dir(_)),
        };
        Ok(dir.live.iter().map(entry).collect())
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.lock()?.rename(from, to)?;
        self.trace("rename", &[]);
        Ok(())
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.lock()?.remove(path, false)?;
        self.trace("remove", &[]);
        Ok(())
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.lock()?.remove(path, true)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.lock()?;
        let ino = state.lookup(path)?;
        let dir = state.dir_mut(ino)?;
        dir.durable = dir.live.clone();
        if state.unnamed {
            state.sweep(true);
        }
        drop(state);
        self.trace("sync dir", &[ino]);
        Ok(())
    }
    fn exists(&self, path: &Path) -> bool {
        self.lock().and_then(|state| state.lookup(path)).is_ok()
    }
    fn space(&self, path: &Path) -> io::Result<Space> {
        let state = self.lock()?;
        state.lookup(path)?;
        let total = state.capacity_bytes;
        Ok(Space { total, free: total.saturating_sub(state.used_pages * PAGE_BYTES) })
    }
}

struct SimFile {
    disk: SimDisk,
    /// When it was opened.
    name: String,
    ino: Ino,
    handle: u64,
    era: u64,
    mode: OpenMode,
}

impl SimFile {
    fn check(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.mode.direct { check_direct(bytes, offset) } else { Ok(()) }
    }
    /// The disk, for a change.
    fn lock_for_change(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        if self.mode.write { self.disk.lock() } else { Err(os(libc::EBADF)) }
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.check(buf, offset)?;
        let mut state = self.disk.lock()?;
        let chance = state.faults.read_errors_per_million;
        if state.rng.per_million(chance) {
            state.hits += 1;
            return Err(os(libc::EIO));
        }
        Ok(state.pages_mut(self.ino)?.read(buf, offset))
    }
    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_vectored_at(&[data], offset)
    }
    fn write_all_vectored_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        for part in parts {
            self.check(part, offset)?;
        }
        let mut state = self.lock_for_change()?;
        let place = state.place_of(&self.name, self.ino, offset)?;
        let mut at = place.unwrap_or(offset);
        for part in parts {
            if place.is_some() {
                state.write(self.ino, part, at)?;
            }
            at += part.len() as u64;
        }
        drop(state);
        self.disk.trace(
            "write",
            &[self.ino, offset, at - place.unwrap_or(offset), u64::from(place == Some(offset))],
        );
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.lock()?;
        let chance = state.faults.sync_errors_per_million;
        let failed = state.rng.per_million(chance);
        state.failed += u64::from(failed);
        state.hits += u64::from(failed);
        let pages = state.pages_mut(self.ino)?;
        if failed {
            pages.fail_sync();
        } else {
            pages.sync();
        }
        drop(state);
        self.disk.trace("sync", &[self.ino, u64::from(failed)]);
        if failed { Err(os(libc::EIO)) } else { Ok(()) }
    }
    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.lock()?.pages_mut(self.ino)?.len)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.lock_for_change()?.change(self.ino, |pages| pages.set_len(len))
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Err(os(libc::EINVAL));
        }
        let mut state = self.lock_for_change()?;
        state.reserve(self.ino, offset, len)?;
        let pages = state.pages_mut(self.ino)?;
        pages.len = pages.len.max(offset + len);
        Ok(())
    }
    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Err(os(libc::EINVAL));
        }
        self.lock_for_change()?.change(self.ino, |pages| {
            pages.zero(offset, (offset + len).min(pages.len.next_multiple_of(PAGE_BYTES)));
            pages.space.remove(offset.div_ceil(PAGE_BYTES), (offset + len) / PAGE_BYTES);
        })
    }
    fn try_lock(&self) -> io::Result<()> {
        let mut state = self.disk.lock()?;
        let inode = state.inodes.get_mut(&self.ino).ok_or_else(|| os(libc::ESTALE))?;
        match inode.lock {
            Some(holder) if holder != self.handle => Err(io::ErrorKind::WouldBlock.into()),
            _ => {
                inode.lock = Some(self.handle);
                Ok(())
            }
        }
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        self.disk.state.lock().unwrap_or_else(PoisonError::into_inner).close(self.ino, self.handle, self.era);
    }
}
