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

pub const ALL: [&str; 5] = [COMMITTED, WRITTEN, SYNCED, SEGMENT_ENDED, FOLDED];
