//! The journal's bytes: segment headers and records. Drawn in docs/format.md ("Journal").
//!
//! All numbers are little-endian. Every record carries its segment's number, so what an earlier life of a recycled
//! file left behind is never taken for a record. Nothing read here is trusted before its checksum holds.

use crate::CommitSeq;
use crate::change::{Change, Delta};
use weir_proto::{Error, Result};

pub(crate) const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"WEIR-JNL";
/// The header has a block of its own: rewriting it never touches a record.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 4096;
const SEGMENT_HEADER_USED: usize = 32;
pub(crate) const RECORD_HEADER_BYTES: usize = 32;
/// Records start at multiples of this.
const RECORD_ALIGN: usize = 8;
const CHECKSUM_BYTES: usize = 4;

const PUT: u8 = 1;
const DELETE: u8 = 2;
const ADD: u8 = 3;
const MAX: u8 = 4;

fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The first block of a segment.
pub(crate) fn encode_segment_header(number: u64, segment_bytes: u64) -> Vec<u8> {
    let mut block = vec![0; SEGMENT_HEADER_BYTES];
    block[4..8].copy_from_slice(&VERSION.to_le_bytes());
    block[8..16].copy_from_slice(&MAGIC);
    block[16..24].copy_from_slice(&number.to_le_bytes());
    block[24..32].copy_from_slice(&segment_bytes.to_le_bytes());
    let crc = crc32c(&block[CHECKSUM_BYTES..SEGMENT_HEADER_USED]);
    block[..CHECKSUM_BYTES].copy_from_slice(&crc.to_le_bytes());
    block
}

/// The segment's number, and the bytes it was made for.
pub(crate) fn decode_segment_header(bytes: &[u8]) -> Result<(u64, u64)> {
    if bytes.len() < SEGMENT_HEADER_BYTES {
        return Err(Error::damaged(format!("the segment ends after {} bytes", bytes.len())));
    }
    if bytes[8..16] != MAGIC {
        return Err(Error::damaged("this is no journal segment (wrong magic)"));
    }
    if u32_at(bytes, 0) != crc32c(&bytes[CHECKSUM_BYTES..SEGMENT_HEADER_USED]) {
        return Err(Error::damaged("the segment's header fails its checksum"));
    }
    match u32_at(bytes, 4) {
        VERSION => Ok((u64_at(bytes, 16), u64_at(bytes, 24))),
        v => Err(Error::unsupported(format!("journal format {v}; this version knows {VERSION}"))),
    }
}

/// A record that holds its checksum.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) seq: CommitSeq,
    /// What was durable already when the record was made.
    pub(crate) durable: CommitSeq,
    /// Empty: the segment ends here, and the next one goes on.
    pub(crate) body: &'a [u8],
    /// From this record's start to the next one's.
    pub(crate) len: usize,
}

/// The record at the start of `bytes`, if there is a whole one of this segment.
pub(crate) fn decode_record(bytes: &[u8], segment: u64) -> Option<Record<'_>> {
    if bytes.len() < RECORD_HEADER_BYTES || u64_at(bytes, 8) != segment {
        return None;
    }
    let body_end = RECORD_HEADER_BYTES.checked_add(u32_at(bytes, 4) as usize)?;
    let len = body_end.checked_next_multiple_of(RECORD_ALIGN)?;
    if len > bytes.len() || u32_at(bytes, 0) != crc32c(&bytes[CHECKSUM_BYTES..len]) {
        return None;
    }
    Some(Record {
        seq: CommitSeq(u64_at(bytes, 16)),
        durable: CommitSeq(u64_at(bytes, 24)),
        body: &bytes[RECORD_HEADER_BYTES..body_end],
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

/// Length of the record of these changes.
pub(crate) fn record_len(changes: &Delta) -> usize {
    let body: usize = changes.changes.iter().map(|(k, c)| change_len(k, c)).sum();
    (RECORD_HEADER_BYTES + body).next_multiple_of(RECORD_ALIGN)
}

/// The record of one transaction; of no changes: the end of the segment.
pub(crate) fn encode_record(segment: u64, seq: CommitSeq, durable: CommitSeq, changes: &Delta) -> Vec<u8> {
    let mut out = Vec::with_capacity(record_len(changes));
    out.extend_from_slice(&[0; 8]);
    for number in [segment, seq.0, durable.0] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    for (key, change) in &changes.changes {
        encode_change(&mut out, key, change);
    }
    let body_len = u32::try_from(out.len() - RECORD_HEADER_BYTES).expect("a segment is smaller than 4 GiB");
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
        delta.push(key.into(), change).map_err(mixed)?;
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

    /// These bytes are for ever: a change of them is a new format version.
    #[test]
    fn golden_record() {
        let record = encode_record(3, CommitSeq(10), CommitSeq(8), &sample());
        let mut expected = vec![];
        expected.extend_from_slice(&[0, 0, 0, 0]); // checksum, below
        expected.extend_from_slice(&[47, 0, 0, 0]); // body length
        expected.extend_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0]); // segment
        expected.extend_from_slice(&[10, 0, 0, 0, 0, 0, 0, 0]); // seq
        expected.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]); // durable
        expected.extend_from_slice(b"\x01\x03\x00E/a\x03\x00\x00\x00ino");
        expected.extend_from_slice(b"\x02\x03\x00E/b");
        expected.extend_from_slice(b"\x03\x03\x00T/n\xfe\xff\xff\xff\xff\xff\xff\xff");
        expected.extend_from_slice(b"\x04\x03\x00T/t\x07\x00\x00\x00\x00\x00\x00\x00");
        expected.push(0); // padding
        assert_eq!(record[4..], expected[4..]);
        assert_eq!(u32_at(&record, 0), crc32c(&expected[4..]));
        assert_eq!(crc32c(b"123456789"), 0xe306_9283, "CRC-32C (Castagnoli)");
    }

    #[test]
    fn golden_segment_header() {
        let block = encode_segment_header(5, 1 << 20);
        assert_eq!(block[4..32], *b"\x01\0\0\0WEIR-JNL\x05\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\0");
        assert_eq!(decode_segment_header(&block).unwrap(), (5, 1 << 20));
    }

    #[test]
    fn a_record_survives_and_each_flipped_bit_is_seen() {
        let record = encode_record(3, CommitSeq(10), CommitSeq(8), &sample());
        assert_eq!(record.len(), record_len(&sample()));
        let read = decode_record(&record, 3).unwrap();
        assert_eq!((read.seq, read.durable, read.len), (CommitSeq(10), CommitSeq(8), record.len()));
        let mut delta = Delta::default();
        replay(read.body, &mut delta).unwrap();
        assert_eq!(delta.changes, sample().changes);
        assert_eq!(decode_record(&record, 4), None, "another segment's");
        for bit in 0..record.len() * 8 {
            let mut bad = record.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_record(&bad, 3), None, "bit {bit}");
        }
        for len in 0..record.len() {
            assert_eq!(decode_record(&record[..len], 3), None, "cut after {len}");
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
