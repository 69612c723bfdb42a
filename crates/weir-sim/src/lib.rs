//! A cluster, a seed, faults and oracles.
//!
//! One run: a coordinator, a metadata leader, storage nodes and clients, all real code, in one simulated
//! world. Clients work on files whose every byte is known; faults come and go within the limits that the
//! cluster promises to survive; then all faults end, and every name and byte is verified, also after a power
//! cut of all nodes, and with any m targets down. A run is a function of its seed.
//!
//! Never shipped.
#![forbid(unsafe_code)]

mod burst;
mod calls;
mod client_states;
pub mod clones;
mod cluster;
mod concurrent_file;
mod context;
mod coordinators;
pub mod coverage;
mod faults;
pub mod home;
mod kinds;
pub mod limits;
mod locks;
pub mod marks;
pub mod model;
pub mod oracles;
pub mod owners;
pub mod replica;
mod shared_file;
pub mod shrink;
mod small_files;
pub mod snapshots;
mod trash;
pub mod tree;
mod turn;
mod turn_file;
mod workload;

use client_states::{ClientStates, client_name};
use clones::Clones;
use cluster::Cluster;
use faults::Faults;
use home::Home;
pub use kinds::{FaultKind, Toll};
use marks::Met;
use oracles::{
    Oracles,
    epochs::raised_for_a_live_node,
    idle,
    work::{Done, Ledger},
};
use replica::Replica;
use snapshots::Snapshots;
use std::{
    collections::{BTreeMap, BTreeSet},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use weir_env::sim::{ProcessorConfig, SimConfig, World};
use weir_proto::{Error, map::Scheme};
use workload::Workload;

/// The shape of a run.
#[derive(Clone, Debug)]
pub struct Options {
    pub storage_nodes: usize,
    /// Storage node `n` is on host `n % hosts`.
    pub hosts: usize,
    pub scheme: Scheme,
    pub cell_shift: u8,
    pub clients: usize,
    /// Turn files in use at a time.
    pub files: usize,
    /// Operations of each application on turn files (two per client).
    pub operations: u64,
    /// Longest pause of an application between two operations. A longer one lets more faults meet fewer
    /// operations.
    pub pause_ms_max: u64,
    /// The first fault is the first of these.
    pub faults: Vec<FaultKind>,
    /// Faults that are omitted, by their number in the run: see [`shrink`].
    pub mute: BTreeSet<u64>,
    /// Files are evicted to a home and recalled, by movers that die.
    pub home: bool,
    /// Snapshots are taken, read and removed.
    pub snapshots: bool,
    /// The volume is cloned, and clones are changed and deleted.
    pub clones: bool,
    /// Processes of every client count under locks.
    pub locks: bool,
    /// A tree of directories is changed.
    pub tree: bool,
    /// Removed files go to a trash.
    pub trash: bool,
    /// A volume mirrors a home that another party changes. Not together with a home of the enclosing volume,
    /// which would ship it, too.
    pub replica: bool,
    /// Volumes with limits are made, written until they are full, and deleted.
    pub limits: bool,
    pub servers: Servers,
    pub watch: Watch,
}

/// How a run is observed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watch {
    /// Keep the trace as text.
    pub log: bool,
    /// The claims about load that are checked.
    pub oracles: Oracles,
}

/// Storage nodes beyond the width of the scheme.
const SPARE_NODES: usize = 2;

/// Every third seed of mixed runs has processors, load and oracles of load. Without a processor a run needs
/// less time, and older seeds keep their meaning.
const PROCESSOR_IN_EVERY: u64 = 3;

/// The shape of the servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Servers {
    /// Nodes show certificates, and frames are protected.
    pub certificates: bool,
    /// Number of nodes that keep the metadata.
    pub copies: usize,
    /// Number of coordinators. Several share an etcd.
    pub coordinators: usize,
    /// Number of storage nodes, the last ones, that join later.
    pub late: usize,
    /// They and the clients have a processor of this speed, in hundredths of a usual one; `None`: tasks take
    /// no time.
    pub processor: Option<u32>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            storage_nodes: 6,
            hosts: 3,
            scheme: Scheme { data: 4, parity: 2 },
            cell_shift: 16,
            clients: 2,
            files: 5,
            operations: 60,
            pause_ms_max: 200,
            faults: Vec::new(),
            mute: BTreeSet::new(),
            home: false,
            snapshots: false,
            clones: false,
            locks: false,
            tree: false,
            trash: false,
            replica: false,
            limits: false,
            servers: Servers { certificates: false, copies: 1, coordinators: 1, late: 0, processor: None },
            watch: Watch::default(),
        }
    }
}

