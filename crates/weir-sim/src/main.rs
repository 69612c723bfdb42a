//! `cargo run -p weir-sim -- --seed 7 [--runs 1] [--operations 60] [--faults kill-meta,slow-disk | none] [--log FILE]`:
//! repeats a run of the simulated cluster, or tries many.
#![allow(clippy::disallowed_types, reason = "the command writes its trace on the real machine")]
use std::{fs::File, io::Write, process::ExitCode};
use weir_sim::{FaultKind, Options, run};

const USAGE: &str = "usage: weir-sim [--seed N] [--runs N] [--operations N] [--faults none|NAME,NAME…] [--log FILE] [--trace FILTER]";

struct Args {
    seed: u64,
    runs: u64,
    options: Options,
    log: Option<String>,
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(e) => {
            eprintln!("error: {e}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut broken = 0;
    for seed in args.seed..args.seed + args.runs {
        match run(seed, &args.options) {
            Ok(outcome) => println!("seed {seed}: {outcome:?}"),
            Err(e) => {
                broken += 1;
                println!("seed {seed} BROKEN: {e}");
                if let Some(path) = &args.log {
                    write_log(path, &e.log);
                }
            }
        }
    }
    println!("{} runs, {broken} broken", args.runs);
    ExitCode::from(u8::from(broken > 0))
}

/// What the roles log, as `RUST_LOG` would filter it.
fn start_log(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    tracing_subscriber::fmt().with_env_filter(filter).without_time().with_writer(std::io::stderr).init();
}

#[allow(clippy::disallowed_types)] // a tool's own output
fn write_log(path: &str, lines: &[String]) {
    let written =
        File::create(path).and_then(|mut file| lines.iter().try_for_each(|line| writeln!(file, "{line}")));
    if let Err(e) = written {
        eprintln!("error: write {path}: {e}");
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { seed: 0, runs: 1, options: Options::default(), log: None };
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} wants a value"))?;
        let number = || value.parse::<u64>().map_err(|e| format!("{word} {value}: {e}"));
        match word.as_str() {
            "--seed" => args.seed = number()?,
            "--runs" => args.runs = number()?,
            "--operations" => args.options.operations = number()?,
            "--log" => (args.options.log, args.log) = (true, Some(value)),
            "--trace" => start_log(&value),
            "--faults" => args.options.faults = faults(&value)?,
            _ => return Err(format!("{word} is not known")),
        }
    }
    Ok(args)
}

fn faults(names: &str) -> Result<Vec<FaultKind>, String> {
    if names == "none" {
        return Ok(Vec::new());
    }
    let kind = |name: &str| {
        let known = || FaultKind::ALL.map(FaultKind::name).join(", ");
        FaultKind::ALL
            .into_iter()
            .find(|k| k.name() == name)
            .ok_or_else(|| format!("{name} is no fault: {}", known()))
    };
    names.split(',').map(kind).collect()
}
