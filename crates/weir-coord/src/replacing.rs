//! Which targets are lost, administrators' requests about rebuilds, and the progress of rebuilds.
//!
//! Knows nothing of the store: the owner of the map stores the requests, and makes each step a change of the
//! map.
use crate::decide::{Hindrance, Observed, Plan, plan, spare};
use crate::estimate::{Estimate, PlaceSizes};
use crate::moving::{Moving, note_full};
use crate::repaired::Repaired;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::oneshot;
use weir_env::Instant;
use weir_proto::coord::{
    CaughtUp, DrainTarget, FullPlace, GonePlan, MapReply, PlaceCopied, RebuildStatus, RebuildWaiting,
    RefillReport, ReportFull, SetRebuild, TargetGone, TargetReport,
};
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Target, TargetState};
use weir_proto::version::LEVEL_OF_REPLACEMENT;
use weir_proto::{Error, NameRule, PgId, Result, TargetId};

/// Longer than a restart of a machine takes.
const LOST_AFTER_S: u32 = 600;
/// The longest value that can be set: a month.
const LOST_AFTER_S_MAX: u32 = 31 * 86_400;
/// Between plans: a group takes seconds, and a plan of a large cluster some milliseconds.
const PLAN_EVERY: Duration = Duration::from_millis(250);
/// A refill that a target has not reported for this long has ended.
const REPORT_AGE: Duration = Duration::from_secs(5);
/// Reports of one node: more than the groups that its targets are filled for.
const REPORTS_MAX: usize = 4096;

type Answer<T> = oneshot::Sender<Result<T>>;

/// Requests about rebuilds.
pub enum RebuildEvent {
    Gone { asked: TargetGone, answer: Answer<GonePlan> },
    Set { asked: SetRebuild, answer: Answer<()> },
    Drain { asked: DrainTarget, answer: Answer<GonePlan> },
    Full { report: ReportFull, answer: Answer<FullPlace> },
    Pause { paused: bool, answer: Answer<()> },
    Copied { report: PlaceCopied, answer: Answer<MapReply> },
    Status { answer: Answer<RebuildStatus> },
    Refills { reports: Vec<RefillReport>, answer: Answer<()> },
}

/// Administrators' requests; kept in the store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wishes {
    /// A target that is down for this long is lost; 0: never by itself.
    pub after_s: u32,
    /// Targets that will not return.
    pub gone: BTreeSet<TargetId>,
    /// Targets whose places move to others while they serve them.
    pub draining: BTreeSet<TargetId>,
    /// No move starts.
    pub paused: bool,
}

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes { after_s: LOST_AFTER_S, gone: BTreeSet::new(), draining: BTreeSet::new(), paused: false }
    }
}

/// State of lost targets that is not in the map; a restart forgets it.
#[derive(Default)]
pub struct Replacing {
    down_since: BTreeMap<TargetId, Instant>,
    planned: Option<Instant>,
    lost: BTreeSet<TargetId>,
    waiting: Vec<(PgId, TargetId, Hindrance)>,
    refills: BTreeMap<(TargetId, PgId), (RefillReport, Instant)>,
    /// Since when places are rebuilt, and how many since then.
    run: Option<(Instant, u32)>,
    estimate: Estimate,
    pub moving: Moving,
    /// Members' reports that they have everything.
    pub repaired: Repaired<(CaughtUp, Answer<MapReply>)>,
}

impl Replacing {
    /// The steps to take now. A target that has returned is not gone any more.
    pub fn next(
        &mut self,
        map: &ClusterMap,
        wishes: &mut Wishes,
        reports: &BTreeMap<TargetId, TargetReport>,
        now: Instant,
    ) -> Plan {
        if self.planned.is_some_and(|at| now.since(at) < PLAN_EVERY) {
            return Plan::default();
        }
        self.planned = Some(now);
        let is_up = |t: &TargetId| map.target(*t).is_none_or(|t| t.state == TargetState::Up);
        wishes.gone.retain(|t| !is_up(t));
        self.note_down(map, now);
        self.lost = self.lost_now(map, wishes, now);
        self.note_run(map, now);
        self.estimate_left(map, reports, now);
        if self.lost.is_empty() || map.level < LEVEL_OF_REPLACEMENT {
            self.waiting.clear();
            return Plan::default();
        }
        let plan = plan(map, &observed(&self.lost, wishes, reports));
        self.waiting.clone_from(&plan.waiting);
        plan
    }

    /// A member caught up: its target may take over another place at once.
    pub fn plan_again(&mut self) {
        self.planned = None;
    }

    fn note_run(&mut self, map: &ClusterMap, now: Instant) {
        let members = map.groups.iter().filter(|g| g.scheme.parity > 0).flat_map(|g| &g.members);
        let is_open = |m: &&Member| m.state == MemberState::Behind || self.lost.contains(&m.target);
        let open = members.filter(is_open).count() as u32;
        self.run = match self.run {
            _ if open == 0 => None,
            None => Some((now, open)),
            Some((since, total)) => Some((since, total.max(open))),
        };
    }

