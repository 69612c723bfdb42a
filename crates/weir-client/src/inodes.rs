//! The inodes that this client knows, and the order of replies and revokes about them.
//!
//! Invariants: an inode in use has one state, in which revokes find it. A reply to a request from before a
//! revoke, or from before all leases were named to the leader, grants no more than that left (the revoke
//! clock). Each inode with uncommitted changes is in the list of write-back.
//!
//! Lock order: the ends of opens, the list of inodes, an inode's state, the cache, the list of dirty
//! inodes, the list of accesses. No lock is held across a wait.
use crate::inode::{Inode, State};
use crate::kernel::Kernel;
use crate::maps::MapsSeen;
use crate::types::Stat;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use weir_proto::meta::{Attr, Entry, Lease, LeaseKind};
use weir_proto::{InodeId, VolumeId};

pub struct Inodes {
    kernel: Arc<Kernel>,
    maps: Arc<MapsSeen>,
    /// Iterated only to collect and sort.
    table: Mutex<HashMap<InodeId, Arc<Inode>>>,
    /// Counts revokes and releases: orders grants and revokes that cross each other.
    revoke_clock: AtomicU64,
    /// The time at which all leases were last reported to the leader.
    named_at: AtomicU64,
    /// Those with uncommitted changes.
    dirty: Mutex<BTreeSet<InodeId>>,
}

impl Inodes {
    pub fn new(kernel: Arc<Kernel>, maps: Arc<MapsSeen>) -> Inodes {
        Inodes {
            kernel,
            maps,
            table: Mutex::default(),
            revoke_clock: AtomicU64::new(1),
            named_at: AtomicU64::new(0),
            dirty: Mutex::default(),
        }
    }
    fn table(&self) -> MutexGuard<'_, HashMap<InodeId, Arc<Inode>>> {
        self.table.lock().expect("no holder panics")
    }

    pub fn get(&self, ino: InodeId) -> Arc<Inode> {
        let mut table = self.table();
        let named = || self.named_at.load(Ordering::SeqCst);
        let inode = table.entry(ino).or_insert_with(|| Arc::new(Inode::new(ino, named())));
        inode.used.store(true, Ordering::Relaxed);
        inode.clone()
    }
    pub fn known(&self, ino: InodeId) -> Option<Arc<Inode>> {
        self.table().get(&ino).cloned()
    }
    pub fn all(&self) -> Vec<Arc<Inode>> {
        let mut all: Vec<Arc<Inode>> = self.table().values().cloned().collect();
        all.sort_by_key(|n| n.ino);
        all
    }
    pub fn count(&self) -> usize {
        self.table().len()
    }
    /// Unless another task is about to use it: then this open and the next one would have different inodes,
    /// and revokes find only one.
    pub fn remove_unused(&self, inode: &Arc<Inode>) {
        let mut table = self.table();
        let (the_callers, the_tables) = (1, 1);
        if Arc::strong_count(inode) <= the_callers + the_tables {
            table.remove(&inode.ino);
        }
    }
    /// The kernel caches nothing of the inode any more.
    pub fn forget(&self, ino: InodeId) {
        if let Some(inode) = self.known(ino) {
            inode.lock().forgotten = true;
        }
    }
    /// Panics where an invariant of an inode's state does not hold.
    pub fn check(&self) {
        self.all().iter().for_each(|inode| inode.lock().check());
    }
}

/// Uncommitted changes.
impl Inodes {
    fn list(&self) -> MutexGuard<'_, BTreeSet<InodeId>> {
        self.dirty.lock().expect("no holder panics")
    }
    /// Adds the inode to the list of write-back. Called with its state locked, so nothing becomes dirty
    /// between the check and the note; and the set is never handed out, so no task waits for an inode's
    /// state while holding it.
    pub fn note_dirty(&self, ino: InodeId) {
        self.list().insert(ino);
    }
    pub fn forget_dirty(&self, ino: InodeId) {
        self.list().remove(&ino);
    }
    pub fn forget_if_saved(&self, ino: InodeId, st: &State) {
        if !st.is_dirty() && !st.direct.are_pending() && st.write.unreported_end().is_none() {
            self.forget_dirty(ino);
        }
    }
    pub fn dirty(&self) -> Vec<Arc<Inode>> {
        let dirty: Vec<InodeId> = self.list().iter().copied().collect();
        dirty.into_iter().filter_map(|ino| self.known(ino)).collect()
    }
}

/// Replies of the leader.
impl Inodes {
    pub fn revoke_clock(&self) -> u64 {
        self.revoke_clock.load(Ordering::SeqCst)
    }
    /// Advances the clock: replies to requests sent before are outdated.
    pub fn tick_revoke_clock(&self) -> u64 {
        self.revoke_clock.fetch_add(1, Ordering::SeqCst) + 1
    }
    /// The held leases are about to be reported to the leader: grants in flight do not count.
    pub fn mark_named(&self) -> u64 {
        let revoke_clock = self.tick_revoke_clock();
        self.named_at.store(revoke_clock, Ordering::SeqCst);
        revoke_clock
    }
    /// Applies a reply about an inode; returns its attributes as they are shown now.
    pub fn apply(&self, entry: &Entry, revoke_clock: u64) -> Stat {
        let inode = self.get(entry.attr.ino);
        let mut st = inode.lock();
        self.apply_to(&mut st, entry, revoke_clock);
        let leased = st.lease.is_held();
        if leased {
            st.pages.note_lent();
        }
        if leased { st.shown(true) } else { None }
            .unwrap_or_else(|| Stat { attr: entry.attr.clone(), leased })
    }
    /// For an inode whose state is locked.
    pub fn apply_to(&self, st: &mut State, entry: &Entry, revoke_clock: u64) {
        self.maps.need(entry.lease.map_version);
        st.apply(entry, revoke_clock);
    }
    /// For attributes that the kernel did not ask for: if it caches different ones, they are invalidated,
    /// soon.
    pub fn apply_unasked(&self, st: &mut State, entry: &Entry, revoke_clock: u64) {
        let before = if st.pages.are_attributes_lent() { st.shown(true) } else { None };
        self.apply_to(st, entry, revoke_clock);
        let differs = |a: &Stat, b: &Stat| {
            // The kernel maintains access times: it asks for them after a read.
            let reported = |s: &Stat| {
                let a = &s.attr;
                (a.mode, a.uid, a.gid, a.nlink, a.size, a.allocated, a.evicted, a.mtime, a.ctime)
            };
            reported(a) != reported(b)
        };
        if let (Some(before), Some(now)) = (before, st.shown(true))
            && differs(&before, &now)
        {
            st.pages.note_not_lent();
            self.kernel.drop_attributes(entry.attr.ino);
        }
    }
    /// Attributes without a lease of their own: they are valid if a lease is held already.
    pub fn apply_attr(&self, attr: &Attr, revoke_clock: u64) {
        let Some(inode) = self.known(attr.ino) else { return };
        let mut st = inode.lock();
        if st.lease.is_held() {
            let lease = Lease {
                kind: LeaseKind::None,
                token_epoch: 0,
                recover: st.lease.needs_recovery(),
                data_end: st.write.data_end(),
                limited: VolumeId(0),
                map_version: 0,
            };
            st.apply(&Entry { attr: attr.clone(), lease }, revoke_clock);
        }
    }
}
