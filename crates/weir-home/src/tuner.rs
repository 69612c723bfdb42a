//! Tuning of a mover at one home: how many files in parallel, how far ahead it reads, how often it syncs.
//!
//! The number of streams is found by measurement: it starts at a value for the home's round trip, is doubled
//! while the rate grows by more than the noise, and is then changed in smaller steps in both directions; its
//! neighbours are tried again at intervals, because homes and loads change. Small files are packed: several
//! count as one stream if the home allows it. The window is the rate times the shortest time of a part: a
//! larger one brings no gain, and other clients' writes wait behind it. Pure.
use std::time::Duration;
use weir_proto::MIB;
use weir_proto::relation::RECEIPT_BLOCK;

/// Streams at most.
pub const STREAMS_MAX: usize = 64;
/// Streams at a home without latency.
const STREAMS_MIN_START: usize = 4;
/// One more at the start for each such part of the round trip.
const START_STEP: Duration = Duration::from_millis(4);
/// Small files that count as one stream, at a home that takes many calls.
const PACKED_MAX: usize = 16;
/// A file of this size is a stream of its own.
const PACKED_BYTES: u64 = MIB;
/// Two streams, and one part of each is read while another one is written; then the most that a mover may
/// have in memory.
const WINDOW_MIN: u64 = 4 * RECEIPT_BLOCK;
const WINDOW_MAX: u64 = 64 * RECEIPT_BLOCK;
/// Each range of at least a part is synced when it is written.
const EXTENT_BYTES: u64 = RECEIPT_BLOCK;
/// The cost of a file in addition to its bytes, as bytes: it makes rates of large and small files comparable.
pub const FILE_WORK: u64 = 64 << 10;
/// The shortest time of a part grows by this factor with each measurement, until it is measured again: homes
/// change.
const FORGET: f64 = 1.02;
/// A relative change of the rate below this is noise.
const NOISE: f64 = 0.05;
/// Steps, as factors: the next one when no neighbour at this distance is better.
const STEPS: [f64; 3] = [2.0, 1.5, 1.25];
/// Measurements without a better neighbour before one is tried again.
const REST: u32 = 8;
/// A measurement lasts as long as two files, within these limits.
const MEASURE_MIN: Duration = Duration::from_millis(250);
const MEASURE_MAX: Duration = Duration::from_secs(2);

/// The tuning of a mover at one home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Files that are written in parallel; several small ones count as one.
    pub streams: usize,
    /// Bytes that are read and not yet written at home, of all streams together.
    pub window_bytes: u64,
    /// A file is synced at home after this number of bytes.
    pub extent_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tuner {
    streams: usize,
    window_bytes: u64,
    /// The recent shortest time of a part.
    part_took: Option<Duration>,
    most: usize,
    /// Given, and not tuned.
    fixed: Option<Choice>,
    /// Work per second, and streams, before the last step.
    before: Option<(f64, usize)>,
    step: usize,
    up: bool,
    rest: u32,
}

impl Tuner {
    /// For a home that takes this number of calls in parallel.
    pub fn new(calls_max: usize) -> Tuner {
        let most = calls_max.clamp(1, STREAMS_MAX);
        Tuner {
            streams: STREAMS_MIN_START.min(most),
            window_bytes: WINDOW_MIN,
            part_took: None,
            most,
            fixed: None,
            before: None,
            step: 0,
            up: true,
            rest: 0,
        }
    }

    /// Sets the starting point for a home that answers after `round_trip`.
    pub fn begin_at(&mut self, round_trip: Duration) {
        let far = (round_trip.as_micros() / START_STEP.as_micros()) as usize;
        self.streams = STREAMS_MIN_START.saturating_add(far).min(STREAMS_MAX / 2).min(self.most);
    }

    /// Without tuning, for measurements.
    pub fn fixed(choice: Choice) -> Tuner {
        Tuner { fixed: Some(choice), ..Tuner::new(choice.streams) }
    }

    pub fn choice(&self) -> Choice {
        let Tuner { streams, window_bytes, most, .. } = *self;
        assert!(
            (1..=most).contains(&streams),
            "a mover without streams ships nothing, one with too many hangs"
        );
        assert!((WINDOW_MIN..=WINDOW_MAX).contains(&window_bytes), "a mover's memory is one window");
        self.fixed.unwrap_or(Choice { streams, window_bytes, extent_bytes: EXTENT_BYTES })
    }

    /// Parts took this long, each, from read to write, at this rate of bytes written home. The window
    /// becomes twice the bytes in flight, if parts do not wait behind others of ours.
    pub fn part_took(&mut self, took: Duration, bytes_per_s: f64) {
        let least = self.part_took.map_or(took, |least| least.mul_f64(FORGET).min(took));
        self.part_took = Some(least);
        let on_the_way = 2.0 * bytes_per_s * least.as_secs_f64();
        self.window_bytes = (on_the_way as u64).clamp(WINDOW_MIN, WINDOW_MAX);
    }

