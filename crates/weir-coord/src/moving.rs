//! Places that move between targets that serve them: administrators' requests, running moves, waiting moves.
//!
//! Knows nothing of the store: the owner of the map stores the requests, and publishes the changes of the
//! draft.
use crate::decide::{
    Hindrance, Observed, Plan, begin_move, cancel_move, close_move, finish_move, is_closed, plan_balance,
    plan_drain, plan_full, reopen, settle_moves,
};
use crate::replacing::{Wishes, summary};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::{
    DrainTarget, FullPlace, GonePlan, PlaceCopied, RebuildWaiting, ReportFull, TargetReport,
};
use weir_proto::map::{ClusterMap, Group, Move, Target};
use weir_proto::version::LEVEL_OF_GROWTH;
use weir_proto::{Epoch, Error, PgId, Result, TargetId};

/// Writes to a group wait while it is closed. A copy that takes longer is tried again later.
const CLOSED_MAX: Duration = Duration::from_secs(10);
/// Between plans.
const PLAN_EVERY: Duration = Duration::from_millis(250);
/// Between checks of how full targets are: that changes slowly.
const BALANCE_EVERY: Duration = Duration::from_secs(5);

/// Per mille of the capacity above which a target is nearly full, and below which it no longer is.
const FULL_PER_MILLE: u128 = 950;
const NO_MORE_FULL_PER_MILLE: u128 = 930;

/// A place whose target refused new data stays on the list for this long after the last refusal, and as long
/// as the target is nearly full.
const REFUSED_FOR: Duration = Duration::from_secs(10);

/// A target drops the cells of a place that it handed over, and reports how much it has then, within this
/// time.
const DROPS_WITHIN: Duration = Duration::from_secs(5);

/// The size of a place that was copied is used for this long: writes change it.
const SIZE_HOLDS_FOR: Duration = Duration::from_secs(3600);

/// State that a restart forgets.
#[derive(Default)]
pub struct Moving {
    planned: Option<Instant>,
    balanced: Option<Instant>,
    waiting: Vec<(PgId, TargetId, Hindrance)>,
    /// Since when each group has been closed, in which epoch.
    closed: BTreeMap<PgId, (Epoch, Instant)>,
    /// Places whose target refused new data because it is full, and when it last did.
    refused: BTreeMap<(PgId, TargetId), Instant>,
    /// Targets that have handed places over.
    handed_over: BTreeMap<TargetId, HandedOver>,
    /// Bytes of a place of each group of which one was copied, and when.
    sizes: BTreeMap<PgId, (u64, Instant)>,
}

/// Places that a target has handed over lately.
struct HandedOver {
    bytes: u64,
    /// The bytes of the target before the first of them.
    used: u64,
    /// When it handed over the last one.
    at: Instant,
}

impl Moving {
    /// Ends moves that cannot continue, and begins the planned ones.
    pub fn step(&mut self, map: &mut ClusterMap, wishes: &mut Wishes, observed: &Observed, now: Instant) {
        settle_moves(map);
        self.reopen_late(map, now);
        wishes.draining.retain(|target| map.target(*target).is_some());
        if self.planned.is_some_and(|at| now.since(at) < PLAN_EVERY) {
            return;
        }
        self.planned = Some(now);
        self.waiting.clear();
        if wishes.paused || map.level < LEVEL_OF_GROWTH {
            return;
        }
        let full = self.plan_full(map, observed, now);
        begin(map, &full);
        let mut plan = match wishes.draining.is_empty() {
            true => Plan::default(),
            false => plan_drain(map, observed),
        };
        // Lost targets come first, then targets that are drained.
        let is_empty = |plan: &Plan| plan.steps.is_empty() && plan.waiting.is_empty();
        let is_idle = observed.lost.is_empty() && is_empty(&plan) && is_empty(&full);
        if is_idle && self.balanced.is_none_or(|at| now.since(at) >= BALANCE_EVERY) {
            self.balanced = Some(now);
            plan.steps = plan_balance(map, &self.with_sizes(observed, now));
        }
        begin(map, &plan);
        // Places of full targets are not among them: these targets are reported as full.
        self.waiting = plan.waiting;
    }

    /// Moves of places whose targets refused new data lately.
    fn plan_full(&mut self, map: &ClusterMap, observed: &Observed, now: Instant) -> Plan {
        self.refused.retain(|(group, target), at| {
            let has_place = |g: &Group| g.members.iter().any(|m| m.target == *target);
            let is_due = now.since(*at) < REFUSED_FOR || map.full.contains(target);
            is_due && map.group(*group).is_some_and(has_place)
        });
        plan_full(map, observed, &self.refused.keys().copied().collect())
    }

