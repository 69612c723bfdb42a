//! Changed data of one inode on its way to targets, and what the leader knows of it.
//!
//! Invariants: of a stripe at most one send is under way; what was sent under a right to write that has ended
//! is no part of the file's changes any more; nothing is sent before the leader expects it ([`Declared`]).
//! Pure: sends are the caller's.
use crate::dirty::StripeBuf;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use weir_env::Instant;
use weir_proto::map::Layout;
use weir_proto::meta::Time;
use weir_proto::{Error, ErrorKind, Version};

/// Size and time that a Write lease made ours, not committed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    pub size: u64,
    pub mtime: Time,
    /// Grows with each change: tells whether a commit took the newest.
    pub change: u64,
}

/// A stripe on its way to targets.
pub struct Sending {
    pub id: u64,
    /// Of the right to write: see [`WriteState::generation`].
    pub write_generation: u64,
    /// Offset within the stripe, bytes.
    pub parts: Vec<(u32, Bytes)>,
}

/// What a send that failed left of a stripe, until it is everywhere or nowhere.
#[derive(Clone, Copy, Debug)]
pub enum Unresolved {
    /// Parts of a fresh stripe, at a place where nothing was: nobody can read it.
    Fresh,
    /// A version that is prepared or committed at some targets: what is read depends on which of them are
    /// asked.
    InDoubt(Version),
}

/// What the leader was told of bytes on targets that are not committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Declared {
    /// It knows that there may be some.
    Unclean,
    /// It is being told that there are none.
    Reporting,
    /// It was told so, or may have been, before this time of the revoke clock.
    Clean(u64),
}

pub struct WriteState {
    /// Grows whenever a Write lease begins or ends: what was sent under an earlier one may be fenced or be
    /// lost, and was told to be; it is nobody's business any more.
    generation: u64,
    local: Option<Local>,
    change: u64,
    dirty: BTreeMap<u64, StripeBuf>,
    dirty_since: Option<Instant>,
    sending: BTreeMap<u64, Sending>,
    send_count: u64,
    /// Stripes beyond everything committed that something was sent for.
    touched: BTreeSet<u64>,
    /// Those where a send failed, and left something at some targets. The size never covers one.
    unresolved: BTreeMap<u64, Unresolved>,
    /// Up to where a write that failed may have left bytes that the leader could not be told of.
    unreported_end: Option<u64>,
    /// End of what was sent since the Write lease began.
    sent_end: u64,
    /// The metadata leader's upper bound of what may be on targets.
    data_end: u64,
    /// Nothing is on targets past the committed size but what this client sent.
    tail_clean: bool,
    /// Whether the leader may believe that nothing uncommitted is on targets. Nothing is sent before it has
    /// answered that it knows better: if this client dies, what it sent past the size would be looked for by
    /// nobody.
    declared: Declared,
    committed_at: Option<Instant>,
}

impl Default for WriteState {
    fn default() -> WriteState {
        WriteState {
            generation: 0,
            local: None,
            change: 0,
            dirty: BTreeMap::new(),
            dirty_since: None,
            sending: BTreeMap::new(),
            send_count: 0,
            touched: BTreeSet::new(),
            unresolved: BTreeMap::new(),
            unreported_end: None,
            sent_end: 0,
            data_end: 0,
            tail_clean: false,
            declared: Declared::Unclean,
            committed_at: None,
        }
    }
}

/// The right to write, and what is changed under it.
impl WriteState {
    pub fn generation(&self) -> u64 {
        self.generation
    }
    pub fn begin_generation(&mut self) {
        self.generation += 1;
        self.touched.clear();
        self.unresolved.clear();
        self.sent_end = 0;
        self.tail_clean = false;
    }
    /// The right to write was given up.
    pub fn give_up(&mut self) {
        self.local = None;
        self.begin_generation();
    }
    /// It was lost, with what is not saved. The leader has the file recovered.
    pub fn lose(&mut self) {
        self.dirty.clear();
        self.dirty_since = None;
        self.unreported_end = None;
    }

