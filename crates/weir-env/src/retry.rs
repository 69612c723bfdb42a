//! Retries: pauses that double up to a bound, until a deadline.
use crate::{Clock, Instant};
use std::time::Duration;

/// The first pause and the longest.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

/// The attempts of one operation.
pub struct Retry {
    clock: Clock,
    backoff: Backoff,
    pause: Duration,
    deadline: Instant,
}

impl Retry {
    pub fn new(clock: &Clock, backoff: Backoff, deadline: Instant) -> Retry {
        Retry { clock: clock.clone(), backoff, pause: backoff.first, deadline }
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
        std::mem::replace(&mut self.pause, doubled)
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
}
