//! A node's access to a volume by the rules for mounts, and its mapped users.
//!
//! Invariant: the decision depends on the rules, the node's address and authentication, and the volume, and
//! on nothing else. If no rule decides, a node with a certificate may use every volume, but its root is
//! squashed; any other node has full access. A node that a rule names has only the volumes of its rules.
use std::net::IpAddr;
use weir_proto::access::{AccessRule, Grant, IdRange, IdsAre, NOBODY, RootIs};
use weir_proto::glob::fits;
use weir_proto::meta::Cred;

/// The node that asks, as far as it is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    /// The node's name.
    pub name: String,
    pub from: From,
    /// A certificate proves the name.
    pub certified: bool,
}

/// The address of a node's connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum From {
    /// A Unix socket of a server's machine.
    Local,
    Network(IpAddr),
    /// It is in no network that a rule can name.
    Unknown,
}

/// Name and path of a volume.
#[derive(Clone, Copy, Debug)]
pub struct Called<'a> {
    pub name: &'a str,
    /// The path of its root directory in the namespace.
    pub path: &'a str,
}

/// A node's access to a volume, and its mapped users.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    pub grant: Grant,
    pub root: RootIs,
    pub ids: IdsAre,
    /// The name of the deciding rule; absent: none.
    pub rule: Option<String>,
    pub why: String,
}

/// A node's access to a volume.
pub fn decide(rules: &[AccessRule], origin: &Origin, volume: Called<'_>) -> Decision {
    let mut named = None;
    for rule in rules.iter().filter(|rule| names(rule, origin)) {
        let found = rule.volumes.iter().find(|v| matches(&v.glob, volume));
        if let Some(found) = found {
            return Decision {
                grant: found.grant,
                root: rule.root,
                ids: rule.ids.clone(),
                rule: Some(rule.name.clone()),
                why: format!(
                    "rule {:?} names node {:?} and volume {:?}",
                    rule.name, origin.name, volume.name
                ),
            };
        }
        named = named.or(Some(rule));
    }
    match named {
        Some(rule) => {
            let why = format!(
                "rule {:?} names node {:?}, but no rule for this node names volume {:?}",
                rule.name, origin.name, volume.name
            );
            Decision { grant: Grant::Refused, ..of_rule(rule, why) }
        }
        None => without_rule(origin),
    }
}

/// A node's access to files that are in no volume yet.
pub fn outside_of_volumes(rules: &[AccessRule], origin: &Origin) -> Decision {
    match rules.iter().find(|rule| names(rule, origin)) {
        Some(rule) => of_rule(rule, format!("rule {:?} names node {:?}", rule.name, origin.name)),
        None => without_rule(origin),
    }
}

/// Whether a node's access is restricted, or its users are mapped.
pub fn concern(rules: &[AccessRule], origin: &Origin) -> bool {
    origin.certified || rules.iter().any(|rule| names(rule, origin))
}

fn of_rule(rule: &AccessRule, why: String) -> Decision {
    let (root, ids) = (rule.root, rule.ids.clone());
    Decision { grant: Grant::ReadWrite, root, ids, rule: Some(rule.name.clone()), why }
}

fn without_rule(origin: &Origin) -> Decision {
    let (root, who) = match (origin.certified, origin.from) {
        (true, _) => (RootIs::Squashed, "it has a certificate, so its superuser becomes user 65534"),
        (false, From::Local) => (RootIs::Kept, "it connects by a Unix socket of a server's machine"),
        (false, _) => (RootIs::Kept, "it has no certificate"),
    };
    let why = format!("no rule names node {:?}; {who}", origin.name);
    Decision { grant: Grant::ReadWrite, root, ids: IdsAre::Claimed {}, rule: None, why }
}

fn names(rule: &AccessRule, origin: &Origin) -> bool {
    let from_there = || match origin.from {
        From::Network(address) => rule.from.iter().any(|network| network.contains(address)),
        From::Local | From::Unknown => false,
    };
    fits(&rule.who, &origin.name) && (rule.from.is_empty() || from_there())
}

fn matches(glob: &str, volume: Called<'_>) -> bool {
    fits(glob, if glob.starts_with('/') { volume.path } else { volume.name })
}

