//! A reconnecting channel to a node: dials on the first call, and again after a lost connection.
//!
//! The node's addresses may change: they are looked up before each round of dials. Addresses are dialed in
//! order, the next one as soon as the previous one has failed, or has not answered for a moment; the first
//! connection is used.
//!
//! Invariants: one round of dials at a time, which continues when its caller's patience ends; a channel never
//! repeats a request that was sent (only its caller knows whether that is safe); failed dials are spaced by a
//! growing, jittered pause; nothing is dialed for a channel that was dropped.
use crate::hello::{Identity, connect, is_refusal};
use crate::names::resolved;
use crate::through::{Via, connect_through};
use crate::{Answered, Connection, Payload, Service};
use bytes::Bytes;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use weir_env::{Addr, Backoff, Env, Instant, TaskHandle, watch};
use weir_proto::map::Role;
use weir_proto::sender::Sender;
use weir_proto::{Error, ErrorKind, Request, Result};

/// Pause after the first failed round of dials; doubles with each further one,
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// up to this: a node that has returned is found within a second.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The next address is dialed, too, when one has not answered after this. Longer than a handshake takes on a
/// busy machine; an address that drops all packets (a host that is off) must not delay the others for the
/// whole patience of a hello.
const HEAD_START: Duration = Duration::from_millis(200);
/// Another node is asked to pass the connection on when the addresses have not answered after this: a busy
/// node that is late is not to be dialed twice.
const DIRECT_HEAD_START: Duration = Duration::from_secs(1);

/// A silent peer has this long for an echo: a round trip, and a turn of a busy machine's processor.
const ECHO_PATIENCE: Duration = Duration::from_millis(500);
/// How long a new connection may take through another node.
const AROUND_PATIENCE: Duration = Duration::from_secs(2);
/// After a connection through another node, the direct one gets this multiple of its time,
const DIRECT_TIMES: u32 = 4;
/// and this at least.
const DIRECT_MIN: Duration = Duration::from_millis(300);
/// Pauses between comparisons of the ways to a node.
const WAY_PAUSES: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(30) };

/// The addresses of a node, as known now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// In the order of the dials.
    pub addrs: Vec<Addr>,
    /// Its name in the cluster. Another node may have its address by now: that one is refused. `None`: any
    /// node is accepted.
    pub name: Option<String>,
    /// Its role. An impostor with another role has no certificate for this one. `None`: any.
    pub role: Option<Role>,
    /// Nodes through which it may be reached by its name if it does not answer at its addresses.
    pub through: Vec<Via>,
}

impl Endpoint {
    /// Ways to dial it.
    fn ways(&self) -> usize {
        self.addrs.len() + if self.name.is_some() { self.through.len() } else { 0 }
    }
    /// A direct way by its number, or one through another node.
    fn way(&self, n: usize) -> std::result::Result<&Addr, &Via> {
        self.addrs.get(n).ok_or_else(|| &self.through[n - self.addrs.len()])
    }
}

/// The result of a dial, by the position of the address.
type Report = mpsc::Sender<(usize, Result<Connection>)>;

/// Running dials. They are aborted when it is dropped.
struct Dials(Vec<TaskHandle>);
impl Drop for Dials {
    fn drop(&mut self) {
        self.0.iter().for_each(TaskHandle::abort);
    }
}

async fn resolve(env: &Env, at: Endpoint) -> Result<Endpoint> {
    let addrs = resolved(env, &at.addrs).await?;
    let mut through = Vec::new();
    for via in at.through {
        // A name that is unknown now is one way less.
        let found = resolved(env, std::slice::from_ref(&via.addr)).await.unwrap_or_default();
        through.extend(found.into_iter().next().map(|addr| Via { addr, ..via }));
    }
    Ok(Endpoint { addrs, through, ..at })
}

/// Returns a node's present addresses, or why they are unknown. Fast, never blocking.
pub type LookUp = Arc<dyn Fn() -> Result<Endpoint> + Send + Sync>;

/// A reconnecting channel to one node. Cheap to clone; clones share the connection.
#[derive(Clone)]
pub struct Channel(Arc<Handle>);

/// Shared by the clones of a channel. A running dial has only the inner part, and ends with the last clone.
struct Handle(Arc<Inner>);

impl Deref for Handle {
    type Target = Arc<Inner>;
    fn deref(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let dial = self.0.state().dial.take();
        dial.iter().for_each(TaskHandle::abort);
    }
}

