//! Troubles of the cluster itself: namespaces and their copies, placement groups, nodes, targets, links,
//! clocks, audit logs, versions, and certificates.
use super::{Facts, Found, NamespaceFacts, REMOVED, leaving, nearly_full, overload};
use crate::health::{InUse, copies_trouble, is_led};
use crate::quantity::{self, lasting};
use std::collections::{BTreeMap, BTreeSet};
use weir_coord::decide::file_space;
use weir_proto::condition::{METADATA_FULL, NodeCondition, NodeDisk, STARTS};
use weir_proto::coord::{AuditState, CutLink, TargetReport};
use weir_proto::enrol::Holder;
use weir_proto::map::{Group, Member, MemberState, Role, Target, TargetState};
use weir_proto::{NodeId, TargetId};

/// Certificates are renewed when ten days are left: with fewer days left the renewal fails.
const RENEWAL_IS_LATE_S: u64 = 7 * 86_400;
/// A busy disk completes requests all the time. One that completes none for this time hangs, or is slow.
const STALLED_MS: u32 = 500;
/// A file takes some 500 bytes: with this much free, four million more have room on a disk of any size.
const METADATA_SPACE_MIN: u64 = 2 << 30;

pub(super) fn check(facts: &Facts, found: &mut Found) {
    let in_use = facts.in_use();
    namespaces(facts, found);
    groups(facts, &in_use, found);
    nodes(facts, &in_use, found);
    targets(facts, &in_use, found);
    facts.status.targets.iter().for_each(|report| of_report(facts, report, found));
    space(facts, &in_use, found);
    overload::slow_targets(facts, found);
    leaving::check(facts, &in_use, found);
    links(facts, found);
    for off in &facts.clocks.off {
        let (text, action) = split(weir_coord::clocks::trouble(off), "; ");
        found.warning(("clock-off", &off.node), text, action);
    }
    disks(facts, found);
    audit_logs(facts, found);
    versions(facts, found);
    facts.holders.iter().for_each(|holder| certificate(facts, holder, found));
    for (what, why) in &facts.unanswered {
        let text = format!("{what} was not answered ({why}): troubles of this kind are not shown");
        found.warning(("unanswered", "status"), text, "ask again; if it stays so, see the coordinator's log");
    }
}

/// The sentence, and the text after the mark in it.
pub(super) fn split(text: String, mark: &str) -> (String, String) {
    match text.split_once(mark) {
        Some((text, action)) => (text.to_owned(), action.to_owned()),
        None => (text, String::new()),
    }
}

fn audit_logs(facts: &Facts, found: &mut Found) {
    let known = facts.namespaces.iter().filter_map(|n| Some((n.name.as_str(), n.known.as_ref().ok()?)));
    let of_namespaces = known.map(|(name, k)| (format!("the metadata server of {name:?}"), &k.audit));
    for (whose, audit) in [("the coordinator".to_owned(), &facts.audit)].into_iter().chain(of_namespaces) {
        let AuditState { waiting, lost, failure, .. } = audit;
        if !failure.is_empty() {
            let text = format!(
                "the audit log of {whose} cannot be written ({failure}): {waiting} records wait, {lost} are lost"
            );
            found.warning(("audit-log-fails", "audit log"), text, "check the disk of its directory");
        } else if *lost > 0 {
            let text = format!("{lost} records of the audit log of {whose} were lost since it started");
            found.note(("audit-records-lost", "audit log"), text, "");
        }
    }
}

