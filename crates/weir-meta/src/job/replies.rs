//! Sends the replies that wait for their commits, when many requests are in flight.
use crate::leader::Leader;
use std::sync::Arc;
use weir_proto::Error;

/// Sends for ever; returns the error of a failed journal, after all waiting callers have it.
pub async fn run(leader: Arc<Leader>) -> Error {
    let replies = &leader.replies;
    loop {
        let first = replies.first().await;
        if let Err(e) = leader.durable(first).await {
            replies.fail(&e);
            if leader.failed.borrow().is_some() {
                return e;
            }
            continue; // it lacks the right to answer for a while
        }
        replies.send(&leader.config.right, leader.kv.durable().max(first));
    }
}
