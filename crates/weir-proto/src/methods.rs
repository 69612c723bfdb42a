//! The methods of the protocol, and who may send each: the table that a server looks at before it dispatches a request.
//!
//! A message declares its senders (`message!(Join = 1 by [Storage, Meta] -> …)`). A method that is not listed here is served by nobody.
use crate::Request;
use crate::sender::Senders;

/// Numbers of methods are below this.
pub const METHODS_MAX: usize = 400;

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Method {
    pub number: u16,
    pub name: &'static str,
    pub by: Senders,
}

impl Method {
    pub const fn of<R: Request>() -> Method {
        Method { number: R::METHOD, name: R::NAME, by: R::BY }
    }
}

type Table = [Option<Method>; METHODS_MAX];

const fn with(mut table: Table, method: Method) -> Table {
    let place = method.number as usize;
    assert!(table[place].is_none(), "two methods have one number");
    table[place] = Some(method);
    table
}

macro_rules! methods {
    ($($module:ident::{$($name:ident),* $(,)?})*) => {
        static TABLE: Table = {
            let table = [None; METHODS_MAX];
            $($(let table = with(table, Method::of::<crate::$module::$name>());)*)*
            table
        };
    };
}

methods!(
    coord::{Join, Heartbeat, GetMap, ReportTarget, ReportLink, CaughtUp, Leave, ClearTarget, MakeGroups, GetStatus, LeadNamespace,
        RecordProgress, GetCoordinators, ReportWaits, GetWaits, FinishUpgrade}
    meta::{SessionOpen, SessionResume, KeepAlive, SessionClose, Lookup, GetAttr, ReadLink, ReadDir, GetXattr, ListXattr, GetUsage,
        StatFs, AcquireLease, ReleaseLease, Open, Close, ReadInline, Recovered, LeaveInDoubt, NoteMap, TakeAppendToken, ReleaseAppendToken, Create,
        Mkdir, Symlink, Mknod, Link, Unlink, Rmdir, Rename, SetAttr, Commit, SetXattr, RemoveXattr, CreateNameless, NoteAccess,
        Revoke, RecoverFile}
    lock::{SetLock, TestLock, CancelLock, ListLocks, ReclaimLocks, LockFree}
    volume::{VolumeCreate, VolumeList, VolumeGet, VolumeAt, VolumeChange, VolumeDelete, VolumeClone, ReserveQuota, ReclaimReservations,
        ScanInodes}
    relation::{ReadChanges, AckChanges, DropCursor, RelationAdd, RelationList, RelationDo, RelationResolve, RelationSuspect,
        LeaseWork, CompleteWork, WhereAtHome, ReportListing, ReportRelisting}
    recall::{Evict, EvictedRanges, AwaitRecall, WantRecall, TakeRecalls, Filled, RecallFailed, SetPinned, GetTierState, GetEviction,
        EvictOwn}
    snapshot::{SnapshotTake, SnapshotDelete, SnapshotList, SnapshotLookup, SnapshotGetAttr, SnapshotReadDir, SnapshotGetXattr, SnapshotListXattr, SnapshotOpen,
        LayersOf, TakeLayers, LayerCopied}
    backup::{BackupSet, BackupList, BackupTake, BackupDone}
    data::{WriteFragment, CommitStripe, DropPrepared, HoldStripe, WriteOverlay, MirrorOverlay, ReadCell, ReadOverlays, StatCell,
        MarkMissing, DropFile, SealCell, ListCells, ListTruncations, SealFile, NextStripe, StatTarget, PassOn}
);

/// The method of this number; one look-up.
pub fn find(number: u16) -> Option<&'static Method> {
    TABLE.get(usize::from(number))?.as_ref()
}

/// All of them, by number.
pub fn all() -> impl Iterator<Item = &'static Method> {
    TABLE.iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Role;
    use crate::sender::Sender;

    #[test]
    fn each_role_is_a_sender_of_its_own() {
        let mut roles: Vec<Sender> = Role::ALL.iter().map(|role| Sender::from(*role)).collect();
        roles.sort_unstable();
        roles.dedup();
        assert_eq!(roles.len(), Role::ALL.len());
        assert!(!roles.contains(&Sender::User));
    }

    #[test]
    fn every_method_has_senders_and_is_found_by_its_number() {
        assert!(all().count() > 120);
        for method in all() {
            assert!(!method.by.is_empty(), "nobody may send {}", method.name);
            assert_eq!(find(method.number), Some(method));
        }
        assert_eq!((find(0), find(399), find(9001)), (None, None, None));
    }

    /// What only one kind of node does is told apart from what clients do.
    #[test]
    fn the_doors_that_matter_are_closed() {
        let may = |number: u16| find(number).map(|m| m.by);
        let only = |senders: &[Sender]| Some(Senders::of(senders));
        for number in [1, 2, 6] {
            assert_eq!(may(number), only(&[Sender::Storage, Sender::Meta]), "{number}");
        }
        for number in [8, 11, 300, 301, 302, 303] {
            assert_eq!(may(number), only(&[Sender::Meta]), "{number}");
        }
        for number in [9, 10, 28] {
            assert_eq!(may(number), only(&[Sender::Console]), "{number}");
        }
        for number in [5, 211, 240, 241, 243] {
            assert_eq!(may(number), only(&[Sender::Storage]), "{number}");
        }
        // A storage node passes on what others may send to a target.
        let to_targets = all().filter(|method| (200..300).contains(&method.number));
        assert!(to_targets.into_iter().all(|method| method.by.has(Sender::Storage)));
    }
}
