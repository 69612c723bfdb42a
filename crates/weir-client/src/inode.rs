//! What a client knows of one inode: lease, attributes, names, changed data on its way.
//!
//! Invariants: attributes, names and data are believed only under a lease; a lease is raised by replies and
//! lowered only by a revoke, a release or the session's end; a reply to a request that was sent before the
//! last revoke of the inode grants no more than that revoke left. Pure state: no I/O, no time but what is
//! passed in.
use crate::api::Stat;
use crate::changed::Changed;
use crate::dirty::StripeBuf;
use crate::known_names::Names;
use crate::lent::Loans;
use crate::prefetch::Pattern;
use crate::recall::Ranges;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard};
use tokio::sync::Notify;
use weir_env::Instant;
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Entry, Lease, LeaseKind, Time};
use weir_proto::snapshot::Layer;
use weir_proto::{Error, ErrorKind, InodeId, Result, Version, VolumeId};

/// Whether a file's bytes are in its inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inline {
    Unknown,
    /// Data is on targets, or there is none.
    No,
    /// These bytes, then zeros up to the size.
    Yes(Bytes),
}

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
    /// Of the right to write: see [`State::write_generation`].
    pub write_generation: u64,
    /// Offset within the stripe, bytes.
    pub parts: Vec<(u32, Bytes)>,
}

/// What a send that failed left of a stripe, until it is everywhere or nowhere.
#[derive(Clone, Copy, Debug)]
pub enum Unresolved {
    /// Parts of a fresh stripe, at a place where nothing was: nobody can read it.
    Fresh,
    /// A version that is prepared or committed at some targets: what is read depends on which of them are asked.
    InDoubt(Version),
}

/// No volume has this number.
pub const NO_LIMIT: VolumeId = VolumeId(0);

pub struct Inode {
    pub ino: InodeId,
    state: Mutex<State>,
    /// Sends, fetches or a revoke of this inode ended.
    pub changed: Notify,
    /// One flush, commit, truncation or revoke at a time.
    pub flushing: tokio::sync::Mutex<()>,
    /// One append, truncation or cleaning of an old tail at a time; taken before `flushing`.
    pub growing: tokio::sync::Mutex<()>,
    /// One word to the leader at a time about whether something uncommitted may be on targets; taken after `flushing`.
    pub marking: tokio::sync::Mutex<()>,
}

/// What the leader was told of bytes on targets that are not committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Declared {
    /// It knows that there may be some.
    Unclean,
    /// It is being told that there are none.
    Reporting,
    /// It was told so, or may have been, before this time of the revoke clock.
    Clean(u64),
}

impl Declared {
    /// While nobody tells the leader anything, though who did may have given up: whether it may have been told.
    pub fn is_clean_by_now(&mut self, revoke_clock: u64) -> bool {
        if *self == Declared::Reporting {
            *self = Declared::Clean(revoke_clock);
        }
        *self != Declared::Unclean
    }
    /// The leader has answered a request for the Write lease that was sent at `revoke_clock`: granted or not, it expects such bytes now.
    pub fn asked_for_write(&mut self, revoke_clock: u64) {
        if matches!(*self, Declared::Clean(reported) if reported <= revoke_clock) {
            *self = Declared::Unclean;
        }
    }
}

