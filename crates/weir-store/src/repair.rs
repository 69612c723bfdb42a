//! Repair: a member that was away gets the writes that it missed; a damaged fragment is rebuilt.
//!
//! While a member is behind it receives every new write, so everything it lacks was written before: it lists
//! the cells that current peers have written since it was current, compares versions, rebuilds its fragment
//! from k others of one version, copies overlay logs, drops cells that no other member has any more, and then
//! reports that it caught up. A listing raises each peer to the group's epoch first, so nothing can be
//! written under an older one after it. Truncations that it missed are applied before all that
//! (`truncations.rs`).
//!
//! A member that returned without its data (`lost_at` in the map) lists everything, and first drops its
//! earlier cells: an older copy may have void data, or overlays whose numbers were reused since.
//!
//! [`plan`] is the pure part: what to do about one stripe.
use crate::alloc::Extent;
use crate::cells::Scope;
use crate::crash_points;
use crate::format::Overlay;
use crate::peers::join_all;
use crate::service::{Acting, STRIPES_AT_ONCE, StorageNode, Target, sequencer};
use crate::store::{FragmentWrite, Install};
use bytes::Bytes;
use decode::too_few;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use weir_env::BoxFuture;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::map::{Group, MemberState};
use weir_proto::{CellId, Epoch, Error, FileId, Result, Seq, Version};

mod rounds;

mod decode;
mod unknown;

pub(crate) use decode::Rebuilt;
pub use decode::{holders_of, newest_whole};

/// Cells in one listing. Listings of all groups in parallel take as much memory as one of 2048 cells did
/// sequentially.
const LIST_LIMIT: u32 = 256;

/// The state of one stripe at the peers and at this target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StripeView {
    /// Newest base that a current peer holds of any fragment.
    pub newest: Version,
    /// Sequence and sum of each data cell's log at the current peers. More than one: the logs differ.
    pub logs: BTreeMap<u8, BTreeSet<(Seq, u64)>>,
}

impl StripeView {
    /// Whether the logs of this cell at all peers that keep one are the same as here.
    fn has_log(&self, own: &CellSummary) -> bool {
        let logs = self.logs.get(&own.cell.index);
        logs.is_some_and(|logs| logs.iter().all(|log| *log == (own.seq, own.log_sum)))
    }
}

/// The repairs of one stripe at the member at `position`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StripePlan {
    /// Rebuild the own fragment at this version.
    pub rebuild: Option<Version>,
    /// Copy the overlay logs of these data cells.
    pub copy: Vec<u8>,
}

/// `own`: the version of the own base. `own_logs`: sequence and sum of the own logs of data cells.
pub fn plan(
    view: &StripeView,
    own: Version,
    own_logs: &BTreeMap<u8, (Seq, u64)>,
    position: usize,
    data: usize,
) -> StripePlan {
    let keeps = |index: &u8| position >= data || position == usize::from(*index);
    let differs = |index: &u8, logs: &BTreeSet<(Seq, u64)>| {
        let own = own_logs.get(index).copied().unwrap_or_default();
        logs.iter().any(|log| *log != own)
    };
    StripePlan {
        rebuild: (view.newest > own).then_some(view.newest),
        copy: view.logs.iter().filter(|(i, logs)| keeps(i) && differs(i, logs)).map(|(i, _)| *i).collect(),
    }
}

/// Whether a cell of a member that is behind since `since`, in a group of epoch `epoch`, may have overlays
/// that only this member has. The cell's epoch does not show it: such an overlay may have been logged under
/// an older epoch, or the cell may have been written since.
pub fn may_be_ahead(cell: &CellSummary, since: Epoch, epoch: Epoch) -> bool {
    cell.seq > Seq(0) || (since..epoch).contains(&cell.epoch)
}

