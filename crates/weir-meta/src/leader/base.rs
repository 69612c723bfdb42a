//! The ground of all parts of a leader: the outside, its configuration, its commits, and its state in memory
//! under one lock.
//!
//! Invariant: the lock is never held across an await. Knows nothing of operations and jobs.
use super::admission::Admission;
use super::commits::Commits;
use super::{MetaConfig, State};
use crate::access::Mount;
use crate::troubles::Failing;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_kv::Read;
use weir_proto::meta::Time;
use weir_proto::{Error, ErrorKind, Result, SessionId};
use weir_rpc::Connection;
use weir_watch::{Object, Reason};

/// The parts that all others use.
pub struct Base {
    pub env: Env,
    pub config: MetaConfig,
    pub commits: Commits,
    pub admission: Admission,
    /// Jobs that fail.
    pub failing: Failing,
    state: Mutex<State>,
}

/// Between retries of the leader's own jobs, s.
const RETRY_JOB_S: u64 = 5;
/// The longest wait for a map that a client has and this leader has not, and the pause between checks.
const MAP_PATIENCE: Duration = Duration::from_secs(5);
const MAP_POLL: Duration = Duration::from_millis(10);

impl Base {
    pub fn new(env: &Env, config: MetaConfig, commits: Commits, state: State) -> Base {
        Base {
            env: env.clone(),
            config,
            commits,
            admission: Admission::new(&env.watch),
            failing: Failing::default(),
            state: Mutex::new(state),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<()> {
        self.commits.read(body)
    }
    pub fn now(&self) -> Instant {
        self.env.clock.now()
    }
    pub fn wall(&self) -> Time {
        Time { nanos: self.env.clock.wall().0 }
    }
    pub fn term(&self) -> Duration {
        Duration::from_millis(self.config.lease_ms.into())
    }

    /// A request of this session has arrived.
    pub fn note_contact(&self, state: &mut State, session: SessionId) -> Result<()> {
        state.session(session)?.last_contact = self.now();
        Ok(())
    }

    /// The mount at the other end of a connection, if the rules for mounts concern it.
    pub fn mount_at(&self, state: &mut State, connection: &Connection) -> Option<Arc<Mount>> {
        let version = (self.config.map_version)();
        state.mounts.follow(version, || (self.config.access)(), || (self.config.audits)());
        state.mounts.at(connection)
    }

    /// A client has written under that cluster map.
    pub fn note_written_under(&self, map_version: u64) {
        let leases = &mut self.lock().leases;
        leases.written_under = leases.written_under.max(map_version);
    }
    /// Returns when this leader has that map, too.
    pub async fn wait_for_map(&self, map_version: u64) -> Result<()> {
        let (until, mut waits) = (self.now() + MAP_PATIENCE, None);
        loop {
            let here = (self.config.map_version)();
            if here >= map_version {
                return Ok(());
            }
            if self.now() >= until {
                return Err(Error::unavailable(format!(
                    "written under version {map_version} of the cluster map: this metadata leader has only learned of {here}, try again"
                )));
            }
            waits.get_or_insert_with(|| self.env.watch.wait(Reason::Map, Object::NONE));
            self.env.clock.sleep(MAP_POLL).await;
        }
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
        self.failing.failed(self.now(), retry, ("job-failed", what), text, action);
        self.env.clock.sleep(retry).await;
        Ok(())
    }

    /// After the end of a session: an error means that the store has failed.
    pub fn report(&self, ended: Result<()>) {
        match ended {
            Ok(()) => {}
            Err(e) if e.kind == ErrorKind::NoSpace => self.warn_of_full_disk(&e),
            Err(e) => self.commits.fail(&e.doing("end a session")),
        }
    }

    /// The leader's own work waits; it is done again later.
    pub fn warn_of_full_disk(&self, e: &Error) {
        if let Some(more) = self.env.watch.line("work without space") {
            tracing::warn!("work of the metadata server waits for space on its disk: {e}{more}");
        }
    }
}
