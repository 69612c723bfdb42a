//! Writes of applications: into dirty buffers under a Write lease, directly otherwise.
//!
//! Invariants: memory is taken from the budget before bytes are accepted; a write is accepted only when the
//! file's inline bytes are known, a dead writer's data is recovered, and no old bytes lie where the file
//! grows.
mod append;
mod direct;

pub use direct::WriteTarget;

use crate::base::Base;
use crate::commit::Commits;
use crate::data::Data;
use crate::dirty::NoMemory;
use crate::handles::{Handles, OpenFile};
use crate::inode::{Inline, Inode, State};
use crate::inodes::Inodes;
use crate::kernel::{Kernel, UnprotectedPages};
use crate::leader::Leader;
use crate::leases::Leases;
use crate::memory::Memory;
use crate::objects::Objects;
use crate::plan::Occasion;
use crate::quota::Quota;
use crate::recovery::Recovery;
use crate::reports::Reports;
use crate::rights::Rights;
use crate::status::Counters;
use crate::tiering::Tiering;
use crate::types::Handle;
use crate::wall_time;
use crate::write_back::WriteBack;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::map::Layout;
use weir_proto::meta::{FILE_BYTES_MAX, LeaseKind};
use weir_proto::{Error, ErrorKind, NameRule, Result};

/// Bytes accepted at once on the slow path, so that a large write needs little memory at a time.
const STEP_BYTES: usize = 1 << 20;
/// A writer that waits for memory checks again at this interval, even without a notification.
const MEMORY_POLL: Duration = Duration::from_millis(50);
/// Lease changes while a write prepares: more is livelock.
pub const TRIES_MAX: u32 = 16;

/// How a write may proceed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Buffer,
    Direct,
}

enum Taken {
    All,
    NoMemory,
    /// The file's volume has a limit, and the grant is spent.
    NoReservation,
    /// A request or a cleaning is needed first.
    NotReady,
}

pub struct Writer {
    env: Env,
    counters: Arc<Counters>,
    leader: Arc<Leader>,
    data: Arc<Data>,
    kernel: Arc<Kernel>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    handles: Arc<Handles>,
    quota: Arc<Quota>,
    leases: Arc<Leases>,
    tiering: Arc<Tiering>,
    objects: Arc<Objects>,
    recovery: Arc<Recovery>,
    commits: Arc<Commits>,
    write_back: Arc<WriteBack>,
}

impl Writer {
    pub fn new(
        base: &Base,
        reports: &Reports,
        rights: &Rights,
        commits: Arc<Commits>,
        write_back: Arc<WriteBack>,
    ) -> Writer {
        let Base { env, counters, leader, data, kernel, memory, inodes, handles, .. } = base.clone();
        let Reports { quota, .. } = reports.clone();
        let Rights { leases, tiering, objects, recovery, .. } = rights.clone();
        Writer {
            env,
            counters,
            leader,
            data,
            kernel,
            memory,
            inodes,
            handles,
            quota,
            leases,
            tiering,
            objects,
            recovery,
            commits,
            write_back,
        }
    }

    /// Accepts the bytes at once if lease and memory allow it. `offset` `None`: at the end of the file.
    pub fn try_write(&self, handle: Handle, offset: Option<u64>, data: &[u8]) -> Option<Result<usize>> {
        let file = match self.handles.get(handle) {
            Ok(file) => file,
            Err(e) => return Some(Err(e)),
        };
        if !file.mode.write {
            return Some(Err(not_for_writing(handle)));
        }
        if !self.leader.leases_hold() {
            return None;
        }
        let mut st = file.inode.lock();
        if let Err(e) = file.new_error(&st) {
            return Some(Err(e));
        }
        let offset = offset.filter(|_| !file.mode.append);
        match self.take(&file.inode, &mut st, offset, data) {
            Ok(Taken::All) => Some(Ok(data.len())),
            Ok(Taken::NoMemory | Taken::NoReservation | Taken::NotReady) => None,
            Err(e) => Some(Err(e)),
        }
    }

