//! The mover as a process: a session with the metadata leader, and a new one when that is lost or the rules
//! for homes change.
use super::args::MoverRole;
use super::{Environment, LEAVE_PATIENCE, Node, configure, run, stop_signal, use_place};
use crate::reporting::{self, Unreached};
use std::sync::Arc;
use std::time::Duration;
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::local_cluster::LocalCluster;
use weir_client::{Client, ClientConfig, NoKernel};
use weir_coord::Cluster;
use weir_env::Env;
use weir_node::condition::Reporter;
use weir_proto::home_rule::HomeRule;
use weir_proto::map::Role;
use weir_proto::{ErrorKind, MIB};

/// A mover's nice value above that of its parent: on a machine that others need, too, it uses what they
/// leave.
const MOVER_NICE: i32 = 10;
/// A mover caches nothing: its memory has parts in flight.
pub(super) const MOVER_MEMORY_BYTES: u64 = 16 * MIB;
const MOVER_BUFFERS_BYTES: usize = 64 << 20;
/// The pause before a mover that lost its leader reconnects, in addition to the wait of each try.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// The patience for the end of its session with the leader.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

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
    let inspect = reporting::of_mover(&node.env, &node.config.node.host, &node.config.node.name, &unreached);
    let reporter = Reporter::start(&node.env, &cluster, inspect);
    let connecting = Connecting { env: node.env.clone(), config, unreached };
    let first = tokio::select! {
        biased;
        stopped = &mut stop => return stopped,
        client = connecting.connect(true) => client?,
    };
    let mut client = first;
    let mut rules = cluster.map().homes.clone();
    let opener = Arc::new(weir_admin::homes::Homes::new(node.env.clone(), cluster.id(), keys, rules.clone()));
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

async fn end_mover(node: &Node, client: &Client, opener: &weir_admin::homes::Homes) {
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
    pub(super) async fn connect(&self, starts: bool) -> Outcome<Client> {
        let mut logged = None;
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
            let why = e.to_string();
            self.unreached.failed(self.env.clock.now(), why.clone());
            if logged.as_ref() != Some(&why) {
                tracing::warn!("try again to reach the metadata leader: {e}");
                logged = Some(why);
            }
            self.env.clock.sleep(RECONNECT_PAUSE).await;
        }
    }
}
