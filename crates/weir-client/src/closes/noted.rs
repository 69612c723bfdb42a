//! Closes that the leader does not know of yet, and those that it need not know of: they serve the next open.
//!
//! Invariants: each is in one of the lists once; all are of the connection on which the leader counts them.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::InodeId;
use weir_proto::meta::{CLOSED_MAX, Closed};

/// From this number on they are reported without delay.
const NOTED_MAX: usize = 64;
/// A close after reading is kept for the next open for one to two of these. So the leader does not count a
/// file that was read once as open for ever.
const KEPT: Duration = Duration::from_secs(30);
/// Most closes that are kept: each takes some 40 bytes here, and at the leader no more than its file's lease.
const KEPT_MAX: usize = 16 * 1024;
/// Tasks that report closes at the same time, each in messages of many: while a leader does not answer, no
/// more begin.
const REPORTERS_MAX: usize = 4;

#[derive(Default)]
pub struct Noted {
    /// The connection on which the leader counts the opens.
    connection: u64,
    /// Read and write opens of each.
    files: BTreeMap<InodeId, (u32, u32)>,
    /// Reads that are kept for the next opens, and those of the previous period.
    kept: BTreeMap<InodeId, u32>,
    older: BTreeMap<InodeId, u32>,
    /// The time at which `kept` was begun.
    kept_since: Option<Instant>,
    /// A report is scheduled.
    alarmed: bool,
    /// Tasks that report, or are about to.
    reporters: usize,
}

impl Noted {
    pub fn has(&self, ino: InodeId) -> bool {
        [&self.kept, &self.older].iter().any(|kept| kept.contains_key(&ino)) || self.files.contains_key(&ino)
    }
    /// The kept closes of a file are to be reported.
    pub fn let_go(&mut self, ino: InodeId) {
        let reads = self.kept.remove(&ino).unwrap_or(0) + self.older.remove(&ino).unwrap_or(0);
        if reads > 0 {
            self.files.entry(ino).or_default().0 += reads;
        }
    }
    pub fn let_older_go(&mut self) {
        for (ino, reads) in std::mem::take(&mut self.older) {
            self.files.entry(ino).or_default().0 += reads;
        }
        self.older = std::mem::take(&mut self.kept);
    }
    /// Takes back one unreported close of a reader.
    pub fn take_read(&mut self, ino: InodeId) -> bool {
        for kept in [&mut self.kept, &mut self.older] {
            if let Some(reads) = kept.get_mut(&ino) {
                *reads -= 1;
                if *reads == 0 {
                    kept.remove(&ino);
                }
                return true;
            }
        }
        false
    }

    pub fn take(&mut self, is_kept: impl Fn(InodeId) -> bool) -> Vec<Closed> {
        let noted = self.files.iter().filter(|(ino, _)| !is_kept(**ino)).take(CLOSED_MAX);
        let taken: Vec<Closed> = noted
            .map(|(ino, (reads, writes))| Closed { ino: *ino, reads: *reads, writes: *writes })
            .collect();
        for file in &taken {
            self.files.remove(&file.ino);
        }
        taken
    }
    /// Counts from a new connection on.
    pub fn begin(&mut self, connection: u64) {
        *self = Noted { connection, reporters: self.reporters, ..Noted::default() };
    }
    pub fn is_of(&self, connection: u64) -> bool {
        self.connection == connection
    }
    pub fn has_file(&self, ino: InodeId) -> bool {
        self.files.contains_key(&ino)
    }
    /// An open for reading ended, and may serve the next one. True: old kept closes are to be reported.
    pub fn keep_read(&mut self, ino: InodeId, now: Instant) -> bool {
        *self.kept.entry(ino).or_default() += 1;
        let since = *self.kept_since.get_or_insert(now);
        let due = self.kept.len() >= KEPT_MAX / 2 || now.since(since) >= KEPT;
        if due {
            self.kept_since = Some(now);
            self.let_older_go();
        }
        due
    }
    /// Old kept closes, if there are any, are to be reported.
    pub fn let_old_go(&mut self, now: Instant) -> bool {
        let due = self.kept_since.is_some_and(|since| now.since(since) >= KEPT);
        if due {
            self.let_older_go();
            self.kept_since = (!self.older.is_empty()).then_some(now);
        }
        due && !self.files.is_empty()
    }
    pub fn add(&mut self, ino: InodeId, reads: u32, writes: u32) {
        if reads + writes == 0 {
            return; // opened for neither: the leader counts nothing
        }
        let of_file = self.files.entry(ino).or_default();
        *of_file = (of_file.0 + reads, of_file.1 + writes);
    }
    /// When the noted closes have to be reported. `None`: there are none.
    pub fn alarm(&mut self, pressing: bool) -> Option<Alarm> {
        if self.files.is_empty() {
            return None;
        }
        let pressing = pressing || self.files.len() >= NOTED_MAX;
        let is_new = !std::mem::replace(&mut self.alarmed, true);
        let begins = (pressing || is_new) && self.reporters < REPORTERS_MAX;
        self.reporters += usize::from(begins);
        begins.then_some(Alarm { pressing })
    }
    /// A task that began with an alarm ends: a close that is noted from now on has another alarm.
    pub fn end_reporter(&mut self) {
        assert!(self.reporters > 0, "a reporter that ends has begun");
        self.alarmed = false;
        self.reporters -= 1;
    }
    pub fn end_alarm(&mut self) {
        self.alarmed = false;
    }

    /// Panics where an invariant of this table does not hold.
    pub fn check(&self) {
        assert!(self.files.values().all(|(reads, writes)| reads + writes > 0), "a close is of an open");
        assert!(self.reporters <= REPORTERS_MAX, "few tasks report");
        assert!([&self.kept, &self.older].iter().all(|kept| kept.values().all(|reads| *reads > 0)));
    }
}

/// The noted closes have to be reported, at once or soon.
pub struct Alarm {
    pub pressing: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_closes_have_few_reporters() {
        let mut noted = Noted::default();
        let close = |noted: &mut Noted, n| {
            noted.add(InodeId(n), 1, 0);
            noted.check();
            noted.alarm(true).is_some()
        };
        let begun = (1..=10_000).filter(|n| close(&mut noted, *n)).count();
        assert_eq!(begun, REPORTERS_MAX, "while none of them gets an answer");
        noted.begin(7);
        assert!(!close(&mut noted, 1), "they report on the next connection, too");
        let mut reported = 0;
        loop {
            noted.end_alarm();
            match noted.take(|_| false).len() {
                0 => break noted.end_reporter(),
                some => reported += some,
            }
        }
        assert_eq!(reported, 1, "a resume has named the others");
        assert!(close(&mut noted, 2), "the next one has a reporter again");
        assert!(!close(&mut noted, 3));
    }
}
