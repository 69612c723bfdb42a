//! `weir://…`: a home in another Weir, by its own client.
//!
//! Paths are resolved from a directory there; its answers are durable there. The client ends each of its
//! calls by its patience; a call of ours is a few of them. Each call runs to its end in a task of its own,
//! even if its caller is dropped.
use crate::{
    Attrs, Expect, Fault, FaultKind, Fingerprint, Found, Home, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, IdMap, LaneLimits, Listing, Make, Outcome, Traits,
};
use listing::WeirLister;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::{Semaphore, oneshot};
use tree::Tree;
use weir_client::{Client, OpenMode};
use weir_env::{BoxFuture, Env};
use weir_proto::meta::{Cred, FileKind};
use weir_proto::{Error, ErrorKind, NameRule};

mod changes;
mod listing;
mod open_file;
mod tree;

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
    tree: Arc<Tree>,
}

/// Runs calls to their end, this number in parallel.
#[derive(Clone)]
struct Calls {
    env: Env,
    deadline: std::time::Duration,
    at_once: usize,
    slots: Arc<Semaphore>,
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

pub(crate) fn is_kept(name: &[u8]) -> bool {
    let exact: [&[u8]; 3] = [b"system.posix_acl_access", b"system.posix_acl_default", b"security.capability"];
    exact.contains(&name) || name.starts_with(b"user.") || name.starts_with(b"trusted.")
}

impl WeirHome {
    /// Finds the directory and checks (or writes) its mark.
    pub async fn open(env: &Env, config: WeirHomeConfig) -> Outcome<WeirHome> {
        let at_once = config.limits.threads_max;
        let slots = Arc::new(Semaphore::new(at_once));
        let calls = Calls { env: env.clone(), deadline: config.limits.deadline, at_once, slots };
        let tree = Arc::new(Tree::open(env, config).await?);
        Ok(WeirHome { calls, tree })
    }

    fn call<T, F>(&self, work: impl FnOnce(Arc<Tree>) -> F) -> BoxFuture<'_, Outcome<T>>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        self.calls.run(&self.tree.url, work(self.tree.clone()))
    }
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

impl Home for WeirHome {
    fn url(&self) -> &str {
        &self.tree.url
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
        self.tree.ids.lets_through(kind)
    }
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (path, what, attrs) = (path.clone(), what.clone(), attrs.clone());
        self.call(move |tree| async move { tree.make(&path, &what, &attrs).await })
    }
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (existing, expect, path) = (existing.clone(), expect.clone(), path.clone());
        self.call(move |tree| async move { tree.link(&existing, &expect, &path).await })
    }
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>> {
        let (path, expect) = (path.clone(), expect.clone());
        self.call(move |tree| async move { tree.remove(&path, &expect).await })
    }
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (from, expect, to, replaces) = (from.clone(), expect.clone(), to.clone(), replaces.cloned());
        self.call(move |tree| async move { tree.rename(&from, &expect, &to, replaces.as_ref()).await })
    }
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>> {
        let (a, expect_a, b, expect_b) = (a.clone(), expect_a.clone(), b.clone(), expect_b.clone());
        self.call(move |tree| async move { tree.exchange(&a, &expect_a, &b, &expect_b).await })
    }
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (path, expect, attrs) = (path.clone(), expect.clone(), attrs.clone());
        self.call(move |tree| async move { tree.set_attrs(&path, &expect, &attrs).await })
    }
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (path, expect) = (path.clone(), expect.clone());
        self.call(move |tree| async move { tree.resize(&path, &expect, size).await })
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
            self.tree.client.leaves_access_time(open.file.handle);
            Ok(Box::new(open) as Box<dyn HomeReader>)
        })
    }
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>> {
        let path = path.clone();
        self.call(move |tree| async move { tree.stat(&path).await })
    }
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>> {
        let (dir, after) = (dir.clone(), after.map(<[u8]>::to_vec));
        self.call(move |tree| async move { tree.list(&dir, after.as_deref(), limit).await })
    }
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>> {
        let (calls, dir) = (self.calls.clone(), dir.clone());
        Box::pin(async move {
            let lister = self.call(move |tree| async move {
                let ino = tree.dir_at(&dir).await?;
                Ok(WeirLister { calls, tree, dir, ino, cookie: 0 })
            });
            Ok(Box::new(lister.await?) as Box<dyn HomeLister>)
        })
    }
    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>> {
        self.call(|tree| async move {
            let space = tree
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
