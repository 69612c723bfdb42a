//! The end of a clone's enumeration, and of a deleted clone: drops their records, in steps.
use super::super::*;
use super::{ITSELF, directories, find, not_enumerated, user_of};
use crate::record::CloneRecord;

/// Records that one step forgets.
const FORGOTTEN_AT_ONCE: usize = if cfg!(test) { 2 } else { 256 };

/// When all directories are enumerated: drops the records of the enumeration, in steps. True: done.
pub fn end_some(cx: &mut Cx<'_>, clone: VolumeId) -> Result<bool> {
    let Some(mut record) = find(cx.read(), clone)?.filter(|c| !c.listed) else { return Ok(true) };
    if !not_enumerated(cx.read(), clone, 1)?.is_empty() || !forget_files(cx, clone)? {
        return Ok(false);
    }
    record.listed = true;
    tables::CLONES.put(cx.txn, (clone, ITSELF), &record);
    drop_own_snapshot(cx, &record)?;
    Ok(true)
}

/// Drops the records of a deleted clone, whose names are gone, in steps. True: nothing is left.
pub(in crate::namespace) fn forget_some(cx: &mut Cx<'_>, clone: VolumeId) -> Result<bool> {
    let Some(record) = find(cx.read(), clone)? else { return Ok(true) };
    if !forget_files(cx, clone)?
        || directories(clone).delete_some(cx.txn, FORGOTTEN_AT_ONCE)? == FORGOTTEN_AT_ONCE
    {
        return Ok(false);
    }
    tables::CLONES.delete(cx.txn, (clone, ITSELF));
    cx.events.snapshots = true;
    if !record.listed {
        drop_own_snapshot(cx, &record)?;
    }
    Ok(true)
}

/// The last user of the snapshot deletes it.
fn drop_own_snapshot(cx: &mut Cx<'_>, record: &CloneRecord) -> Result<()> {
    if !record.own {
        return Ok(());
    }
    let Some(other) = user_of(cx.read(), record.snapshot)? else {
        return snapshot::drop_number(cx, record.source, record.snapshot);
    };
    if let Some(clone) = find(cx.read(), other)? {
        tables::CLONES.put(cx.txn, (other, ITSELF), &CloneRecord { own: true, ..clone });
    }
    Ok(())
}

/// True: none is left.
fn forget_files(cx: &mut Cx<'_>, clone: VolumeId) -> Result<bool> {
    let forgotten = tables::CLONE_FILES.under(clone).delete_some(cx.txn, FORGOTTEN_AT_ONCE)?;
    Ok(forgotten < FORGOTTEN_AT_ONCE)
}
