//! Files over stripes over cells: what an application's reads, writes and names become on targets and at the
//! metadata leader.
//!
//! Invariants: nothing is cached without a lease; an acknowledged byte is in a dirty buffer or on targets, never
//! nowhere; no byte that fails its checksum is returned; memory stays within one budget.
//! Knows nothing of FUSE, Python or HTTP.
#![forbid(unsafe_code)]

mod accesses;
mod api;
mod append_token;
mod backups;
mod budget;
mod cache;
mod changed;
mod closes;
pub mod crash_points;
mod data;
mod dirty;
mod evict_own;
mod fetch;
mod files;
mod flush;
mod hole;
mod inner;
mod inode;
mod join;
mod known_names;
mod latency;
mod layers;
mod lease;
mod lent;
mod locks;
mod maps;
mod member;
mod names;
mod plan;
mod prefetch;
mod read;
mod recall;
mod reservations;
mod seek;
mod session;
mod shipping;
mod snapshot_file;
mod status;
mod unsaved;
mod volumes;
mod waits;
mod write;

pub use api::{
    Allocate, ClientConfig, ClientStatus, Forget, Handle, KernelCache, Loss, NewMode, NoKernel, OpenMode,
    Opened, SetAttrs, SetTime, Space, Stat,
};
pub use backups::BackupEdit;
pub use lent::LOAN as NAME_LOAN;
pub use locks::{InTheWay, LockWish, Locked};
pub use recall::Recall;
pub use seek::COPY_BYTES_MAX;
pub use shipping::NewRelation;
pub use snapshot_file::SnapshotFile;
pub use volumes::{NewVolume, VolumeEdit};
pub use waits::Waiting;

use bytes::Bytes;
use data::Data;
use inner::Inner;
use lease::Callbacks;
use maps::MapsSeen;
use session::{Holder, Session};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Notify;
use weir_coord::{Cluster, Observer};
use weir_env::{Env, Instant, TaskHandle};
use weir_proto::coord::Wait;
use weir_proto::lock::{LockEntry, LockOwner};
use weir_proto::meta::{Cred, FileKind, Listing, RenameMode, Usage};
use weir_proto::recall::{Evicted, EvictionLevel, Learned, SetMarks, TierState};
use weir_proto::{ClusterId, InodeId, Result};

/// How often changed data that nobody syncs is looked at.
const WRITE_BACK_PERIOD: Duration = Duration::from_secs(1);
/// How often a client looks whether its connection to the leader is there.
const SESSION_POLL: Duration = Duration::from_millis(500);
/// Pause between tries to find the namespace's leader.
const LEADER_PAUSE: Duration = Duration::from_millis(50);
/// How long a client that starts waits for the cluster: who mounts is there to see that it does not answer.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);
/// How often the coordinator hears what calls wait for, and how long it may take to listen.
const REPORT_EVERY: Duration = Duration::from_secs(5);
const REPORT_PATIENCE: Duration = Duration::from_secs(1);

/// One client of a namespace: one per mount or library user. Cheap to clone; its tasks end with the last clone.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    _tasks: Arc<Background>,
}

struct Background(Vec<TaskHandle>);
impl Drop for Background {
    fn drop(&mut self) {
        self.0.iter().for_each(TaskHandle::abort);
    }
}

