//! Makes a clone, and enumerates its directories: names, inodes and layers from the snapshot.
use super::super::charge::Charge;
use super::super::evicted::{self, evictable};
use super::super::layers;
use super::super::objects::OBJECT_BIT;
use super::super::snapshot_view::SnapshotView;
use super::super::writer::next_truncation;
use super::super::*;
use super::{ITSELF, find};
use crate::keys::Sequence;
use crate::namespace::dir_names::DirNames;
use crate::record::{CloneRecord, EvictedRange, LayerRecord, Listed, NotEnumeratedRecord, Writing};
use crate::tables::next_number;
use bytes::Bytes;
use weir_kv::Scan;
use weir_proto::meta::Layers;
use weir_proto::volume::{Volume, VolumeClone};

/// Entries that one step creates.
const LISTED_AT_ONCE: usize = if cfg!(test) { 2 } else { 64 };

pub fn create(cx: &mut Cx<'_>, r: &VolumeClone) -> Attempt<Volume> {
    let source = volume::load_as_admin(cx.read(), &r.new.cred, r.source)?;
    let (number, snapshot) = snapshot::named(cx.read(), r.source, &r.snapshot)?;
    if snapshot.evicted > 0 {
        return Err(Error::unsupported(format!(
            "{} bytes of volume {:?} were at home only when snapshot {:?} was taken: a clone has no home. Recall them \
             (`weir relation prefetch`), and clone it then",
            snapshot.evicted, source.name, r.snapshot
        )).into());
    }
    let made = volume::change::create(cx, &r.new)?;
    let (root, clone) = (made.root, made.id);
    let (then, tally) = {
        let snapshot_view = SnapshotView::new(cx.read(), cx.rules.snapshots, number)?;
        (load_access(&snapshot_view, source.root)?, load_tally(&snapshot_view, source.root)?)
    };
    for (name, value) in xattrs_then(cx, number, source.root)? {
        tables::XATTRS.put_bytes(cx.txn, (root, &name), &value);
    }
    let access = load_access(cx.read(), root)?;
    cx.put_access(root, &Access { mode: then.mode | NOT_ENUMERATED, uid: then.uid, gid: then.gid, ..access });
    let now = load_tally(cx.read(), root)?;
    cx.put_tally(root, &Tally { mtime: tally.mtime, ..now });
    let record = CloneRecord { source: r.source, snapshot: number, own: r.own, listed: false };
    tables::CLONES.put(cx.txn, (clone, ITSELF), &record);
    let not_enumerated = NotEnumeratedRecord { source: source.root, after: 0 };
    tables::CLONE_DIRS.put(cx.txn, (clone, root), &not_enumerated);
    cx.events.snapshots = true;
    Ok(made)
}

fn xattrs_then(cx: &Cx<'_>, snapshot: u32, ino: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    xattrs_of(&SnapshotView::new(cx.read(), cx.rules.snapshots, snapshot)?, ino)
}

fn xattrs_of(snapshot_view: &SnapshotView<'_>, ino: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    tables::XATTRS.under(ino).collect(snapshot_view, usize::MAX, |(_, name), value| (name.to_vec(), value))
}

/// An entry of a directory in the snapshot.
struct Found {
    name: Bytes,
    ino: InodeId,
    cookie: u64,
    kind: FileKind,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    what: What,
}

enum What {
    Directory(Access, Tally),
    File { inode: Inode, inline: Option<Vec<u8>>, layers: Vec<(u64, LayerRecord)>, recover: bool },
}

/// The progress of a directory's enumeration.
#[derive(Default)]
pub enum Listing {
    #[default]
    All,
    Some,
    /// Up to this file: a writer of it died, and its leftovers are decided before the file is shared.
    WaitsFor(InodeId),
}

