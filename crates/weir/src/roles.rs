//! Each role as a foreground process: configuration in, service up, readiness notified, orderly end on a
//! signal.
use crate::certificate::{self, Own};
use crate::cli_roles::{CoordRole, MetaRole, MountRole, MoverRole, RoleArgs, StorageRole};
use crate::commands::file;
use crate::commands::restore;
use crate::commands::tiering;
use crate::config::{self, Config, EtcdAccess, Text};
use crate::failure::{Doing, Failure, Outcome};
use crate::helper::MountWords;
use crate::local::local_cluster::{self, LocalCluster};
use crate::local::process::{PidFile, is_gone, mounts_elsewhere, own_process};
use crate::log;
use crate::machine;
use crate::notify::{self, Manager};
use crate::observe::host_id;
use crate::reporting::{self, Reporter, Unreached};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use weir_client::{Client, ClientConfig, NoKernel};
use weir_coord::etcd::{Etcd, EtcdConfig, StorePlace};
use weir_coord::{Cluster, CoordConfig, Observer};
use weir_env::real::{RealConfig, env_with};
use weir_env::{Addr, Env};
use weir_kv::EngineConfig;
use weir_meta::export::Totals;
use weir_node::{
    Failed, MetaPlace, Site, Step, StoragePlace, import_namespace, keep_history, start_coord, start_meta,
    start_shared_coord, start_storage,
};
use weir_proto::condition::REPORT_EVERY_MS;
use weir_proto::export::ExportHead;
use weir_proto::home_rule::HomeRule;
use weir_proto::lock::{LOCK_END, LockKind, LockSpace};
use weir_proto::map::Role;
use weir_proto::meta::Attr;
use weir_proto::{Error, ErrorKind, InodeId, MIB, NamespaceUuid};
use weir_rpc::Server;

/// The variables that `main` read from the environment.
pub struct Environment {
    /// `WEIR_LOG`: the level of the log; overrides the configuration.
    pub log: Option<String>,
    /// `WEIR_LOG_FILE`, from `weir up`: the file behind standard error. Tests limit it by `WEIR_LOG_BYTES`.
    pub log_file: Option<log::LogFile>,
    /// `WEIR_FRAMES`: directory of real detector frames.
    pub frames: Option<PathBuf>,
    /// `WEIR_KILL_AT`, for tests: the point at which a role's process kills itself.
    pub kill_at: Option<String>,
    /// `AWS_ACCESS_KEY_ID` and others: a mover's keys for S3 if the home's URL names no file.
    pub s3_keys: Option<weir_home::KeySource>,
    /// `JOURNAL_STREAM`: the journal's stream, if standard error goes there.
    pub journal: Option<String>,
    /// The variables of systemd's notification.
    pub notify: notify::Variables,
}

/// How long a client waits for a coordinator that starts at the same time.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(30);
/// A server waits for its coordinator for ever, and reports it: machines start in any order.
const SERVERS_PATIENCE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How long an orderly end may take before the process just exits.
const LEAVE_PATIENCE: Duration = Duration::from_millis(500);
/// How long calls at a detached mount may continue; those that still wait then get an error.
const LAST_CALLS_PATIENCE: Duration = Duration::from_secs(2);
/// How long it waits after that for the last open file.
const LAST_USE_PATIENCE: Duration = Duration::from_secs(3);
/// Idle buffers that a server keeps: it must stay below 256 MiB in all.
const SERVER_BUFFERS_BYTES: usize = 64 << 20;
/// A mover's nice value above that of its parent: on a machine that others need, too, it uses what they
/// leave.
const MOVER_NICE: i32 = 10;
/// A mover caches nothing: its memory has pieces in flight.
const MOVER_MEMORY_BYTES: u64 = 16 * MIB;
const MOVER_BUFFERS_BYTES: usize = 64 << 20;
/// The pause before a mover that lost its leader reconnects, in addition to the wait of each try.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// The patience for the end of its session with the leader.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// The number of locks that fit an attribute's value.
const LOCKS_SHOWN_MAX: usize = 150;
/// More stripes than fit an attribute's value are not listed.
const STRIPES_LISTED_MAX: u64 = 200;

pub fn check_file(file: &Path) -> Outcome<()> {
    let config = read(file)?;
    config::check(&file.display().to_string(), &config)?;
    println!("{}: no errors", file.display());
    Ok(())
}

fn read(file: &Path) -> Outcome<Config> {
    let text = std::fs::read_to_string(file).doing(format_args!("read {}", file.display()))?;
    config::parse(&file.display().to_string(), &text)
}

/// The file, if any, overridden by flags.
fn configure(args: &RoleArgs, role: &str) -> Outcome<Config> {
    let mut config = args.config.as_deref().map(read).transpose()?.unwrap_or_default();
    let texts = |addrs: &[Addr]| addrs.iter().cloned().map(Text).collect();
    if let Some(name) = &args.name {
        config.node.name.clone_from(name);
    }
    if !args.listen.is_empty() {
        config.node.listen = texts(&args.listen);
    }
    if !args.coordinator.is_empty() {
        config.cluster.coordinators = texts(&args.coordinator);
    }
    if let Some(format) = args.log_format {
        config.node.log_format = Text(format);
    }
    if config.node.host.is_empty() {
        config.node.host = host_id();
    }
    if !config.node.rack.is_empty() {
        config.node.host = format!("{}/{}", config.node.rack, config.node.host);
    }
    if config.node.name.is_empty() {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        config.node.name = format!("{role}-{host}");
    }
    Ok(config)
}

