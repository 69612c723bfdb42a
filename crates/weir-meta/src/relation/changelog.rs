//! The changelog of a volume and its consumers: which volumes have one, up to where it was ingested, and
//! what of a file waits to be ingested.
use super::record::RelationRecord;
use super::store;
use crate::record::ChangeRecord;
use crate::tables;
use std::collections::BTreeSet;
use weir_kv::{Read, Txn};
use weir_proto::relation::{RelationId, What};
use weir_proto::{InodeId, Result, VolumeId};

/// Changes dropped in one transaction.
const FORGET_MAX: usize = 1024;

/// Drops changes that all consumers have ingested; returns whether there may be more.
pub fn forget(txn: &mut dyn Txn, volume: VolumeId) -> Result<bool> {
    let mut upto = u64::MAX;
    let ships = |r: &RelationRecord| r.volume == volume && !r.mirrors();
    for (_, record) in store::relations(txn)?.into_iter().filter(|(_, r)| ships(r)) {
        upto = upto.min(record.ingested);
    }
    for (_, at) in cursors(txn, volume)? {
        upto = upto.min(at);
    }
    let old = tables::CHANGES.between((volume, 0), (volume, upto.saturating_add(1)));
    Ok(old.delete_some(txn, FORGET_MAX)? == FORGET_MAX)
}

/// Consumers of a volume's changelog and their positions.
pub fn cursors(read: &dyn Read, volume: VolumeId) -> Result<Vec<(String, u64)>> {
    let named = |(_, name): (VolumeId, &[u8]), at| (String::from_utf8_lossy(name).into_owned(), at);
    tables::CURSORS.under(volume).collect(read, usize::MAX, named)
}

/// Volumes with a changelog.
pub fn logged(read: &dyn Read) -> Result<BTreeSet<VolumeId>> {
    let all = store::relations(read)?;
    let mut volumes: BTreeSet<VolumeId> =
        all.iter().filter(|(_, r)| !r.mirrors()).map(|(_, r)| r.volume).collect();
    volumes.extend(tables::CURSORS.all().collect(read, usize::MAX, |(volume, _), _| volume)?);
    Ok(volumes)
}

/// Volumes that mirror a home: they are read-only here.
pub fn mirrored(read: &dyn Read) -> Result<BTreeSet<VolumeId>> {
    Ok(store::relations(read)?.iter().filter(|(_, r)| r.mirrors()).map(|(_, r)| r.volume).collect())
}

/// Changes of size in a relation's queue.
pub fn truncations(read: &dyn Read, relation: RelationId) -> Result<Vec<(InodeId, u64)>> {
    let resized = |(_, number), change: ChangeRecord| match change.what {
        What::Resized { ino, .. } => Some((ino, number)),
        _ => None,
    };
    let found = tables::NAME_CHANGES.under(relation).collect(read, usize::MAX, resized)?;
    Ok(found.into_iter().flatten().collect())
}

/// Whether changes of an inode's data or size wait to be ingested.
pub fn is_not_ingested(read: &dyn Read, record: &RelationRecord, ino: InodeId) -> Result<bool> {
    let concerns = |what: &What| match what {
        What::Data { ino: of, .. } | What::Resized { ino: of, .. } => *of == ino,
        _ => false,
    };
    let new = tables::CHANGES.from(record.volume, (record.volume, record.ingested + 1));
    Ok(new.collect(read, usize::MAX, |_, change| concerns(&change.what))?.contains(&true))
}

/// The parts of a file that are neither verified at home nor in flight to it.
pub fn unproved(read: &dyn Read, relation: RelationId, ino: InodeId, size: u64) -> Result<Vec<(u64, u64)>> {
    let receipts = store::receipts_of(read, relation, ino)?.into_iter().map(|(at, r)| (at, at + r.len));
    let dirty = store::dirty_of(read, relation, ino)?.into_iter().map(|(at, p)| (at, at + p.len));
    // Evicted bytes are at home for certain, and cannot be read here.
    let evicted = store::evicted_of(read, ino)?;
    let mut covered: Vec<(u64, u64)> = receipts.chain(dirty).chain(evicted).collect();
    covered.sort_unstable();
    Ok(store::outside(&covered, size))
}

/// Whether a change is queued at all: the others are ranges.
pub fn is_of_names(what: &What) -> bool {
    !matches!(what, What::Data { .. } | What::Complete { .. })
}
