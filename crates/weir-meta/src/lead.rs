//! The lead of a namespace, as the coordinator gives it to one directory.
//!
//! Invariant: the coordinator never knows of a change that is not durable here, and it knows of one before
//! the first client is served. So a directory that holds fewer changes than the coordinator knows is never
//! this one. Knows nothing of what the changes are.
use std::time::Duration;
use weir_coord::Cluster;
use weir_coord::identity::NamespaceIdentity;
use weir_env::Env;
use weir_kv::SharedKv;
use weir_proto::coord::LeadReply;
use weir_proto::{Error, ErrorKind, NamespaceId, Result};

/// How often the coordinator is told how far the directory is, while it changes: an old copy that lacks no
/// more than what was changed within this time before the end is not recognized. One small write of the
/// coordinator's disk each.
const RECORD_INTERVAL: Duration = Duration::from_secs(1);

pub struct Lead {
    cluster: Cluster,
    kv: SharedKv,
    namespace: NamespaceId,
}

impl Lead {
    /// Takes the lead of a namespace with the store that is in its directory. Tell the coordinator how far
    /// that is with [`Lead::record`] before anybody is served, and from then on with
    /// [`Lead::keep_recording`].
    pub async fn take(
        cluster: &Cluster,
        kv: &SharedKv,
        identity: &NamespaceIdentity,
    ) -> Result<(Lead, LeadReply)> {
        let reply = cluster.lead_namespace(identity, durable_changes(kv).await?).await?;
        Ok((Lead::given(cluster, kv, reply.namespace), reply))
    }

    /// The lead that the coordinator has given to this node's copy.
    pub fn given(cluster: &Cluster, kv: &SharedKv, namespace: NamespaceId) -> Lead {
        Lead { cluster: cluster.clone(), kv: kv.clone(), namespace }
    }

    pub fn kv(&self) -> &SharedKv {
        &self.kv
    }

    /// Tells the coordinator how many changes the directory holds by now.
    pub async fn record(&self) -> Result<()> {
        self.cluster.record_progress(self.namespace, durable_changes(&self.kv).await?).await
    }

    /// Tells it again and again, until the lead is lost or the store fails.
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
                // The coordinator is away; who follows its map says so.
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
