//! Sends the replies that wait for their commits, when many requests are in flight.
use crate::leader::Leader;
use std::sync::Arc;
use weir_proto::Error;

/// Sends for ever; returns the error of a failed journal, after all waiting callers have it.
pub async fn run(leader: Arc<Leader>) -> Error {
    leader.base.commits.send_replies().await
}
