//! The node between two others whose direct link is cut: it passes the bytes of both on, unread.
//!
//! Invariants: bytes go only to nodes that this one was given as destinations, and never through a local
//! socket: there the peer would take this process for the sender. Knows no frames.
use crate::names::resolved;
use std::sync::Arc;
use weir_env::{Addr, BoxReader, BoxStream, BoxWriter, Env};
use weir_proto::{Error, Result};

/// The present addresses of a node to which this one passes bytes on, by its name. Fast, never blocking.
pub type Destinations = Arc<dyn Fn(&str) -> Result<Vec<Addr>> + Send + Sync>;

/// A stream to the node that a caller means.
pub(crate) async fn onward(env: &Env, destinations: Option<&Destinations>, node: &str) -> Result<BoxStream> {
    let Some(destinations) = destinations else {
        return Err(Error::unavailable("this node passes nothing on now"));
    };
    let mut failed = Error::unavailable(format!("{node} has no address"));
    let mut addrs = destinations(node)?;
    addrs.retain(|addr| !matches!(addr, Addr::Unix(_)));
    for addr in resolved(env, &addrs).await? {
        match env.net.connect(&addr).await {
            Ok(stream) => return Ok(stream),
            Err(e) => failed = Error::unavailable(format!("connect to {addr}: {e}")),
        }
    }
    Err(failed)
}

/// A caller's stream, and the one to the node that it means.
pub(crate) struct Passage {
    pub near: (BoxReader, BoxWriter),
    pub far: BoxStream,
}

impl Passage {
    /// Passes bytes on in both directions until either stream ends.
    pub async fn carry(self) {
        let (mut near_in, mut near_out) = self.near;
        let (mut far_in, mut far_out) = self.far.split();
        let there = tokio::io::copy(&mut near_in, &mut far_out);
        let back = tokio::io::copy(&mut far_in, &mut near_out);
        tokio::select! {
            _ = there => {}
            _ = back => {}
        }
    }
}
