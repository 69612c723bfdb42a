//! An hour of each series at one point a second, and two days at one a minute, in fixed memory.
//!
//! A series is a meter's name, summed over its labels: the rate per second of counters and histograms, the
//! level of gauges. `NAME:mean` is the mean of a histogram's values, `NAME{t3}` and `NAME{t3}:mean` are those
//! of one target. Invariant: a point stands for its own second or minute; a time without a sample, or a mean
//! of no values, has no point.
use crate::meter::{Kind, Registry, Total};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Points of the last hour,
pub const HOUR_POINTS: usize = 3600;
/// and of the last two days.
pub const MINUTES_KEPT: usize = 2 * 24 * 60;
/// Series that are kept, those of all targets first: with four bytes a point, at most 4 MB. A mount has 50; a
/// storage process 50, and 8 for each target.
pub const SERIES_MAX: usize = 160;
const SECOND_NS: u64 = 1_000_000_000;

#[derive(Default)]
pub struct History(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// The last second that was sampled.
    second: u64,
    series: BTreeMap<String, Series>,
}

struct Series {
    /// The last sum and number of values of the meter, unless it is new.
    last: Option<(f64, f64)>,
    seconds: Ring,
    minutes: Ring,
    /// The sum of the samples of the current minute, and their number; of a mean, of all values.
    sum: f64,
    weight: f64,
}

struct Ring {
    /// NaN: no point.
    points: Box<[f32]>,
    /// The time of the newest one, in its own unit.
    newest: u64,
}

impl Ring {
    fn new(size: usize) -> Ring {
        Ring { points: vec![f32::NAN; size].into(), newest: 0 }
    }
    fn put(&mut self, at: u64, value: f64) {
        let size = self.points.len() as u64;
        let missed = at.saturating_sub(self.newest + 1).min(size);
        (at - missed..at).for_each(|gap| self.points[(gap % size) as usize] = f32::NAN);
        self.points[(at % size) as usize] = value as f32;
        self.newest = at;
    }
    /// The points up to the newest one, oldest first.
    fn last(&self, count: usize) -> Vec<f32> {
        let size = self.points.len() as u64;
        let count = (count as u64).min(size).min(self.newest + 1);
        (self.newest + 1 - count..=self.newest).map(|at| self.points[(at % size) as usize]).collect()
    }
}

impl History {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the sample of this second, if there is none yet.
    pub fn sample(&self, now_ns: u64, meters: &Registry) {
        let second = now_ns / SECOND_NS;
        let mut kept = self.lock();
        if second <= kept.second {
            return;
        }
        let passed = second - kept.second;
        kept.second = second;
        for (name, target, total) in meters.totals() {
            let name =
                target.as_ref().map_or_else(|| name.to_owned(), |target| format!("{name}{{{target}}}"));
            if total.kind == Kind::Histogram {
                if let Some(series) = kept.series(format!("{name}:mean")) {
                    series.put_mean(second, &total);
                }
                if target.is_some() {
                    continue;
                }
            }
            if let Some(series) = kept.series(name) {
                series.put(second, passed, &total);
            }
        }
    }

    pub fn names(&self) -> Vec<String> {
        self.lock().series.keys().cloned().collect()
    }

    /// The newest `count` points of a series, oldest first; with the second of the newest one.
    pub fn seconds(&self, name: &str, count: usize) -> Option<(Vec<f32>, u64)> {
        let kept = self.lock();
        let series = kept.series.get(name)?;
        Some((series.seconds.last(count), series.seconds.newest))
    }
    /// The newest `count` minutes of a series, oldest first; with the minute of the newest one.
    pub fn minutes(&self, name: &str, count: usize) -> Option<(Vec<f32>, u64)> {
        let kept = self.lock();
        let series = kept.series.get(name)?;
        Some((series.minutes.last(count), series.minutes.newest))
    }
}

impl Kept {
    /// None: there are too many.
    fn series(&mut self, name: String) -> Option<&mut Series> {
        if self.series.len() >= SERIES_MAX && !self.series.contains_key(&name) {
            return None;
        }
        let new = || Series {
            last: None,
            seconds: Ring::new(HOUR_POINTS),
            minutes: Ring::new(MINUTES_KEPT),
            sum: 0.0,
            weight: 0.0,
        };
        Some(self.series.entry(name).or_insert_with(new))
    }
}

