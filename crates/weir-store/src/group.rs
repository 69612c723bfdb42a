//! Decisions on a placement group that follow from its entry in the cluster map alone, so all nodes that act
//! under one epoch agree on them.
//!
//! Plain functions; they know nothing of stores, calls or time.
use weir_proto::map::{Group, Member, MemberState};
use weir_proto::{CellId, Error};

/// The positions that keep the overlay log of a data cell: its own, and all parity.
pub fn log_keepers(group: &Group, cell: CellId) -> Vec<usize> {
    let data = usize::from(group.scheme.data);
    if usize::from(cell.index) >= data {
        return Vec::new();
    }
    [usize::from(cell.index)].into_iter().chain(data..group.members.len()).collect()
}

/// The sequencer of a data cell's overlays: the first of its log keepers that is current.
pub fn sequencer(group: &Group, cell: CellId) -> Option<usize> {
    log_keepers(group, cell)
        .into_iter()
        .find(|p| group.members.get(*p).is_some_and(|m| m.state == MemberState::Current))
}

/// The member that leads the seals of a group: its first current parity target, without parity the only data
/// target.
pub fn seal_leader(group: &Group) -> Option<usize> {
    let (data, width) = (usize::from(group.scheme.data), group.scheme.width());
    let mut candidates = if group.scheme.parity == 0 { 0..1 } else { data..width };
    candidates.find(|p| group.members.get(*p).is_some_and(|m| m.state == MemberState::Current))
}

pub(crate) fn is_live(group: &Group, position: usize) -> bool {
    group.members.get(position).is_some_and(|m| m.state != MemberState::Down)
}

/// The fragments of places that are down.
pub fn down_mask(group: &Group) -> u64 {
    let down = group.members.iter().enumerate().filter(|(_, m)| m.state == MemberState::Down);
    down.fold(0, |mask, (i, _)| mask | (1 << i))
}

/// The other members that are current.
pub(crate) fn current_peers(group: &Group, own: usize) -> Vec<usize> {
    let current = |(p, m): &(usize, &Member)| *p != own && m.state == MemberState::Current;
    group.members.iter().enumerate().filter(current).map(|(p, _)| p).collect()
}

/// The error of work that needs k current members.
pub(crate) fn too_few(group: &Group) -> Error {
    Error::unavailable(format!(
        "{}: {} members are current, {} needed",
        group.id,
        group.current_count(),
        group.scheme.data
    ))
}