/// Shared by all roles.
struct Node {
    env: Env,
    config: Config,
    pid_file: Option<PathBuf>,
    manager: Manager,
    /// The node's certificate, if it has one.
    own: Option<Own>,
}

impl Node {
    fn required(&self, path: &Path, what: &str, flag: &str) -> Outcome<PathBuf> {
        if path.as_os_str().is_empty() {
            return Err(Failure::new(Error::invalid(format!("{what} is not set")), flag.to_string()));
        }
        local_cluster::absolute(path)
    }
    fn listen(&self) -> Vec<Addr> {
        match self.config.node.listen.as_slice() {
            [] => vec![Addr::Tcp((std::net::Ipv6Addr::UNSPECIFIED, 0).into())],
            some => some.iter().map(|t| t.0.clone()).collect(),
        }
    }
    fn coordinators(&self) -> Outcome<Vec<Addr>> {
        if self.config.cluster.coordinators.is_empty() {
            let error = Error::invalid("no coordinator is named");
            return Err(Failure::new(error, "--coordinator ADDR, or cluster.coordinators in weir.toml"));
        }
        Ok(self.config.cluster.coordinators.iter().map(|t| t.0.clone()).collect())
    }
    /// The client of most roles, of no namespace yet.
    fn client(&self, role: Role, name: String) -> Outcome<ClientConfig> {
        Ok(ClientConfig {
            coordinators: self.coordinators()?,
            namespace: String::new(),
            role,
            name,
            host: self.config.node.host.clone(),
            process: own_process(),
            memory_bytes: MOVER_MEMORY_BYTES,
            patience: ClientConfig::PATIENCE,
            recall_patience: ClientConfig::RECALL_PATIENCE,
            local_creates_after: None,
            trust: self.own.as_ref().map(|own| own.trust.clone()),
        })
    }
    fn observer(&self, role: Role) -> Outcome<Observer> {
        Ok(Observer {
            coordinators: self.coordinators()?,
            cluster: self.config.cluster.id.as_ref().map(|t| t.0),
            name: self.config.node.name.clone(),
            role,
            host: self.config.node.host.clone(),
            trust: self.own.as_ref().map(|own| own.trust.clone()),
        })
    }
    /// A node that listens beyond this machine has to authenticate, and to require it of others.
    fn check_listens(&self) -> Outcome<()> {
        let listen = self.listen();
        let Some(addr) = listen.iter().find(|addr| is_beyond(addr)).filter(|_| self.own.is_none()) else {
            return Ok(());
        };
        Err(Failure::new(
            Error::denied(format!("{} would listen at {addr} without a certificate", self.config.node.name)),
            "`weir join TOKEN` makes this machine a node of the cluster; on one machine listen at unix:/PATH or tcp:127.0.0.1:PORT",
        ))
    }
    /// Renews the certificate as long as the role runs.
    fn keep_certificate(&self, role: Role) -> Outcome<()> {
        if let Some(own) = self.own.clone() {
            let keeping = certificate::keep(self.env.clone(), own, self.observer(role)?);
            self.env.tasks.spawn("renew the certificate", keeping);
        }
        Ok(())
    }
    /// As a server does: waits for the coordinator.
    async fn observe_at_last(&self, role: Role) -> Outcome<Cluster> {
        Ok(Cluster::observe(&self.env, self.observer(role)?, SERVERS_PATIENCE).await?)
    }
    async fn observe(&self, role: Role) -> Outcome<Cluster> {
        Ok(Cluster::observe(&self.env, self.observer(role)?, CLUSTER_PATIENCE).await?)
    }
    /// The name of this node and its addresses.
    fn site(&self, observer: Observer) -> Site {
        let mut listen = self.listen();
        let door = self.config.node.door.clone();
        listen.extend(door.clone().map(Addr::Unix));
        let listens = move || match &door {
            None => Ok(()),
            Some(door) => std::fs::set_permissions(door, std::fs::Permissions::from_mode(0o666))
                .map_err(|e| Error::from_io(format_args!("open {}", door.display()), &e)),
        };
        Site { observer, listen, listens: Arc::new(listens), patience: SERVERS_PATIENCE }
    }
    /// Serves this machine's users, if configured. Without that the mount works all the same.
    async fn relay(&self, cluster: Cluster, namespace: &str) -> Outcome<Option<Server>> {
        let Some(socket) = self.config.node.door.clone() else { return Ok(None) };
        if let Some(dir) = socket.parent() {
            std::fs::create_dir_all(dir).doing(format_args!("make {}", dir.display()))?;
        }
        let own_uid = rustix::process::geteuid().as_raw();
        let served =
            weir_node::start_relay(&self.env, cluster, namespace, Addr::Unix(socket.clone()), own_uid)
                .await?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666))
            .doing(format_args!("open {} for all users", socket.display()))?;
        Ok(Some(served))
    }
    /// Notifies the process that started this one that it serves.
    fn ready(&self, what: &str) -> Outcome<()> {
        tracing::info!("{} serves: {what}", self.config.node.name);
        self.manager.ready(&format!("{} serves: {what}", self.config.node.name));
        self.pid_file.as_deref().map_or(Ok(()), |path| PidFile::own(true)?.write(path))
    }
    /// A coordinator that does not lead yet is ready all the same.
    fn waits(&self, leader: &str) {
        tracing::info!("{} waits: {leader} leads", self.config.node.name);
        self.manager.ready(&format!("{} waits: {leader} leads", self.config.node.name));
        if let Some(path) = &self.pid_file
            && let Err(e) = PidFile::own(true).and_then(|file| file.write(path))
        {
            tracing::warn!("{}", e.error);
        }
    }
    /// For the log, and for `weir down`, which reads the pid file when this process has ended.
    fn report_ended_calls(&self, count: usize) {
        if count == 0 {
            return;
        }
        tracing::warn!("{count} calls of programs still waited: they end with an error, as the mount ends");
        let reported = |path: &Path| PidFile { ended_calls: count, ..PidFile::own(true)? }.write(path);
        if let Some(Err(e)) = self.pid_file.as_deref().map(reported) {
            tracing::info!("`weir down` will not say so: {}", e.error);
        }
    }
}

