//! Placement: which targets make up a placement group, and in which role.
//!
//! Groups spread over fault domains (host before node before target), every target is in equally many groups,
//! and the roles (which data cell, which parity cell) rotate, so that no target is "the parity target".
//! Deterministic: the same candidates give the same groups.
use std::collections::BTreeMap;
use weir_proto::map::Scheme;
use weir_proto::{NodeId, TargetId};

/// Groups of the scheme for new files per target. A file walks over all of them, so each target gets each role
/// about four times: enough to level the load, few enough to keep the map small.
const GROUPS_PER_TARGET: usize = 4;
/// The map goes to every client: some 100 bytes a group.
const GROUPS_MAX: usize = 4096;

/// A target that may become a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    pub target: TargetId,
    pub node: NodeId,
    pub host: String,
}

/// How many groups a scheme gets on so many targets.
pub fn group_count(scheme: Scheme, target_count: usize) -> usize {
    let per_target = if scheme.width() == 1 { 1 } else { GROUPS_PER_TARGET };
    (target_count * per_target).min(GROUPS_MAX)
}

/// Members of each group in the order of their roles. Empty when there are fewer candidates than the scheme is wide.
pub fn place(scheme: Scheme, candidates: &[Candidate], groups: usize) -> Vec<Vec<TargetId>> {
    if candidates.len() < scheme.width() {
        return Vec::new();
    }
    let mut load = Load::default();
    (0..groups)
        .map(|group| {
            let chosen = choose_set(scheme.width(), candidates, &load, group);
            let members = assign_roles(chosen, &load, group / scheme.width());
            load.count(&members);
            members
        })
        .collect()
}

/// What the groups placed so far ask of each target.
#[derive(Default)]
struct Load {
    groups: BTreeMap<TargetId, usize>,
    roles: BTreeMap<(TargetId, usize), usize>,
    pairs: BTreeMap<(TargetId, TargetId), usize>,
}

impl Load {
    fn count(&mut self, members: &[TargetId]) {
        for (role, target) in members.iter().enumerate() {
            *self.groups.entry(*target).or_default() += 1;
            *self.roles.entry((*target, role)).or_default() += 1;
            for other in members {
                *self.pairs.entry((*target, *other)).or_default() += 1;
            }
        }
    }
    fn groups_with(&self, target: TargetId) -> usize {
        self.groups.get(&target).copied().unwrap_or(0)
    }
    fn times_in_role(&self, target: TargetId, role: usize) -> usize {
        self.roles.get(&(target, role)).copied().unwrap_or(0)
    }
    fn times_together(&self, target: TargetId, others: &[&Candidate]) -> usize {
        others.iter().map(|o| self.pairs.get(&(target, o.target)).copied().unwrap_or(0)).sum()
    }
}

/// One after the other, the candidate that shares the least with those already chosen and carries the least.
fn choose_set(width: usize, candidates: &[Candidate], load: &Load, group: usize) -> Vec<TargetId> {
    let mut chosen: Vec<&Candidate> = Vec::with_capacity(width);
    while chosen.len() < width {
        let next = candidates
            .iter()
            .filter(|c| !chosen.iter().any(|o| o.target == c.target))
            .min_by_key(|c| {
                (
                    chosen.iter().filter(|o| o.host == c.host).count(),
                    chosen.iter().filter(|o| o.node == c.node).count(),
                    load.groups_with(c.target),
                    load.times_together(c.target, &chosen),
                    mix(group as u64, u64::from(c.target.0)),
                )
            })
            .expect("there are at least as many candidates as places");
        chosen.push(next);
    }
    chosen.into_iter().map(|c| c.target).collect()
}

/// An order that differs from round to round, in the rotation whose roles its targets had least.
fn assign_roles(mut members: Vec<TargetId>, load: &Load, round: usize) -> Vec<TargetId> {
    members.sort_unstable_by_key(|t| mix(round as u64, u64::from(t.0)));
    let cost = |shift: &usize| -> usize {
        let width = members.len();
        (0..width)
            .map(|role| {
                let n = load.times_in_role(members[(role + shift) % width], role);
                (n + 1) * (n + 1)
            })
            .sum()
    };
    let shift = (0..members.len()).min_by_key(cost).unwrap_or(0);
    members.rotate_left(shift);
    members
}

