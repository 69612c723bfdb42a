//! One stripe in flight to targets: from its changed bytes to the result, with the conditions before its
//! first byte leaves, and the pauses between tries. [`super::ways`] has the messages of each way.
//!
//! Invariants: a stripe has one send in flight; leftovers of a failed send are settled before the next one. A
//! send that fails is tried again after a pause, or its data is lost: the decision is [`crate::patience`]'s.
use super::{WriteBack, is_much_unreported};
use crate::data::{FULL_PATIENCE, STRIPE_PARTS, StripeRef};
use crate::inode::{Inline, Inode, State, Unresolved};
use crate::patience::{self, Failed, Then};
use crate::plan::{Occasion, SendAs, StripeFacts};
use crate::{crash_points, plan};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::SemaphorePermit;
use weir_env::{Backoff, Retry};
use weir_proto::map::Layout;
use weir_proto::{Error, ErrorKind, InodeId, Result};

/// A stripe sent in more parts than this is read again when it is needed.
const KEPT_PARTS_MAX: usize = 64;

/// A send this small begins on the thread that waits for it: it is a message or two, without parity.
const BEGIN_HERE_BYTES_MAX: usize = 64 << 10;

/// Pauses between tries to send changed data whose servers live. Each try has retried its calls for the whole
/// patience of the mount, or was refused: the longest pause is the time after which the servers are idle
/// again.
const SEND_RETRY: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(5) };

/// Changed bytes of one stripe, frozen, and their way to targets.
pub struct Send {
    pub(super) inode: Arc<Inode>,
    /// The object that they go to.
    pub(super) object: InodeId,
    pub(super) layout: Layout,
    pub(super) stripe: u64,
    pub(super) parts: Vec<(u32, Bytes)>,
    pub(super) how: SendAs,
    /// Settled first: leftovers of a failed send.
    pub(super) unresolved: Option<Unresolved>,
    pub(super) token_epoch: u32,
    pub(super) write_generation: u64,
    /// How long a try waits for servers that do not answer.
    pub(super) patience: Duration,
}

impl WriteBack {
    /// Begins to send a stripe's dirty bytes. The stripe must be dirty, or unresolved, and not in flight.
    pub fn start_send(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        st: &mut State,
        stripe: u64,
        occasion: Occasion,
    ) -> Result<()> {
        let (_, send) = self.take_for_send(inode, st, stripe, occasion)?;
        self.spawn_send(send);
        Ok(())
    }

    fn spawn_send(self: &Arc<Self>, send: Send) {
        let me = self.clone();
        self.env.tasks.spawn("send stripe", async move { me.run_send(send).await });
    }

    /// For a caller that waits for all of these, and holds no lock.
    pub(super) fn begin_sends(self: &Arc<Self>, mut sends: Vec<Send>) {
        let is_small =
            |send: &Send| send.parts.iter().map(|(_, b)| b.len()).sum::<usize>() <= BEGIN_HERE_BYTES_MAX;
        // Several: the runtime's threads share the work.
        if sends.len() == 1
            && let Some(send) = sends.pop_if(|send| is_small(send))
        {
            let me = self.clone();
            self.env.tasks.begin("send stripe", async move { me.run_send(send).await });
        }
        sends.into_iter().for_each(|send| self.spawn_send(send));
    }

    /// As `start_send`, with a number for the send, which the caller begins.
    pub(super) fn take_for_send(
        &self,
        inode: &Arc<Inode>,
        st: &mut State,
        stripe: u64,
        occasion: Occasion,
    ) -> Result<(u64, Send)> {
        let layout = st.layout(inode.ino)?;
        // Inline bytes are all of the file.
        self.leave_inode(st, inode.ino)?;
        let buf = st.write.take_dirty(stripe);
        let start = layout.stripe_start(stripe);
        let how = plan::send_as(&StripeFacts {
            stripe_bytes: layout.stripe_bytes() as u32,
            cell_bytes: layout.cell_bytes(),
            scheme: layout.scheme,
            exclusive: st.lease.is_write(),
            beyond_committed: start >= st.virgin_from(),
            touched: st.write.is_touched(stripe),
            covered_bytes: buf.covered_bytes(),
            extents: buf.ranges().len() as u32,
            end: buf.end(),
            occasion,
        });
        assert!(u64::from(buf.end()) <= layout.stripe_bytes(), "stripe {stripe} ends where the next begins");
        let end = start + u64::from(buf.end());
        let parts = buf.freeze();
        let id = st.write.begin_send(stripe, end, parts.clone());
        Ok((id, Send { parts, how, ..self.empty_send(inode, st, layout, stripe) }))
    }

