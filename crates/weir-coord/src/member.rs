//! A node's membership as the node sees it: join, heartbeats, join again.
//!
//! One task per membership, so a node has one place in the cluster at a time.
use crate::addresses::announced;
use crate::cluster::{Shared, is_temporary};
use crate::identity::older_map;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use weir_env::{Addr, Instant, TaskHandle};
use weir_proto::coord::{AnnouncedTarget, Heartbeat, Join, Joined, TargetReport};
use weir_proto::{Error, ErrorKind, Result};
use weir_rpc::Connection;

/// A node of the same name may be one that was killed a moment ago: the coordinator knows its end at the
/// latest when the tolerated silence is over.
const NAME_PATIENCE: Duration = Duration::from_secs(15);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// After this time without an answer another coordinator may lead. Shorter than the lease of a leading one,
/// so that its successor finds the members at once.
const SILENCE: Duration = Duration::from_secs(2);
const JOIN_PATIENCE: Duration = Duration::from_secs(10);

/// A node's announcement when it joins.
#[derive(Clone, Debug, Default)]
pub struct Membership {
    /// Where it serves. For an unspecified address it announces the one from which this host reaches the
    /// coordinator.
    pub addrs: Vec<Addr>,
    /// Targets of a storage role.
    pub targets: Vec<AnnouncedTarget>,
}

/// Reports the state of the node's targets with each heartbeat. Fast, never blocking.
pub type Reports = Arc<dyn Fn() -> Vec<TargetReport> + Send + Sync>;

/// Reports of a node without targets.
pub fn no_reports() -> Reports {
    Arc::new(Vec::new)
}

pub(crate) fn start(
    shared: Arc<Shared>,
    membership: Membership,
    reports: Reports,
) -> (TaskHandle, oneshot::Receiver<Result<Joined>>) {
    let (first, joined) = oneshot::channel();
    let env = shared.env.clone();
    let member = Member { shared, membership, reports };
    (env.tasks.spawn("membership", member.run(first)), joined)
}

struct Member {
    shared: Arc<Shared>,
    membership: Membership,
    reports: Reports,
}

impl Member {
    async fn run(self, first: oneshot::Sender<Result<Joined>>) {
        let mut first = Some(first);
        let give_up = self.shared.env.clock.now() + NAME_PATIENCE;
        let mut pause = RETRY_PAUSE;
        loop {
            match self.join().await {
                Ok((connection, joined)) => {
                    pause = RETRY_PAUSE;
                    let interval = Duration::from_millis(u64::from(joined.heartbeat_ms.max(1)));
                    if let Some(first) = first.take() {
                        let _ = first.send(Ok(joined)); // the caller may have given up
                    }
                    let end = self.stay(&connection, interval).await;
                    tracing::warn!("the membership ended, joining again: {end}");
                }
                Err(e) if first.is_some() && !self.worth_another_try(&e, give_up) => {
                    if let Some(first) = first.take() {
                        let _ = first.send(Err(e)); // the caller may have given up
                    }
                    return;
                }
                Err(e) => {
                    if first.is_none() && !is_temporary(&e) {
                        tracing::error!("the coordinator does not take this node back: {e}");
                    }
                    self.shared.env.clock.sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
        }
    }

    fn worth_another_try(&self, e: &Error, give_up: Instant) -> bool {
        (is_temporary(e) || e.kind == ErrorKind::Exists) && self.shared.env.clock.now() < give_up
    }

    async fn join(&self) -> Result<(Connection, Joined)> {
        let who = &self.shared.who;
        let connection = self.shared.coordinator.connection(JOIN_PATIENCE).await?;
        let here = connection.local_ip();
        let own = self.shared.env.net.own_ips();
        let mut addrs: Vec<String> = Vec::new();
        for addr in &self.membership.addrs {
            addrs.extend(announced(addr, here, &own)?.iter().map(Addr::to_string));
        }
        let request = Join {
            cluster: Some(self.shared.map.borrow().cluster),
            name: who.name.clone(),
            instance: self.shared.identity.instance,
            role: who.role,
            host: who.host.clone(),
            addrs,
            targets: self.membership.targets.clone(),
            program: self.shared.identity.program(),
        };
        let seen = self.shared.map.borrow().version;
        let (mut joined, payload) = connection.call(&request, Vec::new(), JOIN_PATIENCE).await?;
        let carried = self.shared.learn_from(&mut joined, &payload).await?;
        if let Some(carried) = carried.filter(|carried| *carried < seen) {
            connection.close("this coordinator knows an older cluster map");
            return Err(older_map(carried, seen));
        }
        *self.shared.node.lock().unwrap_or_else(PoisonError::into_inner) = Some(joined.node);
        Ok((connection, joined))
    }

    /// Sends heartbeats until the membership ends; returns why it did.
    async fn stay(&self, connection: &Connection, interval: Duration) -> Error {
        // Node ids do not change: the one of the last join is this node's.
        let node = self.shared.node.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_default();
        let clock = &self.shared.env.clock;
        let mut answered = clock.now();
        loop {
            let next = clock.now() + interval;
            let heartbeat = Heartbeat { node, targets: (self.reports)() };
            // The next heartbeat does not wait for a late answer: the coordinator receives it anyway, and
            // only silence counts.
            match connection.call(&heartbeat, Vec::new(), interval).await {
                Ok(_) => answered = clock.now(),
                Err(e) if e.kind != ErrorKind::Deadline => return e,
                Err(_) if clock.now().since(answered) >= SILENCE => self.shared.find_another(),
                Err(_) => {}
            }
            tokio::select! {
                biased;
                reason = connection.closed() => return reason,
                () = clock.sleep_until(next) => {}
            }
        }
    }
}
