//! Messages between a client and a namespace's metadata leader (methods 100–199, calls back to the client
//! 300–399).
//!
//! Every change of the namespace carries an [`Op`]: a retry with the same (session, slot, seq) gets the reply
//! of the first try. A reply means: durable.
use crate::map::{Layout, Role};
use crate::{InodeId, NamespaceId, SessionId, VolumeId, message, wire_enum};
use bytes::Bytes;

/// Bytes of a file kept in its inode.
pub const INLINE_MAX: usize = 4096;

/// Token epochs with the same upper bits had no truncation of the file in between: they went to writers that
/// took turns. If those use up all of the lower bits, a writer refreshes its state once without need.
pub const TRUNCATION_SHIFT: u32 = 8;

/// Grows with each truncation of a file, and when it gets a new object.
pub fn truncations(token_epoch: u32) -> u32 {
    token_epoch >> TRUNCATION_SHIFT
}
/// Longest name of a directory entry, in bytes.
pub const NAME_MAX: usize = 255;
/// Longest target of a symbolic link, in bytes (with its end: PATH_MAX).
pub const SYMLINK_MAX: usize = 4095;
/// Longest value of an extended attribute, in bytes.
pub const XATTR_VALUE_MAX: usize = 65536;
/// Largest file, in bytes: 8 EiB − 1.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// Leases and opens that one `SessionResume` names: with more, it would not fit into a message.
pub const HELD_MAX: usize = 32 * 1024;
/// Files that one `Close` names.
pub const CLOSED_MAX: usize = 1024;
/// Inodes that one `NoteAccess` names.
pub const ACCESSES_MAX: usize = 1024;
/// Ranges that one `Commit` names.
pub const CHANGED_MAX: usize = 64;
/// Reply slots of a session: changes that one client may have in flight.
pub const SLOTS: u32 = 256;

