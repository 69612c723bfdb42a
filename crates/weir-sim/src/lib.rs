//! A cluster, a seed, faults and oracles.
//!
//! One run: a coordinator, a metadata leader, storage nodes and clients, all real code, in one simulated world. Clients
//! work on files whose every byte is known; faults come and go within what the cluster promises to survive; then
//! everything heals, and every name and byte is verified, also after a power cut of all, and with any m targets gone.
//! A run is a function of its seed.
//!
//! Never shipped.
#![forbid(unsafe_code)]

mod cluster;
mod faults;
pub mod model;
/// As the binary joins its roles: the same code.
#[allow(dead_code)]
#[path = "../../weir/src/wiring.rs"]
mod wiring;
mod workload;

use cluster::Cluster;
use faults::Faults;
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};
use weir_env::sim::{SimConfig, World};
use weir_proto::{Error, map::Scheme};
use workload::Workload;

/// What can go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    KillStorage,
    PowerCutStorage,
    PowerCutAllStorage,
    KillMeta,
    PowerCutMeta,
    KillCoordinator,
    PartitionFromClient,
    PartitionFromPeer,
    PartitionFromCoordinator,
    ResetConnections,
    SlowLink,
    SlowDisk,
    FlipBits,
}

impl FaultKind {
    pub const ALL: [FaultKind; 13] = [
        FaultKind::KillStorage,
        FaultKind::PowerCutStorage,
        FaultKind::PowerCutAllStorage,
        FaultKind::KillMeta,
        FaultKind::PowerCutMeta,
        FaultKind::KillCoordinator,
        FaultKind::PartitionFromClient,
        FaultKind::PartitionFromPeer,
        FaultKind::PartitionFromCoordinator,
        FaultKind::ResetConnections,
        FaultKind::SlowLink,
        FaultKind::SlowDisk,
        FaultKind::FlipBits,
    ];

    /// Those in which no operation may fail: with fewer than k targets reads and writes fail at once, and say so.
    pub fn survivable() -> Vec<FaultKind> {
        FaultKind::ALL.into_iter().filter(|k| *k != FaultKind::PowerCutAllStorage).collect()
    }

    /// As written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            FaultKind::KillStorage => "kill-storage",
            FaultKind::PowerCutStorage => "power-cut-storage",
            FaultKind::PowerCutAllStorage => "power-cut-all-storage",
            FaultKind::KillMeta => "kill-meta",
            FaultKind::PowerCutMeta => "power-cut-meta",
            FaultKind::KillCoordinator => "kill-coordinator",
            FaultKind::PartitionFromClient => "partition-from-client",
            FaultKind::PartitionFromPeer => "partition-from-peer",
            FaultKind::PartitionFromCoordinator => "partition-from-coordinator",
            FaultKind::ResetConnections => "reset-connections",
            FaultKind::SlowLink => "slow-link",
            FaultKind::SlowDisk => "slow-disk",
            FaultKind::FlipBits => "flip-bits",
        }
    }

    /// Whether its victim, a storage node, counts as lost while it lasts.
    fn takes_storage(self) -> bool {
        matches!(
            self,
            FaultKind::KillStorage
                | FaultKind::PowerCutStorage
                | FaultKind::PowerCutAllStorage
                | FaultKind::PartitionFromClient
                | FaultKind::PartitionFromPeer
                | FaultKind::PartitionFromCoordinator
                | FaultKind::SlowDisk
        )
    }
}

/// The shape of a run.
#[derive(Clone, Debug)]
pub struct Options {
    pub storage_nodes: usize,
    /// Storage node `n` is on host `n % hosts`.
    pub hosts: usize,
    pub scheme: Scheme,
    pub cell_shift: u8,
    pub clients: usize,
    /// Turn files in use at the same time.
    pub files: usize,
    /// Of each application (two per client).
    pub operations: u64,
    pub faults: Vec<FaultKind>,
    /// Keep the trace as text.
    pub log: bool,
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
            faults: FaultKind::survivable(),
            log: false,
        }
    }
}

/// What a run that kept every promise did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    pub trace_hash: u64,
    pub operations: u64,
    /// How often each fault came.
    pub faults: BTreeMap<&'static str, u64>,
    pub simulated: Duration,
}

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Broken {
    pub seed: u64,
    pub what: String,
    /// The end of the trace, if the options keep it.
    pub log: Vec<String>,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\nrepeat with: cargo run -p weir-sim -- --seed {}", self.what, self.seed)
    }
}

