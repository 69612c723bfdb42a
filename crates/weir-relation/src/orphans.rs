//! Files whose writer died: they are never closed, so no report of completeness would follow. They are found
//! among those that were written and are not known to be complete, a few at a time, whenever a session has
//! ended, and assigned to movers, which open them as any client would. A file that has no writer, and needs
//! no recovery, is complete: its last close was lost with its client, or with the leader that had received
//! it.
//!
//! Invariant: a file that is not assigned, or was returned without being recovered, is found by the next
//! scan. In memory only.
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::{InodeId, SessionId};

/// Files scanned in one batch.
pub const SCAN_MAX: usize = 256;
/// Found and not recovered yet: then the scan waits.
const FOUND_MAX: usize = 1024;
/// The files that one mover recovers at a time. Each may wait for targets.
const AT_ONCE: usize = 8;

/// The orphans of one relation.
#[derive(Default, Debug)]
pub struct Orphans {
    found: BTreeSet<InodeId>,
    out: BTreeMap<InodeId, SessionId>,
    /// Just found to be written: their writers may be dead already.
    new: BTreeSet<InodeId>,
    /// Where to continue the scan; none: no writer died since the last one.
    next: Option<InodeId>,
}

impl Orphans {
    /// A writer may have died.
    pub fn rescan(&mut self) {
        self.next = Some(InodeId(0));
    }

    /// A file is written that was not known to be.
    pub fn note(&mut self, ino: InodeId) {
        self.new.insert(ino);
    }

    /// The files that a mover is to recover now.
    pub fn assign(&mut self, mover: SessionId) -> Vec<InodeId> {
        let has = self.out.values().filter(|session| **session == mover).count();
        let mut assigned = Vec::new();
        while has + assigned.len() < AT_ONCE
            && let Some(ino) = self.found.pop_first()
        {
            self.out.insert(ino, mover);
            assigned.push(ino);
        }
        assigned
    }

    /// A mover has finished its try; returns whether there is reason to scan.
    pub fn dealt_with(&mut self, mover: SessionId, files: &[InodeId]) -> bool {
        let before = self.out.len();
        self.out.retain(|ino, session| *session != mover || !files.contains(ino));
        if self.out.len() < before {
            self.rescan();
        }
        self.next.is_some()
    }

    /// Files that were just found to be written, to be checked now.
    pub fn take_new(&mut self) -> Vec<InodeId> {
        let mut taken = Vec::new();
        while taken.len() < SCAN_MAX
            && let Some(ino) = self.new.pop_first()
        {
            taken.push(ino);
        }
        taken
    }

    pub fn end_session(&mut self, mover: SessionId) {
        self.out.retain(|_, session| *session != mover);
    }

    /// Whether a scan has anything to check.
    pub fn is_due(&self) -> bool {
        self.begin_scan().is_some() || !self.new.is_empty()
    }
    /// Where the scan continues; none: it waits, or has ended.
    pub fn begin_scan(&self) -> Option<InodeId> {
        self.next.filter(|_| self.found.len() < FOUND_MAX)
    }
    /// The result of a scan that began at `from`.
    pub fn end_scan(&mut self, from: Option<InodeId>, found: Vec<InodeId>, next: Option<InodeId>) {
        // Otherwise a writer died meanwhile, and it restarts.
        if from.is_some() && self.next == from {
            self.next = next;
        }
        self.found.extend(found.into_iter().filter(|ino| !self.out.contains_key(ino)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_work_is_checked_again_and_never_assigned_twice() {
        let (one, two) = (SessionId(1), SessionId(2));
        let mut orphans = Orphans::default();
        assert_eq!(orphans.begin_scan(), None, "no writer died");
        orphans.rescan();
        let from = orphans.begin_scan();
        assert!(from.is_some());
        orphans.end_scan(from, (1..=10).map(InodeId).collect(), None);
        assert_eq!(orphans.begin_scan(), None);
        assert_eq!(orphans.assign(one).len(), AT_ONCE);
        assert_eq!(orphans.assign(one), []);
        assert_eq!(orphans.assign(two), [InodeId(9), InodeId(10)]);
        assert!(orphans.dealt_with(one, &[InodeId(1), InodeId(9)]), "it may have failed");
        let from = orphans.begin_scan();
        orphans.rescan();
        orphans.end_scan(from, vec![InodeId(1), InodeId(2), InodeId(9)], Some(InodeId(77)));
        assert_eq!(orphans.assign(two), [InodeId(1)], "the others are with a mover");
        orphans.end_session(two);
        let from = orphans.begin_scan();
        orphans.end_scan(from, vec![InodeId(9)], None);
        assert_eq!(orphans.assign(one), [InodeId(9)]);
    }
}