message!(
    /// Makes a change happen exactly once: the slot's sequence number grows by one with each new change.
    Op { session: SessionId, slot: u32, seq: u64 }
);
message!(
    /// The user of a request. Group ids sorted; the first is the primary one.
    Cred { uid: u32, gid: u32, groups: Vec<u32> }
);
impl Cred {
    pub fn is_member(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}
message!(
    /// Nanoseconds since 1970-01-01 UTC.
    Time { nanos: i64 }
);
impl Copy for Time {}
wire_enum!(FileKind { Regular = 1, Directory = 2, Symlink = 3, Fifo = 4, Socket = 5, CharDevice = 6, BlockDevice = 7 });

message!(
    /// All attributes of `stat`, and the information that a client needs to access the data.
    Attr {
        ino: InodeId,
        kind: FileKind,
        /// Permission bits with set-uid, set-gid and sticky (07777).
        mode: u32,
        uid: u32,
        gid: u32,
        nlink: u32,
        rdev: u32,
        size: u64,
        /// Bytes allocated to data, without redundancy.
        allocated: u64,
        atime: Time,
        mtime: Time,
        ctime: Time,
        btime: Time,
        /// Grows with each change of data; while it is equal, cached data is valid.
        data_version: u64,
        /// For a regular file whose data is on targets or will be.
        layout: Option<Layout>,
        /// It has an access control list, or a directory a default one: the mode alone does not decide.
        acl: bool,
        /// Bytes that are at home only (see `recall.rs`); 0: reads and writes need no recall.
        evicted: u64,
        /// The place of its data, if not the object with the inode's number (see `snapshot.rs`).
        layers: Option<Layers>,
    }
);
message!(
    /// New data is written to `object`; this number of bytes is still in older ones.
    Layers { object: InodeId, bytes: u64 }
);
impl Copy for Layers {}

wire_enum!(
    /// A client's right to cache an inode.
    LeaseKind {
        /// Nothing may be cached: every read and write is direct.
        None = 0,
        /// Attributes, data and, of a directory, its names (also that a name is absent). Shared.
        Read = 1,
        /// Attributes and data, also dirty data; the holder decides size and mtime. Exclusive.
        Write = 2,
    }
);
message!(
    /// A lease as granted. Every reply that carries attributes grants the most possible without a revocation.
    Lease {
        kind: LeaseKind,
        /// Token epoch for fragment versions (Write, or None with write access while the file is shared).
        token_epoch: u32,
        /// A writer died with this file open: the holder must recover its data before any read (see client).
        recover: bool,
        /// Upper bound of the data on targets beyond `size`, in bytes: zero that range before the file is
        /// extended.
        data_end: u64,
        /// The volume whose limit of bytes applies to new data of the file (see `ReserveQuota`); 0: none.
        /// Present where Write may be granted, elsewhere 0.
        limited: VolumeId,
        /// The cluster map (or a newer one) under which this data must be read: a target that has left its
        /// group may not have it.
        map_version: u64,
    }
);
message!(Entry { attr: Attr, lease: Lease });

// ---- sessions
message!(
    SessionOpen = 100 by [Mount, Mover, Console, Operator, Auditor, User] -> SessionOpened {
        namespace: NamespaceId,
        /// Shown to administrators: host name and mount point.
        client: String,
        /// Identifies the process, for a leader on the same machine, which can detect that the process is
        /// gone. Empty: unknown.
        process: String,
    }
);
message!(SessionOpened {
    session: SessionId,
    lease_ms: u32,
    grace_ms: u32,
    /// The leader's permissions for root of this mount's machine differ from that kernel's view: each open
    /// needs a request.
    opens_asked: bool,
});
message!(HeldLease {
    ino: InodeId,
    kind: LeaseKind,
    token_epoch: u32,
    open_read: u32,
    open_write: u32,
    /// The session has the append token.
    append_token: bool,
});
message!(
    /// After a reconnect: resumes the session and lists the leases and opens of the client, at most
    /// `HELD_MAX` at a time. `Stale`: it expired, all is lost. Under a new session, first of all: the files
    /// that were opened earlier and are still open.
    SessionResume = 101 by [Mount, Mover, Console, Operator, Auditor, User] -> SessionResumed {
        session: SessionId,
        held: Vec<HeldLease>,
        /// Another message on this connection has further ones; until then nothing takes effect.
        more: bool,
    }
);
message!(SessionResumed { /** Leases that could not be kept: stop using their caches. */ lost: Vec<InodeId>, lease_ms: u32 });
message!(KeepAlive = 102 by [Mount, Mover, Console, Operator, Auditor, User] -> () {
    session: SessionId,
    /// Bytes that targets have accepted from this client since it began: shows whether it makes progress with
    /// the flush for a revoke.
    saved: u64,
});
message!(SessionClose = 103 by [Mount, Mover, Console, Operator, Auditor, User] -> () { session: SessionId });
message!(
    /// The sessions, and the leases and locks of each.
    SessionList = 104 by [Console, Operator, Auditor] -> Sessions {}
);
message!(Sessions { sessions: Vec<SessionShown> });
message!(
    SessionShown {
        session: SessionId,
        /// The client name from the session's opening, or from its record.
        client: String,
        /// The certificate name and role of its connection; empty and absent: it is not connected.
        node: String,
        role: Option<Role>,
        addr: String,
        /// Time since its last message.
        last_contact_ms: u64,
        /// It has listed its leases and opens since this leader began.
        resumed: bool,
        /// Files that it has open, and of these for writing.
        open: u32,
        open_to_write: u32,
        /// Files and directories that it may cache, and of these with the Write lease.
        leases: u32,
        write_leases: u32,
        /// Number of these that other clients wait for.
        awaited: u32,
        /// Ranges that it has locked, and locks that it waits for.
        locks: u32,
        lock_waits: u32,
    }
);

// ---- reading
message!(Lookup = 110 by [Mount, Mover, Console] -> LookedUp { session: SessionId, cred: Cred, parent: InodeId, name: Bytes });
message!(LookedUp {
    /// Absent: the name does not exist.
    entry: Option<Entry>,
    /// The lease on the parent's names.
    parent_lease: Lease,
});
message!(GetAttr = 111 by [Mount, Mover, Console] -> Entry { session: SessionId, ino: InodeId });
message!(ReadLink = 112 by [Mount, Mover, Console] -> LinkTarget { session: SessionId, ino: InodeId });
message!(LinkTarget { target: Bytes });
message!(
    /// Entries after `after` (a cookie from an earlier entry, 0 from the start) in a stable order.
    ReadDir = 113 by [Mount, Mover, Console] -> Listing {
        session: SessionId, cred: Cred, dir: InodeId, after: u64, limit: u32, with_attrs: bool,
    }
);
message!(ListEntry {
    name: Bytes,
    ino: InodeId,
    kind: FileKind,
    /// Continue after this entry with this cookie; stable while entries are added and removed.
    cookie: u64,
    entry: Option<Entry>,
});
message!(Listing {
    entries: Vec<ListEntry>,
    end: bool,
    dir_lease: Lease,
    /// The highest cookie that the directory has assigned so far: later entries come after it.
    newest: u64,
});
message!(GetXattr = 114 by [Mount, Mover, Console] -> XattrValue { session: SessionId, cred: Cred, ino: InodeId, name: Bytes });
message!(XattrValue { value: Bytes });
message!(ListXattr = 115 by [Mount, Mover, Console] -> XattrNames { session: SessionId, cred: Cred, ino: InodeId });
message!(XattrNames { names: Vec<Bytes> });
message!(
    /// Exact recursive usage of a directory, itself not counted.
    GetUsage = 116 by [Mount, Mover, Console] -> Usage { session: SessionId, dir: InodeId }
);
message!(
    /// Usage below a directory, or of a volume.
    #[derive(Default)]
    Usage {
        bytes: u64,
        files: u64,
        directories: u64,
        /// Bytes that are at home only: not in `bytes`.
        evicted: u64,
    }
);
message!(StatFs = 117 by [Mount, Mover, Console, Operator, Auditor, User] -> FsStat { session: SessionId });
message!(FsStat { files: u64, directories: u64, bytes: u64 });
message!(
    /// Requests a lease; conflicting leases of others are revoked first. Reply None to a request for Write:
    /// the file is now shared, write directly. A client whose Write was revoked asks again before it writes,
    /// also before direct writes.
    AcquireLease = 118 by [Mount, Mover, Console] -> Entry { session: SessionId, ino: InodeId, kind: LeaseKind, renew: bool }
);
message!(
    /// Returns leases (or lowers them to `Read`).
    ReleaseLease = 119 by [Mount, Mover, Console] -> () { session: SessionId, ino: InodeId, keep: LeaseKind }
);
message!(
    /// Opens a regular file. `write`: counts as a writer. `execute`: it is read to be run, which needs the
    /// permission to execute it instead of that to read. Grants the strongest lease that conflicts with no
    /// other session.
    Open = 120 by [Mount, Mover, Console] -> Opened {
        session: SessionId, cred: Cred, ino: InodeId, read: bool, write: bool, truncate: bool, execute: bool,
    }
);
message!(Opened { entry: Entry, inline: Option<Bytes> });
message!(
    /// Opens ended; sent after everything is committed. A client that holds a lease on the file may send it
    /// late: before it answers a revoke. Never repeated on another connection: `SessionResume` lists the open
    /// files.
    Close = 121 by [Mount, Mover, Console] -> () { session: SessionId, files: Vec<Closed> }
);
message!(
    /// This number of opens of one file ended; at most `CLOSED_MAX` files in one message.
    Closed { ino: InodeId, reads: u32, writes: u32 }
);
message!(ReadInline = 122 by [Mount, Mover, Console] -> InlineData { session: SessionId, ino: InodeId });
message!(
    /// `data` may be shorter than the file's size: the rest is zeros, as long as the inode keeps inline data.
    InlineData { entry: Entry, data: Option<Bytes> }
);
message!(
    /// The client has recovered a file whose writer died; clears the mark.
    Recovered = 123 by [Mount, Mover, Console] -> Entry { op: Op, ino: InodeId, token_epoch: u32 }
);
message!(
    /// The only writer closes the file after a failed write of its own left a stripe in doubt: targets differ
    /// in its version. The next client that opens the file recovers it, as if this writer had died. No effect
    /// if another client has written to the file since.
    LeaveInDoubt = 126 by [Mount, Mover, Console] -> () { op: Op, ino: InodeId }
);
message!(
    /// This client has written under that cluster map. Sent before the writes are acknowledged to programs; a
    /// client that reads afterwards waits for that map.
    NoteMap = 127 by [Mount, Mover, Console] -> () { session: SessionId, map_version: u64 }
);

message!(
    /// Waits for the append token of a file that several clients write, and takes it: until it is released no
    /// other client appends to the file or truncates it, and none gets a lease on it. The reply has the
    /// file's present state.
    TakeAppendToken = 124 by [Mount, Mover, Console] -> InlineData { session: SessionId, ino: InodeId }
);
message!(
    /// Releases the append token without a commit.
    ReleaseAppendToken = 125 by [Mount, Mover, Console] -> () { session: SessionId, ino: InodeId }
);

// ---- changing
message!(Create = 130 by [Mount, Mover, Console] -> Created {
    op: Op, cred: Cred, parent: InodeId, name: Bytes, mode: u32,
    /// Bits that are cleared in `mode` unless the directory has a default access control list.
    umask: u32,
    /// Fail if the name exists; otherwise open the existing file.
    exclusive: bool,
    /// Counts as an open; 0 none, bit 0 read, bit 1 write.
    open: u8,
});
message!(Created { entry: Entry, parent_attr: Attr, parent_lease: Lease, created: bool, inline: Option<Bytes> });
message!(Mkdir = 131 by [Mount, Mover, Console] -> Made { op: Op, cred: Cred, parent: InodeId, name: Bytes, mode: u32, umask: u32 });
message!(Made { entry: Entry, parent_attr: Attr, parent_lease: Lease });
message!(Symlink = 132 by [Mount, Mover, Console] -> Made { op: Op, cred: Cred, parent: InodeId, name: Bytes, target: Bytes });
message!(Mknod = 133 by [Mount, Mover, Console] -> Made {
    op: Op, cred: Cred, parent: InodeId, name: Bytes, mode: u32, umask: u32, kind: FileKind, rdev: u32,
});
message!(Link = 134 by [Mount, Mover, Console] -> Made { op: Op, cred: Cred, ino: InodeId, parent: InodeId, name: Bytes });
message!(Unlink = 135 by [Mount, Mover, Console] -> Removed { op: Op, cred: Cred, parent: InodeId, name: Bytes });
message!(Rmdir = 136 by [Mount, Mover, Console] -> Removed { op: Op, cred: Cred, parent: InodeId, name: Bytes });
message!(Removed { ino: InodeId, parent_attr: Attr, parent_lease: Lease });
wire_enum!(RenameMode { Replace = 1, NoReplace = 2, Exchange = 3 });
message!(Rename = 137 by [Mount, Mover, Console] -> Renamed {
    op: Op, cred: Cred, parent: InodeId, name: Bytes, new_parent: InodeId, new_name: Bytes, mode: RenameMode,
});
message!(Renamed { moved: InodeId, replaced: Option<InodeId>, parent_attr: Attr, new_parent_attr: Attr });

message!(
    /// The attributes to set; absent fields keep their value. Times: `Some(Time)`; "now" is resolved by the
    /// client.
    SetAttr = 138 by [Mount, Mover, Console] -> Entry {
        op: Op, cred: Cred, ino: InodeId,
        mode: Option<u32>, uid: Option<u32>, gid: Option<u32>,
        /// Truncates or extends. The caller holds a Write lease (or the file is shared and written directly).
        size: Option<u64>,
        atime: Option<Time>, mtime: Option<Time>,
    }
);
message!(
    /// The size commit, for data that a writer has made durable on targets. The commit point of fresh
    /// stripes.
    Commit = 139 by [Mount, Mover, Console] -> Entry {
        op: Op,
        ino: InodeId,
        token_epoch: u32,
        /// Never makes the file shorter.
        size: u64,
        mtime: Time,
        /// Total bytes allocated.
        allocated: u64,
        /// The whole of a file of at most INLINE_MAX bytes, instead of data on targets.
        inline: Option<Bytes>,
        /// Data is on targets now: drops the inline data.
        drop_inline: bool,
        /// No uncommitted data is on targets: a later death of the writer needs no recovery.
        clean: bool,
        /// Also counts as `Close` of this many writing opens.
        close_writes: u32,
        /// Upper bound of the data on targets, in bytes (never lowered below `size`).
        data_end: u64,
        /// Made under this client's append token, and releases it; refused if the token was lost.
        append_token: bool,
        /// Ranges written since the last commit that the leader answered, at most `CHANGED_MAX`; may be too
        /// large.
        changed: Vec<Range>,
    }
);
message!(
    /// `len` bytes from `offset` on.
    Range { offset: u64, len: u64 }
);
impl Copy for Range {}
message!(SetXattr = 140 by [Mount, Mover, Console] -> Entry {
    op: Op, cred: Cred, ino: InodeId, name: Bytes, value: Bytes,
    /// Fail if it exists / if it does not.
    create: bool, replace: bool,
});
message!(RemoveXattr = 141 by [Mount, Mover, Console] -> Entry { op: Op, cred: Cred, ino: InodeId, name: Bytes });
message!(
    /// Makes and opens a regular file without a name, with the permissions of a new file in `parent`. The
    /// first `Link` gives it a name, while this session has it open; otherwise it is removed with its last
    /// close.
    CreateNameless = 142 by [Mount, Mover, Console] -> Entry {
        op: Op, cred: Cred, parent: InodeId, mode: u32, umask: u32,
        /// As in `Create`; bit 1 must be set.
        open: u8,
    }
);
message!(
    /// Inodes that were read, and when, at most `ACCESSES_MAX` at a time: older access times are updated. May
    /// come late, twice, or not at all; a client reports reads under a lease before it returns the lease.
    NoteAccess = 143 by [Mount, Mover, Console] -> () { session: SessionId, accesses: Vec<AccessTime> }
);
message!(AccessTime { ino: InodeId, at: Time });

// ---- metadata → client, on the client's own connection
message!(
    /// Return a lease (down to `keep`): flush, commit, drop caches, then answer. The answer is the release.
    Revoke = 300 by [Meta] -> () { ino: InodeId, keep: LeaseKind }
);
message!(
    /// A writer of the file died, and another client waits for its data to be settled: recover it as in an
    /// open, then answer.
    RecoverFile = 303 by [Meta] -> () { ino: InodeId }
);
