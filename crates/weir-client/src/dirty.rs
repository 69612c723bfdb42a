//! Changed bytes of one stripe that are not on targets yet.
//!
//! Few extents of a cell have memory of their own. A cell that many small writes hit is dense: one buffer,
//! with the written runs in it. Each extent would take a page of memory, and random writes come to touch each
//! other in the end.
//!
//! Invariants: extents and runs never overlap, never cross a cell's border, and hold only written bytes; a
//! cell has extents or is dense, never both; all memory is charged. Offsets are within the stripe. Knows
//! nothing of leases, targets or files.
use crate::budget::Charged;
use bytes::Bytes;
use std::collections::BTreeMap;

/// The first bytes of a file get a small buffer: most small files never need a whole cell.
const FIRST_BUFFER_BYTES: usize = 64 << 10;
/// Buffers for bytes that follow directly on others, in the middle of a cell: a sequential run is likely.
const RUN_BUFFER_BYTES: usize = 256 << 10;
/// A cell with an extent for each of this many of its bytes becomes dense: an extent takes a page of 4 KiB,
/// so the extents take a quarter of the memory that the cell takes then.
const DENSE_BYTES_PER_EXTENT: u32 = 16 << 10;
/// Fewer extents than this stay as they are: they cost less than a whole cell to copy and to keep.
const DENSE_EXTENTS_MIN: u32 = 32;

/// The changed bytes of one stripe.
#[derive(Default)]
pub struct StripeBuf {
    /// By offset within the stripe.
    extents: BTreeMap<u32, Charged>,
    /// By index of the cell.
    dense: BTreeMap<u32, DenseCell>,
    covered_bytes: u32,
}

/// A cell that many small writes have hit.
struct DenseCell {
    /// As long as the cell. Bytes outside of the runs are arbitrary.
    buffer: Charged,
    /// Start and end of the written bytes within the cell; two runs never touch.
    runs: BTreeMap<u32, u32>,
}

impl DenseCell {
    /// Copies `data` to `at` within the cell. Returns the number of bytes that were not covered before.
    fn write(&mut self, at: u32, data: &[u8]) -> u32 {
        let (mut from, mut to) = (at, at + data.len() as u32);
        self.buffer[from as usize..to as usize].copy_from_slice(data);
        let mut covered = 0;
        while let Some((a, b)) = self.runs.range(..=to).next_back().map(|(a, b)| (*a, *b))
            && b >= from
        {
            self.runs.remove(&a);
            covered += b - a;
            (from, to) = (from.min(a), to.max(b));
        }
        self.runs.insert(from, to);
        to - from - covered
    }
    /// Drops everything from `end` within the cell on.
    fn truncate(&mut self, end: u32) {
        self.runs.split_off(&end);
        if let Some((_, to)) = self.runs.iter_mut().next_back() {
            *to = end.min(*to);
        }
    }
    fn bytes(&self) -> impl Iterator<Item = (u32, &[u8])> {
        self.runs.iter().map(|(a, b)| (*a, &self.buffer[*a as usize..*b as usize]))
    }
}

/// No memory now: nothing more was buffered.
#[derive(Debug, PartialEq, Eq)]
pub struct NoMemory;

