//! Admission control of a target: which requests of clients it begins, and which it asks to come later.
//!
//! A request that cannot be done before its caller gives up is refused at once, before it costs anything:
//! work for callers that have gone is how an overload grows. Requests of other storage nodes are not asked
//! here: they finish what was begun. Pure but for its lock. Knows neither stores nor messages.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Clock, Instant};

/// Requests of clients inside at a time, per target: four times what one client has in flight at most, and at
/// 1 ms each about as many as a caller has patience for.
pub const INSIDE_MAX: usize = 1024;
/// Those of one connection: no client alone keeps the others out.
pub const OF_ONE_MAX: usize = INSIDE_MAX / 2;
/// Payloads of the requests inside, per target: 100 Gb/s × 10 ms.
pub const BYTES_MAX: u64 = 128 << 20;
/// This number is begun even if the target has been slow: its speed is known only from the requests that end.
const FREE: usize = 32;
/// The recent speed is that of one to two of these, counted while there were requests.
const SPAN: Duration = Duration::from_millis(500);
/// The pause that a refused caller is asked for. It grows by itself while that is too short.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The requests inside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Inside {
    count: usize,
    bytes: u64,
    /// Of the connection that asks.
    of_one: usize,
}

/// The decision on one more request: `None`, it is begun, or the pause to ask for. `interval`: between the
/// ends of two requests lately; `patience`: of the caller.
fn refuse(inside: Inside, bytes: u64, interval: Duration, patience: Duration) -> Option<Duration> {
    let pause = |excess: Duration| Some(excess.clamp(PAUSE_MIN, PAUSE_MAX));
    let queue = interval.saturating_mul(inside.count as u32);
    // One that is larger than all others together is begun when it is alone.
    let is_full = inside.bytes > 0 && inside.bytes + bytes > BYTES_MAX;
    if inside.count >= INSIDE_MAX || inside.of_one >= OF_ONE_MAX || is_full {
        return pause(queue / 4);
    }
    let needed = queue + interval;
    if inside.count >= FREE && needed > patience { pause(needed - patience) } else { None }
}

/// How fast requests end while there are some.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    now: (Duration, u32),
    before: (Duration, u32),
    /// Counted until then.
    at: Instant,
}

impl Speed {
    fn pass(&mut self, now: Instant, is_busy: bool) {
        if is_busy {
            self.now.0 += now.since(self.at);
        }
        self.at = self.at.max(now);
        // A disk that completes nothing only makes the interval longer.
        if self.now.0 >= SPAN && self.now.1 > 0 {
            self.before = std::mem::take(&mut self.now);
        }
    }
    fn interval(&self) -> Duration {
        (self.now.0 + self.before.0) / (self.now.1 + self.before.1).max(1)
    }
}

#[derive(Default)]
pub struct Admission(Mutex<State>);

#[derive(Default)]
struct State {
    count: usize,
    bytes: u64,
    /// By connection. As many entries as requests at most.
    of: BTreeMap<u64, usize>,
    speed: Speed,
}

/// A request inside, until it is dropped.
pub struct Admitted {
    admission: Arc<Admission>,
    clock: Clock,
    connection: u64,
    bytes: u64,
}

