//! Clones compared with their sources: neither side ever sees changes of the other, and nothing is left
//! behind.
use super::super::clone;
use super::super::snapshot_view::SnapshotView;
use super::snapshots::{Model, STRIPE};
use super::*;
use crate::record::Listed;
use weir_proto::snapshot::{SnapshotDelete, SnapshotTake};
use weir_proto::volume::{Policy, Quota, VolumeClone, VolumeCreate, VolumeDelete};

const PLACES: [&str; 4] = ["a", "b", "c", "d"];

/// The visible state of one inode: kind, mode, owner, size, attributes, inline bytes, stripes.
type Thing = (FileKind, u32, u32, u64, Vec<(Vec<u8>, Vec<u8>)>, Option<Vec<u8>>, Vec<u64>);
type Tree = BTreeMap<String, Thing>;
/// The entries of a snapshot: each with the inode of which it is a former state.
type Then = BTreeMap<String, (InodeId, Thing)>;
type Cells = BTreeMap<(InodeId, u64), u64>;
/// Data on targets, and data at home.
type Places<'a> = (&'a Cells, &'a Cells);

fn xattrs(read: &dyn Read, ino: InodeId) -> Vec<(Vec<u8>, Vec<u8>)> {
    let all = tables::XATTRS.under(ino);
    all.collect(read, usize::MAX, |(_, name), value| (name.to_vec(), value)).unwrap()
}
fn entries(read: &dyn Read, dir: InodeId, after: u64) -> Vec<Listed> {
    let tally = load_tally(read, dir).unwrap();
    if after + 1 >= tally.next_cookie {
        return Vec::new();
    }
    let left = tables::LISTED.between((dir, after + 1), (dir, tally.next_cookie));
    left.collect(read, usize::MAX, |_, listed| listed).unwrap()
}
fn thing(read: &dyn Read, (cells, home): Places<'_>, ino: InodeId) -> Thing {
    let Some(inode) = find_inode(read, ino).unwrap() else {
        let access = load_access(read, ino).unwrap();
        return (
            FileKind::Directory,
            access.mode & MODE_BITS,
            access.uid,
            0,
            xattrs(read, ino),
            None,
            Vec::new(),
        );
    };
    let inline = tables::DATA.get(read, ino).unwrap();
    let layers = layers::ranges(read, ino, 0, usize::MAX).unwrap();
    // A snapshot has no list of evicted ranges.
    let away = match inode.evicted {
        0 => Vec::new(),
        _ => crate::namespace::evicted::ranges(read, ino, 0, usize::MAX).unwrap(),
    };
    let stripe = |s: u64| {
        if away.iter().any(|f| f.from <= s * STRIPE && s * STRIPE < f.range.to) {
            return home[&(ino, s)];
        }
        let layer = layers.iter().find(|(from, l)| *from <= s * STRIPE && s * STRIPE < l.to);
        // Data in the object of a file that had no bytes yet came later.
        let own = Some(inode.object(ino)).filter(|_| inode.may_have_cells());
        let object = layer.map(|(_, l)| l.object).or(own);
        object.and_then(|object| cells.get(&(object, s)).copied()).unwrap_or(0)
    };
    let has_stripes = inode.kind == FileKind::Regular && inline.is_none();
    let stripes =
        if has_stripes { (0..inode.size.div_ceil(STRIPE)).map(stripe).collect() } else { Vec::new() };
    (inode.kind, inode.mode & MODE_BITS, inode.uid, inode.size, xattrs(read, ino), inline, stripes)
}

struct Clones {
    m: Model,
    /// Volumes and their topmost directories.
    tops: Vec<(VolumeId, InodeId)>,
    made: u32,
    /// Snapshots that were taken when a part of their data was at home only.
    away: BTreeSet<u32>,
}

