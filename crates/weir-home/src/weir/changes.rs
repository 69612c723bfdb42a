//! Changes in another Weir: entries are made, linked, renamed and removed there, and get their attributes.
use super::tree::{Place, Tree, bare, fingerprint_of};
use super::{fault, root};
use crate::decide::{self, RenameStep, Step};
use crate::{Attrs, Expect, Fault, Fingerprint, Found, HomePath, Make, Outcome};
use bytes::Bytes;
use weir_client::{NewMode, SetAttrs, SetTime, Stat};
use weir_proto::meta::{FileKind, RenameMode};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result};

/// Mode bits that a change of owner clears.
const SET_ID_BITS: u32 = 0o6000;

impl Tree {
    /// Sets the attributes that differ, times last.
    pub(super) async fn set(&self, ino: InodeId, found: &Found, wished: &Attrs) -> Result<()> {
        let (client, cred, old) = (&self.client, root(), &found.attrs);
        // In the same request, unless a new owner clears mode bits that must be set afterwards.
        let mut owners = SetAttrs::default();
        if (old.uid, old.gid) != (wished.uid, wished.gid) {
            owners = SetAttrs { uid: Some(wished.uid), gid: Some(wished.gid), ..owners };
        }
        if owners.uid.is_some() && wished.mode & SET_ID_BITS != 0 {
            client.setattr(&cred, ino, None, std::mem::take(&mut owners)).await?;
        }
        for gone in old.xattrs.iter().filter(|x| wished.xattrs.iter().all(|w| w.name != x.name)) {
            client.remove_xattr(&cred, ino, &gone.name).await?;
        }
        for wish in wished.xattrs.iter().filter(|w| !old.xattrs.contains(w)) {
            client.set_xattr(&cred, ino, &wish.name, &wish.value, false, false).await?;
        }
        let mode = (found.fingerprint.kind != FileKind::Symlink).then_some(wished.mode);
        let (atime, mtime) = (Some(SetTime::At(wished.atime)), Some(SetTime::At(wished.mtime)));
        client.setattr(&cred, ino, None, SetAttrs { mode, atime, mtime, ..owners }).await?;
        Ok(())
    }

    pub(super) async fn create(&self, place: &Place, what: &Make) -> Result<Stat> {
        let (client, cred, dir, name) = (&self.client, root(), place.dir, &place.name[..]);
        let nobody_else = NewMode::from(0o600);
        match what {
            Make::Directory => client.mkdir(&cred, dir, name, NewMode::from(0o700)).await,
            Make::File => client.mknod(&cred, dir, name, nobody_else, FileKind::Regular, 0).await,
            Make::Symlink { target } => client.symlink(&cred, dir, name, target).await,
            Make::Special { kind, rdev } => client.mknod(&cred, dir, name, nobody_else, *kind, *rdev).await,
        }
    }

    pub(super) async fn make(&self, path: &HomePath, what: &Make, attrs: &Attrs) -> Outcome<Fingerprint> {
        let failed = |e| fault("make", path, e);
        self.ids.require(path, what.kind())?;
        let attrs = self.ids.to_home(what.kind(), attrs);
        let mut place = self.new_place("make", path).await?;
        if place.found.is_none() {
            match self.create(&place, what).await {
                // A round trip there may be long: a new entry has no attributes to query, except for an
                // inherited access control list.
                Ok(stat) if !stat.attr.acl && !matches!(what, Make::Symlink { .. }) => {
                    let found = bare(&stat.attr);
                    self.set(stat.attr.ino, &found, &attrs).await.map_err(failed)?;
                    return self.fingerprint_now(path, stat.attr.ino).await;
                }
                Ok(stat) => place.found = Some(stat),
                // It appeared between look-up and action.
                Err(e) if e.kind == ErrorKind::Exists => place = self.new_place("make", path).await?,
                Err(e) => return Err(failed(e)),
            }
        }
        let Some(stat) = &place.found else { return Err(Fault::diverged(path, None, None)) };
        let found = self.stat_entry(&stat.attr).await.map_err(failed)?;
        let is_empty_dir = stat.attr.kind == FileKind::Directory
            && !path.is_root()
            && self.first_name(stat.attr.ino).await.map_err(failed)?.is_none();
        match decide::make(what, &attrs, Some(&found), is_empty_dir) {
            Step::Done => self.set(stat.attr.ino, &found, &attrs).await.map_err(failed)?,
            _ => return Err(Fault::diverged(path, None, Some(&found.fingerprint))),
        }
        self.fingerprint_now(path, stat.attr.ino).await
    }

