//! Removes the content of a deleted volume, a few names at a time; also that of directories that are gone at
//! a home which their volume mirrors.
//!
//! Invariants: a volume whose record has this mark is removed to its end, even after a restart; its record is
//! removed with its last directory. Each step is one bounded transaction, so that other operations wait for
//! moments only, and revokes leases as an `unlink` by a client would.

use crate::leader::State;
use crate::lease::Conflict;
use crate::namespace::{Cx, mirror, volume};
use crate::service::Meta;
use std::time::Duration;
use weir_proto::{Error, InodeId, Result, SessionId, VolumeId};

/// Not a client's: it holds no lease, so all others' leases conflict.
const NOBODY: SessionId = SessionId(0);
/// A client that does not return a revoked lease loses its session in time: then it is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

impl Meta {
    /// Removes pending content for ever; returns only the error after which the node must stop.
    pub(crate) async fn remove_volumes(&self) -> Error {
        loop {
            match self.remove_next().await {
                Ok(true) => {}
                Ok(false) => self.leader().removal.notified().await,
                Err(e) => {
                    if let Err(e) = self.leader().retry_job(e, "remove deleted volumes").await {
                        return e;
                    }
                }
            }
        }
    }

    /// False: there is nothing to remove.
    async fn remove_next(&self) -> Result<bool> {
        let leader = self.leader();
        while leader.lock().grace_until.is_some() {
            // Clients from before a restart may still return with their leases.
            leader.env.clock.sleep(RETRY_PAUSE).await;
        }
        while self.step(&mut mirror::remove_some).await? {}
        let mut next = None;
        leader.kv.read(&mut |read| {
            next = volume::remove::next_deleted(read)?;
            Ok(())
        })?;
        let Some(id) = next else { return Ok(false) };
        while !self.remove_some(id).await? {}
        tracing::info!(volume = %id, "all of a deleted volume is removed");
        Ok(true)
    }

    /// One step. True: that was the last one.
    async fn remove_some(&self, id: VolumeId) -> Result<bool> {
        self.step(&mut |cx| volume::remove::remove_some(cx, id)).await
    }

    /// A change of the leader itself, as soon as no client's lease conflicts.
    pub(crate) async fn step<T: Default>(
        &self,
        change: &mut (dyn FnMut(&mut Cx<'_>) -> Result<T> + Send),
    ) -> Result<T> {
        let leader = self.leader();
        let mut parked = Parked { meta: self, inodes: Vec::new() };
        loop {
            let (mut done, mut conflicts) = (T::default(), Vec::new());
            let (step, wait, newest) = {
                let mut state = leader.lock();
                state.give_up(&mut parked.inodes);
                let step = leader.housekeep_asking(&mut state, NOBODY, &mut conflicts, &mut |cx| {
                    done = change(cx)?;
                    Ok(())
                });
                let wait = self.park(&mut state, &conflicts, &mut parked.inodes);
                (step, wait, state.newest)
            };
            let Some(wait) = wait else {
                step?;
                // Few changes are not durable, and callers that wait for the journal come in between.
                leader.durable(newest).await?;
                return Ok(done);
            };
            self.revoke(conflicts);
            let _ = leader.env.clock.timeout(RETRY_PAUSE, wait).await; // checks again either way
        }
    }

    fn park(
        &self,
        state: &mut State,
        conflicts: &[Conflict],
        parked: &mut Vec<InodeId>,
    ) -> Option<tokio::sync::futures::OwnedNotified> {
        (!conflicts.is_empty()).then(|| state.park(conflicts, parked))
    }
}

/// Inodes on which no lease is granted; unparked when this is dropped.
struct Parked<'a> {
    meta: &'a Meta,
    inodes: Vec<InodeId>,
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        if !self.inodes.is_empty() {
            self.meta.leader().lock().give_up(&mut self.inodes);
        }
    }
}