impl StorageNode {
    async fn repair_group(&self, acting: &Acting) -> Result<()> {
        let group = acting.group();
        let since = group.members[acting.position].complete_since();
        let peers = current_peers(group, acting.position);
        // m + 1 members have a copy of a cell's log: fewer than k members may all lack it.
        if !group.knows_all_writes() {
            return Err(too_few(group));
        }
        if group.members[acting.position].is_filled(acting.map.level) {
            return self.refill_group(acting, &peers).await;
        }
        if !group.is_writable() {
            self.check_nothing_was_written(acting, &peers, since).await?;
        }
        self.forget_lost(acting).await?;
        let mut after = None;
        loop {
            let (stripes, next) = self.list_stripes(acting, &peers, after, since).await?;
            let stripes: Vec<_> = stripes.into_iter().collect();
            for some in stripes.chunks(STRIPES_AT_ONCE) {
                let repairs = some.iter().map(|((file, stripe), view)| {
                    Box::pin(self.repair_stripe(acting, *file, *stripe, view)) as BoxFuture<'_, Result<bool>>
                });
                join_all(repairs.collect()).await.into_iter().collect::<Result<Vec<bool>>>()?;
            }
            match next {
                Some(cell) => after = Some(cell),
                None => break,
            }
        }
        if self.may_have_more(acting, since)? {
            self.drop_unknown(acting, &peers, since).await?;
        }
        self.drop_aborted(acting, &peers).await
    }

    /// Once for each time that this target lost its data, and after a start.
    pub(crate) async fn forget_lost(&self, acting: &Acting) -> Result<()> {
        let (scope, store) = (acting.scope, acting.target.store.clone());
        let forgotten = || acting.target.forgotten.lock().unwrap_or_else(PoisonError::into_inner);
        let known = forgotten().get(&scope.group).copied().unwrap_or_default();
        if scope.lost_at > known {
            self.env.tasks.blocking(move || store.forget_all_lost(&scope)).await?;
            forgotten().insert(scope.group, scope.lost_at);
        }
        Ok(())
    }

    /// The next stripes in order that any of the peers lists, and where the next listing starts.
    pub(crate) async fn list_stripes(
        &self,
        acting: &Acting,
        peers: &[usize],
        after: Option<CellId>,
        since: Epoch,
    ) -> Result<(BTreeMap<(FileId, u64), StripeView>, Option<CellId>)> {
        let (lists, until) = self.list_peers(acting, peers, after, since).await?;
        let data = acting.group().scheme.data;
        let mut stripes: BTreeMap<(FileId, u64), StripeView> = BTreeMap::new();
        for summary in lists.iter().flat_map(|l| &l.cells) {
            let cell = summary.cell;
            if until.is_some_and(|u| cell > u) {
                continue;
            }
            let view = stripes.entry((cell.file, cell.stripe)).or_default();
            view.newest = view.newest.max(summary.base);
            if cell.index < data {
                view.logs.entry(cell.index).or_default().insert((summary.seq, summary.log_sum));
            }
        }
        Ok((stripes, until))
    }

    /// The next cells of each peer, in order, that were written in `since` or later, and the last cell that
    /// all lists cover.
    async fn list_peers(
        &self,
        acting: &Acting,
        peers: &[usize],
        after: Option<CellId>,
        since: Epoch,
    ) -> Result<(Vec<CellList>, Option<CellId>)> {
        let group = acting.group();
        let calls = peers
            .iter()
            .map(|p| {
                let target = group.members[*p].target;
                let request = ListCells {
                    target,
                    group: group.id,
                    after,
                    since,
                    epoch: group.epoch,
                    limit: LIST_LIMIT,
                };
                self.ask(target, request, Vec::new())
            })
            .collect();
        let mut lists = Vec::new();
        for answer in join_all(calls).await {
            lists.push(answer?.0);
        }
        // Only as far as every list covers; a stripe's cells are adjacent, so stop before the last stripe.
        let until = lists.iter().filter(|l| l.more).filter_map(|l| l.cells.last()).map(|s| s.cell).min();
        Ok((lists, until))
    }

    /// Returns whether there was something to repair.
    pub(crate) async fn repair_stripe(
        &self,
        acting: &Acting,
        file: FileId,
        stripe: u64,
        view: &StripeView,
    ) -> Result<bool> {
        let _turn = acting.target.repairs.acquire().await.expect("never closed");
        let store = &acting.target.store;
        let own = CellId { file, stripe, index: acting.position as u8 };
        let stat = store.stat_cell(&acting.scope, own)?;
        let data = usize::from(acting.scope.scheme.data);
        let mut own_logs = BTreeMap::new();
        for index in view.logs.keys() {
            if let Some(h) = store.header(CellId { index: *index, ..own })? {
                own_logs.insert(*index, (h.last_seq, h.log_sum));
            }
        }
        let todo = plan(view, stat.base, &own_logs, acting.position, data);
        if todo.rebuild.is_some() {
            self.rebuild(acting, own, false).await?;
        }
        let is_new = todo != StripePlan::default();
        for index in todo.copy {
            self.copy_overlays(acting, CellId { index, ..own }).await?;
        }
        Ok(is_new)
    }

