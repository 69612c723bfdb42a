//! `weir-bench`: workloads that verify what they read, on any mounted file system; the cost of Weir's parts;
//! and a demonstration. Clusters that it needs run the program `weir`. Only this file reads the environment.
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a program of people: it measures with real clocks, disks and processes"
)]

mod demo;
mod home;
mod meta;
mod relation_load;
mod requests;
mod spinner;
mod stage;
mod workload;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use weir_admin::cluster_args::Presented;
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::process;
use weir_admin::program;
use weir_load::{detector, fsync, mdtest, shared, smallfile, stream};
use workload::{Compare, Printed, compared, one};

#[global_allocator]
static ALLOCATOR: weir_env::real::Allocator = weir_env::real::Allocator;

#[derive(Parser)]
#[command(
    name = "weir-bench",
    version,
    about = "Measure file systems with workloads that verify what they read",
    disable_help_subcommand = true,
    propagate_version = true
)]
struct Cli {
    #[command(flatten)]
    presented: Presented,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compare several directories, in one interleaved run
    Compare(Compare),
    /// Detectors that write frames at their rate, read back and compared
    Detector(Printed<detector::Options>),
    /// A file per worker: write, cold read, warm read
    Stream(Printed<stream::Options>),
    /// Interleaved records of several workers in one file
    Shared(Printed<shared::Options>),
    /// Empty files: create, stat, remove
    Mdtest(Printed<mdtest::Options>),
    /// Small files in one directory
    Smallfile(Printed<smallfile::Options>),
    /// Latency of a small write with fsync
    Fsync(Printed<fsync::Options>),
    /// The metadata role alone, over RPC: creates and stats, many in flight
    Meta(meta::Options),
    /// Cost of single operations: kernel requests, messages, thread changes
    Requests(requests::Options),
    /// A volume with a home: lag, rates, eviction, a mover that is killed
    Home(home::Options),
    /// Take two detectors' data while a storage process is killed, and verify every byte
    Demo(demo::Options),
    /// Runs a part of a workload for another process
    #[command(hide = true)]
    Worker,
}

/// The program of a cluster's processes: the one beside this program, or else the one in `PATH`.
fn weir() -> Outcome<PathBuf> {
    let beside = std::env::current_exe().doing("find this binary")?.with_file_name("weir");
    Ok(if beside.is_file() { beside } else { "weir".into() })
}

fn main() -> ExitCode {
    program::end_quietly_on_a_closed_pipe();
    let is_json = std::env::args_os().any(|word| word == "--json");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return program::wrong_usage(e, is_json),
    };
    let done = cli.presented.present().and_then(|()| {
        process::use_weir(weir()?);
        run(cli.command, std::env::var_os("WEIR_FRAMES").map(Into::into))
    });
    done.unwrap_or_else(|failure| program::failed(&failure, is_json))
}

/// `frames`: a directory of real detector frames.
fn run(command: Command, frames: Option<PathBuf>) -> Outcome<ExitCode> {
    match command {
        Command::Compare(args) => compared(&args),
        Command::Detector(mut args) => {
            args.options.frames = args.options.frames.or(frames);
            one(args, |o| &mut o.common, detector::run)
        }
        Command::Stream(args) => one(args, |o| &mut o.common, stream::run),
        Command::Shared(args) => one(args, |o| &mut o.common, shared::run),
        Command::Mdtest(args) => one(args, |o| &mut o.common, mdtest::run),
        Command::Smallfile(args) => one(args, |o| &mut o.common, smallfile::run),
        Command::Fsync(args) => one(args, |o| &mut o.common, fsync::run),
        Command::Meta(options) => meta::run(&options),
        Command::Requests(options) => requests::run(&options),
        Command::Home(options) => home::run(&options),
        Command::Demo(options) => demo::run(&options, frames),
        Command::Worker => Ok(weir_load::worker_main().map(|()| ExitCode::SUCCESS)?),
    }
}
