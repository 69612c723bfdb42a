//! Sessions as clients open, resume and close them, and what they return without an operation.
use super::base::Base;
use super::ends::SessionEnds;
use super::holds::HoldRecords;
use super::outcome::Outcome;
use super::transactions::Transactions;
use super::{State, full_disk::until_space};
use crate::holds::Holds;
use crate::keys::Sequence;
use crate::lease::Opens;
use crate::namespace;
use crate::quotas::Quotas;
use crate::record::SessionRecord;
use crate::relation::queues::Relations;
use crate::session::{self, Session};
use crate::table::Present;
use crate::tables;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weir_kv::CommitSeq;
use weir_proto::meta::*;
use weir_proto::quota::ReclaimSpace;
use weir_proto::volume::{HeldReservation, ReclaimReservations};
use weir_proto::{Error, InodeId, NamespaceId, Result, SessionId};
use weir_rpc::{Connection, Reply};

/// Files and directories that a resume may name in all its parts.
const HELD_IN_ALL_MAX: usize = 1 << 20;

/// Different from those of any other namespace, so that a session from there is unknown here.
fn session_id(namespace: NamespaceId, n: u64) -> Result<SessionId> {
    let n = u32::try_from(n).map_err(|_| Error::no_space("all numbers of sessions are given"))?;
    Ok(SessionId((u64::from(namespace.0) << 32) | u64::from(n)))
}

/// Calls of clients about their sessions.
pub struct SessionCalls {
    base: Arc<Base>,
    tx: Arc<Transactions>,
    holds: Arc<HoldRecords>,
    ends: Arc<SessionEnds>,
    relations: Arc<Relations>,
}

impl SessionCalls {
    pub fn new(
        base: &Arc<Base>,
        tx: &Arc<Transactions>,
        holds: &Arc<HoldRecords>,
        ends: &Arc<SessionEnds>,
        relations: &Arc<Relations>,
    ) -> Arc<SessionCalls> {
        Arc::new(SessionCalls {
            base: base.clone(),
            tx: tx.clone(),
            holds: holds.clone(),
            ends: ends.clone(),
            relations: relations.clone(),
        })
    }

    pub fn open(&self, r: &SessionOpen, connection: &Connection) -> Result<(SessionOpened, CommitSeq)> {
        if r.namespace != self.base.config.namespace {
            return Err(Error::not_found(format!(
                "namespace {} is not led here but {}",
                r.namespace, self.base.config.namespace
            )));
        }
        let now = self.base.now();
        let opened = Time { nanos: self.base.env.clock.wall().0 };
        let (client, process) = (r.client.clone(), r.process.clone());
        let record = SessionRecord { client, opened, process };
        let mut id = SessionId(0);
        let mut state = self.base.lock();
        let holds = if (self.base.config.records_holds)() { Holds::nothing() } else { Holds::Anything };
        let seq = self.base.commits.transact(&state, &mut |txn| {
            id = session_id(self.base.config.namespace, tables::next_number(txn, Sequence::Session)?)?;
            tables::SESSIONS.put(txn, id, &record);
            holds.record().inspect(|record| tables::HOLDS.put(txn, id, record));
            Ok(())
        })?;
        state.sessions.insert(
            id,
            Session::new(record.client, record.process, now, Some(connection.clone()), (holds, true)),
        );
        state.withhold_leases(id, now);
        tracing::info!(session = %id, client = r.client, "session opened");
        let grace = state.grace.until.map_or(Duration::ZERO, |until| until.since(now));
        let opened = SessionOpened {
            session: id,
            lease_ms: self.base.config.lease_ms,
            grace_ms: grace.as_millis() as u32,
            opens_asked: self.base.mount_at(&mut state, connection).is_some(),
        };
        Ok((opened, seq))
    }

