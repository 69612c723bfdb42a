//! `weir rebuild` and `weir target gone`: lost targets, and the others that replace them.
use super::args;
use super::replace::number_of;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::time::Duration;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::decide::{Observed, plan_balance};
use weir_coord::{PlaceSizes, groups_by_spare, left_of_place};
use weir_diagnose::quantity::show_seconds;
use weir_proto::coord::{ClusterStatus, GonePlan, RebuildStatus, RebuildWaiting, RefillReport};
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Move};
use weir_proto::version::LEVEL_OF_GROWTH;
use weir_proto::{Error, TargetId};

/// The interval of `weir rebuild --watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// `weir target gone`.
pub fn gone(args: &args::Gone) -> Outcome<()> {
    let target = number_of(&args.target)?;
    let coordinators = coordinators(&args.cluster)?;
    let plan = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir target").await?;
        let plan = cluster.target_gone(target, true).await?;
        match args.dry_run || !args.yes {
            true => Ok(plan),
            false => Ok(cluster.target_gone(target, false).await?),
        }
    })?;
    match args.cluster.json {
        true => println!("{}", gone_json(target, &plan, args.yes && !args.dry_run)),
        false => println!("{}", gone_text(target, &plan, args.yes && !args.dry_run)),
    }
    if args.dry_run || args.yes {
        return Ok(());
    }
    let error = Error::invalid(format!("{target} is not given up yet"));
    Err(Failure::new(error, "pass --yes if its data will not return, or --dry-run to see what it would do"))
}

fn count_places(n: usize) -> String {
    table::count(n as u64, ["place", "places"])
}

/// The changes made, or planned.
fn gone_text(target: TargetId, plan: &GonePlan, done: bool) -> String {
    let waits: u32 = plan.waiting.iter().map(|w| w.places).sum();
    let mut lines = vec![match (plan.begun + waits, done) {
        (0, true) => format!("{target} is given up; no placement group needs it any more"),
        (0, false) => format!("no placement group needs {target} any more"),
        (all, true) => {
            let begun = plan.begun;
            format!(
                "{target} is given up: {begun} of its {all} places go to other targets now (`weir rebuild --watch`)"
            )
        }
        (all, false) => format!(
            "{target} has a place in {all} placement groups: {} would go to other targets at once",
            plan.begun
        ),
    }];
    lines.extend(plan.waiting.iter().map(|w| format!("{} wait: {}", w.places, w.why)));
    if plan.without_redundancy > 0 {
        lines.push(format!(
            "{} placement groups had no redundancy: their data on {target} is lost",
            plan.without_redundancy
        ));
    }
    lines.join("\n")
}

fn gone_json(target: TargetId, plan: &GonePlan, done: bool) -> Value {
    json!({
        "target": target.to_string(),
        "done": done,
        "begun": plan.begun,
        "waiting": plan.waiting.iter().map(waiting_json).collect::<Vec<_>>(),
        "without_redundancy": plan.without_redundancy,
    })
}

fn waiting_json(w: &RebuildWaiting) -> Value {
    json!({ "target": w.target.to_string(), "places": w.places, "why": w.why })
}

/// `weir rebuild`.
pub fn rebuild(args: &args::Rebuild) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir rebuild").await?;
        if let Some(after_s) = args.lost_after {
            cluster.set_rebuild(after_s).await?;
        }
        if args.pause || args.resume {
            cluster.pause_moves(args.pause).await?;
        }
        loop {
            let (status, rebuild) = (cluster.status().await?, cluster.rebuild().await?);
            let view = View::of(&status, rebuild);
            if args.watch && std::io::stdout().is_terminal() {
                print!("\x1b[H\x1b[2J");
            }
            match args.cluster.json {
                true => println!("{}", view.json()),
                false => println!("{}", view.text()),
            }
            if !args.watch || view.is_done() {
                return Ok(());
            }
            env.clock.sleep(WATCH_EVERY).await;
        }
    })
}