    /// It replaces the stripe by nothing.
    fn empty_send(&self, inode: &Arc<Inode>, st: &State, layout: Layout, stripe: u64) -> Send {
        Send {
            inode: inode.clone(),
            object: st.object(inode.ino),
            layout,
            stripe,
            parts: Vec::new(),
            how: SendAs::Empty,
            unresolved: st.write.unresolved_of(stripe),
            token_epoch: st.lease.token_epoch(),
            write_generation: st.write.generation(),
            patience: self.config.patience,
        }
    }

    async fn run_send(self: Arc<Self>, mut send: Send) {
        let result = self.send_patiently(&mut send).await;
        self.env.tasks.crash_point(crash_points::SENT);
        let Send { inode, layout, stripe, parts, write_generation, .. } = send;
        {
            let mut st = inode.lock();
            st.write.end_send(stripe);
            // A fetch that began before the bytes arrived may return older ones.
            st.pages.note_change();
            let start = layout.stripe_start(stripe);
            for (at, bytes) in &parts {
                let from = start + u64::from(*at);
                st.changed.add(from, from + bytes.len() as u64);
            }
            if result.is_err() || st.write.generation() != write_generation {
                // Some of it may have arrived: bytes prefetched meanwhile are as old.
                self.forget_cached(&inode, layout, stripe, &parts);
            }
            match result {
                // Reported when the Write lease was lost, with all unsaved changes.
                done if st.write.generation() != write_generation => {
                    tracing::debug!(ino = %inode.ino, stripe, "sent without the right to write: {done:?}")
                }
                Ok(()) => {
                    if stripe == 0 {
                        st.leaving.note_sent();
                    }
                    self.keep_sent(&inode, &st, layout, stripe, parts);
                }
                Err(e) => {
                    let lost = lost_part(&inode, layout, stripe, &parts);
                    tracing::error!("changed data is lost: {lost}: {e}");
                    st.fail(e.doing(lost));
                    if stripe == 0 && st.leaving.has_begun() {
                        self.keep_leaving(&inode, &mut st, layout);
                    }
                }
            }
            if st.write.is_complete(&layout, stripe)
                && let Err(e) = self.start_send(&inode, &mut st, stripe, Occasion::Growing)
            {
                st.fail(e);
            }
        }
        inode.changed.notify_waiters();
        if is_much_unreported(&inode.lock(), &layout, self.env.clock.now()) {
            self.report_durable(&inode).await;
        }
    }

    fn forget_cached(&self, inode: &Inode, layout: Layout, stripe: u64, parts: &[(u32, Bytes)]) {
        let (start, mut cache) = (layout.stripe_start(stripe), self.memory.cache());
        for (at, bytes) in parts {
            let from = start + u64::from(*at);
            cache.remove(inode.ino, from, from + bytes.len() as u64);
        }
    }

    /// The sent bytes stay as clean data; not many small extents, which would pin memory around them.
    fn keep_sent(&self, inode: &Inode, st: &State, layout: Layout, stripe: u64, parts: Vec<(u32, Bytes)>) {
        if !st.lease.is_held() {
            return;
        }
        let start = layout.stripe_start(stripe);
        let newer = st.write.dirty_ranges(stripe);
        let mut cache = self.memory.cache();
        if parts.len() > KEPT_PARTS_MAX {
            return cache.remove(inode.ino, start, layout.stripe_start(stripe + 1));
        }
        for (at, bytes) in parts {
            let end = at + bytes.len() as u32;
            // A prefetch may have returned older bytes of the targets meanwhile.
            cache.remove(inode.ino, start + u64::from(at), start + u64::from(end));
            if newer.iter().any(|(a, b)| *a < end && *b > at) {
                continue;
            }
            cache.insert(inode.ino, start + u64::from(at), bytes, true, false, self.memory.budget());
        }
    }
}

