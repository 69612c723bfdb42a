//! Starting the processes of a local cluster: arguments, readiness, another port if one is taken.
use super::{READY_PATIENCE, Started, free_port, is_free};
use crate::config;
use crate::failure::{Doing, Failure, Outcome};
use crate::local::etcd;
use crate::local::local_cluster::{LocalCluster, Process, RoleName};
use crate::local::process::{Launch, PidFile, Program, mounts_elsewhere, wait_until};
use std::fs;
use std::path::Path;
use std::process::Child;
use weir_coord::identity::{COORDINATOR_FILE, IDENTITY_FILE, NAMESPACE_FILE};
use weir_proto::Error;

/// The outcome for processes that were to be started.
#[derive(Default)]
pub(super) struct Servers {
    pub(super) started: Vec<Started>,
    pub(super) failed: Vec<(Process, Failure)>,
}

impl Servers {
    fn note(&mut self, process: Process, became: Outcome<Started>) {
        match became {
            Ok(started) => self.started.push(started),
            Err(failure) => self.failed.push((process, failure)),
        }
    }
    /// Fails if one has failed; names all that have.
    pub(super) fn all(self) -> Outcome<Vec<Started>> {
        let mut failed = self.failed.into_iter();
        let Some((_, first)) = failed.next() else { return Ok(self.started) };
        let others: Vec<String> =
            failed.map(|(process, f)| format!("{}: {}", process.name, f.error.context)).collect();
        match others.is_empty() {
            true => Err(first),
            false => {
                let context = format!("{}; also {}", first.error.context, others.join("; "));
                Err(Error { context, ..first.error }.into())
            }
        }
    }
}

pub(super) fn start_all(local: &mut LocalCluster, roles: &[RoleName]) -> Outcome<Servers> {
    let (mut launched, mut servers) = (Vec::new(), Servers::default());
    for n in 0..local.manifest.processes.len() {
        let process = &local.manifest.processes[n];
        if !roles.contains(&process.role) {
            continue;
        }
        // New targets join one after the other, so that their numbers are those of their directories; copies
        // of the metadata join after the node that founds the namespace.
        let is_new = match process.role {
            RoleName::Storage => !process.path.join(IDENTITY_FILE).exists(),
            RoleName::Meta => !process.path.join(NAMESPACE_FILE).exists(),
            _ => false,
        };
        let new = launch(local, process)?;
        if is_new {
            let process = process.clone();
            servers.note(process, wait_or_move(local, n, new));
        } else {
            launched.push((n, new));
        }
    }
    // All others start in parallel; each is then awaited.
    for (n, launched) in launched {
        let process = local.manifest.processes[n].clone();
        servers.note(process, wait_or_move(local, n, launched));
    }
    Ok(servers)
}

/// The file in a process's directory that shows that it was founded. (Targets keep a record of their own.)
fn identity_file(role: RoleName) -> Option<&'static str> {
    match role {
        RoleName::Coord => Some(COORDINATOR_FILE),
        RoleName::Meta => Some(NAMESPACE_FILE),
        RoleName::Etcd | RoleName::Storage | RoleName::Mount | RoleName::Mover | RoleName::Console => None,
    }
}

/// The first time, and never again: later an empty directory is one whose file system is not mounted.
fn is_to_be_founded(process: &Process) -> bool {
    let is_there = |file| process.path.join(file).exists();
    let is_copy = process.role == RoleName::Meta && !matches!(process.name.as_str(), "meta" | "meta-1");
    !process.founded && !is_copy && identity_file(process.role).is_some_and(|file| !is_there(file))
}

enum Launched {
    Running(i32),
    Starting { launch: Launch, child: Child, log_before: u64 },
}

fn launch(local: &LocalCluster, process: &Process) -> Outcome<Launched> {
    let read = || PidFile::read(&local.pid_file(process));
    if let Some(pid) = read().filter(PidFile::alive) {
        // Another `weir up` may have started it a moment ago.
        wait_until(READY_PATIENCE, || read().is_some_and(|p| p.ready) || !pid.alive());
        if pid.alive() {
            refuse_elsewhere(local, process)?;
            return Ok(Launched::Running(pid.pid));
        }
    }
    refuse_elsewhere(local, process)?;
    if process.role == RoleName::Mount {
        clear_dead_mount(&process.path)?;
        weir_fuse::preflight(&process.path)?;
    }
    let (program, args) = match process.role {
        RoleName::Etcd => (Program::Other { name: "etcd", port: process.port }, etcd::args(local, process)),
        _ => (Program::Weir, arguments(local, process)?),
    };
    let launch = Launch { program, args, pid_file: local.pid_file(process), log: local.log(process) };
    let log_before = launch.log_before()?;
    let child = launch.start()?;
    Ok(Launched::Starting { launch, child, log_before })
}

