//! Trash: a removed file stays in it, with its former permissions, for the set time.
use super::super::trash::{self, name_of};
use super::*;
use weir_proto::snapshot::SnapshotTake;
use weir_proto::volume::{Retention, TRASH, Volume};

const SECOND: i64 = 1_000_000_000;
const WEEK_S: u32 = 7 * 86_400;
const DAY_S: i64 = 86_400;
/// 2026-11-22T12:00:00Z.
const NOON: i64 = 1_795_348_800;
const PLACES: [&str; 4] = ["a", "b", "c", "d"];

/// The entries below a directory: by path, without the trash.
type Tree = BTreeMap<String, (InodeId, FileKind)>;

impl World {
    fn with_trash(trash_s: u32) -> (World, Volume) {
        let mut w = World::new();
        w.now = NOON * SECOND;
        let v = w.volume(&root(), InodeId::ROOT, "v").unwrap();
        let v = w.keep(v.id, trash_s).unwrap();
        (w, v)
    }
    fn keep(&mut self, id: VolumeId, trash_s: u32) -> Result<Volume> {
        self.change_volume(&root(), id, |r| r.retention = Some(Retention { trash_s, ..Retention::NOTHING }))
    }
    fn link_to(&self, dir: InodeId, name: &str) -> Option<InodeId> {
        let mut found = None;
        self.kv
            .read(&mut |read| {
                found = find_link(read, dir, name.as_bytes())?.map(|l| l.ino);
                Ok(())
            })
            .unwrap();
        found
    }
    fn at_path(&self, dir: InodeId, path: &str) -> Option<InodeId> {
        path.split('/').try_fold(dir, |dir, name| self.link_to(dir, name))
    }
    fn tree(&self, top: InodeId) -> Tree {
        let (mut tree, mut todo) = (Tree::new(), vec![(String::new(), top)]);
        while let Some((path, dir)) = todo.pop() {
            for e in self.all(dir) {
                let path = format!("{path}/{}", String::from_utf8_lossy(&e.name));
                if e.kind == FileKind::Directory {
                    todo.push((path.clone(), e.ino));
                }
                tree.insert(path, (e.ino, e.kind));
            }
        }
        tree
    }
    fn trash_of(&self, v: &Volume) -> InodeId {
        self.link_to(v.root, std::str::from_utf8(TRASH).unwrap()).expect("the volume has a trash")
    }
    fn remove_all(&mut self, dir: InodeId, name: &str) {
        let ino = self.link_to(dir, name).unwrap();
        for e in self.all(ino) {
            let name = String::from_utf8_lossy(&e.name).into_owned();
            match e.kind {
                FileKind::Directory => self.remove_all(ino, &name),
                _ => drop(self.unlink(&root(), ino, &name).unwrap()),
            }
        }
        self.rmdir(&root(), dir, name).unwrap();
    }
    /// The leader's background work, to the end.
    fn purge_expired(&mut self, id: VolumeId) {
        loop {
            let (now, mut part) = (Time { nanos: self.now }, None);
            let trash_s = self.quotas.retentions().get(&id).map_or(0, |k| k.trash_s);
            self.kv
                .read(&mut |read| {
                    part = trash::oldest(read, id)?.filter(|(_, p)| trash::is_over(p, trash_s, now));
                    Ok(())
                })
                .unwrap();
            let Some(part) = part else { return };
            self.change(|cx| trash::remove_some(cx, id, part)).unwrap();
        }
    }
    fn mode_of(&self, ino: InodeId) -> (u32, u32, u32) {
        let attr = self.attr(ino).unwrap();
        (attr.mode, attr.uid, attr.gid)
    }
}

