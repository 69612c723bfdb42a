//! How much a new file can still take: from the free space of each target, the groups, and the scheme.
//!
//! A stripe takes one cell on each of k + m different targets, so free space cannot be added up: large
//! targets are of no use to files once the others are full. Pure; programs (`df`) and operators (`weir
//! status`) get one answer.
use super::groups::{candidates, pools};
use super::placement::rack_of;
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::TargetId;
use weir_proto::coord::TargetReport;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Scheme};

/// A target that may take data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetSpace<'a> {
    /// Its rack, or its host if that is in none: a stripe is spread over them as evenly as possible.
    pub domain: &'a str,
    pub free: u64,
}

/// Space for files, without redundancy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileSpace {
    pub used: u64,
    /// The most that a new file could take.
    pub free: u64,
    /// Groups for new files have enough members, and none takes data: some member of each is full.
    pub refuses: bool,
    /// The sum of the targets' free space, which is more if they are of unequal size.
    pub free_of_targets: u64,
}

impl FileSpace {
    pub fn capacity(&self) -> u64 {
        self.used.saturating_add(self.free)
    }
    /// A tenth of the targets' free space or more is of no use to files.
    pub fn is_uneven(&self) -> bool {
        self.free < self.free_of_targets / 10 * 9
    }
}

/// The space for new files of a scheme (None: that of the settings), in a pool (None: the first one with
/// groups of it).
pub fn file_space(
    map: &ClusterMap,
    reports: &[TargetReport],
    scheme: Option<Scheme>,
    pool: Option<&str>,
) -> FileSpace {
    let scheme = scheme.unwrap_or(map.settings.scheme);
    // One report per target: the newest counts.
    let reports: BTreeMap<TargetId, &TargetReport> = reports.iter().map(|r| (r.target, r)).collect();
    if reports.is_empty() {
        return FileSpace::default(); // a cluster that has just started
    }
    let used = scheme.payload_share(reports.values().map(|r| r.used).fold(0, u64::saturating_add));
    // A target that has not reported since the coordinator started is taken as it joined.
    let free = |target| match (reports.get(&target), map.target(target)) {
        (Some(report), _) => report.capacity.saturating_sub(report.used),
        (None, joined) => joined.map_or(0, |t| t.capacity),
    };
    let taking = |m: &&Member| m.state != MemberState::Down;
    let groups = groups_for_new_files(map, scheme, pool);
    let serves = |g: &&Group| g.members.iter().filter(taking).count() >= usize::from(scheme.data);
    let serving: Vec<&Group> = groups.iter().copied().filter(serves).collect();
    let has_free = |g: &&Group| g.members.iter().filter(taking).all(|m| free(m.target) > 0);
    let able: Vec<&Group> = serving.iter().copied().filter(has_free).collect();
    let members = |of: &[&Group]| -> BTreeSet<TargetId> {
        of.iter().flat_map(|g| g.members.iter().filter(taking)).map(|m| m.target).collect()
    };
    let (width, usable, all) = if groups.is_empty() {
        let joined = targets_for_groups(map, scheme, pool); // the first file has them made
        (scheme.width(), joined.clone(), joined)
    } else {
        let width = able.iter().map(|g| g.members.iter().filter(taking).count()).max().unwrap_or(0);
        (width, members(&able), members(&groups))
    };
    let spaces: Vec<TargetSpace<'_>> = usable
        .into_iter()
        .map(|target| TargetSpace { domain: domain_of(map, target), free: free(target) })
        .collect();
    let all = all.into_iter().map(free).fold(0, u64::saturating_add);
    FileSpace {
        used,
        free: rows(width, &spaces).saturating_mul(u64::from(scheme.data)),
        refuses: able.is_empty() && !serving.is_empty(),
        free_of_targets: scheme.payload_share(all),
    }
}

/// The groups that new files use.
fn groups_for_new_files<'a>(map: &'a ClusterMap, scheme: Scheme, pool: Option<&str>) -> Vec<&'a Group> {
    let pools: BTreeSet<&str> = map.groups.iter().map(|g| g.pool.as_str()).collect();
    let mut pools = pools.into_iter().filter(|p| pool.is_none_or(|pool| *p == pool));
    let Some((first, count)) = pools.find_map(|pool| map.groups_of(pool, scheme)) else { return Vec::new() };
    map.groups.iter().skip(first.0 as usize).take(count as usize).collect()
}

/// The targets for groups that do not exist yet: in the first pool that has enough.
fn targets_for_groups(map: &ClusterMap, scheme: Scheme, pool: Option<&str>) -> BTreeSet<TargetId> {
    let named = pools(map).into_iter().filter(|p| pool.is_none_or(|pool| *p == pool));
    let mut joined = named.map(|pool| candidates(map, pool)).filter(|all| all.len() >= scheme.width());
    joined.next().unwrap_or_default().into_iter().map(|candidate| candidate.target).collect()
}

fn domain_of(map: &ClusterMap, target: TargetId) -> &str {
    let node = map.target(target).and_then(|t| map.node(t.node));
    node.map_or("", |node| rack_of(&node.host))
}

/// The longest column of cells, of `width` columns, with the cells of each row on different targets. One of x
/// bytes exists if the targets' space, cut at x, sums up to `width` times x (the wrap-around rule of
/// McNaughton, 1959); so it is with a limit for each domain, as no target is in two.
fn rows(width: usize, spaces: &[TargetSpace<'_>]) -> u64 {
    if width == 0 || spaces.len() < width {
        return 0;
    }
    let mut domains: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    spaces.iter().for_each(|t| domains.entry(t.domain).or_default().push(t.free));
    let most = most_in_domain(width, domains.values().map(Vec::len));
    let fits = |x: u64| {
        let of_domain = |free: &Vec<u64>| {
            let sum: u128 = free.iter().map(|free| u128::from(*free.min(&x))).sum();
            sum.min(u128::from(x) * most as u128)
        };
        domains.values().map(of_domain).sum::<u128>() >= u128::from(x) * width as u128
    };
    // `fits` is true up to some x, and false from there on.
    let all: u128 = spaces.iter().map(|t| u128::from(t.free)).sum();
    let (mut low, mut high) = (0, u64::try_from(all / width as u128).unwrap_or(u64::MAX));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// The members of a group in one domain, where they are spread as evenly as possible.
fn most_in_domain(width: usize, targets: impl Iterator<Item = usize> + Clone) -> usize {
    let enough = |most: &usize| targets.clone().map(|n| n.min(*most)).sum::<usize>() >= width;
    (1..=width).find(enough).unwrap_or(width)
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
