//! The state of a cluster: all queries in parallel, each with its own deadline, so that a hanging node does
//! not delay the answer. For `weir status`, `weir why`, `weir console` and `weir support`.
//!
//! A query that only newer servers answer, or only for administrators, is skipped; one without an answer in
//! time is a trouble itself.
use crate::certificate::Caller;
use crate::failure::Outcome;
use crate::local::local_cluster::{LocalCluster, Process, RoleName};
use crate::local::memory;
use crate::local::process::PidFile;
use crate::mounts::{self, Asked};
use crate::namespace_client::{all, connect_as};
use crate::observe;
use crate::users;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use weir_client::Client;
use weir_coord::Cluster;
use weir_diagnose::health::is_led;
use weir_diagnose::troubles::leaving::Leaving;
use weir_diagnose::troubles::overload::{self, Busiest};
use weir_diagnose::troubles::{Facts, HomesHere, Known, NamespaceFacts};
use weir_diagnose::{MountState, OwnerNames, ProcessState, work};
use weir_env::{Addr, BoxFuture, Env};
use weir_home::HomeUrl;
use weir_proto::condition::{NodeTrouble, STARTS, TroubleList};
use weir_proto::coord::{ClientsWaiting, Clocks, ClusterStatus};
use weir_proto::enrol::GetEnrolment;
use weir_proto::event::GetEvents;
use weir_proto::export::GetExports;
use weir_proto::life::NodeLife;
use weir_proto::meta::SessionList;
use weir_proto::quota::OwnersNearLimit;
use weir_proto::watch::GetTop;
use weir_proto::{Error, ErrorKind, InodeId, Request, Result};
use weir_rpc::{Channel, NoService};

/// The deadline of each query.
const PATIENCE: Duration = Duration::from_millis(1800);
/// Whose work it is: a process that does not answer in this time is not shown.
const TOP_PATIENCE: Duration = Duration::from_millis(1000);
/// The seconds of work that are compared.
const TOP_S: u32 = 10;
/// The time for closing sessions: others expire by themselves.
const LAST_PATIENCE: Duration = Duration::from_millis(200);

/// Queries a cluster. Its sessions with metadata servers are kept from one round to the next.
pub struct Asker {
    pub env: Env,
    pub cluster: Cluster,
    coordinators: Vec<Addr>,
    caller: Caller,
    /// Of this machine, only pid files: a file system that hangs would hold a thread in each round.
    only_processes: bool,
    /// Clients by namespace.
    clients: Mutex<BTreeMap<String, Client>>,
}

/// The state of this machine.
#[derive(Default)]
struct Here {
    processes: Vec<ProcessState>,
    mounts: Vec<MountState>,
    dead_mounts: Vec<PathBuf>,
    restart: String,
}

/// Queries once, for a command that then ends.
pub fn facts(local: Option<&LocalCluster>, coordinators: &[Addr], name: &str) -> Outcome<Facts> {
    observe::block_on(async {
        let asker = Asker::connect(coordinators, name).await?;
        let facts = asker.facts(local.cloned()).await;
        asker.end().await;
        Ok(facts?)
    })
}

impl Asker {
    pub fn connect<'a>(coordinators: &'a [Addr], name: &'a str) -> BoxFuture<'a, Outcome<Arc<Asker>>> {
        Box::pin(async move {
            let env = weir_env::real::env();
            let cluster = observe::observe(&env, coordinators, name).await?;
            let (coordinators, caller) = (coordinators.to_vec(), Caller::of_commands());
            let (only_processes, clients) = (false, Mutex::default());
            Ok(Arc::new(Asker { env, cluster, coordinators, caller, only_processes, clients }))
        })
    }

