//! Files over stripes over cells: turns an application's reads, writes and names into requests to targets and
//! the metadata leader.
//!
//! Invariants: nothing is cached without a lease; an acknowledged byte is in a dirty buffer or on targets; no
//! byte that fails its checksum is returned; memory stays within one budget. Knows nothing of FUSE, Python or
//! HTTP.
#![forbid(unsafe_code)]

mod accesses;
mod api;
mod append_token;
mod assembly;
mod backups;
mod base;
mod budget;
mod cache;
mod callbacks;
mod changed;
mod closes;
pub mod crash_points;
mod data;
mod direct;
mod dirty;
mod drops;
mod evict_own;
mod fetch;
mod files;
mod flush;
mod group;
mod handles;
mod hole;
mod idle;
mod inner;
mod inode;
mod inodes;
mod join;
mod kernel;
mod known_names;
mod latency;
mod layers;
mod leader;
mod lease;
mod lent_names;
mod local_names;
mod locks;
mod losses;
mod maps;
mod member;
mod memory;
mod names;
mod new_names;
mod patience;
mod plan;
mod posix;
mod prefetch;
mod quota;
mod read;
mod recall;
mod recover;
mod resize;
mod seek;
mod send;
mod shipping;
mod snapshot_file;
mod space;
mod status;
mod table;
mod unsaved;
mod volumes;
mod waits;
mod watching;
mod window;
mod write;

pub use api::{
    Allocate, ClientConfig, ClientStatus, Forget, Handle, KernelCache, Loss, NewMode, NoKernel, OpenMode,
    Opened, SetAttrs, SetTime, Space, Stat,
};
pub use backups::BackupEdit;
pub use lent_names::LOAN as NAME_LOAN;
pub use locks::{InTheWay, LockWish, Locked};
pub use recall::Recall;
pub use seek::COPY_BYTES_MAX;
pub use shipping::NewRelation;
pub use snapshot_file::SnapshotFile;
pub use volumes::{NewVolume, VolumeEdit};
pub use waits::Waiting;

use base::Base;
use callbacks::Callbacks;
use data::Data;
use inner::Inner;
use leader::{Holder, Identity, Leader};
use maps::MapsSeen;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_coord::{Cluster, Observer};
use weir_env::{BoxFuture, Env, Instant, TaskHandle};
use weir_proto::coord::Wait;
use weir_proto::meta::Time;
use weir_proto::{ClusterId, Result, SessionId};

/// The interval at which write-back checks changed data.
const WRITE_BACK_PERIOD: Duration = Duration::from_secs(1);
/// The interval at which a client checks its connection to the leader.
const SESSION_POLL: Duration = Duration::from_millis(500);
/// Pause between tries to find the namespace's leader.
const LEADER_PAUSE: Duration = Duration::from_millis(50);
/// How long a starting client waits for the cluster: the user who mounts is present to see the failure.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);
/// The interval of reports to the coordinator on what calls wait for, and the patience for each.
const REPORT_EVERY: Duration = Duration::from_secs(5);
const REPORT_PATIENCE: Duration = Duration::from_secs(1);

/// One client of a namespace: one per mount or library user. Cheap to clone; its tasks end with the last
/// clone.
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

