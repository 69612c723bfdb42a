//! Names lent to the kernel above: for a moment it may keep that a name leads there, or nowhere.
//!
//! Invariants: a name is lent only while its directory's lease lets this client itself answer it from memory,
//! and not past the end of that lease's term; and a directory's lease is given back only after all loans of
//! its names have run out, while no new ones are made. So the kernel is never told to forget a name: nothing
//! here waits for its locks, and nothing that is mounted on a directory inside is taken off. What it costs is
//! that a revoke waits for the loans; so a directory lends none before its lease was held for a moment, nor
//! for a while after a revoke that had to wait.
use crate::inner::Inner;
use crate::inode::Inode;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::meta::{LeaseKind, RenameMode};
use weir_proto::{InodeId, Result};

/// How long the kernel may keep a name that was lent to it. Long beside one look-up (some 20 µs), so that names in use cost next to
/// nothing and a listing's names last until each was looked at; short beside what a person notices when a change waits for it.
pub const LOAN: Duration = Duration::from_millis(200);
/// From the sending of an answer until the thread that waits for it in the kernel has begun to count the loan, and the coarseness of the
/// kernel's clock (10 ms). A thread is woken within microseconds; on a busy machine it may have to wait for a processor.
const TAKING_UP: Duration = Duration::from_millis(100);
/// A lease was held for so long before names are lent under it: twice the time after which the leader grants leases again in a directory
/// that several clients change (`weir-meta`), so that there nothing is lent, however many they are.
const HELD: Duration = Duration::from_millis(100);
/// After a revoke had to wait for loans the directory lends none for so long; twice as long each time, up to
/// [`REST_MAX`]. So two clients that change one directory in turn wait a few times, not again and again.
const REST: Duration = Duration::from_secs(5);
const REST_MAX: Duration = Duration::from_secs(300);

/// Of a directory.
#[derive(Default)]
pub struct Loans {
    /// The kernel may keep names of it until then.
    until: Option<Instant>,
    /// A revoke waits for their end.
    is_ending: bool,
    /// When one was first wished for under this lease.
    wished: Option<Instant>,
    /// None is lent before.
    from: Option<Instant>,
    /// How often revokes had to wait.
    waits: u32,
}

impl Loans {
    pub fn are_open(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
    fn may_lend(&mut self, now: Instant) -> bool {
        let wished = *self.wished.get_or_insert(now);
        !self.is_ending && now.since(wished) >= HELD && self.from.is_none_or(|from| from <= now)
    }
    fn extend(&mut self, until: Instant) {
        self.until = self.until.max(Some(until));
    }
    /// Somebody has to wait for the loans: how long. None are made for a while.
    fn rest(&mut self, now: Instant) -> Duration {
        let left = self.until.map_or(Duration::ZERO, |until| until.since(now));
        if !left.is_zero() {
            let rest = REST.saturating_mul(1 << self.waits.min(16)).min(REST_MAX);
            self.waits += 1;
            self.from = Some(now + rest);
        }
        left
    }
    /// The lease is gone. What is left of loans that it did not wait for, for it was lost, ends within its term.
    pub fn end(&mut self) {
        self.is_ending = false;
        self.wished = None;
    }
}

impl Inner {
    /// Whether the kernel may keep for [`LOAN`] that `name` leads there, or nowhere.
    pub fn lend_name(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> bool {
        if let Some(inode) = leads_to.and_then(|ino| self.known_inode(ino)) {
            inode.lock().forgotten = false;
        }
        let now = self.env.clock.now();
        let until = now + LOAN + TAKING_UP;
        if !self.kernel.keeps_names() || self.session.leases_hold_until() < until {
            return false;
        }
        let Some(inode) = self.known_inode(dir) else { return false };
        let mut st = inode.lock();
        if st.name(name) != Some(leads_to) || !st.loans.may_lend(now) {
            return false;
        }
        st.loans.extend(until);
        true
    }

    /// Returns when the kernel keeps no name of this directory any more. None is lent until its lease is gone ([`Loans::end`]).
    pub async fn end_loans(&self, inode: &Inode) {
        let now = self.env.clock.now();
        let left = {
            let mut st = inode.lock();
            st.loans.is_ending = true;
            st.loans.rest(now)
        };
        if !left.is_zero() {
            self.env.clock.sleep(left).await;
        }
    }

    /// The kernel moves a name to another directory, with what is left of its loan, whatever is answered. Returns when that loan is
    /// one of the other directory, or has run out.
    pub async fn move_loans(&self, from: InodeId, to: InodeId, mode: RenameMode) {
        self.move_loan(from, to).await;
        if mode == RenameMode::Exchange {
            self.move_loan(to, from).await;
        }
    }

    async fn move_loan(&self, from: InodeId, to: InodeId) {
        let now = self.env.clock.now();
        let Some(source) = self.known_inode(from).filter(|_| from != to) else { return };
        let until = source.lock().loans.until;
        let Some(until) = until.filter(|until| now < *until) else { return };
        if let Some(inode) = self.known_inode(to) {
            let mut st = inode.lock();
            let holds = st.lease != LeaseKind::None && until <= self.session.leases_hold_until();
            if holds && !st.loans.is_ending {
                return st.loans.extend(until);
            }
        }
        let left = source.lock().loans.rest(now);
        self.env.clock.sleep(left).await;
    }

    /// What an own change came to is not known, and the kernel may keep what was before it: returns when it does not.
    pub async fn doubt_names<T>(&self, dirs: &[InodeId], done: Result<T>) -> Result<T> {
        use weir_proto::ErrorKind::{Damaged, Deadline, Io, Stale, Unavailable};
        if done.as_ref().is_err_and(|e| matches!(e.kind, Damaged | Deadline | Io | Stale | Unavailable)) {
            for inode in dirs.iter().filter_map(|dir| self.known_inode(*dir)) {
                let left = inode.lock().loans.rest(self.env.clock.now());
                self.env.clock.sleep(left).await;
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_whose_revokes_wait_lends_less_and_less() {
        let mut loans = Loans::default();
        let mut now = Instant(0) + Duration::from_secs(1000);
        assert!(!loans.may_lend(now) && loans.rest(now).is_zero());
        now = now + HELD;
        assert!(loans.may_lend(now), "the lease was held for a moment");
        for rest in [5, 10, 20, 40, 80, 160, 300, 300] {
            loans.extend(now + LOAN);
            assert_eq!(loans.rest(now), LOAN);
            loans.end();
            assert!(!loans.may_lend(now));
            assert!(!loans.may_lend(now + Duration::from_secs(rest - 1)), "{rest} s");
            now = now + Duration::from_secs(rest);
            assert!(loans.may_lend(now) && !loans.are_open(now), "after {rest} s");
        }
        loans.extend(now + LOAN);
        now = now + LOAN;
        assert!(loans.rest(now).is_zero() && loans.may_lend(now));
        loans.is_ending = true;
        assert!(!loans.may_lend(now));
        loans.end();
        assert!(!loans.may_lend(now) && loans.may_lend(now + HELD), "under a new lease");
    }
}
