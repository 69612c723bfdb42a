//! How a client sends a stripe with changed bytes: the decision alone.
//!
//! Pure. The ways are those of decision 1: fresh stripes beyond everything committed, prepared stripes over
//! committed data, overlays for the rest; and decision 41: a stripe of which much or many extents changed is
//! read, merged and replaced. Knows nothing of buffers, targets or time.
use crate::data::CellRange;
use bytes::Bytes;
use weir_proto::data::CHECKSUM_BLOCK;
use weir_proto::map::Scheme;
use weir_proto::meta::INLINE_MAX;

/// A tail this short goes as an overlay even at close: one fragment and its mirrors instead of k + m
/// fragments.
pub const SMALL_TAIL_BYTES: u32 = 64 << 10;

// The cost of a send for the machines that take part, processor and disk, in nanoseconds. Measured with all
// of them on one machine (decision 41); only the ratios matter here.
/// A message and its answer.
const MESSAGE_NS: u64 = 60_000;
/// An extent in the log of one target: its index entries, and its share of a journal record.
const EXTENT_NS: u64 = 12_000;
/// A byte of a fragment: encoded, sent and written once.
const FRAGMENT_BYTE_NS: u64 = 2;
/// A byte of an overlay at one keeper of the log: sent, and written once,
const OVERLAY_BYTE_NS: u64 = 3;
/// or, in a short extent, to the journal and again to a slab.
const JOURNALED_BYTE_NS: u64 = 5;
const JOURNALED_EXTENT_MAX: u32 = 16 << 10;
/// A byte that is read for a merge.
const READ_BYTE_NS: u64 = 1;

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
    pub scheme: Scheme,
    /// This client is the only writer (Write lease).
    pub exclusive: bool,
    /// The whole stripe lies beyond everything that was ever committed or may still be on targets.
    pub beyond_committed: bool,
    /// A send to this stripe has happened since.
    pub touched: bool,
    pub covered_bytes: u32,
    /// Contiguous dirty ranges.
    pub extents: u32,
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
    /// The whole stripe, likewise; bytes that the dirty ones do not cover are read first.
    Merged,
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
        (true, false, true) if is_scattered(f) && fresh_ns(f) < overlays_ns(f) => {
            SendAs::Fresh { len: f.end }
        }
        (true, false, false) if merge_ns(f) < overlays_ns(f) => SendAs::Merged,
        (true, false, _) => SendAs::Overlays,
    }
}

/// More than a sequential writer leaves: a tail that may still grow goes as an overlay.
fn is_scattered(f: &StripeFacts) -> bool {
    f.extents > u32::from(f.scheme.data)
}

/// The extents, at each keeper of the log, and half of the seal that follows: more overlays may share it.
fn overlays_ns(f: &StripeFacts) -> u64 {
    let (k, keepers) = (u64::from(f.scheme.data), 1 + u64::from(f.scheme.parity));
    let cells = k.min(f.extents.into());
    let byte_ns = match f.covered_bytes / f.extents.max(1) <= JOURNALED_EXTENT_MAX {
        true => JOURNALED_BYTE_NS,
        false => OVERLAY_BYTE_NS,
    };
    let logged = u64::from(f.extents) * EXTENT_NS + u64::from(f.covered_bytes) * byte_ns;
    let seal = fragments_ns(f, f.stripe_bytes) + u64::from(f.stripe_bytes) * READ_BYTE_NS;
    keepers * (cells * MESSAGE_NS + logged) + seal / 2
}

fn fresh_ns(f: &StripeFacts) -> u64 {
    width(f) * MESSAGE_NS + fragments_ns(f, f.end)
}

/// The state of each cell and its missing bytes are read; then the fragments are prepared, and committed.
fn merge_ns(f: &StripeFacts) -> u64 {
    let missing = u64::from(f.stripe_bytes - f.covered_bytes);
    let messages = 2 * u64::from(f.scheme.data) + 2 * width(f);
    messages * MESSAGE_NS + missing * READ_BYTE_NS + fragments_ns(f, f.stripe_bytes)
}

