//! State shared by all simulated nodes: time, timers, randomness and the trace.
//!
//! Time advances only when no task can run: the runtime then requests the next timer ([`Core::advance`]).
//! Timers fire one at a time in the order of (time, creation), so the same seed runs the same way.

use super::{
    config::SimConfig,
    net::NetState,
    node::Node,
    rng::{SplitMix, fold, hash_bytes, mix},
};
use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

/// A timer's place in the order of events: when, then which.
pub(super) type TimerKey = (u64, u64);

pub(super) struct Core {
    pub(super) seed: u64,
    pub(super) config: SimConfig,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) now_ns: u64,
    pub(super) timers: Timers,
    /// Network latencies, cuts and disk delays.
    pub(super) rng: SplitMix,
    pub(super) trace: Trace,
    pub(super) nodes: Vec<Node>,
    pub(super) net: NetState,
    /// Why the run must end; the first reason stays.
    failure: Option<String>,
    main: Option<Waker>,
}

impl Core {
    pub(super) fn new(seed: u64, config: SimConfig) -> Arc<Core> {
        let state = State {
            now_ns: 0,
            timers: Timers::default(),
            rng: SplitMix::new(seed, "world"),
            trace: Trace { hash: 0, lines: config.log.then(Vec::new), ended: false },
            nodes: Vec::new(),
            net: NetState::default(),
            failure: None,
            main: None,
        };
        Arc::new(Core { seed, config, state: Mutex::new(state) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No task can run: advances to the next timer and wakes its waiter.
    pub(super) fn advance(&self) {
        let mut state = self.lock();
        let waker = match state.timers.waiting.pop_first() {
            Some(((at, _), waker)) => {
                state.now_ns = state.now_ns.max(at);
                if state.now_ns > self.config.time_max.as_nanos() as u64 {
                    state.fail(format!("no end after {:?} of simulated time", self.config.time_max))
                } else {
                    Some(waker)
                }
            }
            None => state.fail("deadlock: every task waits, and no timer is set".into()),
        };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the run: [`super::World::run`] panics with `reason`.
    pub(super) fn fail(&self, reason: String) {
        let main = self.lock().fail(reason);
        if let Some(main) = main {
            main.wake();
        }
    }

    /// The reason to end; if there is none yet, registers the waker for it.
    pub(super) fn poll_failure(&self, cx: &Context<'_>) -> Option<String> {
        let mut state = self.lock();
        state.main = Some(cx.waker().clone());
        state.failure.clone()
    }

    pub(super) fn sleep(self: &Arc<Core>, d: Duration) -> Sleep {
        let at_ns = self.lock().now_ns.saturating_add(d.as_nanos() as u64);
        self.sleep_until_ns(at_ns)
    }

    pub(super) fn sleep_until_ns(self: &Arc<Core>, at_ns: u64) -> Sleep {
        Sleep { core: self.clone(), at_ns, key: None }
    }
}

impl State {
    fn fail(&mut self, reason: String) -> Option<Waker> {
        self.failure.get_or_insert(reason);
        self.main.clone()
    }

    /// A number that was never returned before.
    pub(super) fn next_id(&mut self) -> u64 {
        self.timers.next_id()
    }
    pub(super) fn set_timer(&mut self, key: &mut Option<TimerKey>, at_ns: u64, waker: &Waker) {
        self.timers.set(key, at_ns, waker);
    }
    pub(super) fn clear_timer(&mut self, key: &mut Option<TimerKey>) {
        self.timers.clear(key);
    }

    /// The run is over: from now on drops happen in an order that does not depend on the seed.
    pub(super) fn end_trace(&mut self) {
        self.trace.ended = true;
    }

    /// Folds an event and the time into the trace hash.
    pub(super) fn trace(&mut self, event: &str, numbers: &[u64]) {
        self.trace.event(self.now_ns, event, numbers);
    }

    pub(super) fn trace_hash(&self) -> u64 {
        mix(self.trace.hash)
    }

    pub(super) fn trace_lines(&self) -> Vec<String> {
        self.trace.lines.clone().unwrap_or_default()
    }
}

/// Wakers by time.
#[derive(Default)]
pub(super) struct Timers {
    last_id: u64,
    waiting: BTreeMap<TimerKey, Waker>,
}

impl Timers {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Wakes `waker` at `at_ns`; `key` is the caller's only timer and keeps its place if the time is the
    /// same.
    pub(super) fn set(&mut self, key: &mut Option<TimerKey>, at_ns: u64, waker: &Waker) {
        if key.is_some_and(|(at, _)| at != at_ns) {
            self.clear(key);
        }
        let key = *key.get_or_insert_with(|| (at_ns, self.next_id()));
        self.waiting.insert(key, waker.clone());
    }

    pub(super) fn clear(&mut self, key: &mut Option<TimerKey>) {
        if let Some(key) = key.take() {
            self.waiting.remove(&key);
        }
    }
}

pub(super) struct Trace {
    hash: u64,
    lines: Option<Vec<String>>,
    ended: bool,
}

impl Trace {
    pub(super) fn event(&mut self, now_ns: u64, event: &str, numbers: &[u64]) {
        if self.ended {
            return;
        }
        self.fold(now_ns);
        self.fold(hash_bytes(event.as_bytes()));
        for n in numbers {
            self.fold(*n);
        }
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>12.6} {event} {numbers:?}", now_ns as f64 / 1e9));
        }
    }

    pub fn fold(&mut self, word: u64) {
        self.hash = fold(self.hash, word);
    }
}

/// Waits for a time of the simulated world.
pub(super) struct Sleep {
    core: Arc<Core>,
    at_ns: u64,
    key: Option<TimerKey>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let mut state = this.core.lock();
        if state.now_ns >= this.at_ns {
            state.clear_timer(&mut this.key);
            return Poll::Ready(());
        }
        state.set_timer(&mut this.key, this.at_ns, cx.waker());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if self.key.is_some() {
            self.core.lock().clear_timer(&mut self.key);
        }
    }
}
