//! Attributes: what `stat` shows, and setattr with truncation.
use super::gate::{ChangeableInode, Changed};
use super::*;
use bytes::Bytes;
use weir_proto::meta::{self, ACCESSES_MAX, FILE_BYTES_MAX, INLINE_MAX, LinkTarget, LookedUp, SetAttr};
use weir_proto::posix::{Change, MayWrite, Refused};
use weir_proto::relation::What;

pub fn lookup(view: &mut View<'_>, r: &meta::Lookup) -> Attempt<LookedUp> {
    check_name(&r.name)?;
    let access = load_access(view.read, r.parent)?;
    require(view.read, &r.cred, &access, r.parent, SEARCH)?;
    let Some(link) = find_link(view.read, r.parent, &r.name)? else {
        require_listed(view.obstacles, r.parent, &access)?;
        return Ok(LookedUp { entry: None, parent_lease: nothing() });
    };
    view.need(link.ino, Need::GetAttr);
    view.clear()?;
    let entry = entry_of(view.read, view.rules, link.ino, link.kind)?;
    Ok(LookedUp { entry: Some(entry), parent_lease: nothing() })
}

pub fn getattr(view: &mut View<'_>, ino: InodeId) -> Attempt<Entry> {
    view.need(ino, Need::GetAttr);
    view.clear()?;
    Ok(entry(view.read, view.rules, ino)?)
}

pub fn readlink(view: &mut View<'_>, ino: InodeId) -> Result<LinkTarget> {
    if load_file(view.read, ino)?.kind != FileKind::Symlink {
        return Err(Error::invalid(format!("inode {ino} is not a symbolic link")));
    }
    let target = tables::DATA.get(view.read, ino)?;
    let target =
        target.ok_or_else(|| Error::damaged(format!("the target of symbolic link {ino} is lost")))?;
    Ok(LinkTarget { target: Bytes::from(target) })
}

pub fn setattr(cx: &mut Cx<'_>, r: &SetAttr) -> Attempt<Entry> {
    let changeable = cx.inode_to_change(r.ino)?;
    match find_inode(cx.read(), r.ino)? {
        Some(inode) => set_file(cx, r, changeable, inode),
        None => set_directory(cx, r, changeable),
    }
}

fn set_file(cx: &mut Cx<'_>, r: &SetAttr, changeable: ChangeableInode, mut inode: Inode) -> Attempt<Entry> {
    let change = permitted_change(cx, r, inode.owned())?;
    if let Some(size) = r.size {
        check_size(r.ino, &inode, size)?;
    }
    let needs = [Need::Change, Need::AppendToken];
    let own = changeable.revoke(cx, if r.size.is_some() { &needs } else { &needs[..1] })?;
    let before = inode.clone();
    inode.set_owned(before.owned().changed(&r.cred, &change, false));
    cx.require_owner(&r.cred, r.ino, &before, &inode)?;
    if r.mode.is_some() {
        cx.set_acl_mode(r.ino, inode.mode)?;
    }
    if let Some(size) = r.size {
        cx.set_size(r.ino, &mut inode, size)?;
    }
    inode.atime = r.atime.unwrap_or(inode.atime);
    inode.mtime = r.mtime.unwrap_or(inode.mtime);
    inode.ctime = cx.rules.after(inode.ctime);
    let has_attributes = r.mode.or(r.uid).or(r.gid).is_some() || r.atime.or(r.mtime).is_some();
    Ok(own.put_file(cx, &inode, if has_attributes { Changed::Attributes } else { Changed::Nothing })?)
}

fn set_directory(cx: &mut Cx<'_>, r: &SetAttr, changeable: ChangeableInode) -> Attempt<Entry> {
    let mut access = load_access(cx.read(), r.ino)?;
    let mut tally = load_tally(cx.read(), r.ino)?;
    if r.size.is_some() {
        return Err(Error::name(
            NameRule::IsDirectory,
            format!("inode {} is a directory: it has no size", r.ino),
        )
        .into());
    }
    let change = permitted_change(cx, r, access.owned())?;
    let own = changeable.revoke(cx, &[Need::Change])?;
    let before = access;
    access.set_owned(before.owned().changed(&r.cred, &change, true));
    cx.require_directory_owner(&r.cred, &before, &access)?;
    if r.mode.is_some() {
        cx.set_acl_mode(r.ino, access.mode)?;
    }
    access.atime = r.atime.unwrap_or(access.atime);
    tally.mtime = r.mtime.unwrap_or(tally.mtime);
    tally.ctime = cx.rules.after(tally.ctime);
    Ok(own.put_directory(cx, &access, &tally)?)
}