/// Enumerates a part of a directory.
pub fn list_some(cx: &mut Cx<'_>, clone: VolumeId, dir: InodeId) -> Attempt<Listing> {
    let Some(record) = find(cx.read(), clone)? else { return Ok(Listing::All) };
    let Some(not_enumerated) = tables::CLONE_DIRS.get(cx.read(), (clone, dir))? else {
        return Ok(Listing::All);
    };
    let Some(mut access) = find_access(cx.read(), dir)? else {
        tables::CLONE_DIRS.delete(cx.txn, (clone, dir));
        return Ok(Listing::All);
    };
    let (found, mut listing) = {
        let snapshot_view = SnapshotView::new(cx.read(), cx.rules.snapshots, record.snapshot)?;
        read_some(cx, &snapshot_view, not_enumerated.source, not_enumerated.after)?
    };
    cx.need(dir, Need::Change);
    cx.clear()?;
    let mut names = DirNames::load(cx.read(), dir)?;
    let (mtime, ctime) = (names.tally().mtime, names.tally().ctime);
    let mut charge = Charge::default();
    let mut after = not_enumerated.after;
    for entry in found {
        if matches!(entry.what, What::File { recover: true, .. }) {
            listing = Listing::WaitsFor(entry.ino);
            break;
        }
        after = entry.cookie;
        let added = make_one(cx, clone, &mut names, entry)?;
        charge.bytes += added.bytes;
        charge.files += added.files;
        charge.directories += added.directories;
    }
    names.set_mtime(mtime);
    names.set_ctime(ctime);
    names.store(cx);
    cx.charge(dir, charge)?;
    if matches!(listing, Listing::All) {
        access.mode &= !NOT_ENUMERATED;
        cx.put_access(dir, &access);
        tables::CLONE_DIRS.delete(cx.txn, (clone, dir));
    } else {
        tables::CLONE_DIRS.put(cx.txn, (clone, dir), &NotEnumeratedRecord { after, ..not_enumerated });
    }
    Ok(listing)
}

fn read_some(
    cx: &Cx<'_>,
    snapshot_view: &SnapshotView<'_>,
    dir: InodeId,
    after: u64,
) -> Result<(Vec<Found>, Listing)> {
    let tally = load_tally(snapshot_view, dir)?;
    let trash = trash::of(cx.read(), snapshot_view.volume())?;
    let (mut names, mut listing) = (Vec::new(), Listing::All);
    if after + 1 < tally.next_cookie {
        let left = tables::LISTED.between((dir, after + 1), (dir, tally.next_cookie));
        left.scan(snapshot_view, &mut |(_, cookie), listed| {
            if names.len() == LISTED_AT_ONCE {
                listing = Listing::Some;
                return Scan::Stop;
            }
            names.push((cookie, listed));
            Scan::More
        })?;
    }
    let mut found = Vec::new();
    for (cookie, Listed { ino, kind, name }) in names {
        if snapshot_view.is_shown(ino, kind) && trash != Some(ino) {
            let (xattrs, what) = (xattrs_of(snapshot_view, ino)?, content_of(cx, snapshot_view, ino, kind)?);
            found.push(Found { name, ino, cookie, kind, xattrs, what });
        }
    }
    Ok((found, listing))
}

fn content_of(cx: &Cx<'_>, snapshot_view: &SnapshotView<'_>, ino: InodeId, kind: FileKind) -> Result<What> {
    if kind == FileKind::Directory {
        return Ok(What::Directory(load_access(snapshot_view, ino)?, load_tally(snapshot_view, ino)?));
    }
    let inode = load_file(snapshot_view, ino)?;
    let inline = tables::DATA.get(snapshot_view, ino)?;
    let layers =
        if inode.layered() > 0 { layers::ranges(snapshot_view, ino, 0, usize::MAX)? } else { Vec::new() };
    let recover = match find_inode(cx.read(), ino)? {
        Some(now) => now.object(ino) == inode.object(ino) && cx.rules.must_recover(ino, &now),
        None => false,
    };
    Ok(What::File { inode, inline, layers, recover })
}

/// Creates one entry; returns its addition to the usage.
fn make_one(cx: &mut Cx<'_>, clone: VolumeId, names: &mut DirNames, entry: Found) -> Attempt<Charge> {
    let dir = names.dir();
    let Found { name, ino: source, kind, xattrs, what, .. } = entry;
    if let What::File { inode, .. } = &what
        && inode.nlink > 1
        && let Some(known) = known_file(cx, clone, source)?
    {
        link(cx, names, &name, known)?;
        return Ok(Charge::default());
    }
    let ino = names.next_ino(cx)?;
    let place = names.insert(cx, &name, ino, kind);
    let charge = match what {
        What::Directory(access, then) => {
            make_directory(cx, (clone, dir), (ino, source), (access, then, place))?;
            Charge { directories: 1, ..Charge::default() }
        }
        What::File { inode, inline, layers, .. } => {
            if inode.nlink > 1 {
                tables::CLONE_FILES.put(cx.txn, (clone, source), &ino);
            }
            make_file(cx, (dir, place), (ino, source), inode, inline, layers)?
        }
    };
    for (name, value) in xattrs {
        tables::XATTRS.put_bytes(cx.txn, (ino, &name), &value);
    }
    Ok(charge)
}

