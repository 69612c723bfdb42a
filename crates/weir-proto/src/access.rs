//! Rules for mounts: which node may use which volumes, and which ids its users have there. An ordered list in
//! the cluster map.
//!
//! This file has the content of a rule and its validity; `weir-trust` decides which rules apply to a mount.
use crate::network::Network;
use crate::{Error, Reader, Result, Wire, Writer};
use crate::{message, wire_enum, wire_union};
use std::fmt;

/// Rules of one cluster: every node receives them with each map.
pub const RULES_MAX: usize = 256;
/// Networks, grants of volumes, and ranges of ids of one rule.
pub const PARTS_MAX: usize = 64;
/// Bytes of a rule's name, and of a glob.
pub const WORD_MAX: usize = 256;
/// The id for users without a mapping: Linux' `nobody`.
pub const NOBODY: u32 = 65534;

wire_enum!(
    /// A mount's access to a volume.
    Grant { Refused = 1, ReadOnly = 2, ReadWrite = 3 }
);
wire_enum!(
    /// Treatment of root on a mount's machine.
    RootIs { Squashed = 1, Kept = 2 }
);
message!(
    /// Applies to volumes whose name matches the glob, or whose path, if the glob begins with `/`.
    VolumeGrant { glob: String, grant: Grant }
);
message!(
    /// The ids from `from` on are mapped to those from `to` on.
    #[derive(Copy)]
    IdRange { from: u32, to: u32, count: u32 }
);
wire_union!(
    /// The ids that users get.
    IdsAre {
        /// The ids that the mount sends.
        Claimed = 1 {},
        /// All users are mapped to this one.
        All = 2 { uid: u32, gid: u32 },
        /// By range; an id in no range is mapped to [`NOBODY`].
        Mapped = 3 { uids: Vec<IdRange>, gids: Vec<IdRange> },
    }
);
message!(
    /// The audited operations in volumes whose name matches the glob, or whose path, if the glob begins with
    /// `/`. The first rule that matches a volume applies.
    AuditRule {
        volumes: String,
        /// Opens of files, with the user.
        opens: bool,
        /// Changes of names, attributes and bytes, with the user.
        changes: bool,
    }
);
message!(
    /// A rule applies to a node and a volume: the first one that matches both decides.
    AccessRule {
        /// Unique.
        name: String,
        /// Glob of the node's name.
        who: String,
        /// Networks from which the node connects; empty: any, also a Unix socket.
        from: Vec<Network>,
        /// The first glob that matches applies.
        volumes: Vec<VolumeGrant>,
        root: RootIs,
        ids: IdsAre,
    }
);
/// The rules of a cluster, in order.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct AccessRules(pub Vec<AccessRule>);

impl AccessRules {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
impl Wire for AccessRules {
    fn encode(&self, w: &mut Writer) {
        self.0.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<AccessRules> {
        let rules = AccessRules(Wire::decode(r)?);
        at_most("rules for mounts", rules.0.len(), RULES_MAX)?;
        rules.0.iter().try_for_each(AccessRule::check_sizes)?;
        Ok(rules)
    }
}

impl AccessRule {
    /// Refuses rules that cannot be evaluated, and mappings that would make a user root by mistake.
    pub fn check(&self) -> Result<()> {
        self.check_sizes()?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty() || !self.name.chars().all(is_plain) {
            return Err(Error::invalid(format!(
                "rule {:?}: a name has letters, digits, '-', '_' and '.' only",
                self.name
            )));
        }
        let refuse = |why: &str| Err(Error::invalid(format!("rule {:?}: {why}", self.name)));
        if self.who.is_empty() || self.volumes.iter().any(|v| v.glob.is_empty()) {
            return refuse("an empty glob matches nothing").map_err(|e| e.hint("'*' matches everything"));
        }
        if self.volumes.is_empty() {
            return refuse("it names no volume").map_err(|e| e.hint("'*' matches all"));
        }
        match &self.ids {
            IdsAre::Claimed {} => Ok(()),
            IdsAre::All { uid, gid } if is_user(*uid) && is_user(*gid) => Ok(()),
            IdsAre::All { .. } => refuse("all users would be the superuser, or in its group")
                .map_err(|e| e.hint("name other ids, or `--root keep`")),
            IdsAre::Mapped { uids, gids } => match uids.iter().chain(gids).all(|range| range.is_sound()) {
                true => Ok(()),
                false => refuse("a range of ids begins above 0, is not empty, and ends below 4294967295"),
            },
        }
    }

    fn check_sizes(&self) -> Result<()> {
        at_most("networks of a rule", self.from.len(), PARTS_MAX)?;
        at_most("volumes of a rule", self.volumes.len(), PARTS_MAX)?;
        if let IdsAre::Mapped { uids, gids } = &self.ids {
            at_most("ranges of ids of a rule", uids.len().max(gids.len()), PARTS_MAX)?;
        }
        let globs = self.volumes.iter().map(|v| v.glob.len()).max().unwrap_or(0);
        at_most("bytes of a name or a glob", self.name.len().max(self.who.len()).max(globs), WORD_MAX)
    }
}

impl IdRange {
    /// The mapped id.
    pub fn map(&self, id: u32) -> Option<u32> {
        let at = id.checked_sub(self.from).filter(|at| *at < self.count)?;
        self.to.checked_add(at).filter(|to| is_user(*to))
    }
    fn is_sound(&self) -> bool {
        let ends_well = |first: u32| first.checked_add(self.count).is_some();
        self.count > 0 && self.from > 0 && self.to > 0 && ends_well(self.from) && ends_well(self.to)
    }
}

/// In the form of the command line.
impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Grant::Refused => "none",
            Grant::ReadOnly => "ro",
            Grant::ReadWrite => "rw",
        })
    }
}

