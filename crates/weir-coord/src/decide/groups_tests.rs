//! Claims about group transitions, by table and against a model of writes.
use super::*;
use proptest::prelude::*;
use std::time::Duration;
use weir_proto::map::{Node, Role, RunSeen, Settings, Target};
use weir_proto::version::{LEVEL_MAX, Program};
use weir_proto::{ClusterId, DiskUuid, ErrorKind};

/// Targets that answer at once.
fn fast(targets: impl IntoIterator<Item = u32>) -> BTreeMap<TargetId, Speed> {
    targets.into_iter().map(|n| (t(n), Speed::default())).collect()
}

pub fn cluster(targets: u32, scheme: &str) -> ClusterMap {
    ClusterMap {
        cluster: ClusterId([7; 16]),
        version: 1,
        level: LEVEL_MAX,
        settings: Settings {
            scheme: scheme.parse().unwrap(),
            cell_shift: 20,
            lease_ms: 10_000,
            target_silence_ms: 1000,
        },
        nodes: (1..=targets)
            .map(|n| Node {
                id: NodeId(n),
                name: format!("s{n}"),
                role: Role::Storage,
                host: "h".into(),
                addrs: vec![],
                up: true,
                program: Program::this(),
            })
            .collect(),
        targets: (1..=targets)
            .map(|n| Target {
                id: TargetId(n),
                uuid: DiskUuid([n as u8; 16]),
                node: NodeId(n),
                pool: "hdd".into(),
                state: TargetState::Up,
                capacity: 1,
                last: RunSeen::default(),
                whole: RunSeen::default(),
            })
            .collect(),
        ..ClusterMap::absent()
    }
}
/// The two steps of the map's owner.
pub fn create_groups(map: &mut ClusterMap, expected_targets: usize) -> bool {
    add_all(map, groups_for_new_files(map, expected_targets))
}
pub fn make_groups(map: &mut ClusterMap, pool: Option<&str>, scheme: Scheme) -> Result<bool> {
    let wanted = groups_asked_for(map, pool, scheme)?;
    Ok(add_all(map, wanted))
}
fn add_all(map: &mut ClusterMap, wanted: Vec<WantedGroups>) -> bool {
    wanted.iter().for_each(|wanted| assert!(add_groups(map, wanted, wanted.place())));
    !wanted.is_empty()
}
fn with_groups(targets: u32, scheme: &str) -> ClusterMap {
    let mut map = cluster(targets, scheme);
    assert!(create_groups(&mut map, targets as usize));
    map
}
fn state(map: &ClusterMap, group: u32, target: u32) -> MemberState {
    member_of(&map.groups[group as usize], TargetId(target)).unwrap().state
}
fn t(n: u32) -> TargetId {
    TargetId(n)
}

#[test]
fn groups_are_made_on_demand_where_the_targets_can_hold_them() {
    let mut map = with_groups(6, "ec:4+2");
    let before = map.groups.clone();
    let scheme = |text: &str| text.parse::<Scheme>().unwrap();
    assert_eq!(make_groups(&mut map, None, scheme("ec:4+2")), Ok(false), "these groups exist");
    assert_eq!(make_groups(&mut map, Some("hdd"), scheme("ec:2+1")), Ok(true));
    assert_eq!(make_groups(&mut map, None, scheme("ec:2+1")), Ok(false));
    assert!(map.groups_of("hdd", scheme("ec:2+1")).is_some());
    // Existing groups keep their numbers.
    assert_eq!(map.groups[..before.len()], before);
    assert_eq!(make_groups(&mut map, None, scheme("ec:8+2")).unwrap_err().kind, ErrorKind::Invalid);
    assert_eq!(make_groups(&mut map, Some("ssd"), scheme("single")).unwrap_err().kind, ErrorKind::NotFound);
    assert!(target_down(&mut map, t(1)));
    assert!(make_groups(&mut map, None, scheme("ec:5+1")).is_err(), "only five are up");
}

