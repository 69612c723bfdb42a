//! Changes that a leader may answer before they are durable, and that their mount keeps until they are.
//!
//! After a restart, or under another leader, the mount sends what it kept once more, before anything new: the
//! leader makes again what it lost, as it was made before. Such a change is sent as its own request in a
//! [`ChangeEarly`]; without that it is answered when it is durable.
use crate::local_creates::{MadeWithNames, MkdirWithNames, NamesLeased};
use crate::message;
use crate::meta::{
    Attr, Commit, Entry, Link, Made, Mkdir, RemoveXattr, Removed, Rename, Renamed, Rmdir, SetAttr, SetXattr,
    Symlink, Time, Unlink,
};
use crate::{Error, InodeId, Request, Result, SessionId, Wire};
use bytes::Bytes;

/// Kept changes of one message, and bytes of their requests and answers.
pub const AGAIN_MAX: usize = 256;
pub const AGAIN_BYTES_MAX: usize = 256 * 1024;

message!(
    /// A change whose answer may leave before the change is durable.
    ChangeEarly = 427 by [Mount, Mover, Console] -> ChangedEarly {
        /// The change, and its request. It must be one of [`KEPT`].
        method: u16,
        body: Bytes,
    }
);
message!(ChangedEarly {
    /// The run of the leader: each start has another number.
    term: u64,
    /// The change is durable with this commit.
    seq: u64,
    /// The newest durable commit.
    durable: u64,
    /// The leader's additions to the request.
    given: Given,
    /// The answer of that request.
    reply: Bytes,
});
message!(
    /// The additions of a leader to a change, the same when it is made again.
    Given {
        at: Time,
        /// Serials of new directories, in the order in which they were drawn.
        serials: Vec<u64>,
    }
);
message!(
    /// Changes that an earlier leader answered early, in the order of their commits. Sent before the last
    /// [`crate::meta::SessionResume`]; without changes it asks for the leader's term.
    MakeAgain = 428 by [Mount, Mover, Console] -> MadeAgain { session: SessionId, changes: Vec<KeptChange> }
);
message!(KeptChange { method: u16, body: Bytes, given: Given, reply: Bytes });
message!(MadeAgain {
    term: u64,
    /// All of these changes are durable with this commit.
    seq: u64,
    durable: u64,
    /// Changes that are lost.
    failed: Vec<NotMade>,
});
message!(
    /// A change that could not be made again as it was: its place in the request, and why.
    NotMade { place: u32, why: String }
);
message!(
    /// Waits until this commit of the leader is durable.
    AwaitDurable = 429 by [Mount, Mover, Console] -> Durable { session: SessionId, seq: u64 }
);
message!(Durable { term: u64, durable: u64 });

/// A change that may be answered early.
pub trait Kept: Request {
    /// Whether two answers report the same change. Leases are each leader's own, and times of access are
    /// reported apart.
    fn agree(one: &Self::Reply, other: &Self::Reply) -> bool;
    /// Not if bytes are destroyed after the answer: a crash would bring the old size back, without them.
    fn may_leave_early(&self) -> bool {
        true
    }
    /// The directories whose names it changes, or the inode of which it changes an attribute.
    fn places(&self) -> Vec<InodeId>;
}

macro_rules! kept {
    ($($name:ident of $($place:ident),+: |$one:ident, $other:ident| $agree:expr $(, if |$r:ident| $may:expr)?;)*) => {
        /// The methods of these changes.
        pub const KEPT: &[u16] = &[$($name::METHOD),*];
        $(impl Kept for $name {
            fn agree($one: &Self::Reply, $other: &Self::Reply) -> bool {
                $agree
            }
            fn places(&self) -> Vec<InodeId> {
                vec![$(self.$place),+]
            }
            $(fn may_leave_early(&self) -> bool {
                let $r = self;
                $may
            })?
        })*
        impl KeptChange {
            /// The name of its request, and its places.
            pub fn describe(&self) -> Result<(&'static str, Vec<InodeId>)> {
                match self.method {
                    $($name::METHOD => Ok(($name::NAME, $name::from_bytes(&self.body)?.places())),)*
                    method => Err(Error::invalid(format!("method {method} has no early answer"))),
                }
            }
        }
    };
}

kept! {
    Mkdir of parent: |one, other| made(one, other);
    MkdirWithNames of parent: |one, other| made_with_names(one, other);
    Symlink of parent: |one, other| made(one, other);
    Link of parent, ino: |one, other| made(one, other);
    Unlink of parent: |one, other| removed(one, other);
    Rmdir of parent: |one, other| removed(one, other);
    Rename of parent, new_parent: |one, other| renamed(one, other);
    SetAttr of ino: |one, other| entry(one, other), if |r| r.size.is_none();
    SetXattr of ino: |one, other| entry(one, other);
    RemoveXattr of ino: |one, other| entry(one, other);
    Commit of ino: |one, other| entry(one, other), if |r| !r.append_token && r.close_writes == 0;
}

fn attr(one: &Attr, other: &Attr) -> bool {
    *one == Attr { atime: one.atime, ..other.clone() }
}
fn entry(one: &Entry, other: &Entry) -> bool {
    attr(&one.attr, &other.attr)
}
fn made(one: &Made, other: &Made) -> bool {
    entry(&one.entry, &other.entry) && attr(&one.parent_attr, &other.parent_attr)
}
fn made_with_names(one: &MadeWithNames, other: &MadeWithNames) -> bool {
    let names = |one: &NamesLeased| (one.first, one.numbers, one.layout, one.account, one.limits_bytes);
    entry(&one.names.entry, &other.names.entry)
        && names(&one.names) == names(&other.names)
        && attr(&one.parent_attr, &other.parent_attr)
}
fn removed(one: &Removed, other: &Removed) -> bool {
    one.ino == other.ino && attr(&one.parent_attr, &other.parent_attr)
}
fn renamed(one: &Renamed, other: &Renamed) -> bool {
    (one.moved, one.replaced) == (other.moved, other.replaced)
        && attr(&one.parent_attr, &other.parent_attr)
        && attr(&one.new_parent_attr, &other.new_parent_attr)
}
