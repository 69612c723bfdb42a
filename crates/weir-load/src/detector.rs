//! Detectors that write frames at a fixed rate, regardless of the file system's speed.
//!
//! Frame n is due at n / rate after the start. The time of a frame that starts late because the previous one
//! was slow counts from its due time. Afterwards every frame is read back and compared.

use crate::cpu::Cpu;
use crate::failure::failed;
use crate::options::{Common, parse_bytes};
use crate::report::{Report, Sample};
use crate::runner::{Place, repeat};
use crate::work::{Launch, Work};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use weir_proto::{Error, Result};

pub(crate) mod work;

pub(crate) use work::DetectorWork;
pub use work::{Progress, Watch};

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: Common,
    /// Number of detectors; each has a directory (`--jobs` is not used)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub detectors: u16,
    /// Frames a second of each detector; 0: as fast as possible
    #[arg(long, default_value_t = 25.0)]
    pub hz: f64,
    /// Size of a synthesized frame
    #[arg(long, default_value = "6.25MB", value_parser = parse_bytes)]
    pub frame_bytes: u64,
    /// Seconds
    #[arg(long, default_value_t = 20.0)]
    pub duration: f64,
    /// At most this many frames of each detector (needed with `--hz 0`)
    #[arg(long)]
    pub frames_max: Option<u64>,
    /// Replay the frames (*.cbf, *.cbf.bz2) of this directory
    #[arg(long, value_name = "DIR")]
    pub frames: Option<PathBuf>,
    /// Append the frames of a detector to one file instead of making a file for each
    #[arg(long)]
    pub append: bool,
    /// Frames of one detector that may be written at the same time
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub writers: u16,
    /// fsync each frame before it is closed
    #[arg(long)]
    pub fsync: bool,
    /// Search for the highest rate without a late frame, from `--hz` on; each try lasts `--duration` and is
    /// read back
    #[arg(long, conflicts_with = "baseline")]
    pub highest: bool,
}

impl Options {
    /// Two detectors, 25 Hz × 6.25 MB for 20 s, one run.
    pub fn at(dir: impl Into<PathBuf>) -> Options {
        Options {
            common: Common { runs: 1, ..Common::at(dir) },
            detectors: 2,
            hz: 25.0,
            frame_bytes: 6_250_000,
            duration: 20.0,
            frames_max: None,
            frames: None,
            append: false,
            writers: 1,
            fsync: false,
            highest: false,
        }
    }

    fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::invalid(what.to_string()));
        if !(self.hz.is_finite() && (0.0..=100_000.0).contains(&self.hz)) {
            return refuse("a detector's rate is 0 to 100,000 Hz");
        }
        if !(self.duration.is_finite() && self.duration > 0.0) {
            return refuse("the duration must be positive");
        }
        if self.hz == 0.0 && self.frames_max.is_none() {
            return refuse("a detector without a rate needs --frames-max");
        }
        if self.highest && self.hz == 0.0 {
            return refuse("--highest begins at a rate: give --hz");
        }
        if self.append && self.writers > 1 {
            return refuse("a detector that appends has one writer");
        }
        Ok(())
    }

    fn frame_count(&self) -> u64 {
        let by_time = if self.hz > 0.0 { (self.hz * self.duration).ceil() as u64 } else { u64::MAX };
        by_time.min(self.frames_max.unwrap_or(u64::MAX)).max(1)
    }
}

/// Runs detectors and reads their frames back.
pub fn run(options: &Options) -> Result<Report> {
    run_watched(options, &Arc::default())
}

/// [`run`], with counters to read meanwhile (detectors that are processes are not counted there).
pub fn run_watched(options: &Options, watch: &Arc<Watch>) -> Result<Report> {
    options.check()?;
    let notes = [
        "frames are in memory, touched, before the start; a frame's time is from create to close",
        "late: ended more than 10 frame periods after it was due",
    ];
    repeat("detector", options, &options.common, &notes, |place| match options.highest {
        true => highest(options, place, watch),
        false => Ok(once(options, place, watch)?.samples),
    })
}

/// A search for the highest rate: up in steps until one is too high, then halving the distance.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Search {
    good: Option<f64>,
    bad: Option<f64>,
}

impl Search {
    /// Factor of a step up; the search ends below this ratio of bad to good.
    const STEP: f64 = 1.4;
    const CLOSE: f64 = 1.04;
    /// The search stops below this rate.
    const HZ_MIN: f64 = 0.1;

    fn note(&mut self, hz: f64, good: bool) {
        match good {
            true => self.good = Some(hz),
            false => self.bad = Some(hz),
        }
    }
    fn next(&self, first: f64) -> Option<f64> {
        match (self.good, self.bad) {
            (None, None) => Some(first),
            (Some(good), None) => Some(good * Search::STEP),
            (None, Some(bad)) => Some(bad / Search::STEP).filter(|hz| *hz >= Search::HZ_MIN),
            (Some(good), Some(bad)) => (bad / good > Search::CLOSE).then(|| (good * bad).sqrt()),
        }
    }
}

fn highest(options: &Options, place: &mut Place, watch: &Arc<Watch>) -> Result<Vec<Sample>> {
    let mut search = Search { good: None, bad: None };
    let mut best = None;
    let mut tries = 0;
    while let Some(hz) = search.next(options.hz) {
        tries += 1;
        let mut tried = Place { dirs: place.sub_dirs(&format!("try-{tries}"))?, ..place.clone() };
        let ran = once(&Options { hz, ..options.clone() }, &mut tried, watch)?;
        // Wrong bytes do not depend on the rate.
        (place.bad, place.first_bad) = (tried.bad, tried.first_bad);
        search.note(hz, ran.late == 0 && ran.failed == 0);
        if ran.late == 0 && ran.failed == 0 {
            best = Some((hz, ran.samples));
        }
        for dir in &tried.dirs[..1] {
            std::fs::remove_dir_all(dir).map_err(|e| failed("remove the directory", dir, &e))?;
        }
    }
    let (hz, samples) = best.ok_or_else(|| Error::invalid("no rate was without late frames"))?;
    let highest = [
        Sample::rate("highest rate of each", "Hz", hz),
        Sample::cost("lowest rate with late frames", "Hz", search.bad.unwrap_or(f64::INFINITY)),
    ];
    Ok(highest.into_iter().chain(samples).collect())
}

