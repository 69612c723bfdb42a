//! Time and randomness of a node.
use crate::BoxFuture;
use std::{fmt, sync::Arc, time::Duration};

/// Monotonic nanoseconds since an arbitrary start of this node's clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(pub u64);

impl Instant {
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
impl std::ops::Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, d: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }
}
impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}s", self.0 as f64 / 1e9)
    }
}

/// Nanoseconds since 1970-01-01 UTC; may jump.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct WallTime(pub i64);

/// A source of time; implemented by the machine and by the simulator.
pub trait ClockSource: Send + Sync + 'static {
    fn now(&self) -> Instant;
    fn wall(&self) -> WallTime;
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()>;
}

/// The wait ended by its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut;

#[derive(Clone)]
pub struct Clock(pub Arc<dyn ClockSource>);

impl Clock {
    pub fn now(&self) -> Instant {
        self.0.now()
    }
    pub fn wall(&self) -> WallTime {
        self.0.wall()
    }
    pub async fn sleep(&self, d: Duration) {
        self.0.sleep_until(self.now() + d).await
    }
    pub async fn sleep_until(&self, at: Instant) {
        self.0.sleep_until(at).await
    }
    /// Waits for `work` at most `d`. The work is dropped at the deadline: pass only waits that may be
    /// cancelled.
    pub async fn timeout<T>(&self, d: Duration, work: impl Future<Output = T>) -> Result<T, TimedOut> {
        let deadline = self.0.sleep_until(self.now() + d);
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = deadline => Err(TimedOut),
        }
    }
}

/// A source of random bits; seeded in the simulator.
pub trait RngSource: Send + Sync + 'static {
    fn next_u64(&self) -> u64;
}

#[derive(Clone)]
pub struct Rng(pub Arc<dyn RngSource>);

impl Rng {
    pub fn next_u64(&self) -> u64 {
        self.0.next_u64()
    }
    pub fn id_128(&self) -> [u8; 16] {
        let (a, b) = (self.next_u64(), self.next_u64());
        ((u128::from(a) << 64) | u128::from(b)).to_le_bytes()
    }
    /// Uniform in `0..bound`; `bound` must be positive.
    pub fn below(&self, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no element");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}
