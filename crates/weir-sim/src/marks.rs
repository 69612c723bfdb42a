//! "Sometimes" marks: which kinds of operations overlapped with which kinds of faults.
//!
//! A simulator that never hits a combination proves nothing about it: the tests ask for each at least once.

use crate::FaultKind;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// How often each fault met each operation.
pub type Met = BTreeMap<(&'static str, &'static str), u64>;

#[derive(Default)]
pub struct Marks(Mutex<State>);

#[derive(Default)]
struct State {
    faults: BTreeMap<FaultKind, u32>,
    /// By number.
    operations: BTreeMap<u64, &'static str>,
    /// Number of evictions by writers when a fault began.
    own_evictions: BTreeMap<&'static str, u64>,
    met: Met,
}

/// In the table of marks: the writer of a file evicts its front.
pub const OWN_EVICTION: &str = "own eviction";

impl Marks {
    pub fn fault_begins(&self, kind: FaultKind) {
        let state = &mut *self.state();
        *state.faults.entry(kind).or_default() += 1;
        for operation in state.operations.values() {
            *state.met.entry((kind.name(), operation)).or_default() += 1;
        }
    }
    pub fn fault_ends(&self, kind: FaultKind) {
        let state = &mut *self.state();
        if let Some(count) = state.faults.get_mut(&kind) {
            *count -= 1;
        }
        state.faults.retain(|_, count| *count > 0);
    }
    /// A fault of home begins or ends; `own_evictions`: their number so far.
    pub fn home_fault(&self, name: &'static str, begins: bool, own_evictions: u64) {
        let state = &mut *self.state();
        if begins {
            state.own_evictions.insert(name, own_evictions);
        } else if let Some(before) = state.own_evictions.remove(name).filter(|before| *before < own_evictions)
        {
            *state.met.entry((name, OWN_EVICTION)).or_default() += own_evictions - before;
        }
    }
    pub fn begins(&self, op: u64, operation: &'static str) {
        let state = &mut *self.state();
        state.operations.insert(op, operation);
        for kind in state.faults.keys() {
            *state.met.entry((kind.name(), operation)).or_default() += 1;
        }
    }
    /// Also for an operation that never began.
    pub fn ends(&self, op: u64) {
        self.state().operations.remove(&op);
    }
    pub fn met(&self) -> Met {
        self.state().met.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
