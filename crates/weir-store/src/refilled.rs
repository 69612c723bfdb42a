//! A target's progress with the places that are filled here, and which of them are listed without regard to
//! seals.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::RefillReport;
use weir_proto::map::Group;
use weir_proto::{PgId, TargetId};

/// Between reports of a target's progress.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// Kept in memory: a restart begins again.
#[derive(Default, Debug)]
pub struct Progress {
    /// Progress of the groups that are being filled, and since when they are.
    groups: BTreeMap<PgId, (RefillReport, Instant)>,
    reported: Option<Instant>,
}

impl Progress {
    pub fn begin(&mut self, target: TargetId, group: PgId, now: Instant) {
        let report =
            RefillReport { target, group, stripes_seen: 0, stripes_repaired: 0, bytes: 0, since_ms: 0 };
        self.groups.entry(group).or_insert((report, now)).0.stripes_seen = 0;
    }
    /// Records that a stripe was checked; `repaired`: its bytes here if it was repaired.
    pub fn seen(&mut self, group: PgId, repaired: Option<u64>) {
        let Some((report, _)) = self.groups.get_mut(&group) else { return };
        report.stripes_seen += 1;
        report.stripes_repaired += u64::from(repaired.is_some());
        report.bytes += repaired.unwrap_or(0);
    }
    pub fn end(&mut self, group: PgId) {
        self.groups.remove(&group);
    }
    /// Ends the reports of other groups.
    pub fn end_others(&mut self, goes_on: impl Fn(&PgId) -> bool) {
        self.groups.retain(|group, _| goes_on(group));
    }
    /// The reports that are due.
    pub fn due(&mut self, now: Instant) -> Option<Vec<RefillReport>> {
        if self.reported.is_some_and(|at| now.since(at) < REPORT_EVERY) {
            return None;
        }
        Some(self.reports(now))
    }
    /// How far all are.
    pub fn reports(&mut self, now: Instant) -> Vec<RefillReport> {
        self.reported = Some(now);
        let report = |(report, since): &(RefillReport, Instant)| RefillReport {
            since_ms: now.since(*since).as_millis() as u64,
            ..report.clone()
        };
        self.groups.values().map(report).collect()
    }
}

/// Whether cells are listed though a seal is in doubt: a member is filled, and lists again without seals
/// before it is current.
pub fn lists_in_doubt(group: &Group, level: u16) -> bool {
    !group.pauses_seals(level) && group.members.iter().any(|m| m.is_filled(level))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_due_at_an_interval_and_has_all_groups() {
        let (target, at) = (TargetId(1), |ms| Instant(0) + Duration::from_millis(ms));
        let mut progress = Progress::default();
        progress.begin(target, PgId(3), at(0));
        progress.begin(target, PgId(4), at(100));
        progress.seen(PgId(3), Some(10));
        progress.seen(PgId(3), None);
        progress.seen(PgId(5), Some(10));
        let reports = progress.due(at(200)).unwrap();
        let of = |r: &RefillReport| (r.group, r.stripes_seen, r.stripes_repaired, r.bytes, r.since_ms);
        assert_eq!(
            reports.iter().map(of).collect::<Vec<_>>(),
            [(PgId(3), 2, 1, 10, 200), (PgId(4), 0, 0, 0, 100)]
        );
        assert_eq!(progress.due(at(699)), None);
        progress.end(PgId(4));
        assert_eq!(progress.due(at(700)).unwrap().len(), 1);
    }
}
