//! What `weir status` finds out: all questions at once, each with a time of its own, so that no node
//! which hangs keeps the answer.
//!
//! A question that only newer servers or administrators are answered is left out; one that nobody answers
//! in time is a trouble itself.
use crate::commands::mounts::{self, Asked, MountState};
use crate::commands::troubles::{Facts, HomesHere, Known, NamespaceFacts, ProcessState};
use crate::commands::volume::{all, connect};
use crate::failure::Outcome;
use crate::local::local_cluster::{LocalCluster, Process, RoleName};
use crate::local::process::PidFile;
use crate::observe::{self, is_led};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use weir_coord::Cluster;
use weir_env::{Addr, Env};
use weir_home::HomeUrl;
use weir_proto::condition::{NodeCondition, TroubleList};
use weir_proto::coord::{AuditState, ClientsWaiting, Clocks, ClusterStatus, RebuildWaiting};
use weir_proto::enrol::{GetEnrolment, Holder};
use weir_proto::export::GetExports;
use weir_proto::meta::SessionList;
use weir_proto::{Error, ErrorKind, Request, Result, TargetId};
use weir_rpc::{Channel, NoService};

/// How long each question may take.
const PATIENCE: Duration = Duration::from_millis(1800);

/// What servers said.
pub struct Told {
    pub status: ClusterStatus,
    waiting: ClientsWaiting,
    clocks: Clocks,
    conditions: Vec<NodeCondition>,
    holders: Vec<Holder>,
    rebuild: Vec<(TargetId, String)>,
    audit: AuditState,
    namespaces: Vec<NamespaceFacts>,
    unanswered: Vec<(String, String)>,
}

/// What this machine shows.
struct Here {
    processes: Vec<ProcessState>,
    mounts: Vec<MountState>,
    dead_mounts: Vec<PathBuf>,
    restart: String,
}

pub struct Gathered {
    told: Told,
    here: Here,
    homes: HomesHere,
    now_s: u64,
}

impl Gathered {
    /// Asks servers, and looks at this machine meanwhile.
    pub fn ask(local: Option<&LocalCluster>, coordinators: &[Addr]) -> Outcome<Gathered> {
        let (told, here) = std::thread::scope(|scope| {
            let looking = scope.spawn(|| look_here(local));
            let told = observe::block_on(ask(coordinators));
            (told, looking.join().unwrap_or_else(|_| look_here(None)))
        });
        let told = told?;
        let homes = homes_here(&here.processes, &told.namespaces);
        let now_s = u64::try_from(weir_env::real::env().clock.wall().0 / 1_000_000_000).unwrap_or(0);
        Ok(Gathered { told, here, homes, now_s })
    }

    pub fn status(&self) -> &ClusterStatus {
        &self.told.status
    }

    pub fn facts(self, status: &ClusterStatus) -> Facts<'_> {
        let Told { waiting, clocks, conditions, holders, rebuild, audit, namespaces, unanswered, .. } =
            self.told;
        let Here { processes, mounts, dead_mounts, restart } = self.here;
        Facts {
            status,
            waiting,
            clocks,
            conditions,
            holders,
            now_s: self.now_s,
            unanswered,
            rebuild,
            audit,
            restart,
            processes,
            mounts,
            dead_mounts,
            namespaces,
            homes: self.homes,
        }
    }
}

/// Questions that were not answered in time.
#[derive(Default)]
struct Unanswered(Vec<(String, String)>);

impl Unanswered {
    /// `None` also where the server is older, or this user may not ask.
    fn heard<T>(&mut self, what: &str, answer: Result<T>) -> Option<T> {
        let e = match answer {
            Ok(answer) => return Some(answer),
            Err(e) => e,
        };
        if matches!(e.kind, ErrorKind::Deadline | ErrorKind::Unavailable) {
            self.0.push((what.to_owned(), e.context));
        }
        None
    }
}

async fn timely<T>(env: &Env, asked: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || Error::deadline(format!("no answer within {PATIENCE:?}"));
    env.clock.timeout(PATIENCE, asked).await.unwrap_or_else(|_| Err(late()))
}

