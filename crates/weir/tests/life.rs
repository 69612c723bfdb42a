//! Claim: a mount that was stopped for too long loses its rights, reports its losses, and works on; one that
//! was stopped shortly loses nothing; one whose process died is replaced at once.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::locker::Locker;
use common::{Cluster, can_mount, ends, errno, has, shell, wait_until};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The lease term of `weir up`.
const TERM: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);
/// The kernel's kind of a FUSE mount.
const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;

#[test]
fn a_stopped_mount_loses_its_rights_and_says_so() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let [a_dir, b_dir] = [0, 1].map(|n| cluster.mounts[n].display().to_string());
    let (mut a, mut b) = (Locker::start(), Locker::start());
    for name in ["f", "g"] {
        assert_eq!(a.ask(&format!("open {name} {a_dir}/{name}")), "ok");
    }
    assert_eq!(a.ask("write f saved"), "ok");
    assert_eq!(a.ask("fsync f"), "ok");
    assert_eq!(a.ask("flock f ex"), "ok");
    assert_eq!(a.ask("write g unsaved"), "ok");
    let stopped = cluster.stop("mount-1");

    // The other mount takes over when the term is over.
    assert_eq!(b.ask(&format!("open f {b_dir}/f")), "ok");
    wait_until("the lock is free", PATIENCE, || b.ask("flock f ex") == "ok");
    assert_eq!(b.ask("read f"), "saved");
    assert_eq!(b.ask("write f newer"), "ok");
    assert_eq!(b.ask("fsync f"), "ok");
    assert_eq!(b.ask(&format!("open g {b_dir}/g")), "ok");
    assert_eq!(b.ask("read g"), "");
    assert_eq!(b.ask("write g other"), "ok");
    assert_eq!(b.ask("fsync g"), "ok");
    let status = cluster.status();
    let mount = status["mounts"].as_array().unwrap().iter().find(|m| m["name"] == "mount-1").unwrap();
    assert_eq!(mount["state"], "does not answer", "{status:#}");

    drop(stopped);
    // The open file that had the lock does nothing any more; the one with lost changes reports it once.
    assert_eq!(a.ask("write f stale"), "EIO");
    assert_eq!(a.ask("fsync f"), "EIO");
    assert_eq!(a.ask("fsync g"), "EIO");
    assert_eq!(a.ask("fsync g"), "ok");
    assert_eq!(a.ask("close f"), "EIO");
    // New opens work, and see what the other wrote.
    assert_eq!(a.ask(&format!("open f {a_dir}/f")), "ok");
    assert_eq!(a.ask("read f"), "newer");
    assert_eq!(a.ask("flock f ex"), "EAGAIN");
    assert_eq!(a.ask("read g"), "other");
    assert_eq!(a.ask("write f again"), "ok");
    assert_eq!(a.ask("fsync f"), "ok");
    wait_until("the other sees it", PATIENCE, || b.ask("read f") == "again");

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
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let (fa, fb) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let (mut a, mut b) = (Locker::new(&fa), Locker::new(&fb));
    assert_eq!(a.ask("flock f ex"), "ok");
    assert_eq!(a.ask("write f unsaved"), "ok");
    let stopped = cluster.stop("mount-1");
    std::thread::sleep(TERM / 2); // the claim is about this time
    drop(stopped);
    assert_eq!(a.ask("fsync f"), "ok");
    assert_eq!(b.ask("read f"), "unsaved");
    assert_eq!(b.ask("flock f ex"), "EAGAIN");
    assert_eq!(a.ask("write f goes-on"), "ok");
    assert_eq!(a.ask("flock f un"), "ok");
    assert_eq!(b.ask("flock f ex"), "ok");
    assert_eq!(b.ask("read f"), "goes-on");
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
    assert!(!ends("a mount over a living one", &mut alive, PATIENCE).success());
    let mut printed = String::new();
    alive.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(printed.contains("alive"), "{printed}");

    cluster.kill("mount-1");
    assert_eq!(errno(fs::read(path.join("f"))), libc::ENOTCONN);
    let not_asked_for = ends("a mount over a dead one", &mut mount(false), PATIENCE);
    assert!(!not_asked_for.success(), "only if it is asked for");
    let mut again = mount(true);
    wait_until("the mount is there again", PATIENCE, || {
        rustix::fs::statfs(&path).is_ok_and(|fs| fs.f_type == FUSE_SUPER_MAGIC)
    });
    // The leader notices the death: files that the dead one had the right to change are available.
    assert_eq!(fs::read(path.join("f")).unwrap(), b"hello");
    shell(&format!("kill -TERM {}", again.id()));
    assert!(ends("the mount", &mut again, PATIENCE).success());
    // `weir up` does the same.
    cluster.up();
    assert_eq!(fs::read(path.join("f")).unwrap(), b"hello");
    cluster.kill("mount-1");
    cluster.up();
    assert_eq!(fs::read(path.join("f")).unwrap(), b"hello");
}