    /// In a process that runs for long and must not collect threads that hang.
    pub fn of_server(
        env: Env,
        coordinators: Vec<Addr>,
        caller: Caller,
    ) -> BoxFuture<'static, Outcome<Arc<Asker>>> {
        Box::pin(async move {
            let cluster = observe::observe_as(&env, &coordinators, "events", &caller).await?;
            let (only_processes, clients) = (true, Mutex::default());
            Ok(Arc::new(Asker { env, cluster, coordinators, caller, only_processes, clients }))
        })
    }

    /// Queries servers, and reads this machine's state meanwhile.
    pub fn facts(self: &Arc<Self>, local: Option<LocalCluster>) -> BoxFuture<'_, Result<Facts>> {
        Box::pin(async move {
            let only_processes = self.only_processes;
            let local_state =
                tokio::task::spawn_blocking(move || inspect_local(local.as_ref(), only_processes));
            let (coordinator, here) = tokio::join!(self.of_coordinator(), local_state);
            let (mut facts, here) = (coordinator?, here.unwrap_or_default());
            (facts.processes, facts.mounts) = (here.processes, here.mounts);
            (facts.dead_mounts, facts.restart) = (here.dead_mounts, here.restart);
            let homes = tokio::task::spawn_blocking(move || {
                if !only_processes {
                    facts.homes = homes_here(&facts.processes, &facts.namespaces);
                }
                facts.names = users::of_owners(facts.owners_near());
                facts
            });
            homes.await.map_err(|e| Error::unavailable(format!("cannot inspect homes: {e}")))
        })
    }

    /// The volumes, by name, that have an inode of this number: one in each namespace at most.
    pub(crate) async fn volumes_of(self: &Arc<Self>, inode: InodeId, facts: &Facts) -> Vec<String> {
        let mut names = Vec::new();
        for namespace in &facts.namespaces {
            let Ok(known) = &namespace.known else { continue };
            let Ok(client) = self.client(&namespace.name).await else { continue };
            if let Ok(volume) = timely(&self.env, client.volume_at(inode)).await {
                let named = known.volumes.iter().filter(|v| v.id == volume.id).map(|v| v.name.clone());
                names.extend(named);
            }
        }
        names
    }

    /// Closes its sessions.
    pub fn end(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let clients = std::mem::take(&mut *self.clients.lock().await);
            for client in clients.into_values() {
                let _ = self.env.clock.timeout(LAST_PATIENCE, client.shutdown()).await;
            }
        })
    }

    async fn client(&self, namespace: &str) -> Outcome<Client> {
        if let Some(client) = self.clients.lock().await.get(namespace) {
            return Ok(client.clone());
        }
        let (env, by) = (self.env.clone(), self.caller.clone());
        let client = connect_as(env, self.coordinators.clone(), namespace, by).await?;
        self.clients.lock().await.insert(namespace.to_owned(), client.clone());
        Ok(client)
    }

    /// The coordinator's view, and the reports of each leading metadata server on its volumes.
    async fn of_coordinator(self: &Arc<Self>) -> Result<Facts> {
        let (env, cluster) = (&self.env, &self.cluster);
        let (enrolment, log) = (cluster.administer(&GetEnrolment {}), cluster.administer(&GetEvents {}));
        let (status, mut lives, waiting, clocks, conditions, audit, rebuild, enrolment, log, namespaces) = tokio::join!(
            timely(env, cluster.status()),
            timely(env, cluster.lives()),
            timely(env, cluster.waits()),
            timely(env, cluster.clocks()),
            timely(env, cluster.conditions()),
            timely(env, cluster.audit()),
            timely(env, cluster.rebuild()),
            timely(env, enrolment),
            timely(env, log),
            self.namespaces(),
        );
        if namespaces.iter().any(|n| n.known.is_err()) {
            // Whether its process lives is seen by signs of life that are younger than the question to it.
            lives = timely(env, cluster.lives()).await;
        }
        let status = status?;
        let mut none = Unanswered::default();
        let lives = none.note("the list of signs of life", lives).unwrap_or_default().nodes;
        let busiest = self.busiest(&lives, &status).await;
        let waiting = none.note("the list of calls that wait", waiting);
        let clocks = none.note("the list of clocks", clocks);
        let conditions = none.note("the list of nodes' reports", conditions);
        let audit = none.note("the state of the coordinator's audit log", audit);
        let rebuild = none.note("the state of the rebuild", rebuild);
        let log = none.note("the log of events", log).unwrap_or_default();
        let holders = none.note("the list of certificates", enrolment).map(|all| all.holders);
        Ok(Facts {
            status,
            lives,
            busiest,
            waiting: waiting.unwrap_or(ClientsWaiting { clients: Vec::new() }),
            clocks: clocks.unwrap_or(Clocks { off: Vec::new() }),
            conditions: conditions.map(|all| all.nodes).unwrap_or_default(),
            holders: holders.unwrap_or_default(),
            now_s: u64::try_from(env.clock.wall().0 / 1_000_000_000).unwrap_or(0),
            mutes: log.mutes,
            unanswered: none.0,
            leaving: rebuild.map(Leaving::of).unwrap_or_default(),
            audit: audit.unwrap_or_default(),
            restart: String::new(),
            processes: Vec::new(),
            mounts: Vec::new(),
            dead_mounts: Vec::new(),
            namespaces,
            homes: HomesHere::default(),
            names: OwnerNames::default(),
        })
    }

    /// Whose work it is, if the cluster is overloaded. `None` also if this user may not ask.
    async fn busiest(&self, lives: &[NodeLife], status: &ClusterStatus) -> Option<Busiest> {
        overload::overload(lives, &status.map)?;
        let tops = self.cluster.collect(&GetTop { seconds: TOP_S }, TOP_PATIENCE).await.ok()?;
        overload::busiest(&tops, users::of(work::users(&tops)))
    }

    /// All that have a leader, in parallel.
    async fn namespaces(self: &Arc<Self>) -> Vec<NamespaceFacts> {
        let (map, mut asked) = (self.cluster.map(), JoinSet::new());
        for namespace in map.namespaces.iter().filter(|n| is_led(&map, n)) {
            let (asker, name) = (self.clone(), namespace.name.clone());
            asked.spawn(async move {
                let (asked, troubles) = tokio::join!(
                    asker.env.clock.timeout(PATIENCE, asker.known(&name)),
                    asker.troubles(&name),
                );
                let known = match asked {
                    Ok(Ok(known)) => Ok(known),
                    Ok(Err(failure)) => Err(failure.error.to_string()),
                    Err(_) => Err(format!("no answer within {PATIENCE:?}")),
                };
                if known.is_err() {
                    drop(asker.clients.lock().await.remove(&name)); // the next round connects again
                }
                let starts = |trouble: &NodeTrouble| trouble.code == STARTS;
                let starting = troubles.into_iter().find(starts);
                NamespaceFacts { name, known, starting }
            });
        }
        let mut all = asked.join_all().await;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The troubles that the leader reports, also while it waits for clients after its start.
    async fn troubles(&self, namespace: &str) -> Vec<NodeTrouble> {
        let Ok(leader) = self.cluster.meta_leader(namespace, Arc::new(NoService)) else { return Vec::new() };
        ask(&leader, TroubleList {}).await.map(|all| all.troubles).unwrap_or_default()
    }

    async fn known(&self, namespace: &str) -> Outcome<Known> {
        let leader = self.cluster.meta_leader(namespace, Arc::new(NoService))?;
        let client = self.client(namespace).await?;
        let (volumes, write_floors, relations, backups, audit, exports, sessions, failing, near) = tokio::join!(
            all(&client),
            client.write_floors(),
            client.relations(None),
            client.backups(None),
            client.audit(),
            ask(&leader, GetExports {}),
            ask(&leader, SessionList {}),
            ask(&leader, TroubleList {}),
            ask(&leader, OwnersNearLimit {}),
        );
        let (volumes, relations, backups) = (volumes?, relations?, backups?);
        Ok(Known {
            volumes,
            write_floors: write_floors.unwrap_or_default(), // an older server knows none
            relations,
            backups,
            audit: audit.unwrap_or_default(), // an older server does not report it
            exports: exports.unwrap_or_default(),
            sessions: sessions.map(|all| all.sessions).unwrap_or_default(),
            failing: failing.map(|all| all.troubles).unwrap_or_default(),
            owners: near.unwrap_or_default(),
        })
    }
}

