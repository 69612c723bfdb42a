//! Messages about evicted bytes: those that are at home only, and how they come back (methods 180–189).
//!
//! Sent to a namespace's metadata leader by clients (what is evicted, wait for it) and by movers (what to
//! fetch).
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
    /// Gives the space of a file's bytes back: home has them. Whole stripes within the range, and the tail if
    /// the range goes to the end of the file. Everybody's leases are recalled first. `Name(Busy)`: it is open
    /// for writing, or pinned; `Denied`: home does not have all of it yet.
    Evict = 180 by [Mount, Mover, Console] -> Evicted {
        op: Op,
        cred: Cred,
        ino: InodeId,
        from: u64,
        to: u64,
        /// Other than 0: the caller alone writes the file under this token epoch, has nothing of the range
        /// that is not committed, and begins nothing there before the answer. It keeps its lease; what home
        /// has of the range from its beginning on goes, but for the stripe with the end of the file.
        under: u32,
    }
);
message!(Evicted {
    entry: Entry,
    /// What was evicted now; empty: nothing was there.
    ranges: Vec<ByteRange>,
    /// What was written before has a lower one.
    token_epoch: u32,
});
message!(
    /// The evicted ranges of a file that end after `from`, in order.
    EvictedRanges = 181 by [Mount, Mover, Console] -> EvictedList { session: SessionId, ino: InodeId, from: u64 }
);
message!(EvictedList {
    ranges: Vec<ByteRange>,
    /// There are more behind the last one.
    more: bool,
});
message!(
    /// Has the evicted bytes of a range brought back, and waits for it, `wait_ms` at most.
    AwaitRecall = 182 by [Mount, Mover, Console] -> RecallWaited { session: SessionId, ino: InodeId, from: u64, to: u64, wait_ms: u32 }
);
message!(RecallWaited {
    /// Nothing of the range is evicted any more.
    done: bool,
    /// It cannot be brought back now: do not wait for it. `why` says why.
    failed: bool,
    /// What it waits for.
    why: String,
});
message!(
    /// Has the range brought back when movers have time for it; waits for nothing.
    WantRecall = 183 by [Mount, Mover, Console] -> () { session: SessionId, ino: InodeId, from: u64, to: u64 }
);
message!(
    /// A mover asks for work, and waits for some. What it was given before and does not name in `busy` goes
    /// to others.
    TakeRecalls = 184 by [Mover, Console] -> RecallsTaken { session: SessionId, max: u32, wait_ms: u32, busy: Vec<RecallId> }
);
message!(RecallId { ino: InodeId, from: u64, token_epoch: u32 });
message!(RecallsTaken { recalls: Vec<RecallWork> });
message!(
    /// Bytes that a mover brings back: exactly these, under this token epoch. Whole stripes, but for the last
    /// one, which may end where the file ended when it was evicted; what is behind in it is zeros.
    RecallWork {
        ino: InodeId,
        /// Where the file's bytes go.
        object: InodeId,
        layout: Layout,
        /// Of the file now.
        size: u64,
        from: u64,
        to: u64,
        token_epoch: u32,
        /// Somebody waits for it.
        awaited: bool,
    }
);
message!(
    /// All of a recall is on all live targets. `Stale`: it is another's meanwhile, or the file was truncated.
    Filled = 185 by [Mover, Console] -> () {
        op: Op, ino: InodeId, from: u64, to: u64, token_epoch: u32,
        /// Of bytes that no receipt proved before.
        learned: Option<Learned>,
    }
);
message!(
    /// What was read at a home: checksums as in its receipts.
    Learned { relation: RelationId, sums: Vec<u32> }
);
message!(
    /// A recall ended without its bytes. `retry`: after a pause it is given out again; else whoever waits is
    /// told `error`.
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
    /// A pinned file is never evicted. Its owner's or the administrator's to say.
    SetPinned = 187 by [Mount, Console] -> Entry { op: Op, cred: Cred, ino: InodeId, pinned: bool }
);
message!(
    /// Where a file's bytes are.
    GetTierState = 188 by [Mount, Console] -> TierState { session: SessionId, ino: InodeId }
);
message!(TierState {
    size: u64,
    /// Of it, at home only, in how many ranges.
    evicted: u64,
    ranges: u64,
    pinned: bool,
    /// Whether all of it may be evicted now; else why not.
    at_home: bool,
    why_not: String,
    /// Recalls that wait or are under way.
    recalls: Vec<RecallState>,
});
message!(RecallState {
    from: u64,
    to: u64,
    awaited: bool,
    /// The session of the mover that has it; 0: nobody.
    mover: SessionId,
    /// Tries that failed, and the last error.
    failures: u32,
    error: String,
});
message!(
    /// How full pools and volumes are, and the eviction watermarks. `set`: changes a volume's marks first.
    GetEviction = 189 by [Mount, Console, User] -> Levels { session: SessionId, cred: Cred, set: Option<SetMarks> }
);
message!(
    /// Hundredths of the volume's limit; `high` 0: as the leader finds them itself.
    SetMarks { volume: VolumeId, high: u8, low: u8 }
);
message!(Levels { levels: Vec<EvictionLevel> });
message!(EvictionLevel {
    /// `None`: the targets.
    volume: Option<VolumeId>,
    capacity: u64,
    used: u64,
    /// Above this data is evicted, until `low` is reached. Bytes used.
    high: u64,
    low: u64,
    /// Somebody has set them.
    is_set: bool,
    /// How fast it fills.
    bytes_per_s: u64,
    evicting: bool,
    /// Since the leader started.
    evicted: u64,
});
message!(
    /// From the leader to who writes a file alone: evict what you can of it, for only you know what is not
    /// committed.
    EvictOwn = 302 by [Meta] -> () { ino: InodeId, from: u64, to: u64 }
);
