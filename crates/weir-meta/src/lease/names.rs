//! Directories under a Write lease: one client looks up and changes the names in them, and may have
//! unreported files.
use super::{Conflict, LeaseTable, NoteConflict};
use std::collections::BTreeMap;
use weir_proto::meta::LeaseKind;
use weir_proto::quota::Account;
use weir_proto::{InodeId, SessionId};

/// The unused inode numbers of a directory, which its session has for new files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbers {
    /// Whose limits the files count under; `Account::NONE`: no limit applies to them.
    pub account: Account,
    pub next: InodeId,
    pub end: InodeId,
}

#[derive(Default, Debug)]
pub struct Names {
    /// Directories, with the session that has their names.
    held: BTreeMap<InodeId, (SessionId, Numbers)>,
    /// Directories whose names a session had.
    ended: BTreeMap<SessionId, Vec<InodeId>>,
}

impl Names {
    fn begin(&mut self, session: SessionId, dir: InodeId, numbers: Numbers) {
        assert!(numbers.next <= numbers.end, "directory {dir}: numbers end before they begin: {numbers:?}");
        self.held.insert(dir, (session, numbers));
        if let Some(ended) = self.ended.get_mut(&session) {
            ended.retain(|other| *other != dir);
        }
    }
    fn holder(&self, dir: InodeId) -> Option<SessionId> {
        self.held.get(&dir).map(|(session, _)| *session)
    }
    /// The session has no Write lease on it any more.
    pub fn end(&mut self, session: SessionId, dir: InodeId) {
        if self.holder(dir) == Some(session) {
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
    pub fn grant_names(&mut self, session: SessionId, dir: InodeId, numbers: Numbers) -> LeaseKind {
        let kind = self.grant_write(session, dir);
        if kind == LeaseKind::Write {
            self.names.begin(session, dir, numbers);
        }
        kind
    }
    /// Gives a directory's names back to the session that had them before a restart.
    pub fn take_up_names(&mut self, session: SessionId, dir: InodeId, numbers: Numbers) -> LeaseKind {
        let kind = self.take_up_write(session, dir);
        if kind == LeaseKind::Write {
            self.names.begin(session, dir, numbers);
        }
        kind
    }
    /// A file with this number exists now.
    pub fn use_number(&mut self, dir: InodeId, ino: InodeId) {
        if let Some((_, numbers)) = self.names.held.get_mut(&dir) {
            numbers.next = numbers.next.max(InodeId(ino.0 + 1));
        }
    }
    /// Directories with unused numbers for files under certain limits, with their sessions and the count of
    /// numbers.
    pub fn promised(
        &self,
        is_under: impl Fn(Account) -> bool,
    ) -> impl Iterator<Item = (SessionId, InodeId, u64)> {
        let held = self.names.held.iter().filter(move |(_, (_, numbers))| is_under(numbers.account));
        held.map(|(dir, (session, n))| (*session, *dir, n.end.0.saturating_sub(n.next.0)))
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
        self.names.held.iter().map(|(dir, (session, _))| (*session, *dir))
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
        let Some(holder) = self.names.holder(dir).filter(|holder| *holder != session) else { return };
        let keep = if changes { LeaseKind::None } else { LeaseKind::Read };
        out.note(Conflict { ino: dir, session: holder, keep, ask: true });
    }
}