pub struct State {
    pub lease: LeaseKind,
    /// Grows whenever a Write lease begins or ends: what was sent under an earlier one may be fenced or be lost, and was told
    /// to be; it is nobody's business any more.
    pub write_generation: u64,
    pub token_epoch: u32,
    pub recover: bool,
    /// This client has the append token: it may append and truncate (see `append_token.rs`), or it asks for
    /// it.
    pub append_token: bool,
    /// The metadata leader's upper bound of what may be on targets.
    pub data_end: u64,
    pub attr: Option<Attr>,
    /// An own change made the attributes old (the lease stays).
    pub attr_old: bool,
    /// The kernel may keep them as they are shown.
    pub attr_lent: bool,
    revoked_at: u64,
    revoke_keep: LeaseKind,
    /// The leader was told of all leases that are held here, and takes others back: replies to requests sent before grant none.
    named_at: u64,
    /// A revoke is at its last step: no new dirty data.
    pub closing_lease: bool,
    pub names: Names,
    /// Names of this directory that the kernel may keep.
    pub loans: Loans,
    pub inline: Inline,
    pub local: Option<Local>,
    /// When it was read here, if that is the access time and the leader was not told.
    pub accessed: Option<Time>,
    change: u64,
    pub dirty: BTreeMap<u64, StripeBuf>,
    pub dirty_since: Option<Instant>,
    pub sending: BTreeMap<u64, Sending>,
    pub send_count: u64,
    /// Stripes beyond everything committed that something was sent for.
    pub touched: BTreeSet<u64>,
    /// Those where a send failed, and left something at some targets. The size never covers one.
    pub unresolved: BTreeMap<u64, Unresolved>,
    /// Up to where a write that failed may have left bytes that the leader could not be told of.
    pub unreported_end: Option<u64>,
    /// End of what was sent since the Write lease began.
    pub sent_end: u64,
    /// Nothing is on targets past the committed size but what this client sent.
    pub tail_clean: bool,
    /// Whether the leader may believe that nothing uncommitted is on targets. Nothing is sent before it has answered that it knows
    /// better: if this client dies, what it sent past the size would be looked for by nobody.
    pub declared: Declared,
    /// Inline bytes were turned into dirty ones: the next commit drops them.
    pub drop_inline: bool,
    /// Those bytes, until then: if they do not get to targets they must not be lost.
    pub leaving: Bytes,
    /// The send that had them failed, and none has ended well since.
    pub leaving_unsent: bool,
    /// Bytes that data takes, with all that is changed and not committed.
    pub allocated: u64,
    /// The same as the leader knows it.
    pub charged: u64,
    /// The volume whose limit of bytes stands over new data, as the last right to write told it.
    pub limited: VolumeId,
    /// Quota reserved in a volume, in bytes, and in which.
    pub reserved: u64,
    pub reserved_of: VolumeId,
    /// Of that, for direct writes that are under way.
    pub direct_reserved: u64,
    /// Written since the leader was told; durable, or it was tried.
    pub changed: Changed,
    /// Of the last commit.
    pub committed_at: Option<Instant>,
    /// Direct writes that the leader was not told the time of.
    pub direct_pending: bool,
    pub direct_commit_at: Option<Instant>,
    pub error: Option<Error>,
    pub error_count: u64,
    pub open_read: u32,
    pub open_write: u32,
    /// A process has locked something here: later closes are announced before they end.
    pub closes_unlock: bool,
    /// Grows when cached data becomes old.
    pub data_change: u64,
    /// Leases that ended: how many, and before which of their ends the kernel may hold pages.
    pub leases_lost: u64,
    pub pages_since: u64,
    pub pattern: Pattern,
    /// Ranges being fetched ahead.
    pub fetching: BTreeMap<u64, u64>,
    pub forgotten: bool,
    /// Stripes that are at home only, where they are known under the lease (see `recall.rs`).
    pub evicted: Option<Ranges>,
    /// What this client is evicting of a file that it writes (see `evict_own.rs`).
    pub evicting: Option<(u64, u64)>,
    /// Beginnings and ends of that.
    pub evictions: u64,
    /// Direct writes, and the commits of them, that are under way.
    pub direct_writes: u32,
    /// The leader's word that nobody caches the file, so bytes may be sent past leases. It takes it back by a
    /// revoke.
    pub direct: bool,
    /// Sends on that word, how many by how many revokes had come when they began: a revoke waits for those of
    /// before it.
    direct_sends: BTreeMap<u64, u32>,
    revokes: u64,
    /// The kernel is dropping the file's pages for a revoke.
    pub dropping: Option<Dropping>,
    /// Reads and writes that left, or are about to leave, pages in the kernel that no lease protects, until it has dropped them.
    pub unprotected_pages: u32,
    /// Bytes in older objects, where they are known under the lease (see `layers.rs`).
    pub layers: Option<Vec<Layer>>,
}

