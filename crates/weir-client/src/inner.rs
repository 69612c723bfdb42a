//! The shared state of one client: its inodes, open files, budget, and the connections to the leader and the
//! targets.
//!
//! Lock order: the ends of opens, the list of inodes, an inode's state, the cache, the list of dirty inodes,
//! the list of accesses. No lock is held across a wait.
use crate::api::{ClientConfig, ClientStatus, Forget, Handle, KernelCache, Loss, OpenMode, Stat};
use crate::budget::Budget;
use crate::cache::Cache;
use crate::data::{Data, StripeRef};
use crate::inode::{Birth, Inode, State};
use crate::leader::{Holder, Leader};
use crate::status::Counters;
use crate::table::Tables;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use tokio::sync::Semaphore;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::data::{FILL_COUNTER, SEAL_VERSIONS};
use weir_proto::lock::HeldLock;
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Entry, HeldLease, Lease, LeaseKind, Time};
use weir_proto::quota::HeldSpace;
use weir_proto::{Error, FileId, InodeId, NamespaceId, Result, Version, VolumeId};

pub struct Inner {
    pub env: Env,
    pub config: ClientConfig,
    pub kernel: Arc<dyn KernelCache>,
    pub leader: Leader,
    pub data: Data,
    pub namespace: NamespaceId,
    pub counters: Arc<Counters>,
    pub budget: Budget,
    pub cache: Mutex<Cache>,
    /// Iterated only to collect and sort.
    inodes: Mutex<HashMap<InodeId, Arc<Inode>>>,
    handles: Mutex<HashMap<u64, Arc<OpenFile>>>,
    next_handle: AtomicU64,
    /// Counts revokes and releases: orders grants and revokes that cross each other.
    revoke_clock: AtomicU64,
    /// The time at which all leases were last reported to the leader.
    named_at: AtomicU64,
    /// Inodes with uncommitted changes.
    pub dirty: Mutex<BTreeSet<InodeId>>,
    pub tables: Tables,
    pub sends: Sends,
    /// Changes and locks that were lost, the newest last.
    losses: Mutex<Losses>,
    me: Weak<Inner>,
}

/// Data in flight to targets, of all files together.
pub struct Sends {
    pub in_flight: Semaphore,
    /// Lower half of fragment versions; one for all files, so it grows under every token epoch.
    version_counter: AtomicU32,
    /// Older objects that no other client writes any more, with the token epoch that fenced them.
    pub fenced: Mutex<BTreeMap<InodeId, u32>>,
    pub relieving: AtomicBool,
}

/// Stripes in flight to targets: enough to keep a dozen targets busy, few enough to bound the parity buffers.
/// Counted in parts, so that many small files may be in flight if targets are far.
const STRIPES_IN_FLIGHT_MAX: usize = 12;
pub const STRIPE_PARTS: u32 = 64;

impl Default for Sends {
    fn default() -> Sends {
        Sends {
            in_flight: Semaphore::new(STRIPES_IN_FLIGHT_MAX * STRIPE_PARTS as usize),
            version_counter: AtomicU32::new((FILL_COUNTER + SEAL_VERSIONS + 2) & !1),
            fenced: Mutex::default(),
            relieving: AtomicBool::new(false),
        }
    }
}

impl Sends {
    /// Writers use even counters, seals odd ones, below those of a writer (see `WriteMode::Prepare`).
    pub fn next_version(&self) -> u32 {
        self.version_counter.fetch_add(2, Ordering::Relaxed)
    }
    /// The next version, or `lowest` if that is higher. None is used twice: an abandoned one may be at a
    /// target.
    pub fn next_version_from(&self, token_epoch: u32, lowest: Version) -> Version {
        if lowest.token_epoch() == token_epoch {
            self.version_counter.fetch_max(lowest.counter(), Ordering::Relaxed);
        }
        lowest.max(Version::new(token_epoch, self.next_version()))
    }
}

/// Losses that are remembered with their names.
const LOSSES_NAMED_MAX: usize = 16;

#[derive(Default)]
struct Losses {
    count: u64,
    named: VecDeque<Loss>,
}