    pub fn local(&self) -> Option<Local> {
        self.local
    }
    /// A write that makes the file at least `size` long.
    pub fn note_write(&mut self, size: u64, mtime: Time, at: Instant) {
        self.change += 1;
        self.local = Some(Local { size, mtime, change: self.change });
        self.dirty_since.get_or_insert(at);
    }
    /// What was written directly made the file at least `size` long.
    pub fn note_grown(&mut self, size: u64) {
        if let Some(local) = &mut self.local {
            local.size = local.size.max(size);
        }
    }
    /// All was committed, with the bytes in the inode, unless something was changed since.
    pub fn note_inline_committed(&mut self, committed: Local) {
        if self.local.is_some_and(|l| l.change == committed.change) {
            self.local = None;
            self.dirty.clear();
            self.dirty_since = None;
        }
    }
    /// The size and time of `committed` are committed, and all bytes, unless something was changed since.
    pub fn note_committed(&mut self, committed: Option<Local>, is_whole_size: bool) {
        let newest = self.local.map(|l| l.change) == committed.map(|l| l.change);
        if newest && is_whole_size && self.dirty.is_empty() && self.sending.is_empty() {
            self.local = None;
            self.dirty_since = None;
        }
    }
    /// Stripes below this one are committed.
    pub fn forget_touched_below(&mut self, stripe: u64) {
        self.touched = self.touched.split_off(&stripe);
    }
    pub fn committed_at(&self) -> Option<Instant> {
        self.committed_at
    }
    pub fn note_commit(&mut self, at: Instant) {
        self.committed_at = Some(at);
    }

    /// Whether something was changed here that is not part of the file yet. What failed is not: that was
    /// told.
    pub fn is_unsaved(&self) -> bool {
        self.local.is_some() || !self.dirty.is_empty() || self.own_sends().next().is_some()
    }
    pub fn is_dirty(&self) -> bool {
        self.is_unsaved() || !self.unresolved.is_empty()
    }
    /// Whether nothing is on its way to targets, nor about to be.
    pub fn is_all_sent(&self) -> bool {
        self.dirty.is_empty() && self.unresolved.is_empty() && self.sending.is_empty()
    }
    /// Whether what is read of a stripe depends on which targets are asked, or the leader does not know what
    /// is on targets.
    pub fn is_in_doubt(&self) -> bool {
        let in_doubt = |unresolved: &Unresolved| matches!(unresolved, Unresolved::InDoubt(_));
        self.unreported_end.is_some() || self.unresolved.values().any(in_doubt)
    }
}

