//! A volume that mirrors a home which other systems write: its content is shown here, and is read-only here.
//!
//! Invariants: a file that changed at home is another file here, all of whose bytes are offline; a program
//! that has the old one open reads its old content, or an error, and never a mix. A report covers the whole
//! of a range of names, so an entry that exists here and was not reported is gone at home, and repeating a
//! report changes nothing. Names are removed at once; the content of a removed directory is removed in small
//! steps afterwards, and is charged to the topmost directory until then.
//!
//! Knows nothing of which mover reads home, and when.
use super::charge::Charge;
use super::dir_names::DirNames;
use super::import::{Into, xattrs_of};
use super::*;
use crate::relation::record::{DoomedRecord, MirroredRecord, RelationRecord, RemoteEntry};
use crate::relation::{store, tree};
use bytes::Bytes;
use weir_kv::Scan;
use weir_proto::relation::{HOME_ENTRIES_MAX, HomeEntry, RelationId, ReportRelisting, What};

/// Names gone at home that one transaction removes; the others when the directory is read next, at once.
const GONE_MAX: usize = 512;

/// All names of a directory are known: if its relation mirrors it is read again from now on.
pub fn begin(cx: &mut Cx<'_>, relation: RelationId, dir: InodeId) -> Result<()> {
    if store::find_relation(cx.read(), relation)?.is_some_and(|record| record.mirrors()) {
        let now = MirroredRecord { at: cx.rules.now, more: false };
        tables::MIRRORED.put(cx.txn, (relation, dir), &now);
    }
    Ok(())
}

/// The present entries of a directory at home, for a range of names.
pub fn report(cx: &mut Cx<'_>, r: &ReportRelisting) -> Attempt<()> {
    check(r)?;
    let Some(record) = store::find_relation(cx.read(), r.relation)?.filter(RelationRecord::mirrors) else {
        return Ok(());
    };
    let before = tables::MIRRORED.get(cx.read(), (r.relation, r.dir))?;
    let (Some(before), Some(access)) = (before, find_access(cx.read(), r.dir)?) else {
        return Ok(()); // removed meanwhile
    };
    believe(cx, r, &record)?;
    let (known, more) = known_names(cx.read(), r)?;
    let steps = compare(cx, r, &known, more)?;
    if !steps.is_empty() {
        cx.need(r.dir, Need::Change);
        steps.iter().filter_map(Step::touches).for_each(|ino| cx.need(ino, Need::Change));
        cx.clear()?;
        carry_out(cx, r, &access, &steps)?;
    }
    let more = before.more || more;
    let after = match (r.upto.is_none(), more) {
        (true, true) => MirroredRecord { at: Time { nanos: 0 }, more: false },
        (true, false) => MirroredRecord { at: cx.rules.now, more: false },
        (false, _) => MirroredRecord { more, ..before },
    };
    tables::MIRRORED.put(cx.txn, (r.relation, r.dir), &after);
    Ok(())
}

fn check(r: &ReportRelisting) -> Result<()> {
    if r.entries.len() > HOME_ENTRIES_MAX {
        return Err(Error::invalid(format!("{} entries: at most {HOME_ENTRIES_MAX}", r.entries.len())));
    }
    r.entries.iter().try_for_each(|entry| check_name(&entry.name))?;
    let is_ordered = r.entries.is_sorted_by(|a, b| a.name < b.name);
    let is_behind = r.entries.first().is_none_or(|first| r.after < first.name);
    let is_before = match (&r.upto, r.entries.last()) {
        (Some(upto), Some(last)) => last.name <= *upto,
        (Some(upto), None) => r.after < *upto,
        (None, _) => true,
    };
    match is_ordered && is_behind && is_before {
        true => Ok(()),
        false => Err(Error::invalid(format!("the names of directory {} arrived out of order", r.dir))),
    }
}

/// A home that shows nothing at all is probably not mounted.
fn believe(cx: &Cx<'_>, r: &ReportRelisting, record: &RelationRecord) -> Result<()> {
    let is_all = r.after.is_empty() && r.upto.is_none();
    if !is_all || !r.entries.is_empty() || volume::load(cx.read(), record.volume)?.root != r.dir {
        return Ok(());
    }
    match load_tally(cx.read(), r.dir)?.entries {
        0 => Ok(()),
        n => Err(Error::invalid(format!(
            "home is empty where {n} entries were: probably it is not mounted, so what is known of it stays"
        ))),
    }
}

type Known = Vec<(Bytes, Link)>;

/// The names of the range that are known here; true: there are more of them than were read.
fn known_names(read: &dyn Read, r: &ReportRelisting) -> Result<(Known, bool)> {
    let limit = r.entries.len() + GONE_MAX;
    let (mut known, mut more) = (Known::new(), false);
    tables::NAMES.from(r.dir, (r.dir, &r.after)).scan(read, &mut |(_, name), link| {
        if name == r.after {
            return Scan::More;
        }
        let is_in_range = r.upto.as_ref().is_none_or(|upto| name <= upto);
        more = is_in_range && known.len() == limit;
        if more || !is_in_range {
            return Scan::Stop;
        }
        known.push((Bytes::copy_from_slice(name), link));
        Scan::More
    })?;
    Ok((known, more))
}