#[test]
fn a_removed_tree_is_in_the_trash_and_returns_by_a_rename() {
    let (mut w, v) = World::with_trash(WEEK_S);
    let a = w.mkdir(&root(), v.root, "a", 0o750).unwrap().entry.attr.ino;
    w.set(&root(), a, |r| (r.uid, r.gid) = (Some(7), Some(9))).unwrap();
    let inner = w.mkdir(&root(), a, "b", 0o711).unwrap().entry.attr.ino;
    let f = w.create(&root(), inner, "f", 0o644).unwrap().entry.attr.ino;
    w.commit(f, 1000, true).unwrap();
    let empty = w.mkdir(&root(), a, "empty", 0o700).unwrap().entry.attr.ino;
    let (before, own) = (w.tree(v.root), w.view(|view| volume::show::get(view, "v")).unwrap());
    assert!(!before.contains_key("/.trash"), "no listing shows it: {before:?}");
    w.remove_all(v.root, "a");
    assert_eq!(w.tree(v.root), Tree::new());
    let day = w.at_path(w.trash_of(&v), "2026-11-22").unwrap();
    assert_eq!(w.at_path(day, "a/b/f"), Some(f), "the file itself");
    for (path, mode) in [("a", (0o750, 7, 9)), ("a/b", (0o711, 0, 0)), ("a/empty", (0o700, 0, 0))] {
        assert_eq!(w.mode_of(w.at_path(day, path).unwrap()), mode, "{path}");
    }
    assert!(w.attr(empty).is_err());
    // It is charged normally: two directories more, the trash and its part.
    let now = w.view(|view| volume::show::get(view, "v")).unwrap();
    assert_eq!((now.usage.bytes, now.usage.files), (own.usage.bytes, own.usage.files));
    assert_eq!(now.usage.directories, own.usage.directories + 1);
    assert_eq!((now.in_trash.bytes, now.in_trash.files, now.in_trash.directories), (1000, 1, 4));
    // A user who may change the directory restores it.
    let [owner, stranger] = [7, 5].map(|uid| Cred { uid, gid: uid, groups: vec![uid] });
    let back = |w: &mut World, cred| w.rename(cred, (day, "a"), (v.root, "a"), RenameMode::NoReplace);
    assert_eq!(errno(back(&mut w, &stranger)), ErrorKind::Denied.errno());
    back(&mut w, &owner).unwrap();
    assert_eq!(w.at_path(v.root, "a/b/f"), Some(f));
    // A second removal puts it into the trash again.
    w.unlink(&owner, w.at_path(v.root, "a/b").unwrap(), "f").unwrap_err();
    w.unlink(&root(), w.at_path(v.root, "a/b").unwrap(), "f").unwrap();
    assert_eq!(w.at_path(day, "a/b/f"), Some(f));
    // From the trash it is removed for good.
    w.unlink(&root(), w.at_path(day, "a/b").unwrap(), "f").unwrap();
    assert!(w.attr(f).is_err());
}

#[test]
fn files_in_the_trash_keep_their_readers() {
    let (mut w, v) = World::with_trash(WEEK_S);
    let day = |w: &World| w.at_path(w.trash_of(&v), "2026-11-22").unwrap();
    // A user prepares an open directory in the trash, under the name of one that will be closed.
    w.mkdir(&root(), v.root, "d", 0o777).unwrap();
    w.remove_all(v.root, "d");
    let d = w.mkdir(&root(), v.root, "d", 0o700).unwrap().entry.attr.ino;
    let secret = w.create(&root(), d, "secret", 0o644).unwrap().entry.attr.ino;
    w.unlink(&root(), d, "secret").unwrap();
    assert_eq!(w.at_path(day(&w), "d/secret"), None);
    let place = w.tree(w.trash_of(&v)).into_iter().find(|(_, (ino, _))| *ino == secret).unwrap().0;
    let above = w.at_path(w.trash_of(&v), place.rsplit_once('/').unwrap().0.trim_start_matches('/')).unwrap();
    assert_eq!(w.mode_of(above).0, 0o700, "{place}");
    // One that is closed later is closed in the trash, too, with the next removal.
    let e = w.mkdir(&root(), v.root, "e", 0o755).unwrap().entry.attr.ino;
    w.create(&root(), e, "one", 0o644).unwrap();
    w.create(&root(), e, "two", 0o644).unwrap();
    w.unlink(&root(), e, "one").unwrap();
    w.set(&root(), e, |r| r.mode = Some(0o700)).unwrap();
    w.unlink(&root(), e, "two").unwrap();
    assert_eq!(w.mode_of(w.at_path(day(&w), "e").unwrap()).0, 0o700);
    // One that was moved below a closed one is no longer at its open place.
    let (open, closed) = (
        w.mkdir(&root(), v.root, "open", 0o755).unwrap(),
        w.mkdir(&root(), v.root, "closed", 0o700).unwrap(),
    );
    let (open, closed) = (open.entry.attr.ino, closed.entry.attr.ino);
    let moved = w.mkdir(&root(), open, "m", 0o755).unwrap().entry.attr.ino;
    for name in ["one", "two"] {
        w.create(&root(), moved, name, 0o644).unwrap();
    }
    w.unlink(&root(), moved, "one").unwrap();
    w.rename(&root(), (open, "m"), (closed, "m"), RenameMode::Replace).unwrap();
    w.unlink(&root(), moved, "two").unwrap();
    assert!(w.at_path(day(&w), "open/m/one").is_some() && w.at_path(day(&w), "closed/m/two").is_some());
    assert_eq!(w.at_path(day(&w), "open/m/two"), None);
}

