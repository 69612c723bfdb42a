//! Retries: pauses that double up to a bound, until a deadline.
//!
//! Callers that failed together must not return together: their pauses are jittered, also after a restart of
//! a node that all others wait for.
use crate::{Clock, Env, Instant, Rng};
use std::time::Duration;

/// The first pause and the longest.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

impl Backoff {
    /// The pause after this number of earlier failures: doubling, less a random part of up to a half (`dice`
    /// of 2^16).
    pub fn pause(&self, failures: u32, dice: u64) -> Duration {
        let full = self.first.saturating_mul(1 << failures.min(16)).min(self.max);
        full - full.mul_f64((dice % (1 << 16)) as f64 / f64::from(1 << 17))
    }
}

/// Jittered pauses without a deadline.
pub struct Pauses {
    rng: Rng,
    backoff: Backoff,
    failures: u32,
}

impl Pauses {
    pub fn new(rng: &Rng, backoff: Backoff) -> Pauses {
        Pauses { rng: rng.clone(), backoff, failures: 0 }
    }
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.backoff.pause(self.failures, self.rng.below(1 << 16));
        self.failures = self.failures.saturating_add(1);
        pause
    }
    /// The next pause is the first one again.
    pub fn restart(&mut self) {
        self.failures = 0;
    }
}

/// The attempts of one operation.
pub struct Retry {
    clock: Clock,
    /// None: the pauses are exact.
    rng: Option<Rng>,
    backoff: Backoff,
    failures: u32,
    deadline: Instant,
}

impl Retry {
    /// With exact pauses: for a caller that is alone.
    pub fn new(clock: &Clock, backoff: Backoff, deadline: Instant) -> Retry {
        Retry { clock: clock.clone(), rng: None, backoff, failures: 0, deadline }
    }
    /// With jittered pauses: for calls of many to one server.
    pub fn jittered(env: &Env, backoff: Backoff, deadline: Instant) -> Retry {
        Retry { rng: Some(env.rng.clone()), ..Retry::new(&env.clock, backoff, deadline) }
    }
    /// Whether there is time for a pause and another attempt.
    pub fn has_time(&self) -> bool {
        self.deadline.since(self.clock.now()) > self.backoff.pause(self.failures, 0)
    }
    /// Progress was made: the next pause is the first one again.
    pub fn restart(&mut self) {
        self.failures = 0;
    }
    /// The pause before the next attempt, for a caller that waits for another event meanwhile.
    pub fn next_pause(&mut self) -> Duration {
        let dice = self.rng.as_ref().map_or(0, |rng| rng.below(1 << 16));
        let pause = self.backoff.pause(self.failures, dice);
        self.failures = self.failures.saturating_add(1);
        pause
    }
    pub async fn pause(&mut self) {
        let pause = self.next_pause();
        self.clock.sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimConfig, World};

    #[test]
    fn pauses_double_up_to_a_bound_until_the_deadline() {
        let world = World::new(1, SimConfig::default());
        let clock = world.node("a").clock;
        world.run(async move {
            let ms = Duration::from_millis;
            let deadline = clock.now() + ms(100);
            let mut retry = Retry::new(&clock, Backoff { first: ms(10), max: ms(40) }, deadline);
            let mut pauses = Vec::new();
            while retry.has_time() {
                let begun = clock.now();
                retry.pause().await;
                pauses.push(clock.now().since(begun));
            }
            assert_eq!(pauses, [ms(10), ms(20), ms(40)]);
            retry.restart();
            assert!(retry.has_time() && retry.next_pause() == ms(10), "30 ms are left");
            assert_eq!(retry.next_pause(), ms(20));
        });
    }

    #[test]
    fn jittered_pauses_differ_and_are_at_least_half_as_long() {
        let world = World::new(1, SimConfig::default());
        let env = world.node("a");
        let backoff = Backoff { first: Duration::from_millis(10), max: Duration::from_secs(1) };
        let pauses: Vec<Vec<Duration>> = (0..8)
            .map(|_| {
                let mut retry = Retry::jittered(&env, backoff, env.clock.now());
                (0..10).map(|_| retry.next_pause()).collect()
            })
            .collect();
        for pauses in &pauses {
            for (n, pause) in pauses.iter().enumerate() {
                let full = backoff.pause(n as u32, 0);
                assert!(*pause <= full && *pause >= full / 2, "pause {n}: {pause:?} of {full:?}");
            }
        }
        assert!(pauses.windows(2).all(|two| two[0][9] != two[1][9]), "{pauses:?}");
        assert_eq!(backoff.pause(1000, 0), backoff.max);
    }

    #[test]
    fn nodes_that_fail_together_do_not_retry_together() {
        let world = World::new(1, SimConfig::default());
        let backoff = Backoff { first: Duration::from_millis(10), max: Duration::from_millis(500) };
        let env = world.node("a");
        let mut at: Vec<Duration> = Vec::new();
        for _ in 0..64 {
            let mut pauses = Pauses::new(&env.rng, backoff);
            let all: Vec<Duration> = (0..10).map(|_| pauses.next_pause()).collect();
            assert!(all[0] >= backoff.first / 2 && all[0] <= backoff.first, "{all:?}");
            assert!(all[9] >= backoff.max / 2 && all[9] <= backoff.max, "{all:?}");
            at.push(all.iter().sum());
            pauses.restart();
            assert!(pauses.next_pause() <= backoff.first);
            let mut retry = Retry::jittered(&env, backoff, Instant(u64::MAX));
            assert!((0..10).map(|_| retry.next_pause()).all(|pause| pause <= backoff.max));
        }
        at.sort();
        let spans = at.windows(2).map(|two| two[1] - two[0]);
        assert!(spans.max() < Some(Duration::from_millis(150)), "no crowd, no long gap: {at:?}");
        assert!(at[63] - at[0] > Duration::from_millis(300), "{at:?}");
    }
}
