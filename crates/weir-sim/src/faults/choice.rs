//! The choice of a fault: its kind, its victims and how long it lasts, within what the cluster promises to
//! survive.
use super::{Fault, Faults, UNFLUSHED_MAX};
use crate::client_states::client_name;
use crate::cluster::{META, is_meta, meta_name, storage_name};
use crate::kinds::FaultKind::*;
use crate::kinds::{FaultKind, Toll};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Well within a client's patience of 30 s, with what recovery takes.
pub(super) const FAULT_MS_MAX: u64 = 6_000;
/// Least duration of [`KillTooMany`], and up to half as long again: most of a client's patience.
const TOO_MANY_MS_MIN: u64 = 13_000;
/// Least duration of faults that depose a coordinator: its lease of 3 s.
const DEPOSED_MS_MIN: u64 = 4_000;
/// Least duration of [`StallDisk`], and up to twice that: a target that hangs for 10 s counts as gone.
const STALL_MS_MIN: u64 = 11_000;
/// Least duration of [`CutClientFromTarget`] alone, and up to half as long again: longer than a client's
/// patience. Together with other faults it ends with them.
const CUT_MS_MIN: u64 = 31_000;

/// Least duration of [`StarvedNode`], and up to the most; alone or together with other faults, which end
/// earlier.
const STARVED_MS: (u64, u64) = (5_000, 60_000);

/// The node whose disk is full until the first fault ends, if that is [`DiskFull`]: later full disks come
/// when it has all the space that a short run needs.
pub(super) const FULL_FROM_START: &str = "s1";

/// The two sides are separated for well over a lease term and the time that the next leader waits.
const SPLIT_MS_MIN: u64 = 12_000;

impl Faults {
    /// Whether the next fault is one that a shrunk run omits.
    pub(super) fn is_muted(&self) -> bool {
        self.options.mute.contains(&self.chosen.fetch_add(1, Ordering::Relaxed))
    }

    /// Number of storage nodes that a run begins with.
    pub(super) fn first_nodes(&self) -> usize {
        self.options.storage_nodes - self.options.servers.late
    }
    /// Number of storage nodes that have joined.
    fn nodes(&self) -> usize {
        if self.state().all_joined { self.options.storage_nodes } else { self.first_nodes() }
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
    pub(super) fn choose(&self, lasts: Duration) -> Fault {
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
            StarvedNode => Duration::from_millis(STARVED_MS.0 + self.rng.below(STARVED_MS.1 - STARVED_MS.0)),
            CrashLeaderBeforeFlush | CrashLeaderAndAuthor => lasts.max(UNFLUSHED_MAX * 2),
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
            KillMeta
            | PowerCutMeta
            | PauseMeta
            | SyncErrorsMeta
            | KillMetaAtPoint
            | LoseMetaDisk
            | MetaDiskFull
            | CrashLeaderBeforeFlush => (vec![self.some_meta()], vec![]),
            CrashLeaderAndAuthor => (vec![self.some_meta(), self.some_client()], vec![]),
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
            PartitionPartly => self.one_and_some(all),
            ClockJump | ClockDrift | MovedAddress => {
                let mut nodes = all;
                nodes.extend([self.some_meta(), self.coordinator()]);
                nodes.extend((kind != MovedAddress).then(|| self.some_client()));
                (vec![self.one_of(&nodes)], vec![])
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
            StarvedNode => (self.some_starved(), vec![]),
            Burst => ((0..self.options.clients).map(client_name).collect(), vec![]),
            DiskFull if first => (vec![FULL_FROM_START.into()], vec![]),
            KillStorage | KillStorageAtPoint | PowerCutStorage | PauseStorage | SlowDisk | StallDisk
            | ReadErrors | DiskFull | EmptyReturns | OldCopyReturns | LoseTargetForGood | DrainTarget => {
                (vec![self.some_storage()], vec![])
            }
            _ => (vec![self.coordinator()], vec![]),
        }
    }

    /// A client or a storage node, and some of all servers.
    fn one_and_some(&self, storage: Vec<String>) -> (Vec<String>, Vec<String>) {
        let one = if self.rng.below(3) == 0 { self.some_client() } else { self.some_storage() };
        let roles = self.metas().into_iter().chain(self.cluster.coordinators().names());
        let rest = storage.into_iter().chain(roles).filter(|n| *n != one);
        let others = rest.filter(|_| self.rng.below(2) == 0).collect();
        (vec![one], others)
    }

    /// One to three nodes of any role; one time in four all of them.
    fn some_starved(&self) -> Vec<String> {
        let roles = self.metas().into_iter().chain(self.cluster.coordinators().names());
        let clients = (0..self.options.clients).map(client_name);
        let mut all: Vec<String> = (0..self.nodes()).map(storage_name).chain(roles).chain(clients).collect();
        if self.rng.below(4) == 0 {
            return all;
        }
        let count = 1 + self.rng.below(3) as usize;
        (0..count).map(|_| all.remove(self.rng.below(all.len() as u64) as usize)).collect()
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
    pub(super) fn allowed(&self, fault: &Fault, under_way: &[Fault]) -> bool {
        let spent = self.spent();
        if fault.kind.toll() == Toll::Lasting && spent.contains(fault.victim()) {
            return false;
        }
        if under_way.iter().any(Fault::is_beyond_parity)
            || (fault.is_beyond_parity() && !under_way.is_empty())
        {
            return false;
        }
        // Load takes nothing away: it meets any other fault, but not its own kind.
        if fault.kind.is_load() {
            return under_way.iter().all(|f| f.kind != fault.kind);
        }
        let under_way = || under_way.iter().filter(|f| !f.kind.is_load());
        let twice = under_way().any(|f| f.victims.iter().any(|v| fault.victims.contains(v)));
        // One copy of the metadata may be down.
        let of_meta = |f: &Fault| f.victims.iter().chain(&f.others).any(|v| is_meta(v));
        let twice = twice || self.options.servers.copies > 1 && of_meta(fault) && under_way().any(of_meta);
        // A node that returns with another disk while no coordinator leads: see docs/verification.md.
        let pair =
            |one: &Fault, other: &Fault| one.kind == LoseTargetForGood && other.kind.needs_coordinators();
        let twice = twice || under_way().any(|f| pair(f, fault) || pair(fault, f));
        let mut lost = spent;
        for f in under_way().chain([fault]).filter(|f| !f.is_beyond_parity()) {
            lost.extend(f.takes().cloned());
        }
        !twice && lost.len() <= usize::from(self.options.scheme.parity)
    }
}
