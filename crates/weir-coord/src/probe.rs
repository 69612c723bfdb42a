//! The coordinator's own probe of a target that a client or member could not use.
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

/// A target answers this in microseconds; with a busy disk or machine it takes hundreds of milliseconds.
/// Writers wait for the verdict, so not longer.
pub const PROBE_PATIENCE: Duration = Duration::from_millis(1000);
/// For a target that is only silent now: its groups can do without it, so a wrong verdict costs little, and a
/// writer waits for it.
pub const QUICK_PROBE_PATIENCE: Duration = Duration::from_millis(450);

/// For the last request of a coordinator that is asked to end: a target that hangs delays it by no more than
/// this.
pub const LAST_PROBE_PATIENCE: Duration = Duration::from_millis(300);

/// Attempts of one probe if this node itself was late in each.
const LATE_PROBES_MAX: usize = 3;

/// Asks the target for its state, over a separate connection. If this node was too busy to receive the answer
/// in time, it asks again.
pub async fn probe(
    env: Env,
    who: Identity,
    node: Option<Node>,
    target: TargetId,
    patience: Duration,
) -> Result<TargetReport> {
    let node = node.ok_or_else(|| Error::not_found(format!("no node serves {target}")))?;
    let mut attempts = 1;
    loop {
        let begun = env.clock.now();
        let outcome = stat_target(&env, &who, &node, target, patience).await;
        let was_late = env.clock.now().since(begun) > patience + patience / 2;
        if outcome.is_ok() || !was_late || attempts == LATE_PROBES_MAX {
            return outcome;
        }
        attempts += 1;
    }
}

/// Probes several targets in parallel. Answers come in any order; the channel ends when all deadlines are
/// over.
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
                let _ = reported.send(report).await; // the caller may have given up
            }
        });
    }
    reports
}

async fn stat_target(
    env: &Env,
    who: &Identity,
    node: &Node,
    target: TargetId,
    patience: Duration,
) -> Result<TargetReport> {
    // The coordinator does not know hosts: it tries all addresses.
    let addrs = addrs_in_order(&node.addrs, true);
    let channel = Channel::new(env, addrs, who.clone(), Arc::new(NoService));
    // One round of dials: a refused connection is an answer.
    let stat = channel.call_now(&StatTarget { target }, Payload::default(), patience).await?.reply;
    Ok(stat.report)
}
