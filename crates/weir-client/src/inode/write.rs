//! Changed data of one inode in flight to targets, and the leader's knowledge of it.
//!
//! Invariants: a stripe has at most one send in flight; bytes sent under an earlier write generation no
//! longer belong to the file's changes; nothing is sent before the leader expects it ([`Declared`]). Pure:
//! the caller does the sends.
use crate::dirty::StripeBuf;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use weir_env::Instant;
use weir_proto::map::Layout;
use weir_proto::meta::Time;
use weir_proto::{Error, ErrorKind, Version};

/// Size and time that this client changed under a Write lease, not committed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    pub size: u64,
    pub mtime: Time,
    /// Grows with each change: shows whether a commit took the newest.
    pub change: u64,
}

/// A stripe in flight to targets.
pub struct Sending {
    pub id: u64,
    /// The write generation: see [`WriteState::generation`].
    pub write_generation: u64,
    /// Offset within the stripe, bytes.
    pub parts: Vec<(u32, Bytes)>,
}

/// Leftovers of a failed send of a stripe, until they are everywhere or nowhere.
#[derive(Clone, Copy, Debug)]
pub enum Unresolved {
    /// Parts of a fresh stripe, at a place that had no data: no reader can see it.
    Fresh,
    /// A version that is prepared or committed at some targets: the result of a read depends on which of them
    /// are asked.
    InDoubt(Version),
}

/// The leader's knowledge of uncommitted bytes on targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Declared {
    /// The leader knows that there may be some.
    Unclean,
    /// A report that there are none is in flight.
    Reporting,
    /// It has, or may have, the report that there are none, since before this time of the revoke clock.
    Clean(u64),
}

pub struct WriteState {
    /// Grows whenever a Write lease begins or ends: bytes sent under an earlier one may be fenced or lost,
    /// and were reported as that; they no longer matter.
    generation: u64,
    local: Option<Local>,
    change: u64,
    dirty: BTreeMap<u64, StripeBuf>,
    dirty_since: Option<Instant>,
    sending: BTreeMap<u64, Sending>,
    send_count: u64,
    /// Stripes beyond everything committed that had a send.
    touched: BTreeSet<u64>,
    /// Those where a send failed and left parts at some targets. The size never covers one.
    unresolved: BTreeMap<u64, Unresolved>,
    /// The end up to which a failed write may have left bytes that could not be reported to the leader.
    unreported_end: Option<u64>,
    /// End of the bytes sent since the Write lease began.
    sent_end: u64,
    /// The metadata leader's upper bound of the bytes on targets.
    data_end: u64,
    /// Only bytes that this client sent are on targets past the committed size.
    tail_clean: bool,
    /// Whether the leader may believe that no uncommitted bytes are on targets. Nothing is sent before it has
    /// acknowledged the opposite: otherwise, if this client dies, its bytes past the size would not be
    /// recovered.
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

/// The Write lease, and the changes under it.
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
    /// The Write lease was returned.
    pub fn give_up(&mut self) {
        self.local = None;
        self.begin_generation();
    }
    /// It was lost, together with unsaved changes. The leader has the file recovered.
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
    /// The modification time of the changes so far is set.
    pub fn set_mtime(&mut self, mtime: Time) {
        if let Some(local) = &mut self.local {
            local.mtime = mtime;
        }
    }
    /// Direct writes made the file at least `size` long.
    pub fn note_grown(&mut self, size: u64) {
        if let Some(local) = &mut self.local {
            local.size = local.size.max(size);
        }
    }
    /// All was committed, with the inline bytes, unless changes were made since.
    pub fn note_inline_committed(&mut self, committed: Local) {
        if self.local.is_some_and(|l| l.change == committed.change) {
            self.local = None;
            self.dirty.clear();
            self.dirty_since = None;
        }
    }
    /// The size and time of `committed` are committed, and all bytes, unless changes were made since.
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