struct Inner {
    env: Env,
    look_up: LookUp,
    identity: Identity,
    callbacks: Arc<dyn Service>,
    state: Mutex<State>,
    /// Held while dialing. Waiters are served in order.
    dialing: Arc<tokio::sync::Mutex<()>>,
    generation: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    failures: u32,
    /// No dial before this.
    rest_until: Instant,
    last_error: Option<Error>,
    /// The last round of dials.
    dial: Option<TaskHandle>,
    /// The way is not compared again before this; how often in a row that changed nothing.
    way_until: Instant,
    ways_kept: u32,
}

impl Channel {
    /// `addrs`: of one node, tried in this order. Nothing is dialed before the first use.
    pub fn new(env: &Env, addrs: Vec<Addr>, identity: Identity, callbacks: Arc<dyn Service>) -> Channel {
        let fixed = Endpoint { addrs, ..Endpoint::default() };
        Channel::following(env, Arc::new(move || Ok(fixed.clone())), identity, callbacks)
    }

    /// To a node that may move: its addresses are looked up before each dial.
    pub fn following(env: &Env, look_up: LookUp, identity: Identity, callbacks: Arc<dyn Service>) -> Channel {
        Channel(Arc::new(Handle(Arc::new(Inner {
            env: env.clone(),
            look_up,
            identity,
            callbacks,
            state: Mutex::default(),
            dialing: Arc::default(),
            generation: watch::Sender::new(0),
        }))))
    }

    /// The live connection, if there is one now.
    pub fn current(&self) -> Option<Connection> {
        self.0.state().connection.clone().filter(|c| !c.is_closed())
    }

