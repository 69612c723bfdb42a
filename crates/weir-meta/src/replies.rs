//! Replies that wait until what they tell is durable.
//!
//! One task sends them all: a group commit completes many at once, and none costs a task of its own. They leave in the
//! order of their commits.

use crate::executor::Leader;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_kv::CommitSeq;
use weir_proto::{Error, Result};
use weir_rpc::{Reply, Responder};

/// Bounded by the requests that connections may have under way.
#[derive(Default)]
pub(crate) struct Replies {
    waiting: Mutex<VecDeque<Waiting>>,
    wake: Notify,
}

struct Waiting {
    seq: CommitSeq,
    responder: Responder,
    result: Result<Reply>,
}

impl Replies {
    /// Answers with `result` once `seq` is durable.
    pub fn push(&self, seq: CommitSeq, responder: Responder, result: Result<Reply>) {
        let mut waiting = self.lock();
        waiting.push_back(Waiting { seq, responder, result });
        if waiting.len() == 1 {
            self.wake.notify_one();
        }
    }

    /// Sends for ever; returns the error of a failed journal, after everybody who waited has it.
    pub async fn run(&self, leader: &Leader) -> Error {
        loop {
            let first = self.lock().front().map(|w| w.seq);
            let Some(first) = first else {
                self.wake.notified().await;
                continue;
            };
            if let Err(e) = leader.durable(first).await {
                self.take(CommitSeq(u64::MAX)).into_iter().for_each(|w| w.responder.answer(Err(e.clone())));
                return e;
            }
            let durable = leader.kv.durable().max(first);
            self.take(durable).into_iter().for_each(|w| w.responder.answer(w.result));
        }
    }

    /// What need not wait any more.
    fn take(&self, durable: CommitSeq) -> Vec<Waiting> {
        let mut waiting = self.lock();
        let ready = waiting.iter().take_while(|w| w.seq <= durable).count();
        waiting.drain(..ready).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
