//! Free space of a target: which byte ranges of its slabs hold nothing.
//!
//! Addresses are linear over all slabs. Space is taken from the file system in *steps*; an extent lies within
//! one step, so a step without extents can be returned whole. The map lives in memory only and is rebuilt
//! from the index at open: space that no entry names is free, so a crash cannot leak space.
//!
//! Lengths are multiples of [`UNIT_BYTES`]: a fragment wastes less than one unit, and a step's unusable end
//! is smaller than the largest fragment. Pure: knows nothing of files, entries or durability.
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::{Error, Result};

/// Granularity of space; the alignment that direct I/O asks for.
pub const UNIT_BYTES: u32 = 4096;

/// The least number of steps of a target's file system, as far as the least step allows.
const STEPS_MIN: u64 = 64;

/// A range of a target's space. `len` 0: nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Extent {
    pub addr: u64,
    pub len: u32,
}

/// How a target's space is divided. Fixed when the target is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size of one slab file; a multiple of `step_bytes`.
    pub slab_bytes: u64,
    /// Space is taken from and returned to the file system in parts of this size.
    pub step_bytes: u64,
}

impl Geometry {
    /// 1 GiB slabs keep the files few; 32 MiB steps lose at most 1/32 to a 1 MiB cell that does not fit at
    /// the end.
    pub const DEFAULT: Geometry = Geometry { slab_bytes: 1 << 30, step_bytes: 32 << 20 };
    /// The least step: the largest payload of one message must fit.
    pub const STEP_BYTES_MIN: u64 = weir_proto::data::PAYLOAD_MAX as u64;

    /// For a new target on a file system of this size: a step that is too large for what is left there is
    /// lost, so it is at most this part of it.
    pub fn for_disk(total_bytes: u64) -> Geometry {
        let wanted = (total_bytes / STEPS_MIN).max(1);
        let step_bytes = (1u64 << wanted.ilog2()).clamp(Self::STEP_BYTES_MIN, Self::DEFAULT.step_bytes);
        Geometry { slab_bytes: Self::DEFAULT.slab_bytes / Self::DEFAULT.step_bytes * step_bytes, step_bytes }
    }

    pub fn check(self) -> Result<Geometry> {
        let unit = u64::from(UNIT_BYTES);
        if self.step_bytes < Self::STEP_BYTES_MIN
            || !self.step_bytes.is_multiple_of(unit)
            || self.step_bytes > u64::from(u32::MAX)
            || self.slab_bytes < self.step_bytes
            || !self.slab_bytes.is_multiple_of(self.step_bytes)
        {
            return Err(Error::invalid(format!(
                "slabs of {} bytes in steps of {}: a step must be at least {} bytes, and a slab whole steps",
                self.slab_bytes,
                self.step_bytes,
                Self::STEP_BYTES_MIN
            )));
        }
        Ok(self)
    }
    pub fn slab_of(self, addr: u64) -> u32 {
        (addr / self.slab_bytes) as u32
    }
    pub fn offset_in_slab(self, addr: u64) -> u64 {
        addr % self.slab_bytes
    }
}

/// Rounds up to whole units.
pub fn round_up(bytes: u32) -> u32 {
    bytes.div_ceil(UNIT_BYTES) * UNIT_BYTES
}

/// The free ranges of all steps that are allocated from the file system.
pub struct FreeMap {
    geometry: Geometry,
    by_addr: BTreeMap<u64, u32>,
    by_len: BTreeSet<(u32, u64)>,
    /// Used bytes of each step that is backed by the file system.
    steps: BTreeMap<u64, u64>,
    idle_steps: BTreeSet<u64>,
    used_bytes: u64,
}

