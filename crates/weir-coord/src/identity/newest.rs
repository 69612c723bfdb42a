//! The newest cluster map that a role has seen: its version, in a file beside the role's data.
//!
//! A coordinator whose directory was replaced by an older copy, or whose etcd by an older snapshot, assigns
//! epochs and numbers again, and cannot detect it. The roles can: the versions that they saw were durable at
//! the coordinator before.
use super::text;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Disk, Env, watch};
use weir_proto::map::ClusterMap;
use weir_proto::{ClusterId, Error, Result};

/// The file's name within a namespace's directory.
pub const MAP_FILE: &str = "weir-map.toml";
/// How often the file is written while the map changes.
const RECORD_INTERVAL: Duration = Duration::from_secs(1);

/// The newest version of the cluster map that a role has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    cluster: ClusterId,
    version: u64,
    /// Lead epoch of the role's namespace. An older copy of the coordinator may reach the same map version by
    /// other changes, but this number only by assigning a lead.
    leader_epoch: u64,
}

impl Seen {
    fn of(map: &ClusterMap, namespace: Option<&str>) -> Seen {
        let entry = map.namespaces.iter().find(|entry| Some(&*entry.name) == namespace);
        let leader_epoch = entry.map_or(0, |entry| entry.leader_epoch.0);
        Seen { cluster: map.cluster, version: map.version, leader_epoch }
    }

    fn to_text(self) -> String {
        let [cluster, version, epoch] =
            [self.cluster.to_string(), self.version.to_string(), self.leader_epoch.to_string()];
        let values = [("cluster", &*cluster), ("version", &*version), ("leader-epoch", &*epoch)];
        text::write("The newest cluster map that this role has seen.", &values)
    }

    fn from_text(bytes: &[u8]) -> Result<Seen> {
        let lines = text::read(bytes)?;
        let number = |key: &str| {
            let value = lines.value(key)?.parse();
            value.map_err(|_| Error::damaged(format!("its {key} is not a number")))
        };
        Ok(Seen {
            cluster: lines.id("cluster")?,
            version: number("version")?,
            leader_epoch: number("leader-epoch")?,
        })
    }
}

/// Refuses the map of a coordinator that is older than this role has seen. A record of another cluster does
/// not apply. `namespace`: the one that the role leads.
pub fn check_newest_map(
    disk: &dyn Disk,
    file: &Path,
    map: &ClusterMap,
    namespace: Option<&str>,
) -> Result<()> {
    let Some(bytes) = text::bytes(disk, file)? else { return Ok(()) };
    let seen = Seen::from_text(&bytes).map_err(|e| {
        let hint = "remove this file: it only guards against an older copy of the coordinator's directory";
        text::if_damaged(e.doing(format!("read {}", file.display())), hint)
    })?;
    let present = Seen::of(map, namespace);
    if seen.cluster != present.cluster {
        return Ok(());
    }
    if present.version < seen.version {
        return Err(older_map(present.version, seen.version).doing(file.display()));
    }
    // The numbers of a namespace that was founded again restart.
    if present.leader_epoch < seen.leader_epoch && present.leader_epoch > 0 {
        let lacks = format!("it knows lead {} of the namespace", present.leader_epoch);
        return Err(older(&lacks, &format!("lead {}", seen.leader_epoch)).doing(file.display()));
    }
    Ok(())
}

pub fn older_map(known: u64, seen: u64) -> Error {
    older(&format!("it has version {known} of the cluster map"), &format!("version {seen}"))
}

/// `knows`: the evidence, as "it has …"; `was`: the newer state that was in use.
pub fn older(knows: &str, was: &str) -> Error {
    Error::denied(format!("the coordinator's directory is an older copy: {knows}, and {was} was in use"))
        .hint(
            "put the newest one back (with etcd: its newest data). An older one is not used, because \
             epochs and numbers would be given twice",
        )
}

pub fn record_newest_map(
    disk: &dyn Disk,
    file: &Path,
    map: &ClusterMap,
    namespace: Option<&str>,
) -> Result<()> {
    text::store(disk, file, &Seen::of(map, namespace).to_text())
}

/// Records each newer map until the map has no sender any more.
pub async fn keep_newest_map(
    env: Env,
    mut maps: watch::Receiver<Arc<ClusterMap>>,
    file: PathBuf,
    namespace: Option<String>,
) {
    let (mut recorded, mut is_logged) = (0, false);
    loop {
        let map = maps.borrow().clone();
        if map.version > recorded {
            let (disk, path, of) = (env.disk.clone(), file.clone(), namespace.clone());
            let version = map.version;
            let write = move || record_newest_map(&*disk, &path, &map, of.as_deref());
            match env.tasks.blocking(write).await {
                Ok(()) => (recorded, is_logged) = (version, false),
                Err(e) if !is_logged => {
                    tracing::warn!("the newest cluster map is not recorded: {e}");
                    is_logged = true;
                }
                Err(_) => {}
            }
        }
        env.clock.sleep(RECORD_INTERVAL).await;
        if maps.wait_for(|map| map.version > recorded).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::NamespaceEntry;
    use weir_proto::{Epoch, ErrorKind, NamespaceUuid};

    #[tokio::test]
    async fn an_older_map_of_the_same_cluster_is_refused() {
        let (env, dir) = (weir_env::real::env(), tempfile::tempdir().unwrap());
        let file = dir.path().join(MAP_FILE);
        let map = |cluster, version, leads| {
            let mut map = ClusterMap { cluster: ClusterId([cluster; 16]), version, ..ClusterMap::absent() };
            map.namespaces.push(NamespaceEntry {
                id: map.last_namespace,
                name: "root".into(),
                uuid: NamespaceUuid([1; 16]),
                leader: None,
                leader_epoch: Epoch(leads),
            });
            map
        };
        check_newest_map(&*env.disk, &file, &map(1, 1, 1), Some("root")).unwrap();
        record_newest_map(&*env.disk, &file, &map(1, 57, 3), Some("root")).unwrap();
        for (cluster, version, leads, is_fine) in [
            (1, 57, 3, true),
            (1, 58, 4, true),
            (1, 56, 3, false),
            (1, 0, 0, false),
            (1, 90, 2, false),
            (2, 3, 1, true),
        ] {
            let checked = check_newest_map(&*env.disk, &file, &map(cluster, version, leads), Some("root"));
            assert_eq!(checked.is_ok(), is_fine, "{cluster} {version} {leads}: {checked:?}");
            if let Err(e) = checked {
                assert!(e.kind == ErrorKind::Denied && e.context.contains("an older copy"), "{e:?}");
            }
        }
        env.disk.write_atomic(&file, b"nonsense").unwrap();
        let damaged = check_newest_map(&*env.disk, &file, &map(1, 60, 3), None).unwrap_err();
        assert!(damaged.to_string().contains("hint: remove this file"), "{damaged:?}");
    }
}
