//! The bounds of the work that the leader keeps for others while it waits: requests without an answer, and
//! hints in flight.
//!
//! Invariant: a request that is refused here has changed nothing, and its sender tries again. A request that
//! waits does not outlive its connection: its sender sends it again on the next one.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use weir_proto::{Error, Result};
use weir_watch::{Counter, Gauge, Watch};

/// Requests that wait at this leader for leases, for work or for home: those of 64 mounts that each wait with
/// all calls of a connection (1,024). Each takes some 2 KiB: 128 MiB.
pub const WAITING_MAX: usize = 64 << 10;

/// Hints in flight to clients that got a lock. Further ones are left out: these clients ask by themselves.
/// Each takes some 2 KiB.
pub const HINTS_MAX: usize = 4096;

/// The pause that a refused sender is asked for; its own pauses grow.
const PAUSE: Duration = Duration::from_millis(100);

/// One thing of a limited number.
pub struct Taken(Arc<AtomicUsize>, Option<Gauge>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
        if let Some(gauge) = &self.1 {
            gauge.add(-1);
        }
    }
}

fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Taken> {
    let taken = count.fetch_update(Relaxed, Relaxed, |n| (n < max).then_some(n + 1));
    taken.is_ok().then(|| Taken(count.clone(), None))
}

pub struct Admission {
    waiting: Arc<AtomicUsize>,
    waiting_max: AtomicUsize,
    hints: Arc<AtomicUsize>,
    /// Requests that wait, as meters show them.
    shown: Gauge,
    refused: Counter,
    /// Tries of operations after the first one.
    pub retries: Counter,
}

impl Admission {
    pub fn new(watch: &Watch) -> Admission {
        Admission {
            waiting: Arc::default(),
            waiting_max: AtomicUsize::new(WAITING_MAX),
            hints: Arc::default(),
            shown: watch.gauge("weir_meta_waiting_requests", ("", "")),
            refused: watch.counter("weir_meta_refused_requests_total", ("", "")),
            retries: watch.counter("weir_meta_retries_total", ("", "")),
        }
    }

    /// A request begins to wait. An error: too many do.
    pub fn wait(&self) -> Result<Taken> {
        let max = self.waiting_max.load(Relaxed);
        let Some(mut taken) = take(&self.waiting, max) else {
            self.refused.add(1);
            return Err(busy(max));
        };
        self.shown.add(1);
        taken.1 = Some(self.shown.clone());
        Ok(taken)
    }

    /// A hint is sent; `None`: too many are in flight.
    pub fn hint(&self) -> Option<Taken> {
        take(&self.hints, HINTS_MAX)
    }

    /// Another bound, for tests.
    pub fn set_waiting_max(&self, max: usize) {
        self.waiting_max.store(max, Relaxed);
    }
    /// Requests that wait, and hints in flight, for tests.
    pub fn counts(&self) -> (usize, usize) {
        (self.waiting.load(Relaxed), self.hints.load(Relaxed))
    }
}

/// The refusal of a request by a leader that has too much to do.
fn busy(max: usize) -> Error {
    Error::busy(PAUSE, format!("{max} requests wait at this metadata leader already: try again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_a_bound_are_refused_until_others_end() {
        let count = Arc::default();
        let mut all: Vec<Taken> = (0..3).filter_map(|_| take(&count, 3)).collect();
        assert_eq!(all.len(), 3);
        assert!(take(&count, 3).is_none());
        all.pop();
        assert!(take(&count, 3).is_some(), "it ends at once, too");
        drop(all);
        assert_eq!(count.load(Relaxed), 0);
    }
}