/// A step to make here.
enum Step<'a> {
    Gone(&'a Bytes, Link),
    New(&'a HomeEntry),
    /// An inode that is here already has other attributes.
    Attributes(&'a HomeEntry, InodeId),
    /// Home has another fingerprint for it, and it is the same.
    Fingerprint(&'a HomeEntry, InodeId),
}

impl Step<'_> {
    fn touches(&self) -> Option<InodeId> {
        match self {
            Step::Gone(_, link) => Some(link.ino),
            Step::Attributes(_, ino) => Some(*ino),
            Step::New(_) | Step::Fingerprint(..) => None,
        }
    }
}

fn compare<'a>(cx: &Cx<'_>, r: &'a ReportRelisting, known: &'a Known, more: bool) -> Result<Vec<Step<'a>>> {
    let mut steps = Vec::new();
    // Entries after the names that were read are compared next time.
    let last = known.last().filter(|_| more).map(|(name, _)| name);
    let reported = r.entries.iter().filter(|entry| last.is_none_or(|last| entry.name <= *last));
    let mut gone = known.iter().peekable();
    for entry in reported {
        while let Some((name, link)) = gone.next_if(|(name, _)| *name < entry.name) {
            steps.push(Step::Gone(name, *link));
        }
        match gone.next_if(|(name, _)| *name == entry.name) {
            Some((name, link)) => compare_one(cx, r.relation, entry, (name, *link), &mut steps)?,
            None => steps.push(Step::New(entry)),
        }
    }
    steps.extend(gone.map(|(name, link)| Step::Gone(name, *link)));
    Ok(steps)
}

fn compare_one<'a>(
    cx: &Cx<'_>,
    relation: RelationId,
    entry: &'a HomeEntry,
    (name, link): (&'a Bytes, Link),
    steps: &mut Vec<Step<'a>>,
) -> Result<()> {
    let is_directory = entry.kind == FileKind::Directory;
    let remote = tree::find_remote(cx.read(), relation, link.ino)?.filter(|_| link.kind == entry.kind);
    let is_same =
        remote.as_ref().is_some_and(|remote| is_directory || remote.fingerprint == entry.fingerprint);
    if !is_same {
        steps.extend([Step::Gone(name, link), Step::New(entry)]);
        return Ok(());
    }
    if remote.is_some_and(|remote| remote.fingerprint != entry.fingerprint) {
        steps.push(Step::Fingerprint(entry, link.ino));
    }
    let Some(present) = tree::present(cx.read(), link.ino)? else { return Ok(()) };
    let (a, b) = (&present.attrs, &entry.attrs);
    let mut xattrs = xattrs_of(entry).0;
    xattrs.sort();
    let is_same = (a.mode, a.uid, a.gid, a.mtime) == (b.mode & MODE_BITS, b.uid, b.gid, b.mtime);
    if !is_same || a.xattrs != xattrs {
        steps.push(Step::Attributes(entry, link.ino));
    }
    Ok(())
}

fn carry_out(cx: &mut Cx<'_>, r: &ReportRelisting, access: &Access, steps: &[Step<'_>]) -> Attempt<()> {
    let mtime = load_tally(cx.read(), r.dir)?.mtime;
    for step in steps {
        match step {
            Step::Gone(name, link) if link.kind == FileKind::Directory => detach(cx, r, name, link)?,
            Step::Gone(name, link) => {
                cx.remove_file(r.dir, name, link)?;
                forget_name(cx, r.relation, r.dir, name, link.ino)?;
            }
            Step::New(_) => {}
            Step::Attributes(entry, ino) => set_attributes(cx, entry, *ino)?,
            Step::Fingerprint(entry, ino) => {
                if let Some(remote) = tree::find_remote(cx.read(), r.relation, *ino)? {
                    let remote = RemoteEntry { fingerprint: entry.fingerprint.clone(), ..remote };
                    tables::REMOTE.put(cx.txn, (r.relation, *ino), &remote);
                }
            }
        }
    }
    let mut names = DirNames::load(cx.read(), r.dir)?;
    let mut charge = Charge::default();
    let mut into = Into { relation: r.relation, dir: r.dir, access, names: &mut names, again: true };
    for step in steps {
        if let Step::New(entry) = step {
            charge = charge.and(into.take(cx, entry)?);
        }
    }
    // Its own time is reported with the parent directory.
    names.set_mtime(mtime);
    names.store(cx);
    cx.charge(r.dir, charge)?;
    for step in steps {
        if let Step::New(entry) = step
            && let Some(link) = find_link(cx.read(), r.dir, &entry.name)?
        {
            let (ino, kind, parent, name) = (link.ino, link.kind, r.dir, entry.name.clone());
            cx.log(r.dir, || What::Made { ino, kind, parent, name })?;
        }
    }
    Ok(())
}

