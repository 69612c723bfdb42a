//! Keeps the content of snapshots, beneath all operations: a key's value goes under `h/` before it first
//! changes.
//!
//! Invariants: every change of a tree goes through a [`Keeper`], which no operation can bypass. A key is kept
//! once per snapshot: the first one under a number at or above a snapshot's is what that snapshot shows, and
//! the present value if there is none. For a key that was made after the snapshot only its absence is kept.
//! `z/<object>` counts the records under `h/` and `Z/` that refer to an object; an object without references,
//! and without a file, becomes garbage.
//!
//! Volumes without snapshots pay for a look-up in an empty map.
use super::objects::{is_owned, references};
use super::records::find_access;
use crate::keys::{self, Letter};
use crate::owners::{self, Charged};
use crate::record::{
    Access, Garbage, Inode, LayerRecord, Link, NEVER_NAMED, Record, StripeTruncation, Tally,
};
use crate::table::Key;
use crate::tables;
use std::collections::BTreeMap;
use weir_kv::{Read, Scan, Txn};
use weir_proto::meta::{FileKind, Time};
use weir_proto::quota::Account;
use weir_proto::{Error, InodeId, PgId, Result, VolumeId};

/// The numbers of each volume's snapshots, oldest first, and which are being removed.
pub type Snapshots = BTreeMap<VolumeId, Vec<Snap>>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snap {
    pub number: u32,
    pub deleting: bool,
}

/// `h/`: the key was absent.
const ABSENT: u8 = 0;
/// `h/`: its value follows.
const PRESENT: u8 = 1;

/// A value under `h/`: the key's former value.
pub fn kept_value(value: &[u8]) -> Result<Option<&[u8]>> {
    match value.split_first() {
        Some((&ABSENT, [])) => Ok(None),
        Some((&PRESENT, rest)) => Ok(Some(rest)),
        _ => Err(Error::damaged("a record of a snapshot is damaged")),
    }
}
fn to_keep(value: Option<&[u8]>) -> Vec<u8> {
    value.map_or_else(|| vec![ABSENT], |v| [&[PRESENT], v].concat())
}

/// The owner of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Owner {
    Directory(InodeId),
    File(InodeId),
}

impl Owner {
    fn key(self) -> Key {
        match self {
            Owner::Directory(dir) => tables::ACCESS.key(dir),
            Owner::File(ino) => tables::INODES.key(ino),
        }
    }
}

/// The snapshot for which values of an owner are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Keep {
    Nothing,
    /// The owner was made after this snapshot.
    Newer {
        number: u32,
        volume: VolumeId,
    },
    /// The value is kept for this snapshot, unless it is kept for one of the later ones, which are being
    /// removed.
    For {
        number: u32,
        volume: VolumeId,
    },
}

/// A transaction that keeps the content of snapshots.
pub struct Keeper<'a> {
    txn: &'a mut (dyn Txn + 'a),
    snapshots: &'a Snapshots,
    owners: BTreeMap<Owner, Keep>,
    /// Objects that fewer records refer to now, and their groups.
    released: BTreeMap<InodeId, (PgId, u32)>,
    /// Usage of users and groups.
    owned: owners::Changes,
    failed: Option<Error>,
}

impl Read for Keeper<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.txn.get(key)
    }
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        self.txn.scan(start, end, visit)
    }
}

impl Txn for Keeper<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.note(key, Some(value));
        self.txn.put(key, value);
    }
    fn delete(&mut self, key: &[u8]) {
        self.note(key, None);
        self.txn.delete(key);
    }
    fn add(&mut self, key: &[u8], delta: i64) {
        self.txn.add(key, delta);
    }
    fn max(&mut self, key: &[u8], value: u64) {
        self.txn.max(key, value);
    }
}

impl<'a> Keeper<'a> {
    pub fn new(txn: &'a mut (dyn Txn + 'a), snapshots: &'a Snapshots) -> Keeper<'a> {
        Keeper {
            txn,
            snapshots,
            owners: BTreeMap::new(),
            released: BTreeMap::new(),
            owned: owners::Changes::default(),
            failed: None,
        }
    }

