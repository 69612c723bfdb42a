//! Requested recalls: the waiting callers, the next work for movers, and its results.
//!
//! Invariants: queued and running recalls of one file never overlap. Recalls with waiting callers go before
//! others, otherwise first come, first served. A recall whose mover has dropped out (its session ended, it
//! did not name it, it took too long) is queued again. A waiting caller learns once of a recall that failed
//! for good.
//!
//! Pure: it gets events and the time. Kept in memory: after a restart of the leader, callers that still wait
//! ask again.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::Instant;
use weir_proto::recall::{RecallId, RecallState};
use weir_proto::{Error, InodeId, Result, SessionId};

/// Bytes of one recall: several movers recall parts of a large file in parallel.
pub const PART_BYTES: u64 = 64 << 20;
/// Queued recalls: some 200 bytes each. A list of more files is prefetched in parts.
const WISHES_MAX: usize = 200_000;
/// A mover that holds a recall for longer hangs: another one may try. Late writes of the first one do no
/// harm.
const HELD_MAX: Duration = Duration::from_secs(300);
/// First pause after a failure; doubles.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(30);
/// A mover that has not asked for work for this time is not counted.
const MOVER_SILENT: Duration = Duration::from_secs(60);

type Place = (InodeId, u64);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Wish {
    to: u64,
    awaited: bool,
    serial: u64,
    not_before: Instant,
    failures: u32,
    error: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct UnderWay {
    to: u64,
    awaited: bool,
    token_epoch: u32,
    mover: SessionId,
    since: Instant,
    failures: u32,
    error: String,
}

struct Waiter {
    ino: InodeId,
    from: u64,
    to: u64,
    failed: Option<String>,
}

/// A queued recall that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    pub ino: InodeId,
    pub from: u64,
    pub to: u64,
    pub awaited: bool,
    failures: u32,
    error: String,
}

#[derive(Default)]
pub struct Recalls {
    wishes: BTreeMap<Place, Wish>,
    /// (not awaited, serial) of each queued recall.
    order: BTreeSet<(bool, u64, Place)>,
    under_way: BTreeMap<Place, UnderWay>,
    waiters: BTreeMap<u64, Waiter>,
    bells: BTreeMap<InodeId, Arc<Notify>>,
    movers: BTreeMap<SessionId, Instant>,
    serial: u64,
    /// Notified when there is work for movers.
    pub news: Arc<Notify>,
}

impl Recalls {
    /// Queues the recall of a range (whole stripes of `stripe` bytes, except for a file's tail). `awaited`: a
    /// caller waits for it.
    pub fn want(
        &mut self,
        ino: InodeId,
        (from, to): (u64, u64),
        stripe: u64,
        awaited: bool,
        now: Instant,
    ) -> Result<()> {
        let part = (PART_BYTES / stripe * stripe).max(stripe);
        if from >= to {
            return Ok(());
        }
        if awaited {
            self.split(ino, from);
            self.split(ino, to);
        }
        let mut gaps = Vec::new();
        let mut at = from;
        for (a, b) in self.taken(ino, from, to) {
            if at < a {
                gaps.push((at, a));
            }
            at = at.max(b);
        }
        if at < to {
            gaps.push((at, to));
        }
        if awaited {
            let inside: Vec<Place> = self.wishes.range((ino, from)..(ino, to)).map(|(p, _)| *p).collect();
            inside.into_iter().for_each(|place| self.promote(place));
            for (_, u) in self.under_way.range_mut((ino, 0)..(ino, to)).filter(|(_, u)| u.to > from) {
                u.awaited = true;
            }
        }
        let parts: u64 = gaps.iter().map(|(a, b)| (b - a).div_ceil(part)).sum();
        if self.wishes.len() as u64 + parts > WISHES_MAX as u64 {
            return Err(Error::unavailable(format!("{} recalls wait already: ask later", self.wishes.len())));
        }
        for (a, b) in gaps {
            let mut at = a;
            while at < b {
                let end = b.min(at.saturating_add(part));
                self.add((ino, at), Wish::new(end, awaited, now));
                at = end;
            }
        }
        self.news.notify_waiters();
        Ok(())
    }

