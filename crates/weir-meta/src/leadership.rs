//! The leadership of a namespace, as the coordinator assigns it to one directory.
//!
//! Invariant: the coordinator never knows of a change that is not durable here, and it knows of one before
//! the first client is served. So a directory that holds fewer changes than the coordinator knows is an
//! outdated copy. Knows nothing of the changes' meaning.
use std::time::Duration;
use weir_coord::Cluster;
use weir_coord::identity::NamespaceIdentity;
use weir_env::Env;
use weir_kv::SharedKv;
use weir_proto::coord::LeadReply;
use weir_proto::{Error, ErrorKind, NamespaceId, Result};

/// The interval of reports to the coordinator on the directory's progress, while it changes: an old copy that
/// lacks only changes of the last interval before the end is not recognized. Each costs one small write of
/// the coordinator's disk.
const RECORD_INTERVAL: Duration = Duration::from_secs(1);

pub struct Leadership {
    cluster: Cluster,
    kv: SharedKv,
    namespace: NamespaceId,
}

impl Leadership {
    /// Takes the leadership of a namespace with the store in its directory. Report its progress to the
    /// coordinator with [`Leadership::record`] before clients are served, and from then on with
    /// [`Leadership::keep_recording`].
    pub async fn take(
        cluster: &Cluster,
        kv: &SharedKv,
        identity: &NamespaceIdentity,
    ) -> Result<(Leadership, LeadReply)> {
        let reply = cluster.lead_namespace(identity, durable_changes(kv).await?).await?;
        Ok((Leadership::with_kv(cluster, kv, reply.namespace), reply))
    }

    /// The leadership that the coordinator has assigned to this node's copy.
    pub fn with_kv(cluster: &Cluster, kv: &SharedKv, namespace: NamespaceId) -> Leadership {
        Leadership { cluster: cluster.clone(), kv: kv.clone(), namespace }
    }

    pub fn kv(&self) -> &SharedKv {
        &self.kv
    }

    /// Reports to the coordinator the number of changes in the directory.
    pub async fn record(&self) -> Result<()> {
        self.cluster.record_progress(self.namespace, durable_changes(&self.kv).await?).await
    }

    /// Reports it at intervals, until the leadership is lost or the store fails.
    pub async fn keep_recording(&self, env: &Env) -> Error {
        let mut known = 0;
        loop {
            env.clock.sleep(RECORD_INTERVAL).await;
            let changes = self.kv.durable().0;
            if changes == known {
                continue;
            }
            match self.cluster.record_progress(self.namespace, changes).await {
                Ok(()) => known = changes,
                Err(e) if matches!(e.kind, ErrorKind::Exists | ErrorKind::NotFound) => return e,
                // The coordinator is unreachable; the task that follows its map reports that.
                Err(e) => tracing::debug!("the namespace's progress is not recorded: {e}"),
            }
        }
    }
}

async fn durable_changes(kv: &SharedKv) -> Result<u64> {
    let newest = kv.read(&mut |_| Ok(()))?;
    kv.wait_durable(newest).await?;
    Ok(newest.0)
}
