//! An hour of each series at one point a second, and two days at one a minute, in fixed memory.
//!
//! A series is a meter's name, summed over its labels: the rate per second of counters and histograms, the
//! level of gauges. Invariant: a point stands for its own second or minute; a time without a sample has no
//! point.
use crate::meter::{Kind, Registry};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Points of the last hour,
pub const HOUR_POINTS: usize = 3600;
/// and of the last two days.
pub const MINUTES_KEPT: usize = 2 * 24 * 60;
/// Series that are kept: with four bytes a point, 1.6 MB.
pub const SERIES_MAX: usize = 60;
const SECOND_NS: u64 = 1_000_000_000;

#[derive(Default)]
pub struct History(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// The last second that was sampled.
    second: u64,
    series: BTreeMap<&'static str, Series>,
}

struct Series {
    /// The last value of the meter, unless it is new.
    last: Option<f64>,
    seconds: Ring,
    minutes: Ring,
    /// The sum and number of samples of the current minute.
    sum: f64,
    points: u32,
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
        for name in meters.names() {
            let Some((kind, total)) = meters.total(name) else { continue };
            if kept.series.len() >= SERIES_MAX && !kept.series.contains_key(name) {
                continue;
            }
            let new = || Series {
                last: None,
                seconds: Ring::new(HOUR_POINTS),
                minutes: Ring::new(MINUTES_KEPT),
                sum: 0.0,
                points: 0,
            };
            kept.series.entry(name).or_insert_with(new).put(second, passed, kind, total);
        }
    }

    pub fn names(&self) -> Vec<&'static str> {
        self.lock().series.keys().copied().collect()
    }

    /// The newest `count` points of a series, oldest first; with the second of the newest one.
    pub fn seconds(&self, name: &str, count: usize) -> Option<(Vec<f32>, u64)> {
        let kept = self.lock();
        let series = kept.series.get(name)?;
        Some((series.seconds.last(count), series.seconds.newest))
    }
    /// The same by minutes.
    pub fn minutes(&self, name: &str, count: usize) -> Option<(Vec<f32>, u64)> {
        let kept = self.lock();
        let series = kept.series.get(name)?;
        Some((series.minutes.last(count), series.minutes.newest))
    }
}

impl Series {
    fn put(&mut self, second: u64, passed: u64, kind: Kind, total: f64) {
        let value = match (kind, self.last.replace(total)) {
            (Kind::Gauge, _) => Some(total),
            (_, Some(last)) => Some((total - last) / passed as f64),
            (_, None) => None,
        };
        let Some(value) = value else { return };
        self.seconds.put(second, value);
        let minute = second / 60;
        if minute != self.minutes.newest {
            (self.sum, self.points) = (0.0, 0);
        }
        self.sum += value;
        self.points += 1;
        self.minutes.put(minute, self.sum / f64::from(self.points));
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
