//! What of this client the leader must know before a request: each kind of request declares it here.
//!
//! A request without a row does not compile. The default is the strictest; a row of another kind has its
//! reason.
use weir_proto::Request;
use weir_proto::backup::*;
use weir_proto::coord::GetAudit;
use weir_proto::early::{AwaitDurable, ChangeEarly};
use weir_proto::local_creates::{CreateMany, LeaseFiles, LeaseNames, MkdirWithNames, RemoveMany};
use weir_proto::lock::{CancelLock, ListLocks, SetLock, TestLock};
use weir_proto::meta::*;
use weir_proto::quota::{OwnerLimit, OwnerUsageList, ReserveSpace};
use weir_proto::recall::*;
use weir_proto::relation::*;
use weir_proto::snapshot::*;
use weir_proto::volume::*;

/// The reports that go to the leader before a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Ordering {
    /// Nothing.
    AtOnce,
    /// The version of the cluster map of this client's last write: a client that asks the leader next, and
    /// reads, must have that map (see `maps.rs`).
    AfterMap,
    /// The map, and all creates, removals and renames that this client made locally: the request may be
    /// about these files, or about their directories.
    AfterNames,
}

/// A request of this client to the metadata leader.
pub trait ToLeader: Request {
    const ORDERING: Ordering;
    /// It saves data or names that programs have made: a leader that is busy is asked again, not given up.
    const SAVES: bool;
}

macro_rules! after {
    ($ordering:ident, saves $saves:literal: $($request:ty),+ $(,)?) => {
        $(impl ToLeader for $request {
            const ORDERING: Ordering = Ordering::$ordering;
            const SAVES: bool = $saves;
        })+
    };
}

// The session, and the map itself. A leader that waits for this client waits for these.
after!(AtOnce, saves false: KeepAlive, NoteMap, AwaitDurable);
// Its sender has reported all that the change in it follows.
after!(AtOnce, saves false: ChangeEarly);
// The reports of local changes: each waits for the earlier ones of its directory, in its queue.
after!(AfterMap, saves true: CreateMany, RemoveMany);
// Its sender has waited for those of the parent directory; nothing in the new one depends on others.
after!(AfterMap, saves false: MkdirWithNames);
// A close of a file that is not reported yet goes with its report.
after!(AfterMap, saves false: Close);
// Of volumes, not of files. A report of local creates may itself wait for a reservation.
after!(AfterMap, saves false: ReserveSpace, ReserveQuota, GetWriteFloors);

after!(AfterNames, saves true: Commit);
after!(AfterNames, saves false:
    AcquireLease, Create, CreateNameless, GetAttr, GetUsage, GetXattr, LeaseFiles, LeaseNames, LeaveInDoubt, Link,
    ListXattr, Lookup, Mkdir, Mknod, NoteAccess, Open, ReadDir, ReadInline, ReadLink, Recovered, ReleaseAppendToken,
    ReleaseLease, RemoveXattr, Rename, Rmdir, SessionClose, SetAttr, SetXattr, StatFs, Symlink, TakeAppendToken,
    Unlink,
);
after!(AfterNames, saves false: CancelLock, ListLocks, SetLock, TestLock);
after!(AfterNames, saves false:
    AwaitRecall, Evict, EvictedRanges, Filled, GetEviction, GetTierState, RecallFailed, SetPinned, TakeRecalls,
    WantRecall,
);
after!(AfterNames, saves false:
    LayerCopied, LayersOf, SnapshotDelete, SnapshotGetAttr, SnapshotGetXattr, SnapshotList, SnapshotListXattr,
    SnapshotLookup, SnapshotOpen, SnapshotReadDir, SnapshotTake, TakeLayers,
);
after!(AfterNames, saves false:
    AckChanges, CompleteWork, DropCursor, LeaseWork, ReadChanges, RelationAdd, RelationAddWith, RelationDo,
    RelationList, RelationResolve, RelationRulesList, RelationSet, RelationSuspect, ReportListing,
    ReportRelisting, WhereAtHome,
);
after!(AfterNames, saves false:
    BackupDone, BackupList, BackupSet, BackupTake, GetAudit, OwnerLimit, OwnerUsageList, ScanInodes,
    SetWriteFloor, VolumeAt, VolumeChange, VolumeClone, VolumeCreate, VolumeDelete, VolumeGet, VolumeList,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_wait_for_no_reports() {
        let of = |ordering: Ordering| ordering < Ordering::AfterNames;
        assert!(of(CreateMany::ORDERING) && of(RemoveMany::ORDERING) && of(ReserveSpace::ORDERING));
        assert!(KeepAlive::ORDERING == Ordering::AtOnce && NoteMap::ORDERING == Ordering::AtOnce);
        assert!(!of(Commit::ORDERING) && !of(Rename::ORDERING));
    }
}
