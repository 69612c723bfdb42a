//! What this client holds under its session: named on each new connection, reported as lost where it could
//! not be kept.
use crate::inode::{Inode, LocalState};
use crate::leader::{Holder, LostChange};
use crate::parts::Parts;
use std::sync::Arc;
use weir_env::{BoxFuture, Instant};
use weir_proto::lock::HeldLock;
use weir_proto::meta::HeldLease;
use weir_proto::quota::HeldSpace;
use weir_proto::{InodeId, Result};

impl Holder for Parts {
    fn begun(&self, connection: u64) -> Vec<HeldLease> {
        self.reports.closes.count_from(connection)
    }
    fn lost(&self, inodes: Vec<InodeId>) {
        for ino in inodes {
            self.reports
                .local_names
                .lose(ino, "the lease on its directory was lost in a restart of the metadata leader");
            // A file of a batch without an answer is created when the batch is sent again.
            let is_reported = |inode: &Arc<Inode>| inode.lock().local.state() == LocalState::Reporting;
            if let Some(inode) = self.base.inodes.known(ino).filter(|inode| !is_reported(inode)) {
                self.rights.leases.lose(&inode, "the lease was lost in a restart of the metadata leader");
            }
        }
        self.base.kernel.drop_all(self.base.inodes.all());
    }
    fn lost_changes(&self, lost: Vec<LostChange>) {
        for LostChange { places, error } in &lost {
            self.base.losses.log(error);
            for ino in places {
                self.base.losses.note(*ino, error);
                self.reports.local_names.note_lost(*ino, error);
                if let Some(inode) = self.base.inodes.known(*ino) {
                    self.rights.leases.lose(&inode, "a change was lost in a restart of the metadata leader");
                    inode.lock().fail(error.clone());
                }
            }
        }
        self.base.kernel.drop_all(self.base.inodes.all());
    }
    fn held_locks(&self) -> Vec<HeldLock> {
        self.locks.held()
    }
    fn lost_locks(&self, lost: Vec<HeldLock>) {
        self.locks.lose(&lost);
    }
    fn taken_up(&self) {
        self.locks.wake_all();
    }
    fn report_names(&self, deadline: Instant) -> Option<BoxFuture<'static, Result<()>>> {
        self.reports.local_names.report_all(deadline)
    }
    fn held_reservations(&self) -> Vec<HeldSpace> {
        self.reports.quota.held()
    }
    fn expired(&self) {
        self.reports.quota.expired();
        self.reports.local_names.lose_all("the session expired");
        self.locks.lose_all();
        let revoke_clock = self.base.inodes.mark_named();
        for inode in self.base.inodes.all() {
            {
                let mut st = inode.lock();
                st.lease.mark_named(revoke_clock);
                st.lease.take_append_token();
            }
            self.rights.leases.lose(&inode, "the session expired");
        }
        self.base.kernel.drop_all(self.base.inodes.all());
    }
}
