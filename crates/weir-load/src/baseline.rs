//! The raw speed of a directory's file system: a few seconds, direct I/O.

use crate::options::Common;
use crate::{fsync, stream};
use serde::Serialize;
use std::path::Path;
use weir_proto::Result;

#[derive(Clone, Debug, Serialize)]
pub struct Baseline {
    pub write_mib_per_s: f64,
    pub read_mib_per_s: f64,
    pub fsync_p50_us: f64,
    pub fsync_p99_us: f64,
}

/// Two writers of 256 MiB and 500 small writes, directly on `dir`.
pub fn baseline(dir: &Path) -> Result<Baseline> {
    // Only the workload's own baseline is needed: one run, with `dir` as both.
    let common = Common { baseline: Some(dir.to_path_buf()), runs: 1, ..Common::at(dir) };
    let streams =
        stream::run(&stream::Options { file_bytes: 256 << 20, ..stream::Options::new(common.clone()) })?;
    let syncs = fsync::run(&fsync::Options { writes: 500, ..fsync::Options::new(common) })?;
    let of = |report: &crate::Report, row: &str| {
        report.row(row).and_then(|r| r.baseline).map_or(0.0, |b| b.median)
    };
    Ok(Baseline {
        write_mib_per_s: of(&streams, "write"),
        read_mib_per_s: of(&streams, "cold read"),
        fsync_p50_us: of(&syncs, "write and sync p50"),
        fsync_p99_us: of(&syncs, "write and sync p99"),
    })
}