    /// Rebuilds this target's fragment from the newest version that k current peers hold.
    pub(crate) async fn rebuild(&self, acting: &Acting, own: CellId, replace: bool) -> Result<()> {
        let Some(rebuilt) = self.decode_from_peers(acting, own).await? else { return Ok(()) };
        let place = if replace { Install::Damaged } else { Install::Missed };
        self.install(acting, own, rebuilt, place, 0).await
    }
    async fn install(
        &self,
        acting: &Acting,
        own: CellId,
        rebuilt: Rebuilt,
        place: Install,
        missing: MissingMask,
    ) -> Result<()> {
        let (target, scope) = (acting.target.clone(), acting.scope);
        let (committed, _) = self
            .env
            .tasks
            .blocking(move || {
                let write = FragmentWrite {
                    cell: own,
                    version: rebuilt.version,
                    mode: WriteMode::Fresh,
                    missing: rebuilt.missing | missing,
                    folded_seqs: &rebuilt.folded_seqs,
                    block_crcs: &block_crcs(&rebuilt.bytes, CHECKSUM_BLOCK as usize),
                    data: &rebuilt.bytes,
                };
                target.store.install(&scope, &write, rebuilt.folded_seq, place)
            })
            .await?;
        self.env.tasks.crash_point(crash_points::REBUILT);
        acting.target.store.durable(committed).await
    }

    /// Makes the own log of a data cell equal to that of a current holder.
    pub(crate) async fn copy_overlays(&self, acting: &Acting, cell: CellId) -> Result<()> {
        let group = acting.group();
        let data = usize::from(group.scheme.data);
        let holders = [usize::from(cell.index)].into_iter().chain(data..group.members.len());
        let mut problem = Error::unavailable(format!("cell {cell}: no current member has its overlays"));
        for holder in holders {
            if holder == acting.position || group.members[holder].state != MemberState::Current {
                continue;
            }
            // Data that is damaged at one holder is intact at another. After overlays were dropped, new ones
            // may have been logged under their numbers and not copied: compare once more.
            let mut dropped = self.copy_overlays_from(acting, cell, holder).await;
            while matches!(dropped, Ok(true)) {
                dropped = self.copy_overlays_from(acting, cell, holder).await;
            }
            match dropped {
                Ok(_) => return Ok(()),
                Err(e) => problem = e,
            }
        }
        Err(problem)
    }

