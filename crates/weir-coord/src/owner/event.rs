//! The events that the owner of the map handles, one kind for each request of a node or an administrator.
use crate::copies::CopyChange;
use crate::decide::{Connected, Speed};
use crate::placing::Placed;
use crate::probe::Seen;
use crate::replacing::RebuildEvent;
use std::collections::BTreeMap;
use tokio::sync::oneshot;
use weir_proto::coord::{
    CaughtUp, ClusterStatus, Heartbeat, HeartbeatAck, Join, Joined, LeadNamespace, LeadReply, Leave,
    MakeGroups, MapReply, RecordProgress, ReportLink, ReportTarget, Suspicion, TargetReport,
};
use weir_proto::frame::Hello;
use weir_proto::map::{ClusterMap, RemovedNode};
use weir_proto::{NodeId, Result, TargetId};

/// The channel for an answer.
pub type Answer<T> = oneshot::Sender<Result<T>>;

/// The result of probing a target.
pub struct Probe {
    pub target: TargetId,
    pub suspicion: Suspicion,
    /// Its process was asked for a sign of life.
    pub by_life: bool,
    pub outcome: Result<Seen>,
    /// The members that its groups need without it and that answered at the same time. For a slow target
    /// only.
    pub alive: BTreeMap<TargetId, Speed>,
}

/// Everything that can happen to the owner.
pub enum Event {
    Join {
        join: Join,
        connection: u64,
        answer: Answer<Joined>,
    },
    Heartbeat {
        heartbeat: Heartbeat,
        connection: u64,
        answer: Answer<HeartbeatAck>,
    },
    Report {
        report: ReportTarget,
        answer: Answer<MapReply>,
    },
    Link {
        from: Hello,
        report: ReportLink,
        answer: Answer<()>,
    },
    /// Result of probing a target; `joined`: the connection of its node's `Join` when the probe began.
    Probed {
        probe: Probe,
        joined: Option<u64>,
    },
    CaughtUp {
        report: CaughtUp,
        answer: Answer<MapReply>,
    },
    Clear {
        target: TargetId,
        answer: Answer<MapReply>,
    },
    MakeGroups {
        wanted: MakeGroups,
        answer: Answer<MapReply>,
    },
    Placed(Placed),
    FinishUpgrade {
        connected: Vec<Connected>,
        answer: Answer<MapReply>,
    },
    /// Certificates of this node are refused from now on; the time is in seconds since 1970.
    RemoveNode {
        removed: RemovedNode,
        now: u64,
        answer: Answer<()>,
    },
    Rebuild(RebuildEvent),
    /// A change of the rules for mounts or for homes.
    Rules {
        change: RuleChange,
        answer: Answer<MapReply>,
    },
    Leave {
        leave: Leave,
        connection: u64,
        answer: Answer<()>,
    },
    Lead {
        lead: LeadNamespace,
        connection: u64,
        answer: Answer<LeadReply>,
    },
    Progress {
        report: RecordProgress,
        connection: u64,
        answer: Answer<()>,
    },
    /// A report about a copy of a namespace.
    Copies {
        by: NodeId,
        change: CopyChange,
        connection: u64,
        answer: Answer<MapReply>,
    },
    Status {
        answer: Answer<ClusterStatus>,
    },
    Disconnected {
        connection: u64,
    },
    /// This coordinator is about to end: it asks targets for their positions.
    Ends {
        answer: Answer<()>,
    },
    /// Their answers, each with the connection of the node's `Join` at the time of the request.
    LastPositions {
        reports: Vec<(Option<u64>, TargetReport)>,
        answer: Answer<()>,
    },
}

/// Changes the rules of a draft, and returns a description of the change.
pub type RuleChange = Box<dyn FnOnce(&mut ClusterMap) -> Result<String> + Send>;
