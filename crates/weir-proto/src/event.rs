//! Events: troubles of the cluster as they began and ended (methods 59, 72 and 73).
//!
//! The leading coordinator compares the troubles that it finds with those that it found before, and keeps the
//! log, so that every command reads the same one. Consoles report those of their machines, too.
use crate::condition::NodeTrouble;
use crate::{message, wire_enum};

/// Events that are kept, the newest, and marks.
pub const EVENTS_MAX: usize = 1000;
pub const MUTES_MAX: usize = 64;
/// Troubles of one report.
pub const REPORTED_MAX: usize = 512;

message!(
    /// All troubles that there are now, as a console finds them.
    ReportEvents = 59 by [Console, Operator] -> () { troubles: Vec<NodeTrouble> }
);
message!(
    /// The log.
    GetEvents = 72 by [Console, Operator, Auditor, User] -> EventLog {}
);
message!(
    #[derive(Default)]
    EventLog {
        /// The oldest first.
        events: Vec<EventSeen>,
        mutes: Vec<Mute>,
    }
);
message!(
    /// Times are in seconds since 1970.
    EventSeen {
        /// As it was when it began.
        trouble: NodeTrouble,
        raised_s: u64,
        /// 0: it lasts.
        cleared_s: u64,
        /// When an administrator acknowledged it; 0: not yet.
        acknowledged_s: u64,
    }
);
message!(
    /// Troubles of a code are listed in one line and do not count until then.
    Mute {
        code: String,
        /// Empty: events about any object.
        about: String,
        until_s: u64,
    }
);
wire_enum!(EventMark {
    /// An administrator knows of it.
    Acknowledge = 1,
    /// It does not count until `until_s`.
    Mute = 2,
    Unmute = 3,
});
message!(
    /// Marks the troubles of a code; `NotFound`: there is none that lasts, or no such mute.
    MarkEvents = 73 by [Console, Operator] -> () { code: String, about: String, mark: EventMark, until_s: u64 }
);
