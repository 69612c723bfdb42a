//! Whole stripes to targets: how many are in flight, their versions, and the writes that succeed at all live
//! members of a group or not at all.
//!
//! Invariants: no version is used twice: an abandoned one may be at a target. A change is done when all live
//! members have applied it under one epoch.
use super::{Data, GroupView, MAP_PATIENCE, StripeRef, is_unreachable};
use crate::data::Fragment;
use crate::join::Join;
use crate::latency;
use crate::targets::{Departure, Departures, Pacing};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use weir_env::{BoxFuture, Instant};
use weir_proto::coord::Suspicion;
use weir_proto::data::{
    CommitStripe, DropPrepared, FILL_COUNTER, HoldStripe, MarkMissing, MissingMask, Place, SEAL_VERSIONS,
    WriteFragment, WriteMode,
};
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Error, ErrorKind, Request, Result, Seq, TargetId, Version, checksum};
use weir_rpc::Payload;

/// Stripes in flight to targets: enough to keep a dozen targets busy, few enough to bound the parity buffers.
/// Counted in parts, so that many small files may be in flight if targets are far.
const STRIPES_IN_FLIGHT_MAX: usize = 12;
pub const STRIPE_PARTS: u32 = 64;

pub struct Flight {
    permits: Semaphore,
    /// Lower half of fragment versions; one for all files, so it grows under every token epoch.
    version_counter: AtomicU32,
}

impl Default for Flight {
    fn default() -> Flight {
        Flight {
            permits: Semaphore::new(STRIPES_IN_FLIGHT_MAX * STRIPE_PARTS as usize),
            version_counter: AtomicU32::new((FILL_COUNTER + SEAL_VERSIONS + 2) & !1),
        }
    }
}

impl Flight {
    /// Waits until these parts of a stripe may be in flight.
    pub async fn enter(&self, parts: u32) -> SemaphorePermit<'_> {
        assert!((1..=STRIPE_PARTS).contains(&parts), "{parts} parts of a stripe");
        self.permits.acquire_many(parts).await.expect("never closed")
    }
    /// Writers use even counters, seals odd ones, below those of a writer (see `WriteMode::Prepare`).
    pub fn next_version(&self) -> u32 {
        self.version_counter.fetch_add(2, Relaxed)
    }
    /// The next version, or `lowest` if that is higher.
    pub fn next_version_from(&self, token_epoch: u32, lowest: Version) -> Version {
        if lowest.token_epoch() == token_epoch {
            self.version_counter.fetch_max(lowest.counter(), Relaxed);
        }
        lowest.max(Version::new(token_epoch, self.next_version()))
    }
}

