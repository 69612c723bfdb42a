//! Claims about mounts whose requests come by io_uring: files are as over `/dev/fuse`; calls that wait stop
//! no others; a mount that is killed, cut off or detached leaves no program waiting; without a ring the mount
//! reports that.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::locker::Locker;
use common::rings::Rings;
use common::{Cluster, can_mount, ends, has, pattern, shell, text, wait_until};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster whose mounts have rings, if this kernel can.
fn with_rings(mounts: usize, options: &[&str]) -> Option<(Rings, Cluster)> {
    let rings = can_mount().then(Rings::allow).flatten()?;
    let cluster = Cluster::with(mounts, &[&["--transport", "uring"], options].concat());
    assert!(log(&cluster).contains("requests come by io_uring"), "{}", log(&cluster));
    Some((rings, cluster))
}

fn log(cluster: &Cluster) -> String {
    fs::read_to_string(cluster.dir().join("log/mount-1.log")).unwrap_or_default()
}

/// Threads of the mount that have a ring each.
fn ring_threads(cluster: &Cluster) -> usize {
    let pid = cluster.pid("mount-1").unwrap();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let name = |task: &Path| fs::read_to_string(task.join("comm")).unwrap_or_default();
    tasks.filter(|task| name(&task.as_ref().unwrap().path()).starts_with("fuser-ring")).count()
}

