//! Changes of names and attributes in a home directory, as blocking calls: look up, decide (`decide.rs`),
//! act.
//!
//! Another client may change home in the microseconds between look-up and action; changes that must replace
//! nothing use the kernel's flags (`O_EXCL`, `RENAME_NOREPLACE`), so even then a make or a rename loses no
//! data.
use super::{
    directory::Directory,
    fault,
    place::{Place, device_of, fingerprint_of, statx},
};
use crate::{
    Attrs, Expect, Fault, Fingerprint, Found, HomePath, ListEntry, Listing, Make, Outcome, RESERVED,
    decide::{self, RenameStep, Step},
};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};
use std::collections::BTreeSet;
use weir_proto::meta::FileKind;

impl Directory {
    pub(super) fn make(&self, path: &HomePath, what: &Make, attrs: &Attrs) -> Outcome<Fingerprint> {
        self.ids().require(path, what.kind())?;
        let root = self.root()?;
        let attrs = self.ids().to_home(what.kind(), attrs);
        let failed = |e| fault("make", path, e);
        if path.is_root() {
            return Err(failed(Errno::EXIST));
        }
        let place = root.place(path).map_err(failed)?;
        let mut found = place.stat_entry(&root.keeps).map_err(failed)?;
        // It may appear between look-up and action: then try once more.
        if found.is_none() {
            match create(&place, what) {
                Ok(()) | Err(Errno::EXIST) => found = place.stat_entry(&root.keeps).map_err(failed)?,
                Err(e) => return Err(failed(e)),
            }
        }
        let is_empty_dir = match (&found, what) {
            (Some(there), Make::Directory) if there.fingerprint.kind == FileKind::Directory => {
                first_name(&place).map_err(failed)?.is_none()
            }
            _ => false,
        };
        match (decide::make(what, &attrs, found.as_ref(), is_empty_dir), found) {
            (Step::Done, Some(there)) => place.set(&there, &attrs, &root.keeps).map_err(failed)?,
            (_, found) => {
                return Err(Fault::diverged(path, None, found.as_ref().map(|found| &found.fingerprint)));
            }
        }
        self.touch(path);
        self.touch_parent(path);
        fingerprint_now(&place, path)
    }

    pub(super) fn link(&self, existing: &HomePath, expect: &Expect, path: &HomePath) -> Outcome<Fingerprint> {
        let root = self.root()?;
        let failed = |e| fault("link", path, e);
        let from = root.place_of(existing, expect)?;
        let to = root.place(path).map_err(failed)?;
        let (found, at_new) = (from.fingerprint().map_err(failed)?, to.fingerprint().map_err(failed)?);
        match decide::link(found.as_ref(), expect, at_new.as_ref()) {
            Step::Done => {}
            Step::Act => {
                rustix::fs::linkat(&from.dir, &from.name[..], &to.dir, &to.name[..], AtFlags::empty())
                    .map_err(failed)?
            }
            Step::Refuse if at_new.is_some() && found.as_ref().is_some_and(|found| expect.admits(found)) => {
                return Err(Fault::diverged(path, None, at_new.as_ref()));
            }
            Step::Refuse => {
                return Err(Fault::diverged(existing, Some(expect.fingerprint()), found.as_ref()));
            }
        }
        self.touch_parent(path);
        fingerprint_now(&to, path)
    }

