//! Whether the file at a path belongs to this user and no other user can change it.
//!
//! `weir up` and `weir down` act on the files of a cluster's directory with the rights of their caller: they
//! start and signal processes, mount over paths, write files. So none of these may be another user's.
//! Symbolic links are not followed, and the opened file is what is checked.
use crate::failure::{Doing, Failure, Outcome};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, Stat};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use weir_proto::Error;

/// A user with respect to permissions of files.
#[derive(Clone, Copy)]
struct User {
    uid: u32,
    gid: u32,
}

impl User {
    fn this() -> User {
        User { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }
}

/// Why a user must not trust a file; `None`: it may. The user's own group may write: it is usually the user
/// alone.
fn doubt(user: User, uid: u32, gid: u32, mode: u32) -> Option<String> {
    match () {
        () if uid != user.uid => Some(format!("belongs to user {uid}")),
        () if mode & 0o002 != 0 => Some("can be changed by all users".to_owned()),
        () if mode & 0o020 != 0 && gid != user.gid => Some(format!("can be changed by group {gid}")),
        () => None,
    }
}

fn check_owner(path: &Path, stat: &Stat) -> Outcome<()> {
    let user = User::this();
    match doubt(user, stat.st_uid, stat.st_gid, stat.st_mode) {
        None => Ok(()),
        Some(why) => {
            let error =
                Error::denied(format!("{} {why}, and user {} would act on it", path.display(), user.uid));
            Err(Failure::new(
                error,
                "run this as its owner, or name a directory that only this user can change",
            ))
        }
    }
}

fn open(path: &Path, flags: OFlags) -> Outcome<OwnedFd> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH).map_err(|e| match e {
        // For a link the kernel's error is that it is not a directory, if one is required.
        rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR if path.is_symlink() => Failure::new(
            Error::denied(format!("{} is a symbolic link", path.display())),
            "put what it leads to in its place: links are not followed here",
        ),
        e => Error::from_io(format_args!("open {}", path.display()), &e.into()).into(),
    })
}

fn open_checked(path: &Path, flags: OFlags) -> Outcome<OwnedFd> {
    let opened = open(path, flags)?;
    let stat = rustix::fs::fstat(&opened).doing(format_args!("stat {}", path.display()))?;
    check_owner(path, &stat)?;
    Ok(opened)
}

/// Refuses a directory that another user owns or can change.
pub fn check_dir(path: &Path) -> Outcome<()> {
    open_checked(path, OFlags::RDONLY | OFlags::DIRECTORY).map(drop)
}

/// The content of a file that only this user can change.
pub fn read(path: &Path) -> Outcome<String> {
    let mut text = String::new();
    File::from(open_checked(path, OFlags::RDONLY)?)
        .read_to_string(&mut text)
        .doing(format_args!("read {}", path.display()))?;
    Ok(text)
}

/// Opens a file to be locked, and makes it if there is none; its content stays.
pub fn open_lock(path: &Path) -> Outcome<File> {
    open_checked(path, OFlags::RDWR | OFlags::CREATE).map(File::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_table() {
        let user = User { uid: 1000, gid: 100 };
        for (uid, gid, mode, fine) in [
            (1000, 100, 0o755, true),
            (1000, 100, 0o775, true),
            (1000, 5, 0o755, true),
            (1000, 5, 0o775, false),
            (1000, 100, 0o777, false),
            (1000, 100, 0o1777, false),
            (0, 0, 0o755, false),
            (1001, 100, 0o700, false),
        ] {
            assert_eq!(doubt(user, uid, gid, mode).is_none(), fine, "{uid} {gid} {mode:o}");
        }
    }

    #[test]
    fn links_are_not_followed_and_nothing_is_cut_by_opening() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "kept").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for refused in [open_lock(&link).map(drop), read(&link).map(drop)] {
            assert!(refused.unwrap_err().to_string().contains("is a symbolic link"));
        }
        drop(open_lock(&file).unwrap());
        assert_eq!(read(&file).unwrap(), "kept");
        check_dir(dir.path()).unwrap();
    }
}
