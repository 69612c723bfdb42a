//! Which targets take over the places of lost targets.
//!
//! A plan has a few steps at a time; the remaining places are planned again when those are done.
//! Deterministic: the same map and reports give the same plan. Groups with the least redundancy come first.
use super::placement::{mix, rack_of, relative_load, weight};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use weir_proto::map::{ClusterMap, Group, MemberState, Target, TargetState};
use weir_proto::{NodeId, PgId, TargetId};

/// Places that one target is filled for at a time: more would take as long, and leave more groups without
/// full redundancy.
pub const FILLED_AT_ONCE: usize = 2;
/// Places in which a target may be behind when it takes another one.
const BEHIND_MAX: usize = 2 * FILLED_AT_ONCE;
/// No target is filled above this part of its capacity: writes need space, too.
pub(super) const FULL_PER_MILLE: u64 = 850;

/// A place with less than this part of its target's average place does not move for balance.
const TRIFLE_PART: u64 = 8;

/// Facts about targets that are not in the map.
#[derive(Clone, Default, Debug)]
pub struct Observed {
    /// Targets that are not expected to return.
    pub lost: BTreeSet<TargetId>,
    /// Targets whose places move away while they still serve them.
    pub draining: BTreeSet<TargetId>,
    /// Bytes on each target, as it last reported.
    pub used: BTreeMap<TargetId, u64>,
    /// Bytes of a place of a group, where one was copied lately. The others are estimated.
    pub sizes: BTreeMap<PgId, u64>,
}

/// A step: a place of a group moves to another target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    pub group: PgId,
    pub place: usize,
    pub from: TargetId,
    pub to: TargetId,
}

/// Why a place does not move to another target now.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Hindrance {
    /// Fewer than k members are current: the data cannot be rebuilt.
    TooFew,
    /// No target of the pool is outside the group.
    NoTarget,
    /// There are such targets, and their disks are too full.
    Full,
    /// Another member of the group is repaired first.
    Repaired,
    /// The suitable targets are being filled for other places.
    Busy,
}

impl fmt::Display for Hindrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hindrance::TooFew => "too few of the other targets have everything",
            Hindrance::NoTarget => "there is no target to take its place",
            Hindrance::Full => "the targets that could take its place are too full",
            Hindrance::Repaired => "another target of the group is repaired first",
            Hindrance::Busy => "other places are filled first",
        })
    }
}

/// The steps to take now, and the places that wait.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Plan {
    pub steps: Vec<Step>,
    pub waiting: Vec<(PgId, TargetId, Hindrance)>,
}

/// Places of lost targets in groups that can be rebuilt.
pub fn plan(map: &ClusterMap, observed: &Observed) -> Plan {
    let mut board = Board::new(map, observed);
    let is_lost = |g: &&Group| g.scheme.parity > 0 && board.lost_place(g).is_some();
    let mut groups: Vec<&Group> = map.groups.iter().filter(is_lost).collect();
    groups.sort_by_key(|g| (spare(g), g.id));
    let mut plan = Plan::default();
    for group in groups {
        let Some(place) = board.lost_place(group) else { continue };
        let from = group.members[place].target;
        match board.choose(group, from) {
            Ok(to) => {
                board.take(group, from, to);
                plan.steps.push(Step { group: group.id, place, from, to });
            }
            Err(why) => plan.waiting.push((group.id, from, why)),
        }
    }
    plan
}

/// Current members beyond the required k.
pub fn spare(group: &Group) -> usize {
    group.current_count().saturating_sub(usize::from(group.scheme.data))
}

pub(super) struct Board<'a> {
    map: &'a ClusterMap,
    observed: &'a Observed,
    hosts: BTreeMap<NodeId, &'a str>,
    nodes: BTreeMap<TargetId, NodeId>,
    /// The groups of each target, by index,
    groups: BTreeMap<TargetId, Vec<usize>>,
    /// how many more it gets,
    gets: BTreeMap<TargetId, usize>,
    /// how many it is being filled for,
    filled: BTreeMap<TargetId, usize>,
    /// in how many it is behind, filled or not,
    behind: BTreeMap<TargetId, usize>,
    /// and the bytes that it has, or will have.
    used: BTreeMap<TargetId, u64>,
    /// The average size of its places whose size is not known.
    mean: BTreeMap<TargetId, u64>,
}

