//! The history of a cluster's troubles, noted by the process of its leading coordinator, with or without a
//! console: it asks all servers as `weir status` does, and reports the troubles to the log of events.
//!
//! Invariants: the pauses are a multiple of the time that the questions take; no file system that may hang is
//! asked.
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_admin::certificate::Caller;
use weir_admin::collect::Asker;
use weir_admin::failure::Outcome;
use weir_admin::local::local_cluster::{LocalCluster, RoleName};
use weir_diagnose::troubles::{Trouble, troubles};
use weir_env::{Addr, Env};
use weir_node::CoordNode;
use weir_proto::map::Role;

/// A trouble that lasts less may be missed.
const EVERY: Duration = Duration::from_secs(5);
/// A coordinator that has just begun to lead does not know yet which nodes are up.
const FIRST_AFTER: Duration = Duration::from_secs(10);
/// In a large cluster, at most this part of the time is spent with questions: one tenth.
const PAUSES: u32 = 9;

/// Runs until it is dropped. `dir`: the coordinator's; in the directory of a cluster on one machine, the
/// processes there are checked, too.
pub async fn note(env: &Env, coord: &CoordNode, dir: &Path) {
    let (mut asker, mut logged) = (None, String::new());
    env.clock.sleep(FIRST_AFTER).await;
    loop {
        let begun = env.clock.now();
        match round(env, coord, dir, &mut asker).await {
            Ok(()) => logged.clear(),
            Err(failure) => {
                let why = failure.error.to_string();
                if why != logged {
                    tracing::warn!("events are not noted, which is tried again: {why}");
                }
                logged = why;
            }
        }
        let took = env.clock.now().since(begun);
        env.clock.sleep(EVERY.max(took * PAUSES)).await;
    }
}

async fn round(env: &Env, coord: &CoordNode, dir: &Path, asker: &mut Option<Arc<Asker>>) -> Outcome<()> {
    let asker = match asker {
        Some(asker) => asker,
        None => asker.insert(connect(env, coord).await?),
    };
    let facts = asker.facts(local(dir)).await?;
    let found = troubles(&facts).iter().map(Trouble::as_event).collect();
    Ok(coord.note_troubles(found).await?)
}

/// A handle on the cluster by this coordinator's own addresses: the others of a shared store only wait.
async fn connect(env: &Env, coord: &CoordNode) -> Outcome<Arc<Asker>> {
    let mut addrs = coord.server.addrs().to_vec();
    addrs.sort_by_key(|addr| !matches!(addr, Addr::Unix(_)));
    let caller = Caller { role: Role::Auditor, trust: coord.trust() };
    Asker::of_server(env.clone(), addrs, caller).await
}

/// The cluster of `weir up` that this coordinator is of.
fn local(dir: &Path) -> Option<LocalCluster> {
    let local = LocalCluster::open(dir.parent()?).ok()?;
    let is_there = local.of_role(RoleName::Coord).any(|process| process.path == dir);
    is_there.then_some(local)
}
