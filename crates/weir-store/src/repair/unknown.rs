//! Cells that a returning member has and no other member knows: written while it was the only one, or given
//! up by their writer. They are dropped, once it is sure that no other member may still have them.
use super::Repair;
use crate::group::too_few;
use crate::membership::Acting;
use crate::peers::join_all;
use crate::stripes::{LIST_LIMIT, StripeView, may_be_ahead};
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::data::*;
use weir_proto::{CellId, Epoch, FileId, Result, Seq};

impl Repair {
    /// With fewer than k current members nothing can be rebuilt. But where targets went down one after the
    /// other (a site lost its power), the first of them have often missed nothing.
    pub(super) async fn check_nothing_was_written(
        &self,
        acting: &Acting,
        peers: &[usize],
        since: Epoch,
    ) -> Result<()> {
        let mut after = None;
        loop {
            let (lists, until) =
                self.parts.stripes.list_peers(acting, peers, after, Epoch(since.0 + 1)).await?;
            if lists.iter().flat_map(|l| &l.cells).any(|cell| cell.epoch > since) {
                return Err(too_few(acting.group()));
            }
            match until {
                Some(cell) => after = Some(cell),
                None => return Ok(()),
            }
        }
    }

    /// Drops versions that writers prepared here before this member was away, and that no current member has:
    /// they were dropped meanwhile. If any member had committed one, all would have it ([`HoldStripe`]).
    pub(super) async fn drop_aborted(&self, acting: &Acting, peers: &[usize]) -> Result<()> {
        let store = &acting.store;
        for (cell, version) in store.index().writers_prepared(acting.scope.group)? {
            if usize::from(cell.index) != acting.position {
                continue;
            }
            let asked = peers.iter().map(|p| self.parts.rebuilder.stat_peer(acting, *p, cell)).collect();
            let stats = join_all(asked).await.into_iter().collect::<Result<Vec<_>>>()?;
            if !stats.iter().any(|s| s.base == version || s.prepared.contains(&version)) {
                store.durable(store.drop_aborted(&acting.scope, cell, version)?).await?;
            }
        }
        Ok(())
    }

    /// Whether any cell here was last written before the group's present epoch, or may be ahead of other
    /// members: [`Self::drop_unknown`] skips all others. Listing raises the own store to the epoch, so none
    /// is added later. If there is none, the peers need not list all their cells.
    pub(super) fn may_have_more(&self, acting: &Acting, since: Epoch) -> Result<bool> {
        let (store, group) = (&acting.store, acting.group());
        let mut after = None;
        loop {
            let list = store.list_cells(group.id, after, Epoch(0), group.epoch, LIST_LIMIT)?;
            let more = |c: &CellSummary| c.epoch < group.epoch || may_be_ahead(c, since, group.epoch);
            if list.cells.iter().any(more) {
                return Ok(true);
            }
            match list.cells.last() {
                Some(last) if list.more => after = Some(last.cell),
                _ => return Ok(false),
            }
        }
    }

    /// Drops cells that no current peer has and that were last written before the group's present epoch: the
    /// peers dropped them while this target was away. Cells with overlays that only this target has (never
    /// acknowledged) are replaced by the other members' copies.
    pub(super) async fn drop_unknown(&self, acting: &Acting, peers: &[usize], since: Epoch) -> Result<()> {
        let mut after = None;
        loop {
            let (known, until) = self.parts.stripes.list_stripes(acting, peers, after, Epoch(0)).await?;
            self.drop_unknown_up_to(acting, peers, since, after, until, &known).await?;
            match until {
                Some(cell) => after = Some(cell),
                None => return Ok(()),
            }
        }
    }
    async fn drop_unknown_up_to(
        &self,
        acting: &Acting,
        peers: &[usize],
        since: Epoch,
        mut after: Option<CellId>,
        until: Option<CellId>,
        known: &BTreeMap<(FileId, u64), StripeView>,
    ) -> Result<()> {
        let (store, group) = (&acting.store, acting.group());
        let mut checked: BTreeSet<(FileId, u64)> = BTreeSet::new();
        loop {
            let list = store.list_cells(group.id, after, Epoch(0), group.epoch, LIST_LIMIT)?;
            for summary in &list.cells {
                after = Some(summary.cell);
                let stripe = (summary.cell.file, summary.cell.stripe);
                if until.is_some_and(|u| summary.cell > u) {
                    return Ok(());
                }
                let is_ahead = may_be_ahead(summary, since, group.epoch);
                if (summary.epoch >= group.epoch && !is_ahead) || checked.contains(&stripe) {
                    continue;
                }
                match known.get(&stripe) {
                    Some(view) if !(since..group.epoch).contains(&summary.epoch) && view.has_log(summary) => {
                        continue;
                    }
                    Some(view) if is_ahead => {
                        let mut view = view.clone();
                        for index in 0..group.scheme.data {
                            view.logs.entry(index).or_insert_with(|| BTreeSet::from([(Seq(0), 0)]));
                        }
                        self.parts.stripes.repair_stripe(acting, stripe.0, stripe.1, &view).await?;
                    }
                    // Written here after the peers were listed, or not comparable.
                    None if summary.epoch < group.epoch => {
                        self.drop_if_unknown(acting, peers, summary.cell).await?;
                    }
                    _ => continue,
                }
                checked = BTreeSet::from([stripe]);
            }
            if !list.more {
                return Ok(());
            }
        }
    }
    async fn drop_if_unknown(&self, acting: &Acting, peers: &[usize], cell: CellId) -> Result<()> {
        let (store, group) = (&acting.store, acting.group());
        let asked = peers.iter().map(|p| self.parts.rebuilder.stat_peer(acting, *p, cell)).collect();
        for stat in join_all(asked).await {
            if stat?.known {
                return Ok(());
            }
        }
        for index in 0..group.members.len() as u8 {
            let seq = store.drop_cell_older(CellId { index, ..cell }, group.epoch)?;
            store.durable(seq).await?;
        }
        Ok(())
    }
}
