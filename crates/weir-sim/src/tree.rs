//! A tree of directories and files that all clients change, one change at a time: made, linked, renamed with
//! all entries below, exchanged, marked and removed.
//!
//! Oracle: a change is done or refused as in POSIX, as a whole, and a later reader sees exactly its result:
//! names, links, modes, attributes, bytes. A change that ended with an error, or whose client died, is done
//! or not; the next user of the tree finds out which. Changes that are neither synced nor seen by another
//! client may be lost with their author, the last ones first.

use crate::calls::{names_in, read_whole, root_cred};
use crate::context::Context;
use crate::model::{Who, bytes_of};
use bytes::Bytes;
use std::collections::BTreeMap;
use turn::TreeTurn;
use weir_client::{Client, Handle};
use weir_env::{Instant, Rng};
use weir_proto::meta::{Attr, FileKind, RenameMode};
use weir_proto::{Error, ErrorKind, InodeId, NameRule};

mod turn;

/// The root of the tree, in the volume's root directory.
pub const NAME: &str = "tree";
/// Names in each directory are `n0` and so on.
const NAMES: u64 = 5;
const DIRS_MAX: usize = 9;
const FILES_MAX: usize = 12;
const FILE_BYTES_MAX: u64 = 150_000;
const MARK: &[u8] = b"user.mark";
const SNAPSHOT_ENTRIES: u32 = 3;

pub const CHANGE: &str = "tree change";
pub const COMPARE: &str = "tree comparison";
/// Operations on the tree in the table of marks.
pub const OPERATIONS: [&str; 2] = [CHANGE, COMPARE];

/// Names, links, modes and attributes below one directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tree {
    root: InodeId,
    nodes: BTreeMap<InodeId, Node>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Node {
    mode: u32,
    /// An extended attribute; empty: it has none.
    mark: Bytes,
    /// Entries of a directory.
    entries: Option<BTreeMap<String, InodeId>>,
}

/// A directory and a name.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Place {
    dir: InodeId,
    name: String,
}

#[derive(Clone, Debug)]
enum Change {
    MakeDirectory(Place),
    MakeFile(Place),
    Link { ino: InodeId, place: Place },
    Remove { place: Place, is_directory: bool },
    Rename { from: Place, to: Place, mode: RenameMode },
    Mode { ino: InodeId, mode: u32 },
    Mark { ino: InodeId, mark: Bytes },
}

const DIRECTORY_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o644;

impl Tree {
    fn new(root: InodeId) -> Tree {
        let top = Node { mode: DIRECTORY_MODE, mark: Bytes::new(), entries: Some(BTreeMap::new()) };
        Tree { root, nodes: BTreeMap::from([(root, top)]) }
    }

    fn entries(&self, dir: InodeId) -> Option<&BTreeMap<String, InodeId>> {
        self.nodes.get(&dir)?.entries.as_ref()
    }
    fn at(&self, place: &Place) -> Option<InodeId> {
        self.entries(place.dir)?.get(&place.name).copied()
    }
    fn is_directory(&self, ino: InodeId) -> bool {
        self.entries(ino).is_some()
    }
    fn links(&self, ino: InodeId) -> usize {
        let all = self.nodes.values().filter_map(|node| node.entries.as_ref());
        all.flat_map(BTreeMap::values).filter(|other| **other == ino).count()
    }
    /// Whether `ino` is `dir`, or somewhere below it.
    fn is_within(&self, ino: InodeId, dir: InodeId) -> bool {
        ino == dir || self.entries(dir).into_iter().flatten().any(|(_, below)| self.is_within(ino, *below))
    }

    /// Everything below the root of the tree.
    fn paths(&self) -> BTreeMap<String, InodeId> {
        let (mut paths, mut dirs) = (BTreeMap::new(), vec![(String::new(), self.root)]);
        while let Some((above, dir)) = dirs.pop() {
            for (name, ino) in self.entries(dir).into_iter().flatten() {
                let path = format!("{above}/{name}");
                if self.is_directory(*ino) {
                    dirs.push((path.clone(), *ino));
                }
                paths.insert(path, *ino);
            }
        }
        paths
    }
    /// The tree without inode numbers: for each path whether it is a directory, its mode and mark, and its
    /// file's first path.
    fn shape(&self) -> BTreeMap<String, (bool, u32, Bytes, String)> {
        let (paths, mut first) = (self.paths(), BTreeMap::new());
        paths.iter().rev().for_each(|(path, ino)| drop(first.insert(*ino, path.clone())));
        let of = |ino: InodeId| {
            let Node { mode, mark, entries } = &self.nodes[&ino];
            (entries.is_some(), *mode, mark.clone(), first[&ino].clone())
        };
        paths.iter().map(|(path, ino)| (path.clone(), of(*ino))).collect()
    }

