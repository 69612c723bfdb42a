//! The end of a clone's enumeration, and of a deleted clone: drops their records, in steps.
use super::super::*;
use super::{ITSELF, find, not_enumerated, user_of};
use crate::record::CloneRecord;
use weir_kv::Scan;

/// Records that one step forgets.
const FORGOTTEN_AT_ONCE: usize = if cfg!(test) { 2 } else { 256 };

/// When all directories are enumerated: drops the records of the enumeration, in steps. True: done.
pub fn end_some(cx: &mut Cx<'_>, clone: VolumeId) -> Result<bool> {
    let Some(mut record) = find(cx.read(), clone)?.filter(|c| !c.listed) else { return Ok(true) };
    if !not_enumerated(cx.read(), clone, 1)?.is_empty()
        || !forget_range(cx, keys::range_of_short(b'f', clone.0))?
    {
        return Ok(false);
    }
    record.listed = true;
    cx.txn.put(&keys::clone(clone, ITSELF), &record.to_value());
    drop_own_snapshot(cx, &record)?;
    Ok(true)
}

/// Drops the records of a deleted clone, whose names are gone, in steps. True: nothing is left.
pub(in crate::namespace) fn forget_some(cx: &mut Cx<'_>, clone: VolumeId) -> Result<bool> {
    let Some(record) = find(cx.read(), clone)? else { return Ok(true) };
    if !forget_range(cx, keys::range_of_short(b'f', clone.0))? {
        return Ok(false);
    }
    let (_, end) = keys::range_of_short(b'y', clone.0);
    if !forget_range(cx, (keys::clone(clone, InodeId(1)).to_vec(), end))? {
        return Ok(false);
    }
    cx.txn.delete(&keys::clone(clone, ITSELF));
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
        cx.txn.put(&keys::clone(other, ITSELF), &CloneRecord { own: true, ..clone }.to_value());
    }
    Ok(())
}

fn forget_range(cx: &mut Cx<'_>, (start, end): (Vec<u8>, Vec<u8>)) -> Result<bool> {
    let mut found = Vec::new();
    cx.txn.scan(&start, &end, &mut |key, _| {
        found.push(key.to_vec());
        if found.len() < FORGOTTEN_AT_ONCE { Scan::More } else { Scan::Stop }
    })?;
    found.iter().for_each(|key| cx.txn.delete(key));
    Ok(found.len() < FORGOTTEN_AT_ONCE)
}
