//! The leader's own jobs, beside the calls of clients.
//!
//! Each runs for ever and ends only with the error after which the node must stop. The leader names none of
//! them: it rings their bells, and `ALL` is the list.
mod clones;
mod evictor;
mod expiry;
mod ingest;
mod remover;
mod replies;
mod schedule;
mod snapshots;
mod sweeper;
mod trash;

use crate::leader::Leader;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use weir_env::{Backoff, BoxFuture, Retry};
use weir_proto::{Error, ErrorKind};

/// Starts a job.
type Job = fn(Arc<Leader>) -> BoxFuture<'static, Error>;

/// All jobs, in the order in which they get their turn.
const ALL: &[Job] = &[
    |leader| Box::pin(replies::run(leader)),
    |leader| Box::pin(expiry::run(leader)),
    |leader| Box::pin(sweeper::run(leader)),
    |leader| Box::pin(evictor::run(leader)),
    |leader| Box::pin(ingest::run(leader)),
    |leader| Box::pin(remover::run(leader)),
    |leader| Box::pin(snapshots::run(leader)),
    |leader| Box::pin(schedule::run(leader)),
    |leader| Box::pin(trash::run(leader)),
    |leader| Box::pin(clones::run(leader)),
];

/// The pauses of a job that could not record its work because the disk is full.
const FULL: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(30) };

/// Begins the job again if it ended because the disk is full: the lead need not end, others are served.
async fn keep(job: &Job, leader: &Arc<Leader>) -> Error {
    let mut pauses = Retry::jittered(&leader.base.env, FULL, leader.base.now());
    loop {
        let ended = job(leader.clone()).await;
        if ended.kind != ErrorKind::NoSpace {
            return ended;
        }
        leader.base.warn_of_full_disk(&ended);
        leader.base.env.clock.sleep(pauses.next_pause()).await;
    }
}

/// Runs all of them until one ends.
pub async fn run_all(leader: &Arc<Leader>) -> Error {
    let mut jobs: Vec<_> = ALL.iter().map(|job| Box::pin(keep(job, leader))).collect();
    poll_fn(|cx| {
        let ended = jobs.iter_mut().find_map(|job| match job.as_mut().poll(cx) {
            Poll::Ready(e) => Some(e),
            Poll::Pending => None,
        });
        ended.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}
