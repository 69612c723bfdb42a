//! A file's usage of the quotas that apply to it, in bytes, and the reservation for uncommitted ones.
//!
//! Only the number of bytes in holes is known, not their position. Pure.
use weir_proto::VolumeId;
use weir_proto::meta::Entry;
use weir_proto::quota::Account;

/// No limit applies.
pub const NO_LIMIT: Account = Account::NONE;

/// The limits that apply to files created locally.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The files are of this account; `Account::NONE`: no limit applies.
    pub account: Account,
    /// Limits of bytes are among them.
    pub of_bytes: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { account: Account::NONE, of_bytes: false }
    }
}

#[derive(Debug)]
pub struct QuotaState {
    /// Bytes allocated by data, including uncommitted changes. More than the size: it has no holes, and the
    /// space up to there is reserved.
    allocated: u64,
    /// Those of them that the leader has counted.
    charged: u64,
    /// The account whose limits of bytes apply to new data, from the last grant of a Write lease.
    limited: Account,
    ruled_by: VolumeId,
    /// Quota reserved for an account, in bytes, and the account.
    reserved: u64,
    reserved_of: Account,
    /// The part of it for direct writes in flight.
    direct_reserved: u64,
    /// Limits hold for its present owner and group: only the leader changes these.
    owner_fixed: bool,
}

/// Space that `fallocate` asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    pub offset: u64,
    pub end: u64,
    /// Afterwards the file is `end` bytes long, or longer.
    pub grows: bool,
    /// The range is zeroed.
    pub zeroes: bool,
}

/// A change of a file's reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settled {
    pub account: Account,
    pub before: u64,
    pub now: u64,
}

impl Default for QuotaState {
    fn default() -> QuotaState {
        QuotaState {
            allocated: 0,
            charged: 0,
            limited: NO_LIMIT,
            ruled_by: VolumeId(0),
            reserved: 0,
            reserved_of: NO_LIMIT,
            direct_reserved: 0,
            owner_fixed: false,
        }
    }
}

impl QuotaState {
    pub fn allocated(&self) -> u64 {
        self.allocated
    }
    pub fn limited(&self) -> Account {
        self.limited
    }
    pub fn is_limited(&self) -> bool {
        self.limited != NO_LIMIT
    }
    /// The volume whose limits or write floor apply to new data, by the last lease; 0: none.
    pub fn ruled_by(&self) -> VolumeId {
        self.ruled_by
    }
    /// A lease for writing was granted.
    pub fn note_lease(&mut self, entry: &Entry) {
        self.limited = Account::limiting(entry);
        self.ruled_by = entry.lease.limited;
    }
    pub fn note_limit(&mut self, account: Account) {
        self.limited = account;
    }
    pub fn note_local_create(&mut self, limits: Limits) {
        self.limited = if limits.of_bytes { limits.account } else { NO_LIMIT };
        self.owner_fixed = limits.account != NO_LIMIT;
    }
    pub fn is_owner_fixed(&self) -> bool {
        self.owner_fixed
    }
    /// The file has this owner and group now.
    pub fn note_owner(&mut self, uid: u32, gid: u32) {
        if self.is_limited() {
            self.limited = Account { uid, gid, ..self.limited };
        }
    }
    /// Bytes are reserved for another account than the present one.
    pub fn is_moved(&self) -> bool {
        self.reserved > 0 && self.is_limited() && self.reserved_of != self.limited
    }

    /// Without local changes: takes the leader's value.
    pub fn note_allocated(&mut self, allocated: u64) {
        self.allocated = allocated;
        self.charged = allocated;
    }
    /// A commit was answered: returns how much it added to the volume's usage.
    pub fn note_charged(&mut self, allocated: u64) -> u64 {
        let added = allocated.saturating_sub(self.charged);
        self.charged = allocated;
        added
    }
    pub fn note_growth(&mut self, growth: u64) {
        self.allocated += growth;
    }
    /// The size was set. Space that was reserved past the end stays if the file grew.
    pub fn note_truncated(&mut self, before: u64, size: u64) {
        if size <= before {
            self.allocated = self.allocated.min(size);
            self.charged = self.charged.min(size);
        }
    }
    /// Subtracts freed bytes, each of which may have been a hole before. `most`: upper bound of the rest.
    pub fn note_freed(&mut self, freed: u64, most: Option<u64>) {
        let least = self.allocated.saturating_sub(freed);
        self.allocated = self.allocated.min(most.unwrap_or(u64::MAX)).max(least);
    }

