//! Names and attributes.
use crate::Client;
use crate::api::{Forget, Handle, NewMode, SetAttrs, Space, Stat};
use crate::space::{space_at, space_for};
use bytes::Bytes;
use weir_env::BoxFuture;
use weir_proto::meta::{Cred, FileKind, Listing, RenameMode, Usage};
use weir_proto::{InodeId, Result};

impl Client {
    /// Answers from leases alone; outer `None`: ask [`Client::lookup`].
    pub fn try_lookup(&self, parent: InodeId, name: &[u8]) -> Option<Option<Stat>> {
        self.inner.try_lookup(parent, name)
    }
    pub fn lookup<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Stat>>> {
        Box::pin(self.inner.lookup(cred, parent, name))
    }
    /// Answers from leases alone; `None`: ask [`Client::getattr`].
    pub fn try_getattr(&self, ino: InodeId) -> Option<Stat> {
        self.inner.try_getattr(ino)
    }
    pub fn getattr(&self, ino: InodeId) -> BoxFuture<'_, Result<Stat>> {
        Box::pin(self.inner.getattr(ino))
    }
    /// The last known attributes of an inode that is gone, for a program that uses it without an open file
    /// here: a directory, a pipe, a working directory.
    pub fn last_attr(&self, ino: InodeId) -> Option<Stat> {
        self.inner.last_attr(ino)
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
            let through = self.inner.handles.of(handle, ino)?;
            self.inner.setattr(cred, ino, through.as_deref(), set).await
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
            self.inner.setattr(cred, ino, None, set).await?;
            self.inner.kernel.invalidate(ino, Forget::Attributes).await;
            Ok(())
        })
    }
    pub fn readlink(&self, ino: InodeId) -> BoxFuture<'_, Result<Bytes>> {
        Box::pin(self.inner.readlink(ino))
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
        Box::pin(self.inner.readdir(cred, dir, after, limit, with_attrs))
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
        Box::pin(self.inner.mkdir(cred, parent, name, mode))
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
        Box::pin(self.inner.mknod(cred, parent, name, mode, kind, rdev))
    }
    pub fn symlink<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
        target: &'a [u8],
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.inner.symlink(cred, parent, name, target))
    }
    pub fn link<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Stat>> {
        Box::pin(self.inner.link(cred, ino, parent, name))
    }
    pub fn unlink<'a>(
        &'a self,
        cred: &'a Cred,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.inner.unlink(cred, parent, name))
    }
    pub fn rmdir<'a>(&'a self, cred: &'a Cred, parent: InodeId, name: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.inner.rmdir(cred, parent, name))
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
        Box::pin(self.inner.rename(cred, parent, name, new_parent, new_name, mode))
    }
    pub fn get_xattr<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Bytes>> {
        Box::pin(self.inner.get_xattr(cred, ino, name))
    }
    pub fn list_xattr<'a>(&'a self, cred: &'a Cred, ino: InodeId) -> BoxFuture<'a, Result<Vec<Bytes>>> {
        Box::pin(self.inner.list_xattr(cred, ino))
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
        Box::pin(self.inner.set_xattr(cred, ino, name, value, create, replace))
    }
    pub fn remove_xattr<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.inner.remove_xattr(cred, ino, name))
    }
    pub fn statfs(&self) -> BoxFuture<'_, Result<Space>> {
        Box::pin(space_for(&self.inner.leader, &self.inner.data, None))
    }
    /// The same, within the limits of the volume that contains a file or directory.
    pub fn statfs_at(&self, ino: InodeId) -> BoxFuture<'_, Result<Space>> {
        Box::pin(space_at(&self.inner.leader, &self.inner.data, ino))
    }
    /// Whether reads change access times, with the rules of `relatime`. The default is yes.
    pub fn keep_access_times(&self, kept: bool) {
        self.inner.accesses.keep(kept)
    }
    /// Exact recursive usage of a directory.
    pub fn usage(&self, dir: InodeId) -> BoxFuture<'_, Result<Usage>> {
        Box::pin(self.inner.usage(dir))
    }
    /// Makes all files that were created in the directory before durable.
    pub fn sync_names(&self, dir: InodeId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.local_names.sync(dir))
    }
    /// Whether the kernel may cache this name's target, or its absence, for [`NAME_LOAN`]: asked just before
    /// the answer with it is sent. False: it must ask each time.
    pub fn lend_name(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> bool {
        self.inner.lent_names.lend(dir, name, leads_to)
    }
    /// The kernel dropped the inode from its caches: the client's state for it may go, too.
    pub fn forget(&self, ino: InodeId) {
        self.inner.inodes.forget(ino)
    }
}
