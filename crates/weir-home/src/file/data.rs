//! Bytes of files in a home directory: appended in order to the growing file, read back and checked.
//!
//! Invariant: at most `DIRTY_BYTES_MAX` per file are in the machine's memory and not being written to home,
//! and synced bytes are dropped from memory: one long file does not fill a mover's page cache.
use super::{
    directory::Directory,
    fault,
    place::{fingerprint_of, set_open, statx_fd},
    root::Root,
};
use crate::{Attrs, Expect, Fault, Fingerprint, HomeLane, HomePath, HomeReader, HomeWriter, Outcome};
use bytes::Bytes;
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Advice, FallocateFlags, OFlags, SeekFrom},
    io::Errno,
};
use std::{
    io::IoSlice,
    num::NonZeroU64,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use weir_env::{BoxFuture, BufferPool};
use weir_proto::{Error, MIB, meta::FileKind};

/// Written and not synced, per open file. Two of the largest extents: one is being written while the next one
/// arrives.
const DIRTY_BYTES_MAX: u64 = 64 * MIB;
/// Linux takes at most this many parts in one vectored write.
const PARTS_MAX: usize = 1024;
/// One buffer of an answer: the largest class that the pool keeps.
const READ_BYTES_MAX: usize = 8 << 20;
const ZERO_BYTES: usize = 1 << 20;

pub(super) struct FileWriter {
    lane: HomeLane,
    open: Arc<OpenFile>,
}

struct OpenFile {
    dir: Arc<Directory>,
    root: Arc<Root>,
    path: HomePath,
    fd: OwnedFd,
    /// Held while the file is written: its calls are serialized.
    state: Mutex<State>,
}

struct State {
    /// The state at the last sync, if no other mover writes the file: it must be unchanged when we continue.
    known: Option<Fingerprint>,
    /// Written since the last sync.
    dirty: Option<Range<u64>>,
    dirty_bytes: u64,
    exclusive: bool,
}

impl FileWriter {
    pub(super) fn open(
        dir: &Arc<Directory>,
        lane: &HomeLane,
        path: &HomePath,
        expect: &Expect,
    ) -> Outcome<FileWriter> {
        let (root, fd, fingerprint) = open_expected(dir, path, expect, OFlags::WRONLY)?;
        let exclusive = matches!(expect, Expect::Unchanged(_));
        let known = exclusive.then_some(fingerprint);
        let state = Mutex::new(State { known, dirty: None, dirty_bytes: 0, exclusive });
        let open = OpenFile { dir: dir.clone(), root, path: path.clone(), fd, state };
        Ok(FileWriter { lane: lane.clone(), open: Arc::new(open) })
    }
}

/// Opens a file of ours, unless it was changed at home.
fn open_expected(
    dir: &Directory,
    path: &HomePath,
    expect: &Expect,
    flags: OFlags,
) -> Outcome<(Arc<Root>, OwnedFd, Fingerprint)> {
    let root = dir.root()?;
    let place = root.place_of(path, expect)?;
    let diverged = |found: Option<&Fingerprint>| Fault::diverged(path, Some(expect.fingerprint()), found);
    let found = place.fingerprint().map_err(|e| fault("open", path, e))?;
    if !found.as_ref().is_some_and(|found| expect.admits(found)) {
        return Err(diverged(found.as_ref()));
    }
    let fd = place.open(flags).map_err(|e| fault("open", path, e))?;
    let opened = fingerprint_of_fd(&fd, path)?; // of the opened file, even if the name has changed since
    if expect.admits(&opened) { Ok((root, fd, opened)) } else { Err(diverged(Some(&opened))) }
}

fn fingerprint_of_fd(fd: impl AsFd, path: &HomePath) -> Outcome<Fingerprint> {
    let stat = statx_fd(fd).map_err(|e| fault("stat", path, e))?;
    fingerprint_of(&stat).ok_or_else(|| fault("stat", path, Errno::INVAL))
}

impl OpenFile {
    fn with_state<T>(&self, work: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut state);
        if let Err(Fault::Unreachable(_)) = done {
            self.dir.forget_root();
        }
        done
    }

    /// Checks that the file was not written since our last sync.
    fn check_known(&self, state: &mut State) -> Outcome<()> {
        let Some(known) = state.known.take() else { return Ok(()) };
        let found = fingerprint_of_fd(&self.fd, &self.path)?;
        if found == known {
            return Ok(());
        }
        let fault = Fault::diverged(&self.path, Some(&known), Some(&found));
        state.known = Some(known); // so that it stays refused
        Err(fault)
    }

    fn write(&self, offset: u64, parts: &[Bytes]) -> Outcome<()> {
        self.with_state(|state| {
            self.check_known(state)?;
            let bytes = write_all(&self.fd, offset, parts).map_err(|e| fault("write", &self.path, e))?;
            let end = offset + bytes;
            // Starts the write to home at once (also the write-back), so that a sync finds little left to do.
            advise_written(&self.fd, offset..end);
            let dirty = state.dirty.get_or_insert(offset..end);
            (dirty.start, dirty.end) = (dirty.start.min(offset), dirty.end.max(end));
            state.dirty_bytes += bytes;
            if state.dirty_bytes >= DIRTY_BYTES_MAX { self.sync_dirty(state) } else { Ok(()) }
        })
    }

    fn sync_dirty(&self, state: &mut State) -> Outcome<()> {
        rustix::fs::fdatasync(&self.fd).map_err(|e| fault("sync", &self.path, e))?;
        if let Some(range) = state.dirty.take() {
            advise_written(&self.fd, range);
        }
        state.dirty_bytes = 0;
        Ok(())
    }

    fn zero(&self, range: &Range<u64>) -> Outcome<()> {
        self.with_state(|state| {
            self.check_known(state)?;
            let failed = |e| fault("make a hole in", &self.path, e);
            let size = fingerprint_of_fd(&self.fd, &self.path)?.size;
            let within = range.start..range.end.min(size);
            if !within.is_empty() {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                match rustix::fs::fallocate(&self.fd, flags, within.start, within.end - within.start) {
                    Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(&self.fd, &within).map_err(failed)?,
                    done => done.map_err(failed)?,
                }
            }
            if size < range.end {
                rustix::fs::ftruncate(&self.fd, range.end).map_err(failed)?;
            }
            Ok(())
        })
    }

    fn sync(&self) -> Outcome<Fingerprint> {
        self.with_state(|state| {
            self.sync_dirty(state)?;
            let fingerprint = fingerprint_of_fd(&self.fd, &self.path)?;
            state.known = state.exclusive.then(|| fingerprint.clone());
            Ok(fingerprint)
        })
    }

    fn finish(&self, size: u64, attrs: &Attrs) -> Outcome<Fingerprint> {
        let attrs = self.dir.ids().to_home(FileKind::Regular, attrs);
        self.with_state(|state| {
            self.check_known(state)?;
            let failed = |e| fault("finish", &self.path, e);
            if fingerprint_of_fd(&self.fd, &self.path)?.size != size {
                rustix::fs::ftruncate(&self.fd, size).map_err(failed)?;
            }
            if !self.root.is_local {
                // An NFS server sets the time when late data arrives: so data first.
                self.sync_dirty(state)?;
            }
            set_open(self.fd.as_fd(), &attrs, &self.root.keeps, &self.path)?;
            rustix::fs::fsync(&self.fd).map_err(failed)?;
            self.sync_dirty(state)?; // only to drop the pages: all data is on the disk
            let fingerprint = fingerprint_of_fd(&self.fd, &self.path)?;
            state.known = state.exclusive.then(|| fingerprint.clone());
            Ok(fingerprint)
        })
    }
}