/// Names and attributes.
impl Client {
    /// Finds the cluster and opens a session at the namespace's metadata leader.
    pub async fn connect(env: Env, config: ClientConfig, kernel: Arc<dyn KernelCache>) -> Result<Client> {
        let who = Observer {
            coordinators: config.coordinators.clone(),
            cluster: None,
            name: config.name.clone(),
            role: config.role,
            host: config.host.clone(),
            trust: config.trust.clone(),
        };
        let patience = config.patience.min(CONNECT_PATIENCE);
        let deadline = env.clock.now() + patience;
        let cluster = Cluster::observe(&env, who, patience).await?;
        let callbacks = Arc::new(Callbacks::default());
        let (channel, namespace) = loop {
            let found = cluster.meta_leader(&config.namespace, callbacks.clone());
            let map = cluster.map();
            let namespace = map.namespaces.iter().find(|v| v.name == config.namespace).map(|v| v.id);
            match (found, namespace) {
                (Ok(channel), Some(namespace)) => break (channel, namespace),
                (Err(e), _) if env.clock.now() >= deadline => return Err(e.doing("connect")),
                _ => env.clock.sleep(LEADER_PAUSE).await,
            }
        };
        let title = format!("{} on {}", config.name, config.host);
        let maps = Arc::new(MapsSeen::default());
        let process = config.process.clone();
        let counters: Arc<status::Counters> = Arc::default();
        let session = Session::new(
            env.clone(),
            channel,
            namespace,
            title.clone(),
            process,
            maps.clone(),
            counters.clone(),
        );
        let data = Data::new(env.clone(), cluster, counters, maps);
        let inner = Inner::new(env.clone(), config, kernel, namespace, data, session);
        callbacks.set(inner.weak());
        let holder: Weak<dyn Holder> = inner.weak();
        inner.session.set_holder(holder);
        inner.session.check(deadline).await?;
        let tasks = vec![
            env.tasks.spawn("learn of the space", learn_space(inner.data.cluster.clone())),
            env.tasks.spawn("keep the session", keep_session(inner.weak())),
            env.tasks.spawn("write back", write_back(inner.weak())),
            env.tasks.spawn("watch what calls wait for", watch_waits(inner.weak(), title)),
        ];
        Ok(Client { inner, _tasks: Arc::new(Background(tasks)) })
    }
    /// Which cluster it is a client of.
    pub fn cluster(&self) -> ClusterId {
        self.inner.data.cluster.id()
    }
    /// Answers from leases alone; outer `None`: ask [`Client::lookup`].
    pub fn try_lookup(&self, parent: InodeId, name: &[u8]) -> Option<Option<Stat>> {
        self.inner.try_lookup(parent, name)
    }
    pub async fn lookup(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<Option<Stat>> {
        self.inner.lookup(cred, parent, name).await
    }
    /// Answers from leases alone; `None`: ask [`Client::getattr`].
    pub fn try_getattr(&self, ino: InodeId) -> Option<Stat> {
        self.inner.try_getattr(ino)
    }
    pub async fn getattr(&self, ino: InodeId) -> Result<Stat> {
        self.inner.getattr(ino).await
    }
    /// What was known last of an inode that is gone, for a program that has it open without the client's knowledge: a directory, a
    /// pipe, somebody's working directory.
    pub fn last_attr(&self, ino: InodeId) -> Option<Stat> {
        self.inner.last_attr(ino)
    }
    /// `handle`: an open file through which a size is set (then its rights count, not those of the file's mode).
    pub async fn setattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        handle: Option<Handle>,
        set: SetAttrs,
    ) -> Result<Stat> {
        let through = self.inner.open_file_of(handle, ino)?;
        self.inner.setattr(cred, ino, through.as_deref(), set).await
    }
    pub async fn readlink(&self, ino: InodeId) -> Result<Bytes> {
        self.inner.readlink(ino).await
    }
    /// Entries after the cookie `after` (0: from the start), "." and ".." not among them.
    pub async fn readdir(
        &self,
        cred: &Cred,
        dir: InodeId,
        after: u64,
        limit: u32,
        with_attrs: bool,
    ) -> Result<Listing> {
        self.inner.readdir(cred, dir, after, limit, with_attrs).await
    }
    pub async fn mkdir(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: impl Into<NewMode>,
    ) -> Result<Stat> {
        self.inner.mkdir(cred, parent, name, mode.into()).await
    }
    pub async fn mknod(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: impl Into<NewMode>,
        kind: FileKind,
        rdev: u32,
    ) -> Result<Stat> {
        self.inner.mknod(cred, parent, name, mode.into(), kind, rdev).await
    }
    pub async fn symlink(&self, cred: &Cred, parent: InodeId, name: &[u8], target: &[u8]) -> Result<Stat> {
        self.inner.symlink(cred, parent, name, target).await
    }
    pub async fn link(&self, cred: &Cred, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Stat> {
        self.inner.link(cred, ino, parent, name).await
    }
    pub async fn unlink(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        self.inner.unlink(cred, parent, name).await
    }
    pub async fn rmdir(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        self.inner.rmdir(cred, parent, name).await
    }
    pub async fn rename(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        self.inner.rename(cred, parent, name, new_parent, new_name, mode).await
    }
    pub async fn get_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        self.inner.get_xattr(cred, ino, name).await
    }
    pub async fn list_xattr(&self, cred: &Cred, ino: InodeId) -> Result<Vec<Bytes>> {
        self.inner.list_xattr(cred, ino).await
    }
    /// `create`: fail if it exists; `replace`: fail if it does not.
    pub async fn set_xattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
    ) -> Result<()> {
        self.inner.set_xattr(cred, ino, name, value, create, replace).await
    }
    pub async fn remove_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<()> {
        self.inner.remove_xattr(cred, ino, name).await
    }
    pub async fn statfs(&self) -> Result<Space> {
        self.inner.statfs().await
    }
    /// The same, within the limits of the volume that a file or directory is in.
    pub async fn statfs_at(&self, ino: InodeId) -> Result<Space> {
        self.inner.statfs_at(ino).await
    }
    /// Whether reads change access times, as `relatime` has it. They do unless this says otherwise.
    pub fn keep_access_times(&self, kept: bool) {
        self.inner.accesses.keep(kept)
    }
    /// Exact recursive usage of a directory.
    pub async fn usage(&self, dir: InodeId) -> Result<Usage> {
        self.inner.usage(dir).await
    }
    /// Whether the kernel may keep for [`NAME_LOAN`] that a name leads there, or nowhere: asked when the answer that says so is about
    /// to be sent. False: it must ask each time.
    pub fn lend_name(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> bool {
        self.inner.lend_name(dir, name, leads_to)
    }
    /// The kernel dropped the inode from its caches: what is kept here for it may go, too.
    pub fn forget(&self, ino: InodeId) {
        self.inner.forget(ino)
    }
}

