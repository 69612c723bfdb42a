//! Messages for observing nodes: their meters, waits and top users (methods 500–509).
//!
//! The coordinator sends them to every process that is connected to it, mounts included, over the connection
//! that the process has opened; `Collect` makes it forward one of them to all of these, and returns their
//! answers.
use crate::map::Role;
use crate::{message, wire_enum};
use bytes::Bytes;

/// Processes that one `Collect` asks at most.
pub const COLLECTED_MAX: usize = 64;
/// The longest answer of one process that is forwarded.
pub const ANSWER_BYTES_MAX: usize = 120 << 10;
/// Rows, waits or points of one answer: with short names they fit into [`ANSWER_BYTES_MAX`].
pub const ROWS_MAX: usize = 512;

wire_enum!(MeterKind { Counter = 1, Gauge = 2, Histogram = 3 });

message!(
    /// Meters that the process has counted since its start.
    GetMeters = 500 by [Coordinator] -> NodeReply {}
);
message!(Meters { meters: Vec<Meter> });
message!(Meter {
    name: String,
    /// Empty: it has no label.
    label: String,
    label_value: String,
    kind: MeterKind,
    /// Value of a counter or gauge; the sum of a histogram's values.
    value: i64,
    /// Number of values of a histogram, and how many of them are in each non-empty bucket.
    count: u64,
    buckets: Vec<MeterBucket>,
});
message!(
    /// Values below `below` that are not in the previous bucket.
    MeterBucket { below: u64, count: u64 }
);

message!(
    /// Waits of the process that have lasted for `min_ms`, and those that ended within `since_s`.
    ListWaits = 501 by [Coordinator] -> NodeReply { min_ms: u32, since_s: u32 }
);
message!(WaitsListed { now: Vec<WaitSeen>, ended: Vec<WaitSeen> });
message!(WaitSeen {
    /// One word.
    reason: String,
    /// The kind and number of the object; empty: none.
    object: String,
    object_id: u64,
    /// The operation.
    action: String,
    /// The holder of the awaited object, and the node that must answer; empty: unknown.
    holder: String,
    peer: String,
    /// The user; 0: unknown.
    uid: u32,
    pid: u32,
    lasted_us: u64,
    /// How long ago it ended; 0 if it still lasts.
    ended_ms: u64,
});

message!(
    /// The work of the last seconds, by volume, user, job and kind of request.
    GetTop = 502 by [Coordinator] -> NodeReply { seconds: u32 }
);
message!(Top {
    /// The time that the rows cover.
    covered_ms: u64,
    rows: Vec<TopRow>,
});
message!(TopRow {
    /// 0: unknown.
    volume: u32,
    uid: u32,
    job: String,
    kind: String,
    requests: u64,
    bytes: u64,
    /// Total time of its requests.
    us: u64,
});

message!(
    /// The newest points of a series; without a name, the names of all series.
    GetHistory = 503 by [Coordinator] -> NodeReply { name: String, by_minute: bool, points: u32 }
);
message!(
    /// Facts about the process and its machine: kernel, memory, load, the last lines of its log.
    GetFacts = 505 by [Coordinator] -> NodeReply {}
);
message!(Facts { facts: Vec<Fact> });
message!(Fact { name: String, text: String });
message!(SeriesRead {
    names: Vec<String>,
    /// Oldest first, as the bits of a `f32`; NaN: no sample. The last one is the present one.
    points: Vec<u32>,
});

message!(
    /// Forwards a request of this file to connected processes, and answers within `patience_ms`, with or
    /// without their answers.
    Collect = 504 by [Console, Operator, Auditor] -> Collected {
        method: u16,
        body: Bytes,
        /// Only those after this one; 0: from the first on.
        after: u64,
        patience_ms: u32,
    }
);
message!(
    /// The answers are in the payload: [`Answers`].
    Collected {
        /// Where to continue; 0: these were all.
        next: u64,
    }
);
message!(Answers { answers: Vec<NodeAnswer> });
message!(NodeAnswer {
    /// The process's own name.
    name: String,
    role: Role,
    /// Differs between processes; 0: it did not answer.
    process: u64,
    /// Why there is no answer; empty: there is one.
    failure: String,
    /// The encoded reply.
    body: Bytes,
});
message!(
    /// The answer of a process: its identity, and the encoded Meters, WaitsListed, Top, SeriesRead or Facts.
    NodeReply { process: u64, name: String, body: Bytes }
);
