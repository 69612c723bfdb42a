//! `weir up` and `weir down`: a whole cluster on one machine, in the background.
//!
//! Invariant: `up` may be repeated at any time; it starts missing processes and leaves running ones.
use crate::config::Text;
use crate::failure::{Doing, Failure, Outcome};
use crate::local::args::Up;
use crate::local::local_cluster::{self, Kept, LocalCluster, Manifest, Process, RoleName};
use crate::local::owned;
use crate::local::process::PidFile;
use crate::observe;
use crate::table;
use launch::{Servers, start_all};
use rustix::mount::MountFlags;
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_diagnose::Health;
use weir_diagnose::health::copies_lacking;
use weir_proto::copies::SetCopies;
use weir_proto::home_rule::{HomeRule, is_same_place};
use weir_proto::map::Scheme;
use weir_proto::{ClusterId, Error};

mod down;
mod launch;
mod places;

pub use down::{down, take_down};

/// A role that does not report within this time that it serves counts as failed.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// How long a process may take to stop by itself: a mount's unsaved data has to reach the targets first.
pub const STOP_PATIENCE: Duration = Duration::from_secs(20);
const FUSE_DEVICE: &str = "/dev/fuse";
const SHARED_MEMORY: &str = "/dev/shm";

/// The outcome for one process.
pub struct Started {
    pub process: Process,
    pub pid: i32,
    pub was_running: bool,
}

pub fn up(args: &Up) -> Outcome<()> {
    let (local, started) = bring_up(args)?;
    let health = wait_healthy(&local, &started, 0)?;
    if args.json {
        let processes: Vec<_> = started.iter().map(|s| as_json(&local, s)).collect();
        let text = json!({
            "cluster": local.manifest.cluster, "dir": local.dir, "scheme": local.manifest.scheme,
            "kept": local.manifest.kept, "processes": processes, "health": health,
        });
        table::json(&text);
        return Ok(());
    }
    let kept = if local.manifest.kept == Kept::Disk { "" } else { ", in memory" };
    println!(
        "cluster {} in {}: {} targets, {}{kept}",
        local.manifest.cluster.0,
        local.dir.display(),
        local.manifest.targets,
        local.manifest.scheme.0
    );
    println!("{health}\n");
    print!("{}", as_table(&local, &started));
    if let Some(url) = console_url(&local).filter(|_| args.console) {
        println!("\nconsole: {url} (works once; the next link is in {})", local.console_link().display());
    }
    Ok(())
}

/// Starts missing processes and waits until every role reports that it serves.
pub fn bring_up(args: &Up) -> Outcome<(LocalCluster, Vec<Started>)> {
    args.allow_home.iter().try_for_each(|place| HomeRule::plain(place).check())?;
    places::check_mounts(args)?;
    let (mut local, is_new) = match LocalCluster::find(&args.dir)? {
        Some(local) => (local, false),
        None => (create(args)?, true),
    };
    let _only_one = lock(&local)?;
    local = LocalCluster::open_own(&args.dir)?; // with changes of a concurrent `weir up`
    refuse_changes(&local, args)?;
    require_fuse(&local, &args.mount)?;
    // Now, not earlier: a mount point may lie in the cluster's own, new and empty directory. Existing mounts
    // are not checked: their process may wait for one that is to be started here.
    for path in args.mount.iter().filter(|path| !weir_fuse::is_mounted(path)) {
        fs::create_dir_all(path).doing(format_args!("make the mount point {}", path.display()))?;
    }
    add_mounts(&mut local, args)?;
    for mount in local.of_role(RoleName::Mount).filter(|mount| !weir_fuse::is_mounted(&mount.path)) {
        owned::check_dir(&mount.path)?;
    }
    local.manifest.tcp |= args.tcp;
    add_targets(&mut local, args.targets)?;
    // One exists by default: it costs next to nothing while no volume has a home.
    add_movers(&mut local, args.movers.unwrap_or(u32::from(is_new)))?;
    if args.console && local.of_role(RoleName::Console).next().is_none() {
        local.manifest.processes.push(local_cluster::console_process());
    }
    choose_ports(&mut local)?;
    let ran = running(&local);
    match start_missing(&mut local, args, is_new) {
        Ok(started) => Ok((local, started)),
        Err(failure) => {
            end_started(&local, &ran);
            Err(failure)
        }
    }
}

