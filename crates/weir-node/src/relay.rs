//! Forwards requests of users of a mount's machine to the cluster: about their volumes, quotas and snapshots.
//!
//! Each user connection has its own pair of connections, to the coordinator and to the metadata leader. On
//! these the mount authenticates and then names the user for whom it acts (`ActFor`). The servers decide.
//!
//! Invariants: nothing is forwarded on a connection before `ActFor` was answered on it; a user's request
//! never uses the connections of another user, nor those of the mount itself.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_coord::Cluster;
use weir_env::{Addr, Env, Instant};
use weir_proto::coord::ActFor;
use weir_proto::map::Role;
use weir_proto::methods;
use weir_proto::sender::Sender;
use weir_proto::{Error, Result};
use weir_rpc::{
    Call, Channel, Connection, Handled, Identity, Payload, Proved, Reply, Server, Service, serve,
};

/// Methods from this number on go to the metadata leader; those below to the coordinator.
const FIRST_OF_LEADER: u16 = 100;

/// Serves the users of this machine at a socket. `own_uid`: the user that this process runs as; root, which
/// may act as that user, too, is mapped to it.
pub async fn start_relay(
    env: &Env,
    cluster: Cluster,
    namespace: &str,
    socket: Addr,
    own_uid: u32,
) -> Result<Server> {
    let identity = Identity::new(env, cluster.identity().name, Role::Mount, Some(cluster.id()));
    let (env_of_calls, guests) = (env.clone(), Mutex::default());
    let relay = Relay { env: env_of_calls, cluster, namespace: namespace.to_owned(), own_uid, guests };
    serve(env, &[socket], identity, Arc::new(relay)).await
}

struct Relay {
    env: Env,
    cluster: Cluster,
    namespace: String,
    own_uid: u32,
    /// By connection.
    guests: Mutex<BTreeMap<u64, Arc<Guest>>>,
}

/// A user connected to the socket.
struct Guest {
    uid: u32,
    coordinator: Way,
    leader: Way,
}

/// The connection for a user's requests to one of the two servers.
struct Way {
    channel: Channel,
    /// The connection on which `ActFor` was answered.
    accepted: tokio::sync::Mutex<Option<Connection>>,
}

impl Relay {
    fn guests(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Guest>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn guest(&self, connection: &Connection) -> Result<Arc<Guest>> {
        if let Some(known) = self.guests().get(&connection.id()) {
            return Ok(known.clone());
        }
        let uid = match connection.proved() {
            Proved::User(uid) => uid,
            Proved::Node(_) => self.own_uid,
            Proved::Stranger => return Err(Error::denied("a stranger at a local socket")),
        };
        let back = || Arc::new(Back { env: self.env.clone(), guest: connection.clone() });
        let way = |channel| Way { channel, accepted: tokio::sync::Mutex::default() };
        let leader = way(self.cluster.meta_leader(&self.namespace, back())?);
        let guest =
            Arc::new(Guest { uid, coordinator: way(self.cluster.coordinator_of_its_own(back())), leader });
        if !connection.is_closed() {
            self.guests().insert(connection.id(), guest.clone());
        }
        Ok(guest)
    }
}

impl Service for Relay {
    fn handle(&self, call: Call) -> Handled {
        if !methods::find(call.method).is_some_and(|method| method.by.has(Sender::User)) {
            return Handled::Now(Err(Error::denied(
                "a mount passes on what users may ask for, and nothing else",
            )
            .hint("administrators use their certificate (--certificate)")));
        }
        let env = self.env.clone();
        match self.guest(&call.connection) {
            Ok(guest) => Handled::Later(Box::pin(async move { guest.pass_on(&env, call).await })),
            Err(e) => Handled::Now(Err(e)),
        }
    }
    fn admits_guests(&self) -> bool {
        true
    }
    fn payload_max(&self, _from: Sender) -> u32 {
        0
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(guest) = self.guests().remove(&connection.id()) {
            guest.coordinator.channel.disconnect("the user has left");
            guest.leader.channel.disconnect("the user has left");
        }
    }
}

impl Guest {
    async fn pass_on(&self, env: &Env, call: Call) -> Result<Reply> {
        let way = if call.method < FIRST_OF_LEADER { &self.coordinator } else { &self.leader };
        let connection = way.connection(env, self.uid, call.deadline).await?;
        pass(env, &connection, call).await
    }
}

impl Way {
    async fn connection(&self, env: &Env, uid: u32, deadline: Instant) -> Result<Connection> {
        let mut accepted = self.accepted.lock().await;
        if let Some(connection) = accepted.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let left = |env: &Env| deadline.since(env.clock.now());
        let connection = self.channel.connection(left(env)).await?;
        connection.call(&ActFor { uid }, Vec::new(), left(env)).await?;
        *accepted = Some(connection.clone());
        Ok(connection)
    }
}

/// Calls back from the metadata leader to a user's program.
struct Back {
    env: Env,
    guest: Connection,
}

impl Service for Back {
    fn handle(&self, call: Call) -> Handled {
        let (env, guest) = (self.env.clone(), self.guest.clone());
        Handled::Later(Box::pin(async move { pass(&env, &guest, call).await }))
    }
}

/// Forwards a request unchanged, and returns the answer.
async fn pass(env: &Env, to: &Connection, call: Call) -> Result<Reply> {
    let left = call.deadline.since(env.clock.now());
    let payload = Payload::from(vec![call.payload]);
    let answered = to.call_encoded(call.method, &call.body, payload, left).await?;
    let payload = Payload::with_crc(vec![answered.payload], answered.payload_crc);
    Ok(Reply { body: answered.reply.to_vec(), payload })
}
