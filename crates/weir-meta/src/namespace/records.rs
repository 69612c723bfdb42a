//! Records of inodes, directories and names: loading them, and the errors if they are missing.
use crate::record::{Access, Inode, Link, Tally, directory_attr};
use crate::tables;
use weir_kv::Read;
use weir_proto::meta::{Attr, FileKind, NAME_MAX};
use weir_proto::posix::Owned;
use weir_proto::{Error, InodeId, NameRule, Result};

pub fn find_inode(read: &dyn Read, ino: InodeId) -> Result<Option<Inode>> {
    tables::INODES.get(read, ino)
}

/// A file that must exist and must not be a directory.
pub(super) fn load_file(read: &dyn Read, ino: InodeId) -> Result<Inode> {
    if let Some(inode) = find_inode(read, ino)? {
        return Ok(inode);
    }
    match find_access(read, ino)? {
        Some(_) => Err(Error::name(NameRule::IsDirectory, format!("inode {ino} is a directory"))),
        None => Err(stale(ino)),
    }
}

pub(super) fn find_access(read: &dyn Read, dir: InodeId) -> Result<Option<Access>> {
    tables::ACCESS.get(read, dir)
}

/// A directory that must exist.
pub(super) fn load_access(read: &dyn Read, dir: InodeId) -> Result<Access> {
    if let Some(access) = find_access(read, dir)? {
        return Ok(access);
    }
    match find_inode(read, dir)? {
        Some(_) => Err(Error::name(NameRule::NotDirectory, format!("inode {dir} is not a directory"))),
        None => Err(stale(dir)),
    }
}

pub(super) fn load_tally(read: &dyn Read, dir: InodeId) -> Result<Tally> {
    tables::TALLIES.get(read, dir)?.ok_or_else(|| stale(dir))
}

pub fn find_link(read: &dyn Read, dir: InodeId, name: &[u8]) -> Result<Option<Link>> {
    tables::NAMES.get(read, (dir, name))
}

pub(super) fn load_link(read: &dyn Read, dir: InodeId, name: &[u8]) -> Result<Link> {
    find_link(read, dir, name)?
        .ok_or_else(|| Error::not_found(format!("{:?} is not in directory {dir}", show(name))))
}

pub(super) fn directory(read: &dyn Read, dir: InodeId) -> Result<Attr> {
    Ok(directory_attr(dir, &load_access(read, dir)?, &load_tally(read, dir)?))
}

/// Mode, owner and group of an inode of a kind known from its name.
pub(super) fn owner_of(read: &dyn Read, ino: InodeId, kind: FileKind) -> Result<Owned> {
    if kind == FileKind::Directory {
        return load_access(read, ino).map(|access| access.owned());
    }
    load_file(read, ino).map(|inode| inode.owned())
}

/// Mode, owner and group of an inode of any kind.
pub(super) fn owner_of_any(read: &dyn Read, ino: InodeId) -> Result<Owned> {
    match find_inode(read, ino)? {
        Some(inode) => Ok(inode.owned()),
        None => load_access(read, ino).map(|access| access.owned()),
    }
}

pub(super) fn stale(ino: InodeId) -> Error {
    Error::stale(format!("inode {ino} does not exist (any more)"))
}

pub(super) fn show(name: &[u8]) -> String {
    String::from_utf8_lossy(&name[..name.len().min(NAME_MAX)]).into_owned()
}