/// What reads have to do with pages while the kernel drops them.
#[derive(Default)]
pub struct Dropping {
    /// Bytes that reads brought meanwhile, (from, to): pages of them may be there.
    filled: Vec<(u64, u64)>,
    /// Reads that wait for the end of it, (from, to). The kernel has locked their pages, which are empty.
    waiting: Vec<(u64, u64)>,
}

/// Reads that are told apart while pages are dropped.
const FILLS_MAX: usize = 64;

impl Dropping {
    pub fn note_fill(&mut self, from: u64, to: u64) {
        if self.filled.len() == FILLS_MAX {
            self.filled = vec![(0, u64::MAX)];
        }
        self.filled.push((from, to));
    }
    pub fn begin_wait(&mut self, from: u64, to: u64) {
        self.waiting.push((from, to));
    }
    pub fn end_wait(&mut self, from: u64, to: u64) {
        if let Some(at) = self.waiting.iter().position(|w| *w == (from, to)) {
            self.waiting.swap_remove(at);
        }
    }
    /// What has to be dropped once more.
    pub fn take_filled(&mut self) -> Vec<(u64, u64)> {
        let mut filled = std::mem::take(&mut self.filled);
        filled.retain(|(from, to)| !self.waiting.iter().any(|(a, b)| a <= from && to <= b));
        filled
    }
}

impl Inode {
    /// `named_at`: of the last time that all leases were named.
    pub fn new(ino: InodeId, named_at: u64) -> Inode {
        Inode {
            ino,
            state: Mutex::new(State { named_at, ..State::new() }),
            changed: Notify::new(),
            flushing: tokio::sync::Mutex::new(()),
            growing: tokio::sync::Mutex::new(()),
            marking: tokio::sync::Mutex::new(()),
        }
    }
    /// Held for moments, never across a wait.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of an inode's state panics")
    }
}

impl State {
    fn new() -> State {
        State {
            lease: LeaseKind::None,
            write_generation: 0,
            token_epoch: 0,
            recover: false,
            append_token: false,
            data_end: 0,
            attr: None,
            attr_old: false,
            attr_lent: false,
            revoked_at: 0,
            revoke_keep: LeaseKind::None,
            named_at: 0,
            closing_lease: false,
            names: Names::default(),
            loans: Loans::default(),
            inline: Inline::Unknown,
            local: None,
            accessed: None,
            change: 0,
            dirty: BTreeMap::new(),
            dirty_since: None,
            sending: BTreeMap::new(),
            send_count: 0,
            touched: BTreeSet::new(),
            unresolved: BTreeMap::new(),
            unreported_end: None,
            sent_end: 0,
            tail_clean: false,
            declared: Declared::Unclean,
            drop_inline: false,
            leaving: Bytes::new(),
            leaving_unsent: false,
            allocated: 0,
            charged: 0,
            limited: NO_LIMIT,
            reserved: 0,
            reserved_of: NO_LIMIT,
            direct_reserved: 0,
            changed: Changed::default(),
            committed_at: None,
            direct_pending: false,
            direct_commit_at: None,
            error: None,
            error_count: 0,
            open_read: 0,
            open_write: 0,
            closes_unlock: false,
            data_change: 0,
            leases_lost: 0,
            pages_since: 0,
            pattern: Pattern::default(),
            fetching: BTreeMap::new(),
            forgotten: false,
            evicted: None,
            evicting: None,
            evictions: 0,
            direct_writes: 0,
            direct: false,
            direct_sends: BTreeMap::new(),
            revokes: 0,
            dropping: None,
            unprotected_pages: 0,
            layers: None,
        }
    }

