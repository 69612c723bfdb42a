//! Which places of drained targets move, and why others wait.
use super::*;
use crate::decide::group_tests::{cluster, create_groups};
use crate::decide::{begin_move, target_down};
use weir_proto::{DiskUuid, NodeId};

/// Groups of 4+2 on six targets, and `more` targets without groups.
fn with_more(more: u32) -> ClusterMap {
    let mut map = cluster(6, "ec:4+2");
    assert!(create_groups(&mut map, 6));
    map.targets.iter_mut().for_each(|t| t.capacity = 1000);
    for n in 7..7 + more {
        let mut target = map.targets[0].clone();
        (target.id, target.uuid, target.node) = (TargetId(n), DiskUuid([n as u8; 16]), NodeId(n));
        map.targets.push(target);
    }
    map
}

fn drained(target: u32) -> Observed {
    Observed { draining: [TargetId(target)].into(), ..Observed::default() }
}

#[test]
fn two_places_at_a_time_leave_a_drained_target() {
    let mut map = with_more(2);
    let all = map.groups.len();
    let plan = plan_drain(&map, &drained(3));
    assert_eq!((plan.steps.len(), plan.waiting.len()), (2, all - 2));
    assert!(plan.waiting.iter().all(|(_, from, why)| (*from, *why) == (TargetId(3), Hindrance::Busy)));
    for step in &plan.steps {
        assert_eq!(step.from, TargetId(3));
        begin_move(&mut map, step.group, step.place, step.to).unwrap();
    }
    let to: Vec<TargetId> = plan.steps.iter().map(|step| step.to).collect();
    assert!(to.contains(&TargetId(7)) && to.contains(&TargetId(8)), "both get the same: {to:?}");
    assert!(plan_drain(&map, &drained(3)).steps.is_empty(), "two move already");
}

#[test]
fn a_place_that_cannot_move_has_a_reason() {
    let why = |map: &ClusterMap, observed: &Observed| {
        let plan = plan_drain(map, observed);
        assert!(plan.steps.is_empty());
        plan.waiting.into_iter().map(|(_, _, why)| why).next()
    };
    assert_eq!(why(&with_more(0), &drained(3)), Some(Hindrance::NoTarget));
    let mut both = drained(3);
    both.draining.insert(TargetId(7));
    assert_eq!(why(&with_more(1), &both), Some(Hindrance::NoTarget), "no place goes to a drained target");
    let full = Observed { used: [(TargetId(7), 900)].into(), ..drained(3) };
    assert_eq!(why(&with_more(1), &full), Some(Hindrance::Full));
    let mut map = with_more(1);
    assert!(target_down(&mut map, TargetId(5)));
    assert_eq!(why(&map, &drained(3)), Some(Hindrance::Repaired));
    assert_eq!(why(&with_more(1), &Observed::default()), None);
}

#[test]
fn the_place_of_a_full_target_moves_where_writers_were_refused() {
    let mut map = with_more(1);
    let group = map.groups.last().unwrap().id;
    let (observed, refused) = (Observed::default(), BTreeSet::from([(group, TargetId(3))]));
    let plan = plan_full(&map, &observed, &refused);
    assert_eq!(plan.steps.len(), 1, "no other place of the target: {plan:?}");
    let step = plan.steps[0];
    assert_eq!((step.group, step.from, step.to), (group, TargetId(3), TargetId(7)));
    begin_move(&mut map, step.group, step.place, step.to).unwrap();
    assert!(plan_full(&map, &observed, &refused).steps.is_empty(), "it moves already");
    let unknown = BTreeSet::from([(group, TargetId(99)), (PgId(9999), TargetId(3))]);
    assert_eq!(plan_full(&map, &observed, &unknown), Plan::default());
    let waits = plan_full(&with_more(0), &observed, &refused).waiting;
    assert_eq!(waits, [(group, TargetId(3), Hindrance::NoTarget)]);
}