impl HomeWriter for FileWriter {
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>> {
        let open = self.open.clone();
        Box::pin(async move {
            self.lane.run("write", &[&self.open.path], move || open.write(offset, &parts)).await
        })
    }
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>> {
        let open = self.open.clone();
        Box::pin(
            async move { self.lane.run("make a hole", &[&self.open.path], move || open.zero(&range)).await },
        )
    }
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>> {
        let open = self.open.clone();
        Box::pin(async move { self.lane.run("sync", &[&self.open.path], move || open.sync()).await })
    }
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (open, attrs) = (self.open.clone(), attrs.clone());
        Box::pin(async move {
            self.lane.run("finish", &[&self.open.path], move || open.finish(size, &attrs)).await
        })
    }
}

/// Starts the write-back of the range; drops pages from memory that are on the disk. Advice: the kernel's
/// answer does not matter.
fn advise_written(fd: impl AsFd, range: Range<u64>) {
    if let Some(len) = NonZeroU64::new(range.end - range.start) {
        let _ = rustix::fs::fadvise(fd, range.start, Some(len), Advice::DontNeed);
    }
}

fn write_all(fd: impl AsFd, offset: u64, parts: &[Bytes]) -> rustix::io::Result<u64> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut left = &mut slices[..];
    let mut at = offset;
    IoSlice::advance_slices(&mut left, 0); // drops empty parts at the front
    while !left.is_empty() {
        match rustix::io::pwritev(&fd, &left[..left.len().min(PARTS_MAX)], at) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => {
                at += n as u64;
                IoSlice::advance_slices(&mut left, n);
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
    assert_eq!(at - offset, len, "a write at home ended before all bytes were written, without an error");
    Ok(len)
}

fn write_zeros(fd: impl AsFd, range: &Range<u64>) -> rustix::io::Result<()> {
    static ZEROS: [u8; ZERO_BYTES] = [0; ZERO_BYTES];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(ZERO_BYTES as u64);
        at += write_all(&fd, at, &[Bytes::from_static(&ZEROS[..len as usize])])?;
    }
    Ok(())
}

