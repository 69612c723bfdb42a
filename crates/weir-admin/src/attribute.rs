//! A mount's answers about a file, the file system and itself, through attributes that it answers itself.
//!
//! An extended attribute needs no socket and no address: the path leads to the right mount.
use crate::failure::{Doing, Failure, Outcome};
use serde_json::Value;
use std::path::Path;
use weir_proto::Error;

/// Attribute names that every mount of Weir answers with JSON.
pub const STAT: &str = "weir.stat";
pub const LAYOUT: &str = "weir.layout";
/// Holders of locks, and waiters.
pub const LOCKS: &str = "weir.locks";
/// Counters of the mount's client.
pub const CLIENT: &str = "weir.client";
/// The directory of snapshots in that of a volume.
pub const SNAPSHOTS: &str = ".snapshots";
/// The socket on which the mount serves this machine's users.
pub const SOCKET: &str = "weir.socket";
/// The tiering state of a file.
pub const STATE: &str = "weir.state";
/// A volume's snapshots, and where its backups are.
pub const SNAPSHOT: &str = "weir.snapshot";

fn is_in_snapshot(path: &Path) -> bool {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.components().any(|part| part.as_os_str() == SNAPSHOTS)
}

/// The mount's answer for a path.
pub fn ask(path: &Path, attribute: &str) -> Outcome<Value> {
    let mut buffer = vec![0u8; 1 << 16];
    let n = match rustix::fs::lgetxattr(path, attribute, &mut buffer[..]) {
        Ok(n) => n,
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NODATA) if is_in_snapshot(path) => {
            return Err(Failure::new(
                Error::unsupported(format!(
                    "{} is in a snapshot, which has no such information",
                    path.display()
                )),
                "name the file in its directory of today",
            ));
        }
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NODATA) => {
            return Err(Failure::new(
                Error::invalid(format!("{} is not on a Weir file system", path.display())),
                "name a file below a mount of `weir up --mount PATH` or `weir mount`",
            ));
        }
        Err(e) => return Err(e).doing(format_args!("stat {}", path.display())),
    };
    serde_json::from_slice(&buffer[..n])
        .map_err(|e| Error::damaged(format!("the mount's answer about {}: {e}", path.display())).into())
}