/// An operator's remedy for a role that did not start.
impl From<Failed> for Failure {
    fn from(Failed { step, error }: Failed) -> Failure {
        match (step, error.kind) {
            (Step::Serve, ErrorKind::Exists) => Failure::new(
                error,
                "another process listens there: stop it, or choose another address (--listen)",
            ),
            (Step::Serve, _) => {
                Failure::new(error, "choose another address (--listen ADDR, or node.listen in weir.toml)")
            }
            (Step::Join, ErrorKind::Exists) => {
                Failure::new(error, "stop the other process, or choose another name (--name)")
            }
            (Step::Join | Step::Other, _) => error.into(),
        }
    }
}

fn is_beyond(addr: &Addr) -> bool {
    match addr {
        Addr::Tcp(at) => !at.ip().is_loopback(),
        Addr::Host(host, _) => !Addr::is_local_name(host),
        Addr::Unix(_) => false,
    }
}

fn shown(server: &Server) -> String {
    server.addrs().iter().map(Addr::to_string).collect::<Vec<_>>().join(" ")
}

/// Runs a role to its end in a runtime of its own.
fn run<F: Future<Output = Outcome<()>>>(
    args: &RoleArgs,
    config: Config,
    environment: &Environment,
    buffers: usize,
    role: impl FnOnce(Node) -> F,
) -> Outcome<()> {
    let name = args.config.as_ref().map_or("the command line".to_string(), |f| f.display().to_string());
    config::check(&name, &config)?;
    let wanted = environment.log.as_deref().unwrap_or(&config.node.log);
    log::start(
        wanted,
        config.node.log_format.0,
        environment.journal.as_deref(),
        environment.log_file.clone(),
    );
    let manager = Manager::of(&environment.notify)?;
    raise_descriptors();
    if let Some(path) = &args.pid_file {
        PidFile::own(false)?.write(path)?;
    }
    let kill_at = environment.kill_at.as_deref().map(str::parse).transpose();
    let kill_at = kill_at.map_err(|e: String| Error::invalid(format!("WEIR_KILL_AT: {e}")))?;
    let file = Some(&config.node.certificate).filter(|file| !file.as_os_str().is_empty());
    let own = file.map(|file| certificate::load(file, certificate::policy(&config.node))).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.node.threads)
        .thread_name("weir")
        .on_thread_start(weir_env::real::stay_nowhere)
        .enable_all()
        .build()
        .doing("start the runtime")?;
    let done = runtime.block_on(async {
        let env = env_with(RealConfig { buffer_cache_bytes: buffers, kill_at, ..RealConfig::default() });
        manager.keep_alive(&env);
        keep_history(&env);
        machine::show(&env);
        manager.status(&format!("{} starts", config.node.name));
        let pid_file = args.pid_file.clone();
        role(Node { env, config, pid_file, manager: manager.clone(), own }).await
    });
    if let Err(failure) = &done {
        manager.status(&failure.to_string());
    }
    // Work that hangs in a disk must not keep the process: everything acknowledged is durable.
    runtime.shutdown_timeout(Duration::from_millis(200));
    done
}

/// Raises the limit to as many files and connections as the process may have: each client is a connection. If
/// the limit stays lower, `accept` logs it.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        tracing::info!("the limit of open files stays at {:?}: {e}", limit.current);
    }
}

