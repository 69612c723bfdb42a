//! Copies of a store on other nodes, as the store sees them: who gets its records, and how far they keep
//! them.
//!
//! Knows nothing of nodes and messages: whoever leads a journal group implements [`Copies`].

use crate::CommitSeq;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_proto::Epoch;

/// The other copies of the store of a leader.
pub trait Copies: Send + Sync + 'static {
    /// A record was made; they come in the order of their numbers. Must be short: no other transaction runs
    /// meanwhile.
    fn offer(&self, seq: CommitSeq, body: &[u8]);
    /// All copies that count keep the records up to this one. When it grows, [`crate::Engine::settle`] is
    /// called. A copy may begin to count only if it keeps all records that were offered until then.
    fn kept(&self) -> CommitSeq;
}

/// There is no other copy: what is synced here is durable.
pub struct Alone;

impl Copies for Alone {
    fn offer(&self, _seq: CommitSeq, _body: &[u8]) {}
    fn kept(&self) -> CommitSeq {
        CommitSeq(u64::MAX)
    }
}

/// For a copy that follows: what the leader said to be durable.
#[derive(Default)]
pub(crate) struct Told(AtomicU64);

impl Told {
    pub(crate) fn at(seq: CommitSeq) -> Told {
        Told(AtomicU64::new(seq.0))
    }
    pub(crate) fn tell(&self, seq: CommitSeq) {
        self.0.fetch_max(seq.0, Ordering::AcqRel);
    }
}

impl Copies for Told {
    fn offer(&self, _seq: CommitSeq, _body: &[u8]) {}
    fn kept(&self) -> CommitSeq {
        CommitSeq(self.0.load(Ordering::Acquire))
    }
}

/// What the store is among its copies.
pub(crate) enum Role {
    /// It makes records, under an epoch (0: it was never copied).
    Leads(Epoch, Arc<dyn Copies>),
    /// It takes the records of an epoch's leader. `joined`: since it compared them with its own.
    Follows { epoch: Epoch, told: Arc<Told>, joined: bool },
}

impl Role {
    pub(crate) fn epoch(&self) -> Epoch {
        match self {
            Role::Leads(epoch, _) | Role::Follows { epoch, .. } => *epoch,
        }
    }

    pub(crate) fn copies(&self) -> Arc<dyn Copies> {
        match self {
            Role::Leads(_, copies) => copies.clone(),
            Role::Follows { told, .. } => told.clone(),
        }
    }
}