#[test]
fn names_that_are_removed_again_and_again_are_all_there() {
    let (mut w, v) = World::with_trash(WEEK_S);
    let long = "\u{e4}".repeat(127);
    for name in ["f", long.as_str()] {
        for _ in 0..3 {
            w.create(&root(), v.root, name, 0o644).unwrap();
            w.unlink(&root(), v.root, name).unwrap();
        }
    }
    let names: Vec<String> = w.tree(w.trash_of(&v)).into_keys().collect();
    assert_eq!(names.len(), 1 + 6, "{names:?}");
    assert!(names.iter().all(|name| name.is_char_boundary(name.len()) && name.len() < 255 + 13));
    // One of several links is not a loss.
    let f = w.create(&root(), v.root, "g", 0o644).unwrap().entry.attr.ino;
    w.link(&root(), f, v.root, "h").unwrap();
    w.unlink(&root(), v.root, "g").unwrap();
    assert_eq!(w.tree(w.trash_of(&v)).len(), 7);
    // A replaced file is not kept.
    w.create(&root(), v.root, "i", 0o644).unwrap();
    w.rename(&root(), (v.root, "i"), (v.root, "h"), RenameMode::Replace).unwrap();
    assert_eq!(w.tree(w.trash_of(&v)).len(), 7);
}

#[test]
fn removed_files_stay_for_the_retention_and_go_then() {
    let (mut w, v) = World::with_trash(WEEK_S);
    for day in 0..10 {
        w.now = (NOON + day * DAY_S) * SECOND;
        w.mkdir(&root(), v.root, "d", 0o755).unwrap();
        let d = w.link_to(v.root, "d").unwrap();
        for n in 0..5 {
            w.create(&root(), d, &format!("{n}"), 0o644).unwrap();
        }
        w.remove_all(v.root, "d");
        w.purge_expired(v.id);
    }
    let days = |w: &World| {
        w.all(w.trash_of(&v))
            .iter()
            .map(|e| String::from_utf8_lossy(&e.name).into_owned())
            .collect::<Vec<_>>()
    };
    // All of the 23rd is older than a week when the 1st of December begins.
    assert_eq!(days(&w).first().unwrap(), "2026-11-24");
    assert_eq!(days(&w).len(), 8);
    w.keep(v.id, 3 * 86_400).unwrap();
    w.purge_expired(v.id);
    assert_eq!(days(&w), ["2026-11-28", "2026-11-29", "2026-11-30", "2026-12-01"]);
    w.keep(v.id, 0).unwrap();
    w.purge_expired(v.id);
    assert_eq!(days(&w), Vec::<String>::new(), "without a trash nothing stays in it");
    assert_eq!(w.keys(b'x'), Vec::<Vec<u8>>::new());
    let v = w.view(|view| volume::show::get(view, "v")).unwrap();
    assert_eq!(
        (v.usage.clone(), v.in_trash.clone()),
        (Usage { directories: 1, ..Usage::default() }, Usage::default())
    );
    w.create(&root(), v.root, "f", 0o644).unwrap();
    w.unlink(&root(), v.root, "f").unwrap();
    assert_eq!(w.tree(w.trash_of(&v)), Tree::new());
    // A volume with an empty trash is empty.
    w.delete_volume(&root(), v.id, false).unwrap();
    while !w.change(|cx| volume::remove::remove_some(cx, v.id)).unwrap() {}
    assert_eq!(w.keys(b't'), Vec::<Vec<u8>>::new());
}

#[test]
fn a_volume_is_deleted_with_its_trash() {
    let (mut w, v) = World::with_trash(WEEK_S);
    w.mkdir(&root(), v.root, "d", 0o755).unwrap();
    let d = w.link_to(v.root, "d").unwrap();
    for n in 0..9 {
        w.mkdir(&root(), d, &format!("{n}"), 0o755).unwrap();
        let inner = w.link_to(d, &n.to_string()).unwrap();
        w.create(&root(), inner, "f", 0o644).unwrap();
    }
    w.remove_all(v.root, "d");
    assert_eq!(errno(w.delete_volume(&root(), v.id, false)), ENOTEMPTY);
    w.delete_volume(&root(), v.id, true).unwrap();
    while !w.change(|cx| volume::remove::remove_some(cx, v.id)).unwrap() {}
    for letter in [b't', b'x', b'I'] {
        assert_eq!(w.keys(letter), Vec::<Vec<u8>>::new(), "{}", letter as char);
    }
}

#[test]
fn a_volume_is_not_purged_with_the_trash_around_it() {
    let (mut w, v) = World::with_trash(WEEK_S);
    let d = w.mkdir(&root(), v.root, "d", 0o755).unwrap().entry.attr.ino;
    w.create(&root(), d, "f", 0o644).unwrap();
    w.unlink(&root(), d, "f").unwrap();
    let there = w.at_path(w.trash_of(&v), "2026-11-22/d").unwrap();
    w.volume(&root(), v.root, "inner").unwrap();
    assert_eq!(errno(w.rename(&root(), (v.root, "inner"), (there, "inner"), RenameMode::Replace)), 16);
    let inner = w.volume(&root(), there, "made-there").unwrap();
    w.keep(v.id, 0).unwrap();
    w.purge_expired(v.id);
    assert_eq!(w.at_path(w.trash_of(&v), "2026-11-22/d/made-there"), Some(inner.root));
    assert_eq!(w.at_path(there, "f"), None);
}

