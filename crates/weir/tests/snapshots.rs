//! Claim: a snapshot shows a volume as it was, through any mount and after any later change; a user restores
//! files from it without help; and its space is freed when it is removed.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{
    Cluster, can_mount, copy, errno, find, pattern, refused_volume as refused, same_contents, text, volume,
    wait_until, weir,
};
use rustix::fs::FlockOperation;
use serde_json::Value;
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(90);

/// Names, contents, modes, owners, times and links.
fn same(a: &Path, b: &Path) {
    same_contents(a, b);
    let facts = |top| find(top, &["-not", "-type", "d", "-printf", "%P %m %U %G %s %T@ %l %n\\n"]);
    assert_eq!(facts(a), facts(b));
}

fn fill(top: &Path) {
    fs::create_dir_all(top.join("d/e")).unwrap();
    fs::write(top.join("small"), b"small").unwrap();
    fs::write(top.join("d/large"), pattern(1, 9 * MIB + 777)).unwrap();
    fs::write(top.join("d/e/other"), pattern(2, 3 * MIB)).unwrap();
    fs::write(top.join("d/e/gone"), pattern(3, 200_000)).unwrap();
    fs::hard_link(top.join("d/e/other"), top.join("d/linked")).unwrap();
    symlink("d/large", top.join("symbolic")).unwrap();
    fs::set_permissions(top.join("small"), fs::Permissions::from_mode(0o640)).unwrap();
    rustix::fs::setxattr(top.join("small"), "user.colour", b"red", rustix::fs::XattrFlags::empty()).unwrap();
}
/// Changes of all kinds.
fn change(top: &Path) {
    fs::write(top.join("small"), b"smaller and larger").unwrap();
    let large = fs::OpenOptions::new().write(true).open(top.join("d/large")).unwrap();
    large.write_all_at(b"in the middle", 5 * MIB as u64 + 3).unwrap();
    large.write_all_at(&pattern(9, MIB), 9 * MIB as u64).unwrap();
    large.sync_all().unwrap();
    fs::OpenOptions::new().write(true).open(top.join("d/e/other")).unwrap().set_len(1_234_567).unwrap();
    fs::remove_file(top.join("d/e/gone")).unwrap();
    fs::rename(top.join("d/e"), top.join("moved")).unwrap();
    fs::remove_file(top.join("symbolic")).unwrap();
    fs::create_dir(top.join("symbolic")).unwrap();
    fs::write(top.join("symbolic/new"), b"new").unwrap();
    fs::set_permissions(top.join("small"), fs::Permissions::from_mode(0o600)).unwrap();
    rustix::fs::setxattr(top.join("small"), "user.colour", b"blue", rustix::fs::XattrFlags::empty()).unwrap();
}

