//! Claim: locks of `fcntl` and `flock` are those of the whole cluster, and end with their holders.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::locker::Locker;
use common::{Cluster, can_mount, ends, h5py, has, text, wait_until, weir};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn locks_of(file: &Path) -> Vec<serde_json::Value> {
    let output = weir(&["file", "locks", "--json", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    shown["locks"].as_array().unwrap().clone()
}
fn waiters(file: &Path) -> usize {
    locks_of(file).iter().filter(|l| l["state"] == "waits").count()
}
fn wait_for_waiters(file: &Path, count: usize) {
    wait_until(&format!("{count} wait"), PATIENCE, || waiters(file) == count);
}

#[test]
fn locks_of_two_mounts_exclude_each_other() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let (fa, fb) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let (mut a, mut b) = (Locker::new(&fa), Locker::new(&fb));

    // fcntl: ranges.
    assert_eq!(a.ask("set f ex 0 10"), "ok");
    assert_eq!(b.ask("set f ex 5 10"), "EAGAIN");
    assert_eq!(b.ask("set f ex 10 10"), "ok");
    assert_eq!(b.ask("get f sh 0 100"), "1 0 10 0", "the process of another mount has no number here");
    assert_eq!(a.ask("set f sh 0 10"), "ok");
    assert_eq!(b.ask("set f sh 0 5"), "ok");
    assert_eq!(a.ask("set f ex 0 10"), "EAGAIN");
    assert_eq!(a.ask("set f un 2 3"), "ok");
    assert_eq!(b.ask("get f ex 2 3"), "free");
    assert_eq!(b.ask("set f un 0 0"), "ok");
    // Between two processes of one mount, too.
    let mut c = Locker::new(&fa);
    assert_eq!(c.ask("get f ex 0 2"), format!("0 0 2 {}", a.pid()));

    // The shown locks.
    let shown = locks_of(&fb);
    assert_eq!(shown.len(), 2, "{shown:?}");
    assert_eq!(shown[0]["pid"], a.pid());
    assert_eq!(
        (&shown[0]["lock"], &shown[0]["kind"], &shown[0]["range"]),
        (&"fcntl".into(), &"shared".into(), &"0-1".into())
    );
    assert!(shown[0]["client"].as_str().unwrap().contains("mount-1"), "{shown:?}");
    let table = weir(&["file", "locks", fa.to_str().unwrap()]);
    assert!(text(&table.stdout).contains(&a.pid().to_string()), "{}", text(&table.stdout));

    // A blocking wait is woken, and the winner sees what was written under the lock.
    assert_eq!(a.ask("set f ex 0 0"), "ok");
    b.begin("wait f ex 0 0");
    wait_for_waiters(&fa, 1);
    assert!(b.waits());
    assert_eq!(a.ask("write f hello"), "ok");
    assert_eq!(a.ask("set f un 0 0"), "ok");
    assert_eq!(b.end(), "ok");
    assert_eq!(b.ask("read f"), "hello");
    assert_eq!(b.ask("set f un 0 0"), "ok");

    // flock: another space, and of the open file.
    assert_eq!(a.ask("set f ex 0 0"), "ok");
    assert_eq!(b.ask("flock f ex"), "ok", "flock does not see locks of fcntl");
    assert_eq!(a.ask("flock f sh"), "EAGAIN");
    a.begin("flockw f sh");
    wait_for_waiters(&fa, 1);
    assert_eq!(b.ask("flock f sh"), "ok");
    assert_eq!(a.end(), "ok");
    assert_eq!(b.ask("flock f ex"), "EAGAIN");
    assert_eq!(a.ask("close f"), "ok");
    assert_eq!(
        b.ask("flock f ex"),
        "ok",
        "though the kernel tells of an open file's end after `close` has returned"
    );
    assert_eq!(b.ask("set f ex 0 0"), "ok", "and close ended the fcntl lock");
    assert_eq!(b.ask("close f"), "ok");

    // Open file descriptions: two opens of one process are two owners; one close of the wrong one frees
    // nothing.
    assert_eq!(a.ask(&format!("open x {}", fa.display())), "ok");
    assert_eq!(a.ask(&format!("open y {}", fa.display())), "ok");
    assert_eq!(b.ask(&format!("open f {}", fb.display())), "ok");
    assert_eq!(a.ask("oset x ex 0 10"), "ok");
    assert_eq!(a.ask("oset y ex 0 10"), "EAGAIN");
    assert_eq!(a.ask("close y"), "ok");
    assert_eq!(b.ask("oset f ex 0 10"), "EAGAIN");
    b.begin("owait f ex 0 10");
    wait_for_waiters(&fa, 1);
    assert_eq!(a.ask("close x"), "ok");
    assert_eq!(b.end(), "ok");
    assert_eq!(b.ask("close f"), "ok");
    wait_until("nothing is left", PATIENCE, || locks_of(&fa).is_empty());
}

#[test]
fn waiting_in_a_circle_is_refused_across_mounts() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let (fa, fb) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let (mut a, mut b) = (Locker::new(&fa), Locker::new(&fb));
    assert_eq!(a.ask("set f ex 0 1"), "ok");
    assert_eq!(b.ask("set f ex 1 1"), "ok");
    a.begin("wait f ex 1 1");
    wait_for_waiters(&fa, 1);
    assert_eq!(b.ask("wait f ex 0 1"), "EDEADLK");
    assert_eq!(b.ask("set f un 1 1"), "ok");
    assert_eq!(a.end(), "ok");
}

