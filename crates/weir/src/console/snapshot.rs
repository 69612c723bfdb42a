//! The console's data: requested from the cluster when a browser asks, and cached for a moment.
//!
//! Invariants: for any number of browsers, the cluster is queried once in two seconds; missing answers are
//! omitted.
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use weir_admin::collect::Asker;
use weir_admin::local::local_cluster::LocalCluster;
use weir_coord::Collected;
use weir_diagnose::troubles::{Facts, Known, Trouble, troubles};
use weir_env::Instant;
use weir_proto::event::{EventLog, GetEvents};
use weir_proto::watch::{GetMeters, GetTop, ListWaits, Meters, Top, WaitsListed};

const KEPT_FOR: Duration = Duration::from_millis(1500);
const PATIENCE: Duration = Duration::from_millis(800);
const TOP_S: u32 = 10;
/// Waits that are shown have lasted for this time.
const MIN_MS: u32 = 10;
const ENDED_WITHIN_S: u32 = 3600;

#[derive(Default)]
pub struct Snapshot {
    /// Absent: the coordinator does not answer.
    pub facts: Option<Facts>,
    /// The troubles that `weir status` lists.
    pub troubles: Vec<Trouble>,
    pub meters: Vec<Collected<Meters>>,
    pub tops: Vec<Collected<Top>>,
    pub waits: Vec<Collected<WaitsListed>>,
    /// Troubles as they began and ended; empty if it is not known.
    pub log: EventLog,
}

impl Snapshot {
    /// The namespaces whose servers answered, with their names.
    pub fn namespaces(&self) -> impl Iterator<Item = (&str, &Known)> {
        let all = self.facts.iter().flat_map(|facts| &facts.namespaces);
        all.filter_map(|n| Some((n.name.as_str(), n.known.as_ref().ok()?)))
    }
}

pub struct Source {
    pub asker: Arc<Asker>,
    /// The processes of this machine's `weir up` are checked, too.
    local: Option<LocalCluster>,
    kept: Mutex<Option<(Instant, Arc<Snapshot>)>>,
}

impl Source {
    pub fn new(asker: Arc<Asker>, local: Option<LocalCluster>) -> Source {
        Source { asker, local, kept: Mutex::default() }
    }

    /// The newest known one, without a query.
    pub fn last(&self) -> Option<Arc<Snapshot>> {
        let kept = self.kept.try_lock().ok()?;
        kept.as_ref().map(|(_, snapshot)| snapshot.clone())
    }
    /// The state, at most a moment old.
    pub async fn snapshot(&self) -> Arc<Snapshot> {
        let clock = &self.asker.env.clock;
        let mut kept = self.kept.lock().await;
        if let Some((at, snapshot)) = &*kept
            && clock.now().since(*at) < KEPT_FOR
        {
            return snapshot.clone();
        }
        let snapshot = Arc::new(self.ask().await);
        *kept = Some((clock.now(), snapshot.clone()));
        snapshot
    }

    async fn ask(&self) -> Snapshot {
        let cluster = &self.asker.cluster;
        let (top, waits) = (GetTop { seconds: TOP_S }, ListWaits { min_ms: MIN_MS, since_s: ENDED_WITHIN_S });
        let (facts, meters, tops, waits, log) = tokio::join!(
            self.asker.facts(self.local.clone()),
            cluster.collect(&GetMeters {}, PATIENCE),
            cluster.collect(&top, PATIENCE),
            cluster.collect(&waits, PATIENCE),
            cluster.administer(&GetEvents {}),
        );
        let facts = facts.ok();
        Snapshot {
            troubles: facts.as_ref().map(troubles).unwrap_or_default(),
            facts,
            meters: meters.unwrap_or_default(),
            tops: tops.unwrap_or_default(),
            waits: waits.unwrap_or_default(),
            log: log.unwrap_or_default(),
        }
    }
}
