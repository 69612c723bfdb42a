//! From the changelog to work: changes are ingested into each relation's queue of names and dirty ranges;
//! data from before a relation is scanned, directory by directory, and joins the changelog; changes that all
//! have ingested are dropped.
//!
//! Invariant: a change and the mark that it was ingested are one transaction, so nothing is lost or ingested
//! twice.
use super::changelog::{is_of_names, unproved};
use super::record::{RelationRecord, RemotePlace};
use super::rules::Excluded;
use super::ship_queue::ShipQueue;
use super::{apply, rules, store, tree};
use crate::namespace::path::place_of;
use crate::namespace::{find_inode, log, volume};
use crate::record::{ChangeRecord, Listed, NOT_ENUMERATED};
use crate::tables;
use weir_kv::Txn;
use weir_proto::meta::{FileKind, Time};
use weir_proto::relation::{By, RelationId, What};
use weir_proto::{InodeId, Result};
use weir_relation::dirty::{self, Apart, DirtyRange, FINISH};

/// Changes ingested in one transaction.
const INGEST_MAX: usize = 256;
/// Entries of a directory scanned in one transaction.
const SCAN_MAX: usize = 256;
/// Changes that wait to be ingested before the scan of older data pauses.
const QUEUE_MAX: u64 = 4096;

/// Ingests new changes; returns whether there may be more.
pub fn take(txn: &mut dyn Txn, relation: RelationId, queue: &mut ShipQueue) -> Result<bool> {
    let found = store::find_relation(txn, relation)?.filter(|record| !record.mirrors());
    let Some(mut record) = found else { return Ok(false) };
    let new = tables::CHANGES.from(record.volume, (record.volume, record.ingested + 1));
    let changes = new.collect(txn, INGEST_MAX, |(_, number), change| (number, change))?;
    let has_patterns = rules::record(txn, relation)?.scans_again;
    let mut follows = false;
    for (number, change) in &changes {
        take_one(txn, relation, queue, *number, change)?;
        if has_patterns {
            follows |= scan_moved(txn, relation, &change.what)?;
            follows |= keep_excluded_name(txn, relation, &record, change)?;
        }
        queue.touch_changed(&change.what);
        if let What::Resized { ino, .. } = change.what {
            queue.truncations.entry(ino).or_default().insert(*number);
        }
        record.ingested = *number;
    }
    if !changes.is_empty() {
        tables::RELATIONS.put(txn, relation, &record);
    }
    Ok(follows || changes.len() == INGEST_MAX)
}

/// Patterns may fit other paths below directories that moved: these are scanned. Whether there are any.
fn scan_moved(txn: &mut dyn Txn, relation: RelationId, what: &What) -> Result<bool> {
    let moved = match what {
        What::Renamed { ino, kind: FileKind::Directory, .. } => vec![*ino],
        What::Exchanged { ino, other, .. } => vec![*ino, *other],
        _ => Vec::new(),
    };
    let mut scans = false;
    for dir in moved {
        if tables::ACCESS.has(txn, dir)? {
            tables::UNSEEN.put(txn, (relation, dir), &0);
            scans = true;
        }
    }
    Ok(scans)
}

/// A file that lost its last included name keeps its content at home, which may be the only copy, under an
/// excluded name. Whether one is recorded for that.
fn keep_excluded_name(
    txn: &mut dyn Txn,
    relation: RelationId,
    record: &RelationRecord,
    change: &ChangeRecord,
) -> Result<bool> {
    let ino = match change.what {
        What::Removed { ino, last: false, .. } | What::Renamed { replaced: Some((ino, false)), .. } => ino,
        _ => return Ok(false),
    };
    let Some(kind) = find_inode(txn, ino)?.map(|inode| inode.kind) else { return Ok(false) };
    if Excluded::load(txn, relation, record.volume)?.why(ino, false)?.is_none() {
        return Ok(false); // its included names have changes of their own
    }
    let Some((parent, name)) = place_of(txn, ino)? else { return Ok(false) };
    let what = What::Made { ino, kind, parent, name };
    log::append(txn, record.volume, change.at, what, By::default()).map(|_| true)
}