    /// Copies `data` into dirty buffers, if everything is ready for that. At the end of the file (`None`) all
    /// or nothing.
    fn take(&self, inode: &Arc<Inode>, st: &mut State, at: Option<u64>, data: &[u8]) -> Result<Taken> {
        let whole = at.is_none();
        let offset = at.unwrap_or_else(|| st.size());
        let end = end_of(offset, data.len())?;
        if data.is_empty() {
            return Ok(Taken::All);
        }
        if whole && !self.memory.make_space() {
            return Ok(Taken::NoMemory);
        }
        if !is_ready_to_buffer(st, end) || st.is_away(offset, end) || st.is_layered(offset, end) {
            return Ok(Taken::NotReady);
        }
        let layout = st.layout(inode.ino)?;
        let growth = st.growth(offset, end);
        if !self.quota.spend(st, growth) {
            return Ok(Taken::NoReservation);
        }
        let mut taken = Taken::All;
        for (stripe, within, part) in by_stripe(&layout, offset, data) {
            let first = stripe == 0;
            // An append is buffered atomically: another client may append while we wait for memory.
            let anyway = |n| whole.then(|| self.memory.buffer_anyway(n));
            let mut buffer = |n| self.memory.buffer(n).or_else(|| anyway(n));
            let buf = st.write.buffer(stripe);
            match buf.write(within, part, layout.cell_bytes(), first, &mut buffer) {
                Ok(()) => {}
                Err(NoMemory) => {
                    st.write.drop_if_empty(stripe);
                    taken = Taken::NoMemory;
                    break;
                }
            }
            let start = layout.stripe_start(stripe) + u64::from(within);
            let growth = st.growth(start, start + part.len() as u64);
            st.quota.note_growth(growth);
            st.note_write(start + part.len() as u64, wall_time(&self.env), self.env.clock.now());
            self.memory.cache().remove(inode.ino, start, start + part.len() as u64);
            self.send_if_full(inode, st, &layout, stripe)?;
        }
        if st.is_dirty() {
            self.inodes.note_dirty(inode.ino);
        }
        self.quota.settle(st);
        if matches!(taken, Taken::All) {
            self.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        }
        Ok(taken)
    }

    fn send_if_full(&self, inode: &Arc<Inode>, st: &mut State, layout: &Layout, stripe: u64) -> Result<()> {
        if st.write.is_complete(layout, stripe) && !st.write.is_sending(stripe) {
            self.write_back.start_send(inode, st, stripe, Occasion::Growing)?;
        }
        Ok(())
    }

