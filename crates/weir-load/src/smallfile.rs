//! Small files, all in one directory: create, write and close; open, read and compare.

use crate::options::{Common, parse_bytes};
use crate::report::{Report, Sample};
use crate::runner::{Place, repeat};
use crate::work::{Names, Work};
use serde::Serialize;
use weir_proto::Result;

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Size of a file
    #[arg(long, default_value = "3901", value_parser = parse_bytes)]
    pub file_bytes: u64,
    /// Files of each worker
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub files: u64,
}

impl Options {
    pub fn new(common: Common) -> Options {
        Options { common, file_bytes: 3901, files: 5_000 }
    }
}

pub fn run(options: &Options) -> Result<Report> {
    let notes = [
        "all files in one directory; each worker reads the files of its neighbour",
        "the baseline is buffered: the size is not a multiple of a block",
    ];
    repeat("smallfile", options, &options.common, &notes, |place| once(options, place))
}

fn once(options: &Options, place: &mut Place) -> Result<Vec<Sample>> {
    let jobs = usize::from(options.common.jobs);
    let (bytes, seed) = (options.file_bytes, options.common.seed);
    let names = |place: &Place, worker: usize, owner: usize| Names {
        dir: place.dir(worker).to_path_buf(),
        worker: (owner % jobs) as u64,
        count: options.files,
    };
    let writes: Vec<Work> =
        (0..jobs).map(|w| Work::SmallWrite { names: names(place, w, w), bytes, seed }).collect();
    let reads: Vec<Work> =
        (0..jobs).map(|w| Work::SmallRead { names: names(place, w, w + 1), bytes, seed }).collect();
    let written = place.launch.run(&writes)?;
    let read = place.launch.run(&reads)?;
    let read = place.note(read);
    Ok(vec![
        Sample::rate("create and write", "1/s", written.ops_per_s()),
        Sample::cost("create and write p50", "µs", written.latency.quantile_us(0.5)),
        Sample::cost("create and write p99", "µs", written.latency.quantile_us(0.99)),
        Sample::rate("read", "1/s", read.ops_per_s()),
        Sample::cost("read p50", "µs", read.latency.quantile_us(0.5)),
    ])
}
