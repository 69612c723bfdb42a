//! The operation of each message, and its grants when it is done.
//!
//! `settle` runs after the commit, under the same lock as the check for conflicts: its grants conflict with
//! no lease.

use crate::backup;
use crate::lease::{ByInode, LeaseTable, Opens};
use crate::namespace::create::meta_open;
use crate::namespace::{
    Cx, View, attr, births, clone, create, data, evict, import, layers, list, mirror, open, remove, rename,
    report, snapshot, snapshot_view, totals, usage_of, volume, xattr,
};
use crate::quotas::Quotas;
use crate::reach::Reaches;
use crate::relation::{admin, home_place};
use weir_env::Instant;
use weir_proto::backup::{BackupDone, BackupList, BackupSet, BackupTake};
use weir_proto::births::{Birth, CreateMany, LeaseNames, NamesLeased};
use weir_proto::meta::*;
use weir_proto::recall::{Evict, EvictedRanges, Filled, SetPinned};
use weir_proto::relation::{
    AckChanges, DropCursor, RelationAdd, RelationDo, RelationResolve, RelationSuspect, ReportListing,
    ReportRelisting, WhereAtHome,
};
use weir_proto::snapshot::{
    LayerCopied, LayersOf, SnapshotDelete, SnapshotGetAttr, SnapshotGetXattr, SnapshotList,
    SnapshotListXattr, SnapshotLookup, SnapshotOpen, SnapshotReadDir, SnapshotTake, TakeLayers,
};
use weir_proto::volume::*;
use weir_proto::{InodeId, Request, Result, SessionId};

