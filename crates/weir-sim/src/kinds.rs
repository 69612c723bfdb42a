//! The kinds of faults, by name. Plain facts about each kind; no action.

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FaultKind {
    KillStorage,
    PowerCutStorage,
    PowerCutAllStorage,
    PauseStorage,
    KillMeta,
    PowerCutMeta,
    PauseMeta,
    KillCoordinator,
    PowerCutCoordinator,
    LoseHost,
    KillClient,
    PauseClient,
    PartitionFromClient,
    PartitionFromPeer,
    PartitionFromCoordinator,
    PartitionFromMeta,
    PartitionPartly,
    ResetConnections,
    LateRequests,
    SlowLink,
    ClockJump,
    ClockDrift,
    SlowDisk,
    ReadErrors,
    WriteErrors,
    SyncErrors,
    SyncErrorsMeta,
    DiskFull,
    FlipBits,
    LostWrites,
    MisdirectedWrites,
    ReplaceDisk,
    KillStorageAtPoint,
    KillMetaAtPoint,
    KillTooMany,
    StallDisk,
    MovedAddress,
    EmptyReturns,
    OldCopyReturns,
    CutClientFromTarget,
    CutMetaFromCopies,
    CutMetaFromCoordinator,
    LoseMetaDisk,
    LoseTargetForGood,
    DrainTarget,
    AddTargets,
    SplitMetaWithClients,
    KillLeadingCoordinator,
    CutCoordinatorFromEtcd,
    LostCasAnswer,
    TwoCoordinators,
    StarvedNode,
    Burst,
    MetaDiskFull,
    CrashLeaderBeforeFlush,
    CrashLeaderAndAuthor,
}

use FaultKind::*;

/// For how long a fault makes a storage node's data unavailable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Toll {
    None,
    /// Until the fault ends and repair is done.
    Passing,
    /// Some of its bytes, silently, for the rest of the run.
    Silent,
    /// All its bytes, for the rest of the run.
    Lasting,
}

impl FaultKind {
    pub const ALL: [FaultKind; 56] = [
        KillStorage,
        PowerCutStorage,
        PowerCutAllStorage,
        PauseStorage,
        KillMeta,
        PowerCutMeta,
        PauseMeta,
        KillCoordinator,
        PowerCutCoordinator,
        LoseHost,
        KillClient,
        PauseClient,
        PartitionFromClient,
        PartitionFromPeer,
        PartitionFromCoordinator,
        PartitionFromMeta,
        PartitionPartly,
        ResetConnections,
        LateRequests,
        SlowLink,
        ClockJump,
        ClockDrift,
        SlowDisk,
        ReadErrors,
        WriteErrors,
        SyncErrors,
        SyncErrorsMeta,
        DiskFull,
        FlipBits,
        LostWrites,
        MisdirectedWrites,
        ReplaceDisk,
        KillStorageAtPoint,
        KillMetaAtPoint,
        KillTooMany,
        StallDisk,
        MovedAddress,
        EmptyReturns,
        OldCopyReturns,
        CutClientFromTarget,
        CutMetaFromCopies,
        CutMetaFromCoordinator,
        LoseMetaDisk,
        LoseTargetForGood,
        DrainTarget,
        AddTargets,
        SplitMetaWithClients,
        KillLeadingCoordinator,
        CutCoordinatorFromEtcd,
        LostCasAnswer,
        TwoCoordinators,
        StarvedNode,
        Burst,
        MetaDiskFull,
        CrashLeaderBeforeFlush,
        CrashLeaderAndAuthor,
    ];

    /// Kinds that may be combined with any others. Lasting damage does not pass every seed so yet (see
    /// `docs/verification.md`); deaths at crash points are like other deaths; too many deaths cause errors,
    /// which hide other faults; a hanging disk uses up the patience that other faults need.
    pub fn mixable(has_copies: bool) -> Vec<FaultKind> {
        let apart = |k: &FaultKind| {
            k.toll() == Toll::Lasting
                || matches!(k, KillStorageAtPoint | KillMetaAtPoint | KillTooMany | StallDisk)
                || !has_copies && (k.needs_copies() || *k == LoseTargetForGood)
                || k.needs_coordinators()
                // Only on request: older seeds keep their meaning.
                || matches!(k, DrainTarget | AddTargets | MetaDiskFull | CrashLeaderBeforeFlush | CrashLeaderAndAuthor)
        };
        FaultKind::ALL.into_iter().filter(|k| !apart(k)).collect()
    }

    /// Whether it needs more targets than a group has members.
    pub fn needs_spare_nodes(self) -> bool {
        matches!(self, LoseTargetForGood | DrainTarget | AddTargets)
    }

    pub fn needs_copies(self) -> bool {
        matches!(self, CutMetaFromCopies | CutMetaFromCoordinator | LoseMetaDisk | SplitMetaWithClients)
    }

