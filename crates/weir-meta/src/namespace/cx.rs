//! An operation in progress: its inputs, its transaction, its obstacles, and the events that follow from its
//! commit.
use super::home::AtHome;
use super::keeper::{Keeper, Snapshots};
use super::records::{directory, find_inode, load_file};
use crate::access::Mount;
use crate::lease::{LeaseTable, Need};
use crate::obstacle::{Attempt, Halt, Obstacle, Obstacles};
use crate::owner_limits::OwnerRecord;
use crate::owners::Charged;
use crate::quotas::Quotas;
use crate::record::{Access, Inode, NOT_ENUMERATED, Tally, VolumeRecord, no_lease};
use crate::tables;
use std::collections::BTreeSet;
use weir_kv::{Read, Scan, Txn};
use weir_proto::map::{Layout, Scheme};
use weir_proto::meta::{Attr, Entry, FileKind, Lease, LeaseKind, Time};
use weir_proto::quota::{Account, Holder};
use weir_proto::volume::Policy;
use weir_proto::{InodeId, PgId, Result, SessionId, VolumeId};

/// An operation's inputs besides the records.
pub struct Rules<'a> {
    pub session: SessionId,
    /// The client's name, for changelogs.
    pub client: &'a str,
    /// The client's mount, if the rules for mounts concern it.
    pub mount: Option<&'a Mount>,
    pub now: Time,
    /// The change is made again after a crash: not all sessions have returned.
    pub again: bool,
    pub leases: &'a LeaseTable,
    /// Limits of volumes, and the sessions' reservations there.
    pub quotas: &'a Quotas,
    /// Whether a session still exists.
    pub live: &'a dyn Fn(SessionId) -> bool,
    /// The number of sessions of the namespace that have ended while they may have been writing.
    pub deaths: u64,
    /// Volumes with a changelog.
    pub logged: &'a BTreeSet<VolumeId>,
    /// Volumes that mirror a home: they are read-only here.
    pub mirrored: &'a BTreeSet<VolumeId>,
    pub snapshots: &'a Snapshots,
    /// The volume of which a snapshot is being taken, and its topmost directory.
    pub snapshotting: Option<(VolumeId, InodeId)>,
    /// Whether home has bytes of a file.
    pub at_home: &'a AtHome,
    /// The layout of new files under a volume's policy. `None`: no placement group exists for it yet.
    pub layout: &'a dyn Fn(&Policy) -> Option<LayoutPolicy>,
}

/// A read-only operation in progress.
pub struct View<'a> {
    pub read: &'a dyn Read,
    pub rules: &'a Rules<'a>,
    pub obstacles: &'a mut Obstacles,
}

/// A changing operation in progress.
pub struct Cx<'a> {
    pub txn: &'a mut (dyn Txn + 'a),
    pub rules: &'a Rules<'a>,
    pub obstacles: &'a mut Obstacles,
    pub events: &'a mut Events,
    /// The user, if the operation names one.
    pub uid: Option<u32>,
}

/// Changes for the lease table after the commit.
#[derive(Default, Debug, PartialEq, Eq)]
pub struct Events {
    /// Lost their last name while open.
    pub orphaned: Vec<InodeId>,
    /// Got their first name while open.
    pub imported: Vec<InodeId>,
    /// Do not exist any more.
    pub gone: Vec<InodeId>,
    /// A file whose cells are to be dropped was recorded.
    pub garbage: bool,
    /// Volumes that were created, changed or removed (`None`), as they are now.
    pub volumes: Vec<(VolumeId, Option<VolumeRecord>)>,
    /// Additions to the usage of users and groups, if there is any limit.
    pub charged: Vec<(Account, Charged)>,
    /// Limits of users and groups that were set or removed (`None`), as they are now.
    pub limits: Vec<(Holder, Option<OwnerRecord>)>,
    /// A changelog has grown.
    pub logged: bool,
    /// Relations or changelog cursors were created or removed.
    pub relations: bool,
    /// Recalled bytes: the file, their offset, and the token epoch.
    pub filled: Vec<(InodeId, u64, u32)>,
    /// Files with evicted bytes that were truncated, and their new size.
    pub truncated: Vec<(InodeId, u64)>,
    /// Snapshots were created or removed.
    pub snapshots: bool,
    /// A directory is gone at home, and its content is to be removed.
    pub doomed: bool,
    /// Its result depends on leases that no other leader knows: it is answered when it is durable.
    pub under_leases: bool,
}

impl Events {
    /// Whether other state in memory than that of the changed inodes follows them, so that replies about
    /// other inodes depend on them.
    pub fn concern_all(&self) -> bool {
        let Events { volumes, limits, relations, snapshots, doomed, .. } = self;
        !volumes.is_empty() || !limits.is_empty() || *relations || *snapshots || *doomed
    }
}

/// Where new files go, by the cluster map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutPolicy {
    pub scheme: Scheme,
    pub cell_shift: u8,
    pub first_pg: PgId,
    pub pg_count: u32,
}

impl LayoutPolicy {
    pub fn layout(self, seed: u32) -> Layout {
        let LayoutPolicy { scheme, cell_shift, first_pg, pg_count } = self;
        Layout { scheme, cell_shift, first_pg, pg_count, seed }
    }
}