#[test]
fn files_over_a_ring_are_as_over_the_device() {
    let Some((_rings, cluster)) = with_rings(2, &[]) else { return };
    assert!(ring_threads(&cluster) >= 1);
    let (here, there) = (&cluster.mounts[0], &cluster.mounts[1]);
    // Names, attributes and links: short payloads, whose answers take the place of the question.
    let long = "n".repeat(255);
    fs::create_dir(here.join("dir")).unwrap();
    fs::write(here.join("dir").join(&long), b"long").unwrap();
    symlink("some/where/else", here.join("dir/link")).unwrap();
    assert_eq!(fs::read_link(there.join("dir/link")).unwrap(), Path::new("some/where/else"));
    fs::rename(here.join("dir").join(&long), here.join("dir/short")).unwrap();
    assert_eq!(fs::read(there.join("dir/short")).unwrap(), b"long");
    let value = pattern(7, 60_000);
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(here.join("dir/short"), "user.large", &value, none).unwrap();
    let mut found = vec![0; 65_536];
    let length = rustix::fs::getxattr(there.join("dir/short"), "user.large", &mut found[..]).unwrap();
    assert!(found[..length] == value, "an attribute of 60,000 bytes");
    // Data: of every size around a request's, at odd places, through both mounts.
    let mut file = File::create(here.join("data")).unwrap();
    let mut whole = Vec::new();
    for (n, bytes) in [1, 4095, 4096, 4097, 131_071, 524_289, 1_048_575, 1_048_576, 1_048_577, 5_000_001]
        .into_iter()
        .enumerate()
    {
        let part = pattern(n as u64, bytes);
        file.write_all(&part).unwrap();
        whole.extend_from_slice(&part);
    }
    file.write_all_at(b"in the middle", 700_001).unwrap();
    whole[700_001..700_014].copy_from_slice(b"in the middle");
    file.sync_all().unwrap();
    assert!(fs::read(there.join("data")).unwrap() == whole, "read through the other mount");
    let mut reader = File::open(here.join("data")).unwrap();
    reader.seek(SeekFrom::Start(699_990)).unwrap();
    let mut part = [0; 50];
    reader.read_exact(&mut part).unwrap();
    assert_eq!(part, whole[699_990..700_040]);
    // A directory of several answers.
    for n in 0..700 {
        fs::write(here.join(format!("dir/entry-{n:03}")), []).unwrap();
    }
    let listed = fs::read_dir(there.join("dir")).unwrap().count();
    assert_eq!(listed, 702);
    assert_eq!(fs::metadata(there.join("data")).unwrap().size(), whole.len() as u64);
    assert_eq!(fs::read(here.join("missing")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    assert!(!log(&cluster).contains("ERROR"), "{}", log(&cluster));
}

#[test]
fn calls_that_wait_for_a_lock_stop_no_others() {
    let Some((_rings, cluster)) = with_rings(1, &[]) else { return };
    let file = cluster.mount().join("f");
    let mut holder = Locker::new(&file);
    assert_eq!(holder.ask("flock f ex"), "ok");
    // More than the places that the rings of two processors begin with.
    let waiters = 200;
    let start = |_| Command::new("flock").arg("-x").arg(&file).arg("true").spawn().unwrap();
    let mut waiting: Vec<Child> = (0..waiters).map(start).collect();
    let mount = cluster.pid("mount-1").unwrap();
    let connection = connection(&cluster);
    wait_until("all wait for the lock", PATIENCE, || requests(&connection) >= waiters);
    for n in 0..20 {
        fs::write(cluster.mount().join(format!("other{n}")), pattern(n, 10_000)).unwrap();
    }
    assert_eq!(holder.ask("flock f un"), "ok");
    for child in &mut waiting {
        assert!(ends("a waiter", child, PATIENCE).success());
    }
    assert_eq!(cluster.pid("mount-1"), Some(mount), "the same process as before");
}

/// A program with a call that waits for servers.
fn blocked_reader(cluster: &Cluster) -> Child {
    let file = cluster.mount().join("f");
    let script = format!("cat {} > /dev/null", file.display());
    let child = Command::new("sh").args(["-c", &script]).stderr(Stdio::piped()).spawn().unwrap();
    let connection = connection(cluster);
    wait_until("a program waits", PATIENCE, || requests(&connection) > 0);
    child
}

/// That wait in the kernel for the mount.
fn requests(connection: &str) -> usize {
    let waiting = fs::read_to_string(format!("/sys/fs/fuse/connections/{connection}/waiting"));
    waiting.unwrap_or_default().trim().parse().unwrap_or(0)
}

/// The kernel's number of the mount.
fn connection(cluster: &Cluster) -> String {
    shell("mountpoint -q /sys/fs/fuse/connections || mount -t fusectl none /sys/fs/fuse/connections");
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mount = cluster.mount().to_str().unwrap();
    let line = info.lines().find(|line| line.split(' ').nth(4) == Some(mount)).unwrap();
    line.split(' ').nth(2).unwrap().rsplit_once(':').unwrap().1.to_owned()
}

/// A cluster without storage, and a reader of a file that no process has cached.
fn with_a_blocked_reader() -> Option<(Rings, Cluster, Child)> {
    let (rings, cluster) = with_rings(1, &["--targets", "1", "--scheme", "single"])?;
    fs::write(cluster.mount().join("f"), pattern(1, 3_000_000)).unwrap();
    common::weir(&["unmount", cluster.mount().to_str().unwrap()]);
    wait_until("the mount has ended", PATIENCE, || cluster.pid("mount-1").is_none());
    cluster.up();
    cluster.kill("storage-1");
    let reader = blocked_reader(&cluster);
    Some((rings, cluster, reader))
}

#[test]
fn a_killed_mount_with_rings_leaves_no_program_waiting() {
    let Some((_rings, cluster, mut reader)) = with_a_blocked_reader() else { return };
    cluster.kill("mount-1");
    assert!(!ends("the reader of a killed mount", &mut reader, PATIENCE).success());
    assert!(fs::metadata(cluster.mount()).is_err(), "the mount is dead");
    cluster.up();
    assert_eq!(fs::read(cluster.mount().join("f")).unwrap(), pattern(1, 3_000_000));
}

#[test]
fn a_connection_that_is_cut_ends_the_mount_with_rings() {
    let Some((_rings, cluster, mut reader)) = with_a_blocked_reader() else { return };
    fs::write(format!("/sys/fs/fuse/connections/{}/abort", connection(&cluster)), "1").unwrap();
    assert!(!ends("the reader of a mount that was cut off", &mut reader, PATIENCE).success());
    wait_until("the mount's process has ended", PATIENCE, || cluster.pid("mount-1").is_none());
    cluster.up();
    assert_eq!(fs::read(cluster.mount().join("f")).unwrap(), pattern(1, 3_000_000));
}

#[test]
fn a_mount_with_rings_is_taken_away_while_calls_wait() {
    let Some((_rings, cluster, mut reader)) = with_a_blocked_reader() else { return };
    let lazy = common::weir(&["unmount", "--lazy", cluster.mount().to_str().unwrap()]);
    assert!(lazy.status.success(), "{}", text(&lazy.stderr));
    let down = common::weir(&["down", "--dir", cluster.dir().to_str().unwrap()]);
    assert!(down.status.success(), "{}", text(&down.stderr));
    ends("the reader of a mount that was taken away", &mut reader, PATIENCE);
    assert_eq!(cluster.pid("mount-1"), None);
}

/// `weir up` with a mount by a transport that it does not have: its message.
fn up(cluster: &Cluster, before: &[&str], transport: &str) -> std::process::Output {
    let words = cluster.words_of_up();
    let mut command = Command::new(before.first().copied().unwrap_or(&words[0]));
    let rest = if before.is_empty() { &words[1..] } else { &words[..] };
    command.args(before.iter().skip(1)).args(rest).args(["--transport", transport]).output().unwrap()
}

#[test]
fn a_mount_without_a_ring_says_why_and_what_to_do() {
    let Some(_rings) = can_mount().then(Rings::forbid).flatten() else { return };
    let mut cluster = Cluster::with(0, &[]);
    cluster.mounts.push(cluster.dir().parent().unwrap().join("mnt"));
    let refused = up(&cluster, &[], "uring");
    assert!(!refused.status.success());
    let printed = text(&refused.stderr);
    assert!(printed.contains("the kernel offers no FUSE over io_uring"), "{printed}");
    assert!(printed.contains("enable_uring"), "{printed}");
    assert!(!shell("cat /proc/self/mountinfo").contains(cluster.mount().to_str().unwrap()));
    let mounted = up(&cluster, &[], "auto");
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    let log = log(&cluster);
    assert!(log.contains("requests come by /dev/fuse: the kernel offers no FUSE over io_uring"), "{log}");
    fs::write(cluster.mount().join("f"), b"by the device").unwrap();
}

#[test]
fn a_ring_that_memory_limits_forbid_is_an_error() {
    let Some(_rings) = can_mount().then(Rings::allow).flatten() else { return };
    if !has("setpriv") || !has("prlimit") {
        return;
    }
    let mut cluster = Cluster::with(0, &[]);
    cluster.mounts.push(cluster.dir().parent().unwrap().join("mnt"));
    let limited =
        ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=4096:4096"];
    let refused = up(&cluster, &limited, "uring");
    let printed = text(&refused.stderr);
    assert!(
        !refused.status.success() && printed.contains("io_uring") && printed.contains("memory"),
        "{printed}"
    );
    let mounted = up(&cluster, &limited, "auto");
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    assert!(log(&cluster).contains("requests come by /dev/fuse"), "{}", log(&cluster));
    fs::write(cluster.mount().join("f"), b"by the device").unwrap();
}