fn namespaces(facts: &Facts, found: &mut Found) {
    let map = &facts.status.map;
    if map.namespaces.is_empty() {
        let text = "no metadata server has started yet; there are no files";
        found.critical(("namespace-missing", "meta"), text, facts.restart.clone());
    }
    for namespace in map.namespaces.iter().filter(|n| !is_led(map, n)) {
        let name = &namespace.name;
        let text = format!("namespace {name:?} has no active metadata server; files are unavailable");
        found.critical(("namespace-without-leader", name), text, facts.restart.clone());
    }
    let led = map.namespaces.iter().filter(|n| is_led(map, n));
    for (namespace, text) in led.filter_map(|n| Some((n, copies_trouble(map, n)?))) {
        found.degraded(("copies-missing", &namespace.name), text, "");
    }
    for NamespaceFacts { name, known, starting } in &facts.namespaces {
        if let Some(starting) = starting {
            let text = format!("namespace {name:?}: {}", starting.text);
            found.warning((STARTS, name), text, starting.action.clone());
        } else if let Err(why) = known {
            let leader = map.namespaces.iter().find(|n| n.name == *name).and_then(|n| n.leader);
            if leader.is_some_and(|leader| overload::is_busy(facts, leader)) {
                let text = format!("the metadata server of namespace {name:?} answers late ({why})");
                let action =
                    "wait: its machine has too much to do; `weir top --by job` shows whose work it is";
                found.warning(("namespace-late", name), text, action);
            } else {
                let text = format!("the metadata server of namespace {name:?} does not answer ({why})");
                found.critical(("namespace-silent", name), text, "see its log");
            }
        }
    }
}

fn groups(facts: &Facts, in_use: &InUse, found: &mut Found) {
    let used = facts.status.map.groups.iter().filter(|g| in_use.has(g));
    let (lost, poor): (Vec<&Group>, Vec<&Group>) =
        used.filter(|g| !g.is_writable()).partition(|g| g.is_lost());
    if !lost.is_empty() {
        let members = lost.iter().flat_map(|g| &g.members).filter(|m| m.is_lost());
        let without: BTreeSet<TargetId> = members.map(|m| m.target).collect();
        let without: Vec<String> = without.iter().map(TargetId::to_string).collect();
        let text = format!(
            "data is lost on {}: {} returned without what they had, and too few others have it; reads of the lost bytes fail with EIO, and \
             files there cannot be written",
            placement_groups(lost.len()),
            without.join(", ")
        );
        let action = "stop these targets and put their disks back as they were last, if these exist";
        found.critical(("groups-lost", "placement groups"), text, action);
    }
    if let Some(first) = poor.first() {
        let text = format!(
            "too few members of {} are usable: files on them cannot be written, and not all can be read ({} has {} of {} and needs \
             {})",
            placement_groups(poor.len()),
            first.id,
            first.current_count(),
            first.members.len(),
            first.scheme.data
        );
        found.critical(("groups-unwritable", "placement groups"), text, "bring targets back that are down");
    }
}

fn placement_groups(count: usize) -> String {
    format!("{count} placement group{}", if count == 1 { "" } else { "s" })
}

/// The number of groups in use that have a target as a member of this state.
fn count_groups(facts: &Facts, in_use: &InUse, target: TargetId, state: MemberState) -> usize {
    let is_so =
        |g: &&Group| in_use.has(g) && g.members.iter().any(|m| m.target == target && m.state == state);
    facts.status.map.groups.iter().filter(is_so).count()
}

fn nodes(facts: &Facts, in_use: &InUse, found: &mut Found) {
    let map = &facts.status.map;
    for node in map.nodes.iter().filter(|n| !n.up && !map.has_left(n)) {
        let (name, restart) = (&node.name, &facts.restart);
        let own: Vec<&Target> = map.targets.iter().filter(|t| t.node == node.id).collect();
        match node.role {
            // Others have all data of a target that was replaced.
            Role::Storage
                if !own.is_empty() && own.iter().all(|t| leaving::is_unneeded(facts, in_use, t)) => {}
            Role::Storage => {
                let missing = |t: &Target| {
                    let groups = count_groups(facts, in_use, t.id, MemberState::Down);
                    format!("{} is missing from {}", t.id, placement_groups(groups))
                };
                let missing: Vec<String> = own.iter().map(|t| missing(t)).collect();
                let text = format!("{name} is down: {}", missing.join(", "));
                let action = match facts.was_removed(name) {
                    true => "its certificate was revoked (`weir node remove`): join it again under a new token, or \
                             `weir target gone` has other targets take over"
                        .to_owned(),
                    false => format!(
                        "{restart}, and what was written meanwhile is repaired; if its disk is lost, `weir target replace` gives it a new one"
                    ),
                };
                found.degraded(("storage-down", name), text, action);
            }
            // If one is needed, the namespace has the trouble.
            Role::Meta if map.namespaces.iter().any(|n| !is_led(map, n)) => {}
            Role::Meta | Role::Coordinator => {
                let text = format!("{name} is down, and another one does its work");
                let action = match facts.was_removed(name) {
                    true => REMOVED.to_owned(),
                    false => restart.clone(),
                };
                found.warning(("server-down", name), text, action);
            }
            Role::Mount | Role::Mover | Role::Console | Role::Operator | Role::Auditor => {} // not members
        }
    }
}