    /// The growth of a file of this size by a write of `offset..end`: all past its end, and below as long as
    /// there are holes, because the write may lie in one.
    pub fn growth(&self, size: u64, offset: u64, end: u64) -> u64 {
        let (below, after_end) = self.parts_of_write(size, offset, end);
        after_end + below
    }
    /// The part of a write of `len` bytes that allocates no more than `free`.
    pub fn fitting(&self, size: u64, offset: u64, len: usize, free: u64) -> usize {
        let (below, after_end) = self.parts_of_write(size, offset, offset + len as u64);
        match (below + after_end).checked_sub(free) {
            None => len,
            Some(over) if over <= after_end => len - over as usize,
            Some(_) => free as usize,
        }
    }
    /// The growth by a write in holes, and past the end and the space that is reserved there.
    fn parts_of_write(&self, size: u64, offset: u64, end: u64) -> (u64, u64) {
        let after_end = end.saturating_sub(offset.max(size).max(self.allocated));
        let holes = size.saturating_sub(self.allocated);
        ((end - offset - after_end).min(holes), after_end)
    }
    /// The bytes to charge for `fallocate`. Under a limit later writes must not need any: all of the file
    /// counts then, because the positions of holes are not known. Without a limit, and for zeros in a file
    /// with holes, the range counts as if it was written.
    pub fn reservation(&self, size: u64, wish: &Wish) -> u64 {
        let Wish { offset, end, grows, zeroes } = *wish;
        let has_holes = self.allocated < size;
        if self.is_limited() && !(zeroes && has_holes) {
            return end.max(size).saturating_sub(self.allocated);
        }
        let end = if grows { end } else { end.min(size) };
        if offset < end { self.growth(size, offset, end) } else { 0 }
    }
    /// The allocation to report with a commit of `size`, if the file is `now` long here. Bytes past that size
    /// are not the file's yet; space that is reserved past the end is.
    pub fn allocated_of(&self, size: u64, now: u64) -> u64 {
        if size >= now { self.allocated } else { self.allocated.min(size.max(self.charged)) }
    }
    /// Whether all bytes up to here are charged, also past the end of a file of this size.
    pub fn is_reserved_beyond(&self, size: u64) -> bool {
        self.allocated > size
    }

