//! Sessions: the registered clients, the time of their last message, and the end of a session.
//!
//! Invariant: a session in memory is a session in the store. After a restart a session is known but not
//! resumed: until all are, or one lease term has passed, nothing is granted that one of them may hold, by the
//! volumes that are recorded for it.

use crate::holds::Holds;
use crate::keys;
use crate::namespace::remove::release_orphan;
use crate::namespace::{Cx, local_creates};
use crate::record::SessionRecord;
use crate::tables;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use weir_env::Instant;
use weir_kv::{Read, Scan};
use weir_proto::lock::HeldLock;
use weir_proto::meta::{HeldLease, SLOTS};
use weir_proto::{Error, Result, SessionId};
use weir_rpc::Connection;

/// How long a silent client keeps holdings that no other client needs: longer than a mount waits for a server
/// by default.
pub const SPARED_FOR: Duration = Duration::from_secs(15 * 60);

/// Silence that is not counted while few clients send messages, in lease terms: as long as one may answer a
/// revoke. With the term that ends a session, 40 s.
const FORGIVEN_TERMS_MAX: u32 = 3;

/// Revokes that one client is asked to answer at the same time, the others in order after them: each may need
/// a change of the client before its answer, and a client has this number of changes in flight.
pub const REVOKES_AT_ONCE: usize = SLOTS as usize;

/// A registered client.
pub struct Session {
    pub client: String,
    /// As the client reported it; empty: not reported.
    pub process: String,
    /// The time of its last message; later if silence was forgiven.
    pub last_contact: Instant,
    /// The silence that was forgiven since its last message, and `last_contact` after that.
    forgiven: (Duration, Instant),
    /// The bytes that it has saved, by its last report, and the time when that grew, or it answered a revoke.
    pub saved: u64,
    pub progress: Instant,
    pub connection: Option<Connection>,
    /// Where it may hold something, as the store has it.
    pub holds: Holds,
    /// Has named its holdings since this leader started.
    pub resumed: bool,
    /// Per slot: the change whose opens are counted since the last resume.
    pub applied: [u64; SLOTS as usize],
    /// The holdings that a resume in progress has named, and its connection.
    pub naming: (u64, Vec<HeldLease>),
    /// The locks that a resume in progress has named, and its connection.
    pub naming_locks: (u64, Vec<HeldLock>),
    /// The connection on which requests for locks are accepted.
    pub locks_on: u64,
    /// Notified when the session has a new connection or is gone.
    pub moved: Arc<Notify>,
    /// Revokes that the client may be asked to answer at the same time; closed with the session.
    pub revokes: Arc<Semaphore>,
}

impl Session {
    pub fn new(
        client: String,
        process: String,
        now: Instant,
        connection: Option<Connection>,
        (holds, resumed): (Holds, bool),
    ) -> Session {
        Session {
            holds,
            client,
            process,
            last_contact: now,
            forgiven: (Duration::ZERO, now),
            saved: 0,
            progress: now,
            locks_on: connection.as_ref().map_or(0, Connection::id),
            naming_locks: (0, Vec::new()),
            connection,
            resumed,
            applied: [0; SLOTS as usize],
            naming: (0, Vec::new()),
            moved: Arc::default(),
            revokes: Arc::new(Semaphore::new(REVOKES_AT_ONCE)),
        }
    }
}

pub type Sessions = BTreeMap<SessionId, Session>;

/// The sessions whose lease term ended, in order.
pub fn expired(sessions: &Sessions, now: Instant, term: Duration) -> Vec<SessionId> {
    sessions.iter().filter(|(_, s)| now.since(s.last_contact) > term).map(|(id, _)| *id).collect()
}

/// Called at every `step` of a term. If most clients have fallen silent together, the links of the leader's
/// machine are cut: their silence of this step does not count, for a few terms. A client that is silent
/// while messages of others arrive could have sent some.
pub fn forgive_common_silence(sessions: &mut Sessions, now: Instant, step: Duration, term: Duration) {
    // Others have expired already.
    let is_counted = |s: &Session| s.resumed && now.since(s.last_contact) <= term;
    // A living client gives a sign of life in each third of a term.
    let is_heard = |s: &Session| now.since(s.last_contact) <= term / 2;
    let counted = sessions.values().filter(|s| is_counted(s)).count();
    let heard = sessions.values().filter(|s| is_counted(s) && is_heard(s)).count();
    if heard * 2 >= counted {
        return;
    }
    for session in sessions.values_mut().filter(|s| is_counted(s) && !is_heard(s)) {
        let before = match session.forgiven {
            (silence, then) if then == session.last_contact => silence,
            _ => Duration::ZERO,
        };
        if before < term * FORGIVEN_TERMS_MAX {
            session.last_contact = session.last_contact + step;
            session.forgiven = (before + step, session.last_contact);
        }
    }
}

