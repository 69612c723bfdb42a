//! Leases: asked for, given back on revoke, recovered after another writer's death.
//!
//! Invariant: a revoke is answered only when everything changed under the lease is committed, and neither
//! this client nor the kernel above it caches what the lease no longer covers. While it is being answered the
//! client holds the lease and serves reads and writes from it, so nobody who waits for the kernel's page
//! locks waits for the leader.
use crate::api::Forget;
use crate::crash_points;
use crate::data::{Done, Overlay, StripeRef};
use crate::flush::check_write_generation;
use crate::inner::{Inner, layout_of};
use crate::inode::{Inline, Inode, State};
use crate::plan::{Occasion, first_stripe_past};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, Weak};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::lock::LockFree;
use weir_proto::meta::{
    AcquireLease, Cred, Entry, LeaseKind, LeaveInDoubt, ReadInline, RecoverFile, Recovered, ReleaseLease,
    Revoke,
};
use weir_proto::recall::EvictOwn;
use weir_proto::{Error, ErrorKind, InodeId, PgId, Request, Result, Version};
use weir_rpc::{Call, Handled, Reply, Service};

/// Flushes of a file that is written all the while; after them writers wait for the revoke.
const REVOKE_ROUNDS: u32 = 6;
/// Times that pages are dropped of a file that is read all the while. Reads wait for the revoke, too, but not
/// for long.
const PAGE_ROUNDS: u32 = 64;

/// Times that a file's recovery is begun because opens of this client cross it.
const RECOVERIES_MAX: u32 = 8;
/// Between looks whether another client has recovered a file, or who has what is to be committed is back.
const RECOVERY_POLL: Duration = Duration::from_millis(50);

/// A read for pages waits so long for a revoke that has them dropped. That may itself wait for pages that
/// this read has locked: then the read goes first, under the lease that is still here.
const PAGES_PAUSE: Duration = Duration::from_millis(5);
/// Who asks for attributes waits so long for pages that no lease protects: a read of them may hang at a
/// target.
const UNPROTECTED_PAGES_PAUSE: Duration = Duration::from_millis(100);

/// Bytes that are being sent past what others might cache: a revoke that comes meanwhile waits for them.
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

/// Pages in the kernel that no lease protects, of a read or write that is under way or was just answered.
pub struct UnprotectedPages(Arc<Inode>);

impl UnprotectedPages {
    /// `st`: of that node; not to be locked where this is dropped.
    pub fn of(inode: &Arc<Inode>, st: &mut State) -> UnprotectedPages {
        st.pages.begin_unprotected();
        UnprotectedPages(inode.clone())
    }
}
impl Drop for UnprotectedPages {
    fn drop(&mut self) {
        self.0.lock().pages.end_unprotected();
        self.0.changed.notify_waiters();
    }
}

/// Serves the leader's calls back.
#[derive(Default)]
pub struct Callbacks(Mutex<Option<Weak<Inner>>>);

impl Callbacks {
    pub fn set(&self, inner: Weak<Inner>) {
        *self.0.lock().expect("no holder panics") = Some(inner);
    }
    fn client(&self) -> Option<Arc<Inner>> {
        self.0.lock().expect("no holder panics").as_ref().and_then(Weak::upgrade)
    }
}

