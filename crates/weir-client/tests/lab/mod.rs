//! A whole cluster in the simulated world: coordinator, metadata, storage nodes and clients, each a node of
//! its own.
#![allow(dead_code)]
pub mod files;

use bytes::Bytes;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use weir_client::{Client, ClientConfig, KernelCache, NewVolume, NoKernel};
use weir_coord::identity::{COORDINATOR_FILE, NamespaceIdentity};
use weir_coord::{Cluster, CoordConfig, Coordinator, Membership, Observer, no_reports};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, BoxFuture, Env};
use weir_kv::{MemoryKv, SharedKv};
use weir_meta::{LayoutPolicy, Leadership, Meta, MetaConfig, Purge, StripeTruncation};
use weir_proto::coord::{AnnouncedTarget, ClusterStatus};
use weir_proto::data::DropFile;
use weir_proto::map::{ClusterMap, Group, MemberState, Role, Scheme};
use weir_proto::meta::Cred;
use weir_proto::volume::{Policy, Quota};
use weir_proto::{DiskUuid, Error, FileId, InodeId, NamespaceUuid, PgId, Request, Result, RunId, TargetId};
use weir_rpc::{Call, Connection, Defer, Handled, Identity, Server, Service, serve};
use weir_store::alloc::Geometry;
use weir_store::service::{StorageNode, TargetConfig};

pub const PATIENCE: Duration = Duration::from_secs(20);
/// Small cells, so that a few hundred KiB are several stripes.
/// The tolerated silence of a node.
pub const SILENCE_MS: u32 = 1000;
pub const CELL_SHIFT: u8 = 16;
pub const CELL: usize = 1 << CELL_SHIFT;
pub const STRIPE: usize = 4 * CELL;

pub fn root() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![0] }
}

/// The superuser's, in the root directory.
pub fn new_volume(name: &str, quota: Quota) -> NewVolume {
    NewVolume {
        name: name.into(),
        path: Bytes::from(format!("/{name}")),
        owner: 0,
        group: 0,
        mode: 0o755,
        admins: vec![],
        quota,
        policy: Policy { scheme: None, pool: None },
    }
}

/// Limits of bytes and of files; 0: none.
pub fn quota(bytes: u64, inodes: u64) -> Quota {
    let limit = |n: u64| (n > 0).then_some(n);
    Quota { bytes_hard: limit(bytes), inodes_hard: limit(inodes), grace_s: 60, ..Quota::NONE }
}

/// Bytes that differ everywhere and identify their origin.
pub fn pattern(seed: u64, offset: usize, len: usize) -> Vec<u8> {
    (offset..offset + len)
        .map(|i| {
            let mixed =
                (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_mul(0xBF58_476D_1CE4_E5B9);
            (mixed.wrapping_mul(0x94D0_49BB_1331_11EB) >> 32) as u8
        })
        .collect()
}

#[derive(Default)]
struct Gate {
    behind: OnceLock<Arc<dyn Service>>,
    /// Methods that are newer than its program.
    unknown: Arc<Mutex<Vec<u16>>>,
    name: String,
    refusals: Arc<Mutex<BTreeMap<String, Refusal>>>,
}

/// A node's answer instead of its service's. `None`: the service answers.
pub type Refusal = Arc<dyn Fn(&Call) -> Option<Handled> + Send + Sync>;

impl Gate {
    fn refuses(&self, call: &Call) -> Option<Handled> {
        let refusal = self.refusals.lock().unwrap().get(&self.name).cloned();
        refusal.and_then(|refusal| refusal(call))
    }
    fn knows(&self, call: &Call) -> bool {
        !self.unknown.lock().unwrap().contains(&call.method)
    }
}
impl Service for Gate {
    fn handle(&self, call: Call) -> Handled {
        if let Some(answer) = self.refuses(&call) {
            return answer;
        }
        match self.behind.get() {
            Some(_) if !self.knows(&call) => Handled::Now(Err(call.unknown())),
            Some(service) => service.handle(call),
            None => Handled::Now(Err(Error::unavailable("this node is starting"))),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        if let Some(answer) = self.refuses(&call) {
            return Some(answer);
        }
        match self.behind.get() {
            Some(service) if self.knows(&call) => service.handle_or_defer(call, defer),
            Some(_) => Some(self.handle(call)),
            None => Some(self.handle(call)),
        }
    }
    fn caught_up(&self) {
        if let Some(service) = self.behind.get() {
            service.caught_up();
        }
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(service) = self.behind.get() {
            service.disconnected(connection);
        }
    }
}

fn call<R: Request + Send + Sync + 'static>(
    cluster: &Cluster,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
    patience: Duration,
) -> BoxFuture<'static, Result<(R::Reply, Bytes)>> {
    let cluster = cluster.clone();
    Box::pin(async move {
        Ok(cluster.call_target(target, &request, payload.into(), patience).await?.into_parts())
    })
}

