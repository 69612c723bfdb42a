//! The rules of POSIX for modes, owners and access control lists: permission, sticky directories, the mode
//! and lists of a new inode, changes of mode and owner, and the end of set-uid and set-gid. The metadata
//! leader decides by them, and a client where it need not ask.
//!
//! Invariants: each rule is here only. Bits of a mode above [`MODE_BITS`] are the caller's, and stay. Pure:
//! the caller supplies the facts. Knows nothing of records, leases and requests.
pub mod acl;
#[cfg(test)]
mod tests;

use crate::meta::{Attr, Cred};
use acl::Acl;

/// Permission bits of one class.
pub const READ: u32 = 4;
pub const WRITE: u32 = 2;
pub const SEARCH: u32 = 1;
/// The bit of [`SEARCH`], for a file.
pub const EXECUTE: u32 = 1;

pub const SET_UID: u32 = 0o4000;
pub const SET_GID: u32 = 0o2000;
const STICKY: u32 = 0o1000;
/// All bits that chmod may set.
pub const MODE_BITS: u32 = 0o7777;
/// The permissions of owner, group and others.
const CLASSES: u32 = 0o777;
const GROUP_CLASS: u32 = 0o070;
const GROUP_EXECUTE: u32 = 0o010;

/// Mode, owner and group of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owned {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// The part of a change of attributes that these rules decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    /// It sets the time of access or modification.
    pub times: bool,
    pub size: bool,
}

/// Why a user may write an inode's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MayWrite {
    No,
    /// It is open for writing, even if its mode forbids that now.
    ByOpen,
    ByPermission,
}

/// The attribute that a user may not change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    Mode,
    Owner,
    Group,
    Times,
    Size,
}

/// Mode and lists of a new inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inherited {
    pub mode: u32,
    pub access: Option<Acl>,
    /// The default list of a new directory.
    pub default: Option<Acl>,
}

/// Whether a mode has bits that a change of data or of the owner may remove.
pub fn has_privileges(mode: u32) -> bool {
    mode & (SET_UID | SET_GID) != 0
}

impl Owned {
    pub fn of(attr: &Attr) -> Owned {
        Owned { mode: attr.mode, uid: attr.uid, gid: attr.gid }
    }

    /// Whether the inode's access control list, if it has one, decides for this user. As in Linux, a list
    /// whose mask permits nothing is skipped, and the mode decides.
    pub fn needs_list(&self, cred: &Cred) -> bool {
        cred.uid != 0 && self.mode & GROUP_CLASS != 0
    }

    /// Whether the user has all of `want`.
    pub fn permits(&self, cred: &Cred, list: Option<&Acl>, want: u32) -> bool {
        if let Some(list) = list.filter(|_| self.needs_list(cred)) {
            return list.permits(cred, self.uid, self.gid, want);
        }
        let class = if cred.uid == self.uid {
            6
        } else if cred.is_member(self.gid) {
            3
        } else {
            0
        };
        cred.uid == 0 || (self.mode >> class) & want == want
    }

    pub fn is_sticky(&self) -> bool {
        self.mode & STICKY != 0
    }

    /// Whether a user who may change the names of this directory may remove or rename an entry of this owner.
    pub fn lets_remove(&self, cred: &Cred, entry_uid: u32) -> bool {
        !self.is_sticky() || cred.uid == 0 || cred.uid == entry_uid || cred.uid == self.uid
    }

    /// The group of a new inode in this directory, for a user of this primary group.
    pub fn gid_of_new(&self, primary: u32) -> u32 {
        if self.mode & SET_GID != 0 { self.gid } else { primary }
    }

    /// Owner and mode of a new inode in this directory.
    pub fn new_inode(&self, cred: &Cred, mode: u32, is_directory: bool) -> Owned {
        let inherits = if is_directory { self.mode & SET_GID } else { 0 };
        Owned { mode: mode | inherits, uid: cred.uid, gid: self.gid_of_new(cred.gid) }
    }

    /// Whether the user may change these attributes.
    pub fn check(&self, cred: &Cred, change: &Change, may_write: MayWrite) -> Result<(), Refused> {
        if cred.uid == 0 {
            return Ok(());
        }
        let is_owner = cred.uid == self.uid;
        let writes = may_write != MayWrite::No;
        if change.mode.is_some() && !is_owner && !(writes && self.only_drops_privileges(change)) {
            return Err(Refused::Mode);
        }
        if change.uid.is_some_and(|new| new != self.uid || !is_owner) {
            return Err(Refused::Owner);
        }
        if change.gid.is_some_and(|new| !is_owner || new != self.gid && !cred.is_member(new)) {
            return Err(Refused::Group);
        }
        if change.times && !is_owner && may_write != MayWrite::ByPermission && !change.size {
            return Err(Refused::Times);
        }
        if change.size && !writes {
            return Err(Refused::Size);
        }
        Ok(())
    }

    /// Mode, owner and group after a change that is permitted.
    pub fn changed(&self, cred: &Cred, change: &Change, is_directory: bool) -> Owned {
        let (uid, gid) = (change.uid.unwrap_or(self.uid), change.gid.unwrap_or(self.gid));
        let mode = match change.mode {
            Some(new) if is_member(cred, gid) => new & MODE_BITS | self.mode & !MODE_BITS,
            Some(new) => new & MODE_BITS & !SET_GID | self.mode & !MODE_BITS,
            // A change of owner, even by root, removes privileges.
            None if change.uid.or(change.gid).is_some() && !is_directory => self.without_privileges(cred),
            None => self.mode,
        };
        Owned { mode, uid, gid }
    }

    /// The mode of a file whose data or owner the user changes.
    pub fn without_privileges(&self, cred: &Cred) -> u32 {
        // Without the group's right to execute, set-gid gives the group's members no privilege.
        let ends_set_gid = self.mode & GROUP_EXECUTE != 0 || !is_member(cred, self.gid);
        self.mode & !(SET_UID | if ends_set_gid { SET_GID } else { 0 })
    }

    /// The mode, without the caller's bits, after the user sets the access control list.
    pub fn mode_with_list(&self, cred: &Cred, list: &Acl) -> u32 {
        let kept = MODE_BITS & !CLASSES & if is_member(cred, self.gid) { !0 } else { !SET_GID };
        self.mode & kept | list.mode()
    }

    /// Whether the change removes set-uid and set-gid and nothing else, as a change of data does.
    fn only_drops_privileges(&self, change: &Change) -> bool {
        let Change { mode: Some(new), uid: None, gid: None, times: false, size: false } = change else {
            return false;
        };
        let privileges = SET_UID | SET_GID;
        new & MODE_BITS & !(self.mode & privileges) == self.mode & MODE_BITS & !privileges
    }
}

impl Inherited {
    pub fn of_mode(mode: u32) -> Inherited {
        Inherited { mode: mode & MODE_BITS, access: None, default: None }
    }

    /// From the directory's default list if it has one, otherwise the mode without the umask.
    pub fn new(default: Option<Acl>, mode: u32, umask: u32, is_directory: bool) -> Inherited {
        let Some(default) = default else { return Inherited::of_mode(mode & !umask) };
        let access = default.for_new(mode);
        Inherited {
            mode: mode & MODE_BITS & !CLASSES | access.mode(),
            access: (!access.is_mode()).then_some(access),
            default: is_directory.then_some(default),
        }
    }
}

fn is_member(cred: &Cred, gid: u32) -> bool {
    cred.uid == 0 || cred.is_member(gid)
}
