//! Removal of names: unlink, rmdir; files without a name or an opener.
use super::charge::Charge;
use super::dir_names::DirNames;
use super::gate::OwnDir;
use super::*;
use crate::leader::NO_SESSION;
use weir_proto::meta::{self, Removed};
use weir_proto::relation::What;

impl Cx<'_> {
    /// Removes one link of a file; its name has been removed already.
    pub(super) fn drop_link(&mut self, dir: InodeId, name: &[u8], ino: InodeId) -> Result<()> {
        let mut inode = load_file(self.read(), ino)?;
        inode.ctime = self.rules.after(inode.ctime);
        inode.nlink = inode.nlink.saturating_sub(1);
        if inode.nlink > 0 {
            self.drop_one_of_many(dir, name, ino, &mut inode)?;
            self.put_inode(ino, &inode);
            return Ok(());
        }
        self.charge(inode.parent, Charge::file(&inode).back())?;
        let mut openers = self.rules.leases.openers(ino);
        if self.rules.again {
            // Sessions that have not returned may have it open: it stays until they have.
            openers.push(NO_SESSION);
        }
        if openers.is_empty() {
            return self.destroy(ino, &inode);
        }
        for session in openers {
            tables::HELD.put(self.txn, (ino, session), &Present);
        }
        // The directory may be removed before the file; snapshots need its volume until then.
        inode.parent = volume::load(self.read(), self.volume_of(inode.parent)?)?.root;
        self.put_inode(ino, &inode);
        self.events.orphaned.push(ino);
        Ok(())
    }

    /// The first link has no record: if it is removed, another takes its place and its charge.
    fn drop_one_of_many(&mut self, dir: InodeId, name: &[u8], ino: InodeId, inode: &mut Inode) -> Result<()> {
        if tables::LINKS.has(self.read(), (ino, dir, name))? {
            tables::LINKS.delete(self.txn, (ino, dir, name));
            return Ok(());
        }
        let heir =
            tables::LINKS.under(ino).keys(self.read(), 1, |(_, dir, name)| (dir, name.to_vec()))?.pop();
        let Some((heir_dir, heir_name)) = heir else {
            return Err(Error::damaged(format!("inode {ino} has {} links more than names", inode.nlink)));
        };
        inode.cookie = load_link(self.read(), heir_dir, &heir_name)?.cookie;
        tables::LINKS.delete(self.txn, (ino, heir_dir, &heir_name));
        if heir_dir != inode.parent {
            self.charge(inode.parent, Charge::file(inode).back())?;
            self.charge(heir_dir, Charge::file(inode))?;
            inode.parent = heir_dir;
        }
        Ok(())
    }

    /// Removes a file that has neither name nor opener, and records its cells for the sweeper.
    fn destroy(&mut self, ino: InodeId, inode: &Inode) -> Result<()> {
        tables::INODES.delete(self.txn, ino);
        // Unconditionally: a delete costs less than to check whether it exists.
        tables::DATA.delete(self.txn, ino);
        tables::XATTRS.under(ino).delete_all(self.txn)?;
        if inode.evicted > 0 {
            tables::EVICTED.under(ino).delete_all(self.txn)?;
            self.events.truncated.push((ino, 0));
        }
        self.release_object(ino, inode)?;
        self.events.gone.push(ino);
        Ok(())
    }

    /// A name of a file is removed, and the file with its last one.
    pub(super) fn remove_file(&mut self, dir: InodeId, name: &[u8], link: &Link) -> Result<()> {
        self.remove_link(dir, name, link)?;
        self.drop_link(dir, name, link.ino)
    }
    /// Removes a name of a file, unless the volume's trash keeps it.
    pub(super) fn remove_or_keep(&mut self, dir: &OwnDir, name: &[u8], link: &Link) -> Attempt<()> {
        match trash::keep_file(self, (dir.ino(), dir.access()), name, link)? {
            true => Ok(()),
            false => Ok(self.remove_file(dir.ino(), name, link)?),
        }
    }
    /// In a directory with the sticky bit users remove only their own files.
    pub(super) fn require_removable(&self, cred: &Cred, dir: &Access, link: &Link) -> Result<()> {
        if !dir.owned().is_sticky() {
            return Ok(());
        }
        require_sticky(cred, dir, owner_of(self.read(), link.ino, link.kind)?.uid)
    }
    /// An empty directory is removed.
    pub(super) fn remove_directory(&mut self, dir: InodeId, name: &[u8], link: &Link) -> Result<()> {
        self.remove_link(dir, name, link)?;
        self.destroy_directory(dir, link.ino)
    }
    fn remove_link(&mut self, dir: InodeId, name: &[u8], link: &Link) -> Result<()> {
        let mut names = DirNames::load(self.read(), dir)?;
        names.remove(self, name, link);
        names.store(self);
        log_removed(self, dir, name, link)
    }

    /// Removes an empty directory whose name has been removed already.
    pub(super) fn destroy_directory(&mut self, parent: InodeId, dir: InodeId) -> Result<()> {
        tables::ACCESS.delete(self.txn, dir);
        tables::TALLIES.delete(self.txn, dir);
        tables::XATTRS.under(dir).delete_all(self.txn)?;
        tables::USAGE.under(dir).delete_all(self.txn)?;
        self.events.gone.push(dir);
        self.charge(parent, Charge { directories: -1, ..Charge::default() })
    }
}

