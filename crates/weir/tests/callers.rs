//! Claim: a mount answers for the calling thread, with the groups, capabilities and rights that it has in
//! that call, and times are those that a program set last.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::PATIENCE;
use common::{Cluster, can_mount, has, shell, text, volume};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

/// A cluster with directories that all users may pass.
fn cluster(mounts: usize) -> Cluster {
    let cluster = Cluster::start(mounts);
    let above = cluster.mount().parent().unwrap();
    fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
    cluster
}

/// Runs a program as user and group 1234, with more options of setpriv(1).
fn as_user(options: &[&str], program: &[&str]) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=1234", "--regid=1234"]).args(options).args(program).output().unwrap()
}

/// Runs a Python script with these files as its arguments; returns its output.
fn python(script: &str, files: &[&Path]) -> String {
    let output = Command::new("python3").args(["-c", script]).args(files).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_program_runs_without_read_permission() {
    if !can_mount() {
        return;
    }
    let cluster = cluster(1);
    volume(&cluster, &["create", "data"]);
    let top = cluster.mount().join("data");
    let (program, script) = (top.join("program"), top.join("script"));
    fs::copy("/bin/echo", &program).unwrap();
    fs::write(&script, "#!/bin/sh\necho script\n").unwrap();
    for file in [&program, &script] {
        fs::set_permissions(file, fs::Permissions::from_mode(0o711)).unwrap();
    }
    volume(&cluster, &["snapshot", "data", "then"]);
    for dir in [top.clone(), top.join(".snapshots/then")] {
        let (program, script) = (dir.join("program"), dir.join("script"));
        let run = as_user(&["--clear-groups"], &[program.to_str().unwrap(), "it runs"]);
        assert_eq!(text(&run.stdout), "it runs\n", "{}", text(&run.stderr));
        assert!(!as_user(&["--clear-groups"], &["cat", program.to_str().unwrap()]).status.success());
        // The interpreter opens a script like any program.
        assert!(!as_user(&["--clear-groups"], &[script.to_str().unwrap()]).status.success());
    }
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    assert!(!as_user(&["--clear-groups"], &[program.to_str().unwrap()]).status.success());
}

/// A process in exec holds the lock of its environment and of its counters while it closes its files: a mount
/// that reads these before it answers waits for a process that waits for the mount.
#[test]
fn a_program_that_closes_files_in_exec_is_answered() {
    if !can_mount() {
        return;
    }
    let cluster = cluster(1);
    let path = cluster.mount().join("closed-in-exec");
    let (ended, end) = std::sync::mpsc::channel();
    // A thread of its own: a process that is stuck in exec blocks its parent.
    std::thread::spawn(move || {
        for n in 0..40 {
            let mut file = fs::File::create(&path).unwrap();
            file.write_all(format!("{n}").as_bytes()).unwrap();
            // The child's copy of the file is closed by exec.
            let status = Command::new("true").status();
            let read = fs::read_to_string(&path);
            if ended.send((status, read, n)).is_err() {
                return;
            }
        }
    });
    for n in 0..40 {
        let (status, read, of) = end.recv_timeout(PATIENCE).expect("a program is stuck in exec");
        assert!(status.unwrap().success());
        assert_eq!((read.unwrap(), of), (n.to_string(), n));
    }
}

#[test]
fn trusted_attributes_are_listed_with_the_capability_only() {
    if !can_mount() || !has("setfattr") {
        return;
    }
    let cluster = cluster(1);
    volume(&cluster, &["create", "data"]);
    let top = cluster.mount().join("data");
    let file = top.join("f");
    fs::write(&file, b"x").unwrap();
    for name in ["trusted.a", "user.b"] {
        rustix::fs::setxattr(&file, name, b"1", rustix::fs::XattrFlags::empty()).unwrap();
    }
    volume(&cluster, &["snapshot", "data", "then"]);
    for file in [file, top.join(".snapshots/then/f")] {
        let list = format!("getfattr --absolute-names -m - {} | grep -v '^#' | xargs", file.display());
        let names = |before: &str| shell(&format!("{before} sh -c '{list}'"));
        assert_eq!(names(""), "trusted.a user.b\n");
        assert_eq!(names("setpriv --reuid=1234 --regid=1234 --clear-groups"), "user.b\n");
        assert_eq!(names("setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin"), "user.b\n");
        assert_eq!(
            names("unshare --user --map-root-user"),
            "user.b\n",
            "root of a user namespace is none here"
        );
    }
}

/// As file servers have it: one thread acts for one client after the other. Its system calls are raw, since
/// those of the C library are for all threads.
const SERVER: &str = r#"
import ctypes, os, sys, threading
call = ctypes.CDLL(None, use_errno=True).syscall
SETGROUPS, SETFSUID, SETFSGID = 116, 122, 123
def act_for(uid, gid, groups):
    call(SETFSUID, 0); call(SETFSGID, 0)
    assert call(SETGROUPS, len(groups), (ctypes.c_uint * len(groups))(*groups)) == 0
    call(SETFSGID, gid); call(SETFSUID, uid)
group, everybody = sys.argv[1:]
def make(directory, name):
    try: os.close(os.open(f'{directory}/{name}', os.O_CREAT | os.O_WRONLY)); return 'ok'
    except PermissionError: return 'denied'
def serve():
    for n, groups in enumerate([[], [5555], [], [5555, 6666], [6666]]):
        act_for(1234, 1234, groups)
        # The kernel asks nobody where it refuses itself; here the metadata leader gets the groups in any case.
        assert make(everybody, f'f{n}') == 'ok'
        print(make(group, f'f{n}'))
    act_for(1234, 5555, []); print(make(group, 'own'), os.stat(group + '/own').st_gid)
thread = threading.Thread(target=serve); thread.start(); thread.join()
"#;

#[test]
fn a_thread_has_the_groups_of_the_call() {
    if !can_mount() || !has("python3") || !cfg!(target_arch = "x86_64") {
        return;
    }
    let cluster = cluster(1);
    let (dir, open) = (cluster.mount().join("group"), cluster.mount().join("everybody"));
    for dir in [&dir, &open] {
        fs::create_dir(dir).unwrap();
    }
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::chown(&dir, Some(0), Some(5555)).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o770)).unwrap();
    let printed = python(SERVER, &[&dir, &open]);
    assert_eq!(printed.lines().collect::<Vec<_>>(), ["denied", "ok", "denied", "ok", "denied", "ok 5555"]);
    // Many groups, of which one counts.
    let many: Vec<String> = (7000..7070).chain([5555]).map(|g| g.to_string()).collect();
    let made =
        as_user(&[&format!("--groups={}", many.join(","))], &["touch", dir.join("m").to_str().unwrap()]);
    assert!(made.status.success(), "{}", text(&made.stderr));
}

