//! Slab files: the bytes of fragments and of large overlays, always written to free space and never over
//! existing data.
//!
//! Invariant: an extent is reused only after the commit that dropped it is durable and every read that began
//! before that commit has ended. Writes are direct and in whole units (the kernel keeps its pages in line
//! with them); reads are direct too, except of parts that are read repeatedly. A sync covers every write that
//! ended before it began, so concurrent writers share one. Calls block: they are made through
//! `Tasks::blocking`.
//!
//! Knows nothing of the index: the caller knows what an extent holds.
use crate::alloc::{Extent, FreeMap, Geometry, UNIT_BYTES, round_up};
use crate::read_frequency::ReadFrequency;
use crate::traffic::Traffic;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use sync::Slab;
use weir_env::{Buf, BufferPool, Disk, File, OpenMode, Space, Tasks};
use weir_kv::CommitSeq;
use weir_proto::{Error, Result, TargetId};
use weir_watch::Watch;

mod sync;

/// Idle steps kept for the next writes instead of being returned to the file system.
const IDLE_STEPS_KEPT: usize = 2;
/// A step is not taken from a file system that would have less than this left: the journal must still be able
/// to record deletes.
const RESERVE_BYTES: u64 = 64 << 20;
/// This part of the file system is not for new data: repairs of lost targets and seals use it.
const UPKEEP_SHARE: u64 = 100;

/// The bytes of a file system that steps of this size could take for new data.
pub fn available(space: Space, step_bytes: u64) -> u64 {
    let kept = reserve(space) + space.total / UPKEEP_SHARE;
    space.free.saturating_sub(kept) / step_bytes * step_bytes
}

fn reserve(space: Space) -> u64 {
    RESERVE_BYTES.min(space.total / 16)
}

/// Purpose for which space is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    NewData,
    /// Repairs, moves of places, seals.
    Upkeep,
}

pub struct Slabs {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    geometry: Geometry,
    buffers: BufferPool,
    files: Mutex<BTreeMap<u32, Arc<Slab>>>,
    read_frequency: Mutex<ReadFrequency>,
    /// Held while steps are taken from the file system or returned to it: for as long as a disk hangs.
    stepping: Mutex<()>,
    /// Never held during disk work: heartbeats read it.
    space: Mutex<SpaceState>,
    /// The file system refused a step although more than that was free: the bytes free then, and the error.
    not_grown: Mutex<Option<(u64, Error)>>,
    /// None: nothing is counted.
    traffic: Option<Arc<Traffic>>,
}

struct SpaceState {
    map: FreeMap,
    /// Extents whose drop is committed, oldest first, with the reads that may still use them.
    dropped: VecDeque<(CommitSeq, u64, Vec<Extent>)>,
    dropped_bytes: u64,
    next_read: u64,
    reads: BTreeMap<u64, ()>,
}

