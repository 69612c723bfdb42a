//! Claim: a window that is run in any order that `order` allows, with crashes in between after which all that was not told
//! is run again, ends as if its changes had been made one after the other. The home here is a model that decides by
//! `decide`, as the real ones do.
use bytes::Bytes;
use proptest::prelude::*;
use std::collections::BTreeMap;
use weir_home::{
    Attrs, Expect, Found, HomePath, Make, Stamp,
    decide::{self, RenameStep, Step},
    order::{NameChange, NameOp, Window},
};
use weir_proto::{
    InodeId,
    meta::{FileKind, Time},
};

#[derive(Clone, Debug, PartialEq)]
struct Node {
    kind: FileKind,
    size: u64,
    mtime: i64,
    mode: u32,
}

/// A home: names lead to things; each thing has an identity that is never used again.
#[derive(Clone, Default)]
struct Tree {
    names: BTreeMap<HomePath, u64>,
    nodes: BTreeMap<u64, Node>,
    last_id: u64,
}

/// What a change carries beyond its paths.
#[derive(Clone, Debug)]
struct Change {
    op: NameOp,
    attrs: Attrs,
    size: u64,
    /// Of a rename: the inode that it replaces.
    replaces: Option<InodeId>,
}

/// What the leader and the mover know of home: the stamp of each inode that is there.
type Twins = BTreeMap<InodeId, Stamp>;

fn attrs(mode: u32, mtime: i64) -> Attrs {
    let time = Time { nanos: mtime };
    Attrs { mode, uid: 0, gid: 0, atime: time, mtime: time, xattrs: vec![] }
}

impl Tree {
    fn has_dir(&self, path: &HomePath) -> bool {
        path.is_root() || self.names.get(path).is_some_and(|id| self.nodes[id].kind == FileKind::Directory)
    }
    fn stamp(&self, path: &HomePath) -> Option<Stamp> {
        let id = self.names.get(path)?;
        let node = &self.nodes[id];
        let is_dir = node.kind == FileKind::Directory;
        Some(Stamp {
            kind: node.kind,
            id: Bytes::copy_from_slice(&id.to_le_bytes()),
            version: Bytes::new(),
            size: node.size,
            mtime: Time { nanos: if is_dir { 0 } else { node.mtime } },
        })
    }
    fn found(&self, path: &HomePath) -> Option<Found> {
        let stamp = self.stamp(path)?;
        let id = self.names[path];
        let node = &self.nodes[&id];
        let nlink = self.names.values().filter(|other| **other == id).count() as u32;
        let attrs = attrs(node.mode, node.mtime);
        Some(Found { stamp, attrs, nlink, target: Bytes::new(), rdev: 0, allocated: 0 })
    }
    fn is_empty(&self, dir: &HomePath) -> bool {
        !self.names.keys().any(|path| path != dir && path.is_within(dir))
    }
    fn node(&mut self, path: &HomePath) -> &mut Node {
        self.nodes.get_mut(&self.names[path]).unwrap()
    }
    fn move_names(&mut self, from: &HomePath, to: &HomePath) {
        let moved: Vec<HomePath> = self.names.keys().filter(|path| path.is_within(from)).cloned().collect();
        let taken: Vec<(HomePath, u64)> =
            moved.into_iter().map(|path| (path.clone(), self.names.remove(&path).unwrap())).collect();
        for (path, id) in taken {
            let rest = path.names()[from.names().len()..].iter().cloned();
            self.names.insert(HomePath::new(to.names().iter().cloned().chain(rest)).unwrap(), id);
        }
    }

