//! Listening: accepts connections on a node's addresses and serves them.
use crate::hello::{Greeted, Identity, Peer, Welcomed, welcome};
use crate::incoming::Arriving;
use crate::names::own_addresses;
use crate::passage::Destinations;
use crate::{Connection, Service};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use weir_env::{Addr, BoxStream, Caller, Env, Instant, Listener, TaskHandle, watch};
use weir_proto::{Error, Result};

/// Connections of one server after their hello: every client of a large cluster, and some that reconnect
/// before their old connection is found dead. Each takes a buffer of 2 to 32 KiB and three tasks.
const CONNECTIONS_MAX: usize = 8192;
/// Connections whose bytes this server passes on to another node: all clients of a leader whose network is
/// cut, on a cluster of a usual size. Each has two buffers of 8 KiB.
const PASSED_ON_MAX: usize = 1024;
/// Connections before their hello; with one more the oldest is closed. Far below the usual limit of 1,024
/// descriptors.
const STRANGERS_MAX: usize = 256;
/// A connection is not closed earlier: a handshake takes a moment, and many in parallel take longer. Further
/// callers wait in the kernel's queue meanwhile.
const STRANGER_TIME: Duration = Duration::from_secs(1);
/// Interval of the check for a free place.
const PLACE_RETRY: Duration = Duration::from_millis(2);
/// Pause after a failed accept (out of descriptors), doubling up to the second one: it would fail again at
/// once.
const ACCEPT_REST_MIN: Duration = Duration::from_millis(100);
const ACCEPT_REST_MAX: Duration = Duration::from_secs(2);
/// Interval of the log message that connections are refused for lack of places.
const REPORT_EVERY: Duration = Duration::from_secs(60);
/// How long to wait for an address in use: the kernel releases it a moment after a killed process has left
/// the process list, on a busy machine a long one, and the successor cannot detect that.
const LISTEN_WAIT: Duration = Duration::from_secs(2);
const LISTEN_RETRY: Duration = Duration::from_millis(50);

/// A node's listening sockets. Dropping it closes them, and all connections.
pub struct Server {
    shared: Arc<Shared>,
    addrs: Vec<Addr>,
    accepting: Vec<TaskHandle>,
}

struct Shared {
    env: Env,
    identity: Identity,
    service: Arc<dyn Service>,
    arriving: Arriving,
    open: Mutex<Open>,
    destinations: OnceLock<Destinations>,
    passed_on: AtomicUsize,
    stopped: watch::Sender<bool>,
}

/// A connection before its hello.
struct Waiting {
    since: Instant,
    /// The task that waits for it.
    task: Option<TaskHandle>,
}

#[derive(Default)]
struct Open {
    connections: BTreeMap<u64, Connection>,
    /// In the order of their arrival.
    strangers: BTreeMap<u64, Waiting>,
    strangers_seen: u64,
    refusals: Complaint,
    stopped: bool,
    last_refusal: String,
}

/// Listens on all of `addrs` and serves connections. An address that cannot be bound is an error that names
/// it.
pub async fn serve(
    env: &Env,
    addrs: &[Addr],
    identity: Identity,
    service: Arc<dyn Service>,
) -> Result<Server> {
    let (mut listeners, mut bound) = (Vec::new(), Vec::new());
    for addr in addrs {
        let of_addr = listen_all(env, addr).await?;
        match (addr, of_addr.first().map(|l| l.local_addr())) {
            // Other nodes resolve the name themselves: the host may get another address.
            (Addr::Host(host, _), Some(Addr::Tcp(at))) => bound.push(Addr::Host(host.clone(), at.port())),
            _ => bound.extend(of_addr.iter().map(|l| l.local_addr())),
        }
        listeners.extend(of_addr);
    }
    let arriving = Arriving::new();
    let shared = Arc::new(Shared {
        env: env.clone(),
        identity,
        service,
        arriving,
        open: Mutex::default(),
        destinations: OnceLock::new(),
        passed_on: AtomicUsize::new(0),
        stopped: watch::Sender::new(false),
    });
    let accepting = listeners
        .into_iter()
        .map(|listener| env.tasks.spawn("rpc accept", accept(shared.clone(), listener)))
        .collect();
    Ok(Server { shared, addrs: bound, accepting })
}

