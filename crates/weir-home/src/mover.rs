//! The mover: takes work from the metadata leader, reads like a client, writes home, reports the results.
//!
//! Invariants: memory is one window for each home, regardless of the backlog; results reported as done are
//! durable at home; ranges of one file are written in the assigned order. All work may be done twice, so a
//! mover's death loses nothing. A mover that the leader may consider dead starts nothing more at home: other
//! movers get its work.
//!
//! Refuses to know: which work comes next and in which order (the leader decides), how a home stores entries
//! (the back ends).
use crate::backup::Due;
use crate::gate::Gate;
use crate::pace::Pace;
use crate::recall;
use crate::tuner::{self, Choice, FILE_WORK, TimeOf, Tuner};
use crate::{Attrs, Expect, Fault, Fingerprint, Home, HomePath, HomeWriter, ListEntry, Make, Outcome, Xattr};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, mpsc};
use weir_client::{Client, Recall};
use weir_env::{BoxFuture, Env, watch};
use weir_proto::checksum::crc32c_append;
use weir_proto::meta::{FileKind, Time};
use weir_proto::recall::Learned;
use weir_proto::relation::{
    BANDWIDTH_LIMIT, Direction, ExtentDone, ExtentWork, HOME_ENTRIES_MAX, HomeAttrs, HomeEntry, HomeIds,
    ListDone, ListWork, NameAction, NameDone, NameWork, Outcome as Reported, RECEIPT_BLOCK, RelationId,
    RelationWork,
};
use weir_proto::{Error, ErrorKind, InodeId, Result, VolumeId, Wire};

/// Entries per page when a directory is read again: a home that is a directory reads all names for each page.
const PAGE: usize = 4096;
/// Pieces of one stream that are read ahead of the write.
const PIECES_AHEAD: usize = 4;
/// Ranges and names that this mover holds at most: a distant home needs many small files in flight.
const ITEMS_MAX: usize = 2048;
/// Limit on those requested or reported in one message.
const REPORTED_MAX: usize = 256;
/// Bytes of ranges requested in one message. They are read piece by piece: this is not memory.
const ASKED_MAX: u64 = 512 << 20;
/// Ranges that are recalled in parallel.
const RECALLS_AT_ONCE: usize = 8;
/// Bytes of a message about a directory, and of an entry without its variable parts.
const LISTING_BYTES_MAX: usize = 256 << 10;
const ENTRY_BYTES: usize = 128;
/// How long a request for work waits at the leader.
const WAIT: Duration = Duration::from_secs(2);
/// The interval at which a mover asks for its parts of bandwidth limits: meanwhile it may exceed them.
const LIMITS_EVERY: Duration = Duration::from_secs(1);
/// Pause after an error of the leader or the network.
const PAUSE: Duration = Duration::from_millis(500);

/// Opens a home by its URL.
pub trait OpenHome: Send + Sync + 'static {
    fn open(&self, which: &HomeOf) -> BoxFuture<'_, Outcome<Arc<dyn Home>>>;
}

/// The use of a home.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum HomeUse {
    Relation(RelationId),
    Backups(VolumeId),
}
impl std::fmt::Display for HomeUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            HomeUse::Relation(relation) => write!(f, "relation {relation}"),
            HomeUse::Backups(volume) => write!(f, "backups of volume {volume}"),
        }
    }
}

/// Identifies a home.
#[derive(Clone, Debug)]
pub struct HomeOf {
    pub holds: HomeUse,
    pub url: String,
    pub ids: HomeIds,
    /// The user who configured it.
    pub by: u32,
    /// Nothing was ever shipped there for this relation.
    pub is_new: bool,
    /// Nothing is ever changed there.
    pub only_reads: bool,
}

/// A mover. The homes that it has opened stay open from one session to the next.
pub struct Mover {
    env: Env,
    opener: Arc<dyn OpenHome>,
    homes: Arc<Homes>,
    backups: Arc<Due>,
    /// The previous session's client.
    earlier: Mutex<Option<Client>>,
    /// A fixed tuning for every home; none: it is found by measurement.
    fixed: Option<Choice>,
}

type Homes = Mutex<BTreeMap<RelationId, Arc<dyn Home>>>;

/// State of one session with the leader.
struct Shared {
    env: Env,
    client: Client,
    opener: Arc<dyn OpenHome>,
    homes: Arc<Homes>,
    fixed: Option<Choice>,
    /// Set when this session is over: all running work ends.
    over: watch::Sender<bool>,
    relations: Mutex<BTreeMap<RelationId, Arc<Relation>>>,
    /// Homes that are being opened, and the work that waits for it.
    opening: Mutex<BTreeMap<RelationId, Vec<RelationWork>>>,
    /// This mover's parts of the relations' bandwidth limits.
    limits: Mutex<BTreeMap<RelationId, u64>>,
    /// Items in flight.
    items: AtomicUsize,
    less: Notify,
}

/// This mover's work for one relation.
struct Relation {
    id: RelationId,
    home: Arc<dyn Home>,
    done: mpsc::UnboundedSender<Done>,
    /// Limits calls that change names.
    names: Gate,
    /// Limits files that are written, in parts of streams.
    streams: Gate,
    /// Limits bytes that are read and not written yet.
    window: Gate,
    /// Its part of the relation's bandwidth limit.
    pace: Pace,
    /// Parts of a stream.
    packed: u64,
    tuner: Mutex<Tuner>,
    /// Ranges that wait for their turn, by file.
    files: Mutex<BTreeMap<InodeId, VecDeque<ExtentWork>>>,
    meter: Meter,
}

