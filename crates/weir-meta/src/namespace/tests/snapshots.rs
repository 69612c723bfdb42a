//! Snapshots compared with a simple model: a copy of everything, made at the time. Data is a number for each
//! stripe of each object.
use super::super::objects::references;
use super::*;
use crate::record::StripeTruncation;
use weir_proto::recall::{ByteRange, Evict, Filled};
use weir_proto::snapshot::*;
use weir_proto::volume::SnapshotRetention;

pub const STRIPE: u64 = 4 << 20;
const PLACES: [&str; 4] = ["a", "b", "c", "d"];

/// The visible state of one inode in a tree.
#[derive(Clone, PartialEq, Debug)]
struct Thing {
    attr: Attr,
    names: Vec<Bytes>,
    inline: Option<Bytes>,
    stripes: Vec<u64>,
}
type Tree = BTreeMap<String, Thing>;

pub struct Model {
    pub w: World,
    /// Data on targets: by object and stripe.
    pub cells: BTreeMap<(InodeId, u64), u64>,
    /// Home's data of each file's evicted stripes.
    pub home: BTreeMap<(InodeId, u64), u64>,
    next: u64,
    /// By number: name and content.
    taken: BTreeMap<u32, (String, Tree)>,
    /// Files that another session has open, including those without a name.
    open: Vec<InodeId>,
}

impl Model {
    pub fn new() -> Model {
        Model {
            w: World::new(),
            cells: BTreeMap::new(),
            home: BTreeMap::new(),
            next: 0,
            taken: BTreeMap::new(),
            open: Vec::new(),
        }
    }
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    // ---- looking

