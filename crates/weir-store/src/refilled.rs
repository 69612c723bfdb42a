//! A target's progress with its refills, and which of them are listed without regard to seals.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::RefillReport;
use weir_proto::map::Group;
use weir_proto::{Epoch, PgId, TargetId};

/// Between reports of a target's progress.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// Kept in memory: a restart begins again.
#[derive(Default, Debug)]
pub struct Refill {
    /// The loss of each group's cells after which the fences were taken over.
    pub fences_since: BTreeMap<PgId, Epoch>,
    /// The map version at which groups were searched for cells that now belong to other targets.
    pub scanned_at_version: u64,
    /// Groups with such cells.
    pub handed_over: BTreeSet<PgId>,
    /// Groups with a task that copies a place.
    pub moving: BTreeSet<PgId>,
    /// Progress of the groups that are being filled, and since when they are.
    progress: BTreeMap<PgId, (RefillReport, Instant)>,
    reported: Option<Instant>,
}

impl Refill {
    pub fn begin(&mut self, target: TargetId, group: PgId, now: Instant) {
        let report =
            RefillReport { target, group, stripes_seen: 0, stripes_repaired: 0, bytes: 0, since_ms: 0 };
        self.progress.entry(group).or_insert((report, now)).0.stripes_seen = 0;
    }
    /// Records that a stripe was checked; `repaired`: its bytes here if it was repaired.
    pub fn seen(&mut self, group: PgId, repaired: Option<u64>) {
        let Some((report, _)) = self.progress.get_mut(&group) else { return };
        report.stripes_seen += 1;
        report.stripes_repaired += u64::from(repaired.is_some());
        report.bytes += repaired.unwrap_or(0);
    }
    pub fn end(&mut self, group: PgId) {
        self.progress.remove(&group);
    }
    /// A move to this target has ended. If it was cancelled, cells may have arrived after others were
    /// dropped.
    pub fn copy_ended(&mut self, group: PgId) {
        self.moving.remove(&group);
        self.scanned_at_version = 0;
    }
    /// Ends the reports of other groups.
    pub fn end_others(&mut self, goes_on: impl Fn(&PgId) -> bool) {
        self.progress.retain(|group, _| goes_on(group));
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
        self.progress.values().map(report).collect()
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
    fn cells_are_searched_again_after_a_copy_has_ended() {
        let group = PgId(3);
        let mut refill =
            Refill { scanned_at_version: 7, moving: [group, PgId(4)].into(), ..Refill::default() };
        refill.copy_ended(group);
        assert_eq!((refill.scanned_at_version, refill.moving), (0, [PgId(4)].into()));
    }
}
