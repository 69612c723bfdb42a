//! Segments of journals, and the state of a store as copies send it.
use weir_proto::checksum::crc32c;
use weir_proto::copies;

const SEGMENT_HEADER: usize = 4096;

/// A whole segment, also with valid checksums of its records, as far as their lengths lead; and a part of a
/// state, as copies send it.
pub fn journal(bytes: &[u8]) {
    if let Ok(pairs) = copies::decode_pairs(bytes) {
        assert_eq!(copies::encode_pairs(&pairs).expect("it is no longer than it was"), bytes);
    }
    let _ = weir_kv::read_segment(bytes);
    if let Some(mended) = with_checksums(bytes)
        && let Ok(summary) = weir_kv::read_segment(&mended)
    {
        assert!(summary.end >= SEGMENT_HEADER as u64 && summary.end <= mended.len() as u64, "{summary:?}");
    }
}
fn with_checksums(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = bytes.to_vec();
    let head = crc32c(bytes.get(4..32)?);
    bytes[..4].copy_from_slice(&head.to_le_bytes());
    let header = if bytes.get(4) == Some(&2) { 40 } else { 32 };
    let mut at = SEGMENT_HEADER;
    while let Some(record) = bytes.get(at..).filter(|rest| rest.len() >= header) {
        let body = u32::from_le_bytes(record[4..8].try_into().expect("four bytes")) as usize;
        let Some(end) = body.checked_add(header).and_then(|n| n.checked_next_multiple_of(8)) else { break };
        let Some(crc) = record.get(4..end).map(crc32c) else { break };
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        at += end;
    }
    Some(bytes)
}
pub fn seeds() -> Vec<Vec<u8>> {
    [1, 2].into_iter().flat_map(segments).collect()
}
/// One that ended, and one whose end is torn.
fn segments(version: u8) -> [Vec<u8>; 2] {
    let header = if version == 2 { 40 } else { 32 };
    let mut segment = vec![0; SEGMENT_HEADER];
    segment[4] = version;
    segment[8..16].copy_from_slice(b"WEIR-JNL");
    segment[16] = 3;
    segment[24..32].copy_from_slice(&(1u64 << 16).to_le_bytes());
    let bodies: [&[u8]; 5] = [
        b"\x01\x03\x00E/a\x03\x00\x00\x00ino",
        b"\x02\x03\x00E/b",
        b"\x03\x03\x00T/n\xfe\xff\xff\xff\xff\xff\xff\xff",
        b"\x04\x03\x00T/t\x07\x00\x00\x00\x00\x00\x00\x00",
        b"",
    ];
    let mut seq = 9u64;
    for body in bodies {
        seq += u64::from(!body.is_empty());
        let start = segment.len();
        segment.extend_from_slice(&[0; 4]);
        segment.extend_from_slice(&(body.len() as u32).to_le_bytes());
        for number in [3, seq, seq.saturating_sub(2)] {
            segment.extend_from_slice(&number.to_le_bytes());
        }
        if version == 2 {
            segment.extend_from_slice(&5u64.to_le_bytes());
        }
        segment.extend_from_slice(body);
        segment.resize(start + (header + body.len()).next_multiple_of(8), 0);
    }
    let ended = with_checksums(&segment).expect("it has a header");
    let torn = ended[..ended.len() - header - 8].to_vec();
    [ended, torn]
}
