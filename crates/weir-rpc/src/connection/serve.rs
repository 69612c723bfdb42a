//! Requests of the peer: reading frames, the check of the sender, and answers in place or by a task.
use super::calls::time_to_report;
use super::{Answered, Connection, INLINE_CALLS_MAX, Inner, SERVED_MAX, SERVED_PAUSE, ended, lock};
use crate::hello::Proved;
use crate::incoming::{Frame, Incoming};
use crate::{Call, Handled, Payload, Reply, Service, not_served};
use bytes::Bytes;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::frame::{FLAG_ECHO, FrameKind, Header};
use weir_proto::{Error, Result, Wire, Writer, methods};

impl Inner {
    /// Serves what arrives until the connection ends; returns the reason.
    pub(super) async fn read(self: &Arc<Self>, mut incoming: Incoming, service: &dyn Service) -> Error {
        let mut served = false;
        loop {
            if !incoming.has_header() {
                // Everything from the last read is answered: the replies are sent together.
                if std::mem::take(&mut served) {
                    service.caught_up();
                }
                self.flush(false);
                self.outgoing.wait_until_writable().await;
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

    pub(super) fn take(self: &Arc<Self>, frame: Frame, service: &dyn Service) -> Result<()> {
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
            FrameKind::ErrorResponse => {
                let error = header.error(Error::from_bytes(&body)?);
                self.answer(header.call, Err(error));
            }
            FrameKind::Cancel => drop(lock(&self.served).waited_for.remove(&header.call)),
            FrameKind::Ping if header.flags & FLAG_ECHO != 0 => {
                let echo = Header::new(FrameKind::Ping, header.call);
                let same = |w: &mut Writer| w.bytes.extend_from_slice(&body);
                self.outgoing.push(echo, &same, Payload::default())?;
            }
            FrameKind::Ping => {
                self.echoed.send_if_modified(|newest| {
                    let is_newer = header.call > *newest;
                    *newest = header.call.max(*newest);
                    is_newer
                });
            }
            FrameKind::Goodbye => return Err(Error::from_bytes(&body)?.doing("closed by the peer")),
            FrameKind::Hello | FrameKind::HelloAck | FrameKind::Through => {
                return Err(Error::invalid("a second hello on one connection"));
            }
        }
        Ok(())
    }

    pub(super) fn proved(&self) -> Proved {
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
            allowed.inspect_err(|e| self.report_refused(method, e, service))
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
        let request = Asked { call: header.call, method: header.method, begun };
        let demand = Demand { deadline, asked: Some((self.clone(), header.call)) };
        let connection = Connection(handle);
        let call = Call { method: header.method, body, payload, deadline, demand, connection };
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

    fn report_refused(&self, method: &methods::Method, why: &Error, service: &dyn Service) {
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
            self.reply(call, Err(Error::busy(SERVED_PAUSE, busy)));
            return None;
        }
        served.count += 1;
        served.waited_for.insert(call);
        self.counts.serving.add(1);
        Some(Job { inner: self.clone(), request, ended: false })
    }

    pub(super) fn reply(&self, call: u64, result: Result<Reply>) {
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

/// Whether the caller of a request still waits. For work that is taken from a queue: a request without a
/// waiting caller is not begun. Work that was begun runs to its end.
#[derive(Clone)]
pub struct Demand {
    deadline: Instant,
    /// None: a request of this node itself, which waits until the deadline.
    asked: Option<(Arc<Inner>, u64)>,
}

impl Demand {
    /// Of this node itself.
    pub fn until(deadline: Instant) -> Demand {
        Demand { deadline, asked: None }
    }
    /// When to answer with the reason of the delay: a moment before the caller's patience ends.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }
    /// The error if the caller no longer waits: the deadline has passed, the caller has cancelled, or its
    /// connection is gone. For work that is done later than in [`Service::handle`].
    pub fn check(&self, now: Instant) -> Result<()> {
        let why = match &self.asked {
            _ if now >= self.deadline => "its deadline has passed",
            Some((inner, _)) if inner.reason.get().is_some() => "its connection is gone",
            Some((inner, call)) if !lock(&inner.served).waited_for.contains(call) => {
                "its caller has given up"
            }
            _ => return Ok(()),
        };
        if let Some((inner, _)) = &self.asked {
            inner.counts.dropped.add(1);
        }
        Err(Error::deadline(format!("the request was not begun: {why}")))
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
    pub(super) fn end(mut self, result: Result<Reply>) {
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
        assert!(served.count > 0, "a request ended that had not begun");
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
