//! When an answer is late: pure decisions from the latencies of other members and the usual ones.
//!
//! A member is suspected only by comparison: a machine that is busy everywhere is slow, not broken. Knows
//! neither targets nor clocks.
use std::time::Duration;

/// Below this no answer to a write is late: a disk that flushes its own caches sometimes takes that long.
const SILENT_MIN: Duration = Duration::from_millis(300);
const SILENT_MAX: Duration = Duration::from_secs(2);
/// Much later than the others: their group proceeds without the member, which costs a repair.
const SLOW_MIN: Duration = Duration::from_millis(700);
const SLOW_MAX: Duration = Duration::from_secs(4);
/// A call without others to compare it with.
const ALONE_MIN: Duration = Duration::from_millis(400);
/// A read is not decoded from other members before this: below it the extra reads cost more than they gain,
const HEDGE_MIN: Duration = Duration::from_millis(40);
/// and never later than this.
const HEDGE_MAX: Duration = Duration::from_millis(1500);

/// Latency of answers of one kind: mean and deviation, as TCP estimates its round trips.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    mean_ns: u64,
    deviation_ns: u64,
}

impl Default for Latency {
    /// No answers yet: a cold start of a busy machine.
    fn default() -> Latency {
        Latency { mean_ns: 50_000_000, deviation_ns: 25_000_000 }
    }
}

impl Latency {
    pub fn note(&mut self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX / 64);
        self.deviation_ns = (3 * self.deviation_ns + took.abs_diff(self.mean_ns)) / 4;
        self.mean_ns = (7 * self.mean_ns + took) / 8;
    }
    /// Almost all answers of a healthy member arrive within this time.
    pub fn usual_max(&self) -> Duration {
        Duration::from_nanos(self.mean_ns + 4 * self.deviation_ns)
    }
}

/// When members that have not answered a write are suspected, from when it was sent to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SuspectAfter {
    pub silent_after: Duration,
    /// `None`: fewer than k + 1 have it, so it must not complete without the others.
    pub slow_after: Option<Duration>,
}

/// `answered`: the latencies of the members that have answered. `None`: too few have.
pub fn of_write(answered: &[Duration], k: usize, usual_max: Duration) -> Option<SuspectAfter> {
    let mut sorted = answered.to_vec();
    sorted.sort_unstable();
    let latency = sorted.get(k.checked_sub(1)?).copied()?.max(usual_max);
    let slow = (latency * 8).clamp(SLOW_MIN, SLOW_MAX);
    Some(SuspectAfter {
        silent_after: (latency * 4).clamp(SILENT_MIN, SILENT_MAX),
        slow_after: (sorted.len() > k).then_some(slow),
    })
}

/// When a call to one member alone is suspected.
pub fn of_call(usual_max: Duration) -> Duration {
    (usual_max * 4).clamp(ALONE_MIN, SILENT_MAX)
}

/// When a read is also decoded from other members. `crowded`: this client has more calls to the target than
/// may be in flight, so it has asked for more than it gets in time, and k reads for each would make that
/// worse.
pub fn hedge_after(usual_max: Duration, crowded: bool) -> Duration {
    if crowded { HEDGE_MAX } else { (usual_max * 2).clamp(HEDGE_MIN, HEDGE_MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_member_is_late_in_comparison_with_the_others() {
        for (answered, usual, expected) in [
            (&[5, 6, 7][..], 5, None),
            (&[5, 6, 7, 8], 5, Some((300, None))),
            (&[5, 6, 7, 8, 9], 5, Some((300, Some(700)))),
            // The k-th answer counts, in any order: one more slow one changes nothing.
            (&[900, 5, 8, 7, 6], 5, Some((300, Some(700)))),
            // All are slow: no member is suspected early.
            (&[150, 160, 170, 180, 190], 5, Some((720, Some(1440)))),
            (&[5, 6, 7, 8, 9], 150, Some((600, Some(1200)))),
            (&[5000, 5000, 5000, 5000, 5000], 5, Some((2000, Some(4000)))),
        ] {
            let answered: Vec<Duration> = answered.iter().map(|n| ms(*n)).collect();
            let expected = expected
                .map(|(silent, slow)| SuspectAfter { silent_after: ms(silent), slow_after: slow.map(ms) });
            assert_eq!(of_write(&answered, 4, ms(usual)), expected, "{answered:?} {usual}");
        }
    }

    #[test]
    fn the_latency_follows_what_is_usual() {
        let mut latency = Latency::default();
        for _ in 0..200 {
            latency.note(ms(2));
        }
        assert!(latency.usual_max() < ms(3), "{latency:?}");
        assert_eq!(hedge_after(latency.usual_max(), false), HEDGE_MIN);
        assert_eq!(hedge_after(latency.usual_max(), true), HEDGE_MAX);
        latency.note(ms(1000));
        assert!(latency.usual_max() > ms(300), "one slow answer: patience grows at once");
        for _ in 0..200 {
            latency.note(ms(100));
        }
        assert!((ms(100)..ms(120)).contains(&latency.usual_max()), "{latency:?}");
        assert!(hedge_after(latency.usual_max(), false) >= ms(200));
    }

    proptest! {
        #[test]
        fn doubts_stay_within_their_limits(took in prop::collection::vec(0u64..100_000, 0..12), usual in 0u64..100_000) {
            let mut latency = Latency::default();
            took.iter().for_each(|t| latency.note(ms(*t)));
            let answered: Vec<Duration> = took.iter().map(|t| ms(*t)).collect();
            if let Some(d) = of_write(&answered, 4, ms(usual)) {
                prop_assert!(took.len() >= 4 && (SILENT_MIN..=SILENT_MAX).contains(&d.silent_after));
                prop_assert!(d.slow_after.is_none_or(|s| took.len() > 4 && s > d.silent_after && s <= SLOW_MAX));
            }
            prop_assert!((HEDGE_MIN..=HEDGE_MAX).contains(&hedge_after(latency.usual_max(), false)));
            prop_assert!((ALONE_MIN..=SILENT_MAX).contains(&of_call(latency.usual_max())));
        }
    }
}
