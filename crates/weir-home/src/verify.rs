//! Compares a home with the shipped state: names, kinds, owners, modes, sizes and times of files, and each
//! byte with the receipt from when it was shipped.
//!
//! Invariants: nothing at home is changed; changes still in flight are not reported as wrong. A difference
//! counts only if the leader confirms afterwards that home should equal the volume. Memory is the names of
//! one directory and the differences found.
//!
//! Refuses to know: how differences are repaired.
use crate::idmap::{NOBODY, SET_ID_BITS};
use crate::mover::expect;
use crate::recall::{Check, blocks, covered, read};
use crate::{Fault, Found, Home, HomePath, Outcome};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use weir_client::Client;
use weir_env::Env;
use weir_proto::meta::{Attr, FileKind};
use weir_proto::patterns::Patterns;
use weir_proto::relation::{HomePlace, RelationId};
use weir_proto::{Error, ErrorKind, InodeId, Result};

/// Entries that are compared in parallel.
const AT_ONCE: usize = 16;
/// Entries of a page of a directory.
const PAGE: u32 = 1024;
/// Bytes read at a time.
const PART_BYTES: u64 = 4 << 20;
/// A difference that may be a change in flight is checked again after this pause, this number of times.
const AGAIN: Duration = Duration::from_millis(200);
const TRIES: u32 = 25;
/// Doubtful names, and differences, that are remembered; further ones are counted.
const KEPT_MAX: usize = 10_000;

/// An entry at home that differs from the expected state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wrong {
    /// None: the volume has no such name.
    pub ino: Option<InodeId>,
    pub is_file: bool,
    pub path: HomePath,
    pub why: String,
}

/// Totals of a comparison.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    pub files: u64,
    pub directories: u64,
    /// Symbolic links, pipes, sockets, devices.
    pub others: u64,
    /// Bytes read at home that match their receipts.
    pub bytes: u64,
    /// Bytes at home without a receipt: older than the volume, and not read since.
    pub unproved_bytes: u64,
    /// Entries that the relation's patterns exclude, and that home does not have.
    pub excluded: u64,
    /// Entries with changes in flight during the whole comparison.
    pub under_way: u64,
    pub wrong: Vec<Wrong>,
    /// Differences beyond those that are named.
    pub more_wrong: u64,
}

/// A comparison of a relation's home with its volume.
pub struct Verify {
    pub env: Env,
    pub client: Client,
    pub home: Arc<dyn Home>,
    pub relation: RelationId,
    /// The volume's root directory.
    pub root: InodeId,
    /// Entries that the relation does not copy are not missing.
    pub patterns: Patterns,
    /// Compare each byte, too; otherwise names, kinds, sizes and times.
    pub data: bool,
}

/// Result of comparing one entry.
enum Seen {
    Same {
        kind: FileKind,
        bytes: u64,
        unproved: u64,
    },
    UnderWay,
    Excluded,
    /// Home does not have it, perhaps not yet.
    Unknown(Thing),
    Wrong(Wrong),
    /// It is gone, or belongs to another volume.
    Nothing,
}

#[derive(Clone)]
struct Thing {
    ino: InodeId,
    kind: FileKind,
    path: HomePath,
}

impl Verified {
    fn note(&mut self, seen: Seen, doubtful: &mut Doubtful) {
        match seen {
            Seen::Same { kind, bytes, unproved } => {
                match kind {
                    FileKind::Regular => self.files += 1,
                    FileKind::Directory => self.directories += 1,
                    _ => self.others += 1,
                }
                self.bytes += bytes;
                self.unproved_bytes += unproved;
            }
            Seen::UnderWay => self.under_way += 1,
            Seen::Excluded => self.excluded += 1,
            Seen::Unknown(thing) if doubtful.unknown.len() < KEPT_MAX => doubtful.unknown.push(thing),
            Seen::Unknown(_) => self.under_way += 1,
            Seen::Wrong(wrong) if self.wrong.len() < KEPT_MAX => self.wrong.push(wrong),
            Seen::Wrong(_) => self.more_wrong += 1,
            Seen::Nothing => {}
        }
    }
}

