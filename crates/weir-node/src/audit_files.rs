//! The files of an audit log: the current one, and older ones up to a number.
//!
//! Invariant: acknowledged records are durable and form one chain, over files and starts. Leftovers of a
//! failed write or a power cut after them are removed before the next write. Knows nothing of the records'
//! content.
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weir_env::{Disk, File, OpenMode};
use weir_trust::audit::{Head, Record, resume, seal};

/// The file that is appended to; older ones are `audit-NUMBER.jsonl`, by the number of their last record.
const CURRENT: &str = "audit.jsonl";
/// A larger file is rotated. With some hundred bytes a record, a hundred thousand of them.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Older files that are kept.
const OLD_FILES_MAX: usize = 10;
/// Bytes read at a file's end to find its last lines; more is read if they contain no complete line.
const TAIL_BYTES: u64 = 256 << 10;

/// The files of the audit log in this directory, oldest first. They form one chain.
pub fn audit_files(disk: &dyn Disk, dir: &Path) -> io::Result<Vec<PathBuf>> {
    let names = disk.read_dir(dir)?.into_iter().map(|entry| entry.name);
    let is_old = |name: &String| {
        let digits = name.strip_prefix("audit-").and_then(|rest| rest.strip_suffix(".jsonl"));
        digits.is_some_and(|d| d.len() == 20 && d.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut files: Vec<PathBuf> = names.filter(is_old).map(|name| dir.join(name)).collect();
    let current = dir.join(CURRENT);
    files.extend(disk.exists(&current).then_some(current));
    Ok(files)
}

pub(crate) struct Log {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    file_bytes_max: u64,
    open: Option<Open>,
}

struct Open {
    file: Arc<dyn File>,
    /// Everything up to here is durable and in the chain.
    len: u64,
    head: Head,
    /// A write after `len` failed: a part of it may be in the file.
    is_dirty: bool,
}

impl Log {
    pub fn new(disk: Arc<dyn Disk>, dir: &Path) -> Log {
        Log { disk, dir: dir.to_path_buf(), file_bytes_max: FILE_BYTES_MAX, open: None }
    }

    /// Appends records durably; returns the number of the last one. After an error none of them is in the
    /// log.
    pub fn append(&mut self, records: &[Record]) -> io::Result<u64> {
        let open = match self.open.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let mut open = match open.len > self.file_bytes_max {
            true => self.rotate(open)?,
            false => open,
        };
        let written = open.append(records);
        let number = open.head.number;
        self.open = Some(open);
        written.map(|()| number)
    }

    fn open(&self) -> io::Result<Open> {
        let path = self.dir.join(CURRENT);
        let is_new = !self.disk.exists(&path);
        let file = self.disk.open(&path, OpenMode::WRITE)?;
        if is_new {
            self.disk.sync_dir(&self.dir)?;
        }
        let len = file.len()?;
        let tail = tail(&*file, len)?;
        let whole = tail.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let partial_bytes = (tail.len() - whole) as u64;
        let mut open = Open {
            file,
            len: len - partial_bytes,
            head: self.head(&tail[..whole])?,
            is_dirty: partial_bytes > 0,
        };
        if partial_bytes > 0 {
            tracing::warn!("{}: an unfinished line of {partial_bytes} bytes is removed", path.display());
            open.clean()?;
        }
        Ok(open)
    }

    /// The chain's end, from the last lines of the current file, or of the previous one.
    fn head(&self, lines: &[u8]) -> io::Result<Head> {
        if !lines.is_empty() {
            return Ok(resume(lines));
        }
        let current = self.dir.join(CURRENT);
        let older = audit_files(&*self.disk, &self.dir)?;
        let Some(last) = older.iter().rfind(|file| **file != current) else { return Ok(Head::default()) };
        let file = self.disk.open(last, OpenMode::READ)?;
        Ok(resume(&tail(&*file, file.len()?)?))
    }

    /// Rotates: renames the current file, removes the oldest, and begins a new one.
    fn rotate(&self, full: Open) -> io::Result<Open> {
        let old = self.dir.join(format!("audit-{:020}.jsonl", full.head.number));
        self.disk.rename(&self.dir.join(CURRENT), &old)?;
        let files = audit_files(&*self.disk, &self.dir)?;
        for file in &files[..files.len().saturating_sub(OLD_FILES_MAX)] {
            self.disk.remove_file(file)?;
        }
        self.open()
    }
}

impl Open {
    fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let (mut head, mut lines) = (self.head, String::new());
        for record in records {
            lines += &seal(&mut head, record);
            lines.push('\n');
        }
        self.clean()?;
        self.is_dirty = true;
        self.file.write_all_at(lines.as_bytes(), self.len)?;
        self.file.sync_data()?;
        *self = Open { len: self.len + lines.len() as u64, head, is_dirty: false, file: self.file.clone() };
        Ok(())
    }

    fn clean(&mut self) -> io::Result<()> {
        if self.is_dirty {
            self.file.set_len(self.len)?;
            self.is_dirty = false;
        }
        Ok(())
    }
}

/// The end of a file, including a line's end before its last line, or the whole file.
fn tail(file: &dyn File, len: u64) -> io::Result<Vec<u8>> {
    let mut wanted = TAIL_BYTES.min(len);
    loop {
        let mut bytes = vec![0; usize::try_from(wanted).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, len - wanted)?;
        let ends = bytes.iter().filter(|b| **b == b'\n').count();
        if ends > 1 || wanted == len {
            return Ok(bytes);
        }
        wanted = (wanted * 4).min(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::Env;
    use weir_env::sim::{SimConfig, World};
    use weir_trust::audit::{Checker, Fault, Outcome};

    fn record(n: u64) -> Record {
        Record {
            time_ns: n as i64,
            node: "weir target".into(),
            from: "unix".into(),
            role: "console".into(),
            uid: None,
            what: "ClearTarget".into(),
            on: format!("t{n}"),
            result: Outcome::Done,
            again: 0,
        }
    }

    fn log(env: &Env) -> Log {
        Log { file_bytes_max: 1000, ..Log::new(env.disk.clone(), Path::new("/role")) }
    }

    /// The numbers of records and of files; or the file and the line that is invalid.
    fn checked(env: &Env) -> Result<(usize, usize), (usize, usize, Fault)> {
        let files = audit_files(&*env.disk, Path::new("/role")).unwrap();
        let (mut checker, mut count) = (Checker::default(), 0);
        for (i, file) in files.iter().enumerate() {
            for (j, line) in env.disk.read(file).unwrap().split_inclusive(|b| *b == b'\n').enumerate() {
                let line = line.strip_suffix(b"\n").unwrap_or(line);
                checker.take(line).map_err(|fault| (i, j, fault))?;
                count += 1;
            }
        }
        Ok((count, files.len()))
    }

    fn world(test: impl FnOnce(&World, &Env)) {
        let world = World::new(1, SimConfig::default());
        world.run(async {
            let env = world.node("role");
            env.disk.create_dir_all(Path::new("/role")).unwrap();
            env.disk.sync_dir(Path::new("/")).unwrap();
            test(&world, &env);
        });
    }

    #[test]
    fn a_chain_goes_on_over_files_and_starts() {
        world(|_, env| {
            for start in 0..6 {
                let mut log = log(env);
                for n in 1..=3 {
                    assert_eq!(log.append(&[record(n)]).unwrap(), start * 3 + n);
                }
            }
            let (count, files) = checked(env).unwrap();
            assert!(count == 18 && files > 3, "{count} records in {files} files");
        });
    }

    #[test]
    fn the_oldest_files_go() {
        world(|_, env| {
            let mut log = log(env);
            let last = (1..=100).map(|n| log.append(&[record(n), record(n)]).unwrap()).max();
            assert_eq!(last, Some(200));
            let (count, files) = checked(env).unwrap();
            assert!(files == OLD_FILES_MAX + 1 && count < 100, "{count} records in {files} files");
        });
    }

    #[test]
    fn an_unfinished_line_is_removed_at_the_next_start() {
        world(|_, env| {
            log(env).append(&[record(1), record(2)]).unwrap();
            let file = env.disk.open(Path::new("/role/audit.jsonl"), OpenMode::WRITE).unwrap();
            file.set_len(file.len().unwrap() - 7).unwrap();
            assert_eq!(checked(env), Err((0, 1, Fault::Truncated)));
            assert_eq!(log(env).append(&[record(3)]).unwrap(), 2);
            assert_eq!(checked(env), Ok((2, 1)));
        });
    }

    #[test]
    fn a_full_disk_leaves_nothing_half_written() {
        world(|world, env| {
            let mut log = log(env);
            log.append(&[record(1)]).unwrap();
            world.set_disk_capacity("role", 0);
            let many: Vec<Record> = (0..500).map(record).collect();
            assert!(log.append(&many).is_err());
            world.set_disk_capacity("role", 1 << 30);
            assert_eq!(log.append(&[record(2)]).unwrap(), 2);
            assert_eq!(checked(env), Ok((2, 1)));
        });
    }

    #[test]
    fn a_flipped_bit_is_found() {
        world(|world, env| {
            log(env).append(&[record(1), record(2), record(3)]).unwrap();
            let middle = env.disk.read(Path::new("/role/audit.jsonl")).unwrap().len() as u64 / 2;
            world.flip_bit("role", Path::new("/role/audit.jsonl"), middle, 2).unwrap();
            assert_eq!(checked(env), Err((0, 1, Fault::Changed)));
        });
    }
}
