//! The files of one relation that movers have work on, each with its state and ranges.
//!
//! Always holds: each state follows from the one before by the table of `file_state`. In memory only: after a
//! restart no file is held here, and all are ahead of the sweep.
use crate::dirty::FINISH;
use crate::file_state::{Event, FileState};
use crate::ready::Ready;
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::{InodeId, SessionId};

/// A range that a mover has, or the end of a file, which starts at `FINISH`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentOut {
    pub end: u64,
    /// The newest change in it.
    pub mark: u64,
    /// The size that goes with the end.
    pub finish: Option<u64>,
}

#[derive(Debug)]
struct Held {
    state: FileState,
    /// Assigned ranges by their start.
    ranges: BTreeMap<u64, ExtentOut>,
    /// A change of its name waits for the assigned ranges: it gets no more.
    drains: bool,
}

#[derive(Default, Debug)]
pub struct Files {
    held: BTreeMap<InodeId, Held>,
    pub ready: Ready,
}

impl Files {
    /// The state of a file, as far as it is known without its records: a file in conflict is at rest.
    pub fn state(&self, ino: InodeId) -> FileState {
        match self.held.get(&ino) {
            Some(held) => held.state,
            None if self.ready.has(ino) => FileState::Dirty,
            None => FileState::Idle,
        }
    }

    /// # Panics
    /// If the event cannot happen in the file's state: then two movers could write one file.
    fn apply(&mut self, ino: InodeId, event: Event) {
        let before = self.state(ino);
        let Some(after) = before.after(event) else { panic!("inode {ino}: {event:?} in {before:?}") };
        match after {
            FileState::Idle | FileState::Dirty | FileState::Conflict => drop(self.held.remove(&ino)),
            state => {
                let new = || Held { state, ranges: BTreeMap::new(), drains: false };
                self.held.entry(ino).or_insert_with(new).state = state;
            }
        }
    }

    // ---- ranges

    pub fn assign_range(&mut self, ino: InodeId, mover: SessionId, start: u64, range: ExtentOut) {
        let is_end = start == FINISH;
        self.apply(ino, if is_end { Event::EndAssigned { mover } } else { Event::RangeAssigned { mover } });
        assert!(is_end || !self.overlaps(ino, start, range.end), "inode {ino}: {start} is assigned twice");
        let held = self.held.get_mut(&ino).expect("a mover has it now");
        let earlier = held.ranges.insert(start, range);
        assert!(earlier.is_none(), "inode {ino}: the range at {start} is assigned twice");
    }

    /// The range at `start`, if this mover has it.
    pub fn range_of(&self, mover: SessionId, ino: InodeId, start: u64) -> Option<ExtentOut> {
        self.held.get(&ino).filter(|held| mover_of(held.state) == Some(mover))?.ranges.get(&start).copied()
    }

    /// The mover does not have this range any more; the file is checked again. Returns whether the mover had
    /// it.
    pub fn return_range(&mut self, mover: SessionId, ino: InodeId, start: u64) -> bool {
        if self.range_of(mover, ino, start).is_none() {
            return false;
        }
        let is_last = self.held.get_mut(&ino).is_some_and(|held| {
            held.ranges.remove(&start);
            held.ranges.is_empty()
        });
        let is_end = start == FINISH;
        self.apply(
            ino,
            if is_end { Event::EndReturned { is_last } } else { Event::RangeReturned { is_last } },
        );
        self.touch(ino);
        true
    }

