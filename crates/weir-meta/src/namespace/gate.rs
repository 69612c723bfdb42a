//! Gates: an operation of a client gets a directory or a file to change only here, where everything is
//! checked that such a change requires.
//!
//! A directory: [`SearchableDir`] may be searched by the user; [`ChangeableDir`] may be changed, is in a
//! volume that does not mirror a home, and all its names are known; [`OwnDir`] has no other session's lease,
//! because these were revoked or the session has its names to itself ([`HeldNames`]).
//! A file: [`WritableFile`] belongs to no snapshot, and its writer is recorded. An inode of any kind:
//! [`ChangeableInode`] is in a volume that does not mirror a home; [`OwnInode`] has no other session's
//! conflicting lease, and its record is written together with the entries of the changelog. The fields are
//! private, so an operation cannot make one by itself.
use super::cx::unleased;
use super::cx::{Cx, Rules, require_listed};
use super::permission::require;
use super::records::{find_inode, find_link, load_access, load_link};
use super::volume;
use crate::lease::Need;
use crate::obstacle::{Attempt, Obstacle};
use crate::record::{Access, Inode, Link, Tally, directory_attr};
use crate::tables;
use weir_proto::meta::{Cred, Entry, LeaseKind, Range};
use weir_proto::posix::{SEARCH, WRITE};
use weir_proto::relation::What;
use weir_proto::{Error, InodeId, NameRule, Result, VolumeId};

/// A directory in which a user may search.
pub(super) struct SearchableDir<'a> {
    ino: InodeId,
    access: Access,
    cred: &'a Cred,
}

/// A directory in which a user may make files; its names need not be known.
pub(super) struct WritableDir {
    ino: InodeId,
    access: Access,
}

/// A directory whose names a user may change.
pub(super) struct ChangeableDir {
    ino: InodeId,
    access: Access,
}

/// A directory whose names this operation changes: no other session has a lease on it.
pub(super) struct OwnDir {
    ino: InodeId,
    access: Access,
}

/// A directory whose names the session has to itself.
pub(super) struct HeldNames(InodeId);

/// A file whose data this session may change from now on.
pub(super) struct WritableFile {
    inode: Inode,
    changed: bool,
}

/// An inode that a client may change.
pub(super) struct ChangeableInode(InodeId);

/// An inode that this operation changes.
pub(super) struct OwnInode(InodeId);

/// A change of a file that its relation needs to know. A change of its size is logged where it is set.
pub(super) enum Changed<'a> {
    Nothing,
    Attributes,
    Data(&'a [Range]),
}

