//! `weir down`: ends the processes of a local cluster in order, mounts first.
use super::STOP_PATIENCE;
use super::launch::clear_dead_mount;
use crate::failure::{Doing, Failure, Outcome};
use crate::local::args::Down;
use crate::local::local_cluster::{Kept, LocalCluster, Process, RoleName};
use crate::local::process::{PidFile, mounts_elsewhere};
use crate::table;
use rustix::mount::UnmountFlags;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use weir_proto::Error;

pub fn down(args: &Down) -> Outcome<()> {
    let local = LocalCluster::open_own(&args.dir)?;
    if args.memory && local.manifest.kept == Kept::Disk {
        let error =
            Error::invalid(format!("the cluster in {} is on the disk, not in memory", local.dir.display()));
        return Err(Failure::new(
            error,
            "omit --memory; to delete the cluster, remove the directory afterwards",
        ));
    }
    let Downed { killed, ended_calls, lost_bytes } = take_down(&local)?;
    if args.json {
        let removed = local.manifest.kept != Kept::Disk;
        #[rustfmt::skip]
        table::json(&json!({
            "dir": local.dir, "stopped": true, "killed": killed, "ended_calls": ended_calls, "removed": removed,
            "lost_bytes": lost_bytes,
        }));
        return Ok(());
    }
    for (name, bytes) in lost_bytes {
        let bytes = table::bytes(bytes);
        println!("{name} ended with {bytes} that programs had written and that no target has: they are lost");
    }
    for (name, count) in ended_calls {
        let calls = if count == 1 { "1 call" } else { &format!("{count} calls") };
        println!("{name} was in use: {calls} of programs that waited ended with an error");
    }
    for name in killed {
        println!("{name} did not stop within {STOP_PATIENCE:?} and was killed");
    }
    for mount in local.of_role(RoleName::Mount) {
        for pid in mounts_elsewhere(&local.config_file(mount)) {
            let (name, path) = (&mount.name, mount.path.display());
            println!(
                "process {pid} still serves {name} at {path} in another mount namespace: `kill {pid}` ends it"
            );
        }
    }
    match local.manifest.kept {
        Kept::Disk => println!("stopped; `weir up --dir {}` starts it again", local.dir.display()),
        _ => println!("stopped and removed"),
    }
    Ok(())
}

/// The result of stopping a cluster.
#[derive(Default)]
pub struct Downed {
    /// Processes that had to be killed.
    pub killed: Vec<String>,
    /// The calls of programs that waited, and got an error, by mount.
    pub ended_calls: BTreeMap<String, usize>,
    /// What programs had written and no target has, by mount.
    pub lost_bytes: BTreeMap<String, u64>,
}

/// Mounts first, so that all their data is saved; then the servers. The coordinator stops before the targets:
/// it asks them for their progress, and does not see them leave, so no member of a group is behind at the
/// next start.
const ORDER: [&[RoleName]; 5] = [
    &[RoleName::Mount, RoleName::Mover, RoleName::Console],
    &[RoleName::Meta],
    &[RoleName::Coord],
    &[RoleName::Storage],
    &[RoleName::Etcd],
];

pub fn take_down(local: &LocalCluster) -> Outcome<Downed> {
    let downed = stop(local, |_| true)?;
    remove_memory(local)?;
    Ok(downed)
}

/// Stops these processes, in order.
pub(super) fn stop(local: &LocalCluster, which: impl Fn(&Process) -> bool) -> Outcome<Downed> {
    let mut downed = Downed::default();
    for roles in ORDER {
        let all = local.manifest.processes.iter().filter(|p| roles.contains(&p.role));
        let group: Vec<&Process> = all.filter(|p| which(p)).collect();
        // Signalled together, awaited one by one.
        for process in &group {
            if let Some(pid) = PidFile::read(&local.pid_file(process)) {
                pid.signal(rustix::process::Signal::TERM)?;
            }
        }
        for process in group {
            if let Some(pid) = PidFile::read(&local.pid_file(process))
                && stop_one(local, process, &pid)?
            {
                downed.killed.push(process.name.clone());
            }
            let last = PidFile::read(&local.pid_file(process));
            let (calls, bytes) = last.map_or((0, 0), |last| (last.ended_calls, last.unsaved_bytes));
            downed.ended_calls.extend((calls > 0).then(|| (process.name.clone(), calls)));
            downed.lost_bytes.extend((bytes > 0).then(|| (process.name.clone(), bytes)));
            if process.role == RoleName::Mount {
                clear_dead_mount(&process.path)?;
            }
            let _ = fs::remove_file(local.pid_file(process)); // it may never have been started
        }
    }
    Ok(downed)
}

/// A mount that still saves data is awaited for as long as it tries; every other process is killed when its
/// time is over. True: it was killed.
fn stop_one(local: &LocalCluster, process: &Process, pid: &PidFile) -> Outcome<bool> {
    let saves = || PidFile::read(&local.pid_file(process)).is_some_and(|file| file.unsaved_bytes > 0);
    pid.signal(rustix::process::Signal::TERM)?;
    while !pid.gone_within(STOP_PATIENCE) {
        if process.role != RoleName::Mount || !saves() {
            return pid.stop(STOP_PATIENCE);
        }
        eprintln!("{} still saves what programs have written", process.name);
    }
    Ok(false)
}

fn remove_memory(local: &LocalCluster) -> Outcome<()> {
    let dir = &local.dir;
    match local.manifest.kept {
        Kept::Disk => return Ok(()),
        Kept::Tmpfs => {
            let plain = rustix::mount::unmount(dir, UnmountFlags::NOFOLLOW);
            plain
                .or_else(|_| rustix::mount::unmount(dir, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH))
                .doing(format_args!("unmount {}", dir.display()))?;
        }
        Kept::SharedMemory => {
            let state = fs::read_link(dir).doing(format_args!("find the memory of {}", dir.display()))?;
            fs::remove_dir_all(&state).doing(format_args!("remove {}", state.display()))?;
            fs::remove_file(dir).doing(format_args!("remove {}", dir.display()))?;
            if !local.manifest.made_dir {
                fs::create_dir(dir).doing(format_args!("make {}", dir.display()))?;
            }
        }
    }
    if local.manifest.made_dir && dir.exists() {
        fs::remove_dir(dir).doing(format_args!("remove {}", dir.display()))?;
    }
    Ok(())
}