#[test]
fn new_targets_get_a_new_generation_of_groups() {
    let mut map = with_groups(6, "ec:4+2");
    let (scheme, none) = (map.settings.scheme, BTreeSet::new());
    assert!(groups_for_new_targets(&map, &none).is_empty(), "all targets are used");
    let before = map.groups.clone();
    for n in [7, 8] {
        let mut target = map.targets[0].clone();
        (target.id, target.uuid) = (t(n), DiskUuid([n as u8; 16]));
        map.targets.push(target);
    }
    assert!(groups_for_new_targets(&map, &[t(7), t(8)].into()).is_empty(), "they are drained");
    let wanted = groups_for_new_targets(&map, &none);
    assert_eq!(wanted.len(), 1);
    assert!(add_all(&mut map, wanted.clone()));
    assert_eq!(map.groups[..before.len()], before, "old files keep their groups");
    assert_eq!(map.groups_of("hdd", scheme), Some((PgId(24), 32)));
    assert_eq!(map.generations, [PgId(24)]);
    let used: BTreeSet<TargetId> =
        map.groups[24..].iter().flat_map(|g| &g.members).map(|m| m.target).collect();
    assert_eq!(used.len(), 8);
    assert!(groups_for_new_targets(&map, &none).is_empty(), "once");
    assert!(!add_groups(&mut map, &wanted[0], wanted[0].place()), "another generation exists by now");
    map.level = LEVEL_OF_GROWTH - 1;
    map.generations.clear();
    map.groups.truncate(24);
    assert!(groups_for_new_targets(&map, &none).is_empty(), "older programs know no generations");
}

#[test]
fn groups_appear_once_when_all_expected_targets_are_up() {
    let mut map = cluster(6, "ec:4+2");
    map.targets[5].state = TargetState::Down;
    assert!(!create_groups(&mut map, 6));
    assert!(target_back(&mut map, t(6)));
    assert!(create_groups(&mut map, 6));
    assert!(!create_groups(&mut map, 6));
    let groups = |map: &ClusterMap, scheme: &str| map.groups_of("hdd", scheme.parse().unwrap());
    assert_eq!(groups(&map, "ec:4+2"), Some((PgId(0), 24)));
    for (scheme, first, count) in [("single", 24, 6), ("replica:2", 30, 24), ("replica:3", 54, 24)] {
        assert_eq!(groups(&map, scheme), None, "no file has asked for {scheme}");
        assert_eq!(make_groups(&mut map, None, scheme.parse().unwrap()), Ok(true));
        assert_eq!(groups(&map, scheme), Some((PgId(first), count)), "{scheme}");
    }
    for (i, group) in map.groups.iter().enumerate() {
        assert_eq!(group.id, PgId(i as u32));
    }
}

#[test]
fn groups_placed_for_targets_that_are_gone_are_not_taken() {
    let mut map = cluster(7, "ec:4+2");
    let wanted = groups_for_new_files(&map, 7).remove(0);
    let placed = wanted.place();
    target_down(&mut map, t(7));
    assert!(!add_groups(&mut map, &wanted, placed.clone()));
    assert!(map.groups.is_empty());
    target_back(&mut map, t(7));
    assert!(add_groups(&mut map, &wanted, placed.clone()));
    assert!(!add_groups(&mut map, &wanted, placed), "the groups exist already");
    assert_eq!(map.groups.len(), 28);
}

#[test]
fn a_target_that_missed_writes_is_behind_until_caught_up() {
    let mut map = with_groups(6, "ec:4+2");
    assert!(target_down(&mut map, t(3)));
    assert!(!target_down(&mut map, t(3)), "no second epoch for the same loss");
    assert_eq!(map.groups[0].epoch, Epoch(2));
    assert_eq!(member_of(&map.groups[0], t(3)).unwrap().since, Epoch(1));
    assert_eq!(member_of(&map.groups[0], t(1)).unwrap().since, Epoch(2));
    assert!(target_back(&mut map, t(3)));
    assert_eq!(map.groups[0].epoch, Epoch(3));
    assert_eq!(state(&map, 0, 3), MemberState::Behind);
    assert!(caught_up(&mut map, t(3), PgId(0), Epoch(2)).is_err(), "an older epoch proves nothing");
    assert!(caught_up(&mut map, t(3), PgId(0), Epoch(3)).unwrap());
    assert_eq!((state(&map, 0, 3), map.groups[0].epoch), (MemberState::Current, Epoch(4)));
    assert!(!caught_up(&mut map, t(3), PgId(0), Epoch(4)).unwrap());
}

