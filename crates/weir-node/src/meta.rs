//! A metadata node: one directory of a namespace, which leads or keeps a copy, as decided by the coordinator.
//!
//! A namespace that never had copies is led by the node with its directory. With copies, the map names the
//! leader: this node follows the map, and announces its directory at its start or after it was left out.
use crate::audit::Audit;
use crate::audited::{Audited, of_volume, refused_by_rule};
use crate::exports::{Exported, Exports, WithExports};
use crate::gate::Gate;
use crate::import::compare;
use crate::namespace::NamespaceService;
use crate::purge::ClusterPurge;
use crate::site::{Failed, Site, leave};
use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use weir_coord::decide::{JournalGroup, file_space, journal_group};
use weir_coord::identity::{
    MAP_FILE, NamespaceIdentity, begin_copy, check_newest_map, open_namespace, record_newest_map,
};
use weir_coord::{Cluster, Membership, clocks, no_reports};
use weir_env::{BoxFuture, Env, Instant, TaskHandle, watch};
use weir_kv::{Engine, EngineConfig, SharedKv};
use weir_meta::copies::{Copier, Follower, Group, News, Reporter, Right};
use weir_meta::{AtHome, LayoutPolicy, Leadership, Level, Meta, MetaConfig};
use weir_proto::export::ExportHead;
use weir_proto::map::{ClusterMap, MemberState, Scheme};
use weir_proto::meta::Time;
use weir_proto::sender::Sender;
use weir_proto::version::{LEVEL_OF_EARLY_ANSWERS, LEVEL_OF_HOLDS};
use weir_proto::volume::Policy;
use weir_proto::{Epoch, Error, ErrorKind, NamespaceId, NamespaceUuid, NodeId, Result};
use weir_rpc::{Server, Service};

mod full_disk;
mod layouts;
mod watch_leader;

use full_disk::HandingOver;
pub use full_disk::MetaSpace;
use layouts::layout_policy;
use watch_leader::watch_leader;

/// Interval of announces of a directory that is refused for now, of attempts to lead, and of checks of the
/// store.
const ANNOUNCE_AGAIN: Duration = Duration::from_secs(1);

/// The directory of a namespace.
pub struct MetaPlace {
    pub dir: PathBuf,
    pub namespace: String,
    /// Found it if it does not exist.
    pub new: bool,
    /// Found it as replacement of this one, which is lost.
    pub instead_of: Option<NamespaceUuid>,
    pub engine: EngineConfig,
    /// The part of the journal that is kept for copies: a copy that was away for less need not fetch the
    /// whole state.
    pub kept_for_copies: u64,
    /// Whether the process of a client, by its own identification, is certainly gone.
    pub gone: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// Whether home has bytes of a file: [`weir_meta::at_home`], except in tests without homes.
    pub at_home: Arc<AtHome>,
}

pub struct MetaNode {
    env: Env,
    cluster: Cluster,
    audit: Audit,
    own: NamespaceIdentity,
    service: NamespaceService,
    gone: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    at_home: Arc<AtHome>,
    leads: Mutex<Option<Serving>>,
    handing_over: Mutex<HandingOver>,
    pub server: Server,
}

/// This node's lead. After its drop it answers no more requests.
struct Serving {
    /// 0: the namespace never had copies.
    epoch: Epoch,
    right: Arc<Right>,
    /// Why the metadata service ended.
    ended: Option<oneshot::Receiver<Error>>,
    work: TaskHandle,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.right.end();
        self.work.abort();
    }
}

/// This node's part according to the map.
#[derive(PartialEq, Eq, Debug)]
enum Part {
    /// No change.
    Stays,
    /// Its directory has no place, or must be announced first with its number of changes.
    Announces,
    Follows,
    Leads(NamespaceId, JournalGroup<NodeId>),
}

/// Returns when the node leads, or keeps the copy that the map assigns to it.
pub fn start_meta<'a>(
    env: &'a Env,
    site: &'a Site,
    place: MetaPlace,
) -> BoxFuture<'a, std::result::Result<MetaNode, Failed>> {
    Box::pin(start_meta_unboxed(env, site, place))
}

