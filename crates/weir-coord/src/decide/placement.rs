//! Placement: which targets make up a placement group, and with which roles.
//!
//! Groups spread over fault domains (rack before host before node before target), a target's number of groups
//! is proportional to its capacity, and the roles (which data cell, which parity cell) rotate, so that no
//! target is "the parity target". Deterministic: the same candidates give the same groups.
//!
//! The time grows with targets plus groups: each node keeps its targets in the order of their load, and a few
//! of the least loaded ones are compared by how often they share a group with the members chosen so far.
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::map::Scheme;
use weir_proto::{NodeId, TargetId};

/// Groups of the scheme for new files per target. A file walks over all of them, so each target gets each
/// role about four times: enough to level the load, few enough to keep the map small.
const GROUPS_PER_TARGET: usize = 4;
/// Limit because every client holds them all: some 300 bytes for a group of twelve.
pub const GROUPS_MAX: usize = 4096;
/// Targets of equal load that are compared for one place: all of a small cluster, and enough of a large one
/// that hardly any two targets share more than one group.
const COMPARED_MAX: usize = 64;

/// A target that may become a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    pub target: TargetId,
    pub node: NodeId,
    /// With its rack, if it names one: `rack/host`.
    pub host: String,
    /// Bytes; 0: not known.
    pub capacity: u64,
}

/// Weight of the largest target. Disks of one kind differ by less than one part in 16.
const WEIGHT_MAX: u64 = 16;

/// A target's share of the load relative to the largest one.
pub(super) fn weight(capacity: u64, largest: u64) -> u64 {
    let (part, whole) = (u128::from(capacity) * u128::from(WEIGHT_MAX), u128::from(largest.max(1)));
    match capacity {
        0 => WEIGHT_MAX,
        _ => ((part + whole / 2) / whole).clamp(1, u128::from(WEIGHT_MAX)) as u64,
    }
}

/// Groups of a target in relation to its weight.
pub(super) fn relative_load(load: usize, weight: u64) -> u64 {
    load as u64 * WEIGHT_MAX / weight
}

/// The rack of a host; a host without a rack is a rack of its own.
pub fn rack_of(host: &str) -> &str {
    host.rsplit_once('/').map_or(host, |(rack, _)| rack)
}

/// Whether two processes share a host; not every process of a host needs to name its rack.
pub fn is_same_host(one: &str, other: &str) -> bool {
    let host = |text: &str| text.rsplit_once('/').map_or(text, |(_, host)| host).to_owned();
    host(one) == host(other)
}

/// The number of groups of a scheme on `target_count` targets.
pub fn group_count(scheme: Scheme, target_count: usize) -> usize {
    let per_target = if scheme.width() == 1 { 1 } else { GROUPS_PER_TARGET };
    (target_count * per_target).min(GROUPS_MAX)
}

/// Members of each group in the order of their roles. Empty when there are fewer candidates than the scheme
/// is wide.
pub fn place(scheme: Scheme, candidates: &[Candidate], groups: usize) -> Vec<Vec<TargetId>> {
    if scheme.width() == 0 || candidates.len() < scheme.width() {
        return Vec::new();
    }
    let mut board = Board::new(scheme.width(), candidates);
    let next = |group| board.next_group(group).into_iter().map(|t| candidates[t].target).collect();
    (0..groups).map(next).collect()
}

/// The load on each target of the groups placed so far. Targets, nodes and hosts are numbered from 0.
struct Board<'a> {
    width: usize,
    candidates: &'a [Candidate],
    nodes: Vec<NodeTargets>,
    node_of: Vec<usize>,
    weights: Vec<u64>,
    /// By target: groups that it is in,
    load: Vec<usize>,
    /// how often it has each role (`width` entries a target),
    roles: Vec<usize>,
    /// the other members of its groups, once for each group.
    partners: Vec<Vec<u32>>,
    /// For the group that is being placed: members by rack, by host and by node, and for each target the
    /// groups that it shares with them.
    chosen_in_rack: Vec<usize>,
    chosen_on_host: Vec<usize>,
    chosen_on_node: Vec<usize>,
    together: Vec<usize>,
}