/// Sets access times after reads. Nothing else changes, so no lease conflicts: a client that caches
/// attributes sees the new time when it asks next.
pub fn note_access(cx: &mut Cx<'_>, r: &meta::NoteAccess) -> Result<()> {
    if r.accesses.len() > ACCESSES_MAX {
        return Err(Error::invalid(format!(
            "{} accesses in one request: at most {ACCESSES_MAX}",
            r.accesses.len()
        )));
    }
    for accessed in &r.accesses {
        let at = Time { nanos: accessed.at.nanos.min(cx.rules.now.nanos) };
        // A time in the future was set, and the newest report counts.
        let follows = |old: Time| old.nanos < at.nanos || old.nanos > cx.rules.now.nanos;
        if cx.rules.require_changeable(cx.read(), accessed.ino, "NoteAccess").is_err() {
            continue; // a read-only volume can be read
        }
        if let Some(mut inode) = find_inode(cx.read(), accessed.ino)? {
            if follows(inode.atime) {
                inode.atime = at;
                cx.put_inode(accessed.ino, &inode);
            }
        } else if let Some(mut access) = find_access(cx.read(), accessed.ino)?
            && follows(access.atime)
        {
            access.atime = at;
            cx.put_access(accessed.ino, &access);
        }
    }
    Ok(())
}

/// The change that a user asks for, if it may be made.
fn permitted_change(cx: &Cx<'_>, r: &SetAttr, of: Owned) -> Result<Change> {
    let may_write = if allows(cx.read(), &r.cred, r.ino, of, WRITE)? {
        MayWrite::ByPermission
    } else if cx.rules.leases.may_write(cx.rules.session, r.ino) {
        MayWrite::ByOpen
    } else {
        MayWrite::No
    };
    let times = r.atime.or(r.mtime).is_some();
    let change = Change { mode: r.mode, uid: r.uid, gid: r.gid, times, size: r.size.is_some() };
    let refused = match of.check(&r.cred, &change, may_write) {
        Ok(()) => return Ok(change),
        Err(Refused::Size) => {
            return Err(Error::denied(format!("user {} may not write inode {}", r.cred.uid, r.ino)));
        }
        Err(Refused::Mode) => "mode",
        Err(Refused::Owner) => "owner",
        Err(Refused::Group) => "group",
        Err(Refused::Times) => "times",
    };
    let why = format!("user {} may not change the {refused} of inode {}", r.cred.uid, r.ino);
    Err(Error::name(NameRule::NotOwner, why))
}

fn check_size(ino: InodeId, inode: &Inode, size: u64) -> Result<()> {
    if inode.kind != FileKind::Regular {
        return Err(Error::invalid(format!("inode {ino} is not a regular file: it has no size to set")));
    }
    if size > FILE_BYTES_MAX {
        return Err(Error::name(
            NameRule::FileTooBig,
            format!("{size} bytes: a file has at most {FILE_BYTES_MAX}"),
        ));
    }
    Ok(())
}

impl Cx<'_> {
    /// Truncates or extends a file. `data_end` remembers what may be on targets beyond.
    pub(super) fn set_size(&mut self, ino: InodeId, inode: &mut Inode, size: u64) -> Result<()> {
        if size < inode.size {
            self.leave_snapshots(ino, inode)?;
            // Other clients' writes in flight are for a size that is void.
            inode.writing.token_epoch = super::writer::next_truncation(inode.writing.token_epoch);
            if !self.truncate_inline(ino, size)? {
                inode.writing.data_end = inode.writing.data_end.max(inode.size);
            }
            let allocated = inode.allocated.min(size);
            let evicted = self.truncate_evicted(ino, inode, size)?;
            self.truncate_layers(ino, inode, size)?;
            self.set_space(inode, allocated, evicted)?;
        } else if size == inode.size && inode.allocated > size {
            let (allocated, evicted) = (size, inode.evicted); // no space is reserved past the end any more
            self.set_space(inode, allocated, evicted)?;
        }
        inode.size = size;
        inode.data_version += 1;
        inode.mtime = self.rules.now;
        self.log_of(ino, || What::Resized { ino, size })
    }

    /// The list follows the mode.
    fn set_acl_mode(&mut self, ino: InodeId, mode: u32) -> Result<()> {
        if mode & HAS_ACL != 0
            && let Some(mut acl) = find_acl(self.read(), ino, acl::ACCESS)?
        {
            acl.set_mode(mode);
            tables::XATTRS.put_bytes(self.txn, (ino, acl::ACCESS), &acl.to_value());
        }
        Ok(())
    }

    /// Truncates inline data; false if there is none.
    fn truncate_inline(&mut self, ino: InodeId, size: u64) -> Result<bool> {
        let Some(data) = tables::DATA.get(self.read(), ino)? else { return Ok(false) };
        if size == 0 {
            tables::DATA.delete(self.txn, ino);
        } else if (size as usize) < data.len() && size <= INLINE_MAX as u64 {
            tables::DATA.put_bytes(self.txn, ino, &data[..size as usize]);
        }
        Ok(true)
    }
}
