//! The metadata leader as this client's rooms see it: questions, changes, and the session under which they
//! are sent.
//!
//! The session is opened once, resumed on each new connection, kept alive. Invariants: no request uses a
//! connection before the session is resumed on it with its locks, leases and opens, even under a new
//! session: so the leader always knows which clients have a file open. No request overtakes what it
//! declares to follow ([`Ordering`]). Leases count only if a reply of the leader arrived within their term.
//! Knows nothing of inodes except that a [`Holder`] has leases on them.
mod change;
mod early;
mod ordering;
mod resume;

pub use change::Change;
pub use early::LostChange;
pub use ordering::{Ordering, ToLeader};

use crate::maps::MapsSeen;
use crate::status::Counters;
use change::Slot;
use early::Early;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::Semaphore;
use weir_env::{Backoff, BoxFuture, Env, Instant, Retry};
use weir_proto::lock::HeldLock;
use weir_proto::meta::{HeldLease, KeepAlive, NoteMap, SLOTS, SessionClose};
use weir_proto::quota::HeldSpace;
use weir_proto::{Error, ErrorKind, InodeId, NamespaceId, Result, SessionId};
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
    /// Reports all local changes of names; `None`: there are none.
    fn report_names(&self, deadline: Instant) -> Option<BoxFuture<'static, Result<()>>>;
    /// Reports leases that could not be kept.
    fn lost(&self, inodes: Vec<InodeId>);
    /// Reports changes that were answered, and that a crash of the leader took back.
    fn lost_changes(&self, lost: Vec<LostChange>);
    /// Reports locks that other clients have got.
    fn lost_locks(&self, lost: Vec<HeldLock>);
    /// The session continues, on a new connection; it has no registered lock waits there.
    fn taken_up(&self);
    /// The session is gone and with it every lease and all unsaved changes. Open files stay open: the next
    /// session reports them.
    fn expired(&self);
}

/// The client that asks.
pub struct Identity {
    pub namespace: NamespaceId,
    /// For people.
    pub client: String,
    /// For a leader on the same machine; empty: not reported.
    pub process: String,
    /// Whether changes may be answered before they are durable: every program that may lead can make them
    /// again, and the users of this client call `fsync`.
    pub takes_early: Arc<dyn Fn() -> bool + Send + Sync>,
}

pub struct Leader {
    env: Env,
    channel: Channel,
    identity: Identity,
    /// How long a request waits for a leader that does not answer.
    patience: Duration,
    maps: Arc<MapsSeen>,
    counters: Arc<Counters>,
    holder: OnceLock<Weak<dyn Holder>>,
    /// Held while the session is opened or resumed.
    established: tokio::sync::Mutex<Established>,
    /// The connection on which the session was last opened or begun to be resumed.
    named_on: AtomicU64,
    /// For fast paths: connection id and session id that belong together.
    ready_connection: AtomicU64,
    session: AtomicU64,
    lease_ms: AtomicU64,
    opens_asked: AtomicBool,
    /// The time at which the last answered request was sent, in nanoseconds of the node's clock.
    contacted: AtomicU64,
    slots: Mutex<Vec<Slot>>,
    free_slots: Semaphore,
    early: Early,
    /// Requests without an answer.
    asking: AtomicU32,
    /// The client is shutting down.
    closing: AtomicBool,
    /// Its session has ended, and no other one is opened.
    closed: AtomicBool,
}