/// Open files.
impl Client {
    pub async fn create(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: impl Into<NewMode>,
        exclusive: bool,
        open: OpenMode,
    ) -> Result<Opened> {
        self.inner.create(cred, parent, name, mode.into(), exclusive, open).await
    }
    /// A file without a name, opened for writing: [`Client::link`] may give it one, else it goes with its last close.
    pub async fn create_nameless(
        &self,
        cred: &Cred,
        parent: InodeId,
        mode: impl Into<NewMode>,
        open: OpenMode,
    ) -> Result<Opened> {
        self.inner.create_nameless(cred, parent, mode.into(), open).await
    }
    /// Whether the kernel's opinion of what this user may open is enough. It is not where rules for mounts
    /// may say otherwise.
    pub fn may_open_unasked(&self, uid: u32) -> bool {
        self.inner.may_open_unasked(uid)
    }
    /// Opens a file for reading without a message; `None`: use [`Client::open`]. That the caller may read it is for the caller to know.
    pub fn try_open(&self, ino: InodeId, open: OpenMode) -> Option<Opened> {
        self.inner.try_reopen(ino, open)
    }
    pub async fn open(&self, cred: &Cred, ino: InodeId, open: OpenMode) -> Result<Opened> {
        self.inner.open(cred, ino, open).await
    }
    /// Whether a close of this file has nothing to do but to end: nothing to save, no locks of the process to release. Asked when it is
    /// opened.
    pub fn closes_quietly(&self, handle: Handle) -> bool {
        self.inner.open_file(handle).is_some_and(|file| {
            let quietly = !file.mode.write && !file.inode.lock().closes_unlock;
            file.closes_quietly.store(quietly, Ordering::Relaxed);
            quietly
        })
    }
    /// Takes the bytes at once where lease and memory allow; `None`: use [`Client::write`].
    pub fn try_write(&self, handle: Handle, offset: u64, data: &[u8]) -> Option<Result<usize>> {
        self.inner.try_write(handle, Some(offset), data)
    }
    /// The same at the end of the file.
    pub fn try_append(&self, handle: Handle, data: &[u8]) -> Option<Result<usize>> {
        self.inner.try_write(handle, None, data)
    }
    pub async fn write(&self, handle: Handle, offset: u64, data: Bytes) -> Result<usize> {
        self.inner.write(handle, Some(offset), data).await
    }
    /// At the end of the file, also when other clients append: no two get the same place.
    pub async fn append(&self, handle: Handle, data: Bytes) -> Result<usize> {
        self.inner.write(handle, None, data).await
    }
    /// The bytes if all are cached here; `None`: use [`Client::read`].
    pub fn try_read(&self, handle: Handle, offset: u64, len: usize) -> Option<Result<Vec<Bytes>>> {
        self.inner.try_read(handle, offset, len)
    }
    /// Parts in order, together at most `len` bytes; fewer only at the end of the file.
    pub async fn read(&self, handle: Handle, offset: u64, len: usize) -> Result<Vec<Bytes>> {
        self.inner.read(handle, offset, len).await
    }
    /// Bytes and size are durable on all live targets and at the metadata leader.
    pub async fn fsync(&self, handle: Handle) -> Result<()> {
        self.inner.fsync(handle).await
    }
    /// The same, but for times: they follow with the next `fsync`, `flush` or write-back.
    pub async fn fdatasync(&self, handle: Handle) -> Result<()> {
        self.inner.fdatasync(handle).await
    }
    /// At `close(2)`: commits, and reports every write error that was not reported yet.
    pub async fn flush(&self, handle: Handle) -> Result<()> {
        self.inner.flush_handle(handle).await
    }
    /// The handle's end.
    pub async fn release(&self, handle: Handle) -> Result<()> {
        self.inner.release(handle).await
    }
    pub async fn fallocate(&self, handle: Handle, what: Allocate, offset: u64, len: u64) -> Result<()> {
        self.inner.fallocate(handle, what, offset, len).await
    }
    /// Copies between open files; how many bytes, fewer only at the end of `from` or where more would take long.
    pub async fn copy_range(
        &self,
        from: Handle,
        from_at: u64,
        to: Handle,
        to_at: u64,
        len: u64,
    ) -> Result<u64> {
        self.inner.copy_range(from, from_at, to, to_at, len).await
    }
    /// The kernel drops all pages of the file before anybody reads through this handle, which was just opened.
    pub fn drops_pages(&self, handle: Handle) {
        self.inner.drops_pages(handle)
    }
    /// Reads and writes through this handle, which was just opened, leave no pages.
    pub fn keeps_no_pages(&self, handle: Handle) {
        self.inner.keeps_no_pages(handle)
    }
    /// The kernel fills pages through this handle: they are forgotten where no lease protects them.
    pub fn keeps_pages(&self, handle: Handle) {
        self.inner.keeps_pages(handle)
    }
    /// Reads through this handle leave the access time as it is (`O_NOATIME`).
    pub fn leaves_access_time(&self, handle: Handle) {
        self.inner.leaves_access_time(handle)
    }
    /// Records the thread that opened a file; `opener` returns it.
    pub fn set_opener(&self, handle: Handle, thread: u32) {
        self.inner.set_opener(handle, thread)
    }
    /// The thread that opened a file for writing; `None`: not known, or the handle cannot write.
    pub fn opener(&self, handle: Handle) -> Option<u32> {
        self.inner.opener(handle)
    }
    /// Start of data at or after `offset`; `None`: there is none.
    pub async fn seek_data(&self, handle: Handle, offset: u64) -> Result<Option<u64>> {
        self.inner.seek_data(handle, offset).await
    }
    /// Start of a hole at or after `offset` (the end of the file counts as one); `None` past the end.
    pub async fn seek_hole(&self, handle: Handle, offset: u64) -> Result<Option<u64>> {
        self.inner.seek_hole(handle, offset).await
    }
    pub fn status(&self) -> ClientStatus {
        self.inner.counters.snapshot(&self.inner.budget)
    }
    /// On the clock of [`Waiting::since`].
    pub fn now(&self) -> Instant {
        self.inner.env.clock.now()
    }
    /// What calls have been waiting for for a while.
    pub fn waits(&self) -> Vec<Waiting> {
        self.inner.data.waits.list()
    }
    /// Flushes everything and closes the session. An error names what could not be saved.
    pub async fn shutdown(&self) -> Result<()> {
        self.inner.shutdown().await
    }
}

