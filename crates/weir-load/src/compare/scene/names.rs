//! Rows of names: empty and small files that are created, listed, found, read and removed.
use super::data::WARM_LONG_ENOUGH;
use super::{Made, Measured, SMALL_BYTES, Scene};
use crate::failure::failed;
use crate::work::touched;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use weir_proto::Result;

impl<'a> Scene<'a> {
    /// The root of all files that are found and removed.
    fn tree(&self) -> PathBuf {
        self.root.path().join("tree")
    }
    /// Our own directory plus this makes a path five directories below the one that is compared.
    pub(super) fn names(&self) -> PathBuf {
        self.tree().join("a/b/names")
    }
    pub(super) fn small(&self) -> PathBuf {
        self.tree().join("a/b/small")
    }
    fn paths(dir: &Path, count: u64) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(dir).map_err(|e| failed("make the directory", dir, &e))?;
        Ok((0..count).map(|n| dir.join(format!("file-{n:08}"))).collect())
    }

    /// Performs an operation on each path, and returns the total time.
    fn each(
        &self,
        doing: &'static str,
        paths: &[PathBuf],
        act: impl Fn(u64, &Path) -> io::Result<()>,
    ) -> Result<Measured> {
        let start = Instant::now();
        for (n, path) in (0..).zip(paths) {
            self.stop.check()?;
            act(n, path).map_err(|e| failed(doing, path, &e))?;
        }
        Ok(Measured::since(paths.len() as u64, start))
    }

    pub(super) fn create(&mut self) -> Result<Measured> {
        let dir = self.names();
        if self.made.names {
            fs::remove_dir_all(&dir).map_err(|e| failed("remove", &dir, &e))?;
        }
        let paths = Self::paths(&dir, self.options.files)?;
        let made = self.each("create", &paths, |_, path| {
            OpenOptions::new().write(true).create_new(true).open(path).map(drop)
        })?;
        (self.made.names, self.made.listed) = (true, false);
        Ok(made)
    }

    pub(super) fn small_write(&mut self) -> Result<Measured> {
        let dir = self.small();
        if self.made.small {
            fs::remove_dir_all(&dir).map_err(|e| failed("remove", &dir, &e))?;
        }
        let paths = Self::paths(&dir, self.options.ops)?;
        let mut filled = touched(SMALL_BYTES as usize);
        self.pattern.fill(0, 0, &mut filled);
        let buf = std::cell::RefCell::new(filled);
        let written = self.each("write", &paths, |n, path| {
            let mut buf = buf.borrow_mut();
            self.pattern.write_headers(n, 0, &mut buf);
            write_new(path, &buf, false)
        })?;
        self.made.small = true;
        Ok(written)
    }

    fn needs_small(&mut self) -> Result<Vec<PathBuf>> {
        if !self.made.small {
            self.small_write()?;
        }
        Self::paths(&self.small(), self.options.ops)
    }

    pub(super) fn small_stat(&mut self) -> Result<Measured> {
        let paths = self.needs_small()?;
        let stat = || self.each("stat", &paths, |_, path| Ok(rustix::fs::stat(path).map(drop)?));
        stat()?;
        let (mut count, start) = (0, Instant::now());
        while start.elapsed() < WARM_LONG_ENOUGH {
            count += stat()?.count;
        }
        Ok(Measured::since(count, start))
    }

    pub(super) fn small_read(&mut self) -> Result<Measured> {
        let paths: Vec<PathBuf> = self.needs_small()?.iter().map(|path| self.cold(path)).collect();
        for path in &paths {
            let file = File::open(path).map_err(|e| failed("open", path, &e))?;
            self.drop_pages(&file, SMALL_BYTES);
        }
        let mut buf = touched(SMALL_BYTES as usize + 1); // one more byte: a longer file is detected
        let start = Instant::now();
        for (n, path) in (0..).zip(&paths) {
            self.stop.check()?;
            let read = File::open(path).and_then(|file| file.read_at(&mut buf, 0));
            let len = read.map_err(|e| failed("read", path, &e))?;
            if len as u64 != SMALL_BYTES {
                self.note_bad(|| format!("{} has {len} bytes", path.display()));
            }
            self.compare(path, n, 0, &buf[..len]);
        }
        Ok(Measured::since(paths.len() as u64, start))
    }

    /// The system calls of `ls -l` (coreutils 9): for each entry lstat and two extended attributes, which
    /// rarely exist.
    pub(super) fn ls(&mut self, again: bool) -> Result<Measured> {
        if !self.made.names || !again && self.made.listed {
            self.create()?;
        }
        let (dir, files) = (self.names(), self.options.files);
        if again && !self.made.listed {
            self.list(&dir)?;
        }
        let listed = self.list(&dir)?;
        self.made.listed = true;
        if listed.count != files {
            let found = listed.count;
            self.note_bad(|| format!("{} lists {found} files; {files} were made", dir.display()));
        }
        Ok(listed)
    }

    fn list(&self, dir: &Path) -> Result<Measured> {
        let io = |e: io::Error| failed("list", dir, &e);
        let mut value = [0u8; 256];
        let (mut count, start) = (0, Instant::now());
        for entry in fs::read_dir(dir).map_err(io)? {
            self.stop.check()?;
            let path = entry.map_err(io)?.path();
            rustix::fs::lstat(&path).map_err(|e| failed("stat", &path, &e.into()))?;
            // Absent or not supported: `ls` ignores both.
            let _ = rustix::fs::lgetxattr(&path, "security.selinux", &mut value[..]);
            let _ = rustix::fs::getxattr(&path, "system.posix_acl_access", &mut value[..0]);
            count += 1;
        }
        Ok(Measured::since(count, start))
    }

    fn needs_names(&mut self) -> Result<()> {
        if !self.made.names {
            self.create()?;
        }
        Ok(())
    }

    /// Number of entries below the tree, without itself.
    fn entries(&self) -> u64 {
        let small = if self.made.small { 1 + self.options.ops } else { 0 };
        3 + self.options.files + small // a, b, names
    }

    pub(super) fn find(&mut self) -> Result<Measured> {
        self.needs_names()?;
        let tree = self.tree();
        let start = Instant::now();
        let top = open_dir(CWD, &tree).map_err(|e| failed("open", &tree, &e))?;
        let count = self.walk(&top).map_err(|e| failed("find in", &tree, &e))?;
        let measured = Measured::since(count, start);
        self.stop.check()?;
        if count != self.entries() {
            let there = self.entries();
            self.note_bad(|| format!("{} has {there} entries, {count} were found", tree.display()));
        }
        Ok(measured)
    }

    fn walk(&self, dir: impl AsFd) -> io::Result<u64> {
        let mut count = 0;
        let mut below = Vec::new();
        for entry in rustix::fs::Dir::read_from(&dir)? {
            if self.stop.is_set() {
                break;
            }
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            count += 1;
            if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
                below.push(name.to_owned());
            }
        }
        for name in below {
            count += self.walk(open_dir(&dir, name)?)?;
        }
        Ok(count)
    }

    pub(super) fn remove(&mut self) -> Result<Measured> {
        self.needs_names()?;
        let (tree, count) = (self.tree(), self.entries());
        let start = Instant::now();
        fs::remove_dir_all(&tree).map_err(|e| failed("remove", &tree, &e))?;
        let measured = Measured::since(count, start);
        self.made = Made { names: false, listed: false, small: false, ..std::mem::take(&mut self.made) };
        Ok(measured)
    }
}

fn open_dir(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<std::os::fd::OwnedFd> {
    Ok(rustix::fs::openat(at, path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A new file with these bytes.
pub(super) fn write_new(path: &Path, bytes: &[u8], sync: bool) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    if sync { file.sync_all() } else { Ok(()) }
}
