//! Which parts of slabs are read again and again: those go through the machine's page cache.
//!
//! A first read is direct, so that a long scan neither fills memory nor drives out what others use; a part
//! that is read again soon is worth keeping. The memory is the machine's own: it is bounded, given back when
//! somebody needs it, and no part of this process. Pure; knows neither files nor cells.
use crate::recent_map::RecentMap;

/// Parts remembered: with whole cells of 512 KiB the last 4 GiB that were read from a target.
const REMEMBERED_MAX: usize = 8192;

/// What was read lately.
#[derive(Default)]
pub struct ReadFrequency(RecentMap<u64, (), REMEMBERED_MAX>);

impl ReadFrequency {
    /// Takes note of a read from `addr`. True: it was read not long ago.
    pub fn note(&mut self, addr: u64) -> bool {
        self.0.note(addr, ()).is_some()
    }
}
