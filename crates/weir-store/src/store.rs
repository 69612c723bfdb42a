//! One target: its slabs, its index, and the operations on cells. Calls may block on the disk.
//!
//! Order of durability: data, sync of the slab, commit in the index; the caller answers when the commit is
//! durable ([`Store::durable`]). An I/O error on a write or a failed sync fails the target for ever: every
//! later call is refused. A full disk refuses new data only; deletes and reads continue.
//!
//! Knows cells, versions and sequence numbers; nothing of files' sizes, of other targets, or of the network.
use crate::alloc::{Extent, Geometry};
use crate::cells::{self, Admission, Appended, Delta, Numbering, Scope};
use crate::crash_points;
use crate::entries::get;
use crate::format::*;
use crate::lookup;
use crate::read::{BadBlock, CELL_BYTES_MAX, Plan, inline_data};
use crate::recent_map::RecentMap;
use crate::slab::{Purpose, Slabs};
use crate::spill::Spill;
use crate::stall::{DiskWatch, UnderWay};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use weir_env::{BufferPool, Env, File, Instant, OpenMode, Pace};
use weir_kv::{CommitSeq, Read, Scan, SharedKv, Txn};
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::coord::TargetReport;
use weir_proto::data::*;
use weir_proto::{CellId, Epoch, Error, ErrorKind, FileId, PgId, Result, Seq, TargetId, Version};

/// Overlay data up to this size is part of the journal record of its commit: one sync instead of two. Larger
/// data goes to slabs at once: with 8 writers 47 KB each reached 86 MiB/s through the journal and its folds,
/// 70 KB each 475 past them.
pub const INLINE_BYTES_MAX: u32 = 16 << 10;
/// Data of one `ReadOverlays` reply.
const OVERLAYS_REPLY_BYTES: u64 = 4 << 20;
const OVERLAYS_REPLY_COUNT: usize = 8192;
/// Cells dropped, or looked through for missing fragments, in one transaction.
pub(crate) const DROP_BATCH: usize = 256;
/// Entries of one listing.
const LIST_MAX: u32 = 4096;
/// Damaged blocks remembered one by one (so that a block is counted once, and for repair).
const DAMAGE_REMEMBERED: usize = 65_536;
/// Versions given up by their writers that are remembered.
const GIVEN_UP_MAX: usize = 8192;
/// Longest duration of a small read in place, on a thread that has other work: a few times that of an NVMe
/// disk.
const READ_HERE_MAX: Duration = Duration::from_micros(300);
/// How long a previous process may still hold the target's lock, and the poll interval.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(20);

mod fragments;
mod upkeep;

pub use fragments::Placed;

pub struct Store {
    pub target: TargetId,
    dir: PathBuf,
    env: Env,
    kv: SharedKv,
    slabs: Arc<Slabs>,
    counters: Counters,
    disk: Arc<DiskWatch>,
    /// Duration of small reads.
    read_pace: Pace,
    failed: OnceLock<Error>,
    damaged: Mutex<BTreeSet<BadBlock>>,
    /// Writers' versions that were dropped here: a writer never sends a version again after it gave it up,
    /// but a late copy may arrive.
    given_up: Mutex<RecentMap<(CellId, Version), (), GIVEN_UP_MAX>>,
    pub(crate) spill: Spill,
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

/// An overlay to log.
pub struct OverlayWrite<'a> {
    pub cell: CellId,
    pub token_epoch: u32,
    pub offset: u32,
    pub len: u32,
    pub kind: OverlayKind,
    pub crc: u32,
    pub missing: u64,
    pub data: &'a [u8],
}

/// A version to write.
pub struct FragmentWrite<'a> {
    pub cell: CellId,
    pub version: Version,
    pub mode: WriteMode,
    pub missing: u64,
    pub folded_seqs: &'a [Seq],
    pub block_crcs: &'a [u32],
    pub data: &'a [u8],
}

