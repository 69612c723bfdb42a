//! The index of a target: keys and values, laid out by hand. Drawn in `docs/format.md`, "Target store".
//!
//! Keys are big-endian so that scans run in order of file, stripe, index. Values are little-endian and open
//! with a CRC32C over the rest and a layout version; they open only by verifying. Nothing else in the crate
//! builds a key.
use crate::alloc::Extent;
use weir_proto::checksum::crc32c;
use weir_proto::data::{OverlayKind, ScrubPass};
use weir_proto::map::{Run, Scheme};
use weir_proto::{
    CellId, Epoch, Error, FileId, InodeId, NamespaceId, PgId, Reader, Result, RunId, Seq, Version, Wire,
    Writer,
};

/// Layout version of values; a value with an unknown layout is refused.
const LAYOUT: u8 = 1;

// ---- keys: one letter, then big-endian fields
pub const HEADER: u8 = b'c';
pub const BASE: u8 = b'b';
pub const PREPARED: u8 = b'p';
pub const OVERLAY: u8 = b'o';
pub const OVERLAY_DATA: u8 = b'd';
pub const FENCE: u8 = b'f';
pub const GROUP: u8 = b'g';
pub const LISTED: u8 = b'l';
pub const CLOSED: u8 = b'q';
pub const TRUNCATION: u8 = b'x';
pub const TRUNCATED_FILE: u8 = b'y';
/// Bytes of a cell in a key: namespace 4, inode 8, stripe 8, index 1.
const CELL_KEY_BYTES: usize = 21;

pub const META: &[u8] = b"mtarget";
pub const RUNS: &[u8] = b"mruns";
pub const SCRUB: &[u8] = b"mscrub";
pub const DAMAGED_COUNT: &[u8] = b"ndamaged";
pub const REPAIRED_COUNT: &[u8] = b"nrepaired";
pub const TRUNCATION_COUNT: &[u8] = b"ntruncations";

fn push_file(key: &mut Vec<u8>, file: FileId) {
    key.extend_from_slice(&file.namespace.0.to_be_bytes());
    key.extend_from_slice(&file.inode.0.to_be_bytes());
}
fn push_cell(key: &mut Vec<u8>, cell: CellId) {
    push_file(key, cell.file);
    key.extend_from_slice(&cell.stripe.to_be_bytes());
    key.push(cell.index);
}
fn cell_from(bytes: &[u8]) -> Option<CellId> {
    let bytes: &[u8; CELL_KEY_BYTES] = bytes.try_into().ok()?;
    Some(CellId {
        file: FileId {
            namespace: NamespaceId(u32::from_be_bytes(bytes[0..4].try_into().ok()?)),
            inode: InodeId(u64::from_be_bytes(bytes[4..12].try_into().ok()?)),
        },
        stripe: u64::from_be_bytes(bytes[12..20].try_into().ok()?),
        index: bytes[20],
    })
}

