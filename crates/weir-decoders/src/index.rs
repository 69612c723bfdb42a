//! A target's index.
use crate::Check;
use weir_proto::checksum::crc32c;
use weir_proto::data::OverlayKind;
use weir_proto::map::Scheme;
use weir_proto::{CellId, Epoch, FileId, InodeId, NamespaceId, PgId, Seq, Version};
use weir_store::format::{self as index, Record as _};

fn record<R: index::Record + PartialEq + std::fmt::Debug>(value: &[u8]) {
    let Some((_, rest)) = value.split_at_checked(4) else {
        assert!(R::from_value(value).is_err());
        return;
    };
    let _ = R::from_value(value);
    let mended = [&crc32c(rest).to_le_bytes()[..], rest].concat();
    if let Ok(record) = R::from_value(&mended) {
        assert_eq!(record.to_value(), mended, "{}", R::name());
    }
}
const RECORDS: [Check; 8] = [
    record::<index::Meta>,
    record::<index::Header>,
    record::<index::Fragment>,
    record::<index::Overlay>,
    record::<index::Fence>,
    record::<index::Truncation>,
    record::<index::TruncatedFile>,
    record::<index::GroupEpoch>,
];

/// The first byte chooses the record.
pub fn value(bytes: &[u8]) {
    let Some((which, value)) = bytes.split_first() else { return };
    RECORDS[usize::from(*which) % RECORDS.len()](value);
}
pub fn value_seeds() -> Vec<Vec<u8>> {
    let extent = weir_store::alloc::Extent { addr: 1 << 20, len: 20480 };
    let fragment = index::Fragment {
        version: Version::new(6, 7),
        epoch: Epoch(11),
        seal: true,
        missing: 2,
        extent,
        fragment_bytes: 20000,
        folded_seq: Seq(3),
        folded_seqs: vec![Seq(3), Seq(0)],
        block_crcs: vec![0x01020304, 0x05060708],
    };
    let overlay =
        index::Overlay { offset: 100, len: 50, kind: OverlayKind::Data, crc: 1, token_epoch: 6, extent };
    let values = [
        index::Meta { slab_bytes: 1 << 30, step_bytes: 32 << 20 }.to_value(),
        index::Header::new(PgId(9), Scheme { data: 4, parity: 2 }, Epoch(11)).to_value(),
        fragment.to_value(),
        overlay.to_value(),
        index::Fence { token_epoch: 9 }.to_value(),
        index::Truncation { from_stripe: 3, to_stripe: 7, token_epoch: 8 }.to_value(),
        index::Truncation { from_stripe: 3, to_stripe: 5, token_epoch: 8 }.to_value(),
        index::TruncatedFile { file: cell().file }.to_value(),
        index::GroupEpoch { epoch: Epoch(4) }.to_value(),
    ];
    values.iter().enumerate().map(|(which, value)| [&[which as u8], &value[..]].concat()).collect()
}
fn cell() -> CellId {
    CellId { file: FileId { namespace: NamespaceId(1), inode: InodeId(0x0200_0003) }, stripe: 4, index: 5 }
}

pub fn key(key: &[u8]) {
    if let (Ok(cell), Ok(number)) = (index::cell_of_key(key), index::number_of_key(key))
        && key[0] == index::OVERLAY
    {
        assert_eq!(index::overlay_key(cell, Seq(number)), key);
    }
    let _ = index::truncation_number_of_key(key);
    if let Ok(file) = index::file_of_fence_key(key) {
        assert_eq!(index::fence_key(file)[1..], key[1..]);
    }
}
pub fn key_seeds() -> Vec<Vec<u8>> {
    vec![
        index::header_key(cell()),
        index::prepared_key(cell(), Version::new(6, 7)),
        index::overlay_key(cell(), Seq(8)),
        index::listed_key(PgId(9), cell()),
        index::fence_key(cell().file),
        index::truncation_key(cell().file, 9),
        index::truncated_file_key(7),
        index::group_key(PgId(3)),
    ]
}
