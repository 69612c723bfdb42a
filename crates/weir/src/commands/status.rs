//! `weir status`: how a cluster is, the worst first; then its nodes, targets and placement groups.
use crate::certificate::{self, ADMIN_CERTIFICATE, CERTIFICATE};
use crate::cli;
use crate::commands::troubles::{Facts, Known, NamespaceFacts, ProcessState, Severity, Trouble, troubles};
use crate::commands::volume::{all, connect};
use crate::commands::{file, mounts};
use crate::config;
use crate::failure::{Doing, Failure, Outcome};
use crate::local::local_cluster::{LocalCluster, Process, RoleName};
use crate::local::process::PidFile;
use crate::observe::{self, Health, is_led};
use crate::table;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use weir_env::Addr;
use weir_home::HomeUrl;
use weir_proto::coord::{
    AuditState, ClientsWaiting, Clocks, ClusterStatus, CutLink, RebuildWaiting, TargetReport,
};
use weir_proto::map::{Group, MemberState, Role, TargetState};
use weir_proto::version::Program;
use weir_proto::{Error, TargetId};
use weir_trust::certificate::role_word;

/// How long a metadata server may take to answer all that is asked.
const NAMESPACE_PATIENCE: Duration = Duration::from_secs(5);

impl cli::Status {
    /// The directory of the cluster, where it is known by that.
    pub fn local(&self) -> Outcome<Option<LocalCluster>> {
        match &self.dir {
            Some(dir) if self.coordinator.is_empty() && config_of_node(dir).is_none() => {
                LocalCluster::open(dir).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Where a machine has the configuration of its own node, for commands that name no cluster.
const MACHINE_DIR: &str = "/etc/weir";

/// A node's directory that `weir init` or `weir join` made: one of its configuration files.
fn config_of_node(dir: &Path) -> Option<PathBuf> {
    let roles = Role::ALL.iter().map(|role| dir.join(format!("{}.toml", role_word(*role))));
    roles.into_iter().find(|file| file.exists())
}

/// The coordinators that a node knows. Commands then show its certificate, or the administrator's, if it is
/// there.
fn coordinators_of_node(dir: &Path, file: &Path) -> Outcome<Vec<Addr>> {
    let certificates = [ADMIN_CERTIFICATE, CERTIFICATE].map(|name| dir.join(name));
    if let Some(found) = certificates.iter().find(|file| file.exists()) {
        // At the coordinator's machine it is not needed, so commands work without one that has ended.
        if let Err(failure) = certificate::use_file(found) {
            let (error, hint) = failure.parts();
            eprintln!("warning: {error}");
            hint.iter().for_each(|hint| eprintln!("hint: {hint}"));
        }
    }
    let text = std::fs::read_to_string(file).doing(format_args!("read {}", file.display()))?;
    let config = config::parse(&file.display().to_string(), &text)?;
    Ok(config.cluster.coordinators.into_iter().map(|addr| addr.0).collect())
}

/// Where the mount that a path lies in serves this machine's users.
fn socket_of_mount(path: &Path) -> Outcome<Addr> {
    let hint =
        "name the cluster: --dir DIR, --coordinator ADDR, or --at PATH with a path in a mounted file system";
    let answer = file::ask(path, file::SOCKET).map_err(|_| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let error = format!("no cluster is named, and {} is not on a Weir file system", path.display());
        Failure::new(Error::invalid(error), hint)
    })?;
    match answer["socket"].as_str() {
        Some(socket) => Ok(Addr::Unix(socket.into())),
        None => Err(Failure::new(
            Error::unsupported(format!(
                "the mount of {} has no socket for users (node.door)",
                path.display()
            )),
            hint,
        )),
    }
}

/// That of the mount in which a path lies, or in which the user stands; else the machine's own.
fn of_machine(at: Option<&Path>) -> Outcome<Vec<Addr>> {
    let here = socket_of_mount(at.unwrap_or(Path::new(".")));
    let dir = Path::new(MACHINE_DIR);
    match (here, config_of_node(dir)) {
        (Err(_), Some(file)) if at.is_none() => coordinators_of_node(dir, &file),
        (here, _) => Ok(vec![here?]),
    }
}

pub fn coordinators(args: &cli::Status) -> Outcome<Vec<Addr>> {
    let of_node = args.dir.as_deref().filter(|_| args.coordinator.is_empty());
    let of_node = of_node.and_then(|dir| Some((dir, config_of_node(dir)?)));
    let found = match of_node {
        Some((dir, file)) => coordinators_of_node(dir, &file)?,
        None if args.dir.is_none() && args.coordinator.is_empty() => of_machine(args.at.as_deref())?,
        None => args.local()?.map_or_else(|| args.coordinator.clone(), |local| local.coordinators()),
    };
    observe::require_listener(&found)?;
    Ok(found)
}

/// What `weir status` exits with says how bad the worst trouble is.
pub fn status(args: &cli::Status) -> Outcome<ExitCode> {
    let local = args.local()?;
    let (status, asked) = observe::block_on(ask(&coordinators(args)?))?;
    let facts = facts(local.as_ref(), &status, asked);
    let report =
        Report { troubles: troubles(&facts), health: Health::of_used(&status, &facts.in_use()), facts };
    match args.json {
        true => table::json(&report.as_json()),
        false => print!("{}", report.as_text()),
    }
    Ok(ExitCode::from(report.worst().map_or(0, Severity::exit_code)))
}

/// Beside the coordinator's view.
struct Asked {
    waiting: ClientsWaiting,
    clocks: Clocks,
    rebuild: Vec<(TargetId, String)>,
    /// Of the coordinator.
    audit: AuditState,
    namespaces: Vec<NamespaceFacts>,
}

/// The coordinator's view, and what each metadata server that leads says of its volumes.
async fn ask(coordinators: &[Addr]) -> Outcome<(ClusterStatus, Asked)> {
    let env = weir_env::real::env();
    let cluster = observe::observe(&env, coordinators, "weir status").await?;
    let (status, waiting) = (cluster.status().await?, cluster.waits().await?);
    let clocks = cluster.clocks().await.unwrap_or(Clocks { off: Vec::new() }); // an older server knows none
    let audit = cluster.audit().await.unwrap_or_default(); // as above
    let mut namespaces = Vec::new();
    for namespace in status.map.namespaces.iter().filter(|n| is_led(&status.map, n)) {
        let name = namespace.name.clone();
        let asked = env.clock.timeout(NAMESPACE_PATIENCE, known(coordinators, &name)).await;
        let known = match asked {
            Ok(Ok(known)) => Ok(known),
            Ok(Err(failure)) => Err(failure.error.context),
            Err(_) => Err(format!("no answer within {NAMESPACE_PATIENCE:?}")),
        };
        namespaces.push(NamespaceFacts { name, known });
    }
    // A coordinator of an earlier release knows nothing of it.
    let rebuild = cluster.rebuild().await.map_or(Vec::new(), |rebuild| not_replaced(&rebuild.waiting));
    Ok((status, Asked { waiting, clocks, rebuild, audit, namespaces }))
}

async fn known(coordinators: &[Addr], namespace: &str) -> Outcome<Known> {
    let client = connect(coordinators.to_vec(), namespace).await?;
    let volumes = all(&client).await?;
    let (relations, backups) = (client.relations(None).await?, client.backups(None).await?);
    let audit = client.audit().await.unwrap_or_default(); // as above
    client.shutdown().await?;
    Ok(Known { volumes, relations, backups, audit })
}

/// Places of lost targets that no other target can take. Those whose turn comes later need nobody.
fn not_replaced(waiting: &[RebuildWaiting]) -> Vec<(TargetId, String)> {
    let text = |RebuildWaiting { target, why, places }: &RebuildWaiting| {
        format!(
            "{target} is lost, and not replaced in {places} placement groups: {why}; add a target, or give it a new \
             disk with `weir target replace {target} DIR`"
        )
    };
    waiting.iter().filter(|w| !w.why.contains("first")).map(|w| (w.target, text(w))).collect()
}

fn facts<'a>(local: Option<&LocalCluster>, status: &'a ClusterStatus, asked: Asked) -> Facts<'a> {
    let Asked { waiting, clocks, rebuild, audit, namespaces } = asked;
    let lives =
        |p: &Process| local.is_some_and(|at| PidFile::read(&at.pid_file(p)).is_some_and(|f| f.alive()));
    let process_state = |p: &Process| ProcessState {
        name: p.name.clone(),
        role: p.role,
        lives: lives(p),
        log: local.map(|at| at.log(p)).unwrap_or_default(),
    };
    let processes: Vec<ProcessState> =
        local.into_iter().flat_map(|at| &at.manifest.processes).map(process_state).collect();
    // The mounts that this machine's `weir up` made; others are their own machines'.
    let mounts = local.map(mounts::of).unwrap_or_default();
    let dead_mounts = mounts::dead_beside(&mounts);
    let restart = match local {
        Some(local) => format!("`weir up --dir {}` starts it again", local.dir.display()),
        None => "start its process again on its machine".into(),
    };
    let missing_homes = missing_homes(&processes, &namespaces);
    Facts {
        status,
        waiting,
        clocks,
        rebuild,
        audit,
        restart,
        processes,
        mounts,
        dead_mounts,
        namespaces,
        missing_homes,
    }
}

/// Directories that are homes and are not there. Movers of other machines may find them where they are.
fn missing_homes(processes: &[ProcessState], namespaces: &[NamespaceFacts]) -> BTreeSet<String> {
    let here = processes.iter().filter(|p| p.role == RoleName::Mover && p.lives).count();
    let known = || namespaces.iter().filter_map(|n| n.known.as_ref().ok());
    if processes.is_empty() || known().flat_map(|k| &k.relations).any(|r| r.movers as usize > here) {
        return BTreeSet::new();
    }
    let relations = known().flat_map(|k| &k.relations).map(|r| r.url.clone());
    let backups = known().flat_map(|k| &k.backups).map(|b| b.url.clone());
    let urls: BTreeSet<String> = relations.chain(backups).collect();
    let is_missing = |path: &Path| {
        let found = std::fs::metadata(path);
        found.as_ref().map_or_else(|e| e.kind() == std::io::ErrorKind::NotFound, |m| !m.is_dir())
    };
    let ask = |url: String| match HomeUrl::parse(&url) {
        Ok(HomeUrl::File { path }) => Some((mounts::ask(&path, is_missing), url)),
        _ => None,
    };
    let asked: Vec<_> = urls.into_iter().filter_map(ask).collect();
    asked.into_iter().filter_map(|(missing, url)| missing.answer().unwrap_or(false).then_some(url)).collect()
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

/// What is printed.
struct Report<'a> {
    facts: Facts<'a>,
    health: Health,
    /// The worst first.
    troubles: Vec<Trouble>,
}

impl Report<'_> {
    fn worst(&self) -> Option<Severity> {
        self.troubles.first().map(|t| t.severity)
    }