/// Dirty buffers.
impl WriteState {
    pub fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }
    pub fn dirty_of(&self, stripe: u64) -> Option<&StripeBuf> {
        self.dirty.get(&stripe)
    }
    pub fn dirty_ranges(&self, stripe: u64) -> Vec<(u32, u32)> {
        self.dirty_of(stripe).map(|buf| buf.ranges()).unwrap_or_default()
    }
    pub fn dirty_within(&self, stripes: RangeInclusive<u64>) -> impl Iterator<Item = (&u64, &StripeBuf)> {
        self.dirty.range(stripes)
    }
    /// For bytes to become dirty in.
    pub fn buffer(&mut self, stripe: u64) -> &mut StripeBuf {
        self.dirty.entry(stripe).or_default()
    }
    pub fn drop_if_empty(&mut self, stripe: u64) {
        if self.dirty_of(stripe).is_some_and(|buf| buf.covered_bytes() == 0) {
            self.dirty.remove(&stripe);
        }
    }
    pub fn take_dirty(&mut self, stripe: u64) -> StripeBuf {
        self.dirty.remove(&stripe).unwrap_or_default()
    }
    /// They could not be saved.
    pub fn drop_dirty(&mut self) {
        self.dirty.clear();
    }
    /// When something became dirty that is not saved.
    pub fn dirty_since(&self) -> Option<Instant> {
        self.dirty_since
    }
    /// Since when there are dirty bytes that could be sent.
    pub fn dirty_age_start(&self) -> Option<Instant> {
        self.dirty_since.filter(|_| !self.dirty.is_empty())
    }
    /// All that was dirty is on its way: what is now is young.
    pub fn restart_dirty_age(&mut self, now: Instant) {
        self.dirty_since = self.has_dirty().then_some(now);
    }
    /// Whether what is dirty of a stripe had better go now: all of it, or all that follows what was sent of
    /// it before. The leader is told of what is on targets without a gap, and a writer that goes on in order
    /// adds nothing to this stripe.
    pub fn is_complete(&self, layout: &Layout, stripe: u64) -> bool {
        let Some(buf) = self.dirty.get(&stripe) else { return false };
        let stripe_bytes = layout.stripe_bytes() as u32;
        buf.covered_bytes() == stripe_bytes
            || self.touched.contains(&stripe) && buf.is_whole_rest(stripe_bytes)
    }
    /// The file was set to `size`: dirty bytes past it go.
    pub fn truncate_dirty(&mut self, layout: &Layout, size: u64) {
        let stripe = layout.stripe_of(size);
        drop(self.dirty.split_off(&(stripe + 1)));
        if let Some(buf) = self.dirty.get_mut(&stripe) {
            buf.truncate((size - layout.stripe_start(stripe)) as u32);
        }
        self.drop_if_empty(stripe);
    }
    /// The size is committed at the leader, which has set it.
    pub fn truncate_local(&mut self, size: u64) {
        if self.dirty.is_empty() && self.sending.is_empty() {
            self.local = None;
        } else if let Some(local) = &mut self.local {
            local.size = size;
        }
    }
}

/// Sends to targets.
impl WriteState {
    /// Begins a send of a stripe: its number. `end`: of its bytes in the file.
    pub fn begin_send(&mut self, stripe: u64, end: u64, parts: Vec<(u32, Bytes)>) -> u64 {
        self.send_count += 1;
        let (id, write_generation) = (self.send_count, self.generation);
        let before = self.sending.insert(stripe, Sending { id, write_generation, parts });
        assert!(before.is_none(), "of stripe {stripe} a send is under way: later bytes could arrive first");
        self.touch(stripe, end);
        id
    }
    /// Something is sent there, up to `end`.
    pub fn touch(&mut self, stripe: u64, end: u64) {
        self.touched.insert(stripe);
        self.sent_end = self.sent_end.max(end);
    }
    pub fn end_send(&mut self, stripe: u64) {
        self.sending.remove(&stripe);
    }
    pub fn send_count(&self) -> u64 {
        self.send_count
    }
    pub fn sent_end(&self) -> u64 {
        self.sent_end
    }
    /// What was sent past `size` before is cleaned.
    pub fn note_cleaned_past(&mut self, size: u64) {
        self.sent_end = self.sent_end.min(size);
    }
    pub fn has_sends(&self) -> bool {
        !self.sending.is_empty()
    }
    pub fn is_sending(&self, stripe: u64) -> bool {
        self.sending.contains_key(&stripe)
    }
    /// The number of the send of a stripe that is under way.
    pub fn send_of(&self, stripe: u64) -> Option<u64> {
        self.sending.get(&stripe).map(|send| send.id)
    }
    /// Stripes on their way, with the numbers of their sends.
    pub fn sends(&self) -> impl Iterator<Item = (u64, u64)> {
        self.sending.iter().map(|(stripe, send)| (*stripe, send.id))
    }
    pub fn is_touched(&self, stripe: u64) -> bool {
        self.touched.contains(&stripe)
    }
    /// What is on its way under the present right to write.
    pub fn own_sends(&self) -> impl Iterator<Item = (&u64, &Sending)> {
        self.sending.iter().filter(|(_, send)| send.write_generation == self.generation)
    }
    /// Whether something is on its way to these stripes under a right to write that has ended: it may arrive
    /// or not.
    pub fn has_strays(&self, stripes: RangeInclusive<u64>) -> bool {
        self.sending.range(stripes).any(|(_, send)| send.write_generation != self.generation)
    }
    /// The first stripe that is dirty or on its way.
    pub fn first_busy(&self) -> Option<u64> {
        self.dirty.keys().chain(self.sending.keys()).min().copied()
    }
    /// Stripes that are to be sent: dirty, or unresolved.
    pub fn due(&self) -> impl Iterator<Item = u64> {
        self.dirty.keys().chain(self.unresolved.keys()).copied()
    }
    pub fn is_due(&self, stripe: u64) -> bool {
        self.dirty.contains_key(&stripe) || self.unresolved.contains_key(&stripe)
    }