fn known_file(cx: &Cx<'_>, clone: VolumeId, source: InodeId) -> Result<Option<(InodeId, Inode)>> {
    let Some(ino) = tables::CLONE_FILES.get(cx.read(), (clone, source))? else { return Ok(None) };
    // A file that was removed in the clone meanwhile has no other name.
    Ok(find_inode(cx.read(), ino)?.filter(|inode| inode.nlink > 0).map(|inode| (ino, inode)))
}

fn link(
    cx: &mut Cx<'_>,
    names: &mut DirNames,
    name: &[u8],
    (ino, mut inode): (InodeId, Inode),
) -> Attempt<()> {
    cx.need(ino, Need::Change);
    cx.clear()?;
    inode.nlink += 1;
    names.insert(cx, name, ino, inode.kind);
    tables::LINKS.put(cx.txn, (ino, names.dir(), name), &Present);
    cx.put_inode(ino, &inode);
    Ok(())
}

fn make_directory(
    cx: &mut Cx<'_>,
    (clone, parent): (VolumeId, InodeId),
    (ino, source): (InodeId, InodeId),
    (access, then, cookie): (Access, Tally, u64),
) -> Result<()> {
    let mode = access.mode | NOT_ENUMERATED;
    cx.put_access(ino, &Access { mode, parent, volume: clone, cookie, ..access });
    let serial = next_number(cx.txn, Sequence::DirectorySerial)?;
    let (entries, subdirectories, next_n, next_cookie) = (0, 0, 0, 1);
    cx.put_tally(ino, &Tally { entries, subdirectories, serial, next_n, next_cookie, ..then });
    tables::CLONE_DIRS.put(cx.txn, (clone, ino), &NotEnumeratedRecord { source, after: 0 });
    Ok(())
}

fn make_file(
    cx: &mut Cx<'_>,
    (parent, cookie): (InodeId, u64),
    (ino, source): (InodeId, InodeId),
    then: Inode,
    inline: Option<Vec<u8>>,
    known: Vec<(u64, LayerRecord)>,
) -> Attempt<Charge> {
    if then.evicted > 0 {
        return Err(Error::unsupported(format!("inode {source} has bytes that are at home only")).into());
    }
    let mut inode = Inode {
        nlink: 1,
        parent,
        cookie,
        writing: Writing::default(),
        pinned: false,
        layers: None,
        ..then.clone()
    };
    cx.put_inode(ino, &inode);
    match inline {
        Some(inline) => tables::DATA.put_bytes(cx.txn, ino, &inline),
        None => {
            let bytes = share(cx, (ino, source), &then, known)?;
            if bytes > 0 {
                inode.layers = Some(Layers { object: ino, bytes });
                inode.writing.data_end = inode.size;
                cx.put_inode(ino, &inode);
            }
        }
    }
    Ok(Charge::file(&inode))
}

/// All bytes of a file are in the snapshot's objects. Returns their number.
fn share(
    cx: &mut Cx<'_>,
    (ino, source): (InodeId, InodeId),
    then: &Inode,
    known: Vec<(u64, LayerRecord)>,
) -> Attempt<u64> {
    let (mut bytes, mut elsewhere) = (0, Vec::new());
    for (from, layer) in known {
        tables::LAYERS.put(cx.txn, (ino, from), &LayerRecord { handed: 0, ..layer });
        bytes += layer.to - from;
        elsewhere.push(evicted::Found { from, range: EvictedRange { to: layer.to, handed: 0 } });
    }
    let Some(layout) = then.layout.filter(|_| then.may_have_cells()) else { return Ok(bytes) };
    let object = then.object(source);
    let fence = if then.writing.dirty { next_truncation(then.writing.token_epoch) } else { 0 };
    let (first_pg, pg_count) = (layout.first_pg, layout.pg_count);
    let mut any = false;
    for gap in evictable(&layout, then.size, (0, then.size), &elsewhere) {
        let layer = LayerRecord { to: gap.to, object, handed: 0, fence, first_pg, pg_count };
        tables::LAYERS.put(cx.txn, (ino, gap.from), &layer);
        bytes += gap.to - gap.from;
        any = true;
    }
    if any && find_inode(cx.read(), source)?.is_some_and(|now| now.object(source) == object) {
        if object.0 & OBJECT_BIT != 0 {
            tables::OBJECT_OWNERS.put(cx.txn, object, &source);
        }
        cx.outlive_fence(source, object, fence)?;
    }
    Ok(bytes)
}
