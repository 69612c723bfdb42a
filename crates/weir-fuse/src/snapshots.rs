//! `.snapshots` in the topmost directory of a volume: the volume's earlier states, read-only.
//!
//! Invariants: numbers here have the upper bit, which no inode of ours has, and are the same for each
//! look-up; nothing here ever changes: a change fails with `EROFS`. Only names of snapshots are asked for
//! again: entries below them never change.
use crate::mounted::Mounted;
use crate::replies::{GENERATION, NAME_TTL, SNAPSHOTS_NAME, refused};
use crate::snapshot_locks::SnapshotLocks;
use crate::{credentials, locks, translate as tr};
use fuser::{
    Errno, FileAttr, FileHandle, FopenFlags, INodeNo, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatx, ReplyXattr, Request,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, LockWish, OpenMode, SnapshotFile, Stat};
use weir_proto::meta::{Attr, Cred, FileKind, Time};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result, VolumeId};

/// Set in numbers of inodes and handles.
const BIT: u64 = 1 << 63;
/// Nothing below a snapshot changes.
const FOR_EVER: Duration = Duration::from_secs(3600);
/// Entries per request to the leader.
const LISTING_LIMIT: u32 = 256;
/// Cookies 1 and 2 are "." and "..".
const DOTS: u64 = 2;

/// The object of a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// `.snapshots` of a volume.
    List { volume: VolumeId },
    /// An inode in a snapshot.
    Thing { snapshot: u32, ino: InodeId },
}

#[derive(Default)]
pub struct Table {
    /// Places by number, with the count of the kernel's references.
    places: Mutex<HashMap<u64, (Place, u64)>>,
    files: Mutex<HashMap<u64, Arc<SnapshotFile>>>,
    next: AtomicU64,
    pub locks: SnapshotLocks,
}

pub fn is_snapshot(ino: INodeNo) -> bool {
    ino.0 & BIT != 0
}
pub fn is_snapshot_handle(fh: FileHandle) -> bool {
    fh.0 & BIT != 0
}

impl Place {
    /// A place has this number in each request. Two places have distinct ones except by chance, which
    /// `Table::note_answer` detects.
    fn number(self) -> u64 {
        let (a, b) = match self {
            Place::List { volume } => (u64::from(volume.0), u64::MAX),
            Place::Thing { snapshot, ino } => (u64::from(snapshot), ino.0),
        };
        let mixed =
            (b ^ a.rotate_left(40).wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        BIT | (mixed ^ (mixed >> 29))
    }
}

impl Table {
    fn places(&self) -> MutexGuard<'_, HashMap<u64, (Place, u64)>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<SnapshotFile>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn find(&self, ino: INodeNo) -> Result<Place> {
        let place = self.places().get(&ino.0).map(|(place, _)| *place);
        place.ok_or_else(|| Error::stale(format!("inode {} of a snapshot was forgotten", ino.0)))
    }
    /// The kernel gets a reference to a place: it returns it one day.
    fn note_answer(&self, place: Place) -> Result<INodeNo> {
        let number = place.number();
        let mut places = self.places();
        let (known, count) = places.entry(number).or_insert((place, 0));
        if *known != place {
            return Err(Error::io("two objects of snapshots have the same number: open one of them later"));
        }
        *count += 1;
        Ok(INodeNo(number))
    }
    pub fn forget(&self, ino: INodeNo, times: u64) {
        let mut places = self.places();
        if let Some((_, count)) = places.get_mut(&ino.0) {
            *count = count.saturating_sub(times);
            if *count == 0 {
                places.remove(&ino.0);
            }
        }
    }
    pub fn release(&self, ino: INodeNo, fh: FileHandle) {
        self.locks.unlock_open(ino.0, fh.0);
        self.files().remove(&fh.0);
    }
    fn file(&self, fh: FileHandle) -> Result<Arc<SnapshotFile>> {
        let file = self.files().get(&fh.0).cloned();
        file.ok_or_else(|| Error::stale(format!("file handle {} is closed", fh.0)))
    }
}

/// All users may list the snapshots.
fn list_attr() -> Attr {
    let never = Time { nanos: 0 };
    Attr {
        ino: InodeId(0),
        kind: FileKind::Directory,
        mode: 0o555,
        uid: 0,
        gid: 0,
        nlink: 2,
        rdev: 0,
        size: 0,
        allocated: 0,
        atime: never,
        mtime: never,
        ctime: never,
        btime: never,
        data_version: 0,
        layout: None,
        acl: false,
        evicted: 0,
        layers: None,
    }
}
fn file_attr(place: Place, attr: &Attr) -> FileAttr {
    FileAttr { ino: INodeNo(place.number()), ..tr::attr(attr) }
}

