//! Leases: acquired, returned on revoke, recovered after another writer's death.
//!
//! Invariant: a revoke is answered only when all changes under the lease are committed, and neither this
//! client nor the kernel above it caches what the lease no longer covers. Until the answer the client holds
//! the lease and serves reads and writes from it, so a thread that waits for the kernel's page locks does not
//! wait for the leader.
use crate::api::Forget;
use crate::crash_points;
use crate::inner::Inner;
use crate::inode::{Inline, Inode};
use crate::kernel::UnprotectedPages;
use crate::leader::Change;
use crate::plan::Occasion;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_proto::meta::{AcquireLease, Entry, LeaseKind, LeaveInDoubt, ReadInline};
use weir_proto::{Error, ErrorKind, Result};

/// Flushes of a file under constant writes; after them writers wait for the revoke.
const REVOKE_ROUNDS: u32 = 6;
/// Drops of pages of a file under constant reads. Reads wait for the revoke, too, but not for long.
const PAGE_ROUNDS: u32 = 64;

/// A read for pages waits this long for a revoke that drops them. The drop may itself wait for pages that
/// this read has locked: then the read goes first, under the lease that is still held.
const PAGES_PAUSE: Duration = Duration::from_millis(5);
/// A request for attributes waits this long for pages that no lease protects: a read of them may hang at a
/// target.
const UNPROTECTED_PAGES_PAUSE: Duration = Duration::from_millis(100);

/// How a round of a revoke ended.
enum Round {
    /// More was written, or pages were filled, meanwhile.
    Again,
    /// The lease is returned.
    Ended,
    /// The leader must learn first that a failed write left something in doubt.
    InDoubt,
}

/// Bytes being sent without a lease: a revoke that comes meanwhile waits for them.
pub struct DirectSend<'a> {
    inode: &'a Inode,
    counted_by: u64,
}

impl Drop for DirectSend<'_> {
    fn drop(&mut self) {
        self.inode.lock().lease.end_send(self.counted_by);
        self.inode.changed.notify_waiters();
    }
}

impl Inner {
    /// Returns the lease, down to `keep`. Errors of write-back stay with the file's handles.
    pub async fn revoke(&self, inode: &Arc<Inode>, mut keep: LeaseKind) {
        self.counters.revokes.fetch_add(1, Relaxed);
        self.local_names.give_back(inode.ino).await;
        let revoke = inode.lock().lease.revokes();
        self.wait_for_sends(inode, revoke).await;
        if keep == LeaseKind::None {
            self.lent_names.end(inode).await;
        }
        {
            let mut st = inode.lock();
            if st.lease.kind() <= keep {
                if keep == LeaseKind::None {
                    st.loans.end();
                }
                return;
            }
        }
        let mut old_pages = if keep == LeaseKind::None { vec![Forget::All] } else { Vec::new() };
        let mut in_doubt_reported = false;
        for round in 0.. {
            // Under a Read lease nothing is changed. Waiting for a flush, which may itself wait for others'
            // leases, could be a deadlock.
            let writes = {
                let st = inode.lock();
                (st.lease.is_write() && !in_doubt_reported) || st.is_unreported()
            };
            if writes {
                // The inode keeps errors and reports them to its handles: the lease is returned all the same.
                let _ = self.flush(inode, Occasion::Closing, keep == LeaseKind::None).await;
            }
            if keep == LeaseKind::None {
                inode.lock().pages.begin_dropping();
            }
            for part in std::mem::take(&mut old_pages) {
                self.kernel.invalidate(inode.ino, part).await;
            }
            // No flush waits for a range that is zeroed under the lease.
            self.wait_for_sends(inode, u64::MAX).await;
            match self.end_round(inode, (round, in_doubt_reported), keep, &mut old_pages) {
                Round::Again => continue,
                Round::Ended => break,
                Round::InDoubt => {}
            }
            self.leave_in_doubt(inode).await;
            in_doubt_reported = true;
            // Not even for itself: bytes that it reads there may change later.
            keep = LeaseKind::None;
            old_pages.push(Forget::All);
        }
        self.accesses.report_of(inode).await;
        self.closes.report_of(inode.ino).await;
        inode.changed.notify_waiters();
        if !old_pages.is_empty() {
            // It was read without a pause: the last pages are dropped soon, or with the next open.
            let unprotected = UnprotectedPages::of(inode, &mut inode.lock());
            self.kernel.drop_pages(unprotected);
        }
    }

    /// After a flush and the dropping of pages. `so_far`: rounds before this one, and whether doubts were
    /// reported.
    fn end_round(
        &self,
        inode: &Inode,
        (round, in_doubt_reported): (u32, bool),
        keep: LeaseKind,
        old_pages: &mut Vec<Forget>,
    ) -> Round {
        let mut st = inode.lock();
        // Pages that were filled since are old as soon as the lease is gone: they are dropped first.
        let filled = st.pages.take_filled();
        old_pages.extend(filled.into_iter().map(|(from, to)| Forget::Part(from, to - from)));
        let written = (st.is_unreported() || st.lease.has_sends_before(u64::MAX)) && round < REVOKE_ROUNDS;
        if written && keep == LeaseKind::None {
            *old_pages = vec![Forget::All]; // a write fills pages, too
        }
        if written || (!old_pages.is_empty() && round < PAGE_ROUNDS) {
            st.lease.note_closing(in_doubt_reported || round + 1 >= REVOKE_ROUNDS);
            return Round::Again;
        }
        if in_doubt_reported || !st.is_in_doubt() {
            self.env.tasks.crash_point(crash_points::WRITTEN_BACK);
            self.drop_under_lease(inode, &mut st, keep);
            return Round::Ended;
        }
        st.lease.note_closing(true);
        Round::InDoubt
    }