/// SIGTERM or SIGINT.
async fn stop_signal() -> Outcome<()> {
    let mut term = signal(SignalKind::terminate()).doing("listen for SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).doing("listen for SIGINT")?;
    tokio::select! {
        biased;
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    tracing::info!("asked to stop");
    Ok(())
}

pub fn coord(args: &CoordRole, environment: &Environment) -> Outcome<()> {
    let mut config = configure(&args.role, "coord")?;
    if let Some(dir) = &args.dir {
        config.coord.dir.clone_from(dir);
    }
    if let Some(store) = &args.store {
        config.coord.store = Text(store.clone());
    }
    if let Some(targets) = args.targets {
        config.coord.targets = targets;
    }
    if let Some(scheme) = args.scheme {
        config.coord.scheme = Text(scheme);
    }
    run(&args.role, config, environment, SERVER_BUFFERS_BYTES, |node| run_coord(node, args.new))
}

async fn run_coord(node: Node, new: bool) -> Outcome<()> {
    let coord = &node.config.coord;
    let dir =
        node.required(&coord.dir, "the coordinator's directory", "--dir DIR, or coord.dir in weir.toml")?;
    let settings = config::settings(coord);
    let cluster = node.config.cluster.id.as_ref().map(|t| t.0);
    let others = CoordConfig::new(coord.scheme.0, coord.targets as usize);
    let config = CoordConfig {
        cluster,
        settings,
        new,
        name: node.config.node.name.clone(),
        certified: coord.certificates || node.listen().iter().any(is_beyond),
        policy: certificate::policy(&node.config.node),
        ..others
    };
    let observer = Observer {
        coordinators: node.config.cluster.coordinators.iter().map(|t| t.0.clone()).collect(),
        cluster,
        name: node.config.node.name.clone(),
        role: Role::Coordinator,
        host: node.config.node.host.clone(),
        trust: None, // that of its own authority: see `Coordinator::trust`
    };
    let site = node.site(observer);
    let stop = stop_signal();
    tokio::pin!(stop);
    let etcd = match &coord.store.0 {
        StorePlace::Directory => None,
        StorePlace::Etcd(endpoints) => {
            Some(Etcd::open(&node.env, &etcd_config(&node.config.etcd, endpoints))?)
        }
    };
    let starting = async {
        Ok::<_, Failure>(match etcd.clone() {
            None => start_coord(&node.env, &site, &dir, config).await?,
            Some(store) => {
                let waits = |leader: &str| node.waits(leader);
                start_shared_coord(&node.env, &site, &dir, store, config, waits).await?
            }
        })
    };
    let coord = tokio::select! {
        biased;
        stopped = &mut stop => return stopped,
        started = starting => started?,
    };
    node.ready(&shown(&coord.server))?;
    let look = reporting::of_directory(&node.env, &node.config.node.host, dir.clone());
    let looking = async {
        loop {
            coord.report(&node.config.node.name, reporting::of_coordinator(&look, etcd.as_deref()).await);
            node.env.clock.sleep(Duration::from_millis(REPORT_EVERY_MS)).await;
        }
    };
    tokio::select! {
        biased;
        stopped = stop => stopped?,
        lost = coord.lost() => return Err(lost.doing("lead the cluster").into()),
        () = looking => {}
    }
    coord.end(LEAVE_PATIENCE).await;
    Ok(())
}

pub fn etcd_config(access: &EtcdAccess, endpoints: &[String]) -> EtcdConfig {
    EtcdConfig {
        endpoints: endpoints.to_vec(),
        prefix: access.prefix.clone(),
        ca: access.ca.clone(),
        certificate: access.certificate.clone(),
        key: access.key.clone(),
    }
}

/// Bytes kept of a replicated namespace's journal: hours of an absent copy at the rate of most days.
const KEPT_FOR_COPIES: u64 = 512 << 20;

pub fn meta(args: &MetaRole, environment: &Environment) -> Outcome<()> {
    let mut config = configure(&args.role, "meta")?;
    if let Some(dir) = &args.dir {
        config.meta.dir.clone_from(dir);
    }
    if let Some(namespace) = &args.namespace {
        config.meta.namespace.clone_from(namespace);
    }
    run(&args.role, config, environment, SERVER_BUFFERS_BYTES, |node| {
        run_meta(node, args.new, args.instead_of)
    })
}

async fn run_meta(node: Node, new: bool, instead_of: Option<NamespaceUuid>) -> Outcome<()> {
    let meta = &node.config.meta;
    let dir = node.required(&meta.dir, "the namespace's directory", "--dir DIR, or meta.dir in weir.toml")?;
    let place = MetaPlace {
        dir,
        namespace: meta.namespace.clone(),
        new,
        instead_of,
        engine: EngineConfig { cache_bytes: (meta.cache_mib * MIB) as usize, ..EngineConfig::default() },
        kept_for_copies: KEPT_FOR_COPIES,
        gone: Arc::new(is_gone),
    };
    node.check_listens()?;
    node.keep_certificate(Role::Meta)?;
    let look = reporting::of_directory(&node.env, &node.config.node.host, place.dir.clone());
    let meta = start_meta(&node.env, &node.site(node.observer(Role::Meta)?), place).await?;
    node.ready(&shown(&meta.server))?;
    let reporter = Reporter::start(&node.env, meta.cluster(), look);
    let ended = tokio::select! {
        biased;
        stop = stop_signal() => stop,
        failed = meta.run() => Err(failed.doing("lead the namespace").into()),
    };
    reporter.ends(LEAVE_PATIENCE).await;
    meta.end(LEAVE_PATIENCE).await?;
    ended
}

/// Fills the role's directory from an export, while it does not run.
pub fn import(
    args: &RoleArgs,
    environment: &Environment,
    export: std::fs::File,
    progress: impl FnMut(Totals),
) -> Outcome<(ExportHead, Totals)> {
    let config = configure(args, "meta")?;
    let mut imported = None;
    run(args, config, environment, SERVER_BUFFERS_BYTES, async |node| {
        let meta = &node.config.meta;
        let dir = node.required(&meta.dir, "the namespace's directory", "--config meta.toml")?;
        let engine = EngineConfig { cache_bytes: (meta.cache_mib * MIB) as usize, ..EngineConfig::default() };
        let site = node.site(node.observer(Role::Meta)?);
        let export = std::io::BufReader::new(export);
        imported = Some(import_namespace(&node.env, &site, &dir, engine, export, progress).await?);
        Ok(())
    })?;
    imported.ok_or_else(|| Error::io("nothing was imported").into())
}

pub fn storage(args: &StorageRole, environment: &Environment) -> Outcome<()> {
    let mut config = configure(&args.role, "storage")?;
    if !args.dir.is_empty() {
        config.storage.targets.clone_from(&args.dir);
    }
    if let Some(pool) = &args.pool {
        config.storage.pool.clone_from(pool);
    }
    // Next to the configuration, away from the disks: it distinguishes an empty mount point from a new disk.
    let known = args.role.config.as_ref().map(|file| file.with_extension("targets"));
    run(&args.role, config, environment, SERVER_BUFFERS_BYTES, |node| run_storage(node, known))
}

async fn run_storage(node: Node, known: Option<PathBuf>) -> Outcome<()> {
    let storage = &node.config.storage;
    if storage.targets.is_empty() {
        let error = Error::invalid("no target directory is named");
        return Err(Failure::new(error, "--dir DIR, or storage.targets in weir.toml"));
    }
    let place = StoragePlace {
        dirs: storage.targets.iter().map(|dir| local_cluster::absolute(dir)).collect::<Outcome<_>>()?,
        pool: storage.pool.clone(),
        known,
        shared_by: storage.shared_by,
        index: weir_store::INDEX,
    };
    node.check_listens()?;
    node.keep_certificate(Role::Storage)?;
    let storage = start_storage(&node.env, &node.site(node.observer(Role::Storage)?), &place).await?;
    node.ready(&shown(&storage.server))?;
    let work = node.env.tasks.spawn("storage work", storage.work());
    stop_signal().await?;
    storage.end(LEAVE_PATIENCE).await;
    work.abort();
    Ok(())
}

pub fn mover(args: &MoverRole, environment: &Environment) -> Outcome<()> {
    let mut config = configure(&args.role, "mover")?;
    rustix::process::nice(MOVER_NICE).doing("lower the mover's priority")?;
    if let Some(dir) = args.role.place(&args.dir) {
        LocalCluster::open_own(dir)?; // backups go to the cluster's relations, with this user's rights
        use_place(&mut config, dir)?;
    }
    crate::rights::keep_movers_rights()?;
    let namespace = args.namespace.clone().unwrap_or_else(|| config.mount.namespace.clone());
    let keys = environment.s3_keys.clone();
    run(&args.role, config, environment, MOVER_BUFFERS_BYTES, move |node| run_mover(node, namespace, keys))
}

async fn run_mover(node: Node, namespace: String, keys: Option<weir_home::KeySource>) -> Outcome<()> {
    let name = format!("mover {}", node.config.node.name);
    let config = ClientConfig { namespace, ..node.client(Role::Mover, name)? };
    let _ = node.env.watch.name.set(config.name.clone());
    node.keep_certificate(Role::Mover)?;
    let stop = stop_signal();
    tokio::pin!(stop);
    let cluster = tokio::select! {
        biased;
        stopped = &mut stop => return stopped,
        cluster = node.observe_at_last(Role::Mover) => cluster?,
    };
    let unreached = Unreached::default();
    let look = reporting::of_mover(&node.env, &node.config.node.host, &node.config.node.name, &unreached);
    let reporter = Reporter::start(&node.env, &cluster, look);
    let connecting = Connecting { env: node.env.clone(), config, unreached };
    let first = tokio::select! {
        biased;
        stopped = &mut stop => return stopped,
        client = connecting.connect(true) => client?,
    };
    let mut client = first;
    let mut rules = cluster.map().homes.clone();
    let opener = Arc::new(crate::homes::Homes::new(node.env.clone(), cluster.id(), keys, rules.clone()));
    let mover = weir_home::mover::Mover::new(node.env.clone(), opener.clone());
    node.ready("mover")?;
    loop {
        tokio::select! {
            biased;
            stopped = &mut stop => {
                stopped?;
                break;
            }
            () = other_rules(&cluster, &rules) => {
                tracing::info!("the rules for homes have changed: this mover opens homes again");
            }
            () = mover.run(&client) => {
                tracing::warn!("lost contact with the metadata server; this mover's work was reassigned");
            }
        }
        close_session(&node, &client).await;
        let now = cluster.map().homes.clone();
        if now != rules {
            let _ = node.env.clock.timeout(LEAVE_PATIENCE, opener.close()).await; // they expire by themselves
            mover.forget_homes();
            opener.use_rules(now.clone());
            rules = now;
        }
        client = tokio::select! {
            biased;
            stopped = &mut stop => {
                reporter.ends(LEAVE_PATIENCE).await;
                return stopped;
            }
            connected = connecting.connect(false) => connected?,
        };
    }
    reporter.ends(LEAVE_PATIENCE).await;
    end_mover(&node, &client, &opener).await;
    Ok(())
}

/// A session that is not closed expires: a leader that does not answer does not keep a mover from its work.
async fn close_session(node: &Node, client: &Client) {
    match node.env.clock.timeout(CLOSE_PATIENCE, client.shutdown()).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => tracing::debug!("close the session: {e}"),
        Err(_) => tracing::debug!("close the session: no answer within {CLOSE_PATIENCE:?}"),
    }
}

/// Waits until the map has other rules for homes than these.
async fn other_rules(cluster: &Cluster, known: &[HomeRule]) {
    let mut map = cluster.subscribe();
    if map.wait_for(|map| map.homes != known).await.is_err() {
        std::future::pending::<()>().await; // no more maps will arrive
    }
}

async fn end_mover(node: &Node, client: &Client, opener: &crate::homes::Homes) {
    // Nothing is lost without these steps: others take over this mover's work, and sessions expire.
    let closing = async { tokio::join!(opener.close(), client.shutdown()).1 };
    match node.env.clock.timeout(LEAVE_PATIENCE, closing).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => tracing::info!("left without the metadata leader: {e}"),
        Err(_) => tracing::info!("left without an answer of the metadata leader or of a home"),
    }
    tracing::info!("the mover has stopped");
}