/// Found by the simulator: two members were away; the writes made meanwhile were only on a third one, which
/// was away when the two returned. Its log had no other copy, as the two keep parity.
#[test]
fn no_member_catches_up_while_those_with_all_writes_are_away() {
    for (gone, goes, knows) in [([4, 5], 3, false), ([4, 0], 3, true), ([0, 1], 2, true)] {
        let mut map = with_groups(6, "ec:4+2");
        let members: Vec<TargetId> = map.groups[0].members.iter().map(|m| m.target).collect();
        for place in gone {
            target_down(&mut map, members[place]);
        }
        let written = map.groups[0].epoch;
        for place in gone {
            target_back(&mut map, members[place]);
        }
        let last = members[goes];
        target_down(&mut map, last);
        let epoch = map.groups[0].epoch;
        assert_eq!(member_of(&map.groups[0], last).unwrap().since.max(written), Epoch(epoch.0 - 1));
        let first = members[gone[0]];
        match knows {
            true => assert!(caught_up(&mut map, first, PgId(0), epoch).unwrap()),
            false => {
                let error = caught_up(&mut map, first, PgId(0), epoch).unwrap_err();
                assert_eq!(error.kind, ErrorKind::Unavailable);
            }
        }
        assert!(target_back(&mut map, last));
        let epoch = map.groups[0].epoch;
        if !knows {
            assert_eq!(
                member_of(&map.groups[0], last).unwrap().state,
                MemberState::Current,
                "nothing was written without it"
            );
            assert!(caught_up(&mut map, first, PgId(0), epoch).unwrap());
        }
    }
}

#[test]
fn a_restarted_cluster_is_current_where_nothing_was_written() {
    let mut map = with_groups(6, "ec:4+2");
    for n in 1..=6 {
        target_down(&mut map, t(n));
    }
    assert_eq!(map.groups[0].current_count(), 0);
    for n in 1..=6 {
        target_back(&mut map, t(n));
    }
    // t1 and t2 were away while the other four were still writable.
    for (n, expected) in [(1, MemberState::Behind), (2, MemberState::Behind), (3, MemberState::Current)] {
        assert_eq!(state(&map, 0, n), expected, "t{n}");
    }
    assert!(map.groups[0].is_writable());
}

#[test]
fn targets_that_go_together_miss_nothing_of_each_other() {
    // All stop; t6 returns without its data.
    for at_once in [true, false] {
        let mut map = with_groups(6, "ec:4+2");
        let published = map.clone();
        for n in 1..=6 {
            target_down(&mut map, t(n));
        }
        if at_once {
            forget_unpublished_epochs(&published, &mut map);
        }
        target_lost(&mut map, t(6));
        for n in 1..=6 {
            target_back(&mut map, t(n));
        }
        let current = (1..=6).filter(|n| state(&map, 0, *n) == MemberState::Current).count();
        // One after the other: the first two left while the other four were still writable.
        assert_eq!((current, map.groups[0].is_lost()), if at_once { (4, false) } else { (3, true) });
    }
    // The published state counts, and does not change that a member was behind.
    let mut map = with_groups(6, "ec:4+2");
    target_down(&mut map, t(1));
    let published = map.clone();
    for n in 2..=3 {
        target_down(&mut map, t(n));
    }
    forget_unpublished_epochs(&published, &mut map);
    for n in 1..=3 {
        target_back(&mut map, t(n));
    }
    // With t2 four are current: the group is writable before t3 is back.
    assert_eq!(
        [1, 2, 3].map(|n| state(&map, 0, n)),
        [MemberState::Behind, MemberState::Current, MemberState::Behind]
    );
}

#[test]
fn the_last_copy_that_was_written_to_is_the_one_that_is_right() {
    let mut map = with_groups(2, "replica:2");
    target_down(&mut map, t(1));
    target_down(&mut map, t(2));
    target_back(&mut map, t(1));
    assert_eq!(state(&map, 0, 1), MemberState::Behind);
    target_back(&mut map, t(2));
    assert_eq!(state(&map, 0, 2), MemberState::Current);
}

