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
use crate::tuner::Choice;
use crate::{Home, Outcome};
use assigned::Assigned;
use intake::Intake;
use recalls::Recalls;
use relations::{Homes, Relations};
use session::Session;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::Client;
use weir_env::{Backoff, BoxFuture, Env};
use weir_proto::VolumeId;
use weir_proto::relation::{HomeIds, RelationId};

mod assigned;
mod files;
mod intake;
mod listing;
mod names;
mod queues;
mod recalls;
mod relations;
mod session;
mod tuning;

pub(crate) use names::{expect, join_all};

/// How long a request for work waits at the leader.
const WAIT: Duration = Duration::from_secs(2);
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
    homes: Homes,
    backups: Arc<Due>,
    /// The previous session's client.
    earlier: Mutex<Option<Client>>,
    /// A fixed tuning for every home; none: it is found by measurement.
    fixed: Option<Choice>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mover {
    pub fn new(env: Env, opener: Arc<dyn OpenHome>) -> Mover {
        let backups = Arc::new(Due::new(env.clone(), opener.clone()));
        Mover { env, opener, homes: Homes::default(), backups, earlier: Mutex::default(), fixed: None }
    }

    /// A mover without tuning: for measurements.
    pub fn fixed(env: Env, opener: Arc<dyn OpenHome>, choice: Choice) -> Mover {
        Mover { fixed: Some(choice), ..Mover::new(env, opener) }
    }

    /// Reopens every home at its next use: between two sessions, after a change of the rules for homes.
    pub fn forget_homes(&self) {
        self.homes.forget();
        self.backups.forget_homes();
    }

    /// Works until the leader may consider `client` dead, was unreachable or has restarted: this mover's work
    /// goes to others then, so close `client` and continue with a new one.
    pub fn run<'a>(&'a self, client: &'a Client) -> BoxFuture<'a, ()> {
        Box::pin(self.run_unboxed(client))
    }
    async fn run_unboxed(&self, client: &Client) {
        let session = Session::begin(&self.env, client);
        // Ends running work also if this future is dropped.
        let _ends = session.ends_on_drop();
        if let Some(left) = lock(&self.earlier).replace(client.clone()).and_then(|c| c.session_left()) {
            let client = client.clone();
            session.spawn("close the earlier session", async move {
                if let Err(e) = client.close_session(left).await {
                    tracing::debug!("close the earlier session {left}: {e}");
                }
            });
        }
        let assigned = Arc::new(Assigned::new(session.clone()));
        let (opener, homes) = (self.opener.clone(), self.homes.clone());
        let relations = Arc::new(Relations::new(assigned.clone(), opener, homes, self.fixed));
        let recalls = Recalls::new(session.clone(), relations.clone());
        session.spawn("recalls", async move { recalls.run().await });
        let limited = relations.clone();
        session.spawn("limits", async move { limited.keep_limits().await });
        let (due, of) = (self.backups.clone(), client.clone());
        session.spawn("backups", async move { due.run(&of).await });
        let intake = Intake::new(relations, assigned);
        tokio::select! {
            biased;
            () = client.mover().may_be_taken_for_dead() => {}
            () = session.ended() => {}
            () = intake.run() => {}
        }
    }
}