pub(super) struct FileReader {
    lane: HomeLane,
    open: Arc<OpenToRead>,
}

struct OpenToRead {
    path: HomePath,
    fd: OwnedFd,
    expect: Expect,
    fingerprint: Fingerprint,
    buffers: BufferPool,
}

impl FileReader {
    pub(super) fn open(
        dir: &Arc<Directory>,
        lane: &HomeLane,
        path: &HomePath,
        expect: &Expect,
    ) -> Outcome<FileReader> {
        let (_, fd, fingerprint) = open_expected(dir, path, expect, OFlags::RDONLY)?;
        // It is read once, for a recall: it should neither stay in this machine's memory nor update the
        // access time. Both are advice that home may refuse.
        let _ = rustix::fs::fcntl_setfl(&fd, OFlags::NOATIME);
        let _ = rustix::fs::fadvise(&fd, 0, None, Advice::Sequential);
        let open = Arc::new(OpenToRead {
            path: path.clone(),
            fd,
            expect: expect.clone(),
            fingerprint,
            buffers: dir.buffers().clone(),
        });
        Ok(FileReader { lane: lane.clone(), open })
    }
}

impl OpenToRead {
    fn read(&self, offset: u64, len: usize) -> Outcome<Vec<Bytes>> {
        let mut parts = Vec::with_capacity(len.div_ceil(READ_BYTES_MAX));
        let mut done = 0;
        while done < len {
            let mut buf = self.buffers.get((len - done).min(READ_BYTES_MAX));
            let at = offset + done as u64;
            let n = read_full(&self.fd, &mut buf, at).map_err(|e| fault("read", &self.path, e))?;
            let is_short = n < buf.len();
            buf.truncate(n);
            done += n;
            if n > 0 {
                parts.push(buf.freeze());
            }
            if is_short {
                break;
            }
        }
        let found = fingerprint_of_fd(&self.fd, &self.path)?;
        if !self.expect.admits(&found) {
            return Err(Fault::diverged(&self.path, Some(self.expect.fingerprint()), Some(&found)));
        }
        let wanted = found.size.saturating_sub(offset).min(len as u64);
        if (done as u64) < wanted {
            return Err(Fault::Unreachable(Error::io(format!(
                "read {}: home gave {done} bytes at {offset} where {wanted} are; it is tried again",
                self.path
            ))));
        }
        Ok(parts)
    }

    fn data_from(&self, offset: u64) -> Outcome<Option<Range<u64>>> {
        let failed = |e| fault("find holes in", &self.path, e);
        let start = match rustix::fs::seek(&self.fd, SeekFrom::Data(offset)) {
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL) => {
                return Ok((offset < self.fingerprint.size).then_some(offset..self.fingerprint.size)); // holes unknown
            }
            start => start.map_err(failed)?,
        };
        let end = rustix::fs::seek(&self.fd, SeekFrom::Hole(start)).map_err(failed)?;
        Ok(Some(start..end))
    }
}

fn read_full(fd: impl AsFd, buf: &mut [u8], offset: u64) -> rustix::io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match rustix::io::pread(&fd, &mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

impl HomeReader for FileReader {
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>> {
        let open = self.open.clone();
        Box::pin(
            async move { self.lane.run("read", &[&self.open.path], move || open.read(offset, len)).await },
        )
    }
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>> {
        let open = self.open.clone();
        Box::pin(async move {
            self.lane.run("find holes", &[&self.open.path], move || open.data_from(offset)).await
        })
    }
    fn fingerprint(&self) -> &Fingerprint {
        &self.open.fingerprint
    }
}
