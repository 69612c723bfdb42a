//! Claim: when a target is lost for good and another one is present, its places go to others while programs
//! write; after that any two further targets may fail, and every byte is still read.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::writer::{Writer, check};
use common::{Cluster, can_mount, text, wait_until};
use std::fs;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(180);
#[test]
fn a_target_lost_for_good_is_replaced_while_programs_write() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(2, &["--targets", "7"]);
    let (dir, top) = (cluster.dir(), cluster.mount().to_path_buf());
    let mut writer = Writer::start(&top);
    let refused = |args: &[&str], says: &str| {
        let output = cluster.try_run_weir(args);
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains(says), "{args:?}: {printed}");
    };
    refused(&["target", "gone", "t3", "--yes"], "t3 is in service");
    refused(&["target", "gone", "t9", "--yes"], "no target t9");

    cluster.kill("storage-3");
    fs::remove_dir_all(dir.join("t3")).unwrap();
    wait_until("t3 is down", PATIENCE, || cluster.status()["targets"][2]["state"] == "down");
    refused(&["target", "gone", "t3"], "--yes");
    let printed = cluster.run_weir(&["target", "gone", "t3", "--dry-run"]);
    assert!(printed.contains("go to other targets at once"), "{printed}");
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

    // Two others fail: data of the newcomers is needed, by a mount that has none of it.
    cluster.kill("storage-1");
    cluster.kill("storage-2");
    let other = &cluster.mounts[1];
    let at_other: Vec<_> =
        files.into_iter().map(|(path, data)| (other.join(path.file_name().unwrap()), data)).collect();
    check(&at_other, "two others are gone");
}
