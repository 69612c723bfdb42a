//! The client as its users see it: each call goes to the room that serves it, in a box (decision 30).
mod backups;
mod relations;
mod snapshots;
mod volumes;

pub use backups::BackupEdit;
pub use relations::NewRelation;
pub use volumes::{NewVolume, VolumeEdit};

use crate::connect::connect;
use crate::locks::{InTheWay, LockWish, Locked};
use crate::mover::Mover;
use crate::parts::Parts;
use crate::space::{space_at, space_for};
use crate::types::{
    Allocate, ClientConfig, ClientStatus, Forget, Handle, KernelCache, Loss, NewMode, OpenMode, Opened,
    SetAttrs, Space, Stat,
};
use crate::upkeep;
use crate::waits::Waiting;
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::Notify;
use weir_env::{BoxFuture, Env, Instant, TaskHandle};
use weir_proto::lock::{LockEntry, LockOwner};
use weir_proto::meta::{Cred, FileKind, Listing, RenameMode, Usage};
use weir_proto::recall::{Evicted, EvictionLevel, SetMarks, TierState};
use weir_proto::{ClusterId, InodeId, Result, SessionId};
use weir_watch::{Kind, Watch};

/// One client of a namespace: one per mount or library user. Cheap to clone; its tasks end with the last
/// clone.
#[derive(Clone)]
pub struct Client {
    parts: Arc<Parts>,
    _tasks: Arc<Background>,
}

struct Background(Vec<TaskHandle>);
impl Drop for Background {
    fn drop(&mut self) {
        self.0.iter().for_each(TaskHandle::abort);
    }
}

impl Client {
    /// Finds the cluster and opens a session at the namespace's metadata leader.
    pub fn connect(
        env: Env,
        config: ClientConfig,
        kernel: Arc<dyn KernelCache>,
    ) -> BoxFuture<'static, Result<Client>> {
        Box::pin(async move {
            let parts = connect(env, config, kernel).await?;
            let tasks = Arc::new(Background(upkeep::begin(&parts)));
            Ok(Client { parts, _tasks: tasks }.with_meters())
        })
    }
    /// The cluster of this client.
    pub fn cluster(&self) -> ClusterId {
        self.parts.base.data.cluster.id()
    }
    pub fn status(&self) -> ClientStatus {
        self.parts.status()
    }
    /// The requests of movers.
    pub fn mover(&self) -> &Arc<Mover> {
        &self.parts.mover
    }
    /// For simulators and tests: panics if an invariant of the client's state does not hold.
    pub fn check(&self) {
        self.parts.check()
    }
    /// The time on the clock of [`Waiting::since`].
    pub fn now(&self) -> Instant {
        self.parts.base.env.clock.now()
    }
    /// Causes that calls have been waiting for for a while.
    pub fn waits(&self) -> Vec<Waiting> {
        self.parts.base.data.waits.list()
    }
    /// Flushes everything and closes the session. An error names the files that could not be saved.
    pub fn shutdown(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.files.shutdown())
    }
    /// The session, unless a shutdown has closed it. If not, the leader waits for it after a failover, so the
    /// next client of the process closes it by [`Client::close_session`].
    pub fn session_left(&self) -> Option<SessionId> {
        self.parts.base.leader.unclosed()
    }
    /// Closes the session of an earlier client of this process.
    pub fn close_session(&self, session: SessionId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.base.leader.close_other(session))
    }
    /// The number of losses of changes or locks, and the last of them.
    pub fn losses(&self) -> (u64, Vec<Loss>) {
        self.parts.base.losses.list()
    }

    /// Bytes that programs have written and that no target has acknowledged yet.
    pub fn unsaved_bytes(&self) -> u64 {
        let all = self.parts.base.inodes.dirty().into_iter();
        all.map(|inode| inode.lock().write.unsaved_bytes()).sum()
    }
    /// The meters of this client's process.
    pub fn watch(&self) -> &Watch {
        &self.parts.base.env.watch
    }

    /// Shows this client's counters from now on, instead of those of an earlier client of the process.
    fn with_meters(self) -> Client {
        let meters = &self.watch().meters;
        let show = |kind, name, read: fn(&ClientStatus) -> u64| {
            let parts = Arc::downgrade(&self.parts);
            let value = move || parts.upgrade().map_or(0, |parts| read(&parts.status()) as i64);
            meters.observe(kind, name, ("", ""), Arc::new(value));
        };
        show(Kind::Counter, "weir_client_sent_bytes_total", |s| s.wire_sent_bytes);
        show(Kind::Counter, "weir_client_received_bytes_total", |s| s.wire_received_bytes);
        show(Kind::Counter, "weir_client_hedges_total", |s| s.hedged_reads);
        show(Kind::Counter, "weir_client_degraded_reads_total", |s| s.degraded_reads);
        show(Kind::Counter, "weir_client_degraded_writes_total", |s| s.degraded_writes);
        show(Kind::Counter, "weir_client_damaged_total", |s| s.crc_failures);
        show(Kind::Counter, "weir_client_recalled_leases_total", |s| s.revokes);
        show(Kind::Gauge, "weir_client_memory_bytes", |s| s.memory_used_bytes);
        self
    }
}