    pub fn resume(&self, r: &SessionResume, connection: &Connection) -> Result<(SessionResumed, CommitSeq)> {
        let mut state = self.base.lock();
        let lease_ms = self.base.config.lease_ms;
        let session = state.session(r.session)?;
        let Some(held) = name_held(session, r, connection.id())? else {
            session.last_contact = self.base.now();
            return Ok((SessionResumed { lost: Vec::new(), lease_ms }, CommitSeq(0)));
        };
        let known = session.resumed;
        session.connection = Some(connection.clone());
        session.last_contact = self.base.now();
        session.applied = [0; SLOTS as usize];
        session.moved.notify_waiters();
        self.base.commits.moved(r.session);
        for ino in state.leases.inodes_of(r.session) {
            if !held.contains_key(&ino) {
                state.leases.set_opens(r.session, ino, Opens::default());
                state.leases.lower(r.session, ino, LeaseKind::None);
                state.leases.release_append_token(r.session, ino);
                state.wake(ino);
            }
        }
        let mut lost = Vec::new();
        for lease in held.values() {
            if !self.take_up(&mut state, r.session, lease, known)? {
                lost.push(lease.ino);
            }
        }
        let kept = self.tx.housekeep(&mut state, r.session, &mut |cx| {
            // A new session names the files that an earlier one had open: a nameless file must not be deleted
            // with another opener.
            let leases = cx.rules.leases;
            let is_kept = |ino: &&InodeId| leases.is_orphan(**ino) && leases.is_open_by(r.session, **ino);
            for ino in held.keys().filter(is_kept) {
                tables::HELD.put(cx.txn, (*ino, r.session), &Present);
            }
            for ino in session::held_by(&*cx.txn, r.session)? {
                if !cx.rules.leases.is_open_by(r.session, ino) {
                    namespace::remove::release_orphan(cx, ino, r.session)?;
                }
            }
            Ok(())
        });
        kept.map_err(|e| until_space("the session", e))?;
        self.holds.note_holds(&mut state)?;
        self.holds.check_recorded(&mut state, r.session)?;
        state.session(r.session)?.resumed = true;
        state.end_grace_if_complete(r.session);
        self.relations.changed.notify_one(); // it searches for files that have no writer any more
        Ok((SessionResumed { lost, lease_ms }, self.base.commits.newest(&state)))
    }

    pub fn keep_alive(&self, r: &KeepAlive, connection: &Connection) -> Result<()> {
        let mut state = self.base.lock();
        let session = state.session(r.session)?;
        session.last_contact = self.base.now();
        if session.saved != r.saved {
            (session.saved, session.progress) = (r.saved, session.last_contact);
        }
        if session.connection.as_ref().is_none_or(|c| c.id() != connection.id()) {
            session.connection = Some(connection.clone());
            session.moved.notify_waiters();
        }
        Ok(())
    }

    /// A client that reads after the answer waits for that map.
    pub fn note_map(&self, r: NoteMap) -> Outcome {
        let base = self.base.clone();
        let noted = move |base: &Base| {
            base.lock().session(r.session)?;
            base.note_written_under(r.map_version);
            Ok(())
        };
        if r.map_version <= (base.config.map_version)() {
            return Outcome::now(noted(&base));
        }
        // A number that no map has would keep all clients from reading.
        Outcome::Waits(Box::pin(async move {
            base.wait_for_map(r.map_version).await?;
            noted(&base).map(|()| Reply::new(&()))
        }))
    }

    pub fn is_of(&self, session: SessionId, connection: &Connection) -> bool {
        let state = self.base.lock();
        let on = state.sessions.get(&session).and_then(|s| s.connection.as_ref());
        on.is_some_and(|on| on.id() == connection.id())
    }

    pub fn close(&self, r: &SessionClose) -> Result<CommitSeq> {
        let mut state = self.base.lock();
        self.ends.end_session(&mut state, r.session, "closed by the client")?;
        Ok(self.base.commits.newest(&state))
    }