/// While it lives, no extent that the index named at its creation is reused.
pub struct ReadGuard {
    slabs: Arc<Slabs>,
    number: u64,
}
impl Drop for ReadGuard {
    fn drop(&mut self) {
        let known = lock(&self.slabs.space).reads.remove(&self.number);
        assert!(known.is_some(), "a read ended that had not begun: its extents may have been reused");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slabs {
    /// Opens a directory whose index names `extents`. Space that no extent names is returned to the file
    /// system.
    pub fn open(
        disk: Arc<dyn Disk>,
        buffers: BufferPool,
        dir: &Path,
        geometry: Geometry,
        extents: Vec<Extent>,
    ) -> Result<Slabs> {
        let named: BTreeSet<u32> =
            extents.iter().filter(|e| e.len > 0).map(|e| geometry.slab_of(e.addr)).collect();
        let slabs = Slabs::over(disk, buffers, dir, geometry, FreeMap::rebuild(geometry, extents)?);
        for path in named.into_iter().map(|number| slabs.path(number)) {
            if !slabs.disk.exists(&path) {
                return Err(Error::damaged(format!(
                    "the slab {} is missing, and the index names bytes in it",
                    path.display()
                ))
                .hint("mount or restore what is missing, or replace the target"));
            }
        }
        slabs.return_unused()?;
        Ok(slabs)
    }

    /// Counts reads and writes from now on.
    pub fn count(&mut self, watch: &Watch, target: TargetId) {
        self.traffic = Some(Arc::new(Traffic::new(watch, target)));
    }

    /// Read-only: no space is taken or returned.
    pub fn view(disk: Arc<dyn Disk>, buffers: BufferPool, dir: &Path, geometry: Geometry) -> Result<Slabs> {
        Ok(Slabs::over(disk, buffers, dir, geometry, FreeMap::rebuild(geometry, Vec::new())?))
    }

    fn over(disk: Arc<dyn Disk>, buffers: BufferPool, dir: &Path, geometry: Geometry, map: FreeMap) -> Slabs {
        Slabs {
            disk,
            dir: dir.into(),
            geometry,
            buffers,
            files: Mutex::default(),
            read_frequency: Mutex::default(),
            traffic: None,
            stepping: Mutex::default(),
            not_grown: Mutex::default(),
            space: Mutex::new(SpaceState {
                map,
                dropped: VecDeque::new(),
                dropped_bytes: 0,
                next_read: 0,
                reads: BTreeMap::new(),
            }),
        }
    }

    /// Writes `data` to a fresh extent and makes it durable. On error nothing is kept.
    pub fn store(&self, data: &[u8], durable: CommitSeq, purpose: Purpose) -> Result<Extent> {
        let extent = self.place(data, durable, purpose)?;
        self.sync_placed(extent).map(|()| extent)
    }

    /// Writes `data` to a fresh extent. It is durable after `sync_placed`. On error nothing is kept.
    pub fn place(&self, data: &[u8], durable: CommitSeq, purpose: Purpose) -> Result<Extent> {
        if data.is_empty() {
            return Ok(Extent::default());
        }
        let extent = self.take(data.len() as u32, durable, purpose)?;
        assert!(data.len() <= extent.len as usize, "bytes would be written beyond their extent");
        self.write(extent, data).inspect_err(|_| self.forget(extent))?;
        Ok(extent)
    }

    /// Makes what was placed durable; blocks. On error it is forgotten.
    pub fn sync_placed(&self, extent: Extent) -> Result<()> {
        match extent.len {
            0 => Ok(()),
            _ => self.sync(extent).inspect_err(|_| self.forget(extent)),
        }
    }

    /// Makes it durable without holding a thread. A caller that waited for another one's sync continues on
    /// the thread that synced, if that is one for disks.
    pub async fn synced(&self, extent: Extent, tasks: &Tasks) -> Result<()> {
        if extent.len == 0 {
            return Ok(());
        }
        let slab = self.slab(self.geometry.slab_of(extent.addr), false)?;
        let failed = |e: io::Error| {
            self.forget(extent);
            self.error("sync", extent.addr, &e)
        };
        // One that others let wait leaves their thread to what they do next.
        let (mine, mut here) = (slab.ticket(), tasks.may_block());
        let ended = std::future::poll_fn(|cx| slab.poll_turn(mine, cx, &mut here)).await;
        let synced = match (ended.map_err(failed)?, here) {
            (true, _) => return Ok(()),
            (false, true) => slab.sync_for(mine, self.traffic.as_deref()),
            (false, false) => {
                let (slab, traffic) = (slab.clone(), self.traffic.clone());
                tasks.blocking(move || slab.sync_queued(mine, traffic.as_deref())).await
            }
        };
        synced.map_err(failed)
    }

    /// Frees an extent that no commit ever named.
    pub fn forget(&self, extent: Extent) {
        lock(&self.space).map.free(extent);
    }

    /// Frees extents that commit `seq` dropped, as soon as it is durable and no read uses them.
    pub fn drop_after(&self, seq: CommitSeq, extents: Vec<Extent>) {
        if extents.iter().all(|e| e.len == 0) {
            return;
        }
        let mut space = lock(&self.space);
        space.dropped_bytes += extents.iter().map(|e| u64::from(e.len)).sum::<u64>();
        let barrier = space.next_read;
        space.dropped.push_back((seq, barrier, extents));
    }

    /// Reuses the extents that may be reused now, and returns idle space to the file system.
    pub fn reclaim(&self, durable: CommitSeq) -> Result<()> {
        // A step is not taken again before it is returned.
        let _stepping = lock(&self.stepping);
        lock(&self.space).reclaim(durable);
        loop {
            let Some(step) = lock(&self.space).map.retire_step(IDLE_STEPS_KEPT) else { return Ok(()) };
            let at = step * self.geometry.step_bytes;
            let slab = self.slab(self.geometry.slab_of(at), false)?;
            slab.file
                .punch(self.geometry.offset_in_slab(at), self.geometry.step_bytes)
                .map_err(|e| self.error("return space of", at, &e))?;
        }
    }

    /// Call before the look-up in the index.
    pub fn begin_read(self: &Arc<Self>) -> ReadGuard {
        let mut space = lock(&self.space);
        let number = space.next_read;
        space.next_read += 1;
        space.reads.insert(number, ());
        drop(space);
        ReadGuard { slabs: self.clone(), number }
    }

    /// Reads `len` bytes from `offset` (a whole number of units) of an extent.
    pub fn read(&self, extent: Extent, offset: u32, len: u32) -> Result<Buf> {
        if !offset.is_multiple_of(UNIT_BYTES) || u64::from(offset) + u64::from(len) > u64::from(extent.len) {
            return Err(Error::damaged(format!("{len} bytes at {offset} are not inside of {extent:?}")));
        }
        let mut buf = self.buffers.get(round_up(len) as usize);
        let number = self.geometry.slab_of(extent.addr);
        let slab = self.slab(number, false)?;
        let hot = lock(&self.read_frequency).note(extent.addr + u64::from(offset));
        let file = if hot { self.cached(&slab, number) } else { &slab.file };
        let at = self.geometry.offset_in_slab(extent.addr) + u64::from(offset);
        let mut read = || file.read_exact_at(&mut buf, at);
        match &self.traffic {
            Some(traffic) => traffic.read(len as usize, read),
            None => read(),
        }
        .map_err(|e| self.error("read", extent.addr, &e))?;
        buf.truncate(len as usize);
        Ok(buf)
    }

    /// Bytes in extents, and bytes taken from the file system that are in none.
    pub fn usage(&self) -> (u64, u64) {
        let space = lock(&self.space);
        let used = space.map.used_bytes() - space.dropped_bytes;
        if let Some(traffic) = &self.traffic {
            traffic.note_used(used);
        }
        (used, space.map.free_bytes() + space.dropped_bytes)
    }

    fn take(&self, len: u32, durable: CommitSeq, purpose: Purpose) -> Result<Extent> {
        let len = round_up(len);
        lock(&self.space).reclaim(durable);
        let taken = || lock(&self.space).map.take(len);
        if let Some(extent) = taken() {
            return Ok(extent);
        }
        let _stepping = lock(&self.stepping);
        loop {
            // Another one may have grown it meanwhile.
            if let Some(extent) = taken() {
                return Ok(extent);
            }
            let step = lock(&self.space).map.next_step();
            self.grow(step, purpose)?;
            lock(&self.space).map.add_step(step);
        }
    }

    /// Refuses if new data of this length would be.
    pub fn check_space(&self, len: u32, durable: CommitSeq) -> Result<()> {
        let mut space = lock(&self.space);
        space.reclaim(durable);
        if space.map.has(round_up(len)) {
            return Ok(());
        }
        let step = space.map.next_step();
        drop(space);
        self.may_grow(step * self.geometry.step_bytes, Purpose::NewData)
    }

    /// Why new data of this length is refused now; none: it is not.
    pub fn refusal(&self, len: u32, durable: CommitSeq) -> Option<Error> {
        let refused = self.check_space(len, durable);
        if let Some((free, why)) = &*lock(&self.not_grown) {
            let space = self.disk.space(&self.dir).unwrap_or_default();
            let fits = lock(&self.space).map.has(round_up(len));
            if !fits && space.free <= *free {
                return Some(why.clone());
            }
        }
        refused.err()
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn grow(&self, step: u64, purpose: Purpose) -> Result<()> {
        let at = step * self.geometry.step_bytes;
        self.may_grow(at, purpose)?;
        let slab = self.slab(self.geometry.slab_of(at), true)?;
        let taken = slab.file.allocate(self.geometry.offset_in_slab(at), self.geometry.step_bytes);
        let taken = taken.map_err(|e| self.error("take space for", at, &e));
        let free = self.disk.space(&self.dir).unwrap_or_default().free;
        *lock(&self.not_grown) = taken.as_ref().err().map(|why| (free, why.clone()));
        taken
    }

    fn may_grow(&self, at: u64, purpose: Purpose) -> Result<()> {
        let space = self.disk.space(&self.dir).map_err(|e| self.error("ask the free space of", at, &e))?;
        let (step_bytes, reserve) = (self.geometry.step_bytes, reserve(space));
        if space.free < step_bytes + reserve {
            let (dir, free) = (self.dir.display(), space.free);
            return Err(Error::no_space(format!(
                "target in {dir}: {free} bytes are free on its file system, and {step_bytes} are needed beside \
                 {reserve} for its index"
            )));
        }
        let for_upkeep = space.total / UPKEEP_SHARE;
        if purpose == Purpose::NewData && space.free < step_bytes + reserve + for_upkeep {
            let (dir, free) = (self.dir.display(), space.free);
            return Err(Error::no_space(format!(
                "target in {dir} is full: the last {free} bytes of its file system are kept for repairs"
            )));
        }
        Ok(())
    }

    fn write(&self, extent: Extent, data: &[u8]) -> Result<()> {
        let write = || self.write_now(extent, data);
        self.traffic.as_ref().map_or_else(write, |traffic| traffic.write(data.len(), write))
    }

    fn write_now(&self, extent: Extent, data: &[u8]) -> Result<()> {
        let slab = self.slab(self.geometry.slab_of(extent.addr), false)?;
        let at = self.geometry.offset_in_slab(extent.addr);
        assert!(at + u64::from(extent.len) <= self.geometry.slab_bytes, "an extent ends beyond its slab");
        let whole = data.len() - data.len() % UNIT_BYTES as usize;
        let aligned = (data.as_ptr() as usize).is_multiple_of(UNIT_BYTES as usize);
        let written = if aligned && whole == data.len() {
            slab.file.write_all_at(data, at)
        } else if aligned {
            let tail = self.padded(&data[whole..]);
            if whole == 0 {
                slab.file.write_all_at(&tail, at)
            } else {
                slab.file.write_all_vectored_at(&[&data[..whole], &tail], at)
            }
        } else {
            slab.file.write_all_at(&self.padded(data), at)
        };
        written.map_err(|e| self.error("write", extent.addr, &e))
    }

    /// An aligned copy, filled up with zeros to whole units.
    fn padded(&self, data: &[u8]) -> Buf {
        let mut buf = self.buffers.get(round_up(data.len() as u32) as usize);
        buf[..data.len()].copy_from_slice(data);
        buf[data.len()..].fill(0);
        buf
    }

    fn sync(&self, extent: Extent) -> Result<()> {
        let slab = self.slab(self.geometry.slab_of(extent.addr), false)?;
        let synced = slab.sync(self.traffic.as_deref());
        synced.map_err(|e| self.error("sync", extent.addr, &e))
    }

    /// For hot reads; the direct file if it cannot be opened a second time.
    fn cached<'a>(&self, slab: &'a Slab, number: u32) -> &'a Arc<dyn File> {
        if let Some(file) = slab.cached.get() {
            return file;
        }
        match self.disk.open(&self.path(number), OpenMode::READ) {
            Ok(file) => slab.cached.get_or_init(|| file),
            Err(_) => &slab.file, // out of descriptors, perhaps: slower, but correct
        }
    }

    fn slab(&self, number: u32, create: bool) -> Result<Arc<Slab>> {
        let mut files = lock(&self.files);
        if let Some(slab) = files.get(&number) {
            return Ok(slab.clone());
        }
        let path = self.path(number);
        let mode = OpenMode { write: true, create, ..OpenMode::READ }.direct();
        let open = || -> io::Result<Arc<dyn File>> {
            let file = self.disk.open(&path, mode)?;
            self.disk.sync_dir(&self.dir)?;
            Ok(file)
        };
        let file = open().map_err(|e| Error::from_io(format_args!("open {}", path.display()), &e))?;
        let slab = Arc::new(Slab::new(file));
        files.insert(number, slab.clone());
        Ok(slab)
    }

    /// At open: steps without extents are punched, slabs without any are removed.
    fn return_unused(&self) -> Result<()> {
        let entries = self
            .disk
            .read_dir(&self.dir)
            .map_err(|e| Error::from_io(format_args!("list {}", self.dir.display()), &e))?;
        let steps_per_slab = self.geometry.slab_bytes / self.geometry.step_bytes;
        for number in entries.iter().filter_map(|e| slab_number(&e.name)) {
            let first = u64::from(number) * steps_per_slab;
            let space = lock(&self.space);
            let used: Vec<bool> = (first..first + steps_per_slab).map(|s| space.map.has_step(s)).collect();
            drop(space);
            if !used.contains(&true) {
                let path = self.path(number);
                self.disk
                    .remove_file(&path)
                    .map_err(|e| Error::from_io(format_args!("remove {}", path.display()), &e))?;
                continue;
            }
            let slab = self.slab(number, false)?;
            let file_bytes = slab.file.len().map_err(|e| self.error("measure", 0, &e))?;
            for (i, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
                let at = i as u64 * self.geometry.step_bytes;
                if at < file_bytes {
                    let len = self.geometry.step_bytes.min(file_bytes - at);
                    slab.file.punch(at, len).map_err(|e| self.error("return space of", at, &e))?;
                }
            }
        }
        Ok(())
    }

    fn path(&self, number: u32) -> PathBuf {
        self.dir.join(format!("slab-{number:04}"))
    }
    fn error(&self, doing: &str, addr: u64, e: &io::Error) -> Error {
        let path = self.path(self.geometry.slab_of(addr));
        Error::from_io(
            format_args!("{doing} {} at {}", path.display(), self.geometry.offset_in_slab(addr)),
            e,
        )
    }
}

/// The number in the name of a slab file.
pub fn slab_number(name: &str) -> Option<u32> {
    name.strip_prefix("slab-").filter(|n| n.len() >= 4)?.parse().ok()
}

impl SpaceState {
    fn reclaim(&mut self, durable: CommitSeq) {
        let oldest_read = self.reads.keys().next().copied().unwrap_or(self.next_read);
        while let Some((seq, barrier, _)) = self.dropped.front() {
            if *seq > durable || *barrier > oldest_read {
                break;
            }
            let (_, _, extents) = self.dropped.pop_front().expect("just seen");
            for extent in extents {
                let len = u64::from(extent.len);
                assert!(len <= self.dropped_bytes, "an extent is freed that no commit dropped");
                self.dropped_bytes -= len;
                self.map.free(extent);
            }
        }
    }
}
