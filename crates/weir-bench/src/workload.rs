//! The workloads of `weir-load` on any mounted file system, alone or several in turns, and their clean-up.
use crate::spinner::spinner;
use clap::Args;
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::local_cluster::{LocalCluster, Process, RoleName};
use weir_admin::local::process::PidFile;
use weir_admin::observe;
use weir_load::{Common, CpuRole, Report, Watched, compare};

/// Exit code when everything ran but bytes were wrong: "the answer is no".
const WRONG: u8 = 1;
/// The exit status that a shell shows for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;
/// Attempts to remove a directory in which workers still make files.
const REMOVALS: usize = 10;

/// A workload with the choice of how its result is printed.
#[derive(Args)]
pub struct Printed<O: Args> {
    #[command(flatten)]
    pub options: O,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Directory of the cluster (`weir up --dir`) that is measured: also show where its processes spend CPU
    /// time
    #[arg(long, value_name = "DIR")]
    pub cluster: Option<PathBuf>,
}

/// What is compared, with the choice of how it is printed.
#[derive(Args)]
pub struct Compare {
    #[command(flatten)]
    pub options: compare::Options,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs it on this machine.
pub fn one<O: Args>(
    mut args: Printed<O>,
    common: impl Fn(&mut O) -> &mut Common,
    workload: impl Fn(&O) -> weir_proto::Result<Report>,
) -> Outcome<ExitCode> {
    common(&mut args.options).worker_command = worker_command()?;
    if let Some(dir) = &args.cluster {
        common(&mut args.options).watched = processes_of(dir)?;
    }
    let is_stopped = clean_up_on_signal(common(&mut args.options));
    let bar = spinner("measuring");
    let report = workload(&args.options);
    bar.finish_and_clear();
    // It fails when its files go. The thread that removes them ends the program.
    while is_stopped.load(Ordering::Relaxed) {
        std::thread::park();
    }
    let report = report?;
    match args.json {
        true => println!("{}", report.json()),
        false => print!("{}", report.table()),
    }
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::from(WRONG) })
}

pub fn compared(args: &Compare) -> Outcome<ExitCode> {
    let stop = stop_on_signal();
    let bar = spinner("comparing");
    let compared = compare::run(&args.options, &stop, &Shown(bar.clone()));
    bar.finish_and_clear();
    if stop.is_set() {
        eprintln!("stopped");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    let compared = compared?;
    match args.json {
        true => println!("{}", compared.json()),
        false => print!("{}", compared.table()),
    }
    Ok(if compared.is_good() { ExitCode::SUCCESS } else { ExitCode::from(WRONG) })
}

/// The progress of a comparison, on standard error.
struct Shown(ProgressBar);

impl compare::Watcher for Shown {
    fn step(&self, round: u16, rounds: u16, row: &str, dir: &Path) {
        self.0.set_message(format!("round {} of {rounds}: {row} on {}", round + 1, dir.display()));
    }
}

/// SIGINT and SIGTERM end a workload and remove its files. True from then on.
fn clean_up_on_signal(common: &Common) -> Arc<AtomicBool> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    if common.keep {
        return is_stopped;
    }
    let of_thread = is_stopped.clone();
    let dirs: Vec<PathBuf> = common.dirs.iter().take(1).chain(&common.baseline).cloned().collect();
    on_signal("weir-load", move || {
        of_thread.store(true, Ordering::Relaxed);
        let dirs = dirs.clone();
        std::thread::spawn(move || {
            dirs.iter().for_each(|dir| remove_made(dir));
            std::process::exit(i32::from(INTERRUPTED));
        });
    });
    is_stopped
}

fn remove_made(dir: &Path) {
    let of_process = format!("weir-load-{}-", std::process::id());
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_own = entry.file_name().to_string_lossy().starts_with(&of_process);
        if is_own && (0..REMOVALS).all(|_| std::fs::remove_dir_all(&path).is_err()) {
            eprintln!("{} is left", path.display());
        }
    }
}

/// SIGINT and SIGTERM end a comparison, which then cleans up.
fn stop_on_signal() -> Arc<compare::Stop> {
    let stop = Arc::new(compare::Stop::default());
    let of_thread = stop.clone();
    on_signal("weir-compare", move || of_thread.set());
    stop
}

/// Calls `first` at the first signal, from a thread. The second one ends the program at once: a file system
/// may hang.
fn on_signal(made: &'static str, first: impl Fn() + Send + 'static) {
    std::thread::spawn(move || {
        let waited = observe::block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let mut int = signal(SignalKind::interrupt()).doing("listen for SIGINT")?;
            let mut term = signal(SignalKind::terminate()).doing("listen for SIGTERM")?;
            for again in [false, true] {
                tokio::select! {
                    biased;
                    _ = int.recv() => {}
                    _ = term.recv() => {}
                }
                if again {
                    break;
                }
                eprintln!("\nstopping, and removing what was made (once more: at once)");
                first();
            }
            Ok(())
        });
        if waited.is_ok() {
            eprintln!("\nended at once: directories {made}-{}-* may be left", std::process::id());
            std::process::exit(i32::from(INTERRUPTED));
        }
    });
}

/// The processes of a cluster that run on this machine.
pub fn processes_of(dir: &Path) -> Outcome<Vec<Watched>> {
    let local = LocalCluster::open(dir)?;
    let watched = |p: &Process| {
        let running = PidFile::read(&local.pid_file(p)).filter(PidFile::alive)?;
        let role = match p.role {
            RoleName::Mount | RoleName::Mover | RoleName::Console => CpuRole::Client,
            RoleName::Storage => CpuRole::Storage,
            RoleName::Meta | RoleName::Coord | RoleName::Etcd => CpuRole::Names,
        };
        Some(Watched { role, pid: running.pid })
    };
    Ok(local.manifest.processes.iter().filter_map(watched).collect())
}

fn worker_command() -> Outcome<Vec<String>> {
    let binary = std::env::current_exe().doing("find this binary")?;
    Ok(vec![binary.display().to_string(), "worker".into()])
}
