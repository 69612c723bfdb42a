//! The lease of one inode: its kind, the limits that a revoke set, and direct sends that the leader permits.
//!
//! Invariants: a lease is raised by replies and lowered only by a revoke, a release or the session's end; a
//! reply to a request that was sent before the last revoke grants no more than that revoke left. Pure.
use std::collections::BTreeMap;
use weir_proto::meta::{Lease, LeaseKind};

#[derive(Debug)]
pub struct LeaseState {
    kind: LeaseKind,
    token_epoch: u32,
    recover: bool,
    append_token: bool,
    /// A revoke is at its last step: no new dirty data.
    closing: bool,
    /// The lease was given up, and the leader has not confirmed it yet. It may have granted another one
    /// before, which ends with the first: no grant counts.
    releasing: bool,
    revoked_at: u64,
    revoke_keep: LeaseKind,
    /// All leases held here were reported to the leader, which takes others back: replies to requests sent
    /// before grant none.
    named_at: u64,
    revokes: u64,
    /// No other client has a lease on the file or has it open, and each is kept waiting for a revoke.
    alone: bool,
    /// The leader's confirmation that no client caches the file, so bytes may be sent without a lease. A
    /// revoke withdraws it.
    direct: bool,
    /// Sends under that permission, by the number of revokes that had come when they began: a revoke waits
    /// for the earlier ones.
    direct_sends: BTreeMap<u64, u32>,
}

/// A lease became stronger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Raised {
    pub from: LeaseKind,
    pub to: LeaseKind,
}

impl LeaseState {
    pub fn new(named_at: u64) -> LeaseState {
        LeaseState {
            kind: LeaseKind::None,
            token_epoch: 0,
            recover: false,
            append_token: false,
            closing: false,
            releasing: false,
            revoked_at: 0,
            revoke_keep: LeaseKind::None,
            named_at,
            revokes: 0,
            alone: false,
            direct: false,
            direct_sends: BTreeMap::new(),
        }
    }

    pub fn kind(&self) -> LeaseKind {
        self.kind
    }
    pub fn is_held(&self) -> bool {
        self.kind != LeaseKind::None
    }
    pub fn is_write(&self) -> bool {
        self.kind == LeaseKind::Write
    }
    pub fn token_epoch(&self) -> u32 {
        self.token_epoch
    }

    /// Applies the lease of a reply to a request that was sent at `revoke_clock`.
    pub fn grant(&mut self, lease: &Lease, revoke_clock: u64) -> Option<Raised> {
        let mut granted = if self.releasing { LeaseKind::None } else { lease.kind };
        if self.revoked_at > revoke_clock {
            granted = granted.min(self.revoke_keep);
        }
        if self.named_at > revoke_clock {
            granted = granted.min(self.kind);
        }
        self.token_epoch = self.token_epoch.max(lease.token_epoch);
        (granted > self.kind)
            .then(|| Raised { from: std::mem::replace(&mut self.kind, granted), to: granted })
    }
    /// Lowers the lease to `keep`.
    pub fn lower(&mut self, keep: LeaseKind) {
        self.kind = self.kind.min(keep);
        self.alone = false;
    }

    /// By the answer to a request sent at `revoke_clock`, the leader keeps all other clients from the file.
    pub fn grant_alone(&mut self, revoke_clock: u64) {
        let is_new = self.revoked_at <= revoke_clock && self.named_at <= revoke_clock;
        self.alone |= is_new && !self.releasing && self.is_held();
    }
    /// Whether no other client uses the file, or does before a revoke.
    pub fn is_alone(&self) -> bool {
        self.is_write() || self.alone
    }

    /// A revoke or a release began: replies to requests sent before `revoke_clock` grant at most `keep`.
    pub fn mark_revoked(&mut self, revoke_clock: u64, keep: LeaseKind) {
        self.revoked_at = revoke_clock;
        self.revoke_keep = keep;
        self.revokes += 1;
        (self.alone, self.direct) = (false, false);
    }
    /// The lease is about to be reported to the leader.
    pub fn mark_named(&mut self, revoke_clock: u64) {
        self.named_at = revoke_clock;
        (self.alone, self.direct) = (false, false);
    }
    /// Whether the answer to a request sent at `revoke_clock` may predate the report of held leases to the
    /// leader.
    pub fn is_named_since(&self, revoke_clock: u64) -> bool {
        self.named_at > revoke_clock
    }
    /// Whether a revoke or a release began after a request that was sent at `revoke_clock`.
    pub fn is_revoked_since(&self, revoke_clock: u64) -> bool {
        self.revoked_at > revoke_clock
    }
    pub fn revokes(&self) -> u64 {
        self.revokes
    }

    pub fn is_closing(&self) -> bool {
        self.closing
    }
    /// Sets whether the revoke in progress forbids new dirty data.
    pub fn note_closing(&mut self, closing: bool) {
        self.closing = closing;
    }

    pub fn begin_release(&mut self) {
        (self.alone, self.releasing) = (false, true);
    }
    /// Grants to requests that crossed the release do not count: they were sent before `revoke_clock`.
    pub fn end_release(&mut self, revoke_clock: u64) {
        self.releasing = false;
        self.mark_revoked(revoke_clock, LeaseKind::None);
    }

    /// Whether a writer died, and its leftovers are not decided yet.
    pub fn needs_recovery(&self) -> bool {
        self.recover
    }
    pub fn note_recovery(&mut self, needed: bool) {
        self.recover = needed;
    }

    /// Whether this client has the append token: it may append and truncate (see `append_token.rs`), or it
    /// asks for it.
    pub fn has_append_token(&self) -> bool {
        self.append_token
    }
    pub fn note_append_token(&mut self) {
        self.append_token = true;
    }
    /// True: it was held.
    pub fn take_append_token(&mut self) -> bool {
        std::mem::take(&mut self.append_token)
    }

    /// The leader did not grant Write to a request sent at `revoke_clock`, for a file that is open for
    /// writing: it knows now that this client may write directly. Unless a revoke has withdrawn that since.
    pub fn note_direct(&mut self, revoke_clock: u64) {
        self.direct |= self.revoked_at <= revoke_clock && self.named_at <= revoke_clock;
    }
    /// No handle is open for writing any more.
    pub fn end_direct(&mut self) {
        self.direct = false;
    }
    pub fn may_send(&self) -> bool {
        self.direct || self.is_write()
    }
    /// Counts a send. Returns the number under which it is counted.
    pub fn begin_send(&mut self) -> u64 {
        *self.direct_sends.entry(self.revokes).or_default() += 1;
        self.revokes
    }
    pub fn end_send(&mut self, counted_by: u64) {
        if let Some(count) = self.direct_sends.get_mut(&counted_by) {
            assert!(*count > 0, "a send that ends has begun");
            *count -= 1;
            if *count == 0 {
                self.direct_sends.remove(&counted_by);
            }
        }
    }
    /// Whether sends are in flight that began before the revoke of this number.
    pub fn has_sends_before(&self, revoke: u64) -> bool {
        self.direct_sends.range(..revoke).next().is_some()
    }
    pub fn has_sends(&self) -> bool {
        !self.direct_sends.is_empty()
    }

    /// Panics where an invariant of this file does not hold.
    pub fn check(&self) {
        assert!(self.direct_sends.values().all(|count| *count > 0), "a send that ended is not counted");
        assert!(self.direct_sends.keys().all(|at| *at <= self.revokes), "no send is of a later revoke");
    }

    /// For tests: as if the leader had granted it.
    #[cfg(test)]
    pub fn hold(&mut self, kind: LeaseKind) {
        self.kind = kind;
    }
}
