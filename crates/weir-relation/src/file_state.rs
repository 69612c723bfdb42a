//! The state of one file at one home, and the table of its transitions. Pure.
//!
//! Always holds: at most one mover has work on a file: ranges of it, or one change of its name. Home cannot
//! distinguish a late writer from the present one.
use weir_proto::SessionId;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FileState {
    /// No work is left for movers until the file is touched.
    Idle,
    /// It may have work that no mover has: it is touched, or still ahead of the sweep.
    Dirty,
    /// A mover has ranges of it.
    Shipping { mover: SessionId },
    /// A mover has its end, and perhaps its last ranges.
    Finishing { mover: SessionId },
    /// Its name or its place at home changes: no ranges are assigned. `mover` has the change; none: not yet.
    Relocating { mover: Option<SessionId> },
    /// An administrator decides; until then nothing is shipped.
    Conflict,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    /// Its bytes, its name or an obstacle to its work have changed.
    Touched,
    /// It was checked: nothing is left to assign until it is touched.
    Settled { in_conflict: bool },
    /// A mover gets a range.
    RangeAssigned { mover: SessionId },
    /// A mover gets its end.
    EndAssigned { mover: SessionId },
    /// A mover's range is reported. `is_last`: the mover has nothing else of it.
    RangeReturned { is_last: bool },
    /// A mover's end is reported.
    EndReturned { is_last: bool },
    /// A relocation, or a removal before its turn, is planned.
    ChangePlanned,
    /// The plan is void, or done.
    PlanDropped,
    /// A mover gets a change of its name or place.
    ChangeAssigned { mover: SessionId },
    /// That change is reported.
    ChangeReturned,
    /// The mover has ended.
    MoverEnded,
}

impl FileState {
    /// The state after an event; none: the event cannot happen in this state.
    pub fn after(self, event: Event) -> Option<FileState> {
        use FileState::*;
        Some(match (self, event) {
            (Idle | Dirty | Conflict, Event::Touched) => Dirty,
            (Shipping { .. } | Finishing { .. } | Relocating { .. }, Event::Touched) => self,

            (Idle | Dirty | Conflict, Event::Settled { in_conflict: true }) => Conflict,
            (Idle | Dirty | Conflict, Event::Settled { in_conflict: false }) => Idle,
            // One of several ranges may have been refused.
            (Shipping { .. } | Finishing { .. }, Event::Settled { .. }) => self,
            (Relocating { .. }, Event::Settled { .. }) => return None,

            // A part, or the end, may be due early: a file is finished before its name changes.
            (Idle | Dirty, Event::RangeAssigned { mover }) => Shipping { mover },
            (Idle | Dirty, Event::EndAssigned { mover }) => Finishing { mover },
            (Shipping { mover: own } | Finishing { mover: own }, Event::RangeAssigned { mover })
                if own == mover =>
            {
                self
            }
            (Shipping { mover: own }, Event::EndAssigned { mover }) if own == mover => Finishing { mover },
            (_, Event::RangeAssigned { .. } | Event::EndAssigned { .. }) => return None,

            (Shipping { .. }, Event::RangeReturned { is_last: true }) => Dirty,
            (Shipping { .. } | Finishing { .. }, Event::RangeReturned { is_last: false }) => self,
            (Finishing { .. }, Event::EndReturned { is_last: true }) => Dirty,
            (Finishing { mover }, Event::EndReturned { is_last: false }) => Shipping { mover },
            (_, Event::RangeReturned { .. } | Event::EndReturned { .. }) => return None,

            (Idle | Dirty | Conflict, Event::ChangePlanned) => Relocating { mover: None },
            (Relocating { .. }, Event::ChangePlanned) => self,
            (Shipping { .. } | Finishing { .. }, Event::ChangePlanned) => return None,
            (Relocating { mover: None }, Event::PlanDropped) => Dirty,
            (_, Event::PlanDropped) => return None,

            // A file in conflict may be replaced by another one.
            (Idle | Dirty | Conflict | Relocating { mover: None }, Event::ChangeAssigned { mover }) => {
                Relocating { mover: Some(mover) }
            }
            (_, Event::ChangeAssigned { .. }) => return None,
            (Relocating { mover: Some(_) }, Event::ChangeReturned) => Dirty,
            (_, Event::ChangeReturned) => return None,

            (Shipping { .. } | Finishing { .. } | Relocating { mover: Some(_) }, Event::MoverEnded) => Dirty,
            (_, Event::MoverEnded) => return None,
        })
    }