pub fn header_key(cell: CellId) -> Vec<u8> {
    cell_key(HEADER, cell)
}
pub fn base_key(cell: CellId) -> Vec<u8> {
    cell_key(BASE, cell)
}
/// A key that is a letter and a cell.
pub fn cell_key(letter: u8, cell: CellId) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + CELL_KEY_BYTES + 8);
    key.push(letter);
    push_cell(&mut key, cell);
    key
}
pub fn prepared_key(cell: CellId, version: Version) -> Vec<u8> {
    numbered(PREPARED, cell, version.0)
}
pub fn overlay_key(cell: CellId, seq: Seq) -> Vec<u8> {
    numbered(OVERLAY, cell, seq.0)
}
pub fn overlay_data_key(cell: CellId, seq: Seq) -> Vec<u8> {
    numbered(OVERLAY_DATA, cell, seq.0)
}
fn numbered(letter: u8, cell: CellId, number: u64) -> Vec<u8> {
    let mut key = cell_key(letter, cell);
    key.extend_from_slice(&number.to_be_bytes());
    key
}
/// Half-open range of the numbered keys of `cell` with numbers in `from..=to`.
pub fn numbered_range(letter: u8, cell: CellId, from: u64, to: u64) -> (Vec<u8>, Vec<u8>) {
    let mut end = numbered(letter, cell, to);
    end.push(0); // the least key above
    (numbered(letter, cell, from), end)
}
/// Half-open range of all keys of a letter for the file's cells with stripes in `from_stripe..to_stripe`
/// (`u64::MAX`: all from there on).
pub fn stripes_range(letter: u8, file: FileId, from_stripe: u64, to_stripe: u64) -> (Vec<u8>, Vec<u8>) {
    let (start, end) = file_range(letter, file, from_stripe);
    match to_stripe {
        u64::MAX => (start, end),
        stripe => (start, cell_key(letter, CellId { file, stripe, index: 0 })),
    }
}
/// Half-open range of all keys of a letter for the file's cells with stripe ≥ `from_stripe`.
pub fn file_range(letter: u8, file: FileId, from_stripe: u64) -> (Vec<u8>, Vec<u8>) {
    let start = cell_key(letter, CellId { file, stripe: from_stripe, index: 0 });
    let mut end = vec![letter];
    push_file(&mut end, file);
    end.extend_from_slice(&[0xff; 18]); // above every stripe, index and number
    (start, end)
}
pub fn letter_range(letter: u8) -> (Vec<u8>, Vec<u8>) {
    (vec![letter], vec![letter + 1])
}
pub fn fence_key(file: FileId) -> Vec<u8> {
    let mut key = vec![FENCE];
    push_file(&mut key, file);
    key
}
/// A truncation of a file, by its number.
pub fn truncation_key(file: FileId, number: u64) -> Vec<u8> {
    let mut key = vec![TRUNCATION];
    push_file(&mut key, file);
    key.extend_from_slice(&number.to_be_bytes());
    key
}
/// Half-open range of all truncations of a file.
pub fn truncation_range(file: FileId) -> (Vec<u8>, Vec<u8>) {
    let mut end = truncation_key(file, u64::MAX);
    end.push(0);
    (truncation_key(file, 0), end)
}
/// The file of a truncation, by its number.
pub fn truncated_file_key(number: u64) -> Vec<u8> {
    let mut key = vec![TRUNCATED_FILE];
    key.extend_from_slice(&number.to_be_bytes());
    key
}
/// Half-open range of the truncations with numbers in `from..=to`.
pub fn truncated_file_range(from: u64, to: u64) -> (Vec<u8>, Vec<u8>) {
    let mut end = truncated_file_key(to);
    end.push(0);
    (truncated_file_key(from), end)
}
/// The number at the end of a key of truncations.
pub fn truncation_number_of_key(key: &[u8]) -> Result<u64> {
    key.last_chunk()
        .map(|bytes| u64::from_be_bytes(*bytes))
        .ok_or_else(|| Error::damaged(format!("index key {key:02x?} carries no number")))
}
pub fn group_key(group: PgId) -> Vec<u8> {
    let mut key = vec![GROUP];
    key.extend_from_slice(&group.0.to_be_bytes());
    key
}
/// Present: in that epoch the target takes no change of the group's cells.
pub fn closed_key(group: PgId) -> Vec<u8> {
    let mut key = vec![CLOSED];
    key.extend_from_slice(&group.0.to_be_bytes());
    key
}
pub fn listed_key(group: PgId, cell: CellId) -> Vec<u8> {
    let mut key = vec![LISTED];
    key.extend_from_slice(&group.0.to_be_bytes());
    push_cell(&mut key, cell);
    key
}
/// The cells listed under a group, after `after`.
pub fn listed_range(group: PgId, after: Option<CellId>) -> (Vec<u8>, Vec<u8>) {
    let mut start = vec![LISTED];
    start.extend_from_slice(&group.0.to_be_bytes());
    let mut end = start.clone();
    end.extend_from_slice(&[0xff; CELL_KEY_BYTES + 1]);
    if let Some(cell) = after {
        start = listed_key(group, cell);
        start.push(0);
    }
    (start, end)
}
/// The cell of a key with one letter, or with letter and group (`LISTED`), or with a number behind.
pub fn cell_of_key(key: &[u8]) -> Result<CellId> {
    let at = if key.first() == Some(&LISTED) { 5 } else { 1 };
    key.get(at..at + CELL_KEY_BYTES)
        .and_then(cell_from)
        .ok_or_else(|| Error::damaged(format!("index key {key:02x?} names no cell")))
}
/// The number at the end of a numbered key (version or sequence).
pub fn number_of_key(key: &[u8]) -> Result<u64> {
    key.get(1 + CELL_KEY_BYTES..)
        .and_then(|tail| tail.try_into().ok())
        .map(u64::from_be_bytes)
        .ok_or_else(|| Error::damaged(format!("index key {key:02x?} carries no number")))
}
pub fn file_of_fence_key(key: &[u8]) -> Result<FileId> {
    let mut padded = key.get(1..).unwrap_or_default().to_vec();
    padded.resize(CELL_KEY_BYTES, 0);
    cell_from(&padded)
        .filter(|_| key.len() == 13)
        .map(|c| c.file)
        .ok_or_else(|| Error::damaged(format!("index key {key:02x?} names no file")))
}