fn width(f: &StripeFacts) -> u64 {
    u64::from(f.scheme.data) + u64::from(f.scheme.parity)
}

/// The bytes of all fragments of a stripe of this length.
fn fragments_ns(f: &StripeFacts, len: u32) -> u64 {
    u64::from(len) * width(f) / u64::from(f.scheme.data.max(1)) * FRAGMENT_BYTE_NS
}

/// The parts of the data cells that the changed bytes do not cover, for a merge: at most one of each cell,
/// from the first gap to the last. `parts`: the changed bytes in order, none across a cell's border.
pub fn ranges_to_read(parts: &[(u32, Bytes)], cell_bytes: u32, data: u8) -> Vec<CellRange> {
    let mut ranges = Vec::new();
    for index in 0..usize::from(data) {
        let start = index as u32 * cell_bytes;
        let covered = parts.iter().map(|(at, bytes)| (*at, at + bytes.len() as u32));
        let within = covered.filter(|(at, _)| (start..start + cell_bytes).contains(at));
        // Gaps: from the end of one extent (or the cell's start) to the next extent (or the cell's end).
        let (mut at, mut gaps) = (0, None);
        for (from, to) in within.map(|(a, b)| (a - start, b - start)).chain([(cell_bytes, cell_bytes)]) {
            if from > at {
                gaps = Some((gaps.map_or(at, |(first, _)| first), from));
            }
            at = to;
        }
        if let Some((from, to)) = gaps {
            let from = from / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
            let to = to.next_multiple_of(CHECKSUM_BLOCK).min(cell_bytes);
            ranges.push(CellRange { index, start: from, len: to - from });
        }
    }
    ranges
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
        scheme: Scheme { data: 4, parity: 2 },
        exclusive: true,
        beyond_committed: true,
        touched: false,
        covered_bytes: 4 << 20,
        extents: 1,
        end: 4 << 20,
        occasion: Occasion::Growing,
    };

    #[test]
    fn the_table_of_regimes() {
        let partial = StripeFacts { covered_bytes: 3 << 20, end: 3 << 20, ..FACTS };
        let closing = StripeFacts { occasion: Occasion::Closing, ..partial };
        let tail = StripeFacts { covered_bytes: 256 << 10, end: 3 << 20, ..FACTS };
        let table = [
            (FACTS, SendAs::Fresh { len: 4 << 20 }),
            (StripeFacts { touched: true, ..FACTS }, SendAs::Prepared),
            (StripeFacts { beyond_committed: false, ..FACTS }, SendAs::Prepared),
            (StripeFacts { exclusive: false, ..FACTS }, SendAs::Overlays),
            // It may still grow.
            (partial, SendAs::Overlays),
            (closing, SendAs::Fresh { len: 3 << 20 }),
            // Most of it is replaced, a little is written beside it.
            (StripeFacts { touched: true, ..closing }, SendAs::Merged),
            (StripeFacts { beyond_committed: false, ..closing }, SendAs::Merged),
            (StripeFacts { exclusive: false, beyond_committed: false, ..closing }, SendAs::Overlays),
            (StripeFacts { touched: true, ..tail }, SendAs::Overlays),
            (StripeFacts { beyond_committed: false, ..tail }, SendAs::Overlays),
            (StripeFacts { covered_bytes: 6000, end: 6000, ..closing }, SendAs::Overlays),
            // Mostly a hole.
            (StripeFacts { covered_bytes: 1 << 20, ..closing }, SendAs::Overlays),
            (StripeFacts { covered_bytes: 2 << 20, ..closing }, SendAs::Fresh { len: 3 << 20 }),
        ];
        for (facts, expected) in table {
            assert_eq!(send_as(&facts), expected, "{facts:?}");
        }
    }

    /// The number of extents of this size from which on a stripe that has data is replaced.
    fn replaced_from(cell_bytes: u32, scheme: Scheme, extent_bytes: u32) -> Option<u32> {
        let stripe_bytes = cell_bytes * u32::from(scheme.data);
        (1..stripe_bytes / extent_bytes).find(|extents| {
            let (covered_bytes, end) = (extents * extent_bytes, stripe_bytes);
            let facts = StripeFacts { stripe_bytes, cell_bytes, scheme, covered_bytes, end, ..FACTS };
            send_as(&StripeFacts { extents: *extents, touched: true, ..facts }) == SendAs::Merged
        })
    }

    #[test]
    fn dozens_of_extents_or_a_quarter_of_the_bytes_replace_a_stripe() {
        let scheme = |data, parity| Scheme { data, parity };
        for (cell_kib, scheme, extent_bytes, expected) in [
            (512, scheme(4, 2), 512, 106),
            (512, scheme(4, 2), 4 << 10, 47),
            (512, scheme(4, 2), 512 << 10, 1),
            (512, scheme(8, 2), 512, 183),
            (64, scheme(4, 2), 512, 23),
            (512, scheme(1, 2), 512, 49),
            (512, scheme(1, 0), 512, 65),
        ] {
            let extents = replaced_from(cell_kib << 10, scheme, extent_bytes);
            assert_eq!(extents, Some(expected), "{cell_kib} KiB, {scheme}, {extent_bytes}");
        }
    }

    #[test]
    fn a_merge_reads_each_cell_from_its_first_gap_to_its_last() {
        const KIB: u32 = 1 << 10;
        let cell_bytes = 64 * KIB;
        let part = |at: u32, len: u32| (at, Bytes::from(vec![1; len as usize]));
        let parts = [
            part(0, 64 * KIB),                    // all of cell 0
            part(64 * KIB, 40 * KIB),             // the beginning of cell 1
            part(128 * KIB + 20 * KIB, 44 * KIB), // the end of cell 2
            part(192 * KIB, 17 * KIB),            // cell 3 but for its middle
            part(192 * KIB + 18 * KIB, 46 * KIB),
        ];
        let range = |index, start: u32, len: u32| CellRange { index, start: start * KIB, len: len * KIB };
        let expected = [range(1, 32, 32), range(2, 0, 32), range(3, 16, 16), range(4, 0, 64)];
        assert_eq!(ranges_to_read(&parts, cell_bytes, 5), expected);
        assert_eq!(ranges_to_read(&parts[..1], cell_bytes, 1), []);
    }

    #[test]
    fn many_extents_where_nothing_was_need_no_read() {
        let scattered = StripeFacts { covered_bytes: 1 << 20, extents: 2048, end: 3 << 20, ..FACTS };
        assert_eq!(send_as(&scattered), SendAs::Fresh { len: 3 << 20 });
        let few = StripeFacts { covered_bytes: 4096, extents: 8, ..scattered };
        assert_eq!(send_as(&few), SendAs::Overlays, "the rest stays a hole");
    }

    proptest! {
        /// Overwriting committed data never goes as a fresh stripe, and only an exclusive writer sends whole
        /// stripes.
        #[test]
        fn fresh_only_where_nothing_is(
            exclusive: bool, beyond_committed: bool, touched: bool, closing: bool,
            covered in 1u32..=64, gap in 0u32..64, extents in 1u32..5000,
        ) {
            let end = (covered + gap).min(64) << 16;
            let facts = StripeFacts {
                exclusive, beyond_committed, touched, covered_bytes: covered << 16, end, extents,
                occasion: if closing { Occasion::Closing } else { Occasion::Growing }, ..FACTS
            };
            match send_as(&facts) {
                SendAs::Fresh { len } => prop_assert!(exclusive && beyond_committed && !touched && len == end),
                SendAs::Prepared => prop_assert!(exclusive && covered == 64),
                SendAs::Merged => prop_assert!(exclusive && covered < 64 && (touched || !beyond_committed)),
                SendAs::Overlays => {}
                SendAs::Empty => prop_assert!(false, "it is never planned"),
            }
        }
    }
}
