//! `weir-bench requests`: the cost of single operations, counted and not timed, so that the load of the
//! machine does not matter: requests of the kernel to the mount, messages of the mount to the metadata
//! leader, and thread switches in Weir's processes.
//!
//! No server is queried: the mount counts requests and messages, the kernel thread switches. Work that ends
//! after the program's call (the release of a file) is awaited, and counted with the operation.
use crate::spinner::spinner;
use crate::stage::{self, Stage};
use crate::workload::processes_of;
use clap::{Args, ValueHint};
use rustix::fs::{Advice, CWD, Mode, OFlags};
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::args::Up;
use weir_admin::local::process::wait_until;
use weir_admin::local::{local_cluster, up};
use weir_admin::{attribute, table};
use weir_load::{CpuRole, Watched};
use weir_proto::Error;

/// A small file that does not fit inline: that of mdtest-hard.
const SMALL_BYTES: usize = 3901;
const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The interval of checks whether requests still end.
const POLL: Duration = Duration::from_millis(30);
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);
/// How long the idle processes are observed: their thread switches in that time are subtracted.
const IDLE: Duration = Duration::from_secs(1);

#[derive(Args)]
pub struct Options {
    /// A mount of Weir, or a directory in one [default: a new cluster with two mounts, removed at the end]
    #[arg(value_hint = ValueHint::DirPath)]
    pub path: Option<PathBuf>,
    /// That directory in another mount, which creates the files of the cold rows
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "path")]
    pub other: Option<PathBuf>,
    /// Directory of the cluster (`weir up --dir`): also count changes of thread in its processes on this
    /// machine
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "path")]
    pub cluster: Option<PathBuf>,
    /// The new cluster keeps everything in memory
    #[arg(long, conflicts_with = "path")]
    pub memory: bool,
    /// How often each operation is done
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    pub ops: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The cost of one operation, on average.
struct Cost {
    what: &'static str,
    /// Operations, or entries, or MiB.
    of: f64,
    requests: BTreeMap<String, u64>,
    asked: u64,
    switches: Option<f64>,
    /// By the role of the process and the name of the thread, with those of idle processes.
    by_thread: BTreeMap<String, u64>,
}

pub fn run(options: &Options) -> Outcome<ExitCode> {
    let costs = match &options.path {
        Some(path) => {
            let watched = options.cluster.as_deref().map(processes_of).transpose()?;
            count(path, options.other.as_deref(), watched, options.ops)?
        }
        None => on_a_new_cluster(options)?,
    };
    match options.json {
        true => table::json(&as_json(&costs, options.ops)),
        false => print!("{}", as_table(&costs)),
    }
    Ok(ExitCode::SUCCESS)
}

fn on_a_new_cluster(options: &Options) -> Outcome<Vec<Cost>> {
    let stage = stage::end_on_signal(Stage::prepare(None, "weir-requests")?);
    let other = stage.second_cluster().1;
    let wish = Up { mount: vec![stage.mount.clone(), other.clone()], ..stage.cluster(options.memory) };
    let bar = spinner("starting the cluster");
    let brought = up::bring_up(&wish);
    bar.finish_and_clear();
    let costs = brought.and_then(|_| {
        count(&stage.mount, Some(&other), Some(processes_of(&stage.cluster_dir())?), options.ops)
    });
    let ended = stage.end();
    let costs = costs?;
    ended?;
    Ok(costs)
}

/// Directories of one name on both mounts, removed at the end.
struct Scratch {
    here: PathBuf,
    other: Option<PathBuf>,
}