// ---- values
/// A value of the index: crc32c of what follows (4), layout (1), fields.
pub trait Record: Sized {
    fn fields(&self, w: &mut Writer);
    fn parse(r: &mut Reader<'_>) -> Result<Self>;
    fn name() -> &'static str;

    fn to_value(&self) -> Vec<u8> {
        let mut w = Writer { bytes: Vec::with_capacity(96) };
        w.bytes.extend_from_slice(&[0, 0, 0, 0, LAYOUT]);
        self.fields(&mut w);
        let crc = crc32c(&w.bytes[4..]);
        w.bytes[..4].copy_from_slice(&crc.to_le_bytes());
        w.bytes
    }
    fn from_value(value: &[u8]) -> Result<Self> {
        let bad = |why: &str| Error::damaged(format!("index value ({}): {why}", Self::name()));
        let (head, rest) = value.split_at_checked(4).ok_or_else(|| bad("shorter than its checksum"))?;
        if crc32c(rest) != u32::from_le_bytes(head.try_into().expect("four bytes")) {
            return Err(bad("checksum does not match"));
        }
        let mut r = Reader::new(rest);
        let layout = u8::decode(&mut r)?;
        if layout != LAYOUT {
            return Err(bad(&format!("layout {layout} is not known to this version of weir")));
        }
        let record = Self::parse(&mut r).map_err(|e| bad(&e.to_string()))?;
        r.finish().map_err(|e| bad(&e.to_string()))?;
        Ok(record)
    }
}

macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident : $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),* }
        impl Record for $name {
            fn fields(&self, w: &mut Writer) { $(self.$field.encode(w);)* }
            fn parse(r: &mut Reader<'_>) -> Result<Self> { Ok($name { $($field: <$ty>::decode(r)?),* }) }
            fn name() -> &'static str { stringify!($name) }
        }
    };
}

impl Wire for Extent {
    fn encode(&self, w: &mut Writer) {
        self.addr.encode(w);
        self.len.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Ok(Extent { addr: u64::decode(r)?, len: u32::decode(r)? })
    }
}

