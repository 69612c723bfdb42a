//! Writes of fragments: placed, synced and entered in the index in steps, on a thread for disks.
use super::*;
use crate::store::{FragmentWrite, Placed};

impl StorageNode {
    pub(super) fn write_fragment(&self, r: WriteFragment, payload: Bytes, demand: Demand) -> Handled {
        let (target, is_clients) = (self.target(r.place.target), r.mode != WriteMode::PrepareSeal);
        let node = self.shared();
        let written = Handled::Later(Box::pin(async move {
            let acting = node.acting(r.place).await?;
            if usize::from(r.cell.index) != acting.position {
                return Err(misplaced(r.cell, &acting));
            }
            let store = acting.target.store.clone();
            let (writer, scope) = (store.clone(), acting.scope);
            let placing = move || {
                let placed = writer.place_fragment(&scope, &fragment_of(&r, &payload))?;
                Ok((placed, r, payload))
            };
            let (placed, r, payload) = node.on_disk_for(&store, demand, placing).await?;
            let seq = match placed {
                Placed::Before(seq) => seq,
                Placed::Now(extent) => {
                    store.sync_placed(extent).await?;
                    store.enter_fragment(&acting.scope, &fragment_of(&r, &payload), extent)?
                }
            };
            store.durable_here(seq).await?;
            Ok(Reply::new(&()))
        }));
        match target {
            Ok(target) if is_clients => self.felt(target, written),
            _ => written,
        }
    }
    /// A client's write, by whose time copies to the target are limited; with its wait for the commit.
    pub(super) fn felt(&self, target: Arc<Target>, written: Handled) -> Handled {
        let (clock, came) = (self.env.clock.clone(), self.env.clock.now());
        match written {
            Handled::Later(reply) => Handled::Later(Box::pin(async move {
                let reply = reply.await?;
                let now = clock.now();
                target.pace.felt(now, now.since(came));
                Ok(reply)
            })),
            now => now,
        }
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
