//! The session at the namespace's metadata leader: opened once, resumed on each new connection, kept alive.
//!
//! Invariants: no request uses a connection before the session is resumed on it with its locks, leases and
//! opens, even under a new session: so the leader always knows which clients have a file open. A change is
//! retried with the same (session, slot, seq) until it is answered; leases count only if a reply of the
//! leader arrived within their term. Knows nothing of inodes except that a [`Holder`] has leases on them.
mod change;

use crate::maps::MapsSeen;
use crate::session::change::Slot;
use crate::status::Counters;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::Semaphore;
use weir_env::{Backoff, BoxFuture, Env, Instant, Retry};
use weir_proto::births::{CreateMany, MkdirWithNames, RemoveMany};
use weir_proto::lock::{HeldLock, RECLAIM_MAX, ReclaimLocks};
use weir_proto::meta::{
    HELD_MAX, HeldLease, KeepAlive, NoteMap, SLOTS, SessionClose, SessionOpen, SessionOpened, SessionResume,
    SessionResumed,
};
use weir_proto::quota::{HeldSpace, ReclaimSpace, ReserveSpace};
use weir_proto::volume::{GetWriteFloors, HeldReservation, ReclaimReservations, ReserveQuota};
use weir_proto::{Error, ErrorKind, InodeId, NamespaceId, Request, Result, SessionId, VolumeId};
use weir_rpc::{Channel, Connection};

/// First pause before a leader that did not answer is retried.
const RETRY: Backoff = Backoff { first: Duration::from_millis(10), max: Duration::from_millis(500) };
/// A leader that has not answered for this long may be reached on another way.
const LATE: Duration = Duration::from_secs(1);
/// Leases are trusted this much shorter than the leader's term: clocks run at slightly different speeds.
const TERM_MARGIN: u32 = 8;

/// The owner of the leases under the session.
pub trait Holder: Send + Sync + 'static {
    /// The session is about to be resumed, or opened, on this connection: returns the held leases. From now
    /// on the leader counts changes to them on this connection only.
    fn begun(&self, connection: u64) -> Vec<HeldLease>;
    fn held_locks(&self) -> Vec<HeldLock>;
    /// Quota reservations under limits of bytes.
    fn held_reservations(&self) -> Vec<HeldSpace>;
    /// Returns when the leader knows of all files that were created locally: before any other request.
    fn births_first(&self, _deadline: Instant) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// Reports leases that could not be kept.
    fn lost(&self, inodes: Vec<InodeId>);
    /// Reports locks that other clients have got.
    fn lost_locks(&self, lost: Vec<HeldLock>);
    /// The session continues, on a new connection; it has no registered lock waits there.
    fn taken_up(&self);
    /// The session is gone and with it every lease and all unsaved changes. Open files stay open: the next
    /// session reports them.
    fn expired(&self);
}

pub struct Session {
    env: Env,
    channel: Channel,
    namespace: NamespaceId,
    client: String,
    process: String,
    maps: Arc<MapsSeen>,
    counters: Arc<Counters>,
    holder: Mutex<Option<Weak<dyn Holder>>>,
    /// Held while the session is opened or resumed.
    established: tokio::sync::Mutex<Established>,
    /// For fast paths: connection id and session id that belong together.
    ready_connection: AtomicU64,
    session: AtomicU64,
    lease_ms: AtomicU64,
    opens_asked: AtomicBool,
    /// The time at which the last answered request was sent, in nanoseconds of the node's clock.
    contacted: AtomicU64,
    slots: Mutex<Vec<Slot>>,
    free_slots: Semaphore,
    /// Requests without an answer.
    asking: AtomicU32,
    /// Files that the leader does not know of yet.
    unborn: AtomicI64,
}

