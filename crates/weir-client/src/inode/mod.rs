//! A client's state of one inode: lease, attributes, names, changed data in flight.
//!
//! Invariants: attributes, names and data are believed only under a lease. Each part of the state keeps its
//! own invariants (`lease`, `write`, `pages`, `tier`, `quota`); those of several parts are here. Pure state:
//! no I/O, no time except as an argument.
mod inline;
mod lease;
mod loans;
mod local;
mod local_state;
mod opens;
mod pages;
mod quota;
mod tier;
mod write;

pub use inline::{Inline, Leaving};
pub use lease::LeaseState;
pub use loans::Loans;
pub use local::LocalFile;
pub use local_state::LocalState;
pub use opens::Opens;
pub use pages::PageState;
pub use quota::{Limits, NO_LIMIT, QuotaState, Settled, Wish};
pub use tier::{Ranges, TierState, touches};
pub use write::{DirectWrites, Local, Unresolved, WriteErrors, WriteState};

use crate::changed::Changed;
use crate::known_names::Names;
use crate::types::Stat;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard};
use tokio::sync::Notify;
use weir_env::Instant;
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Entry, Lease, LeaseKind, Time};
use weir_proto::{Error, InodeId, Result};

pub struct Inode {
    pub ino: InodeId,
    /// Since the last search for idle inodes.
    pub used: AtomicBool,
    state: Mutex<State>,
    /// Sends, fetches or a revoke of this inode ended.
    pub changed: Notify,
    /// One flush, commit, truncation or revoke at a time.
    pub flushing: tokio::sync::Mutex<()>,
    /// One append, truncation or cleaning of an old tail at a time; taken before `flushing`.
    pub growing: tokio::sync::Mutex<()>,
    /// One report to the leader at a time on whether uncommitted bytes may be on targets; taken after
    /// `flushing`.
    pub marking: tokio::sync::Mutex<()>,
}

pub struct State {
    pub lease: LeaseState,
    pub write: WriteState,
    pub direct: DirectWrites,
    pub errors: WriteErrors,
    pub pages: PageState,
    pub tier: TierState,
    pub quota: QuotaState,
    pub opens: Opens,
    pub names: Names,
    /// Names of this directory that the kernel may keep.
    pub loans: Loans,
    pub inline: Inline,
    pub leaving: Leaving,
    /// Its create or removal here, as far as the leader does not know of it.
    pub local: LocalFile,
    /// Ranges written since the last report to the leader; durable, or their send failed.
    pub changed: Changed,
    pub attr: Option<Attr>,
    /// A change by this client made the attributes old (the lease stays).
    pub attr_old: bool,
    /// The time of a read here, if that is the access time and is not reported yet.
    pub accessed: Option<Time>,
    /// The kernel caches nothing of the inode.
    pub forgotten: bool,
}