    fn state(&self) -> (&'static str, &'static str) {
        match self.worst() {
            None | Some(Severity::Note) => ("healthy", ""),
            Some(Severity::Warning) => ("warning", ": all data is available and redundant"),
            Some(Severity::Degraded) => ("degraded", ": data is available with reduced redundancy"),
            Some(Severity::Critical) => ("critical", ": data is unavailable or lost"),
        }
    }

    /// Bytes of files that the targets have room for, and that are taken, without redundancy.
    fn space(&self) -> (u64, u64) {
        let status = self.facts.status;
        let share = |of: fn(&TargetReport) -> u64| {
            status.map.settings.scheme.payload_share(status.targets.iter().map(of).sum())
        };
        (share(|r| r.capacity), share(|r| r.used))
    }

    fn as_text(&self) -> String {
        let map = &self.facts.status.map;
        let (state, meaning) = self.state();
        let mut out = format!("cluster {}, map version {}, level {}\n", map.cluster, map.version, map.level);
        out += &format!("{state}{meaning}; {}\n", self.health.counts());
        let (capacity, used) = self.space();
        let (free, scheme) = (capacity.saturating_sub(used), map.settings.scheme);
        out += &format!(
            "{} free for files with {scheme}, {} of {} used\n",
            table::bytes(free),
            table::bytes(used),
            table::bytes(capacity)
        );
        if !self.troubles.is_empty() {
            out += "\n";
        }
        for trouble in &self.troubles {
            out += &format!("  {:<8}  {}\n", trouble.severity.word(), trouble.text);
        }
        out + &tables(self.facts.status, &self.facts)
    }
}

