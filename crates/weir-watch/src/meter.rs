//! Counters, gauges and histograms with logarithmic buckets, and the registry that lists them.
//!
//! Invariants: a name has one kind for ever; adding to a meter is a few relaxed additions; a reading is exact
//! for each meter, but all of them together are not a snapshot.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Buckets of a histogram. Four for each power of two: an upper bound is at most 25 % above a value.
const BUCKETS: usize = 4 * 62;
/// Meters of one process. The largest families have one for each method and operation, or for each of some
/// targets.
const METERS_MAX: usize = 4096;

/// Grows only.
#[derive(Clone, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A level.
#[derive(Clone, Default)]
pub struct Gauge(Arc<AtomicI64>);

impl Gauge {
    pub fn set(&self, value: i64) {
        self.0.store(value, Relaxed);
    }
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Relaxed);
    }
    pub fn get(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// A distribution of nanoseconds, or of bytes.
#[derive(Clone)]
pub struct Histogram(Arc<Buckets>);

struct Buckets {
    counts: [AtomicU64; BUCKETS],
    sum: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram(Arc::new(Buckets {
            counts: [const { AtomicU64::new(0) }; BUCKETS],
            sum: AtomicU64::new(0),
        }))
    }
}

/// The bucket of a value: its two bits below the highest one.
fn bucket(value: u64) -> usize {
    let value = value.max(4);
    let octave = 63 - value.leading_zeros() as usize;
    let index = (octave - 2) * 4 + (value >> (octave - 2)) as usize - 4;
    index.min(BUCKETS - 1)
}

/// The least value that is above a bucket.
pub fn bucket_bound(index: usize) -> u64 {
    let (octave, part) = (index / 4 + 2, index as u64 % 4);
    u64::try_from(u128::from(part + 5) << (octave - 2)).unwrap_or(u64::MAX)
}

impl Histogram {
    pub fn add(&self, value: u64) {
        self.0.counts[bucket(value)].fetch_add(1, Relaxed);
        self.0.sum.fetch_add(value, Relaxed);
    }
    /// The number of values, and their sum.
    pub fn totals(&self) -> (u64, u64) {
        let count = self.0.counts.iter().map(|n| n.load(Relaxed)).sum();
        (count, self.0.sum.load(Relaxed))
    }
    fn read(&self) -> Distribution {
        let counts = self.0.counts.iter().enumerate().map(|(at, n)| (at, n.load(Relaxed)));
        let counts: Vec<(usize, u64)> = counts.filter(|(_, n)| *n > 0).collect();
        Distribution { count: counts.iter().map(|(_, n)| n).sum(), sum: self.0.sum.load(Relaxed), counts }
    }
}

