//! When a target compares its versions with those of the other members, and what it found.
//!
//! Once a day, from a minute after the start on, or on request. A pass does not continue after a restart: it
//! reads few bytes of files, so it costs little.
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::{Instant, WallTime};
use weir_proto::FileId;
use weir_proto::data::{ComparePass, CompareReport};

/// From the beginning of one pass to the beginning of the next.
const EVERY: Duration = Duration::from_secs(24 * 3600);
/// From the start of the process to the first pass: a target that lost the end of its index is found early.
const FIRST_AFTER: Duration = Duration::from_secs(60);
/// One stripe of this number is encoded again in a pass, another one each time.
const SAMPLE: u64 = 1000;

/// The comparisons of a target.
#[derive(Default)]
pub(crate) struct Comparer {
    state: Mutex<State>,
    /// A pass was requested.
    pub wanted: Notify,
}

#[derive(Default)]
struct State {
    first: Option<Instant>,
    begun: Option<Instant>,
    /// Someone waits for the pass: it pauses less.
    asked: bool,
    pass: Option<ComparePass>,
    last: Option<ComparePass>,
}

impl Comparer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn ask(&self) {
        self.state().asked = true;
        self.wanted.notify_one();
    }
    pub fn is_asked(&self) -> bool {
        self.state().asked
    }
    pub fn report(&self) -> CompareReport {
        let state = self.state();
        CompareReport { asked: state.asked, pass: state.pass, last: state.last }
    }
    pub fn is_due(&self, now: Instant) -> bool {
        let mut state = self.state();
        let first = *state.first.get_or_insert(now + FIRST_AFTER);
        state.asked || now >= state.begun.map_or(first, |begun| begun + EVERY)
    }
    pub fn begin(&self, now: Instant, wall: WallTime, groups: usize) {
        let mut state = self.state();
        state.begun = Some(now);
        state.pass = Some(ComparePass { begun_ns: wall.0, groups: groups as u32, ..ComparePass::default() });
    }
    pub fn note(&self, change: impl FnOnce(&mut ComparePass)) {
        if let Some(pass) = &mut self.state().pass {
            change(pass);
        }
    }
    /// Returns the finished pass.
    pub fn end(&self, wall: WallTime) -> Option<ComparePass> {
        let mut state = self.state();
        state.asked = false;
        let pass = state.pass.take()?;
        state.last = Some(ComparePass { ended_ns: Some(wall.0), ..pass });
        state.last
    }
    /// Whether a stripe is in the present pass's sample.
    pub fn is_sampled(&self, file: FileId, stripe: u64) -> bool {
        let salt = self.state().pass.map_or(0, |pass| pass.begun_ns as u64);
        let mixed = (file.inode.0 ^ salt).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(stripe);
        mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(31).is_multiple_of(SAMPLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::InodeId;

    #[test]
    fn a_pass_is_due_daily_and_on_request() {
        let comparer = Comparer::default();
        let at = |s: u64| Instant::default() + Duration::from_secs(s);
        let due = |s| comparer.is_due(at(s));
        assert_eq!((due(0), due(59), due(60)), (false, false, true));
        comparer.begin(at(4000), WallTime(7), 2);
        assert_eq!((due(4001), due(4000 + 24 * 3600)), (false, true));
        comparer.ask();
        assert!(due(4002));
        comparer.note(|pass| pass.stripes += 5);
        let ended = comparer.end(WallTime(9)).unwrap();
        assert_eq!((ended.begun_ns, ended.ended_ns, ended.groups, ended.stripes), (7, Some(9), 2, 5));
        assert!(!due(4003), "it was done");
        assert_eq!((comparer.report().pass, comparer.report().last), (None, Some(ended)));
    }

    #[test]
    fn one_stripe_in_a_thousand_is_sampled() {
        let comparer = Comparer::default();
        let file = |n| FileId { namespace: weir_proto::NamespaceId(1), inode: InodeId(n) };
        let sampled = (0..300).flat_map(|n| (0..300).map(move |s| (n, s)));
        let count = sampled.filter(|(n, s)| comparer.is_sampled(file(*n), *s)).count();
        assert!((60..120).contains(&count), "{count} of 90,000");
    }
}
