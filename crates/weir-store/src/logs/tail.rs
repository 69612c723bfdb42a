//! The tail of a log: overlays that a target may have lost before it started.
//!
//! The coordinator recognises an older copy of a target, except one from within the last second before its
//! last report ([`crate::runs`]). Such a copy lacks overlays that were acknowledged. As sequencer it would
//! number other writes like them, and make void what only the other keepers have. So before its first number
//! in a cell a target that has started compares the cell's log with theirs and adopts the overlays that it
//! lacks. Later it cannot lack any: each is logged here first, and an overlay that only others have is one
//! whose sequencer died before it was acknowledged.
//!
//! [`adoptable`] is the pure part.
use crate::cells::same_write;
use crate::format::Overlay;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_proto::data::OverlayKind;
use weir_proto::{CellId, PgId, Seq};

/// Cells that were compared one by one; beyond that the set begins again.
const CELLS_MAX: usize = 65_536;

/// A log without its data.
pub type Log = BTreeMap<Seq, Overlay>;

/// A keeper's log of a cell above its folded sequence, the last number in it, and that sequence.
#[derive(Clone, Default)]
pub struct LogState {
    pub log: Log,
    pub last: Seq,
    pub folded_seq: Seq,
}

/// Which logs were compared with the other keepers' since the target started.
#[derive(Default)]
pub struct Tails(Mutex<Compared>);

#[derive(Default)]
struct Compared {
    groups: BTreeSet<PgId>,
    /// Of other groups.
    cells: BTreeSet<CellId>,
}

impl Tails {
    fn lock(&self) -> MutexGuard<'_, Compared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn is_compared(&self, group: PgId, cell: CellId) -> bool {
        let compared = self.lock();
        compared.groups.contains(&group) || compared.cells.contains(&cell)
    }
    /// All logs of the group: compared, or copied from the other members.
    pub fn note_group(&self, group: PgId) {
        self.lock().groups.insert(group);
    }
    pub fn note_cell(&self, cell: CellId) {
        let mut compared = self.lock();
        if compared.cells.len() >= CELLS_MAX {
            compared.cells.clear();
        }
        compared.cells.insert(cell);
    }
}

/// The numbers above `own_last` that other keepers hold, each with one that has it. Not a number that is void
/// or another overlay at one of them: then it was not acknowledged. `logs`: theirs.
pub fn adoptable(own_last: Seq, logs: &BTreeMap<usize, LogState>) -> BTreeMap<Seq, usize> {
    let folded = logs.values().map(|theirs| theirs.folded_seq).max().unwrap_or_default().max(own_last);
    let mut found = BTreeMap::new();
    for (peer, theirs) in logs {
        for (seq, overlay) in theirs.log.iter().filter(|(seq, _)| **seq > folded) {
            let same = |log: &Log| log.get(seq).is_none_or(|there| same_write(overlay, there));
            if overlay.kind != OverlayKind::Void && logs.values().all(|theirs| same(&theirs.log)) {
                found.entry(*seq).or_insert(*peer);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::FileId;

    #[test]
    fn records_of_others_above_the_own_log_are_adopted() {
        let entry = |crc: u32| Overlay {
            offset: 0,
            len: 1,
            kind: if crc == 0 { OverlayKind::Void } else { OverlayKind::Data },
            crc,
            token_epoch: 1,
            extent: Default::default(),
        };
        let log = |entries: &[(u64, u32)], folded: u64| -> LogState {
            let last = Seq(entries.last().map_or(folded, |(seq, _)| *seq));
            let log = entries.iter().map(|(s, crc)| (Seq(*s), entry(*crc))).collect();
            LogState { log, last, folded_seq: Seq(folded) }
        };
        let found = |own_last: u64, logs: &[LogState]| -> Vec<(u64, usize)> {
            let logs = logs.iter().cloned().enumerate().collect();
            adoptable(Seq(own_last), &logs).into_iter().map(|(seq, peer)| (seq.0, peer)).collect()
        };
        let both = [log(&[(1, 1), (2, 2), (3, 3)], 0), log(&[(1, 1), (2, 2), (3, 3)], 0)];
        assert_eq!(found(1, &both), [(2, 0), (3, 0)]);
        assert_eq!(found(3, &both), []);
        assert_eq!(found(1, &[]), []);
        let one_lacks_it = [log(&[(1, 1), (2, 2)], 0), log(&[(1, 1), (2, 2), (3, 3)], 0)];
        assert_eq!(found(1, &one_lacks_it), [(2, 0), (3, 1)]);
        let void_or_another = [log(&[(2, 0), (3, 3), (4, 4)], 0), log(&[(2, 2), (3, 5), (4, 4)], 0)];
        assert_eq!(found(1, &void_or_another), [(4, 0)]);
        let one_has_sealed = [log(&[(2, 2), (3, 3)], 0), log(&[(3, 3)], 2)];
        assert_eq!(found(1, &one_has_sealed), [(3, 0)]);
    }

    #[test]
    fn compared_cells_are_remembered_up_to_a_limit() {
        let (tails, group) = (Tails::default(), PgId(1));
        let cell = |stripe| CellId { file: FileId::default(), stripe, index: 0 };
        assert!(!tails.is_compared(group, cell(0)));
        (0..CELLS_MAX as u64 + 1).for_each(|stripe| tails.note_cell(cell(stripe)));
        assert!(tails.is_compared(group, cell(CELLS_MAX as u64)) && !tails.is_compared(group, cell(0)));
        tails.note_group(group);
        assert!(tails.is_compared(group, cell(0)) && !tails.is_compared(PgId(2), cell(0)));
    }
}