/// Open files: reads, writes, sizes and closes.
impl Client {
    pub fn create<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        mode: impl Into<NewMode>,
        exclusive: bool,
        open: OpenMode,
    ) -> BoxFuture<'a, Result<Opened>> {
        self.create_with(cred, parent, name, mode.into(), exclusive, open)
    }
    fn create_with<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        mode: NewMode,
        exclusive: bool,
        open: OpenMode,
    ) -> BoxFuture<'a, Result<Opened>> {
        Box::pin(self.parts.files.create(cred, parent, name, mode, exclusive, open))
    }
    /// A file without a name, opened for writing: [`Client::link`] may give it one, otherwise it is deleted
    /// with its last close.
    pub fn create_nameless<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        mode: impl Into<NewMode>,
        open: OpenMode,
    ) -> BoxFuture<'a, Result<Opened>> {
        self.create_nameless_with(cred, parent, mode.into(), open)
    }
    fn create_nameless_with<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        mode: NewMode,
        open: OpenMode,
    ) -> BoxFuture<'a, Result<Opened>> {
        Box::pin(self.parts.files.create_nameless(cred, parent, mode, open))
    }
    /// Whether the kernel's own permission check suffices for an open by this user. Not if the rules for
    /// mounts may refuse it.
    pub fn may_open_unasked(&self, uid: u32) -> bool {
        self.parts.reports.local_names.may_decide_for(uid)
    }
    /// Opens a file for reading without a message; `None`: use [`Client::open`]. The caller has checked that
    /// it may be read.
    pub fn try_open(&self, ino: InodeId, open: OpenMode) -> Option<Opened> {
        self.parts.files.try_reopen(ino, open)
    }
    pub fn open<'a>(&'a self, cred: &'a Cred, ino: InodeId, open: OpenMode) -> BoxFuture<'a, Result<Opened>> {
        Box::pin(self.parts.files.open(cred, ino, open))
    }
    /// Whether a close of this file needs no work: nothing to save, no locks of the process to release. Asked
    /// at open.
    pub fn closes_quietly(&self, handle: Handle) -> bool {
        self.parts.base.handles.close_quietly(handle)
    }
    /// Buffers the bytes at once if lease and memory allow it; `None`: use [`Client::write`].
    pub fn try_write(&self, handle: Handle, offset: u64, data: &[u8]) -> Option<Result<usize>> {
        self.parts.writing.writer.try_write(handle, Some(offset), data)
    }
    /// As `try_write`, at the end of the file.
    pub fn try_append(&self, handle: Handle, data: &[u8]) -> Option<Result<usize>> {
        self.parts.writing.writer.try_write(handle, None, data)
    }
    pub fn write(&self, handle: Handle, offset: u64, data: Bytes) -> BoxFuture<'_, Result<usize>> {
        Box::pin(self.parts.writing.writer.write(handle, Some(offset), data))
    }
    /// Writes at the end of the file, even if other clients append: no two appends get the same place.
    pub fn append(&self, handle: Handle, data: Bytes) -> BoxFuture<'_, Result<usize>> {
        Box::pin(self.parts.writing.writer.write(handle, None, data))
    }
    /// The bytes if all are cached here; `None`: use [`Client::read`].
    pub fn try_read(&self, handle: Handle, offset: u64, len: usize) -> Option<Result<Vec<Bytes>>> {
        self.parts.reader.try_read(handle, offset, len)
    }
    /// Parts in order, together at most `len` bytes; fewer only at the end of the file.
    pub fn read(&self, handle: Handle, offset: u64, len: usize) -> BoxFuture<'_, Result<Vec<Bytes>>> {
        Box::pin(self.parts.reader.read(handle, offset, len))
    }
    /// Bytes and size are durable on all live targets and at the metadata leader.
    pub fn fsync(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.files.fsync(handle))
    }
    /// As `fsync`, except for times: they follow with the next `fsync`, `flush` or write-back.
    pub fn fdatasync(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.files.fdatasync(handle))
    }
    /// At `close(2)`: commits, and reports every write error that was not reported yet.
    pub fn flush(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.files.flush_handle(handle))
    }
    /// Ends the handle.
    pub fn release(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.files.release(handle))
    }
    pub fn fallocate(
        &self,
        handle: Handle,
        what: Allocate,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.writing.resize.fallocate(handle, what, offset, len))
    }
    /// Copies between open files; returns the number of bytes, fewer only at the end of `from` or if more
    /// would take long.
    pub fn copy_range(
        &self,
        from: Handle,
        from_at: u64,
        to: Handle,
        to_at: u64,
        len: u64,
    ) -> BoxFuture<'_, Result<u64>> {
        Box::pin(self.parts.seek.copy_range(from, from_at, to, to_at, len))
    }
    /// The kernel drops all pages of the file before the first read through this handle, which was just
    /// opened.
    pub fn drops_pages(&self, handle: Handle) {
        self.parts.base.handles.note_dropped_pages(handle)
    }
    /// Reads and writes through this handle, which was just opened, leave no pages.
    pub fn keeps_no_pages(&self, handle: Handle) {
        self.parts.base.handles.note_pages(handle, false)
    }
    /// The kernel fills pages through this handle: they are dropped if no lease protects them.
    pub fn keeps_pages(&self, handle: Handle) {
        self.parts.base.handles.note_pages(handle, true)
    }
    /// Reads through this handle leave the access time as it is (`O_NOATIME`).
    pub fn leaves_access_time(&self, handle: Handle) {
        self.parts.base.handles.leave_access_time(handle)
    }
    /// Records the thread that opened a file; `opener` returns it.
    pub fn set_opener(&self, handle: Handle, thread: u32) {
        self.parts.base.handles.set_opener(handle, thread)
    }
    /// The thread that opened a file for writing; `None`: not known, or the handle cannot write.
    pub fn opener(&self, handle: Handle) -> Option<u32> {
        self.parts.base.handles.opener(handle)
    }
    /// Start of data at or after `offset`; `None`: there is none.
    pub fn seek_data(&self, handle: Handle, offset: u64) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(self.parts.seek.seek_data(handle, offset))
    }
    /// Start of a hole at or after `offset` (the end of the file counts as one); `None` past the end.
    pub fn seek_hole(&self, handle: Handle, offset: u64) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(self.parts.seek.seek_hole(handle, offset))
    }
}

