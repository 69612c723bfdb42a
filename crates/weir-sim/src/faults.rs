//! Injects faults, never more at a time than the cluster promises to survive.
//!
//! A round: choose one or two faults, apply them, wait, undo them, wait until the cluster has repaired
//! itself. So each error that a client gets is a bug, unless the client itself was cut off.

use crate::client_states::LEAVES;
use crate::cluster::{Cluster, HARNESS, META, is_meta, storage_name};
use crate::coordinators::{is_coordinator, start_ended};
use crate::kinds::{FaultKind, FaultKind::*, Toll};
use crate::oracles::work::Ledger;
use crate::workload::Workload;
use crate::{Options, attend};
use choice::{FAULT_MS_MAX, FULL_FROM_START};
use disks::empty_target;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_coord::etcd::sim::Weather;
use weir_env::sim::{DiskCopy, DiskFaults, World};
use weir_env::{Instant, Rng};
use weir_proto::TargetId;

mod choice;
mod disks;
mod load;

/// Simulated time in which redundancy must be back after the last fault of a round ended.
const REPAIR_PATIENCE: Duration = Duration::from_secs(180);
/// Patience for the places of a lost target: each waits for its turn, and for other faults to end.
const REPLACE_PATIENCE: Duration = Duration::from_secs(400);
/// Patience for the places of a drained target, two at a time.
const DRAIN_PATIENCE: Duration = Duration::from_secs(400);
/// Logs agree after this time, once all members are current.
const LOGS_COMPARED: Duration = Duration::from_secs(2);
/// Longest pause of [`Faults::round`] before and after the fault itself.
const BETWEEN_MS_MAX: u64 = 500;
/// A client that is stalled for no longer than this must lose nothing: half a lease, see `Settings`.
const FORGIVEN: Duration = Duration::from_millis(2_500);
/// A leader whose journal failed has ended by then.
const JOURNAL_VERDICT: Duration = Duration::from_secs(1);
/// A leader that starts serves no client until its former clients are back, at most for a lease term: see
/// `Settings`. Operations that need a lease of a client that died after that wait for [`LEAVES`].
const LEADER_GRACE: Duration = Duration::from_millis(5_500);
/// Time until another copy leads: the leader's tolerated silence, and its promised term.
const FAILOVER: Duration = Duration::from_millis(5_000);
/// A leader may die again before it serves, and two such deaths are within an operation's patience. More of
/// them are more than the cluster promises to survive (section 8 of the promises): the next round waits until
/// it serves.
const EARLY_DEATHS_MAX: u32 = 2;
/// Longest time in which a leader answers before its disk has taken anything, until it dies.
const UNFLUSHED_MAX: Duration = Duration::from_millis(500);
const MILLION: u32 = 1_000_000;
const DISK_BYTES: u64 = 16 << 30;
/// Enough for a target's index, not for the first step of a slab.
const FULL_DISK_BYTES: u64 = 10 << 20;

/// Settings before the first server starts.
pub fn prepare(world: &World, options: &Options) {
    if options.faults.first() == Some(&DiskFull) && !options.mute.contains(&0) {
        world.set_disk_capacity(FULL_FROM_START, FULL_DISK_BYTES);
    }
}

/// Injects faults until it is stopped.
pub struct Faults {
    cluster: Arc<Cluster>,
    work: Arc<Workload>,
    world: World,
    rng: Rng,
    options: Options,
    stop: AtomicBool,
    /// Number of faults chosen so far.
    chosen: Arc<AtomicU64>,
    ledger: Arc<Ledger>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    counts: BTreeMap<&'static str, u64>,
    /// How often faults of disks, and load, took effect.
    hits: BTreeMap<&'static str, u64>,
    /// Storage nodes that lost bytes for the rest of the run.
    spent: BTreeSet<String>,
    /// Copies of disks that will be restored.
    copies: BTreeMap<String, DiskCopy>,
    /// Targets that are lost for good and whose places are not yet taken over.
    gone: BTreeSet<TargetId>,
    /// Storage nodes whose targets are drained.
    drained: BTreeSet<String>,
    /// The nodes that join later have joined.
    all_joined: bool,
    /// When the leader last started, whether it was serving at the last event that may have ended it, and how
    /// often in a row it was not.
    leader_began: Instant,
    leader_answered: bool,
    early_deaths: u32,
}

