//! One live connection: outgoing calls, incoming calls, and the keep-alive.
//!
//! Invariants: a call ends once, with its reply, its deadline or the end of the connection; after `close`
//! nothing waits and nothing is sent. Three tasks serve a connection: reader, writer and watch; they end with
//! it. It also ends when its last user handle is dropped.
use crate::counts::Counts;
use crate::hello::{Peer, Proved};
use crate::incoming::{Frame, Incoming, lost};
use crate::outgoing::Outgoing;
use crate::{Call, Handled, Payload, Reply, Service, not_served};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use weir_env::{Env, Instant, TaskHandle, watch};
use weir_proto::frame::{FLAG_ECHO, FrameKind, HELLO_BODY_MAX, Header, Hello};
use weir_proto::methods;
use weir_proto::{Error, ErrorKind, Request, Result, Wire, Writer};
use weir_trust::certificate::Certificate;
use weir_watch::WaitGuard;

/// Unanswered calls of one connection in one direction; further ones wait.
pub const CALLS_MAX: usize = 1024;
/// Requests of one connection that are being served. More than a well-behaved peer has in flight, even if it
/// gave up on many.
const SERVED_MAX: usize = 4 * CALLS_MAX;
/// Payload bytes of unanswered calls of one connection: one bandwidth-delay product of 100 Gb/s × 5 ms.
const INFLIGHT_BYTES_MAX: usize = 64 << 20;
/// In-flight bytes are counted in units of this.
const INFLIGHT_UNIT: usize = 4 << 10;
/// With more calls in flight than this, the writer task gathers frames instead of writing them in place.
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
    farewell: Mutex<Farewell>,
}

