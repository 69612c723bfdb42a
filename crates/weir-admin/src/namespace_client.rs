//! A command as a client of a namespace, without a mount: its options, its session with the metadata leader,
//! volumes and relations by name. It prints nothing but what it waits for.
use crate::certificate::Caller;
use crate::cluster_args::{CLUSTER_HEADING as HEADING, Status};
use crate::failure::{Failure, Outcome};
use crate::local::process::own_process;
use crate::observe;
use clap::Args;
use std::sync::Arc;
use std::time::Duration;
use weir_client::{Client, ClientConfig, NoKernel};
use weir_diagnose::health::is_led;
use weir_env::{Addr, BoxFuture, Env};
use weir_proto::map::Role;
use weir_proto::meta::Cred;
use weir_proto::relation::RelationInfo;
use weir_proto::volume::Volume;
use weir_proto::{Error, ErrorKind, MIB, VolumeId};

/// It caches nothing of importance.
const MEMORY_BYTES: u64 = MIB;
const PATIENCE: Duration = Duration::from_secs(20);

/// Where the cluster is.
#[derive(Args)]
pub struct Cluster {
    #[command(flatten)]
    pub cluster: Status,
    /// The namespace
    #[arg(long, default_value = "root", help_heading = HEADING)]
    pub namespace: String,
}

/// The name of the sessions of commands.
const COMMAND: &str = "weir command";

/// A client for one command.
pub fn connect(coordinators: Vec<Addr>, namespace: &str) -> BoxFuture<'_, Outcome<Client>> {
    as_client(coordinators, namespace, COMMAND, own_process(), MEMORY_BYTES)
}

/// A client of a namespace that has a leader, which lists what there is as a command does.
pub(crate) async fn connect_as(
    env: Env,
    coordinators: Vec<Addr>,
    namespace: &str,
    by: Caller,
) -> Outcome<Client> {
    open(env, by, config(coordinators, namespace, COMMAND, own_process(), MEMORY_BYTES)).await
}

/// A client of its own name and memory.
pub fn as_client<'a>(
    coordinators: Vec<Addr>,
    namespace: &'a str,
    name: &'a str,
    process: String,
    memory_bytes: u64,
) -> BoxFuture<'a, Outcome<Client>> {
    Box::pin(async move {
        let env = weir_env::real::env();
        // An error that names the addresses tried for the coordinator.
        let map = observe::observe(&env, &coordinators, "weir").await?.map();
        match map.namespace_named(namespace) {
            Some(entry) if is_led(&map, entry) => {}
            Some(_) => {
                let patience = PATIENCE.as_secs();
                eprintln!(
                    "namespace {namespace:?} has no active metadata server: waiting for one, {patience} s at most"
                );
            }
            None if map.namespaces.is_empty() => {} // the first one may be about to begin
            None => {
                let error = Error::not_found(format!("there is no namespace {namespace:?}"));
                return Err(Failure::new(error, "`weir namespace list` shows all"));
            }
        }
        open(env, Caller::of_commands(), config(coordinators, namespace, name, process, memory_bytes)).await
    })
}

fn config(
    coordinators: Vec<Addr>,
    namespace: &str,
    name: &str,
    process: String,
    memory_bytes: u64,
) -> ClientConfig {
    ClientConfig {
        coordinators,
        namespace: namespace.to_owned(),
        role: Role::Console,
        name: name.to_owned(),
        host: observe::host_id(),
        process,
        memory_bytes,
        patience: PATIENCE,
        recall_patience: ClientConfig::RECALL_PATIENCE,
        local_creates_after: None,
        early_answers: false,
        trust: None,
    }
}

async fn open(env: Env, by: Caller, config: ClientConfig) -> Outcome<Client> {
    let Caller { role, trust } = by;
    let namespace = config.namespace.clone();
    let config = ClientConfig { role, trust, ..config };
    Client::connect(env, config, Arc::new(NoKernel)).await.map_err(|e| match e.kind {
        ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::NotFound => Failure::new(
            e.doing(format_args!("reach the metadata leader of namespace {namespace:?}")),
            "`weir status` shows which nodes are up",
        ),
        _ => e.into(),
    })
}

/// The credentials of this process.
pub fn own_cred() -> Cred {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let groups = rustix::process::getgroups().unwrap_or_default();
    let mut groups: Vec<u32> = groups.into_iter().map(|g| g.as_raw()).collect();
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    Cred { uid, gid, groups }
}

/// All volumes of the namespace.
pub fn all(client: &Client) -> BoxFuture<'_, Outcome<Vec<Volume>>> {
    Box::pin(async move {
        let (mut all, mut after) = (Vec::new(), VolumeId(0));
        loop {
            let (volumes, end) = client.volumes(after).await?;
            after = volumes.last().map_or(after, |v| v.id);
            all.extend(volumes);
            if end {
                return Ok(all);
            }
        }
    })
}

/// The volume of that name.
pub fn named<'a>(client: &'a Client, name: &'a str) -> BoxFuture<'a, Outcome<Volume>> {
    Box::pin(async move {
        client.volume(name).await.map_err(|e| match e.kind {
            ErrorKind::NotFound => Failure::new(e, "`weir volume list` shows all volumes"),
            _ => e.into(),
        })
    })
}

/// The relation of that name, or the only one of the volume of that name.
pub fn find_relation<'a>(client: &'a Client, name: &'a str) -> BoxFuture<'a, Outcome<RelationInfo>> {
    Box::pin(async move {
        let all = client.relations(None).await?;
        if let Some(found) = all.iter().find(|r| r.id.to_string() == name) {
            return Ok(found.clone());
        }
        let of_volume: Vec<&RelationInfo> = all.iter().filter(|r| r.volume_name == name).collect();
        match &of_volume[..] {
            [one] => Ok((*one).clone()),
            [] => Err(Failure::new(
                Error::not_found(format!("there is no relation {name:?}")),
                "`weir relation list` shows all, like r1; a volume's name stands for its only one",
            )),
            several => {
                let ids: Vec<String> = several.iter().map(|r| r.id.to_string()).collect();
                let error = Error::invalid(format!("volume {name:?} has {} relations", several.len()));
                Err(Failure::new(error, format!("give one of them: {}", ids.join(", "))))
            }
        }
    })
}

/// The refusal of a change of a volume, with a hint.
pub fn explain(e: Error) -> Failure {
    match e.kind {
        ErrorKind::Denied => Failure::new(
            e,
            "the superuser creates and deletes volumes and sets hard limits; a volume's owner and administrators do the rest",
        ),
        ErrorKind::Exists => {
            Failure::new(e, "choose another name; `weir volume list` shows those that are taken")
        }
        ErrorKind::NotFound => Failure::new(
            e,
            "give a path from the root of the file system, and create missing directories first",
        ),
        _ => e.into(),
    }
}