    /// The rate measured with the present number of streams, all of them busy. A measurement without enough
    /// work must not be passed here.
    pub fn measured(&mut self, rate: f64) {
        if self.rest > 0 {
            self.rest -= 1;
            self.before = Some((rate, self.streams));
            if self.rest == 0 {
                self.up = !self.up;
                self.go();
            }
            return;
        }
        let Some((before, streams)) = self.before.replace((rate, self.streams)) else {
            self.go();
            return;
        };
        // Fewer streams with the same rate are better: they cost less.
        let noise = if self.streams < streams { -NOISE } else { NOISE };
        if rate > before * (1.0 + noise) && self.go() {
            return;
        }
        if rate <= before * (1.0 + noise) {
            (self.streams, self.before) = (streams, Some((before, streams)));
        }
        self.step += 1;
        if self.step >= STEPS.len() {
            (self.step, self.rest) = (STEPS.len() - 1, REST);
            return;
        }
        self.go();
    }

    /// Makes a step; false: there is no room for one.
    fn go(&mut self) -> bool {
        let (now, factor) = (self.streams, STEPS[self.step]);
        let next = match self.up {
            true => ((now as f64 * factor) as usize).max(now + 1),
            false => ((now as f64 / factor) as usize).min(now.saturating_sub(1)),
        };
        self.streams = next.clamp(1, self.most);
        self.streams != now
    }
}

/// Where recently written files spent their time.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimeOf {
    pub reading: Duration,
    pub writing: Duration,
    /// Total time, and number of files.
    pub files: Duration,
    pub count: u32,
}

/// The limiting factor for a mover, in words.
pub fn limited_by(time: &TimeOf, choice: &Choice) -> String {
    let (bytes, streams) = (time.reading + time.writing, choice.streams);
    let each = time.files / time.count.max(1);
    if time.count > 0 && bytes < time.files / 2 {
        let ms = each.as_millis();
        return format!(
            "home answers late: {ms} ms for what each file needs beside its bytes, {streams} streams"
        );
    }
    let share = 100 * time.writing.max(time.reading).as_micros() / bytes.as_micros().max(1);
    match time.writing >= time.reading {
        true => {
            format!("home takes no more ({share} % of the time is spent writing there, {streams} streams)")
        }
        false => {
            format!("the volume gives no more ({share} % of the time is spent reading it, {streams} streams)")
        }
    }
}

/// In how many parts small files may share a stream, at a home that takes this number of calls in parallel.
pub fn packed(calls_max: usize) -> u64 {
    (calls_max / PACKED_MAX).clamp(1, PACKED_MAX) as u64
}

/// How many of these parts a file takes whose first range has this number of bytes.
pub fn share(bytes: u64, packed: u64) -> u64 {
    assert!(packed > 0, "a stream has at least one part");
    (bytes.min(PACKED_BYTES) * packed / PACKED_BYTES).max(1)
}

