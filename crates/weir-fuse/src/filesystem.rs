//! One method per request of the kernel: its arguments become one value, and it goes to the room that serves
//! it, of the live tree or of snapshots.
//!
//! Each is polled once on the kernel's thread: a request that leases and buffers can answer is answered there
//! without waking another thread; one that has to wait continues as a task.
use crate::call::{Call, Calls};
use crate::features;
use crate::live::{
    self, Allocation, Asked, Base, CopyRange, Live, NewNode, NewValue, Next, Read, Write, is_foreign,
};
use crate::mount_options::MountOptions;
use crate::snapshots::Snapshots;
use crate::translate as tr;
use crate::tree::{Inode, Name, OpenFile, from_kernel_ino, top};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, INodeNo, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek,
    ReplyOpen, ReplyPoll, ReplyStatfs, ReplyStatx, ReplyWrite, ReplyXattr, Request, RequestId, TimeOrNow,
    WriteFlags,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use weir_client::{Handle, SetAttrs};

/// One mount, as the kernel sees it.
pub struct Mounted {
    calls: Arc<Calls>,
    options: MountOptions,
    live: Live,
    snapshots: Arc<Snapshots>,
    /// The kernel is to send requests by rings.
    by_ring: bool,
}

impl Mounted {
    /// `path`: the mount point.
    pub fn new(base: &Base, calls: Arc<Calls>, path: &Path, by_ring: bool) -> Mounted {
        let snapshots = Snapshots::new(base.client.clone());
        Mounted {
            calls,
            options: MountOptions::new(base.client.clone(), path.to_owned()),
            live: Live::new(base, snapshots.clone(), by_ring),
            snapshots,
            by_ring,
        }
    }

