//! A volume that mirrors a home which another party changes all the time: clients read it, movers and servers
//! die, and home fails.
//!
//! Oracle: a read returns all of one state that the file had at home, or an error if that state is gone. Only
//! the other party changes home. In the end the volume equals home.

use crate::calls::{is_gone, names_in, new_volume, read_whole, root_cred};
use crate::cluster::Cluster;
use crate::context::Context;
use crate::home::{Change, MemoryHome, Movers, Thing, may_not_yet};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, Handle, NewRelation, OpenMode};
use weir_env::{Rng, sim::World};
use weir_home::HomePath;
use weir_proto::meta::{Attr, FileKind, Time};
use weir_proto::relation::{RelationId, RelationVerb};
use weir_proto::{ErrorKind, InodeId, Result, VolumeId};

/// Its root directory, in the root volume's.
pub const NAME: &str = "replica";
const URL: &str = "file:///elsewhere";
/// A home that suddenly is empty is not trusted.
const ANCHOR: &[u8] = b"anchor";
/// Names in each directory are `n0` and so on.
const NAMES: u64 = 6;
const THINGS_MAX: usize = 24;
const DEPTH_MAX: usize = 3;
const FILE_BYTES_MAX: u64 = 600_000;
const READ_BYTES_MAX: u64 = 100_000;
/// Longest pause between two changes at home.
const PAUSE_MAX: Duration = Duration::from_secs(3);
const FAULT_MAX: Duration = Duration::from_secs(10);
/// A client's patience, and the lease term of a mover that died with the request.
const SILENCE_NOTICED: Duration = Duration::from_secs(40);
const POLL_EVERY: Duration = Duration::from_secs(1);
/// The volume equals home by then.
const PATIENCE: Duration = Duration::from_secs(400);

/// The operation in the table of marks.
pub const COMPARE: &str = "replica comparison";

pub struct Replica {
    world: World,
    root: InodeId,
    volume: VolumeId,
    relation: RelationId,
    home: MemoryHome,
    movers: Movers,
    strangers: Mutex<Strangers>,
    /// Until then, in nanoseconds, a missing reply of home or a mover is excused.
    silent_until: AtomicU64,
}

#[derive(Default)]
struct Strangers {
    /// The content of a file at each time (in nanoseconds) that it was changed.
    states: BTreeMap<i64, Vec<u8>>,
    /// Home after the last change by the other party.
    left: BTreeMap<HomePath, Thing>,
}

impl Replica {
    pub async fn begin(world: &World, cluster: &Arc<Cluster>, founder: &Client) -> Result<Replica> {
        let home = MemoryHome::default();
        home.found();
        let made = founder.create_volume(&root_cred(), &new_volume(NAME)).await?;
        let movers = Movers::new(world, cluster, URL, &home);
        let relation = NewRelation { url: URL.into(), mirrors: true, ..NewRelation::default() };
        let relation = founder.add_relation(&root_cred(), made.id, &relation).await?.id;
        let strangers = Mutex::new(Strangers { left: home.all(), ..Strangers::default() });
        let (root, volume) = (made.root, made.id);
        let replica = Replica {
            world: world.clone(),
            root,
            volume,
            relation,
            home,
            movers,
            strangers,
            silent_until: AtomicU64::new(0),
        };
        let path = HomePath::root().join(ANCHOR)?;
        replica.strange(Change::Write { path, bytes: b"never changed".to_vec() });
        Ok(replica)
    }

    // ---- what happens at home

    /// Makes changes and faults of home and of movers until `is_enough`.
    pub async fn disturb(&self, is_enough: impl Fn() -> bool) {
        let rng = self.world.rng("strangers");
        let pause = |max: Duration| self.world.sleep(Duration::from_nanos(rng.below(max.as_nanos() as u64)));
        while !is_enough() {
            pause(PAUSE_MAX).await;
            let what = rng.below(12);
            if what < 3 {
                self.silent_until.store(u64::MAX, Relaxed);
            }
            match what {
                0 => {
                    let n = self.movers.some(&rng);
                    self.movers.kill(n);
                    pause(FAULT_MAX).await;
                    self.movers.start(n);
                }
                1 => {
                    self.home.freeze(true);
                    pause(FAULT_MAX).await;
                    self.home.freeze(false);
                }
                2 => {
                    self.home.fail_one_of(2 + rng.below(20));
                    pause(FAULT_MAX).await;
                    self.home.fail_one_of(0);
                }
                _ => {
                    for _ in 0..=rng.below(4) {
                        if let Some(change) = self.some_change(&rng) {
                            self.strange(change);
                        }
                    }
                }
            }
            if what < 3 {
                self.silent_until.store((self.world.now() + SILENCE_NOTICED).0, Relaxed);
            }
        }
    }

