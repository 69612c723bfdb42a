//! The coordinator, serving: with a state of its own, or as the leading one of several that share a store.
use crate::audit::Audit;
use crate::audited::Audited;
use crate::site::{Failed, Site};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::identity::{check_coordinator, write_coordinator};
use weir_coord::standbys::attend;
use weir_coord::store::Store;
use weir_coord::{CoordConfig, Coordinator, CoordinatorLead, lead};
use weir_env::{Addr, BoxFuture, Env};
use weir_proto::Error;
use weir_proto::condition::{Condition, NodeTrouble};
use weir_proto::map::Role;
use weir_rpc::{Identity, Server, Trust};

pub struct CoordNode {
    env: Env,
    coordinator: Arc<Coordinator>,
    audit: Audit,
    /// For coordinators that share a store.
    lead: Option<CoordinatorLead>,
    pub server: Server,
}

/// Starts the coordinator whose state is in `dir`. It follows no other: other nodes follow it.
pub fn start_coord<'a>(
    env: &'a Env,
    site: &'a Site,
    dir: &'a Path,
    config: CoordConfig,
) -> BoxFuture<'a, Result<CoordNode, Failed>> {
    Box::pin(start_coord_unboxed(env, site, dir, config))
}

async fn start_coord_unboxed(
    env: &Env,
    site: &Site,
    dir: &Path,
    config: CoordConfig,
) -> Result<CoordNode, Failed> {
    let coordinator = Coordinator::open(env.clone(), dir, config).await?;
    serve(env, site, dir, coordinator, None).await
}

/// Waits until this coordinator leads those that share the store, then starts it; `dir` holds its audit log.
/// It does not listen while it waits. `waits`: called with the leader's name whenever another one leads.
pub async fn start_shared_coord(
    env: &Env,
    site: &Site,
    dir: &Path,
    store: Arc<dyn Store>,
    mut config: CoordConfig,
    waits: impl Fn(&str),
) -> Result<CoordNode, Failed> {
    let mut known = check_coordinator(&*env.disk, dir, config.new)?;
    if let (Some(known), Some(named)) = (known, config.cluster)
        && known != named
    {
        return Err(Failed::from(
            Error::denied(format!(
                "{} is the coordinator's directory of cluster {known}, not {named}",
                dir.display()
            ))
            .hint("correct the path or the cluster id"),
        ));
    }
    // One that has only waited also belongs to the cluster: it is started without --new the next time.
    let found = |name: &str| {
        let written = match (known, config.cluster) {
            (None, Some(cluster)) => write_coordinator(&*env.disk, dir, cluster),
            _ => Ok(()),
        };
        if let Err(e) = written {
            tracing::warn!("{e}");
        }
        waits(name);
    };
    let lead = tokio::select! {
        biased;
        lead = lead(env, store.clone(), &config.name, found) => lead?,
        never = attend(env, &store, &config.name) => match never {},
    };
    known = known.or(check_coordinator(&*env.disk, dir, false).ok().flatten());
    config.term = Some(lead.term());
    let opened = Coordinator::open_shared(env.clone(), dir, known, store, config).await;
    let served = match opened {
        Ok(coordinator) => serve(env, site, dir, coordinator, None).await,
        Err(e) => Err(e.into()),
    };
    match served {
        Ok(node) => Ok(CoordNode { lead: Some(lead), ..node }),
        Err(failed) => {
            lead.resign().await;
            Err(failed)
        }
    }
}

async fn serve(
    env: &Env,
    site: &Site,
    dir: &Path,
    coordinator: Arc<Coordinator>,
    lead: Option<CoordinatorLead>,
) -> Result<CoordNode, Failed> {
    let audit = Audit::start(env, dir);
    let audited = Arc::new(Audited { service: coordinator.clone(), audit: audit.clone() });
    let who = &site.observer;
    let identity = Identity::new(env, who.name.as_str(), who.role, Some(coordinator.cluster()));
    let identity = identity.trusting(coordinator.trust());
    let server = site.serve(env, identity, audited).await?;
    // The others are known only by configuration. (The path of a local socket is useless on other hosts.)
    let named = who.coordinators.iter().filter(|addr| !matches!(addr, Addr::Unix(_)));
    let others = named.filter(|addr| !server.addrs().contains(addr)).cloned();
    coordinator.announce(&server.addrs().iter().cloned().chain(others).collect::<Vec<_>>());
    Ok(CoordNode { env: env.clone(), coordinator, audit, lead, server })
}

impl CoordNode {
    /// Ends in an orderly way.
    pub fn end(self, patience: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.end_unboxed(patience))
    }
    async fn end_unboxed(self, patience: Duration) {
        let recording = self.coordinator.record_positions();
        if self.env.clock.timeout(patience, recording).await.is_err() {
            tracing::info!("ended without the positions of all targets");
        }
        // The next coordinator leads while this one completes its audit log.
        self.server.stop();
        if let Some(lead) = &self.lead {
            lead.resign().await;
        }
        self.audit.settle(patience).await;
    }

    /// This coordinator's condition, for `weir status`.
    pub fn report(&self, name: &str, condition: Condition) {
        self.coordinator.conditions.note(name, Role::Coordinator, condition, self.env.clock.now());
    }

    /// Notes the troubles that this process finds, in the log of events.
    pub fn note_troubles(&self, troubles: Vec<NodeTrouble>) -> BoxFuture<'_, weir_proto::Result<()>> {
        self.coordinator.log.note(troubles)
    }

    /// This coordinator's certificate and trust for networks; absent in a cluster without certificates.
    pub fn trust(&self) -> Option<Arc<Trust>> {
        self.coordinator.trust()
    }

    /// Waits until another coordinator leads, or may lead; then this one answers no more requests, and must
    /// end.
    pub fn lost(&self) -> BoxFuture<'_, Error> {
        Box::pin(self.lost_unboxed())
    }
    async fn lost_unboxed(&self) -> Error {
        let over = async {
            match &self.lead {
                Some(lead) => lead.term().over().await,
                None => std::future::pending().await,
            }
        };
        let lost = tokio::select! {
            biased;
            lost = self.coordinator.lost() => lost,
            over = over => over,
        };
        self.server.stop();
        lost
    }
}
