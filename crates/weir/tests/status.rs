//! Claim: `weir status` names what is wrong anywhere in a cluster, the worst first, and its exit status says how bad it is.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::Bench;
use common::{Cluster, can_mount, pattern, text, wait_until};
use serde_json::Value;
use std::fs;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a trouble of this severity about something is told, and this is what `weir status` exits with.
fn wait_reported(cluster: &Cluster, severity: &str, about: &str, exit: i32) -> String {
    let mut told = None;
    wait_until(&format!("{severity} about {about}"), PATIENCE, || {
        let (status, code) = cluster.status_and_exit();
        told = find(&status, severity, about);
        told.is_some() && code == exit
    });
    told.unwrap()
}

fn find(status: &Value, severity: &str, about: &str) -> Option<String> {
    let mut troubles = status["troubles"].as_array().unwrap().iter();
    let found = troubles.find(|t| t["severity"] == severity && t["about"] == about);
    found.map(|t| t["text"].as_str().unwrap().to_owned())
}

fn wait_healthy(cluster: &Cluster) {
    wait_until("it is healthy again", PATIENCE, || {
        let (status, code) = cluster.status_and_exit();
        code == 0 && status["healthy"] == true && status["state"] == "healthy"
    });
}

#[test]
fn every_part_that_fails_is_named_and_counts() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    let cluster = &bench.cluster;
    wait_healthy(cluster);
    let shown = cluster.run_weir(&["status"]);
    let second = shown.lines().nth(1).unwrap();
    assert_eq!(second, "healthy; all 6 targets up, all 24 placement groups complete");
    assert!(shown.contains(" free for files with ec:4+2, "), "{shown}");
    // Schemes that no file has are of no interest.
    assert!(!shown.contains("replica:2"), "{shown}");

    // A mover, which a relation needs.
    cluster.kill("mover-1");
    let said = wait_reported(cluster, "warning", "mover-1", 1);
    assert!(said.contains("mover-1 is not running: `weir up --dir "), "{said}");
    cluster.up();
    wait_healthy(cluster);

    // A home that is not there, and one that comes back.
    bench.relate();
    bench.wait_state("synced");
    let elsewhere = bench.home.with_file_name("elsewhere");
    fs::rename(&bench.home, &elsewhere).unwrap();
    let said = wait_reported(cluster, "warning", "r1", 1);
    assert!(said.contains(&format!("there is no directory {}", bench.url())), "{said}");
    fs::rename(&elsewhere, &bench.home).unwrap();
    wait_healthy(cluster);
    bench.run_weir(&["relation", "pause", "r1"]);
    wait_reported(cluster, "warning", "r1", 1);
    bench.run_weir(&["relation", "resume", "r1"]);

    // A volume at its limit.
    bench.run_weir(&["volume", "create", "small", "--bytes", "1MiB"]);
    fs::write(cluster.mount().join("small/f"), pattern(1, 1 << 20)).unwrap();
    let said = wait_reported(cluster, "warning", "small", 1);
    assert!(said.starts_with("volume small is full (1.00 MiB of 1.00 MiB)"), "{said}");
    bench.run_weir(&["volume", "quota", "small", "--bytes", "10MiB"]);
    wait_healthy(cluster);

    // A mount whose process died.
    cluster.kill("mount-1");
    let said = wait_reported(cluster, "warning", "mount-1", 1);
    assert!(said.contains("is dead (its process has ended)"), "{said}");
    cluster.up();
    wait_healthy(cluster);

    // A target: data is there, with less redundancy; three: not all of it is.
    cluster.kill("storage-2");
    let said = wait_reported(cluster, "degraded", "storage-2", 1);
    assert!(said.starts_with("storage-2 is down: t2 is missing from 24 placement groups"), "{said}");
    let output = cluster.try_run_weir(&["status"]);
    let (shown, code) = (text(&output.stdout), output.status.code());
    assert!(
        shown.contains("degraded: data is available with reduced redundancy; 5 of 6 targets up"),
        "{shown}"
    );
    assert_eq!(code, Some(1));
    for name in ["storage-3", "storage-4"] {
        cluster.kill(name);
    }
    wait_reported(cluster, "critical", "placement groups", 2);
    cluster.up();
    wait_healthy(cluster);

    // The metadata server.
    cluster.kill("meta");
    let said = wait_reported(cluster, "critical", "root", 2);
    assert!(
        said.starts_with("namespace \"root\" has no active metadata server; files are unavailable"),
        "{said}"
    );
    let (status, _) = cluster.status_and_exit();
    assert_eq!(status["troubles"][0]["severity"], "critical", "the worst is first");
    cluster.up();
    wait_healthy(cluster);
}
