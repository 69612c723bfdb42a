//! Plan of a backup from the names at home and the existing snapshots: names and a pure decision.
//!
//! Invariant: a tree is named by its date only when it is complete, so a partial one is never taken for a
//! backup; only entries of the same volume and place, with names in our format, are ever changed or removed.
use std::collections::BTreeSet;
use weir_proto::checksum::crc32c;
use weir_proto::date::Date;

/// A backup that was interrupted longer ago than this is not resumed: a new one is begun.
const GO_ON_S: i64 = 86_400;
const PARTIAL: &str = ".partial-";
const REMOVING: &str = ".removing-";
const INCOMPLETE: &str = ".incomplete";
const MISSING: &str = ".missing";
const SNAPSHOT: &str = "backup-";

/// A name in the directory of the backups.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum TreeName {
    Whole(Date),
    /// All entries except those named in the list beside it.
    Incomplete(Date),
    /// The list of entries that are missing there.
    Missing(Date),
    /// It is being made.
    Partial(Date),
    /// It is being removed.
    Removing(Date),
}

impl TreeName {
    /// `None`: not a name in our format.
    pub fn parse(name: &[u8]) -> Option<TreeName> {
        let name = std::str::from_utf8(name).ok()?;
        let (make, date): (fn(Date) -> TreeName, &str) = if let Some(date) = name.strip_prefix(PARTIAL) {
            (TreeName::Partial, date)
        } else if let Some(date) = name.strip_prefix(REMOVING) {
            (TreeName::Removing, date)
        } else if let Some(date) = name.strip_suffix(INCOMPLETE) {
            (TreeName::Incomplete, date)
        } else if let Some(date) = name.strip_suffix(MISSING) {
            (TreeName::Missing, date)
        } else {
            (TreeName::Whole, name)
        };
        let found = make(Date::parse(date)?);
        (found.text() == name).then_some(found)
    }
    pub fn text(&self) -> String {
        match self {
            TreeName::Whole(date) => date.to_string(),
            TreeName::Incomplete(date) => format!("{date}{INCOMPLETE}"),
            TreeName::Missing(date) => format!("{date}{MISSING}"),
            TreeName::Partial(date) => format!("{PARTIAL}{date}"),
            TreeName::Removing(date) => format!("{REMOVING}{date}"),
        }
    }
    /// The date of a backup that can be read.
    pub fn made(&self) -> Option<Date> {
        match self {
            TreeName::Whole(date) | TreeName::Incomplete(date) => Some(*date),
            _ => None,
        }
    }
}

/// Snapshots for a place carry its mark, so that places do not use each other's.
pub fn snapshot_name(date: Date, url: &str) -> String {
    format!("{SNAPSHOT}{}-{:08x}", date.compact(), crc32c(url.as_bytes()))
}
/// The date of a snapshot that belongs to this place.
pub fn snapshot_date(name: &str, url: &str) -> Option<Date> {
    let (date, _) = name.strip_prefix(SNAPSHOT)?.split_once('-')?;
    let date = Date::parse(date)?;
    (snapshot_name(date, url) == name).then_some(date)
}

/// The steps of a backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Date of the new tree.
    pub date: Date,
    /// Its snapshot exists: the backup is resumed.
    pub goes_on: bool,
    /// Unchanged files are linked to that tree.
    pub base: Option<TreeName>,
    /// Trees at home that are not needed any more.
    pub remove: Vec<TreeName>,
    /// Dates of snapshots that are not needed any more.
    pub drop_snapshots: Vec<Date>,
}

