//! Requests that read: cells, logs, lists for repair, and the state of a target.
//!
//! Short reads run in place; those of slabs run where blocking is allowed.
use super::{Admit, StorageNode, Target};
use crate::store::Store;
use bytes::Bytes;
use std::sync::Arc;
use weir_env::Space;
use weir_kv::CommitSeq;
use weir_proto::data::*;
use weir_proto::{Error, Result, TargetId};
use weir_rpc::{Demand, Handled, Reply};

impl StorageNode {
    pub(super) fn read_cell(&self, r: ReadCell, demand: Demand) -> Handled {
        let acting = match self.admit(r.place) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) => acting,
            Ok(Admit::NeedsMap(_)) => {
                let node = self.shared();
                return Handled::Later(Box::pin(async move {
                    let acting = node.acting(r.place).await?;
                    let plan = acting.target.store.plan_read(&acting.scope, &r)?;
                    node.read_planned(acting.target.store.clone(), for_reader(&r, plan), demand).await
                }));
            }
        };
        let store = acting.target.store.clone();
        match store.plan_read(&acting.scope, &r) {
            Err(e) => Handled::Now(Err(e)),
            Ok(plan) if !plan.needs_disk() => {
                Handled::Now(store.read(&plan).map(|(answer, payload)| read_reply(&answer, payload)))
            }
            Ok(plan) => {
                let (node, plan) = (self.shared(), for_reader(&r, plan));
                Handled::Later(Box::pin(async move { node.read_planned(store, plan, demand).await }))
            }
        }
    }
    async fn read_planned(
        &self,
        store: Arc<Store>,
        plan: crate::read::Plan,
        demand: Demand,
    ) -> Result<Reply> {
        if store.reads_here(&plan)
            && let Some(_here) = self.env.tasks.block_here()
        {
            demand.check(self.env.clock.now())?;
            let under_way = store.begin_disk();
            let read = store.read(&plan);
            under_way.end();
            return read.map(|(answer, payload)| read_reply(&answer, payload));
        }
        let reader = store.clone();
        let (answer, payload) = self.on_disk_for(&store, demand, move || reader.read(&plan)).await?;
        Ok(read_reply(&answer, payload))
    }
    pub(super) fn read_overlays(&self, r: ReadOverlays, demand: Demand) -> Handled {
        self.blocking_for(r.place, demand, move |store, _| {
            let (reply, payload) = store.read_overlays(r.cell, r.after)?;
            Ok((CommitSeq(0), reply, payload))
        })
    }
    pub(super) fn stat_cell(&self, r: StatCell) -> Handled {
        self.read_index(r.place, move |acting| {
            Ok(Reply::new(&acting.target.store.stat_cell(&acting.scope, r.cell)?))
        })
    }
    pub(super) fn list_cells(&self, r: ListCells) -> Handled {
        let place = Place { target: r.target, group: r.group, epoch: r.epoch };
        self.blocking(place, move |store, acting| {
            let list = match crate::refilled::lists_in_doubt(acting.group(), acting.map.level) {
                true => store.list_cells_in_doubt(r.group, r.after, r.since, r.epoch, r.limit)?,
                false => store.list_cells(r.group, r.after, r.since, r.epoch, r.limit)?,
            };
            Ok((CommitSeq(0), list, Vec::new()))
        })
    }
    pub(super) fn next_stripe(&self, r: NextStripe) -> Handled {
        self.read_index(r.place, move |acting| {
            let stripe = acting.target.store.next_stripe(&acting.scope, r.file, r.from_stripe)?;
            Ok(Reply::new(&StripeFound { stripe }))
        })
    }
    pub(super) fn list_truncations(&self, r: ListTruncations) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let store = node.target(r.target)?.store.clone();
            node.check_announced(&r.epochs).await?;
            let (seq, list) = store.list_truncations(r.after, &r.epochs, r.limit)?;
            store.durable(seq).await?;
            Ok(Reply::new(&list))
        }))
    }
    pub(super) fn list_fences(&self, r: ListFences) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let store = node.target(r.target)?.store.clone();
            node.check_announced(&r.epochs).await?;
            let (seq, list) = store.list_fences(r.after, &r.epochs, r.limit)?;
            store.durable(seq).await?;
            Ok(Reply::new(&list))
        }))
    }
    /// The bytes of a file system that new data of a target of this node could take.
    pub fn available_of(&self, target: TargetId, space: Space) -> u64 {
        self.targets.get(&target).map_or(0, |t| t.store.available(space))
    }
    /// The targets of this node that refuse data of this length for want of space, and why.
    pub fn refusals(&self, len: u32) -> Vec<(TargetId, Error)> {
        let refusal = |t: &Arc<Target>| Some((t.store.target, t.store.refusal(len)?));
        self.targets.values().filter_map(refusal).collect()
    }

    pub(super) fn has_space(&self, r: &HasSpace) -> Handled {
        let answer = self.target(r.target).map(|t| {
            let refused = t.store.check_space(r.len).err();
            let why = refused.as_ref().map_or_else(String::new, ToString::to_string);
            Reply::new(&SpaceAnswer { has_space: refused.is_none(), why })
        });
        Handled::Now(answer)
    }
    pub(super) fn stat_target(&self, r: &StatTarget, payload: Bytes) -> Handled {
        Handled::Now(self.target(r.target).map(|t| Reply::with_payload(&t.store.stat(), payload)))
    }
}

/// A merged view is for a client, which verifies it; bases are used to decode, and are verified first.
fn for_reader(r: &ReadCell, plan: crate::read::Plan) -> crate::read::Plan {
    match r.view {
        ReadView::Merged => plan.verified_by_reader(),
        ReadView::Base => plan,
    }
}

/// The checksum of the whole follows from the blocks': the bytes are not read again.
fn read_reply(answer: &CellRead, parts: Vec<Bytes>) -> Reply {
    let len = parts.iter().map(|p| p.len() as u64).sum();
    let crc = weir_proto::checksum::crc_of_blocks(&answer.block_crcs, len);
    Reply::with_payload(answer, weir_rpc::Payload { parts, crc })
}
