//! Entries of a volume's changelog, and messages about relations: between the metadata leader, movers and
//! administrators (methods 160–179 and 420–422).
//!
//! A mover is a client: it has a session, asks for work, and reports the results. Work may be done twice; a
//! mover's work is assigned again when its session ends.
use crate::map::Layout;
use crate::meta::{Cred, FileKind, Op, Time};
use crate::{InodeId, SessionId, VolumeId, message, wire_enum, wire_union};
use bytes::Bytes;
use std::fmt;

pub use crate::home_rule::{HomeIds, IdMapping, URL_MAX};

/// Longest name of a relation, in bytes.
pub const RELATION_NAME_MAX: usize = 64;
/// Changes in one reply to `ReadChanges`.
pub const CHANGES_MAX: u32 = 4096;
/// Longest extent in one assignment, in bytes. Not a setting: a mover sends it in smaller parts anyway.
pub const EXTENT_MAX: u64 = 64 << 20;

/// A relation of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RelationId(pub u32);
crate::wire_newtype!(RelationId(u32));
impl fmt::Display for RelationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}
impl fmt::Debug for RelationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

wire_union!(
    /// The change. Names are given as the parent's inode and a name: paths change when a directory above is
    /// renamed.
    What {
        /// A new inode has its first name. A directory is empty.
        Made = 1 { ino: InodeId, kind: FileKind, parent: InodeId, name: Bytes },
        /// Another name of a file.
        Linked = 2 { ino: InodeId, parent: InodeId, name: Bytes },
        Removed = 3 {
            ino: InodeId, kind: FileKind, parent: InodeId, name: Bytes,
            /// It was its last name.
            last: bool,
        },
        Renamed = 4 {
            ino: InodeId, kind: FileKind, parent: InodeId, name: Bytes, new_parent: InodeId, new_name: Bytes,
            /// The inode that had the new name, and whether that was its last one.
            replaced: Option<(InodeId, bool)>,
        },
        /// Two names are exchanged; `ino` is the inode that had the first one.
        Exchanged = 5 {
            ino: InodeId, other: InodeId, parent: InodeId, name: Bytes, other_parent: InodeId, other_name: Bytes,
        },
        /// Mode, owner, times or extended attributes.
        Attributes = 6 { ino: InodeId },
        /// These bytes are new; they are durable.
        Data = 7 { ino: InodeId, offset: u64, len: u64 },
        /// The size was set: shorter, or longer with zeros.
        Resized = 8 { ino: InodeId, size: u64 },
        /// The last writer closed the file.
        Complete = 9 { ino: InodeId, size: u64 },
    }
);

message!(
    /// The author of a change.
    #[derive(Default)]
    By {
        /// The node, by its certificate; without one, its client's name. Empty: the cluster itself.
        node: String,
        /// The user after the rules for mounts. None: the change has no user; bytes, for example, are written
        /// by programs that had the file open at the node.
        uid: Option<u32>,
    }
);
message!(
    /// One change of a volume. Numbers grow by one, from 1.
    Change { number: u64, at: Time, what: What, by: By }
);

// ---- followers
message!(
    /// Changes after the number `after`, in order; waits up to `wait_ms` for the first. With a cursor `after`
    /// is ignored: the reply begins after the cursor's acknowledged position, and changes that all cursors
    /// have passed are deleted.
    ReadChanges = 160 by [Mover, Console, User] -> Changes {
        session: SessionId, cred: Cred, volume: VolumeId, cursor: Option<String>, after: u64, limit: u32, wait_ms: u32,
    }
);
message!(Changes {
    changes: Vec<NamedChange>,
    /// The first number that is still stored.
    first: u64,
});
message!(
    /// A change, and the present path of its inode below the volume's root directory, by one of its names
    /// (none: it is gone); for a removal, its former path.
    NamedChange { change: Change, path: Option<Bytes> }
);
message!(
    /// Acknowledges everything up to `upto`. Makes the cursor if it is new; then `upto` may be 0: from now
    /// on.
    AckChanges = 161 by [Mover, Console, User] -> () { op: Op, cred: Cred, volume: VolumeId, cursor: String, upto: u64 }
);
message!(DropCursor = 162 by [Mover, Console, User] -> () { op: Op, cred: Cred, volume: VolumeId, cursor: String });

