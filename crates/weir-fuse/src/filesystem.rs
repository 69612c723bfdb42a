//! One method per request of the kernel. Each is polled once on the kernel's thread: a request that leases
//! and buffers can answer is answered there without waking another thread; one that has to wait continues as
//! a task.
//!
//! Requests that need more than a few lines continue in the modules below, by their subject.
use crate::mounted::Mounted;
use crate::replies::*;
use crate::snapshots::{is_snapshot, is_snapshot_handle};
use crate::{credentials, features, translate as tr};
use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyStatx, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;
use weir_client::{Client, Handle};
use weir_proto::InodeId;
use weir_proto::meta::Cred;

mod attributes;
mod data;
mod directories;
mod names;
mod opens;

impl Mounted {
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

    pub fn cred(&self, request: &Request) -> Cred {
        let (uid, gid, pid) = (request.uid(), request.gid(), request.pid());
        // The superuser's groups are never asked for.
        let groups = if uid == 0 { vec![gid] } else { credentials::groups(pid, gid) };
        Cred { uid, gid, groups }
    }
}

fn handle(fh: FileHandle) -> Handle {
    Handle(fh.0)
}

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        self.maps_direct = features::agree(config, self.by_ring)?.maps_direct;
        Ok(())
    }

    fn begun(&self, request: &Request) {
        self.work.begun(request);
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.serve_lookup(request, parent, name, reply);
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
        self.serve_statx(request, ino, reply);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.serve_getattr(request, ino, reply);
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
        self.serve_setattr(request, ino, mode, uid, gid, size, atime, mtime, fh, reply);
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
        self.serve_mknod(request, parent, name, mode, umask, rdev, reply);
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
        self.serve_mkdir(request, parent, name, mode, umask, reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        self.wait(request, reply, async move { client.unlink(&cred, parent, &name).await }, reply_empty);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.serve_rmdir(request, parent, name, reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        self.serve_symlink(request, parent, name, target, reply);
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
        self.serve_rename(request, parent, name, newparent, newname, flags, reply);
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        self.serve_link(request, ino, newparent, newname, reply);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.serve_open(request, ino, flags, reply);
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
        self.serve_create(request, parent, name, mode, umask, flags, reply);
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
        self.serve_tmpfile(request, parent, mode, umask, flags, reply);
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
        self.serve_read(request, fh, offset, size, lock_owner, reply);
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
        self.serve_write(request, ino, fh, offset, data, write_flags, flags, reply);
    }

    fn flush(&self, request: &Request, ino: INodeNo, fh: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        self.serve_flush(request, ino, fh, owner, reply);
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
        self.serve_getlk(request, ino, fh, owner, start, end, typ, pid, reply);
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
        self.serve_setlk(request, ino, fh, owner, start, end, typ, pid, sleep, flock, reply);
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
        self.serve_fsync(request, fh, datasync, reply);
    }

    fn opendir(&self, request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.check_options();
        reply.opened(self.streams.open(self.cred(request)), FopenFlags::empty());
    }

    fn readdir(&self, request: &Request, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.serve_readdir(request, ino, fh, offset, reply);
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.serve_readdirplus(request, ino, fh, offset, reply);
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
        self.serve_statfs(request, ino, reply);
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
        self.serve_setxattr(request, ino, name, value, flags, reply);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.serve_getxattr(request, ino, name, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.serve_listxattr(request, ino, size, reply);
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
        self.serve_fallocate(request, ino, fh, offset, length, mode, reply);
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
        self.serve_lseek(request, fh, offset, whence, reply);
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
        self.serve_copy_file_range(request, fh_in, offset_in, ino_out, fh_out, offset_out, len, reply);
    }
}
