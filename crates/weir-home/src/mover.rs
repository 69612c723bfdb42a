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
use crate::tuner::{self, Choice, Tuner};
use crate::{Fault, Home, Outcome};
use files::extent_done;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tuning::Meter;
use weir_client::Client;
use weir_env::{Backoff, BoxFuture, Env, Pauses, watch};
use weir_proto::relation::{
    Direction, ExtentDone, ExtentWork, HomeIds, ListDone, NameDone, Outcome as Reported, RelationId,
    RelationWork,
};
use weir_proto::{ErrorKind, InodeId, VolumeId};
use weir_watch::Gauge;

mod files;
mod listing;
mod names;
mod recalls;
mod tuning;

pub(crate) use names::{expect, join_all};

/// Ranges and names that this mover holds at most: a distant home needs many small files in flight.
const ITEMS_MAX: usize = 2048;
/// Limit on those requested or reported in one message.
const REPORTED_MAX: usize = 256;
/// Bytes of ranges requested in one message. They are read part by part: this is not memory.
const ASKED_MAX: u64 = 512 << 20;
/// How long a request for work waits at the leader.
const WAIT: Duration = Duration::from_secs(2);
/// The interval at which a mover asks for its parts of bandwidth limits: meanwhile it may exceed them.
const LIMITS_EVERY: Duration = Duration::from_secs(1);
/// Pauses after errors of the leader or the network.
const PAUSES: Backoff = Backoff { first: Duration::from_millis(500), max: Duration::from_secs(8) };

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
    /// Items in flight, and the same for administrators.
    items: AtomicUsize,
    items_shown: Gauge,
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
            items_shown: self.env.watch.gauge("weir_mover_items", ("", "")),
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
            () = client.mover().may_be_taken_for_dead() => {}
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

    /// Another try of the same follows: not of all movers in the same moment.
    async fn pause(&self) {
        let pause = Pauses::new(&self.env.rng, PAUSES).next_pause();
        self.env.clock.sleep(pause).await;
    }

    /// Until an error: only the leader knows the work in a reply that was lost.
    async fn ship(self: &Arc<Self>) {
        let (shared, mut leader) = (self, 0);
        loop {
            let less = shared.less.notified();
            let in_flight = shared.items.load(Relaxed);
            if in_flight >= ITEMS_MAX {
                less.await;
                continue;
            }
            let items = (ITEMS_MAX - in_flight).min(REPORTED_MAX) as u32;
            match shared.client.mover().lease_work(leader, ASKED_MAX, items, WAIT, &shared.limited_by()).await
            {
                Ok(taken) => {
                    leader = taken.leader;
                    for work in taken.relations {
                        shared.begin(work);
                    }
                }
                Err(e) => {
                    tracing::debug!("no work: {e}");
                    return shared.pause().await;
                }
            }
        }
    }

    /// Does not wait for homes that are slow to open.
    fn begin(self: &Arc<Self>, work: RelationWork) {
        self.show_items(self.items.fetch_add(items_of(&work), Relaxed) + items_of(&work));
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
        self.spawn("report", async move { me.report(of.id, reported).await });
        let (me, of) = (self.clone(), relation.clone());
        self.spawn("pace", async move { me.keep_tuning(&of).await });
        Ok(relation)
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
        self.spawn("report", async move {
            me.report_to_leader(work.relation, done).await;
        });
    }

    fn end_items(&self, count: usize) {
        let before = self.items.fetch_sub(count, Relaxed);
        assert!(before >= count, "more work was reported than this mover had");
        self.show_items(before - count);
        self.less.notify_one();
    }

    fn show_items(&self, count: usize) {
        self.items_shown.set(count as i64); // at most ITEMS_MAX, and what one reply has
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
            let sorted = names.len() + extents.len() + orphans.len() + listings.len();
            assert_eq!(sorted, count, "a result is in no report: its work would stay assigned");
            self.report_to_leader(relation, Batch { names, extents, orphans, listings, count }).await;
        }
    }

    /// Work that cannot be reported stays assigned to this mover: then this session must end.
    async fn report_to_leader(&self, relation: RelationId, done: Batch) {
        let Batch { names, extents, orphans, listings, count } = done;
        match self.client.mover().complete_work(relation, names, extents, orphans, listings).await {
            Ok(()) => self.end_items(count),
            Err(e) => {
                tracing::debug!("the leader was not notified: {e}");
                self.over.send_replace(true);
            }
        }
    }

    // ---- listings of home

    // ---- names

    // ---- data

    // ---- pace
}

fn items_of(work: &RelationWork) -> usize {
    work.names.len() + work.extents.len() + work.orphans.len() + work.listings.len()
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
