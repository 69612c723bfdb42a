//! The changes of a move in the map, and the events that end one.
use super::*;
use crate::decide::group_tests::cluster;
use crate::decide::{target_back, target_down};
use weir_proto::ErrorKind;

const GROUP: PgId = PgId(0);

/// Six targets in groups of 4+2, and a seventh without groups.
fn with_one_more() -> ClusterMap {
    let mut map = cluster(6, "ec:4+2");
    map.level = LEVEL_OF_GROWTH;
    assert!(crate::decide::group_tests::create_groups(&mut map, 6));
    let mut target = map.targets[0].clone();
    (target.id, target.uuid) = (TargetId(7), weir_proto::DiskUuid([7; 16]));
    map.targets.push(target);
    map
}

fn epoch(map: &ClusterMap) -> Epoch {
    map.groups[0].epoch
}

#[test]
fn the_member_stays_until_the_new_one_has_all() {
    let mut map = with_one_more();
    let (before, from) = (map.groups[0].clone(), map.groups[0].members[2].target);
    begin_move(&mut map, GROUP, 2, TargetId(7)).unwrap();
    assert_eq!(map.groups[0], before, "nothing changes for readers and writers");
    let e = finish_move(&mut map, GROUP, TargetId(7), before.epoch).unwrap_err();
    assert_eq!(e.kind, ErrorKind::Stale, "it is not closed yet");
    close_move(&mut map, GROUP, TargetId(7), before.epoch).unwrap();
    let closed = epoch(&map);
    assert_eq!((closed.0, map.moves[0].closed_in), (before.epoch.0 + 1, closed));
    assert_eq!(map.groups[0].members, before.members, "they need not know the epoch yet");
    assert_eq!(finish_move(&mut map, GROUP, TargetId(7), closed), Ok(from));
    let group = &map.groups[0];
    assert_eq!((group.epoch.0, group.members[2].target), (closed.0 + 1, TargetId(7)));
    assert_eq!(group.current_count(), 6);
    assert!(map.moves.is_empty());
}

#[test]
fn any_change_of_the_group_ends_the_closing() {
    let mut map = with_one_more();
    begin_move(&mut map, GROUP, 0, TargetId(7)).unwrap();
    let first = epoch(&map);
    close_move(&mut map, GROUP, TargetId(7), first).unwrap();
    let closed = epoch(&map);
    let other = map.groups[0].members[3].target;
    assert!(target_down(&mut map, other) && target_back(&mut map, other));
    settle_moves(&mut map);
    assert_eq!(map.moves.len(), 1, "both targets are up");
    assert!(!is_closed(&map.groups[0], &map.moves[0]));
    assert!(finish_move(&mut map, GROUP, TargetId(7), closed).is_err());
    let now = epoch(&map);
    let e = close_move(&mut map, GROUP, TargetId(7), now).unwrap_err();
    assert_eq!(e.kind, ErrorKind::Unavailable, "a member is behind");
}

#[test]
fn a_move_without_one_of_its_ends_is_forgotten() {
    for is_newcomer in [false, true] {
        let mut map = with_one_more();
        begin_move(&mut map, GROUP, 0, TargetId(7)).unwrap();
        let first = epoch(&map);
        close_move(&mut map, GROUP, TargetId(7), first).unwrap();
        let (closed, from) = (epoch(&map), map.groups[0].members[0].target);
        assert!(target_down(&mut map, if is_newcomer { TargetId(7) } else { from }));
        settle_moves(&mut map);
        assert!(map.moves.is_empty());
        assert!(epoch(&map) > closed, "the member takes changes again");
        assert_eq!(map.groups[0].members[0].target, from);
    }
}

#[test]
fn a_closed_group_is_opened_again_when_a_move_is_cancelled() {
    let mut map = with_one_more();
    begin_move(&mut map, GROUP, 0, TargetId(7)).unwrap();
    let first = epoch(&map);
    close_move(&mut map, GROUP, TargetId(7), first).unwrap();
    cancel_move(&mut map, GROUP);
    assert_eq!(epoch(&map).0, first.0 + 2);
    assert_eq!(map.groups[0].current_count(), 6);
    begin_move(&mut map, GROUP, 1, TargetId(7)).unwrap();
    let before = epoch(&map);
    cancel_move(&mut map, GROUP);
    assert_eq!(epoch(&map).0, before.0 + 1, "what was copied is of an earlier epoch");
    cancel_move(&mut map, GROUP);
    assert_eq!(epoch(&map).0, before.0 + 1, "there is no move any more");
}

#[test]
fn only_a_target_of_the_pool_that_is_up_takes_a_place() {
    let mut map = with_one_more();
    let member = map.groups[0].members[1].target;
    for to in [member, TargetId(99)] {
        assert!(begin_move(&mut map, GROUP, 0, to).is_err(), "{to}");
    }
    assert!(begin_move(&mut map, GROUP, 6, TargetId(7)).is_err(), "the group has no such place");
    map.targets[6].pool = "ssd".into();
    assert!(begin_move(&mut map, GROUP, 0, TargetId(7)).is_err());
    map.targets[6].pool = map.targets[0].pool.clone();
    map.level = LEVEL_OF_GROWTH - 1;
    assert_eq!(begin_move(&mut map, GROUP, 0, TargetId(7)).unwrap_err().kind, ErrorKind::Unsupported);
    map.level = LEVEL_OF_GROWTH;
    begin_move(&mut map, GROUP, 0, TargetId(7)).unwrap();
    assert!(begin_move(&mut map, GROUP, 1, TargetId(7)).is_err(), "one place of a group at a time");
}