/// A target that is being filled.
#[derive(Default, Debug, PartialEq)]
struct Filled {
    places: usize,
    bytes: u64,
    /// An estimate, see [`PlaceSizes`].
    bytes_left: u64,
    bytes_per_s: u64,
}

/// The rest of a rebuild, or of all moves. Places that no target has taken yet count, too.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
struct Left {
    bytes: u64,
    bytes_per_s: u64,
    /// As the coordinator estimates it.
    ms: Option<u64>,
}

impl Left {
    fn seconds(self) -> Option<u64> {
        self.ms.map(|ms| ms.saturating_add(500) / 1000).or(self.bytes.checked_div(self.bytes_per_s))
    }
    fn text(self, what: &str) -> Option<String> {
        let (seconds, mb) = (self.seconds()?, self.bytes / 1_000_000);
        Some(format!("{what}: about {mb} MB left, {} MB/s, about {seconds} s", self.bytes_per_s / 1_000_000))
    }
    fn json(self) -> Value {
        json!({ "bytes": self.bytes, "bytes_per_s": self.bytes_per_s, "seconds": self.seconds() })
    }
}

/// The bytes of all places that a condition selects.
fn bytes_of(map: &ClusterMap, sizes: &PlaceSizes, selects: impl Fn(&Group, &Member) -> bool) -> u64 {
    let of = |g: &Group| g.members.iter().filter(|m| selects(g, m)).count() as u64 * sizes.of_group(g);
    map.groups.iter().map(of).sum()
}

struct View {
    rebuild: RebuildStatus,
    /// Places that lost targets still have.
    places: BTreeMap<TargetId, usize>,
    filled: BTreeMap<TargetId, Filled>,
    by_spare: Vec<u32>,
    /// Places that drained targets still have, and places that move, by the target that they go to.
    draining: BTreeMap<TargetId, usize>,
    moving: BTreeMap<TargetId, Filled>,
    /// Places that begin to move next, from full targets to emptier ones, by the target that they go to.
    moves_next: BTreeMap<TargetId, usize>,
    rebuild_left: Left,
    moves_left: Left,
}

impl View {
    fn of(status: &ClusterStatus, rebuild: RebuildStatus) -> View {
        let map = &status.map;
        let members = || map.groups.iter().flat_map(|g| &g.members);
        let lost: BTreeSet<TargetId> = rebuild.lost.iter().copied().collect();
        let (mut places, mut filled) = (BTreeMap::new(), BTreeMap::<TargetId, Filled>::new());
        for member in members() {
            if lost.contains(&member.target) {
                *places.entry(member.target).or_default() += 1;
            } else if member.state == MemberState::Behind {
                filled.entry(member.target).or_default().places += 1;
            }
        }
        let used = status.targets.iter().map(|t| (t.target, t.used));
        let sizes = PlaceSizes::of(map, used, rebuild.refills.iter());
        for (target, filled) in &mut filled {
            filled.apply(rebuild.refills.iter().filter(|r| r.target == *target));
            let is_behind = |_: &Group, m: &Member| m.target == *target && m.state == MemberState::Behind;
            filled.bytes_left = left_of_place(bytes_of(map, &sizes, is_behind), filled.bytes);
        }
        let has = |t: TargetId| members().filter(|m| m.target == t).count();
        let draining: BTreeMap<_, _> = rebuild.draining.iter().map(|t| (*t, has(*t))).collect();
        let mut moving = BTreeMap::<TargetId, Filled>::new();
        for found in &map.moves {
            moving.entry(found.to).or_default().places += 1;
        }
        for (target, filled) in &mut moving {
            let to = |group| map.moves.iter().any(|m| (m.to, m.group) == (*target, group));
            filled.apply(rebuild.refills.iter().filter(|r| r.target == *target && to(r.group)));
            let all = map.moves.iter().filter(|m| m.to == *target);
            let of = |group| map.groups.iter().find(|g| g.id == group).map_or(0, |g| sizes.of_group(g));
            filled.bytes_left = all.map(|m| of(m.group)).sum::<u64>().saturating_sub(filled.bytes);
        }
        let left = |targets: &BTreeMap<TargetId, Filled>, later: u64| Left {
            bytes: later + targets.values().map(|f| f.bytes_left).sum::<u64>(),
            bytes_per_s: targets.values().map(|f| f.bytes_per_s).sum(),
            ms: None,
        };
        let rebuild_left = Left {
            bytes: rebuild.left_bytes,
            bytes_per_s: rebuild.bytes_per_s,
            ms: Some(rebuild.left_ms).filter(|ms| *ms > 0),
        };
        let leaves = |g: &Group, m: &Member| {
            let at = |f: &Move| g.members.get(usize::from(f.place)).map(|m| m.target);
            let is_moving = map.moves.iter().any(|f| f.group == g.id && at(f) == Some(m.target));
            draining.contains_key(&m.target) && !is_moving
        };
        let moves_left = left(&moving, bytes_of(map, &sizes, leaves));
        let by_spare = groups_by_spare(map);
        let moves_next = moves_next(status, &rebuild);
        View { moves_next, rebuild, places, filled, by_spare, draining, moving, rebuild_left, moves_left }
    }

