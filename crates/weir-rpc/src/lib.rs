//! A typed request to a node gets a reply or a clear error.
//!
//! Frames are multiplexed over one connection in both directions: either end may call. The payload of a frame
//! is outside its encoded header; it is sent without a copy, and received directly into a pooled aligned
//! buffer. `connect` and `serve` make connections, a [`Channel`] makes a new one whenever the old one broke.
//!
//! Over a network a node with a certificate accepts only peers that have one, too, and protects every frame
//! ([`Trust`]).
//!
//! Invariants: a request reaches a service only if its method is for its sender; a call ends by its
//! deadline; a request is never sent twice; when a connection ends, every call on it fails with
//! `Unavailable` at once; requests reach the service in the order they were sent; everything that waits in
//! memory has a limit.
//!
//! Knows nothing of the meaning of requests.
#![forbid(unsafe_code)]

mod channel;
mod connection;
mod counts;
mod hello;
mod incoming;
mod names;
mod outgoing;
mod passage;
mod server;
mod through;
mod trust;

pub use channel::{Channel, Endpoint, LookUp};
pub use connection::{
    Answered, CALLS_MAX, Connection, DEAD_AFTER, Defer, Demand, PING_AFTER, Responder, SERVED_MAX,
};
pub use hello::{HELLO_PATIENCE, Identity, Proved, connect};
pub use passage::Destinations;
pub use server::{Server, serve};
pub use through::Via;
pub use trust::{Policy, TRUSTED_NETWORKS, Trust};

use bytes::Bytes;
use weir_env::{BoxFuture, Instant};
use weir_proto::checksum::{crc32c, crc32c_append};
use weir_proto::data::PAYLOAD_MAX;
use weir_proto::methods::{self, Method};
use weir_proto::sender::Sender;
use weir_proto::{Error, Request, Result, Wire};

/// A service's way to handle a call: an answer in place (fast, never blocking), or later in a task of its
/// own.
pub enum Handled {
    Now(Result<Reply>),
    /// Runs to its end even if the caller has given up or the connection is lost.
    Later(BoxFuture<'static, Result<Reply>>),
}

/// One request as it arrived. The payload's checksum has been verified.
pub struct Call {
    pub method: u16,
    pub body: Bytes,
    /// Lies at the start of an aligned buffer of the node's pool, unless it is empty.
    pub payload: Bytes,
    /// When to answer with the reason of the delay: a moment before the caller's patience ends.
    pub deadline: Instant,
    /// Whether the caller still waits.
    pub demand: Demand,
    /// The connection it came on, for calls back.
    pub connection: Connection,
}

impl Call {
    /// The request, if the body is one.
    pub fn decode<R: Request>(&self) -> Result<R> {
        R::from_bytes(&self.body).map_err(|e| e.doing(format_args!("decode {}", R::NAME)))
    }
    /// The answer to a method that this service does not have.
    pub fn unknown(&self) -> Error {
        not_served(self.method)
    }
}

fn not_served(method: u16) -> Error {
    Error::unsupported(format!("method {method} is not served here"))
}

pub trait Service: Send + Sync + 'static {
    /// Called for the requests of a connection one after the other, in the order they were sent: must not
    /// block.
    fn handle(&self, call: Call) -> Handled;
    /// Like [`Service::handle`], for a service that answers many requests on one event: it may take a
    /// [`Responder`], and return `None`, instead of a task for each.
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        let _ = defer;
        Some(self.handle(call))
    }
    /// The method with this number, with its permitted senders: checked before `handle` is called. An unknown
    /// number, and a sender that is not permitted, are refused.
    fn method(&self, number: u16) -> Option<&'static Method> {
        methods::find(number)
    }
    /// A request was refused because its sender may not use the method: `handle` does not get it.
    fn refused(&self, method: &Method, by: &Connection, why: &Error) {
        let _ = (method, by, why);
    }
    /// Whether other users of this machine may connect through Unix sockets (see [`Proved::User`]); the
    /// methods declare which requests they may send.
    fn admits_guests(&self) -> bool {
        false
    }
    /// Whether machines without a certificate may connect over a network where nodes need one (see
    /// [`Proved::Stranger`]); the methods declare which requests they may send.
    fn admits_strangers(&self) -> bool {
        false
    }
    /// The largest payload of a request from such a sender to this service; a longer one ends its connection
    /// before memory is allocated for it.
    fn payload_max(&self, _from: Sender) -> u32 {
        PAYLOAD_MAX
    }
    /// All requests from the last read of a connection are handled: work that was deferred for batching can
    /// start now. May block as long as a small write to a disk.
    fn caught_up(&self) {}
    /// A connection of this service ended. Called once for each connection whose hello was accepted, soon
    /// after its end and from a task of its own; not for one whose handles this node had all dropped.
    fn disconnected(&self, connection: &Connection) {
        let _ = connection;
    }
}

/// Serves nothing: for a client without calls back.
pub struct NoService;

impl Service for NoService {
    fn handle(&self, call: Call) -> Handled {
        Handled::Now(Err(call.unknown()))
    }
}

/// The answer to a call: an encoded body and bulk bytes.
#[derive(Debug, Default)]
pub struct Reply {
    pub body: Vec<u8>,
    pub payload: Payload,
}

impl Reply {
    pub fn new(body: &impl Wire) -> Reply {
        Reply { body: body.to_bytes(), payload: Payload::default() }
    }
    pub fn with_payload(body: &impl Wire, payload: impl Into<Payload>) -> Reply {
        Reply { body: body.to_bytes(), payload: payload.into() }
    }
}

/// Bulk bytes of a frame, in parts that are sent in order without a copy.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    pub parts: Vec<Bytes>,
    /// CRC32C of all parts, if already known (see `weir_proto::checksum::crc_of_blocks`). Otherwise it is
    /// computed.
    pub crc: Option<u32>,
}

impl Payload {
    pub fn with_crc(parts: Vec<Bytes>, crc: u32) -> Payload {
        Payload { parts, crc: Some(crc) }
    }
    /// Total length in bytes.
    pub fn len(&self) -> usize {
        self.parts.iter().map(Bytes::len).sum()
    }
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(Bytes::is_empty)
    }
    fn crc(&self) -> u32 {
        match (self.crc, &self.parts[..]) {
            (Some(crc), _) => crc,
            (None, []) => 0,
            (None, [one]) => crc32c(one),
            (None, parts) => parts.iter().fold(0, |crc, part| crc32c_append(crc, part)),
        }
    }
}
impl From<Vec<Bytes>> for Payload {
    fn from(parts: Vec<Bytes>) -> Payload {
        Payload { parts, crc: None }
    }
}
impl From<Bytes> for Payload {
    fn from(part: Bytes) -> Payload {
        Payload { parts: vec![part], crc: None }
    }
}
