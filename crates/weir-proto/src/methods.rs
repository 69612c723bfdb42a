//! The methods of the protocol, and the permitted senders of each: the table that a server checks before it
//! dispatches a request.
//!
//! A message declares its senders (`message!(Join = 1 by [Storage, Meta] -> …)`). A method that is not listed
//! here or in [`administration`] is not served.
pub use crate::Method;
use crate::{Request, administration};

/// Numbers of methods are below this.
pub const METHODS_MAX: usize = 510;

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
            let mut table = [None; METHODS_MAX];
            $($(table = with(table, Method::of::<crate::$module::$name>());)*)*
            let mut i = 0;
            while i < administration::METHODS.len() {
                table = with(table, administration::METHODS[i]);
                i += 1;
            }
            table
        };
    };
}

// All except those of `administration`.
methods!(
    coord::{Heartbeat, GetMap, ReportTarget, ReportLink, CaughtUp, GetStatus, RecordProgress, GetCoordinators, CompareClock, GetClocks, ActFor, ReportWaits, GetWaits, GetAudit, GetRebuild, ReportRefill, PlaceCopied, ReportFull}
    condition::{ReportCondition, GetConditions, TroubleList}
    life::{AskLife, ReportLife, GetLives}
    enrol::{RenewCertificate, GetEnrolment, CertificateKept}
    copies::{JournalAppend, JournalAsk, JournalTruncate, StateFetch, JournalRight, KeepCopy, CopyCaughtUp, CopyLost, LeaderSilent}
    export::{ExportFetch, GetExports}
    meta::{SessionOpen, SessionResume, KeepAlive, SessionClose, SessionList, Lookup, GetAttr, ReadLink, ReadDir, GetXattr, ListXattr, GetUsage,
        StatFs, AcquireLease, ReleaseLease, Open, Close, ReadInline, Recovered, LeaveInDoubt, NoteMap, TakeAppendToken, ReleaseAppendToken, Create,
        Mkdir, Symlink, Mknod, Link, Unlink, Rmdir, Rename, SetAttr, Commit, SetXattr, RemoveXattr, CreateNameless, NoteAccess,
        Revoke, RecoverFile}
    early::{ChangeEarly, MakeAgain, AwaitDurable}
    local_creates::{LeaseNames, MkdirWithNames, CreateMany, RemoveMany, LeaseFiles}
    lock::{SetLock, TestLock, CancelLock, ListLocks, ReclaimLocks, LockFree}
    volume::{VolumeList, VolumeGet, VolumeAt, ReserveQuota, ReclaimReservations,
        GetWriteFloors}
    quota::{OwnersNearLimit, OwnerUsageList, ReserveSpace, ReclaimSpace}
    relation::{RelationRulesList, RelationList, LeaseWork, CompleteWork, WhereAtHome, ReportListing, ReportRelisting}
    recall::{Evict, EvictedRanges, AwaitRecall, WantRecall, TakeRecalls, Filled, RecallFailed, SetPinned, GetTierState, EvictOwn}
    snapshot::{SnapshotList, SnapshotLookup, SnapshotGetAttr, SnapshotReadDir, SnapshotGetXattr, SnapshotListXattr, SnapshotOpen,
        LayersOf, TakeLayers, LayerCopied}
    backup::{BackupList, BackupTake, BackupDone}
    data::{WriteFragment, CommitStripe, DropPrepared, HoldStripe, WriteOverlay, WriteOverlays, MirrorOverlay, MirrorOverlays, ReadCell, ReadOverlays, StatCell,
        MarkMissing, DropFile, SealCell, ListCells, ListTruncations, ListFences, ListPlace, CopyCell, SealFile, NextStripe, StatTarget, HasSpace, PassOn, ScrubTarget, CompareTarget}
    watch::{GetMeters, ListWaits, GetTop, GetHistory, GetFacts, Collect}
    event::{ReportEvents, GetEvents}
);

/// The method with this number; one look-up.
pub fn find(number: u16) -> Option<&'static Method> {
    TABLE.get(usize::from(number))?.as_ref()
}

/// Requests for observing a process: see [`crate::watch`].
const OBSERVATIONS: std::ops::Range<u16> = 500..510;

