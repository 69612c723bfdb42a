//! Claims about the space for new files: against a search of all ways to fill small targets, and by table.
use super::*;
use crate::decide::group_tests::{cluster, create_groups};
use proptest::prelude::*;
use std::collections::HashMap;
use weir_proto::map::TargetState;
use weir_proto::{GIB, MIB};

/// The most stripes, by trying all choices of members.
fn by_search(free: Vec<u8>, domains: &[u8], width: usize, known: &mut HashMap<Vec<u8>, u64>) -> u64 {
    if let Some(found) = known.get(&free) {
        return *found;
    }
    let mut counts: BTreeMap<u8, usize> = BTreeMap::new();
    domains.iter().for_each(|domain| *counts.entry(*domain).or_default() += 1);
    let most = most_in_domain(width, counts.values().copied());
    let mut best = 0;
    for chosen in 0..1u32 << free.len() {
        let members = || (0..free.len()).filter(|i| chosen & 1 << i != 0);
        let spread = counts.keys().all(|d| members().filter(|i| domains[*i] == *d).count() <= most);
        if members().count() != width || !spread || members().any(|i| free[i] == 0) {
            continue;
        }
        let mut left = free.clone();
        members().for_each(|i| left[i] -= 1);
        best = best.max(1 + by_search(left, domains, width, known));
    }
    known.insert(free, best);
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn as_many_stripes_fit_as_a_search_finds(
        targets in prop::collection::vec((0u8..4, 0u8..4), 1..7),
        width in 1usize..5,
    ) {
        let (free, domains): (Vec<u8>, Vec<u8>) = targets.into_iter().unzip();
        let names: Vec<String> = domains.iter().map(u8::to_string).collect();
        let spaces: Vec<TargetSpace<'_>> =
            free.iter().zip(&names).map(|(free, domain)| TargetSpace { domain, free: u64::from(*free) }).collect();
        let found = by_search(free.clone(), &domains, width, &mut HashMap::new());
        let expected = if free.len() < width { 0 } else { found };
        prop_assert_eq!(rows(width, &spaces), expected);
    }
}

fn spaces<'a>(free: &[u64]) -> Vec<TargetSpace<'a>> {
    free.iter().map(|free| TargetSpace { domain: "", free: *free }).collect()
}

#[test]
fn two_large_targets_among_small_ones_are_of_little_use() {
    let mut free = vec![99 * MIB; 6];
    free.extend([31 * GIB; 2]);
    // Each stripe needs four of the six small ones: 6 times 99 MiB, by 4 of 6 cells, with 4 of data.
    assert_eq!(rows(6, &spaces(&free)) * 4, 594 * MIB);
    free.truncate(6);
    assert_eq!(rows(6, &spaces(&free)) * 4, 396 * MIB, "all six are in each stripe");
    assert_eq!(rows(6, &spaces(&free[..5])), 0, "there is no group");
    assert_eq!(rows(1, &spaces(&[5, 7])), 12, "without redundancy it adds up");
    assert_eq!(rows(2, &spaces(&[5, 7, 100])), 12, "a copy each beside the large one");
    assert_eq!(rows(2, &spaces(&[u64::MAX; 3])), u64::MAX, "no sum overflows");
}

fn report(target: u32, capacity: u64, used: u64) -> TargetReport {
    TargetReport {
        target: TargetId(target),
        failed: false,
        capacity,
        used,
        under_replicated_cells: 0,
        damaged_blocks: 0,
        repaired_blocks: 0,
        stalled_ms: 0,
        position: 0,
    }
}

fn six() -> (ClusterMap, Vec<TargetReport>) {
    let mut map = cluster(6, "ec:4+2");
    assert!(create_groups(&mut map, 6));
    (map, (1..=6).map(|n| report(n, 1000, 100)).collect())
}

#[test]
fn the_space_of_equal_targets_is_the_sum_without_parity() {
    let (map, reports) = six();
    let space = file_space(&map, &reports, None, None);
    assert_eq!((space.used, space.free, space.refuses), (400, 3600, false));
    assert_eq!((space.capacity(), space.free_of_targets), (4000, 3600));
    assert_eq!(file_space(&map, &[], None, None), FileSpace::default(), "nothing has reported yet");
    // Another scheme has no groups yet: the first file has them made.
    let twice = "replica:2".parse().unwrap();
    let none = file_space(&map, &reports, Some(twice), None);
    assert_eq!((none.used, none.free, none.refuses), (300, 2700, false));
    let wide = "ec:5+2".parse().unwrap();
    let none = file_space(&map, &reports, Some(wide), None);
    assert_eq!((none.free, none.refuses), (0, false), "there are too few targets for any");
}

#[test]
fn a_full_target_of_six_refuses_all_and_a_dead_one_does_not() {
    let (mut map, mut reports) = six();
    (reports[2].capacity, reports[2].used) = (100, 100);
    let full = file_space(&map, &reports, None, None);
    assert_eq!((full.free, full.refuses), (0, true));
    assert_eq!(full.free_of_targets, 3000, "which is no help");
    // Writes continue without a member that is down.
    map.targets[2].state = TargetState::Down;
    for group in &mut map.groups {
        group
            .members
            .iter_mut()
            .filter(|m| m.target == TargetId(3))
            .for_each(|m| m.state = MemberState::Down);
    }
    let down = file_space(&map, &reports, None, None);
    assert_eq!((down.free, down.refuses), (3600, false));
    // Three are down: no stripe can be written. That is another trouble than a full target.
    for group in &mut map.groups {
        group.members.iter_mut().take(3).for_each(|m| m.state = MemberState::Down);
    }
    assert_eq!(file_space(&map, &reports, None, None).free, 0);
}

#[test]
fn stripes_are_spread_over_racks() {
    let mut map = cluster(8, "ec:2+2");
    for (n, node) in map.nodes.iter_mut().enumerate() {
        node.host = format!("r{}/h{n}", n / 2); // two in each of four racks
    }
    assert!(create_groups(&mut map, 8));
    // One rack is nearly full: each stripe has a member there.
    let reports: Vec<_> = (1..=8).map(|n| report(n, if n <= 2 { 10 } else { 1000 }, 0)).collect();
    assert_eq!(file_space(&map, &reports, None, None).free, 2 * 20);
}
