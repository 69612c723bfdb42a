//! Upkeep of a target: its cells group by group; under-replicated cells; installing and verifying for repair.
use super::{DROP_BATCH, FragmentWrite, INLINE_BYTES_MAX, Install, LIST_MAX, Store};
use crate::alloc::Extent;
use crate::cells::{self, Scope};
use crate::entries::get;
use crate::format::*;
use crate::lookup;
use crate::read::CELL_BYTES_MAX;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use weir_kv::{CommitSeq, Scan};
use weir_proto::data::*;
use weir_proto::{CellId, Epoch, Error, PgId, Result, Seq, Version};

impl Store {
    /// Drops one cell if its last write is older than `before` (repair: no other member has it).
    pub fn drop_cell_older(&self, cell: CellId, before: Epoch) -> Result<CommitSeq> {
        self.change(&mut |txn, delta| match get::<Header>(txn, &header_key(cell))? {
            Some(h) if h.epoch < before => {
                tracing::trace!(on = %self.target, %cell, "dropped: no other member has it");
                cells::drop_cell(txn, cell, delta)
            }
            _ => Ok(()),
        })
    }

    /// Marks fragments as missing; returns whether that version is here.
    pub fn mark_missing(
        &self,
        scope: &Scope,
        cell: CellId,
        version: Version,
        missing: u64,
    ) -> Result<(CommitSeq, bool)> {
        self.forget_lost(scope, cell)?;
        let mut is_here = false;
        let committed = self.change(&mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            is_here = cells::mark_missing(txn, scope, cell, version, missing, delta)?;
            Ok(())
        })?;
        Ok((committed, is_here))
    }

    /// For repair. `Unavailable` while a seal of the group is in doubt: the listing member would catch up on
    /// the version before the seal, with the logs after it, and be current without the version committed
    /// next.
    pub fn list_cells(
        &self,
        group: PgId,
        after: Option<CellId>,
        since: Epoch,
        epoch: Epoch,
        limit: u32,
    ) -> Result<CellList> {
        self.change(&mut |txn, _| cells::raise_epoch(txn, group, epoch))?;
        self.kv.read(&mut |r| match cells::in_doubt(r, group, true)?.first() {
            None => Ok(()),
            Some((cell, version)) => Err(Error::unavailable(format!(
                "cells of {group}: version {version} of cell {cell} is in doubt, list them when its seal is settled"
            ))),
        })?;
        self.list_cells_in_doubt(group, after, since, epoch, limit)
    }

    /// Like [`Self::list_cells`], for a member that is filled while seals continue; it lists once more at the
    /// end.
    pub fn list_cells_in_doubt(
        &self,
        group: PgId,
        after: Option<CellId>,
        since: Epoch,
        epoch: Epoch,
        limit: u32,
    ) -> Result<CellList> {
        self.change(&mut |txn, _| cells::raise_epoch(txn, group, epoch))?;
        let limit = limit.clamp(1, LIST_MAX) as usize;
        let mut list = CellList { cells: Vec::new(), more: false };
        self.kv.read(&mut |r| {
            list = CellList { cells: Vec::new(), more: false };
            let (start, end) = listed_range(group, after);
            let mut problem = Ok(());
            r.scan(&start, &end, &mut |key, _| {
                if list.cells.len() == limit {
                    list.more = true;
                    return Scan::Stop;
                }
                match cell_of_key(key).and_then(|cell| lookup::summary(r, cell)) {
                    Ok(Some(s)) if s.epoch >= since || s.missing != 0 => list.cells.push(s),
                    Ok(_) => {}
                    Err(e) => {
                        problem = Err(e);
                        return Scan::Stop;
                    }
                }
                Scan::More
            })?;
            problem
        })?;
        Ok(list)
    }

    pub fn has_under_replicated(&self) -> bool {
        self.counters.under_replicated_cells.load(Relaxed) > 0
    }
    /// Clears the missing bits of members that are current, cell by cell of the scope's group. Blocks.
    pub fn settle_under_replicated(&self, scope: &Scope) -> Result<()> {
        let mut after = None;
        loop {
            let mut batch = Vec::new();
            self.kv.read(&mut |r| {
                batch = lookup::listed_cells(r, scope.group, after, DROP_BATCH)?;
                Ok(())
            })?;
            let Some(last) = batch.last().copied() else { return Ok(()) };
            self.change(&mut |txn, delta| {
                cells::check_epoch(txn, scope.group, scope.epoch)?;
                batch.iter().try_for_each(|cell| cells::settle_under_replicated(txn, scope, *cell, delta))
            })?;
            after = Some(last);
        }
    }
    // ---- repair

    /// Drops this target's cells of the scope's group from before it lost its data. Blocks.
    pub fn forget_all_lost(&self, scope: &Scope) -> Result<()> {
        let mut after = None;
        loop {
            let mut batch = Vec::new();
            self.kv.read(&mut |r| {
                batch = lookup::listed_cells(r, scope.group, after, DROP_BATCH)?;
                Ok(())
            })?;
            let Some(last) = batch.last().copied() else { return Ok(()) };
            self.change(&mut |txn, delta| {
                batch.iter().try_for_each(|cell| cells::forget_lost(txn, scope, *cell, delta))
            })?;
            after = Some(last);
        }
    }

    /// Drops a prepared version unless its writer, or a member that decides about it, requested it under the
    /// scope's epoch.
    pub fn drop_aborted(&self, scope: &Scope, cell: CellId, version: Version) -> Result<CommitSeq> {
        tracing::debug!(on = %self.target, %cell, %version, "a version prepared here was aborted meanwhile");
        self.change(&mut |txn, delta| cells::drop_prepared_before(txn, cell, version, scope.epoch, delta))
    }

    /// Installs a fragment that was rebuilt from other members. False: the one here is as new.
    pub fn install(
        &self,
        scope: &Scope,
        write: &FragmentWrite<'_>,
        folded_seq: Seq,
        place: Install,
    ) -> Result<(CommitSeq, bool)> {
        self.usable()?;
        self.forget_lost(scope, write.cell)?;
        let extent = self.store_bytes(write.data)?;
        let fragment = Fragment {
            version: write.version,
            epoch: scope.epoch,
            seal: false,
            missing: write.missing,
            extent,
            fragment_bytes: write.data.len() as u32,
            folded_seq,
            folded_seqs: write.folded_seqs.to_vec(),
            block_crcs: write.block_crcs.to_vec(),
        };
        let mut installed = false;
        let committed = self.commit_bytes(extent, &mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            let (cell, replace) = (write.cell, place == Install::Damaged);
            installed = match place {
                Install::Prepared { token_epoch } => {
                    cells::check_fence(txn, cell.file, token_epoch)?;
                    cells::hold(txn, scope, cell, &fragment, delta)?
                }
                _ => cells::install(txn, scope, cell, &fragment, replace, delta)?,
            };
            if !installed {
                delta.dropped.push(extent);
            }
            Ok(())
        })?;
        tracing::trace!(on = %self.target, cell = %write.cell, version = %write.version, epoch = %scope.epoch, %folded_seq, folded_seqs = ?write.folded_seqs, installed, "rebuilt");
        if installed && matches!(place, Install::Missed | Install::Damaged) {
            self.settle_damage(write.cell);
        }
        Ok((committed, installed))
    }

    /// Installs another holder's overlays of `cell` up to `upto`, and drops `stale` ones beyond.
    pub fn install_overlays(
        &self,
        scope: &Scope,
        cell: CellId,
        upto: Seq,
        copies: Vec<(Seq, Overlay, Bytes)>,
        stale: &BTreeMap<Seq, Overlay>,
    ) -> Result<CommitSeq> {
        self.usable()?;
        self.forget_lost(scope, cell)?;
        let in_range = |(seq, ..): &(Seq, Overlay, Bytes)| *seq > Seq(0) && *seq <= upto;
        assert!(copies.iter().all(in_range), "copies of overlays are those up to the requested number");
        let mut by_seq = BTreeMap::new();
        let mut extents = Vec::new();
        for (seq, mut overlay, data) in copies {
            overlay.extent = Extent::default();
            let mut inline = Vec::new();
            if data.len() > INLINE_BYTES_MAX as usize {
                overlay.extent = self.store_bytes(&data)?;
                extents.push((seq, overlay.extent));
            } else {
                inline = data.to_vec();
            }
            by_seq.insert(seq, (overlay, inline));
        }
        let numbers: Vec<u64> = by_seq.keys().map(|seq| seq.0).collect();
        tracing::trace!(on = %self.target, %cell, %upto, epoch = %scope.epoch, ?numbers, ?stale, "copies of overlays");
        self.change(&mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            let used = cells::install_overlays(txn, scope, cell, upto, &by_seq, stale, delta)?;
            let unused = extents.iter().filter(|(seq, _)| !used.contains(seq)).map(|(_, extent)| *extent);
            delta.dropped.extend(unused);
            Ok(())
        })
    }

    /// Reads a cell, so that damage is found and counted; returns the bytes read.
    pub fn verify(&self, scope: &Scope, cell: CellId, view: ReadView) -> Result<u64> {
        let place = Place { target: self.target, group: scope.group, epoch: scope.epoch };
        let (version, offset, len) = (Version(0), 0, CELL_BYTES_MAX);
        let plan = self.plan_read(scope, &ReadCell { place, cell, view, version, offset, len })?;
        Ok(self.run(&plan)?.payload.iter().map(|part| part.len() as u64).sum())
    }

    /// Need not be durable at once: a pass may read some cells twice.
    pub fn note_scrub(&self, scrub: &Scrub) -> Result<()> {
        self.change(&mut |txn, _| {
            txn.put(SCRUB, &scrub.to_value());
            Ok(())
        })
        .map(drop)
    }
}
