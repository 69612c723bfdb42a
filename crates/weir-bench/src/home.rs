//! `weir-bench home`: how fast data is shipped home while it is written, and the cost of that. On a cluster
//! of its own.
//!
//! Each part is a volume with a directory as its home, observed from outside. The raw figure next to the
//! rates is that of one stream that writes and syncs on the home's file system, measured just before; the
//! rate of shipping a full volume is compared with several programs that copy it through the mount.
mod grid;
mod wire;

use crate::relation_load::{self, Live, PART, Plan, Seen, Site};
use crate::stage::{Stage, end_on_signal};
use clap::{Args, ValueEnum};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::args::Up;
use weir_admin::local::local_cluster::{LocalCluster, RoleName};
use weir_admin::local::process::PidFile;
use weir_admin::local::up;
use weir_admin::namespace_client::connect;
use weir_admin::observe;
use weir_admin::sizes::parse_size;
use weir_load::{Better, Report, Row, Spread};
use weir_proto::MIB;

const NAMESPACE: &str = "root";
/// Data that is not at home this long after the last write counts as missing.
const PATIENCE: Duration = Duration::from_secs(300);
const FRAME_BYTES: u64 = 6_250_000;
/// Bytes that a single stream writes to the home's file system for comparison.
const RAW_BYTES: u64 = 256 * MIB;
const RAW_RUNS: usize = 3;
/// Programs that copy a volume by hand, for comparison.
const COPIERS: usize = 4;
/// Files written per second while another volume catches up.
const OTHER_VOLUME_PER_S: f64 = 40.0;
/// A file above this gets a volume of this size: its front is evicted while it is written.
const FILE_LIMIT: u64 = 2048 * MIB;
/// Between two listings.
const LIST_EVERY: Duration = Duration::from_millis(50);
/// Visible data to the size of the cache.
const CACHE_RATIO: f64 = 2.1;

#[derive(Args)]
pub struct Options {
    /// Parts to measure
    #[arg(value_enum, default_values_t = [What::Stream, What::Kill, What::Cache, What::CatchUp])]
    pub what: Vec<What>,
    /// Directory for the cluster and its home [default: a new one in the system's temporary directory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Keep the cluster in memory; home stays on the disk
    #[arg(long)]
    pub memory: bool,
    /// Seconds of each part (a file of a given size takes its own time)
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(4..=3600))]
    pub seconds: u32,
    /// Megabytes written in each second
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub mb_per_s: u32,
    /// `stream`: also single files of these sizes, one after the other
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    pub file_bytes: Vec<u64>,
    /// `grid`: part of the full size of its loads
    #[arg(long, default_value_t = 0.1, value_parser = parse_scale)]
    pub scale: f64,
    /// `grid`: loads to copy home
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = grid::Load::ALL)]
    pub load: Vec<grid::Load>,
    /// `grid`: milliseconds by which the way to home makes a round trip longer
    #[arg(long, value_delimiter = ',', default_values_t = [0.1, 10.0, 100.0], value_parser = parse_delay)]
    pub delay_ms: Vec<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn parse_scale(text: &str) -> Result<f64, String> {
    parse_within(text, 0.0001, 10.0)
}
fn parse_delay(text: &str) -> Result<f64, String> {
    parse_within(text, 0.0, 10_000.0)
}
fn parse_within(text: &str, least: f64, most: f64) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (least..=most).contains(value));
    value.ok_or_else(|| format!("{text:?}: expected a number from {least} to {most}"))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum What {
    /// Frames, then single files: lag, rate at home, jitter, memory of the mover
    Stream,
    /// The mover is killed in the middle of a file
    Kill,
    /// A volume smaller than what is written to it; everything is read back
    Cache,
    /// A volume that is full when it gets its home
    CatchUp,
    /// A home that hangs, and its effect on writes and listings here (not run unless it is named)
    Frozen,
    /// A far home: how near the mover's own pace is to the best of many fixed ones (alone, and not run unless
    /// it is named)
    Grid,
}

