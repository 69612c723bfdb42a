//! The identity file of a directory: lines `key = "value"`, the last one a checksum of the others.
use std::path::Path;
use weir_env::Disk;
use weir_proto::checksum::crc32c;
use weir_proto::{Error, ErrorKind, Result};

const FORMAT: u32 = 1;

/// The lines of a file with a valid checksum.
pub struct Lines(String);

/// `comment` describes the directory.
pub fn write(comment: &str, values: &[(&str, &str)]) -> String {
    let lines: String = values.iter().map(|(key, value)| format!("{key} = \"{value}\"\n")).collect();
    let body = format!("# {comment} Do not edit, copy or remove this file.\nformat = {FORMAT}\n{lines}");
    format!("{body}crc32c = \"{:08x}\"\n", crc32c(body.as_bytes()))
}

pub fn read(bytes: &[u8]) -> Result<Lines> {
    let text = std::str::from_utf8(bytes).map_err(|_| damaged("it is not text"))?;
    let at = text.rfind("crc32c = ").ok_or_else(|| damaged("it has no checksum"))?;
    let (body, last) = text.split_at(at);
    let format = find(body, "format").ok_or_else(|| damaged("it has no format"))?;
    if format != FORMAT.to_string() {
        return Err(Error::unsupported(format!("format {format}, this program knows {FORMAT}")));
    }
    if find(last, "crc32c") != Some(&format!("{:08x}", crc32c(body.as_bytes()))) {
        return Err(damaged("it fails its checksum"));
    }
    Ok(Lines(body.to_owned()))
}

impl Lines {
    pub fn value(&self, key: &str) -> Result<&str> {
        find(&self.0, key).ok_or_else(|| damaged(format!("it has no {key}")))
    }
    pub fn id<T: std::str::FromStr<Err = String>>(&self, key: &str) -> Result<T> {
        self.value(key)?.parse().map_err(Error::damaged)
    }
    pub fn id_if_any<T: std::str::FromStr<Err = String>>(&self, key: &str) -> Result<Option<T>> {
        find(&self.0, key).map(|_| self.id(key)).transpose()
    }
}

/// The file's bytes, if it exists.
pub fn bytes(disk: &dyn Disk, path: &Path) -> Result<Option<Vec<u8>>> {
    if !disk.exists(path) {
        return Ok(None);
    }
    disk.read(path).map(Some).map_err(|e| Error::from_io(format!("read {}", path.display()), &e))
}

/// Makes the directory; `Exists` if it holds anything that a new one may not.
pub fn make_vacant(disk: &dyn Disk, dir: &Path, may_hold: &[&str]) -> Result<()> {
    disk.create_dir_durable(dir).map_err(|e| Error::from_io(format!("create {}", dir.display()), &e))?;
    let entries = disk.read_dir(dir).map_err(|e| Error::from_io(format!("list {}", dir.display()), &e))?;
    let is_expected = |name: &str| name == "lost+found" || name.ends_with(".tmp") || may_hold.contains(&name);
    match entries.iter().find(|e| !is_expected(&e.name)) {
        None => Ok(()),
        Some(other) => {
            Err(Error::exists(format!("{} is not empty (it holds {:?})", dir.display(), other.name))
                .hint("name an empty directory"))
        }
    }
}

/// Adds a hint to an error about damage of the file.
pub fn if_damaged(e: Error, hint: &'static str) -> Error {
    if e.kind == ErrorKind::Damaged { e.hint(hint) } else { e }
}

pub fn store(disk: &dyn Disk, path: &Path, text: &str) -> Result<()> {
    disk.write_atomic(path, text.as_bytes())
        .map_err(|e| Error::from_io(format!("write {}", path.display()), &e))
}

fn find<'t>(lines: &'t str, key: &str) -> Option<&'t str> {
    let value = lines.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(" = "))?;
    Some(value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value))
}

fn damaged(what: impl std::fmt::Display) -> Error {
    Error::damaged(what.to_string())
}
