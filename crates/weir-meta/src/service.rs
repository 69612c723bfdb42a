//! The metadata service: calls come in, operations run, replies leave when they are durable.
//!
//! An operation without conflicts runs in place, in the connection's reader; one that must wait for a lease
//! waits in a task of its own, and no other waits behind it.

use crate::crash_points;
use crate::keys::{self, Sequence};
use crate::leader::{Leader, MetaConfig, Step};
use crate::lease::{Conflict, Opens};
use crate::namespace::{self, create::next_number};
use crate::ops::Operation;
use crate::record::{Record, SessionRecord};
use crate::session::{self, Session};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{BoxFuture, Env, Instant};
use weir_kv::{CommitSeq, SharedKv};
use weir_proto::backup::{BackupDone, BackupList, BackupSet, BackupTake};
use weir_proto::births::{CreateMany, LeaseNames};
use weir_proto::condition::{TroubleList, Troubles};
use weir_proto::coord::ActFor;
use weir_proto::lock::{CancelLock, ListLocks, ReclaimLocks, SetLock, TestLock};
use weir_proto::meta::*;
use weir_proto::recall::{AwaitRecall, Evict, EvictedRanges, Filled, GetEviction, SetPinned};
use weir_proto::relation::{
    AckChanges, CompleteWork, DropCursor, LeaseWork, ReadChanges, RelationAdd, RelationDo, RelationList,
    RelationResolve, RelationSuspect, ReportListing, ReportRelisting, WhereAtHome,
};
use weir_proto::sender::Sender;
use weir_proto::snapshot::{
    LayerCopied, LayersOf, SnapshotDelete, SnapshotGetAttr, SnapshotGetXattr, SnapshotList,
    SnapshotListXattr, SnapshotLookup, SnapshotOpen, SnapshotReadDir, SnapshotTake, TakeLayers,
};
use weir_proto::volume::*;
use weir_proto::{Error, ErrorKind, InodeId, NamespaceId, Request, Result, SessionId, Wire};
use weir_rpc::{Call, Connection, Defer, Handled, Payload, Proved, Reply, Service};
use weir_watch::WaitGuard;

/// A client under revoke writes back its changes; as long as it makes progress, it has this number of lease
/// terms for that. One that is alive, but saves and returns nothing, has one,
const REVOKE_TERMS_MAX: u32 = 4;
/// and at least this time: until a silent target is dropped from its groups, and an operation has restarted,
/// nothing is saved either.
const STUCK_MIN: Duration = Duration::from_secs(10);
/// After a connection ended it is checked whether the client's process is gone.
const END_DEAD_AFTER: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(20),
    Duration::from_millis(200),
    Duration::from_millis(2000),
];
/// Checks for expired sessions, per lease term.
const TICKS_PER_TERM: u32 = 4;
/// Files and directories that a resume may name in all its parts.
const HELD_IN_ALL_MAX: usize = 1 << 20;

/// The leader of one namespace's metadata. Cheap to clone.
#[derive(Clone)]
pub struct Meta {
    leader: Arc<Leader>,
}

impl Meta {
    /// Takes the leadership of the namespace in `kv` (created if it is empty). Nothing expires, and nothing
    /// that must become durable is answered, until [`Meta::run`] runs.
    pub fn open(env: &Env, kv: SharedKv, config: MetaConfig) -> Result<Meta> {
        Ok(Meta { leader: Leader::open(env, kv, config)? })
    }

