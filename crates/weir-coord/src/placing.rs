//! Placement groups that are being made: the owner of the map decides which, another thread places them.
//!
//! Invariant: the owner never waits for a placement, so heartbeats do not either. What was placed is taken
//! only if the targets that it may use are still up.
use crate::decide::{WantedGroups, groups_asked_for, groups_for_new_files};
use std::collections::BTreeSet;
use tokio::sync::oneshot;
use weir_env::Tasks;
use weir_proto::coord::{MakeGroups, MapReply};
use weir_proto::map::{ClusterMap, Scheme};
use weir_proto::{Result, TargetId};

/// Groups that were placed for what the map wanted when that began.
pub struct Placed {
    pub wanted: WantedGroups,
    pub members: Vec<Vec<TargetId>>,
}

/// Where the answer of a request goes.
type Answer = oneshot::Sender<Result<MapReply>>;

/// What is being placed, and the requests that wait for it.
pub struct Placing {
    /// Groups of the scheme for new files are made once so many targets are up.
    expected_targets: usize,
    running: BTreeSet<(String, Scheme)>,
    asked: Vec<(MakeGroups, Answer)>,
}

impl Placing {
    pub fn new(expected_targets: usize) -> Placing {
        Placing { expected_targets, running: BTreeSet::new(), asked: Vec::new() }
    }

    /// Answered when the groups are in a durable map, or cannot be made.
    pub fn ask(&mut self, wanted: MakeGroups, answer: Answer) {
        self.asked.push((wanted, answer));
    }

    /// A placement has ended.
    pub fn ended(&mut self, wanted: &WantedGroups) {
        self.running.remove(&(wanted.pool.clone(), wanted.scheme));
    }

    /// What has to be placed now, and requests that can be answered: with the map, or with the error.
    pub fn next(&mut self, map: &ClusterMap) -> (Vec<WantedGroups>, Vec<(Answer, Result<()>)>) {
        let mut wanted = groups_for_new_files(map, self.expected_targets);
        let mut answers = Vec::new();
        for (asked, answer) in std::mem::take(&mut self.asked) {
            match groups_asked_for(map, asked.pool.as_deref(), asked.scheme) {
                Ok(lacking) if !lacking.is_empty() => {
                    wanted.extend(lacking);
                    self.asked.push((asked, answer));
                }
                outcome => answers.push((answer, outcome.map(drop))),
            }
        }
        wanted.retain(|wanted| self.running.insert((wanted.pool.clone(), wanted.scheme)));
        (wanted, answers)
    }
}

/// Places groups where that may take its time.
pub async fn place(tasks: Tasks, wanted: WantedGroups) -> Placed {
    tasks.blocking(move || Placed { members: wanted.place(), wanted }).await
}
