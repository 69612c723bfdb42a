//! Identity of a directory: a file in it that names the target, namespace or coordinator that it belongs to.
//!
//! A directory becomes a target once; the file in it names cluster, disk and pool for ever. A directory that
//! is empty, swapped with another, not mounted, or of another cluster is refused with the reason before
//! anything in it is changed. The same holds for the directories of a namespace and of the coordinator
//! (`founded.rs`). The storage role also records in its own directory which disk it found in which directory,
//! so that an empty mount point is not taken for a new disk.
//!
//! Knows nothing of the other contents of the directory.
mod founded;
mod newest;
mod text;

pub use founded::{
    COORDINATOR_FILE, NAMESPACE_FILE, NamespaceIdentity, begin_copy, check_coordinator, check_vacant,
    open_namespace, write_coordinator, write_namespace,
};
pub use newest::{MAP_FILE, check_newest_map, keep_newest_map, older, older_map, record_newest_map};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use weir_env::Disk;
use weir_proto::{ClusterId, DiskUuid, Error, Result};

/// The file's name within a target's directory.
pub const IDENTITY_FILE: &str = "weir-target.toml";
/// An old copy of the whole directory does not help: it counts as a target that lost its data. The file
/// itself never changes.
const DAMAGED_HINT: &str = "put back this one file from a backup, and nothing else of the directory; without a backup, \
                            `weir target replace` with an empty directory, which is refilled from the other targets";

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetIdentity {
    pub cluster: ClusterId,
    pub disk: DiskUuid,
    pub pool: String,
}

/// Makes an empty directory a target. `Exists`: it is one already, or is not empty.
pub fn format_target(disk: &dyn Disk, dir: &Path, identity: &TargetIdentity) -> Result<()> {
    check_pool_name(&identity.pool)?;
    if let Some(found) = read_identity(disk, dir)? {
        return Err(Error::exists(format!(
            "{} is already target {} of cluster {}",
            dir.display(),
            found.disk,
            found.cluster
        )));
    }
    text::make_vacant(disk, dir, &[])?;
    text::store(disk, &dir.join(IDENTITY_FILE), &identity.to_text())
}

/// The directory's identity; `None` if it was never made a target.
pub fn read_identity(disk: &dyn Disk, dir: &Path) -> Result<Option<TargetIdentity>> {
    let path = dir.join(IDENTITY_FILE);
    let found = text::bytes(disk, &path)?.map(|bytes| TargetIdentity::from_text(&bytes));
    found.transpose().map_err(|e| text::if_damaged(e.doing(format!("read {}", path.display())), DAMAGED_HINT))
}

/// Checks a directory before it is served. `known`: the disk that was found here earlier, if any.
pub fn check_target(
    disk: &dyn Disk,
    dir: &Path,
    cluster: ClusterId,
    known: Option<DiskUuid>,
) -> Result<TargetIdentity> {
    let at = dir.display();
    if !disk.exists(dir) {
        return Err(Error::not_found(format!("target directory {at} does not exist"))
            .hint("mount its file system, or correct the path"));
    }
    let found = match (read_identity(disk, dir)?, known) {
        (Some(found), _) => found,
        (None, Some(known)) => {
            return Err(Error::not_found(format!(
                "{at} was target {known}, but there is no {IDENTITY_FILE} in it now"
            ))
            .hint(
                "its file system may not be mounted; if the disk is lost, `weir target replace` makes an \
                 empty directory this target's",
            ));
        }
        (None, None) => {
            return Err(Error::not_found(format!(
                "{at} is not a target yet: there is no {IDENTITY_FILE} in it"
            )));
        }
    };
    if found.cluster != cluster {
        return Err(Error::denied(format!(
            "{at} belongs to cluster {}, this is cluster {cluster}",
            found.cluster
        ))
        .hint("correct the path; to use the disk here, empty the directory first"));
    }
    match known {
        Some(known) if known != found.disk => Err(Error::denied(format!(
            "{at} holds target {}, but target {known} was here before",
            found.disk
        ))
        .hint("disks may be swapped or mounted in the wrong place; put them back")),
        _ => Ok(found),
    }
}

/// Opens a directory as a target: checks one that is known or formatted, formats one that is new and empty.
/// Returns true if it is new.
pub fn open_target(
    disk: &dyn Disk,
    dir: &Path,
    fresh: &TargetIdentity,
    known: Option<DiskUuid>,
) -> Result<(TargetIdentity, bool)> {
    let is_new = known.is_none() && read_identity(disk, dir)?.is_none();
    if is_new {
        format_target(disk, dir, fresh)?;
    }
    Ok((check_target(disk, dir, fresh.cluster, known)?, is_new))
}

/// Which disk a storage role found in which directory: its own record beside its configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KnownTargets(pub BTreeMap<PathBuf, DiskUuid>);

impl KnownTargets {
    /// One line per target: 32 hexadecimal digits, a space, the directory. An absent file has no entries.
    pub fn read(disk: &dyn Disk, file: &Path) -> Result<KnownTargets> {
        if !disk.exists(file) {
            return Ok(KnownTargets::default());
        }
        let bytes = disk.read(file).map_err(|e| Error::from_io(format!("read {}", file.display()), &e))?;
        let bad = |n: usize| {
            Error::invalid(format!("{} line {n}: expected a disk's id and its directory", file.display()))
        };
        let text = String::from_utf8(bytes).map_err(|_| bad(1))?;
        let mut known = BTreeMap::new();
        for (i, line) in text.lines().enumerate() {
            let (uuid, dir) = line.split_once(' ').ok_or_else(|| bad(i + 1))?;
            known.insert(PathBuf::from(dir), uuid.parse().map_err(|_| bad(i + 1))?);
        }
        Ok(KnownTargets(known))
    }

