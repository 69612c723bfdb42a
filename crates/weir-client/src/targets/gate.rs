//! The way of a call to a target: it waits, in order of arrival, until the target's window has room for it.
//!
//! Invariant: a call is in flight only with a [`Pass`]; a call that a busy target refused keeps its place at
//! the head of the queue. The decisions are those of [`crate::window`]. Knows neither groups nor requests.
use crate::window::{CallPatience, Ended, May, Retries, Window};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::{Env, Instant};
use weir_proto::{Error, Result, TargetId};
use weir_watch::{Object, Reason, WaitRecord};

/// The gates of all targets that this client has called: at most one for each target of the map.
pub struct Gates {
    env: Env,
    of: Mutex<BTreeMap<TargetId, Arc<Gate>>>,
}

struct Gate {
    env: Env,
    state: Mutex<GateState>,
}

#[derive(Default)]
struct GateState {
    window: Window,
    retries: Retries,
    patience: CallPatience,
    /// Of calls, in order of arrival.
    numbers: u64,
    /// In order of arrival. As many as the caller's bounds allow: stripes in flight, reads, hedges.
    waiting: BTreeMap<u64, Arc<Notify>>,
    /// When the first call was sent that the target has not answered, nor any later one.
    silent_since: Option<Instant>,
}

/// A call's place in the queue of a gate. It is kept while a busy target is left alone.
pub struct Ticket {
    gate: Arc<Gate>,
    number: u64,
    called: Arc<Notify>,
}

/// The right to have one call in flight.
pub struct Pass {
    gate: Arc<Gate>,
    number: u64,
    pub sent: Instant,
    ended: bool,
}

impl Gates {
    pub fn new(env: &Env) -> Gates {
        Gates { env: env.clone(), of: Mutex::default() }
    }
    fn gate(&self, target: TargetId) -> Arc<Gate> {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Gate { env: self.env.clone(), state: Mutex::default() });
        of.entry(target).or_insert_with(new).clone()
    }

    /// Waits until a call to the target may be sent; true: it had to wait. `ticket`: that of the same call
    /// before a busy target refused it; given up with the pass.
    pub async fn enter(
        &self,
        target: TargetId,
        ticket: &mut Option<Ticket>,
        deadline: Instant,
        doing: &'static str,
    ) -> Result<(Pass, bool)> {
        let gate = self.gate(target);
        if ticket.is_none() {
            if let Some(pass) = self.enter_now(&gate) {
                return Ok((pass, false));
            }
            *ticket = Some(gate.queue());
        }
        let ticket = ticket.as_ref().expect("put there just now");
        let begun = self.env.clock.now();
        let object = Object::new("target", target.0.into());
        let wait = WaitRecord::new(Reason::Queue, object).doing(doing);
        let _wait = self.env.watch.wait_since(begun.0, wait);
        loop {
            let now = self.env.clock.now();
            let until = match gate.try_enter(ticket, now) {
                May::Now => return Ok((Pass::new(&gate, ticket.number, now), true)),
                May::At(opens) => opens.min(deadline),
                May::Full => deadline,
            };
            if now >= deadline {
                let ahead = gate.lock().waiting.range(..ticket.number).count();
                return Err(Error::busy(
                    Duration::ZERO,
                    format!("{target} is busy: the call was not sent in time, {ahead} calls wait before it"),
                ));
            }
            let _ = self.env.clock.timeout(until.since(now), ticket.called.notified()).await;
        }
    }
    fn enter_now(&self, gate: &Arc<Gate>) -> Option<Pass> {
        let now = self.env.clock.now();
        let mut state = gate.lock();
        if !state.waiting.is_empty() || state.window.may_send(now) != May::Now {
            return None;
        }
        state.sent(now);
        let number = state.number();
        drop(state);
        Some(Pass::new(gate, number, now))
    }

    /// None: a failed call to the target may be tried again now. Otherwise ask again after that.
    pub fn retry_after(&self, target: TargetId) -> Option<Duration> {
        self.gate(target).lock().retries.take(self.env.clock.now())
    }
    /// Whether calls to the target wait for their turn.
    pub fn is_crowded(&self, target: TargetId) -> bool {
        !self.gate(target).lock().waiting.is_empty()
    }
    /// How long one call may be in flight.
    pub fn call_patience(&self, target: TargetId) -> Duration {
        self.gate(target).lock().patience.get()
    }
    /// The target's process lives; its disk may not.
    pub fn note_process(&self, target: TargetId) {
        self.gate(target).lock().patience.lives();
    }
    /// Its disk completes requests, too, though no answer has passed here.
    pub fn note_alive(&self, target: TargetId) {
        self.gate(target).lock().silent_since = None;
    }
    /// When the first call was sent that the target has not answered, nor any later one, not even that it is
    /// busy.
    pub fn silent_since(&self, target: TargetId) -> Option<Instant> {
        self.gate(target).lock().silent_since
    }
    /// Calls that wait for their turn, and calls in flight, to a target.
    #[cfg(test)]
    pub fn queue(&self, target: TargetId) -> (usize, u32) {
        let gate = self.gate(target);
        let state = gate.lock();
        (state.waiting.len(), state.window.in_flight())
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn queue(self: &Arc<Gate>) -> Ticket {
        let number = self.lock().number();
        self.queue_as(number)
    }
    fn queue_as(self: &Arc<Gate>, number: u64) -> Ticket {
        let called = Arc::new(Notify::new());
        self.lock().waiting.insert(number, called.clone());
        Ticket { gate: self.clone(), number, called }
    }
    fn try_enter(&self, ticket: &Ticket, now: Instant) -> May {
        let mut state = self.lock();
        if state.waiting.first_key_value().map(|(first, _)| *first) != Some(ticket.number) {
            return May::Full;
        }
        let may = state.window.may_send(now);
        if may == May::Now {
            state.sent(now);
            state.waiting.remove(&ticket.number);
            state.call_next();
        }
        may
    }
}