async fn attr_of(client: &Client, place: Place) -> Result<Attr> {
    match place {
        Place::List { .. } => Ok(list_attr()),
        Place::Thing { snapshot, ino } => client.snapshot_attr(snapshot, ino).await,
    }
}

async fn look_up(client: &Client, cred: &Cred, place: Place, name: &[u8]) -> Result<Option<(Place, Attr)>> {
    match place {
        Place::List { volume } => {
            let all = client.snapshots(volume).await?;
            let Some(found) = all.into_iter().find(|s| s.name.as_bytes() == name) else { return Ok(None) };
            let place = Place::Thing { snapshot: found.number, ino: found.root };
            Ok(Some((place, attr_of(client, place).await?)))
        }
        Place::Thing { snapshot, ino } => {
            let attr = client.snapshot_lookup(cred, snapshot, ino, name).await?;
            Ok(attr.map(|attr| (Place::Thing { snapshot, ino: attr.ino }, attr)))
        }
    }
}

/// An entry of a listing: its name, its cookie, its place, its attributes.
type Listed = (Vec<u8>, u64, Place, Attr);

async fn list(client: &Client, cred: &Cred, place: Place, after: u64) -> Result<Vec<Listed>> {
    match place {
        Place::List { volume } => {
            let all = client.snapshots(volume).await?.into_iter().filter(|s| u64::from(s.number) > after);
            Ok(all
                .map(|s| {
                    let place = Place::Thing { snapshot: s.number, ino: s.root };
                    (s.name.into_bytes(), s.number.into(), place, list_attr())
                })
                .collect())
        }
        Place::Thing { snapshot, ino } => {
            let listing = client.snapshot_list(cred, snapshot, ino, after, LISTING_LIMIT).await?;
            let entry = |e: weir_proto::snapshot::SnapshotEntry| {
                (e.name.to_vec(), e.cookie, Place::Thing { snapshot, ino: e.attr.ino }, e.attr)
            };
            Ok(listing.entries.into_iter().map(entry).collect())
        }
    }
}

impl Mounted {
    /// `.snapshots`, if `parent` is the topmost directory of a volume.
    pub async fn snapshots_of(client: &Client, parent: InodeId) -> Option<VolumeId> {
        let volume = client.volume_at(parent).await.ok()?;
        (volume.root == parent).then_some(volume.id)
    }

    /// The answer to a change of a name. The leader has no `.snapshots`; the entry that a volume's directory
    /// shows cannot be changed.
    pub async fn changed(client: &Client, parent: InodeId, name: &[u8], done: Result<()>) -> Result<()> {
        let absent = done.as_ref().is_err_and(|e| e.kind == ErrorKind::NotFound);
        if absent && name == SNAPSHOTS_NAME && Self::snapshots_of(client, parent).await.is_some() {
            let what = "the list of a volume's snapshots is neither removed nor renamed";
            return Err(Error::name(NameRule::ReadOnly, what));
        }
        done
    }

    pub fn reply_snapshots(table: &Table, reply: ReplyEntry, volume: VolumeId) {
        let place = Place::List { volume };
        match table.note_answer(place) {
            Ok(_) => reply.entry_with_ttls(&NAME_TTL, &NAME_TTL, &file_attr(place, &list_attr()), GENERATION),
            Err(e) => reply.error(refused(&e)),
        }
    }

    pub fn snapshot_lookup(&self, request: &Request, parent: INodeNo, name: Vec<u8>, reply: ReplyEntry) {
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let reported = table.clone();
        let work = async move {
            let place = table.find(parent)?;
            let found = look_up(&client, &cred, place, &name).await?;
            let ttl = if matches!(place, Place::List { .. }) { NAME_TTL } else { FOR_EVER };
            Ok(found.map(|(found, attr)| (found, file_attr(found, &attr), ttl)))
        };
        self.wait(request, reply, work, move |reply: ReplyEntry, answer: Result<_>| match answer {
            Ok(Some((found, attr, ttl))) => match reported.note_answer(found) {
                Ok(_) => reply.entry_with_ttls(&FOR_EVER, &ttl, &attr, GENERATION),
                Err(e) => reply.error(refused(&e)),
            },
            Ok(None) => reply.error(Errno::ENOENT),
            Err(e) => reply.error(refused(&e)),
        });
    }

