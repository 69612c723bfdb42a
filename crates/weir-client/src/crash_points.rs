//! Points at which a test may end the process: see [`weir_env::Tasks::pass`].

/// A stripe is durable at its targets, and the file's size does not cover it yet.
pub const SENT: &str = "client-sent";
/// A file's bytes and size are durable, and no waiting caller has its answer yet.
pub const FLUSHED: &str = "client-flushed";
/// Everything under a lease is written back, and the lease is not returned yet.
pub const WRITTEN_BACK: &str = "client-written-back";

pub const ALL: [&str; 3] = [SENT, FLUSHED, WRITTEN_BACK];
