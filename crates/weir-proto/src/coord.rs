//! Messages to the coordinator.
use crate::access::{AccessRule, AuditRule};
use crate::home_rule::HomeRule;
use crate::map::{ClusterMap, Role, Run, Scheme};
use crate::message;
use crate::version::Program;
use crate::wire_enum;
use crate::{ClusterId, DiskUuid, Epoch, NamespaceId, NamespaceUuid, NodeId, PgId, RunId, TargetId};
use std::sync::Arc;

/// How often a cut link is reported.
pub const LINK_REPORT_MS: u64 = 2000;

message!(
    /// A target directory that a storage role brings.
    TargetOffer { uuid: DiskUuid, pool: String, capacity: u64, history: TargetHistory }
);
message!(
    /// What a target's index says of the runs of its process: the coordinator tells by it whether the target
    /// is what it was. An index that is new, or that is an older copy, does not know the last run.
    #[derive(Default)]
    TargetHistory {
        /// The last run that the index knows to be admitted.
        confirmed: Run,
        /// Runs that began since then: one of them may have been admitted, and ended before that was written
        /// down.
        begun: Vec<RunId>,
        /// This one. It was written down before this was sent.
        run: RunId,
        /// The position of the index's journal when this run began.
        position: u64,
    }
);
message!(
    /// Joins the cluster, or takes up again an earlier membership of the same name. The connection is the
    /// membership: when it breaks and does not come back, the node is down.
    Join = 1 by [Storage, Meta] -> Joined {
        /// `None` when the node was never in a cluster.
        cluster: Option<ClusterId>,
        name: String,
        /// Random, chosen once per process: tells a reconnect from a second process of the same name.
        instance: u64,
        role: Role,
        host: String,
        addrs: Vec<String>,
        targets: Vec<TargetOffer>,
        program: Program,
    }
);
message!(Joined { node: NodeId, targets: Vec<TargetId>, map: Arc<ClusterMap>, heartbeat_ms: u32 });
message!(
    /// How a target is, told with each heartbeat.
    TargetReport {
        target: TargetId,
        failed: bool,
        capacity: u64,
        used: u64,
        /// Cells that lack redundancy: a fragment of their stripe was not written or is lost.
        under_replicated_cells: u64,
        /// Blocks found to fail their checksum since the target was made.
        damaged_blocks: u64,
        /// Of those, repaired.
        repaired_blocks: u64,
        /// For how long its disk has ended nothing of what it has to do, ms.
        stalled_ms: u32,
        /// Up to which position its index's journal is durable.
        position: u64,
    }
);
message!(
    /// Keeps the membership alive. Sent on the connection of `Join` every `heartbeat_ms`.
    Heartbeat = 2 by [Storage, Meta] -> HeartbeatAck { node: NodeId, targets: Vec<TargetReport> }
);
message!(HeartbeatAck { map_version: u64 });
message!(
    /// The map, as soon as it is newer than `newer_than`; waits up to `wait_ms` for that.
    GetMap = 3 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> MapReply { newer_than: u64, wait_ms: u32 }
);
message!(
    /// The map is in the body for a peer of protocol version 1 only; see [`crate::news`].
    MapReply { map: Option<Arc<ClusterMap>> }
);
wire_enum!(Suspicion {
    /// A call to it failed, or was not answered for long.
    Failed = 1,
    /// It has not answered yet although it should have: look quickly. Nothing happens if it answers, or if a
    /// group would have fewer than k current members without it.
    Unreachable = 2,
    /// The others of its group answered the same long before: do without it for a while even if it answers,
    /// where every other member of a group is current.
    Slow = 3,
});
message!(
    /// A client or target could not use a target. The coordinator judges; the reply carries the newest map.
    ReportTarget = 4 by [Meta, Storage, Mount, Mover, Console] -> MapReply { target: TargetId, group: PgId, epoch: Epoch, suspicion: Suspicion, why: String }
);
message!(
    /// A member that was behind holds everything again, as of the group's epoch.
    CaughtUp = 5 by [Storage] -> MapReply { target: TargetId, group: PgId, epoch: Epoch }
);
message!(
    /// Leaves in good order, with the last reports: the node is down at once, without waiting for its
    /// silence.
    Leave = 6 by [Storage, Meta] -> () { node: NodeId, targets: Vec<TargetReport> }
);
message!(
    /// Everything that `weir status` shows.
    GetStatus = 7 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> ClusterStatus {}
);
message!(ClusterStatus {
    map: Arc<ClusterMap>,
    targets: Vec<TargetReport>,
    uptime_ms: u64,
    /// In the order of their senders' names.
    links: Vec<CutLink>,
    /// The coordinator's own.
    program: Program,
});
message!(
    /// The sender cannot reach a node that others reach. Said again every [`LINK_REPORT_MS`] as long as it is
    /// so.
    ReportLink = 21 by [Meta, Storage, Mount, Mover, Console] -> () {
        node: NodeId,
        /// For how long; 0: it is reached again.
        cut_ms: u64,
        why: String,
    }
);
message!(
    /// A node that another one cannot reach, as that one says.
    CutLink { from: String, role: Role, to: NodeId, since_ms: u64, why: String }
);
message!(
    /// A metadata role takes the lead of a namespace; the epoch fences the leader before it. `Exists`:
    /// another node that is up leads it, or there is one of that name already. `Denied`: the directory is not
    /// that namespace's, or an old copy.
    LeadNamespace = 8 by [Meta] -> LeadReply {
        node: NodeId,
        namespace: String,
        /// Which one of that name the role's directory holds.
        uuid: NamespaceUuid,
        /// How many changes it holds, all durable. 0: it is being founded, and made if it is not known.
        changes: u64,
        /// To be given up with all its files when this one is founded.
        instead_of: Option<NamespaceUuid>,
    }
);
message!(
    /// A failed target may be used again: an administrator has seen to its disk. It comes back behind, when
    /// its process serves it. `Exists`: it has not failed. `Invalid`: its running process still says that it
    /// has.
    ClearTarget = 9 by [Console, Operator] -> MapReply { target: TargetId }
);
message!(LeadReply { namespace: NamespaceId, leader_epoch: Epoch, map: Arc<ClusterMap> });
message!(
    /// Makes the placement groups of a scheme where there are none yet. `Invalid`: no pool has targets enough
    /// that are up.
    MakeGroups = 10 by [Meta, Console, Operator] -> MapReply {
        /// In this pool; absent: in every pool that has targets enough.
        pool: Option<String>,
        scheme: Scheme,
    }
);
message!(
    /// Where the coordinator listens, for members that were given only one of its addresses: it may be
    /// started on another one.
    GetCoordinators = 25 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> Coordinators {}
);
message!(Coordinators { addrs: Vec<String> });
message!(
    /// What is recorded of these volumes; a rule of the same glob is replaced, and one that records nothing
    /// is removed.
    AuditVolumes = 63 by [Console] -> MapReply { rule: AuditRule }
);
message!(
    /// From now on requests on this connection are those of a user of the mount's machine, passed on by the
    /// mount. The connection may do what this user may, and no more. The metadata leader answers it, too.
    ActFor = 62 by [Mount] -> () { uid: u32 }
);
message!(
    /// What calls of a client wait for, told again while they do; an empty list: for nothing any more.
    ReportWaits = 26 by [Mount, Mover, Console] -> () { client: String, waits: Vec<Wait> }
);
message!(
    /// What calls wait for, for how long, and how many do.
    Wait { what: String, ms: u64, calls: u32 }
);
message!(
    /// The clients whose calls wait.
    GetWaits = 27 by [Console, Operator, Auditor, User] -> ClientsWaiting {}
);
message!(ClientsWaiting { clients: Vec<ClientWaiting> });
message!(ClientWaiting { client: String, waits: Vec<Wait> });
message!(
    /// Raises the cluster's level to the highest one that a program in it knows. `Unsupported`: one that is
    /// a node of the cluster, or is connected, knows less.
    FinishUpgrade = 28 by [Console, Operator] -> MapReply {}
);
message!(
    /// A target does not come back: its places go to other targets at once. Nothing is changed by a dry run.
    /// `Invalid`: it is in service, or is needed to rebuild what it had. `Unsupported`: the cluster's level.
    TargetGone = 64 by [Console, Operator] -> GonePlan { target: TargetId, dry_run: bool }
);
message!(GonePlan {
    /// Places that go to other targets now.
    begun: u32,
    /// Those that wait.
    waiting: Vec<RebuildWaiting>,
    /// Places in groups without redundancy: what they had is lost, and they stay.
    without_redundancy: u32,
});
message!(
    /// How the rebuild of lost targets goes on.
    GetRebuild = 65 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> RebuildStatus {}
);
message!(RebuildStatus {
    /// A target that is down for so long counts as lost; 0: none does by itself.
    after_s: u32,
    /// Targets that an administrator has given up.
    gone: Vec<TargetId>,
    /// Those that count as lost now.
    lost: Vec<TargetId>,
    waiting: Vec<RebuildWaiting>,
    refills: Vec<RefillReport>,
    /// Targets whose places go to others while they serve them.
    draining: Vec<TargetId>,
    /// No place begins to move.
    paused: bool,
});
message!(
    /// Places of a lost target that no other one takes now.
    RebuildWaiting { target: TargetId, why: String, places: u32 }
);
message!(
    /// How far targets of a node are filled; said again every second.
    ReportRefill = 66 by [Storage] -> () { reports: Vec<RefillReport> }
);
message!(RefillReport {
    target: TargetId,
    group: PgId,
    /// Stripes that were looked at in the pass under way, and that were repaired in all passes,
    stripes_seen: u64,
    stripes_repaired: u64,
    /// with so many bytes on this target.
    bytes: u64,
    /// For how long it has been filled, ms.
    since_ms: u64,
});
message!(
    /// From when on a target that is down counts as lost; 0: none does by itself.
    SetRebuild = 67 by [Console, Operator] -> () { after_s: u32 }
);
message!(
    /// All places of a target go to others while it serves them; or (`stay`) those that it has still stay.
    /// Nothing is changed by a dry run. `Unsupported`: the cluster's level.
    DrainTarget = 68 by [Console, Operator] -> GonePlan { target: TargetId, stay: bool, dry_run: bool }
);
message!(
    /// Takes a target that is down and has no place left out of the cluster. `Invalid`: it is up, or has
    /// places.
    RemoveTarget = 69 by [Console, Operator] -> MapReply { target: TargetId }
);
message!(
    /// A target that takes a place of a group has copied all but little of what the member has there: the
    /// next epoch is closed. Or it has all of the epoch that is closed (`done`): it is the member now.
    /// `Stale`: the group has moved on, copy again.
    PlaceCopied = 70 by [Storage] -> MapReply { target: TargetId, group: PgId, epoch: Epoch, done: bool }
);
message!(
    /// No place begins to move while this holds; those that move already go on.
    PauseMoves = 71 by [Console, Operator] -> () { paused: bool }
);
message!(
    /// Users may have homes there; instead of the rule for the same place, if there is one.
    HomeAllow = 40 by [Console] -> MapReply { rule: HomeRule }
);
message!(
    /// Takes back the rule for this place. `NotFound`: there is none.
    HomeForbid = 41 by [Console] -> MapReply { place: String }
);
message!(
    /// Adds a rule for mounts. `Exists`: there is one of that name. `NotFound`: there is none of the name in
    /// `before`.
    AccessAdd = 42 by [Console] -> MapReply {
        rule: AccessRule,
        /// The rule that comes next; absent: it is the last one.
        before: Option<String>,
    }
);
message!(
    /// Removes a rule for mounts. `NotFound`: there is none of that name.
    AccessRemove = 43 by [Console] -> MapReply { name: String }
);

