//! A role's reports on itself to the coordinator, every few seconds, for `weir status`; the conditions of
//! servers.
//!
//! Nothing depends on them: an unreachable coordinator, or one of an earlier release, gets none.
use crate::meta::MetaSpace;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::Cluster;
use weir_coord::etcd::Etcd;
use weir_coord::standbys::Standbys;
use weir_coord::store::Store;
use weir_diagnose::quantity::bytes;
use weir_env::{BoxFuture, Env};
use weir_proto::condition::{
    Condition, METADATA_FULL, NodeDisk, NodeTrouble, REFUSES, REPORT_EVERY_MS, Severity,
};
use weir_proto::version::Program;
use weir_proto::{Error, TargetId};
use weir_store::StorageNode;

/// A report that fails within this is repeated the next time.
const PATIENCE: Duration = Duration::from_secs(3);

/// A target refuses data if it has no room for a cell of this size, the usual one.
const CELL_BYTES: u32 = 1 << 20;

/// Determines the condition of this process.
pub type Inspect = Arc<dyn Fn() -> BoxFuture<'static, Condition> + Send + Sync>;

/// Reports as long as the process runs.
#[derive(Clone)]
pub struct Reporter {
    env: Env,
    cluster: Cluster,
}

impl Reporter {
    pub fn start(env: &Env, cluster: &Cluster, inspect: Inspect) -> Reporter {
        let reporter = Reporter { env: env.clone(), cluster: cluster.clone() };
        let reporting = reporter.clone();
        env.tasks.spawn("report the condition", async move {
            loop {
                reporting.report(inspect().await).await;
                reporting.env.clock.sleep(Duration::from_millis(REPORT_EVERY_MS)).await;
            }
        });
        reporter
    }

    async fn report(&self, condition: Condition) {
        let reported = self.env.clock.timeout(PATIENCE, self.cluster.report_condition(condition)).await;
        if let Ok(Err(e)) = reported {
            tracing::debug!("the report to the coordinator failed: {e}");
        }
    }

    /// It ends cleanly: its silence from now on is not a trouble.
    pub async fn ends(&self, patience: Duration) {
        let last = self.report(Condition { ends: true, ..Condition::default() });
        let _ = self.env.clock.timeout(patience, last).await; // it is missed for a while then
    }
}

/// A node without troubles.
pub fn plain(host: &str) -> Condition {
    Condition { host: host.to_owned(), release: Program::this().release, ..Condition::default() }
}

/// A server with a directory of its own.
pub fn of_directory(env: &Env, host: &str, dir: PathBuf) -> Inspect {
    let (env, host) = (env.clone(), host.to_owned());
    Arc::new(move || {
        let (env, host, dir) = (env.clone(), host.clone(), dir.clone());
        Box::pin(async move {
            let (disk, path) = (env.disk.clone(), dir.clone());
            // A hanging disk blocks a thread, not this process.
            let space = env.tasks.blocking(move || disk.space(&path)).await;
            let disks = space.map(|space| {
                vec![NodeDisk { dir: dir.display().to_string(), free: space.free, capacity: space.total }]
            });
            Condition { disks: disks.unwrap_or_default(), ..plain(&host) }
        })
    })
}

/// A metadata server: its directory, and a disk that is nearly full or full.
pub fn of_metadata(inspect: Inspect, name: &str, space: Arc<dyn Fn() -> MetaSpace + Send + Sync>) -> Inspect {
    let name = name.to_owned();
    Arc::new(move || {
        let (inspected, about, space) = (inspect(), name.clone(), space.clone());
        Box::pin(async move {
            let mut condition = inspected.await;
            let at = condition.disks.first().map_or_else(String::new, |disk| {
                format!(" (directory {}, {} free)", disk.dir, bytes(disk.free))
            });
            let (severity, what) = match space() {
                MetaSpace::Enough => return condition,
                MetaSpace::Short => (Severity::Warning, "is nearly full: no names can be created"),
                MetaSpace::Full => (Severity::Critical, "is full: changes of names, sizes and data wait"),
            };
            condition.troubles.push(NodeTrouble {
                code: METADATA_FULL.to_owned(),
                severity,
                text: format!("the disk of {about}{at} {what}"),
                action: "remove files, free space there, or move the directory to a larger disk".to_owned(),
                about,
            });
            condition
        })
    })
}

/// A storage node: its targets that refuse data for want of space.
pub fn of_storage(env: &Env, host: &str, name: &str, storage: &Arc<StorageNode>) -> Inspect {
    let (env, host, name, storage) = (env.clone(), host.to_owned(), name.to_owned(), storage.clone());
    Arc::new(move || {
        let (env, host, name, storage) = (env.clone(), host.clone(), name.clone(), storage.clone());
        Box::pin(async move {
            // A hanging disk blocks a thread, not this process.
            let refusals = env.tasks.blocking(move || storage.refusals(CELL_BYTES)).await;
            let trouble = |(target, why): (TargetId, Error)| NodeTrouble {
                code: REFUSES.to_owned(),
                severity: Severity::Warning,
                about: target.to_string(),
                text: format!("{target} ({name}) refuses new data: {why}"),
                action: "delete or evict files, free space on its file system, or add targets".to_owned(),
            };
            Condition { troubles: refusals.into_iter().map(trouble).collect(), ..plain(&host) }
        })
    })
}

/// Condition of a coordinator: its process's, and troubles of members of etcd.
pub async fn of_coordinator(inspect: &Inspect, etcd: Option<&Etcd>) -> Condition {
    let mut condition = inspect().await;
    let Some(etcd) = etcd else { return condition };
    let trouble = |(member, why): (String, String)| NodeTrouble {
        code: "etcd-member-silent".to_owned(),
        severity: Severity::Warning,
        text: format!("the etcd member at {member} does not answer ({why})"),
        action: "start it again; the cluster map cannot change while most members are away".to_owned(),
        about: member,
    };
    condition.troubles.extend(etcd.silent_members().await.into_iter().map(trouble));
    let full = etcd.members_without_space().await;
    condition.troubles.extend((!full.is_empty()).then(|| NodeTrouble {
        code: "etcd-full".to_owned(),
        severity: Severity::Degraded,
        about: "etcd".to_owned(),
        text: format!(
            "etcd has no space (alarm NOSPACE of {}): the cluster map cannot change, so no target that fails is replaced",
            full.join(", ")
        ),
        action: "`etcdctl compact`, `etcdctl defrag`, then `etcdctl alarm disarm`; start etcd with --auto-compaction-retention"
            .to_owned(),
    }));
    condition
}

/// Coordinators that are away. None if the store does not answer: that is a trouble of its own.
pub async fn standbys(env: &Env, known: &mut Standbys, store: Arc<Etcd>, own: &str) -> Vec<NodeTrouble> {
    let store: Arc<dyn Store> = store;
    let trouble = |(name, away): (String, Duration)| NodeTrouble {
        code: "standby-missing".to_owned(),
        severity: Severity::Warning,
        text: format!(
            "the standby coordinator {name} has been away for {} s, and cannot take over",
            away.as_secs()
        ),
        action: "start it again on its machine; one that was removed is forgotten after seven days"
            .to_owned(),
        about: name,
    };
    match env.clock.timeout(PATIENCE, known.missing(env, &store, own)).await {
        Ok(Ok(missing)) => missing.into_iter().map(trouble).collect(),
        _ => Vec::new(),
    }
}
