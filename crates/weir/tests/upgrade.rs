//! A rolling upgrade: a cluster of an older program becomes one of this program, role after role, while
//! detectors write.
//!
//! `make test-upgrade` builds the older program (`scripts/upgrade-from` names its commit) and runs this.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, OnPanic, pattern, wait_until};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where `make test-upgrade` has put the older program.
const OLDER: &str = "WEIR_UPGRADE_FROM";
const FRAME_BYTES: usize = 6_250_000;
const DETECTORS: u64 = 2;
/// Of each detector; low enough for a machine of two cores that runs the whole cluster.
const PERIOD: Duration = Duration::from_millis(250);
/// As in `weir-bench detector`: a detector has room for ten frames.
const LATE: Duration = Duration::from_millis(2500);
/// Frames that are kept before they are read back and removed.
const KEPT: usize = 6;
const PATIENCE: Duration = Duration::from_secs(120);
const STORAGE: u32 = 6;

#[derive(Default)]
struct Load {
    stop: AtomicBool,
    written: AtomicU64,
    read: AtomicU64,
    late: AtomicU64,
    longest_ms: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

impl Load {
    fn complain(&self, what: String) {
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// One detector, until it is stopped; reads back data that it has written a while ago.
    fn detect(&self, dir: &Path, detector: u64) {
        let begun = Instant::now();
        let mut kept = VecDeque::new();
        for n in 0u32.. {
            if self.stop.load(Ordering::Acquire) {
                break;
            }
            let due = begun + PERIOD * n;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let (path, seed) = (dir.join(format!("d{detector}-{n}")), detector << 32 | u64::from(n));
            let frame = pattern(seed, FRAME_BYTES);
            if let Err(e) = File::create(&path).and_then(|mut file| file.write_all(&frame)) {
                self.complain(format!("write {}: {e}", path.display()));
            }
            let took = due.elapsed();
            self.longest_ms.fetch_max(took.as_millis() as u64, Ordering::AcqRel);
            self.late.fetch_add(u64::from(took > LATE), Ordering::AcqRel);
            self.written.fetch_add(1, Ordering::Release);
            kept.push_back((path, seed));
            if kept.len() > KEPT
                && let Some((path, seed)) = kept.pop_front()
            {
                self.read_back(&path, seed);
            }
        }
        kept.into_iter().for_each(|(path, seed)| self.read_back(&path, seed));
    }

    fn read_back(&self, path: &Path, seed: u64) {
        let mut found = Vec::with_capacity(FRAME_BYTES);
        let read = File::open(path).and_then(|mut file| {
            // Past the kernel's pages.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
            file.read_to_end(&mut found)
        });
        match read {
            Err(e) => self.complain(format!("read {}: {e}", path.display())),
            Ok(_) if found != pattern(seed, FRAME_BYTES) => {
                self.complain(format!("{} has other bytes", path.display()));
            }
            Ok(_) => {}
        }
        if let Err(e) = fs::remove_file(path) {
            self.complain(format!("remove {}: {e}", path.display()));
        }
        self.read.fetch_add(1, Ordering::Release);
    }

    /// Detectors write while `work` is done.
    fn during(&self, mount: &Path, work: impl FnOnce()) {
        self.stop.store(false, Ordering::Release);
        let dir = mount.join("frames");
        fs::create_dir_all(&dir).unwrap();
        std::thread::scope(|scope| {
            let _stop = OnPanic(|| self.stop.store(true, Ordering::Release));
            let dir = &dir;
            (0..DETECTORS).for_each(|n| drop(scope.spawn(move || self.detect(dir, n))));
            let before = self.read.load(Ordering::Acquire);
            wait_until("detectors write", PATIENCE, || self.read.load(Ordering::Acquire) > before + 2);
            work();
            self.stop.store(true, Ordering::Release);
        });
    }
}

/// The program that a process runs.
fn program_of(cluster: &Cluster, name: &str) -> PathBuf {
    let pid = cluster.pid(name).unwrap_or_else(|| panic!("{name} does not run"));
    fs::read_link(format!("/proc/{pid}/exe")).unwrap()
}

/// Shuts a process down, and starts it with another program. The next one waits until all data is redundant
/// again.
fn replace(cluster: &mut Cluster, name: &str, program: &Path) {
    cluster.signal(name, "TERM");
    wait_until(&format!("{name} has ended"), PATIENCE, || cluster.pid(name).is_none());
    cluster.program = program.to_path_buf();
    cluster.up();
    assert_eq!(program_of(cluster, name), program, "{name}");
    wait_until(&format!("all is well after {name}"), PATIENCE, || cluster.status()["redundant"] == true);
}

#[test]
#[ignore = "make test-upgrade: it needs the program to upgrade from"]
fn a_cluster_is_upgraded_role_after_role_while_detectors_write() {
    let older = fs::canonicalize(std::env::var(OLDER).expect("make test-upgrade sets it")).unwrap();
    let newer = fs::canonicalize(env!("CARGO_BIN_EXE_weir")).unwrap();
    let mut cluster = Cluster::of(older.clone(), None, 2, &["--movers", "1"]);
    let mounts = cluster.mounts.clone();
    let storage: Vec<String> = (1..=STORAGE).map(|n| format!("storage-{n}")).collect();
    let load = Load::default();
    load.during(&mounts[0], || {
        replace(&mut cluster, &storage[0], &newer);
        // Before the upgrade is finished there is a way back.
        replace(&mut cluster, &storage[0], &older);
        for name in &storage[..3] {
            replace(&mut cluster, name, &newer);
        }
        for name in ["coord", "meta", "mover-1"] {
            replace(&mut cluster, name, &newer);
        }
        for name in &storage[3..] {
            replace(&mut cluster, name, &newer);
        }
    });
    // A mount is left before its process ends.
    load.during(&mounts[1], || replace(&mut cluster, "mount-1", &newer));
    load.during(&mounts[0], || replace(&mut cluster, "mount-2", &newer));
    load.during(&mounts[1], || {
        for name in cluster.names() {
            assert_eq!(program_of(&cluster, &name), newer, "{name}");
        }
        let finished: serde_json::Value =
            serde_json::from_str(&cluster.run_weir(&["upgrade", "finish", "--json"])).unwrap();
        let status = cluster.status();
        assert_eq!(status["level"], finished["level"]);
        for node in status["nodes"].as_array().unwrap() {
            assert!(node["program"]["level"].as_u64() >= status["level"].as_u64(), "{node}");
        }
    });
    let wrong = load.wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (written, late) = (load.written.into_inner(), load.late.into_inner());
    println!(
        "{written} frames, {} of them late, {} errors; the longest took {} ms",
        late,
        wrong.len(),
        load.longest_ms.into_inner()
    );
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(late, 0, "late frames");
    assert_eq!(load.read.into_inner(), written, "each frame was read back");
}
