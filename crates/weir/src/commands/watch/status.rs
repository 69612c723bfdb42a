//! `weir status`: the troubles of a cluster, the worst first; then its nodes, targets and placement groups.
use super::args;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::local_cluster::LocalCluster;
use weir_admin::which::coordinators;
use weir_admin::{collect, table};
use weir_coord::decide::{FileSpace, file_space};
use weir_diagnose::Health;
use weir_diagnose::troubles::{Facts, Trouble, exit_code, overload, state, troubles, word, worst};
use weir_env::Addr;
use weir_proto::condition::Severity;
use weir_proto::coord::CutLink;
use weir_proto::map::{Group, MemberState, Role, TargetState};
use weir_proto::version::Program;

/// The interval of `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(2);

/// The exit status of `weir status` is the severity of the worst trouble.
pub fn status(args: &args::ShowStatus) -> Outcome<ExitCode> {
    let local = args.cluster.local()?;
    let coordinators = coordinators(&args.cluster)?;
    if !args.watch {
        return show(args, local.as_ref(), &coordinators);
    }
    loop {
        let shown = show(args, local.as_ref(), &coordinators);
        // An unreachable coordinator may return: `--watch` waits for just that.
        if let Err(failure) = shown {
            println!("{failure}");
        }
        std::io::stdout().flush().doing("print the status")?;
        std::thread::sleep(WATCH_EVERY);
    }
}

fn show(args: &args::ShowStatus, local: Option<&LocalCluster>, coordinators: &[Addr]) -> Outcome<ExitCode> {
    let report = Report::of(collect::facts(local, coordinators, "weir status")?);
    let text = match (args.cluster.json, args.brief) {
        (true, false) => format!("{:#}\n", report.as_json()),
        (true, true) => format!("{}\n", report.as_brief_json()),
        (false, false) => report.as_text(),
        (false, true) => report.as_brief_text(),
    };
    if args.watch && std::io::stdout().is_terminal() {
        print!("\x1b[H\x1b[2J"); // from the top of an empty screen
    }
    print!("{text}");
    Ok(ExitCode::from(report.worst().map_or(0, exit_code)))
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Coordinator => "coordinator",
        Role::Meta => "meta",
        Role::Storage => "storage",
        Role::Mount => "mount",
        Role::Mover => "mover",
        Role::Console => "console",
        Role::Operator => "operator",
        Role::Auditor => "auditor",
    }
}

fn program(program: &Program) -> Value {
    json!({
        "release": program.release, "level": program.level,
        "protocol_versions": [program.version_min, program.version_max],
    })
}

fn target_state(state: TargetState) -> &'static str {
    match state {
        TargetState::Up => "up",
        TargetState::Down => "down",
        TargetState::Failed => "failed",
    }
}

fn member_state(state: MemberState) -> &'static str {
    match state {
        MemberState::Current => "current",
        MemberState::Down => "down",
        MemberState::Behind => "behind",
    }
}

/// The printed report.
struct Report {
    facts: Facts,
    health: Health,
    /// The worst first.
    troubles: Vec<Trouble>,
}

/// What `weir status --json` prints.
pub fn as_json(facts: Facts) -> Value {
    Report::of(facts).as_json()
}

impl Report {
    fn of(facts: Facts) -> Report {
        let health = Health::of_used(&facts.status, &facts.in_use());
        Report { troubles: troubles(&facts), health, facts }
    }

    /// The worst of the troubles that count.
    fn worst(&self) -> Option<Severity> {
        worst(&self.troubles)
    }
    fn counting(&self) -> impl Iterator<Item = &Trouble> {
        self.troubles.iter().filter(|t| t.muted_until.is_none())
    }
    /// One line about those that do not count; empty: there are none.
    fn muted(&self) -> String {
        let muted = self.troubles.iter().filter(|t| t.muted_until.is_some());
        let muted: Vec<String> = muted.map(|t| format!("{} ({})", t.code, t.about)).collect();
        match muted.is_empty() {
            true => String::new(),
            false => format!("muted: {}\n", muted.join(", ")),
        }
    }

    fn state(&self) -> (&'static str, &'static str) {
        state(&self.troubles)
    }

    /// The space for files, without redundancy, as programs see it.
    fn space(&self) -> FileSpace {
        let status = &self.facts.status;
        file_space(&status.map, &status.targets, None, None)
    }

