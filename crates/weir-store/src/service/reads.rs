//! Requests that read: cells, logs, lists for repair, and the state of a target.
//!
//! Short reads run in place; those of slabs run where blocking is allowed.
use crate::disk_threads::DiskThreads;
use crate::membership::{Acting, Admit, Membership};
use crate::read::Plan;
use crate::refilled::lists_in_doubt;
use crate::requests::Requests;
use bytes::Bytes;
use std::sync::Arc;
use weir_kv::CommitSeq;
use weir_proto::Result;
use weir_proto::data::*;
use weir_rpc::{Demand, Handled, Reply};

pub(crate) struct Reads {
    members: Arc<Membership>,
    requests: Arc<Requests>,
    disk: Arc<DiskThreads>,
}

impl Reads {
    pub fn new(members: &Arc<Membership>, requests: &Arc<Requests>, disk: &Arc<DiskThreads>) -> Arc<Reads> {
        Arc::new(Reads { members: members.clone(), requests: requests.clone(), disk: disk.clone() })
    }

    pub fn read_cell(self: &Arc<Self>, r: ReadCell, demand: Demand) -> Handled {
        let acting = match self.members.admit(r.place) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) => acting,
            Ok(Admit::NeedsMap(_)) => {
                let reads = self.clone();
                return Handled::Later(Box::pin(async move {
                    let acting = reads.members.acting(r.place).await?;
                    let plan = acting.store.plan_read(&acting.scope, &r)?;
                    reads.read_planned(acting, for_reader(&r, plan), demand).await
                }));
            }
        };
        match acting.store.plan_read(&acting.scope, &r) {
            Err(e) => Handled::Now(Err(e)),
            Ok(plan) if !plan.needs_disk() => {
                Handled::Now(acting.store.read(&plan).map(|(answer, payload)| read_reply(&answer, payload)))
            }
            Ok(plan) => {
                let (reads, plan) = (self.clone(), for_reader(&r, plan));
                Handled::Later(Box::pin(async move { reads.read_planned(acting, plan, demand).await }))
            }
        }
    }
    async fn read_planned(&self, acting: Acting, plan: Plan, demand: Demand) -> Result<Reply> {
        let (store, is_short) = (acting.store, self.members.store().reads_here(&plan));
        let read = move || store.read(&plan);
        let (answer, payload) = match is_short {
            true => self.disk.run_short_for(demand, read).await?,
            false => self.disk.run_for(demand, read).await?,
        };
        Ok(read_reply(&answer, payload))
    }
    pub fn read_overlays(&self, r: ReadOverlays, demand: Demand) -> Handled {
        self.requests.blocking_for(r.place, demand, move |store, _| {
            let (reply, payload) = store.read_overlays(r.cell, r.after)?;
            Ok((CommitSeq(0), reply, payload))
        })
    }
    pub fn stat_cell(&self, r: StatCell) -> Handled {
        self.requests.read_index(r.place, move |acting| {
            Ok(Reply::new(&acting.store.stat_cell(&acting.scope, r.cell)?))
        })
    }
    pub fn list_cells(&self, r: ListCells) -> Handled {
        let place = Place { target: r.target, group: r.group, epoch: r.epoch };
        self.requests.blocking(place, move |store, acting| {
            let list = match lists_in_doubt(acting.group(), acting.map.level) {
                true => store.list_cells_in_doubt(r.group, r.after, r.since, r.epoch, r.limit)?,
                false => store.list_cells(r.group, r.after, r.since, r.epoch, r.limit)?,
            };
            Ok((CommitSeq(0), list, Vec::new()))
        })
    }
    pub fn next_stripe(&self, r: NextStripe) -> Handled {
        self.requests.read_index(r.place, move |acting| {
            let stripe = acting.store.next_stripe(&acting.scope, r.file, r.from_stripe)?;
            Ok(Reply::new(&StripeFound { stripe }))
        })
    }
    pub fn has_space(&self, r: &HasSpace) -> Handled {
        let refused = self.members.store().check_space(r.len).err();
        let why = refused.as_ref().map_or_else(String::new, ToString::to_string);
        Handled::Now(Ok(Reply::new(&SpaceAnswer { has_space: refused.is_none(), why })))
    }
    pub fn stat_target(&self, payload: Bytes) -> Handled {
        Handled::Now(Ok(Reply::with_payload(&self.members.store().stat(), payload)))
    }
}

/// A merged view is for a client, which verifies it; bases are used to decode, and are verified first.
fn for_reader(r: &ReadCell, plan: Plan) -> Plan {
    match r.view {
        ReadView::Merged => plan.verified_by_reader(),
        ReadView::Base => plan,
    }
}

/// The checksum of the whole follows from the blocks': the bytes are not read again.
fn read_reply(answer: &CellRead, parts: Vec<Bytes>) -> Reply {
    let len: u64 = parts.iter().map(|p| p.len() as u64).sum();
    let blocks = len.div_ceil(CHECKSUM_BLOCK.into());
    assert_eq!(answer.block_crcs.len() as u64, blocks, "bytes would be sent without their checksums");
    let crc = weir_proto::checksum::crc_of_blocks(&answer.block_crcs, len);
    Reply::with_payload(answer, weir_rpc::Payload { parts, crc })
}