/// A request without an answer.
pub struct Asking<'a>(&'a AtomicU32);
impl<'a> Asking<'a> {
    pub fn begin(count: &'a AtomicU32) -> Asking<'a> {
        count.fetch_add(1, Ordering::Relaxed);
        Asking(count)
    }
}
impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Established {
    connection: Option<u64>,
    session: Option<SessionId>,
}

impl Session {
    /// `client`: for people. `process`: for a leader on the same machine; empty: not reported.
    pub fn new(
        env: Env,
        channel: Channel,
        namespace: NamespaceId,
        client: String,
        process: String,
        maps: Arc<MapsSeen>,
        counters: Arc<Counters>,
    ) -> Session {
        Session {
            env,
            channel,
            namespace,
            client,
            process,
            maps,
            counters,
            holder: Mutex::new(None),
            established: tokio::sync::Mutex::default(),
            ready_connection: AtomicU64::new(u64::MAX),
            session: AtomicU64::new(0),
            lease_ms: AtomicU64::new(1000),
            opens_asked: AtomicBool::new(false),
            contacted: AtomicU64::new(0),
            slots: Mutex::new((0..SLOTS).rev().map(Slot::new).collect()),
            free_slots: Semaphore::new(SLOTS as usize),
            asking: AtomicU32::new(0),
            unborn: AtomicI64::new(0),
        }
    }

    /// Since when the leader has been silent, and how many requests wait for it; `None`: it answers, or
    /// nothing waits.
    pub fn silence(&self) -> Option<(Instant, u32)> {
        let (last_reply, calls) =
            (Instant(self.contacted.load(Ordering::Relaxed)), self.asking.load(Ordering::Relaxed));
        let is_silent = self.env.clock.now().since(last_reply) > 2 * self.keep_alive_period();
        (is_silent && calls > 0).then_some((last_reply, calls))
    }
    /// Abandons a connection to a leader that has moved elsewhere.
    pub fn leave_old_address(&self) {
        self.channel.leave_old_address();
    }

    /// The channel to the leader, and whether an answer is late: then another way may lead there.
    pub fn way(&self) -> (Channel, bool) {
        let silent = self.env.clock.now().since(Instant(self.contacted.load(Ordering::Relaxed)));
        // Without requests it answers once in each period.
        let usual =
            if self.asking.load(Ordering::Relaxed) > 0 { Duration::ZERO } else { self.keep_alive_period() };
        (self.channel.clone(), silent > usual + LATE)
    }

    pub fn set_holder(&self, holder: Weak<dyn Holder>) {
        *self.holder.lock().expect("no holder panics") = Some(holder);
    }

    pub fn holder(&self) -> Option<Arc<dyn Holder>> {
        self.holder.lock().expect("no holder panics").as_ref().and_then(Weak::upgrade)
    }

    /// Whether the leader must be asked for each open by the superuser.
    pub fn opens_asked(&self) -> bool {
        self.opens_asked.load(Ordering::Relaxed)
    }

    /// Whether a reply of the leader arrived within the lease term.
    pub fn leases_hold(&self) -> bool {
        self.env.clock.now() < self.leases_hold_until()
    }
    pub fn leases_hold_until(&self) -> Instant {
        let term_ms = self.lease_ms.load(Ordering::Relaxed);
        Instant(self.contacted.load(Ordering::Relaxed))
            + Duration::from_millis(term_ms - term_ms / u64::from(TERM_MARGIN))
    }
    /// Waits until the leader has been silent for so long that it may have declared this client dead.
    pub async fn wait_for_term_end(&self) {
        while self.leases_hold() {
            let until = self.leases_hold_until();
            self.env.clock.sleep(until.since(self.env.clock.now())).await;
        }
    }

    pub fn left(&self, deadline: Instant) -> Duration {
        deadline.since(self.env.clock.now())
    }

    /// A live connection on which the session is resumed.
    pub async fn ready(&self, deadline: Instant) -> Result<(Connection, SessionId)> {
        if let Some(connection) = self.channel.current()
            && connection.id() == self.ready_connection.load(Ordering::Acquire)
        {
            return Ok((connection, SessionId(self.session.load(Ordering::Acquire))));
        }
        let turn = self.env.clock.timeout(self.left(deadline), self.established.lock()).await;
        let mut established = turn.map_err(|_| self.channel.why_unreachable())?;
        let connection = self.channel.connection(self.left(deadline)).await?;
        if let (Some(id), Some(session)) = (established.connection, established.session)
            && id == connection.id()
        {
            return Ok((connection, session));
        }
        let session = self.take_up(&connection, established.session, deadline).await?;
        established.connection = Some(connection.id());
        established.session = Some(session);
        self.session.store(session.0, Ordering::Release);
        self.ready_connection.store(connection.id(), Ordering::Release);
        Ok((connection, session))
    }