impl Scratch {
    fn new(path: &Path, other: Option<&Path>) -> Outcome<Scratch> {
        let name = format!("weir-requests-{}", std::process::id());
        let here = local_cluster::absolute(path)?.join(&name);
        fs::create_dir(&here).doing(format_args!("make {}", here.display()))?;
        let scratch = Scratch { here, other: other.map(|dir| dir.join(&name)) };
        if let Some(other) = scratch.other.as_ref().filter(|dir| !dir.is_dir()) {
            let error = Error::invalid(format!("{} is missing on the other mount", other.display()));
            return Err(Failure::new(error, "name the same directory of the same file system twice"));
        }
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.here) {
            eprintln!("{} is left: {e}", self.here.display());
        }
    }
}

/// Counters of one mount and of processes.
struct Counter {
    mount: PathBuf,
    watched: Option<Vec<Watched>>,
    /// Thread switches per second without requests.
    idle_per_s: f64,
    /// Requests that this program made to read the counters.
    own_requests: Cell<u64>,
}

#[derive(PartialEq)]
struct Seen {
    requests: BTreeMap<String, u64>,
    asked: u64,
}

impl Counter {
    fn new(mount: PathBuf, watched: Option<Vec<Watched>>) -> Counter {
        let mut counter = Counter { mount, watched, idle_per_s: 0.0, own_requests: Cell::new(0) };
        let begun = Instant::now();
        let before = counter.switches();
        std::thread::sleep(IDLE);
        let idle: u64 = grown(&before, counter.switches()).values().sum();
        counter.idle_per_s = idle as f64 / begun.elapsed().as_secs_f64();
        counter
    }

    fn sample(&self) -> Outcome<Seen> {
        let reply = attribute::ask(&self.mount, attribute::CLIENT)?;
        self.own_requests.set(self.own_requests.get() + 1);
        let requests = serde_json::from_value(reply["requests"].clone());
        let mut requests: BTreeMap<String, u64> =
            requests.map_err(|e| Error::damaged(format!("the mount's count of requests: {e}")))?;
        let own = requests.entry("GETXATTR".into()).or_default();
        *own = own.saturating_sub(self.own_requests.get());
        Ok(Seen { requests, asked: reply["asked"].as_u64().unwrap_or(0) })
    }

    /// Returns when nothing is in flight any more.
    fn settled(&self) -> Outcome<Seen> {
        let mut last = self.sample()?;
        let until = Instant::now() + SETTLE_PATIENCE;
        loop {
            std::thread::sleep(POLL);
            let now = self.sample()?;
            // Messages continue by themselves (keep-alives of the session); requests do not.
            if now.requests == last.requests || Instant::now() > until {
                return Ok(now);
            }
            last = now;
        }
    }

    fn switches(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for (thread, n) in self.watched.iter().flatten().flat_map(switches_of) {
            *all.entry(thread).or_default() += n;
        }
        all
    }

    fn cost(&self, what: &'static str, of: f64, work: impl FnOnce() -> Outcome<()>) -> Outcome<Cost> {
        let before = self.settled()?;
        let (begun, switches) = (Instant::now(), self.switches());
        work().map_err(|e| e.doing(format_args!("count {what}")))?;
        let after = self.settled()?;
        let idle = self.idle_per_s * begun.elapsed().as_secs_f64();
        let by_thread = grown(&switches, self.switches());
        let switches = by_thread.values().sum::<u64>() as f64 - idle;
        Ok(Cost {
            what,
            of,
            requests: grown(&before.requests, after.requests),
            asked: after.asked.saturating_sub(before.asked),
            switches: self.watched.is_some().then_some(switches.max(0.0)),
            by_thread,
        })
    }
}

/// The counts that are higher than before, by how much.
fn grown(before: &BTreeMap<String, u64>, after: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let by = |(kind, n): (String, u64)| {
        let by = n.saturating_sub(before.get(&kind).copied().unwrap_or(0));
        (by > 0).then_some((kind, by))
    };
    after.into_iter().filter_map(by).collect()
}