/// Queries that were not answered in time.
#[derive(Default)]
struct Unanswered(Vec<(String, String)>);

impl Unanswered {
    /// `None` also if the server is older, or this user may not ask.
    fn note<T>(&mut self, what: &str, answer: Result<T>) -> Option<T> {
        let e = match answer {
            Ok(answer) => return Some(answer),
            Err(e) => e,
        };
        if matches!(e.kind, ErrorKind::Deadline | ErrorKind::Unavailable) {
            self.0.push((what.to_owned(), e.to_string()));
        }
        None
    }
}

async fn timely<T>(env: &Env, asked: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || Error::deadline(format!("no answer within {PATIENCE:?}"));
    env.clock.timeout(PATIENCE, asked).await.unwrap_or_else(|_| Err(late()))
}

/// `None`: the server is older, or refuses this user.
async fn ask<R: Request>(leader: &Channel, request: R) -> Option<R::Reply> {
    leader.call(&request, Vec::new(), PATIENCE).await.ok().map(|(reply, _)| reply)
}

fn inspect_local(local: Option<&LocalCluster>, only_processes: bool) -> Here {
    let of = |p: &Process| local.and_then(|at| PidFile::read(&at.pid_file(p)));
    let all = || local.into_iter().flat_map(|at| &at.manifest.processes);
    // The pid file of a process that was killed stays.
    let dead: Vec<(i32, u64)> =
        all().filter_map(of).filter(|file| !file.alive()).map(|file| (file.pid, file.started)).collect();
    let killed = memory::killed_of(&dead);
    let process_state = |p: &Process| ProcessState {
        name: p.name.clone(),
        role: p.role,
        lives: of(p).is_some_and(|file| file.alive()),
        out_of_memory: of(p).is_some_and(|file| !file.alive() && killed.contains(&file.pid)),
        log: local.map(|at| at.log(p)).unwrap_or_default(),
    };
    let processes = all().map(process_state).collect();
    // The mounts that this machine's `weir up` made; others belong to their own machines.
    let local_mounts = local.filter(|_| !only_processes);
    let mounts = local_mounts.map(mounts::of).unwrap_or_default();
    let dead_mounts = if only_processes { Vec::new() } else { mounts::other_dead(&mounts) };
    let restart = match local {
        Some(local) => format!("`weir up --dir {}` starts it again", local.dir.display()),
        None => "start its process again on its machine".into(),
    };
    Here { processes, mounts, dead_mounts, restart }
}

