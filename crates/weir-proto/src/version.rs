//! Versions: what two nodes speak with each other, and what a whole cluster may use.
//!
//! A *protocol version* is agreed on by the two ends of a connection: the highest that both speak. The *level* of a cluster is
//! kept in its map: what a program writes that an older one cannot read waits until every node can, and `weir upgrade finish`
//! has raised the level.
use crate::frame::Hello;
use crate::{Error, Result, message};

/// The protocol versions that this code speaks.
pub const VERSION_MIN: u16 = 1;
pub const VERSION_MAX: u16 = 1;
/// The highest level that this code knows: all that it can write.
pub const LEVEL_MAX: u16 = 1;

message!(
    /// What a node's program can.
    Program {
        /// Its release, for people.
        release: String,
        version_min: u16,
        version_max: u16,
        level: u16,
    }
);

impl Program {
    /// The one that this is compiled into.
    pub fn this() -> Program {
        Program {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            level: LEVEL_MAX,
        }
    }
}

/// The version that two nodes speak with each other; the error is for both of them.
pub fn agree(ours: &Hello, theirs: &Hello) -> Result<u16> {
    let version = ours.version_max.min(theirs.version_max);
    if version >= ours.version_min.max(theirs.version_min) {
        return Ok(version);
    }
    let older = if ours.version_max < theirs.version_max { ours } else { theirs };
    Err(Error::unsupported(format!(
        "no protocol version in common: {} speaks {}, {} speaks {}; hint: upgrade the program of {}",
        theirs.name,
        range(theirs.version_min, theirs.version_max),
        ours.name,
        range(ours.version_min, ours.version_max),
        older.name
    )))
}

/// Refuses a node that knows less than its cluster may use already.
pub fn check_level(name: &str, knows: u16, level: u16) -> Result<()> {
    if knows >= level {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{name} knows level {knows} at most, and the cluster is at level {level}; hint: upgrade the program of {name}"
    )))
}

fn range(min: u16, max: u16) -> String {
    match min == max {
        true => format!("version {min}"),
        false => format!("versions {min} to {max}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Role;

    fn hello(name: &str, version_min: u16, version_max: u16) -> Hello {
        let (name, level) = (name.to_owned(), LEVEL_MAX);
        Hello { version_min, version_max, level, cluster: None, name, role: Role::Storage, instance: 7 }
    }

    #[test]
    fn the_highest_version_that_both_speak_is_agreed_on() {
        for (ours, theirs, agreed) in [
            ((1, 1), (1, 1), Some(1)),
            ((1, 3), (2, 5), Some(3)),
            ((2, 5), (1, 3), Some(3)),
            ((1, 2), (1, 9), Some(2)),
            ((1, 2), (3, 4), None),
            ((3, 4), (1, 2), None),
        ] {
            let (ours, theirs) = (hello("a", ours.0, ours.1), hello("b", theirs.0, theirs.1));
            assert_eq!(agree(&ours, &theirs).ok(), agreed, "{ours:?} {theirs:?}");
        }
    }

    #[test]
    fn a_refusal_names_both_ranges_and_what_to_do() {
        let refused = agree(&hello("new", 3, 4), &hello("old", 1, 1)).unwrap_err();
        assert_eq!(
            refused.context,
            "no protocol version in common: old speaks version 1, new speaks versions 3 to 4; hint: upgrade the program \
             of old"
        );
        assert!(agree(&hello("old", 1, 1), &hello("new", 3, 4)).unwrap_err().context.ends_with("of old"));
        assert!(check_level("m1", 2, 2).is_ok());
        let refused = check_level("m1", 1, 2).unwrap_err().context;
        assert!(refused.contains("m1 knows level 1") && refused.contains("at level 2"), "{refused}");
    }
}
