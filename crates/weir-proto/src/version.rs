//! Versions: the protocol of a connection, and the level of a whole cluster.
//!
//! A *protocol version* is agreed on by the two ends of a connection: the highest that both speak. The
//! *level* of a cluster is kept in its map: records that an older program cannot read are written only when
//! every node can read them and `weir upgrade finish` has raised the level.
use crate::{Error, Result, message};

/// The protocol versions that this code speaks.
pub const VERSION_MIN: u16 = 1;
pub const VERSION_MAX: u16 = 2;
/// From this one on, the cluster map is sent as news in the payload of replies ([`crate::news`]).
pub const VERSION_OF_NEWS: u16 = 2;
/// The highest level that this program supports.
pub const LEVEL_MAX: u16 = 6;
/// From this one on, the coordinator's state has the whole map at intervals, and changes between.
pub const LEVEL_OF_STEPS: u16 = 2;
/// From this one on, a namespace may have copies.
pub const LEVEL_OF_COPIES: u16 = 3;
/// From this one on, places move from one target to another, and new targets get groups of their own.
pub const LEVEL_OF_GROWTH: u16 = 3;
/// From this one on, a lost target's places move to others, and seals continue while a member is filled.
pub const LEVEL_OF_REPLACEMENT: u16 = 3;
/// From this one on, metadata leaders record in which volumes a session may hold leases.
pub const LEVEL_OF_HOLDS: u16 = 4;
/// From this one on, a volume may have a write floor.
pub const LEVEL_OF_FLOORS: u16 = 4;
/// From this one on, a client may make a directory together with a lease on its names.
pub const LEVEL_OF_NEW_NAMES: u16 = 4;
/// From this one on, several extents of a cell are written in one message.
pub const LEVEL_OF_OVERLAY_PARTS: u16 = 5;
/// From this one on, changes are answered before they are durable: any leader makes them again.
pub const LEVEL_OF_EARLY_ANSWERS: u16 = 6;

message!(
    /// Versions of a node's program.
    Program {
        /// Its release, for messages.
        release: String,
        version_min: u16,
        version_max: u16,
        level: u16,
    }
);

impl Program {
    /// This program.
    pub fn this() -> Program {
        Program {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            level: LEVEL_MAX,
        }
    }
}

/// Refuses a node that supports less than its cluster's level.
pub fn check_level(name: &str, knows: u16, level: u16) -> Result<()> {
    if knows >= level {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{name} knows level {knows} at most, and the cluster is at level {level}"
    ))
    .hint(format!("upgrade the program of {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_knows_too_little_is_refused_by_name() {
        assert!(check_level("m1", 2, 2).is_ok());
        let refused = check_level("m1", 1, 2).unwrap_err().context;
        assert!(refused.contains("m1 knows level 1") && refused.contains("at level 2"), "{refused}");
    }
}
