//! Extended attributes: `user.`, `trusted.` and `security.`, and the access control lists of `system.`.
use super::gate::{ChangeableInode, Changed, OwnInode};
use super::records::owner_of_any;
use super::*;
use bytes::Bytes;
use weir_proto::meta::{NAME_MAX, RemoveXattr, SetXattr, XATTR_VALUE_MAX, XattrNames, XattrValue};

/// Only the superuser sees these.
const TRUSTED: &[u8] = b"trusted.";
/// Bytes of all names of one inode, each with its terminator: the limit of a listing on Linux.
const NAMES_BYTES_MAX: usize = 64 * 1024;

pub fn getxattr(view: &View<'_>, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<XattrValue> {
    check_xattr_name(name)?;
    let owned = owner_of_any(view.read, ino)?;
    if name.starts_with(TRUSTED) && cred.uid != 0 {
        return Err(absent(ino, name)); // as Linux does
    }
    if name.starts_with(b"user.") && !allows(view.read, cred, ino, owned, READ)? {
        return Err(Error::denied(format!(
            "user {} may not read attribute {:?} of inode {ino}",
            cred.uid,
            show(name)
        )));
    }
    match tables::XATTRS.get(view.read, (ino, name))? {
        Some(value) => Ok(XattrValue { value: Bytes::from(value) }),
        None => Err(absent(ino, name)),
    }
}

pub fn listxattr(view: &View<'_>, cred: &Cred, ino: InodeId) -> Result<XattrNames> {
    owner_of_any(view.read, ino)?;
    let mut names = names(view.read, ino)?;
    names.retain(|name| cred.uid == 0 || !name.starts_with(TRUSTED));
    Ok(XattrNames { names })
}

pub fn setxattr(cx: &mut Cx<'_>, r: &SetXattr) -> Attempt<Entry> {
    check_xattr_name(&r.name)?;
    let changeable = cx.inode_to_change(r.ino)?;
    if is_acl(&r.name) {
        return set_acl(cx, r, changeable);
    }
    if r.value.len() > XATTR_VALUE_MAX {
        return Err(Error::name(
            NameRule::Range,
            format!("a value of {} bytes: at most {XATTR_VALUE_MAX} are allowed", r.value.len()),
        )
        .into());
    }
    require_xattr(cx.read(), &r.cred, r.ino, &r.name)?;
    let there = tables::XATTRS.has(cx.txn, (r.ino, &r.name))?;
    if there && r.create {
        return Err(
            Error::exists(format!("inode {} has attribute {:?} already", r.ino, show(&r.name))).into()
        );
    }
    if !there && r.replace {
        return Err(absent(r.ino, &r.name).into());
    }
    if !there {
        let bytes: usize = names(cx.read(), r.ino)?.iter().map(|n| n.len() + 1).sum();
        if bytes + r.name.len() + 1 > NAMES_BYTES_MAX {
            return Err(Error::no_space(format!("inode {} has too many attributes", r.ino)).into());
        }
    }
    let own = changeable.revoke(cx, &[Need::Change])?;
    own.put_xattr(cx, &r.name, Some(&r.value));
    Ok(touch(cx, own)?)
}

pub fn removexattr(cx: &mut Cx<'_>, r: &RemoveXattr) -> Attempt<Entry> {
    check_xattr_name(&r.name)?;
    let changeable = cx.inode_to_change(r.ino)?;
    require_xattr(cx.read(), &r.cred, r.ino, &r.name)?;
    let there = tables::XATTRS.has(cx.txn, (r.ino, &r.name))?;
    if !there && is_acl(&r.name) {
        return Ok(entry(cx.read(), cx.rules, r.ino)?); // as Linux does: there is none now
    }
    if !there {
        return Err(absent(r.ino, &r.name).into());
    }
    let own = changeable.revoke(cx, &[Need::Change])?;
    own.put_xattr(cx, &r.name, None);
    if is_acl(&r.name) {
        return Ok(note_acl(cx, own, None)?);
    }
    Ok(touch(cx, own)?)
}

fn is_acl(name: &[u8]) -> bool {
    name == acl::ACCESS || name == acl::DEFAULT
}

