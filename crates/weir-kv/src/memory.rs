//! The store in memory: for tests, and as the oracle for the engine. Durable at once, lost with the process.
//!
//! Same transactions and merges as the engine (shared code); no journal, no tree below.

use crate::state::{Body, State};
use crate::{CommitSeq, Kv, Read, Txn};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use weir_env::BoxFuture;
use weir_proto::Result;

#[derive(Default)]
pub struct MemoryKv {
    writer: Mutex<()>,
    state: RwLock<State>,
}

impl MemoryKv {
    pub fn new() -> MemoryKv {
        MemoryKv::default()
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        // A panic in a body leaves the state consistent: only `apply` changes it.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> MutexGuard<'_, ()> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kv for MemoryKv {
    fn transact(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        let _alone = self.writer();
        let state = self.state();
        let mut txn = Body::new(&state);
        body(&mut txn)?;
        let changes = txn.finish()?;
        let seq = state.seq;
        drop(state);
        if changes.is_empty() {
            return Ok(seq);
        }
        let seq = CommitSeq(seq.0 + 1);
        self.state.write().unwrap_or_else(PoisonError::into_inner).apply(seq, changes);
        Ok(seq)
    }

    fn transact_more(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        self.transact(body)
    }

    fn flush_soon(&self) {}

    fn flush_here(&self) -> bool {
        true
    }

    fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<CommitSeq> {
        let state = self.state();
        body(&*state)?;
        Ok(state.seq)
    }

    fn durable(&self) -> CommitSeq {
        self.state().seq
    }

    fn wait_durable(&self, _seq: CommitSeq) -> BoxFuture<'static, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn checkpoint(&self) -> BoxFuture<'static, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