/// Targets of one node that are not in the group that is being placed, in the order of their load, then in an
/// order that changes with each group that they get.
struct NodeTargets {
    rack: usize,
    host: usize,
    waiting: BTreeSet<(u64, u64, usize)>,
}

impl<'a> Board<'a> {
    fn new(width: usize, candidates: &'a [Candidate]) -> Board<'a> {
        let (mut racks, mut hosts): (BTreeMap<&str, usize>, BTreeMap<&str, usize>) = Default::default();
        let mut known: BTreeMap<(&str, NodeId), usize> = BTreeMap::new();
        let (mut nodes, mut node_of): (Vec<NodeTargets>, Vec<usize>) = Default::default();
        for candidate in candidates {
            let (racks_before, hosts_before) = (racks.len(), hosts.len());
            let rack = *racks.entry(rack_of(&candidate.host)).or_insert(racks_before);
            let host = *hosts.entry(&candidate.host).or_insert(hosts_before);
            let node = *known.entry((&candidate.host, candidate.node)).or_insert_with(|| {
                nodes.push(NodeTargets { rack, host, waiting: BTreeSet::new() });
                nodes.len() - 1
            });
            node_of.push(node);
        }
        let largest = candidates.iter().map(|c| c.capacity).max().unwrap_or(0);
        let mut board = Board {
            width,
            candidates,
            weights: candidates.iter().map(|c| weight(c.capacity, largest)).collect(),
            chosen_in_rack: vec![0; racks.len()],
            chosen_on_host: vec![0; hosts.len()],
            chosen_on_node: vec![0; nodes.len()],
            nodes,
            node_of,
            load: vec![0; candidates.len()],
            roles: vec![0; candidates.len() * width],
            partners: vec![Vec::new(); candidates.len()],
            together: vec![0; candidates.len()],
        };
        (0..candidates.len()).for_each(|target| board.put_back(target));
        board
    }

    fn next_group(&mut self, group: usize) -> Vec<usize> {
        let mut chosen: Vec<usize> = Vec::with_capacity(self.width);
        while chosen.len() < self.width {
            let target = self.best_target(group, chosen.len());
            self.take(target);
            chosen.push(target);
        }
        let members = self.assign_roles(chosen, group / self.width);
        self.count(&members);
        members
    }

    /// In the rack, on the host, then on the node with the fewest members yet: of the targets with the least
    /// load, the one that shares the fewest groups with the members.
    fn best_target(&self, group: usize, place: usize) -> usize {
        let rank = |node: usize| {
            let NodeTargets { rack, host, waiting } = &self.nodes[node];
            let least = waiting.first()?.0;
            let chosen = (self.chosen_in_rack[*rack], self.chosen_on_host[*host], self.chosen_on_node[node]);
            Some((chosen, least))
        };
        let best = (0..self.nodes.len()).filter_map(rank).min();
        let open: Vec<usize> = (0..self.nodes.len()).filter(|node| rank(*node) == best).collect();
        let from_each = COMPARED_MAX.div_ceil(open.len());
        // If there are more nodes than are compared, each place begins at another one.
        let begin = mix(group as u64, place as u64) as usize % open.len();
        let in_turn = open[begin..].iter().chain(&open[..begin]).map(|node| &self.nodes[*node].waiting);
        let compared = in_turn.flat_map(|waiting| {
            waiting.iter().take(from_each).filter(|(load, _, _)| best.is_some_and(|best| *load == best.1))
        });
        let of_target = |target: &usize| {
            (self.together[*target], mix(group as u64, u64::from(self.candidates[*target].target.0)))
        };
        let compared = compared.take(COMPARED_MAX).map(|(_, _, target)| *target);
        compared.min_by_key(of_target).expect("there are at least as many candidates as places")
    }

    /// Adds the target to the group that is being placed.
    fn take(&mut self, target: usize) {
        let node = self.node_of[target];
        let key = self.key(target);
        assert!(self.nodes[node].waiting.remove(&key), "a target is chosen once");
        self.chosen_in_rack[self.nodes[node].rack] += 1;
        self.chosen_on_host[self.nodes[node].host] += 1;
        self.chosen_on_node[node] += 1;
        self.partners[target].iter().for_each(|other| self.together[*other as usize] += 1);
    }

    /// Counts the group after it is placed.
    fn count(&mut self, members: &[usize]) {
        for target in members {
            let node = self.node_of[*target];
            self.chosen_in_rack[self.nodes[node].rack] = 0;
            self.chosen_on_host[self.nodes[node].host] = 0;
            self.chosen_on_node[node] = 0;
            self.partners[*target].iter().for_each(|other| self.together[*other as usize] = 0);
        }
        for (role, target) in members.iter().enumerate() {
            self.load[*target] += 1;
            self.roles[target * self.width + role] += 1;
            self.partners[*target].extend(members.iter().filter(|t| *t != target).map(|t| *t as u32));
            self.put_back(*target);
        }
    }

    fn put_back(&mut self, target: usize) {
        let key = self.key(target);
        self.nodes[self.node_of[target]].waiting.insert(key);
    }

    fn key(&self, target: usize) -> (u64, u64, usize) {
        let load = self.load[target];
        let order = mix(load as u64, u64::from(self.candidates[target].target.0));
        (relative_load(load, self.weights[target]), order, target)
    }

    /// An order that differs from round to round, rotated so that targets get the roles they had least.
    fn assign_roles(&self, mut members: Vec<usize>, round: usize) -> Vec<usize> {
        members.sort_unstable_by_key(|t| mix(round as u64, u64::from(self.candidates[*t].target.0)));
        let cost = |shift: &usize| -> usize {
            let times = |role: usize| {
                let n = self.roles[members[(role + shift) % self.width] * self.width + role];
                (n + 1) * (n + 1)
            };
            (0..self.width).map(times).sum()
        };
        let shift = (0..members.len()).min_by_key(cost).unwrap_or(0);
        members.rotate_left(shift);
        members
    }
}

/// SplitMix64's finalizer over both numbers: a fixed order that looks random.
pub(super) fn mix(a: u64, b: u64) -> u64 {
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
                        capacity: 1 << 40,
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

    /// The sizes that the design is made for: 10 and 50 servers of 96 disks, one process each.
    #[test]
    fn large_clusters_have_level_load_and_few_pairs() {
        for hosts in [10, 50] {
            let (targets, ec) = (candidates(hosts, 1, 96), scheme("ec:10+2"));
            let count = group_count(ec, targets.len());
            let groups = place(ec, &targets, count);
            assert_eq!(groups.len(), count);
            let (mut load, mut pairs) = (BTreeMap::new(), BTreeMap::new());
            for group in &groups {
                let mut on_host = BTreeMap::new();
                for t in group {
                    *load.entry(*t).or_insert(0usize) += 1;
                    *on_host.entry(&targets[t.0 as usize - 1].host).or_insert(0usize) += 1;
                    for other in group.iter().filter(|other| *other > t) {
                        *pairs.entry((*t, *other)).or_insert(0usize) += 1;
                    }
                }
                let most = on_host.values().max().unwrap();
                assert!(*most <= 12usize.div_ceil(hosts as usize), "{group:?} has {most} on one host");
            }
            assert_eq!(load.len(), targets.len(), "no target is left out");
            let (least, most) = (load.values().min().unwrap(), load.values().max().unwrap());
            assert!(most - least <= 2, "{hosts} hosts: {least} to {most} groups a target");
            let often = pairs.values().filter(|times| **times > 2).count();
            assert!(often * 100 <= pairs.len(), "{hosts} hosts: {often} of {} pairs", pairs.len());
        }
    }

    #[test]
    fn a_target_is_in_as_many_groups_as_it_is_large() {
        let mut targets = candidates(12, 1, 2);
        // Capacities as disks of one kind report them, one of half the size, one of a quarter, one unknown.
        for (n, candidate) in targets.iter_mut().enumerate() {
            candidate.capacity += n as u64 * 4096;
        }
        (targets[3].capacity, targets[10].capacity, targets[17].capacity) = (1 << 39, 1 << 38, 0);
        let groups = place(scheme("ec:4+2"), &targets, 400);
        let of = |n: usize| groups.iter().filter(|g| g.contains(&targets[n].target)).count();
        let usual = of(0);
        assert!((of(3) * 2).abs_diff(usual) <= usual / 10, "half: {} of {usual}", of(3));
        assert!((of(10) * 4).abs_diff(usual) <= usual / 10, "a quarter: {} of {usual}", of(10));
        assert!(of(17).abs_diff(usual) <= usual / 10 && of(20).abs_diff(usual) <= usual / 10);
        assert_eq!((weight(1, 1 << 40), weight(0, 0), weight(99, 100)), (1, 16, 16));
    }

    #[test]
    fn a_lost_rack_costs_no_more_cells_than_it_must() {
        for (racks, hosts_per_rack, text, most_allowed) in
            [(3, 4, "ec:4+2", 2), (6, 2, "ec:4+2", 1), (2, 5, "replica:2", 1), (4, 3, "ec:10+2", 3)]
        {
            let mut targets = candidates(racks * hosts_per_rack, 1, 2);
            for candidate in &mut targets {
                candidate.host = format!("rack{}/{}", candidate.node.0 / hosts_per_rack, candidate.host);
            }
            let rack = |t: &TargetId| rack_of(&targets.iter().find(|c| c.target == *t).unwrap().host);
            for group in place(scheme(text), &targets, 48) {
                for name in group.iter().map(rack) {
                    let lost = group.iter().filter(|t| rack(t) == name).count();
                    assert!(lost <= most_allowed, "{text}: {name} holds {lost} of {group:?}");
                }
            }
        }
        assert_eq!((rack_of("r1/h2"), rack_of("h2")), ("r1", "h2"));
        assert!(is_same_host("r1/h2", "h2") && !is_same_host("r1/h2", "r1/h3"));
    }

    #[test]
    fn a_lost_target_is_rebuilt_from_all_others() {
        for (hosts, nodes, text) in [(12, 1, "ec:4+2"), (1, 9, "ec:5+1"), (4, 3, "replica:3")] {
            let targets = candidates(hosts, nodes, 1);
            let groups = place(scheme(text), &targets, group_count(scheme(text), targets.len()));
            let mut others: BTreeMap<TargetId, BTreeSet<TargetId>> = BTreeMap::new();
            for group in &groups {
                group.iter().for_each(|t| others.entry(*t).or_default().extend(group));
            }
            let host_of = |t: &TargetId| &targets[t.0 as usize - 1].host;
            for c in &targets {
                let with = others[&c.target].len();
                // Copies on the same host are avoided, so such pairs are missing.
                let same_host = targets.iter().filter(|o| host_of(&o.target) == &c.host).count();
                let possible = if hosts >= 3 { targets.len() - same_host + 1 } else { targets.len() };
                assert!(with * 10 >= possible * 9, "{text}: {} shares groups with {with}", c.target);
            }
        }
    }

    #[test]
    fn too_few_targets_make_no_group() {
        assert!(place(scheme("ec:4+2"), &candidates(1, 1, 5), 24).is_empty());
        assert!(place(scheme("single"), &[], 1).is_empty());
    }
}
