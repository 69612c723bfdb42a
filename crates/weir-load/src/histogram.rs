//! Durations counted in logarithmic buckets: any number of them in little memory, quantiles within 2 %.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Buckets per power of two.
const STEPS_LOG2: u32 = 6;

#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub struct Histogram {
    counts: BTreeMap<u32, u64>,
    total: u64,
}

impl Histogram {
    pub fn record(&mut self, took: Duration) {
        *self.counts.entry(bucket(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))).or_default() += 1;
        self.total += 1;
    }

    pub fn merge(&mut self, other: &Histogram) {
        for (bucket, count) in &other.counts {
            *self.counts.entry(*bucket).or_default() += count;
        }
        self.total += other.total;
    }

    pub fn count(&self) -> u64 {
        self.total
    }

    /// The duration in microseconds that the fraction `q` of all does not exceed; 0 if there are none.
    pub fn quantile_us(&self, q: f64) -> f64 {
        let rank = ((self.total as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in &self.counts {
            seen += count;
            if seen >= rank {
                return lower_bound(*bucket) as f64 / 1e3;
            }
        }
        0.0
    }
}

fn bucket(ns: u64) -> u32 {
    let exponent = ns.max(1).ilog2();
    if exponent <= STEPS_LOG2 {
        return ns as u32;
    }
    let mantissa = (ns >> (exponent - STEPS_LOG2)) as u32; // 64 ..= 127
    ((exponent - STEPS_LOG2) << STEPS_LOG2) + mantissa
}

fn lower_bound(bucket: u32) -> u64 {
    let shift = (bucket >> STEPS_LOG2).saturating_sub(1);
    if bucket < 2 << STEPS_LOG2 {
        return u64::from(bucket);
    }
    u64::from(bucket - (shift << STEPS_LOG2)) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_order_and_precision() {
        let mut before = 0;
        for ns in (0..200_000u64).chain([1 << 40, u64::MAX]) {
            let low = lower_bound(bucket(ns));
            assert!(low <= ns && (ns - low) as f64 <= ns as f64 / 60.0, "{ns} in the bucket from {low}");
            assert!(bucket(ns) >= before);
            before = bucket(ns);
        }
    }

    #[test]
    fn quantiles() {
        let mut h = Histogram::default();
        (1..=1000).for_each(|us| h.record(Duration::from_micros(us)));
        for (q, us) in [(0.5, 500.0), (0.99, 990.0), (0.999, 999.0)] {
            assert!((h.quantile_us(q) - us).abs() < us * 0.02, "{q}");
        }
        assert_eq!(Histogram::default().quantile_us(0.5), 0.0);
    }
}
