//! The leader's epoch of each record of a journal, and how far two journals hold the same records.
//!
//! An epoch has one leader, and a leader writes each number once: two records of one number and one epoch are
//! the same, and so is everything before them. Records up to `start` are not distinguished: they were durable
//! in every copy.
//!
//! Knows nothing of the records' content.

use crate::CommitSeq;
use weir_proto::{Epoch, Error, Result};

/// Number of changes of leaders within one kept journal; more would not be a healthy system, and would make a
/// long message.
pub const RUNS_MAX: usize = 1024;

/// Consecutive records of one epoch, up to `last`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Run {
    pub epoch: Epoch,
    pub last: CommitSeq,
}

/// The epochs of a journal's records from `start` on.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Epochs {
    /// Older records are not distinguished any more. Its epoch is known.
    start: CommitSeq,
    start_epoch: Epoch,
    runs: Vec<Run>,
}

/// How far two journals hold the same records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shared {
    /// Up to this record; they differ after it, or one of them ends there.
    UpTo(CommitSeq),
    /// One journal ends, or diverges, before the other one's first known record: unknown.
    TooOld,
}

impl Epochs {
    pub fn new(start: CommitSeq, start_epoch: Epoch) -> Epochs {
        Epochs { start, start_epoch, runs: Vec::new() }
    }

    /// From another node's message: checks the order and the number.
    pub fn from_runs(start: CommitSeq, start_epoch: Epoch, runs: Vec<Run>) -> Result<Epochs> {
        if runs.len() > RUNS_MAX {
            return Err(Error::invalid(format!(
                "{} runs of epochs; at most {RUNS_MAX} are possible",
                runs.len()
            )));
        }
        let mut before = Run { epoch: start_epoch, last: start };
        for (i, run) in runs.iter().enumerate() {
            let goes_on = run.epoch > before.epoch || i == 0 && run.epoch == before.epoch;
            if !goes_on || run.last <= before.last {
                let (e, l) = (run.epoch, run.last.0);
                return Err(Error::invalid(format!("the records up to {l} of epoch {e} are out of order")));
            }
            before = *run;
        }
        Ok(Epochs { start, start_epoch, runs })
    }

