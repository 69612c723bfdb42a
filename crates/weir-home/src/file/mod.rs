//! `file:///path`: a home in any mounted directory, local or NFS.
//!
//! The async shell: each call runs on the home's own threads (`lane.rs`). The calls themselves are in
//! `names.rs` and `data.rs`, path resolution in `root.rs`, attributes in `place.rs`. In these four files this
//! crate accesses the machine, by `rustix`: a home is a foreign directory, not one of the node's disks, so it
//! does not use `weir_env::Disk`.
mod data;
mod lister;
mod names;
mod place;
mod root;

use crate::{
    Attrs, Expect, Fault, Fingerprint, Found, Home, HomeLane, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, IdMap, LaneLimits, Listing, Make, Outcome, Traits, map_errno,
};
use root::Root;
use rustix::{fs::OFlags, io::Errno};
use std::{
    collections::BTreeSet,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use weir_env::{Actor, BoxFuture, BufferPool, Env};
use weir_proto::{Error, meta::FileKind};

/// If more places than this changed, the whole file system is synced once instead of each one.
const TOUCHED_MAX: usize = 256;

/// The path of a home directory, and its relation.
#[derive(Clone, Debug)]
pub struct FileHomeConfig {
    /// Absolute.
    pub path: PathBuf,
    /// Names the relation, one line; the mark in the root must have the same name.
    pub relation: String,
    /// The relation begins: write the mark if there is none. Otherwise a root without a mark is refused.
    pub is_new: bool,
    /// Nothing is changed there: no mark is written or required.
    pub only_reads: bool,
    pub ids: IdMap,
    /// Opened only if the directory belongs to this user.
    pub only_of: Option<u32>,
    /// The home must be below this directory, also after symbolic links.
    pub below: Option<PathBuf>,
    /// All operations there run as this user; absent: as the process.
    pub run_as: Option<Actor>,
    pub limits: LaneLimits,
}

/// A home in a directory.
pub struct FileHome {
    url: String,
    traits: Traits,
    lane: HomeLane,
    shared: Arc<Shared>,
}

struct Shared {
    config: FileHomeConfig,
    buffers: BufferPool,
    /// Opened on first use, and again after home was unreachable: it may have been mounted again.
    root: Mutex<Option<Arc<Root>>>,
    /// Changes that are not known to be durable.
    touched: Mutex<BTreeSet<HomePath>>,
    /// Held while settling: a second caller waits for the first one's changes, too.
    settling: Mutex<()>,
}

impl FileHome {
    /// Opens the root and checks (or writes) its mark.
    pub async fn open(env: &Env, config: FileHomeConfig) -> Outcome<FileHome> {
        let url = format!("file://{}", config.path.display());
        if !config.path.is_absolute() || config.relation.is_empty() || config.relation.contains('\n') {
            return Err(Fault::Broken(Error::invalid(format!(
                "{url} for relation {:?}: a home needs an absolute path, its relation a name of one line",
                config.relation
            ))));
        }
        let lane = HomeLane::new(env, &url, config.limits).acting_as(config.run_as.clone());
        let shared = Arc::new(Shared {
            config,
            buffers: env.buffers.clone(),
            root: Mutex::default(),
            touched: Mutex::default(),
            settling: Mutex::default(),
        });
        let opening = shared.clone();
        let traits = lane.run("open", &[], move || Ok(opening.root()?.traits())).await?;
        let traits = Traits { calls_max: lane.calls_max(), ..traits };
        Ok(FileHome { url, traits, lane, shared })
    }

    /// Calls that hang beyond their deadline.
    pub fn hung(&self) -> usize {
        self.lane.hung()
    }

    async fn call<T: Send + 'static>(
        &self,
        doing: &'static str,
        paths: &[&HomePath],
        work: impl FnOnce(&Arc<Shared>) -> Outcome<T> + Send + 'static,
    ) -> Outcome<T> {
        let shared = self.shared.clone();
        let work = move || {
            let done = work(&shared);
            if let Err(Fault::Unreachable(_)) = done {
                shared.forget_root();
            }
            done
        };
        self.lane.run(doing, paths, work).await
    }
}

