//! One file that several workers write in turns: record n belongs to worker n mod count. The shape of
//! parallel HDF5.

use crate::failure::failed;
use crate::options::{Common, parse_bytes};
use crate::report::{Report, Sample};
use crate::runner::{Place, repeat};
use crate::work::{Records, Work};
use serde::Serialize;
use std::fs::File;
use weir_proto::{Error, Result};

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Bytes of a record: on purpose no multiple of anything
    #[arg(long, default_value = "47008", value_parser = parse_bytes)]
    pub record_bytes: u64,
    /// Records in the file
    #[arg(long, default_value_t = 10_000)]
    pub records: u64,
}

impl Options {
    pub fn new(common: Common) -> Options {
        Options { common, record_bytes: 47_008, records: 10_000 }
    }
}

pub fn run(options: &Options) -> Result<Report> {
    if options.records < u64::from(options.common.jobs) {
        return Err(Error::invalid("there are fewer records than workers"));
    }
    let notes = [
        "memory touched before the start; writes include each worker's fsync; each reads what its neighbour wrote",
        "each worker opens the file for reading and writing, as IOR and HDF5 do",
        "the baseline is buffered: records do not begin at multiples of a block",
    ];
    repeat("shared", options, &options.common, &notes, |place| once(options, place))
}

fn once(options: &Options, place: &mut Place) -> Result<Vec<Sample>> {
    let jobs = u64::from(options.common.jobs);
    let path = place.dirs[0].join("shared");
    File::create(&path).map_err(|e| failed("create", &path, &e))?;
    let records = |place: &Place, worker: u64, first: u64| Records {
        path: place.dir(worker as usize).join("shared"),
        first,
        step: jobs,
        count: options.records,
        record_bytes: options.record_bytes,
        seed: options.common.seed,
    };
    let writes: Vec<Work> = (0..jobs).map(|w| Work::RecordsWrite(records(place, w, w))).collect();
    let reads: Vec<Work> = (0..jobs).map(|w| Work::RecordsRead(records(place, w, (w + 1) % jobs))).collect();
    let written = place.launch.run(&writes)?;
    let read = place.launch.run(&reads)?;
    let read = place.note(read);
    Ok(vec![
        Sample::rate("write", "MiB/s", written.mib_per_s()),
        Sample::rate("read", "MiB/s", read.mib_per_s()),
    ])
}
