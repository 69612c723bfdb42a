//! Repair of single stripes at a member that lacks something of them: the stripes that peers list, what the
//! member lacks of each, and how it gets that.
//!
//! [`plan`] is the pure part: what to do about one stripe.
use crate::alloc::Extent;
use crate::calls::Calls;
use crate::crash_points;
use crate::format::Overlay;
use crate::group::sequencer;
use crate::logs::take_data;
use crate::membership::Acting;
use crate::peers::join_all;
use crate::rebuild::Rebuilder;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Semaphore;
use weir_env::Env;
use weir_proto::data::*;
use weir_proto::map::MemberState;
use weir_proto::{CellId, Epoch, Error, FileId, PgId, Result, Seq, Version};

/// Stripes of a target repaired in parallel: each needs up to k + 1 fragments in memory.
pub(crate) const STRIPES_AT_ONCE: usize = 4;
/// Cells in one listing. Listings of all groups in parallel take as much memory as one of 2048 cells did
/// sequentially.
pub(crate) const LIST_LIMIT: u32 = 256;

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
    pub(crate) fn has_log(&self, own: &CellSummary) -> bool {
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

pub(crate) struct Stripes {
    env: Env,
    calls: Arc<Calls>,
    rebuilder: Arc<Rebuilder>,
    /// Permits for stripe repairs, shared by all groups.
    turns: Semaphore,
    /// Per group: the loss up to which cells from before it were dropped.
    forgotten: Mutex<BTreeMap<PgId, Epoch>>,
}

impl Stripes {
    pub fn new(env: &Env, calls: &Arc<Calls>, rebuilder: &Arc<Rebuilder>) -> Arc<Stripes> {
        Arc::new(Stripes {
            env: env.clone(),
            calls: calls.clone(),
            rebuilder: rebuilder.clone(),
            turns: Semaphore::new(STRIPES_AT_ONCE),
            forgotten: Mutex::default(),
        })
    }

    /// Once for each time that this target lost its data, and after a start.
    pub async fn forget_lost(&self, acting: &Acting) -> Result<()> {
        let (scope, store) = (acting.scope, acting.store.clone());
        let forgotten = || self.forgotten.lock().unwrap_or_else(PoisonError::into_inner);
        let known = forgotten().get(&scope.group).copied().unwrap_or_default();
        if scope.lost_at > known {
            self.env.tasks.blocking(move || store.forget_all_lost(&scope)).await?;
            forgotten().insert(scope.group, scope.lost_at);
        }
        Ok(())
    }

    /// The next stripes in order that any of the peers lists, and where the next listing starts.
    pub async fn list_stripes(
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
    pub async fn list_peers(
        &self,
        acting: &Acting,
        peers: &[usize],
        after: Option<CellId>,
        since: Epoch,
    ) -> Result<(Vec<CellList>, Option<CellId>)> {
        let ask = |p: &usize| {
            let request = acting.ask_cells(*p, after, since, LIST_LIMIT);
            self.calls.ask(request.target, request, Vec::new())
        };
        let calls = peers.iter().map(ask).collect();
        let mut lists = Vec::new();
        for answer in join_all(calls).await {
            lists.push(answer?.0);
        }
        // Only as far as every list covers; a stripe's cells are adjacent, so stop before the last stripe.
        let until = lists.iter().filter(|l| l.more).filter_map(|l| l.cells.last()).map(|s| s.cell).min();
        Ok((lists, until))
    }

    /// Returns whether there was something to repair.
    pub async fn repair_stripe(
        &self,
        acting: &Acting,
        file: FileId,
        stripe: u64,
        view: &StripeView,
    ) -> Result<bool> {
        let _turn = self.turns.acquire().await.expect("never closed");
        let own = acting.own_cell(file, stripe);
        let base = acting.store.stat_cell(&acting.scope, own)?.base;
        let own_logs = logs_here(acting, own, view)?;
        let data = usize::from(acting.scope.scheme.data);
        let todo = plan(view, base, &own_logs, acting.position, data);
        if todo.rebuild.is_some() {
            self.rebuilder.rebuild(acting, own, false).await?;
        }
        let is_new = todo != StripePlan::default();
        for index in todo.copy {
            self.copy_overlays(acting, CellId { index, ..own }).await?;
        }
        Ok(is_new)
    }

    /// Makes the own log of a data cell equal to that of a current holder.
    pub async fn copy_overlays(&self, acting: &Acting, cell: CellId) -> Result<()> {
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
        // Numbers above the sequencer's last one are left from an earlier epoch: their writes were never
        // acknowledged.
        let is_behind = acting.state() == MemberState::Behind;
        let mut stale = match is_behind && sequencer(acting.group(), cell) == Some(holder) {
            true => acting.store.index().log(cell)?.0,
            false => BTreeMap::new(),
        };
        let place = acting.place_of(holder);
        let (stat, _) = self.calls.ask(place.target, StatCell { place, cell }, Vec::new()).await?;
        let upto = stat.overlay_seqs.first().copied().unwrap_or_default();
        stale.retain(|seq, _| *seq > upto);
        let drops = !stale.is_empty();
        if drops {
            let numbers: Vec<Seq> = stale.keys().copied().collect();
            tracing::debug!(target_id = %acting.target(), %cell, %upto, ?numbers, "overlays that no other member has are dropped");
        }
        let copies = self.read_overlays(place, cell, upto).await?;
        let (store, scope) = (acting.store.clone(), acting.scope);
        let installing = move || store.install_overlays(&scope, cell, upto, copies, &stale);
        let committed = self.env.tasks.blocking(installing).await?;
        self.env.tasks.crash_point(crash_points::COPIED);
        acting.store.durable(committed).await?;
        Ok(drops)
    }

    /// A holder's overlays up to a number, verified.
    async fn read_overlays(
        &self,
        place: Place,
        cell: CellId,
        upto: Seq,
    ) -> Result<Vec<(Seq, Overlay, Bytes)>> {
        let (mut copies, mut after) = (Vec::new(), Seq(0));
        loop {
            let request = ReadOverlays { place, cell, after };
            let (log, mut payload) = self.calls.ask(place.target, request, Vec::new()).await?;
            for o in &log.extents {
                let data = take_data(cell, o, place.target, &mut payload)?;
                let OverlayExtent { seq, offset, len, kind, crc, token_epoch } = *o;
                let overlay = Overlay { offset, len, kind, crc, token_epoch, extent: Extent::default() };
                if seq <= upto {
                    copies.push((seq, overlay, data));
                }
                after = seq;
            }
            if !log.more || log.extents.is_empty() {
                return Ok(copies);
            }
        }
    }
}

/// Sequence and sum of the logs that this member keeps of a stripe, for those that the view has.
pub(crate) fn logs_here(acting: &Acting, own: CellId, view: &StripeView) -> Result<BTreeMap<u8, (Seq, u64)>> {
    let mut logs = BTreeMap::new();
    for index in view.logs.keys() {
        if let Some(h) = acting.store.index().header(CellId { index: *index, ..own })? {
            logs.insert(*index, (h.last_seq, h.log_sum));
        }
    }
    Ok(logs)
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