    async fn snapshot_stat(client: Client, table: Arc<Table>, ino: INodeNo) -> Result<Stat> {
        let place = table.find(ino)?;
        let mut attr = attr_of(&client, place).await?;
        attr.ino = InodeId(place.number());
        Ok(Stat { attr, leased: matches!(place, Place::Thing { .. }) })
    }
    pub fn snapshot_getattr(&self, request: &Request, ino: INodeNo, reply: ReplyAttr) {
        let stat = Self::snapshot_stat(self.client.clone(), self.snapshots.clone(), ino);
        self.wait(request, reply, stat, super::replies::reply_attr);
    }
    pub fn snapshot_statx(&self, request: &Request, ino: INodeNo, reply: ReplyStatx) {
        let stat = Self::snapshot_stat(self.client.clone(), self.snapshots.clone(), ino);
        self.wait(request, reply, stat, super::replies::reply_statx);
    }

    pub fn snapshot_readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let work = async move {
            match table.find(ino)? {
                Place::Thing { snapshot, ino } => {
                    client.snapshot_readlink(&cred, snapshot, ino).await.map(|target| vec![target])
                }
                Place::List { .. } => Err(Error::invalid("a directory is not a symbolic link")),
            }
        };
        self.wait(request, reply, work, super::replies::reply_data);
    }

    pub fn snapshot_open(&self, request: &Request, ino: INodeNo, mode: OpenMode, reply: ReplyOpen) {
        if mode.write || mode.truncate {
            return reply.error(Errno::EROFS);
        }
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let opens = table.clone();
        let work = async move {
            match table.find(ino)? {
                Place::Thing { snapshot, ino } if mode.execute => {
                    client.snapshot_execute(&cred, snapshot, ino).await
                }
                Place::Thing { snapshot, ino } => client.snapshot_open(&cred, snapshot, ino).await,
                Place::List { .. } => Err(Error::invalid("a directory is not a file")),
            }
        };
        self.wait(request, reply, work, move |reply: ReplyOpen, opened| match opened {
            Ok(file) => {
                let fh = BIT | opens.next.fetch_add(1, Ordering::Relaxed);
                opens.files().insert(fh, Arc::new(file));
                reply.opened(FileHandle(fh), FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub fn snapshot_read(
        &self,
        request: &Request,
        fh: FileHandle,
        offset: u64,
        len: usize,
        reply: ReplyData,
    ) {
        let (client, table) = (self.client.clone(), self.snapshots.clone());
        let work = async move { client.snapshot_read(&*table.file(fh)?, offset, len).await };
        self.wait(request, reply, work, super::replies::reply_data);
    }

    /// Holes are not reported: all of a file is data.
    pub fn snapshot_lseek(&self, fh: FileHandle, offset: u64, data: bool, reply: ReplyLseek) {
        match self.snapshots.file(fh) {
            Ok(file) if offset >= file.attr.size => reply.error(Errno::ENXIO),
            Ok(file) => reply.offset(if data { offset } else { file.attr.size } as i64),
            Err(e) => reply.error(refused(&e)),
        }
    }

    /// `sleep`: waits for it.
    pub fn snapshot_setlk(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        wish: LockWish,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let answered = |locked| match locks::answer(Ok(locked)) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        };
        if !sleep || wish.kind.is_none() {
            return answered(self.snapshots.locks.try_lock(ino.0, fh.0, &wish));
        }
        let (table, waits, unique) = (self.snapshots.clone(), self.lock_waits.clone(), request.unique().0);
        let interrupt = waits.begin(unique);
        self.answer(async move {
            let locked = table.locks.wait_lock(ino.0, fh.0, &wish, &interrupt).await;
            waits.end(unique);
            answered(locked);
        });
    }

    pub fn snapshot_getxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: Vec<u8>,
        size: u32,
        reply: ReplyXattr,
    ) {
        let (client, table) = (self.client.clone(), self.snapshots.clone());
        let work = async move {
            match table.find(ino)? {
                Place::Thing { snapshot, ino } => client.snapshot_get_xattr(snapshot, ino, &name).await,
                Place::List { .. } => {
                    Err(Error::name(NameRule::NoAttribute, "a list of snapshots has no attributes"))
                }
            }
        };
        self.wait(request, reply, work, move |reply, value| super::replies::reply_xattr(reply, size, value));
    }
    pub fn snapshot_listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let thread = request.pid();
        let (client, table) = (self.client.clone(), self.snapshots.clone());
        let work = async move {
            let names = match table.find(ino)? {
                Place::Thing { snapshot, ino } => client.snapshot_list_xattr(snapshot, ino).await?,
                Place::List { .. } => Vec::new(),
            };
            Ok(credentials::visible(&names, thread))
        };
        self.wait(request, reply, work, move |reply, names| super::replies::reply_xattr(reply, size, names));
    }

    pub fn snapshot_readdir(&self, request: &Request, dir: INodeNo, offset: u64, mut reply: ReplyDirectory) {
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add(dir, at, fuser::FileType::Directory, name) {
                return reply.ok();
            }
        }
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let work = async move { list(&client, &cred, table.find(dir)?, offset.saturating_sub(DOTS)).await };
        self.wait(request, reply, work, |mut reply: ReplyDirectory, listed| match listed {
            Ok(listed) => {
                for (name, cookie, place, attr) in listed {
                    let (ino, kind) = (INodeNo(place.number()), tr::file_type(attr.kind));
                    if reply.add(ino, cookie + DOTS, kind, name_of(&name)) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub fn snapshot_readdirplus(
        &self,
        request: &Request,
        dir: INodeNo,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let reported = table.clone();
        let work = async move { Filling::get(&client, &table, &cred, dir, offset).await };
        self.wait(request, reply, work, move |mut reply: ReplyDirectoryPlus, filling| {
            match filling.and_then(|filling: Filling| filling.fill(&reported, offset, &mut reply)) {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(refused(&e)),
            }
        });
    }
}

/// The contents for the kernel's buffer.
struct Filling {
    own: FileAttr,
    ttl: Duration,
    listed: Vec<(Vec<u8>, u64, Place, FileAttr)>,
}

impl Filling {
    async fn get(client: &Client, table: &Table, cred: &Cred, dir: INodeNo, offset: u64) -> Result<Filling> {
        let place = table.find(dir)?;
        let own = file_attr(place, &attr_of(client, place).await?);
        let ttl = if matches!(place, Place::List { .. }) { NAME_TTL } else { FOR_EVER };
        let mut listed = Vec::new();
        for (name, cookie, place, attr) in list(client, cred, place, offset.saturating_sub(DOTS)).await? {
            let attr = match ttl {
                // The list has names; attributes are those of the volume's topmost directory then.
                NAME_TTL => attr_of(client, place).await?,
                _ => attr,
            };
            listed.push((name, cookie + DOTS, place, file_attr(place, &attr)));
        }
        Ok(Filling { own, ttl, listed })
    }

    fn fill(self, table: &Table, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add(self.own.ino, at, name, &NAME_TTL, &self.own, GENERATION) {
                return Ok(());
            }
        }
        for (name, cookie, place, attr) in self.listed {
            let ino = table.note_answer(place)?;
            if reply.add(ino, cookie, name_of(&name), &self.ttl, &attr, GENERATION) {
                table.forget(ino, 1); // it did not fit
                break;
            }
        }
        Ok(())
    }
}

fn name_of(name: &[u8]) -> &std::ffi::OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_answered_to_the_kernel_are_known_until_forgotten() {
        let table = Table::default();
        let place = Place::Thing { snapshot: 1, ino: InodeId(5) };
        let ino = table.note_answer(place).unwrap();
        assert!(is_snapshot(ino));
        assert_eq!(table.note_answer(place).unwrap(), ino);
        table.forget(ino, 1);
        assert_eq!(table.find(ino).unwrap(), place);
        table.forget(ino, 1);
        assert!(table.find(ino).is_err());
    }

    #[test]
    fn things_of_snapshots_have_numbers_of_their_own() {
        let things = (1..50u32).flat_map(|snapshot| (1..200u64).map(move |n| (snapshot, n << 24 | n)));
        let mut numbers: Vec<u64> =
            things.map(|(snapshot, n)| Place::Thing { snapshot, ino: InodeId(n) }.number()).collect();
        numbers.extend((1..50).map(|v| Place::List { volume: VolumeId(v) }.number()));
        let all = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), all);
    }
}
