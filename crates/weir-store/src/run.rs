//! Background work of a storage node: settle, seal, repair, rebuild damage, return space. One loop, one thing
//! at a time per target, so that it never takes more than a share of the node. Repairs of members have a task
//! for each target: one may take hours, and seals continue meanwhile.
use crate::cells::Scope;
use crate::comparing::compare;
use crate::scrubbing::scrub;
use crate::seal::{SealLimits, is_settled_by_all};
use crate::service::{StorageNode, Target};
use crate::spill::SPILL_AT_BYTES;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;
use weir_env::{BoxFuture, Clock, Instant, Tasks};
use weir_proto::map::Group;

/// Pause between rounds in which nothing was done.
const ROUND_PAUSE: Duration = Duration::from_millis(250);
/// Pause after a wait for a newer map has failed.
const NO_MAP_PAUSE: Duration = Duration::from_millis(20);
/// Interval at which seals in doubt are settled; it is shorter while a member is behind, whose repair may
/// wait for them.
const SETTLE_EVERY: Duration = Duration::from_secs(10);
const SETTLE_WHILE_BEHIND: Duration = Duration::from_millis(500);

impl StorageNode {
    /// Works until the node ends. Failures are logged and retried in a later round.
    pub fn run(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(self.run_unboxed())
    }
    async fn run_unboxed(self: Arc<Self>) {
        for target in self.targets.values() {
            let (tasks, target) = (self.env.tasks.clone(), Arc::downgrade(target));
            self.env.tasks.spawn("spill", spill(tasks, target.clone()));
            let (clock, node) = (self.env.clock.clone(), Arc::downgrade(&self));
            self.env.tasks.spawn("scrub", scrub(clock.clone(), node.clone(), target.clone()));
            self.env.tasks.spawn("compare", compare(clock.clone(), node.clone(), target.clone()));
            self.env.tasks.spawn("repair", repair(clock, node, target));
        }
        let mut settled: Option<Instant> = None;
        loop {
            let now = self.env.clock.now();
            let every = if self.has_member_behind() { SETTLE_WHILE_BEHIND } else { SETTLE_EVERY };
            let settle = settled.is_none_or(|at| now.since(at) >= every);
            if settle {
                settled = Some(now);
            }
            let mut busy = false;
            for target in self.targets.values() {
                busy |= self.round(target, settle).await;
            }
            if !busy {
                self.env.clock.sleep(ROUND_PAUSE).await;
            }
        }
    }

    /// Whether a member of one of this node's groups is behind.
    fn has_member_behind(&self) -> bool {
        let map = self.peers.map();
        let mine = |g: &&Group| g.members.iter().any(|m| self.targets.contains_key(&m.target));
        map.groups.iter().filter(mine).any(|g| is_settled_by_all(g, map.level))
    }

    /// One round of one target; returns whether more work is likely.
    pub fn round_of(&self, target: weir_proto::TargetId, settle: bool) -> BoxFuture<'_, bool> {
        Box::pin(self.round_of_unboxed(target, settle))
    }
    async fn round_of_unboxed(&self, target: weir_proto::TargetId, settle: bool) -> bool {
        match self.targets.get(&target) {
            Some(target) if target.store.usable().is_ok() => {
                if settle {
                    self.settle_round(target).await;
                }
                let repaired = self.repair_round(target).await > 0;
                self.round(target, false).await || repaired
            }
            _ => false,
        }
    }

    async fn round(&self, target: &Arc<Target>, settle: bool) -> bool {
        if target.store.usable().is_err() {
            return false;
        }
        let log = |what: &str, e: weir_proto::Error| tracing::warn!(target_id = %target.store.target, "{what}: {e}");
        if settle {
            self.settle_round(target).await;
        }
        if let Err(e) = self.agree_round(target).await {
            log("bring overlay logs into line", e);
        }
        if let Err(e) = self.settle_under_replicated(target).await {
            log("settle under-replicated cells", e);
        }
        if let Err(e) = self.forget_truncations(target).await {
            log("forget truncations", e);
        }
        self.begin_moves(target);
        if let Err(e) = self.drop_handed_over(target).await {
            log("drop cells of groups that other targets have now", e);
        }
        if let Err(e) = self.repair_damaged(target).await {
            log("repair damaged fragments", e);
        }
        let sealed = self.seal_round(target, &SealLimits::DEFAULT).await.unwrap_or_else(|e| {
            log("seal", e);
            0
        });
        let returning = target.clone();
        if let Err(e) = self.env.tasks.blocking(move || returning.store.reclaim()).await {
            log("return space", e);
        }
        sealed > 0
    }

    async fn settle_round(&self, target: &Arc<Target>) {
        if let Err(e) = self.settle(target).await {
            tracing::warn!(target_id = %target.store.target, "settle versions in doubt: {e}");
        }
    }
}

impl StorageNode {
    /// Members that are not current miss fragments. When the map shows that one is current again, each target
    /// clears the bits in its own cells: no message is needed, so none can be lost.
    async fn settle_under_replicated(&self, target: &Arc<Target>) -> weir_proto::Result<()> {
        if !target.store.has_under_replicated() {
            return Ok(());
        }
        let map = self.peers.map();
        let mine = |g: &&Group| g.members.iter().any(|m| m.target == target.store.target);
        for group in map.groups.iter().filter(mine) {
            let known = target.settled.lock().unwrap_or_else(PoisonError::into_inner).get(&group.id).copied();
            if known == Some(group.epoch) {
                continue; // writes under an epoch are not missing at its current members
            }
            let (store, scope) = (target.store.clone(), Scope::of(group));
            self.env.tasks.blocking(move || store.settle_under_replicated(&scope)).await?;
            target.settled.lock().unwrap_or_else(PoisonError::into_inner).insert(group.id, group.epoch);
        }
        Ok(())
    }
}

/// Repairs the target's places that are behind until the node ends.
async fn repair(clock: Clock, node: Weak<StorageNode>, target: Weak<Target>) {
    while let Some((node, target)) = node.upgrade().zip(target.upgrade()) {
        let (peers, version) = (node.peers.clone(), node.peers.map().version);
        let repaired = match target.store.usable() {
            Ok(()) => node.repair_round(&target).await,
            Err(_) => 0,
        };
        drop((node, target));
        // A newer map may give the target a place.
        if repaired == 0 && peers.wait_newer(version, ROUND_PAUSE).await.is_err() {
            clock.sleep(NO_MAP_PAUSE).await;
        }
    }
}

/// Moves overlay data from the journal to slabs whenever there is enough.
async fn spill(tasks: Tasks, target: Weak<Target>) {
    while let Some(target) = target.upgrade() {
        target.store.spill.ready.notified().await;
        loop {
            let spilling = target.clone();
            match tasks.blocking(move || spilling.store.spill_some(SPILL_AT_BYTES)).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => {
                    // The data stays in the journal.
                    tracing::warn!(target_id = %target.store.target, "spill overlays: {e}");
                    break;
                }
            }
        }
    }
}
