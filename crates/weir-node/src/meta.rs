//! The metadata service of one namespace, leading.
use crate::audit::Audit;
use crate::audited::{Audited, of_volume, refused_by_rule};
use crate::exports::{Exported, Exports, WithExports};
use crate::gate::Gate;
use crate::import::compare;
use crate::purge::ClusterPurge;
use crate::site::{Failed, Site, leave};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_coord::identity::{
    MAP_FILE, NamespaceIdentity, check_newest_map, open_namespace, record_newest_map,
};
use weir_coord::{Cluster, Membership, clocks, no_reports};
use weir_env::{BoxFuture, Env};
use weir_kv::{Engine, EngineConfig, SharedKv};
use weir_meta::{LayoutPolicy, Lead, Level, Meta, MetaConfig};
use weir_proto::export::ExportHead;
use weir_proto::map::Scheme;
use weir_proto::meta::Time;
use weir_proto::volume::Policy;
use weir_proto::{Error, NamespaceUuid};
use weir_rpc::Server;

/// Where a namespace is kept.
pub struct MetaPlace {
    pub dir: PathBuf,
    pub namespace: String,
    /// Found it, unless it is there.
    pub new: bool,
    /// Found it instead of this one, which is lost.
    pub instead_of: Option<NamespaceUuid>,
    pub engine: EngineConfig,
    /// Whether the process of a client, as it named itself, is certainly gone.
    pub gone: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

pub struct MetaNode {
    env: Env,
    cluster: Cluster,
    kv: SharedKv,
    leading: Lead,
    meta: Meta,
    exports: Arc<Exports>,
    audit: Audit,
    pub server: Server,
}

pub async fn start_meta(env: &Env, site: &Site, place: MetaPlace) -> Result<MetaNode, Failed> {
    let cluster = site.observe(env).await?;
    let fresh = NamespaceIdentity {
        cluster: cluster.id(),
        name: place.namespace,
        uuid: NamespaceUuid(env.rng.id_128()),
        instead_of: place.instead_of,
    };
    if let Some(ahead_ms) = cluster.clock_ahead_ms().await {
        clocks::check(&cluster.who().name, ahead_ms)?;
    }
    let seen = place.dir.join(MAP_FILE);
    check_newest_map(&*env.disk, &seen, &cluster.map(), Some(&fresh.name))?;
    let own = open_namespace(&*env.disk, &place.dir, &cluster.map(), &fresh, place.new)?;
    let engine = Engine::open(env, &place.dir.join("kv"), place.engine).await?;
    let kv: SharedKv = engine.clone();
    let (gate, audit) = (Gate::to_metadata(), Audit::start(env, &place.dir));
    let audited = Arc::new(Audited { service: Arc::new(gate.clone()), audit: audit.clone() });
    let server = site.serve(env, cluster.identity(), audited).await?;
    cluster.join(Membership { addrs: server.addrs().to_vec(), targets: Vec::new() }, no_reports()).await?;
    let (leading, lead) = Lead::take(&cluster, &kv, &own).await.map_err(|e| e.doing(place.dir.display()))?;
    record_newest_map(&*env.disk, &seen, &lead.map, Some(&own.name))?;
    site.record_map(env, &cluster, seen, Some(own.name.clone()));
    let (followed, judged, ruled) = (cluster.clone(), cluster.clone(), cluster.clone());
    let (log, witnesses, asked) = (audit.clone(), audit.clone(), cluster.clone());
    let config = MetaConfig {
        namespace: lead.namespace,
        lease_ms: lead.map.settings.lease_ms,
        layout: Arc::new(layout_policy(env.clone(), cluster.clone())),
        at_home: Arc::new(weir_meta::at_home),
        space: Arc::new(space_of_targets(cluster.clone())),
        purge: Arc::new(ClusterPurge(cluster.clone())),
        gone: place.gone,
        map_version: Arc::new(move || followed.map().version),
        takes_data: Arc::new(move || judged.map().takes_data()),
        access: Arc::new(move || ruled.map().access.clone()),
        refused: Arc::new(move |refusal| log.record(refused_by_rule(&log, refusal))),
        audits: Arc::new(move || asked.map().audits.clone()),
        witness: Arc::new(move |seen| witnesses.record(of_volume(&witnesses, seen))),
    };
    let meta = Meta::open(env, kv.clone(), config)?;
    leading.record().await?;
    compare(env, &cluster, &meta, lead.namespace).await?;
    let head = ExportHead {
        cluster: own.cluster,
        namespace: lead.namespace,
        name: own.name,
        uuid: own.uuid,
        changes: 0,
        taken: Time { nanos: 0 },
        release: cluster.identity().program().release,
    };
    let exports = Exports::new(env, Exported { head, engine });
    gate.open(Arc::new(WithExports { service: Arc::new(meta.clone()), exports: exports.clone() }));
    Ok(MetaNode { env: env.clone(), cluster, kv, leading, meta, exports, audit, server })
}

impl MetaNode {
    /// Works until it may not lead any more, or its journal fails. Says why.
    pub async fn run(&self) -> Error {
        tokio::select! {
            biased;
            failed = self.meta.run() => failed,
            lost = self.leading.keep_recording(&self.env) => lost,
            () = self.exports.keep_schedule() => Error::io("the schedule of exports ended"),
        }
    }