    fn strange(&self, change: Change) {
        self.world.trace(&format!("at home: {change}"));
        self.check_home();
        let mut strangers = self.strangers();
        // No two changes have the same time.
        let last = strangers.states.keys().next_back().copied().unwrap_or_default();
        let nanos = (last + 1).max(self.world.now().0 as i64);
        self.home.change(Time { nanos }, &change);
        if let Change::Write { bytes, .. } = change {
            strangers.states.insert(nanos, bytes);
        }
        strangers.left = self.home.all();
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn check_home(&self) {
        assert!(self.home.all() == self.strangers().left, "home was changed, and not by a stranger");
    }

    fn some_change(&self, rng: &Rng) -> Option<Change> {
        let all = self.home.all();
        let is_kind = |kind| all.iter().filter(move |(_, thing)| thing.kind == kind).map(|(path, _)| path);
        let some =
            |list: &[&HomePath]| list.get(rng.below(list.len().max(1) as u64) as usize).map(|p| (*p).clone());
        let is_ours = |path: &&HomePath| path.name().is_some_and(|name| name != ANCHOR);
        let files: Vec<_> = is_kind(FileKind::Regular).filter(is_ours).collect();
        let dirs: Vec<_> = is_kind(FileKind::Directory).filter(|dir| dir.names().len() < DEPTH_MAX).collect();
        let things: Vec<_> = all.keys().filter(is_ours).collect();
        let place = some(&dirs)?.join(format!("n{}", rng.below(NAMES)).as_bytes()).expect("a good name");
        let is_free = !all.contains_key(&place);
        let bytes = |len: u64| (0..len).map(|_| rng.next_u64() as u8).collect::<Vec<u8>>();
        let len = rng.below(rng.below(FILE_BYTES_MAX) + 1);
        let old = some(&files);
        Some(match rng.below(12) {
            0..3 if is_free && things.len() < THINGS_MAX => Change::Write { path: place, bytes: bytes(len) },
            3 if is_free && things.len() < THINGS_MAX => Change::MakeDirectory { path: place },
            4..6 => Change::Write { path: old?, bytes: bytes(len) },
            6 => {
                let path = old?;
                let bytes = [&all[&path].bytes[..], &bytes(len / 4)].concat();
                Change::Write { path, bytes }
            }
            7 => {
                let path = old?;
                let kept = all[&path].bytes.len() / 2;
                let bytes = all[&path].bytes[..kept].to_vec();
                Change::Write { path, bytes }
            }
            8 => Change::Remove { path: some(&things)? },
            9 => Change::Mode { path: some(&things)?, mode: 0o700 + rng.below(64) as u32 },
            _ => {
                let from = some(&things)?;
                let to = if rng.below(2) == 0 { place } else { some(&things)? };
                // A file replaces a file, or any entry takes a free name.
                let fits = all.get(&to).is_none_or(|there| {
                    there.kind == FileKind::Regular && all[&from].kind == FileKind::Regular
                });
                (fits && !to.is_within(&from)).then_some(Change::Move { from, to })?
            }
        })
    }

    // ---- what clients see

    /// One operation of a process of client `me`.
    pub async fn step(&self, context: &Context, client: &Client, me: usize, rng: &Rng) {
        let under_way = context.begin(me, COMPARE);
        let excused = context.client_states.excuses_all(me);
        if let Err(e) = self.compare(client, rng).await {
            let silent =
                e.kind == ErrorKind::Deadline && self.world.now().0 < self.silent_until.load(Relaxed);
            let excused = excused || silent;
            context.complain(me, excused, format!("operation {}, c{me}: {COMPARE}", under_way.op), &e);
        }
    }

    /// Walks down to some file, and reads it.
    async fn compare(&self, client: &Client, rng: &Rng) -> Result<()> {
        let (mut dir, mut path) = (self.root, HomePath::root());
        loop {
            let found = match self.some_entry(client, dir, rng).await {
                Err(e) if is_gone(&e) => return Ok(()),
                found => found?,
            };
            let Some((name, attr)) = found else { return Ok(()) };
            path = path.join(name.as_bytes())?;
            if attr.kind == FileKind::Directory {
                dir = attr.ino;
                continue;
            }
            let handle = match client.open(&root_cred(), attr.ino, OpenMode::READ).await {
                Err(e) if is_gone(&e) => return Ok(()),
                opened => opened?.handle,
            };
            let read = self.read(client, handle, &path, &attr, rng).await;
            let _ = client.release(handle).await; // it was only read
            read?;
            if rng.below(4) == 0 {
                match client.evict(&root_cred(), attr.ino, 0, u64::MAX).await {
                    Err(e) if is_gone(&e) || may_not_yet(&e) => {}
                    evicted => drop(evicted?),
                }
            }
            return Ok(());
        }
    }

    async fn some_entry(&self, client: &Client, dir: InodeId, rng: &Rng) -> Result<Option<(String, Attr)>> {
        let mut names = names_in(client, dir).await?;
        if names.is_empty() {
            return Ok(None);
        }
        let name = names.swap_remove(rng.below(names.len() as u64) as usize);
        let found = client.lookup(&root_cred(), dir, name.as_bytes()).await?;
        Ok(found.map(|stat| (name, stat.attr)))
    }

    async fn read(
        &self,
        client: &Client,
        handle: Handle,
        path: &HomePath,
        attr: &Attr,
        rng: &Rng,
    ) -> Result<()> {
        let mut got = Vec::new();
        loop {
            let want = 1 + rng.below(READ_BYTES_MAX) as usize;
            let parts = match client.read(handle, got.len() as u64, want).await {
                Err(_) if !self.is_at_home(path, attr) => return Ok(()),
                parts => parts.map_err(|e| e.doing(format_args!("read {path} ({:?})", attr.ino)))?,
            };
            if parts.iter().all(|part| part.is_empty()) {
                break;
            }
            parts.iter().for_each(|part| got.extend_from_slice(part));
            self.world.sleep(Duration::from_millis(rng.below(50))).await;
        }
        self.check(path, attr, &got);
        Ok(())
    }

    fn is_at_home(&self, path: &HomePath, attr: &Attr) -> bool {
        self.home.all().get(path).is_some_and(|thing| thing.attrs.mtime == attr.mtime)
    }

    fn check(&self, path: &HomePath, attr: &Attr, got: &[u8]) {
        self.world.trace(&format!("{path} ({:?}) was read: {} bytes", attr.ino, got.len()));
        let strangers = self.strangers();
        let state = strangers.states.get(&attr.mtime.nanos);
        let what = format!("{path} ({:?}) of {:?}, {} bytes", attr.ino, attr.mtime, attr.size);
        let state = state.unwrap_or_else(|| panic!("{what}: home never had this state"));
        let differs = state.iter().zip(got).position(|(a, b)| a != b);
        assert!(
            state == got,
            "{what}: {} bytes were read of {}, the first that differs is {differs:?}",
            got.len(),
            state.len()
        );
    }

    // ---- the end

    /// Checks that the volume equals home.
    pub async fn verify(&self, client: &Client, when: &str) -> Result<()> {
        self.check_home();
        let deadline = self.world.now() + PATIENCE;
        loop {
            let differs = match self.difference(client).await {
                Err(e) if is_gone(&e) => format!("{e}"),
                Ok(None) => return Ok(()),
                differs => differs.map_err(|e| e.doing(when))?.unwrap_or_default(),
            };
            assert!(self.world.now() < deadline, "{when}: the replica is not as home is: {differs}");
            self.world.sleep(POLL_EVERY).await;
        }
    }

    async fn difference(&self, client: &Client) -> Result<Option<String>> {
        let mut at_home = self.home.all();
        at_home.remove(&HomePath::root());
        let mut dirs = vec![(self.root, HomePath::root())];
        while let Some((dir, above)) = dirs.pop() {
            for name in names_in(client, dir).await? {
                let path = above.join(name.as_bytes())?;
                let found = client.lookup(&root_cred(), dir, name.as_bytes()).await?;
                let (Some(stat), Some(thing)) = (found, at_home.remove(&path)) else {
                    return Ok(Some(format!("{path} is not in both")));
                };
                let attr = stat.attr;
                if (attr.kind, attr.mode & 0o7777) != (thing.kind, thing.attrs.mode) {
                    return Ok(Some(format!("{path}: {:?}, mode {:o}", attr.kind, attr.mode)));
                }
                if attr.kind == FileKind::Directory {
                    dirs.push((attr.ino, path));
                    continue;
                }
                if (attr.size, attr.mtime) != (thing.bytes.len() as u64, thing.attrs.mtime) {
                    return Ok(Some(format!("{path}: {} bytes of {:?}", attr.size, attr.mtime)));
                }
                let got = read_whole(client, attr.ino).await.map_err(|e| e.doing(&path))?;
                self.check(&path, &attr, &got);
            }
        }
        Ok((!at_home.is_empty()).then(|| format!("only home has {:?}", at_home.keys())))
    }

    pub async fn remove(&self, client: &Client) -> Result<()> {
        client.change_relation(&root_cred(), self.relation, RelationVerb::Remove).await?;
        client.delete_volume(&root_cred(), self.volume, true).await?;
        let deadline = self.world.now() + PATIENCE;
        while client.volumes(VolumeId(0)).await?.0.iter().any(|volume| volume.id == self.volume) {
            assert!(self.world.now() < deadline, "the replica is not removed completely");
            self.world.sleep(POLL_EVERY).await;
        }
        Ok(())
    }
}
