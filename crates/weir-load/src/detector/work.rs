//! The work of one detector: its frames, each due at its time, are written by some writers and read back.
use crate::block::{Mismatch, Pattern};
use crate::failure::failed;
use crate::frames::{Frame, load};
use crate::work::{Outcome, open_maybe_direct, touched};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use weir_proto::{Error, Result};

/// A frame that ends more than this many frame periods after it was due is late.
const LATE_PERIODS: f64 = 10.0;

/// Progress of detectors; sums over all.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Progress {
    pub frames_done: u64,
    pub frames_total: u64,
    pub bytes_done: u64,
    pub late: u64,
    pub failed: u64,
}

/// Counts while detectors run; read it from another thread.
#[derive(Default, Debug)]
pub struct Watch {
    frames_done: AtomicU64,
    frames_total: AtomicU64,
    bytes_done: AtomicU64,
    pub(super) late: AtomicU64,
    pub(super) failed: AtomicU64,
}

impl Watch {
    pub fn progress(&self) -> Progress {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Progress {
            frames_done: read(&self.frames_done),
            frames_total: read(&self.frames_total),
            bytes_done: read(&self.bytes_done),
            late: read(&self.late),
            failed: read(&self.failed),
        }
    }
}

/// One detector.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DetectorWork {
    pub(super) dir: PathBuf,
    pub(super) detector: u64,
    pub(super) frame_count: u64,
    pub(super) hz: f64,
    pub(super) frame_bytes: u64,
    pub(super) frames: Option<PathBuf>,
    pub(super) append: bool,
    pub(super) writers: u64,
    pub(super) fsync: bool,
    pub(super) direct: bool,
    pub(super) seed: u64,
    #[serde(skip)]
    pub(super) watch: Option<Arc<Watch>>,
}

/// Content of the frames.
enum Source {
    Synthesized(Pattern),
    Replayed(Vec<Frame>),
}

impl Source {
    fn of(work: &DetectorWork) -> Result<Source> {
        Ok(match &work.frames {
            Some(dir) => Source::Replayed(load(dir)?),
            None => Source::Synthesized(Pattern::new(work.seed)),
        })
    }
}

/// Shared by the writers of one detector.
struct Run<'a> {
    work: &'a DetectorWork,
    source: &'a Source,
    start: Instant,
    next: AtomicU64,
    done: AtomicU64,
    /// The one file of a detector that appends.
    appended: Option<File>,
}

