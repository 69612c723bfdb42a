//! The possible contents of a file that several clients change concurrently.
//!
//! Every change and every read begins and ends at moments of one order. A read may find at an offset the
//! bytes of a change that began before the read ended, unless another one that must be present lay wholly
//! after that change and wholly before the read. The same holds for sizes, and for appended records: each is
//! present once, as a whole, and after the earlier ones of its writer. Knows nothing of clients except which
//! may have lost changes.

use crate::model::{Who, bytes_of, pattern};
use std::collections::BTreeMap;
use weir_env::Instant;

/// Incremented with each beginning and each end.
pub type Moment = u64;

/// Operation, length and a check of both; then bytes of the operation.
pub const HEADER_BYTES: usize = 8;
/// Number of offsets listed with a mismatch.
const SHOWN: usize = 12;

/// A kind of change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Did {
    Write {
        offset: u64,
        len: u64,
    },
    /// `grows`: the file then reaches at least the end of the range.
    Zero {
        offset: u64,
        len: u64,
        grows: bool,
    },
    /// The file gets at least this size.
    Grow {
        len: u64,
    },
    /// The file gets this size.
    Size {
        len: u64,
    },
    /// A record at the end of the file.
    Append {
        len: u64,
    },
}

impl Did {
    /// The byte that it leaves at `offset`.
    fn leaves(&self, op: u64, offset: u64) -> Option<u8> {
        match *self {
            Did::Write { offset: from, len } => {
                (from..from + len).contains(&offset).then(|| pattern(op, offset))
            }
            Did::Zero { offset: from, len, .. } => (from..from + len).contains(&offset).then_some(0),
            Did::Size { len } => (offset >= len).then_some(0),
            Did::Grow { .. } | Did::Append { .. } => None,
        }
    }
    /// The least size of the file after the change.
    fn end(&self) -> u64 {
        match *self {
            Did::Write { offset, len } | Did::Zero { offset, len, grows: true } => offset + len,
            Did::Grow { len } | Did::Size { len } => len,
            Did::Zero { grows: false, .. } | Did::Append { .. } => 0,
        }
    }
}

/// The process that makes a change, and its client's state at the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Writer {
    pub who: Who,
    /// Its number among all.
    pub process: usize,
    /// Its client is not cut off: no silence had begun that may end its session.
    pub sure: bool,
    pub at: Instant,
}

#[derive(Clone, Debug)]
struct Change {
    op: u64,
    writer: Writer,
    did: Did,
    begun: Moment,
    ended: Option<Moment>,
    /// An `fsync` or `close` succeeded after it.
    safe: bool,
    /// Its client has got an error since.
    doubted: bool,
}

impl Change {
    /// It ended before the other one began.
    fn is_before(&self, other: &Change) -> bool {
        self.ended.is_some_and(|ended| ended < other.begun)
    }
}

/// The duration of a read, and which clients may have lost changes by then.
#[derive(Clone, Copy)]
pub struct ReadSpan<'a> {
    pub from: Moment,
    pub to: Moment,
    pub may_have_lost: &'a dyn Fn(&Writer) -> bool,
}

