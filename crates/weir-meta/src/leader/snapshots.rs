//! Takes a snapshot, while no further client begins to write there.
//!
//! Invariants: a snapshot waits for clients that write files of its volume, and others wait to begin until it
//! is taken or abandoned; one at a time.

use super::State;
use super::base::Base;
use super::operations::{How, Operations, Step};
use super::outcome::Outcome;
use super::revoke::Revoker;
use super::state::Parked;
use crate::namespace::volume;
use crate::obstacle::{Obstacle, Obstacles};
use std::sync::Arc;
use std::time::Duration;
use weir_proto::snapshot::SnapshotTake;
use weir_proto::{Error, InodeId, Result, VolumeId};
use weir_rpc::{Call, Connection, Payload, Reply};

/// A client that does not return a revoked lease loses its session in time: then it is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Takes snapshots for clients.
pub struct SnapshotCalls {
    base: Arc<Base>,
    operations: Arc<Operations>,
    revoker: Arc<Revoker>,
}

impl SnapshotCalls {
    pub fn new(base: &Arc<Base>, operations: &Arc<Operations>, revoker: &Arc<Revoker>) -> Arc<SnapshotCalls> {
        Arc::new(SnapshotCalls {
            base: base.clone(),
            operations: operations.clone(),
            revoker: revoker.clone(),
        })
    }

    pub fn take(self: &Arc<Self>, r: SnapshotTake, call: &Call) -> Outcome {
        let (calls, deadline, on) = (self.clone(), call.deadline, call.connection.clone());
        Outcome::Waits(Box::pin(async move {
            calls.take_now(r, deadline, on).await.map_err(|e| calls.base.commits.map_error(e))
        }))
    }

    async fn take_now(
        self: &Arc<Self>,
        r: SnapshotTake,
        deadline: weir_env::Instant,
        on: Connection,
    ) -> Result<Reply> {
        let mut gate = Gate::new(&self.base);
        loop {
            let (step, newest) = {
                let mut state = self.base.lock();
                let step = match gate.is_mine(&mut state, r.volume)? {
                    true => {
                        Some(self.operations.attempt(&mut state, &r, &on, &mut gate.parked, &How::Durable))
                    }
                    false => None, // of another one
                };
                (step, self.base.commits.newest(&state))
            };
            let (wait, obstacles) = match step {
                None => (None, Obstacles::default()),
                Some(Ok((Step::Done(answer), _))) => {
                    drop(gate);
                    self.base.commits.durable(answer.wait).await?;
                    return Ok(Reply { body: answer.body, payload: Payload::default() });
                }
                Some(Ok((Step::Wait(wait), obstacles))) => (Some(wait), obstacles),
                Some(Err(e)) => {
                    drop(gate);
                    self.base.commits.durable(newest).await?;
                    return Err(e);
                }
            };
            let waits_for = obstacles.first().map(Obstacle::ino);
            self.revoker.revoke(obstacles);
            if self.base.now() >= deadline {
                return Err(too_late(waits_for));
            }
            match wait {
                Some(wait) => drop(self.base.env.clock.timeout(RETRY_PAUSE, wait).await), // checks again either way
                None => self.base.env.clock.sleep(RETRY_PAUSE).await,
            }
        }
    }
}

pub(crate) fn too_late(waits_for: Option<InodeId>) -> Error {
    Error::deadline(match waits_for {
        Some(ino) => format!("take a snapshot: a client has not saved what it wrote to inode {ino} yet"),
        None => "take a snapshot: another one is being taken, or clients of the former leader may return"
            .to_owned(),
    })
}

/// While a snapshot waits no further client begins to write in its volume.
pub(crate) struct Gate {
    base: Arc<Base>,
    root: Option<InodeId>,
    pub parked: Parked,
}

impl Gate {
    pub fn new(base: &Arc<Base>) -> Gate {
        Gate { base: base.clone(), root: None, parked: Parked::default() }
    }
    /// Closes the gate of a volume if no other snapshot has one closed. True: proceed (a deleted volume has
    /// none).
    pub fn is_mine(&mut self, state: &mut State, of: VolumeId) -> Result<bool> {
        if self.root.is_none() && state.snapshotting.is_none() {
            let mut root = None;
            self.base.read(&mut |read| {
                root = volume::find(read, of)?.map(|record| record.root);
                Ok(())
            })?;
            self.root = root;
            state.snapshotting = root.map(|root| (of, root));
        }
        Ok(self.root.is_some() || state.snapshotting.is_none())
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let mut state = self.base.lock();
        state.unpark(&mut self.parked);
        if let Some(root) = self.root {
            state.snapshotting = None;
            state.wake(root);
        }
    }
}
