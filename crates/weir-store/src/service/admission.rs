//! Admission by load: which requests of clients a target begins, and calls to peers that refuse them for that
//! reason.
//!
//! Requests of storage nodes are not refused here: they finish work that was begun, and refusing them would
//! waste it.
use super::*;
use crate::door::Guest;
use weir_env::{Backoff, Retry};
use weir_proto::Reader;
use weir_proto::sender::Sender;

/// Pauses of calls to a peer that is too busy to begin them.
const BUSY_RETRY: Backoff = Backoff { first: Duration::from_millis(20), max: Duration::from_secs(1) };

impl StorageNode {
    /// At the door of the request's target. `None`: it is not asked there.
    pub(super) fn enter(&self, call: &Call) -> Result<Option<Guest>> {
        if call.connection.proved().sender() == Sender::Storage {
            return Ok(None);
        }
        let Some((id, bytes)) = costs(call) else { return Ok(None) };
        let Some(target) = self.targets.get(&id) else { return Ok(None) };
        let entered = target.door.enter(&self.env.clock, call.connection.id(), bytes, call.deadline);
        entered.map(Some).map_err(|(pause, inside)| {
            Error::busy(pause, format!("{id} is busy: {inside} requests of clients are in progress there"))
        })
    }
}

/// The target of a client's request that costs its disk, and the bytes that it holds in memory meanwhile.
/// Other requests are short, or end what was begun.
fn costs(call: &Call) -> Option<(TargetId, u64)> {
    let target = |r: &mut Reader<'_>| Place::decode(r).ok().map(|place| place.target);
    match call.method {
        WriteFragment::METHOD | WriteOverlay::METHOD | WriteOverlays::METHOD | ReadOverlays::METHOD => {
            target(&mut Reader::new(&call.body)).map(|target| (target, call.payload.len() as u64))
        }
        ReadCell::METHOD => ReadCell::from_bytes(&call.body)
            .ok()
            .map(|r| (r.place.target, u64::from(r.len).min(PAYLOAD_MAX.into()))),
        _ => None,
    }
}

/// A call to a target of another node, again while that node is too busy to begin it.
pub(super) fn ask_until_begun<R: PeerRequest>(
    env: &Env,
    peers: Arc<dyn Peers>,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
) -> PeerReply<R>
where
    R::Reply: Send,
{
    let first = request.clone().send(&*peers, target, payload.clone(), PEER_PATIENCE);
    let (clock, deadline) = (env.clock.clone(), env.clock.now() + PEER_PATIENCE);
    let mut retry = Retry::jittered(env, BUSY_RETRY, deadline);
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
