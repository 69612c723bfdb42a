//! A home in the harness's memory: one directory tree that all movers share, as strict as a directory on a
//! server.
//!
//! Decides as all homes do (`weir_home::decide`). Calls take time, fail before or after their
//! effect, and wait while home is frozen. Names are durable after a settle, bytes after a sync: `power_cut`
//! keeps nothing else.
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::Env;
use weir_home::decide::{self, RenameStep, Step};
use weir_home::{Attrs, Expect, Fault, Fingerprint, Found, HomePath, Make, Outcome};
use weir_proto::meta::{FileKind, Time};

mod opened;

pub use opened::OpenedHome;

const EPOCH: Time = Time { nanos: 0 };

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Thing {
    pub kind: FileKind,
    pub attrs: Attrs,
    pub target: Bytes,
    rdev: u32,
    pub bytes: Vec<u8>,
    /// The bytes that survive a power cut.
    synced: Vec<u8>,
}

impl Thing {
    fn fingerprint(&self, id: u64) -> Fingerprint {
        let (size, mtime) = match self.kind {
            FileKind::Regular => (self.bytes.len() as u64, self.attrs.mtime),
            FileKind::Symlink => (self.target.len() as u64, self.attrs.mtime),
            _ => (0, EPOCH),
        };
        let id = Bytes::copy_from_slice(&id.to_be_bytes());
        Fingerprint { kind: self.kind, id, version: Bytes::new(), size, mtime }
    }
}

#[derive(Clone, Default)]
struct Tree {
    names: BTreeMap<HomePath, u64>,
    things: BTreeMap<u64, Thing>,
}

#[derive(Default)]
struct State {
    now: Tree,
    /// The names that survive a power cut.
    settled: Tree,
    last_id: u64,
    power_cuts: u64,
    frozen: bool,
    /// One call in this many fails; 0: none.
    one_fails_of: u64,
}

/// A change at home by another party than the movers.
pub enum Change {
    /// A file is made, or overwritten.
    Write {
        path: HomePath,
        bytes: Vec<u8>,
    },
    MakeDirectory {
        path: HomePath,
    },
    /// With everything below it.
    Remove {
        path: HomePath,
    },
    /// Replacing the entry there.
    Move {
        from: HomePath,
        to: HomePath,
    },
    Mode {
        path: HomePath,
        mode: u32,
    },
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Change::Write { path, bytes } => write!(f, "write {} bytes to {path}", bytes.len()),
            Change::MakeDirectory { path } => write!(f, "make {path}"),
            Change::Remove { path } => write!(f, "remove {path}"),
            Change::Move { from, to } => write!(f, "move {from} to {to}"),
            Change::Mode { path, mode } => write!(f, "mode of {path}: {mode:o}"),
        }
    }
}

/// The home itself. Cheap to clone.
#[derive(Clone, Default)]
pub struct MemoryHome(Arc<Mutex<State>>);

impl MemoryHome {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// An empty directory.
    pub fn found(&self) {
        let mut state = self.lock();
        let attrs = Attrs { mode: 0o755, uid: 0, gid: 0, atime: EPOCH, mtime: EPOCH, xattrs: vec![] };
        let root = thing(FileKind::Directory, attrs);
        state.last_id = 1;
        state.now =
            Tree { names: BTreeMap::from([(HomePath::root(), 1)]), things: BTreeMap::from([(1, root)]) };
        state.settled = state.now.clone();
    }
    pub fn open(&self, env: Env) -> OpenedHome {
        OpenedHome { home: self.clone(), power_cuts: self.lock().power_cuts, env }
    }

    pub fn freeze(&self, frozen: bool) {
        self.lock().frozen = frozen;
    }
    pub fn fail_one_of(&self, calls: u64) {
        self.lock().one_fails_of = calls;
    }
    /// Keeps only durable data. Open files must be reopened.
    pub fn power_cut(&self) {
        let state = &mut *self.lock();
        state.now = state.settled.clone();
        state.now.things.values_mut().for_each(|thing| thing.bytes = thing.synced.clone());
        state.power_cuts += 1;
    }

