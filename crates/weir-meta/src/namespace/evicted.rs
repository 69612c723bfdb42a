//! Records of bytes that are at home only: where they are in a file, and where they are recalled to.
//!
//! Reads records only: `evict` changes them, and has their invariants.
use super::*;
use crate::record::EvictedRange;
use weir_kv::Scan;
use weir_proto::map::Layout;
use weir_proto::recall::ByteRange;

/// A range with its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    pub from: u64,
    pub range: EvictedRange,
}

/// Evicted ranges that end after `from`, in order, `limit` at most.
pub fn ranges(read: &dyn Read, ino: InodeId, from: u64, limit: usize) -> Result<Vec<Found>> {
    let (mut found, mut bad) = (Vec::<Found>::new(), None);
    let mut visit = |at, range: EvictedRange| match checked(ino, at, range) {
        Ok(f) if f.range.to <= from => Scan::More,
        Ok(f) if found.len() < limit => {
            found.push(f);
            Scan::More
        }
        Ok(_) => Scan::Stop,
        Err(e) => {
            bad = Some(e);
            Scan::Stop
        }
    };
    // One that begins before `from` may end after it: ranges do not overlap, so it is the last such one.
    let mut before = None;
    if from > 0 {
        tables::EVICTED.between((ino, 0), (ino, from)).scan(read, &mut |(_, at), range| {
            before = Some((at, range));
            Scan::More
        })?;
    }
    if let Some((at, range)) = before {
        visit(at, range);
    }
    tables::EVICTED.from(ino, (ino, from)).scan(read, &mut |(_, at), range| visit(at, range))?;
    bad.map_or(Ok(found), Err)
}

fn checked(ino: InodeId, from: u64, range: EvictedRange) -> Result<Found> {
    if from < range.to {
        return Ok(Found { from, range });
    }
    Err(Error::damaged(format!("the record of evicted bytes of inode {ino} is damaged")))
}

/// The evicted range that begins at an offset.
pub(super) fn at(read: &dyn Read, ino: InodeId, from: u64) -> Result<Option<Found>> {
    tables::EVICTED.get(read, (ino, from))?.map(|range| checked(ino, from, range)).transpose()
}

/// The layout to recall a file into: a file that was made from a listing of home has none yet, and gets one
/// by the cluster's settings.
pub fn layout_to_fill(
    ino: InodeId,
    inode: &Inode,
    policy: &dyn Fn() -> Option<LayoutPolicy>,
) -> Option<Layout> {
    inode.layout.or_else(|| policy().map(|p| writer::place(p, ino)))
}

/// The part of `from..to` that can be evicted: whole stripes, and the tail; not ranges that are evicted
/// already, whose last stripe counts as a whole.
pub fn evictable(layout: &Layout, size: u64, (from, to): (u64, u64), evicted: &[Found]) -> Vec<ByteRange> {
    let stripe = layout.stripe_bytes();
    let up = |at: u64| at.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
    let end = if to >= size { size } else { to / stripe * stripe };
    let mut at = up(from);
    let mut gaps = Vec::new();
    for f in evicted {
        if f.from > at && at < end {
            gaps.push(ByteRange { from: at, to: f.from.min(end) });
        }
        at = at.max(up(f.range.to));
    }
    if at < end {
        gaps.push(ByteRange { from: at, to: end });
    }
    gaps
}
