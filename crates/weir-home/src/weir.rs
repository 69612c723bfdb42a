//! `weir://…`: a home in another Weir, by its own client.
//!
//! Paths are resolved from a directory there; its answers are durable there. The client ends each of its
//! calls by its patience; a call of ours is a few of them. Each call runs to its end in a task of its own,
//! even if its caller is dropped.
use crate::{
    Attrs, Expect, Fault, FaultKind, Fingerprint, Found, Home, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, IdMap, LaneLimits, Listing, Make, Outcome, RESERVED, Traits, Xattr,
};
use bytes::Bytes;
use listing::WeirLister;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::{Semaphore, oneshot};
use weir_client::{Client, NewMode, OpenMode, Stat};
use weir_env::{BoxFuture, Env};
use weir_proto::meta::{Attr, Cred, FileKind, Time};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result};

mod changes;
mod listing;
mod open_file;

const MARK_BYTES_MAX: usize = 4096;

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
    slots: Arc<Semaphore>,
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
        ErrorKind::Stale
        | ErrorKind::Unavailable
        | ErrorKind::Busy { .. }
        | ErrorKind::Deadline
        | ErrorKind::Io => (Unreachable, "it is tried again; check the cluster of home if it stays so"),
        ErrorKind::Damaged => (Broken, "home has lost it: check the targets of the cluster of home"),
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
    Fault::new(kind, path, Error { context, ..e })
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
        let slots = Arc::new(Semaphore::new(at_once));
        let calls = Calls { env: env.clone(), deadline: config.limits.deadline, at_once, slots };
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
            let permit = self.env.clock.timeout(self.deadline, self.slots.clone().acquire_owned()).await;
            let Ok(Ok(permit)) = permit else { return Err(silent("other calls wait for it already")) };
            self.env.tasks.spawn("call at home", async move {
                let done = work.await;
                drop(permit);
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
        let stat = self.client.getattr(ino).await.map_err(|e| fault("stat", path, e))?;
        Ok(fingerprint_of(&stat.attr))
    }

    async fn stat_entry(&self, attr: &Attr) -> Result<Found> {
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
                "{} is marked as another home (its .weir-home has {:?}, expected {:?}): give the right directory, or \
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
    fn part(&self, offset: u64, bytes_wanted: u64) -> Range<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use FaultKind::*;

    #[test]
    fn each_kind_of_error_has_its_kind_of_fault() {
        for (kind, fault) in [
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
            assert_eq!(map_kind(kind).0, fault, "{kind:?}");
        }
    }
}