    /// Takes over what a reply tells. `revoke_clock`: the client's revoke count when the request was sent.
    pub fn apply(&mut self, entry: &Entry, revoke_clock: u64) {
        // Of before a truncation or an eviction that is known here.
        let before_truncation = entry.lease.token_epoch != 0 && entry.lease.token_epoch < self.token_epoch;
        let raised = self.apply_lease(&entry.lease, revoke_clock);
        // Only under a lease: without one a clock that was set back would hide what is new.
        let counts = self.lease != LeaseKind::None && !self.attr_old;
        let older = self.attr.as_ref().is_some_and(|a| {
            a.data_version > entry.attr.data_version
                || counts && (before_truncation || a.ctime.nanos > entry.attr.ctime.nanos)
        });
        if older {
            return;
        }
        // Those of another version. That there are none stays true: nobody brings bytes back while others have the file open.
        if self.lease == LeaseKind::None
            && matches!(self.inline, Inline::Yes(_))
            && !self.is_of_version(entry)
        {
            self.inline = Inline::Unknown;
        }
        self.attr_old = false;
        self.recover = entry.lease.recover;
        self.data_end = entry.lease.data_end;
        if raised && self.lease == LeaseKind::Write {
            self.tail_clean = entry.lease.data_end <= entry.attr.size && !entry.lease.recover;
        }
        if self.local.is_none() {
            self.allocated = entry.attr.allocated;
            self.charged = entry.attr.allocated;
        }
        if self.attr.as_ref().is_none_or(|a| a.layers != entry.attr.layers) {
            self.layers = None;
        }
        self.attr = Some(entry.attr.clone());
        self.forgotten = false;
    }

    /// What was written directly made the file longer, though the right to write alone came meanwhile and
    /// others wrote under it.
    pub fn grew_to(&mut self, entry: &Entry) {
        let is_known = self.is_of_version(entry);
        if let Some(local) = self.local.as_mut().filter(|_| is_known) {
            local.size = local.size.max(entry.attr.size);
        }
    }

    /// Whether a reply is of the file as it is known here. Replies may overtake each other.
    pub fn is_of_version(&self, entry: &Entry) -> bool {
        self.attr.as_ref().is_some_and(|attr| attr.data_version == entry.attr.data_version)
    }

    /// A directory's lease that came without attributes: names are covered, attributes only if they are known.
    pub fn apply_names_lease(&mut self, lease: &Lease, revoke_clock: u64) {
        let raised = self.apply_lease(lease, revoke_clock);
        if raised {
            // Attributes from before the lease may be old.
            self.attr_old = true;
        }
    }

    /// True: the lease is stronger now.
    fn apply_lease(&mut self, lease: &Lease, revoke_clock: u64) -> bool {
        let mut granted = lease.kind;
        if self.revoked_at > revoke_clock {
            granted = granted.min(self.revoke_keep);
        }
        if self.named_at > revoke_clock {
            granted = granted.min(self.lease);
        }
        self.token_epoch = self.token_epoch.max(lease.token_epoch);
        let raised = granted > self.lease;
        if raised {
            if granted == LeaseKind::Write {
                self.begin_write_generation();
                self.declared.asked_for_write(revoke_clock);
            }
            if self.lease == LeaseKind::None {
                self.inline = Inline::Unknown;
            }
            self.lease = granted;
        }
        raised
    }

    fn begin_write_generation(&mut self) {
        self.write_generation += 1;
        self.touched.clear();
        self.unresolved.clear();
        self.sent_end = 0;
        self.tail_clean = false;
    }

    /// A revoke or a release began: replies to requests sent before `revoke_clock` grant at most `keep`.
    pub fn mark_revoked(&mut self, revoke_clock: u64, keep: LeaseKind) {
        self.revoked_at = revoke_clock;
        self.revoke_keep = keep;
        self.revokes += 1;
        self.direct = false;
        if keep == LeaseKind::None {
            self.names.revoked();
        }
    }

    /// The lease is about to be named to the leader.
    pub fn mark_named(&mut self, revoke_clock: u64) {
        self.named_at = revoke_clock;
        self.direct = false;
    }

    /// Whether the answer to a request sent at `revoke_clock` may be of before what is held was named to the leader.
    pub fn is_named_since(&self, revoke_clock: u64) -> bool {
        self.named_at > revoke_clock
    }

