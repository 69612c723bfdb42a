//! Where a file is at home, and whether home is as the volume is: for movers and for readers of evicted
//! bytes.
use super::record::{RelationRecord, RemoteEntry};
use super::{order, proof, store, tree};
use crate::namespace::{View, find_inode, log, volume};
use crate::record::Inode;
use crate::tables;
use bytes::Bytes;
use weir_kv::Read;
use weir_proto::meta::FileKind;
use weir_proto::relation::*;
use weir_proto::{Error, InodeId, Result, VolumeId};

pub fn where_at_home(view: &mut View<'_>, r: &WhereAtHome) -> Result<HomePlace> {
    let ino = r.ino;
    let relations = match r.relation {
        Some(id) => {
            let record = store::load_relation(view.read, id)?;
            require_of(view.read, record.volume, ino)?;
            vec![(id, record)]
        }
        None => {
            let mut known = Vec::new();
            for (id, record) in store::relations(view.read)? {
                if tree::find_remote(view.read, id, ino)?.is_some() {
                    known.push((id, record));
                }
            }
            match find_inode(view.read, ino)? {
                Some(inode) if known.len() > 1 => best_first(view.read, ino, &inode, known)?,
                _ => known,
            }
        }
    };
    for (id, record) in relations {
        let Some(path) = tree::path(view.read, id, ino)? else { continue };
        let Some(remote) = tree::find_remote(view.read, id, ino)? else { continue };
        let receipts = store::receipts_of(view.read, id, ino)?;
        let receipts =
            receipts.into_iter().map(|(offset, r)| Receipt { offset, len: r.len, sums: r.sums }).collect();
        let (path, expect) = (Bytes::from(path), tree::expected(&remote));
        let way = tree::way(view.read, id, ino, &remote)?;
        let changing = order::may_change(view.read, id, &way)?;
        let (mut unsettled, mut conflict) = (false, false);
        if r.relation.is_some() {
            unsettled = is_unsettled(view.read, id, &record, ino, &remote)?;
            conflict = tables::CONFLICTS.has(view.read, (id, ino))?;
        }
        let (url, direction, ids, by) = (record.url, record.direction, record.ids, record.by);
        return Ok(HomePlace {
            relation: id,
            url,
            direction,
            ids,
            by,
            path,
            expect,
            changing,
            receipts,
            unsettled,
            conflict,
        });
    }
    Err(Error::not_found(format!("inode {ino} is not at any home")))
}

/// The homes of a file in the order in which they are asked for evicted bytes: first those with the latest
/// state, then the one that it was evicted for, because another one may evict from now on.
fn best_first(
    read: &dyn Read,
    ino: InodeId,
    inode: &Inode,
    homes: Vec<(RelationId, RelationRecord)>,
) -> Result<Vec<(RelationId, RelationRecord)>> {
    let mut all = Vec::new();
    for (id, record) in homes {
        let conflicts = tables::CONFLICTS.has(read, (id, ino))?;
        let has_it = proof::has_evicted(read, (id, &record), ino, inode)?;
        all.push(((conflicts, !has_it, !record.evict), (id, record)));
    }
    all.sort_by_key(|(order, _)| *order);
    Ok(all.into_iter().map(|(_, relation)| relation).collect())
}

fn require_of(read: &dyn Read, volume: VolumeId, ino: InodeId) -> Result<()> {
    let dir = find_inode(read, ino)?.map_or(ino, |inode| inode.parent);
    match volume::volume_of(read, dir)? == volume {
        true => Ok(()),
        false => Err(Error::invalid(format!("inode {ino} is of another volume"))),
    }
}

/// Whether home may differ from the volume just now.
fn is_unsettled(
    read: &dyn Read,
    id: RelationId,
    record: &RelationRecord,
    ino: InodeId,
    remote: &RemoteEntry,
) -> Result<bool> {
    let to_come = log::last_number(read, record.volume)? > record.ingested
        || order::is_queued(read, id, &tree::way(read, id, ino, remote)?)?
        || !store::dirty_of(read, id, ino)?.is_empty()
        || store::dirty_finish(read, id, ino)?.is_some();
    let is_file = remote.kind == FileKind::Regular;
    let is_written = remote.complete.is_none() || remote.writing || store::is_growing(read, id, ino)?;
    let open = is_file && (is_written || store::is_unfinished(read, id, ino)?);
    Ok(to_come || open)
}
