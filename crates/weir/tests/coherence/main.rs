//! Claim: programs on different mounts see one file system. What four mounts do at the same time is
//! linearizable, and a git repository is used from two mounts in turn.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
#[path = "../common/mod.rs"]
mod common;
mod history;
mod mapped;
mod programs;
mod shared;

use common::{Cluster, can_mount};
use history::{
    Counter, Event, Log, LogOp, Name, NameOp, Object, Pair, PairOp, Register, RegisterOp, digest,
    linearizable,
};
use rustix::fs::{CWD, FlockOperation, RenameFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MOUNTS: usize = 4;
const OBJECTS: u64 = 6;
/// Operations of each mount in the short run, on all objects together.
const STEPS: u64 = 400;
/// In the long run: some 10,000 operations a history.
const STEPS_LONG: u64 = 15_000;
/// Pause between two faults of the long run.
const FAULT_PAUSE: Duration = Duration::from_secs(7);
const RECORD_BYTES: usize = 8;

/// The files of one run, through one mount.
struct Files {
    dir: PathBuf,
    /// Opened while every other mount had it open, too.
    held: File,
    counter: File,
}

/// One mount's observations of each object.
#[derive(Default)]
struct Seen {
    opened: Vec<Event<RegisterOp>>,
    held: Vec<Event<RegisterOp>>,
    log: Vec<Event<LogOp>>,
    name: Vec<Event<NameOp>>,
    pair: Vec<Event<PairOp>>,
    counter: Vec<Event<u64>>,
}

/// Small and seeded.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn make_files(cluster: &Cluster, run: u64) -> Vec<Files> {
    let name = format!("run{run}");
    let first = cluster.mount().join(&name);
    fs::create_dir(&first).unwrap();
    for (name, bytes) in
        [("opened", "0"), ("held", "0"), ("counter", "0"), ("log", ""), ("a", "first"), ("b", "second")]
    {
        let padded = if bytes == "0" { number(0) } else { bytes.as_bytes().to_vec() };
        fs::write(first.join(name), padded).unwrap();
    }
    let dirs: Vec<PathBuf> = cluster.mounts.iter().map(|m| m.join(&name)).collect();
    let _shared: Vec<File> = dirs.iter().map(|dir| open(&dir.join("held"))).collect();
    let files =
        |dir: PathBuf| Files { held: open(&dir.join("held")), counter: open(&dir.join("counter")), dir };
    dirs.into_iter().map(files).collect()
}

/// A number of always the same length.
fn number(n: u64) -> Vec<u8> {
    format!("{n:020}").into_bytes()
}

fn read_number(file: &File) -> u64 {
    let mut bytes = [0; 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    std::str::from_utf8(&bytes).unwrap().parse().unwrap()
}

fn timed<Op>(begun: Instant, work: impl FnOnce() -> Op) -> Event<Op> {
    let now = || begun.elapsed().as_nanos() as u64;
    let called_ns = now();
    let op = work();
    Event { called_ns, returned_ns: now(), op }
}

/// One mount's part of a run.
fn work(files: &Files, mount: u64, run: u64, steps: u64, begun: Instant) -> Seen {
    let mut dice = Dice(run * 31 + mount);
    let mut seen = Seen::default();
    for step in 1..=steps {
        let (value, choice) = (mount << 32 | step, dice.below(6));
        match dice.below(OBJECTS) {
            0 => seen.opened.push(timed(begun, || {
                let file = open(&files.dir.join("opened"));
                register(&file, value, choice)
            })),
            1 => seen.held.push(timed(begun, || register(&files.held, value, choice))),
            2 => seen.log.push(timed(begun, || log(&files.dir.join("log"), value, choice))),
            3 => seen.name.push(timed(begun, || name(&files.dir.join("name"), choice))),
            // One mount exchanges: a kernel looks both names up before it asks for the exchange, and if one
            // of another mount falls between, both lead to one file, and it does nothing.
            4 => seen
                .pair
                .push(timed(begun, || pair(&files.dir, if mount == 0 { choice } else { 2 + choice % 4 }))),
            _ => seen.counter.push(timed(begun, || count(&files.counter))),
        }
    }
    seen
}

fn register(file: &File, value: u64, choice: u64) -> RegisterOp {
    if choice < 2 {
        file.write_all_at(&number(value), 0).unwrap();
        RegisterOp::Write(value)
    } else {
        RegisterOp::Read(read_number(file))
    }
}

fn log(path: &Path, value: u64, choice: u64) -> LogOp {
    if choice < 3 {
        let mut file = OpenOptions::new().append(true).open(path).unwrap();
        file.write_all(&value.to_le_bytes()).unwrap();
        return LogOp::Append(value);
    }
    let bytes = fs::read(path).unwrap();
    let (records, rest) = bytes.as_chunks::<RECORD_BYTES>();
    assert!(rest.is_empty(), "half a record: {} bytes", bytes.len());
    let found = records.iter().fold(0, |so_far, record| digest(so_far, u64::from_le_bytes(*record)));
    LogOp::Read(records.len() as u64, found)
}

fn name(path: &Path, choice: u64) -> NameOp {
    let happened = |done: std::io::Result<()>, not: ErrorKind| match done {
        Ok(()) => true,
        Err(e) => {
            assert_eq!(e.kind(), not, "{e}");
            false
        }
    };
    let create = || OpenOptions::new().write(true).create_new(true).open(path).map(drop);
    match choice {
        0 | 1 => NameOp::Create(happened(create(), ErrorKind::AlreadyExists)),
        2 => NameOp::Remove(happened(fs::remove_file(path), ErrorKind::NotFound)),
        _ => NameOp::Stat(happened(fs::metadata(path).map(drop), ErrorKind::NotFound)),
    }
}

fn pair(dir: &Path, choice: u64) -> PairOp {
    let is = |name: &str, bytes: &str| fs::read_to_string(dir.join(name)).unwrap() == bytes;
    match choice {
        0 | 1 => {
            let (a, b) = (dir.join("a"), dir.join("b"));
            rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).unwrap();
            PairOp::Swap
        }
        2 | 3 => PairOp::ReadFirst(is("a", "second")),
        _ => PairOp::ReadSecond(is("b", "first")),
    }
}

