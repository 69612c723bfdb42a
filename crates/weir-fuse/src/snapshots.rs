//! `.snapshots` in the topmost directory of a volume: the volume's earlier states, read-only.
//!
//! Invariant: nothing here ever changes; a change fails with `EROFS`. Only names of snapshots are asked for
//! again: entries below them never change.
mod locks;
mod table;

use crate::call::Call;
use crate::credentials;
use crate::entries::{GENERATION, NAME_TTL};
use crate::replies::*;
use crate::translate as tr;
use fuser::{
    Errno, FileAttr, FileHandle, FopenFlags, INodeNo, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatx, ReplyXattr,
};
use locks::SnapshotLocks;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;
use table::{Place, Table};
use weir_client::{Client, InTheWay, LockWish, OpenMode, Stat};
use weir_proto::lock::LockOwner;
use weir_proto::meta::{Attr, Cred, FileKind, Time};
use weir_proto::snapshot::SnapshotEntry;
use weir_proto::{Error, InodeId, NameRule, Result, VolumeId};

/// Nothing below a snapshot changes.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// Entries per request to the leader.
const LISTING_LIMIT: u32 = 256;

/// The snapshots of all volumes, as one mount shows them.
pub struct Snapshots {
    client: Client,
    /// The kernel's references to inodes and open files.
    table: Table,
    locks: SnapshotLocks,
}

impl Snapshots {
    pub fn new(client: Client) -> Arc<Snapshots> {
        Arc::new(Snapshots { client, table: Table::default(), locks: SnapshotLocks::default() })
    }

    /// The volume whose `.snapshots` a directory of the live tree shows: that of its topmost directory.
    pub async fn shown_in(&self, dir: InodeId) -> Option<VolumeId> {
        let volume = self.client.volume_at(dir).await.ok()?;
        (volume.root == dir).then_some(volume.id)
    }

    pub fn reply_list(&self, reply: ReplyEntry, volume: VolumeId) {
        let place = Place::List { volume };
        match self.table.note_answer(place) {
            Ok(_) => reply.entry_with_ttls(&NAME_TTL, &NAME_TTL, &file_attr(place, &list_attr()), GENERATION),
            Err(e) => reply.error(refused(&e)),
        }
    }

    pub fn lookup(self: &Arc<Self>, call: Call<'_, ReplyEntry>, dir: INodeNo, name: Vec<u8>) {
        let (me, of, cred) = (self.clone(), self.clone(), call.cred());
        let work = async move {
            let place = me.table.find(dir)?;
            let found = me.find(&cred, place, &name).await?;
            Ok(found.map(|(found, attr)| (found, file_attr(found, &attr), names_ttl(place))))
        };
        call.wait(work, move |reply: ReplyEntry, answer: Result<_>| match answer {
            Ok(Some((found, attr, ttl))) => match of.table.note_answer(found) {
                Ok(_) => reply.entry_with_ttls(&FOR_EVER, &ttl, &attr, GENERATION),
                Err(e) => reply.error(refused(&e)),
            },
            Ok(None) => reply.error(Errno::ENOENT),
            Err(e) => reply.error(refused(&e)),
        });
    }

    async fn find(&self, cred: &Cred, dir: Place, name: &[u8]) -> Result<Option<(Place, Attr)>> {
        match dir {
            Place::List { volume } => {
                let all = self.client.snapshots(volume).await?;
                let Some(found) = all.into_iter().find(|s| s.name.as_bytes() == name) else {
                    return Ok(None);
                };
                let place = Place::Thing { snapshot: found.number, ino: found.root };
                Ok(Some((place, self.attr(place).await?)))
            }
            Place::Thing { snapshot, ino } => {
                let attr = self.client.snapshot_lookup(cred, snapshot, ino, name).await?;
                Ok(attr.map(|attr| (Place::Thing { snapshot, ino: attr.ino }, attr)))
            }
        }
    }

    pub fn forget(&self, ino: INodeNo, times: u64) {
        self.table.forget(ino, times);
    }

    async fn attr(&self, place: Place) -> Result<Attr> {
        match place {
            Place::List { .. } => Ok(list_attr()),
            Place::Thing { snapshot, ino } => self.client.snapshot_attr(snapshot, ino).await,
        }
    }
    async fn stat(self: Arc<Self>, ino: INodeNo) -> Result<Stat> {
        let place = self.table.find(ino)?;
        let mut attr = self.attr(place).await?;
        attr.ino = InodeId(place.number());
        Ok(Stat { attr, leased: matches!(place, Place::Thing { .. }) })
    }
    pub fn getattr(self: &Arc<Self>, call: Call<'_, ReplyAttr>, ino: INodeNo) {
        call.wait(self.clone().stat(ino), reply_attr);
    }
    pub fn statx(self: &Arc<Self>, call: Call<'_, ReplyStatx>, ino: INodeNo) {
        call.wait(self.clone().stat(ino), reply_statx);
    }

