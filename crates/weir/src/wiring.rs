//! Seams of the roles joined to the cluster: the targets of the metadata role's deleted files, a door that opens late.
use bytes::Bytes;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::{BoxFuture, Env};
use weir_meta::StripeCut;
use weir_proto::data::{DropFile, PAYLOAD_MAX};
use weir_proto::{Error, FileId, PgId, Request, Result, TargetId};
use weir_rpc::{Call, Connection, Defer, Handled, Service};

/// A service that is announced before it is there: until then it asks callers to come back.
#[derive(Default)]
pub struct Gate {
    behind: OnceLock<Arc<dyn Service>>,
    /// What is behind it.
    to_metadata: bool,
}

impl Gate {
    pub fn to_metadata() -> Gate {
        Gate { to_metadata: true, ..Gate::default() }
    }
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
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match self.behind.get() {
            Some(service) => service.handle_or_defer(call, defer),
            None => Some(self.handle(call)),
        }
    }
    fn admits_guests(&self) -> bool {
        self.to_metadata
    }
    fn payload_max(&self) -> u32 {
        if self.to_metadata { 0 } else { PAYLOAD_MAX }
    }
    fn caught_up(&self) {
        if let Some(service) = self.behind.get() {
            service.caught_up();
        }
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(service) = self.behind.get() {
            service.disconnected(connection);
        }
    }
}

fn call<R: Request + Send + Sync + 'static>(
    cluster: &Cluster,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
    patience: Duration,
) -> BoxFuture<'static, Result<(R::Reply, Bytes)>> {
    let channel = cluster.target(target);
    Box::pin(async move { Ok(channel?.call_now(&request, payload.into(), patience).await?.into_parts()) })
}

/// How long one target may take to drop a file's cells.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// The targets of a deleted file, for the metadata role.
pub struct ClusterPurge(pub Cluster);

impl weir_meta::Purge for ClusterPurge {
    fn drop_stripes(
        &self,
        file: FileId,
        first_pg: PgId,
        pg_count: u32,
        cut: StripeCut,
    ) -> BoxFuture<'static, Result<()>> {
        let StripeCut { from_stripe, to_stripe, token_epoch: fence } = cut;
        let cluster = self.0.clone();
        Box::pin(async move {
            let told = cluster.map().told_of_cuts(|g| g.0 >= first_pg.0 && g.0 - first_pg.0 < pg_count)?;
            let calls = told.into_iter().map(|(target, epochs)| {
                let drop = DropFile { target, file, from_stripe, to_stripe, fence, epochs };
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
