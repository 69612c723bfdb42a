//! Rate limit for background copies to a target: as fast as possible without slowing clients' writes.
//!
//! Each second the 99th percentile of clients' writes is compared with its value while nothing is copied. If
//! it has risen by a quarter, the rate is halved, else raised a little (additive increase, multiplicative
//! decrease, as in TCP). Without writes there is no limit. Pure but for its lock; the caller sleeps.
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Instant;

/// Between changes of the rate.
const WINDOW: Duration = Duration::from_secs(1);
/// With this number of writes the slowest in a hundred is known; with fewer the slowest one is used.
const WRITES_MIN: u32 = 10;
/// Bytes per second: copying never stops.
const RATE_MIN: u64 = 5_000_000;
const RATE_MAX: u64 = 10_000_000_000;
/// Beside clients that write, copying begins at this rate.
const RATE_START: u64 = 20_000_000;
/// A slowdown below this is not a reason: disks vary as much.
const SCATTER_NS: u64 = 2_000_000;
/// Classes of durations: powers of the square root of 2 from 16 µs on, up to 17 minutes.
const CLASSES: usize = 52;
const FIRST_CLASS_NS: f64 = 16_000.0;
/// The longest pause, so that a copy notices when the limit is gone.
const PAUSE_MAX: Duration = Duration::from_millis(500);

pub(crate) struct Pace(Mutex<State>);

struct State {
    begun: Instant,
    /// Writes of clients in this window by the class of their duration.
    writes: [u32; CLASSES],
    copied: u64,
    /// The slowest in a hundred while nothing was copied; 0: not known.
    idle_ns: u64,
    /// Bytes per second; none: no limit.
    rate: Option<u64>,
    /// When the copies so far are within the rate.
    paid_at: Instant,
}

impl Default for Pace {
    fn default() -> Pace {
        let zero = Instant(0);
        Pace(Mutex::new(State {
            begun: zero,
            writes: [0; CLASSES],
            copied: 0,
            idle_ns: 0,
            rate: None,
            paid_at: zero,
        }))
    }
}

impl Pace {
    /// Records how long a client's write took: a fragment, or an overlay here or as a mirror.
    pub fn note_latency(&self, now: Instant, took: Duration) {
        let mut state = self.lock();
        state.pass(now);
        state.writes[class(took)] += 1;
    }