/// Names and attributes.
impl Client {
    /// Answers from leases alone; outer `None`: ask [`Client::lookup`].
    pub fn try_lookup(&self, parent: InodeId, name: &[u8]) -> Option<Option<Stat>> {
        self.parts.names.try_lookup(parent, name)
    }
    pub fn lookup<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Stat>>> {
        Box::pin(self.parts.names.lookup(cred, parent, name))
    }
    /// Answers from leases alone; `None`: ask [`Client::getattr`].
    pub fn try_getattr(&self, ino: InodeId) -> Option<Stat> {
        self.parts.names.try_getattr(ino)
    }
    pub fn getattr(&self, ino: InodeId) -> BoxFuture<'_, Result<Stat>> {
        Box::pin(self.parts.names.getattr(ino))
    }
    /// The last known attributes of an inode that is gone, for a program that uses it without an open file
    /// here: a directory, a pipe, a working directory.
    pub fn last_attr(&self, ino: InodeId) -> Option<Stat> {
        self.parts.names.last_attr(ino)
    }
    /// `handle`: an open file through which a size is set (then its access mode counts, not the file's
    /// permissions).
    pub fn setattr<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        handle: Option<Handle>,
        set: SetAttrs,
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(async move {
            let through = self.parts.base.handles.of(handle, ino)?;
            self.parts.names.setattr(cred, ino, through.as_deref(), set).await
        })
    }
    /// Changes attributes beside what a request of the kernel asks for. Its answer does not show them, and a
    /// kernel may keep each attribute by itself: it drops all of them before this returns.
    pub fn setattr_unasked<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        set: SetAttrs,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.parts.names.setattr(cred, ino, None, set).await?;
            self.parts.base.kernel.invalidate(ino, Forget::Attributes).await;
            Ok(())
        })
    }
    pub fn readlink(&self, ino: InodeId) -> BoxFuture<'_, Result<Bytes>> {
        Box::pin(self.parts.names.readlink(ino))
    }
    /// Entries after the cookie `after` (0: from the start), without "." and "..".
    pub fn readdir<'a>(
        &'a self,
        cred: &'a Cred,
        dir: InodeId,
        after: u64,
        limit: u32,
        with_attrs: bool,
    ) -> BoxFuture<'a, Result<Listing>> {
        Box::pin(self.parts.names.readdir(cred, dir, after, limit, with_attrs))
    }
    pub fn mkdir<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        mode: impl Into<NewMode>,
    ) -> BoxFuture<'a, Result<Stat>> {
        self.mkdir_with(cred, parent, name, mode.into())
    }
    fn mkdir_with<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        mode: NewMode,
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.parts.names.mkdir(cred, parent, name, mode))
    }
    pub fn mknod<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        mode: impl Into<NewMode>,
        kind: FileKind,
        rdev: u32,
    ) -> BoxFuture<'a, Result<Stat>> {
        self.mknod_with(cred, parent, name, mode.into(), kind, rdev)
    }
    fn mknod_with<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        mode: NewMode,
        kind: FileKind,
        rdev: u32,
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.parts.names.mknod(cred, parent, name, mode, kind, rdev))
    }
    pub fn symlink<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        target: &'a [u8],
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.parts.names.symlink(cred, parent, name, target))
    }
    pub fn link<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.parts.names.link(cred, ino, parent, name))
    }
    pub fn unlink<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.parts.names.unlink(cred, parent, name))
    }
    pub fn rmdir<'a>(&'a self, cred: &'a Cred, parent: InodeId, name: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.parts.names.rmdir(cred, parent, name))
    }
    pub fn rename<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        new_parent: InodeId,
        new_name: &'a [u8],
        mode: RenameMode,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.parts.names.rename(cred, parent, name, new_parent, new_name, mode))
    }
    pub fn get_xattr<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Bytes>> {
        Box::pin(self.parts.names.get_xattr(cred, ino, name))
    }
    pub fn list_xattr<'a>(&'a self, cred: &'a Cred, ino: InodeId) -> BoxFuture<'a, Result<Vec<Bytes>>> {
        Box::pin(self.parts.names.list_xattr(cred, ino))
    }
    /// `create`: fail if it exists; `replace`: fail if it does not.
    pub fn set_xattr<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        name: &'a [u8],
        value: &'a [u8],
        create: bool,
        replace: bool,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.parts.names.set_xattr(cred, ino, name, value, create, replace))
    }
    pub fn remove_xattr<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.parts.names.remove_xattr(cred, ino, name))
    }
    /// The target of a path from the root of the namespace; symbolic links in it are not followed.
    pub fn find_path<'a>(&'a self, cred: &'a Cred, path: &'a [u8]) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.parts.names.find_path(cred, path))
    }
    pub fn statfs(&self) -> BoxFuture<'_, Result<Space>> {
        Box::pin(space_for(&self.parts.base.leader, &self.parts.base.data, None))
    }
    /// Within the limits of the volume that contains a file or directory.
    pub fn statfs_at(&self, ino: InodeId) -> BoxFuture<'_, Result<Space>> {
        Box::pin(space_at(&self.parts.base.leader, &self.parts.base.data, ino))
    }
    /// Whether reads change access times, with the rules of `relatime`. The default is yes.
    pub fn keep_access_times(&self, kept: bool) {
        self.parts.base.accesses.keep(kept)
    }
    /// Exact recursive usage of a directory.
    pub fn usage(&self, dir: InodeId) -> BoxFuture<'_, Result<Usage>> {
        Box::pin(self.parts.names.usage(dir))
    }
    /// Makes all files that were created in the directory before durable.
    pub fn sync_names(&self, dir: InodeId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.reports.local_names.sync(dir))
    }
    /// Whether the kernel may cache this name's target, or its absence, for [`NAME_LOAN`]: asked just before
    /// the answer with it is sent. False: it must ask each time.
    pub fn lend_name(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> bool {
        self.parts.base.lent_names.lend(dir, name, leads_to)
    }
    /// The kernel dropped the inode from its caches: the client's state for it may go, too.
    pub fn forget(&self, ino: InodeId) {
        self.parts.base.inodes.forget(ino)
    }
}

