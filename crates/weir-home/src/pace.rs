//! How many files are written at home at the same time: found by trying, in steps, while it is worth it.
//!
//! A hill climb on the measured rate, for one home: another stream is kept while the rate grows by more than the noise,
//! else it is given back; now and then the neighbours are tried again, because homes and loads change. Pure.
use weir_proto::relation::RECEIPT_BLOCK;

/// Streams at most: memory is this many windows.
pub const STREAMS_MAX: usize = 16;
/// Read ahead by each stream: two pieces.
const WINDOW_BYTES: u64 = 2 * RECEIPT_BLOCK;
/// Each range of at least a piece is synced when it is written.
const EXTENT_BYTES: u64 = RECEIPT_BLOCK;
/// A change of rate below this part of it says nothing.
const NOISE: f64 = 0.05;
/// Measurements without a better neighbour until one is tried again.
const REST: u32 = 8;

/// How a mover works at one home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Files that are written at the same time.
    pub streams: usize,
    /// Bytes that are read and not written at home yet, of all streams together.
    pub window_bytes: u64,
    /// A file is synced at home so often.
    pub extent_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    streams: usize,
    /// Given, and not to be changed.
    fixed: Option<Choice>,
    /// Bytes per second before the last step.
    before: Option<f64>,
    step: isize,
    rest: u32,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { streams: 2, fixed: None, before: None, step: 1, rest: 0 }
    }
}

impl Pace {
    /// Always the same, for measurements.
    pub fn fixed(choice: Choice) -> Pace {
        Pace { streams: choice.streams, fixed: Some(choice), ..Pace::default() }
    }

    pub fn choice(&self) -> Choice {
        let streams = self.streams;
        let found =
            Choice { streams, window_bytes: streams as u64 * WINDOW_BYTES, extent_bytes: EXTENT_BYTES };
        self.fixed.unwrap_or(found)
    }

    /// What was measured with the present number of streams, all of them busy. A measurement while there was not enough
    /// to do must not be told.
    pub fn measured(&mut self, rate: f64) {
        if self.fixed.is_some() {
            return;
        }
        if self.rest > 0 {
            self.rest -= 1;
            self.before = Some(rate);
            if self.rest > 0 {
                return;
            }
            self.step = -self.step;
            return self.go();
        }
        let Some(before) = self.before.replace(rate) else { return self.go() };
        if rate > before * (1.0 + NOISE) {
            return self.go();
        }
        // Fewer streams that do as well are better: they cost less.
        if self.step < 0 && rate > before * (1.0 - NOISE) {
            return self.go();
        }
        self.step = -self.step;
        self.go();
        self.step = -self.step;
        self.rest = REST;
    }

    fn go(&mut self) {
        self.streams = self.streams.saturating_add_signed(self.step).clamp(1, STREAMS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rate after a while of a home whose streams bring `each` until `all` is reached.
    fn settle(each: f64, all: f64, loss: f64) -> (Pace, f64) {
        let mut pace = Pace::default();
        let rate = |n: usize| (each * n as f64).min(all) * (1.0 - loss * n as f64);
        let mut last = Vec::new();
        for _ in 0..100 {
            pace.measured(rate(pace.choice().streams));
            last.push(rate(pace.choice().streams));
        }
        (pace, last[60..].iter().sum::<f64>() / 40.0)
    }

    #[test]
    fn one_stream_that_fills_the_path_is_left_alone() {
        assert!(settle(100.0, 100.0, 0.0).0.choice().streams <= 2);
    }

    proptest! {
        /// Whatever the path, what is found is within a tenth of the best there is.
        #[test]
        fn what_is_found_is_near_the_best(each in 1.0f64..50.0, streams in 1.0f64..20.0, loss in 0.0f64..0.01) {
            let all = each * streams;
            let best = (1..=STREAMS_MAX)
                .map(|n| (each * n as f64).min(all) * (1.0 - loss * n as f64))
                .fold(0.0, f64::max);
            let (pace, found) = settle(each, all, loss);
            prop_assert!(found >= best * 0.9, "{found} of {best} with {pace:?}");
        }
    }
}