/// The coordinator's view, and what each metadata server that leads says of its volumes.
async fn ask(coordinators: &[Addr]) -> Outcome<Told> {
    let env = weir_env::real::env();
    let cluster = observe::observe(&env, coordinators, "weir status").await?;
    let enrolment = cluster.administer(&GetEnrolment {});
    let (status, waiting, clocks, conditions, audit, rebuild, enrolment, namespaces) = tokio::join!(
        timely(&env, cluster.status()),
        timely(&env, cluster.waits()),
        timely(&env, cluster.clocks()),
        timely(&env, cluster.conditions()),
        timely(&env, cluster.audit()),
        timely(&env, cluster.rebuild()),
        timely(&env, enrolment),
        namespaces(&env, coordinators, &cluster),
    );
    let status = status?;
    let mut none = Unanswered::default();
    let waiting = none.heard("the list of calls that wait", waiting);
    let clocks = none.heard("the list of clocks", clocks);
    let conditions = none.heard("the list of nodes' reports", conditions);
    let audit = none.heard("the state of the coordinator's audit log", audit);
    let rebuild = none.heard("the state of the rebuild", rebuild);
    let holders = none.heard("the list of certificates", enrolment).map(|all| all.holders);
    Ok(Told {
        status,
        waiting: waiting.unwrap_or(ClientsWaiting { clients: Vec::new() }),
        clocks: clocks.unwrap_or(Clocks { off: Vec::new() }),
        conditions: conditions.map(|all| all.nodes).unwrap_or_default(),
        holders: holders.unwrap_or_default(),
        rebuild: rebuild.map_or(Vec::new(), |rebuild| not_replaced(&rebuild.waiting)),
        audit: audit.unwrap_or_default(),
        namespaces,
        unanswered: none.0,
    })
}

/// All that have a leader, at once.
async fn namespaces(env: &Env, coordinators: &[Addr], cluster: &Cluster) -> Vec<NamespaceFacts> {
    let (map, mut asked) = (cluster.map(), JoinSet::new());
    for namespace in map.namespaces.iter().filter(|n| is_led(&map, n)) {
        let (env, cluster, name) = (env.clone(), cluster.clone(), namespace.name.clone());
        let coordinators = coordinators.to_vec();
        asked.spawn(async move {
            let known = known(coordinators, &cluster, &name);
            let known = match env.clock.timeout(PATIENCE, known).await {
                Ok(Ok(known)) => Ok(known),
                Ok(Err(failure)) => Err(failure.error.context),
                Err(_) => Err(format!("no answer within {PATIENCE:?}")),
            };
            NamespaceFacts { name, known }
        });
    }
    let mut all = asked.join_all().await;
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

async fn known(coordinators: Vec<Addr>, cluster: &Cluster, namespace: &str) -> Outcome<Known> {
    let leader = cluster.meta_leader(namespace, Arc::new(NoService))?;
    let client = connect(coordinators, namespace).await?;
    let (volumes, relations, backups, audit, exports, sessions, failing) = tokio::join!(
        all(&client),
        client.relations(None),
        client.backups(None),
        client.audit(),
        told(&leader, GetExports {}),
        told(&leader, SessionList {}),
        told(&leader, TroubleList {}),
    );
    let (volumes, relations, backups) = (volumes?, relations?, backups?);
    client.shutdown().await?;
    Ok(Known {
        volumes,
        relations,
        backups,
        audit: audit.unwrap_or_default(), // an older server does not say
        exports: exports.unwrap_or_default(),
        sessions: sessions.map(|all| all.sessions).unwrap_or_default(),
        failing: failing.map(|all| all.troubles).unwrap_or_default(),
    })
}

/// `None`: the server is older, or does not tell this user.
async fn told<R: Request>(leader: &Channel, request: R) -> Option<R::Reply> {
    leader.call(&request, Vec::new(), PATIENCE).await.ok().map(|(reply, _)| reply)
}

/// Places of lost targets that no other target can take. Those whose turn comes later need nobody.
fn not_replaced(waiting: &[RebuildWaiting]) -> Vec<(TargetId, String)> {
    let text = |RebuildWaiting { target, why, places }: &RebuildWaiting| {
        format!("{target} is lost, and not replaced in {places} placement groups: {why}")
    };
    waiting.iter().filter(|w| !w.why.contains("first")).map(|w| (w.target, text(w))).collect()
}

fn look_here(local: Option<&LocalCluster>) -> Here {
    let lives =
        |p: &Process| local.is_some_and(|at| PidFile::read(&at.pid_file(p)).is_some_and(|f| f.alive()));
    let process_state = |p: &Process| ProcessState {
        name: p.name.clone(),
        role: p.role,
        lives: lives(p),
        log: local.map(|at| at.log(p)).unwrap_or_default(),
    };
    let processes = local.into_iter().flat_map(|at| &at.manifest.processes).map(process_state).collect();
    // The mounts that this machine's `weir up` made; others are their own machines'.
    let mounts = local.map(mounts::of).unwrap_or_default();
    let dead_mounts = mounts::dead_beside(&mounts);
    let restart = match local {
        Some(local) => format!("`weir up --dir {}` starts it again", local.dir.display()),
        None => "start its process again on its machine".into(),
    };
    Here { processes, mounts, dead_mounts, restart }
}

/// Directories that are homes and cannot be used. Movers of other machines may find them where they are.
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
