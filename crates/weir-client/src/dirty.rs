//! Changed bytes of one stripe that are not on targets yet.
//!
//! Invariants: extents never overlap, never cross a cell's border, and hold only written bytes; every
//! extent's memory is charged. Offsets are within the stripe. Knows nothing of leases, targets or files.
use crate::budget::Charged;
use bytes::Bytes;
use std::collections::BTreeMap;

/// The first bytes of a file get a small buffer: most small files never need a whole cell.
const FIRST_BUFFER_BYTES: usize = 64 << 10;
/// Buffers for bytes that follow directly on others, in the middle of a cell: a sequential run is likely.
const RUN_BUFFER_BYTES: usize = 256 << 10;

/// Dirty extents of one stripe by offset within the stripe.
#[derive(Default)]
pub struct StripeBuf {
    extents: BTreeMap<u32, Charged>,
    covered_bytes: u32,
}

/// No memory now: nothing more was buffered.
#[derive(Debug, PartialEq, Eq)]
pub struct NoMemory;

impl StripeBuf {
    pub fn covered_bytes(&self) -> u32 {
        self.covered_bytes
    }
    pub fn extent_count(&self) -> usize {
        self.extents.len()
    }
    /// End of the last extent.
    pub fn end(&self) -> u32 {
        self.extents.last_key_value().map_or(0, |(at, e)| at + e.len() as u32)
    }
    /// Whether it covers all of a stripe from some byte on, without a gap.
    pub fn is_whole_rest(&self, stripe_bytes: u32) -> bool {
        matches!(self.ranges()[..], [(_, end)] if end == stripe_bytes)
    }
    /// Contiguous ranges in order (touching extents joined).
    pub fn ranges(&self) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for (at, extent) in &self.extents {
            match ranges.last_mut() {
                Some((_, end)) if *end == *at => *end += extent.len() as u32,
                _ => ranges.push((*at, at + extent.len() as u32)),
            }
        }
        ranges
    }

    /// Copies `data` to `offset`. `first`: this is the start of a file. Stops if `buffer` has no memory; the
    /// part buffered until then stays (buffering it again is harmless).
    pub fn write(
        &mut self,
        offset: u32,
        mut data: &[u8],
        cell_bytes: u32,
        first: bool,
        buffer: &mut dyn FnMut(usize) -> Option<Charged>,
    ) -> Result<(), NoMemory> {
        let mut at = offset;
        while !data.is_empty() {
            let n = match self.write_into_existing(at, data, cell_bytes) {
                0 => self.write_into_new(at, data, cell_bytes, first, buffer)?,
                n => n,
            };
            at += n as u32;
            data = &data[n..];
        }
        Ok(())
    }

    /// Bytes accepted by the extent that holds or ends at `at`; 0 if none has room.
    fn write_into_existing(&mut self, at: u32, data: &[u8], cell_bytes: u32) -> usize {
        let buffer_end = self.buffer_end(at, cell_bytes);
        let Some((start, extent)) = self.extents.range_mut(..=at).next_back() else { return 0 };
        let inside = (at - start) as usize;
        if inside > extent.len() || at / cell_bytes != start / cell_bytes {
            return 0;
        }
        let limit = extent.capacity().min((buffer_end - start) as usize).max(extent.len());
        let n = data.len().min(limit.saturating_sub(inside));
        if n == 0 {
            return 0;
        }
        let before = extent.len();
        if inside + n > before {
            extent.grow(inside + n);
            self.covered_bytes += (inside + n - before) as u32;
        }
        extent[inside..inside + n].copy_from_slice(&data[..n]);
        n
    }

    fn write_into_new(
        &mut self,
        at: u32,
        data: &[u8],
        cell_bytes: u32,
        first: bool,
        buffer: &mut dyn FnMut(usize) -> Option<Charged>,
    ) -> Result<usize, NoMemory> {
        let space = (self.buffer_end(at, cell_bytes) - at) as usize;
        let n = data.len().min(space);
        let wanted = self.buffer_bytes(at, n, space, cell_bytes, first);
        let mut extent = buffer(wanted).or_else(|| buffer(n)).ok_or(NoMemory)?;
        // A pool may return a larger buffer; only the valid bytes count.
        extent.truncate(n);
        extent.grow(n);
        extent.copy_from_slice(&data[..n]);
        self.extents.insert(at, extent);
        self.covered_bytes += n as u32;
        Ok(n)
    }

    /// The buffer size for `n` bytes at `at`.
    fn buffer_bytes(&self, at: u32, n: usize, space: usize, cell_bytes: u32, first: bool) -> usize {
        let starts_cell = at.is_multiple_of(cell_bytes);
        let follows = self.extents.range(..at).next_back().is_some_and(|(s, e)| s + e.len() as u32 == at);
        let wanted = match (starts_cell, first && at == 0, follows) {
            (true, true, _) if n <= FIRST_BUFFER_BYTES => FIRST_BUFFER_BYTES,
            (true, _, _) => cell_bytes as usize,
            (false, _, true) => RUN_BUFFER_BYTES,
            (false, _, false) => n,
        };
        wanted.clamp(n, space.max(n))
    }

    /// The end of the free range from `at` on: the next extent or the cell's end.
    fn buffer_end(&self, at: u32, cell_bytes: u32) -> u32 {
        let cell_end = (at / cell_bytes + 1) * cell_bytes;
        self.extents.range(at + 1..).next().map_or(cell_end, |(next, _)| cell_end.min(*next))
    }

    /// Copies the dirty bytes of `start..end` out: (offset, bytes) in order.
    pub fn copy_range(&self, start: u32, end: u32) -> Vec<(u32, Bytes)> {
        let from = self.extents.range(..=start).next_back().map_or(start, |(at, _)| *at);
        let mut parts = Vec::new();
        for (at, extent) in self.extents.range(from..end) {
            let (a, b) = (start.max(*at), end.min(at + extent.len() as u32));
            if a < b {
                parts.push((a, Bytes::copy_from_slice(&extent[(a - at) as usize..(b - at) as usize])));
            }
        }
        parts
    }

    /// Drops everything from `end` on (the file was truncated).
    pub fn truncate(&mut self, end: u32) {
        self.extents.split_off(&end);
        if let Some((at, extent)) = self.extents.iter_mut().next_back() {
            extent.truncate((end - at) as usize);
        }
        self.covered_bytes = self.extents.values().map(|e| e.len() as u32).sum();
    }

    /// Freezes all extents, in order.
    pub fn freeze(self) -> Vec<(u32, Bytes)> {
        self.extents.into_iter().map(|(at, extent)| (at, extent.freeze())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use proptest::prelude::*;
    use weir_env::BufferPool;

    const CELL: u32 = 64 << 10;

    fn alloc(budget: &Budget, pool: &BufferPool) -> impl FnMut(usize) -> Option<Charged> {
        let (budget, pool) = (budget.clone(), pool.clone());
        move |n| budget.try_buffer(&pool, n)
    }

    #[test]
    fn a_stream_gets_one_buffer_per_cell() {
        let (budget, pool) = (Budget::new(1 << 30), BufferPool::new(1 << 20));
        let mut stripe = StripeBuf::default();
        for i in 0..64 {
            stripe.write(i * 4096, &[i as u8; 4096], CELL, false, &mut alloc(&budget, &pool)).unwrap();
        }
        assert_eq!((stripe.extent_count(), stripe.covered_bytes()), (4, 4 * CELL));
        assert_eq!(stripe.ranges(), vec![(0, 4 * CELL)]);
        assert_eq!(budget.used_bytes(), u64::from(4 * CELL));
    }

    #[test]
    fn no_memory_is_said_and_harmless() {
        let (budget, pool) = (Budget::new(4096), BufferPool::new(1 << 20));
        let mut stripe = StripeBuf::default();
        let mut alloc = alloc(&budget, &pool);
        assert_eq!(stripe.write(10, &[1; 9000], CELL, false, &mut alloc), Err(NoMemory));
        assert_eq!(stripe.write(10, &[1; 100], CELL, false, &mut alloc), Ok(()));
        assert_eq!(stripe.write(200, &[1; 100], CELL, false, &mut alloc), Err(NoMemory));
        assert_eq!(stripe.ranges(), vec![(10, 110)]);
    }

    proptest! {
        /// Any sequence of writes reads back, and nothing else is dirty.
        #[test]
        fn behaves_like_an_array(
            writes in prop::collection::vec((0u32..4 * CELL, 1usize..90_000, any::<u8>()), 1..40),
            size in 0u32..4 * CELL,
        ) {
            let (budget, pool) = (Budget::new(1 << 30), BufferPool::new(1 << 20));
            let mut model = vec![None; 4 * CELL as usize];
            let mut stripe = StripeBuf::default();
            for (at, len, byte) in writes {
                let len = len.min((4 * CELL - at) as usize);
                stripe.write(at, &vec![byte; len], CELL, true, &mut alloc(&budget, &pool)).unwrap();
                model[at as usize..at as usize + len].fill(Some(byte));
            }
            for round in 0..2 {
                let mut seen = vec![None; 4 * CELL as usize];
                for (at, bytes) in stripe.copy_range(0, 4 * CELL) {
                    for (i, b) in bytes.iter().enumerate() {
                        prop_assert!(seen[at as usize + i].replace(*b).is_none());
                    }
                }
                prop_assert!(seen == model);
                prop_assert_eq!(stripe.covered_bytes() as usize, model.iter().flatten().count());
                if round == 0 {
                    stripe.truncate(size);
                    model[size as usize..].fill(None);
                }
            }
            for (at, bytes) in stripe.freeze() {
                let cell = at / CELL;
                prop_assert!((at + bytes.len() as u32).div_ceil(CELL) <= cell + 1);
            }
            prop_assert_eq!(budget.used_bytes(), 0);
        }
    }
}
