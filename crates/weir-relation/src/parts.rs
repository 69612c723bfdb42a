//! The parts of a file's dirty ranges that may be shipped, for homes that accept any range and for those that
//! accept whole parts. Pure.
use crate::dirty::Ranges;
use weir_proto::part::part_at;

/// A part to be shipped, and the newest change of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    pub start: u64,
    pub end: u64,
    pub newest: u64,
}

/// The due parts of a file, in order.
#[derive(PartialEq, Eq, Debug)]
pub struct Due {
    pub parts: Vec<Part>,
    /// Nothing else is dirty.
    pub complete: bool,
}

pub fn as_written(ranges: &Ranges, size: u64) -> Due {
    let part = |(start, range): &(u64, crate::dirty::DirtyRange)| Part {
        start: *start,
        end: (start + range.len).min(size),
        newest: range.newest,
    };
    Due { parts: ranges.iter().map(part).filter(|part| part.start < part.end).collect(), complete: true }
}

/// Whole parts with all dirty bytes in them. The last one of the file, which is short, waits for the file's
/// `end`. Bytes written after the change `truncation` are shipped once more when home has applied that, but
/// may be read along with earlier ones.
pub fn whole(ranges: &Ranges, size: u64, end: bool, truncation: u64) -> Due {
    let (mut parts, mut complete): (Vec<Part>, bool) = (Vec::new(), true);
    for (at, range) in ranges {
        if range.newest > truncation {
            complete = false;
            continue;
        }
        let (mut at, to) = (*at, (at + range.len).min(size));
        while at < to {
            // Past the longest file that such a home accepts: the home reports it.
            let upload_part = part_at(at).map_or(at..u64::MAX, |(_, upload_part)| upload_part);
            at = upload_part.end;
            let is_same = parts.last().is_some_and(|last| last.start == upload_part.start);
            if let Some(last) = parts.last_mut().filter(|_| is_same) {
                last.newest = last.newest.max(range.newest);
            } else if upload_part.end <= size || end {
                parts.push(Part {
                    start: upload_part.start,
                    end: upload_part.end.min(size),
                    newest: range.newest,
                });
            } else {
                complete = false;
            }
        }
    }
    Due { parts, complete }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirty::DirtyRange;
    use weir_proto::MIB;
    use weir_proto::meta::Time;

    fn ranges(all: &[(u64, u64, u64)]) -> Ranges {
        let since = Time { nanos: 0 };
        all.iter()
            .map(|(at, to, newest)| (*at, DirtyRange { len: to - at, since, oldest: 1, newest: *newest }))
            .collect()
    }
    fn part(start: u64, end: u64, newest: u64) -> Part {
        Part { start, end, newest }
    }

    #[test]
    fn parts_are_whole_and_the_last_one_waits_for_the_end() {
        let written = ranges(&[(3, 5, 7), (9, 8 * MIB + 1, 4), (20 * MIB, 21 * MIB, 9)]);
        let size = 21 * MIB;
        let (first, second) = (part(0, 8 * MIB, 7), part(8 * MIB, 16 * MIB, 4));
        let growing = whole(&written, size, false, u64::MAX);
        assert_eq!(growing, Due { parts: vec![first, second], complete: false });
        let last = part(16 * MIB, size, 9);
        let all = Due { parts: vec![first, second, last], complete: true };
        assert_eq!(whole(&written, size, true, u64::MAX), all);
        assert_eq!(whole(&written, 5, true, u64::MAX).parts, [part(0, 5, 7)], "it was truncated");
        assert_eq!(whole(&ranges(&[]), 5, false, 0), Due { parts: vec![], complete: true });
        let before = whole(&ranges(&[(3, 5, 7), (6, 9, 20)]), 10, true, 10);
        assert_eq!(
            before,
            Due { parts: vec![part(0, 10, 7)], complete: false },
            "the other one after the truncation"
        );
    }

    #[test]
    fn without_parts_every_written_range_is_due() {
        let due = as_written(&ranges(&[(3, 5, 7), (9, 20, 4), (30, 40, 5)]), 12);
        assert_eq!(due, Due { parts: vec![part(3, 5, 7), part(9, 12, 4)], complete: true });
    }
}
