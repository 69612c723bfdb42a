//! Runs operations one at a time: check for conflicting leases, transaction, grants, all under one lock.
//!
//! Invariants: the state that an operation saw and its grants belong to one moment. A reply leaves only when
//! everything committed before it is durable. The lock is never held across an await. A change whose slot
//! holds its reply already is not repeated.
//!
//! Knows nothing of the wire except the messages' types.

pub mod changes;
pub mod clones;
mod eviction;
mod hints;
pub mod levels;
pub mod locks;
mod mounts;
pub mod movers;
pub mod names;
pub mod operate;
pub mod outcome;
pub mod recall;
pub mod relations;
pub mod replies;
pub mod revoke;
mod session_list;
pub mod sessions;
pub mod snapshots;
pub mod step;

use crate::access::{Mount, Mounts, Refused, Told};
use crate::copies::Right;
use crate::crash_points;
use crate::evict::Space;
use crate::keys::Sequence;
use crate::lease::{ByInode, LeaseTable};
use crate::lock::LockTable;
use crate::namespace::create::next_number;
use crate::namespace::{AtHome, Cx, Events, LayoutPolicy, Rules, Snapshots, View};
use crate::obstacle::{Obstacle, Obstacles};
use crate::ops::{Grants, Operation, Work};
use crate::purge::Purge;
use crate::quotas::Quotas;
use crate::reach::Place;
use crate::recalls::Recalls;
use crate::record::{Inode, Record, SlotRecord, slot_value};
use crate::relation::queues::Relations;
use crate::session::{Session, Sessions, no_session};
use crate::troubles::Failing;
use crate::witness::{Witness, witness};
use crate::{keys, namespace, relation, session};
use clones::Clones;
use levels::Evictor;
use replies::Replies;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use weir_env::{Env, Instant};
use weir_kv::{CommitSeq, SharedKv, Txn};
use weir_proto::access::{AccessRules, AuditRule};
use weir_proto::meta::{LeaseKind, Op, SLOTS, Time};
use weir_proto::volume::Policy;
use weir_proto::{Error, ErrorKind, InodeId, NamespaceId, Result, SessionId, VolumeId, Wire, Writer};
use weir_rpc::Connection;
use weir_watch::{Object, Reason};

/// Room for most replies.
const REPLY_BYTES: usize = 384;
/// After a revoke of a directory no client gets a lease on it for this time: clients that create files in it
/// by turns would wait for a revoke each time. A revoke takes about 1 ms, so it costs them 2 % at most.
const CONTENDED: Duration = Duration::from_millis(50);
/// A getattr or lookup takes the Write lease of a file from its writer at most this often: otherwise a client
/// that polls leaves the writer no time in which it writes alone, and nothing of its file could be evicted. A
/// revoke and the grant after it take about 1 ms.
const POLLS_APART: Duration = Duration::from_millis(5);
/// A client that did not answer a revoke gets no leases for this time: it reads and writes directly, and
/// others wait for it no more.
const MISTRUSTED_FOR: Duration = Duration::from_secs(60);
/// Such clients that are remembered.
const MISTRUSTED_MAX: usize = 4096;
/// Not a client's session.
pub const NOBODY: SessionId = SessionId(0);
/// Contended inodes that are remembered.
const CONTENDED_MAX: usize = 4096;

/// Where new files of a volume with a policy go; `None`: no placement group exists for it yet.
pub type ChooseLayout = dyn Fn(&Policy) -> Option<LayoutPolicy> + Send + Sync;

