//! One worker's part of a workload, as a thread or a process; all begin at the same moment, when each is
//! ready.
//!
//! A worker prepares (opens files, touches its memory), waits at the gate, works, and reports its results.
//! Knows the shapes of work, not the use of the figures.

use crate::block::{BLOCK, Pattern};
use crate::detector::work::DetectorWork;
use crate::failure::failed;
use crate::histogram::Histogram;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;
use weir_env::{Buf, BufferPool};
use weir_proto::Result;

mod launch;

pub(crate) use launch::Launch;
pub use launch::worker_main;

/// Combined results of the workers.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) ops: u64,
    pub(crate) bytes: u64,
    /// From the gate to the end of the slowest.
    pub(crate) seconds: f64,
    pub(crate) latency: Histogram,
    /// From the scheduled start to the end.
    pub(crate) lateness: Histogram,
    pub(crate) late: u64,
    pub(crate) backlog_max: u64,
    /// Operations that returned an error and were counted instead of ending the run.
    pub(crate) failed: u64,
    /// Parts that were missing or wrong.
    pub(crate) bad: u64,
    pub(crate) first_bad: Option<String>,
}

impl Outcome {
    pub(crate) fn merge(&mut self, other: Outcome) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.seconds = self.seconds.max(other.seconds);
        self.latency.merge(&other.latency);
        self.lateness.merge(&other.lateness);
        self.late += other.late;
        self.backlog_max = self.backlog_max.max(other.backlog_max);
        self.failed += other.failed;
        self.bad += other.bad;
        self.first_bad = self.first_bad.take().or(other.first_bad);
    }

    pub(crate) fn mib_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9) / f64::from(1 << 20)
    }

    pub(crate) fn ops_per_s(&self) -> f64 {
        self.ops as f64 / self.seconds.max(1e-9)
    }

    pub(crate) fn bad(&mut self, what: impl FnOnce() -> String) {
        self.bad += 1;
        self.first_bad.get_or_insert_with(what);
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Work {
    Detector(DetectorWork),
    DetectorCheck(DetectorWork),
    StreamWrite(Stream),
    StreamRead { stream: Stream, drop_cache: bool },
    RecordsWrite(Records),
    RecordsRead(Records),
    Create(Names),
    Stat(Names),
    List(Names),
    Unlink(Names),
    SmallWrite { names: Names, bytes: u64, seed: u64 },
    SmallRead { names: Names, bytes: u64, seed: u64 },
    Fsync(Syncs),
}

/// One file of one worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Stream {
    pub(crate) path: PathBuf,
    pub(crate) object: u64,
    pub(crate) bytes: u64,
    pub(crate) io_bytes: u64,
    pub(crate) seed: u64,
    pub(crate) direct: bool,
}

/// Every `workers`-th record of one file, from `first` on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Records {
    pub(crate) path: PathBuf,
    pub(crate) first: u64,
    pub(crate) step: u64,
    pub(crate) count: u64,
    pub(crate) record_bytes: u64,
    pub(crate) seed: u64,
}

/// Files of one worker in one directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Names {
    pub(crate) dir: PathBuf,
    pub(crate) worker: u64,
    pub(crate) count: u64,
}

impl Names {
    fn path(&self, n: u64) -> PathBuf {
        self.dir.join(format!("file-{}-{n:08}", self.worker))
    }
    fn object(&self, n: u64) -> u64 {
        self.worker << 40 | n
    }
}

/// Small writes, each made durable before the next.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Syncs {
    pub(crate) path: PathBuf,
    pub(crate) writes: u64,
    pub(crate) bytes: u64,
    /// Append instead of overwriting.
    pub(crate) grow: bool,
    /// fsync instead of fdatasync.
    pub(crate) times: bool,
    pub(crate) direct: bool,
}

/// Waits until every worker is ready.
type Gate<'a> = &'a mut dyn FnMut() -> Result<Instant>;

impl Work {
    pub(crate) fn run(&self, gate: Gate<'_>) -> Result<Outcome> {
        match self {
            Work::Detector(work) => work.run(gate),
            Work::DetectorCheck(work) => work.check(gate),
            Work::StreamWrite(stream) => stream.write(gate),
            Work::StreamRead { stream, drop_cache } => stream.read(*drop_cache, gate),
            Work::RecordsWrite(records) => records.write(gate),
            Work::RecordsRead(records) => records.read(gate),
            Work::Create(names) => each(names, "create", gate, |path, _, _| create_new(path).map(drop)),
            // `stat(2)`, as C programs use it: the standard library also requests the birth time, which a
            // lookup does not return, so that each would be two requests.
            Work::Stat(names) => each(names, "stat", gate, |path, _, _| {
                rustix::fs::stat(path)?;
                Ok(())
            }),
            Work::List(names) => list(names, gate),
            Work::Unlink(names) => each(names, "unlink", gate, |path, _, _| fs::remove_file(path)),
            Work::SmallWrite { names, bytes, seed } => small_write(names, *bytes, *seed, gate),
            Work::SmallRead { names, bytes, seed } => small_read(names, *bytes, *seed, gate),
            Work::Fsync(syncs) => syncs.run(gate),
        }
    }
}

