//! Latencies of processes between two readings of their meters.
use serde::Serialize;
use std::collections::BTreeMap;
use weir_coord::Collected;
use weir_proto::methods;
use weir_proto::watch::{Meter, MeterKind, Meters};

/// A distribution of times.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Spread {
    pub process: String,
    pub meter: String,
    pub of: String,
    pub count: u64,
    pub mean_us: u64,
    /// The median, and the 99th percentile.
    pub p50_us: u64,
    pub p99_us: u64,
    pub total_us: u64,
}

/// The distributions, with the largest total time first.
pub fn spreads<'a>(
    before: &[Collected<Meters>],
    now: impl Iterator<Item = &'a Collected<Meters>>,
) -> Vec<Spread> {
    let key =
        |process: &str, meter: &Meter| (process.to_owned(), meter.name.clone(), meter.label_value.clone());
    let mut earlier = BTreeMap::new();
    for (process, meters) in before.iter().filter_map(|g| Some((&g.name, g.reply.as_ref().ok()?))) {
        earlier.extend(meters.meters.iter().map(|meter| (key(process, meter), meter)));
    }
    let mut spreads = Vec::new();
    for (process, meters) in now.filter_map(|g| Some((&g.name, g.reply.as_ref().ok()?))) {
        // Requests that wait for work or news would be the first rows, without any meaning.
        let waits = |m: &Meter| m.label == "method" && waits_on_purpose(&m.label_value);
        let of_time =
            |m: &&Meter| m.kind == MeterKind::Histogram && m.name.ends_with("_seconds") && !waits(m);
        for meter in meters.meters.iter().filter(of_time) {
            spreads.extend(spread(process, meter, earlier.get(&key(process, meter)).copied()));
        }
    }
    spreads.sort_by_key(|s| std::cmp::Reverse(s.total_us));
    spreads
}

fn spread(process: &str, meter: &Meter, before: Option<&Meter>) -> Option<Spread> {
    let was = |below: u64| {
        let bucket = before.and_then(|m| m.buckets.iter().find(|b| b.below == below));
        bucket.map_or(0, |b| b.count)
    };
    let counts: Vec<(u64, u64)> =
        meter.buckets.iter().map(|b| (b.below, b.count.saturating_sub(was(b.below)))).collect();
    let count = meter.count.saturating_sub(before.map_or(0, |m| m.count));
    let total_ns = meter.value.saturating_sub(before.map_or(0, |m| m.value)).max(0) as u64;
    let below = |part: f64| {
        let wanted = (count as f64 * part).ceil() as u64;
        let mut seen = 0;
        let found = counts.iter().find(|(_, n)| {
            seen += n;
            seen >= wanted
        });
        found.map_or(0, |(below, _)| below / 1000)
    };
    (count > 0).then(|| Spread {
        process: process.to_owned(),
        meter: meter.name.clone(),
        of: meter.label_value.clone(),
        count,
        mean_us: total_ns / count / 1000,
        p50_us: below(0.5),
        p99_us: below(0.99),
        total_us: total_ns / 1000,
    })
}

fn waits_on_purpose(method: &str) -> bool {
    methods::all().any(|m| m.name == method && methods::is_answered_late(m.number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::Role;
    use weir_proto::watch::MeterBucket;

    fn meter(counts: &[(u64, u64)], sum_ns: i64) -> Collected<Meters> {
        let buckets = counts.iter().map(|(below, count)| MeterBucket { below: *below, count: *count });
        let meter = Meter {
            name: "weir_rpc_seconds".into(),
            label: "method".into(),
            label_value: "Create".into(),
            kind: MeterKind::Histogram,
            value: sum_ns,
            count: counts.iter().map(|c| c.1).sum(),
            buckets: buckets.collect(),
        };
        Collected { name: "meta-1".into(), role: Role::Meta, reply: Ok(Meters { meters: vec![meter] }) }
    }

    #[test]
    fn a_spread_is_of_the_time_between_two_readings() {
        let before = [meter(&[(100_000, 900)], 90_000_000)];
        let now = [meter(&[(100_000, 990), (5_000_000, 10)], 140_000_000)];
        let found = spreads(&before, now.iter());
        let Spread { count, mean_us, p50_us, p99_us, total_us, .. } = found[0].clone();
        assert_eq!((count, mean_us, p50_us, p99_us, total_us), (100, 500, 100, 5000, 50_000));
        assert_eq!(spreads(&[], before.iter())[0].count, 900);
        assert_eq!(spreads(&before, before.iter()), [], "nothing happened");
    }

    #[test]
    fn requests_that_wait_for_work_are_left_out() {
        let mut waits = meter(&[(100_000, 900)], 90_000_000);
        waits.reply.as_mut().unwrap().meters[0].label_value = "LeaseWork".into();
        assert_eq!(spreads(&[], [waits].iter()), []);
        for (method, waits) in [("GetMap", true), ("TakeRecalls", true), ("Create", false), ("Gone", false)] {
            assert_eq!(waits_on_purpose(method), waits, "{method}");
        }
    }
}
