//! The root of a home directory: whether it is the right one, which attributes its file system keeps, and
//! path resolution below it.
//!
//! Invariants: every path is resolved from the opened root and follows no symbolic link, so nothing outside
//! can be reached; the root has our mark with this relation's name and the root's own inode, so a mount point
//! without its mount, or a copy, is not taken for home. If home is only read, no mark is written or required.
use super::place::{Keeps, Place};
use super::{FileHomeConfig, fault};
use crate::{Expect, Fault, HomePath, Outcome, RESERVED, Traits};
use rustix::thread::CapabilitySet;
use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    fs::{Mode, OFlags, ResolveFlags, XattrFlags},
    io::Errno,
};
use std::path::Path;
use weir_proto::Error;

/// File systems of this machine's own disks (`linux/magic.h`): ext4, XFS, Btrfs, tmpfs, ZFS. Times that are
/// set there stay, even if data is written back later.
const LOCAL_FS: [u64; 5] = [0xEF53, 0x5846_5342, 0x9123_683E, 0x0102_1994, 0x2FC1_2FC1];
/// Below PATH_MAX, with room for a longest name: longer paths are resolved in steps.
const STEP_BYTES_MAX: usize = 3800;
const MARK_BYTES_MAX: usize = 4096;

pub(super) struct Root {
    fd: OwnedFd,
    pub(super) keeps: Keeps,
    /// On a disk of this machine.
    pub(super) is_local: bool,
}

impl Root {
    pub(super) fn open(config: &FileHomeConfig) -> Outcome<Root> {
        let path = HomePath::root();
        let fd = open_dir(config).map_err(|e| cannot_open(config, e))?;
        let failed = |e| fault("stat", &path, e);
        // Of the opened directory: regardless of the links that led there, only that user may export its
        // content.
        let owner = rustix::fs::fstat(&fd).map_err(failed)?.st_uid;
        if let Some(user) = config.only_of.filter(|user| *user != owner) {
            return Err(Fault::Denied(Error::denied(format!(
                "the home directory {} belongs to user {owner}, and user {user} named it: its owner or the superuser may",
                config.path.display()
            ))));
        }
        if !config.only_reads {
            check_mark(&fd, config)?;
        }
        let owners = config.run_as.is_none() && rustix::process::geteuid().is_root();
        let trusted = owners && may_use_trusted();
        let keeps =
            Keeps { owners, trusted, xattrs: keeps_xattrs(&fd, config.only_reads), acls: keeps_acls(&fd) };
        let is_local = LOCAL_FS.contains(&(rustix::fs::fstatfs(&fd).map_err(failed)?.f_type as u64));
        Ok(Root { fd, keeps, is_local })
    }

    pub(super) fn traits(&self) -> Traits {
        Traits {
            owners: self.keeps.owners,
            exact_times: true,
            xattrs: self.keeps.xattrs,
            xattr_bytes_max: usize::MAX,
            path_bytes_max: usize::MAX,
            acls: self.keeps.acls,
            hard_links: true,
            special_files: self.keeps.owners,
            growing_prefix: true,
            calls_max: 1, // set by the lane
            parallel_writers: true,
            in_place: true,
            holes: true,
            cheap_rename: true,
            strong_fingerprints: false,
        }
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Opens a directory as the starting point of further look-ups.
    pub(super) fn dir(&self, names: &[bytes::Bytes]) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at: Option<OwnedFd> = None;
        let mut rest = names;
        loop {
            let (step, left) = rest.split_at(step_len(rest));
            let way = if step.is_empty() { b".".to_vec() } else { step.join(&b'/') };
            let from = at.as_ref().map_or(self.fd.as_fd(), |fd| fd.as_fd());
            let next = loop {
                match rustix::fs::openat2(from, &way[..], flags, Mode::empty(), resolve) {
                    Err(Errno::AGAIN | Errno::INTR) => {} // a rename above at this moment
                    opened => break opened?,
                }
            };
            if left.is_empty() {
                return Ok(next);
            }
            (at, rest) = (Some(next), left);
        }
    }

    /// The place of `path`, whether or not it exists.
    pub(super) fn place(&self, path: &HomePath) -> rustix::io::Result<Place> {
        match path.names().split_last() {
            Some((name, above)) => Ok(Place { dir: self.dir(above)?, name: name.to_vec() }),
            None => Ok(Place { dir: self.dir(&[])?, name: b".".to_vec() }),
        }
    }

    /// The place of an entry of ours; if a directory above is missing it counts as gone.
    pub(super) fn place_of(&self, path: &HomePath, expect: &Expect) -> Outcome<Place> {
        match self.place(path) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                Err(Fault::diverged(path, Some(expect.fingerprint()), None))
            }
            place => place.map_err(|e| fault("find", path, e)),
        }
    }
}