/// Memory that is mapped before the clock starts.
pub(crate) fn touched(len: usize) -> Buf {
    BufferPool::new(0).zeroed(len)
}

pub(crate) fn open_options(direct: bool) -> OpenOptions {
    let mut options = OpenOptions::new();
    if direct {
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed());
    }
    options
}

/// Opens with direct I/O if the file system supports it (tmpfs does not).
pub(crate) fn open_maybe_direct(
    path: &Path,
    direct: bool,
    set: impl Fn(&mut OpenOptions),
) -> io::Result<File> {
    let mut options = open_options(direct);
    set(&mut options);
    match options.open(path) {
        Err(e) if direct && e.kind() == io::ErrorKind::InvalidInput => {
            let mut options = open_options(false);
            set(&mut options);
            options.open(path)
        }
        opened => opened,
    }
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

impl Stream {
    fn write(&self, gate: Gate<'_>) -> Result<Outcome> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, &self.path, &e);
        let pattern = Pattern::new(self.seed);
        // One buffer for each position in the pattern's period: in the measured time only headers are
        // written.
        let mut buffers: Vec<Buf> = Vec::new();
        for n in 0..self.buffer_count() {
            let mut buf = touched(self.io_bytes as usize);
            pattern.fill(self.object, n * self.io_bytes, &mut buf);
            buffers.push(buf);
        }
        let start = gate()?;
        let file = open_maybe_direct(&self.path, self.direct, |o| {
            o.write(true).create(true).truncate(true);
        });
        let file = file.map_err(io("create"))?;
        let count = buffers.len() as u64;
        for n in 0..self.bytes / self.io_bytes {
            let buf = &mut buffers[(n % count) as usize];
            pattern.write_headers(self.object, n * self.io_bytes, buf);
            file.write_all_at(buf, n * self.io_bytes).map_err(io("write"))?;
        }
        file.sync_all().map_err(io("fsync"))?;
        drop(file);
        Ok(self.outcome(start))
    }

    fn buffer_count(&self) -> u64 {
        let period = Pattern::period();
        if period.is_multiple_of(self.io_bytes) { period / self.io_bytes } else { 1 }
    }

    /// Reads and compares. Comparing costs memory bandwidth within the measured time, as an application's use
    /// would.
    fn read(&self, drop_cache: bool, gate: Gate<'_>) -> Result<Outcome> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, &self.path, &e);
        let pattern = Pattern::new(self.seed);
        let mut buf = touched(self.io_bytes as usize);
        let file = open_maybe_direct(&self.path, self.direct, |o| {
            o.read(true);
        });
        let file = file.map_err(io("open"))?;
        if drop_cache {
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed); // an advice only
        }
        let start = gate()?;
        let mut outcome = Outcome::default();
        for n in 0..self.bytes / self.io_bytes {
            let offset = n * self.io_bytes;
            file.read_exact_at(&mut buf, offset).map_err(io("read"))?;
            if let Err(at) = pattern.check(self.object, offset, &buf) {
                outcome.bad(|| format!("{} differs at byte {}", self.path.display(), at.offset));
            }
        }
        outcome.merge(self.outcome(start));
        Ok(outcome)
    }

    fn outcome(&self, start: Instant) -> Outcome {
        let ops = self.bytes / self.io_bytes;
        Outcome {
            ops,
            bytes: ops * self.io_bytes,
            seconds: start.elapsed().as_secs_f64(),
            ..Outcome::default()
        }
    }
}

impl Records {
    fn each(&self, mut visit: impl FnMut(u64, u64) -> Result<()>, start: Instant) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        for n in (self.first..self.count).step_by(self.step as usize) {
            visit(n, n * self.record_bytes)?;
            outcome.ops += 1;
            outcome.bytes += self.record_bytes;
        }
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    fn write(&self, gate: Gate<'_>) -> Result<Outcome> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, &self.path, &e);
        let pattern = Pattern::new(self.seed);
        let mut buf = touched(self.record_bytes as usize);
        pattern.fill(0, 0, &mut buf);
        // For reading and writing, as IOR and HDF5 open a file with several writers.
        let file = OpenOptions::new().read(true).write(true).open(&self.path).map_err(io("open"))?;
        let start = gate()?;
        let written = self.each(
            |n, offset| {
                pattern.write_headers(n, 0, &mut buf);
                file.write_all_at(&buf, offset).map_err(io("write"))
            },
            start,
        )?;
        file.sync_all().map_err(io("fsync"))?;
        Ok(Outcome { seconds: start.elapsed().as_secs_f64(), ..written })
    }

