//! One stripe in flight to targets, as fresh fragments, as a prepared version, or as overlays.
//!
//! Invariant: leftovers of a failed send at some targets are noted as unresolved before the send ends, and
//! are settled before the next send to the stripe.
use super::WriteBack;
use crate::data::{Done, FULL_PATIENCE, Fragment, Overlay, StripeRef};
use crate::inode::{Inline, Inode, State, Unresolved};
use crate::kernel::UnprotectedPages;
use crate::plan::{Occasion, SendAs, StripeFacts};
use crate::write_back::is_much_unreported;
use crate::{crash_points, plan};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_proto::data::{SEAL_VERSIONS, WriteMode};
use weir_proto::map::Layout;
use weir_proto::{Epoch, Error, ErrorKind, InodeId, Result, Seq, Version};

/// A version that meets a running seal is sent again with a counter this much higher: seals count up by two
/// from the base, or from one in doubt.
const ABOVE_SEAL: u64 = 256;

const ABOVE_SEAL_TRIES: u32 = 3;

/// A stripe sent in more parts than this is read again when it is needed.
const KEPT_PARTS_MAX: usize = 64;

/// A send this small begins on the thread that waits for it: it is a message or two, without parity.
const BEGIN_HERE_BYTES_MAX: usize = 64 << 10;

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

/// A version that all live members have next to their base, as of an epoch of the group.
struct PreparedStripe {
    version: Version,
    folded_seqs: Vec<Seq>,
    fragments: Vec<Fragment>,
    held: Epoch,
}

/// What replaces the base of a stripe.
enum Content {
    Fragments(Vec<Fragment>),
    /// The changed bytes over the present ones.
    Merged,
}