/// Whole stripes.
impl Data {
    /// Writes a whole stripe: k + m fragments. Returns the epoch under which all live members have it.
    /// `again`: they may have it already.
    pub async fn write_stripe(
        &self,
        s: StripeRef,
        version: Version,
        mode: WriteMode,
        folded_seqs: &[Seq],
        fragments: &[Fragment],
        again: bool,
    ) -> Result<Epoch> {
        assert_eq!(fragments.len(), s.scheme().width(), "{s}: one fragment for each member");
        assert!(folded_seqs.is_empty() || folded_seqs.len() == s.k(), "{s}: one number for each data cell");
        let send = |index: usize,
                    place: Place,
                    missing: MissingMask,
                    Turn { was, departure }: Turn|
         -> BoxFuture<'_, Result<()>> {
            let mark = MarkMissing { place, cell: s.cell(index), version, missing };
            let Fragment { payload, block_crcs } = fragments[index].clone();
            let folded_seqs = folded_seqs.to_vec();
            let request =
                WriteFragment { place, cell: s.cell(index), version, mode, missing, folded_seqs, block_crcs };
            Box::pin(async move {
                if again || was {
                    match self.targets.call(place.target, &mark, vec![], s.deadline, departure.clone()).await
                    {
                        // The member was away, and its repair dropped the fragment: no other member had the
                        // version then, as after a failed write.
                        Err(e) if e.kind == ErrorKind::NotFound => {}
                        marked => return marked.map(|_| ()),
                    }
                }
                let crc = checksum::crc_of_blocks(&request.block_crcs, payload.len() as u64);
                let parts = Payload { parts: vec![payload], crc };
                self.targets.call(place.target, &request, parts, s.deadline, departure).await.map(|_| ())
            })
        };
        let written = self.on_live_members(&s, send).await.map_err(|e| e.doing(format!("write {s}")))?;
        if written.missing != 0 {
            self.counters.degraded_writes.fetch_add(1, Relaxed);
        }
        Ok(written.epoch)
    }

    /// Makes every live member have the version: one that lacks it rebuilds it from the others. Returns the
    /// epoch. `NotFound`: too few have it.
    pub async fn hold_stripe(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<Epoch> {
        let send =
            |index: usize, place: Place, missing: MissingMask, turn: Turn| -> BoxFuture<'_, Result<()>> {
                let request = HoldStripe { place, cell: s.cell(index), version, missing, token_epoch };
                Box::pin(async move {
                    self.targets
                        .call(place.target, &request, vec![], s.deadline, turn.departure)
                        .await
                        .map(|_| ())
                })
            };
        let held = self.on_live_members(&s, send).await.map_err(|e| e.doing(format!("commit {s}")))?;
        Ok(held.epoch)
    }

    /// One member's part of a change, unless it applied the change before.
    fn apply_once<R: Request>(
        &self,
        place: Place,
        request: R,
        deadline: Instant,
        turn: Turn,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if turn.was {
                return Ok(());
            }
            self.targets.call(place.target, &request, vec![], deadline, turn.departure).await.map(|_| ())
        })
    }

    /// Commits a version that all live members have under `held`, at each that is not in `done`. False: the
    /// group has a newer epoch, and its live members must have the version before any further commit: a
    /// member that commits is never the only one with it, even if any number of members fail afterwards.
    pub async fn commit_stripe(
        &self,
        s: StripeRef,
        version: Version,
        token_epoch: u32,
        held: Epoch,
        done: &mut Done,
    ) -> Result<bool> {
        let send = |index: usize, place: Place, _: MissingMask, turn: Turn| -> BoxFuture<'_, Result<()>> {
            let request = CommitStripe { place, cell: s.cell(index), version, token_epoch };
            self.apply_once(place, request, s.deadline, turn)
        };
        let committed = self.on_members_under(&s, Some(held), done, &send).await;
        Ok(committed.map_err(|e| e.doing(format!("commit {s}")))?.is_some())
    }

    /// Drops a prepared version where it still exists. Best effort: a later reader or repair decides the
    /// same.
    pub async fn drop_prepared(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        let send = |index: usize, place: Place, _: MissingMask, turn: Turn| -> BoxFuture<'_, Result<()>> {
            let request = DropPrepared { place, cell: s.cell(index), version, token_epoch };
            self.apply_once(place, request, s.deadline, turn)
        };
        self.on_live_members(&s, send).await.map(|_| ())
    }
}

/// One call of a round.
struct Turn {
    /// The member applied the change before, under an earlier epoch.
    was: bool,
    /// Records when it was sent.
    departure: Departure,
}

/// The members that applied a change, and the epoch of each. By target: a place in the group may get another
/// target meanwhile.
pub type Done = BTreeMap<TargetId, Epoch>;

/// All live members of an epoch have applied it.
struct Everywhere {
    missing: MissingMask,
    epoch: Epoch,
}

enum Round {
    Done,
    MapChanged,
    /// The member at this index has not applied it.
    Again(usize, Error),
}

/// One change at all live members of a group: rounds of calls until all have applied it under one epoch.
impl Data {
    /// Makes `send(index, place, missing, turn)` succeed at every live member under one epoch of the group.
    async fn on_live_members<'a, F>(&'a self, s: &StripeRef, send: F) -> Result<Everywhere>
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
    async fn on_members_under<'a, F>(
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
            return Err(self.full.refusal(view, index, e).await);
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
