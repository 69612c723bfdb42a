//! A role's reports on itself to the coordinator, every few seconds, for `weir status`.
//!
//! Nothing depends on them: an unreachable coordinator, or one of an earlier release, gets none.
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_admin::table;
use weir_client::Client;
use weir_coord::Cluster;
use weir_coord::etcd::Etcd;
use weir_coord::standbys::Standbys;
use weir_coord::store::Store;
use weir_env::{BoxFuture, Env, Instant};
use weir_home::{LongCall, long_calls};
use weir_node::MetaSpace;
use weir_proto::condition::{
    Condition, METADATA_FULL, NodeDisk, NodeTrouble, REFUSES, REPORT_EVERY_MS, Severity,
};
use weir_proto::version::Program;
use weir_proto::{Error, TargetId};
use weir_store::StorageNode;

/// A report that fails within this is repeated the next time.
const PATIENCE: Duration = Duration::from_secs(3);
/// Without its leader a mover searches for it for a while in each failover.
const UNREACHED_AFTER: Duration = Duration::from_secs(20);

/// A call at home that lasts longer hangs, or home is too slow for its work: a large part over a slow link
/// takes some seconds.
const HOME_SILENT_AFTER: Duration = Duration::from_secs(30);

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

/// The client's name for metadata servers.
pub fn session_name(name: &str, host: &str) -> String {
    format!("{name} on {host}")
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
                format!(" (directory {}, {} free)", disk.dir, table::bytes(disk.free))
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

/// A mount.
pub fn of_mount(host: &str, name: &str, client: &Client) -> Inspect {
    let (host, name, client) = (host.to_owned(), name.to_owned(), client.clone());
    Arc::new(move || {
        let mut condition = plain(&host);
        condition.client = session_name(&name, &host);
        condition.unwritten_bytes = client.unsaved_bytes();
        condition.troubles.extend(losses(&name, &client));
        Box::pin(std::future::ready(condition))
    })
}

fn losses(name: &str, client: &Client) -> Option<NodeTrouble> {
    let (count, last) = client.losses();
    let what = last.last().map_or("see its log", |loss| loss.what.as_str());
    let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
    (count > 0).then(|| NodeTrouble {
        code: "data-lost".to_owned(),
        severity: Severity::Critical,
        about: name.to_owned(),
        text: format!("{name} lost changes or locks {times} since it was mounted; the last: {what}"),
        action: "inform the users of these files, then mount it again".to_owned(),
    })
}

/// Since when a mover has no metadata leader, and why.
#[derive(Clone, Default)]
pub struct Unreached(Arc<Mutex<Option<(Instant, String)>>>);

impl Unreached {
    fn known(&self) -> std::sync::MutexGuard<'_, Option<(Instant, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn failed(&self, now: Instant, why: String) {
        let mut known = self.known();
        let since = known.as_ref().map_or(now, |(since, _)| *since);
        *known = Some((since, why));
    }
    pub fn reached(&self) {
        *self.known() = None;
    }
    fn trouble(&self, name: &str, now: Instant) -> Option<NodeTrouble> {
        let known = self.known().clone();
        let (since, why) = known.filter(|(since, _)| now.since(*since) >= UNREACHED_AFTER)?;
        let seconds = now.since(since).as_secs();
        Some(NodeTrouble {
            code: "mover-unconnected".to_owned(),
            severity: Severity::Warning,
            about: name.to_owned(),
            text: format!("{name} has not reached the metadata server for {seconds} s: {why}"),
            action: "it tries again by itself; see whether the metadata server runs".to_owned(),
        })
    }
}

/// A mover.
pub fn of_mover(env: &Env, host: &str, name: &str, unreached: &Unreached) -> Inspect {
    let (env, host, name, unreached) = (env.clone(), host.to_owned(), name.to_owned(), unreached.clone());
    Arc::new(move || {
        let mut condition = plain(&host);
        condition.client = session_name(&format!("mover {name}"), &host);
        condition.troubles.extend(unreached.trouble(&name, env.clock.now()));
        condition.troubles.extend(silent_homes(&env, &name));
        Box::pin(std::future::ready(condition))
    })
}

/// Homes where a call has waited for too long.
fn silent_homes(env: &Env, name: &str) -> Vec<NodeTrouble> {
    let trouble = |LongCall { home, doing, lasted }: LongCall| NodeTrouble {
        code: "home-silent".to_owned(),
        severity: Severity::Warning,
        text: format!("{name} has waited {} s for {home}, to {doing}", lasted.as_secs()),
        action: "see to its server, or to the file system that it is on".to_owned(),
        about: home,
    };
    long_calls(&env.watch, HOME_SILENT_AFTER).into_iter().map(trouble).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mover_without_its_leader_says_so_after_a_while() {
        let unreached = Unreached::default();
        let at = |s: u64| Instant(s * 1_000_000_000);
        assert_eq!(unreached.trouble("m", at(0)), None);
        unreached.failed(at(5), "refused".to_owned());
        unreached.failed(at(20), "no answer".to_owned());
        assert_eq!(unreached.trouble("m", at(24)), None, "a failover takes so long");
        let trouble = unreached.trouble("m", at(35)).expect("it says so");
        assert_eq!(trouble.text, "m has not reached the metadata server for 30 s: no answer");
        unreached.reached();
        assert_eq!(unreached.trouble("m", at(99)), None);
    }
}
