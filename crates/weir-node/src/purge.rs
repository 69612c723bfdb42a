//! Requests of the metadata role to targets: dropping the cells of deleted files.
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::{BoxFuture, Env};
use weir_meta::StripeTruncation;
use weir_meta::copies::Right;
use weir_proto::data::DropFile;
use weir_proto::{FileId, PgId, Request, Result, TargetId};

fn call<R: Request + Send + Sync + 'static>(
    cluster: &Cluster,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
    patience: Duration,
) -> BoxFuture<'static, Result<(R::Reply, Bytes)>> {
    let cluster = cluster.clone();
    Box::pin(async move {
        Ok(cluster.call_target(target, &request, payload.into(), patience).await?.into_parts())
    })
}

/// How long one target may take to drop a file's cells.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// The targets of a deleted file, for the metadata role.
pub struct ClusterPurge {
    pub env: Env,
    pub cluster: Cluster,
    /// A leader that is cut off drops nothing: another one may have granted the file to a writer.
    pub right: Arc<Right>,
}

impl weir_meta::Purge for ClusterPurge {
    fn drop_stripes(
        &self,
        file: FileId,
        first_pg: PgId,
        pg_count: u32,
        truncation: StripeTruncation,
    ) -> BoxFuture<'static, Result<()>> {
        let StripeTruncation { from_stripe, to_stripe, token_epoch: fence } = truncation;
        let (env, cluster, right) = (self.env.clone(), self.cluster.clone(), self.right.clone());
        Box::pin(async move {
            right.wait(&env).await?;
            let targets =
                cluster.map().members_to_truncate(|g| g.0 >= first_pg.0 && g.0 - first_pg.0 < pg_count)?;
            let calls = targets.into_iter().map(|(target, epochs)| {
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
