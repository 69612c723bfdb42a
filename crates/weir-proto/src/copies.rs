//! Messages between the copies of a namespace's journal.
//!
//! Each carries the epoch of its leader, as sender or receiver. A copy refuses an older epoch than it knows
//! (`Stale`), and records a newer one before it answers. The bytes of records and of states are in the
//! payload.
use crate::coord::MapReply;
use crate::data::PAYLOAD_MAX;
use crate::message;
use crate::{Epoch, Error, NamespaceId, NamespaceUuid, NodeId, Result};
use bytes::Bytes;

/// Records of one message: their headers fill a tenth of a body.
pub const RECORDS_MAX: usize = 8192;
/// A record's longest body: it fits into a message with some margin.
pub const RECORD_BYTES_MAX: usize = 4 << 20;
/// Changes of leaders that one message names.
pub const EPOCH_RUNS_MAX: usize = 1024;
/// Approximate size of a part of a state.
pub const PART_BYTES: usize = 2 << 20;
/// Copies that a namespace may have, including its leader's.
pub const COPIES_MAX: u8 = 5;

message!(
    /// Consecutive records of one epoch, up to the number `last`.
    EpochRun { epoch: Epoch, last: u64 }
);
message!(
    /// The epochs of a journal's records after `start`.
    JournalEpochs { start: u64, start_epoch: Epoch, runs: Vec<EpochRun> }
);
message!(
    /// A new leader asks a copy for its records. The copy follows this leader from now on.
    JournalAsk = 401 by [Meta] -> JournalHeld { namespace: NamespaceId, epoch: Epoch }
);
message!(
    /// `durable`: up to there the copy knows that its records are in every copy.
    JournalHeld { epochs: JournalEpochs, durable: u64 }
);
message!(
    /// The copy truncates its records after `to`, and takes the leader's from there on. Without `to` it
    /// fetches the whole state first: the leader no longer has the records that the copy lacks.
    JournalTruncate = 402 by [Meta] -> () { namespace: NamespaceId, epoch: Epoch, to: Option<u64> }
);
message!(RecordHead { epoch: Epoch, bytes: u32 });
message!(
    /// Records after `after`, with their bodies in the payload. Also carries which records are durable in
    /// every copy.
    JournalAppend = 400 by [Meta] -> JournalKept {
        namespace: NamespaceId,
        epoch: Epoch,
        after: u64,
        durable: u64,
        records: Vec<RecordHead>,
    }
);
message!(
    /// Up to there the copy has the leader's records on its disk. It knows no epoch above the leader's, and
    /// while this promise holds it acknowledges nothing as a leader.
    JournalKept { kept: u64 }
);
message!(
    /// Requests that promise alone.
    JournalRight = 404 by [Meta] -> JournalKept { namespace: NamespaceId, epoch: Epoch }
);
message!(
    /// A copy fetches its leader's folded state: the keys after `after`, as the payload. The first part, with
    /// `export` 0, assigns the state a number.
    StateFetch = 403 by [Meta] -> StatePart {
        namespace: NamespaceId,
        epoch: Epoch,
        export: u64,
        after: Option<Bytes>,
    }
);
message!(
    /// The state includes the records up to `seq`, the last of which has `epoch`. A part without keys is the
    /// last one.
    StatePart { export: u64, seq: u64, epoch: Epoch }
);

message!(
    /// To the coordinator: the number of nodes that keep the namespace. Nodes that announce themselves take
    /// the places.
    SetCopies = 80 by [Console] -> MapReply {
        namespace: String,
        /// 1 to [`COPIES_MAX`]; 0: all are lost, and the namespace will be restored from an export.
        copies: u8,
        /// This node drops its copy permanently.
        without: Option<NodeId>,
    }
);
message!(
    /// To the coordinator: the node's directory can keep a copy of the namespace. It takes a free place, or
    /// its own again. `Denied`: the directory lacks changes that it once had. `Unavailable`: there is no free
    /// place.
    KeepCopy = 81 by [Meta] -> MapReply {
        node: NodeId,
        namespace: NamespaceId,
        uuid: NamespaceUuid,
        /// The number of changes that it holds, on its disk. 0: it is empty, or its state is incomplete.
        changes: u64,
    }
);
message!(
    /// The leader of a namespace reports to the coordinator that a node's copy holds every record of this
    /// epoch.
    CopyCaughtUp = 82 by [Meta] -> MapReply {
        leader: NodeId,
        namespace: NamespaceId,
        node: NodeId,
        epoch: Epoch,
    }
);

message!(
    /// The leader of a namespace has not received a reply from a copy for this time, under this epoch.
    CopyLost = 83 by [Meta] -> MapReply {
        leader: NodeId,
        namespace: NamespaceId,
        node: NodeId,
        epoch: Epoch,
        silent_ms: u32,
    }
);

message!(
    /// A copy, though its process ran, has not received a request of its leader for this time, under this
    /// epoch.
    LeaderSilent = 85 by [Meta] -> MapReply {
        node: NodeId,
        namespace: NamespaceId,
        leader: NodeId,
        epoch: Epoch,
        silent_ms: u32,
    }
);