    /// The number of further targets that may fail, in any place, before data is lost: in the group with the
    /// lowest.
    fn spare(&self) -> Option<usize> {
        let in_use = self.facts.in_use();
        let used = self.facts.status.map.groups.iter().filter(|g| in_use.has(g));
        used.map(|g| g.current_count().saturating_sub(usize::from(g.scheme.data))).min()
    }

    fn headline(&self) -> String {
        let (state, meaning) = self.state();
        format!("{state}{meaning}; {}\n", self.health.counts())
    }

    fn as_brief_text(&self) -> String {
        let mut out = self.headline();
        for trouble in self.counting() {
            out += &format!("  {:<8}  {}\n", word(trouble.severity), trouble.text);
        }
        out + &self.muted()
    }

    fn as_text(&self) -> String {
        let map = &self.facts.status.map;
        let mut out = self.headline();
        let (space, scheme) = (self.space(), map.settings.scheme);
        out += &format!(
            "{} free for files with {scheme}, {} of {} used\n",
            table::bytes(space.free),
            table::bytes(space.used),
            table::bytes(space.capacity())
        );
        if space.is_uneven() {
            let all = table::bytes(space.free_of_targets);
            out += &format!(
                "(the targets have room for {all}, and each stripe needs {} of them: the smaller ones limit it)\n",
                scheme.width()
            );
        }
        out += &match self.spare() {
            None => "no placement groups yet\n".to_owned(),
            Some(0) => "no redundancy is left somewhere: one more failure may lose data\n".to_owned(),
            Some(n) => format!(
                "any {} may fail without loss of data\n",
                table::count(n as u64, ["more target", "more targets"])
            ),
        };
        out += &format!("cluster {}, map version {}, level {}\n", map.cluster, map.version, map.level);
        if self.counting().next().is_some() {
            out += "\n";
        }
        for trouble in self.counting() {
            out += &format!("  {:<8}  {}\n", word(trouble.severity), trouble.text);
            if !trouble.action.is_empty() {
                out += &format!("  {:<8}  {}\n", "", trouble.action);
            }
        }
        out + &self.muted() + &tables(&self.facts)
    }
}

fn tables(facts: &Facts) -> String {
    let status = &facts.status;
    let map = &status.map;
    let mut out = String::new();
    let nodes: Vec<Vec<String>> = map
        .nodes
        .iter()
        .map(|n| {
            let state = match n.up {
                true => "up",
                false if map.has_left(n) => "left",
                false => "down",
            };
            let (id, name, addrs) = (n.id.to_string(), n.name.clone(), n.addrs.join(" "));
            vec![id, name, role(n.role).into(), state.into(), n.program.release.clone(), addrs]
        })
        .collect();
    out += "\n";
    out += &table::render(&["NODE", "NAME", "ROLE", "STATE", "RELEASE", "ADDRESSES"], &nodes);
    let targets: Vec<Vec<String>> = map
        .targets
        .iter()
        .map(|t| {
            let node = map.node(t.node).map_or("?", |n| n.name.as_str());
            let report = status.targets.iter().find(|r| r.target == t.id);
            let shown = |f: &dyn Fn(&weir_proto::coord::TargetReport) -> String| report.map_or("?".into(), f);
            vec![
                t.id.to_string(),
                node.into(),
                t.pool.clone(),
                target_state(t.state).into(),
                table::bytes(t.capacity),
                shown(&|r| table::bytes(r.used)),
                shown(&|r| r.under_replicated_cells.to_string()),
                shown(&|r| r.damaged_blocks.to_string()),
                shown(&|r| r.repaired_blocks.to_string()),
            ]
        })
        .collect();
    out += "\n";
    let header =
        ["TARGET", "NODE", "POOL", "STATE", "CAPACITY", "USED", "UNDER-REPLICATED", "DAMAGED", "REPAIRED"];
    out += &table::render(&header, &targets);
    let in_use = facts.in_use();
    let used: Vec<&Group> = map.groups.iter().filter(|g| in_use.has(g)).collect();
    out += "\n";
    let header = ["POOL", "SCHEME", "PLACEMENT GROUPS", "COMPLETE", "MEMBERS MISSING", "UNDER REPAIR"];
    out += &table::render(&header, &group_kinds(&used));
    out
}

