//! Empty files: create, stat, list, unlink; each worker in its own directory (easy) or all in one (hard).

use crate::failure::failed;
use crate::options::Common;
use crate::report::{Report, Sample};
use crate::runner::{Place, repeat};
use crate::work::{Names, Work};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use weir_proto::Result;

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Files of each worker
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub files: u64,
    /// All files in one directory
    #[arg(long)]
    pub hard: bool,
}

impl Options {
    pub fn new(common: Common) -> Options {
        Options { common, files: 5_000, hard: false }
    }
}

pub fn run(options: &Options) -> Result<Report> {
    let name = if options.hard { "mdtest hard" } else { "mdtest easy" };
    let notes = ["each worker stats, lists and unlinks the files of its neighbour"];
    repeat(name, options, &options.common, &notes, |place| once(options, place))
}

fn once(options: &Options, place: &mut Place) -> Result<Vec<Sample>> {
    let jobs = usize::from(options.common.jobs);
    let dir_name = |owner: usize| if options.hard { "all".to_string() } else { format!("worker-{owner}") };
    for owner in 0..jobs {
        let dir = place.dirs[0].join(dir_name(owner));
        fs::create_dir_all(&dir).map_err(|e| failed("make the directory", &dir, &e))?;
    }
    let dirs: Vec<PathBuf> = (0..jobs).map(|worker| place.dir(worker).to_path_buf()).collect();
    // Worker w operates on the files of worker w + shift.
    let names = |worker: usize, shift: usize| {
        let owner = (worker + shift) % jobs;
        Names { dir: dirs[worker].join(dir_name(owner)), worker: owner as u64, count: options.files }
    };
    let mut phase = |shift: usize, work: &dyn Fn(Names) -> Work| {
        let works: Vec<Work> = (0..jobs).map(|w| work(names(w, shift))).collect();
        place.launch.run(&works).map(|outcome| place.note(outcome))
    };
    let in_one_dir = options.files * if options.hard { jobs as u64 } else { 1 };
    let created = phase(0, &Work::Create)?;
    let stated = phase(1, &Work::Stat)?;
    let listed = phase(1, &|names| Work::List(Names { count: in_one_dir, ..names }))?;
    let unlinked = phase(1, &Work::Unlink)?;
    Ok(vec![
        Sample::rate("create", "1/s", created.ops_per_s()),
        Sample::cost("create p50", "µs", created.latency.quantile_us(0.5)),
        Sample::cost("create p99", "µs", created.latency.quantile_us(0.99)),
        Sample::rate("stat", "1/s", stated.ops_per_s()),
        Sample::rate("list with attributes", "1/s", listed.ops_per_s()),
        Sample::rate("unlink", "1/s", unlinked.ops_per_s()),
    ])
}
