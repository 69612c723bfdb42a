//! Commits of one leader: their numbers, the replies that wait until they are durable, and changes that
//! happen once.
//!
//! Invariants: a reply leaves only when everything that it shows is durable, except for changes of its own
//! session that were answered early, and while this node has the right to answer. A change is made once,
//! even if its request arrives again. The number of a commit that clients may see is known before the lock
//! of the state is released. Knows nothing of that state (it is passed to show that it is locked), of
//! sessions and of the meaning of a change.
mod observed;
mod replies;
mod slots;

use super::State;
use crate::copies::Right;
use crate::keys::{self, Sequence};
use crate::ops::Operation;
use crate::tables;
use crate::unsettled::Unsettled;
use observed::{Early, Noted, Observed};
use replies::Replies;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Env, watch};
use weir_kv::{CommitSeq, Read, SharedKv, Txn};
use weir_proto::early::Given;
use weir_proto::meta::Op;
use weir_proto::{Error, ErrorKind, Result, SessionId};
use weir_rpc::{Reply, Responder};

/// Commits that no client waits for are flushed after this time.
const UNFLUSHED_FOR: Duration = Duration::from_millis(25);
/// Commits that are not durable, and may have been answered early.
const TAIL_MAX: usize = 1 << 16;
/// Serials of directories that a starting leader leaves out: more than such a tail can have drawn.
pub const SERIALS_LEFT_OUT: u64 = 1 << 20;

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
    /// A flush follows within [`UNFLUSHED_FOR`].
    flushes_soon: Arc<AtomicBool>,
    /// The number of this run of the leader.
    term: u64,
    /// Serials that a former leader may have drawn for changes that a crash took back.
    lost_serials: Range<u64>,
    /// The journal failed: nothing can be acknowledged any more.
    failed: watch::Sender<Option<Error>>,
}

/// A change that was made now, or by an earlier try.
pub struct Done<T> {
    pub reply: T,
    /// The reply is the one of an earlier try.
    pub replayed: bool,
    /// The commit that an early answer waits for; `None`: it waits for the change itself.
    pub early: Option<CommitSeq>,
    /// Serials of directories that it drew.
    pub serials: Vec<u64>,
}

/// A change of a session.
pub struct Changing<'a> {
    pub session: SessionId,
    /// It happens once, and its reply is kept for later tries.
    pub op: Option<&'a Op>,
    /// Its answer may leave early.
    pub early: bool,
    /// It is made again, and draws these serials.
    pub given: Option<&'a [u64]>,
}

/// Leaves out the serials that former leaders may have drawn for changes that a crash took back: their
/// clients may bring them, through several crashes. Returns its commit, and these serials.
pub fn leave_out_serials(kv: &SharedKv, newest: CommitSeq) -> Result<(CommitSeq, Range<u64>)> {
    let mut lost = 0..0;
    let left_out = kv.transact(&mut |txn| {
        if tables::SESSIONS.all().has_any(txn)? {
            let next = tables::next_number(txn, Sequence::DirectorySerial)?;
            lost = tables::number(txn, Sequence::LostSerial)?.unwrap_or(next)..next + SERIALS_LEFT_OUT;
            txn.max(&keys::sequence(Sequence::DirectorySerial), lost.end);
            txn.max(&keys::sequence(Sequence::LostSerial), lost.start);
        }
        Ok(())
    })?;
    Ok((newest.max(left_out), lost))
}

impl Commits {
    /// `newest`: the last commit before this leader serves. `lost_serials`: those that it leaves out.
    pub fn new(
        env: &Env,
        kv: SharedKv,
        right: Arc<Right>,
        newest: CommitSeq,
        lost_serials: Range<u64>,
    ) -> Commits {
        let (of_all, newest) = (AtomicU64::new(newest.0), AtomicU64::new(newest.0));
        let (unsettled, replies, failed) = (Mutex::default(), Replies::default(), watch::Sender::new(None));
        let term = env.rng.next_u64() | 1;
        Commits {
            env: env.clone(),
            kv,
            right,
            newest,
            of_all,
            unsettled,
            replies,
            flushes_soon: Arc::default(),
            term,
            lost_serials,
            failed,
        }
    }

