//! `cargo run -p weir-sim -- --seed 7 [--runs 1] [--operations 60] [--faults kill-meta,slow-disk | none]`:
//! repeats a run of the simulated cluster, or tries many. Without `--faults` each seed has a mix and a pace
//! of its own. A broken run is made smaller, and the command that repeats the smaller one is printed.
#![allow(
    clippy::disallowed_types,
    reason = "the command writes its trace and takes its time on the real machine"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "the command writes its trace and takes its time on the real machine"
)]
use clap::{Parser, ValueEnum};
use std::{fs::File, io::Write, process::ExitCode, str::FromStr, time::Duration};
use weir_proto::map::Scheme;
use weir_sim::coverage::table;
use weir_sim::marks::Met;
use weir_sim::oracles::Oracles;
use weir_sim::{FaultKind, Options, Servers, Watch, run, shrink::shrink};

/// A run is millions of small allocations on one thread: a tenth of its time with the machine's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs clusters of the real code in a simulated world, each under a seed, while things break: repeats a run,
/// or tries many. A run that breaks a promise is made smaller, and the command that repeats it is printed.
#[derive(clap::Parser)]
#[command(name = "weir-sim", version)]
struct Args {
    /// The first seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many seeds
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// How many of them at the same time
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    jobs: u64,
    /// Operations of each application
    #[arg(long)]
    operations: Option<u64>,
    /// Longest pause of an application between two operations: a longer one means more faults per operation
    #[arg(long, value_name = "MS")]
    pause_ms: Option<u64>,
    /// Kinds of faults, the first of which comes first, or `none`; without this each seed has a mix and a
    /// pace of its own
    #[arg(long, value_name = "NAME,NAME…")]
    faults: Option<Kinds>,
    /// Faults that are left out, by their number in the run
    #[arg(long, value_name = "N,N…", value_delimiter = ',')]
    mute: Vec<u64>,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Files are evicted and come back from a home, by movers that die
    #[arg(long, default_value = "no")]
    home: Choice,
    /// Snapshots are taken, looked at and removed
    #[arg(long, default_value = "no")]
    snapshots: Choice,
    /// The volume is cloned, and clones are changed and deleted
    #[arg(long, default_value = "no")]
    clones: Choice,
    /// Processes of every client count under locks
    #[arg(long, default_value = "no")]
    locks: Choice,
    /// A tree of directories is changed
    #[arg(long, default_value = "no")]
    tree: Choice,
    /// What is removed goes to a trash
    #[arg(long, default_value = "no")]
    trash: Choice,
    /// A volume mirrors a home that strangers change
    #[arg(long, default_value = "no", conflicts_with = "home")]
    replica: Choice,
    /// Volumes with limits are made, written until they are full, and deleted
    #[arg(long, default_value = "no")]
    limits: Choice,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    Yes,
    No,
}

#[derive(Clone)]
struct Kinds(Vec<FaultKind>);

impl FromStr for Kinds {
    type Err = String;
    fn from_str(names: &str) -> Result<Kinds, String> {
        if names == "none" {
            return Ok(Kinds(Vec::new()));
        }
        let known = || FaultKind::ALL.map(FaultKind::name).join(", ");
        let kind =
            |name| FaultKind::by_name(name).ok_or_else(|| format!("{name} is not a fault: {}", known()));
        names.split(',').map(kind).collect::<Result<_, _>>().map(Kinds)
    }
}

#[derive(Clone, Copy)]
struct Speed(Option<u32>);

impl FromStr for Speed {
    type Err = String;
    fn from_str(text: &str) -> Result<Speed, String> {
        match text {
            "yes" => Ok(Speed(Some(100))),
            "no" => Ok(Speed(None)),
            percent => match percent.parse() {
                Ok(percent @ 1..=10_000) => Ok(Speed(Some(percent))),
                _ => Err(format!("{percent} is not yes, no, or a speed from 1 to 10000")),
            },
        }
    }
}

#[derive(Default)]
struct Sums {
    broken: u64,
    operations: u64,
    excused: u64,
    faults: u64,
    evictions: [u64; 2],
    simulated: Duration,
    met: Met,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(filter) = &args.output.trace {
        start_log(filter);
    }
    // A failure is reported with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let begun = std::time::Instant::now();
    let sums = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.jobs)
            .map(|worker| {
                scope.spawn({
                    let args = &args;
                    move || run_worker(args, worker)
                })
            })
            .collect();
        let mut sums = Sums::default();
        workers
            .into_iter()
            .for_each(|worker| sums.add(worker.join().expect("a broken run is caught where it ran")));
        sums
    });
    let took = begun.elapsed();
    println!(
        "{} runs, {} broken; {} operations, {} excused errors, {} faults, {} evictions and {} by writers; {:.0} s simulated in {:.1} s: {:.0} times",
        args.runs,
        sums.broken,
        sums.operations,
        sums.excused,
        sums.faults,
        sums.evictions[0],
        sums.evictions[1],
        sums.simulated.as_secs_f64(),
        took.as_secs_f64(),
        sums.simulated.as_secs_f64() / took.as_secs_f64()
    );
    if args.output.marks == Choice::Yes {
        println!("{}", table(&sums.met, &FaultKind::ALL));
    }
    ExitCode::from(u8::from(sums.broken > 0))
}

