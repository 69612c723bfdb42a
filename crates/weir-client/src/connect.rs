//! The beginning of a client: it finds the cluster and the leader, and makes its rooms.
use crate::base::Base;
use crate::callbacks::Callbacks;
use crate::data::Data;
use crate::leader::{Holder, Identity, Leader};
use crate::maps::MapsSeen;
use crate::parts::Parts;
use crate::status::Counters;
use crate::types::{ClientConfig, KernelCache};
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_coord::{Cluster, Observer};
use weir_env::Env;
use weir_proto::Result;
use weir_proto::version::LEVEL_OF_EARLY_ANSWERS;

/// Pause between tries to find the namespace's leader.
const LEADER_PAUSE: Duration = Duration::from_millis(50);
/// How long a starting client waits for the cluster: the user who mounts is present to see the failure.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);

/// Finds the cluster and opens a session at the namespace's metadata leader.
pub async fn connect(env: Env, config: ClientConfig, kernel: Arc<dyn KernelCache>) -> Result<Arc<Parts>> {
    let who = Observer {
        coordinators: config.coordinators.clone(),
        cluster: None,
        name: config.name.clone(),
        role: config.role,
        host: config.host.clone(),
        trust: config.trust.clone(),
    };
    let patience = config.patience.min(CONNECT_PATIENCE);
    let deadline = env.clock.now() + patience;
    let cluster = Cluster::observe(&env, who, patience).await?;
    let callbacks = Arc::new(Callbacks::default());
    let (channel, namespace) = loop {
        let found = cluster.meta_leader(&config.namespace, callbacks.clone());
        let map = cluster.map();
        let namespace = map.namespaces.iter().find(|v| v.name == config.namespace).map(|v| v.id);
        match (found, namespace) {
            (Ok(channel), Some(namespace)) => break (channel, namespace),
            (Err(e), _) if env.clock.now() >= deadline => return Err(e.doing("connect")),
            _ => env.clock.sleep(LEADER_PAUSE).await,
        }
    };
    let maps = Arc::new(MapsSeen::default());
    let (is_wanted, known) = (config.early_answers, cluster.clone());
    let identity = Identity {
        namespace,
        client: config.title(),
        process: config.process.clone(),
        takes_early: Arc::new(move || is_wanted && known.map().level >= LEVEL_OF_EARLY_ANSWERS),
    };
    let counters: Arc<Counters> = Arc::default();
    let leader = Leader::new(env.clone(), channel, identity, config.patience, maps.clone(), counters.clone());
    let data = Data::new(env.clone(), cluster, namespace, counters, maps.clone());
    let parts = Arc::new(Parts::new(Base::new(env, config, kernel, maps, leader, data)));
    callbacks.set(Arc::downgrade(&parts));
    let holder: Weak<dyn Holder> = Arc::downgrade(&(parts.clone() as Arc<dyn Holder>));
    parts.base.leader.set_holder(holder);
    parts.base.leader.check(deadline).await?;
    Ok(parts)
}
