//! The coordinator's own look at a target that somebody could not use.
use crate::addresses::addrs_in_order;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Env;
use weir_proto::coord::TargetReport;
use weir_proto::data::StatTarget;
use weir_proto::map::{Node, Role};
use weir_proto::{ClusterId, Error, Result, TargetId};
use weir_rpc::{Channel, Identity, NoService, Payload};

/// A target answers this in microseconds; a busy disk or a busy machine makes it hundreds of milliseconds. Writers wait
/// for the verdict, so not longer.
pub const PROBE_PATIENCE: Duration = Duration::from_millis(1000);
/// For a target that is silent just now: its groups can do without it, so a wrong verdict costs little, and somebody
/// waits for it.
pub const QUICK_PROBE_PATIENCE: Duration = Duration::from_millis(450);

/// Asks the target how it is, over a connection of its own.
pub async fn probe(
    env: Env,
    cluster: ClusterId,
    node: Option<Node>,
    target: TargetId,
    patience: Duration,
) -> Result<TargetReport> {
    let node = node.ok_or_else(|| Error::not_found(format!("no node serves {target}")))?;
    // The coordinator does not know hosts: it tries what there is.
    let addrs = addrs_in_order(&node.addrs, true);
    let identity = Identity::new(&env, "coordinator", Role::Coordinator, Some(cluster));
    let channel = Channel::new(&env, addrs, identity, Arc::new(NoService));
    // One round of dials: a door that is closed is an answer.
    let stat = channel.call_now(&StatTarget { target }, Payload::default(), patience).await?.reply;
    Ok(stat.report)
}