    fn bytes_of(&self, attr: &Attr, layers: &[Layer]) -> Vec<u64> {
        if attr.kind != FileKind::Regular {
            return Vec::new();
        }
        let own = attr.layers.map_or(attr.ino, |l| l.object);
        let stripe = |s: u64| {
            let layer = layers.iter().find(|l| l.from <= s * STRIPE && s * STRIPE < l.to);
            self.cells.get(&(layer.map_or(own, |l| l.object), s)).copied().unwrap_or(0)
        };
        (0..attr.size.div_ceil(STRIPE)).map(stripe).collect()
    }
    fn now(&self) -> Tree {
        let (mut tree, mut todo) = (Tree::new(), vec![(String::new(), InodeId::ROOT)]);
        while let Some((path, ino)) = todo.pop() {
            let attr = self.w.attr(ino).unwrap();
            let names = self.w.view(|view| xattr::listxattr(view, &root(), ino)).unwrap().names;
            let mut inline = None;
            self.w
                .kv
                .read(&mut |read| {
                    inline = tables::DATA.get(read, ino)?.map(Bytes::from);
                    Ok(())
                })
                .unwrap();
            let mut stripes = match inline {
                None if attr.kind == FileKind::Regular => self.bytes_of(&attr, &self.layers(0, ino)),
                _ => Vec::new(),
            };
            for (from, to) in self.away(ino) {
                for s in from / STRIPE..to.div_ceil(STRIPE) {
                    stripes[s as usize] = self.home[&(ino, s)];
                }
            }
            if attr.kind == FileKind::Directory {
                todo.extend(self.w.all(ino).iter().map(|e| (format!("{path}/{}", text(&e.name)), e.ino)));
            }
            tree.insert(path, Thing { attr, names, inline, stripes });
        }
        tree
    }
    /// The part that a snapshot shows: no data of files of which some was at home only.
    fn to_be_shown(&self) -> Tree {
        let mut tree = self.now();
        tree.values_mut().filter(|thing| thing.attr.evicted > 0).for_each(|thing| thing.stripes.clear());
        tree
    }
    fn away(&self, ino: InodeId) -> Vec<(u64, u64)> {
        let found =
            self.w.view(|view| crate::namespace::evicted::ranges(view.read, ino, 0, usize::MAX)).unwrap();
        found.iter().map(|f| (f.from, f.range.to)).collect()
    }
    fn layers(&self, snapshot: u32, ino: InodeId) -> Vec<Layer> {
        let r = LayersOf { session: ME, snapshot, ino, from: 0 };
        self.w.view(|view| snapshot_view::layers_of(view, &r)).unwrap().layers
    }
    fn then(&self, snapshot: u32) -> Tree {
        let (mut tree, mut todo) = (Tree::new(), vec![(String::new(), InodeId::ROOT)]);
        while let Some((path, ino)) = todo.pop() {
            let attr = self
                .w
                .view(|view| snapshot_view::attr(view, &SnapshotGetAttr { session: ME, snapshot, ino }))
                .unwrap();
            let r = SnapshotListXattr { session: ME, snapshot, ino };
            let names = self.w.view(|view| snapshot_view::list_xattr(view, &r)).unwrap().names;
            let (mut inline, mut stripes) = (None, Vec::new());
            if attr.kind == FileKind::Directory {
                for entry in self.entries_then(snapshot, ino) {
                    let r = SnapshotLookup {
                        session: ME,
                        cred: root(),
                        snapshot,
                        parent: ino,
                        name: entry.name.clone(),
                    };
                    let answer = self.w.view(|view| snapshot_view::lookup(view, &r)).unwrap();
                    assert_eq!(
                        answer.attr.map(|a| a.ino),
                        Some(entry.attr.ino),
                        "{path}/{}",
                        text(&entry.name)
                    );
                    todo.push((format!("{path}/{}", text(&entry.name)), entry.attr.ino));
                }
            } else {
                let r = SnapshotOpen { session: ME, cred: root(), snapshot, ino, execute: false };
                inline =
                    self.w.view(|view| snapshot_view::read_open(view.read, view.rules, &r)).unwrap().inline;
                if inline.is_none() && attr.kind == FileKind::Regular && attr.evicted == 0 {
                    stripes = self.bytes_of(&attr, &self.layers(snapshot, ino));
                }
            }
            tree.insert(path, Thing { attr, names, inline, stripes });
        }
        tree
    }
    fn entries_then(&self, snapshot: u32, dir: InodeId) -> Vec<SnapshotEntry> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let r = SnapshotReadDir { session: ME, cred: root(), snapshot, dir, after, limit: 2 };
            let part = self.w.view(|view| snapshot_view::list(view, &r)).unwrap();
            after = part.entries.last().map_or(after, |e| e.cookie);
            all.extend(part.entries);
            if part.end {
                return all;
            }
        }
    }
    fn check(&self) {
        for (number, (name, then)) in &self.taken {
            assert_eq!(&self.then(*number), then, "snapshot {name}");
        }
    }

    // ---- doing

    fn find(&self, path: usize) -> Option<(InodeId, &'static str)> {
        let dirs: Vec<InodeId> = self
            .now()
            .into_values()
            .filter(|t| t.attr.kind == FileKind::Directory)
            .map(|t| t.attr.ino)
            .collect();
        Some((dirs[path / PLACES.len() % dirs.len()], PLACES[path % PLACES.len()]))
    }
    fn file(&self, (dir, name): (InodeId, &str)) -> Option<InodeId> {
        let mut found = None;
        self.w
            .kv
            .read(&mut |read| {
                found = find_link(read, dir, name.as_bytes())?;
                Ok(())
            })
            .unwrap();
        found.filter(|l| l.kind == FileKind::Regular).map(|l| l.ino)
    }

    pub fn write(&mut self, ino: InodeId, stripe: u64) {
        self.w.leases.open(ME, ino, false, true);
        let r = AcquireLease { session: ME, ino, kind: LeaseKind::Write, renew: false };
        let Entry { attr, lease } = self.w.change(|cx| open::acquire(cx, &r)).unwrap();
        let (from, to) = (stripe * STRIPE, (stripe + 1) * STRIPE);
        self.recall(ino, from, to);
        let taken = self.w.change(|cx| layers::take(cx, &TakeLayers { session: ME, ino, from, to })).unwrap();
        let own = attr.layers.map_or(ino, |l| l.object);
        for layer in taken.layers {
            for s in layer.from / STRIPE..layer.to.div_ceil(STRIPE) {
                let old = self.cells.get(&(layer.object, s)).copied().unwrap_or(0);
                self.cells.insert((own, s), old);
            }
            let (from, to, token_epoch) = (layer.from, layer.to, taken.token_epoch);
            self.w
                .change(|cx| layers::copied(cx, &LayerCopied { op: op(), ino, from, to, token_epoch }))
                .unwrap();
        }
        let value = self.fresh();
        self.cells.insert((own, stripe), value);
        let size = self.w.attr(ino).unwrap().size.max(to - 7);
        let commit = Commit { drop_inline: true, token_epoch: lease.token_epoch, ..a_commit(ino, size) };
        self.w.change(|cx| data::commit(cx, &commit)).unwrap();
        self.w.leases.close(ME, ino, 0, 1);
        let r = Close { session: ME, files: vec![Closed { ino, reads: 0, writes: 1 }] };
        self.w.change(|cx| open::close(cx, &r)).unwrap();
    }
    pub fn write_inline(&mut self, ino: InodeId) {
        if self.w.attr(ino).unwrap().size > 0 {
            return;
        }
        self.w.leases.open(ME, ino, false, true);
        let r = AcquireLease { session: ME, ino, kind: LeaseKind::Write, renew: false };
        let token_epoch = self.w.change(|cx| open::acquire(cx, &r)).unwrap().lease.token_epoch;
        let inline = Some(Bytes::from(self.fresh().to_string()));
        let commit = Commit { inline, data_end: 0, token_epoch, ..a_commit(ino, 9) };
        self.w.change(|cx| data::commit(cx, &commit)).unwrap();
        self.w.leases.close(ME, ino, 0, 1);
    }
    /// The evicted part of a range, if it was long enough: `stripes` are the file's.
    pub fn try_evict(
        &mut self,
        ino: InodeId,
        (from, to): (u64, u64),
        stripes: &[u64],
    ) -> Option<Vec<ByteRange>> {
        self.w.at_home.0.lock().unwrap().insert(ino);
        let r = Evict { op: op(), cred: root(), ino, from, to, under: 0 };
        let evicted = self.w.change(|cx| evict::evict(cx, &r)).ok()?;
        for range in &evicted.ranges {
            let evicted = range.from / STRIPE..range.to.div_ceil(STRIPE);
            self.home.extend(evicted.map(|s| ((ino, s), stripes[s as usize])));
        }
        self.sweep();
        Some(evicted.ranges)
    }
    /// Every view is the same before and after it.
    fn evict(&mut self, ino: InodeId, from: u64, to: u64) -> Vec<ByteRange> {
        let all = |m: &Model| -> Vec<Vec<u64>> { m.now().into_values().map(|t| t.stripes).collect() };
        let (before, attr) = (all(self), self.w.attr(ino).unwrap());
        let mine = self.now().into_values().find(|t| t.attr.ino == ino).unwrap().stripes;
        let Some(ranges) = self.try_evict(ino, (from, to), &mine) else {
            assert!(attr.layout.is_none(), "it is at home, and nobody has it open");
            return Vec::new();
        };
        assert_eq!(all(self), before);
        ranges
    }
    /// A mover's work.
    pub fn recall(&mut self, ino: InodeId, from: u64, to: u64) {
        let Some(handed) = self.w.change(|cx| cx.hand_out(ino, from, to)).unwrap() else { return };
        for ByteRange { from, to } in handed.parts {
            for s in from / STRIPE..to.div_ceil(STRIPE) {
                self.cells.insert((handed.object, s), self.home[&(ino, s)]);
            }
            let token_epoch = handed.token_epoch;
            let r = Filled { op: op(), ino, from, to, token_epoch, learned: None };
            self.w.change(|cx| evict::filled(cx, &r)).unwrap();
        }
    }
    /// The sweeper's work.
    pub fn sweep(&mut self) {
        for key in self.w.keys(b'G') {
            let object = tables::GARBAGE.parts(&key).unwrap().1;
            let mut truncation = StripeTruncation::ALL;
            self.w
                .kv
                .read(&mut |read| {
                    truncation = Garbage::from_value(&read.get(&key)?.unwrap(), String::new)?.truncation;
                    Ok(())
                })
                .unwrap();
            let stripes = truncation.from_stripe..truncation.to_stripe;
            self.cells.retain(|(o, s), _| *o != object || !stripes.contains(s));
            self.w
                .kv
                .transact(&mut |txn| {
                    txn.delete(&key);
                    Ok(())
                })
                .unwrap();
        }
    }
    fn take(&mut self) {
        let name = format!("s{}", self.fresh());
        let tree = self.to_be_shown();
        let r = SnapshotTake { op: op(), cred: root(), volume: VolumeId::ROOT, name: name.clone() };
        let taken = self.w.change(|cx| snapshot::take(cx, &r)).unwrap();
        self.taken.insert(taken.number, (name, tree));
    }
    /// One is taken unless the last one was scheduled, too, and shows the present state.
    fn take_scheduled(&mut self) {
        let (tree, before) =
            (self.to_be_shown(), self.taken.last_key_value().map(|(n, (name, _))| (*n, name.clone())));
        match self.w.change(|cx| snapshot::take_scheduled(cx, VolumeId::ROOT)) {
            Ok(Some(taken)) => drop(self.taken.insert(taken.number, (taken.name, tree))),
            Ok(None) => {
                let (number, name) = before.expect("there is one");
                assert!(name.starts_with("auto-"), "{name}");
                assert_eq!(self.then(number), tree, "something has changed since {name}");
            }
            Err(e) => assert_eq!(errno(Err::<(), _>(e)), EEXIST, "of the same second"),
        }
        self.w.now += SECOND;
    }
    fn delete(&mut self, which: usize) {
        let Some(number) = self.taken.keys().nth(which % self.taken.len().max(1)).copied() else { return };
        let (name, _) = self.taken.remove(&number).unwrap();
        let r = SnapshotDelete { op: op(), cred: root(), volume: VolumeId::ROOT, name };
        self.w.change(|cx| snapshot::delete(cx, &r)).unwrap();
    }
    fn forget(&mut self) -> bool {
        let Some((volume, number)) = snapshot::next_deleted(&self.w.snapshots) else { return false };
        self.w.change(|cx| snapshot::forget_some(cx, volume, number)).unwrap();
        true
    }

    fn open(&mut self, ino: InodeId) {
        if !self.open.contains(&ino) {
            self.w.leases.open(OTHER, ino, true, false);
            self.open.push(ino);
        }
    }
    fn close(&mut self, which: usize) {
        if !self.open.is_empty() {
            let ino = self.open.swap_remove(which % self.open.len());
            self.w.leases.close(OTHER, ino, 1, 0);
            self.w.change(|cx| release_orphan(cx, ino, OTHER)).unwrap();
        }
    }

    /// A directory is removed with its files, if it has no subdirectory.
    fn remove_all(&mut self, dir: InodeId) {
        self.w.all(dir).iter().for_each(|e| drop(self.w.unlink(&root(), dir, &text(&e.name))));
        let now = self.now();
        let Some((path, _)) = now.iter().find(|(path, t)| t.attr.ino == dir && !path.is_empty()) else {
            return;
        };
        let (above, name) = path.rsplit_once('/').unwrap();
        drop(self.w.rmdir(&root(), now[above].attr.ino, name));
    }

    /// One random operation; most impossible ones are refused, which is right, too.
    fn step(&mut self, (what, a, b): (u8, usize, usize)) {
        let (Some(at), Some(to)) = (self.find(a), self.find(b)) else { return };
        let file = self.file(at);
        match (what, file) {
            (0 | 1, _) => drop(self.w.create(&root(), at.0, at.1, 0o644)),
            (2, _) => drop(self.w.mkdir(&root(), at.0, at.1, 0o755)),
            (3, _) => drop(self.w.unlink(&root(), at.0, at.1)),
            (4, _) => drop(self.w.rmdir(&root(), at.0, at.1)),
            (5 | 6, _) => drop(self.w.rename(&root(), at, to, RenameMode::Replace)),
            (7, _) => drop(self.w.rename(&root(), at, to, RenameMode::Exchange)),
            (8, Some(ino)) => drop(self.w.link(&root(), ino, to.0, to.1)),
            (9, Some(ino)) => drop(self.w.set(&root(), ino, |r| r.mode = Some(b as u32 & 0o777))),
            (9, None) => drop(self.w.set(&root(), at.0, |r| r.mode = Some(b as u32 & 0o777 | 0o700))),
            (10, _) => {
                let (ino, name) = (file.unwrap_or(at.0), Bytes::from(format!("user.{}", b % 3)));
                let (value, op) = (Bytes::from(b.to_string()), op());
                let set = SetXattr { op, cred: root(), ino, name, value, create: false, replace: false };
                self.w.change(|cx| xattr::setxattr(cx, &set)).unwrap();
            }
            (11, _) => {
                let (ino, name) = (file.unwrap_or(at.0), Bytes::from(format!("user.{}", b % 3)));
                drop(self.w.change(|cx| {
                    xattr::removexattr(cx, &RemoveXattr { op: op(), cred: root(), ino, name: name.clone() })
                }));
            }
            (12..=14, Some(ino)) => self.write(ino, b as u64 % 5),
            (15, Some(ino)) => {
                let size = b as u64 % (5 * STRIPE / 1000) * 1000;
                self.w.set(&root(), ino, |r| r.size = Some(size)).map(drop).unwrap();
            }
            (16, Some(ino)) => self.write_inline(ino),
            (17, _) if b % 2 == 0 => self.take(),
            (17, _) => self.take_scheduled(),
            (18, _) => self.delete(b),
            (19, _) => drop(self.forget()),
            (20, Some(ino)) => drop(self.evict(ino, 0, u64::MAX)),
            (21, Some(ino)) => drop(self.evict(ino, b as u64 % 3 * STRIPE, (b as u64 % 5 + 1) * STRIPE)),
            (22, Some(ino)) => self.recall(ino, b as u64 % 5 * STRIPE, u64::MAX),
            (23, Some(ino)) => self.open(ino),
            (24, _) => self.close(b),
            (25, _) => self.remove_all(at.0),
            (26, _) if !self.open.is_empty() => self.write(self.open[a % self.open.len()], b as u64 % 5),
            _ => {}
        }
        self.sweep();
    }

    fn finish(mut self) {
        while !self.open.is_empty() {
            self.close(0);
        }
        self.check();
        while !self.taken.is_empty() {
            self.delete(0);
        }
        while self.forget() {}
        self.sweep();
        for letter in [b'h', b's'] {
            assert_eq!(self.w.keys(letter), Vec::<Vec<u8>>::new(), "{}", letter as char);
        }
        let now = self.now();
        for (path, thing) in now.iter().rev().filter(|(path, _)| !path.is_empty()) {
            let (dir, name) = path.rsplit_once('/').unwrap();
            let dir = now[dir].attr.ino;
            match thing.attr.kind {
                FileKind::Directory => drop(self.w.rmdir(&root(), dir, name).unwrap()),
                _ => drop(self.w.unlink(&root(), dir, name).unwrap()),
            }
        }
        self.sweep();
        for letter in [b'Z', b'z', b'I', b'W'] {
            assert_eq!(self.w.keys(letter), Vec::<Vec<u8>>::new(), "{}", letter as char);
        }
        assert!(self.cells.is_empty(), "{:?} is nobody's", self.cells);
    }
}

