//! A home in the harness's memory: one directory tree that all movers share, as strict as a directory on a
//! server.
//!
//! The same decisions as in all homes (`weir_home::decide`). Calls take time, fail before or after their
//! effect, and wait while home is frozen. Names are durable after a settle, bytes after a sync: `power_cut`
//! keeps nothing else.
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{BoxFuture, Env};
use weir_home::decide::{self, RenameStep, Step};
use weir_home::{
    Attrs, Expect, Fault, FaultKind, Fingerprint, Found, Home, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, ListEntry, Listing, Make, Outcome, Traits,
};
use weir_proto::Error;
use weir_proto::meta::{FileKind, Time};

/// A home ends each call by its deadline.
const DEADLINE: Duration = Duration::from_secs(20);
const CALL_US_MAX: u64 = 4_000;
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
                let aside = a.join(b"exchanged").expect("a good name");
                self.move_name(a, &aside);
                self.move_name(b, a);
                self.move_name(&aside, b);
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

fn out_of_reach(why: &str) -> Fault {
    Fault::new(FaultKind::Unreachable, &HomePath::root(), Error::unavailable(why))
}

/// A mover's view of the home.
#[derive(Clone)]
pub struct OpenedHome {
    home: MemoryHome,
    power_cuts: u64,
    env: Env,
}

impl OpenedHome {
    fn now(&self) -> Time {
        Time { nanos: self.env.clock.wall().0 }
    }

    /// One call: it takes time, and may fail before or after its effect.
    fn call<'a, T: Send + 'a>(
        &'a self,
        act: impl FnOnce(&mut State) -> Outcome<T> + Send + 'a,
    ) -> BoxFuture<'a, Outcome<T>> {
        Box::pin(async move {
            let deadline = self.env.clock.now() + DEADLINE;
            self.env.clock.sleep(Duration::from_micros(self.env.rng.below(CALL_US_MAX))).await;
            while self.home.lock().frozen {
                if self.env.clock.now() > deadline {
                    return Err(out_of_reach("home does not answer"));
                }
                self.env.clock.sleep(Duration::from_millis(50)).await;
            }
            let one_of = self.home.lock().one_fails_of;
            let fails = one_of > 0 && self.env.rng.below(one_of) == 0;
            if fails && self.env.rng.below(2) == 0 {
                return Err(out_of_reach("home was out of reach for a moment"));
            }
            let done = {
                let state = &mut *self.home.lock();
                if state.power_cuts != self.power_cuts {
                    return Err(out_of_reach("the server of home has begun anew"));
                }
                act(state)
            };
            self.env.clock.sleep(Duration::from_micros(self.env.rng.below(CALL_US_MAX))).await;
            match fails {
                true => Err(out_of_reach("the answer of home was lost")),
                false => done,
            }
        })
    }
}

impl Home for OpenedHome {
    fn url(&self) -> &str {
        super::URL
    }
    fn traits(&self) -> Traits {
        Traits {
            owners: true,
            exact_times: true,
            xattrs: true,
            xattr_bytes_max: 1 << 16,
            path_bytes_max: 4096,
            acls: true,
            hard_links: true,
            special_files: true,
            growing_prefix: true,
            calls_max: 64,
            parallel_writers: true,
            in_place: true,
            holes: true,
            cheap_rename: true,
            strong_fingerprints: false,
        }
    }
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        self.call(move |state| state.make(path, what, attrs))
    }
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        self.call(move |state| state.link(existing, expect, path))
    }
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>> {
        self.call(move |state| state.remove(path, expect))
    }
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        self.call(move |state| state.rename(from, expect, to, replaces))
    }
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>> {
        self.call(move |state| state.exchange(a, expect_a, b, expect_b))
    }
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        self.call(move |state| state.set_attrs(path, expect, attrs))
    }
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let now = self.now();
        self.call(move |state| state.resize(path, expect, size, now))
    }
    fn settle(&self) -> BoxFuture<'_, Outcome<()>> {
        self.call(|state| {
            state.settled = state.now.clone();
            Ok(())
        })
    }

    fn piece(&self, offset: u64, bytes_wanted: u64) -> Range<u64> {
        offset..offset + bytes_wanted
    }
    fn open_write<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeWriter>>> {
        self.call(move |state| {
            let (id, _) = state.expected(path, expect)?;
            Ok(Box::new(OpenedFile { home: self.clone(), id }) as Box<dyn HomeWriter>)
        })
    }
    fn open_read<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeReader>>> {
        self.call(move |state| {
            let (id, fingerprint) = state.expected(path, expect)?;
            let file = OpenedFile { home: self.clone(), id };
            Ok(Box::new(Reading { file, path: path.clone(), fingerprint }) as Box<dyn HomeReader>)
        })
    }

    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>> {
        self.call(move |state| Ok(state.found(path)))
    }
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>> {
        self.call(move |state| {
            let named = state.children(dir).filter_map(|path| Some((path.name()?, path)));
            let mut named = named.filter(|(name, _)| after.is_none_or(|after| name[..] > *after)).peekable();
            let mut entries = Vec::new();
            while let (true, Some((name, path))) = (entries.len() < limit, named.peek()) {
                let found = state.found(path).expect("a name of the tree");
                entries.push(ListEntry { name: (*name).clone(), found });
                named.next();
            }
            let end = named.next().is_none();
            Ok(Listing { entries, end })
        })
    }
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>> {
        let lister = Lister { home: self.clone(), dir: dir.clone(), after: None };
        Box::pin(std::future::ready(Ok(Box::new(lister) as Box<dyn HomeLister>)))
    }
    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>> {
        self.call(|_| Ok(HomeSpace { total: u64::MAX, free: u64::MAX }))
    }
}