    /// Whether ranges may go to this mover now. `one_batch`: home accepts whole parts only. The next mover
    /// must know where the parts are, and the leader knows that with the last of them.
    pub fn may_ship(self, to: SessionId, one_batch: bool) -> bool {
        match self {
            FileState::Idle | FileState::Dirty => true,
            FileState::Shipping { mover } | FileState::Finishing { mover } => mover == to && !one_batch,
            FileState::Relocating { .. } | FileState::Conflict => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FileState::*;

    const ONE: SessionId = SessionId(1);
    const TWO: SessionId = SessionId(2);
    const PLANNED: FileState = Relocating { mover: None };
    const MOVED: FileState = Relocating { mover: Some(ONE) };
    const SHIPPING: FileState = Shipping { mover: ONE };
    const FINISHING: FileState = Finishing { mover: ONE };

    const STATES: [FileState; 7] = [Idle, Dirty, SHIPPING, FINISHING, PLANNED, MOVED, Conflict];

    /// Each event with the state after it, for each of `STATES`; none: a bug.
    #[rustfmt::skip]
    const TABLE: [(Event, [Option<FileState>; 7]); 17] = {
        use Event::*;
        const NO: Option<FileState> = None;
        const D: Option<FileState> = Some(Dirty);
        const S: Option<FileState> = Some(SHIPPING);
        const F: Option<FileState> = Some(FINISHING);
        const P: Option<FileState> = Some(PLANNED);
        const M: Option<FileState> = Some(MOVED);
        const I: Option<FileState> = Some(Idle);
        const C: Option<FileState> = Some(Conflict);
        const S2: Option<FileState> = Some(Shipping { mover: TWO });
        const F2: Option<FileState> = Some(Finishing { mover: TWO });
        const M2: Option<FileState> = Some(Relocating { mover: Some(TWO) });
        [   //                                      idle dirty shipping finishing planned moved conflict
            (Touched,                               [D,  D,    S,       F,        P,      M,    D]),
            (Settled { in_conflict: false },        [I,  I,    S,       F,        NO,     NO,   I]),
            (Settled { in_conflict: true },         [C,  C,    S,       F,        NO,     NO,   C]),
            (RangeAssigned { mover: ONE },          [S,  S,    S,       F,        NO,     NO,   NO]),
            (RangeAssigned { mover: TWO },          [S2, S2,   NO,      NO,       NO,     NO,   NO]),
            (EndAssigned { mover: ONE },            [F,  F,    F,       NO,       NO,     NO,   NO]),
            (EndAssigned { mover: TWO },            [F2, F2,   NO,      NO,       NO,     NO,   NO]),
            (RangeReturned { is_last: false },      [NO, NO,   S,       F,        NO,     NO,   NO]),
            (RangeReturned { is_last: true },       [NO, NO,   D,       NO,       NO,     NO,   NO]),
            (EndReturned { is_last: false },        [NO, NO,   NO,      S,        NO,     NO,   NO]),
            (EndReturned { is_last: true },         [NO, NO,   NO,      D,        NO,     NO,   NO]),
            (ChangePlanned,                         [P,  P,    NO,      NO,       P,      M,    P]),
            (PlanDropped,                           [NO, NO,   NO,      NO,       D,      NO,   NO]),
            (ChangeAssigned { mover: ONE },         [M,  M,    NO,      NO,       M,      NO,   M]),
            (ChangeAssigned { mover: TWO },         [M2, M2,   NO,      NO,       M2,     NO,   M2]),
            (ChangeReturned,                        [NO, NO,   NO,      NO,       NO,     D,    NO]),
            (MoverEnded,                            [NO, NO,   D,       D,        NO,     D,    NO]),
        ]
    };

    #[test]
    fn each_state_has_one_answer_to_each_event() {
        for (event, row) in TABLE {
            for (state, after) in STATES.into_iter().zip(row) {
                assert_eq!(state.after(event), after, "{event:?} in {state:?}");
            }
        }
        let kinds: std::collections::BTreeSet<_> = TABLE.iter().map(|(event, _)| event).collect();
        assert_eq!(kinds.len(), TABLE.len());
    }

    #[test]
    fn from_each_state_a_file_can_become_idle() {
        for state in STATES {
            let (mut reached, mut left) = (std::collections::BTreeSet::from([state]), vec![state]);
            while let Some(state) = left.pop() {
                let next = TABLE.iter().filter_map(|(event, _)| state.after(*event));
                left.extend(next.filter(|state| reached.insert(*state)).collect::<Vec<_>>());
            }
            assert!(reached.contains(&Idle), "{state:?}");
        }
    }

    #[test]
    fn a_second_mover_never_gets_a_file() {
        for state in STATES {
            let held = matches!(state, Shipping { .. } | Finishing { .. } | Relocating { .. });
            assert_eq!(state.may_ship(TWO, false), !held && state != Conflict, "{state:?}");
            let ranges = matches!(state, Shipping { .. } | Finishing { .. });
            assert_eq!(state.may_ship(ONE, false), state.may_ship(TWO, false) || ranges, "{state:?}");
            assert_eq!(state.may_ship(ONE, true), state.may_ship(TWO, false), "{state:?}");
        }
    }
}
