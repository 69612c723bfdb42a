//! Tops: the largest consumers of the last seconds, by volume, user, job and kind of request.
//!
//! Each second has a sketch of at most [`ENTRIES`] rows; beyond that, the smallest row is reassigned to the
//! newcomer together with its count (Metwally's space-saving algorithm), so that a heavy one is never missing
//! and its figure is too high by at most that count.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The time that a list covers, in seconds.
pub const TOP_SECONDS: u64 = 10;
/// Rows of one second.
const ENTRIES: usize = 256;
/// Parts with a lock of their own each, for threads.
const SHARDS: usize = 8;
/// Jobs with a name at the same time.
const JOBS_MAX: usize = 1024;
/// A request counts as much as this number of bytes.
const REQUEST_BYTES: u64 = 64 << 10;
const SECOND_NS: u64 = 1_000_000_000;

/// Work that was done for a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work<'a> {
    pub volume: u32,
    pub uid: u32,
    /// Empty: the process belongs to none.
    pub job: &'a str,
    pub kind: &'static str,
    pub requests: u64,
    pub bytes: u64,
    pub ns: u64,
}

/// The work for one volume, user, job and kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    pub volume: u32,
    pub uid: u32,
    pub job: Arc<str>,
    pub kind: &'static str,
    pub requests: u64,
    pub bytes: u64,
    pub ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    uid: u32,
    volume: u32,
    job: u32,
    kind: &'static str,
}

#[derive(Clone, Copy, Default)]
struct Sum {
    requests: u64,
    bytes: u64,
    ns: u64,
}

impl Sum {
    fn weight(&self) -> u64 {
        self.requests * REQUEST_BYTES + self.bytes
    }
    fn add(&mut self, other: &Sum) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.ns += other.ns;
    }
}

/// The rows of a second.
#[derive(Default)]
struct Sketch {
    second: u64,
    rows: BTreeMap<Key, Sum>,
}

impl Sketch {
    fn add(&mut self, key: Key, sum: &Sum) {
        if let Some(row) = self.rows.get_mut(&key) {
            return row.add(sum);
        }
        let mut row = Sum::default();
        if self.rows.len() >= ENTRIES
            && let Some(least) = self.rows.iter().min_by_key(|(_, row)| row.weight()).map(|(key, _)| *key)
        {
            row = self.rows.remove(&least).unwrap_or_default();
        }
        row.add(sum);
        self.rows.insert(key, row);
    }
}

#[derive(Default)]
struct Shard {
    seconds: [Sketch; TOP_SECONDS as usize + 1],
    jobs: BTreeMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

impl Shard {
    fn sketch(&mut self, second: u64) -> &mut Sketch {
        let sketch = &mut self.seconds[(second % (TOP_SECONDS + 1)) as usize];
        if sketch.second != second {
            *sketch = Sketch { second, rows: BTreeMap::new() };
        }
        sketch
    }
    /// 0: none.
    fn job(&mut self, name: &str) -> u32 {
        if name.is_empty() {
            return 0;
        }
        if let Some(known) = self.jobs.get(name) {
            return *known;
        }
        if self.names.len() >= JOBS_MAX {
            self.jobs.clear();
            self.names.clear();
            self.seconds = Default::default(); // their rows have these numbers
        }
        let name: Arc<str> = name.into();
        self.names.push(name.clone());
        let number = self.names.len() as u32;
        self.jobs.insert(name, number);
        number
    }
}

#[derive(Default)]
pub struct Tops {
    shards: [Mutex<Shard>; SHARDS],
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of this thread's own.
fn own_shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static OWN: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS);
    OWN.with(|own| *own)
}

impl Tops {
    pub fn add(&self, at_ns: u64, work: &Work<'_>) {
        let mut shard = lock(&self.shards[own_shard()]);
        let job = shard.job(work.job);
        let key = Key { uid: work.uid, volume: work.volume, job, kind: work.kind };
        let sum = Sum { requests: work.requests, bytes: work.bytes, ns: work.ns };
        shard.sketch(at_ns / SECOND_NS).add(key, &sum);
    }

    /// The work of the last `seconds` whole seconds and of the current one, the largest first, and the time
    /// that it covers.
    pub fn list(&self, now_ns: u64, seconds: u64) -> (Vec<Row>, u64) {
        let now = now_ns / SECOND_NS;
        let first = now.saturating_sub(seconds.clamp(1, TOP_SECONDS));
        let mut sums: BTreeMap<(u32, u32, Arc<str>, &'static str), Sum> = BTreeMap::new();
        for shard in &self.shards {
            let shard = lock(shard);
            for sketch in shard.seconds.iter().filter(|s| (first..=now).contains(&s.second)) {
                for (key, sum) in &sketch.rows {
                    let name = key.job.checked_sub(1).and_then(|at| shard.names.get(at as usize));
                    let job = name.cloned().unwrap_or_else(|| "".into());
                    sums.entry((key.volume, key.uid, job, key.kind)).or_default().add(sum);
                }
            }
        }
        let row = |((volume, uid, job, kind), sum): (_, Sum)| Row {
            volume,
            uid,
            job,
            kind,
            requests: sum.requests,
            bytes: sum.bytes,
            ns: sum.ns,
        };
        let mut rows: Vec<Row> = sums.into_iter().map(row).collect();
        let weight = |row: &Row| row.requests * REQUEST_BYTES + row.bytes;
        rows.sort_by_key(|row| std::cmp::Reverse(weight(row)));
        rows.truncate(ENTRIES);
        (rows, now_ns - first * SECOND_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(uid: u32, bytes: u64) -> Work<'static> {
        Work { volume: 1, uid, job: "", kind: "write", requests: 1, bytes, ns: 5 }
    }

    #[test]
    fn a_hog_is_first_among_many_and_forgotten_after_a_while() {
        let tops = Tops::default();
        for n in 0..5000 {
            tops.add(3 * SECOND_NS + n, &work(1000 + n as u32, 10));
            tops.add(3 * SECOND_NS + n, &work(7, 1 << 20));
        }
        let (rows, covered) = tops.list(4 * SECOND_NS, 10);
        assert_eq!((rows.len(), rows[0].uid, rows[0].requests, covered), (ENTRIES, 7, 5000, 4 * SECOND_NS));
        assert_eq!(rows[0].bytes, 5000 << 20);
        assert!(rows[1].requests <= 5000 / ENTRIES as u64 + 2, "{:?}", rows[1]);
        assert_eq!(tops.list(13 * SECOND_NS, 10).0[0].uid, 7);
        assert_eq!(tops.list(14 * SECOND_NS, 10).0, []);
        assert_eq!(tops.list(5 * SECOND_NS, 1).0, [], "of the last second only");
    }

    #[test]
    fn jobs_are_distinguished_and_do_not_grow_without_end() {
        let tops = Tops::default();
        for n in 0..3 * JOBS_MAX {
            tops.add(SECOND_NS, &Work { job: &format!("{n}"), ..work(1, 1) });
        }
        tops.add(SECOND_NS, &Work { job: "big", ..work(1, 1 << 30) });
        tops.add(SECOND_NS, &work(1, 1 << 20));
        let rows = tops.list(SECOND_NS, 1).0;
        assert_eq!((&*rows[0].job, rows[0].bytes), ("big", 1 << 30));
        let shard = lock(&tops.shards[own_shard()]);
        assert!(shard.names.len() <= JOBS_MAX && shard.jobs.len() == shard.names.len());
    }
}