/// Bytes that are at home only.
impl Client {
    /// Frees the space of whole stripes in `from..to`, and of the tail: home has these bytes.
    pub fn evict<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        from: u64,
        to: u64,
    ) -> BoxFuture<'a, Result<Evicted>> {
        Box::pin(self.parts.rights.tiering.evict(cred, ino, from, to))
    }
    /// Queues a recall with low priority; waits for nothing.
    pub fn want_recall(&self, ino: InodeId, from: u64, to: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.rights.tiering.want_recall(ino, from, to))
    }
    /// Waits until all of a file is online. May be dropped at any time.
    pub fn recall_file(&self, ino: InodeId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.rights.tiering.recall_file(ino))
    }
    /// A pinned file is never evicted.
    pub fn pin<'a>(&'a self, cred: &'a Cred, ino: InodeId, pinned: bool) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.parts.rights.tiering.pin(cred, ino, pinned))
    }
    /// Which of a file's bytes are online.
    pub fn tier_state(&self, ino: InodeId) -> BoxFuture<'_, Result<TierState>> {
        Box::pin(self.parts.rights.tiering.tier_state(ino))
    }
    /// Whether a read or a write through the handle may have to wait for a recall.
    pub fn may_wait_for_home(&self, handle: Handle) -> bool {
        self.parts.rights.tiering.may_wait_for_home(handle)
    }
    /// Waits until `len` bytes from `offset` (`None`: the end of the file) on are online. Reads and writes do
    /// so themselves, but this may be dropped at any time.
    pub fn recall(&self, handle: Handle, offset: Option<u64>, len: usize) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.rights.tiering.recall_for(handle, offset, len))
    }

    /// How full pools and volumes are, and the eviction watermarks; `set` changes a volume's marks first.
    pub fn eviction<'a>(
        &'a self,
        cred: &'a Cred,
        set: Option<SetMarks>,
    ) -> BoxFuture<'a, Result<Vec<EvictionLevel>>> {
        Box::pin(self.parts.rights.tiering.eviction(cred, set))
    }
}

