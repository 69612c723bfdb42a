//! Points at which a test may end the process: see [`weir_env::Tasks::crash_point`].

/// Bulk bytes are in a slab, and no index entry names them.
pub const BYTES_WRITTEN: &str = "store-bytes-written";
/// A fragment is in the index, and not durable there.
pub const FRAGMENT_LOGGED: &str = "store-fragment-logged";
/// An overlay has its number, and no mirror has it.
pub const NUMBERED: &str = "store-overlay-numbered";
/// An overlay that another member numbered is durable here; the sequencer has no acknowledgement yet.
pub const MIRRORED: &str = "store-overlay-mirrored";
/// All keepers of the log have an overlay; its writer has no acknowledgement yet.
pub const OVERLAY_DURABLE: &str = "store-overlay-durable";
/// Overlays have moved from the journal to a slab.
pub const SPILLED: &str = "store-spilled";
/// Every data target has folded its overlays; parity is not prepared.
pub const SEAL_FOLDED: &str = "store-seal-folded";
/// Every participant has prepared a seal, none has committed it.
pub const SEAL_PREPARED: &str = "store-seal-prepared";
/// The other members have committed a seal, its leader has not.
pub const SEAL_HALF: &str = "store-seal-half";
/// A stripe's new version is committed here; the writer has no acknowledgement yet.
pub const COMMITTED: &str = "store-committed";
/// A truncation's fence is raised, and the file's cells are still stored.
pub const FENCED: &str = "store-fenced";
/// A fragment that was missed is rebuilt and installed.
pub const REBUILT: &str = "store-rebuilt";
/// Overlays that were missed are installed.
pub const COPIED: &str = "store-overlays-copied";

pub const ALL: [&str; 13] = [
    BYTES_WRITTEN,
    FRAGMENT_LOGGED,
    NUMBERED,
    MIRRORED,
    OVERLAY_DURABLE,
    SPILLED,
    SEAL_FOLDED,
    SEAL_PREPARED,
    SEAL_HALF,
    COMMITTED,
    FENCED,
    REBUILT,
    COPIED,
];