/// The configuration of a starting leader.
#[derive(Clone)]
pub struct MetaConfig {
    pub namespace: NamespaceId,
    /// A client that is silent this long loses its leases, ms.
    pub lease_ms: u32,
    /// Where new files of a volume with this policy go now, by the cluster map.
    pub layout: Arc<ChooseLayout>,
    /// Whether home has bytes of a file: only then they may be evicted.
    pub at_home: Arc<AtHome>,
    /// The fill level of the targets.
    pub space: Arc<Space>,
    /// Drops the cells of deleted files.
    pub purge: Arc<dyn Purge>,
    /// Whether the process that a client named has definitely ended, as only a leader on the same machine can
    /// see. Its session ends at once instead of after a lease term.
    pub gone: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// The version of this node's cluster map; at start, not older than its leadership.
    pub map_version: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Whether all targets' groups accept data: as long as one does not, clients that cannot save are not to
    /// blame.
    pub takes_data: Arc<dyn Fn() -> bool + Send + Sync>,
    /// The rules for mounts, from the same map.
    pub access: Arc<dyn Fn() -> AccessRules + Send + Sync>,
    /// Gets the refusals by these rules.
    pub refused: Arc<Refused>,
    /// The audit rules of volumes, from the same map.
    pub audits: Arc<dyn Fn() -> Vec<AuditRule> + Send + Sync>,
    /// Gets the records that these rules ask for.
    pub witness: Arc<Witness>,
    /// Whether it may answer.
    pub right: Arc<Right>,
    /// The latest time at which the former leader of a namespace with copies may have answered.
    pub led_until: Option<Instant>,
}

/// The leader of one namespace.
pub(crate) struct Leader {
    pub env: Env,
    pub kv: SharedKv,
    pub config: MetaConfig,
    state: Mutex<State>,
    pub replies: Arc<Replies>,
    /// There is garbage to sweep.
    pub garbage: Notify,
    pub evictor: Evictor,
    pub relations: Relations,
    /// A volume was deleted.
    pub removal: Notify,
    /// A snapshot was deleted.
    pub forgetting: Notify,
    pub clones: Clones,
    /// Jobs that fail.
    pub failing: Failing,
    /// The journal failed: nothing can be acknowledged any more.
    pub failed: weir_env::watch::Sender<Option<Error>>,
}

pub(crate) struct State {
    pub leases: LeaseTable,
    pub locks: LockTable,
    pub quotas: Quotas,
    pub recalls: Recalls,
    pub sessions: Sessions,
    pub mounts: Mounts,
    /// Until then sessions from before the restart may return.
    pub grace_until: Option<Instant>,
    /// When this node started, or last resumed after a stall.
    pub stood_still_until: Instant,
    /// When this node last looked for silent sessions.
    pub looked: Instant,
    /// The last time at which clients may have been unable to save.
    pub no_data_taken: Instant,
    /// Clients that did not answer a revoke, with the time until which they get no leases.
    mistrusted: BTreeMap<String, Instant>,
    /// The newest commit of this leader; no reply shows a newer one.
    pub newest: CommitSeq,
    /// Sessions that have ended while they may have been writing.
    deaths: u64,
    /// Volumes with a changelog.
    pub logged: BTreeSet<VolumeId>,
    /// Volumes that mirror a home.
    pub mirrored: BTreeSet<VolumeId>,
    pub snapshots: Snapshots,
    /// The volume of which a snapshot is being taken, and its topmost directory.
    pub snapshotting: Option<(VolumeId, InodeId)>,
    grace_over: Arc<Notify>,
    /// Operations wait here for leases on an inode. An entry exists while one does.
    waiters: ByInode<Arc<Notify>>,
    /// Directories that clients change by turns, with the time until which no client gets a lease on them.
    contended: ByInode<Instant>,
    /// Files whose writer was revoked by a getattr or lookup, with the last time of that.
    looked_at: ByInode<Instant>,
    obstacles: Obstacles,
}

/// The result of one attempt of an operation.
pub(crate) enum Step {
    /// The reply, to be sent when the commit is durable.
    Done(Vec<u8>, CommitSeq),
    /// The operation is attempted again when the wait ends.
    Wait(OwnedNotified),
}

/// Between retries of the leader's own jobs, s.
const RETRY_JOB_S: u64 = 5;
/// The longest wait for a map that a client has and this leader has not, and the pause between checks.
const MAP_PATIENCE: Duration = Duration::from_secs(5);
const MAP_POLL: Duration = Duration::from_millis(10);

