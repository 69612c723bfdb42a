//! The coordinator, serving.
use crate::audit::Audit;
use crate::audited::Audited;
use crate::site::{Failed, Site};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::{CoordConfig, Coordinator};
use weir_env::Env;
use weir_rpc::{Identity, Server};

pub struct CoordNode {
    env: Env,
    coordinator: Arc<Coordinator>,
    audit: Audit,
    pub server: Server,
}

/// Starts the coordinator whose state is in `dir`. Nobody is observed: it is the one that others observe.
pub async fn start_coord(
    env: &Env,
    site: &Site,
    dir: &Path,
    config: CoordConfig,
) -> Result<CoordNode, Failed> {
    let coordinator = Coordinator::open(env.clone(), dir, config).await?;
    let audit = Audit::start(env, dir);
    let audited = Arc::new(Audited { service: coordinator.clone(), audit: audit.clone() });
    let who = &site.observer;
    let identity = Identity::new(env, who.name.as_str(), who.role, Some(coordinator.cluster()));
    let identity = identity.trusting(coordinator.trust());
    let server = site.serve(env, identity, audited).await?;
    coordinator.announce(server.addrs());
    Ok(CoordNode { env: env.clone(), coordinator, audit, server })
}

impl CoordNode {
    /// Ends in good order.
    pub async fn end(self, patience: Duration) {
        let recording = self.coordinator.record_positions();
        if self.env.clock.timeout(patience, recording).await.is_err() {
            tracing::info!("ended without the positions of all targets");
        }
        self.audit.settle(patience).await;
        self.server.stop();
    }
}
