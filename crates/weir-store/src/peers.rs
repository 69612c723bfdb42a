//! How a storage node reaches the cluster: the map, the coordinator, and the targets of other nodes.
//!
//! A seam of its own so that stores can be wired in one process. The cluster's channels are one implementation.
use bytes::Bytes;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::coord::Doubt;
use weir_proto::data::*;
use weir_proto::map::ClusterMap;
use weir_proto::{Epoch, PgId, Request, Result, TargetId};

/// A call to another target, under way.
pub type PeerReply<R> = BoxFuture<'static, Result<(<R as Request>::Reply, Bytes)>>;

/// A request that targets send each other.
pub trait PeerRequest: Request + Clone + Send + Sync + 'static {
    fn send(
        self,
        peers: &dyn Peers,
        target: TargetId,
        payload: Vec<Bytes>,
        patience: Duration,
    ) -> PeerReply<Self>;
}

macro_rules! peer_calls {
    ($($method:ident: $request:ty),* $(,)?) => {
        /// What a storage node asks of the rest of the cluster.
        pub trait Peers: Send + Sync + 'static {
            fn map(&self) -> Arc<ClusterMap>;
            fn wait_newer(&self, version: u64, patience: Duration) -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            /// Tells the coordinator that a target could not be used; the answer is the newest map after its judgement.
            fn report(&self, target: TargetId, group: PgId, epoch: Epoch, why: String)
                -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            /// Tells it that a target has not answered when it should have, or (`Slow`) long after others had.
            fn doubt(&self, target: TargetId, group: PgId, epoch: Epoch, doubt: Doubt, why: String)
                -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            fn caught_up(&self, target: TargetId, group: PgId, epoch: Epoch)
                -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            $(fn $method(&self, target: TargetId, request: $request, payload: Vec<Bytes>, patience: Duration)
                -> PeerReply<$request>;)*
        }
        $(impl PeerRequest for $request {
            fn send(self, peers: &dyn Peers, target: TargetId, payload: Vec<Bytes>, patience: Duration)
                -> PeerReply<Self> {
                peers.$method(target, self, payload, patience)
            }
        })*
    };
}
/// Hands what targets ask of each other, `method: Request`, to a macro: the one list of it.
#[macro_export]
macro_rules! with_peer_requests {
    ($then:ident) => {
        $then!(
            write_fragment: WriteFragment,
            commit_stripe: CommitStripe,
            drop_prepared: DropPrepared,
            mirror_overlay: MirrorOverlay,
            read_cell: ReadCell,
            read_overlays: ReadOverlays,
            stat_cell: StatCell,
            mark_missing: MarkMissing,
            seal_cell: SealCell,
            list_cells: ListCells,
            list_cuts: ListCuts,
        );
    };
}
with_peer_requests!(peer_calls);

/// Waits for all of them; the results are in the order of the calls.
pub async fn join_all<T>(calls: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    let mut running: Vec<Option<BoxFuture<'_, T>>> = calls.into_iter().map(Some).collect();
    let mut results: Vec<Option<T>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (call, result) in running.iter_mut().zip(&mut results) {
            if let Some(Poll::Ready(value)) = call.as_mut().map(|c| c.as_mut().poll(cx)) {
                *result = Some(value);
                *call = None;
            }
        }
        if running.iter().any(Option::is_some) { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    results.into_iter().flatten().collect()
}
