//! Claims about which nodes keep and lead a namespace, step by step as nodes go down and return.
use super::super::lead::take_lead;
use super::*;
use weir_proto::coord::LeadNamespace;
use weir_proto::map::{MemberState, Node, Role};
use weir_proto::version::{LEVEL_MAX, Program};
use weir_proto::{ErrorKind, NamespaceUuid};

const ROOT: NamespaceId = NamespaceId(1);
const UUID: NamespaceUuid = NamespaceUuid([7; 16]);

/// Nodes 1 to 4 on hosts 1, 1, 2 and 3; node 1 leads.
fn led() -> (ClusterMap, Progress) {
    let node = |(id, host): (u32, u32)| Node {
        id: NodeId(id),
        name: format!("m{id}"),
        role: Role::Meta,
        host: format!("h{host}"),
        addrs: vec![],
        up: true,
        program: Program::this(),
    };
    let nodes = [(1, 1), (2, 1), (3, 2), (4, 3)].map(node).to_vec();
    let mut map = ClusterMap { level: LEVEL_MAX, nodes, ..ClusterMap::absent() };
    let namespace = "root".into();
    let lead = LeadNamespace { node: NodeId(1), namespace, uuid: UUID, changes: 0, instead_of: None };
    take_lead(&mut map, &Progress::new(), &lead).unwrap();
    (map, [(ROOT, 50)].into())
}
fn asks(copies: u8, without: Option<u32>) -> SetCopies {
    SetCopies { namespace: "root".into(), copies, without: without.map(NodeId) }
}
fn announces(node: u32, changes: u64) -> KeepCopy {
    KeepCopy { node: NodeId(node), namespace: ROOT, uuid: UUID, changes }
}
/// The leader, and each member's state as a letter.
fn seen(map: &ClusterMap) -> String {
    let leader = map.namespace(ROOT).and_then(|v| v.leader).map_or(0, |id| id.0);
    let letter = |state| match state {
        MemberState::Current => 'c',
        MemberState::Behind => 'b',
        MemberState::Down => 'd',
    };
    let members = map.copies_of(ROOT).map(|c| c.members.clone()).unwrap_or_default();
    let members: Vec<String> = members.iter().map(|m| format!("{}{}", m.node.0, letter(m.state))).collect();
    format!("{leader}: {}", members.join(" "))
}
fn says_caught_up(map: &mut ClusterMap, node: u32) -> Result<bool> {
    let entry = map.namespace(ROOT).unwrap();
    let (leader, epoch) = (entry.leader.unwrap_or(NodeId(0)), entry.leader_epoch);
    copy_caught_up(map, &CopyCaughtUp { leader, namespace: ROOT, node: NodeId(node), epoch })
}
fn up(map: &mut ClusterMap, node: u32, up: bool) {
    map.nodes[node as usize - 1].up = up;
    settle_copies(map);
}
/// Node 1 leads, 1, 2 and 3 are current.
fn three() -> (ClusterMap, Progress) {
    let (mut map, progress) = led();
    set_copies(&mut map, &asks(3, None)).unwrap();
    for node in [2, 3] {
        keep_copy(&mut map, &progress, &announces(node, 0)).unwrap();
        assert_eq!(says_caught_up(&mut map, node), Ok(true));
    }
    assert_eq!(seen(&map), "1: 1c 2c 3c");
    (map, progress)
}

#[test]
fn nodes_take_the_places_that_are_asked_for() {
    let (mut map, progress) = led();
    let e = keep_copy(&mut map, &progress, &announces(2, 0)).unwrap_err();
    assert!(
        e.kind == ErrorKind::Unavailable && e.to_string().contains("weir namespace copies root 2"),
        "{e}"
    );
    assert_eq!(set_copies(&mut map, &asks(1, None)).unwrap_err().kind, ErrorKind::Exists);
    assert_eq!(set_copies(&mut map, &asks(9, None)).unwrap_err().kind, ErrorKind::Invalid);
    assert!(set_copies(&mut map, &asks(2, None)).is_ok());
    assert_eq!(seen(&map), "1: 1c");
    let foreign = KeepCopy { uuid: NamespaceUuid([8; 16]), ..announces(2, 0) };
    assert_eq!(keep_copy(&mut map, &progress, &foreign).unwrap_err().kind, ErrorKind::Denied);
    assert_eq!(keep_copy(&mut map, &progress, &announces(2, 0)), Ok(()));
    assert_eq!(seen(&map), "1: 1c 2b");
    assert_eq!(keep_copy(&mut map, &progress, &announces(3, 0)).unwrap_err().kind, ErrorKind::Unavailable);
    map.level = LEVEL_OF_COPIES - 1;
    assert_eq!(set_copies(&mut map, &asks(3, None)).unwrap_err().kind, ErrorKind::Unsupported);
}

