//! What to read ahead for one inode: the decision alone.
//!
//! Pure. Accesses of all processes of a node on one inode are merged into a few *runs*; a run that is read
//! densely is prefetched, regardless of the order within it; one with an exact stride has its next records
//! prefetched. Prefetched bytes that stay unused stop it. Knows nothing of caches, leases or time.

/// Runs remembered per inode: more concurrent streams than this are treated as random.
const RUNS_MAX: usize = 8;
/// An access this close to a run belongs to it: processes that share a run are not in step.
const SLACK_BYTES: u64 = 8 << 20;
/// Accesses that show a pattern before anything is prefetched.
const PROOF_HITS: u32 = 2;
const WINDOW_MIN_BYTES: u64 = 2 << 20;
/// Records prefetched ahead of an exact stride.
const STRIDE_RECORDS: u64 = 8;

#[derive(Clone, Debug)]
struct Run {
    low: u64,
    high: u64,
    read_bytes: u64,
    hits: u32,
    window_bytes: u64,
    /// Prefetched up to here.
    ahead: u64,
    last_offset: u64,
    stride: u64,
    stride_hits: u32,
    used_at: u64,
}

/// Read pattern of one inode.
#[derive(Clone, Debug, Default)]
pub struct Pattern {
    runs: Vec<Run>,
    tick: u64,
    fetched_bytes: u64,
    used_bytes: u64,
}

impl Pattern {
    /// Prefetched bytes were read.
    pub fn used(&mut self, bytes: u64) {
        self.used_bytes += bytes;
    }

    /// Notes a read and returns the ranges to fetch now: (offset, length), within `size`, at most
    /// `window_max` ahead.
    pub fn access(&mut self, offset: u64, len: u64, size: u64, window_max: u64) -> Vec<(u64, u64)> {
        self.tick += 1;
        let end = offset.saturating_add(len);
        let Some(run) = self.runs.iter_mut().filter(|r| r.owns(offset, len)).max_by_key(|r| r.used_at) else {
            self.begin(offset, end);
            return Vec::new();
        };
        run.note(offset, end, self.tick);
        let wasteful = self.fetched_bytes > 4 * WINDOW_MIN_BYTES && self.used_bytes * 2 < self.fetched_bytes;
        if wasteful || run.hits < PROOF_HITS {
            self.decay();
            return Vec::new();
        }
        let wanted = if run.is_dense() {
            run.follow(size, window_max)
        } else {
            run.stride_ahead(len, size, window_max)
        };
        self.fetched_bytes += wanted.iter().map(|(_, n)| n).sum::<u64>();
        wanted
    }

    fn begin(&mut self, offset: u64, end: u64) {
        if self.runs.len() == RUNS_MAX {
            let oldest = (0..RUNS_MAX).min_by_key(|i| self.runs[*i].used_at).expect("some");
            self.runs.remove(oldest);
        }
        self.runs.push(Run {
            low: offset,
            high: end,
            read_bytes: end - offset,
            // A file is mostly read from its start: that is half a proof.
            hits: u32::from(offset == 0),
            window_bytes: WINDOW_MIN_BYTES,
            ahead: end,
            last_offset: offset,
            stride: 0,
            stride_hits: 0,
            used_at: self.tick,
        });
    }

    /// Waste is forgiven slowly, so a file whose use changes gets another chance.
    fn decay(&mut self) {
        self.fetched_bytes -= self.fetched_bytes / 4096;
        self.used_bytes -= self.used_bytes / 4096;
    }
}

