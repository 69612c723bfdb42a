//! The log file of a background process: when it is large, it is renamed and a new one begins.
//!
//! Invariant: only the process that writes a file rotates it, or the one that is about to start it. Standard
//! output and error lead to the new file, too, so messages of panics are not lost. A failed rotation is
//! reported in the log, and the file grows on.
use rustix::stdio::{dup2_stderr, dup2_stdout};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Text of some days.
pub const FILE_BYTES_MAX: u64 = 10 << 20;
/// Earlier files that are kept: NAME.log.1 is the newest of them.
const KEPT: usize = 3;

/// The log of this process.
pub struct Rotation {
    path: PathBuf,
    bytes_max: u64,
    /// Bytes in the present file.
    bytes: u64,
}

impl Rotation {
    /// Standard error leads to this file.
    pub fn of(path: PathBuf, bytes_max: u64) -> Rotation {
        let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        Rotation { path, bytes_max, bytes }
    }

    /// Bytes were written; an error is for the log.
    pub fn wrote(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        if self.bytes < self.bytes_max {
            return Ok(());
        }
        self.bytes = 0; // after a failure, tried again when as many bytes were written
        let begin = || -> io::Result<()> {
            shift(&self.path)?;
            let new = open(&self.path)?;
            dup2_stdout(&new)?;
            Ok(dup2_stderr(&new)?)
        };
        begin().map_err(|e| format!("the log {} is not rotated: {e}", self.path.display()))
    }
}

/// Opens a log for appending. Only its owner may read it.
pub fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Before a process is started that writes there: a large file is rotated.
pub fn begin(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.len() >= FILE_BYTES_MAX => shift(path),
        _ => Ok(()),
    }
}

/// NAME.log becomes NAME.log.1, and so on; the oldest one goes.
fn shift(path: &Path) -> io::Result<()> {
    if !path.try_exists()? {
        return Ok(()); // or an earlier file would be lost for nothing
    }
    for n in (0..KEPT).rev() {
        match fs::rename(numbered(path, n), numbered(path, n + 1)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn numbered(path: &Path, n: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if n > 0 {
        name.push(format!(".{n}"));
    }
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_earlier_files_are_kept_the_newest_first() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("meta.log");
        for n in 1..=5 {
            fs::write(&log, format!("{n}")).unwrap();
            shift(&log).unwrap();
        }
        let kept: Vec<String> = (1..=4).filter_map(|n| fs::read_to_string(numbered(&log, n)).ok()).collect();
        assert_eq!(kept, ["5", "4", "3"]);
        assert!(!log.exists());
        shift(&log).unwrap(); // a missing file is not an error
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_small_log_stays_when_its_process_begins() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("meta.log");
        begin(&log).unwrap();
        let file = open(&log).unwrap();
        file.set_len(FILE_BYTES_MAX - 1).unwrap();
        begin(&log).unwrap();
        assert!(log.exists());
        file.set_len(FILE_BYTES_MAX).unwrap();
        begin(&log).unwrap();
        assert!(!log.exists() && numbered(&log, 1).exists());
    }
}
