//! Bytes that home does not have yet: ranges of one file with the changes that wrote them.
//!
//! Invariants: a byte that was written after change n is in a range whose newest change is above n, until
//! home has it; a range in a mover's work is never merged with later ones. Pure.
use weir_proto::message;
use weir_proto::meta::Time;
use weir_proto::relation::EXTENT_MAX;

/// `P/`: the offset at which "the file is complete" is pending.
pub const FINISH: u64 = u64::MAX;

message!(
    /// `P/`: dirty bytes from the key's offset on.
    DirtyRange {
        len: u64,
        /// When the oldest of them was written.
        since: Time,
        /// The changes that wrote the oldest and the newest of them.
        oldest: u64,
        newest: u64,
    }
);

/// The most ranges of one file; beyond, neighbours are merged and more is shipped than was written.
pub const RANGES_MAX: usize = 512;

/// A dirty range from `start` on.
pub type Ranges = Vec<(u64, DirtyRange)>;

/// Reasons not to merge ranges.
pub struct Apart<'a> {
    /// Whether a mover works on a part of `start..end`.
    pub busy: &'a dyn Fn(u64, u64) -> bool,
    /// A change of size lies between two changes: earlier writes must be shipped before it.
    pub truncated_between: &'a dyn Fn(u64, u64) -> bool,
}
impl Apart<'_> {
    pub const NOTHING: Apart<'static> = Apart { busy: &|_, _| false, truncated_between: &|_, _| false };

    fn may_join(&self, (at, a): &(u64, DirtyRange), (next, b): &(u64, DirtyRange)) -> bool {
        !(self.busy)(*at, at + a.len)
            && !(self.busy)(*next, next + b.len)
            && !(self.truncated_between)(a.oldest.min(b.oldest), a.newest.max(b.newest))
    }
}

/// Adds the range of a write.
pub fn add(ranges: &mut Ranges, start: u64, new: DirtyRange, apart: &Apart<'_>) {
    let end = start + new.len;
    let mut merged = new;
    let mut kept = Vec::with_capacity(ranges.len() + 2);
    for (at, range) in ranges.drain(..) {
        let range_end = at + range.len;
        if range_end <= start || at >= end {
            kept.push((at, range));
            continue;
        }
        merged.since = merged.since.min_of(range.since);
        if at < start {
            kept.push((at, DirtyRange { len: start - at, ..range.clone() }));
        }
        if range_end > end {
            kept.push((end, DirtyRange { len: range_end - end, ..range }));
        }
    }
    kept.push((start, merged));
    kept.sort_by_key(|(at, _)| *at);
    *ranges = join(kept, apart);
}

/// Merges neighbours that may be merged; if there are too many, also over the smallest gaps.
fn join(ranges: Ranges, apart: &Apart<'_>) -> Ranges {
    let mut joined: Ranges = Vec::with_capacity(ranges.len());
    for next in ranges {
        if let Some(last) = joined.last_mut()
            && last.0 + last.1.len == next.0
            && last.1.len + next.1.len <= EXTENT_MAX
            && apart.may_join(last, &next)
        {
            swallow(last.0, &mut last.1, next.0, &next.1);
            continue;
        }
        joined.push(next);
    }
    while joined.len() > RANGES_MAX {
        let free = |i: &usize| apart.may_join(&joined[*i], &joined[i + 1]);
        let gap = |i: &usize| joined[i + 1].0 - (joined[*i].0 + joined[*i].1.len);
        let Some(i) = (0..joined.len() - 1).filter(free).min_by_key(gap) else { break };
        let (at, range) = joined.remove(i + 1);
        let (first, into) = &mut joined[i];
        swallow(*first, into, at, &range);
    }
    joined
}

fn swallow(start: u64, into: &mut DirtyRange, at: u64, range: &DirtyRange) {
    into.len = at + range.len - start;
    into.since = into.since.min_of(range.since);
    into.oldest = into.oldest.min(range.oldest);
    into.newest = into.newest.max(range.newest);
}

/// Ranges that share a byte with `start..end` and have changed since change `mark`: what home has received of
/// them by then is old.
pub fn changed_within(ranges: &Ranges, start: u64, end: u64, mark: u64) -> impl Iterator<Item = (u64, u64)> {
    let shares = move |at: u64, len: u64| at < end && start < at + len;
    let changed = ranges.iter().filter(move |(at, range)| range.newest > mark && shares(*at, range.len));
    changed.map(|(at, range)| (*at, at + range.len))
}

/// Home has `start..end` in the state whose newest change was `mark`: later writes stay dirty.
pub fn settle(ranges: &mut Ranges, start: u64, end: u64, mark: u64) {
    remove_range(ranges, start, end, |range| range.newest <= mark);
}

/// The file ends at `size` now.
pub fn trim(ranges: &mut Ranges, size: u64) {
    remove_range(ranges, size, u64::MAX, |_| true);
}

