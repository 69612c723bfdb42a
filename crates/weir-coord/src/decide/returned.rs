//! Whether a target that joins still has its data: its index contains the last run that was admitted, up to
//! the position reported here.
//!
//! The order of records ensures it. A run is recorded in the index before the target joins, admitted here
//! durably, recorded there as admitted, and only then serves. So the index of a target that served in the
//! last admitted run contains that run. After a crash in between it is among the runs that began. An index
//! that is new, and a copy from before that run began, lack it after any number of starts. A copy made
//! during that run is recognized by its position, as far as that was reported.
use weir_proto::coord::TargetHistory;
use weir_proto::map::{Run, RunSeen, Target};

/// How a joining target compares with the map's record of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Returned {
    /// It is the process that had joined before.
    SameRun,
    /// It lost nothing. Also a target that has newer runs than the map: then the map is an old copy.
    Whole,
    /// The right disk is back after another one served in its place: it has all data that was missing there.
    PutBack,
    /// Why it lacks its data, for the log.
    Lost(&'static str),
}

pub fn returned(known: &Target, history: &TargetHistory) -> Returned {
    if history.run == known.last.run.id {
        return Returned::SameRun;
    }
    if history.confirmed.number > known.last.run.number {
        return Returned::Whole;
    }
    match (lacks(&known.last, history), lacks(&known.whole, history)) {
        (None, _) => Returned::Whole,
        (Some(_), None) => Returned::PutBack,
        (Some(why), Some(_)) => Returned::Lost(why),
    }
}

fn lacks(seen: &RunSeen, history: &TargetHistory) -> Option<&'static str> {
    if seen.run == Run::default() {
        return Some("nothing is known of it");
    }
    if history.confirmed != seen.run && !history.begun.contains(&seen.run.id) {
        let is_new = history.confirmed == Run::default();
        return Some(if is_new { "its index is new" } else { "its index is an older copy" });
    }
    (history.position < seen.position).then_some("its index has less than it reported")
}

/// The run that is now admitted.
pub fn next_run(known: Run, history: &TargetHistory) -> Run {
    Run { number: known.number.max(history.confirmed.number) + 1, id: history.run }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::TargetState;
    use weir_proto::{DiskUuid, NodeId, RunId, TargetId};

    fn run(number: u64, id: u64) -> Run {
        Run { number, id: RunId(id) }
    }

    fn target(last: RunSeen, whole: RunSeen) -> Target {
        Target {
            id: TargetId(1),
            uuid: DiskUuid([1; 16]),
            node: NodeId(1),
            pool: "hdd".into(),
            state: TargetState::Down,
            capacity: 1,
            last,
            whole,
        }
    }

    #[test]
    fn a_target_is_whole_only_if_it_knows_all_of_its_last_run() {
        // In the map: run 5 with the id 50, up to position 100.
        let known = target(RunSeen { run: run(5, 50), position: 100 }, RunSeen::default());
        for (what, confirmed, begun, id, position, is_whole) in [
            ("the next run", run(5, 50), vec![], 60, 100, true),
            ("it continued after its last report", run(5, 50), vec![], 60, 170, true),
            ("some starts came to nothing", run(5, 50), vec![57, 58, 59], 60, 100, true),
            ("it died between the admission and its own record", run(4, 40), vec![50], 60, 100, true),
            ("it died there, after starts that came to nothing", run(4, 40), vec![48, 50, 51], 60, 101, true),
            ("what is known here is an old copy", run(7, 70), vec![], 80, 20, true),
            ("the same process again, with any position at its start", run(4, 40), vec![], 50, 10, true),
            ("emptied", run(0, 0), vec![], 60, 0, false),
            ("emptied, started several times", run(0, 0), vec![55, 56, 57, 58, 59], 60, 300, false),
            ("a copy from before the last run", run(4, 40), vec![], 60, 90, false),
            ("a copy from before the last run, with more in its journal", run(4, 40), vec![], 60, 900, false),
            (
                "a copy from before the last run, started several times",
                run(4, 40),
                vec![56, 57, 58, 59],
                60,
                900,
                false,
            ),
            ("a copy from after a start that came to nothing", run(4, 40), vec![49], 60, 99, false),
            ("a copy from long ago", run(1, 10), vec![], 60, 5, false),
            ("a copy from within the last run", run(5, 50), vec![], 60, 99, false),
            ("a copy that another coordinator admitted", run(5, 51), vec![], 60, 100, false),
        ] {
            let history = TargetHistory {
                confirmed,
                begun: begun.into_iter().map(RunId).collect(),
                run: RunId(id),
                position,
            };
            let found = returned(&known, &history);
            assert_eq!(!matches!(found, Returned::Lost(_)), is_whole, "{what}: {found:?}");
        }
    }

    #[test]
    fn the_right_disk_is_known_when_it_is_put_back() {
        // Run 2 had all data; in runs 3 to 5 another disk was in its place.
        let whole = RunSeen { run: run(2, 20), position: 70 };
        let known = target(RunSeen { run: run(5, 50), position: 10 }, whole);
        for (what, confirmed, begun, position, expected) in [
            ("the refill continues", run(5, 50), vec![], 10, Returned::Whole),
            ("the right disk", run(2, 20), vec![], 70, Returned::PutBack),
            (
                "the right disk, which died before it wrote down its last run",
                run(1, 10),
                vec![20],
                71,
                Returned::PutBack,
            ),
            ("an older copy of it", run(1, 10), vec![], 90, Returned::Lost("its index is an older copy")),
            (
                "a copy from within its last run",
                run(2, 20),
                vec![],
                69,
                Returned::Lost("its index is an older copy"),
            ),
            (
                "a copy of what is refilled",
                run(4, 40),
                vec![],
                90,
                Returned::Lost("its index is an older copy"),
            ),
            ("nothing", run(0, 0), vec![], 90, Returned::Lost("its index is new")),
        ] {
            let begun = begun.into_iter().map(RunId).collect();
            let history = TargetHistory { confirmed, begun, run: RunId(60), position };
            assert_eq!(returned(&known, &history), expected, "{what}");
        }
    }

    #[test]
    fn numbers_of_runs_only_rise() {
        let history = |confirmed| TargetHistory { confirmed, run: RunId(9), ..TargetHistory::default() };
        assert_eq!(next_run(run(5, 50), &history(run(5, 50))), run(6, 9));
        assert_eq!(next_run(run(5, 50), &history(run(0, 0))), run(6, 9));
        assert_eq!(next_run(run(5, 50), &history(run(8, 80))), run(9, 9));
    }
}
