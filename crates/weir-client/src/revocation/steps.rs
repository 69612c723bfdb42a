//! The steps of one revocation: flushes and drops, their number, and the time to lower the lease.
//! Pure.
//!
//! Invariant: the lease is lowered only after a round in which nothing was written, unless there were many;
//! and only when the leader knows of stripes in doubt.
use crate::types::Forget;
use weir_proto::meta::LeaseKind;

/// Flushes of a file under constant writes; after them writers wait for the revoke.
const WRITE_ROUNDS: u32 = 6;
/// Drops of pages of a file under constant reads. Reads wait for the revoke, too, but not for long.
const PAGE_ROUNDS: u32 = 64;

pub struct Steps {
    keep: LeaseKind,
    round: u32,
    doubt_reported: bool,
    /// Caches that the kernel drops in the next round.
    old_pages: Vec<Forget>,
}

/// The inode at the end of a round.
pub struct Facts {
    /// Changes that the leader does not know of, or sends in flight.
    pub is_unreported: bool,
    pub is_in_doubt: bool,
    /// Ranges of pages that were filled during the round.
    pub filled: Vec<(u64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// More was written, or pages were filled, meanwhile. `closing`: no new dirty data from now on.
    Again { closing: bool },
    /// The leader must learn first that a failed write left something in doubt.
    ReportDoubt,
    /// The lease is lowered to that.
    Lower(LeaseKind),
}

impl Steps {
    pub fn new(keep: LeaseKind) -> Steps {
        let old_pages = if keep == LeaseKind::None { vec![Forget::All] } else { Vec::new() };
        Steps { keep, round: 0, doubt_reported: false, old_pages }
    }
    /// Nothing of the file may stay cached, nor inline bytes unflushed.
    pub fn drops_all(&self) -> bool {
        self.keep == LeaseKind::None
    }
    /// Under a Read lease nothing is changed. Waiting for a flush, which may itself wait for others'
    /// leases, could be a deadlock.
    pub fn needs_flush(&self, is_writer: bool, is_unreported: bool) -> bool {
        is_unreported || is_writer && !self.doubt_reported
    }
    pub fn take_old_pages(&mut self) -> Vec<Forget> {
        std::mem::take(&mut self.old_pages)
    }

    /// After a flush and the dropping of pages.
    pub fn after_round(&mut self, facts: Facts) -> Next {
        // Pages that were filled since are old as soon as the lease is gone: they are dropped first.
        self.old_pages.extend(facts.filled.into_iter().map(|(from, to)| Forget::Part(from, to - from)));
        let written = facts.is_unreported && self.round < WRITE_ROUNDS;
        if written && self.drops_all() {
            self.old_pages = vec![Forget::All]; // a write fills pages, too
        }
        self.round += 1;
        if written || !self.old_pages.is_empty() && self.round <= PAGE_ROUNDS {
            return Next::Again { closing: self.doubt_reported || self.round >= WRITE_ROUNDS };
        }
        if facts.is_in_doubt && !self.doubt_reported { Next::ReportDoubt } else { Next::Lower(self.keep) }
    }
    /// The leader has the file recovered. Not even this client keeps a lease: bytes that it reads there may
    /// change later.
    pub fn note_doubt_reported(&mut self) {
        self.doubt_reported = true;
        self.keep = LeaseKind::None;
        self.old_pages.push(Forget::All);
    }
    /// Whether pages are left that were read without a pause.
    pub fn has_old_pages(&self) -> bool {
        !self.old_pages.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(steps: &mut Steps, is_unreported: bool, is_in_doubt: bool, filled: &[(u64, u64)]) -> Next {
        drop(steps.take_old_pages());
        steps.after_round(Facts { is_unreported, is_in_doubt, filled: filled.to_vec() })
    }

    #[test]
    fn a_quiet_file_needs_one_round() {
        for keep in [LeaseKind::None, LeaseKind::Read] {
            let mut steps = Steps::new(keep);
            assert!(steps.needs_flush(true, false) && !steps.needs_flush(false, false));
            let dropped = steps.take_old_pages();
            assert_eq!(dropped, if keep == LeaseKind::None { vec![Forget::All] } else { vec![] });
            assert_eq!(round(&mut steps, false, false, &[]), Next::Lower(keep));
            assert!(!steps.has_old_pages());
        }
    }

    #[test]
    fn constant_writes_are_closed_out_and_do_not_keep_the_lease() {
        let mut steps = Steps::new(LeaseKind::None);
        for n in 1..=WRITE_ROUNDS {
            let closing = n == WRITE_ROUNDS;
            assert_eq!(round(&mut steps, true, false, &[]), Next::Again { closing }, "round {n}");
            assert_eq!(steps.take_old_pages(), [Forget::All], "a write fills pages, too");
        }
        assert_eq!(round(&mut steps, true, false, &[]), Next::Lower(LeaseKind::None));
    }

    #[test]
    fn filled_pages_are_dropped_again_but_not_for_ever() {
        let mut steps = Steps::new(LeaseKind::None);
        assert_eq!(round(&mut steps, false, false, &[(4, 8)]), Next::Again { closing: false });
        assert_eq!(steps.take_old_pages(), [Forget::Part(4, 4)]);
        for _ in 1..PAGE_ROUNDS {
            assert!(matches!(round(&mut steps, false, false, &[(0, 4)]), Next::Again { .. }));
        }
        assert_eq!(round(&mut steps, false, false, &[(0, 4)]), Next::Lower(LeaseKind::None));
        assert!(steps.has_old_pages(), "they are dropped soon after");
    }

    #[test]
    fn a_stripe_in_doubt_is_reported_once_and_costs_the_lease() {
        let mut steps = Steps::new(LeaseKind::Read);
        assert_eq!(round(&mut steps, false, true, &[]), Next::ReportDoubt);
        steps.note_doubt_reported();
        assert!(!steps.needs_flush(true, false), "the stripe stays as it is");
        assert_eq!(steps.take_old_pages(), [Forget::All]);
        assert_eq!(round(&mut steps, false, true, &[]), Next::Lower(LeaseKind::None));
    }
}
