//! Revocation of leases: everything under a lease is written back and dropped, step by step, then the lease
//! is returned.
//!
//! Invariant: a revoke is answered only when all changes under the lease are committed, and neither this
//! client nor the kernel above it caches what the lease no longer covers. Until the answer the client holds
//! the lease and serves reads and writes from it, so a thread that waits for the kernel's page locks does
//! not wait for the leader.
mod steps;

use crate::accesses::Accesses;
use crate::base::Base;
use crate::closes::Closes;
use crate::crash_points;
use crate::inode::Inode;
use crate::kernel::{Kernel, UnprotectedPages};
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use crate::lent_names::LentNames;
use crate::local_names::LocalNames;
use crate::plan::Occasion;
use crate::reports::Reports;
use crate::rights::Rights;
use crate::status::Counters;
use crate::write_back::WriteBack;
use crate::writing::Writing;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use steps::{Facts, Next, Steps};
use weir_env::Env;
use weir_proto::ErrorKind;
use weir_proto::meta::{LeaseKind, LeaveInDoubt};

pub struct Revocation {
    env: Env,
    counters: Arc<Counters>,
    leader: Arc<Leader>,
    kernel: Arc<Kernel>,
    accesses: Arc<Accesses>,
    closes: Arc<Closes>,
    local_names: Arc<LocalNames>,
    leases: Arc<Leases>,
    lent_names: Arc<LentNames>,
    write_back: Arc<WriteBack>,
}

impl Revocation {
    pub fn new(base: &Base, reports: &Reports, rights: &Rights, writing: &Writing) -> Revocation {
        let Writing { write_back, .. } = writing.clone();
        let Base { env, counters, leader, kernel, accesses, lent_names, .. } = base.clone();
        let Reports { closes, local_names, .. } = reports.clone();
        let Rights { leases, .. } = rights.clone();
        Revocation {
            env,
            counters,
            leader,
            kernel,
            accesses,
            closes,
            local_names,
            leases,
            lent_names,
            write_back,
        }
    }

    /// Returns the lease, down to `keep`. Errors of write-back stay with the file's handles.
    pub async fn revoke(&self, inode: &Arc<Inode>, keep: LeaseKind) {
        self.counters.revokes.fetch_add(1, Relaxed);
        self.local_names.give_back(inode.ino).await;
        let revoke = inode.lock().lease.revokes();
        self.wait_for_sends(inode, revoke).await;
        if keep == LeaseKind::None {
            self.lent_names.end(inode).await;
        }
        {
            let mut st = inode.lock();
            if st.lease.kind() <= keep && !st.local.is_removed() {
                if keep == LeaseKind::None {
                    st.loans.end();
                }
                return;
            }
        }
        let mut steps = Steps::new(keep);
        loop {
            self.round(inode, &mut steps).await;
            match self.end_round(inode, &mut steps) {
                Next::Again { .. } => {}
                Next::Lower(_) => break,
                Next::ReportDoubt => {
                    self.leave_in_doubt(inode).await;
                    steps.note_doubt_reported();
                }
            }
        }
        self.accesses.report_of(inode).await;
        self.closes.report_of(inode.ino).await;
        inode.changed.notify_waiters();
        if steps.has_old_pages() {
            // It was read without a pause: the last pages are dropped soon, or with the next open.
            let unprotected = UnprotectedPages::of(inode, &mut inode.lock());
            self.kernel.drop_pages(unprotected);
        }
    }

    /// Writes back what was changed, and has the kernel drop what it keeps.
    async fn round(&self, inode: &Arc<Inode>, steps: &mut Steps) {
        let flushes = {
            let st = inode.lock();
            steps.needs_flush(st.lease.is_write(), st.is_unreported())
        };
        if flushes {
            // The inode keeps errors and reports them to its handles: the lease is returned all the same.
            let _ = self.write_back.flush(inode, Occasion::Closing, steps.drops_all()).await;
        }
        if steps.drops_all() {
            inode.lock().pages.begin_dropping();
        }
        for part in steps.take_old_pages() {
            self.kernel.invalidate(inode.ino, part).await;
        }
        // No flush waits for a range that is zeroed under the lease.
        self.wait_for_sends(inode, u64::MAX).await;
    }

    /// In one step with the decision, the lease is lowered, or new dirty data is refused.
    fn end_round(&self, inode: &Inode, steps: &mut Steps) -> Next {
        let mut st = inode.lock();
        let next = steps.after_round(Facts {
            is_unreported: st.is_unreported() || st.lease.has_sends_before(u64::MAX),
            is_in_doubt: st.is_in_doubt(),
            filled: st.pages.take_filled(),
        });
        match next {
            Next::Again { closing } => st.lease.note_closing(closing),
            Next::ReportDoubt => st.lease.note_closing(true),
            Next::Lower(keep) => {
                self.env.tasks.crash_point(crash_points::WRITTEN_BACK);
                self.leases.lower(inode, &mut st, keep);
            }
        }
        next
    }

    /// The Write lease is about to be returned, and a failed write has left a stripe in doubt: returns when
    /// the leader knows, which has the file recovered.
    async fn leave_in_doubt(&self, inode: &Inode) {
        let (ino, write_generation) = (inode.ino, inode.lock().write.generation());
        let still = || inode.check_generation(write_generation);
        let how = Change::repeatable().while_still(&still);
        loop {
            let reported = self.leader.change(how, |op| LeaveInDoubt { op, ino }).await;
            let Err(e) = reported else { return };
            if !matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline) {
                return; // lost with the session, whose end has the same effect, or the file is gone
            }
            tracing::warn!(
                "file {ino}: data in doubt after a failed write was not reported to the leader: {e}"
            );
        }
    }

    /// Returns when no send without a lease that began before the revoke is in flight.
    async fn wait_for_sends(&self, inode: &Inode, revoke: u64) {
        loop {
            let changed = inode.changed.notified();
            if !inode.lock().lease.has_sends_before(revoke) {
                return;
            }
            changed.await;
        }
    }
}
