//! Changes that the leader has answered and not made durable yet. They are kept, in the leader's order, until
//! it reports them as durable. After a restart, or under another leader, they are sent once more.
//!
//! Invariants: a change leaves in its order, and only when the leader that answered it reports it as durable:
//! the number of a commit is valid for one leader only. What another leader still has to make goes before
//! anything new. Knows nothing of requests.

use std::collections::VecDeque;

/// The number of one run of a leader. Each start of a leader has another one.
pub type Term = u64;

/// A commit of that leader.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Commit {
    pub term: Term,
    pub seq: u64,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Entry<T> {
    commit: Commit,
    what: T,
}

/// Kept changes, those of the former leaders first.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Kept<T> {
    entries: VecDeque<Entry<T>>,
    /// The leader that answers now, and the newest commit that it has reported as durable.
    term: Term,
    durable: u64,
}

impl<T> Default for Kept<T> {
    fn default() -> Kept<T> {
        Kept { entries: VecDeque::new(), term: 0, durable: 0 }
    }
}

impl<T> Kept<T> {
    /// The session is at this leader from now on. Everything kept of others is to be made again.
    pub fn led_by(&mut self, term: Term) {
        if self.term != term {
            (self.term, self.durable) = (term, 0);
        }
    }

    /// The leader has answered. Answers may overtake each other. False: it is durable already.
    pub fn keep(&mut self, commit: Commit, what: T) -> bool {
        if commit.term == self.term && commit.seq <= self.durable {
            return false;
        }
        let later = |entry: &Entry<T>| entry.commit.term == commit.term && entry.commit.seq > commit.seq;
        let behind = self.entries.iter().rev().take_while(|entry| later(entry)).count();
        self.entries.insert(self.entries.len() - behind, Entry { commit, what });
        true
    }

    /// The leader of `up_to` reports everything up to there as durable. Returns the changes that leave.
    pub fn durable(&mut self, up_to: Commit) -> Vec<T> {
        let mut left = Vec::new();
        if up_to.term != self.term {
            return left;
        }
        self.durable = self.durable.max(up_to.seq);
        let (term, durable) = (self.term, self.durable);
        while self.entries.front().is_some_and(|e| e.commit.term == term && e.commit.seq <= durable) {
            left.extend(self.entries.pop_front().map(|entry| entry.what));
        }
        left
    }

    /// The next change that the present leader has still to make.
    pub fn to_make_again(&self) -> Option<&T> {
        self.all_to_make_again().next()
    }
    pub fn all_to_make_again(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter(|entry| entry.commit.term != self.term).map(|entry| &entry.what)
    }

    /// The present leader has made it, by this commit: the first of [`Kept::to_make_again`].
    pub fn made_again(&mut self, commit: Commit) {
        assert_eq!(commit.term, self.term, "the leader that the session is at");
        let next = self.entries.iter_mut().find(|entry| entry.commit.term != commit.term);
        next.expect("it was to be made again").commit = commit;
    }

    /// The first of [`Kept::to_make_again`] cannot be made again.
    pub fn give_up(&mut self) -> T {
        let next = self.entries.iter().position(|entry| entry.commit.term != self.term);
        let next = next.and_then(|place| self.entries.remove(place));
        next.expect("it was to be made again").what
    }

    /// The newest commit that is not known to be durable.
    pub fn newest(&self) -> Option<Commit> {
        self.entries.back().map(|entry| entry.commit)
    }

    /// In the order in which they were made.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|entry| &entry.what)
    }
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Gives all up: the session is over.
    pub fn take_all(&mut self) -> Vec<T> {
        self.entries.drain(..).map(|entry| entry.what).collect()
    }
}
