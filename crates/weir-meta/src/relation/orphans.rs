//! Files whose writer died: they are never closed, so no report of completeness would follow. They are found
//! among those that were written and are not known to be complete, a few at a time, whenever a session has
//! ended, and assigned to movers, which open them as any client would. A file that has no writer, and needs
//! no recovery, is complete: its last close was lost with its client, or with the leader that had received
//! it.
//!
//! Invariant: a file that is not assigned, or came back without being recovered, is found by the next scan.
//! In memory only.
use super::store;
use crate::executor::Leader;
use crate::keys;
use crate::namespace::find_inode;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weir_proto::relation::RelationId;
use weir_proto::{InodeId, Result, SessionId};

/// Files scanned in one batch.
const SCAN_MAX: usize = 256;
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

    fn take_new(&mut self) -> Vec<InodeId> {
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

    fn is_due(&self) -> bool {
        self.begin_scan().is_some() || !self.new.is_empty()
    }
    fn begin_scan(&self) -> Option<InodeId> {
        self.next.filter(|_| self.found.len() < FOUND_MAX)
    }
    fn end_scan(&mut self, from: Option<InodeId>, found: Vec<InodeId>, next: Option<InodeId>) {
        // Otherwise a writer died meanwhile, and it restarts.
        if from.is_some() && self.next == from {
            self.next = next;
        }
        self.found.extend(found.into_iter().filter(|ino| !self.out.contains_key(ino)));
    }
}

/// Scans some files that were written and are not known to be complete; returns whether there is more.
pub(super) fn scan(leader: &Arc<Leader>, relation: RelationId) -> Result<bool> {
    if leader.lock().grace_until.is_some() {
        return Ok(false); // a writer returns, or its session ends
    }
    let (from, new) = match leader.relations.lock().queues.get_mut(&relation) {
        Some(queue) if queue.orphans.is_due() => (queue.orphans.begin_scan(), queue.orphans.take_new()),
        _ => return Ok(false),
    };
    let (mut found, mut next) = (Vec::new(), None);
    {
        let (mut state, mut left) = (leader.lock(), Vec::new());
        leader.kv.read(&mut |read| {
            (found, left, next) = (Vec::new(), Vec::new(), None);
            let (_, end) = keys::range_of_short(b'g', relation.0);
            let mut files = Vec::new();
            if let Some(from) = from {
                let start = keys::growing(relation, from);
                files = store::collect(read, &start, &end, SCAN_MAX, |key, _| {
                    store::number_of(key).map(InodeId)
                })?;
            }
            if files.len() == SCAN_MAX {
                next = files.last().map(|ino| InodeId(ino.0 + 1));
            }
            for ino in files.into_iter().chain(new.iter().copied()) {
                let Some(inode) = find_inode(read, ino)? else { continue };
                if leader.must_recover(&state, ino, &inode) {
                    found.push(ino);
                } else if !state.leases.is_open_for_writing(ino) && store::is_growing(read, relation, ino)? {
                    left.push(ino);
                }
            }
            Ok(())
        })?;
        if !left.is_empty() {
            leader.housekeep(&mut state, SessionId(0), &mut |cx| {
                left.iter().try_for_each(|ino| cx.log_complete(*ino))
            })?;
        }
    }
    let mut queues = leader.relations.lock();
    let Some(queue) = queues.queues.get_mut(&relation) else { return Ok(false) };
    queue.orphans.end_scan(from, found, next);
    Ok(queue.orphans.is_due())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_work_is_checked_again_and_never_assigned_twice() {
        let (one, two) = (SessionId(1), SessionId(2));
        let mut orphans = Orphans::default();
        assert_eq!(orphans.begin_scan(), None, "nobody died");
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