/// A cluster with one mover, and its results.
struct Bench<'a> {
    options: &'a Options,
    stage: &'a Stage,
    local: LocalCluster,
    wish: Up,
    raw: Spread,
    rows: Vec<Row>,
    bad: Vec<String>,
}

pub fn run(options: &Options) -> Outcome<ExitCode> {
    if options.what.contains(&What::Grid) && options.what.len() > 1 {
        let error = weir_proto::Error::invalid("`grid` is measured alone");
        return Err(weir_admin::failure::Failure::new(error, "name it in a command of its own"));
    }
    let stage = Stage::prepare(options.dir.as_deref(), "weir-bench-home")?;
    let stage = end_on_signal(stage);
    let measured = match options.what.contains(&What::Grid) {
        true => grid::measure(options, &stage),
        false => measure(options, &stage),
    };
    let ended = stage.end();
    let report = measured?;
    ended?;
    match options.json {
        true => println!("{}", report.json()),
        false => print!("{}", report.table()),
    }
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn measure(options: &Options, stage: &Stage) -> Outcome<Report> {
    fs::create_dir_all(stage.home()).doing("make the directory of homes")?;
    let wish = Up { movers: Some(1), ..stage.cluster(options.memory) };
    let (local, _) = up::bring_up(&wish)?;
    let raw = raw_rate(&stage.home())?;
    let mut bench = Bench { options, stage, local, wish, raw, rows: Vec::new(), bad: Vec::new() };
    for what in &options.what {
        match what {
            What::Stream => bench.stream()?,
            What::Kill => bench.kill()?,
            What::Cache => bench.cache()?,
            What::CatchUp => bench.catch_up()?,
            What::Frozen => bench.frozen()?,
            What::Grid => {} // on clusters of its own
        }
    }
    Ok(bench.report())
}

/// MB/s of writing and syncing a file.
fn raw_rate(dir: &Path) -> Outcome<Spread> {
    let (path, bytes) = (dir.join("raw"), vec![0x5a_u8; PART]);
    let mut rates = Vec::new();
    for _ in 0..RAW_RUNS {
        let begun = Instant::now();
        let mut file = File::create(&path).doing("make a file at home")?;
        for _ in 0..RAW_BYTES / PART as u64 {
            file.write_all(&bytes).doing("write a file at home")?;
        }
        file.sync_all().doing("sync a file at home")?;
        rates.push(RAW_BYTES as f64 / 1e6 / begun.elapsed().as_secs_f64());
        fs::remove_file(&path).doing("remove a file at home")?;
    }
    rates.sort_by(f64::total_cmp);
    Ok(Spread { median: rates[RAW_RUNS / 2], min: rates[0], max: rates[RAW_RUNS - 1] })
}

/// MB/s of a program that copies a volume's files through the mount: the path of a mover, without Weir's part
/// of it. The kernel's cached pages of the files are dropped before.
fn copied_by_hand(from: &Path, to: &Path) -> Outcome<f64> {
    fs::create_dir(to).doing(format_args!("make {}", to.display()))?;
    let entries = fs::read_dir(from).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let files: Vec<PathBuf> =
        entries.doing(format_args!("list {}", from.display()))?.iter().map(fs::DirEntry::path).collect();
    let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    let copy = || -> std::io::Result<()> {
        while let Some(path) = files.get(next.fetch_add(1, Relaxed)) {
            let mut source = File::open(path)?;
            rustix::fs::fadvise(&source, 0, None, rustix::fs::Advice::DontNeed)?;
            let mut copied = File::create(to.join(path.file_name().unwrap_or_default()))?;
            bytes.fetch_add(std::io::copy(&mut source, &mut copied)?, Relaxed);
            copied.sync_all()?;
        }
        Ok(())
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let copiers: Vec<_> = (0..COPIERS).map(|_| scope.spawn(copy)).collect();
        copiers.into_iter().try_for_each(|c| c.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
    })
    .doing(format_args!("copy {} by hand", from.display()))?;
    let rate = bytes.into_inner() as f64 / 1e6 / begun.elapsed().as_secs_f64();
    fs::remove_dir_all(to).doing(format_args!("remove {}", to.display()))?;
    Ok(rate)
}

impl Bench<'_> {
    fn frames(&self) -> Plan {
        let frames_per_s = f64::from(self.options.mb_per_s) * 1e6 / FRAME_BYTES as f64;
        let seconds = f64::from(self.options.seconds);
        Plan { frame_bytes: FRAME_BYTES, frames_per_s, file_bytes_per_s: 0, file_bytes_max: 0, seconds }
    }
    fn file(&self, bytes: u64) -> Plan {
        let file_bytes_per_s = u64::from(self.options.mb_per_s) * 1_000_000;
        Plan {
            frame_bytes: FRAME_BYTES,
            frames_per_s: 0.0,
            file_bytes_per_s,
            file_bytes_max: bytes,
            seconds: f64::INFINITY,
        }
    }

    /// A volume with a home of its own.
    fn volume(&self, name: &str, limit: Option<u64>, with_home: bool) -> Outcome<Site> {
        let home = self.stage.home().join(name);
        let site = self.volume_at(name, limit, with_home.then_some(&home))?;
        Ok(Site { home, ..site })
    }
    fn volume_at(&self, name: &str, limit: Option<u64>, home: Option<&PathBuf>) -> Outcome<Site> {
        observe::block_on(async {
            let client = connect(self.local.coordinators(), NAMESPACE).await?;
            let volume = relation_load::make_volume(&client, name, limit).await?;
            if let Some(home) = home {
                relation_load::add_home(&client, &volume, home).await?;
            }
            Ok(client.shutdown().await?)
        })?;
        Ok(Site { dir: self.stage.mount.join(name), home: home.cloned().unwrap_or_default() })
    }

    fn row(&mut self, name: String, unit: &str, better: Better, value: f64) {
        let baseline = (unit == "MB/s").then_some(self.raw);
        let ratio = baseline.map(|raw| value / raw.median);
        let value = Spread { median: value, min: value, max: value };
        self.rows.push(Row { name, unit: unit.to_owned(), better, value, baseline, ratio });
    }

    fn stream(&mut self) -> Outcome<()> {
        self.streamed("frames", &self.frames(), None)?;
        for bytes in self.options.file_bytes.clone() {
            let name = format!("file-{}mb", bytes / 1_000_000);
            self.streamed(&name, &self.file(bytes), (bytes > FILE_LIMIT).then_some(FILE_LIMIT))?;
        }
        Ok(())
    }

    fn streamed(&mut self, name: &str, plan: &Plan, limit: Option<u64>) -> Outcome<()> {
        let site = self.volume(name, limit, true)?;
        let cpu = Cpu::of(&self.mover()?);
        let (seen, ()) = relation_load::stream(&site, plan, PATIENCE, |_| Ok(()))?;
        let bytes = seen.bytes(plan);
        self.rows_of(name, &seen);
        if let Some(seconds) = cpu.seconds() {
            self.row(
                format!("{name}: CPU of the mover"),
                "s/GB",
                Better::Lower,
                seconds * 1e9 / bytes as f64,
            );
        }
        let memory = resident_bytes(&self.mover()?);
        self.row(format!("{name}: memory of the mover"), "MB", Better::Lower, memory as f64 / 1e6);
        self.end_part(name, &site, plan, &seen, limit.is_some())
    }

    fn rows_of(&mut self, name: &str, seen: &Seen) {
        self.row(format!("{name}: lag p50"), "s", Better::Lower, seen.lag(0.5) / 1e3);
        self.row(format!("{name}: lag p99"), "s", Better::Lower, seen.lag(0.99) / 1e3);
        if let Some(least) = seen.home_rate_min() {
            let name = format!("{name}: bytes at home per written byte, least over 10 s");
            self.row(name, "%", Better::Higher, least * 100.0);
        }
        self.row(format!("{name}: jitter of the rate at home"), "%", Better::Lower, seen.jitter() * 100.0);
        self.row(format!("{name}: longest write"), "ms", Better::Lower, seen.longest_write_ms());
    }

    fn kill(&mut self) -> Outcome<()> {
        let site = self.volume("kill", None, true)?;
        let plan = Plan { seconds: f64::from(self.options.seconds), ..self.file(u64::MAX) };
        let (local, wish, half) = (&self.local, &self.wish, plan.seconds / 2.0);
        let (seen, resumed) = relation_load::stream(&site, &plan, PATIENCE, |live| {
            std::thread::sleep(Duration::from_secs_f64(half));
            relation_load::kill_mover(local, wish, live)
        })?;
        let resumed = resumed.unwrap_or(f64::INFINITY);
        self.row(
            "kill: from the mover's death until the file grows at home".into(),
            "s",
            Better::Lower,
            resumed,
        );
        self.row("kill: lag p99".into(), "s", Better::Lower, seen.lag(0.99) / 1e3);
        self.end_part("kill", &site, &plan, &seen, false)
    }

    fn cache(&mut self) -> Outcome<()> {
        let plan = self.frames();
        let total = (plan.frames_per_s * plan.seconds) as u64 * FRAME_BYTES;
        let site = self.volume("cache", Some((total as f64 / CACHE_RATIO) as u64), true)?;
        let (seen, ()) = relation_load::stream(&site, &plan, PATIENCE, |_| Ok(()))?;
        self.rows_of("cache", &seen);
        let reading = Instant::now();
        self.end_part("cache", &site, &plan, &seen, true)?;
        let rate = 2.0 * total as f64 / 1e6 / reading.elapsed().as_secs_f64();
        self.row("cache: read back here and at home".into(), "MB/s", Better::Higher, rate);
        Ok(())
    }

    /// A full volume is shipped as fast as possible, while another program writes to a second one.
    fn catch_up(&mut self) -> Outcome<()> {
        let site = self.volume("catch-up", None, false)?;
        fs::create_dir_all(&site.home).doing("make a home directory")?;
        let plan = self.frames();
        let (mut seen, ()) = relation_load::stream(&site, &plan, Duration::ZERO, |_| Ok(()))?;
        let other_volume = self.volume("beside", None, false)?;
        let quiet = || {
            std::thread::sleep(Duration::from_secs(u64::from(self.options.seconds)));
            Ok(())
        };
        let (before, ()) = write_other_volume(&other_volume, "before", quiet)?;
        let begun = Instant::now();
        let (during, took) = write_other_volume(&other_volume, "during", || {
            observe::block_on(async {
                let client = connect(self.local.coordinators(), NAMESPACE).await?;
                let volume = client.volume("catch-up").await?;
                relation_load::add_home(&client, &volume, &site.home).await?;
                Ok(client.shutdown().await?)
            })?;
            let all_there = || relation_load::at_home(&site, &plan, &seen) == seen.bytes(&plan);
            weir_admin::local::process::wait_until(PATIENCE, all_there);
            Ok(begun.elapsed())
        })?;
        let (after, ()) = write_other_volume(&other_volume, "after", quiet)?;
        seen.complete = relation_load::at_home(&site, &plan, &seen) == seen.bytes(&plan);
        let rate = seen.bytes(&plan) as f64 / 1e6 / took.as_secs_f64();
        self.row("catch-up: rate".into(), "MB/s", Better::Higher, rate);
        let by_hand = copied_by_hand(&site.dir, &self.stage.home().join("by-hand"))?;
        self.row(
            format!("catch-up: copied by hand, {COPIERS} at once, each file synced"),
            "MB/s",
            Better::Higher,
            by_hand,
        );
        self.row("catch-up: rate to that by hand".into(), "x", Better::Higher, rate / by_hand);
        let waited = [&before, &during, &after];
        let p99 = waited.map(|took_ms| relation_load::at_quantile(took_ms, 0.99));
        self.compare("catch-up: write of 1 MiB", "meanwhile", p99);
        self.end_part("catch-up", &site, &plan, &seen, false)
    }

    /// Home is a directory on another cluster's mount; that is stopped, so a program that touches it hangs.
    fn frozen(&mut self) -> Outcome<()> {
        let (dir, mount) = self.stage.second_cluster();
        fs::create_dir_all(&mount).doing("make a second mount point")?;
        let wish = Up { dir, mount: vec![mount.clone()], movers: Some(0), ..self.wish.clone() };
        let (other, _) = up::bring_up(&wish)?;
        let home = mount.join("home");
        let site = self.volume_at("frozen", None, Some(&home))?;
        let plan = self.frames();
        let part = |name: &str| -> Outcome<Site> {
            let site = Site { dir: site.dir.join(name), home: site.home.join(name) };
            fs::create_dir(&site.dir).doing("make a directory in the volume")?;
            Ok(site)
        };
        let (before, hung, after) = (part("before")?, part("hung")?, part("after")?);
        let (well, listed_before) =
            relation_load::stream(&before, &plan, PATIENCE, |live| list_meanwhile(&site.dir, live))?;
        let memory = resident_bytes(&self.mover()?);
        let missing = || weir_proto::Error::not_found("the second cluster's mount does not run");
        let server = other.of_role(RoleName::Mount).next().ok_or_else(missing)?;
        let server = PidFile::read(&other.pid_file(server)).ok_or_else(missing)?;
        server.signal(Signal::STOP)?;
        // Home is not read meanwhile: that would hang, too.
        let unseen = Site { home: self.stage.home().join("nothing"), ..hung.clone() };
        let (mut seen, listed_hung) =
            relation_load::stream(&unseen, &plan, Duration::ZERO, |live| list_meanwhile(&site.dir, live))?;
        let grown = resident_bytes(&self.mover()?);
        server.signal(Signal::CONT)?;
        let woken = Instant::now();
        seen.complete = weir_admin::local::process::wait_until(PATIENCE, || {
            relation_load::at_home(&hung, &plan, &seen) == seen.bytes(&plan)
        });
        let caught_up = woken.elapsed().as_secs_f64();
        // Disks and processes get slower with use, so the reference is measured before and after.
        let (again, listed_after) =
            relation_load::stream(&after, &plan, PATIENCE, |live| list_meanwhile(&site.dir, live))?;
        let waited = [&well.write_ms, &seen.write_ms, &again.write_ms];
        self.compare(
            "frozen: write of a frame",
            "home hangs",
            waited.map(|all| relation_load::at_quantile(all, 0.99)),
        );
        let listed = [&listed_before, &listed_hung, &listed_after];
        self.compare("frozen: ls", "home hangs", listed.map(|all| relation_load::at_quantile(all, 0.99)));
        for (name, unit, value) in [
            ("memory of the mover, before", "MB", memory as f64 / 1e6),
            ("memory of the mover, home hangs", "MB", grown as f64 / 1e6),
            ("from its return until all is at home", "s", caught_up),
        ] {
            self.row(format!("frozen: {name}"), unit, Better::Lower, value);
        }
        for (site, seen) in [(&before, &well), (&after, &again)] {
            self.bad.extend(relation_load::verify(&site.dir, &plan, seen));
        }
        self.end_part("frozen", &hung, &plan, &seen, false)
    }

    /// Latencies (p99, ms) before, during and after an event.
    fn compare(&mut self, what: &str, name: &str, [before, during, after]: [f64; 3]) {
        let to_mean = during * 2.0 / (before + after);
        for (name, unit, value) in [
            ("before", "ms", before),
            (name, "ms", during),
            ("after", "ms", after),
            (&format!("{name}, to the mean of before and after"), "x", to_mean),
        ] {
            self.row(format!("{what}, p99, {name}"), unit, Better::Lower, value);
        }
    }

    /// Compares everything; then the space is free again.
    fn end_part(&mut self, name: &str, site: &Site, plan: &Plan, seen: &Seen, evicts: bool) -> Outcome<()> {
        if !seen.complete {
            self.bad.push(format!("{name}: home does not have everything after {PATIENCE:?}"));
        }
        if evicts {
            let evicted = observe::block_on(async {
                let client = connect(self.local.coordinators(), NAMESPACE).await?;
                let volume = client.volume(name).await?;
                let evicted = relation_load::evicted(&client, volume.id).await?;
                client.shutdown().await?;
                Ok(evicted)
            })?;
            self.row(format!("{name}: evicted"), "MB", Better::Higher, evicted as f64 / 1e6);
        }
        self.bad.extend(relation_load::verify(&site.dir, plan, seen));
        self.bad.extend(relation_load::verify(&site.home, plan, seen));
        relation_load::remove(&site.dir, seen)
    }

    fn mover(&self) -> Outcome<PidFile> {
        let movers = self.local.of_role(RoleName::Mover).next();
        let pid = movers.and_then(|mover| PidFile::read(&self.local.pid_file(mover)));
        Ok(pid.ok_or_else(|| weir_proto::Error::not_found("the mover does not run"))?)
    }

    fn report(self) -> Report {
        let options = serde_json::json!({
            "seconds": self.options.seconds, "mb_per_s": self.options.mb_per_s, "memory": self.options.memory,
            "file_bytes": self.options.file_bytes,
        });
        Report {
            workload: "home".into(),
            options,
            machine: weir_load::machine(),
            file_system: "weir, 6 targets, ec:4+2, 1 mover".into(),
            baseline_file_system: Some("the home directory's own".into()),
            runs: 1,
            rows: self.rows,
            bad: self.bad.len() as u64,
            first_bad: self.bad.first().cloned(),
            notes: vec![
                "lag: from the end of a write (a frame: of its close) until the bytes are seen at home"
                    .into(),
                "jitter: deviation of the rate at home from second to second, of its mean".into(),
                "baseline of rates: one file of 268 MB written and synced in the home directory".into(),
            ],
        }
    }
}

