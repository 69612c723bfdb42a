//! Requests during the grace period after a restart: those wait that may conflict with what a session holds
//! that has not returned. It is known by volume (`holds`).
//!
//! Invariant: where a session holds something is in the store, in the same or a later commit than the grant,
//! and the reply that contains the grant waits for that commit.
use super::base::Base;
use super::{State, full_disk::until_space};
use crate::holds::{Absent, Holds};
use crate::lease::{Raised, Usage};
use crate::namespace::admit::volume_of_any;
use crate::namespace::{find_link, volume};
use crate::ops::{InGrace, Operation, Work};
use crate::reach::Place;
use crate::tables;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weir_kv::Read;
use weir_proto::meta::*;
use weir_proto::{ErrorKind, InodeId, Result, SessionId, VolumeId};

/// Inodes of sessions that are checked in each pass for volumes that are not used any more: about 3 ms.
const INODES_PER_CHECK: usize = 2048;

/// The holdings of sessions that have not returned since the restart.
#[derive(Debug)]
pub struct AbsentHoldings {
    held: Absent,
    /// The topmost directories of their volumes.
    roots: Vec<Root>,
}

#[derive(Debug)]
struct Root {
    volume: VolumeId,
    root: InodeId,
    parent: InodeId,
}

impl AbsentHoldings {
    fn load(read: &dyn Read, held: Absent) -> Result<AbsentHoldings> {
        let mut roots = Vec::new();
        for id in held.volumes().filter(|id| *id != VolumeId::ROOT) {
            if let Some(record) = volume::find(read, id)?
                && let Some(parent) = volume::find_parent(read, record.root)?
            {
                roots.push(Root { volume: id, root: record.root, parent });
            }
        }
        Ok(AbsentHoldings { held, roots })
    }

    /// An inode, and the topmost directories of other volumes in it: a listing shows their attributes.
    fn conflict_at(&self, read: &dyn Read, ino: InodeId, changes: bool) -> Result<bool> {
        let below = self.roots.iter().any(|r| r.parent == ino && self.held.conflicts(r.volume, changes));
        Ok(below
            || match volume_of_any(read, ino)? {
                Some(volume) => self.held.conflicts(volume, changes),
                None => self.held.conflicts_anywhere(changes),
            })
    }

    /// A name may lead to the topmost directory of another volume.
    fn conflict_at_name(&self, read: &dyn Read, dir: InodeId, name: &[u8], changes: bool) -> Result<bool> {
        let Some(volume) = volume::find_volume_of(read, dir)? else {
            return Ok(self.held.conflicts_anywhere(changes));
        };
        let below = find_link(read, dir, name)?.map(|link| link.ino);
        let leads_to = |root: &Root| Some(root.root) == below && self.held.conflicts(root.volume, changes);
        Ok(self.held.conflicts(volume, changes) || self.roots.iter().any(leads_to))
    }

    /// `of_owners`: users or groups have limits, under which sessions have reservations in all volumes.
    fn conflict<R: Operation>(&self, read: &dyn Read, request: &R, of_owners: bool) -> Result<bool> {
        let is_change = matches!(R::work(), Work::Change(_)) && R::IN_GRACE != InGrace::AsReached;
        let changes = is_change || request.reach().iter().flatten().any(|reach| reach.changes);
        if of_owners && changes && self.held.conflicts_anywhere(true) {
            return Ok(true);
        }
        let mut is_placed = false;
        for reach in request.reach().iter().flatten() {
            is_placed = true;
            let changes = is_change || reach.changes;
            let conflicts = match reach.place {
                Place::Inode(ino) | Place::Shown(ino) => self.conflict_at(read, ino, changes)?,
                Place::Name(dir, name) => self.conflict_at_name(read, dir, name, changes)?,
                Place::Volume(id) => self.held.conflicts(id, changes),
                Place::Snapshot(_) => self.held.conflicts_anywhere(changes),
            };
            if conflicts {
                return Ok(true);
            }
        }
        for ino in request.further_inodes() {
            is_placed = true;
            if self.conflict_at(read, ino, is_change)? {
                return Ok(true);
            }
        }
        Ok(!is_placed && self.held.conflicts_anywhere(is_change))
    }
}

