//! `weir namespace list` and `copies`: the nodes that store the metadata, and the target number of copies.
use super::args::SetCopies as Args;
use serde_json::{Value, json};
use std::time::Duration;
use weir_admin::cluster_args::Status;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_diagnose::health::{copies_lacking, is_led};
use weir_proto::copies::SetCopies;
use weir_proto::map::{ClusterMap, MemberState, NamespaceCopies, NamespaceEntry};
use weir_proto::{Error, NodeId};

/// Waiting nodes check each change of the map.
const PLACE_PATIENCE: Duration = Duration::from_secs(5);
/// A new copy of a few gigabytes is filled in a minute; the command can be repeated.
const FILL_PATIENCE: Duration = Duration::from_secs(600);

pub fn list(at: &Status) -> Outcome<()> {
    show(at, None)
}

pub fn set(args: &Args) -> Outcome<()> {
    show(&args.cluster, Some(args))
}

/// Lists all copies, after a change if one is requested.
fn show(at: &Status, change: Option<&Args>) -> Outcome<()> {
    let coordinators = coordinators(at)?;
    let map = observe::block_on(async {
        let cluster = observe::observe(&weir_env::real::env(), &coordinators, "weir namespace").await?;
        let Some(args) = change else { return Ok(cluster.map()) };
        let named = |name: &String| {
            let map = cluster.map();
            let node = map.nodes.iter().find(|n| n.name == *name).map(|n| n.id);
            let unknown = || Error::not_found(format!("there is no node {name:?}"));
            node.ok_or_else(|| Failure::new(unknown(), "`weir namespace list` names those that keep a copy"))
        };
        let without = args.without.as_ref().map(named).transpose()?;
        let asked =
            SetCopies { namespace: args.namespace.clone(), copies: args.copies.unwrap_or(0), without };
        cluster.set_copies(&asked).await?;
        if args.no_wait {
            return Ok(cluster.map());
        }
        // Nodes that wait for a place take it within a second; copies are then filled.
        let have_nodes = |map: &ClusterMap| free_places(map, &args.namespace) == 0;
        let is_done = |map: &ClusterMap| copies_lacking(map, &args.namespace) == 0;
        let placed = cluster.wait_for(PLACE_PATIENCE, have_nodes).await;
        if placed.is_ok() && !is_done(&cluster.map()) {
            eprintln!(
                "waiting until all copies of {:?} hold everything; Ctrl-C does not end that",
                args.namespace
            );
        }
        let is_over = |map: &ClusterMap| is_done(map) || has_down(map, &args.namespace);
        match placed {
            Ok(_) => match cluster.wait_for(FILL_PATIENCE, is_over).await {
                Ok(map) if is_done(&map) => Ok(map),
                _ => Err(unfilled(&cluster.map(), &args.namespace)),
            },
            Err(_) => Err(unfilled(&cluster.map(), &args.namespace)),
        }
    })?;
    if at.json {
        table::json(&Value::from(
            map.namespaces.iter().map(|entry| as_json(&map, entry)).collect::<Vec<_>>(),
        ));
        return Ok(());
    }
    let rows: Vec<Vec<String>> = map.namespaces.iter().flat_map(|entry| rows(&map, entry)).collect();
    print!("{}", table::render(&["NAMESPACE", "NODE", "HOST", "COPY"], &rows));
    if change.is_some_and(|args| args.lost) {
        println!("all copies are given up: `weir namespace import` restores the namespace from an export");
    }
    for entry in &map.namespaces {
        let lacks = copies_lacking(&map, &entry.name);
        if lacks > 0 {
            println!("namespace {:?} lacks {}", entry.name, copies(lacks));
        }
    }
    Ok(())
}

fn copies(count: usize) -> String {
    format!("{count} cop{}", if count == 1 { "y" } else { "ies" })
}

fn of<'m>(map: &'m ClusterMap, name: &str) -> Option<&'m NamespaceCopies> {
    map.copies_of(map.namespace_named(name)?.id)
}

/// Copies that have no node.
fn free_places(map: &ClusterMap, name: &str) -> usize {
    of(map, name).map_or(0, |c| usize::from(c.wanted).saturating_sub(c.members.len()))
}

fn has_down(map: &ClusterMap, name: &str) -> bool {
    of(map, name).is_some_and(|c| c.members.iter().any(|m| m.state == MemberState::Down))
}

fn unfilled(map: &ClusterMap, name: &str) -> Failure {
    let (free, lacks) = (free_places(map, name), copies(copies_lacking(map, name)));
    let hint = match free {
        0 if has_down(map, name) => {
            "a node that keeps one is down: start it again; `weir namespace list` names it".to_owned()
        }
        0 => "the copies are being filled: `weir namespace list` shows them".to_owned(),
        _ => {
            let without = copies(free);
            format!(
                "{without} without a node: start `weir meta` on other machines, or ask for fewer with `weir namespace \
                 copies {name} NUMBER`"
            )
        }
    };
    Failure::new(Error::deadline(format!("namespace {name:?} still lacks {lacks}")), hint)
}

/// Each node that stores it, and the state of its copy.
fn keepers(map: &ClusterMap, entry: &NamespaceEntry) -> Vec<(NodeId, &'static str)> {
    let word = |node: NodeId, state: MemberState| match state {
        MemberState::Current if entry.leader == Some(node) => "leads",
        MemberState::Current => "current",
        MemberState::Behind => "is being filled",
        MemberState::Down => "down",
    };
    match map.copies_of(entry.id) {
        Some(copies) => copies.members.iter().map(|m| (m.node, word(m.node, m.state))).collect(),
        None => {
            let state = if is_led(map, entry) { "leads" } else { "down" };
            entry.leader.into_iter().map(|node| (node, state)).collect()
        }
    }
}

fn rows(map: &ClusterMap, entry: &NamespaceEntry) -> Vec<Vec<String>> {
    let row = |(id, word): (NodeId, &str)| {
        let node = map.node(id);
        let (name, host) = node.map_or(("?", "?"), |n| (n.name.as_str(), n.host.as_str()));
        vec![entry.name.clone(), name.to_owned(), host.to_owned(), word.to_owned()]
    };
    keepers(map, entry).into_iter().map(row).collect()
}

fn as_json(map: &ClusterMap, entry: &NamespaceEntry) -> Value {
    let copy = |(id, word): (NodeId, &str)| {
        let node = map.node(id);
        json!({ "node": node.map(|n| &n.name), "host": node.map(|n| &n.host), "state": word })
    };
    let copies: Vec<Value> = keepers(map, entry).into_iter().map(copy).collect();
    let wanted = map.copies_of(entry.id).map_or(1, |c| c.wanted);
    json!({ "name": entry.name, "epoch": entry.leader_epoch.0, "wanted": wanted, "copies": copies })
}
