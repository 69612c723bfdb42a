//! A node's simulated file system: a tree in memory that tracks which data a power cut would lose.
//!
//! As strict as POSIX: bytes are durable after the file's `sync_data`, names after their directory's
//! `sync_dir`. A killed process loses none of its writes.

use super::disk_state::{Body, Dir, DiskState, Ino, ROOT, names, os};
use super::node::Here;
use super::pages::PAGE_BYTES;
use crate::disk::check_direct;
use crate::{DirEntry, Disk, File, OpenMode, Space};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A disk as seen by one process of its node (`here`), or by the test harness.
#[derive(Clone)]
pub(super) struct SimDisk {
    pub(super) here: Option<Here>,
    pub(super) state: Arc<Mutex<DiskState>>,
}

impl SimDisk {
    pub fn lock(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        if let Some(here) = &self.here {
            here.check_alive()?;
        }
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
    /// A process of the node reads, writes or syncs this number of bytes.
    fn call(&self, bytes: usize) {
        if let Some(here) = &self.here {
            here.core.lock().nodes[here.node].call(bytes);
        }
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
    fn file_system(&self, path: &Path) -> io::Result<u64> {
        self.lock()?.lookup(path).map(|_| 1)
    }
}

struct SimFile {
    disk: SimDisk,
    /// Its name when it was opened.
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
        self.disk.call(buf.len());
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
        self.disk.call(parts.iter().map(|part| part.len()).sum());
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
        self.disk.call(0);
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
