//! Calls of this side: a slot and bytes in flight for each, its frame, its answer, and the cancel of a call
//! whose caller has gone.
use super::{
    Answer, Answered, Connection, INFLIGHT_BYTES_MAX, INFLIGHT_UNIT, INLINE_CALLS_MAX, Inner,
    TIME_TO_REPORT_MAX, TIME_TO_REPORT_PART, lock,
};
use crate::Payload;
use bytes::Bytes;
use std::time::Duration;
use tokio::sync::{SemaphorePermit, oneshot};
use weir_env::Instant;
use weir_proto::frame::{FrameKind, Header};
use weir_proto::{Error, Request, Result, Wire, Writer};
use weir_watch::WaitGuard;

impl Connection {
    /// Sends a request and waits for its reply, at most `patience`; dropping the future sends a `Cancel`.
    /// Errors: the service's; `Deadline`; `Unavailable`: the connection ended, and the request may have been
    /// carried out; `Damaged`: the reply's payload fails its checksum.
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
}

#[derive(Clone, Copy)]
struct Method {
    number: u16,
    name: &'static str,
}

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
        let (_in_flight, waited) = self.acquire_slot(payload.len(), method, patience).await?;
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
    async fn acquire_slot(
        &self,
        bytes: usize,
        method: Method,
        patience: Duration,
    ) -> Result<(InFlight<'_>, bool)> {
        let units = bytes.div_ceil(INFLIGHT_UNIT).min(INFLIGHT_BYTES_MAX / INFLIGHT_UNIT) as u32;
        // There is almost always room: then no timer is needed.
        if let Ok(call) = self.call_slots.try_acquire() {
            if units == 0 {
                return Ok((InFlight { _call: call, _bytes: None }, false));
            }
            if let Ok(bytes) = self.byte_slots.try_acquire_many(units) {
                return Ok((InFlight { _call: call, _bytes: Some(bytes) }, false));
            }
        }
        let _wait = self.counts.awaits_slot(method.number, self.env.clock.now());
        let wait = async {
            let call = self.call_slots.acquire().await.ok()?;
            let bytes = self.byte_slots.acquire_many(units).await.ok()?;
            Some(InFlight { _call: call, _bytes: Some(bytes) })
        };
        match self.env.clock.timeout(patience, wait).await {
            Ok(Some(in_flight)) => Ok((in_flight, true)),
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
        let before = calls.waiting.insert(id, tx);
        assert!(before.is_none(), "two calls have one id: one would get the other's answer");
        Ok((id, rx))
    }

    pub(super) fn answer(&self, call: u64, answer: Result<Answer>) {
        let waiting = lock(&self.calls).waiting.remove(&call);
        if let Some(waiting) = waiting {
            let _ = waiting.send(answer); // the caller may have given up: its Cancel is on the way
        }
    }
}

struct InFlight<'a> {
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

pub(super) fn time_to_report(patience: Duration) -> Duration {
    (patience / TIME_TO_REPORT_PART).min(TIME_TO_REPORT_MAX)
}

fn millis_rounded_up(d: Duration) -> u32 {
    u32::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}