/// The last notification of the service about a connection, by the watch task.
#[derive(Default)]
enum Farewell {
    #[default]
    NotYet,
    /// Kept from the end until the service is notified.
    ToSay(Connection),
    /// Notified, or there is no task left for it.
    Over,
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
            farewell: Mutex::default(),
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
        let last_word = LastWord(watch.clone());
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
            last_word.say(&*reported);
        });
        lock(&inner.tasks).extend(tasks);
        if inner.reason.get().is_some() {
            inner.end_tasks(); // closed before its tasks were registered
        }
        connection
    }

    /// Sends a request and waits for the reply and its payload, at most `patience`. Dropping the future sends
    /// the peer a `Cancel`; the request may still be carried out.
    ///
    /// Errors: the service's error; `Deadline`; `Unavailable` when the connection ended, before or after the
    /// request was carried out; `Damaged` when the reply's payload fails its checksum.
    pub async fn call<R: Request>(
        &self,
        request: &R,
        payload: Vec<Bytes>,
        patience: Duration,
    ) -> Result<(R::Reply, Bytes)> {
        self.call_payload(request, payload.into(), patience).await
    }

    /// `call` with a payload whose checksum may be known already.
    pub async fn call_payload<R: Request>(
        &self,
        request: &R,
        payload: Payload,
        patience: Duration,
    ) -> Result<(R::Reply, Bytes)> {
        self.call_answered(request, payload, patience).await.map(Answered::into_parts)
    }

    /// `call_payload`, for callers that use the checksum of the reply's payload.
    pub async fn call_answered<R: Request>(
        &self,
        request: &R,
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<R::Reply>> {
        let encode = |w: &mut Writer| request.encode(w);
        let inner = &self.0.0;
        let Answered { reply, payload, payload_crc } =
            inner.call(Method { number: R::METHOD, name: R::NAME }, &encode, payload, patience).await?;
        let reply = R::Reply::from_bytes(&reply)
            .map_err(|e| e.doing(format_args!("decode the answer of {} to {}", inner.peer, R::NAME)))?;
        Ok(Answered { reply, payload, payload_crc })
    }

    /// A call whose request is already encoded; the reply is not decoded.
    pub async fn call_encoded(
        &self,
        method: u16,
        body: &[u8],
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<Bytes>> {
        let encode = |w: &mut Writer| w.bytes.extend_from_slice(body);
        self.0.0.call(Method { number: method, name: "passed on" }, &encode, payload, patience).await
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

#[derive(Clone, Copy)]
struct Method {
    number: u16,
    name: &'static str,
}

/// Outgoing calls.
impl Inner {
    async fn call(
        &self,
        method: Method,
        body: &(dyn Fn(&mut Writer) + Sync),
        payload: Payload,
        patience: Duration,
    ) -> Result<Answer> {
        let begun = self.env.clock.now();
        let mut wait = None;
        let answered = self.call_since((begun, &mut wait), method, body, payload, patience).await;
        let now = self.env.clock.now();
        if let Some(wait) = wait {
            wait.end_at(now.0);
        }
        self.counts.called(method.number, begun, now);
        answered
    }

    async fn call_since(
        &self,
        (begun, wait): (Instant, &mut Option<WaitGuard>),
        method: Method,
        body: &(dyn Fn(&mut Writer) + Sync),
        payload: Payload,
        patience: Duration,
    ) -> Result<Answer> {
        let deadline = begun + patience;
        let (_turn, waited) = self.turn(payload.len(), method, patience).await?;
        let now = if waited { self.env.clock.now() } else { begun };
        let (id, mut answer) = self.register()?;
        let _cancel = CancelOnDrop { inner: self, id };
        let mut header = Header::new(FrameKind::Request, id);
        header.method = method.number;
        header.patience_ms = millis_rounded_up(deadline.since(now));
        self.counts.sent(payload.len());
        *wait = self.counts.awaits(method.number, now);
        let encode = |w: &mut Writer| body(w);
        self.outgoing.push(header, &encode, payload).map_err(|e| e.doing(method.name))?;
        // Not one expression: the guard would live through the flush, which may close and take this lock
        // again.
        let busy = lock(&self.calls).waiting.len() > INLINE_CALLS_MAX;
        self.flush(busy);
        tokio::select! {
            biased;
            // The sender is dropped only by `close`, which answers first.
            answer = &mut answer => answer.unwrap_or_else(|_| Err(self.reason())),
            () = self.env.clock.sleep_until(deadline) => Err(Error::deadline(format!(
                "{} ({}): no answer from {} within {patience:?}",
                method.name, method.number, self.peer
            ))),
        }
    }

    /// Waits until few enough calls, and bytes, are in flight. True: it had to wait.
    async fn turn(&self, bytes: usize, method: Method, patience: Duration) -> Result<(Turn<'_>, bool)> {
        let units = bytes.div_ceil(INFLIGHT_UNIT).min(INFLIGHT_BYTES_MAX / INFLIGHT_UNIT) as u32;
        // There is almost always room: then no timer is needed.
        if let Ok(call) = self.call_slots.try_acquire() {
            if units == 0 {
                return Ok((Turn { _call: call, _bytes: None }, false));
            }
            if let Ok(bytes) = self.byte_slots.try_acquire_many(units) {
                return Ok((Turn { _call: call, _bytes: Some(bytes) }, false));
            }
        }
        let _wait = self.counts.awaits_slot(method.number, self.env.clock.now());
        let wait = async {
            let call = self.call_slots.acquire().await.ok()?;
            let bytes = self.byte_slots.acquire_many(units).await.ok()?;
            Some(Turn { _call: call, _bytes: Some(bytes) })
        };
        match self.env.clock.timeout(patience, wait).await {
            Ok(Some(turn)) => Ok((turn, true)),
            Ok(None) => Err(self.reason()),
            Err(_) => Err(Error::deadline(format!(
                "{} ({}): {} did not answer earlier calls within {patience:?}, this one was not sent",
                method.name, method.number, self.peer
            ))),
        }
    }

    fn register(&self) -> Result<(u64, oneshot::Receiver<Result<Answer>>)> {
        let (tx, rx) = oneshot::channel();
        let mut calls = lock(&self.calls);
        if calls.closed {
            drop(calls);
            return Err(self.reason());
        }
        calls.next += 1;
        let id = calls.next;
        calls.waiting.insert(id, tx);
        Ok((id, rx))
    }

    fn answer(&self, call: u64, answer: Result<Answer>) {
        let waiting = lock(&self.calls).waiting.remove(&call);
        if let Some(waiting) = waiting {
            let _ = waiting.send(answer); // the caller may have given up: its Cancel is on the way
        }
    }
}

struct Turn<'a> {
    _call: SemaphorePermit<'a>,
    _bytes: Option<SemaphorePermit<'a>>,
}

/// Sends a `Cancel` when the caller gives up: the deadline passed, or it was dropped.
struct CancelOnDrop<'a> {
    inner: &'a Inner,
    id: u64,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        let waited = lock(&self.inner.calls).waiting.remove(&self.id);
        if waited.is_some() {
            self.inner.send(Header::new(FrameKind::Cancel, self.id));
            self.inner.flush(true);
        }
    }
}

