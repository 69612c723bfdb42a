//! Placement of new groups: the owner of the map decides which groups, another thread places them.
//!
//! Invariant: the owner never waits for a placement, so heartbeats do not either. A placement is accepted
//! only if the targets that it may use are still up.
use crate::decide::{WantedGroups, groups_asked_for, groups_for_new_files, groups_for_new_targets};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::oneshot;
use weir_env::{Instant, Tasks};
use weir_proto::coord::{MakeGroups, MapReply};
use weir_proto::map::{ClusterMap, Scheme, TargetState};
use weir_proto::{Result, TargetId};

/// A new generation is made only when the set of targets has not changed for this long.
const SETTLED_AFTER: Duration = Duration::from_secs(3);

/// Groups that were placed for an earlier version of the map.
pub struct Placed {
    pub wanted: WantedGroups,
    pub members: Vec<Vec<TargetId>>,
}

/// The channel for the answer to a request.
type Answer = oneshot::Sender<Result<MapReply>>;

/// Running placements, and the requests that wait for them.
pub struct Placing {
    /// Groups of the scheme for new files are made once this number of targets is up.
    expected_targets: usize,
    running: BTreeSet<(String, Scheme)>,
    asked: Vec<(MakeGroups, Answer)>,
    /// The targets that may get places, and since when this set is unchanged.
    up_since: Option<(BTreeSet<TargetId>, Instant)>,
}

impl Placing {
    pub fn new(expected_targets: usize) -> Placing {
        Placing { expected_targets, running: BTreeSet::new(), asked: Vec::new(), up_since: None }
    }

    /// The answer is sent when the groups are in a durable map, or cannot be made.
    pub fn ask(&mut self, wanted: MakeGroups, answer: Answer) {
        self.asked.push((wanted, answer));
    }

    /// Targets that are added one after the other get one common generation.
    fn new_generations(
        &mut self,
        map: &ClusterMap,
        draining: &BTreeSet<TargetId>,
        now: Instant,
    ) -> Vec<WantedGroups> {
        let up = map.targets.iter().filter(|t| t.state == TargetState::Up).map(|t| t.id);
        let up: BTreeSet<TargetId> = up.filter(|t| !draining.contains(t)).collect();
        match &self.up_since {
            Some((known, since)) if *known == up => match now.since(*since) >= SETTLED_AFTER {
                true => groups_for_new_targets(map, draining),
                false => Vec::new(),
            },
            _ => {
                self.up_since = Some((up, now));
                Vec::new()
            }
        }
    }

    /// A placement has ended.
    pub fn ended(&mut self, wanted: &WantedGroups) {
        self.running.remove(&(wanted.pool.clone(), wanted.scheme));
    }

    /// The placements to start now, and requests that can be answered: with the map, or with the error. No
    /// group is placed on a target that is drained.
    pub fn next(
        &mut self,
        map: &ClusterMap,
        draining: &BTreeSet<TargetId>,
        now: Instant,
    ) -> (Vec<WantedGroups>, Vec<(Answer, Result<()>)>) {
        let mut wanted = groups_for_new_files(map, self.expected_targets);
        wanted.extend(self.new_generations(map, draining, now));
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
        for wanted in &mut wanted {
            wanted.candidates.retain(|c| !draining.contains(&c.target));
        }
        wanted.retain(|wanted| wanted.candidates.len() >= wanted.scheme.width());
        wanted.retain(|wanted| self.running.insert((wanted.pool.clone(), wanted.scheme)));
        (wanted, answers)
    }
}

/// Places groups on a thread that may block.
pub async fn place(tasks: Tasks, wanted: WantedGroups) -> Placed {
    tasks.blocking(move || Placed { members: wanted.place(), wanted }).await
}