/// The names of the processes that run.
fn running(local: &LocalCluster) -> BTreeSet<String> {
    let lives = |p: &&Process| PidFile::read(&local.pid_file(p)).is_some_and(|pid| pid.alive());
    local.manifest.processes.iter().filter(lives).map(|p| p.name.clone()).collect()
}

/// A failed start leaves only the processes that ran before: others would keep ports without a user who knows
/// of them, and the next try would find them half started.
fn end_started(local: &LocalCluster, ran: &BTreeSet<String>) {
    let new: BTreeSet<String> = running(local).difference(ran).cloned().collect();
    if new.is_empty() {
        return;
    }
    match down::stop(local, |process| new.contains(&process.name)) {
        Ok(_) => {
            eprintln!("all new processes are stopped again; logs are in {}", local.dir.join("log").display())
        }
        Err(e) => eprintln!("warning: not all that was started is stopped again: {}", e.parts().0),
    }
}

fn start_missing(local: &mut LocalCluster, args: &Up, is_new: bool) -> Outcome<Vec<Started>> {
    let mut started = start_all(local, &[RoleName::Etcd])?.all()?;
    started.extend(start_all(local, &[RoleName::Coord])?.all()?);
    let mut servers = start_all(local, &[RoleName::Meta, RoleName::Storage])?;
    let missing = servers.failed.len();
    if missing > 0 {
        servers = without_failed(local, servers)?;
    }
    started.extend(servers.started);
    wait_healthy(local, &started, missing)?;
    keep_copies(local, is_new)?;
    allow_homes(local, &args.allow_home)?;
    started.extend(start_all(local, &[RoleName::Mount, RoleName::Mover])?.all()?);
    // Last: a process that has not started yet is not missing.
    started.extend(start_all(local, &[RoleName::Console])?.all()?);
    Ok(started)
}

/// A cluster that has placement groups keeps serving without a few of its targets, and reports it.
fn without_failed(local: &LocalCluster, servers: Servers) -> Outcome<Servers> {
    let targets = servers.started.iter().filter(|s| s.process.role == RoleName::Storage).count();
    let is_enough = targets >= usize::from(local.manifest.scheme.0.data);
    let only_targets = servers.failed.iter().all(|(process, _)| process.role == RoleName::Storage);
    if !is_enough || !only_targets || !observe::block_on(observe::has_groups(&local.coordinators()))? {
        return servers.all().map(|started| Servers { started, failed: Vec::new() });
    }
    for (process, failure) in &servers.failed {
        let (error, hint) = failure.parts();
        eprintln!("warning: the cluster continues without {}: {error}", process.name);
        if let Some(hint) = hint {
            eprintln!("hint: {hint}");
        }
    }
    Ok(Servers { failed: Vec::new(), ..servers })
}

/// Does not wait for a process that has ended again, because it is not restarted meanwhile. `missing` targets
/// did not start.
fn wait_healthy(local: &LocalCluster, started: &[Started], missing: usize) -> Outcome<Health> {
    let all_live = || {
        let lives = |s: &&Started| PidFile::read(&local.pid_file(&s.process)).is_some_and(|pid| pid.alive());
        let Some(dead) = started.iter().find(|s| !lives(s)) else { return Ok(()) };
        let what = format!("{} has ended, and the cluster is not healthy", dead.process.name);
        Err(Failure::new(
            Error::unavailable(what),
            format!("its log is {}", local.log(&dead.process).display()),
        ))
    };
    let targets = started.iter().filter(|s| s.process.role == RoleName::Storage).count();
    observe::block_on(observe::wait_healthy(&local.coordinators(), targets, missing, all_live))
}

/// A new cluster has its copies of the metadata before it is used.
fn keep_copies(local: &LocalCluster, is_new: bool) -> Outcome<()> {
    let copies = local.of_role(RoleName::Meta).count();
    if !is_new || copies == 1 {
        return Ok(());
    }
    observe::block_on(async {
        let cluster = observe::observe(&weir_env::real::env(), &local.coordinators(), "weir up").await?;
        let (namespace, copies) = ("root".to_owned(), copies as u8); // at most 5
        cluster.set_copies(&SetCopies { namespace, copies, without: None }).await?;
        cluster.wait_for(READY_PATIENCE, |map| copies_lacking(map, "root") == 0).await?;
        Ok(())
    })
}

