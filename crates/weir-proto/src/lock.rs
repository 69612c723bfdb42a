//! File locks: definitions shared by the metadata leader and clients, and the arithmetic of one owner's
//! ranges.
//!
//! Invariants of [`OwnerRanges`]: ranges are in order, do not overlap, and neighbours of one kind are one
//! range. Knows nothing of sessions, waits, or conflicts between owners.
use crate::wire::{Reader, Wire, Writer};
use crate::{Error, InodeId, Result, SessionId, message, wire_enum};

/// The last byte that a lock can cover: "to the end of the file, at any size".
pub const LOCK_END: u64 = i64::MAX as u64;

wire_enum!(
    /// Locks of different spaces do not conflict, as on a local file system.
    LockSpace {
        /// POSIX and open-file-description locks of `fcntl`: byte ranges.
        Fcntl = 1,
        /// Locks of `flock`: whole files.
        Flock = 2,
    }
);
wire_enum!(LockKind { Shared = 1, Exclusive = 2 });

/// Bytes `start..=end`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LockRange {
    pub start: u64,
    pub end: u64,
}

impl LockRange {
    pub const WHOLE: LockRange = LockRange { start: 0, end: LOCK_END };

    pub fn new(start: u64, end: u64) -> Result<LockRange> {
        if start <= end && end <= LOCK_END {
            return Ok(LockRange { start, end });
        }
        Err(Error::invalid(format!("{start} to {end} is not a range of bytes that can be locked")))
    }
    pub fn overlaps(self, other: LockRange) -> bool {
        self.start <= other.end && other.start <= self.end
    }
    pub fn intersection(self, other: LockRange) -> Option<LockRange> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start <= end).then_some(LockRange { start, end })
    }
}
impl Wire for LockRange {
    fn encode(&self, w: &mut Writer) {
        self.start.encode(w);
        self.end.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let (start, end) = (u64::decode(r)?, u64::decode(r)?);
        LockRange::new(start, end)
    }
}

message!(
    /// The owner of a lock, within a session: a process's table of files, or one open file. The client
    /// assigns the number.
    LockOwner { space: LockSpace, id: u64 }
);
impl Copy for LockOwner {}
impl PartialOrd for LockOwner {
    fn partial_cmp(&self, other: &LockOwner) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for LockOwner {
    fn cmp(&self, other: &LockOwner) -> std::cmp::Ordering {
        (self.space, self.id).cmp(&(other.space, other.id))
    }
}

message!(
    /// A lock that is held or waited for, in the form for users and programs.
    LockEntry {
        session: SessionId,
        /// Host and mount point.
        client: String,
        owner: LockOwner,
        /// The process that requested it, on its host.
        pid: u32,
        kind: LockKind,
        range: LockRange,
        /// How long it has been held, or waited for.
        age_ms: u64,
        waits: bool,
    }
);

/// Locks that one `ReclaimLocks` names.
pub const RECLAIM_MAX: usize = 8 * 1024;
/// Locks that one `LockList` shows.
pub const LISTED_MAX: usize = 1024;

wire_enum!(
    LockOutcome {
        Granted = 1,
        /// It is held, and the caller does not want to wait.
        Held = 2,
        /// In the queue: `LockFree` follows when a retry may succeed.
        Queued = 3,
        /// Waiting would be a deadlock.
        Deadlock = 4,
        /// The session or the file has reached its limit of locks.
        Full = 5,
        /// Clients from before the leader's restart may still reclaim theirs: try again.
        Grace = 6,
        /// Held through an open file that is being closed, which releases the lock soon: try again.
        Closing = 7,
    }
);
message!(
    /// Locks, converts or unlocks (`kind` absent) a range. A retry with the same ticket keeps its place in
    /// the queue. Accepted only on the connection on which the session last reclaimed its locks, so that late
    /// requests have no effect.
    SetLock = 150 by [Mount, Mover, Console] -> LockAnswer {
        session: SessionId, ino: InodeId, owner: LockOwner, range: LockRange, kind: Option<LockKind>, pid: u32,
        /// Not 0: wait for it, under this number of the client.
        ticket: u64,
        /// With `kind` absent: nothing is unlocked yet, but the open file is being closed, which will unlock
        /// soon. With `kind`: the close of the open file will not be announced in that way.
        closing: bool,
    }
);
message!(LockAnswer { outcome: LockOutcome, /** Who is in the way. */ holder: Option<LockEntry> });
message!(
    /// Whether the lock could be granted: `Granted`, or `Held` with the holder.
    TestLock = 151 by [Mount, Mover, Console] -> LockAnswer { session: SessionId, ino: InodeId, owner: LockOwner, range: LockRange, kind: LockKind }
);
message!(
    /// Ends a wait.
    CancelLock = 152 by [Mount, Mover, Console] -> LockCancelled { session: SessionId, ino: InodeId, ticket: u64 }
);
message!(LockCancelled {
    /** False: it is in no queue; it may have been granted. */
    waited: bool
});
message!(
    /// The holders and the waiters, in the order of ranges and of arrival, at most `LISTED_MAX`.
    ListLocks = 153 by [Mount, Mover, Console] -> LockList { session: SessionId, ino: InodeId }
);
message!(LockList { entries: Vec<LockEntry>, /** Those that did not fit. */ more: u32 });
message!(HeldLock { ino: InodeId, owner: LockOwner, range: LockRange, kind: LockKind, pid: u32 });
message!(
    /// On a new connection, before `SessionResume`: lists the locks that the session holds, at most
    /// `RECLAIM_MAX` at a time. Other locks are released, and the session waits for none any more.
    ReclaimLocks = 154 by [Mount, Mover, Console] -> Reclaimed {
        session: SessionId, held: Vec<HeldLock>,
        /// Another message on this connection has further ones; until then nothing takes effect.
        more: bool,
    }
);
message!(Reclaimed { /** Somebody else has got these meanwhile. */ lost: Vec<HeldLock> });
message!(
    /// To the client: a lock that it waits for was granted, or it should try again.
    LockFree = 301 by [Meta] -> () { ticket: u64 }
);

/// The locks of one owner on one file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OwnerRanges(Vec<(LockRange, LockKind)>);

impl OwnerRanges {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn len(&self) -> usize {
        self.0.len()
    }
    pub fn iter(&self) -> impl Iterator<Item = (LockRange, LockKind)> + '_ {
        self.0.iter().copied()
    }

