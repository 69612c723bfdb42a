//! A node's identity and addresses, and the step at which its start failed.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::identity::keep_newest_map;
use weir_coord::{Cluster, Observer};
use weir_env::{Addr, Env};
use weir_proto::{Error, Result};
use weir_rpc::{Identity, Server, Service};

/// Puts a service in front of a role's own.
pub type Front = Arc<dyn Fn(Arc<dyn Service>) -> Arc<dyn Service> + Send + Sync>;

/// A node's identity and addresses.
#[derive(Clone)]
pub struct Site {
    pub observer: Observer,
    pub listen: Vec<Addr>,
    /// Called when the node listens, before its addresses are announced.
    pub listens: Arc<dyn Fn() -> Result<()> + Send + Sync>,
    /// Tests answer some calls in place of the role. `None`: the role answers all.
    pub front: Option<Front>,
    /// How long a start waits for the coordinator.
    pub patience: Duration,
}

/// A step of a start whose failure an operator can fix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The node cannot listen on its addresses.
    Serve,
    /// The coordinator refuses the node.
    Join,
    Other,
}

/// Why a role did not start.
#[derive(Debug)]
pub struct Failed {
    pub step: Step,
    pub error: Error,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { step: Step::Other, error }
    }
}

impl Step {
    pub(crate) fn failed(self) -> impl FnOnce(Error) -> Failed {
        move |error| Failed { step: self, error }
    }
}

impl Site {
    pub(crate) async fn observe(&self, env: &Env) -> Result<Cluster> {
        Cluster::observe(env, self.observer.clone(), self.patience).await
    }

    /// Keeps this role's record of the newest map up to date: it reveals an older copy of the coordinator's
    /// directory. `of`: the namespace that it leads.
    pub(crate) fn record_map(&self, env: &Env, cluster: &Cluster, file: PathBuf, of: Option<String>) {
        let recording = keep_newest_map(env.clone(), cluster.subscribe(), file, of);
        env.tasks.spawn("record the newest cluster map", recording);
    }

    /// Serves the addresses of a storage or metadata node, which passes connections on to metadata servers.
    pub(crate) async fn serve_as_member(
        &self,
        env: &Env,
        cluster: &Cluster,
        service: Arc<dyn Service>,
    ) -> std::result::Result<Server, Failed> {
        let server = self.serve(env, cluster.identity(), service).await?;
        server.pass_on(cluster.destinations());
        Ok(server)
    }

    pub(crate) async fn serve(
        &self,
        env: &Env,
        identity: Identity,
        service: Arc<dyn Service>,
    ) -> std::result::Result<Server, Failed> {
        let service = self.front.as_ref().map_or_else(|| service.clone(), |front| front(service.clone()));
        let served = weir_rpc::serve(env, &self.listen, identity, service).await;
        let server = served.map_err(Step::Serve.failed())?;
        (self.listens)()?;
        Ok(server)
    }
}

/// An orderly end: the coordinator need not detect it. Without it the node is down a moment later.
pub(crate) async fn leave(env: &Env, cluster: &Cluster, patience: Duration) {
    match env.clock.timeout(patience, cluster.leave()).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => tracing::info!("left without the coordinator: {e}"),
        Err(_) => tracing::info!("left without the coordinator: it did not answer"),
    }
}