    pub(super) fn remove(&self, path: &HomePath, expect: &Expect) -> Outcome<()> {
        let root = self.root()?;
        let failed = |e| fault("remove", path, e);
        if path.is_root() {
            return Err(failed(Errno::INVAL));
        }
        let place = match root.place(path) {
            Err(Errno::NOENT) => return Ok(()), // with its directory
            place => place.map_err(failed)?,
        };
        let found = place.fingerprint().map_err(failed)?;
        match decide::remove(found.as_ref(), expect) {
            Step::Done => {}
            Step::Refuse => return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref())),
            Step::Act if expect.fingerprint().kind == FileKind::Directory => {
                match rustix::fs::unlinkat(&place.dir, &place.name[..], AtFlags::REMOVEDIR) {
                    Err(Errno::NOTEMPTY | Errno::EXIST) => return Err(not_empty(&place, path)),
                    done => done.map_err(failed)?,
                }
            }
            Step::Act => {
                rustix::fs::unlinkat(&place.dir, &place.name[..], AtFlags::empty()).map_err(failed)?
            }
        }
        self.touch_parent(path);
        Ok(())
    }

    pub(super) fn rename(
        &self,
        from: &HomePath,
        expect: &Expect,
        to: &HomePath,
        replaces: Option<&Expect>,
    ) -> Outcome<Fingerprint> {
        let root = self.root()?;
        let failed = |e| fault("rename to", to, e);
        let old = match root.place(from) {
            Err(Errno::NOENT) => None,
            place => Some(place.map_err(|e| fault("rename", from, e))?),
        };
        let new = root.place(to).map_err(failed)?;
        let at_old = old.as_ref().map(Place::fingerprint).transpose().map_err(failed)?.flatten();
        let at_new = new.fingerprint().map_err(failed)?;
        match (decide::rename(at_old.as_ref(), expect, at_new.as_ref(), replaces), &old) {
            (RenameStep::Move, Some(old)) => move_over_nothing(old, &new).map_err(failed)?,
            (RenameStep::Replace, Some(old)) => {
                match rustix::fs::renameat(&old.dir, &old.name[..], &new.dir, &new.name[..]) {
                    Err(Errno::NOTEMPTY | Errno::EXIST) => return Err(not_empty(&new, to)),
                    done => done.map_err(failed)?,
                }
            }
            (RenameStep::DropOld, Some(old)) if expect.fingerprint().kind != FileKind::Directory => {
                rustix::fs::unlinkat(&old.dir, &old.name[..], AtFlags::empty()).map_err(failed)?;
            }
            (RenameStep::Done, _) => {}
            (RenameStep::RefuseTo, _) => {
                return Err(Fault::diverged(to, replaces.map(Expect::fingerprint), at_new.as_ref()));
            }
            _ => return Err(Fault::diverged(from, Some(expect.fingerprint()), at_old.as_ref())),
        }
        self.touch_parent(from);
        self.touch_parent(to);
        fingerprint_now(&new, to)
    }

    pub(super) fn exchange(
        &self,
        a: &HomePath,
        expect_a: &Expect,
        b: &HomePath,
        expect_b: &Expect,
    ) -> Outcome<(Fingerprint, Fingerprint)> {
        let root = self.root()?;
        let failed = |e| fault("exchange", a, e);
        let (at_a, at_b) = (root.place_of(a, expect_a)?, root.place_of(b, expect_b)?);
        let fingerprints = |p: &Place| p.fingerprint().map_err(failed);
        let (found_a, found_b) = (fingerprints(&at_a)?, fingerprints(&at_b)?);
        match decide::exchange(found_a.as_ref(), expect_a, found_b.as_ref(), expect_b) {
            Step::Done => {}
            Step::Act => {
                let (from, to) = (&at_a, &at_b);
                let names = (&from.name[..], &to.name[..]);
                match rustix::fs::renameat_with(&from.dir, names.0, &to.dir, names.1, RenameFlags::EXCHANGE) {
                    Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                        in_three_steps(&at_a, expect_a, &at_b)?
                    }
                    done => done.map_err(failed)?,
                }
            }
            Step::Refuse if is_between(&at_a, expect_a).map_err(failed)? => {
                in_three_steps(&at_a, expect_a, &at_b)?
            }
            Step::Refuse => {
                let a_is_ours = found_a.as_ref().is_some_and(|found| expect_a.admits(found));
                let (path, expect, found) =
                    if a_is_ours { (b, expect_b, found_b) } else { (a, expect_a, found_a) };
                return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref()));
            }
        }
        self.touch_parent(a);
        self.touch_parent(b);
        Ok((fingerprint_now(&at_a, a)?, fingerprint_now(&at_b, b)?))
    }

    pub(super) fn set_attrs(&self, path: &HomePath, expect: &Expect, attrs: &Attrs) -> Outcome<Fingerprint> {
        let root = self.root()?;
        let attrs = self.ids().to_home(expect.fingerprint().kind, attrs);
        let failed = |e| fault("set the attributes of", path, e);
        let place = root.place_of(path, expect)?;
        if path.is_root() {
            return fingerprint_now(&place, path); // its owner and permissions were decided at home
        }
        let found = place.stat_entry(&root.keeps).map_err(failed)?;
        let fingerprint = found.as_ref().map(|found| &found.fingerprint);
        match (decide::set_attrs(fingerprint, expect, &attrs), &found) {
            (Step::Act | Step::Done, Some(found)) => place.set(found, &attrs, &root.keeps).map_err(failed)?,
            _ => return Err(Fault::diverged(path, Some(expect.fingerprint()), fingerprint)),
        }
        self.touch(path);
        fingerprint_now(&place, path)
    }

    pub(super) fn resize(&self, path: &HomePath, expect: &Expect, size: u64) -> Outcome<Fingerprint> {
        let root = self.root()?;
        let failed = |e| fault("resize", path, e);
        let place = root.place_of(path, expect)?;
        let found = place.fingerprint().map_err(failed)?;
        match decide::resize(found.as_ref(), expect, size) {
            Step::Done => {}
            Step::Act if expect.fingerprint().kind == FileKind::Regular => {
                let file = place.open(OFlags::WRONLY).map_err(failed)?;
                rustix::fs::ftruncate(&file, size).map_err(failed)?;
            }
            _ => return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref())),
        }
        self.touch(path);
        fingerprint_now(&place, path)
    }

    pub(super) fn stat(&self, path: &HomePath) -> Outcome<Option<Found>> {
        let root = self.root()?;
        let failed = |e| fault("stat", path, e);
        let found = match root.place(path) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => None,
            place => place.and_then(|place| place.stat_entry(&root.keeps)).map_err(failed)?,
        };
        Ok(found.map(|found| self.to_here(found)))
    }

    /// A directory of any size is read once per page, and only the page is kept in memory.
    pub(super) fn list(&self, dir: &HomePath, after: Option<&[u8]>, limit: usize) -> Outcome<Listing> {
        let root = self.root()?;
        let failed = |e| fault("list", dir, e);
        let fd = root.dir(dir.names()).map_err(failed)?;
        let listed =
            Place { dir: rustix::io::fcntl_dupfd_cloexec(&fd, 0).map_err(failed)?, name: b".".to_vec() };
        let listed = listed.open(OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
        let mut page: BTreeSet<Vec<u8>> = BTreeSet::new();
        let mut end = true;
        for entry in Dir::new(listed).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes();
            if name == b"."
                || name == b".."
                || name.starts_with(RESERVED)
                || after.is_some_and(|after| name <= after)
            {
                continue;
            }
            let is_full = page.len() >= limit.max(1);
            if is_full && page.last().is_some_and(|last| name > &last[..]) {
                end = false;
                continue;
            }
            page.insert(name.to_vec());
            if page.len() > limit.max(1) {
                page.pop_last();
                end = false;
            }
        }
        let mut entries = Vec::with_capacity(page.len());
        for name in page {
            let place = Place { dir: rustix::io::fcntl_dupfd_cloexec(&fd, 0).map_err(failed)?, name };
            // Gone since it was read: treated as absent.
            if let Some(found) = place.stat_entry(&root.keeps).map_err(failed)? {
                entries.push(ListEntry { name: place.name.into(), found: self.to_here(found) });
            }
        }
        Ok(Listing { entries, end })
    }
}

