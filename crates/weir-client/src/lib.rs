//! Files over stripes over cells: what an application's reads, writes and names become on targets and at the
//! metadata leader.
//!
//! Invariants: nothing is cached without a lease; an acknowledged byte is in a dirty buffer or on targets, never
//! nowhere; no byte that fails its checksum is returned; memory stays within one budget.
//! Knows nothing of FUSE, Python or HTTP.
#![forbid(unsafe_code)]

mod api;

pub use api::{
    Allocate, ClientConfig, ClientStatus, Forget, Handle, KernelCache, NoKernel, OpenMode, Opened, SetAttrs,
    SetTime, Space, Stat,
};
use bytes::Bytes;
use std::sync::Arc;
use weir_env::Env;
use weir_proto::meta::{Cred, FileKind, Listing, RenameMode, Usage};
use weir_proto::{Error, InodeId, Result};

/// One client of a volume: one per mount or library user. Cheap to clone.
#[derive(Clone)]
pub struct Client {}

fn later<T>() -> Result<T> {
    Err(Error::unsupported("this build of the client has signatures only"))
}

/// Names and attributes.
#[allow(unused_variables)]
impl Client {
    /// Joins the cluster as a client and opens a session at the volume's metadata leader.
    pub async fn connect(env: Env, config: ClientConfig, kernel: Arc<dyn KernelCache>) -> Result<Client> {
        later()
    }
    /// Answers from leases alone; outer `None`: ask [`Client::lookup`].
    pub fn try_lookup(&self, parent: InodeId, name: &[u8]) -> Option<Option<Stat>> {
        None
    }
    pub async fn lookup(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<Option<Stat>> {
        later()
    }
    /// Answers from leases alone; `None`: ask [`Client::getattr`].
    pub fn try_getattr(&self, ino: InodeId) -> Option<Stat> {
        None
    }
    pub async fn getattr(&self, ino: InodeId) -> Result<Stat> {
        later()
    }
    /// `handle`: an open file through which a size is set (then its rights count, not those of the file's mode).
    pub async fn setattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        handle: Option<Handle>,
        set: SetAttrs,
    ) -> Result<Stat> {
        later()
    }
    pub async fn readlink(&self, ino: InodeId) -> Result<Bytes> {
        later()
    }
    /// Entries after the cookie `after` (0: from the start), "." and ".." not among them.
    pub async fn readdir(&self, dir: InodeId, after: u64, limit: u32, with_attrs: bool) -> Result<Listing> {
        later()
    }
    pub async fn mkdir(&self, cred: &Cred, parent: InodeId, name: &[u8], mode: u32) -> Result<Stat> {
        later()
    }
    pub async fn mknod(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        kind: FileKind,
        rdev: u32,
    ) -> Result<Stat> {
        later()
    }
    pub async fn symlink(&self, cred: &Cred, parent: InodeId, name: &[u8], target: &[u8]) -> Result<Stat> {
        later()
    }
    pub async fn link(&self, cred: &Cred, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Stat> {
        later()
    }
    pub async fn unlink(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        later()
    }
    pub async fn rmdir(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        later()
    }
    pub async fn rename(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        later()
    }
    pub async fn get_xattr(&self, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        later()
    }
    pub async fn list_xattr(&self, ino: InodeId) -> Result<Vec<Bytes>> {
        later()
    }
    /// `create`: fail if it exists; `replace`: fail if it does not.
    pub async fn set_xattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
    ) -> Result<()> {
        later()
    }
    pub async fn remove_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<()> {
        later()
    }
    pub async fn statfs(&self) -> Result<Space> {
        later()
    }
    /// Exact recursive usage of a directory.
    pub async fn usage(&self, dir: InodeId) -> Result<Usage> {
        later()
    }
    /// The kernel dropped the inode from its caches: what is kept here for it may go, too.
    pub fn forget(&self, ino: InodeId) {}
}

/// Open files.
#[allow(unused_variables)]
impl Client {
    pub async fn create(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        open: OpenMode,
    ) -> Result<Opened> {
        later()
    }
    pub async fn open(&self, cred: &Cred, ino: InodeId, open: OpenMode) -> Result<Opened> {
        later()
    }
    /// Takes the bytes at once where lease and memory allow; `None`: use [`Client::write`].
    pub fn try_write(&self, handle: Handle, offset: u64, data: &[u8]) -> Option<Result<usize>> {
        None
    }
    pub async fn write(&self, handle: Handle, offset: u64, data: Bytes) -> Result<usize> {
        later()
    }
    /// The bytes if all are cached here; `None`: use [`Client::read`].
    pub fn try_read(&self, handle: Handle, offset: u64, len: usize) -> Option<Result<Vec<Bytes>>> {
        None
    }
    /// Parts in order, together at most `len` bytes; fewer only at the end of the file.
    pub async fn read(&self, handle: Handle, offset: u64, len: usize) -> Result<Vec<Bytes>> {
        later()
    }
    /// Bytes and size are durable on all live targets and at the metadata leader.
    pub async fn fsync(&self, handle: Handle) -> Result<()> {
        later()
    }
    /// At `close(2)`: commits, and reports every write error that was not reported yet.
    pub async fn flush(&self, handle: Handle) -> Result<()> {
        later()
    }
    /// The handle's end.
    pub async fn release(&self, handle: Handle) -> Result<()> {
        later()
    }
    pub async fn fallocate(&self, handle: Handle, what: Allocate, offset: u64, len: u64) -> Result<()> {
        later()
    }
    /// Start of data at or after `offset`; `None` past the end.
    pub async fn seek_data(&self, handle: Handle, offset: u64) -> Result<Option<u64>> {
        later()
    }
    /// Start of a hole at or after `offset` (the end of the file counts as one); `None` past the end.
    pub async fn seek_hole(&self, handle: Handle, offset: u64) -> Result<Option<u64>> {
        later()
    }
    pub fn status(&self) -> ClientStatus {
        ClientStatus::default()
    }
    /// Flushes everything and closes the session. An error names what could not be saved.
    pub async fn shutdown(&self) -> Result<()> {
        later()
    }
}