    fn is_done(&self) -> bool {
        let only_waits = self.rebuild.waiting.iter().map(|w| w.places as usize).sum::<usize>();
        let drained =
            self.moving.is_empty() && self.draining.iter().all(|(t, places)| *places <= self.waiting_of(*t));
        drained && self.filled.is_empty() && self.places.values().sum::<usize>() <= only_waits
    }

    fn waiting_of(&self, target: TargetId) -> usize {
        let of_target = self.rebuild.waiting.iter().filter(|w| w.target == target);
        of_target.map(|w| w.places as usize).sum()
    }

    fn text(&self) -> String {
        let mut lines = Vec::new();
        for (target, places) in &self.draining {
            lines.push(match places {
                0 => format!("{target} is drained: it has no data any more"),
                _ if self.rebuild.paused => {
                    let rest = count_places(*places);
                    format!("{target} is being drained: {rest} to move, paused until `weir rebuild --resume`")
                }
                _ => format!("{target} is being drained: {} to move", count_places(*places)),
            });
        }
        for (target, f) in &self.moving {
            let (places, copied) = (count_places(f.places), f.bytes / 1_000_000);
            lines.push(format!("{target} takes {places}: {copied} MB copied"));
        }
        for (target, places) in &self.moves_next {
            let places = count_places(*places);
            lines.push(match self.rebuild.paused {
                true => format!(
                    "{target} is to take {places} of fuller targets, paused until `weir rebuild --resume`"
                ),
                false => format!("{target} is to take {places} of fuller targets: they move a few at a time"),
            });
        }
        for target in &self.rebuild.lost {
            lines.push(match self.places.get(target) {
                Some(places) => format!("{target} is lost: {places} of its places are not taken yet"),
                None => format!("{target} is lost: other targets have all its places"),
            });
        }
        for w in &self.rebuild.waiting {
            let (places, waits) =
                (count_places(w.places as usize), if w.places == 1 { "waits" } else { "wait" });
            lines.push(format!("{}: {places} {waits}: {}", w.target, w.why));
        }
        for (target, f) in &self.filled {
            lines.push(format!(
                "{target} is filled for {} placement groups: {} MB, about {} MB left",
                f.places,
                f.bytes / 1_000_000,
                f.bytes_left / 1_000_000
            ));
        }
        lines.extend(self.moves_left.text("all moves"));
        lines.extend(self.rebuild_left.text("the rebuild"));
        if lines.is_empty() {
            lines.push("nothing is rebuilt, and no place moves".to_owned());
        }
        let of = |(spare, groups): (usize, &u32)| {
            let losses = table::count(spare as u64, ["more loss", "more losses"]);
            format!("{groups} survive {losses}")
        };
        let groups: Vec<String> = self.by_spare.iter().enumerate().filter(|(_, n)| **n > 0).map(of).collect();
        lines.push(format!("placement groups: {}", groups.join(", ")));
        lines.push(match self.rebuild.after_s {
            0 => "a target that is down is replaced only with `weir target gone`".to_owned(),
            s => format!("a target that is down is replaced after {}", show_seconds(s)),
        });
        lines.join("\n")
    }

