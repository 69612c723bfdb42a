//! Messages between a client and a namespace's metadata leader (methods 100–199, calls back to the client
//! 300–399).
//!
//! Every change of the namespace carries an [`Op`]: a retry with the same (session, slot, seq) gets the reply
//! of the first try. Replies mean: durable.
use crate::map::{Layout, Role};
use crate::{InodeId, NamespaceId, SessionId, VolumeId, message, wire_enum};
use bytes::Bytes;

/// Bytes of a file kept in its inode.
pub const INLINE_MAX: usize = 4096;

/// Token epochs that share their upper bits were given without a truncation of the file in between: those of
/// several who write it by turns. Should they use up all of the lower bits, a writer is told to look again
/// for nothing.
pub const TRUNCATION_SHIFT: u32 = 8;

/// Grows with each truncation of a file, and when it gets another object.
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
/// Reply slots of a session: changes that one client may have under way at once.
pub const SLOTS: u32 = 256;

message!(
    /// Makes a change happen once: the slot's sequence number grows by one with each new change.
    Op { session: SessionId, slot: u32, seq: u64 }
);
message!(
    /// On whose behalf. Group ids sorted; the first is the primary one.
    Cred { uid: u32, gid: u32, groups: Vec<u32> }
);
message!(
    /// Nanoseconds since 1970-01-01 UTC.
    Time { nanos: i64 }
);
impl Copy for Time {}
wire_enum!(FileKind { Regular = 1, Directory = 2, Symlink = 3, Fifo = 4, Socket = 5, CharDevice = 6, BlockDevice = 7 });