    /// Expires silent sessions and sweeps deleted files, until the journal fails: then the node must stop.
    pub fn run(&self) -> BoxFuture<'_, Error> {
        Box::pin(self.run_unboxed())
    }
    async fn run_unboxed(&self) -> Error {
        let mut failed = self.leader.failed.subscribe();
        let sweeper = crate::job::sweeper::run(self.leader.clone());
        let replies = self.leader.replies.clone();
        let evictor = crate::job::evictor::run(self.clone());
        let relations = crate::job::ingest::run(self.leader.clone());
        tokio::select! {
            biased;
            e = failed.wait_for(Option::is_some) => {
                e.ok().and_then(|e| e.clone()).unwrap_or_else(|| Error::io("the journal failed"))
            }
            e = replies.run(&self.leader) => e,
            () = self.expire() => Error::io("the expiry of sessions ended"),
            e = sweeper => e,
            e = evictor => e,
            e = relations => e,
            e = self.remove_volumes() => e,
            e = self.forget_snapshots() => e,
            e = self.keep_schedules() => e,
            e = self.empty_trash() => e,
            e = self.list_clones() => e,
        }
    }

    async fn expire(&self) {
        let leader = &self.leader;
        let step = leader.term() / TICKS_PER_TERM;
        let mut last = leader.lock().stood_still_until;
        loop {
            leader.env.clock.sleep(step).await;
            let now = leader.env.clock.now();
            let stood_still = now.since(last) > step * 2;
            last = now;
            let mut state = leader.lock();
            state.looked = now;
            if !(leader.config.takes_data)() {
                state.no_data_taken = now;
            }
            state.trust_again(now);
            if stood_still {
                state.stood_still(now, leader.term());
                continue;
            }
            if state.grace_until.is_some_and(|until| now >= until) {
                let late: Vec<_> =
                    state.sessions.iter().filter(|(_, s)| !s.resumed).map(|(id, _)| *id).collect();
                for id in late {
                    report(
                        leader.end_session(&mut state, id, "it did not come back after the restart"),
                        leader,
                    );
                }
            }
            if state.grace_until.is_none() {
                for id in session::expired(&state.sessions, now, leader.term()) {
                    let undisturbed = state.leases.writes_undisturbed(id);
                    if state.sessions.get(&id).is_some_and(|s| session::spared(s, now, undisturbed)) {
                        continue;
                    }
                    report(leader.end_session(&mut state, id, "it was silent for a lease term"), leader);
                }
            }
        }
    }

    pub(crate) fn leader(&self) -> &Arc<Leader> {
        &self.leader
    }

    /// Sessions and inodes under lease, for status and tests.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.leader.lock();
        (state.sessions.len(), state.leases.len())
    }

    /// Records of a relation, for tests.
    pub fn relation_records(&self, relation: weir_proto::relation::RelationId) -> usize {
        let mut count = 0;
        // The failure of a store is reported elsewhere.
        let _ = self.leader.kv.read(&mut |read| {
            count = crate::relation::store::count(read, relation)?;
            Ok(())
        });
        count
    }

    fn operate<R: Operation>(&self, call: &Call) -> Outcome {
        let request = match call.decode::<R>() {
            Ok(request) => request,
            Err(e) => return Outcome::refused(e),
        };
        let leader = &self.leader;
        let mut parked = Vec::new();
        let mut state = leader.lock();
        let step = leader.attempt(&mut state, &request, &call.connection, &mut parked);
        let newest = state.newest;
        drop(state);
        match step {
            Ok((Step::Done(body, _), _)) if R::EARLY => Outcome::Ready(CommitSeq(0), Ok(reply(body))),
            Ok((Step::Done(body, seq), _)) => Outcome::Ready(seq, Ok(reply(body))),
            Ok((Step::Wait(wait), conflicts)) => {
                let shown = leader.waits(&request, &parked, &conflicts);
                self.revoke(conflicts);
                let waiting = Waiting { leader: leader.clone(), on: call.connection.clone(), parked, shown };
                Outcome::Waits(Box::pin(wait_and_retry(self.clone(), request, waiting, wait, call.deadline)))
            }
            // A refusal reveals the changes of others, too.
            Err(e) => Outcome::Ready(newest, Err(e)),
        }
    }

    pub(crate) fn revoke(&self, conflicts: Vec<Conflict>) {
        for conflict in conflicts.into_iter().filter(|c| c.ask) {
            if self.leader.lock().leases.begin_revoke(conflict.session, conflict.ino) {
                let leader = self.leader.clone();
                leader.env.tasks.crash_point(crash_points::REVOKING);
                self.leader.env.tasks.spawn("lease revoke", async move { revoke(leader, conflict).await });
            }
        }
    }
}

/// Different from those of any other namespace, so that a session from there is unknown here.
fn session_id(namespace: NamespaceId, n: u64) -> Result<SessionId> {
    let n = u32::try_from(n).map_err(|_| Error::no_space("all numbers of sessions are given"))?;
    Ok(SessionId((u64::from(namespace.0) << 32) | u64::from(n)))
}