    fn json(&self) -> Value {
        let names = |all: &[TargetId]| all.iter().map(TargetId::to_string).collect::<Vec<_>>();
        let filled = |(target, f): (&TargetId, &Filled)| {
            json!({
                "target": target.to_string(),
                "places": f.places,
                "bytes": f.bytes,
                "bytes_left": f.bytes_left,
                "bytes_per_s": f.bytes_per_s,
            })
        };
        let places =
            |(target, places): (&TargetId, &usize)| json!({ "target": target.to_string(), "places": places });
        json!({
            "lost_after_s": self.rebuild.after_s,
            "gone": names(&self.rebuild.gone),
            "lost": names(&self.rebuild.lost),
            "places_left": self.places.values().sum::<usize>(),
            "waiting": self.rebuild.waiting.iter().map(waiting_json).collect::<Vec<_>>(),
            "filled": self.filled.iter().map(filled).collect::<Vec<_>>(),
            "groups_by_spare": self.by_spare,
            "draining": self.draining.iter().map(places).collect::<Vec<_>>(),
            "moving": self.moving.iter().map(filled).collect::<Vec<_>>(),
            "moves_next": self.moves_next.iter().map(places).collect::<Vec<_>>(),
            "paused": self.rebuild.paused,
            "rebuild_left": self.rebuild_left.json(),
            "moves_left": self.moves_left.json(),
            "done": self.is_done(),
        })
    }
}

/// The steps of the coordinator's next plan: it lets some seconds pass between moves, in which new targets
/// seem to be done.
fn moves_next(status: &ClusterStatus, rebuild: &RebuildStatus) -> BTreeMap<TargetId, usize> {
    let observed = Observed {
        lost: rebuild.lost.iter().copied().collect(),
        draining: rebuild.draining.iter().copied().collect(),
        used: status.targets.iter().map(|t| (t.target, t.used)).collect(),
        sizes: BTreeMap::new(),
    };
    let mut next = BTreeMap::new();
    // Lost and drained targets come first.
    if observed.lost.is_empty() && observed.draining.is_empty() && status.map.level >= LEVEL_OF_GROWTH {
        for step in plan_balance(&status.map, &observed) {
            *next.entry(step.to).or_default() += 1;
        }
    }
    next
}