/// One open of a file.
pub struct OpenFile {
    pub inode: Arc<Inode>,
    pub mode: OpenMode,
    /// Write-back errors of the inode that an `fsync` of this handle has reported, or that are older than the
    /// handle.
    pub errors_synced: AtomicU64,
    /// Those that a `close` has reported.
    pub errors_closed: AtomicU64,
    /// The kernel keeps pages for this handle.
    pub kernel_cache: AtomicBool,
    /// Its open made the kernel drop the pages of this number of earlier leases.
    pub dropped_pages: OnceLock<u64>,
    /// Its reads leave the access time as it is.
    pub leaves_access_time: AtomicBool,
    /// The thread that opened it, by the kernel's number; 0: not known.
    pub opener: AtomicU32,
    /// The kernel does not announce its close.
    pub closes_quietly: AtomicBool,
    /// The reason why this handle does nothing any more.
    pub broken: OnceLock<Error>,
}

impl Inner {
    pub fn new(
        env: Env,
        config: ClientConfig,
        kernel: Arc<dyn KernelCache>,
        namespace: NamespaceId,
        data: Data,
        leader: Leader,
    ) -> Arc<Inner> {
        let budget = Budget::new(config.memory_bytes);
        let counters = data.counters.clone();
        Arc::new_cyclic(|me| Inner {
            env,
            kernel,
            leader,
            data,
            namespace,
            counters,
            budget,
            cache: Mutex::default(),
            inodes: Mutex::default(),
            handles: Mutex::default(),
            next_handle: AtomicU64::new(1),
            revoke_clock: AtomicU64::new(1),
            named_at: AtomicU64::new(0),
            dirty: Mutex::default(),
            tables: Tables::default(),
            sends: Sends::default(),
            losses: Mutex::default(),
            config,
            me: me.clone(),
        })
    }