#[test]
fn dead_holders_release_and_waiters_can_be_interrupted() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let (fa, fb) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let (mut a, mut b) = (Locker::new(&fa), Locker::new(&fb));
    assert_eq!(a.ask("set f ex 0 0"), "ok");
    assert_eq!(a.ask("flock f ex"), "ok");

    // A signal ends the wait, the lock is not had and the queue is empty.
    b.begin("wait f ex 0 0");
    wait_for_waiters(&fa, 1);
    b.signal("USR1");
    assert_eq!(b.end(), "EINTR");
    assert_eq!(waiters(&fa), 0);
    assert_eq!(b.ask("set f ex 0 0"), "EAGAIN");
    // SIGKILL too: the process is gone while the lock is still held.
    let mut c = Locker::new(&fb);
    c.begin("flockw f ex");
    wait_for_waiters(&fa, 1);
    c.signal("KILL");
    c.ended();
    wait_for_waiters(&fa, 0);

    // A killed holder releases.
    b.begin("wait f ex 0 0");
    wait_for_waiters(&fa, 1);
    a.signal("KILL");
    assert_eq!(b.end(), "ok");
    wait_until("its flock is free", PATIENCE, || b.ask("flock f ex") == "ok");

    // A killed mount releases when its lease term is over.
    let mut a = Locker::new(&fa);
    a.begin("wait f ex 0 0");
    wait_for_waiters(&fa, 1);
    cluster.kill("mount-2");
    assert_eq!(a.end(), "ok");
    assert_eq!(a.ask("flock f ex"), "ok");
}

#[test]
fn locks_survive_a_restart_of_the_metadata_role() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let (fa, fb) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let (mut a, mut b, mut c) = (Locker::new(&fa), Locker::new(&fb), Locker::new(&fb));
    assert_eq!(a.ask("set f ex 0 10"), "ok");
    assert_eq!(a.ask("flock f sh"), "ok");
    b.begin("wait f ex 5 10");
    wait_for_waiters(&fa, 1);
    cluster.kill("meta");
    cluster.up();
    // No other process gets in between; the wait continues.
    assert_eq!(c.ask("set f ex 0 1"), "EAGAIN");
    assert_eq!(c.ask("flock f ex"), "EAGAIN");
    wait_for_waiters(&fa, 1);
    let held = locks_of(&fa).iter().filter(|l| l["state"] == "holds").count();
    assert_eq!(held, 2);
    assert!(b.waits());
    assert_eq!(a.ask("set f un 0 0"), "ok");
    assert_eq!(b.end(), "ok");
    assert_eq!(a.ask("flock f un"), "ok");
    assert_eq!(c.ask("flock f ex"), "ok");
}

