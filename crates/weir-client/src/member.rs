//! One call to one member of a group: abandoned as soon as the member goes down, suspected when it is silent.
//!
//! Suspicions go to the coordinator, which checks itself: a stopped process is out of its groups within a
//! second, long before its silence or the call's own patience would show it. Knows nothing of stripes'
//! contents.
use crate::data::{Data, Departures, GroupView};
use crate::join::Join;
use crate::latency::{self, Latency};
use std::sync::PoisonError;
use std::task::Poll;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::Suspicion;
use weir_proto::data::Place;
use weir_proto::map::{ClusterMap, MemberState};
use weir_proto::{Error, Request, Result};
use weir_rpc::{Answered, Payload};

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

impl Data {
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
