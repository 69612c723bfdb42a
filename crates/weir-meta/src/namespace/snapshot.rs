//! Snapshots of volumes: taken in one transaction, removed step by step.
//!
//! Invariants: when a snapshot is taken no session holds a Write lease on a file of the volume that is open
//! for writing: all earlier writes are in it. Numbers only grow. A snapshot that is being removed is kept in
//! the list until no record under `h/` has its number; those that an older one shows are moved to that.
use super::keeper::{Snap, Snapshots, kept_value, object_in};
use super::objects::{is_owned, references};
use super::*;
use crate::keys::Sequence;
use crate::record::{Garbage, SnapshotRecord, StripeTruncation};
use std::collections::BTreeSet;
use weir_kv::Scan;
use weir_proto::date::Date;
use weir_proto::meta::LeaseKind;
use weir_proto::retention::expired;
use weir_proto::snapshot::{SNAPSHOTS_MAX, Snapshot, SnapshotDelete, SnapshotList, SnapshotTake};
use weir_proto::volume::SnapshotRetention;

/// Kept records that one step of a removal reads.
const FORGOTTEN_AT_ONCE: usize = if cfg!(test) { 3 } else { 256 };
/// Prefix of the names of scheduled ones.
const SCHEDULED: &str = "auto-";

/// All snapshots.
pub fn load_all(read: &dyn Read) -> Result<Snapshots> {
    let mut all = Snapshots::new();
    for (volume, number, record) in records(read, None)? {
        all.entry(volume).or_default().push(Snap { number, deleting: record.deleting });
    }
    super::clone::note_all(read, &mut all)?;
    Ok(all)
}

/// Those of one volume or of all, in order.
fn records(read: &dyn Read, of: Option<VolumeId>) -> Result<Vec<(VolumeId, u32, SnapshotRecord)>> {
    let span = of.map_or_else(|| tables::SNAPSHOTS.all(), |volume| tables::SNAPSHOTS.under(volume));
    span.collect(read, usize::MAX, |(volume, number), record| (volume, number, record))
}

/// Whether a volume has snapshots, including those being removed; `but_scheduled`: not counting those of a
/// schedule.
pub fn has_any(read: &dyn Read, volume: VolumeId, but_scheduled: bool) -> Result<bool> {
    Ok(records(read, Some(volume))?.iter().any(|(_, _, s)| !(but_scheduled && s.scheduled)))
}

fn shown(volume: VolumeId, root: InodeId, number: u32, record: SnapshotRecord) -> Snapshot {
    let SnapshotRecord { name, created, scheduled, .. } = record;
    Snapshot { number, volume, name, created, root, scheduled }
}

pub fn list(view: &mut View<'_>, r: &SnapshotList) -> Result<weir_proto::snapshot::Snapshots> {
    let root = volume::load(view.read, r.volume)?.root;
    let live = records(view.read, Some(r.volume))?.into_iter().filter(|(_, _, record)| !record.deleting);
    let snapshots = live.map(|(volume, number, record)| shown(volume, root, number, record)).collect();
    Ok(weir_proto::snapshot::Snapshots { snapshots })
}

pub fn take(cx: &mut Cx<'_>, r: &SnapshotTake) -> Attempt<Snapshot> {
    volume::load_as_admin(cx.read(), &r.cred, r.volume)?;
    take_named(cx, r.volume, &r.name, false)
}

fn take_named(cx: &mut Cx<'_>, of: VolumeId, name: &str, scheduled: bool) -> Attempt<Snapshot> {
    weir_proto::volume::check_volume_name(name)?;
    cx.require_own(of)?;
    let record = volume::load(cx.read(), of)?;
    let known = records(cx.read(), Some(of))?;
    if known.iter().any(|(_, _, s)| s.name == name && !s.deleting) {
        return Err(Error::exists(format!("volume {:?} has a snapshot {name:?} already", record.name)).into());
    }
    if known.len() >= SNAPSHOTS_MAX {
        return Err(Error::no_space(format!("volume {:?} has {SNAPSHOTS_MAX} snapshots", record.name)).into());
    }
    require_listed(cx.read(), of)?;
    super::clone::require_whole(cx.read(), of)?;
    cx.revoke_open_writers(of)?;
    let number = u32::try_from(tables::next_number(cx.txn, Sequence::Snapshot)?)
        .map_err(|_| Error::no_space("all numbers of snapshots have been given"))?;
    let (name, created) = (name.to_owned(), cx.rules.now);
    // A snapshot does not include the trash.
    let (usage, in_trash) = (super::usage::volume_usage(cx.read(), of)?, super::trash::usage(cx.read(), of)?);
    let evicted = usage.evicted.saturating_sub(in_trash.evicted);
    let taken = SnapshotRecord { name, created, deleting: false, scheduled, evicted };
    tables::SNAPSHOTS.put(cx.txn, (of, number), &taken);
    cx.events.snapshots = true;
    Ok(shown(of, record.root, number, taken))
}