/// Entries that are decided at the end, when changes in flight are complete.
#[derive(Default)]
struct Doubtful {
    /// In the volume and not at home.
    unknown: Vec<Thing>,
    /// At home and not in the volume.
    strange: Vec<HomePath>,
}

impl Verify {
    /// `report` is called at intervals. An error: home or the leader does not answer.
    pub async fn run(self, mut report: impl FnMut(&Verified)) -> Result<Verified> {
        let me = Arc::new(self);
        let (mut verified, mut doubtful) = (Verified::default(), Doubtful::default());
        let permits = Arc::new(Semaphore::new(AT_ONCE));
        let (done, mut seen) = mpsc::unbounded_channel::<Outcome<Seen>>();
        let mut todo = vec![(me.root, HomePath::root())];
        while let Some((dir, path)) = todo.pop() {
            let (mut after, mut names) = (0, BTreeSet::new());
            loop {
                let page = match me.client.readdir(&crate::weir::root(), dir, after, PAGE, false).await {
                    Err(e) if matches!(e.kind, ErrorKind::Stale | ErrorKind::NotFound) => break, // removed meanwhile
                    page => page?,
                };
                for listed in page.entries {
                    after = listed.cookie;
                    names.insert(listed.name.clone());
                    let Ok(path) = path.join(&listed.name) else { continue }; // home's own mark: not shipped
                    let thing = Thing { ino: listed.ino, kind: listed.kind, path };
                    if thing.kind == FileKind::Directory {
                        todo.push((thing.ino, thing.path.clone()));
                    }
                    let permit = permits.clone().acquire_owned().await.expect("never closed");
                    let (me, done) = (me.clone(), done.clone());
                    me.env.clone().tasks.spawn("compare", async move {
                        let _ = done.send(me.compare(thing).await); // dropped after an error
                        drop(permit);
                    });
                }
                while let Ok(seen) = seen.try_recv() {
                    verified.note(seen?, &mut doubtful);
                    report(&verified);
                }
                if page.end {
                    break;
                }
            }
            me.find_strangers(dir, &path, &names, &mut doubtful).await?;
        }
        drop(done);
        while let Some(seen) = seen.recv().await {
            verified.note(seen?, &mut doubtful);
            report(&verified);
        }
        me.decide(doubtful, &mut verified).await?;
        Ok(verified)
    }

    /// Finds names in a directory at home that the volume does not have.
    async fn find_strangers(
        &self,
        dir: InodeId,
        path: &HomePath,
        names: &BTreeSet<bytes::Bytes>,
        doubtful: &mut Doubtful,
    ) -> Result<()> {
        let place = match self.place(dir).await {
            Err(e) if is_absent(&e) => return Ok(()),
            place => place?,
        };
        if HomePath::parse(&place.path)? != *path {
            return Ok(()); // it is still under another name there
        }
        let mut lister = match self.home.read_dir(path).await {
            Err(Fault::Diverged(_) | Fault::Broken(_)) => return Ok(()), // compared as an entry of its parent
            lister => lister?,
        };
        loop {
            let page = lister.next(PAGE as usize).await?;
            for entry in page.entries.iter().filter(|entry| !names.contains(&entry.name)) {
                if doubtful.strange.len() < KEPT_MAX {
                    doubtful.strange.push(path.join(&entry.name)?);
                }
            }
            if page.end {
                return Ok(());
            }
        }
    }

    async fn place(&self, ino: InodeId) -> Result<HomePlace> {
        self.client.where_at_home(ino, Some(self.relation)).await
    }