    /// Ends in good order, each step within `patience`.
    pub async fn end(self, patience: Duration) -> weir_proto::Result<()> {
        // Away or late, the coordinator knows what was recorded last.
        let _ = self.env.clock.timeout(patience, self.leading.record()).await;
        leave(&self.env, &self.cluster, patience).await;
        self.audit.settle(patience).await;
        self.server.stop();
        // The next start is quick; without it the journal is replayed.
        self.kv.checkpoint().await
    }
}

/// How full the targets are, in payload: redundancy is taken off.
fn space_of_targets(cluster: Cluster) -> impl Fn() -> BoxFuture<'static, Option<Level>> {
    move || {
        let cluster = cluster.clone();
        Box::pin(async move {
            let status = cluster.status().await.ok()?;
            let scheme = status.map.settings.scheme;
            let payload =
                |raw: u64| (u128::from(raw) * u128::from(scheme.data) / scheme.width() as u128) as u64;
            // One report per target: the newest counts.
            let newest: BTreeMap<_, _> =
                status.targets.iter().map(|r| (r.target, (r.capacity, r.used))).collect();
            let (capacity, used) = newest.values().fold((0, 0), |sum, r| (sum.0 + r.0, sum.1 + r.1));
            (capacity > 0).then(|| Level { capacity: payload(capacity), used: payload(used) })
        })
    }
}

/// Layouts that are remembered: one for each policy that volumes have.
const POLICIES_MAX: usize = 64;

/// What was worked out for one version of the map.
#[derive(Default)]
struct KnownLayouts {
    version: u64,
    layouts: Vec<(Policy, LayoutPolicy)>,
    /// Whose placement groups the coordinator was asked for.
    asked: Vec<Policy>,
}

/// Where new files go: worked out once for each map and policy, as every create asks. A volume whose scheme
/// has no placement groups gets them: its files can be written as soon as the map has them.
fn layout_policy(env: Env, cluster: Cluster) -> impl Fn(&Policy) -> Option<LayoutPolicy> {
    let known: Mutex<KnownLayouts> = Mutex::default();
    move |policy| {
        let map = cluster.map();
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.version != map.version || known.layouts.len() > POLICIES_MAX {
            *known = KnownLayouts { version: map.version, ..KnownLayouts::default() };
        }
        if let Some((_, layout)) = known.layouts.iter().find(|(of, _)| of == policy) {
            return Some(*layout);
        }
        let Ok(layout) = weir_coord::layout_in(&map, policy.scheme, policy.pool.as_deref(), 0) else {
            let is_new = known.asked.len() < POLICIES_MAX && !known.asked.contains(policy);
            if let (true, Some(scheme)) = (is_new, policy.scheme.filter(|s| *s != map.settings.scheme)) {
                known.asked.push(policy.clone());
                ask_for_groups(&env, cluster.clone(), policy.pool.clone(), scheme);
            }
            return None;
        };
        let layout = LayoutPolicy {
            scheme: layout.scheme,
            cell_shift: layout.cell_shift,
            first_pg: layout.first_pg,
            pg_count: layout.pg_count,
        };
        known.layouts.push((policy.clone(), layout));
        Some(layout)
    }
}

/// Those of the scheme for new files come by themselves.
fn ask_for_groups(env: &Env, cluster: Cluster, pool: Option<String>, scheme: Scheme) {
    env.tasks.spawn("ask for placement groups", async move {
        if let Err(e) = cluster.make_groups(pool, scheme).await {
            tracing::warn!("a volume's files cannot be written yet: {e}");
        }
    });
}