impl Client {
    /// Finds the cluster and opens a session at the namespace's metadata leader.
    pub fn connect(
        env: Env,
        config: ClientConfig,
        kernel: Arc<dyn KernelCache>,
    ) -> BoxFuture<'static, Result<Client>> {
        Box::pin(Client::begin(env, config, kernel))
    }
    async fn begin(env: Env, config: ClientConfig, kernel: Arc<dyn KernelCache>) -> Result<Client> {
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
        let identity = Identity { namespace, client: title.clone(), process: config.process.clone() };
        let counters: Arc<status::Counters> = Arc::default();
        let leader =
            Leader::new(env.clone(), channel, identity, config.patience, maps.clone(), counters.clone());
        let data = Data::new(env.clone(), cluster, namespace, counters, maps.clone());
        let inner = Inner::new(Base::new(env.clone(), config, kernel, maps, leader, data));
        callbacks.set(inner.weak());
        let holder: Weak<dyn Holder> = inner.weak();
        inner.leader.set_holder(holder);
        inner.leader.check(deadline).await?;
        let tasks = vec![
            env.tasks.spawn("learn of the space", learn_space(inner.data.cluster.clone())),
            env.tasks.spawn("keep the session", keep_session(inner.weak())),
            env.tasks.spawn("write back", write_back(inner.weak())),
            env.tasks.spawn("return idle inodes", return_idle(inner.weak())),
            env.tasks.spawn("watch what calls wait for", watch_waits(inner.weak(), title)),
            env.tasks.spawn("watch the way to the leader", watch_way(inner.weak())),
        ];
        Ok(Client { inner, _tasks: Arc::new(Background(tasks)) }.with_meters())
    }
    /// The cluster of this client.
    pub fn cluster(&self) -> ClusterId {
        self.inner.data.cluster.id()
    }
    pub fn status(&self) -> ClientStatus {
        self.inner.status()
    }
    /// For simulators and tests: panics if an invariant of the client's state does not hold.
    pub fn check(&self) {
        self.inner.check()
    }
    /// The time on the clock of [`Waiting::since`].
    pub fn now(&self) -> Instant {
        self.inner.env.clock.now()
    }
    /// Causes that calls have been waiting for for a while.
    pub fn waits(&self) -> Vec<Waiting> {
        self.inner.data.waits.list()
    }
    /// Flushes everything and closes the session. An error names the files that could not be saved.
    pub fn shutdown(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.shutdown())
    }
    /// The session, unless a shutdown has closed it. If not, the leader waits for it after a failover, so the
    /// next client of the process closes it by [`Client::close_session`].
    pub fn session_left(&self) -> Option<SessionId> {
        self.inner.leader.unclosed()
    }
    /// Closes the session of an earlier client of this process.
    pub fn close_session(&self, session: SessionId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.leader.close_other(session))
    }
    /// The number of losses of changes or locks, and the last of them.
    pub fn losses(&self) -> (u64, Vec<Loss>) {
        self.inner.losses.list()
    }
}

/// So that it can be shown while the coordinator is unreachable.
async fn learn_space(cluster: Cluster) {
    if let Err(e) = cluster.known_status().await {
        tracing::debug!("the space is not known yet: {e}");
    }
}

async fn keep_session(inner: Weak<Inner>) {
    let mut due = None;
    while let Some((clock, period)) =
        inner.upgrade().map(|i| (i.env.clock.clone(), i.leader.keep_alive_period()))
    {
        let until = *due.get_or_insert(clock.now() + period);
        clock.sleep(until.since(clock.now()).min(SESSION_POLL)).await;
        // A client that was shut down has no session, and needs none.
        let Some(inner) = inner.upgrade().filter(|i| !i.leader.is_closing()) else { return };
        // A restarted leader waits for its earlier clients, even if they have no requests.
        if clock.now() >= until || !inner.leader.is_taken_up() {
            inner.leader.keep_alive().await;
            due = None;
        }
    }
}

/// Goes to a leader that is silent here through another node, and back once the direct way works.
async fn watch_way(inner: Weak<Inner>) {
    while let Some(clock) = inner.upgrade().map(|i| i.env.clock.clone()) {
        clock.sleep(SESSION_POLL).await;
        let Some((channel, is_late)) = inner.upgrade().map(|inner| inner.leader.way()) else { return };
        channel.compare_ways(is_late).await;
    }
}

/// Reports what calls wait for, and leaves a leader that has moved elsewhere.
async fn watch_waits(inner: Weak<Inner>, title: String) {
    let (mut reported, mut leader) = (None, String::new());
    while let Some(clock) = inner.upgrade().map(|i| i.env.clock.clone()) {
        clock.sleep(SESSION_POLL).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.leader.leave_old_address();
        let waits = &inner.data.waits;
        waits.end(&leader);
        if let Some((since, calls)) = inner.leader.silence() {
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
            let _ = clock.timeout(REPORT_PATIENCE, reporting).await; // the next report repeats it
        }
    }
}

async fn write_back(inner: Weak<Inner>) {
    while let Some(clock) = inner.upgrade().map(|i| i.env.clock.clone()) {
        clock.sleep(WRITE_BACK_PERIOD).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.write_back_aged().await;
        inner.accesses.report().await;
        inner.closes.report_old().await;
        inner.quota.return_unused().await;
    }
}

/// Not in the task of write-back: the kernel may have to wait for a page before it drops an inode.
async fn return_idle(inner: Weak<Inner>) {
    while let Some(clock) = inner.upgrade().map(|i| i.env.clock.clone()) {
        clock.sleep(WRITE_BACK_PERIOD).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.return_idle().await;
    }
}

/// The time of the machine, for times that users see.
fn wall_time(env: &Env) -> Time {
    Time { nanos: env.clock.wall().0 }
}
