//! Ends the sessions of silent clients. In simulated runs it checks the tables in memory as often.
use crate::leader::Leader;
use crate::session;
use std::sync::Arc;
use weir_proto::Error;

/// Checks for expired sessions, per lease term.
const TICKS_PER_TERM: u32 = 4;

/// Looks for ever.
pub async fn run(leader: Arc<Leader>) -> Error {
    let step = leader.base.term() / TICKS_PER_TERM;
    let mut last = leader.base.lock().stalls.until;
    loop {
        leader.base.env.clock.sleep(step).await;
        let now = leader.base.now();
        let stalled = now.since(last) > step * 2;
        last = now;
        let mut state = leader.base.lock();
        state.stalls.checked = now;
        if !(leader.base.config.takes_data)() {
            state.stalls.no_data_taken = now;
        }
        if leader.base.env.is_simulated {
            state.leases.check_all();
            state.locks.check_all();
            leader.relations.check();
        }
        state.trust_again(now);
        if stalled {
            state.note_stall(now, leader.base.term());
            continue;
        }
        state.wait_for_first_client(now, leader.base.term());
        session::forgive_common_silence(&mut state.sessions, now, step, leader.base.term());
        if state.grace.until.is_some_and(|until| now >= until) {
            let late: Vec<_> = state.sessions.iter().filter(|(_, s)| !s.resumed).map(|(id, _)| *id).collect();
            for id in late {
                leader.base.report(leader.ends.end_session(
                    &mut state,
                    id,
                    "it did not return after the restart",
                ));
            }
        }
        leader.base.report(leader.ends.record_ends(&mut state));
        leader.base.report(leader.ends.finish_grace(&mut state));
        leader.base.report(leader.holds.forget_old_holds(&mut state));
        if state.grace.until.is_none() {
            for id in session::expired(&state.sessions, now, leader.base.term()) {
                let undisturbed = state.leases.writes_undisturbed(id);
                if state.sessions.get(&id).is_some_and(|s| session::spared(s, now, undisturbed)) {
                    // Its unsaved bytes stay; a mover's work does not wait for it.
                    state.recalls.drop_session(id, now);
                    leader.relations.take_work_back(id);
                    continue;
                }
                leader.base.report(leader.ends.end_session(&mut state, id, "it was silent for a lease term"));
            }
        }
    }
}
