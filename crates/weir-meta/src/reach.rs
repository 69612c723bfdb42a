//! The targets of each request: inodes, volumes, snapshots, whether it changes them, and as which user. The
//! rules for mounts are applied to this, in one place and before an operation runs.
//!
//! Here are the requests that are not operations; the rows of those are in `registry`.
use weir_proto::lock::{ListLocks, SetLock, TestLock};
use weir_proto::meta::Cred;
use weir_proto::recall::{AwaitRecall, GetEviction, GetTierState, TakeRecalls, WantRecall};
use weir_proto::snapshot::SnapshotTake;
use weir_proto::{InodeId, Request, VolumeId};

/// An object that belongs to a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place<'a> {
    Inode(InodeId),
    /// An inode whose attributes are requested: a volume's topmost directory is shown to all users that see
    /// its name.
    Shown(InodeId),
    /// A name in a directory, which may lead on to another volume.
    Name(InodeId, &'a [u8]),
    Volume(VolumeId),
    Snapshot(u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reach<'a> {
    pub place: Place<'a>,
    pub changes: bool,
}

/// At most two places: those of a rename.
pub type Reached<'a> = [Option<Reach<'a>>; 2];

pub trait Reaches: Request + Clone {
    fn reach(&self) -> Reached<'_>;
    /// The user that it acts for, if it names one.
    fn cred(&self) -> Option<&Cred> {
        None
    }
    fn cred_mut(&mut self) -> Option<&mut Cred> {
        None
    }
    /// The names that it concerns, in the directories that it reaches.
    fn names(&self) -> [Option<&[u8]>; 2] {
        [None, None]
    }
    /// The names of a request with many, in the first directory that it reaches.
    fn many(&self) -> Vec<&[u8]> {
        Vec::new()
    }
}

pub fn reads_at(place: Place<'_>) -> Reached<'_> {
    [Some(Reach { place, changes: false }), None]
}
pub fn changes_at(place: Place<'_>) -> Reached<'_> {
    [Some(Reach { place, changes: true }), None]
}
pub fn reads<'a>(ino: InodeId) -> Reached<'a> {
    reads_at(Place::Inode(ino))
}
pub fn changes<'a>(ino: InodeId) -> Reached<'a> {
    changes_at(Place::Inode(ino))
}
pub fn changes_both<'a>(one: InodeId, other: InodeId) -> Reached<'a> {
    [one, other].map(|ino| Some(Reach { place: Place::Inode(ino), changes: true }))
}
pub fn reads_snapshot<'a>(snapshot: u32) -> Reached<'a> {
    reads_at(Place::Snapshot(snapshot))
}
pub const NOTHING: Reached<'static> = [None, None];

macro_rules! reaches {
    ($($name:ident $(as $cred:ident)? $(of $($entry:ident),+)? $(of_many $many:ident)? : |$r:ident| $reach:expr;)*) => {
        $(impl Reaches for $name {
            fn reach(&self) -> Reached<'_> {
                let $r = self;
                let _ = $r;
                $reach
            }
            $(fn cred(&self) -> Option<&Cred> {
                Some(&self.$cred)
            }
            fn cred_mut(&mut self) -> Option<&mut Cred> {
                Some(&mut self.$cred)
            })?
            $(fn names(&self) -> [Option<&[u8]>; 2] {
                let mut names = [None; 2];
                names.iter_mut().zip([$(&self.$entry[..]),+]).for_each(|(place, name)| *place = Some(name));
                names
            })?
            $(fn many(&self) -> Vec<&[u8]> {
                self.$many.iter().map(|one| &one.name[..]).collect()
            })?
        })*
        #[cfg(test)]
        pub(crate) const LISTED: &[(u16, bool)] = &[$(($name::METHOD, { const NAMED: &[&str] = &[$(stringify!($cred))?]; !NAMED.is_empty() })),*];
    };
}
pub(crate) use reaches;

reaches! {
    SetLock: |r| if r.kind.is_some() { reads(r.ino) } else { NOTHING };
    TestLock: |r| reads(r.ino);
    ListLocks: |r| reads(r.ino);
    AwaitRecall: |r| reads(r.ino);
    WantRecall: |r| reads(r.ino);
    GetTierState: |r| reads(r.ino);
    GetEviction as cred: |r| r.set.as_ref().map_or(NOTHING, |set| changes_at(Place::Volume(set.volume)));
}

/// Requests that no mount may send.
macro_rules! reach_nothing {
    ($($name:ident)*) => {
        $(impl Reaches for $name {
            fn reach(&self) -> Reached<'_> {
                NOTHING
            }
        })*
        #[cfg(test)]
        pub(crate) const NOT_OF_MOUNTS: &[u16] = &[$($name::METHOD),*];
    };
}
pub(crate) use reach_nothing;

reach_nothing! { TakeRecalls SnapshotTake }
