//! The bytes of one simulated file: the present contents, and the contents after a power cut.
//!
//! Invariant: `before` holds, for each page changed since the last sync, the page as it is on the platter;
//! `lost` the same for pages whose sync failed (the kernel forgets those; a power cut reveals them).

use super::rng::SplitMix;
use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

pub(super) const PAGE_BYTES: u64 = 4096;
/// The unit that a disk writes atomically.
const SECTOR_BYTES: usize = 512;

type Page = Arc<[u8; PAGE_BYTES as usize]>;

#[derive(Clone, Default)]
pub(super) struct Pages {
    pub(super) len: u64,
    durable_len: u64,
    pages: BTreeMap<u64, Page>,
    before: BTreeMap<u64, Option<Page>>,
    lost: BTreeMap<u64, Option<Page>>,
    pub(super) space: Ranges,
}

/// The page numbers that `offset..offset + len` touches.
pub(super) fn pages_of(offset: u64, len: u64) -> (u64, u64) {
    if len == 0 { (0, 0) } else { (offset / PAGE_BYTES, (offset + len).div_ceil(PAGE_BYTES)) }
}

impl Pages {
    pub(super) fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let n = buf.len().min(usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX));
        let mut done = 0;
        while done < n {
            let (page, from, len) = segment(offset + done as u64, n - done);
            match self.pages.get(&page) {
                Some(bytes) => buf[done..done + len].copy_from_slice(&bytes[from..from + len]),
                None => buf[done..done + len].fill(0),
            }
            done += len;
        }
        n
    }

    /// The caller has reserved space.
    pub(super) fn write(&mut self, data: &[u8], offset: u64) {
        let mut done = 0;
        while done < data.len() {
            let (page, from, len) = segment(offset + done as u64, data.len() - done);
            let new = &data[done..done + len];
            if let Ok(whole) = <&[u8; PAGE_BYTES as usize]>::try_from(new) {
                self.remember(page);
                // Shared: journals consist of zeros.
                self.pages.insert(page, if is_zero(new) { zeros() } else { Arc::new(*whole) });
            } else {
                self.page_mut(page)[from..from + len].copy_from_slice(new);
            }
            done += len;
        }
        self.len = self.len.max(offset + data.len() as u64);
    }

    pub(super) fn zero(&mut self, offset: u64, end: u64) {
        let mut at = offset;
        while at < end {
            let (page, from, len) = segment(at, (end - at) as usize);
            if len == PAGE_BYTES as usize {
                self.remember(page);
                self.pages.remove(&page);
            } else if self.pages.contains_key(&page) {
                self.page_mut(page)[from..from + len].fill(0);
            }
            at += len as u64;
        }
    }

    pub(super) fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.zero(
                len,
                self.pages
                    .last_key_value()
                    .map_or(0, |(p, _)| (p + 1) * PAGE_BYTES)
                    .min(self.len.next_multiple_of(PAGE_BYTES)),
            );
            self.space.remove(len.div_ceil(PAGE_BYTES), u64::MAX);
        }
        self.len = len;
    }

    pub(super) fn sync(&mut self) {
        for page in std::mem::take(&mut self.before).into_keys() {
            self.lost.remove(&page);
        }
        self.durable_len = self.len;
    }

    /// The kernel now considers the pages clean; the platter has the old ones.
    pub(super) fn fail_sync(&mut self) {
        for (page, old) in std::mem::take(&mut self.before) {
            self.lost.entry(page).or_insert(old);
        }
    }

    pub(super) fn flip_bit(&mut self, offset: u64, bit: u8) {
        let (page, from, _) = segment(offset, 1);
        let bytes = self.pages.entry(page).or_insert_with(zeros);
        Arc::make_mut(bytes)[from] ^= 1 << (bit % 8);
    }

    /// Keeps what is on the platter: each unsynced sector old or new, as chosen by `rng`.
    pub(super) fn power_cut(&mut self, rng: &mut SplitMix) {
        let mode = rng.below(4); // half of the time torn, else all lost or all kept
        let mut unsynced = std::mem::take(&mut self.before);
        unsynced.append(&mut self.lost); // the older images win
        for (page, old) in unsynced {
            let new = self.pages.remove(&page);
            let kept = match mode {
                0 => old,
                1 => new,
                _ => Some(torn(old, new, rng)),
            };
            if let Some(kept) = kept {
                self.pages.insert(page, kept);
            }
        }
        if mode == 0 || (mode > 1 && rng.below(2) == 0) {
            self.len = self.durable_len;
        }
        self.zero(self.len, self.pages.last_key_value().map_or(0, |(p, _)| (p + 1) * PAGE_BYTES));
        self.before.clear();
        self.durable_len = self.len;
    }

    fn page_mut(&mut self, page: u64) -> &mut [u8; PAGE_BYTES as usize] {
        self.remember(page);
        Arc::make_mut(self.pages.entry(page).or_insert_with(zeros))
    }

    fn remember(&mut self, page: u64) {
        let now = self.pages.get(&page);
        self.before.entry(page).or_insert_with(|| now.cloned());
    }
}

