//! What goes wrong, and when. Never more at once than the cluster promises to survive.
//!
//! A round: choose one or two faults, apply them, wait, undo them, wait until the cluster has repaired itself. So each
//! error that a client sees is one that it should not have seen.

use crate::cluster::{COORDINATOR, Cluster, META, storage_name};
use crate::{FaultKind, Options};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use weir_env::{
    Disk, Rng,
    sim::{DiskFaults, World},
};

/// Simulated time in which redundancy must be back after the last fault of a round ended.
const REPAIR_PATIENCE: Duration = Duration::from_secs(180);
/// Well within a client's patience of 30 s, with what recovery takes.
const FAULT_MS_MAX: u64 = 6_000;

/// Injects faults until told to stop.
pub struct Faults {
    cluster: Arc<Cluster>,
    world: World,
    rng: Rng,
    options: Options,
    stop: AtomicBool,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

/// One fault and whom it hits.
#[derive(Clone, Debug)]
struct Fault {
    kind: FaultKind,
    victim: String,
    other: String,
}

impl Faults {
    pub fn new(cluster: Arc<Cluster>, world: World, options: Options) -> Faults {
        let rng = world.rng("faults");
        Faults { cluster, world, rng, options, stop: AtomicBool::new(false), counts: Mutex::default() }
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub async fn run(self: Arc<Self>) {
        while !self.stop.load(Ordering::Relaxed) && !self.options.faults.is_empty() {
            self.pause(3000).await;
            self.round().await;
        }
    }

    async fn pause(&self, ms_max: u64) {
        self.world.sleep(Duration::from_micros(self.rng.below(ms_max * 1000))).await;
    }

    async fn round(&self) {
        let mut under_way: Vec<Fault> = Vec::new();
        for _ in 0..1 + self.rng.below(2) {
            let fault = self.choose();
            if self.allowed(&fault, &under_way) {
                self.begin(&fault);
                under_way.push(fault);
            }
            self.pause(500).await;
        }
        self.pause(FAULT_MS_MAX).await;
        for fault in &under_way {
            self.end(fault);
            self.pause(300).await;
        }
        if let Err(e) = self.cluster.wait_whole(REPAIR_PATIENCE).await {
            panic!("redundancy is not back {REPAIR_PATIENCE:?} after {under_way:?}: {e}");
        }
    }

    fn choose(&self) -> Fault {
        let kind = self.options.faults[self.rng.below(self.options.faults.len() as u64) as usize];
        let storage = |n: u64| storage_name(n as usize);
        let some = self.rng.below(self.options.storage_nodes as u64);
        let client = format!("c{}", self.rng.below(self.options.clients as u64));
        let (victim, other) = match kind {
            FaultKind::KillMeta | FaultKind::PowerCutMeta => (META.into(), String::new()),
            FaultKind::KillCoordinator => (COORDINATOR.into(), String::new()),
            FaultKind::PowerCutAllStorage => ("all".into(), String::new()),
            FaultKind::PartitionFromClient | FaultKind::ResetConnections => (storage(some), client),
            FaultKind::SlowLink if self.rng.below(2) == 0 => (META.into(), client),
            FaultKind::SlowLink => (storage(some), client),
            FaultKind::PartitionFromCoordinator => (storage(some), COORDINATOR.into()),
            // All flips on one node: they stay until something reads them.
            FaultKind::FlipBits => (storage(0), String::new()),
            FaultKind::PartitionFromPeer => {
                let other = (some + 1 + self.rng.below(self.options.storage_nodes as u64 - 1))
                    % self.options.storage_nodes as u64;
                (storage(some), storage(other))
            }
            FaultKind::KillStorage | FaultKind::PowerCutStorage | FaultKind::SlowDisk => {
                (storage(some), String::new())
            }
        };
        Fault { kind, victim, other }
    }

    /// Storage nodes that cannot be used at the same moment stay within the parity.
    fn allowed(&self, fault: &Fault, under_way: &[Fault]) -> bool {
        let mut lost: Vec<&str> = Vec::new();
        for f in under_way.iter().chain([fault]) {
            if f.kind.takes_storage() && !lost.contains(&f.victim.as_str()) {
                lost.push(&f.victim);
            }
        }
        // Damaged blocks are as good as lost, and stay after their round.
        let flips = self.options.faults.contains(&FaultKind::FlipBits);
        let budget = usize::from(self.options.scheme.parity) - usize::from(flips);
        let all = under_way.iter().chain([fault]).any(|f| f.kind == FaultKind::PowerCutAllStorage);
        let twice = under_way.iter().any(|f| f.victim == fault.victim);
        !twice && (lost.len() <= budget || (all && lost.len() == 1)) && (!all || under_way.is_empty())
    }

    fn begin(&self, fault: &Fault) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(fault.kind.name()).or_default() +=
            1;
        self.world.trace(&format!("fault {fault:?}"));
        let (world, victim, other) = (&self.world, fault.victim.as_str(), fault.other.as_str());
        match fault.kind {
            FaultKind::KillStorage | FaultKind::KillMeta | FaultKind::KillCoordinator => world.kill(victim),
            FaultKind::PowerCutStorage | FaultKind::PowerCutMeta => world.power_cut(victim),
            FaultKind::PowerCutAllStorage => {
                (0..self.options.storage_nodes).for_each(|n| world.power_cut(&storage_name(n)))
            }
            FaultKind::PartitionFromClient
            | FaultKind::PartitionFromPeer
            | FaultKind::PartitionFromCoordinator => match self.rng.below(3) {
                0 => world.partition_one_way(victim, other),
                1 => world.partition_one_way(other, victim),
                _ => world.partition(victim, other),
            },
            FaultKind::ResetConnections => world.reset_connections(victim, other),
            FaultKind::SlowLink => {
                world.slow_link(victim, other, Duration::from_millis(self.rng.below(800)));
                world.slow_link(other, victim, Duration::from_millis(self.rng.below(800)));
            }
            FaultKind::SlowDisk => {
                let delay = Duration::from_millis(1 + self.rng.below(500));
                world.set_disk_faults(victim, DiskFaults { delay, ..DiskFaults::default() });
            }
            FaultKind::FlipBits => self.flip_bits(victim),
        }
    }