/// The thread switches of the live threads of a process.
fn switches_of(process: &Watched) -> Vec<(String, u64)> {
    let role = match process.role {
        CpuRole::Client => "client",
        CpuRole::Storage => "storage",
        CpuRole::Names => "names",
    };
    let tasks = fs::read_dir(format!("/proc/{}/task", process.pid)).into_iter().flatten().flatten();
    let of_task = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let value = |line: &str| line.rsplit('\t').next().unwrap_or_default().trim().to_owned();
        let name = status.lines().find(|line| line.starts_with("Name:")).map(value).unwrap_or_default();
        let counts = status.lines().filter(|line| line.contains("voluntary_ctxt_switches"));
        (format!("{role}, {name}"), counts.filter_map(|line| value(line).parse::<u64>().ok()).sum())
    };
    tasks.map(of_task).collect()
}

fn count(path: &Path, other: Option<&Path>, watched: Option<Vec<Watched>>, ops: u32) -> Outcome<Vec<Cost>> {
    attribute::ask(path, attribute::CLIENT)?; // whether it is a mount of Weir
    let scratch = Scratch::new(path, other)?;
    let counter = Counter::new(scratch.here.clone(), watched);
    let bar = spinner("counting");
    let costs = all(&scratch, &counter, u64::from(ops), &|what| bar.set_message(what));
    bar.finish_and_clear();
    costs
}

fn all(scratch: &Scratch, counter: &Counter, n: u64, reported: &dyn Fn(&'static str)) -> Outcome<Vec<Cost>> {
    let mut costs = Costs { counter, reported, all: Vec::new() };
    small_files(&mut costs, &scratch.here, n)?;
    one_file(&mut costs, &scratch.here, n)?;
    if let Some(other) = &scratch.other {
        cold_files(&mut costs, &scratch.here, other, n)?;
        cold_streams(&mut costs, &scratch.here, other, n)?;
    }
    Ok(costs.all)
}

/// The costs counted so far.
struct Costs<'a> {
    counter: &'a Counter,
    reported: &'a dyn Fn(&'static str),
    all: Vec<Cost>,
}

impl Costs<'_> {
    /// Counts the cost of the `of` operations that `work` does.
    fn add(&mut self, what: &'static str, of: u64, work: &dyn Fn() -> Outcome<()>) -> Outcome<()> {
        (self.reported)(what);
        self.all.push(self.counter.cost(what, of as f64, work)?);
        Ok(())
    }
}

fn each(n: u64, one: &dyn Fn(u64) -> Outcome<()>) -> Outcome<()> {
    (0..n).try_for_each(one)
}

fn write_mibs(file: &mut File, mibs: u64) -> Outcome<()> {
    let mib = vec![5; MIB];
    (0..mibs).try_for_each(|_| std::io::Write::write_all(file, &mib)).doing("write a file")
}

/// The size of the files for streams and random pages, in MiB.
fn mibs(n: u64) -> u64 {
    (n / 4).max(8)
}

/// The place of the i-th page of a random order.
fn page_at(i: u64, n: u64) -> u64 {
    (i * 97 % (mibs(n) * (MIB / PAGE) as u64)) * PAGE as u64
}

