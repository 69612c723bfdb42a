//! A process's handle on its cluster: the newest map, a membership, and channels to the nodes. Every role and
//! every client has one.
//!
//! Invariants: the map's version never decreases; the map is of one cluster for ever; a channel dials the
//! addresses that the newest map names. Knows nothing of the messages on the channels.
use crate::addresses::addrs_in_order;
use crate::clocks;
use crate::identity::NamespaceIdentity;
use crate::life::TargetLives;
use crate::links::state::Links;
use crate::member::{self, Membership, Reports};
use crate::shows::Shows;
use bytes::Bytes;
use maps::{first_map, follow_map, watch_coordinator};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use weir_env::{Addr, Env, TaskHandle, watch};
use weir_proto::access::{AccessRule, AuditRule};
use weir_proto::coord::{
    AccessAdd, AccessRemove, AuditState, AuditVolumes, CaughtUp, ClearTarget, ClientsWaiting, Clocks,
    ClusterStatus, FinishUpgrade, GetAudit, GetClocks, GetCoordinators, GetStatus, GetWaits, HomeAllow,
    HomeForbid, Joined, LeadNamespace, LeadReply, Leave, MakeGroups, MapReply, RecordProgress, ReportTarget,
    ReportWaits, Suspicion, TargetReport, Wait,
};
use weir_proto::home_rule::HomeRule;
use weir_proto::map::{ClusterMap, Node, Role, Scheme};
use weir_proto::news::CarriesMap;
use weir_proto::{
    ClusterId, DiskUuid, Epoch, Error, ErrorKind, NamespaceId, NodeId, PgId, Request, Result, TargetId,
};
use weir_rpc::{Channel, Destinations, Endpoint, Identity, LookUp, NoService, Payload, Service, Trust, Via};

mod maps;

/// The coordinator is asked again for a newer map after this long without one.
const MAP_WAIT: Duration = Duration::from_secs(10);
/// How much longer than its deadline an answer may take.
const ANSWER_SLACK: Duration = Duration::from_secs(5);
/// Addresses of coordinators that are remembered in addition to the configured ones.
const COORDINATORS_MAX: usize = 16;
/// How long a request for free space waits for a coordinator that does not answer.
const STATUS_PATIENCE: Duration = Duration::from_secs(1);
/// Pause after a failed call to the coordinator.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// A node that waits for its first coordinator logs that after this time,
const LOG_WAITS_AFTER: Duration = Duration::from_secs(2);
/// and then at this interval.
const LOG_WAITS_EVERY: Duration = Duration::from_secs(30);
/// Deadline of one request of such a node.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// Nodes through which a metadata leader may be reached: two may be as cut off as this one.
const THROUGH_MAX: usize = 3;
/// How long the addresses of other coordinators are tried when one is silent.
pub(crate) const FIND_PATIENCE: Duration = Duration::from_secs(2);
/// Patience for a change of the map: the coordinator may first probe a target for a second, and writes its
/// store.
const CHANGE_PATIENCE: Duration = Duration::from_secs(5);

/// Identity of the process, and the coordinator's addresses.
#[derive(Clone, Debug)]
pub struct Observer {
    pub coordinators: Vec<Addr>,
    /// `None`: any cluster that answers there.
    pub cluster: Option<ClusterId>,
    /// Unique in the cluster for a node that joins.
    pub name: String,
    pub role: Role,
    /// All processes of one host have this value in common.
    pub host: String,
    /// Its certificate for connections over networks; `None`: it has none.
    pub trust: Option<Arc<Trust>>,
}

/// A handle on the cluster; cheap to clone. Its tasks end with the last handle.
#[derive(Clone)]
pub struct Cluster {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<Shared>,
    /// Number of its tasks without those of its membership.
    own_tasks: usize,
    tasks: Mutex<Vec<TaskHandle>>,
}
impl Drop for Handle {
    fn drop(&mut self) {
        lock(&self.tasks).iter().for_each(TaskHandle::abort);
    }
}

