//! Files of the machine: positional system calls, direct if requested and possible.

use crate::{DirEntry, Disk, File, IO_ALIGN, OpenMode, Space, disk::check_direct};
use rustix::{
    fs::{FallocateFlags, FlockOperation, Mode, OFlags},
    io::Errno,
};
use std::{fs, io, io::IoSlice, os::fd::OwnedFd, path::Path, sync::Arc};

/// Linux takes at most this many parts in one vectored write.
const PARTS_MAX: usize = 1024;

pub(super) struct MachineDisk;

struct MachineFile {
    fd: OwnedFd,
    /// Requests must be aligned (even if the file system refused direct I/O: the caller's code is the same).
    direct: bool,
}

impl Disk for MachineDisk {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn File>> {
        let flags = open_flags(mode);
        let fd = match open(path, flags) {
            Err(Errno::INVAL) if mode.direct => open(path, flags - OFlags::DIRECT)?,
            opened => opened?,
        };
        Ok(Arc::new(MachineFile { fd, direct: mode.direct }))
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }
    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            entries.push(DirEntry { name, is_dir: entry.file_type()?.is_dir() });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        // A relative name without a directory has the parent "".
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let dir = open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        Ok(rustix::fs::fsync(dir)?)
    }
    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }
    fn space(&self, path: &Path) -> io::Result<Space> {
        let fs = rustix::fs::statvfs(path)?;
        Ok(Space { total: fs.f_blocks * fs.f_frsize, free: fs.f_bavail * fs.f_frsize })
    }
    fn file_system(&self, path: &Path) -> io::Result<u64> {
        Ok(rustix::fs::stat(path)?.st_dev)
    }
}

impl File for MachineFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.check(buf, offset)?;
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::pread(&self.fd, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
            if self.direct && !done.is_multiple_of(IO_ALIGN) {
                break; // a direct read is short only at the end of the file
            }
        }
        Ok(done)
    }
    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.check(data, offset)?;
        let mut done = 0;
        while done < data.len() {
            match rustix::io::pwrite(&self.fd, &data[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
    fn write_all_vectored_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        for part in parts {
            self.check(part, offset)?;
        }
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|p| IoSlice::new(p)).collect();
        let mut left = &mut slices[..];
        let mut at = offset;
        IoSlice::advance_slices(&mut left, 0); // drops empty parts at the front
        while !left.is_empty() {
            match rustix::io::pwritev(&self.fd, &left[..left.len().min(PARTS_MAX)], at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    at += n as u64;
                    IoSlice::advance_slices(&mut left, n);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        // Not retried, not even after EINTR-like errors: after a failed sync the state of the disk is
        // unknown.
        Ok(rustix::fs::fdatasync(&self.fd)?)
    }
    fn len(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_size as u64)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(retry(|| rustix::fs::ftruncate(&self.fd, len))?)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        Ok(retry(|| rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), offset, len))?)
    }
    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(retry(|| rustix::fs::fallocate(&self.fd, flags, offset, len))?)
    }
    fn try_lock(&self) -> io::Result<()> {
        Ok(retry(|| rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive))?)
    }
}

impl MachineFile {
    fn check(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.direct { check_direct(bytes, offset) } else { Ok(()) }
    }
}

fn open_flags(mode: OpenMode) -> OFlags {
    let mut flags = OFlags::CLOEXEC | if mode.write { OFlags::RDWR } else { OFlags::RDONLY };
    for (asked, flag) in [
        (mode.create, OFlags::CREATE),
        (mode.create && mode.exclusive, OFlags::EXCL),
        (mode.truncate, OFlags::TRUNC),
        (mode.direct, OFlags::DIRECT),
    ] {
        if asked {
            flags |= flag;
        }
    }
    flags
}

fn open(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    retry(|| rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}