    /// To be called before the transaction ends. Returns whether there is garbage, and whose usage changed.
    pub fn finish(mut self, now: Time) -> Result<(bool, Vec<(Account, Charged)>)> {
        if let Some(e) = self.failed.take() {
            return Err(e);
        }
        let mut any = false;
        for (object, (first_pg, pg_count)) in std::mem::take(&mut self.released) {
            if references(self.txn, object)? == 0 {
                tables::REFERENCES.delete(self.txn, object);
                if is_owned(&*self.txn, object)? {
                    continue;
                }
                tables::OBJECT_OWNERS.delete(self.txn, object);
                let garbage = Garbage { first_pg, pg_count, truncation: StripeTruncation::ALL };
                tables::GARBAGE.put(self.txn, (tables::garbage_time(now), object), &garbage);
                any = true;
            }
        }
        Ok((any, self.owned.store(self.txn)))
    }

    fn note(&mut self, key: &[u8], new: Option<&[u8]>) {
        let Some(letter) = key.first() else { return };
        let layer = *letter == b'Z';
        if self.failed.is_none() {
            self.failed = self.owned.note(&*self.txn, key, new).err();
        }
        if self.failed.is_some() || !layer && self.snapshots.is_empty() {
            return;
        }
        let mut note = || -> Result<()> {
            if !self.snapshots.is_empty()
                && let Some(owner) = self.owner_of(key)?
            {
                self.keep(owner, key, new)?;
            }
            if layer { self.count_layer(key, new) } else { Ok(()) }
        };
        self.failed = note().err();
    }

    fn keep(&mut self, owner: Owner, key: &[u8], new: Option<&[u8]>) -> Result<()> {
        let is_record = key == &*owner.key();
        let keep = self.keep_of(owner, if is_record { new } else { None })?;
        let (number, volume) = match keep {
            Keep::Nothing => return Ok(()),
            Keep::Newer { number, volume } if is_record && new.is_none() => {
                return self.forget_absence(owner, number, volume);
            }
            Keep::Newer { .. } => return Ok(()),
            Keep::For { number, volume } => (number, volume),
        };
        if self.is_kept(volume, number, key)? {
            return Ok(());
        }
        let old = self.txn.get(key)?;
        if self.came_later(owner, key, old.as_deref(), (volume, number))? {
            return Ok(());
        }
        if let Some(value) = old.as_deref() {
            self.count_kept(key, value)?;
        }
        self.txn.put(&keys::kept(number, key), &to_keep(old.as_deref()));
        Ok(())
    }

    /// The snapshot for which the values of `owner` are kept. Records the absence of a new one as well.
    fn keep_of(&mut self, owner: Owner, new: Option<&[u8]>) -> Result<Keep> {
        if let Some(known) = self.owners.get(&owner) {
            return Ok(*known);
        }
        let old = self.txn.get(&owner.key())?;
        let volume = match old.as_deref() {
            Some(value) => self.volume_in(owner, value)?,
            None => None,
        };
        let is_new = volume.is_none();
        let volume = match (volume, new) {
            (None, Some(value)) => self.volume_in(owner, value)?,
            (volume, _) => volume,
        };
        let newest = volume.and_then(|volume| {
            let all = self.snapshots.get(&volume)?;
            all.iter().rev().find(|s| !s.deleting).map(|s| (volume, s.number))
        });
        let keep = match newest {
            None => Keep::Nothing,
            Some((volume, number)) if is_new => {
                self.txn.put(&keys::kept(number, &owner.key()), &[ABSENT]);
                Keep::Newer { number, volume }
            }
            Some((volume, number)) if self.is_newer_than(volume, number, owner)? => {
                Keep::Newer { number, volume }
            }
            Some((volume, number)) => match self.shown_last(volume, number, owner, old.as_deref())? {
                Some(number) => Keep::For { number, volume },
                None => Keep::Nothing,
            },
        };
        // The volume of an inode without a record is not known before it gets one.
        if old.is_some() || new.is_some() {
            self.owners.insert(owner, keep);
        }
        Ok(keep)
    }

