//! Relations at the leader: whatever is done in a volume, and however movers die and retry, home ends as the volume is, and
//! shows on the way only what the volume once was.
//!
//! Home is a model that refuses what a file system would refuse, so an action in the wrong order is an error here.
use crate::common::*;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use weir_env::sim::{SimConfig, World};
use weir_proto::meta::*;
use weir_proto::relation::*;
use weir_proto::volume::VolumeGet;
use weir_proto::{InodeId, VolumeId};

/// Something at home.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Thing {
    kind: FileKind,
    bytes: Vec<u8>,
    mode: u32,
    /// Files with several names are one thing.
    id: u64,
    finished: Option<u64>,
}

/// A home in memory: path → thing.
#[derive(Default, Debug)]
struct Home {
    things: BTreeMap<String, Thing>,
    next: u64,
    actions: u64,
}

fn text(path: &Bytes) -> String {
    String::from_utf8(path.to_vec()).unwrap()
}

impl Home {
    fn parent_is_there(&self, path: &str) {
        if let Some((above, _)) = path.rsplit_once('/') {
            let kind = self.things.get(above).map(|t| t.kind);
            assert_eq!(kind, Some(FileKind::Directory), "{above:?} above {path:?}");
        }
    }
    /// Every action may come twice: its own result is success, anything else in the way is not.
    fn act(&mut self, action: &NameAction) {
        self.actions += 1;
        match action {
            NameAction::Make { path, kind, attrs, .. } => {
                let path = text(path);
                self.parent_is_there(&path);
                if let Some(there) = self.things.get(&path) {
                    assert_eq!(
                        (there.kind, there.bytes.len()),
                        (*kind, 0),
                        "make {path:?} over something else"
                    );
                    return;
                }
                self.next += 1;
                let thing =
                    Thing { kind: *kind, bytes: vec![], mode: attrs.mode, id: self.next, finished: None };
                self.things.insert(path, thing);
            }
            NameAction::Link { from, path, .. } => {
                let thing = self.things.get(&text(from)).expect("what is linked is there").clone();
                self.parent_is_there(&text(path));
                let there = self.things.insert(text(path), thing.clone());
                assert!(there.is_none_or(|t| t.id == thing.id));
            }
            NameAction::Remove { path, .. } => {
                let below = format!("{}/", text(path));
                assert!(
                    !self.things.keys().any(|p| p.starts_with(&below)),
                    "remove {path:?} with something in it"
                );
                self.things.remove(&text(path));
            }
            NameAction::Rename { from, to, replaced, .. } => {
                self.rename(&text(from), &text(to), replaced.is_some())
            }
            NameAction::Exchange { .. } => panic!("this test exchanges nothing"),
            NameAction::Attributes { path, .. } if path.is_empty() => {} // home's root
            NameAction::Attributes { path, attrs, .. } => {
                let mode = attrs.mode;
                self.change(&text(path), |thing| thing.mode = mode);
            }
            NameAction::Resize { path, size, .. } => {
                self.change(&text(path), |thing| thing.bytes.resize(*size as usize, 0));
            }
        }
    }
    fn rename(&mut self, from: &str, to: &str, replaces: bool) {
        let Some(thing) = self.things.remove(from) else {
            assert!(self.things.contains_key(to), "rename of {from:?}, which is not there, to {to:?}");
            return;
        };
        self.parent_is_there(to);
        let there = self.things.insert(to.to_owned(), thing);
        assert!(there.is_none() || replaces, "rename over {to:?}");
        let below = format!("{from}/");
        let moved: Vec<String> = self.things.keys().filter(|p| p.starts_with(&below)).cloned().collect();
        for path in moved {
            let thing = self.things.remove(&path).unwrap();
            self.things.insert(format!("{to}/{}", &path[below.len()..]), thing);
        }
    }
    fn change(&mut self, path: &str, change: impl Fn(&mut Thing)) {
        let id = self.things.get(path).unwrap_or_else(|| panic!("{path:?} is not there")).id;
        self.things.values_mut().filter(|t| t.id == id).for_each(change);
    }
    fn write(&mut self, path: &str, offset: usize, bytes: &[u8]) {
        self.change(path, |thing| {
            assert_eq!(thing.kind, FileKind::Regular);
            if thing.bytes.len() < offset + bytes.len() {
                thing.bytes.resize(offset + bytes.len(), 0);
            }
            thing.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }
}

/// The volume as this test knows it: what clients did.
#[derive(Default)]
struct Volume {
    files: BTreeMap<InodeId, Vec<u8>>,
}

struct Bench {
    client: Client,
    volume: Volume,
    home: Home,
    dirs: Vec<(InodeId, String)>,
    fill: u8,
    relation: Option<RelationId>,
}

/// Names of a directory, as a client sees them.
async fn list(client: &Client, dir: InodeId) -> Vec<ListEntry> {
    let r = ReadDir { session: client.session, dir, after: 0, limit: 1000, with_attrs: true };
    client.call(&r).await.unwrap().entries
}

impl Bench {
    async fn add_relation(&mut self) {
        let volume = VolumeId::ROOT;
        let (op, cred, url) = (self.client.op(), root(), "file:///home".to_owned());
        let r = RelationAdd { op, cred, volume, url, direction: Direction::Push, evict: true };
        self.relation = Some(self.client.call(&r).await.unwrap().id);
    }

    /// Something at random that a user might do.
    async fn use_volume(&mut self, world: &World) {
        let env = world.node("dice");
        let pick = |n: usize| env.rng.below(n as u64) as usize;
        let (dir, _) = self.dirs[pick(self.dirs.len())].clone();
        let entries = list(&self.client, dir).await;
        let name = format!("n{}", pick(6));
        let there = entries.iter().find(|e| text(&e.name) == name).cloned();
        match (pick(12), there) {
            (0..=3, None) => {
                if let Ok(made) = self.client.create(dir, &name).await {
                    let ino = made.entry.attr.ino;
                    self.volume.files.insert(ino, Vec::new());
                    self.write(&made.entry, pick(3)).await;
                    let _ = self.client.close(ino, true).await;
                }
            }
            (4, None) if self.dirs.len() < 8 => {
                if let Ok(made) = self.client.mkdir(dir, &name).await {
                    self.dirs.push((made.entry.attr.ino, name));
                }
            }
            (5, Some(entry)) if entry.kind == FileKind::Regular => {
                self.client.unlink(dir, &name).await.unwrap();
            }
            (5, Some(entry)) => {
                let r = Rmdir { op: self.client.op(), cred: root(), parent: dir, name: b(&name) };
                if self.client.call(&r).await.is_ok() {
                    self.dirs.retain(|(ino, _)| *ino != entry.ino);
                }
            }
            (6..=8, Some(_)) => {
                let (new_parent, _) = self.dirs[pick(self.dirs.len())].clone();
                let new_name = format!("n{}", pick(6));
                let r = Rename {
                    op: self.client.op(),
                    cred: root(),
                    parent: dir,
                    name: b(&name),
                    new_parent,
                    new_name: b(&new_name),
                    mode: RenameMode::Replace,
                };
                let replaced = list(&self.client, new_parent).await;
                let replaced = replaced.into_iter().find(|e| text(&e.name) == new_name);
                if self.client.call(&r).await.is_ok()
                    && let Some(gone) = replaced.filter(|e| e.kind == FileKind::Directory)
                    && !self.still_there(gone.ino).await
                {
                    self.dirs.retain(|(ino, _)| *ino != gone.ino);
                }
            }
            (9, Some(entry)) if entry.kind == FileKind::Regular => {
                let (parent, _) = self.dirs[pick(self.dirs.len())].clone();
                let (op, name) = (self.client.op(), b(&format!("n{}", pick(6))));
                let _ = self.client.call(&Link { op, cred: root(), ino: entry.ino, parent, name }).await;
            }
            (10, Some(entry)) => {
                let (op, mode) = (self.client.op(), Some(0o600 + pick(64) as u32));
                let mut set = set_attr(op, entry.ino);
                set.mode = mode;
                self.client.call(&set).await.unwrap();
            }
            (_, Some(entry)) if entry.kind == FileKind::Regular => self.rewrite(entry.ino, pick(4)).await,
            _ => {}
        }
    }

    async fn still_there(&self, ino: InodeId) -> bool {
        self.client.getattr(ino).await.is_ok()
    }

    async fn rewrite(&mut self, ino: InodeId, how: usize) {
        let opened = self.client.open(ino, true, true).await.unwrap();
        if how == 0 {
            let size = self.volume.files[&ino].len() as u64 / 2;
            let (op, mut set) =
                (self.client.op(), set_attr(Op { session: self.client.session, slot: 0, seq: 1 }, ino));
            (set.op, set.size) = (op, Some(size));
            self.client.call(&set).await.unwrap();
            self.volume.files.get_mut(&ino).unwrap().truncate(size as usize);
        } else {
            self.write(&opened.entry, how).await;
        }
        self.client.close(ino, true).await.unwrap();
    }

    /// New bytes at some place; the commit names them.
    async fn write(&mut self, entry: &Entry, how: usize) {
        if how == 0 {
            return;
        }
        let ino = entry.attr.ino;
        let bytes = self.volume.files.get_mut(&ino).unwrap();
        self.fill = self.fill % 250 + 1;
        let at = if how == 1 { bytes.len() } else { bytes.len() / 2 };
        let len = 10 * how;
        if bytes.len() < at + len {
            bytes.resize(at + len, 0);
        }
        bytes[at..at + len].fill(self.fill);
        let size = bytes.len() as u64;
        let commit = Commit {
            op: self.client.op(),
            ino,
            token_epoch: entry.lease.token_epoch,
            size,
            mtime: Time { nanos: 1 },
            allocated: size,
            inline: None,
            drop_inline: false,
            clean: false,
            close_writes: 0,
            data_end: size,
            turn: false,
            changed: vec![Range { offset: at as u64, len: len as u64 }],
        };
        self.client.call(&commit).await.unwrap();
    }

    /// A mover takes work; does some of it; dies before it tells, or tells.
    async fn ship(&mut self, mover: &mut Client, world: &World, calm: bool) -> bool {
        let dice = world.node("dice");
        let take = TakeWork {
            session: mover.session,
            leader: 0,
            bytes: 64,
            items: 8,
            wait_ms: 0,
            limited_by: String::new(),
        };
        let work = mover.call(&take).await.unwrap();
        let Some(work) = work.relations.into_iter().next() else { return false };
        let dies = !calm && dice.rng.below(6) == 0;
        let (mut names, mut extents) = (Vec::new(), Vec::new());
        for item in &work.names {
            if dies && dice.rng.below(2) == 0 {
                continue;
            }
            self.home.act(&item.action);
            names.push(NameDone {
                number: item.number,
                outcome: Outcome::Done { stamp: Bytes::from_static(b"s") },
            });
        }
        for item in &work.extents {
            if dies && dice.rng.below(2) == 0 {
                continue;
            }
            let mut outcome = Outcome::Done { stamp: Bytes::from_static(b"s") };
            if let Some(finish) = &item.finish {
                let size = finish.size;
                self.home.change(&text(&item.path), |thing| thing.finished = Some(size));
            } else if let Some(bytes) = self.volume.files.get(&item.ino) {
                let end = ((item.offset + item.len) as usize).min(bytes.len());
                let part = bytes.get(item.offset as usize..end).unwrap_or_default().to_vec();
                self.home.write(&text(&item.path), item.offset as usize, &part);
                let home = &self.home.things[&text(&item.path)];
                assert!(home.bytes.len() >= end, "a hole before {end}");
            } else {
                outcome = Outcome::Moved {};
            }
            let finished = item.finish.is_some();
            let (ino, offset, len) = (item.ino, item.offset, item.len);
            extents.push(ExtentDone { ino, offset, len, finished, sums: vec![0], outcome });
        }
        if dies {
            mover.call(&SessionClose { session: mover.session }).await.unwrap();
            *mover = Client::start(world, "mover").await;
        } else {
            let done = WorkDone { session: mover.session, relation: work.relation, names, extents };
            mover.call(&done).await.unwrap();
        }
        true
    }

    /// The volume as it is: path → (kind, bytes, mode, inode).
    async fn tree(&self) -> BTreeMap<String, (FileKind, Vec<u8>, u32, InodeId)> {
        let (mut tree, mut queue) = (BTreeMap::new(), vec![(ROOT, String::new())]);
        while let Some((dir, path)) = queue.pop() {
            for entry in list(&self.client, dir).await {
                let path =
                    if path.is_empty() { text(&entry.name) } else { format!("{path}/{}", text(&entry.name)) };
                let mode = self.client.getattr(entry.ino).await.unwrap().attr.mode;
                let bytes = self.volume.files.get(&entry.ino).cloned().unwrap_or_default();
                if entry.kind == FileKind::Directory {
                    queue.push((entry.ino, path.clone()));
                }
                tree.insert(path, (entry.kind, bytes, mode, entry.ino));
            }
        }
        tree
    }

    async fn assert_same(&self) {
        let tree = self.tree().await;
        let here: Vec<&String> = tree.keys().collect();
        let there: Vec<&String> = self.home.things.keys().collect();
        assert_eq!(here, there);
        let (mut of_inode, mut of_id) = (BTreeMap::new(), BTreeMap::new());
        for (path, (kind, bytes, mode, ino)) in &tree {
            let home = &self.home.things[path];
            assert_eq!((home.kind, home.mode), (*kind, *mode), "{path}");
            assert_eq!(&home.bytes, bytes, "{path}");
            if *kind == FileKind::Regular {
                assert_eq!(home.finished, Some(bytes.len() as u64), "{path}");
            }
            assert_eq!(of_inode.entry(*ino).or_insert(home.id), &home.id, "{path} is another file at home");
            assert_eq!(of_id.entry(home.id).or_insert(*ino), ino, "{path} is two files here");
        }
    }
}

fn set_attr(op: Op, ino: InodeId) -> SetAttr {
    SetAttr { op, cred: root(), ino, mode: None, uid: None, gid: None, size: None, atime: None, mtime: None }
}

/// `before`: so much is done before the relation is made. Tells how many actions home saw.
fn play(seed: u64, before: usize, steps: usize) -> u64 {
    println!("seed {seed}");
    let world = World::new(seed, SimConfig::default());
    let actions = Arc::new(Mutex::new(0));
    let counted = actions.clone();
    world.run({
        let world = world.clone();
        async move {
            let _meta = start(&world).await;
            let client = Client::start(&world, "user").await;
            let mut mover = Client::start(&world, "mover").await;
            let dirs = vec![(ROOT, String::new())];
            let (volume, home) = (Volume::default(), Home::default());
            let mut bench = Bench { client, volume, home, dirs, fill: 0, relation: None };
            for _ in 0..before {
                bench.use_volume(&world).await;
            }
            bench.add_relation().await;
            let dice = world.node("dice");
            for _ in 0..steps {
                bench.use_volume(&world).await;
                while dice.rng.below(3) == 0 {
                    bench.ship(&mut mover, &world, false).await;
                }
            }
            let quiet = dice.clock.now() + PATIENCE;
            while dice.clock.now() < quiet {
                while bench.ship(&mut mover, &world, true).await {}
                let r = RelationList { session: bench.client.session, volume: None };
                let info = bench.client.call(&r).await.unwrap().relations.remove(0);
                assert_eq!(info.aside, []);
                if info.state == (RelationState::Synced {}) {
                    break;
                }
                dice.clock.sleep(std::time::Duration::from_millis(100)).await;
            }
            bench.assert_same().await;
            *counted.lock().unwrap() = bench.home.actions;
        }
    });
    *actions.lock().unwrap()
}

fn home_ends_right(seeds: std::ops::Range<u64>) {
    let count = seeds.end - seeds.start;
    let actions: u64 = seeds.map(|seed| play(seed, 0, 60)).sum();
    assert!(actions > count * 20, "home saw only {actions} actions");
}

#[test]
fn home_ends_as_the_volume_is_whatever_happens() {
    home_ends_right(0..40);
}
#[test]
fn a_volume_that_was_there_before_is_brought_home_while_it_changes() {
    for seed in 1000..1040 {
        play(seed, 80, 40);
    }
}
#[test]
#[ignore = "long: 10,000 seeds"]
fn home_ends_as_the_volume_is_long() {
    home_ends_right(0..5000);
    for seed in 1000..6000 {
        play(seed, 80, 40);
    }
}

#[test]
fn changes_are_numbered_and_kept_until_every_follower_has_them() {
    let world = World::new(7, SimConfig::default());
    world.run({
        let world = world.clone();
        async move {
            let _meta = start(&world).await;
            let client = Client::start(&world, "user").await;
            let (volume, cursor) = (VolumeId::ROOT, "analysis".to_owned());
            let get = VolumeGet { session: client.session, name: "root".into() };
            assert_eq!(client.call(&get).await.unwrap().id, volume);
            client.mkdir(ROOT, "unheard").await.unwrap();
            let ack = |op, upto| AckChanges { op, cred: root(), volume, cursor: cursor.clone(), upto };
            client.call(&ack(client.op(), 0)).await.unwrap();
            client.mkdir(ROOT, "heard").await.unwrap();
            let read = |cursor: Option<String>, after| ReadChanges {
                session: client.session,
                cred: root(),
                volume,
                cursor,
                after,
                limit: 10,
                wait_ms: 1000,
            };
            for _ in 0..2 {
                let changes = client.call(&read(Some(cursor.clone()), 0)).await.unwrap();
                let numbers: BTreeSet<u64> = changes.changes.iter().map(|c| c.change.number).collect();
                assert_eq!(numbers, [1].into(), "the same until it is acknowledged");
            }
            client.call(&ack(client.op(), 1)).await.unwrap();
            assert_eq!(client.call(&read(Some(cursor.clone()), 0)).await.unwrap().changes, []);
            client.mkdir(ROOT, "again").await.unwrap();
            let changes = client.call(&read(Some(cursor.clone()), 0)).await.unwrap().changes;
            assert!(matches!(&changes[0].change.what, What::Made { name, .. } if name == "again"));
        }
    });
}
