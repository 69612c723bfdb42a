//! Early answers, and changes that were answered early by another leader and are made again.
//!
//! Invariants: an answer leaves early only if all that it depends on is durable, or of its own session and
//! answered. A change is made again as it was, or not at all, and then the client learns why.
use super::{Again, Answer, How, Operations};
use crate::leader::State;
use crate::leader::outcome::Outcome;
use crate::leader::state::Parked;
use crate::ops::Operation;
use std::sync::Arc;
use weir_kv::CommitSeq;
use weir_proto::early::{
    AwaitDurable, ChangedEarly, Durable, Kept, KeptChange, MadeAgain, MakeAgain, NotMade,
};
use weir_proto::{Error, ErrorKind, Result, SessionId, Wire};
use weir_rpc::{Call, Connection, Reply};

impl Operations {
    /// Runs a change whose answer may leave early.
    pub fn operate_early<R: Operation + Kept>(self: &Arc<Self>, body: &[u8], call: &Call) -> Outcome {
        match R::from_bytes(body) {
            Ok(request) => {
                let may_leave = request.may_leave_early()
                    && (self.base.config.answers_early)()
                    && self.base.commits.may_answer_early();
                self.run_or_wait(request, call, How::Early { may_leave })
            }
            Err(e) => Outcome::refused(e.doing(format_args!("decode {}", R::NAME))),
        }
    }

    /// The bytes of an answer, in the form that was asked for.
    pub(super) fn in_form<R: Operation>(&self, how: &How<R>, answer: Answer) -> Vec<u8> {
        let How::Early { .. } = how else { return answer.body };
        let commits = &self.base.commits;
        let (term, seq, durable) = (commits.term(), answer.newest.0, commits.newest_durable().0);
        ChangedEarly { term, seq, durable, given: answer.given, reply: answer.body.into() }.to_bytes()
    }

    /// Makes the changes of a session again that it keeps, each by `make`; it has not returned yet.
    pub fn make_all_again(
        &self,
        r: &MakeAgain,
        make: impl Fn(&mut State, &KeptChange) -> Result<()>,
    ) -> Outcome {
        let mut state = self.base.lock();
        let returned = match state.session(r.session) {
            Ok(session) => session.resumed,
            Err(e) => return Outcome::refused(e),
        };
        if returned && !r.changes.is_empty() {
            return Outcome::refused(Error::invalid("kept changes go before the end of a resume"));
        }
        let mut failed = Vec::new();
        for (place, change) in (0..).zip(&r.changes) {
            match make(&mut state, change) {
                Ok(()) => {}
                Err(e) if is_lost(&e) => failed.push(NotMade { place, why: e.to_string() }),
                Err(e) => return Outcome::refused(e),
            }
        }
        let commits = &self.base.commits;
        let (seq, durable) = (commits.newest(&state).0, commits.newest_durable().0);
        let made = MadeAgain { term: commits.term(), seq, durable, failed };
        // The client keeps them until they are durable.
        Outcome::Ready(CommitSeq(0), Ok(Reply::new(&made)))
    }

    /// Makes a change again, unless it is here. An error: it is lost, or, if [`is_lost`] denies that, the
    /// client is to ask again.
    pub fn make_again<R: Operation + Kept>(
        &self,
        state: &mut State,
        session: SessionId,
        change: &KeptChange,
        on: &Connection,
    ) -> Result<()> {
        let request = R::from_bytes(&change.body)?;
        let reply = R::Reply::from_bytes(&change.reply)?;
        let op = request.op().filter(|op| op.session == session);
        let op = op.ok_or_else(|| Error::invalid(format!("a {} of another session", R::NAME)))?;
        if self.base.commits.has_made(op)? {
            return Ok(());
        }
        self.base.commits.check_given(&change.given)?;
        let how = How::Again(Again { given: change.given.clone(), reply, agree: R::agree });
        self.attempt(state, &request, on, &mut Parked::default(), &how).map(drop)
    }
}

impl Operations {
    /// The answer to a client that waits until a commit is durable.
    pub fn await_durable(&self, r: &AwaitDurable) -> Result<(Durable, CommitSeq)> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        let commits = &self.base.commits;
        // The number may be of another leader.
        let seq = CommitSeq(r.seq).min(commits.newest(&state));
        Ok((Durable { term: commits.term(), durable: seq.0 }, seq))
    }
}

/// Whether a change that could not be made again is lost. If not, the leader cannot make it now. `Stale` is
/// of an inode that is gone: the session has been found.
fn is_lost(e: &Error) -> bool {
    use ErrorKind::{Busy, Deadline, Io, Unavailable};
    !matches!(e.kind, Unavailable | Busy { .. } | Deadline | Io)
}
