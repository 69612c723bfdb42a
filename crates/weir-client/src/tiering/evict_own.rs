//! Eviction of a file by its only writer: only that client knows which parts are not committed.
//!
//! Invariants: while an eviction of a range is in progress (`TierState::evicting`), no byte of the range is
//! dirty, in flight or written and unreported, and no such work begins: it waits. The range counts as online
//! again only when the leader has definitely refused the eviction; until its answer is known, a hole read
//! there is checked with the leader (`TierState::evictions`, see `read.rs`). The lease stays, so a writer
//! that continues at the end of the file notices nothing.
//!
//! Lock order as for a flush: `flushing`, then the state.
use super::Tiering;
use crate::inode::{Inode, State};
use crate::leader::Change;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_proto::meta::{Cred, LeaseKind};
use weir_proto::recall::{Evict, Evicted};
use weir_proto::{Error, ErrorKind, NameRule, Result};

/// Work that waits for the end of an eviction checks again at this interval, even without a notification.
const POLL: Duration = Duration::from_millis(50);
/// An eviction whose token epoch has changed is retried.
const TRIES: u32 = 3;
/// An access by another client revokes the writer's lease: it is requested this number of times, with this
/// pause.
const LEASE_TRIES: u32 = 5;
const LEASE_PAUSE: Duration = Duration::from_millis(2);

/// The part of a range that may be evicted now: whole stripes from its beginning on that are committed and
/// have no work in progress.
fn quiet_part(st: &State, stripe_bytes: u64, from: u64, to: u64) -> Option<(u64, u64)> {
    let alone = st.lease.is_write()
        && !st.lease.needs_recovery()
        && !st.lease.is_closing()
        && !st.lease.has_append_token();
    let on_targets = st.is_on_targets();
    if !alone || !on_targets || st.direct.are_pending() || st.direct.are_under_way() || st.tier.is_evicting()
    {
        return None;
    }
    let busy = st.write.first_busy().map(|stripe| stripe * stripe_bytes);
    let unreported = st.changed.first();
    let quiet = busy.into_iter().chain(unreported).fold(to.min(st.committed_size()), u64::min);
    let (from, to) = (from.next_multiple_of(stripe_bytes), quiet / stripe_bytes * stripe_bytes);
    (from < to).then_some((from, to))
}

impl State {
    /// Begins an eviction of the idle part of a range.
    fn begin_evicting(&mut self, stripe_bytes: u64, from: u64, to: u64) -> Option<(u64, u64)> {
        let (from, to) = quiet_part(self, stripe_bytes, from, to)?;
        self.tier.begin_evicting(from, to);
        self.pages.note_change(); // bytes of a fetch in flight may be of either side
        Some((from, to))
    }
    fn end_evicting(&mut self) {
        self.tier.end_evicting();
        self.pages.note_change();
    }
}

/// A direct write: no eviction begins before it has ended.
pub struct DirectWrite<'a>(&'a Inode);

impl Drop for DirectWrite<'_> {
    fn drop(&mut self) {
        self.0.lock().direct.end();
    }
}

impl Tiering {
    /// Evicts the front of a range that home has, of a file that only this client writes.
    pub async fn evict_own(&self, cred: &Cred, inode: &Arc<Inode>, from: u64, to: u64) -> Result<Evicted> {
        for _ in 1..TRIES {
            match self.try_evict_own(cred, inode, from, to).await {
                // A revoke raised the token epoch, or the lease was granted again: retry with the new state.
                Err(e) if e.kind == ErrorKind::Stale => self.leases.refresh(inode).await?,
                done => return done,
            }
        }
        self.try_evict_own(cred, inode, from, to).await.map_err(|e| match e.kind {
            ErrorKind::Stale => e.of_kind(ErrorKind::Name(NameRule::Busy)),
            _ => e,
        })
    }