    fn estimate_left(&mut self, map: &ClusterMap, reports: &BTreeMap<TargetId, TargetReport>, now: Instant) {
        if self.run.is_none() {
            self.estimate = Estimate::default();
            return;
        }
        let refills = || self.refills.values().filter(|(_, at)| now.since(*at) < REPORT_AGE).map(|(r, _)| r);
        let copied = refills().map(|r| ((r.target, r.group), r.bytes)).collect();
        let sizes = PlaceSizes::of(map, reports.values().map(|r| (r.target, r.used)), refills());
        self.estimate.note(map, &self.lost, &sizes, &copied, now);
    }

    fn note_down(&mut self, map: &ClusterMap, now: Instant) {
        let down: BTreeSet<TargetId> =
            map.targets.iter().filter(|t| t.state != TargetState::Up).map(|t| t.id).collect();
        self.down_since.retain(|t, _| down.contains(t));
        for target in down {
            self.down_since.entry(target).or_insert(now);
        }
    }

    fn lost_now(&self, map: &ClusterMap, wishes: &Wishes, now: Instant) -> BTreeSet<TargetId> {
        let after = Duration::from_secs(wishes.after_s.into());
        let for_long = |t: &Target| {
            wishes.after_s > 0 && self.down_since.get(&t.id).is_some_and(|since| now.since(*since) >= after)
        };
        let is_lost = |t: &&Target| match t.state {
            TargetState::Up => false,
            TargetState::Failed => wishes.after_s > 0 || wishes.gone.contains(&t.id),
            TargetState::Down => wishes.gone.contains(&t.id) || for_long(t),
        };
        map.targets.iter().filter(is_lost).map(|t| t.id).collect()
    }

    /// Marks a target as gone, unless it is a dry run; returns what happens to its places.
    pub fn abandon_lost(
        &mut self,
        map: &ClusterMap,
        wishes: &mut Wishes,
        reports: &BTreeMap<TargetId, TargetReport>,
        asked: &TargetGone,
    ) -> Result<GonePlan> {
        let target = asked.target;
        check_gone(map, target)?;
        let mut lost = self.lost.clone();
        lost.insert(target);
        let plan = plan(map, &observed(&lost, wishes, reports));
        let has = |g: &&Group| g.members.iter().any(|m| m.target == target);
        let without = map.groups.iter().filter(has).filter(|g| g.scheme.parity == 0).count();
        if !asked.dry_run {
            wishes.gone.insert(target);
            self.planned = None;
        }
        let waiting: Vec<_> = plan.waiting.into_iter().filter(|(_, from, _)| *from == target).collect();
        Ok(GonePlan {
            begun: plan.steps.iter().filter(|step| step.from == target).count() as u32,
            waiting: summary(&waiting),
            without_redundancy: without as u32,
        })
    }

    /// Places that move between targets that serve them.
    pub fn move_places(
        &mut self,
        map: &mut ClusterMap,
        wishes: &mut Wishes,
        reports: &BTreeMap<TargetId, TargetReport>,
        now: Instant,
    ) {
        let observed = observed(&self.lost, wishes, reports);
        note_full(map, reports);
        self.moving.step(map, wishes, &observed, now);
    }

    /// See [`Moving::drain`].
    pub fn drain(
        &mut self,
        map: &mut ClusterMap,
        wishes: &mut Wishes,
        reports: &BTreeMap<TargetId, TargetReport>,
        asked: &DrainTarget,
    ) -> Result<GonePlan> {
        let observed = observed(&self.lost, wishes, reports);
        self.moving.drain(map, wishes, observed, asked)
    }

    /// See [`Moving::copied`].
    pub fn copied(
        &mut self,
        map: &mut ClusterMap,
        report: &PlaceCopied,
        reports: &BTreeMap<TargetId, TargetReport>,
        now: Instant,
    ) -> Result<()> {
        let bytes = self.refills.get(&(report.target, report.group)).map(|(report, _)| report.bytes);
        self.moving.copied(map, report, bytes, |t| reports.get(&t).map_or(0, |r| r.used), now)
    }

    /// See [`Moving::refused`].
    pub fn refused(
        &mut self,
        map: &ClusterMap,
        wishes: &Wishes,
        reports: &BTreeMap<TargetId, TargetReport>,
        report: &ReportFull,
        now: Instant,
    ) -> Result<FullPlace> {
        let observed = observed(&self.lost, wishes, reports);
        self.moving.refused(map, wishes, &observed, report, now)
    }

