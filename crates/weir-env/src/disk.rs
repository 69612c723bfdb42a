//! Files and directories, as blocking calls: short ones run in place, long ones through
//! [`crate::Tasks::blocking`].
use std::{io, path::Path, sync::Arc};

/// Options for opening a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenMode {
    pub write: bool,
    /// Create if absent.
    pub create: bool,
    /// Fail if present (with `create`).
    pub exclusive: bool,
    pub truncate: bool,
    /// Bypass the page cache where the file system can. Then buffers, offsets and lengths are multiples of
    /// [`crate::IO_ALIGN`]; the file falls back to buffered I/O where direct I/O is refused (tmpfs).
    pub direct: bool,
}

impl OpenMode {
    pub const READ: OpenMode =
        OpenMode { write: false, create: false, exclusive: false, truncate: false, direct: false };
    pub const WRITE: OpenMode = OpenMode { write: true, create: true, ..OpenMode::READ };
    pub const CREATE_NEW: OpenMode = OpenMode { exclusive: true, ..OpenMode::WRITE };
    pub fn direct(self) -> OpenMode {
        OpenMode { direct: true, ..self }
    }
}

/// Space of the file system that holds a path, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    pub total: u64,
    pub free: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    pub name: String,
    pub is_dir: bool,
}

/// An open file. All calls are positional and may be made from many threads in parallel.
pub trait File: Send + Sync + 'static {
    /// Returns the bytes read; fewer than requested only at the end of the file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Writes the parts one after the other from `offset`, in one system call if possible.
    fn write_all_vectored_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()>;
    /// Makes earlier writes durable (data, and the size if it changed).
    fn sync_data(&self) -> io::Result<()>;
    fn len(&self) -> io::Result<u64>;
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reserves space for `offset..offset + len`; the bytes read as zeros; extends the file.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Returns the space of `offset..offset + len` to the file system; the bytes read as zeros.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.read_at(buf, offset)? {
            n if n == buf.len() => Ok(()),
            n => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("wanted {} bytes at {offset}, the file ends after {n}", buf.len()),
            )),
        }
    }
    /// Takes the file's exclusive advisory lock until it is dropped; `WouldBlock` when another process holds
    /// it.
    fn try_lock(&self) -> io::Result<()>;
}

/// The file systems of a node.
pub trait Disk: Send + Sync + 'static {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>>;
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Sorted by name.
    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Makes names created, renamed and removed in `path` durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    fn exists(&self, path: &Path) -> bool;
    fn space(&self, path: &Path) -> io::Result<Space>;
    /// The number of the path's file system while it is mounted: paths with one number share its space.
    fn file_system(&self, path: &Path) -> io::Result<u64>;
    /// Makes a directory whose name survives a power cut, and the missing ones above it.
    fn create_dir_durable(&self, path: &Path) -> io::Result<()> {
        let mut parents = Vec::new();
        for parent in path.ancestors().skip(1) {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            parents.push(parent);
            if self.exists(parent) {
                break;
            }
        }
        self.create_dir_all(path)?;
        parents.into_iter().try_for_each(|parent| self.sync_dir(parent))
    }
    /// The whole of a small file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = self.open(path, OpenMode::READ)?;
        let mut bytes = vec![0; usize::try_from(file.len()?).map_err(io::Error::other)?];
        let n = file.read_at(&mut bytes, 0)?;
        bytes.truncate(n);
        Ok(bytes)
    }
    /// Replaces a small file atomically and durably: temporary file, sync, rename, sync of the directory.
    fn write_atomic(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let tmp = path.with_extension("tmp");
        let file = self.open(&tmp, OpenMode { truncate: true, ..OpenMode::WRITE })?;
        file.write_all_at(bytes, 0)?;
        file.sync_data()?;
        self.rename(&tmp, path)?;
        self.sync_dir(path.parent().unwrap_or(Path::new("/")))
    }
}

/// Refuses unaligned direct I/O: memory, offset and length must be multiples of [`crate::IO_ALIGN`].
pub(crate) fn check_direct(bytes: &[u8], offset: u64) -> io::Result<()> {
    let align = crate::IO_ALIGN;
    let aligned = (bytes.as_ptr() as usize).is_multiple_of(align)
        && bytes.len().is_multiple_of(align)
        && offset.is_multiple_of(align as u64);
    if aligned {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!(
            "{} bytes from memory {:?} at offset {offset}: a file opened direct wants multiples of {align}",
            bytes.len(),
            bytes.as_ptr()
        ),
    ))
}