    /// Queued and running recalls that overlap `from..to`, in order.
    fn taken(&self, ino: InodeId, from: u64, to: u64) -> Vec<(u64, u64)> {
        let wishes = self.wishes.range((ino, 0)..(ino, to)).map(|(p, w)| (p.1, w.to));
        let under_way = self.under_way.range((ino, 0)..(ino, to)).map(|(p, u)| (p.1, u.to));
        let mut all: Vec<(u64, u64)> = wishes.chain(under_way).filter(|(_, end)| *end > from).collect();
        all.sort_unstable();
        all
    }

    /// Splits the queued recall that contains `at`.
    fn split(&mut self, ino: InodeId, at: u64) {
        let Some((&place, wish)) = self.wishes.range((ino, 0)..(ino, at)).next_back() else { return };
        if wish.to <= at {
            return;
        }
        let (mut left, mut right) = (wish.clone(), wish.clone());
        self.remove(place);
        left.to = at;
        right.serial = 0;
        self.add(place, left);
        self.add((ino, at), right);
    }

    fn add(&mut self, place: Place, mut wish: Wish) {
        assert!(place.1 < wish.to, "inode {}: a recall of no bytes at {}", place.0, place.1);
        if wish.serial == 0 {
            self.serial += 1;
            wish.serial = self.serial;
        }
        self.order.insert((!wish.awaited, wish.serial, place));
        let earlier = self.wishes.insert(place, wish);
        assert!(earlier.is_none(), "inode {}: bytes at {} are to be recalled twice", place.0, place.1);
    }
    fn remove(&mut self, place: Place) -> Option<Wish> {
        let wish = self.wishes.remove(&place)?;
        self.order.remove(&(!wish.awaited, wish.serial, place));
        Some(wish)
    }
    fn promote(&mut self, place: Place) {
        if let Some(wish) = self.remove(place) {
            self.add(place, Wish { awaited: true, ..wish });
        }
    }

    /// Takes the next recall that is due from the queue. [`Recalls::begin`] follows, or it is dropped.
    pub fn next(&mut self, now: Instant) -> Option<Due> {
        let due = |place: &Place| self.wishes.get(place).is_some_and(|w| w.not_before <= now);
        let place = self.order.iter().map(|(_, _, place)| *place).find(due)?;
        let w = self.remove(place)?;
        let (failures, error) = (w.failures, w.error);
        Some(Due { ino: place.0, from: place.1, to: w.to, awaited: w.awaited, failures, error })
    }
    /// When the next queued recall becomes due.
    pub fn next_due(&self, now: Instant) -> Option<Instant> {
        self.wishes.values().map(|w| w.not_before).filter(|at| *at > now).min()
    }
    /// A mover has a part of a due recall now.
    pub fn begin(&mut self, due: &Due, (from, to): (u64, u64), token: u32, mover: SessionId, now: Instant) {
        assert!(due.from <= from && from < to && to <= due.to, "{from} to {to} is not a part of {due:?}");
        let (failures, error) = (due.failures, due.error.clone());
        let awaited = due.awaited;
        let under_way = UnderWay { to, awaited, token_epoch: token, mover, since: now, failures, error };
        self.under_way.insert((due.ino, from), under_way);
    }
    /// A due recall could not be assigned: it is due again.
    pub fn put_back(&mut self, due: Due, now: Instant) {
        let Due { ino, from, to, awaited, failures, error } = due;
        self.add((ino, from), Wish { failures, error, ..Wish::new(to, awaited, now) });
    }

