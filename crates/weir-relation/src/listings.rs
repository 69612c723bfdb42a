//! Directories that operations wait for, that movers read, and that could not be read at home.
//!
//! In memory only. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::relation::{ListDone, Outcome};
use weir_proto::{Error, InodeId, Result, SessionId};

/// An operation that needs a directory that could not be read gets the reason for this time; then the read is
/// retried.
const FAILED_FOR: Duration = Duration::from_secs(10);

/// Directories that are remembered because clients want them: as many as operations wait at a leader. A home
/// that hangs is asked for no more; each takes some 40 bytes.
const WANTED_MAX: usize = 64 << 10;

/// Directories with a remembered failure.
const FAILED_MAX: usize = 1024;

#[derive(Default, Debug)]
pub struct Listings {
    pub wanted: BTreeSet<InodeId>,
    pub out: BTreeMap<InodeId, SessionId>,
    failed: BTreeMap<InodeId, (Instant, String)>,
    /// The next search for directories to be read begins here.
    pub next: InodeId,
    /// The next search for directories to be read again begins here.
    pub next_again: InodeId,
}

impl Listings {
    pub fn is_under_way(&self) -> bool {
        !self.out.is_empty()
    }
    /// An operation waits for a directory; the error is the reason why it cannot be read.
    pub fn want(&mut self, dir: InodeId, now: Instant) -> Result<()> {
        if let Some((at, why)) = self.failed.get(&dir) {
            if now.since(*at) < FAILED_FOR {
                return Err(Error::io(format!("directory {dir} could not be read at home: {why}")));
            }
            self.failed.remove(&dir);
        }
        if self.out.contains_key(&dir) || self.wanted.contains(&dir) {
            return Ok(());
        }
        if self.wanted.len() >= WANTED_MAX {
            return Err(Error::unavailable(format!(
                "{WANTED_MAX} directories are to be read at home before directory {dir}: try again"
            )));
        }
        self.wanted.insert(dir);
        Ok(())
    }
    /// A directory is to be rescanned; returns whether that is new. With too many before it, it comes in its
    /// turn.
    pub fn want_rescan(&mut self, dir: InodeId, now: Instant) -> bool {
        self.wanted.len() < WANTED_MAX && self.is_free(dir, now) && self.wanted.insert(dir)
    }
    /// Whether a mover reads it.
    pub fn is_out(&self, dir: InodeId) -> bool {
        self.out.contains_key(&dir)
    }
    pub fn end_session(&mut self, mover: SessionId) {
        self.out.retain(|_, session| *session != mover);
    }
    /// Results of reads; returns the directories that cannot be read for now.
    pub fn done(&mut self, mover: SessionId, all: &[ListDone], now: Instant) -> Vec<InodeId> {
        let mut failed = Vec::new();
        for done in all.iter().filter(|done| self.out.get(&done.dir) == Some(&mover)) {
            match &done.outcome {
                Outcome::Diverged { why } | Outcome::Refused { why } => {
                    failed.push(done.dir);
                    if self.failed.len() < FAILED_MAX {
                        self.failed.insert(done.dir, (now, why.clone()));
                    }
                }
                Outcome::Denied { .. } => failed.push(done.dir), // for all directories: the queue knows
                Outcome::Done { .. } | Outcome::Later { .. } | Outcome::Moved {} => {}
            }
        }
        self.out.retain(|dir, session| *session != mover || !all.iter().any(|done| done.dir == *dir));
        failed
    }
    /// Nothing is read at home for now: returns the directories that operations may wait for.
    pub fn abandon(&mut self) -> Vec<InodeId> {
        std::mem::take(&mut self.wanted).into_iter().collect()
    }
    /// The recent failure to read directories, as text.
    pub fn failure(&self, now: Instant) -> Option<String> {
        let failed = |(dir, (at, why)): (&InodeId, &(Instant, String))| {
            (now.since(*at) < FAILED_FOR).then(|| format!("directory {dir} could not be read at home: {why}"))
        };
        self.failed.iter().find_map(failed)
    }
    pub fn is_free(&self, dir: InodeId, now: Instant) -> bool {
        let failed = self.failed.get(&dir).is_some_and(|(at, _)| now.since(*at) < FAILED_FOR);
        !failed && !self.out.contains_key(&dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_wanted_from_a_home_that_hangs_have_a_bound() {
        let mut listings = Listings::default();
        let (mut refused, all) = (0, 2 * WANTED_MAX as u64);
        for n in 0..all {
            listings.want_rescan(InodeId(2 * n), Instant(0));
            refused += u64::from(listings.want(InodeId(2 * n + 1), Instant(0)).is_err());
        }
        assert_eq!(listings.wanted.len(), WANTED_MAX);
        assert_eq!(refused, all - WANTED_MAX as u64 / 2);
        listings.want(InodeId(1), Instant(0)).unwrap(); // it is among them
        listings.wanted.pop_last();
        listings.want(InodeId(u64::MAX), Instant(0)).unwrap();
    }

    #[test]
    fn unreadable_data_is_reported_for_a_while_and_tried_again() {
        let (mover, dir) = (SessionId(1), InodeId(7));
        let at = |s| Instant(0) + Duration::from_secs(s);
        let mut listings = Listings::default();
        listings.want(dir, at(0)).unwrap();
        listings.wanted.clear();
        listings.out.insert(dir, mover);
        listings.want(dir, at(0)).unwrap();
        assert!(listings.wanted.is_empty(), "a mover has it");
        let done = |why: &str| [ListDone { dir, outcome: Outcome::Refused { why: why.into() } }];
        assert_eq!(listings.done(SessionId(2), &done("not its own"), at(1)), []);
        assert_eq!(listings.done(mover, &done("it is a file"), at(1)), [dir]);
        assert!(listings.want(dir, at(2)).unwrap_err().context.contains("it is a file"));
        assert!(!listings.is_free(dir, at(2)));
        listings.want(dir, at(1) + FAILED_FOR).unwrap();
        assert!(listings.wanted.contains(&dir) && listings.is_free(dir, at(1) + FAILED_FOR));
    }
}
