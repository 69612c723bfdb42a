//! Refill: a member without data, because it took a lost target's place or returned empty, is filled with all
//! data of its group.
//!
//! That may take hours, so seals continue meanwhile, without it. It takes over the fences of its peers first,
//! as it would otherwise accept writes that they refuse. Then it goes through all stripes, and again through
//! those that were written or sealed since, until there are few. It reports that (`CaughtUp`), the
//! coordinator makes it a member that is behind, seals wait, and the usual repair does the rest.
//!
//! In the other direction: cells of a group whose place another target took are dropped once all members are
//! current.
use crate::fences::LIST_MAX;
use crate::peers::join_all;
use crate::refilled::Refill;
use crate::repair::StripeView;
use crate::service::{Acting, STRIPES_AT_ONCE, StorageNode, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::data::{GroupAt, ListFences};
use weir_proto::map::{ClusterMap, Group, MemberState};
use weir_proto::{CellId, Epoch, Error, FileId, Result, TargetId};

/// Seals wait while this number of stripes is repaired, for a moment.
const STRIPES_LEFT_MAX: usize = 100;
/// Passes over a group in one round. The last pass begins after these even if writes are as fast as repairs.
const PASSES_MAX: usize = 8;

/// Groups in which another target has taken this one's place, and every member is current.
fn handed_over(map: &ClusterMap, target: TargetId) -> impl Iterator<Item = &Group> {
    let is_whole = |g: &&Group| g.members.iter().all(|m| m.state == MemberState::Current);
    let is_mine = move |g: &&Group| g.members.iter().any(|m| m.target == target);
    let comes = move |g: &&Group| map.move_of(g.id).is_some_and(|found| found.to == target);
    map.groups.iter().filter(move |g| !is_mine(g) && !comes(g)).filter(is_whole)
}

/// Stripes of a listing that are still to be checked.
type Listed = std::collections::btree_map::IntoIter<(FileId, u64), StripeView>;

/// One pass over a group's stripes.
#[derive(Default)]
struct Pass {
    repaired: usize,
    failed: usize,
    problem: Option<Error>,
}

impl StorageNode {
    /// Takes over the fences of the current members of groups in which the target is filled. Groups with a
    /// member that does not answer are not repaired in this round.
    pub(crate) async fn take_fences(&self, target: &Arc<Target>, behind: &mut Vec<Acting>) {
        let wants = |acting: &Acting| {
            let is_filled = acting.group().members[acting.position].is_filled(acting.map.level);
            is_filled && lock(target).fences_since.get(&acting.scope.group) != Some(&acting.scope.lost_at)
        };
        let mut peers: BTreeMap<TargetId, Vec<GroupAt>> = BTreeMap::new();
        for acting in behind.iter().filter(|acting| wants(acting)) {
            let at = GroupAt { group: acting.scope.group, epoch: acting.scope.epoch };
            for member in acting.group().members.iter().filter(|m| m.state == MemberState::Current) {
                peers.entry(member.target).or_default().push(at.clone());
            }
        }
        let mut silent = BTreeSet::new();
        for (peer, epochs) in peers {
            if let Err(e) = self.take_fences_of(target, peer, epochs).await {
                tracing::debug!(%peer, "learn of fences: {e}");
                silent.insert(peer);
            }
        }
        behind.retain(|acting| {
            let reported =
                !wants(acting) || acting.group().members.iter().all(|m| !silent.contains(&m.target));
            if reported && acting.scope.lost_at > Epoch(0) {
                lock(target).fences_since.insert(acting.scope.group, acting.scope.lost_at);
            }
            reported
        });
    }

    pub(crate) async fn take_fences_of(
        &self,
        target: &Arc<Target>,
        peer: TargetId,
        epochs: Vec<GroupAt>,
    ) -> Result<()> {
        let mut after = None;
        loop {
            let request = ListFences { target: peer, after, epochs: epochs.clone(), limit: LIST_MAX };
            let (list, _) = self.ask(peer, request, Vec::new()).await?;
            let Some(last) = list.fences.last().map(|f| f.file) else { return Ok(()) };
            if after.is_some_and(|after| last <= after) {
                return Err(Error::damaged(format!("fences of {peer}: listed twice")));
            }
            let (store, fences) = (target.store.clone(), list.fences);
            let taken = self.env.tasks.blocking(move || store.take_fences(&fences)).await?;
            target.store.durable(taken).await?;
            match list.more {
                true => after = Some(last),
                false => return Ok(()),
            }
        }
    }

    /// Goes through the group until few stripes are left that were written or sealed meanwhile.
    pub(crate) async fn refill_group(&self, acting: &Acting, peers: &[usize]) -> Result<()> {
        self.forget_lost(acting).await?;
        let (target, group) = (&acting.target, acting.scope.group);
        let refilled = self.refill_passes(acting, peers).await;
        if refilled.is_ok() {
            lock(target).end(group);
        }
        refilled
    }

    async fn refill_passes(&self, acting: &Acting, peers: &[usize]) -> Result<()> {
        let mut since = Epoch(0);
        for _ in 0..PASSES_MAX {
            let pass = self.refill_pass(acting, peers, since).await?;
            tracing::debug!(
                on = %acting.target.store.target, group = %acting.scope.group, %since, repaired = pass.repaired,
                failed = pass.failed, "a pass of a refill"
            );
            match pass.problem {
                Some(e) if pass.failed > pass.repaired => return Err(e),
                // The next pass repairs those.
                Some(_) => {}
                None if pass.repaired <= STRIPES_LEFT_MAX => return Ok(()),
                None => since = acting.scope.epoch,
            }
        }
        Ok(())
    }

    async fn refill_pass(&self, acting: &Acting, peers: &[usize], since: Epoch) -> Result<Pass> {
        let (pass, mut after) = (Mutex::new(Pass::default()), None);
        let (target, group) = (&acting.target, acting.scope.group);
        lock(target).begin(target.store.target, group, self.env.clock.now());
        loop {
            let (stripes, next) = self.list_stripes(acting, peers, after, since).await?;
            let todo = Mutex::new(stripes.into_iter());
            let lane = |_| Box::pin(self.refill_lane(acting, &todo, &pass)) as BoxFuture<'_, ()>;
            join_all((0..STRIPES_AT_ONCE).map(lane).collect()).await;
            match next {
                Some(cell) => after = Some(cell),
                None => return Ok(pass.into_inner().unwrap_or_else(PoisonError::into_inner)),
            }
        }
    }

    /// Refills one stripe after the other.
    async fn refill_lane(&self, acting: &Acting, todo: &Mutex<Listed>, pass: &Mutex<Pass>) {
        let (target, group) = (&acting.target, acting.scope.group);
        loop {
            let next = todo.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(((file, stripe), view)) = next else { return };
            let repaired = self.refill_stripe(acting, file, stripe, &view).await;
            let copied = *repaired.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0);
            {
                let mut pass = pass.lock().unwrap_or_else(PoisonError::into_inner);
                match repaired {
                    Ok(bytes) => {
                        pass.repaired += usize::from(bytes.is_some());
                        lock(target).seen(group, bytes);
                    }
                    // A seal or a writer was faster, or a peer does not answer.
                    Err(e) => {
                        pass.failed += 1;
                        pass.problem = Some(e);
                    }
                }
            }
            target.copied.add(copied);
            self.report_refill(target);
            // A group without redundancy is repaired at full speed.
            if acting.group().current_count() > usize::from(acting.scope.scheme.data) {
                self.keep_pace(target, copied).await;
            }
        }
    }

    /// The bytes that the target has of the stripe, if it lacked any.
    async fn refill_stripe(
        &self,
        acting: &Acting,
        file: FileId,
        stripe: u64,
        view: &StripeView,
    ) -> Result<Option<u64>> {
        if !self.repair_stripe(acting, file, stripe, view).await? {
            return Ok(None);
        }
        let own = CellId { file, stripe, index: acting.position as u8 };
        Ok(Some(u64::from(acting.target.store.stat_cell(&acting.scope, own)?.fragment_bytes)))
    }

    /// Records copied bytes, and waits if the copies slow clients' writes.
    pub(crate) async fn keep_pace(&self, target: &Target, copied: u64) {
        target.pace.copied(self.env.clock.now(), copied);
        loop {
            match target.pace.pause(self.env.clock.now()) {
                Duration::ZERO => return,
                pause => self.env.clock.sleep(pause).await,
            }
        }
    }

    /// At an interval, and without waiting for the coordinator.
    pub(crate) fn report_refill(&self, target: &Target) {
        let due = lock(target).due(self.env.clock.now());
        if let Some(reports) = due {
            let sent = self.peers.refill_reported(reports);
            self.env.tasks.spawn("report a refill", async move {
                if let Err(e) = sent.await {
                    tracing::debug!("report a refill: {e}"); // the next report says more
                }
            });
        }
    }

    /// Drops some cells of groups in which another target took this one's place, once all members are
    /// current.
    pub(crate) async fn drop_handed_over(&self, target: &Arc<Target>) -> Result<()> {
        let map = self.peers.map();
        let is_new = lock(target).scanned_at_version != map.version;
        if is_new {
            let mut found = BTreeSet::new();
            for group in handed_over(&map, target.store.target) {
                if target.store.has_cells_of(group.id)? {
                    found.insert(group.id);
                }
            }
            let mut refill = lock(target);
            (refill.scanned_at_version, refill.handed_over) = (map.version, found);
        }
        let Some(group) = lock(target).handed_over.first().copied() else { return Ok(()) };
        let Some(epoch) = map.group(group).map(|g| g.epoch) else { return Ok(()) };
        let store = target.store.clone();
        let (committed, is_last) =
            self.env.tasks.blocking(move || store.drop_some_cells_of(group, epoch)).await?;
        target.store.durable(committed).await?;
        if is_last {
            tracing::info!(
                "{} has dropped its cells of {group}: other targets have them",
                target.store.target
            );
            lock(target).handed_over.remove(&group);
        }
        Ok(())
    }
}

pub(crate) fn lock(target: &Target) -> MutexGuard<'_, Refill> {
    target.refill.lock().unwrap_or_else(PoisonError::into_inner)
}
