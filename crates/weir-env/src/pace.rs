//! Whether work that blocks is quick enough to be done where one stands: the decision alone.
//!
//! A moving average of what the last pieces took, wherever they were done. One that took long is a hiccup and
//! changes nothing; work that stays slow is left to other threads, and comes back when it is quick again.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Weight of the newest piece is one of so many.
const PIECES: u64 = 8;
/// One piece counts as no more than so many times the limit: a hiccup alone, on a disk that is otherwise
/// quick, does not reach it.
const COUNTED_LIMITS: u32 = 6;

pub struct Pace {
    limit: Duration,
    mean_ns: AtomicU64,
}

impl Pace {
    /// Work is quick that takes no longer than `limit` on average.
    pub fn new(limit: Duration) -> Pace {
        Pace { limit, mean_ns: AtomicU64::new(0) }
    }

    /// Takes note of a piece. Of two at a time one may be missed: that is one less in the average.
    pub fn took(&self, took: Duration) {
        let took = took.min(self.limit * COUNTED_LIMITS).as_nanos() as u64;
        let mean = self.mean_ns.load(Relaxed);
        self.mean_ns.store((mean * (PIECES - 1) + took) / PIECES, Relaxed);
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

    /// How many of the pieces are done in place.
    fn here(pace: &Pace, pieces: impl IntoIterator<Item = Duration>) -> usize {
        let one = |took| {
            let here = pace.is_quick();
            pace.took(took);
            usize::from(here)
        };
        pieces.into_iter().map(one).sum()
    }

    #[test]
    fn a_hiccup_changes_nothing() {
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
