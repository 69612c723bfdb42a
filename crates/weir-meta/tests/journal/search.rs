//! Breadth-first search of every state, so that what it finds has the fewest steps.
use super::state::State;
use super::steps::{Rules, Step, steps, take};
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

/// The result of a search.
#[derive(Debug)]
pub struct Searched {
    pub states: usize,
    pub transitions: usize,
    /// Steps of the longest shortest way to a state.
    pub depth: usize,
    /// The steps to a wrong state, and what is wrong with it.
    pub found: Option<(Vec<Step>, String)>,
    /// Not every state was visited: there are more than the limit.
    pub truncated: bool,
}

/// 128 bits distinguish states: among 10^8 states two different ones collide with a chance below 10^-22.
type Seen = HashSet<u128, BuildHasherDefault<DefaultHasher>>;

fn digest(state: &State) -> u128 {
    let half = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        state.hash(&mut hasher);
        hasher.finish()
    };
    u128::from(half(1)) << 64 | u128::from(half(2))
}

/// Visits every state that can be reached, up to `states_max`, and stops at the first that `problem` names.
pub fn search(rules: &Rules, states_max: usize) -> Searched {
    let problem = State::problem;
    let start = State::start(rules.copies);
    let mut seen: Seen = HashSet::default();
    seen.insert(digest(&start));
    // How each state was reached: from which one, by which step.
    let mut ways: Vec<(usize, Option<Step>)> = vec![(0, None)];
    let mut searched = Searched { states: 1, transitions: 0, depth: 0, found: None, truncated: false };
    searched.found = problem(&start).map(|what| (Vec::new(), what));
    let mut level = vec![(0, start)];
    while !level.is_empty() && searched.found.is_none() {
        let mut next = Vec::new();
        for (number, state) in &level {
            for step in steps(rules, state) {
                let Some(after) = take(rules, state, step) else { continue };
                searched.transitions += 1;
                if !seen.insert(digest(&after)) {
                    continue;
                }
                ways.push((*number, Some(step)));
                if let Some(what) = problem(&after) {
                    searched.found = Some((trace(&ways), what));
                    searched.states = ways.len();
                    return searched;
                }
                if ways.len() >= states_max {
                    searched.truncated = true;
                    searched.states = ways.len();
                    return searched;
                }
                next.push((ways.len() - 1, after));
            }
        }
        searched.depth += usize::from(!next.is_empty());
        level = next;
    }
    searched.states = ways.len();
    searched
}

fn trace(ways: &[(usize, Option<Step>)]) -> Vec<Step> {
    let mut at = ways.len() - 1;
    let mut steps = Vec::new();
    while let (from, Some(step)) = ways[at] {
        steps.push(step);
        at = from;
    }
    steps.reverse();
    steps
}