impl Callbacks {
    fn evict_own(&self, call: &Call) -> Handled {
        let asked = match call.decode::<EvictOwn>() {
            Ok(asked) => asked,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        Handled::Later(Box::pin(async move {
            if let Some(inode) =
                client.known_inode(asked.ino).filter(|inode| client.is_open_for_writing(inode))
            {
                let root = Cred { uid: 0, gid: 0, groups: vec![0] };
                client.evict_own(&root, &inode, asked.from, asked.to).await?;
            }
            Ok(Reply::new(&()))
        }))
    }

    fn recover_file(&self, call: &Call) -> Handled {
        let ino = match call.decode::<RecoverFile>() {
            Ok(asked) => asked.ino,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        Handled::Later(Box::pin(async move {
            client.decide_what_was_left(ino).await?;
            Ok(Reply::new(&()))
        }))
    }
}

impl Service for Callbacks {
    fn handle(&self, call: Call) -> Handled {
        if call.method == LockFree::METHOD {
            let hint = call.decode::<LockFree>();
            if let (Ok(hint), Some(client)) = (&hint, self.client()) {
                client.locks.wake(hint.ticket);
            }
            return Handled::Now(hint.map(|_| Reply::new(&())));
        }
        if call.method == EvictOwn::METHOD {
            return self.evict_own(&call);
        }
        if call.method == RecoverFile::METHOD {
            return self.recover_file(&call);
        }
        if call.method != Revoke::METHOD {
            return Handled::Now(Err(call.unknown()));
        }
        let revoke = match call.decode::<Revoke>() {
            Ok(revoke) => revoke,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        // The clock orders this revoke with the replies around it: taken here, in the order of arrival.
        let inode = client.inode(revoke.ino);
        let revoke_clock = client.tick_revoke_clock();
        inode.lock().mark_revoked(revoke_clock, revoke.keep);
        Handled::Later(Box::pin(async move {
            client.revoke(&inode, revoke.keep).await;
            Ok(Reply::new(&()))
        }))
    }
}

impl Inner {
    /// Gives the lease back, down to `keep`. Errors of write-back stay with the file's handles.
    pub async fn revoke(&self, inode: &Arc<Inode>, mut keep: LeaseKind) {
        self.counters.revokes.fetch_add(1, Relaxed);
        let revoke = inode.lock().lease.revokes();
        self.wait_for_sends(inode, revoke).await;
        if keep == LeaseKind::None {
            self.end_loans(inode).await;
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
            // Under a right to read nothing is changed. To wait for a flush, which may itself wait for
            // others' leases, would be to wait in a circle.
            let writes = {
                let st = inode.lock();
                (st.lease.is_write() && !in_doubt_reported) || st.is_unsaved()
            };
            if writes {
                // Errors are kept by the inode and told to its handles: the lease goes back all the same.
                let _ = self.flush(inode, Occasion::Closing, keep == LeaseKind::None).await;
            }
            if keep == LeaseKind::None {
                inode.lock().pages.begin_dropping();
            }
            for part in std::mem::take(&mut old_pages) {
                self.invalidate(inode.ino, part).await;
            }
            // No flush waits for a range that is zeroed under the lease.
            self.wait_for_sends(inode, u64::MAX).await;
            {
                let mut st = inode.lock();
                // Pages that were filled since are old as soon as the lease is gone: they go first.
                let filled = st.pages.take_filled();
                old_pages.extend(filled.into_iter().map(|(from, to)| Forget::Part(from, to - from)));
                let written =
                    (st.is_unsaved() || st.lease.has_sends_before(u64::MAX)) && round < REVOKE_ROUNDS;
                if written && keep == LeaseKind::None {
                    old_pages = vec![Forget::All]; // to write is to fill pages, too
                }
                if written || (!old_pages.is_empty() && round < PAGE_ROUNDS) {
                    st.lease.note_closing(in_doubt_reported || round + 1 >= REVOKE_ROUNDS);
                    continue;
                }
                if in_doubt_reported || !st.is_in_doubt() {
                    self.env.tasks.crash_point(crash_points::WRITTEN_BACK);
                    self.drop_under_lease(inode, &mut st, keep);
                    break;
                }
                st.lease.note_closing(true);
            }
            self.leave_in_doubt(inode).await;
            in_doubt_reported = true;
            // Not even for itself: what it reads there may be another tomorrow.
            keep = LeaseKind::None;
            old_pages.push(Forget::All);
        }
        self.report_access_of(inode).await;
        self.report_close_of(inode.ino).await;
        inode.changed.notify_waiters();
        if !old_pages.is_empty() {
            // It was read without a pause: what came in at last goes soon, or with the next open.
            let unprotected = UnprotectedPages::of(inode, &mut inode.lock());
            self.drop_unprotected_pages(unprotected);
        }
    }

    /// The kernel drops the file's pages, soon: who waits for the answer to a read or write has some of them
    /// locked.
    pub fn drop_unprotected_pages(&self, unprotected: UnprotectedPages) {
        let me = self.arc();
        self.env.tasks.spawn("drop unprotected pages", async move {
            me.invalidate(unprotected.0.ino, Forget::All).await;
            drop(unprotected);
        });
    }

    /// Before the kernel hears of a size: it would show the rest of a page from before that, zeros, as part
    /// of the file.
    pub async fn wait_for_unprotected_pages(&self, inode: &Inode) {
        let until = self.env.clock.now() + UNPROTECTED_PAGES_PAUSE;
        loop {
            let changed = inode.changed.notified();
            let left = until.since(self.env.clock.now());
            if !inode.lock().pages.has_unprotected() || left.is_zero() {
                return;
            }
            let _ = self.env.clock.timeout(left, changed).await; // looks again either way
        }
    }

    fn drop_under_lease(&self, inode: &Inode, st: &mut crate::inode::State, keep: LeaseKind) {
        if st.is_unsaved() {
            let e = Error::io(format!(
                "file {}: changes could not be saved before another client needed it",
                inode.ino
            ));
            tracing::error!("{e}");
            self.note_loss(inode.ino, &e);
            st.fail(e);
            st.write.drop_dirty();
        }
        st.lease.note_closing(false);
        st.pages.end_dropping();
        st.lower_lease(keep);
        self.settle_reservation(st);
        if keep == LeaseKind::None {
            self.cache().remove_inode(inode.ino);
        }
        self.forget_if_saved(inode.ino, st);
    }

    /// The right to write is about to be given back, and a write that failed has left a stripe in doubt:
    /// returns when the leader knows, which has the file recovered.
    async fn leave_in_doubt(&self, inode: &Inode) {
        let (ino, write_generation) = (inode.ino, inode.lock().write.generation());
        let still = || check_write_generation(inode, write_generation);
        loop {
            let reported =
                self.session.change_while(self.deadline(), still, |op| LeaveInDoubt { op, ino }).await;
            let Err(e) = reported else { return };
            if !matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline) {
                return; // the right was lost with the session, whose end has the same effect, or the file is gone
            }
            tracing::warn!("file {ino}: the leader was not told of what a failed write left in doubt: {e}");
        }
    }

    /// Returns when nothing that was sent past leases before a revoke is under way.
    async fn wait_for_sends(&self, inode: &Inode, revoke: u64) {
        loop {
            let changed = inode.changed.notified();
            if !inode.lock().lease.has_sends_before(revoke) {
                return;
            }
            changed.await;
        }
    }

    /// Returns when bytes of a file that others may have open can be sent straight to targets: under the
    /// Write lease, or with the leader's word. Nothing that is asked is counted as a send: what is asked may
    /// wait for others' revokes, and theirs for their sends.
    pub async fn may_send_direct<'a>(&self, inode: &'a Inode) -> Result<DirectSend<'a>> {
        let deadline = self.deadline();
        loop {
            {
                let mut st = inode.lock();
                if st.may_send() {
                    return Ok(DirectSend { inode, counted_by: st.lease.begin_send() });
                }
            }
            if self.data.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "write file {}: who reads it elsewhere takes the word to write it back each time",
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

    /// Returns when the leader knows that something uncommitted may be on targets from now on. Of all that is
    /// sent at once the first asks, and nothing goes before the answer.
    pub async fn mark(&self, inode: &Inode) -> Result<()> {
        while !inode.lock().write.is_declared_unclean() {
            let _one = inode.marking.lock().await;
            let reported = self.tick_revoke_clock();
            if inode.lock().write.is_clean_by_now(reported) {
                self.acquire(inode, LeaseKind::Write).await?;
            }
        }
        Ok(())
    }

    /// Asks for a lease for bytes that the kernel will keep as pages, of a file that was opened under a lease
    /// and is shared now. Not where this client writes it, too: two such would each wait, with pages locked,
    /// for the other's.
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

    /// A read for pages of `from..to` waits for the revoke that has others dropped.
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
            let _ = self.env.clock.timeout(left, changed).await; // looks again either way
        }
        inode.lock().pages.end_wait(from, to);
    }

