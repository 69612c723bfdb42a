//! Messages about snapshots of volumes, and about bytes of a file in older objects (methods 170–179, 144,
//! 145).
//!
//! A file's data is an object: at first the one with the inode's number. Objects of a snapshot are never
//! written again: the file gets a new object, and its ranges that are still in an older one are recorded
//! (*layers*). Snapshots are read by the messages whose names begin with `Snapshot`.
use crate::map::Layout;
use crate::meta::{Attr, Cred, Entry, Op, Time};
use crate::{InodeId, SessionId, VolumeId, message};
use bytes::Bytes;

/// Snapshots of one volume.
pub const SNAPSHOTS_MAX: usize = 256;
/// Layers in one reply to `LayersOf`.
pub const LAYERS_MAX: usize = 4096;

message!(
    /// A snapshot of a volume. Numbers grow within a namespace and are never reused.
    Snapshot {
        number: u32,
        volume: VolumeId,
        name: String,
        created: Time,
        /// The volume's root directory.
        root: InodeId,
        /// It was taken by the volume's schedule, and is removed by it.
        scheduled: bool,
    }
);
message!(
    /// Takes a snapshot of the volume. It includes all writes that completed earlier: clients with files of
    /// the volume open for writing flush first. Allowed to the volume's owner and administrators.
    SnapshotTake = 170 by [Mover, Console, User] -> Snapshot { op: Op, cred: Cred, volume: VolumeId, name: String }
);
message!(
    /// Removes a snapshot; space that only it used is freed in the background.
    SnapshotDelete = 171 by [Mover, Console, User] -> Snapshot { op: Op, cred: Cred, volume: VolumeId, name: String }
);
message!(
    /// The snapshots of a volume, oldest first.
    SnapshotList = 172 by [Mount, Mover, Console, Operator, Auditor, User] -> Snapshots { session: SessionId, volume: VolumeId }
);
message!(Snapshots { snapshots: Vec<Snapshot> });

message!(SnapshotLookup = 173 by [Mount, Mover, Console] -> SnapshotLookedUp {
    session: SessionId,
    cred: Cred,
    snapshot: u32,
    parent: InodeId,
    name: Bytes,
});
message!(SnapshotLookedUp { attr: Option<Attr> });
message!(SnapshotGetAttr = 174 by [Mount, Mover, Console] -> Attr { session: SessionId, snapshot: u32, ino: InodeId });
message!(
    /// Entries after the cookie `after`, as in `ReadDir`.
    SnapshotReadDir = 175 by [Mount, Mover, Console] -> SnapshotListing {
        session: SessionId,
        cred: Cred,
        snapshot: u32,
        dir: InodeId,
        after: u64,
        limit: u32,
    }
);
message!(SnapshotListing { entries: Vec<SnapshotEntry>, end: bool });
message!(SnapshotEntry { name: Bytes, cookie: u64, attr: Attr });
message!(SnapshotGetXattr = 176 by [Mount, Mover, Console] -> SnapshotXattrValue { session: SessionId, snapshot: u32, ino: InodeId, name: Bytes });
message!(SnapshotListXattr = 177 by [Mount, Mover, Console] -> SnapshotXattrNames { session: SessionId, snapshot: u32, ino: InodeId });
message!(SnapshotXattrValue { bytes: Bytes });
message!(SnapshotXattrNames { names: Vec<Bytes> });
message!(
    /// The information for reading a file or a symbolic link of a snapshot. `execute`: as in `Open`.
    SnapshotOpen = 178 by [Mount, Mover, Console] -> SnapshotOpened { session: SessionId, cred: Cred, snapshot: u32, ino: InodeId, execute: bool }
);
message!(SnapshotOpened {
    attr: Attr,
    /// The bytes of a small file, or the target of a symbolic link.
    inline: Option<Bytes>,
    /// Not 0: a client may still be writing to the object. Truncate it with this token epoch (`DropFile`, of
    /// no stripe) before it is read.
    fence: u32,
    /// A writer died: the file itself must be recovered first.
    recover: bool,
    /// The file itself has the same bytes now, and no client may be writing it.
    unchanged: bool,
    /// As in `Lease`.
    map_version: u64,
});

message!(
    /// Bytes `from..to` of a file lie in `object`, at the same place.
    Layer {
        from: u64,
        to: u64,
        object: InodeId,
        /// As in `SnapshotOpened`.
        fence: u32,
    }
);
impl Copy for Layer {}
message!(
    /// The layers of a file that end after `from`, in order; of a snapshot, or (0) of the present file.
    LayersOf = 179 by [Mount, Mover, Console] -> LayerList { session: SessionId, snapshot: u32, ino: InodeId, from: u64 }
);
message!(LayerList {
    /// The object with all other bytes of the file.
    object: InodeId,
    layers: Vec<Layer>,
    /// There are more after the last one.
    more: bool,
});
message!(
    /// A writer will copy bytes of `from..to` in older objects into the file's own: it has this right alone,
    /// until another client asks. `Stale`: it may not write.
    TakeLayers = 144 by [Mount, Mover, Console] -> LayersTaken { session: SessionId, ino: InodeId, from: u64, to: u64 }
);
message!(LayersTaken {
    entry: Entry,
    layout: Option<Layout>,
    /// The layers to copy, whole stripes except for the file's end, with this token epoch.
    layers: Vec<Layer>,
    token_epoch: u32,
});
message!(
    /// A layer is copied: all of it is on all live targets. `Stale`: the right is another client's by now, or
    /// the file was truncated.
    LayerCopied = 145 by [Mount, Mover, Console] -> Entry { op: Op, ino: InodeId, from: u64, to: u64, token_epoch: u32 }
);
