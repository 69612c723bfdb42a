//! The registry: each operation on the namespace is one row here.
//!
//! A row has the request, the user and the names in it, its place and whether it changes that (for the rules
//! of mounts and the audit log), its conflicts in the grace period (`in_grace`), its kind and its function,
//! and its grants after the commit. Kinds: `show`
//! reads one state of the store; `change` is a transaction that happens once, by session, slot and number;
//! `touch` is one that may be repeated; `early` is one whose reply may leave before it is durable, because
//! that reveals nothing. `change_more` and `touch_more` are refused while the disk is nearly full.
//!
//! Invariant: each request that a mount may send is a row of the first list, or is in `reach`, or is one of
//! its session (`SESSION_ONLY`); and each that names a user declares it.
use crate::backup;
use crate::leader::outcome::Outcome;
use crate::leader::{Leader, State};
use crate::namespace::create::meta_open;
use crate::namespace::{
    Cx, View, attr, clone, create, data, evict, import, layers, list, local_creates, mirror, open, remove,
    rename, report, snapshot, snapshot_view, totals, usage_of, volume, xattr,
};
use crate::obstacle::Halt;
use crate::ops::{Grants, InGrace, Operation, Work};
use crate::quotas::Quotas;
use crate::reach::{
    NOTHING, Place, Reached, Reaches, changes, changes_at, changes_both, reach_nothing, reaches, reads,
    reads_at, reads_snapshot,
};
use crate::relation::{admin, home_place};
use std::sync::Arc;
use weir_proto::backup::{BackupDone, BackupList, BackupSet, BackupTake};
use weir_proto::early::{ChangeEarly, KeptChange};
use weir_proto::local_creates::{CreateMany, LeaseFiles, LeaseNames, MkdirWithNames, RemoveMany};
use weir_proto::meta::*;
use weir_proto::quota::{OwnerLimit, OwnerUsageList, ReserveSpace};
use weir_proto::recall::{Evict, EvictedRanges, Filled, SetPinned};
use weir_proto::relation::{
    AckChanges, DropCursor, RelationAdd, RelationAddWith, RelationDo, RelationResolve, RelationSet,
    RelationSuspect, ReportListing, ReportRelisting, WhereAtHome,
};
use weir_proto::snapshot::*;
use weir_proto::volume::*;
use weir_proto::{Error, InodeId, Request, SessionId};
use weir_rpc::{Call, Connection};

