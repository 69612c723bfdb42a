//! Cached bytes and attributes of one inode: those that the kernel may cache, those that reads prefetch, and
//! when both are outdated.
//!
//! Invariant: a read that fills pages while the kernel drops them is noted, so its pages are dropped, too,
//! before the lease ends. Pure.
use crate::prefetch::Pattern;
use std::collections::BTreeMap;

/// Reads that are recorded separately while pages are dropped.
const FILLS_MAX: usize = 64;

#[derive(Default)]
pub struct PageState {
    /// The kernel may keep the attributes as they are shown.
    attributes_lent: bool,
    /// Grows when cached data becomes old.
    data_change: u64,
    /// The number of leases that ended, and the number of those that the kernel may hold pages of.
    leases_lost: u64,
    pages_since: u64,
    pattern: Pattern,
    /// Ranges being prefetched.
    fetching: BTreeMap<u64, u64>,
    /// The kernel is dropping the file's pages for a revoke.
    dropping: Option<Dropping>,
    /// Reads and writes that left, or are about to leave, pages in the kernel that no lease protects, until
    /// it has dropped them.
    unprotected: u32,
}

/// Reads of pages while the kernel drops them.
#[derive(Default)]
struct Dropping {
    /// Ranges that reads filled meanwhile, (from, to): the kernel may have pages of them.
    filled: Vec<(u64, u64)>,
    /// Reads that wait for the end of the drop, (from, to). The kernel has locked their pages, which are
    /// empty.
    waiting: Vec<(u64, u64)>,
}

impl PageState {
    pub fn are_attributes_lent(&self) -> bool {
        self.attributes_lent
    }
    pub fn note_lent(&mut self) {
        self.attributes_lent = true;
    }
    /// The kernel asks again.
    pub fn note_not_lent(&mut self) {
        self.attributes_lent = false;
    }

    pub fn data_change(&self) -> u64 {
        self.data_change
    }
    /// Bytes read before may be old.
    pub fn note_change(&mut self) {
        self.data_change += 1;
    }
    pub fn leases_lost(&self) -> u64 {
        self.leases_lost
    }
    pub fn note_lease_lost(&mut self) {
        self.attributes_lent = false;
        self.data_change += 1;
        self.leases_lost += 1;
    }
    /// Whether the kernel may hold pages from before the end of a lease.
    pub fn may_hold_old(&self) -> bool {
        self.pages_since != self.leases_lost
    }
    /// The kernel has dropped those of the first `leases_lost` leases.
    pub fn note_dropped(&mut self, leases_lost: u64) {
        self.pages_since = self.pages_since.max(leases_lost);
    }

    /// Notes a read: returns the ranges to prefetch now, (offset, length).
    pub fn note_read(&mut self, offset: u64, len: u64, size: u64, window_max: u64) -> Vec<(u64, u64)> {
        self.pattern.access(offset, len, size, window_max)
    }
    /// Prefetched bytes were read.
    pub fn note_used(&mut self, bytes: u64) {
        self.pattern.used(bytes);
    }
    pub fn fetches(&self) -> usize {
        self.fetching.len()
    }
    pub fn is_fetching(&self, from: u64, to: u64) -> bool {
        self.fetching.range(..to).next_back().is_some_and(|(_, end)| *end > from)
    }
    pub fn begin_fetch(&mut self, from: u64, to: u64) {
        self.fetching.insert(from, to);
    }
    pub fn end_fetch(&mut self, from: u64) {
        self.fetching.remove(&from);
    }

    pub fn begin_dropping(&mut self) {
        self.dropping.get_or_insert_default();
    }
    pub fn end_dropping(&mut self) {
        self.dropping = None;
    }
    pub fn is_dropping(&self) -> bool {
        self.dropping.is_some()
    }
    /// The ranges to drop once more.
    pub fn take_filled(&mut self) -> Vec<(u64, u64)> {
        self.dropping.as_mut().map_or(Vec::new(), Dropping::take_filled)
    }
    /// A read returns bytes for pages; recorded while pages are dropped.
    pub fn note_fill(&mut self, from: u64, to: u64) {
        if let Some(dropping) = &mut self.dropping {
            dropping.note_fill(from, to);
        }
    }
    /// A read of `from..to` waits while pages are dropped. False: no drop is in progress.
    pub fn begin_wait(&mut self, from: u64, to: u64) -> bool {
        if let Some(dropping) = &mut self.dropping {
            dropping.waiting.push((from, to));
        }
        self.is_dropping()
    }
    pub fn end_wait(&mut self, from: u64, to: u64) {
        if let Some(dropping) = &mut self.dropping
            && let Some(at) = dropping.waiting.iter().position(|w| *w == (from, to))
        {
            dropping.waiting.swap_remove(at);
        }
    }

    pub fn begin_unprotected(&mut self) {
        self.unprotected += 1;
    }
    pub fn end_unprotected(&mut self) {
        assert!(self.unprotected > 0, "what ends had begun");
        self.unprotected -= 1;
    }
    pub fn has_unprotected(&self) -> bool {
        self.unprotected > 0
    }

    /// Panics where an invariant of this file does not hold.
    pub fn check(&self) {
        assert!(self.pages_since <= self.leases_lost, "pages are dropped of leases that ended");
        assert!(self.fetching.iter().all(|(from, to)| from < to), "nothing is fetched of no bytes");
        assert!(
            self.dropping.as_ref().is_none_or(|d| d.filled.len() <= FILLS_MAX),
            "the list of reads is bounded"
        );
    }
}

impl Dropping {
    fn note_fill(&mut self, from: u64, to: u64) {
        if self.filled.len() == FILLS_MAX {
            self.filled = vec![(0, u64::MAX)];
        }
        self.filled.push((from, to));
    }
    fn take_filled(&mut self) -> Vec<(u64, u64)> {
        let mut filled = std::mem::take(&mut self.filled);
        filled.retain(|(from, to)| !self.waiting.iter().any(|(a, b)| a <= from && to <= b));
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_filled_while_others_are_dropped_go_too() {
        let mut pages = PageState::default();
        pages.note_fill(0, 4);
        assert!(!pages.begin_wait(0, 4) && pages.take_filled().is_empty(), "nothing is being dropped");
        pages.begin_dropping();
        pages.note_fill(0, 4);
        pages.note_fill(8, 12);
        assert!(pages.begin_wait(6, 12), "the kernel has locked these pages: they are empty");
        assert_eq!(pages.take_filled(), [(0, 4)]);
        pages.end_wait(6, 12);
        (0..=FILLS_MAX as u64).for_each(|at| pages.note_fill(at, at + 1));
        assert_eq!(pages.take_filled()[0], (0, u64::MAX), "too many to tell apart");
        pages.check();
    }
}
