//! A whole cluster in the simulated world: each role is started as the program starts it, on its own node.

use crate::Options;
use crate::coordinators::{self, COORDINATOR, Shared, coordinator_name, is_coordinator};
use crate::kinds::FaultKind;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use weir_client::{Client, ClientConfig, NoKernel};
use weir_coord::Observer;
use weir_env::{Addr, BoxFuture, Env, Instant, sim::World};
use weir_kv::EngineConfig;
use weir_node::{MetaPlace, Site, StoragePlace, start_meta, start_storage};
use weir_proto::access::{AccessRule, Grant, IdsAre, RootIs, VolumeGrant};
use weir_proto::coord::ClusterStatus;
use weir_proto::copies::SetCopies;
use weir_proto::map::{ClusterMap, MemberState, Role, Scheme, TargetState};
use weir_proto::{Error, ErrorKind, Result, RunId, TargetId};
use weir_rpc::{Policy, Trust};
use weir_trust::certificate::{Certificate, Pin};
use weir_trust::standin::StandIn;

pub const META: &str = "meta";
/// The nodes that keep the metadata: the first one founds the namespace.
pub fn meta_name(n: usize) -> String {
    if n == 0 { META.to_owned() } else { format!("{META}-{}", n + 1) }
}
pub fn is_meta(name: &str) -> bool {
    name.starts_with(META)
}
/// A storage node's target.
pub const TARGET_DIR: &str = "/target";
/// Not part of the cluster: it observes the cluster, and runs the applications.
pub const HARNESS: &str = "harness";
const META_DIR: &str = "/meta";
const NAMESPACE: &str = "root";
/// How long a role waits for the coordinator.
const PATIENCE: Duration = Duration::from_secs(60);
/// While faults last, others take over the places of targets that are lost for good, and of some that return
/// later.
const REPLACED_AFTER_S: u32 = 2;
const CACHE_BYTES: usize = 4 << 20;
/// Small, so that journals are folded, and that each of the many starts reads little.
const JOURNAL_BYTES_MAX: u64 = 4 << 20;
const ENGINE: EngineConfig =
    EngineConfig { cache_bytes: CACHE_BYTES, journal_bytes_max: JOURNAL_BYTES_MAX, journal_keep_bytes: 0 };
/// Some segments: copies that were away for a while get records, others the whole state.
const KEPT_FOR_COPIES: u64 = 2 << 20;
/// Small, so that the memory budget has an effect.
const CLIENT_BYTES: u64 = 16 << 20;

pub fn storage_name(n: usize) -> String {
    format!("s{n}")
}

/// How often the process of each client was started.
type Lives = Arc<Mutex<BTreeMap<String, u64>>>;
/// Whether a process is certainly gone.
type Gone = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Movers that die are back within seconds.
const RECALL_PATIENCE: Duration = Duration::from_secs(100);

