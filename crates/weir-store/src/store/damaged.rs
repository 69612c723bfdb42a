//! Blocks of a target that failed their checksum and are not repaired yet: each is counted once.
use crate::read::BadBlock;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_proto::CellId;

/// Blocks remembered one by one.
const BLOCKS_MAX: usize = 65_536;

#[derive(Default)]
pub struct Damaged(Mutex<BTreeSet<BadBlock>>);

impl Damaged {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<BadBlock>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Returns how many were not known.
    pub fn note(&self, bad: Vec<BadBlock>) -> usize {
        let mut blocks = self.lock();
        bad.into_iter().filter(|b| blocks.len() < BLOCKS_MAX && blocks.insert(*b)).count()
    }
    /// The cell is repaired; returns how many of its blocks were damaged.
    pub fn settle(&self, cell: CellId) -> usize {
        let mut blocks = self.lock();
        let before = blocks.len();
        blocks.retain(|b| b.cell != cell);
        before - blocks.len()
    }
    pub fn cells(&self) -> BTreeSet<CellId> {
        self.lock().iter().map(|b| b.cell).collect()
    }
}