struct Ran {
    samples: Vec<Sample>,
    late: u64,
    failed: u64,
}

fn once(options: &Options, place: &mut Place, watch: &Arc<Watch>) -> Result<Ran> {
    let works: Vec<DetectorWork> =
        (0..usize::from(options.detectors)).map(|d| work(options, place, d)).collect();
    for work in &works {
        std::fs::create_dir_all(&work.dir).map_err(|e| failed("make the directory", &work.dir, &e))?;
    }
    let watched = !place.direct && matches!(place.launch, Launch::Threads);
    let watch = watched.then(|| watch.clone());
    let attach = |w: &DetectorWork| Work::Detector(DetectorWork { watch: watch.clone(), ..w.clone() });
    let cpu = Cpu::start(&options.common.watched);
    let ran = place.launch.run(&works.iter().map(attach).collect::<Vec<_>>())?;
    let ran = place.note(ran);
    let cpu = if place.direct { Vec::new() } else { cpu.per_gb(&CPU, ran.bytes) };
    let checks: Vec<Work> = (0..works.len())
        .map(|d| {
            // Through the next mount, if there are several.
            let dir = place.dir(d + 1).join(dir_name(d));
            Work::DetectorCheck(DetectorWork { dir, ..works[d].clone() })
        })
        .collect();
    let read = place.launch.run(&checks)?;
    let read = place.note(read);
    let mut samples = vec![
        Sample::rate("payload", "MB/s", ran.bytes as f64 / ran.seconds / 1e6),
        Sample::rate("frames", "1/s", ran.ops_per_s()),
        Sample::cost("create to close p50", "ms", ran.latency.quantile_us(0.5) / 1e3),
        Sample::cost("create to close p99", "ms", ran.latency.quantile_us(0.99) / 1e3),
        Sample::cost("create to close p99.9", "ms", ran.latency.quantile_us(0.999) / 1e3),
        Sample::cost("due to close p99.9", "ms", ran.lateness.quantile_us(0.999) / 1e3),
        Sample::cost("largest backlog", "frames", ran.backlog_max as f64),
        Sample::cost("late frames", "frames", ran.late as f64),
        Sample::cost("failed frames", "frames", ran.failed as f64),
        Sample::cost("bad frames", "frames", read.bad as f64),
        Sample::rate("read back", "MB/s", read.bytes as f64 / read.seconds / 1e6),
    ];
    samples.extend(cpu);
    Ok(Ran { samples, late: ran.late, failed: ran.failed })
}

const CPU: [&str; 8] = [
    "client, user",
    "client, kernel",
    "storage, user",
    "storage, kernel",
    "metadata and coordinator",
    "application",
    "rest of the machine",
    "all",
];

fn dir_name(detector: usize) -> String {
    format!("detector-{detector}")
}

fn work(options: &Options, place: &Place, detector: usize) -> DetectorWork {
    DetectorWork {
        dir: place.dir(detector).join(dir_name(detector)),
        detector: detector as u64,
        frame_count: options.frame_count(),
        hz: options.hz,
        frame_bytes: options.frame_bytes,
        frames: options.frames.clone(),
        append: options.append,
        writers: u64::from(options.writers),
        fsync: options.fsync,
        direct: place.direct,
        seed: options.common.seed,
        watch: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::time::Instant;

    /// A file system that loses writes: finished frames are changed before they are read back.
    #[test]
    fn a_wrong_byte_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let work = DetectorWork {
            dir: dir.path().to_path_buf(),
            detector: 0,
            frame_count: 12,
            hz: 0.0,
            frame_bytes: 123_457,
            frames: None,
            append: false,
            writers: 2,
            fsync: false,
            direct: false,
            seed: 5,
            watch: None,
        };
        let gate = &mut || Ok(Instant::now());
        assert_eq!(work.run(gate).unwrap().ops, 12);
        assert_eq!(work.check(gate).unwrap().bad, 0);
        let third = std::fs::OpenOptions::new().write(true).open(work.path(3)).unwrap();
        third.write_all_at(b"x", 100_000).unwrap();
        std::fs::remove_file(work.path(7)).unwrap();
        let found = work.check(gate).unwrap();
        assert_eq!((found.ops, found.bad), (10, 2), "{:?}", found.first_bad);
    }

    #[test]
    fn the_search_ends_close_below_the_limit() {
        for (first, limit) in [(25.0, 61.0), (100.0, 61.0), (61.0, 61.0), (1.0, 4000.0), (900.0, 0.5)] {
            let mut search = Search { good: None, bad: None };
            let mut tries = 0;
            while let Some(hz) = search.next(first) {
                tries += 1;
                search.note(hz, hz <= limit);
            }
            let good = search.good.unwrap();
            assert!(good <= limit && good * Search::CLOSE >= limit, "{first} {limit}: {good}");
            assert!(tries < 40, "{tries} tries");
        }
        let mut search = Search { good: None, bad: None };
        while let Some(hz) = search.next(25.0) {
            search.note(hz, false);
        }
        assert_eq!(search.good, None, "it ends if no rate is good");
    }
}
