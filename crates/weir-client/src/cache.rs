//! Clean data of all inodes, within the memory budget; the least recently used goes first.
//!
//! Invariants: chunks of one inode never overlap; each chunk's memory is charged to the budget. The caller
//! decides whether a chunk may be kept (a lease), and drops the inode's chunks when the lease ends.
use crate::budget::{Budget, Charge};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use weir_proto::InodeId;

/// The rest of a truncated chunk pins all of the chunk's memory, so a rest smaller than this fraction of it
/// is dropped.
const KEPT_PART: usize = 16;

/// A contiguous part of a file.
struct Chunk {
    bytes: Bytes,
    /// Shared by the rests of a truncated chunk: the memory is freed with the last of them. `None`: it
    /// charges itself (a frozen write buffer).
    charge: Option<Arc<Charge>>,
    /// Bytes of the memory that it pins.
    memory_bytes: usize,
    used: bool,
    /// Prefetched, and not read yet.
    ahead: bool,
}

#[derive(Default)]
pub struct Cache {
    inodes: BTreeMap<InodeId, BTreeMap<u64, Chunk>>,
    /// Second-chance queue of chunks; may name chunks that are dropped already.
    queue: VecDeque<(InodeId, u64)>,
    queue_max: usize,
}

/// A cached part of a range.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    pub offset: u64,
    pub bytes: Bytes,
    /// The chunk was prefetched and is read for the first time.
    pub was_ahead: bool,
}

impl Cache {
    /// Cached parts of `start..end`, in order.
    pub fn get(&mut self, ino: InodeId, start: u64, end: u64) -> Vec<Found> {
        let Some(chunks) = self.inodes.get_mut(&ino) else { return Vec::new() };
        let from = chunks.range(..=start).next_back().map_or(start, |(at, _)| *at);
        let mut found = Vec::new();
        for (at, chunk) in chunks.range_mut(from..end) {
            let (a, b) = (start.max(*at), end.min(at + chunk.bytes.len() as u64));
            if a < b {
                let was_ahead = std::mem::take(&mut chunk.ahead);
                chunk.used = true;
                let bytes = chunk.bytes.slice((a - at) as usize..(b - at) as usize);
                found.push(Found { offset: a, bytes, was_ahead });
            }
        }
        found
    }

    /// How many bytes of `start..end` are cached.
    pub fn covered(&self, ino: InodeId, start: u64, end: u64) -> u64 {
        (end - start) - self.gaps(ino, start, end).iter().map(|(a, b)| b - a).sum::<u64>()
    }

    /// Keeps `bytes` where nothing is cached yet. `charged`: the memory charges itself; otherwise it is
    /// charged here, and not kept if the budget has no space even after older chunks were evicted.
    pub fn insert(
        &mut self,
        ino: InodeId,
        offset: u64,
        bytes: Bytes,
        charged: bool,
        ahead: bool,
        budget: &Budget,
    ) {
        let end = offset + bytes.len() as u64;
        for (a, b) in self.gaps(ino, offset, end) {
            let part = bytes.slice((a - offset) as usize..(b - offset) as usize);
            let charge =
                if charged { None } else { self.charge_for(part.len() as u64, budget).map(Arc::new) };
            if !charged && charge.is_none() {
                return;
            }
            let memory_bytes = part.len();
            self.put(ino, a, Chunk { bytes: part, charge, memory_bytes, used: false, ahead });
        }
        self.shorten_queue();
    }

    fn put(&mut self, ino: InodeId, at: u64, chunk: Chunk) {
        assert!(
            !chunk.bytes.is_empty() && chunk.bytes.len() <= chunk.memory_bytes,
            "a chunk pins what it shows"
        );
        self.inodes.entry(ino).or_default().insert(at, chunk);
        self.queue.push_back((ino, at));
    }

    /// Drops names of chunks that are gone, so that these do not accumulate.
    fn shorten_queue(&mut self) {
        let chunks: usize = if self.queue.len() > self.queue_max {
            self.inodes.values().map(BTreeMap::len).sum()
        } else {
            return;
        };
        let inodes = &self.inodes;
        let mut seen = std::collections::BTreeSet::new();
        self.queue.retain(|(ino, at)| {
            inodes.get(ino).is_some_and(|p| p.contains_key(at)) && seen.insert((*ino, *at))
        });
        self.queue_max = 2 * chunks + 4096;
    }

    fn charge_for(&mut self, bytes: u64, budget: &Budget) -> Option<Charge> {
        loop {
            match budget.try_take(bytes) {
                Some(charge) => return Some(charge),
                None if self.evict_one() => {}
                None => return None,
            }
        }
    }