/// Tries, and the conditions of each.
impl WriteBack {
    /// Until it is done, or its data is lost: see [`patience::after`]. The data stays dirty meanwhile.
    async fn send_patiently(&self, send: &mut Send) -> Result<()> {
        let begun = self.env.clock.now();
        let mut retry = Retry::jittered(&self.env, SEND_RETRY, begun);
        loop {
            let Err(e) = self.send_until_not_fenced(send).await else { return Ok(()) };
            let s = self.data.stripe(send.object, send.layout, send.stripe, self.leader.deadline());
            let s = StripeRef { floor: self.quota.write_floor(&send.inode).await.unwrap_or(0), ..s };
            self.data.ask_silent_members(&s).await;
            let failed = Failed {
                kind: e.kind,
                is_lost: self.data.is_lost_for_good(&s),
                silent: self.data.silent_for(&s, begun).max(self.leader.silent_for(begun)),
                since: self.env.clock.now().since(begun),
                patience: self.config.patience,
            };
            let is_mine = send.inode.check_generation(send.write_generation).is_ok();
            if !is_mine || patience::after(&failed) == Then::Lost {
                return Err(e);
            }
            send.patience = patience::of_next_try(&failed);
            tracing::debug!("{s}: not written yet, it is tried again: {e}");
            let what = format!("targets of {}, to write changed data", s.layout.pg_of_stripe(s.stripe));
            let _waiting = self.data.waits.begin(what);
            let version = self.data.cluster.map().version;
            let _ = self.data.cluster.wait_newer(version, retry.next_pause()).await; // it is tried again either way
            send.unresolved = send.inode.lock().write.unresolved_of(send.stripe);
        }
    }

    /// A send that this client's own truncation has fenced is sent again, under the newer token epoch.
    async fn send_until_not_fenced(&self, send: &mut Send) -> Result<()> {
        let (mut passes, full_until) = (true, self.env.clock.now() + FULL_PATIENCE);
        loop {
            let outcome = self.send_stripe(send).await;
            if outcome.as_ref().is_err_and(|e| e.kind == ErrorKind::Stale) {
                // Targets may learn of a newer token epoch before this client has its answer.
                self.tiering.wait_for_own_eviction(&send.inode, 0, u64::MAX).await;
                if std::mem::take(&mut passes) && send.inode.check_generation(send.write_generation).is_ok() {
                    self.leases.pass_fence(&send.inode, send.token_epoch).await?;
                }
            }
            let (write_generation, token_epoch, object) = {
                let st = send.inode.lock();
                (st.write.generation(), st.lease.token_epoch(), st.object(send.inode.ino))
            };
            // Not bytes that were lost with an earlier lease: other clients may have written there since.
            let renewed = write_generation == send.write_generation
                && token_epoch > send.token_epoch
                && object == send.object;
            match outcome {
                Err(e) if e.kind == ErrorKind::Stale && renewed => send.token_epoch = token_epoch,
                Err(e) if e.kind == ErrorKind::NoSpace && write_generation == send.write_generation => {
                    let s = self.data.stripe(send.object, send.layout, send.stripe, full_until);
                    if !self.data.full.is_moved(&s, full_until).await {
                        return Err(e);
                    }
                    send.unresolved = send.inode.lock().write.unresolved_of(send.stripe);
                }
                outcome => return outcome,
            }
        }
    }

    async fn send_stripe(&self, send: &Send) -> Result<()> {
        let (s, _place) = self.before_first_byte(send).await?;
        self.carry(send, s).await
    }

    /// The conditions of a send, met in order. Returns the stripe, with the deadline of this try, and its
    /// place among those in flight.
    async fn before_first_byte(&self, send: &Send) -> Result<(StripeRef, SemaphorePermit<'_>)> {
        // The leader knows of the file: a local create is reported.
        self.local_names.await_known(&send.inode).await?;
        // The write floor of its volume is known.
        let floor = self.quota.write_floor(&send.inode).await?;
        // The group takes writes. Without a place: stripes of other groups proceed meanwhile.
        if !send.parts.is_empty() {
            self.data.writable_view(&self.stripe_of(send, floor)).await?;
        }
        let place = self.data.flight.enter(parts_in_flight(send)).await;
        let s = self.stripe_of(send, floor);
        // The leader expects uncommitted bytes on targets.
        self.leases.mark(&send.inode).await?;
        // The right to write is the one under which the bytes were written.
        send.inode.check_generation(send.write_generation)?;
        self.settle_leftovers(send, s).await?;
        Ok((s, place))
    }

    fn stripe_of(&self, send: &Send, floor: u8) -> StripeRef {
        let deadline = self.env.clock.now() + send.patience;
        StripeRef { floor, ..self.data.stripe(send.object, send.layout, send.stripe, deadline) }
    }