    /// Makes a change as a home does; an error is what a mover would call diverged.
    fn apply(&mut self, change: &Change, twins: &mut Twins) -> Result<(), String> {
        let inode = change.op.inodes[0];
        let expect = |twins: &Twins, inode: InodeId| {
            twins.get(&inode).cloned().map(Expect::Unchanged).ok_or(format!("{inode} is not known at home"))
        };
        let refuse = |what: &str| Err(format!("{what}: {:?}", change.op.what));
        let stamp_at = match &change.op.what {
            NameChange::MakeDir(path) | NameChange::Make(path) => {
                if !self.has_dir(&path.parent().unwrap()) {
                    return refuse("no directory");
                }
                let is_dir = matches!(change.op.what, NameChange::MakeDir(_));
                let what = if is_dir { Make::Directory } else { Make::File };
                let kind = if is_dir { FileKind::Directory } else { FileKind::Regular };
                if self.stamp(path).is_none() {
                    self.last_id += 1;
                    self.names.insert(path.clone(), self.last_id);
                    self.nodes.insert(self.last_id, Node { kind, size: 0, mtime: -1, mode: 0 });
                }
                match decide::make(&what, &change.attrs, self.found(path).as_ref(), self.is_empty(path)) {
                    Step::Done => {}
                    step => return refuse(&format!("{step:?}")),
                }
                self.set(path, &change.attrs);
                path
            }
            NameChange::Link { existing, path } => {
                if !self.has_dir(&path.parent().unwrap()) {
                    return refuse("no directory");
                }
                let (found, at_new) = (self.stamp(existing), self.stamp(path));
                match decide::link(found.as_ref(), &expect(twins, inode)?, at_new.as_ref()) {
                    Step::Act => drop(self.names.insert(path.clone(), self.names[existing])),
                    Step::Done => {}
                    Step::Refuse => return refuse("diverged"),
                }
                path
            }
            NameChange::Remove(path) => {
                match decide::remove(self.stamp(path).as_ref(), &expect(twins, inode)?) {
                    Step::Act if !self.is_empty(path) => return refuse("not empty"),
                    Step::Act => drop(self.names.remove(path)),
                    Step::Done => {}
                    Step::Refuse => return refuse("diverged"),
                }
                return Ok(());
            }
            NameChange::Rename { from, to } => {
                if !self.has_dir(&to.parent().unwrap()) {
                    return refuse("no directory");
                }
                let replaces = change.replaces.map(|inode| expect(twins, inode)).transpose()?;
                let (at_old, at_new) = (self.stamp(from), self.stamp(to));
                match decide::rename(
                    at_old.as_ref(),
                    &expect(twins, inode)?,
                    at_new.as_ref(),
                    replaces.as_ref(),
                ) {
                    RenameStep::Move => self.move_names(from, to),
                    RenameStep::Replace if !self.is_empty(to) => return refuse("not empty"),
                    RenameStep::Replace => {
                        self.names.remove(to);
                        self.move_names(from, to);
                    }
                    RenameStep::DropOld => drop(self.names.remove(from)),
                    RenameStep::Done => {}
                    step => return refuse(&format!("{step:?}")),
                }
                to
            }
            NameChange::Exchange { a, b } => {
                let (expect_a, expect_b) = (expect(twins, inode)?, expect(twins, change.op.inodes[1])?);
                match decide::exchange(self.stamp(a).as_ref(), &expect_a, self.stamp(b).as_ref(), &expect_b) {
                    Step::Act => {
                        let aside = HomePath::parse("aside").unwrap();
                        self.move_names(a, &aside);
                        self.move_names(b, a);
                        self.move_names(&aside, b);
                    }
                    Step::Done => {}
                    Step::Refuse => return refuse("diverged"),
                }
                return Ok(());
            }
            NameChange::SetAttrs(path) => {
                match decide::set_attrs(self.stamp(path).as_ref(), &expect(twins, inode)?, &change.attrs) {
                    Step::Act | Step::Done => self.set(path, &change.attrs),
                    Step::Refuse => return refuse("diverged"),
                }
                path
            }
            NameChange::Resize(path) => {
                match decide::resize(self.stamp(path).as_ref(), &expect(twins, inode)?, change.size) {
                    Step::Act => {
                        let node = self.node(path);
                        (node.size, node.mtime) = (change.size, node.mtime + 1_000_003);
                    }
                    Step::Done => {}
                    Step::Refuse => return refuse("diverged"),
                }
                path
            }
        };
        twins.insert(inode, self.stamp(stamp_at).unwrap());
        Ok(())
    }

    fn set(&mut self, path: &HomePath, attrs: &Attrs) {
        let node = self.node(path);
        (node.mode, node.mtime) = (attrs.mode, attrs.mtime.nanos);
    }

    /// What people see: names, which of them are one thing, and everything but identities and times that a cut leaves.
    fn shown(&self) -> Vec<(String, FileKind, u64, u32, Vec<String>)> {
        let show = |(path, id): (&HomePath, &u64)| {
            let node = &self.nodes[id];
            let same = self.names.iter().filter(|(_, other)| *other == id).map(|(path, _)| path.to_string());
            (path.to_string(), node.kind, node.size, node.mode, same.collect())
        };
        self.names.iter().map(show).collect()
    }
}

/// What one step of a random program picks with.
type Pick = (u8, u16, u16, u8);

