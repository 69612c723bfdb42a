//! Leases: asked for, given back on recall, recovered after another writer's death.
//!
//! Invariant: a recall is answered only when everything changed under the lease is committed, and neither this client nor
//! the kernel above it caches what the lease no longer covers. While it is being answered the client holds the lease and
//! serves reads and writes from it, so nobody who waits for the kernel's page locks waits for the leader.
use crate::api::Forget;
use crate::data::{Done, Overlay, StripeRef};
use crate::flush::check_tenure;
use crate::inner::{Inner, layout_of};
use crate::node::{Declared, Dropping, Inline, Node, State};
use crate::plan::{Occasion, first_stripe_past};
use crate::points;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, Weak};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::lock::LockFree;
use weir_proto::meta::{
    AcquireLease, Cred, Entry, LeaseKind, LeaveDoubt, ReadInline, Recall, RecoverFile, Recovered,
    ReleaseLease,
};
use weir_proto::recall::EvictOwn;
use weir_proto::{Error, ErrorKind, InodeId, PgId, Request, Result, Version};
use weir_rpc::{Call, Handled, Reply, Service};

/// Flushes of a file that is written all the while; after them writers wait for the recall.
const RECALL_ROUNDS: u32 = 6;
/// Times that pages are dropped of a file that is read all the while. Reads wait for the recall, too, but not for long.
const PAGE_ROUNDS: u32 = 64;

/// Times that a file's recovery is begun because opens of this client cross it.
const RECOVERIES_MAX: u32 = 8;
/// Between looks whether another client has recovered a file, or who has what is to be committed is back.
const RECOVERY_LOOK: Duration = Duration::from_millis(50);

/// A read for pages waits so long for a recall that has them dropped. That may itself wait for pages that this read has locked:
/// then the read goes first, under the lease that is still here.
const PAGES_PAUSE: Duration = Duration::from_millis(5);
/// Who asks for attributes waits so long for pages that no lease protects: a read of them may hang at a target.
const LOOSE_PAGES_PAUSE: Duration = Duration::from_millis(100);

/// Bytes that are being sent past what others might cache: a recall that comes meanwhile waits for them.
pub struct ThroughSend<'a> {
    node: &'a Node,
    counted_by: u64,
}

impl Drop for ThroughSend<'_> {
    fn drop(&mut self) {
        self.node.lock().end_send(self.counted_by);
        self.node.changed.notify_waiters();
    }
}

/// Pages in the kernel that no lease protects, of a read or write that is under way or was just answered.
pub struct LoosePages(Arc<Node>);