/// State shared by the tasks of a handle.
pub(crate) struct Shared {
    pub env: Env,
    /// All nodes are reached through a mount of this machine, at the coordinators' addresses.
    by_mount: bool,
    find_coordinator: LookUp,
    pub who: Observer,
    pub identity: Identity,
    pub coordinator: Channel,
    /// The channel of this node's membership, once it has joined. The coordinator takes requests of a member
    /// only on the connection of its `Join`.
    membership: Mutex<Option<Channel>>,
    /// Coordinator addresses announced by the coordinator, in addition to the configured ones.
    announced: Arc<Mutex<Vec<Addr>>>,
    pub map: watch::Sender<Arc<ClusterMap>>,
    pub node: Mutex<Option<NodeId>>,
    /// Reports of this node's targets, once it has joined.
    reports: Mutex<Option<WeakReports>>,
    /// By node: the addresses that its channel dials, and the channel.
    channels: Mutex<BTreeMap<NodeId, (Vec<String>, Channel)>>,
    pub links: Links,
    /// The last status received.
    status: Mutex<Option<Arc<ClusterStatus>>>,
}

/// The membership's task holds the reports: they hold targets, which hold this handle.
type WeakReports = Weak<dyn Fn() -> Vec<TargetReport> + Send + Sync>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// Fetches the map within `patience`, and keeps it up to date from then on.
    pub async fn observe(env: &Env, who: Observer, patience: Duration) -> Result<Cluster> {
        let identity =
            Identity::new(env, who.name.as_str(), who.role, who.cluster).trusting(who.trust.clone());
        let (given, announced) = (who.coordinators.clone(), Arc::<Mutex<Vec<Addr>>>::default());
        let others = announced.clone();
        let look_up: LookUp = Arc::new(move || {
            let mut addrs = given.clone();
            addrs.extend(lock(&others).iter().filter(|a| !given.contains(a)).cloned());
            Ok(Endpoint { addrs, role: Some(Role::Coordinator), ..Endpoint::default() })
        });
        let coordinator = Channel::following(env, look_up.clone(), identity.clone(), Shows::of(env));
        let map = first_map(env, &coordinator, patience).await?;
        if !identity.join(map.cluster) {
            return Err(Error::denied(format!(
                "the coordinator leads cluster {}, not {}",
                map.cluster,
                identity.cluster().unwrap_or_default()
            ))
            .hint("correct its address or the cluster id"));
        }
        if let Some(trust) = &who.trust {
            trust.follow(&map.removed, &map.authorities);
        }
        let by_mount = coordinator.current().is_some_and(|connection| connection.peer().role == Role::Mount);
        let shared = Arc::new(Shared {
            env: env.clone(),
            by_mount,
            find_coordinator: look_up,
            who,
            identity,
            coordinator,
            membership: Mutex::default(),
            announced,
            map: watch::channel(map).0,
            node: Mutex::new(None),
            reports: Mutex::default(),
            channels: Mutex::default(),
            links: Links::default(),
            status: Mutex::default(),
        });
        let follow = env.tasks.spawn("follow the cluster map", follow_map(shared.clone()));
        let find = env.tasks.spawn("find the coordinator again", ask_for_coordinators(shared.clone()));
        let watch = env.tasks.spawn("watch the coordinator", watch_coordinator(shared.clone()));
        let mut tasks = vec![follow, find, watch];
        if matches!(shared.who.role, Role::Meta | Role::Storage | Role::Mount | Role::Mover) {
            let comparing = clocks::keep_comparing(env.clone(), shared.coordinator.clone());
            tasks.push(env.tasks.spawn("compare clocks", comparing));
        }
        Ok(Cluster { handle: Arc::new(Handle { own_tasks: tasks.len(), shared, tasks: Mutex::new(tasks) }) })
    }

    /// Joins as a member and stays one: sends heartbeats with the targets' reports, and joins again after a
    /// broken connection. Call it once this node serves its addresses.
    pub async fn join(&self, membership: Membership, reports: Reports) -> Result<Joined> {
        self.join_with(membership, reports, Arc::new(Vec::new)).await
    }

    /// Like `join`, for a node that also reports how fast its targets are.
    pub async fn join_with(
        &self,
        membership: Membership,
        reports: Reports,
        lives: TargetLives,
    ) -> Result<Joined> {
        *lock(&self.shared().reports) = Some(Arc::downgrade(&reports));
        let (tasks, joined) = member::start(self.shared().clone(), membership, reports, lives);
        lock(&self.handle.tasks).extend(tasks);
        joined.await.map_err(|_| Error::unavailable("joining the cluster was given up".to_owned()))?
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    /// The newest map known here.
    pub fn map(&self) -> Arc<ClusterMap> {
        self.shared().map.borrow().clone()
    }
    pub fn id(&self) -> ClusterId {
        self.map().cluster
    }
    /// Notifies of each newer map.
    pub fn subscribe(&self) -> watch::Receiver<Arc<ClusterMap>> {
        self.shared().map.subscribe()
    }
    /// This node, once joined.
    pub fn node(&self) -> Option<NodeId> {
        *lock(&self.shared().node)
    }
    pub fn who(&self) -> &Observer {
        &self.shared().who
    }
    /// The identity for connections to other nodes.
    pub fn identity(&self) -> Identity {
        self.shared().identity.clone()
    }
    /// The target number that a disk got when it joined.
    pub fn target_of(&self, disk: DiskUuid) -> Option<TargetId> {
        self.map().targets.iter().find(|t| t.uuid == disk).map(|t| t.id)
    }

    /// A map newer than `version`, or `Deadline`.
    pub async fn wait_newer(&self, version: u64, patience: Duration) -> Result<Arc<ClusterMap>> {
        self.wait_for(patience, |map| map.version > version)
            .await
            .map_err(|e| e.doing(format!("wait for a cluster map newer than {version}")))
    }

    /// The first map that satisfies the condition, or `Deadline`.
    pub async fn wait_for(
        &self,
        patience: Duration,
        fits: impl Fn(&ClusterMap) -> bool,
    ) -> Result<Arc<ClusterMap>> {
        let mut maps = self.subscribe();
        let waited = self.shared().env.clock.timeout(patience, maps.wait_for(|map| fits(map))).await;
        match waited {
            Ok(Ok(map)) => Ok(map.clone()),
            _ => Err(Error::deadline(format!(
                "no cluster map with the awaited state came within {patience:?}"
            ))),
        }
    }

    /// Reports that a target could not be used under the group's epoch. The coordinator probes it; the
    /// returned map is the newest one after that. If the epoch is unchanged, the target answers the
    /// coordinator: try again.
    pub async fn report_target(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        why: &str,
    ) -> Result<Arc<ClusterMap>> {
        self.suspect_target(target, group, epoch, Suspicion::Failed, why).await
    }

    /// Like `report_target`, with the kind of suspicion.
    pub async fn suspect_target(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        suspicion: Suspicion,
        why: &str,
    ) -> Result<Arc<ClusterMap>> {
        if self.goes_around(target) {
            return Ok(self.map()); // the link is to blame
        }
        let report = ReportTarget { target, group, epoch, suspicion, why: why.to_owned() };
        let moved_on = |map: &ClusterMap| map.group(group).is_some_and(|g| g.epoch > epoch);
        // A newer map may arrive before the reply: the coordinator saw the connection break.
        tokio::select! {
            biased;
            map = self.wait_for(CHANGE_PATIENCE * 2, moved_on) => map,
            reported = self.change(&report) => reported,
        }
    }

    /// Reports that a member that was behind holds everything again. `Stale`: the group has a newer epoch,
    /// check again.
    pub async fn caught_up(&self, target: TargetId, group: PgId, epoch: Epoch) -> Result<Arc<ClusterMap>> {
        self.change(&CaughtUp { target, group, epoch }).await
    }

    /// Returns a failed target to service; for an administrator who has replaced or checked its disk.
    pub async fn clear_target(&self, target: TargetId) -> Result<Arc<ClusterMap>> {
        self.change(&ClearTarget { target }).await
    }

    /// Makes the placement groups of a scheme if there are none yet.
    pub async fn make_groups(&self, pool: Option<String>, scheme: Scheme) -> Result<Arc<ClusterMap>> {
        self.change(&MakeGroups { pool, scheme }).await
    }

    /// Raises the cluster's level to the highest that all its programs support. `Unsupported`: some support
    /// less.
    pub async fn finish_upgrade(&self) -> Result<Arc<ClusterMap>> {
        self.change(&FinishUpgrade {}).await
    }

    /// Sets which operations on volumes go to the audit log.
    pub async fn audit_volumes(&self, rule: AuditRule) -> Result<Arc<ClusterMap>> {
        self.change(&AuditVolumes { rule }).await
    }

    /// Adds a rule that allows homes in a place.
    pub async fn allow_home(&self, rule: HomeRule) -> Result<Arc<ClusterMap>> {
        self.change(&HomeAllow { rule }).await
    }

    /// Removes such a rule. `NotFound`: there is no rule for this place.
    pub async fn forbid_home(&self, place: String) -> Result<Arc<ClusterMap>> {
        self.change(&HomeForbid { place }).await
    }

    /// Adds a rule for mounts: before the named one, else at the end.
    pub async fn add_access_rule(&self, rule: AccessRule, before: Option<String>) -> Result<Arc<ClusterMap>> {
        self.change(&AccessAdd { rule, before }).await
    }
    pub async fn remove_access_rule(&self, name: String) -> Result<Arc<ClusterMap>> {
        self.change(&AccessRemove { name }).await
    }

    pub(crate) async fn change<R: Request<Reply = MapReply>>(&self, request: &R) -> Result<Arc<ClusterMap>> {
        self.ask_map(request).await?;
        Ok(self.map())
    }

    /// For a reply that carries the newest map: it is applied here, and the reply contains it.
    async fn ask_map<R: Request>(&self, request: &R) -> Result<R::Reply>
    where
        R::Reply: CarriesMap,
    {
        let asked = self.shared().coordinator.call(request, Vec::new(), CHANGE_PATIENCE).await;
        self.learn(asked).await
    }

    async fn learn<T: CarriesMap>(&self, asked: Result<(T, Bytes)>) -> Result<T> {
        let (mut reply, payload) = asked.map_err(|e| e.doing("ask the coordinator"))?;
        self.shared().learn_from(&mut reply, &payload).await?;
        Ok(reply)
    }

    /// `change` for a request of a member about itself.
    pub(crate) async fn change_as_member<R: Request<Reply = MapReply>>(
        &self,
        request: &R,
    ) -> Result<Arc<ClusterMap>> {
        let asked = self.shared().as_member().call(request, Vec::new(), CHANGE_PATIENCE).await;
        self.learn(asked).await?;
        Ok(self.map())
    }

    pub(crate) async fn ask<R: Request>(&self, request: &R) -> Result<R::Reply> {
        self.ask_on(&self.shared().coordinator, request).await
    }

    async fn ask_on<R: Request>(&self, coordinator: &Channel, request: &R) -> Result<R::Reply> {
        let asked = coordinator.call(request, Vec::new(), CHANGE_PATIENCE).await;
        if asked.as_ref().is_err_and(|e| e.kind == ErrorKind::Deadline) {
            self.shared().find_another();
        }
        asked.map(|(reply, _)| reply).map_err(|e| e.doing("ask the coordinator"))
    }

    /// Makes this node the leader of a namespace; `changes`: the number of changes in its directory. With 0
    /// the namespace is founded. `Exists`: another node that is up leads it. `Denied`: this is not the
    /// namespace's directory, or an old copy.
    pub async fn lead_namespace(&self, of: &NamespaceIdentity, changes: u64) -> Result<LeadReply> {
        let (node, namespace) = (self.joined()?, of.name.clone());
        let lead = LeadNamespace { node, namespace, uuid: of.uuid, changes, instead_of: of.instead_of };
        let asked = self.shared().as_member().call(&lead, Vec::new(), CHANGE_PATIENCE).await;
        self.learn(asked).await
    }

    /// Reports how many changes the directory of a namespace that this node leads holds. `Exists` or
    /// `NotFound`: it does not lead it any more.
    pub async fn record_progress(&self, namespace: NamespaceId, changes: u64) -> Result<()> {
        let report = RecordProgress { node: self.joined()?, namespace, changes };
        self.ask_on(&self.shared().as_member(), &report).await
    }

    pub(crate) fn joined(&self) -> Result<NodeId> {
        self.node().ok_or_else(|| Error::stale("this node has not joined the cluster"))
    }

    /// Leaves in an orderly way: this node's targets are down at once. It does not join again by itself.
    pub async fn leave(&self) -> Result<()> {
        let Some(node) = lock(&self.shared().node).take() else { return Ok(()) };
        let reports = lock(&self.shared().reports).as_ref().and_then(Weak::upgrade);
        let targets = reports.map_or_else(Vec::new, |reports| reports());
        // The task that keeps the membership would join again.
        lock(&self.handle.tasks).drain(self.handle.own_tasks..).for_each(|task| task.abort());
        self.ask_on(&self.shared().as_member(), &Leave { node, targets }).await
    }

    /// A request of administration: tokens, certificates.
    pub async fn administer<R: Request>(&self, request: &R) -> Result<R::Reply> {
        self.ask(request).await
    }

    pub async fn status(&self) -> Result<ClusterStatus> {
        self.ask_map(&GetStatus {}).await
    }

    /// Reports which waits this client's calls are in, for `weir status`.
    pub async fn report_waits(&self, client: String, waits: Vec<Wait>) -> Result<()> {
        self.ask(&ReportWaits { client, waits }).await
    }
    /// The clients whose calls wait.
    pub async fn waits(&self) -> Result<ClientsWaiting> {
        self.ask(&GetWaits {}).await
    }
    /// How far this machine's clock is ahead of the coordinator's, in milliseconds; `None`: an older
    /// coordinator sends no time.
    pub async fn clock_ahead_ms(&self) -> Option<i64> {
        clocks::compare(&self.shared().env, &self.shared().coordinator, 0).await
    }
    /// The clocks of nodes that are off.
    pub async fn clocks(&self) -> Result<Clocks> {
        self.ask(&GetClocks {}).await
    }
    /// Whether the coordinator can write its audit log.
    pub async fn audit(&self) -> Result<AuditState> {
        self.ask(&GetAudit {}).await
    }

    /// The status; while the coordinator does not answer, the last one received.
    pub async fn known_status(&self) -> Result<Arc<ClusterStatus>> {
        let shared = self.shared();
        let asked = async {
            let ask = shared.coordinator.call_now(&GetStatus {}, Payload::default(), STATUS_PATIENCE);
            let (mut reply, payload) = ask.await?.into_parts();
            shared.learn_from(&mut reply, &payload).await.map(|_| reply)
        };
        let asked = asked.await;
        let mut known = lock(&shared.status);
        match (asked, &*known) {
            (Ok(status), _) => Ok(known.insert(Arc::new(status)).clone()),
            (Err(e), Some(status)) if is_temporary(&e) => Ok(status.clone()),
            (Err(e), _) => Err(e.doing("ask the coordinator")),
        }
    }

    /// A separate channel to the node that leads a namespace; calls back go to `callbacks`.
    pub fn meta_leader(&self, namespace: &str, callbacks: Arc<dyn Service>) -> Result<Channel> {
        leader_of(&self.map(), namespace)?;
        let (shared, namespace) = (Arc::downgrade(self.shared()), namespace.to_owned());
        let look_up: LookUp = Arc::new(move || {
            let shared = shared.upgrade().ok_or_else(closed)?;
            let map = shared.map.borrow().clone();
            shared.endpoint_of_leader(&map, leader_of(&map, &namespace)?)
        });
        Ok(Channel::following(&self.shared().env, look_up, self.identity(), callbacks))
    }
    /// A separate channel to the coordinator; calls back go to `callbacks`.
    pub fn coordinator_of_its_own(&self, callbacks: Arc<dyn Service>) -> Channel {
        let shared = self.shared();
        Channel::following(&shared.env, shared.find_coordinator.clone(), self.identity(), callbacks)
    }
    /// For a server of this node: it passes connections on to metadata servers, for clients whose link to
    /// them is cut.
    pub fn destinations(&self) -> Destinations {
        let shared = Arc::downgrade(self.shared());
        Arc::new(move |name| {
            let shared = shared.upgrade().ok_or_else(closed)?;
            let map = shared.map.borrow().clone();
            let node = map.nodes.iter().find(|node| node.role == Role::Meta && node.name == name);
            let unknown = || Error::unavailable(format!("the cluster has no metadata server {name:?}"));
            shared.endpoint(node.ok_or_else(unknown)?).map(|at| at.addrs)
        })
    }
    /// The name of the node that leads a namespace.
    pub fn leader_name(&self, namespace: &str) -> Option<String> {
        leader_of(&self.map(), namespace).ok().map(|node| node.name.clone())
    }
}

