//! Revokes leases: a client is asked until it returns one, or its session is over.
use super::Leader;
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

impl Leader {
    /// Asks the clients whose leases conflict to return them.
    pub fn revoke(self: &Arc<Self>, obstacles: Obstacles) {
        for conflict in obstacles.leases().copied().filter(|c| c.ask) {
            if self.lock().leases.begin_revoke(conflict.session, conflict.ino) {
                let leader = self.clone();
                leader.env.tasks.crash_point(crash_points::REVOKING);
                self.env.tasks.spawn("lease revoke", async move { revoke(leader, conflict).await });
            }
        }
    }
}

/// Asks a client to return a lease, until it has or its session is over.
async fn revoke(leader: Arc<Leader>, conflict: Conflict) {
    let pause = {
        let mut state = leader.lock();
        // Without a lease the permission to write directly is withdrawn, for a reader.
        let for_reader = conflict.keep == LeaseKind::Read
            || state.leases.held(conflict.session, conflict.ino) == LeaseKind::None;
        let now = leader.env.clock.now();
        if for_reader { state.pause_before_poll(conflict.ino, now) } else { Duration::ZERO }
    };
    leader.env.clock.sleep(pause).await;
    // Its time counts from its turn: a client is not slow because much is asked of it.
    let turns = leader.lock().sessions.get(&conflict.session).map(|session| session.revokes.clone());
    let Some(turns) = turns else { return };
    let Ok(_turn) = turns.acquire().await else { return };
    let patience = leader.term() * REVOKE_TERMS_MAX;
    let mut began = leader.env.clock.now();
    let request = Revoke { ino: conflict.ino, keep: conflict.keep };
    loop {
        let (connection, moved) = {
            let mut state = leader.lock();
            // It was spared only as long as no operation conflicted with its leases.
            if state.is_silent(conflict.session, leader.env.clock.now(), leader.term()) {
                let why = "it was silent for a lease term, and others want what it holds";
                return leader.report(leader.end_session(&mut state, conflict.session, why));
            }
            let Some(session) = state.sessions.get(&conflict.session) else { return };
            began = began.max(state.stalls.until);
            (session.connection.clone(), session.moved.clone().notified_owned())
        };
        let left = (began + patience).since(leader.env.clock.now());
        if left.is_zero() || is_stuck(&leader, conflict.session, began) {
            return fence(&leader, conflict.session);
        }
        if let Some(connection) = connection {
            let asked = connection.call(&request, Vec::new(), left);
            tokio::pin!(asked);
            let answer = loop {
                tokio::select! {
                    biased;
                    answer = &mut asked => break answer,
                    () = leader.env.clock.sleep(leader.term() / TICKS_PER_TERM) => {
                        if is_stuck(&leader, conflict.session, began) {
                            return fence(&leader, conflict.session);
                        }
                    }
                }
            };
            match answer {
                Ok(_) => return note_returned(&leader, conflict),
                Err(e) if e.kind == ErrorKind::Unavailable || e.kind == ErrorKind::Deadline => {}
                Err(e) => {
                    if let Some(more) = leader.env.watch.line("a revoke failed") {
                        let (session, inode) = (conflict.session, conflict.ino);
                        tracing::warn!(%session, %inode, "a revoke failed: {e}{more}");
                    }
                }
            }
        }
        // It returns on a new connection, retries by itself, or expires.
        let _ = leader.env.clock.timeout(left.min(leader.term() / TICKS_PER_TERM), moved).await;
    }
}

/// Whether a client under revoke has made no progress for a lease term.
fn is_stuck(leader: &Leader, session: SessionId, began: Instant) -> bool {
    let got_on = leader.lock().got_on(session, began);
    got_on.is_some_and(|at| leader.env.clock.now().since(at) > leader.term().max(STUCK_MIN))
}

/// Ends the session of a client that does not return a lease that others wait for: with all its holdings, at
/// once. Its next one gets no leases for a while.
fn fence(leader: &Arc<Leader>, session: SessionId) {
    let mut state = leader.lock();
    let client = state.sessions.get(&session).map(|s| s.client.clone());
    if let Some(client) = client {
        state.mistrust(&client, leader.env.clock.now());
    }
    let ended = leader.end_session(&mut state, session, "it did not answer a revoke");
    leader.report(ended);
}

fn note_returned(leader: &Leader, conflict: Conflict) {
    let mut state = leader.lock();
    if let Some(session) = state.sessions.get_mut(&conflict.session) {
        session.progress = leader.env.clock.now();
    }
    state.leases.end_revoke(conflict.session, conflict.ino, conflict.keep);
    state.wake(conflict.ino);
}