    /// The live connection; dials until there is one, at most `patience`. A refusal (`Denied`, `Unsupported`)
    /// is returned at once, any other failure as `Unavailable` with the last reason.
    pub async fn connection(&self, patience: Duration) -> Result<Connection> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        match self.0.env.clock.timeout(patience, self.dial_until_refused()).await {
            Ok(result) => result,
            Err(_) => Err(self.0.unreachable()),
        }
    }

    /// The live connection or the result of one round of dials; fails at once during the pause after a
    /// failure. For callers that have an alternative.
    pub async fn connection_now(&self) -> Result<Connection> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        if self.0.state().rest_until > self.0.env.clock.now() {
            return Err(self.0.unreachable());
        }
        self.dial().await
    }

    /// Calls on the live connection, dialing until there is one. See [`Connection::call`]; the patience is
    /// for both.
    pub async fn call<R: Request>(
        &self,
        request: &R,
        payload: Vec<Bytes>,
        patience: Duration,
    ) -> Result<(R::Reply, Bytes)> {
        self.call_payload(request, payload.into(), patience).await
    }

    /// `call` with a payload whose checksum may be known already.
    pub async fn call_payload<R: Request>(
        &self,
        request: &R,
        payload: Payload,
        patience: Duration,
    ) -> Result<(R::Reply, Bytes)> {
        let begun = self.0.env.clock.now();
        let connection = self.connection(patience).await.map_err(|e| e.doing(R::NAME))?;
        let left = patience.saturating_sub(self.0.env.clock.now().since(begun));
        connection.call_payload(request, payload, left).await
    }

    /// `call_payload`, but `Unavailable` at once when the node cannot be reached now.
    pub async fn call_now<R: Request>(
        &self,
        request: &R,
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<R::Reply>> {
        let (connection, left) = self.connected_now(patience).await.map_err(|e| e.doing(R::NAME))?;
        connection.call_answered(request, payload, left).await
    }

    /// Why there is no connection, if known.
    pub fn why_unreachable(&self) -> Error {
        self.0.unreachable()
    }

    /// `call_now` with a request that is already encoded; the reply is not decoded.
    pub async fn call_encoded_now(
        &self,
        method: u16,
        body: &[u8],
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<Bytes>> {
        let (connection, left) = self.connected_now(patience).await?;
        connection.call_encoded(method, body, payload, left).await
    }

    /// `connection_now` within `patience`, and the remaining patience.
    async fn connected_now(&self, patience: Duration) -> Result<(Connection, Duration)> {
        let clock = &self.0.env.clock;
        let begun = clock.now();
        let connected = clock.timeout(patience, self.connection_now()).await;
        let connection = connected.unwrap_or_else(|_| Err(self.0.unreachable()))?;
        Ok((connection, patience.saturating_sub(clock.now().since(begun))))
    }

    /// Grows by one with each new connection; 0 before the first.
    pub fn generation(&self) -> watch::Receiver<u64> {
        self.0.generation.subscribe()
    }
    /// Closes the connection if the node is known to have moved: a node that is silent at the old address may
    /// never close it.
    pub fn leave_old_address(&self) {
        let (Some(connection), Ok(at)) = (self.current(), (self.0.look_up)()) else { return };
        // Through another node only its name counts; the addresses of a host name are known only when dialed.
        let is_same = connection.via().is_some() && at.name.as_ref() == Some(&connection.peer().name);
        let is_there =
            |a: &Addr| is_same || matches!(a, Addr::Host(..)) || a.to_string() == connection.peer_addr();
        if !at.addrs.is_empty() && !at.addrs.iter().any(is_there) {
            self.disconnect("the node is at another address now");
        }
    }
    /// Closes the connection; the next use dials again.
    pub fn disconnect(&self, reason: &str) {
        let connection = self.0.state().connection.take();
        if let Some(connection) = connection {
            connection.close(reason);
        }
    }

    /// While the connected node is silent: switches to another one that answers at another address, for
    /// services whose leader may change. A busy node that is only late keeps its connection. True: the
    /// connection was switched.
    pub async fn find_another(&self, patience: Duration) -> bool {
        let inner = &self.0;
        let (Some(silent), Ok(at)) = (self.current(), (inner.look_up)()) else { return false };
        // A running dial will find it, too.
        let Ok(_one_at_a_time) = inner.dialing.clone().try_lock_owned() else { return false };
        let Ok(mut at) = resolve(&inner.env, at).await else { return false };
        at.addrs.retain(|addr| addr.to_string() != silent.peer_addr());
        at.through.clear();
        if at.addrs.is_empty() {
            return false;
        }
        let dial = inner.dial_in_order(Arc::new(at), Some(silent.peer().instance));
        let Ok(Ok(found)) = inner.env.clock.timeout(patience, dial).await else { return false };
        inner.connected(&found);
        silent.close("another node answers in its place");
        true
    }

    /// Compares the ways to the node, in growing pauses, if an answer `is_late`, or the live connection leads
    /// through another node. A silent one is replaced by a new one, directly or through another node, if that
    /// is quick; a node that is only slow is so on every way. True: the connection was replaced.
    pub async fn compare_ways(&self, is_late: bool) -> bool {
        let Some(used) = self.current() else { return false };
        let is_around = used.via().is_some();
        {
            let mut state = self.0.state();
            if !is_late && !is_around {
                state.ways_kept = 0;
                return false;
            }
            let now = self.0.env.clock.now();
            if now < state.way_until {
                return false;
            }
            state.way_until = now + WAY_PAUSES.pause(state.ways_kept, self.0.env.rng.below(1 << 16));
            state.ways_kept = state.ways_kept.saturating_add(1);
        }
        let is_silent = is_late && !used.echoes(ECHO_PATIENCE).await;
        if !is_silent && !is_around {
            return false;
        }
        let found = self.0.better_way(&used).await;
        let Some(found) = found.filter(|found| is_silent || found.via().is_none()) else { return false };
        let way = found.via().map_or_else(|| "directly".to_owned(), |via| format!("through {via}"));
        let name = &found.peer().name;
        if let Some(more) = self.0.env.watch.line("another way to a node") {
            tracing::info!("{name} is reached {way} from now on{more}");
        }
        self.0.connected(&found);
        self.0.state().ways_kept = 0;
        used.close("it is reached on another way");
        true
    }

    async fn dial_until_refused(&self) -> Result<Connection> {
        loop {
            let rest_until = self.0.state().rest_until;
            if rest_until > self.0.env.clock.now() {
                self.0.env.clock.sleep_until(rest_until).await;
            }
            match self.dial().await {
                Err(e) if !is_refusal(&e) => {}
                result => return result,
            }
        }
    }

    /// One round over all addresses, unless another caller's round has just ended. It continues if its caller
    /// gives up: otherwise a node whose handshake takes longer than the callers' patience would never be
    /// reached.
    async fn dial(&self) -> Result<Connection> {
        let inner: &Arc<Inner> = &self.0;
        let one_at_a_time = inner.dialing.clone().lock_owned().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        if inner.state().rest_until > inner.env.clock.now() {
            return Err(inner.failed());
        }
        let (report, reported) = oneshot::channel();
        let dialing = inner.clone();
        let dial = inner.env.tasks.spawn("dial", async move {
            let result = dialing.dial_all().await;
            drop(one_at_a_time);
            let _ = report.send(result); // the caller may have given up
        });
        inner.state().dial = Some(dial);
        reported.await.unwrap_or_else(|_| {
            inner.note_failure(Error::unavailable("this node stops"));
            Err(inner.failed())
        })
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn dial_all(self: &Arc<Self>) -> Result<Connection> {
        let found = match (self.look_up)() {
            Ok(at) => resolve(&self.env, at).await,
            Err(e) => Err(e),
        };
        let dialed = match found {
            Ok(at) if at.ways() == 1 && at.addrs.len() == 1 => self.dial_at(Ok(&at.addrs[0]), &at).await,
            Ok(at) => self.dial_in_order(Arc::new(at), None).await,
            Err(e) => Err(e),
        };
        match dialed {
            Ok(connection) => {
                self.connected(&connection);
                Ok(connection)
            }
            Err(e) => {
                self.note_failure(e);
                Err(self.failed())
            }
        }
    }

    /// The quickest connection that carries large packets, of a direct one and one through another node; the
    /// direct one gets some time more. `used` is silent, or leads through another node.
    async fn better_way(self: &Arc<Self>, used: &Connection) -> Option<Connection> {
        // A running dial will find it, too.
        let _one_at_a_time = self.dialing.clone().try_lock_owned().ok()?;
        let at = resolve(&self.env, (self.look_up)().ok()?).await.ok()?;
        let around = Endpoint { addrs: Vec::new(), ..at.clone() };
        let direct = Endpoint { through: Vec::new(), ..at };
        let begun = self.env.clock.now();
        let clock = self.env.clock.clone();
        let direct = self.dial_and_echo(direct);
        tokio::pin!(direct);
        if used.via().is_some() {
            return clock.timeout(AROUND_PATIENCE, direct).await.ok().flatten();
        }
        let around = clock.timeout(AROUND_PATIENCE, self.dial_and_echo(around));
        tokio::pin!(around);
        let mut failed = false;
        let found = loop {
            tokio::select! {
                biased;
                answer = &mut direct, if !failed => match answer {
                    Some(direct) => return Some(direct),
                    None => failed = true,
                },
                answer = &mut around => break answer.ok().flatten()?,
            }
        };
        let patience = (clock.now().since(begun) * DIRECT_TIMES).max(DIRECT_MIN);
        let direct = if failed { None } else { clock.timeout(patience, direct).await.ok().flatten() };
        if direct.is_some() {
            found.close("the direct way is as good");
        }
        Some(direct.unwrap_or(found))
    }

    async fn dial_and_echo(self: &Arc<Self>, at: Endpoint) -> Option<Connection> {
        let found = self.dial_in_order(Arc::new(at), None).await.ok()?;
        found.echoes(AROUND_PATIENCE).await.then_some(found)
    }

    /// The first connection to a process other than `instance`; otherwise the error of the last address.
    async fn dial_in_order(self: &Arc<Self>, at: Arc<Endpoint>, instance: Option<u64>) -> Result<Connection> {
        let (count, direct) = (at.ways(), at.addrs.len());
        let (report, mut reported) = mpsc::channel(count.max(1));
        let mut dials = Dials(Vec::new());
        let (mut failed, mut last) = (0, None::<(usize, Error)>);
        let winner = loop {
            if failed == count {
                break None;
            }
            if failed == dials.0.len() {
                dials.0.push(self.start_dial(at.clone(), dials.0.len(), instance, report.clone()));
            }
            tokio::select! {
                biased;
                dialed = reported.recv() => match dialed {
                    Some((_, Ok(connection))) => break Some(connection),
                    Some((n, Err(e))) => {
                        failed += 1;
                        // The error of a direct dial is closer to the cause.
                        let rank = |n: usize| (n < direct, n);
                        last = Some(last.filter(|(other, _)| rank(*other) > rank(n)).unwrap_or((n, e)));
                    }
                    None => break None,
                },
                () = self.env.clock.sleep(head_start(dials.0.len() < direct)), if dials.0.len() < count => {
                    dials.0.push(self.start_dial(at.clone(), dials.0.len(), instance, report.clone()));
                }
            }
        };
        drop(dials);
        reported.close();
        while let Ok((_, dialed)) = reported.try_recv() {
            if let Ok(connection) = dialed {
                connection.close("another address of the node answered first");
            }
        }
        let error = || last.map_or_else(|| Error::unavailable("this node has no address"), |(_, e)| e);
        winner.ok_or_else(error)
    }

    fn start_dial(
        self: &Arc<Self>,
        at: Arc<Endpoint>,
        n: usize,
        instance: Option<u64>,
        report: Report,
    ) -> TaskHandle {
        let inner = self.clone();
        self.env.tasks.spawn("dial an address", async move {
            let mut dialed = inner.dial_at(at.way(n), &at).await;
            if let Ok(connection) = &dialed
                && Some(connection.peer().instance) == instance
            {
                connection.close("another node was meant");
                dialed = Err(Error::unavailable(format!(
                    "connect to {}: the same node answers",
                    connection.peer_addr()
                )));
            }
            if let Err(mpsc::error::SendError((_, Ok(connection)))) = report.send((n, dialed)).await {
                connection.close("another address of the node answered first");
            }
        })
    }

    async fn dial_at(&self, way: std::result::Result<&Addr, &Via>, at: &Endpoint) -> Result<Connection> {
        let callbacks = self.callbacks.clone();
        let (addr, mut dialed) = match way {
            Ok(addr) => (addr, connect(&self.env, addr, &self.identity, callbacks).await),
            Err(via) => {
                let name = at.name.as_deref().unwrap_or_default();
                (&via.addr, connect_through(&self.env, via, name, &self.identity, callbacks).await)
            }
        };
        // A mount at a socket of this machine forwards requests to their destination.
        if matches!((addr, &dialed), (Addr::Unix(_), Ok(connection)) if connection.peer().role == Role::Mount)
        {
            return dialed;
        }
        if let (Some(role), Ok(connection)) = (at.role, &dialed)
            && connection.proved().role() != Some(role)
        {
            let (found, meant) = (connection.proved().sender(), Sender::from(role));
            connection.close("a node of another role was meant");
            dialed = Err(Error::unavailable(format!("connect to {addr}: a {found} answers, not a {meant}")));
        }
        let Some(name) = &at.name else { return dialed };
        match dialed {
            Ok(connection) if connection.peer().name != *name => {
                let other =
                    format!("connect to {addr}: {:?} answers there, not {name:?}", connection.peer().name);
                connection.close("another node was meant");
                Err(Error::unavailable(other))
            }
            // The peer is of another cluster: the node at this address has moved, and the map is not updated
            // yet.
            Err(e) if e.kind == ErrorKind::Denied => {
                Err(e.of_kind(ErrorKind::Unavailable).doing(format_args!("reach {name}")))
            }
            dialed => dialed.map_err(|e| e.doing(format_args!("reach {name}"))),
        }
    }

    fn connected(&self, connection: &Connection) {
        let old = {
            let mut state = self.state();
            (state.failures, state.last_error) = (0, None);
            state.connection.replace(connection.clone())
        };
        drop(old); // its service is notified outside of the lock
        self.generation.send_modify(|generation| *generation += 1);
    }

    fn note_failure(&self, e: Error) {
        let mut state = self.state();
        let pause = pause_after(state.failures, self.env.rng.below(1 << 16));
        state.failures = state.failures.saturating_add(1);
        state.rest_until = self.env.clock.now() + pause;
        // A channel logs each reason once; there may be many channels.
        let is_new = state.last_error.as_ref() != Some(&e);
        if is_new && let Some(more) = self.env.watch.line("a node is not reached") {
            tracing::info!("{e}{more}");
        }
        state.last_error = Some(e);
    }

    /// The last round's error: a refusal unchanged, any other as `Unavailable`.
    fn failed(&self) -> Error {
        match &self.state().last_error {
            Some(e) if is_refusal(e) => e.clone(),
            Some(e) => e.clone().of_kind(ErrorKind::Unavailable),
            None => Error::unavailable(format!("{} cannot be reached", self.names())),
        }
    }

    fn unreachable(&self) -> Error {
        let error = self.failed();
        let failures = self.state().failures;
        Error { context: format!("{} (failed {failures} times)", error.context), ..error }
    }

    fn names(&self) -> String {
        let at = (self.look_up)().unwrap_or_default();
        let addrs = at.addrs.iter().map(Addr::to_string).collect::<Vec<_>>().join(", ");
        at.name.map_or(addrs.clone(), |name| format!("{name} at {addrs}"))
    }
}

fn head_start(next_is_direct: bool) -> Duration {
    if next_is_direct { HEAD_START } else { DIRECT_HEAD_START }
}

/// The pause after the (failures + 1)th consecutive failure: doubling, less a random part of up to a half
/// (`dice` of 2^16).
fn pause_after(failures: u32, dice: u64) -> Duration {
    let full = PAUSE_MIN.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX);
    full - full.mul_f64(dice as f64 / f64::from(1 << 17))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_second_and_differ() {
        assert_eq!(pause_after(0, 0), PAUSE_MIN);
        assert_eq!(pause_after(2, 0), 4 * PAUSE_MIN);
        assert_eq!(pause_after(1000, 0), PAUSE_MAX);
        let least = pause_after(1000, (1 << 16) - 1);
        assert!(least >= PAUSE_MAX / 2 && least < PAUSE_MAX.mul_f64(0.51));
    }
}