fn count(file: &File) -> u64 {
    rustix::fs::flock(file, FlockOperation::LockExclusive).unwrap();
    let before = read_number(file);
    file.write_all_at(&number(before + 1), 0).unwrap();
    rustix::fs::flock(file, FlockOperation::Unlock).unwrap();
    before
}

/// Four mounts at once; every object's history must be linearizable.
fn run(cluster: &Cluster, run: u64, steps: u64) {
    let files = make_files(cluster, run);
    let begun = Instant::now();
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let spawned: Vec<_> = files
            .iter()
            .zip(0..)
            .map(|(files, mount)| scope.spawn(move || work(files, mount, run, steps, begun)))
            .collect();
        spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    eprintln!("run {run}: {} operations in {:?}", MOUNTS as u64 * steps, begun.elapsed());
    check::<Register>(run, "a register opened each time", &seen, |s| &s.opened);
    check::<Register>(run, "a register held open", &seen, |s| &s.held);
    check::<Log>(run, "appends", &seen, |s| &s.log);
    check::<Name>(run, "exclusive creates", &seen, |s| &s.name);
    check::<Pair>(run, "exchanged names", &seen, |s| &s.pair);
    check::<Counter>(run, "a counter under a lock", &seen, |s| &s.counter);
}

fn check<O: Object>(run: u64, what: &str, seen: &[Seen], of: impl Fn(&Seen) -> &Vec<Event<O::Op>>) {
    let processes: Vec<Vec<Event<O::Op>>> = seen.iter().map(|s| of(s).clone()).collect();
    assert!(processes.iter().all(|p| p.len() > 10), "{what}: too few operations to tell anything");
    if let Err(why) = linearizable::<O>(&processes) {
        panic!("run {run}, {what}: {why}");
    }
}

#[test]
fn operations_of_four_mounts_are_linearizable() {
    if can_mount() {
        let cluster = Cluster::start(MOUNTS);
        run(&cluster, 0, STEPS);
    }
}

/// Opened while no other mount wrote it, so read through the kernel's pages; then another mount writes. A
/// read is never older than the data that had been written when it began, also in a loop that leaves the
/// kernel no moment without pages.
#[test]
fn a_file_open_since_before_sharing_is_never_read_stale() {
    const WRITES: u64 = 500;
    const READERS: usize = 2;
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let (here, there) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    fs::write(&here, number(0)).unwrap();
    let readers: Vec<File> = (0..READERS).map(|_| File::open(&here).unwrap()).collect();
    readers.iter().for_each(|file| assert_eq!(read_number(file), 0));
    let writer = OpenOptions::new().write(true).open(&there).unwrap();
    let written = AtomicU64::new(0);
    let counts: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let read = |file| {
            let (mut reads, mut old) = (0, 0);
            loop {
                let before = written.load(Ordering::Acquire);
                let seen = read_number(file);
                (reads, old) = (reads + 1, old + u64::from(seen < before));
                if before == WRITES {
                    return (reads, old);
                }
            }
        };
        let spawned: Vec<_> = readers.iter().map(|file| scope.spawn(move || read(file))).collect();
        // A thread that fails must not leave the readers waiting for the last number.
        let _end = common::OnPanic(|| written.store(WRITES, Ordering::Release));
        for n in 1..=WRITES {
            writer.write_all_at(&number(n), 0).unwrap();
            written.store(n, Ordering::Release);
        }
        spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    eprintln!("(reads, of them old): {counts:?}");
    assert!(counts.iter().all(|(_, old)| *old == 0), "old reads: {counts:?}");
    readers.iter().for_each(|file| assert_eq!(read_number(file), WRITES));
}