impl Leader {
    /// A client has written under that cluster map.
    pub fn note_written_under(&self, map_version: u64) {
        let leases = &mut self.lock().leases;
        leases.written_under = leases.written_under.max(map_version);
    }
    /// Returns when this leader has that map, too.
    pub async fn wait_for_map(&self, map_version: u64) -> Result<()> {
        let (until, mut waits) = (self.env.clock.now() + MAP_PATIENCE, None);
        loop {
            let here = (self.config.map_version)();
            if here >= map_version {
                return Ok(());
            }
            if self.env.clock.now() >= until {
                return Err(Error::unavailable(format!(
                    "written under version {map_version} of the cluster map: this metadata leader has only learned of {here}, try again"
                )));
            }
            waits.get_or_insert_with(|| self.env.watch.wait(Reason::Map, Object::NONE));
            self.env.clock.sleep(MAP_POLL).await;
        }
    }

    pub fn open(env: &Env, kv: SharedKv, config: MetaConfig) -> Result<Arc<Leader>> {
        let now = env.clock.now();
        let wall = Time { nanos: env.clock.wall().0 };
        let newest = kv.transact(&mut |txn| {
            if txn.get(&keys::access(InodeId::ROOT))?.is_none() {
                namespace::create::make_root(txn, wall);
            } else if txn.get(&keys::volume(VolumeId::ROOT))?.is_none() {
                namespace::volume::make_root(txn, wall);
            }
            Ok(())
        })?;
        let (mut sessions, mut deaths, mut quotas) = (Sessions::new(), 0, Quotas::default());
        let (mut logged, mut mirrored) = (BTreeSet::new(), BTreeSet::new());
        let mut relations = Relations::default();
        let mut snapshots = Snapshots::new();
        kv.read(&mut |read| {
            sessions = session::load(read, now)?;
            quotas = namespace::volume::load_quotas(read)?;
            deaths = session::deaths(read)?;
            logged = relation::changelog::logged(read)?;
            mirrored = relation::changelog::mirrored(read)?;
            relations = Relations::load(read, env.rng.next_u64() | 1)?;
            snapshots = namespace::snapshot::load_all(read)?;
            Ok(())
        })?;
        let term = Duration::from_millis(config.lease_ms.into());
        let state = State {
            leases: LeaseTable::new((config.map_version)()),
            locks: LockTable::default(),
            quotas,
            recalls: Recalls::default(),
            mounts: Mounts::new(Told::new(config.refused.clone())),
            grace_until: (!sessions.is_empty())
                .then(|| config.led_until.map_or(now, |led| led.min(now)) + term),
            stood_still_until: now,
            looked: now,
            no_data_taken: now,
            mistrusted: BTreeMap::new(),
            sessions,
            newest,
            deaths,
            logged,
            mirrored,
            snapshots,
            snapshotting: None,
            grace_over: Arc::default(),
            waiters: ByInode::default(),
            contended: ByInode::default(),
            looked_at: ByInode::default(),
            obstacles: Obstacles::default(),
        };
        let failed = weir_env::watch::Sender::new(None);
        let leader = Arc::new(Leader {
            env: env.clone(),
            kv,
            config,
            state: Mutex::new(state),
            replies: Arc::default(),
            garbage: Notify::new(),
            evictor: Evictor::default(),
            relations,
            removal: Notify::new(),
            forgetting: Notify::new(),
            clones: Clones::default(),
            failing: Failing::default(),
            failed,
        });
        leader.end_dead_sessions(&mut leader.lock())?;
        Ok(leader)
    }