/// Incoming calls.
impl Inner {
    /// Serves what arrives until the connection ends; returns the reason.
    async fn read(self: &Arc<Self>, mut incoming: Incoming, service: &dyn Service) -> Error {
        let mut served = false;
        loop {
            if !incoming.has_header() {
                // Everything from the last read is answered: the replies are sent together.
                if std::mem::take(&mut served) {
                    service.caught_up();
                }
                self.flush(false);
                self.outgoing.wait_for_room().await;
            }
            let header = match incoming.header().await {
                Ok(Some(header)) => header,
                Ok(None) => return ended("closed by the peer"),
                Err(e) => return e,
            };
            let (len, most) = (header.0.payload_len, service.payload_max(self.proved().sender()));
            if header.0.kind == FrameKind::Request && len > most {
                let why =
                    format!("oversize request: a payload of {len} bytes, at most {most} are taken here");
                return Error::invalid(why);
            }
            let frame = match incoming.rest(header.0, &header.1).await {
                Ok(frame) => frame,
                Err(e) => return e,
            };
            served |= frame.header.kind == FrameKind::Request;
            if let Err(reason) = self.take(frame, service) {
                return reason;
            }
        }
    }

    fn take(self: &Arc<Self>, frame: Frame, service: &dyn Service) -> Result<()> {
        let Frame { header, body, payload } = frame;
        match header.kind {
            FrameKind::Request => return self.serve(header, body, payload, service),
            FrameKind::Response => {
                let payload_crc = header.payload_crc;
                self.answer(
                    header.call,
                    payload.map(|payload| Answered { reply: body, payload, payload_crc }),
                );
            }
            FrameKind::ErrorResponse => self.answer(header.call, Err(Error::from_bytes(&body)?)),
            FrameKind::Cancel => drop(lock(&self.served).waited_for.remove(&header.call)),
            FrameKind::Ping if header.flags & FLAG_ECHO != 0 => {
                self.send(Header::new(FrameKind::Ping, header.call));
            }
            FrameKind::Ping => {}
            FrameKind::Goodbye => return Err(Error::from_bytes(&body)?.doing("closed by the peer")),
            FrameKind::Hello | FrameKind::HelloAck => {
                return Err(Error::invalid("a second hello on one connection"));
            }
        }
        Ok(())
    }

    fn proved(&self) -> Proved {
        self.acts_for.get().map_or(self.peer.proved, |uid| Proved::User(*uid))
    }

    fn serve(
        self: &Arc<Self>,
        header: Header,
        body: Bytes,
        payload: Result<Bytes>,
        service: &dyn Service,
    ) -> Result<()> {
        let method = service.method(header.method).ok_or_else(|| not_served(header.method));
        let allowed = method.and_then(|method| {
            let allowed = self.proved().check(method, &self.peer);
            allowed.inspect_err(|e| self.tell_refused(method, e, service))
        });
        let payload = match allowed.and(payload) {
            Ok(payload) => payload,
            Err(e) => {
                self.reply(header.call, Err(e));
                return Ok(());
            }
        };
        let Some(handle) = self.handle.get().and_then(Weak::upgrade) else {
            return Err(ended("closed by this node"));
        };
        let patience = Duration::from_millis(header.patience_ms.into());
        let begun = self.env.clock.now();
        let deadline = begun + patience.saturating_sub(time_to_report(patience));
        self.counts.received(payload.len());
        let call = Call { method: header.method, body, payload, deadline, connection: Connection(handle) };
        let request = Asked { call: header.call, method: header.method, begun };
        match service.handle_or_defer(call, Defer { inner: self, request }) {
            Some(Handled::Now(result)) => {
                self.reply(header.call, result);
                self.counts.served(header.method, begun, self.env.clock.now());
            }
            Some(Handled::Later(work)) => {
                if let Some(job) = self.begin(request) {
                    self.env.tasks.spawn_for_disk("rpc request", async move { job.end(work.await) });
                }
            }
            None => {}
        }
        Ok(())
    }

    fn tell_refused(&self, method: &methods::Method, why: &Error, service: &dyn Service) {
        self.counts.refused.add(1);
        if let Some(handle) = self.handle.get().and_then(Weak::upgrade) {
            service.refused(method, &Connection(handle), why);
        }
    }

    /// `None`: too many requests are being served, and the caller got an error.
    fn begin(self: &Arc<Self>, request: Asked) -> Option<Job> {
        let call = request.call;
        let mut served = lock(&self.served);
        if served.count >= SERVED_MAX {
            drop(served);
            let busy = format!("{SERVED_MAX} requests of this connection are being served already");
            self.reply(call, Err(Error::unavailable(busy)));
            return None;
        }
        served.count += 1;
        served.waited_for.insert(call);
        self.counts.serving.add(1);
        Some(Job { inner: self.clone(), request, ended: false })
    }

