//! The services of a metadata node: the namespace while it leads, and its copy of the journal for the leader.
//!
//! A leader's messages are accepted only if the cluster map names it as leader under that epoch.
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::Env;
use weir_meta::copies::{Copier, Follower};
use weir_proto::copies::{JournalAppend, JournalRight, StateFetch};
use weir_proto::data::PAYLOAD_MAX;
use weir_proto::map::{ClusterMap, Role};
use weir_proto::sender::Sender;
use weir_proto::{Epoch, Error, NamespaceId, NodeId, Reader, Request, Result, Wire};
use weir_rpc::{Call, Connection, Defer, Handled, Proved, Service};

/// A leader may have the newest map earlier than this node.
const MAP_PATIENCE: Duration = Duration::from_secs(2);

/// Changes with the lead.
#[derive(Clone)]
pub(crate) struct NamespaceService {
    cluster: Cluster,
    env: Env,
    pub follower: Follower,
    leads: Arc<RwLock<Served>>,
}

#[derive(Clone, Default)]
struct Served {
    service: Option<Arc<dyn Service>>,
    copier: Option<Arc<Copier>>,
}

impl NamespaceService {
    pub fn new(env: &Env, cluster: &Cluster, follower: Follower) -> NamespaceService {
        NamespaceService { cluster: cluster.clone(), env: env.clone(), follower, leads: Arc::default() }
    }
    /// Serves the namespace from now on.
    pub fn serve(&self, service: Arc<dyn Service>) {
        self.leads.write().unwrap_or_else(PoisonError::into_inner).service = Some(service);
    }
    /// Sends its state to copies from now on.
    pub fn lead(&self, copier: Arc<Copier>) {
        self.leads.write().unwrap_or_else(PoisonError::into_inner).copier = Some(copier);
    }
    pub fn end(&self) {
        *self.leads.write().unwrap_or_else(PoisonError::into_inner) = Served::default();
    }

    fn meta(&self) -> Option<Arc<dyn Service>> {
        self.leads.read().unwrap_or_else(PoisonError::into_inner).service.clone()
    }

    /// A request that this node cannot serve. If another node leads, the connection ends: the client came by
    /// an older map, and connects by its newest one again.
    fn turn_away(&self, from: &Connection) -> Handled {
        let (map, me) = (self.cluster.map(), self.cluster.node());
        let leader = map.namespace(self.follower.namespace()).and_then(|entry| entry.leader);
        if leader.is_some() && leader != me {
            from.close("another node leads the namespace");
        }
        Handled::Now(Err(Error::unavailable("this node does not lead the namespace now")))
    }

    fn of_copies(&self, call: Call) -> Handled {
        let asked = match asked(&call) {
            Ok(asked) => asked,
            Err(e) => return Handled::Now(Err(e)),
        };
        let checked = check(&self.cluster.map(), &asked, &call.connection);
        if checked.as_ref().is_err_and(Waits::is_early) {
            let service = self.clone();
            return Handled::Later(Box::pin(async move {
                let mut maps = service.cluster.subscribe();
                let namespace = asked.namespace;
                let is_known = move |map: &Arc<ClusterMap>| {
                    map.namespace(namespace).is_some_and(|v| v.leader_epoch >= asked.epoch)
                };
                let _ = service.env.clock.timeout(MAP_PATIENCE, maps.wait_for(is_known)).await;
                check(&service.cluster.map(), &asked, &call.connection).map_err(|waits| waits.0)?;
                match service.take(call) {
                    Handled::Now(reply) => reply,
                    Handled::Later(reply) => reply.await,
                }
            }));
        }
        match checked {
            Ok(()) => self.take(call),
            Err(waits) => Handled::Now(Err(waits.0)),
        }
    }

    fn take(&self, call: Call) -> Handled {
        let unknown = || Handled::Now(Err(Error::unavailable("this node does not lead the namespace")));
        if call.method != StateFetch::METHOD {
            return self.follower.handle(call).unwrap_or_else(unknown);
        }
        let copier = self.leads.read().unwrap_or_else(PoisonError::into_inner).copier.clone();
        copier.and_then(|copier| copier.handle(call)).unwrap_or_else(unknown)
    }
}

/// The common first fields of every message between copies.
struct Asked {
    namespace: NamespaceId,
    epoch: Epoch,
    of_leader: bool,
}

fn asked(call: &Call) -> Result<Asked> {
    let mut reader = Reader::new(&call.body);
    let (namespace, epoch) = (Wire::decode(&mut reader)?, Wire::decode(&mut reader)?);
    Ok(Asked { namespace, epoch, of_leader: call.method != StateFetch::METHOD })
}

/// A refusal, and whether the next map may lift it.
struct Waits(Error, bool);

impl Waits {
    fn is_early(&self) -> bool {
        self.1
    }
}

/// Checks that the map has the sender as the leader of that epoch, or as a member of its group.
fn check(map: &ClusterMap, asked: &Asked, from: &Connection) -> std::result::Result<(), Waits> {
    let Asked { namespace, epoch, of_leader } = *asked;
    let entry = map.namespace(namespace).zip(map.copies_of(namespace));
    let Some((entry, copies)) = entry else {
        return Err(Waits(Error::not_found(format!("{namespace} has no copies here")), true));
    };
    if epoch != entry.leader_epoch {
        let text =
            format!("{epoch} of {namespace} is not the one that is known here, {}", entry.leader_epoch);
        return Err(Waits(Error::stale(text), epoch > entry.leader_epoch));
    }
    let is_from = |id: NodeId| map.node(id).is_some_and(|node| node.name == name_of(from));
    let known = if of_leader {
        entry.leader.is_some_and(is_from)
    } else {
        copies.members.iter().any(|copy| is_from(copy.node))
    };
    if from.proved() == Proved::Node(Role::Meta) && known {
        return Ok(());
    }
    let who = from.peer_name();
    Err(Waits(Error::denied(format!("{who} has no part in {namespace} under {epoch}")), false))
}

/// The name in its certificate, in a cluster with certificates.
fn name_of(from: &Connection) -> &str {
    from.certificate().map_or(from.peer().name.as_str(), |certificate| certificate.name.as_str())
}

fn is_of_copies(method: u16) -> bool {
    (JournalAppend::METHOD..=JournalRight::METHOD).contains(&method)
}

impl Service for NamespaceService {
    fn handle(&self, call: Call) -> Handled {
        if is_of_copies(call.method) {
            return self.of_copies(call);
        }
        match self.meta() {
            Some(meta) => meta.handle(call),
            None => self.turn_away(&call.connection),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match self.meta() {
            Some(meta) if !is_of_copies(call.method) => meta.handle_or_defer(call, defer),
            _ => Some(self.handle(call)),
        }
    }
    fn admits_guests(&self) -> bool {
        true
    }
    /// The records of the journal are in payloads.
    fn payload_max(&self, from: Sender) -> u32 {
        if from == Sender::Meta { PAYLOAD_MAX } else { 0 }
    }
    fn caught_up(&self) {
        if let Some(meta) = self.meta() {
            meta.caught_up();
        }
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(meta) = self.meta() {
            meta.disconnected(connection);
        }
    }
}