/// A call that may wait for an event.
fn waits<R, T, F>(request: Result<R>, serve: impl FnOnce(R) -> F) -> Outcome
where
    T: Wire,
    F: Future<Output = Result<T>> + Send + 'static,
{
    match request {
        Ok(request) => {
            let served = serve(request);
            Outcome::Waits(Box::pin(async move { served.await.map(|body| Reply::new(&body)) }))
        }
        Err(e) => Outcome::refused(e),
    }
}

/// The outcome of a call in place.
pub(crate) enum Outcome {
    /// The reply, to be sent once the commit is durable.
    Ready(CommitSeq, Result<Reply>),
    Waits(BoxFuture<'static, Result<Reply>>),
}

impl Outcome {
    pub(crate) fn refused(e: Error) -> Outcome {
        Outcome::Ready(CommitSeq(0), Err(e))
    }
    fn now(done: Result<()>) -> Outcome {
        Outcome::plain(done)
    }
    pub(crate) fn plain<T: Wire>(done: Result<T>) -> Outcome {
        Outcome::Ready(CommitSeq(0), done.map(|body| Reply::new(&body)))
    }
    fn committed<T: Wire>(done: Result<(T, CommitSeq)>) -> Outcome {
        match done {
            Ok((body, seq)) => Outcome::Ready(seq, Ok(Reply::new(&body))),
            Err(e) => Outcome::refused(e),
        }
    }
}

impl Outcome {
    /// An error of the store ends this leader, not the caller.
    fn mapped(self, leader: &Leader) -> Outcome {
        match self {
            Outcome::Ready(seq, Err(e)) => Outcome::Ready(seq, Err(leader.map_error(e))),
            outcome => outcome,
        }
    }
}

fn report(result: Result<()>, leader: &Leader) {
    if let Err(e) = result {
        leader.fail(&e.doing("end a session"));
    }
}

fn reply(body: Vec<u8>) -> Reply {
    Reply { body, payload: Payload::default() }
}

/// An operation that is parked on inodes; unparks them when it is dropped.
struct Waiting {
    leader: Arc<Leader>,
    /// The connection that it came from.
    on: Connection,
    parked: Vec<InodeId>,
    /// The wait as it is shown.
    shown: WaitGuard,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.parked.is_empty() {
            self.leader.lock().give_up(&mut self.parked);
        }
    }
}

async fn wait_and_retry<R: Operation>(
    meta: Meta,
    request: R,
    mut waiting: Waiting,
    mut wait: tokio::sync::futures::OwnedNotified,
    deadline: Instant,
) -> Result<Reply> {
    let leader = meta.leader.clone();
    loop {
        let over = leader.env.clock.sleep_until(deadline);
        tokio::select! {
            biased;
            () = wait => {}
            () = over => return Err(too_late::<R>(&leader, &waiting.parked)),
        }
        let (step, newest) = {
            let mut state = leader.lock();
            let step = leader.attempt(&mut state, &request, &waiting.on, &mut waiting.parked);
            (step, state.newest)
        };
        match step {
            Ok((Step::Done(body, seq), _)) => {
                leader.durable(seq).await?;
                return Ok(reply(body));
            }
            Ok((Step::Wait(again), conflicts)) => {
                if !conflicts.is_empty() {
                    waiting.shown = leader.waits(&request, &waiting.parked, &conflicts);
                }
                meta.revoke(conflicts);
                wait = again;
            }
            Err(e) => {
                leader.durable(newest).await?;
                return Err(e);
            }
        }
    }
}