    pub fn write(&self, disk: &dyn Disk, file: &Path) -> Result<()> {
        let text: String = self.0.iter().map(|(dir, uuid)| format!("{uuid} {}\n", dir.display())).collect();
        disk.write_atomic(file, text.as_bytes())
            .map_err(|e| Error::from_io(format!("write {}", file.display()), &e))
    }
}

/// A pool's name is used in files and tables: lower-case letters, digits, `-`, up to 32.
pub fn check_pool_name(pool: &str) -> Result<()> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if pool.is_empty() || pool.len() > 32 || !pool.chars().all(fine) {
        return Err(Error::invalid(format!(
            "pool name {pool:?}: expected 1 to 32 lower-case letters, digits or '-'"
        )));
    }
    Ok(())
}

impl TargetIdentity {
    /// The file's text.
    pub fn to_text(&self) -> String {
        let (cluster, disk) = (self.cluster.to_string(), self.disk.to_string());
        let values = [("cluster", &*cluster), ("disk", &*disk), ("pool", &*self.pool)];
        text::write("This directory is a Weir target.", &values)
    }

    pub fn from_text(bytes: &[u8]) -> Result<TargetIdentity> {
        let lines = text::read(bytes)?;
        let pool = lines.value("pool")?.to_owned();
        check_pool_name(&pool)?;
        Ok(TargetIdentity { cluster: lines.id("cluster")?, disk: lines.id("disk")?, pool })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::Env;
    use weir_proto::ErrorKind;

    fn identity(n: u8) -> TargetIdentity {
        TargetIdentity { cluster: ClusterId([1; 16]), disk: DiskUuid([n; 16]), pool: "hdd".into() }
    }
    fn place() -> (Env, tempfile::TempDir) {
        (weir_env::real::env(), tempfile::tempdir().unwrap())
    }

    #[tokio::test]
    async fn a_target_is_formatted_once_and_known_again() {
        let (env, dir) = place();
        let t = dir.path().join("t1");
        assert_eq!(open_target(&*env.disk, &t, &identity(1), None).unwrap(), (identity(1), true));
        assert_eq!(open_target(&*env.disk, &t, &identity(2), None).unwrap(), (identity(1), false));
        let again = format_target(&*env.disk, &t, &identity(2)).unwrap_err();
        assert_eq!(again.kind, ErrorKind::Exists);
    }

    #[tokio::test]
    async fn the_wrong_directory_is_refused_by_name() {
        let (env, dir) = place();
        let (one, two, empty) = (dir.path().join("one"), dir.path().join("two"), dir.path().join("empty"));
        format_target(&*env.disk, &one, &identity(1)).unwrap();
        format_target(&*env.disk, &two, &identity(2)).unwrap();
        env.disk.create_dir_all(&empty).unwrap();
        let check = |at: &Path, cluster: u8, known: Option<u8>| {
            check_target(&*env.disk, at, ClusterId([cluster; 16]), known.map(|n| DiskUuid([n; 16])))
        };
        for (at, cluster, known, says) in [
            (&one, 1, Some(2), "swapped"),
            (&one, 9, Some(1), "belongs to cluster"),
            (&empty, 1, Some(1), "may not be mounted"),
            (&empty, 1, None, "not a target yet"),
            (&dir.path().join("absent"), 1, Some(1), "does not exist"),
        ] {
            let error = check(at, cluster, known).unwrap_err();
            assert!(error.to_string().contains(says), "{error:?}");
            assert!(error.context.contains(&at.display().to_string()), "{error:?}");
        }
        assert!(check(&one, 1, Some(1)).is_ok());
        // An empty directory that was a target earlier is never formatted again by itself.
        assert!(open_target(&*env.disk, &empty, &identity(3), Some(DiskUuid([1; 16]))).is_err());
        env.disk.write_atomic(&empty.join("thesis.tex"), b"x").unwrap();
        let occupied = open_target(&*env.disk, &empty, &identity(3), None).unwrap_err();
        assert!(occupied.context.contains("thesis.tex"), "{occupied:?}");
    }

    #[tokio::test]
    async fn a_damaged_identity_is_reported() {
        let (env, dir) = place();
        format_target(&*env.disk, dir.path(), &identity(1)).unwrap();
        let file = dir.path().join(IDENTITY_FILE);
        let text = String::from_utf8(env.disk.read(&file).unwrap()).unwrap();
        for bad in [
            text.replace("hdd", "ssd"),
            text.replace("disk", "disc"),
            text.replacen("0101", "0110", 1),
            "".into(),
        ] {
            env.disk.write_atomic(&file, bad.as_bytes()).unwrap();
            let error = read_identity(&*env.disk, dir.path()).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Damaged, "{error:?}");
            assert!(error.to_string().contains("; hint: put back this one file"), "{error:?}");
        }
        env.disk.write_atomic(&file, text.replace("format = 1", "format = 2").as_bytes()).unwrap();
        assert_eq!(read_identity(&*env.disk, dir.path()).unwrap_err().kind, ErrorKind::Unsupported);
    }

    #[tokio::test]
    async fn the_record_of_known_targets_reads_as_written() {
        let (env, dir) = place();
        let file = dir.path().join("known-targets");
        let mut known = KnownTargets::read(&*env.disk, &file).unwrap();
        known.0.insert("/data/a b".into(), DiskUuid([3; 16]));
        known.write(&*env.disk, &file).unwrap();
        assert_eq!(KnownTargets::read(&*env.disk, &file).unwrap(), known);
        env.disk.write_atomic(&file, b"nonsense\n").unwrap();
        assert!(KnownTargets::read(&*env.disk, &file).unwrap_err().context.contains("line 1"));
    }
}