    /// Resumes the session on a new connection, or opens a new one.
    async fn take_up(
        &self,
        connection: &Connection,
        old: Option<SessionId>,
        deadline: Instant,
    ) -> Result<SessionId> {
        let begun = self.env.clock.now();
        if let Some(session) = old {
            match self.resume(connection, session, deadline).await {
                Ok(lease_ms) => {
                    self.note_contact(begun, lease_ms);
                    if let Some(holder) = self.holder() {
                        holder.taken_up();
                    }
                    return Ok(session);
                }
                Err(e) if e.kind == ErrorKind::Stale => {
                    tracing::warn!("session {session} expired: {e}; opening a new one");
                    if let Some(holder) = self.holder() {
                        holder.expired();
                    }
                }
                Err(e) => return Err(e.doing("resume the session")),
            }
        }
        let request = SessionOpen {
            namespace: self.namespace,
            client: self.client.clone(),
            process: self.process.clone(),
        };
        let (opened, _) = connection
            .call(&request, vec![], self.left(deadline))
            .await
            .map_err(|e: Error| match e.kind {
                // Returned to a program, this would mean that its file does not exist.
                ErrorKind::NotFound => {
                    let context = format!("{}; the namespace was given up: mount again", e.context);
                    Error { kind: ErrorKind::Damaged, context, ..e }
                }
                _ => e,
            })
            .map_err(|e| e.doing("open a session"))?;
        let SessionOpened { session, lease_ms, opens_asked, .. } = opened;
        self.opens_asked.store(opens_asked, Ordering::Relaxed);
        // It holds nothing, but files may be open. A client that gets a Write lease before the leader counts
        // the file as open is missed by a request to all writers.
        let held = self.holder().map_or_else(Vec::new, |h| h.begun(connection.id()));
        if !held.is_empty() {
            self.name_held(connection, session, held, deadline).await.map_err(|e| match e.kind {
                // It ended before any request under it: the next try opens another one.
                ErrorKind::Stale => e.of_kind(ErrorKind::Unavailable).doing("name what is open"),
                _ => e.doing("name what is open"),
            })?;
        }
        self.note_contact(begun, lease_ms);
        Ok(session)
    }

    /// Names the held leases and locks, and reports at once to the holder which could not be kept, even if
    /// the rest fails: at the next try the leader may grant one again as if nothing had happened. Returns the
    /// lease term in milliseconds.
    async fn resume(&self, connection: &Connection, session: SessionId, deadline: Instant) -> Result<u32> {
        let leases = async {
            let held = self.holder().map_or_else(Vec::new, |h| h.begun(connection.id()));
            let resumed = self.name_held(connection, session, held, deadline).await?;
            if let Some(holder) = self.holder().filter(|_| !resumed.lost.is_empty()) {
                holder.lost(resumed.lost);
            }
            Ok(resumed.lease_ms)
        };
        let locks = self.holder().map_or_else(Vec::new, |h| h.held_locks());
        if locks.is_empty() {
            // In parallel: with a distant leader, each answer takes a good part of the time for which it
            // waits.
            let (named, lease_ms) =
                tokio::join!(self.name_locks(connection, session, locks, deadline), leases);
            return named.and(lease_ms);
        }
        // Locks first: the leases' last message ends the leader's wait for this client.
        self.name_locks(connection, session, locks, deadline).await?;
        leases.await
    }

