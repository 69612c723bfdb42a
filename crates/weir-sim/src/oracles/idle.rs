//! The cluster is idle soon after the load ends: its servers serve nothing but life signs and what they do by
//! the clock.

use super::served::{Served, asked_between};
use std::time::Duration;
use weir_env::sim::World;

/// Time after the last operation of an application, and after the last fault.
const IDLE_AFTER: Duration = Duration::from_secs(10);
/// Nothing is served for this time.
const QUIET: Duration = Duration::from_secs(2);

/// Waits until the cluster is idle; the error lists what it still serves.
pub async fn wait(world: &World, nodes: &[String]) -> Result<(), String> {
    let (mut served, begun) = (Served::default(), world.now());
    let mut before = served.count(world, nodes);
    loop {
        world.sleep(QUIET).await;
        let after = served.count(world, nodes);
        let asked = asked_between(&before, &after);
        if asked.is_empty() {
            return Ok(());
        }
        if world.now().since(begun) >= IDLE_AFTER {
            return Err(format!(
                "{IDLE_AFTER:?} after the end of all load the servers still serve {asked:?}"
            ));
        }
        before = after;
    }
}