#[test]
fn a_snapshot_shows_the_volume_as_it_was() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    let mount = cluster.mount();
    fill(&top);
    let outside = tempfile::tempdir().unwrap();
    let before = outside.path().join("copy");
    copy(&top, &before);
    let mut open =
        fs::OpenOptions::new().write(true).create(true).truncate(true).open(top.join("open")).unwrap();
    open.write_all(b"before").unwrap();
    volume(&cluster, &["snapshot", "data", "monday"]);
    open.write_all(b" and after").unwrap();
    fs::write(before.join("open"), b"before").unwrap();
    let then = top.join(".snapshots/monday");
    let of = |path: &Path| fs::symlink_metadata(path.join("open")).unwrap();
    let time = rustix::fs::Timespec { tv_sec: of(&then).mtime(), tv_nsec: of(&then).mtime_nsec() };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(rustix::fs::CWD, before.join("open"), &times, rustix::fs::AtFlags::empty())
        .unwrap();
    fs::set_permissions(before.join("open"), of(&then).permissions()).unwrap();
    same(&before, &then);
    change(&top);
    same(&before, &then);
    // Seen by listing the snapshots, but not by listing the volume.
    assert!(!fs::read_dir(&top).unwrap().any(|e| e.unwrap().file_name() == ".snapshots"));
    let names: Vec<_> =
        fs::read_dir(top.join(".snapshots")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["monday"]);
    assert_eq!(fs::metadata(top.join("d/.snapshots")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    assert!(fs::metadata(mount.join(".snapshots/monday")).is_err(), "of another volume");
    let mut colour = [0; 16];
    let n = rustix::fs::getxattr(then.join("small"), "user.colour", &mut colour).unwrap();
    assert_eq!(&colour[..n], b"red");
    // It cannot be changed.
    assert_eq!(errno(fs::write(then.join("small"), b"x")), libc::EROFS);
    assert_eq!(errno(fs::remove_file(then.join("small"))), libc::EROFS);
    assert_eq!(errno(fs::create_dir(then.join("x"))), libc::EROFS);
    assert_eq!(errno(fs::rename(then.join("small"), top.join("x"))), libc::EROFS);
    assert_eq!(errno(fs::create_dir(top.join(".snapshots/x"))), libc::EROFS);
    assert_eq!(errno(fs::remove_dir(top.join(".snapshots"))), libc::EROFS);
    assert_eq!(errno(fs::rename(top.join(".snapshots"), top.join("x"))), libc::EROFS);
    // Parts of a file, and a copy as users make one.
    let mut large = fs::File::open(then.join("d/large")).unwrap();
    large.seek(SeekFrom::Start(5 * MIB as u64)).unwrap();
    let mut part = vec![0; 100];
    large.read_exact(&mut part).unwrap();
    assert_eq!(part, pattern(1, 9 * MIB + 777)[5 * MIB..5 * MIB + 100]);
    assert!(Command::new("cp").args([then.join("d/large"), top.join("back")]).status().unwrap().success());
    assert_eq!(fs::read(top.join("back")).unwrap(), pattern(1, 9 * MIB + 777));
    assert!(refused(&cluster, &["snapshot", "data", "monday"]).contains("already"));
    assert!(refused(&cluster, &["delete", "data", "--force"]).contains("snapshots"));
    drop((large, open));
    // It stays when everything starts again.
    cluster.kill_all();
    cluster.up();
    same(&before, &then);
}

#[test]
fn a_user_puts_back_what_was_in_a_snapshot() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    fill(&top);
    let outside = tempfile::tempdir().unwrap();
    let before = outside.path().join("copy");
    copy(&top, &before);
    volume(&cluster, &["snapshot", "data", "s"]);
    change(&top);
    fs::rename(top.join("moved"), top.join("d/e")).unwrap();
    fs::write(top.join("small"), "newer").unwrap();
    fs::write(top.join("d/made since"), "new").unwrap();
    // The restored file, and the name under which the former one is kept.
    let restore = |path: &str| -> Option<PathBuf> {
        let output = weir(&["volume", "restore", top.join(path).to_str().unwrap(), "--from", "s", "--json"]);
        assert!(output.status.success(), "{path}: {}", text(&output.stderr));
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
        printed["kept"].as_str().map(PathBuf::from)
    };
    let newer = restore("small").unwrap();
    assert_eq!(fs::read(top.join("small")).unwrap(), b"small");
    assert_eq!(fs::read(&newer).unwrap(), b"newer");
    let directory = restore("symbolic").unwrap();
    assert_eq!(fs::read(directory.join("new")).unwrap(), b"new");
    assert_eq!(fs::read_link(top.join("symbolic")).unwrap(), Path::new("d/large"));
    assert_eq!(restore("d/e/gone"), None, "nothing was there");
    assert_eq!(fs::read(top.join("d/e/gone")).unwrap(), pattern(3, 200_000));
    let tree = restore("d").unwrap();
    assert_eq!(fs::read(tree.join("made since")).unwrap(), b"new");
    // Without these all is as it was.
    fs::remove_file(newer).unwrap();
    for kept in [directory, tree] {
        fs::remove_dir_all(kept).unwrap();
    }
    same_contents(&before, &top);
    let output = weir(&["volume", "restore", top.join("d").to_str().unwrap(), "--from", "never"]);
    let printed = text(&output.stderr);
    assert!(
        printed.contains("volume data has no snapshot \"never\"\nhint: it has, the newest first: s\n"),
        "{printed}"
    );
}

/// A process that writes its pid to a file, and ends with the test.
struct Announced(PathBuf);

impl Drop for Announced {
    fn drop(&mut self) {
        if let Ok(pid) = fs::read_to_string(&self.0) {
            let _ = Command::new("kill").arg(pid.trim()).status();
        }
    }
}

