//! Reads the journal when a store is opened: its transactions, in order, and the position to continue from.
//!
//! A torn end is truncated only where nothing acknowledged can follow it: in the newest segment with records,
//! and if no later record there states that the torn one was durable. Anything else is damage, and is
//! reported.
//!
//! A copy that truncates its records opens its journal in the same way, with the last record that it keeps.

use crate::CommitSeq;
use crate::base::Folded;
use crate::change::Delta;
use crate::crash_points;
use crate::epochs::Epochs;
use crate::format::{
    Record, SEGMENT_HEADER_BYTES, SegmentHeader, WITH_EPOCHS, decode_record, decode_segment_header, replay,
};
use crate::journal::{Segment, Shelf, Tail, rewrite, write_zeros};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use weir_env::OpenMode;
use weir_proto::{Error, Result};

/// A segment that ended, with its changes.
pub(crate) struct Ended {
    pub(crate) segment: Arc<Segment>,
    pub(crate) delta: Delta,
    pub(crate) last: CommitSeq,
}

/// A segment that is folded, and kept for copies that are behind.
#[derive(Clone)]
pub(crate) struct Kept {
    pub(crate) number: u64,
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) last: CommitSeq,
}

#[derive(Default)]
pub(crate) struct Recovered {
    /// Complete segments that are not folded yet; oldest first.
    pub(crate) ended: Vec<Ended>,
    /// Always present.
    pub(crate) tail: Option<Tail>,
    /// The changes in the tail.
    pub(crate) active: Delta,
    pub(crate) last: CommitSeq,
    pub(crate) epochs: Epochs,
    /// Folded segments that are kept, oldest first.
    pub(crate) kept: Vec<Kept>,
    /// The tail's prepared successor.
    pub(crate) next: Option<Arc<Segment>>,
    /// A folded segment's file for reuse.
    pub(crate) spare: Option<PathBuf>,
}

/// Parameters of a recovery.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) folded: Folded,
    /// Records after this one are removed: they were never durable in every copy.
    pub(crate) truncate_to: Option<CommitSeq>,
    /// Folded segments up to this total size are kept.
    pub(crate) keep_bytes: u64,
    /// Format version of a new segment.
    pub(crate) version: u32,
}

pub(crate) fn recover(shelf: &Shelf, wanted: Wanted) -> Result<Recovered> {
    let folded = wanted.folded;
    let (numbers, old, spare) = list(shelf, wanted)?;
    let (kept, epochs) = read_kept(shelf, old, folded)?;
    let mut segments = Vec::new();
    for (i, number) in numbers.iter().enumerate() {
        let expected = folded.segment + 1 + i as u64;
        if *number != expected && wanted.truncate_to.is_some() {
            break; // the truncation was interrupted while it removed them
        }
        if *number != expected {
            let path = shelf.path(expected);
            return Err(Error::damaged(format!("the journal segment {} is missing", path.display())));
        }
        segments.push(Found::open(shelf, *number)?);
    }
    for number in numbers.iter().skip(segments.len()) {
        remove(shelf, &shelf.path(*number))?;
    }
    let walked = Walked { last: folded.seq, epochs, truncate_to: wanted.truncate_to };
    if segments.is_empty() {
        return fresh(shelf, wanted, spare, walked.epochs);
    }
    assemble(shelf, segments, walked, Recovered { kept, spare, ..Recovered::default() })
}

/// A store without a journal: nothing was ever folded either.
fn fresh(shelf: &Shelf, wanted: Wanted, spare: Option<PathBuf>, epochs: Epochs) -> Result<Recovered> {
    let folded = wanted.folded;
    if folded != Folded::default() {
        let path = shelf.path(folded.segment + 1);
        return Err(Error::damaged(format!("the journal segment {} is missing", path.display())));
    }
    let segment = Arc::new(shelf.make(1, wanted.version, None)?);
    let tail = Some(Tail { segment, used: SEGMENT_HEADER_BYTES as u64 });
    Ok(Recovered { tail, spare, epochs, ..Recovered::default() })
}

