//! Locks on files of snapshots: those of this mount.
//!
//! A snapshot never changes, so such a lock protects no bytes. Programs take one before they read all the
//! same (HDF5, SQLite), and two of them on a node expect to see each other's. So locks are kept here, without
//! a message to the leader, and other mounts do not see them.
//!
//! Invariant: a lock ends at the latest with the last open file that its owner used to take one. Knows
//! nothing of snapshots: a file is a number.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_client::{InTheWay, LockWish, Locked};
use weir_proto::lock::{LockOwner, LockRange, LockSpace, OwnerRanges};

/// Ranges that one owner may lock in one file. Their number is otherwise bounded by that of open files.
const RANGES_MAX: usize = 4096;

#[derive(Default)]
pub struct SnapshotLocks {
    files: Mutex<BTreeMap<u64, Owners>>,
    /// Something was unlocked.
    freed: Notify,
}

type Owners = BTreeMap<LockOwner, Held>;

#[derive(Default)]
struct Held {
    ranges: OwnerRanges,
    pid: u32,
    /// The open files that the owner has used for locks.
    opens: BTreeSet<u64>,
}

impl SnapshotLocks {
    fn files(&self) -> MutexGuard<'_, BTreeMap<u64, Owners>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks or unlocks, if no conflicting lock is held. `open`: the open file of the request.
    pub fn try_lock(&self, file: u64, open: u64, wish: &LockWish) -> Locked {
        let Some(kind) = wish.kind else {
            self.unlock(file, wish.owner, wish.range);
            return Locked::Granted;
        };
        let mut files = self.files();
        let owners = files.entry(file).or_default();
        let locked = if in_the_way(owners, wish).is_some() {
            Locked::Held
        } else if owners.get(&wish.owner).is_some_and(|held| held.ranges.len() >= RANGES_MAX) {
            Locked::Full
        } else {
            let held = owners.entry(wish.owner).or_default();
            held.ranges.set(wish.range, Some(kind));
            held.pid = wish.pid;
            held.opens.insert(open);
            Locked::Granted
        };
        if owners.is_empty() {
            files.remove(&file);
        }
        drop(files);
        // As on a local file system: converting a `flock` first releases the held one, so that two owners
        // that share it and both want it exclusively do not wait for each other.
        if locked == Locked::Held && wish.owner.space == LockSpace::Flock {
            self.unlock_owner(file, wish.owner);
        }
        if locked == Locked::Granted {
            self.freed.notify_waiters(); // a conversion to shared admits others
        }
        locked
    }

    /// Waits until no conflicting lock is held, or for `interrupt`.
    pub async fn wait_lock(&self, file: u64, open: u64, wish: &LockWish, interrupt: &Notify) -> Locked {
        loop {
            // Created before the check, it is also notified of an unlock between the check and the wait.
            let freed = self.freed.notified();
            match self.try_lock(file, open, wish) {
                Locked::Held => {}
                locked => return locked,
            }
            tokio::select! {
                biased;
                () = interrupt.notified() => return Locked::Interrupted,
                () = freed => {}
            }
        }
    }

    /// The holder of a conflicting lock.
    pub fn test(&self, file: u64, wish: &LockWish) -> Option<InTheWay> {
        self.files().get(&file).and_then(|owners| in_the_way(owners, wish))
    }

    /// A descriptor was closed: POSIX ends all locks of its process on the file.
    pub fn unlock_owner(&self, file: u64, owner: LockOwner) {
        self.unlock(file, owner, LockRange::WHOLE);
    }

    fn unlock(&self, file: u64, owner: LockOwner, range: LockRange) {
        self.lower(file, |holder, held| {
            if *holder == owner {
                held.ranges.set(range, None);
            }
        });
    }

    /// An open file ended.
    pub fn unlock_open(&self, file: u64, open: u64) {
        self.lower(file, |_, held| {
            if held.opens.remove(&open) && held.opens.is_empty() {
                held.ranges.set(LockRange::WHOLE, None);
            }
        });
    }

    fn lower(&self, file: u64, change: impl Fn(&LockOwner, &mut Held)) {
        let mut files = self.files();
        let Some(owners) = files.get_mut(&file) else { return };
        let mut changed = false;
        owners.retain(|owner, held| {
            let before = held.ranges.clone();
            change(owner, held);
            changed |= held.ranges != before;
            !held.ranges.is_empty()
        });
        if owners.is_empty() {
            files.remove(&file);
        }
        drop(files);
        // A waiter checks by trying, which releases its own lock first: that must not wake it again and
        // again.
        if changed {
            self.freed.notify_waiters();
        }
    }
}