    /// Bytes of the account's reservation are this file's from now on.
    pub fn spend(&mut self, growth: u64) {
        self.reserved += growth;
        self.reserved_of = self.limited;
    }
    pub fn begin_direct(&mut self, growth: u64) {
        self.direct_reserved += growth;
    }
    pub fn end_direct(&mut self, growth: u64) {
        self.direct_reserved = self.direct_reserved.saturating_sub(growth);
    }
    /// Adapts the reservation to the uncommitted changes: of the former account, and of the present one.
    pub fn settle(&mut self, is_changed: bool) -> impl Iterator<Item = Settled> + use<> {
        let (now, mut former) = (self.needed(is_changed), None);
        let mut before = std::mem::replace(&mut self.reserved, now);
        if before > 0 && self.is_limited() && self.reserved_of != self.limited {
            former = Some(Settled { account: self.reserved_of, before, now: 0 });
            (before, self.reserved_of) = (0, self.limited);
        }
        let present = (before != now).then_some(Settled { account: self.reserved_of, before, now });
        former.into_iter().chain(present)
    }
    fn needed(&self, is_changed: bool) -> u64 {
        if !self.is_limited() {
            return 0;
        }
        let changed = if is_changed { self.allocated.saturating_sub(self.charged) } else { 0 };
        changed + self.direct_reserved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::VolumeId;

    #[test]
    fn a_write_reserves_its_new_bytes() {
        let mut quota = QuotaState::default();
        quota.note_allocated(10);
        quota.note_freed(6, Some(5));
        assert_eq!(quota.allocated, 5, "one of those that went had not been counted");
        quota.note_freed(1, None);
        assert_eq!(quota.allocated, 5, "the freed byte may have been a hole");
        quota.allocated = 10;
        // Ten dense bytes: only the part past the end counts.
        let growth = |q: &QuotaState, from, to| q.growth(10, from, to);
        assert_eq!((growth(&quota, 0, 10), growth(&quota, 5, 15), growth(&quota, 20, 25)), (0, 5, 5));
        let fitting = |q: &QuotaState, at, len, free| q.fitting(10, at, len, free);
        assert_eq!(
            (fitting(&quota, 0, 10, 0), fitting(&quota, 5, 10, 2), fitting(&quota, 5, 10, 5)),
            (10, 7, 10)
        );
        // Six of ten are holes: a write below the end may lie in one.
        quota.allocated = 4;
        assert_eq!((growth(&quota, 0, 3), growth(&quota, 0, 10), growth(&quota, 2, 15)), (3, 6, 6 + 5));
        assert_eq!(
            (fitting(&quota, 2, 13, 11), fitting(&quota, 2, 13, 8), fitting(&quota, 2, 13, 3)),
            (13, 10, 3)
        );
    }

    /// Space for `fallocate` of a file of ten bytes, by how many are allocated, or reserved past them.
    #[test]
    fn reserved_space_needs_no_more_when_it_is_written() {
        let account = Account { volume: VolumeId(3), uid: 7, gid: 9 };
        let wish = |offset, end, grows, zeroes| Wish { offset, end, grows, zeroes };
        let (keeps, extend) =
            (|from, to| wish(from, to, false, false), |from, to| wish(from, to, true, false));
        let (zero, zero_extend) =
            (|from, to| wish(from, to, false, true), |from, to| wish(from, to, true, true));
        for (allocated, wish, without, under_limit) in [
            (10, extend(0, 10), 0, 0),
            (10, extend(5, 25), 15, 15),
            (10, extend(20, 25), 5, 15), // the gap before it is reserved, too
            (10, keeps(0, 25), 0, 15),
            (10, keeps(20, 25), 0, 15),
            (10, zero(5, 25), 0, 15),
            (4, extend(0, 3), 3, 6), // any of the six holes may be in it
            (4, extend(0, 12), 6 + 2, 8),
            (4, keeps(0, 25), 6, 21),
            (4, keeps(2, 4), 2, 6),
            (4, zero(0, 3), 3, 3),
            (4, zero_extend(8, 12), 2 + 2, 2 + 2),
            (25, extend(0, 20), 0, 0),
            (25, extend(0, 30), 5, 5),
            (25, keeps(0, 30), 0, 5),
        ] {
            let mut quota = QuotaState { allocated, ..QuotaState::default() };
            assert_eq!(quota.reservation(10, &wish), without, "{allocated} {wish:?}, no limit");
            quota.note_limit(account);
            let growth = quota.reservation(10, &wish);
            assert_eq!(growth, under_limit, "{allocated} {wish:?}, under a limit");
            quota.note_growth(growth);
            let size = if wish.grows { wish.end.max(10) } else { 10 };
            if !wish.zeroes || allocated >= 10 {
                for (from, to) in [(wish.offset, wish.end), (0, wish.end), (9, wish.end.max(10))] {
                    assert_eq!(quota.growth(size, from, to), 0, "{allocated} {wish:?}: then {from}..{to}");
                    assert_eq!(quota.fitting(size, from, (to - from) as usize, 0), (to - from) as usize);
                }
            }
        }
        // Past the reserved space a write needs more; a gap that it leaves is a hole.
        let reserved = QuotaState { allocated: 25, ..QuotaState::default() };
        assert_eq!((reserved.growth(10, 20, 30), reserved.growth(10, 40, 45)), (5, 5));
        assert_eq!(reserved.fitting(10, 20, 10, 2), 7);
    }

    #[test]
    fn truncation_ends_reserved_space_and_growth_does_not() {
        let reserved = |before, size| {
            let mut quota = QuotaState { allocated: 25, charged: 25, ..QuotaState::default() };
            quota.note_truncated(before, size);
            (quota.allocated, quota.charged)
        };
        assert_eq!([reserved(10, 10), reserved(10, 4), reserved(10, 20)], [(10, 10), (4, 4), (25, 25)]);
    }

    #[test]
    fn a_commit_of_a_part_reports_the_space_of_that_part() {
        let quota = |allocated, charged| QuotaState { allocated, charged, ..QuotaState::default() };
        assert_eq!(quota(9, 4).allocated_of(9, 9), 9);
        assert_eq!(quota(9, 4).allocated_of(8, 9), 8);
        assert_eq!(quota(9, 4).allocated_of(0, 9), 4);
        assert_eq!(quota(20, 20).allocated_of(8, 9), 20, "it is reserved");
        assert_eq!(quota(20, 4).allocated_of(9, 9), 20);
    }

    #[test]
    fn a_reservation_follows_what_is_not_committed() {
        let mut quota = QuotaState::default();
        quota.note_allocated(10);
        quota.note_growth(5);
        let settle = |q: &mut QuotaState, changed| q.settle(changed).collect::<Vec<_>>();
        assert_eq!(settle(&mut quota, true), [], "no limit holds");
        let account = Account { volume: VolumeId(3), uid: 7, gid: 9 };
        quota.note_limit(account);
        quota.spend(7);
        let settled = |before, now| [Settled { account, before, now }];
        assert_eq!(settle(&mut quota, true), settled(7, 5));
        quota.begin_direct(2);
        assert_eq!(settle(&mut quota, true), settled(5, 7));
        assert_eq!(quota.note_charged(15), 5);
        assert_eq!(settle(&mut quota, true), settled(7, 2));
        quota.end_direct(2);
        assert_eq!(settle(&mut quota, false), settled(2, 0));
        assert_eq!(settle(&mut quota, false), []);
        // Another owner: the reservation goes along.
        quota.begin_direct(4);
        assert_eq!(settle(&mut quota, false), settled(0, 4));
        quota.note_owner(8, 9);
        let other = Account { uid: 8, ..account };
        assert!(quota.is_moved());
        let moved = [Settled { account, before: 4, now: 0 }, Settled { account: other, before: 0, now: 4 }];
        assert_eq!(settle(&mut quota, false), moved);
        assert!(!quota.is_moved());
    }
}
