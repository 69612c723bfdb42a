//! Injects faults, never more at a time than the cluster promises to survive.
//!
//! A round: choose one or two faults, apply them, wait, undo them, wait until the cluster has repaired
//! itself. So each error that a client gets is a bug, unless the client itself was cut off.

use crate::client_states::{LEAVES, client_name};
use crate::cluster::{Cluster, HARNESS, META, TARGET_DIR, is_meta, meta_name, storage_name};
use crate::coordinators::{is_coordinator, start_ended};
use crate::kinds::{FaultKind, FaultKind::*, Toll};
use crate::workload::Workload;
use crate::{Options, attend};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use weir_coord::etcd::sim::Weather;
use weir_coord::identity::IDENTITY_FILE;
use weir_env::{
    Disk, Instant, Rng,
    sim::{DiskCopy, DiskFaults, World},
};
use weir_proto::TargetId;

/// Simulated time in which redundancy must be back after the last fault of a round ended.
const REPAIR_PATIENCE: Duration = Duration::from_secs(180);
/// Patience for the places of a lost target: each waits for its turn, and for other faults to end.
const REPLACE_PATIENCE: Duration = Duration::from_secs(400);
/// Patience for the places of a drained target, two at a time.
const DRAIN_PATIENCE: Duration = Duration::from_secs(400);
/// Well within a client's patience of 30 s, with what recovery takes.
const FAULT_MS_MAX: u64 = 6_000;
/// Least duration of [`KillTooMany`], and up to half as long again: most of a client's patience.
const TOO_MANY_MS_MIN: u64 = 13_000;
/// Least duration of faults that depose a coordinator: its lease of 3 s.
const DEPOSED_MS_MIN: u64 = 4_000;
/// Least duration of [`StallDisk`], and up to twice that: a target that hangs for 10 s counts as gone.
const STALL_MS_MIN: u64 = 11_000;
/// Least duration of [`CutClientFromTarget`] alone, and up to half as long again: longer than a client's
/// patience. Together with other faults it ends with them.
const CUT_MS_MIN: u64 = 31_000;
/// Logs agree after this time, once all members are current.
const LOGS_COMPARED: Duration = Duration::from_secs(2);
/// Longest pause of [`Faults::round`] before and after the fault itself.
const BETWEEN_MS_MAX: u64 = 500;
/// A client that is stalled for no longer than this must lose nothing: half a lease, see `Settings`.
const FORGIVEN: Duration = Duration::from_millis(2_500);
/// After a failed write or sync, its target must be marked as failed by then.
const VERDICT_PATIENCE: Duration = Duration::from_secs(20);
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
const MILLION: u32 = 1_000_000;
const DISK_BYTES: u64 = 16 << 30;
/// The node whose disk is full until the first fault ends, if that is [`DiskFull`]: later full disks come
/// when it has all the space that a short run needs.
const FULL_FROM_BIRTH: &str = "s1";
/// Enough for a target's index, not for the first step of a slab.
const FULL_DISK_BYTES: u64 = 30 << 20;

/// The two sides are separated for well over a lease term and the time that the next leader waits.
const SPLIT_MS_MIN: u64 = 12_000;

