//! The coordinator's own look at a target that somebody could not use.
use crate::addresses::addrs_in_order;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use weir_env::Env;
use weir_proto::coord::TargetReport;
use weir_proto::data::StatTarget;
use weir_proto::map::{ClusterMap, Node};
use weir_proto::{Error, Result, TargetId};
use weir_rpc::{Channel, Identity, NoService, Payload};

/// A target answers this in microseconds; a busy disk or a busy machine makes it hundreds of milliseconds.
/// Writers wait for the verdict, so not longer.
pub const PROBE_PATIENCE: Duration = Duration::from_millis(1000);
/// For a target that is silent just now: its groups can do without it, so a wrong verdict costs little, and
/// somebody waits for it.
pub const QUICK_PROBE_PATIENCE: Duration = Duration::from_millis(450);

/// For the last question of a coordinator that is asked to end: a target that stands still keeps it for no
/// longer.
pub const LAST_PROBE_PATIENCE: Duration = Duration::from_millis(300);

/// Looks in a row that end so late that this node itself was.
const LATE_PROBES_MAX: usize = 3;

/// Asks the target how it is, over a connection of its own. An answer that this node was too busy to take in
/// time is asked for again.
pub async fn probe(
    env: Env,
    who: Identity,
    node: Option<Node>,
    target: TargetId,
    patience: Duration,
) -> Result<TargetReport> {
    let node = node.ok_or_else(|| Error::not_found(format!("no node serves {target}")))?;
    let mut looks = 1;
    loop {
        let begun = env.clock.now();
        let outcome = look(&env, &who, &node, target, patience).await;
        let was_late = env.clock.now().since(begun) > patience + patience / 2;
        if outcome.is_ok() || !was_late || looks == LATE_PROBES_MAX {
            return outcome;
        }
        looks += 1;
    }
}

/// Asks several targets at once. Answers come in any order; the channel ends when all have had their time.
pub fn probe_each(
    env: &Env,
    who: &Identity,
    map: &ClusterMap,
    targets: impl Iterator<Item = TargetId>,
    patience: Duration,
) -> mpsc::Receiver<TargetReport> {
    let (reported, reports) = mpsc::channel(map.targets.len().max(1)); // one message for each
    for target in targets {
        let (own_env, node) = (env.clone(), map.target_node(target).cloned());
        let (who, reported) = (who.clone(), reported.clone());
        env.tasks.spawn("probe one of several targets", async move {
            if let Ok(report) = probe(own_env, who, node, target, patience).await {
                let _ = reported.send(report).await; // the caller may have stopped waiting
            }
        });
    }
    reports
}

async fn look(
    env: &Env,
    who: &Identity,
    node: &Node,
    target: TargetId,
    patience: Duration,
) -> Result<TargetReport> {
    // The coordinator does not know hosts: it tries what there is.
    let addrs = addrs_in_order(&node.addrs, true);
    let channel = Channel::new(env, addrs, who.clone(), Arc::new(NoService));
    // One round of dials: a door that is closed is an answer.
    let stat = channel.call_now(&StatTarget { target }, Payload::default(), patience).await?.reply;
    Ok(stat.report)
}
