//! Claim: locks of `fcntl` and `flock` are those of the whole cluster, and end with whoever held them.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, has, shell, text, wait_until, weir};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// A process that locks as it is told, one command a line, one answer a line.
const LOCKER: &str = r#"
import errno, fcntl, os, signal, struct, sys
fds = {}
class Interrupted(Exception): pass
def on_signal(*_): raise Interrupted()
signal.signal(signal.SIGUSR1, on_signal)
KINDS = {'sh': fcntl.F_RDLCK, 'ex': fcntl.F_WRLCK, 'un': fcntl.F_UNLCK}
def lock(cmd, fd, kind, start, length):
    # struct flock of 64-bit Linux: type, whence, start, len, pid
    arg = struct.pack('hhqqi4x', KINDS[kind], 0, start, length, 0)
    return struct.unpack('hhqqi4x', fcntl.fcntl(fd, cmd, arg))
for line in sys.stdin:
    word = line.split()
    try:
        if word[0] == 'open': fds[word[1]] = os.open(word[2], os.O_RDWR | os.O_CREAT, 0o644); answer = 'ok'
        elif word[0] == 'close': os.close(fds.pop(word[1])); answer = 'ok'
        elif word[0] in ('set', 'wait', 'oset', 'owait'):
            cmd = {'set': fcntl.F_SETLK, 'wait': fcntl.F_SETLKW, 'oset': 37, 'owait': 38}[word[0]]
            print('begun', flush=True)
            lock(cmd, fds[word[1]], word[2], int(word[3]), int(word[4])); answer = 'ok'
        elif word[0] == 'get':
            kind, _, start, length, pid = lock(fcntl.F_GETLK, fds[word[1]], word[2], int(word[3]), int(word[4]))
            answer = 'free' if kind == fcntl.F_UNLCK else f'{kind} {start} {length} {pid}'
        elif word[0] in ('flock', 'flockw'):
            how = {'sh': fcntl.LOCK_SH, 'ex': fcntl.LOCK_EX, 'un': fcntl.LOCK_UN}[word[2]]
            print('begun', flush=True)
            fcntl.flock(fds[word[1]], how | (fcntl.LOCK_NB if word[0] == 'flock' else 0)); answer = 'ok'
        elif word[0] == 'write': os.pwrite(fds[word[1]], word[2].encode(), 0); answer = 'ok'
        elif word[0] == 'read': answer = os.pread(fds[word[1]], 100, 0).decode()
        elif word[0] == 'fsync': os.fsync(fds[word[1]]); answer = 'ok'
    except OSError as e: answer = {errno.EDEADLK: 'EDEADLK'}.get(e.errno) or errno.errorcode[e.errno]
    except Interrupted: answer = 'EINTR'
    print(answer, flush=True)
"#;

struct Locker {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Locker {
    fn new(file: &Path) -> Locker {
        let mut locker = Locker::start();
        assert_eq!(locker.ask(&format!("open f {}", file.display())), "ok");
        locker
    }
    fn start() -> Locker {
        let mut child = Command::new("python3")
            .args(["-u", "-c", LOCKER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tx, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    return;
                }
            }
        });
        Locker { child, input, answers }
    }
    fn begin(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
        let locks = ["set", "wait", "oset", "owait", "flock", "flockw"];
        if locks.contains(&command.split(' ').next().unwrap()) {
            assert_eq!(self.end(), "begun");
        }
    }
    fn end(&mut self) -> String {
        self.answers.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("no answer: {e}"))
    }
    fn ask(&mut self, command: &str) -> String {
        self.begin(command);
        self.end()
    }
    /// Still waiting as far as this process has heard.
    fn waits(&self) -> bool {
        self.answers.try_recv().is_err()
    }
    fn pid(&self) -> u32 {
        self.child.id()
    }
    fn signal(&self, signal: &str) {
        shell(&format!("kill -{signal} {}", self.pid()));
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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

    // What is shown.
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
    // The kernel tells of an open file's end after `close` has returned.
    wait_until("the end of an open file ends its flock", PATIENCE, || b.ask("flock f ex") == "ok");
    assert_eq!(b.ask("set f ex 0 0"), "ok", "and close ended the fcntl lock");
    assert_eq!(b.ask("close f"), "ok");

    // Open file descriptions: two opens of one process are two owners; one close of the wrong one frees nothing.
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
    c.child.wait().unwrap();
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
    // Nobody gets in between; the wait goes on.
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

#[test]
fn sqlite_works_from_two_mounts_at_once() {
    if !can_mount() || !has("python3") {
        return;
    }
    const ROWS: u32 = 60;
    const WRITER: &str = r"
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=120, isolation_level=None)
db.execute('pragma journal_mode=delete')
for n in range(int(sys.argv[3])):
    db.execute('begin immediate')
    total = db.execute('select count(*) from t').fetchone()[0]
    db.execute('insert into t values (?, ?, ?)', (sys.argv[2], n, total))
    db.execute('update c set n = n + 1')
    db.execute('commit')
";
    let cluster = Cluster::start(2);
    let db = |n: usize| cluster.mounts[n].join("db").display().to_string();
    let python = |code: &str, args: &[&str]| {
        Command::new("python3").arg("-c").arg(code).args(args).stderr(Stdio::piped()).spawn().unwrap()
    };
    let make = "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1])\n\
        db.execute('create table t (who text, n int, total int unique)')\n\
        db.execute('create table c (n int)')\ndb.execute('insert into c values (0)')\ndb.commit()";
    assert!(python(make, &[&db(0)]).wait().unwrap().success());
    let writers: Vec<Child> =
        (0..2).map(|n| python(WRITER, &[&db(n), &n.to_string(), &ROWS.to_string()])).collect();
    for writer in writers {
        let done = writer.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
    }
    let check = "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1])\n\
        one = lambda q: db.execute(q).fetchone()[0]\n\
        assert one('pragma integrity_check') == 'ok'\n\
        found = one('select count(*) from t'), one('select n from c')\n\
        assert found == (int(sys.argv[2]),) * 2, found";
    for n in 0..2 {
        let done = python(check, &[&db(n), &(2 * ROWS).to_string()]).wait_with_output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
    }
}
