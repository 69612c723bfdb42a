//! Ranges of a file that were written since the last report to the leader: the next commit names them.
//!
//! Few and coarse on purpose: beyond a bound the two ranges with the smallest gap between them are merged.
//! May name more than was written, never less. Pure.
use weir_proto::meta::{CHANGED_MAX, Range};

/// Disjoint ranges in order: (start, end).
#[derive(Default, Debug, Clone, PartialEq, Eq)]
pub struct Changed(Vec<(u64, u64)>);

impl Changed {
    pub fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let first = self.0.partition_point(|(_, e)| *e < start);
        let last = self.0.partition_point(|(s, _)| *s <= end);
        let joined = self.0[first..last].iter().fold((start, end), |(a, b), (s, e)| (a.min(*s), b.max(*e)));
        self.0.splice(first..last, [joined]);
        if self.0.len() > CHANGED_MAX {
            self.join_nearest();
        }
    }

    fn join_nearest(&mut self) {
        let gap = |i: &usize| self.0[i + 1].0 - self.0[*i].1;
        let Some(i) = (0..self.0.len() - 1).min_by_key(gap) else { return };
        self.0[i].1 = self.0[i + 1].1;
        self.0.remove(i + 1);
    }

    /// Takes the parts below `size`.
    pub fn take_below(&mut self, size: u64) -> Vec<Range> {
        let mut taken = Vec::new();
        self.0.retain_mut(|(start, end)| {
            if *start < size {
                taken.push(Range { offset: *start, len: (*end).min(size) - *start });
            }
            *start = (*start).max(size);
            *start < *end
        });
        taken
    }

    /// The commit that named them was not answered.
    pub fn put_back(&mut self, ranges: &[Range]) {
        ranges.iter().for_each(|r| self.add(r.offset, r.offset + r.len));
    }

    pub fn first(&self) -> Option<u64> {
        self.0.first().map(|(start, _)| *start)
    }
    /// The number of bytes below `size`.
    pub fn bytes_below(&self, size: u64) -> u64 {
        self.0.iter().map(|(start, end)| (*end).min(size).saturating_sub(*start)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// No written byte is ever missing, and the list stays short.
        #[test]
        fn the_list_names_every_written_byte(
            writes in proptest::collection::vec((0u64..10_000, 1u64..50), 1..300), size in 0u64..10_000,
        ) {
            let mut changed = Changed::default();
            writes.iter().for_each(|(at, len)| changed.add(*at, at + len));
            prop_assert!(changed.0.len() <= CHANGED_MAX);
            prop_assert!(changed.0.windows(2).all(|w| w[0].1 < w[1].0));
            let whole = changed.clone();
            let bytes_below = changed.bytes_below(size);
            let below = changed.take_below(size);
            prop_assert_eq!(bytes_below, below.iter().map(|r| r.len).sum::<u64>());
            let named = |ranges: &[(u64, u64)], at: u64| ranges.iter().any(|(s, e)| *s <= at && at < *e);
            let below: Vec<(u64, u64)> = below.iter().map(|r| (r.offset, r.offset + r.len)).collect();
            for (at, len) in writes {
                for byte in [at, at + len - 1] {
                    prop_assert!(named(&whole.0, byte));
                    prop_assert_eq!(named(&below, byte), byte < size);
                    prop_assert_eq!(named(&changed.0, byte), byte >= size);
                }
            }
        }
    }
}