    pub fn release(&self, r: &ReleaseLease) -> Result<()> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        if state.leases.lower(r.session, r.ino, r.keep) {
            state.wake(r.ino);
        }
        Ok(())
    }

    pub fn reclaim_reservations(&self, r: &ReclaimReservations) -> Result<()> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        let account = |held: &HeldReservation| Quotas::account_of_volume(held.volume);
        r.held.iter().for_each(|held| state.quotas.set(account(held), r.session, held.bytes));
        self.holds.note_used_volumes(&mut state, r.session, r.held.iter().map(|held| held.volume))
    }
    pub fn reclaim_space(&self, r: &ReclaimSpace) -> Result<()> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        r.held.iter().for_each(|held| state.quotas.set(held.account, r.session, held.bytes));
        self.holds.note_used_volumes(&mut state, r.session, r.held.iter().map(|held| held.account.volume))
    }

    pub fn release_append_token(&self, r: &ReleaseAppendToken) -> Result<()> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        if state.leases.release_append_token(r.session, r.ino) {
            state.wake(r.ino);
        }
        Ok(())
    }
}

/// Adds the holdings that a part of a resume names; all of them, by inode, once the last part has arrived.
fn name_held(
    session: &mut Session,
    r: &SessionResume,
    on: u64,
) -> Result<Option<BTreeMap<InodeId, HeldLease>>> {
    if session.naming.0 != on {
        session.naming = (on, Vec::new());
    }
    let named = &mut session.naming.1;
    if named.len() + r.held.len() > HELD_IN_ALL_MAX {
        *named = Vec::new();
        return Err(Error::invalid(format!("more than {HELD_IN_ALL_MAX} leases and opens of one session")));
    }
    named.extend(r.held.iter().cloned());
    Ok((!r.more).then(|| std::mem::take(named).into_iter().map(|h| (h.ino, h)).collect()))
}

impl SessionCalls {
    /// Restores a holding that a client names; false if it cannot keep the lease.
    fn take_up(&self, state: &mut State, session: SessionId, lease: &HeldLease, known: bool) -> Result<bool> {
        let mut inode = None;
        let (mut exists, mut block) = (false, None);
        self.base.read(&mut |read| {
            inode = namespace::find_inode(read, lease.ino)?;
            exists = inode.is_some() || tables::ACCESS.has(read, lease.ino)?;
            block = namespace::local_creates::find_block(read, session, lease.ino)?;
            Ok(())
        })?;
        if !exists {
            return Ok(false);
        }
        state.leases.set_opens(session, lease.ino, Opens { read: lease.open_read, write: lease.open_write });
        let has_token = state.leases.has_append_token(session, lease.ino);
        if lease.append_token && !known && !has_token {
            state.leases.take_up_append_token(session, lease.ino);
        } else if !lease.append_token && state.leases.release_append_token(session, lease.ino) {
            state.wake(lease.ino);
        }
        if inode.as_ref().is_some_and(|i| i.nlink == 0) {
            state.leases.mark_orphan(lease.ino);
        }
        let had = state.leases.held(session, lease.ino);
        let wanted = lease.kind;
        if known || wanted == LeaseKind::None {
            state.leases.lower(session, lease.ino, wanted);
            state.wake(lease.ino);
            return Ok(had >= wanted);
        }
        let kept = match (wanted, &inode) {
            (LeaseKind::Write, Some(i))
                if i.writing.writer == session && i.writing.token_epoch >= lease.token_epoch =>
            {
                state.leases.take_up_write(session, lease.ino)
            }
            // No other session gets the names of a directory during the grace period.
            (LeaseKind::Write, None) => block.map_or(LeaseKind::None, |block| {
                state.leases.take_up_names(session, lease.ino, block.numbers())
            }),
            (LeaseKind::Read, _) => state.leases.acquire_read(session, lease.ino),
            _ => LeaseKind::None,
        };
        Ok(kept >= wanted)
    }
}
