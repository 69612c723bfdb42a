//! Leases and the right to send: acquired from the leader, lowered, lost.
//!
//! Invariants: no byte is sent to targets before the leader expects uncommitted bytes on them; a lease that
//! is lowered, or lost, takes the bytes that it covered along. Writing back before that is the duty of
//! [`crate::revocation`].
use crate::base::Base;
use crate::inode::{Inline, Inode, State};
use crate::inodes::Inodes;
use crate::leader::Leader;
use crate::local_names::LocalNames;
use crate::losses::Losses;
use crate::memory::Memory;
use crate::quota::Quota;
use crate::reports::Reports;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::meta::{AcquireLease, Entry, LeaseKind, ReadInline};
use weir_proto::{Error, ErrorKind, Result};

/// A read for pages waits this long for a revoke that drops them. The drop may itself wait for pages that
/// this read has locked: then the read goes first, under the lease that is still held.
const PAGES_PAUSE: Duration = Duration::from_millis(5);
/// A request for attributes waits this long for pages that no lease protects: a read of them may hang at a
/// target.
const UNPROTECTED_PAGES_PAUSE: Duration = Duration::from_millis(100);

/// A fenced zeroing is retried this number of times, after pauses that double; a write as long as there is
/// time, after pauses that double this number of times.
const FENCED_TRIES_MAX: u32 = 8;
const FENCED_PAUSE_MS: u64 = 10;
/// Work that waits for the last step of a revoke checks again at this interval, even without a notification.
const REVOKE_POLL: Duration = Duration::from_millis(50);

/// The number of times that other clients fenced an operation, and its deadline.
pub struct Fences {
    met: u32,
    pub deadline: Instant,
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

pub struct Leases {
    env: Env,
    leader: Arc<Leader>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    losses: Arc<Losses>,
    quota: Arc<Quota>,
    local_names: Arc<LocalNames>,
}

impl Leases {
    pub fn new(base: &Base, reports: &Reports) -> Leases {
        let Base { env, leader, memory, inodes, losses, .. } = base.clone();
        let Reports { quota, local_names, .. } = reports.clone();
        Leases { env, leader, memory, inodes, losses, quota, local_names }
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

    /// The lease is returned down to `keep`, and what it covered is dropped.
    pub fn lower(&self, inode: &Inode, st: &mut State, keep: LeaseKind) {
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

    /// Returns when bytes of a file that other clients may have open can be sent straight to targets: under
    /// the Write lease, or with the leader's permission. A request is not counted as a send: it may wait for
    /// other clients' revokes, and those for their sends.
    pub async fn may_send<'a>(&self, inode: &'a Inode) -> Result<DirectSend<'a>> {
        let deadline = self.leader.deadline();
        self.local_names.await_known(inode).await?;
        loop {
            {
                let mut st = inode.lock();
                if st.may_send() {
                    return Ok(DirectSend { inode, counted_by: st.lease.begin_send() });
                }
            }
            if self.leader.left(deadline).is_zero() {
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
    pub async fn for_pages(&self, inode: &Inode, from: u64, to: u64) -> Result<()> {
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
        self.ask(inode, kind, false).await?;
        Ok(inode.lock().lease.kind())
    }

    pub async fn ask(&self, inode: &Inode, kind: LeaseKind, renew: bool) -> Result<Entry> {
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

    /// The lease is gone without a revoke: unsaved changes are lost, and recorded by name.
    pub fn lose(&self, inode: &Inode, why: &str) {
        let mut st = inode.lock();
        st.mark_revoked(self.inodes.tick_revoke_clock(), LeaseKind::None);
        if st.is_unsaved() {
            let e = Error::io(format!("file {}: {why}; changes that were not saved are lost", inode.ino));
            self.losses.log(&e);
            self.losses.note(inode.ino, &e);
            st.fail(e);
        }
        st.write.lose();
        st.accessed = None;
        st.lower_lease(LeaseKind::None);
        self.quota.settle(&mut st);
        self.memory.cache().remove_inode(inode.ino);
        self.inodes.forget_dirty(inode.ino);
        drop(st);
        inode.changed.notify_waiters();
    }

    /// Returns when no revoke of the lease is at its last step.
    pub async fn wait_for_revoke(&self, inode: &Inode) {
        loop {
            let changed = inode.changed.notified();
            if !inode.lock().lease.is_closing() {
                return;
            }
            // Ends with the revoke, which ends by its flush's deadlines.
            let _ = self.env.clock.timeout(REVOKE_POLL, changed).await;
        }
    }

    pub fn fences(&self) -> Fences {
        Fences { met: 0, deadline: self.leader.deadline() }
    }

    /// A send under the token epoch `refused` ended with `e`. If it was fenced: pauses, and acquires the
    /// right to send again.
    pub async fn go_on_after(
        &self,
        inode: &Inode,
        e: Error,
        refused: u32,
        fences: &mut Fences,
    ) -> Result<()> {
        if e.kind != ErrorKind::Stale || self.leader.left(fences.deadline).is_zero() {
            return Err(e);
        }
        fences.met = (fences.met + 1).min(FENCED_TRIES_MAX);
        // Concurrent truncations fence each other: a random pause lets one be first.
        let pause = self.env.rng.below(FENCED_PAUSE_MS << fences.met);
        self.env.clock.sleep(Duration::from_millis(pause)).await;
        // Or a snapshot holds the former object: the Write lease brings another object.
        self.acquire(inode, LeaseKind::Write).await?;
        self.pass_fence(inode, refused).await
    }

    /// A reader of the file in a snapshot has fenced the writes in flight then. If the snapshot is gone and
    /// no client has written since, the file still is in that object, and the leader knows of no fence: a
    /// newer token epoch passes it.
    pub async fn pass_fence(&self, inode: &Inode, refused: u32) -> Result<()> {
        if inode.lock().lease.token_epoch() <= refused {
            self.ask(inode, LeaseKind::Write, true).await?;
        }
        Ok(())
    }
}
