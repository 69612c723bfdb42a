//! One attempt of an operation: check for obstacles, transaction, grants, all under one lock.
//!
//! Invariants: the state that an operation saw and its grants belong to one moment. A change whose slot holds
//! its reply already is not repeated.
use super::{Answer, How, Operations};
use crate::access::Mount;
use crate::crash_points;
use crate::leader::State;
use crate::leader::commits::Changing;
use crate::leader::full_disk::{space_is_short, without_space};
use crate::leader::state::Parked;
use crate::lease::NoteConflict;
use crate::namespace::{self, Cx, Events, Rules, View};
use crate::obstacle::{Attempt, Halt, Obstacle, Obstacles, discarding};
use crate::ops::{Grants, Operation, Work};
use crate::reach::Place;
use crate::session::no_session;
use crate::witness::witness;
use tokio::sync::futures::OwnedNotified;
use weir_env::Instant;
use weir_kv::CommitSeq;
use weir_proto::early::Given;
use weir_proto::{Error, Result, SessionId, Wire, Writer};
use weir_rpc::Connection;

impl Operations {
    /// Attempts once. Conflicting leases are returned for their revoke, and while the operation waits for
    /// them, the inodes are parked on in `parked`.
    pub fn attempt<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        on: &Connection,
        parked: &mut Parked,
        how: &How<R>,
    ) -> Result<(Step, Obstacles)> {
        state.unpark(parked);
        let id = request.session();
        let session = state.sessions.get_mut(&id).ok_or_else(|| no_session(id))?;
        session.last_contact = self.base.now();
        // Changes that are made again go before all that waits for them.
        if how.again().is_none() && self.holds.waits_for_absent(state, request)? {
            return Ok((Step::Wait(state.park_for_absent(id, parked)), Obstacles::default()));
        }
        let mount = self.base.mount_at(state, on);
        let mut obstacles = std::mem::take(&mut state.obstacles);
        obstacles.clear();
        let ran = match self.run(state, request, mount.as_deref(), &mut obstacles, how) {
            Ok(reply) => Some(Ok(reply)),
            Err(Halt::Failed(e)) => Some(Err(self.base.commits.map_error(e))),
            Err(Halt::Blocked) => None,
        };
        assert!(ran.is_some() || !obstacles.is_empty(), "{}: it is blocked by obstacles", R::NAME);
        if let Some(ran) = ran {
            let wanted = match obstacles.is_empty() {
                true => std::mem::replace(&mut state.obstacles, obstacles),
                false => obstacles,
            };
            if let Some(audits) = state.mounts.audits() {
                let (rules, failed) = ((&**audits, &*self.base.config.witness), ran.as_ref().err());
                // The change stands, even if it could not be audited.
                if let Err(e) = witness(
                    self.base.commits.store(),
                    rules,
                    request,
                    on,
                    failed,
                    namespace::admit::find_place,
                ) && let Some(more) = self.base.env.watch.line("not recorded")
                {
                    tracing::error!("{} was not recorded: {e}{more}", R::NAME);
                }
            }
            return ran.map(|answer| (Step::Done(answer), wanted));
        }
        if how.again().is_some() {
            return Err(Error::denied(format!("others hold what it changes: {obstacles:?}")));
        }
        for obstacle in obstacles.iter() {
            match obstacle {
                Obstacle::NotEnumerated { dir } => self.names.want(*dir)?,
                Obstacle::Full { .. } => state.quotas.full.notify_one(),
                Obstacle::Lease(_) | Obstacle::Snapshot { .. } => {}
            }
        }
        let wait = state.park(id, &obstacles, parked);
        state.note_contended(&obstacles, self.base.now());
        Ok((Step::Wait(wait), obstacles))
    }

    fn run<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        how: &How<R>,
    ) -> Attempt<Answer> {
        for reach in request.reach().iter().flatten() {
            if let Place::Inode(dir) | Place::Shown(dir) | Place::Name(dir, _) = reach.place {
                state.leases.names_conflict(request.session(), dir, reach.changes, obstacles);
            }
        }
        obstacles.halt()?;
        let Ran { mut reply, first, wait, given } = match R::work() {
            Work::Show(show) => self.show(state, request, mount, obstacles, show)?,
            Work::Change(change) => self.change(state, request, mount, obstacles, change, how)?,
        };
        let State { leases, quotas, contended, sessions, .. } = state;
        let now = sessions.get(&request.session()).map_or(Instant(0), |s| s.last_contact);
        let mut grants = Grants {
            leases,
            quotas,
            contended,
            now,
            session: request.session(),
            first,
            woken: None,
            shown: None,
            wanted: Vec::new(),
        };
        request.settle(&mut reply, &mut grants);
        let (woken, shown, wanted) = (grants.woken, grants.shown, grants.wanted);
        wanted.into_iter().for_each(|conflict| obstacles.note(conflict));
        if let Some(ino) = woken {
            state.wake(ino);
        }
        if let Some(dir) = shown.filter(|_| !state.mirrored.is_empty()) {
            self.names.rescan(dir)?;
        }
        self.holds.note_holds(state)?;
        self.holds.note_reserved(state, request)?;
        if !how.is_durable() {
            self.holds.note_changed(state, request)?;
        }
        self.holds.check_recorded(state, request.session())?;
        let mut w = Writer { bytes: Vec::with_capacity(REPLY_BYTES) };
        reply.encode(&mut w);
        let commits = &self.base.commits;
        let newest = commits.newest(state);
        let wait = wait.map_or(newest, |seq| seq.max(commits.of_all(state)));
        Ok(Answer { body: w.bytes, wait, newest, given })
    }

    fn show<R: Operation>(
        &self,
        state: &State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        show: fn(&mut View<'_>, &R) -> Attempt<R::Reply>,
    ) -> Attempt<Ran<R::Reply>> {
        let live = |s: SessionId| state.sessions.contains_key(&s);
        let rules = self.tx.rules(state, request.session(), mount, &live);
        let mut shown = None;
        let wait = self.base.commits.read_for(state, request.session(), &mut |read| {
            obstacles.clear();
            let mapped = namespace::admit::admit(read, &rules, request)?;
            let request = mapped.as_ref().unwrap_or(request);
            shown = Some(show(&mut View { read, rules: &rules, obstacles }, request));
            Ok(())
        })?;
        obstacles.halt()?;
        let (reply, given) = (shown.expect("the body ran")?, Given { at: rules.now, serials: Vec::new() });
        Ok(Ran { reply, first: true, wait: Some(wait), given })
    }

    fn change<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        change: fn(&mut Cx<'_>, &R) -> Attempt<R::Reply>,
        how: &How<R>,
    ) -> Attempt<Ran<R::Reply>> {
        let op = request.op();
        let again = how.again();
        let changing = Changing {
            session: request.session(),
            op,
            early: R::EARLY || !how.is_durable(),
            given: again.map(|again| &again.given.serials[..]),
        };
        let at = again.map_or_else(|| self.base.wall(), |again| again.given.at);
        let (mut events, mut halt) = (Events::default(), None);
        let is_short = R::GROWS && self.base.commits.is_space_short();
        let mut refused = false;
        let done = {
            let live = |s: SessionId| state.sessions.contains_key(&s);
            let named = state.sessions.get(&request.session()).map_or("", |s| s.client.as_str());
            let client = mount.map_or(named, |mount| mount.origin.name.as_str());
            let rules = self.tx.rules(state, request.session(), mount, &live);
            let rules = Rules { client, now: at, again: again.is_some(), ..rules };
            let done = self.base.commits.change_once::<R>(state, &changing, &mut |txn| {
                obstacles.clear();
                events = Events::default();
                refused = true;
                if is_short && again.is_none() {
                    return Err(space_is_short());
                }
                let mapped = namespace::admit::admit(&*txn, &rules, request)?;
                let request = mapped.as_ref().unwrap_or(request);
                let uid = request.cred().map(|cred| cred.uid);
                let ran = namespace::run(txn, &rules, obstacles, &mut events, uid, |cx| change(cx, request));
                let reply = discarding(ran, &mut halt)?;
                if again.is_some_and(|again| !(again.agree)(&reply, &again.reply)) {
                    return Err(Error::denied("it would have another result now"));
                }
                refused = false;
                Ok(reply)
            });
            if let Some(Halt::Blocked) = halt {
                return Err(Halt::Blocked);
            }
            done.map_err(|e| if refused { e } else { without_space::<R>(e) })?
        };
        self.base.env.tasks.crash_point(crash_points::CHANGED);
        self.tx.apply_events(state, request.session(), &events)?;
        let first = op.is_none_or(|op| state.note_applied(op)) || !done.replayed;
        let given = Given { at, serials: done.serials };
        let wait = done.early.filter(|_| !events.under_leases);
        Ok(Ran { reply: done.reply, first, wait, given })
    }
}

/// Room for most replies.
const REPLY_BYTES: usize = 384;

/// An operation that was carried out.
struct Ran<T> {
    reply: T,
    /// It was not an earlier try.
    first: bool,
    /// The commit that the reply waits for; `None`: the newest one.
    wait: Option<CommitSeq>,
    given: Given,
}

/// The result of one attempt of an operation.
pub enum Step {
    Done(Answer),
    /// The operation is attempted again when the wait ends.
    Wait(OwnedNotified),
}
