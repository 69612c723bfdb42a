//! Requests that wait for recalls: a signal ends the wait.
//!
//! Invariant: only the wait ends early, never a write half done. Requests that need not wait do not come
//! here.
use crate::locks::Waits;
use crate::replies::refused;
use fuser::{Errno, Request};
use std::sync::Arc;
use weir_client::{Client, Handle};
use weir_proto::Result;

/// A request that may have to wait.
pub struct FromHome {
    client: Client,
    waits: Arc<Waits>,
    unique: u64,
}

impl FromHome {
    pub fn new(client: &Client, waits: &Arc<Waits>, request: &Request) -> FromHome {
        FromHome { client: client.clone(), waits: waits.clone(), unique: request.unique().0 }
    }

    /// Returns when `len` bytes from `offset` (`None`: the end of the file) on are online.
    pub async fn recall(
        &self,
        file: Handle,
        offset: Option<u64>,
        len: usize,
    ) -> std::result::Result<(), Errno> {
        if !self.client.may_wait_for_home(file) {
            return Ok(());
        }
        self.unless_interrupted(self.client.recall(file, offset, len)).await
    }

    /// The end of a wait, or `EINTR`.
    pub async fn unless_interrupted<T>(
        &self,
        wait: impl Future<Output = Result<T>>,
    ) -> std::result::Result<T, Errno> {
        let interrupt = self.waits.begin(self.unique);
        let ended = tokio::select! {
            biased;
            done = wait => done.map_err(|e| refused(&e)),
            () = interrupt.notified() => Err(if self.waits.is_closing() { Errno::EIO } else { Errno::EINTR }),
        };
        self.waits.end(self.unique);
        ended
    }
}
