//! A stripe of a file, and its group as of one map. Plain data.

use std::sync::Arc;
use weir_env::Instant;
use weir_proto::data::{MissingMask, Place};
use weir_proto::map::{ClusterMap, Group, Layout, MemberState, Scheme};
use weir_proto::{CellId, FileId, PgId};

/// A stripe of a file, and the deadline of the work on it.
#[derive(Clone, Copy, Debug)]
pub struct StripeRef {
    pub file: FileId,
    pub layout: Layout,
    pub stripe: u64,
    pub deadline: Instant,
    /// The write floor of its volume; 0: none.
    pub floor: u8,
}

impl StripeRef {
    pub fn cell(&self, index: usize) -> CellId {
        CellId { file: self.file, stripe: self.stripe, index: index as u8 }
    }
    pub fn scheme(&self) -> Scheme {
        self.layout.scheme
    }
    pub fn k(&self) -> usize {
        usize::from(self.scheme().data)
    }
    /// Fewest current members of its group for a change.
    pub fn needed(&self) -> usize {
        usize::from(self.floor).min(self.scheme().width()).max(self.k())
    }
}
impl std::fmt::Display for StripeRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let first = self.layout.stripe_start(self.stripe);
        write!(
            f,
            "stripe {} of file {} (bytes {first} to {}) on {}",
            self.stripe,
            self.file,
            first.saturating_add(self.layout.stripe_bytes()),
            self.layout.pg_of_stripe(self.stripe)
        )
    }
}

/// A group as of one map.
#[derive(Clone)]
pub struct GroupView {
    map: Arc<ClusterMap>,
    index: usize,
}

impl GroupView {
    /// `None`: the map has no such group.
    pub fn of(map: Arc<ClusterMap>, id: PgId) -> Option<GroupView> {
        let index = map.groups.iter().position(|g| g.id == id)?;
        Some(GroupView { map, index })
    }
    pub fn map(&self) -> &ClusterMap {
        &self.map
    }
    pub fn group(&self) -> &Group {
        &self.map.groups[self.index]
    }
    pub fn map_version(&self) -> u64 {
        self.map.version
    }
    pub fn state(&self, index: usize) -> MemberState {
        self.group().members.get(index).map_or(MemberState::Down, |m| m.state)
    }
    pub fn place(&self, index: usize) -> Place {
        let group = self.group();
        assert!(index < group.members.len(), "{} has no member {index}", group.id);
        Place { target: group.members[index].target, group: group.id, epoch: group.epoch }
    }
    pub fn down_mask(&self) -> MissingMask {
        let members = self.group().members.iter().enumerate();
        members.filter(|(_, m)| m.state == MemberState::Down).fold(0, |mask, (i, _)| mask | (1 << i))
    }
    /// A member by its target and the node that serves it.
    pub fn name_of(&self, index: usize) -> String {
        let target = self.place(index).target;
        let node = self.map.target_node(target).map_or("?", |n| n.name.as_str());
        format!("{target} ({node})")
    }
    /// The members that are not current, by name.
    pub fn missing_names(&self) -> String {
        let mut missing: Vec<usize> =
            (0..self.group().members.len()).filter(|i| self.state(*i) != MemberState::Current).collect();
        missing.sort_by_key(|i| self.place(*i).target);
        missing.into_iter().map(|i| self.name_of(i)).collect::<Vec<_>>().join(", ")
    }
    /// The member that numbers the overlays of a data cell: the first current one of its own target and the
    /// parity targets.
    pub fn sequencer(&self, cell: u8, scheme: Scheme) -> Option<usize> {
        let parity = usize::from(scheme.data)..scheme.width();
        std::iter::once(usize::from(cell)).chain(parity).find(|i| self.state(*i) == MemberState::Current)
    }
}