    pub fn readlink(self: &Arc<Self>, call: Call<'_, ReplyData>, ino: INodeNo) {
        let (me, cred) = (self.clone(), call.cred());
        let work = async move {
            match me.table.find(ino)? {
                Place::Thing { snapshot, ino } => {
                    me.client.snapshot_readlink(&cred, snapshot, ino).await.map(|target| vec![target])
                }
                Place::List { .. } => Err(Error::invalid("a directory is not a symbolic link")),
            }
        };
        call.wait(work, reply_data);
    }

    /// `size`: of the program's buffer; 0: it asks for the size.
    pub fn get_xattr(self: &Arc<Self>, call: Call<'_, ReplyXattr>, ino: INodeNo, name: Vec<u8>, size: u32) {
        let me = self.clone();
        let work = async move {
            match me.table.find(ino)? {
                Place::Thing { snapshot, ino } => me.client.snapshot_get_xattr(snapshot, ino, &name).await,
                Place::List { .. } => {
                    Err(Error::name(NameRule::NoAttribute, "a list of snapshots has no attributes"))
                }
            }
        };
        call.wait(work, move |reply, value| reply_xattr(reply, size, value));
    }
    pub fn list_xattr(self: &Arc<Self>, call: Call<'_, ReplyXattr>, ino: INodeNo, size: u32) {
        let (me, thread) = (self.clone(), call.thread());
        let work = async move {
            let names = match me.table.find(ino)? {
                Place::Thing { snapshot, ino } => me.client.snapshot_list_xattr(snapshot, ino).await?,
                Place::List { .. } => Vec::new(),
            };
            Ok(credentials::visible(&names, thread))
        };
        call.wait(work, move |reply, names| reply_xattr(reply, size, names));
    }
}