    fn put(&mut self, place: &Place, ino: InodeId) {
        let dir = self.nodes.get_mut(&place.dir).expect("a directory of the tree");
        dir.entries.as_mut().expect("a directory").insert(place.name.clone(), ino);
    }
    /// Removes a name, and the inode if it was its last one.
    fn take(&mut self, place: &Place) -> InodeId {
        let dir = self.nodes.get_mut(&place.dir).expect("a directory of the tree");
        dir.entries.as_mut().expect("a directory").remove(&place.name).expect("a name of the tree")
    }
    fn forget_nameless(&mut self, ino: InodeId) {
        if self.links(ino) == 0 {
            self.nodes.remove(&ino);
        }
    }

    /// The tree after a change; none: POSIX refuses it. `made`: the inode that is made.
    fn after(&self, change: &Change, made: InodeId) -> Option<Tree> {
        let mut tree = self.clone();
        match change {
            Change::MakeDirectory(place) | Change::MakeFile(place) => {
                let is_directory = matches!(change, Change::MakeDirectory(_));
                let mode = if is_directory { DIRECTORY_MODE } else { FILE_MODE };
                let node = Node { mode, mark: Bytes::new(), entries: is_directory.then(BTreeMap::new) };
                self.at(place).is_none().then_some(())?;
                tree.nodes.insert(made, node);
                tree.put(place, made);
            }
            Change::Link { ino, place } => {
                self.at(place).is_none().then_some(())?;
                tree.put(place, *ino);
            }
            Change::Remove { place, .. } => {
                let ino = self.at(place)?;
                self.is_empty(ino).then_some(())?;
                tree.take(place);
                tree.forget_nameless(ino);
            }
            Change::Rename { from, to, mode } => return self.renamed(from, to, *mode),
            Change::Mode { ino, mode } => tree.nodes.get_mut(ino)?.mode = *mode,
            Change::Mark { ino, mark } => tree.nodes.get_mut(ino)?.mark = mark.clone(),
        }
        Some(tree)
    }
    /// A file, or a directory without entries.
    fn is_empty(&self, ino: InodeId) -> bool {
        self.entries(ino).is_none_or(BTreeMap::is_empty)
    }
    fn renamed(&self, from: &Place, to: &Place, mode: RenameMode) -> Option<Tree> {
        let (ino, there) = (self.at(from)?, self.at(to));
        // Into itself.
        if self.is_directory(ino) && self.is_within(to.dir, ino) && from != to {
            return None;
        }
        let mut tree = self.clone();
        match (mode, there) {
            (RenameMode::NoReplace, Some(_)) | (RenameMode::Exchange, None) => return None,
            (_, Some(other)) if other == ino => {} // two names of one file
            (RenameMode::Exchange, Some(other)) => {
                if self.is_directory(other) && self.is_within(from.dir, other) {
                    return None;
                }
                tree.put(from, other);
                tree.put(to, ino);
            }
            (_, there) => {
                if let Some(other) = there {
                    let alike = self.is_directory(ino) == self.is_directory(other);
                    (alike && self.is_empty(other)).then_some(())?;
                }
                tree.take(from);
                tree.put(to, ino);
                there.into_iter().for_each(|other| tree.forget_nameless(other));
            }
        }
        Some(tree)
    }
}

/// The tree after the last change.
struct State {
    tree: Tree,
    /// Known content: its operation and length.
    contents: BTreeMap<InodeId, (u64, usize)>,
    /// A change with unknown outcome, its client, and since when no client works on it.
    pending: Option<(Change, Who, Instant)>,
    /// Changes that are neither synced nor seen by another client.
    unsynced: Option<Unsynced>,
    /// Files that clients have open, with or without names, and their bytes.
    held: Vec<Held>,
}

