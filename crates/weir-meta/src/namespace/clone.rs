//! Clones: a volume whose names and data are those of a snapshot, enumerated directory by directory, with
//! objects that are shared until either side changes them.
//!
//! Invariants: a directory that is not enumerated yet (`NOT_ENUMERATED` in its mode, a key `y/` that names
//! its source and the progress of the enumeration) is changed only here, so each entry is made once. The
//! snapshot stays until all are enumerated. Files get numbers of their own; all their bytes are in the
//! snapshot's objects, as layers (see `layers`). An object that a clone refers to may still be a file's own:
//! [`super::objects::is_owned`] shows this, and each drop of an object checks it.
//!
//! `list` makes and enumerates, `end` drops the records of an enumeration; here are the look-ups. Knows
//! nothing of when which directory is enumerated.
pub mod end;
pub mod list;

use super::keeper::Snapshots;
use super::*;
use crate::record::{CloneRecord, NotEnumeratedRecord};
use crate::table::Span;

/// Not the number of a directory: the record of the clone itself.
const ITSELF: InodeId = InodeId(0);

pub fn find(read: &dyn Read, volume: VolumeId) -> Result<Option<CloneRecord>> {
    tables::CLONES.get(read, (volume, ITSELF))
}

/// All volumes that are clones.
pub fn all(read: &dyn Read) -> Result<Vec<(VolumeId, CloneRecord)>> {
    let (mut found, mut next) = (Vec::new(), VolumeId(0));
    loop {
        let volume = tables::CLONES.from(All, (next, ITSELF)).keys(read, 1, |(volume, _)| volume)?.pop();
        let Some(volume) = volume else { return Ok(found) };
        if let Some(record) = find(read, volume)? {
            found.push((volume, record));
        }
        match volume.0.checked_add(1) {
            Some(after) => next = VolumeId(after),
            None => return Ok(found),
        }
    }
}

/// Volumes with clones count as volumes with snapshots, even without one: so that shared objects are tracked.
pub fn note_all(read: &dyn Read, snapshots: &mut Snapshots) -> Result<()> {
    for (volume, _) in all(read)? {
        snapshots.entry(volume).or_default();
    }
    Ok(())
}

/// The records of directories, without that of the clone itself.
fn directories(volume: VolumeId) -> Span<(VolumeId, InodeId), NotEnumeratedRecord> {
    tables::CLONE_DIRS.from(volume, (volume, InodeId(1)))
}

/// Some directories of a clone that are not enumerated yet.
fn not_enumerated(read: &dyn Read, volume: VolumeId, limit: usize) -> Result<Vec<InodeId>> {
    directories(volume).keys(read, limit, |(_, dir)| dir)
}

/// The next step: a clone, and a directory of it that is not among `but`; without one, all are enumerated.
pub fn next_step(
    read: &dyn Read,
    but: &std::collections::BTreeSet<InodeId>,
) -> Result<Option<(VolumeId, Option<InodeId>)>> {
    for (volume, record) in all(read)? {
        if record.listed || volume::find(read, volume)?.is_none_or(|v| v.deleting) {
            continue;
        }
        let dirs = not_enumerated(read, volume, but.len() + 1)?;
        match dirs.iter().find(|dir| !but.contains(dir)) {
            None if !dirs.is_empty() => {}
            dir => return Ok(Some((volume, dir.copied()))),
        }
    }
    Ok(None)
}

/// The volume of a directory of a clone that is not enumerated yet.
pub fn volume_not_enumerated(read: &dyn Read, dir: InodeId) -> Result<Option<VolumeId>> {
    let Some(access) = find_access(read, dir)? else { return Ok(None) };
    Ok(tables::CLONE_DIRS.has(read, (access.volume, dir))?.then_some(access.volume))
}
pub fn is_not_enumerated(read: &dyn Read, dir: InodeId) -> Result<bool> {
    volume_not_enumerated(read, dir).map(|volume| volume.is_some())
}

/// Refuses while a part of a volume is not enumerated yet.
pub fn require_whole(read: &dyn Read, volume: VolumeId) -> Result<()> {
    match find(read, volume)? {
        Some(clone) if !clone.listed => Err(Error::name(
            NameRule::Busy,
            format!("volume {volume} is a clone, and not all of its names are known yet: try again later"),
        )),
        _ => Ok(()),
    }
}

/// The clone that still needs a snapshot.
pub fn user_of(read: &dyn Read, snapshot: u32) -> Result<Option<VolumeId>> {
    let all = all(read)?;
    Ok(all.into_iter().find(|(_, c)| c.snapshot == snapshot && !c.listed).map(|(volume, _)| volume))
}

/// A clone of a volume that is not complete yet.
pub fn made_from(read: &dyn Read, source: VolumeId) -> Result<Option<VolumeId>> {
    Ok(all(read)?.into_iter().find(|(_, c)| c.source == source && !c.listed).map(|(volume, _)| volume))
}
