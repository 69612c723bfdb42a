//! Every message type, once.

/// Calls `$check::<T>(name)` for every message type of `weir_proto`. The test `the_list_is_complete` compares
/// it with the sources.
#[macro_export]
macro_rules! for_every_message {
    ($check:ident) => {
        $crate::for_every_message!($check:
            coord::{AnnouncedTarget, TargetHistory, Join, Joined, TargetReport, Heartbeat, HeartbeatAck, GetMap, MapReply, ReportTarget, ReportLink, CutLink,
                CaughtUp, Leave, ClearTarget, GetStatus, ClusterStatus, LeadNamespace, LeadReply,
                MakeGroups, RecordProgress, GetCoordinators, ActFor, Coordinators, ReportWaits, CompareClock, CoordinatorTime, GetClocks, Clocks, ClockOff, Wait, GetWaits, ClientsWaiting, ClientWaiting, FinishUpgrade, HomeAllow, HomeForbid, GetAudit, AuditState, AccessAdd, AccessRemove, AuditVolumes, GetRebuild, GonePlan, RebuildStatus, RebuildWaiting, RefillReport, ReportRefill, SetRebuild, TargetGone, DrainTarget, RemoveTarget, PlaceCopied, PauseMoves, ReportFull, FullPlace}
            condition::{NodeTrouble, NodeDisk, Condition, ReportCondition, GetConditions, Conditions, NodeCondition, TroubleList, Troubles}
            life::{Pressure, TargetLife, Life, AskLife, ReportLife, GetLives, Lives, NodeLife}
            event::{ReportEvents, GetEvents, EventLog, EventSeen, Mute, MarkEvents}
            news::{MapNews, MapChange, MemberAway}
            enrol::{TokenCreate, TokenMade, Enrol, Enrolled, RenewCertificate, IssueCertificate, GetEnrolment, Enrolment, Holder, TokenShown, TokenRevoke,
                NodeRemove, RotateAuthority, CertificateKept}
            copies::{SetCopies, KeepCopy, CopyCaughtUp, CopyLost, LeaderSilent, EpochRun, JournalEpochs, JournalAsk, JournalHeld, JournalTruncate, RecordHead, JournalAppend, JournalKept, JournalRight, StateFetch, StatePart}
            export::{ExportHead, ExportBegin, ExportBegun, ExportFetch, ExportSet, GetExports, ExportState, ExportMade}
            data::{Place, WriteFragment, HoldStripe, CommitStripe, DropPrepared, WriteOverlay, WriteOverlays, OverlayPart, OverlayWritten, MirrorOverlay, MirrorOverlays,
                ReadCell, CellRead, ReadOverlays, OverlayExtent, OverlaysRead, StatCell, CellStat, MarkMissing,
                DropFile, ListTruncations, TruncationList, Truncation, ListFences, FenceList, FileFence, ScrubTarget, ScrubReport, ScrubPass, CompareTarget, CompareReport, ComparePass, ListPlace, PlaceList, CellDigest, CopyCell, CellImage, CellEntry, DropFileReply, PreparedCell, SealCell, SealedCell, ListCells, CellList, CellSummary,
                NextStripe, StripeFound, SealFile, StatTarget, TargetStat, HasSpace, SpaceAnswer, PassOn, PassedOn}
            meta::{Op, Cred, Time, Range, Attr, Layers, Lease, Entry, SessionOpen, SessionOpened, HeldLease, SessionResume,
                SessionResumed, KeepAlive, SessionClose, SessionList, Sessions, SessionShown, Lookup, LookedUp, GetAttr, ReadLink, LinkTarget, ReadDir,
                ListEntry, Listing, GetXattr, XattrValue, ListXattr, XattrNames, GetUsage, Usage, StatFs, FsStat,
                AcquireLease, ReleaseLease, Open, Opened, Close, Closed, ReadInline, InlineData, Recovered, LeaveInDoubt, NoteMap, TakeAppendToken, ReleaseAppendToken, Create, Created,
                Mkdir, Made, Symlink, Mknod, Link, Unlink, Rmdir, Removed, Rename, Renamed, SetAttr, Commit,
                SetXattr, RemoveXattr, CreateNameless, NoteAccess, AccessTime, Revoke,
                RecoverFile}
            early::{ChangeEarly, ChangedEarly, Given, MakeAgain, KeptChange, MadeAgain, NotMade, AwaitDurable, Durable}
            local_creates::{LeaseNames, NamesLeased, MkdirWithNames, MadeWithNames, CreateMany, CreatedMany, LocalCreate, RemoveMany, RemovedMany, Removal, LeaseFiles, FilesLeased, LeasedFile}
            volume::{Quota, Policy, SnapshotRetention, Retention, Volume, VolumeCreate, VolumeList, VolumePage, VolumeGet, VolumeAt, VolumeChange, VolumeDelete, VolumeClone,
                ReserveQuota, QuotaReservation, ReclaimReservations, HeldReservation,
                GetWriteFloors, WriteFloors, WriteFloor, SetWriteFloor, ScanInodes, Scanned, DirectoryFacts, FileFacts}
            quota::{Holder, Account, OwnerLimit, OwnerUsageList, OwnersNearLimit, OwnersNear, ListOf, OwnerUsagePage, OwnerUsage, ReserveSpace, ReservedSpace, ReclaimSpace, HeldSpace}
            relation::{By, Change, ReadChanges, Changes, NamedChange, AckChanges, DropCursor, RelationAdd, RelationAddWith, RelationSet, RelationRules, RelationRulesList, RulesOfRelations,
                RulesOfRelation, RelationList,
                Relations, RelationDo, RelationInfo, Conflict, RelationResolve, RelationSuspect, LeaseWork, WorkLeased, RelationWork,
                Expected, HomeAttrs, NameWork, ExtentWork, Finish, CompleteWork, NameDone, ExtentDone, WhereAtHome,
                HomePlace, Receipt, ListWork, ReportListing, ReportRelisting, HomeEntry, ListDone}
            recall::{ByteRange, Evict, Evicted, EvictedRanges, EvictedList, AwaitRecall, RecallWaited, WantRecall, TakeRecalls,
                RecallId, RecallsTaken, RecallWork, Filled, Learned, RecallFailed, SetPinned, GetTierState, TierState, RecallState, GetEviction, SetMarks,
                Levels, EvictionLevel, EvictOwn}
            backup::{BackupRetention, Backup, BackupRun, BackupEnd, BackupSet, BackupList, Backups, BackupTake, BackupTaken, BackupDone}
            snapshot::{Snapshot, SnapshotTake, SnapshotDelete, SnapshotList, Snapshots, SnapshotLookup, SnapshotLookedUp, SnapshotGetAttr, SnapshotReadDir,
                SnapshotListing, SnapshotEntry, SnapshotGetXattr, SnapshotListXattr, SnapshotXattrValue, SnapshotXattrNames, SnapshotOpen, SnapshotOpened, Layer, LayersOf,
                LayerList, TakeLayers, LayersTaken, LayerCopied}
            lock::{LockOwner, LockEntry, SetLock, LockAnswer, TestLock, CancelLock, LockCancelled, ListLocks,
                LockList, HeldLock, ReclaimLocks, Reclaimed, LockFree}
            home_rule::{HomeRule, HomeIds, IdMapping}
            access::{AuditRule, VolumeGrant, IdRange, AccessRule}
            map::{Node, Run, RunSeen, Target, Member, Group, GroupAt, Move, NamespaceEntry, NamespaceCopy, NamespaceCopies, Settings, RemovedNode, ClusterMap}
            version::{Program}
            watch::{GetMeters, Meters, Meter, MeterBucket, ListWaits, WaitsListed, WaitSeen, GetTop, Top, TopRow, GetHistory, GetFacts, Facts, Fact, SeriesRead, Collect, Collected, Answers, NodeAnswer, NodeReply}
            frame::{Hello, Through}
        )
    };
    ($check:ident: $($module:ident::{$($name:ident),*})*) => {
        $($($check::<weir_proto::$module::$name>(concat!(stringify!($module), "::", stringify!($name)));)*)*
    };
}
