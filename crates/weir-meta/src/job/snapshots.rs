//! Removes deleted snapshots, a few records at a time.
//!
//! Invariant: a removal is completed, even after a restart; each step is one bounded transaction.
use crate::leader::{Leader, NO_SESSION};
use crate::namespace::snapshot;
use std::sync::Arc;
use weir_proto::Error;

/// Removes records of deleted snapshots for ever; returns only the error after which the node must stop.
pub async fn run(leader: Arc<Leader>) -> Error {
    loop {
        let next = snapshot::next_deleted(&leader.base.lock().snapshots);
        let Some((volume, number)) = next else {
            leader.bells.forgetting.notified().await;
            continue;
        };
        let (step, newest) = {
            let mut state = leader.base.lock();
            let step = leader.tx.housekeep(&mut state, NO_SESSION, &mut |cx| {
                snapshot::forget_some(cx, volume, number).map(drop)
            });
            (step, leader.base.commits.newest(&state))
        };
        // Few changes are not durable, and callers that wait for the journal come in between.
        if let Err(e) = step.and(leader.base.commits.durable(newest).await)
            && let Err(e) = leader.base.retry_job(e, "remove a snapshot").await
        {
            return e;
        }
    }
}
