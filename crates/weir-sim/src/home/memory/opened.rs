//! A home in memory as a mover opens it: each call takes some time, may fail, and ends with its node.
use super::{MemoryHome, State, Thing, thing};
use bytes::Bytes;
use std::ops::Range;
use std::time::Duration;
use weir_env::{BoxFuture, Env};
use weir_home::{
    Attrs, Expect, Fault, FaultKind, Fingerprint, Found, Home, HomeLister, HomePath, HomeReader, HomeSpace,
    HomeWriter, ListEntry, Listing, Make, Outcome, Traits,
};
use weir_proto::Error;
use weir_proto::meta::{FileKind, Time};

/// A home ends each call by its deadline.
const DEADLINE: Duration = Duration::from_secs(20);
const CALL_US_MAX: u64 = 4_000;

fn out_of_reach(why: &str) -> Fault {
    Fault::new(FaultKind::Unreachable, &HomePath::root(), Error::unavailable(why))
}

/// A mover's view of the home.
#[derive(Clone)]
pub struct OpenedHome {
    pub(super) home: MemoryHome,
    pub(super) power_cuts: u64,
    pub(super) env: Env,
}

impl OpenedHome {
    pub(super) fn now(&self) -> Time {
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
                    return Err(out_of_reach("the server of home has restarted"));
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
        crate::home::URL
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

    fn part(&self, offset: u64, bytes_wanted: u64) -> Range<u64> {
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
    pub(super) fn change<'a, T: Send + 'a>(
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
    pub(super) fn synced<'a>(
        &'a self,
        act: impl FnOnce(&mut Thing) + Send + 'a,
    ) -> BoxFuture<'a, Outcome<Fingerprint>> {
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

pub(super) fn put(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
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