fn small_files(costs: &mut Costs<'_>, here: &Path, n: u64) -> Outcome<()> {
    let deep = here.join("a/b/c/d");
    fs::create_dir_all(&deep).doing("make directories")?;
    let dir = rustix::fs::openat(CWD, here, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .doing("open the directory")?;
    let create = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    let small = vec![7; SMALL_BYTES];
    costs.add("create + close, relative path", n, &|| {
        each(n, &|i| rustix::fs::openat(&dir, format!("f{i}"), create, mode).map(drop).doing("create a file"))
    })?;
    costs.add("create + close, five deep", n, &|| {
        each(n, &|i| File::create_new(deep.join(format!("f{i}"))).map(drop).doing("create a file"))
    })?;
    costs.add("create + write 3,901 B + close", n, &|| {
        each(n, &|i| fs::write(here.join(format!("s{i}")), &small).doing("write a file"))
    })?;
    costs.add("stat, known, relative path", n, &|| {
        each(n, &|i| {
            let flags = rustix::fs::AtFlags::empty();
            rustix::fs::statat(&dir, format!("f{i}"), flags).map(drop).doing("stat a file")
        })
    })?;
    costs.add("stat, known, five deep", n, &|| {
        each(n, &|i| fs::metadata(deep.join(format!("f{i}"))).map(drop).doing("stat a file"))
    })?;
    costs.add("one path again and again, five deep", n, &|| {
        each(n, &|_| fs::metadata(deep.join("f0")).map(drop).doing("stat a file"))
    })?;
    costs.add("an absent name again and again", n, &|| {
        each(n, &|_| match fs::metadata(deep.join("none")) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.map(drop).doing("stat a file"),
        })
    })?;
    let open = || each(n, &|i| File::open(here.join(format!("s{i}"))).map(drop).doing("open a file"));
    open()?;
    costs.add("open + close, read before", n, &open)?;
    let read = || each(n, &|i| fs::read(here.join(format!("s{i}"))).map(drop).doing("read a file"));
    read()?;
    costs.add("open + read 3,901 B + close, read before", n, &read)?;
    costs.add("rename", n, &|| {
        each(n, &|i| {
            let (from, to) = (here.join(format!("f{i}")), here.join(format!("g{i}")));
            fs::rename(from, to).doing("rename a file")
        })
    })?;
    costs.add("unlink, known", n, &|| {
        each(n, &|i| fs::remove_file(here.join(format!("g{i}"))).doing("remove a file"))
    })?;
    costs.add("mkdir", n, &|| {
        each(n, &|i| fs::create_dir(here.join(format!("d{i}"))).doing("make a directory"))
    })?;
    costs.add("rmdir", n, &|| {
        each(n, &|i| fs::remove_dir(here.join(format!("d{i}"))).doing("remove a directory"))
    })?;
    Ok(())
}

fn one_file(costs: &mut Costs<'_>, here: &Path, n: u64) -> Outcome<()> {
    let big = here.join("big");
    costs.add("stream write, per MiB", mibs(n), &|| {
        write_mibs(&mut File::create(&big).doing("create a file")?, mibs(n))
    })?;
    let page = vec![9; PAGE];
    let file = OpenOptions::new().write(true).open(&big).doing("open a file")?;
    costs.add("pwrite 4 KiB", n, &|| {
        each(n, &|i| file.write_all_at(&page, page_at(i, n)).doing("write a file"))
    })?;
    costs.add("pwrite 4 KiB + fdatasync", n, &|| {
        each(n, &|i| {
            file.write_all_at(&page, page_at(i, n)).doing("write a file")?;
            file.sync_data().doing("sync a file")
        })
    })?;
    Ok(())
}

/// Files that another mount has created.
fn cold_files(costs: &mut Costs<'_>, here: &Path, other: &Path, n: u64) -> Outcome<()> {
    let (cold, small) = (other.join("cold"), vec![7; SMALL_BYTES]);
    fs::create_dir(&cold).doing("make a directory")?;
    (0..n).try_for_each(|i| fs::write(cold.join(format!("c{i}")), &small)).doing("write files")?;
    let cold = here.join("cold");
    let list = || {
        let done = Command::new("ls").arg("-l").arg(&cold).stdout(Stdio::null()).status().doing("run ls")?;
        match done.success() {
            true => Ok(()),
            false => Err(Error::io(format!("`ls -l {}` ended with {done}", cold.display())).into()),
        }
    };
    let half = n / 2;
    let some = |range: std::ops::Range<u64>, one: &dyn Fn(&Path) -> std::io::Result<()>| {
        range.map(|i| cold.join(format!("c{i}"))).try_for_each(|path| one(&path)).doing("use a file")
    };
    costs.add("stat, cold", half, &|| some(0..half, &|path| fs::metadata(path).map(drop)))?;
    costs.add("open + read 3,901 B + close, cold", half, &|| {
        some(half..2 * half, &|path| fs::read(path).map(drop))
    })?;
    costs.add("`ls -l`, first, per entry", n, &list)?;
    costs.add("`ls -l`, at once again, per entry", n, &list)?;
    // The entries that the kernel keeps for a moment have expired.
    wait_until(weir_client::NAME_LOAN * 2, || false);
    costs.add("`ls -l`, later, per entry", n, &list)?;
    let gone = other.join("gone");
    fs::create_dir(&gone).doing("make a directory")?;
    (0..n).try_for_each(|i| File::create(gone.join(format!("c{i}"))).map(drop)).doing("create files")?;
    costs.add("unlink, cold", n, &|| {
        each(n, &|i| fs::remove_file(here.join(format!("gone/c{i}"))).doing("remove a file"))
    })
}

