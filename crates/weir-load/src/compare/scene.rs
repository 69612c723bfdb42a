//! One directory of a comparison: its files, the measurement of each row, and the cleanup.
//!
//! Invariant: everything is made below one directory of our own, which is removed with the scene, even after
//! an error.

use super::{Mounts, Options, RowName, Stop};
use crate::block::Pattern;
use crate::failure::failed;
use crate::work::{open_options, touched};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use weir_env::Buf;
use weir_proto::{Error, Result};

/// IOR's hard case: deliberately not a multiple of anything.
pub(super) const RECORD_BYTES: u64 = 47_008;
/// mdtest's hard case.
pub(super) const SMALL_BYTES: u64 = 3_901;
pub(super) const DETECTOR_BYTES: u64 = 6_000_000;
const STREAM_IO_BYTES: u64 = 1 << 20;
pub(super) const RDWR_IO_BYTES: u64 = 128 << 10;
const RANDOM_BYTES: u64 = 4096;
/// Overwritten in place: large enough that no block is written twice in a row.
pub(super) const SYNC_FILE_BYTES: u64 = 4 << 20;
/// Rows that run from memory are repeated for this time: one pass would be too short for the clock.
const WARM_LONG_ENOUGH: Duration = Duration::from_millis(200);
/// Fewer pages than this, in percent, are ignored: another process may have read them since.
const STAYED_PERCENT: u64 = 1;

/// Result of dropping pages from the kernel's cache.
#[derive(Clone, Default, Debug)]
pub(super) struct Drops {
    pub(super) refused: Option<String>,
    /// The largest part that stayed.
    pub(super) stayed_percent: u64,
    /// The kernel does not report it.
    pub(super) unknown: bool,
}

pub(super) struct Ended {
    pub(super) bad: u64,
    pub(super) first_bad: Option<String>,
    pub(super) drops: Drops,
}

pub(super) struct Scene<'a> {
    dir: PathBuf,
    root: Root,
    /// The same directory as `root` through another mount, for cold rows.
    other: Option<PathBuf>,
    options: &'a Options,
    pattern: Pattern,
    stop: &'a Stop,
    round: u64,
    made: Made,
    bad: u64,
    first_bad: Option<String>,
    drops: Drops,
}

/// Files that this round's rows have left for later rows.
#[derive(Default)]
struct Made {
    stream: bool,
    shared: bool,
    names: bool,
    listed: bool,
    small: bool,
}

/// A directory that is removed with its content.
struct Root(Option<PathBuf>);

impl Root {
    fn path(&self) -> &Path {
        self.0.as_deref().expect("a scene that is not at its end has a directory")
    }
    fn remove(mut self) -> Result<()> {
        let root = self.0.take().expect("removed once");
        fs::remove_dir_all(&root).map_err(|e| failed("remove", &root, &e))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if let Some(root) = &self.0
            && let Err(e) = fs::remove_dir_all(root)
            && e.kind() != io::ErrorKind::NotFound
        {
            eprintln!("{} stays behind: {e}", root.display()); // the run reports its own error
        }
    }
}

/// The amount of work and its duration.
struct Measured {
    count: u64,
    seconds: f64,
}

impl Measured {
    fn since(count: u64, start: Instant) -> Measured {
        Measured { count, seconds: start.elapsed().as_secs_f64() }
    }
    fn rate(&self, unit: &str) -> f64 {
        let per = if unit == "MiB/s" { f64::from(1 << 20) } else { 1.0 };
        self.count as f64 / per / self.seconds.max(1e-9)
    }
}

