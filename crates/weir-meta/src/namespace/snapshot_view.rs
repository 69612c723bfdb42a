//! A volume as it was when a snapshot was taken.
//!
//! Invariants: [`SnapshotView`] reads as the store did then, for all keys of the snapshot's volume; volumes
//! inside it are not shown. Nothing here makes changes. Permissions are those of that time.
use super::keeper::{Snapshots, kept_value};
use super::*;
use crate::record::{LayerRecord, Listed};
use bytes::Bytes;
use std::collections::BTreeMap;
use weir_kv::Scan;
use weir_proto::snapshot::{
    LAYERS_MAX, Layer, LayerList, LayersOf, SnapshotEntry, SnapshotGetAttr, SnapshotGetXattr,
    SnapshotListXattr, SnapshotListing, SnapshotLookedUp, SnapshotLookup, SnapshotOpen, SnapshotOpened,
    SnapshotReadDir, SnapshotXattrNames, SnapshotXattrValue,
};

/// Entries of one reply.
const ENTRIES_MAX: usize = 1024;
/// Records of one source that a scan reads before it continues with the next.
const STEP: usize = if cfg!(test) { 2 } else { 1024 };

/// A reader of one state of the store, and of the values kept since a snapshot.
pub struct SnapshotView<'a> {
    read: &'a dyn Read,
    volume: VolumeId,
    /// The snapshot and all later ones of its volume, in order.
    numbers: Vec<u32>,
}

impl Read for SnapshotView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        for number in &self.numbers {
            if let Some(value) = self.read.get(&keys::kept(*number, key))? {
                return Ok(kept_value(&value)?.map(<[u8]>::to_vec));
            }
        }
        self.read.get(key)
    }

    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        let mut from = start.to_vec();
        loop {
            let (found, next) = self.step(&from, end)?;
            for (key, value) in &found {
                if let Some(value) = value
                    && visit(key, value) == Scan::Stop
                {
                    return Ok(());
                }
            }
            match next {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }
}

/// Keys and their former values; `None`: absent then.
type Found = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

impl<'a> SnapshotView<'a> {
    pub fn new(read: &'a dyn Read, snapshots: &Snapshots, snapshot: u32) -> Result<SnapshotView<'a>> {
        let holds = |all: &Vec<keeper::Snap>| all.iter().any(|s| s.number == snapshot && !s.deleting);
        let Some((volume, all)) = snapshots.iter().find(|(_, all)| holds(all)) else {
            return Err(Error::stale(format!("snapshot {snapshot} does not exist (any more)")));
        };
        let numbers = all.iter().map(|s| s.number).filter(|n| *n >= snapshot).collect();
        Ok(SnapshotView { read, volume: *volume, numbers })
    }

    /// Some keys from `from` on in order, and where to continue.
    fn step(&self, from: &[u8], end: &[u8]) -> Result<(Found, Option<Vec<u8>>)> {
        let (mut found, mut last): (Found, Option<Vec<u8>>) = (Found::new(), None);
        let mut bad = None;
        for number in &self.numbers {
            let (start, end) = (keys::kept(*number, from), keys::kept(*number, end));
            let mut seen = 0;
            self.read.scan(&start, &end, &mut |key, value| {
                let key = keys::kept_key(key);
                match kept_value(value) {
                    Ok(value) => {
                        found.entry(key.to_vec()).or_insert_with(|| value.map(<[u8]>::to_vec));
                    }
                    Err(e) => bad = Some(e),
                }
                seen += 1;
                limit(seen, key, &mut last)
            })?;
        }
        let mut seen = 0;
        self.read.scan(from, end, &mut |key, value| {
            found.entry(key.to_vec()).or_insert_with(|| Some(value.to_vec()));
            seen += 1;
            limit(seen, key, &mut last)
        })?;
        if let Some(e) = bad {
            return Err(e);
        }
        let next = last.map(|last| [&last[..], &[0]].concat());
        if let Some(next) = &next {
            drop(found.split_off(next)); // the other sources' keys there are not known yet
        }
        Ok((found, next))
    }

    /// The volume of the snapshot.
    pub fn volume(&self) -> VolumeId {
        self.volume
    }
    fn link(&self, dir: InodeId, name: &[u8]) -> Result<Option<Link>> {
        let tally = load_tally(self, dir)?;
        let link = find_link(self, dir, name)?.filter(|link| link.cookie < tally.next_cookie);
        Ok(link.filter(|link| self.is_shown(link.ino, link.kind)))
    }
    /// Whether a snapshot shows an inode: not the topmost directory of another volume.
    pub fn is_shown(&self, ino: InodeId, kind: FileKind) -> bool {
        kind != FileKind::Directory
            || find_access(self, ino).is_ok_and(|access| access.is_some_and(|a| a.volume == self.volume))
    }
    fn attr(&self, ino: InodeId) -> Result<Attr> {
        match find_inode(self, ino)? {
            Some(inode) => Ok(inode.attr(ino)),
            None => directory(self, ino),
        }
    }
}

/// A source that has shown `STEP` keys stops, and no source counts after its last one.
fn limit(seen: usize, key: &[u8], last: &mut Option<Vec<u8>>) -> Scan {
    if seen < STEP {
        return Scan::More;
    }
    if last.as_deref().is_none_or(|last| key < last) {
        *last = Some(key.to_vec());
    }
    Scan::Stop
}

fn snapshot_view<'a>(view: &View<'a>, snapshot: u32) -> Result<SnapshotView<'a>> {
    SnapshotView::new(view.read, view.rules.snapshots, snapshot)
}