impl DetectorWork {
    pub(crate) fn run(&self, gate: &mut dyn FnMut() -> Result<Instant>) -> Result<Outcome> {
        let source = Source::of(self)?;
        let mut buffers: Vec<_> = (0..self.writers).map(|_| self.own_buffer(&source)).collect();
        let appended = if self.append { Some(self.create(&self.path(0))?) } else { None };
        let start = gate()?;
        if let Some(watch) = &self.watch {
            watch.frames_total.fetch_add(self.frame_count, Ordering::Relaxed);
        }
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let run = Run { work: self, source: &source, start, next, done, appended };
        let total = Mutex::new(Outcome::default());
        std::thread::scope(|scope| {
            for buffer in &mut buffers {
                let (run, total) = (&run, &total);
                scope.spawn(move || {
                    let outcome = run.write_frames(buffer);
                    total.lock().unwrap_or_else(PoisonError::into_inner).merge(outcome);
                });
            }
        });
        drop(run);
        Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// A writer's synthesized frame, filled: only its headers change from frame to frame.
    fn own_buffer(&self, source: &Source) -> weir_env::Buf {
        match source {
            Source::Replayed(_) => touched(0),
            Source::Synthesized(pattern) => {
                let mut buf = touched((self.frame_bytes as usize).next_multiple_of(crate::block::BLOCK));
                pattern.fill(0, 0, &mut buf);
                buf
            }
        }
    }

    fn object(&self, n: u64) -> u64 {
        self.detector << 40 | n
    }

    pub(super) fn path(&self, n: u64) -> PathBuf {
        let name = if self.append { "frames.raw".to_string() } else { format!("frame-{n:06}.cbf") };
        self.dir.join(name)
    }

    fn create(&self, path: &Path) -> Result<File> {
        // Appended frames do not begin at multiples of a block.
        let direct = self.direct && !self.append;
        let created = open_maybe_direct(path, direct, |o| {
            o.write(true).create_new(true);
        });
        created.map_err(|e| failed("create", path, &e))
    }

    fn due(&self, start: Instant, n: u64) -> Option<Instant> {
        (self.hz > 0.0).then(|| start + Duration::from_secs_f64(n as f64 / self.hz))
    }

    /// Reads every frame and compares.
    pub(crate) fn check(&self, gate: &mut dyn FnMut() -> Result<Instant>) -> Result<Outcome> {
        let source = Source::of(self)?;
        let longest = match &source {
            Source::Synthesized(_) => self.frame_bytes as usize,
            Source::Replayed(frames) => frames.iter().map(|f| f.len).max().unwrap_or(0),
        };
        let mut buf = touched(longest);
        let start = gate()?;
        let mut outcome = Outcome::default();
        let mut offset = 0;
        for n in 0..self.frame_count {
            let len = source.len(n, self.frame_bytes);
            match self
                .read_frame(n, offset, &mut buf[..len])
                .and_then(|()| self.compare(&source, n, &buf[..len]))
            {
                Ok(()) => {
                    outcome.ops += 1;
                    outcome.bytes += len as u64;
                }
                Err(e) => outcome.bad(|| format!("frame {n} of detector {}: {e}", self.detector)),
            }
            if self.append {
                offset += len as u64;
            }
        }
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    fn read_frame(&self, n: u64, offset: u64, buf: &mut [u8]) -> Result<()> {
        let path = self.path(n);
        let io = |e: io::Error| failed("read", &path, &e);
        let file = File::open(&path).map_err(io)?;
        let end = file.metadata().map_err(io)?.len();
        // Direct I/O writes whole blocks; a frame within a file is bounded by the next one.
        let expected =
            if self.direct { buf.len().next_multiple_of(crate::block::BLOCK) } else { buf.len() } as u64;
        if !self.append && end != expected {
            return Err(Error::damaged(format!(
                "{} is {end} bytes long, {expected} were written",
                path.display()
            )));
        }
        file.read_exact_at(buf, offset).map_err(io)
    }

    fn compare(&self, source: &Source, n: u64, read: &[u8]) -> Result<()> {
        let differs = |at: u64| Error::damaged(format!("{} differs at byte {at}", self.path(n).display()));
        match source {
            Source::Synthesized(pattern) => {
                pattern.check(self.object(n), 0, read).map_err(|Mismatch { offset }| differs(offset))
            }
            Source::Replayed(frames) => {
                let frame = frames[(n % frames.len() as u64) as usize].bytes();
                match frame.iter().zip(read).position(|(a, b)| a != b) {
                    _ if frame == read => Ok(()), // at memory speed; the offset matters only if it differs
                    at => Err(differs(at.unwrap_or(read.len()) as u64)),
                }
            }
        }
    }
}

impl Source {
    pub(super) fn len(&self, n: u64, frame_bytes: u64) -> usize {
        match self {
            Source::Synthesized(_) => frame_bytes as usize,
            Source::Replayed(frames) => frames[(n % frames.len() as u64) as usize].len,
        }
    }
}

impl Run<'_> {
    fn write_frames(&self, buffer: &mut [u8]) -> Outcome {
        let mut outcome = Outcome::default();
        let mut offset = 0;
        loop {
            let n = self.next.fetch_add(1, Ordering::Relaxed);
            if n >= self.work.frame_count {
                return outcome;
            }
            let due = self.work.due(self.start, n);
            if let Some(wait) = due.and_then(|due| due.checked_duration_since(Instant::now())) {
                std::thread::sleep(wait);
            }
            let from = Instant::now();
            let written = self.write_frame(n, &mut offset, buffer);
            self.account(&mut outcome, n, from, due, written);
        }
    }

    fn write_frame(&self, n: u64, offset: &mut u64, buffer: &mut [u8]) -> Result<u64> {
        let work = self.work;
        let len = self.source.len(n, work.frame_bytes);
        let whole = if work.direct && !work.append { len.next_multiple_of(crate::block::BLOCK) } else { len };
        let bytes = match self.source {
            Source::Replayed(frames) => &frames[(n % frames.len() as u64) as usize].blocks[..whole],
            Source::Synthesized(pattern) => {
                pattern.write_headers(work.object(n), 0, buffer);
                &buffer[..whole]
            }
        };
        let path = work.path(n);
        let created;
        let file = match &self.appended {
            Some(file) => file,
            None => {
                created = work.create(&path)?;
                &created
            }
        };
        file.write_all_at(bytes, *offset).map_err(|e| failed("write", &path, &e))?;
        if work.append {
            *offset += len as u64;
        }
        if work.fsync {
            file.sync_all().map_err(|e| failed("fsync", &path, &e))?;
        }
        Ok(len as u64)
    }

    fn account(
        &self,
        outcome: &mut Outcome,
        n: u64,
        from: Instant,
        due: Option<Instant>,
        written: Result<u64>,
    ) {
        let now = Instant::now();
        let lateness = now.duration_since(due.unwrap_or(from).min(from));
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let elapsed = now.duration_since(self.start).as_secs_f64();
        outcome.seconds = elapsed;
        outcome.latency.record(now.duration_since(from));
        outcome.lateness.record(lateness);
        let late = self.work.hz > 0.0 && lateness.as_secs_f64() > LATE_PERIODS / self.work.hz;
        outcome.late += u64::from(late);
        if self.work.hz > 0.0 {
            let due_by_now = ((elapsed * self.work.hz) as u64 + 1).min(self.work.frame_count);
            outcome.backlog_max = outcome.backlog_max.max(due_by_now.saturating_sub(done));
        }
        let bytes = *written.as_ref().unwrap_or(&0);
        match written {
            Ok(bytes) => {
                outcome.ops += 1;
                outcome.bytes += bytes;
            }
            Err(e) => {
                outcome.failed += 1;
                outcome.first_bad.get_or_insert_with(|| format!("frame {n}: {e}"));
            }
        }
        if let Some(watch) = &self.work.watch {
            watch.frames_done.fetch_add(1, Ordering::Relaxed);
            watch.bytes_done.fetch_add(bytes, Ordering::Relaxed);
            watch.late.fetch_add(u64::from(late), Ordering::Relaxed);
            watch.failed.fetch_add(u64::from(bytes == 0), Ordering::Relaxed);
        }
    }
}
