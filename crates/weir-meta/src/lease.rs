//! The lease table: which client may cache which inode. Pure: it gets events and returns decisions; the
//! caller calls clients back.
//!
//! Invariants: a Write lease is the only lease on its inode. While an operation is parked on an inode, or a
//! revoke of it is in flight, no session gets a new lease on it. A file that two sessions have open, at least
//! one of them for writing, is *shared*: only two kinds of sessions get a lease on it, one that recovers it
//! after a writer's death, and one that asks for a lease to read it through its kernel's pages. A session
//! that was permitted to write directly never coexists with a session that caches.
//!
//! Knows nothing of names, of records, of time or of the network.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use weir_proto::meta::LeaseKind;
use weir_proto::{InodeId, SessionId};

/// Leases of one session. Beyond, replies grant no more leases and the client reads through until it returns
/// some. A holding takes about 150 bytes here, so a session is bounded to some 150 MB.
const LEASES_PER_SESSION_MAX: usize = 1 << 20;

/// The intended use of an inode by an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// Show its current state: another session's writer commits first and keeps Read.
    GetAttr,
    /// Change it, or the names in it: no other session may cache it.
    Change,
    /// Append to it or truncate it: one session at a time, and no other has uncommitted changes of it.
    AppendToken,
    /// Read it through the kernel's pages: no other session writes it before these are dropped.
    Pages,
}

/// A lease that conflicts with an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Conflict {
    pub ino: InodeId,
    pub session: SessionId,
    /// The lease that its holder may keep.
    pub keep: LeaseKind,
    /// False: no client has to be asked, it ends by itself (an append token).
    pub ask: bool,
}

/// Collects conflicts.
pub trait NoteConflict {
    /// Adds a conflict, unless it was added before.
    fn note(&mut self, conflict: Conflict);
}

impl NoteConflict for Vec<Conflict> {
    fn note(&mut self, conflict: Conflict) {
        if !self.contains(&conflict) {
            self.push(conflict);
        }
    }
}

/// A session's number of opens of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Opens {
    pub read: u32,
    pub write: u32,
}

/// Whether a session has the append token of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AppendToken {
    No,
    /// From this leader; no other session has it.
    Granted,
    /// The session named it after a restart. Others may have named it, too: those whose commits released it,
    /// and that did not get the answers. They ask for these commits again, which releases it here.
    Named,
}

impl AppendToken {
    fn is_held(self) -> bool {
        self != AppendToken::No
    }
}

#[derive(Clone, Copy, Debug)]
struct Holding {
    kind: LeaseKind,
    opens: Opens,
    /// The client has been asked to return the lease.
    revoking: bool,
    append_token: AppendToken,
    /// It was permitted to write directly: it may be doing so, until it has answered a revoke
    direct: bool,
    /// that was begun after that.
    direct_since_revoke: bool,
    /// No other session has a lease on it or has it open, and each is kept waiting for a revoke.
    alone: bool,
}

#[derive(Default, Debug)]
struct State {
    /// Few: most inodes have one holder. In the order of arrival.
    holders: Vec<(SessionId, Holding)>,
    /// Operations that wait for conflicting leases.
    parked: u32,
    /// No name is left: deleted when the last session closes it.
    orphan: bool,
}

#[derive(Default, Debug)]
pub struct LeaseTable {
    /// Never iterated.
    states: ByInode<State>,
    of_session: BTreeMap<SessionId, BTreeSet<InodeId>>,
    /// Directories whose names a session has exclusively, and former ones: for these the store still has
    /// inode numbers of it.
    names: Names,
    /// Sessions that get no leases for now.
    withheld: BTreeSet<SessionId>,
    /// Sessions that got more of an inode since they were last taken.
    raised: Vec<Raised>,
    /// The newest cluster map under which any client has written. A target that its group has dropped may not
    /// know that, so readers wait for that map.
    pub written_under: u64,
}

/// A map by inode number, which is never iterated.
pub type ByInode<T> = HashMap<InodeId, T, BuildHasherDefault<InodeHasher>>;

/// This leader assigns inode numbers, not clients: one multiplication spreads them (Fibonacci hashing).
#[derive(Default)]
pub struct InodeHasher(u64);

