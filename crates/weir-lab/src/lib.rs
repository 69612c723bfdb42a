//! A whole cluster in the simulated world, for tests of clients and homes: coordinator, metadata, storage
//! nodes and clients, each a node of its own. Never shipped.
//!
//! Roles are started as the program starts them, by `weir-node`. Tests intervene at its seams only: the
//! world, answers in front of a service, and whether home has a file. Knows nothing of faults by chance, of
//! oracles and of homes.
mod answers;
pub mod files;
mod links;

pub use answers::Answer;

use answers::Answers;
use bytes::Bytes;
use links::CutLinks;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, ClientConfig, KernelCache, NewVolume, NoKernel};
use weir_coord::identity::COORDINATOR_FILE;
use weir_coord::{Cluster, CoordConfig, Observer};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, Env};
use weir_kv::EngineConfig;
use weir_node::{MetaPlace, Site, StoragePlace, start_coord, start_meta, start_storage};
use weir_proto::coord::ClusterStatus;
use weir_proto::map::{ClusterMap, Group, MemberState, Role, Scheme};
use weir_proto::meta::Cred;
use weir_proto::volume::{Policy, Quota};
use weir_proto::{Error, InodeId};
use weir_rpc::Handled;

/// How long roles and tests wait for the coordinator.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// The tolerated silence of a node.
pub const SILENCE_MS: u32 = 1000;
/// Small, so that a few hundred KiB are several stripes.
pub const CELL_SHIFT: u8 = 16;
pub const CELL: usize = 1 << CELL_SHIFT;
pub const STRIPE: usize = 4 * CELL;

const COORDINATOR: &str = "coord";
const COORDINATOR_HOST: u8 = 100;
const META: &str = "meta";
const META_HOST: u8 = 101;
const META_DIR: &str = "/meta";
const TARGET_DIR: &str = "/target";
/// Small: each of the many starts reads little.
const ENGINE: EngineConfig =
    EngineConfig { cache_bytes: 4 << 20, journal_bytes_max: 4 << 20, journal_keep_bytes: 0 };

fn storage_name(n: u8) -> String {
    format!("s{n}")
}

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