impl GateState {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
    fn sent(&mut self, now: Instant) {
        self.window.sent();
        self.silent_since.get_or_insert(now);
    }
    fn call_next(&self) {
        if let Some((_, next)) = self.waiting.first_key_value() {
            next.notify_one();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        if state.waiting.remove(&self.number).is_some() {
            state.call_next();
        }
    }
}

impl Pass {
    fn new(gate: &Arc<Gate>, number: u64, sent: Instant) -> Pass {
        Pass { gate: gate.clone(), number, sent, ended: false }
    }
    pub fn end(mut self, how: Ended) {
        self.finish(how);
    }
    /// The target is busy, and has not begun the call: which waits at the head of the queue.
    pub fn refused(self, wait: Duration, ticket: &mut Option<Ticket>) {
        match ticket {
            Some(ticket) => drop(self.gate.lock().waiting.insert(ticket.number, ticket.called.clone())),
            None => *ticket = Some(self.gate.queue_as(self.number)),
        }
        self.end(Ended::Busy(wait));
    }
    fn finish(&mut self, how: Ended) {
        self.ended = true;
        let now = self.gate.env.clock.now();
        let dice = match how {
            Ended::Busy(_) => self.gate.env.rng.below(1 << 16),
            _ => 0,
        };
        let mut state = self.gate.lock();
        if let Ended::Answered | Ended::Busy(_) = how {
            state.silent_since = None;
        }
        state.window.ended(self.sent, now, how, dice);
        state.retries.ended(how);
        state.patience.ended(now.since(self.sent), how);
        state.call_next();
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(Ended::Abandoned);
        }
    }
}

/// When the calls of one round were really sent: not while they waited for a place.
#[derive(Default)]
pub struct Departures {
    at: Mutex<BTreeMap<usize, Instant>>,
    changed: Notify,
}

/// One of the calls.
#[derive(Clone)]
pub struct Departure {
    of: Arc<Departures>,
    index: usize,
}

