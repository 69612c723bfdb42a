//! The coordinator's own probe of a target that a client or member could not use.
//!
//! A process that gives signs of life is asked over the connection of its membership, where its work delays
//! no answer. One of an older release is asked at its data port.
use crate::addresses::addrs_in_order;
use crate::decide::Speed;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use weir_env::Env;
use weir_proto::coord::TargetReport;
use weir_proto::data::StatTarget;
use weir_proto::life::AskLife;
use weir_proto::map::{ClusterMap, Node};
use weir_proto::{Error, Result, TargetId};
use weir_rpc::{Channel, Connection, Identity, NoService, Payload};

/// Where a target is asked.
#[derive(Clone)]
pub enum ProbeBy {
    /// The connection on which its process gives signs of life.
    Life(Connection),
    /// The data port of its node.
    Data(Option<Node>),
}

/// A target's answer.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub target: TargetId,
    pub failed: bool,
    pub speed: Speed,
}

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
    by: ProbeBy,
    target: TargetId,
    patience: Duration,
) -> Result<Seen> {
    let mut attempts = 1;
    loop {
        let begun = env.clock.now();
        let outcome = match &by {
            ProbeBy::Life(connection) => ask_life(connection, target, patience).await,
            ProbeBy::Data(None) => Err(Error::not_found(format!("no node serves {target}"))),
            ProbeBy::Data(Some(node)) => {
                stat_target(&env, &who, node, target, patience).await.map(|report| Seen {
                    target,
                    failed: report.failed,
                    speed: Speed {
                        stalled: Duration::from_millis(report.stalled_ms.into()),
                        ..Speed::default()
                    },
                })
            }
        };
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
    targets: Vec<(TargetId, ProbeBy)>,
    patience: Duration,
) -> mpsc::Receiver<Seen> {
    let (reported, reports) = mpsc::channel(targets.len().max(1)); // one message for each
    for (target, by) in targets {
        let (own_env, who, reported) = (env.clone(), who.clone(), reported.clone());
        env.tasks.spawn("probe one of several targets", async move {
            if let Ok(seen) = probe(own_env, who, by, target, patience).await {
                let _ = reported.send(seen).await; // the caller may have given up
            }
        });
    }
    reports
}

/// Asks several targets for their reports in parallel, at their data ports: their present positions are
/// needed.
pub fn report_each(
    env: &Env,
    who: &Identity,
    map: &ClusterMap,
    targets: impl Iterator<Item = TargetId>,
    patience: Duration,
) -> mpsc::Receiver<TargetReport> {
    let (reported, reports) = mpsc::channel(map.targets.len().max(1)); // one message for each
    for target in targets {
        let Some(node) = map.target_node(target).cloned() else { continue };
        let (own_env, who, reported) = (env.clone(), who.clone(), reported.clone());
        env.tasks.spawn("ask a target for its report", async move {
            if let Ok(report) = stat_target(&own_env, &who, &node, target, patience).await {
                let _ = reported.send(report).await; // the caller may have given up
            }
        });
    }
    reports
}

async fn ask_life(connection: &Connection, target: TargetId, patience: Duration) -> Result<Seen> {
    let (life, _) = connection.call(&AskLife {}, Vec::new(), patience).await?;
    // A process that is starting lives, and has no report of its targets yet.
    let of = life.targets.iter().find(|of| of.target == target).copied().unwrap_or_default();
    Ok(Seen { target, failed: of.failed, speed: Speed::of(&of, life.pressure.as_ref()) })
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