/// The arguments of a role, with its present configuration.
fn arguments(local: &LocalCluster, process: &Process) -> Outcome<Vec<String>> {
    if process.role == RoleName::Console {
        let listen = format!("127.0.0.1:{}", process.port);
        let (dir, link) = (local.dir.display().to_string(), local.console_link().display().to_string());
        let words = ["console", "--dir", &dir, "--listen", &listen, "--link-file", &link];
        return Ok(words.map(str::to_owned).to_vec());
    }
    let file = local.config_file(process);
    fs::write(&file, config::write(&local.config(process))?)
        .doing(format_args!("write {}", file.display()))?;
    let mut args = vec![process.role.command().into(), "--config".into(), file.display().to_string()];
    args.extend(is_to_be_founded(process).then(|| "--new".into()));
    Ok(args)
}

/// Waits until process `n` of the manifest serves. One whose port another process took after it was chosen
/// (another cluster that starts at the same moment) gets another port and is restarted.
fn wait_or_move(local: &mut LocalCluster, n: usize, mut launched: Launched) -> Outcome<Started> {
    let mut moves_left = 3;
    loop {
        let process = &local.manifest.processes[n];
        let failure = match wait(local, process, &mut launched) {
            Ok(started) => {
                if identity_file(process.role).is_some() && !process.founded {
                    local.manifest.processes[n].founded = true;
                    local.save()?;
                }
                return Ok(started);
            }
            Err(failure) => failure,
        };
        let port_is_taken = process.port != 0 && !is_alive(&mut launched) && !is_free(process.port);
        if !port_is_taken || moves_left == 0 {
            return Err(failure);
        }
        moves_left -= 1;
        let taken: Vec<u16> = local.manifest.processes.iter().map(|p| p.port).collect();
        local.manifest.processes[n].port = free_port(&taken)?;
        local.save()?;
        launched = launch(local, &local.manifest.processes[n])?;
    }
}

/// A mount in another mount namespace is of no use here, and a second process would write its pid file.
fn refuse_elsewhere(local: &LocalCluster, process: &Process) -> Outcome<()> {
    let found = match process.role {
        RoleName::Mount if !weir_fuse::is_mounted(&process.path) => {
            mounts_elsewhere(&local.config_file(process))
        }
        _ => Vec::new(),
    };
    let Some(pid) = found.first() else { return Ok(()) };
    let (name, path) = (&process.name, process.path.display());
    let error = Error::exists(format!("process {pid} serves {name} at {path} in another mount namespace"));
    Err(Failure::new(
        error,
        format!("`kill {pid}` ends it; `nsenter -t {pid} -m` is where its mount is seen"),
    ))
}

fn is_alive(launched: &mut Launched) -> bool {
    match launched {
        Launched::Running(_) => true,
        Launched::Starting { child, .. } => child.try_wait().is_ok_and(|ended| ended.is_none()),
    }
}

fn wait(local: &LocalCluster, process: &Process, launched: &mut Launched) -> Outcome<Started> {
    let (pid, was_running) = match launched {
        Launched::Running(pid) => (*pid, true),
        Launched::Starting { launch, child, log_before } => {
            let file = launch.wait_ready(child, *log_before, READY_PATIENCE).map_err(|e| {
                e.doing(format_args!("start {} (log {})", process.name, local.log(process).display()))
            })?;
            (file.pid, false)
        }
    };
    Ok(Started { process: process.clone(), pid, was_running })
}

/// A mount process that died leaves its mount behind.
pub(super) fn clear_dead_mount(path: &Path) -> Outcome<()> {
    if weir_fuse::is_mounted(path) {
        weir_fuse::unmount(path, true)?;
    }
    Ok(())
}
