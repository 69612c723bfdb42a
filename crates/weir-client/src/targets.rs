//! Calls to targets, and the news of the cluster that concern them: each call waits for its turn, is
//! abandoned as soon as its target goes down, and makes its target suspected when it is silent.
//!
//! Suspicions go to the coordinator, which checks itself: a stopped process is out of its groups within a
//! second, long before its silence or the call's own patience would show it. Knows nothing of stripes'
//! contents.
mod gate;

pub use gate::{Departure, Departures};

use crate::group::GroupView;
use crate::join::{Join, join_all};
use crate::latency;
use crate::latency::Latency;
use crate::status::Counters;
use crate::waits::Waits;
use crate::window::Ended;
use gate::Gates;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::{Backoff, BoxFuture, Env, Instant, Retry};
use weir_proto::coord::Suspicion;
use weir_proto::data::{Place, StatTarget};
use weir_proto::map::{ClusterMap, MemberState};
use weir_proto::{Error, ErrorKind, Request, Result, TargetId};
use weir_rpc::{Answered, Payload};

/// A live process answers within this time whether it lives.
const STAT_PATIENCE: Duration = Duration::from_secs(5);
/// A target whose disk has completed nothing for this time is as silent as a dead one, though its process
/// answers. A busy disk completes some request all the time.
const STALLED_MS_MAX: u32 = 2000;
/// The longest wait of a call that failed for the right to be tried again: it is sent only with a place in
/// the target's window then, so even thousands of them are two at a time.
const RETRY_HELD_MAX: Duration = Duration::from_secs(5);
/// First pause before a live member is retried; doubles up to a second.
const RETRY: Backoff = Backoff { first: Duration::from_millis(20), max: Duration::from_secs(1) };

/// Recent latencies of answers.
#[derive(Default)]
pub struct Latencies {
    pub read: Latency,
    pub write: Latency,
}

/// The kind of answer that a call waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pacing {
    Read,
    Write,
}

pub struct Targets {
    env: Env,
    pub cluster: Cluster,
    counters: Arc<Counters>,
    latencies: Mutex<Latencies>,
    pub waits: Arc<Waits>,
    /// Calls in flight to each target, and those that wait for their turn.
    gates: Gates,
}

/// Calls.
impl Targets {
    pub fn new(env: Env, cluster: Cluster, counters: Arc<Counters>) -> Targets {
        let (waits, gates) = (Waits::new(&env), Gates::new(&env));
        Targets { env, cluster, counters, latencies: Mutex::default(), waits, gates }
    }

    pub fn retry(&self, deadline: Instant) -> Retry {
        Retry::jittered(&self.env, RETRY, deadline)
    }
    pub fn left(&self, deadline: Instant) -> Duration {
        deadline.since(self.env.clock.now())
    }