/// Whether the lease of its session excludes a conflict.
fn is_under_own_lease<R: Operation>(state: &State, request: &R) -> bool {
    let needed = match R::IN_GRACE {
        InGrace::UnderRead => LeaseKind::Read,
        // Others' reservations for a limited volume are not known yet.
        InGrace::UnderWrite if state.quotas.is_empty() => LeaseKind::Write,
        _ => return false,
    };
    match request.reach()[0].map(|reach| reach.place) {
        Some(Place::Inode(ino) | Place::Shown(ino)) => state.leases.held(request.session(), ino) >= needed,
        _ => false,
    }
}

/// The records of the volumes where sessions hold something.
pub struct HoldRecords {
    base: Arc<Base>,
}

impl HoldRecords {
    pub fn new(base: &Arc<Base>) -> Arc<HoldRecords> {
        Arc::new(HoldRecords { base: base.clone() })
    }

    /// Whether the request has to wait for sessions that have not returned: it may conflict with one of them.
    pub fn waits_for_absent<R: Operation>(&self, state: &mut State, request: &R) -> Result<bool> {
        if state.grace.until.is_none() {
            return Ok(false);
        }
        let has_returned = state.sessions.get(&request.session()).is_some_and(|session| session.resumed);
        let never = R::IN_GRACE == InGrace::Never || is_under_own_lease(state, request);
        let mut waits = !has_returned;
        if has_returned && !never {
            let (absent, of_owners) = (self.absent(state)?, !state.quotas.owners.is_empty());
            self.base.read(&mut |read| {
                waits = absent.conflict(read, request, of_owners)?;
                Ok(())
            })?;
        }
        Ok(waits)
    }

    /// Whether a session that has not returned since a restart may have a lock on an inode.
    pub fn may_be_held_by_absent(&self, state: &mut State, ino: InodeId) -> Result<bool> {
        if state.grace.until.is_none() {
            return Ok(false);
        }
        let (absent, mut may) = (self.absent(state)?, true);
        self.base.read(&mut |read| {
            may = absent.conflict_at(read, ino, true)?;
            Ok(())
        })?;
        Ok(may)
    }

    fn absent(&self, state: &mut State) -> Result<Arc<AbsentHoldings>> {
        if let Some(absent) = &state.grace.absent {
            return Ok(absent.clone());
        }
        let held = Absent::of(state.sessions.values().filter(|s| !s.resumed).map(|s| &s.holds));
        let mut loaded = None;
        self.base.read(&mut |read| {
            loaded = Some(AbsentHoldings::load(read, held.clone())?);
            Ok(())
        })?;
        let absent = Arc::new(loaded.expect("the body ran"));
        state.grace.absent = Some(absent.clone());
        Ok(absent)
    }

    /// Records the volumes in which sessions have got something since the last call.
    pub fn note_holds(&self, state: &mut State) -> Result<()> {
        if !state.leases.is_raised() {
            return Ok(());
        }
        let mut raised = std::mem::take(&mut state.raised);
        state.leases.take_raised(&mut raised);
        let mut grown = BTreeSet::new();
        let noted = self.base.read(&mut |read| {
            for Raised { session: id, ino, usage } in &raised {
                let Some(session) = state.sessions.get_mut(id) else { continue };
                if session.holds == Holds::Anything {
                    continue;
                }
                // Only its maker has a file without a name; its first name is noted as a change.
                if volume_of_any(read, *ino)?.is_some_and(|volume| session.holds.add(volume, *usage)) {
                    grown.insert(*id);
                }
            }
            Ok(())
        });
        state.raised = raised;
        noted?;
        self.record_holds(state, &grown)
    }

