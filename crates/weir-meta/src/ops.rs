//! Operations on the namespace, and their grants when they are done. `registry` lists them.
//!
//! `settle` runs after the commit, under the same lock as the check for conflicts: its grants conflict with
//! no lease.

use crate::lease::{ByInode, Conflict, LeaseTable, Need, Numbers, Opens};
use crate::namespace::{Cx, View};
use crate::obstacle::Attempt;
use crate::quotas::Quotas;
use crate::reach::Reaches;
use weir_env::Instant;
use weir_proto::local_creates::{LocalCreate, NamesLeased};
use weir_proto::meta::{Entry, FileKind, Lease, LeaseKind, Op};
use weir_proto::quota::Account;
use weir_proto::{InodeId, Request, SessionId};

/// Leases that are revoked for one request for files to remove: those that others wait for come soon after.
const WANTED_MAX: usize = 256;

/// How an operation works.
pub enum Work<R: Request> {
    /// Reads one state of the store.
    Show(fn(&mut View<'_>, &R) -> Attempt<R::Reply>),
    /// Is a transaction.
    Change(fn(&mut Cx<'_>, &R) -> Attempt<R::Reply>),
}

/// Whether an operation may conflict with holdings of a session that has not returned since a restart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InGrace {
    /// In the volumes that it reaches. A transaction is a change there.
    ByVolume,
    /// As [`InGrace::ByVolume`], but the transaction changes only what its reach declares as changed.
    AsReached,
    /// As [`InGrace::ByVolume`], unless its session has this lease on its one inode.
    UnderRead,
    UnderWrite,
    /// As [`InGrace::ByVolume`]. It may give an inode its first name, and so its volume.
    FirstName,
    Never,
}

/// An operation on the namespace.
pub trait Operation: Reaches {
    fn session(&self) -> SessionId;
    /// The identity of a change that must happen once.
    fn op(&self) -> Option<&Op> {
        None
    }
    fn work() -> Work<Self>;
    /// The inodes that it concerns besides those that it reaches.
    fn further_inodes(&self) -> Vec<InodeId> {
        Vec::new()
    }
    const IN_GRACE: InGrace = InGrace::ByVolume;
    /// Whether the reply may leave before the change is durable: it reveals nothing.
    const EARLY: bool = false;
    /// Whether it takes space that nothing returns: on a disk that is nearly full it is refused, so that
    /// removals, commits and ends stay possible.
    const GROWS: bool = false;
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
    /// A directory that a client reads.
    pub shown: Option<InodeId>,
    /// Leases of other sessions that are revoked after the reply: no request waits for them.
    pub wanted: Vec<Conflict>,
}

impl Grants<'_> {
    /// A shown entry: Read, if that needs no revoke. Not for a file that is to be recovered.
    pub fn entry(&mut self, entry: &mut Entry) {
        let ino = entry.attr.ino;
        if entry.attr.kind == FileKind::Directory {
            self.directory(ino, &mut entry.lease);
        } else if entry.lease.recover {
            entry.lease.kind = self.leases.kept(self.session, ino);
        } else {
            entry.lease.kind = self.leases.grant_read(self.session, ino);
        }
    }
    /// A directory that a client reads.
    pub fn directory(&mut self, dir: InodeId, lease: &mut Lease) {
        self.shown = Some(dir);
        let contended = self.contended.get(&dir).is_some_and(|until| self.now < *until);
        lease.kind = match contended {
            true => self.leases.kept(self.session, dir),
            false => self.leases.grant_read(self.session, dir),
        };
    }
    /// A file that its client may remove by itself; false: other clients use it. If none has it open their
    /// leases are revoked, for a later request.
    pub fn alone(&mut self, entry: &mut Entry) -> bool {
        let ino = entry.attr.ino;
        let is_alone = self.leases.grant_alone(self.session, ino);
        entry.lease.kind = self.leases.kept(self.session, ino);
        if !is_alone && self.wanted.len() < WANTED_MAX && self.leases.openers(ino).is_empty() {
            self.leases.conflicts(self.session, ino, Need::Change, &mut self.wanted);
        }
        is_alone
    }
    /// The names of a directory, with the reserved numbers.
    pub fn names(&mut self, dir: InodeId, reply: &mut NamesLeased) {
        self.leases.forget_ended_names(self.session);
        let contended = self.contended.get(&dir).is_some_and(|until| self.now < *until);
        let lease = &mut reply.entry.lease;
        lease.kind = match reply.numbers > 0 && !contended {
            true => {
                let end = InodeId(reply.first.0 + u64::from(reply.numbers));
                let numbers = Numbers { account: reply.account, next: reply.first, end };
                self.leases.grant_names(self.session, dir, numbers)
            }
            false => self.leases.kept(self.session, dir),
        };
        if lease.kind < LeaseKind::Write {
            (reply.first, reply.numbers, reply.layout) = (InodeId(0), 0, None);
        }
    }
    /// The names of a directory that was made just now. A repeated reply gives none: the session may have
    /// returned them since.
    pub fn new_names(&mut self, reply: &mut NamesLeased) {
        if self.first && reply.numbers > 0 {
            return self.names(reply.entry.attr.ino, reply);
        }
        (reply.first, reply.numbers, reply.layout) = (InodeId(0), 0, None);
        self.entry(&mut reply.entry);
    }
    /// A file that its client has held exclusively since it created it. The client reports its present number
    /// of opens, even if it has done so before on another connection.
    pub fn local_create(&mut self, dir: InodeId, created: &LocalCreate) {
        self.leases.use_number(dir, created.ino);
        self.leases.grant_write(self.session, created.ino);
        if self.first {
            let opens = Opens { read: created.open_read, write: created.open_write };
            self.leases.set_opens(self.session, created.ino, opens);
        }
    }
    /// A quota reservation.
    pub fn reserve(&mut self, account: Account, held: u64, (evicting, must): (bool, u64)) {
        self.quotas.set(account, self.session, held);
        if evicting && held < must {
            self.quotas.note_starved(account, self.session, must);
        }
    }
    /// The session has the append token no more.
    pub fn release_append_token(&mut self, ino: InodeId) {
        if self.leases.release_append_token(self.session, ino) {
            self.woken = Some(ino);
        }
    }
    /// An opened file.
    pub fn open(&mut self, entry: &mut Entry, read: bool, write: bool) {
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
