//! Which places move away from targets that still serve them: those of drained targets, and those of full
//! targets that refused new data.
//!
//! A few at a time; the remaining places are planned again when those are done. Each place that does not move
//! now has a reason.
use super::moves::MOVES_MAX;
use super::plan::{Board, Hindrance, Observed, Plan, Step};
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::map::{ClusterMap, Group, Member, MemberState};
use weir_proto::{PgId, TargetId};

/// Places that leave one target at a time: its disk also serves readers.
pub(super) const LEAVING_AT_ONCE: usize = 2;

/// Places of drained targets that begin to move now, and those that wait.
pub fn plan_drain(map: &ClusterMap, observed: &Observed) -> Plan {
    let drained = |group| drained_place(group, observed).map(|place| (group, place));
    plan_leaving(map, observed, map.groups.iter().filter_map(drained))
}

/// Places of targets that are too full for new data of their group, which begin to move now, and those that
/// wait.
pub fn plan_full(map: &ClusterMap, observed: &Observed, refused: &BTreeSet<(PgId, TargetId)>) -> Plan {
    let place = |(group, target): &(PgId, TargetId)| {
        let group = map.group(*group)?;
        let serves = |m: &Member| m.target == *target && m.state == MemberState::Current;
        group.members.iter().position(serves).map(|place| (group, place))
    };
    plan_leaving(map, observed, refused.iter().filter_map(place))
}

fn plan_leaving<'a>(
    map: &ClusterMap,
    observed: &Observed,
    places: impl Iterator<Item = (&'a Group, usize)>,
) -> Plan {
    let (mut board, mut plan) = (Board::new(map, observed), Plan::default());
    let mut leaving = leaving(map);
    let mut moving = map.moves.len();
    for (group, place) in places.filter(|(g, _)| map.move_of(g.id).is_none()) {
        let from = group.members[place].target;
        let many = moving >= MOVES_MAX || leaving.get(&from).copied().unwrap_or(0) >= LEAVING_AT_ONCE;
        match fit(group, &board, from).and_then(|to| if many { Err(Hindrance::Busy) } else { Ok(to) }) {
            Ok(to) => {
                board.take(group, from, to);
                *leaving.entry(from).or_default() += 1;
                moving += 1;
                plan.steps.push(Step { group: group.id, place, from, to });
            }
            Err(why) => plan.waiting.push((group.id, from, why)),
        }
    }
    plan
}

/// The number of places that leave each target now.
pub(super) fn leaving(map: &ClusterMap) -> BTreeMap<TargetId, usize> {
    let mut leaving: BTreeMap<TargetId, usize> = BTreeMap::new();
    for found in &map.moves {
        let from = map.group(found.group).and_then(|g| g.members.get(usize::from(found.place)));
        from.into_iter().for_each(|m| *leaving.entry(m.target).or_default() += 1);
    }
    leaving
}

fn fit(group: &Group, board: &Board<'_>, from: TargetId) -> Result<TargetId, Hindrance> {
    let to = board.choose(group, from)?;
    match group.members.iter().all(|m| m.state == MemberState::Current) {
        true => Ok(to),
        false => Err(Hindrance::Repaired),
    }
}

/// The group's first place on a drained target that still serves it.
fn drained_place(group: &Group, observed: &Observed) -> Option<usize> {
    let leaves = |t: &TargetId| observed.draining.contains(t) && !observed.lost.contains(t);
    group.members.iter().position(|m| m.state == MemberState::Current && leaves(&m.target))
}

#[cfg(test)]
#[path = "drain_tests.rs"]
mod tests;