    /// The leader did not grant Write to a request sent at `revoke_clock`: it knows now that this client may
    /// write directly. Unless it took that back since.
    pub fn note_direct(&mut self, revoke_clock: u64) {
        self.direct |=
            self.open_write > 0 && self.revoked_at <= revoke_clock && self.named_at <= revoke_clock;
    }
    pub fn may_send(&self) -> bool {
        (self.direct || self.lease == LeaseKind::Write) && self.declared == Declared::Unclean
    }
    /// Counts a send. What it is counted by.
    pub fn begin_send(&mut self) -> u64 {
        *self.direct_sends.entry(self.revokes).or_default() += 1;
        self.revokes
    }
    pub fn end_send(&mut self, counted_by: u64) {
        if let Some(count) = self.direct_sends.get_mut(&counted_by) {
            *count -= 1;
            if *count == 0 {
                self.direct_sends.remove(&counted_by);
            }
        }
    }
    pub fn revokes(&self) -> u64 {
        self.revokes
    }
    /// Whether sends are under way that began before the revoke of this number came.
    pub fn has_sends_before(&self, revoke: u64) -> bool {
        self.direct_sends.range(..revoke).next().is_some()
    }

    /// Gives the lease up, down to `keep`. The caller has saved what is dirty and drops cached data.
    pub fn lower_lease(&mut self, keep: LeaseKind) {
        self.lease = self.lease.min(keep);
        if self.lease == LeaseKind::None {
            self.attr_old = true;
            self.attr_lent = false;
            self.loans.end();
            self.names.forget_all();
            self.evicted = None;
            self.layers = None;
            self.inline = Inline::Unknown;
            self.data_change += 1;
            self.leases_lost += 1;
        }
        if self.lease != LeaseKind::Write {
            self.local = None;
            if std::mem::take(&mut self.drop_inline) {
                self.inline = Inline::Unknown; // the leader was not told: it still has them
            }
            self.leaving = Bytes::new();
            self.leaving_unsent = false;
            self.begin_write_generation();
        }
    }