    /// A mover asks for work and names the recalls that it has.
    pub fn note_busy(&mut self, mover: SessionId, busy: &[RecallId], now: Instant) {
        self.movers.insert(mover, now);
        self.movers.retain(|_, at| now.since(*at) < MOVER_SILENT);
        let has = |place: &Place, u: &UnderWay| {
            busy.iter().any(|b| (b.ino, b.from, b.token_epoch) == (place.0, place.1, u.token_epoch))
        };
        self.take_back(now, |place, u| (u.mover == mover && !has(place, u)) || now.since(u.since) > HELD_MAX);
    }
    /// A session is over.
    pub fn drop_session(&mut self, mover: SessionId, now: Instant) {
        self.movers.remove(&mover);
        self.take_back(now, |_, u| u.mover == mover);
    }
    fn take_back(&mut self, now: Instant, lost: impl Fn(&Place, &UnderWay) -> bool) {
        let places: Vec<Place> = self.under_way.iter().filter(|(p, u)| lost(p, u)).map(|(p, _)| *p).collect();
        for place in &places {
            if let Some(u) = self.under_way.remove(place) {
                let wish = Wish::new(u.to, u.awaited, now);
                self.add(*place, Wish { failures: u.failures, error: u.error, ..wish });
            }
        }
        if !places.is_empty() {
            self.news.notify_waiters();
        }
    }

    /// A recall's bytes are online.
    pub fn done(&mut self, ino: InodeId, from: u64, token_epoch: u32) {
        if self.under_way.get(&(ino, from)).is_some_and(|u| u.token_epoch <= token_epoch) {
            self.under_way.remove(&(ino, from));
        }
        self.ring(ino);
    }

    /// A mover gives up a recall. `retry`: it is queued again, later; otherwise its waiting callers fail.
    pub fn failed(&mut self, mover: SessionId, id: &RecallId, error: &str, retry: bool, now: Instant) {
        let place = (id.ino, id.from);
        let is_its = |u: &UnderWay| u.mover == mover && u.token_epoch == id.token_epoch;
        if !self.under_way.get(&place).is_some_and(is_its) {
            return;
        }
        let Some(u) = self.under_way.remove(&place) else { return };
        if retry {
            let failures = u.failures.saturating_add(1);
            let pause = RETRY_PAUSE.saturating_mul(1 << (failures - 1).min(10)).min(RETRY_PAUSE_MAX);
            let wish = Wish::new(u.to, u.awaited, now + pause);
            self.add(place, Wish { failures, error: error.into(), ..wish });
            self.news.notify_waiters(); // so that waiting requests learn the time until it is due
            return;
        }
        let overlaps = |w: &&mut Waiter| w.ino == id.ino && w.from < u.to && w.to > id.from;
        for waiter in self.waiters.values_mut().filter(overlaps) {
            waiter.failed = Some(error.into());
        }
        self.ring(id.ino);
    }

    /// Drops a file's recalls past `size`: it was truncated, or is deleted.
    pub fn forget(&mut self, ino: InodeId, size: u64) {
        self.split(ino, size);
        let beyond: Vec<Place> = self.wishes.range((ino, size)..=(ino, u64::MAX)).map(|(p, _)| *p).collect();
        beyond.into_iter().for_each(|place| drop(self.remove(place)));
        // Nor when a mover gives it up: the file may be longer then, and evicted again.
        let beyond: Vec<Place> =
            self.under_way.range((ino, size)..=(ino, u64::MAX)).map(|(p, _)| *p).collect();
        beyond.iter().for_each(|place| drop(self.under_way.remove(place)));
        for (_, u) in self.under_way.range_mut((ino, 0)..(ino, size)) {
            u.to = u.to.min(size);
        }
        self.ring(ino);
    }

    // ---- those who wait

    /// A caller waits for a range: returns the number of the wait.
    pub fn wait(&mut self, ino: InodeId, from: u64, to: u64) -> u64 {
        self.serial += 1;
        self.waiters.insert(self.serial, Waiter { ino, from, to, failed: None });
        self.serial
    }
    pub fn end_wait(&mut self, number: u64) {
        let Some(waiter) = self.waiters.remove(&number) else { return };
        if !self.waiters.values().any(|w| w.ino == waiter.ino) {
            self.bells.remove(&waiter.ino);
        }
    }
    /// The reason why the awaited recall has failed.
    pub fn failure(&self, number: u64) -> Option<String> {
        self.waiters.get(&number)?.failed.clone()
    }
    /// Notified when something about the file's recalls changed.
    pub fn bell(&mut self, ino: InodeId) -> Arc<Notify> {
        self.bells.entry(ino).or_default().clone()
    }
    fn ring(&self, ino: InodeId) {
        if let Some(bell) = self.bells.get(&ino) {
            bell.notify_waiters();
        }
    }