impl Inode {
    /// `named_at`: the last time that all leases were reported.
    pub fn new(ino: InodeId, named_at: u64) -> Inode {
        Inode {
            ino,
            used: AtomicBool::new(true),
            state: Mutex::new(State::new(named_at)),
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
    /// Whether the Write lease is still of that write generation.
    pub fn check_generation(&self, write_generation: u64) -> Result<()> {
        match self.lock().write.generation() == write_generation {
            true => Ok(()),
            false => {
                Err(Error::stale(format!("file {}: the right to write it was lost meanwhile", self.ino)))
            }
        }
    }
}

/// Replies, revokes and the end of the lease.
impl State {
    fn new(named_at: u64) -> State {
        State {
            lease: LeaseState::new(named_at),
            write: WriteState::default(),
            direct: DirectWrites::default(),
            errors: WriteErrors::default(),
            pages: PageState::default(),
            tier: TierState::default(),
            quota: QuotaState::default(),
            opens: Opens::default(),
            names: Names::default(),
            loans: Loans::default(),
            inline: Inline::Unknown,
            leaving: Leaving::default(),
            local: LocalFile::default(),
            changed: Changed::default(),
            attr: None,
            attr_old: false,
            accessed: None,
            forgotten: false,
        }
    }

    /// Applies a reply. `revoke_clock`: the client's revoke count when the request was sent.
    pub fn apply(&mut self, entry: &Entry, revoke_clock: u64) {
        // From before a truncation or an eviction that is known here.
        let before_truncation =
            entry.lease.token_epoch != 0 && entry.lease.token_epoch < self.lease.token_epoch();
        let raised = self.apply_lease(&entry.lease, revoke_clock);
        // Only under a lease: without one a clock that was set back would hide newer attributes.
        let counts = self.lease.is_held() && !self.attr_old;
        let older = self.attr.as_ref().is_some_and(|a| {
            a.data_version > entry.attr.data_version
                || counts && (before_truncation || a.ctime.nanos > entry.attr.ctime.nanos)
        });
        if older {
            return;
        }
        // Inline bytes of another version. `No` stays true: data is not moved back inline while other clients
        // have the file open.
        if !self.lease.is_held() && matches!(self.inline, Inline::Yes(_)) && !self.is_of_version(entry) {
            self.inline = Inline::Unknown;
        }
        self.attr_old = false;
        self.lease.note_recovery(entry.lease.recover);
        self.write.note_data_end(entry.lease.data_end);
        if raised && self.lease.is_write() {
            self.write.note_tail(entry.lease.data_end <= entry.attr.size && !entry.lease.recover);
        }
        if self.write.local().is_none() {
            self.quota.note_allocated(entry.attr.allocated);
        }
        if self.attr.as_ref().is_none_or(|a| a.layers != entry.attr.layers) {
            self.tier.forget_layers();
        }
        self.quota.note_owner(entry.attr.uid, entry.attr.gid);
        self.attr = Some(entry.attr.clone());
        self.forgotten = false;
    }

    /// Direct writes made the file longer, although the Write lease was granted meanwhile and others wrote
    /// under it.
    pub fn grew_to(&mut self, entry: &Entry) {
        if self.is_of_version(entry) {
            self.write.note_grown(entry.attr.size);
        }
    }

    /// Whether a reply is of the file's version that is known here. Replies may overtake each other.
    pub fn is_of_version(&self, entry: &Entry) -> bool {
        self.attr.as_ref().is_some_and(|attr| attr.data_version == entry.attr.data_version)
    }

    /// A directory's lease that came without attributes: names are covered, attributes only if they are
    /// known.
    pub fn apply_names_lease(&mut self, lease: &Lease, revoke_clock: u64) {
        let raised = self.apply_lease(lease, revoke_clock);
        if raised {
            // Attributes from before the lease may be old.
            self.attr_old = true;
        }
    }

    /// True: the lease is stronger now.
    fn apply_lease(&mut self, lease: &Lease, revoke_clock: u64) -> bool {
        let Some(raised) = self.lease.grant(lease, revoke_clock) else { return false };
        if raised.to == LeaseKind::Write {
            self.write.begin_generation();
            self.write.asked_for_write(revoke_clock);
        }
        if raised.from == LeaseKind::None {
            self.inline = Inline::Unknown;
        }
        true
    }

    /// A revoke or a release began: replies to requests sent before `revoke_clock` grant at most `keep`.
    pub fn mark_revoked(&mut self, revoke_clock: u64, keep: LeaseKind) {
        self.lease.mark_revoked(revoke_clock, keep);
        if keep == LeaseKind::None {
            self.names.revoked();
        }
    }

    /// The leader did not grant Write to a request sent at `revoke_clock`: it knows now that this client may
    /// write directly. Unless a revoke has withdrawn that since.
    pub fn note_direct(&mut self, revoke_clock: u64) {
        if self.opens.is_for_writing() {
            self.lease.note_direct(revoke_clock);
        }
    }
    pub fn may_send(&self) -> bool {
        self.lease.may_send() && self.write.is_declared_unclean()
    }

    /// Lowers the lease to `keep`. The caller has saved dirty data and drops cached data.
    pub fn lower_lease(&mut self, keep: LeaseKind) {
        self.lease.lower(keep);
        if !self.lease.is_held() {
            self.attr_old = true;
            self.loans.end();
            self.names.forget_all();
            self.tier.forget_all();
            self.inline = Inline::Unknown;
            self.pages.note_lease_lost();
        }
        if !self.lease.is_write() {
            if self.leaving.give_up() {
                self.inline = Inline::Unknown; // the leader has no commit of it: it still has them
            }
            self.write.give_up();
        }
        self.check();
    }

    /// Panics where an invariant of the state's parts, or of several of them, does not hold.
    pub fn check(&self) {
        self.lease.check();
        self.write.check();
        self.pages.check();
        self.tier.check();
        self.local.check();
        assert!(
            self.lease.is_write() || self.write.local().is_none(),
            "only a writer has changes of its own"
        );
        assert!(self.lease.is_held() || self.tier.layers().is_none(), "layers are known under a lease");
        assert!(
            self.lease.is_write() || !self.leaving.has_begun(),
            "only a writer takes bytes out of an inode"
        );
    }
}

/// Sizes, attributes and changes as this client shows them.
impl State {
    /// The layout of a regular file.
    pub fn layout(&self, ino: InodeId) -> Result<Layout> {
        let layout = self.attr.as_ref().and_then(|a| a.layout);
        let layout = layout.ok_or_else(|| {
            Error::unavailable(format!(
                "file {ino} has no layout: the cluster had no placement group for it yet"
            ))
        })?;
        layout.check()?;
        Ok(layout)
    }
    /// The size as an application sees it.
    pub fn size(&self) -> u64 {
        self.write.local().map_or_else(|| self.committed_size(), |l| l.size)
    }
    pub fn committed_size(&self) -> u64 {
        self.attr.as_ref().map_or(0, |a| a.size)
    }
    /// Nothing was ever committed, or may be on targets, from here on (except bytes sent under this lease).
    pub fn virgin_from(&self) -> u64 {
        self.write.virgin_from(self.committed_size())
    }
    /// End of everything that may be on targets.
    pub fn on_targets_end(&self) -> u64 {
        self.write.on_targets_end(if self.inline == Inline::No { self.committed_size() } else { 0 })
    }
    /// Bytes of an earlier, longer file may lie past the size: zero them before the file grows.
    pub fn has_old_tail(&self) -> bool {
        self.write.has_old_tail(self.committed_size())
    }
    /// The size up to which every byte beyond the committed size is on targets.
    pub fn durable_size(&self, layout: &Layout) -> u64 {
        self.write.durable_size(layout, self.committed_size(), self.size())
    }
    pub fn is_dirty(&self) -> bool {
        self.write.is_dirty()
    }
    pub fn is_unsaved(&self) -> bool {
        self.write.is_unsaved()
    }
    /// Whether the leader lacks a change that was made under the lease.
    pub fn is_unreported(&self) -> bool {
        self.is_unsaved() || self.local.is_removed()
    }
    pub fn is_in_doubt(&self) -> bool {
        self.write.is_in_doubt()
    }
    /// Whether the file must stay open for the leader: it has no writer any more, but some writes are not
    /// reported.
    pub fn is_kept_open(&self) -> bool {
        let is_named = self.attr.as_ref().is_none_or(|a| a.nlink > 0);
        self.is_in_doubt() || (!self.opens.is_for_writing() && is_named && self.is_unsaved())
    }
    /// Whether nothing is in flight to targets, nor about to be.
    pub fn is_all_sent(&self) -> bool {
        self.write.is_all_sent() && !self.lease.has_sends()
    }
    /// All of the file is on targets, and the leader knows that it has no inline bytes.
    pub fn is_on_targets(&self) -> bool {
        self.inline == Inline::No && !self.leaving.has_begun()
    }

    /// Attributes as `stat` shows them; `None`: ask the leader.
    pub fn stat(&self) -> Option<Stat> {
        if !self.lease.is_held() || self.attr_old || self.pages.has_unprotected() {
            return None;
        }
        self.shown(true)
    }
    /// Attributes for the kernel, which may cache them.
    pub fn lend_stat(&mut self) -> Option<Stat> {
        let stat = self.stat();
        if stat.is_some() {
            self.pages.note_lent();
        }
        stat
    }
    /// The newest known attributes, with this client's changes.
    pub fn shown(&self, leased: bool) -> Option<Stat> {
        let mut attr = self.attr.clone()?;
        if let Some(local) = self.write.local() {
            attr.size = local.size;
            attr.ctime = ctime_with(&attr, &local);
            attr.mtime = local.mtime;
            attr.allocated = self.quota.allocated().max(attr.allocated);
        }
        attr.atime = self.accessed.unwrap_or(attr.atime);
        Some(Stat { attr, leased })
    }

    /// The growth of the file's allocation by a write of `offset..end`.
    pub fn growth(&self, offset: u64, end: u64) -> u64 {
        self.quota.growth(self.size(), offset, end)
    }
    /// The part of a write of `len` bytes that allocates no more than `free`.
    pub fn fitting(&self, offset: u64, len: usize, free: u64) -> usize {
        self.quota.fitting(self.size(), offset, len, free)
    }
    /// The bytes to charge for `fallocate`.
    pub fn reservation(&self, wish: &Wish) -> u64 {
        self.quota.reservation(self.size(), wish)
    }

    /// Notes a write up to `end` that was accepted under the Write lease.
    pub fn note_write(&mut self, end: u64, now: Time, at: Instant) {
        self.pages.note_change();
        self.pages.note_not_lent(); // after a write the kernel asks for size and time again
        let size = self.size().max(end);
        self.write.note_write(size, now, at);
    }
    /// Bytes accepted from a program could not be saved.
    pub fn fail(&mut self, e: Error) {
        self.errors.note(e);
    }
    /// Opens ended.
    pub fn end_opens(&mut self, reads: u32, writes: u32) {
        self.opens.end(reads, writes);
        if !self.opens.is_for_writing() {
            self.lease.end_direct();
        }
    }

    pub fn name(&self, name: &[u8]) -> Option<Option<InodeId>> {
        if self.lease.is_held() { self.names.get(name) } else { None }
    }
    /// Remembers a name's target, if the lease allows it.
    pub fn keep_name(&mut self, name: &[u8], ino: Option<InodeId>) {
        if self.lease.is_held() {
            self.names.keep(name, ino);
        }
    }
}

/// The change time after uncommitted changes. It does not follow a modification time that was set.
fn ctime_with(attr: &Attr, local: &write::Local) -> Time {
    let changed = if local.mtime == attr.mtime { attr.ctime } else { local.mtime };
    Time { nanos: attr.ctime.nanos.max(changed.nanos) }
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
    use bytes::Bytes;
    use weir_proto::VolumeId;

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

    /// A file is truncated under this client's append token, as one of several writers; the Write lease is
    /// granted before the answer.
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
        assert!(!st.has_old_tail());
        st.write.note_truncation(false);
        st.attr_old = true;
        st.apply(&of_size(4, 10), 1);
        assert!(st.has_old_tail(), "bytes 4 to 10 would be read again when the file grows");
    }

    #[test]
    fn a_grant_crossed_by_a_revoke_is_weakened() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.mark_revoked(4, LeaseKind::Read);
        st.apply(&entry(LeaseKind::Write, 1), 3);
        assert_eq!(st.lease.kind(), LeaseKind::Read);
        st.apply(&entry(LeaseKind::Write, 1), 4);
        assert_eq!(st.lease.kind(), LeaseKind::Write);
    }

