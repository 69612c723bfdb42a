//! `weir rebuild` and `weir target gone`: lost targets, and the others that replace them.
use crate::cli;
use crate::commands::target::number_of;
use crate::commands::which::coordinators;
use crate::failure::{Failure, Outcome};
use crate::observe;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::time::Duration;
use weir_coord::groups_by_spare;
use weir_proto::coord::{ClusterStatus, GonePlan, RebuildStatus, RebuildWaiting};
use weir_proto::map::{ClusterMap, MemberState};
use weir_proto::{Error, TargetId};

/// The interval of `weir rebuild --watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// `weir target gone`.
pub fn gone(args: &cli::Gone) -> Outcome<()> {
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
    Err(Failure::new(error, "say --yes if its data does not come back, or --dry-run only to look"))
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
pub fn rebuild(args: &cli::Rebuild) -> Outcome<()> {
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
    /// An estimate: the average of the others in its groups.
    bytes_left: u64,
    bytes_per_s: u64,
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
            }
            if member.state == MemberState::Behind {
                filled.entry(member.target).or_default().places += 1;
            }
        }
        for (target, filled) in &mut filled {
            let reports = || rebuild.refills.iter().filter(|r| r.target == *target);
            filled.bytes = reports().map(|r| r.bytes).sum();
            let ms = reports().map(|r| r.since_ms).max().unwrap_or(0);
            filled.bytes_per_s = (filled.bytes * 1000).checked_div(ms).unwrap_or(0);
            let total: u64 = bytes_of_places(status, map, *target);
            filled.bytes_left = total.saturating_sub(filled.bytes);
        }
        let has = |t: TargetId| members().filter(|m| m.target == t).count();
        let draining = rebuild.draining.iter().map(|t| (*t, has(*t))).collect();
        let mut moving = BTreeMap::<TargetId, Filled>::new();
        for found in &map.moves {
            let filled = moving.entry(found.to).or_default();
            filled.places += 1;
            let report = rebuild.refills.iter().find(|r| (r.target, r.group) == (found.to, found.group));
            filled.bytes += report.map_or(0, |r| r.bytes);
        }
        View { places, filled, by_spare: groups_by_spare(map), draining, moving, rebuild }
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
                    format!(
                        "{target} is drained: {places} places to move, paused until `weir rebuild --resume`"
                    )
                }
                _ => format!("{target} is drained: {places} places to move"),
            });
        }
        for (target, f) in &self.moving {
            lines.push(format!("{target} takes {} places: {} MB copied", f.places, f.bytes / 1_000_000));
        }
        for target in &self.rebuild.lost {
            lines.push(match self.places.get(target) {
                Some(places) => format!("{target} is lost: {places} of its places are not taken yet"),
                None => format!("{target} is lost: other targets have all its places"),
            });
        }
        for w in &self.rebuild.waiting {
            lines.push(format!("{}: {} places wait: {}", w.target, w.places, w.why));
        }
        for (target, f) in &self.filled {
            let rest = match f.bytes_left.checked_div(f.bytes_per_s) {
                Some(s) => format!(", {} MB/s, about {s} s left", f.bytes_per_s / 1_000_000),
                None => String::new(),
            };
            lines.push(format!(
                "{target} is filled for {} placement groups: {} MB, about {} MB left{rest}",
                f.places,
                f.bytes / 1_000_000,
                f.bytes_left / 1_000_000
            ));
        }
        if lines.is_empty() {
            lines.push("nothing is rebuilt".to_owned());
        }
        let of = |(spare, groups): (usize, &u32)| format!("{groups} survive {spare} more losses");
        let groups: Vec<String> = self.by_spare.iter().enumerate().filter(|(_, n)| **n > 0).map(of).collect();
        lines.push(format!("placement groups: {}", groups.join(", ")));
        lines.push(match self.rebuild.after_s {
            0 => "a target that is down is replaced only with `weir target gone`".to_owned(),
            s => format!("a target that is down is replaced after {s} s"),
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
                "seconds_left": f.bytes_left.checked_div(f.bytes_per_s),
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
            "paused": self.rebuild.paused,
            "done": self.is_done(),
        })
    }
}

/// An estimate of the bytes for the places that a target is being filled for.
fn bytes_of_places(status: &ClusterStatus, map: &ClusterMap, target: TargetId) -> u64 {
    let groups_of =
        |t: TargetId| map.groups.iter().filter(|g| g.members.iter().any(|m| m.target == t)).count();
    let used = |t: TargetId| status.targets.iter().find(|r| r.target == t).map_or(0, |r| r.used);
    let mut of_place: BTreeMap<TargetId, u64> = BTreeMap::new();
    let is_filled = |g: &&weir_proto::map::Group| {
        g.members.iter().any(|m| m.target == target && m.state == MemberState::Behind)
    };
    let mut sum = 0;
    for group in map.groups.iter().filter(is_filled) {
        let current = group.members.iter().filter(|m| m.state == MemberState::Current);
        let of = |t: TargetId| used(t) / (groups_of(t) as u64).max(1);
        let bytes: Vec<u64> =
            current.map(|m| *of_place.entry(m.target).or_insert_with(|| of(m.target))).collect();
        sum += bytes.iter().sum::<u64>().checked_div(bytes.len() as u64).unwrap_or(0);
    }
    sum
}