/// Names that are not enumerated yet cannot be kept.
fn require_listed(read: &dyn Read, volume: VolumeId) -> Result<()> {
    for (id, _) in crate::relation::store::relations(read)?.iter().filter(|(_, r)| r.volume == volume) {
        if tables::NOT_ENUMERATED.under(*id).has_any(read)? {
            let why = format!(
                "volume {volume} was made from {id}, and not all of its names are known yet: try again later"
            );
            return Err(Error::name(NameRule::Busy, why));
        }
    }
    Ok(())
}

impl Cx<'_> {
    /// A client that writes a file of the volume saves its changes. One without a file open for writing asks
    /// before it writes.
    fn revoke_open_writers(&mut self, volume: VolumeId) -> Attempt<()> {
        self.revoke_names(volume)?;
        for (session, ino) in self.rules.leases.writers() {
            if self.rules.leases.opens_of(session, ino).write == 0 {
                continue;
            }
            let inode = find_inode(self.read(), ino)?;
            if let Some(inode) = inode.filter(|inode| inode.nlink > 0)
                && self.volume_of(inode.parent)? == volume
            {
                self.obstacles.note(Conflict { ino, session, keep: LeaseKind::Read, ask: true });
            }
        }
        self.clear()
    }
}

pub fn delete(cx: &mut Cx<'_>, r: &SnapshotDelete) -> Result<Snapshot> {
    let of = volume::load_as_admin(cx.read(), &r.cred, r.volume)?;
    let known = records(cx.read(), Some(r.volume))?;
    let found = known.into_iter().find(|(_, _, s)| s.name == r.name && !s.deleting);
    let Some((_, number, mut record)) = found else {
        return Err(Error::not_found(format!("volume {:?} has no snapshot {:?}", of.name, r.name)));
    };
    if let Some(clone) = super::clone::user_of(cx.read(), number)? {
        let why = format!(
            "volume {clone} is made from snapshot {:?}, and not all of its names are known yet",
            r.name
        );
        return Err(Error::name(NameRule::Busy, why));
    }
    record.deleting = true;
    tables::SNAPSHOTS.put(cx.txn, (r.volume, number), &record);
    cx.events.snapshots = true;
    Ok(shown(r.volume, of.root, number, record))
}

/// The number of a snapshot that is not being removed.
pub fn named(read: &dyn Read, of: VolumeId, name: &str) -> Result<(u32, SnapshotRecord)> {
    let found = records(read, Some(of))?.into_iter().find(|(_, _, s)| s.name == name && !s.deleting);
    let none = || Error::not_found(format!("volume {of} has no snapshot {name:?}"));
    found.map(|(_, number, record)| (number, record)).ok_or_else(none)
}

/// Removes one that is not needed any more.
pub fn drop_number(cx: &mut Cx<'_>, of: VolumeId, number: u32) -> Result<()> {
    let found = records(cx.read(), Some(of))?.into_iter().find(|(_, n, _)| *n == number);
    if let Some((_, _, record)) = found {
        let record = SnapshotRecord { deleting: true, ..record };
        tables::SNAPSHOTS.put(cx.txn, (of, number), &record);
        cx.events.snapshots = true;
    }
    Ok(())
}

// ---- by schedule

/// When the next one by a schedule is due: at once if there is none, otherwise at the next full multiple of
/// the interval.
pub fn due(last: Option<Time>, every_s: u32) -> Time {
    let every = i64::from(every_s) * 1_000_000_000;
    let next = last.map_or(0, |last| last.nanos.div_euclid(every).saturating_add(1).saturating_mul(every));
    Time { nanos: next }
}

/// When the last scheduled one of a volume was taken.
pub fn last_scheduled(read: &dyn Read, of: VolumeId) -> Result<Option<Time>> {
    let scheduled = records(read, Some(of))?.into_iter().filter(|(_, _, s)| s.scheduled && !s.deleting);
    Ok(scheduled.map(|(_, _, s)| s.created).max_by_key(|created| created.nanos))
}

/// Takes a scheduled one, unless nothing has changed since the last one. Its name is its date.
pub fn take_scheduled(cx: &mut Cx<'_>, of: VolumeId) -> Attempt<Option<Snapshot>> {
    if cx.rules.mirrored.contains(&of) || !has_changed(cx.read(), of)? {
        return Ok(None);
    }
    let name = format!("{SCHEDULED}{}", Date::of(cx.rules.now).compact());
    take_named(cx, of, &name, true).map(Some)
}

/// Whether any value is kept for the newest snapshot. One made by a user does not count: it may be removed at
/// any time.
fn has_changed(read: &dyn Read, of: VolumeId) -> Result<bool> {
    let known = records(read, Some(of))?;
    let Some((_, number, _)) = known.last().filter(|(_, _, s)| s.scheduled && !s.deleting) else {
        return Ok(true);
    };
    let (start, mut any) = (keys::kept(*number, &[]), false);
    read.scan(&start, &keys::after(&start), &mut |_, _| {
        any = true;
        Scan::Stop
    })?;
    Ok(any)
}