/// Stores through a mapping and sets times in different orders; prints the modification time after each.
const MAPPED: &str = r#"
import mmap, os, sys
path, other = sys.argv[1:]
def shown():
    here, there = os.stat(path).st_mtime, os.stat(other).st_mtime
    assert here == there, (here, there)
    print('set' if here == 1e9 else 'now')
for size in (10, 3 << 20):
    with open(path, 'wb') as f: f.write(b'x' * size)
    fd = os.open(path, os.O_RDWR); m = mmap.mmap(fd, size)
    m[0:1] = b'a'; os.utime(path, (1e9, 1e9)); m.close(); os.close(fd)
    shown()
    fd = os.open(path, os.O_RDWR); m = mmap.mmap(fd, size)
    m[1:2] = b'b'; os.utime(fd, (1e9, 1e9)); m[2:3] = b'c'; m.close(); os.close(fd)
    shown()
    os.utime(path, (1e9, 1e9))
    fd = os.open(path, os.O_RDWR); m = mmap.mmap(fd, size)
    m[3:4] = b'd'; m.close(); os.close(fd)
    shown()
    with open(other, 'rb') as f: print(f.read(5).decode())
"#;

#[test]
fn times_that_were_set_after_a_store_through_a_mapping_stay() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = cluster(2);
    let printed = python(MAPPED, &[&cluster.mounts[0].join("f"), &cluster.mounts[1].join("f")]);
    let once = ["set", "now", "now", "abcdx"];
    assert_eq!(printed.lines().collect::<Vec<_>>(), [once, once].concat());
}

#[test]
fn opening_with_truncation_sets_the_times_of_an_empty_file() {
    if !can_mount() {
        return;
    }
    let cluster = cluster(1);
    let file = cluster.mount().join("stamp");
    fs::write(&file, b"").unwrap();
    shell(&format!("touch -d @1000000000 {}", file.display()));
    let before = fs::metadata(&file).unwrap();
    assert_eq!(before.mtime(), 1_000_000_000);
    fs::write(&file, b"").unwrap();
    let after = fs::metadata(&file).unwrap();
    assert!(after.mtime() > before.mtime() && after.ctime() >= before.ctime());
}
