//! Revokes leases: a client is asked until it returns one, or its session is over.
use super::base::Base;
use super::ends::SessionEnds;
use crate::crash_points;
use crate::lease::Conflict;
use crate::obstacle::Obstacles;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::meta::{LeaseKind, Revoke};
use weir_proto::{ErrorKind, SessionId};

/// A client under revoke writes back its changes; as long as it makes progress, it has this number of lease
/// terms for that. One that is alive, but saves and returns nothing, has one,
const REVOKE_TERMS_MAX: u32 = 4;

/// and at least this time: until a silent target is dropped from its groups, and an operation has restarted,
/// nothing is saved either.
const STUCK_MIN: Duration = Duration::from_secs(10);

/// Checks of a client under revoke, per lease term.
const TICKS_PER_TERM: u32 = 4;

/// Asks clients for leases that others wait for.
pub struct Revoker {
    base: Arc<Base>,
    ends: Arc<SessionEnds>,
}

impl Revoker {
    pub fn new(base: &Arc<Base>, ends: &Arc<SessionEnds>) -> Arc<Revoker> {
        Arc::new(Revoker { base: base.clone(), ends: ends.clone() })
    }

    /// Asks the clients whose leases conflict to return them.
    pub fn revoke(self: &Arc<Self>, obstacles: Obstacles) {
        for conflict in obstacles.leases().copied().filter(|c| c.ask) {
            if self.base.lock().leases.begin_revoke(conflict.session, conflict.ino) {
                let revoker = self.clone();
                revoker.base.env.tasks.crash_point(crash_points::REVOKING);
                self.base.env.tasks.spawn("lease revoke", async move { revoke(revoker, conflict).await });
            }
        }
    }
}

/// Asks a client to return a lease, until it has or its session is over.
async fn revoke(revoker: Arc<Revoker>, conflict: Conflict) {
    let pause = {
        let mut state = revoker.base.lock();
        // Without a lease the permission to write directly is withdrawn, for a reader.
        let for_reader = conflict.keep == LeaseKind::Read
            || state.leases.held(conflict.session, conflict.ino) == LeaseKind::None;
        let now = revoker.base.now();
        if for_reader { state.pause_before_poll(conflict.ino, now) } else { Duration::ZERO }
    };
    revoker.base.env.clock.sleep(pause).await;
    // Its time counts from its turn: a client is not slow because much is asked of it.
    let turns = revoker.base.lock().sessions.get(&conflict.session).map(|session| session.revokes.clone());
    let Some(turns) = turns else { return };
    let Ok(_turn) = turns.acquire().await else { return };
    let patience = revoker.base.term() * REVOKE_TERMS_MAX;
    let mut began = revoker.base.now();
    let request = Revoke { ino: conflict.ino, keep: conflict.keep };
    loop {
        let (connection, moved) = {
            let mut state = revoker.base.lock();
            // It was spared only as long as no operation conflicted with its leases.
            if state.is_silent(conflict.session, revoker.base.now(), revoker.base.term()) {
                let why = "it was silent for a lease term, and others want what it holds";
                return revoker.base.report(revoker.ends.end_session(&mut state, conflict.session, why));
            }
            let Some(session) = state.sessions.get(&conflict.session) else { return };
            began = began.max(state.stalls.until);
            (session.connection.clone(), session.moved.clone().notified_owned())
        };
        let left = (began + patience).since(revoker.base.now());
        if left.is_zero() || is_stuck(&revoker, conflict.session, began) {
            return fence(&revoker, conflict.session);
        }
        if let Some(connection) = connection {
            let asked = connection.call(&request, Vec::new(), left);
            tokio::pin!(asked);
            let answer = loop {
                tokio::select! {
                    biased;
                    answer = &mut asked => break answer,
                    () = revoker.base.env.clock.sleep(revoker.base.term() / TICKS_PER_TERM) => {
                        if is_stuck(&revoker, conflict.session, began) {
                            return fence(&revoker, conflict.session);
                        }
                    }
                }
            };
            match answer {
                Ok(_) => return note_returned(&revoker, conflict),
                Err(e) if e.kind == ErrorKind::Unavailable || e.kind == ErrorKind::Deadline => {}
                Err(e) => {
                    if let Some(more) = revoker.base.env.watch.line("a revoke failed") {
                        let (session, inode) = (conflict.session, conflict.ino);
                        tracing::warn!(%session, %inode, "a revoke failed: {e}{more}");
                    }
                }
            }
        }
        // It returns on a new connection, retries by itself, or expires.
        let _ = revoker.base.env.clock.timeout(left.min(revoker.base.term() / TICKS_PER_TERM), moved).await;
    }
}

/// Whether a client under revoke has made no progress for a lease term.
fn is_stuck(revoker: &Revoker, session: SessionId, began: Instant) -> bool {
    let got_on = revoker.base.lock().got_on(session, began);
    got_on.is_some_and(|at| revoker.base.now().since(at) > revoker.base.term().max(STUCK_MIN))
}

/// Ends the session of a client that does not return a lease that others wait for: with all its holdings, at
/// once. Its next one gets no leases for a while.
fn fence(revoker: &Revoker, session: SessionId) {
    let mut state = revoker.base.lock();
    let client = state.sessions.get(&session).map(|s| s.client.clone());
    if let Some(client) = client {
        state.mistrust(&client, revoker.base.now());
    }
    let ended = revoker.ends.end_session(&mut state, session, "it did not answer a revoke");
    revoker.base.report(ended);
}

fn note_returned(revoker: &Revoker, conflict: Conflict) {
    let mut state = revoker.base.lock();
    if let Some(session) = state.sessions.get_mut(&conflict.session) {
        session.progress = revoker.base.now();
    }
    state.leases.end_revoke(conflict.session, conflict.ino, conflict.keep);
    state.wake(conflict.ino);
}