pub fn lookup(view: &mut View<'_>, r: &SnapshotLookup) -> Result<SnapshotLookedUp> {
    check_name(&r.name)?;
    let snapshot_view = snapshot_view(view, r.snapshot)?;
    require(&snapshot_view, &r.cred, &load_access(&snapshot_view, r.parent)?, r.parent, SEARCH)?;
    let link = snapshot_view.link(r.parent, &r.name)?;
    Ok(SnapshotLookedUp { attr: link.map(|link| snapshot_view.attr(link.ino)).transpose()? })
}

pub fn attr(view: &mut View<'_>, r: &SnapshotGetAttr) -> Result<Attr> {
    snapshot_view(view, r.snapshot)?.attr(r.ino)
}

pub fn list(view: &mut View<'_>, r: &SnapshotReadDir) -> Result<SnapshotListing> {
    let snapshot_view = snapshot_view(view, r.snapshot)?;
    require(&snapshot_view, &r.cred, &load_access(&snapshot_view, r.dir)?, r.dir, READ)?;
    let tally = load_tally(&snapshot_view, r.dir)?;
    let most = (r.limit as usize).clamp(1, ENTRIES_MAX);
    let (mut entries, mut end) = (Vec::new(), true);
    if r.after >= tally.next_cookie {
        return Ok(SnapshotListing { entries: Vec::new(), end });
    }
    let trash = trash::of(view.read, snapshot_view.volume)?;
    let listed = tables::LISTED.between((r.dir, r.after + 1), (r.dir, tally.next_cookie));
    listed.scan(&snapshot_view, &mut |(_, cookie), Listed { ino, kind, name }| {
        if entries.len() == most {
            end = false;
            return Scan::Stop;
        }
        if snapshot_view.is_shown(ino, kind) && trash != Some(ino) {
            entries.push((name, ino, cookie));
        }
        Scan::More
    })?;
    let shown = entries.into_iter().map(|(name, ino, cookie)| {
        let attr = snapshot_view.attr(ino)?;
        Ok(SnapshotEntry { name, cookie, attr })
    });
    Ok(SnapshotListing { entries: shown.collect::<Result<_>>()?, end })
}