fn targets(facts: &Facts, in_use: &InUse, found: &mut Found) {
    for target in &facts.status.map.targets {
        let (id, named) = (target.id, facts.named(target.id));
        let node_is_up = facts.node_of(target).is_some_and(|n| n.up);
        let down = count_groups(facts, in_use, id, MemberState::Down);
        let missing = placement_groups(down);
        match target.state {
            TargetState::Down | TargetState::Failed if leaving::is_unneeded(facts, in_use, target) => {}
            TargetState::Failed => found.degraded(
                ("target-failed", &id),
                format!("{named} failed with a disk error and is missing from {missing}"),
                format!(
                    "repair its disk, restart its process, then run `weir target clear {id}`; or give it a new disk with \
                     `weir target replace {id} DIR`"
                ),
            ),
            TargetState::Down if node_is_up => found.degraded(
                ("target-down", &id),
                format!("{named} is down although its process is up, and is missing from {missing}"),
                "see to its disk, and to its process's log",
            ),
            TargetState::Down => {} // its node has the trouble
            TargetState::Up if down > 0 => found.degraded(
                ("target-missing", &id),
                format!("{named} is up and still missing from {missing}: it is being repaired"),
                "",
            ),
            TargetState::Up => {}
        }
        let is_behind = |m: &&Member| m.target == id && m.state == MemberState::Behind;
        let repaired = facts.status.map.groups.iter().filter(|g| in_use.has(g) && !g.is_lost());
        let behind: Vec<&Member> = repaired.flat_map(|g| g.members.iter().filter(is_behind)).collect();
        if !behind.is_empty() {
            let text = match behind.iter().any(|m| m.is_lost()) {
                true => "does not have its data yet, and is filled from the others",
                false => "is being repaired",
            };
            let text = format!("{named} {text} in {}", placement_groups(behind.len()));
            found.degraded(("target-behind", &id), text, "`weir rebuild --watch` shows how far it is");
        }
    }
}

fn of_report(facts: &Facts, report: &TargetReport, found: &mut Found) {
    let (id, named) = (report.target, facts.named(report.target));
    if report.stalled_ms >= STALLED_MS && !report.failed {
        let s = f64::from(report.stalled_ms) / 1e3;
        let text = format!("the disk of {named} has completed nothing for {s:.1} s");
        found.warning(("target-stalled", &id), text, "see to the disk: it hangs, or is overloaded");
    }
    if report.under_replicated_cells > 0 {
        let n = report.under_replicated_cells;
        let text = format!("{n} cells of stripes on {named} lack redundancy: they are being repaired");
        found.degraded(("cells-lack-redundancy", &id), text, "");
    }
    match (report.damaged_blocks, report.repaired_blocks) {
        (0, _) => {}
        (damaged, repaired) if damaged <= repaired => found.note(
            ("blocks-repaired", &id),
            format!("{damaged} blocks on {named} failed their checksum and were repaired"),
            "watch its disk",
        ),
        (damaged, repaired) => found.degraded(
            ("blocks-damaged", &id),
            format!("{damaged} blocks on {named} failed their checksum, {repaired} of them are repaired"),
            "replace its disk if this continues",
        ),
    }
    // Its node has reported the cause.
    let refuses = facts.refusing().any(|about| about == id.to_string());
    if let Some(percent) = nearly_full(report.used, report.capacity).filter(|_| !refuses) {
        let free = quantity::bytes(report.capacity.saturating_sub(report.used));
        let text = format!("{named} is {percent} % full ({free} free), writes fail when it is full");
        found.warning(("target-full", &id), text, "delete files, or add targets");
    }
}