impl Filled {
    /// Adds up the reports of this target's groups.
    fn apply<'a>(&mut self, reports: impl Iterator<Item = &'a RefillReport>) {
        let mut ms = 0;
        for report in reports {
            self.bytes += report.bytes;
            ms = ms.max(report.since_ms);
        }
        self.bytes_per_s = (self.bytes * 1000).checked_div(ms).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use weir_proto::coord::TargetReport;
    use weir_proto::map::{ClusterMap, Node, Role, RunSeen, Scheme, Target, TargetState};
    use weir_proto::version::Program;
    use weir_proto::{DiskUuid, Epoch, NodeId, PgId};

    const MB: u64 = 1_000_000;

    /// Targets 2 and 3 have 100 MB in each of two groups. Each of these has a third target, which is behind.
    fn status(behind: [u32; 2]) -> ClusterStatus {
        let member =
            |target, state| Member { target: TargetId(target), state, since: Epoch(1), lost_at: Epoch(0) };
        let group = |(id, third): (usize, &u32)| Group {
            id: PgId(id as u32),
            pool: "default".into(),
            scheme: Scheme { data: 2, parity: 1 },
            epoch: Epoch(1),
            members: vec![
                member(2, MemberState::Current),
                member(3, MemberState::Current),
                member(*third, MemberState::Behind),
            ],
        };
        let report = |id| TargetReport {
            target: TargetId(id),
            failed: false,
            capacity: 1000 * MB,
            used: 200 * MB,
            under_replicated_cells: 0,
            damaged_blocks: 0,
            repaired_blocks: 0,
            stalled_ms: 0,
            position: 0,
        };
        let groups = behind.iter().enumerate().map(group).collect();
        ClusterStatus {
            map: Arc::new(ClusterMap { groups, ..ClusterMap::absent() }),
            targets: vec![report(2), report(3)],
            uptime_ms: 1,
            links: vec![],
            program: Program::this(),
        }
    }
    fn rebuild(lost: Vec<TargetId>, bytes: u64, since_ms: u64) -> RebuildStatus {
        let (target, group) = (TargetId(4), PgId(0));
        let refill = RefillReport { target, group, stripes_seen: 0, stripes_repaired: 0, bytes, since_ms };
        let (gone, waiting, draining, paused) = (vec![], vec![], vec![], false);
        let refills = vec![refill];
        RebuildStatus {
            after_s: 600,
            gone,
            lost,
            waiting,
            refills,
            draining,
            paused,
            since_ms: 0,
            places_total: 0,
            left_bytes: 0,
            bytes_per_s: 0,
            left_ms: 0,
        }
    }

    /// Between two steps of a balance no place moves; the balance continues all the same.
    #[test]
    fn places_that_move_to_a_new_target_next_are_shown() {
        let mut status = status([4, 4]);
        let map = Arc::make_mut(&mut status.map);
        map.level = LEVEL_OF_GROWTH;
        for member in map.groups.iter_mut().flat_map(|g| &mut g.members) {
            member.state = MemberState::Current;
        }
        let target = |id| Target {
            id: TargetId(id),
            uuid: DiskUuid([id as u8; 16]),
            node: NodeId(id),
            pool: "default".into(),
            state: TargetState::Up,
            capacity: 1000 * MB,
            last: RunSeen::default(),
            whole: RunSeen::default(),
        };
        map.targets = [2, 3, 4, 5].map(target).to_vec();
        let node = |id| Node {
            id: NodeId(id),
            name: format!("s{id}"),
            role: Role::Storage,
            host: format!("h{id}"),
            addrs: vec![],
            up: true,
            program: Program::this(),
        };
        map.nodes = [2, 3, 4, 5].map(node).to_vec();
        let more: Vec<TargetReport> = [(4, 200), (5, 0)]
            .map(|(id, mb)| TargetReport { target: TargetId(id), used: mb * MB, ..status.targets[0].clone() })
            .into();
        status.targets.extend(more);
        let none = || RebuildStatus { refills: vec![], ..rebuild(vec![], 0, 0) };
        let view = View::of(&status, none());
        assert!(view.text().contains("t5 is to take "), "{}", view.text());
        let lines = view.text();
        assert!(!lines.contains("nothing is rebuilt"), "{lines}");
        status.targets[3].used = 200 * MB;
        let done = View::of(&status, none()).text();
        assert!(done.starts_with("nothing is rebuilt, and no place moves"), "{done}");
    }

    #[test]
    fn a_rebuild_shows_what_is_left_and_for_how_long() {
        let left = |bytes, bytes_per_s, ms| RebuildStatus {
            left_bytes: bytes * MB,
            bytes_per_s: bytes_per_s * MB,
            left_ms: ms,
            ..rebuild(vec![TargetId(1)], 50 * MB, 5000)
        };
        let one = View::of(&status([4, 1]), left(150, 10, 17_600));
        assert_eq!(one.filled[&TargetId(4)].bytes_left, 50 * MB);
        assert!(one.text().contains("the rebuild: about 150 MB left, 10 MB/s, about 18 s"), "{}", one.text());
        let begun = View::of(&status([4, 4]), left(200, 0, 0));
        assert_eq!((begun.rebuild_left.bytes, begun.rebuild_left.seconds()), (200 * MB, None));
        assert!(!begun.text().contains("the rebuild:"), "nothing is known of its rate");
    }
}
