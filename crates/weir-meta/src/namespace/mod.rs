//! The operations of the namespace: each reads, checks and changes inside one transaction.
//!
//! Invariants: an operation either makes all its changes or, with an error, none. It changes nothing as long
//! as another session's lease conflicts: it names the conflict and is retried later. Its reply has no lease
//! kinds in it: those are granted when the transaction is committed.
//!
//! Knows nothing of connections, durability, or how leases are revoked.

pub mod acl;
pub mod admit;
pub mod attr;
pub mod births;
pub mod clone;
pub mod create;
pub mod data;
pub mod evict;
pub mod evicted;
pub mod home;
pub mod import;
pub mod keeper;
pub mod layers;
pub mod list;
pub mod log;
pub mod lost;
pub mod mirror;
pub mod objects;
pub mod open;
pub mod path;
pub mod remove;
mod remove_tree;
pub mod rename;
pub mod report;
pub mod snapshot;
pub mod snapshot_view;
pub mod trash;
mod usage;
pub mod volume;
pub mod xattr;

pub use home::AtHome;
pub use keeper::Snapshots;
pub use remove::release_orphan;
pub use usage::{Charge, totals, usage_of, volume_usage};

use crate::access::Mount;
use crate::keys;
use crate::lease::{Conflict, LeaseTable, Need};
use crate::quotas::Quotas;
use crate::record::{
    Access, HAS_ACL, Inode, Link, MODE_BITS, NOT_ENUMERATED, Record, Tally, VolumeRecord, directory_attr,
    no_lease,
};
use acl::Acl;
use keeper::Keeper;
use std::collections::BTreeSet;
use weir_kv::{Read, Txn};
use weir_proto::map::{Layout, Scheme};
use weir_proto::meta::{Attr, Cred, Entry, FileKind, Lease, LeaseKind, NAME_MAX, Time};
use weir_proto::volume::Policy;
use weir_proto::{Error, InodeId, NameRule, PgId, Result, SessionId, VolumeId};

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

/// An operation's inputs besides the records.
pub struct Rules<'a> {
    pub session: SessionId,
    /// The client's name, for changelogs.
    pub client: &'a str,
    /// The client's mount, if the rules for mounts concern it.
    pub mount: Option<&'a Mount>,
    pub now: Time,
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
    pub conflicts: &'a mut Vec<Conflict>,
}

/// A changing operation in progress.
pub struct Cx<'a> {
    pub txn: &'a mut (dyn Txn + 'a),
    pub rules: &'a Rules<'a>,
    pub conflicts: &'a mut Vec<Conflict>,
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
    /// Additions to the usage of volumes with limits.
    pub charged: Vec<(VolumeId, Charge)>,
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
}

/// Permission bits of one class.
pub const READ: u32 = 4;
pub const WRITE: u32 = 2;
pub const SEARCH: u32 = 1;
/// The same bit, for a file.
pub const EXECUTE: u32 = 1;

const SET_GID: u32 = 0o2000;
const STICKY: u32 = 0o1000;

impl View<'_> {
    fn need(&mut self, ino: InodeId, need: Need) {
        self.rules.leases.conflicts(self.rules.session, ino, need, self.conflicts);
    }
    /// Fails if a lease conflicts.
    fn clear(&self) -> Result<()> {
        halt_if(!self.conflicts.is_empty())
    }
}

