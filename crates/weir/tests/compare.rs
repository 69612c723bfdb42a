//! Claim: `weir-bench` compares a mount with a plain directory, and counts what operations cost on a cluster
//! of its own. It leaves nothing behind.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, text, weir_bench};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

#[test]
fn a_mount_is_compared_with_a_plain_directory() {
    if !can_mount() {
        return;
    }
    let plain = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(1);
    let mount = cluster.mount();
    let mut compare = Command::new(weir_bench());
    compare.args(["compare", "--json", "--size", "3MiB", "--files", "12", "--ops", "9", "--rounds", "2"]);
    let output = compare.arg(plain.path()).arg(mount).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 18);
    for figure in rows.iter().flat_map(|row| row["figures"].as_array().unwrap()) {
        assert!(figure["value"]["median"].as_f64().unwrap() > 0.0, "{json:#}");
    }
    assert_eq!(json["bad"], 0, "{json:#}");
    assert!(json["dirs"][1]["file_system"].as_str().unwrap().starts_with("fuse"), "{json:#}");
    assert_eq!(fs::read_dir(mount).unwrap().count(), 0, "something is left");
}

#[test]
fn costs_of_operations_are_counted_on_a_cluster_of_its_own() {
    if !can_mount() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let mut counts = Command::new(weir_bench());
    counts.args(["requests", "--memory", "--ops", "20", "--json"]).env("TMPDIR", root.path());
    let output = counts.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows: BTreeMap<&str, &Value> = json["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["operation"].as_str().unwrap(), row))
        .collect();
    let each = |what: &str, of: &str| rows[what][of].as_f64().unwrap_or_else(|| panic!("{what}: {json:#}"));
    assert_eq!(rows["mkdir"]["by_kind"]["MKDIR"], 1.0);
    assert_eq!(rows["pwrite 4 KiB"]["by_kind"]["WRITE"], 1.0);
    assert!(each("one path again and again, five deep", "requests") < 1.0, "{json:#}");
    assert!(each("unlink, cold", "messages") >= 1.0 && each("unlink, cold", "switches") > 0.0, "{json:#}");
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "something is left");
}