    /// Records that a target refused new data of a group; returns whether its place moves.
    pub fn refused(
        &mut self,
        map: &ClusterMap,
        wishes: &Wishes,
        observed: &Observed,
        report: &ReportFull,
        now: Instant,
    ) -> Result<FullPlace> {
        let ReportFull { target, group } = *report;
        let entry = map.group(group).ok_or_else(|| Error::not_found(format!("there is no group {group}")))?;
        let stays = |why: String| Ok(FullPlace { moves: false, to: None, why });
        let Some(place) = entry.members.iter().position(|m| m.target == target) else {
            return Ok(FullPlace { moves: true, to: None, why: format!("{target} has left {group}") });
        };
        if let Err(e) = check_drain(map, target) {
            return stays(e.to_string());
        }
        if wishes.paused {
            return stays("moves are paused (`weir rebuild --resume`)".into());
        }
        self.refused.insert((group, target), now);
        self.planned = None;
        match map.move_of(group) {
            Some(found) if usize::from(found.place) == place => {
                return Ok(FullPlace { moves: true, to: Some(found.to), why: String::new() });
            }
            Some(_) => {
                let why = format!("another place of {group} moves first");
                return Ok(FullPlace { moves: true, to: None, why });
            }
            None => {}
        }
        let plan = plan_full(map, observed, &BTreeSet::from([(group, target)]));
        Ok(match (plan.steps.first(), plan.waiting.first()) {
            (Some(step), _) => FullPlace { moves: true, to: Some(step.to), why: String::new() },
            (None, Some((.., why))) => {
                let moves = matches!(why, Hindrance::Busy | Hindrance::Repaired);
                FullPlace { moves, to: None, why: why.to_string() }
            }
            (None, None) => return stays(format!("{target} does not have everything itself")),
        })
    }

    /// Handles the report of a target that takes over a place.
    /// `bytes`: the size of the copy, if that is known; `used`: the bytes of each target by its last report.
    pub fn copied(
        &mut self,
        map: &mut ClusterMap,
        report: &PlaceCopied,
        bytes: Option<u64>,
        used: impl Fn(TargetId) -> u64,
        now: Instant,
    ) -> Result<()> {
        let PlaceCopied { target, group, epoch, done } = *report;
        if !done {
            return close_move(map, group, target, epoch);
        }
        let from = finish_move(map, group, target, epoch)?;
        tracing::info!("{target} has taken the place of {from} in {group}");
        self.sizes.retain(|_, (_, at)| now.since(*at) < SIZE_HOLDS_FOR);
        if let Some(bytes) = bytes {
            self.sizes.insert(group, (bytes, now));
        }
        self.handed_over.retain(|_, known| now.since(known.at) < DROPS_WITHIN);
        let new = HandedOver { bytes: 0, used: used(from), at: now };
        let known = self.handed_over.entry(from).or_insert(new);
        (known.bytes, known.at) = (known.bytes.saturating_add(bytes.unwrap_or(0)), now);
        Ok(())
    }

    /// The observed state with the sizes of places that were copied, and without the bytes of places that
    /// targets have just handed over: their last reports still count these.
    fn with_sizes(&self, observed: &Observed, now: Instant) -> Observed {
        let mut observed = observed.clone();
        let known = self.sizes.iter().filter(|(_, (_, at))| now.since(*at) < SIZE_HOLDS_FOR);
        observed.sizes = known.map(|(group, (bytes, _))| (*group, *bytes)).collect();
        for (from, known) in self.handed_over.iter().filter(|(_, known)| now.since(known.at) < DROPS_WITHIN) {
            if let Some(used) = observed.used.get_mut(from) {
                let dropped = known.used.saturating_sub(*used);
                *used = used.saturating_sub(known.bytes.saturating_sub(dropped));
            }
        }
        observed
    }

    fn reopen_late(&mut self, map: &mut ClusterMap, now: Instant) {
        let closed: Vec<Move> = map.moves.iter().filter(|m| is_closed_now(map, m)).copied().collect();
        self.closed.retain(|group, (epoch, _)| {
            closed.iter().any(|found| found.group == *group && found.closed_in == *epoch)
        });
        for found in closed {
            let (_, since) = *self.closed.entry(found.group).or_insert((found.closed_in, now));
            if now.since(since) >= CLOSED_MAX && reopen(map, found.group) {
                tracing::warn!(
                    "{} did not copy the rest of {} in time: its writes continue",
                    found.to,
                    found.group
                );
            }
        }
    }