#[test]
fn lost_cells_are_rebuilt_from_k_others_or_are_lost() {
    let mut map = with_groups(6, "ec:4+2");
    // t6 missed the writes made while the others were up; then all stop, and some return without their data.
    for n in [6, 1, 2, 3, 4, 5] {
        target_down(&mut map, t(n));
    }
    let written_until = map.groups[0].last_writable_epoch();
    target_lost(&mut map, t(2));
    assert_eq!(map.groups[0].last_writable_epoch(), written_until, "writes of that time still count");
    for n in 1..=6 {
        target_back(&mut map, t(n));
    }
    assert_eq!(state(&map, 0, 6), MemberState::Behind, "it missed the writes");
    assert_eq!((1..=5).map(|n| state(&map, 0, n)).filter(|s| *s == MemberState::Current).count(), 3);
    assert!(map.groups[0].is_lost(), "two missed the writes, and a third one lost them");

    let mut map = with_groups(6, "ec:4+2");
    for n in [1, 2] {
        target_lost(&mut map, t(n));
        target_back(&mut map, t(n));
    }
    let group = &map.groups[0];
    assert!(group.is_writable() && !group.is_lost());
    assert!((1..=2).all(|n| member_of(group, t(n)).unwrap().complete_since() == Epoch(0)));
    let epoch = group.epoch;
    assert!(caught_up(&mut map, t(1), PgId(0), epoch).unwrap());
    assert!(!member_of(&map.groups[0], t(1)).unwrap().is_lost(), "refilled");
    for n in [3, 4] {
        target_lost(&mut map, t(n));
        target_back(&mut map, t(n));
    }
    assert!(map.groups[0].is_lost());
    target_down(&mut map, t(1));
    assert!(map.groups[0].is_lost(), "whether members with all data are up or not");
}

#[test]
fn a_disk_put_back_keeps_what_was_not_refilled_meanwhile() {
    let mut map = with_groups(6, "ec:4+2");
    for n in [1, 2, 3] {
        target_lost(&mut map, t(n));
        target_back(&mut map, t(n));
    }
    assert!(map.groups[0].is_lost());
    target_put_back(&mut map, t(1));
    target_back(&mut map, t(1));
    // Since then only three others were current, so nothing was written without it except while there were
    // still four.
    assert_eq!(state(&map, 0, 1), MemberState::Behind);
    target_put_back(&mut map, t(3));
    target_back(&mut map, t(3));
    assert_eq!(state(&map, 0, 3), MemberState::Current, "nothing was written since it was lost");
    let epoch = map.groups[0].epoch;
    assert!(map.groups[0].is_writable() && caught_up(&mut map, t(2), PgId(0), epoch).unwrap());
    target_put_back(&mut map, t(2));
    let member = member_of(&map.groups[0], t(2)).unwrap();
    assert!(member.is_lost(), "it was refilled elsewhere, and that disk is gone");
}

#[test]
fn a_failed_target_does_not_come_back_by_itself() {
    let mut map = with_groups(6, "ec:4+2");
    assert!(target_failed(&mut map, t(1)));
    assert!(!target_back(&mut map, t(1)));
    assert!(!target_down(&mut map, t(1)));
    assert_eq!(state(&map, 0, 1), MemberState::Down);
    assert!(target_cleared(&mut map, t(1)));
    assert!(!target_cleared(&mut map, t(1)), "once is enough");
    assert!(target_back(&mut map, t(1)));
    assert_eq!(state(&map, 0, 1), MemberState::Behind);
}

