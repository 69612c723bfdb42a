//! Removes the content of a deleted volume, a few names at a time; also that of directories that are gone at
//! a home which their volume mirrors.
//!
//! Invariants: a volume whose record has this mark is removed to its end, even after a restart; its record is
//! removed with its last directory. Each step is one bounded transaction, so that other operations wait for
//! moments only, and revokes leases as an `unlink` by a client would.

use crate::leader::Leader;
use crate::namespace::{mirror, volume};
use std::sync::Arc;
use std::time::Duration;
use weir_proto::{Error, Result, VolumeId};

/// A client that does not return a revoked lease loses its session in time: then it is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

pub async fn run(leader: Arc<Leader>) -> Error {
    Remover { leader }.run().await
}

/// Removes deleted volumes, and directories that are gone at a mirrored home.
struct Remover {
    leader: Arc<Leader>,
}

impl Remover {
    /// Removes pending content for ever; returns only the error after which the node must stop.
    async fn run(&self) -> Error {
        loop {
            match self.remove_next().await {
                Ok(true) => {}
                Ok(false) => self.leader.bells.removal.notified().await,
                Err(e) => {
                    if let Err(e) = self.leader.base.retry_job(e, "remove deleted volumes").await {
                        return e;
                    }
                }
            }
        }
    }

    /// False: there is nothing to remove.
    async fn remove_next(&self) -> Result<bool> {
        let leader = &self.leader;
        while leader.base.lock().grace.until.is_some() {
            // Clients from before a restart may still return with their leases.
            leader.base.env.clock.sleep(RETRY_PAUSE).await;
        }
        while self.leader.operations.step(&mut mirror::remove_some).await? {}
        let mut next = None;
        leader.base.read(&mut |read| {
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
        self.leader.operations.step(&mut |cx| volume::remove::remove_some(cx, id)).await
    }
}