impl<'a> Board<'a> {
    pub(super) fn new(map: &'a ClusterMap, observed: &'a Observed) -> Board<'a> {
        let mut board = Board {
            map,
            observed,
            hosts: map.nodes.iter().map(|n| (n.id, n.host.as_str())).collect(),
            nodes: map.targets.iter().map(|t| (t.id, t.node)).collect(),
            groups: BTreeMap::new(),
            gets: BTreeMap::new(),
            filled: BTreeMap::new(),
            behind: BTreeMap::new(),
            used: observed.used.clone(),
            mean: BTreeMap::new(),
        };
        for (index, group) in map.groups.iter().enumerate() {
            for member in &group.members {
                board.groups.entry(member.target).or_default().push(index);
                if member.is_filled(map.level) {
                    *board.filled.entry(member.target).or_default() += 1;
                }
                if member.state == MemberState::Behind {
                    *board.behind.entry(member.target).or_default() += 1;
                }
            }
        }
        board.mean = observed.used.iter().map(|(t, used)| (*t, board.mean_of(*t, *used))).collect();
        for found in &map.moves {
            let group = map.group(found.group);
            let member = group.and_then(|g| Some((g, g.members.get(usize::from(found.place))?)));
            if let Some((group, member)) = member {
                board.take(group, member.target, found.to);
            }
        }
        board
    }

    /// The group's first place whose target is down and lost.
    fn lost_place(&self, group: &Group) -> Option<usize> {
        let is_lost = |t: &TargetId| self.observed.lost.contains(t);
        group.members.iter().position(|m| m.state == MemberState::Down && is_lost(&m.target))
    }

    pub(super) fn choose(&self, group: &Group, from: TargetId) -> Result<TargetId, Hindrance> {
        if !group.is_writable() {
            return Err(Hindrance::TooFew);
        }
        let is_member = |t: &Target| group.members.iter().any(|m| m.target == t.id);
        let is_free = |t: &&Target| {
            let leaves = self.observed.lost.contains(&t.id) || self.observed.draining.contains(&t.id);
            t.state == TargetState::Up && t.pool == group.pool && !leaves
        };
        let others: Vec<&Target> =
            self.map.targets.iter().filter(is_free).filter(|t| !is_member(t)).collect();
        if others.is_empty() {
            return Err(Hindrance::NoTarget);
        }
        let bytes = self.bytes_of_place(group, from);
        let has_space = |t: &&&Target| {
            let full = u128::from(t.capacity) * u128::from(FULL_PER_MILLE) / 1000;
            u128::from(self.used_of(t.id)) + u128::from(bytes) <= full
        };
        let with_space: Vec<&Target> = others.iter().filter(has_space).copied().collect();
        let near = self.nearness(group, from);
        let least = with_space.iter().map(|t| near(t)).min().ok_or(Hindrance::Full)?;
        // In groups without a spare member all lost places are filled at once.
        if spare(group) > 0 && group.members.iter().any(|m| m.state == MemberState::Behind) {
            return Err(Hindrance::Repaired);
        }
        let fit = with_space.into_iter().filter(|t| near(t) == least);
        let open = fit.filter(|t| !self.is_busy(t.id));
        let together = self.together(group);
        let largest = others.iter().map(|t| t.capacity).max().unwrap_or(0);
        let rank = |t: &&Target| {
            let shared = together.get(&t.id).copied().unwrap_or(0);
            (
                relative_load(self.load(t.id), weight(t.capacity, largest)),
                shared,
                mix(u64::from(group.id.0), u64::from(t.id.0)),
            )
        };
        open.min_by_key(rank).map(|t| t.id).ok_or(Hindrance::Busy)
    }

    /// For a target: the number of other members of the group in its rack, on its host, and on its node.
    pub(super) fn nearness(&self, group: &Group, from: TargetId) -> impl Fn(&Target) -> [usize; 3] {
        let mut others: BTreeMap<(&str, &str, NodeId), usize> = BTreeMap::new();
        let at = |node: NodeId| {
            let host = self.hosts.get(&node).copied().unwrap_or_default();
            (rack_of(host), host, node)
        };
        for member in group.members.iter().filter(|m| m.target != from) {
            if let Some(node) = self.nodes.get(&member.target) {
                *others.entry(at(*node)).or_default() += 1;
            }
        }
        move |t| {
            let (rack, host, node) = at(t.node);
            let count = |is_near: &dyn Fn(&(&str, &str, NodeId)) -> bool| {
                others.iter().filter(|(at, _)| is_near(at)).map(|(_, n)| *n).sum()
            };
            [count(&|(r, ..)| *r == rack), count(&|(_, h, _)| *h == host), count(&|(.., n)| *n == node)]
        }
    }

    /// The number of groups that each target shares with the members of the group.
    fn together(&self, group: &Group) -> BTreeMap<TargetId, usize> {
        let mut together = BTreeMap::new();
        let of = |t: TargetId| self.groups.get(&t).map_or(&[][..], |all| all);
        for index in group.members.iter().flat_map(|m| of(m.target)) {
            for member in &self.map.groups[*index].members {
                *together.entry(member.target).or_default() += 1;
            }
        }
        together
    }

    fn load(&self, target: TargetId) -> usize {
        let has = self.groups.get(&target).map_or(0, Vec::len);
        has + self.gets.get(&target).copied().unwrap_or(0)
    }

    pub(super) fn used_of(&self, target: TargetId) -> u64 {
        self.used.get(&target).copied().unwrap_or(0)
    }

    /// The size of a place, if it is known; or the average of the target's other places, or of the members'.
    pub(super) fn bytes_of_place(&self, group: &Group, from: TargetId) -> u64 {
        let known = self.observed.sizes.get(&group.id);
        let others = || group.members.iter().filter_map(|m| self.mean.get(&m.target)).max();
        known.or_else(|| self.mean.get(&from)).or_else(others).copied().unwrap_or(0)
    }

    fn mean_of(&self, target: TargetId, used: u64) -> u64 {
        let groups = self.groups.get(&target).map_or(&[][..], |all| all);
        let known = groups.iter().filter_map(|n| self.observed.sizes.get(&self.map.groups[*n].id));
        let (sum, count) = known.fold((0u64, 0), |(sum, count), size| (sum.saturating_add(*size), count + 1));
        used.saturating_sub(sum) / (groups.len() as u64).saturating_sub(count).max(1)
    }

    /// Whether so few of the target's bytes are in the place that moving it evens nothing out.
    pub(super) fn is_trifle(&self, bytes: u64, from: TargetId) -> bool {
        let places = self.groups.get(&from).map_or(0, Vec::len) as u64;
        self.used_of(from) / places.max(1) > bytes.saturating_mul(TRIFLE_PART)
    }

    /// Whether it is already being filled for the maximum number of places. A member that was filled lists a
    /// few more stripes before it is current: only many of these count.
    pub(super) fn is_busy(&self, target: TargetId) -> bool {
        let count = |of: &BTreeMap<TargetId, usize>| of.get(&target).copied().unwrap_or(0);
        count(&self.filled) >= FILLED_AT_ONCE || count(&self.behind) >= BEHIND_MAX
    }

    pub(super) fn take(&mut self, group: &Group, from: TargetId, to: TargetId) {
        let bytes = self.bytes_of_place(group, from);
        *self.gets.entry(to).or_default() += 1;
        *self.filled.entry(to).or_default() += 1;
        *self.used.entry(to).or_default() += bytes;
        if let Some(used) = self.used.get_mut(&from) {
            *used = used.saturating_sub(bytes);
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