    /// Assigned ranges of a file by their start, its end last.
    pub fn ranges(&self, ino: InodeId) -> impl Iterator<Item = (u64, ExtentOut)> {
        let held = self.held.get(&ino).into_iter();
        held.flat_map(|held| held.ranges.iter().map(|(start, range)| (*start, *range)))
    }
    /// Whether a part of `start..end` is assigned.
    pub fn overlaps(&self, ino: InodeId, start: u64, end: u64) -> bool {
        // Assigned ranges do not overlap: the last one that begins before `end` ends last.
        let held = self.held.get(&ino);
        let last = held.and_then(|held| held.ranges.range(..end).next_back());
        last.is_some_and(|(_, range)| range.end > start)
    }
    pub fn has_ranges(&self, ino: InodeId) -> bool {
        self.held.get(&ino).is_some_and(|held| !held.ranges.is_empty())
    }
    /// The movers that have ranges.
    pub fn shippers(&self) -> impl Iterator<Item = SessionId> {
        let with_ranges = self.held.values().filter(|held| !held.ranges.is_empty());
        with_ranges.filter_map(|held| mover_of(held.state))
    }
    pub fn any_ranges(&self) -> bool {
        self.held.values().any(|held| !held.ranges.is_empty())
    }

    // ---- changes of names that wait for ranges

    /// No more ranges are assigned before the next request, because a change of its name waits for them.
    pub fn drain(&mut self, ino: InodeId) {
        self.held.get_mut(&ino).into_iter().for_each(|held| held.drains = true);
    }
    pub fn drains(&self, ino: InodeId) -> bool {
        self.held.get(&ino).is_some_and(|held| held.drains)
    }
    pub fn end_drains(&mut self) {
        self.held.values_mut().for_each(|held| held.drains = false);
    }

    // ---- changes of names and places

    /// A file without ranges changes its place before it gets any.
    pub fn plan_change(&mut self, ino: InodeId) {
        self.apply(ino, Event::ChangePlanned);
    }
    /// Only these are planned now.
    pub fn keep_plans(&mut self, planned: &BTreeSet<InodeId>) {
        let is_over = |(ino, held): &(&InodeId, &Held)| {
            held.state == FileState::Relocating { mover: None } && !planned.contains(ino)
        };
        for ino in self.held.iter().filter(is_over).map(|(ino, _)| *ino).collect::<Vec<_>>() {
            self.apply(ino, Event::PlanDropped);
            self.touch(ino);
        }
    }
    pub fn assign_change(&mut self, ino: InodeId, mover: SessionId) {
        self.apply(ino, Event::ChangeAssigned { mover });
    }
    /// Its mover has reported the change.
    pub fn return_change(&mut self, ino: InodeId) {
        self.apply(ino, Event::ChangeReturned);
    }

    // ---- all

    /// A file has changed, or a mover's work on it.
    pub fn touch(&mut self, ino: InodeId) {
        self.apply(ino, Event::Touched);
        self.ready.touch(ino, self.has_ranges(ino));
    }
    /// A file was checked; nothing is left to assign until it is touched.
    pub fn settle(&mut self, ino: InodeId, in_conflict: bool) {
        self.apply(ino, Event::Settled { in_conflict });
    }

    /// Nothing is with this mover any more; returns whether anything was.
    pub fn end_mover(&mut self, mover: SessionId) -> bool {
        let own = self.held.iter().filter(|(_, held)| mover_of(held.state) == Some(mover));
        let own: Vec<InodeId> = own.map(|(ino, _)| *ino).collect();
        own.iter().for_each(|ino| self.apply(*ino, Event::MoverEnded));
        !own.is_empty()
    }

    /// Panics where an invariant of this table does not hold. `changing`: files that assigned changes of
    /// names concern, with the movers of these changes.
    pub fn check(&self, changing: &BTreeMap<InodeId, SessionId>) {
        for (ino, held) in &self.held {
            let has_end = held.ranges.contains_key(&FINISH);
            let is_consistent = match held.state {
                FileState::Shipping { .. } => !held.ranges.is_empty() && !has_end,
                FileState::Finishing { .. } => has_end,
                FileState::Relocating { mover } => {
                    held.ranges.is_empty() && changing.get(ino).copied() == mover
                }
                FileState::Idle | FileState::Dirty | FileState::Conflict => false,
            };
            assert!(is_consistent, "inode {ino}: {held:?}");
            let overlaps =
                held.ranges.iter().zip(held.ranges.iter().skip(1)).any(|((_, a), (b, _))| a.end > *b);
            assert!(!overlaps, "inode {ino}: a byte is assigned twice: {held:?}");
        }
        for (ino, mover) in changing {
            let state = FileState::Relocating { mover: Some(*mover) };
            assert_eq!(self.state(*ino), state, "inode {ino} has a change of its name assigned");
        }
    }
}