impl Decision {
    /// The effective user, in place of the one that the mount sends.
    pub fn acts_as(&self, claimed: &Cred) -> Cred {
        let keeps_root = self.root == RootIs::Kept;
        if keeps_root && claimed.uid == 0 {
            return claimed.clone();
        }
        let (user, group) = match &self.ids {
            IdsAre::All { uid, gid } => return Cred { uid: *uid, gid: *gid, groups: vec![*gid] },
            IdsAre::Claimed {} => (Some(claimed.uid), Some(claimed.gid)),
            IdsAre::Mapped { uids, gids } => (mapped(uids, claimed.uid), mapped(gids, claimed.gid)),
        };
        let plain = |id: Option<u32>, was: u32| match was {
            0 if keeps_root => 0,
            0 => NOBODY,
            _ => id.unwrap_or(NOBODY),
        };
        let mut groups: Vec<u32> = claimed.groups.iter().filter_map(|group| self.group(*group)).collect();
        groups.sort_unstable();
        groups.dedup();
        Cred { uid: plain(user, claimed.uid), gid: plain(group, claimed.gid), groups }
    }

    /// A mapped supplementary group; none: it is dropped.
    fn group(&self, claimed: u32) -> Option<u32> {
        match &self.ids {
            _ if claimed == 0 => (self.root == RootIs::Kept).then_some(0),
            IdsAre::Claimed {} => Some(claimed),
            IdsAre::All { gid, .. } => Some(*gid),
            IdsAre::Mapped { gids, .. } => mapped(gids, claimed),
        }
    }
}

