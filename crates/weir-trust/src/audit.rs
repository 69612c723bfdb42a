//! The audit log: requests, their senders and their outcomes, as lines of JSON in a hash chain.
//!
//! Each line holds the checksum of the previous line and its own (`docs/format.md`), so a line that was
//! changed, removed, moved or truncated is detected. Lines removed at the end are detected only by comparison
//! with a last number and checksum that were kept elsewhere. There is no key: a program that can write the
//! file can write a whole new chain.
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

/// Between the checksummed part of a line and its checksum.
const SEAL: &str = ",\"hash\":\"";
/// The seal, 64 hexadecimal digits, and what closes the string and the object.
const SEAL_BYTES: usize = SEAL.len() + 64 + 2;
/// Longest text of a field; longer ones are cut. A line stays one line, for any content of a request.
const TEXT_BYTES_MAX: usize = 1000;

/// An event without a place in the chain yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Nanoseconds since 1970.
    pub time_ns: i64,
    /// The caller's own name, as it claims.
    pub node: String,
    /// The address it connected from.
    pub from: String,
    /// Its role, if verified.
    pub role: String,
    /// The user of the request, if known.
    pub uid: Option<u32>,
    /// The request.
    pub what: String,
    /// The affected node, target, volume or relation.
    pub on: String,
    pub result: Outcome,
    /// Number of further equal events, which are not written one by one.
    pub again: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    /// The caller lacks the permission.
    Refused(String),
    Failed(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("ok"),
            Outcome::Refused(why) => write!(f, "refused: {why}"),
            Outcome::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// The end of a chain so far: the number and the checksum of its last line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Head {
    pub number: u64,
    pub hash: Hash,
}

/// SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Hash([u8; 32]);

impl Hash {
    fn of(bytes: &[u8]) -> Hash {
        Hash(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A line's fields, in their order. The checksum of the line follows them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub number: u64,
    /// RFC 3339 in UTC with milliseconds: sorts as text.
    pub time: String,
    pub node: String,
    pub from: String,
    pub role: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    pub what: String,
    pub on: String,
    pub result: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub again: u64,
    pub prev: String,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Appends a record to the chain: its line, without the line's end.
pub fn seal(head: &mut Head, record: &Record) -> String {
    let number = head.number + 1;
    let entry = Entry {
        number,
        time: time(record.time_ns),
        node: truncated(&record.node),
        from: truncated(&record.from),
        role: record.role.clone(),
        uid: record.uid,
        what: record.what.clone(),
        on: truncated(&record.on),
        result: truncated(&record.result.to_string()),
        again: record.again,
        prev: head.hash.to_string(),
    };
    let mut line = serde_json::to_string(&entry).expect("texts and numbers are JSON");
    line.truncate(line.len() - 1); // the object continues
    let hash = Hash::of(line.as_bytes());
    line += &format!("{SEAL}{hash}\"}}");
    *head = Head { number, hash };
    line
}

/// Formats a time as in [`Entry::time`].
pub fn time(time_ns: i64) -> String {
    let at = jiff::Timestamp::from_nanosecond(time_ns.into()).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    format!("{at:.3}")
}

fn truncated(text: &str) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text.to_owned();
    }
    let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}…", &text[..end])
}

/// The fault of a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It is not a complete record.
    Truncated,
    /// It differs from the line that was written.
    Changed,
    /// Records before it are missing.
    Missing { first: u64, last: u64 },
    /// It is in the wrong place.
    Misplaced { number: u64, expected: u64 },
    /// Its number follows, but the previous line is not the one from when it was written.
    Unlinked,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Truncated => f.write_str("the line is not a whole record"),
            Fault::Changed => f.write_str("the line was changed: its checksum does not match"),
            Fault::Missing { first, last } if first == last => {
                write!(f, "record {first} is missing before it")
            }
            Fault::Missing { first, last } => {
                write!(f, "records {first} to {last} are missing before it")
            }
            Fault::Misplaced { number, expected } => {
                write!(f, "record {number} is in the wrong place: {expected} was expected")
            }
            Fault::Unlinked => f.write_str("the line before it was replaced"),
        }
    }
}

