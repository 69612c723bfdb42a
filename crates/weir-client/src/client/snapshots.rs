//! Snapshots: taken, removed and listed at the leader, and read.
use super::Client;
use crate::leader::Change;
use crate::snapshots::SnapshotFile;
use bytes::Bytes;
use weir_env::BoxFuture;
use weir_proto::meta::{Attr, Cred};
use weir_proto::snapshot::{
    Snapshot, SnapshotDelete, SnapshotGetAttr, SnapshotGetXattr, SnapshotList, SnapshotListXattr,
    SnapshotListing, SnapshotLookup, SnapshotReadDir, SnapshotTake,
};
use weir_proto::{InodeId, Result, VolumeId};

impl Client {
    /// Takes a snapshot of a volume as it is now.
    pub fn take_snapshot<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Snapshot>> {
        Box::pin(async move {
            let take = |op| SnapshotTake { op, cred: cred.clone(), volume, name: name.to_owned() };
            let deadline = self.parts.base.leader.deadline() + self.parts.base.config.recall_patience;
            self.parts.base.leader.change(Change::once().until(deadline), take).await
        })
    }
    pub fn delete_snapshot<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Snapshot>> {
        Box::pin(async move {
            let delete = |op| SnapshotDelete { op, cred: cred.clone(), volume, name: name.to_owned() };
            self.parts.base.leader.change(Change::once(), delete).await
        })
    }
    /// Oldest first.
    pub fn snapshots(&self, volume: VolumeId) -> BoxFuture<'_, Result<Vec<Snapshot>>> {
        Box::pin(async move {
            let ask = |session| SnapshotList { session, volume };
            Ok(self.parts.base.leader.ask(ask).await?.snapshots)
        })
    }

    pub fn snapshot_lookup<'a>(
        &'a self,
        cred: &'a Cred,
        snapshot: u32,
        parent: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Attr>>> {
        Box::pin(async move {
            let name = Bytes::copy_from_slice(name);
            let ask = |session| SnapshotLookup {
                session,
                cred: cred.clone(),
                snapshot,
                parent,
                name: name.clone(),
            };
            Ok(self.parts.base.leader.ask(ask).await?.attr)
        })
    }
    pub fn snapshot_attr(&self, snapshot: u32, ino: InodeId) -> BoxFuture<'_, Result<Attr>> {
        Box::pin(async move {
            self.parts.base.leader.ask(|session| SnapshotGetAttr { session, snapshot, ino }).await
        })
    }
    /// Entries after the cookie `after` (0: from the start), without "." and "..".
    pub fn snapshot_list<'a>(
        &'a self,
        cred: &'a Cred,
        snapshot: u32,
        dir: InodeId,
        after: u64,
        limit: u32,
    ) -> BoxFuture<'a, Result<SnapshotListing>> {
        Box::pin(async move {
            let ask = |session| SnapshotReadDir { session, cred: cred.clone(), snapshot, dir, after, limit };
            self.parts.base.leader.ask(ask).await
        })
    }
    pub fn snapshot_get_xattr<'a>(
        &'a self,
        snapshot: u32,
        ino: InodeId,
        name: &'a [u8],
    ) -> BoxFuture<'a, Result<Bytes>> {
        Box::pin(async move {
            let name = Bytes::copy_from_slice(name);
            let ask = |session| SnapshotGetXattr { session, snapshot, ino, name: name.clone() };
            Ok(self.parts.base.leader.ask(ask).await?.bytes)
        })
    }
    pub fn snapshot_list_xattr(&self, snapshot: u32, ino: InodeId) -> BoxFuture<'_, Result<Vec<Bytes>>> {
        Box::pin(async move {
            let ask = |session| SnapshotListXattr { session, snapshot, ino };
            Ok(self.parts.base.leader.ask(ask).await?.names)
        })
    }
    pub fn snapshot_open<'a>(
        &'a self,
        cred: &'a Cred,
        snapshot: u32,
        ino: InodeId,
    ) -> BoxFuture<'a, Result<SnapshotFile>> {
        Box::pin(self.parts.snapshots.open(cred, snapshot, ino, false))
    }
    /// Opens a program to run it, like [`OpenMode::execute`].
    pub fn snapshot_execute<'a>(
        &'a self,
        cred: &'a Cred,
        snapshot: u32,
        ino: InodeId,
    ) -> BoxFuture<'a, Result<SnapshotFile>> {
        Box::pin(self.parts.snapshots.open(cred, snapshot, ino, true))
    }
    /// Parts in order, together at most `len` bytes; fewer only at the end of the file.
    pub fn snapshot_read<'a>(
        &'a self,
        file: &'a SnapshotFile,
        offset: u64,
        len: usize,
    ) -> BoxFuture<'a, Result<Vec<Bytes>>> {
        Box::pin(self.parts.snapshots.read(file, offset, len))
    }
    pub fn snapshot_readlink<'a>(
        &'a self,
        cred: &'a Cred,
        snapshot: u32,
        ino: InodeId,
    ) -> BoxFuture<'a, Result<Bytes>> {
        Box::pin(self.parts.snapshots.read_link(cred, snapshot, ino))
    }
}
