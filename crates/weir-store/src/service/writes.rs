//! Fragments of a target, as clients and seals write them: prepared, committed, dropped, marked as missing.
//!
//! A write is placed, synced and entered in the index in steps, on a thread for disks.
use crate::crash_points;
use crate::damage::Damage;
use crate::disk_threads::DiskThreads;
use crate::membership::{Acting, Membership};
use crate::rebuild::Rebuilder;
use crate::requests::Requests;
use crate::store::{FragmentWrite, Placed, Store};
use bytes::Bytes;
use std::sync::Arc;
use weir_proto::data::*;
use weir_proto::{Error, Version};
use weir_rpc::{Demand, Handled, Reply};

pub(crate) struct Writes {
    members: Arc<Membership>,
    requests: Arc<Requests>,
    disk: Arc<DiskThreads>,
    rebuilder: Arc<Rebuilder>,
    damage: Arc<Damage>,
}

impl Writes {
    pub fn new(
        members: &Arc<Membership>,
        requests: &Arc<Requests>,
        disk: &Arc<DiskThreads>,
        rebuilder: &Arc<Rebuilder>,
        damage: &Arc<Damage>,
    ) -> Arc<Writes> {
        Arc::new(Writes {
            members: members.clone(),
            requests: requests.clone(),
            disk: disk.clone(),
            rebuilder: rebuilder.clone(),
            damage: damage.clone(),
        })
    }

    pub fn write_fragment(self: &Arc<Self>, r: WriteFragment, payload: Bytes, demand: Demand) -> Handled {
        let writes = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = writes.members.acting(r.place).await?;
            if usize::from(r.cell.index) != acting.position {
                return Err(acting.misplaced(r.cell));
            }
            let (writer, scope) = (acting.store.clone(), acting.scope);
            let placing = move || {
                let placed = writer.place_fragment(&scope, &fragment_of(&r, &payload))?;
                Ok((placed, r, payload))
            };
            let (placed, r, payload) = writes.disk.run_for(demand, placing).await?;
            let store = &acting.store;
            let seq = match placed {
                Placed::Before(seq) => seq,
                Placed::Now(extent) => {
                    store.sync_placed(extent).await?;
                    store.enter_fragment(&acting.scope, &fragment_of(&r, &payload), extent)?
                }
            };
            store.durable_here(seq).await?;
            Ok(Reply::new(&()))
        }))
    }
    pub fn hold_stripe(self: &Arc<Self>, r: HoldStripe) -> Handled {
        let writes = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = writes.members.acting(r.place).await?;
            if usize::from(r.cell.index) != acting.position {
                return Err(acting.misplaced(r.cell));
            }
            let store = &acting.store;
            let (seq, is_here) = store.mark_missing(&acting.scope, r.cell, r.version, r.missing)?;
            match is_here {
                true => store.durable(seq).await?,
                // Prepared while this member was away.
                false => writes.rebuilder.take_version(&acting, &r).await?,
            }
            Ok(Reply::new(&()))
        }))
    }
    pub fn commit_stripe(self: &Arc<Self>, r: CommitStripe) -> Handled {
        let writes = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = writes.members.acting(r.place).await?;
            let store = &acting.store;
            let seq = store.commit_stripe(&acting.scope, r.cell, r.version, r.token_epoch)?;
            store.durable(seq).await?;
            store.crash_point(crash_points::COMMITTED);
            Ok(Reply::new(&()))
        }))
    }
    pub fn drop_prepared(&self, r: DropPrepared) -> Handled {
        self.requests
            .change(r.place, move |store, scope| store.drop_prepared(scope, r.cell, r.version, r.token_epoch))
    }
    pub fn seal_cell(&self, r: SealCell) -> Handled {
        let fold = move |store: &Store, acting: &Acting| store.seal_cell(&acting.scope, r.cell, r.version);
        self.requests.blocking(r.place, fold)
    }
    pub fn mark_missing(self: &Arc<Self>, r: MarkMissing) -> Handled {
        let writes = self.clone();
        Handled::Later(Box::pin(async move {
            let acting = writes.members.acting(r.place).await?;
            let own = usize::from(r.cell.index) == acting.position && r.cell.index < 64;
            if own && r.missing & (1 << r.cell.index) != 0 {
                writes.damage.suspect(r.cell);
                return Ok(Reply::new(&()));
            }
            let (seq, is_here) = acting.store.mark_missing(&acting.scope, r.cell, r.version, r.missing)?;
            if !is_here && r.version != Version(0) {
                return Err(Error::not_found(format!("cell {}: version {} is not here", r.cell, r.version)));
            }
            acting.store.durable(seq).await?;
            Ok(Reply::new(&()))
        }))
    }
}

fn fragment_of<'a>(r: &'a WriteFragment, payload: &'a Bytes) -> FragmentWrite<'a> {
    FragmentWrite {
        cell: r.cell,
        version: r.version,
        mode: r.mode,
        missing: r.missing,
        folded_seqs: &r.folded_seqs,
        block_crcs: &r.block_crcs,
        data: payload,
    }
}