/// The duration of the next measurement, given the time that files took.
pub fn measure_for(file_took: Duration) -> Duration {
    (2 * file_took).clamp(MEASURE_MIN, MEASURE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A home with a rate per stream until `all` is reached; each stream costs the others a little.
    #[derive(Debug)]
    struct Model {
        each: f64,
        all: f64,
        loss: f64,
    }
    impl Model {
        fn rate(&self, streams: usize) -> f64 {
            (self.each * streams as f64).min(self.all) * (1.0 - self.loss * streams as f64)
        }
        fn best(&self, most: usize) -> f64 {
            (1..=most).map(|n| self.rate(n)).fold(0.0, f64::max)
        }
        /// The rates of this number of measurements.
        fn play(&self, tuner: &mut Tuner, measurements: usize) -> Vec<f64> {
            let one = |_| {
                let rate = self.rate(tuner.choice().streams);
                tuner.measured(rate);
                rate
            };
            (0..measurements).map(one).collect()
        }
    }

    #[test]
    fn a_stream_that_fills_the_path_gets_no_others_for_long() {
        let mut tuner = Tuner::new(STREAMS_MAX);
        Model { each: 100.0, all: 100.0, loss: 0.0 }.play(&mut tuner, 100);
        assert!(tuner.choice().streams <= 2, "{tuner:?}");
    }

    #[test]
    fn a_far_home_begins_with_a_larger_window_it_can_take() {
        for (calls_max, round_trip_ms, streams) in [
            (256, 0, 4),
            (256, 10, 6),
            (256, 80, 24),
            (256, 60_000, 32),
            (16, 100, 16),
            (1, 100, 1),
            (0, 0, 1),
        ] {
            let mut tuner = Tuner::new(calls_max);
            tuner.begin_at(Duration::from_millis(round_trip_ms));
            assert_eq!(tuner.choice().streams, streams, "{calls_max} calls, {round_trip_ms} ms");
        }
    }

    #[test]
    fn small_files_share_a_stream_where_home_takes_many_calls() {
        for (calls_max, parts) in [(0, 1), (16, 1), (64, 4), (256, 16), (10_000, 16)] {
            assert_eq!(packed(calls_max), parts, "{calls_max}");
        }
        for (bytes, parts, share_of_it) in [
            (0, 16, 1),
            (10_000, 16, 1),
            (MIB / 2, 16, 8),
            (MIB, 16, 16),
            (u64::MAX, 16, 16),
            (u64::MAX, 1, 1),
        ] {
            assert_eq!(share(bytes, parts), share_of_it, "{bytes} of {parts}");
        }
    }

    #[test]
    fn the_bottleneck_is_where_the_time_is_spent() {
        let ms = Duration::from_millis;
        let choice = Choice { streams: 7, window_bytes: 1, extent_bytes: 2 };
        for (reading, writing, files, count, words) in [
            (1, 9, 12, 1, "home takes no more (90 % of the time is spent writing there, 7 streams)"),
            (9, 1, 12, 1, "the volume gives no more (90 % of the time is spent reading it, 7 streams)"),
            (1, 9, 900, 3, "home answers late: 300 ms for what each file needs beside its bytes, 7 streams"),
            // A long file that has not ended.
            (1, 3, 0, 0, "home takes no more (75 % of the time is spent writing there, 7 streams)"),
            (0, 0, 0, 0, "home takes no more (0 % of the time is spent writing there, 7 streams)"),
        ] {
            let time = TimeOf { reading: ms(reading), writing: ms(writing), files: ms(files), count };
            assert_eq!(limited_by(&time, &choice), words);
        }
    }

    #[test]
    fn a_fixed_choice_stays() {
        let choice = Choice { streams: 7, window_bytes: 1, extent_bytes: 2 };
        let mut tuner = Tuner::fixed(choice);
        for rate in 1..100 {
            tuner.measured(f64::from(rate * rate));
            tuner.part_took(Duration::from_secs(1), 1e9);
        }
        assert_eq!(tuner.choice(), choice);
    }

    proptest! {
        /// For each path the result is soon within a tenth of the optimum, and stays there.
        #[test]
        fn the_chosen_streams_reach_nearly_the_best_rate(
            each in 1.0f64..50.0,
            streams in 1.0f64..64.0,
            loss in 0.0f64..0.005,
            round_trip_ms in 0u64..200,
        ) {
            let model = Model { each, all: each * streams, loss };
            let mut tuner = Tuner::new(STREAMS_MAX);
            tuner.begin_at(Duration::from_millis(round_trip_ms));
            let rates = model.play(&mut tuner, 120);
            let late = rates[60..].iter().sum::<f64>() / 60.0;
            prop_assert!(late >= model.best(STREAMS_MAX) * 0.9, "{late} of {} with {tuner:?}", model.best(STREAMS_MAX));
        }

        #[test]
        fn the_window_is_within_its_limits(took_ms in 0u64..100_000, rate in 0.0f64..1e12) {
            let mut tuner = Tuner::new(16);
            tuner.part_took(Duration::from_millis(took_ms), rate);
            let window = tuner.choice().window_bytes;
            prop_assert!((WINDOW_MIN..=WINDOW_MAX).contains(&window));
            prop_assert!(window == WINDOW_MAX || window as f64 + 1.0 >= 2.0 * rate * took_ms as f64 / 1e3);
        }

        /// Parts that wait behind others of ours take longer: that must not enlarge the window.
        #[test]
        fn a_window_does_not_grow_by_what_it_holds_up(took_ms in 100u64..1000) {
            let mut tuner = Tuner::new(16);
            tuner.part_took(Duration::from_millis(50), 1e9);
            let before = tuner.choice().window_bytes;
            for _ in 0..10 {
                tuner.part_took(Duration::from_millis(took_ms), 1e9);
            }
            prop_assert!(tuner.choice().window_bytes <= before + before / 4);
            // A path that has become slower is detected after a while.
            for _ in 0..1000 {
                tuner.part_took(Duration::from_millis(took_ms), 1e8);
            }
            prop_assert!(tuner.choice().window_bytes as f64 + 1.0 >= 2.0 * 1e8 * took_ms as f64 / 1e3);
        }
    }
}