    pub async fn invalidate(&self, ino: InodeId, what: Forget) {
        let kernel = self.kernel.clone();
        self.env.tasks.blocking(move || kernel.invalidate_inode(ino, what)).await;
    }

    /// Returns a lease that is not in use.
    async fn release_lease(&self, inode: &Arc<Inode>) -> Result<()> {
        self.flush(inode, Occasion::Closing, false).await?;
        {
            let mut st = inode.lock();
            // The kernel may have been told of it again meanwhile.
            let in_use = !st.forgotten || st.loans.are_open(self.env.clock.now());
            if st.is_dirty() || !st.lease.is_held() || in_use {
                return Ok(());
            }
            st.mark_revoked(self.tick_revoke_clock(), LeaseKind::None);
            self.drop_under_lease(inode, &mut st, LeaseKind::None);
        }
        self.report_access_of(inode).await;
        self.report_close_of(inode.ino).await;
        let ino = inode.ino;
        let release = |session| ReleaseLease { session, ino, keep: LeaseKind::None };
        let answer = self.session.ask(self.deadline(), release).await;
        // Grants of requests that crossed the release do not count.
        inode.lock().mark_revoked(self.tick_revoke_clock(), LeaseKind::None);
        answer
    }

    /// Asks for a lease; what is held afterwards.
    pub async fn acquire(&self, inode: &Inode, kind: LeaseKind) -> Result<LeaseKind> {
        self.ask_lease(inode, kind, false).await?;
        Ok(inode.lock().lease.kind())
    }

