//! `s3://bucket/prefix`: a home in a bucket of S3 or a compatible service.
//!
//! The async shell: each call runs on the home's own threads (`lane.rs`), with blocking requests
//! (`client.rs`). Look-ups are in `bucket.rs`, changes of names in `names.rs`, bytes in `data.rs`, keys and
//! parts in `key.rs`, attributes in `meta.rs`.
mod bucket;
mod client;
mod data;
mod key;
mod keys;
mod meta;
mod names;
mod xml;

use crate::{
    Attrs, Expect, Fault, Fingerprint, Found, Home, HomeLane, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, IdMap, LaneLimits, ListEntry, Listing, Make, Outcome, Traits,
};
use bucket::Bucket;
use bytes::Bytes;
use client::Client;
pub use client::map_status;
use data::{S3Reader, S3Writer};
pub use keys::{KeySource, Lender, Token};
use std::{fmt, ops::Range, sync::Arc};
use weir_env::{BoxFuture, Env, Rng};
use weir_proto::meta::FileKind;
use weir_proto::{Error, GIB};

/// The bucket, its relation, and where our keys come from.
#[derive(Clone)]
pub struct S3HomeConfig {
    pub bucket: String,
    /// Prefix of all keys; empty: the whole bucket.
    pub prefix: String,
    /// `https://host` or `http://host:port`.
    pub endpoint: String,
    pub region: String,
    /// The bucket is in the path, not in the host's name.
    pub path_style: bool,
    pub keys: KeySource,
    /// Names the relation, one line; the mark must have the same name.
    pub relation: String,
    /// The relation begins: write the mark if there is none.
    pub is_new: bool,
    /// Nothing is changed there: no mark is written or required.
    pub only_reads: bool,
    pub ids: IdMap,
    pub limits: LaneLimits,
    /// Larger objects are copied in parts (5 GiB is the service's limit; less in tests).
    pub copy_bytes_max: u64,
}

impl S3HomeConfig {
    pub const COPY_BYTES_MAX: u64 = 5 * GIB;
}

/// Omits secrets.
impl fmt::Debug for S3HomeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3HomeConfig(s3://{}/{} at {})", self.bucket, self.prefix, self.endpoint)
    }
}

/// A home in a bucket.
pub struct S3Home {
    url: String,
    ids: IdMap,
    rng: Rng,
    lane: HomeLane,
    bucket: Arc<Bucket>,
}

impl S3Home {
    /// Connects to the bucket and checks (or writes) the mark.
    pub async fn open(env: &Env, config: S3HomeConfig) -> Outcome<S3Home> {
        let prefix = config.prefix.trim_matches('/').to_owned();
        let prefix = if prefix.is_empty() { prefix } else { prefix + "/" };
        let url = format!("s3://{}/{prefix}", config.bucket);
        if config.relation.is_empty() || config.relation.contains('\n') {
            return Err(Fault::Broken(Error::invalid(format!(
                "{url} for relation {:?}: the relation's name must be one line",
                config.relation
            ))));
        }
        let client = Client::new(&config, env.clock.clone(), env.buffers.clone()).map_err(Fault::Broken)?;
        let bucket = Arc::new(Bucket::new(client, prefix, config.copy_bytes_max));
        let lane = HomeLane::new(env, &url, config.limits);
        let opening = bucket.clone();
        let (relation, is_new) = (config.relation, config.is_new);
        let only_reads = config.only_reads;
        let check = move || if only_reads { opening.reach() } else { opening.check_mark(&relation, is_new) };
        lane.run("open", &[], check).await?;
        Ok(S3Home { url, ids: config.ids, rng: env.rng.clone(), lane, bucket })
    }

    async fn call<T: Send + 'static>(
        &self,
        doing: &'static str,
        paths: &[&HomePath],
        work: impl FnOnce(&Arc<Bucket>) -> Outcome<T> + Send + 'static,
    ) -> Outcome<T> {
        let bucket = self.bucket.clone();
        self.lane.run(doing, paths, move || work(&bucket)).await
    }

    fn to_here(&self, found: Found) -> Found {
        let attrs = self.ids.to_here(found.fingerprint.kind, &found.attrs);
        Found { attrs, ..found }
    }
}

