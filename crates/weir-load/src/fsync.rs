//! Latency of durable small writes: write and sync, one at a time.

use crate::options::{Common, parse_bytes};
use crate::report::{Report, Sample};
use crate::runner::{Place, repeat};
use crate::work::{Syncs, Work};
use serde::Serialize;
use weir_proto::Result;

/// Keeps sizes in the range of small writes.
const WRITE_BYTES_MAX: u64 = 16 << 20;

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Bytes of a write
    #[arg(long, default_value = "4096", value_parser = parse_bytes)]
    pub write_bytes: u64,
    /// Writes of each worker
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub writes: u64,
    /// Append instead of overwriting in place
    #[arg(long)]
    pub grow: bool,
    /// fsync instead of fdatasync: the time of change too. A local file system with fine time stamps then
    /// commits its own journal for each write
    #[arg(long)]
    pub times: bool,
}

impl Options {
    /// One worker.
    pub fn new(common: Common) -> Options {
        Options {
            common: Common { jobs: 1, ..common },
            write_bytes: 4096,
            writes: 2_000,
            grow: false,
            times: false,
        }
    }
}

pub fn run(options: &Options) -> Result<Report> {
    if options.write_bytes > WRITE_BYTES_MAX {
        return Err(weir_proto::Error::invalid(format!("--write-bytes is at most {WRITE_BYTES_MAX}")));
    }
    let notes = [
        if options.grow {
            "each write makes the file longer"
        } else {
            "the blocks exist and are overwritten"
        },
        if options.times { "each write is followed by fsync" } else { "each write is followed by fdatasync" },
    ];
    repeat("fsync", options, &options.common, &notes, |place| once(options, place))
}

fn once(options: &Options, place: &mut Place) -> Result<Vec<Sample>> {
    let work = |worker: usize| {
        Work::Fsync(Syncs {
            path: place.dir(worker).join(format!("fsync-{worker}")),
            writes: options.writes,
            bytes: options.write_bytes,
            grow: options.grow,
            times: options.times,
            direct: place.direct,
        })
    };
    let works: Vec<Work> = (0..usize::from(options.common.jobs)).map(work).collect();
    let done = place.launch.run(&works)?;
    Ok(vec![
        Sample::cost("write and sync p50", "µs", done.latency.quantile_us(0.5)),
        Sample::cost("write and sync p99", "µs", done.latency.quantile_us(0.99)),
        Sample::rate("write and sync", "1/s", done.ops_per_s()),
    ])
}