/// Listens on all addresses of a name, with one port.
async fn listen_all(env: &Env, addr: &Addr) -> Result<Vec<Box<dyn Listener>>> {
    let mut listeners: Vec<Box<dyn Listener>> = Vec::new();
    for mut at in own_addresses(env, addr).await? {
        if let (Addr::Tcp(at), Some(Addr::Tcp(first))) = (&mut at, listeners.first().map(|l| l.local_addr()))
        {
            at.set_port(first.port());
        }
        listeners.push(listen(env, &at).await?);
    }
    Ok(listeners)
}

/// Waits for an address that is in use, but not for long.
async fn listen(env: &Env, addr: &Addr) -> Result<Box<dyn Listener>> {
    let until = env.clock.now() + LISTEN_WAIT;
    loop {
        match env.net.listen(addr).await {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == ErrorKind::AddrInUse && env.clock.now() < until => {
                env.clock.sleep(LISTEN_RETRY).await
            }
            Err(e) => return Err(Error::from_io(format_args!("listen on {addr}"), &e)),
        }
    }
}

impl Server {
    /// The bound addresses, with the ports that were chosen for port 0, in the order of the request.
    pub fn addrs(&self) -> &[Addr] {
        &self.addrs
    }
    /// The connections that are open now.
    pub fn connections(&self) -> Vec<Connection> {
        self.shared.open().connections.values().cloned().collect()
    }
    /// From now on connections that mean one of these nodes are passed on to it.
    pub fn pass_on(&self, destinations: Destinations) {
        let _ = self.shared.destinations.set(destinations); // once for a server
    }
    /// Closes the listening sockets and all connections.
    pub fn stop(&self) {
        self.shared.stopped.send_replace(true);
        self.accepting.iter().for_each(TaskHandle::abort);
        let connections = {
            let mut open = self.shared.open();
            open.stopped = true;
            std::mem::take(&mut open.connections)
        };
        connections.values().for_each(|c| c.close("this node stops"));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn accept(shared: Arc<Shared>, listener: Box<dyn Listener>) {
    let (mut complaint, mut rest) = (Complaint::default(), ACCEPT_REST_MIN);
    loop {
        while !shared.has_place() {
            shared.env.clock.sleep(PLACE_RETRY).await;
        }
        match listener.accept().await {
            Ok((stream, caller)) => {
                rest = ACCEPT_REST_MIN;
                if let Some(number) = shared.admit(&caller) {
                    let greeting = greet(shared.clone(), number, stream, caller);
                    let task = shared.env.tasks.spawn("rpc hello", greeting);
                    if let Some(waiting) = shared.open().strangers.get_mut(&number) {
                        waiting.task = Some(task);
                    }
                }
            }
            Err(e) => {
                if complaint.is_due(shared.env.clock.now()) {
                    tracing::warn!("accept on {}: {e}", listener.local_addr());
                }
                shared.env.clock.sleep(rest).await;
                rest = (rest * 2).min(ACCEPT_REST_MAX);
            }
        }
    }
}

/// A message that is logged at most once per interval.
#[derive(Default)]
struct Complaint(Option<Instant>);

impl Complaint {
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.0.is_none_or(|reported| now.since(reported) >= REPORT_EVERY);
        if due {
            self.0 = Some(now);
        }
        due
    }
}

async fn greet(shared: Arc<Shared>, number: u64, stream: BoxStream, caller: Caller) {
    let stranger = Stranger { shared: &shared, number };
    let local_ip = stream.local_ip();
    let arriving = shared.arriving.clone();
    let known = (&shared.identity, shared.destinations.get().filter(|_| shared.may_pass_on()));
    let welcomed = welcome(&shared.env, stream, known, arriving, &caller, &*shared.service).await;
    let Greeted { peer, incoming, outgoing } = match welcomed {
        Ok(Welcomed::This(greeted)) => greeted,
        Ok(Welcomed::Another(passage)) => {
            drop(stranger);
            let mut stopped = shared.stopped.subscribe();
            shared.passed_on.fetch_add(1, Relaxed);
            tokio::select! {
                () = passage.carry() => {}
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
            shared.passed_on.fetch_sub(1, Relaxed);
            return;
        }
        Err(e) => {
            shared.log_refusal(&caller.name, &e);
            return;
        }
    };
    drop(stranger);
    let home: Weak<Shared> = Arc::downgrade(&shared);
    let on_close = Box::new(move |id: u64| {
        if let Some(shared) = home.upgrade() {
            let gone = shared.open().connections.remove(&id);
            drop(gone);
        }
    });
    let peer = Peer { addr: caller.name, ip: caller.ip, local_ip, ..peer };
    let (env, service) = (&shared.env, shared.service.clone());
    let keep = |connection: &Connection| {
        shared.keep(connection);
        shared.identity.watch(connection);
    };
    Connection::start(env, peer, incoming, outgoing, service, Some(on_close), keep);
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// A peer that keeps trying is logged once.
    fn log_refusal(&self, addr: &str, e: &Error) {
        let now = e.to_string();
        let last = std::mem::replace(&mut self.open().last_refusal, now.clone());
        if last != now
            && let Some(more) = self.env.watch.line("a connection is refused")
        {
            tracing::warn!(peer = %addr, "connection refused: {e}{more}");
        }
    }
    fn may_pass_on(&self) -> bool {
        self.passed_on.load(Relaxed) < PASSED_ON_MAX
    }
    /// Whether one more unknown peer may connect: there is a free place, or the oldest one has had its time.
    fn has_place(&self) -> bool {
        let open = self.open();
        let is_over = |waiting: &Waiting| self.env.clock.now().since(waiting.since) >= STRANGER_TIME;
        open.strangers.len() < STRANGERS_MAX || open.strangers.values().next().is_some_and(is_over)
    }
    /// Its number in the order of arrival; none: there are too many connections.
    fn admit(&self, caller: &Caller) -> Option<u64> {
        let mut open = self.open();
        if open.connections.len() + open.strangers.len() >= CONNECTIONS_MAX {
            if open.refusals.is_due(self.env.clock.now()) {
                let peer = &caller.name;
                tracing::warn!(%peer, "connection refused: {CONNECTIONS_MAX} are open already");
            }
            return None;
        }
        let number = open.strangers_seen;
        open.strangers_seen += 1;
        let oldest = (open.strangers.len() >= STRANGERS_MAX).then(|| open.strangers.pop_first()).flatten();
        open.strangers.insert(number, Waiting { since: self.env.clock.now(), task: None });
        drop(open);
        if let Some((_, Waiting { task: Some(task), .. })) = oldest {
            task.abort();
        }
        Some(number)
    }
    fn keep(&self, connection: &Connection) {
        let mut open = self.open();
        if open.stopped {
            drop(open);
            connection.close("this node stops");
        } else {
            open.connections.insert(connection.id(), connection.clone());
        }
    }
}

struct Stranger<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for Stranger<'_> {
    fn drop(&mut self) {
        let waits = self.shared.open().strangers.remove(&self.number);
        drop(waits); // outside of the lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_event_is_reported_once_in_a_while() {
        let (mut complaint, start) = (Complaint::default(), Instant::default() + REPORT_EVERY);
        let reported = (0..600).filter(|n| complaint.is_due(start + Duration::from_millis(200) * *n)).count();
        assert_eq!(reported, 2, "of 600 in two minutes");
    }
}
