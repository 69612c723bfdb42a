//! Reads of a target's index: its entries of cells, of files and of groups.
//!
//! Each answer is of one state of the index. Changes nothing, and touches no slab.
use crate::cells;
use crate::entries::{self, collect, get};
use crate::format::*;
use crate::lookup;
use std::collections::BTreeMap;
use weir_kv::{CommitSeq, Read, SharedKv};
use weir_proto::data::{MissingMask, PreparedCell};
use weir_proto::{CellId, Epoch, FileId, PgId, Result, Seq, Version};

/// Cells that are read at a time, so that a long listing does not hold one state of the index.
const BATCH: usize = 2048;

pub struct Index(SharedKv);

impl Index {
    pub fn new(kv: SharedKv) -> Index {
        Index(kv)
    }

    /// An answer, and the commit that it has seen.
    pub fn read<T>(&self, mut look_up: impl FnMut(&dyn Read) -> Result<T>) -> Result<(CommitSeq, T)> {
        let mut found = None;
        let seen = self.0.read(&mut |r| {
            found = Some(look_up(r)?);
            Ok(())
        })?;
        Ok((seen, found.expect("a read that succeeds has an answer")))
    }
    fn answer<T>(&self, look_up: impl FnMut(&dyn Read) -> Result<T>) -> Result<T> {
        Ok(self.read(look_up)?.1)
    }

    // ---- a cell

    pub fn header(&self, cell: CellId) -> Result<Option<Header>> {
        self.answer(|r| get(r, &header_key(cell)))
    }
    /// The log of a cell, its last number, and its folded sequence.
    pub fn log(&self, cell: CellId) -> Result<(BTreeMap<Seq, Overlay>, Seq, Seq)> {
        self.answer(|r| {
            let header = get::<Header>(r, &header_key(cell))?;
            let (last, folded_seq) = header.map_or((Seq(0), Seq(0)), |h| (h.last_seq, h.folded_seq));
            let log = cells::overlays(r, cell, Seq(0), Seq(u64::MAX))?;
            Ok((log.into_iter().collect(), last, folded_seq))
        })
    }
    /// Whether this overlay is still under its number.
    pub fn holds_overlay(&self, cell: CellId, seq: Seq, overlay: &Overlay) -> Result<bool> {
        self.answer(|r| cells::holds(r, cell, seq, overlay))
    }
    /// Data of the cell with a lower token epoch is void.
    pub fn void_below(&self, cell: CellId) -> Result<u32> {
        self.answer(|r| entries::void_below(r, cell))
    }
    /// The newest token epoch among a cell's overlays and base, and its file's fence.
    pub fn newest_token_epoch(&self, cell: CellId) -> Result<u32> {
        self.answer(|r| {
            let base = get::<Fragment>(r, &base_key(cell))?.map_or(0, |b| b.version.token_epoch());
            let logged = cells::overlays(r, cell, Seq(0), Seq(u64::MAX))?;
            let fence = get::<Fence>(r, &fence_key(cell.file))?.map_or(0, |f| f.token_epoch);
            Ok(logged.iter().map(|(_, o)| o.token_epoch).max().unwrap_or(0).max(base).max(fence))
        })
    }

    // ---- a file

    /// Whether a write of this token epoch may go to the file.
    pub fn check_fence(&self, file: FileId, token_epoch: u32) -> Result<()> {
        self.answer(|r| cells::check_fence(r, file, token_epoch))
    }
    /// The cells of a file that have overlays logged here.
    pub fn overlaid_cells(&self, file: FileId) -> Result<Vec<(CellId, Header)>> {
        let (start, end) = file_range(HEADER, file, 0);
        let mut found =
            self.answer(|r| collect(r, &start, &end, |k, v| Ok((cell_of_key(k)?, Header::from_value(v)?))))?;
        found.retain(|(_, h)| h.overlay_count > 0);
        Ok(found)
    }
    /// Cells of a file with a prepared version of a writer.
    pub fn writers_in_doubt(&self, file: FileId) -> Result<Vec<PreparedCell>> {
        let (start, end) = file_range(PREPARED, file, 0);
        self.answer(|r| {
            let prepared = collect(r, &start, &end, |k, v| Ok((cell_of_key(k)?, Fragment::from_value(v)?)))?;
            let in_doubt = prepared.into_iter().filter(|(_, fragment)| !fragment.seal);
            let of = |(cell, fragment): (CellId, Fragment)| {
                let group = get::<Header>(r, &header_key(cell))?.map_or(PgId(0), |h| h.group);
                Ok(PreparedCell { cell, group, version: fragment.version })
            };
            in_doubt.map(of).collect()
        })
    }