/// One transaction after the other, each of which sees what all before it did: `total` is unique, `c` counts.
const SQLITE_WRITER: &str = r"
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=300, isolation_level=None)
assert db.execute('pragma journal_mode=delete').fetchone()[0] == 'delete'
for n in range(int(sys.argv[3])):
    db.execute('begin immediate')
    total = db.execute('select count(*) from t').fetchone()[0]
    db.execute('insert into t values (?, ?, ?)', (sys.argv[2], n, total))
    db.execute('update c set n = n + 1')
    db.execute('commit')
";
const SQLITE_MAKE: &str = r"
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute('create table t (who text, n int, total int unique)')
db.execute('create table c (n int)')
db.execute('insert into c values (0)')
db.commit()
";
const SQLITE_CHECK: &str = r"
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
one = lambda q: db.execute(q).fetchone()[0]
assert one('pragma integrity_check') == 'ok'
found = one('select count(*) from t'), one('select n from c'), one('select max(total) + 1 from t')
assert found == (int(sys.argv[2]),) * 3, found
";

/// A database written from every mount at once, `steps` transactions each, and read from every mount.
fn sqlite_from(mounts: usize, steps: usize) {
    let cluster = Cluster::start(mounts);
    let patience = PATIENCE + Duration::from_secs(1) * (mounts * steps) as u32;
    let db = |n: usize| cluster.mounts[n].join("db").display().to_string();
    let python = |code: &str, args: &[&str]| {
        Command::new("python3").arg("-c").arg(code).args(args).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ended = |mut child: Child| {
        let status = ends("a program that uses the database", &mut child, patience);
        let mut printed = String::new();
        child.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
        assert!(status.success(), "{printed}");
    };
    ended(python(SQLITE_MAKE, &[&db(0)]));
    let begun = Instant::now();
    let writers: Vec<Child> =
        (0..mounts).map(|n| python(SQLITE_WRITER, &[&db(n), &n.to_string(), &steps.to_string()])).collect();
    writers.into_iter().for_each(ended);
    eprintln!("{} transactions from {mounts} mounts in {:?}", mounts * steps, begun.elapsed());
    for n in 0..mounts {
        ended(python(SQLITE_CHECK, &[&db(n), &(mounts * steps).to_string()]));
    }
}

#[test]
fn sqlite_works_from_two_mounts_at_once() {
    if can_mount() && has("python3") {
        sqlite_from(2, 100);
    }
}

#[test]
#[ignore = "takes long: `make test-long`"]
fn sqlite_works_from_four_mounts_for_ten_thousand_transactions() {
    if can_mount() && has("python3") {
        sqlite_from(4, 2500);
    }
}

#[test]
fn hdf5_files_are_locked_by_their_writer_on_any_mount() {
    let Some(python) = h5py() else { return };
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let (fa, fb) = (cluster.mounts[0].join("f.h5"), cluster.mounts[1].join("f.h5"));
    let try_open = |file: &Path, mode: &str| {
        let code = "import h5py, sys\nwith h5py.File(sys.argv[1], sys.argv[2]) as f: print(f['n'][()])";
        let mut command = Command::new(&python);
        let done = command.arg("-c").arg(code).arg(file).arg(mode).env_remove("HDF5_USE_FILE_LOCKING");
        let done = done.output().unwrap();
        if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
    };
    // A writer that keeps its file open until it is asked to close it.
    let code = "import h5py, sys\nwith h5py.File(sys.argv[1], 'w') as f:\n f['n'] = 7\n f.flush()\n print('open', flush=True)\n sys.stdin.read()";
    let mut command = Command::new(&python);
    let writer = command.args(["-u", "-c", code]).arg(&fa).env_remove("HDF5_USE_FILE_LOCKING");
    let mut writer = writer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(writer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    for (file, mode) in [(&fb, "r"), (&fb, "a"), (&fa, "r")] {
        let printed = try_open(file, mode).unwrap_err();
        assert!(printed.contains("unable to lock file"), "{printed}");
    }
    drop(writer.stdin.take());
    assert!(ends("the writer", &mut writer, PATIENCE).success());
    wait_until("the file is free", PATIENCE, || try_open(&fb, "a").is_ok_and(|n| n == "7\n"));
    wait_until("and again", PATIENCE, || try_open(&fa, "r").is_ok_and(|n| n == "7\n"));
}
