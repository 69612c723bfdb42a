//! Limits the operations in flight, with a limit that may change meanwhile: files that are written at a home,
//! names that are changed there, bytes that are read ahead.
//!
//! Invariant: first come, first served; a request above the whole limit is admitted when nothing else is in
//! flight.
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

#[derive(Clone)]
pub(crate) struct Gate(Arc<Mutex<State>>);

struct State {
    limit: u64,
    used: u64,
    waiting: VecDeque<(u64, oneshot::Sender<Pass>)>,
}

/// Permission for an operation; released when the value is dropped.
pub(crate) struct Pass {
    gate: Gate,
    units: u64,
}

impl State {
    fn enter(&mut self, units: u64) -> bool {
        let fits = self.used == 0 || self.used.saturating_add(units) <= self.limit;
        self.used += if fits { units } else { 0 };
        assert!(
            !fits || self.used <= self.limit || self.used == units,
            "the gate admits more than its limit"
        );
        fits
    }
}

impl Gate {
    pub fn new(limit: u64) -> Gate {
        Gate(Arc::new(Mutex::new(State { limit, used: 0, waiting: VecDeque::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_of(&self, units: u64) -> Pass {
        Pass { gate: self.clone(), units }
    }

    /// Operations beyond a lowered limit run to their end.
    pub fn set_limit(&self, limit: u64) {
        self.lock().limit = limit;
        self.let_in();
    }

    /// Only if there is no queue.
    pub fn try_pass(&self, units: u64) -> Option<Pass> {
        let mut state = self.lock();
        (state.waiting.is_empty() && state.enter(units)).then(|| self.pass_of(units))
    }

    pub async fn pass(&self, units: u64) -> Pass {
        let waits = {
            let mut state = self.lock();
            if state.waiting.is_empty() && state.enter(units) {
                return self.pass_of(units);
            }
            let (tx, rx) = oneshot::channel();
            state.waiting.push_back((units, tx));
            rx
        };
        waits.await.expect("a waiting task holds the gate, which holds the other end")
    }

    fn let_in(&self) {
        let mut in_now = Vec::new();
        {
            let mut state = self.lock();
            while let Some(units) = state.waiting.front().map(|(units, _)| *units) {
                if !state.enter(units) {
                    break;
                }
                in_now.extend(state.waiting.pop_front());
            }
        }
        for (units, waits) in in_now {
            drop(waits.send(self.pass_of(units))); // a waiter that gave up releases it again
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        assert!(state.used >= self.units, "an operation left the gate that it had not entered");
        state.used -= self.units;
        drop(state);
        self.gate.let_in();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn poll<F: Future>(call: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        call.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn first_come_first_served_within_the_limit() {
        let gate = Gate::new(4);
        let three = gate.try_pass(3).unwrap();
        let mut two = pin!(gate.pass(2));
        assert!(poll(two.as_mut()).is_pending());
        // One would fit, but is not first in the queue.
        assert!(gate.try_pass(1).is_none());
        let mut one = pin!(gate.pass(1));
        assert!(poll(one.as_mut()).is_pending());
        drop(three);
        let Poll::Ready(two) = poll(two.as_mut()) else { panic!("two fit now") };
        assert!(poll(one.as_mut()).is_ready());
        drop(two);
    }

    #[test]
    fn a_limit_that_grows_lets_in_and_what_is_too_large_goes_alone() {
        let gate = Gate::new(1);
        let large = gate.try_pass(9).unwrap();
        let mut other = pin!(gate.pass(1));
        assert!(poll(other.as_mut()).is_pending());
        gate.set_limit(10);
        assert!(poll(other.as_mut()).is_ready());
        gate.set_limit(1);
        drop(large);
        assert!(gate.try_pass(1).is_some());
    }

    #[test]
    fn a_cancelled_wait_holds_no_permit() {
        let gate = Gate::new(1);
        let first = gate.try_pass(1).unwrap();
        {
            let mut gone = pin!(gate.pass(1));
            assert!(poll(gone.as_mut()).is_pending());
        }
        drop(first);
        assert!(gate.try_pass(1).is_some());
    }
}