impl<'a> Scene<'a> {
    pub(super) fn begin(
        Mounts { dir, other }: &Mounts,
        index: usize,
        options: &'a Options,
        pattern: Pattern,
        stop: &'a Stop,
    ) -> Result<Scene<'a>> {
        // Paths of rows are absolute, for any form of the argument.
        let dir = fs::canonicalize(dir).map_err(|e| failed("look at", dir, &e))?;
        let name = format!("weir-compare-{}-{index}", std::process::id());
        let root = dir.join(&name);
        fs::create_dir(&root).map_err(|e| failed("cannot be compared: make a directory in", &dir, &e))?;
        let root = Root(Some(root));
        let other = other.as_ref().map(|other| other.join(name));
        if let Some(other) = other.as_ref().filter(|other| !other.is_dir()) {
            let (dir, other) = (root.path().display(), other.display());
            return Err(Error::invalid(format!(
                "{dir} is not seen as {other}: they must be two mounts of one directory"
            )));
        }
        let made = Made::default();
        let drops = Drops::default();
        Ok(Scene { dir, root, other, options, pattern, stop, round: 0, made, bad: 0, first_bad: None, drops })
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn end(self) -> Result<Ended> {
        self.root.remove()?;
        Ok(Ended { bad: self.bad, first_bad: self.first_bad, drops: self.drops })
    }

    /// Removes everything that an earlier round made.
    pub(super) fn next_round(&mut self, round: u64) -> Result<()> {
        let root = self.root.path();
        for entry in fs::read_dir(root).map_err(|e| failed("list", root, &e))? {
            let path = entry.map_err(|e| failed("list", root, &e))?.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(|e| failed("remove", &path, &e))?;
        }
        self.made = Made::default();
        self.round = round;
        self.settle()
    }

    /// The rate. The files that a row needs are made before, and its dirty data is written after, both
    /// outside of the measured time.
    pub(super) fn measure(&mut self, row: RowName) -> Result<f64> {
        let measured = match row {
            RowName::StreamWrite => self.stream_write()?,
            RowName::ColdRead => self.cold_read()?,
            RowName::RandomCold => self.random_cold()?,
            RowName::RandomWarm => self.random_again(false)?,
            RowName::RandomRdwr => self.random_again(true)?,
            RowName::SharedWrite => self.shared_write()?,
            RowName::SharedRead => self.shared_read()?,
            RowName::RdwrWrite => self.rdwr_write()?,
            RowName::SyncWrite => self.sync_write()?,
            RowName::Detector => self.detector()?,
            RowName::Create => self.create()?,
            RowName::SmallWrite => self.small_write()?,
            RowName::SmallStat => self.small_stat()?,
            RowName::SmallRead => self.small_read()?,
            RowName::LsFirst => self.ls(false)?,
            RowName::LsAgain => self.ls(true)?,
            RowName::Find => self.find()?,
            RowName::Remove => self.remove()?,
        };
        self.settle()?;
        Ok(measured.rate(row.unit()))
    }

    /// One directory's dirty data must not slow another one down.
    fn settle(&self) -> Result<()> {
        let root = self.root.path();
        let dir = File::open(root).map_err(|e| failed("open", root, &e))?;
        rustix::fs::syncfs(&dir).map_err(|e| failed("sync", root, &e.into()))
    }

    /// The path at which cold rows read `path`.
    fn cold(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix(self.root.path()).expect("below our own directory");
        self.other.as_ref().map_or_else(|| path.to_path_buf(), |other| other.join(below))
    }

    fn note_bad(&mut self, what: impl FnOnce() -> String) {
        self.bad += 1;
        self.first_bad.get_or_insert_with(what);
    }

    // ---- Streams

    fn stream(&self) -> PathBuf {
        self.root.path().join("stream")
    }
    fn stream_bytes(&self) -> u64 {
        self.options.size.next_multiple_of(STREAM_IO_BYTES)
    }

    fn stream_write(&mut self) -> Result<Measured> {
        let (path, bytes) = (self.stream(), self.stream_bytes());
        if self.made.stream {
            fs::remove_file(&path).map_err(|e| failed("remove", &path, &e))?;
        }
        let written = self.write_in_order(&path, bytes, STREAM_IO_BYTES, false)?;
        self.made.stream = true;
        Ok(written)
    }

    fn needs_stream(&mut self) -> Result<()> {
        if !self.made.stream {
            self.stream_write()?;
        }
        Ok(())
    }

    fn rdwr_write(&mut self) -> Result<Measured> {
        let path = self.root.path().join("rdwr");
        let written = self.write_in_order(&path, self.stream_bytes(), RDWR_IO_BYTES, true)?;
        fs::remove_file(&path).map_err(|e| failed("remove", &path, &e))?;
        Ok(written)
    }

