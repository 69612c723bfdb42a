//! Seams of the roles joined to the cluster: peers of a storage node, targets of the metadata role, a door that opens late.
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::{BoxFuture, Env};
use weir_proto::data::{
    CommitStripe, DropFile, DropPrepared, ListCells, MarkMissing, MirrorOverlay, ReadCell, ReadOverlays,
    SealCell, StatCell, WriteFragment,
};
use weir_proto::map::{ClusterMap, TargetState};
use weir_proto::{Epoch, Error, FileId, PgId, Request, Result, TargetId};
use weir_rpc::{Call, Connection, Handled, Service};
use weir_store::peers::{PeerReply, Peers};

/// A service that is announced before it is there: until then it asks callers to come back.
#[derive(Default)]
pub struct Gate {
    behind: OnceLock<Arc<dyn Service>>,
}

impl Gate {
    pub fn open(&self, service: Arc<dyn Service>) {
        assert!(self.behind.set(service).is_ok(), "a gate opens once");
    }
}

impl Service for Gate {
    fn handle(&self, call: Call) -> Handled {
        match self.behind.get() {
            Some(service) => service.handle(call),
            None => Handled::Now(Err(Error::unavailable("this node is starting"))),
        }
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(service) = self.behind.get() {
            service.disconnected(connection);
        }
    }
}

/// The targets of other nodes, over the cluster's channels.
pub struct ClusterPeers(pub Cluster);

macro_rules! calls {
    ($($method:ident: $request:ty),* $(,)?) => {$(
        fn $method(&self, target: TargetId, request: $request, payload: Vec<Bytes>, patience: Duration) -> PeerReply<$request> {
            call(&self.0, target, request, payload, patience)
        }
    )*};
}

impl Peers for ClusterPeers {
    fn map(&self) -> Arc<ClusterMap> {
        self.0.map()
    }
    fn wait_newer(&self, version: u64, patience: Duration) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.0.clone();
        Box::pin(async move { cluster.wait_newer(version, patience).await })
    }
    fn report(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        why: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.0.clone();
        Box::pin(async move { cluster.report_target(target, group, epoch, &why).await })
    }
    fn caught_up(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let cluster = self.0.clone();
        Box::pin(async move { cluster.caught_up(target, group, epoch).await })
    }
    calls!(
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
    );
}

fn call<R: Request + Send + Sync + 'static>(
    cluster: &Cluster,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
    patience: Duration,
) -> BoxFuture<'static, Result<(R::Reply, Bytes)>> {
    let channel = cluster.target(target);
    Box::pin(async move { channel?.call(&request, payload, patience).await })
}

/// How long one target may take to drop a file's cells.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// All targets of the map, for the metadata role's deleted files.
pub struct ClusterPurge(pub Cluster);

impl weir_meta::Purge for ClusterPurge {
    fn drop_file(&self, file: FileId, fence: u32) -> BoxFuture<'static, Result<()>> {
        let cluster = self.0.clone();
        Box::pin(async move {
            let map = cluster.map();
            // A failed target is never used again: what is on it does not matter.
            let targets: BTreeSet<TargetId> =
                map.targets.iter().filter(|t| t.state != TargetState::Failed).map(|t| t.id).collect();
            let calls = targets.into_iter().map(|target| {
                let drop = DropFile { target, file, from_stripe: 0, fence };
                call(&cluster, target, drop, Vec::new(), DROP_PATIENCE)
            });
            for answer in weir_store::peers::join_all(calls.collect()).await {
                answer?;
            }
            Ok(())
        })
    }
}

/// Part of a file system's free space that counts for a target, when several targets share it.
pub fn share_of_space(env: &Env, dir: &std::path::Path, used: u64, shared_by: u32) -> Option<u64> {
    let space = env.disk.space(dir).ok()?;
    Some(used + space.free / u64::from(shared_by.max(1)))
}