impl Series {
    /// The level of a gauge, and the rate of anything else.
    fn put(&mut self, second: u64, passed: u64, total: &Total) {
        let now = match total.kind {
            Kind::Histogram => total.count,
            Kind::Counter | Kind::Gauge => total.value,
        };
        match (total.kind, self.last.replace((now, 0.0))) {
            (Kind::Gauge, _) => self.note(second, now, 1.0),
            (_, Some((last, _))) => self.note(second, (now - last) / passed as f64, 1.0),
            (_, None) => {}
        }
    }
    fn put_mean(&mut self, second: u64, total: &Total) {
        let last = self.last.replace((total.value, total.count));
        let (sum, count) = last.map_or((0.0, 0.0), |(sum, count)| (total.value - sum, total.count - count));
        self.note(second, sum, count);
    }
    /// Without weight there is no point.
    fn note(&mut self, second: u64, sum: f64, weight: f64) {
        let mean = |sum: f64, weight: f64| if weight > 0.0 { sum / weight } else { f64::NAN };
        self.seconds.put(second, mean(sum, weight));
        let minute = second / 60;
        if minute != self.minutes.newest {
            (self.sum, self.weight) = (0.0, 0.0);
        }
        self.sum += sum;
        self.weight += weight;
        self.minutes.put(minute, mean(self.sum, self.weight));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_levels_are_kept_by_second_and_by_minute() {
        let (history, meters) = (History::default(), Registry::default());
        let (bytes, level) = (meters.counter("bytes_total", ("", "")), meters.gauge("level", ("", "")));
        for second in 60..180 {
            bytes.add(if second < 120 { 100 } else { 300 });
            level.set(second as i64);
            history.sample(second * SECOND_NS, &meters);
            history.sample(second * SECOND_NS + 5, &meters);
        }
        assert_eq!(history.names(), ["bytes_total", "level"]);
        let (points, newest) = history.seconds("bytes_total", 61).unwrap();
        assert_eq!((points[0], points[1], points[60], newest), (100.0, 300.0, 300.0, 179));
        assert_eq!(history.minutes("bytes_total", 2).unwrap(), (vec![100.0, 300.0], 2));
        assert_eq!(history.minutes("level", 2).unwrap().0, [89.5, 149.5]);
        assert!(history.seconds("none", 1).is_none());
    }

    #[test]
    fn means_and_targets_have_series_of_their_own() {
        let (history, meters) = (History::default(), Registry::default());
        let took = meters.histogram("x_seconds", ("target", "t3"));
        let other = meters.histogram("x_seconds", ("target", "t4"));
        for second in 60..180 {
            if second < 90 {
                took.add(100);
                other.add(300);
            } else if second < 120 {
                (0..3).for_each(|_| took.add(500));
            }
            history.sample(second * SECOND_NS, &meters);
        }
        assert_eq!(
            history.names(),
            ["x_seconds", "x_seconds:mean", "x_seconds{t3}:mean", "x_seconds{t4}:mean"]
        );
        let at = |name: &str, ago: usize| {
            let points = history.seconds(name, 120).unwrap().0;
            points[points.len() - 1 - ago]
        };
        assert_eq!((at("x_seconds", 100), at("x_seconds:mean", 100)), (2.0, 200.0));
        assert_eq!((at("x_seconds{t3}:mean", 100), at("x_seconds{t4}:mean", 100)), (100.0, 300.0));
        assert_eq!((at("x_seconds", 70), at("x_seconds:mean", 70)), (3.0, 500.0));
        assert!(at("x_seconds:mean", 0).is_nan(), "no value, no mean");
        // The mean of a minute is that of its values: 29 of 100 (the first has none before it), 90 of 500.
        let minutes = history.minutes("x_seconds{t3}:mean", 2).unwrap().0;
        assert_eq!((minutes[0], minutes[1].is_nan()), (((29 * 100 + 90 * 500) as f64 / 119.0) as f32, true));
    }

    #[test]
    fn a_time_without_samples_has_no_points() {
        let (history, meters) = (History::default(), Registry::default());
        let level = meters.gauge("level", ("", ""));
        for second in [1000, 1001, 1004, 9000] {
            level.set(second as i64);
            history.sample(second * SECOND_NS, &meters);
            let points = history.seconds("level", 4).unwrap().0;
            let there: Vec<bool> = points.iter().map(|p| !p.is_nan()).collect();
            let expected = match second {
                1000 => [false, false, false, true],
                1001 => [false, false, true, true],
                1004 => [true, false, false, true],
                _ => [false, false, false, true],
            };
            assert_eq!(there, expected, "at {second}");
        }
    }

    #[test]
    fn series_beyond_the_limit_are_omitted() {
        let (history, meters) = (History::default(), Registry::default());
        let names: Vec<&'static str> = (0..SERIES_MAX + 5).map(|n| &*format!("n{n:03}").leak()).collect();
        names.iter().for_each(|name| meters.gauge(name, ("", "")).set(1));
        (1..4).for_each(|second| history.sample(second * SECOND_NS, &meters));
        assert_eq!(history.names().len(), SERIES_MAX);
    }
}