// ---- administration
wire_enum!(Direction {
    /// Changes of the volume go to home.
    Push = 1,
    /// The volume shows home's content; it is read only here.
    Mirror = 2,
});
message!(RelationAdd = 163 by [Console, User] -> RelationInfo {
    op: Op, cred: Cred, volume: VolumeId,
    /// The home's URL: `file:///path`, `s3://bucket/prefix`, `weir://…`.
    url: String,
    direction: Direction,
    /// Data that is at home may be evicted here.
    evict: bool,
    /// The volume is empty and home is not: home's content is imported.
    import: bool,
    ids: HomeIds,
});
message!(RelationList = 164 by [Mover, Console, Operator, Auditor, User] -> Relations { session: SessionId, volume: Option<VolumeId> });
message!(Relations { relations: Vec<RelationInfo> });
wire_enum!(RelationVerb { Pause = 1, Resume = 2, Remove = 3, AllowEviction = 4, ForbidEviction = 5 });
message!(RelationDo = 165 by [Console, User] -> () { op: Op, cred: Cred, relation: RelationId, verb: RelationVerb });

message!(
    /// The files that a relation copies, and its limits. By default it copies everything, without a limit.
    #[derive(Default)]
    RelationRules {
        /// Patterns ([`crate::patterns`]): only files that fit one of these; none: all.
        include: Vec<String>,
        /// Files and directories that fit one of these are not copied.
        exclude: Vec<String>,
        /// For all its movers together, in bytes per second; recalls count, and are not delayed.
        bytes_per_s: Option<u64>,
    }
);
/// The limiting factor of a mover that waits because of a bandwidth limit: `LeaseWork::limited_by`.
pub const BANDWIDTH_LIMIT: &str = "its bandwidth limit";
/// The lowest limit of bytes per second: an assignment takes minutes already.
pub const BYTES_PER_S_MIN: u64 = 16 << 10;
message!(
    /// As `RelationAdd`, with rules from the start. Refused for a relation that imports or mirrors its home,
    /// if there are patterns.
    RelationAddWith = 420 by [Console, User] -> RelationInfo { op: Op, cred: Cred, new: RelationAdd, rules: RelationRules }
);
message!(
    /// Changes the given rules. Files at home stay there and are kept up to date under all names.
    RelationSet = 421 by [Console, User] -> RelationRules {
        op: Op, cred: Cred, relation: RelationId, include: Option<Vec<String>>, exclude: Option<Vec<String>>,
        /// 0: no limit.
        bytes_per_s: Option<u64>,
    }
);
message!(
    /// The rules of all relations that have some.
    RelationRulesList = 422 by [Mover, Console, Operator, Auditor, User] -> RulesOfRelations { session: SessionId }
);
message!(RulesOfRelations { relations: Vec<RulesOfRelation> });
message!(RulesOfRelation {
    relation: RelationId,
    rules: RelationRules,
    /// The asking mover's part of the limit, in bytes per second.
    share: Option<u64>,
});

wire_union!(
    RelationState {
        /// Nothing is left to ship.
        Synced = 1 {},
        Copying = 2 {},
        Paused = 3 { why: String },
        /// Entries at home were changed by others: see the list of items.
        Diverged = 4 { items: u64 },
    }
);
message!(RelationInfo {
    id: RelationId,
    volume: VolumeId,
    volume_name: String,
    url: String,
    direction: Direction,
    evict: bool,
    state: RelationState,
    /// Age of the oldest byte or name that home does not have yet, ms; 0: none.
    lag_ms: u64,
    backlog_bytes: u64,
    backlog_names: u64,
    /// Directories whose content is still to be read (of a volume that is older than the relation).
    unseen_directories: u64,
    /// Shipped in the last seconds, bytes per second.
    rate: u64,
    shipped_bytes: u64,
    shipped_names: u64,
    movers: u32,
    /// In words: the limiting factor of the copy.
    limited_by: String,
    /// Why home could not be used at the last try; empty: it could, or there was no try.
    home_failure: String,
    /// Conflicts, the first hundred.
    conflicts: Vec<Conflict>,
    /// Of a mirror: age of the oldest scan of a directory at home, ms.
    scan_age_ms: u64,
});
message!(
    /// An inode that is not shipped until the conflict is resolved.
    Conflict { ino: InodeId, path: Bytes, diverged: bool, why: String, at: Time }
);
message!(
    /// Resolves a conflict.
    RelationResolve = 166 by [Console, User] -> () { op: Op, cred: Cred, relation: RelationId, ino: InodeId, how: Resolution }
);
wire_enum!(Resolution {
    /// The volume's version counts: overwrite the one at home.
    KeepVolume = 1,
    /// Try again, after the cause was removed.
    Retry = 2,
});

