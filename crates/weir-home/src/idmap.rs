//! Differences between a file here and the same file at home: numbers of users and groups, also in access
//! control lists, and mode bits and files that would grant rights. A pure map, both ways.
//!
//! Ranges do not overlap on either side. A number in no range stays as it is; if a mapped number has the same
//! value at home, the reverse direction leads to the mapped one.
//!
//! Invariant: a map never makes a user root, and never passes a file that would run as its owner or group:
//! its bits were set for another user. Only a rule for homes lets these pass, or root's files and devices.
use crate::{Attrs, HomePath, Outcome, Xattr, fault::Fault};
use bytes::Bytes;
use weir_proto::home_rule::{HomeIds, HomeRule, IdMapping};
use weir_proto::meta::FileKind;
use weir_proto::{Error, Result};

/// The owner of root's files where root does not pass, as with root squash of NFS.
pub const NOBODY: u32 = 65534;
/// With these a file runs as its owner or its group (in directories they mean something else).
pub(crate) const SET_ID_BITS: u32 = 0o6000;

/// By default all numbers are the same, and everything passes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdMap {
    ids: HomeIds,
    /// Bits and capabilities with which a file runs as another user pass.
    set_id: bool,
    /// Root's files and devices pass.
    root: bool,
}

impl Default for IdMap {
    fn default() -> IdMap {
        IdMap { ids: HomeIds::default(), set_id: true, root: true }
    }
}

impl IdMap {
    /// For a relation without a rule: the superuser chose its home, and perhaps a map.
    pub fn of(ids: &HomeIds) -> Result<IdMap> {
        ids.check(false)?;
        Ok(IdMap { ids: ids.clone(), set_id: *ids == HomeIds::default(), root: true })
    }
    /// For a home under a rule. A map of the relation replaces the rule's.
    pub fn by_rule(ids: &HomeIds, rule: &HomeRule) -> Result<IdMap> {
        let ids = if *ids == HomeIds::default() { &rule.ids } else { ids };
        ids.check(rule.allow_root)?;
        Ok(IdMap { ids: ids.clone(), set_id: rule.keep_setuid, root: rule.allow_root })
    }
    fn changes_nothing(&self) -> bool {
        *self == IdMap::default()
    }
    /// The attributes at home.
    pub fn to_home(&self, kind: FileKind, attrs: &Attrs) -> Attrs {
        self.mapped(kind, attrs, |range, id| shift(id, range.here, range.there, range.count))
    }
    /// The attributes here.
    pub fn to_here(&self, kind: FileKind, attrs: &Attrs) -> Attrs {
        self.mapped(kind, attrs, |range, id| shift(id, range.there, range.here, range.count))
    }
    /// Whether an entry of this kind passes at all.
    pub fn lets_through(&self, kind: FileKind) -> bool {
        self.root || !matches!(kind, FileKind::CharDevice | FileKind::BlockDevice)
    }
    /// Refuses an entry that does not pass: it is in conflict and named, and the others continue.
    pub(crate) fn require(&self, path: &HomePath, kind: FileKind) -> Outcome<()> {
        match self.lets_through(kind) {
            true => Ok(()),
            false => Err(Fault::Broken(Error::denied(format!(
                "{path} is a device, and devices do not go to this home: remove it, or have an administrator allow them there by \
                 `weir home allow URL --allow-root`"
            )))),
        }
    }

    fn mapped(
        &self,
        kind: FileKind,
        attrs: &Attrs,
        step: impl Fn(&IdMapping, u32) -> Option<u32> + Copy,
    ) -> Attrs {
        if self.changes_nothing() {
            return attrs.clone();
        }
        let map = |ranges: &[IdMapping], id| {
            let mapped = ranges.iter().find_map(|range| step(range, id)).unwrap_or(id);
            let mapped = if mapped == 0 && !self.root { NOBODY } else { mapped };
            assert!(self.root || mapped != 0, "a map made a user root");
            mapped
        };
        let xattr = |x: &Xattr| match x.name.starts_with(b"system.posix_acl_") {
            true => Xattr {
                name: x.name.clone(),
                value: map_acl(&x.value, |id| map(&self.ids.users, id), |id| map(&self.ids.groups, id)),
            },
            false => x.clone(),
        };
        let passes = |x: &&Xattr| match &x.name[..] {
            b"security.capability" => self.set_id,
            name => self.root || !name.starts_with(b"trusted."),
        };
        let set_id = if kind == FileKind::Directory || self.set_id { 0 } else { SET_ID_BITS };
        Attrs {
            mode: attrs.mode & !set_id,
            uid: map(&self.ids.users, attrs.uid),
            gid: map(&self.ids.groups, attrs.gid),
            xattrs: attrs.xattrs.iter().filter(passes).map(xattr).collect(),
            ..attrs.clone()
        }
    }
}