    fn end(&self, fault: &Fault) {
        self.world.trace(&format!("end of {fault:?}"));
        let (victim, other) = (fault.victim.as_str(), fault.other.as_str());
        match fault.kind {
            FaultKind::KillStorage
            | FaultKind::PowerCutStorage
            | FaultKind::KillMeta
            | FaultKind::PowerCutMeta
            | FaultKind::KillCoordinator => self.cluster.start(victim),
            FaultKind::PowerCutAllStorage => {
                (0..self.options.storage_nodes).for_each(|n| self.cluster.start(&storage_name(n)))
            }
            FaultKind::PartitionFromClient
            | FaultKind::PartitionFromPeer
            | FaultKind::PartitionFromCoordinator => self.world.heal(victim, other),
            FaultKind::SlowLink => {
                self.world.slow_link(victim, other, Duration::ZERO);
                self.world.slow_link(other, victim, Duration::ZERO);
            }
            FaultKind::SlowDisk => self.world.set_disk_faults(victim, DiskFaults::default()),
            FaultKind::ResetConnections | FaultKind::FlipBits => {}
        }
    }

    /// Changes bits in the bulk bytes of a storage node.
    fn flip_bits(&self, victim: &str) {
        let disk = self.world.disk(victim);
        let mut slabs = Vec::new();
        find_slabs(&*disk, Path::new("/"), &mut slabs);
        for _ in 0..1 + self.rng.below(20) {
            let Some((path, len)) = slabs.get(self.rng.below(slabs.len().max(1) as u64) as usize) else {
                return;
            };
            // Most of a preallocated slab is empty: aim at its used beginning.
            let offset = self.rng.below((*len).clamp(1, 4 << 20));
            let _ = self.world.flip_bit(victim, path, offset, self.rng.below(8) as u8); // beyond the end: no flip
        }
    }
}

fn find_slabs(disk: &dyn Disk, dir: &Path, found: &mut Vec<(PathBuf, u64)>) {
    for entry in disk.read_dir(dir).unwrap_or_default() {
        let path = dir.join(&entry.name);
        if entry.is_dir {
            find_slabs(disk, &path, found);
        } else if entry.name.starts_with("slab") {
            let len = disk.open(&path, weir_env::OpenMode::READ).and_then(|f| f.len()).unwrap_or(0);
            found.push((path, len));
        }
    }
}
