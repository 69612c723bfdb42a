//! The applications of the simulation, and the check of every reply.
//!
//! Three kinds of files. *Turn* files are used by every client, one operation at a time (an application-level
//! lock), so the model is exact: every reply to a client must be the result of the last operation of any
//! client. *Shared* files are written by all clients concurrently, each in its own records. Small files: see
//! [`crate::small_files`]. Changes of a client that died or was cut off are in doubt until a client reads the
//! file: see the model. An error without an excuse is a broken promise.

use crate::burst::{self, Bursts};
use crate::calls::{close, names_in, read_all, read_whole, root_cred};
use crate::client_states::ClientStates;
use crate::context::{Context, DIRS};
use crate::home::Home;
use crate::limits::Limits;
use crate::locks::Counters;
use crate::model::{What, bytes_of};
use crate::oracles::work::Asked;
use crate::replica::Replica;
use crate::shared_file::{RECORDS, SharedFile, check_own_record};
use crate::small_files::SmallFiles;
use crate::trash::Trash;
use crate::tree::SharedTree;
use crate::turn::{SETTLE_POLL, Turn};
use crate::turn_file::{Slot, TurnFile};
use crate::{FaultKind, replica, trash, tree};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode};
use weir_env::Rng;
use weir_env::sim::World;
use weir_proto::meta::{FileKind, Usage};
use weir_proto::{Error, InodeId};

/// Applications of one client: two on turn files, one on shared files, two on small files, two that count
/// under locks, one on the tree, one that reads a replica, one in volumes with limits.
const APPS: usize = 10;
const ON_SHARED_FILES: usize = 2;
const ON_SMALL_FILES: std::ops::Range<usize> = 3..5;
const ON_TREE: usize = 7;
const ON_REPLICA: usize = 8;
const ON_LIMITS: usize = 9;

const USAGE_POLLS: u32 = 60;

/// State shared by the clients, and their findings.
pub struct Workload {
    pub context: Context,
    slots: Vec<tokio::sync::Mutex<Slot>>,
    shared: Vec<SharedFile>,
    pub small_files: SmallFiles,
    counters: Option<Counters>,
    pub tree: Option<SharedTree>,
    pub trash: Option<Trash>,
    replica: Option<Arc<Replica>>,
    pub limits: Option<Limits>,
    pub bursts: Option<Arc<Bursts>>,
    has_clones: bool,
    /// Remaining operations of each client's applications.
    left: Vec<[AtomicU64; APPS]>,
}

impl Workload {
    /// Makes directories and shared files.
    pub async fn prepare(
        world: &World,
        client: &Client,
        client_states: &Arc<ClientStates>,
        options: &crate::Options,
        home: Option<Arc<Home>>,
        replica: Option<Arc<Replica>>,
    ) -> Result<Workload, Error> {
        let cred = root_cred();
        let mut dirs = vec![InodeId::ROOT];
        for n in 1..DIRS {
            dirs.push(client.mkdir(&cred, InodeId::ROOT, format!("d{n}").as_bytes(), 0o755).await?.attr.ino);
        }
        let rng = world.rng("shared files");
        let mut shared = Vec::new();
        for n in 0..2 {
            let name = format!("shared{n}");
            let opened =
                client.create(&cred, InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::WRITE).await?;
            close(client, opened.handle).await?;
            let record_bytes = 1 + rng.below(60_000) as usize;
            let models = (0..options.clients).map(|_| Mutex::default()).collect();
            let (ino, lossy) = (opened.stat.attr.ino, AtomicBool::new(false));
            shared.push(SharedFile { name, ino, record_bytes, models, lossy });
        }
        let counters =
            if options.locks { Some(Counters::prepare(world, client, client_states).await?) } else { None };
        let tree = if options.tree { Some(SharedTree::prepare(client).await?) } else { None };
        let trash = if options.trash { Some(Trash::begin(world, client, options).await?) } else { None };
        let bursts = match options.faults.contains(&FaultKind::Burst) {
            true => Some(Bursts::prepare(world, client, client_states, options.clients).await?),
            false => None,
        };
        let counts = if options.locks { options.operations / 2 + 1 } else { 0 };
        let all = options.operations;
        let each = [
            all,
            all,
            all / 10 + 1,
            all / 2 + 1,
            all / 2 + 1,
            counts,
            counts,
            if options.tree { all } else { 0 },
            if replica.is_some() { all } else { 0 },
            if options.limits { all } else { 0 },
        ];
        Ok(Workload {
            context: Context::new(world, client_states, home, dirs, options.pause_ms_max * 1000),
            slots: (0..options.files).map(|_| Default::default()).collect(),
            shared,
            small_files: SmallFiles::new(world, client_states, options.clients * ON_SMALL_FILES.len()),
            counters,
            tree,
            trash,
            replica,
            limits: options.limits.then(|| Limits::new(world, options.snapshots, options.scheme)),
            bursts,
            has_clones: options.clones,
            left: (0..options.clients).map(|_| each.map(AtomicU64::new)).collect(),
        })
    }

