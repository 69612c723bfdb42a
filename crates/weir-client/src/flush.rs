//! Changed data on its way to targets, and the commits that make it part of the file.
//!
//! Invariants: of one stripe at most one send is under way, so later bytes never arrive before earlier ones;
//! the size is committed only after every byte below it is durable, or is as it was if it failed; what fails
//! is kept as the inode's error, never dropped silently.
use crate::crash_points;
use crate::data::{Done, Fragment, Overlay, StripeRef, encode};
use crate::inner::{Inner, STRIPE_PARTS, layout_of};
use crate::inode::{Inline, Inode, State, Unresolved};
use crate::lease::UnprotectedPages;
use crate::plan::{self, Occasion, SendAs, StripeFacts};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir_env::Instant;
use weir_proto::data::{SEAL_ROOM, WriteMode};
use weir_proto::map::Layout;
use weir_proto::meta::{Commit, Entry, INLINE_MAX, Op};
use weir_proto::{Epoch, Error, ErrorKind, InodeId, Result, Seq, SessionId, Version};

/// A version that meets a seal under way goes again so far above: seals count up by two from the base, or
/// from one in doubt.
const ABOVE_SEAL: u64 = 256;
const ABOVE_SEAL_TRIES: u32 = 3;

/// Changed bytes of one stripe, frozen, and how they go.
struct Send {
    inode: Arc<Inode>,
    /// Where the file's bytes go.
    object: InodeId,
    layout: Layout,
    stripe: u64,
    parts: Vec<(u32, Bytes)>,
    how: SendAs,
    /// First this is settled, which a send that failed left there.
    unresolved: Option<Unresolved>,
    token_epoch: u32,
    write_generation: u64,
}

/// A version that all live members have beside their base, as of an epoch of the group.
struct PreparedStripe {
    version: Version,
    folded_seqs: Vec<Seq>,
    held: Epoch,
}

/// What a flush waits for, by stripe.
enum Awaited {
    /// Dirty bytes whose send has not begun.
    Start,
    /// The send with this number.
    End(u64),
}

impl Inner {
    /// Begins to send a stripe's dirty bytes. The stripe must be dirty, or unresolved, and not on its way.
    pub fn start_send(
        &self,
        inode: &Arc<Inode>,
        st: &mut State,
        stripe: u64,
        occasion: Occasion,
    ) -> Result<u64> {
        let layout = layout_of(st, inode.ino)?;
        // Bytes in an inode are all there is of the file.
        self.leave_inode(st, inode.ino)?;
        let buf = st.write.take_dirty(stripe);
        let start = layout.stripe_start(stripe);
        let how = plan::send_as(&StripeFacts {
            stripe_bytes: layout.stripe_bytes() as u32,
            cell_bytes: layout.cell_bytes(),
            exclusive: st.lease.is_write(),
            beyond_committed: start >= st.virgin_from(),
            touched: st.write.is_touched(stripe),
            covered_bytes: buf.covered_bytes(),
            end: buf.end(),
            occasion,
        });
        let end = start + u64::from(buf.end());
        let parts = buf.freeze();
        let id = st.write.begin_send(stripe, end, parts.clone());
        let write_generation = st.write.generation();
        let token_epoch = st.lease.token_epoch();
        let (inode, object) = (inode.clone(), st.object(inode.ino));
        let unresolved = st.write.unresolved_of(stripe);
        let send =
            Send { inode, object, layout, stripe, parts, how, unresolved, token_epoch, write_generation };
        let me = self.arc();
        self.env.tasks.spawn("send stripe", async move { me.run_send(send).await });
        Ok(id)
    }