    pub fn unresolved_of(&self, stripe: u64) -> Option<Unresolved> {
        self.unresolved.get(&stripe).copied()
    }
    pub fn first_unresolved(&self) -> Option<u64> {
        self.unresolved.keys().next().copied()
    }
    /// A send failed. `generation`: under which it was.
    pub fn note_unresolved(&mut self, generation: u64, stripe: u64, unresolved: Unresolved) {
        if self.generation == generation {
            self.unresolved.insert(stripe, unresolved);
        }
    }
    /// The stripe is everywhere or nowhere now.
    pub fn note_resolved(&mut self, generation: u64, stripe: u64) {
        if self.generation == generation {
            self.unresolved.remove(&stripe);
        }
    }

    /// The size up to which every byte beyond the committed size is on targets.
    pub fn durable_size(&self, layout: &Layout, committed: u64, size: u64) -> u64 {
        let dirty = self.dirty.iter().flat_map(|(stripe, buf)| {
            let start = layout.stripe_start(*stripe);
            buf.ranges().into_iter().map(move |(a, b)| (start + u64::from(a), start + u64::from(b)))
        });
        let sending = self.own_sends().flat_map(|(stripe, send)| {
            let start = layout.stripe_start(*stripe);
            let end = move |at: u32, bytes: &Bytes| start + u64::from(at) + bytes.len() as u64;
            send.parts.iter().map(move |(at, bytes)| (start + u64::from(*at), end(*at, bytes)))
        });
        let unresolved =
            self.unresolved.keys().map(|s| (layout.stripe_start(*s), layout.stripe_start(s + 1)));
        dirty
            .chain(sending)
            .chain(unresolved)
            .filter(|(_, end)| *end > committed)
            .map(|(start, _)| start.max(committed))
            .fold(size, u64::min)
    }
}

/// Bytes on targets that are no part of the file, and what the leader knows of them.
impl WriteState {
    pub fn data_end(&self) -> u64 {
        self.data_end
    }
    pub fn note_data_end(&mut self, data_end: u64) {
        self.data_end = data_end;
    }
    /// Nothing was ever committed, or may be on targets, from here on (but for what was sent under this
    /// lease).
    pub fn virgin_from(&self, committed: u64) -> u64 {
        committed.max(if self.tail_clean { 0 } else { self.data_end })
    }
    /// End of everything that may be on targets. `committed`: of it.
    pub fn on_targets_end(&self, committed: u64) -> u64 {
        let left = if self.tail_clean { 0 } else { self.data_end };
        committed.max(left).max(self.sent_end)
    }
    /// Bytes of an earlier, longer file may lie past the size: zero them before the file grows.
    pub fn has_old_tail(&self, committed: u64) -> bool {
        !self.tail_clean && self.data_end > committed
    }
    pub fn note_tail(&mut self, is_clean: bool) {
        self.tail_clean = is_clean;
    }
    /// Bytes past the size are old from now on. `exclusive`: it was truncated under this client's Write
    /// lease; else that may have come while the truncation was on its way, and with it the belief that
    /// nothing is past the size of before.
    pub fn note_truncation(&mut self, exclusive: bool) {
        self.tail_clean = false;
        if exclusive {
            self.sent_end = 0;
            self.touched.clear();
        }
    }

