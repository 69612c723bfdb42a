//! Breadth-first search of every state of a model, so that what it finds has the fewest steps.
use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

/// A state of a model, its steps, and what must never be.
pub trait Model: Hash + Sized {
    type Step: Copy + Debug;
    type Rules: Copy;
    type Shortcut: Copy + Debug;
    fn start(rules: &Self::Rules) -> Self;
    fn steps(&self, rules: &Self::Rules) -> Vec<Self::Step>;
    /// The state after a step; `None`: it cannot be taken.
    fn take(&self, rules: &Self::Rules, step: Self::Step) -> Option<Self>;
    /// The fault of the state, if it has one.
    fn problem(&self) -> Option<String>;
    fn shortened(rules: &Self::Rules, shortcut: Self::Shortcut) -> Self::Rules;
}

/// The result of a search.
#[derive(Debug)]
pub struct Searched<S> {
    pub states: usize,
    pub transitions: usize,
    /// Steps of the longest shortest way to a state.
    pub depth: usize,
    /// The steps to a wrong state, and what is wrong with it.
    pub found: Option<(Vec<S>, String)>,
    /// Not every state was visited: there are more than the limit.
    pub truncated: bool,
}

/// Searches everything and finds nothing.
pub fn holds<M: Model>(name: &str, rules: &M::Rules, states_max: usize) {
    let searched = search::<M>(rules, states_max);
    eprintln!(
        "{name}: {} states, {} transitions, depth {}",
        searched.states, searched.transitions, searched.depth
    );
    if let Some((steps, what)) = searched.found {
        let steps: Vec<String> = steps.iter().map(|step| format!("  {step:?}")).collect();
        panic!("{name}: {what}, after\n{}", steps.join("\n"));
    }
    assert!(!searched.truncated, "{name}: more than {states_max} states");
}

/// Finds a way in which the shortcut does harm. The same search without it finds none.
pub fn fails<M: Model>(rules: &M::Rules, shortcut: M::Shortcut) {
    let searched = search::<M>(&M::shortened(rules, shortcut), 3_000_000);
    let (steps, what) = searched
        .found
        .unwrap_or_else(|| panic!("{shortcut:?} is found to be no harm in {} states", searched.states));
    eprintln!("{shortcut:?}: {what}, after {} steps and {} states: {steps:?}", steps.len(), searched.states);
}

/// 128 bits distinguish states: among 10^8 states two different ones collide with a chance below 10^-22.
type Seen = HashSet<u128, BuildHasherDefault<DefaultHasher>>;

fn digest(state: &impl Hash) -> u128 {
    let half = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        state.hash(&mut hasher);
        hasher.finish()
    };
    u128::from(half(1)) << 64 | u128::from(half(2))
}

/// Visits every state that can be reached, up to `states_max`, and stops at the first that has a problem.
pub fn search<M: Model>(rules: &M::Rules, states_max: usize) -> Searched<M::Step> {
    let start = M::start(rules);
    let mut seen: Seen = HashSet::default();
    seen.insert(digest(&start));
    // How each state was reached: from which one, by which step.
    let mut ways: Vec<(usize, Option<M::Step>)> = vec![(0, None)];
    let mut searched = Searched { states: 1, transitions: 0, depth: 0, found: None, truncated: false };
    searched.found = start.problem().map(|what| (Vec::new(), what));
    let mut level = vec![(0, start)];
    while !level.is_empty() && searched.found.is_none() {
        let mut next = Vec::new();
        for (number, state) in &level {
            for step in state.steps(rules) {
                let Some(after) = state.take(rules, step) else { continue };
                searched.transitions += 1;
                if !seen.insert(digest(&after)) {
                    continue;
                }
                ways.push((*number, Some(step)));
                if let Some(what) = after.problem() {
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

fn trace<S: Copy>(ways: &[(usize, Option<S>)]) -> Vec<S> {
    let mut at = ways.len() - 1;
    let mut steps = Vec::new();
    while let (from, Some(step)) = ways[at] {
        steps.push(step);
        at = from;
    }
    steps.reverse();
    steps
}