impl fmt::Display for RootIs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RootIs::Squashed => "squash",
            RootIs::Kept => "keep",
        })
    }
}

impl fmt::Display for IdsAre {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = |kind: &str, all: &[IdRange]| -> Vec<String> {
            all.iter().map(|r| format!("{kind}:{}:{}:{}", r.from, r.to, r.count)).collect()
        };
        match self {
            IdsAre::Claimed {} => f.write_str("claimed"),
            IdsAre::All { uid, gid } => write!(f, "all {uid}:{gid}"),
            IdsAre::Mapped { uids, gids } => {
                f.write_str(&[ranges("u", uids), ranges("g", gids)].concat().join(" "))
            }
        }
    }
}

impl fmt::Display for AccessRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AccessRule { name, who, root, ids, .. } = self;
        let networks: Vec<String> = self.from.iter().map(ToString::to_string).collect();
        let from = if networks.is_empty() { String::new() } else { format!(" from {}", networks.join(", ")) };
        let volumes: Vec<String> = self.volumes.iter().map(|v| format!("{} {}", v.glob, v.grant)).collect();
        write!(f, "{name}: nodes {who}{from}, volumes {}, root {root}, ids {ids}", volumes.join(", "))
    }
}

/// Neither root's id nor the reserved id for "none".
fn is_user(id: u32) -> bool {
    id != 0 && id != u32::MAX
}

fn at_most(what: &str, count: usize, most: usize) -> Result<()> {
    if count <= most { Ok(()) } else { Err(Error::invalid(format!("{count} {what}: at most {most}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn rule(ids: IdsAre) -> AccessRule {
        AccessRule {
            name: "batch".into(),
            who: "node-*".into(),
            from: vec![],
            volumes: vec![VolumeGrant { glob: "*".into(), grant: Grant::ReadWrite }],
            root: RootIs::Squashed,
            ids,
        }
    }

    #[test]
    fn a_rule_that_is_wrong_is_refused_with_the_reason() {
        rule(IdsAre::Claimed {}).check().unwrap();
        rule(IdsAre::All { uid: 1000, gid: 1000 }).check().unwrap();
        let wrong = |change: &dyn Fn(&mut AccessRule), words: &str| {
            let mut rule = rule(IdsAre::Claimed {});
            change(&mut rule);
            let e = rule.check().unwrap_err();
            assert!(e.context.contains(words), "{e} lacks {words:?}");
        };
        wrong(&|r| r.name = "a b".into(), "letters, digits");
        wrong(&|r| r.name.clear(), "letters, digits");
        wrong(&|r| r.who.clear(), "empty glob");
        wrong(&|r| r.volumes[0].glob.clear(), "empty glob");
        wrong(&|r| r.volumes.clear(), "names no volume");
        wrong(&|r| r.who = "*".repeat(WORD_MAX + 1), "at most 256");
        wrong(&|r| r.from = vec!["::1".parse().unwrap(); PARTS_MAX + 1], "at most 64");
        wrong(&|r| r.ids = IdsAre::All { uid: 0, gid: 5 }, "superuser");
        let mapped =
            |from, to, count| IdsAre::Mapped { uids: vec![IdRange { from, to, count }], gids: vec![] };
        for (from, to, count) in [(0, 5, 1), (5, 0, 1), (5, 5, 0), (u32::MAX, 5, 1), (5, u32::MAX - 1, 3)] {
            wrong(&|r| r.ids = mapped(from, to, count), "range of ids");
        }
        let range = IdRange { from: 1000, to: 5000, count: 10 };
        assert_eq!([999, 1000, 1009, 1010].map(|id| range.map(id)), [None, Some(5000), Some(5009), None]);
    }

    #[test]
    fn too_many_rules_are_no_map() {
        let rules = |n| AccessRules(vec![rule(IdsAre::Claimed {}); n]);
        assert_eq!(AccessRules::from_bytes(&rules(RULES_MAX).to_bytes()), Ok(rules(RULES_MAX)));
        assert!(AccessRules::from_bytes(&rules(RULES_MAX + 1).to_bytes()).is_err());
    }

    #[test]
    fn a_rule_is_shown_in_words() {
        let uids = vec![IdRange { from: 1000, to: 5000, count: 10 }];
        let gids = vec![IdRange { from: 100, to: 700, count: 5 }];
        let of = |glob: &str, grant| VolumeGrant { glob: glob.into(), grant };
        let volumes = vec![of("p*", Grant::ReadOnly), of("s", Grant::Refused)];
        let from = vec!["10.1.0.0/16".parse().unwrap()];
        let rule = AccessRule { from, volumes, ..rule(IdsAre::Mapped { uids, gids }) };
        assert_eq!(
            rule.to_string(),
            "batch: nodes node-* from 10.1.0.0/16, volumes p* ro, s none, root squash, ids u:1000:5000:10 g:100:700:5"
        );
    }
}