    pub fn start(&self) -> CommitSeq {
        self.start
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub fn start_epoch(&self) -> Epoch {
        self.start_epoch
    }

    pub fn last(&self) -> CommitSeq {
        self.runs.last().map_or(self.start, |run| run.last)
    }

    pub fn last_epoch(&self) -> Epoch {
        self.runs.last().map_or(self.start_epoch, |run| run.epoch)
    }

    /// The epoch of a record; none: it is too old, or does not exist.
    pub fn of(&self, seq: CommitSeq) -> Option<Epoch> {
        if seq == self.start {
            return Some(self.start_epoch);
        }
        let run = self.runs.iter().find(|run| seq <= run.last);
        run.filter(|_| seq > self.start).map(|run| run.epoch)
    }

    /// The next record has this epoch.
    pub fn push(&mut self, epoch: Epoch) {
        assert!(epoch >= self.last_epoch(), "an older leader's records come first");
        let last = CommitSeq(self.last().0 + 1);
        match self.runs.last_mut() {
            Some(run) if run.epoch == epoch => run.last = last,
            _ => {
                if self.runs.len() == RUNS_MAX {
                    self.forget(self.runs[0].last);
                }
                self.runs.push(Run { epoch, last });
            }
        }
    }

    /// Drops records after `seq`.
    pub fn truncate_to(&mut self, seq: CommitSeq) {
        assert!(seq >= self.start, "records that every copy holds are never truncated");
        let whole = self.runs.iter().take_while(|run| run.last <= seq).count();
        let part = self.runs.get(whole).map(|run| Run { epoch: run.epoch, last: seq });
        self.runs.truncate(whole);
        self.runs.extend(part.filter(|run| run.last > self.last()));
    }

    /// Forgets records before `seq`, whose segments were removed.
    pub fn forget(&mut self, seq: CommitSeq) {
        if let Some(epoch) = self.of(seq).filter(|_| seq > self.start) {
            (self.start, self.start_epoch) = (seq, epoch);
            self.runs.retain(|run| run.last > seq);
        }
    }

    /// How far this journal and the other hold the same records.
    pub fn shared_with(&self, other: &Epochs) -> Shared {
        let start = self.start.max(other.start);
        let last = self.last().min(other.last());
        if last < start || self.of(start) != other.of(start) {
            return Shared::TooOld;
        }
        // In each stretch without a change of epoch in either journal, all records are equal or none is.
        let ends = self.runs.iter().chain(&other.runs).map(|run| run.last);
        let mut ends: Vec<CommitSeq> = ends.filter(|end| *end > start && *end < last).collect();
        ends.push(last);
        ends.sort_unstable();
        let alike = |end: &&CommitSeq| self.of(**end) == other.of(**end);
        Shared::UpTo(ends.iter().take_while(alike).last().copied().unwrap_or(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(of_each: &[u64]) -> Epochs {
        let mut epochs = Epochs::default();
        of_each.iter().for_each(|e| epochs.push(Epoch(*e)));
        epochs
    }

    /// The result of `shared_with`, by comparing every record.
    fn plainly(a: &[u64], b: &[u64]) -> u64 {
        a.iter().zip(b).take_while(|(a, b)| a == b).count() as u64
    }

    #[test]
    fn journals_share_what_comes_before_the_first_difference() {
        let all: Vec<Vec<u64>> = (0..81u64)
            .flat_map(|n| (0..=4).map(move |len| (n, len)))
            .map(|(n, len)| {
                let mut of_each: Vec<u64> = (0..len).map(|i| n / 3u64.pow(i) % 3).collect();
                of_each.sort_unstable();
                of_each
            })
            .collect();
        for a in &all {
            for b in &all {
                let expected = Shared::UpTo(CommitSeq(plainly(a, b)));
                assert_eq!(epochs(a).shared_with(&epochs(b)), expected, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn abandoned_records_are_not_compared() {
        let mine = epochs(&[1, 1, 2, 2]);
        let mut leaders = epochs(&[1, 1, 3, 3, 3]);
        leaders.forget(CommitSeq(2));
        assert_eq!(mine.shared_with(&leaders), Shared::UpTo(CommitSeq(2)));
        leaders.forget(CommitSeq(3));
        assert_eq!(mine.shared_with(&leaders), Shared::TooOld, "they differ at 3");
        leaders.forget(CommitSeq(5));
        assert_eq!(mine.shared_with(&leaders), Shared::TooOld, "it ends at 4");
        assert_eq!(leaders.shared_with(&mine), Shared::TooOld);
    }

    #[test]
    fn a_truncated_journal_is_one_that_ended_there() {
        let of_each = [0, 0, 1, 4, 4];
        for n in 0..=5 {
            let mut truncated = epochs(&of_each);
            truncated.truncate_to(CommitSeq(n as u64));
            assert_eq!(truncated, epochs(&of_each[..n]));
            truncated.push(Epoch(9));
            assert_eq!(truncated.of(CommitSeq(n as u64 + 1)), Some(Epoch(9)));
        }
    }

    #[test]
    fn runs_of_others_are_checked() {
        let run = |epoch, last| Run { epoch: Epoch(epoch), last: CommitSeq(last) };
        let read = |runs: &[Run]| Epochs::from_runs(CommitSeq(3), Epoch(2), runs.to_vec());
        assert!(read(&[run(2, 5), run(4, 6)]).is_ok());
        assert!(read(&[run(1, 5)]).is_err(), "an epoch before the start's");
        assert!(read(&[run(2, 5), run(2, 6)]).is_err(), "one run in two");
        assert!(read(&[run(2, 3)]).is_err(), "an empty run");
        assert!(read(&[run(2, 5), run(4, 5)]).is_err());
        let mut long = Epochs::default();
        (0..=RUNS_MAX as u64).for_each(|n| long.push(Epoch(n)));
        assert_eq!((long.runs().len(), long.start()), (RUNS_MAX, CommitSeq(1)), "the oldest is forgotten");
        let many: Vec<Run> = (0..=RUNS_MAX as u64).map(|n| run(3 + n, 4 + n)).collect();
        assert!(read(&many).is_err());
    }
}
