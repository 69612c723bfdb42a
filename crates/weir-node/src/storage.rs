//! Targets on disks of one machine, serving.
use crate::gate::Gate;
use crate::sharing::Sharing;
use crate::site::{Failed, Site, Step, leave};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use weir_coord::identity::{KnownTargets, TargetIdentity, check_newest_map, older, open_target};
use weir_coord::{Cluster, Membership, Reports, TargetLives};
use weir_env::{BoxFuture, Env};
use weir_kv::{EngineConfig, SharedKv};
use weir_proto::coord::{AnnouncedTarget, TargetHistory, TargetReport};
use weir_proto::map::ClusterMap;
use weir_proto::{DiskUuid, Error, Result, RunId};
use weir_rpc::Server;
use weir_store::{Geometry, StorageNode, TargetConfig, runs};

/// The directories of targets.
pub struct StoragePlace {
    /// One target each.
    pub dirs: Vec<PathBuf>,
    /// Pool of new targets.
    pub pool: String,
    /// A file that lists which target is in which directory, outside of the disks: it distinguishes an empty
    /// mount point from a new disk.
    pub known: Option<PathBuf>,
    /// Directories of targets of other processes of this machine, which may share a file system with one of
    /// these.
    pub others: Vec<PathBuf>,
    pub index: EngineConfig,
}

pub struct StorageRole {
    env: Env,
    cluster: Cluster,
    storage: Arc<StorageNode>,
    pub server: Server,
}

/// A target directory whose identity was checked.
struct Checked {
    dir: PathBuf,
    identity: TargetIdentity,
}

/// A target with its index open, in which this run is recorded.
struct Begun {
    dir: PathBuf,
    identity: TargetIdentity,
    index: SharedKv,
    history: TargetHistory,
}

pub fn start_storage<'a>(
    env: &'a Env,
    site: &'a Site,
    place: &'a StoragePlace,
) -> BoxFuture<'a, std::result::Result<StorageRole, Failed>> {
    Box::pin(start_storage_unboxed(env, site, place))
}

async fn start_storage_unboxed(
    env: &Env,
    site: &Site,
    place: &StoragePlace,
) -> std::result::Result<StorageRole, Failed> {
    let cluster = site.observe(env).await?;
    // The file is beside the record of its targets.
    let seen = place.known.as_ref().map(|known| known.with_extension("map"));
    if let Some(seen) = &seen {
        check_newest_map(&*env.disk, seen, &cluster.map(), None)?;
    }
    let targets = begin_runs(env, place, check_targets(env, &cluster, place)?).await?;
    check_runs(&cluster.map(), &targets)?;
    if let Some(seen) = seen {
        site.record_map(env, &cluster, seen, None);
    }
    let gate = Arc::new(Gate::default());
    let server = site.serve_as_member(env, &cluster, gate.clone()).await?;
    let opened: Arc<OnceLock<Arc<StorageNode>>> = Arc::default();
    // Targets with a number are opened before the node is announced to the cluster; a new target gets its
    // number by joining.
    if targets.iter().all(|t| cluster.target_of(t.identity.disk).is_some()) {
        open_node(env, &cluster, &targets, &opened).await?;
    }
    let sharing = sharing(env, place).await;
    let reports = reports(env, sharing.clone(), opened.clone());
    let announced = announced_targets(env, &cluster, &sharing, &targets, &reports());
    let membership = Membership { addrs: server.addrs().to_vec(), targets: announced };
    gate.hold();
    let joining = cluster.join_with(membership, reports, lives(opened.clone()));
    let joined = joining.await.map_err(Step::Join.failed())?;
    if opened.get().is_none() {
        open_node(env, &cluster, &targets, &opened).await?;
    }
    let storage = opened.get().cloned().ok_or_else(|| Error::io("the storage node did not open"))?;
    // Not earlier: coordinator and index must both have recorded this run before any request is served.
    for target in &targets {
        let admitted = runs::admitted(&joined.map, target.identity.disk, target.history.run)?;
        runs::confirm(&target.index, admitted).await?;
    }
    gate.open(storage.clone());
    Ok(StorageRole { env: env.clone(), cluster, storage, server })
}

impl StorageRole {
    /// Seals, repairs, scrubs, reports, while it is polled.
    pub fn work(&self) -> impl Future<Output = ()> + Send + use<> {
        self.storage.clone().run()
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }
    pub fn node(&self) -> &Arc<StorageNode> {
        &self.storage
    }

    /// Ends in an orderly way.
    pub fn end(self, patience: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.end_unboxed(patience))
    }
    async fn end_unboxed(self, patience: Duration) {
        leave(&self.env, &self.cluster, patience).await;
        self.server.stop();
    }
}