fn too_late<R: Request>(leader: &Leader, parked: &[InodeId]) -> Error {
    let not_enumerated =
        parked.iter().find_map(|ino| leader.why_not_cloned(*ino).or_else(|| leader.why_not_enumerated(*ino)));
    let why = match parked.first() {
        _ if not_enumerated.is_some() => not_enumerated.unwrap_or_default(),
        Some(ino) => format!("another client has not given its lease on inode {ino} back yet"),
        None if leader.lock().grace_until.is_some() => {
            "clients of before the restart may still come back".to_owned()
        }
        None => "the wait was longer than the caller's patience".to_owned(),
    };
    Error::deadline(format!("{}: {why}", R::NAME))
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
    let patience = leader.term() * REVOKE_TERMS_MAX;
    let mut began = leader.env.clock.now();
    let request = Revoke { ino: conflict.ino, keep: conflict.keep };
    loop {
        let (connection, moved) = {
            let mut state = leader.lock();
            // It was spared only as long as no operation conflicted with its leases.
            if state.is_silent(conflict.session, leader.env.clock.now(), leader.term()) {
                let why = "it was silent for a lease term, and others want what it holds";
                return report(leader.end_session(&mut state, conflict.session, why), &leader);
            }
            let Some(session) = state.sessions.get(&conflict.session) else { return };
            began = began.max(state.stood_still_until);
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
                Ok(_) => return given_back(&leader, conflict),
                Err(e) if e.kind == ErrorKind::Unavailable || e.kind == ErrorKind::Deadline => {}
                Err(e) => {
                    tracing::warn!(session = %conflict.session, inode = %conflict.ino, "a revoke failed: {e}");
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
    report(ended, leader);
}

fn given_back(leader: &Leader, conflict: Conflict) {
    let mut state = leader.lock();
    if let Some(session) = state.sessions.get_mut(&conflict.session) {
        session.progress = leader.env.clock.now();
    }
    state.leases.end_revoke(conflict.session, conflict.ino, conflict.keep);
    state.wake(conflict.ino);
}

// ---- sessions

impl Meta {
    fn session_open(&self, r: &SessionOpen, connection: &Connection) -> Result<(SessionOpened, CommitSeq)> {
        let leader = &self.leader;
        if r.namespace != leader.config.namespace {
            return Err(Error::not_found(format!(
                "namespace {} is not led here but {}",
                r.namespace, leader.config.namespace
            )));
        }
        let now = leader.env.clock.now();
        let opened = Time { nanos: leader.env.clock.wall().0 };
        let (client, process) = (r.client.clone(), r.process.clone());
        let record = SessionRecord { client, opened, process };
        let mut id = SessionId(0);
        let mut state = leader.lock();
        let seq = leader.kv.transact(&mut |txn| {
            id = session_id(leader.config.namespace, next_number(txn, Sequence::Session)?)?;
            txn.put(&keys::session(id), &record.to_value());
            Ok(())
        })?;
        state.newest = state.newest.max(seq);
        state
            .sessions
            .insert(id, Session::new(record.client, record.process, now, Some(connection.clone()), true));
        state.withhold_leases(id, now);
        tracing::info!(session = %id, client = r.client, "session opened");
        let grace = state.grace_until.map_or(Duration::ZERO, |until| until.since(now));
        let opened = SessionOpened {
            session: id,
            lease_ms: leader.config.lease_ms,
            grace_ms: grace.as_millis() as u32,
            opens_asked: leader.mount_at(&mut state, connection).is_some(),
        };
        Ok((opened, seq))
    }

    fn session_resume(
        &self,
        r: &SessionResume,
        connection: &Connection,
    ) -> Result<(SessionResumed, CommitSeq)> {
        let leader = &self.leader;
        let mut state = leader.lock();
        let lease_ms = leader.config.lease_ms;
        let session = state.session(r.session)?;
        let Some(held) = name_held(session, r, connection.id())? else {
            session.heard = leader.env.clock.now();
            return Ok((SessionResumed { lost: Vec::new(), lease_ms }, CommitSeq(0)));
        };
        let known = session.resumed;
        session.connection = Some(connection.clone());
        session.heard = leader.env.clock.now();
        session.applied = [0; SLOTS as usize];
        session.moved.notify_waiters();
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
            if !leader.take_up(&mut state, r.session, lease, known)? {
                lost.push(lease.ino);
            }
        }
        leader.housekeep(&mut state, r.session, &mut |cx| {
            // A new session names the files that an earlier one had open: a nameless file must not be deleted
            // with another opener.
            let leases = cx.rules.leases;
            let is_kept = |ino: &&InodeId| leases.is_orphan(**ino) && leases.is_open_by(r.session, **ino);
            for ino in held.keys().filter(is_kept) {
                cx.txn.put(&keys::held(*ino, r.session), &[]);
            }
            for ino in session::held_by(&*cx.txn, r.session)? {
                if !cx.rules.leases.is_open_by(r.session, ino) {
                    namespace::release_orphan(cx, ino, r.session)?;
                }
            }
            Ok(())
        })?;
        state.session(r.session)?.resumed = true;
        state.end_grace_if_complete();
        leader.relations.changed.notify_one(); // it searches for files that have no writer any more
        Ok((SessionResumed { lost, lease_ms }, state.newest))
    }

    fn keep_alive(&self, r: &KeepAlive, connection: &Connection) -> Result<()> {
        let mut state = self.leader.lock();
        let session = state.session(r.session)?;
        session.heard = self.leader.env.clock.now();
        if session.saved != r.saved {
            (session.saved, session.progress) = (r.saved, session.heard);
        }
        if session.connection.as_ref().is_none_or(|c| c.id() != connection.id()) {
            session.connection = Some(connection.clone());
            session.moved.notify_waiters();
        }
        Ok(())
    }

    /// A client that reads after the answer waits for that map.
    fn note_map(&self, call: &Call) -> Outcome {
        let (leader, r) = match call.decode::<NoteMap>() {
            Ok(r) => (self.leader.clone(), r),
            Err(e) => return Outcome::refused(e),
        };
        let noted = move |leader: &Leader| {
            leader.lock().session(r.session)?;
            leader.note_written_under(r.map_version);
            Ok(())
        };
        if r.map_version <= (leader.config.map_version)() {
            return Outcome::now(noted(&leader));
        }
        // A number that no map has would keep all clients from reading.
        Outcome::Waits(Box::pin(async move {
            leader.wait_for_map(r.map_version).await?;
            noted(&leader).map(|()| Reply::new(&()))
        }))
    }

    fn is_of(&self, session: SessionId, connection: &Connection) -> bool {
        let state = self.leader.lock();
        let on = state.sessions.get(&session).and_then(|s| s.connection.as_ref());
        on.is_some_and(|on| on.id() == connection.id())
    }

    fn session_close(&self, r: &SessionClose) -> Result<CommitSeq> {
        let mut state = self.leader.lock();
        self.leader.end_session(&mut state, r.session, "closed by the client")?;
        Ok(state.newest)
    }

    fn release(&self, r: &ReleaseLease) -> Result<()> {
        let mut state = self.leader.lock();
        state.session(r.session)?.heard = self.leader.env.clock.now();
        if state.leases.lower(r.session, r.ino, r.keep) {
            state.wake(r.ino);
        }
        Ok(())
    }

    fn reclaim_reservations(&self, r: &ReclaimReservations) -> Result<()> {
        let mut state = self.leader.lock();
        state.session(r.session)?.heard = self.leader.env.clock.now();
        r.held.iter().for_each(|held| state.quotas.set(held.volume, r.session, held.bytes));
        Ok(())
    }

    fn release_append_token(&self, r: &ReleaseAppendToken) -> Result<()> {
        let mut state = self.leader.lock();
        state.session(r.session)?.heard = self.leader.env.clock.now();
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

impl Leader {
    /// Restores a holding that a client names; false if it cannot keep the lease.
    fn take_up(
        &self,
        state: &mut crate::leader::State,
        session: SessionId,
        lease: &HeldLease,
        known: bool,
    ) -> Result<bool> {
        let mut inode = None;
        let (mut exists, mut has_numbers) = (false, false);
        self.kv.read(&mut |read| {
            inode = namespace::find_inode(read, lease.ino)?;
            exists = inode.is_some() || read.get(&keys::access(lease.ino))?.is_some();
            has_numbers = namespace::births::find_block(read, session, lease.ino)?.is_some();
            Ok(())
        })?;
        if !exists {
            return Ok(false);
        }
        state.leases.set_opens(session, lease.ino, Opens { read: lease.open_read, write: lease.open_write });
        // From before the restart, or it has it already: a lost token is not restored.
        let append_token =
            lease.append_token && (!known || state.leases.has_append_token(session, lease.ino));
        if append_token {
            state.leases.grant_append_token(session, lease.ino);
        } else if state.leases.release_append_token(session, lease.ino) {
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
            (LeaseKind::Write, Some(i)) if i.writer == session && i.token_epoch >= lease.token_epoch => {
                state.leases.take_up_write(session, lease.ino)
            }
            // No other session gets the names of a directory during the grace period.
            (LeaseKind::Write, None) if has_numbers => state.leases.take_up_names(session, lease.ino),
            (LeaseKind::Read, _) => state.leases.acquire_read(session, lease.ino),
            _ => LeaseKind::None,
        };
        Ok(kept >= wanted)
    }
}

// ---- dispatch

impl Meta {
    /// The answer of a long call: the leadership may have been lost meanwhile.
    fn told_by_right(&self, work: BoxFuture<'static, Result<Reply>>) -> BoxFuture<'static, Result<Reply>> {
        let leader = self.leader.clone();
        Box::pin(async move {
            let result = work.await;
            leader.config.right.wait(&leader.env).await?;
            result
        })
    }
}

impl Service for Meta {
    fn handle(&self, call: Call) -> Handled {
        match self.dispatch(&call) {
            Outcome::Ready(seq, result) if self.leader.may_tell(seq) => Handled::Now(result),
            Outcome::Ready(seq, result) => {
                let leader = self.leader.clone();
                Handled::Later(Box::pin(async move {
                    leader.durable(seq).await?;
                    result
                }))
            }
            Outcome::Waits(work) => Handled::Later(self.told_by_right(work)),
        }
    }

    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match self.dispatch(&call) {
            Outcome::Ready(seq, result) if self.leader.may_tell(seq) => Some(Handled::Now(result)),
            Outcome::Ready(seq, result) => {
                if let Some(responder) = defer.take() {
                    self.leader.replies.push(seq, responder, result);
                }
                None
            }
            Outcome::Waits(work) => Some(Handled::Later(self.told_by_right(work))),
        }
    }

    fn admits_guests(&self) -> bool {
        true
    }

    fn payload_max(&self, _from: Sender) -> u32 {
        0
    }

    fn caught_up(&self) {
        self.leader.replies.settle(&self.leader);
    }

    fn disconnected(&self, connection: &Connection) {
        let mut state = self.leader.lock();
        state.mounts.disconnected(connection.id());
        for session in state.sessions.values_mut() {
            if session.connection.as_ref().is_some_and(|c| c.id() == connection.id()) {
                session.connection = None;
            }
        }
        drop(state);
        let leader = self.leader.clone();
        self.leader.env.tasks.spawn("bury the dead", async move { end_dead_sessions_soon(leader).await });
    }
}

/// A killed process is gone a moment after its connections.
async fn end_dead_sessions_soon(leader: Arc<Leader>) {
    for pause in END_DEAD_AFTER {
        leader.env.clock.sleep(pause).await;
        let left = leader.end_dead_sessions(&mut leader.lock());
        match left {
            Ok(true) => {}
            Ok(false) => return,
            Err(e) => return leader.fail(&e.doing("end a session")),
        }
    }
}

impl Meta {
    fn dispatch(&self, call: &Call) -> Outcome {
        if call.method == ActFor::METHOD {
            return Outcome::now(call.decode::<ActFor>().map(|ActFor { uid }| call.connection.act_for(uid)));
        }
        if let Proved::User(guest) = call.connection.proved()
            && let Err(e) = crate::guest::check(call, guest, |session| self.is_of(session, &call.connection))
        {
            return Outcome::refused(e);
        }
        match call.method {
            Create::METHOD => self.operate::<Create>(call),
            CreateMany::METHOD => self.operate::<CreateMany>(call),
            LeaseNames::METHOD => self.operate::<LeaseNames>(call),
            GetAttr::METHOD => self.operate::<GetAttr>(call),
            Lookup::METHOD => self.operate::<Lookup>(call),
            Commit::METHOD => self.operate::<Commit>(call),
            Open::METHOD => self.operate::<Open>(call),
            Close::METHOD => self.operate::<Close>(call),
            Unlink::METHOD => self.operate::<Unlink>(call),
            ReadDir::METHOD => self.operate::<ReadDir>(call),
            ReadInline::METHOD => self.operate::<ReadInline>(call),
            AcquireLease::METHOD => self.operate::<AcquireLease>(call),
            TakeAppendToken::METHOD => self.operate::<TakeAppendToken>(call),
            SetAttr::METHOD => self.operate::<SetAttr>(call),
            Mkdir::METHOD => self.operate::<Mkdir>(call),
            Rmdir::METHOD => self.operate::<Rmdir>(call),
            Rename::METHOD => self.operate::<Rename>(call),
            Symlink::METHOD => self.operate::<Symlink>(call),
            ReadLink::METHOD => self.operate::<ReadLink>(call),
            Link::METHOD => self.operate::<Link>(call),
            Mknod::METHOD => self.operate::<Mknod>(call),
            GetXattr::METHOD => self.operate::<GetXattr>(call),
            ListXattr::METHOD => self.operate::<ListXattr>(call),
            SetXattr::METHOD => self.operate::<SetXattr>(call),
            RemoveXattr::METHOD => self.operate::<RemoveXattr>(call),
            GetUsage::METHOD => self.operate::<GetUsage>(call),
            StatFs::METHOD => self.operate::<StatFs>(call),
            Recovered::METHOD => self.operate::<Recovered>(call),
            LeaveInDoubt::METHOD => self.operate::<LeaveInDoubt>(call),
            CreateNameless::METHOD => self.operate::<CreateNameless>(call),
            NoteAccess::METHOD => self.operate::<NoteAccess>(call),
            _ => self.handle_volume(call),
        }
    }

    fn handle_volume(&self, call: &Call) -> Outcome {
        match call.method {
            VolumeCreate::METHOD => self.operate::<VolumeCreate>(call),
            VolumeList::METHOD => self.operate::<VolumeList>(call),
            VolumeGet::METHOD => self.operate::<VolumeGet>(call),
            VolumeAt::METHOD => self.operate::<VolumeAt>(call),
            VolumeChange::METHOD => self.operate::<VolumeChange>(call),
            VolumeDelete::METHOD => self.operate::<VolumeDelete>(call),
            VolumeClone::METHOD => self.operate::<VolumeClone>(call),
            ScanInodes::METHOD => self.operate::<ScanInodes>(call),
            ReserveQuota::METHOD => self.operate::<ReserveQuota>(call),
            ReclaimReservations::METHOD => {
                Outcome::now(call.decode().and_then(|r| self.reclaim_reservations(&r)))
            }
            _ => self.dispatch_relation(call),
        }
    }

    fn dispatch_relation(&self, call: &Call) -> Outcome {
        let leader = self.leader.clone();
        match call.method {
            WhereAtHome::METHOD => self.operate::<WhereAtHome>(call),
            RelationAdd::METHOD => self.operate::<RelationAdd>(call),
            ReportListing::METHOD => self.operate::<ReportListing>(call),
            ReportRelisting::METHOD => self.operate::<ReportRelisting>(call),
            RelationDo::METHOD => self.operate::<RelationDo>(call),
            RelationResolve::METHOD => self.operate::<RelationResolve>(call),
            RelationSuspect::METHOD => self.operate::<RelationSuspect>(call),
            AckChanges::METHOD => self.operate::<AckChanges>(call),
            DropCursor::METHOD => self.operate::<DropCursor>(call),
            RelationList::METHOD => Outcome::plain(call.decode().and_then(|r| leader.relation_list(&r))),
            CompleteWork::METHOD => {
                Outcome::committed(call.decode().and_then(|r| leader.complete_work(&r)).map(|seq| ((), seq)))
            }
            LeaseWork::METHOD => waits(call.decode(), |r| leader.lease_work(r)),
            ReadChanges::METHOD => waits(call.decode(), |r| leader.read_changes(r)),
            _ => self.handle_evicted(call),
        }
    }

    fn handle_evicted(&self, call: &Call) -> Outcome {
        match call.method {
            Evict::METHOD => self.operate::<Evict>(call),
            EvictedRanges::METHOD => self.operate::<EvictedRanges>(call),
            Filled::METHOD => self.operate::<Filled>(call),
            SetPinned::METHOD => self.operate::<SetPinned>(call),
            AwaitRecall::METHOD..=GetEviction::METHOD => self.handle_recall(call),
            _ => self.handle_snapshot(call),
        }
    }

    fn handle_snapshot(&self, call: &Call) -> Outcome {
        match call.method {
            BackupSet::METHOD => self.operate::<BackupSet>(call),
            BackupList::METHOD => self.operate::<BackupList>(call),
            BackupTake::METHOD => self.operate::<BackupTake>(call),
            BackupDone::METHOD => self.operate::<BackupDone>(call),
            SnapshotTake::METHOD => self.take_snapshot(call.decode(), call),
            SnapshotDelete::METHOD => self.operate::<SnapshotDelete>(call),
            SnapshotList::METHOD => self.operate::<SnapshotList>(call),
            SnapshotLookup::METHOD => self.operate::<SnapshotLookup>(call),
            SnapshotGetAttr::METHOD => self.operate::<SnapshotGetAttr>(call),
            SnapshotReadDir::METHOD => self.operate::<SnapshotReadDir>(call),
            SnapshotGetXattr::METHOD => self.operate::<SnapshotGetXattr>(call),
            SnapshotListXattr::METHOD => self.operate::<SnapshotListXattr>(call),
            SnapshotOpen::METHOD => self.operate::<SnapshotOpen>(call),
            LayersOf::METHOD => self.operate::<LayersOf>(call),
            TakeLayers::METHOD => self.operate::<TakeLayers>(call),
            LayerCopied::METHOD => self.operate::<LayerCopied>(call),
            _ => self.handle_session(call),
        }
    }

    fn handle_session(&self, call: &Call) -> Outcome {
        self.session_call(call).mapped(&self.leader)
    }

    fn session_call(&self, call: &Call) -> Outcome {
        let on = &call.connection;
        match call.method {
            NoteMap::METHOD => self.note_map(call),
            KeepAlive::METHOD => Outcome::now(call.decode().and_then(|r| self.keep_alive(&r, on))),
            ReleaseLease::METHOD => Outcome::now(call.decode().and_then(|r| self.release(&r))),
            ReleaseAppendToken::METHOD => {
                Outcome::now(call.decode().and_then(|r| self.release_append_token(&r)))
            }
            SessionOpen::METHOD => Outcome::committed(call.decode().and_then(|r| self.session_open(&r, on))),
            SessionResume::METHOD => {
                Outcome::committed(call.decode().and_then(|r| self.session_resume(&r, on)))
            }
            SessionClose::METHOD => {
                Outcome::committed(call.decode().and_then(|r| self.session_close(&r)).map(|seq| ((), seq)))
            }
            TroubleList::METHOD => {
                let troubles = |_: TroubleList| self.leader.failing.list(self.leader.env.clock.now());
                Outcome::plain(call.decode().map(troubles).map(|troubles| Troubles { troubles }))
            }
            SessionList::METHOD => Outcome::plain(call.decode().and_then(|r| self.session_list(&r))),
            _ => self.handle_lock(call),
        }
    }

    /// The journal has no locks: an answer waits for no commit.
    fn handle_lock(&self, call: &Call) -> Outcome {
        let on = &call.connection;
        match call.method {
            SetLock::METHOD => Outcome::plain(
                self.admitted::<SetLock>(call, |r| r.session).and_then(|r| self.set_lock(&r, on)),
            ),
            TestLock::METHOD => Outcome::plain(
                self.admitted::<TestLock>(call, |r| r.session).and_then(|r| self.test_lock(&r)),
            ),
            CancelLock::METHOD => Outcome::plain(call.decode().and_then(|r| self.cancel_lock(&r, on))),
            ListLocks::METHOD => Outcome::plain(
                self.admitted::<ListLocks>(call, |r| r.session).and_then(|r| self.list_locks(&r)),
            ),
            ReclaimLocks::METHOD => Outcome::plain(call.decode().and_then(|r| self.reclaim_locks(&r, on))),
            _ => Outcome::refused(call.unknown()),
        }
    }
}