    pub async fn ask_lease(&self, inode: &Inode, kind: LeaseKind, renew: bool) -> Result<Entry> {
        let revoke_clock = self.revoke_clock();
        let ino = inode.ino;
        let ask = |session| AcquireLease { session, ino, kind, renew };
        let entry = self.session.ask(self.deadline(), ask).await?;
        self.apply(&entry, revoke_clock);
        if kind == LeaseKind::Write {
            let mut st = inode.lock();
            st.write.asked_for_write(revoke_clock);
            st.quota.note_limit(entry.lease.limited);
            if !st.lease.is_write() {
                st.note_direct(revoke_clock);
            }
        }
        Ok(entry)
    }

    /// Attributes and inline data, fresh from the leader, with what lease it grants.
    pub async fn refresh(&self, inode: &Inode) -> Result<()> {
        let revoke_clock = self.revoke_clock();
        let ino = inode.ino;
        let fresh = self.session.ask(self.deadline(), |session| ReadInline { session, ino }).await?;
        // In one step: nobody sees this size with other bytes.
        let mut st = inode.lock();
        self.apply_to(&mut st, &fresh.entry, revoke_clock);
        // What is dirty goes over what the inode holds, and must know of it.
        let wants = !st.is_dirty() || st.inline == Inline::Unknown;
        if wants && st.is_of_version(&fresh.entry) {
            st.inline = fresh.data.map_or(Inline::No, Inline::Yes);
        }
        Ok(())
    }

    /// Finishes what a dead writer left: fences it, decides prepared stripes, truncates what was never
    /// committed.
    pub async fn recover(&self, inode: &Arc<Inode>) -> Result<()> {
        let (mut crossed, deadline) = (0, self.deadline());
        loop {
            self.wait_to_recover(inode, deadline).await?;
            let _one = inode.flushing.lock().await;
            if !inode.lock().lease.needs_recovery() {
                return Ok(());
            }
            // Others of this client may have given the right back meanwhile.
            if self.acquire(inode, LeaseKind::Write).await? != LeaseKind::Write {
                continue;
            }
            match self.recover_locked(inode).await {
                // Another open of this client took the right to write anew meanwhile: once more, under its
                // epoch.
                Err(e) if e.kind == ErrorKind::Stale && crossed < RECOVERIES_MAX => {
                    crossed += 1;
                    tracing::debug!("file {}: {e}", inode.ino);
                }
                done => return done,
            }
        }
    }

