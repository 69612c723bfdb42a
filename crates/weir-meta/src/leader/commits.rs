//! Commits of one leader: their numbers, the replies that wait until they are durable, and changes that
//! happen once.
//!
//! Invariants: a reply leaves only when everything that it shows is durable, and while this node has the
//! right to answer. A change is made once, even if its request arrives again. The number of a commit that
//! clients may see is known before the lock of the state is released. Knows nothing of that state (it is
//! passed to show that it is locked), of sessions and of the meaning of a change.
mod observed;
mod replies;
mod slots;

use super::State;
use crate::copies::Right;
use crate::ops::Operation;
use crate::unsettled::Unsettled;
use observed::{Noted, Observed};
use replies::Replies;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::{Env, watch};
use weir_kv::{CommitSeq, Read, SharedKv, Txn};
use weir_proto::meta::Op;
use weir_proto::{Error, ErrorKind, Result, SessionId};
use weir_rpc::{Reply, Responder};

/// The commits of this leader.
pub struct Commits {
    env: Env,
    kv: SharedKv,
    right: Arc<Right>,
    /// The newest commit that clients may see; no reply shows a newer one.
    newest: AtomicU64,
    /// The newest commit that replies to all requests wait for.
    of_all: AtomicU64,
    /// The keys of the clients' other commits.
    unsettled: Mutex<Unsettled>,
    replies: Replies,
    /// The journal failed: nothing can be acknowledged any more.
    failed: watch::Sender<Option<Error>>,
}

/// A change that was made now, or by an earlier try.
pub struct Done<T> {
    pub reply: T,
    /// The reply is the one of an earlier try.
    pub replayed: bool,
}

impl Commits {
    /// `newest`: the last commit before this leader serves.
    pub fn new(env: &Env, kv: SharedKv, right: Arc<Right>, newest: CommitSeq) -> Commits {
        let (of_all, newest) = (AtomicU64::new(newest.0), AtomicU64::new(newest.0));
        let (unsettled, replies, failed) = (Mutex::default(), Replies::default(), watch::Sender::new(None));
        Commits { env: env.clone(), kv, right, newest, of_all, unsettled, replies, failed }
    }

    /// The store, for readers that are given one.
    pub fn store(&self) -> &SharedKv {
        &self.kv
    }
    pub fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<()> {
        self.kv.read(body).map(drop)
    }
    /// Reads for a session. A reply that shows what was read waits for the returned commit, and for
    /// [`Commits::of_all`].
    pub fn read_for(
        &self,
        _locked: &State,
        session: SessionId,
        body: &mut dyn FnMut(&dyn Read) -> Result<()>,
    ) -> Result<CommitSeq> {
        let (unsettled, mut wait) = (self.unsettled(), CommitSeq(0));
        self.kv.read(&mut |read| {
            let observed = Observed::new(read, &unsettled, session);
            let done = body(&observed);
            wait = observed.wait();
            done
        })?;
        Ok(wait)
    }

    /// A transaction that clients may see. All replies wait for it: the state in memory follows it, and
    /// replies depend on that, too.
    pub fn transact(
        &self,
        _locked: &State,
        body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>,
    ) -> Result<CommitSeq> {
        let seq = self.kv.transact(body)?;
        self.show(seq);
        self.of_all.fetch_max(seq.0, SeqCst);
        Ok(seq)
    }

    /// A transaction that no reply shows before its own number is durable: replies to others do not wait
    /// for it.
    pub fn transact_unshown(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        self.kv.transact(body)
    }