/// How a mover connects to the metadata leader.
struct Connecting {
    env: Env,
    config: ClientConfig,
    unreached: Unreached,
}

impl Connecting {
    /// Tries until the leader answers, even if it or the coordinator takes long. Ends only with a refusal; at
    /// the start, which an administrator watches, also if the namespace does not exist.
    async fn connect(&self, starts: bool) -> Outcome<Client> {
        let mut said = None;
        loop {
            let e = match Client::connect(self.env.clone(), self.config.clone(), Arc::new(NoKernel)).await {
                Ok(client) => {
                    self.unreached.reached();
                    return Ok(client);
                }
                Err(e) => e,
            };
            let is_passing =
                matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Stale);
            if e.kind == ErrorKind::Denied || starts && !is_passing {
                return Err(e.into());
            }
            self.unreached.failed(self.env.clock.now(), e.context.clone());
            if said.as_ref() != Some(&e.context) {
                tracing::warn!("try again to reach the metadata leader: {e}");
                said = Some(e.context);
            }
            self.env.clock.sleep(RECONNECT_PAUSE).await;
        }
    }
}

/// The cluster that `weir up` made in a directory.
fn use_place(config: &mut Config, dir: &Path) -> Outcome<()> {
    let place = LocalCluster::open(dir)?;
    config.cluster.id = Some(place.manifest.cluster.clone());
    config.cluster.coordinators = place.coordinators().into_iter().map(Text).collect();
    Ok(())
}

