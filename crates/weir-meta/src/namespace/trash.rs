//! Trash of a volume: removed files go under `.trash` of its topmost directory, and stay there for a while.
//!
//! Invariants: the last name of a file is removed only from the trash, by replacing it, or with its volume; a
//! removed empty directory leaves a copy of itself. The trash has a part for each period, with a directory in
//! it for each one that something was removed from, at the same path, with its owner, mode and lists: so
//! files in it are read and restored by users that could read and remove them at their former place. A
//! directory of the trash belongs to one directory, not to a path: another one of the same name has another.
//! All of these are ordinary files and directories, and are charged as such.
//!
//! Knows nothing of when the trash is emptied.
use super::charge::Charge;
use super::dir_names::DirNames;
use super::rename::{End, move_file};
use super::*;
use crate::keys::Sequence;
use crate::record::TrashRecord;
use crate::tables::next_number;
use bytes::Bytes;
use weir_proto::date::Date;
use weir_proto::meta::Usage;
use weir_proto::relation::What;
use weir_proto::volume::TRASH;

/// A retention time is divided into this number of parts, of at most a day each.
const PARTS: i64 = 7;
const SECOND: i64 = 1_000_000_000;
const DAY: i64 = 86_400 * SECOND;
/// A directory that got its name before its place was recorded is searched among this number of names.
const SEARCHED_MAX: usize = 4096;
/// Records of directories that one step drops.
const FORGOTTEN_AT_ONCE: usize = if cfg!(test) { 2 } else { 256 };

/// A part of a volume's trash: its start time, and its directory.
pub type Part = (u64, TrashRecord);

// ---- looking

/// The directory of a volume's trash, if it has or had one.
pub fn of(read: &dyn Read, volume: VolumeId) -> Result<Option<InodeId>> {
    Ok(tables::TRASH.get(read, (volume, 0))?.map(|record| record.dir))
}

/// Parts of a volume's trash, oldest first.
fn parts(read: &dyn Read, volume: VolumeId, limit: usize) -> Result<Vec<Part>> {
    let parts = tables::TRASH.from(volume, (volume, 1));
    parts.collect(read, limit, |(_, from), record| (from, record))
}

pub fn oldest(read: &dyn Read, volume: VolumeId) -> Result<Option<Part>> {
    Ok(parts(read, volume, 1)?.pop())
}

/// The directory of a volume's trash, if anything may be in it.
pub fn to_empty(read: &dyn Read, volume: VolumeId) -> Result<Option<InodeId>> {
    let dir = of(read, volume)?;
    Ok(if dir.is_some() && oldest(read, volume)?.is_some() { dir } else { None })
}

/// The next volume after `after` that has a trash.
pub fn next_volume(read: &dyn Read, after: VolumeId) -> Result<Option<VolumeId>> {
    let Some(next) = after.0.checked_add(1) else { return Ok(None) };
    let next = tables::TRASH.from(All, (VolumeId(next), 0));
    Ok(next.keys(read, 1, |(volume, _)| volume)?.pop())
}

/// The usage of a volume's trash.
pub fn usage(read: &dyn Read, volume: VolumeId) -> Result<Usage> {
    match of(read, volume)? {
        Some(dir) if find_access(read, dir)?.is_some() => super::usage_of(read, dir),
        _ => Ok(Usage::default()),
    }
}

/// Whether an entry is the volume's trash: listings omit it.
pub fn is_hidden(read: &dyn Read, volume: VolumeId, name: &[u8], ino: InodeId) -> Result<bool> {
    Ok(name == TRASH && of(read, volume)? == Some(ino))
}

/// Whether a volume has an empty trash and nothing else.
pub fn is_all(read: &dyn Read, volume: VolumeId, root: InodeId) -> Result<bool> {
    let Some(dir) = of(read, volume)? else { return Ok(false) };
    let is_there = find_access(read, dir)?.is_some_and(|access| access.parent == root);
    Ok(is_there && load_tally(read, root)?.entries == 1 && load_tally(read, dir)?.entries == 0)
}

pub(super) fn is_in_trash(read: &dyn Read, dir: InodeId) -> Result<bool> {
    match of(read, volume::volume_of(read, dir)?)? {
        Some(trash) => super::usage::is_within(read, dir, trash),
        None => Ok(false),
    }
}

/// Whether a part may be removed: its retention has passed, or the volume has no trash any more.
pub fn is_over(part: &TrashRecord, trash_s: u32, now: Time) -> bool {
    trash_s == 0 || part.until.nanos.saturating_add(i64::from(trash_s) * SECOND) <= now.nanos
}