fn in_the_way(owners: &Owners, wish: &LockWish) -> Option<InTheWay> {
    let kind = wish.kind?;
    let others = owners.iter().filter(|(owner, _)| owner.space == wish.owner.space && **owner != wish.owner);
    others
        .filter_map(|(_, held)| {
            let (range, kind) = held.ranges.conflict(wish.range, kind)?;
            Some(InTheWay { range, kind, pid: Some(held.pid) })
        })
        .min_by_key(|way| way.range.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::lock::LockKind::{self, Exclusive, Shared};

    const FILE: u64 = 7;

    fn flock(id: u64, kind: Option<LockKind>) -> LockWish {
        let owner = LockOwner { space: LockSpace::Flock, id };
        LockWish { owner, range: LockRange::WHOLE, kind, pid: 1 }
    }
    fn range(id: u64, start: u64, end: u64, kind: Option<LockKind>) -> LockWish {
        let owner = LockOwner { space: LockSpace::Fcntl, id };
        LockWish { owner, range: LockRange::new(start, end).unwrap(), kind, pid: id as u32 }
    }

    #[test]
    fn locks_exclude_each_other_per_file_and_kind() {
        let locks = SnapshotLocks::default();
        assert_eq!(locks.try_lock(FILE, 1, &flock(1, Some(Exclusive))), Locked::Granted);
        assert_eq!(locks.try_lock(FILE, 2, &flock(2, Some(Shared))), Locked::Held);
        assert_eq!(locks.try_lock(FILE + 1, 2, &flock(2, Some(Exclusive))), Locked::Granted);
        assert_eq!(locks.try_lock(FILE, 2, &range(2, 0, 9, Some(Shared))), Locked::Granted);
        assert_eq!(locks.try_lock(FILE, 1, &flock(1, Some(Shared))), Locked::Granted);
        assert_eq!(locks.try_lock(FILE, 2, &flock(2, Some(Shared))), Locked::Granted);
        let way = locks.test(FILE, &range(3, 5, 5, Some(Exclusive))).unwrap();
        assert_eq!((way.range.start, way.range.end, way.kind, way.pid), (0, 9, Shared, Some(2)));
        assert_eq!(locks.try_lock(FILE, 2, &range(2, 0, 4, None)), Locked::Granted);
        assert_eq!(locks.test(FILE, &range(3, 0, 4, Some(Exclusive))), None);
    }

    #[test]
    fn the_end_of_an_open_file_leaves_nothing() {
        let locks = SnapshotLocks::default();
        locks.try_lock(FILE, 1, &flock(1, Some(Exclusive)));
        locks.try_lock(FILE, 1, &range(5, 0, 9, Some(Shared)));
        locks.try_lock(FILE, 2, &range(5, 20, 29, Some(Shared)));
        locks.unlock_open(FILE, 1);
        assert_eq!(locks.try_lock(FILE, 3, &flock(3, Some(Exclusive))), Locked::Granted);
        assert!(locks.test(FILE, &range(6, 0, 0, Some(Exclusive))).is_some(), "the other open file is left");
        locks.unlock_owner(FILE, range(5, 0, 0, None).owner);
        locks.unlock_open(FILE, 3);
        assert!(locks.files().is_empty());
    }

    #[tokio::test]
    async fn a_wait_ends_with_the_lock_in_its_way_or_by_a_signal() {
        let (locks, signal) = (SnapshotLocks::default(), Notify::new());
        locks.try_lock(FILE, 1, &flock(1, Some(Exclusive)));
        let wish = flock(2, Some(Exclusive));
        let unlock = async { locks.unlock_open(FILE, 1) };
        let (locked, ()) = tokio::join!(locks.wait_lock(FILE, 2, &wish, &signal), unlock);
        assert_eq!(locked, Locked::Granted);
        let wish = flock(3, Some(Shared));
        let interrupt = async { signal.notify_one() };
        let (locked, ()) = tokio::join!(locks.wait_lock(FILE, 3, &wish, &signal), interrupt);
        assert_eq!(locked, Locked::Interrupted);
    }

    #[tokio::test]
    async fn two_flock_upgrades_do_not_deadlock() {
        let (locks, signal) = (SnapshotLocks::default(), Notify::new());
        locks.try_lock(FILE, 1, &flock(1, Some(Shared)));
        locks.try_lock(FILE, 2, &flock(2, Some(Shared)));
        let (a, b) = (flock(1, Some(Exclusive)), flock(2, Some(Exclusive)));
        let second = async {
            let locked = locks.wait_lock(FILE, 2, &b, &signal).await;
            locks.unlock_open(FILE, 2);
            locked
        };
        let both = tokio::join!(locks.wait_lock(FILE, 1, &a, &signal), second);
        assert_eq!(both, (Locked::Granted, Locked::Granted));
    }
}
