//! Decisions of the members of a journal group, as pure functions of their knowledge and of the time.
//!
//! `tests/journal` searches these functions state by state, with each rule omitted in turn. The rules:
//! - a record is durable when it is synced by every member that is current or was reported as caught up;
//! - a member refuses requests under an older epoch than it knows, even after a restart;
//! - no member leads under an epoch that it knew before: a leader that restarted leads under a new one;
//! - the leader's records are authoritative: others truncate theirs to the common part, and follow;
//! - the leader answers while all those members have lately promised that they know no newer epoch; a member
//!   that promised this acknowledges nothing as a leader until the promise has expired, nor does a member
//!   that has just restarted.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_coord::decide::JournalGroup;
use weir_env::{Backoff, Instant};
use weir_kv::CommitSeq;
use weir_kv::epochs::{Epochs, Shared};
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Error, Result};

/// A member's promise that it knows no newer epoch counts for this time, from when the leader asked for it.
pub const RIGHT: Duration = Duration::from_secs(1);
/// The member is bound by its promise for this time, by its own clock: as long, and a tenth for clocks of
/// different speed.
pub const PROMISE: Duration = Duration::from_millis(1100);

/// Whether a member may accept records, truncations and requests for promises under `epoch`.
pub fn accepts(known: Epoch, epoch: Epoch) -> bool {
    epoch >= known
}

/// Whether `me` may begin to lead, given the newest epoch it knew before, in an earlier run too.
pub fn may_lead<I: Copy + Eq + std::fmt::Display>(group: &JournalGroup<I>, me: I, known: Epoch) -> bool {
    group.leader == Some(me) && group.is_current(me) && group.epoch > known
}

/// The number of current members that any acknowledgement needs: one copy may be missing.
pub fn floor(copies: usize) -> usize {
    copies.saturating_sub(1).max(1)
}

/// The first step of a member that begins to follow a leader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// It truncates its journal after this record, or ends there already, and accepts the following records.
    After(CommitSeq),
    /// The leader has no record that follows one of the member's: the member fetches the whole state.
    Fetch,
}

/// Where a member joins the leader's records. `durable`: the record up to which the member knows that
/// all are durable everywhere; these are never truncated.
pub fn start(mine: &Epochs, leaders: &Epochs, durable: CommitSeq) -> Result<Start> {
    match mine.shared_with(leaders) {
        Shared::TooOld => Ok(Start::Fetch),
        Shared::UpTo(seq) if seq < durable => Err(Error::damaged(format!(
            "the records up to {} were durable in every copy, and the new leader's journal differs behind {}",
            durable.0, seq.0
        ))
        .hint("its directory may be an old copy")),
        Shared::UpTo(seq) => Ok(Start::After(seq)),
    }
}

/// A member's promise to a leader: until it has expired the member acknowledges nothing as a leader.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Promise {
    until: Instant,
}

impl Promise {
    /// A member that starts does not know its earlier promises.
    pub fn at_start(now: Instant) -> Promise {
        Promise { until: now + PROMISE }
    }
    pub fn renew(&mut self, now: Instant) {
        self.until = self.until.max(now + PROMISE);
    }
    pub fn binds(&self, now: Instant) -> bool {
        now < self.until
    }
    pub fn until(&self) -> Instant {
        self.until
    }
}

/// A follower's measure of its leader's silence. Time in which its own process did not run does not count:
/// it would have received nothing from any leader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Silence {
    epoch: Epoch,
    requests: u64,
    /// How long the leader was followed until its last request.
    followed: Duration,
    silent: Duration,
    reported: u32,
    /// The silence that is reported next.
    due: Duration,
    ticked: Option<Instant>,
}

