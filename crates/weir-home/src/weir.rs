//! `weir://…`: a home in another Weir, by its own client.
//!
//! Paths are resolved from a directory there; its answers are durable there. The client ends each of its
//! calls by its patience; a call of ours is a few of them. Each call runs to its end in a task of its own,
//! even if its caller is dropped.
use crate::{
    Attrs, Expect, Fault, FaultKind, Fingerprint, Found, Home, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, IdMap, LaneLimits, ListEntry, Listing, Make, Outcome, RESERVED, Traits, Xattr,
    decide::{self, RenameStep, Step},
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::{Semaphore, oneshot};
use weir_client::{Allocate, Client, Handle, NewMode, OpenMode, SetAttrs, SetTime, Stat};
use weir_env::{BoxFuture, Env};
use weir_proto::{
    Error, ErrorKind, InodeId, NameRule, Result,
    meta::{Attr, Cred, FileKind, RenameMode, Time},
};

/// Entries per request.
const LIST_MAX: u32 = 1024;
const MARK_BYTES_MAX: usize = 4096;
/// Mode bits that a change of owner clears.
const SET_ID_BITS: u32 = 0o6000;

/// A directory of another Weir, and its relation.
#[derive(Clone)]
pub struct WeirHomeConfig {
    /// For messages.
    pub url: String,
    /// Connected to the other cluster; its patience bounds each call.
    pub client: Client,
    /// Home's root, as a path in the namespace there.
    pub base: HomePath,
    /// Names the relation, one line; the mark must have the same name.
    pub relation: String,
    /// The relation begins: write the mark if there is none.
    pub is_new: bool,
    /// Nothing is changed there: no mark is written or required.
    pub only_reads: bool,
    pub ids: IdMap,
    /// `threads_max`: calls in flight.
    pub limits: LaneLimits,
}

/// A home in another Weir.
pub struct WeirHome {
    calls: Calls,
    inner: Arc<Inner>,
}

/// Runs calls to their end, this number in parallel.
#[derive(Clone)]
struct Calls {
    env: Env,
    deadline: std::time::Duration,
    at_once: usize,
    room: Arc<Semaphore>,
}

struct Inner {
    url: String,
    client: Client,
    base: InodeId,
    ids: IdMap,
    env: Env,
}

/// The meaning of an error of the other Weir for the mover, and a hint for the user.
pub fn map_kind(kind: ErrorKind) -> (FaultKind, &'static str) {
    use FaultKind::*;
    let strange = (Diverged, "the home was changed by others: weir relation resolve decides which side wins");
    let never = (Broken, "the home cannot store this; rename the file or exclude it");
    match kind {
        ErrorKind::NoSpace | ErrorKind::OverQuota => (Full, "free space at home, or raise the quota there"),
        ErrorKind::Denied | ErrorKind::Name(NameRule::NotOwner) => (Denied, "the mover must be root at home"),
        ErrorKind::NotFound | ErrorKind::Exists => strange,
        ErrorKind::Stale | ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Io => {
            (Unreachable, "it is tried again; look after the cluster of home if it stays so")
        }
        ErrorKind::Damaged => (Broken, "home has lost it: look after the targets of the cluster of home"),
        ErrorKind::Invalid | ErrorKind::Unsupported => never,
        ErrorKind::Name(rule) => match rule {
            NameRule::NotDirectory | NameRule::IsDirectory | NameRule::NotEmpty | NameRule::Loop => strange,
            NameRule::Busy => (Unreachable, "it is tried again"),
            _ => never,
        },
    }
}

fn fault(doing: &str, path: &HomePath, e: Error) -> Fault {
    let (kind, remedy) = map_kind(e.kind);
    let context = format!("{doing} {path} at home: {}: {remedy}", e.context);
    Fault::new(kind, path, Error { kind: e.kind, context })
}

/// Root may set all names and data of home.
pub(crate) fn root() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![0] }
}

fn fingerprint_of(attr: &Attr) -> Fingerprint {
    let (size, mtime) = match attr.kind {
        FileKind::Regular | FileKind::Symlink => (attr.size, attr.mtime),
        _ => (0, Time { nanos: 0 }),
    };
    let id = Bytes::copy_from_slice(&attr.ino.0.to_le_bytes()); // never reused
    Fingerprint { kind: attr.kind, id, version: Bytes::new(), size, mtime }
}