fn assemble(
    shelf: &Shelf,
    segments: Vec<Found>,
    mut walked: Walked,
    mut recovered: Recovered,
) -> Result<Recovered> {
    // The tail is the first segment that has not ended; at most its empty successor follows.
    let mut segments = segments.into_iter();
    let (tail, active) = loop {
        let Some(found) = segments.next() else {
            return Err(Error::damaged("the journal's last segment has ended, and its successor is missing"));
        };
        let read = found.read(&mut walked)?;
        if walked.truncate_to.is_some() && !read.ended {
            shelf.tasks.crash_point(crash_points::TRUNCATION_CLEARED);
        }
        found.make_durable(read.end)?;
        if !read.ended {
            break (Tail { segment: found.segment, used: read.end }, read.delta);
        }
        recovered.ended.push(Ended { segment: found.segment, delta: read.delta, last: walked.last });
    };
    for found in segments {
        let (segment, bytes) = (&found.segment, &found.bytes[SEGMENT_HEADER_BYTES..]);
        let is_empty = decode_record(bytes, segment.number, segment.version).is_none();
        if is_empty && (walked.truncate_to.is_none() || segment.number == tail.segment.number + 1) {
            recovered.next.get_or_insert(found.segment);
        } else if walked.truncate_to.is_some() {
            remove(shelf, &segment.path)?;
            shelf.tasks.crash_point(crash_points::TRUNCATION_REMOVED);
        } else {
            let (path, end) = (tail.segment.path.display(), tail.used);
            return Err(Error::damaged(format!(
                "the journal segment {path} has no valid record at byte {end}, but a later segment has records"
            )));
        }
    }
    if walked.truncate_to.is_some() {
        let dir = shelf.dir.display();
        let synced = shelf.disk.sync_dir(&shelf.dir);
        synced.map_err(|e| Error::from_io(format!("sync the journal's directory {dir}"), &e))?;
    }
    let (last, epochs) = (walked.last, walked.epochs);
    Ok(Recovered { tail: Some(tail), active, last, epochs, ..recovered })
}

fn remove(shelf: &Shelf, path: &std::path::Path) -> Result<()> {
    let removed = shelf.disk.remove_file(path);
    removed.map_err(|e| Error::from_io(format!("remove the journal {}", path.display()), &e))
}

/// The epochs of the kept segments' records. Unreadable ones are not kept any longer: their changes are in
/// the tree.
fn read_kept(shelf: &Shelf, old: Vec<u64>, folded: Folded) -> Result<(Vec<Kept>, Epochs)> {
    let mut kept = Vec::new();
    let mut epochs = None;
    for number in &old {
        let Ok(found) = Found::open(shelf, *number) else { break };
        let segment = &found.segment;
        let records = &found.bytes[SEGMENT_HEADER_BYTES..];
        let Some(first) = decode_record(records, *number, segment.version) else { break };
        let start = || (CommitSeq(first.seq.0.saturating_sub(1)), Epochs::new(first.seq, first.epoch));
        let (last, known): (CommitSeq, Epochs) = epochs.take().unwrap_or_else(start);
        let mut walked = Walked { last, epochs: known, truncate_to: None };
        let Ok(Contents { ended: true, .. }) = walk(&found.bytes, segment, &"segment", &mut walked) else {
            break;
        };
        let (path, bytes) = (segment.path.clone(), segment.bytes);
        kept.push(Kept { number: *number, path, bytes, last: walked.last });
        epochs = Some((walked.last, walked.epochs));
    }
    match epochs {
        Some((last, epochs)) if last == folded.seq && kept.len() == old.len() => Ok((kept, epochs)),
        _ => {
            for number in old {
                remove(shelf, &shelf.path(number))?;
            }
            Ok((Vec::new(), Epochs::new(folded.seq, folded.epoch)))
        }
    }
}

