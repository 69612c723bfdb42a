//! How a mover opens the home that a relation's URL names: a directory, S3, or another Weir.
//!
//! The URL holds no secret; keys of S3 come from the file that it names, or from the environment of this process.
//!
//! Invariant: a home named by another user than root and the user of this process is opened only in a place that `mover.homes`
//! lists, and, where it is a directory, only if that user owns it. Otherwise the owner of a volume could read and write here with
//! the rights of root.
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_client::{Client, ClientConfig, NoKernel};
use weir_coord::{Cluster, Observer};
use weir_env::{Addr, BoxFuture, Env};
use weir_home::mover::{HomeOf, OpenHome};
use weir_home::{
    Credentials, Fault, FileHome, FileHomeConfig, Home, HomeLane, HomeUrl, IdMap, LaneLimits, Outcome,
    S3Home, S3HomeConfig, WeirHome, WeirHomeConfig, parse_credentials,
};
use weir_proto::map::Role;
use weir_proto::{ClusterId, Error, MIB, Result};

/// What a client of another Weir may hold that is not durable there yet.
const HOME_MEMORY_BYTES: u64 = 128 * MIB;
/// Calls that another Weir gets at once: at 100 ms a small file takes about a second, whatever is done.
const WEIR_CALLS_MAX: usize = 512;
/// Requests that an S3 service gets at once; each holds a thread.
const S3_CALLS_MAX: usize = 64;
/// How long another Weir is waited for when it is opened; then it is tried again later.
const HOME_PATIENCE: Duration = Duration::from_secs(30);
/// How long a command looks for the cluster that a URL names.
const PROBE_PATIENCE: Duration = Duration::from_secs(2);
/// Services that care for regions are asked in this one where the URL names none.
const REGION: &str = "us-east-1";

/// Where users may have homes.
#[derive(Clone, Debug, Default)]
pub struct Allowed(Vec<HomeUrl>);

impl Allowed {
    /// From places like `file:///gpfs/home`, which allow all that is below them.
    pub fn parse(places: &[String]) -> Result<Allowed> {
        Ok(Allowed(places.iter().map(|place| HomeUrl::parse(place)).collect::<Result<_>>()?))
    }

    /// Refuses a home that user `by` may not have. Returns the user who must own it, if it is a directory.
    fn check(&self, url: &HomeUrl, by: u32, text: &str) -> Outcome<Option<u32>> {
        if by == 0 || by == rustix::process::geteuid().as_raw() {
            return Ok(None);
        }
        if self.allows(url) {
            return Ok(Some(by));
        }
        Err(Fault::Denied(Error::denied(format!(
            "user {by} named the home {text}, and this mover allows users none there: the superuser may name it, or list \
             the place in mover.homes of the mover's weir.toml"
        ))))
    }

    pub fn allows(&self, url: &HomeUrl) -> bool {
        self.0.iter().any(|place| url.lies_in(place))
    }
}

