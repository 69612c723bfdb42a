//! The journal's bytes: segment headers and records. Drawn in docs/format.md ("Journal").
//!
//! All numbers are little-endian. Every record carries its segment's number, so old data in a recycled file
//! is never taken for a record. Nothing read here is trusted before its checksum holds.

use crate::CommitSeq;
use crate::change::{Change, Delta, Key};
use weir_proto::{Epoch, Error, Result};

/// Records without epochs: of a store that never had copies.
pub(crate) const PLAIN: u32 = 1;
/// Records with the epoch of the leader that made them.
pub(crate) const WITH_EPOCHS: u32 = 2;
const MAGIC: [u8; 8] = *b"WEIR-JNL";
/// The header has its own block: rewriting it never touches a record.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 4096;
const SEGMENT_HEADER_USED: usize = 32;
/// Records start at multiples of this.
const RECORD_ALIGN: usize = 8;
const CHECKSUM_BYTES: usize = 4;

const PUT: u8 = 1;
const DELETE: u8 = 2;
const ADD: u8 = 3;
const MAX: u8 = 4;

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The longest body of a record for other copies: it fits into one message.
pub const COPIED_BYTES_MAX: usize = 4 << 20;

/// Size of a record header, by the version of its segment.
pub(crate) fn record_header_bytes(version: u32) -> usize {
    if version == PLAIN { 32 } else { 40 }
}

/// The content of a segment's first block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentHeader {
    pub(crate) version: u32,
    pub(crate) number: u64,
    /// Size of the whole segment.
    pub(crate) bytes: u64,
}

/// The first block of a segment.
pub(crate) fn encode_segment_header(header: SegmentHeader) -> Vec<u8> {
    let mut block = vec![0; SEGMENT_HEADER_BYTES];
    block[4..8].copy_from_slice(&header.version.to_le_bytes());
    block[8..16].copy_from_slice(&MAGIC);
    block[16..24].copy_from_slice(&header.number.to_le_bytes());
    block[24..32].copy_from_slice(&header.bytes.to_le_bytes());
    let crc = crc32c(&block[CHECKSUM_BYTES..SEGMENT_HEADER_USED]);
    block[..CHECKSUM_BYTES].copy_from_slice(&crc.to_le_bytes());
    block
}

pub(crate) fn decode_segment_header(bytes: &[u8]) -> Result<SegmentHeader> {
    if bytes.len() < SEGMENT_HEADER_BYTES {
        return Err(Error::damaged(format!("the segment ends after {} bytes", bytes.len())));
    }
    if bytes[8..16] != MAGIC {
        return Err(Error::damaged("this is not a journal segment (wrong magic)"));
    }
    if u32_at(bytes, 0) != crc32c(&bytes[CHECKSUM_BYTES..SEGMENT_HEADER_USED]) {
        return Err(Error::damaged("the segment's header fails its checksum"));
    }
    match u32_at(bytes, 4) {
        version @ (PLAIN | WITH_EPOCHS) => {
            Ok(SegmentHeader { version, number: u64_at(bytes, 16), bytes: u64_at(bytes, 24) })
        }
        v => Err(Error::unsupported(format!(
            "journal format {v}; this version knows {PLAIN} and {WITH_EPOCHS}"
        ))),
    }
}

/// The fields of a record apart from its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    /// Version of the segment.
    pub(crate) version: u32,
    pub(crate) segment: u64,
    pub(crate) seq: CommitSeq,
    /// The newest record that was already synced when this one was made.
    pub(crate) durable: CommitSeq,
    /// Epoch of the leader that made it; 0 in a store that never had copies.
    pub(crate) epoch: Epoch,
}

/// A record with a valid checksum.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) seq: CommitSeq,
    pub(crate) durable: CommitSeq,
    pub(crate) epoch: Epoch,
    /// Empty: the segment ends here, and the next one follows.
    pub(crate) body: &'a [u8],
    /// From this record's start to the next one's.
    pub(crate) len: usize,
}

/// The record at the start of `bytes`, if there is a complete one of this segment.
pub(crate) fn decode_record(bytes: &[u8], segment: u64, version: u32) -> Option<Record<'_>> {
    let header = record_header_bytes(version);
    if bytes.len() < header || u64_at(bytes, 8) != segment {
        return None;
    }
    let body_end = header.checked_add(u32_at(bytes, 4) as usize)?;
    let len = body_end.checked_next_multiple_of(RECORD_ALIGN)?;
    if len > bytes.len() || u32_at(bytes, 0) != crc32c(&bytes[CHECKSUM_BYTES..len]) {
        return None;
    }
    Some(Record {
        seq: CommitSeq(u64_at(bytes, 16)),
        durable: CommitSeq(u64_at(bytes, 24)),
        epoch: Epoch(if version == PLAIN { 0 } else { u64_at(bytes, 32) }),
        body: &bytes[header..body_end],
        len,
    })
}

