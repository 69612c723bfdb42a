//! A file per worker, written in order with an fsync at the end, read cold and again.

use crate::options::{Common, parse_bytes};
use crate::report::{Report, Sample};
use crate::runner::{Place, repeat};
use crate::work::{Stream, Work};
use serde::Serialize;
use weir_proto::{Error, Result};

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Size of each worker's file
    #[arg(long, default_value = "1GiB", value_parser = parse_bytes)]
    pub file_bytes: u64,
    /// Bytes of one read or write
    #[arg(long, default_value = "1MiB", value_parser = parse_bytes)]
    pub io_bytes: u64,
    /// Only write
    #[arg(long)]
    pub write_only: bool,
}

impl Options {
    pub fn new(common: Common) -> Options {
        Options { common, file_bytes: 1 << 30, io_bytes: 1 << 20, write_only: false }
    }
}

pub fn run(options: &Options) -> Result<Report> {
    if !options.io_bytes.is_multiple_of(4096) || options.file_bytes < options.io_bytes {
        return Err(Error::invalid("--io-bytes must be a multiple of 4096, and not above --file-bytes"));
    }
    let notes = [
        "memory touched before the start; writes include the fsync at the end",
        "cold: the kernel's cached pages were dropped (posix_fadvise), and another mount reads if several were given",
    ];
    repeat("stream", options, &options.common, &notes, |place| once(options, place))
}

fn once(options: &Options, place: &mut Place) -> Result<Vec<Sample>> {
    let jobs = usize::from(options.common.jobs);
    let stream = |place: &Place, worker: usize, mount: usize| Stream {
        path: place.dir(mount).join(format!("stream-{worker}")),
        object: worker as u64,
        bytes: options.file_bytes,
        io_bytes: options.io_bytes,
        seed: options.common.seed,
        direct: place.direct,
    };
    let writes: Vec<Work> = (0..jobs).map(|w| Work::StreamWrite(stream(place, w, w))).collect();
    let mut samples = vec![Sample::rate("write", "MiB/s", place.launch.run(&writes)?.mib_per_s())];
    if options.write_only {
        return Ok(samples);
    }
    for (name, drop_cache) in [("cold read", true), ("warm read", false)] {
        let reads: Vec<Work> =
            (0..jobs).map(|w| Work::StreamRead { stream: stream(place, w, w + 1), drop_cache }).collect();
        let read = place.launch.run(&reads)?;
        samples.push(Sample::rate(name, "MiB/s", place.note(read).mib_per_s()));
    }
    Ok(samples)
}
