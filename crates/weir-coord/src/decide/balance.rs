//! Which places move from full targets to emptier ones of their pool.
//!
//! Balancing begins when two targets differ by more than 2 % of their capacity and ends at 1 %. No move puts
//! more members of a group on one host than before, nor fills a target above the limit of rebuilds.
use super::drain::{LEAVING_AT_ONCE, leaving};
use super::moves::MOVES_MAX;
use super::plan::{Board, FULL_PER_MILLE, Observed, Step};
use std::collections::BTreeMap;
use weir_proto::TargetId;
use weir_proto::map::{ClusterMap, Group, MemberState, Target, TargetState};

/// Per mille of the capacity by which two targets differ when balancing begins, and when it ends.
const BEGINS_PER_MILLE: u64 = 20;
const ENDS_PER_MILLE: u64 = 10;
/// Number of the fullest and of the emptiest targets that are compared: a plan takes milliseconds.
const COMPARED_MAX: usize = 8;

/// Places that begin to move now.
pub fn plan_balance(map: &ClusterMap, observed: &Observed) -> Vec<Step> {
    let (mut board, mut steps) = (Board::new(map, observed), Vec::new());
    let mut leaving = leaving(map);
    let mut pools: Vec<&str> = map.targets.iter().map(|t| t.pool.as_str()).collect();
    pools.sort_unstable();
    pools.dedup();
    let under_way = map.moves.iter().any(|found| moves_for_balance(map, observed, found.group));
    let least = if under_way { ENDS_PER_MILLE } else { BEGINS_PER_MILLE };
    for pool in pools {
        while map.moves.len() + steps.len() < MOVES_MAX
            && let Some(step) = next_step(map, observed, &board, &leaving, &steps, (pool, least))
        {
            let group = map.group(step.group).expect("it was found there");
            board.take(group, step.from, step.to);
            *leaving.entry(step.from).or_default() += 1;
            steps.push(step);
        }
    }
    steps
}

fn moves_for_balance(map: &ClusterMap, observed: &Observed, group: weir_proto::PgId) -> bool {
    let found = map.move_of(group).zip(map.group(group));
    let from = found.and_then(|(found, g)| g.members.get(usize::from(found.place)));
    from.is_some_and(|m| !observed.draining.contains(&m.target))
}

/// The next move from the fullest target with a movable place to the emptiest one that can take it.
fn next_step(
    map: &ClusterMap,
    observed: &Observed,
    board: &Board<'_>,
    leaving: &BTreeMap<TargetId, usize>,
    begun: &[Step],
    (pool, least): (&str, u64),
) -> Option<Step> {
    let takes_part = |t: &&Target| {
        let leaves = observed.lost.contains(&t.id) || observed.draining.contains(&t.id);
        t.pool == pool && t.state == TargetState::Up && t.capacity > 0 && !leaves
    };
    let mut targets: Vec<&Target> = map.targets.iter().filter(takes_part).collect();
    targets.sort_by_key(|t| (per_mille(board.used_of(t.id), t.capacity), t.id));
    for from in targets.iter().rev().take(COMPARED_MAX) {
        if leaving.get(&from.id).copied().unwrap_or(0) >= LEAVING_AT_ONCE {
            continue;
        }
        for to in targets.iter().filter(|to| !board.is_busy(to.id)).take(COMPARED_MAX) {
            let fullness = |t: &Target| per_mille(board.used_of(t.id), t.capacity);
            if fullness(from).saturating_sub(fullness(to)) <= least {
                break; // the others are fuller
            }
            let groups = map.groups.iter().filter(|g| begun.iter().all(|step| step.group != g.id));
            // The largest: fewest places move. Of equal ones the first.
            let steps = groups.filter_map(|g| step_of(map, board, g, from, to)).rev();
            if let Some((_, step)) = steps.max_by_key(|(bytes, _)| *bytes) {
                return Some(step);
            }
        }
    }
    None
}

/// A step if the group's place may move between these targets, and the move evens out their load; with the
/// place's bytes.
fn step_of(
    map: &ClusterMap,
    board: &Board<'_>,
    group: &Group,
    from: &Target,
    to: &Target,
) -> Option<(u64, Step)> {
    let is_current = group.members.iter().all(|m| m.state == MemberState::Current);
    let place = group.members.iter().position(|m| m.target == from.id)?;
    let is_member = group.members.iter().any(|m| m.target == to.id);
    if !is_current || is_member || map.move_of(group.id).is_some() {
        return None;
    }
    let near = board.nearness(group, from.id);
    let bytes = board.bytes_of_place(group, from.id);
    let gets = per_mille(board.used_of(to.id).saturating_add(bytes), to.capacity);
    let keeps = per_mille(board.used_of(from.id).saturating_sub(bytes), from.capacity);
    let evens = gets <= keeps && gets <= FULL_PER_MILLE && !board.is_trifle(bytes, from.id);
    let fits = near(to) <= near(from) && evens;
    fits.then_some((bytes, Step { group: group.id, place, from: from.id, to: to.id }))
}

fn per_mille(used: u64, capacity: u64) -> u64 {
    (u128::from(used) * 1000).checked_div(u128::from(capacity)).unwrap_or(1000) as u64
}

#[cfg(test)]
#[path = "balance_tests.rs"]
mod tests;