struct Unsynced {
    who: Who,
    /// The trees before them.
    before: Vec<Tree>,
}

struct Held {
    who: Who,
    handle: Handle,
    ino: InodeId,
    bytes: (u64, usize),
}

pub struct SharedTree {
    pub root: InodeId,
    state: tokio::sync::Mutex<State>,
}

/// The tree in a snapshot or a clone.
pub struct SnapshotTree {
    tree: Tree,
    contents: BTreeMap<InodeId, (u64, usize)>,
}

impl SharedTree {
    /// Makes the root of the tree.
    pub async fn prepare(client: &Client) -> Result<SharedTree, Error> {
        let made = client.mkdir(&root_cred(), InodeId::ROOT, NAME.as_bytes(), DIRECTORY_MODE).await?;
        let root = made.attr.ino;
        let (tree, contents) = (Tree::new(root), BTreeMap::new());
        let state = State { tree, contents, pending: None, unsynced: None, held: Vec::new() };
        Ok(SharedTree { root, state: tokio::sync::Mutex::new(state) })
    }

    /// One operation of a process of client `me`.
    pub async fn step(&self, context: &Context, client: &Client, me: usize, rng: &Rng) {
        let mut state = self.state.lock().await;
        let operation = if rng.below(4) == 0 { COMPARE } else { CHANGE };
        let under_way = context.begin(me, operation);
        let excused = context.client_states.excuses_all(me);
        let turn = TreeTurn { context, client, me: context.client_states.who(me), rng, op: under_way.op };
        let done = async {
            turn.settle(&mut state).await?;
            match operation {
                COMPARE => turn.inspect(&mut state).await,
                _ => turn.change(&mut state).await,
            }
        };
        let done = done.await;
        if let Err(e) = done {
            if let Some((.., since)) = &mut state.pending {
                *since = context.world.now();
            }
            context.complain(me, excused, format!("operation {}, c{me}: {operation}", turn.op), &e);
        }
    }

    /// Checks the tree as seen by `client`, which has nothing cached.
    pub async fn verify(&self, context: &Context, client: &Client, when: &str) -> Result<(), Error> {
        let mut state = self.state.lock().await;
        let (no_client, rng) =
            (crate::client_states::ClientStates::no_client(), context.world.rng("verify the tree"));
        let turn = TreeTurn { context, client, me: no_client, rng: &rng, op: 0 };
        turn.settle(&mut state).await.map_err(|e| e.doing(when))?;
        let attrs = turn.compare(&state, when).await.map_err(|e| e.doing(when))?;
        for ino in state.contents.keys() {
            turn.read(&state, *ino).await.map_err(|e| e.doing(when))?;
        }
        let directories = attrs.values().filter(|attr| attr.kind == FileKind::Directory).count() as u64 - 1;
        let reported = client.usage(self.root).await?;
        let expected = (attrs.len() as u64 - 1 - directories, directories);
        assert_eq!(
            (reported.files, reported.directories),
            expected,
            "{when}: files and directories of the tree"
        );
        Ok(())
    }

    /// The expected tree of a snapshot that is taken while this is held; none: unknown.
    pub async fn before_snapshot(&self) -> (impl Drop, Option<SnapshotTree>) {
        let state = self.state.lock().await;
        let old = SnapshotTree { tree: state.tree.clone(), contents: state.contents.clone() };
        // A snapshot sees what it shows; until it is taken, an author may be lost with its changes.
        let known = (state.pending.is_none() && state.unsynced.is_none()).then_some(old);
        (state, known)
    }

    pub async fn remove_all(&self, client: &Client) -> Result<(), Error> {
        let (tree, _) = read_tree(client, self.root).await?;
        let mut dirs = vec![self.root];
        let mut n = 0;
        while let Some(dir) = dirs.get(n).copied() {
            for (name, ino) in tree.entries(dir).into_iter().flatten() {
                match tree.is_directory(*ino) {
                    true => dirs.push(*ino),
                    false => client.unlink(&root_cred(), dir, name.as_bytes()).await?,
                }
            }
            n += 1;
        }
        for dir in dirs.into_iter().rev() {
            for (name, ino) in tree.entries(dir).into_iter().flatten() {
                if tree.is_directory(*ino) {
                    client.rmdir(&root_cred(), dir, name.as_bytes()).await?;
                }
            }
        }
        Ok(())
    }
}

