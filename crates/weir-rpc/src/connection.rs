//! One live connection: outgoing calls, incoming calls, and the keep-alive.
//!
//! Invariants: a call ends once, with its reply, its deadline or the end of the connection; after `close`
//! nothing waits and nothing is sent. Three tasks serve a connection: reader, writer and watch; they end with
//! it. It also ends when its last user handle is dropped.
use crate::counts::Counts;
use crate::hello::{Peer, Proved};
use crate::incoming::{Incoming, lost};
use crate::outgoing::Outgoing;
use crate::{Payload, Service};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use weir_env::{Env, Instant, TaskHandle, watch};
use weir_proto::frame::{FLAG_ECHO, FrameKind, HELLO_BODY_MAX, Header, Hello};
use weir_proto::{Error, ErrorKind, Result, Wire, Writer};
use weir_trust::certificate::Certificate;

mod calls;
mod serve;

pub use serve::{Defer, Demand, Responder};

/// Unanswered calls of one connection in one direction; further ones wait.
pub const CALLS_MAX: usize = 1024;
/// Requests of one connection that are being served; further ones are refused as `Busy`. More than a peer has
/// in flight, even if it gave up on many.
pub const SERVED_MAX: usize = 4 * CALLS_MAX;
/// The pause of a peer that reached `SERVED_MAX`: enough for a few hundred of them to end on a busy machine.
const SERVED_PAUSE: Duration = Duration::from_millis(100);
/// Payload bytes of unanswered calls of one connection: one bandwidth-delay product of 100 Gb/s × 5 ms.
const INFLIGHT_BYTES_MAX: usize = 64 << 20;
/// In-flight bytes are counted in units of this.
const INFLIGHT_UNIT: usize = 4 << 10;
/// With more calls in flight than this, the writer task coalesces frames instead of writing them in place.
const INLINE_CALLS_MAX: usize = 4;
/// The part of its caller's patience that a service may not use, and its upper bound: the reply must still
/// arrive.
const TIME_TO_REPORT_PART: u32 = 16;
const TIME_TO_REPORT_MAX: Duration = Duration::from_millis(500);
/// A connection that is silent this long gets a ping,
pub const PING_AFTER: Duration = Duration::from_secs(5);
/// and is dead after this long.
pub const DEAD_AFTER: Duration = Duration::from_secs(15);
/// Interval of the watch task.
const WATCH_EVERY: Duration = Duration::from_millis(2500);
/// Frames of this size ask for an echo: together they are larger than any packet (jumbo frames: 9,000 bytes).
const ECHO_BYTES: usize = HELLO_BODY_MAX as usize - 96;
const ECHO_FRAMES: usize = 4;
/// Longest text of an error on the wire, so that it fits into its frame.
const REASON_BYTES_MAX: usize = HELLO_BODY_MAX as usize - 64;

/// One end of a live connection. Cheap to clone; the connection closes when the last clone is dropped.
#[derive(Clone)]
pub struct Connection(Arc<Handle>);

/// A connection that this handle does not keep open.
pub(crate) struct WeakConnection(Weak<Handle>);

impl WeakConnection {
    pub fn upgrade(&self) -> Option<Connection> {
        self.0.upgrade().map(Connection)
    }
}

/// Held by users. The tasks of the connection hold only [`Inner`], so that they do not keep it alive. Only
/// the tasks hold the service: services hold connections, and a killed node's tasks end without a goodbye.
struct Handle(Arc<Inner>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close(ended("closed by this node"), true);
    }
}

struct Inner {
    env: Env,
    id: u64,
    peer: Peer,
    counts: Counts,
    /// The user for whom the peer, a mount, forwards requests.
    acts_for: OnceLock<u32>,
    outgoing: Outgoing,
    calls: Mutex<Calls>,
    call_slots: Semaphore,
    byte_slots: Semaphore,
    /// Calls of the peer that it still waits for.
    served: Mutex<Served>,
    closed: watch::Sender<bool>,
    reason: OnceLock<Error>,
    tasks: Mutex<Vec<TaskHandle>>,
    handle: OnceLock<Weak<Handle>>,
    /// Notified once when the connection ends.
    on_close: Mutex<Option<OnClose>>,
    end_notice: Mutex<EndNotice>,
    /// The last echo asked for, and the last one that came.
    echoes: AtomicU64,
    echoed: watch::Sender<u64>,
}

