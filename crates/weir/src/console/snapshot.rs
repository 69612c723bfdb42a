//! What the console knows: asked of the cluster when somebody looks, and kept for a moment.
//!
//! Invariants: however many look, the cluster is asked once a second; what does not answer in time is left
//! out.
use crate::commands::gather;
use crate::commands::troubles::{Trouble, troubles};
use crate::commands::volume::{all, connect};
use crate::failure::Outcome;
use crate::observe::is_led;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use weir_client::Client;
use weir_coord::{Cluster, Gathered};
use weir_env::{Addr, Env, Instant};
use weir_proto::Error;
use weir_proto::coord::ClusterStatus;
use weir_proto::relation::RelationInfo;
use weir_proto::volume::Volume;
use weir_proto::watch::{GetMeters, GetTop, ListWaits, Meters, Top, WaitsListed};

const KEPT_FOR: Duration = Duration::from_secs(1);
/// Troubles are asked of all parts, with sessions of their own.
const TROUBLES_KEPT_FOR: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_millis(800);
const NAMESPACE_PATIENCE: Duration = Duration::from_secs(2);
const TOP_S: u32 = 10;
/// Waits that are shown.
const MIN_MS: u32 = 10;
const PAST_S: u32 = 3600;

#[derive(Default)]
pub struct Snapshot {
    /// Absent: the coordinator does not answer.
    pub status: Option<ClusterStatus>,
    pub meters: Vec<Gathered<Meters>>,
    pub tops: Vec<Gathered<Top>>,
    pub waits: Vec<Gathered<WaitsListed>>,
    pub namespaces: Vec<Namespace>,
}

pub struct Namespace {
    pub name: String,
    pub volumes: Vec<Volume>,
    pub relations: Vec<RelationInfo>,
}

pub struct Source {
    env: Env,
    pub cluster: Cluster,
    coordinators: Vec<Addr>,
    kept: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    troubles: Mutex<Option<(Instant, Arc<Vec<Trouble>>)>>,
    /// By namespace.
    clients: Mutex<BTreeMap<String, Client>>,
}

fn troubles_of(coordinators: &[Addr]) -> Outcome<Vec<Trouble>> {
    let gathered = gather::Gathered::ask(None, coordinators)?;
    let status = gathered.status().clone();
    Ok(troubles(&gathered.facts(&status)))
}

impl Source {
    pub fn new(env: Env, cluster: Cluster, coordinators: Vec<Addr>) -> Source {
        let (kept, troubles, clients) = Default::default();
        Source { env, cluster, coordinators, kept, troubles, clients }
    }

    /// What `weir status` lists, of a moment ago at most.
    pub async fn troubles(&self) -> Outcome<Arc<Vec<Trouble>>> {
        let mut kept = self.troubles.lock().await;
        if let Some((at, troubles)) = &*kept
            && self.env.clock.now().since(*at) < TROUBLES_KEPT_FOR
        {
            return Ok(troubles.clone());
        }
        let coordinators = self.coordinators.clone();
        let asked = tokio::task::spawn_blocking(move || troubles_of(&coordinators)).await;
        let found = Arc::new(asked.map_err(|e| Error::unavailable(e.to_string()))??);
        *kept = Some((self.env.clock.now(), found.clone()));
        Ok(found)
    }

    /// The newest one that is known, without asking.
    pub fn last(&self) -> Option<Arc<Snapshot>> {
        let kept = self.kept.try_lock().ok()?;
        kept.as_ref().map(|(_, snapshot)| snapshot.clone())
    }
    /// The state of a moment ago at most.
    pub async fn snapshot(&self) -> Arc<Snapshot> {
        let mut kept = self.kept.lock().await;
        if let Some((at, snapshot)) = &*kept
            && self.env.clock.now().since(*at) < KEPT_FOR
        {
            return snapshot.clone();
        }
        let snapshot = Arc::new(self.ask().await);
        *kept = Some((self.env.clock.now(), snapshot.clone()));
        snapshot
    }

    async fn ask(&self) -> Snapshot {
        let (top, waits) = (GetTop { seconds: TOP_S }, ListWaits { min_ms: MIN_MS, since_s: PAST_S });
        let (status, meters, tops, waits, namespaces) = tokio::join!(
            self.cluster.status(),
            self.cluster.gather(&GetMeters {}, PATIENCE),
            self.cluster.gather(&top, PATIENCE),
            self.cluster.gather(&waits, PATIENCE),
            self.namespaces(),
        );
        Snapshot {
            status: status.ok(),
            meters: meters.unwrap_or_default(),
            tops: tops.unwrap_or_default(),
            waits: waits.unwrap_or_default(),
            namespaces,
        }
    }

    async fn namespaces(&self) -> Vec<Namespace> {
        let map = self.cluster.map();
        let mut found = Vec::new();
        for namespace in map.namespaces.iter().filter(|n| is_led(&map, n)) {
            let name = &namespace.name;
            match self.env.clock.timeout(NAMESPACE_PATIENCE, self.ask_namespace(name)).await {
                Ok(Ok((volumes, relations))) => {
                    found.push(Namespace { name: name.clone(), volumes, relations })
                }
                _ => drop(self.clients.lock().await.remove(name)), // the next look connects again
            }
        }
        found
    }

    async fn ask_namespace(&self, name: &str) -> Outcome<(Vec<Volume>, Vec<RelationInfo>)> {
        let known = self.clients.lock().await.get(name).cloned();
        let client = match known {
            Some(client) => client,
            None => {
                let client = connect(self.coordinators.clone(), name).await?;
                self.clients.lock().await.insert(name.to_owned(), client.clone());
                client
            }
        };
        Ok((all(&client).await?, client.relations(None).await?))
    }
}
