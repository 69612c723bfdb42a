//! A file per worker, written in order with an fsync at the end, read cold and again.

use crate::cpu::Cpu;
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
    /// Also read twice more with the kernel's pages dropped: data that was read again and again comes from
    /// the servers' memory
    #[arg(long)]
    pub hot: bool,
}

impl Options {
    pub fn new(common: Common) -> Options {
        Options { common, file_bytes: 1 << 30, io_bytes: 1 << 20, write_only: false, hot: false }
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
    let notes = [
        notes[0],
        notes[1],
        "CPU-s/GB: kernel time of a role is in its own system calls; of 10^9 payload bytes",
    ];
    let notes = if options.common.watched.is_empty() { &notes[..2] } else { &notes[..] };
    repeat("stream", options, &options.common, notes, |place| once(options, place))
}

const WRITE_CPU: [&str; 8] = [
    "write: client, user",
    "write: client, kernel",
    "write: storage, user",
    "write: storage, kernel",
    "write: metadata and coordinator",
    "write: application",
    "write: rest of the machine",
    "write: all",
];
const COLD_CPU: [&str; 8] = [
    "cold read: client, user",
    "cold read: client, kernel",
    "cold read: storage, user",
    "cold read: storage, kernel",
    "cold read: metadata and coordinator",
    "cold read: application",
    "cold read: rest of the machine",
    "cold read: all",
];
const HOT_CPU: [&str; 8] = [
    "hot read: client, user",
    "hot read: client, kernel",
    "hot read: storage, user",
    "hot read: storage, kernel",
    "hot read: metadata and coordinator",
    "hot read: application",
    "hot read: rest of the machine",
    "hot read: all",
];

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
    let cpu = Cpu::start(&options.common.watched);
    let wrote = place.launch.run(&writes)?;
    let mut samples = vec![Sample::rate("write", "MiB/s", wrote.mib_per_s())];
    if !place.direct {
        samples.extend(cpu.per_gb(&WRITE_CPU, wrote.bytes));
    }
    if options.write_only {
        return Ok(samples);
    }
    let phases: &[(&'static str, bool, Option<&[&'static str; 8]>)] = match options.hot {
        false => &[("cold read", true, Some(&COLD_CPU)), ("warm read", false, None)],
        true => &[
            ("cold read", true, Some(&COLD_CPU)),
            ("second read", true, None),
            ("hot read", true, Some(&HOT_CPU)),
            ("warm read", false, None),
        ],
    };
    for (name, drop_cache, cpu_names) in phases {
        let reads: Vec<Work> = (0..jobs)
            .map(|w| Work::StreamRead { stream: stream(place, w, w + 1), drop_cache: *drop_cache })
            .collect();
        let cpu = Cpu::start(&options.common.watched);
        let read = place.launch.run(&reads)?;
        let read = place.note(read);
        samples.push(Sample::rate(name, "MiB/s", read.mib_per_s()));
        if let (Some(names), false) = (cpu_names, place.direct) {
            samples.extend(cpu.per_gb(names, read.bytes));
        }
    }
    Ok(samples)
}