/// Runs a cluster under one seed.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Broken>> {
    let config =
        SimConfig { log: options.log, time_max: Duration::from_secs(4 * 3600), ..SimConfig::default() };
    let world = World::new(seed, config);
    let told = catch_unwind(AssertUnwindSafe(|| world.run(play(world.clone(), options.clone()))));
    let (trace_hash, log, ended) = (world.trace_hash(), world.trace_lines(), world.ended());
    drop(world);
    let what = match told {
        Ok(Ok(_)) if !ended() => format!("seed {seed}: a part of a node that ended is still kept by itself"),
        Ok(Ok(outcome)) => return Ok(Outcome { trace_hash, ..outcome }),
        Ok(Err(e)) => format!("seed {seed}: {e:?}"),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
        }
    };
    Err(Box::new(Broken { seed, what, log }))
}

async fn play(world: World, options: Options) -> Result<Outcome, Error> {
    let cluster = Arc::new(Cluster::start_all(&world, &options).await?);
    let mut clients = Vec::new();
    for me in 0..options.clients {
        clients.push(cluster.client(&format!("c{me}")).await?);
    }
    let work = Arc::new(Workload::prepare(&world, &clients[0], options.clients, options.files).await?);
    let faults = Arc::new(Faults::new(cluster.clone(), world.clone(), options.clone()));
    let harness = world.node(cluster::HARNESS);
    let (tell_healed, healed) = tokio::sync::oneshot::channel();
    let running = faults.clone();
    harness.tasks.spawn("faults", async move {
        running.run().await;
        let _ = tell_healed.send(());
    });
    use_everything(&world, &options, &work, &clients).await;
    faults.stop();
    healed.await.map_err(|_| Error::unavailable("the faults ended early"))?;

    work.close_all(&clients).await;
    let errors = work.errors();
    assert!(
        errors.is_empty(),
        "{} operations failed though enough was alive:\n{}",
        errors.len(),
        errors.join("\n")
    );
    for client in &clients {
        client.shutdown().await.map_err(|e| e.doing("shut a client down"))?;
    }
    verify_from_all_sides(&world, &cluster, &work, &options).await?;
    let simulated = Duration::from_nanos(world.now().0);
    Ok(Outcome { trace_hash: 0, operations: work.operations(), faults: faults.counts(), simulated })
}

/// Every application of every client, to its end.
async fn use_everything(
    world: &World,
    options: &Options,
    work: &Arc<Workload>,
    clients: &[weir_client::Client],
) {
    let harness = world.node(cluster::HARNESS);
    let (done, mut all_done) = tokio::sync::mpsc::channel::<()>(1);
    for (me, client) in clients.iter().enumerate() {
        for app in 0..2 {
            let (work, client, done) = (work.clone(), client.clone(), done.clone());
            let rng = world.rng(&format!("client {me}, application {app}"));
            let operations = options.operations;
            harness.tasks.spawn("application", async move {
                work.use_turn_files(client, me, rng, operations).await;
                drop(done);
            });
        }
        let (work, client, done) = (work.clone(), client.clone(), done.clone());
        let rng = world.rng(&format!("client {me}, shared files"));
        let (count, operations) = (options.clients, options.operations);
        harness.tasks.spawn("application", async move {
            work.use_shared_files(client, me, count, rng, operations).await;
            drop(done);
        });
    }
    drop(done);
    let ended = all_done.recv().await; // none sends: this ends when the last has dropped its end
    assert!(ended.is_none());
}

/// By a client without caches; after a power cut of everything; with any m targets gone.
async fn verify_from_all_sides(
    world: &World,
    cluster: &Cluster,
    work: &Workload,
    options: &Options,
) -> Result<(), Error> {
    verify(cluster, work, "after everything healed").await?;
    cluster.power_cut_all();
    world.sleep(Duration::from_secs(1)).await;
    cluster.restart_all();
    cluster
        .wait_whole(Duration::from_secs(180))
        .await
        .map_err(|e| e.doing("wait after a power cut of everything"))?;
    verify(cluster, work, "after a power cut of everything").await?;
    let rng = world.rng("losses at the end");
    let first = rng.below(options.storage_nodes as u64) as usize;
    for n in 0..usize::from(options.scheme.parity) {
        let name = cluster::storage_name((first + n * 2 + n % 2) % options.storage_nodes);
        // Flipped bits are losses already.
        if !options.faults.contains(&FaultKind::FlipBits) || n > 0 {
            world.kill(&name);
        }
    }
    verify(cluster, work, "with targets lost").await
}

async fn verify(cluster: &Cluster, work: &Workload, when: &str) -> Result<(), Error> {
    let reader = cluster.client("reader").await.map_err(|e| e.doing(when))?;
    work.verify(&reader, when).await.map_err(|e| e.doing(when))?;
    reader.shutdown().await.map_err(|e| e.doing(when))
}