    async fn try_evict_own(&self, cred: &Cred, inode: &Arc<Inode>, from: u64, to: u64) -> Result<Evicted> {
        // First: a revoke of the Write lease begins with a flush, so it waits for the end of this.
        let _one = inode.flushing.lock().await;
        self.write_alone(inode).await?;
        let (range, under) = {
            let mut st = inode.lock();
            let stripe_bytes = st.layout(inode.ino)?.stripe_bytes();
            (st.begin_evicting(stripe_bytes, from, to), st.lease.token_epoch())
        };
        let Some((from, to)) = range else {
            let why = format!("inode {} is not evicted: it is being written, or by others, too", inode.ino);
            return Err(Error::name(NameRule::Busy, why));
        };
        let (revoke_clock, ino) = (self.inodes.revoke_clock(), inode.ino);
        let ask = |op| Evict { op, cred: cred.clone(), ino, from, to, under };
        let asked = self.leader.change(Change::repeatable(), ask).await;
        match &asked {
            Ok(evicted) => {
                self.counters.own_evictions.fetch_add(1, Relaxed);
                self.inodes.apply_unasked(&mut inode.lock(), &evicted.entry, revoke_clock);
            }
            Err(e) => self.make_sure_it_stays(inode, e).await,
        }
        inode.lock().end_evicting();
        inode.changed.notify_waiters();
        // So that writes elsewhere in the file need not ask; if this fails, they ask themselves.
        let _ = self.away(inode, 0).await;
        asked
    }

    /// Asks for the Write lease, unless it is held.
    async fn write_alone(&self, inode: &Inode) -> Result<()> {
        for _ in 0..LEASE_TRIES {
            let is_here = inode.lock().lease.is_write();
            if is_here || self.leases.acquire(inode, LeaseKind::Write).await? == LeaseKind::Write {
                break;
            }
            self.env.clock.sleep(LEASE_PAUSE).await;
        }
        Ok(())
    }

    /// A request without an answer may still arrive: under a newer token epoch it has no effect.
    async fn make_sure_it_stays(&self, inode: &Inode, e: &Error) {
        let may_arrive = |e: &Error| matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline);
        if !may_arrive(e) {
            return;
        }
        while !self.leader.is_closing() {
            match self.leases.ask(inode, LeaseKind::Write, true).await {
                Err(e) if may_arrive(&e) => self.env.clock.sleep(POLL).await,
                _ => return,
            }
        }
    }

    /// Returns when this client is evicting no part of the range.
    pub async fn wait_for_own_eviction(&self, inode: &Inode, from: u64, to: u64) {
        loop {
            let changed = inode.changed.notified();
            if !inode.lock().tier.is_being_evicted(from, to) {
                return;
            }
            let _ = self.env.clock.timeout(POLL, changed).await; // checks again either way
        }
    }

    /// Counts a direct write, once no part of its range is being evicted.
    pub async fn begin_direct<'a>(&self, inode: &'a Inode, from: u64, to: u64) -> DirectWrite<'a> {
        loop {
            self.wait_for_own_eviction(inode, from, to).await;
            let mut st = inode.lock();
            if !st.tier.is_being_evicted(from, to) {
                st.direct.begin();
                return DirectWrite(inode);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::Inline;
    use weir_proto::InodeId;

    const STRIPE: u64 = 100;
    type Case<'a> = (&'a dyn Fn(&mut State), Option<(u64, u64)>);

    #[test]
    fn only_quiet_parts_of_a_file_are_evicted() {
        let writing = |edit: &dyn Fn(&mut State)| {
            let inode = Inode::new(InodeId(7), 0);
            let mut st = inode.lock();
            st.lease.hold(LeaseKind::Write);
            st.inline = Inline::No;
            st.attr = Some(crate::inode::attr_of_size(950));
            edit(&mut st);
            quiet_part(&st, STRIPE, 0, u64::MAX)
        };
        let all = Some((0, 900));
        let cases: [Case<'_>; 11] = [
            (&|_| {}, all),
            (&|st| _ = st.write.buffer(9), all),
            (&|st| _ = st.write.buffer(4), Some((0, 400))),
            (&|st| _ = st.write.begin_send(3, 0, vec![]), Some((0, 300))),
            (&|st| st.changed.add(250, 260), Some((0, 200))),
            (&|st| st.changed.add(0, 1), None),
            (&|st| st.lease.hold(LeaseKind::Read), None),
            (&|st| st.lease.note_closing(true), None),
            (&|st| st.inline = Inline::Unknown, None),
            (&|st| st.direct.begin(), None),
            (&|st| st.tier.begin_evicting(0, 100), None),
        ];
        for (n, (edit, expected)) in cases.into_iter().enumerate() {
            assert_eq!(writing(edit), expected, "case {n}");
        }
    }
}
