//! Messages by which nodes show what they count, what they wait for and for whom they work (methods 500–509).
//!
//! The coordinator sends them to every process that is connected to it, mounts included, over the connection
//! that the process has made; `Gather` has it pass one of them to all of these, and answers with what they
//! said.
use crate::map::Role;
use crate::{message, wire_enum};
use bytes::Bytes;

/// Processes that one `Gather` asks at most.
pub const GATHERED_MAX: usize = 64;
/// The longest answer of one process that is passed on.
pub const ANSWER_BYTES_MAX: usize = 120 << 10;
/// Rows, waits or points of one answer: with short names they fit into [`ANSWER_BYTES_MAX`].
pub const ROWS_MAX: usize = 512;

wire_enum!(MeterKind { Counter = 1, Gauge = 2, Histogram = 3 });

message!(
    /// What the process has counted since its start.
    GetMeters = 500 by [Coordinator] -> Told {}
);
message!(Meters { meters: Vec<Meter> });
message!(Meter {
    name: String,
    /// Empty: it has no label.
    label: String,
    label_value: String,
    kind: MeterKind,
    /// Of a counter or gauge; the sum of a histogram's values.
    value: i64,
    /// Of a histogram, and how many of them are in each bucket that has some.
    count: u64,
    buckets: Vec<MeterBucket>,
});
message!(
    /// Values below `below`, and not in the bucket before it.
    MeterBucket { below: u64, count: u64 }
);

message!(
    /// Waits of the process that have lasted for `min_ms`, and those that ended within `since_s`.
    ListWaits = 501 by [Coordinator] -> Told { min_ms: u32, since_s: u32 }
);
message!(WaitsListed { now: Vec<WaitSeen>, past: Vec<WaitSeen> });
message!(WaitSeen {
    /// One word.
    reason: String,
    /// The kind of thing, and its number; empty: none.
    object: String,
    object_id: u64,
    /// What is being done.
    action: String,
    /// Who has what is waited for, and the node that has to answer; empty: not known.
    holder: String,
    peer: String,
    /// For whom; 0: not known.
    uid: u32,
    pid: u32,
    lasted_us: u64,
    /// How long ago it ended; 0 for one that lasts.
    ended_ms: u64,
});

message!(
    /// The work of the last seconds, by volume, user, job and kind of request.
    GetTop = 502 by [Coordinator] -> Told { seconds: u32 }
);
message!(Top {
    /// The time that the rows are of.
    covered_ms: u64,
    rows: Vec<TopRow>,
});
message!(TopRow {
    /// 0: not known.
    volume: u32,
    uid: u32,
    job: String,
    kind: String,
    requests: u64,
    bytes: u64,
    /// How long its requests took in all.
    us: u64,
});

message!(
    /// The newest points of a series; without a name, the names of all series.
    GetHistory = 503 by [Coordinator] -> Told { name: String, by_minute: bool, points: u32 }
);
message!(
    /// What the process says of itself and its machine: kernel, memory, load, the last lines of its log.
    GetFacts = 505 by [Coordinator] -> Told {}
);
message!(Facts { facts: Vec<Fact> });
message!(Fact { name: String, text: String });
message!(SeriesRead {
    names: Vec<String>,
    /// Oldest first, as the bits of a `f32`; NaN: none was taken then. The last one is of now.
    points: Vec<u32>,
});

message!(
    /// Passes a request of this file to processes that are connected, and answers within `patience_ms`,
    /// whoever is silent.
    Gather = 504 by [Console, Operator, Auditor] -> Gathered {
        method: u16,
        body: Bytes,
        /// Only those that come after this one; 0: from the first on.
        after: u64,
        patience_ms: u32,
    }
);
message!(
    /// The answers are in the payload: [`Answers`].
    Gathered {
        /// Where to go on; 0: these were all.
        next: u64,
    }
);
message!(Answers { answers: Vec<NodeAnswer> });
message!(NodeAnswer {
    /// As the process calls itself.
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
    /// The answer of a process: who it is, and the encoded Meters, WaitsListed, Top, SeriesRead or Facts.
    Told { process: u64, name: String, body: Bytes }
);
