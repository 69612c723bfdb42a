//! Layout arithmetic: which stripe, cell and placement group holds which byte of a file.
//!
//! A stripe is k cells one after the other; cell i of stripe s holds the file's bytes from
//! `s * stripe_bytes + i * cell_bytes`. Pure; knows no target and no state. A [`Layout`] that came off the
//! wire has been checked by its decoder, one that is made by hand is checked with [`Layout::check`]; on both
//! no method here overflows for any file offset.
use crate::map::{Layout, Scheme};
use crate::{Error, InodeId, PgId, Result};

/// log2 of the smallest and the largest cell, in bytes.
pub const CELL_SHIFT_MIN: u8 = 16;
pub const CELL_SHIFT_MAX: u8 = 22;

/// A part of a byte range that lies in one data cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    pub stripe: u64,
    /// Index of the data cell in its stripe.
    pub cell: u8,
    /// Offset in the cell, in bytes.
    pub offset: u32,
    pub len: u32,
    /// Offset in the requested range, in bytes.
    pub range_offset: u64,
}

impl Layout {
    /// The seed of a file's layout.
    pub fn seed_of(ino: InodeId) -> u32 {
        // Fibonacci hashing: neighbours in one directory start on groups far apart.
        (ino.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
    }
    /// Refuses invalid layouts; everything else in this file relies on it.
    pub fn check(&self) -> Result<()> {
        self.scheme.check()?;
        if !(CELL_SHIFT_MIN..=CELL_SHIFT_MAX).contains(&self.cell_shift) {
            return Err(Error::invalid(format!(
                "cell size 2^{}: expected 2^{CELL_SHIFT_MIN} to 2^{CELL_SHIFT_MAX} bytes",
                self.cell_shift
            )));
        }
        if self.pg_count == 0 || self.first_pg.0.checked_add(self.pg_count - 1).is_none() {
            return Err(Error::invalid(format!("no {} groups from {}", self.pg_count, self.first_pg)));
        }
        Ok(())
    }
    pub fn cell_bytes(&self) -> u32 {
        1 << self.cell_shift
    }
    /// Payload of a whole stripe, in bytes.
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.scheme.data) << self.cell_shift
    }
    pub fn stripe_of(&self, offset: u64) -> u64 {
        offset / self.stripe_bytes()
    }
    /// First byte of a stripe in the file.
    pub fn stripe_start(&self, stripe: u64) -> u64 {
        stripe.saturating_mul(self.stripe_bytes())
    }
    /// Number of stripes in a file of `size` bytes.
    pub fn stripe_count(&self, size: u64) -> u64 {
        size.div_ceil(self.stripe_bytes())
    }
    /// The number of bytes of a stripe in a file of `size` bytes.
    pub fn stripe_len(&self, stripe: u64, size: u64) -> u64 {
        size.saturating_sub(self.stripe_start(stripe)).min(self.stripe_bytes())
    }
    pub fn pg_of_stripe(&self, stripe: u64) -> PgId {
        // The sum wraps in 64 bits only for stripes beyond any file.
        let turn = u64::from(self.seed).wrapping_add(stripe) % u64::from(self.pg_count);
        PgId(self.first_pg.0 + turn as u32)
    }
    /// The parts of `offset..offset + len`, in order, one per data cell touched.
    pub fn segments(&self, offset: u64, len: u64) -> impl Iterator<Item = Segment> + use<> {
        let (layout, end) = (*self, offset.saturating_add(len));
        let mut at = offset;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let segment = layout.segment_at(at, offset, end);
                at += u64::from(segment.len);
                segment
            })
        })
    }
    /// Length of fragment `index` (data or parity) of a stripe that has `stripe_len` bytes of the file.
    pub fn fragment_bytes(&self, stripe_len: u64, index: u8) -> u32 {
        let cell = u64::from(self.cell_bytes());
        // Parity is as long as the longest cell, which is the first.
        let place = if index < self.scheme.data { u64::from(index) } else { 0 };
        stripe_len.saturating_sub(place * cell).min(cell) as u32
    }

    fn segment_at(&self, at: u64, start: u64, end: u64) -> Segment {
        let in_stripe = at % self.stripe_bytes();
        let in_cell = in_stripe & u64::from(self.cell_bytes() - 1);
        Segment {
            stripe: self.stripe_of(at),
            cell: (in_stripe >> self.cell_shift) as u8,
            offset: in_cell as u32,
            len: (u64::from(self.cell_bytes()) - in_cell).min(end - at) as u32,
            range_offset: at - start,
        }
    }
}

