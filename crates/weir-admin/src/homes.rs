//! Opens the home of a relation's URL for a mover: a directory, S3, or another Weir.
//!
//! The URL holds no secret; keys of S3 come from the file that a rule or the URL names, or from the
//! environment, and certificates of other Weirs from such a file.
//!
//! Invariant: a home named by another user than root and the user of this process is opened only where a rule
//! of the cluster map allows homes, and, if it is a directory, only if that user owns it. Otherwise the owner
//! of a volume could read and write here with root's permissions. A rule applies to root's homes, too.
use crate::certificate::{self, Own};
use crate::s3_keys;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_client::{Client, ClientConfig, NoKernel};
use weir_coord::{Cluster, Observer};
use weir_env::{Actor, Addr, BoxFuture, Env, TaskHandle};
use weir_home::mover::{HomeOf, OpenHome};
use weir_home::{
    Fault, FileHome, FileHomeConfig, Home, HomeLane, HomeUrl, IdMap, KeySource, LaneLimits, Outcome,
    RESERVED, S3Home, S3HomeConfig, WeirHome, WeirHomeConfig,
};
use weir_proto::home_rule::{HomeRule, rule_for, rule_of_user};
use weir_proto::map::Role;
use weir_proto::{ClusterId, Error, MIB, Result};
use weir_rpc::Policy;

/// Data in the client of another Weir that is not durable there yet.
const HOME_MEMORY_BYTES: u64 = 128 * MIB;
/// Concurrent calls to another Weir: at 100 ms a small file takes about a second in any case.
const WEIR_CALLS_MAX: usize = 512;
/// Concurrent requests to an S3 service; each holds a thread.
const S3_CALLS_MAX: usize = 64;
/// How long opening another Weir may take; then it is retried later.
const HOME_PATIENCE: Duration = Duration::from_secs(30);
/// How long a command tries to reach the cluster of a URL.
const PROBE_PATIENCE: Duration = Duration::from_secs(2);
/// The region for services that require one, if the URL names none.
const REGION: &str = "us-east-1";

/// Refuses a home in the cluster of the coordinators `own`. A coordinator that does not answer here may
/// answer the movers: they check, too.
pub fn refuse_own_cluster<'a>(text: &'a str, own: &'a [Addr]) -> BoxFuture<'a, crate::failure::Outcome<()>> {
    Box::pin(async move {
        let HomeUrl::Weir { coordinators, .. } = HomeUrl::parse(text)? else { return Ok(()) };
        let there = coordinators.iter().map(|host| address(text, host)).collect::<Result<Vec<_>>>()?;
        let env = weir_env::real::env();
        let cluster_of = async |coordinators: &[Addr]| {
            let who = Observer {
                coordinators: coordinators.to_vec(),
                cluster: None,
                name: "weir relation".to_owned(),
                role: Role::Console,
                host: crate::observe::host_id(),
                trust: crate::certificate::of_commands(),
            };
            Cluster::observe(&env, who, PROBE_PATIENCE).await.map(|cluster| cluster.id()).ok()
        };
        let Some(found) = cluster_of(&there).await else { return Ok(()) };
        if cluster_of(own).await == Some(found) { Err(in_own_cluster(text).into()) } else { Ok(()) }
    })
}

/// Warns of a directory to which a volume is not copied, or not as one may expect. It is this machine's:
/// only movers know for sure.
pub fn warn_of_directory(text: &str) -> Result<()> {
    let HomeUrl::File { path } = HomeUrl::parse(text)? else { return Ok(()) };
    let shown = path.display();
    if crate::attribute::ask(&path, crate::attribute::CLIENT).is_ok() {
        eprintln!("warning: {shown} is on a Weir file system: movers refuse a home in the volume's own one");
    }
    let is_used = std::fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some());
    if is_used && !path.join(OsStr::from_bytes(RESERVED)).exists() {
        eprintln!("warning: {shown} is not empty: a file there that the volume has, too, becomes a conflict");
    }
    Ok(())
}