struct Distribution {
    count: u64,
    sum: u64,
    counts: Vec<(usize, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// The state of a meter.
#[derive(Clone, PartialEq, Debug)]
pub struct Reading {
    pub name: &'static str,
    /// Key and value; empty: no label.
    pub label: (&'static str, String),
    pub kind: Kind,
    /// The value of a counter or a gauge; the sum of a histogram's values.
    pub value: i64,
    /// A histogram's number of values, and the number in each used bucket.
    pub count: u64,
    pub buckets: Vec<(usize, u64)>,
}

#[derive(Clone)]
enum Meter {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
    /// A counter or a gauge whose value is kept elsewhere.
    Observed(Kind, Observed),
}

impl Meter {
    fn kind(&self) -> Kind {
        match self {
            Meter::Counter(_) => Kind::Counter,
            Meter::Gauge(_) => Kind::Gauge,
            Meter::Histogram(_) => Kind::Histogram,
            Meter::Observed(kind, _) => *kind,
        }
    }
    /// Value, count and buckets.
    fn read(&self) -> (i64, u64, Vec<(usize, u64)>) {
        match self {
            Meter::Counter(counter) => (counter.get() as i64, 0, Vec::new()),
            Meter::Gauge(gauge) => (gauge.get(), 0, Vec::new()),
            Meter::Observed(_, value) => (value(), 0, Vec::new()),
            Meter::Histogram(histogram) => {
                let Distribution { count, sum, counts } = histogram.read();
                (sum as i64, count, counts)
            }
        }
    }
}

/// The label of meters of one target.
const TARGET: &str = "target";

/// Sums of meters of one kind: counters and gauges have values only.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Total {
    pub kind: Kind,
    pub value: f64,
    pub count: f64,
}

impl Total {
    fn of(meter: &Meter) -> Total {
        if let Meter::Histogram(histogram) = meter {
            let (count, sum) = histogram.totals();
            return Total { kind: Kind::Histogram, value: sum as f64, count: count as f64 };
        }
        let (value, ..) = meter.read();
        Total { kind: meter.kind(), value: value as f64, count: 0.0 }
    }
    fn add(&mut self, other: &Total) {
        self.value += other.value;
        self.count += other.count;
    }
}

/// Reads a value.
pub type Observed = Arc<dyn Fn() -> i64 + Send + Sync>;

type Key = (&'static str, &'static str, String);

/// All meters of a process.
#[derive(Default)]
pub struct Registry {
    meters: Mutex<BTreeMap<Key, Meter>>,
    families: Mutex<BTreeMap<&'static str, Arc<Family>>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Meter>> {
        self.meters.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The meter of this name and label: the same for all callers. Beyond the limit, a meter that is not
    /// listed.
    fn meter(&self, name: &'static str, (key, value): (&'static str, &str), new: Meter) -> Meter {
        let mut meters = self.lock();
        let key = (name, key, value.to_owned());
        if meters.len() >= METERS_MAX && !meters.contains_key(&key) {
            return new;
        }
        meters.entry(key).or_insert(new).clone()
    }
    pub fn counter(&self, name: &'static str, label: (&'static str, &str)) -> Counter {
        match self.meter(name, label, Meter::Counter(Counter::default())) {
            Meter::Counter(counter) => counter,
            _ => panic!("{name} is not a counter"),
        }
    }
    pub fn gauge(&self, name: &'static str, label: (&'static str, &str)) -> Gauge {
        match self.meter(name, label, Meter::Gauge(Gauge::default())) {
            Meter::Gauge(gauge) => gauge,
            _ => panic!("{name} is not a gauge"),
        }
    }
    pub fn histogram(&self, name: &'static str, label: (&'static str, &str)) -> Histogram {
        match self.meter(name, label, Meter::Histogram(Histogram::default())) {
            Meter::Histogram(histogram) => histogram,
            _ => panic!("{name} is not a histogram"),
        }
    }
    /// A counter or gauge whose value is kept elsewhere: it replaces an earlier one of this name and label.
    pub fn observe(&self, kind: Kind, name: &'static str, label: (&'static str, &str), value: Observed) {
        assert!(kind != Kind::Histogram, "{name} has one value");
        let mut meters = self.lock();
        let key = (name, label.0, label.1.to_owned());
        if meters.len() < METERS_MAX || meters.contains_key(&key) {
            meters.insert(key, Meter::Observed(kind, value));
        }
    }
    /// Histograms by small numbers, each created at its first use. The same for all callers with this name.
    pub fn family(&self, name: &'static str, key: &'static str, size: usize) -> Arc<Family> {
        let mut families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Family { name, key, of: (0..size).map(|_| OnceLock::new()).collect() });
        families.entry(name).or_insert_with(new).clone()
    }
    /// All meters that have counted anything, by name and label.
    pub fn read(&self) -> Vec<Reading> {
        let meters: Vec<(Key, Meter)> = self.lock().iter().map(|(k, m)| (k.clone(), m.clone())).collect();
        let read = |((name, key, label), meter): (Key, Meter)| {
            let (value, count, buckets) = meter.read();
            Reading { name, label: (key, label), kind: meter.kind(), value, count, buckets }
        };
        meters.into_iter().map(read).filter(|r| r.kind != Kind::Histogram || r.count > 0).collect()
    }
    /// The sum over all labels of a name: the value of counters and gauges, the number of values of
    /// histograms.
    pub fn total(&self, name: &str) -> Option<(Kind, f64)> {
        let of_name = |((of, _, _), meter): (&Key, &Meter)| (*of == name).then(|| meter.clone());
        // Not under the lock: an observed value may take others.
        let meters: Vec<Meter> = self.lock().iter().filter_map(of_name).collect();
        let mut sum = None;
        for meter in meters {
            let (value, count, _) = meter.read();
            let value = if meter.kind() == Kind::Histogram { count as f64 } else { value as f64 };
            let (_, before) = sum.unwrap_or((meter.kind(), 0.0));
            sum = Some((meter.kind(), before + value));
        }
        sum
    }
    /// How many values the histograms of one name have, by label.
    pub fn counts(&self, name: &str) -> Vec<(String, u64)> {
        let of_name = |((of, _, label), meter): (&Key, &Meter)| match meter {
            Meter::Histogram(histogram) if *of == name => Some((label.clone(), histogram.read().count)),
            _ => None,
        };
        self.lock().iter().filter_map(of_name).collect()
    }
    /// The names, each once.
    /// The sums of each name over all its labels, and of each target, by the value of its label.
    pub(crate) fn totals(&self) -> Vec<(&'static str, Option<String>, Total)> {
        let meters: Vec<(Key, Meter)> = self.lock().iter().map(|(k, m)| (k.clone(), m.clone())).collect();
        let (mut all, mut of_targets) = (Vec::<(&'static str, Option<String>, Total)>::new(), Vec::new());
        for ((name, label, value), meter) in meters {
            // Not under the lock: an observed value may take others.
            let total = Total::of(&meter);
            match all.last_mut() {
                Some((last, _, sum)) if *last == name => sum.add(&total),
                _ => all.push((name, None, total.clone())),
            }
            if label == TARGET {
                of_targets.push((name, Some(value), total));
            }
        }
        all.extend(of_targets);
        all
    }
}

/// Histograms of one name, found by a number without a lock.
pub struct Family {
    name: &'static str,
    key: &'static str,
    of: Box<[OnceLock<Histogram>]>,
}

impl Family {
    /// Adds a value to the histogram of a number; `label` names it. A number that is too large is not
    /// counted.
    pub fn add(&self, registry: &Registry, number: usize, label: &str, value: u64) {
        let Some(place) = self.of.get(number) else { return };
        place.get_or_init(|| registry.histogram(self.name, (self.key, label))).add(value);
    }
    /// The number of values of these numbers, and their sum. Takes no lock.
    pub fn totals(&self, numbers: impl IntoIterator<Item = usize>) -> (u64, u64) {
        let used = numbers.into_iter().filter_map(|number| self.of.get(number)?.get());
        used.map(Histogram::totals).fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_a_quarter_below_its_bucket_bound_at_most() {
        let mut values: Vec<u64> = (0..62).flat_map(|n| [(1 << n) - 1, 1 << n, (1 << n) + 1]).collect();
        values.extend((0..10_000).map(|n| n * 7919));
        for value in values {
            let index = bucket(value);
            let bound = bucket_bound(index);
            assert!(value < bound, "{value} in {index} below {bound}");
            assert!(
                value < 4 || bound as f64 <= value as f64 * 1.25 + 1.0,
                "{value} in {index} below {bound}"
            );
        }
        assert!((1..BUCKETS).all(|n| bucket_bound(n) > bucket_bound(n - 1)));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_meter_is_the_same_for_all_who_ask_for_it() {
        let registry = Registry::default();
        registry.counter("a_total", ("of", "x")).add(2);
        registry.counter("a_total", ("of", "x")).add(3);
        registry.counter("a_total", ("of", "y")).add(1);
        registry.gauge("b", ("", "")).set(-4);
        let family = registry.family("c_seconds", "method", 4);
        family.add(&registry, 3, "Create", 1000);
        family.add(&registry, 3, "Create", 3000);
        family.add(&registry, 4, "none", 1);
        assert_eq!((family.totals([0, 3, 4]), family.totals([0])), ((2, 4000), (0, 0)));
        let read: Vec<_> =
            registry.read().into_iter().map(|r| (r.name, r.label.1, r.value, r.count)).collect();
        let expected = [
            ("a_total", "x", 5, 0),
            ("a_total", "y", 1, 0),
            ("b", "", -4, 0),
            ("c_seconds", "Create", 4000, 2),
        ];
        assert_eq!(read, expected.map(|(name, label, value, count)| (name, label.to_owned(), value, count)));
        assert_eq!(registry.total("a_total"), Some((Kind::Counter, 6.0)));
        assert_eq!(registry.total("c_seconds"), Some((Kind::Histogram, 2.0)));
        registry.observe(Kind::Gauge, "b", ("of", "z"), Arc::new(|| 10));
        assert_eq!(registry.total("b"), Some((Kind::Gauge, 6.0)));
        registry.counter("a_total", ("target", "t3")).add(7);
        let totals = registry.totals().into_iter().map(|(name, target, t)| (name, target, t.value, t.count));
        let expected =
            [("a_total", None, 13.0, 0.0), ("b", None, 6.0, 0.0), ("c_seconds", None, 4000.0, 2.0)];
        let of_target = [("a_total", Some("t3".to_owned()), 7.0, 0.0)];
        assert_eq!(totals.collect::<Vec<_>>(), expected.into_iter().chain(of_target).collect::<Vec<_>>());
    }

    #[test]
    fn too_many_meters_take_no_more_memory() {
        let registry = Registry::default();
        (0..METERS_MAX + 100).for_each(|n| registry.counter("n_total", ("of", &n.to_string())).add(1));
        assert_eq!(registry.read().len(), METERS_MAX);
    }
}