impl FreeMap {
    /// Rebuilds the map from all extents in use, in any order; the same extent may be named twice (a prepared
    /// version that shares the bytes of its base). Overlapping extents are an error that names both.
    pub fn rebuild(geometry: Geometry, mut extents: Vec<Extent>) -> Result<FreeMap> {
        let mut map = FreeMap {
            geometry,
            by_addr: BTreeMap::new(),
            by_len: BTreeSet::new(),
            steps: BTreeMap::new(),
            idle_steps: BTreeSet::new(),
            used_bytes: 0,
        };
        extents.retain(|e| e.len > 0);
        extents.sort_unstable();
        extents.dedup();
        let mut cursor = 0; // end of the previous extent
        for e in &extents {
            if e.addr < cursor || e.addr % u64::from(UNIT_BYTES) != 0 || e.len % UNIT_BYTES != 0 {
                return Err(Error::damaged(format!(
                    "extent {e:?} overlaps the one before or is not aligned"
                )));
            }
            let end = e
                .addr
                .checked_add(u64::from(e.len))
                .ok_or_else(|| Error::damaged(format!("extent {e:?}")))?;
            let step = map.step_of(e.addr);
            if map.step_of(end - 1) != step {
                return Err(Error::damaged(format!("extent {e:?} lies in two steps")));
            }
            let step_start = step * geometry.step_bytes;
            if !map.steps.contains_key(&step) {
                map.close_step(cursor);
                map.steps.insert(step, 0);
                map.insert_free(step_start, (e.addr - step_start) as u32);
            } else {
                map.insert_free(cursor, (e.addr - cursor) as u32);
            }
            *map.steps.get_mut(&step).expect("just inserted") += u64::from(e.len);
            map.used_bytes += u64::from(e.len);
            cursor = end;
        }
        map.close_step(cursor);
        map.check();
        Ok(map)
    }

    /// Checks that the parts of the map agree. Takes as long as it has steps and free ranges.
    pub fn check(&self) {
        let free: u64 = self.by_addr.values().map(|len| u64::from(*len)).sum();
        assert_eq!(free, self.free_bytes(), "free ranges and used bytes are not all of the backed steps");
        assert_eq!(self.by_addr.len(), self.by_len.len(), "a free range is in one of the two lists only");
        assert_eq!(self.steps.values().sum::<u64>(), self.used_bytes, "bytes are used in no step");
        let is_idle = |step: &u64| self.steps.get(step) == Some(&0);
        assert!(self.idle_steps.iter().all(is_idle), "an idle step holds bytes or is not backed");
    }

    /// Whether a free range holds `len` bytes.
    pub fn has(&self, len: u32) -> bool {
        self.by_len.range((len, 0)..).next().is_some()
    }

    /// The smallest free range that holds `len` bytes, the lowest of those.
    pub fn take(&mut self, len: u32) -> Option<Extent> {
        assert!(len > 0 && len.is_multiple_of(UNIT_BYTES), "whole units only");
        let (range_len, addr) = self.by_len.range((len, 0)..).next().copied()?;
        self.remove_free(addr, range_len);
        self.insert_free(addr + u64::from(len), range_len - len);
        let step = self.step_of(addr);
        let used = self.steps.get_mut(&step).expect("free ranges lie in backed steps");
        *used += u64::from(len);
        assert!(*used <= self.geometry.step_bytes, "more bytes are used in a step than it has");
        self.idle_steps.remove(&step);
        self.used_bytes += u64::from(len);
        Some(Extent { addr, len })
    }

    /// Frees an extent that [`FreeMap::take`] or the index handed out.
    pub fn free(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let step = self.step_of(extent.addr);
        let used = self.steps.get_mut(&step).expect("an extent in use lies in a backed step");
        assert!(*used >= u64::from(extent.len), "more freed than used");
        *used -= u64::from(extent.len);
        if *used == 0 {
            self.idle_steps.insert(step);
        }
        self.used_bytes -= u64::from(extent.len);
        let (mut addr, mut len) = (extent.addr, extent.len);
        if let Some((&before, &before_len)) = self.by_addr.range(..addr).next_back() {
            assert!(before + u64::from(before_len) <= addr, "freed twice");
            if before + u64::from(before_len) == addr && self.step_of(before) == step {
                self.remove_free(before, before_len);
                addr = before;
                len += before_len;
            }
        }
        let end = addr + u64::from(len);
        if let Some((&after, &after_len)) = self.by_addr.range(addr..).next() {
            assert!(after >= end, "freed twice");
            if after == end && self.step_of(after) == step {
                self.remove_free(after, after_len);
                len += after_len;
            }
        }
        self.insert_free(addr, len);
    }

