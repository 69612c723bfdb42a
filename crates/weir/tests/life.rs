//! Claim: a mount that was stopped for too long loses its rights, says what it lost, and works on; one that was stopped shortly
//! loses nothing; one whose process died is quickly replaced.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, OnPanic, can_mount, shell, text, wait_until};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The lease term of `weir up`.
const TERM: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}
fn content(file: &File) -> String {
    let mut bytes = vec![0; 100];
    let n = file.read_at(&mut bytes, 0).unwrap();
    text(&bytes[..n])
}
fn try_flock(file: &File) -> bool {
    // SAFETY: a system call on a descriptor that is open.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}
fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn a_stopped_mount_loses_its_rights_and_says_so() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let _go_on = OnPanic(|| cluster.signal("mount-1", "CONT"));
    let (a, b) = (&cluster.mounts[0], &cluster.mounts[1]);
    let (fa, ga) = (open(&a.join("f")), open(&a.join("g")));
    fa.write_all_at(b"saved", 0).unwrap();
    fa.sync_all().unwrap();
    assert!(try_flock(&fa));
    ga.write_all_at(b"never saved", 0).unwrap();
    cluster.signal("mount-1", "STOP");

    // The other mount takes over when the term is over.
    let fb = open(&b.join("f"));
    wait_until("the lock is free", PATIENCE, || try_flock(&fb));
    assert_eq!(content(&fb), "saved");
    fb.write_all_at(b"newer", 0).unwrap();
    fb.sync_all().unwrap();
    let gb = open(&b.join("g"));
    assert_eq!(content(&gb), "");
    gb.write_all_at(b"other", 0).unwrap();
    gb.sync_all().unwrap();
    let status = cluster.status();
    let mount = status["mounts"].as_array().unwrap().iter().find(|m| m["name"] == "mount-1").unwrap();
    assert_eq!(mount["state"], "does not answer", "{status:#}");

    cluster.signal("mount-1", "CONT");
    // The handle that had the lock does nothing any more; the one with lost changes tells it once.
    assert_eq!(errno(fa.write_at(b"stale", 0)), libc::EIO);
    assert_eq!(errno(fa.sync_all()), libc::EIO);
    assert_eq!(errno(ga.sync_all()), libc::EIO);
    drop((fa, ga));
    // New opens work, and see what the other wrote.
    let fa = open(&a.join("f"));
    assert_eq!(content(&fa), "newer");
    assert!(!try_flock(&fa));
    assert_eq!(fs::read_to_string(a.join("g")).unwrap(), "other");
    fa.write_all_at(b"again", 0).unwrap();
    fa.sync_all().unwrap();
    assert_eq!(content(&fb), "again");

    // Named where people look.
    let status = cluster.status();
    let troubles = status["troubles"].to_string();
    assert!(troubles.contains("mount-1") && troubles.contains("lost changes or locks"), "{troubles}");
    let log = fs::read_to_string(cluster.dir().join("log/mount-1.log")).unwrap();
    assert!(log.contains("changes that were not saved are lost"), "{log}");
    assert!(log.contains("and its locks with it"), "{log}");
}

#[test]
fn a_mount_stopped_for_half_a_term_loses_nothing() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let _go_on = OnPanic(|| cluster.signal("mount-1", "CONT"));
    let (fa, fb) = (open(&cluster.mounts[0].join("f")), open(&cluster.mounts[1].join("f")));
    assert!(try_flock(&fa));
    fa.write_all_at(b"unsaved", 0).unwrap();
    cluster.signal("mount-1", "STOP");
    std::thread::sleep(TERM / 2); // the claim is about this time
    cluster.signal("mount-1", "CONT");
    fa.sync_all().unwrap();
    assert_eq!(content(&fb), "unsaved");
    assert!(!try_flock(&fb));
    fa.write_all_at(b"goes on", 0).unwrap();
    assert_eq!(content(&fb), "goes on");
    let status = cluster.status();
    assert!(!status["troubles"].to_string().contains("lost"), "{status:#}");
}

#[test]
fn a_dead_mount_is_replaced_quickly() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let path = cluster.mount().to_path_buf();
    fs::write(path.join("f"), b"hello").unwrap();
    shell(&format!("sync -f {}", path.join("f").display()));
    let mount = |recover: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.arg("mount").arg("--dir").arg(cluster.dir()).arg(&path).args(recover.then_some("--recover"));
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // Without a death it is refused.
    let mut alive = mount(true);
    assert!(!alive.wait().unwrap().success());
    let mut said = String::new();
    alive.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("alive"), "{said}");

    cluster.kill("mount-1");
    assert_eq!(errno(fs::read(path.join("f"))), libc::ENOTCONN);
    assert!(!mount(false).wait().unwrap().success(), "only if it is asked for");
    let begun = Instant::now();
    let mut again = mount(true);
    wait_until("the mount answers again", PATIENCE, || fs::read(path.join("f")).is_ok_and(|b| b == b"hello"));
    eprintln!("a dead mount was replaced in {:?}", begun.elapsed());
    shell(&format!("kill -TERM {}", again.id()));
    assert!(again.wait().unwrap().success());
    // `weir up` does the same.
    cluster.up();
    assert_eq!(fs::read(path.join("f")).unwrap(), b"hello");
    cluster.kill("mount-1");
    cluster.up();
    assert_eq!(fs::read(path.join("f")).unwrap(), b"hello");
}
