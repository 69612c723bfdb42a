//! The next work on a file: ranges to ship, bytes to recall first, and its end.
//!
//! Pure: facts in, work out. Bytes written after a change of size wait until home has applied that. The end
//! goes with the last range, or after it.
use crate::dirty::Ranges;
use crate::file_state::FileState;
use crate::files::ExtentOut;
use crate::parts::{self, Part};
use weir_proto::relation::EXTENT_MAX;

/// A file as it is now, at a relation.
pub struct Facts<'a> {
    /// Dirty ranges, in order.
    pub ranges: &'a Ranges,
    pub size: u64,
    /// The change with which it was complete, if home does not know that yet.
    pub finish: Option<u64>,
    /// The first change of size that home has not applied; `u64::MAX`: none.
    pub first_truncation: u64,
    /// Ranges that this mover has, by their start, without the end.
    pub out: &'a [(u64, ExtentOut)],
    /// Bytes that only another home has, whole stripes.
    pub evicted: &'a [(u64, u64)],
    /// Home accepts whole parts only.
    pub in_parts: bool,
    /// Its end is to be shipped even if it is not complete.
    pub ends_early: bool,
    /// Home has parts of it that are not visible there yet.
    pub unfinished: bool,
}

/// How much a mover accepts.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub bytes: u64,
    pub extents: usize,
    /// Ranges that may be recalled from another home.
    pub away: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub start: u64,
    pub len: u64,
    /// The newest change in it.
    pub mark: u64,
}

#[derive(PartialEq, Eq, Debug)]
pub struct Work {
    pub extents: Vec<Extent>,
    /// Bytes to recall from another home first.
    pub away: Vec<(u64, u64)>,
    /// The end of the file, with the newest change that it includes.
    pub end: Option<u64>,
    /// There is no more to assign until the file is touched.
    pub settled: bool,
    /// The mover's bytes that are left.
    pub bytes_left: u64,
}

/// `state`: one in which the mover may get ranges.
pub fn next_work(state: FileState, facts: &Facts<'_>, capacity: Capacity) -> Work {
    assert!(!matches!(state, FileState::Relocating { .. } | FileState::Conflict), "no ranges in {state:?}");
    let ends = facts.finish.is_some() || facts.ends_early;
    let due = match facts.in_parts {
        true => parts::whole(facts.ranges, facts.size, ends, facts.first_truncation),
        false => parts::as_written(facts.ranges, facts.size),
    };
    // Truncations finish, and bytes are recalled, without a touch of the file.
    let settled = facts.finish.is_none_or(|finish| finish < facts.first_truncation);
    let work = Work { extents: Vec::new(), away: Vec::new(), end: None, settled, bytes_left: capacity.bytes };
    let mut plan = Plan { state, facts, capacity, work, all_out: due.complete, held_up: false };
    due.parts.into_iter().for_each(|part| plan.add(part));
    plan.work.end = plan.end();
    plan.work
}

struct Plan<'a> {
    state: FileState,
    facts: &'a Facts<'a>,
    capacity: Capacity,
    work: Work,
    /// All dirty bytes are with this mover.
    all_out: bool,
    /// Dirty bytes before the end wait for something other than a change of size.
    held_up: bool,
}

