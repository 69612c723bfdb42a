//! What the journal holds when a store is opened: its transactions, in order, and where to go on.
//!
//! A torn end is cut only where nothing acknowledged can be behind it: in the newest segment that has records, and
//! if no later record there says that the cut one was durable. Anything else is damage, and named.

use crate::CommitSeq;
use crate::base::Folded;
use crate::change::Delta;
use crate::format::{Record, SEGMENT_HEADER_BYTES, decode_record, decode_segment_header, replay};
use crate::journal::{Segment, Shelf, Tail, rewrite, write_zeros};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use weir_env::OpenMode;
use weir_proto::{Error, Result};

/// A segment that ended, with what it says.
pub(crate) struct Ended {
    pub(crate) segment: Arc<Segment>,
    pub(crate) delta: Delta,
    pub(crate) last: CommitSeq,
}

pub(crate) struct Recovered {
    /// Complete segments that are not folded yet; oldest first.
    pub(crate) ended: Vec<Ended>,
    pub(crate) tail: Tail,
    /// What the tail says.
    pub(crate) active: Delta,
    pub(crate) last: CommitSeq,
    /// The tail's prepared successor.
    pub(crate) next: Option<Arc<Segment>>,
    /// A folded segment's file, to be used again.
    pub(crate) spare: Option<PathBuf>,
}

pub(crate) fn recover(shelf: &Shelf, folded: Folded) -> Result<Recovered> {
    let (numbers, spare) = list(shelf, folded)?;
    let mut segments = Vec::new();
    for (i, number) in numbers.iter().enumerate() {
        let expected = folded.segment + 1 + i as u64;
        if *number != expected {
            let path = shelf.path(expected);
            return Err(Error::damaged(format!("the journal segment {} is missing", path.display())));
        }
        segments.push(Found::open(shelf, *number)?);
    }
    if segments.is_empty() {
        return fresh(shelf, folded, spare);
    }
    assemble(segments, folded, spare)
}

/// A store that has no journal yet: nothing was ever folded either.
fn fresh(shelf: &Shelf, folded: Folded, spare: Option<PathBuf>) -> Result<Recovered> {
    if folded != Folded::default() {
        let path = shelf.path(folded.segment + 1);
        return Err(Error::damaged(format!("the journal segment {} is missing", path.display())));
    }
    let segment = Arc::new(shelf.make(1, None)?);
    Ok(Recovered {
        ended: vec![],
        tail: Tail { segment, used: SEGMENT_HEADER_BYTES as u64 },
        active: Delta::default(),
        last: CommitSeq(0),
        next: None,
        spare,
    })
}

fn assemble(segments: Vec<Found>, folded: Folded, spare: Option<PathBuf>) -> Result<Recovered> {
    // The tail is the first segment that has not ended; at most its empty successor follows.
    let mut last = folded.seq;
    let mut ended = Vec::new();
    let mut segments = segments.into_iter();
    let (tail, active) = loop {
        let Some(found) = segments.next() else {
            return Err(Error::damaged("the journal's last segment has ended, and its successor is missing"));
        };
        let read = found.read(&mut last)?;
        found.make_durable(read.end)?;
        if !read.ended {
            break (Tail { segment: found.segment, used: read.end }, read.delta);
        }
        ended.push(Ended { segment: found.segment, delta: read.delta, last });
    };
    let mut next = None;
    for found in segments {
        if decode_record(&found.bytes[SEGMENT_HEADER_BYTES..], found.segment.number).is_some() {
            let (path, end) = (tail.segment.path.display(), tail.used);
            return Err(Error::damaged(format!(
                "the journal segment {path} has no valid record at byte {end}, but a later segment has records"
            )));
        }
        next.get_or_insert(found.segment);
    }
    Ok(Recovered { ended, tail, active, last, next, spare })
}

/// Numbers of the segments that are not folded, sorted, and a folded one's file. Removes what is left over.
fn list(shelf: &Shelf, folded: Folded) -> Result<(Vec<u64>, Option<PathBuf>)> {
    let doing =
        |e: &std::io::Error| Error::from_io(format!("list the journal in {}", shelf.dir.display()), e);
    let mut numbers = Vec::new();
    let mut spare = None;
    for entry in shelf.disk.read_dir(&shelf.dir).map_err(|e| doing(&e))? {
        let Some(name) = entry.name.strip_prefix("journal-") else { continue };
        let path = shelf.dir.join(&entry.name);
        match u64::from_str_radix(name, 16) {
            Ok(number) if number > folded.segment => numbers.push(number),
            Ok(_) if spare.is_none() && right_size(shelf, &path) => spare = Some(path),
            Ok(_) => shelf.disk.remove_file(&path).map_err(|e| doing(&e))?,
            Err(_) if name.ends_with(".tmp") => shelf.disk.remove_file(&path).map_err(|e| doing(&e))?,
            Err(_) => {}
        }
    }
    numbers.sort_unstable();
    Ok((numbers, spare))
}

fn right_size(shelf: &Shelf, path: &std::path::Path) -> bool {
    let len = shelf.disk.open(path, OpenMode::READ).and_then(|f| f.len());
    len.is_ok_and(|len| len == shelf.segment_bytes)
}

