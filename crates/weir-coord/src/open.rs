//! Opens a coordinator's cluster: in a directory of its own, or in a store that several coordinators share.
//!
//! Invariant: a cluster is founded only on request, and a coordinator leads only the cluster of its
//! directory. Knows nothing of the coordinator's use of the map.
use crate::identity::{check_coordinator, write_coordinator};
use crate::kept_map::MAP_KEY;
use crate::records::decode_map;
use crate::server::{CoordConfig, Coordinator};
use crate::store::{Embedded, Store};
use std::path::Path;
use std::sync::Arc;
use weir_env::Env;
use weir_proto::{ClusterId, Error, Result};

/// The cluster in a store that coordinators share; `None`: the store is empty.
pub async fn cluster_in(store: &dyn Store) -> Result<Option<ClusterId>> {
    let kept = store.get(MAP_KEY).await?.map(|kept| decode_map(&kept.value)).transpose()?;
    Ok(kept.map(|map| map.cluster))
}

impl Coordinator {
    /// Opens the cluster in `dir`, or founds a new one there if requested.
    pub async fn open(env: Env, dir: &Path, config: CoordConfig) -> Result<Arc<Coordinator>> {
        let (disk, new) = (env.disk.clone(), config.new);
        let known = check_coordinator(&*disk, dir, new)?;
        let store = Embedded::open(env.clone(), dir)?;
        let coordinator = Coordinator::open_store(env, store, config).await?;
        let cluster = coordinator.cluster();
        match known {
            Some(known) if known != cluster => {
                return Err(Error::damaged(format!(
                    "{} is the coordinator's directory of cluster {known}, and its state is of {cluster}",
                    dir.display()
                ))
                .hint("restore the directory as a whole"));
            }
            Some(_) => {}
            // After the state: an interrupted founding continues when it is requested again.
            None => write_coordinator(&*disk, dir, cluster)?,
        }
        Ok(coordinator)
    }

    /// Opens the cluster in a store that coordinators share, or founds a new one there if requested; this one
    /// leads. `known`: the cluster of its directory, if it has led or waited earlier.
    pub async fn open_shared(
        env: Env,
        dir: &Path,
        known: Option<ClusterId>,
        store: Arc<dyn Store>,
        config: CoordConfig,
    ) -> Result<Arc<Coordinator>> {
        let (disk, is_new, named) = (env.disk.clone(), config.new, config.cluster);
        match cluster_in(&*store).await? {
            None if !is_new => {
                return Err(Error::damaged("the store holds no cluster").hint(
                    "correct coord.store and etcd.prefix, or restore etcd from a snapshot; `weir coord \
                     --new` founds a cluster",
                ));
            }
            // The second coordinator of a cluster is new, too: it names the cluster that it joins.
            Some(kept) if is_new && named != Some(kept) => {
                return Err(Error::exists(format!("the store holds cluster {kept} already"))
                    .hint("for another coordinator of it, set cluster.id"));
            }
            Some(kept) if known.is_some_and(|known| known != kept) => {
                return Err(Error::denied(format!(
                    "{} is the directory of another cluster's coordinator, and the store holds cluster \
                     {kept}",
                    dir.display()
                ))
                .hint("correct coord.dir, or coord.store"));
            }
            _ => {}
        }
        let coordinator = Coordinator::open_store(env, store, config).await?;
        if known.is_none() {
            write_coordinator(&*disk, dir, coordinator.cluster())?;
        }
        Ok(coordinator)
    }
}