fn in_own_cluster(text: &str) -> Error {
    Error::invalid(format!(
        "the home {text} is in the very cluster whose volume it is to be a home of: name another cluster, or a place outside of it"
    ))
}

/// Opens homes for a mover.
pub struct Homes {
    env: Env,
    cluster: ClusterId,
    keys: Option<KeySource>,
    rules: Mutex<Vec<HomeRule>>,
    /// Clients of other Weirs, to be closed at the end, with the task that renews the certificate there.
    clients: Mutex<Vec<(Client, Option<TaskHandle>)>>,
}

/// The rights with which a home is opened.
struct Grant {
    rule: Option<HomeRule>,
    ids: IdMap,
    /// The user who must own it; absent: the one who named it may name any.
    only_of: Option<u32>,
}

impl Grant {
    fn of(rules: &[HomeRule], which: &HomeOf) -> Outcome<Grant> {
        let is_free = which.by == 0 || which.by == rustix::process::geteuid().as_raw();
        let rule = match is_free {
            true => rule_for(rules, &which.url).map_err(Fault::Broken)?,
            false => Some(rule_of_user(rules, &which.url, which.by).map_err(Fault::Denied)?),
        };
        let ids = match rule {
            Some(rule) => IdMap::by_rule(&which.ids, rule),
            None => IdMap::of(&which.ids),
        };
        let only_of = (!is_free).then_some(which.by);
        Ok(Grant { rule: rule.cloned(), ids: ids.map_err(Fault::Broken)?, only_of })
    }

    /// The directory that must contain the home after links are resolved, if the rule names one.
    fn below(&self) -> Outcome<Option<PathBuf>> {
        let Some(rule) = &self.rule else { return Ok(None) };
        match HomeUrl::parse(&rule.place).map_err(Fault::Broken)? {
            HomeUrl::File { path } => Ok(Some(path)),
            HomeUrl::S3 { .. } | HomeUrl::Weir { .. } => Ok(None),
        }
    }

    /// The certificate to present to another Weir, if one is named.
    fn certificate(&self, file: Option<&Path>) -> Result<Option<Own>> {
        let by_rule = self.rule.as_ref().and_then(|rule| rule.credentials.as_deref()).map(Path::new);
        let own = file.or(by_rule).map(|file| certificate::load(file, Policy::default()));
        own.transpose().map_err(|failure| failure.error)
    }

    /// The keys of an S3 home. Those of the environment are only for root.
    fn keys(&self, file: Option<&Path>, profile: &str, environment: Option<&KeySource>) -> Result<KeySource> {
        if let Some(file) = file {
            s3_keys::parse_keys(file, &s3_keys::read_keys(file)?, profile)?; // so that a mistake is reported at once
            return Ok(s3_keys::of_file(file.into(), profile.into(), s3_keys::read_keys));
        }
        if let Some(file) = self.rule.as_ref().and_then(|rule| rule.credentials.as_deref()) {
            let file = Path::new(file);
            s3_keys::parse_keys(file, &s3_keys::read_private(file)?, profile)?;
            return Ok(s3_keys::of_file(file.into(), profile.into(), s3_keys::read_private));
        }
        match self.only_of {
            None => environment.cloned().ok_or_else(|| {
                Error::denied(
                    "this mover has no keys for S3: name a file in the home's URL (credentials=FILE) or in a rule (`weir home \
                     allow URL --credentials FILE`), or start the mover with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
                     others of Amazon's variables, in its environment",
                )
            }),
            Some(user) => Err(Error::denied(format!(
                "the rule for this place names no keys, and the mover's own are not for the home of user {user}: `weir home allow \
                 URL --credentials FILE` names some"
            ))),
        }
    }
}

