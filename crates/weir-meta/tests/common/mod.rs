//! A metadata role on a simulated node, and clients whose replies the test chooses.
#![allow(dead_code, reason = "each test program uses its own part")]
use bytes::Bytes;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, BoxFuture, Env};
use weir_kv::engine::{Engine, EngineConfig};
use weir_meta::{LayoutPolicy, Meta, MetaConfig, Purge, StripeTruncation};
use weir_proto::access::{AccessRule, AccessRules};
use weir_proto::lock::LockFree;
use weir_proto::map::{Role, Scheme};
use weir_proto::meta::*;
use weir_proto::volume::{Retention, Volume, VolumeChange};
use weir_proto::{
    ClusterId, Error, FileId, InodeId, NamespaceId, PgId, Request, Result, SessionId, VolumeId,
};
use weir_rpc::{Call, Connection, Handled, Identity, Reply, Server, Service};

pub const LEASE_MS: u32 = 4000;
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Of the cluster map that the leader has.
pub const MAP_VERSION: u64 = 7;
pub const ROOT: InodeId = InodeId::ROOT;

/// Targets that remember what was dropped, and may be out of reach.
#[derive(Default)]
pub struct Targets {
    pub dropped: Mutex<Vec<FileId>>,
    pub evicted: Mutex<Vec<(InodeId, StripeTruncation)>>,
    pub away: Mutex<bool>,
}

impl Purge for Targets {
    fn drop_stripes(
        &self,
        file: FileId,
        _: PgId,
        pg_count: u32,
        truncation: StripeTruncation,
    ) -> BoxFuture<'static, Result<()>> {
        assert!(pg_count > 0);
        let away = *self.away.lock().unwrap();
        if !away {
            match truncation {
                StripeTruncation::ALL => self.dropped.lock().unwrap().push(file),
                part => self.evicted.lock().unwrap().push((file.inode, part)),
            }
        }
        let result = if away { Err(Error::unavailable("target t3 is away")) } else { Ok(()) };
        Box::pin(std::future::ready(result))
    }
}

pub struct Node {
    pub meta: Meta,
    pub at_home: Arc<Mutex<BTreeSet<InodeId>>>,
    pub targets: Arc<Targets>,
    _server: Server,
}

fn addr() -> Addr {
    "tcp:10.0.0.1:7000".parse().unwrap()
}
fn identity(env: &Env, name: &str, role: Role) -> Identity {
    Identity::new(env, name, role, Some(ClusterId([7; 16])))
}

thread_local! {
    /// Files that home has all of, also after a restart of the metadata role.
    static AT_HOME: Arc<Mutex<BTreeSet<InodeId>>> = Arc::default();
    /// How full the targets are.
    pub static SPACE: std::cell::Cell<Option<weir_meta::Level>> = const { std::cell::Cell::new(None) };
    /// Rules for mounts, and how often they were changed.
    static RULES: std::cell::RefCell<(u64, Vec<AccessRule>)> = const { std::cell::RefCell::new((0, Vec::new())) };
    /// What these refused.
    pub static REFUSED: std::cell::RefCell<Vec<weir_meta::Refusal>> = const { std::cell::RefCell::new(Vec::new()) };
    /// Processes that this test's machine knows to be gone.
    pub static GONE: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) };
    /// How often a leader asked for one.
    pub static GONE_ASKED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The leader has a map with these rules for mounts.
pub fn set_rules(rules: Vec<AccessRule>) {
    RULES.with_borrow_mut(|known| *known = (known.0 + 1, rules));
}

/// The result of the work, done in a world made from the seed.
pub fn simulate<T>(seed: u64, work: impl AsyncFnOnce(World) -> T) -> T {
    let world = World::new(seed, SimConfig::default());
    world.run(work(world.clone()))
}

/// The process information of the client with this name.
pub fn process_of(name: &str) -> String {
    format!("process of {name}")
}