/// Everything below a directory, with the attributes of each inode.
async fn read_tree(client: &Client, root: InodeId) -> Result<(Tree, BTreeMap<InodeId, Attr>), Error> {
    let (mut tree, mut attrs) = (Tree::new(root), BTreeMap::new());
    let mut inodes = vec![root];
    while let Some(ino) = inodes.pop() {
        if attrs.contains_key(&ino) {
            continue;
        }
        let attr = client.getattr(ino).await?.attr;
        let mark = mark_of(client.get_xattr(&root_cred(), ino, MARK).await)?;
        let mut entries = BTreeMap::new();
        if attr.kind == FileKind::Directory {
            for name in names_in(client, ino).await? {
                let found = client.lookup(&root_cred(), ino, name.as_bytes()).await?;
                let found = found.unwrap_or_else(|| panic!("{name} was just listed")).attr.ino;
                inodes.push(found);
                entries.insert(name, found);
            }
        }
        let entries = (attr.kind == FileKind::Directory).then_some(entries);
        tree.nodes.insert(ino, Node { mode: attr.mode & 0o7777, mark, entries });
        attrs.insert(ino, attr);
    }
    Ok((tree, attrs))
}

/// An entry without a mark has an empty one.
fn mark_of(found: Result<Bytes, Error>) -> Result<Bytes, Error> {
    match found {
        Err(e) if e.kind == ErrorKind::Name(NameRule::NoAttribute) => Ok(Bytes::new()),
        found => found,
    }
}

/// The entries of a directory in a snapshot.
async fn snapshot_names(
    client: &Client,
    snapshot: u32,
    dir: InodeId,
) -> Result<BTreeMap<String, InodeId>, Error> {
    let (mut names, mut after) = (BTreeMap::new(), 0);
    loop {
        let listing = client.snapshot_list(&root_cred(), snapshot, dir, after, SNAPSHOT_ENTRIES).await?;
        for entry in &listing.entries {
            after = entry.cookie;
            names.insert(String::from_utf8_lossy(&entry.name).into_owned(), entry.attr.ino);
        }
        if listing.end {
            return Ok(names);
        }
    }
}

impl SnapshotTree {
    /// A snapshot shows names, modes and attributes unchanged.
    pub async fn verify(&self, client: &Client, snapshot: u32, what: &str) -> Result<(), Error> {
        let mut found = Tree::new(self.tree.root);
        let mut inodes = vec![self.tree.root];
        while let Some(ino) = inodes.pop() {
            let attr = client.snapshot_attr(snapshot, ino).await?;
            let mark = mark_of(client.snapshot_get_xattr(snapshot, ino, MARK).await)?;
            let mut entries = None;
            if attr.kind == FileKind::Directory {
                let names = snapshot_names(client, snapshot, ino).await?;
                inodes.extend(names.values());
                entries = Some(names);
            }
            found.nodes.insert(ino, Node { mode: attr.mode & 0o7777, mark, entries });
        }
        assert_eq!(found, self.tree, "{what}: the tree");
        Ok(())
    }
    /// A clone shows the tree unchanged, with inodes of its own.
    pub async fn verify_clone(&self, client: &Client, volume: InodeId, what: &str) -> Result<(), Error> {
        let found = client.lookup(&root_cred(), volume, NAME.as_bytes()).await?;
        let root = found.unwrap_or_else(|| panic!("{what}: it is not there")).attr.ino;
        let (seen, _) = read_tree(client, root).await?;
        assert_eq!(seen.shape(), self.tree.shape(), "{what}");
        let seen = seen.paths();
        for (path, ino) in self.tree.paths() {
            if let Some((op, len)) = self.contents.get(&ino) {
                let got = read_whole(client, seen[&path]).await.map_err(|e| e.doing(what))?;
                assert!(got == bytes_of(*op, 0, *len), "{what}: {path} has {} bytes", got.len());
            }
        }
        Ok(())
    }
    /// Files and their content.
    pub fn contents(&self) -> impl Iterator<Item = (InodeId, Vec<u8>)> {
        self.contents.iter().map(|(ino, (op, len))| (*ino, bytes_of(*op, 0, *len)))
    }
}