/// Numbers of the segments that are not folded, of those that are kept, both sorted, and a folded one's file.
/// Removes leftover files.
fn list(shelf: &Shelf, wanted: Wanted) -> Result<(Vec<u64>, Vec<u64>, Option<PathBuf>)> {
    let doing =
        |e: &std::io::Error| Error::from_io(format!("list the journal in {}", shelf.dir.display()), e);
    let folded = wanted.folded.segment;
    let oldest = folded.saturating_sub(wanted.keep_bytes / shelf.segment_bytes) + 1;
    let (mut numbers, mut kept) = (Vec::new(), Vec::new());
    let mut spare = None;
    for entry in shelf.disk.read_dir(&shelf.dir).map_err(|e| doing(&e))? {
        let Some(name) = entry.name.strip_prefix("journal-") else { continue };
        let path = shelf.dir.join(&entry.name);
        match u64::from_str_radix(name, 16) {
            Ok(number) if number > folded => numbers.push(number),
            Ok(number) if number >= oldest => kept.push(number),
            Ok(_) if spare.is_none() && right_size(shelf, &path) => spare = Some(path),
            Ok(_) => shelf.disk.remove_file(&path).map_err(|e| doing(&e))?,
            Err(_) if name.ends_with(".tmp") => shelf.disk.remove_file(&path).map_err(|e| doing(&e))?,
            Err(_) => {}
        }
    }
    numbers.sort_unstable();
    kept.sort_unstable();
    // Only consecutive ones up to the tree are useful.
    let follows = |(i, number): (usize, &u64)| *number + i as u64 == folded;
    let whole = kept.iter().rev().enumerate().take_while(|(i, n)| follows((*i, n))).count();
    for number in kept.drain(..kept.len() - whole) {
        shelf.disk.remove_file(&shelf.path(number)).map_err(|e| doing(&e))?;
    }
    Ok((numbers, kept, spare))
}

fn right_size(shelf: &Shelf, path: &std::path::Path) -> bool {
    let len = shelf.disk.open(path, OpenMode::READ).and_then(|f| f.len());
    len.is_ok_and(|len| len == shelf.segment_bytes)
}

/// Progress of reading the records.
struct Walked {
    last: CommitSeq,
    epochs: Epochs,
    /// Reading ends after this one.
    truncate_to: Option<CommitSeq>,
}

/// The records of a segment, continuing after `walked.last`, up to its end or to the first invalid one.
fn walk(bytes: &[u8], segment: &Segment, name: &dyn fmt::Display, walked: &mut Walked) -> Result<Contents> {
    walk_records(bytes, segment.number, segment.version, name, walked)
}

fn walk_records(
    bytes: &[u8],
    number: u64,
    version: u32,
    name: &dyn fmt::Display,
    walked: &mut Walked,
) -> Result<Contents> {
    let mut delta = Delta::default();
    let mut at = SEGMENT_HEADER_BYTES;
    while let Some(record) = decode_record(&bytes[at..], number, version) {
        let last = walked.last;
        let damaged = |what: String| Error::damaged(format!("{what}, at byte {at} of the journal {name}"));
        if record.body.is_empty() && record.seq == last {
            return Ok(Contents { delta, ended: true, end: (at + record.len) as u64 });
        }
        if record.body.is_empty() || Some(record.seq.0) != last.0.checked_add(1) {
            return Err(damaged(format!("the record {} follows the record {}", record.seq.0, last.0)));
        }
        if walked.truncate_to.is_some_and(|to| record.seq > to) {
            break;
        }
        replay(record.body, &mut delta).map_err(|e| damaged(e.to_string()))?;
        if record.seq > walked.epochs.start() {
            let before = walked.epochs.last_epoch();
            if record.epoch < before {
                let epoch = record.epoch;
                return Err(damaged(format!("a record of {epoch} follows one of {before}")));
            }
            walked.epochs.push(record.epoch);
        }
        walked.last = record.seq;
        at += record.len;
    }
    Ok(Contents { delta, ended: false, end: at as u64 })
}

/// The next record of the segment after a position without one.
fn record_behind(bytes: &[u8], at: usize, number: u64, version: u32) -> Option<Record<'_>> {
    (at..bytes.len()).step_by(8).find_map(|i| decode_record(&bytes[i..], number, version))
}

/// Summary of a journal segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentSummary {
    pub number: u64,
    /// It belongs to a store with several copies: format 2.
    pub has_epochs: bool,
    /// Epoch of its last record.
    pub epoch: weir_proto::Epoch,
    pub transactions: u64,
    /// It ends with a note that another segment follows.
    pub ended: bool,
    /// End of its records, in bytes from its start.
    pub end: u64,
    /// A later record states that the unreadable part was durable.
    pub damaged: bool,
}