async fn start_meta_unboxed(
    env: &Env,
    site: &Site,
    place: MetaPlace,
) -> std::result::Result<MetaNode, Failed> {
    let cluster = site.observe(env).await?;
    let fresh = NamespaceIdentity {
        cluster: cluster.id(),
        name: place.namespace,
        uuid: NamespaceUuid(env.rng.id_128()),
        instead_of: place.instead_of,
    };
    if let Some(ahead_ms) = cluster.clock_ahead_ms().await {
        clocks::check(&cluster.who().name, ahead_ms)?;
    }
    let seen = place.dir.join(MAP_FILE);
    check_newest_map(&*env.disk, &seen, &cluster.map(), Some(&fresh.name))?;
    if !place.new {
        begin_copy(&*env.disk, &place.dir, &cluster.map(), &fresh, &site.observer.name)?;
    }
    let own = open_namespace(&*env.disk, &place.dir, &cluster.map(), &fresh, place.new)?;
    let (gate, audit) = (Gate::to_metadata(), Audit::start(env, &place.dir));
    let audited = Arc::new(Audited { service: Arc::new(gate.clone()), audit: audit.clone() });
    let server = site.serve_as_member(env, &cluster, audited).await?;
    cluster.join(Membership { addrs: server.addrs().to_vec(), targets: Vec::new() }, no_reports()).await?;
    let (dir, gone, at_home) = (place.dir.join("kv"), place.gone, place.at_home);
    let (follower, led) = open(env, &cluster, &own, &dir, place.engine, place.kept_for_copies)
        .await
        .map_err(|e| e.doing(place.dir.display()))?;
    record_newest_map(&*env.disk, &seen, &cluster.map(), Some(&own.name))?;
    site.record_map(env, &cluster, seen, Some(own.name.clone()));
    let service = NamespaceService::new(env, &cluster, follower);
    let watched = watch_leader(env.clone(), cluster.clone(), own.clone(), service.follower.clone());
    env.tasks.spawn("watch the leader", watched);
    let (env, leads) = (env.clone(), Mutex::default());
    let handing_over = Mutex::default();
    let node = MetaNode { env, cluster, audit, own, service, gone, at_home, leads, handing_over, server };
    match led {
        Some((namespace, engine)) => node.lead_alone(namespace, engine).await?,
        None => node.take_part(true).await.map(drop)?,
    }
    gate.open(Arc::new(node.service.clone()));
    Ok(node)
}

/// Opens the directory. For a namespace without copies: takes the lead.
async fn open(
    env: &Env,
    cluster: &Cluster,
    own: &NamespaceIdentity,
    dir: &Path,
    engine: EngineConfig,
    kept_for_copies: u64,
) -> Result<(Follower, Option<(NamespaceId, Arc<Engine>)>)> {
    let map = cluster.map();
    let entry = map.namespaces.iter().find(|entry| entry.uuid == own.uuid);
    let is_copied = entry.is_some_and(|entry| map.copies_of(entry.id).is_some());
    let is_others = entry.is_some_and(|entry| entry.leader != cluster.node());
    if let Some(entry) = entry
        && (is_copied || is_others && weir_kv::is_unfinished(env, dir)?)
    {
        let config = EngineConfig { journal_keep_bytes: kept_for_copies, ..engine };
        return Ok((Follower::open(env, dir, config, entry.id).await?, None));
    }
    let store = Engine::open(env, dir, engine).await?;
    let kv: SharedKv = store.clone();
    if let Some(entry) = entry
        && is_others
        && kv.read(&mut |_| Ok(()))?.0 == 0
    {
        return Ok((Follower::of(env, dir, engine, entry.id, store), None));
    }
    let (_, lead) = Leadership::take(cluster, &kv, own).await?;
    Ok((Follower::of(env, dir, engine, lead.namespace, store.clone()), Some((lead.namespace, store))))
}

