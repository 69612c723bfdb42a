//! Which directory and node may lead a namespace.
//!
//! A namespace is the directory that was founded for it, even after it has moved: the random id of the
//! founding is in the directory and in the map. So an empty directory, or another one, is never accepted for
//! it. Nor is an old copy: it would assign inode numbers again whose files have cells. The coordinator
//! therefore records how many changes the directory is known to hold; all of them were durable there first,
//! so only a copy made before can hold fewer.
use std::collections::BTreeMap;
use weir_proto::coord::{LeadNamespace, RecordProgress};
use weir_proto::map::{ClusterMap, NamespaceEntry, Role};
use weir_proto::{Epoch, Error, NamespaceId, NamespaceUuid, NodeId, Result};

/// The least number of changes in each namespace's directory.
pub type Progress = BTreeMap<NamespaceId, u64>;

/// Makes a node the leader of a namespace, under a new epoch; makes the namespace if it is being founded. A
/// retry after a crash on either side gets the same namespace.
pub fn take_lead(
    map: &mut ClusterMap,
    progress: &Progress,
    lead: &LeadNamespace,
) -> Result<(NamespaceId, Epoch)> {
    let name = &lead.namespace;
    let node = map.node(lead.node).filter(|n| n.role == Role::Meta);
    let node = node.ok_or_else(|| Error::denied(format!("{} is not a metadata server", lead.node)))?.id;
    let present = match map.namespaces.iter().position(|v| v.name == *name) {
        Some(at) if map.copies_of(map.namespaces[at].id).is_some() => {
            return Err(Error::denied(format!(
                "namespace {name:?} has copies on several nodes, and the coordinator decides which one leads"
            ))
            .hint("use a program of this release for all of them"));
        }
        Some(at) if map.namespaces[at].uuid == lead.uuid => {
            may_continue(map, progress, &map.namespaces[at], lead)?;
            at
        }
        _ if lead.changes > 0 => return Err(no_directory_of(map, lead)),
        _ => {
            may_found(map, name, lead.instead_of, Some(node))?;
            found(map, lead)?
        }
    };
    let entry = &mut map.namespaces[present];
    entry.leader = Some(node);
    entry.leader_epoch = Epoch(entry.leader_epoch.0 + 1);
    Ok((entry.id, entry.leader_epoch))
}

/// Whether a namespace of that name may be founded, by that node if it has joined.
pub fn may_found(
    map: &ClusterMap,
    name: &str,
    instead_of: Option<NamespaceUuid>,
    node: Option<NodeId>,
) -> Result<()> {
    if name.is_empty() || name.len() > 64 || name.chars().any(|c| c.is_control() || c == '/') {
        return Err(Error::invalid(format!(
            "namespace name {name:?}: expected 1 to 64 printable bytes without '/'"
        )));
    }
    match (map.namespaces.iter().find(|v| v.name == name), instead_of) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Error::not_found(format!("there is no namespace {name:?} to be given up"))),
        (Some(entry), Some(replaced)) if entry.uuid == replaced => not_led_by_others(map, entry, node),
        (Some(entry), Some(replaced)) => {
            Err(Error::denied(format!("namespace {name:?} is {}, not {replaced}", entry.uuid)))
        }
        (Some(entry), None) => {
            Err(Error::exists(format!("namespace {name:?} exists already")).hint(format!(
                "start it with its own directory, whose file system may not be mounted; to give up that \
                 namespace and all its files for ever: weir meta --new --instead-of {}",
                entry.uuid
            )))
        }
    }
}

/// Records the progress of the leader's directory. It never decreases.
pub fn record_progress(map: &ClusterMap, progress: &mut Progress, report: &RecordProgress) -> Result<()> {
    let entry = map.namespace(report.namespace);
    let entry =
        entry.ok_or_else(|| Error::not_found(format!("there is no {} any more", report.namespace)))?;
    if entry.leader != Some(report.node) {
        return Err(Error::exists(format!("{} does not lead {:?} any more", report.node, entry.name)));
    }
    let known = progress.entry(report.namespace).or_default();
    *known = report.changes.max(*known);
    Ok(())
}

fn may_continue(
    map: &ClusterMap,
    progress: &Progress,
    entry: &NamespaceEntry,
    lead: &LeadNamespace,
) -> Result<()> {
    not_led_by_others(map, entry, Some(lead.node))?;
    let known = progress.get(&entry.id).copied().unwrap_or(0);
    if lead.changes < known {
        return Err(Error::denied(format!(
            "the directory is an old copy of namespace {:?}: it holds {} changes, and the newest is known \
             to hold {known}",
            entry.name, lead.changes
        ))
        .hint(format!(
            "put the newest one back. A copy is not used, because new files would get the space of \
             existing ones. If the newest is lost, found the namespace again in an empty directory (`weir \
             meta --new --instead-of {}`) and restore the files from their homes and backups",
            entry.uuid
        )));
    }
    Ok(())
}

fn not_led_by_others(map: &ClusterMap, entry: &NamespaceEntry, node: Option<NodeId>) -> Result<()> {
    match entry.leader.filter(|l| Some(*l) != node).and_then(|l| map.node(l)).filter(|n| n.up) {
        None => Ok(()),
        Some(other) => Err(Error::exists(format!(
            "namespace {:?} is led by node {:?}, which is up",
            entry.name, other.name
        ))),
    }
}

fn no_directory_of(map: &ClusterMap, lead: &LeadNamespace) -> Error {
    let name = &lead.namespace;
    match map.namespaces.iter().find(|v| v.name == *name) {
        Some(entry) => Error::denied(format!(
            "the directory holds namespace {}, but {name:?} of cluster {} is {}",
            lead.uuid, map.cluster, entry.uuid
        ))
        .hint("directories may be swapped or mounted in the wrong place; put the right one back"),
        None => Error::denied(format!(
            "the directory holds namespace {name:?}, which the coordinator of cluster {} does not know",
            map.cluster
        ))
        .hint("the coordinator's directory may be an old copy, or a new one; put the right one back"),
    }
}

/// Makes the entry, replacing one that is given up; returns its index.
fn found(map: &mut ClusterMap, lead: &LeadNamespace) -> Result<usize> {
    let last = map.last_namespace.0.checked_add(1);
    map.last_namespace =
        NamespaceId(last.ok_or_else(|| Error::no_space("all numbers of namespaces are in use"))?);
    let replaced = map.namespace_named(&lead.namespace).map(|v| v.id);
    map.copies.retain(|c| Some(c.namespace) != replaced);
    map.namespaces.retain(|v| v.name != lead.namespace);
    map.namespaces.push(NamespaceEntry {
        id: map.last_namespace,
        name: lead.namespace.clone(),
        uuid: lead.uuid,
        leader: None,
        leader_epoch: Epoch(0),
    });
    Ok(map.namespaces.len() - 1)
}

#[cfg(test)]
#[path = "lead_tests.rs"]
mod tests;