fn create(place: &Place, what: &Make) -> rustix::io::Result<()> {
    let (dir, name) = (&place.dir, &place.name[..]);
    let nobody_else = Mode::RUSR | Mode::WUSR;
    match what {
        Make::Directory => rustix::fs::mkdirat(dir, name, Mode::RWXU),
        Make::File => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(dir, name, flags, nobody_else).map(drop)
        }
        Make::Symlink { target } => rustix::fs::symlinkat(&target[..], dir, name),
        Make::Special { kind, rdev } => {
            let kind = match kind {
                FileKind::Fifo => FileType::Fifo,
                FileKind::Socket => FileType::Socket,
                FileKind::CharDevice => FileType::CharacterDevice,
                FileKind::BlockDevice => FileType::BlockDevice,
                FileKind::Regular | FileKind::Directory | FileKind::Symlink => return Err(Errno::INVAL),
            };
            rustix::fs::mknodat(dir, name, kind, nobody_else, device_of(*rdev))
        }
    }
}

fn move_over_nothing(old: &Place, new: &Place) -> rustix::io::Result<()> {
    let names = (&old.name[..], &new.name[..]);
    match rustix::fs::renameat_with(&old.dir, names.0, &new.dir, names.1, RenameFlags::NOREPLACE) {
        // NFS does not support this flag; the look-up has to do.
        Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(&old.dir, names.0, &new.dir, names.1),
        done => done,
    }
}

