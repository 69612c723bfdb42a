//! Each role as a foreground process: configuration in, service up, readiness notified, orderly end on a
//! signal.
use crate::log;
use crate::machine;
use crate::notify::{self, Manager};
use args::{MetaRole, RoleArgs, StorageRole};
use mover::MOVER_MEMORY_BYTES;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use weir_admin::certificate::{self, Own};
use weir_admin::config::{self, Config, Text};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::local_cluster::{self, LocalCluster};
use weir_admin::local::process::{PidFile, is_gone, own_process};
use weir_admin::observe::host_id;
use weir_client::ClientConfig;
use weir_coord::{Cluster, Observer};
use weir_env::real::{RealConfig, env_with};
use weir_env::{Addr, Env};
use weir_kv::EngineConfig;
use weir_meta::export::Totals;
use weir_node::condition::{self, Reporter};
use weir_node::{
    Failed, MetaPlace, Site, Step, StoragePlace, import_namespace, keep_history, start_meta, start_storage,
};
use weir_proto::export::ExportHead;
use weir_proto::map::Role;
use weir_proto::{Error, ErrorKind, MIB, NamespaceUuid};
use weir_rpc::Server;

pub mod args;
mod coord;
mod coord_events;
mod mount;
mod mover;
mod own_attributes;

pub use coord::coord;
pub use mount::mount;
pub use mover::mover;

/// The variables that `main` read from the environment.
pub struct Environment {
    /// `WEIR_LOG`: the level of the log; overrides the configuration.
    pub log: Option<String>,
    /// `WEIR_LOG_FILE`, from `weir up`: the file behind standard error. Tests limit it by `WEIR_LOG_BYTES`.
    pub log_file: Option<log::LogFile>,
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
            early_answers: false,
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
            let renewal = certificate::keep(self.env.clone(), own, self.observer(role)?);
            self.env.tasks.spawn("renew the certificate", renewal);
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
        Site { observer, listen, listens: Arc::new(listens), front: None, patience: SERVERS_PATIENCE }
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
        self.report_end(|file| file.ended_calls = count);
    }
    /// The bytes of programs' data that a mount that ends still holds, for `weir down`.
    fn report_unsaved(&self, bytes: u64) {
        self.report_end(|file| file.unsaved_bytes = bytes);
    }
    fn report_end(&self, change: impl FnOnce(&mut PidFile)) {
        let reported = |path: &Path| {
            let mut file = PidFile::read(path).map_or_else(|| PidFile::own(true), Ok)?;
            change(&mut file);
            file.write(path)
        };
        if let Some(Err(e)) = self.pid_file.as_deref().map(reported) {
            tracing::info!("`weir down` will not report this: {}", e.error);
        }
    }
}

/// An operator's remedy for a role that did not start.
fn not_started(Failed { step, error }: Failed) -> Failure {
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
        at_home: Arc::new(weir_meta::at_home),
    };
    node.check_listens()?;
    node.keep_certificate(Role::Meta)?;
    let inspect = condition::of_directory(&node.env, &node.config.node.host, place.dir.clone());
    let meta = start_meta(&node.env, &node.site(node.observer(Role::Meta)?), place).await;
    let meta = meta.map_err(not_started)?;
    node.ready(&shown(&meta.server))?;
    let inspect = condition::of_metadata(inspect, &node.config.node.name, meta.space());
    let reporter = Reporter::start(&node.env, meta.cluster(), inspect);
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

fn absolutes(dirs: &[PathBuf]) -> Outcome<Vec<PathBuf>> {
    dirs.iter().map(|dir| local_cluster::absolute(dir)).collect()
}

async fn run_storage(node: Node, known: Option<PathBuf>) -> Outcome<()> {
    let storage = &node.config.storage;
    if storage.targets.is_empty() {
        let error = Error::invalid("no target directory is named");
        return Err(Failure::new(error, "--dir DIR, or storage.targets in weir.toml"));
    }
    let place = StoragePlace {
        dirs: absolutes(&storage.targets)?,
        pool: storage.pool.clone(),
        known,
        others: absolutes(&storage.others)?,
        index: weir_store::INDEX,
    };
    node.check_listens()?;
    node.keep_certificate(Role::Storage)?;
    let storage = start_storage(&node.env, &node.site(node.observer(Role::Storage)?), &place).await;
    let storage = storage.map_err(not_started)?;
    node.ready(&shown(&storage.server))?;
    let own = &node.config.node;
    let inspect = condition::of_storage(&node.env, &own.host, &own.name, storage.node());
    let reporter = Reporter::start(&node.env, storage.cluster(), inspect);
    let work = node.env.tasks.spawn("storage work", storage.work());
    stop_signal().await?;
    reporter.ends(LEAVE_PATIENCE).await;
    storage.end(LEAVE_PATIENCE).await;
    work.abort();
    Ok(())
}

/// The cluster that `weir up` made in a directory.
fn use_place(config: &mut Config, dir: &Path) -> Outcome<()> {
    let place = LocalCluster::open(dir)?;
    config.cluster.id = Some(place.manifest.cluster.clone());
    config.cluster.coordinators = place.coordinators().into_iter().map(Text).collect();
    Ok(())
}