/// One fault and its victims.
#[derive(Debug)]
struct Fault {
    kind: FaultKind,
    victims: Vec<String>,
    others: Vec<String>,
    lasts: Duration,
    /// Its earlier effect, when it began: see [`Faults::hits`].
    hits_before: AtomicU64,
}

impl Fault {
    fn victim(&self) -> &str {
        &self.victims[0]
    }
    /// Each victim with each of the others.
    fn pairs(&self) -> impl Iterator<Item = (&String, &String)> {
        self.victims.iter().flat_map(|near| self.others.iter().map(move |far| (near, far)))
    }
    fn takes(&self) -> impl Iterator<Item = &String> {
        self.victims.iter().filter(|v| self.kind.toll() != Toll::None && v.starts_with('s'))
    }
    /// More members are gone at a time than parity allows.
    fn is_beyond_parity(&self) -> bool {
        matches!(self.kind, PowerCutAllStorage | KillTooMany)
    }
    /// It may be longer than half a lease.
    fn is_long(&self) -> bool {
        self.lasts + Duration::from_millis(2 * BETWEEN_MS_MAX) > FORGIVEN
    }
    /// Clients that are cut off from the leader, or from targets, so long that they may lose their leases.
    fn cuts(&self) -> Vec<usize> {
        let long = self.is_long();
        let names = match self.kind {
            KillClient | SplitMetaWithClients | CrashLeaderAndAuthor => self.victims.clone(),
            KillTooMany => self.others.clone(),
            PauseClient | PartitionFromMeta if long => self.victims.clone(),
            PartitionPartly if long && self.others.iter().any(|o| is_meta(o)) => self.victims.clone(),
            _ => Vec::new(),
        };
        names.iter().filter_map(|name| name.strip_prefix('c')?.parse().ok()).collect()
    }
}