/// The period that contains `now`.
fn stretch(trash_s: u32, now: Time) -> (Time, Time) {
    let length = (i64::from(trash_s) * SECOND / PARTS).clamp(SECOND, DAY);
    let from = now.nanos.div_euclid(length) * length;
    (Time { nanos: from }, Time { nanos: from + length })
}
/// `2026-11-22`, or with the time of day if the period is shorter than a day.
fn part_name((from, until): (Time, Time)) -> String {
    let shown = Date::of(from).to_string();
    if until.nanos - from.nanos < DAY { shown } else { shown[..10].to_owned() }
}

// ---- keeping

/// A volume gets a trash.
pub(super) fn begin(cx: &mut Cx<'_>, volume: VolumeId, root: InodeId) -> Attempt<()> {
    if let Some(dir) = of(cx.read(), volume)?
        && find_access(cx.read(), dir)?.is_some()
    {
        return Ok(());
    }
    require_listed(cx.obstacles, root, &load_access(cx.read(), root)?)?;
    if find_link(cx.read(), root, TRASH)?.is_some() {
        return Err(Error::exists(format!(
            "{:?} is in the volume's directory: give it another name",
            show(TRASH)
        ))
        .into());
    }
    make_trash(cx, volume, root, TRASH).map(drop)
}

/// All users that may search it can read it, and only the leader changes it.
fn make_trash(cx: &mut Cx<'_>, volume: VolumeId, root: InodeId, name: &[u8]) -> Attempt<InodeId> {
    let dir = cx.make_directory(root, name, (0o755, 0, 0))?;
    let record = TrashRecord { dir, until: Time { nanos: 0 } };
    tables::TRASH.put(cx.txn, (volume, 0), &record);
    Ok(dir)
}

/// Moves a file into the trash, if its last name is removed outside of it. False: it is to be removed.
pub(super) fn keep_file(
    cx: &mut Cx<'_>,
    (dir, access): (InodeId, &Access),
    name: &[u8],
    link: &Link,
) -> Attempt<bool> {
    if cx.trash_s(access.volume) == 0 || !super::remove::is_last(cx.read(), link.ino)? {
        return Ok(false);
    }
    let Some(place) = place_of(cx, dir, access)? else { return Ok(false) };
    cx.need_here(place)?;
    let new_name = cx.free_name(place, name)?;
    let (ino, kind, parent, new_parent) = (link.ino, link.kind, dir, place);
    let (old, new) = (Bytes::copy_from_slice(name), Bytes::from(new_name.clone()));
    cx.log(dir, || What::Renamed {
        ino,
        kind,
        parent,
        name: old,
        new_parent,
        new_name: new,
        replaced: None,
    })?;
    move_file(cx, link, End { dir, name }, End { dir: place, name: &new_name })?;
    Ok(true)
}

/// An empty directory that is removed leaves a copy of itself in the trash.
pub(super) fn keep_directory(cx: &mut Cx<'_>, dir: InodeId, access: &Access) -> Attempt<()> {
    place_of(cx, dir, access).map(drop)
}

/// The directory in the trash for files removed from a directory: created if it is missing. `None`: none.
fn place_of(cx: &mut Cx<'_>, dir: InodeId, access: &Access) -> Attempt<Option<InodeId>> {
    let volume = access.volume;
    let trash_s = cx.trash_s(volume);
    if trash_s == 0 {
        return Ok(None);
    }
    let root = super::volume::load(cx.read(), volume)?.root;
    let known = of(cx.read(), volume)?;
    let Some(path) = path(cx.read(), dir, root, known)? else { return Ok(None) };
    let trash = match known {
        Some(trash) if find_access(cx.read(), trash)?.is_some() => trash,
        _ => {
            let name = cx.free_name(root, TRASH)?;
            make_trash(cx, volume, root, &name)?
        }
    };
    let part = part_of(cx, (volume, root), trash, trash_s)?;
    let mut place = part;
    for dir in path {
        place = counterpart(cx, part, place, dir)?;
    }
    Ok(Some(place))
}

/// The directories from below `root` down to `dir`. `None`: it is in the trash.
fn path(
    read: &dyn Read,
    dir: InodeId,
    root: InodeId,
    trash: Option<InodeId>,
) -> Result<Option<Vec<InodeId>>> {
    let (mut path, mut at) = (Vec::new(), dir);
    while at != root {
        if Some(at) == trash {
            return Ok(None);
        }
        if at == InodeId::ROOT || path.len() > super::path::DEPTH_MAX {
            return Err(Error::damaged(format!("directory {dir} is not below that of its volume, {root}")));
        }
        path.push(at);
        at = load_access(read, at)?.parent;
    }
    path.reverse();
    Ok(Some(path))
}