/// The first lines of a file are in its inode and the later ones on targets: an append that finds another
/// mount reading takes them there, while leases come and go.
#[test]
fn lines_that_are_appended_during_reads_are_complete() {
    const FILES: u64 = 100;
    const LINES: u64 = 6;
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let written = |lines: u64| (1..=lines).map(|n| format!("{n:06}\n")).collect::<String>();
    let mut pauses = Dice(7);
    for file in 0..FILES {
        let [here, there] = [0, 1].map(|mount: usize| cluster.mounts[mount].join(format!("log-{file}")));
        fs::write(&here, "").unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _end = common::OnPanic(|| over.store(true, Ordering::Release));
            scope.spawn(|| {
                let mut pauses = Dice(file);
                while !over.load(Ordering::Acquire) {
                    let seen = fs::read_to_string(&there).unwrap();
                    assert_eq!(seen, written(seen.len() as u64 / 7), "{}", there.display());
                    std::thread::sleep(Duration::from_micros(pauses.below(3000)));
                }
            });
            for n in 1..=LINES {
                let mut log = OpenOptions::new().append(true).open(&here).unwrap();
                log.write_all(format!("{n:06}\n").as_bytes()).unwrap();
                log.sync_all().unwrap();
                drop(log);
                std::thread::sleep(Duration::from_micros(pauses.below(3000)));
            }
            over.store(true, Ordering::Release);
        });
        assert_eq!(fs::read_to_string(&there).unwrap(), written(LINES), "{}", there.display());
    }
}

/// Runs of six histories each, so some 500; `WEIR_HISTORIES=first..end` at run time chooses others.
const RUNS: std::ops::Range<u64> = 1..85;

#[test]
#[ignore = "takes long: `make test-long`"]
fn operations_of_four_mounts_are_linearizable_under_faults() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(MOUNTS);
    let over = AtomicBool::new(false);
    let mut breaker = Breaker::start();
    std::thread::scope(|scope| {
        let _over = common::OnPanic(|| over.store(true, Ordering::Release));
        let faults = scope.spawn(|| break_things(&cluster, &mut breaker, &over));
        common::part("WEIR_HISTORIES", RUNS).for_each(|n| run(&cluster, n, STEPS_LONG));
        over.store(true, Ordering::Release);
        assert!(faults.join().unwrap() > 0, "no fault happened");
    });
}

/// Runs commands. Started before this process has files of the mounts open: to start a program is to close
/// them in that program, and a close saves, which waits for the very servers that the program is to start.
struct Breaker {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Breaker {
    fn start() -> Breaker {
        let mut bash = Command::new("bash");
        let mut child = bash.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Breaker { child, output }
    }
    /// Its exit status.
    fn run(&mut self, command: &str) -> String {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{command} > /dev/null; echo status $?").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().into()
    }
}

impl Drop for Breaker {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Kills one server after the other, and starts it again; how often.
fn break_things(cluster: &Cluster, breaker: &mut Breaker, over: &AtomicBool) -> u64 {
    let names = cluster.names();
    let servers: Vec<&String> = names.iter().filter(|n| !n.starts_with("mount")).collect();
    let (mut dice, mut kills) = (Dice(1), 0);
    loop {
        let next = Instant::now() + FAULT_PAUSE;
        while Instant::now() < next {
            if over.load(Ordering::Acquire) {
                return kills;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let victim = servers[dice.below(servers.len() as u64) as usize];
        let pid = cluster.pid(victim).unwrap();
        assert_eq!(breaker.run(&format!("kill -KILL {pid}")), "status 0");
        common::wait_until("it is gone", Duration::from_secs(60), || cluster.pid(victim).is_none());
        assert_eq!(breaker.run(&cluster.words_of_up().join(" ")), "status 0", "{}", cluster.logs());
        eprintln!("{victim} was killed and is back");
        kills += 1;
    }
}