    // ---- a group

    pub fn has_cells_of(&self, group: PgId) -> Result<bool> {
        self.answer(|r| Ok(!lookup::listed_cells(r, group, None, 1)?.is_empty()))
    }
    /// Versions of the group's stripes that writers have prepared here, neither committed nor dropped.
    pub fn writers_prepared(&self, group: PgId) -> Result<Vec<(CellId, Version)>> {
        self.answer(|r| cells::in_doubt(r, group, false))
    }
    /// The log sums of the group's cells in `after..=until` that have a log and were written since an epoch.
    pub fn log_sums(
        &self,
        group: PgId,
        mut after: Option<CellId>,
        until: Option<CellId>,
        since: Epoch,
    ) -> Result<BTreeMap<CellId, u64>> {
        let mut found = BTreeMap::new();
        loop {
            let batch = self.answer(|r| {
                let cells = lookup::listed_cells(r, group, after, BATCH)?;
                cells
                    .into_iter()
                    .map(|cell| Ok((cell, lookup::summary(r, cell)?)))
                    .collect::<Result<Vec<_>>>()
            })?;
            for (cell, summary) in &batch {
                if until.is_some_and(|u| *cell > u) {
                    return Ok(found);
                }
                if let Some(s) = summary.as_ref().filter(|s| s.epoch >= since && s.log_sum != 0) {
                    found.insert(*cell, s.log_sum);
                }
            }
            match batch.last() {
                Some((cell, _)) if batch.len() == BATCH => after = Some(*cell),
                _ => return Ok(found),
            }
        }
    }

    // ---- the target

    /// Versions that seals prepared and that are in doubt: cell, version, the members that took no part.
    pub fn seals_in_doubt(&self) -> Result<Vec<(CellId, Version, MissingMask)>> {
        let (start, end) = letter_range(PREPARED);
        let found = self
            .answer(|r| collect(r, &start, &end, |k, v| Ok((cell_of_key(k)?, Fragment::from_value(v)?))))?;
        let seals = found.into_iter().filter(|(_, f)| f.seal);
        Ok(seals.map(|(cell, f)| (cell, f.version, f.missing)).collect())
    }
    /// All cells with more logged overlay bytes than `overlay_bytes`, in order.
    pub fn overlaid(&self, overlay_bytes: u64) -> Result<Vec<(CellId, Header)>> {
        self.answer(|r| {
            let mut found = Vec::new();
            lookup::each(r, HEADER, |key, value| {
                let header = Header::from_value(value)?;
                if header.overlay_bytes > overlay_bytes {
                    found.push((cell_of_key(key)?, header));
                }
                Ok(())
            })?;
            Ok(found)
        })
    }
    /// The next cells with any entry, in order.
    pub fn next_cells(&self, after: Option<CellId>, limit: usize) -> Result<Vec<CellId>> {
        self.answer(|r| lookup::next_cells(r, after, limit))
    }
    /// The number of the newest truncation.
    pub fn newest_truncation(&self) -> Result<u64> {
        self.answer(entries::newest_truncation)
    }
    /// Progress of the scrub.
    pub fn scrub(&self) -> Result<Scrub> {
        Ok(self.answer(|r| get(r, SCRUB))?.unwrap_or_default())
    }
}