    /// A failed send has left parts of the stripe at some targets: they are everywhere or nowhere now.
    async fn settle_leftovers(&self, send: &Send, s: StripeRef) -> Result<()> {
        match send.unresolved {
            Some(Unresolved::Fresh) => self.take_back_fresh(send).await?,
            Some(Unresolved::InDoubt(version)) => {
                self.recovery.decide(s, version, self.token_epoch_of(send)).await?;
                self.note_whole(send);
            }
            None => {}
        }
        Ok(())
    }
}

/// A stripe of zeros.
impl WriteBack {
    /// Replaces a stripe by an empty version, which reads as zeros and takes no space. Needs the Write lease.
    /// Returns false, with nothing done, if the file has grown past `end` within the stripe meanwhile.
    pub async fn empty_stripe(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        own: InodeId,
        stripe: u64,
        end: u64,
    ) -> Result<bool> {
        let deadline = self.leader.deadline();
        let send = loop {
            let changed = inode.changed.notified();
            if let Some(begun) = self.begin_to_empty(inode, own, stripe, end)? {
                break begun;
            }
            if self.env.clock.timeout(self.leader.left(deadline), changed).await.is_err() {
                return Err(Error::deadline(format!(
                    "file {}: a write to stripe {stripe} takes too long",
                    inode.ino
                )));
            }
        };
        let Some(mut send) = send else { return Ok(false) };
        let (me, (reported, ended)) = (self.clone(), tokio::sync::oneshot::channel());
        // In a task of its own, so that it is completed even if the caller stops waiting.
        self.env.tasks.spawn("empty stripe", async move {
            let outcome = me.send_until_not_fenced(&mut send).await;
            let Send { inode, layout, stripe, write_generation, .. } = send;
            {
                let mut st = inode.lock();
                st.write.end_send(stripe);
                st.pages.note_change();
                me.memory.cache().remove(
                    inode.ino,
                    layout.stripe_start(stripe),
                    layout.stripe_start(stripe + 1),
                );
                if st.write.generation() == write_generation
                    && st.write.is_complete(&layout, stripe)
                    && let Err(e) = me.start_send(&inode, &mut st, stripe, Occasion::Growing)
                {
                    st.fail(e);
                }
            }
            inode.changed.notify_waiters();
            let _ = reported.send(outcome); // fails if the caller has stopped waiting
        });
        let ended = ended.await.unwrap_or_else(|_| Err(Error::unavailable("the client is shutting down")));
        ended.map(|()| true)
    }

    /// Reserves the stripe for one send. Outer `None`: another send of it is in flight; inner `None`: the
    /// file has grown.
    fn begin_to_empty(
        &self,
        inode: &Arc<Inode>,
        own: InodeId,
        stripe: u64,
        end: u64,
    ) -> Result<Option<Option<Send>>> {
        let mut st = inode.lock();
        let layout = st.layout(inode.ino)?;
        let object = st.object(inode.ino);
        if !st.lease.is_write() || object != own || st.inline != Inline::No {
            return Err(Error::stale(format!("file {}: the right to write it alone is gone", inode.ino)));
        }
        if st.write.is_sending(stripe) {
            return Ok(None);
        }
        if layout.stripe_start(stripe + 1) > end && st.size() > end {
            return Ok(Some(None));
        }
        st.write.begin_send(stripe, 0, Vec::new());
        Ok(Some(Some(self.empty_send(inode, &st, layout, stripe))))
    }
}

/// Its part of the places in flight.
fn parts_in_flight(send: &Send) -> u32 {
    match send.how {
        SendAs::Fresh { len } => parts_of(len, send.layout.stripe_bytes()),
        SendAs::Empty => 1,
        SendAs::Prepared | SendAs::Merged | SendAs::Overlays => STRIPE_PARTS,
    }
}

/// The parts of a stripe's permits that this number of bytes needs; at least one.
fn parts_of(len: u32, stripe_bytes: u64) -> u32 {
    (u64::from(len) * u64::from(STRIPE_PARTS)).div_ceil(stripe_bytes).clamp(1, STRIPE_PARTS.into()) as u32
}

/// The changed bytes of a send, for messages.
fn lost_part(inode: &Inode, layout: Layout, stripe: u64, parts: &[(u32, Bytes)]) -> String {
    let start = layout.stripe_start(stripe);
    let first = parts.first().map_or(0, |(at, _)| *at);
    let end = parts.last().map_or(0, |(at, bytes)| at + bytes.len() as u32);
    let (first, end) = (start + u64::from(first), start + u64::from(end));
    let parts = if parts.len() > 1 { format!(", in {} parts", parts.len()) } else { String::new() };
    format!("file {}, bytes {first} to {end}{parts}", inode.ino)
}
