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
use super::agree::Log;
use super::*;
use std::collections::BTreeSet;
use weir_proto::checksum::crc32c;

/// Cells that were compared one by one; beyond that the set begins again.
const CELLS_MAX: usize = 65_536;
/// Between attempts while a keeper does not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Which logs were compared with the other keepers' since the target started.
#[derive(Default)]
pub(crate) struct Tails(Mutex<Compared>);

#[derive(Default)]
struct Compared {
    groups: BTreeSet<PgId>,
    /// Of other groups.
    cells: BTreeSet<CellId>,
}

impl Tails {
    fn lock(&self) -> std::sync::MutexGuard<'_, Compared> {
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
    fn note_cell(&self, cell: CellId) {
        let mut compared = self.lock();
        if compared.cells.len() >= CELLS_MAX {
            compared.cells.clear();
        }
        compared.cells.insert(cell);
    }
}

/// The numbers above `own_last` that other keepers hold, each with one that has it. Not a number that is void
/// or another overlay at one of them: then it was not acknowledged. `logs`: theirs, each with its last number
/// and its folded sequence.
pub(super) fn adoptable(own_last: Seq, logs: &BTreeMap<usize, (Log, Seq, Seq)>) -> BTreeMap<Seq, usize> {
    let folded = logs.values().map(|(_, _, folded)| *folded).max().unwrap_or_default().max(own_last);
    let mut found = BTreeMap::new();
    for (peer, (log, ..)) in logs {
        for (seq, overlay) in log.iter().filter(|(seq, _)| **seq > folded) {
            let same = |log: &Log| log.get(seq).is_none_or(|there| crate::cells::same_write(overlay, there));
            if overlay.kind != OverlayKind::Void && logs.values().all(|(log, ..)| same(log)) {
                found.entry(*seq).or_insert(*peer);
            }
        }
    }
    found
}

impl StorageNode {
    /// Returns when the log of the cell was compared since the target started, with the newest map.
    pub(super) async fn check_tail(
        &self,
        mut acting: Acting,
        cell: CellId,
        deadline: Instant,
    ) -> Result<Acting> {
        let group = acting.scope.group;
        while !acting.target.tails.is_compared(group, cell) {
            let compared = tokio::select! {
                biased;
                compared = self.agree_on(&acting.target, cell, group) => compared,
                () = self.epoch_passes(group) => Err(Error::unavailable("the group has changed")),
            };
            match compared {
                Ok(()) => acting.target.tails.note_cell(cell),
                Err(e) if self.env.clock.now() >= deadline => {
                    return Err(e.doing(format_args!("compare the log of cell {cell} after a start")));
                }
                Err(e) => {
                    tracing::debug!(%cell, "compare a log after a start: {e}");
                    self.env.clock.sleep(RETRY_PAUSE).await;
                }
            }
            let epoch = self.peers.map().group(group).map_or(acting.scope.epoch, |g| g.epoch);
            let place = Place { target: acting.target.store.target, group, epoch };
            acting = self.acting(place).await?;
        }
        Ok(acting)
    }

    /// The overlays of these numbers with their bytes, each from the peer that has it.
    pub(super) async fn fetch_overlays(
        &self,
        acting: &Acting,
        cell: CellId,
        numbers: &BTreeMap<Seq, usize>,
    ) -> Result<BTreeMap<Seq, (OverlayExtent, Bytes)>> {
        let mut found = BTreeMap::new();
        for peer in numbers.values().copied().collect::<BTreeSet<usize>>() {
            let wanted = numbers.iter().filter(|(_, p)| **p == peer).map(|(seq, _)| *seq).collect();
            found.extend(self.fetch_overlays_of(acting, cell, peer, &wanted).await?);
        }
        Ok(found)
    }

    async fn fetch_overlays_of(
        &self,
        acting: &Acting,
        cell: CellId,
        peer: usize,
        numbers: &BTreeSet<Seq>,
    ) -> Result<BTreeMap<Seq, (OverlayExtent, Bytes)>> {
        let group = acting.group();
        let place = Place { target: group.members[peer].target, group: group.id, epoch: group.epoch };
        let mut found = BTreeMap::new();
        let Some(first) = numbers.first() else { return Ok(found) };
        let mut after = Seq(first.0.saturating_sub(1));
        loop {
            let (log, mut rest) =
                self.ask(place.target, ReadOverlays { place, cell, after }, Vec::new()).await?;
            for o in &log.extents {
                after = o.seq;
                let len = if o.kind == OverlayKind::Data { o.len as usize } else { 0 };
                if rest.len() < len {
                    return Err(Error::damaged(format!("overlays of cell {cell}: cut short")));
                }
                let data = rest.split_to(len);
                if o.kind == OverlayKind::Data && crc32c(&data) != o.crc {
                    let (seq, from) = (o.seq, place.target);
                    return Err(Error::damaged(format!(
                        "overlay {seq} of cell {cell} from {from} fails its checksum"
                    )));
                }
                if numbers.contains(&o.seq) {
                    found.insert(o.seq, (o.clone(), data));
                }
            }
            if !log.more || log.extents.is_empty() {
                return Ok(found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Overlay;

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
        let log = |entries: &[(u64, u32)], folded: u64| -> (Log, Seq, Seq) {
            let last = entries.last().map_or(folded, |(seq, _)| *seq);
            (entries.iter().map(|(s, crc)| (Seq(*s), entry(*crc))).collect(), Seq(last), Seq(folded))
        };
        let found = |own_last: u64, logs: &[(Log, Seq, Seq)]| -> Vec<(u64, usize)> {
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
