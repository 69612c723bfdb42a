//! The handle of a store's leader for one term. When the store follows another leader, the handle is invalid
//! for ever, even if the same node leads again later: leftovers of an earlier lead change nothing.

use crate::core::Core;
use crate::engine::Engine;
use crate::journal::Until;
use crate::{CommitSeq, Kv, Read, Txn};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir_env::BoxFuture;
use weir_proto::{Error, Result};

struct Led {
    engine: Arc<Engine>,
    term: u64,
}

impl Engine {
    /// The store for as long as it leads without a break, possibly under several epochs.
    pub fn led(self: &Arc<Self>) -> Arc<dyn Kv> {
        let term = self.core.term.load(Ordering::Acquire);
        Arc::new(Led { engine: self.clone(), term })
    }
}

impl Core {
    /// An error: that term is over.
    pub(crate) fn check_term(&self, term: u64) -> Result<()> {
        if term.is_multiple_of(2) && self.term.load(Ordering::Acquire) == term {
            return Ok(());
        }
        Err(Error::unavailable("this lead of the store is over: another copy leads, or led meanwhile"))
    }
}

impl Kv for Led {
    fn transact(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        let seq = self.engine.core.transact(Some(self.term), body)?;
        self.engine.core.journal.flush_soon();
        Ok(seq)
    }
    fn transact_more(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        self.engine.core.transact(Some(self.term), body)
    }
    fn flush_soon(&self) {
        self.engine.flush_soon();
    }
    fn flush_here(&self) -> bool {
        self.engine.flush_here()
    }
    fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<CommitSeq> {
        self.engine.core.check_term(self.term)?;
        self.engine.read(body)
    }
    fn durable(&self) -> CommitSeq {
        self.engine.durable()
    }
    fn wait_durable(&self, seq: CommitSeq) -> BoxFuture<'static, Result<()>> {
        let (core, term) = (self.engine.core.clone(), self.term);
        let wait = core.journal.wait(Until::Durable, seq);
        Box::pin(async move {
            core.check_term(term)?;
            wait.await?;
            core.check_term(term)
        })
    }
    fn is_space_short(&self) -> bool {
        self.engine.is_space_short()
    }
    fn checkpoint(&self) -> BoxFuture<'static, Result<()>> {
        self.engine.checkpoint()
    }
}