    /// Ends the sessions of processes that are gone. Returns whether some sessions without a connection are
    /// left.
    pub fn end_dead_sessions(self: &Arc<Self>, state: &mut State) -> Result<bool> {
        for id in session::gone(&state.sessions, &*self.config.gone) {
            self.end_session(state, id, "its process is gone")?;
        }
        Ok(state.sessions.values().any(|s| s.connection.is_none()))
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn term(&self) -> Duration {
        Duration::from_millis(self.config.lease_ms.into())
    }
    pub fn wall(&self) -> Time {
        Time { nanos: self.env.clock.wall().0 }
    }

    /// After a failure of the leader's own job. If its store failed the node must stop; otherwise only this
    /// job stops, is retried after a while, and clients are served all the same.
    pub async fn retry_job(&self, e: Error, what: &str) -> Result<()> {
        if e.kind == ErrorKind::Io {
            return Err(e.doing(what));
        }
        let text = format!("{what}: {e}");
        tracing::error!("{text}; this is tried again every {RETRY_JOB_S} s, all else goes on");
        let retry = Duration::from_secs(RETRY_JOB_S);
        let action = format!("this is tried again every {RETRY_JOB_S} s; see the log of the metadata server");
        self.failing.failed(self.env.clock.now(), retry, ("job-failed", what), text, action);
        self.env.clock.sleep(retry).await;
        Ok(())
    }

    /// Attempts once. Conflicting leases are returned for their revoke, and the inodes are parked on in
    /// `parked`.
    pub fn attempt<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        on: &Connection,
        parked: &mut Vec<InodeId>,
    ) -> Result<(Step, Obstacles)> {
        state.unpark(parked);
        let id = request.session();
        let session = state.sessions.get_mut(&id).ok_or_else(|| no_session(id))?;
        session.heard = self.env.clock.now();
        if state.grace_until.is_some() {
            return Ok((Step::Wait(state.grace_over.clone().notified_owned()), Obstacles::default()));
        }
        let mount = self.mount_at(state, on);
        let mut obstacles = std::mem::take(&mut state.obstacles);
        obstacles.clear();
        let ran = self.run(state, request, mount.as_deref(), &mut obstacles);
        if obstacles.is_empty() {
            state.obstacles = obstacles;
            let ran = ran.map_err(|e| self.map_error(e));
            if let Some(audits) = state.mounts.audits() {
                let (rules, failed) = ((&**audits, &*self.config.witness), ran.as_ref().err());
                // The change stands, even if it could not be audited.
                if let Err(e) = witness(&self.kv, rules, request, on, failed, namespace::admit::find_place) {
                    tracing::error!("{} was not recorded: {e}", R::NAME);
                }
            }
            return ran.map(|reply| (Step::Done(reply, state.newest), Obstacles::default()));
        }
        for obstacle in obstacles.iter() {
            match obstacle {
                Obstacle::NotEnumerated { dir } if !self.want_clone_names(*dir)? => self.want_names(*dir)?,
                Obstacle::Full { .. } => state.quotas.full.notify_one(),
                Obstacle::NotEnumerated { .. } | Obstacle::Lease(_) | Obstacle::Snapshot { .. } => {}
            }
        }
        let wait = state.park(&obstacles, parked);
        state.note_contended(&obstacles, self.env.clock.now());
        Ok((Step::Wait(wait), obstacles))
    }

    /// A store that has failed ends this leader, at the first error of any caller. The client may ask the
    /// next leader.
    pub fn map_error(&self, e: Error) -> Error {
        if e.kind != ErrorKind::Io {
            return e;
        }
        self.fail(&e);
        Error::unavailable(format!("this leader ends: {}", e.context))
    }