record!(
    /// Target-wide facts, written when the store is made.
    Meta { slab_bytes: u64, step_bytes: u64 }
);
record!(
    /// The last run of the target's process that is known to be admitted, and the runs that began since.
    #[derive(Default)]
    Runs { confirmed: Run, begun: Vec<RunId> }
);
record!(
    /// Progress of the scrub: how much of the target's data is verified.
    #[derive(Default)]
    Scrub {
        pass: Option<ScrubPass>,
        /// The last cell that the present pass has read.
        after: Option<CellId>,
        /// At most this much; 0: half of the time.
        bytes_per_s: u64,
        /// The last pass that completed.
        last: Option<ScrubPass>,
    }
);
record!(
    /// Facts about a cell apart from its bytes. A parity target keeps a header for each data cell that it
    /// mirrors, too.
    Header {
        group: PgId,
        scheme: Scheme,
        /// Epoch of the last write.
        epoch: Epoch,
        /// Fragments of the stripe that their members lack.
        missing: u64,
        /// Highest contiguous overlay sequence.
        last_seq: Seq,
        /// Overlays up to here are in the base.
        folded_seq: Seq,
        overlay_count: u64,
        overlay_bytes: u64,
        /// Sum of [`Overlay::sum`] over the log.
        log_sum: u64,
    }
);
impl Header {
    pub fn new(group: PgId, scheme: Scheme, epoch: Epoch) -> Header {
        Header {
            group,
            scheme,
            epoch,
            missing: 0,
            last_seq: Seq(0),
            folded_seq: Seq(0),
            overlay_count: 0,
            overlay_bytes: 0,
            log_sum: 0,
        }
    }
}
record!(
    /// A base or prepared version: where its bytes are, and their checksums.
    Fragment {
        version: Version,
        epoch: Epoch,
        /// Prepared by a seal (its leader resolves it), not by a writer.
        seal: bool,
        missing: u64,
        extent: Extent,
        fragment_bytes: u32,
        /// This cell's overlays up to here are in the bytes (data cells; 0 at parity).
        folded_seq: Seq,
        /// The folded sequence of each data cell, as the writer gave it.
        folded_seqs: Vec<Seq>,
        block_crcs: Vec<u32>,
    }
);
record!(
    /// One overlay. Its data is under `OVERLAY_DATA`, in an extent, or zeros.
    Overlay {
        offset: u32,
        len: u32,
        kind: OverlayKind,
        crc: u32,
        token_epoch: u32,
        /// Length 0: the data is in the index.
        extent: Extent,
    }
);
impl Overlay {
    /// A number that differs for different writes and is the same for copies of one: repair compares the sums
    /// of logs.
    pub fn sum(&self, seq: Seq) -> u64 {
        let mut w = Writer::default();
        (seq, self.offset).encode(&mut w);
        (self.len, (self.kind, self.crc)).encode(&mut w);
        let low = crc32c(&w.bytes);
        w.bytes.push(1);
        (u64::from(crc32c(&w.bytes)) << 32) | u64::from(low)
    }
}
record!(
    /// Writes to the file with a lower token epoch are refused.
    Fence { token_epoch: u32 }
);
record!(
    /// Writes to these stripes with a lower token epoch are void.
    #[derive(Copy)]
    Truncation {
        from_stripe: u64,
        token_epoch: u32,
        /// Exclusive; `u64::MAX`: to the end of the file.
        to_stripe: u64,
    }
);
impl Truncation {
    pub fn to_end(from_stripe: u64, token_epoch: u32) -> Truncation {
        Truncation { from_stripe, to_stripe: u64::MAX, token_epoch }
    }
    pub fn holds(&self, stripe: u64) -> bool {
        self.from_stripe <= stripe && (stripe < self.to_stripe || self.to_stripe == u64::MAX)
    }
    /// Whether this truncation makes void everything that `other` does.
    pub fn covers(&self, other: &Truncation) -> bool {
        self.from_stripe <= other.from_stripe
            && self.to_stripe >= other.to_stripe
            && self.token_epoch >= other.token_epoch
    }
}
record!(
    /// The file whose truncation has this number.
    TruncatedFile { file: FileId }
);
record!(
    /// Requests for the group with a lower epoch are refused.
    GroupEpoch { epoch: Epoch }
);

#[cfg(test)]
mod tests {
    use super::*;

