//! A seam: how the cells of deleted and evicted bytes are dropped on the targets.
use crate::record::StripeTruncation;
use weir_env::BoxFuture;
use weir_proto::{FileId, PgId, Result};

/// Reaches all targets.
pub trait Purge: Send + Sync + 'static {
    /// Makes stripes of a file void on every live target of `pg_count` groups from `first_pg` on: see
    /// `DropFile`. An error: some target has not answered, repeat the request.
    fn drop_stripes(
        &self,
        file: FileId,
        first_pg: PgId,
        pg_count: u32,
        truncation: StripeTruncation,
    ) -> BoxFuture<'static, Result<()>>;
}

/// For a namespace without targets: there is nothing to drop.
pub struct NoTargets;

impl Purge for NoTargets {
    fn drop_stripes(
        &self,
        _: FileId,
        _: PgId,
        _: u32,
        _: StripeTruncation,
    ) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
