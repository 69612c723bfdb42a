//! Background work of a storage node: settle, seal, repair, rebuild damage, return space. One loop, one thing
//! at a time per target, so that it never takes more than a share of the node. Repairs of members have a task
//! for each target: one may take hours, and seals continue meanwhile.
use super::StorageNode;
use super::target::Target;
use crate::comparing::compare;
use crate::peers::Peers;
use crate::repair::Repair;
use crate::scrubbing::scrub;
use crate::seal::{SealLimits, is_settled_by_all};
use crate::spill::SPILL_AT_BYTES;
use crate::store::Store;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::{BoxFuture, Clock, Instant, Tasks};
use weir_proto::map::Group;
use weir_proto::{Error, TargetId};

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
            let (tasks, clock) = (&self.env.tasks, self.env.clock.clone());
            tasks.spawn("spill", spill(tasks.clone(), Arc::downgrade(&target.store)));
            tasks.spawn("scrub", scrub(clock.clone(), Arc::downgrade(&target.scrubbing)));
            tasks.spawn("compare", compare(clock.clone(), Arc::downgrade(&target.comparing)));
            tasks.spawn("repair", repair(clock, self.peers.clone(), Arc::downgrade(&target.repair)));
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
                busy |= target.round(&self.env.tasks, settle).await;
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
    pub fn round_of(&self, target: TargetId, settle: bool) -> BoxFuture<'_, bool> {
        Box::pin(self.round_of_unboxed(target, settle))
    }
    async fn round_of_unboxed(&self, target: TargetId, settle: bool) -> bool {
        match self.targets.get(&target) {
            Some(target) if target.store.usable().is_ok() => {
                if settle {
                    target.settle_seals().await;
                }
                let repaired = target.repair.repair_round().await > 0;
                target.round(&self.env.tasks, false).await || repaired
            }
            _ => false,
        }
    }
}

impl Target {
    async fn round(&self, tasks: &Tasks, settle: bool) -> bool {
        if self.store.usable().is_err() {
            return false;
        }
        let log = |what: &str, e: Error| tracing::warn!(target_id = %self.store.target, "{what}: {e}");
        if settle {
            self.settle_seals().await;
        }
        self.agreement.agree_round().await;
        if let Err(e) = self.under_replicated.settle_under_replicated().await {
            log("settle under-replicated cells", e);
        }
        if let Err(e) = self.truncations.forget_truncations().await {
            log("forget truncations", e);
        }
        self.moves.begin();
        if let Err(e) = self.handed_over.drop_handed_over().await {
            log("drop cells of groups that other targets have now", e);
        }
        if let Err(e) = self.damage.repair_damaged().await {
            log("repair damaged fragments", e);
        }
        let sealed = self.seals.seal_round(&SealLimits::DEFAULT).await.unwrap_or_else(|e| {
            log("seal", e);
            0
        });
        let returning = self.store.clone();
        if let Err(e) = tasks.blocking(move || returning.reclaim()).await {
            log("return space", e);
        }
        sealed > 0
    }

    async fn settle_seals(&self) {
        if let Err(e) = self.seals.settle().await {
            tracing::warn!(target_id = %self.store.target, "settle versions in doubt: {e}");
        }
    }
}

/// Repairs the target's places that are behind until the target ends.
async fn repair(clock: Clock, peers: Arc<dyn Peers>, repair: Weak<Repair>) {
    while let Some(repair) = repair.upgrade() {
        let version = peers.map().version;
        let repaired = match repair.is_usable() {
            true => repair.repair_round().await,
            false => 0,
        };
        drop(repair);
        // A newer map may give the target a place.
        if repaired == 0 && peers.wait_newer(version, ROUND_PAUSE).await.is_err() {
            clock.sleep(NO_MAP_PAUSE).await;
        }
    }
}

/// Moves overlay data from the journal to slabs whenever there is enough.
async fn spill(tasks: Tasks, store: Weak<Store>) {
    while let Some(store) = store.upgrade() {
        store.spill.ready.notified().await;
        loop {
            let spilling = store.clone();
            match tasks.blocking(move || spilling.spill_some(SPILL_AT_BYTES)).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => {
                    // The data stays in the journal.
                    tracing::warn!(target_id = %store.target, "spill overlays: {e}");
                    break;
                }
            }
        }
    }
}