    /// Commit numbers that clients keep are of this run only.
    pub fn term(&self) -> u64 {
        self.term
    }
    /// The newest durable commit.
    pub fn newest_durable(&self) -> CommitSeq {
        self.kv.durable()
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

    /// A client's change, which more may follow: [`Commits::settle`] comes soon.
    pub fn change_once<R: Operation>(
        &self,
        _locked: &State,
        change: &Changing<'_>,
        body: &mut dyn FnMut(&mut dyn Txn) -> Result<R::Reply>,
    ) -> Result<Done<R::Reply>> {
        let Changing { session, op, .. } = *change;
        op.map_or(Ok(()), slots::check)?;
        let (mut unsettled, mut changed, mut done) = (self.unsettled(), Vec::new(), None);
        unsettled.forget_to(self.kv.durable());
        let seq = self.kv.transact_more(&mut |txn| {
            if let Some(reply) = op.map_or(Ok(None), |op| slots::earlier_reply::<R>(txn, op))? {
                done = Some(Done { reply, replayed: true, early: None, serials: Vec::new() });
                return Ok(());
            }
            let early = change.early.then(|| Early::new(&unsettled, session, change.given));
            let mut noted = Noted::new(txn, &mut changed, early);
            let reply = body(&mut noted)?;
            let (early, serials) = noted.finish().map_or((None, Vec::new()), |(wait, s)| (Some(wait), s));
            if let Some(op) = op {
                slots::keep_reply::<R>(txn, op, &reply);
            }
            done = Some(Done { reply, replayed: false, early, serials });
            Ok(())
        })?;
        let done = done.expect("the body ran");
        if !changed.is_empty() {
            // An answer that waits for its own change is lost with it: nothing may depend on it before.
            unsettled.note(session, seq, done.early.unwrap_or(seq), changed);
        }
        self.show(seq);
        Ok(done)
    }

    /// Whether one more change may be answered early: the tail that a crash may lose is bounded.
    pub fn may_answer_early(&self) -> bool {
        let mut unsettled = self.unsettled();
        unsettled.forget_to(self.kv.durable());
        unsettled.len() < TAIL_MAX
    }
    /// Serials of a change that is made again: only those that the former leader may have drawn for it.
    pub fn check_given(&self, given: &Given) -> Result<()> {
        if given.serials.iter().all(|serial| self.lost_serials.contains(serial)) {
            return Ok(());
        }
        Err(Error::denied(format!("serials {:?} are not among those of the lost tail", given.serials)))
    }

    /// Whether the leader has made this change, or a later one of its slot.
    pub fn has_made(&self, op: &Op) -> Result<bool> {
        slots::check(op)?;
        let mut made = false;
        self.kv.read(&mut |read| {
            made = slots::newest(read, op)? >= op.seq;
            Ok(())
        })?;
        Ok(made)
    }

    /// The session is on another connection: answers on the former one may be lost.
    pub fn moved(&self, session: SessionId) {
        self.unsettled().moved(session);
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
    /// Whether an answer that waits for `seq` may leave now. Answers leave in the order of their waits: a
    /// change is answered before another one of its session that depends on it.
    pub fn may_reply(&self, seq: CommitSeq) -> bool {
        seq <= self.kv.durable() && self.right.answers() && self.replies.have_left_to(seq)
    }

    /// Answers with `result` once `seq` is durable; [`Commits::settle`] comes soon.
    pub fn reply(&self, seq: CommitSeq, responder: Responder, result: Result<Reply>) {
        self.replies.push(seq, responder, result);
    }
    /// Nothing more is executed for now: sees to it that waiting requests are answered. If none waits,
    /// commits become durable soon: a sync for each would take the processor from those that answer.
    pub fn settle(&self) {
        let is_waited_for = self.replies.settle(&self.kv, &self.right);
        let is_durable = self.newest.load(SeqCst) <= self.kv.durable().0;
        if is_waited_for || is_durable || self.flushes_soon.swap(true, SeqCst) {
            return;
        }
        let (kv, clock, flushes_soon) = (self.kv.clone(), self.env.clock.clone(), self.flushes_soon.clone());
        self.env.tasks.spawn("flush", async move {
            clock.sleep(UNFLUSHED_FOR).await;
            flushes_soon.store(false, SeqCst);
            kv.flush_soon();
        });
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