    /// A client's change, which more may follow: [`Commits::settle`] comes soon. With an `op` it happens
    /// once, and its reply is kept for later tries.
    pub fn change_once<R: Operation>(
        &self,
        _locked: &State,
        (session, op): (SessionId, Option<&Op>),
        body: &mut dyn FnMut(&mut dyn Txn) -> Result<R::Reply>,
    ) -> Result<Done<R::Reply>> {
        op.map_or(Ok(()), slots::check)?;
        let (mut unsettled, mut changed, mut done) = (self.unsettled(), Vec::new(), None);
        unsettled.forget_to(self.kv.durable());
        let seq = self.kv.transact_more(&mut |txn| {
            if let Some(reply) = op.map_or(Ok(None), |op| slots::earlier_reply::<R>(txn, op))? {
                done = Some(Done { reply, replayed: true });
                return Ok(());
            }
            let reply = body(&mut Noted::new(txn, &mut changed))?;
            if let Some(op) = op {
                slots::keep_reply::<R>(txn, op, &reply);
            }
            done = Some(Done { reply, replayed: false });
            Ok(())
        })?;
        if !changed.is_empty() {
            unsettled.note(session, seq, seq, changed);
        }
        self.show(seq);
        Ok(done.expect("the body ran"))
    }

    fn unsettled(&self) -> MutexGuard<'_, Unsettled> {
        self.unsettled.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn show(&self, seq: CommitSeq) {
        self.newest.fetch_max(seq.0, SeqCst);
    }
    /// The newest commit that clients may see.
    pub fn newest(&self, _locked: &State) -> CommitSeq {
        CommitSeq(self.newest.load(SeqCst))
    }
    /// The newest commit that every reply waits for.
    pub fn of_all(&self, _locked: &State) -> CommitSeq {
        CommitSeq(self.of_all.load(SeqCst))
    }
    /// All replies wait for the newest commit: state in memory, on which they depend, has followed it.
    pub fn concern_all(&self, locked: &State) {
        self.of_all.fetch_max(self.newest(locked).0, SeqCst);
    }

    /// Whether only changes that free space should be made.
    pub fn is_space_short(&self) -> bool {
        self.kv.is_space_short()
    }

    /// Waits until a commit is durable. A failed journal is reported once, and for ever; waiting clients ask
    /// the next leader, which knows whether the change exists.
    pub async fn durable(&self, seq: CommitSeq) -> Result<()> {
        let waited = self.kv.wait_durable(seq).await;
        waited.map_err(|e| {
            self.fail(&e);
            // Another copy leads: it knows whether the change exists.
            if e.kind == ErrorKind::Stale { e.of_kind(ErrorKind::Unavailable) } else { self.map_error(e) }
        })?;
        self.right.wait(&self.env).await
    }
    /// Whether commits up to `seq` may be reported now.
    pub fn may_reply(&self, seq: CommitSeq) -> bool {
        seq <= self.kv.durable() && self.right.answers()
    }

    /// Answers with `result` once `seq` is durable; [`Commits::settle`] comes soon.
    pub fn reply(&self, seq: CommitSeq, responder: Responder, result: Result<Reply>) {
        self.replies.push(seq, responder, result);
    }
    /// Nothing more is executed for now: sees to it that waiting requests are answered.
    pub fn settle(&self) {
        self.replies.settle(&self.kv, &self.right);
    }
    /// Sends replies for ever; returns the error of a failed journal, after all waiting callers have it.
    pub async fn send_replies(&self) -> Error {
        loop {
            let first = self.replies.first().await;
            if let Err(e) = self.durable(first).await {
                self.replies.fail(&e);
                if self.failed.borrow().is_some() {
                    return e;
                }
                continue; // it lacks the right to answer for a while
            }
            self.replies.send(&self.right, self.kv.durable().max(first));
        }
    }

    /// A store that has failed ends this leader, at the first error of any caller. The client may ask the
    /// next leader.
    pub fn map_error(&self, e: Error) -> Error {
        if e.kind != ErrorKind::Io {
            return e;
        }
        self.fail(&e);
        e.of_kind(ErrorKind::Unavailable).doing("this leader ends")
    }
    pub fn fail(&self, e: &Error) {
        self.failed.send_if_modified(|failed| failed.is_none() && failed.replace(e.clone()).is_none());
    }
    /// Returns the first failure, after which this leader must end.
    pub async fn failure(&self) -> Error {
        let mut failed = self.failed.subscribe();
        let failure = failed.wait_for(Option::is_some).await;
        failure.ok().and_then(|e| e.clone()).unwrap_or_else(|| Error::io("the journal failed"))
    }
}
