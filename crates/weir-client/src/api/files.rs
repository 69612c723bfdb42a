//! Open files: reads, writes, sizes and closes.
use crate::Client;
use crate::api::{Allocate, Handle, NewMode, OpenMode, Opened};
use bytes::Bytes;
use weir_env::BoxFuture;
use weir_proto::meta::Cred;
use weir_proto::{InodeId, Result};

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
        Box::pin(self.inner.create(cred, parent, name, mode, exclusive, open))
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
        Box::pin(self.inner.create_nameless(cred, parent, mode, open))
    }
    /// Whether the kernel's own permission check suffices for an open by this user. Not if the rules for
    /// mounts may refuse it.
    pub fn may_open_unasked(&self, uid: u32) -> bool {
        self.inner.local_names.may_decide_for(uid)
    }
    /// Opens a file for reading without a message; `None`: use [`Client::open`]. The caller has checked that
    /// it may be read.
    pub fn try_open(&self, ino: InodeId, open: OpenMode) -> Option<Opened> {
        self.inner.try_reopen(ino, open)
    }
    pub fn open<'a>(&'a self, cred: &'a Cred, ino: InodeId, open: OpenMode) -> BoxFuture<'a, Result<Opened>> {
        Box::pin(self.inner.open(cred, ino, open))
    }
    /// Whether a close of this file needs no work: nothing to save, no locks of the process to release. Asked
    /// at open.
    pub fn closes_quietly(&self, handle: Handle) -> bool {
        self.inner.handles.close_quietly(handle)
    }
    /// Buffers the bytes at once if lease and memory allow it; `None`: use [`Client::write`].
    pub fn try_write(&self, handle: Handle, offset: u64, data: &[u8]) -> Option<Result<usize>> {
        self.inner.try_write(handle, Some(offset), data)
    }
    /// The same at the end of the file.
    pub fn try_append(&self, handle: Handle, data: &[u8]) -> Option<Result<usize>> {
        self.inner.try_write(handle, None, data)
    }
    pub fn write(&self, handle: Handle, offset: u64, data: Bytes) -> BoxFuture<'_, Result<usize>> {
        Box::pin(self.inner.write(handle, Some(offset), data))
    }
    /// Writes at the end of the file, even if other clients append: no two appends get the same place.
    pub fn append(&self, handle: Handle, data: Bytes) -> BoxFuture<'_, Result<usize>> {
        Box::pin(self.inner.write(handle, None, data))
    }
    /// The bytes if all are cached here; `None`: use [`Client::read`].
    pub fn try_read(&self, handle: Handle, offset: u64, len: usize) -> Option<Result<Vec<Bytes>>> {
        self.inner.try_read(handle, offset, len)
    }
    /// Parts in order, together at most `len` bytes; fewer only at the end of the file.
    pub fn read(&self, handle: Handle, offset: u64, len: usize) -> BoxFuture<'_, Result<Vec<Bytes>>> {
        Box::pin(self.inner.read(handle, offset, len))
    }
    /// Bytes and size are durable on all live targets and at the metadata leader.
    pub fn fsync(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.fsync(handle))
    }
    /// The same, but for times: they follow with the next `fsync`, `flush` or write-back.
    pub fn fdatasync(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.fdatasync(handle))
    }
    /// At `close(2)`: commits, and reports every write error that was not reported yet.
    pub fn flush(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.flush_handle(handle))
    }
    /// Ends the handle.
    pub fn release(&self, handle: Handle) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.release(handle))
    }
    pub fn fallocate(
        &self,
        handle: Handle,
        what: Allocate,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.fallocate(handle, what, offset, len))
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
        Box::pin(self.inner.copy_range(from, from_at, to, to_at, len))
    }
    /// The kernel drops all pages of the file before the first read through this handle, which was just
    /// opened.
    pub fn drops_pages(&self, handle: Handle) {
        self.inner.handles.note_dropped_pages(handle)
    }
    /// Reads and writes through this handle, which was just opened, leave no pages.
    pub fn keeps_no_pages(&self, handle: Handle) {
        self.inner.handles.note_pages(handle, false)
    }
    /// The kernel fills pages through this handle: they are dropped if no lease protects them.
    pub fn keeps_pages(&self, handle: Handle) {
        self.inner.handles.note_pages(handle, true)
    }
    /// Reads through this handle leave the access time as it is (`O_NOATIME`).
    pub fn leaves_access_time(&self, handle: Handle) {
        self.inner.handles.leave_access_time(handle)
    }
    /// Records the thread that opened a file; `opener` returns it.
    pub fn set_opener(&self, handle: Handle, thread: u32) {
        self.inner.handles.set_opener(handle, thread)
    }
    /// The thread that opened a file for writing; `None`: not known, or the handle cannot write.
    pub fn opener(&self, handle: Handle) -> Option<u32> {
        self.inner.handles.opener(handle)
    }
    /// Start of data at or after `offset`; `None`: there is none.
    pub fn seek_data(&self, handle: Handle, offset: u64) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(self.inner.seek_data(handle, offset))
    }
    /// Start of a hole at or after `offset` (the end of the file counts as one); `None` past the end.
    pub fn seek_hole(&self, handle: Handle, offset: u64) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(self.inner.seek_hole(handle, offset))
    }
}