/// Long files that another mount has written.
fn cold_streams(costs: &mut Costs<'_>, here: &Path, other: &Path, n: u64) -> Outcome<()> {
    for name in ["big", "next"] {
        let mut file = File::create(other.join("cold").join(name)).doing("create a file")?;
        write_mibs(&mut file, mibs(n))?;
        file.sync_all().doing("sync a file")?;
    }
    let cold = here.join("cold");
    let file = File::open(cold.join("big")).doing("open a file")?;
    costs.add("pread 4 KiB at random, cold", n, &|| {
        let mut buffer = vec![0; PAGE];
        rustix::fs::fadvise(&file, 0, None, Advice::Random).doing("read a file")?;
        (0..n).try_for_each(|i| file.read_exact_at(&mut buffer, page_at(i, n))).doing("read a file")
    })?;
    drop(file);
    costs.add("stream read, cold, per MiB", mibs(n), &|| {
        let (mut file, mut buffer) = (File::open(cold.join("next")).doing("open a file")?, vec![0; MIB]);
        (0..mibs(n)).try_for_each(|_| std::io::Read::read_exact(&mut file, &mut buffer)).doing("read a file")
    })
}

fn as_table(costs: &[Cost]) -> String {
    let each = |n: f64| if n >= 99.5 { format!("{n:.0}") } else { format!("{n:.2}") };
    let row = |cost: &Cost| {
        let total: u64 = cost.requests.values().sum();
        let kinds = cost.requests.iter().filter(|(_, n)| **n as f64 >= 0.05 * cost.of);
        let kinds: Vec<String> =
            kinds.map(|(kind, n)| format!("{:.1} {kind}", *n as f64 / cost.of)).collect();
        vec![
            cost.what.to_string(),
            each(total as f64 / cost.of),
            each(cost.asked as f64 / cost.of),
            cost.switches.map_or("-".into(), |n| each(n / cost.of)),
            kinds.join(", "),
        ]
    };
    let rows: Vec<Vec<String>> = costs.iter().map(row).collect();
    table::render(&["OPERATION", "REQUESTS", "MESSAGES", "SWITCHES", "OF THE REQUESTS"], &rows)
}

fn as_json(costs: &[Cost], ops: u32) -> Value {
    let row = |cost: &Cost| {
        let each = |n: u64| n as f64 / cost.of;
        let kinds: BTreeMap<&str, f64> = cost.requests.iter().map(|(k, n)| (&k[..], each(*n))).collect();
        let by_thread: BTreeMap<&str, f64> = cost.by_thread.iter().map(|(k, n)| (&k[..], each(*n))).collect();
        json!({
            "operation": cost.what, "requests": each(cost.requests.values().sum()), "by_kind": kinds,
            "messages": each(cost.asked), "switches": cost.switches.map(|n| n / cost.of),
            "switches_by_thread": by_thread,
        })
    };
    json!({ "ops": ops, "rows": costs.iter().map(row).collect::<Vec<_>>() })
}
