//! Records that home is as an effect describes: remote entries, receipts and dirty ranges follow.
use super::record::{RemoteEntry, RemotePlace};
use super::steps::Effect;
use super::store;
use super::tree::find_remote;
use crate::namespace::find_inode;
use crate::record::ChangeRecord;
use crate::table::Present;
use crate::tables;
use bytes::Bytes;
use weir_kv::Txn;
use weir_proto::meta::{FileKind, Time};
use weir_proto::relation::{FingerprintBytes, NameAction, RelationId};
use weir_proto::{InodeId, Result};
use weir_relation::dirty::{Apart, DirtyRange, FINISH};

/// Records that home is as the effect describes.
pub fn apply(
    txn: &mut dyn Txn,
    relation: RelationId,
    number: u64,
    now: Time,
    effect: &Effect,
    fingerprint: &FingerprintBytes,
) -> Result<()> {
    match effect {
        Effect::Make { ino, kind, place, whole } => {
            let remote = RemoteEntry {
                kind: *kind,
                places: Vec::new(),
                fingerprint: fingerprint.clone(),
                complete: None,
                writing: false,
            };
            add_place(txn, relation, *ino, remote, place);
            if *whole {
                ship_whole(txn, relation, number, now, *ino, &[])?;
            }
        }
        Effect::Link { ino, place } => {
            if let Some(remote) = find_remote(txn, relation, *ino)? {
                add_place(txn, relation, *ino, with_fingerprint(remote, fingerprint), place);
            }
        }
        Effect::Drop { ino, place } => drop_place(txn, relation, *ino, place, fingerprint)?,
        Effect::Move { ino, from, to, replaced } => {
            if let Some(other) = replaced {
                drop_place(txn, relation, *other, to, &Bytes::new())?;
            }
            if let Some(mut remote) = find_remote(txn, relation, *ino)? {
                take_place(txn, relation, &mut remote, from);
                add_place(txn, relation, *ino, with_fingerprint(remote, fingerprint), to);
            }
        }
        Effect::Relocate { ino, from, to } => {
            tables::RELOCATIONS.delete(txn, (relation, *ino));
            if let Some(mut remote) = find_remote(txn, relation, *ino)? {
                take_place(txn, relation, &mut remote, from);
                add_place(txn, relation, *ino, with_fingerprint(remote, fingerprint), to);
            }
        }
        Effect::Swap { ino, other, place, other_place } => {
            for (ino, from, to) in [(ino, place, other_place), (other, other_place, place)] {
                if let Some(mut remote) = find_remote(txn, relation, *ino)? {
                    remote.places.retain(|p| p != from);
                    add_place(txn, relation, *ino, remote, to);
                }
            }
        }
        Effect::Fingerprint { ino } => {
            set_fingerprint(txn, relation, *ino, fingerprint)?;
            note_writing(txn, relation, *ino, false)?;
        }
        Effect::Attributes { dir } => {
            tables::OLD_ATTRIBUTES.delete(txn, (relation, *dir));
            set_fingerprint(txn, relation, *dir, fingerprint)?;
        }
        Effect::Truncate { ino, size } => {
            set_fingerprint(txn, relation, *ino, fingerprint)?;
            store::trim_receipts(txn, relation, *ino, *size)?;
        }
    }
    Ok(())
}

fn with_fingerprint(remote: RemoteEntry, fingerprint: &FingerprintBytes) -> RemoteEntry {
    if fingerprint.is_empty() { remote } else { RemoteEntry { fingerprint: fingerprint.clone(), ..remote } }
}

fn set_fingerprint(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    fingerprint: &FingerprintBytes,
) -> Result<()> {
    if let Some(remote) = find_remote(txn, relation, ino)? {
        tables::REMOTE.put(txn, (relation, ino), &with_fingerprint(remote, fingerprint));
    }
    Ok(())
}

/// Whether a mover that dies with this action leaves another fingerprint than the known one: a later one, or
/// the removal of its object, must recognize the relation's own change, not report an external one.
pub fn changes_fingerprint(action: &NameAction) -> bool {
    matches!(action, NameAction::Attributes { kind, .. } if *kind != FileKind::Directory)
}

pub fn note_writing(txn: &mut dyn Txn, relation: RelationId, ino: InodeId, writing: bool) -> Result<()> {
    if let Some(remote) = find_remote(txn, relation, ino)?.filter(|remote| remote.writing != writing) {
        tables::REMOTE.put(txn, (relation, ino), &RemoteEntry { writing, ..remote });
    }
    Ok(())
}

/// Home refuses devices before it creates anything: if this one is removed here, home has nothing to remove.
pub fn note_not_made(txn: &mut dyn Txn, relation: RelationId, number: u64) -> Result<()> {
    if let Some(change) = tables::NAME_CHANGES.get(txn, (relation, number))? {
        tables::NAME_CHANGES.put(txn, (relation, number), &ChangeRecord { tried: false, ..change });
    }
    Ok(())
}

fn add_place(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    mut remote: RemoteEntry,
    place: &RemotePlace,
) {
    if !remote.places.contains(place) {
        remote.places.push(place.clone());
    }
    tables::REMOTE_NAMES.put(txn, (relation, place.dir, &place.name), &ino);
    tables::OLD_ATTRIBUTES.put(txn, (relation, place.dir), &Present);
    tables::REMOTE.put(txn, (relation, ino), &remote);
}

fn take_place(txn: &mut dyn Txn, relation: RelationId, remote: &mut RemoteEntry, place: &RemotePlace) {
    remote.places.retain(|p| p != place);
    tables::REMOTE_NAMES.delete(txn, (relation, place.dir, &place.name));
    tables::OLD_ATTRIBUTES.put(txn, (relation, place.dir), &Present);
}

fn drop_place(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    place: &RemotePlace,
    fingerprint: &FingerprintBytes,
) -> Result<()> {
    let Some(mut remote) = find_remote(txn, relation, ino)? else { return Ok(()) };
    take_place(txn, relation, &mut remote, place);
    if !remote.places.is_empty() {
        tables::REMOTE.put(txn, (relation, ino), &with_fingerprint(remote, fingerprint));
        return Ok(());
    }
    tables::REMOTE.delete(txn, (relation, ino));
    store::note_finished(txn, relation, ino)?;
    tables::CONFLICTS.delete(txn, (relation, ino));
    tables::OLD_ATTRIBUTES.delete(txn, (relation, ino));
    store::trim_receipts(txn, relation, ino, 0)?;
    store::drop_dirty(txn, relation, ino)
}

/// All of a file except some ranges, or all of a directory, is to be shipped.
pub fn ship_whole(
    txn: &mut dyn Txn,
    relation: RelationId,
    number: u64,
    now: Time,
    ino: InodeId,
    but: &[(u64, u64)],
) -> Result<()> {
    let Some(inode) = find_inode(txn, ino)? else {
        tables::UNSEEN.put(txn, (relation, ino), &0);
        return Ok(());
    };
    if inode.kind != FileKind::Regular {
        return Ok(());
    }
    let dirty = |len| DirtyRange { len, since: now, oldest: number, newest: number };
    for (from, to) in store::outside(but, inode.size) {
        store::add_dirty(txn, relation, ino, from, dirty(to - from), &Apart::NOTHING)?;
    }
    if inode.writing.dirty {
        return store::note_growing(txn, relation, ino).map(drop);
    }
    tables::DIRTY.put(txn, (relation, ino, FINISH), &dirty(0));
    Ok(())
}