/// The destination of a fragment that was rebuilt from other members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Install {
    /// It is the base now.
    Missed,
    /// The base is of this version, but damaged.
    Damaged,
    /// Beside the base: a client with this token epoch has decided to commit it.
    Beside { token_epoch: u32 },
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
            kv,
            slabs: Arc::new(slabs),
            counters,
            disk,
            read_pace: Pace::new(READ_HERE_MAX),
            failed: OnceLock::new(),
            damaged: Mutex::default(),
            given_up: Mutex::default(),
            spill: Spill::default(),
            _lock: lock,
        })
    }

    // ---- fragments

    fn given_up(&self) -> MutexGuard<'_, RecentMap<(CellId, Version), (), GIVEN_UP_MAX>> {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `token_epoch`: of the client that decided to commit.
    pub fn commit_stripe(
        &self,
        scope: &Scope,
        cell: CellId,
        version: Version,
        token_epoch: u32,
    ) -> Result<CommitSeq> {
        scope.check_index(cell)?;
        let commit =
            &mut |txn: &mut dyn Txn, delta: &mut Delta| cells::commit(txn, scope, cell, version, delta);
        self.decided(scope, cell, token_epoch, commit)
            .inspect(|_| tracing::trace!(on = %self.target, %cell, %version, epoch = %scope.epoch, "commit"))
    }

    pub fn drop_prepared(
        &self,
        scope: &Scope,
        cell: CellId,
        version: Version,
        token_epoch: u32,
    ) -> Result<CommitSeq> {
        self.decided(scope, cell, token_epoch, &mut |txn, delta| {
            self.given_up().note((cell, version), ());
            cells::drop_prepared(txn, cell, version, delta)
        })
        .inspect(
            |_| tracing::trace!(on = %self.target, %cell, %version, epoch = %scope.epoch, "drop prepared"),
        )
    }

    /// A change that is refused if the client that decided it was fenced.
    fn decided(
        &self,
        scope: &Scope,
        cell: CellId,
        token_epoch: u32,
        body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>,
    ) -> Result<CommitSeq> {
        self.forget_lost(scope, cell)?;
        self.change(&mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            cells::check_fence(txn, cell.file, token_epoch)?;
            body(txn, delta)
        })
    }

    /// Folds base and overlays into a prepared version, and returns its bytes.
    pub fn seal_cell(
        &self,
        scope: &Scope,
        cell: CellId,
        version: Version,
    ) -> Result<(CommitSeq, SealedCell, Vec<Bytes>)> {
        self.usable()?;
        scope.check_index(cell)?;
        self.forget_lost(scope, cell)?;
        let guard = self.slabs.begin_read();
        let mut planned = None;
        self.kv.read(&mut |r| {
            cells::check_fence(r, cell.file, version.token_epoch())?;
            planned = Some(Plan::new(r, scope, cell, ReadView::Merged, Version(0), 0, CELL_BYTES_MAX, None)?);
            Ok(())
        })?;
        let plan = planned.expect("a read that succeeds has planned");
        let bytes = self.run(&plan)?;
        drop(guard);
        let base = plan.base.as_ref();
        let unchanged = plan.header.as_ref().is_none_or(|h| h.last_seq == h.folded_seq);
        let mut data = bytes.payload.first().cloned().unwrap_or_default();
        let mut block_crcs = bytes.block_crcs;
        if !unchanged {
            // Zeros at its end are not kept: a cell that was punched takes no space.
            data.truncate(without_zeros(&data));
            block_crcs.truncate(data.len().div_ceil(CHECKSUM_BLOCK as usize));
        }
        let fragment_bytes = data.len() as u32;
        let extent = match base {
            Some(base) if unchanged => base.extent,
            _ => self.store_bytes(&data)?,
        };
        let fragment = Fragment {
            version,
            epoch: scope.epoch,
            seal: true,
            missing: scope.lacking(),
            extent,
            fragment_bytes,
            folded_seq: plan.seq,
            folded_seqs: Vec::new(),
            block_crcs: block_crcs.clone(),
        };
        let expected = base.map_or(Version(0), |b| b.version);
        let own = if base.is_some_and(|b| b.extent == extent) { Extent::default() } else { extent };
        let committed = self.commit_bytes_more(own, &mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            cells::check_fence(txn, cell.file, version.token_epoch())?;
            let present = get::<Fragment>(txn, &base_key(cell))?.map_or(Version(0), |b| b.version);
            let folded_seq = get::<Header>(txn, &header_key(cell))?.map_or(Seq(0), |h| h.folded_seq);
            if present != expected
                || version <= present
                || plan.header.as_ref().map_or(Seq(0), |h| h.folded_seq) != folded_seq
            {
                return Err(Error::stale(format!(
                    "seal of cell {cell} at {version}: its base is now {present}"
                )));
            }
            if plan.header.is_some() && txn.get(&header_key(cell))?.is_none() {
                return Err(Error::stale(format!("seal of cell {cell}: it was dropped meanwhile")));
            }
            cells::prepare(txn, scope, cell, &fragment, delta)?;
            Ok(())
        })?;
        let sealed = SealedCell { folded_seq: plan.seq, fragment_bytes, block_crcs };
        tracing::trace!(on = %self.target, %cell, %version, epoch = %scope.epoch, folded_seq = %plan.seq, "seal prepared");
        Ok((committed, sealed, vec![data]))
    }

    // ---- overlays

    /// Logs an overlay; the caller waits until it is durable. Blocks only if its data is above
    /// [`INLINE_BYTES_MAX`].
    pub fn append(
        &self,
        scope: &Scope,
        numbering: Numbering,
        write: &OverlayWrite<'_>,
    ) -> Result<(CommitSeq, Appended)> {
        self.append_by(scope, numbering, write, Instant(u64::MAX))
    }
    /// Like [`Self::append`], or nothing once the deadline has passed.
    pub fn append_by(
        &self,
        scope: &Scope,
        numbering: Numbering,
        write: &OverlayWrite<'_>,
        deadline: Instant,
    ) -> Result<(CommitSeq, Appended)> {
        self.usable()?;
        check_overlay(scope, write)?;
        self.forget_lost(scope, write.cell)?;
        let large = write.data.len() > INLINE_BYTES_MAX as usize;
        let extent = if large { self.store_new(write.data)? } else { Extent::default() };
        let overlay = Overlay {
            offset: write.offset,
            len: write.len,
            kind: write.kind,
            crc: write.crc,
            token_epoch: write.token_epoch,
            extent,
        };
        let inline = if large { &[] } else { write.data };
        let mut outcome = Appended::At(Seq(0));
        let committed = self.change_more(&mut |txn, delta| {
            if self.env.clock.now() >= deadline {
                return Err(Error::deadline(format!(
                    "cell {}: its disk took the bytes too late",
                    write.cell
                )));
            }
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            outcome =
                cells::append(txn, scope, write.cell, numbering, &overlay, inline, write.missing, delta)?;
            if !matches!(outcome, Appended::At(_)) {
                delta.dropped.push(extent);
            }
            Ok(())
        });
        let committed = committed.inspect_err(|_| self.slabs.forget(extent))?;
        let OverlayWrite { cell, offset, len, kind, token_epoch, .. } = *write;
        tracing::trace!(on = %self.target, %cell, ?numbering, ?outcome, offset, len, ?kind, token_epoch, epoch = %scope.epoch, "overlay");
        if let Appended::At(seq) = outcome {
            if !inline.is_empty() {
                self.spill.note(write.cell, seq, write.len);
            }
            self.counters.overlay_bytes_written.fetch_add(write.data.len() as u64, Relaxed);
        }
        Ok((committed, outcome))
    }

    /// Overlays above `after` with their data, as many as fit into one reply.
    pub fn read_overlays(&self, cell: CellId, after: Seq) -> Result<(OverlaysRead, Vec<Bytes>)> {
        self.usable()?;
        let _guard = self.slabs.begin_read();
        let mut taken: Vec<(Seq, Overlay, Vec<u8>)> = Vec::new();
        let mut more = false;
        self.kv.read(&mut |r| {
            let mut bytes = 0;
            for (seq, overlay) in cells::overlays(r, cell, Seq(after.0.saturating_add(1)), Seq(u64::MAX))? {
                if taken.len() == OVERLAYS_REPLY_COUNT
                    || (bytes > 0 && bytes + u64::from(overlay.len) > OVERLAYS_REPLY_BYTES)
                {
                    more = true;
                    break;
                }
                if overlay.kind == OverlayKind::Data {
                    bytes += u64::from(overlay.len);
                }
                let inline = overlay.kind == OverlayKind::Data && overlay.extent.len == 0;
                let data = if inline { inline_data(r, cell, seq, &overlay)? } else { Vec::new() };
                taken.push((seq, overlay, data));
            }
            Ok(())
        })?;
        let mut reply = OverlaysRead { extents: Vec::new(), more };
        let mut payload = Vec::new();
        for (seq, o, inline) in taken {
            if o.extent.len > 0 {
                payload.push(self.slabs.read(o.extent, 0, o.len)?.freeze());
            } else if !inline.is_empty() {
                payload.push(Bytes::from(inline));
            }
            reply.extents.push(OverlayExtent {
                seq,
                offset: o.offset,
                len: o.len,
                kind: o.kind,
                crc: o.crc,
                token_epoch: o.token_epoch,
            });
        }
        Ok((reply, payload))
    }

    // ---- reading

    /// Looks up what a read must do. [`Store::read`] carries it out, in place unless [`Plan::needs_disk`].
    pub fn plan_read(&self, scope: &Scope, read: &ReadCell) -> Result<Plan> {
        self.usable()?;
        scope.check_index(read.cell)?;
        let mut guard = Some(self.slabs.begin_read());
        let mut plan = None;
        self.kv.read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            plan = Some(Plan::new(
                r,
                scope,
                read.cell,
                read.view,
                read.version,
                read.offset,
                read.len,
                guard.take(),
            )?);
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
            found = lookup::file_cells(r, file, (from, u64::MAX), None, 1)?.first().map(|cell| cell.stripe);
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

    /// The prepared versions of a cell, as recorded.
    pub fn prepared(&self, cell: CellId) -> Result<Vec<Fragment>> {
        let mut found = Vec::new();
        self.kv.read(&mut |r| {
            found = cells::prepared(r, cell)?;
            Ok(())
        })?;
        Ok(found)
    }
    /// The header of a cell.
    pub fn header(&self, cell: CellId) -> Result<Option<Header>> {
        let mut found = None;
        self.kv.read(&mut |r| {
            found = get(r, &header_key(cell))?;
            Ok(())
        })?;
        Ok(found)
    }

    // ---- the target as a whole

    pub fn report(&self) -> TargetReport {
        let (used, idle) = self.slabs.usage();
        let space = self.env.disk.space(&self.dir).unwrap_or_default();
        TargetReport {
            target: self.target,
            failed: self.failed.get().is_some(),
            capacity: used + idle + space.free,
            used,
            under_replicated_cells: count(&self.counters.under_replicated_cells),
            damaged_blocks: self.persisted(DAMAGED_COUNT),
            repaired_blocks: self.persisted(REPAIRED_COUNT),
            stalled_ms: u32::try_from(self.disk.stalled_for().as_millis()).unwrap_or(u32::MAX),
            position: self.kv.durable().0,
        }
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
    pub fn known_epoch(&self, group: PgId) -> Result<Epoch> {
        let mut epoch = Epoch(0);
        self.kv.read(&mut |r| {
            epoch = cells::known_epoch(r, group)?;
            Ok(())
        })?;
        Ok(epoch)
    }
    /// Waits until the commit is on the disk.
    pub async fn durable(&self, seq: CommitSeq) -> Result<()> {
        if seq <= self.kv.durable() {
            return self.usable();
        }
        let under_way = self.begin_disk();
        let durable = self.kv.wait_durable(seq).await;
        under_way.end();
        durable.map_err(|e| self.judge(e))
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
        self.slabs.reclaim(self.kv.durable()).map_err(|e| self.judge(e))
    }
    pub async fn checkpoint(&self) -> Result<()> {
        self.kv.checkpoint().await.map_err(|e| self.judge(e))
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
    pub(crate) fn kv(&self) -> &SharedKv {
        &self.kv
    }
    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.env.buffers
    }
    pub(crate) fn begin_read(&self) -> crate::slab::ReadGuard {
        self.slabs.begin_read()
    }
    pub(crate) fn read_extent(&self, extent: Extent, len: u32) -> Result<Bytes> {
        Ok(self.slabs.read(extent, 0, len)?.freeze())
    }
    /// Frees bytes that no entry names.
    pub(crate) fn forget_extent(&self, extent: Extent) {
        self.slabs.forget(extent);
    }
    /// For upkeep; [`Self::store_new`] is for clients.
    pub(crate) fn store_bytes(&self, data: &[u8]) -> Result<Extent> {
        self.store_for(Purpose::Upkeep, data)
    }
    fn store_new(&self, data: &[u8]) -> Result<Extent> {
        self.store_for(Purpose::NewData, data)
    }
    fn store_for(&self, purpose: Purpose, data: &[u8]) -> Result<Extent> {
        let stored = self.slabs.store(data, self.kv.durable(), purpose).map_err(|e| self.judge(e));
        self.crash_point(crash_points::BYTES_WRITTEN);
        stored
    }
    /// See [`cells::forget_lost`].
    pub(crate) fn forget_lost(&self, scope: &Scope, cell: CellId) -> Result<()> {
        if scope.lost_at == Epoch(0) {
            return Ok(());
        }
        self.change(&mut |txn, delta| cells::forget_lost(txn, scope, cell, delta)).map(drop)
    }
    /// Commits a change that names `extent`; if the change is refused the extent is forgotten.
    pub(crate) fn commit_bytes(
        &self,
        extent: Extent,
        body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>,
    ) -> Result<CommitSeq> {
        let seq = self.commit_bytes_more(extent, body)?;
        self.kv.flush_soon();
        Ok(seq)
    }
    /// The same for a caller that waits for it at once.
    fn commit_bytes_more(
        &self,
        extent: Extent,
        body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>,
    ) -> Result<CommitSeq> {
        self.change_more(body).inspect_err(|_| self.slabs.forget(extent))
    }
    pub(crate) fn change(
        &self,
        body: &mut dyn FnMut(&mut dyn Txn, &mut Delta) -> Result<()>,
    ) -> Result<CommitSeq> {
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
        let seq = committed.map_err(|e| if e.kind == ErrorKind::Io { self.judge(e) } else { e })?;
        self.counters.cells.fetch_add(delta.cells, Relaxed);
        self.counters.under_replicated_cells.fetch_add(delta.under_replicated_cells, Relaxed);
        self.counters.overlay_count.fetch_add(delta.overlay_count, Relaxed);
        self.counters.overlay_bytes.fetch_add(delta.overlay_bytes, Relaxed);
        self.slabs.drop_after(seq, delta.dropped);
        Ok(seq)
    }
    /// The caller handles a full disk; any other error of a write fails the target for ever.
    fn judge(&self, e: Error) -> Error {
        if e.kind == ErrorKind::NoSpace {
            return e;
        }
        let why = Error::io(format!(
            "target {} in {} failed and is not used any more ({}): replace its disk",
            self.target,
            self.dir.display(),
            e.context
        ));
        if self.failed.set(why.clone()).is_ok() {
            tracing::error!(target_id = %self.target, "{why}");
        }
        why
    }
    fn count_damage(&self, bad: Vec<BadBlock>) {
        let mut damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        let new = bad.into_iter().filter(|b| damaged.len() < DAMAGE_REMEMBERED && damaged.insert(*b)).count();
        drop(damaged);
        if new > 0 {
            tracing::warn!(target_id = %self.target, blocks = new, "blocks fail their checksum");
            self.add(DAMAGED_COUNT, new as i64);
        }
    }
    fn settle_damage(&self, cell: CellId) -> Result<()> {
        let mut damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        let before = damaged.len();
        damaged.retain(|b| b.cell != cell);
        let settled = before - damaged.len();
        drop(damaged);
        if settled > 0 {
            self.add(REPAIRED_COUNT, settled as i64);
        }
        Ok(())
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

fn folded_seq_of(scope: &Scope, cell: CellId, folded_seqs: &[Seq]) -> Seq {
    if scope.is_data(cell) {
        folded_seqs.get(usize::from(cell.index)).copied().unwrap_or_default()
    } else {
        Seq(0)
    }
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
            reported => return reported,
        }
    }
}

fn check_overlay(scope: &Scope, write: &OverlayWrite<'_>) -> Result<()> {
    let bad = |why: &str| Err(Error::invalid(format!("overlay of cell {}: {why}", write.cell)));
    let expected = if write.kind == OverlayKind::Data { write.len as usize } else { 0 };
    if !scope.is_data(write.cell) {
        return bad("the index must be that of a data cell");
    }
    if write.kind == OverlayKind::Void {
        let empty = (write.offset, write.len, write.crc) == (0, 0, 0) && write.data.is_empty();
        return if empty { Ok(()) } else { bad("a void overlay is empty") };
    }
    if write.len == 0 || write.offset.checked_add(write.len).is_none_or(|end| end > CELL_BYTES_MAX) {
        return bad(&format!("{} bytes at {} do not fit into a cell", write.len, write.offset));
    }
    if write.data.len() != expected {
        return bad(&format!("{} bytes came, {expected} announced", write.data.len()));
    }
    if write.kind == OverlayKind::Data && crc32c(write.data) != write.crc {
        return bad("the bytes do not match their checksum");
    }
    Ok(())
}

/// The length of a cell without the zeros at its end, in whole blocks of a checksum.
fn without_zeros(cell: &[u8]) -> usize {
    let kept = cell.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    kept.next_multiple_of(CHECKSUM_BLOCK as usize).min(cell.len())
}