/// Locks on files, cluster-wide.
impl Client {
    /// Locks, converts or unlocks a range without waiting for other holders.
    pub fn try_lock(&self, handle: Handle, wish: LockWish) -> BoxFuture<'_, Result<Locked>> {
        Box::pin(self.parts.locks.try_lock(handle, wish))
    }
    /// Waits until the lock is granted; a notified `interrupt` ends the wait.
    pub fn wait_lock<'a>(
        &'a self,
        handle: Handle,
        wish: LockWish,
        interrupt: &'a Notify,
    ) -> BoxFuture<'a, Result<Locked>> {
        Box::pin(self.parts.locks.wait_lock(handle, wish, interrupt))
    }
    /// The first conflicting lock.
    pub fn test_lock(&self, handle: Handle, wish: LockWish) -> BoxFuture<'_, Result<Option<InTheWay>>> {
        Box::pin(self.parts.locks.test_lock(handle, wish))
    }
    /// At `close(2)`: the owner's locks of the file end.
    pub fn unlock_owner(&self, handle: Handle, owner: LockOwner) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.parts.locks.unlock_owner(handle, owner))
    }
    /// Holders and waiters, and the number of those that the list omits.
    pub fn list_locks(&self, ino: InodeId) -> BoxFuture<'_, Result<(Vec<LockEntry>, u32)>> {
        Box::pin(self.parts.locks.list_locks(ino))
    }
}
