//! The volume's home in the simulation: real movers that die, a home that fails, freezes and loses data that
//! was not durable; and the oracle: in the end home equals the volume, damage there is never returned as good
//! data, and foreign changes there are kept.
//!
//! Only movers change home before the end, so a divergence is a broken promise.
mod memory;

use crate::Cluster;
use crate::calls::{self, root_cred};
pub use memory::{Change, MemoryHome, Thing};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_client::{Client, NewRelation, OpenMode, VolumeEdit};
use weir_env::{BoxFuture, Env, Rng, sim::World};
use weir_home::mover::{HomeOf, Mover, OpenHome};
use weir_home::{HomePath, Outcome};
use weir_proto::map::Role;
use weir_proto::meta::{FileKind, Time};
use weir_proto::relation::{RelationInfo, RelationState, RelationVerb, Resolution};
use weir_proto::volume::{Quota, TRASH};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result, VolumeId};

pub const URL: &str = "file:///home";
const MOVERS: usize = 2;
/// Longest life of a mover while faults come.
const LIFE_MAX: Duration = Duration::from_secs(8);
const FREEZE_MAX: Duration = Duration::from_secs(15);
/// Everything is at home by then.
const PATIENCE: Duration = Duration::from_secs(300);
const POLL_EVERY: Duration = Duration::from_millis(500);
/// Less than the files of a run take, and than the largest of them alone: the leader frees space all the
/// time, and makes the client that writes a file evict its front.
const LIMIT_BYTES: u64 = 1 << 20;
/// Pause between the single look-ups of a full listing.
const PAUSE: Duration = Duration::from_millis(3);

fn mover_name(n: usize) -> String {
    format!("mover{n}")
}

/// Homes by their URLs.
type Homes = Arc<Mutex<BTreeMap<String, MemoryHome>>>;

struct Opener {
    env: Env,
    homes: Homes,
}

impl OpenHome for Opener {
    fn open(&self, which: &HomeOf) -> BoxFuture<'_, Outcome<Arc<dyn weir_home::Home>>> {
        let home = at(&self.homes, &which.url).open(self.env.clone());
        Box::pin(async { Ok(Arc::new(home) as Arc<dyn weir_home::Home>) })
    }
}

fn at(homes: &Homes, url: &str) -> MemoryHome {
    let homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
    homes.get(url).unwrap_or_else(|| panic!("no relation has a home at {url}")).clone()
}

/// Movers of homes; they die and are restarted.
pub struct Movers {
    world: World,
    cluster: Arc<Cluster>,
    homes: Homes,
}

impl Movers {
    /// Starts all of them.
    pub fn new(world: &World, cluster: &Arc<Cluster>, url: &str, home: &MemoryHome) -> Movers {
        let homes = Arc::new(Mutex::new(BTreeMap::from([(url.to_owned(), home.clone())])));
        let movers = Movers { world: world.clone(), cluster: cluster.clone(), homes };
        (0..MOVERS).for_each(|n| movers.start(n));
        movers
    }
    pub fn some(&self, rng: &Rng) -> usize {
        rng.below(MOVERS as u64) as usize
    }

    pub fn start(&self, n: usize) {
        let (cluster, homes, env) =
            (self.cluster.clone(), self.homes.clone(), self.world.node(&mover_name(n)));
        let node = env.clone();
        env.tasks.spawn("mover", async move {
            let mover = Mover::new(node.clone(), Arc::new(Opener { env: node, homes }));
            loop {
                // It connects when the leader is up again.
                if let Ok(client) = cluster.connect(&mover_name(n), Role::Mover).await {
                    mover.run(&client).await;
                    let _ = client.shutdown().await; // the leader is unreachable
                }
            }
        });
    }

    pub fn kill(&self, n: usize) {
        self.cluster.holder_goes();
        self.world.kill(&mover_name(n));
    }
}

/// Home, its movers, and their results.
pub struct Home {
    world: World,
    cluster: Arc<Cluster>,
    home: MemoryHome,
    movers: Movers,
    pub evictions: AtomicU64,
}

