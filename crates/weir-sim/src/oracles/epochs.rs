//! No epoch of a group is raised for a live node.
//!
//! An epoch may rise because a member leaves whose node was without its process, a link or its disk a moment
//! ago; because a member that was not current returns; or because a place of the group moves. Neither a slow
//! node nor a cluster with more work than it can do is a reason.

use std::time::Duration;
use weir_coord::Cluster;
use weir_env::sim::World;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, NamespaceEntry};
use weir_proto::{NodeId, TargetId};

/// A member may leave for this time after its node was well again: the coordinator may have been down
/// meanwhile.
const RECENT: Duration = Duration::from_secs(30);

/// Returns when an epoch was raised without a reason; the text describes it.
pub async fn raised_for_a_live_node(world: &World, seen: &Cluster) -> String {
    let was_away = |node: &str| world.last_away(node).is_some_and(|at| world.now().since(at) <= RECENT);
    let mut maps = seen.subscribe();
    let mut before = maps.borrow_and_update().clone();
    loop {
        if maps.changed().await.is_err() {
            return std::future::pending().await; // the run is over
        }
        let after = maps.borrow_and_update().clone();
        if let Some(what) = unjustified(&before, &after, &was_away) {
            return what;
        }
        before = after;
    }
}

/// The first group whose epoch rose without a reason.
fn unjustified(before: &ClusterMap, after: &ClusterMap, was_away: &dyn Fn(&str) -> bool) -> Option<String> {
    let rose = |old: &Group, new: &Group| {
        let moves = before.move_of(old.id).or(after.move_of(new.id)).is_some();
        if new.epoch == old.epoch || moves {
            return None;
        }
        let away = |member: &Member| node_of(after, member.target).is_some_and(was_away);
        let leaves =
            |member: &&Member| member.state == MemberState::Current && !is_current(new, member.target);
        let mut leavers = old.members.iter().filter(leaves);
        let what = match leavers.find(|member| !away(member)) {
            Some(member) => format!("{} leaves, and nothing took it away", member.target),
            None if old.members.iter().all(|m| m.state == MemberState::Current)
                && !old.members.iter().any(away) =>
            {
                "all members were current, and nothing took any away".to_owned()
            }
            None => return None,
        };
        Some(format!("{} goes from epoch {} to {}: {what}", old.id, old.epoch, new.epoch))
    };
    let group = before.groups.iter().zip(&after.groups).find_map(|(old, new)| rose(old, new));
    group.or_else(|| lead_changed(before, after, was_away))
}

/// The first namespace whose leader was replaced, or that lost a copy, though nothing took its nodes away.
fn lead_changed(before: &ClusterMap, after: &ClusterMap, was_away: &dyn Fn(&str) -> bool) -> Option<String> {
    let rose = |old: &NamespaceEntry, new: &NamespaceEntry| {
        let leader = old.leader.filter(|_| new.leader_epoch != old.leader_epoch)?;
        let of = |map: &'_ ClusterMap| {
            let groups = map.copies.iter().filter(|c| c.namespace == old.id);
            groups.flat_map(|c| c.members.clone()).collect::<Vec<_>>()
        };
        let (copies, now) = (of(before), of(after));
        // A copy that returns raises the epoch, too, and so does one that is kept from now on.
        let is_whole = copies.iter().all(|c| c.state == MemberState::Current)
            && now.iter().all(|c| copies.iter().any(|old| old.node == c.node));
        let copies = copies.iter();
        let mut nodes = copies.map(|c| c.node).chain([leader]).filter_map(|id| name_of(after, id));
        let is_reason = !is_whole || nodes.any(was_away);
        (!is_reason).then(|| {
            format!(
                "{} goes from epoch {} to {}, and nothing took its nodes away",
                old.name, old.leader_epoch, new.leader_epoch
            )
        })
    };
    before.namespaces.iter().zip(&after.namespaces).find_map(|(old, new)| rose(old, new))
}

fn is_current(group: &Group, target: TargetId) -> bool {
    group.members.iter().any(|m| m.target == target && m.state == MemberState::Current)
}

fn node_of(map: &ClusterMap, target: TargetId) -> Option<&str> {
    name_of(map, map.target(target)?.node)
}

