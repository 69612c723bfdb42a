//! Moves removed files back from a volume's trash.
//!
//! Always holds: nothing that exists is replaced, and nothing is removed except empty directories of the
//! trash.
use super::no_trash;
use rustix::fs::{CWD, RenameFlags};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_proto::Error;
use weir_proto::volume::TRASH;

/// The conflicting names that are listed.
const SHOWN_MAX: usize = 10;

/// Moves the latest removed version of `path` to `to`; returns the part of the trash that had it.
pub fn restore(path: &Path, to: &Path) -> Outcome<String> {
    let name = OsStr::from_bytes(TRASH);
    let top = path.ancestors().skip(1).find(|top| top.join(name).is_dir());
    let top = top.ok_or_else(|| no_trash(path))?;
    let below = path.strip_prefix(top).expect("an ancestor is a prefix");
    let (old, part) = newest(&top.join(name), below)?;
    if !to.parent().is_some_and(Path::is_dir) {
        return Err(Failure::new(
            Error::not_found(format!("the directory of {} does not exist, either", to.display())),
            "restore that first, or choose another place with --to PATH",
        ));
    }
    let mut in_the_way = Vec::new();
    put_back(&old, to, &mut in_the_way)?;
    match &in_the_way[..] {
        [] => Ok(part),
        some => Err(refused(&old, some)),
    }
}

/// Its place in the newest part that has it.
fn newest(trash: &Path, below: &Path) -> Outcome<(PathBuf, String)> {
    let mut parts: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(trash).doing(format_args!("list {}", trash.display()))? {
        parts.push(entry.doing(format_args!("list {}", trash.display()))?.path());
    }
    parts.sort();
    let found = parts.iter().rev().find(|part| fs::symlink_metadata(part.join(below)).is_ok());
    let part = found.ok_or_else(|| {
        Failure::new(
            Error::not_found(format!("nothing of {} is in {}", below.display(), trash.display())),
            "replaced and truncated files are not in the trash; `--at DATE` searches snapshots and backups",
        )
    })?;
    Ok((part.join(below), part.display().to_string()))
}

/// Moves everything that conflicts with no existing name; conflicts are listed.
fn put_back(old: &Path, to: &Path, in_the_way: &mut Vec<PathBuf>) -> Outcome<()> {
    match rustix::fs::renameat_with(CWD, old, CWD, to, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::EXIST) => {}
        moved => {
            let moved = moved.map_err(std::io::Error::from);
            return moved.doing(format_args!("move {} to {}", old.display(), to.display()));
        }
    }
    let is_directory = |path: &Path| fs::symlink_metadata(path).is_ok_and(|m| m.is_dir());
    if !is_directory(old) || !is_directory(to) {
        in_the_way.push(to.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(old).doing(format_args!("list {}", old.display()))? {
        let name = entry.doing(format_args!("list {}", old.display()))?.file_name();
        put_back(&old.join(&name), &to.join(&name), in_the_way)?;
    }
    let _ = fs::remove_dir(old); // it is left if a name conflicts
    Ok(())
}

fn refused(old: &Path, in_the_way: &[PathBuf]) -> Failure {
    let mut reported: Vec<String> =
        in_the_way.iter().take(SHOWN_MAX).map(|p| p.display().to_string()).collect();
    if in_the_way.len() > SHOWN_MAX {
        reported.push(format!("and {} more", in_the_way.len() - SHOWN_MAX));
    }
    Failure::new(
        Error::exists(format!("{}: exists already, and is left as it is", reported.join(", "))),
        format!("the removed one is in {}: restore it to another place with --to PATH", old.display()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_files_stay_and_the_rest_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        let write = |path: &str, text: &str| {
            fs::create_dir_all(top.join(path).parent().unwrap()).unwrap();
            fs::write(top.join(path), text).unwrap();
        };
        let read = |path: &str| fs::read_to_string(top.join(path)).unwrap();
        write(".trash/2026-11-21/d/f", "older");
        write(".trash/2026-11-22/d/f", "removed");
        write(".trash/2026-11-22/d/sub/g", "removed too");
        write(".trash/2026-11-21/only", "of the day before");
        restore(&top.join("d"), &top.join("d")).unwrap();
        assert_eq!((read("d/f"), read("d/sub/g")), ("removed".into(), "removed too".into()));
        assert!(restore(&top.join("only"), &top.join("only")).unwrap().ends_with("2026-11-21"));
        let failure = restore(&top.join("d"), &top.join("d")).unwrap_err();
        assert!(failure.error.context.contains("d/f: exists already"), "{}", failure.error);
        assert_eq!((read("d/f"), read(".trash/2026-11-21/d/f")), ("removed".into(), "older".into()));
        restore(&top.join("d/f"), &top.join("before")).unwrap();
        assert_eq!(read("before"), "older");
        assert!(restore(&top.join("never"), &top.join("never")).is_err());
    }
}