/// Starts the metadata role on the node "meta", with the present contents of its disk.
pub async fn start(world: &World) -> Node {
    let env = world.node("meta");
    let config = EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 4 << 20, journal_keep_bytes: 0 };
    let kv = Engine::open(&env, Path::new("/meta"), config).await.unwrap();
    let targets = Arc::new(Targets::default());
    let layout = |_: &weir_proto::volume::Policy| {
        let scheme = Scheme { data: 4, parity: 2 };
        Some(LayoutPolicy { scheme, cell_shift: 20, first_pg: PgId(0), pg_count: 24 })
    };
    let at_home: Arc<Mutex<BTreeSet<InodeId>>> = AT_HOME.with(Arc::clone);
    let known = at_home.clone();
    let config = MetaConfig {
        namespace: NamespaceId(1),
        lease_ms: LEASE_MS,
        layout: Arc::new(layout),
        at_home: Arc::new(move |_, ino, _, _, _| match known.lock().unwrap().contains(&ino) {
            true => Ok(()),
            false => Err(Error::denied("home does not have it")),
        }),
        space: Arc::new(|| Box::pin(std::future::ready(SPACE.get()))),
        purge: targets.clone(),
        gone: Arc::new(|process| {
            GONE_ASKED.set(GONE_ASKED.get() + 1);
            GONE.with_borrow(|gone| gone.iter().any(|p| p == process))
        }),
        map_version: Arc::new(|| MAP_VERSION + RULES.with_borrow(|(changes, _)| *changes)),
        takes_data: Arc::new(|| true),
        access: Arc::new(|| RULES.with_borrow(|(_, rules)| AccessRules(rules.clone()))),
        refused: Arc::new(|refusal| REFUSED.with_borrow_mut(|all| all.push(refusal))),
        audits: Arc::new(Vec::new),
        records_holds: Arc::new(|| true),
        answers_early: Arc::new(|| true),
        right: weir_meta::copies::Right::alone(),
        led_until: None,
        witness: Arc::new(|_| ()),
    };
    let meta = Meta::open(&env, kv, config).unwrap();
    let running = meta.clone();
    env.tasks.spawn("meta", async move {
        let e = running.run().await;
        panic!("the metadata role stopped: {e}");
    });
    let me = identity(&env, "meta", Role::Meta);
    let _server = weir_rpc::serve(&env, &[addr()], me, Arc::new(meta.clone())).await.unwrap();
    Node { meta, at_home, targets, _server }
}

/// A client's action on revokes.
#[derive(Default)]
pub struct Revokes {
    pub seen: Mutex<Vec<Revoke>>,
    /// Never answers.
    pub deaf: Mutex<bool>,
    /// Answers one after the other.
    pub slow: Mutex<Option<Slow>>,
    /// Unanswered at the same time, now and at most.
    pub open: Arc<Mutex<(usize, usize)>>,
}

/// How long each answer of a slow client takes.
#[derive(Clone)]
pub struct Slow {
    pub env: Env,
    pub pause: Duration,
    pub turn: Arc<tokio::sync::Mutex<()>>,
}

impl Service for Revokes {
    fn handle(&self, call: Call) -> Handled {
        if call.method == LockFree::METHOD && *self.deaf.lock().unwrap() {
            return Handled::Later(Box::pin(std::future::pending()));
        }
        let revoke = match call.decode::<Revoke>() {
            Ok(revoke) => revoke,
            Err(e) => return Handled::Now(Err(e)),
        };
        self.seen.lock().unwrap().push(revoke);
        if let Some(Slow { env, pause, turn }) = self.slow.lock().unwrap().clone() {
            let open = self.open.clone();
            let now = open.lock().unwrap().0 + 1;
            let most = open.lock().unwrap().1.max(now);
            *open.lock().unwrap() = (now, most);
            return Handled::Later(Box::pin(async move {
                let turn = turn.lock().await;
                env.clock.sleep(pause).await;
                open.lock().unwrap().0 -= 1;
                drop(turn);
                Ok(Reply::new(&()))
            }));
        }
        if *self.deaf.lock().unwrap() {
            return Handled::Later(Box::pin(std::future::pending()));
        }
        Handled::Now(Ok(Reply::new(&())))
    }
}

pub struct Client {
    pub env: Env,
    pub connection: Connection,
    pub revokes: Arc<Revokes>,
    pub session: SessionId,
    next: std::sync::atomic::AtomicU64,
}