impl Cx<'_> {
    /// Refuses a change of a volume that mirrors a home, by any client.
    pub(super) fn require_own(&self, volume: VolumeId) -> Result<()> {
        if !self.rules.mirrored.contains(&volume) {
            return Ok(());
        }
        let why = "the volume mirrors a home and is read only here: change it there (`weir relation list`)";
        Err(Error::name(NameRule::ReadOnly, why))
    }
    /// Refuses a change of an inode in such a volume, by any client.
    pub(super) fn require_own_inode(&self, ino: InodeId) -> Result<()> {
        if self.rules.mirrored.is_empty() {
            return Ok(());
        }
        let dir = find_inode(self.read(), ino)?.map_or(ino, |inode| inode.parent);
        volume::find_volume_of(self.read(), dir)?.map_or(Ok(()), |volume| self.require_own(volume))
    }
    /// No other session gets the right to write in a volume while its snapshot waits for those that have it.
    pub(super) fn wait_for_snapshot(&mut self, ino: InodeId, inode: &Inode) -> Attempt<()> {
        let (leases, session) = (self.rules.leases, self.rules.session);
        if self.rules.snapshotting.is_none()
            || inode.nlink == 0
            || leases.held(session, ino) == LeaseKind::Write
        {
            return Ok(());
        }
        self.wait_for_snapshot_of(self.volume_of(inode.parent)?)
    }
    pub(super) fn wait_for_snapshot_of(&mut self, volume: VolumeId) -> Attempt<()> {
        if let Some((_, root)) = self.rules.snapshotting.filter(|(of, _)| *of == volume) {
            self.obstacles.push(Obstacle::Snapshot { root });
        }
        self.clear()
    }

    pub(super) fn inode_to_change(&self, ino: InodeId) -> Result<ChangeableInode> {
        self.require_own_inode(ino)?;
        Ok(ChangeableInode(ino))
    }

    /// Revokes the leases that conflict with these needs. For changes that any volume takes: bytes that are
    /// durable on targets, or at home.
    pub(super) fn own_inode(&mut self, ino: InodeId, needs: &[Need]) -> Attempt<OwnInode> {
        needs.iter().for_each(|need| self.need(ino, *need));
        self.clear()?;
        Ok(OwnInode(ino))
    }

    pub(super) fn dir_to_search<'a>(&self, cred: &'a Cred, dir: InodeId) -> Result<SearchableDir<'a>> {
        let access = load_access(self.read(), dir)?;
        require(self.read(), cred, &access, dir, SEARCH)?;
        Ok(SearchableDir { ino: dir, access, cred })
    }

    pub(super) fn dir_to_write(&self, cred: &Cred, dir: InodeId) -> Result<WritableDir> {
        WritableDir::of(self, cred, dir, load_access(self.read(), dir)?)
    }

    /// Waits for a snapshot of its volume, leaves those that hold its object, and records the writer.
    pub(super) fn file_to_write(&mut self, ino: InodeId, mut inode: Inode) -> Attempt<WritableFile> {
        self.wait_for_snapshot(ino, &inode)?;
        let changed = self.leave_snapshots(ino, &mut inode)? | self.begin_writing(ino, &mut inode)?;
        Ok(WritableFile { inode, changed })
    }
}

impl Rules<'_> {
    /// Fails unless the session has the names of the directory to itself.
    pub(super) fn held_names(&self, dir: InodeId) -> Result<HeldNames> {
        let session = self.session;
        if self.leases.held(session, dir) == LeaseKind::Write {
            return Ok(HeldNames(dir));
        }
        Err(Error::stale(format!(
            "session {session} does not have the names of directory {dir} to itself (any more)"
        )))
    }
}

impl SearchableDir<'_> {
    /// An entry; `None`: it is not known here.
    pub fn find(&self, cx: &Cx<'_>, name: &[u8]) -> Result<Option<Link>> {
        find_link(cx.read(), self.ino, name)
    }
    /// An entry that must exist.
    pub fn load(&self, cx: &Cx<'_>, name: &[u8]) -> Result<Link> {
        load_link(cx.read(), self.ino, name)
    }
    /// Fails unless all its names are known.
    pub fn require_listed(&self, cx: &mut Cx<'_>) -> Attempt<()> {
        require_listed(cx.obstacles, self.ino, &self.access)
    }
    pub fn for_change(self, cx: &mut Cx<'_>) -> Attempt<ChangeableDir> {
        WritableDir::of(cx, self.cred, self.ino, self.access)?.for_change(cx)
    }
}

impl WritableDir {
    fn of(cx: &Cx<'_>, cred: &Cred, ino: InodeId, access: Access) -> Result<WritableDir> {
        require(cx.read(), cred, &access, ino, WRITE | SEARCH)?;
        cx.require_own(access.volume)?;
        Ok(WritableDir { ino, access })
    }
    pub fn for_change(self, cx: &mut Cx<'_>) -> Attempt<ChangeableDir> {
        require_listed(cx.obstacles, self.ino, &self.access)?;
        Ok(ChangeableDir { ino: self.ino, access: self.access })
    }
    /// For a file without a name: the directory does not change, so no lease on it conflicts.
    pub fn for_nameless(self) -> (InodeId, Access) {
        (self.ino, self.access)
    }
}