fn set_attributes(cx: &mut Cx<'_>, entry: &HomeEntry, ino: InodeId) -> Result<()> {
    let (a, (xattrs, flags)) = (&entry.attrs, xattrs_of(entry));
    tables::XATTRS.under(ino).delete_all(cx.txn)?;
    xattrs.iter().for_each(|(name, value)| tables::XATTRS.put_bytes(cx.txn, (ino, name), value));
    let mode = a.mode & MODE_BITS | flags;
    if let Some(mut inode) = find_inode(cx.read(), ino)? {
        (inode.mode, inode.uid, inode.gid, inode.mtime) = (mode, a.uid, a.gid, a.mtime);
        inode.ctime = cx.rules.after(inode.ctime);
        cx.put_inode(ino, &inode);
    } else {
        let (mut access, mut tally) = (load_access(cx.read(), ino)?, load_tally(cx.read(), ino)?);
        (access.mode, access.uid, access.gid) = (mode | access.mode & NOT_ENUMERATED, a.uid, a.gid);
        (tally.mtime, tally.ctime) = (a.mtime, cx.rules.after(tally.ctime));
        cx.put_access(ino, &access);
        cx.put_tally(ino, &tally);
    }
    cx.log_of(ino, || What::Attributes { ino })
}

/// Drops the records of a name at home, and of the inode with its last name: they are no longer found there.
fn forget_name(cx: &mut Cx<'_>, relation: RelationId, dir: InodeId, name: &[u8], ino: InodeId) -> Result<()> {
    tables::REMOTE_NAMES.delete(cx.txn, (relation, dir, name));
    let Some(mut remote) = tree::find_remote(cx.read(), relation, ino)? else { return Ok(()) };
    remote.places.retain(|place| (place.dir, &place.name[..]) != (dir, name));
    if !remote.places.is_empty() {
        tables::REMOTE.put(cx.txn, (relation, ino), &remote);
        return Ok(());
    }
    tables::REMOTE.delete(cx.txn, (relation, ino));
    tables::CONFLICTS.delete(cx.txn, (relation, ino));
    tables::NOT_ENUMERATED.delete(cx.txn, (relation, ino));
    tables::MIRRORED.delete(cx.txn, (relation, ino));
    store::trim_receipts(cx.txn, relation, ino, 0)
}

/// A directory loses its name; its content is removed afterwards. Until then it is charged to the topmost
/// one: its parent may be removed first.
fn detach(cx: &mut Cx<'_>, r: &ReportRelisting, name: &[u8], link: &Link) -> Result<()> {
    let mut names = DirNames::load(cx.read(), r.dir)?;
    names.remove(cx, name, link);
    names.store(cx);
    let access = load_access(cx.read(), link.ino)?;
    let all = Charge::directory(&super::usage_of(cx.read(), link.ino)?);
    let top = volume::load(cx.read(), access.volume)?.root;
    cx.charge(r.dir, all.back())?;
    cx.charge(top, all)?;
    cx.put_access(link.ino, &Access { parent: top, ..access });
    forget_name(cx, r.relation, r.dir, name, link.ino)?;
    let number = last_doomed(cx.read())?.map_or(0, |number| number + 1);
    let doomed = DoomedRecord { relation: r.relation, dir: link.ino };
    tables::DOOMED.put(cx.txn, number, &doomed);
    cx.events.doomed = true;
    let (ino, kind, parent, name) = (link.ino, link.kind, r.dir, Bytes::copy_from_slice(name));
    cx.log(r.dir, || What::Removed { ino, kind, parent, name, last: true })
}

fn doomed(read: &dyn Read) -> Result<Vec<(u64, DoomedRecord)>> {
    tables::DOOMED.all().collect(read, usize::MAX, |number, record| (number, record))
}
fn last_doomed(read: &dyn Read) -> Result<Option<u64>> {
    Ok(doomed(read)?.last().map(|(number, _)| *number))
}

/// Removes a few names of directories that are gone at home, deepest first. False: there are none.
pub fn remove_some(cx: &mut Cx<'_>) -> Attempt<bool> {
    let Some((number, record)) = doomed(cx.read())?.into_iter().next() else { return Ok(false) };
    let DoomedRecord { relation, dir: top } = record;
    let Some(access) = find_access(cx.read(), top)? else {
        tables::DOOMED.delete(cx.txn, number);
        return Ok(true);
    };
    let of = volume::volume_of(cx.read(), top)?;
    let gone = move |cx: &mut Cx<'_>, dir, name: &[u8], ino| forget_name(cx, relation, dir, name, ino);
    if !remove_tree::remove_below(cx, of, top, &gone)? {
        return Ok(true);
    }
    cx.need(top, Need::Change);
    cx.clear()?;
    cx.destroy_directory(access.parent, top)?;
    tables::DOOMED.delete(cx.txn, number);
    Ok(true)
}