impl JournalAppend {
    /// The numbers, epochs and bodies of the records.
    pub fn split(&self, payload: &Bytes) -> Result<Vec<(u64, Epoch, Bytes)>> {
        let count = self.records.len();
        if count > RECORDS_MAX {
            return Err(Error::invalid(format!(
                "{count} records in one message; at most {RECORDS_MAX} are possible"
            )));
        }
        if self.after.checked_add(count as u64).is_none() {
            return Err(Error::invalid(format!("there are no {count} numbers behind {}", self.after)));
        }
        let mut at = 0;
        let mut records = Vec::with_capacity(count);
        for (i, head) in self.records.iter().enumerate() {
            let seq = self.after + 1 + i as u64;
            let len = head.bytes as usize;
            let end = at + len;
            if len == 0 || len > RECORD_BYTES_MAX || end > payload.len() {
                return Err(Error::invalid(format!(
                    "the record {seq} of {len} bytes does not fit into a payload of {}",
                    payload.len()
                )));
            }
            records.push((seq, head.epoch, payload.slice(at..end)));
            at = end;
        }
        if at != payload.len() {
            return Err(Error::invalid(format!("the records end at {at} of a payload of {}", payload.len())));
        }
        Ok(records)
    }
}

/// A part of a state: for each entry the length of its key, of its value, and both.
pub fn encode_pairs(pairs: &[(Vec<u8>, Vec<u8>)]) -> Result<Bytes> {
    let total: usize = pairs.iter().map(|(key, value)| 8 + key.len() + value.len()).sum();
    if total > PAYLOAD_MAX as usize {
        return Err(Error::invalid(format!(
            "a part of a state of {total} bytes; at most {PAYLOAD_MAX} are possible"
        )));
    }
    let mut out = Vec::with_capacity(total);
    for (key, value) in pairs {
        for len in [key.len(), value.len()] {
            out.extend_from_slice(&(len as u32).to_le_bytes()); // below the limit of a payload
        }
        out.extend_from_slice(key);
        out.extend_from_slice(value);
    }
    Ok(out.into())
}

pub fn decode_pairs(mut bytes: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut pairs = Vec::new();
    while !bytes.is_empty() {
        let (pair, rest) =
            decode_pair(bytes).ok_or_else(|| Error::invalid("a part of a state ends within an entry"))?;
        pairs.push(pair);
        bytes = rest;
    }
    Ok(pairs)
}

type Pair = (Vec<u8>, Vec<u8>);

fn decode_pair(bytes: &[u8]) -> Option<(Pair, &[u8])> {
    let (key_len, bytes) = bytes.split_first_chunk::<4>()?;
    let (value_len, bytes) = bytes.split_first_chunk::<4>()?;
    let (key, bytes) = bytes.split_at_checked(u32::from_le_bytes(*key_len) as usize)?;
    let (value, bytes) = bytes.split_at_checked(u32::from_le_bytes(*value_len) as usize)?;
    Some(((key.to_vec(), value.to_vec()), bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn append(lens: &[u32]) -> JournalAppend {
        let records = lens.iter().map(|bytes| RecordHead { epoch: Epoch(3), bytes: *bytes }).collect();
        JournalAppend { namespace: NamespaceId(1), epoch: Epoch(3), after: 9, durable: 8, records }
    }

    #[test]
    fn records_are_parts_of_the_payload() {
        let payload = Bytes::from_static(b"abcde");
        let records = append(&[2, 3]).split(&payload).unwrap();
        let expected =
            [(10, Epoch(3), Bytes::from_static(b"ab")), (11, Epoch(3), Bytes::from_static(b"cde"))];
        assert_eq!(records, expected);
        assert_eq!(append(&[]).split(&Bytes::new()).unwrap(), []);
        let too_many = vec![0; RECORDS_MAX + 1];
        for lens in [&[2, 4][..], &[2, 2], &[5, 0], &[0, 5], &[u32::MAX, 5], &[], &too_many] {
            assert_eq!(append(lens).split(&payload).unwrap_err().kind, ErrorKind::Invalid, "{lens:?}");
        }
        let last = JournalAppend { after: u64::MAX, ..append(&[2, 3]) };
        assert_eq!(last.split(&payload).unwrap_err().kind, ErrorKind::Invalid);
        let long = Bytes::from(vec![1; RECORD_BYTES_MAX + 1]);
        assert_eq!(append(&[long.len() as u32]).split(&long).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn a_part_of_a_state_survives_and_a_truncated_one_is_refused() {
        let pairs = vec![(b"a".to_vec(), b"1".to_vec()), (b"b".to_vec(), vec![])];
        let bytes = encode_pairs(&pairs).unwrap();
        assert_eq!(bytes[..10], *b"\x01\0\0\0\x01\0\0\0a1");
        assert_eq!(decode_pairs(&bytes).unwrap(), pairs);
        assert_eq!(decode_pairs(&[]).unwrap(), []);
        for len in (0..bytes.len()).filter(|len| *len != 0 && *len != 10) {
            assert_eq!(decode_pairs(&bytes[..len]).unwrap_err().kind, ErrorKind::Invalid, "{len}");
        }
        let long = vec![(b"a".to_vec(), vec![0; PAYLOAD_MAX as usize])];
        assert_eq!(encode_pairs(&long).unwrap_err().kind, ErrorKind::Invalid);
    }
}