    /// Leases, opens and quota reservations, in as many messages as needed.
    async fn name_held(
        &self,
        connection: &Connection,
        session: SessionId,
        mut held: Vec<HeldLease>,
        deadline: Instant,
    ) -> Result<SessionResumed> {
        while held.len() > HELD_MAX {
            let part = SessionResume { session, held: held.split_off(held.len() - HELD_MAX), more: true };
            connection.call(&part, vec![], self.left(deadline)).await?;
        }
        let reservations = self.holder().map_or_else(Vec::new, |h| h.held_reservations());
        if !reservations.is_empty() {
            let named = ReclaimSpace { session, held: reservations.clone() };
            match connection.call(&named, vec![], self.left(deadline)).await {
                Err(e) if e.kind == ErrorKind::Unsupported => {
                    // A leader of an older program: it knows volumes only.
                    let named = ReclaimReservations { session, held: by_volume(&reservations) };
                    connection.call(&named, vec![], self.left(deadline)).await?;
                }
                done => drop(done?),
            }
        }
        let last = SessionResume { session, held, more: false };
        connection.call(&last, vec![], self.left(deadline)).await.map(|(resumed, _)| resumed)
    }

    async fn name_locks(
        &self,
        connection: &Connection,
        session: SessionId,
        mut held: Vec<HeldLock>,
        deadline: Instant,
    ) -> Result<()> {
        while held.len() > RECLAIM_MAX {
            let part = ReclaimLocks { session, held: held.split_off(held.len() - RECLAIM_MAX), more: true };
            connection.call(&part, vec![], self.left(deadline)).await?;
        }
        let last = ReclaimLocks { session, held, more: false };
        let (reclaimed, _) = connection.call(&last, vec![], self.left(deadline)).await?;
        if let Some(holder) = self.holder().filter(|_| !reclaimed.lost.is_empty()) {
            holder.lost_locks(reclaimed.lost);
        }
        Ok(())
    }

    /// For how long, since `begun`, the leader has not answered, beyond the pauses in which it is not asked.
    pub fn silent_for(&self, begun: Instant) -> Duration {
        let contacted = Instant(self.contacted.load(Ordering::Relaxed));
        self.env.clock.now().since(contacted.max(begun)).saturating_sub(self.keep_alive_period())
    }

    fn note_contact(&self, begun: Instant, lease_ms: u32) {
        self.lease_ms.store(u64::from(lease_ms), Ordering::Relaxed);
        self.contacted.fetch_max(begun.0, Ordering::Relaxed);
    }

    /// Asks until there is an answer or the deadline passes. For requests that change nothing, or may happen
    /// twice.
    pub async fn ask<R: Request>(
        &self,
        deadline: Instant,
        make: impl Fn(SessionId) -> R,
    ) -> Result<R::Reply> {
        self.births_first::<R>(deadline).await?;
        let _asking = Asking::begin(&self.asking);
        let mut retry = Retry::jittered(&self.env, RETRY, deadline);
        loop {
            let (e, under) = match self.ready(deadline).await {
                Ok((connection, session)) => match self.send(&connection, &make(session), deadline).await {
                    Ok(reply) => return Ok(reply),
                    Err(e) => (e, Some(session)),
                },
                Err(e) => (e, None),
            };
            self.again_or(e, under, deadline, &mut retry).await.map_err(named::<R>)?;
        }
    }

    /// Asks once: for requests whose answer must not get lost without the sender's knowing.
    pub async fn once<R: Request>(
        &self,
        deadline: Instant,
        make: &impl Fn(SessionId) -> R,
    ) -> Result<R::Reply> {
        self.births_first::<R>(deadline).await?;
        let (connection, session) = self.ready(deadline).await?;
        self.send(&connection, &make(session), deadline).await
    }

    /// Changes the number of creates and removals that the leader does not know of yet.
    pub fn note_unborn(&self, more: i64) {
        self.unborn.fetch_add(more, Ordering::AcqRel);
    }
    /// A request may be about files that the leader does not know of, or about their directories.
    async fn births_first<R: Request>(&self, deadline: Instant) -> Result<()> {
        let reports = [CreateMany::METHOD, RemoveMany::METHOD, KeepAlive::METHOD];
        let of_volumes = [ReserveSpace::METHOD, ReserveQuota::METHOD, GetWriteFloors::METHOD];
        // It has waited for those of its directory.
        let is_mkdir = R::METHOD == MkdirWithNames::METHOD;
        let is_exempt = is_mkdir || reports.contains(&R::METHOD) || of_volumes.contains(&R::METHOD);
        if is_exempt || self.unborn.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        match self.holder() {
            Some(holder) => holder.births_first(deadline).await,
            None => Ok(()),
        }
    }