fn mapped(ranges: &[IdRange], id: u32) -> Option<u32> {
    ranges.iter().find_map(|range| range.map(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::access::VolumeGrant;

    fn origin(name: &str, from: &str, certified: bool) -> Origin {
        let from = match from {
            "local" => From::Local,
            "?" => From::Unknown,
            address => From::Network(address.parse().unwrap()),
        };
        Origin { name: name.into(), from, certified }
    }
    /// `who`, networks, volumes.
    fn rule(name: &str, who: &str, from: &[&str], volumes: &[(&str, Grant)]) -> AccessRule {
        AccessRule {
            name: name.into(),
            who: who.into(),
            from: from.iter().map(|net| net.parse().unwrap()).collect(),
            volumes: volumes
                .iter()
                .map(|(glob, grant)| VolumeGrant { glob: (*glob).into(), grant: *grant })
                .collect(),
            root: RootIs::Squashed,
            ids: IdsAre::Claimed {},
        }
    }
    fn called(name: &str) -> Called<'_> {
        Called { name, path: "/data/p1" }
    }

    #[test]
    fn without_a_rule_only_a_certificate_squashes_root() {
        let keeps = |of: Origin| {
            let decision = decide(&[], &of, called("p1"));
            assert_eq!(
                (decision.grant, decision.rule, decision.ids),
                (Grant::ReadWrite, None, IdsAre::Claimed {})
            );
            assert_eq!(concern(&[], &of), of.certified);
            decision.root == RootIs::Kept
        };
        assert!(keeps(origin("a", "local", false)) && keeps(origin("a", "10.0.0.1", false)));
        assert!(keeps(origin("a", "?", false)));
        assert!(!keeps(origin("a", "local", true)) && !keeps(origin("a", "::1", true)));
    }

    #[test]
    fn the_first_rule_that_names_node_and_volume_decides() {
        use Grant::{ReadOnly, ReadWrite, Refused};
        let rules = [
            rule("near", "node-*", &["10.1.0.0/16", "2001:db8::/32"], &[("p1", ReadWrite), ("p*", ReadOnly)]),
            rule("secret", "*", &[], &[("s*", Refused)]),
            rule("paths", "node-*", &[], &[("/data/*", ReadOnly)]),
            rule("late", "node-*", &[], &[("*", ReadWrite)]),
        ];
        let cases: [(&str, &str, &str, Grant, Option<&str>); 9] = [
            ("node-1", "10.1.9.9", "p1", ReadWrite, Some("near")),
            ("node-1", "10.1.9.9", "p2", ReadOnly, Some("near")),
            ("node-1", "2001:db8::5", "p2", ReadOnly, Some("near")),
            ("node-1", "10.2.0.1", "p1", ReadOnly, Some("paths")),
            ("node-1", "local", "p1", ReadOnly, Some("paths")),
            ("node-1", "?", "s1", Refused, Some("secret")),
            ("desk", "10.1.9.9", "s1", Refused, Some("secret")),
            ("desk", "10.1.9.9", "p1", Refused, None),
            ("node-1", "local", "q", ReadOnly, Some("paths")),
        ];
        for (name, from, volume, grant, by) in cases {
            let decision = decide(&rules, &origin(name, from, false), called(volume));
            assert_eq!(decision.grant, grant, "{name} {from} {volume}: {decision:?}");
            if by.is_some() {
                assert_eq!(decision.rule.as_deref(), by, "{name} {from} {volume}");
            }
        }
        let elsewhere = Called { name: "q", path: "/q" };
        let last = decide(&rules, &origin("node-1", "local", false), elsewhere);
        assert_eq!(last.rule.as_deref(), Some("late"));
        let refused = decide(&rules[1..2], &origin("desk", "local", false), called("p1"));
        assert_eq!(refused.grant, Refused, "a rule names the node, and none of its volumes is this one");
        assert!(refused.why.contains("no rule for this node names volume \"p1\""), "{}", refused.why);
        assert!(!concern(&rules[..1], &origin("desk", "10.1.0.1", false)));
        assert!(concern(&rules, &origin("desk", "10.1.0.1", false)));
    }

    fn acts(root: RootIs, ids: IdsAre, (uid, gid, groups): (u32, u32, &[u32])) -> (u32, u32, Vec<u32>) {
        let decision = Decision { grant: Grant::ReadWrite, root, ids, rule: None, why: String::new() };
        let Cred { uid, gid, groups } = decision.acts_as(&Cred { uid, gid, groups: groups.to_vec() });
        (uid, gid, groups)
    }

    #[test]
    fn ids_become_what_the_rule_says() {
        use RootIs::{Kept, Squashed};
        let claimed = || IdsAre::Claimed {};
        let all = || IdsAre::All { uid: 500, gid: 600 };
        let range = |from, to, count| vec![IdRange { from, to, count }];
        let map = || IdsAre::Mapped { uids: range(1000, 5000, 10), gids: range(100, 700, 5) };
        type Ids<'a> = (u32, u32, &'a [u32]);
        let cases: [(RootIs, IdsAre, Ids<'_>, Ids<'_>); 14] = [
            (Squashed, claimed(), (0, 0, &[0]), (NOBODY, NOBODY, &[])),
            (Squashed, claimed(), (0, 5, &[0, 5]), (NOBODY, 5, &[5])),
            (Squashed, claimed(), (7, 0, &[0, 8]), (7, NOBODY, &[8])),
            (Squashed, claimed(), (7, 8, &[8, 9]), (7, 8, &[8, 9])),
            (Kept, claimed(), (0, 0, &[0]), (0, 0, &[0])),
            (Kept, claimed(), (7, 0, &[0, 9]), (7, 0, &[0, 9])),
            (Squashed, all(), (0, 0, &[0]), (500, 600, &[600])),
            (Squashed, all(), (7, 8, &[8, 9]), (500, 600, &[600])),
            (Kept, all(), (0, 0, &[0]), (0, 0, &[0])),
            (Kept, all(), (7, 0, &[0]), (500, 600, &[600])),
            (Squashed, map(), (0, 0, &[0, 101]), (NOBODY, NOBODY, &[701])),
            (Squashed, map(), (1003, 101, &[104, 101]), (5003, 701, &[701, 704])),
            (Squashed, map(), (1010, 99, &[99]), (NOBODY, NOBODY, &[])),
            (Kept, map(), (1000, 0, &[0]), (5000, 0, &[0])),
        ];
        for (root, ids, was, is) in cases {
            let what = format!("{root:?} {ids:?} {was:?}");
            assert_eq!(acts(root, ids, was), (is.0, is.1, is.2.to_vec()), "{what}");
        }
    }
}
