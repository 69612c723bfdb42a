//! Claims: new targets are used by new files at once; a target is drained and removed while programs write,
//! and after that any two further targets may go, and every byte is still read. A full target stops no writer
//! while its places can move.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::writer::{Writer, check};
use common::{Cluster, can_mount, left_out, pattern, shell, text, volume, wait_until};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn a_cluster_grows_and_its_oldest_target_leaves() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let top = cluster.mount().to_path_buf();
    let refused = |args: &[&str], says: &str| {
        let output = cluster.try_run_weir(args);
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains(says), "{args:?}: {printed}");
    };
    let json = |args: &[&str]| -> serde_json::Value {
        serde_json::from_str(&cluster.run_weir(&[args, &["--json"]].concat())).unwrap()
    };
    let mut old = Vec::new();
    for n in 0..30 {
        let (path, data) = (top.join(format!("old{n}")), pattern(n, 700_000));
        fs::write(&path, &data).unwrap();
        old.push((path, data));
    }
    let mut writer = Writer::start(&top);
    let printed = cluster.run_weir(&["target", "drain", "t1", "--dry-run"]);
    assert!(printed.contains("24 wait: there is no target to take its place"), "{printed}");

    // Two more: new files are on all eight.
    refused(&["up", "--targets", "4"], "has 6 targets, not 4");
    cluster.run_weir(&["up", "--targets", "8"]);
    wait_until("new files use new targets", PATIENCE, || {
        let all = json(&["target", "list"]);
        let places = |n: usize| all[n]["places"].as_u64().unwrap_or(0);
        places(6) > 0 && places(7) > 0
    });
    let new = top.join("new");
    fs::write(&new, pattern(77, 8_000_000)).unwrap();
    wait_until("the new targets have bytes", PATIENCE, || {
        let all = json(&["target", "list"]);
        (6..8).all(|n| all[n]["used"].as_u64() > Some(100_000))
    });

    // The oldest one leaves.
    refused(&["target", "remove", "t1"], "t1 has a place in");
    refused(&["target", "undrain", "t1"], "t1 is not drained");
    cluster.run_weir(&["target", "drain", "t1"]);
    assert_eq!(json(&["target", "list"])[0]["state"], "draining");
    wait_until("t1 is drained", PATIENCE, || {
        let all = json(&["target", "list"]);
        all[0]["places"] == 0 && all[0]["used"] == 0
    });
    cluster.run_weir(&["target", "remove", "t1"]);
    let all = json(&["target", "list"]);
    assert_eq!((all.as_array().unwrap().len(), &all[0]["target"]), (7, &"t2".into()), "{all}");
    let troubles = cluster.status()["troubles"].to_string();
    assert!(!troubles.contains("storage-down"), "its process is not missed: {troubles}");
    let files = writer.end();
    check(&old, "t1 is removed");
    check(&files, "t1 is removed");

    // Two others go: all that t1 had is needed where it is now, by a mount that has nothing of it.
    cluster.kill("storage-2");
    cluster.kill("storage-5");
    let other = &cluster.mounts[1];
    let at_other = |files: Vec<(std::path::PathBuf, Vec<u8>)>| -> Vec<_> {
        files.into_iter().map(|(path, data)| (other.join(path.file_name().unwrap()), data)).collect()
    };
    check(&at_other(old), "two others are gone");
    check(&at_other(files), "two others are gone");
    assert_eq!(fs::read(other.join("new")).unwrap(), pattern(77, 8_000_000));
}

/// A directory for a cluster, in which target 1 gets a small file system of its own.
struct SmallDisk {
    root: TempDir,
}