struct Lister {
    home: OpenedHome,
    dir: HomePath,
    after: Option<Bytes>,
}

impl HomeLister for Lister {
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>> {
        Box::pin(async move {
            let listing = self.home.list(&self.dir, self.after.as_deref(), limit).await?;
            self.after = listing.entries.last().map(|entry| entry.name.clone()).or(self.after.take());
            Ok(listing)
        })
    }
}

/// An open handle stays on the same file, regardless of its name.
struct OpenedFile {
    home: OpenedHome,
    id: u64,
}

impl OpenedFile {
    fn change<'a, T: Send + 'a>(
        &'a self,
        act: impl FnOnce(&mut Thing) -> T + Send + 'a,
    ) -> BoxFuture<'a, Outcome<T>> {
        let id = self.id;
        self.home.call(move |state| {
            // The file lost its last name while it is open: further writes reach no name.
            let mut gone = thing(FileKind::Regular, state.now.things[&1].attrs.clone());
            Ok(act(state.now.things.get_mut(&id).unwrap_or(&mut gone)))
        })
    }
    /// Makes the present bytes durable.
    fn synced<'a>(&'a self, act: impl FnOnce(&mut Thing) + Send + 'a) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let id = self.id;
        self.home.call(move |state| {
            let Some(thing) = state.now.things.get_mut(&id) else {
                return Err(out_of_reach("the file was removed at home while it was written"));
            };
            act(thing);
            thing.synced = thing.bytes.clone();
            let (thing, fingerprint) = (thing.clone(), thing.fingerprint(id));
            if let Some(settled) = state.settled.things.get_mut(&id) {
                *settled = thing;
            }
            Ok(fingerprint)
        })
    }
}

fn put(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let (from, to) = (offset as usize, offset as usize + data.len());
    bytes.resize(bytes.len().max(to), 0);
    bytes[from..to].copy_from_slice(data);
}

impl HomeWriter for OpenedFile {
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>> {
        let now = self.home.now();
        self.change(move |file| {
            put(&mut file.bytes, offset, &parts.concat());
            file.attrs.mtime = now;
        })
    }
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>> {
        let now = self.home.now();
        self.change(move |file| {
            put(&mut file.bytes, range.start, &vec![0; (range.end - range.start) as usize]);
            file.attrs.mtime = now;
        })
    }
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>> {
        self.synced(|_| {})
    }
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>> {
        self.synced(move |file| {
            file.bytes.resize(size as usize, 0);
            file.attrs = attrs.clone();
        })
    }
}

struct Reading {
    file: OpenedFile,
    path: HomePath,
    fingerprint: Fingerprint,
}

impl HomeReader for Reading {
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>> {
        self.file.home.call(move |state| {
            let thing = state.now.things.get(&self.file.id);
            let Some(thing) = thing.filter(|thing| thing.fingerprint(self.file.id) == self.fingerprint)
            else {
                let found = state.fingerprint_at(&self.path);
                return Err(Fault::diverged(&self.path, Some(&self.fingerprint), found.as_ref()));
            };
            let from = thing.bytes.len().min(offset as usize);
            let to = thing.bytes.len().min(from + len);
            Ok(vec![Bytes::copy_from_slice(&thing.bytes[from..to])])
        })
    }
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>> {
        let size = self.fingerprint.size;
        Box::pin(async move { Ok((offset < size).then_some(offset..size)) })
    }
    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }
}