    /// Returns whether overlays were dropped that only this target had.
    async fn copy_overlays_from(&self, acting: &Acting, cell: CellId, holder: usize) -> Result<bool> {
        let group = acting.group();
        // Numbers above the sequencer's last one are left from an earlier epoch: their writes were never
        // acknowledged.
        let is_behind = group.members[acting.position].state == MemberState::Behind;
        let mut stale = match is_behind && sequencer(group, cell) == Some(holder) {
            true => acting.target.store.log(cell)?.0,
            false => BTreeMap::new(),
        };
        let place = Place { target: group.members[holder].target, group: group.id, epoch: group.epoch };
        let mut after = Seq(0);
        let (stat, _) = self.ask(place.target, StatCell { place, cell }, Vec::new()).await?;
        let upto = stat.overlay_seqs.first().copied().unwrap_or_default();
        stale.retain(|seq, _| *seq > upto);
        let drops = !stale.is_empty();
        if drops {
            let numbers: Vec<Seq> = stale.keys().copied().collect();
            tracing::debug!(target_id = %acting.target.store.target, %cell, %upto, ?numbers, "overlays that no other member has are dropped");
        }
        let mut copies = Vec::new();
        loop {
            let (log, payload) =
                self.ask(place.target, ReadOverlays { place, cell, after }, Vec::new()).await?;
            let mut rest = payload;
            for o in &log.extents {
                let data = match o.kind {
                    OverlayKind::Zero | OverlayKind::Void => Bytes::new(),
                    OverlayKind::Data if o.len as usize <= rest.len() => rest.split_to(o.len as usize),
                    OverlayKind::Data => {
                        return Err(Error::damaged(format!("overlays of cell {cell}: cut short")));
                    }
                };
                if o.kind == OverlayKind::Data && crc32c(&data) != o.crc {
                    return Err(Error::damaged(format!(
                        "overlay {} of cell {cell} fails its checksum",
                        o.seq
                    )));
                }
                let overlay = Overlay {
                    offset: o.offset,
                    len: o.len,
                    kind: o.kind,
                    crc: o.crc,
                    token_epoch: o.token_epoch,
                    extent: Extent::default(),
                };
                if o.seq <= upto {
                    copies.push((o.seq, overlay, data));
                }
                after = o.seq;
            }
            if !log.more || log.extents.is_empty() {
                break;
            }
        }
        let (target, scope) = (acting.target.clone(), acting.scope);
        let committed = self
            .env
            .tasks
            .blocking(move || target.store.install_overlays(&scope, cell, upto, copies, &stale))
            .await?;
        self.env.tasks.crash_point(crash_points::COPIED);
        acting.target.store.durable(committed).await?;
        Ok(drops)
    }

    /// Verifies cells that are suspected of damage, and rebuilds the damaged ones.
    pub(crate) async fn repair_damaged(&self, target: &Arc<Target>) -> Result<()> {
        for cell in target.take_suspects() {
            if let Some(acting) = self.acting_for(target, cell)? {
                let (checked, scope) = (target.clone(), acting.scope);
                // Its error is the damage, which is counted there and repaired below.
                let _ = self.env.tasks.blocking(move || checked.store.verify(&scope, cell)).await;
            }
        }
        for cell in target.store.damaged_cells() {
            let Some(acting) = self.acting_for(target, cell)? else { continue };
            let mended = match usize::from(cell.index) == acting.position {
                true => self.rebuild(&acting, cell, true).await,
                false => self.copy_overlays(&acting, cell).await,
            };
            if let Err(e) = mended {
                tracing::debug!(%cell, "repair a damaged fragment: {e}");
            }
        }
        Ok(())
    }
    pub(crate) fn acting_for(&self, target: &Arc<Target>, cell: CellId) -> Result<Option<Acting>> {
        let Some(header) = target.store.header(cell)? else { return Ok(None) };
        let map = self.peers.map();
        let Some(group) = map.group(header.group) else { return Ok(None) };
        let position = group.members.iter().position(|m| m.target == target.store.target);
        let acting = |position| {
            let scope = Scope::at(group, position);
            Acting { target: target.clone(), scope, map: map.clone(), position }
        };
        Ok(position.map(acting))
    }
}

pub(crate) fn current_peers(group: &Group, own: usize) -> Vec<usize> {
    let current = |(p, m): &(usize, &weir_proto::map::Member)| *p != own && m.state == MemberState::Current;
    group.members.iter().enumerate().filter(current).map(|(p, _)| p).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_lists_the_parts_that_a_member_lacks() {
        let log = |seq, sum| BTreeSet::from([(Seq(seq), sum)]);
        let view = StripeView {
            newest: Version::new(1, 4),
            logs: BTreeMap::from([
                (0, log(3, 7)),
                (1, log(0, 0)),
                (2, log(9, 8)),
                (3, BTreeSet::from([(Seq(1), 1), (Seq(2), 5)])),
            ]),
        };
        let own = BTreeMap::from([(0, (Seq(3), 7)), (2, (Seq(9), 1)), (3, (Seq(2), 5))]);
        let plan = |version, position| plan(&view, Version::new(1, version), &own, position, 4);
        let parity = StripePlan { rebuild: Some(Version::new(1, 4)), copy: vec![2, 3] };
        assert_eq!(plan(3, 5), parity);
        assert_eq!(plan(4, 2), StripePlan { rebuild: None, copy: vec![2] });
        assert_eq!(plan(4, 0), StripePlan::default());
        assert_eq!(plan(4, 1), StripePlan::default());
    }
}
