//! What to evict and when: from the fill level and rate to the files that are evicted next.
//!
//! Pure. A pool of targets fills, or a volume below its limit. No watermarks need to be set: the defaults
//! leave time to free space before it is full. An administrator may set watermarks of a volume. Knows nothing
//! of home, of leases or of how a file is evicted.
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;
use weir_env::BoxFuture;
use weir_env::Instant;
use weir_proto::{InodeId, MIB};

/// Data is evicted when it would be full within this time: to find, check and drop files takes a minute, and
/// movers that have fallen behind make it longer.
const AHEAD: Duration = Duration::from_secs(900);
/// Then enough is freed that eviction does not restart for this time.
const PAUSE: Duration = Duration::from_secs(300);
/// The share of the whole that is kept free even if it fills slowly.
const FREE_SHARE: u64 = 10;
/// The share that is freed beyond that.
const MORE_SHARE: u64 = 20;
/// Even if it fills fast, half of it is for data that is used.
const KEPT_SHARE: u64 = 2;
/// The rate is measured over this time.
const RATE_SPAN: Duration = Duration::from_secs(120);
/// A part of a huge file: a target forgets an eviction after an hour, so that there are not too many of one
/// file.
const PART_BYTES: u64 = 64 * MIB;

/// The fill level of a pool or volume, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Level {
    pub capacity: u64,
    pub used: u64,
}

/// Above `high` data is evicted, until `low` is reached. In bytes used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Marks {
    pub high: u64,
    pub low: u64,
}

/// Watermarks that an administrator has set, in hundredths of the capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Percent {
    pub high: u8,
    pub low: u8,
}

/// The watermarks at a fill rate in bytes per second.
pub fn marks(capacity: u64, bytes_per_s: u64, set: Option<Percent>) -> Marks {
    let part = |percent: u8| capacity / 100 * u64::from(percent);
    if let Some(set) = set {
        return Marks { high: part(set.high), low: part(set.low.min(set.high)) };
    }
    let free = (capacity / FREE_SHARE).max(bytes_per_s.saturating_mul(AHEAD.as_secs()));
    let more = (capacity / MORE_SHARE).max(bytes_per_s.saturating_mul(PAUSE.as_secs()));
    let high = capacity.saturating_sub(free).max(capacity / KEPT_SHARE);
    Marks { high, low: high.saturating_sub(more).max(capacity / KEPT_SHARE / 2) }
}

/// A pool or volume, as it is watched.
#[derive(Default, Debug)]
pub struct Watched {
    /// Used plus evicted bytes: the sum of written bytes.
    samples: VecDeque<(Instant, u64)>,
    evicted: u64,
    pub evicting: bool,
}

impl Watched {
    pub fn note(&mut self, now: Instant, used: u64) {
        self.samples.push_back((now, used.saturating_add(self.evicted)));
        while self.samples.front().is_some_and(|(at, _)| now.since(*at) > RATE_SPAN) {
            self.samples.pop_front();
        }
    }
    pub fn note_evicted(&mut self, bytes: u64) {
        self.evicted = self.evicted.saturating_add(bytes);
    }
    pub fn evicted(&self) -> u64 {
        self.evicted
    }
    /// The fill rate, in bytes per second.
    pub fn rate(&self) -> u64 {
        let Some((first, last)) = self.samples.front().zip(self.samples.back()) else { return 0 };
        let seconds = last.0.since(first.0).as_secs();
        last.1.saturating_sub(first.1).checked_div(seconds).unwrap_or(0)
    }
    /// Bytes to be evicted now.
    pub fn to_free(&mut self, level: Level, marks: Marks) -> u64 {
        self.evicting = level.used > marks.high || (self.evicting && level.used > marks.low);
        if self.evicting { level.used.saturating_sub(marks.low) } else { 0 }
    }
}

/// A file that may be evicted, by its record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Candidate {
    /// First, for the order.
    pub atime_nanos: i64,
    pub ino: InodeId,
    pub online: u64,
    pub evicted: u64,
}

/// The candidates with the oldest use, up to the limit.
#[derive(Debug)]
pub struct Oldest {
    kept: BTreeSet<Candidate>,
    count_max: usize,
}