/// Runs a change. Keeps what snapshots show of the changed keys, for any operation.
pub fn run<T>(
    txn: &mut dyn Txn,
    rules: &Rules<'_>,
    conflicts: &mut Vec<Conflict>,
    events: &mut Events,
    uid: Option<u32>,
    body: impl FnOnce(&mut Cx<'_>) -> Result<T>,
) -> Result<T> {
    let mut keeper = Keeper::new(txn, rules.snapshots);
    let done = body(&mut Cx { txn: &mut keeper, rules, conflicts, events, uid })?;
    events.garbage |= keeper.finish(rules.now)?;
    Ok(done)
}

impl Cx<'_> {
    fn read(&self) -> &dyn Read {
        &*self.txn
    }
    fn need(&mut self, ino: InodeId, need: Need) {
        self.rules.leases.conflicts(self.rules.session, ino, need, self.conflicts);
    }
    /// Fails if a lease conflicts.
    fn clear(&self) -> Result<()> {
        halt_if(!self.conflicts.is_empty())
    }
    fn put_inode(&mut self, ino: InodeId, inode: &Inode) {
        self.txn.put(&keys::inode(ino), &inode.to_value());
    }
    fn put_tally(&mut self, dir: InodeId, tally: &Tally) {
        self.txn.put(&keys::tally(dir), &tally.to_value());
    }
    fn put_access(&mut self, dir: InodeId, access: &Access) {
        self.txn.put(&keys::access(dir), &access.to_value());
    }
}

/// Fails unless all names of a directory are known here.
fn require_listed(conflicts: &mut Vec<Conflict>, dir: InodeId, access: &Access) -> Result<()> {
    if access.mode & NOT_ENUMERATED == 0 {
        return Ok(());
    }
    conflicts.push(Conflict::not_enumerated(dir));
    halt_if(true)
}

/// Stops a transaction whose conflicts are the reason; costs no allocation.
fn halt_if(blocked: bool) -> Result<()> {
    if blocked { Err(Error::unavailable(String::new())) } else { Ok(()) }
}

impl Rules<'_> {
    /// Where a new file of a volume goes.
    fn layout_in(&self, volume: VolumeId) -> Option<LayoutPolicy> {
        (self.layout)(self.quotas.policy(volume))
    }
    /// The time of a change after one at `last`: a clock that was set back does not make a newer state look
    /// older. Clients order replies that crossed each other by it.
    pub fn after(&self, last: Time) -> Time {
        Time { nanos: self.now.nanos.max(last.nanos) }
    }
    /// Whether a writer died while data of this file may have been in flight.
    pub fn must_recover(&self, ino: InodeId, inode: &Inode) -> bool {
        let writer_died = || inode.writer != self.session && !(self.live)(inode.writer);
        // The holder of the Write lease got it when no other's bytes were left, and may have unreported bytes
        // past the size: recovery would truncate them.
        let alone = || self.leases.held(inode.writer, ino) == LeaseKind::Write;
        // One of the concurrent writers may be among the dead.
        let other_died = || inode.shared_at.is_some_and(|deaths| deaths < self.deaths) && !alone();
        inode.recover || (inode.dirty && (writer_died() || other_died()))
    }
    fn entry(&self, ino: InodeId, inode: &Inode) -> Entry {
        let lease = inode.lease(self.must_recover(ino, inode));
        Entry { attr: inode.attr(ino), lease: Lease { map_version: self.leases.written_under, ..lease } }
    }
}

// ---- loading