struct ClusterPurge(Cluster);
impl Purge for ClusterPurge {
    fn drop_stripes(
        &self,
        file: FileId,
        first_pg: PgId,
        pg_count: u32,
        truncation: StripeTruncation,
    ) -> BoxFuture<'static, Result<()>> {
        let StripeTruncation { from_stripe, to_stripe, token_epoch: fence } = truncation;
        let cluster = self.0.clone();
        Box::pin(async move {
            let targets =
                cluster.map().members_to_truncate(|g| g.0 >= first_pg.0 && g.0 - first_pg.0 < pg_count)?;
            for (target, epochs) in targets {
                let drop = DropFile { target, file, from_stripe, to_stripe, fence, epochs };
                call(&cluster, target, drop, Vec::new(), Duration::from_secs(5)).await?;
            }
            Ok(())
        })
    }
}

/// The cluster. Contents of disks are kept here, so nodes can be killed and started again.
#[derive(Clone)]
pub struct Lab(Arc<Inner>);
struct Inner {
    world: World,
    scheme: String,
    kept: Mutex<BTreeMap<String, SharedKv>>,
    doors: Mutex<BTreeMap<String, Server>>,
    lease_ms: u32,
    /// The founding of the namespace, and of the one that was given up for it.
    namespace: Mutex<(NamespaceUuid, Option<NamespaceUuid>)>,
    /// What home has of these files is of this version; of others it has all.
    home_has: Arc<Mutex<BTreeMap<InodeId, u64>>>,
    /// Methods that the metadata leader does not know.
    unknown: Arc<Mutex<Vec<u16>>>,
    /// By name of the storage node.
    refusals: Arc<Mutex<BTreeMap<String, Refusal>>>,
    /// Storage nodes pass no bytes on to the metadata leader.
    leader_alone: Arc<AtomicBool>,
    /// Where nodes are that have moved.
    moved: Mutex<BTreeMap<String, Vec<Addr>>>,
}

impl Lab {
    pub fn new(seed: u64) -> Lab {
        Lab::with(seed, "ec:4+2", 2000)
    }
    pub fn with(seed: u64, scheme: &str, lease_ms: u32) -> Lab {
        let log = tracing_subscriber::fmt().with_test_writer().without_time().with_ansi(false);
        let _ = log.with_max_level(tracing_subscriber::filter::LevelFilter::INFO).try_init(); // once per process
        Lab(Arc::new(Inner {
            world: World::new(
                seed,
                SimConfig { time_max: Duration::from_secs(1800), ..SimConfig::default() },
            ),
            scheme: scheme.into(),
            kept: Mutex::default(),
            doors: Mutex::default(),
            lease_ms,
            namespace: Mutex::new((NamespaceUuid([1; 16]), None)),
            home_has: Arc::default(),
            unknown: Arc::default(),
            refusals: Arc::default(),
            leader_alone: Arc::default(),
            moved: Mutex::default(),
        }))
    }
    pub fn world(&self) -> &World {
        &self.0.world
    }
    /// Runs `work` on a cluster of coordinator, metadata and `targets` storage nodes.
    pub fn run<F: Future<Output = ()>>(&self, targets: u8, work: impl FnOnce(Lab) -> F) {
        let lab = self.clone();
        self.0.world.run(async move {
            lab.coordinator(targets).await;
            for n in 0..targets {
                lab.storage(n).await;
            }
            lab.meta().await;
            work(lab).await;
        });
    }

    /// A client's link to the metadata leader is cut, and no storage node has one to offer.
    pub fn cut_off(&self, client: &str) {
        self.0.leader_alone.store(true, SeqCst);
        self.world().partition(client, "meta");
    }
    pub fn let_back(&self, client: &str) {
        self.world().heal(client, "meta");
        self.0.leader_alone.store(false, SeqCst);
    }

