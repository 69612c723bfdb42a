//! Access control lists as POSIX.1e (draft 17) defines them, in the layout of the attributes
//! `system.posix_acl_access` and `system.posix_acl_default`: version 2, then entries of tag (u16),
//! permissions (u16) and id (u32), little-endian.
//!
//! Invariants: a stored list has more than owner, group and others, otherwise the mode suffices; the mode's
//! group bits are the list's mask. Pure: knows nothing of records.
use crate::meta::Cred;
use crate::{Error, Result};

pub const ACCESS: &[u8] = b"system.posix_acl_access";
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const NO_ID: u32 = u32::MAX;
/// Entries of one list: as many as fit a page, as in Linux.
const ENTRIES_MAX: usize = 500;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Item {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A list whose entries are complete and in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acl(Vec<Item>);

impl Acl {
    /// Checks a client's list. `None`: an empty list, which means none.
    pub fn parse(value: &[u8]) -> Result<Option<Acl>> {
        let refuse = |why: &str| Err(Error::invalid(format!("an access control list {why}")));
        let Some((version, rest)) = value.split_first_chunk::<4>() else {
            return refuse("without its version");
        };
        let (items, left) = rest.as_chunks::<8>();
        if u32::from_le_bytes(*version) != VERSION || !left.is_empty() || items.len() > ENTRIES_MAX {
            return refuse("of an unknown layout, or too long");
        }
        if items.is_empty() {
            return Ok(None);
        }
        let item = |b: &[u8; 8]| Item {
            tag: u16::from_le_bytes([b[0], b[1]]),
            perm: u16::from_le_bytes([b[2], b[3]]),
            id: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        };
        let acl = Acl(items.iter().map(item).collect());
        if acl.is_sound() { Ok(Some(acl)) } else { refuse("with entries missing, doubled or out of order") }
    }

    pub fn to_value(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for item in &self.0 {
            value.extend(item.tag.to_le_bytes());
            value.extend(item.perm.to_le_bytes());
            value.extend(item.id.to_le_bytes());
        }
        value
    }

    /// One owner, one group, one for others; a mask if a user or group is named; sorted by tag.
    fn is_sound(&self) -> bool {
        let count = |tag| self.0.iter().filter(|i| i.tag == tag).count();
        let named = count(USER) + count(GROUP);
        let known = self.0.iter().all(|i| {
            matches!(i.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER)
                && i.perm <= 7
                && (!matches!(i.tag, USER | GROUP) || i.id != NO_ID)
        });
        known
            && self.0.is_sorted_by_key(|i| i.tag)
            && (count(USER_OBJ), count(GROUP_OBJ), count(OTHER)) == (1, 1, 1)
            && (count(MASK) == 1 || count(MASK) == 0 && named == 0)
    }

    fn perm(&self, tag: u16) -> Option<u16> {
        self.0.iter().find(|i| i.tag == tag).map(|i| i.perm)
    }
    fn set(&mut self, tag: u16, perm: u32) {
        self.0.iter_mut().filter(|i| i.tag == tag).for_each(|i| i.perm = (perm & 7) as u16);
    }
    /// The entry that the mode's group bits stand for.
    fn group_class(&self) -> u16 {
        if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ }
    }

    /// The nine permission bits that show this list.
    pub fn mode(&self) -> u32 {
        let of = |tag| u32::from(self.perm(tag).unwrap_or(0));
        of(USER_OBJ) << 6 | of(self.group_class()) << 3 | of(OTHER)
    }
    /// Whether the mode alone is equivalent.
    pub fn is_mode(&self) -> bool {
        self.0.len() == 3
    }

    /// After `chmod`.
    pub fn set_mode(&mut self, mode: u32) {
        self.set(USER_OBJ, mode >> 6);
        self.set(self.group_class(), mode >> 3);
        self.set(OTHER, mode);
    }
    /// The list of a new file that is created with `mode`: no class gets more than that.
    pub fn for_new(&self, mode: u32) -> Acl {
        let mut acl = self.clone();
        acl.set_mode(self.mode() & mode);
        acl
    }

    /// Whether `cred` has all of `want` on an inode of this owner and group. The caller handles the
    /// superuser.
    pub fn permits(&self, cred: &Cred, uid: u32, gid: u32, want: u32) -> bool {
        let has = |perm: u16| u32::from(perm) & want == want;
        let mask = self.perm(MASK).unwrap_or(7);
        if cred.uid == uid {
            return has(self.perm(USER_OBJ).unwrap_or(0));
        }
        if let Some(named) = self.0.iter().find(|i| i.tag == USER && i.id == cred.uid) {
            return has(named.perm & mask);
        }
        let mut groups = self
            .0
            .iter()
            .filter(|i| match i.tag {
                GROUP_OBJ => cred.is_member(gid),
                GROUP => cred.is_member(i.id),
                _ => false,
            })
            .peekable();
        if groups.peek().is_some() {
            return groups.any(|i| has(i.perm & mask));
        }
        has(self.perm(OTHER).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(items: &[(u16, u16, u32)]) -> Acl {
        Acl(items.iter().map(|(tag, perm, id)| Item { tag: *tag, perm: *perm, id: *id }).collect())
    }
    fn cred(uid: u32, gid: u32, groups: &[u32]) -> Cred {
        Cred { uid, gid, groups: groups.to_vec() }
    }
    /// Owner 1 rw, user 5 rwx, group 2 r, group 7 rw, mask rw, others nothing.
    fn example() -> Acl {
        acl(&[
            (USER_OBJ, 6, NO_ID),
            (USER, 7, 5),
            (GROUP_OBJ, 4, NO_ID),
            (GROUP, 6, 7),
            (MASK, 6, NO_ID),
            (OTHER, 0, NO_ID),
        ])
    }

    #[test]
    fn acls_survive_encoding_and_invalid_ones_are_refused() {
        let value = example().to_value();
        assert_eq!(Acl::parse(&value).unwrap(), Some(example()));
        assert_eq!(Acl::parse(&VERSION.to_le_bytes()).unwrap(), None);
        for bad in [
            &value[..value.len() - 1],
            &value[..3],
            &acl(&[(USER_OBJ, 6, NO_ID), (GROUP_OBJ, 4, NO_ID)]).to_value(),
            &acl(&[(USER_OBJ, 6, NO_ID), (USER, 6, 4), (GROUP_OBJ, 4, NO_ID), (OTHER, 0, NO_ID)]).to_value(),
            &acl(&[(OTHER, 6, NO_ID), (GROUP_OBJ, 4, NO_ID), (USER_OBJ, 0, NO_ID)]).to_value(),
            &acl(&[(USER_OBJ, 8, NO_ID), (GROUP_OBJ, 4, NO_ID), (OTHER, 0, NO_ID)]).to_value(),
        ] {
            assert!(Acl::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let a = example();
        assert!(a.permits(&cred(1, 9, &[]), 1, 2, 6) && !a.permits(&cred(1, 9, &[]), 1, 2, 1));
        assert!(a.permits(&cred(5, 9, &[]), 1, 2, 6), "named");
        assert!(!a.permits(&cred(5, 9, &[]), 1, 2, 1), "but not beyond the mask");
        assert!(a.permits(&cred(3, 2, &[]), 1, 2, 4) && !a.permits(&cred(3, 2, &[]), 1, 2, 2));
        assert!(a.permits(&cred(3, 2, &[7]), 1, 2, 2), "one of the groups is enough");
        assert!(!a.permits(&cred(3, 3, &[]), 1, 2, 4));
    }

    #[test]
    fn the_mode_shows_the_mask_and_chmod_changes_it() {
        let mut a = example();
        assert_eq!(a.mode(), 0o660);
        a.set_mode(0o751);
        assert_eq!((a.mode(), a.perm(MASK), a.perm(GROUP_OBJ)), (0o751, Some(5), Some(4)));
        let new_file = example().for_new(0o640);
        assert_eq!((new_file.mode(), new_file.is_mode()), (0o640, false));
        assert!(acl(&[(USER_OBJ, 6, NO_ID), (GROUP_OBJ, 4, NO_ID), (OTHER, 0, NO_ID)]).is_mode());
    }
}