/// Writes 1 MiB files at their rate until `meanwhile` has ended; returns the duration of each, ms, sorted.
fn write_other_volume<T>(
    site: &Site,
    name: &str,
    meanwhile: impl FnOnce() -> Outcome<T>,
) -> Outcome<(Vec<f64>, T)> {
    let site = Site { dir: site.dir.join(name), home: site.home.join(name) };
    fs::create_dir(&site.dir).doing("make a directory in the volume")?;
    let plan = Plan {
        frame_bytes: PART as u64,
        frames_per_s: OTHER_VOLUME_PER_S,
        file_bytes_per_s: 0,
        file_bytes_max: 0,
        seconds: f64::INFINITY,
    };
    let (seen, did) = relation_load::stream(&site, &plan, Duration::ZERO, |live| {
        let did = meanwhile();
        live.stop();
        did
    })?;
    Ok((seen.write_ms, did))
}

/// Lists a directory at intervals while data is written; returns the duration of each, ms, sorted.
fn list_meanwhile(dir: &Path, live: &Live) -> Outcome<Vec<f64>> {
    let mut took_ms = Vec::new();
    while live.is_writing() {
        let begun = Instant::now();
        for entry in fs::read_dir(dir).doing("list the volume")? {
            let entry = entry.doing("list the volume")?;
            entry.metadata().doing("stat a file of the volume")?;
        }
        took_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(LIST_EVERY);
    }
    took_ms.sort_by(f64::total_cmp);
    Ok(took_ms)
}

/// The unit of times in `/proc`, on every platform that Linux runs on today (`USER_HZ`).
const TICKS_PER_S: f64 = 100.0;

/// CPU time of a process, as the kernel accounts it.
struct Cpu {
    pid: PidFile,
    ticks: Option<u64>,
}

impl Cpu {
    fn of(pid: &PidFile) -> Cpu {
        Cpu { pid: pid.clone(), ticks: cpu_ticks(pid) }
    }
    fn seconds(&self) -> Option<f64> {
        let now = cpu_ticks(&self.pid)?;
        Some((now - self.ticks?) as f64 / TICKS_PER_S)
    }
}

fn cpu_ticks(pid: &PidFile) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.pid)).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let kernel: u64 = fields.next()?.parse().ok()?;
    Some(user + kernel)
}

/// The peak memory of a process.
fn resident_bytes(pid: &PidFile) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.pid)).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
