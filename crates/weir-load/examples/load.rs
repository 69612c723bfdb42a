//! The workloads by themselves, on any directory: `cargo run --release -p weir-load --example load -- stream
//! DIR`.
// Outermost shell of its own: processes are started with it as their worker.

use clap::Parser;
use weir_load::{detector, fsync, mdtest, shared, smallfile, stream};

#[derive(Parser)]
struct Load {
    #[command(subcommand)]
    workload: Workload,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Workload {
    Detector(detector::Options),
    Stream(stream::Options),
    Shared(shared::Options),
    Mdtest(mdtest::Options),
    Smallfile(smallfile::Options),
    Fsync(fsync::Options),
    #[command(hide = true)]
    Worker,
}

fn main() {
    let mut load = Load::parse();
    let command =
        vec![std::env::current_exe().expect("own path").to_string_lossy().into_owned(), "worker".into()];
    let report = match &mut load.workload {
        Workload::Worker => {
            return weir_load::worker_main().unwrap_or_else(|e| {
                eprintln!("error: {e}");
                std::process::exit(1)
            });
        }
        Workload::Detector(o) => (o.common.worker_command = command, detector::run(o)).1,
        Workload::Stream(o) => (o.common.worker_command = command, stream::run(o)).1,
        Workload::Shared(o) => (o.common.worker_command = command, shared::run(o)).1,
        Workload::Mdtest(o) => (o.common.worker_command = command, mdtest::run(o)).1,
        Workload::Smallfile(o) => (o.common.worker_command = command, smallfile::run(o)).1,
        Workload::Fsync(o) => (o.common.worker_command = command, fsync::run(o)).1,
    };
    match report {
        Ok(report) => {
            print!("{}", if load.json { report.json() + "\n" } else { report.table() });
            std::process::exit(i32::from(!report.is_good()));
        }
        Err(e) => {
            eprintln!("error: {e}");
            std::process::exit(i32::from(e.kind.exit_code()));
        }
    }
}