/// Reads the bytes of a journal segment in the same way as at open.
pub fn read_segment(bytes: &[u8]) -> Result<SegmentSummary> {
    let header = decode_segment_header(bytes)?;
    let (number, version) = (header.number, header.version);
    let first = decode_record(&bytes[SEGMENT_HEADER_BYTES..], number, version);
    // An end record has the number of the previous transaction.
    let before = first.as_ref().map_or(0, |r| r.seq.0.saturating_sub(u64::from(!r.body.is_empty())));
    let epochs = Epochs::new(CommitSeq(before), weir_proto::Epoch(0));
    let mut walked = Walked { last: CommitSeq(before), epochs, truncate_to: None };
    let contents = walk_records(bytes, number, version, &"segment", &mut walked)?;
    let behind = record_behind(bytes, contents.end as usize, number, version).filter(|_| !contents.ended);
    Ok(SegmentSummary {
        number,
        has_epochs: version == WITH_EPOCHS,
        epoch: walked.epochs.last_epoch(),
        transactions: walked.last.0 - before,
        ended: contents.ended,
        end: contents.end,
        damaged: behind.is_some_and(|r| r.durable > walked.last),
    })
}

struct Found {
    segment: Arc<Segment>,
    bytes: Vec<u8>,
}

struct Contents {
    delta: Delta,
    ended: bool,
    /// End of its records.
    end: u64,
}

impl Found {
    fn open(shelf: &Shelf, number: u64) -> Result<Found> {
        let path = shelf.path(number);
        let doing = format!("read the journal segment {}", path.display());
        let io = |e: std::io::Error| Error::from_io(&doing, &e);
        let file = shelf.disk.open(&path, OpenMode::READ).map_err(io)?;
        let mut bytes = vec![0; file.len().map_err(io)? as usize];
        file.read_exact_at(&mut bytes, 0).map_err(io)?;
        let header = decode_segment_header(&bytes).map_err(|e| e.doing(&doing))?;
        if header.number != number {
            let written = header.number;
            return Err(Error::damaged(format!("{doing}: its header has the number {written}")));
        }
        // A file that is shorter than in its header was cut by others: it is used as far as it goes.
        let header = SegmentHeader { bytes: header.bytes.min(bytes.len() as u64), ..header };
        let segment = Segment::open(&*shelf.disk, header, path).map_err(io)?;
        Ok(Found { segment: Arc::new(segment), bytes })
    }

    /// After a kill (no power cut) the records may be in the page cache only, and if a failed sync ended the
    /// previous process, another sync would not write them: they are written again.
    fn make_durable(&self, end: u64) -> Result<()> {
        let path = self.segment.path.display();
        let written = rewrite(&*self.segment.file, SEGMENT_HEADER_BYTES as u64, end);
        written.map_err(|e| Error::from_io(format!("write the recovered journal {path}"), &e))
    }

    /// Replays its records, continuing after `walked.last`; truncates a torn end, or at the requested record.
    fn read(&self, walked: &mut Walked) -> Result<Contents> {
        let path = self.segment.path.display();
        let contents = walk(&self.bytes, &self.segment, &path, walked)?;
        if !contents.ended {
            self.truncate_tail(contents.end as usize, walked)?;
        }
        Ok(contents)
    }

    /// Overwrites with zeros from `at` on, so that no part of the torn end can ever be read as a record.
    fn truncate_tail(&self, at: usize, walked: &Walked) -> Result<()> {
        if self.bytes[at..].iter().all(|b| *b == 0) {
            return Ok(());
        }
        let path = self.segment.path.display();
        let last = walked.last;
        let behind = record_behind(&self.bytes, at, self.segment.number, self.segment.version);
        let was_durable = |r: &Record<'_>| walked.truncate_to.is_none_or(|to| last < to) && r.durable > last;
        if let Some(later) = behind.filter(was_durable) {
            return Err(Error::damaged(format!(
                "the journal {path} is damaged at byte {at}: the record {} was durable and cannot be read (shown by \
                 record {} behind it); restore the directory",
                last.0 + 1,
                later.seq.0,
            )));
        }
        let zeroed = write_zeros(&*self.segment.file, at as u64, self.bytes.len() as u64);
        zeroed.map_err(|e| Error::from_io(format!("truncate the torn end of the journal {path}"), &e))
    }
}