fn change_len(key: &[u8], change: &Change) -> usize {
    let rest = match change {
        Change::Put(value) => 4 + value.len(),
        Change::Delete => 0,
        Change::Add(_) | Change::Max(_) => 8,
    };
    1 + 2 + key.len() + rest
}

/// Length of a body of these changes.
pub(crate) fn body_len(changes: &Delta) -> usize {
    changes.changes.iter().map(|(k, c)| change_len(k, c)).sum()
}

/// Length of a record with a body of this length.
pub(crate) fn record_len(version: u32, body_len: usize) -> usize {
    (record_header_bytes(version) + body_len).next_multiple_of(RECORD_ALIGN)
}

/// The body of one transaction.
#[cfg(test)]
pub(crate) fn encode_body(changes: &Delta) -> Vec<u8> {
    let mut out = Vec::with_capacity(body_len(changes));
    changes.changes.iter().for_each(|(key, change)| encode_change(&mut out, key, change));
    out
}

/// The record of one transaction.
pub(crate) fn encode_record(head: Head, changes: &Delta) -> Vec<u8> {
    let mut out = begin_record(head, body_len(changes));
    changes.changes.iter().for_each(|(key, change)| encode_change(&mut out, key, change));
    end_record(out, head.version)
}

/// The record of a body that another copy made; of an empty one: the end of the segment.
pub(crate) fn encode_copied(head: Head, body: &[u8]) -> Vec<u8> {
    let mut out = begin_record(head, body.len());
    out.extend_from_slice(body);
    end_record(out, head.version)
}

/// The body of a record that was just encoded.
pub(crate) fn body_of(record: &[u8], version: u32) -> &[u8] {
    let header = record_header_bytes(version);
    &record[header..header + u32_at(record, 4) as usize]
}

fn begin_record(head: Head, body_len: usize) -> Vec<u8> {
    assert!(head.version != PLAIN || head.epoch == Epoch(0), "a plain record has no epoch");
    let mut out = Vec::with_capacity(record_len(head.version, body_len));
    out.extend_from_slice(&[0; 8]);
    for number in [head.segment, head.seq.0, head.durable.0] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    if head.version != PLAIN {
        out.extend_from_slice(&head.epoch.0.to_le_bytes());
    }
    out
}

fn end_record(mut out: Vec<u8>, version: u32) -> Vec<u8> {
    let body_len = out.len() - record_header_bytes(version);
    let body_len = u32::try_from(body_len).expect("a segment is smaller than 4 GiB");
    out.resize(out.len().next_multiple_of(RECORD_ALIGN), 0);
    out[4..8].copy_from_slice(&body_len.to_le_bytes());
    let crc = crc32c(&out[CHECKSUM_BYTES..]);
    out[..CHECKSUM_BYTES].copy_from_slice(&crc.to_le_bytes());
    out
}