/// The records of a segment, which follow `last`, up to its end or to the first that is none.
fn walk(bytes: &[u8], number: u64, name: &dyn fmt::Display, last: &mut CommitSeq) -> Result<Contents> {
    let mut delta = Delta::default();
    let mut at = SEGMENT_HEADER_BYTES;
    while let Some(record) = decode_record(&bytes[at..], number) {
        let damaged = |what: String| Error::damaged(format!("{what}, at byte {at} of the journal {name}"));
        if record.body.is_empty() && record.seq == *last {
            return Ok(Contents { delta, ended: true, end: (at + record.len) as u64 });
        }
        if record.body.is_empty() || Some(record.seq.0) != last.0.checked_add(1) {
            return Err(damaged(format!("the record {} follows the record {}", record.seq.0, last.0)));
        }
        replay(record.body, &mut delta).map_err(|e| damaged(e.context))?;
        *last = record.seq;
        at += record.len;
    }
    Ok(Contents { delta, ended: false, end: at as u64 })
}

/// The next record of the segment behind a place where there is none.
fn record_behind(bytes: &[u8], at: usize, number: u64) -> Option<Record<'_>> {
    (at..bytes.len()).step_by(8).find_map(|i| decode_record(&bytes[i..], number))
}

/// What a journal segment says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentSummary {
    pub number: u64,
    pub transactions: u64,
    /// It says that another segment follows.
    pub ended: bool,
    /// Of its records, in bytes from its start.
    pub end: u64,
    /// A record behind that place says that what cannot be read was durable.
    pub damaged: bool,
}

/// Reads the bytes of a journal segment as a start does, wherever they come from.
pub fn read_segment(bytes: &[u8]) -> Result<SegmentSummary> {
    let (number, _) = decode_segment_header(bytes)?;
    let first = decode_record(&bytes[SEGMENT_HEADER_BYTES..], number);
    // An end alone has the number of the transaction before it.
    let before = first.map_or(0, |r| r.seq.0.saturating_sub(u64::from(!r.body.is_empty())));
    let mut last = CommitSeq(before);
    let contents = walk(bytes, number, &"segment", &mut last)?;
    let behind = record_behind(bytes, contents.end as usize, number).filter(|_| !contents.ended);
    Ok(SegmentSummary {
        number,
        transactions: last.0 - before,
        ended: contents.ended,
        end: contents.end,
        damaged: behind.is_some_and(|r| r.durable > last),
    })
}

struct Found {
    segment: Arc<Segment>,
    bytes: Vec<u8>,
}

struct Contents {
    delta: Delta,
    ended: bool,
    /// Of its records.
    end: u64,
}

impl Found {
    fn open(shelf: &Shelf, number: u64) -> Result<Found> {
        let path = shelf.path(number);
        let doing = format!("read the journal segment {}", path.display());
        let io = |e: std::io::Error| Error::from_io(&doing, &e);
        let segment = Segment::open(&*shelf.disk, number, path).map_err(io)?;
        let mut bytes = vec![0; segment.file.len().map_err(io)? as usize];
        segment.file.read_exact_at(&mut bytes, 0).map_err(io)?;
        let (written, _) = decode_segment_header(&bytes).map_err(|e| e.doing(&doing))?;
        if written != number {
            return Err(Error::damaged(format!("{doing}: its header says that it is number {written}")));
        }
        Ok(Found { segment: Arc::new(segment), bytes })
    }

    /// After a kill (no power cut) the records may be in the page cache only, and if it was a failed sync that ended
    /// the process before, another sync would not write them: they are written again.
    fn make_durable(&self, end: u64) -> Result<()> {
        let path = self.segment.path.display();
        let written = rewrite(&*self.segment.file, SEGMENT_HEADER_BYTES as u64, end);
        written.map_err(|e| Error::from_io(format!("write the recovered journal {path}"), &e))
    }

    /// Replays its records, which follow `last`; cuts a torn end.
    fn read(&self, last: &mut CommitSeq) -> Result<Contents> {
        let path = self.segment.path.display();
        let contents = walk(&self.bytes, self.segment.number, &path, last)?;
        if !contents.ended {
            self.cut(contents.end as usize, *last)?;
        }
        Ok(contents)
    }

    /// Puts zeros from `at` on, so that nothing of the torn end can ever be read as a record.
    fn cut(&self, at: usize, last: CommitSeq) -> Result<()> {
        if self.bytes[at..].iter().all(|b| *b == 0) {
            return Ok(());
        }
        let path = self.segment.path.display();
        let number = self.segment.number;
        if let Some(later) = record_behind(&self.bytes, at, number).filter(|r| r.durable > last) {
            return Err(Error::damaged(format!(
                "the journal {path} is damaged at byte {at}: the record {} was durable and cannot be read (the record \
                 {} behind it says so); restore the directory",
                last.0 + 1,
                later.seq.0,
            )));
        }
        let cut = write_zeros(&*self.segment.file, at as u64, self.bytes.len() as u64);
        cut.map_err(|e| Error::from_io(format!("cut the torn end of the journal {path}"), &e))
    }
}
