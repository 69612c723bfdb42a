//! The outcome of a call in place: a reply for when its commit is durable, or a wait.
use super::Leader;
use std::sync::Arc;
use weir_env::BoxFuture;
use weir_kv::CommitSeq;
use weir_proto::{Error, Result, Wire};
use weir_rpc::{Payload, Reply};

/// The outcome of a call in place.
pub enum Outcome {
    /// The reply, to be sent once the commit is durable.
    Ready(CommitSeq, Result<Reply>),
    Waits(BoxFuture<'static, Result<Reply>>),
}

impl Outcome {
    pub fn refused(e: Error) -> Outcome {
        Outcome::Ready(CommitSeq(0), Err(e))
    }
    pub fn now(done: Result<()>) -> Outcome {
        Outcome::plain(done)
    }
    pub fn plain<T: Wire>(done: Result<T>) -> Outcome {
        Outcome::Ready(CommitSeq(0), done.map(|body| Reply::new(&body)))
    }
    pub fn committed<T: Wire>(done: Result<(T, CommitSeq)>) -> Outcome {
        match done {
            Ok((body, seq)) => Outcome::Ready(seq, Ok(Reply::new(&body))),
            Err(e) => Outcome::refused(e),
        }
    }
}

impl Outcome {
    /// An error of the store ends this leader, not the caller.
    pub fn mapped(self, leader: &Leader) -> Outcome {
        match self {
            Outcome::Ready(seq, Err(e)) => Outcome::Ready(seq, Err(leader.base.commits.map_error(e))),
            outcome => outcome,
        }
    }
}

/// A call that may wait for an event.
pub fn waits<R, T, F>(
    leader: &Arc<Leader>,
    request: Result<R>,
    serve: impl FnOnce(Arc<Leader>, R) -> F,
) -> Outcome
where
    T: Wire,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let request = match request {
        Ok(request) => request,
        Err(e) => return Outcome::refused(e),
    };
    let (leader, serving) = (leader.clone(), serve(leader.clone(), request));
    Outcome::Waits(Box::pin(async move {
        serving.await.map_err(|e| leader.base.commits.map_error(e)).map(|body| Reply::new(&body))
    }))
}

pub fn reply(body: Vec<u8>) -> Reply {
    Reply { body, payload: Payload::default() }
}
