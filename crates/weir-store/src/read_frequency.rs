//! Which parts of slabs are read repeatedly: those are read through the machine's page cache.
//!
//! A first read is direct, so that a long scan neither fills memory nor evicts pages of other readers; a part
//! that is read again soon is worth caching. The page cache is the machine's own: bounded, freed under memory
//! pressure, and no part of this process. Pure; knows neither files nor cells.
use crate::recent_map::RecentMap;

/// Parts remembered: with whole cells of 512 KiB the last 4 GiB that were read from a target.
const REMEMBERED_MAX: usize = 8192;

/// The parts that were read recently.
#[derive(Default)]
pub struct ReadFrequency(RecentMap<u64, (), REMEMBERED_MAX>);

impl ReadFrequency {
    /// Records a read from `addr`. True: the part was read recently.
    pub fn note(&mut self, addr: u64) -> bool {
        self.0.note(addr, ()).is_some()
    }
}
