//! The cluster's channels as [`Peers`].
use crate::peers::{PeerReply, Peers};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::BoxFuture;
use weir_proto::coord::{PlaceCopied, RefillReport, Suspicion};
use weir_proto::data::*;
use weir_proto::map::ClusterMap;
use weir_proto::{Epoch, PgId, Request, Result, TargetId};
use weir_rpc::Answered;

fn call<R: Request + Send + Sync + 'static>(
    cluster: &Cluster,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
    patience: Duration,
) -> BoxFuture<'static, Result<(R::Reply, Bytes)>>
where
    R::Reply: Send,
{
    let cluster = cluster.clone();
    Box::pin(async move {
        Ok(cluster.call_target(target, &request, payload.into(), patience).await?.into_parts())
    })
}

macro_rules! calls {
    ($($method:ident: $request:ty),* $(,)?) => {$(
        fn $method(&self, target: TargetId, request: $request, payload: Vec<Bytes>, patience: Duration)
            -> PeerReply<$request> {
            call(self, target, request, payload, patience)
        }
    )*};
}

impl Peers for Cluster {
    fn map(&self) -> Arc<ClusterMap> {
        Cluster::map(self)
    }
    fn wait_newer(&self, version: u64, patience: Duration) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.clone();
        Box::pin(async move { Cluster::wait_newer(&cluster, version, patience).await })
    }
    fn report(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        why: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        self.suspect(target, group, epoch, Suspicion::Failed, why)
    }
    fn suspect(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        suspicion: Suspicion,
        why: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.clone();
        Box::pin(async move { cluster.suspect_target(target, group, epoch, suspicion, &why).await })
    }
    fn caught_up(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.clone();
        Box::pin(async move { Cluster::caught_up(&cluster, target, group, epoch).await })
    }
    fn place_copied(&self, report: PlaceCopied) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.clone();
        Box::pin(async move { cluster.place_copied(report).await })
    }
    fn refill_reported(&self, reports: Vec<RefillReport>) -> BoxFuture<'static, Result<()>> {
        let cluster = self.clone();
        Box::pin(async move { cluster.report_refill(reports).await })
    }
    fn pass_on(
        &self,
        request: PassOn,
        payload: Bytes,
        patience: Duration,
    ) -> BoxFuture<'static, Result<Answered<Bytes>>> {
        let cluster = self.clone();
        Box::pin(async move { Cluster::pass_on(&cluster, &request, payload.into(), patience).await })
    }
    crate::with_peer_requests!(calls);
}
