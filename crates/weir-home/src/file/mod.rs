//! `file:///path`: a home in any mounted directory, local or NFS.
//!
//! The async shell: each call runs on the home's own threads (`lane.rs`). The calls themselves are in
//! `names.rs`, `data.rs` and `lister.rs`, the open directory in `directory.rs`, path resolution in `root.rs`,
//! attributes in `place.rs`. In these files this crate accesses the machine, by `rustix`: a home is a foreign
//! directory, not one of the node's disks, so it does not use `weir_env::Disk`.
mod data;
mod directory;
mod lister;
mod names;
mod place;
mod root;

use crate::{
    Attrs, Expect, Fault, Fingerprint, Found, Home, HomeLane, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, IdMap, LaneLimits, Listing, Make, Outcome, Traits, map_errno,
};
use data::{FileReader, FileWriter};
use directory::Directory;
use lister::FileLister;
use rustix::io::Errno;
use std::{ops::Range, path::PathBuf, sync::Arc};
use weir_env::{Actor, BoxFuture, Env};
use weir_proto::{Error, meta::FileKind};

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
    dir: Arc<Directory>,
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
        let dir = Arc::new(Directory::new(config, env.buffers.clone()));
        let opening = dir.clone();
        let traits = lane.run("open", &[], move || Ok(opening.root()?.traits())).await?;
        let traits = Traits { calls_max: lane.calls_max(), ..traits };
        Ok(FileHome { url, traits, lane, dir })
    }

    /// Calls that hang beyond their deadline.
    pub fn hung(&self) -> usize {
        self.lane.hung()
    }

    async fn call<T: Send + 'static>(
        &self,
        doing: &'static str,
        paths: &[&HomePath],
        work: impl FnOnce(&Arc<Directory>) -> Outcome<T> + Send + 'static,
    ) -> Outcome<T> {
        let dir = self.dir.clone();
        let work = move || {
            let done = work(&dir);
            if let Err(Fault::Unreachable(_)) = done {
                dir.forget_root();
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

impl Home for FileHome {
    fn url(&self) -> &str {
        &self.url
    }
    fn traits(&self) -> Traits {
        self.traits
    }
    fn lets_through(&self, kind: FileKind) -> bool {
        self.dir.ids().lets_through(kind)
    }
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, what, attrs) = (path.clone(), what.clone(), attrs.clone());
        Box::pin(async move { self.call("make", &[path], move |dir| dir.make(&p, &what, &attrs)).await })
    }
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (e, x, p) = (existing.clone(), expect.clone(), path.clone());
        Box::pin(async move { self.call("link", &[existing, path], move |dir| dir.link(&e, &x, &p)).await })
    }
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>> {
        let (p, x) = (path.clone(), expect.clone());
        Box::pin(async move { self.call("remove", &[path], move |dir| dir.remove(&p, &x)).await })
    }
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (f, x, t, r) = (from.clone(), expect.clone(), to.clone(), replaces.cloned());
        Box::pin(async move {
            self.call("rename", &[from, to], move |dir| dir.rename(&f, &x, &t, r.as_ref())).await
        })
    }
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>> {
        let (pa, xa, pb, xb) = (a.clone(), expect_a.clone(), b.clone(), expect_b.clone());
        Box::pin(
            async move { self.call("exchange", &[a, b], move |dir| dir.exchange(&pa, &xa, &pb, &xb)).await },
        )
    }
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, x, attrs) = (path.clone(), expect.clone(), attrs.clone());
        Box::pin(async move {
            self.call("set attributes", &[path], move |dir| dir.set_attrs(&p, &x, &attrs)).await
        })
    }
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, x) = (path.clone(), expect.clone());
        Box::pin(async move { self.call("resize", &[path], move |dir| dir.resize(&p, &x, size)).await })
    }
    fn settle(&self) -> BoxFuture<'_, Outcome<()>> {
        Box::pin(self.call("settle", &[], |dir| dir.settle()))
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
            let writer = self.call("open", &[path], move |dir| FileWriter::open(dir, &lane, &p, &x)).await?;
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
            let reader = self.call("open", &[path], move |dir| FileReader::open(dir, &lane, &p, &x)).await?;
            Ok(Box::new(reader) as Box<dyn HomeReader>)
        })
    }
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>> {
        let p = path.clone();
        Box::pin(async move { self.call("stat", &[path], move |dir| dir.stat(&p)).await })
    }
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>> {
        let (d, after) = (dir.clone(), after.map(<[u8]>::to_vec));
        Box::pin(
            async move { self.call("list", &[], move |dir| dir.list(&d, after.as_deref(), limit)).await },
        )
    }
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>> {
        let (d, lane) = (dir.clone(), self.lane.clone());
        Box::pin(async move {
            let lister = self.call("list", &[], move |dir| FileLister::open(dir, &lane, &d)).await?;
            Ok(Box::new(lister) as Box<dyn HomeLister>)
        })
    }
    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>> {
        Box::pin(self.call("ask for space", &[], |dir| dir.space()))
    }
}
