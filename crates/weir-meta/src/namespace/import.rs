//! Names that come from a home: a directory of a volume that was imported at first only knows where its names
//! are to be read. Operations that need them wait; movers read them, directory by directory, in the
//! background too.
//!
//! Invariants: while a directory is marked (`NOT_ENUMERATED` in its mode, a key `l/` that names the source)
//! no operation creates, removes or lists entries in it, so a repeated report is recognized by its name.
//! Reported entries become inodes whose bytes are at home only, and remote entries as if they had been
//! shipped; the directory's own times stay.
//!
//! Knows nothing of which mover reads home.
use super::charge::Charge;
use super::dir_names::DirNames;
use super::*;
use crate::keys::Sequence;
use crate::record::{EvictedRange, Writing};
use crate::relation::record::{RemoteEntry, RemotePlace};
use crate::relation::store;
use crate::tables::next_number;
use bytes::Bytes;
use weir_proto::meta::FILE_BYTES_MAX;
use weir_proto::relation::{HOME_ENTRIES_MAX, HomeEntry, RelationId, ReportListing};

/// The topmost directory of an empty volume gets its names from a home.
pub fn begin(cx: &mut Cx<'_>, relation: RelationId, root: InodeId) -> Attempt<()> {
    let mut access = load_access(cx.read(), root)?;
    let entries = load_tally(cx.read(), root)?.entries;
    if entries > 0 || access.mode & NOT_ENUMERATED != 0 {
        return Err(Error::name(
            NameRule::NotEmpty,
            format!("the volume has {entries} entries: only an empty one can be made from what is at home"),
        )
        .into());
    }
    cx.need(root, Need::Change);
    cx.clear()?;
    access.mode |= NOT_ENUMERATED;
    cx.put_access(root, &access);
    tables::NOT_ENUMERATED.put(cx.txn, (relation, root), &Present);
    Ok(())
}

/// A part of a directory's entries at home.
pub fn report(cx: &mut Cx<'_>, r: &ReportListing) -> Attempt<()> {
    if r.entries.len() > HOME_ENTRIES_MAX {
        return Err(Error::invalid(format!("{} entries: at most {HOME_ENTRIES_MAX}", r.entries.len())).into());
    }
    let Some(mut access) = find_access(cx.read(), r.dir)? else { return Ok(()) };
    let is_due = tables::NOT_ENUMERATED.has(cx.txn, (r.relation, r.dir))?;
    if access.mode & NOT_ENUMERATED == 0 || !is_due {
        return Ok(()); // reported before
    }
    cx.need(r.dir, Need::Change);
    cx.clear()?;
    let mut names = DirNames::load(cx.read(), r.dir)?;
    let mtime = names.tally().mtime;
    let mut charge = Charge::default();
    let mut into =
        Into { relation: r.relation, dir: r.dir, access: &access, names: &mut names, again: false };
    for entry in &r.entries {
        charge = charge.and(into.take(cx, entry)?);
    }
    names.set_mtime(mtime);
    names.store(cx);
    cx.charge(r.dir, charge)?;
    if r.end {
        access.mode &= !NOT_ENUMERATED;
        cx.put_access(r.dir, &access);
        tables::NOT_ENUMERATED.delete(cx.txn, (r.relation, r.dir));
        mirror::begin(cx, r.relation, r.dir)?;
        // Other homes of the volume get it like data that existed before them.
        let others = store::relations(cx.read())?;
        for (id, _) in others.iter().filter(|(id, o)| o.volume == access.volume && *id != r.relation) {
            tables::UNSEEN.put(cx.txn, (*id, r.dir), &0);
        }
        cx.events.logged = true;
    }
    Ok(())
}

/// The directory that is being filled.
pub(super) struct Into<'a> {
    pub relation: RelationId,
    pub dir: InodeId,
    pub access: &'a Access,
    pub names: &'a mut DirNames,
    /// A file that is known by another name may appear in its state before a change at home: then this is
    /// another file.
    pub again: bool,
}

