//! The relations that a mover works for: each with its open home, and its part of the bandwidth limits.
//!
//! Invariant: all work of a relation goes through one [`Relation`], or two tasks could write a file.
use super::assigned::{Assigned, Done};
use super::queues::FileQueues;
use super::session::Session;
use super::tuning::Tuning;
use super::{HomeOf, OpenHome, lock};
use crate::gate::Gate;
use crate::pace::Pace;
use crate::tuner::Choice;
use crate::{Home, Outcome};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use weir_proto::ErrorKind;
use weir_proto::relation::RelationId;

/// The interval at which a mover asks for its parts of bandwidth limits: meanwhile it may exceed them.
const LIMITS_EVERY: Duration = Duration::from_secs(1);

/// Open homes, which outlive a session.
#[derive(Clone, Default)]
pub(super) struct Homes(Arc<Mutex<BTreeMap<RelationId, Arc<dyn Home>>>>);

impl Homes {
    pub(super) fn forget(&self) {
        lock(&self.0).clear();
    }
}

pub(super) struct Relations {
    assigned: Arc<Assigned>,
    opener: Arc<dyn OpenHome>,
    homes: Homes,
    fixed: Option<Choice>,
    open: Mutex<BTreeMap<RelationId, Arc<Relation>>>,
    /// This mover's parts of the relations' bandwidth limits.
    limits: Mutex<BTreeMap<RelationId, u64>>,
}

/// This mover's work for one relation.
pub(super) struct Relation {
    pub(super) session: Arc<Session>,
    pub(super) id: RelationId,
    pub(super) home: Arc<dyn Home>,
    /// Limits calls that change names.
    pub(super) names: Gate,
    /// Its part of the relation's bandwidth limit.
    pub(super) pace: Pace,
    pub(super) tuning: Tuning,
    pub(super) files: FileQueues,
    done: mpsc::UnboundedSender<Done>,
}

impl Relation {
    pub(super) fn report(&self, done: Done) {
        let _ = self.done.send(done); // ends with this mover
    }
}

impl Relations {
    pub(super) fn new(
        assigned: Arc<Assigned>,
        opener: Arc<dyn OpenHome>,
        homes: Homes,
        fixed: Option<Choice>,
    ) -> Relations {
        Relations { assigned, opener, homes, fixed, open: Mutex::default(), limits: Mutex::default() }
    }

    /// One that was opened before.
    pub(super) fn known(&self, id: RelationId) -> Option<Arc<Relation>> {
        lock(&self.open).get(&id).cloned()
    }

    /// Opens the home on first use.
    pub(super) async fn open(&self, id: RelationId, which: &HomeOf) -> Outcome<Arc<Relation>> {
        if let Some(known) = self.known(id) {
            return Ok(known);
        }
        let home = self.home(id, which).await?;
        let (done, finished) = mpsc::unbounded_channel();
        let calls_max = home.traits().calls_max;
        let tuning = Tuning::new(self.fixed, calls_max);
        self.learn_limits().await; // before its first byte
        let limit = lock(&self.limits).get(&id).copied();
        let session = self.assigned.session();
        let relation = Arc::new(Relation {
            session: session.clone(),
            id,
            home,
            names: Gate::new(calls_max as u64),
            pace: Pace::new(limit),
            tuning,
            files: FileQueues::default(),
            done,
        });
        {
            let mut open = lock(&self.open);
            // A concurrent caller may have opened it.
            if let Some(known) = open.get(&id) {
                return Ok(known.clone());
            }
            open.insert(id, relation.clone());
        }
        let assigned = self.assigned.clone();
        session.spawn("report", async move { assigned.report_each(id, finished).await });
        let tuned = relation.clone();
        session.spawn("pace", async move {
            tuned.tuning.keep(&tuned.session.env.clock, &*tuned.home, &tuned.files).await;
        });
        Ok(relation)
    }

    async fn home(&self, id: RelationId, which: &HomeOf) -> Outcome<Arc<dyn Home>> {
        let opened = lock(&self.homes.0).get(&id).cloned();
        let home = match opened {
            Some(home) => home,
            None => self.opener.open(which).await?,
        };
        lock(&self.homes.0).insert(id, home.clone());
        Ok(home)
    }

    /// Asks for its parts of bandwidth limits; false: the leader is of an older program, which has none.
    async fn learn_limits(&self) -> bool {
        match self.assigned.session().client.relation_rules().await {
            Ok(all) => {
                let limits: BTreeMap<RelationId, u64> =
                    all.into_iter().filter_map(|of| Some((of.relation, of.share?))).collect();
                let open = lock(&self.open);
                open.iter().for_each(|(id, r)| r.pace.set_limit(limits.get(id).copied()));
                *lock(&self.limits) = limits;
                true
            }
            Err(e) => {
                tracing::debug!("no bandwidth limits: {e}"); // the last ones stay
                e.kind != ErrorKind::Unsupported
            }
        }
    }

    pub(super) async fn keep_limits(&self) {
        while self.learn_limits().await {
            self.assigned.session().env.clock.sleep(LIMITS_EVERY).await;
        }
    }

    /// The limiting factor for this mover, in words; empty if it has no more work.
    pub(super) fn limited_by(&self) -> String {
        let open = lock(&self.open);
        let busiest = open.values().max_by_key(|relation| relation.tuning.busy());
        busiest.map(|relation| relation.tuning.limited_by()).unwrap_or_default()
    }
}