    /// Parts of `start..end` without a chunk.
    fn gaps(&self, ino: InodeId, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = start;
        if let Some(chunks) = self.inodes.get(&ino) {
            let from = chunks.range(..=start).next_back().map_or(start, |(at, _)| *at);
            for (begin, chunk) in chunks.range(from..end) {
                let chunk_end = begin + chunk.bytes.len() as u64;
                if *begin > at {
                    gaps.push((at, *begin));
                }
                at = at.max(chunk_end);
            }
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }

    /// Drops the oldest chunk that was not used since it was last inspected. False: the cache is empty.
    pub fn evict_one(&mut self) -> bool {
        while let Some((ino, at)) = self.queue.pop_front() {
            let Some(chunks) = self.inodes.get_mut(&ino) else { continue };
            let Some(chunk) = chunks.get_mut(&at) else { continue };
            if std::mem::take(&mut chunk.used) {
                self.queue.push_back((ino, at));
                continue;
            }
            chunks.remove(&at);
            if chunks.is_empty() {
                self.inodes.remove(&ino);
            }
            return true;
        }
        false
    }

    /// Drops `start..end`: it was changed. The rest of a chunk on either side stays, unless it is a small
    /// part of the memory that it pins: a program that changes a file here and there still reads the rest of
    /// it from memory.
    pub fn remove(&mut self, ino: InodeId, start: u64, end: u64) {
        let Some(chunks) = self.inodes.get_mut(&ino) else { return };
        let from = chunks.range(..=start).next_back().map_or(start, |(at, _)| *at);
        let hit: Vec<u64> = chunks
            .range(from..end)
            .filter(|(at, p)| **at + p.bytes.len() as u64 > start)
            .map(|(at, _)| *at)
            .collect();
        let removed: Vec<(u64, Chunk)> =
            hit.into_iter().filter_map(|at| Some((at, chunks.remove(&at)?))).collect();
        if chunks.is_empty() {
            self.inodes.remove(&ino);
        }
        for (at, chunk) in removed {
            let chunk_end = at + chunk.bytes.len() as u64;
            for (a, b) in [(at, start.min(chunk_end)), (end.max(at), chunk_end)] {
                if a < b && (b - a) as usize * KEPT_PART >= chunk.memory_bytes {
                    let bytes = chunk.bytes.slice((a - at) as usize..(b - at) as usize);
                    self.put(ino, a, Chunk { bytes, charge: chunk.charge.clone(), ..chunk });
                }
            }
        }
        self.shorten_queue();
    }

    pub fn remove_inode(&mut self, ino: InodeId) {
        self.inodes.remove(&ino);
        if self.inodes.is_empty() {
            self.queue.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INO: InodeId = InodeId(9);

    #[test]
    fn the_budget_is_kept_by_dropping_unused_chunks() {
        let budget = Budget::new(100);
        let mut cache = Cache::default();
        for i in 0..10 {
            cache.insert(INO, i * 10, Bytes::from(vec![i as u8; 10]), false, true, &budget);
        }
        assert!(cache.get(INO, 0, 10)[0].was_ahead);
        assert!(!cache.get(INO, 0, 10)[0].was_ahead);
        cache.insert(INO, 500, Bytes::from(vec![7; 10]), false, false, &budget);
        assert_eq!(cache.get(INO, 0, 10).len(), 1, "used: kept");
        assert!(cache.get(INO, 10, 20).is_empty(), "oldest unused: gone");
        cache.insert(INO, 900, Bytes::from(vec![7; 101]), false, false, &budget);
        assert!(cache.get(INO, 900, 1001).is_empty(), "larger than the budget");
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn the_rest_of_a_truncated_chunk_keeps_its_memory() {
        let budget = Budget::new(1 << 20);
        let mut cache = Cache::default();
        let bytes: Vec<u8> = (0..160).collect();
        cache.insert(INO, 1000, Bytes::from(bytes.clone()), false, false, &budget);
        cache.remove(INO, 1040, 1050);
        let left: Vec<_> =
            cache.get(INO, 1000, 1160).into_iter().map(|f| (f.offset, f.bytes.to_vec())).collect();
        assert_eq!(left, [(1000, bytes[..40].to_vec()), (1050, bytes[50..].to_vec())]);
        assert_eq!(budget.used_bytes(), 160, "all of its memory is still there");
        // Less than a sixteenth of it: not kept. With the last part the memory is freed.
        cache.remove(INO, 1009, 1155);
        assert_eq!(cache.get(INO, 1000, 1160), []);
        assert_eq!(budget.used_bytes(), 0);
        // The truncated range has no bytes from before the truncation.
        cache.insert(INO, 0, Bytes::from(vec![1; 100]), false, false, &budget);
        cache.remove(INO, 40, 60);
        cache.insert(INO, 0, Bytes::from(vec![2; 100]), false, false, &budget);
        let all: Vec<u8> = cache.get(INO, 0, 100).into_iter().flat_map(|f| f.bytes.to_vec()).collect();
        assert_eq!(all, [vec![1; 40], vec![2; 20], vec![1; 40]].concat());
    }

    proptest! {
        #[test]
        fn the_cache_holds_first_insertions_and_no_removed_bytes(
            steps in prop::collection::vec((any::<bool>(), 0u64..200, 1u64..40, any::<u8>()), 1..60)
        ) {
            let budget = Budget::new(1 << 20);
            let mut cache = Cache::default();
            let mut model = vec![None; 256];
            for (insert, at, len, byte) in steps {
                if insert {
                    cache.insert(INO, at, Bytes::from(vec![byte; len as usize]), false, false, &budget);
                    for b in &mut model[at as usize..(at + len) as usize] {
                        b.get_or_insert(byte);
                    }
                } else {
                    cache.remove(INO, at, at + len);
                    model[at as usize..(at + len) as usize].fill(None);
                    let left = cache.get(INO, 0, 256);
                    prop_assert!(left.iter().all(|f| f.offset + f.bytes.len() as u64 <= at || f.offset >= at + len));
                    // A truncated chunk may be dropped as a whole.
                    let mut kept = vec![None; 256];
                    for f in left {
                        for (i, b) in f.bytes.iter().enumerate() {
                            kept[f.offset as usize + i] = Some(*b);
                        }
                    }
                    for (m, k) in model.iter_mut().zip(kept) {
                        prop_assert!(k.is_none() || *m == k);
                        *m = k;
                    }
                }
            }
            for f in cache.get(INO, 0, 256) {
                for (i, b) in f.bytes.iter().enumerate() {
                    prop_assert_eq!(model[f.offset as usize + i], Some(*b));
                }
            }
        }
    }
}