impl Plan<'_> {
    fn is_full(&self) -> bool {
        self.work.bytes_left == 0 || self.work.extents.len() >= self.capacity.extents
    }

    /// Assigns what it can of a part, in order.
    fn add(&mut self, part: Part) {
        let facts = self.facts;
        let mut start = part.start;
        while start < part.end {
            let next = facts.out.partition_point(|(s, _)| *s <= start);
            if let Some((_, out)) = facts.out[..next].last().filter(|(_, out)| start < out.end) {
                // Later writes over it are shipped after its report; the end of the file after them.
                self.all_out &= out.mark >= part.newest;
                self.held_up |= out.mark < part.newest;
                start = out.end;
                continue;
            }
            if self.is_full() || part.newest > facts.first_truncation {
                self.held_up |= self.is_full();
                (self.all_out, self.work.settled) = (false, false);
                return;
            }
            let next_out = facts.out.get(next).map_or(u64::MAX, |(s, _)| *s);
            let most = if facts.in_parts { u64::MAX } else { EXTENT_MAX };
            let len = (part.end - start).min(most).min(next_out - start);
            if facts.evicted.iter().any(|(from, to)| *from < start + len && start < *to) {
                // At another home only: it is recalled, and shipped then.
                if self.work.away.len() < self.capacity.away {
                    self.work.away.push((start, start + len));
                }
                (self.all_out, self.held_up, self.work.settled) = (false, true, false);
                return;
            }
            self.work.bytes_left = self.work.bytes_left.saturating_sub(len);
            self.work.extents.push(Extent { start, len, mark: part.newest });
            start += len;
        }
    }

    /// The end is assigned with the last range, or after it: together only if this mover has all of it.
    fn end(&self) -> Option<u64> {
        let facts = self.facts;
        let mark = match (facts.finish, facts.ends_early) {
            (Some(finish), _) if finish < facts.first_truncation => finish,
            (_, true) => 0,
            _ => return None,
        };
        let ends_something = !self.work.extents.is_empty() || facts.unfinished;
        let is_due = self.all_out || facts.ends_early && !self.held_up && ends_something;
        let is_out = matches!(self.state, FileState::Finishing { .. });
        (is_due && !is_out).then_some(mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirty::DirtyRange;
    use crate::file_state::FileState::{Dirty, Finishing, Shipping};
    use weir_proto::SessionId;
    use weir_proto::meta::Time;

    const MOVER: SessionId = SessionId(1);
    const CAPACITY: Capacity = Capacity { bytes: u64::MAX, extents: 16, away: 1 };

    /// Ranges as start, end and newest change.
    fn ranges(all: &[(u64, u64, u64)]) -> Ranges {
        let since = Time { nanos: 0 };
        let range = |(start, end, newest): &(u64, u64, u64)| {
            (*start, DirtyRange { len: end - start, since, oldest: 1, newest: *newest })
        };
        all.iter().map(range).collect()
    }
    fn facts<'a>(ranges: &'a Ranges, out: &'a [(u64, ExtentOut)]) -> Facts<'a> {
        let (size, finish, first_truncation) = (100, Some(9), u64::MAX);
        let (in_parts, ends_early, unfinished) = (false, false, false);
        Facts { ranges, size, finish, first_truncation, out, evicted: &[], in_parts, ends_early, unfinished }
    }
    fn out(start: u64, end: u64, mark: u64) -> (u64, ExtentOut) {
        (start, ExtentOut { end, mark, finish: None })
    }
    fn starts(work: &Work) -> Vec<(u64, u64)> {
        work.extents.iter().map(|e| (e.start, e.start + e.len)).collect()
    }

    #[test]
    fn the_end_goes_with_the_last_range_and_once() {
        let dirty = ranges(&[(0, 40, 3), (60, 100, 5)]);
        let work = next_work(Dirty, &facts(&dirty, &[]), CAPACITY);
        assert_eq!((starts(&work), work.end, work.settled), (vec![(0, 40), (60, 100)], Some(9), true));
        let all = [out(0, 40, 3), out(60, 100, 5)];
        let work = next_work(Finishing { mover: MOVER }, &facts(&dirty, &all), CAPACITY);
        assert_eq!((starts(&work), work.end), (vec![], None), "the mover has all of it");
    }

    #[test]
    fn a_full_mover_gets_no_end_and_is_asked_again() {
        let dirty = ranges(&[(0, 40, 3), (60, 100, 5)]);
        let work = next_work(Dirty, &facts(&dirty, &[]), Capacity { extents: 1, ..CAPACITY });
        assert_eq!((starts(&work), work.end, work.settled), (vec![(0, 40)], None, false));
        let work = next_work(Dirty, &facts(&dirty, &[]), Capacity { bytes: 10, ..CAPACITY });
        assert_eq!((starts(&work), work.bytes_left), (vec![(0, 40)], 0), "at least one range goes");
    }

    #[test]
    fn bytes_behind_an_unapplied_truncation_wait() {
        let dirty = ranges(&[(0, 40, 3), (60, 100, 8)]);
        let work = next_work(Dirty, &Facts { first_truncation: 7, ..facts(&dirty, &[]) }, CAPACITY);
        assert_eq!((starts(&work), work.end, work.settled), (vec![(0, 40)], None, false));
    }

    #[test]
    fn a_range_in_flight_is_not_assigned_twice() {
        let (dirty, in_flight) = (ranges(&[(0, 100, 5)]), [out(20, 50, 4)]);
        let work = next_work(Shipping { mover: MOVER }, &facts(&dirty, &in_flight), CAPACITY);
        assert_eq!(starts(&work), [(0, 20), (50, 100)]);
        assert_eq!(work.end, None, "it was written again since");
    }

    #[test]
    fn bytes_at_another_home_are_recalled_first() {
        let dirty = ranges(&[(0, 40, 3), (60, 100, 5)]);
        let facts = Facts { evicted: &[(64, 80)], ..facts(&dirty, &[]) };
        let work = next_work(Dirty, &facts, CAPACITY);
        assert_eq!((starts(&work), &work.away[..]), (vec![(0, 40)], &[(60, 100)][..]));
        assert_eq!((work.end, work.settled), (None, false));
        assert_eq!(next_work(Dirty, &facts, Capacity { away: 0, ..CAPACITY }).away, []);
    }

    #[test]
    fn a_file_ends_early_only_if_something_is_to_be_finished() {
        let (none, some) = (ranges(&[]), ranges(&[(0, 40, 8)]));
        let ending_early = |dirty, unfinished| Facts {
            finish: None,
            first_truncation: 7,
            ends_early: true,
            unfinished,
            ..facts(dirty, &[])
        };
        assert_eq!(next_work(Dirty, &ending_early(&some, true), CAPACITY).end, Some(0));
        assert_eq!(next_work(Dirty, &ending_early(&some, false), CAPACITY).end, None);
        assert_eq!(next_work(Dirty, &ending_early(&none, false), CAPACITY).end, Some(0), "nothing is dirty");
    }
}