/// Bytes that are at home only.
impl Client {
    /// Gives the space of whole stripes in `from..to`, and of the tail, back: home has them.
    pub async fn evict(&self, cred: &Cred, ino: InodeId, from: u64, to: u64) -> Result<Evicted> {
        self.inner.evict(cred, ino, from, to).await
    }
    /// Has bytes brought back when there is time for it; waits for nothing.
    pub async fn want_recall(&self, ino: InodeId, from: u64, to: u64) -> Result<()> {
        self.inner.want_recall(ino, from, to).await
    }
    /// Waits until all of a file is here. May be dropped at any time.
    pub async fn recall_file(&self, ino: InodeId) -> Result<()> {
        self.inner.recall_file(ino).await
    }
    /// A pinned file is never evicted.
    pub async fn pin(&self, cred: &Cred, ino: InodeId, pinned: bool) -> Result<()> {
        self.inner.pin(cred, ino, pinned).await
    }
    /// Where a file's bytes are.
    pub async fn tier_state(&self, ino: InodeId) -> Result<TierState> {
        self.inner.tier_state(ino).await
    }
    /// Whether a read or a write through the handle may have to wait for bytes that are at home.
    pub fn may_wait_for_home(&self, handle: Handle) -> bool {
        self.inner.may_wait_for_home(handle)
    }
    /// Waits until `len` bytes from `offset` (`None`: the end of the file) on are here. Reads and writes do so themselves,
    /// but this may be dropped at any time.
    pub async fn bring_back(&self, handle: Handle, offset: Option<u64>, len: usize) -> Result<()> {
        self.inner.bring_back_for(handle, offset, len).await
    }

