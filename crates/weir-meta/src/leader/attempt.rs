//! One attempt of an operation: check for obstacles, transaction, grants, all under one lock.
//!
//! Invariants: the state that an operation saw and its grants belong to one moment. A change whose slot holds
//! its reply already is not repeated.
use super::full_disk::{space_is_short, without_space};
use super::state::Parked;
use super::{Leader, State};
use crate::access::Mount;
use crate::crash_points;
use crate::namespace::{self, Cx, Events, Rules, View};
use crate::obstacle::{Attempt, Halt, Obstacle, Obstacles, discarding};
use crate::ops::{Grants, Operation, Work};
use crate::reach::Place;
use crate::record::{Record, SlotRecord, slot_value};
use crate::session::no_session;
use crate::tables;
use crate::witness::witness;
use tokio::sync::futures::OwnedNotified;
use weir_env::Instant;
use weir_kv::{CommitSeq, Txn};
use weir_proto::meta::{Op, SLOTS};
use weir_proto::{Error, Result, SessionId, Wire, Writer};
use weir_rpc::Connection;

impl Leader {
    /// Attempts once. Conflicting leases are returned for their revoke, and the inodes are parked on in
    /// `parked`.
    pub fn attempt<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        on: &Connection,
        parked: &mut Parked,
    ) -> Result<(Step, Obstacles)> {
        state.unpark(parked);
        let id = request.session();
        let session = state.sessions.get_mut(&id).ok_or_else(|| no_session(id))?;
        session.last_contact = self.env.clock.now();
        if self.waits_for_absent(state, request)? {
            return Ok((Step::Wait(state.park_for_absent(id, parked)), Obstacles::default()));
        }
        let mount = self.mount_at(state, on);
        let mut obstacles = std::mem::take(&mut state.obstacles);
        obstacles.clear();
        let ran = match self.run(state, request, mount.as_deref(), &mut obstacles) {
            Ok(reply) => Some(Ok(reply)),
            Err(Halt::Failed(e)) => Some(Err(self.map_error(e))),
            Err(Halt::Blocked) => None,
        };
        assert_eq!(ran.is_none(), !obstacles.is_empty(), "{}: it is blocked by obstacles", R::NAME);
        if let Some(ran) = ran {
            state.obstacles = obstacles;
            if let Some(audits) = state.mounts.audits() {
                let (rules, failed) = ((&**audits, &*self.config.witness), ran.as_ref().err());
                // The change stands, even if it could not be audited.
                if let Err(e) = witness(&self.kv, rules, request, on, failed, namespace::admit::find_place)
                    && let Some(more) = self.env.watch.line("not recorded")
                {
                    tracing::error!("{} was not recorded: {e}{more}", R::NAME);
                }
            }
            return ran.map(|reply| (Step::Done(reply, state.newest), Obstacles::default()));
        }
        for obstacle in obstacles.iter() {
            match obstacle {
                Obstacle::NotEnumerated { dir } if !self.want_clone_names(*dir)? => self.want_names(*dir)?,
                Obstacle::Full { .. } => state.quotas.full.notify_one(),
                Obstacle::NotEnumerated { .. } | Obstacle::Lease(_) | Obstacle::Snapshot { .. } => {}
            }
        }
        let wait = state.park(id, &obstacles, parked);
        state.note_contended(&obstacles, self.env.clock.now());
        Ok((Step::Wait(wait), obstacles))
    }

    fn run<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
    ) -> Attempt<Vec<u8>> {
        for reach in request.reach().iter().flatten() {
            if let Place::Inode(dir) | Place::Shown(dir) | Place::Name(dir, _) = reach.place {
                state.leases.names_conflict(request.session(), dir, reach.changes, obstacles);
            }
        }
        obstacles.halt()?;
        let (mut reply, first) = match R::work() {
            Work::Show(show) => (self.show(state, request, mount, obstacles, show)?, true),
            Work::Change(change) => self.change(state, request, mount, obstacles, change)?,
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
        };
        request.settle(&mut reply, &mut grants);
        let (woken, shown) = (grants.woken, grants.shown);
        if let Some(ino) = woken {
            state.wake(ino);
        }
        if let Some(dir) = shown.filter(|_| !state.mirrored.is_empty()) {
            self.rescan(dir)?;
        }
        self.note_holds(state)?;
        self.note_reserved(state, request)?;
        self.check_recorded(state, request.session())?;
        let mut w = Writer { bytes: Vec::with_capacity(REPLY_BYTES) };
        reply.encode(&mut w);
        Ok(w.bytes)
    }

    fn show<R: Operation>(
        &self,
        state: &State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        show: fn(&mut View<'_>, &R) -> Attempt<R::Reply>,
    ) -> Attempt<R::Reply> {
        let live = |s: SessionId| state.sessions.contains_key(&s);
        let rules = self.rules(state, request.session(), mount, &live);
        let mut shown = None;
        self.kv.read(&mut |read| {
            obstacles.clear();
            let mapped = namespace::admit::admit(read, &rules, request)?;
            let request = mapped.as_ref().unwrap_or(request);
            shown = Some(show(&mut View { read, rules: &rules, obstacles }, request));
            Ok(())
        })?;
        obstacles.halt()?;
        shown.expect("the body ran")
    }

    /// The reply, and whether it was made now or earlier.
    fn change<R: Operation>(
        &self,
        state: &mut State,
        request: &R,
        mount: Option<&Mount>,
        obstacles: &mut Obstacles,
        change: fn(&mut Cx<'_>, &R) -> Attempt<R::Reply>,
    ) -> Attempt<(R::Reply, bool)> {
        let op = request.op();
        op.map_or(Ok(()), check_slot)?;
        let (mut done, mut replayed, mut events) = (None, false, Events::default());
        let mut halt = None;
        let is_short = R::GROWS && self.kv.is_space_short();
        let mut refused = false;
        {
            let live = |s: SessionId| state.sessions.contains_key(&s);
            let named = state.sessions.get(&request.session()).map_or("", |s| s.client.as_str());
            let client = mount.map_or(named, |mount| mount.origin.name.as_str());
            let rules = Rules { client, ..self.rules(state, request.session(), mount, &live) };
            let committed = self.kv.transact_more(&mut |txn| {
                obstacles.clear();
                events = Events::default();
                if let Some(reply) = op.map_or(Ok(None), |op| earlier_reply::<R>(txn, op))? {
                    (done, replayed) = (Some(reply), true);
                    return Ok(());
                }
                if is_short {
                    refused = true;
                    return Err(space_is_short());
                }
                refused = true;
                let mapped = namespace::admit::admit(&*txn, &rules, request)?;
                let request = mapped.as_ref().unwrap_or(request);
                let uid = request.cred().map(|cred| cred.uid);
                let ran = namespace::run(txn, &rules, obstacles, &mut events, uid, |cx| change(cx, request));
                let reply = discarding(ran, &mut halt)?;
                if let Some(op) = op {
                    let value = slot_value(op.seq, R::METHOD, &reply);
                    txn.put(&tables::SLOTS.key((op.session, op.slot)), &value);
                }
                done = Some(reply);
                refused = false;
                Ok(())
            });
            if let Some(Halt::Blocked) = halt {
                return Err(Halt::Blocked);
            }
            let committed = committed.map_err(|e| if refused { e } else { without_space::<R>(e) })?;
            state.newest = state.newest.max(committed);
        }
        self.env.tasks.crash_point(crash_points::CHANGED);
        self.apply_events(state, request.session(), &events)?;
        let first = op.is_none_or(|op| state.note_applied(op)) || !replayed;
        Ok((done.expect("the body ran"), first))
    }
}

/// Room for most replies.
const REPLY_BYTES: usize = 384;

/// The result of one attempt of an operation.
pub enum Step {
    /// The reply, to be sent when the commit is durable.
    Done(Vec<u8>, CommitSeq),
    /// The operation is attempted again when the wait ends.
    Wait(OwnedNotified),
}

fn check_slot(op: &Op) -> Result<()> {
    if op.slot < SLOTS && op.seq > 0 {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "slot {} seq {}: slots are 0 to {}, numbers start at 1",
        op.slot,
        op.seq,
        SLOTS - 1
    )))
}

/// The reply of an earlier try of the same change.
fn earlier_reply<R: Operation>(txn: &mut dyn Txn, op: &Op) -> Result<Option<R::Reply>> {
    let Some(value) = txn.get(&tables::SLOTS.key((op.session, op.slot)))? else { return Ok(None) };
    let seq = value.get(1..9).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    if op.seq > seq {
        return Ok(None);
    }
    let record = SlotRecord::from_value(&value, || format!("slot {} of session {}", op.slot, op.session))?;
    if op.seq < record.seq || record.method != R::METHOD {
        return Err(Error::stale(format!(
            "slot {} of session {} is at change {} (method {}): change {} (method {}) comes too late",
            op.slot,
            op.session,
            record.seq,
            record.method,
            op.seq,
            R::METHOD
        )));
    }
    R::Reply::from_bytes(&record.reply).map(Some)
}