    fn reply(&self, call: u64, result: Result<Reply>) {
        let pushed = result.and_then(|reply| {
            self.counts.sent(reply.payload.len());
            let body = |w: &mut Writer| w.bytes.extend_from_slice(&reply.body);
            self.outgoing.push(Header::new(FrameKind::Response, call), &body, reply.payload)
        });
        if let Err(e) = pushed {
            self.send_error(Header::new(FrameKind::ErrorResponse, call), &e);
        }
    }
}

/// Offers to answer a request later without a task for it.
pub struct Defer<'a> {
    inner: &'a Arc<Inner>,
    request: Asked,
}

/// A request of the peer.
#[derive(Clone, Copy)]
struct Asked {
    call: u64,
    method: u16,
    begun: Instant,
}

impl Defer<'_> {
    /// `None`: too many requests are being served, and the caller got an error.
    pub fn take(self) -> Option<Responder> {
        self.inner.begin(self.request).map(Responder)
    }
}

/// Answers one request, from anywhere. If it is dropped without an answer, the caller waits until its
/// deadline.
pub struct Responder(Job);

impl Responder {
    pub fn answer(self, result: Result<Reply>) {
        self.0.end(result);
    }
}

/// A request in progress.
struct Job {
    inner: Arc<Inner>,
    request: Asked,
    ended: bool,
}

impl Job {
    fn end(mut self, result: Result<Reply>) {
        self.finish(result);
    }
    fn finish(&mut self, result: Result<Reply>) {
        self.ended = true;
        let Asked { call, method, begun } = self.request;
        let (waited_for, busy) = self.leave();
        if waited_for {
            self.inner.reply(call, result);
            self.inner.flush(busy);
        }
        self.inner.counts.served(method, begun, self.inner.env.clock.now());
    }
    /// Whether the caller still waits, and whether others are being served.
    fn leave(&self) -> (bool, bool) {
        self.inner.counts.serving.add(-1);
        let mut served = lock(&self.inner.served);
        served.count -= 1;
        (served.waited_for.remove(&self.request.call), served.count > INLINE_CALLS_MAX)
    }
}

impl Drop for Job {
    /// A service that panics fails its call at once. (An aborted task belongs to a killed node: it stays
    /// silent.)
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if std::thread::panicking() {
            return self.finish(Err(Error::io("the service panicked while it served this request")));
        }
        self.leave();
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
        let words = Error::unavailable(format!("connection to {}: {}", self.peer, reason.context));
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
        self.leave_word(handle.map(Connection));
        let on_close = lock(&self.on_close).take();
        if let Some(on_close) = on_close {
            on_close(self.id);
        }
        self.closed.send_replace(true);
        self.end_tasks();
    }

    /// Nothing is kept if there is no task to deliver it: a connection that holds itself would never be
    /// freed.
    fn leave_word(&self, connection: Option<Connection>) {
        let mut farewell = lock(&self.farewell);
        if let (Farewell::NotYet, Some(connection)) = (&*farewell, &connection) {
            *farewell = Farewell::ToSay(connection.clone());
        }
        drop(farewell); // `connection` may be the last one
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
        let mut heard = Moved { count: 0, at: start };
        let mut wrote = Moved { count: 0, at: start };
        loop {
            self.env.clock.sleep(WATCH_EVERY).await;
            let now = self.env.clock.now();
            let silent = heard.still(reads.load(Relaxed), now);
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
struct LastWord(Arc<Inner>);

impl LastWord {
    fn say(&self, service: &dyn Service) {
        if let Farewell::ToSay(connection) = self.end() {
            service.disconnected(&connection);
        }
    }
    fn end(&self) -> Farewell {
        std::mem::replace(&mut *lock(&self.0.farewell), Farewell::Over)
    }
}

impl Drop for LastWord {
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

fn time_to_report(patience: Duration) -> Duration {
    (patience / TIME_TO_REPORT_PART).min(TIME_TO_REPORT_MAX)
}

fn millis_rounded_up(d: Duration) -> u32 {
    u32::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

/// An end that needs no attention.
fn ended(reason: &str) -> Error {
    Error::unavailable(reason)
}

/// The error with a text short enough for its frame.
pub(crate) fn wire_error(error: &Error) -> Error {
    let mut context = error.context.clone();
    if context.len() > REASON_BYTES_MAX {
        let cut = (0..=REASON_BYTES_MAX).rev().find(|at| context.is_char_boundary(*at)).unwrap_or(0);
        context.truncate(cut);
    }
    Error { kind: error.kind, context }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
