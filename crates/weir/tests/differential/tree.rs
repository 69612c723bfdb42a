//! Everything below a directory as text, one line per entry, and where two such lists differ.
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Names, kinds, owners, modes, links, sizes, contents, attributes; not times and not the sizes of
/// directories.
pub fn describe(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    walk(root, Path::new(""), &mut lines);
    lines
}

fn walk(root: &Path, at: &Path, lines: &mut Vec<String>) {
    let path = root.join(at);
    let meta = fs::symlink_metadata(&path).unwrap();
    let size = if meta.is_dir() { 0 } else { meta.len() };
    let content = if meta.is_file() {
        fnv(&fs::read(&path).unwrap())
    } else if meta.is_symlink() {
        fnv(fs::read_link(&path).unwrap().as_os_str().as_bytes())
    } else {
        0
    };
    lines.push(format!(
        "{} mode {:o} owner {}:{} links {} size {size} content {content:x} attributes {:?}",
        at.display(),
        meta.mode(),
        meta.uid(),
        meta.gid(),
        meta.nlink(),
        attributes(&path),
    ));
    if meta.is_dir() {
        let mut names: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        for name in names {
            walk(root, &at.join(name), lines);
        }
    }
}

/// Extended attributes of a path, sorted, as text.
pub fn attributes(path: &Path) -> Vec<String> {
    let mut list = vec![0; 65536];
    let n = rustix::fs::llistxattr(path, &mut list[..]).unwrap_or(0);
    let mut all: Vec<String> = list[..n]
        .split(|b| *b == 0)
        .filter(|name| !name.is_empty() && !name.starts_with(b"security.selinux"))
        .map(|name| {
            let name = std::ffi::OsStr::from_bytes(name);
            let mut value = vec![0; 65536];
            let n = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap_or(0);
            format!("{}={:x}", name.display(), fnv(&value[..n]))
        })
        .collect();
    all.sort();
    all
}

pub fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

pub fn compare(ours: &[String], theirs: &[String]) -> Result<(), String> {
    if ours == theirs {
        return Ok(());
    }
    let only = |a: &[String], b: &[String]| {
        a.iter().filter(|l| !b.contains(l)).cloned().collect::<Vec<_>>().join("\n    ")
    };
    Err(format!("\n  mount only:\n    {}\n  local only:\n    {}", only(ours, theirs), only(theirs, ours)))
}
