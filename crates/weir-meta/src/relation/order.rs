//! The order of changes of names: which objects a change touches, and which other changes it waits for.
use super::store;
use crate::record::ChangeRecord;
use crate::tables;
use bytes::Bytes;
use std::collections::BTreeSet;
use weir_kv::Read;
use weir_proto::meta::FileKind;
use weir_proto::relation::{RelationId, What};
use weir_proto::{InodeId, Result};

/// Changes of names that are checked for the next work.
pub(super) const WINDOW: usize = 1024;

/// An object that a change touches.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Touch {
    Inode(InodeId),
    Entry(InodeId, Bytes),
}

/// The objects that a change modifies and those that it only relies on.
pub(super) fn touches(what: &What) -> (Vec<Touch>, Vec<Touch>) {
    use Touch::{Entry, Inode};
    match what {
        What::Made { ino, parent, name, .. }
        | What::Linked { ino, parent, name }
        | What::Removed { ino, parent, name, .. } => {
            (vec![Inode(*ino), Entry(*parent, name.clone())], vec![Inode(*parent)])
        }
        What::Renamed { ino, parent, name, new_parent, new_name, replaced, .. } => {
            let mut changes =
                vec![Inode(*ino), Entry(*parent, name.clone()), Entry(*new_parent, new_name.clone())];
            changes.extend(replaced.map(|(other, _)| Inode(other)));
            (changes, vec![Inode(*parent), Inode(*new_parent)])
        }
        What::Exchanged { ino, other, parent, name, other_parent, other_name } => (
            vec![
                Inode(*ino),
                Inode(*other),
                Entry(*parent, name.clone()),
                Entry(*other_parent, other_name.clone()),
            ],
            vec![Inode(*parent), Inode(*other_parent)],
        ),
        What::Attributes { ino }
        | What::Resized { ino, .. }
        | What::Data { ino, .. }
        | What::Complete { ino, .. } => (vec![Inode(*ino)], vec![]),
    }
}

/// Whether a mover may be changing, or may have changed without a report, the objects at the place of one of
/// these inodes.
pub fn may_change(read: &dyn Read, relation: RelationId, inodes: &BTreeSet<InodeId>) -> Result<bool> {
    for ino in inodes {
        if store::relocations(read, relation, *ino)? {
            return Ok(true);
        }
    }
    is_concerned(read, relation, inodes, WINDOW, |change| change.tried)
}

/// Whether home still lacks a change of one of these.
pub fn is_queued(read: &dyn Read, relation: RelationId, inodes: &BTreeSet<InodeId>) -> Result<bool> {
    is_concerned(read, relation, inodes, usize::MAX, |_| true)
}

fn is_concerned(
    read: &dyn Read,
    relation: RelationId,
    inodes: &BTreeSet<InodeId>,
    limit: usize,
    counts: impl Fn(&ChangeRecord) -> bool,
) -> Result<bool> {
    let concerned = tables::NAME_CHANGES.under(relation).collect(read, limit, |_, change| {
        let (changes, _) = touches(&change.what);
        let touched = changes.iter().any(|t| matches!(t, Touch::Inode(ino) if inodes.contains(ino)));
        touched && counts(&change)
    })?;
    Ok(concerned.contains(&true))
}

/// Whether paths below it change.
pub(super) fn is_barrier(what: &What) -> bool {
    matches!(what, What::Renamed { kind: FileKind::Directory, .. } | What::Exchanged { .. })
}

/// The unfinished changes before the one that is checked.
#[derive(Default)]
pub(super) struct Before {
    changed: BTreeSet<Touch>,
    relied_on: BTreeSet<Touch>,
}

impl Before {
    pub fn is_in_the_way(&self, changes: &[Touch], relies: &[Touch]) -> bool {
        changes.iter().any(|t| self.changed.contains(t) || self.relied_on.contains(t))
            || relies.iter().any(|t| self.changed.contains(t))
    }
    pub fn add(&mut self, changes: Vec<Touch>, relies: Vec<Touch>) {
        self.changed.extend(changes);
        self.relied_on.extend(relies);
    }
    /// Directories whose times a mover is setting: their names stay, others may be added and removed in them
    /// meanwhile.
    pub fn add_directories(&mut self, directories: impl Iterator<Item = InodeId>) {
        self.relied_on.extend(directories.map(Touch::Inode));
    }
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.relied_on.is_empty()
    }
}