    /// How full pools and volumes are, and the eviction watermarks; `set` changes a volume's marks first.
    pub async fn eviction(&self, cred: &Cred, set: Option<SetMarks>) -> Result<Vec<EvictionLevel>> {
        self.inner.eviction(cred, set).await
    }

    // ---- movers

    /// Asks for bytes to bring back, and waits for some, `wait` at most.
    pub async fn take_recalls(&self, max: u32, wait: Duration) -> Result<Vec<Recall>> {
        self.inner.take_recalls(max, wait).await
    }
    /// Whole stripes of a recall from `offset` on, or up to its end. Durable on all live targets.
    pub async fn fill(&self, recall: &Recall, offset: u64, data: Bytes) -> Result<()> {
        self.inner.fill(recall, offset, data).await
    }
    /// All of a recall is filled: it may be read.
    pub async fn filled(&self, recall: Recall) -> Result<()> {
        self.inner.filled(recall, None).await
    }
    /// The same, with checksums of what was read where nothing proved it before.
    pub async fn filled_with(&self, recall: Recall, learned: Option<Learned>) -> Result<()> {
        self.inner.filled(recall, learned).await
    }
    /// `retry`: later, by whoever has time; else whoever waits for it is told `error`.
    pub async fn recall_failed(&self, recall: Recall, error: &str, retry: bool) -> Result<()> {
        self.inner.recall_failed(recall, error, retry).await
    }
}

