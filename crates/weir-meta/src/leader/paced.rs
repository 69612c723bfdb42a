//! Answers that take the leader long, to questions that many consoles ask: made again at most for a part of
//! the time.
//!
//! Invariant: the leader spends at most one part in [`SHARE`] of its time on one question; an answer is never
//! older than [`OLDEST`]. An answer that takes no time is always made again.
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::Result;

/// A question costs 5 % of the leader's time at most.
const SHARE: u32 = 20;
/// An administrator waits this long at most to see a change.
const OLDEST: Duration = Duration::from_secs(60);

/// The last answer to a question.
pub struct Paced<T>(Mutex<Option<Made<T>>>);

struct Made<T> {
    answer: T,
    at: Instant,
    took: Duration,
}

impl<T> Default for Paced<T> {
    fn default() -> Paced<T> {
        Paced(Mutex::new(None))
    }
}

impl<T: Clone> Paced<T> {
    /// The last answer, or one that is made now; a second caller waits for it.
    pub fn get(&self, clock: impl Fn() -> Instant, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = clock();
        if let Some(made) =
            last.as_ref().filter(|made| begun.since(made.at) < (made.took * SHARE).min(OLDEST))
        {
            return Ok(made.answer.clone());
        }
        let answer = make()?;
        let at = clock();
        *last = Some(Made { answer: answer.clone(), at, took: at.since(begun) });
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// How often an answer is made in ten minutes, for a question every 10 ms, if it takes this long.
    fn made_in_ten_minutes(takes: Duration) -> u32 {
        let (now, made, paced) = (Cell::new(Instant(0)), Cell::new(0), Paced::default());
        while now.get() < Instant(0) + Duration::from_secs(600) {
            let make = || {
                now.set(now.get() + takes);
                made.set(made.get() + 1);
                Ok(made.get())
            };
            assert_eq!(paced.get(|| now.get(), make), Ok(made.get()));
            now.set(now.get() + Duration::from_millis(10));
        }
        made.get()
    }

    #[test]
    fn a_slow_answer_takes_a_twentieth_of_the_time() {
        assert_eq!(made_in_ten_minutes(Duration::ZERO), 60_000, "one that takes no time is always new");
        let slow = made_in_ten_minutes(Duration::from_millis(100));
        assert!((280..=290).contains(&slow), "{slow} times 100 ms of 600 s");
        assert_eq!(made_in_ten_minutes(Duration::from_secs(10)), 9, "never older than a minute");
    }
}