pub fn mount(args: &MountRole, environment: &Environment) -> Outcome<()> {
    let mut config = configure(&args.role, "mount")?;
    if let Some(dir) = args.role.place(&args.dir) {
        use_place(&mut config, dir)?;
    }
    if let Some(path) = &args.path {
        config.mount.path.clone_from(path);
    }
    if let Some(namespace) = &args.namespace {
        config.mount.namespace.clone_from(namespace);
    }
    if let Some(top) = &args.top {
        config.mount.top.clone_from(top);
    }
    if let Some(patience) = args.patience {
        config.mount.patience = Text(patience);
    }
    if let Some(mib) = args.memory_mib {
        config.mount.memory_mib = mib;
    }
    // All memory of the budget may also stay idle for reuse: fresh memory is slow to touch.
    let buffers = usize::try_from(config.mount.memory_mib * MIB).unwrap_or(usize::MAX);
    let words = MountWords::parse(&args.options)?;
    words.of_command()?;
    config.mount.read_only |= args.read_only || words.read_only;
    if words.allow_other {
        config.mount.allow_other = Some(true);
    }
    config.mount.kernel_names &= !args.no_kernel_names;
    config.mount.local_creates &= !args.no_local_creates;
    if let Some(transport) = args.transport {
        config.mount.transport = Text(transport);
    }
    let (recover, source) = (args.recover, args.source.clone());
    run(&args.role, config, environment, buffers, move |node| run_mount(node, recover, source, words))
}