    /// The size as an application sees it.
    pub fn size(&self) -> u64 {
        self.local.map_or_else(|| self.committed_size(), |l| l.size)
    }
    pub fn committed_size(&self) -> u64 {
        self.attr.as_ref().map_or(0, |a| a.size)
    }
    /// Nothing was ever committed, or may be on targets, from here on (but for what was sent under this lease).
    pub fn virgin_from(&self) -> u64 {
        self.committed_size().max(if self.tail_clean { 0 } else { self.data_end })
    }
    /// End of everything that may be on targets.
    pub fn on_targets_end(&self) -> u64 {
        let committed = if self.inline == Inline::No { self.committed_size() } else { 0 };
        let left = if self.tail_clean { 0 } else { self.data_end };
        committed.max(left).max(self.sent_end)
    }
    /// Bytes of an earlier, longer file may lie past the size: zero them before the file grows.
    pub fn has_old_tail(&self) -> bool {
        !self.tail_clean && self.data_end > self.committed_size()
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
    pub fn is_dirty(&self) -> bool {
        self.is_unsaved() || !self.unresolved.is_empty()
    }
    /// Whether something was changed here that is not part of the file yet. What failed is not: that was told.
    pub fn is_unsaved(&self) -> bool {
        self.local.is_some() || !self.dirty.is_empty() || self.own_sends().next().is_some()
    }
    /// Whether what is read of a stripe depends on which targets are asked, or the leader does not know what is on targets.
    pub fn is_in_doubt(&self) -> bool {
        self.unreported_end.is_some()
            || self.unresolved.values().any(|unresolved| matches!(unresolved, Unresolved::InDoubt(_)))
    }
    /// Whether the leader must not take the file for closed: nobody writes it any more, but what was written is not all told.
    pub fn is_kept_open(&self) -> bool {
        let is_named = self.attr.as_ref().is_none_or(|a| a.nlink > 0);
        self.is_in_doubt() || (self.open_write == 0 && is_named && self.is_unsaved())
    }
    /// Whether what is dirty of a stripe had better go now: all of it, or all that follows what was sent of it before. The
    /// leader is told of what is on targets without a gap, and a writer that goes on in order adds nothing to this stripe.
    pub fn is_complete(&self, layout: &Layout, stripe: u64) -> bool {
        let Some(buf) = self.dirty.get(&stripe) else { return false };
        let stripe_bytes = layout.stripe_bytes() as u32;
        buf.covered_bytes() == stripe_bytes
            || self.touched.contains(&stripe) && buf.is_whole_rest(stripe_bytes)
    }
    /// Whether nothing is on its way to targets, nor about to be.
    pub fn is_all_sent(&self) -> bool {
        let is_none_buffered = self.dirty.is_empty() && self.unresolved.is_empty();
        is_none_buffered && self.sending.is_empty() && self.direct_sends.is_empty()
    }
    /// What is on its way under the present right to write.
    pub fn own_sends(&self) -> impl Iterator<Item = (&u64, &Sending)> {
        self.sending.iter().filter(|(_, send)| send.write_generation == self.write_generation)
    }
    /// Whether something is on its way to these stripes under a right to write that has ended: it may arrive or not.
    pub fn has_strays(&self, stripes: RangeInclusive<u64>) -> bool {
        self.sending.range(stripes).any(|(_, send)| send.write_generation != self.write_generation)
    }

    /// Attributes as `stat` shows them; `None`: ask the leader.
    pub fn stat(&self) -> Option<Stat> {
        if self.lease == LeaseKind::None || self.attr_old || self.unprotected_pages > 0 {
            return None;
        }
        self.shown(true)
    }
    /// The same for the kernel, which may keep them.
    pub fn lend_stat(&mut self) -> Option<Stat> {
        let stat = self.stat();
        self.attr_lent |= stat.is_some();
        stat
    }
    /// The newest attributes known, with own changes.
    pub fn shown(&self, leased: bool) -> Option<Stat> {
        let mut attr = self.attr.clone()?;
        if let Some(local) = self.local {
            attr.size = local.size;
            attr.mtime = local.mtime;
            attr.ctime = Time { nanos: attr.ctime.nanos.max(local.mtime.nanos) };
            attr.allocated = self.allocated.max(attr.allocated);
        }
        attr.atime = self.accessed.unwrap_or(attr.atime);
        Some(Stat { attr, leased })
    }

    /// What the file takes more after a write of `offset..end`: all past its end, and below as long as there are holes, for
    /// the write may lie in one.
    pub fn growth(&self, offset: u64, end: u64) -> u64 {
        let (below, past) = self.parts_of_write(offset, end);
        past + below
    }
    /// How much of a write of `len` bytes takes no more than `free`.
    pub fn fitting(&self, offset: u64, len: usize, free: u64) -> usize {
        let (below, past) = self.parts_of_write(offset, offset + len as u64);
        match (below + past).checked_sub(free) {
            None => len,
            Some(over) if over <= past => len - over as usize,
            Some(_) => free as usize,
        }
    }
    /// What a write adds in holes and past the end.
    fn parts_of_write(&self, offset: u64, end: u64) -> (u64, u64) {
        let size = self.size();
        let past = end.saturating_sub(offset.max(size));
        let holes = size.saturating_sub(self.allocated);
        ((end - offset - past).min(holes), past)
    }
    /// How many more bytes the file takes once all of a range is written. Only the number of bytes in holes is known, not where they
    /// are, so this is an error where holes may lie outside of the range.
    pub fn reservation(&self, offset: u64, end: u64, grows: bool) -> Result<u64> {
        let size = self.size();
        let holes = size.saturating_sub(self.allocated);
        let all_holes_within = holes == 0 || offset == 0 && end >= size;
        if offset > size || !all_holes_within || (end > size && !grows) {
            return Err(Error::unsupported(
                "space is reserved only within a file or at its end, and not where it has holes elsewhere",
            ));
        }
        Ok(holes + end.saturating_sub(size))
    }
    /// Takes off bytes that were freed, each of which may have been a hole before. `most`: upper bound of what is left.
    pub fn note_freed(&mut self, freed: u64, most: Option<u64>) {
        let least = self.allocated.saturating_sub(freed);
        self.allocated = self.allocated.min(most.unwrap_or(u64::MAX)).max(least);
    }
    /// Reservation for what is not committed yet.
    pub fn reservation_needed(&self) -> u64 {
        if self.limited == NO_LIMIT {
            return 0;
        }
        let changed = if self.local.is_some() { self.allocated.saturating_sub(self.charged) } else { 0 };
        changed + self.direct_reserved
    }

    /// Notes a write of `start..end` that was taken under the Write lease.
    pub fn note_write(&mut self, end: u64, now: Time, at: Instant) {
        self.change += 1;
        self.data_change += 1;
        self.attr_lent = false; // the kernel that has written asks for size and time again
        let size = self.size().max(end);
        self.local = Some(Local { size, mtime: now, change: self.change });
        self.dirty_since.get_or_insert(at);
    }

    pub fn is_open(&self) -> bool {
        self.open_read + self.open_write > 0
    }

    /// Since when there are dirty bytes that could be sent.
    pub fn dirty_age_start(&self) -> Option<Instant> {
        self.dirty_since.filter(|_| !self.dirty.is_empty())
    }

    /// Something that was taken from a program is not saved. If another has the file now, the program need not know how that
    /// came: to it, bytes are lost.
    pub fn fail(&mut self, mut e: Error) {
        if e.kind == ErrorKind::Stale {
            e.kind = ErrorKind::Io;
        }
        self.error_count += 1;
        self.error = Some(e);
    }

    pub fn name(&self, name: &[u8]) -> Option<Option<InodeId>> {
        if self.lease == LeaseKind::None { None } else { self.names.get(name) }
    }
    /// Remembers what a name leads to, if the lease lets it.
    pub fn keep_name(&mut self, name: &[u8], ino: Option<InodeId>) {
        if self.lease != LeaseKind::None {
            self.names.keep(name, ino);
        }
    }
}

/// Attributes of a plain file, for tests.
#[cfg(test)]
pub fn attr_of_size(size: u64) -> Attr {
    let t = Time { nanos: 5 };
    Attr {
        ino: InodeId(7),
        kind: weir_proto::meta::FileKind::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        nlink: 1,
        rdev: 0,
        size,
        allocated: size,
        atime: t,
        mtime: t,
        ctime: t,
        btime: t,
        data_version: 1,
        layout: None,
        acl: false,
        evicted: 0,
        layers: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: LeaseKind, version: u64) -> Entry {
        let attr = Attr { data_version: version, ..attr_of_size(10) };
        Entry {
            attr,
            lease: Lease {
                kind,
                token_epoch: 3,
                recover: false,
                data_end: 0,
                limited: VolumeId(0),
                map_version: 0,
            },
        }
    }

    #[test]
    fn what_a_write_takes() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::Write, 1), 1);
        let unsupported = |e: Error| e.kind == ErrorKind::Unsupported;
        // What is reserved: ten dense bytes, then four of them.
        assert_eq!([st.reservation(0, 10, false).unwrap(), st.reservation(5, 25, true).unwrap()], [0, 15]);
        assert!(
            st.reservation(5, 25, false).is_err_and(unsupported)
                && st.reservation(11, 12, true).is_err_and(unsupported)
        );
        st.note_freed(6, Some(5));
        assert_eq!(st.allocated, 5, "one of those that went had not been counted");
        st.note_freed(1, None);
        assert_eq!(st.allocated, 5, "the freed byte may have been a hole");
        assert!(
            st.reservation(0, 9, false).is_err_and(unsupported)
                && st.reservation(1, 10, true).is_err_and(unsupported)
        );
        assert_eq!(st.reservation(0, 12, true).unwrap(), 5 + 2);
        st.allocated = 10;
        // Ten dense bytes: only what is past the end counts.
        assert_eq!((st.growth(0, 10), st.growth(5, 15), st.growth(20, 25)), (0, 5, 5));
        assert_eq!((st.fitting(0, 10, 0), st.fitting(5, 10, 2), st.fitting(5, 10, 5)), (10, 7, 10));
        // Six of ten are holes: a write below may lie in one.
        st.allocated = 4;
        assert_eq!((st.growth(0, 3), st.growth(0, 10), st.growth(2, 15)), (3, 6, 6 + 5));
        assert_eq!((st.fitting(2, 13, 11), st.fitting(2, 13, 8), st.fitting(2, 13, 3)), (13, 10, 3));
    }

    /// A file is truncated under this client's append token, as one of several; before the answer comes the
    /// right to write it alone.
    #[test]
    fn bytes_past_a_truncation_are_old_also_under_a_new_lease() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        let of_size = |size, data_end| {
            let mut entry = entry(LeaseKind::Write, 1);
            (entry.attr.size, entry.lease.data_end) = (size, data_end);
            entry
        };
        st.apply(&of_size(10, 10), 1);
        assert!(st.tail_clean && !st.has_old_tail());
        st.note_truncation(false);
        st.attr_old = true;
        st.apply(&of_size(4, 10), 1);
        assert!(st.has_old_tail(), "bytes 4 to 10 would be read again when the file grows");
    }

    #[test]
    fn a_grant_that_crosses_a_recall_is_weakened() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.mark_revoked(4, LeaseKind::Read);
        st.apply(&entry(LeaseKind::Write, 1), 3);
        assert_eq!(st.lease, LeaseKind::Read);
        st.apply(&entry(LeaseKind::Write, 1), 4);
        assert_eq!(st.lease, LeaseKind::Write);
    }

    #[test]
    fn a_grant_that_crosses_the_naming_of_leases_does_not_count() {
        let inode = Inode::new(InodeId(7), 3);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::Write, 1), 2);
        assert_eq!(st.lease, LeaseKind::None, "the leader was told that nothing is held");
        st.apply(&entry(LeaseKind::Read, 1), 3);
        st.mark_named(4);
        st.apply(&entry(LeaseKind::Write, 1), 3);
        assert_eq!(st.lease, LeaseKind::Read, "as it was named");
        st.apply(&entry(LeaseKind::Write, 1), 4);
        assert_eq!(st.lease, LeaseKind::Write);
    }

    #[test]
    fn replies_never_lower_a_lease_and_old_attributes_are_ignored() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::Read, 5), 0);
        st.apply(&entry(LeaseKind::None, 4), 0);
        assert_eq!((st.lease, st.attr.as_ref().unwrap().data_version), (LeaseKind::Read, 5));
        st.lower_lease(LeaseKind::None);
        assert_eq!(st.stat(), None);
        st.apply(&entry(LeaseKind::None, 4), 0);
        assert_eq!(st.attr.as_ref().unwrap().data_version, 5, "a reply that was overtaken");
        let clock_set_back = Attr { ctime: Time { nanos: -1 }, ..entry(LeaseKind::None, 5).attr };
        st.apply(&Entry { attr: clock_set_back, ..entry(LeaseKind::None, 5) }, 0);
        assert_eq!(st.attr.as_ref().unwrap().ctime.nanos, -1, "without a lease times tell nothing");
    }

    /// A reader would put zeros between what the inode held and the size of now.
    #[test]
    fn the_bytes_in_the_inode_and_the_size_are_of_one_answer() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::None, 4), 0);
        st.inline = Inline::Yes(Bytes::from_static(b"0123456789"));
        st.apply(&entry(LeaseKind::None, 4), 0);
        assert!(matches!(st.inline, Inline::Yes(_)));
        st.apply(&entry(LeaseKind::None, 5), 0);
        assert_eq!(st.inline, Inline::Unknown);
    }

    #[test]
    fn own_changes_show_before_they_are_committed() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::Write, 1), 0);
        st.note_write(50, Time { nanos: 99 }, Instant(1));
        let stat = st.stat().unwrap();
        assert_eq!((stat.attr.size, stat.attr.mtime.nanos), (50, 99));
        assert_eq!((st.size(), st.committed_size()), (50, 10));
    }
}
