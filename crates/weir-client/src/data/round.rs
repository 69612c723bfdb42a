//! One change at all live members of a group: rounds of calls until all have applied it under one epoch.
use super::{Data, Done, GroupView, StripeRef, Turn, is_unreachable};
use crate::data::MAP_PATIENCE;
use crate::join::Join;
use crate::latency;
use crate::targets::{Departures, Pacing};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{BoxFuture, Instant};
use weir_proto::coord::Suspicion;
use weir_proto::data::{MissingMask, Place};
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Error, ErrorKind, Result};

/// The next suspicion in one round of calls, and its time. A member is late by the time since its call was
/// sent: not while the call waits for its turn.
struct Latecomers {
    k: usize,
    usual_max: Duration,
    answered: Vec<Duration>,
    /// By member.
    last: BTreeMap<usize, Suspicion>,
}

impl Latecomers {
    fn new(k: usize, usual_max: Duration) -> Latecomers {
        Latecomers { k, usual_max, answered: Vec::new(), last: BTreeMap::new() }
    }
    /// The earliest one of these members, by the times at which their calls were sent.
    fn next(&self, pending: impl Iterator<Item = (usize, Instant)>) -> Option<(Instant, usize, Suspicion)> {
        let after = latency::of_write(&self.answered, self.k, self.usual_max)?;
        let of = |(index, sent): (usize, Instant)| match self.last.get(&index) {
            None => Some((sent + after.silent_after, index, Suspicion::Unreachable)),
            Some(Suspicion::Unreachable) => {
                after.slow_after.map(|slow| (sent + slow, index, Suspicion::Slow))
            }
            Some(Suspicion::Slow | Suspicion::Failed) => None,
        };
        pending.filter_map(of).min_by_key(|(at, index, _)| (*at, *index))
    }
}

/// All live members of an epoch have applied it.
pub struct Everywhere {
    pub missing: MissingMask,
    pub epoch: Epoch,
}

enum Round {
    Done,
    MapChanged,
    /// The member at this index has not applied it.
    Again(usize, Error),
}

