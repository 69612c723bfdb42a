//! Messages about evicted bytes, which are at home only, and their recall (methods 180–189).
//!
//! Sent to a namespace's metadata leader by clients (query evicted ranges, wait for a recall) and by movers
//! (take recalls).
use crate::map::Layout;
use crate::meta::{Cred, Entry, Op};
use crate::relation::RelationId;
use crate::{InodeId, SessionId, VolumeId, message};

/// Recalls that one `TakeRecalls` answers with at most.
pub const RECALLS_MAX: u32 = 64;
/// Ranges of one `EvictedRanges` answer.
pub const RANGES_MAX: usize = 4096;

message!(
    /// Bytes of a file, `to` exclusive.
    ByteRange { from: u64, to: u64 }
);
impl Copy for ByteRange {}

message!(
    /// Evicts bytes of a file: home has them. Whole stripes within the range, and the tail if the range
    /// extends to the end of the file. All leases are revoked first. `Name(Busy)`: it is open for writing, or
    /// pinned; `Denied`: home does not have all of it yet.
    Evict = 180 by [Mount, Mover, Console] -> Evicted {
        op: Op,
        cred: Cred,
        ino: InodeId,
        from: u64,
        to: u64,
        /// Not 0: the caller alone writes the file under this token epoch, has no uncommitted data in the
        /// range, and writes nothing there before the reply. It keeps its lease; the longest prefix of the
        /// range that home has is evicted, except for the stripe with the end of the file.
        under: u32,
    }
);
message!(Evicted {
    entry: Entry,
    /// The ranges evicted now; empty: there was nothing to evict.
    ranges: Vec<ByteRange>,
    /// Earlier writes have a lower one.
    token_epoch: u32,
});
message!(
    /// The evicted ranges of a file that end after `from`, in order.
    EvictedRanges = 181 by [Mount, Mover, Console] -> EvictedList { session: SessionId, ino: InodeId, from: u64 }
);
message!(EvictedList {
    ranges: Vec<ByteRange>,
    /// There are more after the last one.
    more: bool,
});
message!(
    /// Requests a recall of a range, and waits for it, `wait_ms` at most.
    AwaitRecall = 182 by [Mount, Mover, Console] -> RecallWaited { session: SessionId, ino: InodeId, from: u64, to: u64, wait_ms: u32 }
);
message!(RecallWaited {
    /// No part of the range is evicted any more.
    done: bool,
    /// It cannot be recalled now: do not wait for it. `why` has the reason.
    failed: bool,
    /// The cause of the wait.
    why: String,
});
message!(
    /// Requests a recall when movers have time for it; does not wait.
    WantRecall = 183 by [Mount, Mover, Console] -> () { session: SessionId, ino: InodeId, from: u64, to: u64 }
);
message!(
    /// A mover asks for work, and waits for some. Earlier assigned recalls that it does not list in `busy` go
    /// to other movers.
    TakeRecalls = 184 by [Mover, Console] -> RecallsTaken { session: SessionId, max: u32, wait_ms: u32, busy: Vec<RecallId> }
);
message!(RecallId { ino: InodeId, from: u64, token_epoch: u32 });
message!(RecallsTaken { recalls: Vec<RecallWork> });
message!(
    /// Bytes that a mover recalls: exactly these, under this token epoch. Whole stripes, except for the last
    /// one, which may end where the file ended when it was evicted; the rest of it is zeros.
    RecallWork {
        ino: InodeId,
        /// The object for the file's bytes.
        object: InodeId,
        layout: Layout,
        /// Present size of the file.
        size: u64,
        from: u64,
        to: u64,
        token_epoch: u32,
        /// A reader waits for it.
        awaited: bool,
    }
);
message!(
    /// All bytes of a recall are on all live targets. `Stale`: it belongs to another mover by now, or the
    /// file was truncated.
    Filled = 185 by [Mover, Console] -> () {
        op: Op, ino: InodeId, from: u64, to: u64, token_epoch: u32,
        /// Checksums of bytes that had no receipt yet.
        learned: Option<Learned>,
    }
);
message!(
    /// Data read at a home: checksums as in its receipts.
    Learned { relation: RelationId, sums: Vec<u32> }
);
message!(
    /// A recall failed. `retry`: after a pause it is assigned again; otherwise its waiters get `error`.
    RecallFailed = 186 by [Mover, Console] -> () {
        session: SessionId,
        ino: InodeId,
        from: u64,
        to: u64,
        token_epoch: u32,
        error: String,
        retry: bool,
    }
);
message!(
    /// A pinned file is never evicted. Its owner and administrators may set this.
    SetPinned = 187 by [Mount, Console] -> Entry { op: Op, cred: Cred, ino: InodeId, pinned: bool }
);
message!(
    /// Residence of a file's bytes.
    GetTierState = 188 by [Mount, Console] -> TierState { session: SessionId, ino: InodeId }
);
message!(TierState {
    size: u64,
    /// Bytes that are at home only, and their number of ranges.
    evicted: u64,
    ranges: u64,
    pinned: bool,
    /// Whether all of it may be evicted now; otherwise why not.
    at_home: bool,
    why_not: String,
    /// Recalls that wait or are running.
    recalls: Vec<RecallState>,
});
message!(RecallState {
    from: u64,
    to: u64,
    awaited: bool,
    /// The session of the mover that has it; 0: none.
    mover: SessionId,
    /// Failed tries, and the last error.
    failures: u32,
    error: String,
});
message!(
    /// How full pools and volumes are, and the eviction watermarks. `set`: changes a volume's watermarks
    /// first.
    GetEviction = 189 by [Mount, Console, User] -> Levels { session: SessionId, cred: Cred, set: Option<SetMarks> }
);
message!(
    /// Percent of the volume's limit; `high` 0: the leader's defaults.
    SetMarks { volume: VolumeId, high: u8, low: u8 }
);
message!(Levels { levels: Vec<EvictionLevel> });
message!(EvictionLevel {
    /// `None`: of the targets.
    volume: Option<VolumeId>,
    capacity: u64,
    used: u64,
    /// Above this data is evicted, until `low` is reached. Bytes used.
    high: u64,
    low: u64,
    /// They were set explicitly.
    is_set: bool,
    /// Growth of the used bytes.
    bytes_per_s: u64,
    evicting: bool,
    /// Since the leader started.
    evicted: u64,
});
message!(
    /// From the leader to the only writer of a file: evict as much of it as possible, since only the writer
    /// knows its uncommitted data.
    EvictOwn = 302 by [Meta] -> () { ino: InodeId, from: u64, to: u64 }
);