impl Run {
    fn owns(&self, offset: u64, len: u64) -> bool {
        let near = offset >= self.low.saturating_sub(SLACK_BYTES.min(self.high - self.low + len))
            && offset <= self.high + SLACK_BYTES;
        near || (self.stride > 0 && offset == self.last_offset + self.stride)
    }
    fn note(&mut self, offset: u64, end: u64, tick: u64) {
        let step = offset.saturating_sub(self.last_offset);
        if step > 0 {
            self.stride_hits = if step == self.stride { self.stride_hits + 1 } else { 0 };
            self.stride = step;
        }
        self.read_bytes += end - offset;
        self.low = self.low.min(offset);
        self.high = self.high.max(end);
        self.ahead = self.ahead.max(end);
        self.last_offset = offset;
        self.hits = self.hits.saturating_add(1);
        self.used_at = tick;
        // Older accesses lose weight: the last stretch decides.
        let span = self.high - self.low;
        if span > 8 * SLACK_BYTES {
            self.low += span / 2;
            self.read_bytes /= 2;
        }
    }
    /// At least half of the stretch was read.
    fn is_dense(&self) -> bool {
        self.read_bytes * 2 >= self.high - self.low
    }
    fn follow(&mut self, size: u64, window_max: u64) -> Vec<(u64, u64)> {
        let left = self.ahead.saturating_sub(self.high);
        // Fetches again when half of the window is used, for fewer and larger requests.
        if left * 2 > self.window_bytes || self.ahead >= size {
            return Vec::new();
        }
        self.window_bytes = (self.window_bytes * 2).min(window_max);
        let to = (self.high + self.window_bytes).min(size);
        let from = self.ahead;
        if to <= from {
            return Vec::new();
        }
        self.ahead = to;
        vec![(from, to - from)]
    }
    fn stride_ahead(&mut self, len: u64, size: u64, window_max: u64) -> Vec<(u64, u64)> {
        if self.stride_hits < PROOF_HITS || self.stride < len {
            return Vec::new();
        }
        let count = STRIDE_RECORDS.min(window_max / len.max(1));
        let first = if self.ahead > self.last_offset + self.stride {
            self.ahead
        } else {
            self.last_offset + self.stride
        };
        let mut wanted = Vec::new();
        let mut at = self.last_offset + self.stride;
        for _ in 0..count {
            if at >= size {
                break;
            }
            if at >= first {
                wanted.push((at, len.min(size - at)));
                self.ahead = at + 1;
            }
            at += self.stride;
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_stream_is_followed_with_a_growing_window() {
        let mut p = Pattern::default();
        let (size, mut ahead) = (256 * MIB, 0);
        for i in 0..256 {
            for (at, len) in p.access(i * MIB, MIB, size, 16 * MIB) {
                assert!(at >= ahead, "nothing is fetched twice");
                ahead = at + len;
                p.used(len);
            }
            if i > 4 {
                assert!(ahead > (i + 1) * MIB || ahead == size, "at {i} MiB fetched to {ahead}");
            }
            assert!(ahead <= (i + 1 + 16) * MIB);
        }
    }

    #[test]
    fn interleaved_processes_are_one_run() {
        let mut p = Pattern::default();
        let record = 47_008;
        let mut fetched = 0;
        // Four processes, each with its own quarter of the records, out of step by a few records.
        for round in 0..100u64 {
            for process in [2u64, 0, 3, 1] {
                let at = (round * 4 + process) * record;
                fetched += p.access(at, record, 1 << 30, 16 * MIB).iter().map(|(_, n)| n).sum::<u64>();
                p.used(record);
            }
        }
        assert!(fetched > 100 * 4 * record, "{fetched}");
    }

    #[test]
    fn one_strided_reader_gets_its_records() {
        let mut p = Pattern::default();
        let (stride, len) = (4 * MIB, 4096);
        let mut wanted = std::collections::BTreeSet::new();
        for i in 0..40 {
            for (at, n) in p.access(i * stride, len, 1 << 40, 16 * MIB) {
                assert_eq!((at % stride, n), (0, len));
                assert!(wanted.insert(at), "fetched twice");
                p.used(n);
            }
            assert!(i < 6 || wanted.contains(&((i + 1) * stride)), "{i}");
        }
    }

    #[test]
    fn waste_stops_it() {
        let mut p = Pattern::default();
        let mut fetched = 0;
        for i in 0..2000 {
            fetched +=
                p.access(i * 64 * 1024, 64 * 1024, 1 << 40, 16 * MIB).iter().map(|(_, n)| n).sum::<u64>();
        }
        assert!(fetched < 40 * MIB, "{fetched} bytes fetched although none was used");
    }

    proptest! {
        #[test]
        fn read_ahead_stays_below_the_end_and_its_limit(
            reads in prop::collection::vec((0u64..1 << 30, 1u64..4 << 20), 1..200), size in 1u64..1 << 30,
        ) {
            let mut p = Pattern::default();
            for (at, len) in reads {
                let wanted = p.access(at, len, size, 16 * MIB);
                prop_assert!(wanted.iter().map(|(_, n)| n).sum::<u64>() <= 32 * MIB);
                for (from, n) in wanted {
                    prop_assert!(n > 0 && from + n <= size);
                }
            }
        }
    }
}
