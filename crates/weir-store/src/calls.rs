//! Calls to targets: one of this node is called directly, one of another node through its channel.
//!
//! A call that its target is too busy to begin is made again until it has begun. Knows nothing of what a
//! request means.
use crate::peers::{PeerReply, PeerRequest, Peers};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::{Backoff, Env, Instant, Retry};
use weir_proto::{Error, ErrorKind, TargetId, Wire};
use weir_rpc::Handled;

/// How long one call to a peer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pauses of calls to a peer that is too busy to begin them.
const BUSY_RETRY: Backoff = Backoff { first: Duration::from_millis(20), max: Duration::from_secs(1) };

/// The service of this node, for requests of its own targets to each other.
pub(crate) trait OwnService: Send + Sync + 'static {
    fn serve_own(&self, method: u16, body: &[u8], payload: Bytes, deadline: Instant) -> Handled;
}

pub(crate) struct Calls {
    env: Env,
    peers: Arc<dyn Peers>,
    /// The targets of this node, and its service.
    own: BTreeSet<TargetId>,
    service: Weak<dyn OwnService>,
}

impl Calls {
    pub fn new(
        env: &Env,
        peers: &Arc<dyn Peers>,
        own: BTreeSet<TargetId>,
        service: Weak<dyn OwnService>,
    ) -> Arc<Calls> {
        Arc::new(Calls { env: env.clone(), peers: peers.clone(), own, service })
    }

    /// The answer of a target. The call is made now, not when the answer is awaited.
    pub fn ask<R: PeerRequest>(&self, target: TargetId, request: R, payload: Vec<Bytes>) -> PeerReply<R>
    where
        R::Reply: Send,
    {
        match self.own.contains(&target) {
            true => self.ask_own(&request, payload),
            false => self.ask_until_begun(target, request, payload),
        }
    }

    fn ask_own<R: PeerRequest>(&self, request: &R, payload: Vec<Bytes>) -> PeerReply<R>
    where
        R::Reply: Send,
    {
        let Some(service) = self.service.upgrade() else {
            return Box::pin(async { Err(Error::unavailable("this storage node has ended")) });
        };
        let payload = match payload.len() {
            0 => Bytes::new(),
            1 => payload.into_iter().next().expect("one part"),
            _ => Bytes::from(payload.concat()),
        };
        let deadline = self.env.clock.now() + PATIENCE;
        let handled = service.serve_own(R::METHOD, &request.to_bytes(), payload, deadline);
        Box::pin(async move {
            let reply = match handled {
                Handled::Now(reply) => reply?,
                Handled::Later(reply) => reply.await?,
            };
            let payload = reply.payload.parts.concat();
            Ok((R::Reply::from_bytes(&reply.body)?, Bytes::from(payload)))
        })
    }

    /// A call to a target of another node, again while that node is too busy to begin it.
    fn ask_until_begun<R: PeerRequest>(
        &self,
        target: TargetId,
        request: R,
        payload: Vec<Bytes>,
    ) -> PeerReply<R>
    where
        R::Reply: Send,
    {
        let first = request.clone().send(&*self.peers, target, payload.clone(), PATIENCE);
        let (clock, deadline) = (self.env.clock.clone(), self.env.clock.now() + PATIENCE);
        let mut retry = Retry::jittered(&self.env, BUSY_RETRY, deadline);
        let peers = self.peers.clone();
        Box::pin(async move {
            let mut answer = first.await;
            while let Err(Error { kind: ErrorKind::Busy { wait_ms }, .. }) = answer {
                let pause = retry.next_pause().max(Duration::from_millis(wait_ms.into()));
                if deadline.since(clock.now()) <= pause {
                    break;
                }
                clock.sleep(pause).await;
                let left = deadline.since(clock.now());
                answer = request.clone().send(&*peers, target, payload.clone(), left).await;
            }
            answer
        })
    }
}