// ---- movers
message!(
    /// Work for a mover: waits up to `wait_ms` until there is some.
    /// `Stale`: it has work of a former leader.
    LeaseWork = 167 by [Mover, Console] -> WorkLeased {
        session: SessionId,
        /// From the last reply; 0: it has no work of any leader.
        leader: u64,
        /// The most bytes of extents that it takes.
        bytes: u64,
        items: u32,
        wait_ms: u32,
        /// The mover's limiting factor, in words; empty: only the lack of work.
        limited_by: String,
    }
);
message!(WorkLeased {
    /// The number of this leader during its lead.
    leader: u64,
    relations: Vec<RelationWork>,
    /// As in `Lease`.
    map_version: u64,
});
message!(RelationWork {
    relation: RelationId,
    url: String,
    ids: HomeIds,
    /// The user who configured this home: the mover uses it only if that user may have a home there.
    by: u32,
    /// For a mirror nothing is changed at home, not even a mark is written.
    direction: Direction,
    /// Nothing was ever shipped there.
    is_new: bool,
    names: Vec<NameWork>, extents: Vec<ExtentWork>,
    /// Files whose writer died: opening one for writing recovers it, then they are complete.
    orphans: Vec<InodeId>,
    /// Directories to be read completely, for `ReportListing`.
    listings: Vec<ListWork>,
});
message!(ListWork {
    dir: InodeId,
    path: Bytes,
    /// Its names are known, and may have changed: for `ReportRelisting`.
    again: bool,
});
message!(
    /// Some of the entries of a directory at home; `end`: the last ones. The same entry may be reported
    /// twice.
    ReportListing = 194 by [Mover, Console] -> () { op: Op, relation: RelationId, dir: InodeId, entries: Vec<HomeEntry>, end: bool }
);
message!(
    /// The present entries of a directory at home with names after `after` up to `upto` (none: to the end),
    /// in the order of their bytes: entries here that are not listed are gone there. Of a mirror. The same
    /// entry may be reported twice.
    ReportRelisting = 147 by [Mover, Console] -> () {
        op: Op, relation: RelationId, dir: InodeId, after: Bytes, entries: Vec<HomeEntry>, upto: Option<Bytes>,
    }
);
message!(
    /// An entry that is at home and not here yet.
    HomeEntry {
        name: Bytes,
        kind: FileKind,
        fingerprint: FingerprintBytes,
        /// Of the file: all its names have one value here; empty: it has only one name.
        id: Bytes,
        attrs: HomeAttrs,
        size: u64,
        /// Target of a symbolic link.
        target: Bytes,
        rdev: u32,
    }
);
/// Entries of one `ReportListing`.
pub const HOME_ENTRIES_MAX: usize = 256;

/// Home's identification of the last state that we wrote, as the back end encodes it; empty: unknown.
pub type FingerprintBytes = Bytes;