    fn volume_in(&self, owner: Owner, value: &[u8]) -> Result<Option<VolumeId>> {
        let Owner::File(ino) = owner else {
            return Access::from_value(value, || "a directory".to_owned()).map(|a| Some(a.volume));
        };
        let parent = Inode::from_value(value, || format!("inode {ino}"))?.parent;
        if parent == NEVER_NAMED {
            return Ok(None);
        }
        find_access(&*self.txn, parent).map(|access| access.map(|a| a.volume))
    }

    /// The snapshots from `number` on: later ones are being removed.
    fn from(&self, volume: VolumeId, number: u32) -> impl Iterator<Item = u32> + use<'a> {
        let all = self.snapshots.get(&volume).map_or(&[][..], |all| all);
        all.iter().map(|s| s.number).filter(move |n| *n >= number)
    }
    fn is_kept(&self, volume: VolumeId, number: u32, key: &[u8]) -> Result<bool> {
        for n in self.from(volume, number) {
            if self.txn.get(&keys::kept(n, key))?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
    fn is_newer_than(&self, volume: VolumeId, number: u32, owner: Owner) -> Result<bool> {
        for n in self.from(volume, number) {
            if let Some(value) = self.txn.get(&keys::kept(n, &owner.key()))? {
                return Ok(kept_value(&value)?.is_none());
            }
        }
        Ok(false)
    }

    /// The newest snapshot that shows it and stays. A snapshot that was taken when a file had no name any
    /// more does not: its writer was not asked to save, and continues to write to its object.
    fn shown_last(
        &self,
        volume: VolumeId,
        newest: u32,
        owner: Owner,
        record: Option<&[u8]>,
    ) -> Result<Option<u32>> {
        let (Owner::File(ino), Some(record)) = (owner, record) else { return Ok(Some(newest)) };
        if Inode::from_value(record, || format!("inode {ino}"))?.nlink > 0 {
            return Ok(Some(newest));
        }
        let all = self.snapshots.get(&volume).map_or(&[][..], |all| all);
        for (n, last) in all.iter().enumerate().rev() {
            if let Some(value) = self.txn.get(&keys::kept(last.number, &owner.key()))? {
                // Values kept for one that is being removed go to the one before.
                let stays = all[..=n].iter().rev().find(|s| !s.deleting);
                return Ok(stays.filter(|_| value != [ABSENT]).map(|s| s.number));
            }
        }
        Ok(None)
    }

    /// An inode that was made after the snapshot and removed again leaves nothing behind.
    fn forget_absence(&mut self, owner: Owner, number: u32, volume: VolumeId) -> Result<()> {
        if self.from(volume, number).count() > 1 {
            return Ok(()); // the move from the later ones finds it
        }
        let key = keys::kept(number, &owner.key());
        if self.txn.get(&key)?.is_some_and(|value| value == [ABSENT]) {
            self.txn.delete(&key);
        }
        Ok(())
    }

    /// The owner of a key, if snapshots show it.
    fn owner_of(&self, key: &[u8]) -> Result<Option<Owner>> {
        let Some(number) = key.get(1..9).and_then(|n| n.try_into().ok()).map(u64::from_be_bytes) else {
            return Ok(None);
        };
        let (dir, file) = (Owner::Directory(InodeId(number)), Owner::File(InodeId(number)));
        Ok(match key[0] {
            b'A' | b'T' | b'E' | b'K' => Some(dir),
            b'I' | b'D' | b'Z' => Some(file),
            b'X' if self.owners.contains_key(&dir) => Some(dir),
            b'X' if self.owners.contains_key(&file) => Some(file),
            b'X' if self.txn.get(&dir.key())?.is_some() => Some(dir),
            b'X' => Some(file),
            _ => None,
        })
    }

    /// Whether a name of an older directory was made after the snapshot: by its place in the listing.
    fn came_later(
        &self,
        owner: Owner,
        key: &[u8],
        old: Option<&[u8]>,
        (volume, number): (VolumeId, u32),
    ) -> Result<bool> {
        let Owner::Directory(dir) = owner else { return Ok(false) };
        let cookie = match (key[0], old) {
            (b'E' | b'K', None) => return Ok(true),
            (b'E', Some(value)) => Link::from_value(value, || format!("a name in directory {dir}"))?.cookie,
            (b'K', Some(_)) => tables::LISTED.parts(key)?.1,
            _ => return Ok(false),
        };
        let tally = tables::TALLIES.key(dir);
        let mut then = self.txn.get(&tally)?;
        for n in self.from(volume, number) {
            if let Some(value) = self.txn.get(&keys::kept(n, &tally))? {
                then = kept_value(&value)?.map(<[u8]>::to_vec);
                break;
            }
        }
        let Some(then) = then else { return Ok(true) };
        Ok(cookie >= Tally::from_value(&then, || format!("the counts of directory {dir}"))?.next_cookie)
    }

    fn count_kept(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        if let Some(object) = object_in(key, value)? {
            tables::REFERENCES.add(self.txn, object.0, 1);
        }
        Ok(())
    }

    fn count_layer(&mut self, key: &[u8], new: Option<&[u8]>) -> Result<()> {
        assert_eq!(key.first(), Some(&(Letter::Layer as u8)), "not the key of a layer: {key:?}");
        if let Some(old) = self.txn.get(key)? {
            let (object, groups) = layer_object(&old)?;
            tables::REFERENCES.add(self.txn, object, -1);
            self.released.insert(object, groups);
        }
        if let Some(new) = new {
            tables::REFERENCES.add(self.txn, layer_object(new)?.0, 1);
        }
        Ok(())
    }
}

fn layer_object(value: &[u8]) -> Result<(InodeId, (PgId, u32))> {
    let layer = LayerRecord::from_value(value, || "bytes in an older object".to_owned())?;
    Ok((layer.object, (layer.first_pg, layer.pg_count)))
}

/// The object with data that a record under `h/` refers to, and its groups.
pub fn object_in(key: &[u8], value: &[u8]) -> Result<Option<(InodeId, PgId, u32)>> {
    match key.first() {
        Some(b'I') => {
            let ino = keys::numbered(key);
            let inode = Inode::from_value(value, || format!("inode {ino}"))?;
            let layout = inode.layout.filter(|_| inode.may_have_cells());
            Ok(layout.map(|l| (inode.object(ino), l.first_pg, l.pg_count)))
        }
        Some(b'Z') => layer_object(value).map(|(object, (first, count))| Some((object, first, count))),
        _ => Ok(None),
    }
}

/// Whether a snapshot shows the present data of a file.
pub fn is_held(read: &dyn Read, snapshots: &Snapshots, ino: InodeId, inode: &Inode) -> Result<bool> {
    if snapshots.is_empty() || inode.kind != FileKind::Regular {
        return Ok(false);
    }
    // Even if it is known to be empty now: it may have been written when it was kept.
    if references(read, inode.object(ino))? > 0 {
        return Ok(true);
    }
    if !inode.may_have_cells() || inode.parent == NEVER_NAMED || inode.nlink == 0 {
        return Ok(false);
    }
    let Some(access) = find_access(read, inode.parent)? else { return Ok(false) };
    let all = snapshots.get(&access.volume).map_or(&[][..], |all| all);
    let Some(newest) = all.iter().rev().find(|s| !s.deleting) else { return Ok(false) };
    for snap in all.iter().filter(|s| s.number >= newest.number) {
        if read.get(&keys::kept(snap.number, &tables::INODES.key(ino)))?.is_some() {
            return Ok(false); // kept without this object, or made later
        }
    }
    Ok(true)
}