    /// One call to one target, without a second try: it is sent when the target's window has a place for it,
    /// and then may take the target's [`crate::window::CallPatience`]. A busy target is asked again until the
    /// deadline: it has not begun the call.
    pub async fn call<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: impl Into<Payload>,
        deadline: Instant,
        departure: Departure,
    ) -> Result<Answered<R::Reply>> {
        let payload = payload.into();
        let mut ticket = None;
        loop {
            let (pass, waited) = self.gates.enter(target, &mut ticket, deadline, R::NAME).await?;
            departure.sent(pass.sent, waited);
            let patience = self.left(deadline).min(self.gates.call_patience(target));
            match self.cluster.call_target(target, request, payload.clone(), patience).await {
                Ok(answered) => {
                    pass.end(Ended::Answered);
                    self.counters.wire_sent_bytes.fetch_add(payload.len() as u64, Relaxed);
                    self.counters.wire_received_bytes.fetch_add(answered.payload.len() as u64, Relaxed);
                    return Ok(answered);
                }
                Err(Error { kind: ErrorKind::Busy { wait_ms }, .. }) => {
                    departure.returned();
                    pass.refused(Duration::from_millis(wait_ms.into()), &mut ticket);
                }
                Err(e) => {
                    let is_silent = matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline);
                    pass.end(if is_silent { Ended::Failed } else { Ended::Answered });
                    return Err(e);
                }
            }
        }
    }

    /// Reports to the coordinator that a target did not answer; waits for its verdict, and until the call may
    /// be tried again: at once under a newer epoch.
    pub async fn report(&self, place: Place, why: &Error) {
        let mut lives = self.report_only(place, why).await;
        let until = self.env.clock.now() + RETRY_HELD_MAX;
        loop {
            let map = self.cluster.map();
            let is_regrouped = map.group(place.group).is_none_or(|now| now.epoch > place.epoch);
            if is_regrouped || self.left(until).is_zero() {
                return;
            }
            if std::mem::take(&mut lives) {
                self.gates.note_process(place.target);
            }
            let Some(after) = self.gates.retry_after(place.target) else { return };
            self.wait_newer(map.version, after.min(self.left(until))).await;
        }
    }
    /// Reports to the coordinator that a target did not answer; waits for its verdict. For a caller that will
    /// ask other members. True: it was evaluated.
    pub async fn report_only(&self, place: Place, why: &Error) -> bool {
        let reported =
            self.cluster.report_target(place.target, place.group, place.epoch, &why.to_string()).await;
        if let Err(e) = &reported {
            tracing::debug!(target_id = %place.target, "not reported to the coordinator: {why}: {e}");
        }
        reported.is_ok()
    }

    /// A call to the member at `index` of the group.
    pub async fn call_member<R: Request>(
        &self,
        view: &GroupView,
        index: usize,
        request: &R,
        payload: impl Into<Payload>,
        pacing: Pacing,
        deadline: Instant,
    ) -> Result<Answered<R::Reply>> {
        let place = view.place(index);
        let is_down = |map: &ClusterMap| {
            let member = |m: &&weir_proto::map::Member| m.target == place.target;
            let found = map.group(place.group).and_then(|g| g.members.iter().find(member));
            found.is_none_or(|m| m.state == MemberState::Down)
        };
        self.call_while_up(place, is_down, request, payload, pacing, deadline).await
    }

    /// A call that ends with `Unavailable` once its target `is_down` by a newer map. It is suspected from
    /// when it was sent: a call that waits for its turn proves nothing about the target.
    pub async fn call_while_up<R: Request>(
        &self,
        place: Place,
        is_down: impl Fn(&ClusterMap) -> bool,
        request: &R,
        payload: impl Into<Payload>,
        pacing: Pacing,
        deadline: Instant,
    ) -> Result<Answered<R::Reply>> {
        let (departures, late_after) = (Departures::new(), latency::of_call(self.usual_max(pacing)));
        let mut version = self.cluster.map().version;
        let (mut suspicions, mut is_suspected) = (Join::new(), false);
        let call = self.call(place.target, request, payload, deadline, departures.of(0));
        tokio::pin!(call);
        // It is sent at once as a rule: then the timer below is set from the beginning.
        let mut answered = std::future::poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
        loop {
            if let Poll::Ready(answer) = answered {
                if let (Ok(_), Some(sent)) = (&answer, departures.at(0)) {
                    self.note_latency(pacing, self.env.clock.now().since(sent));
                }
                return answer;
            }
            let suspect_at = departures.at(0).map(|sent| sent + late_after).filter(|_| !is_suspected);
            tokio::select! {
                biased;
                answer = &mut call => answered = Poll::Ready(answer),
                () = self.newer_map(version, deadline) => {
                    let map = self.cluster.map();
                    version = map.version;
                    if is_down(&map) {
                        return Err(Error::unavailable(format!("{} went down", place.target)).doing(R::NAME));
                    }
                }
                Some(_) = suspicions.next(), if !suspicions.is_empty() => {}
                () = departures.changed(), if !is_suspected => {}
                () = self.env.clock.sleep_until(suspect_at.unwrap_or(deadline)), if suspect_at.is_some() => {
                    is_suspected = true;
                    suspicions.push(0, self.suspect(place, Suspicion::Unreachable, R::NAME));
                }
            }
        }
    }

    /// Asks the coordinator to check a member; the map shows the result.
    pub async fn suspect(&self, place: Place, suspicion: Suspicion, what: &str) {
        let why = match suspicion {
            Suspicion::Slow => format!("{what}: it has not answered long after the others"),
            Suspicion::Unreachable | Suspicion::Failed => format!("{what}: it has not answered"),
        };
        if let Err(e) =
            self.cluster.suspect_target(place.target, place.group, place.epoch, suspicion, &why).await
        {
            tracing::debug!(target_id = %place.target, "not reported to the coordinator: {why}: {e}");
        }
    }

    /// Almost all answers arrive within this time.
    pub fn usual_max(&self, pacing: Pacing) -> Duration {
        let latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        match pacing {
            Pacing::Read => latencies.read.usual_max(),
            Pacing::Write => latencies.write.usual_max(),
        }
    }
    pub fn note_latency(&self, pacing: Pacing, took: Duration) {
        let mut latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        match pacing {
            Pacing::Read => latencies.read.note(took),
            Pacing::Write => latencies.write.note(took),
        }
    }
}

/// News.
impl Targets {
    /// Waits for a map newer than `version`, at most `patience`.
    pub async fn wait_newer(&self, version: u64, patience: Duration) {
        // No newer map is not an error here: the caller checks again.
        let _ = self.cluster.wait_newer(version, patience).await;
    }

    /// Whether calls to the target wait for their turn.
    pub fn is_crowded(&self, target: TargetId) -> bool {
        self.gates.is_crowded(target)
    }

    /// Returns when the map is newer than `version`; never before the deadline otherwise.
    pub async fn newer_map(&self, version: u64, deadline: Instant) {
        while self.cluster.map().version <= version {
            self.wait_newer(version, self.left(deadline).max(RETRY.first)).await;
        }
    }

    /// When the first call was sent that the target has not answered, nor any later one, not even that it
    /// is busy.
    pub fn silent_since(&self, target: TargetId) -> Option<Instant> {
        self.gates.silent_since(target)
    }
    /// Asks those of the targets that have not answered whether they live. That takes neither their disks
    /// nor a place in their queues.
    pub async fn ask_silent(&self, targets: impl Iterator<Item = TargetId>) {
        let silent = targets.filter(|target| self.silent_since(*target).is_some());
        let asked = silent.map(|target| {
            Box::pin(async move {
                let stat = StatTarget { target };
                let asked = self.cluster.call_target(target, &stat, Payload::default(), STAT_PATIENCE).await;
                let Ok(answered) = asked else { return };
                self.gates.note_process(target);
                if answered.reply.report.stalled_ms < STALLED_MS_MAX {
                    self.gates.note_alive(target);
                }
            }) as BoxFuture<'_, ()>
        });
        join_all(asked.collect()).await;
    }
}