fn zeros() -> Page {
    static ZEROS: LazyLock<Page> = LazyLock::new(|| Arc::new([0; PAGE_BYTES as usize]));
    ZEROS.clone()
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|w| *w == [0; 64]) && rest.iter().all(|b| *b == 0)
}

fn torn(old: Option<Page>, new: Option<Page>, rng: &mut SplitMix) -> Page {
    let (mut kept, new) = (old.unwrap_or_else(zeros), new.unwrap_or_else(zeros));
    let bytes = Arc::make_mut(&mut kept);
    let choice = rng.next();
    for (i, sector) in new.chunks(SECTOR_BYTES).enumerate() {
        if choice >> i & 1 == 1 {
            bytes[i * SECTOR_BYTES..(i + 1) * SECTOR_BYTES].copy_from_slice(sector);
        }
    }
    kept
}

/// The part of `offset..offset + len` within its first page: page number, offset in it, length.
fn segment(offset: u64, len: usize) -> (u64, usize, usize) {
    let from = (offset % PAGE_BYTES) as usize;
    (offset / PAGE_BYTES, from, len.min(PAGE_BYTES as usize - from))
}

/// Sets of page numbers, as disjoint ranges (start → end).
#[derive(Default, Clone, Debug)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub(super) fn count(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
    /// How many of `start..end` are in the set.
    pub(super) fn count_in(&self, start: u64, end: u64) -> u64 {
        let before = self.0.range(..start).next_back().map(|(s, e)| (*s, *e));
        let inside = self.0.range(start..end.max(start)).map(|(s, e)| (*s, *e));
        before.into_iter().chain(inside).map(|(s, e)| e.min(end).saturating_sub(s.max(start))).sum()
    }
    pub(super) fn insert(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        let touching: Vec<(u64, u64)> =
            self.0.range(..=end).rev().take_while(|(_, e)| **e >= start).map(|(s, e)| (*s, *e)).collect();
        for (s, e) in touching {
            self.0.remove(&s);
            (start, end) = (start.min(s), end.max(e));
        }
        self.0.insert(start, end);
    }
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        let touching: Vec<(u64, u64)> =
            self.0.range(..end).rev().take_while(|(_, e)| **e > start).map(|(s, e)| (*s, *e)).collect();
        for (s, e) in touching {
            self.0.remove(&s);
            for (s, e) in [(s, e.min(start)), (s.max(end), e)] {
                if s < e {
                    self.0.insert(s, e);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ranges_are_a_set() {
        let mut rng = SplitMix::new(7, "ranges");
        let (mut ranges, mut set) = (Ranges::default(), BTreeSet::new());
        for _ in 0..2000 {
            let start = rng.below(60);
            let end = start + rng.below(10);
            if rng.below(2) == 0 {
                ranges.insert(start, end);
                set.extend(start..end);
            } else {
                ranges.remove(start, end);
                set.retain(|n| !(start..end).contains(n));
            }
            assert_eq!(ranges.count(), set.len() as u64);
            assert_eq!(ranges.count_in(start, end + 7), set.range(start..end + 7).count() as u64);
        }
    }

    #[test]
    fn a_power_cut_leaves_synced_bytes_and_tears_others_by_sector() {
        let mut seen = BTreeSet::new();
        for seed in 0..40 {
            let mut file = Pages::default();
            file.write(&[1; 8192], 0);
            file.sync();
            file.write(&[2; 4096], 4096);
            file.power_cut(&mut SplitMix::new(seed, "cut"));
            let mut bytes = [9; 8192];
            assert_eq!(file.read(&mut bytes, 0), 8192);
            assert_eq!(bytes[..4096], [1; 4096]);
            for sector in bytes[4096..].chunks(512) {
                assert!(sector.iter().all(|b| *b == sector[0]) && [1, 2].contains(&sector[0]));
            }
            seen.insert(bytes[4096..].iter().filter(|b| **b == 2).count() / 512);
        }
        assert!(seen.contains(&0) && seen.contains(&8) && seen.len() > 3, "{seen:?}");
    }

    #[test]
    fn a_failed_sync_loses_its_pages_for_ever_unless_written_again() {
        let cut = |again: bool| {
            let mut file = Pages::default();
            file.write(&[1; 4096], 0);
            file.sync();
            file.write(&[2; 4096], 0);
            file.fail_sync();
            if again {
                file.write(&[2; 4096], 0);
            }
            file.sync();
            // Every seed keeps or tears unsynced data; only "all lost" is conclusive, so try until it is
            // drawn.
            let mut rng = SplitMix::new(0, "cut");
            while rng.clone().below(4) != 0 {
                rng.next();
            }
            file.power_cut(&mut rng);
            let mut byte = [0];
            file.read(&mut byte, 0);
            byte[0]
        };
        assert_eq!((cut(false), cut(true)), (1, 2));
    }
}
