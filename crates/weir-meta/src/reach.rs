//! The targets of each request: inodes, volumes, snapshots, whether it changes them, and as which user. The
//! rules for mounts are applied to this, in one place and before an operation runs.
//!
//! Invariant: each request that a mount may send is here, or is one of its session (`SESSION_ONLY`); and each
//! that names a user declares it.
use weir_proto::backup::{BackupDone, BackupList, BackupSet, BackupTake};
use weir_proto::births::{CreateMany, LeaseNames, RemoveMany};
use weir_proto::lock::{ListLocks, SetLock, TestLock};
use weir_proto::meta::*;
use weir_proto::recall::{
    AwaitRecall, Evict, EvictedRanges, Filled, GetEviction, GetTierState, SetPinned, TakeRecalls, WantRecall,
};
use weir_proto::relation::{
    AckChanges, DropCursor, RelationAdd, RelationDo, RelationResolve, RelationSuspect, ReportListing,
    ReportRelisting, WhereAtHome,
};
use weir_proto::snapshot::*;
use weir_proto::volume::*;
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

fn looks_at(place: Place<'_>) -> Reached<'_> {
    [Some(Reach { place, changes: false }), None]
}
fn changes_at(place: Place<'_>) -> Reached<'_> {
    [Some(Reach { place, changes: true }), None]
}
fn looks<'a>(ino: InodeId) -> Reached<'a> {
    looks_at(Place::Inode(ino))
}
fn changes<'a>(ino: InodeId) -> Reached<'a> {
    changes_at(Place::Inode(ino))
}
fn changes_both<'a>(one: InodeId, other: InodeId) -> Reached<'a> {
    [one, other].map(|ino| Some(Reach { place: Place::Inode(ino), changes: true }))
}
fn looks_into<'a>(snapshot: u32) -> Reached<'a> {
    looks_at(Place::Snapshot(snapshot))
}
const NOTHING: Reached<'static> = [None, None];

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
        const LISTED: &[(u16, bool)] = &[$(($name::METHOD, { const NAMED: &[&str] = &[$(stringify!($cred))?]; !NAMED.is_empty() })),*];
    };
}

