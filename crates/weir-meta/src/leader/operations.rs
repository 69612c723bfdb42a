//! Operations on the namespace: tried at once, and again when the leases that they wait for are returned.
mod attempt;
mod early;
mod step;
mod waits;

use super::base::Base;
use super::holds::HoldRecords;
use super::missing_names::MissingNames;
use super::outcome::{Outcome, reply};
use super::revoke::Revoker;
use super::state::Parked;
use super::transactions::Transactions;
use crate::ops::Operation;
pub use attempt::Step;
use std::sync::Arc;
use weir_env::Instant;
use weir_kv::CommitSeq;
use weir_proto::early::Given;
use weir_proto::{Error, InodeId, Request, Result};
use weir_rpc::{Call, Connection, Reply};
use weir_watch::WaitGuard;

/// Tries operations of clients, and lets them wait.
pub struct Operations {
    base: Arc<Base>,
    tx: Arc<Transactions>,
    holds: Arc<HoldRecords>,
    names: Arc<MissingNames>,
    revoker: Arc<Revoker>,
}

impl Operations {
    pub fn new(
        base: &Arc<Base>,
        tx: &Arc<Transactions>,
        holds: &Arc<HoldRecords>,
        names: &Arc<MissingNames>,
        revoker: &Arc<Revoker>,
    ) -> Arc<Operations> {
        Arc::new(Operations {
            base: base.clone(),
            tx: tx.clone(),
            holds: holds.clone(),
            names: names.clone(),
            revoker: revoker.clone(),
        })
    }

    /// Runs an operation in place, or lets it wait in a task of its own.
    pub fn operate<R: Operation>(self: &Arc<Self>, call: &Call) -> Outcome {
        match call.decode::<R>() {
            Ok(request) => self.run_or_wait(request, call, How::Durable),
            Err(e) => Outcome::refused(e),
        }
    }

    fn run_or_wait<R: Operation>(self: &Arc<Self>, request: R, call: &Call, how: How<R>) -> Outcome {
        let mut parked = Parked::default();
        let mut state = self.base.lock();
        let step = self.attempt(&mut state, &request, &call.connection, &mut parked, &how);
        let newest = self.base.commits.newest(&state);
        drop(state);
        match step {
            Ok((Step::Done(answer), _)) if R::EARLY => Outcome::Ready(CommitSeq(0), Ok(reply(answer.body))),
            Ok((Step::Done(answer), wanted)) => {
                self.revoker.revoke(wanted);
                Outcome::Ready(answer.wait, Ok(reply(self.in_form(&how, answer))))
            }
            Ok((Step::Wait(wait), obstacles)) => {
                let shown = self.waits(&request, &parked.inodes, &obstacles);
                self.revoker.revoke(obstacles);
                let waiting =
                    Waiting { operations: self.clone(), on: call.connection.clone(), parked, shown };
                Outcome::Waits(Box::pin(wait_and_retry(
                    self.clone(),
                    (request, how),
                    waiting,
                    wait,
                    call.deadline,
                )))
            }
            // A refusal reveals the changes of others, too.
            Err(e) => Outcome::Ready(newest, Err(e)),
        }
    }
}

/// When the answer to an operation leaves.
pub enum How<R: Operation> {
    /// When it is durable, or all that it shows.
    Durable,
    /// If it may leave early: when all that it depends on is durable, except for changes of its own session.
    /// In the form of an early answer either way.
    Early { may_leave: bool },
    /// Another leader has answered it early.
    Again(Again<R>),
}

/// A change as it was made by another leader.
pub struct Again<R: Operation> {
    pub given: Given,
    pub reply: R::Reply,
    /// Whether two answers report the same change.
    pub agree: fn(&R::Reply, &R::Reply) -> bool,
}

impl<R: Operation> How<R> {
    pub fn is_durable(&self) -> bool {
        matches!(self, How::Durable | How::Early { may_leave: false })
    }
    pub fn again(&self) -> Option<&Again<R>> {
        if let How::Again(again) = self { Some(again) } else { None }
    }
}

/// The answer to an operation.
pub struct Answer {
    pub body: Vec<u8>,
    /// The commit that it waits for.
    pub wait: CommitSeq,
    /// With this commit the operation is durable.
    pub newest: CommitSeq,
    pub given: Given,
}

/// An operation that is parked on inodes; unparks them when it is dropped.
struct Waiting {
    operations: Arc<Operations>,
    /// The connection that it came from.
    on: Connection,
    parked: Parked,
    /// The wait as it is shown.
    shown: WaitGuard,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.operations.base.lock().unpark(&mut self.parked);
    }
}

async fn wait_and_retry<R: Operation>(
    operations: Arc<Operations>,
    (request, mut how): (R, How<R>),
    mut waiting: Waiting,
    mut wait: tokio::sync::futures::OwnedNotified,
    deadline: Instant,
) -> Result<Reply> {
    // The answer may overtake others of its session.
    if let How::Early { may_leave } = &mut how {
        *may_leave = false;
    }
    loop {
        let over = operations.base.env.clock.sleep_until(deadline);
        tokio::select! {
            biased;
            () = wait => {}
            () = over => return Err(too_late::<R>(&operations, &waiting.parked.inodes)),
        }
        operations.base.admission.retries.add(1);
        let (step, newest) = {
            let mut state = operations.base.lock();
            let step = operations.attempt(&mut state, &request, &waiting.on, &mut waiting.parked, &how);
            (step, operations.base.commits.newest(&state))
        };
        match step {
            Ok((Step::Done(answer), wanted)) => {
                operations.revoker.revoke(wanted);
                operations.base.commits.durable(answer.wait).await?;
                return Ok(reply(operations.in_form(&how, answer)));
            }
            Ok((Step::Wait(again), obstacles)) => {
                if !obstacles.is_empty() {
                    waiting.shown = operations.waits(&request, &waiting.parked.inodes, &obstacles);
                }
                operations.revoker.revoke(obstacles);
                wait = again;
            }
            Err(e) => {
                operations.base.commits.durable(newest).await?;
                return Err(e);
            }
        }
    }
}

fn too_late<R: Request>(operations: &Operations, parked: &[InodeId]) -> Error {
    let not_enumerated = parked.iter().find_map(|ino| operations.names.why_missing(*ino));
    let why = match parked.first() {
        _ if not_enumerated.is_some() => not_enumerated.unwrap_or_default(),
        Some(ino) => format!("another client has not given its lease on inode {ino} back yet"),
        None if operations.base.lock().grace.until.is_some() => {
            "clients of the former leader may still return".to_owned()
        }
        None => "the wait was longer than the caller's patience".to_owned(),
    };
    Error::deadline(format!("{}: {why}", R::NAME))
}
