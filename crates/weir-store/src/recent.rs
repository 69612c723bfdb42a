//! Stripes with overlays that were logged here lately, and whose seals this target leads.
//!
//! Bounded: stripes that are not remembered are found by a scan of the index. Pure but for its lock.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_env::Instant;
use weir_proto::data::OverlayPart;
use weir_proto::{CellId, FileId, PgId};

/// Stripes that are remembered one by one.
const STRIPES_MAX: usize = 65_536;

/// A stripe's overlays since it was last checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecentStripe {
    pub file: FileId,
    pub stripe: u64,
    pub group: PgId,
    /// Time of the last one.
    pub at: Instant,
    pub bytes: u64,
    pub count: u64,
}

pub(crate) struct Recent(Mutex<State>);

struct State {
    stripes: BTreeMap<(FileId, u64), RecentStripe>,
    /// Some stripes were not remembered: scan the index when there is time.
    incomplete: bool,
    /// The groups whose seals this target led at the last check.
    leads: BTreeSet<PgId>,
}

impl Default for Recent {
    /// After a start the index has to be scanned.
    fn default() -> Recent {
        Recent(Mutex::new(State { stripes: BTreeMap::new(), incomplete: true, leads: BTreeSet::new() }))
    }
}

impl Recent {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Overlays of a cell were logged.
    pub fn note(&self, group: PgId, cell: CellId, parts: &[OverlayPart], now: Instant) {
        let mut state = self.lock();
        if let Some(entry) = state.entry(group, cell, now) {
            entry.at = now;
            entry.bytes += parts.iter().map(|part| u64::from(part.len)).sum::<u64>();
            entry.count += parts.len() as u64;
        }
    }
    /// The stripes that are to be checked.
    pub fn due(&self, is_due: impl Fn(&RecentStripe) -> bool) -> Vec<RecentStripe> {
        self.lock().stripes.values().filter(|s| is_due(s)).copied().collect()
    }
    /// Nothing is to be done about the stripe until it is written again; unless it was, since it was due.
    pub fn settled(&self, due: &RecentStripe) {
        let (mut state, stripe) = (self.lock(), (due.file, due.stripe));
        if state.stripes.get(&stripe).is_some_and(|s| s.at == due.at) {
            state.stripes.remove(&stripe);
        }
    }
    /// The stripe is checked again as if it had just been written first.
    pub fn put_off(&self, due: &RecentStripe, now: Instant) {
        if let Some(s) = self.lock().stripes.get_mut(&(due.file, due.stripe)) {
            (s.at, s.bytes, s.count) = (now, 0, 0);
        }
    }
    /// The groups whose seals this target leads now. Writes while another target led a group are not
    /// remembered here.
    pub fn lead(&self, leads: BTreeSet<PgId>) {
        let mut state = self.lock();
        state.incomplete |= !leads.is_subset(&state.leads);
        state.leads = leads;
    }
    /// Whether the index is to be scanned for stripes now; the scan has begun then.
    pub fn begin_scan(&self) -> bool {
        let mut state = self.lock();
        let begins = state.incomplete && state.stripes.len() <= STRIPES_MAX / 2;
        state.incomplete &= !begins;
        begins
    }
    /// The scan has found overlays of these cells.
    pub fn add_found(&self, found: impl Iterator<Item = (CellId, PgId)>, now: Instant) {
        let mut state = self.lock();
        for (cell, group) in found {
            if state.entry(group, cell, now).is_none() {
                break;
            }
        }
    }
}

impl State {
    /// `None`: too many are remembered already.
    fn entry(&mut self, group: PgId, cell: CellId, now: Instant) -> Option<&mut RecentStripe> {
        let CellId { file, stripe, .. } = cell;
        if self.stripes.len() >= STRIPES_MAX && !self.stripes.contains_key(&(file, stripe)) {
            self.incomplete = true;
            return None;
        }
        assert!(self.stripes.len() <= STRIPES_MAX, "more stripes are remembered than are allowed");
        let new = RecentStripe { file, stripe, group, at: now, bytes: 0, count: 0 };
        Some(self.stripes.entry((file, stripe)).or_insert(new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stripe_that_is_not_remembered_is_scanned_for() {
        let (recent, group, now) = (Recent::default(), PgId(1), Instant(1));
        let cell = |stripe| CellId { file: FileId::default(), stripe, index: 0 };
        let cells = |upto: u64| (0..upto).map(|stripe| (cell(stripe), group));
        assert!(recent.begin_scan() && !recent.begin_scan(), "after a start");
        recent.lead(BTreeSet::from([group]));
        assert!(recent.begin_scan(), "another target led the group until now");
        recent.add_found(cells(STRIPES_MAX as u64), now);
        assert!(!recent.begin_scan());
        recent.add_found(cells(1), now);
        recent.note(group, cell(STRIPES_MAX as u64), &[], now);
        assert!(!recent.begin_scan(), "there is no room for what it would find");
        let all = recent.due(|_| true);
        assert_eq!(all.len(), STRIPES_MAX);
        all.iter().for_each(|stripe| recent.settled(stripe));
        assert!(recent.begin_scan());
    }

    #[test]
    fn a_stripe_that_is_written_while_it_is_sealed_is_due_again() {
        let (recent, group) = (Recent::default(), PgId(1));
        let cell = CellId { file: FileId::default(), stripe: 5, index: 0 };
        let part = OverlayPart { offset: 0, len: 7, kind: weir_proto::data::OverlayKind::Zero, crc: 0 };
        recent.note(group, cell, &[part], Instant(1));
        let due = recent.due(|s| s.bytes == 7 && s.count == 1);
        recent.note(group, cell, &[part, part], Instant(2));
        recent.settled(&due[0]);
        assert_eq!(recent.due(|s| s.bytes == 21 && s.count == 3).len(), 1);
        recent.put_off(&due[0], Instant(3));
        assert_eq!(recent.due(|s| (s.at, s.bytes, s.count) == (Instant(3), 0, 0)).len(), 1);
    }
}
