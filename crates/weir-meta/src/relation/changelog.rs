//! The changelog of a volume and its consumers: which volumes have one, up to where it was ingested, and
//! what of a file waits to be ingested.
use super::record::RelationRecord;
use super::{store, tree};
use crate::keys;
use std::collections::BTreeSet;
use weir_kv::{Read, Txn};
use weir_proto::relation::{RelationId, What};
use weir_proto::{Error, InodeId, Result, VolumeId};

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
    let (start, end) = (keys::change(volume, 0), keys::change(volume, upto.saturating_add(1)));
    Ok(store::delete_range(txn, &start, &end, FORGET_MAX)? == FORGET_MAX)
}

/// Consumers of a volume's changelog and their positions.
pub fn cursors(read: &dyn Read, volume: VolumeId) -> Result<Vec<(String, u64)>> {
    let (start, end) = keys::range_of_short(b'k', volume.0);
    store::collect(read, &start, &end, usize::MAX, |key, value| {
        let name = String::from_utf8_lossy(key.get(5..).unwrap_or_default()).into_owned();
        let at =
            <[u8; 8]>::try_from(value).map_err(|_| Error::damaged(format!("cursor {name:?} is damaged")))?;
        Ok((name, u64::from_le_bytes(at)))
    })
}

/// Volumes with a changelog.
pub fn logged(read: &dyn Read) -> Result<BTreeSet<VolumeId>> {
    let all = store::relations(read)?;
    let mut volumes: BTreeSet<VolumeId> =
        all.iter().filter(|(_, r)| !r.mirrors()).map(|(_, r)| r.volume).collect();
    let (start, end) = keys::range_of_letter(b'k');
    let mirrored = store::collect(read, &start, &end, usize::MAX, |key, _| {
        let number = key.get(1..5).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes);
        number.map(VolumeId).ok_or_else(|| Error::damaged("a cursor's key is damaged"))
    })?;
    volumes.extend(mirrored);
    Ok(volumes)
}

/// Volumes that mirror a home: they are read-only here.
pub fn mirrored(read: &dyn Read) -> Result<BTreeSet<VolumeId>> {
    Ok(store::relations(read)?.iter().filter(|(_, r)| r.mirrors()).map(|(_, r)| r.volume).collect())
}

/// Changes of size in a relation's queue.
pub fn truncations(read: &dyn Read, relation: RelationId) -> Result<Vec<(InodeId, u64)>> {
    let (start, end) = keys::range_of_short(b'O', relation.0);
    let found = store::collect(read, &start, &end, usize::MAX, |key, value| {
        let number = store::number_of(key)?;
        Ok(match tree::load_change(value, number)?.what {
            What::Resized { ino, .. } => Some((ino, number)),
            _ => None,
        })
    })?;
    Ok(found.into_iter().flatten().collect())
}

/// Whether changes of an inode's data or size wait to be ingested.
pub fn is_not_ingested(read: &dyn Read, record: &RelationRecord, ino: InodeId) -> Result<bool> {
    let concerns = |what: &What| match what {
        What::Data { ino: of, .. } | What::Resized { ino: of, .. } => *of == ino,
        _ => false,
    };
    let start = keys::change(record.volume, record.ingested + 1);
    let (_, end) = keys::range_of_short(b'C', record.volume.0);
    let found = store::collect(read, &start, &end, usize::MAX, |key, value| {
        Ok(concerns(&tree::load_change(value, store::number_of(key)?)?.what))
    })?;
    Ok(found.contains(&true))
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