/// Every `jobs`-th seed.
fn run_worker(args: &Args, worker: u64) -> Sums {
    let mut sums = Sums::default();
    for seed in (args.seed + worker..args.seed + args.runs).step_by(args.jobs as usize) {
        try_one(seed, args, &mut sums);
    }
    sums
}

impl Sums {
    fn add(&mut self, other: Sums) {
        self.broken += other.broken;
        self.operations += other.operations;
        self.excused += other.excused;
        self.faults += other.faults;
        (0..2).for_each(|n| self.evictions[n] += other.evictions[n]);
        self.simulated += other.simulated;
        for (pair, count) in other.met {
            *self.met.entry(pair).or_default() += count;
        }
    }
}

fn try_one(seed: u64, args: &Args, sums: &mut Sums) {
    match run(seed, &args.options_of(seed)) {
        Ok(outcome) => {
            sums.operations += outcome.operations;
            sums.excused += outcome.excused;
            sums.faults += outcome.faults.values().sum::<u64>();
            sums.evictions[0] += outcome.evictions;
            sums.evictions[1] += outcome.own_evictions;
            sums.simulated += outcome.simulated;
            for (pair, count) in outcome.met {
                *sums.met.entry(pair).or_default() += count;
            }
            if let Some(path) = &args.output.log {
                write_log(path, &outcome.log);
            }
            if args.runs == 1 {
                println!(
                    "seed {seed}: {} operations, faults {:?}, they took effect {:?}",
                    outcome.operations, outcome.faults, outcome.hits
                );
                println!("{:?}", outcome.calm);
            }
        }
        Err(broken) => {
            sums.broken += 1;
            println!("seed {seed} BROKEN: {broken}");
            if args.output.shrink == Choice::Yes && sums.broken == 1 {
                println!("made smaller: {}", shrink(broken.clone()));
            }
            if let Some(path) = &args.output.log {
                write_log(path, &broken.log);
            }
        }
    }
}

/// Prints the log of the roles, filtered in the syntax of `RUST_LOG`.
fn start_log(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    tracing_subscriber::fmt().with_env_filter(filter).without_time().with_writer(std::io::stderr).init();
}

fn write_log(path: &str, lines: &[String]) {
    let written =
        File::create(path).and_then(|mut file| lines.iter().try_for_each(|line| writeln!(file, "{line}")));
    if let Err(e) = written {
        eprintln!("error: write {path}: {e}");
    }
}

/// What kind of cluster it is.
#[derive(clap::Args)]
struct ClusterArgs {
    /// How stripes are kept on six targets: ec:K+M or replica:N
    #[arg(long, default_value = "ec:4+2")]
    scheme: Scheme,
    /// Nodes show certificates, and frames are protected
    #[arg(long, default_value = "no")]
    certificates: Choice,
    /// Nodes that keep the metadata, 1 to 3
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
    copies: u8,
    /// Coordinators, 1 to 3; several share an etcd
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
    coordinators: u8,
    /// Nodes have a processor, and what they do takes its time: yes, no, or its speed in hundredths of a
    /// usual one; without this it depends on the seed and the faults
    #[arg(long, value_name = "SPEED")]
    processor: Option<Speed>,
}

/// What a run checks and shows.
#[derive(clap::Args)]
struct OutputArgs {
    /// What is checked about load: epochs, work, idle, all or none
    #[arg(long, value_name = "NAME,NAME…")]
    oracles: Option<Oracles>,
    /// The first run that breaks a promise is made smaller
    #[arg(long, default_value = "yes")]
    shrink: Choice,
    /// Prints how often each kind of fault met each kind of message
    #[arg(long, default_value = "no")]
    marks: Choice,
    /// Writes all that happened to this file
    #[arg(long, value_name = "FILE")]
    log: Option<String>,
    /// Prints what the servers and clients log, as `RUST_LOG` would filter it
    #[arg(long, value_name = "FILTER")]
    trace: Option<String>,
}

impl Args {
    fn options_of(&self, seed: u64) -> Options {
        let base = match &self.faults {
            None => Options::mixed_of(seed, self.cluster.copies.into())
                .with_coordinators(self.cluster.coordinators.into(), seed),
            Some(Kinds(faults)) => Options { faults: faults.clone(), ..Options::default() },
        };
        let mut options = Options {
            scheme: self.cluster.scheme,
            mute: self.mute.iter().copied().collect(),
            home: self.home == Choice::Yes,
            snapshots: self.snapshots == Choice::Yes,
            clones: self.clones == Choice::Yes,
            locks: self.locks == Choice::Yes,
            tree: self.tree == Choice::Yes,
            trash: self.trash == Choice::Yes,
            replica: self.replica == Choice::Yes,
            limits: self.limits == Choice::Yes,
            servers: Servers {
                certificates: self.cluster.certificates == Choice::Yes,
                copies: self.cluster.copies.into(),
                coordinators: self.cluster.coordinators.into(),
                late: 0,
                processor: base.servers.processor,
            },
            watch: Watch { log: self.output.log.is_some(), oracles: base.watch.oracles },
            ..base
        };
        options.operations = self.operations.unwrap_or(options.operations);
        options.pause_ms_max = self.pause_ms.unwrap_or(options.pause_ms_max);
        options.servers.processor =
            self.cluster.processor.map_or(options.servers.processor, |Speed(percent)| percent);
        options.watch.oracles = self.output.oracles.unwrap_or(options.watch.oracles);
        options
    }
}