    pub fn arc(&self) -> Arc<Inner> {
        self.me.upgrade().expect("a method runs on a living client")
    }
    pub fn weak(&self) -> Weak<Inner> {
        self.me.clone()
    }
    pub fn deadline(&self) -> Instant {
        self.leader.deadline()
    }
    pub fn now(&self) -> Time {
        Time { nanos: self.env.clock.wall().0 }
    }
    pub fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().expect("no holder of the cache panics")
    }
    /// Adds the inode to the list of write-back. Called with its state locked, so nothing becomes dirty
    /// between the check and the note; and the set is never handed out, so no task waits for an inode's state
    /// while holding it.
    pub fn note_dirty(&self, ino: InodeId) {
        self.dirty.lock().expect("no holder panics").insert(ino);
    }
    pub fn forget_dirty(&self, ino: InodeId) {
        self.dirty.lock().expect("no holder panics").remove(&ino);
    }
    pub fn dirty_inodes(&self) -> Vec<InodeId> {
        self.dirty.lock().expect("no holder panics").iter().copied().collect()
    }

    pub fn inode(&self, ino: InodeId) -> Arc<Inode> {
        let mut inodes = self.inodes.lock().expect("no holder panics");
        let named = || self.named_at.load(Ordering::SeqCst);
        let inode = inodes.entry(ino).or_insert_with(|| Arc::new(Inode::new(ino, named())));
        inode.used.store(true, Ordering::Relaxed);
        inode.clone()
    }
    pub fn known_inode(&self, ino: InodeId) -> Option<Arc<Inode>> {
        self.inodes.lock().expect("no holder panics").get(&ino).cloned()
    }
    pub fn all_inodes(&self) -> Vec<Arc<Inode>> {
        let mut all: Vec<Arc<Inode>> =
            self.inodes.lock().expect("no holder panics").values().cloned().collect();
        all.sort_by_key(|n| n.ino);
        all
    }
    /// Panics where an invariant of an inode's state, or of a table, does not hold.
    pub fn check(&self) {
        self.all_inodes().iter().for_each(|inode| inode.lock().check());
        self.tables.closes.lock().check();
        self.tables.locks.check();
    }
    pub fn status(&self) -> ClientStatus {
        self.counters.snapshot(&self.budget, self.inode_count())
    }
    pub fn inode_count(&self) -> usize {
        self.inodes.lock().expect("no holder panics").len()
    }
    /// Unless another task is about to use it: then this open and the next one would have different inodes,
    /// and revokes find only one.
    pub fn remove_unused_inode(&self, inode: &Arc<Inode>) {
        let mut inodes = self.inodes.lock().expect("no holder panics");
        let (the_callers, the_tables) = (1, 1);
        if Arc::strong_count(inode) <= the_callers + the_tables {
            inodes.remove(&inode.ino);
        }
    }

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
        let inode = self.inode(entry.attr.ino);
        let mut st = inode.lock();
        self.apply_to(&mut st, entry, revoke_clock);
        let leased = st.lease.is_held();
        if leased {
            st.pages.note_lent();
        }
        if leased { st.shown(true) } else { None }
            .unwrap_or_else(|| Stat { attr: entry.attr.clone(), leased })
    }
    /// The same for an inode whose state is locked.
    pub fn apply_to(&self, st: &mut State, entry: &Entry, revoke_clock: u64) {
        self.data.need_map(entry.lease.map_version);
        st.apply(entry, revoke_clock);
    }
    /// The same for attributes that the kernel did not ask for: if it caches different ones, they are
    /// invalidated, soon.
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
            let ino = entry.attr.ino;
            let (Some(()), _) = self.tables.drops.attributes.add(ino, ()) else { return };
            let me = self.arc();
            self.env.tasks.spawn("attributes are others now", async move {
                let mut next = Some(());
                while next.is_some() {
                    me.invalidate(ino, Forget::Attributes).await;
                    next = me.tables.drops.attributes.next(ino);
                }
            });
        }
    }
    /// Attributes without a lease of their own: they are valid if a lease is held already.
    pub fn apply_attr(&self, attr: &Attr, revoke_clock: u64) {
        let Some(inode) = self.known_inode(attr.ino) else { return };
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

    pub fn open_handle(&self, inode: Arc<Inode>, mode: OpenMode, kernel_cache: bool, errors: u64) -> Handle {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        let file = OpenFile {
            inode,
            mode,
            errors_synced: AtomicU64::new(errors),
            errors_closed: AtomicU64::new(errors),
            kernel_cache: AtomicBool::new(kernel_cache),
            dropped_pages: OnceLock::new(),
            leaves_access_time: AtomicBool::new(false),
            closes_quietly: AtomicBool::new(false),
            opener: AtomicU32::new(0),
            broken: OnceLock::new(),
        };
        self.handles.lock().expect("no holder panics").insert(handle, Arc::new(file));
        Handle(handle)
    }
    pub fn handle(&self, handle: Handle) -> Result<Arc<OpenFile>> {
        let file = self.open_file(handle);
        let file = file.ok_or_else(|| Error::stale(format!("file handle {} is closed", handle.0)))?;
        file.works()?;
        Ok(file)
    }
    /// The same even for a handle that does nothing any more.
    pub fn open_file(&self, handle: Handle) -> Option<Arc<OpenFile>> {
        self.handles.lock().expect("no holder panics").get(&handle.0).cloned()
    }
    pub fn close_handle(&self, handle: Handle) -> Result<Arc<OpenFile>> {
        let file = self.handles.lock().expect("no holder panics").remove(&handle.0);
        file.ok_or_else(|| Error::stale(format!("file handle {} is closed already", handle.0)))
    }

    pub fn file_id(&self, ino: InodeId) -> FileId {
        FileId { namespace: self.namespace, inode: ino }
    }
    pub fn stripe_ref(&self, ino: InodeId, layout: Layout, stripe: u64, deadline: Instant) -> StripeRef {
        StripeRef { file: self.file_id(ino), layout, stripe, deadline, floor: 0 }
    }
    /// After a time without a reply of the leader: finds out which leases are left, before any work relies on
    /// them.
    pub async fn sure_of_leases(&self) -> Result<()> {
        if !self.leases_hold() {
            self.leader.check(self.deadline()).await?;
        }
        Ok(())
    }
    /// A loss in the log: thousands of files may be lost with a session.
    pub fn log_loss(&self, e: &Error) {
        if let Some(more) = self.env.watch.line("changes or locks are lost") {
            tracing::error!("{e}{more}");
        }
    }
    /// Records a loss for administrators.
    pub fn note_loss(&self, ino: InodeId, e: &Error) {
        let mut losses = self.losses.lock().expect("no holder panics");
        losses.count += 1;
        if losses.named.len() == LOSSES_NAMED_MAX {
            losses.named.pop_front();
        }
        losses.named.push_back(Loss { ino, at: self.now(), what: e.to_string() });
    }
    /// The number of losses, and the last ones.
    pub fn losses(&self) -> (u64, Vec<Loss>) {
        let losses = self.losses.lock().expect("no holder panics");
        (losses.count, losses.named.iter().cloned().collect())
    }
    /// Whether leases may be used without asking.
    pub fn leases_hold(&self) -> bool {
        self.leader.leases_hold()
    }
}

