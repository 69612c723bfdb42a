//! The bytes of a file that a home has, and the proof of that: for eviction and recall.
use super::rules::Excluded;
use super::{changelog, record, store, tree};
use crate::namespace::volume::volume_of;
use crate::record::Inode;
use crate::tables;
use std::collections::BTreeSet;
use weir_kv::{Read, Txn};
use weir_proto::recall::Learned;
use weir_proto::relation::{RECEIPT_BLOCK, RelationId};
use weir_proto::{Error, InodeId, Result, VolumeId};

/// Volumes whose files may be evicted.
pub fn evicting(read: &dyn Read) -> Result<BTreeSet<VolumeId>> {
    let all = store::relations(read)?;
    Ok(all.into_iter().filter(|(_, r)| r.evict).map(|(_, r)| r.volume).collect())
}

/// Whether home has all of `from..to` of a file, durably and as it is now; otherwise the reason why not.
pub fn at_home(read: &dyn Read, ino: InodeId, inode: &Inode, from: u64, to: u64) -> Result<()> {
    let refuse = |why: String| Err(Error::denied(format!("inode {ino} stays: {why}")));
    let volume = volume_of(read, inode.parent)?;
    let all = store::relations(read)?;
    let Some((id, record)) = all.iter().find(|(_, r)| r.volume == volume && r.evict) else {
        return refuse("its volume has no relation that allows eviction".to_owned());
    };
    if tree::find_remote(read, *id, ino)?.is_none() {
        return refuse(match Excluded::load(read, *id, volume)?.why(ino, false)? {
            Some(why) => format!("relation {id} does not copy it: {why}"),
            None => "home does not have it yet".to_owned(),
        });
    }
    if tables::CONFLICTS.has(read, (*id, ino))? {
        return refuse(
            "it is in conflict, because home is not as it was left: `weir relation show`".to_owned(),
        );
    }
    if store::is_unfinished(read, *id, ino)? {
        return refuse("home has parts of it, which can be read when it is complete there".to_owned());
    }
    let to = to.min(inode.size);
    let dirty = store::dirty_of(read, *id, ino)?;
    if dirty.iter().any(|(at, range)| *at < to && from < at + range.len) {
        return refuse("home does not have all of it yet".to_owned());
    }
    if !store::is_proved(read, *id, ino, from, to)? {
        return refuse("home has given no proof of all of it".to_owned());
    }
    if changelog::is_not_ingested(read, record, ino)? {
        return refuse("it changed a moment ago".to_owned());
    }
    Ok(())
}

/// Whether a home has all evicted bytes of a file, as they were at the eviction.
pub fn has_evicted(
    read: &dyn Read,
    (id, record): (RelationId, &record::RelationRecord),
    ino: InodeId,
    inode: &Inode,
) -> Result<bool> {
    if tree::find_remote(read, id, ino)?.is_none() || store::is_unfinished(read, id, ino)? {
        return Ok(false);
    }
    let dirty = store::dirty_of(read, id, ino)?;
    for (from, to) in store::evicted_of(read, ino)? {
        let to = to.min(inode.size);
        if dirty.iter().any(|(at, range)| *at < to && from < at + range.len) {
            return Ok(false);
        }
        // Imported data has no checksums until it is read.
        if from < to && !record.imports && !store::is_proved(read, id, ino, from, to)? {
            return Ok(false);
        }
    }
    // Changes that another home had when the bytes were evicted may not have reached this one.
    Ok(!changelog::is_not_ingested(read, record, ino)?)
}

/// Recalled bytes were at a home without checksums: now they are known.
pub fn learn(txn: &mut dyn Txn, ino: InodeId, from: u64, to: u64, learned: &Learned) -> Result<()> {
    let blocks = (to - from).div_ceil(RECEIPT_BLOCK);
    let known = tree::find_remote(txn, learned.relation, ino)?.is_some();
    let fits = learned.sums.len() as u64 == blocks;
    if !known || !fits || store::is_proved(txn, learned.relation, ino, from, to)? {
        return Ok(());
    }
    let receipt = record::ReceiptRecord { len: to - from, sums: learned.sums.clone() };
    store::add_receipt(txn, learned.relation, ino, from, receipt)
}

/// Whether a file without a writer has bytes here that are neither verified at a home nor in flight to one.
pub fn lacks_proof(read: &dyn Read, ino: InodeId, inode: &Inode) -> Result<bool> {
    if inode.writing.dirty || inode.nlink == 0 {
        return Ok(false);
    }
    let volume = volume_of(read, inode.parent)?;
    for (id, record) in store::relations(read)? {
        // A relation that does not evict now may do so from tomorrow on.
        let of_it = record.volume == volume && (record.evict || !record.mirrors());
        if of_it
            && tree::find_remote(read, id, ino)?.is_some()
            && !changelog::unproved(read, id, ino, inode.size)?.is_empty()
        {
            return Ok(true);
        }
    }
    Ok(false)
}