pub struct Cluster {
    world: World,
    options: Options,
    seen: weir_coord::Cluster,
    /// Targets that are lost for good: their data stays under-replicated.
    lost: Mutex<BTreeSet<TargetId>>,
    /// Roles whose disk may fail: they may end by themselves.
    may_end: Arc<Mutex<BTreeSet<String>>>,
    shared: Arc<Shared>,
    /// Roles that have been started.
    founded: Mutex<BTreeSet<String>>,
    /// When the last client or mover died or began to be silent for long, in nanoseconds.
    holder_gone: AtomicU64,
    /// The run of each target at the last start of its process.
    runs_before: Mutex<BTreeMap<TargetId, RunId>>,
    /// How often roles have moved to another address.
    moves: Mutex<BTreeMap<String, u32>>,
    lives: Lives,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node's address after this number of moves.
fn addr(moves: u32, host: &str) -> Addr {
    format!("tcp:10.{}.{host}:7000", moves % 250).parse().expect("an address")
}

impl Cluster {
    /// Founds a cluster and waits until it accepts data.
    pub async fn start_all(world: &World, options: &Options) -> Result<Cluster> {
        let may_end = Arc::default();
        let shared = Arc::new(Shared::new(options));
        start_coordinator(world, &may_end, (options, &shared), 0, None);
        let env = world.node(HARNESS);
        let seen = weir_coord::Cluster::observe(
            &env,
            observer(HARNESS, Role::Console, "harness", options),
            PATIENCE,
        )
        .await?;
        let cluster = Cluster {
            world: world.clone(),
            options: options.clone(),
            seen,
            lost: Mutex::default(),
            may_end,
            shared,
            founded: Mutex::new([COORDINATOR.into()].into()),
            holder_gone: AtomicU64::new(0),
            runs_before: Mutex::default(),
            moves: Mutex::default(),
            lives: Lives::default(),
        };
        if options.servers.certificates {
            cluster.seen.add_access_rule(root_stays_root(), None).await?;
        }
        if options.faults.contains(&FaultKind::LoseTargetForGood) {
            cluster.seen.set_rebuild(REPLACED_AFTER_S).await?;
        }
        (1..options.servers.coordinators).for_each(|n| cluster.start(&coordinator_name(n)));
        cluster.start(META);
        let first = options.storage_nodes - options.servers.late;
        (0..first).for_each(|n| cluster.start(&storage_name(n)));
        if options.servers.copies > 1 {
            let wait = cluster.seen.wait_for(PATIENCE, |map| map.namespace_named(NAMESPACE).is_some());
            wait.await?;
            (1..options.servers.copies).for_each(|n| cluster.start(&meta_name(n)));
            cluster.set_copies(None).await?;
        }
        cluster.wait_whole(PATIENCE).await?;
        if options.limits {
            for scheme in other_schemes(options.scheme) {
                cluster.seen.make_groups(None, scheme).await?;
            }
        }
        Ok(cluster)
    }

    /// Starts the process of a node that is down.
    pub fn start(&self, name: &str) {
        if self.world.is_up(name) {
            return;
        }
        self.note_runs(name);
        let env = self.world.node(name);
        let new = lock(&self.founded).insert(name.into());
        let start = |role: BoxFuture<'static, Result<()>>| {
            start_role(&self.world, &env, &self.may_end, name, role);
        };
        match name {
            _ if is_coordinator(name) => {
                let n = self.shared.starts(name);
                let moves = lock(&self.moves).get(name).copied();
                start_coordinator(&self.world, &self.may_end, (&self.options, &self.shared), n, moves);
            }
            _ if is_meta(name) => {
                let n = (0..self.options.servers.copies)
                    .find(|n| meta_name(*n) == name)
                    .expect("a metadata node");
                let gone: Gone = match self.options.servers.copies {
                    1 => gone(&self.world, &self.lives),
                    _ => Arc::new(|_| false), // clients are on other machines
                };
                let at = addr(self.moves(name), &format!("0.{}", n + 2));
                start(Box::pin(run_meta(env.clone(), n, at, new && n == 0, gone, self.options.clone())));
            }
            _ => {
                let n: usize = name[1..].parse().expect("storage nodes are s0, s1, …");
                let (host, at) =
                    (format!("host{}", n % self.options.hosts), addr(self.moves(name), &format!("1.{n}")));
                start(Box::pin(run_storage(env.clone(), n, host, at, self.options.clone())));
            }
        }
    }

    /// The state that several coordinators share.
    pub fn coordinators(&self) -> &Arc<Shared> {
        &self.shared
    }
    fn note_runs(&self, name: &str) {
        let map = self.seen.map();
        let of_node = targets_of(&map, name).filter_map(|id| map.target(id));
        lock(&self.runs_before).extend(of_node.map(|target| (target.id, target.last.run.id)));
    }

    /// From its next start on the role has another address.
    pub fn move_away(&self, name: &str) {
        *lock(&self.moves).entry(name.into()).or_default() += 1;
    }
    fn moves(&self, name: &str) -> u32 {
        lock(&self.moves).get(name).copied().unwrap_or(0)
    }

