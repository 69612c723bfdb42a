//! "Sometimes" marks: which kinds of operations were under way while which kinds of faults were.
//!
//! A simulator that never hits a combination proves nothing about it: the tests ask for each at least once.

use crate::FaultKind;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// What applications do.
pub const OPERATIONS: [&str; 15] = [
    "create",
    "write",
    "append",
    "read",
    "read all",
    "fsync",
    "truncate",
    "punch",
    "close",
    "stat",
    "rename",
    "save",
    "unlink",
    "shared-write",
    "shared-read",
];

/// How often each fault met each operation.
pub type Met = BTreeMap<(&'static str, &'static str), u64>;

#[derive(Default)]
pub struct Marks(Mutex<State>);

#[derive(Default)]
struct State {
    faults: BTreeMap<FaultKind, u32>,
    /// By number.
    operations: BTreeMap<u64, &'static str>,
    /// Evictions by writers until a fault began.
    own_evictions: BTreeMap<&'static str, u64>,
    met: Met,
}

/// In the table of what has met: a file's front goes home by who writes it.
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
    /// A fault of home begins or ends; `own_evictions`: how many there were until now.
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
    /// Also of an operation that never began.
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

/// What was never seen together.
pub fn never_met(met: &Met, kinds: &[FaultKind]) -> Vec<(&'static str, &'static str)> {
    let pairs = kinds.iter().flat_map(|kind| OPERATIONS.map(|operation| (kind.name(), operation)));
    pairs.filter(|pair| !met.contains_key(pair)).collect()
}

/// A line for each kind of fault, a column for each kind of operation.
pub fn table(met: &Met, kinds: &[FaultKind]) -> String {
    let operations = || {
        let others = [
            &crate::small_files::OPERATIONS[..],
            &crate::snapshots::OPERATIONS,
            &crate::clones::OPERATIONS,
            &crate::locks::OPERATIONS,
            &crate::tree::OPERATIONS,
            &[crate::replica::LOOK],
            &crate::limits::OPERATIONS,
        ];
        OPERATIONS.into_iter().chain(others.concat())
    };
    let line = |cells: String, name: &str| format!("{name:28}{cells}");
    let mut lines = vec![line(operations().map(|o| format!("{o:>13}")).collect(), "")];
    for kind in kinds {
        let count = |operation| met.get(&(kind.name(), operation)).copied().unwrap_or_default();
        lines.push(line(operations().map(|o| format!("{:>13}", count(o))).collect(), kind.name()));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_has_met() {
        let marks = Marks::default();
        marks.begins(1, "read");
        marks.fault_begins(FaultKind::KillMeta);
        marks.begins(2, "write");
        marks.ends(1);
        marks.fault_ends(FaultKind::KillMeta);
        marks.begins(3, "stat");
        assert_eq!(marks.met(), BTreeMap::from([(("kill-meta", "read"), 1), (("kill-meta", "write"), 1)]));
        let missing = never_met(&marks.met(), &[FaultKind::KillMeta]);
        assert!(missing.len() == OPERATIONS.len() - 2 && missing.contains(&("kill-meta", "stat")));
        assert!(table(&marks.met(), &[FaultKind::KillMeta]).contains("kill-meta"));
    }
}
