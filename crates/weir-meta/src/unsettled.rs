//! Changes that are committed but not durable yet: the keys that they changed, and the sessions that made
//! them. From it follows when an answer may leave.
//!
//! Rule: an answer may leave before its change is durable only to the session that made the change, and only
//! if all that it depends on is durable, or this session's own and answered. Every other session sees durable
//! changes only ("commit on share", as the recovery of Lustre has it). So no session depends on a client that
//! is gone, and the changes that a client sends again after a crash depend on no other client.
//!
//! Bounded by the part of the journal that is not durable. Knows nothing of requests, replies or records.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use weir_kv::CommitSeq;
use weir_proto::SessionId;

/// The newest change of a key that is not durable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Mark {
    seq: CommitSeq,
    /// `None`: of several sessions.
    by: Option<SessionId>,
    /// The commit that its own session waits for before it depends on this change: the wait of its answer.
    settled_at: CommitSeq,
}

/// The changes that are not durable.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug)]
pub struct Unsettled {
    marks: BTreeMap<Vec<u8>, Mark>,
    /// Commits and their keys, in the order of the journal.
    tail: VecDeque<(CommitSeq, Vec<Vec<u8>>)>,
}

/// A change of one key in a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// It was put or deleted.
    Set,
    /// It was added to, or raised: the order of such changes does not matter, and none reads the others.
    Blind,
}

impl Unsettled {
    /// The commit that an answer to `session` must wait for if it depends on this key.
    pub fn wait_for_key(&self, session: SessionId, key: &[u8]) -> CommitSeq {
        self.marks.get(key).map_or(CommitSeq(0), |mark| mark.wait(session))
    }

    /// The commit that an answer to `session` must wait for if it depends on the keys of a range.
    pub fn wait_for_range(&self, session: SessionId, start: &[u8], end: &[u8]) -> CommitSeq {
        if start >= end {
            return CommitSeq(0);
        }
        let range = (Bound::Included(start), Bound::Excluded(end));
        let waits = self.marks.range::<[u8], _>(range).map(|(_, mark)| mark.wait(session));
        waits.max().unwrap_or(CommitSeq(0))
    }

    /// Whether the newest change of this key is that session's.
    pub fn is_of(&self, session: SessionId, key: &[u8]) -> bool {
        self.marks.get(key).is_some_and(|mark| mark.by == Some(session))
    }

    /// `session` has changed these keys by commit `seq`. Its answer leaves when `settled_at` is durable: the
    /// newest wait for the keys that it has read or set.
    pub fn note(
        &mut self,
        session: SessionId,
        seq: CommitSeq,
        settled_at: CommitSeq,
        keys: impl IntoIterator<Item = (Vec<u8>, Changed)>,
    ) {
        assert!(self.tail.back().is_none_or(|(last, _)| *last < seq), "commits are noted in their order");
        assert!(settled_at <= seq, "an answer waits for nothing newer than its change");
        let keys = keys.into_iter().map(|(key, changed)| {
            let before = self.marks.get(&key).filter(|_| changed == Changed::Blind);
            let is_shared = before.is_some_and(|mark| mark.by != Some(session));
            let settled_at = before.map_or(settled_at, |mark| mark.settled_at.max(settled_at));
            self.marks.insert(key.clone(), Mark { seq, by: (!is_shared).then_some(session), settled_at });
            key
        });
        let keys = keys.collect();
        self.tail.push_back((seq, keys));
    }

    /// Everything up to this commit is durable.
    pub fn forget_to(&mut self, durable: CommitSeq) {
        while self.tail.front().is_some_and(|(seq, _)| *seq <= durable) {
            let (_, keys) = self.tail.pop_front().expect("there is a first one");
            for key in keys {
                if self.marks.get(&key).is_some_and(|mark| mark.seq <= durable) {
                    self.marks.remove(&key);
                }
            }
        }
    }

    /// The session is on another connection: an answer on the former one may be lost, so nothing more may
    /// depend on these changes before they are durable.
    pub fn moved(&mut self, session: SessionId) {
        for mark in self.marks.values_mut().filter(|mark| mark.by == Some(session)) {
            mark.settled_at = mark.seq;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.tail.is_empty()
    }
    /// The number of commits that are not durable.
    pub fn len(&self) -> usize {
        self.tail.len()
    }
}

impl Mark {
    fn wait(&self, session: SessionId) -> CommitSeq {
        if self.by == Some(session) { self.settled_at } else { self.seq }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);
    const AT_ONCE: CommitSeq = CommitSeq(0);

    fn set(unsettled: &mut Unsettled, session: SessionId, seq: u64, settled_at: u64, keys: &[&str]) {
        let keys = keys.iter().map(|key| (key.as_bytes().to_vec(), Changed::Set));
        unsettled.note(session, CommitSeq(seq), CommitSeq(settled_at), keys);
    }

    #[test]
    fn a_session_waits_for_others_and_not_for_itself() {
        let mut unsettled = Unsettled::default();
        set(&mut unsettled, A, 5, 0, &["x", "y"]);
        assert_eq!(unsettled.wait_for_key(A, b"x"), AT_ONCE);
        assert_eq!(unsettled.wait_for_key(B, b"x"), CommitSeq(5));
        assert_eq!(unsettled.wait_for_key(B, b"z"), AT_ONCE);
        assert_eq!(unsettled.wait_for_range(B, b"xx", b"z"), CommitSeq(5));
        assert_eq!(unsettled.wait_for_range(B, b"xx", b"y"), AT_ONCE, "the end is not in it");
        assert_eq!(unsettled.wait_for_range(B, b"z", b"a"), AT_ONCE);
        unsettled.forget_to(CommitSeq(5));
        assert_eq!(unsettled.wait_for_key(B, b"x"), AT_ONCE);
        assert!(unsettled.is_empty());
    }

    #[test]
    fn a_change_that_waits_is_waited_for() {
        let mut unsettled = Unsettled::default();
        set(&mut unsettled, B, 5, 0, &["x"]);
        // Its answer waits for the change of B; so does all that depends on it.
        set(&mut unsettled, A, 6, 5, &["x", "y"]);
        assert_eq!(unsettled.wait_for_key(A, b"y"), CommitSeq(5));
        assert_eq!(unsettled.wait_for_key(B, b"x"), CommitSeq(6), "its own change was overwritten");
        unsettled.forget_to(CommitSeq(5));
        assert_eq!(unsettled.wait_for_key(B, b"x"), CommitSeq(6));
    }

    #[test]
    fn a_session_that_moved_depends_on_nothing_that_may_be_lost() {
        let mut unsettled = Unsettled::default();
        set(&mut unsettled, A, 5, 0, &["x"]);
        set(&mut unsettled, B, 6, 0, &["y"]);
        unsettled.moved(A);
        assert_eq!(unsettled.wait_for_key(A, b"x"), CommitSeq(5));
        assert_eq!(unsettled.wait_for_key(B, b"y"), AT_ONCE);
    }

    #[test]
    fn a_sum_of_several_sessions_belongs_to_none() {
        let mut unsettled = Unsettled::default();
        let add = |unsettled: &mut Unsettled, session, seq| {
            unsettled.note(session, CommitSeq(seq), AT_ONCE, [(b"sum".to_vec(), Changed::Blind)]);
        };
        add(&mut unsettled, A, 5);
        assert_eq!(unsettled.wait_for_key(A, b"sum"), AT_ONCE);
        add(&mut unsettled, B, 6);
        assert_eq!(unsettled.wait_for_key(A, b"sum"), CommitSeq(6));
        assert_eq!(unsettled.wait_for_key(B, b"sum"), CommitSeq(6));
    }
}