    /// Called before the kernel learns a size: it would show the rest of a page from before that, zeros, as
    /// part of the file.
    pub async fn wait_for_unprotected_pages(&self, inode: &Inode) {
        let until = self.env.clock.now() + UNPROTECTED_PAGES_PAUSE;
        loop {
            let changed = inode.changed.notified();
            let left = until.since(self.env.clock.now());
            if !inode.lock().pages.has_unprotected() || left.is_zero() {
                return;
            }
            let _ = self.env.clock.timeout(left, changed).await; // checks again either way
        }
    }

    pub fn drop_under_lease(&self, inode: &Inode, st: &mut crate::inode::State, keep: LeaseKind) {
        if st.is_unsaved() {
            let e = Error::io(format!(
                "file {}: changes could not be saved before another client needed it",
                inode.ino
            ));
            self.losses.log(&e);
            self.losses.note(inode.ino, &e);
            st.fail(e);
            st.write.drop_dirty();
        }
        st.lease.note_closing(false);
        st.pages.end_dropping();
        st.lower_lease(keep);
        self.quota.settle(st);
        if keep == LeaseKind::None {
            self.memory.cache().remove_inode(inode.ino);
        }
        self.inodes.forget_if_saved(inode.ino, st);
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
                "file {ino}: the leader was not notified of data in doubt after a failed write: {e}"
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

    /// Returns when bytes of a file that other clients may have open can be sent straight to targets: under
    /// the Write lease, or with the leader's permission. A request is not counted as a send: it may wait for
    /// other clients' revokes, and those for their sends.
    pub async fn may_send_direct<'a>(&self, inode: &'a Inode) -> Result<DirectSend<'a>> {
        let deadline = self.leader.deadline();
        self.local_names.await_known(inode).await?;
        loop {
            {
                let mut st = inode.lock();
                if st.may_send() {
                    return Ok(DirectSend { inode, counted_by: st.lease.begin_send() });
                }
            }
            if self.data.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "write file {}: readers on other clients revoke its write lease each time",
                    inode.ino
                )));
            }
            if inode.lock().write.is_declared_unclean() {
                self.acquire(inode, LeaseKind::Write).await?;
            } else {
                self.mark(inode).await?;
            }
        }
    }

    /// Returns when the leader knows that uncommitted bytes may be on targets from now on. Of concurrent
    /// sends the first asks, and none starts before the answer.
    pub async fn mark(&self, inode: &Inode) -> Result<()> {
        while !inode.lock().write.is_declared_unclean() {
            let _one = inode.marking.lock().await;
            let reported = self.inodes.tick_revoke_clock();
            if inode.lock().write.is_clean_by_now(reported) {
                self.acquire(inode, LeaseKind::Write).await?;
            }
        }
        Ok(())
    }

    /// Asks for a lease for bytes that the kernel will keep as pages, of a file that was opened under a lease
    /// and is shared now. Not if this client writes it, too: two such clients would each wait, with pages
    /// locked, for the other's.
    pub async fn lease_for_pages(&self, inode: &Inode, from: u64, to: u64) -> Result<()> {
        self.wait_for_dropping(inode, from, to).await;
        let asks = {
            let st = inode.lock();
            !st.lease.is_held() && !st.opens.is_for_writing()
        };
        if asks {
            self.acquire(inode, LeaseKind::Read).await?;
        }
        Ok(())
    }

    /// A read for pages of `from..to` waits for the revoke that drops others.
    async fn wait_for_dropping(&self, inode: &Inode, from: u64, to: u64) {
        if !inode.lock().pages.begin_wait(from, to) {
            return;
        }
        let until = self.env.clock.now() + PAGES_PAUSE;
        loop {
            let changed = inode.changed.notified();
            if !inode.lock().pages.is_dropping() {
                return;
            }
            let left = until.since(self.env.clock.now());
            if left.is_zero() {
                break;
            }
            let _ = self.env.clock.timeout(left, changed).await; // checks again either way
        }
        inode.lock().pages.end_wait(from, to);
    }

    /// Asks for a lease; returns the kind held afterwards.
    pub async fn acquire(&self, inode: &Inode, kind: LeaseKind) -> Result<LeaseKind> {
        self.ask_lease(inode, kind, false).await?;
        Ok(inode.lock().lease.kind())
    }

    pub async fn ask_lease(&self, inode: &Inode, kind: LeaseKind, renew: bool) -> Result<Entry> {
        let revoke_clock = self.inodes.revoke_clock();
        let ino = inode.ino;
        let ask = |session| AcquireLease { session, ino, kind, renew };
        let entry = self.leader.ask(ask).await?;
        self.inodes.apply(&entry, revoke_clock);
        if kind == LeaseKind::Write {
            let mut st = inode.lock();
            st.write.asked_for_write(revoke_clock);
            st.quota.note_lease(&entry);
            if !st.lease.is_write() {
                st.note_direct(revoke_clock);
            }
        }
        Ok(entry)
    }

    /// Attributes and inline data, fresh from the leader, with the lease that it grants.
    pub async fn refresh(&self, inode: &Inode) -> Result<()> {
        let revoke_clock = self.inodes.revoke_clock();
        let ino = inode.ino;
        let fresh = self.leader.ask(|session| ReadInline { session, ino }).await?;
        // In one step: no reader sees this size with other bytes.
        let mut st = inode.lock();
        self.inodes.apply_to(&mut st, &fresh.entry, revoke_clock);
        // Dirty bytes are put over the inline bytes, which must be known for that.
        let wants = !st.is_dirty() || st.inline == Inline::Unknown;
        if wants && st.is_of_version(&fresh.entry) {
            st.inline = fresh.data.map_or(Inline::No, Inline::Yes);
        }
        Ok(())
    }
}
