//! Clients that follow the map: which version each of them has, and the reply to each.
//!
//! Knows nothing of other requests of clients.
use crate::collecting::Collections;
use crate::decide::Connected;
use crate::door::Door;
use crate::news::News;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{BoxFuture, Clock, Env, watch};
use weir_proto::coord::{GetMap, MapReply};
use weir_proto::map::{ClusterMap, Role};
use weir_proto::news::{CarriesMap, is_in_payload};
use weir_proto::version::check_level;
use weir_proto::watch::Collect;
use weir_proto::{Error, Result};
use weir_rpc::{Call, Connection, Reply};

/// The longest wait of a `GetMap`.
const MAP_WAIT_MS_MAX: u32 = 60_000;
/// Requests for news of the map that wait at the same time: one of each connection that a coordinator serves,
/// and as many of callers that have given up and asked again.
const POLLS_MAX: usize = 16_384;

pub struct Followers {
    map: watch::Receiver<Arc<ClusterMap>>,
    news: Arc<News>,
    /// By connection.
    clients: Mutex<BTreeMap<u64, Follower>>,
    polls: Door,
    /// This coordinator is about to end.
    ends: watch::Sender<bool>,
    collections: Arc<Collections>,
}

struct Follower {
    who: Connected,
    connection: Connection,
    /// The version of the map that it had at its last request.
    version: u64,
}

/// The map that a caller has, and the form of the reply.
pub struct Known {
    protocol: u16,
    /// The version of the map that it has; 0: none.
    version: u64,
    news: Arc<News>,
}

impl Followers {
    pub fn new(map: watch::Receiver<Arc<ClusterMap>>, news: Arc<News>) -> Followers {
        let polls = Door::new(POLLS_MAX, "requests wait for news of the cluster map");
        let ends = watch::Sender::new(false);
        Followers { map, news, clients: Mutex::default(), polls, ends, collections: Arc::default() }
    }

    fn clients(&self) -> MutexGuard<'_, BTreeMap<u64, Follower>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on no client waits here for news: it searches for the next coordinator instead.
    pub fn end(&self) {
        self.ends.send_replace(true);
    }

    /// The connection has ended.
    pub fn forget(&self, connection: u64) {
        self.clients().remove(&connection);
    }

    /// The followers, each with the level that it supports.
    pub fn connected(&self) -> Vec<Connected> {
        self.clients().values().map(|client| client.who.clone()).collect()
    }

    /// Asks the processes for their reports.
    pub fn collect(
        &self,
        env: &Env,
        name: &str,
        asked: Collect,
    ) -> Result<BoxFuture<'static, Result<Reply>>> {
        let after = asked.after;
        self.collections.collect(env, name, asked, || self.processes(after))
    }

    /// Connections of nodes, mounts and movers with numbers above `after`, in order.
    fn processes(&self, after: u64) -> Vec<Connection> {
        let clients = self.clients();
        let behind = clients.range((Bound::Excluded(after), Bound::Unbounded)).map(|(_, c)| &c.connection);
        let is_command = |role| matches!(role, Role::Console | Role::Operator | Role::Auditor);
        behind.filter(|c| !is_command(c.peer().role)).cloned().collect()
    }

    /// The version that the caller on this connection has.
    pub fn known(&self, connection: &Connection) -> Known {
        let version = self.clients().get(&connection.id()).map_or(0, |client| client.version);
        Known { protocol: connection.version(), version, news: self.news.clone() }
    }

    /// Every client follows the map, so programs that do not support the cluster's level are refused here.
    fn follow(&self, connection: &Connection, request: &GetMap) -> Result<()> {
        let hello = connection.peer();
        check_level(&connection.peer_name(), hello.level, self.map.borrow().level)?;
        let who = Connected { name: hello.name.clone(), level: hello.level };
        let client = Follower { who, connection: connection.clone(), version: request.newer_than };
        self.clients().insert(connection.id(), client);
        if connection.is_closed() {
            self.forget(connection.id()); // its end may have been handled already
        }
        Ok(())
    }

    /// News of the map, once there are any.
    pub fn get_map(&self, clock: &Clock, call: &Call) -> Result<BoxFuture<'static, Result<Reply>>> {
        let request = call.decode::<GetMap>()?;
        let taken = self.polls.take()?;
        self.follow(&call.connection, &request)?;
        let on = call.connection.clone();
        let (clock, mut map, known) = (clock.clone(), self.map.clone(), self.known(&call.connection));
        let mut ends = self.ends.subscribe();
        let known = Known { version: request.newer_than, ..known };
        let patience = Duration::from_millis(u64::from(request.wait_ms.min(MAP_WAIT_MS_MAX)));
        Ok(Box::pin(async move {
            // Also an older map than the caller's: a caller that has seen a newer map must detect that the
            // coordinator is an older copy.
            let other = |m: &Arc<ClusterMap>| m.version != request.newer_than;
            let _taken = taken;
            let newer = tokio::select! {
                biased;
                newer = clock.timeout(patience, map.wait_for(other)) => newer,
                ended = on.closed() => return Err(ended), // no caller is left to answer
                _ = ends.wait_for(|ends| *ends) => return Err(Error::unavailable("this coordinator is about to end")),
            };
            match newer.ok().and_then(|found| found.ok().map(|m| m.clone())) {
                Some(map) => known.answer(MapReply { map: Some(map) }),
                None => Ok(Reply::new(&MapReply { map: None })),
            }
        }))
    }
}

impl Known {
    /// The reply in the caller's form: with the map, or with changes of it.
    pub fn answer(&self, mut reply: impl CarriesMap) -> Result<Reply> {
        if !is_in_payload(self.protocol) {
            return Ok(Reply::new(&reply));
        }
        reply.take_map();
        Ok(Reply::with_payload(&reply, self.news.since(self.version)?))
    }
}