    /// All entries, by path.
    pub fn all(&self) -> BTreeMap<HomePath, Thing> {
        let state = self.lock();
        let tree = &state.now;
        tree.names.iter().map(|(path, id)| (path.clone(), tree.things[id].clone())).collect()
    }
    /// A change by another party; written bytes get the time `at`.
    pub fn change(&self, at: Time, change: &Change) {
        let state = &mut *self.lock();
        let new =
            |kind, mode| thing(kind, Attrs { mode, uid: 0, gid: 0, atime: EPOCH, mtime: at, xattrs: vec![] });
        match change {
            Change::Write { path, bytes } => {
                if state.thing(path).is_none() {
                    state.put(path, new(FileKind::Regular, 0o644));
                }
                let file = state.thing(path).expect("just made");
                (file.bytes, file.synced, file.attrs.mtime) = (bytes.clone(), bytes.clone(), at);
            }
            Change::MakeDirectory { path } => state.put(path, new(FileKind::Directory, 0o755)),
            Change::Remove { path } => {
                let below: Vec<_> = state.now.names.keys().filter(|p| p.is_within(path)).cloned().collect();
                below.iter().for_each(|path| state.drop_name(path));
            }
            Change::Move { from, to } => {
                state.drop_name(to);
                state.move_name(from, to);
            }
            Change::Mode { path, mode } => state.thing(path).expect("it is there").attrs.mode = *mode,
        }
        state.settled = state.now.clone();
    }
    /// Changes bytes without the movers' knowledge. `at`: the time, if a user did it; none: the disk did, and
    /// no attribute shows it.
    pub fn meddle(&self, path: &HomePath, at: Option<Time>, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.lock();
        let id = state.now.names[path];
        let thing = state.now.things.get_mut(&id).expect("every name has its thing");
        change(&mut thing.bytes);
        thing.synced = thing.bytes.clone();
        if let Some(at) = at {
            thing.attrs.mtime = at;
        }
    }
}

fn thing(kind: FileKind, attrs: Attrs) -> Thing {
    Thing { kind, attrs, target: Bytes::new(), rdev: 0, bytes: vec![], synced: vec![] }
}

impl State {
    fn at(&self, path: &HomePath) -> Option<(u64, Fingerprint)> {
        let id = *self.now.names.get(path)?;
        Some((id, self.now.things[&id].fingerprint(id)))
    }
    fn fingerprint_at(&self, path: &HomePath) -> Option<Fingerprint> {
        self.at(path).map(|(_, fingerprint)| fingerprint)
    }
    fn thing(&mut self, path: &HomePath) -> Option<&mut Thing> {
        let id = self.now.names.get(path)?;
        self.now.things.get_mut(id)
    }
    fn found(&self, path: &HomePath) -> Option<Found> {
        let (id, fingerprint) = self.at(path)?;
        let thing = &self.now.things[&id];
        Some(Found {
            fingerprint,
            attrs: thing.attrs.clone(),
            nlink: self.now.names.values().filter(|n| **n == id).count() as u32,
            target: thing.target.clone(),
            rdev: thing.rdev,
            allocated: thing.bytes.len() as u64,
        })
    }
    fn children(&self, dir: &HomePath) -> impl Iterator<Item = &HomePath> {
        self.now.names.keys().filter(move |path| path.parent().as_ref() == Some(dir))
    }
    fn check_parent(&self, path: &HomePath) -> Outcome<()> {
        let above = path.parent().and_then(|dir| self.fingerprint_at(&dir));
        match above {
            Some(dir) if dir.kind == FileKind::Directory => Ok(()),
            found => Err(Fault::diverged(path, None, found.as_ref())),
        }
    }
    /// The present entry, or an error if it is not the expected one.
    fn expected(&self, path: &HomePath, expect: &Expect) -> Outcome<(u64, Fingerprint)> {
        let found = self.at(path);
        match found {
            Some((id, fingerprint)) if expect.admits(&fingerprint) => Ok((id, fingerprint)),
            found => Err(refused(path, expect, found.map(|(_, fingerprint)| fingerprint).as_ref())),
        }
    }
    fn put(&mut self, path: &HomePath, thing: Thing) {
        self.last_id += 1;
        self.now.names.insert(path.clone(), self.last_id);
        self.now.things.insert(self.last_id, thing);
    }
    fn drop_name(&mut self, path: &HomePath) {
        let Some(id) = self.now.names.remove(path) else { return };
        if !self.now.names.values().any(|other| *other == id) {
            self.now.things.remove(&id);
        }
    }
    fn move_name(&mut self, from: &HomePath, to: &HomePath) {
        let below: Vec<HomePath> = self.now.names.keys().filter(|p| p.is_within(from)).cloned().collect();
        for old in below {
            let id = self.now.names.remove(&old).expect("just seen");
            let rest = old.names()[from.names().len()..].iter().cloned();
            let new = HomePath::new(to.names().iter().cloned().chain(rest)).expect("made of good names");
            self.now.names.insert(new, id);
        }
    }