/// The entry from its attributes alone.
fn bare(attr: &Attr) -> Found {
    let (mode, uid, gid, atime, mtime) = (attr.mode, attr.uid, attr.gid, attr.atime, attr.mtime);
    let attrs = Attrs { mode, uid, gid, atime, mtime, xattrs: Vec::new() };
    let (nlink, rdev, allocated) = (attr.nlink, attr.rdev, attr.allocated);
    Found { fingerprint: fingerprint_of(attr), attrs, nlink, target: Bytes::new(), rdev, allocated }
}

pub(crate) fn is_kept(name: &[u8]) -> bool {
    let exact: [&[u8]; 3] = [b"system.posix_acl_access", b"system.posix_acl_default", b"security.capability"];
    exact.contains(&name) || name.starts_with(b"user.") || name.starts_with(b"trusted.")
}

impl WeirHome {
    /// Finds the directory and checks (or writes) its mark.
    pub async fn open(env: &Env, config: WeirHomeConfig) -> Outcome<WeirHome> {
        let base = find_base(&config).await?;
        let inner = Inner { url: config.url, client: config.client, base, ids: config.ids, env: env.clone() };
        if !config.only_reads {
            inner.check_mark(&config.relation, config.is_new).await?;
        }
        let at_once = config.limits.threads_max;
        let room = Arc::new(Semaphore::new(at_once));
        let calls = Calls { env: env.clone(), deadline: config.limits.deadline, at_once, room };
        Ok(WeirHome { calls, inner: Arc::new(inner) })
    }

    fn call<T, F>(&self, work: impl FnOnce(Arc<Inner>) -> F) -> BoxFuture<'_, Outcome<T>>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        self.calls.run(&self.inner.url, work(self.inner.clone()))
    }
}

async fn find_base(config: &WeirHomeConfig) -> Outcome<InodeId> {
    let mut at = InodeId::ROOT;
    for name in config.base.names() {
        let failed = |e| fault("find", &config.base, e);
        let found = config.client.lookup(&root(), at, name).await.map_err(failed)?;
        let found = found.filter(|stat| stat.attr.kind == FileKind::Directory).ok_or_else(|| {
            Fault::Unreachable(Error::unavailable(format!(
                "{} is not a directory at home ({}): make it there, or correct the relation's URL",
                config.base, config.url
            )))
        })?;
        at = found.attr.ino;
    }
    Ok(at)
}

impl Calls {
    fn run<'a, T: Send + 'static>(
        &'a self,
        url: &'a str,
        work: impl Future<Output = Outcome<T>> + Send + 'static,
    ) -> BoxFuture<'a, Outcome<T>> {
        let (tx, rx) = oneshot::channel();
        Box::pin(async move {
            let silent = |why: &str| {
                Fault::Unreachable(Error::unavailable(format!(
                    "{url} does not answer ({why}); it is tried again"
                )))
            };
            let room = self.env.clock.timeout(self.deadline, self.room.clone().acquire_owned()).await;
            let Ok(Ok(room)) = room else { return Err(silent("other calls wait for it already")) };
            self.env.tasks.spawn("call at home", async move {
                let done = work.await;
                drop(room);
                let _ = tx.send(done); // the caller may have given up: the change stays
            });
            rx.await.unwrap_or_else(|_| Err(silent("this node is stopping")))
        })
    }
}

/// The place of a path, whether or not it exists, and the entry there.
struct Place {
    dir: InodeId,
    name: Bytes,
    found: Option<Stat>,
}

impl Place {
    fn fingerprint(&self) -> Option<Fingerprint> {
        self.found.as_ref().map(|stat| fingerprint_of(&stat.attr))
    }
}

impl Inner {
    /// None: there is no directory for it.
    async fn place(&self, path: &HomePath) -> Result<Option<Place>> {
        let Some((name, above)) = path.names().split_last() else {
            let found = Some(self.client.getattr(self.base).await?);
            return Ok(Some(Place { dir: self.base, name: Bytes::new(), found }));
        };
        let mut dir = self.base;
        for name in above {
            match self.client.lookup(&root(), dir, name).await? {
                Some(stat) if stat.attr.kind == FileKind::Directory => dir = stat.attr.ino,
                _ => return Ok(None),
            }
        }
        let found = self.client.lookup(&root(), dir, name).await?;
        Ok(Some(Place { dir, name: name.clone(), found }))
    }