    /// Records the refill reports of a node's targets.
    pub fn note(&mut self, reports: Vec<RefillReport>, now: Instant) -> Result<()> {
        if reports.len() > REPORTS_MAX {
            return Err(Error::invalid(format!(
                "{} reports of refills, at most {REPORTS_MAX}",
                reports.len()
            )));
        }
        self.refills.retain(|_, (_, at)| now.since(*at) < REPORT_AGE);
        for report in reports {
            self.refills.insert((report.target, report.group), (report, now));
        }
        Ok(())
    }

    pub fn status(&self, wishes: &Wishes, now: Instant) -> RebuildStatus {
        let is_new = |(_, at): &&(RefillReport, Instant)| now.since(*at) < REPORT_AGE;
        let left = self.estimate.left();
        RebuildStatus {
            after_s: wishes.after_s,
            gone: wishes.gone.iter().copied().collect(),
            lost: self.lost.iter().copied().collect(),
            waiting: [summary(&self.waiting), self.moving.waiting()].concat(),
            refills: self.refills.values().filter(is_new).map(|(report, _)| report.clone()).collect(),
            draining: wishes.draining.iter().copied().collect(),
            paused: wishes.paused,
            since_ms: self.run.map_or(0, |(since, _)| now.since(since).as_millis() as u64),
            places_total: self.run.map_or(0, |(_, total)| total),
            left_bytes: left.bytes,
            bytes_per_s: left.bytes_per_s,
            left_ms: left.ms,
        }
    }
}

impl Wishes {
    pub fn set(&mut self, asked: &SetRebuild) -> Result<()> {
        if asked.after_s > LOST_AFTER_S_MAX {
            return Err(Error::invalid(format!(
                "a rebuild after {} s: at most {LOST_AFTER_S_MAX}",
                asked.after_s
            )));
        }
        self.after_s = asked.after_s;
        Ok(())
    }
}

fn observed(
    lost: &BTreeSet<TargetId>,
    wishes: &Wishes,
    reports: &BTreeMap<TargetId, TargetReport>,
) -> Observed {
    Observed {
        lost: lost.clone(),
        draining: wishes.draining.clone(),
        used: reports.values().map(|r| (r.target, r.used)).collect(),
        sizes: BTreeMap::new(),
    }
}

pub(crate) fn summary(waiting: &[(PgId, TargetId, Hindrance)]) -> Vec<RebuildWaiting> {
    let mut places: BTreeMap<(TargetId, Hindrance), u32> = BTreeMap::new();
    for (_, target, why) in waiting {
        *places.entry((*target, *why)).or_default() += 1;
    }
    let of = |((target, why), places): ((TargetId, Hindrance), u32)| RebuildWaiting {
        target,
        why: why.to_string(),
        places,
    };
    places.into_iter().map(of).collect()
}

/// Checks that a target can be given up: it is out of service, and its data is on other members.
fn check_gone(map: &ClusterMap, target: TargetId) -> Result<()> {
    let entry = map.target(target).ok_or_else(|| Error::not_found(format!("there is no target {target}")))?;
    if map.level < LEVEL_OF_REPLACEMENT {
        return Err(Error::unsupported(format!(
            "the cluster is at level {}, targets are replaced from level {LEVEL_OF_REPLACEMENT} on",
            map.level
        ))
        .hint("`weir upgrade finish` when all programs are new"));
    }
    if entry.state == TargetState::Up {
        return Err(Error::exists(format!("{target} is in service"))
            .hint("stop its storage process first, if its disk is to leave"));
    }
    let needs = |g: &&Group| g.scheme.parity > 0 && g.members.iter().any(|m| m.target == target);
    let needing: Vec<&Group> = map.groups.iter().filter(needs).filter(|g| !g.is_writable()).collect();
    let Some(first) = needing.first() else { return Ok(()) };
    let away: BTreeSet<TargetId> = needing.iter().flat_map(|g| &g.members).map(|m| m.target).collect();
    let is_away = |t: &TargetId| *t != target && map.target(*t).is_none_or(|t| t.state != TargetState::Up);
    let names: Vec<String> = away.into_iter().filter(is_away).map(|t| t.to_string()).collect();
    let others = if names.is_empty() { "the others".to_owned() } else { names.join(", ") };
    let what = format!(
        "{target} may have data that no other target has: in {} placement groups only {} of the {} targets \
         that are needed have everything",
        needing.len(),
        first.current_count(),
        first.scheme.data
    );
    Err(Error::name(NameRule::Busy, what).hint(format!("start {others} first")))
}

/// The number of groups by their spare members, from 0 on.
pub fn groups_by_spare(map: &ClusterMap) -> Vec<u32> {
    let mut counts = Vec::new();
    for group in map.groups.iter().filter(|g| g.scheme.parity > 0) {
        let left = spare(group);
        counts.resize(counts.len().max(left + 1), 0);
        counts[left] += 1;
    }
    counts
}