    /// Starts or stops draining a target; returns what happens to its places.
    pub fn drain(
        &mut self,
        map: &mut ClusterMap,
        wishes: &mut Wishes,
        observed: Observed,
        asked: &DrainTarget,
    ) -> Result<GonePlan> {
        let target = asked.target;
        check_drain(map, target)?;
        if asked.stay {
            if !wishes.draining.contains(&target) {
                return Err(Error::not_found(format!("{target} is not drained")));
            }
            if !asked.dry_run {
                wishes.draining.remove(&target);
                moves_from(map, target).into_iter().for_each(|group| cancel_move(map, group));
            }
            return Ok(GonePlan { begun: 0, waiting: Vec::new(), without_redundancy: 0 });
        }
        let under_way = moves_from(map, target).len();
        let mut observed = observed;
        observed.draining.insert(target);
        let plan = plan_drain(map, &observed);
        let begun = under_way + plan.steps.iter().filter(|step| step.from == target).count();
        let waiting: Vec<_> = plan.waiting.into_iter().filter(|(_, from, _)| *from == target).collect();
        if !asked.dry_run {
            wishes.draining.insert(target);
            self.planned = None;
        }
        Ok(GonePlan { begun: begun as u32, waiting: summary(&waiting), without_redundancy: 0 })
    }

    pub fn waiting(&self) -> Vec<RebuildWaiting> {
        summary(&self.waiting)
    }
}

fn begin(map: &mut ClusterMap, plan: &Plan) {
    for step in &plan.steps {
        match begin_move(map, step.group, step.place, step.to) {
            Ok(()) => tracing::info!("the place of {} in {} goes to {}", step.from, step.group, step.to),
            Err(e) => tracing::error!("the place of {} in {} cannot move: {e}", step.from, step.group),
        }
    }
}

/// Marks targets above this fill level, which new files avoid, until they are somewhat below it.
pub fn note_full(map: &mut ClusterMap, reports: &BTreeMap<TargetId, TargetReport>) {
    if map.level < LEVEL_OF_GROWTH {
        return;
    }
    let is_full = |t: &&Target| {
        let part = if map.full.contains(&t.id) { NO_MORE_FULL_PER_MILLE } else { FULL_PER_MILLE };
        let is_so = |r: &TargetReport| u128::from(r.used) * 1000 >= u128::from(r.capacity) * part;
        reports.get(&t.id).filter(|r| r.capacity > 0).is_some_and(is_so)
    };
    let full: Vec<TargetId> = map.targets.iter().filter(is_full).map(|t| t.id).collect();
    if full != map.full {
        tracing::info!("targets that are nearly full: {full:?}");
        map.full = full;
    }
}

fn is_closed_now(map: &ClusterMap, found: &Move) -> bool {
    map.group(found.group).is_some_and(|group| is_closed(group, found))
}

fn moves_from(map: &ClusterMap, target: TargetId) -> Vec<PgId> {
    let leaves = |found: &&Move| {
        let member = map.group(found.group).and_then(|g| g.members.get(usize::from(found.place)));
        member.is_some_and(|m| m.target == target)
    };
    map.moves.iter().filter(leaves).map(|found| found.group).collect()
}

fn check_drain(map: &ClusterMap, target: TargetId) -> Result<()> {
    if map.target(target).is_none() {
        return Err(Error::not_found(format!("there is no target {target}")));
    }
    if map.level < LEVEL_OF_GROWTH {
        return Err(Error::unsupported(format!(
            "the cluster is at level {}, places move from level {LEVEL_OF_GROWTH} on",
            map.level
        ))
        .hint("`weir upgrade finish` when all programs are new"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::group_tests::{cluster, create_groups};

    #[test]
    fn bytes_of_places_handed_over_do_not_count_twice() {
        let mut map = cluster(7, "ec:4+2");
        assert!(create_groups(&mut map, 7));
        let from = TargetId(1);
        let group = map.groups.iter().find(|g| g.members[0].target == from).unwrap().clone();
        let to = (1..=7).map(TargetId).find(|t| group.members.iter().all(|m| m.target != *t)).unwrap();
        begin_move(&mut map, group.id, 0, to).unwrap();
        let (mut moving, now) = (Moving::default(), Instant(1));
        let report = |map: &ClusterMap, done| {
            let epoch = map.group(group.id).unwrap().epoch;
            PlaceCopied { target: to, group: group.id, epoch, done }
        };
        for done in [false, true] {
            let report = report(&map, done);
            moving.copied(&mut map, &report, Some(30), |_| 100, now).unwrap();
        }
        let observed = Observed { used: [(from, 100), (to, 100)].into(), ..Observed::default() };
        let seen = moving.with_sizes(&observed, now);
        assert_eq!((seen.used[&from], seen.used[&to], seen.sizes[&group.id]), (70, 100, 30));
        let dropped = Observed { used: [(from, 75)].into(), ..Observed::default() };
        assert_eq!(moving.with_sizes(&dropped, now).used[&from], 70, "25 are dropped, 5 are not");
        assert_eq!(moving.with_sizes(&observed, now + DROPS_WITHIN).used, observed.used);
        assert!(moving.with_sizes(&observed, now + SIZE_HOLDS_FOR).sizes.is_empty());
    }
}