    /// Sets `range` to `kind` (`None`: not locked), regardless of its state.
    pub fn set(&mut self, range: LockRange, kind: Option<LockKind>) {
        let mut parts = Vec::with_capacity(self.0.len() + 2);
        for (held, held_kind) in self.0.drain(..) {
            if held.start < range.start {
                let end = held.end.min(range.start - 1);
                parts.push((LockRange { start: held.start, end }, held_kind));
            }
            if held.end > range.end {
                let start = held.start.max(range.end + 1);
                parts.push((LockRange { start, end: held.end }, held_kind));
            }
        }
        parts.extend(kind.map(|kind| (range, kind)));
        parts.sort_by_key(|(range, _)| range.start);
        for (range, kind) in parts {
            match self.0.last_mut() {
                Some((last, last_kind)) if *last_kind == kind && last.end + 1 == range.start => {
                    last.end = range.end;
                }
                _ => self.0.push((range, kind)),
            }
        }
    }

    /// Reduces locks within `range` to `kind` at most.
    pub fn lower(&mut self, range: LockRange, kind: Option<LockKind>) {
        let stronger: Vec<LockRange> = self
            .iter()
            .filter(|(_, held)| Some(*held) > kind)
            .filter_map(|(held, _)| held.intersection(range))
            .collect();
        stronger.into_iter().for_each(|part| self.set(part, kind));
    }

    /// The first range that conflicts with a lock of `kind` on `range` by another owner.
    pub fn conflict(&self, range: LockRange, kind: LockKind) -> Option<(LockRange, LockKind)> {
        self.iter()
            .find(|(held, held_kind)| held.overlaps(range) && kind.max(*held_kind) == LockKind::Exclusive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LockKind::{Exclusive, Shared};
    use proptest::prelude::*;

    fn r(start: u64, end: u64) -> LockRange {
        LockRange::new(start, end).unwrap()
    }
    fn ranges(sets: &[(u64, u64, Option<LockKind>)]) -> Vec<(u64, u64, LockKind)> {
        let mut held = OwnerRanges::default();
        sets.iter().for_each(|(start, end, kind)| held.set(r(*start, *end), *kind));
        held.iter().map(|(range, kind)| (range.start, range.end, kind)).collect()
    }

    #[test]
    fn ranges_split_and_merge() {
        let x = Some(Exclusive);
        let s = Some(Shared);
        assert_eq!(ranges(&[(0, 9, x), (3, 5, None)]), [(0, 2, Exclusive), (6, 9, Exclusive)]);
        assert_eq!(ranges(&[(0, 9, x), (3, 5, s)]), [(0, 2, Exclusive), (3, 5, Shared), (6, 9, Exclusive)]);
        assert_eq!(ranges(&[(0, 9, x), (10, 12, x)]), [(0, 12, Exclusive)]);
        assert_eq!(ranges(&[(10, 12, x), (0, 9, x)]), [(0, 12, Exclusive)]);
        assert_eq!(
            ranges(&[(0, 3, s), (8, 9, s), (2, 8, x)]),
            [(0, 1, Shared), (2, 8, Exclusive), (9, 9, Shared)]
        );
        assert_eq!(ranges(&[(0, LOCK_END, x), (5, LOCK_END, None)]), [(0, 4, Exclusive)]);
        assert_eq!(ranges(&[(0, LOCK_END, x), (LOCK_END, LOCK_END, s)]).len(), 2);
        assert!(ranges(&[(4, 7, x), (0, 9, None)]).is_empty());
        assert!(LockRange::new(5, 4).is_err() && LockRange::new(0, LOCK_END + 1).is_err());
    }

    proptest! {
        /// Compared with one kind per byte.
        #[test]
        fn ranges_are_as_if_kept_per_byte(
            sets in proptest::collection::vec((0u64..16, 0u64..16, 0u8..3, any::<bool>()), 0..24)
        ) {
            let (mut held, mut bytes) = (OwnerRanges::default(), [None; 32]);
            for (start, len, kind, lower) in sets {
                let kind = [None, Some(Shared), Some(Exclusive)][kind as usize];
                let range = r(start, start + len);
                if lower { held.lower(range, kind) } else { held.set(range, kind) }
                for byte in &mut bytes[start as usize..=(start + len) as usize] {
                    *byte = if lower { kind.min(*byte) } else { kind };
                }
                let mut shown = [None; 32];
                for (range, kind) in held.iter() {
                    shown[range.start as usize..=range.end as usize].fill(Some(kind));
                }
                prop_assert_eq!(shown, bytes);
                for pair in held.0.windows(2) {
                    let apart = pair[0].0.end + 1 < pair[1].0.start || pair[0].1 != pair[1].1;
                    prop_assert!(pair[0].0.end < pair[1].0.start && apart);
                }
            }
        }
    }
}