/// How an operation works.
pub enum Work<R: Request> {
    /// Reads one state of the store.
    Show(fn(&mut View<'_>, &R) -> Result<R::Reply>),
    /// Is a transaction.
    Change(fn(&mut Cx<'_>, &R) -> Result<R::Reply>),
}

/// An operation on the namespace.
pub trait Operation: Reaches {
    fn session(&self) -> SessionId;
    /// The identity of a change that must happen once.
    fn op(&self) -> Option<&Op> {
        None
    }
    fn work() -> Work<Self>;
    /// Whether the reply may leave before the change is durable: it reveals nothing.
    const EARLY: bool = false;
    /// Grants leases into the reply and counts opens.
    fn settle(&self, reply: &mut Self::Reply, grants: &mut Grants<'_>);
}

/// The lease table as a committed operation sees it.
pub struct Grants<'a> {
    pub leases: &'a mut LeaseTable,
    pub quotas: &'a mut Quotas,
    /// Directories on which no client gets a lease until the given time.
    pub contended: &'a ByInode<Instant>,
    pub now: Instant,
    pub session: SessionId,
    /// False when a reply is repeated and its opens are counted already.
    pub first: bool,
    /// Operations that wait for this inode may be retried.
    pub woken: Option<InodeId>,
    /// A directory that a client looks at.
    pub shown: Option<InodeId>,
}

impl Grants<'_> {
    /// A shown entry: Read, if that needs no revoke. Not for a file that is to be recovered.
    fn entry(&mut self, entry: &mut Entry) {
        let ino = entry.attr.ino;
        if entry.attr.kind == FileKind::Directory {
            self.directory(ino, &mut entry.lease);
        } else if entry.lease.recover {
            entry.lease.kind = self.leases.kept(self.session, ino);
        } else {
            entry.lease.kind = self.leases.grant_read(self.session, ino);
        }
    }
    fn directory(&mut self, dir: InodeId, lease: &mut Lease) {
        self.shown = Some(dir);
        let contended = self.contended.get(&dir).is_some_and(|until| self.now < *until);
        lease.kind = match contended {
            true => self.leases.kept(self.session, dir),
            false => self.leases.grant_read(self.session, dir),
        };
    }
    /// The names of a directory, with the reserved numbers.
    fn names(&mut self, dir: InodeId, reply: &mut NamesLeased) {
        self.leases.forget_ended_names(self.session);
        let contended = self.contended.get(&dir).is_some_and(|until| self.now < *until);
        let lease = &mut reply.entry.lease;
        lease.kind = match reply.numbers > 0 && !contended {
            true => self.leases.grant_names(self.session, dir),
            false => self.leases.kept(self.session, dir),
        };
        if lease.kind < LeaseKind::Write {
            (reply.first, reply.numbers, reply.layout) = (InodeId(0), 0, None);
        }
    }
    /// A file that its client has held exclusively since it created it. The client reports its present number
    /// of opens, even if it has done so before on another connection.
    fn born(&mut self, born: &Birth) {
        self.leases.grant_write(self.session, born.ino);
        if self.first {
            let opens = Opens { read: born.open_read, write: born.open_write };
            self.leases.set_opens(self.session, born.ino, opens);
        }
    }
    fn release_append_token(&mut self, ino: InodeId) {
        if self.leases.release_append_token(self.session, ino) {
            self.woken = Some(ino);
        }
    }
    fn open(&mut self, entry: &mut Entry, read: bool, write: bool) {
        if self.first && (read || write) {
            self.leases.open(self.session, entry.attr.ino, read, write);
        }
        if write {
            entry.lease.kind = self.leases.grant_write(self.session, entry.attr.ino);
        } else {
            self.entry(entry);
        }
    }
}

macro_rules! operation {
    ($name:ident, $work:ident $run:expr, ($r:ident, $reply:ident, $g:ident) $settle:expr) => {
        impl Operation for $name {
            fn session(&self) -> SessionId {
                self.session
            }
            fn work() -> Work<Self> {
                Work::$work($run)
            }
            fn settle(&self, reply: &mut Self::Reply, grants: &mut Grants<'_>) {
                let ($r, $reply, $g) = (self, reply, grants);
                let _ = (&$r, &$g);
                $settle
            }
        }
    };
}
macro_rules! change {
    ($name:ident, $run:expr, ($r:ident, $reply:ident, $g:ident) $settle:expr) => {
        impl Operation for $name {
            fn session(&self) -> SessionId {
                self.op.session
            }
            fn op(&self) -> Option<&Op> {
                Some(&self.op)
            }
            fn work() -> Work<Self> {
                Work::Change($run)
            }
            fn settle(&self, reply: &mut Self::Reply, grants: &mut Grants<'_>) {
                let ($r, $reply, $g) = (self, reply, grants);
                let _ = (&$r, &$g);
                $settle
            }
        }
    };
}

operation!(Lookup, Show attr::lookup, (r, reply, g) {
    if let Some(entry) = &mut reply.entry {
        g.entry(entry);
    }
    g.directory(r.parent, &mut reply.parent_lease);
});
operation!(GetAttr, Show |view, r| attr::getattr(view, r.ino), (r, reply, g) g.entry(reply));
operation!(ReadLink, Show |view, r| attr::readlink(view, r.ino), (r, reply, g) { let _ = reply; });
operation!(ReadDir, Show list::readdir, (r, reply, g) {
    for entry in reply.entries.iter_mut().filter_map(|e| e.entry.as_mut()) {
        g.entry(entry);
    }
    g.directory(r.dir, &mut reply.dir_lease);
});
operation!(GetXattr, Show |view, r| xattr::getxattr(view, &r.cred, r.ino, &r.name), (r, reply, g) { let _ = reply; });
operation!(ListXattr, Show |view, r| xattr::listxattr(view, &r.cred, r.ino), (r, reply, g) { let _ = reply; });
operation!(GetUsage, Show |view, r| usage_of(view.read, r.dir), (r, reply, g) { let _ = reply; });
operation!(StatFs, Show |view, _| totals(view.read), (r, reply, g) { let _ = reply; });
operation!(ReadInline, Show |view, r| open::read_inline(view, r.ino), (r, reply, g) g.entry(&mut reply.entry));
operation!(TakeAppendToken, Show open::take_append_token, (r, reply, g) {
    g.leases.grant_append_token(g.session, r.ino);
    reply.entry.lease.kind = g.leases.kept(g.session, r.ino);
});
operation!(AcquireLease, Change open::acquire, (r, reply, g) {
    let ino = r.ino;
    reply.lease.kind = match (r.kind, reply.attr.kind) {
        (LeaseKind::None, _) => g.leases.kept(g.session, ino),
        (LeaseKind::Write, FileKind::Regular) if reply.lease.recover => g.leases.grant_recovery(g.session, ino),
        (LeaseKind::Write, FileKind::Regular) => g.leases.grant_write(g.session, ino),
        _ if reply.lease.recover => g.leases.kept(g.session, ino),
        _ => g.leases.acquire_read(g.session, ino),
    };
    if r.kind == LeaseKind::Write && reply.lease.kind < LeaseKind::Write {
        g.leases.note_direct(g.session, ino);
    }
});
operation!(Open, Change open::open, (r, reply, g) g.open(&mut reply.entry, r.read, r.write));

impl Operation for Close {
    fn session(&self) -> SessionId {
        self.session
    }
    fn work() -> Work<Self> {
        Work::Change(open::close)
    }
    const EARLY: bool = true;
    fn settle(&self, (): &mut (), grants: &mut Grants<'_>) {
        for file in &self.files {
            grants.leases.close(grants.session, file.ino, file.reads, file.writes);
        }
    }
}

impl Operation for NoteAccess {
    fn session(&self) -> SessionId {
        self.session
    }
    fn work() -> Work<Self> {
        Work::Change(attr::note_access)
    }
    const EARLY: bool = true;
    fn settle(&self, (): &mut (), _: &mut Grants<'_>) {}
}

change!(Recovered, open::recovered, (r, reply, g) g.entry(reply));
change!(LeaveInDoubt, open::leave_in_doubt, (r, reply, g) { let _ = reply; });
change!(Create, create::create, (r, reply, g) {
    let regular = reply.entry.attr.kind == FileKind::Regular;
    let (read, write) = (r.open & meta_open::READ != 0, r.open & meta_open::WRITE != 0);
    g.open(&mut reply.entry, regular && read, regular && write);
    g.directory(r.parent, &mut reply.parent_lease);
});
operation!(LeaseNames, Change births::lease_names, (r, reply, g) g.names(r.dir, reply));
change!(CreateMany, births::create_many, (r, reply, g) {
    let _ = reply;
    r.births.iter().for_each(|born| g.born(born));
});
change!(CreateNameless, create::create_nameless, (r, reply, g) {
    g.open(reply, r.open & meta_open::READ != 0, true);
    g.leases.mark_orphan(reply.attr.ino);
});
change!(Mkdir, create::mkdir, (r, reply, g) {
    g.entry(&mut reply.entry);
    g.directory(r.parent, &mut reply.parent_lease);
});
change!(Symlink, create::symlink, (r, reply, g) {
    g.entry(&mut reply.entry);
    g.directory(r.parent, &mut reply.parent_lease);
});
change!(Mknod, create::mknod, (r, reply, g) {
    g.entry(&mut reply.entry);
    g.directory(r.parent, &mut reply.parent_lease);
});
change!(Link, create::link, (r, reply, g) {
    g.entry(&mut reply.entry);
    g.directory(r.parent, &mut reply.parent_lease);
});
change!(Unlink, remove::unlink, (r, reply, g) g.directory(r.parent, &mut reply.parent_lease));
change!(Rmdir, remove::rmdir, (r, reply, g) g.directory(r.parent, &mut reply.parent_lease));
change!(Rename, rename::rename, (r, reply, g) { let _ = reply; });
change!(SetAttr, attr::setattr, (r, reply, g) g.entry(reply));
change!(SetXattr, xattr::setxattr, (r, reply, g) g.entry(reply));
change!(RemoveXattr, xattr::removexattr, (r, reply, g) g.entry(reply));
change!(Commit, data::commit, (r, reply, g) {
    if g.first && r.close_writes > 0 {
        g.leases.close(g.session, r.ino, 0, r.close_writes);
    }
    if r.append_token {
        g.release_append_token(r.ino);
    }
    g.entry(reply);
});

operation!(VolumeList, Show volume::show::list, (r, reply, g) { let _ = reply; });
operation!(VolumeGet, Show |view, r| volume::show::get(view, &r.name), (r, reply, g) { let _ = reply; });
operation!(VolumeAt, Show |view, r| volume::show::at(view, r.ino), (r, reply, g) { let _ = reply; });
change!(VolumeCreate, volume::change::create, (r, reply, g) { let _ = reply; });
change!(VolumeChange, volume::change::change, (r, reply, g) { let _ = reply; });
change!(VolumeClone, clone::list::create, (r, reply, g) { let _ = reply; });
change!(VolumeDelete, volume::change::delete, (r, reply, g) { let _ = reply; });
operation!(ReserveQuota, Show volume::limits::reserve_quota, (r, reply, g) {
    g.quotas.set(r.volume, r.session, reply.held);
    if reply.evicting && reply.held < r.must {
        g.quotas.note_starved(r.volume, r.session, r.must);
    }
});

operation!(WhereAtHome, Show home_place::where_at_home, (r, reply, g) { let _ = reply; });
change!(RelationAdd, admin::add, (r, reply, g) { let _ = reply; });
change!(ReportListing, import::report, (r, reply, g) {
    let _ = reply;
    g.woken = Some(r.dir);
});
change!(ReportRelisting, mirror::report, (r, reply, g) { let _ = reply; });
change!(RelationDo, admin::change, (r, reply, g) { let _ = reply; });
change!(RelationResolve, admin::resolve, (r, reply, g) { let _ = reply; });
change!(RelationSuspect, admin::suspect, (r, reply, g) { let _ = reply; });
change!(AckChanges, admin::ack, (r, reply, g) { let _ = reply; });
change!(DropCursor, admin::drop_cursor, (r, reply, g) { let _ = reply; });
operation!(EvictedRanges, Show evict::list, (r, reply, g) { let _ = reply; });
change!(Evict, evict::evict, (r, reply, g) { let _ = reply; });
change!(Filled, evict::filled, (r, reply, g) { let _ = reply; });
change!(SetPinned, evict::set_pinned, (r, reply, g) g.entry(reply));
operation!(ScanInodes, Show report::scan, (r, reply, g) { let _ = reply; });

change!(BackupSet, backup::set, (r, reply, g) { let _ = reply; });
change!(BackupTake, backup::take, (r, reply, g) { let _ = reply; });
change!(BackupDone, backup::done, (r, reply, g) { let _ = reply; });
operation!(BackupList, Show backup::list, (r, reply, g) { let _ = reply; });

change!(SnapshotTake, snapshot::take, (r, reply, g) { let _ = reply; });
change!(SnapshotDelete, snapshot::delete, (r, reply, g) { let _ = reply; });
operation!(SnapshotList, Show snapshot::list, (r, reply, g) { let _ = reply; });
operation!(SnapshotLookup, Show snapshot_view::lookup, (r, reply, g) { let _ = reply; });
operation!(SnapshotGetAttr, Show snapshot_view::attr, (r, reply, g) { let _ = reply; });
operation!(SnapshotReadDir, Show snapshot_view::list, (r, reply, g) { let _ = reply; });
operation!(SnapshotGetXattr, Show snapshot_view::get_xattr, (r, reply, g) { let _ = reply; });
operation!(SnapshotListXattr, Show snapshot_view::list_xattr, (r, reply, g) { let _ = reply; });
operation!(SnapshotOpen, Change snapshot_view::open, (r, reply, g) { let _ = reply; });
operation!(LayersOf, Show snapshot_view::layers_of, (r, reply, g) { let _ = reply; });
operation!(TakeLayers, Change layers::take, (r, reply, g) {
    reply.entry.lease.kind = g.leases.kept(g.session, r.ino);
});
change!(LayerCopied, layers::copied, (r, reply, g) {
    reply.lease.kind = g.leases.kept(g.session, r.ino);
});