    /// Sends once, on this connection.
    pub async fn send<R: Request>(
        &self,
        connection: &Connection,
        request: &R,
        deadline: Instant,
    ) -> Result<R::Reply> {
        while let Some(map_version) = self.maps.unreported() {
            let session = SessionId(self.session.load(Ordering::Acquire));
            connection.call(&NoteMap { session, map_version }, vec![], self.left(deadline)).await?;
            self.maps.note_reported(map_version);
        }
        self.send_at_once(connection, request, deadline).await
    }

    /// The same for requests that do not concern files: before the leader knows under which cluster map this
    /// client has written. It may have to wait for that map as long as the coordinator is unreachable.
    async fn send_at_once<R: Request>(
        &self,
        connection: &Connection,
        request: &R,
        deadline: Instant,
    ) -> Result<R::Reply> {
        let begun = self.env.clock.now();
        self.counters.asked.fetch_add(1, Ordering::Relaxed);
        let (reply, _) = connection.call(request, vec![], self.left(deadline)).await?;
        self.contacted.fetch_max(begun.0, Ordering::Relaxed);
        Ok(reply)
    }

    fn alive(&self, session: SessionId) -> KeepAlive {
        KeepAlive { session, saved: self.counters.wire_sent_bytes.load(Ordering::Relaxed) }
    }

    /// Returns when the leader knows under which cluster map this client has written: before the write is
    /// acknowledged.
    pub async fn settle_maps(&self, deadline: Instant) -> Result<()> {
        match self.maps.unreported() {
            Some(_) => self.ask(deadline, |session| self.alive(session)).await,
            None => Ok(()),
        }
    }

    /// Pauses if another try can help; otherwise returns the error. `under`: the session of the request.
    pub async fn again_or(
        &self,
        e: Error,
        under: Option<SessionId>,
        deadline: Instant,
        retry: &mut Retry,
    ) -> Result<()> {
        if e.kind == ErrorKind::Stale && self.session_is_gone(under, deadline).await {
            return Ok(());
        }
        let busy = match e.kind {
            ErrorKind::Unavailable => Duration::ZERO,
            ErrorKind::Busy { wait_ms } => Duration::from_millis(wait_ms.into()),
            _ => return Err(e),
        };
        if !retry.has_time() {
            return Err(e.of_kind(ErrorKind::Deadline).doing("the metadata leader did not answer in time"));
        }
        let pause = retry.next_pause().max(busy).min(self.left(deadline));
        self.env.clock.sleep(pause).await;
        Ok(())
    }

    /// `Stale` may mean the inode or the session: asks. If it is the session, the next request opens a new
    /// one.
    async fn session_is_gone(&self, under: Option<SessionId>, deadline: Instant) -> bool {
        match self.ask_for_session(deadline).await {
            // Another task has found that, and opened the next one.
            Ok(session) => under.is_some_and(|under| under != session),
            Err(e) => e.kind == ErrorKind::Stale,
        }
    }

    /// The session, if the leader knows it. `Stale`: it does not any more, and the next request opens a new
    /// one.
    async fn ask_for_session(&self, deadline: Instant) -> Result<SessionId> {
        let (connection, session) = self.ready(deadline).await?;
        let known = self.send_at_once(&connection, &self.alive(session), deadline).await;
        if known.as_ref().is_err_and(|e| e.kind == ErrorKind::Stale) {
            let mut established = self.established.lock().await;
            // Several tasks may find it gone: the session that the first one has opened since stays.
            if established.session == Some(session) {
                self.ready_connection.store(u64::MAX, Ordering::Release);
                established.connection = None;
            }
        }
        known.map(|()| session)
    }