#[test]
fn a_trash_needs_its_name() {
    let mut w = World::new();
    let v = w.volume(&root(), InodeId::ROOT, "v").unwrap();
    w.mkdir(&root(), v.root, ".trash", 0o755).unwrap();
    assert_eq!(errno(w.keep(v.id, 5)), EEXIST);
    w.rmdir(&root(), v.root, ".trash").unwrap();
    w.keep(v.id, 5).unwrap();
    // A removed one is created again.
    w.rmdir(&root(), v.root, ".trash").unwrap();
    w.create(&root(), v.root, "f", 0o644).unwrap();
    w.unlink(&root(), v.root, "f").unwrap();
    assert_eq!(w.tree(w.trash_of(&v)).len(), 2);
}

/// Random changes: the visible tree is the same as without a trash, and nothing is ever lost.
struct Model {
    w: World,
    v: Volume,
    removed: BTreeSet<InodeId>,
}

impl Model {
    fn place(&self, at: usize) -> (InodeId, &'static str) {
        let dirs: Vec<InodeId> = std::iter::once(self.v.root)
            .chain(self.w.tree(self.v.root).into_values().filter(|t| t.1 == FileKind::Directory).map(|t| t.0))
            .collect();
        (dirs[at / PLACES.len() % dirs.len()], PLACES[at % PLACES.len()])
    }
    fn step(&mut self, (what, a, b): (u8, usize, usize)) {
        let (at, to) = (self.place(a), self.place(b));
        let old = self.w.link_to(at.0, at.1);
        match (what, old) {
            (0 | 1, _) => drop(self.w.create(&root(), at.0, at.1, 0o644)),
            (2 | 3, _) => drop(self.w.mkdir(&root(), at.0, at.1, 0o755)),
            (4 | 5, Some(ino)) => {
                let links = self.w.attr(ino).unwrap().nlink;
                if self.w.unlink(&root(), at.0, at.1).is_ok() && links == 1 {
                    self.removed.insert(ino);
                }
            }
            (6 | 7, _) => drop(self.w.rmdir(&root(), at.0, at.1)),
            (8 | 9, _) => drop(self.w.rename(&root(), at, to, RenameMode::NoReplace)),
            (10, _) => drop(self.w.rename(&root(), at, to, RenameMode::Exchange)),
            (11, Some(ino)) => drop(self.w.link(&root(), ino, to.0, to.1)),
            (12, _) => self.w.now += DAY_S / 2 * SECOND,
            (13, _) => {
                let name = format!("s{}", self.w.now);
                let r = SnapshotTake { op: op(), cred: root(), volume: self.v.id, name };
                self.w.change(|cx| snapshot::take(cx, &r)).unwrap();
            }
            _ => {}
        }
    }
    fn check(&self) {
        let (live, trash) = (self.w.tree(self.v.root), self.w.trash_of(&self.v));
        let kept = self.w.tree(trash);
        let there: Vec<InodeId> =
            kept.values().filter(|(_, kind)| *kind == FileKind::Regular).map(|(ino, _)| *ino).collect();
        assert_eq!(there.len(), there.iter().collect::<BTreeSet<_>>().len(), "twice in the trash");
        assert_eq!(there.into_iter().collect::<BTreeSet<_>>(), self.removed);
        let usage = self.w.view(|view| volume::show::get(view, "v")).unwrap().usage;
        let files = |tree: &Tree| {
            tree.values().filter(|t| t.1 == FileKind::Regular).map(|t| t.0).collect::<BTreeSet<_>>().len()
        };
        assert_eq!(usage.files as usize, files(&live) + files(&kept));
        for tree in [&live, &kept] {
            for (path, (ino, _)) in tree.iter().filter(|(_, t)| t.1 == FileKind::Directory) {
                let (mut name, mut cookie) = (None, 0);
                self.w
                    .kv
                    .read(&mut |read| {
                        (name, cookie) = (Some(name_of(read, *ino)?), load_access(read, *ino)?.cookie);
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(name.unwrap(), path.rsplit_once('/').unwrap().1);
                assert!(cookie > 0);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn removed_files_are_never_lost(
        steps in prop::collection::vec((0..14u8, 0..64usize, 0..64usize), 1..60),
    ) {
        let (w, v) = World::with_trash(u32::MAX);
        let mut model = Model { w, v, removed: BTreeSet::new() };
        for (n, step) in steps.into_iter().enumerate() {
            model.step(step);
            if n % 4 == 0 {
                model.check();
            }
        }
        model.check();
    }
}