/// Refuses a home in the cluster that `own` are the coordinators of. A coordinator that does not answer here may answer the movers:
/// they look, too.
pub async fn refuse_own_cluster(text: &str, own: &[Addr]) -> crate::failure::Outcome<()> {
    let HomeUrl::Weir { coordinators, .. } = HomeUrl::parse(text)? else { return Ok(()) };
    let there = coordinators.iter().map(|host| address(text, host)).collect::<Result<Vec<_>>>()?;
    let env = weir_env::real::env();
    let looks = async |coordinators: &[Addr]| {
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
    let Some(found) = looks(&there).await else { return Ok(()) };
    if looks(own).await == Some(found) { Err(in_own_cluster(text).into()) } else { Ok(()) }
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
    keys: Option<Credentials>,
    allowed: Allowed,
    /// Of other Weirs, to be closed at the end.
    clients: Mutex<Vec<Client>>,
}

impl Homes {
    pub fn new(env: Env, cluster: ClusterId, keys: Option<Credentials>, allowed: Allowed) -> Homes {
        Homes { env, cluster, keys, allowed, clients: Mutex::default() }
    }

    /// Ends the sessions in other Weirs.
    pub async fn close(&self) {
        let clients = std::mem::take(&mut *self.clients.lock().unwrap_or_else(PoisonError::into_inner));
        for client in clients {
            if let Err(e) = client.shutdown().await {
                tracing::debug!("close the session at home: {e}"); // it ends by itself
            }
        }
    }

    async fn open_home(&self, which: &HomeOf) -> Outcome<Arc<dyn Home>> {
        let (text, is_new, only_reads) = (&*which.url, which.is_new, which.only_reads);
        // The mark at home: another cluster's relation, or another one of this cluster, is not written over.
        let relation = format!("cluster {} {}", self.cluster, which.holds);
        let (ids, limits) = (IdMap::of(&which.ids).map_err(Fault::Broken)?, LaneLimits::default());
        let url = HomeUrl::parse(text).map_err(Fault::Broken)?;
        let only_of = self.allowed.check(&url, which.by, text)?;
        Ok(match url {
            HomeUrl::File { path } => {
                let (at, cluster) = (path.clone(), self.cluster);
                // On threads of its own: it may hang.
                let lane = HomeLane::new(&self.env, text, limits);
                lane.run("look where it is", &[], move || check_outside(&at, cluster)).await?;
                let config = FileHomeConfig { path, relation, is_new, only_reads, ids, only_of, limits };
                Arc::new(FileHome::open(&self.env, config).await?)
            }
            HomeUrl::S3 { bucket, prefix, endpoint, region, path_style, credentials, profile } => {
                let keys = self.keys(credentials.as_deref(), &profile).map_err(Fault::Denied)?;
                let region = region.unwrap_or_else(|| REGION.to_owned());
                let endpoint = HomeUrl::s3_endpoint(endpoint.as_deref(), &region);
                let Credentials { access_key, secret_key, token } = keys;
                let copy_bytes_max = S3HomeConfig::COPY_BYTES_MAX;
                let limits = LaneLimits { threads_max: S3_CALLS_MAX, ..limits };
                #[rustfmt::skip]
                let config = S3HomeConfig {
                    bucket, prefix, endpoint, region, path_style, access_key, secret_key, token, relation, is_new, only_reads, ids,
                    limits, copy_bytes_max,
                };
                Arc::new(S3Home::open(&self.env, config).await?)
            }
            HomeUrl::Weir { coordinators, namespace, path } => {
                let client = self.connect(text, &coordinators, namespace).await?;
                if client.cluster() == self.cluster {
                    let _ = client.shutdown().await; // nothing was done in it
                    return Err(Fault::Denied(in_own_cluster(text)));
                }
                let (url, own) = (text.to_owned(), client.clone());
                let limits = LaneLimits { threads_max: WEIR_CALLS_MAX, ..limits };
                let config =
                    WeirHomeConfig { url, client, base: path, relation, is_new, only_reads, ids, limits };
                match WeirHome::open(&self.env, config).await {
                    Ok(home) => {
                        self.clients.lock().unwrap_or_else(PoisonError::into_inner).push(own);
                        Arc::new(home)
                    }
                    Err(fault) => {
                        let _ = own.shutdown().await; // it will be opened again
                        return Err(fault);
                    }
                }
            }
        })
    }

    async fn connect(&self, url: &str, coordinators: &[String], namespace: String) -> Outcome<Client> {
        let coordinators = coordinators.iter().map(|host| address(url, host)).collect::<Result<Vec<_>>>();
        let config = ClientConfig {
            coordinators: coordinators.map_err(Fault::Broken)?,
            namespace,
            role: Role::Mover,
            name: format!("mover of cluster {}", self.cluster),
            host: crate::observe::host_id(),
            process: crate::local::process::own_process(),
            memory_bytes: HOME_MEMORY_BYTES,
            patience: HOME_PATIENCE,
            recall_patience: ClientConfig::RECALL_PATIENCE,
            trust: None, // it is no node of that cluster
        };
        let connected = Client::connect(self.env.clone(), config, Arc::new(NoKernel)).await;
        connected.map_err(|e| Fault::Unreachable(e.doing(format_args!("reach the home {url}"))))
    }

    fn keys(&self, file: Option<&Path>, profile: &str) -> Result<Credentials> {
        if let Some(file) = file {
            let text = std::fs::read_to_string(file).map_err(|e| {
                Error::denied(format!(
                    "the credentials file {} of a home cannot be read here: {e}; it must be on every node with a mover",
                    file.display()
                ))
            })?;
            return parse_credentials(&text, profile)
                .map_err(|e| Error::denied(format!("{}: {}", file.display(), e.context)));
        }
        self.keys.clone().ok_or_else(|| {
            Error::denied(
                "this mover has no keys for S3: name a file in the home's URL (credentials=FILE), or start the mover with \
                 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in its environment",
            )
        })
    }
}

/// A home in the file system itself would be copied into itself, and a mover would wait for itself.
fn check_outside(path: &Path, cluster: ClusterId) -> Outcome<()> {
    let Ok(real) = std::fs::canonicalize(path) else { return Ok(()) }; // opening it will say why
    let Ok(client) = crate::commands::file::ask(&real, crate::commands::file::CLIENT) else { return Ok(()) }; // of no Weir
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