/// The fault for the errno of a system call.
fn fault(doing: &str, path: &HomePath, errno: Errno) -> Fault {
    let (kind, error, remedy) = map_errno(errno.raw_os_error());
    Fault::new(kind, path, Error::new(error, format!("{doing} {path} at home: {errno}: {remedy}")))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn root(&self) -> Outcome<Arc<Root>> {
        if let Some(root) = &*lock(&self.root) {
            return Ok(root.clone());
        }
        // Not under the lock: it may hang.
        let root = Arc::new(Root::open(&self.config)?);
        *lock(&self.root) = Some(root.clone());
        Ok(root)
    }

    /// The next call reopens it, and checks its mark.
    fn forget_root(&self) {
        *lock(&self.root) = None;
    }

    fn touch(&self, path: &HomePath) {
        let mut touched = lock(&self.touched);
        if touched.len() <= TOUCHED_MAX {
            touched.insert(path.clone());
        }
    }
    fn touch_parent(&self, path: &HomePath) {
        self.touch(&path.parent().unwrap_or_default());
    }

    fn settle(&self) -> Outcome<()> {
        let _one_at_a_time = lock(&self.settling);
        let touched = std::mem::take(&mut *lock(&self.touched));
        let settled = self.root().and_then(|root| {
            if touched.len() > TOUCHED_MAX || !touched.iter().all(|path| sync_place(&root, path).is_ok()) {
                rustix::fs::syncfs(root.fd()).map_err(|e| fault("sync", &HomePath::root(), e))?;
            }
            Ok(())
        });
        if settled.is_err() {
            lock(&self.touched).extend(touched);
        }
        settled
    }

    fn space(&self) -> Outcome<HomeSpace> {
        let root = self.root()?;
        let fs = rustix::fs::fstatvfs(root.fd())
            .map_err(|e| fault("ask for the space of", &HomePath::root(), e))?;
        let bytes = |blocks: u64| blocks.saturating_mul(fs.f_frsize);
        Ok(HomeSpace { total: bytes(fs.f_blocks), free: bytes(fs.f_bavail) })
    }
}

/// Fails for entries that cannot be opened (links, devices) or were moved: then the whole file system is
/// synced.
fn sync_place(root: &Root, path: &HomePath) -> rustix::io::Result<()> {
    rustix::fs::fsync(root.place(path)?.open(OFlags::RDONLY)?)
}

impl Home for FileHome {
    fn url(&self) -> &str {
        &self.url
    }
    fn traits(&self) -> Traits {
        self.traits
    }
    fn lets_through(&self, kind: FileKind) -> bool {
        self.shared.config.ids.lets_through(kind)
    }
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, what, attrs) = (path.clone(), what.clone(), attrs.clone());
        Box::pin(async move { self.call("make", &[path], move |s| s.make(&p, &what, &attrs)).await })
    }
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (e, x, p) = (existing.clone(), expect.clone(), path.clone());
        Box::pin(async move { self.call("link", &[existing, path], move |s| s.link(&e, &x, &p)).await })
    }
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>> {
        let (p, x) = (path.clone(), expect.clone());
        Box::pin(async move { self.call("remove", &[path], move |s| s.remove(&p, &x)).await })
    }
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (f, x, t, r) = (from.clone(), expect.clone(), to.clone(), replaces.cloned());
        Box::pin(
            async move { self.call("rename", &[from, to], move |s| s.rename(&f, &x, &t, r.as_ref())).await },
        )
    }
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>> {
        let (pa, xa, pb, xb) = (a.clone(), expect_a.clone(), b.clone(), expect_b.clone());
        Box::pin(async move { self.call("exchange", &[a, b], move |s| s.exchange(&pa, &xa, &pb, &xb)).await })
    }
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, x, attrs) = (path.clone(), expect.clone(), attrs.clone());
        Box::pin(
            async move { self.call("set attributes", &[path], move |s| s.set_attrs(&p, &x, &attrs)).await },
        )
    }
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, x) = (path.clone(), expect.clone());
        Box::pin(async move { self.call("resize", &[path], move |s| s.resize(&p, &x, size)).await })
    }
    fn settle(&self) -> BoxFuture<'_, Outcome<()>> {
        Box::pin(self.call("settle", &[], |s| s.settle()))
    }
    fn part(&self, offset: u64, bytes_wanted: u64) -> Range<u64> {
        offset..offset.saturating_add(bytes_wanted.max(1))
    }
    fn open_write<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeWriter>>> {
        let (p, x, lane) = (path.clone(), expect.clone(), self.lane.clone());
        Box::pin(async move {
            let writer = self.call("open", &[path], move |s| s.open_write(&lane, &p, &x)).await?;
            Ok(Box::new(writer) as Box<dyn HomeWriter>)
        })
    }
    fn open_read<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeReader>>> {
        let (p, x, lane) = (path.clone(), expect.clone(), self.lane.clone());
        Box::pin(async move {
            let reader = self.call("open", &[path], move |s| s.open_read(&lane, &p, &x)).await?;
            Ok(Box::new(reader) as Box<dyn HomeReader>)
        })
    }
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>> {
        let p = path.clone();
        Box::pin(async move { self.call("stat", &[path], move |s| s.stat(&p)).await })
    }
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>> {
        let (d, after) = (dir.clone(), after.map(<[u8]>::to_vec));
        Box::pin(async move { self.call("list", &[], move |s| s.list(&d, after.as_deref(), limit)).await })
    }
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>> {
        let (d, lane) = (dir.clone(), self.lane.clone());
        Box::pin(async move {
            let lister = self.call("list", &[], move |s| s.read_dir(&lane, &d)).await?;
            Ok(Box::new(lister) as Box<dyn HomeLister>)
        })
    }
    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>> {
        Box::pin(self.call("ask for space", &[], |s| s.space()))
    }
}
