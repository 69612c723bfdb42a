//! Signs of life (methods 78, 79 and 84): a process reports itself over the connection of its membership,
//! from a thread that waits for none of the process's work, and answers there when the coordinator asks.
//!
//! A coordinator or node of an older release does not know these methods: its answer is `Unsupported`, and it
//! continues with heartbeats and [`crate::data::StatTarget`] alone.
use crate::{NodeId, TargetId, message};

/// Answers that take this long are late if they usually take a small part of it,
const LATE_MS: u32 = 500;
/// this part;
const LATE_TIMES: u32 = 10;
/// and these in any case.
const VERY_LATE_MS: u32 = 3_000;

message!(
    /// Pressure of a machine, as Linux measures it: the part of the last ten seconds in which some task
    /// waited for a processor, a disk or memory, in hundredths of a per cent.
    #[derive(Copy, Default)]
    Pressure { cpu: u16, io: u16, memory: u16 }
);
message!(
    /// How fast a target answers now.
    #[derive(Copy, Default)]
    TargetLife {
        target: TargetId,
        /// Its disk failed.
        failed: bool,
        /// For how long its disk has completed none of its requests, ms; or the process has renewed no
        /// report.
        stalled_ms: u32,
        /// The age of the oldest of its disk's requests, ms.
        oldest_ms: u32,
        /// The requests that its process is serving.
        waiting: u32,
        /// How long requests for data have taken in the last seconds, and how long they usually take, µs; 0:
        /// not known.
        answer_us: u32,
        usual_us: u32,
    }
);
message!(
    #[derive(Default)]
    Life {
        /// Absent: its machine does not measure it.
        pressure: Option<Pressure>,
        targets: Vec<TargetLife>,
    }
);
message!(
    /// Whether the process lives. Sent over the connection that it has joined on.
    AskLife = 78 by [Coordinator] -> Life {}
);
message!(
    /// A sign of life, sent with each heartbeat.
    ReportLife = 79 by [Storage, Meta] -> () { node: NodeId, life: Life }
);
message!(
    /// The last sign of life of each connected member.
    GetLives = 84 by [Console, Operator, Auditor, User] -> Lives {}
);
message!(
    #[derive(Default)]
    Lives { nodes: Vec<NodeLife> }
);
message!(
    /// `seen_ms`: how long ago it came. `late_ms`: for how long its targets have answered late; 0: they do
    /// not.
    NodeLife { node: NodeId, seen_ms: u64, late_ms: u64, life: Life }
);

impl TargetLife {
    /// After how long it answers now, ms.
    pub fn answers_after_ms(&self) -> u32 {
        self.answer_us / 1000
    }
    /// It answers much later than usual.
    pub fn is_late(&self) -> bool {
        let after = self.answers_after_ms();
        let is_unusual = self.answer_us / LATE_TIMES >= self.usual_us;
        after >= VERY_LATE_MS || after >= LATE_MS && is_unusual
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Wire;

    #[test]
    fn a_target_is_late_against_what_is_usual() {
        for (answer_us, usual_us, late) in [
            (0, 0, false),
            (400_000, 2_000, false),
            (500_000, 2_000, true),
            (500_000, 50_000, true),
            (500_000, 51_000, false),
            (2_999_000, 400_000, false),
            (3_000_000, 2_900_000, true),
        ] {
            let life = TargetLife { answer_us, usual_us, ..TargetLife::default() };
            assert_eq!(life.is_late(), late, "{life:?}");
        }
    }

    /// The bytes of a sign of life, as the release sends them that first had it.
    #[test]
    fn golden() {
        let target = TargetLife {
            target: TargetId(7),
            failed: true,
            stalled_ms: 1,
            oldest_ms: 2,
            waiting: 3,
            answer_us: 4,
            usual_us: 5,
        };
        let life = Life { pressure: Some(Pressure { cpu: 258, io: 3, memory: 4 }), targets: vec![target] };
        let report = ReportLife { node: NodeId(9), life };
        let hex: String = report.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "09000000010201030004000100000007000000010100000002000000030000000400000005000000");
        assert_eq!(ReportLife::from_bytes(&report.to_bytes()).unwrap(), report);
    }
}
