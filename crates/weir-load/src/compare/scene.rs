//! One directory of a comparison: its files, the measurement of each row, and the cleanup.
//!
//! Invariant: everything is made below one directory of our own, which is removed with the scene, even after
//! an error.

use super::{Mounts, Options, RowName, Stop};
use crate::block::Pattern;
use crate::failure::failed;
use crate::work::touched;
use data::RANDOM_BYTES;
use names::write_new;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;
use weir_proto::{Error, Result};

mod data;
mod names;

/// IOR's hard case: deliberately not a multiple of anything.
pub(super) const RECORD_BYTES: u64 = 47_008;
/// mdtest's hard case.
pub(super) const SMALL_BYTES: u64 = 3_901;
pub(super) const DETECTOR_BYTES: u64 = 6_000_000;
pub(super) const RDWR_IO_BYTES: u64 = 128 << 10;
/// Overwritten in place: large enough that no block is written twice in a row.
pub(super) const SYNC_FILE_BYTES: u64 = 4 << 20;

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
    /// The directory of `root` through another mount, for cold rows.
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
        let dir = fs::canonicalize(dir).map_err(|e| failed("stat", dir, &e))?;
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

    // ---- Random reads

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
                self.pattern.write_headers(n, 0, &mut buf);
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
                self.pattern.write_headers(worker << 32 | n, 0, &mut buf);
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn small() -> Options {
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
        let (options, stop) = (small(), Stop::default());
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
        let (options, stop) = (small(), Stop::default());
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
        let (options, stop) = (small(), Stop::default());
        let mut scene = begin(dir.path(), &options, &stop);
        scene.measure(RowName::SmallWrite).unwrap();
        stop.set();
        assert!(scene.measure(RowName::SmallRead).is_err());
        assert!(dir.path().read_dir().unwrap().next().is_some());
        drop(scene);
        assert!(dir.path().read_dir().unwrap().next().is_none());
    }
}