/// The last notification of the service about a connection, by the watch task.
#[derive(Default)]
enum EndNotice {
    #[default]
    NotYet,
    /// Kept from the end until the service is notified.
    Due(Connection),
    /// Notified, or there is no task left for it.
    Delivered,
}

/// A reply, its payload, and the payload's verified CRC32C.
#[derive(Debug)]
pub struct Answered<T> {
    pub reply: T,
    pub payload: Bytes,
    pub payload_crc: u32,
}

impl<T> Answered<T> {
    pub fn into_parts(self) -> (T, Bytes) {
        (self.reply, self.payload)
    }
}

/// The encoded reply.
type Answer = Answered<Bytes>;

pub(crate) type OnClose = Box<dyn FnOnce(u64) + Send>;

#[derive(Default)]
struct Calls {
    next: u64,
    /// In order of their ids: they fail in this order when the connection ends.
    waiting: BTreeMap<u64, oneshot::Sender<Result<Answer>>>,
    closed: bool,
}

#[derive(Default)]
struct Served {
    /// Requests in progress, with or without a waiting caller.
    count: usize,
    waited_for: BTreeSet<u64>,
}

impl Connection {
    /// Starts to serve a connection after its hello. `keep` gets it before anything happens on it.
    pub(crate) fn start(
        env: &Env,
        peer: Peer,
        incoming: Incoming,
        outgoing: Outgoing,
        service: Arc<dyn Service>,
        on_close: Option<OnClose>,
        keep: impl FnOnce(&Connection),
    ) -> Connection {
        let inner = Arc::new(Inner {
            env: env.clone(),
            id: env.rng.next_u64(),
            counts: Counts::new(env, &peer.claimed.name),
            peer,
            acts_for: OnceLock::new(),
            outgoing,
            calls: Mutex::default(),
            call_slots: Semaphore::new(CALLS_MAX),
            byte_slots: Semaphore::new(INFLIGHT_BYTES_MAX / INFLIGHT_UNIT),
            served: Mutex::default(),
            closed: watch::Sender::new(false),
            reason: OnceLock::new(),
            tasks: Mutex::default(),
            handle: OnceLock::new(),
            on_close: Mutex::new(on_close),
            end_notice: Mutex::default(),
            echoes: AtomicU64::new(0),
            echoed: watch::Sender::new(0),
        });
        let handle = Arc::new(Handle(inner.clone()));
        let _ = inner.handle.set(Arc::downgrade(&handle)); // set once, here
        let connection = Connection(handle);
        keep(&connection);
        let (reader, writer, watch) = (inner.clone(), inner.clone(), inner.clone());
        let reads = incoming.reads();
        let (served_by, reported) = (service.clone(), service);
        let tasks = [
            env.tasks.spawn("rpc reader", async move {
                let ended = CloseOnPanic(&reader);
                let reason = reader.read(incoming, &*served_by).await;
                drop(ended);
                reader.close(reason, false);
            }),
            env.tasks.spawn("rpc writer", async move {
                let e = writer.outgoing.run().await;
                writer.close(lost(&e), false);
            }),
        ];
        // Not among them: it outlives the connection by one notification.
        let end_notifier = EndNotifier(watch.clone());
        env.tasks.spawn("rpc watch", async move {
            let mut closed = watch.closed.subscribe();
            let reason = tokio::select! {
                biased;
                _ = closed.wait_for(|closed| *closed) => None,
                reason = watch.watch(&reads) => Some(reason),
            };
            if let Some(reason) = reason {
                watch.close(reason, true);
            }
            end_notifier.deliver(&*reported);
        });
        lock(&inner.tasks).extend(tasks);
        if inner.reason.get().is_some() {
            inner.end_tasks(); // closed before its tasks were registered
        }
        connection
    }