    /// Until this client may recover the file, or another one has. Without the lock on flushes: the holder of
    /// its append token needs that to end it, and until then nobody gets the right.
    async fn wait_to_recover(&self, inode: &Inode, deadline: Instant) -> Result<()> {
        while inode.lock().lease.needs_recovery() {
            let granted = self.acquire(inode, LeaseKind::Write).await?;
            if inode.lock().lease.needs_recovery() && self.data.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "file {}: its last writer died, and its recovery by another client does not end",
                    inode.ino
                )));
            }
            if granted == LeaseKind::Write {
                return Ok(());
            }
            self.env.clock.sleep(RECOVERY_POLL).await;
        }
        Ok(())
    }

    async fn recover_locked(&self, inode: &Arc<Inode>) -> Result<()> {
        let (layout, object, size, token_epoch, recover) = {
            let st = inode.lock();
            let layout = layout_of(&st, inode.ino);
            (
                layout,
                st.object(inode.ino),
                st.committed_size(),
                st.lease.token_epoch(),
                st.lease.needs_recovery(),
            )
        };
        if !recover {
            return Ok(());
        }
        if let Ok(layout) = layout {
            let past = first_stripe_past(size, layout.stripe_bytes());
            let doubt = self
                .data
                .drop_file(self.file_id(object), &layout, past, token_epoch, self.deadline())
                .await?;
            let mut in_doubt: Vec<(u64, PgId, Version)> = doubt
                .iter()
                .filter(|p| p.cell.stripe < past)
                .map(|p| (p.cell.stripe, p.group, p.version))
                .collect();
            in_doubt.dedup();
            for (stripe, _, version) in in_doubt {
                let s = self.stripe_ref(object, layout, stripe, self.deadline());
                self.decide(s, version, token_epoch).await?;
            }
            self.zero_tail(inode, layout, size, u64::MAX, token_epoch).await?;
        }
        let revoke_clock = self.revoke_clock();
        let ino = inode.ino;
        let entry =
            self.session.change_again(self.deadline(), |op| Recovered { op, ino, token_epoch }).await?;
        tracing::info!("file {ino}: recovered after its writer's death, {size} bytes");
        self.apply(&entry, revoke_clock);
        let mut st = inode.lock();
        st.lease.note_recovery(false);
        let is_ours = st.lease.is_write();
        st.write.note_tail(is_ours);
        Ok(())
    }

    /// A prepared stripe of a dead writer, or of a failed write: one committed fragment, or k prepared ones,
    /// commit it; fewer drop it.
    pub async fn decide(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        loop {
            // Of all who are current: one that only did not answer may be the one that has committed it; and
            // who is behind may have what was given up while it was away.
            let stats = self.data.stat_current(&s).await?;
            let is_committed = stats.iter().any(|stat| stat.base == version);
            let prepared = stats.iter().filter(|stat| stat.prepared.contains(&version)).count();
            if !is_committed && prepared < usize::from(s.layout.scheme.data) {
                return self.data.drop_prepared(s, version, token_epoch).await;
            }
            match Box::pin(self.commit_held(s, version, token_epoch)).await {
                // Who had it went away before all had it, so nobody has committed it: once more.
                Err(e) if e.kind == ErrorKind::NotFound && !self.data.left(s.deadline).is_zero() => {
                    tracing::debug!("{s}: {e}");
                    self.env.clock.sleep(RECOVERY_POLL).await;
                }
                done => return done,
            }
        }
    }
    async fn commit_held(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        let mut done = Done::new();
        loop {
            let held = self.data.hold_stripe(s, version, token_epoch).await?;
            if self.data.commit_stripe(s, version, token_epoch, held, &mut done).await? {
                return Ok(());
            }
        }
    }

    /// Zeroes `size..end` within the stripe that holds `size`.
    pub async fn zero_tail(
        &self,
        inode: &Inode,
        layout: weir_proto::map::Layout,
        size: u64,
        end: u64,
        token_epoch: u32,
    ) -> Result<()> {
        let stripe = layout.stripe_of(size);
        let stripe_end = layout.stripe_start(stripe) + layout.stripe_bytes();
        // A stripe that is at home only comes back without what is past the size. It may have come back with
        // it, before the file was truncated: what was known of that is old.
        inode.lock().tier.forget_evicted();
        let comes_clean =
            self.is_away(inode, size, size + 1).await? || self.has_layers(inode, size, size + 1).await?;
        if size.is_multiple_of(layout.stripe_bytes()) || comes_clean {
            return Ok(());
        }
        let len = end.min(stripe_end).saturating_sub(size);
        let overlays: Vec<Overlay> = layout
            .pieces(size, len)
            .map(|p| Overlay { index: p.cell, offset: p.offset, len: p.len, payload: None })
            .collect();
        let s = self.stripe_ref(inode.lock().object(inode.ino), layout, stripe, self.deadline());
        self.data.write_overlays(s, token_epoch, &overlays).await
    }

    /// Before a file grows over bytes of an earlier, longer one: truncates and zeroes them.
    pub async fn clean_old_tail(&self, inode: &Inode) -> Result<()> {
        let _one = inode.flushing.lock().await;
        self.clean_old_tail_locked(inode).await
    }

    pub async fn clean_old_tail_locked(&self, inode: &Inode) -> Result<()> {
        while inode.lock().has_old_tail() {
            if self.clean_once(inode).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// False: the right to write came anew meanwhile, so others may have written and truncated.
    async fn clean_once(&self, inode: &Inode) -> Result<bool> {
        let layout = layout_of(&inode.lock(), inode.ino)?;
        // A token epoch of its own: nothing older past the size that came with it counts any more, whoever
        // wrote it.
        let entry = self.ask_lease(inode, LeaseKind::Write, true).await?;
        let (write_generation, is_alone) = {
            let st = inode.lock();
            (st.write.generation(), st.lease.is_write() || st.lease.has_append_token())
        };
        if !is_alone {
            // What others write past the size from now on is not old.
            return Err(Error::stale(format!(
                "file {}: others write it, too, now: what is old goes under the append token",
                inode.ino
            )));
        }
        let (size, end, token_epoch) = (entry.attr.size, entry.lease.data_end, entry.lease.token_epoch);
        if end > size {
            let past = first_stripe_past(size, layout.stripe_bytes());
            let file = self.file_id(entry.attr.layers.map_or(inode.ino, |l| l.object));
            self.data.drop_file(file, &layout, past, token_epoch, self.deadline()).await?;
            self.zero_tail(inode, layout, size, end, token_epoch).await?;
        }
        {
            let mut st = inode.lock();
            if st.lease.is_write() {
                let same = st.write.generation() == write_generation;
                if same {
                    st.write.note_tail(true);
                }
                return Ok(same);
            }
            st.write.note_cleaned_past(size); // also what was sent past it before
        }
        if entry.lease.recover {
            return Ok(true); // another writer died: whoever recovers the file says it
        }
        // Others write this file, too: they need not do the same.
        let (revoke_clock, ino) = (self.revoke_clock(), inode.ino);
        match self.session.change_again(self.deadline(), |op| Recovered { op, ino, token_epoch }).await {
            Ok(entry) => drop(self.apply(&entry, revoke_clock)),
            // Somebody else has truncated it since, and says it.
            Err(e) if e.kind == ErrorKind::Stale => {}
            Err(e) => return Err(e),
        }
        Ok(true)
    }

    /// The kernel keeps nothing of the inode any more.
    pub fn forget(&self, ino: InodeId) {
        if let Some(inode) = self.known_inode(ino) {
            inode.lock().forgotten = true;
        }
    }

    /// Gives back leases of inodes that nobody uses, when there are many.
    pub async fn give_back_forgotten(&self) {
        let excess = self.inode_count().saturating_sub(IDLE_INODES_MAX);
        if excess == 0 {
            return;
        }
        let idle = |inode: &Arc<Inode>| {
            let st = inode.lock();
            st.forgotten && !st.opens.is_open() && !st.is_dirty() && !st.is_in_doubt()
        };
        let idle: Vec<_> =
            self.all_inodes().into_iter().filter(idle).take(excess.min(GIVE_BACK_MAX)).collect();
        for inode in idle {
            if let Err(e) = self.release_lease(&inode).await {
                tracing::debug!("lease on {} was not given back: {e}", inode.ino);
                return;
            }
            // A lookup may have brought it back meanwhile.
            let still_idle = {
                let st = inode.lock();
                st.forgotten && !st.lease.is_held()
            };
            if still_idle {
                self.remove_unused_inode(&inode);
            }
        }
    }
}

/// Inodes kept without anybody using them.
const IDLE_INODES_MAX: usize = 100_000;
/// Leases given back in one go.
const GIVE_BACK_MAX: usize = 2_000;
