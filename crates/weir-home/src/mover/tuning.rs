//! The tuning of a mover by measurement: how long its streams read and write, and what limits them.
use super::{Relation, Shared, lock};
use crate::Home;
use crate::tuner::{self, FILE_WORK, TimeOf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;
use weir_proto::relation::BANDWIDTH_LIMIT;

/// Where streams spend their time.
#[derive(Default)]
pub(super) struct Meter {
    pub(super) bytes: AtomicU64,
    pub(super) reading_us: AtomicU64,
    pub(super) writing_us: AtomicU64,
    /// Waits for the bandwidth limit.
    pub(super) paced_us: AtomicU64,
    /// Time from the read of a part to its write, and the number of parts.
    pub(super) part_us: AtomicU64,
    pub(super) parts: AtomicU64,
    pub(super) file_us: AtomicU64,
    pub(super) files: AtomicU64,
    /// Written files, in units of work.
    pub(super) file_work: AtomicU64,
    pub(super) busy: AtomicUsize,
}

impl Shared {
    /// How long a small request takes there.
    async fn round_trip(&self, home: &dyn Home) -> Duration {
        let begun = self.env.clock.now();
        let _ = home.space().await; // an unreachable home reports an error when it is used
        self.env.clock.now().since(begun)
    }

    fn apply_tuner(&self, relation: &Relation) {
        let choice = lock(&relation.tuner).choice();
        relation.streams.set_limit(choice.streams as u64 * relation.packed);
        relation.window.set_limit(choice.window_bytes);
    }

    pub(super) async fn keep_tuning(&self, relation: &Relation) {
        if self.fixed.is_none() {
            // The assigned work has begun and does not wait for this measurement.
            let round_trip = self.round_trip(&*relation.home).await;
            lock(&relation.tuner).begin_at(round_trip);
            self.apply_tuner(relation);
        }
        let (meter, mut last, mut since) = (&relation.meter, (0, 0), self.env.clock.now());
        loop {
            let TimeOf { files, count, .. } = meter.time();
            self.env.clock.sleep(tuner::measure_for(files / count.max(1))).await;
            let (bytes, work, now) =
                (meter.bytes.load(Relaxed), meter.file_work.load(Relaxed), self.env.clock.now());
            assert!(bytes >= last.0 && work >= last.1, "a meter of a mover went back: rates would be absurd");
            let seconds = now.since(since).as_secs_f64().max(0.001);
            let rate = |n: u64| n as f64 / seconds;
            let (bytes_per_s, work_per_s) = (rate(bytes - last.0), rate(bytes - last.0 + work - last.1));
            let waiting = lock(&relation.files).len() > meter.busy.load(Relaxed);
            let began = (bytes, work) != (0, 0);
            (last, since) = ((bytes, work), now);
            {
                let mut tuner = lock(&relation.tuner);
                if let Some(each) = meter.part_us.load(Relaxed).checked_div(meter.parts.load(Relaxed)) {
                    tuner.part_took(Duration::from_micros(each), bytes_per_s);
                }
                if waiting && began {
                    tuner.measured(work_per_s);
                }
            }
            self.apply_tuner(relation);
            // Older measurements count less.
            let Meter { reading_us, writing_us, paced_us, part_us, parts, file_us, files, .. } = meter;
            for meter in [reading_us, writing_us, paced_us, part_us, parts, file_us, files] {
                meter.store(meter.load(Relaxed) / 2, Relaxed);
            }
        }
    }

    /// The limiting factor for this mover, in words; empty if it has no more work.
    pub(super) fn limited_by(&self) -> String {
        let relations = lock(&self.relations);
        let Some(busiest) = relations.values().max_by_key(|r| r.meter.busy.load(Relaxed)) else {
            return String::new();
        };
        if busiest.meter.busy.load(Relaxed) == 0 {
            return String::new();
        }
        let time = busiest.meter.time();
        let paced = Duration::from_micros(busiest.meter.paced_us.load(Relaxed));
        if paced > time.reading + time.writing {
            return BANDWIDTH_LIMIT.to_owned();
        }
        tuner::limited_by(&time, &lock(&busiest.tuner).choice())
    }
}

impl Meter {
    /// A file was written, or given up.
    pub(super) fn file_ended(&self, took: Duration) {
        let busy = self.busy.fetch_sub(1, Relaxed);
        assert!(busy > 0, "a stream ended that had not begun");
        self.files.fetch_add(1, Relaxed);
        self.file_work.fetch_add(FILE_WORK, Relaxed);
        self.file_us.fetch_add(took.as_micros() as u64, Relaxed);
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