impl View<'_> {
    pub(super) fn need(&mut self, ino: InodeId, need: Need) {
        self.rules.leases.conflicts(self.rules.session, ino, need, self.obstacles);
    }
    /// Fails if there is an obstacle.
    pub(super) fn clear(&self) -> Attempt<()> {
        self.obstacles.halt()
    }
}

/// Runs a change, which halts if there is an obstacle. Keeps what snapshots show of the changed keys, for any
/// operation.
pub fn run<T>(
    txn: &mut dyn Txn,
    rules: &Rules<'_>,
    obstacles: &mut Obstacles,
    events: &mut Events,
    uid: Option<u32>,
    body: impl FnOnce(&mut Cx<'_>) -> Attempt<T>,
) -> Attempt<T> {
    let mut keeper = Keeper::new(txn, rules.snapshots);
    let done = body(&mut Cx { txn: &mut keeper, rules, obstacles, events, uid });
    // Even after an error: it may have come of what is in the way.
    obstacles.halt()?;
    let done = done?;
    let (garbage, charged) = keeper.finish(rules.now)?;
    events.garbage |= garbage;
    if !rules.quotas.is_empty() {
        events.charged = charged;
    }
    Ok(done)
}

impl Cx<'_> {
    pub(super) fn read(&self) -> &dyn Read {
        &*self.txn
    }
    pub(super) fn need(&mut self, ino: InodeId, need: Need) {
        self.rules.leases.conflicts(self.rules.session, ino, need, self.obstacles);
    }
    /// Fails if there is an obstacle.
    pub(super) fn clear(&self) -> Attempt<()> {
        self.obstacles.halt()
    }
    pub(super) fn put_inode(&mut self, ino: InodeId, inode: &Inode) {
        tables::INODES.put(self.txn, ino, inode);
    }
    pub(super) fn put_tally(&mut self, dir: InodeId, tally: &Tally) {
        tables::TALLIES.put(self.txn, dir, tally);
    }
    pub(super) fn put_access(&mut self, dir: InodeId, access: &Access) {
        tables::ACCESS.put(self.txn, dir, access);
    }
    pub fn delete_range(&mut self, (start, end): (Vec<u8>, Vec<u8>)) -> Result<()> {
        let mut found = Vec::new();
        self.txn.scan(&start, &end, &mut |key, _| {
            found.push(key.to_vec());
            Scan::More
        })?;
        for key in found {
            self.txn.delete(&key);
        }
        Ok(())
    }
}

/// Fails unless all names of a directory are known here.
pub(super) fn require_listed(obstacles: &mut Obstacles, dir: InodeId, access: &Access) -> Attempt<()> {
    if access.mode & NOT_ENUMERATED == 0 {
        return Ok(());
    }
    obstacles.push(Obstacle::NotEnumerated { dir });
    Err(Halt::Blocked)
}

impl Rules<'_> {
    /// Where a new file of a volume goes.
    pub(super) fn layout_in(&self, volume: VolumeId) -> Option<LayoutPolicy> {
        (self.layout)(self.quotas.policy(volume))
    }
    /// The time of a change after one at `last`: a clock that was set back does not make a newer state look
    /// older. Clients order replies that crossed each other by it.
    pub fn after(&self, last: Time) -> Time {
        Time { nanos: self.now.nanos.max(last.nanos) }
    }
    /// Whether a writer died while data of this file may have been in flight.
    pub fn must_recover(&self, ino: InodeId, inode: &Inode) -> bool {
        let writer_died = || inode.writing.writer != self.session && !(self.live)(inode.writing.writer);
        // The holder of the Write lease got it when no other's bytes were left, and may have unreported bytes
        // past the size: recovery would truncate them.
        let alone = || self.leases.held(inode.writing.writer, ino) == LeaseKind::Write;
        // One of the concurrent writers may be among the dead.
        let other_died = || inode.writing.shared_at.is_some_and(|deaths| deaths < self.deaths) && !alone();
        inode.writing.recover || (inode.writing.dirty && (writer_died() || other_died()))
    }
    pub(super) fn entry(&self, ino: InodeId, inode: &Inode) -> Entry {
        let lease = inode.lease(self.must_recover(ino, inode));
        Entry { attr: inode.attr(ino), lease: Lease { map_version: self.leases.written_under, ..lease } }
    }
}

/// Attributes of an inode of a kind known from its name.
pub(super) fn entry_of(read: &dyn Read, rules: &Rules<'_>, ino: InodeId, kind: FileKind) -> Result<Entry> {
    if kind == FileKind::Directory {
        return Ok(Entry { attr: directory(read, ino)?, lease: no_lease() });
    }
    Ok(rules.entry(ino, &load_file(read, ino)?))
}

/// Attributes of an inode of any kind.
pub(super) fn entry(read: &dyn Read, rules: &Rules<'_>, ino: InodeId) -> Result<Entry> {
    match find_inode(read, ino)? {
        Some(inode) => Ok(rules.entry(ino, &inode)),
        None => Ok(Entry { attr: directory(read, ino)?, lease: no_lease() }),
    }
}

pub(super) fn unleased(attr: Attr) -> Entry {
    Entry { attr, lease: no_lease() }
}

pub(super) fn nothing() -> Lease {
    no_lease()
}