fn remove_range(ranges: &mut Ranges, start: u64, end: u64, goes: impl Fn(&DirtyRange) -> bool) {
    let mut kept = Vec::with_capacity(ranges.len() + 1);
    for (at, range) in ranges.drain(..) {
        let range_end = at + range.len;
        if range_end <= start || at >= end || !goes(&range) {
            kept.push((at, range));
            continue;
        }
        if at < start {
            kept.push((at, DirtyRange { len: start - at, ..range.clone() }));
        }
        if range_end > end {
            kept.push((end, DirtyRange { len: range_end - end, ..range }));
        }
    }
    *ranges = kept;
}

trait Earlier {
    fn min_of(self, other: Self) -> Self;
}
impl Earlier for weir_proto::meta::Time {
    fn min_of(self, other: Self) -> Self {
        if other.nanos < self.nanos { other } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_proto::meta::Time;

    fn dirty(len: u64, number: u64) -> DirtyRange {
        DirtyRange { len, since: Time { nanos: number as i64 }, oldest: number, newest: number }
    }

    #[test]
    fn a_growing_file_is_one_range_until_it_is_worked_on() {
        let mut ranges = Ranges::new();
        for i in 0..4 {
            add(&mut ranges, i * 100, dirty(100, i + 1), &Apart::NOTHING);
        }
        assert_eq!(ranges, [(0, DirtyRange { len: 400, since: Time { nanos: 1 }, oldest: 1, newest: 4 })]);
        add(&mut ranges, 400, dirty(100, 5), &Apart { busy: &|a, b| a < 400 && b > 0, ..Apart::NOTHING });
        assert_eq!(ranges.len(), 2);
        settle(&mut ranges, 0, 400, 4);
        assert_eq!(ranges, [(400, dirty(100, 5))]);
    }

    #[test]
    fn ranges_written_while_home_received_them_are_old() {
        let ranges = vec![(0, dirty(10, 1)), (10, dirty(10, 3)), (30, dirty(10, 3)), (40, dirty(10, 2))];
        let changed = |start, end, mark| changed_within(&ranges, start, end, mark).collect::<Vec<_>>();
        assert_eq!(changed(0, 50, 2), [(10, 20), (30, 40)], "of later changes only");
        assert_eq!(changed(0, 50, 0).len(), 4);
        assert_eq!(changed(19, 31, 2), [(10, 20), (30, 40)], "one byte is enough");
        assert_eq!(changed(20, 30, 2), [], "neighbours share none");
        assert_eq!(changed(0, 50, 3), []);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, u64),
        Take(usize),
        Done(usize),
        Trim(u64),
    }
    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0u64..200, 1u64..40).prop_map(|(at, len)| Step::Write(at, len)),
            2 => (0usize..8).prop_map(Step::Take),
            2 => (0usize..8).prop_map(Step::Done),
            1 => (0u64..240).prop_map(Step::Trim),
        ];
        proptest::collection::vec(step, 1..60)
    }

    proptest! {
        /// Compared with a model that knows the last change of each byte: no byte that home lacks is ever
        /// missing.
        #[test]
        fn ranges_that_home_lacks_are_dirty(steps in steps()) {
            let (mut ranges, mut number) = (Ranges::new(), 0u64);
            let (mut written, mut home) = ([0u64; 256], [0u64; 256]);
            let mut out: Vec<(u64, u64, u64, [u64; 256])> = Vec::new();
            for step in steps {
                match step {
                    Step::Write(at, len) => {
                        number += 1;
                        written[at as usize..(at + len) as usize].fill(number);
                        let busy = |a: u64, b: u64| out.iter().any(|(s, e, ..)| *s < b && a < *e);
                        add(&mut ranges, at, dirty(len, number), &Apart { busy: &busy, ..Apart::NOTHING });
                    }
                    Step::Take(i) if !ranges.is_empty() => {
                        let (at, range) = &ranges[i % ranges.len()];
                        out.push((*at, at + range.len, range.newest, written));
                    }
                    Step::Done(i) if !out.is_empty() => {
                        let (start, end, mark, seen) = out.remove(i % out.len());
                        // A mover reads at some moment after the assignment: here at once.
                        for byte in start as usize..end as usize {
                            home[byte] = home[byte].max(seen[byte]);
                        }
                        settle(&mut ranges, start, end, mark);
                    }
                    Step::Trim(size) => {
                        written[size as usize..].fill(0);
                        home[size as usize..].fill(0);
                        out.retain_mut(|(start, end, ..)| { *end = (*end).min(size); start < end });
                        trim(&mut ranges, size);
                    }
                    _ => {}
                }
                prop_assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1.len <= w[1].0));
                for byte in 0..256u64 {
                    let covered = ranges.iter().any(|(at, r)| *at <= byte && byte < at + r.len);
                    let lacks = written[byte as usize] > home[byte as usize];
                    prop_assert!(covered || !lacks, "byte {} of change {}", byte, written[byte as usize]);
                }
            }
        }
    }
}
