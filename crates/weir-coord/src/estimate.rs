//! How long a rebuild still takes: from the bytes that each target has left, and how fast they became fewer.
//!
//! Sizes of places are estimates: a target's bytes, spread evenly over its places. The rate is that of the
//! last seconds, with everything that happens between two places in it. Pure; knows nothing of the store.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::RefillReport;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Target, TargetState};
use weir_proto::{PgId, TargetId};

/// A place that is filled and not current yet has at least one in this many of its bytes to go: writes that
/// came meanwhile follow.
const LAST_PART: u64 = 10;
/// Between two samples.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);
/// The rate is that of the last quarter of the rebuild, within these limits.
const WINDOW_MIN: Duration = Duration::from_secs(5);
const WINDOW_MAX: Duration = Duration::from_secs(60);
/// A rebuild has started when it has copied more than this part of its bytes, or for a whole window.
const STARTED_PART: u64 = 100;
/// No rate is known after less than this.
const SPAN_MIN: Duration = Duration::from_millis(500);

/// Estimated bytes of placement groups' places.
pub struct PlaceSizes {
    /// The average size of each target's own places.
    mean: BTreeMap<TargetId, u64>,
}

impl PlaceSizes {
    /// `used`: the bytes that each target has; `refills`: those that it has copied for places it is given.
    pub fn of<'a>(
        map: &ClusterMap,
        used: impl Iterator<Item = (TargetId, u64)>,
        refills: impl Iterator<Item = &'a RefillReport>,
    ) -> PlaceSizes {
        let mut count: BTreeMap<TargetId, u64> = BTreeMap::new();
        let members = map.groups.iter().flat_map(|g| &g.members);
        for member in members.filter(|m| m.state != MemberState::Behind) {
            *count.entry(member.target).or_default() += 1;
        }
        let mut copied: BTreeMap<TargetId, u64> = BTreeMap::new();
        for report in refills {
            *copied.entry(report.target).or_default() += report.bytes;
        }
        let mean = |(target, used): (TargetId, u64)| {
            let own = used.saturating_sub(copied.get(&target).copied().unwrap_or(0));
            Some((target, own.checked_div(*count.get(&target)?)?))
        };
        PlaceSizes { mean: used.filter_map(mean).collect() }
    }

    /// The size of one place of the group: the average over its current members.
    pub fn of_group(&self, group: &Group) -> u64 {
        let current = group.members.iter().filter(|m| m.state == MemberState::Current);
        let (sum, count) = current
            .filter_map(|m| self.mean.get(&m.target))
            .fold((0u64, 0u64), |(sum, count), mean| (sum.saturating_add(*mean), count + 1));
        sum.checked_div(count).unwrap_or(0)
    }
}

/// The part of a place's bytes that is left after `copied`.
pub fn left_of_place(size: u64, copied: u64) -> u64 {
    size.saturating_sub(copied).max(size / LAST_PART)
}

/// Bytes that targets still have to get.
type Queues = BTreeMap<TargetId, u64>;

/// The present rebuild.
#[derive(Default)]
pub struct Estimate {
    begun: Option<Instant>,
    samples: VecDeque<(Instant, Queues)>,
    /// Places that were filled: they are behind once more, for a few stripes.
    filled: BTreeSet<(TargetId, PgId)>,
}

/// The rest of a rebuild.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Left {
    pub bytes: u64,
    pub bytes_per_s: u64,
    /// 0: not known.
    pub ms: u64,
}

impl Estimate {
    /// Records how much is left now; `lost`: targets whose places others take.
    pub fn note(
        &mut self,
        map: &ClusterMap,
        lost: &BTreeSet<TargetId>,
        sizes: &PlaceSizes,
        refills: &BTreeMap<(TargetId, PgId), u64>,
        now: Instant,
    ) {
        if self.samples.back().is_some_and(|(at, _)| now.since(*at) < SAMPLE_EVERY) {
            return;
        }
        let queues = self.queues(map, lost, sizes, refills);
        if queues.is_empty() {
            *self = Estimate::default();
            return;
        }
        let begun = *self.begun.get_or_insert(now);
        // The rate is that of copying: before the first bytes, fences and lists are taken over.
        let is_copying =
            |before: &Queues| sum(before).saturating_sub(sum(&queues)) > sum(before) / STARTED_PART;
        let starts = now.since(begun) < WINDOW_MIN;
        if starts && self.samples.len() == 1 && !is_copying(&self.samples[0].1) {
            self.samples.clear();
        }
        self.samples.push_back((now, queues));
        let window = (now.since(begun) / 4).clamp(WINDOW_MIN, WINDOW_MAX);
        while self.samples.get(1).is_some_and(|(at, _)| now.since(*at) >= window) {
            self.samples.pop_front();
        }
    }

    fn queues(
        &mut self,
        map: &ClusterMap,
        lost: &BTreeSet<TargetId>,
        sizes: &PlaceSizes,
        refills: &BTreeMap<(TargetId, PgId), u64>,
    ) -> Queues {
        let mut queues = Queues::new();
        let mut not_taken = Vec::new();
        for group in map.groups.iter().filter(|g| g.scheme.parity > 0) {
            let size = sizes.of_group(group);
            for member in &group.members {
                let place = (member.target, group.id);
                if member.state == MemberState::Behind {
                    let copied = refills.get(&place).copied().unwrap_or(0);
                    let left = match member.is_filled(map.level) {
                        true => left_of_place(size, copied),
                        false if self.filled.contains(&place) => size / LAST_PART,
                        false => size,
                    };
                    if member.is_filled(map.level) {
                        self.filled.insert(place);
                    }
                    *queues.entry(member.target).or_default() += left;
                } else if is_lost(member, lost) {
                    not_taken.push((group, size));
                }
            }
        }
        for (group, size) in not_taken {
            let takers = map.targets.iter().filter(|t| may_take(t, group, lost)).map(|t| t.id);
            if let Some(taker) = takers.min_by_key(|t| queues.get(t).copied().unwrap_or(0)) {
                *queues.entry(taker).or_default() += size;
            }
        }
        queues
    }

    /// Targets that are done early leave their part of the machines to the others, or do not (each has a disk
    /// of its own): the time is the middle of both.
    pub fn left(&self) -> Left {
        let Some(((since, first), (until, last))) = self.samples.front().zip(self.samples.back()) else {
            return Left::default();
        };
        let (left, span) = (sum(last), until.since(*since));
        let done = sum(first).saturating_sub(left);
        if span < SPAN_MIN || done == 0 {
            return Left { bytes: left, ..Left::default() };
        }
        let time_of = |bytes: u64| u128::from(bytes) * span.as_millis() / u128::from(done);
        let longest = last.values().max().copied().unwrap_or(0);
        let ms = (time_of(left) + time_of(longest) * first.len() as u128) / 2;
        let bytes_per_s = u128::from(done) * 1000 / span.as_millis().max(1);
        Left {
            bytes: left,
            bytes_per_s: bytes_per_s as u64,
            ms: u64::try_from(ms).unwrap_or(u64::MAX).max(1),
        }
    }
}

fn sum(queues: &Queues) -> u64 {
    queues.values().sum()
}

fn is_lost(member: &Member, lost: &BTreeSet<TargetId>) -> bool {
    member.state == MemberState::Down && lost.contains(&member.target)
}

fn may_take(target: &Target, group: &Group, lost: &BTreeSet<TargetId>) -> bool {
    let is_member = group.members.iter().any(|m| m.target == target.id);
    target.state == TargetState::Up && target.pool == group.pool && !is_member && !lost.contains(&target.id)
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