    fn kv(&self, name: &str) -> SharedKv {
        let mut kept = self.0.kept.lock().unwrap();
        kept.entry(name.into()).or_insert_with(|| Arc::new(MemoryKv::new())).clone()
    }
    fn namespace(&self, cluster: &Cluster) -> NamespaceIdentity {
        let (uuid, instead_of) = *self.0.namespace.lock().unwrap();
        NamespaceIdentity { cluster: cluster.id(), name: "root".into(), uuid, instead_of }
    }
    /// The metadata role's directory is lost. The next one is empty, and founded in place of it.
    pub fn lose_meta(&self) {
        self.kill_meta();
        self.0.kept.lock().unwrap().remove("meta");
        let mut namespace = self.0.namespace.lock().unwrap();
        *namespace = (NamespaceUuid([namespace.0.0[0] + 1; 16]), Some(namespace.0));
    }
    fn keep_door(&self, name: &str, server: Server) {
        self.0.doors.lock().unwrap().insert(name.into(), server);
    }
    /// Where a node listens from its next start on.
    pub fn move_to(&self, name: &str, hosts: &[u8]) {
        self.0.moved.lock().unwrap().insert(name.into(), hosts.iter().map(|host| Lab::addr(*host)).collect());
    }
    fn addrs(&self, name: &str, host: u8) -> Vec<Addr> {
        self.0.moved.lock().unwrap().get(name).cloned().unwrap_or_else(|| vec![Lab::addr(host)])
    }
    fn addr(host: u8) -> Addr {
        format!("tcp:10.0.0.{host}:7000").parse().unwrap()
    }
    fn observer(&self, name: &str, role: Role) -> Observer {
        Observer {
            coordinators: self.addrs("coord", 100),
            cluster: None,
            name: name.into(),
            role,
            host: format!("host-{name}"),
            trust: None,
        }
    }

    /// Starts the coordinator, or starts it again.
    pub async fn coordinator(&self, targets: u8) {
        let env = self.world().node("coord");
        let mut config = CoordConfig::new(self.0.scheme.parse().unwrap(), usize::from(targets));
        config.settings.cell_shift = CELL_SHIFT;
        config.settings.lease_ms = self.0.lease_ms;
        config.settings.target_silence_ms = SILENCE_MS;
        config.new = !env.disk.exists(&Path::new("/coord").join(COORDINATOR_FILE));
        let coordinator = Coordinator::open(env.clone(), Path::new("/coord"), config).await.unwrap();
        let identity = Identity::new(&env, "coord", Role::Coordinator, Some(coordinator.cluster()));
        let served = coordinator.clone();
        let server = serve(&env, &self.addrs("coord", 100), identity, served).await.unwrap();
        coordinator.announce(server.addrs());
        self.keep_door("coord", server);
    }

    /// Starts storage node `n`, or starts it again.
    pub async fn storage(&self, n: u8) {
        let name = format!("s{n}");
        let env = self.world().node(&name);
        let cluster = Cluster::observe(&env, self.observer(&name, Role::Storage), PATIENCE).await.unwrap();
        let (named, refusals) = (name.clone(), self.0.refusals.clone());
        let gate = Arc::new(Gate { name: named, refusals, ..Gate::default() });
        let server = serve(&env, &self.addrs(&name, n + 1), cluster.identity(), gate.clone()).await.unwrap();
        let (destinations, alone) = (cluster.destinations(), self.0.leader_alone.clone());
        server.pass_on(Arc::new(move |node: &str| match node {
            "meta" if alone.load(SeqCst) => Err(Error::unavailable("no link to the leader")),
            _ => destinations(node),
        }));
        let (disk, index) = (DiskUuid([n + 1; 16]), self.kv(&name));
        let run = RunId(env.rng.next_u64());
        let history = weir_store::runs::begin(&index, run).await.unwrap();
        let announced = AnnouncedTarget { uuid: disk, pool: "ram".into(), capacity: 1 << 30, history };
        let membership = Membership { addrs: server.addrs().to_vec(), targets: vec![announced] };
        let node: Arc<OnceLock<Arc<StorageNode>>> = Arc::default();
        let reporting = node.clone();
        let reports = Arc::new(move || reporting.get().map(|n| n.reports()).unwrap_or_default());
        let living = node.clone();
        let lives = Arc::new(move || living.get().map(|n| n.lives()).unwrap_or_default());
        let joined = cluster.join_with(membership, reports, lives).await.unwrap();
        let config = TargetConfig {
            id: joined.targets[0],
            dir: "/target".into(),
            geometry: Geometry { slab_bytes: 64 << 20, step_bytes: 8 << 20 },
        };
        let peers = Arc::new(cluster.clone());
        let opened = StorageNode::open_over(env.clone(), vec![(config, index.clone())], peers).await.unwrap();
        let admitted = weir_store::runs::admitted(&joined.map, disk, run).unwrap();
        weir_store::runs::confirm(&index, admitted).await.unwrap();
        assert!(node.set(opened.clone()).is_ok());
        assert!(gate.behind.set(opened.clone()).is_ok());
        env.tasks.spawn("storage", opened.run());
        self.keep_door(&name, server);
        std::mem::forget(cluster); // its tasks end with the node
    }

