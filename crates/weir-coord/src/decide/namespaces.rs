//! Which nodes keep copies of a namespace, and which of them leads: the journal groups of the map.
//!
//! Nodes announce themselves and take the places that an administrator configured. When a node goes down, the
//! lead passes at once to a node whose copy is current. Knows nothing of journals: [`super::copies`] has the
//! transitions.
use super::copies::{JournalGroup, JournalMember};
use super::lead::Progress;
use weir_proto::copies::{COPIES_MAX, CopyCaughtUp, CopyLost, KeepCopy, LeaderSilent, SetCopies};
use weir_proto::map::{ClusterMap, MemberState, NamespaceCopies, NamespaceCopy, NamespaceEntry};
use weir_proto::version::LEVEL_OF_COPIES;
use weir_proto::{Epoch, Error, NamespaceId, NodeId, Result};

/// A leader that cannot reach copies which are up for this long is cut off itself.
const LEADER_IS_CUT_MS: u32 = 3_000;
/// A leader that sends a copy nothing for this time has lost its right to answer, and would have reported the
/// copy as lost.
const LEADER_SILENT_MS: u32 = 1_200;

/// The group of a namespace. `None`: only its leader keeps it.
pub fn journal_group(map: &ClusterMap, namespace: NamespaceId) -> Option<JournalGroup<NodeId>> {
    let (entry, copies) = (map.namespace(namespace)?, map.copies_of(namespace)?);
    let member = |m: &NamespaceCopy| JournalMember { id: m.node, state: m.state, since: m.since };
    let members = copies.members.iter().map(member).collect();
    Some(JournalGroup { epoch: entry.leader_epoch, leader: entry.leader, members })
}

fn put_group(map: &mut ClusterMap, namespace: NamespaceId, group: &JournalGroup<NodeId>) {
    if let Some(entry) = map.namespaces.iter_mut().find(|v| v.id == namespace) {
        (entry.leader, entry.leader_epoch) = (group.leader, group.epoch);
    }
    if let Some(copies) = map.copies.iter_mut().find(|c| c.namespace == namespace) {
        let copy = |m: &JournalMember<NodeId>| NamespaceCopy { node: m.id, state: m.state, since: m.since };
        copies.members = group.members.iter().map(copy).collect();
    }
}

fn is_up(map: &ClusterMap, node: NodeId) -> bool {
    map.node(node).is_some_and(|n| n.up)
}

/// The next leader: a current member that is up, on another host than `instead_of` if possible.
fn next_leader(map: &ClusterMap, group: &JournalGroup<NodeId>, instead_of: Option<NodeId>) -> Option<NodeId> {
    let host = |id: NodeId| map.node(id).map(|n| n.host.as_str());
    let old_host = instead_of.and_then(host);
    let able = group.current().filter(|id| Some(*id) != instead_of && is_up(map, *id));
    able.min_by_key(|id| (instead_of.is_some() && host(*id) == old_host, *id))
}

/// Updates all groups to the set of nodes that are up.
pub fn settle_copies(map: &mut ClusterMap) {
    let namespaces: Vec<NamespaceId> = map.copies.iter().map(|c| c.namespace).collect();
    for namespace in namespaces {
        let Some(mut group) = journal_group(map, namespace) else { continue };
        let led = group.leader;
        let gone = |m: &&JournalMember<NodeId>| m.state != MemberState::Down && !is_up(map, m.id);
        let gone: Vec<NodeId> = group.members.iter().filter(gone).map(|m| m.id).collect();
        for id in gone {
            go_down(map, &mut group, id);
        }
        if group.leader.is_none()
            && let Some(next) = next_leader(map, &group, None)
            && group.lead(next).is_ok()
        {
            tracing::info!("{next} leads {namespace} from now on");
        }
        if group.leader != led {
            tracing::warn!("the lead of {namespace} goes from {} to {}", shown(led), shown(group.leader));
        }
        put_group(map, namespace, &group);
    }
}

fn shown(node: Option<NodeId>) -> String {
    node.map_or_else(|| "no node".to_owned(), |id| id.to_string())
}