impl Shared {
    /// Makes the channel of this node's membership, served by the tasks of `env`.
    pub fn membership_on(&self, env: &Env, callbacks: Arc<dyn Service>) -> Channel {
        let channel =
            Channel::following(env, self.find_coordinator.clone(), self.identity.clone(), callbacks);
        *lock(&self.membership) = Some(channel.clone());
        channel
    }

    /// The channel for requests of a member about itself.
    fn as_member(&self) -> Channel {
        lock(&self.membership).clone().unwrap_or_else(|| self.coordinator.clone())
    }

    /// Searches for another leading coordinator when this one is silent.
    pub fn find_another(&self) {
        let coordinator = self.coordinator.clone();
        self.env.tasks.spawn("find another coordinator", async move {
            if coordinator.find_another(FIND_PATIENCE).await {
                tracing::info!("another coordinator answers in the place of a silent one");
            }
        });
    }

    /// Addresses at which this host reaches a node.
    fn endpoint(&self, node: &Node) -> Result<Endpoint> {
        if self.by_mount {
            return Ok(Endpoint { addrs: self.who.coordinators.clone(), ..Endpoint::default() });
        }
        let addrs = addrs_in_order(&node.addrs, crate::decide::is_same_host(&node.host, &self.who.host));
        if addrs.is_empty() {
            return Err(Error::unavailable(format!(
                "node {:?} announces no address that this host can reach",
                node.name
            ))
            .hint("start it with --listen tcp:ADDRESS:PORT"));
        }
        let (name, role) = (Some(node.name.clone()), Some(node.role));
        Ok(Endpoint { addrs, name, role, through: Vec::new() })
    }

