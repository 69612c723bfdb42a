//! `weir-bench demo`: the main job, from an empty directory to an empty directory. Detectors write at their
//! rate, a storage process is killed at half time, everything is read back and compared; then a volume
//! streams home (`home.rs`); and the directory is as it was before.
//!
//! The rate is measured first, so that this machine can sustain it. Delays are reported; the demo fails only
//! for wrong or missing bytes.
mod home;

use crate::spinner::spinner;
use crate::stage::{Stage, end_on_signal};
use clap::{Args, ValueHint};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::args::Up;
use weir_admin::local::local_cluster::{LocalCluster, RoleName};
use weir_admin::local::process::PidFile;
use weir_admin::local::up;
use weir_admin::{attribute, observe, table};
use weir_diagnose::Health;
use weir_load::{Report, detector};
use weir_proto::Error;
use weir_proto::coord::ClusterStatus;
use weir_proto::map::TargetState;

/// The storage process that is killed.
const VICTIM: &str = "storage-3";
/// The interval of checks whether the cluster has noticed it.
const POLL: Duration = Duration::from_millis(2);
const NOTICE_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Args)]
pub struct Options {
    /// Directory for the cluster, its targets and its mount [default: a new one in the system's temporary
    /// directory]
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// How long the detectors run, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=3600))]
    pub seconds: u32,
    /// Frames per second of each detector [default: well below what this machine can do, at most 25]
    #[arg(long)]
    pub hz: Option<f64>,
    /// Detectors
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub detectors: u32,
    /// Keep the cluster in memory instead of on the disk
    #[arg(long)]
    pub memory: bool,
    /// Directory of real frames (*.cbf, *.cbf.bz2) [default: WEIR_FRAMES, else synthesized]
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub frames: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What happened to the storage process.
struct Kill {
    at_s: f64,
    noticed_ms: Option<f64>,
}

pub fn run(args: &Options, frames: Option<PathBuf>) -> Outcome<ExitCode> {
    let stage = end_on_signal(Stage::prepare(args.dir.as_deref(), "weir-demo")?);
    let result = play(args, frames, &stage);
    let cleaned = stage.end();
    let code = result?;
    cleaned?;
    Ok(code)
}

fn print_verdict(good: bool, wrong: &[String], late: &[String]) {
    wrong.iter().for_each(|what| println!("WRONG: {what}"));
    late.iter().for_each(|what| println!("late: {what}"));
    let verdict = match (good, late.is_empty()) {
        (true, true) => "nothing was late, missing or wrong",
        (true, false) => "nothing is missing or wrong; late frames are named above: is the machine busy?",
        (false, _) => "NOT GOOD: bytes are missing or wrong, see above",
    };
    println!("\n{verdict}");
}

fn play(args: &Options, frames: Option<PathBuf>, stage: &Arc<Stage>) -> Outcome<ExitCode> {
    let quiet = args.json;
    let say = |text: String| {
        if !quiet {
            println!("{text}");
        }
    };
    let begun = Instant::now();
    let wish = Up { movers: Some(1), ..stage.cluster(args.memory) };
    let bar = spinner("starting the cluster");
    let (local, _) = up::bring_up(&wish)?;
    bar.finish_and_clear();
    say(format!(
        "cluster: 1 coordinator, 1 meta, 6 storage processes with ec:4+2, 1 mover, 1 mount at {} ({:.1} s)",
        stage.mount.display(),
        begun.elapsed().as_secs_f64()
    ));

    let mut options = detector::Options::at(&stage.mount);
    options.detectors = args.detectors as u16;
    options.duration = f64::from(args.seconds);
    options.frames = args.frames.clone().or(frames);
    let bar = spinner("measuring what this machine can do");
    let pace = measure(&options)?;
    bar.finish_and_clear();
    say(format!(
        "this machine writes {:.0} MB/s ({:.0} frames a second) through the mount; the demo needs a part of that",
        pace.bytes_per_s / 1e6,
        pace.frames_per_s
    ));
    options.hz = args.hz.unwrap_or_else(|| detector_hz(pace.frames_per_s, args.detectors));
    options.common.keep = true;
    say(format!(
        "detectors: {} × {} Hz × {} for {} s; {VICTIM} is killed at half time",
        args.detectors,
        options.hz,
        match &options.frames {
            Some(dir) => format!("real frames of {}", dir.display()),
            None => "6.25 MB".to_string(),
        },
        args.seconds
    ));
    let (report, kill) = measure_loss(args, options, &local, quiet)?;
    let status = ask(&local)?;
    let client = attribute::ask(&stage.mount, attribute::CLIENT)?;
    if !quiet {
        print!("\n{}", as_text(&report, &kill, &status, &client));
    }
    remove_frames(stage)?;
    up::bring_up(&wish)?; // the storage process that was killed
    say("\na volume with a home: frames and one growing file stream there; its mover is killed in mid-file"
        .to_string());
    let bar = spinner("streaming home");
    let plan = home::plan(pace.bytes_per_s);
    let shown = home::play(&local, &stage.mount, &stage.home(), &wish, &plan, &bar)?;
    bar.finish_and_clear();
    let wrong = shown.missing();
    let good = is_good(&report) && wrong.is_empty();
    let late: Vec<String> = lateness(&report, &kill).into_iter().chain(shown.lateness()).collect();
    if quiet {
        let mut value = as_json(&report, &kill, &status, &client, good);
        (value["late"], value["home"]) = (json!(late), shown.json());
        table::json(&value);
    } else {
        print!("{}", table::render(&["", ""], &shown.rows()).trim_start_matches('\n'));
        print_verdict(good, &wrong, &late);
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The measured rate of this machine, all detectors together.
struct Pace {
    frames_per_s: f64,
    bytes_per_s: f64,
}

/// Frames of each detector for the measurement.
const MEASURED_FRAMES: u64 = 8;

/// As fast as possible, for a moment.
fn measure(options: &detector::Options) -> Outcome<Pace> {
    let options = detector::Options { hz: 0.0, frames_max: Some(MEASURED_FRAMES), ..options.clone() };
    let report = detector::run(&options)?;
    let mean = |name: &str| report.row(name).map_or(0.0, |row| row.value.median);
    Ok(Pace { frames_per_s: mean("frames"), bytes_per_s: mean("payload") * 1e6 })
}

/// Frames per second of each detector. A third of the machine's rate: it has to be sustained while a storage
/// process is dead and others use the machine, too. At most the rate of a fast detector, and never so low
/// that no frame is in flight at the kill.
fn detector_hz(frames_per_s: f64, detectors: u32) -> f64 {
    let third = frames_per_s / f64::from(detectors.max(1)) / 3.0;
    third.floor().clamp(HZ_MIN, HZ_MAX)
}
const HZ_MIN: f64 = 1.0;
const HZ_MAX: f64 = 25.0;

/// Steps that took too long, as text.
fn lateness(report: &Report, kill: &Kill) -> Vec<String> {
    let mut late = Vec::new();
    let frames = report.row("late frames").map_or(0.0, |row| row.value.max);
    if frames > 0.0 {
        late.push(format!("{frames} frames ended more than 10 frame periods after they were due"));
    }
    if kill.noticed_ms.is_none() {
        late.push(format!("the coordinator did not notice the death of {VICTIM} within {NOTICE_PATIENCE:?}"));
    }
    late
}

/// They are read and compared: their space is for the next act.
fn remove_frames(stage: &Stage) -> Outcome<()> {
    for entry in fs::read_dir(&stage.mount).doing("list the detectors' directories")? {
        let path = entry.doing("list the detectors' directories")?.path();
        fs::remove_dir_all(&path).doing(format_args!("remove {}", path.display()))?;
    }
    Ok(())
}

/// Runs the detectors, with the kill at half time.
fn measure_loss(
    args: &Options,
    options: detector::Options,
    local: &LocalCluster,
    quiet: bool,
) -> Outcome<(Report, Kill)> {
    let watch: Arc<detector::Watch> = Arc::default();
    // The time until the last frame is due: before that nothing has ended.
    let frames = (options.hz * f64::from(args.seconds)).ceil();
    let half = Duration::from_secs_f64(((frames - 1.0) / options.hz / 2.0).max(0.0));
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            let report = detector::run_watched(&options, &watch);
            running.store(false, Ordering::Release);
            report
        });
        let bar = progress(quiet);
        let mut begun = None;
        let mut kill = None;
        while running.load(Ordering::Acquire) {
            let p = watch.progress();
            bar.set_length(p.frames_total);
            bar.set_position(p.frames_done);
            bar.set_message(format!("{} late, {} failed", p.late, p.failed));
            // Frames are loaded first: the clock starts with the first one written.
            if p.frames_done > 0 && begun.is_none() {
                begun = Some(Instant::now());
            }
            match begun {
                Some(at) if kill.is_none() && at.elapsed() >= half => {
                    kill = Some(kill_one(local, at.elapsed().as_secs_f64())?);
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        bar.finish_and_clear();
        let report = work.join().map_err(|_| Error::io("the detectors' thread panicked"))??;
        let kill =
            kill.ok_or_else(|| Error::io("the detectors ended before half time: nothing was killed"))?;
        Ok((report, kill))
    })
}

fn progress(quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} frames, {msg} {elapsed}");
    bar.set_style(style.expect("a valid template"));
    bar
}

/// SIGKILL, and how long the coordinator took to notice.
fn kill_one(local: &LocalCluster, at_s: f64) -> Outcome<Kill> {
    let missing = || Error::not_found(format!("{VICTIM} does not run"));
    let process = local.of_role(RoleName::Storage).find(|p| p.name == VICTIM).ok_or_else(missing)?;
    let pid = PidFile::read(&local.pid_file(process)).ok_or_else(missing)?;
    let noticed_ms = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &local.coordinators(), "weir-bench demo").await?;
        let begun = Instant::now();
        pid.signal(Signal::KILL)?;
        let is_down = |t: &weir_proto::map::Target| t.state != TargetState::Up;
        while begun.elapsed() < NOTICE_PATIENCE {
            if cluster.map().targets.iter().any(is_down) {
                return Ok(Some(begun.elapsed().as_secs_f64() * 1e3));
            }
            env.clock.sleep(POLL).await;
        }
        Ok(None)
    })?;
    Ok(Kill { at_s, noticed_ms })
}