/// With what its faults need: if targets are lost for good or drained, others must exist to take their
/// places.
fn with_needs(options: &Options) -> Options {
    let mut options = options.clone();
    if options.faults.iter().any(|kind| kind.needs_spare_nodes()) {
        options.storage_nodes = options.storage_nodes.max(options.scheme.width() + SPARE_NODES);
    }
    if options.faults.contains(&FaultKind::AddTargets) {
        options.servers.late = SPARE_NODES;
    }
    // Only a node with a processor can lack it.
    if options.faults.contains(&FaultKind::StarvedNode) {
        options.servers.processor = options.servers.processor.or(Some(100));
    }
    options
}

impl Options {
    /// A few kinds of faults, chosen by the seed: each kind comes first for some seeds.
    pub fn mixed(seed: u64) -> Options {
        Options::mixed_of(seed, 1)
    }

    /// Like [`Options::mixed`], with this number of copies of the metadata.
    pub fn mixed_of(seed: u64, copies: usize) -> Options {
        let world = World::new(seed, SimConfig::default());
        let rng = world.rng("mix");
        let all = FaultKind::mixable(copies > 1).into_iter();
        // Added, not drawn: seeds without a processor keep their meaning.
        let (load, all): (Vec<FaultKind>, Vec<FaultKind>) = all.partition(|kind| kind.is_load());
        let mut faults = vec![all[seed as usize % all.len()]];
        for _ in 0..5 {
            let kind = all[rng.below(all.len() as u64) as usize];
            let spends = |k: &FaultKind| matches!(k.toll(), Toll::Silent | Toll::Lasting);
            // Lasting damage leaves room for one fault less: once in a run is enough.
            let is_too_much = spends(&kind) && faults.iter().any(spends);
            if !is_too_much && !faults.contains(&kind) {
                faults.push(kind);
            }
        }
        let pause_ms_max = [200, 1000, 3000][rng.below(3) as usize];
        let mut options = Options { pause_ms_max, ..Options::default() };
        options.servers.copies = copies;
        if seed.is_multiple_of(PROCESSOR_IN_EVERY) {
            options.servers.processor = Some(100);
            options.watch.oracles = Oracles { idle: false, ..Oracles::ALL };
            faults.extend(load);
        }
        Options { faults, ..options }
    }
}

impl Options {
    /// Adds several coordinators; the first fault is one of theirs.
    pub fn with_coordinators(mut self, coordinators: usize, seed: u64) -> Options {
        self.servers.coordinators = coordinators;
        let of_coordinators: Vec<FaultKind> =
            FaultKind::ALL.into_iter().filter(|kind| kind.needs_coordinators()).collect();
        if coordinators > 1 {
            let first = seed as usize % of_coordinators.len();
            self.faults.insert(0, of_coordinators[first]);
            self.faults.push(of_coordinators[(first + 1) % of_coordinators.len()]);
        }
        self
    }
}

/// Statistics of a run that kept every promise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    pub trace_hash: u64,
    pub operations: u64,
    /// How often each fault came.
    pub faults: BTreeMap<&'static str, u64>,
    /// Errors that a fault excuses.
    pub excused: u64,
    /// How often bytes of a file were evicted on request.
    pub evictions: u64,
    /// How often bytes of a file were evicted by the client that was writing it.
    pub own_evictions: u64,
    pub met: Met,
    /// How often a fault of a disk, or load, took effect, during faults of each kind.
    pub hits: BTreeMap<&'static str, u64>,
    pub simulated: Duration,
    /// The number of spans without faults that lose connections, and the requests asked for and served in
    /// them.
    pub calm: (u64, Done),
    /// The trace, if the options keep it.
    pub log: Vec<String>,
}

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Broken {
    pub seed: u64,
    pub options: Options,
    /// Including muted ones.
    pub faults_chosen: u64,
    pub what: String,
    /// The end of the trace, if the options keep it.
    pub log: Vec<String>,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\nrepeat with: {}", self.what, shrink::command(self.seed, &self.options))
    }
}

