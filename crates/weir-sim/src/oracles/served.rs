//! How many requests the servers have served since the start of the run, by method.
//!
//! Read from the meters of their processes. A process that was started and ended between two readings is not
//! counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use weir_env::sim::World;
use weir_watch::Shared;

/// Requests by the name of their method.
pub type Counts = BTreeMap<String, u64>;

/// Requests that no application caused: life signs, maps, and rounds that a server makes by the clock.
/// The simulator itself asks for the status.
const OF_ITSELF: [&str; 29] = [
    "Heartbeat",
    "ReportLife",
    "AskLife",
    "GetLives",
    "GetMap",
    "ReportTarget",
    "ReportLink",
    "RecordProgress",
    "GetCoordinators",
    "CompareClock",
    "GetClocks",
    "ReportWaits",
    "GetWaits",
    "ReportCondition",
    "GetConditions",
    "ReportEvents",
    "GetStatus",
    "GetRebuild",
    "JournalRight",
    "KeepAlive",
    "OwnersNearLimit",
    "TakeRecalls",
    "LeaseWork",
    "TakeLayers",
    "StatTarget",
    "HasSpace",
    "ScrubTarget",
    "CompareTarget",
    "ListTruncations",
];

#[derive(Default)]
pub struct Served {
    /// The last process of each node that was seen, and what earlier ones served.
    nodes: BTreeMap<String, (Arc<Shared>, Counts)>,
}

impl Served {
    /// The sum over these nodes.
    pub fn count(&mut self, world: &World, nodes: &[String]) -> Counts {
        let mut all = Counts::new();
        for name in nodes {
            let now = world.meters(name);
            let (last, earlier) =
                self.nodes.entry(name.clone()).or_insert_with(|| (now.clone(), Counts::new()));
            if last.process != now.process {
                add(earlier, of(last));
                *last = now;
            }
            add(&mut all, of(last));
            add(&mut all, earlier.clone());
        }
        all
    }
}

fn of(process: &Shared) -> Counts {
    process.meters.counts("weir_rpc_seconds").into_iter().collect()
}

fn add(sum: &mut Counts, counts: Counts) {
    for (method, count) in counts {
        *sum.entry(method).or_default() += count;
    }
}

/// Requests served in between, without those that no application caused.
pub fn asked_between(before: &Counts, after: &Counts) -> Counts {
    let since = |(method, count): (&String, &u64)| {
        let more = count - before.get(method).copied().unwrap_or(0);
        (more > 0 && !OF_ITSELF.contains(&method.as_str())).then(|| (method.clone(), more))
    };
    after.iter().filter_map(since).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::methods::{METHODS_MAX, find};

    #[test]
    fn requests_that_a_server_makes_by_the_clock_do_not_count() {
        let known: Vec<&str> = (0..METHODS_MAX as u16).filter_map(find).map(|method| method.name).collect();
        assert!(OF_ITSELF.iter().all(|name| known.contains(name)), "each is a method");
        let before = Counts::from([("Open".to_owned(), 1), ("Close".to_owned(), 2)]);
        let mut after = before.clone();
        add(&mut after, Counts::from([("Open".to_owned(), 4), ("Heartbeat".to_owned(), 9)]));
        assert_eq!(asked_between(&before, &after), Counts::from([("Open".to_owned(), 4)]));
    }
}
