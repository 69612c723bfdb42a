//! A node's membership as the node sees it: join, heartbeats, join again.
//!
//! One task per membership, so a node has one place in the cluster at a time.
use crate::addresses::announced;
use crate::cluster::{FIND_PATIENCE, Shared, is_temporary};
use crate::identity::older_map;
use crate::life::{Alive, Answers, LastReports, TargetLives};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use weir_env::{Addr, Env, Instant, TaskHandle, watch};
use weir_proto::coord::{AnnouncedTarget, Heartbeat, Join, Joined, TargetReport};
use weir_proto::life::ReportLife;
use weir_proto::{Error, ErrorKind, NodeId, Result};
use weir_rpc::{Channel, Connection};

/// A node of the same name may be one that was killed a moment ago: the coordinator knows its end at the
/// latest when the tolerated silence is over.
const NAME_PATIENCE: Duration = Duration::from_secs(15);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// After this time without an answer another coordinator may lead. Shorter than the lease of a leading one,
/// so that its successor finds the members at once.
const SILENCE: Duration = Duration::from_secs(2);
const JOIN_PATIENCE: Duration = Duration::from_secs(10);
/// Before the coordinator has named the interval.
const HEARTBEAT_AT_FIRST: Duration = Duration::from_millis(500);

/// A node's announcement when it joins.
#[derive(Clone, Debug, Default)]
pub struct Membership {
    /// Where it serves. For an unspecified address it announces the one from which this host reaches the
    /// coordinator.
    pub addrs: Vec<Addr>,
    /// Targets of a storage role.
    pub targets: Vec<AnnouncedTarget>,
}

/// Reports the state of the node's targets, made by its work. Fast, never blocking.
pub type Reports = Arc<dyn Fn() -> Vec<TargetReport> + Send + Sync>;

/// Reports of a node without targets.
pub fn no_reports() -> Reports {
    Arc::new(Vec::new)
}

/// Starts the membership. Join, heartbeats and signs of life have a connection and a thread of their own, so
/// none of them waits for the node's work; only the reports are made by that.
pub(crate) fn start(
    shared: Arc<Shared>,
    membership: Membership,
    reports: Reports,
    lives: TargetLives,
) -> (Vec<TaskHandle>, oneshot::Receiver<Result<Joined>>) {
    let (first, joined) = oneshot::channel();
    let (env, alone) = (shared.env.clone(), shared.env.alone("life"));
    let last_reports = Arc::new(LastReports::new(env.clock.now()));
    let alive = Arc::new(Alive::new(&alone, lives, last_reports.clone()));
    let coordinator = shared.membership_on(&alone, Arc::new(Answers(Arc::downgrade(&alive))));
    let heartbeat = watch::Sender::new(HEARTBEAT_AT_FIRST);
    let renewing = renew(env.clone(), last_reports, reports, heartbeat.subscribe());
    let member = Member { shared, env: alone.clone(), coordinator, alive, membership, heartbeat };
    let renewing = env.tasks.spawn("renew the reports of targets", renewing);
    (vec![renewing, alone.tasks.spawn("membership", member.run(first))], joined)
}

/// Leaves the reports where the heartbeats find them, twice for each heartbeat.
async fn renew(env: Env, left: Arc<LastReports>, reports: Reports, mut heartbeat: watch::Receiver<Duration>) {
    loop {
        left.renew(reports(), env.clock.now());
        let pause = *heartbeat.borrow() / 2;
        tokio::select! {
            biased;
            changed = heartbeat.changed() => if changed.is_err() { return },
            () = env.clock.sleep(pause) => {}
        }
    }
}

struct Member {
    shared: Arc<Shared>,
    /// Of its own thread.
    env: Env,
    /// A connection of its own.
    coordinator: Channel,
    alive: Arc<Alive>,
    membership: Membership,
    heartbeat: watch::Sender<Duration>,
}

impl Member {
    async fn run(self, first: oneshot::Sender<Result<Joined>>) {
        let mut first = Some(first);
        let give_up = self.env.clock.now() + NAME_PATIENCE;
        let mut pause = RETRY_PAUSE;
        loop {
            match self.join().await {
                Ok((connection, joined)) => {
                    pause = RETRY_PAUSE;
                    let interval = Duration::from_millis(u64::from(joined.heartbeat_ms.max(1)));
                    if let Some(first) = first.take() {
                        let _ = first.send(Ok(joined)); // the caller may have given up
                    }
                    self.heartbeat.send_replace(interval);
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
                        tracing::error!("the coordinator does not admit this node again: {e}");
                    }
                    self.env.clock.sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
        }
    }

    fn worth_another_try(&self, e: &Error, give_up: Instant) -> bool {
        (is_temporary(e) || e.kind == ErrorKind::Exists) && self.env.clock.now() < give_up
    }

    async fn join(&self) -> Result<(Connection, Joined)> {
        let who = &self.shared.who;
        let connection = self.coordinator.connection(JOIN_PATIENCE).await?;
        let here = connection.local_ip();
        let own = self.env.net.own_ips();
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

    /// Sends heartbeats and signs of life until the membership ends; returns why it did.
    async fn stay(&self, connection: &Connection, interval: Duration) -> Error {
        // Node ids do not change: the one of the last join is this node's.
        let node = self.shared.node.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_default();
        let clock = &self.env.clock;
        let mut answered = clock.now();
        let mut says_life = true;
        loop {
            let next = clock.now() + interval;
            let targets = self.alive.beat(interval).to_vec();
            let heartbeat = Heartbeat { node, targets };
            // The next heartbeat does not wait for a late answer: the coordinator receives it anyway, and
            // only silence counts.
            let (beat, lives) = tokio::join!(connection.call(&heartbeat, Vec::new(), interval), async {
                match says_life {
                    true => self.say_life(connection, node, interval).await,
                    false => Ok(false),
                }
            });
            says_life &= !lives.as_ref().is_err_and(|e| e.kind == ErrorKind::Unsupported);
            if beat.is_ok() || matches!(lives, Ok(true)) {
                answered = clock.now();
            }
            match beat {
                Ok(_) => {}
                Err(e) if e.kind != ErrorKind::Deadline => return e,
                Err(_) if clock.now().since(answered) >= SILENCE => self.find_another(),
                Err(_) => {}
            }
            tokio::select! {
                biased;
                reason = connection.closed() => return reason,
                () = clock.sleep_until(next) => {}
            }
        }
    }

    /// True: the coordinator has it. `Unsupported`: its release knows heartbeats only.
    async fn say_life(&self, connection: &Connection, node: NodeId, patience: Duration) -> Result<bool> {
        let report = ReportLife { node, life: self.alive.life() };
        connection.call(&report, Vec::new(), patience).await.map(|_| true)
    }

    fn find_another(&self) {
        self.shared.find_another();
        let channel = self.coordinator.clone();
        self.env.tasks.spawn("find another coordinator for the membership", async move {
            channel.find_another(FIND_PATIENCE).await;
        });
    }
}