    pub fn keep_alive_period(&self) -> Duration {
        Duration::from_millis(self.lease_ms.load(Ordering::Relaxed).max(30)) / 3
    }

    /// Whether requests can be sent at once, on the connection of the last ones.
    pub fn is_taken_up(&self) -> bool {
        let ready = self.ready_connection.load(Ordering::Acquire);
        self.channel.current().is_some_and(|connection| connection.id() == ready)
    }

    /// Reports to the leader that this client is alive.
    pub async fn keep_alive(&self) {
        let known = match self.is_taken_up() {
            true => {
                let soon = self.env.clock.now() + self.keep_alive_period();
                self.ask_for_session(soon).await.map(drop)
            }
            false => self.ready_again().await,
        };
        let Err(e) = known else { return };
        tracing::debug!("keep-alive: {e}");
        if e.kind == ErrorKind::Stale {
            // Losses are reported now, not with the next request.
            if let Err(e) = self.ready_again().await {
                tracing::debug!("a new session: {e}");
            }
        }
    }

    /// Resumes the session on a new connection. That takes several answers: a distant client that restarts
    /// before it has them all returns after the leader has given up waiting.
    async fn ready_again(&self) -> Result<()> {
        let term = 3 * self.keep_alive_period();
        self.channel.connection(term).await?;
        self.ready(self.env.clock.now() + term).await.map(|_| ())
    }

    /// Resumes the session if the connection is new, and asks the leader whether it still exists if leases do
    /// not hold by themselves: the connection may have outlived the session. At start, and after a time
    /// without a reply.
    pub async fn check(&self, deadline: Instant) -> Result<SessionId> {
        let mut retry = Retry::jittered(&self.env, RETRY, deadline);
        loop {
            let e = match self.ready(deadline).await {
                Ok((_, session)) if self.leases_hold() => return Ok(session),
                Ok(_) => match self.ask_for_session(deadline).await {
                    Ok(_) => continue,
                    Err(e) => e,
                },
                Err(e) => e,
            };
            if e.kind != ErrorKind::Stale {
                self.again_or(e, None, deadline, &mut retry).await?;
            }
        }
    }

    pub async fn close(&self, deadline: Instant) -> Result<()> {
        let closed = self.once(deadline, &|session| SessionClose { session }).await;
        if closed.as_ref().is_ok() || closed.as_ref().is_err_and(|e| e.kind == ErrorKind::Stale) {
            self.session.store(0, Ordering::Release);
        }
        closed
    }
    /// The session, unless it was closed.
    pub fn unclosed(&self) -> Option<SessionId> {
        Some(SessionId(self.session.load(Ordering::Acquire))).filter(|session| session.0 > 0)
    }
    /// Closes another session of this process.
    pub async fn close_other(&self, session: SessionId, deadline: Instant) -> Result<()> {
        self.ask(deadline, |_| SessionClose { session }).await
    }
}

/// Names the request that failed, except for a refusal: the leader's text names it already, and goes to the
/// user.
pub fn named<R: Request>(e: Error) -> Error {
    match e.kind {
        ErrorKind::Stale
        | ErrorKind::Unavailable
        | ErrorKind::Busy { .. }
        | ErrorKind::Deadline
        | ErrorKind::Damaged
        | ErrorKind::Io => e.doing(R::NAME),
        ErrorKind::NotFound
        | ErrorKind::Exists
        | ErrorKind::Invalid
        | ErrorKind::Denied
        | ErrorKind::Name(_)
        | ErrorKind::NoSpace
        | ErrorKind::Unsupported
        | ErrorKind::OverQuota => e,
    }
}

/// Reservations of all accounts of a volume together.
fn by_volume(held: &[HeldSpace]) -> Vec<HeldReservation> {
    let mut sums: BTreeMap<VolumeId, u64> = BTreeMap::new();
    for HeldSpace { account, bytes } in held {
        *sums.entry(account.volume).or_default() += bytes;
    }
    sums.into_iter().map(|(volume, bytes)| HeldReservation { volume, bytes }).collect()
}