    /// Whether it needs several coordinators.
    pub fn needs_coordinators(self) -> bool {
        matches!(self, KillLeadingCoordinator | CutCoordinatorFromEtcd | LostCasAnswer | TwoCoordinators)
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KillStorage => "kill-storage",
            PowerCutStorage => "power-cut-storage",
            PowerCutAllStorage => "power-cut-all-storage",
            PauseStorage => "pause-storage",
            KillMeta => "kill-meta",
            PowerCutMeta => "power-cut-meta",
            PauseMeta => "pause-meta",
            KillCoordinator => "kill-coordinator",
            PowerCutCoordinator => "power-cut-coordinator",
            LoseHost => "lose-host",
            KillClient => "kill-client",
            PauseClient => "pause-client",
            PartitionFromClient => "partition-from-client",
            PartitionFromPeer => "partition-from-peer",
            PartitionFromCoordinator => "partition-from-coordinator",
            PartitionFromMeta => "partition-from-meta",
            PartitionPartly => "partition-partly",
            ResetConnections => "reset-connections",
            LateRequests => "late-requests",
            SlowLink => "slow-link",
            ClockJump => "clock-jump",
            ClockDrift => "clock-drift",
            SlowDisk => "slow-disk",
            ReadErrors => "read-errors",
            WriteErrors => "write-errors",
            SyncErrors => "sync-errors",
            SyncErrorsMeta => "sync-errors-meta",
            DiskFull => "disk-full",
            FlipBits => "flip-bits",
            LostWrites => "lost-writes",
            MisdirectedWrites => "misdirected-writes",
            ReplaceDisk => "replace-disk",
            KillStorageAtPoint => "kill-storage-at-point",
            KillMetaAtPoint => "kill-meta-at-point",
            KillTooMany => "kill-too-many",
            StallDisk => "hang-disk",
            MovedAddress => "moved-address",
            EmptyReturns => "empty-returns",
            OldCopyReturns => "old-copy-returns",
            CutClientFromTarget => "cut-client-from-target",
            CutMetaFromCopies => "cut-meta-from-copies",
            CutMetaFromCoordinator => "cut-meta-from-coordinator",
            LoseMetaDisk => "lose-meta-disk",
            LoseTargetForGood => "lose-target-for-good",
            SplitMetaWithClients => "split-meta-with-clients",
            KillLeadingCoordinator => "kill-leading-coordinator",
            CutCoordinatorFromEtcd => "cut-coordinator-from-etcd",
            LostCasAnswer => "lost-cas-answer",
            TwoCoordinators => "two-coordinators",
            StarvedNode => "starved-node",
            Burst => "burst",
            MetaDiskFull => "meta-disk-full",
            CrashLeaderBeforeFlush => "crash-leader-before-flush",
            CrashLeaderAndAuthor => "crash-leader-and-author",
            DrainTarget => "drain-target",
            AddTargets => "add-targets",
        }
    }

    pub fn by_name(name: &str) -> Option<FaultKind> {
        FaultKind::ALL.into_iter().find(|k| k.name() == name)
    }

    /// Its effect on the data of each storage node that it hits.
    pub fn toll(self) -> Toll {
        match self {
            KillStorage
            | PowerCutStorage
            | PowerCutAllStorage
            | PauseStorage
            | LoseHost
            | PartitionFromClient
            | PartitionFromPeer
            | PartitionFromCoordinator
            | PartitionPartly
            | SlowDisk
            | ReadErrors
            | KillStorageAtPoint
            | KillTooMany
            | StallDisk
            | MovedAddress
            | EmptyReturns
            | OldCopyReturns
            // Others take over its places before the fault ends.
            | LoseTargetForGood => Toll::Passing,
            // A full disk refuses new bytes; its data can be read.
            DiskFull => Toll::Passing,
            FlipBits | LostWrites | MisdirectedWrites => Toll::Silent,
            WriteErrors | SyncErrors | ReplaceDisk => Toll::Lasting,
            KillMeta
            | PowerCutMeta
            | PauseMeta
            | KillCoordinator
            | PowerCutCoordinator
            | KillClient
            | PauseClient
            | PartitionFromMeta
            | ResetConnections
            | LateRequests
            | SlowLink
            | ClockJump
            | ClockDrift
            | SyncErrorsMeta
            | KillMetaAtPoint
            | CutMetaFromCopies
            | CutMetaFromCoordinator
            | LoseMetaDisk
            | SplitMetaWithClients
            | KillLeadingCoordinator
            | CutCoordinatorFromEtcd
            | LostCasAnswer
            | TwoCoordinators
            | MetaDiskFull
            | CrashLeaderBeforeFlush
            | CrashLeaderAndAuthor => Toll::None,
            // The client routes around it.
            CutClientFromTarget => Toll::None,
            // Its places stay complete while they move.
            DrainTarget | AddTargets => Toll::None,
            // Slow is not gone.
            StarvedNode | Burst => Toll::None,
        }
    }

    /// More work than the cluster can do, or less power to do it: it makes things slow, and takes nothing
    /// away.
    pub fn is_load(self) -> bool {
        matches!(self, StarvedNode | Burst)
    }

    /// A client dies.
    pub fn kills_client(self) -> bool {
        matches!(self, KillClient | CrashLeaderAndAuthor)
    }

    /// No connection, process or disk suffers from it: servers serve only requests that were asked for.
    pub fn loses_nothing(self) -> bool {
        self.is_load() || matches!(self, ClockJump | ClockDrift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_listed_once_under_a_name_of_its_own() {
        for (i, kind) in FaultKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i, "in the order of the list");
            assert_eq!(FaultKind::by_name(kind.name()), Some(kind));
        }
    }
}