fn ask(local: &LocalCluster) -> Outcome<ClusterStatus> {
    observe::block_on(async {
        let env = weir_env::real::env();
        Ok(observe::observe(&env, &local.coordinators(), "weir-bench demo").await?.status().await?)
    })
}

fn is_good(report: &Report) -> bool {
    let none = |name: &str| report.row(name).is_some_and(|r| r.value.max == 0.0);
    report.is_good() && none("failed frames") && none("bad frames")
}

fn number(client: &Value, key: &str) -> f64 {
    client.get(key).and_then(Value::as_f64).unwrap_or(0.0)
}

fn as_text(report: &Report, kill: &Kill, status: &ClusterStatus, client: &Value) -> String {
    let noticed = kill.noticed_ms.map_or("not noticed".to_string(), |ms| format!("noticed after {ms:.0} ms"));
    let health = Health::of(status);
    let wire = number(client, "wire_sent_bytes") / number(client, "written_bytes").max(1.0);
    let rows = vec![
        vec!["killed".into(), format!("{VICTIM} at {:.1} s, {noticed}", kill.at_s)],
        vec!["written with less redundancy".into(), format!("{} stripes", number(client, "degraded_writes"))],
        vec![
            "lacking redundancy now".into(),
            format!("{} cells (repaired when it returns)", health.under_replicated_cells),
        ],
        vec!["decoded from parity".into(), format!("{} reads", number(client, "degraded_reads"))],
        vec!["checksum failures".into(), format!("{}", number(client, "crc_failures"))],
        vec!["wire bytes per payload byte".into(), format!("{wire:.3}")],
        vec!["client memory at most".into(), table::bytes(number(client, "memory_peak_bytes") as u64)],
    ];
    format!("{}\n{}", report.table(), table::render(&["", ""], &rows).trim_start_matches('\n'))
}

fn as_json(report: &Report, kill: &Kill, status: &ClusterStatus, client: &Value, good: bool) -> Value {
    json!({
        "good": good, "detector": serde_json::to_value(report).unwrap_or(Value::Null),
        "killed": { "process": VICTIM, "at_s": kill.at_s, "noticed_ms": kill.noticed_ms },
        "health": Health::of(status), "client": client,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detectors_get_a_rate_that_the_machine_can_hold() {
        // Measured frames per second, detectors, and the rate chosen for each of them.
        for (measured, detectors, hz) in [
            (400.0, 2, 25.0), // at most the rate of a fast one
            (90.0, 2, 15.0),
            (12.0, 2, 2.0),
            (5.0, 2, 1.0), // late frames are reported
            (0.0, 2, 1.0),
            (90.0, 16, 1.0),
        ] {
            assert_eq!(detector_hz(measured, detectors), hz, "{measured} for {detectors}");
        }
    }
}