    /// Addresses at which this host reaches a metadata leader, and nodes through which it may be reached:
    /// other metadata servers first, in an order that differs between clients.
    fn endpoint_of_leader(&self, map: &ClusterMap, leader: &Node) -> Result<Endpoint> {
        let at = self.endpoint(leader)?;
        let is_here = at.addrs.iter().any(|addr| matches!(addr, Addr::Unix(_)));
        if self.by_mount || is_here {
            return Ok(at);
        }
        let me = *lock(&self.node);
        let of = |role: Role| {
            let fits = |n: &&Node| n.role == role && n.up && n.id != leader.id && Some(n.id) != me;
            let mut nodes: Vec<&Node> = map.nodes.iter().filter(fits).collect();
            if !nodes.is_empty() {
                let first = (self.identity.instance % nodes.len() as u64) as usize;
                nodes.rotate_left(first);
            }
            nodes
        };
        let nodes = of(Role::Meta).into_iter().chain(of(Role::Storage));
        let via = |node: &Node| {
            let same_host = crate::decide::is_same_host(&node.host, &self.who.host);
            let mut addrs = addrs_in_order(&node.addrs, same_host).into_iter();
            let addr = addrs.find(|addr| !matches!(addr, Addr::Unix(_)))?;
            Some(Via { name: node.name.clone(), addr })
        };
        Ok(Endpoint { through: nodes.filter_map(via).take(THROUGH_MAX).collect(), ..at })
    }

