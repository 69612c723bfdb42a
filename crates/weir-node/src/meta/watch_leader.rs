//! Reports a leader that sends this copy nothing: the coordinator may not have noticed yet, or may have begun
//! to lead after the leader had died.
use super::journal_group_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use weir_coord::Cluster;
use weir_coord::identity::NamespaceIdentity;
use weir_env::Env;
use weir_meta::copies::Follower;
use weir_meta::copies::decide::{SILENCE_TICK, Silence};

/// As long as this node runs.
pub async fn watch_leader(env: Env, cluster: Cluster, own: NamespaceIdentity, follower: Follower) {
    let (mut silence, reporting) = (Silence::default(), Arc::new(AtomicBool::new(false)));
    loop {
        env.clock.sleep(SILENCE_TICK).await;
        let Some(silent) = silence.tick(env.clock.now(), follower.followed()) else { continue };
        let Some((namespace, group)) = journal_group_of(&cluster.map(), &own) else { continue };
        let (epoch, _) = follower.followed();
        let Some(leader) = group.leader.filter(|leader| Some(*leader) != cluster.node()) else { continue };
        // The last report may still wait for a coordinator.
        if group.epoch != epoch || reporting.swap(true, Relaxed) {
            continue;
        }
        let (cluster, reporting) = (cluster.clone(), reporting.clone());
        env.tasks.spawn("report a silent leader", async move {
            if let Err(e) = cluster.leader_silent(namespace, leader, epoch, silent).await {
                tracing::debug!("the silence of the leader {leader} is not reported: {e}");
            }
            reporting.store(false, Relaxed);
        });
    }
}