impl Scheme {
    pub fn check(self) -> Result<()> {
        match (self.data, self.parity) {
            (1..=Scheme::DATA_MAX, 0..=Scheme::PARITY_MAX) => Ok(()),
            (k, m) => Err(Error::invalid(format!(
                "scheme of {k} data and {m} parity cells: expected 1 to {} and 0 to {}",
                Scheme::DATA_MAX,
                Scheme::PARITY_MAX
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        (
            1..=Scheme::DATA_MAX,
            0..=Scheme::PARITY_MAX,
            CELL_SHIFT_MIN..=CELL_SHIFT_MAX,
            0..1000u32,
            1..500u32,
            any::<u32>(),
        )
            .prop_map(|(data, parity, cell_shift, first, pg_count, seed)| Layout {
                scheme: Scheme { data, parity },
                cell_shift,
                first_pg: PgId(first),
                pg_count,
                seed,
            })
    }

    proptest! {
        #[test]
        fn segments_cover_a_range_once_and_in_order(
            layout in layouts(), offset in 0..1u64 << 62, len in 0..64u64 << 20,
        ) {
            let mut covered = 0;
            for segment in layout.segments(offset, len) {
                prop_assert_eq!(segment.range_offset, covered);
                prop_assert!(segment.len > 0 && segment.offset + segment.len <= layout.cell_bytes());
                prop_assert!(segment.cell < layout.scheme.data);
                let at = layout.stripe_start(segment.stripe)
                    + u64::from(segment.cell) * u64::from(layout.cell_bytes())
                    + u64::from(segment.offset);
                prop_assert_eq!(at, offset + covered);
                covered += u64::from(segment.len);
            }
            prop_assert_eq!(covered, len);
        }

        #[test]
        fn short_stripe_fragments_add_up_and_parity_is_the_longest(
            layout in layouts(), share in 0..=1000u64,
        ) {
            let stripe_len = layout.stripe_bytes() * share / 1000;
            let k = layout.scheme.data;
            let data: Vec<u64> = (0..k).map(|i| layout.fragment_bytes(stripe_len, i).into()).collect();
            prop_assert_eq!(data.iter().sum::<u64>(), stripe_len);
            for i in k..k + layout.scheme.parity {
                prop_assert_eq!(u64::from(layout.fragment_bytes(stripe_len, i)), *data.iter().max().unwrap());
            }
        }

        #[test]
        fn groups_are_taken_in_turn(layout in layouts(), stripe in 0..u64::MAX) {
            let pg = layout.pg_of_stripe(stripe).0;
            prop_assert!((layout.first_pg.0..layout.first_pg.0 + layout.pg_count).contains(&pg));
            if stripe < 1 << 60 {
                let next = layout.pg_of_stripe(stripe + 1).0;
                prop_assert_eq!(next, layout.first_pg.0 + (pg - layout.first_pg.0 + 1) % layout.pg_count);
            }
        }

        #[test]
        fn stripe_lengths_of_a_file_add_up_to_its_size(layout in layouts(), size in 0..1u64 << 30) {
            let sum: u64 = (0..layout.stripe_count(size)).map(|s| layout.stripe_len(s, size)).sum();
            prop_assert_eq!(sum, size);
            prop_assert_eq!(layout.stripe_len(layout.stripe_count(size), size), 0);
        }
    }

    #[test]
    fn an_impossible_layout_is_refused() {
        let good = Layout {
            scheme: Scheme { data: 4, parity: 2 },
            cell_shift: 19,
            first_pg: PgId(0),
            pg_count: 8,
            seed: 3,
        };
        assert!(good.check().is_ok());
        for bad in [
            Layout { cell_shift: 15, ..good },
            Layout { cell_shift: 64, ..good },
            Layout { pg_count: 0, ..good },
            Layout { first_pg: PgId(u32::MAX), pg_count: 2, ..good },
            Layout { scheme: Scheme { data: 0, parity: 2 }, ..good },
            Layout { scheme: Scheme { data: 4, parity: 9 }, ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