    fn call<'a, R>(&'a self, request: &'a Request, reply: R) -> Call<'a, R> {
        self.calls.call(request, reply)
    }
}

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let features = features::agree(config, self.by_ring)?;
        self.live.opens.set_maps_direct(features.maps_direct);
        Ok(())
    }

    fn begun(&self, request: &Request) {
        self.calls.begun(request);
    }

    fn interrupt(&self, _: &Request, unique: RequestId) {
        self.calls.interrupt(unique.0);
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (call, name) = (self.call(request, reply), name.as_bytes().to_vec());
        match Inode::of(parent) {
            Inode::Live(dir) => self.live.names.lookup(call, Name { dir, name }),
            Inode::InSnapshot(dir) => self.snapshots.lookup(call, dir, name),
        }
    }

    fn forget(&self, _: &Request, ino: INodeNo, nlookup: u64) {
        match Inode::of(ino) {
            Inode::Live(_) => self.live.entries.forget(ino, nlookup),
            Inode::InSnapshot(ino) => self.snapshots.forget(ino, nlookup),
        }
    }

    fn statx(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, _mask: u32, reply: ReplyStatx) {
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(ino) => self.live.attributes.statx(call, ino),
            Inode::InSnapshot(ino) => self.snapshots.statx(call, ino),
        }
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(ino) => self.live.attributes.getattr(call, ino),
            Inode::InSnapshot(ino) => self.snapshots.getattr(call, ino),
        }
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
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let call = self.call(request, reply);
        let Some(ino) = Inode::live(ino) else { return call.fail(Errno::EROFS) };
        let (mode, atime, mtime) =
            (mode.map(tr::permissions), atime.map(tr::set_time), mtime.map(tr::set_time));
        let set = SetAttrs { mode, uid, gid, size, atime, mtime };
        let file = fh.filter(|_| size.is_some()).map(|fh| Handle(fh.0));
        self.live.attributes.setattr(call, ino, file, set);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(ino) => self.live.names.readlink(call, ino),
            Inode::InSnapshot(ino) => self.snapshots.readlink(call, ino),
        }
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
        let call = self.call(request, reply);
        let Some(at) = Name::live(parent, name) else { return call.fail(Errno::EROFS) };
        let Some(kind) = tr::node_kind(mode) else { return call.fail(Errno::EINVAL) };
        self.live.names.mknod(call, at, NewNode { mode: tr::new_mode(mode, umask), kind, rdev });
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
        let call = self.call(request, reply);
        let Some(at) = Name::live(parent, name) else { return call.fail(Errno::EROFS) };
        self.live.names.mkdir(call, at, tr::new_mode(mode, umask));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let call = self.call(request, reply);
        let Some(at) = Name::live(parent, name) else { return call.fail(Errno::EROFS) };
        self.live.names.unlink(call, at);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let call = self.call(request, reply);
        let Some(at) = Name::live(parent, name) else { return call.fail(Errno::EROFS) };
        self.live.names.rmdir(call, at);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let call = self.call(request, reply);
        let Some(at) = Name::live(parent, name) else { return call.fail(Errno::EROFS) };
        self.live.names.symlink(call, at, target);
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
        let call = self.call(request, reply);
        let (Some(from), Some(to)) = (Name::live(parent, name), Name::live(newparent, newname)) else {
            return call.fail(Errno::EROFS);
        };
        let Some(mode) = tr::rename_mode(flags) else { return call.fail(Errno::EINVAL) };
        self.live.names.rename(call, from, to, mode);
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let call = self.call(request, reply);
        let (Some(ino), Some(to)) = (Inode::live(ino), Name::live(newparent, newname)) else {
            return call.fail(Errno::EROFS);
        };
        self.live.names.link(call, ino, to);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.options.check();
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(ino) => self.live.opens.open(call, ino, flags.0),
            Inode::InSnapshot(ino) => self.snapshots.open(call, ino, tr::open_mode(flags.0).0),
        }
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
        let call = self.call(request, reply);
        let Some(at) = Name::live(parent, name) else { return call.fail(Errno::EROFS) };
        self.live.opens.create(call, at, tr::new_mode(mode, umask), flags);
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
        let call = self.call(request, reply);
        let Some(dir) = Inode::live(parent) else { return call.fail(Errno::EROFS) };
        self.live.opens.create_nameless(call, dir, tr::new_mode(mode, umask), flags);
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
        let (call, len) = (self.call(request, reply), size as usize);
        // Only a program's own read names its owner.
        let for_pages = lock_owner.is_none();
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.data.read(call, Read { file, offset, len, for_pages }),
            OpenFile::InSnapshot(file) => self.snapshots.read(call, file, offset, len),
        }
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
        // The descriptor's present flags (`fcntl` may change them). Pages go to their own offset.
        let appends = flags.0 & libc::O_APPEND != 0 && !write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let write = Write {
            file: Handle(fh.0),
            ino: from_kernel_ino(ino),
            offset: (!appends).then_some(offset),
            data,
            kills_privileges: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
        };
        self.live.data.write(self.call(request, reply), write);
    }

    fn flush(&self, request: &Request, ino: INodeNo, fh: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        let owner = live::owner(owner, false);
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.opens.flush(self.call(request, reply), file, owner),
            OpenFile::InSnapshot(_) => {
                self.snapshots.unlock_owner(ino, owner);
                reply.ok();
            }
        }
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
        let asked = match Asked::new(live::owner(owner, false), start, end, typ, pid) {
            Ok(asked) => asked,
            Err(e) => return reply.error(e),
        };
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.locks.test(self.call(request, reply), file, asked),
            OpenFile::InSnapshot(_) => asked.reply(reply, Ok(self.snapshots.test_lock(ino, &asked.wish))),
        }
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
        let wish = match Asked::new(live::owner(owner, flock), start, end, typ, pid) {
            Ok(asked) => asked.wish,
            Err(e) => return reply.error(e),
        };
        let call = self.call(request, reply);
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.locks.set(call, file, wish, sleep),
            OpenFile::InSnapshot(file) => self.snapshots.set_lock(call, ino, file, wish, sleep),
        }
    }

    fn release(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.opens.release(self.call(request, reply), file),
            OpenFile::InSnapshot(file) => {
                self.snapshots.release(ino, file);
                reply.ok();
            }
        }
    }

    fn fsync(&self, request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.opens.sync(self.call(request, reply), file, datasync),
            OpenFile::InSnapshot(_) => reply.ok(),
        }
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.options.check();
        self.live.directories.open(self.call(request, reply), from_kernel_ino(ino));
    }

    fn readdir(&self, request: &Request, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(dir) => self.live.directories.read(call, Next { dir, stream: fh, offset }),
            Inode::InSnapshot(dir) => self.snapshots.readdir(call, dir, offset),
        }
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(dir) => self.live.directories.read_plus(call, Next { dir, stream: fh, offset }),
            Inode::InSnapshot(dir) => self.snapshots.readdirplus(call, dir, offset),
        }
    }

    fn releasedir(&self, _: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.live.directories.close(fh);
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        match Inode::of(ino) {
            Inode::Live(dir) => self.live.directories.sync(self.call(request, reply), dir),
            Inode::InSnapshot(_) => reply.ok(),
        }
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.live.attributes.statfs(self.call(request, reply), Inode::live(ino).unwrap_or_else(top));
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
        let call = self.call(request, reply);
        let Some(ino) = Inode::live(ino) else { return call.fail(Errno::EROFS) };
        self.live.xattrs.set(call, ino, NewValue { name, value, flags });
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let call = self.call(request, reply);
        if is_foreign(name) {
            return call.fail(Errno::NO_XATTR);
        }
        match Inode::of(ino) {
            Inode::Live(ino) => self.live.xattrs.get(call, ino, name, size),
            Inode::InSnapshot(ino) => self.snapshots.get_xattr(call, ino, name.as_bytes().to_vec(), size),
        }
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let call = self.call(request, reply);
        match Inode::of(ino) {
            Inode::Live(ino) => self.live.xattrs.list(call, ino, size),
            Inode::InSnapshot(ino) => self.snapshots.list_xattr(call, ino, size),
        }
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let call = self.call(request, reply);
        let Some(ino) = Inode::live(ino) else { return call.fail(Errno::EROFS) };
        self.live.xattrs.remove(call, ino, name);
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
        let call = self.call(request, reply);
        let Some(ino) = Inode::live(ino) else { return call.fail(Errno::EROFS) };
        match tr::allocate(mode) {
            Ok(kind) => {
                let file = Handle(fh.0);
                self.live.data.allocate(call, Allocation { file, ino, kind, offset, len: length });
            }
            Err(e) => call.fail(e),
        }
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
        let call = self.call(request, reply);
        let Ok(offset) = u64::try_from(offset) else { return call.fail(Errno::ENXIO) };
        match OpenFile::of(fh) {
            OpenFile::Live(file) => self.live.data.seek(call, file, offset, whence),
            OpenFile::InSnapshot(file) => self.snapshots.seek(call, file, offset, whence),
        }
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
        _ph: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
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
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let call = self.call(request, reply);
        let OpenFile::Live(from) = OpenFile::of(fh_in) else {
            return call.fail(Errno::EXDEV); // then the kernel reads and writes
        };
        let copy = CopyRange {
            from,
            from_offset: offset_in,
            to: Handle(fh_out.0),
            to_ino: from_kernel_ino(ino_out),
            to_offset: offset_out,
            len,
        };
        self.live.data.copy(call, copy);
    }
}