    /// Starts the metadata leader, or starts it again.
    pub async fn meta(&self) {
        self.meta_named("meta").await;
    }
    /// Starts the metadata leader as a node of another name: the namespace's store is at hand there, too.
    pub async fn meta_named(&self, name: &str) {
        let env = self.world().node(name);
        let cluster = Cluster::observe(&env, self.observer(name, Role::Meta), PATIENCE).await.unwrap();
        let gate = Arc::new(Gate { unknown: self.0.unknown.clone(), ..Gate::default() });
        let server = serve(&env, &self.addrs(name, 101), cluster.identity(), gate.clone()).await.unwrap();
        let membership = Membership { addrs: server.addrs().to_vec(), targets: vec![] };
        cluster.join(membership, no_reports()).await.unwrap();
        let (leading, lead) =
            Leadership::take(&cluster, &self.kv("meta"), &self.namespace(&cluster)).await.unwrap();
        let (followed, ruled) = (cluster.clone(), cluster.clone());
        let map_of = cluster.clone();
        let of = cluster.clone();
        let layout = move |policy: &weir_proto::volume::Policy| {
            let layout = weir_coord::layout_in(&of.map(), policy.scheme, policy.pool.as_deref(), 0).ok()?;
            Some(LayoutPolicy {
                scheme: layout.scheme,
                cell_shift: layout.cell_shift,
                first_pg: layout.first_pg,
                pg_count: layout.pg_count,
            })
        };
        let home_has = self.0.home_has.clone();
        let config = MetaConfig {
            namespace: lead.namespace,
            lease_ms: self.0.lease_ms,
            layout: Arc::new(layout),
            at_home: Arc::new(move |_, ino, inode, _, _| match home_has.lock().unwrap().get(&ino) {
                Some(version) if *version != inode.data_version => {
                    Err(Error::denied("home has an older one"))
                }
                _ => Ok(()),
            }),
            space: Arc::new(|| Box::pin(std::future::ready(None))),
            purge: Arc::new(ClusterPurge(cluster.clone())),
            gone: Arc::new(|_| false),
            map_version: Arc::new(move || followed.map().version),
            takes_data: Arc::new(move || map_of.map().takes_data()),
            access: Arc::new(move || ruled.map().access.clone()),
            refused: Arc::new(|_| ()),
            audits: Arc::new(Vec::new),
            records_holds: Arc::new(|| true),
            right: weir_meta::copies::Right::alone(),
            led_until: None,
            witness: Arc::new(|_| ()),
        };
        let meta = Arc::new(Meta::open(&env, self.kv("meta"), config).unwrap());
        leading.record().await.unwrap();
        assert!(gate.behind.set(meta.clone()).is_ok());
        let recording = env.clone();
        env.tasks.spawn("progress", async move {
            let e = leading.keep_recording(&recording).await;
            panic!("the metadata leader ended: {e}");
        });
        env.tasks.spawn("meta", async move {
            let e = meta.run().await;
            panic!("the metadata leader ended: {e}");
        });
        self.keep_door(name, server);
        std::mem::forget(cluster);
    }

    pub async fn observe(&self) -> Cluster {
        let who = self.observer("observer", Role::Console);
        Cluster::observe(&self.world().node("observer"), who, PATIENCE).await.unwrap()
    }

    /// Waits until repair has brought every member that is up to date; otherwise names the groups.
    pub async fn all_current(&self) -> std::result::Result<(), String> {
        let cluster = self.observe().await;
        let behind = |map: &ClusterMap| {
            let is_behind = |g: &&Group| g.members.iter().any(|m| m.state == MemberState::Behind);
            map.groups.iter().filter(is_behind).map(|g| g.id).collect::<Vec<_>>()
        };
        let waited = cluster.wait_for(Duration::from_secs(60), |map| behind(map).is_empty()).await;
        waited.map(|_| ()).map_err(|e| format!("{:?} are behind: {e}", behind(&cluster.map())))
    }