/// Kinds of groups of which none takes data.
fn space(facts: &Facts, in_use: &InUse, found: &mut Found) {
    let (map, reports) = (&facts.status.map, &facts.status.targets);
    let mut kinds = vec![(None, None)];
    for policy in &in_use.policies {
        let kind = (policy.scheme, policy.pool.as_deref());
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for (scheme, pool) in kinds {
        if !file_space(map, reports, scheme, pool).refuses {
            continue;
        }
        let of = scheme.unwrap_or(map.settings.scheme).to_string();
        let place = pool.map_or_else(String::new, |pool| format!(" in pool {pool}"));
        let targets: BTreeSet<&str> = facts.refusing().collect();
        let full = match targets.into_iter().collect::<Vec<_>>() {
            none if none.is_empty() => String::new(),
            one if one.len() == 1 => format!(" ({} refuses data)", one[0]),
            some => format!(" ({} refuse data)", some.join(", ")),
        };
        let text = format!(
            "files with {of}{place} take no more data: in each placement group a target is full{full}, and programs get ENOSPC"
        );
        let about = if pool.is_some() || scheme.is_some() { of + &place } else { "files".to_owned() };
        found.warning(("space-full", &about), text, "delete or evict files, or add targets");
    }
}

/// Pairs of nodes that cannot reach each other. Several broken links of one node are one trouble of that
/// node, and several nodes that do not reach one node are one, too. Links to a node that is down are none.
fn links(facts: &Facts, found: &mut Found) {
    let map = &facts.status.map;
    let name = |node: NodeId| {
        let targets: Vec<String> =
            map.targets.iter().filter(|t| t.node == node).map(|t| t.id.to_string()).collect();
        let name = map.node(node).map_or_else(|| node.to_string(), |n| n.name.clone());
        if targets.is_empty() { name } else { format!("{} ({name})", targets.join(", ")) }
    };
    let mut of_sender: BTreeMap<&str, Vec<&CutLink>> = BTreeMap::new();
    let all = facts.status.links.iter().filter(|link| map.node(link.to).is_none_or(|node| node.up));
    all.for_each(|link| of_sender.entry(&link.from).or_default().push(link));
    let mut of_receiver: BTreeMap<NodeId, Vec<&CutLink>> = BTreeMap::new();
    for (from, links) in of_sender {
        let [first, _, ..] = links.as_slice() else {
            links.into_iter().for_each(|link| of_receiver.entry(link.to).or_default().push(link));
            continue;
        };
        let nodes: Vec<String> = links.iter().map(|l| name(l.to)).collect();
        let action = format!("others reach them, see to the network of {from} ({})", first.why);
        let seconds = first.since_ms / 1000;
        let text =
            format!("{from} has not reached {} for {seconds} s, its calls go around", nodes.join(", "));
        found.warning(("link-cut", from), text, action);
    }
    for (to, links) in of_receiver {
        let Some(first) = links.iter().max_by_key(|link| link.since_ms) else { continue };
        let (to, seconds) = (name(to), first.since_ms / 1000);
        let senders: Vec<&str> = links.iter().map(|link| link.from.as_str()).collect();
        let (verb, whose, action) = match senders.len() {
            1 => ("has", "its", format!("see to the network between them ({})", first.why)),
            n => ("have", "their", format!("{n} nodes cannot, see to its network ({})", first.why)),
        };
        let text = format!(
            "{} {verb} not reached {to} for {seconds} s, {whose} calls go around",
            senders.join(", ")
        );
        found.warning(("link-cut", senders[0]), text, action);
    }
}

/// Directories of coordinators and metadata servers. Several on one file system are one trouble. A metadata
/// server that reports the effect needs no other line.
fn disks(facts: &Facts, found: &mut Found) {
    let mut full: BTreeMap<(&str, u64), Vec<(&str, &NodeDisk)>> = BTreeMap::new();
    let reports_it = |node: &&NodeCondition| node.condition.troubles.iter().any(|t| t.code == METADATA_FULL);
    for node in facts.conditions.iter().filter(|node| !reports_it(node)) {
        for disk in &node.condition.disks {
            let used = disk.capacity.saturating_sub(disk.free);
            if nearly_full(used, disk.capacity).is_some() && disk.free < METADATA_SPACE_MIN {
                let place = (node.condition.host.as_str(), disk.capacity);
                full.entry(place).or_default().push((&node.node, disk));
            }
        }
    }
    for ((_, capacity), all) in full {
        let Some((first, disk)) = all.first() else { continue };
        let nodes: Vec<&str> = all.iter().map(|(node, _)| *node).collect();
        let percent = nearly_full(capacity.saturating_sub(disk.free), capacity).unwrap_or(100);
        let text = format!(
            "the disk of {} is {percent} % full ({} free, directory {}): its work stops when it is full",
            nodes.join(", "),
            quantity::bytes(disk.free),
            disk.dir
        );
        found.warning(
            ("disk-full", *first),
            text,
            "free space there, or move the directory to a larger disk",
        );
    }
}

/// Programs of several releases, and a level below the abilities of all programs.
fn versions(facts: &Facts, found: &mut Found) {
    let status = &facts.status;
    let mut releases: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    releases.entry(&status.program.release).or_default().insert("the coordinator");
    for node in status.map.nodes.iter().filter(|n| n.up) {
        releases.entry(&node.program.release).or_default().insert(&node.name);
    }
    let reported = facts.conditions.iter().filter(|n| !n.condition.release.is_empty());
    reported.for_each(|n| {
        releases.entry(&n.condition.release).or_default().insert(&n.node);
    });
    if releases.len() > 1 {
        let shown: Vec<String> = releases
            .iter()
            .map(|(release, nodes)| match nodes.len() {
                0..5 => format!("{release} on {}", nodes.iter().copied().collect::<Vec<_>>().join(", ")),
                n => format!("{release} on {n} nodes"),
            })
            .collect();
        let text = format!("programs of several releases run: {}", shown.join("; "));
        found.note(("versions-mixed", "cluster"), text, "upgrade the others, then run `weir upgrade finish`");
    } else if status.map.level < status.program.level {
        let text = format!(
            "the cluster is at level {}, and its programs know level {}",
            status.map.level, status.program.level
        );
        let action = "if all nodes are upgraded, `weir upgrade finish` lets them use it";
        found.note(("upgrade-unfinished", "cluster"), text, action);
    }
}

fn certificate(facts: &Facts, holder: &Holder, found: &mut Found) {
    let left = holder.until.saturating_sub(facts.now_s);
    if holder.removed || left > RENEWAL_IS_LATE_S {
        return;
    }
    let name = &holder.name;
    if left > 0 {
        let text = format!("the certificate of {name} ends in {}, and was not renewed", lasting(left));
        let action = "start the node if it is away (it renews by itself), else see its log";
        return found.warning(("certificate-ends", name), text, action);
    }
    let text =
        format!("the certificate of {name} ended {} ago", lasting(facts.now_s.saturating_sub(holder.until)));
    let action = format!(
        "if the node is gone for good, run `weir node remove {name}`; else remove it and let it join again"
    );
    match facts.status.map.nodes.iter().any(|n| n.name == *name) {
        true => found.warning(("certificate-ended", name), text, action),
        false => found.note(("certificate-ended", name), text, action),
    }
}
