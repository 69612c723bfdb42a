//! The mount as a process: its mount point, its session, and its end.
use super::args::MountRole;
use super::own_attributes::{own_acts, own_attributes};
use super::{
    Environment, LAST_CALLS_PATIENCE, LAST_USE_PATIENCE, LEAVE_PATIENCE, Node, configure, run, stop_signal,
    use_place,
};
use crate::helper::MountWords;
use crate::reporting;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_admin::config::Text;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::local::process::mounts_elsewhere;
use weir_client::{Client, ClientConfig};
use weir_node::condition::Reporter;
use weir_proto::map::Role;
use weir_proto::{Error, ErrorKind, MIB};

/// How often a mount that saves its data at its end reports the rest.
const REPORT_UNSAVED_EVERY: Duration = Duration::from_millis(250);

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
        early_answers: mount.local_creates,
        ..node.client(Role::Mount, name)?
    };
    let _ = node.env.watch.name.set(config.name.clone());
    node.keep_certificate(Role::Mount)?;
    let cluster = node.observe(Role::Mount).await?;
    let notices = Arc::new(weir_fuse::Notices::new(mount.kernel_names));
    let name = config.name.clone();
    let client = Client::connect(node.env.clone(), config, notices.clone()).await?;
    let inspect = reporting::of_mount(&node.config.node.host, &name, &client);
    let reporter = Reporter::start(&node.env, &cluster, inspect);
    let options = weir_fuse::Options {
        path: path.clone(),
        top: crate::subtree::find(&client, &mount.top).await?,
        transport: mount.transport.0,
        kernel_threads: mount.kernel_threads.unwrap_or_else(kernel_threads),
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
    set_flags(&path, &words).await?;
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
    save_rest(&node, &client).await.map_err(|e| e.doing("save what the mount still held").into())
}

/// Options that the kernel does not take when it mounts FUSE are set right afterwards.
async fn set_flags(path: &Path, words: &MountWords) -> Outcome<()> {
    let Some(flags) = words.flags_beyond() else { return Ok(()) };
    let at = path.to_path_buf();
    let changed = tokio::task::spawn_blocking(move || weir_fuse::remount(&at, flags)).await;
    let Some(e) = changed.map_or_else(|e| Some(Error::io(e.to_string())), Result::err) else { return Ok(()) };
    take_off(path).await;
    let hint = "only root may set these options; omit them, or use a newer kernel";
    Err(Failure::new(e.doing("set the options of the mount"), hint))
}

/// Ends the session when all data is on targets; reports the rest meanwhile.
async fn save_rest(node: &Node, client: &Client) -> weir_proto::Result<()> {
    let saving = client.shutdown();
    tokio::pin!(saving);
    let mut reported = 0;
    loop {
        tokio::select! {
            biased;
            saved = &mut saving => {
                if reported > 0 || saved.is_err() {
                    node.report_unsaved(if saved.is_ok() { 0 } else { client.unsaved_bytes() });
                }
                return saved;
            }
            () = node.env.clock.sleep(REPORT_UNSAVED_EVERY) => {
                reported = client.unsaved_bytes();
                node.report_unsaved(reported);
            }
        }
    }
}

/// Threads that take requests from the kernel, which gives each request to the thread that has slept longest:
/// on two processors, four threads made small files 1.2 to 1.5 times as expensive as two.
fn kernel_threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4)
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
