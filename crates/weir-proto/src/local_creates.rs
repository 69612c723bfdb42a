//! Files that a client creates and removes by itself in a directory whose names it has to itself, and how the
//! leader learns of that: of many at once.
//!
//! A client with a Write lease on a directory is the only one that reads or changes the names in it. It
//! answers creates at once, with inode numbers that were reserved for it, and removals of files that it has a
//! Write lease on; it sends them in batches. A batch is one change: it is carried out as a whole, or not at
//! all.
use crate::map::Layout;
use crate::message;
use crate::meta::{Attr, Cred, Entry, Lease, Op, Time};
use crate::quota::Account;
use crate::{InodeId, SessionId};
use bytes::Bytes;

/// Numbers that a client gets at first, and at most.
pub const NUMBERS_MIN: u32 = 256;
pub const NUMBERS_MAX: u32 = 4096;
/// Files of one batch, and bytes of their names and contents: a fourth of the longest message.
pub const BATCH_FILES_MAX: usize = 256;
pub const BATCH_BYTES_MAX: usize = 256 * 1024;
/// Files of one request for the right to remove them.
pub const LEASED_FILES_MAX: usize = 1024;
/// Times of creation are the client's: a leader whose clock is further away from it gives it no names.
pub const CLOCKS_APART_MS_MAX: u64 = 10_000;

message!(
    /// Asks for a Write lease on a directory and for inode numbers. It revokes no other client's lease.
    LeaseNames = 106 by [Mount, Mover, Console] -> NamesLeased {
        session: SessionId,
        dir: InodeId,
        /// How many numbers are wanted; the leader may give fewer.
        numbers: u32,
        /// The client's clock.
        now: Time,
        /// Owner and group of the files, for their limits; the group of a set-group-ID directory comes first.
        uid: u32,
        gid: u32,
    }
);
message!(NamesLeased {
    /// The directory with the lease that the client has now.
    entry: Entry,
    /// The reserved numbers: the first one and their count; 0: the names were not given.
    first: InodeId,
    numbers: u32,
    /// Of files with these numbers; the seed is [`Layout::seed_of`] each.
    layout: Option<Layout>,
    /// Limits apply to files with these numbers, which are of this account and keep its owner and group until
    /// they are reported. [`Account::NONE`]: no limit applies.
    account: Account,
    /// Limits of bytes are among them: space for data is reserved first.
    limits_bytes: bool,
});
message!(
    /// Makes a directory, with a Write lease on it and inode numbers: its maker will create files there.
    MkdirWithNames = 425 by [Mount, Mover, Console] -> MadeWithNames {
        op: Op,
        cred: Cred,
        parent: InodeId,
        name: Bytes,
        mode: u32,
        umask: u32,
        /// How many numbers are wanted; the leader may give fewer.
        numbers: u32,
        /// The client's clock.
        now: Time,
    }
);
message!(MadeWithNames {
    /// The new directory. Without numbers its lease is as after a `Mkdir`.
    names: NamesLeased,
    parent_attr: Attr,
    parent_lease: Lease,
});
message!(
    /// Files that were created under a Write lease on a directory, in the order of their numbers.
    CreateMany = 107 by [Mount, Mover, Console] -> CreatedMany { op: Op, cred: Cred, dir: InodeId, creates: Vec<LocalCreate> }
);
message!(CreatedMany { parent_attr: Attr });
message!(
    /// Files that were removed under a Write lease on their directory, and on each of them.
    RemoveMany = 108 by [Mount, Mover, Console] -> RemovedMany { op: Op, cred: Cred, dir: InodeId, removals: Vec<Removal> }
);
message!(RemovedMany { parent_attr: Attr });
message!(
    /// Asks for the right to remove files of a directory whose names the client has: a lease on each, which
    /// ends before another client uses the file. The answer leaves out files with several names, and files
    /// that other clients use. Their leases are revoked, unless they have the file open.
    LeaseFiles = 426 by [Mount, Mover, Console] -> FilesLeased {
        session: SessionId,
        dir: InodeId,
        /// The first name, in the order of names.
        from: Bytes,
        /// How many names are wanted, at most [`LEASED_FILES_MAX`].
        count: u32,
    }
);
message!(FilesLeased { files: Vec<LeasedFile> });
message!(LeasedFile { name: Bytes, entry: Entry });
message!(Removal { name: Bytes, ino: InodeId, at: Time });
message!(LocalCreate {
    ino: InodeId,
    name: Bytes,
    /// Without the bits of the umask.
    mode: u32,
    /// When it was created.
    at: Time,
    /// How often the client has it open now.
    open_read: u32,
    open_write: u32,
    /// All that was written to it so far, if anything was: the file is as long as this.
    content: Option<Bytes>,
    mtime: Time,
    /// No other data of the file is in flight.
    clean: bool,
    /// Attributes that were changed since it was created are as they are now.
    uid: u32,
    gid: u32,
    atime: Time,
    ctime: Time,
});
