//! Small files that all clients use concurrently: inline data moves to targets while clients write, append,
//! truncate and read.
//!
//! A *bout*: one process makes a file of a few bytes to some 10 KiB, or takes the last one, and all idle
//! processes join in, each for a few steps, a millisecond apart. Half of the files have separate ranges for
//! each process, the others are appended to. Then the whole file is read, and is replaced by the next through
//! a rename over it or by its removal, while some still have it open. Oracle: see [`crate::concurrent_file`].

use crate::calls::root_cred;
use crate::client_states::ClientStates;
use crate::concurrent_file::{Changes, Moment, ReadSpan, Writer};
use crate::context::Context;
use player::Player;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_client::Client;
use weir_env::{Rng, sim::World};
use weir_proto::{Error, InodeId};

mod player;

/// Files at a time.
const PLACES: usize = 2;

pub const CREATE: &str = "small create";
pub const WRITE: &str = "small write";
pub const APPEND: &str = "small append";
pub const READ: &str = "small read";
pub const SIZE: &str = "small size";
pub const ZERO: &str = "small zero";
pub const SYNC: &str = "small sync";
/// Operations on small files in the table of marks.
pub const OPERATIONS: [&str; 7] = [CREATE, WRITE, APPEND, READ, SIZE, ZERO, SYNC];

pub struct SmallFiles {
    world: World,
    client_states: Arc<ClientStates>,
    places: Vec<tokio::sync::Mutex<Place>>,
    /// The bout that began last, and its file.
    last: Mutex<(u64, Option<Arc<SmallFile>>)>,
    /// The last bout of each process.
    joined: Vec<AtomicU64>,
    bout_begins: Notify,
    moments: AtomicU64,
}

#[derive(Default)]
struct Place {
    file: Option<Arc<SmallFile>>,
    name: (usize, String),
}

impl Place {
    /// The process that was about to remove the file died, or failed: whether it still has its name is
    /// unknown.
    fn give_up(&mut self) {
        self.file.take_if(|file| file.is_leaving());
    }
}

pub struct SmallFile {
    pub ino: InodeId,
    /// Its name in messages.
    title: String,
    shape: Shape,
    changes: Mutex<Changes>,
    /// A removal has begun.
    is_leaving: Mutex<bool>,
    appended: AtomicU64,
    /// The content at the first read after all processes had stopped using it.
    settled: Mutex<Option<Vec<u8>>>,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Records follow after this number of bytes.
    log_from: Option<u64>,
    /// Writes stay within this size.
    span: u64,
    /// Block `n` of a file belongs to process `n % processes`.
    block: u64,
}