/// Settings before the first server starts.
pub fn prepare(world: &World, options: &Options) {
    if options.faults.first() == Some(&DiskFull) && !options.mute.contains(&0) {
        world.set_disk_capacity(FULL_FROM_BIRTH, FULL_DISK_BYTES);
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
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    counts: BTreeMap<&'static str, u64>,
    /// Disk faults that took effect.
    disk_hits: BTreeMap<&'static str, u64>,
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
    /// Faults of the first victim's disk so far.
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
            KillClient | SplitMetaWithClients => self.victims.clone(),
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
    ) -> Faults {
        let (rng, stop) = (world.rng("faults"), AtomicBool::new(false));
        Faults { cluster, work, world, rng, options, stop, chosen, state: Mutex::default() }
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.state().counts.clone()
    }
    pub fn disk_hits(&self) -> BTreeMap<&'static str, u64> {
        self.state().disk_hits.clone()
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
                self.begin(&fault);
                under_way.push(fault);
            }
            self.pause(BETWEEN_MS_MAX).await;
        }
        self.world.sleep(under_way.iter().map(|f| f.lasts).fold(lasts, Duration::max)).await;
        for fault in &under_way {
            self.end(fault).await;
            self.pause(BETWEEN_MS_MAX / 2).await;
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

    /// Whether the next fault is one that a shrunk run omits.
    fn is_muted(&self) -> bool {
        self.options.mute.contains(&self.chosen.fetch_add(1, Ordering::Relaxed))
    }

    /// Number of storage nodes that a run begins with.
    fn first_nodes(&self) -> usize {
        self.options.storage_nodes - self.options.servers.late
    }
    /// Number of storage nodes that have joined.
    fn nodes(&self) -> usize {
        if self.state().all_joined { self.options.storage_nodes } else { self.first_nodes() }
    }
    /// Starts the nodes that join later, once.
    fn add_nodes(&self) {
        if std::mem::replace(&mut self.state().all_joined, true) {
            return;
        }
        (self.first_nodes()..self.options.storage_nodes).for_each(|n| self.start(&storage_name(n)));
    }
    fn some_storage(&self) -> String {
        storage_name(self.rng.below(self.nodes() as u64) as usize)
    }
    fn metas(&self) -> Vec<String> {
        (0..self.options.servers.copies).map(meta_name).collect()
    }
    /// The servers of one machine.
    fn some_host(&self) -> Vec<String> {
        let host = self.rng.below(self.options.hosts as u64) as usize;
        let on_host = (host..self.nodes()).step_by(self.options.hosts);
        let metas = (host..self.options.servers.copies).step_by(self.options.hosts).map(meta_name);
        on_host.map(storage_name).chain(metas).collect()
    }
    fn some_meta(&self) -> String {
        match self.options.servers.copies {
            1 => META.to_owned(),
            _ => self.one_of(&self.metas()),
        }
    }
    /// The coordinator, or the leading one of several.
    fn coordinator(&self) -> String {
        self.cluster.coordinators().leader()
    }
    fn some_client(&self) -> String {
        client_name(self.rng.below(self.options.clients as u64) as usize)
    }
    fn one_of(&self, choices: &[String]) -> String {
        choices[self.rng.below(choices.len() as u64) as usize].clone()
    }
    /// One of the first nodes for silent damage, one of the last for lasting damage: as many as may be lost
    /// if there is no other damage in this run.
    fn some_spent(&self, toll: Toll) -> usize {
        let only = self.options.faults.iter().all(|k| k.toll() == toll);
        let n = self.rng.below(u64::from(self.options.scheme.parity)) as usize;
        if only { n } else { 0 }
    }

    fn choose(&self, lasts: Duration) -> Fault {
        let first = self.chosen.load(Ordering::Relaxed) == 0;
        let some = self.rng.below(self.options.faults.len() as u64) as usize;
        let kind = self.options.faults[if first { 0 } else { some }];
        let (victims, others) = self.some_victims(kind, first);
        let lasts = match kind {
            KillTooMany => Duration::from_millis(TOO_MANY_MS_MIN + self.rng.below(TOO_MANY_MS_MIN / 2)),
            SplitMetaWithClients => Duration::from_millis(SPLIT_MS_MIN + self.rng.below(SPLIT_MS_MIN)),
            // Longer than the lease of the lead: another one takes over.
            TwoCoordinators | CutCoordinatorFromEtcd => lasts.max(Duration::from_millis(DEPOSED_MS_MIN)),
            StallDisk => Duration::from_millis(STALL_MS_MIN + self.rng.below(STALL_MS_MIN)),
            CutClientFromTarget if self.options.faults == [CutClientFromTarget] => {
                Duration::from_millis(CUT_MS_MIN + self.rng.below(CUT_MS_MIN / 2))
            }
            _ => lasts,
        };
        Fault { kind, victims, others, lasts, hits_before: AtomicU64::new(0) }
    }

    /// Nodes that a fault hits, and the other ends of the links that it cuts.
    fn some_victims(&self, kind: FaultKind, first: bool) -> (Vec<String>, Vec<String>) {
        let all: Vec<String> = (0..self.nodes()).map(storage_name).collect();
        match kind {
            KillMeta | PowerCutMeta | PauseMeta | SyncErrorsMeta | KillMetaAtPoint | LoseMetaDisk => {
                (vec![self.some_meta()], vec![])
            }
            PowerCutAllStorage => (all, vec![]),
            KillTooMany => {
                let gone = usize::from(self.options.scheme.parity) + 1 + self.rng.below(2) as usize;
                let first = self.rng.below(all.len() as u64) as usize;
                let victims = all.iter().cycle().skip(first).take(gone.min(all.len())).cloned().collect();
                (victims, (0..self.options.clients).map(client_name).collect())
            }
            LoseHost => (self.some_host(), vec![]),
            KillClient | PauseClient => (vec![self.some_client()], vec![]),
            PartitionFromMeta => (vec![self.some_client()], vec![self.some_meta()]),
            PartitionFromClient | CutClientFromTarget => {
                (vec![self.some_storage()], vec![self.some_client()])
            }
            ResetConnections | LateRequests | SlowLink => {
                let server = if self.rng.below(3) == 0 { self.some_meta() } else { self.some_storage() };
                (vec![server], vec![self.some_client()])
            }
            PartitionFromCoordinator => (vec![self.some_storage()], vec![self.coordinator()]),
            CutMetaFromCoordinator => (vec![self.some_meta()], vec![self.coordinator()]),
            CutMetaFromCopies => {
                let one = self.some_meta();
                let others = self.metas().into_iter().filter(|n| *n != one).collect();
                (vec![one], others)
            }
            SplitMetaWithClients => self.two_sides(),
            PartitionFromPeer => {
                let one = self.some_storage();
                let peers: Vec<String> = all.into_iter().filter(|n| *n != one).collect();
                let other = self.one_of(&peers);
                (vec![one], vec![other])
            }
            PartitionPartly => {
                let one = if self.rng.below(3) == 0 { self.some_client() } else { self.some_storage() };
                let roles = self.metas().into_iter().chain(self.cluster.coordinators().names());
                let rest = all.into_iter().chain(roles).filter(|n| *n != one);
                let others = rest.filter(|_| self.rng.below(2) == 0).collect();
                (vec![one], others)
            }
            ClockJump | ClockDrift | MovedAddress => {
                let mut everybody = all;
                everybody.extend([self.some_meta(), self.coordinator()]);
                everybody.extend((kind != MovedAddress).then(|| self.some_client()));
                (vec![self.one_of(&everybody)], vec![])
            }
            AddTargets => {
                ((self.first_nodes()..self.options.storage_nodes).map(storage_name).collect(), vec![])
            }
            FlipBits | LostWrites | MisdirectedWrites => {
                (vec![storage_name(self.some_spent(Toll::Silent))], vec![])
            }
            WriteErrors | SyncErrors | ReplaceDisk => {
                let n = self.first_nodes() - 1 - self.some_spent(Toll::Lasting);
                (vec![storage_name(n)], vec![])
            }
            DiskFull if first => (vec![FULL_FROM_BIRTH.into()], vec![]),
            KillStorage | KillStorageAtPoint | PowerCutStorage | PauseStorage | SlowDisk | StallDisk
            | ReadErrors | DiskFull | EmptyReturns | OldCopyReturns | LoseTargetForGood | DrainTarget => {
                (vec![self.some_storage()], vec![])
            }
            _ => (vec![self.coordinator()], vec![]),
        }
    }

    /// A metadata node with some clients, and the coordinator with all others. Targets can reach both sides.
    fn two_sides(&self) -> (Vec<String>, Vec<String>) {
        let one = self.some_meta();
        let mut others: Vec<String> = self.metas().into_iter().filter(|n| *n != one).collect();
        others.extend(self.cluster.coordinators().names());
        let clients = (0..self.options.clients).map(client_name);
        let (near, far): (Vec<_>, Vec<_>) = clients.partition(|_| self.rng.below(2) == 0);
        others.extend(far);
        ([one].into_iter().chain(near).collect(), others)
    }

    /// Storage nodes that are unusable at the same time must stay within the parity.
    fn allowed(&self, fault: &Fault, under_way: &[Fault]) -> bool {
        let spent = self.spent();
        if fault.kind.toll() == Toll::Lasting && spent.contains(fault.victim()) {
            return false;
        }
        if under_way.iter().any(Fault::is_beyond_parity)
            || (fault.is_beyond_parity() && !under_way.is_empty())
        {
            return false;
        }
        let twice = under_way.iter().any(|f| f.victims.iter().any(|v| fault.victims.contains(v)));
        // One copy of the metadata may be down.
        let of_meta = |f: &Fault| f.victims.iter().chain(&f.others).any(|v| is_meta(v));
        let twice =
            twice || self.options.servers.copies > 1 && of_meta(fault) && under_way.iter().any(of_meta);
        // A node that comes back with another disk while no coordinator leads: see docs/verification.md.
        let pair =
            |one: &Fault, other: &Fault| one.kind == LoseTargetForGood && other.kind.needs_coordinators();
        let twice = twice || under_way.iter().any(|f| pair(f, fault) || pair(fault, f));
        let mut lost = spent;
        for f in under_way.iter().chain([fault]).filter(|f| !f.is_beyond_parity()) {
            lost.extend(f.takes().cloned());
        }
        !twice && lost.len() <= usize::from(self.options.scheme.parity)
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
        fault.hits_before.store(self.world.disk_hits(fault.victim()), Ordering::Relaxed);
        if fault.victims.iter().any(|v| is_meta(v)) {
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
            KillClient => {
                if self.rng.below(2) == 0 {
                    world.kill(victim)
                } else {
                    world.power_cut(victim)
                }
                fault.cuts().into_iter().for_each(|me| self.work.context.client_states.died(me));
            }
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
            DiskFull => {
                self.work.context.client_states.no_space();
                let space = world.disk(victim).space(Path::new("/")).expect("a simulated disk has a root");
                world.set_disk_capacity(victim, space.total - space.free + self.rng.below(1 << 20));
            }
            FlipBits => self.flip_bits(victim),
            ReplaceDisk | EmptyReturns | LoseMetaDisk | LoseTargetForGood | OldCopyReturns => {
                self.take_disk(fault.kind, victim);
            }
            DrainTarget => self.drain(victim),
            AddTargets => self.add_nodes(),
            _ => self.trouble_coordinator(fault.kind, victim),
        }
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

    /// A disk that is slow or returns errors. `often`: errors per million.
    fn spoil_disk(&self, kind: FaultKind, victim: &str, often: u32) {
        let plain = DiskFaults::default();
        let faults = match kind {
            SlowDisk => DiskFaults { delay: Duration::from_millis(1 + self.rng.below(500)), ..plain },
            StallDisk => DiskFaults { hangs: true, ..plain },
            ReadErrors => DiskFaults { read_errors_per_million: 8 * often, ..plain },
            WriteErrors => DiskFaults { write_errors_per_million: often, ..plain },
            SyncErrors | SyncErrorsMeta => {
                self.cluster.may_end(victim);
                DiskFaults { sync_errors_per_million: often, ..plain }
            }
            LostWrites => DiskFaults { lost_writes_per_million: often, silent_in: "slab", ..plain },
            MisdirectedWrites => {
                DiskFaults { misdirected_writes_per_million: often, silent_in: "slab", ..plain }
            }
            other => unreachable!("{other:?} leaves the answers of disks as they are"),
        };
        self.world.set_disk_faults(victim, faults);
    }

    /// A disk that is lost, or returns in an older state.
    fn take_disk(&self, kind: FaultKind, victim: &str) {
        let world = &self.world;
        match kind {
            ReplaceDisk => drop(self.cluster.excuse(victim)),
            LoseTargetForGood => {
                let lost = self.cluster.excuse(victim);
                self.state().gone.extend(lost);
            }
            _ => {}
        }
        world.power_cut(victim);
        match kind {
            ReplaceDisk | LoseMetaDisk | LoseTargetForGood => world.replace_disk(victim),
            OldCopyReturns => {
                let copy = world.copy_disk(victim);
                self.state().copies.insert(victim.to_owned(), copy);
                self.start(victim);
            }
            _ => {}
        }
    }

    async fn end(&self, fault: &Fault) {
        tracing::trace!("{:?} end of {fault:?}", self.world.now());
        self.world.trace(&format!("end of {fault:?}"));
        let hits =
            self.world.disk_hits(fault.victim()).saturating_sub(fault.hits_before.load(Ordering::Relaxed));
        *self.state().disk_hits.entry(fault.kind.name()).or_default() += hits;
        self.undo(fault).await;
        for me in fault.cuts() {
            self.work.context.client_states.joined(me);
            if fault.kind == KillClient {
                attend(&self.world, &self.cluster, &self.work, me);
            }
        }
        self.work.context.marks.fault_ends(fault.kind);
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
            LoseMetaDisk => self.give_up_copy(victim).await,
            KillClient => {}
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
            WriteErrors | SyncErrors => self.judge_disk(victim).await,
            SyncErrorsMeta => {
                world.set_disk_faults(victim, DiskFaults::default());
                world.sleep(JOURNAL_VERDICT).await;
                self.start(victim); // if its journal failed, it ended
            }
            DiskFull => {
                self.work.context.client_states.no_space();
                world.set_disk_capacity(victim, DISK_BYTES);
            }
            // Its effect stays.
            ClockJump | ResetConnections | LateRequests | FlipBits | AddTargets => {}
            kind => self.restore_coordinator(kind, victim),
        }
    }

    async fn give_up_copy(&self, victim: &str) {
        // The coordinators' own faults may end after this one.
        self.cluster.coordinators().names().iter().for_each(|name| self.start(name));
        let given_up = self.cluster.set_copies(Some(victim)).await;
        given_up.unwrap_or_else(|e| panic!("give up the copy of {victim}: {e}"));
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

    /// A disk that failed a write or a sync is never trusted again.
    async fn judge_disk(&self, victim: &str) {
        let failed = self.world.disk_errors(victim) > 0;
        if failed {
            self.cluster.excuse(victim);
            let reported = self.cluster.wait_failed(victim, VERDICT_PATIENCE).await;
            reported.unwrap_or_else(|e| panic!("the disk of {victim} failed, and is still used: {e}"));
        } else {
            self.state().spent.remove(victim);
        }
        self.world.set_disk_faults(victim, DiskFaults::default());
        self.cluster.start(victim);
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

/// Deletes everything except the target's identity.
fn empty_target(disk: &dyn Disk) -> std::io::Result<()> {
    let dir = Path::new(TARGET_DIR);
    for entry in disk.read_dir(dir)?.iter().filter(|e| e.name != IDENTITY_FILE) {
        match entry.is_dir {
            true => disk.remove_dir_all(&dir.join(&entry.name))?,
            false => disk.remove_file(&dir.join(&entry.name))?,
        }
    }
    disk.sync_dir(dir)
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