/// Interval of [`Silence::tick`].
pub const SILENCE_TICK: Duration = Duration::from_millis(100);
/// A leader asks each copy four times in its right's term: it was stopped, or has died.
const SILENT: Duration = Duration::from_millis(1_500);
/// Until a coordinator leads that knows of it.
const REPORT_AGAIN: Backoff = Backoff { first: Duration::from_millis(400), max: Duration::from_secs(1) };
/// A leader that was followed for less is left to the coordinator: on a machine with too much to do, the lead
/// must not go from one copy to the next.
const FOLLOWED_MIN: Duration = Duration::from_secs(10);

impl Silence {
    /// `followed`: the leader's epoch, and the number of its requests so far. Returns the silence that is to
    /// be reported now: at first, and in growing intervals.
    pub fn tick(&mut self, now: Instant, (epoch, requests): (Epoch, u64)) -> Option<Duration> {
        let passed = self.ticked.map_or(Duration::ZERO, |before| now.since(before).min(2 * SILENCE_TICK));
        if epoch != self.epoch {
            *self = Silence { epoch, requests, ticked: Some(now), ..Silence::default() };
            return None;
        }
        self.ticked = Some(now);
        if requests != self.requests {
            let followed = self.followed + self.silent + passed;
            let (epoch, ticked) = (self.epoch, self.ticked);
            *self = Silence { epoch, requests, followed, ticked, ..Silence::default() };
            return None;
        }
        self.silent += passed;
        if self.followed < FOLLOWED_MIN || self.silent < self.due.max(SILENT) {
            return None;
        }
        self.due = self.silent + REPORT_AGAIN.pause(self.reported, 0);
        self.reported += 1;
        Some(self.silent)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum CopyState {
    Current,
    Behind,
    /// The leader has reported to the coordinator that it caught up, and waits for it from then on.
    ReportedCaughtUp,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Other {
    state: CopyState,
    /// Its newest synced record of those that it shares with the leader.
    kept: CommitSeq,
    /// Until then its promise holds that it knows no newer epoch.
    right_until: Instant,
}

/// The leader's knowledge of the other members, under one epoch. It ends with the epoch, and with the
/// process.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Lead<I: Ord> {
    epoch: Epoch,
    copies: usize,
    others: BTreeMap<I, Other>,
}

impl<I: Copy + Ord + std::fmt::Display> Lead<I> {
    /// See [`may_lead`].
    pub fn new(group: &JournalGroup<I>, me: I) -> Lead<I> {
        let others = group.members.iter().filter(|m| m.id != me).filter_map(|m| {
            let state = match m.state {
                MemberState::Current => CopyState::Current,
                MemberState::Behind => CopyState::Behind,
                MemberState::Down => return None,
            };
            Some((m.id, Other { state, kept: CommitSeq(0), right_until: Instant(0) }))
        });
        Lead { epoch: group.epoch, copies: group.members.len(), others: others.collect() }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The receivers of records: all members that are not down.
    pub fn others(&self) -> impl Iterator<Item = I> {
        self.others.keys().copied()
    }

    /// The members that must have a record before it is durable, in addition to the leader.
    pub fn must_keep(&self) -> impl Iterator<Item = I> {
        self.counting().map(|(id, _)| *id)
    }

    fn counting(&self) -> impl Iterator<Item = (&I, &Other)> {
        self.others.iter().filter(|(_, other)| other.state != CopyState::Behind)
    }

    fn other(&mut self, id: I, epoch: Epoch) -> Result<&mut Other> {
        if epoch != self.epoch {
            return Err(Error::stale(format!("{id} answers under {epoch}; the leader's is {}", self.epoch)));
        }
        self.others.get_mut(&id).ok_or_else(|| Error::invalid(format!("{id} takes no records of {epoch}")))
    }

    /// A member has synced the leader's records up to `seq`.
    pub fn kept(&mut self, id: I, epoch: Epoch, seq: CommitSeq) -> Result<()> {
        let other = self.other(id, epoch)?;
        other.kept = other.kept.max(seq);
        Ok(())
    }

    /// A member knew no newer epoch when it answered the request that was sent at `asked`.
    pub fn note_answer(&mut self, id: I, epoch: Epoch, asked: Instant) -> Result<()> {
        let other = self.other(id, epoch)?;
        other.right_until = other.right_until.max(asked + RIGHT);
        Ok(())
    }

    /// A member reports a newer epoch, or its link ended: its promise counts no more.
    pub fn forget_answer(&mut self, id: I) {
        if let Some(other) = self.others.get_mut(&id) {
            other.right_until = Instant(0);
        }
    }

    /// The newest record that the other copies hold for certain; the leader's own sync is required in
    /// addition.
    pub fn kept_by_all(&self) -> CommitSeq {
        self.counting().map(|(_, other)| other.kept).min().unwrap_or(CommitSeq(u64::MAX))
    }

    /// The newest record that a member holds.
    pub fn kept_by(&self, id: I) -> Option<CommitSeq> {
        self.others.get(&id).map(|other| other.kept)
    }

    /// Whether the leader may acknowledge that a record is durable.
    pub fn may_acknowledge(&self, promise: &Promise, now: Instant) -> bool {
        1 + self.counting().count() >= floor(self.copies) && !promise.binds(now)
    }

    /// Whether the leader may answer from its state: no other member can have acknowledged anything since.
    pub fn may_answer(&self, now: Instant) -> bool {
        self.answers_until().is_none_or(|until| now < until)
    }

    /// The time until which it may; none: without limit.
    pub fn answers_until(&self) -> Option<Instant> {
        self.counting().map(|(_, other)| other.right_until).min()
    }

    /// The time until which a member's promise counts.
    pub fn right_of(&self, id: I) -> Option<Instant> {
        self.others.get(&id).map(|other| other.right_until)
    }

    /// Whether to report to the coordinator that a member which was behind holds all records up to `last`,
    /// the newest one. The leader waits for it from now on: the map may declare it current at any time.
    pub fn report_caught_up(&mut self, id: I, last: CommitSeq) -> bool {
        let Some(other) = self.others.get_mut(&id) else { return false };
        let caught_up = other.state != CopyState::Current && other.kept >= last;
        if caught_up {
            other.state = CopyState::ReportedCaughtUp;
        }
        caught_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_is_silent_while_its_copy_runs_and_gets_nothing() {
        const NONE: [u64; 0] = [];
        let (mut silence, mut now, mut requests) = (Silence::default(), Instant(0), 0);
        let mut run = |silence: &mut Silence, ticks: u32, asks: bool, epoch: u64| -> Vec<u64> {
            let mut reported = Vec::new();
            for _ in 0..ticks {
                now = now + SILENCE_TICK;
                requests += u64::from(asks);
                let due = silence.tick(now, (Epoch(epoch), requests));
                reported.extend(due.map(|silent| silent.as_millis() as u64));
            }
            reported
        };
        assert_eq!(run(&mut silence, 200, true, 7), NONE);
        // At first, and in growing intervals.
        assert_eq!(run(&mut silence, 60, false, 7), [1500, 1900, 2700, 3700, 4700, 5700]);
        assert_eq!(run(&mut silence, 1, true, 7), NONE);
        assert_eq!(run(&mut silence, 14, false, 7), NONE, "it has asked");
        assert_eq!(run(&mut silence, 1, true, 7), NONE);
        // Another leader is left to the coordinator at first.
        assert_eq!(run(&mut silence, 50, true, 8), NONE);
        assert_eq!(run(&mut silence, 100, false, 8), NONE);
        assert_eq!(run(&mut silence, 100, true, 8), NONE);
        assert_eq!(run(&mut silence, 15, false, 8), [1500]);
        // This process did not run: a stopped one has received nothing from a leader that is well.
        assert_eq!(run(&mut silence, 1, true, 8), NONE);
        now = now + Duration::from_secs(60);
        assert_eq!(silence.tick(now, (Epoch(8), requests)), None);
    }
}
