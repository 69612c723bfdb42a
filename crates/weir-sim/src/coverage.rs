//! The kinds of operations, and which of them met which kinds of faults: as a table, and the missing
//! combinations.

use crate::marks::Met;
use crate::{FaultKind, clones, limits, locks, replica, small_files, snapshots, tree};

/// Operations of applications.
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

/// Combinations that never occurred.
pub fn never_met(met: &Met, kinds: &[FaultKind]) -> Vec<(&'static str, &'static str)> {
    let pairs = kinds.iter().flat_map(|kind| OPERATIONS.map(|operation| (kind.name(), operation)));
    pairs.filter(|pair| !met.contains_key(pair)).collect()
}

/// A line for each kind of fault, a column for each kind of operation.
pub fn table(met: &Met, kinds: &[FaultKind]) -> String {
    let operations = || {
        let others = [
            &small_files::OPERATIONS[..],
            &snapshots::OPERATIONS,
            &clones::OPERATIONS,
            &locks::OPERATIONS,
            &tree::OPERATIONS,
            &[replica::COMPARE],
            &limits::OPERATIONS,
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
    use crate::marks::Marks;
    use std::collections::BTreeMap;

    #[test]
    fn overlapping_faults_and_operations_have_met() {
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
