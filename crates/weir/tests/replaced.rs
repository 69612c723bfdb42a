//! Claim: when a target is lost for good and another one is there, its places go to others while programs write;
//! after that any two further targets may go, and every byte is still read.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, pattern, text, wait_until};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(180);
const FILE_BYTES: usize = 1_500_000;

/// Files, and the bytes that were written to them.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// Writes whole files, and small pieces into one, until it is told to end: all that it was told is stored.
struct Writer {
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Files>>,
}

impl Writer {
    fn start(top: &Path) -> Writer {
        let (ends, top) = (Arc::new(AtomicBool::new(false)), top.to_path_buf());
        let seen = ends.clone();
        let thread = std::thread::spawn(move || {
            let small = top.join("small");
            let (mut files, mut pieces) = (Vec::new(), pattern(1, FILE_BYTES));
            fs::write(&small, &pieces).unwrap();
            for n in 0_u64.. {
                if seen.load(Ordering::Relaxed) {
                    break;
                }
                let (path, data) = (top.join(format!("w{n}")), pattern(n, FILE_BYTES));
                fs::write(&path, &data).unwrap();
                File::open(&path).unwrap().sync_all().unwrap();
                files.push((path, data));
                let (at, piece) = ((n as usize * 7919 * 64) % (FILE_BYTES - 5000), pattern(n + 9, 5000));
                let file = File::options().write(true).open(&small).unwrap();
                file.write_all_at(&piece, at as u64).unwrap();
                file.sync_all().unwrap();
                pieces[at..at + piece.len()].copy_from_slice(&piece);
                if files.len() > 40 {
                    let (old, _) = files.remove(3);
                    fs::remove_file(old).unwrap();
                }
            }
            files.push((small, pieces));
            files
        });
        Writer { ends, thread: Some(thread) }
    }
    fn end(&mut self) -> Files {
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

fn check(files: &[(PathBuf, Vec<u8>)], when: &str) {
    for (path, data) in files {
        let found = fs::read(path).unwrap_or_else(|e| panic!("{when}: {}: {e}", path.display()));
        assert!(found == *data, "{when}: {} has other bytes than were written", path.display());
    }
}

#[test]
fn a_target_lost_for_good_is_replaced_while_programs_write() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(2, &["--targets", "7"]);
    let (dir, top) = (cluster.dir(), cluster.mount().to_path_buf());
    let mut writer = Writer::start(&top);
    let refused = |args: &[&str], says: &str| {
        let told = cluster.try_run_weir(args);
        let said = text(&told.stderr);
        assert!(!told.status.success() && said.contains(says), "{args:?}: {said}");
    };
    refused(&["target", "gone", "t3", "--yes"], "t3 is in service");
    refused(&["target", "gone", "t9", "--yes"], "no target t9");

    cluster.kill("storage-3");
    fs::remove_dir_all(dir.join("t3")).unwrap();
    wait_until("t3 is down", PATIENCE, || cluster.status()["targets"][2]["state"] == "down");
    refused(&["target", "gone", "t3"], "--yes");
    let said = cluster.run_weir(&["target", "gone", "t3", "--dry-run"]);
    assert!(said.contains("go to other targets at once"), "{said}");
    cluster.run_weir(&["target", "gone", "t3", "--yes"]);
    let rebuild =
        || -> serde_json::Value { serde_json::from_str(&cluster.run_weir(&["rebuild", "--json"])).unwrap() };
    wait_until("t3 is replaced", PATIENCE, || {
        let seen = rebuild();
        seen["places_left"] == 0 && seen["filled"].as_array().unwrap().is_empty()
    });
    let seen = rebuild();
    assert_eq!((&seen["gone"][0], &seen["lost"][0]), (&"t3".into(), &"t3".into()), "{seen}");
    let files = writer.end();
    check(&files, "t3 is replaced");

    // Two others go: what the newcomers have is needed, by a mount that has nothing of it.
    cluster.kill("storage-1");
    cluster.kill("storage-2");
    let other = &cluster.mounts[1];
    let at_other: Vec<_> =
        files.into_iter().map(|(path, data)| (other.join(path.file_name().unwrap()), data)).collect();
    check(&at_other, "two others are gone");
}
