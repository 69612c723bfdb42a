//! One target: its slabs, its index, and the operations on cells. Calls may block on the disk.
//!
//! Order of durability: data, sync of the slab, commit in the index; the caller answers when the commit is
//! durable ([`Store::durable`]). An I/O error on a write or a failed sync fails the target for ever: every
//! later call is refused. A full disk refuses new data only; deletes and reads continue.
//!
//! Knows cells, versions and sequence numbers; nothing of files' sizes, of other targets, or of the network.
use crate::alloc::{Extent, Geometry};
use crate::cells::{self, Delta, Scope};
use crate::crash_points;
use crate::entries::get;
use crate::format::*;
use crate::index::Index;
use crate::lookup;
use crate::read::{BadBlock, Part, Plan};
use crate::slab::{Purpose, Slabs, available};
use crate::spill::Spill;
use crate::stall::{DiskWatch, UnderWay};
use bytes::Bytes;
use damaged::Damaged;
use fragments::GivenUp;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use weir_env::{Env, File, OpenMode, Pace, Space};
use weir_kv::{CommitSeq, SharedKv, Txn};
use weir_proto::coord::TargetReport;
use weir_proto::data::*;
use weir_proto::life::TargetLife;
use weir_proto::{CellId, Epoch, Error, ErrorKind, FileId, Result, TargetId};

/// Cells dropped, or searched for missing fragments, in one transaction.
pub(crate) const DROP_BATCH: usize = 256;
/// Entries of one listing.
const LIST_MAX: u32 = 4096;
/// Longest duration of a small read in place, on a thread that has other work: a few times that of an NVMe
/// disk.
const READ_HERE_MAX: Duration = Duration::from_micros(300);
/// How long a previous process may still hold the target's lock, and the poll interval.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(20);

mod damaged;
mod fences;
mod fragments;
mod images;
mod log;
mod spilling;
mod truncations;
mod upkeep;

pub use fragments::{FragmentWrite, Placed};
pub(crate) use images::PLACE_LIST_MAX;
pub use log::{INLINE_BYTES_MAX, OverlayWrite};

pub struct Store {
    pub target: TargetId,
    dir: PathBuf,
    env: Env,
    kv: SharedKv,
    index: Index,
    slabs: Arc<Slabs>,
    counters: Counters,
    disk: Arc<DiskWatch>,
    /// Duration of small reads.
    read_pace: Pace,
    failed: OnceLock<Error>,
    damaged: Damaged,
    given_up: GivenUp,
    pub(crate) spill: Spill,
    /// The newest change.
    newest: AtomicU64,
    _lock: Arc<dyn File>,
}

#[derive(Default)]
struct Counters {
    cells: AtomicI64,
    under_replicated_cells: AtomicI64,
    overlay_count: AtomicI64,
    overlay_bytes: AtomicI64,
    fragment_bytes_written: AtomicU64,
    overlay_bytes_written: AtomicU64,
}

/// The destination of a fragment that was rebuilt from other members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Install {
    /// It is the base now.
    Missed,
    /// The base is of this version, but damaged.
    Damaged,
    /// Beside the base: a client with this token epoch has decided to commit it.
    Prepared { token_epoch: u32 },
}

impl Store {
    /// Opens the target in `dir` over its index, or creates an empty one there with `geometry`.
    pub fn open(env: Env, target: TargetId, dir: &Path, kv: SharedKv, geometry: Geometry) -> Result<Store> {
        let io = |e: std::io::Error| Error::from_io(format_args!("open the target in {}", dir.display()), &e);
        env.disk.create_dir_all(dir).map_err(io)?;
        let lock = lock_target(&env, dir)?;
        let geometry = lookup::load_geometry(&kv, geometry)?;
        let stock = lookup::take_stock(&kv)?;
        let counters = Counters {
            cells: AtomicI64::new(stock.cells),
            under_replicated_cells: AtomicI64::new(stock.under_replicated_cells),
            overlay_count: AtomicI64::new(stock.overlay_count),
            overlay_bytes: AtomicI64::new(stock.overlay_bytes),
            ..Counters::default()
        };
        let mut slabs = Slabs::open(env.disk.clone(), env.buffers.clone(), dir, geometry, stock.extents)?;
        slabs.count(&env.watch, target);
        let disk = DiskWatch::new(&env, target);
        Ok(Store {
            target,
            dir: dir.into(),
            env,
            index: Index::new(kv.clone()),
            kv,
            slabs: Arc::new(slabs),
            counters,
            disk,
            read_pace: Pace::new(READ_HERE_MAX),
            failed: OnceLock::new(),
            damaged: Damaged::default(),
            given_up: GivenUp::default(),
            spill: Spill::default(),
            newest: AtomicU64::new(0),
            _lock: lock,
        })
    }