/// In any directory: a restore needs only `.snapshots` of a mount.
#[test]
fn a_restore_that_is_killed_loses_nothing() {
    let root = tempfile::tempdir().unwrap();
    let (top, tools) = (root.path().join("top"), root.path().join("tools"));
    let [then, now] = [top.join(".snapshots/s/d"), top.join("d")];
    for dir in [&then, &now, &tools] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(then.join("a"), "old").unwrap();
    fs::write(now.join("a"), "newer").unwrap();
    fs::write(now.join("made since"), "new").unwrap();
    // A cp that copies a half, reports its pid, and stops.
    let (cp, printed) = (tools.join("cp"), tools.join("pid"));
    let copying = Announced(printed.clone());
    let script = format!(
        "#!/bin/sh\nmkdir \"$5\"\necho $$ > {0}.new\nmv {0}.new {0}\nexec sleep 1000\n",
        printed.display()
    );
    fs::write(&cp, script).unwrap();
    fs::set_permissions(&cp, fs::Permissions::from_mode(0o755)).unwrap();
    let command = |path: String| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.args(["volume", "restore", "--from", "s", "--json"]).arg(&now).env("PATH", path);
        command
    };
    let path = std::env::var("PATH").unwrap();
    let mut begun = command(format!("{}:{path}", tools.display())).spawn().unwrap();
    wait_until("it copies", PATIENCE, || printed.exists());
    begun.kill().unwrap();
    begun.wait().unwrap();
    drop(copying);
    assert_eq!(fs::read(now.join("a")).unwrap(), b"newer");
    assert_eq!(fs::read(now.join("made since")).unwrap(), b"new");
    // The next one is complete, and keeps the existing files.
    let output = command(path).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let kept: Value = serde_json::from_slice(&output.stdout).unwrap();
    let kept = Path::new(kept["kept"].as_str().unwrap());
    assert_eq!(fs::read(now.join("a")).unwrap(), b"old");
    assert_eq!(fs::read(kept.join("a")).unwrap(), b"newer");
    assert_eq!(fs::read(kept.join("made since")).unwrap(), b"new");
}

#[test]
fn the_space_of_a_removed_snapshot_is_freed() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    for n in 0..4u8 {
        fs::write(top.join(n.to_string()), pattern(n.into(), 8 * MIB)).unwrap();
    }
    volume(&cluster, &["snapshot", "data", "s"]);
    let output = weir(&["volume", "snapshots", "data", "--dir", cluster.dir().to_str().unwrap()]);
    assert!(text(&output.stdout).contains("UTC"), "{}", text(&output.stdout));
    let full = 32 * MIB as u64;
    wait_until("the files are on targets", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used >= full)
    });
    fs::remove_file(top.join("0")).unwrap();
    fs::OpenOptions::new().write(true).truncate(true).open(top.join("1")).unwrap();
    fs::write(top.join("2"), pattern(99, 8 * MIB)).unwrap();
    assert_eq!(fs::read(top.join(".snapshots/s/0")).unwrap(), pattern(0, 8 * MIB));
    wait_until("both are on targets", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used >= full + 8 * MIB as u64)
    });
    volume(&cluster, &["snapshot", "data", "s", "--delete"]);
    assert_eq!(volume(&cluster, &["snapshots", "data"]), Value::Array(Vec::new()));
    assert!(fs::metadata(top.join(".snapshots/s")).is_err());
    // Two files are left; redundancy doubles them at most.
    wait_until("the space is back", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used < 2 * 2 * 8 * MIB as u64 + MIB as u64)
    });
    assert_eq!(fs::read(top.join("2")).unwrap(), pattern(99, 8 * MIB));
    assert_eq!(fs::read(top.join("3")).unwrap(), pattern(3, 8 * MIB));
    volume(&cluster, &["delete", "data", "--force"]);
}