#[test]
fn the_lead_goes_to_a_current_copy_on_another_host() {
    let (mut map, progress) = three();
    up(&mut map, 1, false);
    assert_eq!(seen(&map), "3: 1d 2c 3c", "2 is on the host of 1");
    up(&mut map, 3, false);
    assert_eq!(seen(&map), "2: 1d 2c 3d");
    up(&mut map, 2, false);
    assert_eq!(seen(&map), "0: 1d 2d 3d");
    for node in [1, 3] {
        up(&mut map, node, true);
        keep_copy(&mut map, &progress, &announces(node, 60)).unwrap();
    }
    assert_eq!(seen(&map), "0: 1b 2d 3b", "2 continued alone");
    up(&mut map, 2, true);
    keep_copy(&mut map, &progress, &announces(2, 60)).unwrap();
    assert_eq!(seen(&map), "2: 1b 2c 3b");
}

#[test]
fn a_process_that_starts_again_never_goes_on_under_its_epoch() {
    let (mut map, progress) = three();
    let before = map.namespace(ROOT).unwrap().leader_epoch;
    keep_copy(&mut map, &progress, &announces(1, 60)).unwrap();
    assert_eq!(seen(&map), "3: 1b 2c 3c");
    assert!(map.namespace(ROOT).unwrap().leader_epoch > before);
    up(&mut map, 1, false);
    up(&mut map, 2, false);
    let before = map.namespace(ROOT).unwrap().leader_epoch;
    keep_copy(&mut map, &progress, &announces(3, 60)).unwrap();
    assert_eq!(seen(&map), "3: 1d 2d 3c", "no other member can");
    assert!(map.namespace(ROOT).unwrap().leader_epoch > before);
}

#[test]
fn a_directory_that_lost_changes_is_refilled_or_refused() {
    let (mut map, progress) = three();
    up(&mut map, 3, false);
    up(&mut map, 3, true);
    keep_copy(&mut map, &progress, &announces(3, 0)).unwrap();
    assert_eq!(seen(&map), "1: 1c 2c 3b");
    says_caught_up(&mut map, 3).unwrap();
    let published = map.clone();
    (1..=3).for_each(|node| map.nodes[node - 1].up = false);
    settle_copies(&mut map);
    let last = map.copies[0].members.iter().max_by_key(|m| m.since).unwrap().node.0;
    // They went down one after the other, so the last one may have written alone.
    let mut one_by_one = map.clone();
    up(&mut one_by_one, last, true);
    let e = keep_copy(&mut one_by_one, &progress, &announces(last, 49)).unwrap_err();
    assert!(e.kind == ErrorKind::Denied && e.context.contains("holds 49 changes, and at least 50"), "{e}");
    keep_copy(&mut one_by_one, &progress, &announces(last, 50)).unwrap();
    assert_eq!(one_by_one.namespace(ROOT).unwrap().leader, Some(NodeId(last)));
    // All at once: the others hold everything, too.
    forget_unpublished_copies(&published, &mut map);
    up(&mut map, last, true);
    keep_copy(&mut map, &progress, &announces(last, 49)).unwrap();
    assert_eq!(map.namespace(ROOT).unwrap().leader, None);
}