    /// Whether there are changes that are not part of the file yet. A failed change does not count: it was
    /// reported.
    pub fn is_unsaved(&self) -> bool {
        self.local.is_some() || !self.dirty.is_empty() || self.own_sends().next().is_some()
    }
    /// Written bytes that no target has acknowledged yet.
    pub fn unsaved_bytes(&self) -> u64 {
        let dirty = self.dirty.values().map(|buf| u64::from(buf.covered_bytes()));
        let parts = self.sending.values().flat_map(|send| &send.parts);
        dirty.sum::<u64>() + parts.map(|(_, bytes)| bytes.len() as u64).sum::<u64>()
    }
    pub fn is_dirty(&self) -> bool {
        self.is_unsaved() || !self.unresolved.is_empty()
    }
    /// Whether nothing is in flight to targets, nor about to be.
    pub fn is_all_sent(&self) -> bool {
        self.dirty.is_empty() && self.unresolved.is_empty() && self.sending.is_empty()
    }
    /// Whether the content of a stripe depends on which targets are asked, or the leader does not know which
    /// bytes are on targets.
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
    /// A buffer for new dirty bytes.
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
    /// The dirty bytes could not be saved.
    pub fn drop_dirty(&mut self) {
        self.dirty.clear();
    }
    /// The time since which there are unsaved changes.
    pub fn dirty_since(&self) -> Option<Instant> {
        self.dirty_since
    }
    /// The time since which there are dirty bytes that could be sent.
    pub fn dirty_age_start(&self) -> Option<Instant> {
        self.dirty_since.filter(|_| !self.dirty.is_empty())
    }
    /// All dirty bytes are in flight: newer ones are young.
    pub fn restart_dirty_age(&mut self, now: Instant) {
        self.dirty_since = self.has_dirty().then_some(now);
    }
    /// Whether the dirty bytes of a stripe should be sent now: they are all of it, or all that follows the
    /// part sent before. The leader learns of bytes on targets without a gap, and a sequential writer adds
    /// nothing to this stripe.
    pub fn is_complete(&self, layout: &Layout, stripe: u64) -> bool {
        let Some(buf) = self.dirty.get(&stripe) else { return false };
        let stripe_bytes = layout.stripe_bytes() as u32;
        buf.covered_bytes() == stripe_bytes
            || self.touched.contains(&stripe) && buf.is_whole_rest(stripe_bytes)
    }
    /// The file was set to `size`: dirty bytes past it are dropped.
    pub fn truncate_dirty(&mut self, layout: &Layout, size: u64) {
        let stripe = layout.stripe_of(size);
        drop(self.dirty.split_off(&(stripe + 1)));
        if let Some(buf) = self.dirty.get_mut(&stripe) {
            buf.truncate((size - layout.stripe_start(stripe)) as u32);
        }
        self.drop_if_empty(stripe);
    }
    /// The leader has set and committed the size.
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
    /// Begins a send of a stripe: returns its number. `end`: of its bytes in the file.
    pub fn begin_send(&mut self, stripe: u64, end: u64, parts: Vec<(u32, Bytes)>) -> u64 {
        self.send_count += 1;
        let (id, write_generation) = (self.send_count, self.generation);
        let before = self.sending.insert(stripe, Sending { id, write_generation, parts });
        assert!(before.is_none(), "a send of stripe {stripe} is in flight: later bytes could arrive first");
        self.touch(stripe, end);
        id
    }
    /// Bytes are sent to the stripe, up to `end`.
    pub fn touch(&mut self, stripe: u64, end: u64) {
        self.touched.insert(stripe);
        self.sent_end = self.sent_end.max(end);
    }
    pub fn end_send(&mut self, stripe: u64) {
        let send = self.sending.remove(&stripe);
        assert!(send.is_some(), "no send of stripe {stripe} is in flight");
    }
    pub fn send_count(&self) -> u64 {
        self.send_count
    }
    pub fn sent_end(&self) -> u64 {
        self.sent_end
    }
    /// Bytes sent past `size` before are cleaned.
    pub fn note_cleaned_after(&mut self, size: u64) {
        self.sent_end = self.sent_end.min(size);
    }
    pub fn has_sends(&self) -> bool {
        !self.sending.is_empty()
    }
    pub fn is_sending(&self, stripe: u64) -> bool {
        self.sending.contains_key(&stripe)
    }
    /// The number of the send in flight of a stripe.
    pub fn send_of(&self, stripe: u64) -> Option<u64> {
        self.sending.get(&stripe).map(|send| send.id)
    }
    /// Stripes in flight, with the numbers of their sends.
    pub fn sends(&self) -> impl Iterator<Item = (u64, u64)> {
        self.sending.iter().map(|(stripe, send)| (*stripe, send.id))
    }
    pub fn is_touched(&self, stripe: u64) -> bool {
        self.touched.contains(&stripe)
    }
    /// The sends in flight under the present Write lease.
    pub fn own_sends(&self) -> impl Iterator<Item = (&u64, &Sending)> {
        self.sending.iter().filter(|(_, send)| send.write_generation == self.generation)
    }
    /// Whether sends to these stripes are in flight under an earlier write generation: they may arrive or
    /// not.
    pub fn has_strays(&self, stripes: RangeInclusive<u64>) -> bool {
        self.sending.range(stripes).any(|(_, send)| send.write_generation != self.generation)
    }
    /// The first stripe that is dirty or in flight.
    pub fn first_busy(&self) -> Option<u64> {
        self.dirty.keys().chain(self.sending.keys()).min().copied()
    }
    /// Stripes that need a send: dirty, or unresolved.
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
    /// A send failed. `generation`: its write generation.
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

/// Bytes on targets outside of the file, and the leader's knowledge of them.
impl WriteState {
    pub fn data_end(&self) -> u64 {
        self.data_end
    }
    pub fn note_data_end(&mut self, data_end: u64) {
        self.data_end = data_end;
    }
    /// Nothing was ever committed, or may be on targets, from here on (except bytes sent under this lease).
    pub fn virgin_from(&self, committed: u64) -> u64 {
        committed.max(if self.tail_clean { 0 } else { self.data_end })
    }
    /// End of everything that may be on targets. `committed`: the committed size.
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
    /// lease; otherwise that lease may have been granted while the truncation was in flight, and with it the
    /// belief that nothing is past the former size.
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
    /// The leftovers of a failed write could not be reported to the leader.
    pub fn note_unreported(&mut self, end: u64) {
        self.unreported_end = self.unreported_end.max(Some(end));
    }
    /// The leader knows of the leftovers up to `end`.
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
    /// While no report to the leader is in flight, though one may have been abandoned: whether it may have
    /// arrived.
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

/// Direct writes, which bypass the buffers.
#[derive(Debug, Default)]
pub struct DirectWrites {
    /// Including their commits.
    under_way: u32,
    /// Writes whose time the leader does not know.
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

/// Accepted writes that could not be saved.
#[derive(Debug, Default)]
pub struct WriteErrors {
    last: Option<Error>,
    count: u64,
}

impl WriteErrors {
    /// If another client has the lease now, the program need not know the reason: to it, bytes are lost.
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
