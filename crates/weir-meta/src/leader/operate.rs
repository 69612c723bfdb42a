//! Operations on the namespace: tried at once, and again when the leases that they wait for are returned.
use super::Leader;
use super::attempt::Step;
use super::outcome::{Outcome, reply};
use super::state::Parked;
use crate::ops::Operation;
use std::sync::Arc;
use weir_env::Instant;
use weir_kv::CommitSeq;
use weir_proto::{Error, InodeId, Request, Result};
use weir_rpc::{Call, Connection, Reply};
use weir_watch::WaitGuard;

impl Leader {
    /// Runs an operation in place, or lets it wait in a task of its own.
    pub fn operate<R: Operation>(self: &Arc<Self>, call: &Call) -> Outcome {
        let request = match call.decode::<R>() {
            Ok(request) => request,
            Err(e) => return Outcome::refused(e),
        };
        let leader = self;
        let mut parked = Parked::default();
        let mut state = leader.lock();
        let step = leader.attempt(&mut state, &request, &call.connection, &mut parked);
        let newest = state.newest;
        drop(state);
        match step {
            Ok((Step::Done(body, _), _)) if R::EARLY => Outcome::Ready(CommitSeq(0), Ok(reply(body))),
            Ok((Step::Done(body, seq), _)) => Outcome::Ready(seq, Ok(reply(body))),
            Ok((Step::Wait(wait), obstacles)) => {
                let shown = leader.waits(&request, &parked.inodes, &obstacles);
                self.revoke(obstacles);
                let waiting = Waiting { leader: leader.clone(), on: call.connection.clone(), parked, shown };
                Outcome::Waits(Box::pin(wait_and_retry(self.clone(), request, waiting, wait, call.deadline)))
            }
            // A refusal reveals the changes of others, too.
            Err(e) => Outcome::Ready(newest, Err(e)),
        }
    }
}

/// An operation that is parked on inodes; unparks them when it is dropped.
struct Waiting {
    leader: Arc<Leader>,
    /// The connection that it came from.
    on: Connection,
    parked: Parked,
    /// The wait as it is shown.
    shown: WaitGuard,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.leader.lock().unpark(&mut self.parked);
    }
}

async fn wait_and_retry<R: Operation>(
    leader: Arc<Leader>,
    request: R,
    mut waiting: Waiting,
    mut wait: tokio::sync::futures::OwnedNotified,
    deadline: Instant,
) -> Result<Reply> {
    loop {
        let over = leader.env.clock.sleep_until(deadline);
        tokio::select! {
            biased;
            () = wait => {}
            () = over => return Err(too_late::<R>(&leader, &waiting.parked.inodes)),
        }
        leader.admission.retries.add(1);
        let (step, newest) = {
            let mut state = leader.lock();
            let step = leader.attempt(&mut state, &request, &waiting.on, &mut waiting.parked);
            (step, state.newest)
        };
        match step {
            Ok((Step::Done(body, seq), _)) => {
                leader.durable(seq).await?;
                return Ok(reply(body));
            }
            Ok((Step::Wait(again), obstacles)) => {
                if !obstacles.is_empty() {
                    waiting.shown = leader.waits(&request, &waiting.parked.inodes, &obstacles);
                }
                leader.revoke(obstacles);
                wait = again;
            }
            Err(e) => {
                leader.durable(newest).await?;
                return Err(e);
            }
        }
    }
}

fn too_late<R: Request>(leader: &Leader, parked: &[InodeId]) -> Error {
    let not_enumerated =
        parked.iter().find_map(|ino| leader.why_not_cloned(*ino).or_else(|| leader.why_not_enumerated(*ino)));
    let why = match parked.first() {
        _ if not_enumerated.is_some() => not_enumerated.unwrap_or_default(),
        Some(ino) => format!("another client has not given its lease on inode {ino} back yet"),
        None if leader.lock().grace.until.is_some() => {
            "clients of the former leader may still return".to_owned()
        }
        None => "the wait was longer than the caller's patience".to_owned(),
    };
    Error::deadline(format!("{}: {why}", R::NAME))
}