impl Faults {
    pub fn new(
        cluster: Arc<Cluster>,
        work: Arc<Workload>,
        world: World,
        options: Options,
        chosen: Arc<AtomicU64>,
        ledger: Arc<Ledger>,
    ) -> Faults {
        let (rng, stop) = (world.rng("faults"), AtomicBool::new(false));
        Faults { cluster, work, world, rng, options, stop, chosen, ledger, state: Mutex::default() }
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.state().counts.clone()
    }
    pub fn all_hits(&self) -> BTreeMap<&'static str, u64> {
        self.state().hits.clone()
    }
    /// Storage nodes that lost bytes for the rest of the run.
    pub fn spent(&self) -> BTreeSet<String> {
        self.state().spent.clone()
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn run(self: Arc<Self>) {
        if self.options.servers.coordinators > 1 {
            let (cluster, shared) = (self.cluster.clone(), self.cluster.coordinators().clone());
            let started = start_ended(self.world.clone(), shared, move |name| cluster.start(name));
            self.world.node(HARNESS).tasks.spawn("units", started);
        }
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
        let lasts = Duration::from_micros(self.rng.below(FAULT_MS_MAX * 1000));
        for _ in 0..1 + self.rng.below(2) {
            let fault = self.choose(lasts);
            if self.allowed(&fault, &under_way) && !self.is_muted() {
                if !fault.kind.loses_nothing() {
                    self.ledger.calm_ends(self.work.asked());
                }
                self.begin(&fault);
                under_way.push(fault);
            }
            self.pause(BETWEEN_MS_MAX).await;
        }
        // Starving lasts longer than an operation's patience; the other faults end within it.
        let (load, mut under_way): (Vec<Fault>, Vec<Fault>) =
            under_way.into_iter().partition(|f| f.kind.is_load());
        let longest = |faults: &[Fault]| faults.iter().map(|f| f.lasts).fold(lasts, Duration::max);
        let first = longest(&under_way);
        self.world.sleep(first).await;
        self.end_all(&under_way).await;
        if !load.is_empty() {
            self.world.sleep(longest(&load).saturating_sub(first)).await;
            self.end_all(&load).await;
            under_way.extend(load);
        }
        // Places of lost and drained targets need others to go to.
        if !self.state().drained.is_empty() || !self.state().gone.is_empty() {
            self.add_nodes();
        }
        self.end_drains().await;
        let gone = std::mem::take(&mut self.state().gone);
        if let Err(e) = self.cluster.wait_replaced(&gone, REPLACE_PATIENCE).await {
            panic!("{gone:?} are not replaced {REPLACE_PATIENCE:?} after {under_way:?}: {e}");
        }
        if let Err(e) = self.cluster.wait_whole(REPAIR_PATIENCE).await {
            panic!("redundancy is not back {REPAIR_PATIENCE:?} after {under_way:?}: {e}");
        }
        if self.work.context.client_states.is_broken() {
            self.world.sleep(LOGS_COMPARED).await;
            self.work.context.client_states.set_broken(false);
        }
        if self.state().early_deaths >= EARLY_DEATHS_MAX {
            let answers_at = self.leader_answers_at();
            self.world.sleep(answers_at.since(self.world.now())).await;
            self.state().early_deaths = 0;
        }
        self.ledger.calm_begins(self.work.asked());
    }

    async fn end_all(&self, faults: &[Fault]) {
        for fault in faults {
            self.end(fault).await;
            self.pause(BETWEEN_MS_MAX / 2).await;
        }
    }

    fn start(&self, name: &str) {
        if name == META && self.options.servers.copies == 1 && !self.world.is_up(META) {
            self.leader_begins();
        }
        self.cluster.start(name);
    }

    /// When the leader serves all clients again, if no other client dies until then.
    fn leader_answers_at(&self) -> Instant {
        let (began, gone) = (self.state().leader_began, self.cluster.holder_gone());
        // Clients that went before it began are forgotten with its grace period.
        let grace = LEADER_GRACE + if self.options.servers.copies > 1 { FAILOVER } else { Duration::ZERO };
        if gone > began { (began + grace).max(gone + LEAVES) } else { began + grace }
    }

    fn leader_begins(&self) {
        let (now, mut state) = (self.world.now(), self.state());
        state.early_deaths = if state.leader_answered { 1 } else { state.early_deaths + 1 };
        state.leader_began = now;
    }

    /// Starts the nodes that join later, once.
    fn add_nodes(&self) {
        if std::mem::replace(&mut self.state().all_joined, true) {
            return;
        }
        (self.first_nodes()..self.options.storage_nodes).for_each(|n| self.start(&storage_name(n)));
    }

    fn begin(&self, fault: &Fault) {
        *self.state().counts.entry(fault.kind.name()).or_default() += 1;
        tracing::trace!("{:?} fault {fault:?}", self.world.now());
        self.world.trace(&format!("fault {fault:?}"));
        if matches!(fault.kind.toll(), Toll::Silent | Toll::Lasting) {
            self.state().spent.extend(fault.takes().cloned());
        }
        for me in fault.cuts() {
            self.work.context.client_states.cut(me);
            self.cluster.holder_goes();
        }
        self.work.context.marks.fault_begins(fault.kind);
        fault.hits_before.store(self.hits(fault), Ordering::Relaxed);
        if !fault.kind.is_load() && fault.victims.iter().any(|v| is_meta(v)) {
            let answered = self.world.now() > self.leader_answers_at();
            self.state().leader_answered = answered;
            if self.options.servers.copies > 1 {
                self.leader_begins(); // another one, if it was the leader
            }
        }
        self.apply(fault);
    }

    fn apply(&self, fault: &Fault) {
        let (world, victim) = (&self.world, fault.victim());
        // Always drawn: otherwise seeds would change their meaning.
        let often = MILLION / 1000 * (20 + self.rng.below(100) as u32);
        match fault.kind {
            KillStorage | KillMeta => world.kill(victim),
            MovedAddress => {
                if is_coordinator(victim) {
                    self.cluster.coordinators().hold_down(victim);
                }
                world.kill(victim);
                self.cluster.move_away(victim);
            }
            KillTooMany => {
                self.work.context.client_states.set_broken(true);
                fault.victims.iter().for_each(|v| world.kill(v));
            }
            KillStorageAtPoint => self.kill_at_some(victim, &weir_store::crash_points::ALL),
            KillMetaAtPoint => self.kill_at_some(victim, &weir_meta::crash_points::ALL),
            PowerCutStorage | PowerCutAllStorage | PowerCutMeta | LoseHost => {
                fault.victims.iter().for_each(|v| world.power_cut(v));
            }
            KillClient => self.kill_client(fault),
            CrashLeaderBeforeFlush | CrashLeaderAndAuthor => self.crash_unflushed(fault),
            PauseClient | PauseStorage | PauseMeta => world.pause(victim),
            PartitionFromClient
            | CutClientFromTarget
            | PartitionFromPeer
            | PartitionFromCoordinator
            | PartitionFromMeta
            | CutMetaFromCopies
            | CutMetaFromCoordinator
            | PartitionPartly => {
                fault.others.iter().for_each(|other| match self.rng.below(3) {
                    0 => world.partition_one_way(victim, other),
                    1 => world.partition_one_way(other, victim),
                    _ => world.partition(victim, other),
                });
            }
            SplitMetaWithClients => {
                fault.pairs().for_each(|(near, far)| world.partition(near, far));
            }
            ResetConnections => world.reset_connections(victim, &fault.others[0]),
            LateRequests => {
                world.lose_connections(&fault.others[0], victim, Duration::from_millis(self.rng.below(3000)));
            }
            SlowLink => {
                world.slow_link(victim, &fault.others[0], Duration::from_millis(self.rng.below(800)));
                world.slow_link(&fault.others[0], victim, Duration::from_millis(self.rng.below(800)));
            }
            ClockJump => self.jump_clock(victim),
            ClockDrift => world.set_clock_drift(victim, self.rng.below(2000) as i64 - 1000),
            SlowDisk | StallDisk | ReadErrors | WriteErrors | SyncErrors | SyncErrorsMeta | LostWrites
            | MisdirectedWrites => self.spoil_disk(fault.kind, victim, often),
            DiskFull | MetaDiskFull => self.fill_disk(fault.kind, victim),
            FlipBits => self.flip_bits(victim),
            ReplaceDisk | EmptyReturns | LoseMetaDisk | LoseTargetForGood | OldCopyReturns => {
                self.take_disk(fault.kind, victim);
            }
            DrainTarget => self.drain(victim),
            AddTargets => self.add_nodes(),
            StarvedNode | Burst => self.begin_load(fault),
            _ => self.trouble_coordinator(fault.kind, victim),
        }
    }

    fn kill_client(&self, fault: &Fault) {
        match self.rng.below(2) {
            0 => self.world.kill(fault.victim()),
            _ => self.world.power_cut(fault.victim()),
        }
        fault.cuts().into_iter().for_each(|me| self.work.context.client_states.died(me));
    }

    /// The leader's disk takes nothing, and soon after the leader dies, alone or together with a client.
    fn crash_unflushed(&self, fault: &Fault) {
        let world = self.world.clone();
        let (meta, authors, names) = (fault.victim().to_owned(), fault.cuts(), fault.victims.clone());
        world.set_disk_faults(&meta, DiskFaults { hangs: true, ..DiskFaults::default() });
        let (work, after) = (self.work.clone(), self.rng.below(UNFLUSHED_MAX.as_micros() as u64));
        self.world.node(HARNESS).tasks.spawn("crash", async move {
            world.sleep(Duration::from_micros(after)).await;
            names.iter().for_each(|name| world.power_cut(name));
            authors.into_iter().for_each(|me| work.context.client_states.died(me));
            world.set_disk_faults(&meta, DiskFaults::default());
        });
    }

    fn trouble_coordinator(&self, kind: FaultKind, victim: &str) {
        let (world, shared) = (&self.world, self.cluster.coordinators());
        match kind {
            KillCoordinator | KillLeadingCoordinator => {
                shared.hold_down(victim);
                world.kill(victim);
            }
            PowerCutCoordinator => {
                shared.hold_down(victim);
                world.power_cut(victim);
            }
            CutCoordinatorFromEtcd => shared.weather(victim).cut = true,
            LostCasAnswer => {
                let (lost_answers, delay_ms) = (10 + self.rng.below(60), self.rng.below(300));
                *shared.weather(victim) = Weather { lost_answers, delay_ms, cut: false };
            }
            TwoCoordinators => world.pause(victim),
            other => unreachable!("{other:?} is no fault of a coordinator"),
        }
    }

    fn restore_coordinator(&self, kind: FaultKind, victim: &str) {
        match kind {
            KillCoordinator | KillLeadingCoordinator | PowerCutCoordinator => self.start(victim),
            CutCoordinatorFromEtcd | LostCasAnswer => {
                *self.cluster.coordinators().weather(victim) = Weather::default();
            }
            TwoCoordinators => self.world.resume(victim),
            other => unreachable!("{other:?} is no fault of a coordinator"),
        }
    }

    fn jump_clock(&self, victim: &str) {
        // A metadata node whose clock is minutes away from the coordinator's does not start.
        let most_ns = match is_meta(victim) || is_coordinator(victim) {
            true => 120 * 1_000_000_000,
            false => 24 * 3600 * 1_000_000_000_u64,
        };
        self.world.set_wall_offset(victim, self.rng.below(2 * most_ns) as i64 - most_ns as i64);
    }

    async fn end(&self, fault: &Fault) {
        tracing::trace!("{:?} end of {fault:?}", self.world.now());
        self.world.trace(&format!("end of {fault:?}"));
        if fault.kind.is_load() {
            self.end_load(fault).await;
            self.count_hits(fault);
        } else {
            self.count_hits(fault);
            self.undo(fault).await;
        }
        for me in fault.cuts() {
            self.work.context.client_states.joined(me);
            if fault.kind.kills_client() {
                attend(&self.world, &self.cluster, &self.work, me);
            }
        }
        self.work.context.marks.fault_ends(fault.kind);
    }

    fn count_hits(&self, fault: &Fault) {
        let hits = self.hits(fault).saturating_sub(fault.hits_before.load(Ordering::Relaxed));
        *self.state().hits.entry(fault.kind.name()).or_default() += hits;
    }

    async fn undo(&self, fault: &Fault) {
        let (world, victim) = (&self.world, fault.victim());
        match fault.kind {
            KillStorage | PowerCutStorage | PowerCutAllStorage | KillMeta | PowerCutMeta | LoseHost
            | ReplaceDisk | KillTooMany | MovedAddress => {
                fault.victims.iter().for_each(|v| self.start(v));
            }
            LoseTargetForGood => self.start(victim),
            DrainTarget => self.state().drained.extend([victim.to_owned()]),
            EmptyReturns => {
                empty_target(&*world.disk(victim))
                    .unwrap_or_else(|e| panic!("empty the target of {victim}: {e}"));
                self.start(victim);
            }
            OldCopyReturns => {
                world.power_cut(victim);
                if let Some(copy) = self.state().copies.remove(victim) {
                    world.put_disk_back(victim, &copy);
                }
                self.start(victim);
            }
            KillStorageAtPoint | KillMetaAtPoint => {
                world.spare(victim);
                self.start(victim);
            }
            LoseMetaDisk => self.abandon_copy(victim).await,
            KillClient => {}
            CrashLeaderBeforeFlush | CrashLeaderAndAuthor => self.start(victim),
            PauseClient | PauseStorage => world.resume(victim),
            PauseMeta => {
                // Clients that were silent before may be so for a whole term from now on, if the leader
                // noticed.
                if fault.is_long() {
                    self.leader_begins();
                }
                world.resume(victim);
            }
            PartitionFromClient
            | CutClientFromTarget
            | PartitionFromPeer
            | PartitionFromCoordinator
            | PartitionFromMeta
            | CutMetaFromCopies
            | CutMetaFromCoordinator
            | PartitionPartly => fault.others.iter().for_each(|other| world.heal(victim, other)),
            SplitMetaWithClients => fault.pairs().for_each(|(near, far)| world.heal(near, far)),
            SlowLink => {
                world.slow_link(victim, &fault.others[0], Duration::ZERO);
                world.slow_link(&fault.others[0], victim, Duration::ZERO);
            }
            ClockDrift => world.set_clock_drift(victim, 0),
            SlowDisk | StallDisk | ReadErrors | LostWrites | MisdirectedWrites => {
                world.set_disk_faults(victim, DiskFaults::default());
            }
            WriteErrors | SyncErrors => self.check_disk(victim).await,
            SyncErrorsMeta => {
                world.set_disk_faults(victim, DiskFaults::default());
                world.sleep(JOURNAL_VERDICT).await;
                self.start(victim); // if its journal failed, it ended
            }
            DiskFull | MetaDiskFull => self.enlarge_disk(fault.kind, victim),
            // Its effect stays.
            ClockJump | ResetConnections | LateRequests | FlipBits | AddTargets => {}
            kind => self.restore_coordinator(kind, victim),
        }
    }

    async fn abandon_copy(&self, victim: &str) {
        // The coordinators' own faults may end after this one.
        self.cluster.coordinators().names().iter().for_each(|name| self.start(name));
        let abandoned = self.cluster.set_copies(Some(victim)).await;
        abandoned.unwrap_or_else(|e| panic!("give up the copy of {victim}: {e}"));
        self.start(victim);
    }

    /// Waits until all places have moved, or at times cancels the drain at a random point.
    async fn end_drains(&self) {
        let drained = std::mem::take(&mut self.state().drained);
        for name in drained {
            if self.rng.below(3) > 0 {
                let drained = self.cluster.wait_drained(&name, DRAIN_PATIENCE).await;
                drained.unwrap_or_else(|e| panic!("drain {name}: {e}"));
            }
            let kept = self.cluster.stays(&name, DRAIN_PATIENCE).await;
            kept.unwrap_or_else(|e| panic!("end the drain of {name}: {e}"));
        }
    }

    /// Requests the drain; the coordinator may be down.
    fn drain(&self, victim: &str) {
        let (cluster, name) = (self.cluster.clone(), victim.to_owned());
        self.world.node(HARNESS).tasks.spawn("drain", async move {
            cluster.drain(&name).await.unwrap_or_else(|e| panic!("drain {name}: {e}"));
        });
    }

    /// It dies when it next reaches one of these points, or one of its index or journal, or soon after that.
    fn kill_at_some(&self, victim: &str, points: &[&'static str]) {
        let all: Vec<&'static str> = points.iter().copied().chain(weir_kv::crash_points::ALL).collect();
        let point = all[self.rng.below(all.len() as u64) as usize];
        self.world.kill_at(victim, point, 1 + self.rng.below(20) as u32);
    }
}