/// Two concurrent `weir up` would start everything twice.
pub fn lock(local: &LocalCluster) -> Outcome<std::fs::File> {
    let file = owned::open_lock(&local.dir.join("run/up.lock"))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .doing("wait for another `weir up`")?;
    Ok(file)
}

fn create(args: &Up) -> Outcome<LocalCluster> {
    let targets = args.targets.unwrap_or(local_cluster::TARGETS_DEFAULT);
    let scheme = args
        .scheme
        .unwrap_or_else(|| if targets >= 6 { local_cluster::SCHEME_DEFAULT } else { smaller(targets) });
    if scheme.width() > targets as usize {
        let error =
            Error::invalid(format!("{scheme} needs {} targets, and there are {targets}", scheme.width()));
        return Err(Failure::new(
            error,
            format!("--targets {} or more, or a smaller --scheme", scheme.width()),
        ));
    }
    let made_dir = !args.dir.exists();
    let env = weir_env::real::env();
    env.disk.create_dir_durable(&args.dir).doing(format_args!("make {}", args.dir.display()))?;
    let kept = if args.memory { into_memory(&args.dir, made_dir)? } else { Kept::Disk };
    let dir = local_cluster::absolute(&args.dir)?;
    let processes = local_cluster::processes(&dir, targets, args.etcd.unwrap_or(0), args.copies.unwrap_or(1));
    for (subs, mode) in [(&["run", "door"][..], 0o755), (&["etc", "log", "socket"][..], 0o700)] {
        subs.iter().try_for_each(|sub| make_dir(&env, &dir.join(sub), mode))?;
    }
    // Files in the file system have permissions of their own; their bytes are stored here without them.
    processes.iter().try_for_each(|process| make_dir(&env, &process.path, 0o700))?;
    let cluster = Text(ClusterId(env.rng.id_128()));
    let (scheme, tcp) = (Text(scheme), args.tcp);
    let (patience, transport) = (args.patience.map(Text), args.transport.map(Text));
    let manifest = Manifest { cluster, kept, made_dir, targets, scheme, tcp, patience, transport, processes };
    let local = LocalCluster { dir, manifest };
    local.save()?;
    Ok(local)
}

fn make_dir(env: &weir_env::Env, dir: &Path, mode: u32) -> Outcome<()> {
    env.disk.create_dir_durable(dir).doing(format_args!("make {}", dir.display()))?;
    let mode = fs::Permissions::from_mode(mode);
    fs::set_permissions(dir, mode).doing(format_args!("set the mode of {}", dir.display()))
}

/// The scheme for fewer targets than the default one needs.
fn smaller(targets: u32) -> Scheme {
    match targets {
        1 => Scheme { data: 1, parity: 0 },
        2 => Scheme { data: 1, parity: 1 },
        _ => Scheme { data: targets as u8 - 1, parity: 1 },
    }
}

/// The range of ports: below the one from which the kernel takes ports for connections, so that a restarted
/// node finds its own port free.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Assigns a free port to members of etcd, and if requested to each server that does not run: its own one,
/// kept in the manifest so that a restart finds every node at its address, unless another process took it
/// meanwhile.
fn choose_ports(local: &mut LocalCluster) -> Outcome<()> {
    let mut taken: Vec<u16> = local.manifest.processes.iter().flat_map(|p| [p.port, p.peer_port]).collect();
    let tcp = local.manifest.tcp;
    let stopped: Vec<usize> = (0..local.manifest.processes.len())
        .filter(|&n| {
            let process = &local.manifest.processes[n];
            let running = PidFile::read(&local.pid_file(process)).is_some_and(|pid| pid.alive());
            (is_always_at_a_port(process.role) || tcp && process.role.listens()) && !running
        })
        .collect();
    for n in stopped {
        let process = &mut local.manifest.processes[n];
        if process.port == 0 || !is_free(process.port) {
            process.port = free_port(&taken)?;
            taken.push(process.port);
        }
        // The members know each other by it: it stays.
        if process.role == RoleName::Etcd && process.peer_port == 0 {
            process.peer_port = free_port(&taken)?;
            taken.push(process.peer_port);
        }
    }
    local.save()
}

