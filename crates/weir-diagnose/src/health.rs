//! The health of a cluster in one line: how much of it is up, complete and redundant, and in plain words the
//! fault of a namespace's copies.
use serde::Serialize;
use std::fmt;
use weir_proto::coord::ClusterStatus;
use weir_proto::map::{ClusterMap, Group, MemberState, NamespaceEntry, Scheme, TargetState};
use weir_proto::volume::Policy;

/// The health of a cluster.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Health {
    pub targets: usize,
    pub targets_up: usize,
    pub groups: usize,
    /// Groups with every member current.
    pub groups_full: usize,
    /// Groups that accept data.
    pub groups_writable: usize,
    /// Groups of which more members returned without their data than there are parity cells.
    pub groups_lost: usize,
    /// Namespaces whose leader is up, of all.
    pub namespaces_led: usize,
    pub namespaces: usize,
    /// Cells that lack redundancy.
    pub under_replicated_cells: u64,
    pub damaged_blocks: u64,
    pub repaired_blocks: u64,
}

/// The schemes and pools that files use. In other groups a lost target is not a trouble.
pub struct InUse {
    /// The cluster's default, for new files in volumes without a scheme.
    pub default: Scheme,
    /// The policies of volumes.
    pub policies: Vec<Policy>,
}

impl InUse {
    pub fn has(&self, group: &Group) -> bool {
        let by_policy = |p: &Policy| {
            group.scheme == p.scheme.unwrap_or(self.default)
                && p.pool.as_ref().is_none_or(|pool| *pool == group.pool)
        };
        group.scheme == self.default || self.policies.iter().any(by_policy)
    }
}

impl Health {
    /// The health of the groups with the cluster's default scheme.
    pub fn of(status: &ClusterStatus) -> Health {
        let in_use = InUse { default: status.map.settings.scheme, policies: Vec::new() };
        Health::of_used(status, &in_use)
    }
    pub fn of_used(status: &ClusterStatus, in_use: &InUse) -> Health {
        let map = &status.map;
        let used = || map.groups.iter().filter(|g| in_use.has(g));
        Health {
            targets: map.targets.len(),
            targets_up: map.targets.iter().filter(|t| t.state == TargetState::Up).count(),
            groups: used().count(),
            groups_full: used().filter(|g| g.current_count() == g.members.len()).count(),
            groups_writable: used().filter(|g| g.is_writable()).count(),
            groups_lost: used().filter(|g| g.is_lost()).count(),
            namespaces_led: map.namespaces.iter().filter(|v| is_led(map, v)).count(),
            namespaces: map.namespaces.len(),
            under_replicated_cells: status.targets.iter().map(|t| t.under_replicated_cells).sum(),
            damaged_blocks: status.targets.iter().map(|t| t.damaged_blocks).sum(),
            repaired_blocks: status.targets.iter().map(|t| t.repaired_blocks).sum(),
        }
    }
    /// Whether it reads and writes data.
    pub fn serves(&self) -> bool {
        self.groups > 0
            && self.groups_writable == self.groups
            && self.namespaces > 0
            && self.namespaces_led == self.namespaces
    }
    /// Nothing is missing, nothing is waiting for repair.
    pub fn is_full(&self) -> bool {
        self.serves()
            && self.targets_up == self.targets
            && self.groups_full == self.groups
            && self.under_replicated_cells == 0
            && self.damaged_blocks <= self.repaired_blocks
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match (self.serves(), self.is_full()) {
            _ if self.groups_lost > 0 => "data is lost",
            (_, true) => "healthy",
            (true, false) => "degraded: data is available with reduced redundancy",
            (false, _) => "unavailable: some data cannot be read or written",
        };
        write!(f, "{word}; {}", self.counts())
    }
}

impl Health {
    /// `5 of 6 targets up, all 24 placement groups complete`, and further faults.
    pub fn counts(&self) -> String {
        let of = |count: usize, all: usize| match count == all {
            true => format!("all {all}"),
            false => format!("{count} of {all}"),
        };
        let mut parts = vec![
            format!("{} targets up", of(self.targets_up, self.targets)),
            format!("{} placement groups complete", of(self.groups_full, self.groups)),
        ];
        if self.groups_lost > 0 {
            parts.push(format!("{} lost", self.groups_lost));
        }
        if self.groups_writable + self.groups_lost < self.groups {
            let poor = self.groups - self.groups_writable - self.groups_lost;
            parts.push(format!("{poor} without enough members"));
        }
        if self.namespaces_led < self.namespaces || self.namespaces == 0 {
            parts.push("no active metadata server".into());
        }
        if self.under_replicated_cells > 0 {
            parts.push(format!("{} cells lack redundancy", self.under_replicated_cells));
        }
        if self.damaged_blocks > 0 {
            let (damaged, repaired) = (self.damaged_blocks, self.repaired_blocks);
            parts.push(format!("{damaged} damaged blocks found, {repaired} of them repaired"));
        }
        parts.join(", ")
    }
}

pub fn is_led(map: &ClusterMap, namespace: &NamespaceEntry) -> bool {
    namespace.leader.and_then(|node| map.node(node)).is_some_and(|node| node.up)
}

/// Required copies of the namespace that do not hold every change.
pub fn copies_lacking(map: &ClusterMap, name: &str) -> usize {
    let copies = map.namespace_named(name).and_then(|entry| map.copies_of(entry.id));
    copies.map_or(0, |c| {
        let current = c.members.iter().filter(|m| m.state == MemberState::Current).count();
        usize::from(c.wanted).saturating_sub(current)
    })
}

/// The fault of a namespace's copies, and the remedy.
pub fn copies_trouble(map: &ClusterMap, namespace: &NamespaceEntry) -> Option<String> {
    let copies = map.copies_of(namespace.id)?;
    let named = |state| {
        let of_state = copies.members.iter().filter(move |m| m.state == state);
        let names = of_state.map(|m| map.node(m.node).map_or("?", |n| n.name.as_str()));
        names.collect::<Vec<_>>().join(", ")
    };
    let (down, behind) = (named(MemberState::Down), named(MemberState::Behind));
    let free = usize::from(copies.wanted).saturating_sub(copies.members.len());
    let (name, wanted) = (&namespace.name, copies.wanted);
    let mut why = Vec::new();
    if !down.is_empty() {
        why.push(format!(
            "down: {down}; start it again; if it is lost, `weir namespace copies {name} {wanted} --without NODE` gives its \
             place to another node"
        ));
    }
    why.extend((!behind.is_empty()).then(|| format!("being filled: {behind}")));
    why.extend((free > 0).then(|| format!("without a node: {free}; start `weir meta` on another machine")));
    let current = copies.members.iter().filter(|m| m.state == MemberState::Current).count();
    let has = format!("the metadata of namespace {name:?} has {current} of {wanted} copies");
    (!why.is_empty()).then(|| format!("{has}: {}", why.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_cluster_does_not_serve() {
        assert!(!Health::default().serves());
    }

    #[test]
    fn missing_redundancy_is_named() {
        let health = Health {
            targets: 6,
            targets_up: 5,
            groups: 24,
            groups_writable: 24,
            namespaces: 1,
            namespaces_led: 1,
            under_replicated_cells: 3,
            ..Health::default()
        };
        assert!(health.serves() && !health.is_full());
        assert_eq!(
            health.to_string(),
            "degraded: data is available with reduced redundancy; 5 of 6 targets up, 0 of 24 placement groups complete, 3 \
             cells lack redundancy"
        );
    }
}
