//! Transactions on the namespace, and what follows a commit: leases and tables in memory follow it, and jobs
//! are woken.
//!
//! Invariants: every change of the namespace runs here or in `operations`, with the same inputs, and the
//! state in memory follows it under the same lock. Names no job: it rings their bells.
use super::base::Base;
use super::clones::Clones;
use super::{NO_SESSION, State};
use crate::access::Mount;
use crate::allowances;
use crate::crash_points;
use crate::namespace::{self, Cx, Events, Rules};
use crate::obstacle::{Attempt, Halt, Obstacles, discarding};
use crate::reach::Reaches;
use crate::record::Inode;
use crate::relation::queues::Relations;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Notify;
use weir_proto::quota::Holder;
use weir_proto::{Error, InodeId, Result, SessionId, VolumeId};
use weir_rpc::Call;

/// The bells of jobs.
#[derive(Default)]
pub struct Bells {
    /// There is garbage to sweep.
    pub garbage: Notify,
    /// A volume was deleted.
    pub removal: Notify,
    /// A snapshot was deleted.
    pub forgetting: Notify,
}

/// Runs transactions, and lets the state in memory follow them.
pub struct Transactions {
    base: Arc<Base>,
    bells: Arc<Bells>,
    relations: Arc<Relations>,
    clones: Arc<Clones>,
}

impl Transactions {
    pub fn new(
        base: &Arc<Base>,
        bells: &Arc<Bells>,
        relations: &Arc<Relations>,
        clones: &Arc<Clones>,
    ) -> Arc<Transactions> {
        let (base, bells) = (base.clone(), bells.clone());
        Arc::new(Transactions { base, bells, relations: relations.clone(), clones: clones.clone() })
    }

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

    /// As [`Transactions::housekeep`], but there may be obstacles: they are returned, and nothing is changed.
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
            let committed = self.base.commits.transact(state, &mut |txn| {
                obstacles.clear();
                events = Events::default();
                let ran = namespace::run(txn, &rules, obstacles, &mut events, None, &mut *body);
                discarding(ran, &mut halt)
            });
            if let Some(Halt::Blocked) = halt {
                return Err(Halt::Blocked);
            }
            committed?;
        }
        self.base.env.tasks.crash_point(crash_points::HOUSEKEPT);
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
        let (now, deaths, layout) = (self.base.wall(), state.deaths.count, &*self.base.config.layout);
        let (quotas, logged, at_home) = (&state.quotas, &state.logged, &*self.base.config.at_home);
        let (snapshots, snapshotting) = (&state.snapshots, state.snapshotting);
        Rules {
            session,
            client: "",
            mount,
            now,
            again: false,
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

    /// A request, as the user that the rules map its user to. An error: they refuse it.
    pub(crate) fn admitted<R: Reaches>(&self, call: &Call, session: fn(&R) -> SessionId) -> Result<R> {
        let request = call.decode::<R>()?;
        let mut state = self.base.lock();
        let Some(mount) = self.base.mount_at(&mut state, &call.connection) else { return Ok(request) };
        let live = |_: SessionId| true;
        let rules = self.rules(&state, session(&request), Some(&mount), &live);
        let mut mapped = None;
        self.base.read(&mut |read| {
            mapped = namespace::admit::admit(read, &rules, &request)?;
            Ok(())
        })?;
        Ok(mapped.unwrap_or(request))
    }

    /// The state in memory follows a commit of this session.
    pub fn apply_events(&self, state: &mut State, session: SessionId, events: &Events) -> Result<()> {
        events.orphaned.iter().for_each(|ino| state.leases.mark_orphan(*ino));
        events.imported.iter().for_each(|ino| state.leases.unmark_orphan(*ino));
        events.gone.iter().for_each(|ino| state.leases.forget(*ino));
        events.filled.iter().for_each(|(ino, from, token)| state.recalls.done(*ino, *from, *token));
        events.truncated.iter().for_each(|(ino, size)| state.recalls.forget(*ino, *size));
        if events.concern_all() {
            self.base.commits.concern_all(state);
        }
        if events.garbage {
            self.bells.garbage.notify_one();
        }
        if events.logged {
            self.relations.changed.notify_one();
        }
        if events.relations {
            match self.relations.follow_store(self.base.commits.store()) {
                Ok(volumes) => (state.logged, state.mirrored) = volumes,
                Err(e) => self.base.commits.fail(&e.doing("read the relations")),
            }
        }
        if events.doomed {
            self.bells.removal.notify_one();
        }
        if events.snapshots {
            self.base.read(&mut |read| {
                state.snapshots = namespace::snapshot::load_all(read)?;
                Ok(())
            })?;
            self.bells.forgetting.notify_one();
            self.clones.call.notify_one();
        }
        if !events.volumes.is_empty() {
            state.mounts.forget_decisions();
        }
        for (id, record) in &events.volumes {
            state.quotas.note(*id, record.as_ref());
            if record.as_ref().is_some_and(|record| record.deleting) {
                self.bells.removal.notify_one();
            }
        }
        for (holder, record) in &events.limits {
            state.quotas.owners.note(*holder, *record);
        }
        if !events.limits.is_empty() {
            state.quotas.forget_unlimited();
        }
        self.apply_usage(state, session, events)
    }

    /// Usage of volumes, users and groups with limits has changed, or their limits have.
    fn apply_usage(&self, state: &mut State, session: SessionId, events: &Events) -> Result<()> {
        let mut volumes: BTreeSet<VolumeId> =
            events.volumes.iter().filter(|(_, record)| record.is_some()).map(|(id, _)| *id).collect();
        let mut holders: BTreeSet<Holder> = events.limits.iter().map(|(holder, _)| *holder).collect();
        for (account, charged) in &events.charged {
            state.quotas.consume(*account, session, charged.grown);
            volumes.insert(account.volume);
            holders.extend(account.holders());
        }
        for id in volumes {
            let mut over = None;
            self.base.read(&mut |read| {
                let usage = namespace::volume_usage(read, id)?;
                over = state.quotas.crossing(id, &usage, self.base.wall());
                Ok(())
            })?;
            if let Some(over) = over {
                self.housekeep(state, session, &mut |cx| namespace::volume::note_over(cx, id, over))?;
            }
        }
        if state.quotas.owners.is_empty() {
            return Ok(());
        }
        let mut crossed = Vec::new();
        self.base.read(&mut |read| {
            crossed = allowances::crossings(read, &state.quotas, holders.iter().copied(), self.base.wall())?;
            Ok(())
        })?;
        for (holder, record) in crossed {
            self.housekeep(state, session, &mut |cx| {
                cx.put_owner_record(holder, record);
                Ok(())
            })?;
        }
        Ok(())
    }
}
