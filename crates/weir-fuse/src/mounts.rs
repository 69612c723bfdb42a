//! The kernel's list of mounts. It is asked instead of a file system itself, which may hang.
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The type of our mounts in `/proc/mounts` and fstab.
const MOUNT_TYPE: &str = "fuse.weir";

/// Whether something is mounted exactly there.
pub fn is_mounted(path: &Path) -> bool {
    let path = absolute(path);
    mounts().iter().any(|m| m.path == path)
}

/// Whether the mount at a path is ours.
pub fn is_ours(path: &Path) -> bool {
    at(path).is_some_and(|m| m.kind == MOUNT_TYPE)
}

/// Where Weir is mounted on this machine.
pub fn mount_points() -> Vec<PathBuf> {
    let ours = mounts().into_iter().filter(|m| m.kind == MOUNT_TYPE);
    let mut paths: Vec<PathBuf> = ours.map(|m| m.path).collect();
    paths.sort();
    paths.dedup();
    paths
}

/// The kernel's number of the device of a mount.
pub fn device_of(path: &Path) -> Option<String> {
    at(path).map(|m| m.device)
}

/// Whether reads at a mount change access times.
pub fn keeps_access_times(path: &Path) -> bool {
    at(path).is_none_or(|m| !m.options.split(',').any(|o| matches!(o, "noatime" | "ro")))
}

/// The path with its last directory resolved but not entered: entering would ask a daemon that may be dead.
pub fn absolute(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            fs::canonicalize(parent).map_or_else(|_| absolute.clone(), |parent| parent.join(name))
        }
        _ => absolute,
    }
}

struct Listed {
    device: String,
    path: PathBuf,
    /// The mount's options: `rw,noatime,…`.
    options: String,
    kind: String,
}

fn mounts() -> Vec<Listed> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    text.split(|b| *b == b'\n').filter_map(listed).collect()
}

/// The last mount at a path, which hides earlier ones.
fn at(path: &Path) -> Option<Listed> {
    mounts().into_iter().rev().find(|m| m.path == path)
}

/// `36 35 0:44 / /mnt rw,… - fuse.weir weir …`, spaces in paths as `\040`.
fn listed(line: &[u8]) -> Option<Listed> {
    let mut fields = line.split(|b| *b == b' ');
    let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
    let path = unescape(fields.nth(1)?);
    let options = String::from_utf8_lossy(fields.next()?).into_owned();
    let mut fields = fields.skip_while(|f| *f != b"-").skip(1);
    Some(Listed {
        device,
        path: PathBuf::from(std::ffi::OsStr::from_bytes(&path)),
        options,
        kind: fields.next().map(|f| String::from_utf8_lossy(f).into_owned())?,
    })
}

fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let value =
            octal.and_then(|d| std::str::from_utf8(d).ok()).and_then(|d| u8::from_str_radix(d, 8).ok());
        match value {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_is_read_with_its_escapes() {
        let line = br"36 35 0:44 / /mnt/a\040b\134 rw,nosuid shared:1 - fuse.weir weir rw,user_id=0";
        let found = listed(line).unwrap();
        assert_eq!((found.device.as_str(), found.kind.as_str()), ("0:44", "fuse.weir"));
        assert_eq!(found.path, PathBuf::from(r"/mnt/a b\"));
        assert_eq!(found.options, "rw,nosuid");
        assert!(listed(b"").is_none());
    }
}
