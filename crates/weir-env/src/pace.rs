//! Decides whether blocking work is fast enough to run in place; only the decision.
//!
//! A moving average of the durations of the last tasks, in place or elsewhere. A single slow one is
//! an outlier and changes nothing; work that stays slow moves to other threads, and returns when it is fast
//! again.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The newest task has a weight of 1/8.
const WEIGHT: u64 = 8;
/// A task counts as at most this multiple of the limit: a single outlier on a disk that is otherwise fast
/// does not reach it.
const COUNTED_LIMITS: u32 = 6;

pub struct Pace {
    limit: Duration,
    mean_ns: AtomicU64,
}

impl Pace {
    /// Work is fast if it takes no longer than `limit` on average.
    pub fn new(limit: Duration) -> Pace {
        Pace { limit, mean_ns: AtomicU64::new(0) }
    }

    /// Records the duration of a task. Of two concurrent ones one may be lost: then the average has one
    /// less.
    pub fn took(&self, took: Duration) {
        let took = took.min(self.limit * COUNTED_LIMITS).as_nanos() as u64;
        let mean = self.mean_ns.load(Relaxed);
        self.mean_ns.store((mean * (WEIGHT - 1) + took) / WEIGHT, Relaxed);
    }

    pub fn is_quick(&self) -> bool {
        u128::from(self.mean_ns.load(Relaxed)) <= self.limit.as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(500);
    const FAST: Duration = Duration::from_micros(60);
    const SLOW: Duration = Duration::from_millis(2);

    /// The number of tasks that run in place.
    fn here(pace: &Pace, tasks: impl IntoIterator<Item = Duration>) -> usize {
        let one = |took| {
            let here = pace.is_quick();
            pace.took(took);
            usize::from(here)
        };
        tasks.into_iter().map(one).sum()
    }

    #[test]
    fn one_slow_task_changes_nothing() {
        let pace = Pace::new(LIMIT);
        let with_hiccups = (0..500).map(|n| if n % 20 == 19 { Duration::from_secs(1) } else { FAST });
        assert_eq!(here(&pace, with_hiccups), 500);
    }

    #[test]
    fn a_slow_disk_is_left_to_others_until_it_is_fast_again() {
        let pace = Pace::new(LIMIT);
        assert!(here(&pace, [SLOW; 100]) < 5);
        assert!(here(&pace, [FAST; 100]) > 80);
        // In between: the average decides.
        assert_eq!(here(&pace, [Duration::from_micros(450); 200]), 200);
        assert!(here(&pace, [Duration::from_micros(550); 200]) < 40);
    }
}