/// Directories that are homes and cannot be used. Movers of other machines may see them where they are
/// mounted.
fn homes_here(processes: &[ProcessState], namespaces: &[NamespaceFacts]) -> HomesHere {
    let here = processes.iter().filter(|p| p.role == RoleName::Mover && p.lives).count();
    let known = || namespaces.iter().filter_map(|n| n.known.as_ref().ok());
    let mut homes = HomesHere::default();
    if processes.is_empty() || known().flat_map(|k| &k.relations).any(|r| r.movers as usize > here) {
        return homes;
    }
    let relations = known().flat_map(|k| &k.relations).map(|r| r.url.clone());
    let backups = known().flat_map(|k| &k.backups).map(|b| b.url.clone());
    let urls: BTreeSet<String> = relations.chain(backups).collect();
    let is_missing = |path: &Path| {
        let found = std::fs::metadata(path);
        found.as_ref().map_or_else(|e| e.kind() == std::io::ErrorKind::NotFound, |m| !m.is_dir())
    };
    let ask = |url: String| match HomeUrl::parse(&url) {
        Ok(HomeUrl::File { path }) => Some((mounts::ask(&path, is_missing), url)),
        _ => None,
    };
    let asked: Vec<(Asked<bool>, String)> = urls.into_iter().filter_map(ask).collect();
    for (missing, url) in asked {
        match missing.answer() {
            Some(true) => drop(homes.missing.insert(url)),
            Some(false) => {}
            None => drop(homes.silent.insert(url)),
        }
    }
    homes
}
