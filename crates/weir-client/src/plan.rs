//! How a client sends a stripe with changed bytes: the decision alone.
//!
//! Pure. The ways are those of decision 1: fresh stripes beyond everything committed, prepared stripes over
//! committed data, overlays for the rest. Knows nothing of buffers, targets or time.
use weir_proto::meta::INLINE_MAX;

/// A tail this short goes as an overlay even at close: one fragment and its mirrors instead of k + m
/// fragments.
pub const SMALL_TAIL_BYTES: u32 = 64 << 10;

/// Why data is being sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Occasion {
    /// The stripe is full, or memory is needed, or an fsync: the file may continue to grow.
    Growing,
    /// An fdatasync: as `Growing`, and times need not be saved.
    DataOnly,
    /// Close or revoke: the writer is done with the tail for now.
    Closing,
}

/// The facts about a stripe that is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct StripeFacts {
    pub stripe_bytes: u32,
    pub cell_bytes: u32,
    /// This client is the only writer (Write lease).
    pub exclusive: bool,
    /// The whole stripe lies beyond everything that was ever committed or may still be on targets.
    pub beyond_committed: bool,
    /// A send to this stripe has happened since.
    pub touched: bool,
    pub covered_bytes: u32,
    /// End of the last dirty byte.
    pub end: u32,
    pub occasion: Occasion,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendAs {
    /// k + m fragments, the base at once; the stripe is `len` bytes long, gaps are zeros.
    Fresh { len: u32 },
    /// The whole stripe next to the present base, then commit.
    Prepared,
    /// Only the dirty bytes.
    Overlays,
    /// An empty version that replaces the base; never planned, only requested.
    Empty,
}

pub fn send_as(f: &StripeFacts) -> SendAs {
    let full = f.covered_bytes == f.stripe_bytes;
    let virgin = f.beyond_committed && !f.touched;
    // A gap is a hole: sent as zeros it costs wire and space, so only if it is the smaller part.
    let dense = f.covered_bytes >= f.end / 2;
    let small = f.end <= SMALL_TAIL_BYTES.min(f.cell_bytes);
    match (f.exclusive, full, virgin) {
        (false, _, _) => SendAs::Overlays,
        (true, true, true) => SendAs::Fresh { len: f.stripe_bytes },
        (true, true, false) => SendAs::Prepared,
        (true, false, true) if f.occasion == Occasion::Closing && dense && !small => {
            SendAs::Fresh { len: f.end }
        }
        (true, false, _) => SendAs::Overlays,
    }
}

/// Whether the whole file is kept inline: it is short, and nothing of it is or was on targets.
pub fn fits_inline(size: u64, on_targets_end: u64, exclusive: bool) -> bool {
    exclusive && size <= INLINE_MAX as u64 && on_targets_end == 0
}

/// First stripe that lies wholly at or past `size`.
pub fn first_stripe_after(size: u64, stripe_bytes: u64) -> u64 {
    size.div_ceil(stripe_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FACTS: StripeFacts = StripeFacts {
        stripe_bytes: 4 << 20,
        cell_bytes: 1 << 20,
        exclusive: true,
        beyond_committed: true,
        touched: false,
        covered_bytes: 4 << 20,
        end: 4 << 20,
        occasion: Occasion::Growing,
    };

    #[test]
    fn the_table_of_regimes() {
        let partial = StripeFacts { covered_bytes: 3 << 20, end: 3 << 20, ..FACTS };
        let closing = StripeFacts { occasion: Occasion::Closing, ..partial };
        let table = [
            (FACTS, SendAs::Fresh { len: 4 << 20 }),
            (StripeFacts { touched: true, ..FACTS }, SendAs::Prepared),
            (StripeFacts { beyond_committed: false, ..FACTS }, SendAs::Prepared),
            (StripeFacts { exclusive: false, ..FACTS }, SendAs::Overlays),
            (partial, SendAs::Overlays),
            (closing, SendAs::Fresh { len: 3 << 20 }),
            (StripeFacts { touched: true, ..closing }, SendAs::Overlays),
            (StripeFacts { beyond_committed: false, ..closing }, SendAs::Overlays),
            (StripeFacts { covered_bytes: 6000, end: 6000, ..closing }, SendAs::Overlays),
            // Mostly a hole.
            (StripeFacts { covered_bytes: 1 << 20, ..closing }, SendAs::Overlays),
            (StripeFacts { covered_bytes: 2 << 20, ..closing }, SendAs::Fresh { len: 3 << 20 }),
        ];
        for (facts, expected) in table {
            assert_eq!(send_as(&facts), expected, "{facts:?}");
        }
    }

    proptest! {
        /// Overwriting committed data never goes as a fresh stripe, and only an exclusive writer sends whole
        /// stripes.
        #[test]
        fn fresh_only_where_nothing_is(
            exclusive: bool, beyond_committed: bool, touched: bool, closing: bool,
            covered in 1u32..=64, gap in 0u32..64,
        ) {
            let end = (covered + gap).min(64) << 16;
            let facts = StripeFacts {
                exclusive, beyond_committed, touched, covered_bytes: covered << 16, end,
                occasion: if closing { Occasion::Closing } else { Occasion::Growing }, ..FACTS
            };
            match send_as(&facts) {
                SendAs::Fresh { len } => prop_assert!(exclusive && beyond_committed && !touched && len == end),
                SendAs::Prepared => prop_assert!(exclusive && covered == 64),
                SendAs::Overlays => {}
                SendAs::Empty => prop_assert!(false, "it is never planned"),
            }
        }
    }
}