/// Removes all scheduled ones: their volume is deleted.
pub fn delete_scheduled(cx: &mut Cx<'_>, of: VolumeId) -> Result<()> {
    for (_, number, record) in records(cx.read(), Some(of))?.into_iter().filter(|(_, _, s)| s.scheduled) {
        let record = SnapshotRecord { deleting: true, ..record };
        tables::SNAPSHOTS.put(cx.txn, (of, number), &record);
        cx.events.snapshots = true;
    }
    Ok(())
}

/// Removes scheduled ones past their retention; returns how many.
pub fn expire(cx: &mut Cx<'_>, of: VolumeId, keep: &SnapshotRetention) -> Result<usize> {
    let known = records(cx.read(), Some(of))?;
    let scheduled: Vec<_> = known.into_iter().filter(|(_, _, s)| s.scheduled && !s.deleting).collect();
    let dates: BTreeSet<Date> = scheduled.iter().map(|(_, _, s)| Date::of(s.created)).collect();
    let gone = expired(&dates, Date::of(cx.rules.now), &keep.into());
    let mut removed = 0;
    for (_, number, mut record) in scheduled {
        let is_used = super::clone::user_of(cx.read(), number)?.is_some();
        if gone.contains(&Date::of(record.created)) && !is_used {
            record.deleting = true;
            tables::SNAPSHOTS.put(cx.txn, (of, number), &record);
            cx.events.snapshots = true;
            removed += 1;
        }
    }
    Ok(removed)
}

/// A snapshot that is to be removed.
pub fn next_deleted(snapshots: &Snapshots) -> Option<(VolumeId, u32)> {
    let of =
        |(volume, all): (&VolumeId, &Vec<Snap>)| all.iter().find(|s| s.deleting).map(|s| (*volume, s.number));
    snapshots.iter().find_map(of)
}

/// Moves a few of a snapshot's records to the one before it, or drops them. True: it has none left.
pub fn forget_some(cx: &mut Cx<'_>, volume: VolumeId, number: u32) -> Result<bool> {
    let all = cx.rules.snapshots.get(&volume).map_or(&[][..], |all| all);
    let before = all.iter().rev().map(|s| s.number).find(|n| *n < number);
    let start = keys::kept(number, &[]);
    let mut found = Vec::new();
    cx.txn.scan(&start, &keys::after(&start), &mut |key, value| {
        found.push((keys::kept_key(key).to_vec(), value.to_vec()));
        if found.len() < FORGOTTEN_AT_ONCE { Scan::More } else { Scan::Stop }
    })?;
    let last = found.len() < FORGOTTEN_AT_ONCE;
    for (key, value) in found {
        cx.txn.delete(&keys::kept(number, &key));
        match before {
            Some(before) if cx.is_wanted(before, &key)? => cx.txn.put(&keys::kept(before, &key), &value),
            _ => cx.drop_kept(&key, &value)?,
        }
    }
    if last {
        tables::SNAPSHOTS.delete(cx.txn, (volume, number));
        cx.events.snapshots = true;
    }
    Ok(last)
}

impl Cx<'_> {
    /// Whether an earlier snapshot shows the value of a key that was kept for a later one.
    fn is_wanted(&self, before: u32, key: &[u8]) -> Result<bool> {
        if self.txn.get(&keys::kept(before, key))?.is_some() {
            return Ok(false);
        }
        let Some(number) = key.get(1..9).and_then(|n| n.try_into().ok()).map(u64::from_be_bytes) else {
            return Err(Error::damaged("a record of a snapshot has no key"));
        };
        for record in [tables::ACCESS.key(InodeId(number)), tables::INODES.key(InodeId(number))] {
            if let Some(value) = self.txn.get(&keys::kept(before, &record))?
                && kept_value(&value)?.is_none()
            {
                return Ok(false); // made later
            }
        }
        Ok(true)
    }

    fn drop_kept(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let Some(value) = kept_value(value)? else { return Ok(()) };
        let Some((object, first_pg, pg_count)) = object_in(key, value)? else { return Ok(()) };
        tables::REFERENCES.add(self.txn, object, -1);
        if references(self.read(), object)? > 0 {
            return Ok(());
        }
        tables::REFERENCES.delete(self.txn, object);
        let ino = InodeId(u64::from_be_bytes(key[1..9].try_into().expect("eight bytes")));
        if find_inode(self.read(), ino)?.is_some_and(|inode| inode.object(ino) == object)
            || is_owned(self.read(), object)?
        {
            return Ok(());
        }
        tables::OBJECT_OWNERS.delete(self.txn, object);
        let garbage = Garbage { first_pg, pg_count, truncation: StripeTruncation::ALL };
        tables::GARBAGE.put(self.txn, (tables::garbage_time(self.rules.now), object), &garbage);
        self.events.garbage = true;
        Ok(())
    }
}
