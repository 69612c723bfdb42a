//! Scrub: a target reads all its data every two weeks, so that damage is found while the stripe can still be
//! rebuilt from its other fragments.
//!
//! Invariant: a pass continues where it stopped when the process ends; damage that it finds is counted and
//! repaired as damage that a reader finds. A cell that is written meanwhile may be read before or after the
//! write.
use crate::format::Scrub;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::WallTime;
use weir_proto::Result;
use weir_proto::data::ScrubPass;

/// From the beginning of one pass to the beginning of the next.
const EVERY: Duration = Duration::from_secs(14 * 24 * 3600);
/// A pass that is started by the schedule runs slowly enough to take this long, but not slower than
/// `BYTES_PER_S_MIN`.
const WITHIN: Duration = Duration::from_secs(7 * 24 * 3600);
const BYTES_PER_S_MIN: u64 = 1 << 20;

/// Scrub state of a target.
#[derive(Default)]
pub(crate) struct Scrubber {
    /// Absent: not read from the index yet.
    state: Mutex<Option<Scrub>>,
    /// A pass was requested.
    pub wanted: Notify,
}

impl Scrubber {
    /// `load` reads it from the index the first time.
    pub fn with<T>(
        &self,
        load: impl FnOnce() -> Result<Scrub>,
        work: impl FnOnce(&mut Scrub) -> T,
    ) -> Result<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_none() {
            *state = Some(load()?);
        }
        Ok(work(state.get_or_insert_default()))
    }
}

/// Begins a pass now; a running one restarts.
pub(crate) fn begin(scrub: &mut Scrub, now: WallTime, bytes_per_s: u64) {
    scrub.pass = Some(ScrubPass { begun_ns: now.0, ended_ns: None, cells: 0, bytes: 0, damaged_cells: 0 });
    (scrub.after, scrub.bytes_per_s) = (None, bytes_per_s);
}

/// Begins a pass if one is due; returns whether one is running. A new target is empty, so its first pass is
/// due after a whole period. A clock that was set back starts none.
pub(crate) fn is_under_way(scrub: &mut Scrub, now: WallTime, used: u64) -> bool {
    let Some(pass) = &scrub.pass else {
        begin(scrub, now, 0);
        scrub.pass = scrub.pass.map(|pass| ScrubPass { ended_ns: Some(now.0), ..pass });
        return false;
    };
    if pass.ended_ns.is_some() && now.0 >= pass.begun_ns.saturating_add(EVERY.as_nanos() as i64) {
        begin(scrub, now, (used / WITHIN.as_secs()).max(BYTES_PER_S_MIN));
    }
    scrub.pass.is_some_and(|pass| pass.ended_ns.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_begins_every_two_weeks_and_ends_in_one() {
        let day = 24 * 3600 * 1_000_000_000_i64;
        let mut scrub = Scrub::default();
        assert!(!is_under_way(&mut scrub, WallTime(day), 0), "nothing can be damaged yet");
        assert!(!is_under_way(&mut scrub, WallTime(14 * day), 0));
        assert!(!is_under_way(&mut scrub, WallTime(0), 0), "the clock was set back");
        let week = WITHIN.as_secs();
        assert!(is_under_way(&mut scrub, WallTime(15 * day), week * (5 << 20)));
        assert_eq!(scrub.bytes_per_s, 5 << 20);
        assert!(is_under_way(&mut scrub, WallTime(40 * day), 0), "until it is at its end");
        begin(&mut scrub, WallTime(41 * day), 7);
        assert_eq!((scrub.after, scrub.bytes_per_s), (None, 7));
    }
}