/// Where streams spend their time.
#[derive(Default)]
struct Meter {
    bytes: AtomicU64,
    reading_us: AtomicU64,
    writing_us: AtomicU64,
    /// Waits for the bandwidth limit.
    paced_us: AtomicU64,
    /// Time from the read of a piece to its write, and the number of pieces.
    piece_us: AtomicU64,
    pieces: AtomicU64,
    file_us: AtomicU64,
    files: AtomicU64,
    /// Written files, in units of work.
    file_work: AtomicU64,
    busy: AtomicUsize,
}

enum Done {
    Name(NameDone),
    Extent(ExtentDone),
    Orphan(InodeId),
    List(ListDone),
}

/// Results of one report.
struct Batch {
    names: Vec<NameDone>,
    extents: Vec<ExtentDone>,
    orphans: Vec<InodeId>,
    listings: Vec<ListDone>,
    count: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mover {
    pub fn new(env: Env, opener: Arc<dyn OpenHome>) -> Mover {
        let backups = Arc::new(Due::new(env.clone(), opener.clone()));
        Mover { env, opener, homes: Arc::default(), backups, earlier: Mutex::default(), fixed: None }
    }

    /// A mover without tuning: for measurements.
    pub fn fixed(env: Env, opener: Arc<dyn OpenHome>, choice: Choice) -> Mover {
        Mover { fixed: Some(choice), ..Mover::new(env, opener) }
    }

    /// Reopens every home at its next use: between two sessions, after a change of the rules for homes.
    pub fn forget_homes(&self) {
        lock(&self.homes).clear();
        self.backups.forget_homes();
    }

    /// Works until the leader may consider `client` dead, was unreachable or has restarted: this mover's work
    /// goes to others then, so close `client` and continue with a new one.
    pub fn run<'a>(&'a self, client: &'a Client) -> BoxFuture<'a, ()> {
        Box::pin(self.run_unboxed(client))
    }
    async fn run_unboxed(&self, client: &Client) {
        let shared = Arc::new(Shared {
            env: self.env.clone(),
            client: client.clone(),
            opener: self.opener.clone(),
            homes: self.homes.clone(),
            fixed: self.fixed,
            over: watch::Sender::new(false),
            relations: Mutex::default(),
            opening: Mutex::default(),
            limits: Mutex::default(),
            items: AtomicUsize::new(0),
            less: Notify::new(),
        });
        // Ends running work also if this future is dropped.
        let _life = Life(shared.clone());
        if let Some(left) = lock(&self.earlier).replace(client.clone()).and_then(|c| c.session_left()) {
            let client = client.clone();
            shared.spawn("close the earlier session", async move {
                if let Err(e) = client.close_session(left).await {
                    tracing::debug!("close the earlier session {left}: {e}");
                }
            });
        }
        let me = shared.clone();
        shared.spawn("recalls", async move { me.recalls().await });
        let me = shared.clone();
        shared.spawn("limits", async move { me.keep_limits().await });
        let (due, of) = (self.backups.clone(), client.clone());
        shared.spawn("backups", async move { due.run(&of).await });
        tokio::select! {
            biased;
            () = client.may_be_taken_for_dead() => {}
            () = ended(shared.over.subscribe()) => {}
            () = shared.ship() => {}
        }
    }
}

/// Waits for the end of a session.
async fn ended(mut over: watch::Receiver<bool>) {
    let _ = over.wait_for(|over| *over).await; // closed: all of that session is gone
}

struct Life(Arc<Shared>);
impl Drop for Life {
    fn drop(&mut self) {
        self.0.over.send_replace(true);
    }
}

impl Shared {
    /// A task that ends with this session.
    fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let over = self.over.subscribe();
        self.env.tasks.spawn(name, async move {
            tokio::select! {
                biased;
                () = ended(over) => {}
                () = work => {}
            }
        });
    }

    /// Asks for its parts of bandwidth limits; false: the leader is of an older program, which has none.
    async fn learn_limits(&self) -> bool {
        match self.client.relation_rules().await {
            Ok(all) => {
                let limits: BTreeMap<RelationId, u64> =
                    all.into_iter().filter_map(|of| Some((of.relation, of.share?))).collect();
                let relations = lock(&self.relations);
                relations.iter().for_each(|(id, r)| r.pace.set_limit(limits.get(id).copied()));
                *lock(&self.limits) = limits;
                true
            }
            Err(e) => {
                tracing::debug!("no bandwidth limits: {e}"); // the last ones stay
                e.kind != ErrorKind::Unsupported
            }
        }
    }

    async fn keep_limits(&self) {
        while self.learn_limits().await {
            self.env.clock.sleep(LIMITS_EVERY).await;
        }
    }

    /// Until an error: only the leader knows the work in a reply that was lost.
    async fn ship(self: &Arc<Self>) {
        let (shared, mut leader) = (self, 0);
        loop {
            let less = shared.less.notified();
            let under_way = shared.items.load(Relaxed);
            if under_way >= ITEMS_MAX {
                less.await;
                continue;
            }
            let items = (ITEMS_MAX - under_way).min(REPORTED_MAX) as u32;
            match shared.client.lease_work(leader, ASKED_MAX, items, WAIT, &shared.limited_by()).await {
                Ok(taken) => {
                    leader = taken.leader;
                    for work in taken.relations {
                        shared.begin(work);
                    }
                }
                Err(e) => {
                    tracing::debug!("no work: {e}");
                    return shared.env.clock.sleep(PAUSE).await;
                }
            }
        }
    }