impl Into<'_> {
    /// Its addition to the usage.
    pub(super) fn take(&mut self, cx: &mut Cx<'_>, entry: &HomeEntry) -> Attempt<Charge> {
        check_name(&entry.name)?;
        if find_link(cx.read(), self.dir, &entry.name)?.is_some() {
            return Ok(Charge::default());
        }
        if let Some(known) = self.known(cx, entry)? {
            self.link(cx, entry, known)?;
            return Ok(Charge::default());
        }
        if entry.size > FILE_BYTES_MAX {
            return Err(Error::name(NameRule::FileTooBig, format!("{:?} at home", show(&entry.name))).into());
        }
        let ino = self.names.next_ino(cx)?;
        self.names.insert(cx, &entry.name, ino, entry.kind);
        if !entry.id.is_empty() {
            tables::IDENTITIES.put(cx.txn, (self.relation, &entry.id), &ino);
        }
        self.put_remote(cx, ino, entry);
        let flags = put_xattrs(cx, ino, entry)?;
        if entry.kind == FileKind::Directory {
            self.make_directory(cx, ino, entry, flags)?;
            return Ok(Charge { directories: 1, ..Charge::default() });
        }
        Ok(self.make_file(cx, ino, entry, flags))
    }

    /// The inode of which this is another name.
    fn known(&self, cx: &Cx<'_>, entry: &HomeEntry) -> Result<Option<(InodeId, Inode)>> {
        if entry.id.is_empty() {
            return Ok(None);
        }
        let Some(ino) = tables::IDENTITIES.get(cx.read(), (self.relation, &entry.id))? else {
            return Ok(None);
        };
        if self.again {
            let remote = crate::relation::tree::find_remote(cx.read(), self.relation, ino)?;
            if remote.is_none_or(|remote| remote.fingerprint != entry.fingerprint) {
                return Ok(None);
            }
        }
        let found = find_inode(cx.read(), ino)?.filter(|inode| inode.kind == entry.kind && inode.nlink > 0);
        Ok(found.map(|inode| (ino, inode)))
    }

    fn link(
        &mut self,
        cx: &mut Cx<'_>,
        entry: &HomeEntry,
        (ino, mut inode): (InodeId, Inode),
    ) -> Attempt<()> {
        cx.need(ino, Need::Change);
        cx.clear()?;
        inode.nlink += 1;
        inode.ctime = cx.rules.after(inode.ctime);
        self.names.insert(cx, &entry.name, ino, entry.kind);
        tables::LINKS.put(cx.txn, (ino, self.dir, &entry.name), &Present);
        cx.put_inode(ino, &inode);
        if let Some(mut remote) = crate::relation::tree::find_remote(cx.read(), self.relation, ino)? {
            remote.places.push(RemotePlace { dir: self.dir, name: entry.name.clone() });
            tables::REMOTE.put(cx.txn, (self.relation, ino), &remote);
            tables::REMOTE_NAMES.put(cx.txn, (self.relation, self.dir, &entry.name), &ino);
        }
        Ok(())
    }

    fn put_remote(&self, cx: &mut Cx<'_>, ino: InodeId, entry: &HomeEntry) {
        let places = vec![RemotePlace { dir: self.dir, name: entry.name.clone() }];
        let complete = (entry.kind == FileKind::Regular).then_some(entry.size);
        let remote = RemoteEntry {
            kind: entry.kind,
            places,
            fingerprint: entry.fingerprint.clone(),
            complete,
            writing: false,
        };
        tables::REMOTE.put(cx.txn, (self.relation, ino), &remote);
        tables::REMOTE_NAMES.put(cx.txn, (self.relation, self.dir, &entry.name), &ino);
    }

    fn make_directory(&self, cx: &mut Cx<'_>, ino: InodeId, entry: &HomeEntry, flags: u32) -> Result<()> {
        let (a, now) = (&entry.attrs, cx.rules.now);
        let access = Access {
            mode: a.mode & MODE_BITS | flags | NOT_ENUMERATED,
            uid: a.uid,
            gid: a.gid,
            parent: self.dir,
            atime: a.atime,
            btime: now,
            volume: self.access.volume,
            cookie: self.names.last_place(),
        };
        let serial = next_number(cx.txn, Sequence::DirectorySerial)?;
        let (mtime, ctime) = (a.mtime, now);
        let tally = Tally { mtime, ctime, entries: 0, subdirectories: 0, serial, next_n: 0, next_cookie: 1 };
        cx.put_access(ino, &access);
        cx.put_tally(ino, &tally);
        tables::NOT_ENUMERATED.put(cx.txn, (self.relation, ino), &Present);
        Ok(())
    }

    fn make_file(&self, cx: &mut Cx<'_>, ino: InodeId, entry: &HomeEntry, flags: u32) -> Charge {
        let (a, now) = (&entry.attrs, cx.rules.now);
        let regular = entry.kind == FileKind::Regular;
        let bytes = if regular { entry.size } else { 0 };
        let inode = Inode {
            kind: entry.kind,
            mode: a.mode & MODE_BITS | flags,
            uid: a.uid,
            gid: a.gid,
            nlink: 1,
            rdev: entry.rdev,
            size: if entry.kind == FileKind::Symlink { entry.target.len() as u64 } else { bytes },
            allocated: bytes,
            atime: a.atime,
            mtime: a.mtime,
            ctime: now,
            btime: now,
            data_version: 0,
            layout: cx.rules.layout_in(self.access.volume).filter(|_| regular).map(|p| writer::place(p, ino)),
            parent: self.dir,
            writing: Writing::default(),
            evicted: bytes,
            pinned: false,
            layers: None,
            cookie: self.names.last_place(),
        };
        cx.put_inode(ino, &inode);
        if bytes > 0 {
            tables::EVICTED.put(cx.txn, (ino, 0), &EvictedRange { to: bytes, handed: 0 });
        }
        if entry.kind == FileKind::Symlink {
            tables::DATA.put_bytes(cx.txn, ino, &entry.target);
        }
        Charge::file(&inode)
    }
}

/// Stores extended attributes and access control lists; returns the mode bits that show them.
fn put_xattrs(cx: &mut Cx<'_>, ino: InodeId, entry: &HomeEntry) -> Result<u32> {
    let (kept, flags) = xattrs_of(entry);
    kept.iter().for_each(|(name, value)| tables::XATTRS.put_bytes(cx.txn, (ino, name), value));
    Ok(flags)
}

/// The attributes to keep, and the mode bits that show them.
pub(super) fn xattrs_of(entry: &HomeEntry) -> (Vec<(Bytes, Bytes)>, u32) {
    let (mut kept, mut flags) = (Vec::new(), 0);
    for (name, value) in &entry.attrs.xattrs {
        let mut value: Bytes = value.clone();
        if &name[..] == acl::ACCESS || &name[..] == acl::DEFAULT {
            let says_more = |list: &Acl| &name[..] == acl::DEFAULT || !list.is_mode();
            // A list that is damaged at home grants no rights here.
            let Some(list) = Acl::parse(&value).ok().flatten().filter(says_more) else { continue };
            value = list.to_value().into();
            flags = HAS_ACL;
        }
        kept.push((name.clone(), value));
    }
    (kept, flags)
}
