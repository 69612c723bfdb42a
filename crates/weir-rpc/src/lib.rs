//! A typed request to a node gets an answer or a clear error.
//!
//! Frames are multiplexed over one connection in both directions: either end may call. The payload of a frame travels
//! outside its encoded header, is sent from where it lies, and is received straight into a pooled aligned buffer.
//!
//! Knows nothing of what a request means.

use bytes::Bytes;
use weir_env::{BoxFuture, Instant};
use weir_proto::{Result, Wire};

/// The answer to a call: an encoded body and bulk bytes.
#[derive(Debug, Default)]
pub struct Reply {
    pub body: Vec<u8>,
    pub payload: Vec<Bytes>,
}

impl Reply {
    pub fn new(body: &impl Wire) -> Reply {
        Reply { body: body.to_bytes(), payload: Vec::new() }
    }
    pub fn with_payload(body: &impl Wire, payload: Vec<Bytes>) -> Reply {
        Reply { body: body.to_bytes(), payload }
    }
}

/// What a service does with a call: answers in place (short, never blocking), or later in a task of its own.
pub enum Handled {
    Now(Result<Reply>),
    Later(BoxFuture<'static, Result<Reply>>),
}

/// One request as it arrived. The payload's checksum has been verified.
pub struct Call {
    pub method: u16,
    pub body: Bytes,
    pub payload: Bytes,
    /// When the caller stops waiting.
    pub deadline: Instant,
    /// The connection it came on: the way to call the caller back.
    pub connection: Connection,
}

pub trait Service: Send + Sync + 'static {
    fn handle(&self, call: Call) -> Handled;
    /// A connection of this service ended.
    fn disconnected(&self, connection: &Connection) {
        let _ = connection;
    }
}

/// One end of a live connection. Cheap to clone.
#[derive(Clone)]
pub struct Connection {}
