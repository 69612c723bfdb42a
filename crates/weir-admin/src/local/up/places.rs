//! Where `weir up --mount` may mount: not over what a machine or its users need.
use crate::failure::{Failure, Outcome};
use crate::local::args::Up;
use crate::local::local_cluster::{self, LocalCluster, RoleName};
use std::fs;
use std::path::{Path, PathBuf};
use weir_proto::Error;

/// Directories of the system, which are not mount points even if they are empty,
const SYSTEM: [&str; 19] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/proc",
    "/root", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var",
];
/// and those with everything below them.
const SYSTEM_TREES: [&str; 6] = ["/boot", "/dev", "/etc", "/proc", "/sys", "/usr"];

/// Refuses new mounts that would hide files, unless the caller permits it.
pub(super) fn check_mounts(args: &Up) -> Outcome<()> {
    if args.mount_over_files {
        return Ok(());
    }
    let known: Vec<PathBuf> = match LocalCluster::find(&args.dir) {
        Ok(Some(local)) => local.of_role(RoleName::Mount).map(|p| p.path.clone()).collect(),
        _ => Vec::new(), // a new one, or one that is refused later, by name
    };
    for path in &args.mount {
        let path = local_cluster::absolute(path)?;
        // Mounts that exist, or did before, hide nothing new.
        if known.contains(&path) || weir_fuse::is_mounted(&path) {
            continue;
        }
        let Some(why) = hides(&path) else { continue };
        let error =
            Error::exists(format!("a mount at {} would hide {why}; nothing was started", path.display()));
        return Err(Failure::new(error, "name a new or empty directory, or pass --mount-over-files"));
    }
    Ok(())
}

/// The files that a mount there would hide.
fn hides(path: &Path) -> Option<String> {
    let is_tree = SYSTEM_TREES.iter().any(|tree| path.starts_with(tree));
    if is_tree || SYSTEM.iter().any(|dir| path == Path::new(dir)) {
        return Some("a directory of the system".to_owned());
    }
    let entries = fs::read_dir(path).ok()?.flatten().count();
    (entries > 0).then(|| format!("its {entries} files and directories"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_may_not_hide_files_or_the_system() {
        for dir in ["/", "/etc", "/etc/weir", "/usr/local/x", "/proc/1", "/tmp", "/home", "/var"] {
            assert_eq!(hides(Path::new(dir)).as_deref(), Some("a directory of the system"), "{dir}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(hides(dir.path()), None, "it is empty");
        assert_eq!(hides(&dir.path().join("new")), None);
        fs::write(dir.path().join("thesis.tex"), "x").unwrap();
        assert!(hides(dir.path()).unwrap().starts_with("its 1 "));
    }
}