impl MetaNode {
    fn leads(&self) -> MutexGuard<'_, Option<Serving>> {
        self.leads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This node's handle on the cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Works until its store fails, or the coordinator refuses its directory. Returns the reason.
    pub fn run(&self) -> BoxFuture<'_, Error> {
        Box::pin(self.run_unboxed())
    }
    async fn run_unboxed(&self) -> Error {
        let mut maps = self.cluster.subscribe();
        loop {
            if let Err(e) = self.step(&mut maps).await {
                return e;
            }
        }
    }

    /// Follows the newest map, and waits for the next event.
    async fn step(&self, maps: &mut watch::Receiver<Arc<ClusterMap>>) -> Result<()> {
        maps.borrow_and_update();
        // The failure of a following copy's store is only detected here.
        self.service.follower.engine().map_or(Ok(()), |engine| engine.check())?;
        self.hand_over_if_full();
        let is_open =
            self.take_part(false).await? || journal_group_of(&self.cluster.map(), &self.own).is_some();
        let mut ended = self.leads().as_mut().and_then(|leads| leads.ended.take());
        let ends = async {
            match &mut ended {
                Some(ended) => ended.await.unwrap_or_else(|_| Error::io("the work of the leader ended")),
                None => std::future::pending().await,
            }
        };
        let why = tokio::select! {
            biased;
            why = ends => why,
            changed = async {
                tokio::select! {
                    changed = maps.changed() => changed.is_ok(),
                    () = self.env.clock.sleep(ANNOUNCE_AGAIN), if is_open => true,
                }
            } => {
                if let Some(leads) = self.leads().as_mut() {
                    leads.ended = ended;
                }
                return if changed { Ok(()) } else { Err(Error::unavailable("this node left the cluster")) };
            }
        };
        if why.kind == ErrorKind::Io || journal_group_of(&self.cluster.map(), &self.own).is_none() {
            return Err(why);
        }
        if let Some(more) = self.env.watch.line("lead ended") {
            tracing::warn!("this node does not lead namespace {:?} any more: {why}{more}", self.own.name);
        }
        self.leave_lead();
        if why.kind == ErrorKind::NoSpace {
            // At once if it is the first time: another copy may have space.
            self.pause_until_next_lead().await;
        }
        Ok(())
    }

    /// True: it must be retried in a while.
    async fn take_part(&self, starts: bool) -> Result<bool> {
        match self.part(&self.cluster.map(), starts) {
            Part::Stays => Ok(false),
            Part::Follows => {
                self.leave_lead();
                Ok(false)
            }
            Part::Announces => {
                self.leave_lead();
                self.announce().await
            }
            Part::Leads(namespace, group) => match self.lead(namespace, group).await {
                Err(e) if e.kind == ErrorKind::Io => Err(e),
                Err(e) => {
                    tracing::info!("this node cannot lead namespace {:?} yet: {e}", self.own.name);
                    Ok(true)
                }
                Ok(()) => Ok(false),
            },
        }
    }

    fn part(&self, map: &ClusterMap, starts: bool) -> Part {
        let led = self.leads().as_ref().map(|leads| leads.epoch);
        let Some((namespace, group)) = journal_group_of(map, &self.own) else {
            return if led.is_some() { Part::Stays } else { Part::Announces };
        };
        let me = self.cluster.node();
        let state = me.and_then(|me| group.state(me));
        if starts || matches!(state, None | Some(MemberState::Down)) {
            return Part::Announces;
        }
        if group.leader != me {
            return Part::Follows;
        }
        let known = self.service.follower.engine().map_or(Epoch(0), |engine| engine.epoch());
        match known.cmp(&group.epoch) {
            Ordering::Less => Part::Leads(namespace, group),
            Ordering::Equal if led == Some(group.epoch) => Part::Stays,
            // It was leading when it ended: it needs another epoch.
            Ordering::Equal => Part::Announces,
            Ordering::Greater => Part::Follows,
        }
    }

    /// Announces the directory. True: it is refused for now.
    async fn announce(&self) -> Result<bool> {
        let map = self.cluster.map();
        let entry = map.namespaces.iter().find(|entry| entry.uuid == self.own.uuid);
        let Some(entry) = entry else {
            return Err(Error::not_found(format!("namespace {:?} was given up", self.own.name)));
        };
        if map.copies_of(entry.id).is_none() {
            let name = &entry.name;
            let waits = Error::unavailable(format!("namespace {name:?} is to have one copy"))
                .hint(format!("`weir namespace copies {name} 2`"));
            tracing::info!("this node waits: {waits}");
            return Ok(false);
        }
        match self.cluster.keep_copy(entry.id, self.own.uuid, self.service.follower.changes()).await {
            Ok(_) => Ok(false),
            Err(e) if matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Stale | ErrorKind::Deadline) => {
                tracing::debug!("this node keeps no copy of namespace {:?} now: {e}", entry.name);
                Ok(true)
            }
            Err(e) => Err(e),
        }
    }

    /// Leads under the group's epoch: from now on, or continued.
    async fn lead(&self, namespace: NamespaceId, members: JournalGroup<NodeId>) -> Result<()> {
        let follower = &self.service.follower;
        let fetches = || Error::unavailable("the whole state is being fetched from another copy");
        let engine = follower.engine().ok_or_else(fetches)?;
        let me = self.cluster.node().ok_or_else(|| Error::unavailable("this node has not joined"))?;
        let callbacks: Arc<dyn Service> = Arc::new(self.service.clone());
        let link = |id: NodeId| (id, self.cluster.node_of_its_own(id, callbacks.clone()));
        let links = members.members.iter().filter(|m| m.id != me).map(|m| link(m.id)).collect();
        let epoch = members.epoch;
        let group = Group { namespace, me, members, links };
        let reporter = self.reporter(namespace);
        let promised = || follower.promise();
        let copier = Arc::new(Copier::begin(&self.env, engine.clone(), group, promised, reporter).await?);
        self.service.lead(copier.clone());
        if let Some(leads) = self.leads().as_mut() {
            leads.right.renew(copier);
            leads.epoch = epoch;
            return Ok(());
        }
        let led_until = Some(copier.led_until());
        self.begin((namespace, epoch), engine, Right::of(copier), led_until);
        Ok(())
    }

    /// Begins to serve a namespace that never had copies; returns when it serves.
    async fn lead_alone(&self, namespace: NamespaceId, engine: Arc<Engine>) -> Result<()> {
        let serves = self.begin((namespace, Epoch(0)), engine, Right::alone(), None);
        if serves.await.is_ok() {
            return Ok(());
        }
        let ended = self.leads().as_mut().and_then(|leads| leads.ended.take());
        let why = match ended {
            Some(ended) => ended.await.ok(),
            None => None,
        };
        Err(why.unwrap_or_else(ended_silently))
    }

    /// Serves the namespace in a task of its own; the answer resolves when it does.
    fn begin(
        &self,
        (namespace, epoch): (NamespaceId, Epoch),
        engine: Arc<Engine>,
        right: Arc<Right>,
        led_until: Option<Instant>,
    ) -> oneshot::Receiver<()> {
        // Leftovers of this lead after its end change nothing, even if this node leads again.
        let kv = engine.led();
        let head = ExportHead {
            cluster: self.own.cluster,
            namespace,
            name: self.own.name.clone(),
            uuid: self.own.uuid,
            changes: 0,
            taken: Time { nanos: 0 },
            release: self.cluster.identity().program().release,
        };
        let work = Work {
            env: self.env.clone(),
            cluster: self.cluster.clone(),
            service: self.service.clone(),
            lead: Leadership::with_kv(&self.cluster, &kv, namespace),
            exports: Exports::new(&self.env, Exported { head, engine }),
            namespace,
        };
        let config = self.config(namespace, right.clone(), led_until);
        let ((serves, served), (report, ended)) = (oneshot::channel(), oneshot::channel());
        let work = self.env.tasks.spawn("lead a namespace", async move {
            let _ = report.send(work.run(config, serves).await.err().unwrap_or_else(ended_silently)); // the node may end
        });
        *self.leads() = Some(Serving { epoch, right, ended: Some(ended), work });
        served
    }

    /// Ends the lead: no client gets an answer any more, and clients search for the node that leads.
    fn leave_lead(&self) {
        if self.leads().take().is_none() {
            return;
        }
        self.service.end();
        let others = self.server.connections().into_iter().filter(|c| c.proved().sender() != Sender::Meta);
        others.for_each(|connection| connection.close("another node leads the namespace"));
    }

    fn reporter(&self, namespace: NamespaceId) -> Reporter {
        let (env, cluster) = (self.env.clone(), self.cluster.clone());
        Arc::new(move |node, epoch, news| {
            let cluster = cluster.clone();
            env.tasks.spawn("news of a copy", async move {
                let reported = match news {
                    News::CaughtUp => cluster.copy_caught_up(namespace, node, epoch).await,
                    News::Silent(silent) => cluster.copy_lost(namespace, node, epoch, silent).await,
                };
                // Repeated while the condition lasts.
                if let Err(e) = reported {
                    tracing::debug!("the coordinator does not accept {news:?} of {node}: {e}");
                }
            });
        })
    }

    fn config(&self, namespace: NamespaceId, right: Arc<Right>, led_until: Option<Instant>) -> MetaConfig {
        let (cluster, audit) = (&self.cluster, &self.audit);
        let [followed, fullness, ruled, asked, upgraded, again] = std::array::from_fn(|_| cluster.clone());
        let (log, witnesses) = (audit.clone(), audit.clone());
        MetaConfig {
            namespace,
            lease_ms: cluster.map().settings.lease_ms,
            layout: Arc::new(layout_policy(self.env.clone(), cluster.clone())),
            at_home: self.at_home.clone(),
            space: Arc::new(space_of_targets(cluster.clone())),
            purge: Arc::new(ClusterPurge {
                env: self.env.clone(),
                cluster: cluster.clone(),
                right: right.clone(),
            }),
            gone: self.gone.clone(),
            map_version: Arc::new(move || followed.map().version),
            takes_data: Arc::new(move || fullness.map().takes_data()),
            access: Arc::new(move || ruled.map().access.clone()),
            refused: Arc::new(move |refusal| log.record(refused_by_rule(&log, refusal))),
            audits: Arc::new(move || asked.map().audits.clone()),
            witness: Arc::new(move |seen| witnesses.record(of_volume(&witnesses, seen))),
            records_holds: Arc::new(move || upgraded.map().level >= LEVEL_OF_HOLDS),
            answers_early: Arc::new(move || again.map().level >= LEVEL_OF_EARLY_ANSWERS),
            right,
            led_until,
        }
    }

    /// Ends in an orderly way, each step within `patience`.
    pub fn end(self, patience: Duration) -> BoxFuture<'static, Result<()>> {
        Box::pin(self.end_unboxed(patience))
    }
    async fn end_unboxed(self, patience: Duration) -> Result<()> {
        let kv: Option<SharedKv> = self.service.follower.engine().map(|engine| engine as SharedKv);
        let led = self.leads().as_ref().map(|leads| leads.epoch);
        if let (Some(kv), Some(_)) = (&kv, led)
            && let Some(entry) =
                self.cluster.map().namespaces.iter().find(|entry| entry.uuid == self.own.uuid)
        {
            // If the coordinator is unreachable or late, it has the last recorded number.
            let lead = Leadership::with_kv(&self.cluster, kv, entry.id);
            let _ = self.env.clock.timeout(patience, lead.record()).await;
        }
        leave(&self.env, &self.cluster, patience).await;
        self.audit.settle(patience).await;
        self.server.stop();
        match (kv, led) {
            // For a fast next start; without it the journal is replayed.
            (Some(kv), Some(Epoch(0))) => kv.checkpoint().await,
            _ => Ok(()),
        }
    }
}

