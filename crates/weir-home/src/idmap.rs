//! Users and groups are called by other numbers at home: a pure map, both ways, also inside of access control lists.
//!
//! Ranges do not overlap on either side. A number in no range is itself; where a mapped number takes its place at home, the
//! way back leads to the mapped one.
//!
//! Invariant: by a map nobody becomes root at home, and no file gets there that would run as its owner or group: the owner here
//! chose the file's bits for a user that it is not at home.
use crate::{Attrs, Xattr};
use bytes::Bytes;
use weir_proto::meta::FileKind;
use weir_proto::relation::{HomeIds, IdMapping};
use weir_proto::{Error, Result};

/// `count` numbers from `here` on are `there` on at home.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdRange {
    pub here: u32,
    pub there: u32,
    pub count: u32,
}

/// No ranges: all numbers are the same.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct IdMap {
    users: Vec<IdRange>,
    groups: Vec<IdRange>,
}

impl IdMap {
    pub fn new(users: Vec<IdRange>, groups: Vec<IdRange>) -> Result<IdMap> {
        check("user", &users)?;
        check("group", &groups)?;
        Ok(IdMap { users, groups })
    }
    /// As a relation has it.
    pub fn of(ids: &HomeIds) -> Result<IdMap> {
        let ranges = |all: &[IdMapping]| {
            all.iter().map(|m| IdRange { here: m.here, there: m.there, count: m.count }).collect()
        };
        IdMap::new(ranges(&ids.users), ranges(&ids.groups))
    }
    pub fn is_identity(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty()
    }
    /// As they are to be at home.
    pub fn to_home(&self, kind: FileKind, attrs: &Attrs) -> Attrs {
        let mut mapped = self.mapped(attrs, |range, id| shift(id, range.here, range.there, range.count));
        if kind != FileKind::Directory && !self.is_identity() {
            mapped.mode &= !SET_ID_BITS;
        }
        mapped
    }
    /// As they are here.
    pub fn to_here(&self, attrs: &Attrs) -> Attrs {
        self.mapped(attrs, |range, id| shift(id, range.there, range.here, range.count))
    }

    fn mapped(&self, attrs: &Attrs, step: impl Fn(&IdRange, u32) -> Option<u32> + Copy) -> Attrs {
        let map = |ranges: &[IdRange], id| ranges.iter().find_map(|range| step(range, id)).unwrap_or(id);
        let xattr = |x: &Xattr| match x.name.starts_with(b"system.posix_acl_") {
            true => Xattr {
                name: x.name.clone(),
                value: map_acl(&x.value, |id| map(&self.users, id), |id| map(&self.groups, id)),
            },
            false => x.clone(),
        };
        if self.is_identity() {
            return attrs.clone();
        }
        Attrs {
            uid: map(&self.users, attrs.uid),
            gid: map(&self.groups, attrs.gid),
            xattrs: attrs.xattrs.iter().map(xattr).collect(),
            ..attrs.clone()
        }
    }
}

fn shift(id: u32, from: u32, to: u32, count: u32) -> Option<u32> {
    let n = id.checked_sub(from).filter(|n| *n < count)?;
    to.checked_add(n)
}

/// With these a file runs as its owner or its group (in directories they mean something else).
pub(crate) const SET_ID_BITS: u32 = 0o6000;

fn check(what: &str, ranges: &[IdRange]) -> Result<()> {
    let bad = |why: String| {
        Err(Error::invalid(format!("the map of {what} numbers {why}: correct the relation's map")))
    };
    for range in ranges {
        let fits = |from: u32| {
            range.count > 0 && from.checked_add(range.count - 1).is_some_and(|last| last < u32::MAX)
        };
        if !fits(range.here) || !fits(range.there) {
            return bad(format!("has a range of {} that does not fit", range.count));
        }
        if range.there == 0 {
            return bad("maps a user to root at home".to_owned());
        }
    }
    for (i, a) in ranges.iter().enumerate() {
        for b in &ranges[i + 1..] {
            if overlap((a.here, a.count), (b.here, b.count))
                || overlap((a.there, a.count), (b.there, b.count))
            {
                return bad(format!("has ranges that overlap ({} and {})", a.here, b.here));
            }
        }
    }
    Ok(())
}

fn overlap((a, a_count): (u32, u32), (b, b_count): (u32, u32)) -> bool {
    u64::from(a) < u64::from(b) + u64::from(b_count) && u64::from(b) < u64::from(a) + u64::from(a_count)
}

/// Tags of entries that name a user and a group (`linux/posix_acl_xattr.h`: version u32, then tag u16, rights u16, id u32).
const ACL_USER: u16 = 0x02;
const ACL_GROUP: u16 = 0x08;

/// What is not a list of version 2 stays as it is: home's kernel refuses it by itself.
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
    fn range(here: u32, there: u32, count: u32) -> IdRange {
        IdRange { here, there, count }
    }

    #[test]
    fn owners_and_lists_are_mapped_and_the_rest_is_not() {
        let map = IdMap::new(vec![range(1000, 20_000, 10)], vec![range(100, 7, 1)]).unwrap();
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
        let map = IdMap::new(vec![range(1000, 2000, 1)], vec![]).unwrap();
        let program = Attrs { mode: 0o6755, ..attrs(1000, 5, &[]) };
        assert_eq!(map.to_home(FileKind::Regular, &program).mode, 0o755);
        assert_eq!(map.to_home(FileKind::Regular, &Attrs { uid: 7, ..program.clone() }).mode, 0o755);
        assert_eq!(map.to_home(FileKind::Directory, &program).mode, 0o6755);
        assert_eq!(IdMap::default().to_home(FileKind::Regular, &program).mode, 0o6755);
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
            assert!(IdMap::new(ranges.clone(), vec![]).is_err(), "{ranges:?}");
            assert!(IdMap::new(vec![], ranges).is_err());
        }
    }

    proptest! {
        #[test]
        fn the_way_back_of_what_was_mapped_is_right(here in 0u32..1 << 30, there in 1u32..1 << 30, count in 1u32..5000, n: u32) {
            let map = IdMap::new(vec![range(here, there, count)], vec![range(here, there, count)]).unwrap();
            let (uid, gid) = (here + n % count, here + n % count / 2);
            let ours = attrs(uid, gid, &[(ACL_USER, uid), (ACL_GROUP, gid)]);
            prop_assert_eq!(map.to_here(&map.to_home(FileKind::Regular, &ours)), ours);
        }
        #[test]
        fn a_damaged_list_stays_what_it_is(value: Vec<u8>) {
            let map = IdMap::new(vec![range(0, 1 << 30, 1 << 30)], vec![]).unwrap();
            let mut damaged = attrs(5, 5, &[]);
            damaged.xattrs[0].value = value.into();
            let len = damaged.xattrs[0].value.len();
            prop_assert_eq!(map.to_home(FileKind::Regular, &damaged).xattrs[0].value.len(), len);
        }
    }
}