impl Client {
    pub async fn start(world: &World, name: &str) -> Client {
        Client::with_role(world, name, Role::Console).await // may do what mounts and movers do
    }
    pub async fn with_role(world: &World, name: &str, role: Role) -> Client {
        let env = world.node(name);
        let revokes = Arc::new(Revokes::default());
        let connection = dial(&env, name, role, &revokes).await;
        let open = SessionOpen { namespace: NamespaceId(1), client: name.into(), process: process_of(name) };
        let opened = connection.call(&open, vec![], PATIENCE).await.unwrap().0;
        assert_eq!(opened.lease_ms, LEASE_MS);
        let client = Client { env, connection, revokes, session: opened.session, next: 1.into() };
        client.keep_alive();
        client
    }
    pub fn keep_alive(&self) {
        let (clock, connection, session) = (self.env.clock.clone(), self.connection.clone(), self.session);
        self.env.tasks.spawn("keep alive", async move {
            while connection.call(&KeepAlive { session, saved: 0 }, vec![], PATIENCE).await.is_ok() {
                clock.sleep(Duration::from_millis(1000)).await;
            }
        });
    }
    /// A new connection; the session is not resumed yet.
    pub async fn reconnect(&mut self, name: &str) {
        self.connection = dial(&self.env, name, Role::Console, &self.revokes).await;
    }
    pub async fn resume(&self, held: Vec<HeldLease>) -> Result<SessionResumed> {
        // In two parts, as a client with many leases must.
        let mut first = held;
        let last = first.split_off(first.len() / 2);
        self.call(&SessionResume { session: self.session, held: first, more: true }).await?;
        let resumed = self.call(&SessionResume { session: self.session, held: last, more: false }).await;
        if resumed.is_ok() {
            self.keep_alive();
        }
        resumed
    }
    pub async fn call<R: Request>(&self, request: &R) -> Result<R::Reply> {
        self.connection.call(request, vec![], PATIENCE).await.map(|(reply, _)| reply)
    }
    pub fn op(&self) -> Op {
        let n = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Op { session: self.session, slot: (n % 8) as u32, seq: n }
    }
    pub async fn create(&self, parent: InodeId, name: &str) -> Result<Created> {
        let (op, cred) = (self.op(), root());
        self.call(&Create {
            op,
            cred,
            parent,
            name: b(name),
            mode: 0o644,
            umask: 0,
            exclusive: true,
            open: 2,
        })
        .await
    }
    pub async fn mkdir(&self, parent: InodeId, name: &str) -> Result<Made> {
        self.call(&Mkdir { op: self.op(), cred: root(), parent, name: b(name), mode: 0o755, umask: 0 }).await
    }
    pub async fn unlink(&self, parent: InodeId, name: &str) -> Result<Removed> {
        self.call(&Unlink { op: self.op(), cred: root(), parent, name: b(name) }).await
    }
    /// The retention of the topmost volume from now on.
    pub async fn keep(&self, retention: Retention) -> Volume {
        let (op, cred, volume) = (self.op(), root(), VolumeId::ROOT);
        let (name, owner, admins, quota, policy) = (None, None, None, None, None);
        let retention = Some(retention);
        self.call(&VolumeChange { op, cred, volume, name, owner, admins, quota, policy, retention })
            .await
            .unwrap()
    }
    pub async fn lookup(&self, parent: InodeId, name: &str) -> Result<LookedUp> {
        self.call(&Lookup { session: self.session, cred: root(), parent, name: b(name) }).await
    }
    pub async fn getattr(&self, ino: InodeId) -> Result<Entry> {
        self.call(&GetAttr { session: self.session, ino }).await
    }
    pub async fn open(&self, ino: InodeId, read: bool, write: bool) -> Result<Opened> {
        self.call(&Open {
            session: self.session,
            cred: root(),
            ino,
            read,
            write,
            truncate: false,
            execute: false,
        })
        .await
    }
    pub async fn close(&self, ino: InodeId, write: bool) -> Result<()> {
        let closed = Closed { ino, reads: u32::from(!write), writes: u32::from(write) };
        self.call(&Close { session: self.session, files: vec![closed] }).await
    }
    pub async fn acquire(&self, ino: InodeId, kind: LeaseKind) -> Result<Entry> {
        self.call(&AcquireLease { session: self.session, ino, kind, renew: false }).await
    }
    pub async fn commit(&self, ino: InodeId, token_epoch: u32, size: u64, clean: bool) -> Result<Entry> {
        let request = Commit {
            op: self.op(),
            ino,
            token_epoch,
            size,
            mtime: Time { nanos: 1 },
            allocated: size,
            inline: None,
            drop_inline: false,
            clean,
            close_writes: 0,
            data_end: size,
            append_token: false,
            changed: Vec::new(),
        };
        self.call(&request).await
    }
    pub fn revoked(&self) -> Vec<(InodeId, LeaseKind)> {
        self.revokes.seen.lock().unwrap().iter().map(|r| (r.ino, r.keep)).collect()
    }
    /// From now on it answers each revoke this long after the one before.
    pub fn set_slow(&self, pause: Duration) {
        let slow = Slow { env: self.env.clone(), pause, turn: Arc::default() };
        *self.revokes.slow.lock().unwrap() = Some(slow);
    }
    pub fn set_deaf(&self, deaf: bool) {
        *self.revokes.deaf.lock().unwrap() = deaf;
    }
}

async fn dial(env: &Env, name: &str, role: Role, revokes: &Arc<Revokes>) -> Connection {
    let me = identity(env, name, role);
    let until = env.clock.now() + PATIENCE;
    loop {
        match weir_rpc::connect(env, &addr(), &me, revokes.clone()).await {
            Ok(connection) => return connection,
            Err(e) if env.clock.now() > until => panic!("{e}"),
            Err(_) => env.clock.sleep(Duration::from_millis(20)).await,
        }
    }
}

pub fn held(entry: &Entry, kind: LeaseKind, open_read: u32, open_write: u32) -> HeldLease {
    let token_epoch = entry.lease.token_epoch;
    HeldLease { ino: entry.attr.ino, kind, token_epoch, open_read, open_write, append_token: false }
}
pub fn root() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![] }
}
pub fn b(name: &str) -> Bytes {
    Bytes::copy_from_slice(name.as_bytes())
}
pub fn names(listing: &Listing) -> BTreeSet<String> {
    listing.entries.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()).collect()
}