pub fn find_inode(read: &dyn Read, ino: InodeId) -> Result<Option<Inode>> {
    let value = read.get(&keys::inode(ino))?;
    value.map(|v| Inode::from_value(&v, || format!("inode {ino}"))).transpose()
}
/// A file that must exist and must not be a directory.
fn load_file(read: &dyn Read, ino: InodeId) -> Result<Inode> {
    if let Some(inode) = find_inode(read, ino)? {
        return Ok(inode);
    }
    match find_access(read, ino)? {
        Some(_) => Err(Error::name(NameRule::IsDirectory, format!("inode {ino} is a directory"))),
        None => Err(stale(ino)),
    }
}
fn find_access(read: &dyn Read, dir: InodeId) -> Result<Option<Access>> {
    let value = read.get(&keys::access(dir))?;
    value.map(|v| Access::from_value(&v, || format!("directory {dir}"))).transpose()
}
/// A directory that must exist.
fn load_access(read: &dyn Read, dir: InodeId) -> Result<Access> {
    if let Some(access) = find_access(read, dir)? {
        return Ok(access);
    }
    match find_inode(read, dir)? {
        Some(_) => Err(Error::name(NameRule::NotDirectory, format!("inode {dir} is not a directory"))),
        None => Err(stale(dir)),
    }
}
fn load_tally(read: &dyn Read, dir: InodeId) -> Result<Tally> {
    let value = read.get(&keys::tally(dir))?.ok_or_else(|| stale(dir))?;
    Tally::from_value(&value, || format!("the counts of directory {dir}"))
}
pub(crate) fn find_link(read: &dyn Read, dir: InodeId, name: &[u8]) -> Result<Option<Link>> {
    let value = read.get(&keys::name(dir, name))?;
    value.map(|v| Link::from_value(&v, || format!("{:?} in directory {dir}", show(name)))).transpose()
}
fn load_link(read: &dyn Read, dir: InodeId, name: &[u8]) -> Result<Link> {
    find_link(read, dir, name)?
        .ok_or_else(|| Error::not_found(format!("{:?} is not in directory {dir}", show(name))))
}
fn directory(read: &dyn Read, dir: InodeId) -> Result<Attr> {
    Ok(directory_attr(dir, &load_access(read, dir)?, &load_tally(read, dir)?))
}
/// Attributes of an inode of a kind known from its name.
fn entry_of(read: &dyn Read, rules: &Rules<'_>, ino: InodeId, kind: FileKind) -> Result<Entry> {
    if kind == FileKind::Directory {
        return Ok(Entry { attr: directory(read, ino)?, lease: no_lease() });
    }
    Ok(rules.entry(ino, &load_file(read, ino)?))
}
/// Attributes of an inode of any kind.
fn entry(read: &dyn Read, rules: &Rules<'_>, ino: InodeId) -> Result<Entry> {
    match find_inode(read, ino)? {
        Some(inode) => Ok(rules.entry(ino, &inode)),
        None => Ok(Entry { attr: directory(read, ino)?, lease: no_lease() }),
    }
}
/// Owner, group and mode of an inode of a kind known from its name.
fn owner_of(read: &dyn Read, ino: InodeId, kind: FileKind) -> Result<(u32, u32, u32)> {
    if kind == FileKind::Directory {
        return load_access(read, ino).map(|a| (a.uid, a.gid, a.mode));
    }
    load_file(read, ino).map(|i| (i.uid, i.gid, i.mode))
}

fn stale(ino: InodeId) -> Error {
    Error::stale(format!("inode {ino} does not exist (any more)"))
}

// ---- rules of POSIX

/// Whether `cred` has all of `want` on something with this owner and mode.
fn permits(cred: &Cred, mode: u32, uid: u32, gid: u32, want: u32) -> bool {
    let class = if cred.uid == uid {
        6
    } else if in_group(cred, gid) {
        3
    } else {
        0
    };
    cred.uid == 0 || (mode >> class) & want == want
}
fn in_group(cred: &Cred, gid: u32) -> bool {
    cred.gid == gid || cred.groups.contains(&gid)
}
/// The same with the access control list, if there is one.
fn allows(
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
fn find_acl(read: &dyn Read, ino: InodeId, kind: &[u8]) -> Result<Option<Acl>> {
    let Some(value) = read.get(&keys::xattr(ino, kind))? else { return Ok(None) };
    Acl::parse(&value).map_err(|e| Error::damaged(format!("inode {ino}: {e}")))
}
fn require(read: &dyn Read, cred: &Cred, access: &Access, dir: InodeId, want: u32) -> Result<()> {
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
fn require_sticky(cred: &Cred, dir: &Access, victim_uid: u32) -> Result<()> {
    if dir.mode & STICKY == 0 || cred.uid == 0 || cred.uid == victim_uid || cred.uid == dir.uid {
        return Ok(());
    }
    Err(Error::name(
        NameRule::NotOwner,
        format!("user {} owns neither the entry nor its sticky directory", cred.uid),
    ))
}
fn check_name(name: &[u8]) -> Result<()> {
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
fn show(name: &[u8]) -> String {
    String::from_utf8_lossy(&name[..name.len().min(NAME_MAX)]).into_owned()
}
fn unleased(attr: Attr) -> Entry {
    Entry { attr, lease: no_lease() }
}
fn nothing() -> Lease {
    no_lease()
}

#[cfg(test)]
mod tests;