    /// Unique among the connections of a node.
    pub fn id(&self) -> u64 {
        self.0.0.id
    }
    /// The peer's own hello, unverified: no decision depends on it.
    pub fn peer(&self) -> &Hello {
        &self.0.0.peer.claimed
    }
    /// The peer's verified identity.
    pub fn proved(&self) -> Proved {
        self.0.0.proved()
    }
    /// From now on the peer acts for this user only.
    pub fn act_for(&self, uid: u32) {
        let _ = self.0.0.acts_for.set(uid); // a user may not send `ActFor`, so this is set once
    }
    /// Whether a mount acts for a user of its machine.
    pub fn is_for_user(&self) -> bool {
        self.0.0.acts_for.get().is_some()
    }
    /// The peer's certificate; none: it uses a Unix socket, or the cluster has no certificates.
    pub fn certificate(&self) -> Option<&Certificate> {
        self.0.0.peer.certificate.as_ref()
    }
    pub(crate) fn downgrade(&self) -> WeakConnection {
        WeakConnection(Arc::downgrade(&self.0))
    }
    /// The protocol version that the two ends agreed on.
    pub fn version(&self) -> u16 {
        self.0.0.peer.version
    }
    /// The peer's name and address, for messages.
    pub fn peer_name(&self) -> String {
        self.0.0.peer.to_string()
    }
    /// The peer's address: the one that was dialed, or that it connected from.
    pub fn peer_addr(&self) -> &str {
        &self.0.0.peer.addr
    }
    /// The peer's IP address; none: it is connected through a local socket.
    pub fn peer_ip(&self) -> Option<IpAddr> {
        self.0.0.peer.ip
    }
    /// The address of this machine on the connection; `None`: it is a local socket.
    pub fn local_ip(&self) -> Option<IpAddr> {
        self.0.0.peer.local_ip
    }
    /// The node that passes the bytes of this connection on; `None`: it is a direct one.
    pub fn via(&self) -> Option<&str> {
        self.0.0.peer.via.as_deref()
    }
    /// Whether large packets travel to the peer and back within this time. Needs nothing of the peer but the
    /// task that reads the connection.
    pub async fn echoes(&self, patience: Duration) -> bool {
        self.echo(ECHO_FRAMES, ECHO_BYTES, patience).await
    }
    /// Whether the peer answers one small packet within this time.
    pub async fn answers(&self, patience: Duration) -> bool {
        self.echo(1, 0, patience).await
    }
    async fn echo(&self, frames: usize, bytes: usize, patience: Duration) -> bool {
        let inner = &self.0.0;
        let mut last = 0;
        for _ in 0..frames {
            last = inner.echoes.fetch_add(1, Relaxed) + 1;
            let ask = Header { flags: FLAG_ECHO, ..Header::new(FrameKind::Ping, last) };
            let body = |w: &mut Writer| w.bytes.resize(w.bytes.len() + bytes, 0);
            if inner.outgoing.push(ask, &body, Payload::default()).is_err() {
                return false;
            }
        }
        inner.flush(false);
        let mut echoed = inner.echoed.subscribe();
        let came = async {
            let came = echoed.wait_for(|newest| *newest >= last).await.is_ok();
            came && !self.is_closed()
        };
        inner.env.clock.timeout(patience, came).await.unwrap_or(false)
    }
    pub fn is_closed(&self) -> bool {
        self.0.0.reason.get().is_some()
    }
    /// Waits until the connection ends and returns the reason.
    pub async fn closed(&self) -> Error {
        let mut closed = self.0.0.closed.subscribe();
        let _ = closed.wait_for(|closed| *closed).await; // the sender is in `self`
        self.0.0.reason()
    }
    /// Ends the connection; the peer gets the reason.
    pub fn close(&self, reason: &str) {
        self.0.0.close(ended(reason), true);
    }
}

impl PartialEq for Connection {
    fn eq(&self, other: &Connection) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "connection to {}", self.0.0.peer)
    }
}

/// Start and end of a connection.
impl Inner {
    fn flush(&self, busy: bool) {
        if let Err(e) = self.outgoing.flush(busy) {
            self.close(lost(&e), false);
        }
    }

    /// Queues a frame without body.
    fn send(&self, header: Header) {
        let pushed = self.outgoing.push(header, &|_| {}, Payload::default());
        pushed.expect("a frame without body is not too long");
    }

    fn send_error(&self, header: Header, error: &Error) {
        let error = wire_error(error);
        let header = Header { kind: header.kind, ..Header::of_error(header.call, &error) };
        let pushed = self.outgoing.push(header, &|w| error.encode(w), Payload::default());
        pushed.expect("the words of an error were cut to fit");
    }

    fn reason(&self) -> Error {
        self.reason.get().cloned().unwrap_or_else(|| ended("closed by this node"))
    }

