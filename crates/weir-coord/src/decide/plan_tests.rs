//! Claims about plans and replacements, by table.
use super::super::group_tests::{cluster, create_groups};
use super::*;
use crate::decide::{caught_up, replace, target_back, target_down};
use weir_proto::ErrorKind;

fn observed(lost: &[u32], used: u64) -> Observed {
    let lost = lost.iter().map(|t| TargetId(*t)).collect();
    Observed { lost, used: (1..=12).map(|t| (TargetId(t), used)).collect(), ..Observed::default() }
}

/// This number of targets of 100 bytes, each on its own host, with these down.
fn with_down(targets: u32, scheme: &str, down: &[u32]) -> ClusterMap {
    let mut map = cluster(targets, scheme);
    map.targets.iter_mut().for_each(|t| t.capacity = 1000);
    map.nodes.iter_mut().for_each(|n| n.host = n.name.clone());
    assert!(create_groups(&mut map, targets as usize));
    down.iter().for_each(|t| assert!(target_down(&mut map, TargetId(*t))));
    map
}

/// Executes plans until no step is left; returns the places that wait.
fn rebuild(map: &mut ClusterMap, observed: &Observed) -> Vec<(PgId, TargetId, Hindrance)> {
    for _ in 0..1000 {
        let planned = plan(map, observed);
        let mut into: BTreeMap<TargetId, usize> = BTreeMap::new();
        for step in &planned.steps {
            *into.entry(step.to).or_default() += 1;
            replace(map, step.group, step.place, step.to).unwrap();
        }
        assert!(into.values().all(|n| *n <= FILLED_AT_ONCE), "{into:?}");
        let filled: Vec<(PgId, TargetId)> = planned.steps.iter().map(|s| (s.group, s.to)).collect();
        if filled.is_empty() {
            return planned.waiting;
        }
        for (group, target) in filled {
            for _ in 0..2 {
                let epoch = map.group(group).unwrap().epoch;
                assert_eq!(caught_up(map, target, group, epoch), Ok(true));
            }
        }
    }
    panic!("a plan without end");
}

#[test]
fn a_lost_target_is_in_no_group_after_a_rebuild() {
    for (targets, scheme, lost) in [(7, "ec:4+2", &[3][..]), (9, "ec:4+2", &[3, 4]), (4, "replica:3", &[1])] {
        let mut map = with_down(targets, scheme, lost);
        assert_eq!(rebuild(&mut map, &observed(lost, 0)), []);
        let members = || map.groups.iter().flat_map(|g| &g.members);
        assert!(members().all(|m| m.state == MemberState::Current && !lost.contains(&m.target.0)));
        for group in &map.groups {
            let once: BTreeSet<TargetId> = group.members.iter().map(|m| m.target).collect();
            assert_eq!(once.len(), group.members.len(), "{group:?}");
        }
        let loads: Vec<usize> = (1..=targets)
            .filter(|t| !lost.contains(t))
            .map(|t| members().filter(|m| m.target == TargetId(t)).count())
            .collect();
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        assert!(most - least <= 2, "{targets} of {scheme}: {loads:?}");
    }
}

#[test]
fn six_targets_of_4_2_have_no_spare_for_a_place() {
    let mut map = with_down(6, "ec:4+2", &[2]);
    let before = map.clone();
    let waits = rebuild(&mut map, &observed(&[2], 0));
    assert!(waits.len() == 24 && waits.iter().all(|(_, _, why)| *why == Hindrance::NoTarget), "{waits:?}");
    assert_eq!(map, before);
}

#[test]
fn no_target_is_filled_beyond_its_capacity() {
    let mut map = with_down(7, "ec:4+2", &[3]);
    let waits = rebuild(&mut map, &observed(&[3], 849));
    assert!(waits.iter().all(|(_, _, why)| *why == Hindrance::Full) && !waits.is_empty(), "{waits:?}");
    assert_eq!(rebuild(&mut map, &observed(&[3], 700)), []);
}

#[test]
fn a_host_gets_a_second_place_of_a_group_only_if_it_must() {
    let mut map = with_down(8, "ec:4+2", &[1]);
    map.nodes[1].host = "s3".into(); // t2 and t3 share a host
    for step in plan(&map, &observed(&[1], 0)).steps {
        let group = map.group(step.group).unwrap();
        let has = |t: u32| group.members.iter().any(|m| m.target == TargetId(t));
        let shares = |t: TargetId| t == TargetId(2) && has(3) || t == TargetId(3) && has(2);
        let has_another = (4..=8).any(|t| !has(t));
        assert!(!shares(step.to) || !has_another, "{step:?} of {group:?}");
    }
}