fn name_of(map: &ClusterMap, id: NodeId) -> Option<&str> {
    map.nodes.iter().find(|n| n.id == id).map(|n| n.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use MemberState::{Behind, Current, Down};
    use weir_proto::map::{Move, NamespaceCopies, NamespaceCopy, Node, Role, RunSeen, Target, TargetState};
    use weir_proto::version::Program;
    use weir_proto::{DiskUuid, Epoch, PgId};

    /// One group on targets 0, 1, … of nodes s0, s1, …
    fn map(epoch: u64, states: &[MemberState]) -> ClusterMap {
        let mut map = ClusterMap::absent();
        for n in 0..states.len() as u32 {
            map.nodes.push(Node {
                id: NodeId(n),
                name: format!("s{n}"),
                role: Role::Storage,
                host: String::new(),
                addrs: Vec::new(),
                up: true,
                program: Program::this(),
            });
            map.targets.push(Target {
                id: TargetId(n),
                uuid: DiskUuid::default(),
                node: NodeId(n),
                pool: String::new(),
                state: TargetState::Up,
                capacity: 0,
                last: RunSeen::default(),
                whole: RunSeen::default(),
            });
        }
        let member = |(n, state): (u32, &MemberState)| Member {
            target: TargetId(n),
            state: *state,
            since: Epoch(1),
            lost_at: Epoch(0),
        };
        let members = (0..).zip(states).map(member).collect();
        let scheme = "replica:3".parse().unwrap();
        map.groups.push(Group { id: PgId(0), pool: String::new(), scheme, epoch: Epoch(epoch), members });
        map
    }

    #[test]
    fn an_epoch_rises_for_members_that_were_away_only() {
        let whole = [Current, Current, Current];
        for (before, after, epoch, away, is_reason) in [
            (whole, whole, 1, "", true),
            (whole, [Current, Down, Current], 2, "s1", true),
            (whole, [Current, Down, Current], 2, "", false),
            (whole, [Current, Down, Current], 2, "s2", false),
            (whole, [Down, Down, Current], 3, "s1", false),
            // It left and returned between two checks.
            (whole, whole, 3, "s1", true),
            (whole, whole, 3, "", false),
            ([Current, Down, Current], [Current, Behind, Current], 2, "", true),
            ([Current, Behind, Current], whole, 2, "", true),
            ([Current, Behind, Current], [Down, Behind, Current], 2, "", false),
        ] {
            let found = unjustified(&map(1, &before), &map(epoch, &after), &|name| name == away);
            assert_eq!(found.is_none(), is_reason, "{before:?} {after:?} {away:?}: {found:?}");
        }
        let mut moved = map(2, &whole);
        moved.moves.push(Move { group: PgId(0), place: 0, to: TargetId(9), closed_in: Epoch(2) });
        assert_eq!(unjustified(&map(1, &whole), &moved, &|_| false), None, "a place moves");
    }

    #[test]
    fn a_leader_is_replaced_only_if_it_was_away() {
        let led = |epoch: u64| {
            let mut map = map(1, &[Current, Current]);
            map.namespaces.push(NamespaceEntry {
                id: Default::default(),
                name: "root".to_owned(),
                uuid: Default::default(),
                leader: Some(NodeId(1)),
                leader_epoch: Epoch(epoch),
            });
            map
        };
        for (epoch, away, is_reason) in [(1, "", true), (2, "s1", true), (2, "s0", false), (2, "", false)] {
            let found = unjustified(&led(1), &led(epoch), &|name| name == away);
            assert_eq!(found.is_none(), is_reason, "{epoch} {away:?}: {found:?}");
        }
        let copied = |epoch, nodes: &[u32]| {
            let copy = |n: &u32| NamespaceCopy { node: NodeId(*n), state: Current, since: Epoch(1) };
            let members = nodes.iter().map(copy).collect();
            let copies = vec![NamespaceCopies { namespace: Default::default(), wanted: 2, members }];
            ClusterMap { copies, ..led(epoch) }
        };
        assert_eq!(unjustified(&copied(1, &[1]), &copied(2, &[1, 0]), &|_| false), None, "a copy begins");
        assert!(unjustified(&copied(1, &[1, 0]), &copied(2, &[1, 0]), &|_| false).is_some());
    }
}