/// Locks on files, cluster-wide.
impl Client {
    /// Locks, converts or unlocks a range without waiting for other holders.
    pub async fn try_lock(&self, handle: Handle, wish: LockWish) -> Result<Locked> {
        self.inner.try_lock(handle, wish).await
    }
    /// Waits until the lock is there; a notified `interrupt` ends the wait.
    pub async fn wait_lock(&self, handle: Handle, wish: LockWish, interrupt: &Notify) -> Result<Locked> {
        self.inner.wait_lock(handle, wish, interrupt).await
    }
    /// The first lock in the way.
    pub async fn test_lock(&self, handle: Handle, wish: LockWish) -> Result<Option<InTheWay>> {
        self.inner.test_lock(handle, wish).await
    }
    /// At `close(2)`: the owner's locks of the file end.
    pub async fn unlock_owner(&self, handle: Handle, owner: LockOwner) -> Result<()> {
        self.inner.unlock_owner(handle, owner).await
    }
    /// Who holds and who waits, and how many more there are than are told.
    pub async fn list_locks(&self, ino: InodeId) -> Result<(Vec<LockEntry>, u32)> {
        self.inner.list_locks(ino).await
    }
    /// How often changes or locks were lost, and the last of them.
    pub fn losses(&self) -> (u64, Vec<Loss>) {
        self.inner.losses()
    }
}

/// So that it can be told while the coordinator is away.
async fn learn_space(cluster: Cluster) {
    if let Err(e) = cluster.known_status().await {
        tracing::debug!("the space is not known yet: {e}");
    }
}

async fn keep_session(inner: Weak<Inner>) {
    let mut due = None;
    while let Some((clock, period)) =
        inner.upgrade().map(|i| (i.env.clock.clone(), i.session.keep_alive_period()))
    {
        let until = *due.get_or_insert(clock.now() + period);
        clock.sleep(until.since(clock.now()).min(SESSION_POLL)).await;
        // A client that was shut down has no session, and wants none.
        let Some(inner) = inner.upgrade().filter(|i| !i.closed.load(Ordering::Acquire)) else { return };
        // A leader that is back waits for those who were there before, also if they have nothing to ask.
        if clock.now() >= until || !inner.session.is_taken_up() {
            inner.session.keep_alive().await;
            due = None;
        }
    }
}

/// Tells what calls wait for, and leaves a leader that is known to be elsewhere by now.
async fn watch_waits(inner: Weak<Inner>, title: String) {
    let (mut reported, mut leader) = (None, String::new());
    while let Some(clock) = inner.upgrade().map(|i| i.env.clock.clone()) {
        clock.sleep(SESSION_POLL).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.session.leave_old_address();
        let waits = &inner.data.waits;
        waits.end(&leader);
        if let Some((since, calls)) = inner.session.silence() {
            let name = inner.data.cluster.leader_name(&inner.config.namespace).unwrap_or_default();
            leader = format!("the metadata leader {name}");
            waits.note(&leader, since, calls);
        }
        waits.report();
        let (list, now) = (waits.list(), clock.now());
        let due = match reported {
            None => !list.is_empty(),
            Some(at) => list.is_empty() || now.since(at) >= REPORT_EVERY,
        };
        if due {
            reported = (!list.is_empty()).then_some(now);
            let ms = |w: &Waiting| now.since(w.since).as_millis() as u64;
            let waits = list.into_iter().map(|w| Wait { ms: ms(&w), what: w.what, calls: w.calls }).collect();
            let reporting = inner.data.cluster.report_waits(title.clone(), waits);
            let _ = clock.timeout(REPORT_PATIENCE, reporting).await; // a coordinator that is away has others' troubles to show
        }
    }
}

async fn write_back(inner: Weak<Inner>) {
    while let Some(clock) = inner.upgrade().map(|i| i.env.clock.clone()) {
        clock.sleep(WRITE_BACK_PERIOD).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.write_back_aged().await;
        inner.report_accesses().await;
        inner.report_old_closes().await;
        inner.return_reservations().await;
        inner.give_back_forgotten().await;
    }
}