/// The user as whom a rule lets movers act. None: the mover is that user.
fn actor(user: &str) -> Outcome<Option<Actor>> {
    let numbers = |flag: &str| -> Outcome<Vec<u32>> {
        let unknown = || {
            Fault::Denied(Error::denied(format!(
                "a rule has movers act as user {user:?}, whom this machine does not know: make the user here, too"
            )))
        };
        let output = Command::new("id").args([flag, "--", user]).output().map_err(|_| unknown())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let numbers: Option<Vec<u32>> = text.split_whitespace().map(|word| word.parse().ok()).collect();
        numbers.filter(|all| output.status.success() && !all.is_empty()).ok_or_else(unknown)
    };
    let (uid, gid) = (numbers("-u")?[0], numbers("-g")?[0]);
    let own = rustix::process::geteuid().as_raw();
    if uid == own {
        return Ok(None);
    }
    if uid == 0 || own != 0 {
        let why = if uid == 0 { "that is the superuser" } else { "this mover does not run as root" };
        return Err(Fault::Denied(Error::denied(format!(
            "movers cannot act as user {user:?}, as a rule demands: {why}; correct the rule's --run-as"
        ))));
    }
    Ok(Some(Actor { uid, gid, groups: numbers("-G")? }))
}

impl Homes {
    pub fn new(env: Env, cluster: ClusterId, keys: Option<KeySource>, rules: Vec<HomeRule>) -> Homes {
        Homes { env, cluster, keys, rules: Mutex::new(rules), clients: Mutex::default() }
    }

    /// The rules for homes that are opened from now on.
    pub fn use_rules(&self, rules: Vec<HomeRule>) {
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = rules;
    }