    /// The cause that delays a range, as text.
    pub fn why(&self, ino: InodeId, from: u64, to: u64, now: Instant) -> String {
        let movers = self.movers.values().filter(|at| now.since(**at) < MOVER_SILENT).count();
        let state = self.states(ino).into_iter().find(|s| s.from < to && s.to > from);
        let tried = |s: &RecallState| match s.failures {
            0 => String::new(),
            n => format!("; {n} tries failed, the last one: {}", s.error),
        };
        match state {
            Some(s) if s.mover != SessionId(0) => format!("mover {} is bringing them{}", s.mover, tried(&s)),
            Some(s) if movers == 0 => format!("no mover is running{}", tried(&s)),
            Some(s) => format!("{movers} movers are busy with others{}", tried(&s)),
            None => "they are about to be asked for".into(),
        }
    }
    /// Queued and running recalls of a file, in order.
    pub fn states(&self, ino: InodeId) -> Vec<RecallState> {
        let of = (ino, 0)..=(ino, u64::MAX);
        let wishes = self.wishes.range(of.clone()).map(|(p, w)| RecallState {
            from: p.1,
            to: w.to,
            awaited: w.awaited,
            mover: SessionId(0),
            failures: w.failures,
            error: w.error.clone(),
        });
        let under_way = self.under_way.range(of).map(|(p, u)| RecallState {
            from: p.1,
            to: u.to,
            awaited: u.awaited,
            mover: u.mover,
            failures: u.failures,
            error: u.error.clone(),
        });
        let mut states: Vec<RecallState> = wishes.chain(under_way).collect();
        states.sort_by_key(|s| s.from);
        states
    }
    /// Whether a file has queued or running recalls.
    pub fn concern(&self, ino: InodeId) -> bool {
        let of = (ino, 0)..=(ino, u64::MAX);
        self.wishes.range(of.clone()).next().is_some() || self.under_way.range(of).next().is_some()
    }
}

