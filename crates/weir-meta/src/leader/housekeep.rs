//! Transactions of the leader itself, and the inputs that all transactions have.
use super::{Leader, NO_SESSION, State};
use crate::access::Mount;
use crate::crash_points;
use crate::namespace::{self, Cx, Events, Rules};
use crate::obstacle::{Attempt, Halt, Obstacles, discarding};
use crate::record::Inode;
use weir_proto::{Error, InodeId, Result, SessionId};

impl Leader {
    /// Runs a transaction of the leader itself, in the name of a session: its own leases are not obstacles.
    pub fn housekeep(
        &self,
        state: &mut State,
        session: SessionId,
        body: &mut dyn FnMut(&mut Cx<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut obstacles = Obstacles::default();
        let done = self.housekeep_asking(state, session, &mut obstacles, &mut |cx| Ok(body(cx)?));
        done.map_err(|halt| match halt {
            Halt::Blocked => Error::unavailable(format!("the leader's own work is blocked: {obstacles:?}")),
            Halt::Failed(e) => e,
        })
    }

    /// As [`Leader::housekeep`], but there may be obstacles: they are returned, and nothing is changed.
    pub fn housekeep_asking(
        &self,
        state: &mut State,
        session: SessionId,
        obstacles: &mut Obstacles,
        body: &mut dyn FnMut(&mut Cx<'_>) -> Attempt<()>,
    ) -> Attempt<()> {
        let (mut events, mut halt) = (Events::default(), None);
        {
            let live = |s: SessionId| state.sessions.contains_key(&s);
            let rules = self.rules(state, session, None, &live);
            let committed = self.kv.transact(&mut |txn| {
                obstacles.clear();
                events = Events::default();
                let ran = namespace::run(txn, &rules, obstacles, &mut events, None, &mut *body);
                discarding(ran, &mut halt)
            });
            if let Some(Halt::Blocked) = halt {
                return Err(Halt::Blocked);
            }
            state.newest = state.newest.max(committed?);
        }
        self.env.tasks.crash_point(crash_points::HOUSEKEPT);
        self.apply_events(state, session, &events)?;
        Ok(())
    }

    pub fn rules<'a>(
        &'a self,
        state: &'a State,
        session: SessionId,
        mount: Option<&'a Mount>,
        live: &'a dyn Fn(SessionId) -> bool,
    ) -> Rules<'a> {
        let (now, deaths, layout) = (self.wall(), state.deaths.count, &*self.config.layout);
        let (quotas, logged, at_home) = (&state.quotas, &state.logged, &*self.config.at_home);
        let (snapshots, snapshotting) = (&state.snapshots, state.snapshotting);
        Rules {
            session,
            client: "",
            mount,
            now,
            leases: &state.leases,
            quotas,
            live,
            deaths,
            logged,
            mirrored: &state.mirrored,
            snapshots,
            snapshotting,
            at_home,
            layout,
        }
    }

    /// Whether a writer died while data of this file may have been in flight.
    pub fn must_recover(&self, state: &State, ino: InodeId, inode: &Inode) -> bool {
        let live = |s: SessionId| state.sessions.contains_key(&s);
        self.rules(state, NO_SESSION, None, &live).must_recover(ino, inode)
    }
}
