//! Points at which a test may end the process: see [`weir_env::Tasks::crash_point`].

/// A transaction is made, and not in the journal yet.
pub const COMMITTED: &str = "kv-committed";
/// Records are written, not synced.
pub const WRITTEN: &str = "kv-written";
/// Records are synced, and not acknowledged yet.
pub const SYNCED: &str = "kv-synced";
/// The next segment has begun, and the old one waits for its fold.
pub const SEGMENT_ENDED: &str = "kv-segment-ended";
/// Segments are in the tree, and their files still exist.
pub const FOLDED: &str = "kv-folded";

/// A copy has recorded that it truncates its records.
pub const TRUNCATION_NOTED: &str = "kv-truncate-noted";
/// The end of the truncated segment is written, not synced.
pub const TRUNCATION_CLEARED: &str = "kv-truncate-cleared";
/// A segment after the truncation is removed.
pub const TRUNCATION_REMOVED: &str = "kv-truncate-removed";
/// The truncation is complete, and its record still exists.
pub const TRUNCATION_DONE: &str = "kv-truncate-done";

/// Crash points of a copy that truncates its records.
pub const OF_TRUNCATIONS: [&str; 4] =
    [TRUNCATION_NOTED, TRUNCATION_CLEARED, TRUNCATION_REMOVED, TRUNCATION_DONE];

/// Crash points of any store.
pub const ALL: [&str; 5] = [COMMITTED, WRITTEN, SYNCED, SEGMENT_ENDED, FOLDED];