impl Admission {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Begins a request of a client, or returns the pause to ask its caller for, and the number of those
    /// inside.
    pub fn admit(
        self: &Arc<Admission>,
        clock: &Clock,
        connection: u64,
        bytes: u64,
        deadline: Instant,
    ) -> Result<Admitted, (Duration, usize)> {
        let now = clock.now();
        let mut state = self.lock();
        let count = state.count;
        state.speed.pass(now, count > 0);
        let of_one = state.of.get(&connection).copied().unwrap_or_default();
        let inside = Inside { count, bytes: state.bytes, of_one };
        if let Some(pause) = refuse(inside, bytes, state.speed.interval(), deadline.since(now)) {
            return Err((pause, count));
        }
        state.count += 1;
        state.bytes += bytes;
        *state.of.entry(connection).or_default() += 1;
        drop(state);
        Ok(Admitted { admission: self.clone(), clock: clock.clone(), connection, bytes })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let now = self.clock.now();
        let mut state = self.admission.lock();
        state.speed.now.1 += 1;
        state.speed.pass(now, true);
        assert!(state.count > 0 && state.bytes >= self.bytes, "a request ended that was not admitted");
        state.count -= 1;
        state.bytes -= self.bytes;
        let left = state.of.get(&self.connection).map_or(0, |count| count - 1);
        match left {
            0 => drop(state.of.remove(&self.connection)),
            left => drop(state.of.insert(self.connection, left)),
        }
        assert_eq!(state.count == 0, state.of.is_empty(), "requests inside are those of some connection");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_env::sim::{SimConfig, World};

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn requests_that_cannot_be_done_in_time_are_refused() {
        let inside = |count| Inside { count, bytes: 0, of_one: count.min(OF_ONE_MAX - 1) };
        for (inside, bytes, interval, patience, expected) in [
            (inside(0), 0, 0, 5000, None),
            // Nothing is known yet, or it is fast: only the numbers count.
            (inside(INSIDE_MAX - 1), 0, 0, 5000, None),
            (inside(INSIDE_MAX - 1), 0, 4, 5000, None),
            (inside(INSIDE_MAX), 0, 0, 5000, Some(PAUSE_MIN)),
            (inside(INSIDE_MAX), 0, 1, 5000, Some(ms(256))),
            (Inside { of_one: OF_ONE_MAX, ..inside(OF_ONE_MAX) }, 0, 0, 5000, Some(PAUSE_MIN)),
            // 101 × 50 ms is more than 5 s.
            (inside(99), 0, 50, 5000, None),
            (inside(100), 0, 50, 5000, Some(ms(50))),
            (inside(500), 0, 50, 5000, Some(PAUSE_MAX)),
            (inside(500), 0, 50, 60_000, None),
            // Few are begun however slow it was.
            (inside(FREE - 1), 0, 10_000, 100, None),
            (inside(FREE), 0, 10_000, 100, Some(PAUSE_MAX)),
            (Inside { bytes: BYTES_MAX - 10, ..inside(9) }, 10, 0, 5000, None),
            (Inside { bytes: BYTES_MAX - 10, ..inside(9) }, 11, 0, 5000, Some(PAUSE_MIN)),
            (inside(9), BYTES_MAX + 1, 0, 5000, None),
        ] {
            assert_eq!(
                refuse(inside, bytes, ms(interval), ms(patience)),
                expected,
                "{inside:?} {bytes} {interval}"
            );
        }
    }

    #[test]
    fn its_speed_is_what_it_did_lately() {
        let world = World::new(1, SimConfig::default());
        let clock = world.node("a").clock;
        world.run(async move {
            let admission: Arc<Admission> = Arc::default();
            let deadline = |s: u64| clock.now() + Duration::from_secs(s);
            let admit = |n: u64, s| admission.admit(&clock, n, 0, deadline(s));
            // 100 requests, of which one ends in 100 ms.
            let mut inside: Vec<Admitted> = (0..100).map(|n| admit(n, 5).unwrap()).collect();
            for _ in 0..20 {
                clock.sleep(ms(100)).await;
                inside.pop();
            }
            assert!(admit(200, 9).is_ok(), "81 × 100 ms");
            let (pause, count) = admit(200, 5).err().expect("81 × 100 ms are more than 5 s");
            assert_eq!((pause, count), (PAUSE_MAX, 80));
            // It does nothing at all any more: that is slower still.
            clock.sleep(Duration::from_secs(10)).await;
            assert!(admit(200, 9).is_err());
            // And quick again.
            while inside.len() > 40 {
                clock.sleep(ms(50)).await;
                inside.pop();
            }
            assert!(admit(200, 5).is_ok(), "{:?}", admission.lock().speed);
            drop(inside);
            let state = admission.lock();
            assert_eq!((state.count, state.bytes, state.of.len()), (0, 0, 0));
        });
    }

    proptest! {
        #[test]
        fn numbers_and_bytes_are_bounded(asked in prop::collection::vec((0u64..4, 0u64..BYTES_MAX / 3, any::<bool>()), 0..200)) {
            let world = World::new(1, SimConfig::default());
            let clock = world.node("a").clock;
            let admission: Arc<Admission> = Arc::default();
            let mut inside = Vec::new();
            for (connection, bytes, ends) in asked {
                if ends {
                    inside.pop();
                }
                let far = clock.now() + Duration::from_secs(1000);
                inside.extend(admission.admit(&clock, connection, bytes, far).ok());
                let state = admission.lock();
                prop_assert!(state.bytes <= BYTES_MAX && state.count == inside.len());
                prop_assert_eq!(state.of.values().sum::<usize>(), state.count);
            }
        }
    }
}