    /// The lowest step that is not allocated from the file system yet.
    pub fn next_step(&self) -> u64 {
        let mut expected = 0;
        for &step in self.steps.keys() {
            if step != expected {
                break;
            }
            expected += 1;
        }
        expected
    }
    /// Adds a step that was allocated from the file system.
    pub fn add_step(&mut self, step: u64) {
        if self.steps.insert(step, 0).is_none() {
            self.idle_steps.insert(step);
            self.insert_free(step * self.geometry.step_bytes, self.geometry.step_bytes as u32);
        }
    }
    /// Removes the highest step without extents if there are more than `keep` of those; the caller returns it
    /// to the file system.
    pub fn retire_step(&mut self, keep: usize) -> Option<u64> {
        if self.idle_steps.len() <= keep {
            return None;
        }
        let step = self.idle_steps.pop_last()?;
        assert_eq!(self.steps.remove(&step), Some(0), "a step that goes back to the file system holds bytes");
        self.remove_free(step * self.geometry.step_bytes, self.geometry.step_bytes as u32);
        Some(step)
    }
    pub fn has_step(&self, step: u64) -> bool {
        self.steps.contains_key(&step)
    }
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }
    pub fn free_bytes(&self) -> u64 {
        self.steps.len() as u64 * self.geometry.step_bytes - self.used_bytes
    }

    fn step_of(&self, addr: u64) -> u64 {
        addr / self.geometry.step_bytes
    }
    fn insert_free(&mut self, addr: u64, len: u32) {
        if len > 0 {
            self.by_addr.insert(addr, len);
            self.by_len.insert((len, addr));
        }
    }
    fn remove_free(&mut self, addr: u64, len: u32) {
        assert_eq!(self.by_addr.remove(&addr), Some(len), "a free range is not the one that was found");
        assert!(self.by_len.remove(&(len, addr)), "a free range is in one of the two lists only");
    }
    /// The rest of the step that ends after `cursor` is free (nothing if `cursor` is a step's start).
    fn close_step(&mut self, cursor: u64) {
        let rest = cursor.next_multiple_of(self.geometry.step_bytes) - cursor;
        self.insert_free(cursor, rest as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_size_of_the_disk() {
        let step = |total| Geometry::for_disk(total).check().unwrap().step_bytes;
        let (mib, gib) = (1 << 20, 1 << 30);
        assert_eq!([0, 99 * mib, 512 * mib].map(step), [8 * mib; 3]);
        assert_eq!([gib - 1, gib, 2 * gib - 1].map(step), [8 * mib, 16 * mib, 16 * mib]);
        assert_eq!([2 * gib, 31 * gib, 1 << 44].map(step), [32 * mib; 3]);
        assert_eq!(Geometry::for_disk(1 << 40), Geometry::DEFAULT);
    }
    use proptest::prelude::*;

    const SMALL: Geometry = Geometry { slab_bytes: 32 << 20, step_bytes: 8 << 20 };

    /// Free and used together are exactly the backed steps.
    fn check(map: &FreeMap, used: &[Extent]) {
        let free: u64 = map.by_addr.values().map(|l| u64::from(*l)).sum();
        assert_eq!(free, map.free_bytes());
        assert_eq!(map.by_addr.len(), map.by_len.len());
        assert_eq!(used.iter().map(|e| u64::from(e.len)).sum::<u64>(), map.used_bytes());
        let mut all: Vec<(u64, u32)> = map.by_addr.iter().map(|(a, l)| (*a, *l)).collect();
        all.extend(used.iter().map(|e| (e.addr, e.len)));
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0].0 + u64::from(w[0].1) <= w[1].0));
    }

    proptest! {
        #[test]
        fn space_is_exact(ops in prop::collection::vec((any::<bool>(), 1u32..300, any::<prop::sample::Index>()), 1..200)) {
            let mut map = FreeMap::rebuild(SMALL, Vec::new()).unwrap();
            let mut used: Vec<Extent> = Vec::new();
            for (take, units, at) in ops {
                if take || used.is_empty() {
                    let extent = loop {
                        match map.take(units * UNIT_BYTES) {
                            Some(e) => break e,
                            None => { let s = map.next_step(); map.add_step(s) }
                        }
                    };
                    used.push(extent);
                } else {
                    map.free(used.swap_remove(at.index(used.len())));
                }
                check(&map, &used);
            }
            let again = FreeMap::rebuild(SMALL, used.clone()).unwrap();
            check(&again, &used);
            for e in used {
                map.free(e);
            }
            while let Some(step) = map.retire_step(0) {
                prop_assert!(!map.has_step(step));
            }
            check(&map, &[]);
            prop_assert_eq!(map.free_bytes(), 0);
        }
    }

    #[test]
    fn overlapping_extents_are_refused() {
        let a = Extent { addr: 0, len: 8192 };
        let b = Extent { addr: 4096, len: 4096 };
        assert!(FreeMap::rebuild(SMALL, vec![a, b]).is_err());
        assert!(FreeMap::rebuild(SMALL, vec![a, a]).is_ok());
        assert!(FreeMap::rebuild(SMALL, vec![Extent { addr: (8 << 20) - 4096, len: 8192 }]).is_err());
    }
}