fn ended_silently() -> Error {
    Error::io("the work of the leader ended")
}

/// The tasks of a leader.
struct Work {
    env: Env,
    cluster: Cluster,
    service: NamespaceService,
    lead: Leadership,
    exports: Arc<Exports>,
    namespace: NamespaceId,
}

impl Work {
    /// Serves until the lead is lost, or the store fails.
    async fn run(&self, config: MetaConfig, serves: oneshot::Sender<()>) -> Result<()> {
        let Work { env, cluster, service, lead, exports, namespace } = self;
        let is_alone = config.led_until.is_none();
        let meta = Meta::open(env, lead.kv().clone(), config)?;
        // The coordinator is informed before a client is served. It may be unreachable for a moment.
        while let Err(e) = lead.record().await {
            if is_alone || !matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline) {
                return Err(e);
            }
            env.clock.sleep(ANNOUNCE_AGAIN).await;
        }
        compare(env, cluster, &meta, *namespace).await?;
        service.serve(Arc::new(WithExports { service: Arc::new(meta.clone()), exports: exports.clone() }));
        let _ = serves.send(()); // only a start waits for it
        Err(tokio::select! {
            biased;
            failed = meta.run() => failed,
            lost = lead.keep_recording(env) => lost,
            () = exports.keep_schedule() => Error::io("the schedule of exports ended"),
        })
    }
}

fn journal_group_of(
    map: &ClusterMap,
    own: &NamespaceIdentity,
) -> Option<(NamespaceId, JournalGroup<NodeId>)> {
    let entry = map.namespaces.iter().find(|entry| entry.uuid == own.uuid)?;
    Some((entry.id, journal_group(map, entry.id)?))
}

/// How full the cluster is for new files, in payload bytes: without redundancy.
fn space_of_targets(cluster: Cluster) -> impl Fn() -> BoxFuture<'static, Option<Level>> {
    move || {
        let cluster = cluster.clone();
        Box::pin(async move {
            let status = cluster.status().await.ok()?;
            let space = file_space(&status.map, &status.targets, None, None);
            // Without enough targets that are up, nothing is known: eviction would not help.
            let is_known = space.free > 0 || space.refuses;
            (is_known && space.capacity() > 0).then(|| Level { capacity: space.capacity(), used: space.used })
        })
    }
}
