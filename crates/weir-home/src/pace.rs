//! A bandwidth limit: this mover's part of that of a relation. Shipping waits for its turn; recalls, which
//! readers wait for, are counted and never wait, so shipping waits for longer afterwards.
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Mutex as Turns;
use weir_env::{Clock, Instant};

/// Pauses end at least this often, because the limit may have changed.
const POLL: Duration = Duration::from_millis(100);

pub(crate) struct Pace {
    state: Mutex<State>,
    /// One at a time, in the order of their calls.
    turn: Turns<()>,
}

struct State {
    /// Bytes per second; none: there is no limit.
    limit: Option<u64>,
    /// When all that was counted is within the limit.
    free_at: Instant,
}

impl Pace {
    pub fn new(limit: Option<u64>) -> Pace {
        Pace { state: Mutex::new(State { limit, free_at: Instant(0) }), turn: Turns::new(()) }
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn set_limit(&self, limit: Option<u64>) {
        self.state().limit = limit;
    }

    /// Counts bytes that do not wait.
    pub fn count(&self, bytes: u64, now: Instant) {
        let mut state = self.state();
        let Some(limit) = state.limit else { return };
        let takes = Duration::from_secs_f64(bytes as f64 / limit.max(1) as f64);
        state.free_at = state.free_at.max(now) + takes;
    }

    /// Waits until these bytes are within the limit, and counts them.
    pub async fn pass(&self, bytes: u64, clock: &Clock) {
        let _turn = self.turn.lock().await;
        loop {
            let now = clock.now();
            let wait = {
                let state = self.state();
                if state.limit.is_some() { state.free_at.since(now) } else { Duration::ZERO }
            };
            if wait.is_zero() {
                return self.count(bytes, now);
            }
            clock.sleep(wait.min(POLL)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::sim::{SimConfig, World};

    #[test]
    fn bytes_flow_at_the_limit_and_recalls_count_first() {
        let world = World::new(7, SimConfig::default());
        world.run(async {
            let env = world.node("a");
            let (clock, pace) = (&env.clock, Pace::new(Some(1000)));
            let begun = clock.now();
            let took = |at: Instant| at.since(begun).as_millis();
            pace.pass(500, clock).await; // within the limit: nothing was counted before
            assert_eq!(took(clock.now()), 0);
            pace.pass(500, clock).await;
            assert!((500..700).contains(&took(clock.now())), "{}", took(clock.now()));
            pace.count(2000, clock.now()); // a reader's: at once
            pace.pass(1, clock).await;
            assert!((3000..3300).contains(&took(clock.now())), "{}", took(clock.now()));
            // Without a limit nothing waits, and nothing is counted.
            pace.set_limit(None);
            let before = clock.now();
            for _ in 0..100 {
                pace.pass(1 << 30, clock).await;
            }
            assert_eq!(clock.now(), before);
        });
    }
}