impl ChangeableDir {
    pub fn access(&self) -> &Access {
        &self.access
    }
    /// Revokes the leases on it and on `others`.
    pub fn revoke(self, cx: &mut Cx<'_>, others: &[InodeId]) -> Attempt<OwnDir> {
        cx.need(self.ino, Need::Change);
        others.iter().for_each(|ino| cx.need(*ino, Need::Change));
        cx.clear()?;
        Ok(OwnDir { ino: self.ino, access: self.access })
    }
    /// The session has its names to itself: no other lease is to be revoked.
    pub fn held(self, names: &HeldNames) -> OwnDir {
        assert_eq!(names.0, self.ino, "the session has the names of another directory to itself");
        OwnDir { ino: self.ino, access: self.access }
    }
}

/// Revokes the leases on two directories and on `others`, all at once.
pub(super) fn revoke_both(
    cx: &mut Cx<'_>,
    (one, other): (ChangeableDir, ChangeableDir),
    others: &[InodeId],
) -> Attempt<(OwnDir, OwnDir)> {
    cx.need(one.ino, Need::Change);
    let other = other.revoke(cx, others)?;
    Ok((OwnDir { ino: one.ino, access: one.access }, other))
}

impl OwnDir {
    pub fn ino(&self) -> InodeId {
        self.ino
    }
    pub fn access(&self) -> &Access {
        &self.access
    }
    pub fn into_access(self) -> Access {
        self.access
    }
}

impl ChangeableInode {
    /// Revokes the leases that conflict with these needs.
    pub fn revoke(self, cx: &mut Cx<'_>, needs: &[Need]) -> Attempt<OwnInode> {
        cx.own_inode(self.0, needs)
    }
}

impl OwnInode {
    pub fn ino(&self) -> InodeId {
        self.0
    }
    /// Sets an extended attribute; `None`: removes it.
    pub fn put_xattr(&self, cx: &mut Cx<'_>, name: &[u8], value: Option<&[u8]>) {
        match value {
            Some(value) => tables::XATTRS.put_bytes(cx.txn, (self.0, name), value),
            None => tables::XATTRS.delete(cx.txn, (self.0, name)),
        }
    }
    /// Charges the file's space to its volume, its owner and the directories above.
    pub fn set_space(&self, cx: &mut Cx<'_>, inode: &mut Inode, allocated: u64, evicted: u64) -> Result<()> {
        cx.set_space(inode, allocated, evicted)
    }
    /// Writes the record of a file, and logs the change.
    pub fn put_file(self, cx: &mut Cx<'_>, inode: &Inode, changed: Changed<'_>) -> Result<Entry> {
        let ino = self.0;
        cx.put_inode(ino, inode);
        match changed {
            Changed::Nothing => {}
            Changed::Attributes => cx.log_of(ino, || What::Attributes { ino })?,
            Changed::Data(ranges) => {
                for range in ranges {
                    let (offset, end) =
                        (range.offset, range.offset.saturating_add(range.len).min(inode.size));
                    if offset < end {
                        cx.log_of(ino, || What::Data { ino, offset, len: end - offset })?;
                    }
                }
            }
        }
        Ok(cx.rules.entry(ino, inode))
    }
    /// Writes the records of a directory with other attributes, and logs the change.
    pub fn put_directory(self, cx: &mut Cx<'_>, access: &Access, tally: &Tally) -> Result<Entry> {
        let ino = self.0;
        cx.put_access(ino, access);
        cx.put_tally(ino, tally);
        cx.log_of(ino, || What::Attributes { ino })?;
        Ok(unleased(directory_attr(ino, access, tally)))
    }
}

impl WritableFile {
    /// The inode, and whether its record has changed.
    pub fn into_inode(self) -> (Inode, bool) {
        (self.inode, self.changed)
    }
}
