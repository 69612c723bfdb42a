//! How a mover works at one home: how many files at the same time, how far ahead it reads, how often it
//! syncs.
//!
//! Streams are found by trying: begun with what the home's round trip asks for, doubled while the rate grows
//! by more than the noise, then in smaller steps back and forth; now and then the neighbours are tried again,
//! because homes and loads change. Small files are packed: several of them count as one stream where the home
//! takes that. The window is what the rate makes of the time that a piece takes at best: a larger one brings
//! no more, and whoever writes here waits behind what it holds. Pure.
use std::time::Duration;
use weir_proto::MIB;
use weir_proto::relation::RECEIPT_BLOCK;

/// Streams at most.
pub const STREAMS_MAX: usize = 64;
/// Streams at a home that answers at once.
const STREAMS_MIN_START: usize = 4;
/// One more at the start for so much of a round trip.
const START_STEP: Duration = Duration::from_millis(4);
/// Small files that count as one stream, of a home that takes many calls.
const PACKED_MAX: usize = 16;
/// A file of so much is a stream of its own.
const PACKED_BYTES: u64 = MIB;
/// Two streams, and one piece of each is read while another one is written; what a mover may have in memory
/// at most.
const WINDOW_MIN: u64 = 4 * RECEIPT_BLOCK;
const WINDOW_MAX: u64 = 64 * RECEIPT_BLOCK;
/// Each range of at least a piece is synced when it is written.
const EXTENT_BYTES: u64 = RECEIPT_BLOCK;
/// What a file costs beside its bytes, as bytes: so that rates of large and of small ones can be compared.
pub const FILE_WORK: u64 = 64 << 10;
/// The shortest time of a piece grows by this part with each measurement, until it is seen again: homes
/// change.
const FORGET: f64 = 1.02;
/// A change of rate below this part of it says nothing.
const NOISE: f64 = 0.05;
/// Steps, as factors: the next one when there is nothing better so far away any more.
const STEPS: [f64; 3] = [2.0, 1.5, 1.25];
/// Measurements without a better neighbour until one is tried again.
const REST: u32 = 8;
/// A measurement lasts as long as two files, within these.
const MEASURE_MIN: Duration = Duration::from_millis(250);
const MEASURE_MAX: Duration = Duration::from_secs(2);

/// How a mover works at one home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Files that are written at the same time; of small ones several count as one.
    pub streams: usize,
    /// Bytes that are read and not written at home yet, of all streams together.
    pub window_bytes: u64,
    /// A file is synced at home so often.
    pub extent_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tuner {
    streams: usize,
    window_bytes: u64,
    /// What a piece took at best, lately.
    piece_took: Option<Duration>,
    most: usize,
    /// Given, and not to be changed.
    fixed: Option<Choice>,
    /// Work per second, and streams, before the last step.
    before: Option<(f64, usize)>,
    step: usize,
    up: bool,
    rest: u32,
}

impl Tuner {
    /// For a home that takes so many calls at once.
    pub fn new(calls_max: usize) -> Tuner {
        let most = calls_max.clamp(1, STREAMS_MAX);
        Tuner {
            streams: STREAMS_MIN_START.min(most),
            window_bytes: WINDOW_MIN,
            piece_took: None,
            most,
            fixed: None,
            before: None,
            step: 0,
            up: true,
            rest: 0,
        }
    }

    /// Home answers after `round_trip`: what it begins with.
    pub fn begin_at(&mut self, round_trip: Duration) {
        let far = (round_trip.as_micros() / START_STEP.as_micros()) as usize;
        self.streams = STREAMS_MIN_START.saturating_add(far).min(STREAMS_MAX / 2).min(self.most);
    }

    /// Always the same, for measurements.
    pub fn fixed(choice: Choice) -> Tuner {
        Tuner { fixed: Some(choice), ..Tuner::new(choice.streams) }
    }

    pub fn choice(&self) -> Choice {
        let Tuner { streams, window_bytes, .. } = *self;
        self.fixed.unwrap_or(Choice { streams, window_bytes, extent_bytes: EXTENT_BYTES })
    }

    /// Pieces took so long, each, from where they are read to where they are written, while so many bytes
    /// came home in a second. Twice what is on the way then, if it does not wait behind others of ours.
    pub fn piece_took(&mut self, took: Duration, bytes_per_s: f64) {
        let least = self.piece_took.map_or(took, |least| least.mul_f64(FORGET).min(took));
        self.piece_took = Some(least);
        let on_the_way = 2.0 * bytes_per_s * least.as_secs_f64();
        self.window_bytes = (on_the_way as u64).clamp(WINDOW_MIN, WINDOW_MAX);
    }

    /// What was measured with the present number of streams, all of them busy. A measurement while there was
    /// not enough to do must not be told.
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
        // Fewer streams that do as well are better: they cost less.
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

    /// A step; false: there is no room for one.
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

/// Where the time of files goes that were written lately.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimeOf {
    pub reading: Duration,
    pub writing: Duration,
    /// All of it, and of how many.
    pub files: Duration,
    pub count: u32,
}

/// What keeps a mover from being faster, in words.
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

/// In how many parts a stream may be shared by small files, at a home that takes so many calls at once.
pub fn packed(calls_max: usize) -> u64 {
    (calls_max / PACKED_MAX).clamp(1, PACKED_MAX) as u64
}

/// How many of these parts a file is that begins with so many bytes.
pub fn share(bytes: u64, packed: u64) -> u64 {
    (bytes.min(PACKED_BYTES) * packed / PACKED_BYTES).max(1)
}

/// How long the next measurement lasts, as files took so long.
pub fn measure_for(file_took: Duration) -> Duration {
    (2 * file_took).clamp(MEASURE_MIN, MEASURE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Brings what streams there are can bring until `all` is reached; each costs all a little.
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
        /// The rate of each of so many measurements.
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
    fn what_limits_is_where_the_time_goes() {
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
            tuner.piece_took(Duration::from_secs(1), 1e9);
        }
        assert_eq!(tuner.choice(), choice);
    }

    proptest! {
        /// Whatever the path, what is found is soon within a tenth of the best there is, and stays there.
        #[test]
        fn what_is_found_is_near_the_best(
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
            tuner.piece_took(Duration::from_millis(took_ms), rate);
            let window = tuner.choice().window_bytes;
            prop_assert!((WINDOW_MIN..=WINDOW_MAX).contains(&window));
            prop_assert!(window == WINDOW_MAX || window as f64 + 1.0 >= 2.0 * rate * took_ms as f64 / 1e3);
        }

        /// Pieces that wait behind others of ours take longer: that is no reason for more of them.
        #[test]
        fn a_window_does_not_grow_by_what_it_holds_up(took_ms in 100u64..1000) {
            let mut tuner = Tuner::new(16);
            tuner.piece_took(Duration::from_millis(50), 1e9);
            let before = tuner.choice().window_bytes;
            for _ in 0..10 {
                tuner.piece_took(Duration::from_millis(took_ms), 1e9);
            }
            prop_assert!(tuner.choice().window_bytes <= before + before / 4);
            // A path that is slower now is known to be after a while.
            for _ in 0..1000 {
                tuner.piece_took(Duration::from_millis(took_ms), 1e8);
            }
            prop_assert!(tuner.choice().window_bytes as f64 + 1.0 >= 2.0 * 1e8 * took_ms as f64 / 1e3);
        }
    }
}
