//! Reads records back from the journal, for copies that lack them.
//!
//! Only synced records are read. Folded segments can be read as long as they are kept.

use crate::CommitSeq;
use crate::core::Core;
use crate::engine::Engine;
use crate::format::{Record, SEGMENT_HEADER_BYTES, SegmentHeader, decode_record, decode_segment_header};
use crate::journal::lock;
use crate::member::Entry;
use bytes::Bytes;
use std::sync::Arc;
use weir_env::{File, OpenMode};
use weir_proto::{Error, Result};

/// Bytes per read; a longer record is read as a whole.
const READ_BYTES: usize = 1 << 20;

/// A position in the journal of a store.
pub struct Reader {
    core: Arc<Core>,
    file: Arc<dyn File>,
    number: u64,
    header: SegmentHeader,
    offset: u64,
    /// The previous record.
    last: CommitSeq,
}

impl Engine {
    /// Reads the records after `after`. None: they are not kept any more, so the whole state must be fetched.
    pub fn reader(&self, after: CommitSeq) -> Result<Option<Reader>> {
        let core = &self.core;
        let (last, tail) = {
            let writer = lock(&core.writer);
            (writer.epochs.last(), writer.tail.segment.number)
        };
        if after > last {
            return Err(Error::invalid(format!("the journal ends at {}, before {}", last.0, after.0)));
        }
        // In this order: a fold adds to the kept segments before it removes from the sealed ones.
        let sealed: Vec<_> = lock(&core.sealed).iter().map(|s| (s.segment.number, s.last)).collect();
        let kept: Vec<_> = lock(&core.reserve).kept.iter().map(|k| (k.number, k.last)).collect();
        let all: Vec<_> = kept.into_iter().chain(sealed).chain([(tail, CommitSeq(u64::MAX))]).collect();
        let first = all[0].0;
        let number = all.iter().find(|(_, last)| *last > after).map_or(tail, |(number, _)| *number);
        let Some((file, header)) = open(core, number)? else { return Ok(None) };
        let offset = SEGMENT_HEADER_BYTES as u64;
        let mut reader = Reader { core: core.clone(), file, number, header, offset, last: after };
        Ok((number > first || reader.begins_in_time(after)?).then_some(reader))
    }
}

/// None: it was removed meanwhile.
fn open(core: &Core, number: u64) -> Result<Option<(Arc<dyn File>, SegmentHeader)>> {
    let path = core.shelf.path(number);
    let doing = format!("read the journal segment {}", path.display());
    let file = match core.shelf.disk.open(&path, OpenMode::READ) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::from_io(doing, &e)),
    };
    let mut block = vec![0; SEGMENT_HEADER_BYTES];
    file.read_exact_at(&mut block, 0).map_err(|e| Error::from_io(&doing, &e))?;
    let header = decode_segment_header(&block).map_err(|e| e.doing(doing))?;
    Ok((header.number == number).then_some((file, header)))
}

impl Reader {
    /// Whether the oldest segment has the record after `after`, or will have it.
    fn begins_in_time(&mut self, after: CommitSeq) -> Result<bool> {
        let bytes = self.read(READ_BYTES)?;
        let first = decode_record(&bytes, self.number, self.header.version);
        Ok(match first {
            Some(record) if record.body.is_empty() => record.seq <= after,
            Some(record) => record.seq.0 <= after.0 + 1,
            None => after >= lock(&self.core.writer).epochs.last() || self.core.journal.synced() <= after,
        })
    }

    fn read(&self, bytes_max: usize) -> Result<Vec<u8>> {
        let left = self.header.bytes.saturating_sub(self.offset);
        let mut bytes = vec![0; left.min(bytes_max as u64) as usize];
        let path = self.core.shelf.path(self.number);
        let read = self.file.read_at(&mut bytes, self.offset);
        let n = read.map_err(|e| Error::from_io(format!("read the journal {}", path.display()), &e))?;
        bytes.truncate(n);
        Ok(bytes)
    }

    /// The next synced records, at least one if there is one, of about `bytes_max` bytes. None: they are not
    /// kept any more.
    pub fn next(&mut self, bytes_max: usize) -> Result<Option<Vec<Entry>>> {
        let synced = self.core.journal.synced();
        let (mut entries, mut total) = (Vec::new(), 0);
        while self.last < synced && total < bytes_max {
            let mut bytes = self.read(READ_BYTES)?;
            if decode_record(&bytes, self.number, self.header.version).is_none() {
                bytes = self.read(self.header.bytes as usize)?;
            }
            let mut at = 0;
            let mut ended = false;
            while total < bytes_max && self.last < synced {
                let Some(record) = decode_record(&bytes[at..], self.number, self.header.version) else {
                    break;
                };
                at += record.len;
                if record.body.is_empty() {
                    ended = true;
                    break;
                }
                if let Some(entry) = self.entry(&record)? {
                    total += record.len;
                    self.last = record.seq;
                    entries.push(entry);
                }
            }
            self.offset += at as u64;
            if ended {
                let next = open(&self.core, self.number + 1)?;
                let Some((file, header)) = next else { return Ok(None) };
                (self.file, self.header, self.number) = (file, header, self.number + 1);
                self.offset = SEGMENT_HEADER_BYTES as u64;
            } else if at == 0 {
                return Ok(None); // the file was recycled for another segment
            }
        }
        Ok(Some(entries))
    }

    /// None: it precedes the requested records.
    fn entry(&self, record: &Record<'_>) -> Result<Option<Entry>> {
        if record.seq <= self.last {
            return Ok(None);
        }
        if record.seq.0 != self.last.0 + 1 {
            let (seq, last) = (record.seq.0, self.last.0);
            return Err(Error::damaged(format!("the record {seq} follows {last} in the journal")));
        }
        let body = Bytes::copy_from_slice(record.body);
        Ok(Some(Entry { seq: record.seq, epoch: record.epoch, body }))
    }
}