/// The layout of a regular file.
pub fn layout_of(st: &State, ino: InodeId) -> Result<Layout> {
    let layout = st.attr.as_ref().and_then(|a| a.layout);
    let layout = layout.ok_or_else(|| {
        Error::unavailable(format!("file {ino} has no layout: the cluster had no placement group for it yet"))
    })?;
    layout.check()?;
    Ok(layout)
}

impl OpenFile {
    /// Waiting calls check again before they write: a lock that protected the write may have been lost
    /// meanwhile.
    pub fn works(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |e| Err(e.clone()))
    }
    /// A write-back error that neither an `fsync` nor a `close` of this handle has reported yet. It stays
    /// unreported here: the kernel may lose the error of a write, because it returns a short count for a long
    /// write whose later part fails.
    pub fn new_error(&self, st: &State) -> Result<()> {
        let reported =
            self.errors_synced.load(Ordering::Acquire).max(self.errors_closed.load(Ordering::Acquire));
        error_since(reported, st)
    }
    /// The same for an `fsync`, which reports again what a `close` of a copy of the descriptor may have
    /// reported already.
    pub fn report_synced(&self, st: &State) -> Result<()> {
        error_since(self.errors_synced.swap(st.errors.count(), Ordering::AcqRel), st)
    }
    /// The same for a `close`.
    pub fn report_closed(&self, st: &State) -> Result<()> {
        let news = self.new_error(st);
        self.errors_closed.store(st.errors.count(), Ordering::Release);
        news
    }
}

fn error_since(reported: u64, st: &State) -> Result<()> {
    st.errors.since(reported).map_or(Ok(()), |e| Err(e.clone()))
}

impl Holder for Inner {
    fn begun(&self, connection: u64) -> Vec<HeldLease> {
        self.count_from(connection)
    }
    fn lost(&self, inodes: Vec<InodeId>) {
        for ino in inodes {
            self.lose_births(ino, "the lease on its directory was lost in a restart of the metadata leader");
            // A file of a batch without an answer is created when the batch is sent again.
            let is_reported = |inode: &Arc<Inode>| matches!(inode.lock().birth, Birth::Sent(_));
            if let Some(inode) = self.known_inode(ino).filter(|inode| !is_reported(inode)) {
                self.lose_lease(&inode, "the lease was lost in a restart of the metadata leader");
            }
        }
        self.notify_kernel_all_gone();
    }
    fn held_locks(&self) -> Vec<HeldLock> {
        self.tables.locks.held()
    }
    fn lost_locks(&self, lost: Vec<HeldLock>) {
        self.lose_locks(&lost);
    }
    fn taken_up(&self) {
        self.tables.locks.wake_all();
    }
    fn report_names(&self, deadline: Instant) -> Option<BoxFuture<'static, Result<()>>> {
        self.report_names_before(deadline)
    }
    fn held_reservations(&self) -> Vec<HeldSpace> {
        self.tables.reservations.held()
    }
    fn expired(&self) {
        self.tables.reservations.expired();
        self.lose_all_births("the session expired");
        self.lose_all_locks();
        let revoke_clock = self.mark_named();
        for inode in self.all_inodes() {
            {
                let mut st = inode.lock();
                st.lease.mark_named(revoke_clock);
                st.lease.take_append_token();
            }
            self.lose_lease(&inode, "the session expired");
        }
        self.notify_kernel_all_gone();
    }
}

impl Inner {
    /// The lease is gone without a revoke: unsaved changes are lost, and recorded by name.
    fn lose_lease(&self, inode: &Inode, why: &str) {
        let mut st = inode.lock();
        st.mark_revoked(self.tick_revoke_clock(), LeaseKind::None);
        if st.is_unsaved() {
            let e = Error::io(format!("file {}: {why}; changes that were not saved are lost", inode.ino));
            self.log_loss(&e);
            self.note_loss(inode.ino, &e);
            st.fail(e);
        }
        st.write.lose();
        st.accessed = None;
        st.lower_lease(LeaseKind::None);
        self.settle_reservation(&mut st);
        self.cache().remove_inode(inode.ino);
        self.forget_dirty(inode.ino);
        drop(st);
        inode.changed.notify_waiters();
    }

    fn notify_kernel_all_gone(&self) {
        let (me, inodes) = (self.arc(), self.all_inodes());
        self.env.tasks.spawn("invalidate kernel caches", async move {
            let kernel = me.kernel.clone();
            let work = move || inodes.iter().for_each(|n| kernel.invalidate_inode(n.ino, Forget::All));
            me.env.tasks.blocking(work).await;
        });
    }
}