/// Gives the closure of a row its types. Its error is a [`Halt`], or becomes one.
fn shows<R, T, E>(run: fn(&mut View<'_>, &R) -> Result<T, E>) -> fn(&mut View<'_>, &R) -> Result<T, E> {
    run
}
fn runs<R, T, E>(run: fn(&mut Cx<'_>, &R) -> Result<T, E>) -> fn(&mut Cx<'_>, &R) -> Result<T, E> {
    run
}

macro_rules! work {
    (show $run:expr) => {
        fn session(&self) -> SessionId {
            self.session
        }
        fn work() -> Work<Self> {
            Work::Show(|view, r| shows::<Self, _, _>($run)(view, r).map_err(Halt::from))
        }
    };
    (touch $run:expr) => {
        fn session(&self) -> SessionId {
            self.session
        }
        fn work() -> Work<Self> {
            Work::Change(|cx, r| runs::<Self, _, _>($run)(cx, r).map_err(Halt::from))
        }
    };
    (early $run:expr) => {
        const EARLY: bool = true;
        work!(touch $run);
    };
    (touch_more $run:expr) => {
        const GROWS: bool = true;
        work!(touch $run);
    };
    (change_more $run:expr) => {
        const GROWS: bool = true;
        work!(change $run);
    };
    (change $run:expr) => {
        fn session(&self) -> SessionId {
            self.op.session
        }
        fn op(&self) -> Option<&Op> {
            Some(&self.op)
        }
        fn work() -> Work<Self> {
            Work::Change(|cx, r| runs::<Self, _, _>($run)(cx, r).map_err(Halt::from))
        }
    };
}

macro_rules! implement {
    ($(
        $name:ident $(in_grace $grace:ident)? $(for_each $each:ident)?: $kind:ident $run:expr
        $(, |$r:ident, $reply:ident, $g:ident| $settle:expr)?;
    )*) => {
        $(impl Operation for $name {
            work!($kind $run);
            $(const IN_GRACE: InGrace = InGrace::$grace;)?
            $(fn further_inodes(&self) -> Vec<InodeId> {
                self.$each.iter().map(|one| one.ino).collect()
            })?
            fn settle(&self, reply: &mut Self::Reply, grants: &mut Grants<'_>) {
                let _ = (&reply, &grants);
                $(let ($r, $reply, $g) = (self, reply, grants);
                let _ = (&$r, &$reply, &$g);
                $settle)?
            }
        })*
    };
}

/// The operations of a list, and its dispatch: `None`, the call is none of them.
macro_rules! operations {
    ($dispatch:ident: $(
        $name:ident $(in_grace $grace:ident)? $(for_each $each:ident)?: $kind:ident $run:expr
        $(, |$r:ident, $reply:ident, $g:ident| $settle:expr)?;
    )*) => {
        implement! {
            $($name $(in_grace $grace)? $(for_each $each)?: $kind $run $(, |$r, $reply, $g| $settle)?;)*
        }
        fn $dispatch(leader: &Arc<Leader>, call: &Call) -> Option<Outcome> {
            match call.method {
                $($name::METHOD => Some(leader.operations.operate::<$name>(call)),)*
                _ => None,
            }
        }
    };
}

/// Operations that mounts may request: each row has the place of its request.
macro_rules! operations_of_mounts {
    ($(
        $name:ident $(as $cred:ident)? $(of $($entry:ident),+)? $(of_many $many:ident)?
        $(in_grace $grace:ident)? $(for_each $each:ident)?: |$at:ident| $reach:expr,
        $kind:ident $run:expr $(, |$r:ident, $reply:ident, $g:ident| $settle:expr)?;
    )*) => {
        reaches! { $($name $(as $cred)? $(of $($entry),+)? $(of_many $many)?: |$at| $reach;)* }
        operations! { of_mounts: $($name $(in_grace $grace)? $(for_each $each)?: $kind $run $(, |$r, $reply, $g| $settle)?;)* }
    };
}

/// Operations that no mount may request: they have no place.
macro_rules! operations_of_others {
    ($($name:ident: $kind:ident $run:expr $(, |$r:ident, $reply:ident, $g:ident| $settle:expr)?;)*) => {
        reach_nothing! { $($name)* }
        operations! { of_others: $($name: $kind $run $(, |$r, $reply, $g| $settle)?;)* }
    };
}

/// Runs the operation that a call asks for, if it is one.
pub fn operate(leader: &Arc<Leader>, call: &Call) -> Option<Outcome> {
    of_mounts(leader, call).or_else(|| of_others(leader, call))
}

operations_of_mounts! {
    Lookup as cred: |r| reads_at(Place::Name(r.parent, &r.name)), show attr::lookup, |r, reply, g| {
        if let Some(entry) = &mut reply.entry {
            g.entry(entry);
        }
        g.directory(r.parent, &mut reply.parent_lease);
    };
    GetAttr in_grace UnderRead: |r| reads_at(Place::Shown(r.ino)),
        show |view, r| attr::getattr(view, r.ino), |r, reply, g| g.entry(reply);
    ReadLink in_grace UnderRead: |r| reads(r.ino), show |view, r| attr::readlink(view, r.ino);
    ReadDir as cred: |r| reads(r.dir), show list::readdir, |r, reply, g| {
        for entry in reply.entries.iter_mut().filter_map(|e| e.entry.as_mut()) {
            g.entry(entry);
        }
        g.directory(r.dir, &mut reply.dir_lease);
    };
    GetXattr as cred in_grace UnderRead: |r| reads(r.ino), show |view, r| xattr::getxattr(view, &r.cred, r.ino, &r.name);
    ListXattr as cred in_grace UnderRead: |r| reads(r.ino), show |view, r| xattr::listxattr(view, &r.cred, r.ino);
    GetUsage in_grace Never: |r| reads(r.dir), show |view, r| usage_of(view.read, r.dir);
    StatFs in_grace Never: |r| NOTHING, show |view, _| totals(view.read);
    // Recovery after a dead writer is not a change of the file: `acquire` refuses other changes.
    AcquireLease in_grace UnderWrite: |r| reads(r.ino), touch open::acquire, |r, reply, g| {
        let ino = r.ino;
        reply.lease.kind = match (r.kind, reply.attr.kind) {
            (LeaseKind::None, _) => g.leases.kept(g.session, ino),
            (LeaseKind::Write, FileKind::Regular) if reply.lease.recover => {
                g.leases.grant_recovery(g.session, ino)
            }
            (LeaseKind::Write, FileKind::Regular) => g.leases.grant_write(g.session, ino),
            _ if reply.lease.recover => g.leases.kept(g.session, ino),
            _ => g.leases.acquire_read(g.session, ino),
        };
        if r.kind == LeaseKind::Write && reply.lease.kind < LeaseKind::Write {
            g.leases.note_direct(g.session, ino);
        }
    };
    Recovered: |r| reads(r.ino), change open::recovered, |r, reply, g| g.entry(reply);
    LeaveInDoubt: |r| reads(r.ino), change open::leave_in_doubt;
    Open as cred in_grace AsReached: |r| if r.write || r.truncate { changes(r.ino) } else { reads(r.ino) },
        touch open::open, |r, reply, g| g.open(&mut reply.entry, r.read, r.write);
    // Ends must be possible even after the rules have changed.
    Close for_each files: |r| NOTHING, early open::close, |r, reply, g| {
        for file in &r.files {
            g.leases.close(g.session, file.ino, file.reads, file.writes);
        }
    };
    ReadInline in_grace UnderRead: |r| reads(r.ino),
        show |view, r| open::read_inline(view, r.ino), |r, reply, g| g.entry(&mut reply.entry);
    TakeAppendToken: |r| changes(r.ino), show open::take_append_token, |r, reply, g| {
        g.leases.grant_append_token(g.session, r.ino);
        reply.entry.lease.kind = g.leases.kept(g.session, r.ino);
    };
    Create as cred of name: |r| changes(r.parent), change_more create::create, |r, reply, g| {
        let regular = reply.entry.attr.kind == FileKind::Regular;
        let (read, write) = (r.open & meta_open::READ != 0, r.open & meta_open::WRITE != 0);
        g.open(&mut reply.entry, regular && read, regular && write);
        g.directory(r.parent, &mut reply.parent_lease);
    };
    CreateNameless as cred: |r| changes(r.parent), change_more create::create_nameless, |r, reply, g| {
        g.open(reply, r.open & meta_open::READ != 0, true);
        g.leases.mark_orphan(reply.attr.ino);
    };
    LeaseNames: |r| changes(r.dir), touch_more local_creates::lease_names, |r, reply, g| g.names(r.dir, reply);
    LeaseFiles: |r| changes(r.dir), show local_creates::lease_files, |r, reply, g| {
        reply.files.retain_mut(|file| g.alone(&mut file.entry));
    };
    MkdirWithNames as cred of name: |r| changes(r.parent),
        change_more local_creates::mkdir_with_names, |r, reply, g| {
            g.new_names(&mut reply.names);
            g.directory(r.parent, &mut reply.parent_lease);
        };
    CreateMany as cred of_many creates in_grace UnderWrite: |r| changes(r.dir), change local_creates::create_many, |r, reply, g| {
        r.creates.iter().for_each(|created| g.local_create(r.dir, created));
    };
    RemoveMany as cred of_many removals: |r| changes(r.dir), change local_creates::remove_many;
    Mkdir as cred of name: |r| changes(r.parent), change_more create::mkdir, |r, reply, g| {
        g.entry(&mut reply.entry);
        g.directory(r.parent, &mut reply.parent_lease);
    };
    Symlink as cred of name: |r| changes(r.parent), change_more create::symlink, |r, reply, g| {
        g.entry(&mut reply.entry);
        g.directory(r.parent, &mut reply.parent_lease);
    };
    Mknod as cred of name: |r| changes(r.parent), change_more create::mknod, |r, reply, g| {
        g.entry(&mut reply.entry);
        g.directory(r.parent, &mut reply.parent_lease);
    };
    Link as cred of name in_grace FirstName: |r| changes_both(r.parent, r.ino), change_more create::link, |r, reply, g| {
        g.entry(&mut reply.entry);
        g.directory(r.parent, &mut reply.parent_lease);
    };
    Unlink as cred of name: |r| changes(r.parent),
        change remove::unlink, |r, reply, g| g.directory(r.parent, &mut reply.parent_lease);
    Rmdir as cred of name: |r| changes(r.parent),
        change remove::rmdir, |r, reply, g| g.directory(r.parent, &mut reply.parent_lease);
    Rename as cred of name, new_name: |r| changes_both(r.parent, r.new_parent), change rename::rename;
    SetAttr as cred in_grace UnderWrite: |r| changes(r.ino), change attr::setattr, |r, reply, g| g.entry(reply);
    Commit in_grace UnderWrite: |r| changes(r.ino), change data::commit, |r, reply, g| {
        if g.first && r.close_writes > 0 {
            g.leases.close(g.session, r.ino, 0, r.close_writes);
        }
        if r.append_token {
            g.release_append_token(r.ino);
        }
        g.entry(reply);
    };
    SetXattr as cred in_grace UnderWrite: |r| changes(r.ino), change_more xattr::setxattr, |r, reply, g| g.entry(reply);
    RemoveXattr as cred in_grace UnderWrite: |r| changes(r.ino), change xattr::removexattr, |r, reply, g| g.entry(reply);
    // Times of read-only inodes are skipped (`note_access`).
    NoteAccess in_grace Never: |r| NOTHING, early attr::note_access;

    // The list of volumes is not secret.
    VolumeList in_grace Never: |r| NOTHING, show volume::show::list;
    VolumeGet in_grace Never: |r| NOTHING, show |view, r| volume::show::get(view, &r.name);
    VolumeAt in_grace Never: |r| NOTHING, show |view, r| volume::show::at(view, r.ino);
    GetWriteFloors: |r| NOTHING, show |view, _r| volume::show::write_floors(view);
    BackupList: |r| NOTHING, show backup::list;
    ReserveQuota: |r| changes_at(Place::Volume(r.volume)), show volume::limits::reserve_quota, |r, reply, g| {
        g.reserve(Quotas::account_of_volume(r.volume), reply.held, (reply.evicting, r.must));
    };
    ReserveSpace: |r| changes_at(Place::Volume(r.account.volume)),
        show volume::limits::reserve_space, |r, reply, g| {
            g.reserve(r.account, reply.held, (reply.evicting, r.must));
        };

    SnapshotList: |r| reads_at(Place::Volume(r.volume)), show snapshot::list;
    SnapshotLookup as cred: |r| reads_snapshot(r.snapshot), show snapshot_view::lookup;
    SnapshotGetAttr: |r| reads_snapshot(r.snapshot), show snapshot_view::attr;
    SnapshotReadDir as cred: |r| reads_snapshot(r.snapshot), show snapshot_view::list;
    SnapshotGetXattr: |r| reads_snapshot(r.snapshot), show snapshot_view::get_xattr;
    SnapshotListXattr: |r| reads_snapshot(r.snapshot), show snapshot_view::list_xattr;
    SnapshotOpen as cred: |r| reads_snapshot(r.snapshot), touch snapshot_view::open;
    LayersOf: |r| if r.snapshot > 0 { reads_snapshot(r.snapshot) } else { reads(r.ino) },
        show snapshot_view::layers_of;
    TakeLayers: |r| changes(r.ino), touch layers::take, |r, reply, g| {
        reply.entry.lease.kind = g.leases.kept(g.session, r.ino);
    };
    LayerCopied: |r| changes(r.ino), change layers::copied, |r, reply, g| {
        reply.lease.kind = g.leases.kept(g.session, r.ino);
    };

    Evict as cred: |r| changes(r.ino), change evict::evict;
    EvictedRanges: |r| reads(r.ino), show evict::list;
    SetPinned as cred: |r| changes(r.ino), change evict::set_pinned, |r, reply, g| g.entry(reply);
}

operations_of_others! {
    VolumeCreate: change_more volume::change::create;
    VolumeChange: change volume::change::change;
    SetWriteFloor: change volume::change::set_write_floor;
    VolumeDelete: change volume::change::delete;
    VolumeClone: change_more clone::list::create;
    ScanInodes: show report::scan;
    OwnerLimit: change volume::limits::set_owner_limit;
    OwnerUsageList: show volume::limits::owner_usage;

    WhereAtHome: show home_place::where_at_home;
    RelationAdd: change_more admin::add;
    RelationAddWith: change_more admin::add_with;
    RelationSet: change admin::set;
    RelationDo: change admin::change;
    RelationResolve: change admin::resolve;
    RelationSuspect: change admin::suspect;
    AckChanges: change admin::ack;
    DropCursor: change admin::drop_cursor;
    ReportListing: change import::report, |r, reply, g| g.woken = Some(r.dir);
    ReportRelisting: change mirror::report;
    Filled: change evict::filled;

    BackupSet: change backup::set;
    BackupTake: change backup::take;
    BackupDone: change backup::done;
    SnapshotDelete: change snapshot::delete;
}

/// Changes that may be answered early, and are made again after a crash.
macro_rules! kept_operations {
    ($($name:ident)*) => {
        /// Runs the change in a request for an early answer.
        pub fn operate_early(leader: &Arc<Leader>, r: &ChangeEarly, call: &Call) -> Outcome {
            match r.method {
                $($name::METHOD => leader.operations.operate_early::<$name>(&r.body, call),)*
                method => Outcome::refused(not_kept(method)),
            }
        }
        /// Makes a change again that another leader has answered early.
        pub fn make_again(
            leader: &Leader,
            state: &mut State,
            session: SessionId,
            change: &KeptChange,
            on: &Connection,
        ) -> weir_proto::Result<()> {
            match change.method {
                $($name::METHOD => leader.operations.make_again::<$name>(state, session, change, on),)*
                method => Err(not_kept(method)),
            }
        }
        #[cfg(test)]
        const MADE_AGAIN: &[u16] = &[$($name::METHOD),*];
    };
}
fn not_kept(method: u16) -> Error {
    Error::unsupported(format!("method {method} has no early answer"))
}

kept_operations! { Mkdir MkdirWithNames Symlink Link Unlink Rmdir Rename SetAttr SetXattr RemoveXattr Commit }

// Its call waits for writers first, and then runs this.
implement! { SnapshotTake: change snapshot::take; }

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reach;
    use weir_proto::early::{AwaitDurable, MakeAgain};
    use weir_proto::lock::{CancelLock, ReclaimLocks};
    use weir_proto::methods;
    use weir_proto::quota::ReclaimSpace;
    use weir_proto::sender::Sender;

    #[test]
    fn early_answers_are_of_changes_made_again() {
        assert_eq!(MADE_AGAIN, weir_proto::early::KEPT);
    }

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
        ReclaimSpace::METHOD,
        CancelLock::METHOD,
        ReclaimLocks::METHOD,
        // The change in it is checked as a request of its own.
        ChangeEarly::METHOD,
        MakeAgain::METHOD,
        AwaitDurable::METHOD,
    ];

    #[test]
    fn each_request_of_a_mount_says_what_it_reaches() {
        let is_for_leader = |n: u16| (100..200).contains(&n) || (420..440).contains(&n);
        let to_leader = methods::all().filter(|m| is_for_leader(m.number) && m.by.has(Sender::Mount));
        let sent: Vec<u16> = to_leader.map(|m| m.number).collect();
        let mut known: Vec<u16> = LISTED
            .iter()
            .chain(reach::LISTED)
            .map(|(number, _)| *number)
            .chain(SESSION_ONLY.iter().copied())
            .collect();
        known.sort_unstable();
        assert_eq!(sent, known);
        assert!(NOT_OF_MOUNTS.iter().chain(reach::NOT_OF_MOUNTS).all(|number| !sent.contains(number)));
    }

    /// A forgotten one would act as the superuser, regardless of the rules.
    #[test]
    fn each_request_that_names_a_user_says_so() {
        let sources = [
            include_str!("../../weir-proto/src/meta.rs"),
            include_str!("../../weir-proto/src/local_creates.rs"),
            include_str!("../../weir-proto/src/volume.rs"),
            include_str!("../../weir-proto/src/quota.rs"),
            include_str!("../../weir-proto/src/snapshot.rs"),
            include_str!("../../weir-proto/src/recall.rs"),
            include_str!("../../weir-proto/src/lock.rs"),
            include_str!("../../weir-proto/src/backup.rs"),
        ];
        let all = sources.concat();
        for (number, says) in LISTED.iter().chain(reach::LISTED) {
            let name = methods::find(*number).unwrap().name;
            let declared =
                all.split(&format!("{name} = {number} by ")).nth(1).unwrap_or_else(|| panic!("{name}"));
            let fields = declared.split("message!(").next().unwrap();
            assert_eq!(fields.contains("cred: Cred"), *says, "{name}");
        }
    }
}
