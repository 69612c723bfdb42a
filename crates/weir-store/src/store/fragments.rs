//! Fragments of a target: writes, commits, drops, and the parity of a seal.
//!
//! A version that its writer has given up is remembered, so that a late copy of it is not written.
//!
//! A fragment is written in three steps: its bytes into a slab, a sync of the slab, its entry in the index.
//! The steps are separate so that writes of several fragments share syncs without a thread for each.
//! Invariant: the entry is made after the sync. Between the steps nothing names the extent: a crash leaks it.
use super::Store;
use crate::alloc::Extent;
use crate::cells::{self, Admission, Delta, Scope};
use crate::crash_points;
use crate::entries::get;
use crate::format::*;
use crate::read::{CELL_BYTES_MAX, Part, Plan};
use crate::recent_map::RecentMap;
use crate::slab::Purpose;
use bytes::Bytes;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use weir_kv::{CommitSeq, Read, Txn};
use weir_proto::checksum::block_crcs;
use weir_proto::data::*;
use weir_proto::{CellId, Error, Result, Seq, Version};

/// Versions given up by their writers that are remembered.
const GIVEN_UP_MAX: usize = 8192;

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

/// Writers' versions that were dropped here: a writer never sends a version again after it gave it up, but a
/// late copy may arrive.
#[derive(Default)]
pub struct GivenUp(Mutex<RecentMap<(CellId, Version), (), GIVEN_UP_MAX>>);

impl GivenUp {
    fn has(&self, cell: CellId, version: Version) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&(cell, version)).is_some()
    }
    fn note(&self, cell: CellId, version: Version) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note((cell, version), ());
    }
}

/// After the first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placed {
    /// The version is here already; durable with this commit.
    Before(CommitSeq),
    /// The bytes are in a slab, neither durable nor named.
    Now(Extent),
}

impl Store {
    /// All steps, on a thread that may block; the caller waits for [`Store::durable`] of the result before it
    /// answers.
    pub fn write_fragment(&self, scope: &Scope, write: &FragmentWrite<'_>) -> Result<CommitSeq> {
        match self.place_fragment(scope, write)? {
            Placed::Before(seq) => Ok(seq),
            Placed::Now(extent) => {
                self.slabs.sync_placed(extent).map_err(|e| self.classify_error(e))?;
                self.crash_point(crash_points::BYTES_WRITTEN);
                self.enter_fragment(scope, write, extent)
            }
        }
    }