    pub fn channel_to(self: &Arc<Self>, node: &Node) -> Result<Channel> {
        let mut channels = lock(&self.channels);
        if let Some((addrs, channel)) = channels.get(&node.id)
            && *addrs == node.addrs
        {
            return Ok(channel.clone());
        }
        self.endpoint(node)?;
        let channel = self.channel_of_its_own(node.id, Arc::new(NoService));
        channels.insert(node.id, (node.addrs.clone(), channel.clone()));
        Ok(channel)
    }

    /// A separate channel to a node, in addition to the shared one.
    pub fn channel_of_its_own(self: &Arc<Self>, id: NodeId, callbacks: Arc<dyn Service>) -> Channel {
        let shared = Arc::downgrade(self);
        let look_up: LookUp = Arc::new(move || {
            let shared = shared.upgrade().ok_or_else(closed)?;
            let map = shared.map.borrow().clone();
            shared.endpoint(map.node(id).ok_or_else(|| Error::unavailable(format!("{id} is gone")))?)
        });
        Channel::following(&self.env, look_up, self.identity.clone(), callbacks)
    }
}

fn closed() -> Error {
    Error::unavailable("this client of the cluster was closed")
}

fn leader_of<'m>(map: &'m ClusterMap, namespace: &str) -> Result<&'m Node> {
    let entry = map.namespaces.iter().find(|v| v.name == namespace);
    let entry = entry.ok_or_else(|| Error::unavailable(format!("no namespace {namespace:?} yet")))?;
    let leader = entry.leader.and_then(|l| map.node(l));
    leader.ok_or_else(|| Error::unavailable(format!("namespace {namespace:?} has no leader")))
}

/// At each new connection, asks the coordinator for all coordinators' addresses.
async fn ask_for_coordinators(shared: Arc<Shared>) {
    let mut connections = shared.coordinator.generation();
    loop {
        let known = *connections.borrow();
        if let Ok((reported, _)) =
            shared.coordinator.call(&GetCoordinators {}, Vec::new(), CHANGE_PATIENCE).await
        {
            let read = reported.addrs.iter().take(COORDINATORS_MAX).filter_map(|a| a.parse::<Addr>().ok());
            // The path of a local socket is valid on one host only: use only the configured ones.
            *lock(&shared.announced) = read.filter(|a| !matches!(a, Addr::Unix(_))).collect();
        }
        if connections.wait_for(|n| *n > known).await.is_err() {
            return;
        }
    }
}

pub(crate) fn is_temporary(e: &Error) -> bool {
    use weir_proto::ErrorKind::{Busy, Deadline, Stale, Unavailable};
    matches!(e.kind, Unavailable | Busy { .. } | Deadline | Stale)
}
