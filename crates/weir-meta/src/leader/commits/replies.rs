//! Replies that wait until their changes are durable.
//!
//! A connection's reader makes the changes that it has just executed durable itself, and answers, as long as
//! they are few: that saves a lone client two thread switches. When many requests are in flight one task
//! sends all replies: a group commit completes many at once while others are executed. Either way they leave
//! in the order of the commits that they wait for.

use crate::copies::Right;
use std::collections::BTreeMap;
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
    waiting: Mutex<Queue>,
    answering: Mutex<()>,
    wake: Notify,
}

#[derive(Default)]
struct Queue {
    /// By the commit that each waits for, and in their own order.
    waiting: BTreeMap<(CommitSeq, u64), Waiting>,
    pushed: u64,
}

struct Waiting {
    responder: Responder,
    result: Result<Reply>,
}

impl Replies {
    /// Answers with `result` once `seq` is durable; [`Replies::settle`] comes soon.
    pub fn push(&self, seq: CommitSeq, responder: Responder, result: Result<Reply>) {
        let mut queue = self.lock();
        queue.pushed += 1;
        let place = (seq, queue.pushed);
        queue.waiting.insert(place, Waiting { responder, result });
    }

    /// Whether all replies that wait for `seq`, or for less, have left.
    pub fn have_left_to(&self, seq: CommitSeq) -> bool {
        let _in_order = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
        self.lock().first().is_none_or(|first| first > seq)
    }

    /// Nothing more is executed for now: sees to it that waiting requests are answered. False: none waits.
    pub fn settle(&self, kv: &SharedKv, right: &Right) -> bool {
        let waiting = self.lock().waiting.len();
        if waiting == 0 {
            return false;
        }
        if (1..=SETTLED_HERE_MAX).contains(&waiting) && kv.flush_here() {
            self.answer(right, kv.durable());
        } else {
            kv.flush_soon();
        }
        if !self.lock().waiting.is_empty() {
            self.wake.notify_one();
        }
        true
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
            let first = self.lock().first();
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
        let mut queue = self.lock();
        let later = match durable.0.checked_add(1) {
            Some(next) => queue.waiting.split_off(&(CommitSeq(next), 0)),
            None => BTreeMap::new(),
        };
        std::mem::replace(&mut queue.waiting, later).into_values().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn first(&self) -> Option<CommitSeq> {
        self.waiting.first_key_value().map(|((seq, _), _)| *seq)
    }
}
