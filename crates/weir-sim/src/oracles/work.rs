//! Work is bounded by what was asked: servers serve no more requests than the operations of applications
//! need, and a tenth more for what is sent again.
//!
//! Only spans count in which nothing was lost: from the end of a round, when the cluster is whole, until a
//! fault begins that takes connections, processes or disks away. Load does not end a span.
use super::served::{Counts, Served, asked_between};
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_env::sim::World;

/// Requests that one operation of an application needs, on average over a run: an estimate from above. A
/// write of a new stripe of 4+2 is six fragments, a commit, an open, a lease and a close; other operations
/// need less.
const PER_OPERATION: u64 = 30;
/// Requests that one request of a burst needs: a write of a piece is one request at its target, and one at
/// each mirror, or two of each if it crosses a cell.
const PER_REQUEST_OF_A_BURST: u64 = 6;
/// Requests are sent again at most once in ten.
const AGAIN_PART: u64 = 10;
/// Requests of the operations in flight at the ends of a span.
const AT_ITS_ENDS: u64 = 2_000;

/// A text if more was served in this number of spans than was asked for.
fn too_much(done: &Done, spans: u64) -> Option<String> {
    let Asked { operations, of_bursts } = done.asked;
    let needed = operations * PER_OPERATION + of_bursts * PER_REQUEST_OF_A_BURST;
    let most = needed + needed / AGAIN_PART + spans * AT_ITS_ENDS;
    let served: u64 = done.served.values().sum();
    (served > most).then(|| {
        format!(
            "{served} requests were served, {most} at most are for {:?} in {spans} spans: {:?}",
            done.asked, done.served
        )
    })
}

/// Sums up what was served in these spans.
pub struct Ledger {
    world: World,
    nodes: Vec<String>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    served: Served,
    calm_since: Option<Done>,
    spans: u64,
    sum: Done,
}

/// What applications had done and servers had served at some moment, or in between two.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Done {
    pub asked: Asked,
    pub served: Counts,
}

/// Requests of applications that have begun.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Asked {
    pub operations: u64,
    /// Those of bursts.
    pub of_bursts: u64,
}

impl Ledger {
    pub fn new(world: &World, nodes: Vec<String>) -> Ledger {
        Ledger { world: world.clone(), nodes, state: Mutex::default() }
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn calm_begins(&self, asked: Asked) {
        let mut state = self.state();
        let served = state.served.count(&self.world, &self.nodes);
        state.calm_since.get_or_insert(Done { asked, served });
    }
    pub fn calm_ends(&self, asked: Asked) {
        let state = &mut *self.state();
        let served = state.served.count(&self.world, &self.nodes);
        let Some(before) = state.calm_since.take() else { return };
        state.spans += 1;
        state.sum.asked.operations += asked.operations - before.asked.operations;
        state.sum.asked.of_bursts += asked.of_bursts - before.asked.of_bursts;
        for (method, count) in asked_between(&before.served, &served) {
            *state.sum.served.entry(method).or_default() += count;
        }
    }
    /// The error lists what was served if that was more than was asked for.
    pub fn check(&self) -> Result<(), String> {
        let (spans, sum) = self.sum();
        too_much(&sum, spans).map_or(Ok(()), Err)
    }
    pub fn sum(&self) -> (u64, Done) {
        let state = self.state();
        (state.spans, state.sum.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_more_than_needed_may_be_served() {
        let done = |served| Done {
            asked: Asked { operations: 1000, of_bursts: 10_000 },
            served: Counts::from([("WriteOverlay".to_owned(), served), ("Open".to_owned(), 1000)]),
        };
        let needed = 1000 * PER_OPERATION + 10_000 * PER_REQUEST_OF_A_BURST;
        let most = needed + needed / 10 + 3 * AT_ITS_ENDS - 1000;
        for (served, is_fine) in
            [(0, true), (needed, true), (most, true), (most + 1, false), (2 * needed, false)]
        {
            assert_eq!(too_much(&done(served), 3).is_none(), is_fine, "{served}");
        }
    }
}
