//! `weir status`: nodes, targets, placement groups, debt and damage; what the mounts of a directory lost.
use crate::cli;
use crate::failure::{Failure, Outcome};
use crate::mounts::{self, MountState};
use crate::observe::{self, Health};
use crate::place::Place;
use crate::table;
use serde_json::{Value, json};
use weir_env::Addr;
use weir_proto::coord::ClusterStatus;
use weir_proto::map::{Group, MemberState, Role, TargetState};
use weir_proto::{Error, TargetId};

pub fn coordinators(args: &cli::Status) -> Outcome<Vec<Addr>> {
    match &args.dir {
        Some(dir) => Ok(Place::open(dir)?.coordinators()),
        None => Ok(args.coordinator.clone()),
    }
}

/// `weir target clear`.
pub fn clear_target(args: &cli::ClearTarget) -> Outcome<()> {
    let number = args.target.strip_prefix('t').and_then(|n| n.parse().ok());
    let target = number.map(TargetId).ok_or_else(|| {
        let error = Error::invalid(format!("{:?} names no target", args.target));
        Failure::new(error, "a target is called like t3: `weir status` shows them")
    })?;
    let coordinators = coordinators(&args.cluster)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir target").await?;
        Ok(cluster.clear_target(target).await?)
    })?;
    match args.cluster.json {
        true => println!("{}", json!({ "cleared": args.target })),
        false => println!("{target} may be used again: it is repaired when its process serves it"),
    }
    Ok(())
}

pub fn status(args: &cli::Status) -> Outcome<()> {
    let coordinators = coordinators(args)?;
    let status = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir status").await?;
        Ok(cluster.status().await?)
    })?;
    // The mounts that this machine's `weir up` made; others are their own machines'.
    let mounts = match &args.dir {
        Some(dir) => mounts::of(&Place::open(dir)?),
        None => Vec::new(),
    };
    if args.json {
        table::json(&as_json(&status, &mounts));
    } else {
        print!("{}", as_text(&status, &mounts));
    }
    Ok(())
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Coordinator => "coordinator",
        Role::Meta => "meta",
        Role::Storage => "storage",
        Role::Mount => "mount",
        Role::Mover => "mover",
        Role::Console => "console",
    }
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

fn as_text(status: &ClusterStatus, mounts: &[MountState]) -> String {
    let map = &status.map;
    let mut out = format!("cluster {}, map version {}\n{}\n", map.cluster, map.version, Health::of(status));
    for line in observe::troubles(status).into_iter().chain(mounts::troubles(mounts)) {
        out += &format!("  - {line}\n");
    }
    let nodes: Vec<Vec<String>> = map
        .nodes
        .iter()
        .map(|n| {
            let state = if n.up { "up" } else { "down" };
            vec![n.id.to_string(), n.name.clone(), role(n.role).into(), state.into(), n.addrs.join(" ")]
        })
        .collect();
    out += "\n";
    out += &table::render(&["NODE", "NAME", "ROLE", "STATE", "ADDRESSES"], &nodes);
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
                shown(&|r| r.debt_cells.to_string()),
                shown(&|r| r.damaged_blocks.to_string()),
                shown(&|r| r.repaired_blocks.to_string()),
            ]
        })
        .collect();
    out += "\n";
    let header = ["TARGET", "NODE", "POOL", "STATE", "CAPACITY", "USED", "DEBT CELLS", "DAMAGED", "REPAIRED"];
    out += &table::render(&header, &targets);
    let kinds = group_kinds(&map.groups);
    out += "\n";
    out += &table::render(&["POOL", "SCHEME", "GROUPS", "FULL", "MEMBERS DOWN", "MEMBERS BEHIND"], &kinds);
    out
}

/// One row per kind of group, in the order of the map.
fn group_kinds(groups: &[Group]) -> Vec<Vec<String>> {
    let mut kinds: Vec<(&str, String)> = Vec::new();
    for group in groups {
        let kind = (group.pool.as_str(), group.scheme.to_string());
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let row = |(pool, scheme): &(&str, String)| {
        let of_kind: Vec<&Group> =
            groups.iter().filter(|g| g.pool == *pool && g.scheme.to_string() == *scheme).collect();
        let full = of_kind.iter().filter(|g| g.current_count() == g.members.len()).count();
        let members = |state| of_kind.iter().flat_map(|g| &g.members).filter(|m| m.state == state).count();
        vec![
            (*pool).to_string(),
            scheme.clone(),
            of_kind.len().to_string(),
            full.to_string(),
            members(MemberState::Down).to_string(),
            members(MemberState::Behind).to_string(),
        ]
    };
    kinds.iter().map(row).collect()
}

fn as_json(status: &ClusterStatus, mounts: &[MountState]) -> Value {
    let map = &status.map;
    let health = Health::of(status);
    let troubles = [observe::troubles(status), mounts::troubles(mounts)].concat();
    let nodes: Vec<Value> = map
        .nodes
        .iter()
        .map(|n| {
            json!({ "id": n.id.0, "name": n.name, "role": role(n.role), "host": n.host, "up": n.up, "addresses": n.addrs })
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
                "used_bytes": report.map(|r| r.used), "debt_cells": report.map(|r| r.debt_cells),
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
    json!({
        "cluster": map.cluster.to_string(), "map_version": map.version, "uptime_ms": status.uptime_ms,
        "healthy": health.is_full(), "serving": health.serves(), "health": health,
        "troubles": troubles, "mounts": mounts,
        "nodes": nodes, "targets": targets, "groups": groups, "namespaces": namespaces,
    })
}
