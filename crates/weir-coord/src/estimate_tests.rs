//! Claims about the estimated time of a rebuild.
use super::*;
use crate::decide::group_tests::{cluster, create_groups};
use weir_proto::Epoch;

const MB: u64 = 1_000_000;
const LOST: TargetId = TargetId(1);

/// Targets of 4+2, each with 100 MB for each of its places; target 1 is lost.
struct Rebuild {
    map: ClusterMap,
    estimate: Estimate,
    copied: BTreeMap<(TargetId, PgId), u64>,
    now: Instant,
}

impl Rebuild {
    fn of(targets: u32) -> Rebuild {
        let mut map = cluster(targets, "ec:4+2");
        assert!(create_groups(&mut map, targets as usize));
        map.targets[0].state = TargetState::Down;
        let members = map.groups.iter_mut().flat_map(|g| &mut g.members);
        members.filter(|m| m.target == LOST).for_each(|m| m.state = MemberState::Down);
        Rebuild { map, estimate: Estimate::default(), copied: BTreeMap::new(), now: Instant(1) }
    }
    /// Groups with a place that the lost target still has.
    fn lost_groups(&self) -> Vec<usize> {
        let has = |g: &Group| g.members.iter().any(|m| m.target == LOST);
        (0..self.map.groups.len()).filter(|n| has(&self.map.groups[*n])).collect()
    }
    fn taker(&self, group: usize) -> TargetId {
        let is_member = |id| self.map.groups[group].members.iter().any(|m| m.target == id);
        (2..=7).map(TargetId).find(|id| !is_member(*id)).unwrap()
    }
    /// The only target outside of the group takes its place, and is behind.
    fn take(&mut self, group: usize) {
        let to = self.taker(group);
        let member = self.map.groups[group].members.iter_mut().find(|m| m.target == LOST).unwrap();
        *member = Member { target: to, state: MemberState::Behind, since: Epoch(0), lost_at: Epoch(1) };
        self.copied.insert((to, self.map.groups[group].id), 0);
    }
    fn check(&mut self) -> Left {
        let copied =
            |t: TargetId| self.copied.iter().filter(|((to, _), _)| *to == t).map(|(_, n)| *n).sum::<u64>();
        let own = |t: TargetId| {
            let members = self.map.groups.iter().flat_map(|g| &g.members);
            members.filter(|m| m.target == t && m.state == MemberState::Current).count() as u64 * 100 * MB
        };
        let used = (2..=7).map(|n| (TargetId(n), own(TargetId(n)) + copied(TargetId(n))));
        let reports: Vec<RefillReport> = self
            .copied
            .iter()
            .map(|((target, group), bytes)| RefillReport {
                target: *target,
                group: *group,
                stripes_seen: 0,
                stripes_repaired: 0,
                bytes: *bytes,
                since_ms: 0,
            })
            .collect();
        let sizes = PlaceSizes::of(&self.map, used, reports.iter());
        self.estimate.note(&self.map, &[LOST].into(), &sizes, &self.copied, self.now);
        self.estimate.left()
    }
    /// Each target copies one place after the other at a rate, and needs some time after each. Returns the
    /// estimates, and how long all took.
    fn run(
        &mut self,
        bytes_per_s: impl Fn(Duration) -> u64,
        rest: Duration,
    ) -> (Vec<(Duration, Left)>, Duration) {
        let (begun, step) = (self.now, Duration::from_millis(100));
        let mut todo: BTreeMap<TargetId, Vec<usize>> = BTreeMap::new();
        for group in self.lost_groups() {
            todo.entry(self.taker(group)).or_default().push(group);
        }
        let mut free_at: BTreeMap<TargetId, Instant> = BTreeMap::new();
        let mut checks = Vec::new();
        while !todo.is_empty() || !self.copied.is_empty() {
            for target in (2..=7).map(TargetId) {
                let place = self.copied.keys().find(|(t, _)| *t == target).copied();
                if let Some(place) = place {
                    let bytes = self.copied.get_mut(&place).unwrap();
                    *bytes += bytes_per_s(self.now.since(begun)) / 10;
                    if *bytes >= 100 * MB {
                        self.copied.remove(&place);
                        let members = self.map.groups.iter_mut().flat_map(|g| &mut g.members);
                        let of_place =
                            members.filter(|m| m.target == target && m.state == MemberState::Behind);
                        of_place.for_each(|m| m.state = MemberState::Current);
                        free_at.insert(target, self.now + rest);
                    }
                } else if free_at.get(&target).is_none_or(|at| *at <= self.now)
                    && let Some(group) = todo.get_mut(&target).and_then(Vec::pop)
                {
                    self.take(group);
                }
            }
            todo.retain(|_, groups| !groups.is_empty());
            self.now = self.now + step;
            let left = self.check();
            checks.push((self.now.since(begun), left));
        }
        let took = self.now.since(begun);
        self.now = self.now + SAMPLE_EVERY;
        checks.push((took, self.check()));
        (checks, took)
    }
}

/// The least and the largest ratio of the estimated to the real time, from this part of the rebuild to half of
/// it.
fn ratios(checks: &[(Duration, Left)], took: Duration, from: f64) -> (f64, f64) {
    let part = |at: &Duration| at.as_secs_f64() / took.as_secs_f64();
    let between = checks.iter().filter(|(at, _)| (from..=0.5).contains(&part(at)));
    between.fold((f64::MAX, 0.0), |(least, most), (at, left)| {
        let ratio = left.ms as f64 / 1000.0 / (took - *at).as_secs_f64();
        (f64::min(least, ratio), f64::max(most, ratio))
    })
}

#[test]
fn the_time_left_is_true_to_a_fifth_at_a_steady_rate() {
    for rest_ms in [0, 1000] {
        let (checks, took) = Rebuild::of(7).run(|_| 20 * MB, Duration::from_millis(rest_ms));
        let (least, most) = ratios(&checks, took, 0.1);
        assert!(least > 0.8 && most < 1.2, "{least} to {most} of {took:?}, {rest_ms} ms between places");
        assert!(checks.last().unwrap().1 == Left::default(), "all is done");
    }
}

#[test]
fn the_time_left_follows_the_rate_of_the_last_seconds() {
    // Clients stop writing after six seconds.
    let (checks, took) =
        Rebuild::of(7).run(|at| if at.as_secs() < 6 { 5 * MB } else { 20 * MB }, Duration::ZERO);
    let late = ratios(&checks, took, (6.0 + WINDOW_MIN.as_secs_f64()) / took.as_secs_f64());
    assert!(late.0 > 0.8 && late.1 < 1.2, "{late:?} of {took:?}");
}

#[test]
fn nothing_is_foretold_of_places_that_no_target_can_take() {
    assert_eq!(Rebuild::of(6).check(), Left::default());
    assert!(Rebuild::of(7).check().bytes > 0);
}
