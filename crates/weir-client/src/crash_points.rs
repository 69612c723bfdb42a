//! Points at which a test may end the process: see [`weir_env::Tasks::pass`].

/// A stripe is durable at its targets, and the file's size does not cover it yet.
pub const SENT: &str = "client-sent";
/// A file's bytes and size are durable, and whoever waits for that has not been told.
pub const FLUSHED: &str = "client-flushed";
/// Everything under a lease is written back, and the lease is not given back.
pub const WRITTEN_BACK: &str = "client-written-back";

pub const ALL: [&str; 3] = [SENT, FLUSHED, WRITTEN_BACK];
