//! The bounds of the requests that a coordinator has at the same time. Requests beyond a bound are refused,
//! and their senders try again; heartbeats and joins of members never are.
use crate::owner::EVENTS_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use weir_proto::{Error, Result};

/// Requests that wait for a place in the owner's queue: as many as it holds. Further ones are refused, except
/// those by which members show that they live.
pub const CROWD_MAX: usize = EVENTS_MAX;

/// The pause that a refused sender is asked for; its own pauses grow.
const PAUSE: Duration = Duration::from_millis(100);

/// A limited number of things of one kind.
pub struct Admission {
    count: Arc<AtomicUsize>,
    max: usize,
    /// Their name and action, for the refusal.
    what: &'static str,
}

/// One of them, as long as this exists.
pub struct Taken(Arc<AtomicUsize>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Admission {
    pub fn new(max: usize, what: &'static str) -> Admission {
        Admission { count: Arc::default(), max, what }
    }
    pub fn take(&self) -> Result<Taken> {
        let taken = self.count.fetch_update(Relaxed, Relaxed, |n| (n < self.max).then_some(n + 1));
        match taken {
            Ok(_) => Ok(Taken(self.count.clone())),
            Err(_) => Err(busy(self.max, self.what)),
        }
    }
}

/// The refusal of a request by a coordinator that has too much to do.
pub fn busy(max: usize, what: &str) -> Error {
    Error::busy(PAUSE, format!("{max} {what} at this coordinator already: try again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_a_bound_are_refused_until_others_end() {
        let bound = Admission::new(2, "questions wait");
        let (first, _second) = (bound.take().unwrap(), bound.take().unwrap());
        let refused = bound.take().err().unwrap().context;
        assert!(refused.starts_with("2 questions wait at this coordinator already"), "{refused}");
        drop(first);
        assert!(bound.take().is_ok());
        assert_eq!(bound.count.load(Relaxed), 1);
    }
}