fn is_always_at_a_port(role: RoleName) -> bool {
    matches!(role, RoleName::Etcd | RoleName::Console)
}

fn is_free(port: u16) -> bool {
    std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn free_port(taken: &[u16]) -> Outcome<u16> {
    let dice = weir_env::real::env().rng;
    let width = u64::from(PORTS.end - PORTS.start);
    let mut tried = (0..1000).map(|_| PORTS.start + (dice.next_u64() % width) as u16);
    tried.find(|port| !taken.contains(port) && is_free(*port)).ok_or_else(|| {
        let what = format!("found no free TCP port from {} to {}", PORTS.start, PORTS.end - 1);
        Failure::new(Error::unavailable(what), "`ss -ltn` lists who listens")
    })
}

/// A memory file system on DIR as root, a link into shared memory otherwise.
fn into_memory(dir: &Path, made_dir: bool) -> Outcome<Kept> {
    if rustix::process::geteuid().is_root() {
        rustix::mount::mount(
            "weir",
            dir,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            Some(c"mode=0755"),
        )
        .doing(format_args!("mount a memory file system on {}", dir.display()))?;
        return Ok(Kept::Tmpfs);
    }
    let id = ClusterId(weir_env::real::env().rng.id_128()).to_string();
    let state = Path::new(SHARED_MEMORY).join(format!("weir-{id}"));
    fs::create_dir(&state).doing(format_args!("make {}", state.display()))?;
    fs::remove_dir(dir).doing(format_args!("make a link of {}", dir.display()))?;
    std::os::unix::fs::symlink(&state, dir).doing(format_args!("link {}", dir.display()))?;
    let _ = made_dir;
    Ok(Kept::SharedMemory)
}

/// The choices at a cluster's creation cannot be changed.
fn refuse_changes(local: &LocalCluster, args: &Up) -> Outcome<()> {
    let refuse = |what: String, hint: &'static str| Err(Failure::new(Error::invalid(what), hint));
    let dir = local.dir.display();
    let members = local.of_role(RoleName::Etcd).count();
    let copies = local.of_role(RoleName::Meta).count();
    if args.copies.is_some_and(|wanted| wanted as usize != copies) {
        return refuse(
            format!("the cluster in {dir} was made with --copies {copies}"),
            "omit --copies, or choose another directory",
        );
    }
    if args.etcd.is_some_and(|wanted| wanted as usize != members) {
        let has = if members == 0 { "no etcd".to_owned() } else { format!("an etcd of {members} members") };
        return refuse(format!("the cluster in {dir} has {has}"), "omit --etcd, or choose another directory");
    }
    match (args.targets, args.scheme) {
        (Some(n), _) if n < local.manifest.targets => refuse(
            format!("the cluster in {dir} has {} targets, not {n}", local.manifest.targets),
            "omit --targets; `weir target drain` and then `weir target remove` take one away",
        ),
        (_, Some(s)) if s != local.manifest.scheme.0 => refuse(
            format!("the cluster in {dir} has the scheme {}, not {s}", local.manifest.scheme.0),
            "omit --scheme",
        ),
        _ if args.memory && local.manifest.kept == Kept::Disk => refuse(
            format!("the cluster in {dir} is on the disk"),
            "omit --memory, or choose another directory",
        ),
        _ => Ok(()),
    }
}

/// Before anything is started: without the kernel's device every mount fails.
fn require_fuse(local: &LocalCluster, new: &[PathBuf]) -> Outcome<()> {
    let known = local.of_role(RoleName::Mount).map(|mount| &mount.path);
    let Some(path) = known.chain(new).find(|path| !weir_fuse::is_mounted(path)) else { return Ok(()) };
    let opened = fs::OpenOptions::new().read(true).write(true).open(FUSE_DEVICE);
    let Err(e) = opened else { return Ok(()) };
    let failure = Error::from_io(format_args!("mount {}: open {FUSE_DEVICE}", path.display()), &e);
    let load = match e.kind() {
        std::io::ErrorKind::NotFound => "load the kernel's module (`modprobe fuse`)",
        _ => "let this user open it",
    };
    let without = format!("`weir unmount {} --forget {}`", path.display(), local.dir.display());
    let hint = match new.contains(path) {
        true => format!("{load}, or omit --mount; nothing was started"),
        false => format!("{load}, or take the mount out with {without}; nothing was started"),
    };
    Err(Failure::new(failure, hint))
}

/// Running mounts stay as they are.
fn add_mounts(local: &mut LocalCluster, args: &Up) -> Outcome<()> {
    if let Some(patience) = args.patience {
        local.manifest.patience = Some(Text(patience));
    }
    if let Some(transport) = args.transport {
        local.manifest.transport = Some(Text(transport));
    }
    for path in &args.mount {
        let path = local_cluster::absolute(path)?;
        if !local.of_role(RoleName::Mount).any(|p| p.path == path) {
            let mount = local_cluster::mount_process(&local.manifest.processes, path);
            local.manifest.processes.push(mount);
        }
    }
    local.save()
}

/// Called before movers start. A place that has a rule keeps it.
fn allow_homes(local: &LocalCluster, places: &[String]) -> Outcome<()> {
    if places.is_empty() {
        return Ok(());
    }
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &local.coordinators(), "weir up").await?;
        for place in places {
            if !cluster.map().homes.iter().any(|known| is_same_place(&known.place, place)) {
                cluster.allow_home(HomeRule::plain(place)).await?;
            }
        }
        Ok(())
    })
}

