//! Points at which a test may end the process: see [`weir_env::Tasks::pass`].

/// A transaction is made, and in no journal yet.
pub const COMMITTED: &str = "kv-committed";
/// Records are written, not synced.
pub const WRITTEN: &str = "kv-written";
/// Records are synced, and nobody has been told.
pub const SYNCED: &str = "kv-synced";
/// The next segment has begun, and the old one waits for its fold.
pub const SEGMENT_ENDED: &str = "kv-segment-ended";
/// Segments are in the tree, and are still there.
pub const FOLDED: &str = "kv-folded";

/// A copy has noted that it cuts records off.
pub const CUT_NOTED: &str = "kv-cut-noted";
/// The end of the segment that is cut is written, not synced.
pub const CUT_CLEARED: &str = "kv-cut-cleared";
/// A segment behind the cut is removed.
pub const CUT_REMOVED: &str = "kv-cut-removed";
/// All is cut off, and the note is still there.
pub const CUT_DONE: &str = "kv-cut-done";

/// Where a copy dies that cuts records off.
pub const OF_CUTS: [&str; 4] = [CUT_NOTED, CUT_CLEARED, CUT_REMOVED, CUT_DONE];

/// Where any store dies.
pub const ALL: [&str; 5] = [COMMITTED, WRITTEN, SYNCED, SEGMENT_ENDED, FOLDED];
