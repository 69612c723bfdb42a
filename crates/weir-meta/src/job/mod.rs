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
use weir_env::BoxFuture;
use weir_proto::Error;

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

/// Runs all of them until one ends.
pub async fn run_all(leader: &Arc<Leader>) -> Error {
    let mut jobs: Vec<_> = ALL.iter().map(|job| job(leader.clone())).collect();
    poll_fn(|cx| {
        let ended = jobs.iter_mut().find_map(|job| match job.as_mut().poll(cx) {
            Poll::Ready(e) => Some(e),
            Poll::Pending => None,
        });
        ended.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}