    /// Checks the fragment and writes its bytes; blocks.
    pub fn place_fragment(&self, scope: &Scope, write: &FragmentWrite<'_>) -> Result<Placed> {
        self.usable()?;
        scope.check_index(write.cell)?;
        if write.data.len() > CELL_BYTES_MAX as usize {
            return Err(Error::invalid(format!(
                "cell {}: a fragment of {} bytes",
                write.cell,
                write.data.len()
            )));
        }
        if block_crcs(write.data, CHECKSUM_BLOCK as usize) != write.block_crcs {
            return Err(Error::invalid(format!(
                "cell {}: the bytes do not match their checksums",
                write.cell
            )));
        }
        self.forget_lost(scope, write.cell)?;
        let mut admission = Admission::Write;
        let seen = self.kv.read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            admission = self.admit(r, scope, write)?;
            Ok(())
        })?;
        if admission == Admission::Present {
            // A retry: the version is here. Only the mask may have grown.
            let (marked, _) = self.mark_missing(scope, write.cell, write.version, write.missing)?;
            return Ok(Placed::Before(marked.max(seen)));
        }
        let placed = self.slabs.place(write.data, self.kv.durable(), Purpose::NewData);
        placed.map(Placed::Now).map_err(|e| self.classify_error(e))
    }

    /// Makes placed bytes durable; on an error they are forgotten.
    pub async fn sync_placed(&self, extent: Extent) -> Result<()> {
        let under_way = self.begin_disk();
        let synced = self.slabs.synced(extent, &self.env.tasks).await;
        under_way.end();
        synced.map_err(|e| self.classify_error(e))?;
        self.crash_point(crash_points::BYTES_WRITTEN);
        Ok(())
    }

    /// Names durable bytes in the index; if that is refused they are forgotten.
    pub fn enter_fragment(
        &self,
        scope: &Scope,
        write: &FragmentWrite<'_>,
        extent: Extent,
    ) -> Result<CommitSeq> {
        let len = write.data.len();
        assert!(len <= extent.len as usize, "a fragment is longer than the extent that it is entered with");
        let fragment = Fragment {
            version: write.version,
            epoch: scope.epoch,
            seal: write.mode == WriteMode::PrepareSeal,
            missing: write.missing,
            extent,
            fragment_bytes: write.data.len() as u32,
            folded_seq: folded_seq_of(scope, write.cell, write.folded_seqs),
            folded_seqs: write.folded_seqs.to_vec(),
            block_crcs: write.block_crcs.to_vec(),
        };
        let committed = self.commit_bytes_more(extent, &mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            if self.admit(txn, scope, write)? == Admission::Present {
                delta.dropped.push(extent);
                return Ok(());
            }
            match write.mode {
                WriteMode::Fresh | WriteMode::Fill => {
                    cells::fresh(txn, scope, write.cell, fragment.clone(), delta)
                }
                WriteMode::Prepare | WriteMode::PrepareSeal => {
                    cells::prepare(txn, scope, write.cell, &fragment, delta)
                }
            }
        })?;
        self.crash_point(crash_points::FRAGMENT_LOGGED);
        self.counters.fragment_bytes_written.fetch_add(write.data.len() as u64, Relaxed);
        let (cell, mode) = (write.cell, write.mode);
        tracing::trace!(on = %self.target, %cell, version = %write.version, epoch = %scope.epoch, ?mode, missing = write.missing, folded_seqs = ?write.folded_seqs, "fragment");
        Ok(committed)
    }

    fn admit(&self, read: &dyn Read, scope: &Scope, write: &FragmentWrite<'_>) -> Result<Admission> {
        let FragmentWrite { cell, version, mode, .. } = *write;
        match mode {
            WriteMode::Fill => return cells::admit_fill(read, scope, cell, version, write.block_crcs),
            WriteMode::Prepare if self.given_up.has(cell, version) => {
                return Err(Error::stale(format!("cell {cell}: version {version} was given up")));
            }
            WriteMode::Fresh | WriteMode::Prepare | WriteMode::PrepareSeal => {}
        }
        cells::admit(read, cell, version, write.data, write.block_crcs)
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
            self.given_up.note(cell, version);
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
        let (view, any) = (ReadView::Merged, Version(0));
        let whole = Part { cell, view, version: any, offset: 0, len: CELL_BYTES_MAX };
        self.kv.read(&mut |r| {
            cells::check_fence(r, cell.file, version.token_epoch())?;
            planned = Some(Plan::new(r, scope, whole, None)?);
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
        let blocks = data.len().div_ceil(CHECKSUM_BLOCK as usize);
        assert_eq!(block_crcs.len(), blocks, "a folded cell has one checksum for each of its blocks");
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
        let own = if base.is_some_and(|b| b.extent == extent) { Extent::default() } else { extent };
        let committed = self.commit_bytes_more(own, &mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            cells::check_fence(txn, cell.file, version.token_epoch())?;
            check_fold(txn, cell, version, &plan)?;
            cells::prepare(txn, scope, cell, &fragment, delta)
        })?;
        let sealed = SealedCell { folded_seq: plan.seq, fragment_bytes, block_crcs };
        tracing::trace!(on = %self.target, %cell, %version, epoch = %scope.epoch, folded_seq = %plan.seq, "seal prepared");
        Ok((committed, sealed, vec![data]))
    }
}

/// Refuses a fold of a cell that has got another base, or was dropped, since it was read.
fn check_fold(read: &dyn Read, cell: CellId, version: Version, folded: &Plan) -> Result<()> {
    let expected = folded.base.as_ref().map_or(Version(0), |b| b.version);
    let expected_seq = folded.header.as_ref().map_or(Seq(0), |h| h.folded_seq);
    let present = get::<Fragment>(read, &base_key(cell))?.map_or(Version(0), |b| b.version);
    let header = get::<Header>(read, &header_key(cell))?;
    let folded_seq = header.as_ref().map_or(Seq(0), |h| h.folded_seq);
    if present != expected || version <= present || expected_seq != folded_seq {
        return Err(Error::stale(format!("seal of cell {cell} at {version}: its base is now {present}")));
    }
    if folded.header.is_some() && header.is_none() {
        return Err(Error::stale(format!("seal of cell {cell}: it was dropped meanwhile")));
    }
    Ok(())
}

fn folded_seq_of(scope: &Scope, cell: CellId, folded_seqs: &[Seq]) -> Seq {
    if scope.is_data(cell) {
        folded_seqs.get(usize::from(cell.index)).copied().unwrap_or_default()
    } else {
        Seq(0)
    }
}

/// The length of a cell without the zeros at its end, in whole blocks of a checksum.
fn without_zeros(cell: &[u8]) -> usize {
    let kept = cell.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    kept.next_multiple_of(CHECKSUM_BLOCK as usize).min(cell.len())
}
