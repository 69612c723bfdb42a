//! Permission and ownership, for what this client decides without the leader: names in a directory without
//! an access control list, and attributes of a new file. Pure.
use weir_proto::meta::{Attr, Cred};

pub const SET_UID: u32 = 0o4000;
pub const SET_GID: u32 = 0o2000;
pub const STICKY: u32 = 0o1000;
pub const MODE_BITS: u32 = 0o7777;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

impl Owner {
    pub fn of(attr: &Attr) -> Owner {
        Owner { uid: attr.uid, gid: attr.gid }
    }
    /// Owner and group of a new file in a directory.
    pub fn of_new(cred: &Cred, dir: &Attr) -> Owner {
        Owner { uid: cred.uid, gid: if dir.mode & SET_GID != 0 { dir.gid } else { cred.gid } }
    }
}

/// Whether a user may change names in a directory.
pub fn may_change_names(cred: &Cred, dir: &Attr) -> bool {
    let class = if cred.uid == dir.uid {
        6
    } else if cred.is_member(dir.gid) {
        3
    } else {
        0
    };
    cred.uid == 0 || (dir.mode >> class) & 0o3 == 0o3
}

/// Whether a user who may change names in a directory may remove that of a file of this owner.
pub fn may_take_name(cred: &Cred, dir: &Attr, owner: u32) -> bool {
    dir.mode & STICKY == 0 || cred.uid == 0 || cred.uid == dir.uid || cred.uid == owner
}

/// Whether a user may give a file these owner and group.
pub fn may_set_owner(cred: &Cred, attr: &Attr, uid: Option<u32>, gid: Option<u32>) -> bool {
    let is_root = cred.uid == 0;
    uid.is_none_or(|uid| is_root || uid == attr.uid)
        && gid.is_none_or(|gid| is_root || gid == attr.gid || cred.is_member(gid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::attr_of_size;

    fn dir(mode: u32) -> Attr {
        Attr { mode, uid: 5, gid: 9, ..attr_of_size(0) }
    }
    fn user(uid: u32, gid: u32) -> Cred {
        Cred { uid, gid, groups: vec![] }
    }

    #[test]
    fn names_are_changed_by_class_and_kept_by_the_sticky_bit() {
        for (mode, uid, gid, changes, takes_of_7) in [
            (0o755, 5, 1, true, true),
            (0o755, 6, 9, false, true),
            (0o775, 6, 9, true, true),
            (0o705, 6, 9, false, true),
            (0o1777, 6, 1, true, false),
            (0o1777, 7, 1, true, true),
            (0o1777, 5, 1, true, true),
            (0o1000, 0, 0, true, true),
        ] {
            let (cred, dir) = (user(uid, gid), dir(mode));
            assert_eq!(may_change_names(&cred, &dir), changes, "{mode:o} {uid}:{gid}");
            assert_eq!(may_take_name(&cred, &dir, 7), takes_of_7, "{mode:o} {uid}:{gid}");
        }
    }

    #[test]
    fn a_set_group_id_directory_gives_its_group() {
        assert_eq!(Owner::of_new(&user(6, 1), &dir(0o755)), Owner { uid: 6, gid: 1 });
        assert_eq!(Owner::of_new(&user(6, 1), &dir(0o2755)), Owner { uid: 6, gid: 9 });
    }

    #[test]
    fn a_group_is_given_to_its_members_and_an_owner_by_root() {
        let file = dir(0o644);
        assert!(may_set_owner(&user(5, 3), &file, Some(5), Some(3)));
        assert!(!may_set_owner(&user(5, 3), &file, Some(6), None));
        assert!(!may_set_owner(&user(5, 3), &file, None, Some(4)));
        assert!(may_set_owner(&user(0, 0), &file, Some(6), Some(4)));
    }
}