fn encode_change(out: &mut Vec<u8>, key: &[u8], change: &Change) {
    let key_len = u16::try_from(key.len()).expect("keys are limited").to_le_bytes();
    let mut head = |kind: u8| {
        out.push(kind);
        out.extend_from_slice(&key_len);
        out.extend_from_slice(key);
    };
    match change {
        Change::Put(value) => {
            head(PUT);
            out.extend_from_slice(&u32::try_from(value.len()).expect("values are limited").to_le_bytes());
            out.extend_from_slice(value);
        }
        Change::Delete => head(DELETE),
        Change::Add(delta) => {
            head(ADD);
            out.extend_from_slice(&delta.to_le_bytes());
        }
        Change::Max(value) => {
            head(MAX);
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
}

/// Replays a record's changes onto `delta`.
pub(crate) fn replay(mut body: &[u8], delta: &mut Delta) -> Result<()> {
    while !body.is_empty() {
        let kind = take(&mut body, 1)?[0];
        let key_len = u16::from_le_bytes(take(&mut body, 2)?.try_into().expect("2 bytes"));
        let key = take(&mut body, usize::from(key_len))?;
        let change = match kind {
            PUT => {
                let len = u32_at(take(&mut body, 4)?, 0);
                Change::Put(take(&mut body, len as usize)?.into())
            }
            DELETE => Change::Delete,
            ADD => Change::Add(u64_at(take(&mut body, 8)?, 0).cast_signed()),
            MAX => Change::Max(u64_at(take(&mut body, 8)?, 0)),
            kind => return Err(Error::damaged(format!("{kind} is no kind of change"))),
        };
        let mixed = |_| Error::damaged("an addition and a maximum meet on one key");
        delta.push(Key::from_slice(key), change).map_err(mixed)?;
    }
    Ok(())
}

fn take<'a>(body: &mut &'a [u8], n: usize) -> Result<&'a [u8]> {
    let (head, rest) =
        body.split_at_checked(n).ok_or_else(|| Error::damaged("a change reaches beyond its record"))?;
    *body = rest;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Delta {
        let mut delta = Delta::default();
        for (key, change) in [
            ("E/a", Change::Put(b"ino"[..].into())),
            ("E/b", Change::Delete),
            ("T/n", Change::Add(-2)),
            ("T/t", Change::Max(7)),
        ] {
            delta.push(key.as_bytes().into(), change).unwrap();
        }
        delta
    }

    fn head(version: u32) -> Head {
        let epoch = Epoch(if version == PLAIN { 0 } else { 6 });
        Head { version, segment: 3, seq: CommitSeq(10), durable: CommitSeq(8), epoch }
    }

    /// These bytes are permanent: a change of them is a new format version.
    #[test]
    fn golden_record() {
        for version in [PLAIN, WITH_EPOCHS] {
            let record = encode_record(head(version), &sample());
            let mut expected = vec![];
            expected.extend_from_slice(&[0, 0, 0, 0]); // checksum, below
            expected.extend_from_slice(&[47, 0, 0, 0]); // body length
            expected.extend_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0]); // segment
            expected.extend_from_slice(&[10, 0, 0, 0, 0, 0, 0, 0]); // seq
            expected.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]); // durable
            if version == WITH_EPOCHS {
                expected.extend_from_slice(&[6, 0, 0, 0, 0, 0, 0, 0]); // epoch
            }
            let body_at = expected.len();
            expected.extend_from_slice(b"\x01\x03\x00E/a\x03\x00\x00\x00ino");
            expected.extend_from_slice(b"\x02\x03\x00E/b");
            expected.extend_from_slice(b"\x03\x03\x00T/n\xfe\xff\xff\xff\xff\xff\xff\xff");
            expected.extend_from_slice(b"\x04\x03\x00T/t\x07\x00\x00\x00\x00\x00\x00\x00");
            assert_eq!(encode_body(&sample()), expected[body_at..]);
            assert_eq!(body_of(&record, version), &expected[body_at..]);
            expected.push(0); // padding
            assert_eq!(record[4..], expected[4..]);
            assert_eq!(u32_at(&record, 0), crc32c(&expected[4..]));
        }
        assert_eq!(crc32c(b"123456789"), 0xe306_9283, "CRC-32C (Castagnoli)");
    }

    #[test]
    fn golden_segment_header() {
        for (version, first) in [(PLAIN, b'\x01'), (WITH_EPOCHS, b'\x02')] {
            let header = SegmentHeader { version, number: 5, bytes: 1 << 20 };
            let block = encode_segment_header(header);
            assert_eq!(block[4], first);
            assert_eq!(block[5..32], *b"\0\0\0WEIR-JNL\x05\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\0");
            assert_eq!(decode_segment_header(&block).unwrap(), header);
        }
        let newer = encode_segment_header(SegmentHeader { version: 3, number: 5, bytes: 1 << 20 });
        assert_eq!(decode_segment_header(&newer).unwrap_err().kind, weir_proto::ErrorKind::Unsupported);
    }

    #[test]
    fn a_record_survives_and_each_flipped_bit_is_seen() {
        for version in [PLAIN, WITH_EPOCHS] {
            let record = encode_record(head(version), &sample());
            assert_eq!(record.len(), record_len(version, body_len(&sample())));
            let read = decode_record(&record, 3, version).unwrap();
            assert_eq!((read.seq, read.durable, read.len), (CommitSeq(10), CommitSeq(8), record.len()));
            assert_eq!(read.epoch, head(version).epoch);
            assert_eq!(
                encode_copied(head(version), read.body),
                record,
                "a copied body makes the same record"
            );
            let mut delta = Delta::default();
            replay(read.body, &mut delta).unwrap();
            assert_eq!(delta.changes, sample().changes);
            assert_eq!(decode_record(&record, 4, version), None, "another segment's");
            for bit in 0..record.len() * 8 {
                let mut bad = record.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode_record(&bad, 3, version), None, "bit {bit}");
            }
            for len in 0..record.len() {
                assert_eq!(decode_record(&record[..len], 3, version), None, "cut after {len}");
            }
        }
    }

    #[test]
    fn a_malformed_body_is_an_error() {
        for body in
            [&b"\x01"[..], b"\x09\x01\0k", b"\x01\x09\0k", b"\x03\x01\0k\x01", b"\x01\x01\0k\xff\xff\xff\xff"]
        {
            assert!(replay(body, &mut Delta::default()).is_err());
        }
    }
}
