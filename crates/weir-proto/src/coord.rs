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
    /// A target directory that a storage role announces.
    AnnouncedTarget { uuid: DiskUuid, pool: String, capacity: u64, history: TargetHistory }
);
message!(
    /// A target's record of its process's runs: the coordinator uses it to decide whether the target still
    /// has its data. An index that is new, or an older copy, lacks the last run.
    #[derive(Default)]
    TargetHistory {
        /// The last run that the index has recorded as admitted.
        confirmed: Run,
        /// Runs that began since then: one of them may have been admitted, and ended before that was
        /// recorded.
        begun: Vec<RunId>,
        /// This run. It was recorded before this was sent.
        run: RunId,
        /// The position of the index's journal when this run began.
        position: u64,
    }
);
message!(
    /// Joins the cluster, or resumes an earlier membership of the same name. The connection is the
    /// membership: when it breaks and is not replaced, the node is down.
    Join = 1 by [Storage, Meta] -> Joined {
        /// `None` when the node was never in a cluster.
        cluster: Option<ClusterId>,
        name: String,
        /// Random, chosen once per process: distinguishes a reconnect from a second process of the same name.
        instance: u64,
        role: Role,
        host: String,
        addrs: Vec<String>,
        targets: Vec<AnnouncedTarget>,
        program: Program,
    }
);
message!(Joined { node: NodeId, targets: Vec<TargetId>, map: Arc<ClusterMap>, heartbeat_ms: u32 });
message!(
    /// State of a target, sent with each heartbeat.
    TargetReport {
        target: TargetId,
        failed: bool,
        capacity: u64,
        used: u64,
        /// Cells that lack redundancy: a fragment of their stripe was not written or is lost.
        under_replicated_cells: u64,
        /// Blocks found to fail their checksum since the target was made.
        damaged_blocks: u64,
        /// Repaired blocks among those.
        repaired_blocks: u64,
        /// For how long its disk has completed none of its requests, ms.
        stalled_ms: u32,
        /// The position up to which its index's journal is durable.
        position: u64,
    }
);
message!(
    /// Keeps the membership alive. Sent on the connection of `Join` every `heartbeat_ms`.
    Heartbeat = 2 by [Storage, Meta] -> HeartbeatAck { node: NodeId, targets: Vec<TargetReport> }
);
message!(HeartbeatAck { map_version: u64 });
message!(
    /// The map, once it is newer than `newer_than`; waits up to `wait_ms` for that.
    GetMap = 3 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> MapReply { newer_than: u64, wait_ms: u32 }
);
message!(
    /// The map is in the body for a peer of protocol version 1 only; see [`crate::news`].
    MapReply { map: Option<Arc<ClusterMap>> }
);
wire_enum!(Suspicion {
    /// A call to it failed, or was not answered for long.
    Failed = 1,
    /// It is overdue: probe it quickly. Nothing happens if it answers, or if a group would have fewer than k
    /// current members without it.
    Unreachable = 2,
    /// The others of its group answered the same request long before: demote it for a while even if it
    /// answers, in groups whose other members are all current.
    Slow = 3,
});
message!(
    /// A client or target could not use a target. The coordinator decides; the reply carries the newest map.
    ReportTarget = 4 by [Meta, Storage, Mount, Mover, Console] -> MapReply { target: TargetId, group: PgId, epoch: Epoch, suspicion: Suspicion, why: String }
);
message!(
    /// A member that was behind holds everything again, as of the group's epoch.
    CaughtUp = 5 by [Storage] -> MapReply { target: TargetId, group: PgId, epoch: Epoch }
);
message!(
    /// Leaves in an orderly way, with the last reports: the node is down at once, without waiting for its
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
    /// The coordinator's own program.
    program: Program,
});
message!(
    /// The sender cannot reach a node that others can reach. Repeated every [`LINK_REPORT_MS`] while this
    /// lasts.
    ReportLink = 21 by [Meta, Storage, Mount, Mover, Console] -> () {
        node: NodeId,
        /// For how long; 0: the node is reachable again.
        cut_ms: u64,
        why: String,
    }
);
message!(
    /// A node that another one cannot reach, as reported by the latter.
    CutLink { from: String, role: Role, to: NodeId, since_ms: u64, why: String }
);
message!(
    /// A metadata role takes the lead of a namespace; the epoch fences the previous leader. `Exists`: another
    /// node that is up leads it, or there is a namespace of that name already. `Denied`: the directory is not
    /// that namespace's, or an old copy.
    LeadNamespace = 8 by [Meta] -> LeadReply {
        node: NodeId,
        namespace: String,
        /// The namespace in the role's directory.
        uuid: NamespaceUuid,
        /// The number of changes that it holds, all durable. 0: it is being founded, and made if it does not
        /// exist.
        changes: u64,
        /// The namespace that this one replaces; it is given up with all its files.
        instead_of: Option<NamespaceUuid>,
    }
);
message!(
    /// Returns a failed target to service: an administrator has replaced or checked its disk. It is behind
    /// once its process serves it. `Exists`: it has not failed. `Invalid`: its running process still reports
    /// the failure.
    ClearTarget = 9 by [Console, Operator] -> MapReply { target: TargetId }
);
message!(LeadReply { namespace: NamespaceId, leader_epoch: Epoch, map: Arc<ClusterMap> });
message!(
    /// Makes the placement groups of a scheme if there are none yet. `Invalid`: no pool has enough targets
    /// that are up.
    MakeGroups = 10 by [Meta, Console, Operator] -> MapReply {
        /// In this pool; absent: in every pool that has enough targets.
        pool: Option<String>,
        scheme: Scheme,
    }
);
message!(
    /// All addresses of coordinators, for members that were configured with only one: the leading one may
    /// have another address.
    GetCoordinators = 25 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> Coordinators {}
);
message!(Coordinators { addrs: Vec<String> });
message!(
    /// Sets the audited operations of these volumes; replaces a rule with the same glob, and removes it if
    /// nothing is to be audited.
    AuditVolumes = 63 by [Console] -> MapReply { rule: AuditRule }
);
message!(
    /// From now on requests on this connection are those of a user of the mount's machine, forwarded by the
    /// mount. The connection has only this user's rights. The metadata leader answers it, too.
    ActFor = 62 by [Mount] -> () { uid: u32 }
);
message!(
    /// The waits of a client's calls, repeated while they last; an empty list: no call waits any more.
    ReportWaits = 26 by [Mount, Mover, Console] -> () { client: String, waits: Vec<Wait> }
);
message!(
    /// A cause of waits, the longest duration, and the number of calls.
    Wait { what: String, ms: u64, calls: u32 }
);
message!(
    /// The clients whose calls wait.
    GetWaits = 27 by [Console, Operator, Auditor, User] -> ClientsWaiting {}
);
message!(ClientsWaiting { clients: Vec<ClientWaiting> });
message!(ClientWaiting { client: String, waits: Vec<Wait> });
message!(
    /// Raises the cluster's level to the highest that all its programs support. `Unsupported`: a node of the
    /// cluster, or a connected program, supports less.
    FinishUpgrade = 28 by [Console, Operator] -> MapReply {}
);
message!(
    /// A target will not return: its places move to other targets at once. A dry run changes nothing.
    /// `Exists`: it is in service. `Invalid`: it is needed to rebuild its data. `Unsupported`: the cluster's
    /// level.
    TargetGone = 64 by [Console, Operator] -> GonePlan { target: TargetId, dry_run: bool }
);
message!(GonePlan {
    /// Places that now move to other targets.
    begun: u32,
    /// Places that wait.
    waiting: Vec<RebuildWaiting>,
    /// Places in groups without redundancy: their data is lost, and they stay.
    without_redundancy: u32,
});
message!(
    /// Progress of the rebuild of lost targets.
    GetRebuild = 65 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor, User] -> RebuildStatus {}
);
message!(RebuildStatus {
    /// A target that is down for this long counts as lost; 0: never by itself.
    after_s: u32,
    /// Targets that an administrator has given up.
    gone: Vec<TargetId>,
    /// Targets that count as lost now.
    lost: Vec<TargetId>,
    waiting: Vec<RebuildWaiting>,
    refills: Vec<RefillReport>,
    /// Targets whose places move to others while they serve them.
    draining: Vec<TargetId>,
    /// No move starts.
    paused: bool,
    /// Since when places are rebuilt without a pause, ms; 0: none is.
    since_ms: u64,
    /// The number of places to rebuild since then, with those that are done.
    places_total: u32,
    /// Estimates: the bytes left to rebuild, their rate lately, and how long that takes, ms; 0: not known.
    left_bytes: u64,
    bytes_per_s: u64,
    left_ms: u64,
});
message!(
    /// Places of a lost target that no other target can take now.
    RebuildWaiting { target: TargetId, why: String, places: u32 }
);
message!(
    /// Refill progress of a node's targets; repeated all the time.
    ReportRefill = 66 by [Storage] -> () { reports: Vec<RefillReport> }
);
message!(RefillReport {
    target: TargetId,
    group: PgId,
    /// Stripes that were checked in the present pass, stripes that were repaired in all passes,
    stripes_seen: u64,
    stripes_repaired: u64,
    /// and their bytes on this target.
    bytes: u64,
    /// For how long it has been filled, ms.
    since_ms: u64,
});
message!(
    /// Sets after which time a target that is down counts as lost; 0: never by itself.
    SetRebuild = 67 by [Console, Operator] -> () { after_s: u32 }
);
message!(
    /// All places of a target move to others while it serves them; or (`stay`) its remaining places stay. A
    /// dry run changes nothing. `Unsupported`: the cluster's level.
    DrainTarget = 68 by [Console, Operator] -> GonePlan { target: TargetId, stay: bool, dry_run: bool }
);
message!(
    /// Removes a target that is down and has no place left from the cluster. `Exists`: it is up, or has
    /// places.
    RemoveTarget = 69 by [Console, Operator] -> MapReply { target: TargetId }
);
message!(
    /// A target that takes a place of a group has copied nearly all of the member's data: the next epoch is
    /// closed. Or it has everything in the closed epoch (`done`): it becomes the member. `Stale`: the group
    /// has a newer epoch, copy again.
    PlaceCopied = 70 by [Storage] -> MapReply { target: TargetId, group: PgId, epoch: Epoch, done: bool }
);
message!(
    /// A target refused new data of a group because it is full: its place moves before those that only even
    /// out how full targets are.
    ReportFull = 77 by [Mount, Mover, Console] -> FullPlace { target: TargetId, group: PgId }
);
message!(FullPlace {
    /// The place moves, now or as soon as others have moved.
    moves: bool,
    /// The target that it goes to, once that is known.
    to: Option<TargetId>,
    /// Why it does not move, or not yet.
    why: String,
});
message!(
    /// While set, no move starts; running ones continue.
    PauseMoves = 71 by [Console, Operator] -> () { paused: bool }
);
message!(
    /// Allows users homes in a place; replaces the rule for the same place.
    HomeAllow = 40 by [Console] -> MapReply { rule: HomeRule }
);
message!(
    /// Removes the rule for this place. `NotFound`: there is none.
    HomeForbid = 41 by [Console] -> MapReply { place: String }
);
message!(
    /// Adds a rule for mounts. `Exists`: there is one of that name. `NotFound`: the rule named in `before`
    /// does not exist.
    AccessAdd = 42 by [Console] -> MapReply {
        rule: AccessRule,
        /// The rule that follows it; absent: it is the last one.
        before: Option<String>,
    }
);
message!(
    /// Removes a rule for mounts. `NotFound`: there is none of that name.
    AccessRemove = 43 by [Console] -> MapReply { name: String }
);

message!(
    /// How far the sender's clock is ahead of the coordinator's, as last measured; the reply is the
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
    /// State of the audit log. A metadata leader answers this, too.
    GetAudit = 29 by [Console, Operator, Auditor, User] -> AuditState {}
);
message!(
    #[derive(Default)]
    AuditState {
        /// The number of the last record that is durable.
        records: u64,
        /// Records that are not on disk yet.
        waiting: u64,
        /// Records that were lost since the process started: the disk accepted none for too long.
        lost: u64,
        /// Error of the last failed write; empty: the last write succeeded.
        failure: String,
    }
);
message!(
    /// The leader's directory holds this number of changes, all durable: from now on a directory with fewer
    /// is an old copy. `Exists`: another node leads the namespace by now. `NotFound`: it was given up.
    RecordProgress = 11 by [Meta] -> () { node: NodeId, namespace: NamespaceId, changes: u64 }
);
