//! Upkeep of a target: its cells group by group; under-replicated cells; installing and verifying for repair.
use super::*;
use crate::read::CELL_BYTES_MAX;
use weir_proto::Seq;

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

    /// Whether this overlay is still under its number.
    pub fn holds_overlay(&self, cell: CellId, seq: Seq, overlay: &Overlay) -> Result<bool> {
        let mut held = false;
        self.kv.read(&mut |r| {
            held = cells::holds(r, cell, seq, overlay)?;
            Ok(())
        })?;
        Ok(held)
    }

    /// Whether a write of this token epoch may go to the file.
    pub fn check_fence(&self, file: FileId, token_epoch: u32) -> Result<()> {
        self.kv.read(&mut |r| cells::check_fence(r, file, token_epoch)).map(drop)
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

    /// Versions that seals prepared and that are in doubt: cell, version, the members that took no part.
    pub fn seals_in_doubt(&self) -> Result<Vec<(CellId, Version, MissingMask)>> {
        let mut found = Vec::new();
        self.kv.read(&mut |r| {
            let (start, end) = letter_range(PREPARED);
            found = crate::entries::collect(r, &start, &end, |k, v| {
                Ok((cell_of_key(k)?, Fragment::from_value(v)?))
            })?;
            Ok(())
        })?;
        let seals = found.into_iter().filter(|(_, f)| f.seal);
        Ok(seals.map(|(cell, f)| (cell, f.version, f.missing)).collect())
    }
    /// All cells with more logged overlay bytes than `overlay_bytes`, in order.
    pub fn overlaid(&self, overlay_bytes: u64) -> Result<Vec<(CellId, Header)>> {
        let mut found = Vec::new();
        self.kv.read(&mut |r| {
            found.clear();
            let (start, end) = letter_range(HEADER);
            let mut problem = Ok(());
            r.scan(&start, &end, &mut |key, value| match (cell_of_key(key), Header::from_value(value)) {
                (Ok(cell), Ok(h)) => {
                    if h.overlay_bytes > overlay_bytes {
                        found.push((cell, h));
                    }
                    Scan::More
                }
                (Err(e), _) | (_, Err(e)) => {
                    problem = Err(e);
                    Scan::Stop
                }
            })?;
            problem
        })?;
        Ok(found)
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
    /// The newest token epoch among a cell's overlays and base, and its file's fence.
    pub fn newest_token_epoch(&self, cell: CellId) -> Result<u32> {
        let mut newest = 0;
        self.kv.read(&mut |r| {
            let base = get::<Fragment>(r, &base_key(cell))?.map_or(0, |b| b.version.token_epoch());
            let logged = cells::overlays(r, cell, Seq(0), Seq(u64::MAX))?;
            let fence = get::<Fence>(r, &fence_key(cell.file))?.map_or(0, |f| f.token_epoch);
            newest = logged.iter().map(|(_, o)| o.token_epoch).max().unwrap_or(0).max(base).max(fence);
            Ok(())
        })?;
        Ok(newest)
    }
    /// The cells of a file that have overlays logged here.
    pub fn overlaid_cells(&self, file: FileId) -> Result<Vec<(CellId, Header)>> {
        let mut found = Vec::new();
        self.kv.read(&mut |r| {
            let (start, end) = file_range(HEADER, file, 0);
            found = crate::entries::collect(r, &start, &end, |k, v| {
                Ok((cell_of_key(k)?, Header::from_value(v)?))
            })?;
            found.retain(|(_, h)| h.overlay_count > 0);
            Ok(())
        })?;
        Ok(found)
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

    /// Versions of the group's stripes that writers have prepared here, neither committed nor dropped.
    pub fn writers_prepared(&self, group: PgId) -> Result<Vec<(CellId, Version)>> {
        let mut found = Vec::new();
        self.kv.read(&mut |r| {
            found = cells::in_doubt(r, group, false)?;
            Ok(())
        })?;
        Ok(found)
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
            self.settle_damage(write.cell)?;
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

    /// Cells with blocks found damaged and not yet repaired.
    pub fn damaged_cells(&self) -> Vec<CellId> {
        let damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        let cells: BTreeSet<CellId> = damaged.iter().map(|b| b.cell).collect();
        cells.into_iter().collect()
    }
    /// Reads the whole base of a cell, so that damage is found and counted; returns the bytes read.
    pub fn verify(&self, scope: &Scope, cell: CellId) -> Result<u64> {
        self.verify_view(scope, cell, ReadView::Base)
    }
    /// Like [`Self::verify`], with the cell's overlays, at the cell's own target.
    pub fn verify_merged(&self, scope: &Scope, cell: CellId) -> Result<u64> {
        self.verify_view(scope, cell, ReadView::Merged)
    }
    fn verify_view(&self, scope: &Scope, cell: CellId, view: ReadView) -> Result<u64> {
        let place = Place { target: self.target, group: scope.group, epoch: scope.epoch };
        let (version, offset, len) = (Version(0), 0, CELL_BYTES_MAX);
        let plan = self.plan_read(scope, &ReadCell { place, cell, view, version, offset, len })?;
        Ok(self.run(&plan)?.payload.iter().map(|part| part.len() as u64).sum())
    }

    /// The next cells with any entry, in order.
    pub fn next_cells(&self, after: Option<CellId>, limit: usize) -> Result<Vec<CellId>> {
        let mut found = Vec::new();
        self.kv.read(&mut |r| {
            found = lookup::next_cells(r, after, limit)?;
            Ok(())
        })?;
        Ok(found)
    }
    /// Progress of the scrub.
    pub fn scrub(&self) -> Result<Scrub> {
        let mut found = None;
        self.kv.read(&mut |r| {
            found = crate::entries::get(r, SCRUB)?;
            Ok(())
        })?;
        Ok(found.unwrap_or_default())
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
