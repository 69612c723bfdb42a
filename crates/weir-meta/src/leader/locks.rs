//! File locks as the leader serves them: messages in, the lock table's decision, hints to waiting clients.
//!
//! Every request is answered in place: a wait has a place in the table's queue and no task here. A hint
//! reports that it has got the lock; it may be lost: the client asks again from time to time.
//!
//! Invariants: a lock is held only by a live session. A request is accepted only on the connection on which
//! the session last named its locks, so that no earlier one arrives late. While sessions from before a
//! restart may still name theirs, no new lock is granted in their volumes.

use super::State;
use super::base::Base;
use super::ends::SessionEnds;
use super::hints::hint;
use super::holds::HoldRecords;
use crate::lock::{Holder, Shown, Wish};
use crate::session::Session;
use std::sync::Arc;
use weir_env::Instant;
use weir_proto::lock::*;
use weir_proto::{Error, Result, SessionId};
use weir_rpc::Connection;

/// Locks that a session may name in all parts.
const NAMED_IN_ALL_MAX: usize = crate::lock::LOCKS_PER_SESSION_MAX;

/// Calls about file locks.
pub struct LockCalls {
    base: Arc<Base>,
    holds: Arc<HoldRecords>,
    ends: Arc<SessionEnds>,
}

impl LockCalls {
    pub fn new(base: &Arc<Base>, holds: &Arc<HoldRecords>, ends: &Arc<SessionEnds>) -> Arc<LockCalls> {
        Arc::new(LockCalls { base: base.clone(), holds: holds.clone(), ends: ends.clone() })
    }

    pub fn set(&self, r: &SetLock, on: &Connection) -> Result<LockAnswer> {
        let now = self.base.now();
        let mut state = self.base.lock();
        note_contact(&mut state, r.session, on, now)?;
        let plain = |outcome| LockAnswer { outcome, holder: None };
        if self.holds.may_be_held_by_absent(&mut state, r.ino)? {
            return Ok(plain(LockOutcome::Grace));
        }
        let holder = Holder { session: r.session, owner: r.owner };
        let Some(kind) = r.kind else {
            if r.closing {
                state.locks.close(r.ino, holder, now);
                return Ok(plain(LockOutcome::Granted));
            }
            let woken = state.locks.unlock(r.ino, holder, r.range, now);
            hint((&self.base.env, &self.base.admission), &state.sessions, woken);
            return Ok(plain(LockOutcome::Granted));
        };
        let wish = Wish { ino: r.ino, holder, range: r.range, kind, pid: r.pid };
        end_silent_holders(self, &mut state, &wish, now)?;
        let (outcome, woken) = state.locks.lock(wish, r.ticket, now);
        if outcome == LockOutcome::Granted {
            state.locks.note_quiet(r.ino, wish.holder, r.closing);
        }
        hint((&self.base.env, &self.base.admission), &state.sessions, woken);
        let holder = match outcome {
            LockOutcome::Held => state.locks.conflict(&wish).map(|s| entry(&state, &s, now)),
            _ => None,
        };
        Ok(LockAnswer { outcome, holder })
    }

    pub fn test(&self, r: &TestLock) -> Result<LockAnswer> {
        let now = self.base.now();
        let mut state = self.base.lock();
        state.session(r.session)?.last_contact = now;
        if self.holds.may_be_held_by_absent(&mut state, r.ino)? {
            return Ok(LockAnswer { outcome: LockOutcome::Grace, holder: None });
        }
        let holder = Holder { session: r.session, owner: r.owner };
        let wish = Wish { ino: r.ino, holder, range: r.range, kind: r.kind, pid: 0 };
        end_silent_holders(self, &mut state, &wish, now)?;
        Ok(match state.locks.conflict(&wish) {
            None => LockAnswer { outcome: LockOutcome::Granted, holder: None },
            Some(s) => LockAnswer { outcome: LockOutcome::Held, holder: Some(entry(&state, &s, now)) },
        })
    }

    pub fn cancel(&self, r: &CancelLock, on: &Connection) -> Result<LockCancelled> {
        let now = self.base.now();
        let mut state = self.base.lock();
        note_contact(&mut state, r.session, on, now)?;
        Ok(LockCancelled { waited: state.locks.cancel(r.ino, r.session, r.ticket) })
    }

    pub fn list(&self, r: &ListLocks) -> Result<LockList> {
        let now = self.base.now();
        let mut state = self.base.lock();
        state.session(r.session)?.last_contact = now;
        let all = state.locks.list(r.ino);
        let more = all.len().saturating_sub(LISTED_MAX) as u32;
        let entries = all.iter().take(LISTED_MAX).map(|s| entry(&state, s, now)).collect();
        Ok(LockList { entries, more })
    }

    pub fn reclaim(&self, r: &ReclaimLocks, on: &Connection) -> Result<Reclaimed> {
        let now = self.base.now();
        let mut state = self.base.lock();
        let session = state.session(r.session)?;
        session.last_contact = now;
        if session.naming_locks.0 != on.id() {
            session.naming_locks = (on.id(), Vec::new());
        }
        let named = &mut session.naming_locks.1;
        if named.len() + r.held.len() > NAMED_IN_ALL_MAX {
            *named = Vec::new();
            return Err(Error::invalid(format!("more than {NAMED_IN_ALL_MAX} locks of one session")));
        }
        named.extend(r.held.iter().cloned());
        if r.more {
            return Ok(Reclaimed { lost: Vec::new() });
        }
        let named = std::mem::take(named);
        session.locks_on = on.id();
        let (lost, woken) = state.locks.replace(r.session, &named, now);
        if !lost.is_empty() {
            tracing::warn!(session = %r.session, count = lost.len(), "locks could not be taken up again");
        }
        hint((&self.base.env, &self.base.admission), &state.sessions, woken);
        Ok(Reclaimed { lost })
    }
}

/// A session that was silent for a lease term is spared only as long as no request conflicts with its locks.
fn end_silent_holders(calls: &LockCalls, state: &mut State, wish: &Wish, now: Instant) -> Result<()> {
    while let Some(shown) = state.locks.conflict(wish) {
        let holder = shown.wish.holder.session;
        if holder == wish.holder.session || !state.is_silent(holder, now, calls.base.term()) {
            return Ok(());
        }
        calls.ends.end_session(state, holder, "it was silent for a lease term, and others want its lock")?;
    }
    Ok(())
}

/// Records a sign of life; refuses requests on a connection that the session has left.
fn note_contact(state: &mut State, id: SessionId, on: &Connection, now: Instant) -> Result<()> {
    let session: &mut Session = state.session(id)?;
    session.last_contact = now;
    if session.locks_on == on.id() {
        return Ok(());
    }
    Err(Error::unavailable(format!(
        "session {id} has named its locks on another connection, or not yet on this one"
    )))
}

fn entry(state: &State, shown: &Shown, now: Instant) -> LockEntry {
    let Holder { session, owner } = shown.wish.holder;
    LockEntry {
        session,
        client: state.sessions.get(&session).map_or_else(String::new, |s| s.client.clone()),
        owner,
        pid: shown.wish.pid,
        kind: shown.wish.kind,
        range: shown.wish.range,
        age_ms: now.since(shown.since).as_millis() as u64,
        waits: shown.waits,
    }
}