impl Clones {
    fn new() -> Clones {
        let mut m = Model::new();
        let v = m.w.volume(&root(), InodeId::ROOT, "v0").unwrap();
        Clones { m, tops: vec![(v.id, v.root)], made: 0, away: BTreeSet::new() }
    }
    fn places(&self) -> Places<'_> {
        (&self.m.cells, &self.m.home)
    }
    fn read<T>(&self, ask: impl Fn(&dyn Read) -> T) -> T {
        let mut answer = None;
        self.m
            .w
            .kv
            .read(&mut |read| {
                answer = Some(ask(read));
                Ok(())
            })
            .unwrap();
        answer.unwrap()
    }
    /// All of a volume, with entries that are not enumerated yet as they are in the source.
    fn tree(&self, (volume, top): (VolumeId, InodeId)) -> Tree {
        self.read(|read| {
            let mut tree = Tree::new();
            self.walk(read, volume, (String::new(), top), &mut tree);
            tree
        })
    }
    fn walk(&self, read: &dyn Read, volume: VolumeId, (path, dir): (String, InodeId), tree: &mut Tree) {
        tree.insert(path.clone(), thing(read, self.places(), dir));
        for Listed { ino, kind, name } in entries(read, dir, 0) {
            let path = format!("{path}/{}", String::from_utf8_lossy(&name));
            match kind {
                FileKind::Directory => self.walk(read, volume, (path, ino), tree),
                _ => drop(tree.insert(path, thing(read, self.places(), ino))),
            }
        }
        if let Some(not_enumerated) = tables::CLONE_DIRS.get(read, (volume, dir)).unwrap() {
            let clone = clone::find(read, volume).unwrap().unwrap();
            let snapshot_view = SnapshotView::new(read, &self.m.w.snapshots, clone.snapshot).unwrap();
            let mut then = Then::new();
            self.walk_then(&snapshot_view, (path, not_enumerated.source), not_enumerated.after, &mut then);
            // A file of several names of which one exists already is that file.
            tree.extend(then.into_iter().map(|(path, (ino, then))| {
                let known = tables::CLONE_FILES.get(read, (volume, ino)).unwrap();
                let known =
                    known.filter(|known| find_inode(read, *known).unwrap().is_some_and(|i| i.nlink > 0));
                (path, known.map_or(then, |known| thing(read, self.places(), known)))
            }));
        }
    }
    fn walk_then(
        &self,
        snapshot_view: &SnapshotView<'_>,
        (path, dir): (String, InodeId),
        after: u64,
        tree: &mut Then,
    ) {
        for Listed { ino, kind, name } in entries(snapshot_view, dir, after) {
            let path = format!("{path}/{}", String::from_utf8_lossy(&name));
            tree.insert(path.clone(), (ino, thing(snapshot_view, self.places(), ino)));
            if kind == FileKind::Directory {
                self.walk_then(snapshot_view, (path, ino), 0, tree);
            }
        }
    }
    fn then(&self, volume: VolumeId, number: u32) -> Tree {
        let top = self.tops.iter().find(|t| t.0 == volume).unwrap().1;
        self.read(|read| {
            let snapshot_view = SnapshotView::new(read, &self.m.w.snapshots, number).unwrap();
            let mut then = Then::from([(String::new(), (top, thing(&snapshot_view, self.places(), top)))]);
            self.walk_then(&snapshot_view, (String::new(), top), 0, &mut then);
            then.into_iter().map(|(path, (_, thing))| (path, thing)).collect()
        })
    }
    fn place(&self, top: InodeId, at: usize) -> (InodeId, &'static str) {
        let (mut dirs, mut next) = (vec![top], 0);
        while next < dirs.len() {
            let below = self.read(|read| entries(read, dirs[next], 0));
            dirs.extend(below.into_iter().filter(|e| e.kind == FileKind::Directory).map(|e| e.ino));
            next += 1;
        }
        (dirs[at / PLACES.len() % dirs.len()], PLACES[at % PLACES.len()])
    }
    fn file(&self, (dir, name): (InodeId, &str)) -> Option<InodeId> {
        let found = self.read(|read| find_link(read, dir, name.as_bytes()).unwrap());
        found.filter(|l| l.kind == FileKind::Regular).map(|l| l.ino)
    }
    /// Evicted bytes of a volume's files.
    fn evicted(&self, top: InodeId) -> u64 {
        self.read(|read| {
            let (mut dirs, mut files) = (vec![top], BTreeMap::new());
            while let Some(dir) = dirs.pop() {
                for entry in entries(read, dir, 0) {
                    match find_inode(read, entry.ino).unwrap() {
                        Some(inode) => drop(files.insert(entry.ino, inode.evicted)),
                        None => dirs.push(entry.ino),
                    }
                }
            }
            files.values().sum()
        })
    }
    /// Snapshots of a volume: number and name.
    fn snapshots(&self, volume: VolumeId) -> Vec<(u32, String)> {
        let r = weir_proto::snapshot::SnapshotList { session: ME, volume };
        let all = self.m.w.view(|view| snapshot::list(view, &r)).unwrap().snapshots;
        all.into_iter().map(|s| (s.number, s.name)).collect()
    }
    fn clone(&mut self, source: VolumeId, which: usize, own: bool) {
        let taken = self.snapshots(source);
        let Some((number, name)) = taken.get(which % taken.len().max(1)).cloned() else { return };
        if self.tops.len() > 5 {
            return;
        }
        self.made += 1;
        let entry = format!("c{}", self.made);
        let new = VolumeCreate {
            op: op(),
            cred: root(),
            name: entry.clone(),
            parent: InodeId::ROOT,
            entry: b(&entry),
            path: b(&format!("/{entry}")),
            owner: 3,
            group: 3,
            mode: 0o700,
            admins: Vec::new(),
            quota: Quota::NONE,
            policy: Policy { scheme: None, pool: None },
        };
        let r = VolumeClone { op: op(), source, snapshot: name, own, new };
        let away = self.away.contains(&number);
        let made = match self.m.w.change(|cx| clone::list::create(cx, &r)) {
            Ok(made) => made,
            Err(e) => {
                assert!(away && e.context.contains("bytes of volume"), "{e}");
                return;
            }
        };
        assert!(!away, "snapshot {number} shows what was at home only");
        let expected = self.then(source, number);
        self.tops.push((made.id, made.root));
        assert_eq!(self.tree((made.id, made.root)), expected);
    }
    /// A step of the leader's background work.
    fn list(&mut self) -> bool {
        match self.read(|read| clone::next_step(read, &BTreeSet::new()).unwrap()) {
            Some((volume, Some(dir))) => {
                self.m.w.change(|cx| clone::list::list_some(cx, volume, dir).map(drop)).unwrap()
            }
            Some((volume, None)) => self.m.w.change(|cx| clone::end::end_some(cx, volume).map(drop)).unwrap(),
            None => return false,
        }
        true
    }
    fn forget(&mut self) -> bool {
        let Some((volume, number)) = snapshot::next_deleted(&self.m.w.snapshots) else { return false };
        self.m.w.change(|cx| snapshot::forget_some(cx, volume, number)).unwrap();
        true
    }
    fn delete(&mut self, which: usize) -> bool {
        let (id, _) = self.tops[which];
        let r = VolumeDelete { op: op(), cred: root(), volume: id, force: true };
        if self.m.w.change(|cx| volume::change::delete(cx, &r)).is_err() {
            return false;
        }
        while self.m.w.change(|cx| volume::find(cx.read(), id)).unwrap().is_some() {
            self.m.w.change(|cx| volume::remove::remove_some(cx, id).map(drop)).unwrap();
        }
        self.tops.remove(which);
        true
    }
    fn delete_snapshot(&mut self, volume: VolumeId, which: usize) -> bool {
        let taken = self.snapshots(volume);
        let Some((_, name)) = taken.get(which % taken.len().max(1)).cloned() else { return false };
        let r = SnapshotDelete { op: op(), cred: root(), volume, name };
        self.m.w.change(|cx| snapshot::delete(cx, &r)).is_ok()
    }

    fn step(&mut self, (what, v, a, at): (u8, usize, usize, usize)) {
        let which = v % self.tops.len();
        let (volume, top) = self.tops[which];
        let others: Vec<_> =
            self.tops.iter().filter(|t| t.0 != volume).map(|t| (*t, self.tree(*t))).collect();
        let (here, there) = (self.place(top, a), self.place(top, at));
        let file = self.file(here);
        match (what, file) {
            (0 | 1, _) => drop(self.m.w.create(&root(), here.0, here.1, 0o640)),
            (2 | 3, _) => drop(self.m.w.mkdir(&root(), here.0, here.1, 0o750)),
            (4, _) => drop(self.m.w.unlink(&root(), here.0, here.1)),
            (5, _) => drop(self.m.w.rmdir(&root(), here.0, here.1)),
            (6, _) => drop(self.m.w.rename(&root(), here, there, RenameMode::Replace)),
            (7, Some(ino)) => drop(self.m.w.link(&root(), ino, there.0, there.1)),
            (8..=11, Some(ino)) => self.m.write(ino, at as u64 % 4),
            (12, Some(ino)) => {
                let size = at as u64 % 5 * STRIPE / 2;
                self.m.recall(ino, 0, u64::MAX);
                self.m.w.set(&root(), ino, |r| r.size = Some(size)).map(drop).unwrap();
            }
            (13, Some(ino)) => self.m.write_inline(ino),
            (14, Some(ino)) => {
                let (name, value) = (Bytes::from("user.x"), Bytes::from(at.to_string()));
                let r = SetXattr { op: op(), cred: root(), ino, name, value, create: false, replace: false };
                self.m.w.change(|cx| xattr::setxattr(cx, &r)).unwrap();
            }
            (15, _) => {
                let r = SnapshotTake { op: op(), cred: root(), volume, name: format!("s{}", self.m.w.now) };
                // Not of a clone that is not complete yet.
                if let Ok(taken) = self.m.w.change(|cx| snapshot::take(cx, &r))
                    && self.evicted(top) > 0
                {
                    self.away.insert(taken.number);
                }
            }
            (16, _) => drop(self.delete_snapshot(volume, at)),
            (17 | 18, _) => self.clone(volume, at, a.is_multiple_of(2)),
            (19..=21, _) => drop(self.list()),
            (22, _) => drop(self.forget()),
            (24, Some(ino)) => {
                let (before, stripes) =
                    (self.tree((volume, top)), self.read(|r| thing(r, self.places(), ino)).6);
                self.m.try_evict(ino, (at as u64 % 3 * STRIPE, u64::MAX), &stripes);
                assert_eq!(self.tree((volume, top)), before);
            }
            (25, Some(ino)) => self.m.recall(ino, at as u64 % 3 * STRIPE, u64::MAX),
            (23, _) if self.tops.len() > 1 && at.is_multiple_of(4) => drop(self.delete(which)),
            _ => {}
        }
        self.m.sweep();
        for top in &self.tops {
            let usage = self.read(|read| usage::volume_usage(read, top.0).unwrap());
            assert_eq!(usage.evicted, self.evicted(top.1), "usage of volume {}", top.0);
        }
        for (top, before) in others.iter().filter(|(top, _)| self.tops.contains(top)) {
            assert_eq!(&self.tree(*top), before, "volume {} after step {what} in {volume}", top.0);
        }
    }

    fn finish(mut self) {
        let before: Vec<_> = self.tops.iter().map(|top| (*top, self.tree(*top))).collect();
        while self.list() {}
        for (top, tree) in &before {
            assert_eq!(&self.tree(*top), tree, "all of volume {}", top.0);
        }
        // In the order in which they were made, or in reverse.
        while !self.tops.is_empty() {
            let which = if self.made.is_multiple_of(2) { 0 } else { self.tops.len() - 1 };
            let (volume, _) = self.tops[which];
            while self.delete_snapshot(volume, 0) {}
            while self.forget() {}
            let others: Vec<_> =
                self.tops.iter().filter(|t| t.0 != volume).map(|t| (*t, self.tree(*t))).collect();
            assert!(self.delete(which));
            self.m.sweep();
            for (top, before) in &others {
                assert_eq!(&self.tree(*top), before, "volume {} after {volume} was deleted", top.0);
            }
        }
        for letter in [b'h', b's', b'I', b'Z', b'z', b'y', b'f', b'o'] {
            assert_eq!(self.m.w.keys(letter), Vec::<Vec<u8>>::new(), "{}", letter as char);
        }
        assert!(self.m.cells.is_empty(), "{:?} is nobody's", self.m.cells);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn a_clone_and_its_source_are_separate_and_leave_nothing(
        steps in prop::collection::vec((0..26u8, 0..6usize, 0..64usize, 0..100_000usize), 1..120),
    ) {
        let mut model = Clones::new();
        for step in steps {
            model.step(step);
        }
        model.finish();
    }
}