    /// Compares one entry, repeatedly while it may change.
    async fn compare(&self, thing: Thing) -> Outcome<Seen> {
        let (mut before, mut tries) = (None, 0);
        loop {
            let place = match self.place(thing.ino).await {
                Ok(place) => place,
                Err(e) if e.kind == ErrorKind::NotFound => {
                    let is_directory = thing.kind == FileKind::Directory;
                    let why = self.patterns.excludes(&thing.path.to_slashed(), is_directory);
                    return Ok(if why.is_some() { Seen::Excluded } else { Seen::Unknown(thing) });
                }
                Err(e) if matches!(e.kind, ErrorKind::Stale | ErrorKind::Invalid) => {
                    return Ok(Seen::Nothing);
                }
                Err(e) => return Err(Fault::Unreachable(e)),
            };
            let why = match self.difference(&thing, &place).await {
                Ok((bytes, unproved)) => return Ok(Seen::Same { kind: thing.kind, bytes, unproved }),
                Err(Fault::Diverged(_) | Fault::Broken(_)) if is_gone(&self.client, thing.ino).await => {
                    return Ok(Seen::Nothing);
                }
                Err(Fault::Diverged(divergence)) => divergence.error.to_string(),
                Err(Fault::Broken(e)) => e.to_string(),
                Err(other) => return Err(other),
            };
            // The result is final if the state is unchanged with no change in flight, or if none comes until
            // a conflict is resolved.
            let stays = !place.unsettled && !place.changing && before.as_ref() == Some(&place);
            if stays || place.conflict {
                let (ino, is_file) = (Some(thing.ino), thing.kind == FileKind::Regular);
                return Ok(Seen::Wrong(Wrong { ino, is_file, path: thing.path, why }));
            }
            tries += 1;
            if tries > TRIES {
                return Ok(Seen::UnderWay);
            }
            before = Some(place);
            self.env.clock.sleep(AGAIN).await;
        }
    }

    /// Bytes read that match their receipts, and bytes without a receipt; `Diverged` or `Broken`: the
    /// difference.
    async fn difference(&self, thing: &Thing, place: &HomePlace) -> Outcome<(u64, u64)> {
        let path = HomePath::parse(&place.path).map_err(Fault::Broken)?;
        let found = self.home.stat(&path).await?;
        let found = found.ok_or_else(|| Fault::diverged(&path, None, None))?;
        let expect = expect(&*self.home, &path, &place.expect).await?;
        if !expect.admits(&found.fingerprint) {
            return Err(Fault::diverged(&path, Some(expect.fingerprint()), Some(&found.fingerprint)));
        }
        let attr = self.client.getattr(thing.ino).await.map_err(as_fault)?.attr;
        if let Some(how) = self.differs(&attr, &found) {
            return Err(Fault::Broken(Error::damaged(format!("{path} at home {how}"))));
        }
        if path != thing.path {
            self.require_name(thing, &path, &found).await?;
        }
        if attr.kind != FileKind::Regular || !self.data || found.fingerprint.size == 0 {
            return Ok((0, 0));
        }
        let size = found.fingerprint.size;
        let blocks = blocks(&place.receipts, 0, size);
        let unproved = size - covered(&blocks, size);
        let (mut check, mut at) = (Check::new(blocks), 0);
        let reader = self.home.open_read(&path, &expect).await?;
        while at < size {
            let len = PART_BYTES.min(size - at);
            let bytes = read(&*reader, &path, at, len).await?;
            check
                .feed(at, &bytes)
                .map_err(|e| Fault::Broken(e.doing(format_args!("read {path} at home"))))?;
            at += len;
        }
        Ok((size - unproved, unproved))
    }

    /// A file with several names is compared under the one that home got first; under each other one that is
    /// not excluded, home must have that file, too.
    async fn require_name(&self, thing: &Thing, known: &HomePath, found: &Found) -> Outcome<()> {
        let is_directory = thing.kind == FileKind::Directory;
        let one_name = !self.home.traits().hard_links || is_directory;
        if one_name || self.patterns.excludes(&thing.path.to_slashed(), is_directory).is_some() {
            return Ok(());
        }
        let path = &thing.path;
        match self.home.stat(path).await? {
            Some(there) if there.fingerprint == found.fingerprint => Ok(()),
            Some(_) => {
                let why = format!("{path} at home is another file than {known}, and one file here");
                Err(Fault::Broken(Error::damaged(why)))
            }
            None => {
                let why = format!("{path} is not at home, where this file has the name {known} only");
                Err(Fault::Broken(Error::damaged(why)))
            }
        }
    }

