//! The usual course of a request to a place: admitted, done, and answered when its commit is durable.
//!
//! Short work that touches no slab runs in place; the rest runs where blocking is allowed.
use crate::cells::Scope;
use crate::disk_threads::DiskThreads;
use crate::membership::{Acting, Admit, Membership};
use crate::store::Store;
use bytes::Bytes;
use std::sync::Arc;
use weir_kv::CommitSeq;
use weir_proto::data::Place;
use weir_proto::{Result, Wire};
use weir_rpc::{Demand, Handled, Reply};

pub(crate) struct Requests {
    members: Arc<Membership>,
    disk: Arc<DiskThreads>,
}

impl Requests {
    pub fn new(members: &Arc<Membership>, disk: &Arc<DiskThreads>) -> Arc<Requests> {
        Arc::new(Requests { members: members.clone(), disk: disk.clone() })
    }
    /// Work that blocks.
    pub fn blocking<T: Wire + Send + 'static>(
        self: &Arc<Self>,
        place: Place,
        work: impl FnOnce(&Store, &Acting) -> Result<(CommitSeq, T, Vec<Bytes>)> + Send + 'static,
    ) -> Handled {
        let to = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = to.members.acting(place).await?;
            let (seq, body, payload) = to.disk.run(move || work(&acting.store, &acting)).await?;
            to.members.store().durable_here(seq).await?; // on the disk's thread, which brought the result
            Ok(Reply::with_payload(&body, payload))
        }))
    }
    /// Work that blocks, and is not begun if its caller has given up before a thread is free for it.
    pub fn blocking_for<T: Wire + Send + 'static>(
        self: &Arc<Self>,
        place: Place,
        demand: Demand,
        work: impl FnOnce(&Store, &Acting) -> Result<(CommitSeq, T, Vec<Bytes>)> + Send + 'static,
    ) -> Handled {
        let to = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = to.members.acting(place).await?;
            let (seq, body, payload) = to.disk.run_for(demand, move || work(&acting.store, &acting)).await?;
            to.members.store().durable_here(seq).await?;
            Ok(Reply::with_payload(&body, payload))
        }))
    }
    /// A short change of the index: made in place.
    pub fn change(
        self: &Arc<Self>,
        place: Place,
        work: impl FnOnce(&Store, &Scope) -> Result<CommitSeq> + Send + 'static,
    ) -> Handled {
        let to = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = to.members.acting(place).await?;
            let seq = work(&acting.store, &acting.scope)?;
            acting.store.durable(seq).await?;
            Ok(Reply::new(&()))
        }))
    }
    /// A read of the index: answered in place unless the map must be fetched first.
    pub fn read_index(
        self: &Arc<Self>,
        place: Place,
        work: impl FnOnce(&Acting) -> Result<Reply> + Send + 'static,
    ) -> Handled {
        match self.members.admit(place) {
            Err(e) => Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) => Handled::Now(work(&acting)),
            Ok(Admit::NeedsMap(_)) => {
                let to = self.clone();
                Handled::Later(Box::pin(async move { work(&to.members.acting(place).await?) }))
            }
        }
    }
}