/// The temporary name of `a` while `b` is renamed to `a`, on file systems without an atomic exchange.
fn waiting_place(a: &Place, expect_a: &Expect) -> rustix::io::Result<Place> {
    let mut name = [RESERVED, b"-exchange-"].concat();
    name.extend(expect_a.fingerprint().id.iter().flat_map(|b| format!("{b:02x}").into_bytes()));
    Ok(Place { dir: rustix::io::fcntl_dupfd_cloexec(&a.dir, 0)?, name })
}

/// Whether an exchange in three steps was interrupted.
fn is_between(a: &Place, expect_a: &Expect) -> rustix::io::Result<bool> {
    let waiting = waiting_place(a, expect_a)?.fingerprint()?;
    Ok(waiting.is_some_and(|found| expect_a.admits(&found)))
}

/// Makes each step that is not done yet: the temporary name shows how far an earlier try got.
fn in_three_steps(a: &Place, expect_a: &Expect, b: &Place) -> Outcome<()> {
    let steps = || {
        let waiting = waiting_place(a, expect_a)?;
        if waiting.fingerprint()?.is_none() {
            move_over_nothing(a, &waiting)?;
        }
        if a.fingerprint()?.is_none() {
            move_over_nothing(b, a)?;
        }
        move_over_nothing(&waiting, b)
    };
    steps().map_err(|e| fault("exchange", &HomePath::root(), e))
}

fn first_name(place: &Place) -> rustix::io::Result<Option<Vec<u8>>> {
    let dir = place.open(OFlags::RDONLY | OFlags::DIRECTORY)?;
    for entry in Dir::new(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            return Ok(Some(name.to_vec()));
        }
    }
    Ok(None)
}

/// Names one of the entries in the way.
fn not_empty(place: &Place, path: &HomePath) -> Fault {
    let first_inside = || {
        let name = first_name(place)?.ok_or(Errno::NOTEMPTY)?;
        let inside = [&place.name[..], b"/", &name[..]].concat();
        Ok((name, fingerprint_of(&statx(&place.dir, &inside)?)))
    };
    match first_inside() {
        Ok((name, fingerprint)) => path.join(&name).map_or_else(
            |_| fault("remove", path, Errno::NOTEMPTY), // a mark of ours
            |inside| Fault::diverged(&inside, None, fingerprint.as_ref()),
        ),
        Err(e) => fault("remove", path, e),
    }
}

fn fingerprint_now(place: &Place, path: &HomePath) -> Outcome<Fingerprint> {
    let fingerprint = place.fingerprint().map_err(|e| fault("stat", path, e))?;
    fingerprint.ok_or_else(|| fault("stat", path, Errno::NOENT))
}
