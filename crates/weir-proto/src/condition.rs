//! What nodes say of themselves (methods 48, 49 and 105), for `weir status`: how full the disks of their own
//! directories are, what clients have not saved, and what does not work.
//!
//! Nothing is decided by it, so it may be late, and is lost with the coordinator: each node says it again.
use crate::map::Role;
use crate::{message, wire_enum};

/// How often a node reports, ms.
pub const REPORT_EVERY_MS: u64 = 5_000;
/// Troubles, and disks, of one node that the coordinator keeps.
pub const TROUBLES_MAX: usize = 64;

wire_enum!(
    /// How bad a trouble is.
    Severity {
        /// Good to know; nothing is wrong.
        Note = 1,
        /// Something does not work or soon will not; all data is available and redundant.
        Warning = 2,
        /// Data is available with reduced redundancy.
        Degraded = 3,
        /// Data is unavailable or lost.
        Critical = 4,
    }
);
message!(
    /// Something that a node knows to be wrong.
    NodeTrouble {
        /// Which kind of trouble: a word for programs that does not change.
        code: String,
        severity: Severity,
        /// The volume, the directory or the server that it is about.
        about: String,
        /// One sentence: what is wrong.
        text: String,
        /// What an administrator can do.
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
        /// Of its program.
        release: String,
        /// What its sessions with metadata servers call themselves; empty: it is no client.
        client: String,
        /// Bytes that programs have written and that no target has yet.
        unwritten_bytes: u64,
        disks: Vec<NodeDisk>,
        troubles: Vec<NodeTrouble>,
        /// It ends now, in good order: its silence is no trouble.
        ends: bool,
    }
);
message!(
    /// Sent every [`REPORT_EVERY_MS`].
    ReportCondition = 48 by [Meta, Storage, Mount, Mover] -> () { condition: Condition }
);
message!(
    /// What nodes reported last, also those that have fallen silent.
    GetConditions = 49 by [Console, Operator, Auditor, User] -> Conditions {}
);
message!(Conditions { nodes: Vec<NodeCondition> });
message!(
    /// `heard_ms`: how long ago it reported.
    NodeCondition { node: String, role: Role, heard_ms: u64, condition: Condition }
);
message!(
    /// What the leader of a namespace tries in vain.
    TroubleList = 105 by [Console, Operator, Auditor, User] -> Troubles {}
);
message!(Troubles { troubles: Vec<NodeTrouble> });