impl Home for S3Home {
    fn url(&self) -> &str {
        &self.url
    }
    fn traits(&self) -> Traits {
        Traits {
            owners: true,
            exact_times: false,
            xattrs: true,
            xattr_bytes_max: meta::XATTR_BYTES_MAX,
            path_bytes_max: key::KEY_BYTES_MAX.saturating_sub(self.bucket.prefix().len() + 1),
            acls: true,
            hard_links: false,
            special_files: true,
            growing_prefix: false,
            calls_max: self.lane.calls_max(),
            parallel_writers: false,
            in_place: false,
            holes: false,
            cheap_rename: false,
            strong_fingerprints: true,
        }
    }
    fn lets_through(&self, kind: FileKind) -> bool {
        self.ids.lets_through(kind)
    }
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, what, attrs, id) =
            (path.clone(), what.clone(), self.ids.to_home(what.kind(), attrs), self.rng.id_128());
        let refused = self.ids.require(path, what.kind());
        Box::pin(async move {
            refused?;
            self.call("make", &[path], move |bucket| bucket.make(&p, &what, &attrs, id)).await
        })
    }
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        _expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let error = Error::unsupported(format!(
            "{path}: another name of {existing}, and S3 has no files with several names; it is skipped there"
        ));
        Box::pin(std::future::ready(Err(Fault::Broken(error))))
    }
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>> {
        let (p, x) = (path.clone(), expect.clone());
        Box::pin(async move { self.call("remove", &[path], move |bucket| bucket.remove(&p, &x)).await })
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
            self.call("rename", &[from, to], move |bucket| bucket.rename(&f, &x, &t, r.as_ref())).await
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
        Box::pin(async move {
            self.call("exchange", &[a, b], move |bucket| bucket.exchange(&pa, &xa, &pb, &xb)).await
        })
    }
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, x, attrs) =
            (path.clone(), expect.clone(), self.ids.to_home(expect.fingerprint().kind, attrs));
        Box::pin(async move {
            self.call("set attributes", &[path], move |bucket| bucket.set_attrs(&p, &x, &attrs)).await
        })
    }
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (p, x, lane) = (path.clone(), expect.clone(), self.lane.clone());
        Box::pin(async move {
            self.call("resize", &[path], move |bucket| data::resize(bucket, &lane, &p, &x, size)).await
        })
    }
    /// The service's answers are durable.
    fn settle(&self) -> BoxFuture<'_, Outcome<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn part(&self, offset: u64, _bytes_wanted: u64) -> Range<u64> {
        key::part_at(offset).map_or(offset..u64::MAX, |(_, part)| offset..part.end)
    }
    fn open_write<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeWriter>>> {
        let (p, x, lane, ids) = (path.clone(), expect.clone(), self.lane.clone(), self.ids.clone());
        Box::pin(async move {
            let writer =
                self.call("open", &[path], move |bucket| S3Writer::open(bucket, &lane, &p, &x, ids)).await?;
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
            let reader =
                self.call("open", &[path], move |bucket| S3Reader::open(bucket, &lane, &p, &x)).await?;
            Ok(Box::new(reader) as Box<dyn HomeReader>)
        })
    }
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>> {
        let p = path.clone();
        Box::pin(async move {
            let found = self.call("stat", &[path], move |bucket| bucket.stat(&p)).await?;
            Ok(found.map(|found| self.to_here(found)))
        })
    }
    /// One request for the names, and one or more for each: each with its own deadline.
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>> {
        let (d, after) = (dir.clone(), after.map(<[u8]>::to_vec));
        Box::pin(async move {
            let names = move |bucket: &Arc<Bucket>| bucket.names(&d, after.as_deref(), limit.max(1));
            let (names, end) = self.call("list", &[], names).await?;
            let mut entries = Vec::with_capacity(names.len());
            for name in names {
                let path = dir.join(&name).map_err(Fault::Broken)?;
                if let Some(found) = self.stat(&path).await? {
                    entries.push(ListEntry { name: name.into(), found });
                }
            }
            Ok(Listing { entries, end })
        })
    }
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>> {
        let (ids, rng, url) = (self.ids.clone(), self.rng.clone(), self.url.clone());
        let home = S3Home { url, ids, rng, lane: self.lane.clone(), bucket: self.bucket.clone() };
        let lister = S3Lister { home, dir: dir.clone(), after: None };
        Box::pin(std::future::ready(Ok(Box::new(lister) as Box<dyn HomeLister>)))
    }
    /// A bucket does not report its space.
    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>> {
        Box::pin(std::future::ready(Ok(HomeSpace { total: u64::MAX, free: u64::MAX })))
    }
}

/// The service lists keys in order, starting after any key.
struct S3Lister {
    home: S3Home,
    dir: HomePath,
    after: Option<Bytes>,
}

impl HomeLister for S3Lister {
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>> {
        Box::pin(async move {
            let listing = self.home.list(&self.dir, self.after.as_deref(), limit).await?;
            self.after = listing.entries.last().map(|entry| entry.name.clone()).or(self.after.take());
            Ok(listing)
        })
    }
}