    pub(super) async fn link(
        &self,
        existing: &HomePath,
        expect: &Expect,
        path: &HomePath,
    ) -> Outcome<Fingerprint> {
        let old = self.old_place(existing, expect).await?;
        let new = self.new_place("link", path).await?;
        match (decide::link(old.fingerprint().as_ref(), expect, new.fingerprint().as_ref()), &old.found) {
            (Step::Act, Some(stat)) => {
                let linked = self.client.link(&root(), stat.attr.ino, new.dir, &new.name).await;
                Ok(fingerprint_of(&linked.map_err(|e| fault("link", path, e))?.attr))
            }
            (Step::Done, Some(stat)) => Ok(fingerprint_of(&stat.attr)),
            _ if old.fingerprint().is_some_and(|fingerprint| expect.admits(&fingerprint)) => {
                Err(Fault::diverged(path, None, new.fingerprint().as_ref()))
            }
            _ => Err(Fault::diverged(existing, Some(expect.fingerprint()), old.fingerprint().as_ref())),
        }
    }

    pub(super) async fn remove(&self, path: &HomePath, expect: &Expect) -> Outcome<()> {
        let failed = |e| fault("remove", path, e);
        let Some(place) = self.place(path).await.map_err(failed)? else { return Ok(()) };
        let found = place.fingerprint();
        match decide::remove(found.as_ref(), expect) {
            Step::Done => return Ok(()),
            Step::Refuse => return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref())),
            Step::Act => {}
        }
        if expect.fingerprint().kind != FileKind::Directory {
            return self.client.unlink(&root(), place.dir, &place.name).await.map_err(failed);
        }
        match self.client.rmdir(&root(), place.dir, &place.name).await {
            Err(e) if e.kind == ErrorKind::Name(NameRule::NotEmpty) => {
                Err(self.not_empty(&place, path, e).await)
            }
            done => done.map_err(failed),
        }
    }

    pub(super) async fn rename(
        &self,
        from: &HomePath,
        expect: &Expect,
        to: &HomePath,
        replaces: Option<&Expect>,
    ) -> Outcome<Fingerprint> {
        let failed = |e| fault("rename to", to, e);
        let old = self.place(from).await.map_err(failed)?;
        let new = self.new_place("rename to", to).await?;
        let (at_old, at_new) = (old.as_ref().and_then(Place::fingerprint), new.fingerprint());
        let step = decide::rename(at_old.as_ref(), expect, at_new.as_ref(), replaces);
        match (step, &old) {
            (RenameStep::Move | RenameStep::Replace, Some(old)) => {
                let mode = if step == RenameStep::Move { RenameMode::NoReplace } else { RenameMode::Replace };
                let moved = self.client.rename(&root(), old.dir, &old.name, new.dir, &new.name, mode).await;
                match moved {
                    Err(e) if e.kind == ErrorKind::Name(NameRule::NotEmpty) => {
                        return Err(self.not_empty(&new, to, e).await);
                    }
                    moved => moved.map_err(failed)?,
                }
            }
            (RenameStep::DropOld, Some(old)) if expect.fingerprint().kind != FileKind::Directory => {
                self.client.unlink(&root(), old.dir, &old.name).await.map_err(failed)?;
            }
            (RenameStep::Done, _) => {}
            (RenameStep::RefuseTo, _) => {
                return Err(Fault::diverged(to, replaces.map(Expect::fingerprint), at_new.as_ref()));
            }
            _ => return Err(Fault::diverged(from, Some(expect.fingerprint()), at_old.as_ref())),
        }
        let now = self.old_place(to, expect).await?.fingerprint();
        now.ok_or_else(|| Fault::diverged(to, Some(expect.fingerprint()), None))
    }

    pub(super) async fn exchange(
        &self,
        a: &HomePath,
        expect_a: &Expect,
        b: &HomePath,
        expect_b: &Expect,
    ) -> Outcome<(Fingerprint, Fingerprint)> {
        let (at_a, at_b) = (self.old_place(a, expect_a).await?, self.old_place(b, expect_b).await?);
        let (found_a, found_b) = (at_a.fingerprint(), at_b.fingerprint());
        match decide::exchange(found_a.as_ref(), expect_a, found_b.as_ref(), expect_b) {
            Step::Act => {
                let names = (&at_a.name, &at_b.name);
                let exchanged = self
                    .client
                    .rename(&root(), at_a.dir, names.0, at_b.dir, names.1, RenameMode::Exchange)
                    .await;
                exchanged.map_err(|e| fault("exchange", a, e))?;
            }
            Step::Done => {}
            Step::Refuse => {
                let a_is_ours = found_a.as_ref().is_some_and(|found| expect_a.admits(found));
                let (path, expect, found) =
                    if a_is_ours { (b, expect_b, found_b) } else { (a, expect_a, found_a) };
                return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref()));
            }
        }
        let (now_a, now_b) = (
            self.old_place(a, expect_b).await?.fingerprint(),
            self.old_place(b, expect_a).await?.fingerprint(),
        );
        now_a.zip(now_b).ok_or_else(|| Fault::diverged(a, Some(expect_b.fingerprint()), None))
    }

    pub(super) async fn set_attrs(
        &self,
        path: &HomePath,
        expect: &Expect,
        attrs: &Attrs,
    ) -> Outcome<Fingerprint> {
        let failed = |e| fault("set the attributes of", path, e);
        let attrs = self.ids.to_home(expect.fingerprint().kind, attrs);
        let place = self.old_place(path, expect).await?;
        if let (true, Some(stat)) = (path.is_root(), &place.found) {
            return self.fingerprint_now(path, stat.attr.ino).await; // its owner was decided there
        }
        match (decide::set_attrs(place.fingerprint().as_ref(), expect, &attrs), &place.found) {
            (Step::Act | Step::Done, Some(stat)) => {
                let found = self.stat_entry(&stat.attr).await.map_err(failed)?;
                self.set(stat.attr.ino, &found, &attrs).await.map_err(failed)?;
                self.fingerprint_now(path, stat.attr.ino).await
            }
            _ => Err(Fault::diverged(path, Some(expect.fingerprint()), place.fingerprint().as_ref())),
        }
    }

    pub(super) async fn resize(&self, path: &HomePath, expect: &Expect, size: u64) -> Outcome<Fingerprint> {
        let place = self.old_place(path, expect).await?;
        match (decide::resize(place.fingerprint().as_ref(), expect, size), &place.found) {
            (Step::Act, Some(stat)) if stat.attr.kind == FileKind::Regular => {
                let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
                let resized = self.client.setattr(&root(), stat.attr.ino, None, set).await;
                Ok(fingerprint_of(&resized.map_err(|e| fault("resize", path, e))?.attr))
            }
            (Step::Done, Some(stat)) => Ok(fingerprint_of(&stat.attr)),
            _ => Err(Fault::diverged(path, Some(expect.fingerprint()), place.fingerprint().as_ref())),
        }
    }

    async fn first_name(&self, dir: InodeId) -> Result<Option<Bytes>> {
        let listed = self.client.readdir(&root(), dir, 0, 1, false).await?;
        Ok(listed.entries.into_iter().next().map(|entry| entry.name))
    }

    /// Names one of the entries in the way.
    async fn not_empty(&self, place: &Place, path: &HomePath, e: Error) -> Fault {
        let dir = place.found.as_ref().map_or(place.dir, |stat| stat.attr.ino);
        let name = self.first_name(dir).await.ok().flatten();
        let Some(inside) = name.and_then(|name| path.join(&name).ok()) else {
            return fault("remove", path, e);
        };
        let found = self.place(&inside).await.ok().flatten().and_then(|place| place.fingerprint());
        Fault::diverged(&inside, None, found.as_ref())
    }
}
