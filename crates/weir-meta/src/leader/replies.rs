//! Replies that wait until their changes are durable.
//!
//! A connection's reader makes the changes that it has just executed durable itself, and answers, as long as
//! they are few: that saves a lone client two thread switches. When many requests are in flight one task
//! sends all replies: a group commit completes many at once while others are executed. Either way they leave
//! in the order of their commits.

use crate::leader::Leader;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_kv::CommitSeq;
use weir_proto::{Error, Result};
use weir_rpc::{Reply, Responder};

/// With more replies waiting than this the journal's own thread writes, and the reader continues to read.
const SETTLED_HERE_MAX: usize = 4;

/// Bounded by the requests that connections may have in flight.
#[derive(Default)]
pub(crate) struct Replies {
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
    pub fn settle(&self, leader: &Leader) {
        let waiting = self.lock().len();
        if (1..=SETTLED_HERE_MAX).contains(&waiting) && leader.kv.flush_here() {
            self.answer(leader, leader.kv.durable());
        } else {
            leader.kv.flush_soon();
        }
        if !self.lock().is_empty() {
            self.wake.notify_one();
        }
    }

    /// Replies that may not be sent now wait for [`Replies::run`].
    fn answer(&self, leader: &Leader, durable: CommitSeq) {
        if !leader.config.right.answers() {
            return;
        }
        // One at a time, so that they leave in order.
        let _in_order = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(durable).into_iter().for_each(|w| w.responder.answer(w.result));
    }

    /// Sends for ever; returns the error of a failed journal, after all waiting callers have it.
    pub async fn run(&self, leader: &Leader) -> Error {
        loop {
            let first = self.lock().front().map(|w| w.seq);
            let Some(first) = first else {
                self.wake.notified().await;
                continue;
            };
            if let Err(e) = leader.durable(first).await {
                self.take(CommitSeq(u64::MAX)).into_iter().for_each(|w| w.responder.answer(Err(e.clone())));
                if leader.failed.borrow().is_some() {
                    return e;
                }
                continue; // it lacks the right to answer for a while
            }
            let durable = leader.kv.durable().max(first);
            self.answer(leader, durable);
        }
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
