//! Extended attributes: `user.`, `trusted.` and `security.`.
use super::*;
use bytes::Bytes;
use weir_kv::Scan;
use weir_proto::meta::{RemoveXattr, SetXattr, XATTR_VALUE_MAX, XattrNames, XattrValue};

/// Bytes of all names of one inode, each with its end: what a listing can return on Linux.
const NAMES_BYTES_MAX: usize = 64 * 1024;

pub fn getxattr(view: &View<'_>, ino: InodeId, name: &[u8]) -> Result<XattrValue> {
    check_xattr_name(name)?;
    exists(view.read, ino)?;
    match view.read.get(&keys::xattr(ino, name))? {
        Some(value) => Ok(XattrValue { value: Bytes::from(value) }),
        None => Err(absent(ino, name)),
    }
}

pub fn listxattr(view: &View<'_>, ino: InodeId) -> Result<XattrNames> {
    exists(view.read, ino)?;
    Ok(XattrNames { names: names(view.read, ino)? })
}

pub fn setxattr(cx: &mut Cx<'_>, r: &SetXattr) -> Result<Entry> {
    check_xattr_name(&r.name)?;
    if r.value.len() > XATTR_VALUE_MAX {
        return Err(Error::name(
            NameRule::Range,
            format!("a value of {} bytes: at most {XATTR_VALUE_MAX} are allowed", r.value.len()),
        ));
    }
    require_xattr(cx.read(), &r.cred, r.ino, &r.name)?;
    let key = keys::xattr(r.ino, &r.name);
    let there = cx.txn.get(&key)?.is_some();
    if there && r.create {
        return Err(Error::exists(format!("inode {} has attribute {:?} already", r.ino, show(&r.name))));
    }
    if !there && r.replace {
        return Err(absent(r.ino, &r.name));
    }
    if !there {
        let bytes: usize = names(cx.read(), r.ino)?.iter().map(|n| n.len() + 1).sum();
        if bytes + r.name.len() + 1 > NAMES_BYTES_MAX {
            return Err(Error::no_space(format!("inode {} has too many attributes", r.ino)));
        }
    }
    cx.need(r.ino, Need::Change);
    cx.clear()?;
    cx.txn.put(&key, &r.value);
    touch(cx, r.ino)
}

pub fn removexattr(cx: &mut Cx<'_>, r: &RemoveXattr) -> Result<Entry> {
    check_xattr_name(&r.name)?;
    require_xattr(cx.read(), &r.cred, r.ino, &r.name)?;
    let key = keys::xattr(r.ino, &r.name);
    if cx.txn.get(&key)?.is_none() {
        return Err(absent(r.ino, &r.name));
    }
    cx.need(r.ino, Need::Change);
    cx.clear()?;
    cx.txn.delete(&key);
    touch(cx, r.ino)
}

/// A change of attributes changes the ctime.
fn touch(cx: &mut Cx<'_>, ino: InodeId) -> Result<Entry> {
    if let Some(mut inode) = find_inode(cx.read(), ino)? {
        inode.ctime = cx.rules.now;
        cx.put_inode(ino, &inode);
        return Ok(cx.rules.entry(ino, &inode));
    }
    let mut tally = load_tally(cx.read(), ino)?;
    tally.ctime = cx.rules.now;
    cx.put_tally(ino, &tally);
    Ok(unleased(directory(cx.read(), ino)?))
}

fn names(read: &dyn Read, ino: InodeId) -> Result<Vec<Bytes>> {
    let mut names = Vec::new();
    let (start, end) = keys::range_of(b'X', ino.0);
    read.scan(&start, &end, &mut |key, _| {
        names.push(Bytes::copy_from_slice(keys::xattr_name(key)));
        Scan::More
    })?;
    Ok(names)
}

fn check_xattr_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Error::name(NameRule::Range, format!("an attribute name of {} bytes", name.len())));
    }
    let known = [b"user.".as_slice(), b"trusted.", b"security."];
    if !known.iter().any(|prefix| name.starts_with(prefix) && name.len() > prefix.len()) || name.contains(&0)
    {
        return Err(Error::unsupported(format!(
            "attribute {:?}: only user., trusted. and security.",
            show(name)
        )));
    }
    Ok(())
}

fn require_xattr(read: &dyn Read, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<()> {
    let (uid, gid, mode) = exists(read, ino)?;
    let allowed = if name.starts_with(b"user.") {
        permits(cred, mode, uid, gid, WRITE)
    } else {
        cred.uid == 0 || (name.starts_with(b"security.") && cred.uid == uid)
    };
    if allowed {
        return Ok(());
    }
    Err(Error::denied(format!("user {} may not change attribute {:?} of inode {ino}", cred.uid, show(name))))
}

/// Owner, group and mode of an inode of any kind.
fn exists(read: &dyn Read, ino: InodeId) -> Result<(u32, u32, u32)> {
    match find_inode(read, ino)? {
        Some(inode) => Ok((inode.uid, inode.gid, inode.mode)),
        None => load_access(read, ino).map(|a| (a.uid, a.gid, a.mode)),
    }
}

fn absent(ino: InodeId, name: &[u8]) -> Error {
    Error::name(NameRule::NoAttribute, format!("inode {ino} has no attribute {:?}", show(name)))
}