/// Sets a list; one that is equivalent to a mode becomes the mode.
fn set_acl(cx: &mut Cx<'_>, r: &SetXattr, changeable: ChangeableInode) -> Attempt<Entry> {
    require_xattr(cx.read(), &r.cred, r.ino, &r.name)?;
    let owned = owner_of_any(cx.read(), r.ino)?;
    let is_directory = find_access(cx.read(), r.ino)?.is_some();
    let list = Acl::parse(&r.value)?;
    if r.name == acl::DEFAULT && !is_directory {
        return Err(
            Error::denied(format!("inode {} is not a directory: it has no default list", r.ino)).into()
        );
    }
    let own = changeable.revoke(cx, &[Need::Change])?;
    let sets_mode = r.name == acl::ACCESS;
    let kept = list.as_ref().filter(|list| !sets_mode || !list.is_mode()).map(Acl::to_value);
    own.put_xattr(cx, &r.name, kept.as_deref());
    let new_mode = list.filter(|_| sets_mode).map(|list| owned.mode_with_list(&r.cred, &list));
    Ok(note_acl(cx, own, new_mode)?)
}

/// After a list was set or removed: the record shows whether there is one.
fn note_acl(cx: &mut Cx<'_>, own: OwnInode, mode: Option<u32>) -> Result<Entry> {
    let (ino, mut flag) = (own.ino(), 0);
    for kind in [acl::ACCESS, acl::DEFAULT] {
        if tables::XATTRS.has(cx.txn, (ino, kind))? {
            flag = HAS_ACL;
        }
    }
    let new = |old: u32| mode.unwrap_or(old & MODE_BITS) | flag | old & NOT_ENUMERATED;
    if let Some(mut inode) = find_inode(cx.read(), ino)? {
        inode.mode = new(inode.mode);
        cx.put_inode(ino, &inode);
    } else {
        let mut access = load_access(cx.read(), ino)?;
        access.mode = new(access.mode);
        cx.put_access(ino, &access);
    }
    touch(cx, own)
}

/// A change of attributes changes the ctime.
fn touch(cx: &mut Cx<'_>, own: OwnInode) -> Result<Entry> {
    if let Some(mut inode) = find_inode(cx.read(), own.ino())? {
        inode.ctime = cx.rules.after(inode.ctime);
        return own.put_file(cx, &inode, Changed::Attributes);
    }
    let access = load_access(cx.read(), own.ino())?;
    let mut tally = load_tally(cx.read(), own.ino())?;
    tally.ctime = cx.rules.after(tally.ctime);
    own.put_directory(cx, &access, &tally)
}

fn names(read: &dyn Read, ino: InodeId) -> Result<Vec<Bytes>> {
    tables::XATTRS.under(ino).keys(read, usize::MAX, |(_, name)| Bytes::copy_from_slice(name))
}

fn check_xattr_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Error::name(NameRule::Range, format!("an attribute name of {} bytes", name.len())));
    }
    let known = [b"user.".as_slice(), TRUSTED, b"security."];
    if known.contains(&name) {
        return Err(Error::invalid(format!("attribute {:?}: a name follows the prefix", show(name))));
    }
    let is_known = known.iter().any(|prefix| name.starts_with(prefix));
    if !(is_known || is_acl(name)) || name.contains(&0) {
        return Err(Error::unsupported(format!(
            "attribute {:?}: only user., trusted., security. and access control lists",
            show(name)
        )));
    }
    Ok(())
}

fn require_xattr(read: &dyn Read, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<()> {
    let owned = owner_of_any(read, ino)?;
    let allowed = if name.starts_with(b"user.") {
        allows(read, cred, ino, owned, WRITE)?
    } else if is_acl(name) {
        if cred.uid != 0 && cred.uid != owned.uid {
            return Err(Error::name(
                NameRule::NotOwner,
                format!("user {} does not own inode {ino}: only its owner sets its list", cred.uid),
            ));
        }
        true
    } else {
        cred.uid == 0 || (name.starts_with(b"security.") && cred.uid == owned.uid)
    };
    if allowed {
        return Ok(());
    }
    Err(Error::denied(format!("user {} may not change attribute {:?} of inode {ino}", cred.uid, show(name))))
}

fn absent(ino: InodeId, name: &[u8]) -> Error {
    Error::name(NameRule::NoAttribute, format!("inode {ino} has no attribute {:?}", show(name)))
}