impl SmallFile {
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn is_leaving(&self) -> bool {
        *self.is_leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn leaves(&self) {
        *self.is_leaving.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// The content of a small file that a snapshot must show: as a read during the taking could have shown it.
pub struct SnapshotSmallFile {
    file: Arc<SmallFile>,
    name: (usize, String),
    from: Moment,
    to: Moment,
    shown: Option<Vec<u8>>,
}

impl SnapshotSmallFile {
    pub fn ino(&self) -> InodeId {
        self.file.ino
    }
    /// Its directory's number, and its name.
    pub fn name(&self) -> &(usize, String) {
        &self.name
    }
}

impl SmallFiles {
    pub fn new(world: &World, client_states: &Arc<ClientStates>, processes: usize) -> SmallFiles {
        SmallFiles {
            world: world.clone(),
            client_states: client_states.clone(),
            places: (0..PLACES).map(|_| Default::default()).collect(),
            last: Mutex::default(),
            joined: (0..processes).map(|_| AtomicU64::new(0)).collect(),
            bout_begins: Notify::new(),
            moments: AtomicU64::new(0),
        }
    }

    fn moment(&self) -> Moment {
        self.moments.fetch_add(1, Relaxed) + 1
    }
    fn last(&self) -> MutexGuard<'_, (u64, Option<Arc<SmallFile>>)> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn may_have_lost(&self, writer: &Writer) -> bool {
        self.client_states.cuts(writer.who.client) != writer.who.cuts
            || self.client_states.was_full_since(writer.at)
    }
    fn check(&self, file: &SmallFile, from: Moment, to: Moment, got: &[u8]) -> Result<(), String> {
        let may_have_lost = |writer: &Writer| self.may_have_lost(writer);
        file.changes().check(&ReadSpan { from, to, may_have_lost: &may_have_lost }, got)
    }

    /// Waits until a bout begins.
    pub async fn bout(&self) {
        self.bout_begins.notified().await;
    }

    /// One bout of a process, its own or another one's.
    pub async fn step(&self, context: &Context, client: &Client, me: usize, process: usize, rng: &Rng) {
        let excused = self.client_states.excuses_all(me);
        let who = self.client_states.who(me);
        let player = Player { small_files: self, context, client, me, process, rng };
        let others = self.other_bout(process, context.rest(rng)).await;
        let file = match others {
            Some(file) => Some((file, None)),
            None => player.begin_bout().await,
        };
        if let Some((file, handle)) = file
            && let Err((what, e)) = player.play(&file, handle).await
        {
            let is_cut = who != self.client_states.who(me);
            context.complain(me, excused || is_cut, format!("c{me}, {}: {what}", file.title), &e);
            file.changes().doubt(me);
        }
    }

    /// The file of a bout that this process has not joined, if one began or begins before the rest is over.
    async fn other_bout(&self, process: usize, rest: impl Future<Output = ()>) -> Option<Arc<SmallFile>> {
        let begins = self.bout_begins.notified();
        let is_new = self.joined[process].load(Relaxed) < self.last().0;
        if !is_new {
            tokio::select! {
                biased;
                () = begins => {}
                () = rest => return None,
            }
        }
        let (number, file) = self.last().clone();
        self.joined[process].store(number, Relaxed);
        file
    }

    /// The directory and name of each file.
    pub async fn names(&self) -> BTreeSet<(usize, String)> {
        let mut names = BTreeSet::new();
        for place in &self.places {
            let mut place = place.lock().await;
            place.give_up();
            names.extend(place.file.is_some().then(|| place.name.clone()));
        }
        names
    }

    /// Before a snapshot is taken: the files that may be in it, in their state from now on.
    pub fn before_snapshot(&self) -> Vec<SnapshotSmallFile> {
        let is_there = |place: &tokio::sync::Mutex<Place>| {
            let place = place.try_lock().ok()?;
            Some((place.file.clone()?, place.name.clone()))
        };
        let files: Vec<_> = self.places.iter().filter_map(is_there).collect();
        let from = self.moment();
        files
            .into_iter()
            .map(|(file, name)| SnapshotSmallFile { file, name, from, to: from, shown: None })
            .collect()
    }
    /// The files that must be in it.
    pub fn after_snapshot(&self, mut files: Vec<SnapshotSmallFile>) -> Vec<SnapshotSmallFile> {
        files.retain(|old| !old.file.is_leaving());
        let to = self.moment();
        files.iter_mut().for_each(|old| old.to = to);
        files
    }
    pub fn check_snapshot(&self, old: &mut SnapshotSmallFile, got: Vec<u8>, what: impl Display) {
        let what = format!("{} ({:?}) {what}", old.file.title, old.file.ino);
        match &old.shown {
            Some(shown) => assert_same(shown, &got, &what),
            None => {
                self.check(&old.file, old.from, old.to, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
                old.shown = Some(got);
            }
        }
    }

    /// Reads every file while no process uses any: the content of the first read stays.
    pub async fn verify(&self, context: &Context, client: &Client, when: &str) -> Result<(), Error> {
        for place in &self.places {
            let mut place = place.lock().await;
            place.give_up();
            let Some(file) = &place.file else { continue };
            let (dir, name) = &place.name;
            let what = format!("{when}: {} ({:?})", file.title, file.ino);
            let found = client.lookup(&root_cred(), context.dirs[*dir], name.as_bytes()).await?;
            let stat = found.unwrap_or_else(|| panic!("{what}: the name is gone"));
            assert_eq!(stat.attr.ino, file.ino, "{what}: another file");
            let got = crate::calls::read_whole(client, file.ino).await.map_err(|e| e.doing(&what))?;
            assert_eq!(stat.attr.size, got.len() as u64, "{what}: size");
            let now = self.moment();
            self.check(file, now, now, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
            let mut settled = file.settled.lock().unwrap_or_else(PoisonError::into_inner);
            let first = settled.get_or_insert_with(|| got.clone());
            assert_same(first, &got, &what);
        }
        Ok(())
    }
}

fn assert_same(first: &[u8], got: &[u8], what: &str) {
    let parted = first.iter().zip(got).position(|(a, b)| a != b).unwrap_or(first.len().min(got.len()));
    let tail = |bytes: &[u8]| bytes.iter().skip(parted).take(12).copied().collect::<Vec<_>>();
    assert!(
        first == got,
        "{what}: {} bytes, and {} at the first read; at {parted} {:?}, and {:?} then",
        got.len(),
        first.len(),
        tail(got),
        tail(first)
    );
}