    /// Applications of each client in this run.
    pub fn apps(&self) -> impl Iterator<Item = usize> {
        let (counts, on_tree) = (self.counters.is_some(), self.tree.is_some());
        let (on_replica, on_limits) = (self.replica.is_some(), self.limits.is_some());
        (0..APPS).filter(move |app| match *app {
            ON_TREE => on_tree,
            ON_REPLICA => on_replica,
            ON_LIMITS => on_limits,
            app => counts || app < ON_SMALL_FILES.end,
        })
    }
    pub fn operations(&self) -> u64 {
        self.context.found().operations
    }
    pub fn asked(&self) -> Asked {
        let of_bursts = self.bursts.as_ref().map_or(0, |bursts| bursts.begun());
        Asked { operations: self.operations(), of_bursts }
    }
    /// Errors without an excuse.
    pub fn errors(&self) -> Vec<String> {
        self.context.found().errors.clone()
    }
    pub fn excused(&self) -> u64 {
        self.context.found().excused
    }
    pub fn is_done(&self) -> bool {
        self.left.iter().flatten().all(|left| left.load(Relaxed) == 0)
    }

    pub fn uses_limits(&self) -> bool {
        self.left.iter().any(|left| left[ON_LIMITS].load(Relaxed) > 0)
    }

    /// All turn files; while they are held no client uses them.
    pub async fn all_slots(&self) -> Vec<tokio::sync::MutexGuard<'_, Slot>> {
        let mut slots = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            slots.push(slot.lock().await);
        }
        slots
    }
    pub fn shared_files(&self) -> impl Iterator<Item = (String, InodeId)> {
        self.shared.iter().map(|file| (file.name.clone(), file.ino))
    }

    /// Takes one of the remaining operations.
    fn take_one(&self, me: usize, app: usize) -> bool {
        self.left[me][app].fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok()
    }

    /// Runs an application of client `me`, from where it was when its process died.
    pub async fn use_files(self: Arc<Self>, client: Client, me: usize, app: usize, rng: Rng) {
        while self.left[me][app].load(Relaxed) > 0 {
            client.check();
            if app < ON_SHARED_FILES {
                self.use_turn_file(&client, me, app, &rng).await;
            } else if ON_SMALL_FILES.contains(&app) {
                let process = me * ON_SMALL_FILES.len() + app - ON_SMALL_FILES.start;
                self.small_files.step(&self.context, &client, me, process, &rng).await;
                self.take_one(me, app);
            } else if let Some(tree) = self.tree.as_ref().filter(|_| app == ON_TREE) {
                self.context.rest(&rng).await;
                tree.step(&self.context, &client, me, &rng).await;
                self.take_one(me, app);
            } else if let Some(replica) = self.replica.as_ref().filter(|_| app == ON_REPLICA) {
                self.context.rest(&rng).await;
                replica.step(&self.context, &client, me, &rng).await;
                self.take_one(me, app);
            } else if let Some(limits) = self.limits.as_ref().filter(|_| app == ON_LIMITS) {
                self.context.rest(&rng).await;
                limits.step(&self.context, &client, me, &rng).await;
                self.take_one(me, app);
            } else if let Some(counters) = self.counters.as_ref().filter(|_| app > ON_SHARED_FILES) {
                self.context.rest(&rng).await;
                counters.step(&self.context, &client, me, &rng).await;
                self.take_one(me, app);
            } else {
                for file in &self.shared {
                    self.use_shared_file(file, &client, me, &rng).await;
                }
                self.take_one(me, app);
            }
        }
    }

    async fn use_turn_file(&self, client: &Client, me: usize, app: usize, rng: &Rng) {
        self.context.rest(rng).await;
        let mut slot = self.slots[rng.below(self.slots.len() as u64) as usize].lock().await;
        if !self.take_one(me, app) {
            return;
        }
        let operation = Turn::choose(&slot, rng, self.context.home.is_some());
        let mut other = None;
        if operation == "rename" {
            // Unless a client uses it.
            other = self.slots[rng.below(self.slots.len() as u64) as usize].try_lock().ok();
        }
        let under_way = self.context.begin(me, operation);
        let op = under_way.op;
        let turn = Turn { work: self, client, me: self.context.client_states.who(me), rng, op };
        let excused = turn.is_excused(&slot);
        let done = turn.take(&mut slot, operation, other.as_deref_mut()).await;
        under_way.check_time(operation);
        if let Err((what, e)) = done {
            self.context.complain(me, excused, format!("operation {op}, c{me}: {what}"), &e);
            turn.after_error(&mut slot).await;
        }
    }

    /// Writes and reads records of its own, concurrently with others.
    async fn use_shared_file(&self, file: &SharedFile, client: &Client, me: usize, rng: &Rng) {
        let excused = self.context.client_states.excuses_all(me);
        let opened = client.open(&root_cred(), file.ino, OpenMode::BOTH).await;
        let done = match opened {
            Err(e) => Err(e),
            Ok(opened) => {
                let done = self.share(client, file, me, rng, opened.handle).await;
                let released = client.release(opened.handle).await;
                done.and(released)
            }
        };
        if let Err(e) = done {
            self.context.complain(me, excused, format!("c{me}, {}", file.name), &e);
            file.model(me).doubt(me);
        }
    }

    async fn share(
        &self,
        client: &Client,
        file: &SharedFile,
        me: usize,
        rng: &Rng,
        handle: Handle,
    ) -> Result<(), Error> {
        let who = self.context.client_states.who(me);
        if self.context.is_doubtful(&file.model(me)) {
            // Bytes that an earlier process wrote past the end appear when another client extends the file.
            let is_on_its_way =
                || file.model(me).is_on_its_way(|who| self.context.client_states.is_leaving(who));
            while self.context.client_states.is_broken() || is_on_its_way() {
                self.context.world.sleep(SETTLE_POLL).await;
            }
            file.settle(client, handle, me, who).await?;
        }
        let clients = file.models.len() as u64;
        for _ in 0..5 {
            self.context.world.sleep(Duration::from_micros(rng.below(self.context.pause_us_max / 2))).await;
            let record = rng.below(RECORDS / clients) * clients + me as u64;
            let offset = record * file.record_bytes as u64;
            let is_write = rng.below(3) > 0;
            let under_way = self.context.begin(me, if is_write { "shared-write" } else { "shared-read" });
            let op = under_way.op;
            if is_write {
                let len = 1 + rng.below(file.record_bytes as u64);
                let at = offset + rng.below(file.record_bytes as u64 - len + 1);
                self.context.log(op, format_args!("c{me} {} write {len} at {at}", file.name));
                file.model(me).begin(who, op, What::Write { offset: at, len });
                client.write(handle, at, bytes_of(op, at, len as usize).into()).await?;
                file.model(me).done(op);
            } else {
                let got = read_all(client, handle, offset, file.record_bytes).await?;
                self.context.log(op, format_args!("c{me} {} read {} at {offset}", file.name, got.len()));
                // This client's writes from before it was cut off may disappear at any time, until it gets an
                // error.
                let model = file.model(me);
                if !self.context.is_doubtful(&model) {
                    check_own_record(&model, offset, file.record_bytes, &got)
                        .unwrap_or_else(|e| panic!("operation {op}: c{me} {}: {e}", file.name));
                }
            }
            under_way.check_time("a shared file");
        }
        if rng.below(2) == 0 {
            client.flush(handle).await?;
        }
        client.fsync(handle).await?;
        file.model(me).synced(me);
        Ok(())
    }

    /// Closes every file; an error here is one that `close` reported.
    pub async fn close_all(&self) {
        let nameless = std::mem::take(&mut self.context.found().nameless);
        for mut file in nameless {
            self.close_everywhere(&mut file).await;
        }
        for slot in &self.slots {
            let mut slot = slot.lock().await;
            if let Some(file) = &mut slot.file {
                self.close_everywhere(file).await;
            }
        }
        if let Some(limits) = &self.limits {
            limits.close_all(&self.context).await;
        }
    }
    /// Closes a file at every client that is alive.
    pub async fn close_everywhere(&self, file: &mut TurnFile) {
        {
            for (me, (handle, who)) in std::mem::take(&mut file.handles) {
                let Some(client) = self
                    .context
                    .client_states
                    .client(me)
                    .filter(|_| self.context.client_states.is_alive(who))
                else {
                    continue;
                };
                let excused = who.cuts != self.context.client_states.cuts(me);
                match close(&client, handle).await {
                    Ok(()) => file.closed(who),
                    Err(e) => {
                        self.context.complain(
                            me,
                            excused,
                            format!("c{me}: close {} at the end", file.name),
                            &e,
                        );
                        file.reported(me);
                    }
                }
            }
        }
    }

    /// Checks every name and every byte, as seen by `client` (which has nothing cached).
    pub async fn verify(&self, client: &Client, when: &str) -> Result<(), Error> {
        for slot in &self.slots {
            let mut slot = slot.lock().await;
            self.abandon_if_moving(&mut slot);
            let Some(file) = &mut slot.file else { continue };
            let what = format!("{when}: {} ({:?})", file.name, file.ino);
            let found =
                client.lookup(&root_cred(), self.context.dirs[file.dir], file.name.as_bytes()).await?;
            let Some(stat) = found else { panic!("{what}: the name is gone") };
            assert_eq!(stat.attr.ino, file.ino, "{what}: another file");
            let got = read_whole(client, file.ino).await.map_err(|e| e.doing(&what))?;
            assert_eq!(stat.attr.size, got.len() as u64, "{what}: size");
            if self.context.is_doubtful(&file.model) {
                file.model
                    .settle(ClientStates::no_client(), &got, None)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            file.model.check(0, got.len() + 1, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        for file in &self.shared {
            let what = format!("{when}: {} ({:?})", file.name, file.ino);
            let got = read_whole(client, file.ino).await.map_err(|e| e.doing(&what))?;
            file.verify(&got, |model| self.context.is_doubtful(model))
                .unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        if let Some(counters) = &self.counters {
            counters.verify(client, when).await?;
        }
        self.small_files.verify(&self.context, client, when).await?;
        if let Some(tree) = &self.tree {
            tree.verify(&self.context, client, when).await?;
        }
        if let Some(trash) = &self.trash {
            trash.verify(&self.context, client, when).await?;
        }
        if let Some(replica) = &self.replica {
            replica.verify(client, when).await?;
        }
        if let Some(limits) = &self.limits {
            limits.verify(client, when).await?;
        }
        if let Some(bursts) = &self.bursts {
            bursts.verify(client, when).await?;
        }
        self.verify_names(client, when).await?;
        crate::owners::check_sums(client, when).await?;
        // With a home, requested bytes are still recalled, deleted volumes disappear, and so do entries of
        // the trash and of the mirror: the usage changes while it is added up.
        let has_home = self.context.home.is_some() || self.replica.is_some();
        let has_volumes = self.has_clones || self.limits.is_some();
        let changes = has_home || has_volumes || self.trash.is_some();
        let polls = if changes { USAGE_POLLS } else { 1 };
        for _ in 1..polls {
            if self.usage_differs(client).await?.is_none() {
                return Ok(());
            }
            self.context.world.sleep(Duration::from_secs(1)).await;
        }
        match self.usage_differs(client).await? {
            None => Ok(()),
            Some(how) => panic!("{when}: {how}"),
        }
    }

    /// The client that was about to rename it died: its name is unknown.
    pub fn abandon_if_moving(&self, slot: &mut Slot) {
        if let Some(file) = slot.file.take_if(|file| file.moving) {
            self.context.found().uncertain.insert((file.dir, file.name));
        }
    }

    async fn verify_names(&self, client: &Client, when: &str) -> Result<(), Error> {
        let mut expected: BTreeSet<(usize, String)> = (1..DIRS).map(|n| (0, format!("d{n}"))).collect();
        expected.extend(self.shared.iter().map(|f| (0, f.name.clone())));
        expected.extend(self.counters.iter().flat_map(Counters::all).map(|c| (0, c.name.clone())));
        expected.extend(self.small_files.names().await);
        expected.extend(self.tree.iter().map(|_| (0, tree::NAME.to_owned())));
        expected.extend(self.replica.iter().map(|_| (0, replica::NAME.to_owned())));
        expected.extend(self.bursts.iter().map(|_| (0, burst::NAME.to_owned())));
        expected.extend(self.context.volumes().keys().map(|name| (0, name.clone())));
        for slot in &self.slots {
            if let Some(file) = &slot.lock().await.file {
                expected.insert((file.dir, file.name.clone()));
            }
        }
        let mut found = BTreeSet::new();
        for (n, dir) in self.context.dirs.iter().enumerate() {
            for name in names_in(client, *dir).await? {
                assert!(found.insert((n, name.clone())), "{when}: {name} is listed twice");
            }
        }
        let uncertain = self.context.found().uncertain.clone();
        found.retain(|name| !uncertain.contains(name));
        expected.retain(|name| !uncertain.contains(name));
        assert_eq!(found, expected, "{when}: names");
        Ok(())
    }

    /// The recursive usage of each directory must be the sum of its entries; otherwise returns the
    /// difference.
    async fn usage_differs(&self, client: &Client) -> Result<Option<String>, Error> {
        let (mut below, mut away) = (std::array::from_fn::<_, DIRS, _>(|_| Usage::default()), Vec::new());
        for (n, dir) in self.context.dirs.iter().enumerate() {
            for name in names_in(client, *dir).await? {
                let stat = client.lookup(&root_cred(), *dir, name.as_bytes()).await?;
                let attr = stat.unwrap_or_else(|| panic!("{name} was just listed")).attr;
                if attr.kind != FileKind::Directory {
                    // A file with unknown outcome is never read: it may still be evicted. No cache is
                    // notified of recalled bytes.
                    let evicted = client.tier_state(attr.ino).await?.evicted;
                    let below = &mut below[n];
                    below.bytes += attr.allocated.saturating_sub(evicted);
                    below.evicted += evicted;
                    below.files += 1;
                    away.extend((evicted > 0).then_some((name, attr.ino, evicted)));
                }
            }
        }
        let mut all = self.usage_of_others(client).await?;
        all.directories += DIRS as u64 - 1;
        below.iter().for_each(|dir| add(&mut all, dir));
        below[0] = all;
        for (dir, expected) in self.context.dirs.iter().zip(below) {
            let reported = client.usage(*dir).await?;
            if reported != expected {
                return Ok(Some(format!(
                    "usage of directory {dir} is {reported:?}, its files have {expected:?}; away: {away:?}"
                )));
            }
        }
        Ok(None)
    }

    /// Removes all files.
    pub async fn remove_all(&self, client: &Client) -> Result<(), Error> {
        if let Some(trash) = &self.trash {
            trash.end(client).await?;
        }
        if let Some(replica) = &self.replica {
            replica.remove(client).await?;
        }
        if let Some(limits) = &self.limits {
            limits.remove_all(&self.context, client).await?;
        }
        for dir in &self.context.dirs {
            for name in names_in(client, *dir).await? {
                let stat = client.lookup(&root_cred(), *dir, name.as_bytes()).await?;
                if stat.is_some_and(|stat| stat.attr.kind != FileKind::Directory) {
                    client.unlink(&root_cred(), *dir, name.as_bytes()).await?;
                }
            }
        }
        if let Some(tree) = &self.tree {
            tree.remove_all(client).await?;
        }
        if let Some(bursts) = &self.bursts {
            bursts.remove_all(client).await?;
        }
        let (left, others) = (client.usage(InodeId::ROOT).await?, self.usage_of_others(client).await?);
        assert_eq!((left.bytes, left.files), (others.bytes, others.files), "everything was removed");
        Ok(())
    }

    /// The usage of the tree, the trash, the replica and other volumes, with their root directories.
    async fn usage_of_others(&self, client: &Client) -> Result<Usage, Error> {
        let mut roots: Vec<InodeId> = self.context.volumes().values().copied().collect();
        roots.extend(self.tree.as_ref().map(|tree| tree.root));
        // After their removal there are none.
        let bursts = self.bursts.iter().map(|_| burst::NAME);
        for name in [replica::NAME].into_iter().chain(bursts) {
            let found = client.lookup(&root_cred(), InodeId::ROOT, name.as_bytes()).await?;
            roots.extend(found.map(|stat| stat.attr.ino));
        }
        let mut sum = trash::usage(client).await?;
        for root in roots {
            add(&mut sum, &client.usage(root).await?);
            sum.directories += 1;
        }
        Ok(sum)
    }
}

fn add(sum: &mut Usage, used: &Usage) {
    sum.bytes += used.bytes;
    sum.files += used.files;
    sum.directories += used.directories;
    sum.evicted += used.evicted;
}
