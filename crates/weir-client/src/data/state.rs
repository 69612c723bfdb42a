//! The state of a stripe at the members of its group.
use super::{Data, GroupView, StripeRef, is_unreachable};
use crate::join::join_all;
use crate::targets::Pacing;
use weir_env::BoxFuture;
use weir_proto::data::{CellStat, StatCell};
use weir_proto::map::MemberState;
use weir_proto::{ErrorKind, Result, Seq, Version};

impl Data {
    /// A member's state of the stripe.
    pub async fn stat_cell(
        &self,
        s: &StripeRef,
        view: &GroupView,
        at: usize,
        cell: usize,
    ) -> Result<CellStat> {
        let request = StatCell { place: view.place(at), cell: s.cell(cell) };
        Ok(self.targets.call_member(view, at, &request, vec![], Pacing::Read, s.deadline).await?.reply)
    }

    /// Whether a member that refused a write as stale accepts other requests under the view's epoch. Then it
    /// refused the write itself, and no newer map will help. Otherwise a newer map will arrive, as soon as
    /// this client can reach the coordinator.
    pub async fn knows_no_newer(&self, s: &StripeRef, view: &GroupView, at: usize) -> bool {
        self.stat_cell(s, view, at, at).await.is_ok()
    }

    /// Asks members of the stripe's group, under one map, until all of them answer: a silent member goes
    /// down, or answers the next time.
    async fn ask_members<'a, T, F>(&'a self, s: &'a StripeRef, ask: F) -> Result<T>
    where
        F: Fn(GroupView) -> BoxFuture<'a, Result<T>>,
    {
        let (mut retry, mut waiting) = (self.targets.retry(s.deadline), None);
        loop {
            let view = self.writable_view(s).await?;
            let e = match ask(view.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(e) if is_unreachable(&e) || e.kind == ErrorKind::Stale => e,
                Err(e) => return Err(e),
            };
            if !retry.has_time() {
                return Err(e.of_kind(ErrorKind::Deadline).doing("not done by the deadline"));
            }
            waiting.replace(self.waits.begin(format!("targets of {}", view.group().id)));
            self.targets.wait_newer(view.map_version(), retry.next_pause()).await;
        }
    }

    async fn stat_member(&self, s: &StripeRef, view: &GroupView, at: usize, cell: usize) -> Result<CellStat> {
        let stat = self.stat_cell(s, view, at, cell).await;
        if let Err(e) = &stat
            && is_unreachable(e)
            && self.view(s)?.state(at) != MemberState::Down
        {
            self.targets.report(view.place(at), e).await;
        }
        stat
    }

    /// The state of the stripe at each current member.
    pub async fn stat_current(&self, s: &StripeRef) -> Result<Vec<CellStat>> {
        self.ask_members(s, |view| {
            Box::pin(async move {
                let current = (0..s.scheme().width()).filter(|i| view.state(*i) == MemberState::Current);
                let calls = current.map(|i| Box::pin(self.stat_member(s, &view, i, i)) as BoxFuture<'_, _>);
                join_all(calls.collect()).await.into_iter().collect()
            })
        })
        .await
    }

    /// Overlay sequence of each data cell, and the highest base version, before a stripe is replaced.
    pub async fn stripe_state(&self, s: &StripeRef) -> Result<(Vec<Seq>, Version)> {
        let cells: Vec<(Seq, Version)> = self
            .ask_members(s, |view| {
                Box::pin(async move {
                    let calls = (0..s.k()).map(|index| {
                        let asked = self.state_of_cell(s, &view, index);
                        Box::pin(asked) as BoxFuture<'_, Result<(Seq, Version)>>
                    });
                    join_all(calls.collect()).await.into_iter().collect()
                })
            })
            .await
            .map_err(|e| e.doing(format!("ask for {s}")))?;
        let base = cells.iter().map(|(_, base)| *base).max().unwrap_or_default();
        Ok((cells.into_iter().map(|(seq, _)| seq).collect(), base))
    }

    async fn state_of_cell(&self, s: &StripeRef, view: &GroupView, index: usize) -> Result<(Seq, Version)> {
        let at = view.sequencer(index as u8, s.scheme()).unwrap_or(index);
        let stat = self.stat_member(s, view, at, index).await?;
        let seqs = &stat.overlay_seqs;
        // A data cell's own target reports one number, a parity target one per data cell.
        let seq = if seqs.len() == s.k() { seqs.get(index) } else { seqs.first() };
        Ok((seq.copied().unwrap_or_default(), stat.base))
    }
}