    /// Notes the volumes of reservations, and of files that got their first name.
    pub fn note_reserved<R: Operation>(&self, state: &mut State, request: &R) -> Result<()> {
        let is_first_name = R::IN_GRACE == InGrace::FirstName;
        for reach in request.reach().iter().flatten().filter(|reach| reach.changes) {
            match reach.place {
                Place::Volume(id) => self.note_used_volumes(state, request.session(), [id].into_iter())?,
                Place::Inode(ino) if is_first_name => {
                    let mut found = None;
                    self.base.read(&mut |read| {
                        found = volume_of_any(read, ino)?;
                        Ok(())
                    })?;
                    self.note_used_volumes(state, request.session(), found.into_iter())?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Notes the volumes of a change that may be answered early: its session may bring it after a crash.
    pub fn note_changed<R: Operation>(&self, state: &mut State, request: &R) -> Result<()> {
        let mut volumes = Vec::new();
        self.base.read(&mut |read| {
            volumes.clear();
            for reach in request.reach().iter().flatten().filter(|reach| reach.changes) {
                if let Place::Inode(ino) = reach.place {
                    volumes.extend(volume_of_any(read, ino)?);
                }
            }
            Ok(())
        })?;
        self.note_used_volumes(state, request.session(), volumes.into_iter())
    }

    /// A session may have changes in these volumes.
    pub fn note_used_volumes(
        &self,
        state: &mut State,
        id: SessionId,
        volumes: impl Iterator<Item = VolumeId>,
    ) -> Result<()> {
        let session = state.session(id)?;
        let mut is_grown = false;
        volumes.for_each(|volume| is_grown |= session.holds.add(volume, Usage::Writes));
        if is_grown { self.record_holds(state, &BTreeSet::from([id])) } else { Ok(()) }
    }

    /// Before an answer: a restart must find what the session holds.
    pub fn check_recorded(&self, state: &mut State, id: SessionId) -> Result<()> {
        if !state.grace.unrecorded.contains(&id) {
            return Ok(());
        }
        self.record_holds(state, &BTreeSet::from([id]))
    }

    /// Without space the answer waits, and a later one records them.
    fn record_holds(&self, state: &mut State, of: &BTreeSet<SessionId>) -> Result<()> {
        let written = self.write_holds(state, of);
        match &written {
            Ok(()) => state.grace.unrecorded.retain(|id| !of.contains(id)),
            Err(e) if e.kind == ErrorKind::NoSpace => state.grace.unrecorded.extend(of),
            Err(_) => {}
        }
        written.map_err(|e| until_space("the answer", e))
    }

    fn write_holds(&self, state: &State, of: &BTreeSet<SessionId>) -> Result<()> {
        if of.is_empty() {
            return Ok(());
        }
        let sessions = &state.sessions;
        let values: Vec<_> =
            of.iter().filter_map(|id| Some((*id, sessions.get(id)?.holds.record()))).collect();
        self.base.commits.transact(state, &mut |txn| {
            for (id, value) in &values {
                match value {
                    Some(record) => tables::HOLDS.put(txn, *id, record),
                    None => tables::HOLDS.delete(txn, *id),
                }
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Reduces the records of sessions to the volumes in which they hold something now: of a few at a time.
    pub fn forget_old_holds(&self, state: &mut State) -> Result<()> {
        if !(self.base.config.records_holds)() || self.base.config.right.is_over() {
            return Ok(());
        }
        let (mut left, mut changed) = (INODES_PER_CHECK, BTreeMap::new());
        let (before, after): (Vec<_>, Vec<_>) =
            state.sessions.keys().partition(|id| **id <= state.grace.checked);
        for id in after.into_iter().chain(before) {
            let Some(session) = state.sessions.get(&id) else { continue };
            let count = state.leases.inode_count_of(id);
            let keeps = !session.resumed
                || session.holds == Holds::nothing()
                || count > INODES_PER_CHECK
                || state.locks.counts_of(id) != (0, 0)
                || state.quotas.is_granted_to(id);
            if !keeps && left < count {
                break;
            }
            state.grace.checked = id;
            if keeps {
                continue;
            }
            left -= count;
            let held = state.leases.usage_of(id);
            let mut now = Holds::nothing();
            self.base.read(&mut |read| {
                now = Holds::nothing();
                for (ino, usage) in &held {
                    if let Some(volume) = volume_of_any(read, *ino)? {
                        now.add(volume, *usage);
                    }
                }
                Ok(())
            })?;
            let session = state.session(id)?;
            if session.holds != now {
                changed.insert(id, std::mem::replace(&mut session.holds, now));
            }
        }
        let written = self.write_holds(state, &changed.keys().copied().collect());
        if written.is_err() {
            for (id, before) in changed {
                state.session(id)?.holds = before; // as in the record
            }
        }
        written
    }
}