/// How often the harness checks whether all workloads are done.
const POLL_EVERY: Duration = Duration::from_millis(20);
const POLL_MAX: Duration = Duration::from_secs(60);
/// Deleted files are gone from the targets by then.
const EMPTY_PATIENCE: Duration = Duration::from_secs(120);

/// Runs a cluster under one seed.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Broken>> {
    let options = &with_needs(options);
    let processor = options.servers.processor.map(|percent| ProcessorConfig {
        speed_ppm: u64::from(percent) * 10_000,
        ..ProcessorConfig::default()
    });
    let time_max = Duration::from_secs(4 * 3600);
    let config = SimConfig { log: options.watch.log, time_max, processor, ..SimConfig::default() };
    let world = World::new(seed, config);
    let chosen = Arc::new(AtomicU64::new(0));
    let playing = play(world.clone(), options.clone(), chosen.clone());
    let reported = catch_unwind(AssertUnwindSafe(|| world.run(playing)));
    let (trace_hash, log, ended) = (world.trace_hash(), world.trace_lines(), world.ended());
    drop(world);
    let what = match reported {
        Ok(Ok(_)) if !ended() => format!("seed {seed}: a part of a node that ended is still kept by itself"),
        Ok(Ok(outcome)) => return Ok(Outcome { trace_hash, log, ..outcome }),
        Ok(Err(e)) => format!("seed {seed}: {e:?}"),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
        }
    };
    let (options, faults_chosen) = (options.clone(), chosen.load(Ordering::Relaxed));
    Err(Box::new(Broken { seed, options, faults_chosen, what, log }))
}

/// Starts the work of administrators and other parties.
fn begin_background(
    world: &World,
    cluster: &Arc<Cluster>,
    work: &Arc<Workload>,
    (snapshots, clones, replica): (&Arc<Snapshots>, &Arc<Clones>, Option<Arc<Replica>>),
    options: &Options,
) -> Vec<Background> {
    let mut background = Vec::new();
    if options.snapshots {
        let snapshots = snapshots.clone();
        background.push(Background::begin(world, "snapshots", async move { snapshots.disturb().await }));
    }
    if options.clones {
        let clones = clones.clone();
        background.push(Background::begin(world, "clones", async move { clones.disturb().await }));
    }
    if let Some(replica) = replica {
        let work = work.clone();
        let strangers = async move { replica.disturb(|| work.is_done()).await };
        background.push(Background::begin(world, "strangers", strangers));
    }
    if options.limits {
        let (work, cluster) = (work.clone(), cluster.clone());
        let limited = async move {
            if let Some(limits) = &work.limits {
                limits.disturb(&work.context, &cluster, || work.uses_limits()).await;
            }
        };
        background.push(Background::begin(world, "volumes with limits", limited));
    }
    background
}

async fn play(world: World, options: Options, chosen: Arc<AtomicU64>) -> Result<Outcome, Error> {
    faults::prepare(&world, &options);
    let cluster = Arc::new(Cluster::start_all(&world, &options).await?);
    if !options.watch.oracles.epochs {
        return play_on(&world, &cluster, &options, chosen).await;
    }
    tokio::select! {
        biased;
        what = raised_for_a_live_node(&world, cluster.seen()) => Err(Error::unavailable(what)),
        outcome = play_on(&world, &cluster, &options, chosen) => outcome,
    }
}