/// The entry to remove, checked, without a conflicting lease.
fn prepare_removal(
    cx: &mut Cx<'_>,
    cred: &Cred,
    parent: InodeId,
    name: &[u8],
    fits: impl FnOnce(FileKind) -> Result<()>,
) -> Attempt<(OwnDir, Link)> {
    check_name(name)?;
    let dir = cx.dir_to_search(cred, parent)?;
    dir.require_listed(cx)?;
    let link = dir.load(cx, name)?;
    let dir = dir.for_change(cx)?;
    cx.require_removable(cred, dir.access(), &link)?;
    fits(link.kind)?;
    Ok((dir.revoke(cx, &[link.ino])?, link))
}

pub fn unlink(cx: &mut Cx<'_>, r: &meta::Unlink) -> Attempt<Removed> {
    let (dir, link) = prepare_removal(cx, &r.cred, r.parent, &r.name, |kind| match kind {
        FileKind::Directory => {
            Err(Error::name(NameRule::IsDirectory, format!("{:?} is a directory", show(&r.name))))
        }
        _ => Ok(()),
    })?;
    cx.remove_or_keep(&dir, &r.name, &link)?;
    Ok(Removed {
        ino: link.ino,
        parent_attr: directory_attr(r.parent, dir.access(), &load_tally(cx.read(), r.parent)?),
        parent_lease: nothing(),
    })
}

pub fn rmdir(cx: &mut Cx<'_>, r: &meta::Rmdir) -> Attempt<Removed> {
    let (dir, link) = prepare_removal(cx, &r.cred, r.parent, &r.name, |kind| match kind {
        FileKind::Directory => Ok(()),
        _ => Err(Error::name(NameRule::NotDirectory, format!("{:?} is not a directory", show(&r.name)))),
    })?;
    volume::require_no_root(cx.read(), dir.access().volume, link.ino)?;
    let victim = load_access(cx.read(), link.ino)?;
    require_listed(cx.obstacles, link.ino, &victim)?;
    require_empty(cx.read(), link.ino)?;
    trash::keep_directory(cx, link.ino, &victim)?;
    cx.remove_directory(r.parent, &r.name, &link)?;
    Ok(Removed {
        ino: link.ino,
        parent_attr: directory_attr(r.parent, dir.access(), &load_tally(cx.read(), r.parent)?),
        parent_lease: nothing(),
    })
}

fn log_removed(cx: &mut Cx<'_>, parent: InodeId, name: &[u8], link: &Link) -> Result<()> {
    if cx.rules.logged.is_empty() {
        return Ok(());
    }
    let (ino, kind, name) = (link.ino, link.kind, bytes::Bytes::copy_from_slice(name));
    let last = is_last(cx.read(), ino)?;
    cx.log(parent, || What::Removed { ino, kind, parent, name, last })
}
/// Whether an inode ends with the removal of one of its names.
pub(super) fn is_last(read: &dyn Read, ino: InodeId) -> Result<bool> {
    Ok(find_inode(read, ino)?.is_none_or(|inode| inode.nlink <= 1))
}

pub(super) fn require_empty(read: &dyn Read, dir: InodeId) -> Result<()> {
    match load_tally(read, dir)?.entries {
        0 => Ok(()),
        n => Err(Error::name(NameRule::NotEmpty, format!("directory {dir} has {n} entries"))),
    }
}

/// A session has no more opens of a nameless file; the last one deletes the file.
pub fn release_orphan(cx: &mut Cx<'_>, ino: InodeId, session: SessionId) -> Result<()> {
    tables::HELD.delete(cx.txn, (ino, session));
    if tables::HELD.under(ino).has_any(cx.read())? {
        return Ok(());
    }
    match find_inode(cx.read(), ino)? {
        Some(inode) if inode.nlink == 0 => cx.destroy(ino, &inode),
        _ => Ok(()),
    }
}
