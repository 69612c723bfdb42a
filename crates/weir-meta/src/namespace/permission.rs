//! The rules of POSIX, with the records that they need: permission, sticky directories, valid names.
use super::records::show;
use crate::record::{Access, HAS_ACL};
use crate::tables;
use weir_kv::Read;
use weir_proto::meta::{Cred, NAME_MAX};
use weir_proto::posix::acl::{self, Acl};
use weir_proto::posix::{Owned, READ, SEARCH};
use weir_proto::{Error, InodeId, NameRule, Result};

/// Whether `cred` has all of `want` on an inode, by its mode and its access control list.
pub(super) fn allows(read: &dyn Read, cred: &Cred, ino: InodeId, of: Owned, want: u32) -> Result<bool> {
    let has_list = of.mode & HAS_ACL != 0 && of.needs_list(cred);
    let list = if has_list { find_acl(read, ino, acl::ACCESS)? } else { None };
    Ok(of.permits(cred, list.as_ref(), want))
}

pub(super) fn find_acl(read: &dyn Read, ino: InodeId, kind: &[u8]) -> Result<Option<Acl>> {
    let Some(value) = tables::XATTRS.get(read, (ino, kind))? else { return Ok(None) };
    Acl::parse(&value).map_err(|e| Error::damaged(format!("inode {ino}: {e}")))
}

pub(super) fn require(read: &dyn Read, cred: &Cred, access: &Access, dir: InodeId, want: u32) -> Result<()> {
    if allows(read, cred, dir, access.owned(), want)? {
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
    if dir.owned().lets_remove(cred, victim_uid) {
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