impl LoosePages {
    /// `st`: of that node; not to be locked where this is dropped.
    pub fn of(node: &Arc<Node>, st: &mut State) -> LoosePages {
        st.loose_pages += 1;
        LoosePages(node.clone())
    }
}
impl Drop for LoosePages {
    fn drop(&mut self) {
        self.0.lock().loose_pages -= 1;
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
            if let Some(node) = client.known_node(asked.ino).filter(|node| client.is_open_for_writing(node)) {
                let root = Cred { uid: 0, gid: 0, groups: vec![0] };
                client.evict_own(&root, &node, asked.from, asked.to).await?;
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
        if call.method != Recall::METHOD {
            return Handled::Now(Err(call.unknown()));
        }
        let recall = match call.decode::<Recall>() {
            Ok(recall) => recall,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        // The stamp orders this recall with the replies around it: taken here, in the order of arrival.
        let node = client.node(recall.ino);
        let stamp = client.next_stamp();
        node.lock().stamp_recall(stamp, recall.keep);
        Handled::Later(Box::pin(async move {
            client.recall(&node, recall.keep).await;
            Ok(Reply::new(&()))
        }))
    }
}

impl Inner {
    /// Gives the lease back, down to `keep`. Errors of write-back stay with the file's handles.
    pub async fn recall(&self, node: &Arc<Node>, mut keep: LeaseKind) {
        self.counters.recalls.fetch_add(1, Relaxed);
        let recall = node.lock().recalls();
        self.wait_for_sends(node, recall).await;
        if keep == LeaseKind::None {
            self.end_loans(node).await;
        }
        {
            let mut st = node.lock();
            if st.lease <= keep {
                if keep == LeaseKind::None {
                    st.loans.end();
                }
                return;
            }
        }
        let mut old_pages = if keep == LeaseKind::None { vec![Forget::All] } else { Vec::new() };
        let mut doubt_told = false;
        for round in 0.. {
            // Under a right to read nothing is changed. To wait for a flush, which may itself wait for others' leases, would
            // be to wait in a circle.
            let writes = {
                let st = node.lock();
                (st.lease == LeaseKind::Write && !doubt_told) || st.is_unsaved()
            };
            if writes {
                // Errors are kept by the inode and told to its handles: the lease goes back all the same.
                let _ = self.flush(node, Occasion::Closing, keep == LeaseKind::None).await;
            }
            if keep == LeaseKind::None {
                node.lock().dropping.get_or_insert_default();
            }
            for part in std::mem::take(&mut old_pages) {
                self.invalidate(node.ino, part).await;
            }
            // No flush waits for a range that is zeroed under the lease.
            self.wait_for_sends(node, u64::MAX).await;
            {
                let mut st = node.lock();
                // Pages that were filled since are old as soon as the lease is gone: they go first.
                let filled = st.dropping.as_mut().map_or(Vec::new(), Dropping::take_filled);
                old_pages.extend(filled.into_iter().map(|(from, to)| Forget::Part(from, to - from)));
                let written = (st.is_unsaved() || st.has_sends_before(u64::MAX)) && round < RECALL_ROUNDS;
                if written && keep == LeaseKind::None {
                    old_pages = vec![Forget::All]; // to write is to fill pages, too
                }
                if written || (!old_pages.is_empty() && round < PAGE_ROUNDS) {
                    st.closing_lease = doubt_told || round + 1 >= RECALL_ROUNDS;
                    continue;
                }
                if doubt_told || !st.is_in_doubt() {
                    self.env.tasks.pass(points::WRITTEN_BACK);
                    self.drop_under_lease(node, &mut st, keep);
                    break;
                }
                st.closing_lease = true;
            }
            self.leave_doubt(node).await;
            doubt_told = true;
            // Not even for itself: what it reads there may be another tomorrow.
            keep = LeaseKind::None;
            old_pages.push(Forget::All);
        }
        self.tell_access_of(node).await;
        self.tell_close_of(node.ino).await;
        node.changed.notify_waiters();
        if !old_pages.is_empty() {
            // It was read without a pause: what came in at last goes soon, or with the next open.
            let loose = LoosePages::of(node, &mut node.lock());
            self.drop_loose_pages(loose);
        }
    }

    /// The kernel drops the file's pages, soon: who waits for the answer to a read or write has some of them locked.
    pub fn drop_loose_pages(&self, loose: LoosePages) {
        let me = self.arc();
        self.env.tasks.spawn("drop loose pages", async move {
            me.invalidate(loose.0.ino, Forget::All).await;
            drop(loose);
        });
    }

    /// Before the kernel hears of a size: it would show the rest of a page from before that, zeros, as part of the file.
    pub async fn wait_for_loose_pages(&self, node: &Node) {
        let until = self.env.clock.now() + LOOSE_PAGES_PAUSE;
        loop {
            let changed = node.changed.notified();
            let left = until.since(self.env.clock.now());
            if node.lock().loose_pages == 0 || left.is_zero() {
                return;
            }
            let _ = self.env.clock.timeout(left, changed).await; // looks again either way
        }
    }

    fn drop_under_lease(&self, node: &Node, st: &mut crate::node::State, keep: LeaseKind) {
        if st.is_unsaved() {
            let e = Error::io(format!(
                "file {}: changes could not be saved before another client needed it",
                node.ino
            ));
            tracing::error!("{e}");
            self.note_loss(node.ino, &e);
            st.fail(e);
            st.dirty.clear();
        }
        st.closing_lease = false;
        st.dropping = None;
        st.lower_lease(keep);
        self.settle_room(st);
        if keep == LeaseKind::None {
            self.cache().remove_inode(node.ino);
        }
        self.forget_if_saved(node.ino, st);
    }

    /// The right to write is about to be given back, and a write that failed has left a stripe in doubt: returns when the leader
    /// knows, which has the file recovered.
    async fn leave_doubt(&self, node: &Node) {
        let (ino, tenure) = (node.ino, node.lock().tenure);
        let still = || check_tenure(node, tenure);
        loop {
            let told = self.session.change_while(self.deadline(), still, |op| LeaveDoubt { op, ino }).await;
            let Err(e) = told else { return };
            if !matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline) {
                return; // the right was lost with the session, whose end has the same effect, or the file is gone
            }
            tracing::warn!("file {ino}: the leader was not told of what a failed write left in doubt: {e}");
        }
    }

    /// Returns when nothing that was sent past leases before a recall is under way.
    async fn wait_for_sends(&self, node: &Node, recall: u64) {
        loop {
            let changed = node.changed.notified();
            if !node.lock().has_sends_before(recall) {
                return;
            }
            changed.await;
        }
    }

    /// Returns when bytes of a file that others may have open can be sent straight to targets: under the Write lease, or with
    /// the leader's word. Nothing that is asked is counted as a send: what is asked may wait for others' recalls, and theirs for
    /// their sends.
    pub async fn may_send_through<'a>(&self, node: &'a Node) -> Result<ThroughSend<'a>> {
        let deadline = self.deadline();
        loop {
            {
                let mut st = node.lock();
                if st.may_send() {
                    return Ok(ThroughSend { node, counted_by: st.begin_send() });
                }
            }
            if self.data.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "write file {}: who reads it elsewhere takes the word to write it back each time",
                    node.ino
                )));
            }
            if node.lock().declared == Declared::Unclean {
                self.acquire(node, LeaseKind::Write).await?;
            } else {
                self.mark(node).await?;
            }
        }
    }

    /// Returns when the leader knows that something uncommitted may be on targets from now on. Of all that is sent at once the
    /// first asks, and nothing goes before the answer.
    pub async fn mark(&self, node: &Node) -> Result<()> {
        while node.lock().declared != Declared::Unclean {
            let _one = node.marking.lock().await;
            let told = self.next_stamp();
            if node.lock().declared.is_clean_by_now(told) {
                self.acquire(node, LeaseKind::Write).await?;
            }
        }
        Ok(())
    }

    /// Asks for a lease for bytes that the kernel will keep as pages, of a file that was opened under a lease and is shared now.
    /// Not where this client writes it, too: two such would each wait, with pages locked, for the other's.
    pub async fn lease_for_pages(&self, node: &Node, from: u64, to: u64) -> Result<()> {
        self.wait_for_dropping(node, from, to).await;
        let asks = {
            let st = node.lock();
            st.lease == LeaseKind::None && st.open_write == 0
        };
        if asks {
            self.acquire(node, LeaseKind::Read).await?;
        }
        Ok(())
    }

    /// A read for pages of `from..to` waits for the recall that has others dropped.
    async fn wait_for_dropping(&self, node: &Node, from: u64, to: u64) {
        match &mut node.lock().dropping {
            Some(dropping) => dropping.begin_wait(from, to),
            None => return,
        }
        let until = self.env.clock.now() + PAGES_PAUSE;
        loop {
            let changed = node.changed.notified();
            if node.lock().dropping.is_none() {
                return;
            }
            let left = until.since(self.env.clock.now());
            if left.is_zero() {
                break;
            }
            let _ = self.env.clock.timeout(left, changed).await; // looks again either way
        }
        if let Some(dropping) = &mut node.lock().dropping {
            dropping.end_wait(from, to);
        }
    }

    pub async fn invalidate(&self, ino: InodeId, what: Forget) {
        let kernel = self.kernel.clone();
        self.env.tasks.blocking(move || kernel.invalidate_inode(ino, what)).await;
    }

    /// Returns a lease that is not in use.
    async fn release_lease(&self, node: &Arc<Node>) -> Result<()> {
        self.flush(node, Occasion::Closing, false).await?;
        {
            let mut st = node.lock();
            // The kernel may have been told of it again meanwhile.
            let in_use = !st.forgotten || st.loans.are_open(self.env.clock.now());
            if st.is_dirty() || st.lease == LeaseKind::None || in_use {
                return Ok(());
            }
            st.stamp_recall(self.next_stamp(), LeaseKind::None);
            self.drop_under_lease(node, &mut st, LeaseKind::None);
        }
        self.tell_access_of(node).await;
        self.tell_close_of(node.ino).await;
        let ino = node.ino;
        let release = |session| ReleaseLease { session, ino, keep: LeaseKind::None };
        let answer = self.session.ask(self.deadline(), release).await;
        // Grants of requests that crossed the release do not count.
        node.lock().stamp_recall(self.next_stamp(), LeaseKind::None);
        answer
    }

    /// Asks for a lease; what is held afterwards.
    pub async fn acquire(&self, node: &Node, kind: LeaseKind) -> Result<LeaseKind> {
        self.ask_lease(node, kind, false).await?;
        Ok(node.lock().lease)
    }

    pub async fn ask_lease(&self, node: &Node, kind: LeaseKind, renew: bool) -> Result<Entry> {
        let stamp = self.stamp();
        let ino = node.ino;
        let ask = |session| AcquireLease { session, ino, kind, renew };
        let entry = self.session.ask(self.deadline(), ask).await?;
        self.apply(&entry, stamp);
        if kind == LeaseKind::Write {
            let mut st = node.lock();
            st.declared.asked_for_write(stamp);
            st.limited = entry.lease.limited;
            if st.lease < LeaseKind::Write {
                st.note_through(stamp);
            }
        }
        Ok(entry)
    }

    /// Attributes and inline data, fresh from the leader, with what lease it grants.
    pub async fn refresh(&self, node: &Node) -> Result<()> {
        let stamp = self.stamp();
        let ino = node.ino;
        let fresh = self.session.ask(self.deadline(), |session| ReadInline { session, ino }).await?;
        // In one step: nobody sees this size with other bytes.
        let mut st = node.lock();
        self.apply_to(&mut st, &fresh.entry, stamp);
        // What is dirty goes over what the inode holds, and must know of it.
        let wants = !st.is_dirty() || st.inline == Inline::Unknown;
        if wants && st.is_of_version(&fresh.entry) {
            st.inline = fresh.data.map_or(Inline::No, Inline::Yes);
        }
        Ok(())
    }

    /// Finishes what a dead writer left: fences it, decides prepared stripes, cuts what was never committed.
    pub async fn recover(&self, node: &Arc<Node>) -> Result<()> {
        let (mut crossed, deadline) = (0, self.deadline());
        loop {
            self.wait_to_recover(node, deadline).await?;
            let _one = node.flushing.lock().await;
            if !node.lock().recover {
                return Ok(());
            }
            // Others of this client may have given the right back meanwhile.
            if self.acquire(node, LeaseKind::Write).await? != LeaseKind::Write {
                continue;
            }
            match self.recover_locked(node).await {
                // Another open of this client took the right to write anew meanwhile: once more, under its epoch.
                Err(e) if e.kind == ErrorKind::Stale && crossed < RECOVERIES_MAX => {
                    crossed += 1;
                    tracing::debug!("file {}: {e}", node.ino);
                }
                done => return done,
            }
        }
    }

    /// Until this client may recover the file, or another one has. Without the lock on flushes: who has its turn at the file needs that
    /// to end it, and until then nobody gets the right.
    async fn wait_to_recover(&self, node: &Node, deadline: Instant) -> Result<()> {
        while node.lock().recover {
            let granted = self.acquire(node, LeaseKind::Write).await?;
            if node.lock().recover && self.data.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "file {}: its last writer died, and its recovery by another client does not end",
                    node.ino
                )));
            }
            if granted == LeaseKind::Write {
                return Ok(());
            }
            self.env.clock.sleep(RECOVERY_LOOK).await;
        }
        Ok(())
    }

    async fn recover_locked(&self, node: &Arc<Node>) -> Result<()> {
        let (layout, object, size, token_epoch, recover) = {
            let st = node.lock();
            let layout = layout_of(&st, node.ino);
            (layout, st.object(node.ino), st.committed_size(), st.token_epoch, st.recover)
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
            self.zero_tail(node, layout, size, u64::MAX, token_epoch).await?;
        }
        let stamp = self.stamp();
        let ino = node.ino;
        let entry =
            self.session.change_again(self.deadline(), |op| Recovered { op, ino, token_epoch }).await?;
        tracing::info!("file {ino}: recovered after its writer's death, {size} bytes");
        self.apply(&entry, stamp);
        let mut st = node.lock();
        st.recover = false;
        st.tail_clean = st.lease == LeaseKind::Write;
        Ok(())
    }

    /// A prepared stripe of a dead writer, or of a failed write: one committed fragment, or k prepared ones, commit it; fewer drop it.
    pub async fn decide(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        loop {
            // Of all who are current: one that only did not answer may be the one that has committed it; and who is behind may have
            // what was given up while it was away.
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
                    self.env.clock.sleep(RECOVERY_LOOK).await;
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
        node: &Node,
        layout: weir_proto::map::Layout,
        size: u64,
        end: u64,
        token_epoch: u32,
    ) -> Result<()> {
        let stripe = layout.stripe_of(size);
        let stripe_end = layout.stripe_start(stripe) + layout.stripe_bytes();
        // A stripe that is at home only comes back without what is past the size. It may have come back with it, before the
        // file was cut: what was known of that is old.
        node.lock().evicted = None;
        let comes_clean =
            self.is_away(node, size, size + 1).await? || self.has_layers(node, size, size + 1).await?;
        if size.is_multiple_of(layout.stripe_bytes()) || comes_clean {
            return Ok(());
        }
        let len = end.min(stripe_end).saturating_sub(size);
        let overlays: Vec<Overlay> = layout
            .pieces(size, len)
            .map(|p| Overlay { index: p.cell, offset: p.offset, len: p.len, payload: None })
            .collect();
        let s = self.stripe_ref(node.lock().object(node.ino), layout, stripe, self.deadline());
        self.data.write_overlays(s, token_epoch, &overlays).await
    }

    /// Before a file grows over bytes of an earlier, longer one: cuts and zeroes them.
    pub async fn clean_old_tail(&self, node: &Node) -> Result<()> {
        let _one = node.flushing.lock().await;
        self.clean_old_tail_locked(node).await
    }

    pub async fn clean_old_tail_locked(&self, node: &Node) -> Result<()> {
        while node.lock().has_old_tail() {
            if self.clean_once(node).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// False: the right to write came anew meanwhile, so others may have written and cut.
    async fn clean_once(&self, node: &Node) -> Result<bool> {
        let layout = layout_of(&node.lock(), node.ino)?;
        // A token epoch of its own: nothing older past the size that came with it counts any more, whoever wrote it.
        let entry = self.ask_lease(node, LeaseKind::Write, true).await?;
        let (tenure, is_alone) = {
            let st = node.lock();
            (st.tenure, st.lease == LeaseKind::Write || st.turn)
        };
        if !is_alone {
            // What others write past the size from now on is not old.
            return Err(Error::stale(format!(
                "file {}: others write it, too, now: what is old goes in a turn",
                node.ino
            )));
        }
        let (size, end, token_epoch) = (entry.attr.size, entry.lease.data_end, entry.lease.token_epoch);
        if end > size {
            let past = first_stripe_past(size, layout.stripe_bytes());
            let file = self.file_id(entry.attr.layers.map_or(node.ino, |l| l.object));
            self.data.drop_file(file, &layout, past, token_epoch, self.deadline()).await?;
            self.zero_tail(node, layout, size, end, token_epoch).await?;
        }
        {
            let mut st = node.lock();
            if st.lease == LeaseKind::Write {
                let same = st.tenure == tenure;
                st.tail_clean |= same;
                return Ok(same);
            }
            st.sent_end = st.sent_end.min(size); // what was sent past it before is cleaned, too
        }
        if entry.lease.recover {
            return Ok(true); // another writer died: whoever recovers the file says it
        }
        // Others write this file, too: they need not do the same.
        let (stamp, ino) = (self.stamp(), node.ino);
        match self.session.change_again(self.deadline(), |op| Recovered { op, ino, token_epoch }).await {
            Ok(entry) => drop(self.apply(&entry, stamp)),
            // Somebody else has cut it since, and says it.
            Err(e) if e.kind == ErrorKind::Stale => {}
            Err(e) => return Err(e),
        }
        Ok(true)
    }

    /// The kernel keeps nothing of the inode any more.
    pub fn forget(&self, ino: InodeId) {
        if let Some(node) = self.known_node(ino) {
            node.lock().forgotten = true;
        }
    }

    /// Gives back leases of inodes that nobody uses, when there are many.
    pub async fn give_back_forgotten(&self) {
        let excess = self.node_count().saturating_sub(IDLE_INODES_MAX);
        if excess == 0 {
            return;
        }
        let idle = |node: &Arc<Node>| {
            let st = node.lock();
            st.forgotten && st.open_read + st.open_write == 0 && !st.is_dirty() && !st.is_in_doubt()
        };
        let idle: Vec<_> =
            self.all_nodes().into_iter().filter(idle).take(excess.min(GIVE_BACK_MAX)).collect();
        for node in idle {
            if let Err(e) = self.release_lease(&node).await {
                tracing::debug!("lease on {} was not given back: {e}", node.ino);
                return;
            }
            // A lookup may have brought it back meanwhile.
            let still_idle = {
                let st = node.lock();
                st.forgotten && st.lease == LeaseKind::None
            };
            if still_idle {
                self.remove_unused_node(&node);
            }
        }
    }
}

/// Inodes kept without anybody using them.
const IDLE_INODES_MAX: usize = 100_000;
/// Leases given back in one go.
const GIVE_BACK_MAX: usize = 2_000;