    fn run<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
    ) -> Result<Vec<u8>> {
        for reach in request.reach().iter().flatten() {
            if let Place::Inode(dir) | Place::Shown(dir) | Place::Name(dir, _) = reach.place {
                state.leases.names_conflict(request.session(), dir, reach.changes, obstacles);
            }
        }
        if !obstacles.is_empty() {
            return Err(Error::unavailable(String::new()));
        }
        let (mut reply, first) = match R::work() {
            Work::Show(show) => (self.show(state, request, mount, obstacles, show)?, true),
            Work::Change(change) => self.change(state, request, mount, obstacles, change)?,
        };
        let State { leases, quotas, contended, sessions, .. } = state;
        let now = sessions.get(&request.session()).map_or(Instant(0), |s| s.heard);
        let mut grants = Grants {
            leases,
            quotas,
            contended,
            now,
            session: request.session(),
            first,
            woken: None,
            shown: None,
        };
        request.settle(&mut reply, &mut grants);
        let (woken, shown) = (grants.woken, grants.shown);
        if let Some(ino) = woken {
            state.wake(ino);
        }
        if let Some(dir) = shown.filter(|_| !state.mirrored.is_empty()) {
            self.rescan(dir)?;
        }
        let mut w = Writer { bytes: Vec::with_capacity(REPLY_BYTES) };
        reply.encode(&mut w);
        Ok(w.bytes)
    }

    fn show<R: Operation>(
        &self,
        state: &State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        show: fn(&mut View<'_>, &R) -> Result<R::Reply>,
    ) -> Result<R::Reply> {
        let live = |s: SessionId| state.sessions.contains_key(&s);
        let rules = self.rules(state, request.session(), mount, &live);
        let mut reply = None;
        self.kv.read(&mut |read| {
            obstacles.clear();
            let mapped = namespace::admit::admit(read, &rules, request)?;
            let request = mapped.as_ref().unwrap_or(request);
            reply = Some(show(&mut View { read, rules: &rules, obstacles }, request)?);
            Ok(())
        })?;
        Ok(reply.expect("the body ran"))
    }

    /// The reply, and whether it was made now or earlier.
    fn change<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        change: fn(&mut Cx<'_>, &R) -> Result<R::Reply>,
    ) -> Result<(R::Reply, bool)> {
        let op = request.op();
        op.map_or(Ok(()), check_slot)?;
        let (mut done, mut replayed, mut events) = (None, false, Events::default());
        {
            let live = |s: SessionId| state.sessions.contains_key(&s);
            let named = state.sessions.get(&request.session()).map_or("", |s| s.client.as_str());
            let client = mount.map_or(named, |mount| mount.origin.name.as_str());
            let rules = Rules { client, ..self.rules(state, request.session(), mount, &live) };
            let committed = self.kv.transact_more(&mut |txn| {
                obstacles.clear();
                events = Events::default();
                if let Some(reply) = op.map_or(Ok(None), |op| earlier_reply::<R>(txn, op))? {
                    (done, replayed) = (Some(reply), true);
                    return Ok(());
                }
                let mapped = namespace::admit::admit(&*txn, &rules, request)?;
                let request = mapped.as_ref().unwrap_or(request);
                let uid = request.cred().map(|cred| cred.uid);
                let reply =
                    namespace::run(txn, &rules, obstacles, &mut events, uid, |cx| change(cx, request))?;
                if let Some(op) = op {
                    let value = slot_value(op.seq, R::METHOD, &reply);
                    txn.put(&keys::slot(op.session, op.slot), &value);
                }
                done = Some(reply);
                Ok(())
            })?;
            state.newest = state.newest.max(committed);
        }
        self.env.tasks.crash_point(crash_points::CHANGED);
        self.apply_events(state, request.session(), &events)?;
        let first = op.is_none_or(|op| state.note_applied(op)) || !replayed;
        Ok((done.expect("the body ran"), first))
    }

    /// Runs a transaction of the leader itself, in the name of a session that obstacles with no lease.
    pub fn housekeep(
        &self,
        state: &mut State,
        session: SessionId,
        body: &mut dyn FnMut(&mut Cx<'_>) -> Result<()>,
    ) -> Result<()> {
        self.housekeep_asking(state, session, &mut Obstacles::default(), body)
    }

    /// The same if there may be obstacles: these are returned in `obstacles`, and nothing is changed.
    pub fn housekeep_asking(
        &self,
        state: &mut State,
        session: SessionId,
        obstacles: &mut Obstacles,
        body: &mut dyn FnMut(&mut Cx<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut events = Events::default();
        {
            let live = |s: SessionId| state.sessions.contains_key(&s);
            let rules = self.rules(state, session, None, &live);
            let committed = self.kv.transact(&mut |txn| {
                obstacles.clear();
                events = Events::default();
                namespace::run(txn, &rules, obstacles, &mut events, None, &mut *body)
            })?;
            state.newest = state.newest.max(committed);
        }
        self.env.tasks.crash_point(crash_points::HOUSEKEPT);
        self.apply_events(state, session, &events)
    }

    pub fn rules<'a>(
        &'a self,
        state: &'a State,
        session: SessionId,
        mount: Option<&'a Mount>,
        live: &'a dyn Fn(SessionId) -> bool,
    ) -> Rules<'a> {
        let (now, deaths, layout) = (self.wall(), state.deaths, &*self.config.layout);
        let (quotas, logged, at_home) = (&state.quotas, &state.logged, &*self.config.at_home);
        let (snapshots, snapshotting) = (&state.snapshots, state.snapshotting);
        Rules {
            session,
            client: "",
            mount,
            now,
            leases: &state.leases,
            quotas,
            live,
            deaths,
            logged,
            mirrored: &state.mirrored,
            snapshots,
            snapshotting,
            at_home,
            layout,
        }
    }

    /// Whether a writer died while data of this file may have been in flight.
    pub fn must_recover(&self, state: &State, ino: InodeId, inode: &Inode) -> bool {
        let live = |s: SessionId| state.sessions.contains_key(&s);
        self.rules(state, NOBODY, None, &live).must_recover(ino, inode)
    }

    fn apply_events(&self, state: &mut State, session: SessionId, events: &Events) -> Result<()> {
        events.orphaned.iter().for_each(|ino| state.leases.mark_orphan(*ino));
        events.imported.iter().for_each(|ino| state.leases.unmark_orphan(*ino));
        events.gone.iter().for_each(|ino| state.leases.forget(*ino));
        events.filled.iter().for_each(|(ino, from, token)| state.recalls.done(*ino, *from, *token));
        events.truncated.iter().for_each(|(ino, size)| state.recalls.forget(*ino, *size));
        if events.garbage {
            self.garbage.notify_one();
        }
        if events.logged {
            self.relations.changed.notify_one();
        }
        if events.relations {
            match self.relations_changed() {
                Ok(now) => (state.logged, state.mirrored) = now,
                Err(e) => self.fail(&e.doing("look at relations")),
            }
        }
        if events.doomed {
            self.removal.notify_one();
        }
        if events.snapshots {
            self.kv.read(&mut |read| {
                state.snapshots = namespace::snapshot::load_all(read)?;
                Ok(())
            })?;
            self.forgetting.notify_one();
            self.clones.call.notify_one();
        }
        if !events.volumes.is_empty() {
            state.mounts.forget_decisions();
        }
        for (id, record) in &events.volumes {
            state.quotas.note(*id, record.as_ref());
            if record.as_ref().is_some_and(|record| record.deleting) {
                self.removal.notify_one();
            }
        }
        self.apply_usage(state, session, events)
    }

    /// Usage of volumes with limits has changed, or their limits have.
    fn apply_usage(&self, state: &mut State, session: SessionId, events: &Events) -> Result<()> {
        let mut added: BTreeMap<VolumeId, i64> =
            events.volumes.iter().filter(|(_, record)| record.is_some()).map(|(id, _)| (*id, 0)).collect();
        for (id, charge) in &events.charged {
            *added.entry(*id).or_default() += charge.bytes;
        }
        for (id, bytes) in added {
            state.quotas.consume(id, session, u64::try_from(bytes).unwrap_or(0));
            let mut over = None;
            self.kv.read(&mut |read| {
                let usage = namespace::volume_usage(read, id)?;
                over = state.quotas.crossing(id, &usage, self.wall());
                Ok(())
            })?;
            if let Some(over) = over {
                self.housekeep(state, session, &mut |cx| namespace::volume::note_over(cx, id, over))?;
            }
        }
        Ok(())
    }

    /// Waits until a commit is durable. A failed journal is reported once, and for ever; waiting clients ask
    /// the next leader, which knows whether the change exists.
    pub async fn durable(&self, seq: CommitSeq) -> Result<()> {
        let waited = self.kv.wait_durable(seq).await;
        waited.map_err(|e| {
            self.fail(&e);
            // Another copy leads: it knows whether the change exists.
            if e.kind == ErrorKind::Stale { Error::unavailable(e.context) } else { self.map_error(e) }
        })?;
        self.config.right.wait(&self.env).await
    }
    /// Whether commits up to `seq` may be reported now.
    pub fn may_tell(&self, seq: CommitSeq) -> bool {
        seq <= self.kv.durable() && self.config.right.answers()
    }
    pub fn fail(&self, e: &Error) {
        self.failed.send_if_modified(|failed| failed.is_none() && failed.replace(e.clone()).is_none());
    }

    /// After the end of a session: an error means that the store has failed.
    pub fn report(&self, ended: Result<()>) {
        if let Err(e) = ended {
            self.fail(&e.doing("end a session"));
        }
    }

    /// The end of a session: its leases, its locks, its opens, its record.
    pub fn end_session(self: &Arc<Self>, state: &mut State, id: SessionId, why: &str) -> Result<()> {
        if self.config.right.is_over() {
            return Ok(()); // the next leader decides
        }
        let Some(session) = state.sessions.remove(&id) else { return Ok(()) };
        state.mounts.told.forget_session(id);
        state.quotas.drop_session(id);
        let freed = state.locks.drop_session(id, self.env.clock.now());
        hints::hint(&self.env, &state.sessions, freed);
        state.recalls.drop_session(id, self.env.clock.now());
        tracing::info!(session = %id, client = session.client, "session ends: {why}");
        // The open files of a session that has not returned since a restart are not known.
        let may_write = |ino: &InodeId| state.leases.opens_of(id, *ino).write > 0;
        let was_writing = !session.resumed || state.leases.inodes_of(id).iter().any(may_write);
        for ino in state.leases.drop_session(id) {
            state.wake(ino);
        }
        session.moved.notify_waiters();
        self.relations.end_session(id);
        let mut deaths = state.deaths;
        let done = self.housekeep(state, id, &mut |cx| {
            if was_writing {
                deaths = next_number(cx.txn, Sequence::Death)?;
            }
            session::forget(cx, id)
        });
        state.deaths = deaths;
        state.end_grace_if_complete();
        done
    }
}