/// The record of a single line, and the head after it. `prev` and `number` are not checked.
pub fn open(line: &[u8]) -> Result<(Entry, Head), Fault> {
    let at = line.len().checked_sub(SEAL_BYTES).ok_or(Fault::Truncated)?;
    let (sealed, seal) = line.split_at(at);
    let hash = Hash::of(sealed);
    if seal != format!("{SEAL}{hash}\"}}").as_bytes() {
        let is_whole = line.starts_with(b"{") && line.ends_with(b"\"}");
        return Err(if is_whole { Fault::Changed } else { Fault::Truncated });
    }
    let object = [sealed, b"}"].concat();
    let entry: Entry = serde_json::from_slice(&object).map_err(|_| Fault::Changed)?;
    let head = Head { number: entry.number, hash };
    Ok((entry, head))
}

/// The head after these complete lines. Also after a damaged line: [`Checker`] reports that.
pub fn resume(lines: &[u8]) -> Head {
    let lines = lines.split(|b| *b == b'\n').rev().filter(|line| !line.is_empty());
    let mut damaged = 0;
    for line in lines {
        match open(line) {
            Ok((_, head)) if damaged == 0 => return head,
            Ok((_, head)) => return Head { number: head.number + damaged, hash: Hash::default() },
            Err(_) => damaged += 1,
        }
    }
    Head { number: damaged, hash: Hash::default() }
}

/// Checks a chain line by line, over any number of files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Checker {
    head: Option<Head>,
}

impl Checker {
    /// The next line of the chain. The first one may have any number, because old files are removed.
    pub fn take(&mut self, line: &[u8]) -> Result<Entry, Fault> {
        let (entry, head) = open(line)?;
        let start = (entry.number == 1).then(Head::default);
        if let Some(before) = self.head.or(start) {
            follows(&entry, &before)?;
        }
        self.head = Some(head);
        Ok(entry)
    }

    /// The last checked line.
    pub fn head(&self) -> Option<Head> {
        self.head
    }
}

fn follows(entry: &Entry, before: &Head) -> Result<(), Fault> {
    let (number, expected) = (entry.number, before.number + 1);
    if number > expected {
        return Err(Fault::Missing { first: expected, last: number - 1 });
    }
    if number < expected {
        return Err(Fault::Misplaced { number, expected });
    }
    match entry.prev == before.hash.to_string() {
        true => Ok(()),
        false => Err(Fault::Unlinked),
    }
}