fn prepare_mount_point(path: &Path, recover: bool) -> Outcome<()> {
    if recover {
        weir_fuse::clear_dead(path)?;
    }
    weir_fuse::preflight(path)?;
    for pid in mounts_elsewhere(path) {
        tracing::warn!("process {pid} serves a mount at {} in another mount namespace", path.display());
    }
    Ok(())
}

async fn run_mount(node: Node, recover: bool, source: String, words: MountWords) -> Outcome<()> {
    let mount = &node.config.mount;
    let path =
        node.required(&mount.path, "the mount point", "`weir mount PATH`, or mount.path in weir.toml")?;
    prepare_mount_point(&path, recover)?;
    let name = format!("{}:{}", node.config.node.name, path.display());
    let config = ClientConfig {
        namespace: mount.namespace.clone(),
        memory_bytes: mount.memory_mib * MIB,
        patience: mount.patience.0.0,
        local_creates_after: ClientConfig::LOCAL_CREATES_AFTER.filter(|_| mount.local_creates),
        ..node.client(Role::Mount, name)?
    };
    let _ = node.env.watch.name.set(config.name.clone());
    node.keep_certificate(Role::Mount)?;
    let cluster = node.observe(Role::Mount).await?;
    let notices = Arc::new(weir_fuse::Notices::new(mount.kernel_names));
    let name = config.name.clone();
    let client = Client::connect(node.env.clone(), config, notices.clone()).await?;
    let look = reporting::of_mount(&node.config.node.host, &name, &client);
    let reporter = Reporter::start(&node.env, &cluster, look);
    let options = weir_fuse::Options {
        path: path.clone(),
        top: crate::subtree::find(&client, &mount.top).await?,
        transport: mount.transport.0,
        kernel_threads: mount.kernel_threads,
        allow_other: mount.allow_other,
        source,
        read_only: mount.read_only,
        no_exec: words.no_exec,
        no_atime: words.no_atime,
        buffers: node.env.buffers.clone(),
        own_attributes: own_attributes(cluster.clone(), node.config.node.door.clone()),
        own_acts: own_acts(),
    };
    let attached = weir_fuse::attach(&client, &notices, options)?;
    let calls = attached.calls();
    let _relay = node.relay(cluster, &mount.namespace).await?;
    node.ready(&format!("mount at {}", path.display()))?;
    let mut session = tokio::task::spawn_blocking(move || attached.wait());
    let ended = tokio::select! {
        biased;
        ended = &mut session => Some(ended),
        stop = stop_signal() => {
            stop?;
            take_off(&path).await;
            match node.env.clock.timeout(LAST_CALLS_PATIENCE, &mut session).await {
                Ok(ended) => Some(ended),
                Err(_) => {
                    node.report_ended_calls(calls.end_all());
                    node.env.clock.timeout(LAST_USE_PATIENCE, session).await.ok()
                }
            }
        }
    };
    // A session that ended for another reason than an unmount leaves the mount behind.
    if weir_fuse::is_mounted(&path) {
        take_off(&path).await;
    }
    match ended {
        Some(Ok(result)) => result?,
        Some(Err(e)) => tracing::error!("the mount's thread ended badly: {e}"),
        None => tracing::warn!("files are still open at {}: they end with this process", path.display()),
    }
    reporter.ends(LEAVE_PATIENCE).await;
    // Unsaved data is an error of this command, too.
    client.shutdown().await.map_err(|e| e.doing("save what the mount still held").into())
}

/// Detached now; a use that lasts keeps the session until its patience ends.
async fn take_off(path: &Path) {
    let path = path.to_path_buf();
    let shown = path.display().to_string();
    match tokio::task::spawn_blocking(move || weir_fuse::unmount(&path, true)).await {
        Ok(Err(e)) if e.kind != ErrorKind::NotFound => tracing::warn!("unmount {shown}: {e}"),
        _ => {}
    }
}

/// Answers `weir.…` attributes: JSON about a file, from the client's attributes and the cluster map.
fn own_attributes(cluster: Cluster, socket: Option<PathBuf>) -> weir_fuse::OwnAttributes {
    Arc::new(move |client: &Client, ino: InodeId, name: &str| {
        let (client, cluster, name) = (client.clone(), cluster.clone(), name.to_string());
        let socket = socket.clone();
        Box::pin(async move {
            let value = match name.as_str() {
                file::STAT => stat_json(&client, ino).await?,
                file::LAYOUT => layout_json(&cluster, &client.getattr(ino).await?.attr),
                file::CLIENT => client_json(&client, &cluster),
                file::SOCKET => json!({ "socket": socket }),
                file::LOCKS => locks_json(&client, ino).await?,
                tiering::STATE => tiering::state_json(&client, ino).await?,
                restore::SNAPSHOT_XATTR => restore::snapshot_json(&client, ino).await?,
                _ => {
                    return Err(Error::name(
                        weir_proto::NameRule::NoAttribute,
                        format!("no attribute {name:?}"),
                    ));
                }
            };
            Ok(value.to_string())
        })
    })
}

/// Evicts, recalls or pins a file when a program sets the attribute for it.
fn own_acts() -> weir_fuse::OwnActs {
    Arc::new(|client, cred, ino, name, value| {
        let client = client.clone();
        Box::pin(async move { tiering::act(&client, &cred, ino, &name, &value).await })
    })
}

