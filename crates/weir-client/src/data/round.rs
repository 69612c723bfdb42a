//! One change at all live members of a group: rounds of calls until all have applied it under one epoch.
use super::{Data, Done, GroupView, StripeRef, is_unreachable};
use crate::data::MAP_PATIENCE;
use crate::join::Join;
use crate::latency;
use crate::member::Pacing;
use std::time::Duration;
use weir_env::{BoxFuture, Instant};
use weir_proto::coord::Suspicion;
use weir_proto::data::{MissingMask, Place};
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Error, ErrorKind, Result};

/// The next suspicion in one round of calls, and its time.
struct Latecomers {
    begun: Instant,
    k: usize,
    usual_max: Duration,
    answered: Vec<Duration>,
    last: Option<Suspicion>,
}

impl Latecomers {
    pub fn new(begun: Instant, k: usize, usual_max: Duration) -> Latecomers {
        Latecomers { begun, k, usual_max, answered: Vec::new(), last: None }
    }
    pub fn answered(&mut self, now: Instant) -> Duration {
        let took = now.since(self.begun);
        self.answered.push(took);
        took
    }
    fn next_suspicion(&self) -> Option<(Instant, Suspicion)> {
        let suspicions = latency::of_write(&self.answered, self.k, self.usual_max)?;
        match self.last {
            None => Some((self.begun + suspicions.silent_after, Suspicion::Unreachable)),
            Some(Suspicion::Unreachable) => {
                suspicions.slow_after.map(|after| (self.begun + after, Suspicion::Slow))
            }
            Some(Suspicion::Slow | Suspicion::Failed) => None,
        }
    }
    /// The next suspicion is due.
    fn suspected(&mut self) -> Suspicion {
        let suspicion = self.next_suspicion().map_or(Suspicion::Unreachable, |(_, suspicion)| suspicion);
        self.last = Some(suspicion);
        suspicion
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
    /// Makes `send(index, place, missing, was)` succeed at every live member under one epoch of the group;
    /// `was`: the member applied it before, under an earlier epoch.
    pub async fn on_live_members<'a, F>(&'a self, s: &StripeRef, send: F) -> Result<Everywhere>
    where
        F: Fn(usize, Place, MissingMask, bool) -> BoxFuture<'a, Result<()>>,
    {
        let mut done = Done::new();
        loop {
            if let Some(everywhere) = Box::pin(self.on_members_under(s, None, &mut done, &send)).await? {
                return Ok(everywhere);
            }
        }
    }

    /// The same under one given epoch, if any; `None`: it has passed. `done`: the epoch under which each
    /// member applied it.
    pub async fn on_members_under<'a, F>(
        &'a self,
        s: &StripeRef,
        under: Option<Epoch>,
        done: &mut Done,
        send: &F,
    ) -> Result<Option<Everywhere>>
    where
        F: Fn(usize, Place, MissingMask, bool) -> BoxFuture<'a, Result<()>>,
    {
        let (mut retry, mut waiting) = (self.retry(s.deadline), None);
        loop {
            let view = self.writable_view(s).await?;
            let (missing, epoch) = (view.down_mask(), view.group().epoch);
            if under.is_some_and(|under| under != epoch) {
                return Ok(None);
            }
            let mut calls = Join::new();
            for index in (0..s.scheme().width()).filter(|index| missing & (1 << index) == 0) {
                let was = done.get(&view.place(index).target);
                if was != Some(&epoch) {
                    calls.push(index, send(index, view.place(index), missing, was.is_some()));
                }
            }
            if calls.is_empty() {
                self.maps.note_written(view.map_version());
                return Ok(Some(Everywhere { missing, epoch }));
            }
            match self.round(s, &view, calls, done).await? {
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
        mut calls: Join<'_, Result<()>>,
        done: &mut Done,
    ) -> Result<Round> {
        let epoch = view.group().epoch;
        let mut version = view.map_version();
        let (mut stale, mut unreachable, mut refused) = (None, None, None);
        let mut watch = Latecomers::new(self.env.clock.now(), s.k(), self.usual_max(Pacing::Write));
        let mut suspicions = Join::new();
        loop {
            let next_suspicion = watch.next_suspicion();
            let answer = tokio::select! {
                biased;
                answer = calls.next() => answer,
                Some(_) = suspicions.next(), if !suspicions.is_empty() => continue,
                () = self.env.clock.sleep_until(next_suspicion.map_or(s.deadline, |(at, _)| at)), if next_suspicion.is_some() => {
                    let suspicion = watch.suspected();
                    for index in calls.numbers() {
                        suspicions.push(index, self.suspect(view.place(index), suspicion, "write a fragment"));
                    }
                    continue;
                }
                () = self.newer_map(version, s.deadline) => {
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
                    let took = watch.answered(self.env.clock.now());
                    self.note_latency(Pacing::Write, took);
                }
                Some((index, Err(e))) if e.kind == ErrorKind::Stale => stale = Some((index, e)),
                Some((index, Err(e))) if is_unreachable(&e) => {
                    self.report(view.place(index), &e).await;
                    unreachable = Some((index, e));
                }
                // The results of all members are known before the caller decides.
                Some((index, Err(e))) => drop(refused.get_or_insert((index, e))),
            }
        }
        if let Some((index, e)) = refused {
            return Err(self.refusal(view, index, e).await);
        }
        if let Some((index, e)) = stale {
            let map_changed = || Ok::<_, Error>(self.view(s)?.group().epoch > epoch);
            if map_changed()? {
                return Ok(Round::MapChanged);
            }
            if self.knows_no_newer(s, view, index).await {
                return Err(e); // fenced: the right to write has ended, or the token epoch is outdated
            }
            self.wait_newer(view.map_version(), MAP_PATIENCE.min(self.left(s.deadline))).await;
            return Ok(if map_changed()? { Round::MapChanged } else { Round::Again(index, e) });
        }
        Ok(match unreachable {
            None => Round::Done,
            Some(_) if self.view(s)?.group().epoch > epoch => Round::MapChanged,
            Some((index, e)) => Round::Again(index, e.doing(format!("{} of {s}", view.place(index).target))),
        })
    }
}
