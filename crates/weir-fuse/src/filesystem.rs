//! One method per request of the kernel. Each is polled once on the kernel's thread: a request that leases
//! and buffers can answer is answered there without waking another thread; one that has to wait continues as
//! a task.
use crate::attach::keeps_access_times;
use crate::from_home::FromHome;
use crate::mounted::{Mounted, REQUEST_BYTES_MAX};
use crate::replies::*;
use crate::snapshots::{is_snapshot, is_snapshot_handle};
use crate::streams::Streams;
use crate::{callers, credentials, locks, translate as tr};
use bytes::Bytes;
use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyStatx,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::pin::Pin;
use std::time::{Duration, Instant, SystemTime};
use weir_client::{Allocate, COPY_BYTES_MAX, Client, Handle, LockWish, Locked, Opened, SetAttrs, Stat};
use weir_proto::meta::{Cred, FileKind, Listing, NAME_MAX};
use weir_proto::{ErrorKind, InodeId, Result};

/// Requests that the kernel may have in flight in the background (read-ahead, direct I/O pieces).
const BACKGROUND_MAX: u16 = 128;
/// Entries per request to the client; the kernel's buffer takes about as many.
const LISTING_LIMIT: u32 = 256;
/// Cookies 1 and 2 are "." and "..": the client's start above.
const DOTS: u64 = 2;
/// How long a change of the mount's options may stay unnoticed.
const OPTIONS_TTL: Duration = Duration::from_secs(1);
/// Block size shown by `statfs`, in bytes.
const STATFS_BLOCK_BYTES: u64 = 4096;
/// Free inodes shown by `statfs`: their number has no limit.
const STATFS_FILES_FREE: u64 = 1 << 40;

/// Prefix of attribute names that the mount answers itself.
const OWN_PREFIX: &[u8] = b"weir.";

impl Mounted {
    /// `.snapshots` is in the topmost directory of each volume; elsewhere it is an ordinary name.
    fn lookup_snapshots(&self, request: &Request, parent: InodeId, reply: ReplyEntry) {
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let named = self.named(parent, SNAPSHOTS_NAME);
        let work = async move {
            match Self::snapshots_of(&client, parent).await {
                Some(volume) => Err(volume),
                None => Ok(client.lookup(&cred, parent, SNAPSHOTS_NAME).await),
            }
        };
        self.wait(request, reply, work, move |reply, found| match found {
            Err(volume) => Self::reply_snapshots(&table, reply, volume),
            Ok(looked) => reply_looked_up(&named, reply, looked),
        });
    }

    fn named(&self, dir: InodeId, name: &[u8]) -> Named {
        Named { client: self.client.clone(), kernel: self.kernel.clone(), dir, name: name.to_vec() }
    }

    /// The arguments of a change of a name; none in a snapshot, which is read-only.
    fn naming(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
    ) -> Option<(Client, Cred, InodeId, Vec<u8>)> {
        let parent = (!is_snapshot(parent)).then(|| tr::from_kernel_ino(parent))?;
        Some((self.client.clone(), self.cred(request), parent, name.as_bytes().to_vec()))
    }

    fn waits_for_home(&self, request: &Request) -> FromHome {
        FromHome::new(&self.client, &self.lock_waits, request)
    }

    /// Carries out the action of setting one of our attributes; it may take long, and a signal ends the wait.
    fn act(&self, request: &Request, ino: INodeNo, name: &str, value: &[u8], reply: ReplyEmpty) {
        let (cred, ino, from_home) =
            (self.cred(request), tr::from_kernel_ino(ino), self.waits_for_home(request));
        let acted = (self.own_acts)(&self.client, cred, ino, name.to_owned(), value.to_vec());
        self.answer(async move {
            match from_home.unless_interrupted(acted).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(e),
            }
        });
    }

    fn how(&self, request: &Request, flags: i32) -> How {
        let (mode, appends) = tr::open_mode(flags);
        How { mode, thread: request.pid(), appends, maps_direct: self.maps_direct }
    }

    pub fn cred(&self, request: &Request) -> Cred {
        let (uid, gid, pid) = (request.uid(), request.gid(), request.pid());
        // The superuser's groups are never asked for.
        let groups = if uid == 0 { vec![gid] } else { credentials::groups(pid, gid) };
        Cred { uid, gid, groups }
    }

    /// A remount may forbid access times; the kernel does not report it.
    fn look_at_options(&self) {
        let now = Instant::now();
        let mut seen = self.options_seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if seen.is_none_or(|at| now.duration_since(at) >= OPTIONS_TTL) {
            *seen = Some(now);
            self.client.keep_access_times(keeps_access_times(&self.path));
        }
    }

    /// `true`: no bits to remove (the common case, answered from the cache).
    fn keeps_no_privileges(&self, ino: InodeId) -> bool {
        self.client.try_getattr(ino).is_some_and(|stat| !tr::has_privileges(stat.attr.mode))
    }
}