fn check_targets(env: &Env, cluster: &Cluster, place: &StoragePlace) -> Result<Vec<Checked>> {
    let (disk, known) = (&*env.disk, place.known.as_deref());
    let mut record = known.map_or(Ok(KnownTargets::default()), |file| KnownTargets::read(disk, file))?;
    let mut checked = Vec::new();
    for dir in &place.dirs {
        let fresh = TargetIdentity {
            cluster: cluster.id(),
            disk: DiskUuid(env.rng.id_128()),
            pool: place.pool.clone(),
        };
        let (identity, _) = open_target(disk, dir, &fresh, record.0.get(dir).copied())?;
        record.0.retain(|_, disk| *disk != identity.disk); // it may have been elsewhere
        record.0.insert(dir.clone(), identity.disk);
        checked.push(Checked { dir: dir.clone(), identity });
    }
    if let Some(file) = known {
        record.write(disk, file)?;
    }
    Ok(checked)
}

async fn begin_runs(env: &Env, place: &StoragePlace, targets: Vec<Checked>) -> Result<Vec<Begun>> {
    let mut begun = Vec::new();
    for Checked { dir, identity } in targets {
        if weir_store::inspect::has_lost_index(&*env.disk, &dir)? {
            tracing::warn!("{} has slabs, but no index of them: it begins as an empty target", dir.display());
        }
        let index = weir_store::open_index_with(env, &dir, place.index).await?;
        let history = runs::begin(&index, RunId(env.rng.next_u64())).await?;
        begun.push(Begun { dir, identity, index, history });
    }
    Ok(begun)
}

/// A target that served in a run unknown to the coordinator: then the coordinator's state is an older copy.
fn check_runs(map: &ClusterMap, targets: &[Begun]) -> Result<()> {
    for Begun { dir, identity, history, .. } in targets {
        let known = map.targets.iter().find(|t| t.uuid == identity.disk).map_or(0, |t| t.last.run.number);
        let own = history.confirmed.number;
        if own > known {
            let was = format!("run {own} of the target in {}", dir.display());
            return Err(older(&format!("it knows run {known}"), &was));
        }
    }
    Ok(())
}

/// On another thread: a disk of others may hang.
async fn sharing(env: &Env, place: &StoragePlace) -> Sharing {
    let (disk, own, others) = (env.disk.clone(), place.dirs.clone(), place.others.clone());
    env.tasks.blocking(move || Sharing::find(&*disk, &own, &others)).await
}

/// `opened`: reports of targets that the cluster knows already: their slabs are part of their capacity.
fn announced_targets(
    env: &Env,
    cluster: &Cluster,
    sharing: &Sharing,
    targets: &[Begun],
    opened: &[TargetReport],
) -> Vec<AnnouncedTarget> {
    let capacity = |t: &Begun| {
        let known = cluster.target_of(t.identity.disk);
        let report = opened.iter().find(|report| Some(report.target) == known);
        let space = env.disk.space(&t.dir).unwrap_or_default();
        let free = weir_store::slab::available(space, Geometry::for_disk(space.total).step_bytes);
        report.map_or_else(|| sharing.capacity(&t.dir, free, free), |report| report.capacity)
    };
    let announced = |t: &Begun| AnnouncedTarget {
        uuid: t.identity.disk,
        pool: t.identity.pool.clone(),
        capacity: capacity(t),
        history: t.history.clone(),
    };
    targets.iter().map(announced).collect()
}

/// For heartbeats: the stores' reports, with each target's part of the space.
fn reports(env: &Env, sharing: Sharing, opened: Arc<OnceLock<Arc<StorageNode>>>) -> Reports {
    let env = env.clone();
    Arc::new(move || {
        let Some(storage) = opened.get() else { return Vec::new() };
        let mut reports = storage.reports();
        for report in &mut reports {
            let space = storage.dir_of(report.target).map(|dir| (dir, env.disk.space(dir)));
            if let Some((dir, Ok(space))) = space {
                let free = storage.available_of(report.target, space);
                report.capacity = sharing.capacity(dir, report.capacity, free);
            }
        }
        reports
    })
}

/// For signs of life. Reads atomics only: it waits for no work of the node.
fn lives(opened: Arc<OnceLock<Arc<StorageNode>>>) -> TargetLives {
    Arc::new(move || opened.get().map_or_else(Vec::new, |storage| storage.lives()))
}

async fn open_node(
    env: &Env,
    cluster: &Cluster,
    targets: &[Begun],
    opened: &OnceLock<Arc<StorageNode>>,
) -> Result<()> {
    let mut configs = Vec::new();
    for target in targets {
        let id = cluster.target_of(target.identity.disk).ok_or_else(|| {
            Error::not_found(format!("the cluster map does not list the target in {}", target.dir.display()))
        })?;
        let space = env.disk.space(&target.dir).unwrap_or_default();
        let config = TargetConfig { id, dir: target.dir.clone(), geometry: Geometry::for_disk(space.total) };
        configs.push((config, target.index.clone()));
    }
    let storage = StorageNode::open_over(env.clone(), configs, Arc::new(cluster.clone())).await?;
    opened.set(storage).map_err(|_| Error::io("the storage node was opened twice"))
}
