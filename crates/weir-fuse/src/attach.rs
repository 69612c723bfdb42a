//! Mounting, remounting and unmounting. An unmount always ends: a hanging mount that does not release its
//! files is detached and its connection is aborted.
use crate::call::Calls;
use crate::doing::Doing;
use crate::filesystem::Mounted;
use crate::kernel::Notices;
use crate::live::{Base, OwnActs, OwnAttributes};
use crate::mounts::{absolute, device_of, is_mounted, is_ours};
use crate::request_bytes::request_bytes;
use crate::transport::{self, Transport};
use fuser::{BackgroundSession, Config, MountOption, SessionACL};
use rustix::mount::{MountFlags, UnmountFlags};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use weir_client::Client;
use weir_env::BufferPool;
use weir_proto::{Error, InodeId, Result};

/// The kernel's read-ahead, in KiB. Several requests of 1 MiB are then in flight for one reader; the client's
/// own prefetch goes further.
const READ_AHEAD_KIB: u32 = 2048;
/// The subtype in the type of our mounts, which the kernel shows.
const SUBTYPE: &str = "weir";
/// A remount is retried this number of times, after these pauses, while files that were closed a moment ago
/// are being released.
const BUSY_TRIES_MAX: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(30);
/// How long an ordinary unmount may take before it becomes an unconditional one.
const PATIENCE: Duration = Duration::from_secs(10);

/// How to mount.
pub struct Options {
    pub path: PathBuf,
    /// The directory that the mount shows, with everything below it.
    pub top: InodeId,
    pub transport: Transport,
    /// Threads that read the device.
    pub kernel_threads: usize,
    /// `None`: if this user may.
    pub allow_other: Option<bool>,
    /// Shown as the file system's source.
    pub source: String,
    /// The kernel refuses all changes.
    pub read_only: bool,
    /// The kernel executes no programs from there.
    pub no_exec: bool,
    pub no_atime: bool,
    pub buffers: BufferPool,
    pub own_attributes: OwnAttributes,
    pub own_acts: OwnActs,
}

/// A live mount.
pub struct Attached {
    session: BackgroundSession,
    path: PathBuf,
    calls: Arc<Calls>,
}

impl Attached {
    pub fn calls(&self) -> Arc<Calls> {
        self.calls.clone()
    }
    /// Blocks until the kernel ends the session: it was unmounted.
    pub fn wait(self) -> Result<()> {
        self.session.join().doing(format_args!("serve the mount {}", self.path.display()))
    }
}

/// Checks the prerequisites of a mount, before anything is started.
pub fn preflight(path: &Path) -> Result<()> {
    let device = Path::new("/dev/fuse");
    if !device.exists() {
        return Err(Error::unsupported("/dev/fuse is missing: the kernel has no FUSE here").hint(
            "run `modprobe fuse`; in a container pass the device in (docker: --device /dev/fuse --cap-add \
             SYS_ADMIN)",
        ));
    }
    if let Err(e) = fs::OpenOptions::new().read(true).write(true).open(device) {
        return Err(Error::from_io("open /dev/fuse", &e)
            .hint("run as root, or make /dev/fuse readable and writable for this user"));
    }
    if !rustix::process::geteuid().is_root() && helper().is_none() {
        return Err(Error::unsupported("fusermount3 is missing, and only root can mount without it")
            .hint("install the package fuse3, or run as root"));
    }
    if is_mounted(path) {
        return Err(Error::exists(format!("{} is a mount already", path.display())).hint(format!(
            "`weir unmount {0}` detaches it; --recover cleans up a stale mount",
            path.display()
        )));
    }
    let meta = match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let error = Error::not_found(format!("the mount point {} does not exist", path.display()));
            return Err(error.hint(format!("create it: mkdir -p {}", path.display())));
        }
        checked => checked.doing(format_args!("stat the mount point {}", path.display()))?,
    };
    if !meta.is_dir() {
        let error = Error::invalid(format!("the mount point {} is not a directory", path.display()));
        return Err(error.hint("name an empty directory"));
    }
    Ok(())
}

/// Mounts, and returns when the kernel has accepted. Must be called in a runtime.
pub fn attach(client: &Client, notices: &Arc<Notices>, options: Options) -> Result<Attached> {
    let path = fs::canonicalize(&options.path).doing(format_args!("find {}", options.path.display()))?;
    crate::tree::show_from(options.top);
    let calls = Calls::new(client);
    let base = Base {
        client: client.clone(),
        kernel: notices.clone(),
        buffers: options.buffers,
        own_attributes: options.own_attributes,
        own_acts: options.own_acts,
    };
    let mounted = |by_ring| Mounted::new(&base, calls.clone(), &path, by_ring);
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(options.source.clone()),
        MountOption::Subtype(SUBTYPE.into()),
        MountOption::DefaultPermissions,
        MountOption::CUSTOM(format!("max_read={}", request_bytes())),
    ];
    let asked = [
        (options.read_only, MountOption::RO),
        (options.no_exec, MountOption::NoExec),
        (options.no_atime, MountOption::NoAtime),
    ];
    config.mount_options.extend(asked.into_iter().filter_map(|(on, option)| on.then_some(option)));
    if options.allow_other.unwrap_or_else(may_allow_other) {
        config.acl = SessionACL::All;
    } else {
        tracing::info!(
            "only this user sees the mount: root, or user_allow_other in /etc/fuse.conf, lets others in"
        );
    }
    config.n_threads = Some(options.kernel_threads);
    config.clone_fd = true;
    let session = transport::open(options.transport, &path, config, notices, mounted)?;
    if let Err(e) = raise_read_ahead(&path) {
        tracing::info!("the kernel's read-ahead stays at its default: {e}");
    }
    Ok(Attached { session, path, calls })
}