impl State {
    fn unpark(&mut self, parked: &mut Vec<InodeId>) {
        for ino in parked.drain(..) {
            self.leases.unpark(ino);
            if !self.leases.is_awaited(ino) {
                self.waiters.remove(&ino);
            }
        }
    }
    /// Ends a wait.
    pub fn give_up(&mut self, parked: &mut Vec<InodeId>) {
        self.unpark(parked);
    }

    pub fn park(&mut self, obstacles: &Obstacles, parked: &mut Vec<InodeId>) -> OwnedNotified {
        for ino in obstacles.iter().map(Obstacle::ino) {
            if !parked.contains(&ino) {
                parked.push(ino);
                self.leases.park(ino);
            }
        }
        // One of them is enough: when it is gone the others are checked again.
        let first = obstacles.first().expect("an operation waits for something").ino();
        self.waiters.entry(first).or_default().clone().notified_owned()
    }

    fn note_contended(&mut self, obstacles: &Obstacles, now: Instant) {
        if self.contended.len() >= CONTENDED_MAX {
            self.contended.clear();
        }
        for conflict in obstacles.leases().filter(|c| c.ask && c.keep == LeaseKind::None) {
            self.contended.insert(conflict.ino, now + CONTENDED);
        }
    }

    /// The delay of a revoke for a getattr or lookup. It counts as made then.
    pub fn pause_before_poll(&mut self, ino: InodeId, now: Instant) -> Duration {
        if self.looked_at.len() >= CONTENDED_MAX {
            self.looked_at.clear();
        }
        let at = self.looked_at.get(&ino).map_or(now, |last| now.max(*last + POLLS_APART));
        self.looked_at.insert(ino, at);
        at.since(now)
    }