    /// `offset` `None`: at the end of the file at the moment when the bytes are accepted.
    pub async fn write(&self, handle: Handle, offset: Option<u64>, data: Bytes) -> Result<usize> {
        self.leader.sure_of_leases().await?; // this write reports losses, not a later one
        let file = self.handles.get(handle)?;
        if !file.mode.write {
            return Err(not_for_writing(handle));
        }
        file.new_error(&file.inode.lock())?;
        let offset = offset.filter(|_| !file.mode.append);
        end_of(offset.unwrap_or(0), data.len())?;
        let mut done = 0;
        while done < data.len() {
            let step = data.slice(done..data.len().min(done + STEP_BYTES));
            let written = match offset {
                Some(offset) => self.write_step(&file, offset + done as u64, &step).await,
                None => self.append_step(&file, &step).await,
            };
            match written {
                Ok(n) => done += n,
                // The next write reports it to the program.
                Err(e) if e.kind == ErrorKind::OverQuota && done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        // The kernel keeps pages of this handle, including those written now.
        let unprotected = file.keeps_pages().then(|| {
            let mut st = file.inode.lock();
            (!st.lease.is_held()).then(|| UnprotectedPages::of(&file.inode, &mut st))
        });
        if let Some(unprotected) = unprotected.flatten() {
            self.kernel.drop_pages(unprotected);
        }
        Ok(done)
    }

    /// One step of a write at an offset: returns the number of bytes, fewer if a volume's limit is met.
    async fn write_step(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<usize> {
        let inode = &file.inode;
        let deadline = self.leader.deadline();
        for _ in 0..TRIES_MAX {
            if self.prepare_write(inode, Some(offset), data.len()).await? == Way::Direct {
                break;
            }
            let fits = self.quota.fit(inode, Some(offset), data).await?;
            if self.buffer_all(file, Some(offset), &fits, deadline).await? {
                return Ok(fits.len());
            }
        }
        // Even if leases come and go too fast to buffer: a direct write is right, too.
        self.write_direct(file, offset, data).await
    }

    /// Accepts all bytes as soon as there is memory. False: the lease is gone, or the quota for them.
    async fn buffer_all(
        &self,
        file: &OpenFile,
        at: Option<u64>,
        data: &Bytes,
        deadline: Instant,
    ) -> Result<bool> {
        let inode = &file.inode;
        loop {
            let freed = self.memory.budget().freed();
            file.works()?;
            let taken = self.take(inode, &mut inode.lock(), at, data)?;
            match taken {
                Taken::All => return Ok(true),
                Taken::NotReady | Taken::NoReservation => return Ok(false),
                Taken::NoMemory => {}
            }
            if self.leader.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "write file {}: no memory became free, {} bytes wait to be written to targets",
                    inode.ino,
                    self.memory.budget().used_bytes()
                )));
            }
            self.write_back.relieve();
            let _ = self.env.clock.timeout(MEMORY_POLL, freed).await; // checks again either way
        }
    }

    /// Acquires the preconditions of a write: the lease, the evicted bytes, the inline bytes, a clean tail. A
    /// client that gets the Write lease meanwhile fences the work for that; then the file is read again.
    pub async fn prepare_write(&self, inode: &Arc<Inode>, offset: Option<u64>, len: usize) -> Result<Way> {
        let mut fences = self.leases.fences();
        loop {
            let under = inode.lock().lease.token_epoch();
            match self.prepare_write_once(inode, offset, len).await {
                Err(e) => self.leases.go_on_after(inode, e, under, &mut fences).await?,
                way => return way,
            }
        }
    }

    async fn prepare_write_once(&self, inode: &Arc<Inode>, offset: Option<u64>, len: usize) -> Result<Way> {
        self.leases.wait_for_revoke(inode).await;
        let from = offset.unwrap_or(u64::MAX); // the end of the file is never evicted while it is written
        self.tiering.wait_for_own_eviction(inode, from, from.saturating_add(len as u64)).await;
        self.leader.sure_of_leases().await?;
        let (is_ours, recover) = {
            let st = inode.lock();
            (st.lease.is_write(), st.lease.needs_recovery())
        };
        if recover {
            self.recovery.recover(inode).await?;
        }
        if !is_ours && !self.gets_write(inode).await? {
            // No client evicts a file that is open for writing: bytes that are online now stay.
            let from = offset.unwrap_or_else(|| inode.lock().committed_size());
            self.tiering.recall(inode, from, from.saturating_add(len as u64)).await?;
            if len > 0 {
                self.objects.copy_up(inode, from, from.saturating_add(len as u64)).await?;
            }
            return Ok(Way::Direct);
        }
        let from = offset.unwrap_or_else(|| inode.lock().size());
        self.tiering.recall(inode, from, from.saturating_add(len as u64)).await?;
        if len > 0 {
            self.objects.copy_up(inode, from, from.saturating_add(len as u64)).await?;
        }
        if inode.lock().inline == Inline::Unknown {
            self.leases.refresh(inode).await?;
        }
        let grows = {
            let st = inode.lock();
            offset.is_none_or(|at| at + len as u64 > st.committed_size()) && st.has_old_tail()
        };
        if grows {
            self.recovery.clean_old_tail(inode).await?;
        }
        Ok(Way::Buffer)
    }

    /// Asks for the Write lease. A refusal is not remembered: the request also makes the leader revoke other
    /// clients' leases before a write without a lease.
    async fn gets_write(&self, inode: &Arc<Inode>) -> Result<bool> {
        let granted = self.leases.acquire(inode, LeaseKind::Write).await? == LeaseKind::Write;
        let recover = inode.lock().lease.needs_recovery();
        if recover {
            self.recovery.recover(inode).await?;
        }
        Ok(granted)
    }
}

/// Whether a write up to `end` may be buffered here for now. Bytes written under the append token go straight
/// to targets, and with them the inline bytes.
pub fn is_ready_to_buffer(st: &State, end: u64) -> bool {
    st.lease.is_write()
        && !st.lease.has_append_token()
        && !st.lease.needs_recovery()
        && !st.lease.is_closing()
        && st.inline != Inline::Unknown
        && (end <= st.committed_size() || !st.has_old_tail())
}

pub fn not_for_writing(handle: Handle) -> Error {
    Error::invalid(format!("file handle {} is not open for writing", handle.0))
}
pub fn too_big() -> Error {
    Error::name(NameRule::FileTooBig, "the file would be larger than any file may be")
}

pub fn end_of(offset: u64, len: usize) -> Result<u64> {
    offset.checked_add(len as u64).filter(|end| *end <= FILE_BYTES_MAX).ok_or_else(too_big)
}

/// A write cut at the borders of stripes: (stripe, offset within it, bytes).
pub fn by_stripe<'a>(layout: &Layout, offset: u64, data: &'a [u8]) -> Vec<(u64, u32, &'a [u8])> {
    let mut parts = Vec::with_capacity(2);
    let (mut at, mut rest) = (offset, data);
    while !rest.is_empty() {
        let stripe = layout.stripe_of(at);
        let within = at - layout.stripe_start(stripe);
        let n = ((layout.stripe_bytes() - within) as usize).min(rest.len());
        parts.push((stripe, within as u32, &rest[..n]));
        at += n as u64;
        rest = &rest[n..];
    }
    parts
}
