//! Reports of nodes about themselves (methods 48, 49 and 105), for `weir status`: how full the disks of their
//! own directories are, unsaved data of clients, and failures.
//!
//! No decision depends on it, so it may be late, and is lost with the coordinator: each node reports again.
use crate::map::Role;
use crate::{message, wire_enum};

/// How often a node reports, ms.
pub const REPORT_EVERY_MS: u64 = 5_000;
/// Troubles, and disks, of one node that the coordinator stores.
pub const TROUBLES_MAX: usize = 64;

wire_enum!(
    /// Severity of a trouble.
    Severity {
        /// Information; nothing is wrong.
        Note = 1,
        /// Something does not work or soon will not; all data is available and redundant.
        Warning = 2,
        /// Data is available, and lacks redundancy, or calls wait for it.
        Degraded = 3,
        /// Data is unavailable or lost.
        Critical = 4,
    }
);
message!(
    /// A fault that a node has detected.
    NodeTrouble {
        /// The kind of trouble: a stable word for programs.
        code: String,
        severity: Severity,
        /// The volume, directory or server that is affected.
        about: String,
        /// One sentence: the fault.
        text: String,
        /// The action for an administrator.
        action: String,
    }
);
message!(
    /// The file system of a directory that the node needs, in bytes.
    NodeDisk { dir: String, free: u64, capacity: u64 }
);
message!(
    #[derive(Default)]
    Condition {
        host: String,
        /// Release of its program.
        release: String,
        /// Its client name in sessions with metadata servers; empty: it is not a client.
        client: String,
        /// Bytes that programs have written and that are not on targets yet.
        unwritten_bytes: u64,
        disks: Vec<NodeDisk>,
        troubles: Vec<NodeTrouble>,
        /// It is shutting down in an orderly way: its silence is not a trouble.
        ends: bool,
    }
);
message!(
    /// Sent every [`REPORT_EVERY_MS`].
    ReportCondition = 48 by [Meta, Storage, Mount, Mover] -> () { condition: Condition }
);
message!(
    /// The last report of each node, also of nodes that have fallen silent.
    GetConditions = 49 by [Console, Operator, Auditor, User] -> Conditions {}
);
message!(Conditions { nodes: Vec<NodeCondition> });
message!(
    /// `last_contact_ms`: how long ago it reported.
    NodeCondition { node: String, role: Role, last_contact_ms: u64, condition: Condition }
);
/// The code of a target's trouble: it refuses data for want of space.
pub const REFUSES: &str = "target-refuses";
/// The code of the trouble of a metadata server whose disk is full, or nearly so.
pub const METADATA_FULL: &str = "metadata-full";
/// The code of a leader's trouble: it has started, and waits for earlier clients.
pub const STARTS: &str = "namespace-starting";

message!(
    /// Operations that the leader of a namespace retries without success.
    /// While it waits for earlier clients after its start, that is the first one.
    TroubleList = 105 by [Console, Operator, Auditor, User] -> Troubles {}
);
message!(Troubles { troubles: Vec<NodeTrouble> });