fn text(name: &Bytes) -> String {
    String::from_utf8_lossy(name).into_owned()
}
fn a_commit(ino: InodeId, size: u64) -> Commit {
    Commit {
        op: op(),
        ino,
        token_epoch: 0,
        size,
        mtime: Time { nanos: 5 },
        allocated: size,
        inline: None,
        drop_inline: false,
        clean: true,
        close_writes: 0,
        data_end: size,
        append_token: false,
        changed: Vec::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn a_snapshot_shows_what_was_there_and_leaves_nothing_behind(
        steps in prop::collection::vec((0..27u8, 0..64usize, 0..100_000usize), 1..80),
    ) {
        let mut model = Model::new();
        for (n, step) in steps.into_iter().enumerate() {
            model.step(step);
            if n % 4 == 0 {
                model.check();
            }
        }
        model.check();
        model.finish();
    }
}

#[test]
fn a_file_held_by_a_snapshot_gets_its_own_object_for_a_writer() {
    let mut m = Model::new();
    let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    m.write(ino, 0);
    m.write(ino, 1);
    m.take();
    m.write(ino, 1);
    let attr = m.w.attr(ino).unwrap();
    let own = attr.layers.unwrap();
    assert_ne!(own.object, ino);
    assert_eq!(own.bytes, STRIPE, "one of two is copied");
    m.w.kv
        .read(&mut |read| {
            // The record in the snapshot, and the remaining layer.
            assert_eq!(references(read, ino)?, 2);
            Ok(())
        })
        .unwrap();
    m.check();
    m.write(ino, 0);
    assert_eq!(m.w.attr(ino).unwrap().layers.unwrap(), Layers { object: own.object, bytes: 0 });
    m.delete(0);
    while m.forget() {}
    m.sweep();
    assert!(m.cells.keys().all(|(object, _)| *object == own.object), "the old object is gone: {:?}", m.cells);
    m.finish();
}

/// Its bytes are in two objects then, and home has them all, in either object.
#[test]
fn a_file_written_under_a_snapshot_is_evicted_when_that_is_gone() {
    let mut m = Model::new();
    let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    (0..3).for_each(|stripe| m.write(ino, stripe));
    m.take();
    m.write(ino, 1);
    m.delete(0);
    while m.forget() {}
    m.sweep();
    assert_eq!(m.w.attr(ino).unwrap().layers.unwrap().bytes, 2 * STRIPE - 7);
    // Half of a layer: the rest of it is read from the old object.
    assert_eq!(m.evict(ino, 0, STRIPE), [ByteRange { from: 0, to: STRIPE }]);
    assert_eq!(m.w.attr(ino).unwrap().layers.unwrap().bytes, STRIPE - 7);
    assert!(m.cells.contains_key(&(ino, 2)));
    assert_eq!(m.evict(ino, 0, u64::MAX), [ByteRange { from: STRIPE, to: 3 * STRIPE - 7 }]);
    let attr = m.w.attr(ino).unwrap();
    assert_eq!((attr.evicted, attr.layers.unwrap().bytes), (3 * STRIPE - 7, 0));
    assert!(m.cells.is_empty(), "both objects are given back: {:?}", m.cells);
    m.write(ino, 1);
    assert!(m.cells.keys().all(|(object, _)| *object == attr.layers.unwrap().object), "{:?}", m.cells);
    m.finish();
}

/// The file leaves the snapshot, which still shows the same content.
#[test]
fn a_file_held_by_a_snapshot_is_evicted_the_snapshot_stays() {
    let mut m = Model::new();
    let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    (0..3).for_each(|stripe| m.write(ino, stripe));
    m.take();
    m.write(ino, 1);
    m.take();
    let version = m.w.attr(ino).unwrap().data_version;
    assert_eq!(m.evict(ino, 0, u64::MAX), [ByteRange { from: 0, to: 3 * STRIPE - 7 }]);
    assert_eq!(m.w.attr(ino).unwrap().data_version, version, "a backup finds it unchanged");
    m.check();
    assert_eq!(m.cells.len(), 4, "three stripes of the first one, one of the second: {:?}", m.cells);
    m.delete(0);
    while m.forget() {}
    m.sweep();
    m.check();
    assert_eq!(m.cells.len(), 4, "the second one needs the two that were not written between them");
    m.delete(0);
    while m.forget() {}
    m.sweep();
    assert!(m.cells.is_empty(), "{:?}", m.cells);
    m.finish();
}

/// A client that copies a layer while it is evicted, on an earlier assignment, changes nothing.
#[test]
fn data_evicted_during_its_copy_is_not_reported_as_copied() {
    let mut m = Model::new();
    let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    (0..3).for_each(|stripe| m.write(ino, stripe));
    m.take();
    m.write(ino, 2);
    m.w.leases.open(ME, ino, false, true);
    let (from, to) = (0, 2 * STRIPE);
    let taken = m.w.change(|cx| layers::take(cx, &TakeLayers { session: ME, ino, from, to })).unwrap();
    m.w.leases.close(ME, ino, 0, 1);
    let token_epoch = taken.token_epoch;
    let evicted = m.evict(ino, 0, STRIPE);
    assert_eq!(evicted, [ByteRange { from: 0, to: STRIPE }]);
    assert!(m.w.attr(ino).unwrap().layers.is_some_and(|l| l.bytes == STRIPE));
    let r = LayerCopied { op: op(), ino, from, to, token_epoch };
    assert_eq!(errno(m.w.change(|cx| layers::copied(cx, &r))), ESTALE);
    // The rest of it was not copied under that assignment either.
    let r = LayerCopied { from: STRIPE, ..r };
    assert_eq!(errno(m.w.change(|cx| layers::copied(cx, &r))), ESTALE);
    assert_eq!(m.w.attr(ino).unwrap().evicted, STRIPE);
    m.finish();
}

/// Writes under a Write lease go to the object that came with the lease.
#[test]
fn a_file_empty_in_a_snapshot_gets_a_new_object_before_writes() {
    let mut m = Model::new();
    let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    m.w.leases.open(ME, ino, false, true);
    m.take();
    let closed = Close { session: ME, files: vec![Closed { ino, reads: 0, writes: 1 }] };
    m.w.change(|cx| open::close(cx, &closed)).unwrap();
    m.w.leases.close(ME, ino, 0, 1);
    m.w.leases.open(ME, ino, false, true);
    let ask = AcquireLease { session: ME, ino, kind: LeaseKind::Write, renew: false };
    let object = |entry: Entry| (entry.lease.token_epoch, entry.attr.layers.map_or(ino, |l| l.object));
    let reported = object(m.w.change(|cx| open::acquire(cx, &ask)).unwrap());
    let commit = Commit { token_epoch: reported.0, ..a_commit(ino, STRIPE) };
    m.w.change(|cx| data::commit(cx, &commit)).unwrap();
    assert_eq!(object(m.w.change(|cx| open::acquire(cx, &ask)).unwrap()), reported);
}

/// Seed 80425: the fence of a reader in the snapshot came with a token epoch that passes it, and writes in
/// flight went into the snapshot.
#[test]
fn a_file_read_in_a_snapshot_is_written_to_another_object() {
    for is_open in [true, false] {
        let mut m = Model::new();
        let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
        m.w.leases.open(ME, ino, false, true);
        let ask = AcquireLease { session: ME, ino, kind: LeaseKind::Write, renew: false };
        m.w.change(|cx| open::acquire(cx, &ask)).unwrap();
        let commit = Commit { clean: false, ..a_commit(ino, STRIPE) };
        m.w.change(|cx| data::commit(cx, &commit)).unwrap();
        if !is_open {
            m.w.leases.close(ME, ino, 0, 1);
        }
        m.take();
        let (snapshot, cred) = (*m.taken.keys().next().unwrap(), root());
        let r = SnapshotOpen { session: ME, cred, snapshot, ino, execute: false };
        let then = m.w.change(|cx| snapshot_view::open(cx, &r)).unwrap();
        let now = m.w.view(|v| open::read_inline(v, ino)).unwrap().entry;
        assert_eq!(now.attr.layers.is_some(), is_open, "it has left the snapshot's object");
        assert!(now.lease.token_epoch >= then.fence && then.fence > 0);
    }
}

/// Seed 69052: it keeps its object, because it has no bytes; later bytes are not the snapshot's.
#[test]
fn a_snapshot_of_a_hole_shows_no_later_write() {
    let mut m = Model::new();
    let ino = m.w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    m.w.set(&root(), ino, |r| r.size = Some(2 * STRIPE)).unwrap();
    m.w.leases.open(ME, ino, false, true);
    let closed = Close { session: ME, files: vec![Closed { ino, reads: 0, writes: 1 }] };
    m.w.change(|cx| open::close(cx, &closed)).unwrap();
    m.w.leases.close(ME, ino, 0, 1);
    m.take();
    m.write(ino, 0);
    assert!(m.w.attr(ino).unwrap().layers.is_none(), "nothing has to be copied");
    let (snapshot, cred) = (*m.taken.keys().next().unwrap(), root());
    let r = SnapshotOpen { session: ME, cred, snapshot, ino, execute: false };
    let then = m.w.view(|view| snapshot_view::read_open(view.read, view.rules, &r)).unwrap().attr;
    assert_eq!((then.size, then.layout), (2 * STRIPE, None), "zeros, wherever it lies now");
}

const SECOND: i64 = 1_000_000_000;

impl World {
    /// The leader's work at `seconds`.
    fn keep_schedule(&mut self, seconds: i64, keep: &SnapshotRetention) -> bool {
        self.now = seconds * SECOND;
        let taken = self.change(|cx| snapshot::take_scheduled(cx, VolumeId::ROOT)).unwrap();
        self.change(|cx| snapshot::expire(cx, VolumeId::ROOT, keep)).unwrap();
        taken.is_some()
    }
    fn snapshot_names(&self) -> Vec<String> {
        let r = SnapshotList { session: ME, volume: VolumeId::ROOT };
        let all = self.view(|view| snapshot::list(view, &r)).unwrap().snapshots;
        all.into_iter().map(|s| s.name).collect()
    }
}

#[test]
fn a_schedule_takes_what_has_changed_and_removes_only_its_own() {
    let mut w = World::new();
    let keep = SnapshotRetention { hours: 3, days: 2, weeks: 0, months: 0 };
    let start = weir_proto::date::Date::parse("2026-11-22T00:00:00Z").unwrap().0;
    w.now = start * SECOND;
    let r = SnapshotTake { op: op(), cred: root(), volume: VolumeId::ROOT, name: "mine".into() };
    w.change(|cx| snapshot::take(cx, &r)).unwrap();
    for hour in 0..72 {
        w.create(&root(), InodeId::ROOT, &format!("f{hour}"), 0o644).unwrap();
        assert!(w.keep_schedule(start + hour * 3600, &keep), "hour {hour}");
        assert!(!w.keep_schedule(start + hour * 3600 + 1800, &keep), "nothing has changed");
    }
    let expected = [
        "mine",
        "auto-20261123T230000Z",
        "auto-20261124T210000Z",
        "auto-20261124T220000Z",
        "auto-20261124T230000Z",
    ];
    assert_eq!(w.snapshot_names(), expected);
    // One that a user removes counts no more.
    let r = SnapshotDelete { op: op(), cred: root(), volume: VolumeId::ROOT, name: expected[4].into() };
    w.change(|cx| snapshot::delete(cx, &r)).unwrap();
    assert!(w.keep_schedule(start + 72 * 3600, &keep));
    // Rewritten files are changes as well as names are.
    let mut m = Model { w, ..Model::new() };
    let ino = m.file((InodeId::ROOT, "f1")).unwrap();
    m.write(ino, 0);
    assert!(m.w.keep_schedule(start + 73 * 3600, &keep) && !m.w.keep_schedule(start + 74 * 3600, &keep));
    m.write(ino, 0);
    assert!(m.w.keep_schedule(start + 75 * 3600, &keep));
}

#[test]
fn a_snapshot_is_due_at_full_multiples_of_its_interval_by_table() {
    let at = |seconds: i64| Time { nanos: seconds * SECOND };
    for (last, every_s, due) in [
        (None, 3600, 0),
        (Some(0), 3600, 3600),
        (Some(3599), 3600, 3600),
        (Some(3600), 3600, 7200),
        (Some(86_399), 86_400, 86_400),
    ] {
        assert_eq!(snapshot::due(last.map(at), every_s), at(due), "{last:?} {every_s}");
    }
}

#[test]
fn with_force_a_volume_goes_with_what_its_schedule_took() {
    let mut w = World::new();
    let v = w.volume(&root(), InodeId::ROOT, "v").unwrap();
    w.create(&root(), v.root, "f", 0o644).unwrap();
    let delete =
        |w: &mut World, force| w.delete_volume(&root(), v.id, force).map(drop).map_err(|e| e.context);
    w.change(|cx| snapshot::take_scheduled(cx, v.id)).unwrap().unwrap();
    assert!(delete(&mut w, false).unwrap_err().contains("snapshots"));
    let r = SnapshotTake { op: op(), cred: root(), volume: v.id, name: "mine".into() };
    w.change(|cx| snapshot::take(cx, &r)).unwrap();
    assert!(delete(&mut w, true).unwrap_err().contains("snapshots"), "somebody wants to keep one");
    let r = SnapshotDelete { op: op(), cred: root(), volume: v.id, name: "mine".into() };
    w.change(|cx| snapshot::delete(cx, &r)).unwrap();
    while let Some((volume, number)) = snapshot::next_deleted(&w.snapshots) {
        w.change(|cx| snapshot::forget_some(cx, volume, number)).unwrap();
    }
    delete(&mut w, true).unwrap();
    while !w.change(|cx| volume::remove::remove_some(cx, v.id)).unwrap() {}
    while let Some((volume, number)) = snapshot::next_deleted(&w.snapshots) {
        w.change(|cx| snapshot::forget_some(cx, volume, number)).unwrap();
    }
    for letter in [b'h', b's', b'I', b'Z', b'z'] {
        assert_eq!(w.keys(letter), Vec::<Vec<u8>>::new(), "{}", letter as char);
    }
}