    /// The place for a new entry; the directory above it must exist.
    async fn new_place(&self, doing: &str, path: &HomePath) -> Outcome<Place> {
        let place = self.place(path).await.map_err(|e| fault(doing, path, e))?;
        place.ok_or_else(|| Fault::diverged(&path.parent().unwrap_or_default(), None, None))
    }

    /// The place of an entry of ours.
    async fn old_place(&self, path: &HomePath, expect: &Expect) -> Outcome<Place> {
        let place = self.place(path).await.map_err(|e| fault("find", path, e))?;
        place.ok_or_else(|| Fault::diverged(path, Some(expect.fingerprint()), None))
    }

    async fn fingerprint_now(&self, path: &HomePath, ino: InodeId) -> Outcome<Fingerprint> {
        let stat = self.client.getattr(ino).await.map_err(|e| fault("look at", path, e))?;
        Ok(fingerprint_of(&stat.attr))
    }

    async fn look(&self, attr: &Attr) -> Result<Found> {
        let xattrs = self.xattrs(attr.ino).await?;
        let target = match attr.kind {
            FileKind::Symlink => self.client.readlink(attr.ino).await?,
            _ => Bytes::new(),
        };
        let bare = bare(attr);
        let attrs = Attrs { xattrs, ..bare.attrs };
        Ok(Found { attrs, target, ..bare })
    }

    async fn xattrs(&self, ino: InodeId) -> Result<Vec<Xattr>> {
        let mut xattrs = Vec::new();
        for name in self.client.list_xattr(&root(), ino).await? {
            if is_kept(&name) {
                let value = self.client.get_xattr(&root(), ino, &name).await?;
                xattrs.push(Xattr { name, value });
            }
        }
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(xattrs)
    }

