//! Reports of repaired places, collected for a moment so that many make one change of the map.
//!
//! Every change of the map goes to every node. A report waits only while other places are repaired, and not
//! if the map changes anyway. Knows nothing of what a report changes.
use std::time::Duration;
use weir_env::Instant;
use weir_proto::map::{ClusterMap, MemberState};

/// The longest time that a report waits. The place gets all writes meanwhile, only seals wait for it.
const COLLECTED_FOR: Duration = Duration::from_millis(100);
/// Collected reports: as many as the owner handles together.
const COLLECTED_MAX: usize = 256;

/// Reports with the channels for their answers.
pub struct Repaired<R> {
    reports: Vec<R>,
    since: Instant,
}

impl<R> Default for Repaired<R> {
    fn default() -> Repaired<R> {
        Repaired { reports: Vec::new(), since: Instant(0) }
    }
}

impl<R> Repaired<R> {
    pub fn add(&mut self, report: R, now: Instant) {
        if self.reports.is_empty() {
            self.since = now;
        }
        self.reports.push(report);
    }

    /// How long the reports still wait; none: there are none.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let waited = now.since(self.since);
        (!self.reports.is_empty()).then(|| COLLECTED_FOR.saturating_sub(waited))
    }

    /// The reports, once they are due. `before`: the published map, which `draft` may change.
    pub fn take(&mut self, before: &ClusterMap, draft: &ClusterMap, now: Instant) -> Vec<R> {
        let Some(wait) = self.wait(now) else { return Vec::new() };
        let count = self.reports.len();
        let is_due = wait.is_zero() || count >= COLLECTED_MAX || count >= behind(draft) || before != draft;
        if is_due { std::mem::take(&mut self.reports) } else { Vec::new() }
    }
}

/// Places that are repaired now: no more reports can come.
fn behind(map: &ClusterMap) -> usize {
    let members = map.groups.iter().flat_map(|g| &g.members);
    members.filter(|m| m.state == MemberState::Behind).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::group_tests::{cluster, create_groups};

    #[test]
    fn reports_wait_for_others_but_not_for_long() {
        let (start, ms) = (Instant(1), Duration::from_millis);
        let mut map = cluster(3, "ec:2+1");
        assert!(create_groups(&mut map, 3));
        map.groups[..3].iter_mut().for_each(|g| g.members[0].state = MemberState::Behind);
        let mut repaired = Repaired::default();
        assert_eq!(repaired.wait(start), None);
        repaired.add('a', start);
        assert_eq!(repaired.take(&map, &map, start + ms(60)), []);
        repaired.add('b', start + ms(60));
        assert_eq!(repaired.wait(start + ms(60)), Some(ms(40)));
        assert_eq!(repaired.take(&map, &map, start + ms(100)), ['a', 'b']);
        let changed = ClusterMap { version: 7, ..map.clone() };
        repaired.add('c', start);
        assert_eq!(repaired.take(&map, &changed, start), ['c'], "the map changes anyway");
        (0..3).for_each(|_| repaired.add('d', start));
        assert_eq!(repaired.take(&map, &map, start).len(), 3, "no other place is repaired");
    }
}