/// One row per kind of group in use, in the order of the map.
fn group_kinds(groups: &[&Group]) -> Vec<Vec<String>> {
    let mut kinds: Vec<(&str, String)> = Vec::new();
    for group in groups {
        let kind = (group.pool.as_str(), group.scheme.to_string());
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let row = |(pool, scheme): &(&str, String)| {
        let is_of_kind = |g: &&&Group| g.pool == *pool && g.scheme.to_string() == *scheme;
        let of_kind: Vec<&Group> = groups.iter().filter(is_of_kind).copied().collect();
        let complete = of_kind.iter().filter(|g| g.current_count() == g.members.len()).count();
        let members = |state| of_kind.iter().flat_map(|g| &g.members).filter(|m| m.state == state).count();
        vec![
            (*pool).to_string(),
            scheme.clone(),
            of_kind.len().to_string(),
            complete.to_string(),
            members(MemberState::Down).to_string(),
            members(MemberState::Behind).to_string(),
        ]
    };
    kinds.iter().map(row).collect()
}

impl Report {
    /// Without nodes, targets and groups.
    fn as_brief_json(&self) -> Value {
        let space = self.space();
        json!({
            "state": self.state().0, "healthy": self.worst().is_none_or(|worst| worst == Severity::Note),
            "redundant": self.health.is_full(), "serving": self.health.serves(), "health": self.health,
            "spare_targets": self.spare(), "troubles": self.troubles_json(),
            "capacity_bytes": space.capacity(), "used_bytes": space.used, "free_bytes": space.free,
        })
    }
    fn troubles_json(&self) -> Vec<Value> {
        self.troubles.iter().map(Trouble::as_json).collect()
    }

    fn as_json(&self) -> Value {
        let (status, health) = (&self.facts.status, &self.health);
        let map = &status.map;
        let nodes: Vec<Value> = map
        .nodes
        .iter()
        .map(|n| {
            json!({
                "id": n.id.0, "name": n.name, "role": role(n.role), "host": n.host, "up": n.up, "addresses": n.addrs,
                "program": program(&n.program), "pressure": overload::pressure(&self.facts.lives, n.id),
            })
        })
        .collect();
        let targets: Vec<Value> = map
            .targets
            .iter()
            .map(|t| {
                let report = status.targets.iter().find(|r| r.target == t.id);
                json!({
                    "id": t.id.0, "uuid": t.uuid.to_string(), "node": t.node.0, "pool": t.pool,
                    "state": target_state(t.state), "capacity_bytes": t.capacity,
                    "used_bytes": report.map(|r| r.used), "under_replicated_cells": report.map(|r| r.under_replicated_cells),
                    "damaged_blocks": report.map(|r| r.damaged_blocks),
                    "repaired_blocks": report.map(|r| r.repaired_blocks),
                    "speed": overload::speed(&self.facts.lives, t.id),
                })
            })
            .collect();
        let groups: Vec<Value> = map
        .groups
        .iter()
        .map(|g| {
            let members: Vec<Value> =
                g.members.iter().map(|m| json!({ "target": m.target.0, "state": member_state(m.state) })).collect();
            json!({
                "id": g.id.0, "pool": g.pool, "scheme": g.scheme.to_string(), "epoch": g.epoch.0, "members": members,
            })
        })
        .collect();
        let namespaces: Vec<Value> = map
        .namespaces
        .iter()
        .map(|v| json!({ "id": v.id.0, "name": v.name, "leader": v.leader.map(|n| n.0), "epoch": v.leader_epoch.0 }))
        .collect();
        let link = |l: &CutLink| json!({ "from": l.from, "role": role(l.role), "to_node": l.to.0, "since_ms": l.since_ms, "why": l.why });
        let links: Vec<Value> = status.links.iter().map(link).collect();
        let space = self.space();
        json!({
            "cluster": map.cluster.to_string(), "map_version": map.version, "level": map.level, "coordinator_program": program(&status.program), "uptime_ms": status.uptime_ms,
            "state": self.state().0, "healthy": self.worst().is_none_or(|worst| worst == Severity::Note),
            "redundant": health.is_full(), "serving": health.serves(), "health": health, "troubles": self.troubles_json(), "spare_targets": self.spare(),
            "capacity_bytes": space.capacity(), "used_bytes": space.used, "free_bytes": space.free,
            "mounts": self.facts.mounts, "dead_mounts": self.facts.dead_mounts,
            "nodes": nodes, "targets": targets, "groups": groups, "namespaces": namespaces,
            "cut_links": links,
        })
    }
}
