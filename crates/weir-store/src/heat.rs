//! Which parts of slabs are read again and again: those go through the machine's page cache.
//!
//! A first read is direct, so that a long scan neither fills memory nor drives out what others use; a part that is read
//! again soon is worth keeping. The memory is the machine's own: it is bounded, given back when somebody needs it, and
//! no part of this process. Pure; knows neither files nor cells.
use std::collections::{BTreeSet, VecDeque};

/// Parts remembered: with whole cells of 512 KiB the last 4 GiB that were read from a target.
const REMEMBERED_MAX: usize = 8192;

/// What was read lately.
#[derive(Default)]
pub struct Heat {
    seen: BTreeSet<u64>,
    order: VecDeque<u64>,
}

impl Heat {
    /// Takes note of a read from `addr`. True: it was read not long ago.
    pub fn note(&mut self, addr: u64) -> bool {
        if !self.seen.insert(addr) {
            return true;
        }
        self.order.push_back(addr);
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.seen.remove(&oldest);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_is_cold_and_a_second_look_is_hot() {
        let mut heat = Heat::default();
        for addr in 0..REMEMBERED_MAX as u64 {
            assert!(!heat.note(addr));
        }
        assert!(heat.note(0) && heat.note(REMEMBERED_MAX as u64 - 1));
        assert!(!heat.note(1 << 40), "one more than is remembered");
        assert!(!heat.note(0), "the oldest is forgotten");
        assert!(heat.seen.len() <= REMEMBERED_MAX && heat.order.len() <= REMEMBERED_MAX);
    }
}