fn mover_of(state: FileState) -> Option<SessionId> {
    match state {
        FileState::Shipping { mover } | FileState::Finishing { mover } => Some(mover),
        FileState::Relocating { mover } => mover,
        FileState::Idle | FileState::Dirty | FileState::Conflict => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FileState::*;

    const FILE: InodeId = InodeId(7);
    const ONE: SessionId = SessionId(1);
    const TWO: SessionId = SessionId(2);

    fn range(end: u64) -> ExtentOut {
        ExtentOut { end, mark: 1, finish: None }
    }

    #[test]
    fn a_file_is_shipped_to_its_end_by_one_mover() {
        let mut files = Files::default();
        files.assign_range(FILE, ONE, 0, range(10));
        files.assign_range(FILE, ONE, FINISH, range(FINISH));
        assert_eq!(files.state(FILE), Finishing { mover: ONE });
        assert!(!files.return_range(TWO, FILE, 0), "it is not the other's");
        assert!(files.return_range(ONE, FILE, FINISH) && files.any_ranges());
        assert_eq!(files.state(FILE), Shipping { mover: ONE });
        files.check(&BTreeMap::new());
        assert!(files.return_range(ONE, FILE, 0) && !files.return_range(ONE, FILE, 0));
        assert_eq!((files.state(FILE), files.has_ranges(FILE)), (Dirty, false), "it is checked again");
    }

    #[test]
    fn a_range_overlaps_those_that_share_a_byte_with_it() {
        let mut files = Files::default();
        assert!(!files.overlaps(FILE, 0, u64::MAX), "nothing is assigned");
        files.assign_range(FILE, ONE, 10, range(20));
        files.assign_range(FILE, ONE, 30, range(40));
        for (start, end) in (0..50).flat_map(|start| (start + 1..=50).map(move |end| (start, end))) {
            let shares = (start < 20 && end > 10) || (start < 40 && end > 30);
            assert_eq!(files.overlaps(FILE, start, end), shares, "{start}..{end}");
        }
    }

    #[test]
    fn the_work_of_a_mover_that_ends_is_at_rest() {
        let mut files = Files::default();
        files.assign_range(FILE, ONE, 0, range(10));
        files.assign_change(InodeId(8), ONE);
        files.assign_change(InodeId(9), TWO);
        assert!(files.end_mover(ONE) && !files.end_mover(ONE));
        files.check(&BTreeMap::from([(InodeId(9), TWO)]));
        files.assign_range(FILE, TWO, 0, range(10));
    }

    #[test]
    fn a_plan_that_is_not_repeated_is_dropped() {
        let mut files = Files::default();
        files.plan_change(FILE);
        files.plan_change(InodeId(8));
        files.assign_change(InodeId(8), ONE);
        files.keep_plans(&BTreeSet::from([FILE]));
        assert!(!files.state(FILE).may_ship(ONE, false));
        files.keep_plans(&BTreeSet::new());
        assert!(files.state(FILE).may_ship(ONE, false));
        assert_eq!(files.state(InodeId(8)), Relocating { mover: Some(ONE) });
    }

    #[test]
    #[should_panic(expected = "RangeAssigned")]
    fn a_second_mover_of_a_file_is_a_bug() {
        let mut files = Files::default();
        files.assign_range(FILE, ONE, 0, range(10));
        files.assign_range(FILE, TWO, 10, range(20));
    }
}
