//! The rules of POSIX: permission by mode and by access control list, sticky directories, valid names.
use super::acl::{self, Acl};
use super::records::show;
use crate::keys;
use crate::record::{Access, HAS_ACL};
use weir_kv::Read;
use weir_proto::meta::{Cred, NAME_MAX};
use weir_proto::{Error, InodeId, NameRule, Result};

/// Permission bits of one class.
pub const READ: u32 = 4;

pub const WRITE: u32 = 2;

pub const SEARCH: u32 = 1;

/// The same bit, for a file.
pub const EXECUTE: u32 = 1;

pub(super) const SET_GID: u32 = 0o2000;

pub(super) const STICKY: u32 = 0o1000;

/// Whether `cred` has all of `want` on something with this owner and mode.
fn permits(cred: &Cred, mode: u32, uid: u32, gid: u32, want: u32) -> bool {
    let class = if cred.uid == uid {
        6
    } else if cred.is_member(gid) {
        3
    } else {
        0
    };
    cred.uid == 0 || (mode >> class) & want == want
}

/// The same with the access control list, if there is one.
pub(super) fn allows(
    read: &dyn Read,
    cred: &Cred,
    ino: InodeId,
    (mode, uid, gid): (u32, u32, u32),
    want: u32,
) -> Result<bool> {
    // As in Linux: if the mask permits nothing the list is skipped, and the mode decides.
    if mode & HAS_ACL != 0
        && mode & 0o070 != 0
        && cred.uid != 0
        && let Some(acl) = find_acl(read, ino, acl::ACCESS)?
    {
        return Ok(acl.permits(cred, uid, gid, want));
    }
    Ok(permits(cred, mode, uid, gid, want))
}

pub(super) fn find_acl(read: &dyn Read, ino: InodeId, kind: &[u8]) -> Result<Option<Acl>> {
    let Some(value) = read.get(&keys::xattr(ino, kind))? else { return Ok(None) };
    Acl::parse(&value).map_err(|e| Error::damaged(format!("inode {ino}: {e}")))
}

pub(super) fn require(read: &dyn Read, cred: &Cred, access: &Access, dir: InodeId, want: u32) -> Result<()> {
    if allows(read, cred, dir, (access.mode, access.uid, access.gid), want)? {
        return Ok(());
    }
    Err(Error::denied(format!("user {} may not {} directory {dir}", cred.uid, verb(want))))
}

fn verb(want: u32) -> &'static str {
    match want {
        SEARCH => "search",
        READ => "read",
        _ => "change",
    }
}

/// In a sticky directory only the owner of an entry or of the directory removes or renames it.
pub(super) fn require_sticky(cred: &Cred, dir: &Access, victim_uid: u32) -> Result<()> {
    if dir.mode & STICKY == 0 || cred.uid == 0 || cred.uid == victim_uid || cred.uid == dir.uid {
        return Ok(());
    }
    Err(Error::name(
        NameRule::NotOwner,
        format!("user {} owns neither the entry nor its sticky directory", cred.uid),
    ))
}

pub(super) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Error::name(
            NameRule::TooLong,
            format!("a name of {} bytes: at most {NAME_MAX} are allowed", name.len()),
        ));
    }
    if name.is_empty() || name == b"." || name == b".." || name.iter().any(|b| *b == b'/' || *b == 0) {
        return Err(Error::invalid(format!("{:?} cannot be a name", show(name))));
    }
    Ok(())
}