    fn cell() -> CellId {
        CellId {
            file: FileId { namespace: NamespaceId(1), inode: InodeId(0x0200_0003) },
            stripe: 4,
            index: 5,
        }
    }
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Golden: these bytes are on disks. Never change them; add a layout instead.
    #[test]
    fn bytes_on_disk() {
        let header = Header {
            missing: 2,
            last_seq: Seq(8),
            folded_seq: Seq(3),
            overlay_count: 5,
            overlay_bytes: 999,
            log_sum: 0x0102030405060708,
            ..Header::new(PgId(9), Scheme { data: 4, parity: 2 }, Epoch(11))
        };
        let fragment = Fragment {
            version: Version::new(6, 7),
            epoch: Epoch(11),
            seal: true,
            missing: 0,
            extent: Extent { addr: 1 << 20, len: 20480 },
            fragment_bytes: 20000,
            folded_seq: Seq(3),
            folded_seqs: vec![Seq(3), Seq(0)],
            block_crcs: vec![0x01020304, 0x05060708],
        };
        let overlay = Overlay {
            offset: 100,
            len: 50,
            kind: OverlayKind::Data,
            crc: 0xaabbccdd,
            token_epoch: 6,
            extent: Extent::default(),
        };
        let truncation = Truncation::to_end(3, 8);
        let part = Truncation { to_stripe: 5, ..truncation };
        let golden = [
            (
                "truncation_key",
                truncation_key(cell().file, 9),
                include_str!("../tests/golden/truncation_key"),
            ),
            ("truncation", truncation.to_value(), include_str!("../tests/golden/truncation")),
            (
                "prepared_key",
                prepared_key(cell(), Version::new(6, 7)),
                include_str!("../tests/golden/prepared_key"),
            ),
            ("listed_key", listed_key(PgId(9), cell()), include_str!("../tests/golden/listed_key")),
            ("closed_key", closed_key(PgId(9)), include_str!("../tests/golden/closed_key")),
            ("header", header.to_value(), include_str!("../tests/golden/header")),
            ("fragment", fragment.to_value(), include_str!("../tests/golden/fragment")),
            ("overlay", overlay.to_value(), include_str!("../tests/golden/overlay")),
        ];
        let changed: Vec<_> = golden
            .iter()
            .filter(|(_, now, was)| hex(now) != was.trim())
            .map(|(name, now, _)| (name, hex(now)))
            .collect();
        assert!(changed.is_empty(), "{changed:?}");
        assert_eq!(Header::from_value(&header.to_value()).unwrap(), header);
        assert_eq!(Fragment::from_value(&fragment.to_value()).unwrap(), fragment);
        assert_eq!(Overlay::from_value(&overlay.to_value()).unwrap(), overlay);
        assert_eq!(Truncation::from_value(&truncation.to_value()).unwrap(), truncation);
        assert_eq!(Truncation::from_value(&part.to_value()).unwrap(), part);
        // A record of stripes up to the end has the same length as any other; a shorter record is refused.
        let (whole, short) = (part.to_value().len(), &part.to_value()[4..17]);
        assert_eq!(truncation.to_value().len(), whole);
        let short = [&crc32c(short).to_le_bytes()[..], short].concat();
        assert!(Truncation::from_value(&short).is_err());
    }

    #[test]
    fn a_truncation_holds_its_stripes_and_covers_smaller_ones() {
        let (part, tail) =
            (Truncation { from_stripe: 3, to_stripe: 5, token_epoch: 8 }, Truncation::to_end(4, 8));
        assert_eq!([2, 3, 4, 5, u64::MAX].map(|s| part.holds(s)), [false, true, true, false, false]);
        assert!(tail.holds(u64::MAX) && !tail.holds(3));
        assert!(!part.covers(&tail) && !tail.covers(&part));
        assert!(Truncation::to_end(3, 8).covers(&part) && !Truncation::to_end(3, 7).covers(&part));
        assert!(part.covers(&Truncation { to_stripe: 4, token_epoch: 7, ..part }));
    }

    #[test]
    fn a_flipped_bit_is_damage() {
        let value = Fence { token_epoch: 7 }.to_value();
        for bit in 0..value.len() * 8 {
            let mut bad = value.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Fence::from_value(&bad).unwrap_err().kind, weir_proto::ErrorKind::Damaged);
        }
        for len in 0..value.len() {
            assert!(Fence::from_value(&value[..len]).is_err());
        }
    }

    #[test]
    fn keys_show_what_they_name() {
        assert_eq!(cell_of_key(&header_key(cell())).unwrap(), cell());
        assert_eq!(cell_of_key(&listed_key(PgId(3), cell())).unwrap(), cell());
        assert_eq!(number_of_key(&overlay_key(cell(), Seq(77))).unwrap(), 77);
        assert_eq!(truncation_number_of_key(&truncation_key(cell().file, 9)).unwrap(), 9);
        assert_eq!(truncation_number_of_key(&truncated_file_key(7)).unwrap(), 7);
        assert_eq!(file_of_fence_key(&fence_key(cell().file)).unwrap(), cell().file);
        let (start, end) = file_range(OVERLAY, cell().file, 4);
        assert!(start < overlay_key(cell(), Seq(1)) && overlay_key(cell(), Seq(u64::MAX)) < end);
        let (start, end) = numbered_range(OVERLAY, cell(), 2, 5);
        assert!(start == overlay_key(cell(), Seq(2)) && overlay_key(cell(), Seq(5)) < end);
        assert!(overlay_key(cell(), Seq(6)) >= end);
        assert!(cell_of_key(b"c123").is_err());
    }
}
