//! Retries: pauses that double up to a bound, until a deadline.
//!
//! Pauses between two nodes are spread: after a restart of one that all others wait for, they do not all ask
//! in the same moment, again and again.
use crate::{Clock, Env, Instant, Rng};
use std::time::Duration;

/// The first pause and the longest.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

/// Pauses that double up to a bound, each shortened by a random part of up to a half of it.
pub struct Pauses {
    rng: Rng,
    backoff: Backoff,
    full: Duration,
}

impl Pauses {
    pub fn new(rng: &Rng, backoff: Backoff) -> Pauses {
        Pauses { rng: rng.clone(), backoff, full: backoff.first }
    }
    pub fn next_pause(&mut self) -> Duration {
        let doubled = (self.full * 2).min(self.backoff.max);
        spread(std::mem::replace(&mut self.full, doubled), &self.rng)
    }
    /// The next pause is the first one again.
    pub fn restart(&mut self) {
        self.full = self.backoff.first;
    }
}

fn spread(full: Duration, rng: &Rng) -> Duration {
    let half = full / 2;
    half + Duration::from_nanos(rng.below(half.as_nanos() as u64 + 1))
}

/// The attempts of one operation.
pub struct Retry {
    clock: Clock,
    backoff: Backoff,
    pause: Duration,
    deadline: Instant,
    /// For pauses that are spread.
    rng: Option<Rng>,
}

impl Retry {
    pub fn new(clock: &Clock, backoff: Backoff, deadline: Instant) -> Retry {
        Retry { clock: clock.clone(), backoff, pause: backoff.first, deadline, rng: None }
    }
    /// For attempts at another node: the pauses are spread.
    pub fn spread(env: &Env, backoff: Backoff, deadline: Instant) -> Retry {
        Retry { rng: Some(env.rng.clone()), ..Retry::new(&env.clock, backoff, deadline) }
    }
    /// Whether there is time for a pause and another attempt.
    pub fn has_time(&self) -> bool {
        self.deadline.since(self.clock.now()) > self.pause
    }
    /// Progress was made: the next pause is the first one again.
    pub fn restart(&mut self) {
        self.pause = self.backoff.first;
    }
    /// The pause before the next attempt, for a caller that waits for another event meanwhile.
    pub fn next_pause(&mut self) -> Duration {
        let doubled = (self.pause * 2).min(self.backoff.max);
        let pause = std::mem::replace(&mut self.pause, doubled);
        self.rng.as_ref().map_or(pause, |rng| spread(pause, rng))
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
            let mut retry = Retry::spread(&env, backoff, Instant(u64::MAX));
            assert!((0..10).map(|_| retry.next_pause()).all(|pause| pause <= backoff.max));
        }
        at.sort();
        let spans = at.windows(2).map(|two| two[1] - two[0]);
        assert!(spans.max() < Some(Duration::from_millis(150)), "no crowd, no long gap: {at:?}");
        assert!(at[63] - at[0] > Duration::from_millis(300), "{at:?}");
    }
}