    fn write_in_order(&self, path: &Path, bytes: u64, io_bytes: u64, also_read: bool) -> Result<Measured> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, path, &e);
        // In the measured time only stamps are written: see `Stream::write`.
        let count = Pattern::period() / io_bytes;
        let mut buffers: Vec<Buf> = (0..count.min(bytes / io_bytes))
            .map(|n| {
                let mut buf = touched(io_bytes as usize);
                self.pattern.fill(0, n * io_bytes, &mut buf);
                buf
            })
            .collect();
        let start = Instant::now();
        let file = open_options(false).read(also_read).write(true).create_new(true).open(path);
        let file = file.map_err(io("create"))?;
        for n in 0..bytes / io_bytes {
            self.stop.check()?;
            let buf = &mut buffers[(n % count) as usize];
            self.pattern.stamp(0, n * io_bytes, buf);
            file.write_all_at(buf, n * io_bytes).map_err(io("write"))?;
        }
        file.sync_all().map_err(io("fsync"))?;
        drop(file);
        Ok(Measured::since(bytes, start))
    }

    fn cold_read(&mut self) -> Result<Measured> {
        self.needs_stream()?;
        let path = self.cold(&self.stream());
        let io = |doing: &'static str| move |path: &Path, e: io::Error| failed(doing, path, &e);
        let mut buf = touched(STREAM_IO_BYTES as usize);
        let file = File::open(&path).map_err(|e| io("open")(&path, e))?;
        self.drop_pages(&file, self.stream_bytes());
        let start = Instant::now();
        for n in 0..self.stream_bytes() / STREAM_IO_BYTES {
            self.stop.check()?;
            let offset = n * STREAM_IO_BYTES;
            file.read_exact_at(&mut buf, offset).map_err(|e| io("read")(&path, e))?;
            self.compare(&path, 0, offset, &buf);
        }
        Ok(Measured::since(self.stream_bytes(), start))
    }

    /// Compares with `object` as it was written, from byte `offset` of it on.
    fn compare(&mut self, path: &Path, object: u64, offset: u64, buf: &[u8]) {
        if let Err(at) = self.pattern.check(object, offset, buf) {
            self.note_bad(|| format!("{} differs in the 4 KiB of byte {}", path.display(), at.offset));
        }
    }

    fn drop_pages(&mut self, file: &File, bytes: u64) {
        // Only clean pages can be dropped.
        let dropped = rustix::fs::fdatasync(file)
            .and_then(|()| rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed));
        if let Err(e) = dropped {
            self.drops.refused.get_or_insert_with(|| io::Error::from(e).to_string());
        }
        match weir_env::real::cached_bytes(file.as_fd()) {
            Some(stayed) => {
                let percent = stayed * 100 / bytes.max(1);
                if percent > STAYED_PERCENT {
                    self.drops.stayed_percent = self.drops.stayed_percent.max(percent.min(100));
                }
            }
            None => self.drops.unknown = true,
        }
    }

    // ---- Random reads

    /// The offset of the `n`th of this round's reads; the same for every directory.
    fn place(&self, n: u64) -> u64 {
        let mut z = (self.options.seed << 40 ^ self.round << 32 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // SplitMix64's last steps (Steele, Lea, Flood 2014).
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % (self.stream_bytes() / RANDOM_BYTES) * RANDOM_BYTES
    }

    fn random_pass(&mut self, path: &Path, file: &File, buf: &mut [u8]) -> Result<u64> {
        for n in 0..self.options.ops {
            self.stop.check()?;
            let offset = self.place(n);
            file.read_exact_at(buf, offset).map_err(|e| failed("read", path, &e))?;
            self.compare(path, 0, offset, buf);
        }
        Ok(self.options.ops)
    }

    fn random_cold(&mut self) -> Result<Measured> {
        self.needs_stream()?;
        let path = self.cold(&self.stream());
        let mut buf = touched(RANDOM_BYTES as usize);
        let file = File::open(&path).map_err(|e| failed("open", &path, &e))?;
        self.drop_pages(&file, self.stream_bytes());
        let start = Instant::now();
        let read = self.random_pass(&path, &file, &mut buf)?;
        Ok(Measured::since(read, start))
    }

    fn random_again(&mut self, also_write: bool) -> Result<Measured> {
        self.needs_stream()?;
        let path = self.stream();
        let mut buf = touched(RANDOM_BYTES as usize);
        let file = OpenOptions::new().read(true).write(also_write).open(&path);
        let file = file.map_err(|e| failed("open", &path, &e))?;
        self.random_pass(&path, &file, &mut buf)?;
        let (mut read, start) = (0, Instant::now());
        while start.elapsed() < WARM_LONG_ENOUGH {
            read += self.random_pass(&path, &file, &mut buf)?;
        }
        Ok(Measured::since(read, start))
    }

    // ---- Several at once

    /// Each worker's part, started at the same moment; the slowest determines the time.
    fn together<S: Send>(
        &self,
        prepared: Vec<S>,
        act: impl Fn(u64, S) -> Result<u64> + Sync,
    ) -> Result<Measured> {
        let barrier = Barrier::new(prepared.len());
        let parts: Vec<Result<Measured>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(prepared)
                .map(|(worker, own)| {
                    let (barrier, act) = (&barrier, &act);
                    scope.spawn(move || {
                        barrier.wait();
                        let start = Instant::now();
                        act(worker, own).map(|count| Measured::since(count, start))
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("a worker does not panic")).collect()
        });
        let mut all = Measured { count: 0, seconds: 0.0 };
        for part in parts {
            let part = part?;
            all.count += part.count;
            all.seconds = all.seconds.max(part.seconds);
        }
        Ok(all)
    }

    fn shared(&self) -> PathBuf {
        self.root.path().join("shared")
    }
    fn records(&self) -> u64 {
        // Half of a stream's size: a file shared by many is slower than a stream.
        (self.options.size / 2 / RECORD_BYTES).max(u64::from(self.options.jobs))
    }

    fn shared_write(&mut self) -> Result<Measured> {
        let path = self.shared();
        File::create(&path).map_err(|e| failed("create", &path, &e))?;
        let jobs = u64::from(self.options.jobs);
        let mut prepared = Vec::new();
        for _ in 0..jobs {
            let mut buf = touched(RECORD_BYTES as usize);
            self.pattern.fill(0, 0, &mut buf);
            let file = OpenOptions::new().read(true).write(true).open(&path);
            prepared.push((file.map_err(|e| failed("open", &path, &e))?, buf));
        }
        let written = self.together(prepared, |worker, (file, mut buf)| {
            let mut bytes = 0;
            for n in (worker..self.records()).step_by(jobs as usize) {
                self.stop.check()?;
                self.pattern.stamp(n, 0, &mut buf);
                file.write_all_at(&buf, n * RECORD_BYTES).map_err(|e| failed("write", &path, &e))?;
                bytes += RECORD_BYTES;
            }
            file.sync_all().map_err(|e| failed("fsync", &path, &e))?;
            Ok(bytes)
        })?;
        self.made.shared = true;
        Ok(written)
    }

    fn shared_read(&mut self) -> Result<Measured> {
        if !self.made.shared {
            self.shared_write()?;
        }
        let (path, jobs) = (self.cold(&self.shared()), u64::from(self.options.jobs));
        let mut prepared = Vec::new();
        for _ in 0..jobs {
            let file = OpenOptions::new().read(true).write(true).open(&path);
            prepared.push((file.map_err(|e| failed("open", &path, &e))?, touched(RECORD_BYTES as usize)));
        }
        self.drop_pages(&prepared[0].0, self.records() * RECORD_BYTES);
        let wrong = std::sync::Mutex::new(Vec::new());
        let read = self.together(prepared, |worker, (file, mut buf)| {
            let mut bytes = 0;
            for n in ((worker + 1) % jobs..self.records()).step_by(jobs as usize) {
                self.stop.check()?;
                file.read_exact_at(&mut buf, n * RECORD_BYTES).map_err(|e| failed("read", &path, &e))?;
                if self.pattern.check(n, 0, &buf).is_err() {
                    wrong.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(n);
                }
                bytes += RECORD_BYTES;
            }
            Ok(bytes)
        })?;
        for n in wrong.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            self.note_bad(|| format!("record {n} of {} differs", path.display()));
        }
        Ok(read)
    }

    fn detector(&mut self) -> Result<Measured> {
        let dir = self.root.path().join("detector");
        fs::create_dir(&dir).map_err(|e| failed("make the directory", &dir, &e))?;
        let jobs = u64::from(self.options.jobs);
        let files = (self.options.size / 2 / DETECTOR_BYTES / jobs).max(1);
        let prepared = (0..jobs)
            .map(|_| {
                let mut buf = touched(DETECTOR_BYTES as usize);
                self.pattern.fill(0, 0, &mut buf);
                buf
            })
            .collect();
        let written = self.together(prepared, |worker, mut buf| {
            for n in 0..files {
                self.stop.check()?;
                self.pattern.stamp(worker << 32 | n, 0, &mut buf);
                let path = dir.join(format!("{worker}-{n:06}"));
                write_new(&path, &buf, true).map_err(|e| failed("write", &path, &e))?;
            }
            Ok(files * DETECTOR_BYTES)
        })?;
        fs::remove_dir_all(&dir).map_err(|e| failed("remove", &dir, &e))?;
        Ok(written)
    }

    // ---- Durable small writes

    fn sync_write(&mut self) -> Result<Measured> {
        let path = self.root.path().join("sync");
        let io = |doing: &'static str| move |path: &Path, e: io::Error| failed(doing, path, &e);
        write_new(&path, &touched(SYNC_FILE_BYTES as usize), true).map_err(|e| io("write")(&path, e))?;
        let file = OpenOptions::new().write(true).open(&path).map_err(|e| io("open")(&path, e))?;
        let mut buf = touched(RANDOM_BYTES as usize);
        self.pattern.fill(1, 0, &mut buf);
        let start = Instant::now();
        for n in 0..self.options.ops {
            self.stop.check()?;
            file.write_all_at(&buf, n * RANDOM_BYTES % SYNC_FILE_BYTES).map_err(|e| io("write")(&path, e))?;
            file.sync_data().map_err(|e| io("fdatasync")(&path, e))?;
        }
        let measured = Measured::since(self.options.ops, start);
        drop(file);
        fs::remove_file(&path).map_err(|e| io("remove")(&path, e))?;
        Ok(measured)
    }

    // ---- Names

    /// The root of all files that are found and removed.
    fn tree(&self) -> PathBuf {
        self.root.path().join("tree")
    }
    /// Our own directory plus this makes a path five directories below the one that is compared.
    fn names(&self) -> PathBuf {
        self.tree().join("a/b/names")
    }
    fn small(&self) -> PathBuf {
        self.tree().join("a/b/small")
    }

    fn paths(dir: &Path, count: u64) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(dir).map_err(|e| failed("make the directory", dir, &e))?;
        Ok((0..count).map(|n| dir.join(format!("file-{n:08}"))).collect())
    }

    /// Performs an operation on each path, and returns the total time.
    fn each(
        &self,
        doing: &'static str,
        paths: &[PathBuf],
        act: impl Fn(u64, &Path) -> io::Result<()>,
    ) -> Result<Measured> {
        let start = Instant::now();
        for (n, path) in (0..).zip(paths) {
            self.stop.check()?;
            act(n, path).map_err(|e| failed(doing, path, &e))?;
        }
        Ok(Measured::since(paths.len() as u64, start))
    }

    fn create(&mut self) -> Result<Measured> {
        let dir = self.names();
        if self.made.names {
            fs::remove_dir_all(&dir).map_err(|e| failed("remove", &dir, &e))?;
        }
        let paths = Self::paths(&dir, self.options.files)?;
        let made = self.each("create", &paths, |_, path| {
            OpenOptions::new().write(true).create_new(true).open(path).map(drop)
        })?;
        (self.made.names, self.made.listed) = (true, false);
        Ok(made)
    }

    fn small_write(&mut self) -> Result<Measured> {
        let dir = self.small();
        if self.made.small {
            fs::remove_dir_all(&dir).map_err(|e| failed("remove", &dir, &e))?;
        }
        let paths = Self::paths(&dir, self.options.ops)?;
        let mut filled = touched(SMALL_BYTES as usize);
        self.pattern.fill(0, 0, &mut filled);
        let buf = std::cell::RefCell::new(filled);
        let written = self.each("write", &paths, |n, path| {
            let mut buf = buf.borrow_mut();
            self.pattern.stamp(n, 0, &mut buf);
            write_new(path, &buf, false)
        })?;
        self.made.small = true;
        Ok(written)
    }

    fn needs_small(&mut self) -> Result<Vec<PathBuf>> {
        if !self.made.small {
            self.small_write()?;
        }
        Self::paths(&self.small(), self.options.ops)
    }

    fn small_stat(&mut self) -> Result<Measured> {
        let paths = self.needs_small()?;
        let stat = || self.each("stat", &paths, |_, path| Ok(rustix::fs::stat(path).map(drop)?));
        stat()?;
        let (mut count, start) = (0, Instant::now());
        while start.elapsed() < WARM_LONG_ENOUGH {
            count += stat()?.count;
        }
        Ok(Measured::since(count, start))
    }

    fn small_read(&mut self) -> Result<Measured> {
        let paths: Vec<PathBuf> = self.needs_small()?.iter().map(|path| self.cold(path)).collect();
        for path in &paths {
            let file = File::open(path).map_err(|e| failed("open", path, &e))?;
            self.drop_pages(&file, SMALL_BYTES);
        }
        let mut buf = touched(SMALL_BYTES as usize + 1); // one more byte: a longer file is detected
        let start = Instant::now();
        for (n, path) in (0..).zip(&paths) {
            self.stop.check()?;
            let read = File::open(path).and_then(|file| file.read_at(&mut buf, 0));
            let len = read.map_err(|e| failed("read", path, &e))?;
            if len as u64 != SMALL_BYTES {
                self.note_bad(|| format!("{} has {len} bytes", path.display()));
            }
            self.compare(path, n, 0, &buf[..len]);
        }
        Ok(Measured::since(paths.len() as u64, start))
    }

    /// The system calls of `ls -l` (coreutils 9): for each entry lstat and two extended attributes, which
    /// rarely exist.
    fn ls(&mut self, again: bool) -> Result<Measured> {
        if !self.made.names || !again && self.made.listed {
            self.create()?;
        }
        let (dir, files) = (self.names(), self.options.files);
        if again && !self.made.listed {
            self.list(&dir)?;
        }
        let listed = self.list(&dir)?;
        self.made.listed = true;
        if listed.count != files {
            let found = listed.count;
            self.note_bad(|| format!("{} lists {found} files; {files} were made", dir.display()));
        }
        Ok(listed)
    }

    fn list(&self, dir: &Path) -> Result<Measured> {
        let io = |e: io::Error| failed("list", dir, &e);
        let mut value = [0u8; 256];
        let (mut count, start) = (0, Instant::now());
        for entry in fs::read_dir(dir).map_err(io)? {
            self.stop.check()?;
            let path = entry.map_err(io)?.path();
            rustix::fs::lstat(&path).map_err(|e| failed("stat", &path, &e.into()))?;
            // Absent or not supported: `ls` ignores both.
            let _ = rustix::fs::lgetxattr(&path, "security.selinux", &mut value[..]);
            let _ = rustix::fs::getxattr(&path, "system.posix_acl_access", &mut value[..0]);
            count += 1;
        }
        Ok(Measured::since(count, start))
    }

    fn needs_names(&mut self) -> Result<()> {
        if !self.made.names {
            self.create()?;
        }
        Ok(())
    }

    /// Number of entries below the tree, without itself.
    fn entries(&self) -> u64 {
        let small = if self.made.small { 1 + self.options.ops } else { 0 };
        3 + self.options.files + small // a, b, names
    }

    fn find(&mut self) -> Result<Measured> {
        self.needs_names()?;
        let tree = self.tree();
        let start = Instant::now();
        let top = open_dir(CWD, &tree).map_err(|e| failed("open", &tree, &e))?;
        let count = self.walk(&top).map_err(|e| failed("find in", &tree, &e))?;
        let measured = Measured::since(count, start);
        self.stop.check()?;
        if count != self.entries() {
            let there = self.entries();
            self.note_bad(|| format!("{} has {there} entries, {count} were found", tree.display()));
        }
        Ok(measured)
    }

    fn walk(&self, dir: impl AsFd) -> io::Result<u64> {
        let mut count = 0;
        let mut below = Vec::new();
        for entry in rustix::fs::Dir::read_from(&dir)? {
            if self.stop.is_set() {
                break;
            }
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            count += 1;
            if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
                below.push(name.to_owned());
            }
        }
        for name in below {
            count += self.walk(open_dir(&dir, name)?)?;
        }
        Ok(count)
    }

    fn remove(&mut self) -> Result<Measured> {
        self.needs_names()?;
        let (tree, count) = (self.tree(), self.entries());
        let start = Instant::now();
        fs::remove_dir_all(&tree).map_err(|e| failed("remove", &tree, &e))?;
        let measured = Measured::since(count, start);
        self.made = Made { names: false, listed: false, small: false, ..std::mem::take(&mut self.made) };
        Ok(measured)
    }
}