#[test]
fn a_silent_copy_is_left_out_and_a_cut_off_leader_replaced() {
    let (mut map, progress) = three();
    let lost = |map: &ClusterMap, node: u32, silent_ms: u32| {
        let entry = map.namespace(ROOT).unwrap();
        let (leader, epoch) = (entry.leader.unwrap(), entry.leader_epoch);
        CopyLost { leader, namespace: ROOT, node: NodeId(node), epoch, silent_ms }
    };
    let late = lost(&map, 2, 800);
    assert_eq!(copy_lost(&mut map, &late), Ok(true));
    assert_eq!(seen(&map), "1: 1c 2d 3c");
    assert_eq!(copy_lost(&mut map, &late).unwrap_err().kind, ErrorKind::Stale);
    let short = lost(&map, 3, 800);
    assert_eq!(copy_lost(&mut map, &short), Ok(false), "too few would be left");
    let long = lost(&map, 3, LEADER_IS_CUT_MS);
    assert_eq!(copy_lost(&mut map, &long), Ok(true));
    assert_eq!(seen(&map), "3: 1c 2d 3c");
    keep_copy(&mut map, &progress, &announces(2, 50)).unwrap();
    assert_eq!(seen(&map), "3: 1c 2b 3c");
    // The coordinator finds it down: 1 leads again, and holds everything.
    up(&mut map, 3, false);
    assert_eq!(seen(&map), "1: 1c 2b 3d");
}

#[test]
fn a_leader_silent_to_copy_and_coordinator_is_replaced() {
    let (mut map, progress) = three();
    let silent = |map: &ClusterMap, node: u32, silent_ms: u32| {
        let entry = map.namespace(ROOT).unwrap();
        let (leader, epoch) = (entry.leader.unwrap(), entry.leader_epoch);
        LeaderSilent { node: NodeId(node), namespace: ROOT, leader, epoch, silent_ms }
    };
    let late = silent(&map, 2, LEADER_SILENT_MS);
    assert_eq!(leader_silent(&mut map, &late, true), Ok(false), "its process lives: the link may be cut");
    let early = silent(&map, 2, LEADER_SILENT_MS - 1);
    assert_eq!(leader_silent(&mut map, &early, false), Ok(false));
    assert_eq!(leader_silent(&mut map, &late, false), Ok(true));
    assert_eq!(seen(&map), "3: 1d 2c 3c", "on another host");
    assert_eq!(leader_silent(&mut map, &late, false).unwrap_err().kind, ErrorKind::Stale);
    // Without another current copy nothing could be acknowledged.
    let next = silent(&map, 2, 60_000);
    assert_eq!(leader_silent(&mut map, &next, false), Ok(false));
    // It returns as a copy. One that is behind is not asked.
    keep_copy(&mut map, &progress, &announces(1, 50)).unwrap();
    assert_eq!(seen(&map), "3: 1b 2c 3c");
    let behind = silent(&map, 1, 60_000);
    assert_eq!(leader_silent(&mut map, &behind, false), Ok(false));
}

#[test]
fn the_last_copy_that_has_everything_stays() {
    let (mut map, _) = three();
    assert!(set_copies(&mut map, &asks(2, None)).is_ok());
    assert_eq!(seen(&map), "1: 1c 2c", "the leader stays, and the highest number goes");
    let refused = set_copies(&mut map, &asks(2, Some(1))).unwrap_err();
    assert!(refused.to_string().contains("stop its metadata process first"), "{refused}");
    up(&mut map, 1, false);
    assert!(set_copies(&mut map, &asks(2, Some(1))).is_ok());
    assert_eq!(seen(&map), "2: 2c");
    let mut alone = map.clone();
    up(&mut alone, 2, false);
    let refused = set_copies(&mut alone, &asks(2, Some(2))).unwrap_err();
    assert!(refused.context.contains("none is left that is known to hold every change"), "{refused}");
    assert_eq!(set_copies(&mut map, &asks(2, Some(4))).unwrap_err().kind, ErrorKind::NotFound);
    assert!(set_copies(&mut map, &asks(1, None)).is_ok());
    assert_eq!(seen(&map), "2: 2c");
    // All are lost: allowed only when no node that keeps a copy is up.
    let refused = set_copies(&mut map, &asks(0, None)).unwrap_err();
    assert!(refused.kind == ErrorKind::Exists && refused.context.contains("m2"), "{refused}");
    up(&mut map, 2, false);
    assert!(set_copies(&mut map, &asks(0, None)).is_ok());
    assert_eq!(seen(&map), "0: ");
}