    /// The coordinator's knowledge.
    pub async fn status(&self) -> ClusterStatus {
        let env = self.world().node("observer");
        let cluster =
            Cluster::observe(&env, self.observer("observer", Role::Console), PATIENCE).await.unwrap();
        cluster.status().await.unwrap()
    }

    /// From now on home has this version of a file, and no other.
    /// The metadata leader is of an older program, or of this one again.
    pub fn leader_knows_not(&self, methods: &[u16]) {
        *self.0.unknown.lock().unwrap() = methods.to_vec();
    }
    /// A storage node answers some calls with errors; none: no more.
    pub fn refuse(&self, n: u8, refusal: Option<Refusal>) {
        let (name, mut refusals) = (format!("s{n}"), self.0.refusals.lock().unwrap());
        match refusal {
            Some(refusal) => drop(refusals.insert(name, refusal)),
            None => drop(refusals.remove(&name)),
        }
    }
    pub fn home_has(&self, ino: InodeId, data_version: u64) {
        self.0.home_has.lock().unwrap().insert(ino, data_version);
    }
    pub fn env(&self, name: &str) -> Env {
        self.world().node(name)
    }
    pub async fn client(&self, name: &str) -> Client {
        self.client_with(name, ClientConfig::MEMORY_BYTES, Arc::new(NoKernel)).await
    }
    pub async fn client_with(&self, name: &str, memory_bytes: u64, kernel: Arc<dyn KernelCache>) -> Client {
        let config = ClientConfig { memory_bytes, ..self.config(name) };
        Client::connect(self.world().node(name), config, kernel).await.unwrap()
    }
    pub fn config(&self, name: &str) -> ClientConfig {
        // A console may do what mounts and movers do.
        let role = Role::Console;
        // In each directory that a client has to itself from its first file on.
        let local_creates_after = Some(1);
        ClientConfig {
            role,
            local_creates_after,
            ..ClientConfig::new(self.addrs("coord", 100), name, &format!("host-{name}"))
        }
    }
    /// The waits of all clients' calls, as reported to the coordinator.
    pub async fn waits(&self) -> Vec<String> {
        let env = self.world().node("observer");
        let who = self.observer("observer", Role::Console);
        let waits = Cluster::observe(&env, who, PATIENCE).await.unwrap().waits().await.unwrap();
        let all =
            waits.clients.into_iter().flat_map(|c| c.waits.into_iter().map(move |w| (c.client.clone(), w)));
        all.map(|(client, w)| format!("{client}: {} {}", w.what, w.calls)).collect()
    }
    pub fn kill_coordinator(&self) {
        self.0.doors.lock().unwrap().remove("coord");
        self.world().kill("coord");
    }
    pub fn kill_meta(&self) {
        self.0.doors.lock().unwrap().remove("meta");
        self.world().kill("meta");
    }
    /// All servers stop, and the coordinator is the first: it sees no other one leave.
    pub fn stop_servers(&self, targets: u8) {
        self.0.doors.lock().unwrap().remove("coord");
        self.world().kill("coord");
        (0..targets).for_each(|n| self.kill_storage(n));
    }
    pub async fn start_servers(&self, targets: u8) {
        self.coordinator(targets).await;
        for n in 0..targets {
            self.storage(n).await;
        }
    }
    /// Its index is gone; its slabs are not. It does not run.
    pub fn lose_index(&self, n: u8) {
        self.0.kept.lock().unwrap().remove(&format!("s{n}"));
    }
    /// Until every member of the groups of the lab's scheme is current.
    pub async fn wait_whole(&self, cluster: &Cluster) {
        let scheme: Scheme = self.0.scheme.parse().unwrap();
        let whole = |map: &ClusterMap| {
            let mut members = map.groups.iter().filter(|g| g.scheme == scheme).flat_map(|g| &g.members);
            members.all(|m| m.state == MemberState::Current)
        };
        cluster.wait_for(Duration::from_secs(60), whole).await.unwrap();
    }
    pub fn kill_storage(&self, n: u8) {
        self.0.doors.lock().unwrap().remove(&format!("s{n}"));
        self.world().kill(&format!("s{n}"));
    }
}
