//! Listening: accepts connections on a node's addresses and serves them.
use crate::hello::{Identity, Peer, welcome};
use crate::outgoing::Outgoing;
use crate::{Connection, Service};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use weir_env::{Addr, BoxStream, Env, Listener, TaskHandle};
use weir_proto::{Error, Result};

/// Connections of one server, said hello or not: every client of a large cluster, and some that come back before
/// their old connection is found dead. Each takes a 32 KiB buffer and three tasks.
const CONNECTIONS_MAX: usize = 8192;
/// Rest after a failed accept (out of descriptors): it would fail again at once.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// How long an address may be in use: a process that was killed lets go of it a moment after it is gone from the list of
/// processes, on a busy machine a long one, and who starts the next one does not know.
const LISTEN_WAIT: Duration = Duration::from_secs(2);
const LISTEN_RETRY: Duration = Duration::from_millis(50);

/// A node's open doors. Dropping it closes them, and all connections.
pub struct Server {
    shared: Arc<Shared>,
    addrs: Vec<Addr>,
    accepting: Vec<TaskHandle>,
}

struct Shared {
    env: Env,
    identity: Identity,
    service: Arc<dyn Service>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    connections: BTreeMap<u64, Connection>,
    /// Connections whose hello has not come.
    strangers: usize,
    stopped: bool,
    last_refusal: String,
}

/// Listens on all of `addrs` and serves who comes. An address that cannot be bound is an error that names it.
pub async fn serve(
    env: &Env,
    addrs: &[Addr],
    identity: Identity,
    service: Arc<dyn Service>,
) -> Result<Server> {
    let mut listeners = Vec::new();
    for addr in addrs {
        listeners.push(listen(env, addr).await?);
    }
    let bound = listeners.iter().map(|l| l.local_addr()).collect();
    let shared = Arc::new(Shared { env: env.clone(), identity, service, open: Mutex::default() });
    let accepting = listeners
        .into_iter()
        .map(|listener| env.tasks.spawn("rpc accept", accept(shared.clone(), listener)))
        .collect();
    Ok(Server { shared, addrs: bound, accepting })
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
    /// The addresses bound, with the ports that were chosen for port 0, in the order asked for.
    pub fn addrs(&self) -> &[Addr] {
        &self.addrs
    }
    /// The connections that are open now.
    pub fn connections(&self) -> Vec<Connection> {
        self.shared.open().connections.values().cloned().collect()
    }
    /// Closes the doors and all connections.
    pub fn stop(&self) {
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
    loop {
        match listener.accept().await {
            Ok((stream, peer)) if shared.admit() => {
                let greeting = greet(shared.clone(), stream, peer);
                shared.env.tasks.spawn("rpc hello", greeting);
            }
            Ok((_, peer)) => {
                tracing::warn!(%peer, "connection refused: {CONNECTIONS_MAX} are open already");
            }
            Err(e) => {
                tracing::warn!("accept on {}: {e}", listener.local_addr());
                shared.env.clock.sleep(ACCEPT_REST).await;
            }
        }
    }
}

async fn greet(shared: Arc<Shared>, stream: BoxStream, addr: String) {
    let stranger = Stranger(&shared);
    let local_ip = stream.local_ip();
    let (hello, incoming, writer) = match welcome(&shared.env, stream, &shared.identity).await {
        Ok(welcomed) => welcomed,
        Err(e) => {
            shared.log_refusal(&addr, &e);
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
    let peer = Peer { hello, addr, local_ip };
    let (env, service) = (&shared.env, shared.service.clone());
    Connection::start(env, peer, incoming, Outgoing::new(writer), service, Some(on_close), |c| {
        shared.keep(c)
    });
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// A stranger that keeps trying is news once.
    fn log_refusal(&self, addr: &str, e: &Error) {
        let last = std::mem::replace(&mut self.open().last_refusal, e.context.clone());
        if last != e.context {
            tracing::warn!(peer = %addr, "connection refused: {e}");
        }
    }
    fn admit(&self) -> bool {
        let mut open = self.open();
        let room = open.connections.len() + open.strangers < CONNECTIONS_MAX;
        open.strangers += usize::from(room);
        room
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

struct Stranger<'a>(&'a Shared);

impl Drop for Stranger<'_> {
    fn drop(&mut self) {
        self.0.open().strangers -= 1;
    }
}