/// Changes the kernel's flags of a live mount.
pub fn remount(path: &Path, flags: MountFlags) -> Result<()> {
    let mut tries = 0;
    loop {
        match rustix::mount::mount_remount(path, flags, c"") {
            Err(rustix::io::Errno::BUSY) if tries < BUSY_TRIES_MAX => tries += 1,
            done => return done.doing(format_args!("remount {}", path.display())),
        }
        std::thread::sleep(BUSY_PAUSE);
    }
}

fn may_allow_other() -> bool {
    let conf = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    rustix::process::geteuid().is_root() || conf.lines().any(|line| line.trim() == "user_allow_other")
}

/// The kernel's default read-ahead of 128 KiB is far below a request.
fn raise_read_ahead(path: &Path) -> std::io::Result<()> {
    let device = device_of(path).ok_or_else(|| std::io::Error::other("the mount is not listed"))?;
    fs::write(format!("/sys/class/bdi/{device}/read_ahead_kb"), READ_AHEAD_KIB.to_string())
}

/// Detaches a mount of ours, even one whose process died. `lazy`: at once, even with open files.
pub fn unmount(path: &Path, lazy: bool) -> Result<()> {
    let path = absolute(path);
    if !is_mounted(&path) {
        let error = Error::not_found(format!("nothing is mounted at {}", path.display()));
        return Err(error.hint("`weir status --dir DIR` lists the mounts of a cluster"));
    }
    if !is_ours(&path) {
        let error = Error::invalid(format!("the mount at {} is not one of Weir", path.display()));
        return Err(error.hint("use umount(8) for it"));
    }
    match in_time(&path) {
        Some(Ok(())) => Ok(()),
        Some(Err(rustix::io::Errno::BUSY)) if !lazy => Err(Error::name(
            weir_proto::NameRule::Busy,
            format!("unmount {}: a process still uses it", path.display()),
        )
        .hint(format!(
            "`fuser -vm {}` names it; --lazy detaches it now and ends it with the last use",
            path.display()
        ))),
        // Busy, or it hangs because its process does not answer: abort it.
        Some(Err(rustix::io::Errno::PERM)) => by_helper(&path, lazy),
        Some(Err(_)) => detach(&path, UnmountFlags::DETACH),
        None => detach(&path, UnmountFlags::DETACH | UnmountFlags::FORCE),
    }
}

/// Detaches a mount of ours whose process died; a live one stays, and is an error. Nothing mounted: nothing
/// to do.
pub fn clear_dead(path: &Path) -> Result<()> {
    let path = absolute(path);
    if !is_mounted(&path) {
        return Ok(());
    }
    // The kernel ends the connection with the process, so a dead mount answers at once; a living one may take
    // its time.
    let (tx, rx) = std::sync::mpsc::channel();
    let asked = path.clone();
    std::thread::spawn(move || {
        // Not its attributes: the kernel may have those cached.
        let _ = tx.send(rustix::fs::statfs(&asked)); // the caller may be gone
    });
    let dead = matches!(rx.recv_timeout(PATIENCE), Ok(Err(rustix::io::Errno::NOTCONN)));
    if !dead {
        let error = Error::exists(format!("the mount at {} is alive, or does not answer", path.display()));
        let hint = format!("`weir unmount {}` detaches it; --lazy even while it is in use", path.display());
        return Err(error.hint(hint));
    }
    tracing::info!("the process of the mount at {} is dead: cleaning the mount up", path.display());
    unmount(&path, true)
}

/// An ordinary unmount, abandoned after [`PATIENCE`]: `None`. Its thread then ends with the connection.
fn in_time(path: &Path) -> Option<rustix::io::Result<()>> {
    let (tx, rx) = std::sync::mpsc::channel();
    let path = path.to_path_buf();
    std::thread::spawn(move || {
        let _ = tx.send(rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW)); // the caller may be gone
    });
    rx.recv_timeout(PATIENCE).ok()
}

fn detach(path: &Path, flags: UnmountFlags) -> Result<()> {
    rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW)
        .doing(format_args!("unmount {}", path.display()))
}

fn helper() -> Option<&'static str> {
    let works = |name: &&str| {
        let probe = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        probe.is_ok()
    };
    ["fusermount3", "fusermount"].into_iter().find(works)
}

/// Without root only the set-uid helper may unmount.
fn by_helper(path: &Path, lazy: bool) -> Result<()> {
    let missing = || Error::unsupported("fusermount3 is missing").hint("install the package fuse3");
    let mut command = Command::new(helper().ok_or_else(missing)?);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(path);
    let output = command.output().doing("run fusermount3")?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_string();
    Err(Error::denied(format!("unmount {}: {text}", path.display()))
        .hint("only its owner and root may unmount; --lazy unmounts while it is in use"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_no_mount_is_reported_so() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_mounted(dir.path()));
        assert!(unmount(dir.path(), false).unwrap_err().to_string().contains("nothing is mounted"));
    }
}