impl Oldest {
    pub fn new(count_max: usize) -> Oldest {
        Oldest { kept: BTreeSet::new(), count_max }
    }
    pub fn add(&mut self, candidate: Candidate) {
        if self.kept.len() == self.count_max && self.kept.last().is_some_and(|newest| *newest <= candidate) {
            return;
        }
        self.kept.insert(candidate);
        if self.kept.len() > self.count_max {
            self.kept.pop_last();
        }
    }
    /// The candidates in order, the oldest first.
    pub fn into_order(self) -> impl Iterator<Item = Candidate> {
        self.kept.into_iter()
    }
}

/// The end of the part of a file to evict when `want` bytes are to be freed: all of it, or the front of one
/// that has much more.
pub fn end_of(candidate: &Candidate, want: u64) -> u64 {
    let part = want.checked_next_multiple_of(PART_BYTES).unwrap_or(u64::MAX);
    if candidate.online <= part { u64::MAX } else { candidate.evicted.saturating_add(part) }
}

/// The fill level of the targets that store the namespace's files, in payload.
pub type Space = dyn Fn() -> BoxFuture<'static, Option<Level>> + Send + Sync;

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::GIB;

    const TIB: u64 = 1 << 40;

    #[test]
    fn marks_leave_time_to_free_space() {
        let slow = marks(100 * TIB, 0, None);
        assert_eq!(slow, Marks { high: 90 * TIB, low: 85 * TIB });
        // 20 GB/s fill 18 TB in 15 minutes.
        let fast = marks(100 * TIB, 20 * GIB, None);
        assert_eq!(fast.high, 100 * TIB - 20 * GIB * 900);
        assert_eq!(fast.low, fast.high - 20 * GIB * 300);
        let too_fast = marks(TIB, 20 * GIB, None);
        assert_eq!((too_fast.high, too_fast.low), (TIB / 2, TIB / 4), "half of it is kept for data in use");
        let set = marks(TIB, 20 * GIB, Some(Percent { high: 80, low: 70 }));
        assert_eq!((set.high, set.low), (TIB / 100 * 80, TIB / 100 * 70));
        assert_eq!(marks(0, 0, None), Marks::default());
    }

    #[test]
    fn data_is_evicted_from_the_high_mark_to_the_low_one() {
        let (mut watched, marks) = (Watched::default(), Marks { high: 90, low: 80 });
        let steps = [(50, 0), (90, 0), (91, 11), (85, 5), (81, 1), (80, 0), (85, 0), (95, 15)];
        for (used, free) in steps {
            assert_eq!(watched.to_free(Level { capacity: 100, used }, marks), free, "at {used}");
        }
    }

    #[test]
    fn the_rate_counts_what_was_evicted_meanwhile() {
        let mut watched = Watched::default();
        assert_eq!(watched.rate(), 0);
        let at = |s: u64| Instant(0) + Duration::from_secs(s);
        watched.note(at(0), 1000);
        watched.note_evicted(500);
        watched.note(at(10), 600);
        assert_eq!(watched.rate(), 10);
        watched.note(at(10 + 3600), 600);
        assert_eq!(watched.rate(), 0, "of the last minutes");
    }

    #[test]
    fn huge_files_are_evicted_in_parts_and_the_newest_stay() {
        let candidate =
            |atime_nanos, ino, online| Candidate { atime_nanos, ino: InodeId(ino), online, evicted: 0 };
        let mut oldest = Oldest::new(2);
        for (atime, ino) in [(5, 1), (3, 2), (9, 3), (1, 4)] {
            oldest.add(candidate(atime, ino, 1));
        }
        assert_eq!(oldest.into_order().map(|c| c.ino.0).collect::<Vec<_>>(), [4, 2]);
        assert_eq!(end_of(&candidate(0, 1, PART_BYTES), 1), u64::MAX);
        let huge = Candidate { evicted: 3 * PART_BYTES, ..candidate(0, 1, TIB) };
        assert_eq!(end_of(&huge, 1), 4 * PART_BYTES);
        assert_eq!(end_of(&huge, PART_BYTES + 1), 5 * PART_BYTES);
    }
}