message!(
    /// The state that a mover must find at home before it changes anything there.
    Expected {
        fingerprint: FingerprintBytes,
        /// A mover may have written there since the fingerprint was taken: only its identity counts, not its
        /// size and times.
        writing: bool,
    }
);
message!(
    /// Attributes for home.
    HomeAttrs {
        mode: u32, uid: u32, gid: u32, atime: Time, mtime: Time, xattrs: Vec<(Bytes, Bytes)>,
    }
);
message!(NameWork { number: u64, ino: InodeId, action: NameAction });
wire_union!(
    /// Paths are relative to home's root, in home's state when the action is due. Each may be done twice.
    NameAction {
        Make = 1 {
            path: Bytes, kind: FileKind,
            /// Target of a symbolic link.
            target: Bytes,
            rdev: u32, attrs: HomeAttrs,
        },
        Link = 2 { from: Bytes, path: Bytes, expect: Expected },
        Remove = 3 { path: Bytes, kind: FileKind, expect: Expected },
        Rename = 4 { from: Bytes, to: Bytes, kind: FileKind, expect: Expected, replaced: Option<Expected> },
        Exchange = 5 { one: Bytes, other: Bytes, expect: Expected, other_expect: Expected },
        Attributes = 6 { path: Bytes, kind: FileKind, attrs: HomeAttrs, expect: Expected },
        Resize = 7 { path: Bytes, size: u64, expect: Expected },
    }
);
message!(
    /// A range of a file to write at home. Those of one file must be written in the given order.
    ExtentWork {
        ino: InodeId,
        path: Bytes,
        offset: u64,
        /// 0 with `finish` alone: all bytes are at home already.
        len: u64,
        layout: Option<Layout>,
        /// The object with the file's own bytes at the time of the assignment.
        object: InodeId,
        /// Some of its bytes were in older objects then: query its layers.
        layered: bool,
        /// The bytes, of a file that is kept in its inode.
        inline: Option<Bytes>,
        expect: Expected,
        /// The file is then complete: set its size and attributes.
        finish: Option<Finish>,
    }
);
message!(Finish { size: u64, attrs: HomeAttrs });

message!(
    /// Results of work. Receipts: home has the bytes durably.
    CompleteWork = 168 by [Mover, Console] -> () {
        session: SessionId, relation: RelationId, names: Vec<NameDone>, extents: Vec<ExtentDone>,
        /// Handled, successfully or not: the leader checks which ones are recovered.
        orphans: Vec<InodeId>,
        listings: Vec<ListDone>,
    }
);
message!(
    /// A directory was read completely (`Done`), or why not.
    ListDone { dir: InodeId, outcome: Outcome }
);
message!(NameDone { number: u64, outcome: Outcome });
message!(ExtentDone { ino: InodeId, offset: u64, len: u64, finished: bool, sums: Vec<u32>, outcome: Outcome });
wire_union!(
    Outcome {
        Done = 1 { fingerprint: FingerprintBytes },
        /// Home is unreachable, or not ready: retry later.
        Later = 2 { why: String },
        /// Home was changed by others: nothing was changed there.
        Diverged = 3 { why: String },
        /// It cannot be done: the file is in conflict.
        Refused = 4 { why: String },
        /// The source has changed meanwhile: the leader has newer state.
        Moved = 5 {},
        /// The mover may not use this home at all: retry later, and programs that wait for home get an error.
        Denied = 6 { why: String },
    }
);
message!(
    /// The place of a file's bytes at home, for a recall; or, with a relation, of any entry of its volume,
    /// for a comparison (`Invalid`: it is in another volume).
    WhereAtHome = 169 by [Mover, Console] -> HomePlace { session: SessionId, ino: InodeId, relation: Option<RelationId> }
);
message!(HomePlace {
    relation: RelationId,
    url: String,
    direction: Direction,
    ids: HomeIds,
    /// The user who configured this home.
    by: u32,
    path: Bytes,
    expect: Expected,
    /// A change of names or attributes may be in flight there: the state found may be its result.
    changing: bool,
    receipts: Vec<Receipt>,
    /// With a relation: changes are in flight, so home may differ from the volume.
    unsettled: bool,
    /// It is in conflict: nothing is shipped until the conflict is resolved.
    conflict: bool,
});
message!(
    /// Home was changed by others: the file is in conflict, so it is neither evicted nor overwritten at home
    /// until the conflict is resolved (`RelationResolve`). Allowed to the volume's owner and administrators.
    RelationSuspect = 195 by [Console] -> () { op: Op, cred: Cred, relation: RelationId, ino: InodeId, why: String }
);
message!(
    /// Proof that these bytes are durable at home. One checksum (CRC32C) for each `RECEIPT_BLOCK`, counted
    /// from `offset` on, the last one for the remainder.
    Receipt { offset: u64, len: u64, sums: Vec<u32> }
);
/// Bytes that one checksum of a receipt covers.
pub const RECEIPT_BLOCK: u64 = 4 << 20;
