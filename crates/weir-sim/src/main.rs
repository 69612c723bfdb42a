//! `cargo run -p weir-sim -- --seed 7 [--runs 1] [--operations 60] [--faults kill-meta,slow-disk | none]`: repeats a run
//! of the simulated cluster, or tries many. Without `--faults` each seed has a mix and a pace of its own. A broken run is made
//! smaller, and the command that repeats the smaller one is printed.
#![allow(
    clippy::disallowed_types,
    reason = "the command writes its trace and takes its time on the real machine"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "the command writes its trace and takes its time on the real machine"
)]
use std::{fs::File, io::Write, process::ExitCode, time::Duration};
use weir_sim::marks::{Met, table};
use weir_sim::{FaultKind, Options, run, shrink::shrink};

/// A run is millions of small allocations on one thread: a tenth of its time with the machine's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const USAGE: &str = "usage: weir-sim [--seed N] [--runs N] [--jobs N] [--operations N] [--pause-ms N] [--faults none|NAME,NAME…] [--mute N,N…] \
                     [--home yes|no] [--snapshots yes|no] [--clones yes|no] [--locks yes|no] [--shrink yes|no] [--marks yes|no] [--log FILE] [--trace FILTER]";

struct Args {
    seed: u64,
    runs: u64,
    /// Seeds that run at the same time.
    jobs: u64,
    /// `None`: the default.
    operations: Option<u64>,
    pause_ms_max: Option<u64>,
    /// `None`: a mix for each seed.
    faults: Option<Vec<FaultKind>>,
    options: Options,
    shrinks: bool,
    marks: bool,
    log: Option<String>,
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
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(e) => {
            eprintln!("error: {e}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    // What broke is told with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let begun = std::time::Instant::now();
    let sums = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..args.jobs)
            .map(|lane| {
                scope.spawn({
                    let args = &args;
                    move || run_lane(args, lane)
                })
            })
            .collect();
        let mut sums = Sums::default();
        lanes
            .into_iter()
            .for_each(|lane| sums.add(lane.join().expect("a broken run is caught where it ran")));
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
    if args.marks {
        println!("{}", table(&sums.met, &FaultKind::ALL));
    }
    ExitCode::from(u8::from(sums.broken > 0))
}

/// Every so many-th seed.
fn run_lane(args: &Args, lane: u64) -> Sums {
    let mut sums = Sums::default();
    for seed in (args.seed + lane..args.seed + args.runs).step_by(args.jobs as usize) {
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
            if let Some(path) = &args.log {
                write_log(path, &outcome.log);
            }
            if args.runs == 1 {
                println!(
                    "seed {seed}: {} operations, faults {:?}, their disks did {:?}",
                    outcome.operations, outcome.faults, outcome.disk_hits
                );
            }
        }
        Err(broken) => {
            sums.broken += 1;
            println!("seed {seed} BROKEN: {broken}");
            if args.shrinks && sums.broken == 1 {
                println!("made smaller: {}", shrink(broken.clone()));
            }
            if let Some(path) = &args.log {
                write_log(path, &broken.log);
            }
        }
    }
}

/// What the roles log, as `RUST_LOG` would filter it.
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

impl Args {
    fn options_of(&self, seed: u64) -> Options {
        let mixed = Options {
            mute: self.options.mute.clone(),
            home: self.options.home,
            snapshots: self.options.snapshots,
            clones: self.options.clones,
            locks: self.options.locks,
            log: self.options.log,
            ..Options::mixed(seed)
        };
        let mut options = match &self.faults {
            None => mixed,
            Some(faults) => Options { faults: faults.clone(), ..self.options.clone() },
        };
        options.operations = self.operations.unwrap_or(options.operations);
        options.pause_ms_max = self.pause_ms_max.unwrap_or(options.pause_ms_max);
        options
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let options = Options::default();
    let (operations, pause_ms_max, log) = (None, None, None);
    let mut args = Args {
        seed: 0,
        runs: 1,
        jobs: 1,
        operations,
        pause_ms_max,
        faults: None,
        options,
        shrinks: true,
        marks: false,
        log,
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} wants a value"))?;
        let number = |text: &str| text.parse::<u64>().map_err(|e| format!("{word} {text}: {e}"));
        let choice = || match value.as_str() {
            "yes" => Ok(true),
            "no" => Ok(false),
            _ => Err(format!("{word} {value}: yes or no?")),
        };
        match word.as_str() {
            "--seed" => args.seed = number(&value)?,
            "--runs" => args.runs = number(&value)?,
            "--operations" => args.operations = Some(number(&value)?),
            "--pause-ms" => args.pause_ms_max = Some(number(&value)?),
            "--jobs" => args.jobs = number(&value)?.clamp(1, 64),
            "--home" => args.options.home = choice()?,
            "--snapshots" => args.options.snapshots = choice()?,
            "--clones" => args.options.clones = choice()?,
            "--locks" => args.options.locks = choice()?,
            "--mute" => args.options.mute = value.split(',').map(number).collect::<Result<_, _>>()?,
            "--shrink" => args.shrinks = choice()?,
            "--marks" => args.marks = choice()?,
            "--log" => (args.options.log, args.log) = (true, Some(value)),
            "--trace" => start_log(&value),
            "--faults" => args.faults = Some(faults(&value)?),
            _ => return Err(format!("{word} is not known")),
        }
    }
    Ok(args)
}

fn faults(names: &str) -> Result<Vec<FaultKind>, String> {
    if names == "none" {
        return Ok(Vec::new());
    }
    let known = || FaultKind::ALL.map(FaultKind::name).join(", ");
    let kind = |name| FaultKind::by_name(name).ok_or_else(|| format!("{name} is no fault: {}", known()));
    names.split(',').map(kind).collect()
}