    /// When a client under revoke last made progress; `None`: the session is over.
    pub fn got_on(&self, session: SessionId, began: Instant) -> Option<Instant> {
        let progress = self.sessions.get(&session)?.progress;
        Some(began.max(progress).max(self.stood_still_until).max(self.no_data_taken))
    }

    /// A client did not answer a revoke: others must not wait for it again, inode by inode.
    pub fn mistrust(&mut self, client: &str, now: Instant) {
        self.mistrusted.retain(|_, until| *until > now);
        if self.mistrusted.len() < MISTRUSTED_MAX {
            self.mistrusted.insert(client.to_owned(), now + MISTRUSTED_FOR);
        }
    }
    /// Grants a new session of such a client no leases for now.
    pub fn withhold_leases(&mut self, id: SessionId, now: Instant) {
        let of = self.sessions.get(&id).map(|s| s.client.as_str()).unwrap_or_default();
        if self.mistrusted.get(of).is_some_and(|until| *until > now) {
            self.leases.withhold(id, true);
        }
    }
    /// Ends that when its time is over.
    pub fn trust_again(&mut self, now: Instant) {
        self.mistrusted.retain(|_, until| *until > now);
        for (id, session) in &self.sessions {
            if !self.mistrusted.contains_key(&session.client) {
                self.leases.withhold(*id, false);
            }
        }
    }

