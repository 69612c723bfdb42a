//! Free space that targets share: how much of its file system's free space counts for a target.
//!
//! Each target of a file system counts as an equal part. Which targets are on one file system is looked up
//! once, when the process starts. Knows nothing of what targets hold.
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use weir_env::Disk;

/// The number of targets on the file system of each of this process's targets, by directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharing(BTreeMap<PathBuf, u64>);

impl Sharing {
    /// `own`: directories of targets of this process; `others`: of other processes of this machine.
    pub fn find(disk: &dyn Disk, own: &[PathBuf], others: &[PathBuf]) -> Sharing {
        let all: BTreeSet<&PathBuf> = own.iter().chain(others).collect();
        let at: BTreeMap<&PathBuf, u64> =
            all.into_iter().filter_map(|dir| Some((dir, file_system(disk, dir)?))).collect();
        let count = |dir: &PathBuf| match at.get(dir) {
            Some(own) => at.values().filter(|other| *other == own).count() as u64,
            None => 1,
        };
        Sharing(own.iter().map(|dir| (dir.clone(), count(dir))).collect())
    }

    /// A target's capacity with its part of the free space only. Space within its slabs is its own, used or
    /// not.
    pub fn capacity(&self, dir: &Path, capacity: u64, free: u64) -> u64 {
        let targets = self.0.get(dir).copied().unwrap_or(1).max(1);
        capacity.saturating_sub(free - free / targets)
    }
}

/// A directory that another process has not made yet will be on the file system of its parent.
fn file_system(disk: &dyn Disk, dir: &Path) -> Option<u64> {
    for at in dir.ancestors() {
        match disk.file_system(at) {
            Ok(number) => return Some(number),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => {
                tracing::warn!("the file system of {} is not known: {e}", dir.display());
                return None;
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::sim::{SimConfig, World};

    #[test]
    fn targets_of_one_file_system_are_counted_once() {
        let disk = World::new(1, SimConfig::default()).disk("node");
        for dir in ["/t1", "/t2"] {
            disk.create_dir_all(Path::new(dir)).unwrap();
        }
        let dirs = |all: &[&str]| all.iter().map(PathBuf::from).collect::<Vec<_>>();
        let sharing = Sharing::find(&*disk, &dirs(&["/t1", "/t2"]), &dirs(&["/t2", "/later/t3"]));
        assert_eq!(sharing.0.into_values().collect::<Vec<_>>(), [3, 3]);
    }

    #[test]
    fn targets_share_free_space_and_keep_that_of_their_slabs() {
        let (in_slabs, free) = (40, 60);
        let among = |n| Sharing(BTreeMap::from([("t1".into(), n)]));
        let capacity = |n, all| among(n).capacity(Path::new("t1"), all, free);
        assert_eq!([0, 1, 6].map(|n| capacity(n, in_slabs + free)), [100, 100, 50]);
        assert_eq!(capacity(6, free), 10, "a new target");
        assert_eq!(capacity(6, 30), 0, "its space was taken between the two measurements");
        assert_eq!(among(6).capacity(Path::new("t2"), 100, free), 100, "another directory");
    }
}
