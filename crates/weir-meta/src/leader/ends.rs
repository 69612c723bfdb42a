//! The end of a session, by its client, by its silence, or because its process is gone.
//!
//! Invariant: a session that has ended holds nothing. Its record goes with the count of those that may have
//! been writing, or stays until the disk has space.
use super::{Leader, State, hints};
use crate::keys::Sequence;
use crate::namespace::create::next_number;
use crate::session;
use std::sync::Arc;
use weir_proto::{ErrorKind, InodeId, Result, SessionId};

impl Leader {
    /// Ends the sessions of processes that are gone. Returns whether some sessions without a connection are
    /// left.
    pub fn end_dead_sessions(self: &Arc<Self>, state: &mut State) -> Result<bool> {
        for id in session::gone(&state.sessions, &*self.config.gone) {
            self.end_session(state, id, "its process is gone")?;
        }
        Ok(state.sessions.values().any(|s| s.connection.is_none()))
    }

    /// The end of a session: its leases, its locks, its opens, its record.
    pub fn end_session(self: &Arc<Self>, state: &mut State, id: SessionId, why: &str) -> Result<()> {
        if self.config.right.is_over() {
            return Ok(()); // the next leader decides
        }
        let Some(session) = state.sessions.remove(&id) else { return Ok(()) };
        state.mounts.refusals.forget_session(id);
        state.quotas.drop_session(id);
        let freed = state.locks.drop_session(id, self.env.clock.now());
        hints::hint((&self.env, &self.admission), &state.sessions, freed);
        state.recalls.drop_session(id, self.env.clock.now());
        tracing::info!(session = %id, client = session.client, "session ends: {why}");
        // The open files of a session that has not returned since a restart are not known.
        let may_write = |ino: &InodeId| state.leases.opens_of(id, *ino).write > 0;
        let is_unknown = !session.resumed && session.holds.may_write();
        let was_writing = is_unknown || state.leases.inodes_of(id).iter().any(may_write);
        for ino in state.leases.drop_session(id) {
            state.wake(ino);
        }
        session.moved.notify_waiters();
        session.revokes.close();
        self.relations.end_session(id);
        state.grace.unrecorded.remove(&id);
        let recorded = self.record_end(state, id, was_writing);
        if let Ok(false) = recorded {
            state.deaths.count += u64::from(was_writing);
            state.deaths.unrecorded.push((id, was_writing));
        }
        state.end_grace_if_complete(id);
        recorded.map(drop)
    }

    /// False: the disk is full. Its record stays until there is space, for the next leader, too.
    fn record_end(&self, state: &mut State, id: SessionId, was_writing: bool) -> Result<bool> {
        let mut deaths = state.deaths.count;
        let done = self.housekeep(state, id, &mut |cx| {
            if was_writing {
                deaths = next_number(cx.txn, Sequence::Death)?;
            }
            session::forget(cx, id)
        });
        match done {
            Err(e) if e.kind == ErrorKind::NoSpace => {
                self.warn_of_full_disk(&e);
                return Ok(false);
            }
            done => done?,
        }
        state.deaths.count = state.deaths.count.max(deaths);
        Ok(true)
    }

    /// Records the ends of sessions for which there was no space.
    pub fn record_ends(&self, state: &mut State) -> Result<()> {
        while let Some((id, was_writing)) = state.deaths.unrecorded.last().copied()
            && self.record_end(state, id, was_writing)?
        {
            state.deaths.unrecorded.pop();
        }
        Ok(())
    }
}
