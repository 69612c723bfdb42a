//! Claim: a target that returns empty, or as an older copy of itself, serves none of its old data: it is
//! refilled from the others, and data that too few others have is an error. A lost disk is replaced by an
//! empty directory.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, copy, pattern, text, wait_until, weir};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);
const FILE_BYTES: usize = 3_000_000;

/// The contents of files that are written in one run of the cluster.
struct Files(Vec<(String, Vec<u8>)>);

impl Files {
    fn put(&mut self, top: &Path, name: &str, seed: u64, len: usize) {
        let data = pattern(seed, len);
        let file = File::create(top.join(name)).unwrap();
        file.write_all_at(&data, 0).unwrap();
        file.sync_all().unwrap();
        self.0.retain(|(known, _)| known != name);
        self.0.push((name.into(), data));
    }
    /// Bytes within a file, synced.
    fn change(&mut self, top: &Path, name: &str, at: usize, seed: u64, len: usize) {
        let data = pattern(seed, len);
        let file = File::options().write(true).open(top.join(name)).unwrap();
        file.write_all_at(&data, at as u64).unwrap();
        file.sync_all().unwrap();
        let (_, known) = self.0.iter_mut().find(|(known, _)| known == name).unwrap();
        known.resize(known.len().max(at + len), 0);
        known[at..at + len].copy_from_slice(&data);
    }
    fn write_first(&mut self, top: &Path) {
        (0..8).for_each(|n| self.put(top, &format!("f{n}"), n, FILE_BYTES));
        self.put(top, "even", 90, 2 << 20);
    }
    /// Files are replaced, written over, changed in small pieces, longer, and new.
    fn write_more(&mut self, top: &Path, seed: u64) {
        self.put(top, "f0", seed, FILE_BYTES);
        self.change(top, "f1", 0, seed + 1, FILE_BYTES);
        for (n, name) in ["f2", "f3", "even"].into_iter().enumerate() {
            for k in [100, 300, 500] {
                self.change(top, name, k * 4096, seed + 10 * n as u64 + k as u64, 4096);
            }
        }
        self.change(top, "f4", FILE_BYTES, seed + 2, 500_000);
        self.put(top, &format!("new{seed}"), seed + 3, FILE_BYTES);
    }
    fn check(&self, top: &Path, when: &str) {
        for (name, data) in &self.0 {
            let found = fs::read(top.join(name)).unwrap_or_else(|e| panic!("{when}: {name}: {e}"));
            assert!(found == *data, "{when}: {name} has other bytes than were written");
        }
    }
}

fn wait_healthy(cluster: &Cluster, when: &str) {
    wait_until(&format!("{when}: all is refilled"), PATIENCE, || cluster.status()["healthy"] == true);
}

fn empty(target: &Path) {
    for entry in fs::read_dir(target).unwrap().map(|e| e.unwrap()) {
        match entry.file_type().unwrap().is_dir() {
            true => fs::remove_dir_all(entry.path()).unwrap(),
            false if entry.file_name() == "weir-target.toml" => {}
            false => fs::remove_file(entry.path()).unwrap(),
        }
    }
}

#[test]
fn empty_or_old_targets_are_refilled_losses_are_errors() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let (dir, top) = (cluster.dir(), cluster.mount().to_path_buf());
    let target = |n: u32| dir.join(format!("t{n}"));
    let mut files = Files(Vec::new());
    files.write_first(&top);
    cluster.run_weir(&["down"]);
    copy(&target(1), &dir.join("copy"));
    cluster.up();
    files.write_more(&top, 1000);

    let old_and_empty = || {
        fs::remove_dir_all(target(1)).unwrap();
        fs::rename(dir.join("copy"), target(1)).unwrap();
        empty(&target(4));
    };
    let without_index = || {
        fs::remove_dir_all(target(2).join("index")).unwrap();
        let found = weir(&["inspect", "--check", target(2).to_str().unwrap()]);
        let printed = text(&found.stdout) + &text(&found.stderr);
        assert!(!found.status.success() && printed.contains("index"), "{printed}");
    };
    let changes: [(&str, &dyn Fn()); 2] = [
        ("one is an older copy, another one is empty", &old_and_empty),
        ("one has lost its index", &without_index),
    ];
    for (what, change) in changes {
        // A target that was slow on a busy machine may be behind: it would be one loss more.
        wait_healthy(&cluster, what);
        cluster.run_weir(&["down"]);
        change();
        cluster.up();
        files.check(&top, what);
        files.write_more(&top, 2000 + what.len() as u64);
        wait_healthy(&cluster, what);
        files.check(&top, what);
    }

    cluster.run_weir(&["down"]);
    [1, 3, 5].into_iter().for_each(|n| empty(&target(n)));
    cluster.up();
    let mut errors = 0;
    for (name, data) in &files.0 {
        let file = File::open(top.join(name)).unwrap();
        for (at, expected) in (0..).step_by(4096 * 64).zip(data.chunks(4096 * 64)) {
            let mut found = vec![0; expected.len()];
            match file.read_exact_at(&mut found, at) {
                Ok(()) => assert!(found == expected, "{name} at {at}: other bytes than were written"),
                Err(e) => {
                    assert_eq!(e.raw_os_error(), Some(5), "{name} at {at}: {e}");
                    errors += 1;
                }
            }
        }
    }
    assert!(errors > 0, "three of six targets are empty");
    let status = cluster.status();
    assert_eq!(status["healthy"], false);
    let output = cluster.try_run_weir(&["status"]);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(printed.contains("data is lost") && printed.contains("t1, t3, t5"), "{printed}");
}

#[test]
fn a_lost_disk_is_replaced_by_an_empty_directory() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let (dir, top) = (cluster.dir(), cluster.mount().to_path_buf());
    let mut files = Files(Vec::new());
    files.write_first(&top);
    cluster.kill("storage-3");
    fs::remove_dir_all(dir.join("t3")).unwrap();
    wait_until("t3 is down", PATIENCE, || cluster.status()["targets"][2]["state"] == "down");
    files.write_more(&top, 1000);
    let printed = text(&cluster.try_run_weir(&["status"]).stdout);
    assert!(printed.contains("`weir target replace`"), "{printed}");

    let new = dir.join("new disk");
    let refused = |target: &str, to: &Path, says: &str| {
        let output = cluster.try_run_weir(&["target", "replace", target, to.to_str().unwrap()]);
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains(says), "{printed}");
    };
    refused("t2", &new, "t2 is up");
    refused("t9", &new, "no target t9");
    refused("t3", &dir.join("t2"), "is already target");
    refused("t3", &dir.join("log"), "is not empty");
    assert!(!new.exists());
    cluster.run_weir(&["target", "replace", "t3", new.to_str().unwrap()]);
    cluster.up();
    files.check(&top, "the new disk is being filled");
    wait_healthy(&cluster, "the new disk");
    assert!(new.join("index").exists());
    // Two others fail: data on the new disk is needed, by a mount that has none of it.
    cluster.kill("storage-1");
    cluster.kill("storage-2");
    files.check(&cluster.mounts[1], "two others are gone");
}