impl Data {
    /// Makes `send(index, place, missing, turn)` succeed at every live member under one epoch of the group.
    pub async fn on_live_members<'a, F>(&'a self, s: &StripeRef, send: F) -> Result<Everywhere>
    where
        F: Fn(usize, Place, MissingMask, Turn) -> BoxFuture<'a, Result<()>>,
    {
        let mut done = Done::new();
        loop {
            if let Some(everywhere) = Box::pin(self.on_members_under(s, None, &mut done, &send)).await? {
                return Ok(everywhere);
            }
        }
    }

    /// One change at all live members under one given epoch, if any; `None`: it has passed. `done`: the
    /// epoch under which each member applied it.
    pub async fn on_members_under<'a, F>(
        &'a self,
        s: &StripeRef,
        under: Option<Epoch>,
        done: &mut Done,
        send: &F,
    ) -> Result<Option<Everywhere>>
    where
        F: Fn(usize, Place, MissingMask, Turn) -> BoxFuture<'a, Result<()>>,
    {
        let (mut retry, mut waiting) = (self.targets.retry(s.deadline), None);
        loop {
            let view = self.writable_view(s).await?;
            let (missing, epoch) = (view.down_mask(), view.group().epoch);
            if under.is_some_and(|under| under != epoch) {
                return Ok(None);
            }
            let (mut calls, departures) = (Join::new(), Departures::new());
            for index in (0..s.scheme().width()).filter(|index| missing & (1 << index) == 0) {
                let was = done.get(&view.place(index).target);
                if was != Some(&epoch) {
                    let turn = Turn { was: was.is_some(), departure: departures.of(index) };
                    calls.push(index, send(index, view.place(index), missing, turn));
                }
            }
            if calls.is_empty() {
                self.maps.note_written(view.map_version());
                return Ok(Some(Everywhere { missing, epoch }));
            }
            match self.round(s, &view, (calls, departures), done).await? {
                Round::Done => {}
                Round::MapChanged => retry.restart(),
                Round::Again(index, last) => {
                    if !retry.has_time() {
                        return Err(Error::deadline(format!("not done by the deadline: {last}")));
                    }
                    waiting.replace(self.waits.begin(view.name_of(index)));
                    retry.pause().await;
                }
            }
        }
    }

    /// Waits for one round of calls; abandons those to members that go down meanwhile.
    async fn round(
        &self,
        s: &StripeRef,
        view: &GroupView,
        (mut calls, departures): (Join<'_, Result<()>>, Arc<Departures>),
        done: &mut Done,
    ) -> Result<Round> {
        let epoch = view.group().epoch;
        let mut version = view.map_version();
        let (mut stale, mut unreachable, mut refused) = (None, None, None);
        let mut watch = Latecomers::new(s.k(), self.targets.usual_max(Pacing::Write));
        let mut suspicions = Join::new();
        loop {
            let sent = |index: usize| departures.at(index).map(|at| (index, at));
            let next_suspicion = watch.next(calls.numbers().into_iter().filter_map(sent));
            let answer = tokio::select! {
                biased;
                answer = calls.next() => answer,
                Some(_) = suspicions.next(), if !suspicions.is_empty() => continue,
                () = departures.changed() => continue,
                () = self.env.clock.sleep_until(next_suspicion.map_or(s.deadline, |(at, ..)| at)), if next_suspicion.is_some() => {
                    if let Some((_, index, suspicion)) = next_suspicion {
                        watch.last.insert(index, suspicion);
                        suspicions.push(index, self.targets.suspect(view.place(index), suspicion, "write a fragment"));
                    }
                    continue;
                }
                () = self.targets.newer_map(version, s.deadline) => {
                    let now = self.view(s)?;
                    version = now.map_version();
                    for index in calls.give_up(|i| now.state(i) != MemberState::Down) {
                        unreachable = Some((index, Error::unavailable("the target went down")));
                    }
                    continue;
                }
            };
            match answer {
                None => break,
                Some((index, Ok(()))) => {
                    done.insert(view.place(index).target, epoch);
                    let now = self.env.clock.now();
                    let took = departures.at(index).map(|sent| now.since(sent));
                    watch.answered.push(took.unwrap_or_default()); // without a call it had nothing to do
                    if let Some(took) = took {
                        self.targets.note_latency(Pacing::Write, took);
                    }
                }
                Some((index, Err(e))) if e.kind == ErrorKind::Stale => stale = Some((index, e)),
                Some((index, Err(e))) if is_unreachable(&e) => {
                    self.targets.report(view.place(index), &e).await;
                    unreachable = Some((index, e));
                }
                // The results of all members are known before the caller decides.
                Some((index, Err(e))) => drop(refused.get_or_insert((index, e))),
            }
        }
        self.outcome(s, view, Answers { refused, stale, unreachable }).await
    }

    /// The result of a round whose calls have all ended.
    async fn outcome(&self, s: &StripeRef, view: &GroupView, answers: Answers) -> Result<Round> {
        let epoch = view.group().epoch;
        let map_changed = || Ok::<_, Error>(self.view(s)?.group().epoch > epoch);
        if let Some((index, e)) = answers.refused {
            return Err(self.refusal(view, index, e).await);
        }
        if let Some((index, e)) = answers.stale {
            if map_changed()? {
                return Ok(Round::MapChanged);
            }
            if self.knows_no_newer(s, view, index).await {
                return Err(e); // fenced: the right to write has ended, or the token epoch is outdated
            }
            self.targets
                .wait_newer(view.map_version(), MAP_PATIENCE.min(self.targets.left(s.deadline)))
                .await;
            return Ok(if map_changed()? { Round::MapChanged } else { Round::Again(index, e) });
        }
        Ok(match answers.unreachable {
            None => Round::Done,
            Some(_) if map_changed()? => Round::MapChanged,
            Some((index, e)) => Round::Again(index, e.doing(format!("{} of {s}", view.place(index).target))),
        })
    }
}

/// The last failure of each kind in a round, by member.
struct Answers {
    refused: Option<(usize, Error)>,
    stale: Option<(usize, Error)>,
    unreachable: Option<(usize, Error)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_late_by_the_time_since_its_call_was_sent() {
        let at = |ms: u64| Instant::default() + Duration::from_millis(ms);
        let mut watch = Latecomers::new(4, Duration::from_millis(5));
        assert_eq!(watch.next([(0, at(1000))].into_iter()), None, "no other member to compare with");
        watch.answered = vec![Duration::from_millis(5); 5];
        assert_eq!(watch.next([].into_iter()), None, "the last call waits for its turn");
        let pending = [(4, at(1000)), (5, at(900))];
        assert_eq!(watch.next(pending.into_iter()), Some((at(1200), 5, Suspicion::Unreachable)));
        watch.last.insert(5, Suspicion::Unreachable);
        assert_eq!(watch.next(pending.into_iter()), Some((at(1300), 4, Suspicion::Unreachable)));
        watch.last.insert(4, Suspicion::Unreachable);
        assert_eq!(watch.next(pending.into_iter()), Some((at(1600), 5, Suspicion::Slow)));
        watch.last.insert(5, Suspicion::Slow);
        watch.last.insert(4, Suspicion::Slow);
        assert_eq!(watch.next(pending.into_iter()), None);
    }
}
