//! Replies that wait until their changes are durable.
//!
//! A connection's reader makes the changes that it has just executed durable itself, and answers, as long as
//! they are few: that saves a lone client two thread switches. When many requests are in flight one task
//! sends all replies: a group commit completes many at once while others are executed. Either way they leave
//! in the order of their commits.

use crate::copies::Right;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_kv::{CommitSeq, SharedKv};
use weir_proto::{Error, Result};
use weir_rpc::{Reply, Responder};

/// With more replies waiting than this the journal's own thread writes, and the reader continues to read.
const SETTLED_HERE_MAX: usize = 4;

/// Bounded by the requests that connections may have in flight.
#[derive(Default)]
pub struct Replies {
    waiting: Mutex<VecDeque<Waiting>>,
    answering: Mutex<()>,
    wake: Notify,
}

struct Waiting {
    seq: CommitSeq,
    responder: Responder,
    result: Result<Reply>,
}

impl Replies {
    /// Answers with `result` once `seq` is durable; [`Replies::settle`] comes soon.
    pub fn push(&self, seq: CommitSeq, responder: Responder, result: Result<Reply>) {
        self.lock().push_back(Waiting { seq, responder, result });
    }

    /// Nothing more is executed for now: sees to it that waiting requests are answered.
    pub fn settle(&self, kv: &SharedKv, right: &Right) {
        let waiting = self.lock().len();
        if (1..=SETTLED_HERE_MAX).contains(&waiting) && kv.flush_here() {
            self.answer(right, kv.durable());
        } else {
            kv.flush_soon();
        }
        if !self.lock().is_empty() {
            self.wake.notify_one();
        }
    }

    /// Replies that may not be sent now wait for [`Replies::send`].
    fn answer(&self, right: &Right, durable: CommitSeq) {
        if !right.answers() {
            return;
        }
        // One at a time, so that they leave in order.
        let _in_order = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(durable).into_iter().for_each(|w| w.responder.answer(w.result));
    }

    /// The commit that the first reply waits for, as soon as there is a reply.
    pub async fn first(&self) -> CommitSeq {
        loop {
            let first = self.lock().front().map(|w| w.seq);
            match first {
                Some(first) => return first,
                None => self.wake.notified().await,
            }
        }
    }

    /// Commits up to `durable` are durable: sends their replies.
    pub fn send(&self, right: &Right, durable: CommitSeq) {
        self.answer(right, durable);
    }

    /// All waiting callers get an error.
    pub fn fail(&self, e: &Error) {
        self.take(CommitSeq(u64::MAX)).into_iter().for_each(|w| w.responder.answer(Err(e.clone())));
    }

    /// Replies that need not wait any more.
    fn take(&self, durable: CommitSeq) -> Vec<Waiting> {
        let mut waiting = self.lock();
        let ready = waiting.iter().take_while(|w| w.seq <= durable).count();
        waiting.drain(..ready).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