impl SmallDisk {
    fn new() -> SmallDisk {
        SmallDisk { root: tempfile::Builder::new().prefix("weir-full-").tempdir().unwrap() }
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn target(&self) -> PathBuf {
        self.dir().join("t1")
    }
    /// While the cluster is stopped.
    fn put_in(&self, mib: u64) {
        let (root, at) = (self.root.path().display(), self.target());
        let at = at.display();
        shell(&format!(
            "mv {at} {root}/before; mkdir {at}; truncate -s {mib}M {root}/t1.img; mkfs.ext4 -q -m 0 {root}/t1.img; \
             mount -o loop {root}/t1.img {at}; rmdir {at}/lost+found; cp -a {root}/before/. {at}"
        ));
    }
    /// Another file takes all but these MiB.
    fn leave(&self, mib: u64) {
        let at = self.target();
        let free = shell(&format!("df --output=avail -B1M {} | tail -1", at.display()));
        let taken = free.trim().parse::<u64>().unwrap() - mib;
        shell(&format!("fallocate -l {taken}M {}/ballast", at.display()));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The cluster has ended; if a process hangs, the disk is freed when it goes.
        let _ = Command::new("umount").arg("-l").arg(self.target()).status();
    }
}

fn is_root() -> bool {
    shell("id -u").trim() == "0" || left_out("only root can mount a file in place of a disk")
}

#[test]
fn a_full_disk_stops_no_writer_while_its_places_can_move() {
    if !can_mount() || !is_root() {
        return;
    }
    let disk = SmallDisk::new();
    let cluster = Cluster::at(Some(disk.dir()), 2, &["--targets", "7"]);
    cluster.run_weir(&["down"]);
    disk.put_in(384);
    cluster.up();
    volume(&cluster, &["create", "data"]);
    volume(&cluster, &["policy", "data", "--write-floor", "5"]);
    let top = cluster.mount().join("data");
    let mut old = Vec::new();
    for n in 0..40 {
        let (path, data) = (top.join(format!("old{n}")), pattern(n, 3_000_000));
        fs::write(&path, &data).unwrap();
        old.push((path, data));
    }
    let mut writer = Writer::start(&top);
    // Which of the two depends on whether its node has reported since.
    let is_full = || {
        let troubles = cluster.status()["troubles"].to_string();
        troubles.contains("target-full") || troubles.contains("target-refuses")
    };
    assert!(!is_full());
    let json = |args: &[&str]| -> serde_json::Value {
        serde_json::from_str(&cluster.run_weir(&[args, &["--json"]].concat())).unwrap()
    };
    let places = || json(&["target", "list"])[0]["places"].as_u64().unwrap();
    let before = places();
    disk.leave(8);
    // The first place that moves may give it room before the report is seen here.
    wait_until("t1 is reported as full, or its places move", PATIENCE, || is_full() || places() < before);
    check(&old, "t1 is full");
    // The old files grow, too, in each of their groups.
    for (n, (path, data)) in old.iter_mut().enumerate() {
        let more = pattern(n as u64 + 100, 500_000);
        let mut file = fs::File::options().append(true).open(&*path).unwrap();
        std::io::Write::write_all(&mut file, &more).unwrap();
        file.sync_all().unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        data.extend(more);
    }
    wait_until("nothing moves any more, and t1 has room", PATIENCE, || {
        let idle = json(&["rebuild"])["moving"].as_array().is_some_and(Vec::is_empty);
        idle && !is_full()
    });
    let files = writer.end();
    check(&old, "places have moved");
    check(&files, "places have moved");
    let other = cluster.mounts[1].join("data");
    let at_other: Vec<_> =
        old.into_iter().map(|(path, data)| (other.join(path.file_name().unwrap()), data)).collect();
    check(&at_other, "places have moved, at another mount");
}

#[test]
fn targets_share_the_space_of_their_own_file_system() {
    if !is_root() {
        return;
    }
    let disk = SmallDisk::new();
    let cluster = Cluster::at(Some(disk.dir()), 0, &["--targets", "3", "--scheme", "ec:2+1"]);
    cluster.run_weir(&["down"]);
    disk.put_in(384);
    cluster.up();
    // t1 has a disk for itself; t2 and t3 share that of the cluster's directory, which others use, too.
    let free = |dir: PathBuf| {
        let printed = shell(&format!("df --output=avail -B1 {} | tail -1", dir.display()));
        printed.trim().parse::<f64>().unwrap()
    };
    wait_until("each target counts its part of the space", PATIENCE, || {
        let targets: serde_json::Value =
            serde_json::from_str(&cluster.run_weir(&["target", "list", "--json"])).unwrap();
        let is_near = |n: usize, expected: f64| {
            let capacity = targets[n]["capacity"].as_f64().unwrap();
            (capacity / expected - 1.0).abs() < 0.2
        };
        let shared = free(disk.dir()) / 2.0;
        is_near(0, free(disk.target())) && is_near(1, shared) && is_near(2, shared)
    });
}
