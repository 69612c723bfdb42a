//! Claim: the metadata role and the coordinator start with their own directories only. An empty one in its
//! place, as when its file system is not mounted, another one, and an old copy are refused by name, and
//! are not changed; with the own one back every byte is right. A namespace that is abandoned by name is
//! founded again, and shows nothing of the former one.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, copy, ends, pattern, shell, text, wait_until, weir};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use weir_coord::identity::{NAMESPACE_FILE, NamespaceIdentity};

const PATIENCE: Duration = Duration::from_secs(60);
const BYTES: usize = 3_000_000;

fn stop(cluster: &Cluster, name: &str) {
    cluster.signal(name, "TERM");
    wait_until(&format!("the end of {name}"), PATIENCE, || cluster.pid(name).is_none());
}
/// The message of a role that does not start.
fn refused(args: &[&str]) -> String {
    let output = weir(args);
    assert!(!output.status.success(), "{args:?} was not refused");
    text(&output.stderr)
}
fn up_is_refused(cluster: &Cluster) -> String {
    let output = cluster.try_up();
    assert!(!output.status.success(), "{}", text(&output.stdout));
    text(&output.stderr)
}
fn says(printed: &str, all: &[&str]) {
    assert!(all.iter().all(|part| printed.contains(part)), "expected {all:?}: {printed}");
}
fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

/// A role of the test's own; it ends with this value.
struct Role(Child);
impl Role {
    fn start(args: &[&str]) -> Role {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        Role(command.args(args).stderr(Stdio::null()).spawn().unwrap())
    }
    fn end(&mut self) {
        shell(&format!("kill -TERM {}", self.0.id()));
        assert!(ends("the role", &mut self.0, PATIENCE).success());
    }
}
impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

/// The file that shows that a role serves.
fn serves(pid_file: &Path) -> bool {
    text(&fs::read(pid_file).unwrap_or_default()).contains("\"ready\":true")
}

struct Files(PathBuf);
impl Files {
    fn write(&self, n: u64) {
        let path = self.0.join(format!("f{n}"));
        fs::write(&path, pattern(n, BYTES)).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
    }
    fn are_right(&self, all: u64) {
        for n in 0..all {
            assert!(fs::read(self.0.join(format!("f{n}"))).unwrap() == pattern(n, BYTES), "f{n} is wrong");
        }
    }
}

#[test]
fn a_role_starts_with_its_own_directory_only() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let files = Files(cluster.mount().to_path_buf());
    let dir = cluster.dir();
    let [meta, own, old, coord, own_coord] =
        ["meta", "meta-own", "meta-old", "coord", "coord-own"].map(|name| dir.join(name));
    let [meta_config, coord_config] =
        ["meta", "coord"].map(|name| dir.join(format!("etc/{name}.toml")).display().to_string());
    let meta_starts = ["meta", "--config", &meta_config];
    let coord_starts = ["coord", "--config", &coord_config];
    let other = Cluster::with(0, &["--targets", "1"]);
    assert!(weir(&["down", "--dir", other.dir().to_str().unwrap()]).status.success());

    (0..3).for_each(|n| files.write(n));
    stop(&cluster, "meta");
    copy(&meta, &old);
    cluster.up();
    (3..5).for_each(|n| files.write(n));
    stop(&cluster, "meta");
    fs::rename(&meta, &own).unwrap();

    // Its file system is not mounted.
    fs::create_dir(&meta).unwrap();
    let not_mounted =
        ["there is no weir-namespace.toml", "hint: its file system may not be mounted", "/meta"];
    says(&refused(&meta_starts), &not_mounted);
    let before = cluster.pid("storage-1").expect("it runs");
    says(&up_is_refused(&cluster), &not_mounted);
    assert_eq!(cluster.pid("storage-1"), Some(before), "processes that ran before stay");
    let founding = refused(&["meta", "--config", &meta_config, "--new"]);
    says(
        &founding,
        &["namespace \"root\" exists already", "hint: start it with its own directory", "--instead-of "],
    );
    assert!(is_empty(&meta), "nothing was touched");
    fs::remove_dir(&meta).unwrap();
    says(&refused(&meta_starts), &["does not exist", "hint: mount its file system"]);
    // An old copy, whole or of the store alone; a store that is gone.
    let is_old = ["an old copy of namespace \"root\"", "hint: put the newest one back", "/meta"];
    fs::rename(&old, &meta).unwrap();
    says(&refused(&meta_starts), &is_old);
    says(&refused(&meta_starts), &is_old);
    fs::remove_dir_all(meta.join("kv")).unwrap();
    says(&refused(&meta_starts), &is_old);
    fs::remove_dir_all(&meta).unwrap();
    // Another cluster's, and another namespace's.
    copy(&other.dir().join("meta"), &meta);
    says(&refused(&meta_starts), &["holds namespace \"root\" of cluster", "hint: correct the directory"]);
    fs::remove_dir_all(&meta).unwrap();
    let identity = NamespaceIdentity::from_text(&fs::read(own.join(NAMESPACE_FILE)).unwrap()).unwrap();
    let second = NamespaceIdentity { name: "second".into(), ..identity };
    fs::create_dir(&meta).unwrap();
    fs::write(meta.join(NAMESPACE_FILE), second.to_text()).unwrap();
    says(
        &refused(&meta_starts),
        &["holds namespace \"second\", not \"root\"", "hint: correct the directory"],
    );
    fs::remove_dir_all(&meta).unwrap();

    fs::rename(&own, &meta).unwrap();
    says(&refused(&["meta", "--config", &meta_config, "--new"]), &["hint: omit --new"]);
    cluster.up();
    files.are_right(5);

    // The directory of the coordinator.
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    fs::rename(&coord, &own_coord).unwrap();
    fs::create_dir(&coord).unwrap();
    let not_mounted =
        ["there is no weir-coordinator.toml", "hint: its file system may not be mounted", "/coord"];
    says(&refused(&coord_starts), &not_mounted);
    says(&up_is_refused(&cluster), &not_mounted);
    assert!(is_empty(&coord), "nothing was touched");
    fs::remove_dir(&coord).unwrap();
    copy(&other.dir().join("coord"), &coord);
    says(&refused(&coord_starts), &["directory holds cluster", "hint: correct the path"]);
    fs::remove_dir_all(&coord).unwrap();
    fs::rename(&own_coord, &coord).unwrap();
    says(&refused(&["coord", "--config", &coord_config, "--new"]), &["hint: omit --new"]);
    cluster.up();
    files.are_right(5);
}

