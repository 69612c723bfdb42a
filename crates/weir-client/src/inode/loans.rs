//! Names of one directory that are lent to the kernel: when a loan is allowed, and when it ends.
//!
//! Pure: `lent.rs` explains loans.
use std::time::Duration;
use weir_env::Instant;

/// A lease must have been held for this time before names are lent under it: twice the time after which the
/// leader grants leases again in a directory that several clients change (`weir-meta`), so that no names are
/// lent there, for any number of clients.
const HELD: Duration = Duration::from_millis(100);
/// After a revoke had to wait for loans, the directory lends no names for this time; twice as long each time,
/// up to [`REST_MAX`]. So two clients that change one directory in turn wait a few times only.
const REST: Duration = Duration::from_secs(5);
const REST_MAX: Duration = Duration::from_secs(300);

/// The loans of a directory.
#[derive(Default)]
pub struct Loans {
    /// The kernel may keep names of it until then.
    until: Option<Instant>,
    /// A revoke waits for their end.
    is_ending: bool,
    /// The time of the first request for a loan under this lease.
    wished: Option<Instant>,
    /// No loans before this time.
    from: Option<Instant>,
    /// The number of revokes that had to wait.
    waits: u32,
}

impl Loans {
    pub fn are_open(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
    pub fn may_lend(&mut self, now: Instant) -> bool {
        let wished = *self.wished.get_or_insert(now);
        !self.is_ending && now.since(wished) >= HELD && self.from.is_none_or(|from| from <= now)
    }
    pub fn extend(&mut self, until: Instant) {
        self.until = self.until.max(Some(until));
    }
    /// A revoke has to wait for the loans: returns for how long. No new ones are made for a while.
    pub fn rest(&mut self, now: Instant) -> Duration {
        let left = self.until.map_or(Duration::ZERO, |until| until.since(now));
        if !left.is_zero() {
            let rest = REST.saturating_mul(1 << self.waits.min(16)).min(REST_MAX);
            self.waits += 1;
            self.from = Some(now + rest);
        }
        left
    }
    /// A revoke waits for the loans: none are made until the lease is gone.
    pub fn begin_end(&mut self) {
        self.is_ending = true;
    }
    pub fn are_ending(&self) -> bool {
        self.is_ending
    }
    pub fn until(&self) -> Option<Instant> {
        self.until
    }
    /// The lease is gone. Loans that a lost lease did not wait for end within its term.
    pub fn end(&mut self) {
        self.is_ending = false;
        self.wished = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAN: Duration = Duration::from_millis(200);

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