    /// For reads of its entries of cells, files and groups.
    pub fn index(&self) -> &Index {
        &self.index
    }

    // ---- reading

    /// Looks up what a read must do. [`Store::read`] carries it out, in place unless [`Plan::needs_disk`].
    pub fn plan_read(&self, scope: &Scope, read: &ReadCell) -> Result<Plan> {
        self.usable()?;
        scope.check_index(read.cell)?;
        let ReadCell { cell, view, version, offset, len, .. } = *read;
        let part = Part { cell, view, version, offset, len };
        let mut guard = Some(self.slabs.begin_read());
        let mut plan = None;
        self.kv.read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            plan = Some(Plan::new(r, scope, part, guard.take())?);
            // In an older copy only committed versions are the same as the other members'.
            let committed = get::<Fragment>(r, &base_key(read.cell))?.map(|b| b.version);
            if scope.lost_at > Epoch(0) && committed != Some(read.version) {
                return Err(Error::stale(format!(
                    "cell {}: {} had lost what it had",
                    read.cell, self.target
                )));
            }
            Ok(())
        })?;
        Ok(plan.expect("a read that succeeds has planned"))
    }
    pub fn read(&self, plan: &Plan) -> Result<(CellRead, Vec<Bytes>)> {
        let begun = self.env.clock.now();
        let bytes = self.run(plan)?;
        if plan.is_small() {
            self.read_pace.took(self.env.clock.now().since(begun));
        }
        Ok((plan.answer(bytes.block_crcs), bytes.payload))
    }
    /// A small read is not worth a switch to another thread and back if the disk is fast.
    pub fn reads_here(&self, plan: &Plan) -> bool {
        plan.is_small() && self.read_pace.is_quick()
    }
    fn run(&self, plan: &Plan) -> Result<crate::read::Bytes16> {
        let mut bad = Vec::new();
        let result = plan.run(&self.slabs, &self.env.buffers, &mut |block| bad.push(block));
        if !bad.is_empty() {
            self.count_damage(bad);
        }
        result
    }

    /// The first stripe of a file from `from` on with any entry here.
    pub fn next_stripe(&self, scope: &Scope, file: FileId, from: u64) -> Result<Option<u64>> {
        self.usable()?;
        let mut found = None;
        self.kv.read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            found = lookup::file_cells(r, file, from..u64::MAX, None, 1)?.first().map(|cell| cell.stripe);
            Ok(())
        })?;
        Ok(found)
    }

    pub fn stat_cell(&self, scope: &Scope, cell: CellId) -> Result<CellStat> {
        self.usable()?;
        let mut stat = None;
        self.kv.read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            stat = Some(lookup::stat_of(r, scope, cell)?);
            Ok(())
        })?;
        Ok(stat.expect("a read that succeeds has an answer"))
    }

    // ---- the target as a whole

    pub fn dir(&self) -> &Path {
        &self.dir
    }
    pub fn report(&self) -> TargetReport {
        let (used, idle) = self.slabs.usage();
        let space = self.env.disk.space(&self.dir).unwrap_or_default();
        TargetReport {
            target: self.target,
            failed: self.failed.get().is_some(),
            // What new data can take: the last bytes of a file system are for the index and for repairs.
            capacity: used + idle + self.available(space),
            used,
            under_replicated_cells: count(&self.counters.under_replicated_cells),
            damaged_blocks: self.persisted(DAMAGED_COUNT),
            repaired_blocks: self.persisted(REPAIRED_COUNT),
            stalled_ms: u32::try_from(self.disk.stalled_for().as_millis()).unwrap_or(u32::MAX),
            position: self.kv.durable().0,
        }
    }
    /// Reads atomics only: it waits for no work of this target.
    pub fn life(&self) -> TargetLife {
        let ms = |d: Duration| u32::try_from(d.as_millis()).unwrap_or(u32::MAX);
        TargetLife {
            target: self.target,
            failed: self.failed.get().is_some(),
            stalled_ms: ms(self.disk.stalled_for()),
            oldest_ms: ms(self.disk.oldest()),
            ..TargetLife::default()
        }
    }
    /// The bytes of its file system that new data could take.
    pub fn available(&self, space: Space) -> u64 {
        available(space, self.slabs.geometry().step_bytes)
    }
    /// Why new data is refused now for want of space; none: it is not.
    pub fn refusal(&self, len: u32) -> Option<Error> {
        self.slabs.refusal(len, self.kv.durable())
    }
    /// Refuses as a write of new data would.
    pub fn check_space(&self, len: u32) -> Result<()> {
        self.usable()?;
        self.slabs.check_space(len, self.kv.durable())
    }
    pub fn stat(&self) -> TargetStat {
        TargetStat {
            report: self.report(),
            cells: count(&self.counters.cells),
            overlay_extents: count(&self.counters.overlay_count),
            overlay_bytes: count(&self.counters.overlay_bytes),
            fragment_bytes_written: self.counters.fragment_bytes_written.load(Relaxed),
            overlay_bytes_written: self.counters.overlay_bytes_written.load(Relaxed),
        }
    }
    /// Waits until the commit is on the disk.
    pub async fn durable(&self, seq: CommitSeq) -> Result<()> {
        if seq <= self.kv.durable() {
            return self.usable();
        }
        let under_way = self.begin_disk();
        let durable = self.kv.wait_durable(seq).await;
        under_way.end();
        durable.map_err(|e| self.classify_error(e))
    }
    /// Like [`Self::durable`]; for a small change it flushes on this thread if that is possible now.
    pub async fn durable_here(&self, seq: CommitSeq) -> Result<()> {
        if seq > self.kv.durable() {
            self.kv.flush_here(); // its failure shows below
        }
        self.durable(seq).await
    }
    /// Returns space that no entry names any more; called at an interval.
    pub fn reclaim(&self) -> Result<()> {
        self.slabs.reclaim(self.kv.durable()).map_err(|e| self.classify_error(e))
    }
    pub async fn checkpoint(&self) -> Result<()> {
        self.kv.checkpoint().await.map_err(|e| self.classify_error(e))
    }
    /// Begins work with the disk: see [`DiskWatch`].
    pub(crate) fn begin_disk(&self) -> UnderWay {
        self.disk.begin()
    }
    pub fn usable(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(why) => Err(why.clone()),
        }
    }

    // ---- helpers

    /// See [`weir_env::Tasks::crash_point`].
    pub(crate) fn crash_point(&self, point: &'static str) {
        self.env.tasks.crash_point(point);
    }
    /// For upkeep; [`Self::store_new`] is for clients.
    fn store_bytes(&self, data: &[u8]) -> Result<Extent> {
        self.store_for(Purpose::Upkeep, data)
    }
    fn store_new(&self, data: &[u8]) -> Result<Extent> {
        self.store_for(Purpose::NewData, data)
    }
    fn store_for(&self, purpose: Purpose, data: &[u8]) -> Result<Extent> {
        let stored = self.slabs.store(data, self.kv.durable(), purpose).map_err(|e| self.classify_error(e));
        self.crash_point(crash_points::BYTES_WRITTEN);
        stored
    }
    /// See [`cells::forget_lost`].
    fn forget_lost(&self, scope: &Scope, cell: CellId) -> Result<()> {
        if scope.lost_at == Epoch(0) {
            return Ok(());
        }
        self.change(&mut |txn, delta| cells::forget_lost(txn, scope, cell, delta)).map(drop)
    }
    /// Commits a change that names `extent`; if the change is refused the extent is forgotten.
    fn commit_bytes(
        &self,
        extent: Extent,
        body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>,
    ) -> Result<CommitSeq> {
        let seq = self.commit_bytes_more(extent, body)?;
        self.kv.flush_soon();
        Ok(seq)
    }
    /// Commits such a change for a caller that waits for it at once.
    fn commit_bytes_more(
        &self,
        extent: Extent,
        body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>,
    ) -> Result<CommitSeq> {
        self.change_more(body).inspect_err(|_| self.slabs.forget(extent))
    }
    fn change(&self, body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>) -> Result<CommitSeq> {
        let seq = self.change_more(body)?;
        self.kv.flush_soon();
        Ok(seq)
    }
    /// A change whose caller waits for it at once.
    fn change_more(&self, body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>) -> Result<CommitSeq> {
        self.usable()?;
        let mut delta = Delta::default();
        let committed = self.kv.transact_more(&mut |txn| {
            delta = Delta::default();
            body(txn, &mut delta)
        });
        let seq = committed.map_err(|e| if e.kind == ErrorKind::Io { self.classify_error(e) } else { e })?;
        self.counters.cells.fetch_add(delta.cells, Relaxed);
        self.counters.under_replicated_cells.fetch_add(delta.under_replicated_cells, Relaxed);
        self.counters.overlay_count.fetch_add(delta.overlay_count, Relaxed);
        self.counters.overlay_bytes.fetch_add(delta.overlay_bytes, Relaxed);
        self.slabs.drop_after(seq, delta.dropped);
        self.newest.fetch_max(seq.0, Relaxed);
        Ok(seq)
    }
    /// Whether no change waits for the disk.
    fn is_at_rest(&self) -> bool {
        self.newest.load(Relaxed) <= self.kv.durable().0
    }
    /// The caller handles a full disk; any other error of a write fails the target for ever.
    fn classify_error(&self, e: Error) -> Error {
        if e.kind == ErrorKind::NoSpace {
            return e;
        }
        let context = format!(
            "target {} in {} failed and is not used any more ({}): replace its disk",
            self.target,
            self.dir.display(),
            e.context
        );
        let why = Error { kind: ErrorKind::Io, context, ..e };
        if self.failed.set(why.clone()).is_ok() {
            tracing::error!(target_id = %self.target, "{why}");
        }
        why
    }
    fn count_damage(&self, bad: Vec<BadBlock>) {
        let new = self.damaged.note(bad);
        if new > 0 {
            tracing::warn!(target_id = %self.target, blocks = new, "blocks fail their checksum");
            self.add(DAMAGED_COUNT, new as i64);
        }
    }
    /// Cells with blocks found damaged and not yet repaired.
    pub fn damaged_cells(&self) -> Vec<CellId> {
        self.damaged.cells().into_iter().collect()
    }
    fn settle_damage(&self, cell: CellId) {
        let settled = self.damaged.settle(cell);
        if settled > 0 {
            self.add(REPAIRED_COUNT, settled as i64);
        }
    }
    fn add(&self, key: &[u8], n: i64) {
        let _ = self.change(&mut |txn, _| {
            txn.add(key, n);
            Ok(())
        }); // the count is informational; the failure itself shows in the next write
    }
    fn persisted(&self, key: &[u8]) -> u64 {
        let mut value = 0;
        let _ = self.kv.read(&mut |r| {
            value = r.get(key)?.and_then(|v| v.try_into().ok()).map_or(0, i64::from_le_bytes);
            Ok(())
        }); // see above
        u64::try_from(value).unwrap_or(0)
    }
}

fn count(counter: &AtomicI64) -> u64 {
    u64::try_from(counter.load(Relaxed)).unwrap_or(0)
}

/// Takes the lock of the target in `dir`: one process at a time.
pub fn lock_target(env: &Env, dir: &Path) -> Result<Arc<dyn File>> {
    let doing = format!("lock the target in {}", dir.display());
    let lock = env.disk.open(&dir.join("lock"), OpenMode::WRITE).map_err(|e| Error::from_io(&doing, &e))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
            Err(Error::exists(format!("the target in {} is in use by another process", dir.display())))
        }
        Err(e) => Err(Error::from_io(&doing, &e)),
    }
}

/// Like [`lock_target`], for a process whose predecessor may not have ended: a killed process keeps its files
/// open for a moment, on a busy machine a long one.
pub async fn wait_for_target(env: &Env, dir: &Path) -> Result<Arc<dyn File>> {
    let until = env.clock.now() + LOCK_WAIT;
    loop {
        match lock_target(env, dir) {
            Err(e) if e.kind == ErrorKind::Exists && env.clock.now() < until => {
                env.clock.sleep(LOCK_RETRY).await
            }
            locked => return locked,
        }
    }
}
