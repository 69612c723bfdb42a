//! Commits of one leader: their numbers, the replies that wait until they are durable, and changes that
//! happen once.
//!
//! Invariants: a reply leaves only when everything that it may show is durable, and while this node has the
//! right to answer. A change is made once, even if its request arrives again. The number of a commit that
//! clients may see is known before the lock of the state is released. Knows nothing of that state (it is
//! passed to show that it is locked), of sessions and of the meaning of a change.
mod replies;
mod slots;

use super::State;
use crate::copies::Right;
use crate::ops::Operation;
use replies::Replies;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use weir_env::{Env, watch};
use weir_kv::{CommitSeq, Read, SharedKv, Txn};
use weir_proto::meta::Op;
use weir_proto::{Error, ErrorKind, Result};
use weir_rpc::{Reply, Responder};

/// The commits of this leader.
pub struct Commits {
    env: Env,
    kv: SharedKv,
    right: Arc<Right>,
    /// The newest commit that clients may see; no reply shows a newer one.
    newest: AtomicU64,
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
        let (newest, failed) = (AtomicU64::new(newest.0), watch::Sender::new(None));
        Commits { env: env.clone(), kv, right, newest, replies: Replies::default(), failed }
    }

    /// The store, for readers that are given one.
    pub fn store(&self) -> &SharedKv {
        &self.kv
    }
    pub fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<()> {
        self.kv.read(body).map(drop)
    }

    /// A transaction that clients may see.
    pub fn transact(
        &self,
        _locked: &State,
        body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>,
    ) -> Result<CommitSeq> {
        self.kv.transact(body).inspect(|seq| self.show(*seq))
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
        op: Option<&Op>,
        body: &mut dyn FnMut(&mut dyn Txn) -> Result<R::Reply>,
    ) -> Result<Done<R::Reply>> {
        op.map_or(Ok(()), slots::check)?;
        let mut done = None;
        let seq = self.kv.transact_more(&mut |txn| {
            if let Some(reply) = op.map_or(Ok(None), |op| slots::earlier_reply::<R>(txn, op))? {
                done = Some(Done { reply, replayed: true });
                return Ok(());
            }
            let reply = body(txn)?;
            if let Some(op) = op {
                slots::keep_reply::<R>(txn, op, &reply);
            }
            done = Some(Done { reply, replayed: false });
            Ok(())
        })?;
        self.show(seq);
        Ok(done.expect("the body ran"))
    }

    fn show(&self, seq: CommitSeq) {
        self.newest.fetch_max(seq.0, SeqCst);
    }
    /// The newest commit that clients may see.
    pub fn newest(&self, _locked: &State) -> CommitSeq {
        CommitSeq(self.newest.load(SeqCst))
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