reaches! {
    Lookup as cred: |r| looks_at(Place::Name(r.parent, &r.name));
    GetAttr: |r| looks_at(Place::Shown(r.ino));
    ReadLink: |r| looks(r.ino);
    ReadDir as cred: |r| looks(r.dir);
    GetXattr as cred: |r| looks(r.ino);
    ListXattr as cred: |r| looks(r.ino);
    GetUsage: |r| looks(r.dir);
    StatFs: |r| NOTHING;
    // Recovery after a dead writer is not a change of the file: `acquire` refuses other changes.
    AcquireLease: |r| looks(r.ino);
    Recovered: |r| looks(r.ino);
    LeaveInDoubt: |r| looks(r.ino);
    Open as cred: |r| if r.write || r.truncate { changes(r.ino) } else { looks(r.ino) };
    // Ends must be possible even after the rules have changed.
    Close: |r| NOTHING;
    ReadInline: |r| looks(r.ino);
    TakeAppendToken: |r| changes(r.ino);
    Create as cred of name: |r| changes(r.parent);
    CreateNameless as cred: |r| changes(r.parent);
    LeaseNames: |r| changes(r.dir);
    CreateMany as cred of_many births: |r| changes(r.dir);
    RemoveMany as cred of_many removals: |r| changes(r.dir);
    Mkdir as cred of name: |r| changes(r.parent);
    Symlink as cred of name: |r| changes(r.parent);
    Mknod as cred of name: |r| changes(r.parent);
    Link as cred of name: |r| changes_both(r.parent, r.ino);
    Unlink as cred of name: |r| changes(r.parent);
    Rmdir as cred of name: |r| changes(r.parent);
    Rename as cred of name, new_name: |r| changes_both(r.parent, r.new_parent);
    SetAttr as cred: |r| changes(r.ino);
    Commit: |r| changes(r.ino);
    SetXattr as cred: |r| changes(r.ino);
    RemoveXattr as cred: |r| changes(r.ino);
    // Times of read-only inodes are skipped (`note_access`).
    NoteAccess: |r| NOTHING;

    SetLock: |r| if r.kind.is_some() { looks(r.ino) } else { NOTHING };
    TestLock: |r| looks(r.ino);
    ListLocks: |r| looks(r.ino);

    // The list of volumes is not secret.
    VolumeList: |r| NOTHING;
    VolumeGet: |r| NOTHING;
    VolumeAt: |r| NOTHING;
    BackupList: |r| NOTHING;
    ReserveQuota: |r| changes_at(Place::Volume(r.volume));

    SnapshotList: |r| looks_at(Place::Volume(r.volume));
    SnapshotLookup as cred: |r| looks_into(r.snapshot);
    SnapshotGetAttr: |r| looks_into(r.snapshot);
    SnapshotReadDir as cred: |r| looks_into(r.snapshot);
    SnapshotGetXattr: |r| looks_into(r.snapshot);
    SnapshotListXattr: |r| looks_into(r.snapshot);
    SnapshotOpen as cred: |r| looks_into(r.snapshot);
    LayersOf: |r| if r.snapshot > 0 { looks_into(r.snapshot) } else { looks(r.ino) };
    TakeLayers: |r| changes(r.ino);
    LayerCopied: |r| changes(r.ino);

    Evict as cred: |r| changes(r.ino);
    EvictedRanges: |r| looks(r.ino);
    AwaitRecall: |r| looks(r.ino);
    WantRecall: |r| looks(r.ino);
    SetPinned as cred: |r| changes(r.ino);
    GetTierState: |r| looks(r.ino);
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
        const NOT_OF_MOUNTS: &[u16] = &[$($name::METHOD),*];
    };
}
reach_nothing! {
    VolumeCreate VolumeChange VolumeDelete VolumeClone ScanInodes
    WhereAtHome RelationAdd ReportListing ReportRelisting RelationDo RelationResolve RelationSuspect AckChanges DropCursor
    Filled TakeRecalls BackupSet BackupTake BackupDone SnapshotTake SnapshotDelete
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::lock::{CancelLock, ReclaimLocks};
    use weir_proto::methods;
    use weir_proto::sender::Sender;

    /// Requests about a session, and those that return or resume its holdings.
    const SESSION_ONLY: &[u16] = &[
        SessionOpen::METHOD,
        SessionResume::METHOD,
        KeepAlive::METHOD,
        SessionClose::METHOD,
        ReleaseLease::METHOD,
        ReleaseAppendToken::METHOD,
        NoteMap::METHOD,
        ReclaimReservations::METHOD,
        CancelLock::METHOD,
        ReclaimLocks::METHOD,
    ];

    #[test]
    fn each_request_of_a_mount_says_what_it_reaches() {
        let to_leader = methods::all().filter(|m| (100..200).contains(&m.number) && m.by.has(Sender::Mount));
        let sent: Vec<u16> = to_leader.map(|m| m.number).collect();
        let mut known: Vec<u16> =
            LISTED.iter().map(|(number, _)| *number).chain(SESSION_ONLY.iter().copied()).collect();
        known.sort_unstable();
        assert_eq!(sent, known);
        assert!(NOT_OF_MOUNTS.iter().all(|number| !sent.contains(number)));
    }

    /// A forgotten one would act as the superuser, regardless of the rules.
    #[test]
    fn each_request_that_names_a_user_says_so() {
        let sources = [
            include_str!("../../weir-proto/src/meta.rs"),
            include_str!("../../weir-proto/src/births.rs"),
            include_str!("../../weir-proto/src/volume.rs"),
            include_str!("../../weir-proto/src/snapshot.rs"),
            include_str!("../../weir-proto/src/recall.rs"),
            include_str!("../../weir-proto/src/lock.rs"),
            include_str!("../../weir-proto/src/backup.rs"),
        ];
        let all = sources.concat();
        for (number, says) in LISTED {
            let name = methods::find(*number).unwrap().name;
            let declared =
                all.split(&format!("{name} = {number} by ")).nth(1).unwrap_or_else(|| panic!("{name}"));
            let fields = declared.split("message!(").next().unwrap();
            assert_eq!(fields.contains("cred: Cred"), *says, "{name}");
        }
    }
}