#[test]
fn a_schedule_takes_snapshots_that_users_restore_from() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    fill(&top);
    let set = volume(&cluster, &["policy", "data", "--snapshots", "1m", "--keep", "24h,7d"]);
    assert_eq!(
        (set["snapshots_every_seconds"].as_u64(), set["snapshots_keep"].as_str()),
        (Some(60), Some("24h,7d"))
    );
    let mut taken = Vec::new();
    wait_until("the first one is taken", PATIENCE, || {
        taken = volume(&cluster, &["snapshots", "data"]).as_array().unwrap().clone();
        !taken.is_empty()
    });
    assert_eq!(taken[0]["scheduled"], true, "{taken:?}");
    let name = taken[0]["name"].as_str().unwrap();
    fs::remove_dir_all(top.join("d")).unwrap();
    let output = weir(&["volume", "restore", top.join("d").to_str().unwrap(), "--from", name]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(top.join("d/large")).unwrap(), pattern(1, 9 * MIB + 777));
    let shown = weir(&["volume", "show", "data", "--dir", cluster.dir().to_str().unwrap()]);
    assert!(text(&shown.stdout).contains("every 1m, kept: 24h,7d"), "{}", text(&shown.stdout));
    assert!(refused(&cluster, &["policy", "data", "--snapshots", "1s"]).contains("at most one"));
    assert!(refused(&cluster, &["delete", "data"]).contains("snapshots"));
    volume(&cluster, &["policy", "data", "--snapshots", "none"]);
    volume(&cluster, &["delete", "data", "--force"]);
}

#[test]
fn files_in_a_snapshot_are_locked_on_the_mount_that_reads_them() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    volume(&cluster, &["create", "data"]);
    let top = cluster.mounts[0].join("data");
    fs::write(top.join("f"), b"locked").unwrap();
    // HDF5 and SQLite lock a file before they read it, also one that they open read-only.
    let hdf5 = common::h5py().inspect(|python| {
        let code = "import h5py, sys\nwith h5py.File(sys.argv[1], 'w') as f: f['n'] = 7";
        assert!(Command::new(python).args(["-c", code]).arg(top.join("f.h5")).status().unwrap().success());
    });
    volume(&cluster, &["snapshot", "data", "monday"]);
    let then = |mount: &Path| mount.join("data/.snapshots/monday");
    let file = then(&cluster.mounts[0]).join("f");
    let open = |path: &Path| fs::File::open(path).unwrap();
    let flock = |file: &fs::File, how| rustix::fs::flock(file, how);
    let (exclusive, shared) =
        (FlockOperation::NonBlockingLockExclusive, FlockOperation::NonBlockingLockShared);

    let (a, b) = (open(&file), open(&file));
    assert_eq!(flock(&a, shared), Ok(()));
    assert_eq!(flock(&b, shared), Ok(()));
    assert_eq!(flock(&b, exclusive), Err(rustix::io::Errno::WOULDBLOCK));
    assert_eq!(flock(&a, exclusive), Ok(()), "to fail to change a lock is to lose it");
    assert_eq!(flock(&b, shared), Err(rustix::io::Errno::WOULDBLOCK));
    let elsewhere = open(&then(&cluster.mounts[1]).join("f"));
    assert_eq!(flock(&elsewhere, exclusive), Ok(()), "no mount sees the locks of another");
    // A wait ends with the last descriptor of the holder.
    let waits = std::thread::spawn(move || rustix::fs::flock(&b, FlockOperation::LockExclusive).map(|()| b));
    let copy = a.try_clone().unwrap();
    drop(a);
    assert_eq!(flock(&open(&file), exclusive), Err(rustix::io::Errno::WOULDBLOCK));
    drop(copy);
    let b = waits.join().unwrap().unwrap();
    assert_eq!(rustix::fs::fcntl_lock(&b, shared), Ok(()), "fcntl locks are others than those of flock");
    assert_eq!(rustix::fs::fcntl_lock(&b, exclusive), Err(rustix::io::Errno::BADF), "it is open for reading");
    drop((b, elsewhere));

    if let Some(python) = hdf5 {
        let code = "import h5py, sys\nwith h5py.File(sys.argv[1], 'r') as f: print(f['n'][()])";
        let mut read = Command::new(python);
        let read =
            read.args(["-c", code]).arg(file.with_file_name("f.h5")).env_remove("HDF5_USE_FILE_LOCKING");
        let read = read.output().unwrap();
        assert_eq!(text(&read.stdout), "7\n", "{}", text(&read.stderr));
    }
}