    #[test]
    fn a_grant_that_crosses_the_naming_of_leases_does_not_count() {
        let inode = Inode::new(InodeId(7), 3);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::Write, 1), 2);
        assert_eq!(st.lease.kind(), LeaseKind::None, "this client reported that it holds no lease");
        st.apply(&entry(LeaseKind::Read, 1), 3);
        st.lease.mark_named(4);
        st.apply(&entry(LeaseKind::Write, 1), 3);
        assert_eq!(st.lease.kind(), LeaseKind::Read, "as it was named");
        st.apply(&entry(LeaseKind::Write, 1), 4);
        assert_eq!(st.lease.kind(), LeaseKind::Write);
    }

    #[test]
    fn replies_never_lower_a_lease_and_old_attributes_are_ignored() {
        let inode = Inode::new(InodeId(7), 0);
        let mut st = inode.lock();
        st.apply(&entry(LeaseKind::Read, 5), 0);
        st.apply(&entry(LeaseKind::None, 4), 0);
        assert_eq!((st.lease.kind(), st.attr.as_ref().unwrap().data_version), (LeaseKind::Read, 5));
        st.lower_lease(LeaseKind::None);
        assert_eq!(st.stat(), None);
        st.apply(&entry(LeaseKind::None, 4), 0);
        assert_eq!(st.attr.as_ref().unwrap().data_version, 5, "a reply that was overtaken");
        let clock_set_back = Attr { ctime: Time { nanos: -1 }, ..entry(LeaseKind::None, 5).attr };
        st.apply(&Entry { attr: clock_set_back, ..entry(LeaseKind::None, 5) }, 0);
        assert_eq!(st.attr.as_ref().unwrap().ctime.nanos, -1, "without a lease times tell nothing");
    }

    /// A reader would put zeros between the former inline bytes and the present size.
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