/// A program that is right on `tree`, made of picks: what cannot be done is left out.
fn program(tree: &Tree, twins: &Twins, picks: &[Pick]) -> (Vec<Change>, Tree) {
    let (mut tree, mut twins) = (tree.clone(), twins.clone());
    // Which inode a name leads to, as the cache knows it.
    let mut inodes: BTreeMap<u64, InodeId> = BTreeMap::new();
    for (inode, stamp) in &twins {
        inodes.insert(u64::from_le_bytes(stamp.id[..].try_into().unwrap()), *inode);
    }
    let mut next_inode = twins.keys().last().map_or(1000, |inode| inode.0);
    let mut changes = Vec::new();
    for (n, (what, a, b, name)) in picks.iter().enumerate() {
        let all: Vec<HomePath> = tree.names.keys().cloned().collect();
        let dirs: Vec<HomePath> = std::iter::once(HomePath::root())
            .chain(all.iter().filter(|p| tree.has_dir(p)).cloned())
            .collect();
        let some = |pick: u16| all.get(usize::from(pick) % all.len().max(1)).cloned();
        let place = dirs[usize::from(*b) % dirs.len()].join(&[b'a' + name % 4]).unwrap();
        let inode_at = |tree: &Tree, path: &HomePath| inodes[&tree.names[path]];
        let fresh = !tree.names.contains_key(&place);
        let mut replaces = None;
        let change = match (what % 9, some(*a)) {
            (0 | 1, _) if fresh => Some((NameChange::Make(place.clone()), vec![])),
            (2, _) if fresh => Some((NameChange::MakeDir(place.clone()), vec![])),
            (3, Some(existing)) if fresh && !tree.has_dir(&existing) => {
                let inode = inode_at(&tree, &existing);
                Some((NameChange::Link { existing, path: place.clone() }, vec![inode]))
            }
            (4, Some(path)) if tree.is_empty(&path) => {
                let inode = inode_at(&tree, &path);
                Some((NameChange::Remove(path), vec![inode]))
            }
            (5 | 6, Some(from)) if !place.is_within(&from) && !from.is_within(&place) => {
                let moved = inode_at(&tree, &from);
                let over = (!fresh).then(|| inode_at(&tree, &place));
                let same_kind = fresh || tree.has_dir(&place) == tree.has_dir(&from);
                let may = same_kind && over != Some(moved) && (fresh || tree.is_empty(&place));
                replaces = over;
                may.then(|| (NameChange::Rename { from, to: place.clone() }, vec![moved]))
            }
            (7, Some(path)) => {
                let inode = inode_at(&tree, &path);
                Some((NameChange::SetAttrs(path), vec![inode]))
            }
            (8, Some(path)) if *name < 64 && !tree.has_dir(&path) => {
                let inode = inode_at(&tree, &path);
                Some((NameChange::Resize(path), vec![inode]))
            }
            (8, Some(path)) => some(*b).filter(|other| !other.overlaps(&path)).and_then(|other| {
                let pair = vec![inode_at(&tree, &path), inode_at(&tree, &other)];
                (pair[0] != pair[1]).then(|| (NameChange::Exchange { a: path, b: other }, pair))
            }),
            _ => None,
        };
        let Some((what, mut about)) = change else { continue };
        let made = about.is_empty();
        if made {
            next_inode += 1;
            about.push(InodeId(next_inode));
        }
        about.extend(replaces);
        let attrs = attrs(0o600 + u32::from(name % 16), 1000 + n as i64);
        let change =
            Change { op: NameOp { what, inodes: about.clone() }, attrs, size: n as u64 + 1, replaces };
        tree.apply(&change, &mut twins).expect("a right program");
        if made {
            inodes.insert(tree.last_id, about[0]);
        }
        changes.push(change);
    }
    (changes, tree)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]
    #[test]
    fn any_order_that_is_allowed_ends_the_same_also_after_crashes(
        before in prop::collection::vec(any::<Pick>(), 0..12),
        picks in prop::collection::vec(any::<Pick>(), 1..24),
        chances in prop::collection::vec(any::<u16>(), 64),
    ) {
        let mut chances = chances.into_iter().cycle();
        let mut chance = move |below: usize| usize::from(chances.next().unwrap()) % below;
        let (mut home, mut told_twins) = (Tree::default(), Twins::new());
        for change in program(&home, &told_twins, &before).0 {
            home.apply(&change, &mut told_twins).unwrap();
        }
        let (changes, wished) = program(&home, &told_twins, &picks);
        let ops: Vec<NameOp> = changes.iter().map(|change| change.op.clone()).collect();
        // Receipts go in order: so many are told; what the leader knows is as of then.
        let (mut told, mut crashes_left) = (0, 4);
        while told < ops.len() {
            let mut window = Window::new(&ops[told..]);
            let (base, mut twins, mut at) = (told, told_twins.clone(), BTreeMap::new());
            let mut running: Vec<usize> = Vec::new();
            loop {
                running.extend(window.take_ready(1 + chance(3)));
                if crashes_left > 0 && chance(12) == 0 {
                    crashes_left -= 1;
                    break; // what runs is not done, what is done and not told is forgotten
                }
                if chance(3) == 0 || running.is_empty() {
                    let prefix = window.done_prefix();
                    for n in told - base..prefix {
                        window.told(n);
                    }
                    if prefix + base > told {
                        told = base + prefix;
                        // Twins as of the told prefix: only what those changes made of them.
                        for n in 0..prefix {
                            if let Some(known) = at.remove(&n) {
                                let known: Twins = known;
                                told_twins.extend(known);
                            }
                        }
                    }
                    if told == ops.len() {
                        break;
                    }
                    continue;
                }
                let n = running.swap_remove(chance(running.len()));
                let change = &changes[base + n];
                let done = home.apply(change, &mut twins);
                prop_assert!(done.is_ok(), "{:?}\nchange {} of {:#?}", done, base + n, ops);
                let of = |inode: &InodeId| twins.get(inode).map(|stamp| (*inode, stamp.clone()));
                at.insert(n, change.op.inodes.iter().filter_map(of).collect::<Twins>());
                window.done(n);
            }
        }
        prop_assert_eq!(home.shown(), wished.shown(), "{:#?}", ops);
    }
}
