//! A mirror of the locks that this client's processes hold, and their waits.
//!
//! Invariant: it never claims more than the leader granted. Knows nothing of messages.
use crate::types::Handle;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;
use weir_proto::InodeId;
use weir_proto::lock::{HeldLock, LockKind, LockOwner, LockRange, OwnerRanges};

/// The lock to acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockWish {
    pub owner: LockOwner,
    pub range: LockRange,
    /// `None`: unlock.
    pub kind: Option<LockKind>,
    /// The process, shown to administrators.
    pub pid: u32,
}

/// The outcome of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Locked {
    Granted,
    /// Another owner holds a conflicting lock.
    Held,
    Deadlock,
    /// Too many locks.
    Full,
    /// The caller ended the wait.
    Interrupted,
}

/// A conflicting lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InTheWay {
    pub range: LockRange,
    pub kind: LockKind,
    /// Absent: a process of another client.
    pub pid: Option<u32>,
}

#[derive(Default)]
struct Mine {
    ranges: OwnerRanges,
    pid: u32,
    /// Opens through which the owner has made requests.
    handles: BTreeSet<Handle>,
    /// One request of an owner at a time.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// The time of a request, and its owner's locks before it.
pub struct Asked {
    pub reported: u64,
    pub before: OwnerRanges,
}

/// The locks of one client.
#[derive(Default)]
pub struct Mirror {
    mine: Mutex<BTreeMap<(InodeId, LockOwner), Mine>>,
    /// Number of entries: most files have no locks, and their close checks only this.
    count: AtomicUsize,
    /// Grows each time the mirror is reported to the leader or emptied: an earlier answer must be asked for
    /// again.
    reported: AtomicU64,
    waits: Mutex<BTreeMap<u64, Arc<Notify>>>,
    tickets: AtomicU64,
}

impl Mirror {
    fn mine(&self) -> MutexGuard<'_, BTreeMap<(InodeId, LockOwner), Mine>> {
        self.mine.lock().expect("no holder panics")
    }
    fn waits(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Notify>>> {
        self.waits.lock().expect("no holder panics")
    }
    fn edit(&self, ino: InodeId, owner: LockOwner, change: impl FnOnce(&mut Mine)) {
        if let Some(mine) = self.mine().get_mut(&(ino, owner)) {
            change(mine);
        }
    }
    pub fn join(&self, ino: InodeId, wish: &LockWish, handle: Handle) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.mine();
        let mine = all.entry((ino, wish.owner)).or_default();
        mine.pid = wish.pid;
        mine.handles.insert(handle);
        let turn = mine.turn.clone();
        self.count.store(all.len(), Ordering::Release);
        turn
    }
    pub fn forget(&self, ino: InodeId, owner: LockOwner) {
        let mut all = self.mine();
        if all.get(&(ino, owner)).is_some_and(|m| m.ranges.is_empty() && Arc::strong_count(&m.turn) == 1) {
            all.remove(&(ino, owner));
        }
        self.count.store(all.len(), Ordering::Release);
    }
    /// Owners that made a request through an open file.
    fn through(&self, handle: Handle, also: impl Fn(&Mine) -> bool) -> Vec<(InodeId, LockOwner)> {
        let all = self.mine();
        all.iter().filter(|(_, m)| m.handles.contains(&handle) && also(m)).map(|(key, _)| *key).collect()
    }
    /// Owners that hold a lock acquired through it.
    pub fn held_through(&self, handle: Handle) -> Vec<(InodeId, LockOwner)> {
        self.through(handle, |m| !m.ranges.is_empty())
    }
    /// Owners that made any request through it.
    pub fn asked_through(&self, handle: Handle) -> Vec<(InodeId, LockOwner)> {
        self.through(handle, |_| true)
    }
    pub fn has(&self, ino: InodeId, owner: LockOwner) -> bool {
        self.mine().contains_key(&(ino, owner))
    }
    /// The number of times that the mirror was reported to the leader or emptied.
    pub fn reported(&self) -> u64 {
        self.reported.load(Ordering::Acquire)
    }
    /// Mirror that become weaker are not claimed from now on: a reconnect meanwhile must not make them
    /// stronger again. Returns the former state.
    pub fn lower(
        &self,
        ino: InodeId,
        owner: LockOwner,
        range: LockRange,
        kind: Option<LockKind>,
    ) -> OwnerRanges {
        let mut before = OwnerRanges::default();
        self.edit(ino, owner, |mine| {
            before = mine.ranges.clone();
            mine.ranges.lower(range, kind);
        });
        before
    }
    /// The leader has answered a request of this owner, sent at `reported`. False: a report meanwhile did not
    /// claim this, or the session is another one.
    pub fn answered(
        &self,
        ino: InodeId,
        wish: &LockWish,
        handle: Handle,
        asked: Asked,
        granted: bool,
    ) -> bool {
        let mut all = self.mine();
        if asked.reported != self.reported() {
            return false;
        }
        if let Some(mine) = all.get_mut(&(ino, wish.owner)) {
            if granted {
                mine.ranges.set(wish.range, wish.kind);
                mine.handles.insert(handle); // one of its closes may have come between
            } else {
                mine.ranges = asked.before;
            }
        }
        true
    }
    /// Separates an owner from a handle: its close releases nothing that the owner locks through another one.
    pub fn part(&self, ino: InodeId, handle: Handle, owner: LockOwner) {
        self.edit(ino, owner, |mine| {
            mine.handles.remove(&handle);
        });
        self.forget(ino, owner);
    }
    /// Panics where an invariant of this table does not hold.
    pub fn check(&self) {
        let all = self.mine();
        assert_eq!(self.count.load(Ordering::Acquire), all.len(), "closes ask only the number");
    }
    /// No owner has locked anything.
    pub fn is_unused(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// All held locks, to be named to the leader.
    pub fn held(&self) -> Vec<HeldLock> {
        let all = self.mine();
        self.reported.fetch_add(1, Ordering::AcqRel);
        let each = all.iter().flat_map(|((ino, owner), mine)| {
            mine.ranges.iter().map(|(range, kind)| HeldLock {
                ino: *ino,
                owner: *owner,
                range,
                kind,
                pid: mine.pid,
            })
        });
        each.collect()
    }
    /// The leader notifies that a wait may be over.
    pub fn wake(&self, ticket: u64) {
        if let Some(wait) = self.waits().get(&ticket) {
            wait.notify_one();
        }
    }
    /// The leader knows of no waits any more: each asks again.
    pub fn wake_all(&self) {
        self.waits().values().for_each(|wait| wait.notify_one());
    }
    /// Removes lost locks; returns the handles concerned.
    pub fn lose(&self, lost: impl Fn(InodeId, LockOwner) -> bool) -> BTreeSet<(InodeId, Handle)> {
        let mut handles = BTreeSet::new();
        let mut all = self.mine();
        self.reported.fetch_add(1, Ordering::AcqRel);
        for ((ino, owner), mine) in all.iter_mut() {
            if !mine.ranges.is_empty() && lost(*ino, *owner) {
                mine.ranges = OwnerRanges::default();
                handles.extend(mine.handles.iter().map(|h| (*ino, *h)));
            }
        }
        handles
    }
}

/// An entry in the list of waits, removed when the wait ends in any way.
pub struct Waiting<'a> {
    mirror: &'a Mirror,
    pub ticket: u64,
    pub hint: Arc<Notify>,
}

impl<'a> Waiting<'a> {
    pub fn new(mirror: &'a Mirror) -> Waiting<'a> {
        let ticket = mirror.tickets.fetch_add(1, Ordering::Relaxed) + 1;
        let hint = Arc::new(Notify::new());
        mirror.waits().insert(ticket, hint.clone());
        Waiting { mirror, ticket, hint }
    }
}
impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.mirror.waits().remove(&self.ticket);
    }
}