/// Dirty parts of a stripe as overlays of its data cells. Parts never cross a cell's border.
fn overlays_of(parts: &[(u32, Bytes)], cell_bytes: u32) -> Vec<Overlay> {
    parts
        .iter()
        .map(|(at, bytes)| Overlay {
            index: (at / cell_bytes) as u8,
            offset: at % cell_bytes,
            len: bytes.len() as u32,
            payload: Some(bytes.clone()),
        })
        .collect()
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
                    let lost = super::again::lost_part(&inode, layout, stripe, &parts);
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

    /// A send that this client's own truncation has fenced is sent again, under the newer token epoch.
    pub(super) async fn send_until_not_fenced(&self, send: &mut Send) -> Result<()> {
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
                    if !self.data.is_moved(&s, full_until).await {
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
        match send.how {
            SendAs::Empty => {
                let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
                let nothing = vec![empty; send.layout.scheme.width()];
                self.replace_stripe(send, s, Content::Fragments(nothing)).await
            }
            _ if send.parts.is_empty() => Ok(()),
            SendAs::Fresh { len } => {
                let fragments = self.fragments(send, len)?;
                let written = self.write_fresh(s, send.token_epoch, &fragments).await;
                if let Err(e) = &written {
                    self.abandon_fresh(send, e).await;
                }
                written
            }
            SendAs::Prepared => {
                let fragments = self.fragments(send, send.layout.stripe_bytes() as u32)?;
                self.replace_stripe(send, s, Content::Fragments(fragments)).await
            }
            SendAs::Merged => self.replace_stripe(send, s, Content::Merged).await,
            SendAs::Overlays => {
                let overlays = overlays_of(&send.parts, send.layout.cell_bytes());
                self.data.write_overlays(s, send.token_epoch, &overlays).await
            }
        }
    }

    /// Replaces the present base by a whole stripe.
    async fn replace_stripe(&self, send: &Send, s: StripeRef, content: Content) -> Result<()> {
        let prepared = self.prepare_stripe(send, s, &content).await?;
        let version = prepared.version;
        let committed = Box::pin(self.commit_prepared(send, s, prepared)).await;
        let is_fenced = |e: &Error| e.kind == ErrorKind::Stale && !self.has_newer_token(send);
        if committed.as_ref().is_err_and(|e| !is_fenced(e)) {
            self.note_unresolved(send, Unresolved::InDoubt(version));
        }
        committed
    }

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

    /// Returns when all live members have it next to their base. A version that meets a seal must be higher
    /// than it.
    async fn prepare_stripe(&self, send: &Send, s: StripeRef, content: &Content) -> Result<PreparedStripe> {
        let (mut lowest, mut seals) = (Version(0), 0);
        loop {
            // Before the read of a merge: overlays that arrive after it stay above the new base.
            let (folded_seqs, base) = self.data.stripe_state(&s).await?;
            let fragments = match content {
                Content::Fragments(fragments) => fragments.clone(),
                Content::Merged => self.merged_fragments(send, s).await?,
            };
            lowest = lowest.max(Version((base.0 + u64::from(SEAL_VERSIONS) + 2) & !1));
            let version = self.data.flight.next_version_from(send.token_epoch, lowest);
            let written =
                self.data.write_stripe(s, version, WriteMode::Prepare, &folded_seqs, &fragments, false).await;
            let e = match written {
                Ok(held) => return Ok(PreparedStripe { version, folded_seqs, fragments, held }),
                Err(e) => e,
            };
            self.abandon_prepared(send, version, &e).await;
            if e.kind != ErrorKind::Exists || seals >= ABOVE_SEAL_TRIES {
                return Err(e);
            }
            (lowest, seals) = (Version(version.0 + ABOVE_SEAL), seals + 1);
        }
    }

    /// Another open of this client may have acquired the Write lease again since the send began.
    pub(super) fn token_epoch_of(&self, send: &Send) -> u32 {
        let st = send.inode.lock();
        if st.write.generation() == send.write_generation { st.lease.token_epoch() } else { send.token_epoch }
    }

    fn has_newer_token(&self, send: &Send) -> bool {
        self.token_epoch_of(send) > send.token_epoch
    }

    async fn commit_prepared(&self, send: &Send, s: StripeRef, prepared: PreparedStripe) -> Result<()> {
        let PreparedStripe { version, folded_seqs, fragments, mut held } = prepared;
        let mut done = Done::new();
        while !self.data.commit_stripe(s, version, self.token_epoch_of(send), held, &mut done).await? {
            let written =
                self.data.write_stripe(s, version, WriteMode::Prepare, &folded_seqs, &fragments, true);
            held = written.await?;
        }
        Ok(())
    }

    async fn write_fresh(&self, s: StripeRef, token_epoch: u32, fragments: &[Fragment]) -> Result<()> {
        let version = Version::new(token_epoch, self.data.flight.next_version());
        self.data.write_stripe(s, version, WriteMode::Fresh, &[], fragments, false).await.map(drop)
    }

    /// Some members accepted their fragment, others did not: they are full, or died. Until the old state is
    /// restored everywhere, the stripe cannot be read: that is retried before the next send to it, and before
    /// the size covers it.
    async fn abandon_fresh(&self, send: &Send, why: &Error) {
        if why.kind == ErrorKind::Stale {
            return; // fenced: the client that truncated the file has dropped it
        }
        self.note_unresolved(send, Unresolved::Fresh);
        if let Err(e) = self.take_back_fresh(send).await {
            tracing::warn!("a write that failed is at some targets for now: {e}");
        }
    }

    fn note_unresolved(&self, send: &Send, unresolved: Unresolved) {
        send.inode.lock().write.note_unresolved(send.write_generation, send.stripe, unresolved);
    }

    /// Bytes read from it before may be outdated now.
    pub(super) fn note_whole(&self, send: &Send) {
        let Send { inode, layout, stripe, .. } = send;
        let unprotected = {
            let mut st = inode.lock();
            st.write.note_resolved(send.write_generation, *stripe);
            let (start, end) = (layout.stripe_start(*stripe), layout.stripe_start(stripe + 1));
            st.pages.note_change();
            st.changed.add(start, end);
            self.memory.cache().remove(inode.ino, start, end);
            UnprotectedPages::of(inode, &mut st)
        };
        self.kernel.drop_pages(unprotected);
    }

    /// Nothing was at this place, and so it must be again, at all members: fragments without bytes take no
    /// space, and a rebuild uses the higher version.
    pub(super) async fn take_back_fresh(&self, send: &Send) -> Result<()> {
        let s = self.data.stripe(send.object, send.layout, send.stripe, self.leader.deadline());
        let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
        let fragments = vec![empty; send.layout.scheme.width()];
        self.write_fresh(s, send.token_epoch, &fragments).await?;
        self.note_whole(send);
        Ok(())
    }

    /// No member has committed it, so none may: otherwise it would reappear in a later recovery of the file.
    /// If too many targets are dead for that, it is decided later.
    async fn abandon_prepared(&self, send: &Send, version: Version, why: &Error) {
        if why.kind == ErrorKind::Stale {
            return; // fenced: the client that recovers the file decides
        }
        let s = self.data.stripe(send.object, send.layout, send.stripe, self.leader.deadline());
        self.note_unresolved(send, Unresolved::InDoubt(version));
        match self.data.drop_prepared(s, version, self.token_epoch_of(send)).await {
            Ok(()) => self.note_whole(send),
            Err(e) => tracing::warn!("{s}: a write that failed is at some targets for now: {e}"),
        }
    }
}