fn take_one(
    txn: &mut dyn Txn,
    relation: RelationId,
    queue: &mut ShipQueue,
    number: u64,
    change: &ChangeRecord,
) -> Result<()> {
    tracing::trace!(%relation, number, what = ?change.what, "taken");
    let dirty_range = |len| DirtyRange { len, since: change.at, oldest: number, newest: number };
    if is_of_names(&change.what) {
        tables::NAME_CHANGES.put(txn, (relation, number), change);
    }
    match &change.what {
        // It may never be written: even then a report of its completeness follows, from its creator or after
        // recovery.
        What::Made { ino, kind: FileKind::Regular, .. } => match find_inode(txn, *ino)? {
            Some(inode) if inode.writing.dirty => note_growing(txn, relation, queue, *ino),
            // A file that home has was only found again, by the scan for another relation.
            Some(inode) if inode.nlink > 0 && tree::find_remote(txn, relation, *ino)?.is_none() => {
                tables::DIRTY.put(txn, (relation, *ino, FINISH), &dirty_range(0));
                Ok(())
            }
            _ => Ok(()),
        },
        // A client begins to write.
        What::Data { ino, len: 0, .. } => note_growing(txn, relation, queue, *ino),
        What::Data { ino, offset, len } => {
            store::remove_receipts(txn, relation, *ino, *offset, offset + len)?;
            note_growing(txn, relation, queue, *ino)?;
            add_dirty(txn, relation, queue, *ino, *offset, dirty_range(*len))
        }
        What::Resized { ino, size } => {
            store::trim_receipts(txn, relation, *ino, *size)?;
            // Even without a write since, because its opener reports the end, or dies: that sets its times.
            note_growing(txn, relation, queue, *ino)?;
            store::change_dirty(txn, relation, *ino, |ranges| dirty::trim(ranges, *size))
        }
        What::Complete { ino, size } => {
            tables::DIRTY.put(txn, (relation, *ino, FINISH), &dirty_range(0));
            store::note_complete(txn, relation, *ino)?;
            // Holes, and ranges that a receipt does not cover any more.
            for (from, to) in unproved(txn, relation, *ino, *size)? {
                add_dirty(txn, relation, queue, *ino, from, dirty_range(to - from))?;
            }
            Ok(())
        }
        // Data without a reader is not shipped.
        What::Removed { ino, last: true, .. } | What::Renamed { replaced: Some((ino, true)), .. } => {
            store::drop_dirty(txn, relation, *ino)
        }
        _ => Ok(()),
    }
}

/// A file is being written: its writer closes it, or it is searched for.
fn note_growing(txn: &mut dyn Txn, relation: RelationId, queue: &mut ShipQueue, ino: InodeId) -> Result<()> {
    if store::note_growing(txn, relation, ino)? {
        queue.orphans.note(ino);
    }
    Ok(())
}

/// Bytes for home: not merged with ranges in flight, nor over a change of size.
pub fn add_dirty(
    txn: &mut dyn Txn,
    relation: RelationId,
    queue: &ShipQueue,
    ino: InodeId,
    offset: u64,
    dirty: DirtyRange,
) -> Result<()> {
    let busy = |start, end| queue.is_out(ino, start, end);
    let truncated_between = |oldest, newest| queue.is_truncated_between(ino, oldest, newest);
    let apart = Apart { busy: &busy, truncated_between: &truncated_between };
    store::add_dirty(txn, relation, ino, offset, dirty, &apart)
}

/// Scans a part of the data from before the relation; returns whether there is more.
pub fn scan(txn: &mut dyn Txn, relation: RelationId, now: Time) -> Result<bool> {
    let Some(record) = store::find_relation(txn, relation)? else { return Ok(false) };
    let next = tables::UNSEEN.under(relation).collect(txn, 1, |(_, dir), cookie| (dir, cookie))?;
    let Some((dir, cookie)) = next.into_iter().next() else { return Ok(false) };
    if log::last_number(txn, record.volume)?.saturating_sub(record.ingested) > QUEUE_MAX {
        return Ok(true);
    }
    if tables::ACCESS.get(txn, dir)?.is_none_or(|access| access.mode & NOT_ENUMERATED != 0) {
        tables::UNSEEN.delete(txn, (relation, dir)); // removed; or it comes again when its names are enumerated
        return Ok(true);
    }
    let left = tables::LISTED.from(dir, (dir, cookie.saturating_add(1)));
    let entries = left.collect(txn, SCAN_MAX, |(_, cookie), entry| (cookie, entry))?;
    for (_, entry) in &entries {
        see(txn, relation, &record, now, dir, entry)?;
    }
    match entries.last() {
        Some((cookie, _)) if entries.len() == SCAN_MAX => {
            tables::UNSEEN.put(txn, (relation, dir), cookie);
        }
        _ => tables::UNSEEN.delete(txn, (relation, dir)),
    }
    Ok(true)
}

/// An entry that is older than the relation: recorded as if it were created now.
fn see(
    txn: &mut dyn Txn,
    relation: RelationId,
    record: &RelationRecord,
    now: Time,
    dir: InodeId,
    entry: &Listed,
) -> Result<()> {
    let (ino, kind) = (entry.ino, entry.kind);
    if kind == FileKind::Directory && volume::volume_of(txn, ino)? != record.volume {
        return Ok(());
    }
    let remote = tree::find_remote(txn, relation, ino)?;
    let (known, place) = (remote.is_some(), RemotePlace { dir, name: entry.name.clone() });
    // One under a temporary name there gets this one.
    let is_in_place = remote.is_some_and(|remote| remote.places.contains(&place));
    if known && rules::record(txn, relation)?.scans_again {
        if kind == FileKind::Directory {
            tables::UNSEEN.put(txn, (relation, ino), &0);
        }
        if is_in_place {
            return Ok(());
        }
    }
    let excluded = Excluded::load(txn, relation, record.volume)?;
    if !known && excluded.why_name(dir, &entry.name, kind == FileKind::Directory)?.is_some() {
        return Ok(());
    }
    drop(excluded);
    let what = What::Made { ino, kind, parent: dir, name: entry.name.clone() };
    let number = log::append(txn, record.volume, now, what, By::default())?;
    let has_more = kind == FileKind::Directory || find_inode(txn, ino)?.is_some_and(|i| i.nlink > 0);
    if !known && has_more {
        apply::ship_whole(txn, relation, number, now, ino, &[])?;
    }
    Ok(())
}
