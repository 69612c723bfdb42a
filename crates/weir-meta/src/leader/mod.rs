//! The leader of one namespace: its store, its state in memory under one lock, and the bells of its jobs.
//!
//! Invariants: a reply leaves only when everything committed before it is durable. The lock is never held
//! across an await. Knows nothing of the wire except the messages' types, and names no job.
//!
//! `attempt` tries operations, `operate` lets them wait, `housekeep` has the leader's own transactions,
//! `events` follows commits, `ends` ends sessions; `sessions`, `locks`, `recall`, `movers`, `changes` and
//! `snapshots` are calls that are more than one transaction.
pub mod admission;
pub mod attempt;
pub mod changes;
pub mod clones;
pub mod config;
pub mod ends;
mod events;
mod eviction;
mod full_disk;
pub mod grace;
mod hints;
mod housekeep;
pub mod levels;
pub mod locks;
mod mounts;
pub mod movers;
pub mod names;
pub mod operate;
pub mod outcome;
mod owners_near;
mod paced;
pub mod recall;
pub mod relations;
pub mod replies;
pub mod revoke;
mod rounds;
mod session_list;
pub mod sessions;
pub mod snapshots;
pub mod state;
pub mod step;

pub use config::MetaConfig;
pub use state::State;

use crate::namespace;
use crate::near_limits::LastReport;
use crate::owners;
use crate::relation::queues::Relations;
use crate::tables;
use crate::troubles::Failing;
use admission::Admission;
use clones::Clones;
use levels::Evictor;
use paced::Paced;
use relations::Backlog;
use replies::Replies;
use sessions::DeadSessions;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::Env;
use weir_kv::{CommitSeq, SharedKv};
use weir_proto::meta::{Sessions, Time};
use weir_proto::relation::RelationId;
use weir_proto::{Error, ErrorKind, InodeId, Result, SessionId, VolumeId};
use weir_watch::{Object, Reason};

/// Not a client's session.
pub const NO_SESSION: SessionId = SessionId(0);

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
    pub admission: Admission,
    pub dead: DeadSessions,
    /// What relations still have to do, by relation, and the list of sessions: long to count.
    backlogs: Mutex<BTreeMap<RelationId, Arc<Paced<Backlog>>>>,
    sessions_shown: Paced<Sessions>,
    /// Users and groups near their limits.
    near_limits: LastReport,
    /// The journal failed: nothing can be acknowledged any more.
    pub failed: weir_env::watch::Sender<Option<Error>>,
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
            if !tables::ACCESS.has(txn, InodeId::ROOT)? {
                namespace::create::make_root(txn, wall);
            } else if !tables::VOLUMES.has(txn, VolumeId::ROOT)? {
                namespace::volume::make_root(txn, wall);
            }
            Ok(())
        })?;
        let newest = owners::repair(&kv, namespace::volume_usage)?.unwrap_or(newest);
        let state = State::load(&kv, &config, newest, now)?;
        let mut relations = Relations::default();
        kv.read(&mut |read| {
            relations = Relations::load(read, env.rng.next_u64() | 1)?;
            Ok(())
        })?;
        let failed = weir_env::watch::Sender::new(None);
        Ok(Arc::new(Leader {
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
            admission: Admission::new(&env.watch),
            dead: DeadSessions::default(),
            backlogs: Mutex::default(),
            sessions_shown: Paced::default(),
            near_limits: LastReport::default(),
            failed,
        }))
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
        tracing::error!("{text}; this is tried again every {RETRY_JOB_S} s, other jobs continue");
        let retry = Duration::from_secs(RETRY_JOB_S);
        let action = format!("this is tried again every {RETRY_JOB_S} s; see the log of the metadata server");
        self.failing.failed(self.env.clock.now(), retry, ("job-failed", what), text, action);
        self.env.clock.sleep(retry).await;
        Ok(())
    }

    /// A store that has failed ends this leader, at the first error of any caller. The client may ask the
    /// next leader.
    pub fn map_error(&self, e: Error) -> Error {
        if e.kind != ErrorKind::Io {
            return e;
        }
        self.fail(&e);
        e.of_kind(ErrorKind::Unavailable).doing("this leader ends")
    }

    /// Waits until a commit is durable. A failed journal is reported once, and for ever; waiting clients ask
    /// the next leader, which knows whether the change exists.
    pub async fn durable(&self, seq: CommitSeq) -> Result<()> {
        let waited = self.kv.wait_durable(seq).await;
        waited.map_err(|e| {
            self.fail(&e);
            // Another copy leads: it knows whether the change exists.
            if e.kind == ErrorKind::Stale { e.of_kind(ErrorKind::Unavailable) } else { self.map_error(e) }
        })?;
        self.config.right.wait(&self.env).await
    }
    /// Whether commits up to `seq` may be reported now.
    pub fn may_reply(&self, seq: CommitSeq) -> bool {
        seq <= self.kv.durable() && self.config.right.answers()
    }
    pub fn fail(&self, e: &Error) {
        self.failed.send_if_modified(|failed| failed.is_none() && failed.replace(e.clone()).is_none());
    }

    /// After the end of a session: an error means that the store has failed.
    pub fn report(&self, ended: Result<()>) {
        match ended {
            Ok(()) => {}
            Err(e) if e.kind == ErrorKind::NoSpace => self.warn_of_full_disk(&e),
            Err(e) => self.fail(&e.doing("end a session")),
        }
    }

    /// The leader's own work waits; it is done again later.
    pub(crate) fn warn_of_full_disk(&self, e: &Error) {
        if let Some(more) = self.env.watch.line("work without space") {
            tracing::warn!("work of the metadata server waits for space on its disk: {e}{more}");
        }
    }
}