    async fn run_send(self: Arc<Self>, mut send: Send) {
        let result = self.send_until_not_fenced(&mut send).await;
        self.env.tasks.crash_point(crash_points::SENT);
        let Send { inode, layout, stripe, parts, write_generation, .. } = send;
        {
            let mut st = inode.lock();
            st.write.end_send(stripe);
            // A fetch that began before the bytes arrived may bring what was there before.
            st.pages.note_change();
            let start = layout.stripe_start(stripe);
            for (at, bytes) in &parts {
                let from = start + u64::from(*at);
                st.changed.add(from, from + bytes.len() as u64);
            }
            if result.is_err() || st.write.generation() != write_generation {
                // Some of it may be there: what was fetched ahead meanwhile is as old.
                self.forget_cached(&inode, layout, stripe, &parts);
            }
            match result {
                // Told when the right to write was lost, with all that was not saved then.
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
                    tracing::error!("changed data is lost: {e}");
                    st.fail(e);
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
        let (start, mut cache) = (layout.stripe_start(stripe), self.cache());
        for (at, bytes) in parts {
            let from = start + u64::from(*at);
            cache.remove(inode.ino, from, from + bytes.len() as u64);
        }
    }

    /// What was sent stays as clean data.
    fn keep_sent(&self, inode: &Inode, st: &State, layout: Layout, stripe: u64, parts: Vec<(u32, Bytes)>) {
        if !st.lease.is_held() {
            return;
        }
        let start = layout.stripe_start(stripe);
        let newer = st.write.dirty_ranges(stripe);
        let mut cache = self.cache();
        for (at, bytes) in parts {
            let end = at + bytes.len() as u32;
            // Read ahead may have brought older bytes of the targets meanwhile.
            cache.remove(inode.ino, start + u64::from(at), start + u64::from(end));
            if newer.iter().any(|(a, b)| *a < end && *b > at) {
                continue;
            }
            cache.insert(inode.ino, start + u64::from(at), bytes, true, false, &self.budget);
        }
    }

    /// A send that this client's own truncation has fenced goes again, under the newer token epoch.
    async fn send_until_not_fenced(&self, send: &mut Send) -> Result<()> {
        let mut passes = true;
        loop {
            let outcome = self.send_stripe(send).await;
            if outcome.as_ref().is_err_and(|e| e.kind == ErrorKind::Stale) {
                // Targets may hear of a newer token epoch before its answer is here.
                self.wait_for_own_eviction(&send.inode, 0, u64::MAX).await;
                if std::mem::take(&mut passes)
                    && check_write_generation(&send.inode, send.write_generation).is_ok()
                {
                    self.pass_fence(&send.inode, send.token_epoch).await?;
                }
            }
            let (write_generation, token_epoch, object) = {
                let st = send.inode.lock();
                (st.write.generation(), st.lease.token_epoch(), st.object(send.inode.ino))
            };
            // Not what was lost with an earlier lease: others may have written there since.
            let renewed = write_generation == send.write_generation
                && token_epoch > send.token_epoch
                && object == send.object;
            match outcome {
                Err(e) if e.kind == ErrorKind::Stale && renewed => send.token_epoch = token_epoch,
                outcome => return outcome,
            }
        }
    }

    async fn send_stripe(&self, send: &Send) -> Result<()> {
        let parts = match send.how {
            SendAs::Fresh { len } => parts_of(len, send.layout.stripe_bytes()),
            SendAs::Empty => 1,
            SendAs::Prepared | SendAs::Overlays => STRIPE_PARTS,
        };
        if !send.parts.is_empty() {
            // Not with a permit: stripes of other groups go on meanwhile.
            let s = self.stripe_ref(send.object, send.layout, send.stripe, self.deadline());
            self.data.writable_view(&s).await?;
        }
        let _permit = self.stripes_in_flight.acquire_many(parts).await.expect("never closed");
        let deadline = self.deadline();
        self.mark(&send.inode).await?;
        check_write_generation(&send.inode, send.write_generation)?;
        let s = self.stripe_ref(send.object, send.layout, send.stripe, deadline);
        match send.unresolved {
            Some(Unresolved::Fresh) => self.take_back_fresh(send).await?,
            Some(Unresolved::InDoubt(version)) => {
                self.decide(s, version, self.token_epoch_of(send)).await?;
                self.note_whole(send);
            }
            None => {}
        }
        match send.how {
            SendAs::Empty => {
                let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
                self.replace_stripe(send, s, &vec![empty; send.layout.scheme.width()]).await
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
                self.replace_stripe(send, s, &fragments).await
            }
            SendAs::Overlays => {
                let overlays = overlays_of(&send.parts, send.layout.cell_bytes());
                self.data.write_overlays(s, send.token_epoch, &overlays).await
            }
        }
    }

    /// A whole stripe in place of what is there.
    async fn replace_stripe(&self, send: &Send, s: StripeRef, fragments: &[Fragment]) -> Result<()> {
        let prepared = self.prepare_stripe(send, s, fragments).await?;
        let version = prepared.version;
        let committed = Box::pin(self.commit_prepared(send, s, prepared, fragments)).await;
        let is_fenced = |e: &Error| e.kind == ErrorKind::Stale && !self.has_newer_token(send);
        if committed.as_ref().is_err_and(|e| !is_fenced(e)) {
            self.note_unresolved(send, Unresolved::InDoubt(version));
        }
        committed
    }

    /// Replaces a stripe by an empty version, which reads as zeros and takes no space. Needs the Write lease.
    /// Returns false, with nothing done, if the file has grown past `end` within the stripe meanwhile.
    pub async fn empty_stripe(
        &self,
        inode: &Arc<Inode>,
        own: InodeId,
        stripe: u64,
        end: u64,
    ) -> Result<bool> {
        let deadline = self.deadline();
        let send = loop {
            let changed = inode.changed.notified();
            if let Some(begun) = self.begin_to_empty(inode, own, stripe, end)? {
                break begun;
            }
            if self.env.clock.timeout(self.data.left(deadline), changed).await.is_err() {
                return Err(Error::deadline(format!(
                    "file {}: what is being written to stripe {stripe} takes too long",
                    inode.ino
                )));
            }
        };
        let Some(mut send) = send else { return Ok(false) };
        let (me, (reported, ended)) = (self.arc(), tokio::sync::oneshot::channel());
        // In a task of its own, so that it is completed even if the caller stops waiting.
        self.env.tasks.spawn("empty stripe", async move {
            let outcome = me.send_until_not_fenced(&mut send).await;
            let Send { inode, layout, stripe, write_generation, .. } = send;
            {
                let mut st = inode.lock();
                st.write.end_send(stripe);
                st.pages.note_change();
                me.cache().remove(inode.ino, layout.stripe_start(stripe), layout.stripe_start(stripe + 1));
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

    /// Reserves the stripe for one send. Outer `None`: another send of it is under way; inner `None`: the
    /// file has grown.
    fn begin_to_empty(
        &self,
        inode: &Arc<Inode>,
        own: InodeId,
        stripe: u64,
        end: u64,
    ) -> Result<Option<Option<Send>>> {
        let mut st = inode.lock();
        let layout = layout_of(&st, inode.ino)?;
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
        let (write_generation, token_epoch) = (st.write.generation(), st.lease.token_epoch());
        let unresolved = st.write.unresolved_of(stripe);
        let (inode, parts, how) = (inode.clone(), Vec::new(), SendAs::Empty);
        Ok(Some(Some(Send {
            inode,
            object,
            layout,
            stripe,
            parts,
            how,
            unresolved,
            token_epoch,
            write_generation,
        })))
    }

    /// All live members have it beside their base then. One that meets a seal has to be above it.
    async fn prepare_stripe(
        &self,
        send: &Send,
        s: StripeRef,
        fragments: &[Fragment],
    ) -> Result<PreparedStripe> {
        let (mut lowest, mut seals) = (Version(0), 0);
        loop {
            let (folded_seqs, base) = self.data.stripe_state(&s).await?;
            lowest = lowest.max(Version((base.0 + u64::from(SEAL_ROOM) + 2) & !1));
            let version = self.next_version_from(send.token_epoch, lowest);
            let written =
                self.data.write_stripe(s, version, WriteMode::Prepare, &folded_seqs, fragments, false).await;
            let e = match written {
                Ok(held) => return Ok(PreparedStripe { version, folded_seqs, held }),
                Err(e) => e,
            };
            self.abandon_prepared(send, version, &e).await;
            if e.kind != ErrorKind::Exists || seals >= ABOVE_SEAL_TRIES {
                return Err(e);
            }
            (lowest, seals) = (Version(version.0 + ABOVE_SEAL), seals + 1);
        }
    }

    /// Another open of this client may have taken the right to write anew since the send began.
    fn token_epoch_of(&self, send: &Send) -> u32 {
        let st = send.inode.lock();
        if st.write.generation() == send.write_generation { st.lease.token_epoch() } else { send.token_epoch }
    }
    fn has_newer_token(&self, send: &Send) -> bool {
        self.token_epoch_of(send) > send.token_epoch
    }

    async fn commit_prepared(
        &self,
        send: &Send,
        s: StripeRef,
        prepared: PreparedStripe,
        fragments: &[Fragment],
    ) -> Result<()> {
        let PreparedStripe { version, folded_seqs, mut held } = prepared;
        let mut done = Done::new();
        while !self.data.commit_stripe(s, version, self.token_epoch_of(send), held, &mut done).await? {
            held =
                self.data.write_stripe(s, version, WriteMode::Prepare, &folded_seqs, fragments, true).await?;
        }
        Ok(())
    }

    async fn write_fresh(&self, s: StripeRef, token_epoch: u32, fragments: &[Fragment]) -> Result<()> {
        let version = Version::new(token_epoch, self.next_version());
        self.data.write_stripe(s, version, WriteMode::Fresh, &[], fragments, false).await.map(drop)
    }

    /// Some members took their fragment, others did not: they are full, or died. Until it is as it was there,
    /// everywhere, nobody can read the stripe: that is tried again before anything else is sent there, and
    /// before the size covers it.
    async fn abandon_fresh(&self, send: &Send, why: &Error) {
        if why.kind == ErrorKind::Stale {
            return; // fenced: whoever truncated the file has dropped it
        }
        self.note_unresolved(send, Unresolved::Fresh);
        if let Err(e) = self.take_back_fresh(send).await {
            tracing::warn!("a write that failed is at some targets for now: {e}");
        }
    }

    fn note_unresolved(&self, send: &Send, unresolved: Unresolved) {
        send.inode.lock().write.note_unresolved(send.write_generation, send.stripe, unresolved);
    }

    /// What was read of it before may not be what it is now.
    fn note_whole(&self, send: &Send) {
        let Send { inode, layout, stripe, .. } = send;
        let unprotected = {
            let mut st = inode.lock();
            st.write.note_resolved(send.write_generation, *stripe);
            let (start, end) = (layout.stripe_start(*stripe), layout.stripe_start(stripe + 1));
            st.pages.note_change();
            st.changed.add(start, end);
            self.cache().remove(inode.ino, start, end);
            UnprotectedPages::of(inode, &mut st)
        };
        self.drop_unprotected_pages(unprotected);
    }

    /// Nothing was at this place, and so it must be again, at all members: fragments without bytes take no
    /// space, and the higher version is what is rebuilt.
    async fn take_back_fresh(&self, send: &Send) -> Result<()> {
        let s = self.stripe_ref(send.object, send.layout, send.stripe, self.deadline());
        let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
        let fragments = vec![empty; send.layout.scheme.width()];
        self.write_fresh(s, send.token_epoch, &fragments).await?;
        self.note_whole(send);
        Ok(())
    }

    /// Nobody has committed it, so nobody may: else it comes back when the file is recovered one day. Where
    /// too many targets are dead for that, it is decided later.
    async fn abandon_prepared(&self, send: &Send, version: Version, why: &Error) {
        if why.kind == ErrorKind::Stale {
            return; // fenced: whoever recovers the file decides
        }
        let s = self.stripe_ref(send.object, send.layout, send.stripe, self.deadline());
        self.note_unresolved(send, Unresolved::InDoubt(version));
        match self.data.drop_prepared(s, version, self.token_epoch_of(send)).await {
            Ok(()) => self.note_whole(send),
            Err(e) => tracing::warn!("{s}: a write that failed is at some targets for now: {e}"),
        }
    }

    fn fragments(&self, send: &Send, len: u32) -> Result<Vec<Fragment>> {
        let coder = self.data.coder(send.layout.scheme)?;
        let cells = (0..send.layout.scheme.data)
            .map(|i| {
                let start = u32::from(i) * send.layout.cell_bytes();
                let cell_len = send.layout.fragment_bytes(u64::from(len), i);
                self.cell_of(&send.parts, start, cell_len)
            })
            .collect();
        encode(&coder, &self.env, cells)
    }

    /// `start..start + len` of the stripe in one piece: shared where one part holds it, otherwise gathered,
    /// gaps zero.
    fn cell_of(&self, parts: &[(u32, Bytes)], start: u32, len: u32) -> Bytes {
        let end = start + len;
        if let Some((_, bytes)) = parts.iter().find(|(at, b)| *at == start && b.len() >= len as usize) {
            return bytes.slice(..len as usize);
        }
        let mut cell = self.env.buffers.zeroed(len as usize);
        for (at, bytes) in parts {
            let (a, b) = (start.max(*at), end.min(at + bytes.len() as u32));
            if a < b {
                cell[(a - start) as usize..(b - start) as usize]
                    .copy_from_slice(&bytes[(a - at) as usize..(b - at) as usize]);
            }
        }
        cell.freeze()
    }

    /// Sends all that is dirty now and waits until it is durable. Bytes changed meanwhile may stay.
    pub async fn flush_data(&self, inode: &Arc<Inode>, occasion: Occasion) -> Result<()> {
        let mut awaited: Option<BTreeMap<u64, Awaited>> = None;
        // The sends have their own deadlines; this one is behind them.
        let deadline = self.deadline() + self.config.patience;
        loop {
            let changed = inode.changed.notified();
            {
                let mut st = inode.lock();
                let waiting = awaited.get_or_insert_with(|| {
                    let sent = st.write.sends().map(|(stripe, id)| (stripe, Awaited::End(id)));
                    sent.chain(st.write.due().map(|stripe| (stripe, Awaited::Start))).collect()
                });
                self.advance(inode, &mut st, waiting, occasion)?;
                if waiting.is_empty() {
                    return Ok(());
                }
            }
            if self.env.clock.timeout(self.data.left(deadline), changed).await.is_err() {
                return Err(Error::deadline(format!("file {}: writing back took too long", inode.ino)));
            }
        }
    }

    fn advance(
        &self,
        inode: &Arc<Inode>,
        st: &mut State,
        waiting: &mut BTreeMap<u64, Awaited>,
        occasion: Occasion,
    ) -> Result<()> {
        for stripe in waiting.keys().copied().collect::<Vec<_>>() {
            let under_way = st.write.send_of(stripe);
            let is_due = st.write.is_due(stripe);
            let next = match waiting[&stripe] {
                Awaited::End(id) if under_way == Some(id) => continue,
                Awaited::End(_) => None,
                Awaited::Start if !is_due => under_way.map(Awaited::End),
                Awaited::Start if under_way.is_some() => continue,
                Awaited::Start => Some(Awaited::End(self.start_send(inode, st, stripe, occasion)?)),
            };
            match next {
                Some(next) => waiting.insert(stripe, next),
                None => waiting.remove(&stripe),
            };
        }
        Ok(())
    }

    /// Makes everything changed so far durable and part of the file. `off_inode`: nothing may stay inline.
    pub async fn flush(&self, inode: &Arc<Inode>, occasion: Occasion, off_inode: bool) -> Result<()> {
        let _one = inode.flushing.lock().await;
        self.flush_locked(inode, occasion, off_inode).await
    }

    pub async fn flush_locked(&self, inode: &Arc<Inode>, occasion: Occasion, off_inode: bool) -> Result<()> {
        let (errors, size, write_generation) = {
            let st = inode.lock();
            let must_leave = off_inode && st.opens.is_for_writing() && matches!(st.inline, Inline::Yes(_));
            if !st.is_dirty() && !must_leave {
                return Ok(());
            }
            (st.errors.count(), st.size(), st.write.generation())
        };
        if !off_inode && self.commit_inline(inode).await? {
            return Ok(());
        }
        self.leave_inode(&mut inode.lock(), inode.ino)?;
        let mut sent = self.flush_data(inode, occasion).await;
        if sent.is_ok() {
            sent = self.session.settle_maps(self.deadline()).await;
        }
        let (failed, sent_end) = {
            let st = inode.lock();
            (sent.err().or_else(|| st.errors.since(errors).cloned()), st.write.sent_end())
        };
        if let Some(e) = failed {
            // The size must not cover bytes that are not there.
            self.report_left_behind(inode, sent_end).await;
            return Err(e);
        }
        if occasion == Occasion::DataOnly && only_times_left(&inode.lock()) {
            return Ok(());
        }
        check_write_generation(inode, write_generation)?;
        let clean = occasion == Occasion::Closing;
        let result = self.commit_now(inode, clean, size, self.deadline()).await;
        self.env.tasks.crash_point(crash_points::FLUSHED);
        let mut st = inode.lock();
        if let Err(e) = &result
            && st.write.generation() == write_generation
        {
            st.fail(e.clone().doing(format!("commit the size of file {}", inode.ino)));
        }
        result
    }

    /// Inline bytes become dirty ones where nothing newer is, so that they go to targets; the next commit
    /// drops them.
    fn leave_inode(&self, st: &mut State, ino: InodeId) -> Result<()> {
        let Inline::Yes(bytes) = st.inline.clone() else { return Ok(()) };
        if !st.lease.is_write() {
            return Ok(());
        }
        let layout = layout_of(st, ino)?;
        let bytes = bytes.slice(..bytes.len().min(st.size() as usize));
        self.write_below(st, layout, &bytes)?;
        st.inline = Inline::No;
        st.leaving.begin(bytes);
        let committed = st.attr.as_ref().map(|a| a.mtime);
        let mtime = st.write.local().map(|l| l.mtime).or(committed).unwrap_or_else(|| self.now());
        let size = st.size();
        st.note_write(size, mtime, self.env.clock.now());
        self.note_dirty(ino);
        Ok(())
    }

    /// Bytes become dirty where nothing newer is, at the beginning of the file.
    fn write_below(&self, st: &mut State, layout: Layout, bytes: &Bytes) -> Result<()> {
        let covered = st.write.dirty_ranges(0);
        for (a, b) in gaps(&covered, bytes.len() as u32) {
            let mut buffer = |n| Some(self.budget.buffer_anyway(&self.env.buffers, n));
            let stripe = st.write.buffer(0);
            let written =
                stripe.write(a, &bytes[a as usize..b as usize], layout.cell_bytes(), true, &mut buffer);
            written.map_err(|_| Error::io("no memory for the bytes of a small file"))?;
        }
        Ok(())
    }

    /// What was lost were new bytes; those of the inode were safe, and go to targets with the next send.
    fn keep_leaving(&self, inode: &Inode, st: &mut State, layout: Layout) {
        let size = st.size();
        let bytes = st.leaving.note_failed(size);
        match self.write_below(st, layout, &bytes) {
            Ok(()) => self.note_dirty(inode.ino),
            Err(e) => st.fail(e),
        }
    }

    /// Commits a small file with its bytes in the inode. False: it does not fit there.
    async fn commit_inline(&self, inode: &Arc<Inode>) -> Result<bool> {
        let deadline = self.deadline();
        let marking = inode.marking.lock().await;
        let (commit, content, local, write_generation, sends) = {
            let mut st = inode.lock();
            let Some(local) = st.write.local() else { return Ok(false) };
            let exclusive = st.lease.is_write();
            let base = match &st.inline {
                Inline::Yes(bytes) => bytes.clone(),
                Inline::No if st.committed_size() == 0 => Bytes::new(),
                Inline::No | Inline::Unknown => return Ok(false),
            };
            // What is written directly meanwhile would be on targets and hidden by what the inode holds.
            let on_targets = st.write.has_sends() || st.direct.are_under_way() || st.lease.has_append_token();
            if on_targets || !plan::fits_inline(local.size, st.on_targets_end(), exclusive) {
                return Ok(false);
            }
            let content = inline_content(&st, &base, local.size as usize);
            st.changed.add(0, local.size);
            let changed = st.changed.take_below(local.size);
            let commit = self.commit_request(&st, inode.ino, local.size, true, Some(content.clone()));
            let commit = Commit { changed, ..commit };
            st.write.begin_declaring_clean();
            (commit, content, local, st.write.generation(), st.write.send_count())
        };
        let revoke_clock = self.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.reservations.committing(limited).await;
        let reported = self.commit_in(inode, write_generation, &commit, deadline).await;
        let mut st = inode.lock();
        st.write.note_declared_clean(self.tick_revoke_clock());
        drop(marking);
        let entry = reported.inspect_err(|e| {
            st.changed.put_back(&commit.changed);
            if st.write.generation() == write_generation {
                st.fail(e.clone().doing(format!("commit file {}", inode.ino)));
            }
        })?;
        self.note_committed(&mut st, &entry);
        drop(committing);
        if st.write.generation() != write_generation {
            self.apply_to(&mut st, &entry, revoke_clock);
            self.settle_reservation(&mut st);
            return Ok(true);
        }
        st.write.note_inline_committed(local);
        // What was sent to targets since is newer than what the inode holds now.
        let is_older = st.write.send_count() != sends;
        st.leaving.note_inline(is_older);
        st.inline = if st.leaving.has_begun() { Inline::No } else { Inline::Yes(content) };
        self.apply_unasked(&mut st, &entry, revoke_clock);
        self.settle_reservation(&mut st);
        self.forget_if_saved(inode.ino, &st);
        Ok(true)
    }

    /// A commit under the right to write that it was made under, or none: with the lease what it speaks of is
    /// lost.
    async fn commit_in(
        &self,
        inode: &Arc<Inode>,
        write_generation: u64,
        commit: &Commit,
        deadline: Instant,
    ) -> Result<Entry> {
        let still = || check_write_generation(inode, write_generation);
        let mut commit = commit.clone();
        loop {
            match self.session.change_while(deadline, still, |op| Commit { op, ..commit.clone() }).await {
                // This client asked for a newer token epoch meanwhile, and the leader has given it: the right
                // to write is the same.
                Err(e) if e.kind == ErrorKind::Stale && !self.data.left(deadline).is_zero() => {
                    let before = std::mem::replace(&mut commit.token_epoch, self.newest_token(inode).await?);
                    still()?;
                    if commit.token_epoch <= before {
                        return Err(e);
                    }
                }
                outcome => return outcome,
            }
        }
    }

    async fn newest_token(&self, inode: &Arc<Inode>) -> Result<u32> {
        self.refresh(inode).await?;
        Ok(inode.lock().lease.token_epoch())
    }

    pub fn commit_request(
        &self,
        st: &State,
        ino: InodeId,
        size: u64,
        clean: bool,
        inline: Option<Bytes>,
    ) -> Commit {
        let is_inline = inline.is_some();
        Commit {
            op: Op { session: SessionId(0), slot: 0, seq: 0 }, // set for each change
            ino,
            token_epoch: st.lease.token_epoch(),
            size,
            mtime: st.write.local().map_or_else(|| self.now(), |l| l.mtime),
            allocated: if is_inline { size } else { st.quota.allocated() },
            inline,
            drop_inline: st.leaving.may_drop(),
            clean,
            close_writes: 0,
            data_end: if is_inline { 0 } else { st.on_targets_end() },
            append_token: false,
            changed: Vec::new(),
        }
    }

    /// Commits size and time. `flushed`: everything below is durable, or was changed again since. `clean`:
    /// nothing uncommitted is left on targets if nobody writes any more.
    async fn commit_now(
        &self,
        inode: &Arc<Inode>,
        clean: bool,
        flushed: u64,
        deadline: Instant,
    ) -> Result<()> {
        let marking = if clean { Some(inode.marking.lock().await) } else { None };
        let (commit, local, write_generation) = {
            let mut st = inode.lock();
            let layout = layout_of(&st, inode.ino).ok();
            let durable = layout.map_or(st.size(), |layout| st.durable_size(&layout));
            let clean = clean && st.is_all_sent();
            if clean {
                st.write.begin_declaring_clean();
            }
            let size = durable.max(flushed).max(st.committed_size());
            let changed = st.changed.take_below(size);
            st.write.note_commit(self.env.clock.now());
            let commit = Commit { changed, ..self.commit_request(&st, inode.ino, size, clean, None) };
            (commit, st.write.local(), st.write.generation())
        };
        let revoke_clock = self.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.reservations.committing(limited).await;
        let reported = self.commit_in(inode, write_generation, &commit, deadline).await;
        let mut st = inode.lock();
        if commit.clean {
            st.write.note_declared_clean(self.tick_revoke_clock());
        }
        drop(marking);
        let entry = reported.inspect_err(|_| st.changed.put_back(&commit.changed))?;
        self.note_committed(&mut st, &entry);
        drop(committing);
        if st.write.generation() != write_generation {
            self.apply_to(&mut st, &entry, revoke_clock);
            self.settle_reservation(&mut st);
            return Ok(());
        }
        let is_whole_size = commit.size == st.size();
        st.write.note_committed(local, is_whole_size);
        if commit.drop_inline {
            st.leaving.end();
        }
        self.apply_unasked(&mut st, &entry, revoke_clock);
        self.settle_reservation(&mut st);
        if let Ok(layout) = layout_of(&st, inode.ino) {
            let first = layout.stripe_of(st.committed_size());
            st.write.forget_touched_below(first);
        }
        self.forget_if_saved(inode.ino, &st);
        Ok(())
    }

    /// Sends dirty data of the inode that is dirty for the longest time, so that writers get memory. One at a
    /// time.
    pub fn relieve(&self) {
        if self.relieving.swap(true, Ordering::AcqRel) {
            return;
        }
        let me = self.arc();
        self.env.tasks.spawn("relieve memory", async move {
            let oldest = me
                .dirty_inodes()
                .into_iter()
                .filter_map(|ino| me.known_inode(ino))
                .filter_map(|inode| {
                    let since = inode.lock().write.dirty_age_start();
                    since.map(|since| (since, inode))
                })
                .min_by_key(|(since, inode)| (*since, inode.ino));
            if let Some((_, inode)) = oldest {
                // Its error stays with the inode.
                let _ = me.flush_data(&inode, Occasion::Growing).await;
                inode.lock().write.restart_dirty_age(me.env.clock.now());
            }
            me.relieving.store(false, Ordering::Release);
        });
    }

    /// Saves what has been dirty for a while, and tells the leader what is durable of files that grow: a copy
    /// to home begins with that. Errors stay with the inodes.
    pub async fn write_back_aged(&self) {
        for inode in self.dirty_inodes().into_iter().filter_map(|ino| self.known_inode(ino)) {
            let unreported_end = inode.lock().write.unreported_end();
            if let Some(end) = unreported_end {
                self.report_left_behind(&inode, end).await;
            }
            let due = due(&inode.lock(), inode.ino, self.env.clock.now());
            match due {
                Due::Nothing if self.can_settle_unresolved(&inode) => {
                    drop(self.flush(&inode, Occasion::Growing, false).await);
                }
                Due::Nothing => self.forget_if_saved(inode.ino, &inode.lock()),
                Due::Flush => drop(self.flush(&inode, Occasion::Growing, false).await),
                Due::Settle => drop(self.settle_direct(&inode).await),
                Due::Commit => self.report_durable(&inode).await,
            }
            self.report_close_of(inode.ino).await; // it may have waited for this
        }
    }

    /// Whether what a failed write left at some targets can be settled: enough of them are there again.
    fn can_settle_unresolved(&self, inode: &Inode) -> bool {
        let st = inode.lock();
        let (Some(stripe), Ok(layout)) = (st.write.first_unresolved(), layout_of(&st, inode.ino)) else {
            return false;
        };
        let s = self.stripe_ref(st.object(inode.ino), layout, stripe, self.deadline());
        self.data.view(&s).is_ok_and(|view| view.group().is_writable())
    }

    /// Tells the leader what is durable, unless somebody is about to. Errors stay with the inode.
    async fn report_durable(&self, inode: &Arc<Inode>) {
        if let Ok(_one) = inode.flushing.try_lock() {
            drop(self.commit_now(inode, false, 0, self.deadline()).await);
        }
    }
}

impl Inner {
    pub fn forget_if_saved(&self, ino: InodeId, st: &State) {
        if !st.is_dirty() && !st.direct.are_pending() && st.write.unreported_end().is_none() {
            self.forget_dirty(ino);
        }
    }
}

/// What write-back has to do for a file.
enum Due {
    Nothing,
    /// Everything dirty is saved.
    Flush,
    /// Direct writes that the leader has not heard of.
    Settle,
    /// What is durable becomes part of the file; dirty bytes wait for their stripe to be full.
    Commit,
}

fn due(st: &State, ino: InodeId, now: Instant) -> Due {
    let old = |since: Option<Instant>, age| since.is_none_or(|since| now.since(since) >= age);
    if st.write.dirty_since().is_some() && old(st.write.dirty_since(), DIRTY_AGE_MAX) {
        return Due::Flush;
    }
    if st.direct.are_pending() && old(st.direct.commit_at(), UNREPORTED_MAX) {
        return Due::Settle;
    }
    let Ok(layout) = layout_of(st, ino) else { return Due::Nothing };
    let unreported = unreported_bytes(st, &layout) > 0;
    if unreported && old(st.write.committed_at(), UNREPORTED_MAX) { Due::Commit } else { Due::Nothing }
}

/// What its only writer could tell of a file now.
fn unreported_bytes(st: &State, layout: &Layout) -> u64 {
    let alone = st.lease.is_write() && st.is_on_targets();
    if alone { st.changed.bytes_below(st.durable_size(layout)) } else { 0 }
}

/// Whether the leader is told at once.
fn is_much_unreported(st: &State, layout: &Layout, now: Instant) -> bool {
    st.write.committed_at().is_none_or(|at| now.since(at) >= REPORT_PAUSE)
        && unreported_bytes(st, layout) >= UNREPORTED_STRIPES * layout.stripe_bytes()
}

/// Whether the right to write is still of that write generation.
pub fn check_write_generation(inode: &Inode, write_generation: u64) -> Result<()> {
    match inode.lock().write.generation() == write_generation {
        true => Ok(()),
        false => Err(Error::stale(format!("file {}: the right to write it was lost meanwhile", inode.ino))),
    }
}

/// Changed data of a file nobody syncs or closes is saved after this long.
const DIRTY_AGE_MAX: std::time::Duration = std::time::Duration::from_secs(5);
/// Durable bytes that the leader does not know of are told after this long.
const UNREPORTED_MAX: std::time::Duration = std::time::Duration::from_secs(1);
/// So much of them is told at once: a fast stream then reaches home evenly,
const UNREPORTED_STRIPES: u64 = 4;
/// but never more often than this, however fast it is.
const REPORT_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// The whole of a small file: its inline bytes with the dirty ones over them.
fn inline_content(st: &State, base: &Bytes, size: usize) -> Bytes {
    assert!(size <= INLINE_MAX, "only small files are inline");
    let mut content = vec![0; size];
    let kept = base.len().min(size);
    content[..kept].copy_from_slice(&base[..kept]);
    if let Some(buf) = st.write.dirty_of(0) {
        for (at, bytes) in buf.copy_range(0, size as u32) {
            content[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        }
    }
    content.into()
}

/// What of `0..end` is in none of the ranges.
fn gaps(ranges: &[(u32, u32)], end: u32) -> Vec<(u32, u32)> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|(_, b)| *b));
    let ends = ranges.iter().map(|(a, _)| *a).chain([end]);
    starts.zip(ends).map(|(a, b)| (a, b.min(end))).filter(|(a, b)| a < b).collect()
}

/// The size and where the bytes are stay as they were committed: reading needs nothing more of the leader.
fn only_times_left(st: &State) -> bool {
    let same_size = st.write.local().is_none_or(|local| local.size == st.committed_size());
    st.lease.is_write() && same_size && st.is_on_targets()
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
/// How much of a stripe so many bytes are; at least one part.
fn parts_of(len: u32, stripe_bytes: u64) -> u32 {
    (u64::from(len) * u64::from(STRIPE_PARTS)).div_ceil(stripe_bytes).clamp(1, STRIPE_PARTS.into()) as u32
}