    pub fn unreported_end(&self) -> Option<u64> {
        self.unreported_end
    }
    /// The leader could not be told of what a failed write left.
    pub fn note_unreported(&mut self, end: u64) {
        self.unreported_end = self.unreported_end.max(Some(end));
    }
    /// It knows of what is left up to `end`.
    pub fn note_reported(&mut self, end: u64) {
        self.unreported_end = self.unreported_end.filter(|unreported| *unreported > end);
    }

    /// Whether the leader expects uncommitted bytes on targets.
    pub fn is_declared_unclean(&self) -> bool {
        self.declared == Declared::Unclean
    }
    pub fn begin_declaring_clean(&mut self) {
        self.declared = Declared::Reporting;
    }
    pub fn note_declared_clean(&mut self, revoke_clock: u64) {
        self.declared = Declared::Clean(revoke_clock);
    }
    /// While nobody tells the leader anything, though who did may have given up: whether it may have been
    /// told.
    pub fn is_clean_by_now(&mut self, revoke_clock: u64) -> bool {
        if self.declared == Declared::Reporting {
            self.declared = Declared::Clean(revoke_clock);
        }
        self.declared != Declared::Unclean
    }
    /// The leader has answered a request for the Write lease that was sent at `revoke_clock`: granted or not,
    /// it expects such bytes now.
    pub fn asked_for_write(&mut self, revoke_clock: u64) {
        if matches!(self.declared, Declared::Clean(reported) if reported <= revoke_clock) {
            self.declared = Declared::Unclean;
        }
    }

    /// Panics where an invariant of this file does not hold.
    pub fn check(&self) {
        assert!(self.own_sends().next().is_none() || self.sending.values().all(|s| s.id <= self.send_count));
        assert!(self.dirty.values().all(|buf| buf.end() > 0 || buf.covered_bytes() == 0));
    }
}

/// Direct writes: those past the buffers.
#[derive(Debug, Default)]
pub struct DirectWrites {
    /// With the commits of them.
    under_way: u32,
    /// Writes that the leader was not told the time of.
    pending: bool,
    commit_at: Option<Instant>,
}

impl DirectWrites {
    pub fn begin(&mut self) {
        self.under_way += 1;
    }
    pub fn end(&mut self) {
        assert!(self.under_way > 0, "what ends had begun");
        self.under_way -= 1;
    }
    pub fn are_under_way(&self) -> bool {
        self.under_way > 0
    }
    pub fn are_pending(&self) -> bool {
        self.pending
    }
    pub fn note_pending(&mut self, pending: bool) {
        self.pending = pending;
    }
    pub fn commit_at(&self) -> Option<Instant> {
        self.commit_at
    }
    pub fn begin_commit(&mut self, at: Instant) {
        self.pending = false;
        self.commit_at = Some(at);
    }
}

/// What was taken from programs and could not be saved.
#[derive(Debug, Default)]
pub struct WriteErrors {
    last: Option<Error>,
    count: u64,
}

impl WriteErrors {
    /// If another has the file now, the program need not know how that came: to it, bytes are lost.
    pub fn note(&mut self, mut e: Error) {
        if e.kind == ErrorKind::Stale {
            e.kind = ErrorKind::Io;
        }
        self.count += 1;
        self.last = Some(e);
    }
    pub fn count(&self) -> u64 {
        self.count
    }
    /// The last one, if there are more than `reported`.
    pub fn since(&self, reported: u64) -> Option<&Error> {
        self.last.as_ref().filter(|_| self.count > reported)
    }
}