    /// The role may end by itself from now on: its disk fails.
    pub fn may_end(&self, name: &str) {
        lock(&self.may_end).insert(name.into());
    }

    /// A client or a mover dies, or begins to be silent for long: its leases and locks are released only when
    /// its session has ended.
    pub fn holder_goes(&self) {
        self.holder_gone.store(self.world.now().0, Ordering::Relaxed);
    }
    pub fn holder_gone(&self) -> Instant {
        Instant(self.holder_gone.load(Ordering::Relaxed))
    }

    /// Sets this run's number of metadata copies; the given node drops its own.
    pub async fn set_copies(&self, without: Option<&str>) -> Result<()> {
        let map = self.seen.map();
        let without = without.and_then(|name| map.nodes.iter().find(|n| n.name == name)).map(|n| n.id);
        let copies = self.options.servers.copies as u8;
        let asked = SetCopies { namespace: NAMESPACE.to_owned(), copies, without };
        let deadline = self.world.now() + PATIENCE;
        // The coordinator, or too many of the others, may be down.
        while let Err(e) = self.seen.set_copies(&asked).await {
            if self.world.now() > deadline {
                return Err(e);
            }
            self.world.sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    /// The node's targets are lost for good; returns them.
    pub fn excuse(&self, name: &str) -> BTreeSet<TargetId> {
        let known = lock(&self.lost).clone();
        let lost = targets_of(&self.seen.map(), name).filter(|t| !known.contains(t)).collect();
        lock(&self.lost).extend(&lost);
        lost
    }

    /// Gives up targets that are lost, and waits until others have their places.
    pub async fn wait_replaced(&self, gone: &BTreeSet<TargetId>, patience: Duration) -> Result<()> {
        let deadline = self.world.now() + patience;
        for target in gone {
            // Refused while too few of the others are up, or the coordinator is down.
            while let Err(e) = self.seen.target_gone(*target, false).await {
                if self.world.now() > deadline {
                    return Err(e);
                }
                self.world.sleep(Duration::from_millis(200)).await;
            }
        }
        let has_place = |map: &ClusterMap, t: &TargetId| {
            map.groups.iter().any(|g| g.scheme.parity > 0 && g.members.iter().any(|m| m.target == *t))
        };
        let left = deadline.since(self.world.now());
        self.seen.wait_for(left, |map| !gone.iter().any(|t| has_place(map, t))).await.map(drop)
    }

    /// Drains the node's targets.
    pub async fn drain(&self, name: &str) -> Result<()> {
        self.ask_drain(name, false, PATIENCE).await
    }

    /// Stops the drain: the node's targets keep their remaining places.
    pub async fn stays(&self, name: &str, patience: Duration) -> Result<()> {
        self.ask_drain(name, true, patience).await
    }

    async fn ask_drain(&self, name: &str, stay: bool, patience: Duration) -> Result<()> {
        let deadline = self.world.now() + patience;
        for target in targets_of(&self.seen.map(), name) {
            while let Err(e) = self.seen.drain_target(target, stay, false).await {
                if stay && e.kind == ErrorKind::NotFound {
                    break; // a reply was lost
                }
                if self.world.now() > deadline {
                    return Err(e);
                }
                self.world.sleep(Duration::from_millis(200)).await;
            }
        }
        Ok(())
    }

    /// Waits until the node's targets have no place any more. Reports the waiting places if it takes too
    /// long.
    pub async fn wait_drained(&self, name: &str, patience: Duration) -> Result<()> {
        let has_place = |map: &ClusterMap, t: &TargetId| {
            map.groups.iter().any(|g| g.members.iter().any(|m| m.target == *t))
        };
        let is_drained = |map: &ClusterMap| !targets_of(map, name).any(|t| has_place(map, &t));
        let Err(e) = self.seen.wait_for(patience, is_drained).await else { return Ok(()) };
        let (map, status) = (self.seen.map(), self.seen.rebuild().await);
        Err(e.doing(format!("{:?}, {:?}", map.moves, status.map(|s| (s.draining, s.waiting)))))
    }

    /// Waits until the coordinator has marked the node's targets as failed.
    pub async fn wait_failed(&self, name: &str, patience: Duration) -> Result<()> {
        let failed = |map: &ClusterMap| {
            let state = |t| map.target(t).map(|t| t.state);
            targets_of(map, name).all(|t| state(t) == Some(TargetState::Failed))
        };
        self.seen.wait_for(patience, failed).await.map(|_| ())
    }

    /// Waits until no target has any data. With a target that never returns, its deletions stay on the
    /// leader's list for ever, and the list is processed slowly: no promise then.
    pub async fn wait_empty(&self, patience: Duration) -> Result<()> {
        let deadline = self.world.now() + patience;
        while lock(&self.lost).is_empty() {
            let status = self.seen.status().await;
            let used = status.map(|s| {
                let used = s.targets.into_iter().find(|t| t.used > 0);
                used.map(|t| format!("{} still uses {} bytes", t.target, t.used))
            });
            let Some(what) = used.unwrap_or_else(|e| Some(e.to_string())) else { return Ok(()) };
            if self.world.now() > deadline {
                return Err(Error::deadline(what));
            }
            self.world.sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    /// The map, as an observer sees it.
    pub fn seen(&self) -> &weir_coord::Cluster {
        &self.seen
    }
    /// All servers.
    pub fn all(&self) -> Vec<String> {
        let storage = (0..self.options.storage_nodes).map(storage_name);
        let metas = (0..self.options.servers.copies).map(meta_name);
        self.shared.names().into_iter().chain(metas).chain(storage).collect()
    }
    pub fn power_cut_all(&self) {
        self.all().iter().for_each(|name| self.world.power_cut(name));
    }
    pub fn restart_all(&self) {
        self.all().iter().for_each(|name| self.start(name));
    }

    /// A mount.
    pub async fn client(&self, name: &str) -> Result<Client> {
        self.connect(name, Role::Mount).await
    }
    /// A command of an administrator.
    pub async fn admin(&self, name: &str) -> Result<Client> {
        self.connect(name, Role::Console).await
    }
    pub async fn connect(&self, name: &str, role: Role) -> Result<Client> {
        let life = {
            let mut lives = lock(&self.lives);
            let life = lives.entry(name.into()).or_default();
            *life += u64::from(!self.world.is_up(name));
            *life
        };
        let (env, process) = (self.world.node(name), format!("{name} {life}"));
        let config = ClientConfig {
            role,
            memory_bytes: CLIENT_BYTES,
            recall_patience: RECALL_PATIENCE,
            local_creates_after: Some(1),
            early_answers: true,
            process,
            trust: trust(name, role, &self.options),
            ..ClientConfig::new(coordinators::addrs(&self.options), name, name)
        };
        Client::connect(env, config, Arc::new(NoKernel)).await
    }

    /// Waits until every member of every group is current, and nothing is under-replicated any more.
    pub async fn wait_whole(&self, patience: Duration) -> Result<()> {
        let deadline: Instant = self.world.now() + patience;
        loop {
            let lost = lock(&self.lost).clone();
            let lacks = match whole(&self.seen.map(), &self.options, &lost) {
                Err(lacks) => lacks,
                Ok(()) => match self.seen.status().await {
                    Err(e) => e.to_string(),
                    Ok(status) => match self.lacks(&status, &lost) {
                        None => return Ok(()),
                        Some(lacks) => lacks,
                    },
                },
            };
            if self.world.now() > deadline {
                return Err(Error::deadline(lacks));
            }
            self.world.sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Cluster {
    /// The map may show a target as current that died a moment ago, or that the coordinator awaits since its
    /// own start: it may have returned without its data.
    fn lacks(&self, status: &ClusterStatus, lost: &BTreeSet<TargetId>) -> Option<String> {
        let before = lock(&self.runs_before);
        let mut expected = status.map.targets.iter().filter(|target| !lost.contains(&target.id));
        expected.find_map(|target| {
            let id = target.id;
            match status.targets.iter().find(|report| report.target == id) {
                None => Some(format!("{id} has not joined since the coordinator started")),
                Some(_) if before.get(&id) == Some(&target.last.run.id) => {
                    Some(format!("{id} has not joined since it started"))
                }
                // The data of a lost target stays under-replicated.
                Some(report) if report.under_replicated_cells > 0 && lost.is_empty() => {
                    Some(format!("{id} counts {} cells that lack redundancy", report.under_replicated_cells))
                }
                Some(_) => None,
            }
        })
    }
}

/// Schemes for volumes in addition to the cluster's. They survive the same number of losses.
pub fn other_schemes(scheme: Scheme) -> impl Iterator<Item = Scheme> {
    [1, 2].into_iter().map(move |data| Scheme { data, ..scheme })
}

fn targets_of<'m>(map: &'m ClusterMap, name: &str) -> impl Iterator<Item = TargetId> + use<'m> {
    let node = map.nodes.iter().find(|n| n.name == name).map(|n| n.id);
    map.targets.iter().filter(move |t| Some(t.node) == node).map(|t| t.id)
}

fn whole(map: &ClusterMap, options: &Options, lost: &BTreeSet<TargetId>) -> std::result::Result<(), String> {
    if map.groups.is_empty() {
        return Err("there are no placement groups".into());
    }
    if map.targets.len() < options.storage_nodes - options.servers.late {
        return Err(format!("{} targets of {}", map.targets.len(), options.storage_nodes));
    }
    for namespace in &map.copies {
        let current = namespace.members.iter().filter(|m| m.state == MemberState::Current).count();
        if current < options.servers.copies {
            return Err(format!("{current} copies of the metadata are current: {:?}", namespace.members));
        }
    }
    // Groups with less redundancy than the faults leave hold no file: if no remaining member is current,
    // their repair does not end.
    for group in map.groups.iter().filter(|g| g.scheme.parity >= options.scheme.parity) {
        let expected = group.members.iter().filter(|m| !lost.contains(&m.target));
        if let Some(member) = expected.into_iter().find(|m| m.state != MemberState::Current) {
            return Err(format!(
                "{} is {:?} in {}, epoch {}",
                member.target, member.state, group.id, group.epoch
            ));
        }
    }
    Ok(())
}

/// A role that ends has failed, and the run with it, unless its disk failed first: then its process ends.
fn start_role(
    world: &World,
    env: &Env,
    may_end: &Arc<Mutex<BTreeSet<String>>>,
    name: &str,
    role: impl Future<Output = Result<()>> + Send + 'static,
) {
    let (world, may_end, name) = (world.clone(), may_end.clone(), name.to_owned());
    env.tasks.spawn("role", async move {
        let Err(e) = role.await else { return };
        let excused = lock(&may_end).contains(&name);
        assert!(excused, "the role of {name} ended: {e:?}");
        world.trace(&format!("{name} ends: {e}"));
        world.kill(&name);
    });
}

fn observer(name: &str, role: Role, host: &str, options: &Options) -> Observer {
    let trust = trust(name, role, options);
    Observer {
        coordinators: coordinators::addrs(options),
        cluster: None,
        name: name.into(),
        role,
        host: host.into(),
        trust,
    }
}

/// Clients are root on their machines, and root is not squashed.
fn root_stays_root() -> AccessRule {
    AccessRule {
        name: "clients".to_owned(),
        who: "*".to_owned(),
        from: Vec::new(),
        volumes: vec![VolumeGrant { glob: "*".to_owned(), grant: Grant::ReadWrite }],
        root: RootIs::Kept,
        ids: IdsAre::Claimed {},
    }
}

/// A node's certificate, in runs with certificates.
fn trust(name: &str, role: Role, options: &Options) -> Option<Arc<Trust>> {
    let (name, roles, until) = (name.to_owned(), vec![role], u64::MAX);
    let shown =
        Certificate { cluster: coordinators::CLUSTER, name, roles, serial: 1, until, by: Pin::default() };
    let handshakes = Arc::new(StandIn::new(shown, Arc::new(|| 0)));
    options.servers.certificates.then(|| Arc::new(Trust::new(handshakes, Policy::default())))
}

async fn made(env: &Env, dir: &Path) -> Result<()> {
    let make = || {
        env.disk.create_dir_all(dir)?;
        env.disk.sync_dir(Path::new("/"))
    };
    make().map_err(|e| Error::from_io(format_args!("make {}", dir.display()), &e))
}

/// The addresses of a node, which waits for the coordinator as roles do.
fn site(name: &str, role: Role, host: &str, listen: Vec<Addr>, options: &Options) -> Site {
    let observer = observer(name, role, host, options);
    Site { observer, listen, listens: Arc::new(|| Ok(())), front: None, patience: PATIENCE }
}

/// Starts the process of a coordinator.
fn start_coordinator(
    world: &World,
    may_end: &Arc<Mutex<BTreeSet<String>>>,
    (options, shared): (&Options, &Shared),
    n: usize,
    moves: Option<u32>,
) {
    let name = coordinator_name(n);
    let env = world.node(&name);
    let config = coordinators::config(options, &env, n, trust(&name, Role::Coordinator, options));
    let listen = coordinators::listens(options, n, moves);
    let site = site(&name, Role::Coordinator, &format!("host{n}"), listen, options);
    if options.servers.coordinators > 1 {
        lock(may_end).insert(name.clone()); // it ends when it leads no more
        start_role(world, &env, may_end, &name, shared.run(world, env.clone(), site, config));
    } else {
        start_role(world, &env, may_end, &name, coordinators::run_alone(env.clone(), site, config));
    }
}

/// Reports whether processes on the leader's machine are gone. Every other client runs there.
fn gone(world: &World, lives: &Lives) -> Gone {
    let (world, lives) = (world.clone(), lives.clone());
    Arc::new(move |process| {
        let Some((name, life)) = process.split_once(' ') else { return false };
        let number = name.strip_prefix('c').and_then(|n| n.parse::<u32>().ok());
        let is_here = number.is_some_and(|n| n % 2 == 0);
        let newest = || lock(&lives).get(name).is_some_and(|newest| newest.to_string() == life);
        is_here && !(world.is_up(name) && newest())
    })
}

async fn run_meta(env: Env, n: usize, at: Addr, new: bool, gone: Gone, options: Options) -> Result<()> {
    let place = MetaPlace {
        dir: META_DIR.into(),
        namespace: NAMESPACE.into(),
        new,
        instead_of: None,
        engine: ENGINE,
        kept_for_copies: KEPT_FOR_COPIES,
        gone,
        at_home: Arc::new(weir_meta::at_home),
    };
    let host = format!("host{}", n % options.hosts);
    let site = site(&meta_name(n), Role::Meta, &host, vec![at], &options);
    let meta = start_meta(&env, &site, place).await.map_err(|e| e.error)?;
    Err(meta.run().await)
}

async fn run_storage(env: Env, n: usize, host: String, at: Addr, options: Options) -> Result<()> {
    made(&env, Path::new(TARGET_DIR)).await?;
    let place = StoragePlace {
        dirs: vec![TARGET_DIR.into()],
        pool: "default".into(),
        known: None,
        others: Vec::new(),
        index: ENGINE,
    };
    let site = site(&storage_name(n), Role::Storage, &host, vec![at], &options);
    let storage = start_storage(&env, &site, &place).await.map_err(|e| e.error)?;
    storage.work().await;
    Err(Error::io("the work of the storage node ended"))
}
