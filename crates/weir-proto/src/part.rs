//! Properties of homes that the metadata leader and movers must agree on, by the home's URL.
//!
//! Some homes take files in parts of given sizes and show a file only when it has all of them (S3: parts
//! of an upload). For those the leader assigns whole parts only, the last one of a file when it is complete,
//! and decides when movers complete an upload.
use crate::{Error, MIB, Result};
use std::ops::Range;

/// Properties that the leader must know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HomeRules {
    /// Files are written in the parts of [`part_at`] and become visible when they are complete.
    pub parts: bool,
    /// A file may have several names.
    pub links: bool,
}

impl HomeRules {
    pub fn of(url: &str) -> Result<HomeRules> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let host = rest.split(['/', '?']).next().unwrap_or_default();
        if host.contains('@') {
            return Err(Error::invalid(
                "a URL of a home must not contain a user or a secret: use credentials=FILE",
            ));
        }
        match scheme {
            "file" if rest.starts_with('/') => Ok(HomeRules { parts: false, links: true }),
            "weir" if !host.is_empty() => Ok(HomeRules { parts: false, links: true }),
            "s3" if !host.is_empty() => Ok(HomeRules { parts: true, links: false }),
            _ => Err(Error::invalid(format!(
                "home {url:?}: expected file:///PATH (a directory that movers reach), s3://BUCKET/PREFIX or \
                 weir://COORDINATOR:PORT/PATH"
            ))),
        }
    }
}

/// Parts grow with the file: a small one is at home soon, 10,000 parts (the limit of an S3 service) are
/// enough for one terabyte, and a writer holds one part in memory. Count and bytes of each; none is below the
/// service's 5 MiB.
const PARTS: [(u64, u64); 3] = [(1000, 8 * MIB), (1000, 32 * MIB), (8000, 160 * MIB)];
/// A file that ends in the first part is stored in one request.
pub const FIRST_PART_BYTES: u64 = PARTS[0].1;

/// The number (from 1 on) and the range of the part with `offset`; none: beyond the longest file.
pub fn part_at(offset: u64) -> Option<(u16, Range<u64>)> {
    let (mut start, mut number) = (0, 1);
    for (count, bytes) in PARTS {
        let n = (offset - start) / bytes;
        if n < count {
            let from = start + n * bytes;
            return Some(((number + n) as u16, from..from + bytes));
        }
        (start, number) = (start + count * bytes, number + count);
    }
    None
}

pub fn part_start(number: u16) -> u64 {
    let (mut start, mut left) = (0, u64::from(number).saturating_sub(1));
    for (count, bytes) in PARTS {
        start += left.min(count) * bytes;
        left = left.saturating_sub(count);
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_no_gaps_up_to_a_terabyte() {
        let (mut offset, mut number) = (0, 0);
        while let Some((n, range)) = part_at(offset) {
            assert_eq!((n, range.start), (number + 1, offset));
            assert_eq!(part_at(range.end - 1), Some((n, range.clone())));
            assert_eq!(part_start(n), range.start);
            (offset, number) = (range.end, n);
        }
        assert_eq!(number, 10_000);
        assert!(offset > 1_250_000_000_000);
    }

    #[test]
    fn homes_by_table() {
        for (url, parts) in [("file:///a", false), ("weir://h:1/x", false), ("s3://b/p?region=r", true)] {
            assert_eq!(HomeRules::of(url).unwrap(), HomeRules { parts, links: !parts }, "{url}");
        }
        for url in ["", "/a", "file://a", "ftp://h/a", "s3:///p", "weir:///p", "s3://key:secret@b/p"] {
            let refused = HomeRules::of(url).unwrap_err();
            assert!(!refused.context.contains("secret@"), "{refused}");
        }
    }
}
