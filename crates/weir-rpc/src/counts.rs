//! Meters of connections: calls and their time by method, in both directions, payload bytes, refusals; and
//! the waits of callers.
//!
//! Knows nothing of the meaning of requests, except which ones are answered late on purpose.
use std::sync::Arc;
use weir_env::{Env, Instant};
use weir_proto::methods::{self, METHODS_MAX};
use weir_watch::{Counter, Family, Gauge, Object, Reason, WaitGuard, WaitRecord, Watch};

pub struct Counts {
    watch: Watch,
    peer: Arc<str>,
    served: Arc<Family>,
    called: Arc<Family>,
    pub refused: Counter,
    /// Requests that were not begun: their callers no longer waited.
    pub dropped: Counter,
    /// Requests that are being served.
    pub serving: Gauge,
    received: Counter,
    sent: Counter,
}

impl Counts {
    pub fn new(env: &Env, peer: &str) -> Counts {
        let watch = env.watch.clone();
        let family = |name| watch.meters.family(name, "method", METHODS_MAX);
        let bytes = |direction| watch.counter("weir_rpc_bytes_total", ("direction", direction));
        Counts {
            peer: peer.into(),
            served: family("weir_rpc_seconds"),
            called: family("weir_call_seconds"),
            refused: watch.counter("weir_rpc_refused_total", ("", "")),
            dropped: watch.counter("weir_rpc_dropped_total", ("", "")),
            serving: watch.gauge("weir_rpc_inflight", ("", "")),
            received: bytes("received"),
            sent: bytes("sent"),
            watch,
        }
    }
    /// A request arrived with a payload of this size.
    pub fn received(&self, bytes: usize) {
        if bytes > 0 {
            self.received.add(bytes as u64);
        }
    }
    pub fn sent(&self, bytes: usize) {
        if bytes > 0 {
            self.sent.add(bytes as u64);
        }
    }
    pub fn served(&self, method: u16, begun: Instant, now: Instant) {
        self.count(&self.served, method, begun, now);
    }
    pub fn called(&self, method: u16, begun: Instant, now: Instant) {
        self.count(&self.called, method, begun, now);
    }
    fn count(&self, family: &Family, method: u16, begun: Instant, now: Instant) {
        let name = methods::find(method).map_or("other", |method| method.name);
        let ns = now.since(begun).as_nanos() as u64;
        family.add(&self.watch.meters, usize::from(method), name, ns);
    }
    /// The wait for a reply; none for requests that are answered late on purpose.
    pub fn awaits(&self, method: u16, begun: Instant) -> Option<WaitGuard> {
        (!methods::is_answered_late(method)).then(|| self.wait(Reason::Answer, method, begun))
    }
    /// The wait for a free call slot of the connection.
    pub fn awaits_slot(&self, method: u16, begun: Instant) -> WaitGuard {
        self.wait(Reason::CallSlot, method, begun)
    }
    fn wait(&self, reason: Reason, method: u16, begun: Instant) -> WaitGuard {
        let action = methods::find(method).map_or("", |method| method.name);
        self.watch.wait_since(begun.0, WaitRecord::new(reason, Object::NONE).doing(action).at(&self.peer))
    }
}