/// The current part: it corresponds to the volume's topmost directory.
fn part_of(
    cx: &mut Cx<'_>,
    (volume, root): (VolumeId, InodeId),
    trash: InodeId,
    trash_s: u32,
) -> Attempt<InodeId> {
    let now = cx.rules.now;
    if let Some((_, last)) = parts(cx.read(), volume, usize::MAX)?.pop()
        && now.nanos < last.until.nanos
        && find_access(cx.read(), last.dir)?.is_some_and(|access| access.parent == trash)
    {
        cx.keep_alike(last.dir, root)?;
        return Ok(last.dir);
    }
    let stretch = stretch(trash_s, now);
    let name = cx.free_name(trash, part_name(stretch).as_bytes())?;
    let dir = cx.make_like(trash, &name, root)?;
    let mut from = stretch.0.nanos.max(1) as u64;
    if tables::TRASH.has(cx.txn, (volume, from))? {
        from = now.nanos.max(1) as u64; // a user moved that one away
    }
    tables::TRASH.put(cx.txn, (volume, from), &TrashRecord { dir, until: stretch.1 });
    Ok(dir)
}

/// The directory in `place` of the trash that corresponds to `dir`.
fn counterpart(cx: &mut Cx<'_>, part: InodeId, place: InodeId, dir: InodeId) -> Attempt<InodeId> {
    if let Some(there) = tables::TRASHED.get(cx.read(), (part, dir))?
        && find_access(cx.read(), there)?.is_some_and(|access| access.parent == place)
    {
        cx.keep_alike(there, dir)?;
        return Ok(there);
    }
    let name = name_of(cx.read(), dir)?;
    let name = cx.free_name(place, &name)?;
    let there = cx.make_like(place, &name, dir)?;
    tables::TRASHED.put(cx.txn, (part, dir), &there);
    Ok(there)
}

/// A directory's name.
pub fn name_of(read: &dyn Read, dir: InodeId) -> Result<Bytes> {
    let access = load_access(read, dir)?;
    let found = super::path::name_at(read, (access.parent, access.cookie), dir, SEARCHED_MAX)?;
    Ok(found.unwrap_or_else(|| Bytes::from(format!("directory-{dir}"))))
}

impl Cx<'_> {
    /// 0: the volume has no trash.
    fn trash_s(&self, volume: VolumeId) -> u32 {
        self.rules.quotas.retentions().get(&volume).map_or(0, |retention| retention.trash_s)
    }
    /// Fails if any session, including this client's, holds a lease on a directory that is changed in
    /// addition to the requested ones.
    fn need_here(&mut self, dir: InodeId) -> Attempt<()> {
        self.need(dir, Need::Change);
        self.rules.leases.own_conflict(self.rules.session, dir, self.obstacles);
        self.clear()
    }

    /// `name`, or if that exists already, the same with the time of day.
    fn free_name(&self, dir: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        let mut free = name.to_vec();
        let mut micros = self.rules.now.nanos / 1000;
        while find_link(self.read(), dir, &free)?.is_some() {
            let of_day = micros.rem_euclid(86_400_000_000);
            let (seconds, rest) = (of_day / 1_000_000, of_day % 1_000_000);
            let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
            let suffix = format!("~{hour:02}{minute:02}{second:02}.{rest:06}");
            free = [prefix(name, weir_proto::meta::NAME_MAX - suffix.len()), suffix.as_bytes()].concat();
            micros += 1;
        }
        Ok(free)
    }

    /// A directory with mode, owner and group of its own, with its own numbers.
    fn make_directory(&mut self, parent: InodeId, name: &[u8], like: (u32, u32, u32)) -> Attempt<InodeId> {
        self.need_here(parent)?;
        let (mut names, above) = (DirNames::load(self.read(), parent)?, load_access(self.read(), parent)?);
        let ino = names.next_ino(self)?;
        let cookie = names.insert(self, name, ino, FileKind::Directory);
        names.store(self);
        let (kind, made) = (FileKind::Directory, Bytes::copy_from_slice(name));
        self.log(parent, || What::Made { ino, kind, parent, name: made })?;
        let (now, (mode, uid, gid)) = (self.rules.now, like);
        let (atime, btime, volume) = (now, now, above.volume);
        self.put_access(ino, &Access { mode, uid, gid, parent, atime, btime, volume, cookie });
        let serial = next_number(self.txn, Sequence::DirectorySerial)?;
        let (entries, subdirectories) = (0, 0);
        let tally =
            Tally { mtime: now, ctime: now, entries, subdirectories, serial, next_n: 0, next_cookie: 1 };
        self.put_tally(ino, &tally);
        self.charge(parent, Charge { directories: 1, ..Charge::default() })?;
        Ok(ino)
    }

    /// A directory with the rights and attributes of another.
    fn make_like(&mut self, parent: InodeId, name: &[u8], like: InodeId) -> Attempt<InodeId> {
        let Access { mode, uid, gid, .. } = load_access(self.read(), like)?;
        let ino = self.make_directory(parent, name, (mode & !NOT_ENUMERATED, uid, gid))?;
        for (name, value) in self.xattrs(like)? {
            tables::XATTRS.put_bytes(self.txn, (ino, &name), &value);
        }
        Ok(ino)
    }

    /// A user who may read a directory may read its removed entries in the trash.
    fn keep_alike(&mut self, there: InodeId, here: InodeId) -> Attempt<()> {
        let (mut access, like) = (load_access(self.read(), there)?, load_access(self.read(), here)?);
        let (mode, is_plain) = (like.mode & !NOT_ENUMERATED, (access.mode | like.mode) & HAS_ACL == 0);
        let is_alike = (access.mode, access.uid, access.gid) == (mode, like.uid, like.gid);
        let lists = |cx: &Self, dir| -> Result<Vec<_>> {
            let all = cx.xattrs(dir)?.into_iter();
            Ok(all.filter(|(name, _)| name[..] == *acl::ACCESS || name[..] == *acl::DEFAULT).collect())
        };
        let (old, new) = match is_plain {
            true => (Vec::new(), Vec::new()),
            false => (lists(self, there)?, lists(self, here)?),
        };
        if is_alike && old == new {
            return Ok(());
        }
        self.need_here(there)?;
        (access.mode, access.uid, access.gid) = (mode, like.uid, like.gid);
        self.put_access(there, &access);
        for (name, _) in old {
            tables::XATTRS.delete(self.txn, (there, &name));
        }
        for (name, value) in new {
            tables::XATTRS.put_bytes(self.txn, (there, &name), &value);
        }
        Ok(self.log_of(there, || What::Attributes { ino: there })?)
    }

    fn xattrs(&self, ino: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        tables::XATTRS.under(ino).collect(self.read(), usize::MAX, |(_, name), value| (name.to_vec(), value))
    }
}