    /// Recalls evicted bytes until the session ends: readers wait for it, so nothing else delays it.
    async fn recalls(self: &Arc<Self>) {
        let free = Arc::new(Semaphore::new(RECALLS_AT_ONCE));
        loop {
            let Ok(first) = free.clone().acquire_owned().await else { return };
            let max = 1 + free.available_permits() as u32;
            let taken = match self.client.take_recalls(max, WAIT).await {
                Ok(taken) => taken,
                Err(e) => {
                    tracing::debug!("no recalls: {e}");
                    self.env.clock.sleep(PAUSE).await;
                    continue;
                }
            };
            let mut permits = vec![first];
            for recall in taken {
                let permit = permits.pop().or_else(|| free.clone().try_acquire_owned().ok());
                let me = self.clone();
                self.spawn("recall", async move {
                    let _one = permit;
                    me.bring_back(recall).await;
                });
            }
        }
    }

    async fn bring_back(self: &Arc<Self>, recall: Recall) {
        let what = format!("inode {} bytes {} to {}", recall.work.ino, recall.work.from, recall.work.to);
        let done = match self.bring(&recall).await {
            Ok(learned) => self.client.filled_with(recall, learned).await,
            Err(failed) => {
                tracing::warn!("{what} could not be brought back: {}", failed.why);
                self.client.recall_failed(recall, &failed.why, failed.retry).await
            }
        };
        if let Err(e) = done {
            tracing::debug!("{what}: the leader was not told: {e}");
        }
    }

    async fn bring(
        self: &Arc<Self>,
        recall: &Recall,
    ) -> std::result::Result<Option<Learned>, recall::Failed> {
        let mut before = None;
        loop {
            let place = self.client.where_at_home(recall.work.ino, None).await.map_err(|e| {
                recall::Failed { why: e.to_string(), retry: e.kind != ErrorKind::NotFound, diverged: false }
            })?;
            let (id, url, ids, by) = (place.relation, place.url.clone(), place.ids.clone(), place.by);
            let only_reads = place.direction == Direction::Mirror;
            let which = HomeOf { holds: HomeUse::Relation(id), url, ids, by, is_new: false, only_reads };
            let relation = self.relation(id, &which).await?;
            relation.pace.count(recall.work.to.saturating_sub(recall.work.from), self.env.clock.now());
            match recall::bring(&self.client, &*relation.home, &place, recall).await {
                // Another range may have been shipped, or the name changed meanwhile: then the expected
                // fingerprint has changed, too.
                Err(failed) if failed.diverged && (place.changing || before.as_ref() != Some(&place)) => {
                    before = Some(place);
                    self.env.clock.sleep(PAUSE).await;
                }
                done => return done,
            }
        }
    }

    /// Does not wait for homes that are slow to open.
    fn begin(self: &Arc<Self>, work: RelationWork) {
        self.items.fetch_add(items_of(&work), Relaxed);
        let mut opening = lock(&self.opening);
        if let Some(waiting) = opening.get_mut(&work.relation) {
            return waiting.push(work);
        }
        let known = lock(&self.relations).get(&work.relation).cloned();
        if let Some(relation) = known {
            drop(opening);
            return self.start(relation, work);
        }
        let (relation, url, ids, by) = (work.relation, work.url.clone(), work.ids.clone(), work.by);
        let only_reads = work.direction == Direction::Mirror;
        let holds = HomeUse::Relation(relation);
        let which = HomeOf { holds, url, ids, by, is_new: work.is_new, only_reads };
        opening.insert(relation, vec![work]);
        let me = self.clone();
        self.spawn("open home", async move {
            let opened = me.relation(relation, &which).await;
            let waiting = lock(&me.opening).remove(&relation).unwrap_or_default();
            for work in waiting {
                match &opened {
                    Ok(relation) => me.start(relation.clone(), work),
                    Err(fault) => me.refuse_all(work, fault.clone()),
                }
            }
        });
    }

    fn start(self: &Arc<Self>, relation: Arc<Relation>, work: RelationWork) {
        for list in work.listings {
            let (me, relation) = (self.clone(), relation.clone());
            self.spawn("read directory", async move { me.list(&relation, list).await });
        }
        for ino in work.orphans {
            let (me, relation) = (self.clone(), relation.clone());
            self.spawn("recover file", async move { me.recover(&relation, ino).await });
        }
        if !work.names.is_empty() {
            let (me, relation, names) = (self.clone(), relation.clone(), work.names);
            self.spawn("names", async move { me.names(&relation, names).await });
        }
        // All ranges of a file at once: one that arrived after the file's task had ended would be refused as
        // a foreign change.
        let mut by_file: BTreeMap<InodeId, VecDeque<ExtentWork>> = BTreeMap::new();
        for item in work.extents {
            by_file.entry(item.ino).or_default().push_back(item);
        }
        for (ino, mut items) in by_file {
            let mut files = lock(&relation.files);
            if let Some(queue) = files.get_mut(&ino) {
                queue.append(&mut items);
                continue;
            }
            files.insert(ino, items);
            drop(files);
            let (me, relation) = (self.clone(), relation.clone());
            self.spawn("ship file", async move { me.file(&relation, ino).await });
        }
    }