    fn make(&mut self, path: &HomePath, what: &Make, attrs: &Attrs) -> Outcome<Fingerprint> {
        self.check_parent(path)?;
        let found = self.found(path);
        let is_empty = self.children(path).next().is_none();
        match decide::make(what, attrs, found.as_ref(), is_empty) {
            Step::Refuse => return Err(Fault::diverged(path, None, found.map(|f| f.fingerprint).as_ref())),
            Step::Done => self.thing(path).expect("just found").attrs = attrs.clone(),
            Step::Act => {
                let (kind, target, rdev) = match what {
                    Make::Directory => (FileKind::Directory, Bytes::new(), 0),
                    Make::File => (FileKind::Regular, Bytes::new(), 0),
                    Make::Symlink { target } => (FileKind::Symlink, target.clone(), 0),
                    Make::Special { kind, rdev } => (*kind, Bytes::new(), *rdev),
                };
                self.put(path, Thing { target, rdev, ..thing(kind, attrs.clone()) });
            }
        }
        Ok(self.fingerprint_at(path).expect("made"))
    }
    fn link(&mut self, existing: &HomePath, expect: &Expect, path: &HomePath) -> Outcome<Fingerprint> {
        self.check_parent(path)?;
        let (old, new) = (self.fingerprint_at(existing), self.fingerprint_at(path));
        match decide::link(old.as_ref(), expect, new.as_ref()) {
            Step::Refuse => return Err(refused(existing, expect, old.as_ref())),
            Step::Done => {}
            Step::Act => drop(self.now.names.insert(path.clone(), self.now.names[existing])),
        }
        Ok(self.fingerprint_at(path).expect("linked"))
    }
    fn remove(&mut self, path: &HomePath, expect: &Expect) -> Outcome<()> {
        let found = self.fingerprint_at(path);
        let is_full = self.children(path).next().is_some();
        match decide::remove(found.as_ref(), expect) {
            Step::Act if !is_full => self.drop_name(path),
            Step::Done => {}
            Step::Act | Step::Refuse => return Err(refused(path, expect, found.as_ref())),
        }
        Ok(())
    }
    fn rename(
        &mut self,
        from: &HomePath,
        expect: &Expect,
        to: &HomePath,
        replaces: Option<&Expect>,
    ) -> Outcome<Fingerprint> {
        self.check_parent(to)?;
        let (old, new) = (self.fingerprint_at(from), self.fingerprint_at(to));
        match decide::rename(old.as_ref(), expect, new.as_ref(), replaces) {
            RenameStep::Done => {}
            RenameStep::DropOld => self.drop_name(from),
            RenameStep::Move => self.move_name(from, to),
            RenameStep::Replace if self.children(to).next().is_none() => {
                self.drop_name(to);
                self.move_name(from, to);
            }
            RenameStep::RefuseFrom => return Err(refused(from, expect, old.as_ref())),
            RenameStep::RefuseTo | RenameStep::Replace => {
                return Err(Fault::diverged(to, replaces.map(Expect::fingerprint), new.as_ref()));
            }
        }
        Ok(self.fingerprint_at(to).expect("renamed"))
    }
    fn exchange(
        &mut self,
        a: &HomePath,
        expect_a: &Expect,
        b: &HomePath,
        expect_b: &Expect,
    ) -> Outcome<(Fingerprint, Fingerprint)> {
        let (at_a, at_b) = (self.fingerprint_at(a), self.fingerprint_at(b));
        match decide::exchange(at_a.as_ref(), expect_a, at_b.as_ref(), expect_b) {
            Step::Refuse => return Err(refused(a, expect_a, at_a.as_ref())),
            Step::Done => {}
            Step::Act => {
                let temporary = a.join(b"exchanged").expect("a good name");
                self.move_name(a, &temporary);
                self.move_name(b, a);
                self.move_name(&temporary, b);
            }
        }
        Ok((self.fingerprint_at(a).expect("exchanged"), self.fingerprint_at(b).expect("exchanged")))
    }
    fn set_attrs(&mut self, path: &HomePath, expect: &Expect, attrs: &Attrs) -> Outcome<Fingerprint> {
        let found = self.fingerprint_at(path);
        if decide::set_attrs(found.as_ref(), expect, attrs) == Step::Refuse {
            return Err(refused(path, expect, found.as_ref()));
        }
        self.thing(path).expect("just found").attrs = attrs.clone();
        Ok(self.fingerprint_at(path).expect("just found"))
    }
    fn resize(&mut self, path: &HomePath, expect: &Expect, size: u64, now: Time) -> Outcome<Fingerprint> {
        let found = self.fingerprint_at(path);
        match decide::resize(found.as_ref(), expect, size) {
            Step::Refuse => return Err(refused(path, expect, found.as_ref())),
            Step::Done => {}
            Step::Act => {
                let thing = self.thing(path).expect("just found");
                thing.bytes.resize(size as usize, 0);
                thing.attrs.mtime = now;
                // Like `ftruncate` followed by `fsync`.
                thing.synced = thing.bytes.clone();
            }
        }
        Ok(self.fingerprint_at(path).expect("just found"))
    }
}

fn refused(path: &HomePath, expect: &Expect, found: Option<&Fingerprint>) -> Fault {
    Fault::diverged(path, Some(expect.fingerprint()), found)
}