fn open_dir(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<std::os::fd::OwnedFd> {
    Ok(rustix::fs::openat(at, path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A new file with these bytes.
fn write_new(path: &Path, bytes: &[u8], sync: bool) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    if sync { file.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn tiny() -> Options {
        Options { size: 2 << 20, files: 7, ops: 5, ..Options::of(vec![]) }
    }

    fn begin<'a>(dir: &Path, options: &'a Options, stop: &'a Stop) -> Scene<'a> {
        let dir = Mounts { dir: dir.into(), other: None };
        let mut scene = Scene::begin(&dir, 0, options, Pattern::new(1), stop).unwrap();
        scene.next_round(0).unwrap();
        scene
    }

    #[test]
    fn each_row_makes_what_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        let (options, stop) = (tiny(), Stop::default());
        for row in RowName::value_variants() {
            let mut scene = begin(dir.path(), &options, &stop);
            for _ in 0..2 {
                assert!(scene.measure(*row).unwrap() > 0.0, "{}", row.name());
            }
            assert_eq!(scene.end().unwrap().first_bad, None, "{}", row.name());
        }
    }

    #[test]
    fn wrong_bytes_and_missing_names_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (options, stop) = (tiny(), Stop::default());
        type Spoil = fn(&Scene<'_>);
        let spoil_stream: Spoil = |scene| {
            let file = OpenOptions::new().write(true).open(scene.stream()).unwrap();
            file.write_all_at(&vec![0; 2 << 20], 0).unwrap();
        };
        let table: [(RowName, RowName, Spoil); 7] = [
            (RowName::StreamWrite, RowName::ColdRead, spoil_stream),
            (RowName::StreamWrite, RowName::RandomCold, spoil_stream),
            (RowName::StreamWrite, RowName::RandomRdwr, spoil_stream),
            (RowName::SharedWrite, RowName::SharedRead, |scene| {
                let file = OpenOptions::new().write(true).open(scene.shared()).unwrap();
                file.write_all_at(b"x", 3 * RECORD_BYTES + 17).unwrap();
            }),
            (RowName::SmallWrite, RowName::SmallRead, |scene| {
                fs::write(scene.small().join("file-00000003"), "short").unwrap();
            }),
            (RowName::Create, RowName::LsFirst, |scene| {
                fs::remove_file(scene.names().join("file-00000003")).unwrap();
            }),
            (RowName::Create, RowName::Find, |scene| {
                fs::remove_file(scene.names().join("file-00000003")).unwrap();
            }),
        ];
        for (makes, sees, spoil) in table {
            let mut scene = begin(dir.path(), &options, &stop);
            scene.measure(makes).unwrap();
            spoil(&scene);
            scene.measure(sees).unwrap();
            assert!(scene.end().unwrap().bad > 0, "{}", sees.name());
        }
    }

    #[test]
    fn a_scene_that_is_dropped_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (options, stop) = (tiny(), Stop::default());
        let mut scene = begin(dir.path(), &options, &stop);
        scene.measure(RowName::SmallWrite).unwrap();
        stop.set();
        assert!(scene.measure(RowName::SmallRead).is_err());
        assert!(dir.path().read_dir().unwrap().next().is_some());
        drop(scene);
        assert!(dir.path().read_dir().unwrap().next().is_none());
    }
}
