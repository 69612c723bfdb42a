//! Points at which a test may end the process: see [`weir_env::Tasks::pass`].

/// A client's change is made, and not durable.
pub const CHANGED: &str = "meta-changed";
/// A change of the leader itself (a session's end, a deleted file) is made, and not durable.
pub const HOUSEKEPT: &str = "meta-housekept";
/// Leases are being revoked, and the change that needs them has not begun.
pub const REVOKING: &str = "meta-revoking";
/// A deleted file's cells are gone from the targets, and its record still exists.
pub const SWEPT: &str = "meta-swept";

pub const ALL: [&str; 4] = [CHANGED, HOUSEKEPT, REVOKING, SWEPT];