    /// Ends the connection once; later reasons are ignored. `report`: the peer gets the reason, if it can be
    /// sent at once.
    fn close(&self, reason: Error, report: bool) {
        // For any cause, a caller can only try again, elsewhere if possible.
        let words = reason.clone().of_kind(ErrorKind::Unavailable);
        let words = words.doing(format_args!("connection to {}", self.peer));
        if self.reason.set(words).is_err() {
            return;
        }
        match reason.kind {
            ErrorKind::Unavailable => tracing::debug!(peer = %self.peer, "connection ended: {reason}"),
            _ => tracing::warn!(peer = %self.peer, "connection ended: {reason}"),
        }
        if report || reason.kind != ErrorKind::Unavailable {
            self.send_error(Header::new(FrameKind::Goodbye, 0), &reason);
            let _ = self.outgoing.flush(false); // it is ending anyway
        }
        self.outgoing.end();
        self.fail_calls();
        // The watch task notifies the service: the caller may hold the service's locks.
        let handle = self.handle.get().and_then(Weak::upgrade); // before a server drops the last one
        self.keep_for_notice(handle.map(Connection));
        let on_close = lock(&self.on_close).take();
        if let Some(on_close) = on_close {
            on_close(self.id);
        }
        self.closed.send_replace(true);
        self.end_tasks();
    }

    /// Nothing is kept if there is no task to deliver it: a connection that holds itself would never be
    /// freed.
    fn keep_for_notice(&self, connection: Option<Connection>) {
        let mut end_notice = lock(&self.end_notice);
        if let (EndNotice::NotYet, Some(connection)) = (&*end_notice, &connection) {
            *end_notice = EndNotice::Due(connection.clone());
        }
        drop(end_notice); // `connection` may be the last one
    }

    fn fail_calls(&self) {
        let waiting = {
            let mut calls = lock(&self.calls);
            calls.closed = true;
            std::mem::take(&mut calls.waiting)
        };
        self.call_slots.close();
        self.byte_slots.close();
        for (_, call) in waiting {
            let _ = call.send(Err(self.reason())); // a caller that was dropped just now
        }
    }

    fn end_tasks(&self) {
        lock(&self.tasks).iter().for_each(TaskHandle::abort);
    }

    /// Pings a silent peer; returns when the connection is dead.
    async fn watch(&self, reads: &AtomicU64) -> Error {
        let start = self.env.clock.now();
        let mut progress = Moved { count: 0, at: start };
        let mut wrote = Moved { count: 0, at: start };
        loop {
            self.env.clock.sleep(WATCH_EVERY).await;
            let now = self.env.clock.now();
            let silent = progress.still(reads.load(Relaxed), now);
            let (waits, sent) = self.outgoing.progress();
            let stuck = wrote.still(sent, now);
            if silent >= DEAD_AFTER {
                return Error::unavailable(format!("the peer was silent for {} s", silent.as_secs()));
            }
            if waits && stuck >= DEAD_AFTER {
                return Error::unavailable(format!("the peer took no byte for {} s", stuck.as_secs()));
            }
            if !waits {
                wrote.at = now;
            }
            if silent >= PING_AFTER {
                self.send(Header { flags: FLAG_ECHO, ..Header::new(FrameKind::Ping, 0) });
                self.flush(false);
            }
        }
    }
}

/// Held by the watch task; after its end no notification is delivered.
struct EndNotifier(Arc<Inner>);

impl EndNotifier {
    fn deliver(&self, service: &dyn Service) {
        if let EndNotice::Due(connection) = self.end() {
            service.disconnected(&connection);
        }
    }
    fn end(&self) -> EndNotice {
        std::mem::replace(&mut *lock(&self.0.end_notice), EndNotice::Delivered)
    }
}

impl Drop for EndNotifier {
    fn drop(&mut self) {
        drop(self.end()); // outside of the lock: it may be the last one of its connection
    }
}

/// A counter and when it last grew.
struct Moved {
    count: u64,
    at: Instant,
}

impl Moved {
    fn still(&mut self, count: u64, now: Instant) -> Duration {
        if count != self.count {
            *self = Moved { count, at: now };
        }
        now.since(self.at)
    }
}

/// A service that panics in `handle` closes its connection with an error, instead of leaving it half-open.
struct CloseOnPanic<'a>(&'a Arc<Inner>);

impl Drop for CloseOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close(Error::io("the service panicked"), true);
        }
    }
}

/// An end that needs no attention.
fn ended(reason: &str) -> Error {
    Error::of_text(ErrorKind::Unavailable, reason)
}

/// The error with a text short enough for its frame.
pub(crate) fn wire_error(error: &Error) -> Error {
    let mut text = error.to_string();
    if text.len() > REASON_BYTES_MAX {
        let end = (0..=REASON_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    Error::of_text(error.kind, text)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
