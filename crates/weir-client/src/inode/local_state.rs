//! The state of a file whose create or removal the leader may not know of, and the table of its
//! transitions. Pure.
//!
//! A file that was removed before its create was reported is never reported. A file whose create is being
//! reported is not removed locally: the leader is asked, after the report.

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum LocalState {
    /// Nothing is unreported: the leader knows of it, or never will.
    #[default]
    Known,
    /// It was created here: unreported.
    Created,
    /// The report of its create is in flight.
    Reporting,
    /// The report failed, and is not repeated.
    Lost,
    /// It was removed here: unreported.
    Removed,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LocalEvent {
    Create,
    ReportBegins,
    /// The leader has created it.
    Reported,
    /// The report failed, or the right to send it was lost.
    ReportLost,
    /// It is removed before its create was reported.
    Cancel,
    Remove,
    /// The leader has removed it, or refused to, or the right to report it was lost.
    RemovalEnds,
}

impl LocalState {
    /// The state after an event; none: the event cannot happen in this state.
    pub fn after(self, event: LocalEvent) -> Option<LocalState> {
        use LocalEvent::*;
        use LocalState::*;
        Some(match (self, event) {
            (Known, Create) => Created,
            (Created, ReportBegins) => Reporting,
            (Reporting, Reported) => Known,
            (Created | Reporting, ReportLost) => Lost,
            (Created, Cancel) => Known,
            (Known, Remove) => Removed,
            (Removed, RemovalEnds) => Known,
            (_, Create | ReportBegins | Reported | ReportLost | Cancel | Remove | RemovalEnds) => {
                return None;
            }
        })
    }
    /// Whether the leader does not know of a change that is to be reported to it.
    pub fn is_unreported(self) -> bool {
        matches!(self, LocalState::Created | LocalState::Reporting | LocalState::Removed)
    }
    /// Whether the leader counts the opens of it.
    pub fn is_counted(self) -> bool {
        !matches!(self, LocalState::Created | LocalState::Lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LocalState::*;

    const STATES: [LocalState; 5] = [Known, Created, Reporting, Lost, Removed];

    /// Each event with the state after it, for each of `STATES`; none: a bug.
    #[rustfmt::skip]
    const TABLE: [(LocalEvent, [Option<LocalState>; 5]); 7] = {
        use LocalEvent::*;
        const NO: Option<LocalState> = None;
        const K: Option<LocalState> = Some(Known);
        [   //             known            created          reporting   lost  removed
            (Create,       [Some(Created),  NO,              NO,         NO,   NO]),
            (ReportBegins, [NO,             Some(Reporting), NO,         NO,   NO]),
            (Reported,     [NO,             NO,              K,          NO,   NO]),
            (ReportLost,   [NO,             Some(Lost),      Some(Lost), NO,   NO]),
            (Cancel,       [NO,             K,               NO,         NO,   NO]),
            (Remove,       [Some(Removed),  NO,              NO,         NO,   NO]),
            (RemovalEnds,  [NO,             NO,              NO,         NO,   K]),
        ]
    };

    #[test]
    fn each_state_has_one_answer_to_each_event() {
        for (event, row) in TABLE {
            for (state, after) in STATES.into_iter().zip(row) {
                assert_eq!(state.after(event), after, "{event:?} in {state:?}");
            }
        }
        let events: std::collections::BTreeSet<_> = TABLE.iter().map(|(event, _)| event).collect();
        assert_eq!(events.len(), TABLE.len());
    }

    /// A wait for the leader's knowledge of a file ends.
    #[test]
    fn from_each_unreported_state_a_file_becomes_known_or_lost() {
        for state in STATES {
            let next: Vec<_> = TABLE.iter().filter_map(|(event, _)| state.after(*event)).collect();
            match state {
                Created => assert_eq!(next, [Reporting, Lost, Known]),
                Reporting => assert_eq!(next, [Known, Lost]),
                Removed => assert_eq!(next, [Known]),
                Lost => assert!(next.is_empty(), "its handles have the error"),
                Known => assert_eq!(next, [Created, Removed]),
            }
            assert_eq!(state.is_unreported(), matches!(state, Created | Reporting | Removed));
        }
    }
}
