//! A cluster observed from outside: a handle on it, or in plain words the reason why there is none.
use crate::certificate::{self, Caller};
use crate::failure::{Doing, Failure, Outcome};
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use weir_coord::{Cluster, Observer};
use weir_diagnose::Health;
use weir_env::{Addr, BoxFuture, Env};
use weir_proto::Error;

/// How long a starting cluster may take until it accepts data.
const HEALTHY_PATIENCE: Duration = Duration::from_secs(60);
/// How long a connection to a coordinator elsewhere may take until it proves nothing.
const CONNECT_PATIENCE: Duration = Duration::from_millis(500);
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// The hint if nothing listens at the coordinator's addresses.
const IS_IT_UP: &str =
    "is the cluster up? `weir up --dir DIR` starts what is missing; on several machines start `weir coord`";
/// The interval of checks of a starting cluster.
const POLL: Duration = Duration::from_millis(20);

/// Runs a future to its end.
pub fn block_on<T>(work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().doing("start a runtime")?;
    runtime.block_on(work)
}

/// Equal for processes of one machine, different on any other.
pub fn host_id() -> String {
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    match machine.trim() {
        "" => name,
        id => format!("{name}-{id}"),
    }
}

/// A handle on a cluster whose map is known.
pub fn observe<'a>(env: &'a Env, coordinators: &'a [Addr], name: &'a str) -> BoxFuture<'a, Outcome<Cluster>> {
    Box::pin(async move {
        let cluster = observe_as(env, coordinators, name, &Caller::of_commands()).await?;
        certificate::renew_that_of_commands(&cluster).await;
        Ok(cluster)
    })
}

pub fn observe_as<'a>(
    env: &'a Env,
    coordinators: &'a [Addr],
    name: &'a str,
    caller: &'a Caller,
) -> BoxFuture<'a, Outcome<Cluster>> {
    Box::pin(async move {
        let who = Observer {
            coordinators: coordinators.to_vec(),
            cluster: None,
            name: name.to_string(),
            role: caller.role,
            host: host_id(),
            trust: caller.trust.clone(),
        };
        Cluster::observe(env, who, ANSWER_PATIENCE).await.map_err(|e| {
        let at: Vec<String> = coordinators.iter().map(Addr::to_string).collect();
        match e.kind {
            weir_proto::ErrorKind::Unavailable | weir_proto::ErrorKind::Deadline => Failure::new(
                Error::unavailable(format!(
                    "the coordinator does not answer at {}: {}",
                    at.join(", "),
                    cause(&e)
                )),
                match coordinators.iter().any(listens) {
                    true => {
                        "a process listens there: see whether it is stopped or its disk hangs, and its log"
                    }
                    false => IS_IT_UP,
                },
            ),
            _ => certificate::explain(e),
        }
    })
    })
}

/// The last error, without its context: for a message that has that already.
fn cause(e: &Error) -> &str {
    let last = e.context.rsplit(": ").next().unwrap_or_default();
    last.split(" (").next().unwrap_or_default()
}

/// Whether a process listens there; none: the name is resolved at the connection, so nothing is known.
fn connect(addr: &Addr) -> Option<Result<(), ErrorKind>> {
    let connected = match addr {
        Addr::Unix(path) => UnixStream::connect(path).map(drop),
        Addr::Tcp(at) => TcpStream::connect_timeout(at, CONNECT_PATIENCE).map(drop),
        Addr::Host(..) => return None,
    };
    Some(connected.map_err(|e| e.kind()))
}

/// Whether a process listens there, as far as that is known.
pub fn listens(addr: &Addr) -> bool {
    connect(addr) == Some(Ok(()))
}

/// An error if no process listens at any of the addresses, or none that this user may connect to: then
/// waiting is pointless.
pub fn require_listener(coordinators: &[Addr]) -> Outcome<()> {
    let is_closed = |addr: &Addr| connect(addr) == Some(Err(ErrorKind::PermissionDenied));
    if !coordinators.is_empty() && coordinators.iter().all(is_closed) {
        let at: Vec<String> = coordinators.iter().map(Addr::to_string).collect();
        return Err(Failure::new(
            Error::denied(format!("this user may not connect to the coordinator at {}", at.join(", "))),
            "run it in a mounted file system, whose mount asks for you, or as the user who runs the coordinator",
        ));
    }
    let refused =
        |addr: &Addr| matches!(connect(addr), Some(Err(ErrorKind::ConnectionRefused | ErrorKind::NotFound)));
    if coordinators.is_empty() || !coordinators.iter().all(refused) {
        return Ok(());
    }
    let at: Vec<String> = coordinators.iter().map(Addr::to_string).collect();
    Err(Failure::new(
        Error::unavailable(format!(
            "the coordinator does not answer at {}: nothing listens there",
            at.join(", ")
        )),
        IS_IT_UP,
    ))
}

/// Whether the cluster has been founded with its targets: from then on it can serve without some of them.
pub(crate) async fn has_groups(coordinators: &[Addr]) -> Outcome<bool> {
    let cluster = observe(&weir_env::real::env(), coordinators, "weir up").await?;
    Ok(!cluster.map().groups.is_empty())
}

/// Waits until the cluster reads and writes data with this number of targets, and knows that others are
/// missing, as long as `check` finds no error. A restarted coordinator counts a target as up until it has
/// been silent for too long.
pub(crate) async fn wait_healthy(
    coordinators: &[Addr],
    targets: usize,
    missing: usize,
    check: impl Fn() -> Outcome<()>,
) -> Outcome<Health> {
    let env = weir_env::real::env();
    let cluster = observe(&env, coordinators, "weir up").await?;
    let deadline = env.clock.now() + HEALTHY_PATIENCE;
    loop {
        let health = Health::of(&cluster.status().await?);
        // Waiting does not restore lost data; the rest can be read.
        let can_read = health.serves() || health.groups_lost > 0;
        let is_known = health.targets_up + missing <= health.targets;
        if can_read && health.targets_up >= targets && is_known {
            return Ok(health);
        }
        check()?;
        if env.clock.now() >= deadline {
            let error =
                Error::deadline(format!("the cluster is not healthy after {HEALTHY_PATIENCE:?}: {health}"));
            return Err(Failure::new(error, "`weir status --dir DIR` and the logs in DIR/log show more"));
        }
        env.clock.sleep(POLL).await;
    }
}