impl Departures {
    pub fn new() -> Arc<Departures> {
        Arc::default()
    }
    pub fn of(self: &Arc<Departures>, index: usize) -> Departure {
        Departure { of: self.clone(), index }
    }
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Instant>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn at(&self, index: usize) -> Option<Instant> {
        self.lock().get(&index).copied()
    }
    /// Returns when a call was sent that had to wait, or was refused by a busy target.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Departure {
    /// For a call whose target is not suspected.
    pub fn unwatched() -> Departure {
        Departures::new().of(0)
    }
    pub fn sent(&self, at: Instant, waited: bool) {
        self.of.lock().insert(self.index, at);
        if waited {
            self.of.changed.notify_one();
        }
    }
    /// It is not in flight any more, and waits again.
    pub fn returned(&self) {
        self.of.lock().remove(&self.index);
        self.of.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::{FLOOR, START};
    use weir_env::sim::{SimConfig, World};

    const T: TargetId = TargetId(1);

    async fn pass(gates: &Gates, ticket: &mut Option<Ticket>) -> Pass {
        let deadline = gates.env.clock.now() + Duration::from_secs(60);
        gates.enter(T, ticket, deadline, "test").await.unwrap().0
    }

    #[test]
    fn calls_beyond_the_window_wait_in_order() {
        let world = World::new(1, SimConfig::default());
        let env = world.node("a");
        world.run(async move {
            let gates = Arc::new(Gates::new(&env));
            let mut out = Vec::new();
            for _ in 0..START {
                out.push(pass(&gates, &mut None).await);
            }
            let (done, mut order) = tokio::sync::mpsc::unbounded_channel();
            for n in 0..10 {
                let (gates, done) = (gates.clone(), done.clone());
                let clock = env.clock.clone();
                env.tasks.spawn("caller", async move {
                    let entered = async { pass(&gates, &mut None).await };
                    let patience = Duration::from_secs(if n % 3 == 0 { 1 } else { 50 });
                    let Ok(pass) = clock.timeout(patience, entered).await else { return };
                    let _ = done.send(n);
                    pass.end(Ended::Answered);
                });
            }
            env.clock.sleep(Duration::from_secs(2)).await;
            assert_eq!(gates.queue(T), (6, START), "four have given up");
            drop(out.pop());
            drop(done);
            let mut seen = Vec::new();
            while let Some(n) = order.recv().await {
                seen.push(n);
            }
            assert_eq!(seen, [1, 2, 4, 5, 7, 8]);
            assert_eq!(gates.queue(T), (0, START - 1));
        });
    }

    #[test]
    fn a_busy_target_gets_its_two_oldest_calls_after_each_pause() {
        let world = World::new(2, SimConfig::default());
        let env = world.node("a");
        world.run(async move {
            let gates = Arc::new(Gates::new(&env));
            let (sent, mut order) = tokio::sync::mpsc::unbounded_channel();
            // A target that refuses everything for 20 s.
            let (begun, until) = (env.clock.now(), env.clock.now() + Duration::from_secs(20));
            for n in 0..200 {
                let (gates, env, sent) = (gates.clone(), env.clone(), sent.clone());
                env.clone().tasks.spawn("caller", async move {
                    let mut ticket = None;
                    loop {
                        let pass = pass(&gates, &mut ticket).await;
                        let _ = sent.send((n, env.clock.now()));
                        env.clock.sleep(Duration::from_millis(1)).await;
                        if env.clock.now() >= until {
                            return pass.end(Ended::Answered);
                        }
                        pass.refused(Duration::from_millis(100), &mut ticket);
                    }
                });
            }
            drop(sent);
            let mut all = Vec::new();
            while let Some(call) = order.recv().await {
                all.push(call);
            }
            let refused: Vec<_> = all.iter().filter(|(_, at)| *at < until).collect();
            assert!(refused.len() < 100, "{} calls in 20 s", refused.len());
            // After the first window only the oldest two are tried.
            let later: Vec<u32> = refused[START as usize..].iter().map(|(n, _)| *n).collect();
            assert!(later.iter().all(|n| *n < 8), "{later:?}");
            assert_eq!(all.len() - refused.len(), 200, "all succeed once it is not busy");
            assert!(all.last().unwrap().1.since(begun) < Duration::from_secs(25));
            assert!(later.len() as u32 >= FLOOR);
        });
    }

    #[test]
    fn a_call_that_is_not_sent_in_time_accuses_no_target() {
        let world = World::new(3, SimConfig::default());
        let env = world.node("a");
        world.run(async move {
            let gates = Gates::new(&env);
            let mut out = Vec::new();
            for _ in 0..START {
                out.push(pass(&gates, &mut None).await);
            }
            let deadline = env.clock.now() + Duration::from_secs(3);
            let e = gates.enter(T, &mut None, deadline, "test").await.map(drop).unwrap_err();
            assert!(!crate::data::is_unreachable(&e), "{e:?}");
            assert!(e.context.contains("t1 is busy"), "{e}");
            assert_eq!(env.clock.now(), deadline);
            assert_eq!(gates.queue(T), (0, START));
        });
    }
}