message!(
    /// Everything that `stat` shows, and what a client needs to reach the data.
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
        /// Bytes that data takes, without redundancy.
        allocated: u64,
        atime: Time,
        mtime: Time,
        ctime: Time,
        btime: Time,
        /// Grows with each change of data; equal means: cached data is still right.
        data_version: u64,
        /// Of a regular file whose data is on targets or will be.
        layout: Option<Layout>,
        /// It has an access control list, or a directory one for what is made in it: the mode is not all.
        acl: bool,
        /// Bytes that are at home only (see `recall.rs`); 0: reading and writing ask nobody about it.
        evicted: u64,
        /// Where its data is, if not in the object with the inode's number (see `snapshot.rs`).
        layers: Option<Layers>,
    }
);
message!(
    /// What is written goes to `object`; so many bytes are still in older ones.
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
        /// Attributes and data, also changed and not written back yet; size and mtime are the holder's.
        /// Exclusive.
        Write = 2,
    }
);
message!(
    /// A lease as granted. Every reply that carries attributes grants what it can without revoking anybody.
    Lease {
        kind: LeaseKind,
        /// Token epoch for fragment versions (Write, or None with write access while the file is shared).
        token_epoch: u32,
        /// A writer died with this file open: the holder must recover its data before anybody reads (see
        /// client).
        recover: bool,
        /// Upper bound of what may be on targets beyond `size`, in bytes: extend only after zeroing up to
        /// there.
        data_end: u64,
        /// The volume whose limit of bytes stands over new data of the file (see `ReserveQuota`); 0: none
        /// does. Told where Write may be granted, elsewhere 0.
        limited: VolumeId,
        /// The cluster map under which what this shows is read, or a newer one: a target that is not in its
        /// group any more may not know it.
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
        /// Which process it is, for a leader on the same machine: it can see that the process is gone. Empty:
        /// not told.
        process: String,
    }
);
message!(SessionOpened {
    session: SessionId,
    lease_ms: u32,
    grace_ms: u32,
    /// What the superuser of this mount's machine may open is not what the kernel there thinks: each open is
    /// asked for.
    opens_asked: bool,
});
message!(HeldLease {
    ino: InodeId,
    kind: LeaseKind,
    token_epoch: u32,
    open_read: u32,
    open_write: u32,
    /// It has the append token.
    append_token: bool,
});
message!(
    /// After a reconnect: takes up the session again and names what the client holds, at most `HELD_MAX` at a
    /// time. `Stale`: it expired, all is lost. Under a new session, before anything else: what is open since
    /// before it.
    SessionResume = 101 by [Mount, Mover, Console, Operator, Auditor, User] -> SessionResumed {
        session: SessionId,
        held: Vec<HeldLease>,
        /// Another message on this connection names the rest; until then nothing is taken up.
        more: bool,
    }
);
message!(SessionResumed { /** Leases that could not be kept: stop using their caches. */ lost: Vec<InodeId>, lease_ms: u32 });
message!(KeepAlive = 102 by [Mount, Mover, Console, Operator, Auditor, User] -> () {
    session: SessionId,
    /// Bytes that targets have taken from this client since it began: whether it gets on with what a revoke
    /// asks of it.
    saved: u64,
});
message!(SessionClose = 103 by [Mount, Mover, Console, Operator, Auditor, User] -> () { session: SessionId });
message!(
    /// Who is registered, and what each holds.
    SessionList = 104 by [Console, Operator, Auditor] -> Sessions {}
);
message!(Sessions { sessions: Vec<SessionShown> });
message!(
    SessionShown {
        session: SessionId,
        /// As it opened the session, or as its record says.
        client: String,
        /// The node that it is connected as, and its role; empty and absent: it is not connected.
        node: String,
        role: Option<Role>,
        addr: String,
        /// How long ago it was heard.
        heard_ms: u64,
        /// It has said what it holds since this leader began.
        resumed: bool,
        /// Files that it has open, and of these for writing.
        open: u32,
        open_to_write: u32,
        /// Files and directories that it may cache, and of these with the right to change them unseen.
        leases: u32,
        write_leases: u32,
        /// Of these, others wait for so many.
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
    /// Continue after this entry with this cookie; stable while entries come and go.
    cookie: u64,
    entry: Option<Entry>,
});
message!(Listing {
    entries: Vec<ListEntry>,
    end: bool,
    dir_lease: Lease,
    /// The highest cookie that the directory has given so far: entries that are made later come behind it.
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
    /// What is below a directory, or in a volume.
    #[derive(Default)]
    Usage {
        bytes: u64,
        files: u64,
        directories: u64,
        /// Bytes that are at home only: none of `bytes`.
        evicted: u64,
    }
);
message!(StatFs = 117 by [Mount, Mover, Console, Operator, Auditor, User] -> FsStat { session: SessionId });
message!(FsStat { files: u64, directories: u64, bytes: u64 });
message!(
    /// Asks for a lease; others' conflicting leases are revoked first. The answer None to Write: the file is
    /// shared now, write directly. A client whose Write was revoked asks again before it writes, also to
    /// write through.
    AcquireLease = 118 by [Mount, Mover, Console] -> Entry { session: SessionId, ino: InodeId, kind: LeaseKind, renew: bool }
);
message!(
    /// Gives leases back (or down to `Read`).
    ReleaseLease = 119 by [Mount, Mover, Console] -> () { session: SessionId, ino: InodeId, keep: LeaseKind }
);
message!(
    /// Opens a regular file. `write`: counts as a writer. `execute`: it is read to be run, which takes the
    /// right to execute it instead of that to read. Grants the strongest lease that conflicts with nobody's
    /// use.
    Open = 120 by [Mount, Mover, Console] -> Opened {
        session: SessionId, cred: Cred, ino: InodeId, read: bool, write: bool, truncate: bool, execute: bool,
    }
);
message!(Opened { entry: Entry, inline: Option<Bytes> });
message!(
    /// Opens ended; sent after everything is committed. A client may tell it late, as long as it holds a
    /// lease on the file: before it answers a revoke. Never sent again on another connection: `SessionResume`
    /// tells what is open.
    Close = 121 by [Mount, Mover, Console] -> () { session: SessionId, files: Vec<Closed> }
);
message!(
    /// So many opens of one file, at most `CLOSED_MAX` files in one message.
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
    /// The only writer gives the file up, and a write of its own that failed has left a stripe of it in
    /// doubt: at some targets one version, at others another. Whoever has the file next recovers it, as if
    /// this writer had died. Changes nothing if another one has written to the file since.
    LeaveInDoubt = 126 by [Mount, Mover, Console] -> () { op: Op, ino: InodeId }
);
message!(
    /// This client has written under that cluster map. Sent before anybody is told what was written; whoever
    /// reads after the answer waits for that map.
    NoteMap = 127 by [Mount, Mover, Console] -> () { session: SessionId, map_version: u64 }
);

message!(
    /// Waits for the append token of a file that several clients write, and takes it: until it is released
    /// nobody else appends to the file or truncates it, and nobody gets a lease on it. Answered with the file
    /// as it is now.
    TakeAppendToken = 124 by [Mount, Mover, Console] -> InlineData { session: SessionId, ino: InodeId }
);
message!(
    /// Releases the append token without a commit.
    ReleaseAppendToken = 125 by [Mount, Mover, Console] -> () { session: SessionId, ino: InodeId }
);

// ---- changing
message!(Create = 130 by [Mount, Mover, Console] -> Created {
    op: Op, cred: Cred, parent: InodeId, name: Bytes, mode: u32,
    /// Bits that are taken from `mode` unless the directory has a default access control list.
    umask: u32,
    /// Fail if the name exists; otherwise open what is there.
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
    /// What to set; absent fields stay. Times: `Some(Time)`; "now" is resolved by the client.
    SetAttr = 138 by [Mount, Mover, Console] -> Entry {
        op: Op, cred: Cred, ino: InodeId,
        mode: Option<u32>, uid: Option<u32>, gid: Option<u32>,
        /// Truncates or extends. The caller holds a Write lease (or the file is shared and written directly).
        size: Option<u64>,
        atime: Option<Time>, mtime: Option<Time>,
    }
);
message!(
    /// What a writer has made durable on targets: the size commit. The commit point of fresh stripes.
    Commit = 139 by [Mount, Mover, Console] -> Entry {
        op: Op,
        ino: InodeId,
        token_epoch: u32,
        /// Never makes the file shorter.
        size: u64,
        mtime: Time,
        /// Bytes allocated in all.
        allocated: u64,
        /// The whole of a file of at most INLINE_MAX bytes, instead of data on targets.
        inline: Option<Bytes>,
        /// Data is on targets now: drops the inline data.
        drop_inline: bool,
        /// Nothing uncommitted is left on targets: a death of the writer after this needs no recovery.
        clean: bool,
        /// Also counts as `Close` of this many writing opens.
        close_writes: u32,
        /// Upper bound of what is on targets, in bytes (never lowered below `size`).
        data_end: u64,
        /// Made under this client's append token, and releases it; refused if the token was lost.
        append_token: bool,
        /// What was written since the last commit that the leader answered, at most `CHANGED_MAX` ranges; may
        /// be more.
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
    /// Makes and opens a regular file without a name, with the permissions that one made in `parent` would
    /// get. The first `Link` of it gives it one, as long as this session has it open; else it goes with its
    /// last close.
    CreateNameless = 142 by [Mount, Mover, Console] -> Entry {
        op: Op, cred: Cred, parent: InodeId, mode: u32, umask: u32,
        /// As in `Create`; bit 1 must be set.
        open: u8,
    }
);
message!(
    /// What was read, and when, at most `ACCESSES_MAX` at a time: access times follow where they are older.
    /// May come late, twice, or not at all; a client tells what it read under a lease before it gives the
    /// lease back.
    NoteAccess = 143 by [Mount, Mover, Console] -> () { session: SessionId, accesses: Vec<AccessTime> }
);
message!(AccessTime { ino: InodeId, at: Time });

// ---- metadata → client, on the client's own connection
message!(
    /// Give a lease back (down to `keep`): flush, commit, drop caches, then answer. The answer is the
    /// release.
    Revoke = 300 by [Meta] -> () { ino: InodeId, keep: LeaseKind }
);
message!(
    /// A writer of the file died, and somebody waits for what it left to be decided: do so, as who opens the
    /// file does, then answer.
    RecoverFile = 303 by [Meta] -> () { ino: InodeId }
);