/// The group has no leader afterwards if no other current member is up.
fn go_down(map: &ClusterMap, group: &mut JournalGroup<NodeId>, id: NodeId) {
    let next = next_leader(map, group, Some(id));
    if let Err(e) = group.down(id, next) {
        tracing::error!("{id} stays in its journal group: {e}"); // it is a member, and `next` is current
    }
}

/// A node's directory takes a free place, or its own again. It counts as one whose process has just started.
pub fn keep_copy(map: &mut ClusterMap, progress: &Progress, report: &KeepCopy) -> Result<()> {
    let entry = entry_of(map, report.namespace)?;
    let name = entry.name.clone();
    if entry.uuid != report.uuid {
        return Err(Error::denied(format!(
            "the directory holds namespace {}, but {name:?} is {}",
            report.uuid, entry.uuid
        ))
        .hint("the namespace was founded again; a copy begins in an empty directory"));
    }
    let copies = map.copies_of(report.namespace);
    let (Some(wanted), Some(mut group)) = (copies.map(|c| c.wanted), journal_group(map, report.namespace))
    else {
        return Err(Error::unavailable(format!("namespace {name:?} is to have one copy, its leader's"))
            .hint(format!("`weir namespace copies {name} 2`")));
    };
    let id = report.node;
    match group.state(id) {
        None if group.members.len() >= usize::from(wanted) => {
            return Err(Error::unavailable(format!(
                "namespace {name:?} is to have {wanted} copies, and has them"
            ))
            .hint("`weir namespace copies`"));
        }
        None => group.members.push(JournalMember { id, state: MemberState::Down, since: Epoch(0) }),
        Some(MemberState::Down) => {}
        Some(MemberState::Current | MemberState::Behind) => go_down(map, &mut group, id),
    }
    let least = progress.get(&report.namespace).copied().unwrap_or(0);
    if report.changes < least {
        forget_copy(&mut group, id, &name, report.changes, least)?;
    }
    if group.back(id) {
        tracing::info!("{id} keeps a copy of {name:?} again");
    }
    put_group(map, report.namespace, &group);
    settle_copies(map);
    Ok(())
}

/// The member's directory no longer counts: another member fills it again.
fn forget_copy(group: &mut JournalGroup<NodeId>, id: NodeId, name: &str, has: u64, least: u64) -> Result<()> {
    let newest = group.members.iter().map(|m| m.since).max();
    let others = group.members.iter().any(|m| m.id != id && Some(m.since) == newest);
    if !others {
        return Err(Error::denied(format!(
            "the directory is an old copy of namespace {name:?}, or lost what it had: it holds {has} \
             changes, and at least {least} were made; no other copy is known to have them all"
        ))
        .hint("put the newest directory back"));
    }
    for member in group.members.iter_mut().filter(|m| m.id == id) {
        member.since = Epoch(0);
    }
    Ok(())
}

/// The leader reports that a copy holds every record. Returns whether that is new.
pub fn copy_caught_up(map: &mut ClusterMap, report: &CopyCaughtUp) -> Result<bool> {
    let group = journal_group(map, report.namespace);
    let mut group = group.ok_or_else(|| Error::not_found(format!("{} has no copies", report.namespace)))?;
    if group.leader != Some(report.leader) {
        return Err(Error::stale(format!("{} does not lead {}", report.leader, report.namespace)));
    }
    let is_news = group.caught_up(report.node, report.epoch)?;
    put_group(map, report.namespace, &group);
    Ok(is_news)
}

/// The copies of a namespace, if this node leads them under this epoch.
fn group_led(
    map: &ClusterMap,
    namespace: NamespaceId,
    leader: NodeId,
    epoch: Epoch,
) -> Result<JournalGroup<NodeId>> {
    let group = journal_group(map, namespace);
    let group = group.ok_or_else(|| Error::not_found(format!("{namespace} has no copies")))?;
    if (group.leader, group.epoch) != (Some(leader), epoch) {
        return Err(Error::stale(format!("{leader} does not lead {namespace} under {epoch}")));
    }
    Ok(group)
}