    /// Opens the home on first use.
    async fn relation(self: &Arc<Self>, id: RelationId, which: &HomeOf) -> Outcome<Arc<Relation>> {
        if let Some(known) = lock(&self.relations).get(&id) {
            return Ok(known.clone());
        }
        let opened = lock(&self.homes).get(&id).cloned();
        let home = match opened {
            Some(home) => home,
            None => self.opener.open(which).await?,
        };
        lock(&self.homes).insert(id, home.clone());
        let (done, reported) = mpsc::unbounded_channel();
        let calls_max = home.traits().calls_max;
        let tuner = match self.fixed {
            Some(choice) => Tuner::fixed(choice),
            None => Tuner::new(calls_max),
        };
        let (packed, choice) = (tuner::packed(calls_max), tuner.choice());
        self.learn_limits().await; // before its first byte
        let limit = lock(&self.limits).get(&id).copied();
        let relation = Arc::new(Relation {
            id,
            home,
            done,
            names: Gate::new(calls_max as u64),
            streams: Gate::new(choice.streams as u64 * packed),
            window: Gate::new(choice.window_bytes),
            pace: Pace::new(limit),
            packed,
            tuner: Mutex::new(tuner),
            files: Mutex::default(),
            meter: Meter::default(),
        });
        {
            let mut relations = lock(&self.relations);
            // A concurrent caller may have opened it: all of a file's work must go through one relation.
            if let Some(known) = relations.get(&id) {
                return Ok(known.clone());
            }
            relations.insert(id, relation.clone());
        }
        let (me, of) = (self.clone(), relation.clone());
        self.spawn("tell", async move { me.report(of.id, reported).await });
        let (me, of) = (self.clone(), relation.clone());
        self.spawn("pace", async move { me.keep_tuning(&of).await });
        Ok(relation)
    }

    /// How long a small request takes there.
    async fn round_trip(&self, home: &dyn Home) -> Duration {
        let begun = self.env.clock.now();
        let _ = home.space().await; // an unreachable home reports an error when it is used
        self.env.clock.now().since(begun)
    }

    fn refuse_all(self: &Arc<Self>, work: RelationWork, fault: Fault) {
        let outcome = match &fault {
            Fault::Denied(e) => Reported::Denied { why: e.to_string() },
            fault => reported(fault),
        };
        let names: Vec<NameDone> =
            work.names.iter().map(|n| NameDone { number: n.number, outcome: outcome.clone() }).collect();
        let extents: Vec<ExtentDone> = work.extents.iter().map(|e| extent_done(e, outcome.clone())).collect();
        let listings =
            work.listings.iter().map(|l| ListDone { dir: l.dir, outcome: outcome.clone() }).collect();
        let (me, count) = (self.clone(), items_of(&work));
        let done = Batch { names, extents, orphans: work.orphans, listings, count };
        self.spawn("tell", async move {
            me.report_to_leader(work.relation, done).await;
        });
    }

    fn end_items(&self, count: usize) {
        self.items.fetch_sub(count, Relaxed);
        self.less.notify_one();
    }

    /// Reports finished work to the leader: everything that is ready in one message.
    async fn report(&self, relation: RelationId, mut done: mpsc::UnboundedReceiver<Done>) {
        let mut batch = Vec::new();
        while done.recv_many(&mut batch, REPORTED_MAX).await > 0 {
            let (mut names, mut extents, mut orphans) = (Vec::new(), Vec::new(), Vec::new());
            let (mut listings, count) = (Vec::new(), batch.len());
            for done in batch.drain(..) {
                match done {
                    Done::Name(done) => names.push(done),
                    Done::Extent(done) => extents.push(done),
                    Done::Orphan(ino) => orphans.push(ino),
                    Done::List(done) => listings.push(done),
                }
            }
            self.report_to_leader(relation, Batch { names, extents, orphans, listings, count }).await;
        }
    }

    /// Work that cannot be reported stays assigned to this mover: then this session must end.
    async fn report_to_leader(&self, relation: RelationId, done: Batch) {
        let Batch { names, extents, orphans, listings, count } = done;
        match self.client.complete_work(relation, names, extents, orphans, listings).await {
            Ok(()) => self.end_items(count),
            Err(e) => {
                tracing::debug!("the leader was not told: {e}");
                self.over.send_replace(true);
            }
        }
    }

    /// Opens a file whose writer died, which makes the client recover it.
    async fn recover(&self, relation: &Relation, ino: InodeId) {
        if let Err(e) = self.client.recover_file(ino).await {
            tracing::debug!("recover inode {ino}, whose writer died: {e}");
            self.env.clock.sleep(PAUSE).await;
        }
        let _ = relation.done.send(Done::Orphan(ino)); // ends with this mover
    }

    // ---- listings of home

    async fn list(&self, relation: &Relation, work: ListWork) {
        let read = match work.again {
            true => self.read_again(relation, &work).await,
            false => self.read_to_end(relation, &work).await,
        };
        let outcome = match read {
            Ok(()) => Reported::Done { fingerprint: Bytes::new() },
            Err(reported) => reported,
        };
        let _ = relation.done.send(Done::List(ListDone { dir: work.dir, outcome })); // ends with this mover
    }