    /// Ends the sessions in other Weirs.
    pub fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let clients = std::mem::take(&mut *self.clients.lock().unwrap_or_else(PoisonError::into_inner));
            for (client, renewing) in clients {
                renewing.iter().for_each(TaskHandle::abort);
                if let Err(e) = client.shutdown().await {
                    tracing::debug!("close the session at home: {e}"); // it expires by itself
                }
            }
        })
    }

    async fn open_home(&self, which: &HomeOf) -> Outcome<Arc<dyn Home>> {
        let (text, is_new, only_reads) = (&*which.url, which.is_new, which.only_reads);
        // The mark at home: prevents overwriting another relation, of this or another cluster.
        let relation = format!("cluster {} {}", self.cluster, which.holds);
        let limits = LaneLimits::default();
        let grant = Grant::of(&self.rules.lock().unwrap_or_else(PoisonError::into_inner), which)?;
        let url = HomeUrl::parse(text).map_err(Fault::Broken)?;
        let ids = grant.ids.clone();
        Ok(match url {
            HomeUrl::File { path } => {
                let (at, cluster) = (path.clone(), self.cluster);
                let (below, only_of) = (grant.below()?, grant.only_of);
                let user = grant.rule.and_then(|rule| rule.run_as);
                // In threads of its own: it may hang.
                let lane = HomeLane::new(&self.env, text, limits);
                let resolve = move || {
                    check_outside(&at, cluster)?;
                    user.as_deref().map_or(Ok(None), actor)
                };
                let run_as = lane.run("check where it is", &[], resolve).await?;
                #[rustfmt::skip]
                let config =
                    FileHomeConfig { path, relation, is_new, only_reads, ids, only_of, below, run_as, limits };
                Arc::new(FileHome::open(&self.env, config).await?)
            }
            HomeUrl::S3 { bucket, prefix, endpoint, region, path_style, credentials, profile } => {
                let keys = grant.keys(credentials.as_deref(), &profile, self.keys.as_ref());
                let keys = keys.map_err(Fault::Denied)?;
                let region = region.unwrap_or_else(|| REGION.to_owned());
                let endpoint = HomeUrl::s3_endpoint(endpoint.as_deref(), &region);
                let copy_bytes_max = S3HomeConfig::COPY_BYTES_MAX;
                let limits = LaneLimits { threads_max: S3_CALLS_MAX, ..limits };
                #[rustfmt::skip]
                let config = S3HomeConfig {
                    bucket, prefix, endpoint, region, path_style, keys, relation, is_new, only_reads, ids,
                    limits, copy_bytes_max,
                };
                Arc::new(S3Home::open(&self.env, config).await?)
            }
            HomeUrl::Weir { coordinators, namespace, path, credentials } => {
                let own = grant.certificate(credentials.as_deref()).map_err(Fault::Denied)?;
                let (client, renewing) = self.connect(text, &coordinators, namespace, own).await?;
                if client.cluster() == self.cluster {
                    renewing.iter().for_each(TaskHandle::abort);
                    let _ = client.shutdown().await; // nothing was done in it
                    return Err(Fault::Denied(in_own_cluster(text)));
                }
                let (url, kept) = (text.to_owned(), client.clone());
                let limits = LaneLimits { threads_max: WEIR_CALLS_MAX, ..limits };
                let config =
                    WeirHomeConfig { url, client, base: path, relation, is_new, only_reads, ids, limits };
                match WeirHome::open(&self.env, config).await {
                    Ok(home) => {
                        self.clients.lock().unwrap_or_else(PoisonError::into_inner).push((kept, renewing));
                        Arc::new(home)
                    }
                    Err(fault) => {
                        renewing.iter().for_each(TaskHandle::abort);
                        let _ = kept.shutdown().await; // it will be opened again
                        return Err(fault);
                    }
                }
            }
        })
    }

    /// A client of another Weir. With a certificate: and the task that renews that.
    async fn connect(
        &self,
        url: &str,
        coordinators: &[String],
        namespace: String,
        own: Option<Own>,
    ) -> Outcome<(Client, Option<TaskHandle>)> {
        let coordinators = coordinators.iter().map(|host| address(url, host)).collect::<Result<Vec<_>>>();
        let coordinators = coordinators.map_err(Fault::Broken)?;
        let who = Observer {
            coordinators: coordinators.clone(),
            cluster: None,
            name: format!("mover of cluster {}", self.cluster),
            role: Role::Mover,
            host: crate::observe::host_id(),
            trust: own.as_ref().map(|own| own.trust.clone()),
        };
        let config = ClientConfig {
            coordinators,
            namespace,
            role: Role::Mover,
            name: who.name.clone(),
            host: who.host.clone(),
            process: crate::local::process::own_process(),
            memory_bytes: HOME_MEMORY_BYTES,
            patience: HOME_PATIENCE,
            recall_patience: ClientConfig::RECALL_PATIENCE,
            local_creates_after: None,
            early_answers: false,
            trust: who.trust.clone(),
        };
        let connected = Client::connect(self.env.clone(), config, Arc::new(NoKernel)).await;
        let client =
            connected.map_err(|e| Fault::Unreachable(e.doing(format_args!("reach the home {url}"))))?;
        let renewal = own.map(|own| certificate::keep(self.env.clone(), own, who));
        let renewing = renewal.map(|renewal| self.env.tasks.spawn("renew a certificate at home", renewal));
        Ok((client, renewing))
    }
}

/// A home in the file system itself would be copied into itself, and a mover would wait for itself.
fn check_outside(path: &Path, cluster: ClusterId) -> Outcome<()> {
    let Ok(real) = std::fs::canonicalize(path) else { return Ok(()) }; // opening it will return the error
    let Ok(client) = crate::attribute::ask(&real, crate::attribute::CLIENT) else { return Ok(()) }; // not Weir
    match client["cluster"] == cluster.to_string() {
        true => Err(Fault::Denied(Error::denied(format!(
            "the home {} lies in the file system whose volume it is to be a home of: name a place outside of it",
            path.display()
        )))),
        false => Ok(()),
    }
}

fn address(url: &str, host: &str) -> Result<Addr> {
    format!("tcp:{host}").parse().map_err(|e| Error::invalid(format!("home {url}: {e}")))
}

impl OpenHome for Homes {
    fn open(&self, which: &HomeOf) -> BoxFuture<'_, Outcome<Arc<dyn Home>>> {
        let which = which.clone();
        Box::pin(async move { self.open_home(&which).await })
    }
}
