//! The rooms of one client, made from the ground up: each gets those that it needs of the ones before it.
use crate::base::Base;
use crate::files::Files;
use crate::idle::Idle;
use crate::locks::Locks;
use crate::mover::Mover;
use crate::names::Names;
use crate::reader::Reader;
use crate::reports::Reports;
use crate::revocation::Revocation;
use crate::rights::Rights;
use crate::seek::Seek;
use crate::snapshots::Snapshots;
use crate::types::ClientStatus;
use crate::writing::Writing;
use std::sync::Arc;

pub struct Parts {
    pub base: Base,
    pub reports: Reports,
    pub rights: Rights,
    pub writing: Writing,
    pub locks: Arc<Locks>,
    pub reader: Arc<Reader>,
    pub seek: Arc<Seek>,
    pub revocation: Arc<Revocation>,
    pub idle: Arc<Idle>,
    pub names: Arc<Names>,
    pub files: Arc<Files>,
    pub snapshots: Arc<Snapshots>,
    pub mover: Arc<Mover>,
}

impl Parts {
    pub fn new(base: Base) -> Parts {
        let reports = Reports::new(&base);
        let rights = Rights::new(&base, &reports);
        let locks = Arc::new(Locks::new(&base));
        let writing = Writing::new(&base, &reports, &rights);
        let reader = Arc::new(Reader::new(&base, &rights));
        let seek = Arc::new(Seek::new(&base, &rights, &writing, reader.clone()));
        let revocation = Arc::new(Revocation::new(&base, &reports, &rights, &writing));
        let idle = Arc::new(Idle::new(&base, &reports, &rights, &writing, revocation.clone()));
        let names = Arc::new(Names::new(&base, &reports, &rights, &writing));
        let files = Arc::new(Files::new(&base, &reports, &rights, &writing, locks.clone(), names.clone()));
        let snapshots = Arc::new(Snapshots::new(&base, &rights, reader.clone(), files.clone()));
        let mover = Arc::new(Mover::new(&base, &rights, files.clone()));
        Parts {
            base,
            reports,
            rights,
            writing,
            locks,
            reader,
            seek,
            revocation,
            idle,
            names,
            files,
            snapshots,
            mover,
        }
    }

    /// Panics where an invariant of an inode's state, or of a table, does not hold.
    pub fn check(&self) {
        self.base.inodes.check();
        self.reports.closes.check();
        self.reports.local_names.check();
        self.locks.check();
    }
    pub fn status(&self) -> ClientStatus {
        self.base.counters.snapshot(self.base.memory.budget(), self.base.inodes.count())
    }
}