proptest! {
    /// Model: in each state in which the group is writable, a write goes to all members that are not down; at
    /// times one returns without its data. Then a current member must hold every write.
    #[test]
    fn a_current_member_holds_every_write(
        scheme in prop::sample::select(vec!["ec:4+2", "replica:3", "replica:2", "single", "ec:3+1"]),
        steps in prop::collection::vec((0u8..12, 0u32..6), 1..80),
    ) {
        let width = scheme.parse::<Scheme>().unwrap().width() as u32;
        let mut map = with_groups(width, scheme);
        let mut held: Vec<std::collections::BTreeSet<usize>> = vec![Default::default(); width as usize];
        let mut writes = 0;
        for (step, target) in steps {
            let target = t(target % width + 1);
            let epoch = map.groups[0].epoch;
            match step {
                0..4 => { target_down(&mut map, target); }
                4..8 => { target_back(&mut map, target); }
                8 => {
                    target_lost(&mut map, target);
                    held[target.0 as usize - 1].clear();
                }
                _ => {
                    // It has the writes of the current members.
                    let peers = map.groups[0].members.iter().filter(|m| m.state == MemberState::Current);
                    let theirs = peers.flat_map(|m| held[m.target.0 as usize - 1].clone()).collect();
                    if state(&map, 0, target.0) == MemberState::Behind
                        && caught_up(&mut map, target, PgId(0), epoch).is_ok()
                    {
                        held[target.0 as usize - 1] = theirs;
                    }
                }
            }
            let group = &map.groups[0];
            if group.is_writable() {
                for m in group.members.iter().filter(|m| m.state != MemberState::Down) {
                    held[m.target.0 as usize - 1].insert(writes);
                }
                writes += 1;
            }
            for m in &group.members {
                prop_assert!((m.state == MemberState::Current) == (m.since == group.epoch)
                    || m.state != MemberState::Current);
                if m.state == MemberState::Current {
                    prop_assert_eq!(held[m.target.0 as usize - 1].len(), writes, "{} in {:?}", m.target, group);
                }
            }
        }
    }
}

#[test]
fn a_slow_target_is_demoted_only_where_all_others_are_current() {
    let mut map = with_groups(6, "ec:4+2");
    assert_eq!(needed_without(&map, t(1)), (2..=6).map(t).collect());
    let own = Speed { oldest: Duration::from_secs(3), ..Speed::default() };
    let mut alive = fast(2..=6);
    alive.insert(t(5), own);
    let all = (1..=6).flat_map(|n| fast([n]).into_keys().map(|t| (t, own))).collect();
    assert!(!demote_slow(&mut map.clone(), t(1), &own, &all), "all are slow");
    demote_slow(&mut map, t(1), &own, &alive);
    assert_eq!(state(&map, 0, 1), MemberState::Current, "another one is as slow");
    let alive = fast(2..=6);
    let mut map = with_groups(6, "ec:4+2");
    assert!(demote_slow(&mut map, t(1), &own, &alive) && !demote_slow(&mut map, t(1), &own, &alive));
    for group in &map.groups {
        let Some(member) = member_of(group, t(1)) else { continue };
        let expected = if group.scheme.parity >= 2 { MemberState::Down } else { MemberState::Current };
        assert_eq!(member.state, expected, "{}", group.scheme);
    }
    assert_eq!(map.target(t(1)).unwrap().state, TargetState::Up);
    demote_slow(&mut map, t(2), &own, &fast(1..=6));
    assert_eq!(state(&map, 0, 2), MemberState::Current, "one at a time");
    assert!(is_spare(&map, t(2)), "one may still fall silent");
    assert!(target_down(&mut map, t(2)) && !is_spare(&map, t(3)), "a third may not");
    assert!(rejoin_groups(&mut map, t(1)) && !rejoin_groups(&mut map, t(1)));
    assert_eq!(state(&map, 0, 1), MemberState::Behind);
    assert!(!rejoin_groups(&mut map, t(2)), "it is down, not demoted");
}

/// Found by the simulator: a target that forwarded calls died, so another one seemed slow and was demoted.
/// One more died. The two returned empty, and the slow one could not prove that it had missed nothing.
#[test]
fn a_slow_target_is_not_demoted_while_another_is_unreachable() {
    let mut map = with_groups(6, "ec:4+2");
    demote_slow(&mut map, t(1), &Speed::default(), &fast([2, 3, 5, 6]));
    for group in &map.groups {
        let Some(member) = member_of(group, t(1)) else { continue };
        let is_demoted = group.scheme.parity >= 2 && member_of(group, t(4)).is_none();
        assert_eq!(member.state == MemberState::Down, is_demoted, "{group:?}");
    }
    // The data of the two is refilled from the remaining four.
    for dead in [4, 5] {
        target_lost(&mut map, t(dead));
        assert!(target_back(&mut map, t(dead)));
    }
    for id in 0..24 {
        for back in [4, 5] {
            let epoch = map.groups[id].epoch;
            assert!(caught_up(&mut map, t(back), PgId(id as u32), epoch).unwrap());
        }
    }
}