pub fn get_xattr(view: &mut View<'_>, r: &SnapshotGetXattr) -> Result<SnapshotXattrValue> {
    let snapshot_view = snapshot_view(view, r.snapshot)?;
    snapshot_view.attr(r.ino)?;
    let value = tables::XATTRS.get(&snapshot_view, (r.ino, &r.name))?;
    let value = value.ok_or_else(|| {
        Error::name(NameRule::NoAttribute, format!("inode {} had no attribute {:?}", r.ino, show(&r.name)))
    })?;
    Ok(SnapshotXattrValue { bytes: Bytes::from(value) })
}

pub fn list_xattr(view: &mut View<'_>, r: &SnapshotListXattr) -> Result<SnapshotXattrNames> {
    let snapshot_view = snapshot_view(view, r.snapshot)?;
    snapshot_view.attr(r.ino)?;
    let name = |(_, name): (InodeId, &[u8])| Bytes::copy_from_slice(name);
    let names = tables::XATTRS.under(r.ino).keys(&snapshot_view, usize::MAX, name)?;
    Ok(SnapshotXattrNames { names })
}

pub fn open(cx: &mut Cx<'_>, r: &SnapshotOpen) -> Attempt<SnapshotOpened> {
    let opened = read_open(cx.read(), cx.rules, r)?;
    cx.outlive_fence(r.ino, opened.attr.layers.map_or(r.ino, |l| l.object), opened.fence)?;
    Ok(opened)
}

pub fn read_open(read: &dyn Read, rules: &Rules<'_>, r: &SnapshotOpen) -> Result<SnapshotOpened> {
    let snapshot_view = SnapshotView::new(read, rules.snapshots, r.snapshot)?;
    let inode = load_file(&snapshot_view, r.ino)?;
    let (want, verb) = if r.execute { (EXECUTE, "execute") } else { (READ, "read") };
    if inode.kind != FileKind::Symlink && !allows(&snapshot_view, &r.cred, r.ino, inode.owned(), want)? {
        return Err(Error::denied(format!("user {} may not {verb} inode {}", r.cred.uid, r.ino)));
    }
    let inline = tables::DATA.get(&snapshot_view, r.ino)?.map(Bytes::from);
    let fence = if inode.writing.dirty { writer::next_truncation(inode.writing.token_epoch) } else { 0 };
    let now = find_inode(read, r.ino)?;
    // Its leftovers are decided before the file gets another object.
    let is_left = |now: &Inode| now.object(r.ino) == inode.object(r.ino) && rules.must_recover(r.ino, now);
    let recover = now.as_ref().is_some_and(is_left);
    let is_same = |now: &Inode| (now.data_version, now.size) == (inode.data_version, inode.size);
    let unchanged =
        now.is_some_and(|now| is_same(&now) && !now.writing.dirty && !now.writing.recover && now.nlink > 0);
    let mut attr = inode.attr(r.ino);
    if !inode.may_have_cells() {
        // Nothing was written yet: the present bytes in its object came later.
        attr.layout = None;
    }
    let map_version = rules.leases.written_under;
    Ok(SnapshotOpened { attr, inline, fence, recover, unchanged, map_version })
}

/// The layers of a file, in its present or former state.
pub fn layers_of(view: &mut View<'_>, r: &LayersOf) -> Result<LayerList> {
    if r.snapshot == 0 {
        return list_layers(view.read, r.ino, r.from);
    }
    list_layers(&snapshot_view(view, r.snapshot)?, r.ino, r.from)
}

fn list_layers(read: &dyn Read, ino: InodeId, from: u64) -> Result<LayerList> {
    let object = load_file(read, ino)?.object(ino);
    let found = layers::ranges(read, ino, from, LAYERS_MAX + 1)?;
    let more = found.len() > LAYERS_MAX;
    let show =
        |(from, l): &(u64, LayerRecord)| Layer { from: *from, to: l.to, object: l.object, fence: l.fence };
    Ok(LayerList { object, layers: found.iter().take(LAYERS_MAX).map(show).collect(), more })
}