/// The cluster. Disks are the world's, so nodes can be killed and started again.
#[derive(Clone)]
pub struct Lab(Arc<Inner>);
struct Inner {
    world: World,
    scheme: String,
    lease_ms: u32,
    /// The only version of these files that home has; of other files it has every version.
    home_has: Arc<Mutex<BTreeMap<InodeId, u64>>>,
    answers: Answers,
    /// Of storage nodes.
    links: CutLinks,
    /// The addresses of nodes that have moved.
    moved: Mutex<BTreeMap<String, Vec<Addr>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            lease_ms,
            home_has: Arc::default(),
            answers: Answers::default(),
            links: CutLinks::default(),
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
        self.0.links.set(self.addrs(META, META_HOST));
        self.world().partition(client, META);
    }
    pub fn let_back(&self, client: &str) {
        self.world().heal(client, META);
        self.0.links.set(Vec::new());
    }

    /// The metadata role's directory is lost. The next one is empty, and founded in place of it.
    pub fn lose_meta(&self) {
        self.kill_meta();
        self.world().replace_disk(META);
    }
    /// Where a node listens from its next start on.
    pub fn move_to(&self, name: &str, hosts: &[u8]) {
        lock(&self.0.moved).insert(name.into(), hosts.iter().map(|host| Lab::addr(*host)).collect());
    }
    fn addrs(&self, name: &str, host: u8) -> Vec<Addr> {
        lock(&self.0.moved).get(name).cloned().unwrap_or_else(|| vec![Lab::addr(host)])
    }
    fn addr(host: u8) -> Addr {
        format!("tcp:10.0.0.{host}:7000").parse().unwrap()
    }
    fn observer(&self, name: &str, role: Role) -> Observer {
        Observer {
            coordinators: self.addrs(COORDINATOR, COORDINATOR_HOST),
            cluster: None,
            name: name.into(),
            role,
            host: format!("host-{name}"),
            trust: None,
        }
    }

    /// The place of a role that listens on a host unless it has moved.
    fn site(&self, name: &str, role: Role, host: u8) -> Site {
        let (answers, node) = (self.0.answers.clone(), name.to_owned());
        Site {
            observer: self.observer(name, role),
            listen: self.addrs(name, host),
            listens: Arc::new(|| Ok(())),
            front: Some(Arc::new(move |service| answers.before(&node, service))),
            patience: PATIENCE,
        }
    }

    /// Starts the coordinator, or starts it again.
    pub async fn coordinator(&self, targets: u8) {
        let env = self.world().node(COORDINATOR);
        let mut config = CoordConfig::new(self.0.scheme.parse().unwrap(), usize::from(targets));
        config.settings.cell_shift = CELL_SHIFT;
        config.settings.lease_ms = self.0.lease_ms;
        config.settings.target_silence_ms = SILENCE_MS;
        let dir = Path::new("/coord");
        config.new = !env.disk.exists(&dir.join(COORDINATOR_FILE));
        let site = self.site(COORDINATOR, Role::Coordinator, COORDINATOR_HOST);
        let serves = start_coord(&env, &site, dir, config).await.unwrap();
        env.tasks.spawn("coordinator", async move {
            let e = serves.lost().await;
            panic!("the coordinator ended: {e}");
        });
    }

    /// Starts storage node `n`, or starts it again.
    pub async fn storage(&self, n: u8) {
        let name = storage_name(n);
        let env = self.0.links.within(self.world().node(&name));
        env.disk.create_dir_durable(Path::new(TARGET_DIR)).unwrap();
        let place = StoragePlace {
            dirs: vec![TARGET_DIR.into()],
            pool: "ram".into(),
            known: None,
            others: Vec::new(),
            index: ENGINE,
        };
        let site = self.site(&name, Role::Storage, n + 1);
        let serves = start_storage(&env, &site, &place).await.unwrap();
        env.tasks.spawn("storage", async move {
            serves.work().await;
            panic!("storage node {n} ended");
        });
    }

    /// Starts the metadata leader, or starts it again.
    pub async fn meta(&self) {
        let env = self.world().node(META);
        self.meta_of(META, env).await;
    }
    /// The namespace is led by a node of another name, which got the disk of the first one. That is off.
    pub async fn meta_named(&self, name: &str) {
        self.world().put_disk_back(name, &self.world().copy_disk(META));
        self.meta_of(name, self.world().node(name)).await;
    }
    async fn meta_of(&self, name: &str, env: Env) {
        let new = !env.disk.exists(Path::new(META_DIR));
        let lost = if new { self.observe().await.map().namespaces.first().map(|n| n.uuid) } else { None };
        let home_has = self.0.home_has.clone();
        let place = MetaPlace {
            dir: META_DIR.into(),
            namespace: "root".into(),
            new,
            instead_of: lost,
            engine: ENGINE,
            kept_for_copies: 0,
            gone: Arc::new(|_| false),
            at_home: Arc::new(move |_, ino, inode, _, _| match lock(&home_has).get(&ino) {
                Some(version) if *version != inode.data_version => {
                    Err(Error::denied("home has an older one"))
                }
                _ => Ok(()),
            }),
        };
        let serves = start_meta(&env, &self.site(name, Role::Meta, META_HOST), place).await.unwrap();
        env.tasks.spawn("meta", async move {
            let e = serves.run().await;
            panic!("the metadata leader ended: {e}");
        });
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

    /// From now on the metadata leader is of an older program, which lacks these methods; none: of this one
    /// again.
    pub fn leader_knows_not(&self, methods: &[u16]) {
        let methods = methods.to_vec();
        let answer: Answer =
            Arc::new(move |call| methods.contains(&call.method).then(|| Handled::Now(Err(call.unknown()))));
        self.0.answers.set(META, Some(answer));
    }
    /// A storage node's calls are answered by the test; `None`: by its service again.
    pub fn answer(&self, n: u8, answer: Option<Answer>) {
        self.0.answers.set(&storage_name(n), answer);
    }
    /// From now on home has this version of a file, and no other.
    pub fn home_has(&self, ino: InodeId, data_version: u64) {
        lock(&self.0.home_has).insert(ino, data_version);
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
            early_answers: true,
            ..ClientConfig::new(self.addrs(COORDINATOR, COORDINATOR_HOST), name, &format!("host-{name}"))
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
        self.world().kill(COORDINATOR);
    }
    pub fn kill_meta(&self) {
        self.world().kill(META);
    }
    pub fn kill_storage(&self, n: u8) {
        self.world().kill(&storage_name(n));
    }
    /// All servers stop, and the coordinator is the first: it sees no other one leave.
    pub fn stop_servers(&self, targets: u8) {
        self.kill_coordinator();
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
        let index = Path::new(TARGET_DIR).join("index");
        self.world().disk(&storage_name(n)).remove_dir_all(&index).unwrap();
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
}
