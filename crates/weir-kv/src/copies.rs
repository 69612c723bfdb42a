//! Copies of a store on other nodes, from the store's point of view: they receive its records, and report
//! which ones they keep.
//!
//! Knows nothing of nodes and messages: the leader of a journal group implements [`Copies`].

use crate::CommitSeq;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_proto::Epoch;

/// The other copies of the store of a leader.
pub trait Copies: Send + Sync + 'static {
    /// A new record, which may wait for [`Copies::flush`]; they come in the order of their numbers. Must be
    /// fast: no other transaction runs meanwhile.
    fn append(&self, seq: CommitSeq, body: &[u8]);
    /// All records so far shall become durable now.
    fn flush(&self);
    /// All required copies keep the records up to this one. When it grows, [`crate::Engine::settle`] is
    /// called. A copy may become required only when it keeps all records that were appended until then.
    fn kept(&self) -> CommitSeq;
}

/// A store without other copies: a synced record is durable.
pub struct Alone;

impl Copies for Alone {
    fn append(&self, _seq: CommitSeq, _body: &[u8]) {}
    fn flush(&self) {}
    fn kept(&self) -> CommitSeq {
        CommitSeq(u64::MAX)
    }
}

/// For a copy that follows: the records that the leader has declared durable.
#[derive(Default)]
pub(crate) struct ReportedDurable(AtomicU64);

impl ReportedDurable {
    pub(crate) fn at(seq: CommitSeq) -> ReportedDurable {
        ReportedDurable(AtomicU64::new(seq.0))
    }
    pub(crate) fn note(&self, seq: CommitSeq) {
        self.0.fetch_max(seq.0, Ordering::AcqRel);
    }
}

impl Copies for ReportedDurable {
    fn append(&self, _seq: CommitSeq, _body: &[u8]) {}
    fn flush(&self) {}
    fn kept(&self) -> CommitSeq {
        CommitSeq(self.0.load(Ordering::Acquire))
    }
}

/// The store's role among its copies.
pub(crate) enum Role {
    /// It makes records, under an epoch (0: it never had copies).
    Leads(Epoch, Arc<dyn Copies>),
    /// It takes the records of an epoch's leader. `joined`: since it compared them with its own.
    Follows { epoch: Epoch, reported: Arc<ReportedDurable>, joined: bool },
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
            Role::Follows { reported, .. } => reported.clone(),
        }
    }
}