impl Hasher for InodeHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }
    fn write_u64(&mut self, n: u64) {
        let spread = (self.0 ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = spread ^ (spread >> 32);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

const NOTHING: Holding = Holding {
    kind: LeaseKind::None,
    opens: Opens { read: 0, write: 0 },
    revoking: false,
    append_token: AppendToken::No,
    direct: false,
    direct_since_revoke: false,
    alone: false,
};

impl Holding {
    fn is_nothing(&self) -> bool {
        let Holding { kind, opens, revoking, append_token, direct, .. } = *self;
        kind == LeaseKind::None
            && opens == Opens::default()
            && !revoking
            && !append_token.is_held()
            && !direct
    }
    fn is_open(&self) -> bool {
        self.opens != Opens::default()
    }
    /// Has it open to write straight to the targets, or is about to be permitted to.
    fn writes_direct(&self) -> bool {
        self.opens.write > 0 && self.kind == LeaseKind::None
    }
}

impl State {
    fn get(&self, session: SessionId) -> Option<&Holding> {
        self.holders.iter().find(|(s, _)| *s == session).map(|(_, h)| h)
    }
    fn others(&self, session: SessionId) -> impl Iterator<Item = &(SessionId, Holding)> {
        self.holders.iter().filter(move |(s, _)| *s != session)
    }
    /// No lease may be granted to any session now.
    fn closed(&self) -> bool {
        self.parked > 0 || self.is_in_change()
    }
    fn is_in_change(&self) -> bool {
        self.holders.iter().any(|(_, h)| h.revoking || h.append_token.is_held())
    }
    fn is_nothing(&self) -> bool {
        self.holders.is_empty() && self.parked == 0
    }
}

impl LeaseTable {
    pub fn new(written_under: u64) -> LeaseTable {
        LeaseTable { written_under, ..LeaseTable::default() }
    }
    /// Adds to `out` the leases to revoke before `session` may use the inode as it needs.
    pub fn conflicts(&self, session: SessionId, ino: InodeId, need: Need, out: &mut impl NoteConflict) {
        let Some(state) = self.states.get(&ino) else { return };
        for (holder, holding) in state.others(session) {
            let direct = need == Need::Pages && holding.direct;
            let keep = match need {
                Need::Change => LeaseKind::None,
                Need::Pages if direct => LeaseKind::None,
                Need::GetAttr | Need::AppendToken | Need::Pages => LeaseKind::Read,
            };
            let with_token = need == Need::AppendToken && holding.append_token.is_held();
            let conflict = Conflict { ino, session: *holder, keep, ask: !with_token };
            if holding.kind > keep || with_token || direct || holding.alone {
                out.note(conflict);
            }
        }
    }

    /// Grants the append token, which no other session has.
    pub fn grant_append_token(&mut self, session: SessionId, ino: InodeId) {
        self.change(session, ino, |h| h.append_token = AppendToken::Granted);
    }
    /// Restores the append token that a session names after a restart.
    pub fn take_up_append_token(&mut self, session: SessionId, ino: InodeId) {
        self.change(session, ino, |h| h.append_token = AppendToken::Named);
    }
    pub fn has_append_token(&self, session: SessionId, ino: InodeId) -> bool {
        self.states.get(&ino).and_then(|s| s.get(session)).is_some_and(|h| h.append_token.is_held())
    }
    /// Releases the append token. True if an operation waits for that.
    pub fn release_append_token(&mut self, session: SessionId, ino: InodeId) -> bool {
        let had = self.has_append_token(session, ino);
        if had {
            self.change(session, ino, |h| h.append_token = AppendToken::No);
        }
        had && self.is_awaited(ino)
    }

    /// The need of an open for reading or for writing: sharing a file revokes all leases.
    pub fn need_to_open(&self, session: SessionId, ino: InodeId, write: bool) -> Need {
        let Some(state) = self.states.get(&ino) else { return Need::GetAttr };
        if write || state.others(session).any(|(_, h)| h.opens.write > 0) {
            Need::Change
        } else {
            Need::GetAttr
        }
    }

    /// Whether a file is shared once `session` has opened it: two have it open, one of them for writing. Then
    /// the opener's own lease is revoked first, too: a file opened under a lease is read through pages, which
    /// nothing protects later.
    pub fn is_shared_by_open(&self, session: SessionId, ino: InodeId, write: bool) -> bool {
        let Some(state) = self.states.get(&ino) else { return false };
        let writes = write || state.get(session).is_some_and(|h| h.opens.write > 0);
        state.others(session).any(|(_, h)| h.opens.write > 0 || (writes && h.is_open()))
    }
    /// Adds the session's own lease to the leases to revoke.
    pub fn own_conflict(&self, session: SessionId, ino: InodeId, out: &mut impl NoteConflict) {
        if self.held(session, ino) > LeaseKind::None {
            out.note(Conflict { ino, session, keep: LeaseKind::None, ask: true });
        }
    }

    /// Grants Read if that needs no revoke and endangers no writer; otherwise returns the session's present
    /// lease.
    pub fn grant_read(&mut self, session: SessionId, ino: InodeId) -> LeaseKind {
        self.read_grant(session, ino, false)
    }
    /// Grants Read for pages, on request: even while others have the file open for writing, if none may be
    /// writing now, and while operations wait (a writer's revokes this lease again). Not for one of several
    /// openers that writes itself: two such would each wait, with pages locked, for the other's.
    pub fn acquire_read(&mut self, session: SessionId, ino: InodeId) -> LeaseKind {
        self.read_grant(session, ino, true)
    }

    fn read_grant(&mut self, session: SessionId, ino: InodeId, for_pages: bool) -> LeaseKind {
        let below_limit = self.of_session.get(&session).is_none_or(|all| all.len() < LEASES_PER_SESSION_MAX);
        let state = self.states.entry(ino).or_default();
        let mine = state.get(session).copied().unwrap_or(NOTHING);
        if mine.revoking {
            // It is about to be returned: the client's work until then is right, new work is not.
            return LeaseKind::None;
        }
        if mine.kind >= LeaseKind::Read {
            return mine.kind;
        }
        let writes = |h: &Holding| h.writes_direct() || (mine.is_open() && h.opens.write > 0);
        let excludes = |h: &Holding| h.kind == LeaseKind::Write || h.alone;
        let in_the_way = |h: &Holding| excludes(h) || h.direct || (!for_pages && writes(h));
        let refused = !below_limit
            || self.withheld.contains(&session)
            || if for_pages { state.is_in_change() } else { state.closed() }
            || (mine.writes_direct() && !for_pages)
            || (mine.opens.write > 0 && state.others(session).any(|(_, h)| h.is_open()))
            || state.others(session).any(|(_, h)| in_the_way(h));
        if refused {
            self.forget_if_nothing(ino);
            return LeaseKind::None;
        }
        self.change(session, ino, |h| h.kind = LeaseKind::Read);
        LeaseKind::Read
    }

    /// Grants Read, and that no other session gets a lease on the file or opens it before a revoke. So its
    /// holder may remove it by itself. False: another session holds or uses it.
    pub fn grant_alone(&mut self, session: SessionId, ino: InodeId) -> bool {
        let is_used = self.states.get(&ino).is_some_and(|s| s.closed() || s.others(session).next().is_some());
        if is_used || self.grant_read(session, ino) == LeaseKind::None {
            return false;
        }
        self.change(session, ino, |h| h.alone = true);
        true
    }

    /// Grants Write if no other session holds or uses the inode.
    pub fn grant_write(&mut self, session: SessionId, ino: InodeId) -> LeaseKind {
        self.write_grant(session, ino, false)
    }
    /// Grants Write to the session that recovers a dead writer's leftovers. Others may have the file open:
    /// until it is recovered they can only wait, and a request for a lease of their own revokes this one.
    pub fn grant_recovery(&mut self, session: SessionId, ino: InodeId) -> LeaseKind {
        self.write_grant(session, ino, true)
    }

    /// Grants the last writer its lease again after a restart. Others may have the file open: it may have
    /// recovered it.
    pub fn take_up_write(&mut self, session: SessionId, ino: InodeId) -> LeaseKind {
        self.write_grant(session, ino, true)
    }

    fn write_grant(&mut self, session: SessionId, ino: InodeId, recovers: bool) -> LeaseKind {
        if self.withheld.contains(&session) && !recovers {
            return self.kept(session, ino);
        }
        if let Some(state) = self.states.get(&ino) {
            let is_used = |h: &Holding| h.kind > LeaseKind::None || (h.is_open() && !recovers);
            let used = state.others(session).any(|(_, h)| is_used(h));
            if state.closed() || used {
                return state.get(session).filter(|h| !h.revoking).map_or(LeaseKind::None, |h| h.kind);
            }
        }
        self.change(session, ino, |h| (h.kind, h.direct) = (LeaseKind::Write, false));
        LeaseKind::Write
    }

    /// A session that does not return leases gets none, except to recover a file.
    pub fn withhold(&mut self, session: SessionId, withheld: bool) {
        if withheld {
            self.withheld.insert(session);
        } else {
            self.withheld.remove(&session);
        }
    }

    /// The session asked for Write, and got the answer that it has to write directly.
    pub fn note_direct(&mut self, session: SessionId, ino: InodeId) {
        if self.opens_of(session, ino).write > 0 {
            self.change(session, ino, |h| (h.direct, h.direct_since_revoke) = (true, true));
        }
    }

    /// The session's lease, unless it is being revoked.
    pub fn kept(&self, session: SessionId, ino: InodeId) -> LeaseKind {
        let holding = self.states.get(&ino).and_then(|s| s.get(session));
        holding.filter(|h| !h.revoking).map_or(LeaseKind::None, |h| h.kind)
    }
    /// The session's lease.
    pub fn held(&self, session: SessionId, ino: InodeId) -> LeaseKind {
        self.states.get(&ino).and_then(|s| s.get(session)).map_or(LeaseKind::None, |h| h.kind)
    }
    /// Whether the session may send data of the file: it holds Write, or has it open for writing.
    pub fn may_write(&self, session: SessionId, ino: InodeId) -> bool {
        let holding = self.states.get(&ino).and_then(|s| s.get(session));
        holding.is_some_and(|h| h.kind == LeaseKind::Write || h.opens.write > 0)
    }
    /// All that hold Write, in order.
    pub fn writers(&self) -> impl Iterator<Item = (SessionId, InodeId)> {
        let all = self.of_session.iter().flat_map(|(session, inos)| inos.iter().map(|ino| (*session, *ino)));
        all.filter(|(session, ino)| self.held(*session, *ino) == LeaseKind::Write)
    }
    /// Whether the session may have changes of files that it holds exclusively, and none of its holdings
    /// concerns another session: no operation waits for it, no other session shares it, and it is not
    /// deleted.
    pub fn writes_undisturbed(&self, session: SessionId) -> bool {
        let (mut writes, mut disturbed) = (false, false);
        for ino in self.of_session.get(&session).into_iter().flatten() {
            let Some((state, mine)) = self.states.get(ino).and_then(|s| Some((s, s.get(session)?))) else {
                continue;
            };
            let shared =
                |h: &Holding| h.is_open() && mine.is_open() && (h.opens.write > 0 || mine.opens.write > 0);
            writes |= mine.kind == LeaseKind::Write;
            disturbed |= state.parked > 0 || mine.revoking || mine.append_token.is_held() || state.orphan;
            disturbed |= state.others(session).any(|(_, h)| shared(h));
        }
        writes && !disturbed
    }
    /// Whether a session has the file open for writing.
    pub fn is_open_for_writing(&self, ino: InodeId) -> bool {
        let state = self.states.get(&ino);
        state.is_some_and(|s| s.holders.iter().any(|(_, h)| h.opens.write > 0))
    }
    /// The session that has the file open for writing, if no other has it open: it has the Write lease, or
    /// gets it.
    pub fn only_writer(&self, ino: InodeId) -> Option<SessionId> {
        let state = self.states.get(&ino)?;
        let (writer, _) = state.holders.iter().find(|(_, h)| h.opens.write > 0)?;
        state.others(*writer).all(|(_, h)| !h.is_open()).then_some(*writer)
    }
    /// Whether another session may be writing the file.
    pub fn written_by_others(&self, session: SessionId, ino: InodeId) -> bool {
        let state = self.states.get(&ino);
        state.is_some_and(|s| s.others(session).any(|(_, h)| h.opens.write > 0 || h.kind == LeaseKind::Write))
    }

    /// Lowers a session's lease to `keep`. True if an operation waits for that.
    pub fn lower(&mut self, session: SessionId, ino: InodeId, keep: LeaseKind) -> bool {
        if self.states.get(&ino).is_none_or(|s| s.get(session).is_none()) {
            return false;
        }
        self.change(session, ino, |h| (h.kind, h.alone) = (h.kind.min(keep), false));
        self.is_awaited(ino)
    }
    /// Marks that the client is being asked; false if it already is.
    pub fn begin_revoke(&mut self, session: SessionId, ino: InodeId) -> bool {
        let new = self.states.get(&ino).and_then(|s| s.get(session)).is_some_and(|h| !h.revoking);
        if new {
            self.change(session, ino, |h| (h.revoking, h.direct_since_revoke) = (true, false));
        }
        new
    }
    /// Whether another session is being asked for a lease above this kind: an operation that needs that is
    /// woken by its answer.
    pub fn is_revoking(&self, session: SessionId, ino: InodeId, keep: LeaseKind) -> bool {
        self.states
            .get(&ino)
            .is_some_and(|s| s.others(session).any(|(_, h)| h.revoking && (h.kind > keep || h.alone)))
    }
    /// The client has answered, or never will.
    pub fn end_revoke(&mut self, session: SessionId, ino: InodeId, keep: LeaseKind) {
        if self.states.get(&ino).is_some_and(|s| s.get(session).is_some()) {
            self.change(session, ino, |h| {
                h.revoking = false;
                (h.kind, h.alone) = (h.kind.min(keep), false);
                h.direct &= keep > LeaseKind::None || h.direct_since_revoke;
            });
        }
    }

    /// An operation waits for the inode's leases.
    pub fn park(&mut self, ino: InodeId) {
        self.states.entry(ino).or_default().parked += 1;
    }
    pub fn unpark(&mut self, ino: InodeId) {
        if let Some(state) = self.states.get_mut(&ino) {
            state.parked = state.parked.saturating_sub(1);
        }
        self.forget_if_nothing(ino);
    }
    pub fn is_awaited(&self, ino: InodeId) -> bool {
        self.states.get(&ino).is_some_and(|s| s.parked > 0)
    }

    /// Counts an open.
    pub fn open(&mut self, session: SessionId, ino: InodeId, read: bool, write: bool) {
        self.change(session, ino, |h| {
            h.opens.read = h.opens.read.saturating_add(u32::from(read));
            h.opens.write = h.opens.write.saturating_add(u32::from(write));
        });
    }
    /// Uncounts opens; true if they were the session's last ones.
    pub fn close(&mut self, session: SessionId, ino: InodeId, reads: u32, writes: u32) -> bool {
        let was_open = self.states.get(&ino).and_then(|s| s.get(session)).is_some_and(Holding::is_open);
        if was_open {
            self.change(session, ino, |h| {
                h.opens.read = h.opens.read.saturating_sub(reads);
                h.opens.write = h.opens.write.saturating_sub(writes);
                h.direct &= h.opens.write > 0;
            });
        }
        was_open && !self.is_open_by(session, ino)
    }
    /// Sets the opens that a session reports after a reconnect. Its earlier direct writes may still be in
    /// flight.
    pub fn set_opens(&mut self, session: SessionId, ino: InodeId, opens: Opens) {
        self.change(session, ino, |h| {
            h.opens = opens;
            h.direct = opens.write > 0 && h.kind < LeaseKind::Write;
        });
    }
    pub fn is_open_by(&self, session: SessionId, ino: InodeId) -> bool {
        self.states.get(&ino).and_then(|s| s.get(session)).is_some_and(Holding::is_open)
    }
    pub fn opens_of(&self, session: SessionId, ino: InodeId) -> Opens {
        self.states.get(&ino).and_then(|s| s.get(session)).map_or(Opens::default(), |h| h.opens)
    }
    /// The sessions that have a file open.
    pub fn openers(&self, ino: InodeId) -> Vec<SessionId> {
        let Some(state) = self.states.get(&ino) else { return Vec::new() };
        state.holders.iter().filter(|(_, h)| h.is_open()).map(|(s, _)| *s).collect()
    }
    pub fn mark_orphan(&mut self, ino: InodeId) {
        if let Some(state) = self.states.get_mut(&ino) {
            state.orphan = true;
        }
    }
    /// An inode without a name got one.
    pub fn unmark_orphan(&mut self, ino: InodeId) {
        if let Some(state) = self.states.get_mut(&ino) {
            state.orphan = false;
        }
    }
    pub fn is_orphan(&self, ino: InodeId) -> bool {
        self.states.get(&ino).is_some_and(|s| s.orphan)
    }

    /// The inodes that a session holds or has open, in order.
    pub fn inodes_of(&self, session: SessionId) -> Vec<InodeId> {
        self.of_session.get(&session).map_or(Vec::new(), |all| all.iter().copied().collect())
    }
    /// Removes everything of a session; returns the inodes that operations wait for.
    pub fn drop_session(&mut self, session: SessionId) -> Vec<InodeId> {
        self.withheld.remove(&session);
        self.names.forget_ended(session);
        let mut awaited = Vec::new();
        for ino in self.inodes_of(session) {
            self.change(session, ino, |h| *h = NOTHING);
            if self.is_awaited(ino) {
                awaited.push(ino);
            }
        }
        self.names.forget_ended(session);
        awaited
    }
    /// An inode is gone for good.
    pub fn forget(&mut self, ino: InodeId) {
        for session in
            self.states.get(&ino).map_or(Vec::new(), |s| s.holders.iter().map(|(s, _)| *s).collect())
        {
            self.change(session, ino, |h| {
                *h = Holding { revoking: h.revoking, ..NOTHING };
            });
        }
    }
    /// Number of inodes with state, for metrics and tests.
    pub fn len(&self) -> usize {
        self.states.len()
    }
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Changes a holding, keeping the index of sessions, and drops empty entries.
    fn change(&mut self, session: SessionId, ino: InodeId, edit: impl FnOnce(&mut Holding)) {
        let state = self.states.entry(ino).or_default();
        let at = match state.holders.iter().position(|(s, _)| *s == session) {
            Some(at) => at,
            None => {
                state.holders.push((session, NOTHING));
                self.of_session.entry(session).or_default().insert(ino);
                state.holders.len() - 1
            }
        };
        let before = state.holders[at].1.usage();
        edit(&mut state.holders[at].1);
        if let Some(usage) = state.holders[at].1.usage().filter(|now| Some(*now) > before) {
            self.raised.push(Raised { session, ino, usage });
        }
        if state.holders[at].1.kind < LeaseKind::Write {
            self.names.end(session, ino);
        }
        if state.holders[at].1.is_nothing() {
            state.holders.remove(at);
            if let Some(all) = self.of_session.get_mut(&session) {
                all.remove(&ino);
                if all.is_empty() {
                    self.of_session.remove(&session);
                }
            }
            self.forget_if_nothing(ino);
        }
        self.check(ino);
    }

    /// Panics where an invariant of this table does not hold for an inode: one pass over its holders.
    fn check(&self, ino: InodeId) {
        let Some(state) = self.states.get(&ino) else { return };
        let (mut writers, mut holders, mut tokens, mut granted, mut alone) = (0, 0, 0, 0, 0);
        for (_, holding) in &state.holders {
            writers += u32::from(holding.kind == LeaseKind::Write);
            holders += u32::from(holding.kind != LeaseKind::None);
            tokens += u32::from(holding.append_token.is_held());
            granted += u32::from(holding.append_token == AppendToken::Granted);
            alone += u32::from(holding.alone);
        }
        assert!(writers == 0 || holders == 1, "inode {ino}: a Write lease is not the only one: {state:?}");
        assert!(alone == 0 || holders == 1, "inode {ino}: a session does not have it alone: {state:?}");
        assert!(
            granted == 0 || tokens == 1,
            "inode {ino}: {tokens} sessions have the append token: {state:?}"
        );
    }

    /// Checks the whole table, and its index of sessions.
    pub fn check_all(&self) {
        let lists = |session, ino| self.of_session.get(session).is_some_and(|inos| inos.contains(ino));
        for (session, inos) in &self.of_session {
            assert!(!inos.is_empty(), "session {session} is listed without an inode");
            for ino in inos {
                let holders = self.states.get(ino).map_or(&[][..], |state| &state.holders);
                let holds = holders.iter().any(|(holder, _)| holder == session);
                assert!(holds, "inode {ino} is listed with session {session}, which holds nothing of it");
                let are_listed = holders.iter().all(|(holder, _)| lists(holder, ino));
                assert!(are_listed, "inode {ino} has a holder that is not listed: {holders:?}");
                self.check(*ino);
            }
        }
    }
    fn forget_if_nothing(&mut self, ino: InodeId) {
        if self.states.get(&ino).is_some_and(State::is_nothing) {
            self.states.remove(&ino);
        }
    }
}

mod holdings;
mod names;
mod raised;

use names::Names;
pub use names::Numbers;
pub use raised::{Raised, Usage};

#[cfg(test)]
mod tests;
