//! The tuning of a mover by measurement: how long its streams read and write, and what limits them.
use super::lock;
use super::queues::FileQueues;
use crate::Home;
use crate::gate::{Gate, Pass};
use crate::tuner::{self, Choice, FILE_WORK, TimeOf, Tuner};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;
use weir_env::Clock;
use weir_proto::relation::BANDWIDTH_LIMIT;

/// The streams to one home: their limits, and the measurements that these follow.
pub(super) struct Tuning {
    /// Limits files that are written, in parts of streams.
    streams: Gate,
    /// Limits bytes that are read and not written yet.
    pub(super) window: Gate,
    /// Parts of a stream.
    packed: u64,
    tuner: Mutex<Tuner>,
    is_fixed: bool,
    pub(super) meter: Meter,
}

/// Where streams spend their time.
#[derive(Default)]
pub(super) struct Meter {
    bytes: AtomicU64,
    reading_us: AtomicU64,
    writing_us: AtomicU64,
    /// Waits for the bandwidth limit.
    paced_us: AtomicU64,
    /// Time from the read of a part to its write, and the number of parts.
    part_us: AtomicU64,
    parts: AtomicU64,
    file_us: AtomicU64,
    files: AtomicU64,
    /// Written files, in units of work.
    file_work: AtomicU64,
    busy: AtomicUsize,
}

impl Tuning {
    /// `fixed`: nothing is measured.
    pub(super) fn new(fixed: Option<Choice>, calls_max: usize) -> Tuning {
        let tuner = match fixed {
            Some(choice) => Tuner::fixed(choice),
            None => Tuner::new(calls_max),
        };
        let (packed, choice) = (tuner::packed(calls_max), tuner.choice());
        Tuning {
            streams: Gate::new(choice.streams as u64 * packed),
            window: Gate::new(choice.window_bytes),
            packed,
            tuner: Mutex::new(tuner),
            is_fixed: fixed.is_some(),
            meter: Meter::default(),
        }
    }

    /// Waits for a stream, or for the part of one that suffices for these bytes.
    pub(super) async fn stream(&self, bytes: u64) -> Pass {
        self.streams.pass(tuner::share(bytes, self.packed)).await
    }

    /// Bytes of a file that are synced together.
    pub(super) fn extent_bytes(&self) -> u64 {
        lock(&self.tuner).choice().extent_bytes
    }

    /// Files that are being written.
    pub(super) fn busy(&self) -> usize {
        self.meter.busy.load(Relaxed)
    }

    fn apply(&self) {
        let choice = lock(&self.tuner).choice();
        self.streams.set_limit(choice.streams as u64 * self.packed);
        self.window.set_limit(choice.window_bytes);
    }

    /// Measures, and adapts the limits, as long as the session lasts.
    pub(super) async fn keep(&self, clock: &Clock, home: &dyn Home, files: &FileQueues) {
        if !self.is_fixed {
            // The assigned work has begun and does not wait for this measurement.
            let begun = clock.now();
            let _ = home.space().await; // an unreachable home reports an error when it is used
            lock(&self.tuner).begin_at(clock.now().since(begun));
            self.apply();
        }
        let (meter, mut last, mut since) = (&self.meter, (0, 0), clock.now());
        loop {
            let time = meter.time();
            clock.sleep(tuner::measure_for(time.files / time.count.max(1))).await;
            let (bytes, work, now) = (meter.bytes.load(Relaxed), meter.file_work.load(Relaxed), clock.now());
            assert!(bytes >= last.0 && work >= last.1, "a meter of a mover went back: rates would be absurd");
            let seconds = now.since(since).as_secs_f64().max(0.001);
            let rate = |n: u64| n as f64 / seconds;
            let (bytes_per_s, work_per_s) = (rate(bytes - last.0), rate(bytes - last.0 + work - last.1));
            let waiting = files.files() > meter.busy.load(Relaxed);
            let began = (bytes, work) != (0, 0);
            (last, since) = ((bytes, work), now);
            {
                let mut tuner = lock(&self.tuner);
                if let Some(each) = meter.part_us.load(Relaxed).checked_div(meter.parts.load(Relaxed)) {
                    tuner.part_took(Duration::from_micros(each), bytes_per_s);
                }
                if waiting && began {
                    tuner.measured(work_per_s);
                }
            }
            self.apply();
            // Older measurements count less.
            let Meter { reading_us, writing_us, paced_us, part_us, parts, file_us, files, .. } = meter;
            for meter in [reading_us, writing_us, paced_us, part_us, parts, file_us, files] {
                meter.store(meter.load(Relaxed) / 2, Relaxed);
            }
        }
    }

    /// The limiting factor, in words; empty without work.
    pub(super) fn limited_by(&self) -> String {
        if self.busy() == 0 {
            return String::new();
        }
        let time = self.meter.time();
        let paced = Duration::from_micros(self.meter.paced_us.load(Relaxed));
        if paced > time.reading + time.writing {
            return BANDWIDTH_LIMIT.to_owned();
        }
        tuner::limited_by(&time, &lock(&self.tuner).choice())
    }
}

impl Meter {
    pub(super) fn file_began(&self) {
        self.busy.fetch_add(1, Relaxed);
    }
    /// A range was written.
    pub(super) fn shipped(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
    }
    pub(super) fn read_for(&self, took: Duration) {
        self.reading_us.fetch_add(micros(took), Relaxed);
    }
    pub(super) fn paced_for(&self, took: Duration) {
        self.paced_us.fetch_add(micros(took), Relaxed);
    }
    /// `since_asked`: from the beginning of its read.
    pub(super) fn part_written(&self, took: Duration, since_asked: Duration) {
        self.writing_us.fetch_add(micros(took), Relaxed);
        self.part_us.fetch_add(micros(since_asked), Relaxed);
        self.parts.fetch_add(1, Relaxed);
    }
    /// A file was written, or given up.
    pub(super) fn file_ended(&self, took: Duration) {
        let busy = self.busy.fetch_sub(1, Relaxed);
        assert!(busy > 0, "a stream ended that had not begun");
        self.files.fetch_add(1, Relaxed);
        self.file_work.fetch_add(FILE_WORK, Relaxed);
        self.file_us.fetch_add(micros(took), Relaxed);
    }
    fn time(&self) -> TimeOf {
        let of = |us: &AtomicU64| Duration::from_micros(us.load(Relaxed));
        TimeOf {
            reading: of(&self.reading_us),
            writing: of(&self.writing_us),
            files: of(&self.file_us),
            count: self.files.load(Relaxed) as u32,
        }
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}