/// The end of a chain, or the first invalid line (from 1) and its fault.
pub fn verify<'a>(lines: impl IntoIterator<Item = &'a [u8]>) -> Result<Head, (usize, Fault)> {
    let mut checker = Checker::default();
    for (i, line) in lines.into_iter().enumerate() {
        checker.take(line).map_err(|fault| (i + 1, fault))?;
    }
    Ok(checker.head().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(n: u32) -> Record {
        Record {
            time_ns: 1_795_000_000_123_456_789 + i64::from(n) * 1_000_000_000,
            node: "weir volume".into(),
            from: "tcp:10.0.0.9:41000".into(),
            role: "console".into(),
            uid: Some(n),
            what: "VolumeDelete".into(),
            on: format!("volume {n}, with \"quotes\" and\nlines"),
            result: Outcome::Refused("only the superuser".into()),
            again: 0,
        }
    }

    fn chain(count: u32) -> Vec<String> {
        let mut head = Head::default();
        (1..=count).map(|n| seal(&mut head, &record(n))).collect()
    }

    fn found(lines: &[String]) -> Result<u64, (usize, Fault)> {
        verify(lines.iter().map(|l| l.as_bytes())).map(|head| head.number)
    }

    #[test]
    fn a_chain_as_it_was_written_is_whole() {
        assert_eq!(found(&[]), Ok(0));
        assert_eq!(found(&chain(5)), Ok(5));
        assert!(chain(3).iter().all(|line| !line.contains('\n')));
    }

    #[test]
    fn a_rest_of_a_chain_is_whole() {
        assert_eq!(found(&chain(5)[2..]), Ok(5));
    }

    #[test]
    fn every_changed_byte_is_found() {
        let lines = chain(3);
        for n in 0..lines.len() {
            for at in 0..lines[n].len() {
                let mut bytes: Vec<Vec<u8>> = lines.iter().map(|l| l.as_bytes().to_vec()).collect();
                bytes[n][at] ^= 1;
                let fault = verify(bytes.iter().map(Vec::as_slice)).unwrap_err();
                assert_eq!(fault.0, n + 1, "byte {at} of line {n}: {fault:?}");
                assert!(matches!(fault.1, Fault::Changed | Fault::Truncated), "{fault:?}");
            }
        }
    }

    #[test]
    fn a_dropped_line_is_found() {
        let mut lines = chain(5);
        lines.remove(2);
        assert_eq!(found(&lines), Err((3, Fault::Missing { first: 3, last: 3 })));
        let mut lines = chain(5);
        lines.drain(1..3);
        assert_eq!(found(&lines), Err((2, Fault::Missing { first: 2, last: 3 })));
    }

    #[test]
    fn swapped_and_repeated_lines_are_found() {
        let mut lines = chain(4);
        lines.swap(1, 2);
        assert_eq!(found(&lines), Err((2, Fault::Missing { first: 2, last: 2 })));
        let mut lines = chain(4);
        lines.insert(2, lines[1].clone());
        assert_eq!(found(&lines), Err((3, Fault::Misplaced { number: 2, expected: 3 })));
    }

    #[test]
    fn a_truncated_line_is_found() {
        let lines = chain(3);
        for len in 0..lines[2].len() {
            let mut truncated = lines.clone();
            truncated[2].truncate(len);
            let (line, fault) = found(&truncated).unwrap_err();
            assert!(line == 3 && matches!(fault, Fault::Truncated | Fault::Changed), "{len}: {fault:?}");
        }
        let mut truncated = lines.clone();
        truncated[0].truncate(20);
        assert_eq!(found(&truncated), Err((1, Fault::Truncated)));
    }

    #[test]
    fn a_replaced_line_is_found_by_the_next_one() {
        let mut lines = chain(3);
        let mut head = open(lines[0].as_bytes()).unwrap().1;
        lines[1] = seal(&mut head, &Record { result: Outcome::Done, ..record(2) });
        assert_eq!(found(&lines), Err((3, Fault::Unlinked)));
        // The first one has no predecessor.
        let mut head = Head { number: 0, hash: Hash::of(b"another chain") };
        assert_eq!(found(&[seal(&mut head, &record(1))]), Err((1, Fault::Unlinked)));
    }

    #[test]
    fn a_chain_is_resumed_behind_its_last_line() {
        let lines = chain(3);
        let whole = lines.join("\n") + "\n";
        let (_, head) = open(lines[2].as_bytes()).unwrap();
        assert_eq!((resume(whole.as_bytes()), resume(b"")), (head, Head::default()));
        let damaged = format!("{}\n{}\n", lines[1], lines[2].replace("refused", "allowed"));
        assert_eq!(resume(damaged.as_bytes()).number, 3);
    }

    #[test]
    fn long_texts_are_truncated_between_characters() {
        let record = Record { on: "ä".repeat(5000), ..record(1) };
        let line = seal(&mut Head::default(), &record);
        let (entry, _) = open(line.as_bytes()).unwrap();
        assert!(entry.on.len() <= TEXT_BYTES_MAX + 3 && entry.on.ends_with("ä…"));
    }

    /// The format on disk: later versions can read it.
    #[test]
    fn a_line_is_as_it_was() {
        let record = Record {
            time_ns: 1_795_000_000_123_456_789,
            node: "weir target".into(),
            from: "unix".into(),
            role: "user".into(),
            uid: Some(1000),
            what: "ClearTarget".into(),
            on: "t3".into(),
            result: Outcome::Done,
            again: 2,
        };
        let line = seal(&mut Head::default(), &record);
        let zeros = "0".repeat(64);
        let sealed = format!(
            r#"{{"number":1,"time":"2026-11-18T11:06:40.123Z","node":"weir target","from":"unix","role":"user","uid":1000,"what":"ClearTarget","on":"t3","result":"ok","again":2,"prev":"{zeros}""#
        );
        assert_eq!(line, format!("{sealed},\"hash\":\"{}\"}}", Hash::of(sealed.as_bytes())));
        // printf '%s' '{"number":1,…' | sha256sum
        assert!(
            line.ends_with("6548084bfecd1ded035a7d5ec8b2f77883e59835ef4f918f98262b33c2292a19\"}"),
            "{line}"
        );
    }
}