#[test]
fn an_older_copy_of_the_coordinators_directory_is_refused() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let files = Files(cluster.mount().to_path_buf());
    let dir = cluster.dir();
    let [coord, own, old] = ["coord", "coord-own", "coord-old"].map(|name| dir.join(name));
    let down = || assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    (0..2).for_each(|n| files.write(n));
    down();
    copy(&coord, &old);
    cluster.up(); // the nodes return: the map changes
    (2..4).for_each(|n| files.write(n));
    down();
    fs::rename(&coord, &own).unwrap();
    copy(&old, &coord);
    let is_older = ["the coordinator's directory is an older copy", "hint: put the newest one back"];
    says(&up_is_refused(&cluster), &is_older);
    for name in ["coord", "meta", "storage-1", "mount-1"] {
        assert_eq!(cluster.pid(name), None, "a failed start ends {name}, which it started");
    }

    // Each role that knows more refuses it for itself.
    down();
    let pid_file = dir.join("old.pid");
    let config = |name: &str| dir.join(format!("etc/{name}.toml")).display().to_string();
    let mut role =
        Role::start(&["coord", "--config", &config("coord"), "--pid-file", pid_file.to_str().unwrap()]);
    wait_until("the coordinator serves", PATIENCE, || serves(&pid_file));
    for (role, name) in [("meta", "meta"), ("storage", "storage-1")] {
        says(&refused(&[role, "--config", &config(name)]), &is_older);
    }
    role.end();
    down();
    fs::remove_dir_all(&coord).unwrap();
    fs::rename(&own, &coord).unwrap();
    cluster.up();
    files.are_right(4);
}

#[test]
fn an_abandoned_namespace_is_founded_again_and_empty() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let files = Files(cluster.mount().to_path_buf());
    (0..3).for_each(|n| files.write(n));
    stop(&cluster, "meta");
    let (dir, config) =
        (cluster.dir().join("meta"), cluster.dir().join("etc/meta.toml").display().to_string());
    fs::remove_dir_all(&dir).unwrap();
    let founding = refused(&["meta", "--config", &config, "--new"]);
    let old_uuid = founding.split("--instead-of ").nth(1).unwrap().trim();
    let wrong = refused(&["meta", "--config", &config, "--new", "--instead-of", &"0".repeat(32)]);
    says(&wrong, &["namespace \"root\" is", "not 0000"]);
    assert!(!dir.exists(), "nothing was made");

    let pid_file = cluster.dir().join("founding.pid");
    let pid_path = pid_file.display().to_string();
    let mut role = Role::start(&[
        "meta",
        "--config",
        &config,
        "--pid-file",
        &pid_path,
        "--new",
        "--instead-of",
        old_uuid,
    ]);
    wait_until("the new namespace is served", PATIENCE, || serves(&pid_file));
    role.end();
    assert!(weir(&["down", "--dir", cluster.dir().to_str().unwrap()]).status.success());
    cluster.up();
    assert!(is_empty(cluster.mount()), "it is a new namespace");
    for n in 0..3 {
        let path = cluster.mount().join(format!("f{n}"));
        let file = fs::File::create_new(&path).unwrap();
        file.set_len(BYTES as u64).unwrap();
        assert!(
            fs::read(&path).unwrap() == vec![0; BYTES],
            "a sparse file shows bytes of the namespace before"
        );
        file.write_all_at(b"N", 5000).unwrap();
        file.sync_all().unwrap();
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == BYTES && bytes[5000] == b'N', "{n}");
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1, "{n}");
    }
}