async fn stat_json(client: &Client, ino: InodeId) -> weir_proto::Result<Value> {
    let attr = client.getattr(ino).await?.attr;
    let mut value = json!({
        "inode": attr.ino.0, "kind": format!("{:?}", attr.kind).to_lowercase(), "mode": format!("{:04o}", attr.mode),
        "uid": attr.uid, "gid": attr.gid, "links": attr.nlink, "size": attr.size, "allocated": attr.allocated,
        "data_version": attr.data_version, "mtime_ns": attr.mtime.nanos, "ctime_ns": attr.ctime.nanos,
        "birth_ns": attr.btime.nanos,
    });
    if attr.kind == weir_proto::meta::FileKind::Directory {
        let usage = client.usage(ino).await?;
        value["recursive"] = json!({
            "bytes": usage.bytes, "evicted": usage.evicted, "files": usage.files, "directories": usage.directories,
        });
    }
    Ok(value)
}

fn layout_json(cluster: &Cluster, attr: &Attr) -> Value {
    let Some(layout) = attr.layout else {
        return json!({ "inode": attr.ino.0, "size": attr.size, "data": "none on targets" });
    };
    let map = cluster.map();
    let count = layout.stripe_count(attr.size);
    let stripes: Vec<Value> = (0..count.min(STRIPES_LISTED_MAX))
        .map(|stripe| {
            let group = layout.pg_of_stripe(stripe);
            let members: Vec<String> = map.group(group).map_or(Vec::new(), |g| {
                g.members
                    .iter()
                    .map(|m| match m.state {
                        weir_proto::map::MemberState::Current => m.target.to_string(),
                        weir_proto::map::MemberState::Down => format!("{}(down)", m.target),
                        weir_proto::map::MemberState::Behind => format!("{}(behind)", m.target),
                    })
                    .collect()
            });
            let (data, parity) = members.split_at(usize::from(layout.scheme.data).min(members.len()));
            json!({ "stripe": stripe, "group": group.to_string(), "data": data, "parity": parity })
        })
        .collect();
    let is_small = attr.size <= weir_proto::meta::INLINE_MAX as u64;
    json!({
        "data": is_small.then_some("in the inode, unless the file was larger or had several writers"),
        "inode": attr.ino.0, "size": attr.size, "scheme": layout.scheme.to_string(),
        "cell_bytes": layout.cell_bytes(), "stripe_bytes": layout.stripe_bytes(),
        "stripe_count": count, "groups": layout.pg_count, "first_group": layout.first_pg.to_string(),
        "seed": layout.seed, "stripes": stripes,
    })
}

async fn locks_json(client: &Client, ino: InodeId) -> weir_proto::Result<Value> {
    let (entries, more) = client.list_locks(ino).await?;
    let beyond = entries.len().saturating_sub(LOCKS_SHOWN_MAX) as u64 + u64::from(more);
    let shown: Vec<Value> = entries
        .iter()
        .take(LOCKS_SHOWN_MAX)
        .map(|e| {
            let to_the_end = e.range.end == LOCK_END;
            let end = if to_the_end { "end".to_string() } else { e.range.end.to_string() };
            json!({
                "state": if e.waits { "waits" } else { "holds" },
                "lock": match e.owner.space { LockSpace::Fcntl => "fcntl", LockSpace::Flock => "flock" },
                "kind": match e.kind { LockKind::Shared => "shared", LockKind::Exclusive => "exclusive" },
                "range": format!("{}-{end}", e.range.start),
                "start": e.range.start, "end": (!to_the_end).then_some(e.range.end),
                "client": e.client, "pid": e.pid, "age_ms": e.age_ms,
                "age": format!("{:.1} s", e.age_ms as f64 / 1000.0),
            })
        })
        .collect();
    Ok(json!({ "inode": ino.0, "locks": shown, "more": beyond }))
}

fn client_json(client: &Client, cluster: &Cluster) -> Value {
    let s = client.status();
    let (losses, last) = client.losses();
    let last: Vec<Value> =
        last.iter().map(|l| json!({ "inode": l.ino.0, "at_ns": l.at.nanos, "what": l.what })).collect();
    let now = client.now();
    let waits: Vec<Value> = client
        .waits()
        .iter()
        .map(|w| json!({ "for": w.what, "ms": now.since(w.since).as_millis() as u64, "calls": w.calls }))
        .collect();
    json!({
        "cluster": cluster.id().to_string(), "losses": losses, "last_losses": last, "waits": waits,
        "written_bytes": s.written_bytes, "read_bytes": s.read_bytes,
        "wire_sent_bytes": s.wire_sent_bytes, "wire_received_bytes": s.wire_received_bytes,
        "degraded_reads": s.degraded_reads, "degraded_writes": s.degraded_writes, "crc_failures": s.crc_failures,
        "memory_used_bytes": s.memory_used_bytes, "memory_peak_bytes": s.memory_peak_bytes, "revokes": s.revokes,
        "requests": weir_fuse::request_counts(), "asked": s.asked,
    })
}