    /// Sets the attributes that differ, times last.
    async fn set(&self, ino: InodeId, found: &Found, wished: &Attrs) -> Result<()> {
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

    async fn create(&self, place: &Place, what: &Make) -> Result<Stat> {
        let (client, cred, dir, name) = (&self.client, root(), place.dir, &place.name[..]);
        let nobody_else = NewMode::from(0o600);
        match what {
            Make::Directory => client.mkdir(&cred, dir, name, NewMode::from(0o700)).await,
            Make::File => client.mknod(&cred, dir, name, nobody_else, FileKind::Regular, 0).await,
            Make::Symlink { target } => client.symlink(&cred, dir, name, target).await,
            Make::Special { kind, rdev } => client.mknod(&cred, dir, name, nobody_else, *kind, *rdev).await,
        }
    }

    async fn make(&self, path: &HomePath, what: &Make, attrs: &Attrs) -> Outcome<Fingerprint> {
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
        let found = self.look(&stat.attr).await.map_err(failed)?;
        let is_empty_dir = stat.attr.kind == FileKind::Directory
            && !path.is_root()
            && self.first_name(stat.attr.ino).await.map_err(failed)?.is_none();
        match decide::make(what, &attrs, Some(&found), is_empty_dir) {
            Step::Done => self.set(stat.attr.ino, &found, &attrs).await.map_err(failed)?,
            _ => return Err(Fault::diverged(path, None, Some(&found.fingerprint))),
        }
        self.fingerprint_now(path, stat.attr.ino).await
    }

    async fn link(&self, existing: &HomePath, expect: &Expect, path: &HomePath) -> Outcome<Fingerprint> {
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

    async fn remove(&self, path: &HomePath, expect: &Expect) -> Outcome<()> {
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

    async fn rename(
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

    async fn exchange(
        &self,
        a: (&HomePath, &Expect),
        b: (&HomePath, &Expect),
    ) -> Outcome<(Fingerprint, Fingerprint)> {
        let (at_a, at_b) = (self.old_place(a.0, a.1).await?, self.old_place(b.0, b.1).await?);
        let (found_a, found_b) = (at_a.fingerprint(), at_b.fingerprint());
        match decide::exchange(found_a.as_ref(), a.1, found_b.as_ref(), b.1) {
            Step::Act => {
                let names = (&at_a.name, &at_b.name);
                let exchanged = self
                    .client
                    .rename(&root(), at_a.dir, names.0, at_b.dir, names.1, RenameMode::Exchange)
                    .await;
                exchanged.map_err(|e| fault("exchange", a.0, e))?;
            }
            Step::Done => {}
            Step::Refuse => {
                let a_is_ours = found_a.as_ref().is_some_and(|found| a.1.admits(found));
                let (of, found) = if a_is_ours { (b, found_b) } else { (a, found_a) };
                return Err(Fault::diverged(of.0, Some(of.1.fingerprint()), found.as_ref()));
            }
        }
        let (now_a, now_b) =
            (self.old_place(a.0, b.1).await?.fingerprint(), self.old_place(b.0, a.1).await?.fingerprint());
        now_a.zip(now_b).ok_or_else(|| Fault::diverged(a.0, Some(b.1.fingerprint()), None))
    }

    async fn set_attrs(&self, path: &HomePath, expect: &Expect, attrs: &Attrs) -> Outcome<Fingerprint> {
        let failed = |e| fault("set the attributes of", path, e);
        let attrs = self.ids.to_home(expect.fingerprint().kind, attrs);
        let place = self.old_place(path, expect).await?;
        if let (true, Some(stat)) = (path.is_root(), &place.found) {
            return self.fingerprint_now(path, stat.attr.ino).await; // its owner was decided there
        }
        match (decide::set_attrs(place.fingerprint().as_ref(), expect, &attrs), &place.found) {
            (Step::Act | Step::Done, Some(stat)) => {
                let found = self.look(&stat.attr).await.map_err(failed)?;
                self.set(stat.attr.ino, &found, &attrs).await.map_err(failed)?;
                self.fingerprint_now(path, stat.attr.ino).await
            }
            _ => Err(Fault::diverged(path, Some(expect.fingerprint()), place.fingerprint().as_ref())),
        }
    }

    async fn resize(&self, path: &HomePath, expect: &Expect, size: u64) -> Outcome<Fingerprint> {
        let place = self.old_place(path, expect).await?;
        match (decide::resize(place.fingerprint().as_ref(), expect, size), &place.found) {
            (Step::Act, Some(stat)) if stat.attr.kind == FileKind::Regular => {
                let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
                let cut = self.client.setattr(&root(), stat.attr.ino, None, set).await;
                Ok(fingerprint_of(&cut.map_err(|e| fault("resize", path, e))?.attr))
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

    fn to_here(&self, found: Found) -> Found {
        let attrs = self.ids.to_here(found.fingerprint.kind, &found.attrs);
        Found { attrs, ..found }
    }

    async fn stat(&self, path: &HomePath) -> Outcome<Option<Found>> {
        let failed = |e| fault("look at", path, e);
        let place = self.place(path).await.map_err(failed)?;
        match place.and_then(|place| place.found) {
            Some(stat) => Ok(Some(self.to_here(self.look(&stat.attr).await.map_err(failed)?))),
            None => Ok(None),
        }
    }

    /// A directory is read once per page and only the page is kept in memory, however large it is.
    async fn list(&self, dir: &HomePath, after: Option<&[u8]>, limit: usize) -> Outcome<Listing> {
        let failed = |e| fault("list", dir, e);
        let ino = self.dir_at(dir).await?;
        let (mut page, mut cookie, mut end) = (BTreeMap::new(), 0, true);
        loop {
            let listed = self.client.readdir(&root(), ino, cookie, LIST_MAX, false).await.map_err(failed)?;
            for entry in listed.entries {
                cookie = entry.cookie;
                let is_ours =
                    !entry.name.starts_with(RESERVED) && after.is_none_or(|after| &entry.name[..] > after);
                if is_ours {
                    page.insert(entry.name, entry.ino);
                }
                if page.len() > limit.max(1) {
                    page.pop_last();
                    end = false;
                }
            }
            if listed.end {
                break;
            }
        }
        let mut entries = Vec::with_capacity(page.len());
        for (name, ino) in page {
            if let Some(found) = self.found(ino).await.map_err(failed)? {
                entries.push(ListEntry { name, found });
            }
        }
        Ok(Listing { entries, end })
    }

    async fn dir_at(&self, dir: &HomePath) -> Outcome<InodeId> {
        let found = self.place(dir).await.map_err(|e| fault("list", dir, e))?.and_then(|place| place.found);
        match found.filter(|stat| stat.attr.kind == FileKind::Directory) {
            Some(stat) => Ok(stat.attr.ino),
            None => Err(Fault::diverged(dir, None, None)),
        }
    }

    /// Some entries after a cookie, and the next cookie.
    async fn next_of(
        &self,
        dir: &HomePath,
        ino: InodeId,
        cookie: u64,
        limit: usize,
    ) -> Outcome<(Listing, u64)> {
        let failed = |e| fault("list", dir, e);
        let limit = u32::try_from(limit).unwrap_or(LIST_MAX).clamp(1, LIST_MAX);
        let listed = self.client.readdir(&root(), ino, cookie, limit, false).await.map_err(failed)?;
        let (mut entries, mut cookie) = (Vec::with_capacity(listed.entries.len()), cookie);
        for entry in listed.entries {
            cookie = entry.cookie;
            if entry.name.starts_with(RESERVED) {
                continue;
            }
            if let Some(found) = self.found(entry.ino).await.map_err(failed)? {
                entries.push(ListEntry { name: entry.name, found });
            }
        }
        Ok((Listing { entries, end: listed.end }, cookie))
    }

    /// None: gone since its name was read; treated as absent.
    async fn found(&self, ino: InodeId) -> Result<Option<Found>> {
        let found = match self.client.getattr(ino).await {
            Ok(stat) => self.look(&stat.attr).await,
            Err(e) => Err(e),
        };
        match found {
            Ok(found) => Ok(Some(self.to_here(found))),
            Err(e) if e.kind == ErrorKind::NotFound || e.kind == ErrorKind::Stale => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn check_mark(&self, relation: &str, is_new: bool) -> Outcome<()> {
        let path = HomePath::root();
        let wished = format!("weir home 1\nrelation {relation}\n");
        let failed = |doing: &'static str| move |e| fault(doing, &HomePath::root(), e);
        if let Some(stat) = self.client.lookup(&root(), self.base, RESERVED).await.map_err(failed("open"))? {
            let opened =
                self.client.open(&root(), stat.attr.ino, OpenMode::READ).await.map_err(failed("open"))?;
            let text = self.client.read(opened.handle, 0, MARK_BYTES_MAX).await;
            let _ = self.client.release(opened.handle).await; // it was only read
            let text = text.map_err(failed("read the mark in"))?.concat();
            if text == wished.as_bytes() {
                return Ok(());
            }
            let error = Error::stale(format!(
                "{} is marked as another home (its .weir-home says {:?}, expected {:?}): give the right directory, or \
                 remove .weir-home there if it is to be ours",
                self.url,
                String::from_utf8_lossy(&text).trim_end(),
                wished.trim_end()
            ));
            return Err(Fault::new(FaultKind::Diverged, &path, error));
        }
        if !is_new {
            return Err(Fault::Unreachable(Error::unavailable(format!(
                "{} has no mark .weir-home: it is not this relation's home; give the right directory",
                self.url
            ))));
        }
        let leave = async {
            let (cred, mode) = (root(), OpenMode::WRITE);
            let opened =
                self.client.create(&cred, self.base, RESERVED, NewMode::from(0o644), true, mode).await?;
            let written = self.client.write(opened.handle, 0, Bytes::from(wished.clone())).await;
            let synced = self.client.fsync(opened.handle).await;
            self.client.release(opened.handle).await?;
            written.and(synced)
        };
        leave.await.map_err(failed("leave the mark in"))
    }

    async fn open_expected(
        &self,
        path: &HomePath,
        expect: &Expect,
        mode: OpenMode,
    ) -> Outcome<(Handle, Fingerprint)> {
        let place = self.old_place(path, expect).await?;
        let found = place.fingerprint();
        let is_file = expect.fingerprint().kind == FileKind::Regular;
        let ino = match &place.found {
            Some(stat) if is_file && found.as_ref().is_some_and(|found| expect.admits(found)) => {
                stat.attr.ino
            }
            _ => return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref())),
        };
        let opened = self.client.open(&root(), ino, mode).await.map_err(|e| fault("open", path, e))?;
        Ok((opened.handle, fingerprint_of(&opened.stat.attr)))
    }
}

/// An open file there; closed when the value is dropped.
struct OpenFile {
    inner: Arc<Inner>,
    path: HomePath,
    ino: InodeId,
    handle: Handle,
    expect: Expect,
    opened: Fingerprint,
    /// The state at the last sync, if no other mover writes the file: it must be unchanged when we continue.
    known: Mutex<Option<Fingerprint>>,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let (client, handle) = (self.inner.client.clone(), self.handle);
        self.inner.env.tasks.spawn("close at home", async move {
            let _ = client.release(handle).await; // all data that counts was synced, with its errors reported
        });
    }
}

impl OpenFile {
    fn ino_of(expect: &Expect) -> InodeId {
        let id: [u8; 8] = expect.fingerprint().id[..].try_into().unwrap_or_default();
        InodeId(u64::from_le_bytes(id))
    }
    fn known(&self) -> std::sync::MutexGuard<'_, Option<Fingerprint>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
    async fn fingerprint_now(&self) -> Outcome<Fingerprint> {
        self.inner.fingerprint_now(&self.path, self.ino).await
    }
    async fn check_known(&self) -> Outcome<()> {
        let known = self.known().clone();
        let Some(known) = known else { return Ok(()) };
        let found = self.fingerprint_now().await?;
        if found != known {
            return Err(Fault::diverged(&self.path, Some(&known), Some(&found)));
        }
        *self.known() = None;
        Ok(())
    }

    async fn write(&self, offset: u64, parts: Vec<Bytes>) -> Outcome<()> {
        self.check_known().await?;
        let mut at = offset;
        for mut part in parts {
            while !part.is_empty() {
                let written = self.inner.client.write(self.handle, at, part.clone()).await;
                let n = written.map_err(|e| fault("write", &self.path, e))?.min(part.len());
                if n == 0 {
                    return Err(fault("write", &self.path, Error::io("no byte was taken")));
                }
                at += n as u64;
                drop(part.split_to(n));
            }
        }
        Ok(())
    }

    async fn zero(&self, range: Range<u64>) -> Outcome<()> {
        self.check_known().await?;
        let failed = |e| fault("make a hole in", &self.path, e);
        let (client, size) = (&self.inner.client, self.fingerprint_now().await?.size);
        let within = range.start..range.end.min(size);
        if !within.is_empty() {
            let len = within.end - within.start;
            client.fallocate(self.handle, Allocate::PunchHole, within.start, len).await.map_err(failed)?;
        }
        if size < range.end {
            let set = SetAttrs { size: Some(range.end), ..SetAttrs::default() };
            client.setattr(&root(), self.ino, Some(self.handle), set).await.map_err(failed)?;
        }
        Ok(())
    }

    async fn sync(&self) -> Outcome<Fingerprint> {
        self.inner.client.fsync(self.handle).await.map_err(|e| fault("sync", &self.path, e))?;
        self.remember().await
    }

    async fn remember(&self) -> Outcome<Fingerprint> {
        let fingerprint = self.fingerprint_now().await?;
        if matches!(self.expect, Expect::Unchanged(_)) {
            *self.known() = Some(fingerprint.clone());
        }
        Ok(fingerprint)
    }

    async fn finish(&self, size: u64, attrs: &Attrs) -> Outcome<Fingerprint> {
        self.check_known().await?;
        let failed = |e| fault("finish", &self.path, e);
        let client = &self.inner.client;
        if self.fingerprint_now().await?.size != size {
            let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
            client.setattr(&root(), self.ino, Some(self.handle), set).await.map_err(failed)?;
        }
        let (synced, xattrs) = tokio::join!(client.fsync(self.handle), self.inner.xattrs(self.ino));
        synced.map_err(failed)?;
        let stat = client.getattr(self.ino).await.map_err(failed)?;
        let mut found = bare(&stat.attr);
        found.attrs.xattrs = xattrs.map_err(failed)?;
        self.inner.set(self.ino, &found, attrs).await.map_err(failed)?;
        client.fsync(self.handle).await.map_err(failed)?;
        self.remember().await
    }

    async fn read(&self, offset: u64, len: usize) -> Outcome<Vec<Bytes>> {
        let failed = |e| fault("read", &self.path, e);
        let (mut parts, mut done) = (Vec::new(), 0);
        while done < len {
            let got = self
                .inner
                .client
                .read(self.handle, offset + done as u64, len - done)
                .await
                .map_err(failed)?;
            let n: usize = got.iter().map(Bytes::len).sum();
            if n == 0 {
                break;
            }
            parts.extend(got);
            done += n;
        }
        let found = self.fingerprint_now().await?;
        if !self.expect.admits(&found) {
            return Err(Fault::diverged(&self.path, Some(self.expect.fingerprint()), Some(&found)));
        }
        Ok(parts)
    }

    async fn data_from(&self, offset: u64) -> Outcome<Option<Range<u64>>> {
        let failed = |e| fault("look for holes in", &self.path, e);
        let client = &self.inner.client;
        let Some(start) = client.seek_data(self.handle, offset).await.map_err(failed)? else {
            return Ok(None);
        };
        let end = client.seek_hole(self.handle, start).await.map_err(failed)?;
        Ok(Some(start..end.unwrap_or(self.opened.size)))
    }
}

/// An open file, and the permit for its calls.
struct Open {
    calls: Calls,
    file: Arc<OpenFile>,
}

impl Open {
    fn call<T, F>(&self, work: impl FnOnce(Arc<OpenFile>) -> F) -> BoxFuture<'_, Outcome<T>>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        self.calls.run(&self.file.inner.url, work(self.file.clone()))
    }
}

impl HomeWriter for Open {
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>> {
        self.call(move |file| async move { file.write(offset, parts).await })
    }
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>> {
        self.call(move |file| async move { file.zero(range).await })
    }
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>> {
        self.call(|file| async move { file.sync().await })
    }
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let attrs = self.file.inner.ids.to_home(FileKind::Regular, attrs);
        self.call(move |file| async move { file.finish(size, &attrs).await })
    }
}

impl HomeReader for Open {
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>> {
        self.call(move |file| async move { file.read(offset, len).await })
    }
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>> {
        self.call(move |file| async move { file.data_from(offset).await })
    }
    fn fingerprint(&self) -> &Fingerprint {
        &self.file.opened
    }
}

impl WeirHome {
    async fn open_file(&self, path: &HomePath, expect: &Expect, mode: OpenMode) -> Outcome<Open> {
        let (path, expect, calls) = (path.clone(), expect.clone(), self.calls.clone());
        let file = self.call(move |inner| async move {
            let (handle, opened) = inner.open_expected(&path, &expect, mode).await?;
            let ino = OpenFile::ino_of(&Expect::Ours(opened.clone()));
            let is_alone = mode.write && matches!(expect, Expect::Unchanged(_));
            let known = Mutex::new(is_alone.then(|| opened.clone()));
            Ok(OpenFile { inner, path, ino, handle, expect, opened, known })
        });
        Ok(Open { calls, file: Arc::new(file.await?) })
    }
}

impl Home for WeirHome {
    fn url(&self) -> &str {
        &self.inner.url
    }
    fn traits(&self) -> Traits {
        Traits {
            owners: true,
            exact_times: true,
            xattrs: true,
            xattr_bytes_max: usize::MAX,
            path_bytes_max: usize::MAX,
            acls: true,
            hard_links: true,
            special_files: true,
            growing_prefix: true,
            calls_max: self.calls.at_once,
            parallel_writers: true,
            in_place: true,
            holes: true,
            cheap_rename: true,
            strong_fingerprints: false,
        }
    }
    fn lets_through(&self, kind: FileKind) -> bool {
        self.inner.ids.lets_through(kind)
    }
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (path, what, attrs) = (path.clone(), what.clone(), attrs.clone());
        self.call(move |inner| async move { inner.make(&path, &what, &attrs).await })
    }
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (existing, expect, path) = (existing.clone(), expect.clone(), path.clone());
        self.call(move |inner| async move { inner.link(&existing, &expect, &path).await })
    }
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>> {
        let (path, expect) = (path.clone(), expect.clone());
        self.call(move |inner| async move { inner.remove(&path, &expect).await })
    }
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (from, expect, to, replaces) = (from.clone(), expect.clone(), to.clone(), replaces.cloned());
        self.call(move |inner| async move { inner.rename(&from, &expect, &to, replaces.as_ref()).await })
    }
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>> {
        let (a, expect_a, b, expect_b) = (a.clone(), expect_a.clone(), b.clone(), expect_b.clone());
        self.call(move |inner| async move { inner.exchange((&a, &expect_a), (&b, &expect_b)).await })
    }
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (path, expect, attrs) = (path.clone(), expect.clone(), attrs.clone());
        self.call(move |inner| async move { inner.set_attrs(&path, &expect, &attrs).await })
    }
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (path, expect) = (path.clone(), expect.clone());
        self.call(move |inner| async move { inner.resize(&path, &expect, size).await })
    }
    /// The other Weir's answers are durable.
    fn settle(&self) -> BoxFuture<'_, Outcome<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn piece(&self, offset: u64, bytes_wanted: u64) -> Range<u64> {
        offset..offset.saturating_add(bytes_wanted.max(1))
    }
    fn open_write<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeWriter>>> {
        Box::pin(async move {
            let open = self.open_file(path, expect, OpenMode::WRITE).await?;
            Ok(Box::new(open) as Box<dyn HomeWriter>)
        })
    }
    fn open_read<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeReader>>> {
        Box::pin(async move {
            let open = self.open_file(path, expect, OpenMode::READ).await?;
            self.inner.client.leaves_access_time(open.file.handle);
            Ok(Box::new(open) as Box<dyn HomeReader>)
        })
    }
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>> {
        let path = path.clone();
        self.call(move |inner| async move { inner.stat(&path).await })
    }
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>> {
        let (dir, after) = (dir.clone(), after.map(<[u8]>::to_vec));
        self.call(move |inner| async move { inner.list(&dir, after.as_deref(), limit).await })
    }
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>> {
        let (calls, dir) = (self.calls.clone(), dir.clone());
        Box::pin(async move {
            let lister = self.call(move |inner| async move {
                let ino = inner.dir_at(&dir).await?;
                Ok(WeirLister { calls, inner, dir, ino, cookie: 0 })
            });
            Ok(Box::new(lister.await?) as Box<dyn HomeLister>)
        })
    }
    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>> {
        self.call(|inner| async move {
            let space = inner
                .client
                .statfs()
                .await
                .map_err(|e| fault("ask for the space of", &HomePath::root(), e))?;
            let free = space.capacity_bytes.saturating_sub(space.used_bytes);
            Ok(HomeSpace { total: space.capacity_bytes, free })
        })
    }
}