    fn read(&self, gate: Gate<'_>) -> Result<Outcome> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, &self.path, &e);
        let pattern = Pattern::new(self.seed);
        let mut buf = touched(self.record_bytes as usize);
        let file = File::open(&self.path).map_err(io("open"))?;
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed); // an advice only
        let mut wrong = Outcome::default();
        let start = gate()?;
        let mut outcome = self.each(
            |n, offset| {
                file.read_exact_at(&mut buf, offset).map_err(io("read"))?;
                if let Err(at) = pattern.check(n, 0, &buf) {
                    let place = offset + at.offset;
                    wrong.bad(|| format!("record {n} of {} differs at byte {place}", self.path.display()));
                }
                Ok(())
            },
            start,
        )?;
        outcome.merge(wrong);
        Ok(outcome)
    }
}

/// Performs an operation on each file and measures its time.
fn each(
    names: &Names,
    doing: &str,
    gate: Gate<'_>,
    mut act: impl FnMut(&Path, u64, &mut Outcome) -> io::Result<()>,
) -> Result<Outcome> {
    let paths: Vec<PathBuf> = (0..names.count).map(|n| names.path(n)).collect();
    let start = gate()?;
    let mut outcome = Outcome::default();
    for (n, path) in paths.iter().enumerate() {
        let from = Instant::now();
        act(path, n as u64, &mut outcome).map_err(|e| failed(doing, path, &e))?;
        outcome.latency.record(from.elapsed());
        outcome.ops += 1;
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    Ok(outcome)
}

/// `ls -l`: names and attributes of all in a directory.
fn list(names: &Names, gate: Gate<'_>) -> Result<Outcome> {
    let io = |e: io::Error| failed("list", &names.dir, &e);
    let start = gate()?;
    let mut outcome = Outcome::default();
    for entry in fs::read_dir(&names.dir).map_err(io)? {
        entry.and_then(|e| e.metadata()).map_err(io)?;
        outcome.ops += 1;
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    if outcome.ops != names.count {
        let (found, dir) = (outcome.ops, names.dir.display());
        outcome.bad(|| format!("{dir} lists {found} files; {} were made", names.count));
    }
    Ok(outcome)
}

fn small_write(names: &Names, bytes: u64, seed: u64, gate: Gate<'_>) -> Result<Outcome> {
    let pattern = Pattern::new(seed);
    let mut buf = touched(bytes as usize);
    pattern.fill(0, 0, &mut buf);
    each(names, "write", gate, |path, n, outcome| {
        pattern.write_headers(names.object(n), 0, &mut buf);
        create_new(path)?.write_all(&buf)?;
        outcome.bytes += bytes;
        Ok(())
    })
}

fn small_read(names: &Names, bytes: u64, seed: u64, gate: Gate<'_>) -> Result<Outcome> {
    let pattern = Pattern::new(seed);
    let mut buf = touched(bytes as usize + 1); // one more byte: a longer file is detected
    each(names, "read", gate, |path, n, outcome| {
        let file = File::open(path)?;
        let mut len = 0;
        while len < buf.len() {
            match file.read_at(&mut buf[len..], len as u64)? {
                0 => break,
                more => len += more,
            }
        }
        if len as u64 != bytes || pattern.check(names.object(n), 0, &buf[..len]).is_err() {
            outcome.bad(|| format!("{} does not hold what was written ({len} bytes)", path.display()));
        }
        outcome.bytes += len as u64;
        Ok(())
    })
}

/// Overwritten in place: the blocks exist. Large enough that one block is not written twice in a row.
const FSYNC_FILE_BYTES: u64 = 16 << 20;

impl Syncs {
    fn run(&self, gate: Gate<'_>) -> Result<Outcome> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, &self.path, &e);
        let direct = self.direct && self.bytes.is_multiple_of(BLOCK as u64);
        let buf = touched(self.bytes as usize);
        let file = open_maybe_direct(&self.path, direct, |o| {
            o.read(true).write(true).create(true).truncate(true);
        });
        let file = file.map_err(io("create"))?;
        let places = (FSYNC_FILE_BYTES / self.bytes).max(1);
        if !self.grow {
            file.write_all_at(&touched((self.bytes * places) as usize), 0).map_err(io("write"))?;
            file.sync_all().map_err(io("fsync"))?;
        }
        let start = gate()?;
        let mut outcome = Outcome::default();
        for n in 0..self.writes {
            let from = Instant::now();
            let place = if self.grow { n } else { n % places };
            file.write_all_at(&buf, place * self.bytes).map_err(io("write"))?;
            let synced = if self.times { file.sync_all() } else { file.sync_data() };
            synced.map_err(io("sync"))?;
            outcome.latency.record(from.elapsed());
        }
        outcome.ops = self.writes;
        outcome.bytes = self.writes * self.bytes;
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }
}