fn shift(id: u32, from: u32, to: u32, count: u32) -> Option<u32> {
    let n = id.checked_sub(from).filter(|n| *n < count)?;
    to.checked_add(n)
}

/// Tags of entries that name a user and a group (`linux/posix_acl_xattr.h`: version u32, then tag u16, rights
/// u16, id u32).
const ACL_USER: u16 = 0x02;
const ACL_GROUP: u16 = 0x08;

/// A value that is not a list of version 2 stays as it is: home's kernel refuses it.
fn map_acl(value: &Bytes, user: impl Fn(u32) -> u32, group: impl Fn(u32) -> u32) -> Bytes {
    let well_formed =
        value.len() >= 4 && value[..4] == 2u32.to_le_bytes() && (value.len() - 4).is_multiple_of(8);
    if !well_formed {
        return value.clone();
    }
    let mut mapped = value.to_vec();
    for entry in mapped[4..].chunks_exact_mut(8) {
        let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let id = match u16::from_le_bytes([entry[0], entry[1]]) {
            ACL_USER => user(id),
            ACL_GROUP => group(id),
            _ => continue,
        };
        entry[4..].copy_from_slice(&id.to_le_bytes());
    }
    mapped.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_proto::meta::Time;

    fn attrs(uid: u32, gid: u32, acl: &[(u16, u32)]) -> Attrs {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, id) in acl {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&7u16.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        let name = Bytes::from_static(b"system.posix_acl_access");
        let time = Time { nanos: 1 };
        let xattrs = vec![Xattr { name, value: value.into() }];
        Attrs { mode: 0o644, uid, gid, atime: time, mtime: time, xattrs }
    }
    fn range(here: u32, there: u32, count: u32) -> IdMapping {
        IdMapping { here, there, count }
    }
    fn of(users: Vec<IdMapping>, groups: Vec<IdMapping>) -> Result<IdMap> {
        IdMap::of(&HomeIds { users, groups })
    }
    fn rule(allow_root: bool, keep_setuid: bool) -> HomeRule {
        HomeRule { allow_root, keep_setuid, ..HomeRule::plain("file:///a") }
    }

    #[test]
    fn owners_and_lists_are_mapped_and_the_rest_is_not() {
        let map = of(vec![range(1000, 20_000, 10)], vec![range(100, 7, 1)]).unwrap();
        let (owner, nobody) = ((1, u32::MAX), u32::MAX);
        let home = map.to_home(
            FileKind::Regular,
            &attrs(1009, 100, &[owner, (ACL_USER, 1003), (ACL_GROUP, 1003), (ACL_GROUP, 100)]),
        );
        assert_eq!(home, attrs(20_009, 7, &[owner, (ACL_USER, 20_003), (ACL_GROUP, 1003), (ACL_GROUP, 7)]));
        assert_eq!(
            map.to_home(FileKind::Regular, &attrs(1010, 0, &[])),
            attrs(1010, 0, &[]),
            "one behind the range"
        );
        assert_eq!(map.to_home(FileKind::Regular, &attrs(nobody, nobody, &[])), attrs(nobody, nobody, &[]));
    }

    #[test]
    fn a_write_through_a_mapping_clears_set_uid() {
        let map = of(vec![range(1000, 2000, 1)], vec![]).unwrap();
        let program = Attrs { mode: 0o6755, ..attrs(1000, 5, &[]) };
        assert_eq!(map.to_home(FileKind::Regular, &program).mode, 0o755);
        assert_eq!(map.to_home(FileKind::Regular, &Attrs { uid: 7, ..program.clone() }).mode, 0o755);
        assert_eq!(map.to_home(FileKind::Directory, &program).mode, 0o6755);
        assert_eq!(IdMap::default().to_home(FileKind::Regular, &program).mode, 0o6755);
    }

    /// Both ways, for what the rule lets through.
    #[test]
    fn attributes_that_grant_rights_pass_only_by_a_rule() {
        let xattr =
            |name: &'static [u8]| Xattr { name: Bytes::from_static(name), value: Bytes::from_static(b"v") };
        let program = |mode, uid, xattrs: &[&'static [u8]]| {
            let kept = attrs(uid, uid, &[(ACL_USER, uid)]).xattrs;
            let xattrs = xattrs.iter().map(|name| xattr(name)).chain(kept).collect();
            Attrs { mode, xattrs, ..attrs(uid, uid, &[]) }
        };
        let all: [&'static [u8]; 3] = [b"security.capability", b"trusted.x", b"user.x"];
        let (capability, trusted, user) = (all[0], all[1], all[2]);
        for (allow_root, keep_setuid, wanted) in [
            (false, false, program(0o755, NOBODY, &[user])),
            (true, false, program(0o755, 0, &[trusted, user])),
            (false, true, program(0o6755, NOBODY, &[capability, user])),
            (true, true, program(0o6755, 0, &all)),
        ] {
            let map = IdMap::by_rule(&HomeIds::default(), &rule(allow_root, keep_setuid)).unwrap();
            assert_eq!(map.to_home(FileKind::Regular, &program(0o6755, 0, &all)), wanted);
            assert_eq!(map.to_here(FileKind::Regular, &program(0o6755, 0, &all)), wanted);
            assert_eq!(map.to_home(FileKind::Directory, &program(0o6755, 0, &all)).mode, 0o6755);
            for device in [FileKind::CharDevice, FileKind::BlockDevice] {
                assert_eq!(map.lets_through(device), allow_root);
                assert_eq!(map.require(&HomePath::root(), device).is_ok(), allow_root);
            }
            assert!(map.lets_through(FileKind::Fifo) && map.lets_through(FileKind::Socket));
            assert_eq!(map.to_home(FileKind::Regular, &attrs(7, 8, &[])), attrs(7, 8, &[]));
        }
    }

    #[test]
    fn a_rules_map_leads_to_root_nowhere_unless_it_says_so() {
        let to = |there| HomeIds { users: vec![range(1000, there, 1)], groups: vec![range(0, 50, 1)] };
        let with = |ids: HomeIds, allow_root| HomeRule { ids, ..rule(allow_root, false) };
        let map = IdMap::by_rule(&HomeIds::default(), &with(to(2000), false)).unwrap();
        assert_eq!(map.to_home(FileKind::Regular, &attrs(1000, 0, &[])), attrs(2000, 50, &[]));
        // The reverse direction leads to root, which does not pass.
        assert_eq!(map.to_here(FileKind::Regular, &attrs(2000, 50, &[])), attrs(1000, NOBODY, &[]));
        assert!(IdMap::by_rule(&HomeIds::default(), &with(to(0), false)).is_err());
        assert!(IdMap::by_rule(&to(0), &rule(false, false)).is_err(), "nor does a relation's own map");
        let map = IdMap::by_rule(&to(0), &with(to(2000), true)).unwrap();
        assert_eq!(map.to_home(FileKind::Regular, &attrs(1000, 7, &[])).uid, 0, "its own map counts");
    }

    #[test]
    fn maps_that_have_no_way_back_are_refused() {
        for ranges in [
            vec![range(0, 10, 5), range(4, 100, 1)],
            vec![range(0, 10, 5), range(100, 14, 1)],
            vec![range(0, 10, 0)],
            vec![range(u32::MAX - 1, 1, 2)],
            vec![range(1000, 0, 1)],
            vec![range(0, 0, 1)],
            vec![range(0, u32::MAX, 1)],
        ] {
            assert!(of(ranges.clone(), vec![]).is_err(), "{ranges:?}");
            assert!(of(vec![], ranges).is_err());
        }
    }

    proptest! {
        #[test]
        fn the_way_back_of_what_was_mapped_is_right(here in 0u32..1 << 30, there in 1u32..1 << 30, count in 1u32..5000, n: u32) {
            let map = of(vec![range(here, there, count)], vec![range(here, there, count)]).unwrap();
            let (uid, gid) = (here + n % count, here + n % count / 2);
            let ours = attrs(uid, gid, &[(ACL_USER, uid), (ACL_GROUP, gid)]);
            prop_assert_eq!(map.to_here(FileKind::Regular, &map.to_home(FileKind::Regular, &ours)), ours);
        }
        #[test]
        fn a_damaged_list_stays_what_it_is(value: Vec<u8>) {
            let map = of(vec![range(0, 1 << 30, 1 << 30)], vec![]).unwrap();
            let mut damaged = attrs(5, 5, &[]);
            damaged.xattrs[0].value = value.into();
            let len = damaged.xattrs[0].value.len();
            prop_assert_eq!(map.to_home(FileKind::Regular, &damaged).xattrs[0].value.len(), len);
        }
    }
}