/// At most `len` bytes of a name, without a cut within a character.
fn prefix(name: &[u8], len: usize) -> &[u8] {
    match std::str::from_utf8(name) {
        Ok(text) => {
            &name[..(0..=len.min(name.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)]
        }
        Err(_) => &name[..len.min(name.len())],
    }
}

// ---- emptying

/// Removes a few entries of a part of the trash, deepest first. True: it is empty and removed.
pub fn remove_some(cx: &mut Cx<'_>, volume: VolumeId, (from, part): Part) -> Attempt<bool> {
    let access = find_access(cx.read(), part.dir)?;
    if access.is_some() && !remove_tree::remove_below(cx, volume, part.dir, &remove_tree::nothing_more)? {
        return Ok(false);
    }
    if !cx.forget_counterparts(part.dir)? {
        return Ok(false);
    }
    tables::TRASH.delete(cx.txn, (volume, from));
    let Some(parent) = access.map(|access| access.parent) else { return Ok(true) };
    // A volume that was created in it stays, and so does its parent.
    let name = name_of(cx.read(), part.dir)?;
    let link = find_link(cx.read(), parent, &name)?.filter(|link| link.ino == part.dir);
    if let Some(link) = link
        && load_tally(cx.read(), part.dir)?.entries == 0
    {
        cx.need(parent, Need::Change);
        cx.need(part.dir, Need::Change);
        cx.clear()?;
        cx.remove_directory(parent, &name, &link)?;
    }
    Ok(true)
}

/// Drops a few records of a deleted volume's trash, whose names are gone. True: none is left.
pub(super) fn forget_some(cx: &mut Cx<'_>, volume: VolumeId) -> Result<bool> {
    if let Some((from, part)) = oldest(cx.read(), volume)? {
        if cx.forget_counterparts(part.dir)? {
            tables::TRASH.delete(cx.txn, (volume, from));
        }
        return Ok(false);
    }
    tables::TRASH.delete(cx.txn, (volume, 0));
    Ok(true)
}

impl Cx<'_> {
    /// True: none is left.
    fn forget_counterparts(&mut self, part: InodeId) -> Result<bool> {
        let forgotten = tables::TRASHED.under(part).delete_some(self.txn, FORGOTTEN_AT_ONCE)?;
        Ok(forgotten < FORGOTTEN_AT_ONCE)
    }
}