/// The leader has not received a reply from a copy for a while. The others continue without it. If too few
/// would be left, the leader may be cut off itself: that copy leads after a longer silence. Returns whether
/// it is new.
pub fn copy_lost(map: &mut ClusterMap, report: &CopyLost) -> Result<bool> {
    let mut group = group_led(map, report.namespace, report.leader, report.epoch)?;
    if !group.is_current(report.node) {
        return Ok(false);
    }
    let floor = group.members.len().saturating_sub(1).max(1);
    if group.current().count() > floor {
        tracing::warn!(
            "{} does not answer the leader of {}: its copy is not required any more",
            report.node,
            report.namespace
        );
        go_down(map, &mut group, report.node);
    } else if report.silent_ms >= LEADER_IS_CUT_MS && is_up(map, report.node) {
        tracing::warn!(
            "{} leads {} instead of {}: the two do not reach each other",
            report.node,
            report.namespace,
            report.leader
        );
        group.lead(report.node)?;
    } else {
        return Ok(false);
    }
    put_group(map, report.namespace, &group);
    Ok(true)
}

/// A current copy receives nothing from its leader. Unless the leader gives other signs of life, it is left
/// out, and another copy leads. With too few copies for that, its own silence at the coordinator decides.
/// Returns whether it is new.
pub fn leader_silent(map: &mut ClusterMap, report: &LeaderSilent, lives: bool) -> Result<bool> {
    let mut group = group_led(map, report.namespace, report.leader, report.epoch)?;
    let floor = group.members.len().saturating_sub(1).max(1);
    let is_enough = group.is_current(report.node) && group.current().count() > floor;
    if lives || !is_enough || report.silent_ms < LEADER_SILENT_MS {
        return Ok(false);
    }
    tracing::warn!(
        "{} does not lead {} any more: {} receives nothing from it",
        report.leader,
        report.namespace,
        report.node
    );
    go_down(map, &mut group, report.leader);
    put_group(map, report.namespace, &group);
    Ok(true)
}

/// Sets how many copies a namespace has, and which node drops its own. Returns a description of the change.
pub fn set_copies(map: &mut ClusterMap, asked: &SetCopies) -> Result<String> {
    let SetCopies { namespace: name, copies: wanted, without } = asked;
    if map.level < LEVEL_OF_COPIES {
        return Err(Error::unsupported(format!(
            "the cluster is at level {}: programs that know nothing of copies may be in it",
            map.level
        ))
        .hint("upgrade all nodes, then `weir upgrade finish`"));
    }
    if *wanted == 0 {
        return forget_copies(map, name);
    }
    if !(1..=COPIES_MAX).contains(wanted) {
        return Err(Error::invalid(format!("{wanted} copies; 1 to {COPIES_MAX} are possible")));
    }
    let entry = map.namespace_named(name);
    let entry = entry.ok_or_else(|| Error::not_found(format!("there is no namespace {name:?}")))?;
    let namespace = entry.id;
    if map.copies_of(namespace).is_none() {
        let first = first_copy(entry, *wanted)?;
        map.copies.push(first);
    }
    let mut group =
        journal_group(map, namespace).ok_or_else(|| Error::invalid("the namespace has no group"))?;
    if let Some(node) = without {
        let is_kept = group.state(*node).is_some();
        if let Some(node) = map.node(*node).filter(|node| node.up && is_kept) {
            return Err(Error::exists(format!(
                "node {:?} is up: it would take the place again at once",
                node.name
            ))
            .hint("stop its metadata process first"));
        }
        remove_copy(map, &mut group, *node)?;
    }
    while group.members.len() > usize::from(*wanted) {
        let leader = group.leader;
        let spare = group.members.iter().filter(|m| Some(m.id) != leader);
        let least =
            spare.max_by_key(|m| (m.state == MemberState::Down, m.state != MemberState::Current, m.id));
        let least = least.ok_or_else(|| Error::invalid("its leader keeps the last copy"))?.id;
        remove_copy(map, &mut group, least)?;
    }
    group.epoch = Epoch(group.epoch.0 + 1);
    let epoch = group.epoch;
    group.members.iter_mut().filter(|m| m.state == MemberState::Current).for_each(|m| m.since = epoch);
    put_group(map, namespace, &group);
    map.copies.iter_mut().filter(|c| c.namespace == namespace).for_each(|c| c.wanted = *wanted);
    settle_copies(map);
    Ok(format!("namespace {name:?} is to have {wanted} copies; it has {}", group.members.len()))
}

