//! The open files of this client.
//!
//! Invariant: a handle reports every write error of its lifetime once to an `fsync` and once to a `close`;
//! one whose locks were lost does nothing any more.
use crate::accesses::Accesses;
use crate::inode::{Inode, State};
use crate::types::{Handle, OpenMode, Opened, Stat};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use weir_proto::{Error, InodeId, Result};

pub struct Handles {
    accesses: Arc<Accesses>,
    table: Mutex<HashMap<u64, Arc<OpenFile>>>,
    next: AtomicU64,
}

/// One open of a file.
pub struct OpenFile {
    pub inode: Arc<Inode>,
    pub mode: OpenMode,
    /// Write-back errors of the inode that an `fsync` of this handle has reported, or that are older than the
    /// handle.
    errors_synced: AtomicU64,
    /// Those that a `close` has reported.
    errors_closed: AtomicU64,
    /// The kernel keeps pages for this handle.
    kernel_cache: AtomicBool,
    /// Its open made the kernel drop the pages of this number of earlier leases.
    dropped_pages: OnceLock<u64>,
    /// Its reads leave the access time as it is.
    leaves_access_time: AtomicBool,
    /// The thread that opened it, by the kernel's number; 0: not known.
    opener: AtomicU32,
    /// The kernel does not announce its close.
    closes_quietly: AtomicBool,
    /// The reason why this handle does nothing any more.
    broken: OnceLock<Error>,
}

impl Handles {
    pub fn new(accesses: Arc<Accesses>) -> Handles {
        Handles { accesses, table: Mutex::default(), next: AtomicU64::new(1) }
    }
    fn table(&self) -> MutexGuard<'_, HashMap<u64, Arc<OpenFile>>> {
        self.table.lock().expect("no holder panics")
    }

    /// A handle of an open that the leader has counted.
    pub fn begin(&self, inode: Arc<Inode>, mode: OpenMode, stat: Stat) -> Opened {
        let (errors, kernel_cache, old_pages) = {
            let st = inode.lock();
            // The client does not see a read from pages: if one would change the access time, the pages are
            // dropped, too.
            let unseen = mode.read && self.accesses.awaits(&st);
            (st.errors.count(), st.lease.is_held(), st.pages.may_hold_old() || unseen)
        };
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let file = OpenFile {
            inode,
            mode,
            errors_synced: AtomicU64::new(errors),
            errors_closed: AtomicU64::new(errors),
            kernel_cache: AtomicBool::new(kernel_cache),
            dropped_pages: OnceLock::new(),
            leaves_access_time: AtomicBool::new(false),
            closes_quietly: AtomicBool::new(false),
            opener: AtomicU32::new(0),
            broken: OnceLock::new(),
        };
        self.table().insert(handle, Arc::new(file));
        Opened { handle: Handle(handle), stat, kernel_cache, old_pages }
    }
    pub fn get(&self, handle: Handle) -> Result<Arc<OpenFile>> {
        let file = self.open_file(handle);
        let file = file.ok_or_else(|| Error::stale(format!("file handle {} is closed", handle.0)))?;
        file.works()?;
        Ok(file)
    }
    /// Even of a handle that does nothing any more.
    pub fn open_file(&self, handle: Handle) -> Option<Arc<OpenFile>> {
        self.table().get(&handle.0).cloned()
    }
    /// The open file of a handle, if one is given for that inode.
    pub fn of(&self, handle: Option<Handle>, ino: InodeId) -> Result<Option<Arc<OpenFile>>> {
        let Some(handle) = handle else { return Ok(None) };
        let file = self.get(handle)?;
        if file.inode.ino != ino {
            return Err(Error::invalid(format!("file handle {} is of another file than {ino}", handle.0)));
        }
        Ok(Some(file))
    }
    pub fn end(&self, handle: Handle) -> Result<Arc<OpenFile>> {
        let file = self.table().remove(&handle.0);
        let file = file.ok_or_else(|| Error::stale(format!("file handle {} is closed already", handle.0)))?;
        if let Some(leases_lost) = file.dropped_pages.get() {
            file.inode.lock().pages.note_dropped(*leases_lost);
        }
        Ok(file)
    }

    pub fn note_pages(&self, handle: Handle, kept: bool) {
        if let Ok(file) = self.get(handle) {
            file.kernel_cache.store(kept, Ordering::Relaxed);
        }
    }
    pub fn note_dropped_pages(&self, handle: Handle) {
        if let Ok(file) = self.get(handle) {
            let _ = file.dropped_pages.set(file.inode.lock().pages.leases_lost()); // opened once
        }
    }
    pub fn leave_access_time(&self, handle: Handle) {
        if let Ok(file) = self.get(handle) {
            file.leaves_access_time.store(true, Ordering::Relaxed);
        }
    }
    pub fn set_opener(&self, handle: Handle, thread: u32) {
        if let Ok(file) = self.get(handle) {
            file.opener.store(thread, Ordering::Relaxed);
        }
    }
    pub fn opener(&self, handle: Handle) -> Option<u32> {
        let file = self.get(handle).ok().filter(|file| file.mode.write)?;
        Some(file.opener.load(Ordering::Relaxed)).filter(|thread| *thread != 0)
    }
    /// Whether a close of this file needs no work; it is not announced then.
    pub fn close_quietly(&self, handle: Handle) -> bool {
        self.open_file(handle).is_some_and(|file| {
            let quietly = !file.mode.write && !file.inode.lock().opens.closes_unlock();
            file.closes_quietly.store(quietly, Ordering::Relaxed);
            quietly
        })
    }
}

impl OpenFile {
    /// Waiting calls check again before they write: a lock that protected the write may have been lost
    /// meanwhile.
    pub fn works(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |e| Err(e.clone()))
    }
    /// From now on it does nothing. The first reason stays.
    pub fn break_off(&self, why: Error) {
        let _ = self.broken.set(why);
    }
    pub fn keeps_pages(&self) -> bool {
        self.kernel_cache.load(Ordering::Relaxed)
    }
    pub fn leaves_access_time(&self) -> bool {
        self.leaves_access_time.load(Ordering::Relaxed)
    }
    pub fn closes_quietly(&self) -> bool {
        self.closes_quietly.load(Ordering::Relaxed)
    }
    /// A write-back error that neither an `fsync` nor a `close` of this handle has reported yet. It stays
    /// unreported here: the kernel may lose the error of a write, because it returns a short count for a long
    /// write whose later part fails.
    pub fn new_error(&self, st: &State) -> Result<()> {
        let reported =
            self.errors_synced.load(Ordering::Acquire).max(self.errors_closed.load(Ordering::Acquire));
        error_since(reported, st)
    }
    /// For an `fsync`, which reports again what a `close` of a copy of the descriptor may have reported
    /// already.
    pub fn report_synced(&self, st: &State) -> Result<()> {
        error_since(self.errors_synced.swap(st.errors.count(), Ordering::AcqRel), st)
    }
    /// For a `close`.
    pub fn report_closed(&self, st: &State) -> Result<()> {
        let news = self.new_error(st);
        self.errors_closed.store(st.errors.count(), Ordering::Release);
        news
    }
}

fn error_since(reported: u64, st: &State) -> Result<()> {
    st.errors.since(reported).map_or(Ok(()), |e| Err(e.clone()))
}
