//! Claim: the owner of a file that was removed from a volume with trash can restore it, and the trash never
//! takes space that new files need.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::Bench;
use common::{Cluster, can_mount, copy, pattern, same_contents, text, volume, wait_until, weir};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(90);

/// The newest part of a volume's trash.
fn part(top: &Path) -> PathBuf {
    let parts = fs::read_dir(top.join(".trash")).unwrap().map(|e| e.unwrap().path());
    parts.max().expect("something is in the trash")
}
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
fn rm_rf(path: &Path) {
    let output = Command::new("rm").arg("-rf").arg(path).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}
fn in_trash(cluster: &Cluster) -> u64 {
    volume(cluster, &["show", "data"])["trash_files"].as_u64().unwrap()
}

#[test]
fn files_removed_by_mistake_are_restored() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    volume(&cluster, &["policy", "data", "--trash", "7d"]);
    fs::create_dir_all(top.join("d/e/empty")).unwrap();
    fs::write(top.join("d/large"), pattern(1, 9 * MIB + 777)).unwrap();
    fs::write(top.join("d/e/small"), b"small").unwrap();
    symlink("../large", top.join("d/e/symbolic")).unwrap();
    fs::set_permissions(top.join("d/e"), fs::Permissions::from_mode(0o711)).unwrap();
    let outside = tempfile::tempdir().unwrap();
    let before = outside.path().join("d");
    copy(&top.join("d"), &before);
    assert_eq!(names(&top), ["d"], "no listing shows the trash");
    let mut open = fs::File::open(top.join("d/large")).unwrap();
    rm_rf(&top.join("d"));
    assert_eq!(names(&top), Vec::<String>::new());
    // A process that has it open reads on.
    let mut bytes = Vec::new();
    open.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, pattern(1, 9 * MIB + 777));
    // It is in the trash as it was, and counts.
    let there = part(&top).join("d");
    same_contents(&before, &there);
    assert_eq!(fs::metadata(there.join("e")).unwrap().mode() & 0o7777, 0o711);
    assert!(there.join("e/empty").is_dir());
    let shown = volume(&cluster, &["show", "data"]);
    assert_eq!((shown["trash_files"].as_u64(), shown["files"].as_u64()), (Some(3), Some(3)), "{shown}");
    assert!(shown["trash_bytes"].as_u64().unwrap() >= 9 * MIB as u64, "{shown}");
    // Moved back by hand; and a second time, by command, after a restart of everything.
    fs::rename(&there, top.join("d")).unwrap();
    same_contents(&before, &top.join("d"));
    rm_rf(&top.join("d"));
    fs::File::open(&top).unwrap().sync_all().unwrap();
    cluster.kill_all();
    cluster.up();
    fs::create_dir(top.join("d")).unwrap();
    fs::write(top.join("d/large"), b"anew").unwrap();
    let restore = |path: &str| weir(&["volume", "restore", top.join(path).to_str().unwrap(), "--trash"]);
    let output = restore("d");
    assert!(
        !output.status.success() && text(&output.stderr).contains("d/large: exists already"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(fs::read(top.join("d/large")).unwrap(), b"anew");
    assert_eq!(fs::read(top.join("d/e/small")).unwrap(), b"small", "files whose names are free are restored");
    fs::rename(top.join("d/large"), top.join("d/other")).unwrap();
    let output = restore("d/large");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(top.join("d/large")).unwrap(), pattern(1, 9 * MIB + 777));
    // A file removed from the trash is gone.
    let f = top.join("d/e/small");
    fs::remove_file(&f).unwrap();
    rm_rf(&part(&top).join("d"));
    assert!(!restore("d/e/small").status.success());
}

#[test]
fn the_trash_is_never_in_the_way() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    volume(&cluster, &["create", "data", "--bytes", "40MiB", "--inodes", "60"]);
    volume(&cluster, &["policy", "data", "--trash", "7d"]);
    let top = cluster.mount().join("data");
    // Five times the bytes that fit at once.
    for n in 0..10u64 {
        fs::write(top.join("f"), pattern(n, 20 * MIB)).unwrap();
        assert_eq!(fs::read(top.join("f")).unwrap(), pattern(n, 20 * MIB));
        fs::remove_file(top.join("f")).unwrap();
    }
    assert!(in_trash(&cluster) >= 1, "and something is left of it");
    for n in 0..300 {
        fs::write(top.join("g"), n.to_string()).unwrap();
        fs::remove_file(top.join("g")).unwrap();
    }
    // Existing files fill a volume as ever.
    fs::write(top.join("f"), pattern(1, 30 * MIB)).unwrap();
    let mut more = fs::File::create(top.join("more")).unwrap();
    let refused = more.write_all(&pattern(2, 20 * MIB)).and_then(|()| more.sync_all()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EDQUOT));
    assert_eq!(fs::read(top.join("f")).unwrap(), pattern(1, 30 * MIB));
}

#[test]
fn expired_trash_is_purged_and_its_space_is_freed() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    volume(&cluster, &["policy", "data", "--trash", "7d"]);
    for n in 0..200 {
        fs::create_dir(top.join(n.to_string())).unwrap();
        fs::write(top.join(format!("{n}/f")), pattern(n, 300_000)).unwrap();
    }
    for n in 0..200 {
        rm_rf(&top.join(n.to_string()));
    }
    assert_eq!(in_trash(&cluster), 200);
    wait_until("it is on targets", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used >= 200 * 300_000)
    });
    // Of so short a time that all of it is over; killed in the midst of it.
    volume(&cluster, &["policy", "data", "--trash", "none"]);
    wait_until("some of it goes", PATIENCE, || in_trash(&cluster) < 200);
    cluster.kill_all();
    cluster.up();
    wait_until("all of it goes", PATIENCE, || in_trash(&cluster) == 0);
    wait_until("the space is back", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used < 2 * MIB as u64)
    });
    let shown = volume(&cluster, &["show", "data"]);
    assert_eq!((shown["files"].as_u64(), shown["used_bytes"].as_u64()), (Some(0), Some(0)), "{shown}");
    assert_eq!(names(&top.join(".trash")), Vec::<String>::new());
    volume(&cluster, &["delete", "data"]);
}

#[test]
fn offline_files_are_restored_from_the_trash() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.run_weir(&["volume", "policy", "data", "--trash", "7d"]);
    bench.relate();
    let (top, home) = (&bench.data, &bench.home);
    fs::create_dir(top.join("d")).unwrap();
    let path = top.join("d/frames");
    fs::write(&path, pattern(3, 6 * MIB)).unwrap();
    bench.evict(&path);
    rm_rf(&top.join("d"));
    let there = part(top).join("d/frames");
    let day = part(top).file_name().unwrap().to_owned();
    let at_home = home.join(".trash").join(day).join("d/frames");
    wait_until("home has it in the trash", PATIENCE, || at_home.exists() && !home.join("d").exists());
    assert_eq!(fs::read(&at_home).unwrap(), pattern(3, 6 * MIB));
    // It is recalled in its present place, or in its former one.
    let mut first = vec![0; 1000];
    fs::File::open(&there).unwrap().read_exact(&mut first).unwrap();
    assert_eq!(first, pattern(3, 6 * MIB)[..1000]);
    let output = weir(&["volume", "restore", top.join("d").to_str().unwrap(), "--trash"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(&path).unwrap(), pattern(3, 6 * MIB));
    wait_until("home has it in its place", PATIENCE, || home.join("d/frames").exists());
}