/// All copies are lost: the namespace can be restored on any node. Refused while a node that keeps one is up.
fn forget_copies(map: &mut ClusterMap, name: &str) -> Result<String> {
    let entry = map.namespace_named(name);
    let namespace = entry.ok_or_else(|| Error::not_found(format!("there is no namespace {name:?}")))?.id;
    let copies = map.copies_of(namespace);
    let copies = copies.ok_or_else(|| Error::exists(format!("namespace {name:?} has one copy only")))?;
    if let Some(node) = copies.members.iter().filter_map(|m| map.node(m.node)).find(|node| node.up) {
        return Err(Error::exists(format!(
            "node {:?} keeps a copy of namespace {name:?}, and is up",
            node.name
        ))
        .hint("use that copy; if it is worth nothing, stop the node first"));
    }
    map.copies.retain(|c| c.namespace != namespace);
    for entry in map.namespaces.iter_mut().filter(|v| v.id == namespace) {
        (entry.leader, entry.leader_epoch) = (None, Epoch(entry.leader_epoch.0 + 1));
    }
    Ok(format!("all copies of namespace {name:?} are given up"))
}

/// The entry of the leader's copy, for a namespace without other copies.
fn first_copy(entry: &NamespaceEntry, wanted: u8) -> Result<NamespaceCopies> {
    let name = &entry.name;
    if wanted == 1 {
        return Err(Error::exists(format!("namespace {name:?} has one copy already, its leader's")));
    }
    let leader = entry.leader.ok_or_else(|| {
        Error::unavailable(format!("namespace {name:?} has no leader")).hint("start its metadata node first")
    })?;
    let first = NamespaceCopy { node: leader, state: MemberState::Current, since: entry.leader_epoch };
    Ok(NamespaceCopies { namespace: entry.id, wanted, members: vec![first] })
}

fn remove_copy(map: &ClusterMap, group: &mut JournalGroup<NodeId>, node: NodeId) -> Result<()> {
    let state = group.state(node);
    let name = map.node(node).map_or_else(|| node.to_string(), |n| n.name.clone());
    let state = state.ok_or_else(|| Error::not_found(format!("{name} keeps no copy of the namespace")))?;
    if !group.current().any(|id| id != node) {
        return Err(Error::denied(format!(
            "without the copy of {name} none is left that is known to hold every change"
        ))
        .hint(
            "start another node that keeps one, and wait until `weir namespace list` calls it current; if \
             all copies are lost: `weir namespace copies NAMESPACE --lost`",
        ));
    }
    if state != MemberState::Down {
        go_down(map, group, node);
    }
    group.members.retain(|m| m.id != node);
    Ok(())
}

/// Like [`super::forget_unpublished_epochs`]: nothing was written in an epoch that was never published.
pub fn forget_unpublished_copies(published: &ClusterMap, draft: &mut ClusterMap) {
    for copies in &mut draft.copies {
        let (Some(before), Some(entry)) =
            (published.copies_of(copies.namespace), published.namespace(copies.namespace))
        else {
            continue;
        };
        for member in copies.members.iter_mut().filter(|m| m.state != MemberState::Current) {
            let known = before.members.iter().find(|m| m.node == member.node);
            if let Some(known) = known.filter(|_| member.since > entry.leader_epoch) {
                member.since = known.since;
            }
        }
    }
}

fn entry_of(map: &ClusterMap, namespace: NamespaceId) -> Result<&NamespaceEntry> {
    map.namespace(namespace).ok_or_else(|| Error::not_found(format!("there is no {namespace} any more")))
}

#[cfg(test)]
#[path = "namespaces_tests.rs"]
mod tests;