/// Removes set-uid and set-gid, as a change of data by another user does.
async fn drop_privileges(client: &Client, cred: &Cred, ino: InodeId) -> Result<()> {
    let attr = client.getattr(ino).await?.attr;
    let member = cred.uid == 0 || cred.is_member(attr.gid);
    let mode = tr::without_privileges(attr.mode, member);
    if attr.kind == FileKind::Directory || mode == tr::permissions(attr.mode) {
        return Ok(());
    }
    // The right to write suffices to remove them.
    let set = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
    client.setattr(cred, ino, None, set).await.map(drop)
}

/// The attributes of an inode, even of one that is gone: the kernel asks because a program still has it open.
async fn look(client: &Client, ino: InodeId) -> Result<Stat> {
    let found = client.getattr(ino).await;
    found.or_else(|e| client.last_attr(ino).filter(|_| e.kind == ErrorKind::Stale).ok_or(e))
}

fn bytes_of(read: &Result<Vec<Bytes>>) -> usize {
    read.as_ref().map_or(0, |parts| parts.iter().map(Bytes::len).sum())
}

fn handle(fh: FileHandle) -> Handle {
    Handle(fh.0)
}

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        if self.by_ring && config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_err() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        // A kernel that lacks one of them is used without it.
        for wanted in tr::WANTED {
            let _ = config.add_capabilities(wanted);
        }
        self.maps_direct = config.capabilities().contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        if let Err(most) = config.set_max_readahead(REQUEST_BYTES_MAX) {
            let _ = config.set_max_readahead(most);
        }
        Ok(())
    }

    fn begun(&self, request: &Request) {
        self.work.begun(request);
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if is_snapshot(parent) {
            return self.snapshot_lookup(request, parent, name.as_bytes().to_vec(), reply);
        }
        let parent = tr::from_kernel_ino(parent);
        if name.as_bytes() == SNAPSHOTS_NAME {
            return self.lookup_snapshots(request, parent, reply);
        }
        let named = self.named(parent, name.as_bytes());
        if let Some(known) = self.client.try_lookup(parent, name.as_bytes()) {
            return reply_looked_up(&named, reply, Ok(known));
        }
        let (client, cred, name) = (self.client.clone(), self.cred(request), name.to_owned());
        self.wait(
            request,
            reply,
            async move { client.lookup(&cred, parent, name.as_bytes()).await },
            move |reply, looked| reply_looked_up(&named, reply, looked),
        );
    }

    fn forget(&self, _: &Request, ino: INodeNo, nlookup: u64) {
        if is_snapshot(ino) {
            return self.snapshots.forget(ino, nlookup);
        }
        if self.kernel.forgotten(ino, nlookup) {
            self.client.forget(tr::from_kernel_ino(ino));
        }
    }

    fn statx(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, _mask: u32, reply: ReplyStatx) {
        if is_snapshot(ino) {
            return self.snapshot_statx(request, ino, reply);
        }
        let ino = tr::from_kernel_ino(ino);
        if let Some(stat) = self.client.try_getattr(ino) {
            return reply_statx(reply, Ok(stat));
        }
        let client = self.client.clone();
        self.wait(request, reply, async move { look(&client, ino).await }, reply_statx);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if is_snapshot(ino) {
            return self.snapshot_getattr(request, ino, reply);
        }
        let ino = tr::from_kernel_ino(ino);
        if let Some(stat) = self.client.try_getattr(ino) {
            return reply_attr(reply, Ok(stat));
        }
        let client = self.client.clone();
        self.wait(request, reply, async move { look(&client, ino).await }, reply_attr);
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        let set = SetAttrs {
            mode: mode.map(tr::permissions),
            uid,
            gid,
            size,
            atime: atime.map(tr::set_time),
            mtime: mtime.map(tr::set_time),
        };
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let fh = fh.filter(|_| size.is_some()).map(handle);
        let work = async move {
            let mut result = client.setattr(&cred, ino, fh, set).await;
            // The kernel sends an empty request if a program changed the owner to the present one.
            let same_owner = set == SetAttrs::default();
            if (same_owner || size.is_some() && cred.uid != 0)
                && result.as_ref().is_ok_and(|s| tr::has_privileges(s.attr.mode))
            {
                result = match drop_privileges(&client, &cred, ino).await {
                    Ok(()) => client.getattr(ino).await,
                    Err(e) => Err(e),
                };
            }
            result
        };
        self.wait(request, reply, work, reply_attr);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        if is_snapshot(ino) {
            return self.snapshot_readlink(request, ino, reply);
        }
        let (client, ino) = (self.client.clone(), tr::from_kernel_ino(ino));
        let work = async move { client.readlink(ino).await.map(|target| vec![target]) };
        self.wait(request, reply, work, reply_data);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let Some(kind) = tr::node_kind(mode) else { return reply.error(Errno::EINVAL) };
        let (mode, named) = (tr::new_mode(mode, umask), self.named(parent, &name));
        self.wait(
            request,
            reply,
            async move { client.mknod(&cred, parent, &name, mode, kind, rdev).await },
            move |reply, made| reply_entry(&named, reply, made),
        );
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let (mode, named) = (tr::new_mode(mode, umask), self.named(parent, &name));
        self.wait(
            request,
            reply,
            async move { client.mkdir(&cred, parent, &name, mode).await },
            move |reply, made| reply_entry(&named, reply, made),
        );
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        self.wait(request, reply, async move { client.unlink(&cred, parent, &name).await }, reply_empty);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let work = async move {
            let removed = client.rmdir(&cred, parent, &name).await;
            Self::changed(&client, parent, &name, removed).await
        };
        self.wait(request, reply, work, reply_empty);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let (target, named) = (target.to_owned(), self.named(parent, &name));
        let work = async move {
            let target = target.as_os_str().as_bytes();
            client.symlink(&cred, parent, &name, target).await
        };
        self.wait(request, reply, work, move |reply, made| reply_entry(&named, reply, made));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if is_snapshot(parent) || is_snapshot(newparent) {
            return reply.error(Errno::EROFS);
        }
        let Some(mode) = tr::rename_mode(flags) else { return reply.error(Errno::EINVAL) };
        let (client, cred) = (self.client.clone(), self.cred(request));
        let (parent, newparent) = (tr::from_kernel_ino(parent), tr::from_kernel_ino(newparent));
        let (name, newname) = (name.to_owned(), newname.to_owned());
        let work = async move {
            let (name, newname) = (name.as_bytes(), newname.as_bytes());
            let renamed = client.rename(&cred, parent, name, newparent, newname, mode).await;
            Self::changed(&client, parent, name, renamed).await
        };
        self.wait(request, reply, work, reply_empty);
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        if is_snapshot(ino) || is_snapshot(newparent) {
            return reply.error(Errno::EROFS);
        }
        let (client, cred, name) = (self.client.clone(), self.cred(request), newname.to_owned());
        let (ino, parent) = (tr::from_kernel_ino(ino), tr::from_kernel_ino(newparent));
        let named = self.named(parent, newname.as_bytes());
        self.wait(
            request,
            reply,
            async move { client.link(&cred, ino, parent, name.as_bytes()).await },
            move |reply, made| reply_entry(&named, reply, made),
        );
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.look_at_options();
        let how = self.how(request, flags.0);
        let mode = how.mode;
        if is_snapshot(ino) {
            return self.snapshot_open(request, ino, mode, reply);
        }
        let leaves_access_time = flags.0 & libc::O_NOATIME != 0;
        let ino = tr::from_kernel_ino(ino);
        // The kernel has checked the permissions, under the lease that allows an answer here.
        if self.client.may_open_unasked(request.uid())
            && let Some(opened) = self.client.try_open(ino, mode)
        {
            if leaves_access_time {
                self.client.leaves_access_time(opened.handle);
            }
            return reply.opened(FileHandle(opened.handle.0), open_flags(&self.client, &opened, how));
        }
        let (client, cred) = (self.client.clone(), self.cred(request));
        let (of, undo) = (client.clone(), closer(&client));
        let work = async move {
            let opened = client.open(&cred, ino, mode).await?;
            let strip = mode.truncate && cred.uid != 0 && tr::has_privileges(opened.stat.attr.mode);
            if strip && let Err(e) = drop_privileges(&client, &cred, ino).await {
                let _ = client.release(opened.handle).await; // the first error is the one that is reported
                return Err(e);
            }
            if leaves_access_time {
                client.leaves_access_time(opened.handle);
            }
            Ok(opened)
        };
        let then = move |reply: ReplyOpen, opened: Result<Opened>| match opened {
            Ok(opened) => reply.opened(FileHandle(opened.handle.0), open_flags(&of, &opened, how)),
            Err(e) => reply.error(refused(&e)),
        };
        self.wait_or_undo(request, reply, work, then, undo);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let (mode, exclusive) = (tr::new_mode(mode, umask), flags & libc::O_EXCL != 0);
        let how = self.how(request, flags);
        let (of, undo) = (client.clone(), closer(&client));
        let (kernel, named) = (self.kernel.clone(), self.named(parent, &name));
        let work = async move { client.create(&cred, parent, &name, mode, exclusive, how.mode).await };
        let then = move |reply, created| reply_created((&of, &kernel), Some(&named), reply, created, how);
        self.wait_or_undo(request, reply, work, then, undo);
    }

    fn tmpfile(
        &self,
        request: &Request,
        parent: INodeNo,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        if is_snapshot(parent) {
            return reply.error(Errno::EROFS);
        }
        let (client, cred) = (self.client.clone(), self.cred(request));
        let (parent, mode) = (tr::from_kernel_ino(parent), tr::new_mode(mode, umask));
        let how = self.how(request, flags);
        let (of, undo) = (client.clone(), closer(&client));
        let work = async move { client.create_nameless(&cred, parent, mode, how.mode).await };
        let kernel = self.kernel.clone();
        let then = move |reply, created| reply_created((&of, &kernel), None, reply, created, how);
        self.wait_or_undo(request, reply, work, then, undo);
    }

    fn read(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if is_snapshot_handle(fh) {
            return self.snapshot_read(request, fh, offset, size as usize, reply);
        }
        let (fh, len) = (handle(fh), size as usize);
        // Only a program's own read names its owner; this one is for pages, possibly of a file that is read
        // directly and mapped.
        if lock_owner.is_none() {
            self.client.keeps_pages(fh);
        }
        let inside = self.runtime.enter(); // prefetches become tasks
        if let Some(result) = self.client.try_read(fh, offset, len) {
            self.work.read(request, bytes_of(&result));
            return reply_data(reply, result);
        }
        drop(inside);
        let (client, from_home) = (self.client.clone(), self.waits_for_home(request));
        let work = async move {
            from_home.bring(fh, Some(offset), len).await?;
            Ok(client.read(fh, offset, len).await)
        };
        let reader = self.work.reader(request);
        self.wait(request, reply, work, move |reply: ReplyData, read| match read {
            Ok(read) => {
                reader.read(bytes_of(&read));
                reply_data(reply, read);
            }
            Err(e) => reply.error(e),
        });
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (fh, ino) = (handle(fh), tr::from_kernel_ino(ino));
        let strip =
            write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) && !self.keeps_no_privileges(ino);
        let inside = self.runtime.enter(); // sends of full stripes become tasks
        // The descriptor's present flags (`fcntl` may change them). Pages go to their own offset.
        let appends = flags.0 & libc::O_APPEND != 0 && !write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let taken = || match appends {
            true => self.client.try_append(fh, data),
            false => self.client.try_write(fh, offset, data),
        };
        if !strip && let Some(result) = taken() {
            return reply_written(reply, result);
        }
        drop(inside);
        let client = self.client.clone();
        let cred = strip.then(|| self.cred(request));
        let data = self.buffers.copy(data).freeze();
        let from_home = self.waits_for_home(request);
        let work = async move {
            from_home.bring(fh, (!appends).then_some(offset), data.len()).await?;
            if let Some(cred) = cred
                && let Err(e) = drop_privileges(&client, &cred, ino).await
            {
                return Err(refused(&e));
            }
            Ok(match appends {
                true => client.append(fh, data).await,
                false => client.write(fh, offset, data).await,
            })
        };
        self.wait(request, reply, work, answer_written);
    }

    fn flush(&self, request: &Request, ino: INodeNo, fh: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        if is_snapshot_handle(fh) {
            self.snapshots.locks.unlock_owner(ino.0, locks::owner(owner, false));
            return reply.ok();
        }
        let client = self.client.clone();
        // A child that is about to execute another program closes its copies of the parent's descriptors (and
        // its exec waits for that): nothing was written through these, so there is nothing to wait for, nor
        // an error to report. The parent's own close does both.
        let is_inherited = client.opener(handle(fh)).is_some_and(|t| callers::is_child_of(request.pid(), t));
        let work = async move {
            let saved = if is_inherited { Ok(()) } else { client.flush(handle(fh)).await };
            // After the bytes: the next holder of the lock sees them.
            if let Err(e) = client.unlock_owner(handle(fh), locks::owner(owner, false)).await {
                tracing::warn!("unlock at close: {e}");
            }
            saved
        };
        self.wait(request, reply, work, reply_empty);
    }

    fn getlk(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let wish = match locks::wish(locks::owner(owner, false), start, end, typ, pid) {
            Ok(wish) => wish,
            Err(e) => return reply.error(e),
        };
        let free = (start, end, pid);
        if is_snapshot_handle(fh) {
            return reply_lock(reply, free, Ok(self.snapshots.locks.test(ino.0, &wish)));
        }
        let client = self.client.clone();
        let work = async move { client.test_lock(handle(fh), wish).await };
        self.wait(request, reply, work, move |reply, found| reply_lock(reply, free, found));
    }

    fn setlk(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        flock: bool,
        reply: ReplyEmpty,
    ) {
        let wish = match locks::wish(locks::owner(owner, flock), start, end, typ, pid) {
            Ok(wish) => wish,
            Err(e) => return reply.error(e),
        };
        if is_snapshot_handle(fh) {
            return self.snapshot_setlk(request, ino, fh, wish, sleep, reply);
        }
        let (client, fh) = (self.client.clone(), handle(fh));
        let answered = |reply: ReplyEmpty, locked| match locks::answer(locked) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        };
        let of = client.clone();
        let undo = move |locked: Result<Locked>| async move {
            let held = wish.kind.is_some() && locked.is_ok_and(|l| l == Locked::Granted);
            if held && let Err(e) = of.try_lock(fh, LockWish { kind: None, ..wish }).await {
                tracing::warn!("the lock of a program that is gone was not released: {e}");
            }
        };
        if !sleep || wish.kind.is_none() {
            let work = async move { client.try_lock(fh, wish).await };
            return self.wait_or_undo(request, reply, work, answered, undo);
        }
        let (waits, unique) = (self.lock_waits.clone(), request.unique().0);
        let interrupt = waits.begin(unique);
        let work = async move {
            let locked = client.wait_lock(fh, wish, &interrupt).await;
            waits.end(unique);
            locked
        };
        self.wait_or_undo(request, reply, work, answered, undo);
    }

    fn interrupt(&self, _: &Request, unique: fuser::RequestId) {
        self.lock_waits.interrupt(unique.0);
        self.callers.interrupt(unique.0);
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if is_snapshot_handle(fh) {
            self.snapshots.release(ino, fh);
            return reply.ok();
        }
        let client = self.client.clone();
        self.answer(async move { reply_empty(reply, client.release(handle(fh)).await) });
    }

    fn fsync(&self, request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        if is_snapshot_handle(fh) {
            return reply.ok();
        }
        let client = self.client.clone();
        let work = async move {
            match datasync {
                true => client.fdatasync(handle(fh)).await,
                false => client.fsync(handle(fh)).await,
            }
        };
        self.wait(request, reply, work, reply_empty);
    }

    fn opendir(&self, request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.look_at_options();
        reply.opened(self.streams.open(self.cred(request)), FopenFlags::empty());
    }

    fn readdir(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if is_snapshot(ino) {
            return self.snapshot_readdir(request, ino, offset, reply);
        }
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add(ino, at, fuser::FileType::Directory, name) {
                return reply.ok();
            }
        }
        let (client, dir) = (self.client.clone(), tr::from_kernel_ino(ino));
        let streams = self.streams.clone();
        let work = async move { list(&client, (&streams, fh), dir, offset, LISTING_LIMIT, false).await };
        self.wait(request, reply, work, |mut reply: ReplyDirectory, listing| {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => return reply.error(refused(&e)),
            };
            for entry in listing.entries {
                let name = OsStr::from_bytes(&entry.name);
                if reply.add(
                    tr::to_kernel_ino(entry.ino),
                    entry.cookie + DOTS,
                    tr::file_type(entry.kind),
                    name,
                ) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        if is_snapshot(ino) {
            return self.snapshot_readdirplus(request, ino, offset, reply);
        }
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add_name(ino, at, name, fuser::FileType::Directory) {
                return reply.ok();
            }
        }
        let (client, dir) = (self.client.clone(), tr::from_kernel_ino(ino));
        let streams = self.streams.clone();
        let mut named = self.named(dir, b"");
        // More would be listed again for the next request.
        let limit = LISTING_LIMIT.min(reply.entries_max() as u32 + 1);
        let work = async move { list(&client, (&streams, fh), dir, offset, limit, true).await };
        self.wait(request, reply, work, move |mut reply: ReplyDirectoryPlus, listing| {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => return reply.error(refused(&e)),
            };
            for entry in listing.entries {
                named.name = entry.name.to_vec();
                if add_entry(&named, &mut reply, entry.cookie + DOTS, &entry) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn releasedir(&self, _: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.streams.close(fh);
        reply.ok();
    }

    // Changes of names are durable when they are answered, except for files that the client created locally.
    fn fsyncdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        if is_snapshot(ino) {
            return reply.ok();
        }
        let client = self.client.clone();
        let work = async move { client.sync_names(tr::from_kernel_ino(ino)).await };
        self.wait(request, reply, work, reply_empty);
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let client = self.client.clone();
        let ino = if is_snapshot(ino) { tr::top() } else { tr::from_kernel_ino(ino) };
        let work = async move { client.statfs_at(ino).await };
        self.wait(request, reply, work, |reply: ReplyStatfs, space| match space {
            Ok(space) => {
                let free = space.free_bytes / STATFS_BLOCK_BYTES;
                let files = space.files + space.directories;
                let all = space.inodes_max.unwrap_or(files + STATFS_FILES_FREE);
                let block = STATFS_BLOCK_BYTES as u32;
                reply.statfs(
                    space.capacity_bytes / STATFS_BLOCK_BYTES,
                    free,
                    free,
                    all,
                    all.saturating_sub(files),
                    block,
                    NAME_MAX as u32,
                    block,
                );
            }
            Err(e) => reply.error(refused(&e)),
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        if is_foreign(name) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        if let Some(own) = name.to_str().filter(|n| n.as_bytes().starts_with(OWN_PREFIX)) {
            return self.act(request, ino, own, value, reply);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let (name, value) = (name.to_owned(), value.to_vec());
        let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
        let work =
            async move { client.set_xattr(&cred, ino, name.as_bytes(), &value, create, replace).await };
        self.wait(request, reply, work, reply_empty);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if is_foreign(name) {
            return reply.error(Errno::NO_XATTR);
        }
        if is_snapshot(ino) {
            return self.snapshot_getxattr(request, ino, name.as_bytes().to_vec(), size, reply);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        if let Some(own) = name.to_str().filter(|n| n.as_bytes().starts_with(OWN_PREFIX)) {
            let text = (self.own_attributes)(&client, ino, own);
            let work = async move { text.await.map(Bytes::from) };
            return self.wait(request, reply, work, move |reply, value| reply_xattr(reply, size, value));
        }
        let absent = absent_attribute(name);
        let name = name.to_owned();
        let work = async move { client.get_xattr(&cred, ino, name.as_bytes()).await };
        self.wait(request, reply, work, move |reply: ReplyXattr, value| match value {
            Err(e) if tr::errno(&e) == Errno::NO_XATTR => reply.error(absent),
            value => reply_xattr(reply, size, value),
        });
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let thread = request.pid();
        if is_snapshot(ino) {
            return self.snapshot_listxattr(request, ino, size, reply);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let work = async move {
            let names = client.list_xattr(&cred, ino).await;
            names.map(|names| credentials::visible(&names, thread))
        };
        self.wait(request, reply, work, move |reply, names| reply_xattr(reply, size, names));
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let name = name.to_owned();
        self.wait(
            request,
            reply,
            async move { client.remove_xattr(&cred, ino, name.as_bytes()).await },
            reply_empty,
        );
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        let steps = match tr::allocate(mode) {
            Ok(steps) => steps,
            Err(e) => return reply.error(e),
        };
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let from_home = self.waits_for_home(request);
        let work = async move {
            let changes = |what: &Allocate| matches!(what, Allocate::PunchHole | Allocate::ZeroRange);
            if steps.iter().any(changes) {
                from_home.bring(handle(fh), Some(offset), length as usize).await?;
            }
            let mut done = Ok(());
            for what in steps {
                if done.is_ok() {
                    done = client.fallocate(handle(fh), *what, offset, length).await;
                }
            }
            // A change of data by a user who may not keep the bits; the kernel leaves their removal to us.
            if done.is_ok() && cred.uid != 0 {
                done = drop_privileges(&client, &cred, ino).await;
            }
            Ok(done)
        };
        self.wait(request, reply, work, |reply: ReplyEmpty, done| match done {
            Ok(done) => reply_empty(reply, done),
            Err(e) => reply.error(e),
        });
    }

    fn lseek(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        if is_snapshot_handle(fh) {
            return self.snapshot_lseek(fh, offset, whence == libc::SEEK_DATA, reply);
        }
        let (client, fh) = (self.client.clone(), handle(fh));
        if ![libc::SEEK_DATA, libc::SEEK_HOLE].contains(&whence) {
            return reply.error(Errno::EINVAL);
        }
        let work = async move {
            match whence {
                libc::SEEK_DATA => client.seek_data(fh, offset).await,
                _ => client.seek_hole(fh, offset).await,
            }
        };
        self.wait(request, reply, work, |reply: ReplyLseek, found| match found {
            Ok(Some(at)) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
            Ok(None) => reply.error(Errno::ENXIO),
            Err(e) => reply.error(refused(&e)),
        });
    }

    fn ioctl(
        &self,
        _: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    // Files are always ready; the kernel remembers this answer and does not ask again.
    fn poll(
        &self,
        _: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _ph: fuser::PollNotifier,
        _events: fuser::PollEvents,
        _flags: fuser::PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        if is_snapshot_handle(fh_in) {
            return reply.error(Errno::EXDEV); // then the kernel reads and writes
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino_out));
        let (from, to) = (handle(fh_in), handle(fh_out));
        let from_home = self.waits_for_home(request);
        let work = async move {
            // At most as much as one call copies.
            let some = len.min(COPY_BYTES_MAX) as usize;
            for (file, at) in [(from, offset_in), (to, offset_out)] {
                from_home.bring(file, Some(at), some).await?;
            }
            let mut copied = client.copy_range(from, offset_in, to, offset_out, len).await;
            if copied.is_ok()
                && cred.uid != 0
                && let Err(e) = drop_privileges(&client, &cred, ino).await
            {
                copied = Err(e);
            }
            Ok(copied.map(|n| n as usize))
        };
        self.wait(request, reply, work, answer_written);
    }
}

/// Programs ask for it on every file, and it cannot have an effect here: a mount without set-uid programs
/// ignores file capabilities.
fn is_foreign(name: &OsStr) -> bool {
    name == "security.capability"
}

/// The answer that a file has no attribute of this name. `ls -l` asks each file for its label, but asks no
/// other file of a file system that answers that it has none; and labels have no effect here.
fn absent_attribute(name: &OsStr) -> Errno {
    if name == "security.selinux" { Errno::EOPNOTSUPP } else { Errno::NO_XATTR }
}

/// The next entries of a stream, without those made after it was begun.
async fn list(
    client: &Client,
    (streams, fh): (&Streams, FileHandle),
    dir: InodeId,
    offset: u64,
    limit: u32,
    with_attrs: bool,
) -> Result<Listing> {
    let cred = streams.opened_by(fh);
    let mut listing = client.readdir(&cred, dir, offset.saturating_sub(DOTS), limit, with_attrs).await?;
    let end = streams.end(fh, offset, listing.newest);
    listing.entries.retain(|entry| entry.cookie <= end);
    Ok(listing)
}

/// Closes a file that was opened for a program that is gone.
fn closer(
    client: &Client,
) -> impl FnOnce(Result<Opened>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + 'static {
    let client = client.clone();
    move |opened| {
        Box::pin(async move {
            if let Ok(opened) = opened
                && let Err(e) = client.release(opened.handle).await
            {
                tracing::warn!("close the file of a program that is gone: {e}");
            }
        })
    }
}

fn answer_written(reply: ReplyWrite, written: std::result::Result<Result<usize>, Errno>) {
    match written {
        Ok(written) => reply_written(reply, written),
        Err(e) => reply.error(e),
    }
}
