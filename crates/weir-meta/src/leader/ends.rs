//! The end of a session, by its client, by its silence, or because its process is gone.
//!
//! Invariant: a session that has ended holds nothing. Its record goes with the count of those that may have
//! been writing, or stays until the disk has space.
use super::base::Base;
use super::transactions::Transactions;
use super::{NO_SESSION, State, hints};
use crate::keys::{self, Sequence};
use crate::namespace::remove::release_orphan;
use crate::relation::queues::Relations;
use crate::session;
use crate::tables::{self, next_number};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use weir_proto::{ErrorKind, InodeId, Result, SessionId};

/// After a connection ended it is checked whether the client's process is gone.
const END_DEAD_AFTER: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(20),
    Duration::from_millis(200),
    Duration::from_millis(2000),
];

/// Ends sessions; no other part does.
pub struct SessionEnds {
    base: Arc<Base>,
    tx: Arc<Transactions>,
    relations: Arc<Relations>,
    dead: DeadSessions,
}

impl SessionEnds {
    pub fn new(base: &Arc<Base>, tx: &Arc<Transactions>, relations: &Arc<Relations>) -> Arc<SessionEnds> {
        let (base, tx, relations) = (base.clone(), tx.clone(), relations.clone());
        Arc::new(SessionEnds { base, tx, relations, dead: DeadSessions::default() })
    }

    /// Ends the sessions of processes that are gone. Returns whether some sessions without a connection are
    /// left.
    pub fn end_dead_sessions(&self, state: &mut State) -> Result<bool> {
        for id in session::gone(&state.sessions, &*self.base.config.gone) {
            self.end_session(state, id, "its process is gone")?;
        }
        Ok(state.sessions.values().any(|s| s.connection.is_none()))
    }

    /// The end of a session: its leases, its locks, its opens, its record.
    pub fn end_session(&self, state: &mut State, id: SessionId, why: &str) -> Result<()> {
        if self.base.config.right.is_over() {
            return Ok(()); // the next leader decides
        }
        let Some(session) = state.sessions.remove(&id) else { return Ok(()) };
        state.mounts.refusals.forget_session(id);
        state.quotas.drop_session(id);
        let freed = state.locks.drop_session(id, self.base.now());
        hints::hint((&self.base.env, &self.base.admission), &state.sessions, freed);
        state.recalls.drop_session(id, self.base.now());
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
        let done = self.tx.housekeep(state, id, &mut |cx| {
            if was_writing {
                deaths = next_number(cx.txn, Sequence::Death)?;
            }
            session::forget(cx, id)
        });
        match done {
            Err(e) if e.kind == ErrorKind::NoSpace => {
                self.base.warn_of_full_disk(&e);
                return Ok(false);
            }
            done => done?,
        }
        state.deaths.count = state.deaths.count.max(deaths);
        Ok(true)
    }

    /// All sessions have returned or ended: none brings changes any more that a crash took back, and nameless
    /// files are kept only for those that have them open.
    pub fn finish_grace(&self, state: &mut State) -> Result<()> {
        if state.grace.until.is_some() || state.grace.is_finished {
            return Ok(());
        }
        let (mut nameless, mut serials) = (Vec::new(), false);
        self.base.read(&mut |read| {
            nameless = session::held_by(read, NO_SESSION)?;
            serials = tables::number(read, Sequence::LostSerial)?.is_some();
            Ok(())
        })?;
        if serials || !nameless.is_empty() {
            self.tx.housekeep(state, NO_SESSION, &mut |cx| {
                cx.txn.delete(&keys::sequence(Sequence::LostSerial));
                nameless.iter().try_for_each(|ino| release_orphan(cx, *ino, NO_SESSION))
            })?;
        }
        state.grace.is_finished = true;
        Ok(())
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

/// The search for sessions of processes that are gone: one for all connections that end at the same time.
#[derive(Default)]
struct DeadSessions {
    is_searching: AtomicBool,
    /// A connection has ended since it began.
    again: AtomicBool,
}

impl SessionEnds {
    /// After the end of a connection. A killed process is gone a moment after its connections.
    pub fn end_dead_sessions_soon(self: &Arc<Self>) {
        self.dead.again.store(true, SeqCst);
        if self.dead.is_searching.swap(true, SeqCst) {
            return;
        }
        let ends = self.clone();
        self.base.env.tasks.spawn("end dead sessions", async move { ends.search_dead_sessions().await });
    }

    async fn search_dead_sessions(&self) {
        loop {
            while self.dead.again.swap(false, SeqCst) {
                for pause in END_DEAD_AFTER {
                    self.base.env.clock.sleep(pause).await;
                    let left = self.end_dead_sessions(&mut self.base.lock());
                    match left {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(e) => return self.base.commits.fail(&e.doing("end a session")),
                    }
                }
            }
            self.dead.is_searching.store(false, SeqCst);
            // A connection may have ended between the two.
            if !self.dead.again.load(SeqCst) || self.dead.is_searching.swap(true, SeqCst) {
                return;
            }
        }
    }
}