fn tables(status: &ClusterStatus, facts: &Facts<'_>) -> String {
    let map = &status.map;
    let mut out = String::new();
    let nodes: Vec<Vec<String>> = map
        .nodes
        .iter()
        .map(|n| {
            let state = if n.up { "up" } else { "down" };
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
    let header = ["TARGET", "NODE", "POOL", "STATE", "CAPACITY", "USED", "DEBT CELLS", "DAMAGED", "REPAIRED"];
    out += &table::render(&header, &targets);
    let in_use = facts.in_use();
    let used: Vec<&Group> = map.groups.iter().filter(|g| in_use.has(g)).collect();
    out += "\n";
    let header = ["POOL", "SCHEME", "PLACEMENT GROUPS", "COMPLETE", "MEMBERS MISSING", "UNDER REPAIR"];
    out += &table::render(&header, &group_kinds(&used));
    out
}

/// One row per kind of group that is used, in the order of the map.
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

impl Report<'_> {
    fn as_json(&self) -> Value {
        let (status, health) = (self.facts.status, &self.health);
        let map = &status.map;
        let nodes: Vec<Value> = map
        .nodes
        .iter()
        .map(|n| {
            json!({
                "id": n.id.0, "name": n.name, "role": role(n.role), "host": n.host, "up": n.up, "addresses": n.addrs,
                "program": program(&n.program),
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
        let (capacity, used) = self.space();
        json!({
            "cluster": map.cluster.to_string(), "map_version": map.version, "level": map.level, "coordinator_program": program(&status.program), "uptime_ms": status.uptime_ms,
            "state": self.state().0, "healthy": self.worst().is_none_or(|worst| worst == Severity::Note),
            "redundant": health.is_full(), "serving": health.serves(), "health": health, "troubles": self.troubles,
            "capacity_bytes": capacity, "used_bytes": used, "free_bytes": capacity.saturating_sub(used),
            "mounts": self.facts.mounts, "dead_mounts": self.facts.dead_mounts,
            "nodes": nodes, "targets": targets, "groups": groups, "namespaces": namespaces,
            "cut_links": links,
        })
    }
}