impl Wish {
    fn new(to: u64, awaited: bool, not_before: Instant) -> Wish {
        Wish { to, awaited, serial: 0, not_before, failures: 0, error: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INO: InodeId = InodeId(7);
    const MOVER: SessionId = SessionId(3);

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }
    fn take(recalls: &mut Recalls, now: Instant) -> Option<(u64, u64, bool)> {
        let due = recalls.next(now)?;
        recalls.begin(&due, (due.from, due.to), 1, MOVER, now);
        Some((due.from, due.to, due.awaited))
    }
    fn id(from: u64) -> RecallId {
        RecallId { ino: INO, from, token_epoch: 1 }
    }

    #[test]
    fn awaited_ranges_go_first_and_large_ones_in_parts() {
        let mut recalls = Recalls::default();
        recalls.want(INO, (0, 3 * PART_BYTES), 1, false, at(0)).unwrap();
        recalls.want(INO, (PART_BYTES + 10, PART_BYTES + 20), 1, true, at(0)).unwrap();
        let mut taken = Vec::new();
        while let Some(t) = take(&mut recalls, at(0)) {
            taken.push(t);
        }
        let p = PART_BYTES;
        let first = (p + 10, p + 20, true);
        assert_eq!(taken[0], first);
        taken.sort_unstable();
        let rest = [(0, p, false), (p, p + 10, false), first, (p + 20, 2 * p, false), (2 * p, 3 * p, false)];
        assert_eq!(taken, rest);
        recalls.want(INO, (0, 3 * p), 1, true, at(0)).unwrap();
        assert_eq!(take(&mut recalls, at(0)), None, "all of it is under way");
        assert!(recalls.states(INO).iter().all(|s| s.awaited && s.mover == MOVER));
    }

    #[test]
    fn a_recall_that_a_mover_does_not_answer_is_reassigned() {
        let mut recalls = Recalls::default();
        recalls.want(INO, (0, 10), 1, true, at(0)).unwrap();
        recalls.want(INO, (20, 30), 1, true, at(0)).unwrap();
        for _ in 0..2 {
            take(&mut recalls, at(0)).unwrap();
        }
        // The answer with the second one was lost.
        recalls.note_busy(MOVER, &[id(0)], at(1));
        assert_eq!(take(&mut recalls, at(1)), Some((20, 30, true)));
        recalls.note_busy(MOVER, &[id(0), RecallId { token_epoch: 2, ..id(20) }], at(2));
        assert_eq!(take(&mut recalls, at(2)), Some((20, 30, true)), "it names an older one");
        recalls.drop_session(MOVER, at(3));
        assert_eq!(take(&mut recalls, at(3)), Some((0, 10, true)));
        assert_eq!(take(&mut recalls, at(3)), Some((20, 30, true)));
        let hangs = at(4) + HELD_MAX;
        recalls.note_busy(SessionId(9), &[], hangs);
        assert_eq!(take(&mut recalls, hangs), Some((0, 10, true)));
    }

    #[test]
    fn failures_pause_longer_each_time_and_are_reported() {
        let mut recalls = Recalls::default();
        recalls.want(INO, (0, 10), 1, true, at(0)).unwrap();
        let wait = recalls.wait(INO, 5, 6);
        let mut now = at(0);
        for pause_ms in [500, 1000, 2000] {
            take(&mut recalls, now).unwrap();
            recalls.failed(MOVER, &id(0), "home hangs", true, now);
            assert_eq!(take(&mut recalls, now), None);
            assert_eq!(recalls.next_due(now), Some(now + Duration::from_millis(pause_ms)));
            now = now + Duration::from_millis(pause_ms);
        }
        assert!(recalls.why(INO, 0, 10, now).contains("3 tries failed, the last one: home hangs"));
        assert_eq!(recalls.failure(wait), None);
        take(&mut recalls, now).unwrap();
        recalls.failed(SessionId(9), &id(0), "not its recall", false, now);
        assert_eq!(recalls.failure(wait), None);
        recalls.failed(MOVER, &id(0), "home has another file there", false, now);
        assert_eq!(recalls.failure(wait).as_deref(), Some("home has another file there"));
        assert!(!recalls.concern(INO));
        recalls.end_wait(wait);
        assert!(recalls.bells.is_empty() && recalls.waiters.is_empty());
    }

    #[test]
    fn truncated_bytes_are_not_wanted() {
        let mut recalls = Recalls::default();
        recalls.want(INO, (0, 100), 1, false, at(0)).unwrap();
        recalls.forget(INO, 40);
        assert_eq!(take(&mut recalls, at(0)), Some((0, 40, false)));
        assert_eq!(take(&mut recalls, at(0)), None);
    }

    proptest! {
        /// In any sequence of events, queued and running recalls never overlap, and together they are the
        /// requested ranges that are not online.
        #[test]
        fn nothing_is_wanted_twice_and_nothing_is_forgotten(
            steps in prop::collection::vec((0u8..6, 0u64..40, 1u64..20), 1..60)
        ) {
            let mut recalls = Recalls::default();
            let mut wanted: BTreeSet<u64> = BTreeSet::new();
            for (n, (what, from, len)) in steps.into_iter().enumerate() {
                let now = at(n as u64 * 100_000);
                match what {
                    0 | 1 => {
                        recalls.want(INO, (from, from + len), 1, what == 0, now).unwrap();
                        wanted.extend(from..from + len);
                    }
                    2 => drop(take(&mut recalls, now)),
                    3 => {
                        let first = recalls.under_way.iter().next().map(|(p, u)| (p.1, u.to));
                        if let Some((a, b)) = first {
                            recalls.done(INO, a, 1);
                            wanted.retain(|byte| !(a..b).contains(byte));
                        }
                    }
                    4 => {
                        let first = recalls.under_way.keys().next().map(|p| p.1);
                        first.into_iter().for_each(|a| recalls.failed(MOVER, &id(a), "", true, now));
                    }
                    _ => recalls.drop_session(MOVER, now),
                }
                let states = recalls.states(INO);
                prop_assert!(states.windows(2).all(|w| w[0].to <= w[1].from));
                let covered: BTreeSet<u64> = states.iter().flat_map(|s| s.from..s.to).collect();
                prop_assert_eq!(&covered, &wanted);
                prop_assert_eq!(recalls.order.len(), recalls.wishes.len());
            }
        }
    }
}
