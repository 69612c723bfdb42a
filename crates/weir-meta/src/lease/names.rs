//! Directories under a Write lease: one client looks up and changes the names in them, and may have
//! unreported files.
use super::{Conflict, LeaseTable, NoteConflict};
use std::collections::BTreeMap;
use weir_proto::meta::LeaseKind;
use weir_proto::{InodeId, SessionId};

#[derive(Default, Debug)]
pub struct Names {
    /// Directories, with the session that has their names.
    held: BTreeMap<InodeId, SessionId>,
    /// Directories whose names a session had.
    ended: BTreeMap<SessionId, Vec<InodeId>>,
}

impl Names {
    fn begin(&mut self, session: SessionId, dir: InodeId) {
        self.held.insert(dir, session);
        if let Some(ended) = self.ended.get_mut(&session) {
            ended.retain(|other| *other != dir);
        }
    }
    /// The session has no Write lease on it any more.
    pub fn end(&mut self, session: SessionId, dir: InodeId) {
        if self.held.get(&dir) == Some(&session) {
            self.held.remove(&dir);
            self.ended.entry(session).or_default().push(dir);
        }
    }
    pub fn forget_ended(&mut self, session: SessionId) {
        self.ended.remove(&session);
    }
}

impl LeaseTable {
    /// Grants Write on a directory, with its names, if no other session holds a lease on it.
    pub fn grant_names(&mut self, session: SessionId, dir: InodeId) -> LeaseKind {
        let kind = self.grant_write(session, dir);
        if kind == LeaseKind::Write {
            self.names.begin(session, dir);
        }
        kind
    }
    /// The same for a session that had them before a restart.
    pub fn take_up_names(&mut self, session: SessionId, dir: InodeId) -> LeaseKind {
        let kind = self.take_up_write(session, dir);
        if kind == LeaseKind::Write {
            self.names.begin(session, dir);
        }
        kind
    }
    /// Directories whose names the session returned since [`LeaseTable::forget_ended_names`].
    pub fn ended_names(&self, session: SessionId) -> &[InodeId] {
        self.names.ended.get(&session).map_or(&[], Vec::as_slice)
    }
    pub fn forget_ended_names(&mut self, session: SessionId) {
        self.names.forget_ended(session);
    }
    /// All directories whose names a session has, in order.
    pub fn held_names(&self) -> impl Iterator<Item = (SessionId, InodeId)> {
        self.names.held.iter().map(|(dir, session)| (*session, *dir))
    }
    pub fn is_held_by_others(&self, session: SessionId, ino: InodeId) -> bool {
        self.states.get(&ino).is_some_and(|s| s.others(session).any(|(_, h)| h.kind > LeaseKind::None))
    }
    /// Adds the lease of another session that has the names of this directory, if there is one: its
    /// unreported files come first, before any look-up there.
    pub fn names_conflict(
        &self,
        session: SessionId,
        dir: InodeId,
        changes: bool,
        out: &mut impl NoteConflict,
    ) {
        let Some(holder) = self.names.held.get(&dir).filter(|holder| **holder != session) else { return };
        let keep = if changes { LeaseKind::None } else { LeaseKind::Read };
        out.note(Conflict { ino: dir, session: *holder, keep, ask: true });
    }
}
