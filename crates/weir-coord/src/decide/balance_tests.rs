//! When places move to emptier targets, and when they stay.
use super::*;
use crate::decide::begin_move;
use crate::decide::group_tests::{cluster, create_groups};
use weir_proto::{DiskUuid, NodeId, PgId};

/// Groups of 4+2 on six targets that are 60 % full, and one target that is empty.
fn with_an_empty_one() -> (ClusterMap, Observed) {
    let mut map = cluster(6, "ec:4+2");
    assert!(create_groups(&mut map, 6));
    let mut target = map.targets[0].clone();
    (target.id, target.uuid, target.node) = (TargetId(7), DiskUuid([7; 16]), NodeId(7));
    map.targets.push(target);
    map.targets.iter_mut().for_each(|t| t.capacity = 1_000_000);
    let used = (1..=6).map(|t| (TargetId(t), 600_000)).chain([(TargetId(7), 0)]).collect();
    (map, Observed { used, ..Observed::default() })
}

/// Six empty targets beside six that are 60 % full. While places move, writes add to each target in proportion to
/// its places.
#[test]
fn six_more_targets_get_half_with_few_moves() {
    let (mut map, mut observed) = with_an_empty_one();
    for n in 8..=12 {
        let mut target = map.targets[6].clone();
        (target.id, target.uuid, target.node) = (TargetId(n), DiskUuid([n as u8; 16]), NodeId(n));
        map.targets.push(target);
        observed.used.insert(TargetId(n), 0);
    }
    let moved_bytes = {
        let mut moved_bytes = 0;
        loop {
            let steps = plan_balance(&map, &observed);
            if steps.is_empty() {
                break moved_bytes;
            }
            for step in steps {
                let group = map.group(step.group).unwrap();
                let bytes = Board::new(&map, &observed).bytes_of_place(group, step.from);
                map.groups[step.group.0 as usize].members[step.place].target = step.to;
                *observed.used.get_mut(&step.from).unwrap() -= bytes;
                *observed.used.get_mut(&step.to).unwrap() += bytes;
                moved_bytes += bytes;
            }
            for group in &map.groups {
                group.members.iter().for_each(|m| *observed.used.get_mut(&m.target).unwrap() += 10);
            }
        }
    };
    let all: u64 = observed.used.values().sum();
    let new: u64 = (7..=12).map(|n| observed.used[&TargetId(n)]).sum();
    let share = new * 1000 / all;
    assert!((450..=550).contains(&share), "{share} per mille of the bytes are on new targets");
    let (least, most) = (observed.used.values().min().unwrap(), observed.used.values().max().unwrap());
    assert!(
        most - least <= 20_000 + 10_000,
        "within 2 % of the capacity, and half a place: {:?}",
        observed.used
    );
    assert!(moved_bytes * 10 <= new * 11, "{moved_bytes} bytes moved, {new} are on the new targets");
}

/// Executes plans until none is left, as if each place had the same size as the others of its target.
fn balanced(map: &mut ClusterMap, observed: &mut Observed) -> usize {
    let mut moved = 0;
    loop {
        let steps = plan_balance(map, observed);
        if steps.is_empty() {
            return moved;
        }
        for step in steps {
            let bytes = Board::new(map, observed).bytes_of_place(map.group(step.group).unwrap(), step.from);
            begin_move(map, step.group, step.place, step.to).unwrap();
            map.moves.clear();
            map.groups[step.group.0 as usize].members[step.place].target = step.to;
            *observed.used.get_mut(&step.from).unwrap() -= bytes;
            *observed.used.entry(step.to).or_default() += bytes;
            moved += 1;
        }
        assert!(moved < 200, "it does not end");
    }
}

#[test]
fn an_empty_target_is_filled_until_all_are_alike() {
    let (mut map, mut observed) = with_an_empty_one();
    let moved = balanced(&mut map, &mut observed);
    let (least, most) = (observed.used.values().min().unwrap(), observed.used.values().max().unwrap());
    assert!(most - least <= 60_000, "{:?} after {moved} moves", observed.used);
    // A seventh of all bytes, in places of 25,000 each, and hardly more.
    assert!((17..=24).contains(&moved), "{moved}");
}

#[test]
fn small_differences_stay() {
    let (map, mut observed) = with_an_empty_one();
    observed.used.insert(TargetId(7), 585_000);
    assert!(plan_balance(&map, &observed).is_empty());
    assert!(plan_balance(&map, &Observed::default()).is_empty(), "nothing is known of targets");
}

#[test]
fn two_places_leave_a_target_at_a_time_and_two_come_to_one() {
    let (map, observed) = with_an_empty_one();
    let steps = plan_balance(&map, &observed);
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert!(steps.iter().all(|step| step.to == TargetId(7)));
}

#[test]
fn no_more_members_of_a_group_come_onto_one_host() {
    let (mut map, observed) = with_an_empty_one();
    for (n, node) in map.nodes.iter_mut().enumerate() {
        node.host = format!("h{n}");
    }
    map.targets[6].node = NodeId(1);
    let steps = plan_balance(&map, &observed);
    assert!(!steps.is_empty());
    assert!(steps.iter().all(|step| step.from == TargetId(1)), "only those of its own host: {steps:?}");
}

/// Most bytes are in a few groups, as after a few large files. Sizes are known when a place of the group has moved.
#[test]
fn balance_ends_whatever_the_sizes_of_places() {
    let (mut map, mut observed) = with_an_empty_one();
    let size = |g: PgId| if g.0.is_multiple_of(4) { 96_000 } else { 1_000 * u64::from(g.0 % 2) };
    let used = |map: &ClusterMap, t: TargetId| -> u64 {
        let has = |g: &&Group| g.members.iter().any(|m| m.target == t);
        map.groups.iter().filter(has).map(|g| size(g.id)).sum()
    };
    let mut moved = 0;
    loop {
        observed.used = (1..=7).map(|t| (TargetId(t), used(&map, TargetId(t)))).collect();
        let steps = plan_balance(&map, &observed);
        if steps.is_empty() {
            break;
        }
        for step in steps {
            map.groups[step.group.0 as usize].members[step.place].target = step.to;
            observed.sizes.insert(step.group, size(step.group));
            moved += size(step.group);
        }
        assert!(moved < 2_000_000, "places move without end");
    }
    let most = observed.used.values().max().unwrap();
    assert!(observed.used[&TargetId(7)] + 2 * 96_000 >= *most, "{:?}", observed.used);
}