/// Open files of snapshots.
impl Snapshots {
    pub fn open(self: &Arc<Self>, call: Call<'_, ReplyOpen>, ino: INodeNo, mode: OpenMode) {
        if mode.write || mode.truncate {
            return call.fail(Errno::EROFS);
        }
        let (me, of, cred) = (self.clone(), self.clone(), call.cred());
        let work = async move {
            match me.table.find(ino)? {
                Place::Thing { snapshot, ino } if mode.execute => {
                    me.client.snapshot_execute(&cred, snapshot, ino).await
                }
                Place::Thing { snapshot, ino } => me.client.snapshot_open(&cred, snapshot, ino).await,
                Place::List { .. } => Err(Error::invalid("a directory is not a file")),
            }
        };
        call.wait(work, move |reply: ReplyOpen, opened| match opened {
            Ok(file) => reply.opened(of.table.open(file), FopenFlags::FOPEN_KEEP_CACHE),
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub fn read(self: &Arc<Self>, call: Call<'_, ReplyData>, file: FileHandle, offset: u64, len: usize) {
        let me = self.clone();
        let work = async move { me.client.snapshot_read(&*me.table.file(file)?, offset, len).await };
        call.wait(work, reply_data);
    }

    /// Holes are not reported: all of a file is data.
    pub fn seek(&self, call: Call<'_, ReplyLseek>, file: FileHandle, offset: u64, whence: i32) {
        match self.table.file(file) {
            Ok(file) if offset >= file.attr.size => call.fail(Errno::ENXIO),
            Ok(_) if whence == libc::SEEK_DATA => call.reply().offset(offset as i64),
            Ok(file) => call.reply().offset(file.attr.size as i64),
            Err(e) => call.fail(refused(&e)),
        }
    }

    pub fn release(&self, ino: INodeNo, file: FileHandle) {
        self.locks.unlock_open(ino.0, file.0);
        self.table.close(file);
    }

    pub fn test_lock(&self, ino: INodeNo, wish: &LockWish) -> Option<InTheWay> {
        self.locks.test(ino.0, wish)
    }
    pub fn unlock_owner(&self, ino: INodeNo, owner: LockOwner) {
        self.locks.unlock_owner(ino.0, owner);
    }
    /// `sleep`: waits for it.
    pub fn set_lock(
        self: &Arc<Self>,
        call: Call<'_, ReplyEmpty>,
        ino: INodeNo,
        file: FileHandle,
        wish: LockWish,
        sleep: bool,
    ) {
        if !sleep || wish.kind.is_none() {
            let locked = self.locks.try_lock(ino.0, file.0, &wish);
            return reply_locked(call.reply(), Ok(locked));
        }
        let (me, waiting) = (self.clone(), call.interruptible().begin());
        call.answer(|reply| async move {
            let locked = me.locks.wait_lock(ino.0, file.0, &wish, waiting.signal()).await;
            drop(waiting);
            reply_locked(reply, Ok(locked));
        });
    }
}

/// Listings of directories in snapshots.
impl Snapshots {
    pub fn readdir(self: &Arc<Self>, mut call: Call<'_, ReplyDirectory>, dir: INodeNo, offset: u64) {
        if add_dots(call.reply_mut(), dir, offset) {
            return call.reply().ok();
        }
        let (me, cred) = (self.clone(), call.cred());
        let work = async move { me.list(&cred, me.table.find(dir)?, offset.saturating_sub(DOTS)).await };
        call.wait(work, |mut reply: ReplyDirectory, listed| match listed {
            Ok(listed) => {
                for Listed { name, cookie, place, attr } in listed {
                    let (ino, kind) = (INodeNo(place.number()), tr::file_type(attr.kind));
                    if reply.add(ino, cookie + DOTS, kind, OsStr::from_bytes(&name)) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub fn readdirplus(self: &Arc<Self>, call: Call<'_, ReplyDirectoryPlus>, dir: INodeNo, offset: u64) {
        let (me, of, cred) = (self.clone(), self.clone(), call.cred());
        let work = async move { me.page(&cred, dir, offset).await };
        call.wait(work, move |mut reply: ReplyDirectoryPlus, page| {
            match page.and_then(|page: Page| page.fill(&of.table, offset, &mut reply)) {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(refused(&e)),
            }
        });
    }

    async fn list(&self, cred: &Cred, dir: Place, after: u64) -> Result<Vec<Listed>> {
        match dir {
            Place::List { volume } => {
                let all = self.client.snapshots(volume).await?.into_iter();
                let rest = all.filter(|s| u64::from(s.number) > after);
                Ok(rest
                    .map(|s| {
                        let place = Place::Thing { snapshot: s.number, ino: s.root };
                        let (name, cookie) = (s.name.into_bytes(), s.number.into());
                        Listed { name, cookie, place, attr: list_attr() }
                    })
                    .collect())
            }
            Place::Thing { snapshot, ino } => {
                let listing = self.client.snapshot_list(cred, snapshot, ino, after, LISTING_LIMIT).await?;
                let entry = |e: SnapshotEntry| {
                    let place = Place::Thing { snapshot, ino: e.attr.ino };
                    Listed { name: e.name.to_vec(), cookie: e.cookie, place, attr: e.attr }
                };
                Ok(listing.entries.into_iter().map(entry).collect())
            }
        }
    }

    async fn page(&self, cred: &Cred, dir: INodeNo, offset: u64) -> Result<Page> {
        let place = self.table.find(dir)?;
        let (own, ttl) = (file_attr(place, &self.attr(place).await?), names_ttl(place));
        let mut listed = self.list(cred, place, offset.saturating_sub(DOTS)).await?;
        if matches!(place, Place::List { .. }) {
            // The list has names; attributes are those of the volume's topmost directory then.
            for entry in &mut listed {
                entry.attr = self.attr(entry.place).await?;
            }
        }
        Ok(Page { own, ttl, listed })
    }
}

/// An entry of a listing.
struct Listed {
    name: Vec<u8>,
    cookie: u64,
    place: Place,
    attr: Attr,
}

/// The contents for the kernel's buffer.
struct Page {
    own: FileAttr,
    ttl: Duration,
    listed: Vec<Listed>,
}

impl Page {
    fn fill(self, table: &Table, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add(self.own.ino, at, name, &NAME_TTL, &self.own, GENERATION) {
                return Ok(());
            }
        }
        for Listed { name, cookie, place, attr } in self.listed {
            let (ino, attr) = (table.note_answer(place)?, file_attr(place, &attr));
            if reply.add(ino, cookie + DOTS, OsStr::from_bytes(&name), &self.ttl, &attr, GENERATION) {
                table.forget(ino, 1); // it did not fit
                break;
            }
        }
        Ok(())
    }
}

/// How long the kernel may keep the names of a directory.
fn names_ttl(dir: Place) -> Duration {
    match dir {
        Place::List { .. } => NAME_TTL,
        Place::Thing { .. } => FOR_EVER,
    }
}

fn file_attr(place: Place, attr: &Attr) -> FileAttr {
    FileAttr { ino: INodeNo(place.number()), ..tr::attr(attr) }
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