impl Home {
    /// From now on all files of the root volume are shipped home.
    pub async fn begin(world: &World, cluster: &Arc<Cluster>, founder: &Client) -> Result<Arc<Home>> {
        let home = MemoryHome::default();
        home.found();
        let new = NewRelation { url: URL.to_owned(), evict: true, ..NewRelation::default() };
        founder.add_relation(&root_cred(), VolumeId::ROOT, &new).await?;
        limit(founder, Some(LIMIT_BYTES)).await?;
        let movers = Movers::new(world, cluster, URL, &home);
        let (world, cluster) = (world.clone(), cluster.clone());
        Ok(Arc::new(Home { world, cluster, home, movers, evictions: AtomicU64::new(0) }))
    }

    /// Injects faults of home and of movers, and lists everything, until `is_enough`. `mark` records what
    /// begins and ends.
    pub async fn disturb(&self, is_enough: impl Fn() -> bool, mark: impl Fn(&'static str, bool)) {
        let (world, rng) = (&self.world, self.world.rng("home's faults"));
        let pause = |max: Duration| world.sleep(Duration::from_nanos(rng.below(max.as_nanos() as u64)));
        while !is_enough() {
            pause(LIFE_MAX).await;
            let what = rng.below(15);
            let name = FAULTS[[0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5][what as usize]];
            mark(name, true);
            match what {
                0..5 => {
                    let n = self.movers.some(&rng);
                    self.movers.kill(n);
                    pause(Duration::from_secs(2)).await;
                    self.movers.start(n);
                }
                5..7 => {
                    self.home.freeze(true);
                    pause(FREEZE_MAX).await;
                    self.home.freeze(false);
                }
                7..9 => {
                    self.home.fail_one_of(2 + rng.below(20));
                    pause(FREEZE_MAX).await;
                    self.home.fail_one_of(0);
                }
                9 => {
                    // Its disk is that of the movers' machine.
                    (0..MOVERS).for_each(|n| self.movers.kill(n));
                    self.home.power_cut();
                    pause(Duration::from_secs(2)).await;
                    (0..MOVERS).for_each(|n| self.movers.start(n));
                }
                12.. => {
                    if let Err(e) = self.change_other(&rng).await {
                        world.trace(&format!("another home may have come, or gone: {e}"));
                    }
                }
                _ => {
                    let until = world.now() + Duration::from_nanos(rng.below(LIFE_MAX.as_nanos() as u64));
                    // The leader may be down: then the listing is skipped.
                    if let Err(e) = self.list_all(until).await {
                        world.trace(&format!("a listing of everything ended: {e}"));
                    }
                }
            }
            mark(name, false);
        }
    }

    /// The volume gets a second home, or loses it, or that home is paused for a while, or files are evicted
    /// because it has them.
    async fn change_other(&self, rng: &Rng) -> Result<()> {
        let client = self.cluster.admin("changes homes").await?;
        let cred = root_cred();
        match (self.other(&client).await?, rng.below(4)) {
            (None, _) => {
                let url = format!("file:///other{}", self.world.now().0);
                self.world.trace(&format!("another home: {url}"));
                let home = MemoryHome::default();
                home.found();
                self.movers.homes.lock().unwrap_or_else(PoisonError::into_inner).insert(url.clone(), home);
                let new = NewRelation { url, ..NewRelation::default() };
                client.add_relation(&cred, VolumeId::ROOT, &new).await?;
            }
            (Some(other), 0) => {
                client.change_relation(&cred, other.id, RelationVerb::Pause).await?;
                self.world.sleep(Duration::from_nanos(rng.below(LIFE_MAX.as_nanos() as u64))).await;
                client.change_relation(&cred, other.id, RelationVerb::Resume).await?;
            }
            (Some(other), 1) => {
                let first = self.relation(&client, URL).await?;
                let (from, to) = if rng.below(2) == 0 { (other, first) } else { (first, other) };
                self.world.trace(&format!("evicted for {}, not for {}", to.url, from.url));
                client.change_relation(&cred, to.id, RelationVerb::AllowEviction).await?;
                client.change_relation(&cred, from.id, RelationVerb::ForbidEviction).await?;
            }
            (Some(other), _) => {
                self.world.trace(&format!("no more home at {}", other.url));
                match client.change_relation(&cred, other.id, RelationVerb::Remove).await {
                    // It has the only copy of some bytes.
                    Err(e) if may_not_yet(&e) => {}
                    removed => removed?,
                }
            }
        }
        client.shutdown().await
    }

    async fn other(&self, client: &Client) -> Result<Option<RelationInfo>> {
        Ok(client.relations(None).await?.into_iter().find(|info| info.url != URL))
    }

    /// Like `ls -l` of all directories, repeatedly.
    async fn list_all(&self, until: weir_env::Instant) -> Result<()> {
        let client = self.cluster.admin("lists everything").await?;
        while self.world.now() < until {
            let mut dirs = vec![InodeId::ROOT];
            while let Some(dir) = dirs.pop() {
                for name in all_names_in(&client, dir).await? {
                    self.world.sleep(PAUSE).await;
                    let found = client.lookup(&root_cred(), dir, name.as_bytes()).await?;
                    dirs.extend(found.filter(|s| s.attr.kind == FileKind::Directory).map(|s| s.attr.ino));
                }
            }
            self.world.sleep(PAUSE).await;
        }
        client.shutdown().await
    }

    /// Ends automatic eviction.
    pub async fn lift_limit(&self, client: &Client) -> Result<()> {
        limit(client, None).await
    }

    // ---- the oracle

    /// Home equals the volume, also after a foreign change and its resolution.
    pub async fn verify(&self, client: &Client) -> Result<()> {
        self.verify_other(client).await?;
        let files = self.compare(client, URL).await?;
        let rng = self.world.rng("meddling");
        let files: Vec<(InodeId, Vec<HomePath>)> = files.into_iter().collect();
        if files.is_empty() {
            return Ok(());
        }
        let (ino, paths) = &files[rng.below(files.len() as u64) as usize];
        self.damage(client, *ino, paths).await?;
        self.meddle(client).await?;
        self.compare(client, URL).await.map(|_| ())
    }

    async fn verify_other(&self, client: &Client) -> Result<()> {
        // From here on files are evicted on behalf of the first home.
        let (cred, first) = (root_cred(), self.relation(client, URL).await?);
        client.change_relation(&cred, first.id, RelationVerb::AllowEviction).await?;
        let Some(other) = self.other(client).await? else { return Ok(()) };
        // The task that paused it may have been stopped before it resumed it.
        client.change_relation(&cred, other.id, RelationVerb::Resume).await?;
        client.change_relation(&cred, other.id, RelationVerb::ForbidEviction).await?;
        self.compare(client, &other.url).await.map(|_| ())
    }

    /// Checks that home is empty.
    pub async fn verify_empty(&self, client: &Client) -> Result<()> {
        self.verify_other(client).await?;
        let files = self.compare(client, URL).await?;
        assert!(files.is_empty(), "everything was removed, but home has {files:?}");
        Ok(())
    }

    async fn relation(&self, client: &Client, url: &str) -> Result<RelationInfo> {
        let mut relations = client.relations(None).await?.into_iter();
        relations.find(|info| info.url == url).ok_or_else(|| Error::not_found("the relation is gone"))
    }
    async fn wait_synced(&self, client: &Client, url: &str) -> Result<()> {
        let synced = |info: &RelationInfo| {
            assert!(
                info.conflicts.is_empty(),
                "in conflict although no other program changed home: {:?}",
                info.conflicts
            );
            info.state == RelationState::Synced {}
        };
        self.wait_for(client, url, "home is not as the volume is", synced).await.map(|_| ())
    }
    async fn wait_for(
        &self,
        client: &Client,
        url: &str,
        otherwise: &str,
        is_so: impl Fn(&RelationInfo) -> bool,
    ) -> Result<RelationInfo> {
        let deadline = self.world.now() + PATIENCE;
        loop {
            let info = self.relation(client, url).await?;
            if is_so(&info) {
                return Ok(info);
            }
            if self.world.now() > deadline {
                return Err(Error::deadline(format!("{otherwise}: {info:?}")));
            }
            self.world.sleep(POLL_EVERY).await;
        }
    }

    /// A file whose writer died a moment ago equals home as far as it was committed; its end is shipped when
    /// it is recovered.
    async fn wait_settled(&self, client: &Client, url: &str) -> Result<()> {
        let (relation, deadline) = (self.relation(client, url).await?.id, self.world.now() + PATIENCE);
        let apart = volumes_inside(client).await?;
        let mut dirs = vec![(InodeId::ROOT, HomePath::root())];
        while let Some((dir, path)) = dirs.pop() {
            for name in all_names_in(client, dir).await? {
                let path = path.join(name.as_bytes())?;
                let found = client.lookup(&root_cred(), dir, name.as_bytes()).await?;
                let attr = found.unwrap_or_else(|| panic!("{path} was just listed")).attr;
                if apart.contains(&attr.ino) {
                    continue;
                }
                if attr.kind == FileKind::Directory {
                    dirs.push((attr.ino, path));
                    continue;
                }
                while client.where_at_home(attr.ino, Some(relation)).await?.unsettled {
                    assert!(
                        self.world.now() < deadline,
                        "{path}: not all of it is at home after {PATIENCE:?}"
                    );
                    self.world.sleep(POLL_EVERY).await;
                }
            }
        }
        self.wait_synced(client, url).await
    }

    /// Compares names, kinds, sizes, attributes and bytes. Returns the files with their names.
    async fn compare(&self, client: &Client, url: &str) -> Result<BTreeMap<InodeId, Vec<HomePath>>> {
        self.wait_synced(client, url).await?;
        self.wait_settled(client, url).await?;
        let (mut at_home, apart) = (at(&self.movers.homes, url).all(), volumes_inside(client).await?);
        at_home.remove(&HomePath::root());
        let (mut files, mut dirs) = (BTreeMap::<_, Vec<_>>::new(), vec![(InodeId::ROOT, HomePath::root())]);
        while let Some((dir, path)) = dirs.pop() {
            for name in all_names_in(client, dir).await? {
                let path = path.join(name.as_bytes())?;
                let found = client.lookup(&root_cred(), dir, name.as_bytes()).await?;
                let attr = found.unwrap_or_else(|| panic!("{path} was just listed")).attr;
                if apart.contains(&attr.ino) {
                    continue;
                }
                let thing = at_home.remove(&path).unwrap_or_else(|| panic!("home ({url}) has no {path}"));
                let mode = attr.mode & 0o7777;
                assert_eq!((thing.kind, thing.attrs.mode), (attr.kind, mode), "{path} at home ({url})");
                match attr.kind {
                    FileKind::Directory => dirs.push((attr.ino, path)),
                    _ => {
                        let got = calls::read_whole(client, attr.ino).await?;
                        assert!(got == thing.bytes, "{path} at home: {} bytes", differ(&got, &thing.bytes));
                        assert_eq!(thing.attrs.mtime, attr.mtime, "{path} at home: time of its bytes");
                        files.entry(attr.ino).or_default().push(path);
                    }
                }
            }
        }
        assert!(at_home.is_empty(), "only home has {:?}", at_home.keys().collect::<Vec<_>>());
        Ok(files)
    }

    /// Bytes that are only at home, and damaged there, are not returned as good; and they can be read again
    /// when the damage is repaired.
    async fn damage(&self, client: &Client, ino: InodeId, paths: &[HomePath]) -> Result<()> {
        let path = &paths[0];
        let good = calls::read_whole(client, ino).await?;
        let deadline = self.world.now() + PATIENCE;
        let evicted = loop {
            match client.evict(&root_cred(), ino, 0, u64::MAX).await {
                Ok(evicted) => break evicted,
                // The session of a client that died with the file open may end only now; then the file must
                // be read once more.
                Err(e) if may_not_yet(&e) && self.world.now() < deadline => {
                    calls::read_whole(client, ino).await?;
                }
                Err(e) => return Err(e),
            }
            self.world.sleep(POLL_EVERY).await;
        };
        let Some(last) = client.tier_state(ino).await.map(|r| (r.evicted > 0).then(|| r.size - 1))? else {
            assert!(
                evicted.ranges.is_empty(),
                "{path}: nothing is evicted, though {:?} were",
                evicted.ranges
            );
            return Ok(());
        };
        self.world.trace(&format!("damage {path} at home"));
        let flip = |bytes: &mut Vec<u8>| bytes[last as usize] ^= 1;
        self.home.meddle(path, None, flip);
        let reader = self.cluster.admin("reads what is damaged").await?;
        match calls::read_whole(&reader, ino).await {
            Ok(got) => panic!("{path}: read as good, though damaged at home: {}", differ(&got, &good)),
            Err(e) => assert!(
                paths.iter().any(|path| e.to_string().contains(&path.to_string())),
                "{path} is damaged at home, and a reader gets an error: {e}"
            ),
        }
        reader.shutdown().await?;
        self.home.meddle(path, None, flip);
        let deadline = self.world.now() + PATIENCE;
        loop {
            match calls::read_whole(client, ino).await {
                Ok(got) => {
                    assert!(got == good, "{path}: repaired at home, and read: {}", differ(&got, &good));
                    return Ok(());
                }
                Err(e) if self.world.now() > deadline => {
                    return Err(e.doing("read the file that was repaired at home"));
                }
                Err(_) => self.world.sleep(POLL_EVERY).await,
            }
        }
    }

    /// Checks that a foreign change at home is not overwritten before the conflict is resolved.
    async fn meddle(&self, client: &Client) -> Result<()> {
        let (cred, name) = (root_cred(), b"met by a stranger");
        let made = client.create(&cred, InodeId::ROOT, name, 0o644, true, OpenMode::BOTH).await?;
        let (ino, path) = (made.stat.attr.ino, HomePath::root().join(name)?);
        client.write(made.handle, 0, b"as it was made".as_slice().into()).await?;
        calls::close(client, made.handle).await?;
        self.wait_synced(client, URL).await?;
        self.world.trace("a stranger writes to a file at home");
        let at = Time { nanos: self.world.now().0 as i64 };
        self.home.meddle(&path, Some(at), |bytes| bytes.extend_from_slice(b", and a stranger's"));
        let strange = self.home.all()[&path].clone();
        let handle = client.open(&cred, ino, OpenMode::WRITE).await?.handle;
        client.write(handle, 0, b"of the volume".as_slice().into()).await?;
        calls::close(client, handle).await?;
        let wait =
            self.wait_for(client, URL, "a stranger's change was not found", |i| !i.conflicts.is_empty());
        let info = wait.await?;
        let conflicts = &info.conflicts[0];
        assert!(conflicts.ino == ino && conflicts.diverged, "another file is in conflict: {conflicts:?}");
        assert!(self.home.all()[&path] == strange, "what a stranger wrote at home was changed");
        client.resolve(&cred, info.id, ino, Resolution::KeepVolume).await?;
        self.compare(client, URL).await?;
        client.unlink(&cred, InodeId::ROOT, name).await
    }
}

/// Root directories of the volumes inside the one that has the home: they have none.
async fn volumes_inside(client: &Client) -> Result<BTreeSet<InodeId>> {
    let volumes = client.volumes(VolumeId(0)).await?.0;
    Ok(volumes.into_iter().map(|volume| volume.root).filter(|root| *root != InodeId::ROOT).collect())
}

/// With the volume's trash, which is not listed.
async fn all_names_in(client: &Client, dir: InodeId) -> Result<Vec<String>> {
    let mut names = calls::names_in(client, dir).await?;
    if dir == InodeId::ROOT && calls::trash_top(client).await?.is_some() {
        names.push(String::from_utf8_lossy(TRASH).into_owned());
    }
    Ok(names)
}

/// Faults of home and its movers, by name.
pub const FAULTS: [&str; 6] =
    ["mover-dies", "home-freezes", "home-fails", "home-loses-power", "all-are-looked-at", "another-home"];

/// Above this limit the leader evicts. Writes are not refused: it is a soft limit, with a grace period that
/// no jump of a clock ends.
async fn limit(client: &Client, bytes_soft: Option<u64>) -> Result<()> {
    const YEAR_S: u32 = 365 * 24 * 3600;
    let quota = Quota { bytes_soft, grace_s: YEAR_S, ..client.volume("root").await?.quota };
    let edit = VolumeEdit { quota: Some(quota), ..VolumeEdit::default() };
    client.change_volume(&root_cred(), VolumeId::ROOT, &edit).await.map(drop)
}

/// Whether a file cannot be evicted yet, without a fault.
pub fn may_not_yet(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::Name(NameRule::Busy) | ErrorKind::Denied | ErrorKind::Unavailable)
}

/// The first difference between two contents.
fn differ(one: &[u8], other: &[u8]) -> String {
    match one.iter().zip(other).position(|(a, b)| a != b) {
        Some(at) => format!("{} and {}, the first that differs is {at}", one.len(), other.len()),
        None => format!("{} and {}", one.len(), other.len()),
    }
}

impl Home {
    pub fn evicted(&self) {
        self.evictions.fetch_add(1, Relaxed);
    }
}