    /// A lease was returned that operations may wait for.
    pub fn wake(&mut self, ino: InodeId) {
        if let Some(waiters) = self.waiters.get(&ino) {
            waiters.notify_waiters();
        }
    }

    /// Whether this is the first time since the session's last resume that the change takes effect here.
    fn note_applied(&mut self, op: &Op) -> bool {
        let Some(session) = self.sessions.get_mut(&op.session) else { return false };
        let applied = &mut session.applied[op.slot as usize];
        std::mem::replace(applied, op.seq) != op.seq
    }

    /// This node stalled until now: silence was not the clients' fault.
    pub fn stood_still(&mut self, now: Instant, term: Duration) {
        self.stood_still_until = now;
        self.sessions.values_mut().for_each(|s| s.heard = now);
        if let Some(until) = &mut self.grace_until {
            *until = now + term;
        }
    }

    /// Whether a session was silent for a lease term, for another reason than a stall of this node.
    pub fn is_silent(&self, id: SessionId, now: Instant, term: Duration) -> bool {
        let awake = now.since(self.looked) <= term / 2;
        awake && self.sessions.get(&id).is_some_and(|s| s.resumed && now.since(s.heard) > term)
    }

    pub fn end_grace_if_complete(&mut self) {
        if self.grace_until.is_some() && self.sessions.values().all(|s| s.resumed) {
            self.grace_until = None;
            self.grace_over.notify_waiters();
        }
    }

    pub fn session(&mut self, id: SessionId) -> Result<&mut Session> {
        self.sessions.get_mut(&id).ok_or_else(|| no_session(id))
    }
}

fn check_slot(op: &Op) -> Result<()> {
    if op.slot < SLOTS && op.seq > 0 {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "slot {} seq {}: slots are 0 to {}, numbers start at 1",
        op.slot,
        op.seq,
        SLOTS - 1
    )))
}

/// The reply of an earlier try of the same change.
fn earlier_reply<R: Operation>(txn: &mut dyn Txn, op: &Op) -> Result<Option<R::Reply>> {
    let Some(value) = txn.get(&keys::slot(op.session, op.slot))? else { return Ok(None) };
    let seq = value.get(1..9).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    if op.seq > seq {
        return Ok(None);
    }
    let record = SlotRecord::from_value(&value, || format!("slot {} of session {}", op.slot, op.session))?;
    if op.seq < record.seq || record.method != R::METHOD {
        return Err(Error::stale(format!(
            "slot {} of session {} is at change {} (method {}): change {} (method {}) comes too late",
            op.slot,
            op.session,
            record.seq,
            record.method,
            op.seq,
            R::METHOD
        )));
    }
    R::Reply::from_bytes(&record.reply).map(Some)
}
