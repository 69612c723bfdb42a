//! The order in which a target's groups are repaired: several in parallel, new places included, each with a
//! report to the coordinator. How a group is repaired is in `repair.rs`.
use super::Repair;
use crate::membership::Acting;
use crate::peers::join_all;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{BoxFuture, Instant};
use weir_proto::{Epoch, ErrorKind, PgId};

/// Groups of a target repaired in parallel: most have missed little, so a group costs round trips rather than
/// bytes.
const GROUPS_AT_ONCE: usize = 8;

/// Between two attempts at a group, and the time that a worker without work waits for a new place.
const AGAIN_AFTER: Duration = Duration::from_millis(250);
/// Pause of a worker when the coordinator is away.
const PAUSE: Duration = Duration::from_millis(50);

/// The groups of a target that are repaired in one round.
#[derive(Default)]
struct Round {
    todo: Mutex<Vec<Acting>>,
    /// Groups that were taken; the time at which each attempt ended.
    taken: Mutex<BTreeMap<PgId, Option<Instant>>>,
    /// Repaired, and not yet reported to the coordinator.
    repaired: Mutex<Vec<(PgId, Epoch)>>,
    /// Held by the worker that reports.
    report: tokio::sync::Mutex<()>,
    /// Held by the worker that searches for groups.
    search: tokio::sync::Mutex<()>,
    caught_up: AtomicUsize,
}

impl Round {
    fn next(&self) -> Option<Acting> {
        lock(&self.todo).pop()
    }
    fn is_due(&self, group: PgId, now: Instant) -> bool {
        match lock(&self.taken).get(&group) {
            None => true,
            Some(None) => false,
            Some(Some(ended)) => now.since(*ended) >= AGAIN_AFTER,
        }
    }
    fn ended(&self, group: PgId, now: Instant) {
        lock(&self.taken).insert(group, Some(now));
    }
    fn is_working(&self) -> bool {
        lock(&self.taken).values().any(Option::is_none)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Repair {
    /// Whether the target has not failed.
    pub fn is_usable(&self) -> bool {
        self.members.store().usable().is_ok()
    }

    /// Repairs every group in which the target is behind, several in parallel. Returns the number
    /// of groups that caught up.
    pub async fn repair_round(&self) -> usize {
        if self.members.behind().is_empty() {
            return 0;
        }
        let round = Round::default();
        self.find_behind(&round).await;
        let worker = |_| Box::pin(self.repair_worker(&round)) as BoxFuture<'_, ()>;
        join_all((0..GROUPS_AT_ONCE).map(worker).collect()).await;
        round.caught_up.into_inner()
    }

    /// Finds the groups to repair that the round does not have yet: places of lost targets come one by one.
    async fn find_behind(&self, round: &Round) {
        let _one = round.search.lock().await;
        let mut behind = self.members.behind();
        let now = self.env.clock.now();
        behind.retain(|acting| round.is_due(acting.scope.group, now));
        if behind.is_empty() || !lock(&round.todo).is_empty() {
            return;
        }
        // Fences first: those that are raised meanwhile are among the truncations.
        self.parts.fences.take_fences(&mut behind).await;
        let silent = self.parts.truncations.learn_truncations(&behind).await;
        behind.retain(|acting| !acting.group().members.iter().any(|m| silent.contains(&m.target)));
        behind.reverse(); // taken from the end
        lock(&round.taken).extend(behind.iter().map(|acting| (acting.scope.group, None)));
        *lock(&round.todo) = behind;
    }

    /// Repairs one group after the other until none is left. A failure in one group does not stop the others.
    /// While another worker works, one without work waits for new places.
    async fn repair_worker(&self, round: &Round) {
        loop {
            let version = self.members.map().version;
            if let Some(acting) = round.next() {
                if self.repair_and_report(round, &acting).await
                    && acting.is_filled()
                    && let Some(rest) = self.filled_before(acting.scope.group).await
                {
                    self.repair_and_report(round, &rest).await;
                }
                round.ended(acting.scope.group, self.env.clock.now());
                continue;
            }
            self.find_behind(round).await;
            if lock(&round.todo).is_empty() {
                if !round.is_working() {
                    return;
                }
                if self.members.peers().wait_newer(version, AGAIN_AFTER).await.is_err() {
                    self.env.clock.sleep(PAUSE).await;
                }
            }
        }
    }

    async fn repair_and_report(&self, round: &Round, acting: &Acting) -> bool {
        let group = acting.group();
        match self.repair_group(acting).await {
            Ok(()) => {
                self.parts.agreement.note_copied(group.id);
                lock(&round.repaired).push((group.id, group.epoch));
                self.report_repaired(round).await;
                true
            }
            Err(e) => {
                tracing::debug!(group = %group.id, "repair: {e}");
                false
            }
        }
    }

    /// The place after it was filled: seals wait from now on, so what was written meanwhile is repaired at
    /// once. `None`: in the next round.
    async fn filled_before(&self, group: PgId) -> Option<Acting> {
        let mut rest = self.members.behind();
        rest.retain(|a| a.scope.group == group && !a.is_filled());
        let silent = self.parts.truncations.learn_truncations(&rest).await;
        rest.pop().filter(|a| !a.group().members.iter().any(|m| silent.contains(&m.target)))
    }

    /// Reports all groups that were repaired during the previous report: the coordinator makes one change of
    /// the map for all of them, and every change of the map goes to every node.
    async fn report_repaired(&self, round: &Round) {
        let _turn = round.report.lock().await;
        let repaired = std::mem::take(&mut *lock(&round.repaired));
        let (peers, target) = (self.members.peers(), self.members.target());
        let say = |(group, epoch): &(PgId, Epoch)| peers.caught_up(target, *group, *epoch);
        let answers = join_all(repaired.iter().map(say).collect()).await;
        for ((group, _), answer) in repaired.iter().zip(answers) {
            match answer {
                Ok(_) => drop(round.caught_up.fetch_add(1, Ordering::Relaxed)),
                // The group has a new epoch: the next round checks again.
                Err(e) if e.kind == ErrorKind::Stale => tracing::debug!(%group, "report a repair: {e}"),
                Err(e) => {
                    tracing::warn!(target_id = %target, %group, "report a repair: {e}");
                    // Without a coordinator further repairs cannot be reported.
                    let left = std::mem::take(&mut *lock(&round.todo));
                    left.iter().for_each(|a| round.ended(a.scope.group, self.env.clock.now()));
                }
            }
        }
    }
}
