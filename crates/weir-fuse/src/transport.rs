//! The ways that requests come from the kernel: the classic device, or rings of io_uring in addition.
//!
//! Invariant: a mount that requires a ring has one, or fails; one that uses any way reports which one and how
//! to get the other.
use crate::filesystem::Mounted;
use crate::kernel::Notices;
use crate::request_bytes::request_bytes;
use crate::ring::Rings;
use fuser::{BackgroundSession, Config, Session};
use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;
use weir_proto::{Error, Result};

/// The kernel's switch; off by default, and only root changes it.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const SWITCH_ON: &str = "`echo 1 > /sys/module/fuse/parameters/enable_uring`, or fuse.enable_uring=1 at boot, \
                         and mount again (Linux 6.14 and newer)";
/// Rings are accepted at once. A machine that is this slow does not serve a mount.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// With rings, the device brings forgets and interrupts only.
const DEVICE_THREADS: usize = 1;

/// How requests come from the kernel.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Transport {
    /// By io_uring where the kernel offers it.
    Auto,
    /// By reading `/dev/fuse`.
    #[default]
    Dev,
    /// By io_uring, or not at all.
    Uring,
}

impl FromStr for Transport {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Transport, String> {
        match text {
            "auto" => Ok(Transport::Auto),
            "dev" => Ok(Transport::Dev),
            "uring" => Ok(Transport::Uring),
            _ => Err(format!("{text:?} is not auto, dev or uring")),
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Auto => "auto",
            Transport::Dev => "dev",
            Transport::Uring => "uring",
        })
    }
}

/// The reason why there is no ring.
enum NoRing {
    /// The kernel, or the sandbox of this process, does not allow it.
    Refused(Error),
    /// The mount itself failed.
    NoMount(io::Error),
}

/// Mounts, and begins to accept requests. `mounted(true)` is for a mount with rings.
pub fn open(
    transport: Transport,
    path: &Path,
    config: Config,
    notices: &Notices,
    mounted: impl Fn(bool) -> Mounted,
) -> Result<BackgroundSession> {
    let tried = match transport {
        Transport::Dev => None,
        Transport::Auto | Transport::Uring => Some(with_rings(path, &config, notices, &mounted)),
    };
    match tried {
        Some(Ok(session)) => {
            tracing::info!("requests come by io_uring; --transport dev takes /dev/fuse instead");
            return Ok(session);
        }
        Some(Err(NoRing::NoMount(e))) => return Err(cannot_mount(path, &e)),
        Some(Err(NoRing::Refused(e))) if transport == Transport::Uring => return Err(e),
        Some(Err(NoRing::Refused(e))) => tracing::info!("requests come by /dev/fuse: {e}"),
        None => tracing::info!("requests come by /dev/fuse, as asked for"),
    }
    let session = Session::new(mounted(false), path, &config).map_err(|e| cannot_mount(path, &e))?;
    notices.mounted(session.notifier());
    session.spawn().map_err(|e| Error::from_io("start the mount's threads", &e))
}

fn cannot_mount(path: &Path, e: &io::Error) -> Error {
    let error = Error::from_io(format_args!("mount at {}", path.display()), e);
    let hint = match e.kind() {
        io::ErrorKind::PermissionDenied => {
            "run as root, or add user_allow_other to /etc/fuse.conf, or set allow_other = false"
        }
        _ => "is the package fuse3 installed, and the directory free?",
    };
    error.hint(hint)
}

/// The obstacle to the use of io_uring, and its remedy.
fn refused(doing: &str, e: &io::Error) -> NoRing {
    let hint = match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "`sysctl kernel.io_uring_disabled` has to be 0 (or 1 for root), and a container has to allow io_uring"
        }
        Some(libc::ENOSYS) => "the kernel has no io_uring: --transport dev",
        Some(libc::ENOMEM) => "raise the limits of memory (cgroup, `ulimit -l`), or take --transport dev",
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (`ulimit -n`)",
        Some(libc::EINVAL) => "the kernel is older than this needs: --transport dev",
        _ => "--transport dev does without",
    };
    NoRing::Refused(Error::from_io(doing, e).hint(hint))
}

fn unsupported() -> NoRing {
    NoRing::Refused(
        Error::unsupported("the kernel offers no FUSE over io_uring")
            .hint(format!("switch it on: {SWITCH_ON}")),
    )
}

/// All steps that can fail come before the answer to INIT: from then on the kernel waits for the rings.
fn with_rings(
    path: &Path,
    config: &Config,
    notices: &Notices,
    mounted: &impl Fn(bool) -> Mounted,
) -> std::result::Result<BackgroundSession, NoRing> {
    // If the switch cannot be read, the kernel's first request shows it.
    let switch = std::fs::read_to_string(SWITCH);
    if switch.is_ok_and(|text| text.trim() == "N") {
        return Err(unsupported());
    }
    let rings = Rings::new(request_bytes() as usize).map_err(|e| refused("make an io_uring", &e))?;
    let mut config = config.clone();
    config.n_threads = Some(DEVICE_THREADS);
    let session = Session::new(mounted(true), path, &config).map_err(|e| match e.kind() {
        io::ErrorKind::Unsupported => unsupported(),
        _ => NoRing::NoMount(e),
    })?;
    notices.mounted(session.notifier());
    let (transports, started) = rings.split();
    let session = session.spawn_with(Some(transports)).map_err(NoRing::NoMount)?;
    if let Err(e) = started.wait(START_PATIENCE) {
        let refused = refused("register the rings of FUSE", &e);
        return match session.umount_and_join() {
            // The error of the rings again.
            Err(ended) if ended.kind() != e.kind() => Err(NoRing::NoMount(ended)),
            _ => Err(refused),
        };
    }
    Ok(session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_is_written_as_it_is_read() {
        for transport in [Transport::Auto, Transport::Dev, Transport::Uring] {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        assert_eq!("ring".parse::<Transport>(), Err("\"ring\" is not auto, dev or uring".into()));
    }
}