#[test]
fn groups_with_nothing_to_spare_come_first() {
    let map = with_down(9, "ec:4+2", &[3, 4]);
    let steps = plan(&map, &observed(&[3, 4], 0)).steps;
    let left: Vec<usize> = steps.iter().map(|s| spare(map.group(s.group).unwrap())).collect();
    assert!(left.is_sorted() && left[0] == 0 && !steps.is_empty(), "{left:?}");
}

#[test]
fn nothing_is_replaced_that_cannot_be_rebuilt() {
    let mut map = with_down(9, "ec:4+2", &[1, 2, 3]);
    let observed = observed(&[1], 0);
    let planned = plan(&map, &observed);
    let few = |g: PgId| !map.group(g).unwrap().is_writable();
    assert!(planned.waiting.iter().any(|(_, _, why)| *why == Hindrance::TooFew));
    assert!(planned.steps.iter().all(|s| !few(s.group)));
    let group = map.groups.iter().position(|g| !g.is_writable()).unwrap();
    let place = map.groups[group].members.iter().position(|m| m.state == MemberState::Down).unwrap();
    let free = |t: &u32| map.groups[group].members.iter().all(|m| m.target != TargetId(*t));
    let to = TargetId((4..=9).find(free).unwrap());
    assert_eq!(replace(&mut map, PgId(group as u32), place, to).unwrap_err().kind, ErrorKind::Unavailable);
}

#[test]
fn a_newcomer_is_filled_then_behind_then_current() {
    let mut map = with_down(7, "ec:4+2", &[3]);
    let step = plan(&map, &observed(&[3], 0)).steps[0];
    let epoch = |map: &ClusterMap| map.group(step.group).unwrap().epoch;
    let before = epoch(&map);
    replace(&mut map, step.group, step.place, step.to).unwrap();
    let member = |map: &ClusterMap| map.group(step.group).unwrap().members[step.place].clone();
    assert!(epoch(&map).0 == before.0 + 1 && member(&map).is_filled(map.level));
    assert!(!map.group(step.group).unwrap().pauses_seals(map.level));
    let filled = epoch(&map);
    assert_eq!(caught_up(&mut map, step.to, step.group, before).unwrap_err().kind, ErrorKind::Stale);
    assert_eq!(caught_up(&mut map, step.to, step.group, filled), Ok(true));
    assert_eq!((member(&map).state, member(&map).since), (MemberState::Behind, filled));
    assert!(map.group(step.group).unwrap().pauses_seals(map.level));
    let behind = epoch(&map);
    assert_eq!(caught_up(&mut map, step.to, step.group, behind), Ok(true));
    assert_eq!(member(&map).state, MemberState::Current);
    // The lost target returns, and is no longer in that group.
    assert!(target_back(&mut map, TargetId(3)));
    assert!(map.group(step.group).unwrap().members.iter().all(|m| m.target != TargetId(3)));
}

#[test]
fn nothing_is_replaced_below_the_level_that_knows_it() {
    let mut map = with_down(7, "ec:4+2", &[3]);
    map.level = 2;
    let step = plan(&map, &observed(&[3], 0)).steps[0];
    let refused = replace(&mut map, step.group, step.place, step.to).unwrap_err();
    assert!(refused.kind == ErrorKind::Unsupported && refused.to_string().contains("weir upgrade finish"));
}

#[test]
fn a_target_that_was_filled_takes_the_next_place() {
    let mut map = with_down(7, "ec:4+2", &[3]);
    let lost = observed(&[3], 0);
    let steps = plan(&map, &lost).steps;
    steps.iter().for_each(|step| replace(&mut map, step.group, step.place, step.to).unwrap());
    assert_eq!(plan(&map, &lost).steps, [], "each target that is left is filled for two places");
    let mut taken = 0;
    for step in &steps {
        let epoch = map.group(step.group).unwrap().epoch;
        caught_up(&mut map, step.to, step.group, epoch).unwrap();
        for next in plan(&map, &lost).steps {
            assert_eq!(next.to, step.to);
            replace(&mut map, next.group, next.place, next.to).unwrap();
            taken += 1;
        }
    }
    let behind = |t: u32| {
        let members = map.groups.iter().flat_map(|g| &g.members);
        members.filter(|m| m.target == TargetId(t) && m.state == MemberState::Behind).count()
    };
    assert!(taken > 0 && (1..=7).all(|t| behind(t) <= BEHIND_MAX), "{taken}");
}