impl ReadSpan<'_> {
    fn may_show(&self, change: &Change) -> bool {
        change.begun <= self.to
    }
    fn may_be_lost(&self, change: &Change) -> bool {
        !change.safe && (change.doubted || !change.writer.sure || (self.may_have_lost)(&change.writer))
    }
    /// The change was complete before the read began.
    fn must_show(&self, change: &Change) -> bool {
        change.ended.is_some_and(|ended| ended < self.from) && !self.may_be_lost(change)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Changes {
    all: Vec<Change>,
    /// Records are appended from here on; `None`: the file has no appends.
    log_from: Option<u64>,
}

impl Changes {
    pub fn new(log_from: Option<u64>) -> Changes {
        Changes { all: Vec::new(), log_from }
    }

    pub fn begin(&mut self, op: u64, writer: Writer, did: Did, now: Moment) {
        self.all.push(Change { op, writer, did, begun: now, ended: None, safe: false, doubted: false });
    }
    pub fn done(&mut self, op: u64, now: Moment) {
        let change = self.all.iter_mut().rfind(|c| c.op == op).expect("it began");
        change.ended = Some(now);
    }

    /// An `fsync` or `close` that `who` began at `began` succeeded. It does not cover changes whose loss was
    /// reported earlier, or from before its client was cut off.
    pub fn synced(&mut self, who: Who, began: Moment) {
        let covered = |c: &&mut Change| c.writer.who == who && c.ended.is_some_and(|ended| ended < began);
        self.all.iter_mut().filter(covered).for_each(|c| c.safe |= c.writer.sure && !c.doubted);
    }
    /// An operation of `client` ended with an error.
    pub fn doubt(&mut self, client: usize) {
        self.all.iter_mut().filter(|c| c.writer.who.client == client).for_each(|c| c.doubted = true);
    }

    /// `got` is the whole file.
    pub fn check(&self, span: &ReadSpan<'_>, got: &[u8]) -> Result<(), String> {
        self.check_bytes(span, &got[..got.len().min(self.log_from.unwrap_or(u64::MAX) as usize)])?;
        match self.log_from {
            Some(from) => self.check_log(span, from, got),
            None => self.check_size(span, got.len() as u64),
        }
    }

    fn check_bytes(&self, span: &ReadSpan<'_>, got: &[u8]) -> Result<(), String> {
        let shown: Vec<&Change> = self.all.iter().filter(|c| span.may_show(c)).collect();
        let mut edges: Vec<u64> = vec![0, got.len() as u64];
        for c in &shown {
            match c.did {
                Did::Write { offset, len } | Did::Zero { offset, len, .. } => {
                    edges.extend([offset, offset + len]);
                }
                Did::Size { len } => edges.push(len),
                Did::Grow { .. } | Did::Append { .. } => {}
            }
        }
        edges.retain(|edge| *edge <= got.len() as u64);
        edges.sort_unstable();
        edges.dedup();
        for range in edges.windows(2) {
            let touching: Vec<&Change> =
                shown.iter().copied().filter(|c| c.did.leaves(c.op, range[0]).is_some()).collect();
            let last: Vec<&Change> = touching.iter().copied().filter(|c| span.must_show(c)).collect();
            let may_be: Vec<&Change> =
                touching.iter().copied().filter(|c| !last.iter().any(|l| c.is_before(l))).collect();
            for offset in range[0]..range[1] {
                let byte = got[offset as usize];
                let is_never_written = last.is_empty() && byte == 0;
                if !is_never_written && !may_be.iter().any(|c| c.did.leaves(c.op, offset) == Some(byte)) {
                    let end = got.len().min(offset as usize + SHOWN);
                    return Err(format!(
                        "{:?} at {offset} of {} ({}), moments {} to {}; it may be of {:?}\n{}",
                        &got[offset as usize..end],
                        got.len(),
                        self.origin(offset, &got[offset as usize..end]),
                        span.from,
                        span.to,
                        may_be.iter().map(|c| c.op).collect::<Vec<_>>(),
                        self.tail(span, |did| did.leaves(1, offset).is_some())
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that the size is between the least and the largest possible one.
    pub fn check_size(&self, span: &ReadSpan<'_>, size: u64) -> Result<(), String> {
        if self.log_from.is_some() {
            return Ok(());
        }
        let shown = || self.all.iter().filter(|c| span.may_show(c));
        let truncations_below =
            |end: u64| shown().filter(move |c| matches!(c.did, Did::Size { len } if len < end));
        let may_be = |c: &&Change| {
            !truncations_below(c.did.end())
                .any(|truncation| span.must_show(truncation) && c.is_before(truncation))
        };
        let must_be = |c: &&Change| {
            span.must_show(c) && truncations_below(c.did.end()).all(|truncation| truncation.is_before(c))
        };
        let most = shown().filter(may_be).map(|c| c.did.end()).max().unwrap_or(0);
        let least = shown().filter(must_be).map(|c| c.did.end()).max().unwrap_or(0);
        if (least..=most).contains(&size) {
            return Ok(());
        }
        let resizes = |did: &Did| did.end() > 0 || matches!(did, Did::Size { .. });
        Err(format!(
            "a size of {size} cannot be, {least} to {most} can, moments {} to {}\n{}",
            span.from,
            span.to,
            self.tail(span, resizes)
        ))
    }

    fn check_log(&self, span: &ReadSpan<'_>, from: u64, got: &[u8]) -> Result<(), String> {
        let is_truncation = |c: &&Change| matches!(c.did, Did::Size { .. }) && span.may_show(c);
        let truncations: Vec<&Change> = self.all.iter().filter(is_truncation).collect();
        // A change that was partly lost may have left anything there; a read during a cut may have seen some
        // bytes of both.
        let may_be_partial = self.all.iter().any(|c| span.may_show(c) && span.may_be_lost(c))
            || truncations.iter().any(|c| c.ended.is_none_or(|ended| ended >= span.from));
        let fail = |what: String| {
            let records = |did: &Did| matches!(did, Did::Append { .. } | Did::Size { .. });
            let moments = format!("moments {} to {}", span.from, span.to);
            Err(format!("{what}, {moments}\n{}", self.tail(span, records)))
        };
        let mut found: BTreeMap<u64, usize> = BTreeMap::new();
        let mut last_of: BTreeMap<usize, u64> = BTreeMap::new();
        let mut at = from as usize;
        while at < got.len() {
            let record = record_at(&got[at..]).and_then(|(op, len)| {
                let is_it = |c: &&Change| c.op == op && c.did == Did::Append { len: len as u64 };
                self.all.iter().find(is_it).filter(|_| got[at..].starts_with(&record(op, len)))
            });
            let Some(change) = record else {
                if may_be_partial {
                    at += 1;
                    continue;
                }
                let end = got.len().min(at + SHOWN);
                return fail(format!("no whole record at {at} of {}: {:?}", got.len(), &got[at..end]));
            };
            if let Some(first) = found.insert(change.op, at) {
                return fail(format!("the record of operation {} is at {first} and at {at}", change.op));
            }
            let is_truncated = truncations
                .iter()
                .any(|truncation| span.must_show(truncation) && change.is_before(truncation));
            if !span.may_show(change) || is_truncated && !may_be_partial {
                return fail(format!("the record of operation {} at {at} cannot be there", change.op));
            }
            if !span.may_be_lost(change) {
                let last = last_of.insert(change.writer.process, change.op);
                if last.is_some_and(|last| last > change.op) {
                    return fail(format!(
                        "the record of operation {} at {at} is behind a later one",
                        change.op
                    ));
                }
            }
            let Did::Append { len } = change.did else { unreachable!("only these are records") };
            at += len as usize;
        }
        let must_be = |c: &&Change| {
            matches!(c.did, Did::Append { .. })
                && span.must_show(c)
                && truncations.iter().all(|truncation| truncation.is_before(c))
        };
        match self.all.iter().filter(must_be).find(|c| !found.contains_key(&c.op)) {
            Some(lost) => {
                fail(format!("the record of operation {} is not among {} bytes", lost.op, got.len()))
            }
            None => Ok(()),
        }
    }

    /// The change that these bytes are from.
    fn origin(&self, offset: u64, bytes: &[u8]) -> String {
        if bytes.iter().all(|b| *b == 0) {
            return "zeros".into();
        }
        let wrote = |c: &&Change| (offset..).zip(bytes).all(|(at, b)| pattern(c.op, at) == *b);
        let found = self.all.iter().rev().find(wrote);
        found.map_or("of several operations or none".into(), |c| format!("of operation {}", c.op))
    }

    /// The last changes of a kind.
    fn tail(&self, span: &ReadSpan<'_>, is_shown: impl Fn(&Did) -> bool) -> String {
        let line = |c: &Change| {
            let who = c.writer.who.client;
            let lost = if span.may_be_lost(c) { ", may be lost" } else { "" };
            format!("  operation {}: c{who} {:?} from {} to {:?}{lost}", c.op, c.did, c.begun, c.ended)
        };
        let lines: Vec<String> = self.all.iter().filter(|c| is_shown(&c.did)).map(line).collect();
        lines[lines.len().saturating_sub(24)..].join("\n")
    }
}

/// The record that operation `op` appends.
pub fn record(op: u64, len: usize) -> Vec<u8> {
    let (op4, len2) = ((op as u32).to_le_bytes(), (len as u16).to_le_bytes());
    let mut bytes = [&op4[..], &len2[..], &check_of(op, len)[..]].concat();
    bytes.extend(bytes_of(op, 0, len - HEADER_BYTES));
    bytes
}

fn check_of(op: u64, len: usize) -> [u8; 2] {
    let bytes = bytes_of(op ^ (len as u64) << 32, 0, 2);
    [bytes[0], bytes[1]]
}

/// Operation and length, if a record may begin here.
fn record_at(bytes: &[u8]) -> Option<(u64, usize)> {
    let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let op = u64::from(u32::from_le_bytes([header[0], header[1], header[2], header[3]]));
    let len = usize::from(u16::from_le_bytes([header[4], header[5]]));
    (len >= HEADER_BYTES && check_of(op, len) == header[6..]).then_some((op, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(process: usize) -> Writer {
        let who = Who { client: process, life: 1, cuts: 0 };
        Writer { who, process, sure: true, at: Instant(0) }
    }
    fn span(from: Moment, to: Moment) -> ReadSpan<'static> {
        ReadSpan { from, to, may_have_lost: &|_| false }
    }
    /// Operation `n + 1` is the `n`-th of these, with its beginning and its end; each of a process of its
    /// own.
    fn file(log_from: Option<u64>, changes: &[(Did, Moment, Moment)]) -> Changes {
        let mut file = Changes::new(log_from);
        for (op, (did, begun, ended)) in (1..).zip(changes) {
            file.begin(op, writer(op as usize), *did, *begun);
            file.done(op, *ended);
        }
        file
    }

    #[test]
    fn a_byte_is_of_the_last_write_or_of_a_concurrent_one() {
        let write = Did::Write { offset: 0, len: 10 };
        let file = file(None, &[(write, 1, 2), (write, 3, 6), (write, 4, 7)]);
        for (from, to, may) in [(8, 9, [0, 1, 1]), (5, 9, [1, 1, 1]), (2, 2, [1, 0, 0]), (2, 3, [1, 1, 0])] {
            for op in 1..=3 {
                let is_fine = file.check(&span(from, to), &bytes_of(op, 0, 10)).is_ok();
                assert_eq!(is_fine, may[op as usize - 1] == 1, "operation {op}, {from} to {to}");
            }
        }
        assert!(file.check(&span(8, 9), &[0; 10]).is_err(), "zeros");
        assert!(file.check(&span(0, 1), &[0; 10]).is_ok(), "not written yet");
    }

    #[test]
    fn a_file_is_as_long_as_the_last_that_made_it_so() {
        let (grow, truncation) = (Did::Grow { len: 100 }, Did::Size { len: 10 });
        let file = file(None, &[(grow, 1, 2), (truncation, 4, 8), (Did::Grow { len: 50 }, 6, 7)]);
        for (from, to, least, most) in [(3, 3, 100, 100), (9, 9, 10, 50), (5, 5, 10, 100), (1, 1, 0, 100)] {
            for size in [least, most] {
                assert!(file.check_size(&span(from, to), size).is_ok(), "{size}, {from} to {to}");
            }
            let lower = least > 10 && file.check_size(&span(from, to), least - 1).is_ok();
            assert!(!lower && file.check_size(&span(from, to), most + 1).is_err(), "{from} to {to}");
        }
    }

    #[test]
    fn zeros_are_of_a_hole_or_a_truncation() {
        let hole = Did::Zero { offset: 2, len: 3, grows: false };
        let (write, grow) = (Did::Write { offset: 0, len: 10 }, Did::Grow { len: 10 });
        let file = file(None, &[(write, 1, 2), (hole, 3, 4), (Did::Size { len: 8 }, 5, 6), (grow, 7, 8)]);
        let mut bytes = bytes_of(1, 0, 10);
        assert!(file.check(&span(9, 9), &bytes).is_err());
        bytes[2..5].fill(0);
        assert!(file.check(&span(9, 9), &bytes).is_err());
        bytes[8..].fill(0);
        assert!(file.check(&span(9, 9), &bytes).is_ok());
        bytes[7] = 0;
        assert!(file.check(&span(9, 9), &bytes).is_err());
    }

    #[test]
    fn unsynced_bytes_of_a_lost_client_may_be_missing() {
        let mut file = file(None, &[(Did::Write { offset: 0, len: 4 }, 1, 2)]);
        let lossy = ReadSpan { may_have_lost: &|_| true, ..span(9, 9) };
        assert!(file.check(&lossy, &[]).is_ok() && file.check(&lossy, &bytes_of(1, 0, 4)).is_ok());
        assert!(file.check(&span(9, 9), &[]).is_err());
        file.synced(writer(1).who, 2);
        assert!(file.check(&lossy, &[]).is_ok(), "the sync began too early");
        file.synced(writer(1).who, 3);
        assert!(file.check(&lossy, &[]).is_err());
    }

    #[test]
    fn records_are_once_whole_and_in_their_writers_order() {
        let append = Did::Append { len: 20 };
        let mut file = file(Some(3), &[(Did::Write { offset: 0, len: 3 }, 1, 2)]);
        for (op, process, begun, ended) in [(2, 0, 3, 4), (3, 1, 3, 8), (4, 0, 5, 6), (5, 0, 20, 21)] {
            file.begin(op, writer(process), append, begun);
            file.done(op, ended);
        }
        let all = |ops: &[u64]| ops.iter().fold(bytes_of(1, 0, 3), |all, op| [all, record(*op, 20)].concat());
        for ops in [&[2, 3, 4][..], &[3, 2, 4], &[2, 4, 3]] {
            assert!(file.check(&span(9, 9), &all(ops)).is_ok(), "{ops:?}");
        }
        for ops in [&[2, 4][..], &[2, 3], &[4, 2, 3], &[2, 3, 4, 3], &[2, 3, 4, 5]] {
            assert!(file.check(&span(9, 9), &all(ops)).is_err(), "{ops:?}");
        }
        assert!(file.check(&span(7, 7), &all(&[2, 4])).is_ok(), "one is in flight");
        let mut partial = all(&[2, 3, 4]);
        partial[40] = 0;
        assert!(file.check(&span(9, 9), &partial).is_err());
        assert!(file.check(&span(9, 9), &partial[..39]).is_err());
        file.begin(6, writer(0), Did::Size { len: 3 }, 10);
        file.done(6, 11);
        assert!(file.check(&span(12, 12), &all(&[])).is_ok(), "cut off");
        assert!(file.check(&span(12, 12), &all(&[2])).is_err(), "cut off, and still there");
    }
}
