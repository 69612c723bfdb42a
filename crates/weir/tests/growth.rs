//! Claims: new targets are used by new files at once; a target is drained and removed while programs write,
//! and after that any two further targets may go, and every byte is still read.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::writer::{Writer, check};
use common::{Cluster, can_mount, pattern, text, wait_until};
use std::fs;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn a_cluster_grows_and_its_oldest_target_leaves() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let top = cluster.mount().to_path_buf();
    let refused = |args: &[&str], says: &str| {
        let told = cluster.try_run_weir(args);
        let said = text(&told.stderr);
        assert!(!told.status.success() && said.contains(says), "{args:?}: {said}");
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
    let said = cluster.run_weir(&["target", "drain", "t1", "--dry-run"]);
    assert!(said.contains("24 wait: there is no target to take its place"), "{said}");

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