pub fn plan(names: &BTreeSet<TreeName>, snapshots: &BTreeSet<Date>, now: Date) -> Plan {
    let made: BTreeSet<Date> = names.iter().filter_map(TreeName::made).collect();
    let newest = made.last().copied();
    let begun = snapshots
        .iter()
        .next_back()
        .filter(|date| newest.is_none_or(|newest| **date > newest) && now.0.saturating_sub(date.0) < GO_ON_S);
    let date = begun.copied().unwrap_or_else(|| {
        // Two within a second, or a clock that was set back.
        let taken = newest.max(snapshots.last().copied());
        taken.map_or(now, |taken| now.max(Date(taken.0.saturating_add(1))))
    });
    let base_date = made.iter().rev().find(|made| snapshots.contains(made) && **made < date);
    let base = base_date.and_then(|date| {
        let of = |name: &&TreeName| name.made() == Some(*date);
        names.iter().find(of).copied()
    });
    let is_left_over = |name: &&TreeName| match name {
        TreeName::Partial(of) => *of != date,
        TreeName::Removing(_) => true,
        TreeName::Missing(of) => !made.contains(of) && *of != date,
        TreeName::Whole(_) | TreeName::Incomplete(_) => false,
    };
    let remove = names.iter().filter(is_left_over).copied().collect();
    let base_date = base.and_then(|base| base.made());
    let needed = |of: &&Date| Some(**of) != base_date && **of != date;
    assert!(base_date.is_none_or(|of| of < date), "unchanged files are linked to an earlier tree");
    assert!(
        base.is_none_or(|base| !is_left_over(&&base)),
        "the tree that files are linked to would be removed"
    );
    let drop_snapshots = snapshots.iter().filter(needed).copied().collect();
    Plan { date, goes_on: begun.is_some(), base, remove, drop_snapshots }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TreeName::*;

    const NOW: Date = Date(1_000_000);
    fn run(names: &[TreeName], snapshots: &[i64]) -> Plan {
        plan(&names.iter().copied().collect(), &snapshots.iter().map(|s| Date(*s)).collect(), NOW)
    }
    fn fresh(date: i64) -> Plan {
        Plan { date: Date(date), goes_on: false, base: None, remove: vec![], drop_snapshots: vec![] }
    }

    #[test]
    fn names_are_ours_only_as_we_write_them() {
        for name in [Whole(NOW), Incomplete(NOW), Missing(NOW), Partial(NOW), Removing(NOW)] {
            assert_eq!(TreeName::parse(name.text().as_bytes()), Some(name));
        }
        for other in ["", "notes", "19700112T134640Z", ".partial-x", "1970-01-12T13:46:40Z.old", ".weir-home"]
        {
            assert_eq!(TreeName::parse(other.as_bytes()), None, "{other:?}");
        }
        let name = snapshot_name(NOW, "file:///a");
        assert!(weir_proto::volume::check_volume_name(&name).is_ok(), "{name}");
        assert_eq!(snapshot_date(&name, "file:///a"), Some(NOW));
        assert_eq!(snapshot_date(&name, "file:///b"), None);
        assert_eq!(snapshot_date("backup-of-mine", "file:///a"), None);
    }

    #[test]
    fn plans_by_table() {
        let (a, b) = (Date(10), Date(20));
        let young = 1_000_000 - 100;
        for (names, snapshots, expected) in [
            (&[][..], &[][..], fresh(1_000_000)),
            // The usual case.
            (&[Whole(a), Whole(b)], &[20], Plan { base: Some(Whole(b)), ..fresh(1_000_000) }),
            (&[Whole(a), Incomplete(b)], &[20], Plan { base: Some(Incomplete(b)), ..fresh(1_000_000) }),
            // The snapshot, or the tree, was removed.
            (&[Whole(a)], &[], fresh(1_000_000)),
            (&[Whole(a)], &[5], Plan { drop_snapshots: vec![Date(5)], ..fresh(1_000_000) }),
            // Interrupted before the older snapshot was dropped.
            (
                &[Whole(a), Whole(b)],
                &[10, 20],
                Plan { base: Some(Whole(b)), drop_snapshots: vec![a], ..fresh(1_000_000) },
            ),
            // Interrupted a moment ago, and long ago.
            (
                &[Whole(a), Partial(Date(young))],
                &[10, young],
                Plan { goes_on: true, base: Some(Whole(a)), ..fresh(young) },
            ),
            (
                &[Whole(a), Partial(b)],
                &[10, 20],
                Plan {
                    base: Some(Whole(a)),
                    remove: vec![Partial(b)],
                    drop_snapshots: vec![b],
                    ..fresh(1_000_000)
                },
            ),
            // Its snapshot is gone: it cannot be resumed.
            (&[Partial(Date(young))], &[], Plan { remove: vec![Partial(Date(young))], ..fresh(1_000_000) }),
            // Interrupted during a removal.
            (
                &[Missing(a), Missing(b), Incomplete(b), Removing(a)],
                &[20],
                Plan { base: Some(Incomplete(b)), remove: vec![Missing(a), Removing(a)], ..fresh(1_000_000) },
            ),
            // Within a second.
            (&[Whole(NOW)], &[1_000_000], Plan { base: Some(Whole(NOW)), ..fresh(1_000_001) }),
        ] {
            assert_eq!(run(names, snapshots), expected, "{names:?} {snapshots:?}");
        }
    }
}
