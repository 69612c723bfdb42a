//! A program that writes all the time, and knows each byte whose write was acknowledged.
use super::pattern;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const FILE_BYTES: usize = 1_500_000;

/// Files, and the bytes that were written to them.
pub type Files = Vec<(PathBuf, Vec<u8>)>;

/// Writes whole files, and small parts into one, until it is stopped: all acknowledged writes are stored.
pub struct Writer {
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Files>>,
}

impl Writer {
    pub fn start(top: &Path) -> Writer {
        let (ends, top) = (Arc::new(AtomicBool::new(false)), top.to_path_buf());
        let seen = ends.clone();
        let thread = std::thread::spawn(move || {
            let small = top.join("small");
            let (mut files, mut expected) = (Vec::new(), pattern(1, FILE_BYTES));
            fs::write(&small, &expected).unwrap();
            for n in 0_u64.. {
                if seen.load(Ordering::Relaxed) {
                    break;
                }
                let (path, data) = (top.join(format!("w{n}")), pattern(n, FILE_BYTES));
                fs::write(&path, &data).unwrap();
                File::open(&path).unwrap().sync_all().unwrap();
                files.push((path, data));
                let (at, part) = ((n as usize * 7919 * 64) % (FILE_BYTES - 5000), pattern(n + 9, 5000));
                let file = File::options().write(true).open(&small).unwrap();
                file.write_all_at(&part, at as u64).unwrap();
                file.sync_all().unwrap();
                expected[at..at + part.len()].copy_from_slice(&part);
                if files.len() > 40 {
                    let (old, _) = files.remove(3);
                    fs::remove_file(old).unwrap();
                }
            }
            files.push((small, expected));
            files
        });
        Writer { ends, thread: Some(thread) }
    }
    pub fn end(&mut self) -> Files {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the test has failed already
        }
    }
}

pub fn check(files: &[(PathBuf, Vec<u8>)], when: &str) {
    for (path, data) in files {
        let found = fs::read(path).unwrap_or_else(|e| panic!("{when}: {}: {e}", path.display()));
        assert!(found == *data, "{when}: {} has other bytes than were written", path.display());
    }
}