/// Whether its reply waits for news on purpose, or for other processes that are asked: such a wait does not
/// mean that work is delayed.
pub fn is_answered_late(number: u16) -> bool {
    use crate::{coord::GetMap, recall::TakeRecalls, relation};
    [GetMap::METHOD, TakeRecalls::METHOD, relation::ReadChanges::METHOD, relation::LeaseWork::METHOD]
        .contains(&number)
        || OBSERVATIONS.contains(&number)
}

/// All of them, by number.
pub fn all() -> impl Iterator<Item = &'static Method> {
    TABLE.iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Role;
    use crate::sender::{Sender, Senders};

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
            assert!(!method.by.is_empty(), "no role may send {}", method.name);
            assert_eq!(find(method.number), Some(method));
        }
        assert_eq!((find(0), find(399), find(9001)), (None, None, None));
    }

    /// A request for users and not for mounts is in the audit log, or only reads.
    #[test]
    fn every_method_of_administrators_is_audited_or_only_reads() {
        let only_reads = [
            "GetWaits",
            "GetAudit",
            "GetEnrolment",
            "BackupList",
            "RelationList",
            "RelationRulesList",
            "ExportFetch",
            "GetExports",
            "GetClocks",
            "Collect",
            "GetConditions",
            "GetLives",
            "SessionList",
            "TroubleList",
            "ScrubTarget",
            "CompareTarget",
            "ReportEvents",
            "GetEvents",
            "OwnerUsageList",
            "OwnersNearLimit",
        ];
        let is_for_people =
            |by: Senders| (by.has(Sender::Console) || by.has(Sender::User)) && !by.has(Sender::Mount);
        for method in all().filter(|m| is_for_people(m.by) && !only_reads.contains(&m.name)) {
            // A console may send a mover's requests to the cluster, for tests only.
            let is_movers_work = method.by == Senders::of(&[Sender::Mover, Sender::Console]);
            let is_storages_work = method.by == Senders::of(&[Sender::Storage, Sender::Console]);
            assert!(method.is_administration || is_movers_work || is_storages_work, "{}", method.name);
        }
        for number in [
            1, 6, 8, 9, 10, 28, 40, 41, 42, 43, 44, 46, 50, 53, 55, 56, 64, 67, 73, 146, 155, 158, 159, 163,
            165, 166, 171, 189, 196, 420, 421, 424,
        ] {
            assert!(find(number).is_some_and(|m| m.is_administration), "{number}");
        }
        assert!(all().filter(|m| (200..400).contains(&m.number)).all(|m| !m.is_administration));
    }

    /// Requests of a single kind of node are separate from those of clients.
    #[test]
    fn requests_of_one_role_are_refused_from_others() {
        let may = |number: u16| find(number).map(|m| m.by);
        let only = |senders: &[Sender]| Some(Senders::of(senders));
        for number in [1, 2, 6] {
            assert_eq!(may(number), only(&[Sender::Storage, Sender::Meta]), "{number}");
        }
        for number in [8, 11, 300, 301, 302, 303] {
            assert_eq!(may(number), only(&[Sender::Meta]), "{number}");
        }
        for number in [40, 41, 42, 43, 44, 45, 46, 53] {
            assert_eq!(may(number), only(&[Sender::Console]), "{number}");
        }
        for number in [9, 28, 50, 55, 56, 59, 73] {
            assert_eq!(may(number), only(&[Sender::Console, Sender::Operator]), "{number}");
        }
        assert_eq!(may(10), only(&[Sender::Meta, Sender::Console, Sender::Operator]));
        let to_strangers = all().filter(|method| method.by.has(Sender::Stranger));
        assert_eq!(to_strangers.map(|method| method.name).collect::<Vec<_>>(), ["Enrol"]);
        let to_auditors = all().filter(|method| method.by.has(Sender::Auditor));
        assert!(to_auditors.into_iter().all(|method| !method.is_administration));
        for number in [5, 211, 240, 243] {
            assert_eq!(may(number), only(&[Sender::Storage]), "{number}");
        }
        assert_eq!(may(241), only(&[Sender::Storage, Sender::Meta]));
        // A storage node forwards requests that other nodes may send to a target.
        let to_targets = all().filter(|method| (200..300).contains(&method.number));
        assert!(to_targets.into_iter().all(|method| method.by.has(Sender::Storage)));
    }
}