impl StripeBuf {
    pub fn covered_bytes(&self) -> u32 {
        self.covered_bytes
    }
    /// Start of the first changed byte.
    fn start(&self) -> u32 {
        let first = self.parts_within(0, u32::MAX).next();
        first.map_or(0, |(at, _)| at)
    }
    /// End of the last changed byte.
    pub fn end(&self) -> u32 {
        let of_extents = self.extents.last_key_value().map_or(0, |(at, e)| at + e.len() as u32);
        let of_cells = self.dense.last_key_value().map_or(0, |(index, cell)| {
            index * cell.buffer.len() as u32 + cell.runs.last_key_value().map_or(0, |(_, end)| *end)
        });
        of_extents.max(of_cells)
    }
    /// Whether it covers all of a stripe from some byte on, without a gap.
    pub fn is_whole_rest(&self, stripe_bytes: u32) -> bool {
        self.end() == stripe_bytes && self.start() + self.covered_bytes == stripe_bytes
    }
    /// Contiguous ranges in order (touching extents joined).
    pub fn ranges(&self) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for (at, bytes) in self.parts_within(0, u32::MAX) {
            match ranges.last_mut() {
                Some((_, end)) if *end == at => *end += bytes.len() as u32,
                _ => ranges.push((at, at + bytes.len() as u32)),
            }
        }
        ranges
    }
    /// The parts that meet `start..end`, in order, each whole.
    fn parts_within(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, &[u8])> {
        let from = self.extents.range(..=start).next_back().map_or(start, |(at, _)| *at);
        let mut extents = self.extents.range(from..end).map(|(at, e)| (*at, &e[..])).peekable();
        let mut cells = self
            .dense
            .iter()
            .filter(move |(index, cell)| (*index + 1) * cell.buffer.len() as u32 > start)
            .flat_map(|(index, cell)| {
                let first = index * cell.buffer.len() as u32;
                cell.bytes().map(move |(at, bytes)| (first + at, bytes))
            })
            .skip_while(move |(at, bytes)| at + bytes.len() as u32 <= start)
            .take_while(move |(at, _)| *at < end)
            .peekable();
        std::iter::from_fn(move || match (extents.peek(), cells.peek()) {
            (Some((a, _)), Some((b, _))) if a > b => cells.next(),
            (None, _) => cells.next(),
            _ => extents.next(),
        })
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
        assert!(cell_bytes > 0, "a stripe has cells");
        let mut at = offset;
        while !data.is_empty() {
            let n = match self.write_into_dense(at, data, cell_bytes) {
                0 => match self.write_into_existing(at, data, cell_bytes) {
                    0 => self.write_into_new(at, data, cell_bytes, first, buffer)?,
                    n => n,
                },
                n => n,
            };
            at += n as u32;
            data = &data[n..];
        }
        Ok(())
    }

    /// Bytes accepted by the dense cell of `at`; 0 if it is none.
    fn write_into_dense(&mut self, at: u32, data: &[u8], cell_bytes: u32) -> usize {
        let Some(cell) = self.dense.get_mut(&(at / cell_bytes)) else { return 0 };
        let within = at % cell_bytes;
        let n = data.len().min((cell_bytes - within) as usize);
        self.covered_bytes += cell.write(within, &data[..n]);
        n
    }

    /// Gives a cell that has many extents one buffer, if there is memory for it.
    fn join_if_scattered(
        &mut self,
        index: u32,
        cell_bytes: u32,
        buffer: &mut dyn FnMut(usize) -> Option<Charged>,
    ) {
        let extents_max = (cell_bytes / DENSE_BYTES_PER_EXTENT).max(DENSE_EXTENTS_MIN) as usize;
        let cell = index * cell_bytes..(index + 1) * cell_bytes;
        if self.extents.range(cell.clone()).nth(extents_max).is_none() {
            return;
        }
        let Some(mut whole) = buffer(cell_bytes as usize) else { return };
        whole.truncate(cell_bytes as usize);
        let mut dense = DenseCell { buffer: whole, runs: BTreeMap::new() };
        let mut later = self.extents.split_off(&cell.start);
        self.extents.append(&mut later.split_off(&cell.end));
        for (at, extent) in later {
            dense.write(at - cell.start, &extent);
        }
        self.dense.insert(index, dense);
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
        assert!(n > 0, "an extent at {at} has bytes");
        let wanted = self.buffer_bytes(at, n, space, cell_bytes, first);
        let mut extent = buffer(wanted).or_else(|| buffer(n)).ok_or(NoMemory)?;
        // A pool may return a larger buffer; only the valid bytes count.
        extent.truncate(n);
        extent.grow(n);
        extent.copy_from_slice(&data[..n]);
        self.extents.insert(at, extent);
        self.covered_bytes += n as u32;
        self.join_if_scattered(at / cell_bytes, cell_bytes, buffer);
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
        let mut parts = Vec::new();
        for (at, bytes) in self.parts_within(start, end) {
            let (a, b) = (start.max(at), end.min(at + bytes.len() as u32));
            if a < b {
                parts.push((a, Bytes::copy_from_slice(&bytes[(a - at) as usize..(b - at) as usize])));
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
        for (index, cell) in &mut self.dense {
            cell.truncate(end.saturating_sub(index * cell.buffer.len() as u32));
        }
        self.dense.retain(|_, cell| !cell.runs.is_empty());
        self.covered_bytes = self.parts_within(0, u32::MAX).map(|(_, bytes)| bytes.len() as u32).sum();
    }

    /// Freezes all parts, in order.
    pub fn freeze(self) -> Vec<(u32, Bytes)> {
        let mut parts: Vec<(u32, Bytes)> =
            self.extents.into_iter().map(|(at, extent)| (at, extent.freeze())).collect();
        for (index, cell) in self.dense {
            let first = index * cell.buffer.len() as u32;
            let whole = cell.buffer.freeze();
            let runs = cell.runs.into_iter();
            parts.extend(runs.map(|(a, b)| (first + a, whole.slice(a as usize..b as usize))));
        }
        parts.sort_unstable_by_key(|(at, _)| *at);
        parts
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
        assert_eq!((stripe.extents.len(), stripe.covered_bytes()), (4, 4 * CELL));
        assert_eq!(stripe.ranges(), vec![(0, 4 * CELL)]);
        assert_eq!(budget.used_bytes(), u64::from(4 * CELL));
    }

    #[test]
    fn no_memory_is_reported_and_harmless() {
        let (budget, pool) = (Budget::new(4096), BufferPool::new(1 << 20));
        let mut stripe = StripeBuf::default();
        let mut alloc = alloc(&budget, &pool);
        assert_eq!(stripe.write(10, &[1; 9000], CELL, false, &mut alloc), Err(NoMemory));
        assert_eq!(stripe.write(10, &[1; 100], CELL, false, &mut alloc), Ok(()));
        assert_eq!(stripe.write(200, &[1; 100], CELL, false, &mut alloc), Err(NoMemory));
        assert_eq!(stripe.ranges(), vec![(10, 110)]);
    }

    #[test]
    fn many_small_extents_of_a_cell_share_one_buffer() {
        let (budget, pool) = (Budget::new(1 << 30), BufferPool::new(1 << 20));
        let mut stripe = StripeBuf::default();
        let mut alloc = alloc(&budget, &pool);
        // Every second block, then the others: nothing is sent early, and the cell is whole in the end.
        for at in (0..128).step_by(2).chain((1..128).step_by(2)) {
            stripe.write(CELL + at * 512, &[at as u8; 512], CELL, false, &mut alloc).unwrap();
        }
        assert_eq!(stripe.ranges(), vec![(CELL, 2 * CELL)]);
        assert_eq!((stripe.extents.len(), stripe.covered_bytes(), stripe.end()), (0, CELL, 2 * CELL));
        assert!(stripe.is_whole_rest(2 * CELL) && !stripe.is_whole_rest(4 * CELL));
        assert_eq!(budget.used_bytes(), u64::from(CELL), "one buffer, not 128 pages");
        let parts = stripe.freeze();
        assert!((0..128).all(|n| parts[0].1[n * 512] == n as u8));
        assert_eq!((parts.len(), parts[0].0), (1, CELL));
    }

    proptest! {
        /// Any sequence of writes reads back, and nothing else is dirty.
        #[test]
        fn behaves_like_an_array(
            large in prop::collection::vec((0u32..4 * CELL, 1usize..90_000, any::<u8>()), 1..40),
            small in prop::collection::vec((0u32..2 * CELL, 1usize..2_000, any::<u8>()), 0..200),
            large_first: bool,
            size in 0u32..4 * CELL,
        ) {
            let writes = if large_first { [large, small].concat() } else { [small, large].concat() };
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
                let last = model.iter().rposition(Option::is_some).map_or(0, |at| at + 1);
                prop_assert_eq!(stripe.end() as usize, last);
                let rest_is_whole = model.iter().skip_while(|b| b.is_none()).all(Option::is_some);
                let is_whole_rest = rest_is_whole && last == model.len();
                prop_assert_eq!(stripe.is_whole_rest(4 * CELL), is_whole_rest);
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