/// A request without an answer.
pub struct Asking<'a>(&'a AtomicU32);
impl<'a> Asking<'a> {
    pub fn begin(count: &'a AtomicU32) -> Asking<'a> {
        count.fetch_add(1, Relaxed);
        Asking(count)
    }
}
impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[derive(Default)]
struct Established {
    connection: Option<u64>,
    session: Option<SessionId>,
}

impl Leader {
    pub fn new(
        env: Env,
        channel: Channel,
        identity: Identity,
        patience: Duration,
        maps: Arc<MapsSeen>,
        counters: Arc<Counters>,
    ) -> Leader {
        Leader {
            env,
            channel,
            identity,
            patience,
            maps,
            counters,
            holder: OnceLock::new(),
            established: tokio::sync::Mutex::default(),
            named_on: AtomicU64::new(u64::MAX),
            ready_connection: AtomicU64::new(u64::MAX),
            session: AtomicU64::new(0),
            lease_ms: AtomicU64::new(1000),
            opens_asked: AtomicBool::new(false),
            contacted: AtomicU64::new(0),
            slots: Mutex::new((0..SLOTS).rev().map(Slot::new).collect()),
            free_slots: Semaphore::new(SLOTS as usize),
            early: Early::default(),
            asking: AtomicU32::new(0),
            closing: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Since when the leader has been silent, and how many requests wait for it; `None`: it answers, or
    /// nothing waits.
    pub fn silence(&self) -> Option<(Instant, u32)> {
        let (last_reply, calls) = (Instant(self.contacted.load(Relaxed)), self.asking.load(Relaxed));
        let is_silent = self.env.clock.now().since(last_reply) > 2 * self.keep_alive_period();
        (is_silent && calls > 0).then_some((last_reply, calls))
    }
    /// Abandons a connection to a leader that has moved elsewhere.
    pub fn leave_old_address(&self) {
        self.channel.leave_old_address();
    }

    /// The channel to the leader, and whether an answer is late: then another way may lead there.
    pub fn way(&self) -> (Channel, bool) {
        let silent = self.env.clock.now().since(Instant(self.contacted.load(Relaxed)));
        // Without requests it answers once in each period.
        let usual = if self.asking.load(Relaxed) > 0 { Duration::ZERO } else { self.keep_alive_period() };
        (self.channel.clone(), silent > usual + LATE)
    }

    /// To be called once, before the first request.
    pub fn set_holder(&self, holder: Weak<dyn Holder>) {
        assert!(self.holder.set(holder).is_ok(), "a session has one holder of leases");
    }
    fn holder(&self) -> Option<Arc<dyn Holder>> {
        self.holder.get().and_then(Weak::upgrade)
    }

    /// The end of a call that begins now.
    pub fn deadline(&self) -> Instant {
        self.env.clock.now() + self.patience
    }

    /// Whether the leader must be asked for each open by the superuser.
    pub fn opens_asked(&self) -> bool {
        self.opens_asked.load(Relaxed)
    }

    /// Whether a reply of the leader arrived within the lease term.
    pub fn leases_hold(&self) -> bool {
        self.env.clock.now() < self.leases_hold_until()
    }
    pub fn leases_hold_until(&self) -> Instant {
        let term_ms = self.lease_ms.load(Relaxed);
        Instant(self.contacted.load(Relaxed))
            + Duration::from_millis(term_ms - term_ms / u64::from(TERM_MARGIN))
    }
    /// After a time without a reply of the leader: finds out which leases are left, before any work relies
    /// on them.
    pub async fn sure_of_leases(&self) -> Result<()> {
        if !self.leases_hold() {
            self.check(self.deadline()).await?;
        }
        Ok(())
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

    /// A live connection on which the session is resumed. An error that ends all tries: it was closed.
    pub async fn ready(&self, deadline: Instant) -> Result<(Connection, SessionId)> {
        if self.closed.load(Acquire) {
            return Err(Error::io("this client has closed its session"));
        }
        if let Some(connection) = self.channel.current()
            && connection.id() == self.ready_connection.load(Acquire)
        {
            return Ok((connection, SessionId(self.session.load(Acquire))));
        }
        let turn = self.env.clock.timeout(self.left(deadline), self.established.lock()).await;
        let mut established = turn.map_err(|_| self.channel.why_unreachable())?;
        let connection = self.channel.connection(self.left(deadline)).await?;
        if let (Some(id), Some(session)) = (established.connection, established.session)
            && id == connection.id()
        {
            return Ok((connection, session));
        }
        self.named_on.store(connection.id(), Release);
        let session = self.take_up(&connection, established.session, deadline).await?;
        established.connection = Some(connection.id());
        established.session = Some(session);
        self.session.store(session.0, Release);
        self.ready_connection.store(connection.id(), Release);
        Ok((connection, session))
    }

    /// For how long, since `begun`, the leader has not answered, beyond the pauses in which it is not asked.
    pub fn silent_for(&self, begun: Instant) -> Duration {
        let contacted = Instant(self.contacted.load(Relaxed));
        self.env.clock.now().since(contacted.max(begun)).saturating_sub(self.keep_alive_period())
    }

    fn note_contact(&self, begun: Instant, lease_ms: u32) {
        self.lease_ms.store(u64::from(lease_ms), Relaxed);
        self.contacted.fetch_max(begun.0, Relaxed);
    }

    /// Asks until there is an answer or the patience ends. For requests that change nothing, or may happen
    /// twice.
    pub async fn ask<R: ToLeader>(&self, make: impl Fn(SessionId) -> R) -> Result<R::Reply> {
        self.ask_until(self.deadline(), make).await
    }

    pub async fn ask_until<R: ToLeader>(
        &self,
        deadline: Instant,
        make: impl Fn(SessionId) -> R,
    ) -> Result<R::Reply> {
        self.report_before::<R>(deadline).await?;
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
    pub async fn ask_once<R: ToLeader>(
        &self,
        deadline: Instant,
        make: &impl Fn(SessionId) -> R,
    ) -> Result<R::Reply> {
        self.report_before::<R>(deadline).await?;
        let (connection, session) = self.ready(deadline).await?;
        self.send(&connection, &make(session), deadline).await
    }

    /// Reports local changes of names, if the request declares that it follows them.
    async fn report_before<R: ToLeader>(&self, deadline: Instant) -> Result<()> {
        if R::ORDERING < Ordering::AfterNames {
            return Ok(());
        }
        match self.holder().and_then(|holder| holder.report_names(deadline)) {
            Some(reported) => reported.await,
            None => Ok(()),
        }
    }

    /// Sends once, on this connection, after the map of the last write if the request declares that. It may
    /// have to wait for that map as long as the coordinator is unreachable.
    pub async fn send<R: ToLeader>(
        &self,
        connection: &Connection,
        request: &R,
        deadline: Instant,
    ) -> Result<R::Reply> {
        self.report_map_on::<R>(connection, deadline).await?;
        let begun = self.env.clock.now();
        self.counters.asked.fetch_add(1, Relaxed);
        let (reply, _) = connection.call(request, vec![], self.left(deadline)).await?;
        self.contacted.fetch_max(begun.0, Relaxed);
        if self.named_on.load(Acquire) != connection.id() {
            // The leases and opens in it were not named when the session moved: the leader has dropped them.
            return Err(Error::unavailable(format!(
                "{}: the session moved to another connection before the answer came",
                R::NAME
            )));
        }
        Ok(reply)
    }

    /// Reports the map of the last write, if the request declares that it follows it.
    async fn report_map_on<R: ToLeader>(&self, connection: &Connection, deadline: Instant) -> Result<()> {
        while let Some(map_version) = self.maps.unreported().filter(|_| R::ORDERING >= Ordering::AfterMap) {
            let session = SessionId(self.session.load(Acquire));
            connection.call(&NoteMap { session, map_version }, vec![], self.left(deadline)).await?;
            self.maps.note_reported(map_version);
        }
        Ok(())
    }

    /// Returns when the leader knows under which cluster map this client has written: before the write is
    /// acknowledged.
    pub async fn report_map(&self, deadline: Instant) -> Result<()> {
        while let Some(map_version) = self.maps.unreported() {
            self.ask_until(deadline, |session| NoteMap { session, map_version }).await?;
            self.maps.note_reported(map_version);
        }
        Ok(())
    }

    fn alive(&self, session: SessionId) -> KeepAlive {
        KeepAlive { session, saved: self.counters.wire_sent_bytes.load(Relaxed) }
    }

    /// Pauses if another try can help; otherwise returns the error. `under`: the session of the request.
    async fn again_or(
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
        let known = self.send(&connection, &self.alive(session), deadline).await;
        if known.as_ref().is_err_and(|e| e.kind == ErrorKind::Stale) {
            let mut established = self.established.lock().await;
            // Several tasks may find it gone: the session that the first one has opened since stays.
            if established.session == Some(session) {
                self.ready_connection.store(u64::MAX, Release);
                established.connection = None;
            }
        }
        known.map(|()| session)
    }

    pub fn keep_alive_period(&self) -> Duration {
        Duration::from_millis(self.lease_ms.load(Relaxed).max(30)) / 3
    }

    /// Whether requests can be sent at once, on the connection of the last ones.
    pub fn is_taken_up(&self) -> bool {
        let ready = self.ready_connection.load(Acquire);
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

    /// False: the client is shutting down already.
    pub fn begin_closing(&self) -> bool {
        !self.closing.swap(true, AcqRel)
    }
    pub fn is_closing(&self) -> bool {
        self.closing.load(Acquire)
    }
    pub async fn close(&self, deadline: Instant) -> Result<()> {
        let closed = self.ask_once(deadline, &|session| SessionClose { session }).await;
        if closed.as_ref().is_ok() || closed.as_ref().is_err_and(|e| e.kind == ErrorKind::Stale) {
            self.closed.store(true, Release);
            self.session.store(0, Release);
        }
        closed
    }
    /// The session, unless it was closed.
    pub fn unclosed(&self) -> Option<SessionId> {
        Some(SessionId(self.session.load(Acquire))).filter(|session| session.0 > 0)
    }
    /// Closes another session of this process.
    pub async fn close_other(&self, session: SessionId) -> Result<()> {
        self.ask(|_| SessionClose { session }).await
    }
}

/// Names the request that failed, except for a refusal: the leader's text names it already, and goes to the
/// user.
fn named<R: ToLeader>(e: Error) -> Error {
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