/// SplitMix64's finalizer over both numbers: a fixed order that looks random.
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(hosts: u32, nodes_per_host: u32, targets_per_node: u32) -> Vec<Candidate> {
        let mut all = Vec::new();
        for h in 0..hosts {
            for n in 0..nodes_per_host {
                for _ in 0..targets_per_node {
                    all.push(Candidate {
                        target: TargetId(all.len() as u32 + 1),
                        node: NodeId(h * nodes_per_host + n),
                        host: format!("host{h}"),
                    });
                }
            }
        }
        all
    }
    fn scheme(text: &str) -> Scheme {
        text.parse().unwrap()
    }
    /// Smallest and largest number of times that a target has a role.
    fn role_range(groups: &[Vec<TargetId>], targets: &[Candidate], role: usize) -> (usize, usize) {
        let counts: Vec<usize> =
            targets.iter().map(|c| groups.iter().filter(|g| g[role] == c.target).count()).collect();
        (*counts.iter().min().unwrap(), *counts.iter().max().unwrap())
    }

    #[test]
    fn six_targets_take_each_role_of_4_2_equally_often() {
        let targets = candidates(1, 6, 1);
        let groups = place(scheme("ec:4+2"), &targets, group_count(scheme("ec:4+2"), 6));
        assert_eq!(groups.len(), 24);
        for role in 0..6 {
            assert_eq!(role_range(&groups, &targets, role), (4, 4), "role {role}");
        }
    }

    #[test]
    fn members_differ_and_load_is_level() {
        for (hosts, nodes, per_node) in [(1, 8, 1), (1, 1, 12), (7, 1, 1), (4, 2, 3), (5, 3, 2)] {
            let targets = candidates(hosts, nodes, per_node);
            for text in ["single", "replica:2", "replica:3", "ec:4+2", "ec:5+1"] {
                let groups = place(scheme(text), &targets, group_count(scheme(text), targets.len()));
                let mut load = BTreeMap::new();
                for group in &groups {
                    let mut sorted = group.clone();
                    sorted.sort_unstable();
                    sorted.dedup();
                    assert_eq!(sorted.len(), scheme(text).width(), "{text}: a target twice in {group:?}");
                    for t in group {
                        *load.entry(*t).or_insert(0usize) += 1;
                    }
                }
                let (least, most) = (load.values().min().unwrap(), load.values().max().unwrap());
                assert_eq!(load.len(), targets.len(), "{text} leaves a target unused");
                // Two, not one: fault domains come before level load.
                assert!(
                    most - least <= 2,
                    "{text} on {hosts}x{nodes}x{per_node}: {least} to {most} groups a target"
                );
            }
        }
    }

    #[test]
    fn a_lost_host_costs_no_more_cells_than_it_must() {
        for (hosts, per_host, text, most_allowed) in
            [(3, 2, "ec:4+2", 2), (6, 3, "ec:4+2", 1), (4, 4, "replica:3", 1), (2, 3, "replica:2", 1)]
        {
            let targets = candidates(hosts, 1, per_host);
            let host_of = |t: TargetId| &targets.iter().find(|c| c.target == t).unwrap().host;
            for group in place(scheme(text), &targets, 24) {
                for host in 0..hosts {
                    let lost = group.iter().filter(|t| *host_of(**t) == format!("host{host}")).count();
                    assert!(lost <= most_allowed, "{text}: host{host} holds {lost} of {group:?}");
                }
            }
        }
    }

    #[test]
    fn too_few_targets_give_no_group() {
        assert!(place(scheme("ec:4+2"), &candidates(1, 1, 5), 24).is_empty());
        assert!(place(scheme("single"), &[], 1).is_empty());
    }
}