/// If the home must be below a directory, no symbolic link leads out of it, even one that was added since.
fn open_dir(config: &FileHomeConfig) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Some(below) = &config.below else {
        return rustix::fs::open(&config.path, flags, Mode::empty());
    };
    let rest = config.path.strip_prefix(below).map_err(|_| Errno::XDEV)?;
    let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
    let top = rustix::fs::open(below, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    loop {
        match rustix::fs::openat2(&top, rest, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {} // a rename above at this moment
            opened => return opened,
        }
    }
}

fn cannot_open(config: &FileHomeConfig, e: Errno) -> Fault {
    let path = config.path.display();
    match (e, &config.below) {
        (Errno::XDEV, Some(below)) => Fault::Denied(Error::denied(format!(
            "the home directory {path} leads out of {}, the place where homes are allowed: name the directory itself, not a \
             symbolic link",
            below.display()
        ))),
        (Errno::ACCESS, _) if config.run_as.is_some() => Fault::Denied(Error::denied(format!(
            "the user as whom movers act there may not open the home directory {path}: grant it access"
        ))),
        _ => Fault::Unreachable(Error::unavailable(format!(
            "the home directory {path} cannot be opened ({e}): mount it, or make it"
        ))),
    }
}

/// The kernel lets only processes with this capability read and set them.
fn may_use_trusted() -> bool {
    let own = rustix::thread::capabilities(None);
    own.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// The number of names in one step of path resolution.
fn step_len(names: &[bytes::Bytes]) -> usize {
    let mut bytes = 0;
    let fits = names.iter().take_while(|name| {
        bytes += name.len() + 1;
        bytes <= STEP_BYTES_MAX
    });
    fits.count()
}

fn keeps_xattrs(root: &OwnedFd, only_reads: bool) -> bool {
    let name = c"user.weir.probe";
    if only_reads {
        return !matches!(rustix::fs::fgetxattr_query(root, name), Err(Errno::OPNOTSUPP | Errno::NOSYS));
    }
    let set = rustix::fs::fsetxattr(root, name, b"1", XattrFlags::empty()).is_ok();
    set && rustix::fs::fremovexattr(root, name).is_ok()
}

fn keeps_acls(root: &OwnedFd) -> bool {
    let found = rustix::fs::fgetxattr_query(root, c"system.posix_acl_access");
    !matches!(found, Err(Errno::OPNOTSUPP | Errno::NOSYS))
}

/// Reads the mark, or writes it if there is none and this home is new.
fn check_mark(root: &OwnedFd, config: &FileHomeConfig) -> Outcome<()> {
    let path = HomePath::root();
    let failed = |doing| move |e| fault(doing, &HomePath::root(), e);
    let ino = rustix::fs::fstat(root).map_err(failed("stat"))?.st_ino;
    let wished = mark_text(&config.relation, ino);
    let shown = config.path.display();
    match read_mark(root).map_err(failed("read the mark in"))? {
        Some(text) if text == wished.as_bytes() => Ok(()),
        Some(text) => {
            let text = String::from_utf8_lossy(&text);
            let error = Error::stale(format!(
                "{shown} is marked as another home (its .weir-home has {:?}, expected {:?}): it belongs to another \
                 relation or is a copy; give the right directory, or remove .weir-home there if it is to be ours",
                text.trim_end(),
                wished.trim_end()
            ));
            Err(Fault::new(crate::FaultKind::Diverged, &path, error))
        }
        None if config.is_new => write_mark(root, wished.as_bytes()).map_err(failed("leave the mark in")),
        None => Err(Fault::Unreachable(Error::unavailable(format!(
            "{shown} has no mark .weir-home: probably nothing is mounted there; mount home, nothing is written before"
        )))),
    }
}

fn mark_text(relation: &str, ino: u64) -> String {
    format!("weir home 1\nrelation {relation}\nroot {ino}\n")
}

fn read_mark(root: &OwnedFd) -> rustix::io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = match rustix::fs::openat(root, RESERVED, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut text = vec![0; MARK_BYTES_MAX];
    let n = rustix::io::pread(&file, &mut text[..], 0)?;
    text.truncate(n);
    Ok(Some(text))
}

/// Written under another name and renamed: a mark is complete or absent.
fn write_mark(root: &OwnedFd, text: &[u8]) -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let temporary = [RESERVED, b"-mark"].concat();
    let file = rustix::fs::openat(root, &temporary[..], flags, Mode::from_raw_mode(0o644))?;
    if rustix::io::pwrite(&file, text, 0)? != text.len() {
        return Err(Errno::NOSPC);
    }
    rustix::fs::fsync(&file)?;
    rustix::fs::renameat(root, &temporary[..], root, RESERVED)?;
    rustix::fs::fsync(root)
}

/// For messages about file descriptors in tests.
impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Root(fd {}, {:?})", self.fd.as_raw_fd(), self.keeps)
    }
}
