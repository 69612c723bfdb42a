//! Steps of the leader's own jobs: each is one bounded transaction, made as soon as no client's lease
//! obstacles.
use super::Operations;
use crate::leader::NO_SESSION;
use crate::leader::state::Parked;
use crate::namespace::Cx;
use crate::obstacle::{Attempt, Halt, Obstacles};
use std::sync::Arc;
use std::time::Duration;
use weir_proto::Result;

/// A client that does not return a revoked lease loses its session in time: then it is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

impl Operations {
    /// A change of the leader itself, as soon as no client's lease obstacles.
    pub async fn step<T: Default>(
        self: &Arc<Self>,
        change: &mut (dyn FnMut(&mut Cx<'_>) -> Attempt<T> + Send),
    ) -> Result<T> {
        let mut waiting = Waiting { operations: self, parked: Parked::default() };
        loop {
            let (mut done, mut obstacles) = (T::default(), Obstacles::default());
            let (wait, newest) = {
                let mut state = self.base.lock();
                state.unpark(&mut waiting.parked);
                let step = self.tx.housekeep_asking(&mut state, NO_SESSION, &mut obstacles, &mut |cx| {
                    done = change(cx)?;
                    Ok(())
                });
                let step = match step {
                    Ok(()) => None,
                    Err(Halt::Blocked) => Some(state.park(NO_SESSION, &obstacles, &mut waiting.parked)),
                    Err(Halt::Failed(e)) => return Err(e),
                };
                (step, self.base.commits.newest(&state))
            };
            let Some(wait) = wait else {
                // Few changes are not durable, and callers that wait for the journal come in between.
                self.base.commits.durable(newest).await?;
                return Ok(done);
            };
            self.revoker.revoke(obstacles);
            let _ = self.base.env.clock.timeout(RETRY_PAUSE, wait).await; // checks again either way
        }
    }
}

/// Inodes on which no lease is granted; unparked when this is dropped.
struct Waiting<'a> {
    operations: &'a Operations,
    parked: Parked,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.operations.base.lock().unpark(&mut self.parked);
    }
}