/// New ones join when they are started; new files use them soon after.
fn add_targets(local: &mut LocalCluster, wanted: Option<u32>) -> Outcome<()> {
    let has = local.of_role(RoleName::Storage).count();
    for _ in has..wanted.unwrap_or(0) as usize {
        let target = local_cluster::target_process(&local.dir, &local.manifest.processes);
        local.manifest.processes.push(target);
    }
    local.manifest.targets = local.of_role(RoleName::Storage).count() as u32; // the requested number
    local.save()
}

/// The number never decreases.
fn add_movers(local: &mut LocalCluster, wanted: u32) -> Outcome<()> {
    while local.of_role(RoleName::Mover).count() < wanted as usize {
        let mover = local_cluster::mover_process(&local.manifest.processes);
        local.manifest.processes.push(mover);
    }
    local.save()
}

fn as_json(local: &LocalCluster, s: &Started) -> serde_json::Value {
    json!({
        "name": s.process.name, "role": s.process.role, "pid": s.pid, "started": !s.was_running,
        "path": s.process.path, "log": local.log(&s.process),
        "addresses": local.addresses_shown(&s.process),
    })
}

fn as_table(local: &LocalCluster, started: &[Started]) -> String {
    let rows: Vec<Vec<String>> = started
        .iter()
        .map(|s| {
            vec![
                s.process.name.clone(),
                s.pid.to_string(),
                if s.was_running { "running" } else { "started" }.to_string(),
                s.process.path.display().to_string(),
                local.addresses_shown(&s.process).join(" "),
            ]
        })
        .collect();
    table::render(&["NAME", "PID", "STATE", "PATH", "ADDRESSES"], &rows)
}

/// The link for the next login; none: there is no console.
fn console_url(local: &LocalCluster) -> Option<String> {
    let text = fs::read_to_string(local.console_link()).ok()?;
    Some(text.trim().to_owned())
}

impl LocalCluster {
    fn addresses_shown(&self, process: &Process) -> Vec<String> {
        match process.role {
            RoleName::Mount | RoleName::Mover => Vec::new(),
            RoleName::Console => console_url(self).into_iter().collect(),
            RoleName::Etcd => vec![process.client_url()],
            _ => self.addresses(process).iter().map(ToString::to_string).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_targets_get_a_scheme_that_fits() {
        for (targets, scheme) in [(1, "single"), (2, "replica:2"), (3, "ec:2+1"), (5, "ec:4+1")] {
            assert_eq!(smaller(targets).to_string(), scheme);
        }
    }
}