    async fn read_to_end(&self, relation: &Relation, work: &ListWork) -> std::result::Result<(), Reported> {
        let path = HomePath::parse(&work.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
        let mut lister = relation.home.read_dir(&path).await.map_err(|f| reported_of_directory(&f))?;
        let mut left = Vec::new();
        loop {
            let listing = lister.next(HOME_ENTRIES_MAX).await.map_err(|f| reported_of_directory(&f))?;
            left.extend(shown(relation, &path, listing.entries));
            while !left.is_empty() || listing.end {
                let rest = left.split_off(fits_a_message(&left));
                let part = std::mem::replace(&mut left, rest);
                let end = listing.end && left.is_empty();
                let reported = self.client.report_listing(relation.id, work.dir, part, end).await;
                reported.map_err(|e| refused(&e))?;
                if end {
                    return Ok(());
                }
            }
        }
    }

    /// Page by page in the order of the names, so that names missing between two entries are known to be
    /// gone.
    async fn read_again(&self, relation: &Relation, work: &ListWork) -> std::result::Result<(), Reported> {
        let path = HomePath::parse(&work.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
        let mut after: Option<Bytes> = None;
        loop {
            let page = relation.home.list(&path, after.as_deref(), PAGE).await;
            let page = page.map_err(|f| reported_of_directory(&f))?;
            let last = page.entries.last().map(|entry| entry.name.clone());
            let mut left = shown(relation, &path, page.entries);
            // A home that stores names in another form has its own order: then one page is the whole
            // directory, or in order.
            let behind = |entry: &HomeEntry| after.as_ref().is_none_or(|after| entry.name > *after);
            let is_ordered = left.is_sorted_by(|a, b| a.name < b.name) && left.first().is_none_or(behind);
            let is_all = after.is_none() && page.end;
            if !is_ordered && !is_all {
                let why = format!(
                    "more than {PAGE} entries, which this home does not list in the order of their names"
                );
                return Err(Reported::Refused { why });
            }
            left.sort_by(|a, b| a.name.cmp(&b.name));
            loop {
                let rest = left.split_off(fits_a_message(&left));
                let part = std::mem::replace(&mut left, rest);
                let end = page.end && left.is_empty();
                let is_rest = left.is_empty();
                let named = part.last().map(|entry| entry.name.clone());
                // Entries that are not shown were read, too.
                let upto = if is_rest { last.clone().max(named) } else { named }.filter(|_| !end);
                let from = after.clone().unwrap_or_default();
                if upto.is_none() && !end {
                    break;
                }
                after = upto.clone().or(after);
                let again = self.client.report_relisting(relation.id, work.dir, from, part, upto).await;
                again.map_err(|e| refused(&e))?;
                if end {
                    return Ok(());
                }
                if is_rest {
                    break;
                }
            }
        }
    }

    // ---- names

    /// The leader assigns only names that may be changed in parallel.
    async fn names(&self, relation: &Relation, names: Vec<NameWork>) {
        let calls: Vec<_> = names
            .iter()
            .map(|work| async {
                let _one = relation.names.pass(1).await;
                act(&*relation.home, &work.action).await
            })
            .collect();
        let outcomes = join_all(calls).await;
        let settled = relation.home.settle().await;
        for (work, outcome) in names.iter().zip(outcomes) {
            let outcome = match (outcome, &settled) {
                (Ok(fingerprint), Ok(())) => Reported::Done { fingerprint },
                (Err(fault), _) => reported(&fault),
                (Ok(_), Err(fault)) => reported(fault),
            };
            let _ = relation.done.send(Done::Name(NameDone { number: work.number, outcome })); // ends with this mover
        }
    }

    // ---- data

    /// Writes the assigned ranges of a file, in order, until none is left.
    async fn file(&self, relation: &Relation, ino: InodeId) {
        let first =
            lock(&relation.files).get(&ino).map_or(0, |queue| queue.iter().map(|item| item.len).sum());
        let _stream = relation.streams.pass(tuner::share(first, relation.packed)).await;
        let begun = self.env.clock.now();
        relation.meter.busy.fetch_add(1, Relaxed);
        let mut open: Option<Box<dyn HomeWriter>> = None;
        let mut failed: Option<Reported> = None;
        let mut unsynced: Vec<ExtentDone> = Vec::new();
        let mut written = 0;
        loop {
            let next = lock(&relation.files).get_mut(&ino).and_then(VecDeque::pop_front);
            let more = lock(&relation.files).get(&ino).is_some_and(|queue| !queue.is_empty());
            let Some(item) = next else {
                let mut files = lock(&relation.files);
                // More ranges may have arrived meanwhile.
                if files.get(&ino).is_none_or(VecDeque::is_empty) {
                    files.remove(&ino);
                    break;
                }
                continue;
            };
            if let Some(reported) = &failed {
                // Later parts of the file must not reach home first.
                unsynced.push(extent_done(&item, reported.clone()));
                continue;
            }
            match self.extent(relation, &mut open, &item).await {
                Ok(mut done) => {
                    written += item.len;
                    let enough = written >= lock(&relation.tuner).choice().extent_bytes;
                    let synced = match (&done.outcome, &open) {
                        // Small ranges are synced together with the following ones.
                        (Reported::Done { fingerprint }, Some(writer))
                            if fingerprint.is_empty() && (!more || enough) =>
                        {
                            written = 0;
                            Some(writer.sync().await)
                        }
                        _ => None,
                    };
                    match synced {
                        None => {}
                        Some(Ok(fingerprint)) => {
                            done.outcome = Reported::Done { fingerprint: Bytes::from(fingerprint.to_bytes()) }
                        }
                        Some(Err(fault)) => {
                            failed = Some(reported(&fault));
                            done.outcome = reported(&fault);
                        }
                    }
                    let durable =
                        matches!(&done.outcome, Reported::Done { fingerprint } if !fingerprint.is_empty());
                    unsynced.push(done);
                    if durable {
                        self.report_all(relation, &mut unsynced);
                    }
                }
                Err(outcome) => {
                    failed = Some(outcome.clone());
                    unsynced.push(extent_done(&item, outcome));
                }
            }
        }
        // Ranges that were never synced are not done.
        if let Some(reported) = &failed {
            unsynced
                .iter_mut()
                .filter(|d| matches!(d.outcome, Reported::Done { .. }))
                .for_each(|d| d.outcome = reported.clone());
        }
        self.report_all(relation, &mut unsynced);
        relation.meter.busy.fetch_sub(1, Relaxed);
        relation.meter.files.fetch_add(1, Relaxed);
        relation.meter.file_work.fetch_add(FILE_WORK, Relaxed);
        relation.meter.file_us.fetch_add(self.env.clock.now().since(begun).as_micros() as u64, Relaxed);
    }

    fn report_all(&self, relation: &Relation, done: &mut Vec<ExtentDone>) {
        for done in done.drain(..) {
            let _ = relation.done.send(Done::Extent(done)); // ends with this mover
        }
    }

    /// One range, or the end of the file. The fingerprint is empty while the written data is not synced yet.
    async fn extent(
        &self,
        relation: &Relation,
        open: &mut Option<Box<dyn HomeWriter>>,
        item: &ExtentWork,
    ) -> std::result::Result<ExtentDone, Reported> {
        if open.is_none() {
            let path = HomePath::parse(&item.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
            if item.expect.fingerprint.is_empty() {
                make_again(&*relation.home, &path).await.map_err(|f| reported(&f))?;
            }
            let expect = expect(&*relation.home, &path, &item.expect).await.map_err(|f| reported(&f))?;
            *open = Some(relation.home.open_write(&path, &expect).await.map_err(|f| reported(&f))?);
        }
        let writer = open.as_ref().expect("opened above");
        let mut done = extent_done(item, Reported::Done { fingerprint: Bytes::new() });
        if let Some(finish) = &item.finish {
            let attrs = attrs_of(&finish.attrs);
            let fingerprint = writer.finish(finish.size, &attrs).await.map_err(|f| reported(&f))?;
            done.outcome = Reported::Done { fingerprint: Bytes::from(fingerprint.to_bytes()) };
            return Ok(done);
        }
        done.sums = self.copy(relation, &**writer, item).await?;
        relation.meter.bytes.fetch_add(item.len, Relaxed);
        Ok(done)
    }

    /// Copies a range piece by piece, reading ahead; returns the checksum of each piece.
    async fn copy(
        &self,
        relation: &Relation,
        writer: &dyn HomeWriter,
        item: &ExtentWork,
    ) -> std::result::Result<Vec<u32>, Reported> {
        let end = item.offset + item.len;
        let (mut next, mut ahead, mut sums) = (item.offset, VecDeque::new(), Vec::new());
        loop {
            while next < end {
                let (at, len) = (next, (end - next).min(RECEIPT_BLOCK));
                // Only a task without a piece waits, so there is no deadlock.
                let room = match ahead.is_empty() {
                    true => relation.window.pass(len).await,
                    false if ahead.len() >= PIECES_AHEAD => break,
                    false => match relation.window.try_pass(len) {
                        Some(room) => room,
                        None => break,
                    },
                };
                let (tx, rx) = tokio::sync::oneshot::channel();
                let (client, item) = (self.client.clone(), item.clone());
                self.spawn("read piece", async move {
                    let _ = tx.send(read(&client, &item, at, len).await); // dropped after an error
                });
                ahead.push_back((at, len, room, rx, self.env.clock.now()));
                next += len;
            }
            let Some((at, len, _room, rx, asked)) = ahead.pop_front() else { return Ok(sums) };
            let begun = self.env.clock.now();
            let parts = match rx.await {
                Ok(Ok(parts)) => parts,
                Ok(Err(e)) => return Err(self.unread(&e).await),
                Err(_) => return Err(Reported::Moved {}),
            };
            let read = self.env.clock.now();
            relation.meter.reading_us.fetch_add(read.since(begun).as_micros() as u64, Relaxed);
            sums.push(parts.iter().fold(0, |sum, part| crc32c_append(sum, part)));
            let zeros = parts.iter().all(|part| part.iter().all(|b| *b == 0));
            let is_hole = zeros && relation.home.traits().holes;
            if !is_hole {
                relation.pace.pass(len, &self.env.clock).await;
            }
            let writes = self.env.clock.now();
            relation.meter.paced_us.fetch_add(writes.since(read).as_micros() as u64, Relaxed);
            let written = match is_hole {
                true => writer.zero(at..at + len).await,
                false => writer.write_at(at, parts).await,
            };
            let now = self.env.clock.now();
            relation.meter.writing_us.fetch_add(now.since(writes).as_micros() as u64, Relaxed);
            relation.meter.piece_us.fetch_add(now.since(asked).as_micros() as u64, Relaxed);
            relation.meter.pieces.fetch_add(1, Relaxed);
            written.map_err(|f| reported(&f))?;
        }
    }

    /// The report for a volume that cannot be read.
    async fn unread(&self, e: &Error) -> Reported {
        match e.kind {
            ErrorKind::Damaged => Reported::Refused { why: format!("its data here cannot be read: {e}") },
            ErrorKind::NotFound | ErrorKind::Stale => Reported::Moved {},
            _ => {
                tracing::warn!("read what is to be shipped: {e}");
                self.env.clock.sleep(PAUSE).await;
                Reported::Moved {}
            }
        }
    }

    // ---- pace

    fn apply_tuner(&self, relation: &Relation) {
        let choice = lock(&relation.tuner).choice();
        relation.streams.set_limit(choice.streams as u64 * relation.packed);
        relation.window.set_limit(choice.window_bytes);
    }

    async fn keep_tuning(&self, relation: &Relation) {
        if self.fixed.is_none() {
            // The assigned work has begun and does not wait for this measurement.
            let round_trip = self.round_trip(&*relation.home).await;
            lock(&relation.tuner).begin_at(round_trip);
            self.apply_tuner(relation);
        }
        let (meter, mut last, mut since) = (&relation.meter, (0, 0), self.env.clock.now());
        loop {
            let TimeOf { files, count, .. } = meter.time();
            self.env.clock.sleep(tuner::measure_for(files / count.max(1))).await;
            let (bytes, work, now) =
                (meter.bytes.load(Relaxed), meter.file_work.load(Relaxed), self.env.clock.now());
            let seconds = now.since(since).as_secs_f64().max(0.001);
            let rate = |n: u64| n as f64 / seconds;
            let (bytes_per_s, work_per_s) = (rate(bytes - last.0), rate(bytes - last.0 + work - last.1));
            let waiting = lock(&relation.files).len() > meter.busy.load(Relaxed);
            let began = (bytes, work) != (0, 0);
            (last, since) = ((bytes, work), now);
            {
                let mut tuner = lock(&relation.tuner);
                if let Some(each) = meter.piece_us.load(Relaxed).checked_div(meter.pieces.load(Relaxed)) {
                    tuner.piece_took(Duration::from_micros(each), bytes_per_s);
                }
                if waiting && began {
                    tuner.measured(work_per_s);
                }
            }
            self.apply_tuner(relation);
            // Older measurements count less.
            let Meter { reading_us, writing_us, paced_us, piece_us, pieces, file_us, files, .. } = meter;
            for meter in [reading_us, writing_us, paced_us, piece_us, pieces, file_us, files] {
                meter.store(meter.load(Relaxed) / 2, Relaxed);
            }
        }
    }

    /// The limiting factor for this mover, in words; empty if it has no more work.
    fn limited_by(&self) -> String {
        let relations = lock(&self.relations);
        let Some(busiest) = relations.values().max_by_key(|r| r.meter.busy.load(Relaxed)) else {
            return String::new();
        };
        if busiest.meter.busy.load(Relaxed) == 0 {
            return String::new();
        }
        let time = busiest.meter.time();
        let paced = Duration::from_micros(busiest.meter.paced_us.load(Relaxed));
        if paced > time.reading + time.writing {
            return BANDWIDTH_LIMIT.to_owned();
        }
        tuner::limited_by(&time, &lock(&busiest.tuner).choice())
    }
}

impl Meter {
    fn time(&self) -> TimeOf {
        let of = |us: &AtomicU64| Duration::from_micros(us.load(Relaxed));
        TimeOf {
            reading: of(&self.reading_us),
            writing: of(&self.writing_us),
            files: of(&self.file_us),
            count: self.files.load(Relaxed) as u32,
        }
    }
}

fn items_of(work: &RelationWork) -> usize {
    work.names.len() + work.extents.len() + work.orphans.len() + work.listings.len()
}

/// How many of the first entries fit into one message; at least one, if there is one.
fn fits_a_message(entries: &[HomeEntry]) -> usize {
    let mut bytes = 0;
    let fits = entries.iter().take(HOME_ENTRIES_MAX).take_while(|entry| {
        let xattrs: usize = entry.attrs.xattrs.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
        let first = bytes == 0;
        bytes += ENTRY_BYTES + entry.name.len() + entry.target.len() + entry.fingerprint.len() + xattrs;
        first || bytes <= LISTING_BYTES_MAX
    });
    fits.count()
}

/// The leader refused the report about a directory.
fn refused(e: &Error) -> Reported {
    match e.kind {
        ErrorKind::Invalid | ErrorKind::Name(_) => Reported::Refused { why: e.to_string() },
        _ => Reported::Later { why: e.to_string() },
    }
}

/// The entries of a listing that pass the map.
fn shown(relation: &Relation, dir: &HomePath, entries: Vec<ListEntry>) -> Vec<HomeEntry> {
    let passes = |entry: &ListEntry| {
        let passes = relation.home.lets_through(entry.found.fingerprint.kind);
        if !passes {
            let (home, name) = (relation.home.url(), entry.name.escape_ascii());
            tracing::warn!("{home}: {name} in {dir} is a device and is left out: no rule lets devices in");
        }
        passes
    };
    entries.into_iter().filter(passes).map(home_entry).collect()
}

fn home_entry(entry: ListEntry) -> HomeEntry {
    let ListEntry { name, found } = entry;
    let a = &found.attrs;
    let xattrs = a.xattrs.iter().map(|x| (x.name.clone(), x.value.clone())).collect();
    let attrs = HomeAttrs { mode: a.mode, uid: a.uid, gid: a.gid, atime: a.atime, mtime: a.mtime, xattrs };
    let kind = found.fingerprint.kind;
    let has_more_names = kind != FileKind::Directory && found.nlink > 1;
    HomeEntry {
        name,
        kind,
        fingerprint: Bytes::from(found.fingerprint.to_bytes()),
        id: if has_more_names { found.fingerprint.id.clone() } else { Bytes::new() },
        attrs,
        size: found.fingerprint.size,
        target: found.target,
        rdev: found.rdev,
    }
}

async fn read(client: &Client, item: &ExtentWork, at: u64, len: u64) -> Result<Vec<Bytes>> {
    if let Some(bytes) = &item.inline {
        let from = (at - item.offset) as usize;
        return Ok(vec![bytes.slice(from..from + len as usize)]);
    }
    client.read_committed(item, at, len).await
}

fn extent_done(item: &ExtentWork, outcome: Reported) -> ExtentDone {
    let (ino, offset, len) = (item.ino, item.offset, item.len);
    ExtentDone { ino, offset, len, finished: item.finish.is_some(), sums: Vec::new(), outcome }
}

/// A fault in the form reported to the leader.
fn reported(fault: &Fault) -> Reported {
    let why = fault.to_string();
    match fault {
        Fault::Diverged(_) => Reported::Diverged { why },
        Fault::Unreachable(_) | Fault::Full(_) | Fault::Denied(_) => Reported::Later { why },
        Fault::Broken(_) => Reported::Refused { why },
    }
}

/// The report for a directory that could not be read. An entry that is gone at home needs no resolution.
fn reported_of_directory(fault: &Fault) -> Reported {
    match fault {
        Fault::Diverged(_) => {
            Reported::Diverged { why: "it is gone there, or something else has its name".to_owned() }
        }
        // Only this directory, and waiting does not change the permission.
        Fault::Denied(e) => Reported::Refused { why: e.to_string() },
        fault => reported(fault),
    }
}

fn attrs_of(attrs: &HomeAttrs) -> Attrs {
    let mut xattrs: Vec<Xattr> =
        attrs.xattrs.iter().map(|(name, value)| Xattr { name: name.clone(), value: value.clone() }).collect();
    xattrs.sort_by(|a, b| a.name.cmp(&b.name));
    let HomeAttrs { mode, uid, gid, atime, mtime, .. } = *attrs;
    Attrs { mode, uid, gid, atime, mtime, xattrs }
}

/// After a decision that our side counts, a missing entry at home is made; it gets its attributes when it is
/// complete.
async fn make_again(home: &dyn Home, path: &HomePath) -> Outcome<()> {
    if home.stat(path).await?.is_some() {
        return Ok(());
    }
    let time = Time { nanos: 0 };
    let attrs = Attrs { mode: 0o600, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() };
    home.make(path, &Make::File, &attrs).await.map(drop)
}

/// The expected state. Without a fingerprint (home's root, or a decision that our side counts): the present
/// state.
pub(crate) async fn expect(
    home: &dyn Home,
    path: &HomePath,
    expected: &weir_proto::relation::Expected,
) -> Outcome<Expect> {
    if expected.fingerprint.is_empty() {
        let found = home.stat(path).await?;
        return match found {
            Some(found) => Ok(Expect::Ours(found.fingerprint)),
            None => Err(Fault::diverged(path, None, None)),
        };
    }
    let fingerprint = Fingerprint::from_bytes(&expected.fingerprint)
        .map_err(|e| Fault::new(crate::FaultKind::Broken, path, e))?;
    Ok(if expected.writing { Expect::Ours(fingerprint) } else { Expect::Unchanged(fingerprint) })
}

/// Carries out a change of names; returns the fingerprint of the result.
async fn act(home: &dyn Home, action: &NameAction) -> Outcome<Bytes> {
    let parse = |path: &Bytes| {
        HomePath::parse(path).map_err(|e| Fault::new(crate::FaultKind::Broken, &HomePath::root(), e))
    };
    let fingerprint = match action {
        NameAction::Make { path, kind, target, rdev, attrs } => {
            let what = match kind {
                FileKind::Directory => Make::Directory,
                FileKind::Regular => Make::File,
                FileKind::Symlink => Make::Symlink { target: target.clone() },
                kind => Make::Special { kind: *kind, rdev: *rdev },
            };
            home.make(&parse(path)?, &what, &attrs_of(attrs)).await?
        }
        NameAction::Link { from, path, expect: expected } => {
            let from = parse(from)?;
            let expected = expect(home, &from, expected).await?;
            home.link(&from, &expected, &parse(path)?).await?
        }
        NameAction::Remove { path, expect: expected, .. } => {
            let path = parse(path)?;
            if home.stat(&path).await?.is_none() {
                return Ok(Bytes::new());
            }
            let expected = expect(home, &path, expected).await?;
            home.remove(&path, &expected).await?;
            return Ok(Bytes::new());
        }
        NameAction::Rename { from, to, expect: expected, replaced, .. } => {
            let (from, to) = (parse(from)?, parse(to)?);
            let expected = expect(home, &from, expected).await?;
            let replaced = match replaced {
                Some(replaced) => Some(expect(home, &to, replaced).await?),
                None => None,
            };
            home.rename(&from, &expected, &to, replaced.as_ref()).await?
        }
        NameAction::Exchange { one, other, expect: expected, other_expect } => {
            let (one, other) = (parse(one)?, parse(other)?);
            let (a, b) = (expect(home, &one, expected).await?, expect(home, &other, other_expect).await?);
            home.exchange(&one, &a, &other, &b).await?.0
        }
        NameAction::Attributes { path, attrs, expect: expected, .. } => {
            let path = parse(path)?;
            let expected = expect(home, &path, expected).await?;
            home.set_attrs(&path, &expected, &attrs_of(attrs)).await?
        }
        NameAction::Resize { path, size, expect: expected } => {
            let path = parse(path)?;
            let expected = expect(home, &path, expected).await?;
            home.resize(&path, &expected, *size).await?
        }
    };
    Ok(Bytes::from(fingerprint.to_bytes()))
}

pub(crate) async fn join_all<T, F: Future<Output = T>>(calls: Vec<F>) -> Vec<T> {
    let mut calls: Vec<_> = calls.into_iter().map(|call| (Box::pin(call), None)).collect();
    std::future::poll_fn(move |cx| {
        let mut waits = false;
        for (call, out) in calls.iter_mut().filter(|(_, out)| out.is_none()) {
            match call.as_mut().poll(cx) {
                std::task::Poll::Ready(value) => *out = Some(value),
                std::task::Poll::Pending => waits = true,
            }
        }
        if waits {
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(calls.iter_mut().filter_map(|(_, out)| out.take()).collect())
    })
    .await
}