message!(
    /// How far the sender's clock is ahead of the coordinator's, as it found last; the answer is the
    /// coordinator's time.
    CompareClock = 57 by [Meta, Storage, Mount, Mover] -> CoordinatorTime { ahead_ms: i64 }
);
message!(
    /// In nanoseconds since 1970.
    CoordinatorTime { wall_ns: i64 }
);
message!(
    /// Clocks that are off.
    GetClocks = 58 by [Console, Operator, Auditor, User] -> Clocks {}
);
message!(Clocks { off: Vec<ClockOff> });
message!(
    /// Negative: it is behind.
    ClockOff { node: String, role: Role, ahead_ms: i64 }
);
message!(
    /// Whether the audit log is written. A metadata leader answers this, too.
    GetAudit = 29 by [Console, Operator, Auditor, User] -> AuditState {}
);
message!(
    #[derive(Default)]
    AuditState {
        /// The number of the last record that is durable.
        records: u64,
        /// Records that no disk has yet.
        waiting: u64,
        /// Records that were lost since the process started: the disk took none for too long.
        lost: u64,
        /// Why the last try to write failed; empty: it did not.
        failure: String,
    }
);
message!(
    /// The leader's directory holds so many changes, all durable: from now on one that holds fewer is an old
    /// copy. `Exists`: another node leads the namespace by now. `NotFound`: it was given up.
    RecordProgress = 11 by [Meta] -> () { node: NodeId, namespace: NamespaceId, changes: u64 }
);