/// A directory there that is being read.
struct WeirLister {
    calls: Calls,
    inner: Arc<Inner>,
    dir: HomePath,
    ino: InodeId,
    cookie: u64,
}

impl HomeLister for WeirLister {
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>> {
        let (inner, dir, ino, cookie) = (self.inner.clone(), self.dir.clone(), self.ino, self.cookie);
        Box::pin(async move {
            let next = async move { inner.next_of(&dir, ino, cookie, limit).await };
            let (listing, cookie) = self.calls.run(&self.inner.url, next).await?;
            self.cookie = cookie;
            Ok(listing)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FaultKind::*;

    #[test]
    fn each_kind_has_its_lane() {
        for (kind, lane) in [
            (ErrorKind::NoSpace, Full),
            (ErrorKind::OverQuota, Full),
            (ErrorKind::Denied, Denied),
            (ErrorKind::Name(NameRule::NotOwner), Denied),
            (ErrorKind::NotFound, Diverged),
            (ErrorKind::Exists, Diverged),
            (ErrorKind::Name(NameRule::NotEmpty), Diverged),
            (ErrorKind::Unavailable, Unreachable),
            (ErrorKind::Deadline, Unreachable),
            (ErrorKind::Stale, Unreachable),
            (ErrorKind::Damaged, Broken),
            (ErrorKind::Name(NameRule::CrossVolume), Broken),
            (ErrorKind::Name(NameRule::TooLong), Broken),
        ] {
            assert_eq!(map_kind(kind).0, lane, "{kind:?}");
        }
    }
}