    fn differs(&self, attr: &Attr, found: &Found) -> Option<String> {
        if attr.kind != found.fingerprint.kind {
            return Some(format!("is {}", found.fingerprint));
        }
        if attr.kind == FileKind::Regular && attr.size != found.fingerprint.size {
            return Some(format!("has {} bytes, the file {}", found.fingerprint.size, attr.size));
        }
        let (owners, there) = (self.home.traits().owners, &found.attrs);
        // Root's files belong to user 65534 where root does not pass.
        let is_same = |here: u32, there: u32| here == there || here == 0 && there == NOBODY;
        if owners && !(is_same(attr.uid, there.uid) && is_same(attr.gid, there.gid)) {
            return Some(format!(
                "belongs to {}:{}, the file to {}:{}",
                there.uid, there.gid, attr.uid, attr.gid
            ));
        }
        // A home with an id map does not get the bits with which a file runs as its owner.
        let kept = if attr.kind == FileKind::Regular { !SET_ID_BITS } else { !0 };
        if attr.kind != FileKind::Symlink && ![attr.mode, attr.mode & kept].contains(&there.mode) {
            return Some(format!("has the mode {:o}, the file {:o}", there.mode, attr.mode));
        }
        None
    }

    /// Waits for the changes in flight, then checks again the entries that were only on one side.
    async fn decide(&self, doubtful: Doubtful, verified: &mut Verified) -> Result<()> {
        if doubtful.unknown.is_empty() && doubtful.strange.is_empty() {
            return Ok(());
        }
        let quiet = self.wait_until_quiet().await?;
        for thing in doubtful.unknown {
            let Thing { ino, kind, path } = thing.clone();
            match self.compare(thing).await? {
                Seen::Unknown(_) if is_gone(&self.client, ino).await => {}
                Seen::Unknown(_) if quiet => {
                    let why = format!("{path} is not at home, and no part of it is in flight");
                    let wrong = Wrong { ino: Some(ino), is_file: kind == FileKind::Regular, path, why };
                    verified.note(Seen::Wrong(wrong), &mut Doubtful::default());
                }
                Seen::Unknown(_) => verified.under_way += 1,
                seen => verified.note(seen, &mut Doubtful::default()),
            }
        }
        for path in doubtful.strange {
            let Some(found) = self.home.stat(&path).await? else { continue };
            if self.is_here(&path).await? {
                continue;
            }
            if !quiet {
                verified.under_way += 1;
                continue;
            }
            let why = format!("{path} at home is {}: the volume has nothing of this name", found.fingerprint);
            let wrong = Wrong { ino: None, is_file: false, path, why };
            verified.note(Seen::Wrong(wrong), &mut Doubtful::default());
        }
        Ok(())
    }

    /// Returns whether no change of names is in flight any more.
    async fn wait_until_quiet(&self) -> Result<bool> {
        for _ in 0..TRIES {
            let all = self.client.relations(None).await?;
            let of = all.into_iter().find(|info| info.id == self.relation);
            let of = of.ok_or_else(|| Error::not_found(format!("relation {} was removed", self.relation)))?;
            if of.backlog_names == 0 && of.unseen_directories == 0 {
                return Ok(true);
            }
            self.env.clock.sleep(AGAIN).await;
        }
        Ok(false)
    }

    async fn is_here(&self, path: &HomePath) -> Result<bool> {
        let mut at = self.root;
        for name in path.names() {
            match self.client.lookup(&crate::weir::root(), at, name).await {
                Ok(Some(stat)) => at = stat.attr.ino,
                Ok(None) => return Ok(false),
                Err(e) if is_absent(&e) || matches!(e.kind, ErrorKind::Name(_)) => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
}

fn is_absent(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::NotFound | ErrorKind::Stale | ErrorKind::Invalid)
}

async fn is_gone(client: &Client, ino: InodeId) -> bool {
    client.getattr(ino).await.is_err_and(|e| is_absent(&e))
}

fn as_fault(e: Error) -> Fault {
    if is_absent(&e) { Fault::Broken(e) } else { Fault::Unreachable(e) }
}