async fn play_on(
    world: &World,
    cluster: &Arc<Cluster>,
    options: &Options,
    chosen: Arc<AtomicU64>,
) -> Result<Outcome, Error> {
    let client_states = Arc::new(ClientStates::new(world, options.clients));
    if options.faults.contains(&FaultKind::DiskFull) {
        client_states.no_space();
    }
    let founder = cluster.admin("founder").await?;
    let home = match options.home {
        true => Some(Home::begin(world, cluster, &founder).await?),
        false => None,
    };
    let replica = match options.replica {
        true => Some(Arc::new(Replica::begin(world, cluster, &founder).await?)),
        false => None,
    };
    let work = Workload::prepare(world, &founder, &client_states, options, home.clone(), replica.clone());
    let work = Arc::new(work.await?);
    founder.shutdown().await?;
    (0..options.clients).for_each(|me| attend(world, cluster, &work, me));
    let ledger = Arc::new(Ledger::new(world, cluster.all()));
    ledger.calm_begins(work.asked());
    let faults =
        Faults::new(cluster.clone(), work.clone(), world.clone(), options.clone(), chosen, ledger.clone());
    let faults = Arc::new(faults);
    let running = faults.clone();
    let mut background = vec![Background::begin(world, "faults", async move { running.run().await })];
    let snapshots = Arc::new(Snapshots::new(world, cluster, &work));
    let clones = Arc::new(Clones::new(world, cluster, &work));
    background.extend(begin_background(world, cluster, &work, (&snapshots, &clones, replica), options));
    wait_for_applications(world, home.as_deref(), &work).await;
    faults.stop();
    for one in background {
        one.ended().await?;
    }
    if options.watch.oracles.idle {
        idle::wait(world, &cluster.all()).await.map_err(Error::unavailable)?;
    }
    ledger.calm_ends(work.asked());
    if options.watch.oracles.work {
        ledger.check().map_err(Error::unavailable)?;
    }
    leave(world, &work, options).await?;
    verify_from_all_sides(world, cluster, &work, (&snapshots, &clones), options, &faults.spent()).await?;
    let simulated = Duration::from_nanos(world.now().0);
    let (operations, excused) = (work.operations(), work.excused());
    let evictions = home.map_or(0, |home| home.evictions.load(Ordering::Relaxed));
    let own_evictions = work.context.client_states.own_evictions();
    let (faults, hits, met) = (faults.counts(), faults.all_hits(), work.context.marks.met());
    Ok(Outcome {
        trace_hash: 0,
        operations,
        faults,
        excused,
        evictions,
        own_evictions,
        met,
        hits,
        simulated,
        calm: ledger.sum(),
        log: Vec::new(),
    })
}

/// While they work, home has its faults.
async fn wait_for_applications(world: &World, home: Option<&Home>, work: &Workload) {
    match home {
        Some(home) => {
            let mark = |name, begins| {
                work.context.marks.home_fault(name, begins, work.context.client_states.own_evictions())
            };
            home.disturb(|| work.is_done(), mark).await
        }
        None => {
            while !work.is_done() {
                world.sleep(POLL_EVERY).await;
            }
        }
    }
}

/// A task of the harness beside the applications.
struct Background {
    what: &'static str,
    ended: tokio::sync::oneshot::Receiver<()>,
}

