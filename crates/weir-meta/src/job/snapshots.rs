//! The work on snapshots: taken while no further client begins to write there, removed a few records at a
//! time.
//!
//! Invariants: a snapshot waits for clients that write files of its volume, and others wait to begin until it
//! is taken or abandoned; one at a time. A removal is completed, even after a restart; each step is one
//! bounded transaction.

use crate::leader::{State, Step};
use crate::namespace::{snapshot, volume};
use crate::service::{Meta, Outcome};
use std::time::Duration;
use weir_proto::snapshot::SnapshotTake;
use weir_proto::{Error, InodeId, Result, SessionId, VolumeId};
use weir_rpc::{Call, Connection, Payload, Reply};

/// Not a client's session.
const NOBODY: SessionId = SessionId(0);
/// A client that does not return a revoked lease loses its session in time: then it is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

impl Meta {
    pub(crate) fn take_snapshot(&self, request: Result<SnapshotTake>, call: &Call) -> Outcome {
        let (meta, deadline, on) = (self.clone(), call.deadline, call.connection.clone());
        match request {
            Ok(r) => Outcome::Waits(Box::pin(async move {
                meta.take_snapshot_now(r, deadline, on).await.map_err(|e| meta.leader().map_error(e))
            })),
            Err(e) => Outcome::refused(e),
        }
    }

    async fn take_snapshot_now(
        &self,
        r: SnapshotTake,
        deadline: weir_env::Instant,
        on: Connection,
    ) -> Result<Reply> {
        let leader = self.leader().clone();
        let mut gate = Gate::new(self);
        loop {
            let (step, newest) = {
                let mut state = leader.lock();
                let step = match gate.is_mine(&mut state, r.volume)? {
                    true => Some(leader.attempt(&mut state, &r, &on, &mut gate.parked)),
                    false => None, // of another one
                };
                (step, state.newest)
            };
            let (wait, conflicts) = match step {
                None => (None, Vec::new()),
                Some(Ok((Step::Done(body, seq), _))) => {
                    drop(gate);
                    leader.durable(seq).await?;
                    return Ok(Reply { body, payload: Payload::default() });
                }
                Some(Ok((Step::Wait(wait), conflicts))) => (Some(wait), conflicts),
                Some(Err(e)) => {
                    drop(gate);
                    leader.durable(newest).await?;
                    return Err(e);
                }
            };
            let waits_for = conflicts.first().map(|c| c.ino);
            self.revoke(conflicts);
            if leader.env.clock.now() >= deadline {
                return Err(too_late(waits_for));
            }
            match wait {
                Some(wait) => drop(leader.env.clock.timeout(RETRY_PAUSE, wait).await), // checks again either way
                None => leader.env.clock.sleep(RETRY_PAUSE).await,
            }
        }
    }

    /// Removes records of deleted snapshots for ever; returns only the error after which the node must stop.
    pub(crate) async fn forget_snapshots(&self) -> Error {
        let leader = self.leader();
        loop {
            let next = snapshot::next_deleted(&leader.lock().snapshots);
            let Some((volume, number)) = next else {
                leader.forgetting.notified().await;
                continue;
            };
            let (step, newest) = {
                let mut state = leader.lock();
                let step = leader.housekeep(&mut state, NOBODY, &mut |cx| {
                    snapshot::forget_some(cx, volume, number).map(drop)
                });
                (step, state.newest)
            };
            // Few changes are not durable, and callers that wait for the journal come in between.
            if let Err(e) = step.and(leader.durable(newest).await)
                && let Err(e) = leader.retry_job(e, "remove a snapshot").await
            {
                return e;
            }
        }
    }
}

pub(crate) fn too_late(waits_for: Option<InodeId>) -> Error {
    Error::deadline(match waits_for {
        Some(ino) => format!("take a snapshot: a client has not saved what it wrote to inode {ino} yet"),
        None => "take a snapshot: another one is being taken, or clients of before a restart may come back"
            .to_owned(),
    })
}

/// While a snapshot waits no further client begins to write in its volume.
pub(crate) struct Gate {
    meta: Meta,
    root: Option<InodeId>,
    pub parked: Vec<InodeId>,
}

impl Gate {
    pub fn new(meta: &Meta) -> Gate {
        Gate { meta: meta.clone(), root: None, parked: Vec::new() }
    }
    /// Closes the gate of a volume if no other snapshot has one closed. True: proceed (a deleted volume has
    /// none).
    pub fn is_mine(&mut self, state: &mut State, of: VolumeId) -> Result<bool> {
        if self.root.is_none() && state.snapshotting.is_none() {
            let mut root = None;
            self.meta.leader().kv.read(&mut |read| {
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
        let mut state = self.meta.leader().lock();
        state.give_up(&mut self.parked);
        if let Some(root) = self.root {
            state.snapshotting = None;
            state.wake(root);
        }
    }
}