    /// Records bytes that were copied.
    pub fn copied(&self, now: Instant, bytes: u64) {
        let mut state = self.lock();
        state.pass(now);
        state.copied += bytes;
        if let Some(rate) = state.rate {
            assert!(rate >= RATE_MIN, "copies would never end at this rate");
            let cost = Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64);
            state.paid_at = state.paid_at.max(now) + cost;
        }
    }

    /// How long to wait before the next copy; the caller then asks again.
    pub fn pause(&self, now: Instant) -> Duration {
        let mut state = self.lock();
        state.pass(now);
        state.paid_at.since(now).min(PAUSE_MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pass(&mut self, now: Instant) {
        let length = now.since(self.begun);
        if length < WINDOW {
            return;
        }
        let is_copying = self.copied > 0 || self.paid_at > now;
        match self.slowest() {
            Some(ns) if !is_copying => {
                self.idle_ns = if self.idle_ns == 0 { ns } else { (self.idle_ns * 7 + ns) / 8 };
                self.rate = Some(RATE_START);
                self.paid_at = now;
            }
            Some(ns) if self.idle_ns > 0 => self.rate = self.adapted(ns, length),
            Some(_) => {}
            None => self.rate = None,
        }
        if self.rate.is_none() {
            self.paid_at = now;
        }
        (self.begun, self.writes, self.copied) = (now, [0; CLASSES], 0);
    }

    /// The rate after a second in which the slowest writes took `ns`.
    fn adapted(&self, ns: u64, length: Duration) -> Option<u64> {
        let is_slow = ns > self.idle_ns + self.idle_ns / 4 + SCATTER_NS;
        match (self.rate, is_slow) {
            (None, false) => None,
            (Some(rate), false) => Some(rate + rate / 4).filter(|rate| *rate < RATE_MAX),
            (rate, true) => {
                let reached = (u128::from(self.copied) * 1_000_000_000 / length.as_nanos().max(1)) as u64;
                Some((rate.unwrap_or(reached) / 2).max(RATE_MIN))
            }
        }
    }

    /// The duration that one write in a hundred reaches or exceeds; with few writes the slowest one.
    fn slowest(&self) -> Option<u64> {
        let all: u32 = self.writes.iter().sum();
        let above = if all < WRITES_MIN { 0 } else { all / 100 };
        let mut seen = 0;
        let found = self.writes.iter().rposition(|n| {
            seen += n;
            seen > above
        });
        found.map(|class| (FIRST_CLASS_NS * 2f64.powf((class + 1) as f64 / 2.0)) as u64)
    }
}

fn class(took: Duration) -> usize {
    let steps = (took.as_nanos() as f64 / FIRST_CLASS_NS).max(1.0).log2() * 2.0;
    (steps as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    struct Disk {
        pace: Pace,
        now: Instant,
        paused: Duration,
    }
    impl Disk {
        fn new() -> Disk {
            Disk { pace: Pace::default(), now: Instant(1), paused: Duration::ZERO }
        }
        /// A second in which a client writes every 10 ms, and `copied` bytes are copied in as many parts.
        fn second(&mut self, write: Option<Duration>, copied: u64) {
            self.paused = Duration::ZERO;
            for _ in 0..100 {
                self.now = self.now + MS * 10;
                if let Some(took) = write {
                    self.pace.note_latency(self.now, took);
                }
                if copied > 0 {
                    self.pace.copied(self.now, copied / 100);
                    self.paused += self.pace.pause(self.now);
                }
            }
        }
        fn limit(&self) -> Option<u64> {
            self.pace.lock().rate
        }
    }

    #[test]
    fn copying_slows_down_when_writes_do_and_recovers() {
        let mut disk = Disk::new();
        (0..3).for_each(|_| disk.second(Some(MS * 4), 0));
        assert_eq!(disk.limit(), Some(RATE_START));
        (0..30).for_each(|_| disk.second(Some(MS * 4), 400_000_000));
        assert_eq!(disk.limit(), None, "it is fast enough for clients");
        disk.second(Some(MS * 40), 400_000_000);
        disk.second(Some(MS * 40), 400_000_000);
        let half = disk.limit().unwrap();
        assert!((100_000_000..=220_000_000).contains(&half), "{half}");
        (0..10).for_each(|_| disk.second(Some(MS * 40), 400_000_000));
        assert_eq!(disk.limit(), Some(RATE_MIN));
        assert!(disk.paused > Duration::from_secs(10), "{:?}", disk.paused);
        (0..15).for_each(|_| disk.second(Some(MS * 4), 10_000_000));
        assert!(disk.limit().is_none_or(|rate| rate > 100_000_000), "{:?}", disk.limit());
    }

    #[test]
    fn without_writes_there_is_no_limit() {
        let mut disk = Disk::new();
        (0..3).for_each(|_| disk.second(Some(MS), 0));
        (0..5).for_each(|_| disk.second(Some(MS * 100), 100_000_000));
        assert!(disk.limit().is_some());
        (0..4).for_each(|_| disk.second(None, 100_000_000));
        assert_eq!((disk.limit(), disk.paused), (None, Duration::ZERO));
    }

    #[test]
    fn the_slowest_of_a_few_or_one_in_a_hundred_counts() {
        let slowest = |durations: &[(Duration, u32)]| {
            let disk = Disk::new();
            let mut state = disk.pace.lock();
            durations.iter().for_each(|(took, n)| state.writes[class(*took)] += n);
            state.slowest()
        };
        assert_eq!(slowest(&[]), None);
        assert!(slowest(&[(MS, 8), (MS * 50, 1)]).unwrap() >= 50_000_000);
        assert!(slowest(&[(MS, 199), (MS * 50, 1)]).unwrap() < 2_000_000);
        assert!(slowest(&[(MS, 97), (MS * 50, 3)]).unwrap() >= 50_000_000);
        assert!(
            slowest(&[(Duration::from_secs(3600), 1)]).is_some() && slowest(&[(Duration::ZERO, 1)]).is_some()
        );
    }
}
