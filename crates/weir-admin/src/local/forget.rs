//! `weir unmount`; with `--forget` it also takes a mount out of a cluster of this machine, so that `weir up`
//! does not mount it again.
use super::args::Unmount;
use super::local_cluster::{LocalCluster, RoleName, absolute};
use super::process::{PidFile, wait_until};
use super::up::{STOP_PATIENCE, lock};
use crate::failure::{Failure, Outcome};
use std::path::Path;
use weir_proto::Error;

pub fn unmount(args: &Unmount) -> Outcome<()> {
    match &args.forget {
        Some(dir) => forget_mount(&args.path, dir, args.lazy),
        None => weir_fuse::unmount(&args.path, args.lazy).map_err(Failure::from),
    }
}

fn forget_mount(path: &Path, dir: &Path, lazy: bool) -> Outcome<()> {
    let local = LocalCluster::open_own(dir)?;
    let _only_one = lock(&local)?;
    let mut local = LocalCluster::open_own(dir)?; // with changes of a concurrent `weir up`
    let path = absolute(path)?;
    let found = local.of_role(RoleName::Mount).find(|mount| mount.path == path).cloned();
    let Some(mount) = found else {
        let known: Vec<String> =
            local.of_role(RoleName::Mount).map(|mount| mount.path.display().to_string()).collect();
        let error = Error::not_found(format!("{} has no mount at {}", local.dir.display(), path.display()));
        let hint = if known.is_empty() {
            "it has none".to_owned()
        } else {
            format!("its mounts: {}", known.join(", "))
        };
        return Err(Failure::new(error, hint));
    };
    if weir_fuse::is_mounted(&path) {
        weir_fuse::unmount(&path, lazy)?;
    }
    // Unsaved data has to reach the targets first.
    let lives = || PidFile::read(&local.pid_file(&mount)).is_some_and(|pid| pid.alive());
    if !wait_until(STOP_PATIENCE, || !lives()) {
        let error = Error::deadline(format!("{} still runs {STOP_PATIENCE:?} after its unmount", mount.name));
        return Err(Failure::new(
            error,
            format!("its log is {}; run this again", local.log(&mount).display()),
        ));
    }
    local.manifest.processes.retain(|process| process.name != mount.name);
    local.save()
}