/// The sessions among the `expired` that stay a while: they may have bytes that are nowhere else, and
/// conflict with no other client.
pub fn spared(session: &Session, now: Instant, undisturbed: bool) -> bool {
    session.resumed && undisturbed && now.since(session.last_contact) <= SPARED_FOR
}

/// The sessions of processes that have definitely ended, in order.
pub fn gone(sessions: &Sessions, is_gone: &dyn Fn(&str) -> bool) -> Vec<SessionId> {
    let dead = |s: &Session| s.connection.is_none() && !s.process.is_empty() && is_gone(&s.process);
    sessions.iter().filter(|(_, s)| dead(s)).map(|(id, _)| *id).collect()
}

/// All sessions of the store, as they are when a leader starts.
pub fn load(read: &dyn Read, now: Instant) -> Result<Sessions> {
    let mut sessions = Sessions::new();
    tables::SESSIONS.all().scan(read, &mut |id, SessionRecord { client, process, .. }| {
        sessions.insert(id, Session::new(client, process, now, None, (Holds::Anything, false)));
        Scan::More
    })?;
    for (id, session) in &mut sessions {
        if let Some(record) = tables::HOLDS.get(read, *id)? {
            session.holds = Holds::from_record(&record);
        }
    }
    Ok(sessions)
}

/// The number of sessions that have ended while they may have been writing.
pub fn deaths(read: &dyn Read) -> Result<u64> {
    let next = read.get(&keys::sequence(keys::Sequence::Death))?.and_then(|v| <[u8; 8]>::try_from(v).ok());
    Ok(next.map_or(0, |next| u64::from_le_bytes(next).saturating_sub(1)))
}

/// Nameless files that a session keeps, in order.
pub fn held_by(read: &dyn Read, session: SessionId) -> Result<Vec<weir_proto::InodeId>> {
    let all = tables::HELD.all().keys(read, usize::MAX, |held| held)?;
    Ok(all.into_iter().filter(|(_, by)| *by == session).map(|(ino, _)| ino).collect())
}

/// Removes a session from the store, with all records that only it needed.
pub fn forget(cx: &mut Cx<'_>, session: SessionId) -> Result<()> {
    for ino in held_by(&*cx.txn, session)? {
        release_orphan(cx, ino, session)?;
    }
    tables::SESSIONS.delete(cx.txn, session);
    tables::HOLDS.delete(cx.txn, session);
    tables::MOVERS.delete(cx.txn, session);
    local_creates::forget_numbers(cx.txn, session)?;
    for slot in 0..SLOTS {
        if tables::SLOTS.has(&*cx.txn, (session, slot))? {
            tables::SLOTS.delete(cx.txn, (session, slot));
        }
    }
    Ok(())
}

pub fn no_session(id: SessionId) -> Error {
    Error::stale(format!(
        "session {id} does not exist (any more): it was silent for more than a lease term, or closed"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: Duration = Duration::from_secs(10);
    const STEP: Duration = Duration::from_millis(2500);

    /// For how many seconds sessions stay; the first `heard` of them send messages all the time.
    fn stays(count: u64, heard: u64) -> u64 {
        let at = |ms: u64| Instant(ms * 1_000_000);
        let session = |_| Session::new(String::new(), String::new(), at(0), None, (Holds::nothing(), true));
        let mut sessions: Sessions = (0..count).map(|n| (SessionId(n), session(n))).collect();
        for tick in 1.. {
            let now = at(2500 * tick);
            let alive = sessions.iter_mut().filter(|(id, _)| id.0 < heard);
            alive.for_each(|(_, session)| session.last_contact = now);
            forgive_common_silence(&mut sessions, now, STEP, TERM);
            let ended = expired(&sessions, now, TERM);
            if !ended.is_empty() {
                assert_eq!(ended.len() as u64, count - heard);
                return now.since(at(0)).as_secs();
            }
        }
        unreachable!("the silent expire")
    }

    #[test]
    fn the_silence_of_most_is_forgiven_for_a_while() {
        assert_eq!(stays(4, 2), 12, "half of them are heard");
        assert_eq!(stays(4, 3), 12);
        assert_eq!(stays(4, 1), 42);
        assert_eq!(stays(4, 0), 42);
        assert_eq!(stays(1, 0), 42, "no client waits for it");
    }

    #[test]
    fn a_message_ends_what_was_forgiven() {
        let at = |s: u64| Instant(s * 1_000_000_000);
        let session = Session::new(String::new(), String::new(), at(0), None, (Holds::nothing(), true));
        let mut sessions = Sessions::from([(SessionId(1), session)]);
        let mut silent = |from: u64| {
            (1..100).find(|n| {
                let now = at(from) + STEP * *n;
                forgive_common_silence(&mut sessions, now, STEP, TERM);
                let over = !expired(&sessions, now, TERM).is_empty();
                if over {
                    sessions.values_mut().for_each(|s| s.last_contact = at(from + 1000));
                }
                over
            })
        };
        assert_eq!(silent(0), silent(1000));
    }
}