impl Background {
    fn begin(
        world: &World,
        what: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> Background {
        let (end, ended) = tokio::sync::oneshot::channel();
        world.node(cluster::HARNESS).tasks.spawn(what, async move {
            task.await;
            let _ = end.send(()); // the run ended with a panic
        });
        Background { what, ended }
    }

    async fn ended(self) -> Result<(), Error> {
        let what = self.what;
        self.ended.await.map_err(|_| Error::unavailable(format!("the {what} ended early")))
    }
}

/// Starts the process of a client: it connects, and its applications continue where the previous ones
/// stopped.
fn attend(world: &World, cluster: &Arc<Cluster>, work: &Arc<Workload>, me: usize) {
    let (world, cluster, work) = (world.clone(), cluster.clone(), work.clone());
    let env = world.node(&client_name(me));
    work.context.client_states.begins(me);
    let tasks = env.tasks.clone();
    env.tasks.spawn("client", async move {
        let client = loop {
            match cluster.client(&client_name(me)).await {
                Ok(client) => break client,
                Err(e) => work.context.complain(me, false, format!("c{me} connects"), &e),
            }
            world.sleep(Duration::from_millis(100)).await;
        };
        work.context.client_states.set_client(me, client.clone());
        let life = work.context.client_states.who(me).life;
        for app in work.apps() {
            let rng = world.rng(&format!("client {me}, application {app}, life {life}"));
            tasks.spawn("application", work.clone().use_files(client.clone(), me, app, rng));
        }
    });
}

/// Every client closes its files and ends; then every error is known.
async fn leave(world: &World, work: &Workload, options: &Options) -> Result<(), Error> {
    for me in 0..options.clients {
        let begun = world.now();
        while work.context.client_states.client(me).is_none() {
            assert!(world.now().since(begun) < POLL_MAX, "c{me} cannot connect: {:?}", work.errors());
            world.sleep(POLL_EVERY).await;
        }
    }
    work.close_all().await;
    let errors = work.errors();
    assert!(
        errors.is_empty(),
        "{} operations failed though enough was alive:\n{}",
        errors.len(),
        errors.join("\n")
    );
    for me in 0..options.clients {
        let Some(client) = work.context.client_states.client(me) else { continue };
        if let Err(e) = client.shutdown().await {
            work.context.complain(me, false, format!("shut c{me} down"), &e);
        }
        work.context.client_states.died(me);
    }
    assert!(work.errors().is_empty(), "{:?}", work.errors());
    Ok(())
}

/// Verifies with a client without caches; after a power cut of everything; with any m targets down. Then
/// removes everything.
async fn verify_from_all_sides(
    world: &World,
    cluster: &Cluster,
    work: &Workload,
    versions: (&Snapshots, &Clones),
    options: &Options,
    spent: &BTreeSet<String>,
) -> Result<(), Error> {
    if let Some(home) = &work.context.home {
        let client = cluster.admin("lifts the limit").await?;
        home.lift_limit(&client).await?;
        client.shutdown().await?;
    }
    if let Some(trash) = &work.trash {
        let client = cluster.admin("has the trash stay").await?;
        trash.stays(&client).await?;
        client.shutdown().await?;
    }
    if options.faults.contains(&FaultKind::MetaDiskFull) {
        // A leader finds out within a second that its disk has space again.
        world.sleep(Duration::from_secs(2)).await;
    }
    verify(cluster, work, versions, "after everything healed").await?;
    if let Some(home) = &work.context.home {
        let reader = cluster.admin("reads at home").await?;
        home.verify(&reader).await.map_err(|e| e.doing("home, after everything healed"))?;
        reader.shutdown().await?;
    }
    cluster.power_cut_all();
    world.sleep(Duration::from_secs(1)).await;
    cluster.restart_all();
    let whole = cluster.wait_whole(Duration::from_secs(180)).await;
    whole.map_err(|e| e.doing("wait after a power cut of everything"))?;
    verify(cluster, work, versions, "after a power cut of everything").await?;
    let rng = world.rng("losses at the end");
    let mut left: Vec<String> =
        (0..options.storage_nodes).map(cluster::storage_name).filter(|n| !spent.contains(n)).collect();
    let mut killed = Vec::new();
    while killed.len() + spent.len() < usize::from(options.scheme.parity) {
        let victim = left.remove(rng.below(left.len() as u64) as usize);
        world.kill(&victim);
        killed.push(victim);
    }
    verify(cluster, work, versions, "with targets lost").await?;
    killed.iter().for_each(|name| cluster.start(name));
    let whole = cluster.wait_whole(Duration::from_secs(180)).await;
    whole.map_err(|e| e.doing("wait after the losses at the end"))?;
    let cleaner = cluster.admin("cleaner").await?;
    work.remove_all(&cleaner).await?;
    let (snapshots, clones) = versions;
    snapshots.verify(&cleaner, "after all was removed").await?;
    clones.verify(&cleaner, "after all was removed").await?;
    clones.remove_all(&cleaner).await?;
    snapshots.remove_all(&cleaner).await?;
    if let Some(home) = &work.context.home {
        home.verify_empty(&cleaner).await.map_err(|e| e.doing("home, after all was removed"))?;
    }
    cleaner.shutdown().await?;
    cluster.wait_empty(EMPTY_PATIENCE).await.map_err(|e| e.doing("wait for the space of deleted files"))
}

async fn verify(
    cluster: &Cluster,
    work: &Workload,
    (snapshots, clones): (&Snapshots, &Clones),
    when: &str,
) -> Result<(), Error> {
    let reader = cluster.admin("reader").await.map_err(|e| e.doing(when))?;
    // Before usage is added up: entries that are not enumerated yet are in no usage.
    clones.verify(&reader, when).await?;
    work.verify(&reader, when).await.map_err(|e| e.doing(when))?;
    snapshots.verify(&reader, when).await?;
    reader.shutdown().await.map_err(|e| e.doing(when))
}
