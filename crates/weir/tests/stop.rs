//! Claims about servers that are stopped (not dead: their connections stay open): one of them delays calls
//! for its tolerated silence at most, and leaves no group before, while enough others are up; else programs
//! wait for them until they return, at any address, and a waiting program can be ended.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, ends, pattern, text, wait_until, weir};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const FILE_BYTES: usize = 5_300_001;
/// A write waits until the silence of the stopped process has lasted for 3 s and is noticed, once, on top of
/// what the machine stalls by itself.
const STALL_MAX: Duration = Duration::from_millis(5000);
/// A file's bytes wait for this number of turns of a processor and of the disk, one after the other.
const STALLS_OF_THE_MACHINE: u32 = 4;

fn write_file(dir: &Path, n: u64) -> std::io::Result<()> {
    let mut file = File::create(dir.join(format!("f{n}")))?;
    for part in pattern(n, FILE_BYTES).chunks(1 << 20) {
        file.write_all(part)?;
    }
    file.sync_all()
}

fn verify(dir: &Path, n: u64) {
    let mut found = Vec::with_capacity(FILE_BYTES);
    let mut file = File::open(dir.join(format!("f{n}"))).unwrap_or_else(|e| panic!("f{n}: {e}"));
    // Past the kernel's pages, so that targets are asked.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    file.read_to_end(&mut found).unwrap_or_else(|e| panic!("read f{n}: {e}"));
    assert!(found == pattern(n, FILE_BYTES), "f{n} has other bytes");
}

#[test]
fn a_stopped_storage_process_delays_calls_by_its_silence() {
    if !can_mount() {
        return;
    }
    // Two mounts: files that one wrote are not cached by the other.
    let cluster = Cluster::start(2);
    let (dir, reader_dir) = (&cluster.mounts[0], &cluster.mounts[1]);
    for n in 0..4 {
        write_file(dir, n).unwrap();
    }
    let (done, stop) = (AtomicU64::new(4), AtomicBool::new(false));
    let (slowest_write, slowest_read) = (AtomicU64::new(0), AtomicU64::new(0));
    let slowest_machine = AtomicU64::new(0);
    let plain = tempfile::tempfile_in(cluster.dir()).unwrap();
    let timed = |slowest: &AtomicU64, work: &mut dyn FnMut()| {
        let begun = Instant::now();
        work();
        slowest.fetch_max(begun.elapsed().as_millis() as u64, Ordering::AcqRel);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let n = done.load(Ordering::Acquire);
                timed(&slowest_write, &mut || {
                    write_file(dir, n).unwrap_or_else(|e| panic!("write f{n}: {e}"));
                });
                done.store(n + 1, Ordering::Release);
            }
        });
        scope.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Acquire) {
                timed(&slowest_read, &mut || verify(reader_dir, n % done.load(Ordering::Acquire)));
                n += 1;
            }
        });
        // The time of a sleep and of a synced write without Weir.
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                timed(&slowest_machine, &mut || {
                    std::thread::sleep(Duration::from_millis(5));
                    (&plain).write_all(&[7; 1 << 16]).and_then(|()| plain.sync_all()).unwrap();
                });
            }
        });
        let progress = |what: &str| {
            let before = done.load(Ordering::Acquire);
            wait_until(what, Duration::from_secs(60), || done.load(Ordering::Acquire) >= before + 4);
        };
        progress("files are written");
        cluster.signal("storage-3", "STOP");
        progress("writing goes on with one stopped");
        wait_until("the coordinator has seen it", Duration::from_secs(30), || {
            cluster.status()["health"]["targets_up"] == 5
        });
        progress("writing goes on without it");
        cluster.signal("storage-3", "CONT");
        progress("writing goes on with it");
        stop.store(true, Ordering::Release);
    });
    let of = |slowest: &AtomicU64| Duration::from_millis(slowest.load(Ordering::Acquire));
    let (write, read, machine) = (of(&slowest_write), of(&slowest_read), of(&slowest_machine));
    let allowed = STALL_MAX + machine * STALLS_OF_THE_MACHINE;
    assert!(write.max(read) < allowed, "write {write:?}, read {read:?}, the machine by itself {machine:?}");
    // Its missed writes are repaired at once: afterwards any two others may fail.
    wait_until("every group is full again", Duration::from_secs(120), || {
        let health = &cluster.status()["health"];
        health["targets_up"] == 6 && health["groups_full"] == health["groups"]
    });
    cluster.kill("storage-1");
    cluster.kill("storage-5");
    for n in 0..done.load(Ordering::Acquire) {
        verify(reader_dir, n);
    }
    assert!(fs::read_dir(dir).unwrap().count() as u64 == done.load(Ordering::Acquire));
}

/// A program whose calls are to wait.
/// The version of the map, and each group's epoch.
fn epochs(cluster: &Cluster) -> (u64, Vec<u64>) {
    let status = cluster.status();
    let groups = status["groups"].as_array().unwrap().iter();
    (status["map_version"].as_u64().unwrap(), groups.map(|g| g["epoch"].as_u64().unwrap()).collect())
}

/// SIGSTOP for less than the tolerated silence of 3 s under writes, then for twice as long.
#[test]
fn a_storage_process_stopped_for_two_seconds_leaves_no_group() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let (dir, stop, done) = (cluster.mount().to_path_buf(), AtomicBool::new(false), AtomicU64::new(0));
    write_file(&dir, 0).unwrap();
    let (up, down) =
        (|| cluster.status()["health"]["targets_up"] == 6, || cluster.status()["health"]["targets_up"] == 5);
    wait_until("all are up", Duration::from_secs(60), up);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let n = done.load(Ordering::Acquire) + 1;
                write_file(&dir, n).unwrap_or_else(|e| panic!("write f{n}: {e}"));
                done.store(n, Ordering::Release);
            }
        });
        let progress = |what: &str| {
            let before = done.load(Ordering::Acquire);
            wait_until(what, Duration::from_secs(60), || done.load(Ordering::Acquire) >= before + 2);
        };
        progress("files are written");
        let before = epochs(&cluster);
        for name in ["storage-2", "storage-5"] {
            let stopped = cluster.stop(name);
            std::thread::sleep(Duration::from_secs(2)); // the time is the claim
            drop(stopped);
            progress("writing goes on");
        }
        assert_eq!(epochs(&cluster), before, "no target left its groups");
        let stopped = cluster.stop("storage-4");
        wait_until("its silence is noticed", Duration::from_secs(10), down);
        progress("writing goes on without it");
        drop(stopped);
        wait_until("it is back", Duration::from_secs(30), up);
        assert!(epochs(&cluster).0 > before.0);
        stop.store(true, Ordering::Release);
    });
    for n in 0..=done.load(Ordering::Acquire) {
        verify(&dir, n);
    }
}

fn program(script: &str) -> Child {
    let mut shell = Command::new("bash");
    shell
        .args(["-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn log_of(cluster: &Cluster, name: &str) -> String {
    text(&fs::read(cluster.dir().join(format!("log/{name}.log"))).unwrap_or_default())
}

#[test]
fn programs_wait_for_frozen_servers_and_can_be_killed() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let dir = cluster.mount().to_path_buf();
    write_file(&dir, 1).unwrap();
    ["1", "2", "3"].iter().for_each(|name| fs::create_dir(dir.join(name)).unwrap());
    let away = ["meta", "storage-1", "storage-2", "storage-3"];
    let stopped: Vec<_> = away.iter().map(|name| cluster.stop(name)).collect();
    // Each in a directory of its own: the kernel blocks other changes of one meanwhile, and a program that
    // waits for that cannot be ended.
    let mut made = program(&format!("exec mkdir {}/1/made", dir.display()));
    let mut killed = program(&format!("exec mkdir {}/2/killed", dir.display()));
    // The program that runs this test may ignore the signal.
    let mut interrupted = program(&format!("exec env --default-signal=INT mkdir {}/3/made", dir.display()));
    let mut reader = program(&format!("exec cat {}/f1", dir.display()));
    wait_until("the log names what is waited for", Duration::from_secs(50), || {
        log_of(&cluster, "mount-1").contains("waiting for the metadata leader meta: no answer for")
    });
    wait_until("weir status names it", Duration::from_secs(50), || {
        let output = cluster.try_run_weir(&["status"]);
        text(&output.stdout).contains("for the metadata leader meta, no answer for")
    });
    killed.kill().unwrap();
    assert!(!ends("a program that was killed", &mut killed, Duration::from_secs(20)).success());
    common::shell(&format!("kill -INT {}", interrupted.id()));
    assert!(!ends("a program that was interrupted", &mut interrupted, Duration::from_secs(20)).success());
    assert!(made.try_wait().unwrap().is_none(), "the others go on waiting");
    drop(stopped);
    assert!(ends("mkdir", &mut made, Duration::from_secs(60)).success());
    let mut found = Vec::new();
    reader.stdout.take().unwrap().read_to_end(&mut found).unwrap();
    assert!(ends("cat", &mut reader, Duration::from_secs(60)).success());
    assert!(found == pattern(1, FILE_BYTES));
    assert!(dir.join("1/made").is_dir());
    wait_until("the log says that it is over", Duration::from_secs(60), || {
        log_of(&cluster, "mount-1").contains("no call waits for the metadata leader meta any more")
    });
}

#[test]
fn weir_down_ends_calls_that_wait_and_says_so() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--movers", "0"]);
    let home = tempfile::tempdir().unwrap();
    let data = cluster.mount().join("data");
    cluster.run_weir(&["volume", "create", "data"]);
    let url = format!("file://{}", home.path().display());
    cluster.run_weir(&["relation", "add", "data", &url, "--direction", "mirror"]);
    // It opens the directory, and then waits for its names, which no mover brings.
    let mut list = program(&format!("exec ls {}", data.display()));
    wait_until("the directory is open", Duration::from_secs(60), || {
        let open = fs::read_dir(format!("/proc/{}/fd", list.id())).unwrap().flatten();
        open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|path| path == data)
    });
    let down = cluster.try_run_weir(&["down", "--json"]);
    assert!(down.status.success(), "{}", text(&down.stderr));
    let printed: serde_json::Value = serde_json::from_slice(&down.stdout).unwrap();
    assert_eq!(printed["ended_calls"], serde_json::json!({ "mount-1": 1 }), "{printed}");
    assert_eq!(printed["killed"], serde_json::json!([]), "{printed}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(cluster.mount().to_str().unwrap()), "{mounts}");
    assert!(!ends("a program that waited", &mut list, Duration::from_secs(60)).success());
    let mut error = String::new();
    list.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(error.contains("Input/output error"), "{error}");
}

#[test]
fn weir_down_keeps_data_that_cannot_be_saved() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let file = cluster.mount().join("f");
    let go = cluster.dir().join("go");
    let script = format!(
        "exec 3> {}; until [ -e {} ]; do sleep 0.05; done; head -c 1000000 /dev/zero | tr '\\0' x >&3; exec sleep 600",
        file.display(),
        go.display()
    );
    let mut writer = program(&script);
    wait_until("the file is open", Duration::from_secs(60), || file.exists());
    let stopped: Vec<_> =
        ["storage-1", "storage-2", "storage-3"].iter().map(|name| cluster.stop(name)).collect();
    fs::write(&go, "").unwrap();
    wait_until("it is written", Duration::from_secs(60), || {
        fs::metadata(&file).is_ok_and(|m| m.len() == 1_000_000)
    });
    let dir = cluster.dir();
    let down = ["down", "--dir", dir.to_str().unwrap()];
    let refused = weir(&down);
    let printed = text(&refused.stderr);
    assert!(!refused.status.success(), "{printed}");
    assert!(printed.contains("mount-1 holds ") && printed.contains("nothing was stopped"), "{printed}");
    assert!(printed.contains("--lose-unsaved"), "{printed}");
    assert!(cluster.pid("mount-1").is_some() && cluster.pid("meta").is_some());
    drop(stopped);
    let downed = weir(&down);
    assert!(downed.status.success(), "{}", text(&downed.stderr));
    assert!(!text(&downed.stdout).contains("lost"), "{}", text(&downed.stdout));
    let _ = writer.kill();
    writer.wait().unwrap();
    cluster.up();
    assert!(fs::read(&file).unwrap() == vec![b'x'; 1_000_000]);
}

/// Roles that are started by hand, and end with the test.
struct Roles {
    dir: tempfile::TempDir,
    running: Vec<(String, Child)>,
    coordinators: Vec<String>,
}

impl Roles {
    fn free_port() -> u16 {
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }
    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
    fn coordinators(&self) -> Vec<&str> {
        self.coordinators.iter().flat_map(|addr| ["--coordinator", addr.as_str()]).collect()
    }
    /// Starts one, and waits until it serves.
    fn start(&mut self, name: &str, args: &[&str]) {
        let pid_file = self.path(&format!("{name}.pid"));
        let _ = fs::remove_file(&pid_file); // of the last start
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.log"))).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.args(args).args(["--name", name, "--pid-file", &pid_file]).stderr(log).stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        wait_until(&format!("{name} serves"), Duration::from_secs(60), || {
            let ended = child.try_wait().unwrap();
            assert!(
                ended.is_none(),
                "{name} ended: {}",
                fs::read_to_string(self.path(&format!("{name}.log"))).unwrap()
            );
            text(&fs::read(&pid_file).unwrap_or_default()).contains("\"ready\":true")
        });
        self.running.push((name.into(), child));
    }
    fn kill(&mut self, name: &str) {
        let at = self.running.iter().position(|(known, _)| known == name).unwrap();
        let (_, mut child) = self.running.remove(at);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    fn addresses(&self) -> serde_json::Value {
        let output = weir(&[&["status", "--json"][..], &self.coordinators()].concat());
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        status["nodes"].clone()
    }
}

impl Drop for Roles {
    fn drop(&mut self) {
        let _ = weir(&["unmount", "--lazy", &self.path("mnt")]); // it may not have been mounted
        for (_, child) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_mount_follows_its_servers_to_other_addresses() {
    if !can_mount() {
        return;
    }
    let coordinators: Vec<String> = (0..2).map(|_| format!("tcp:127.0.0.1:{}", Roles::free_port())).collect();
    let dir = tempfile::Builder::new().prefix("weir-test-").tempdir().unwrap();
    let mut roles = Roles { dir, running: Vec::new(), coordinators: coordinators.clone() };
    let given = coordinators.iter().flat_map(|addr| ["--coordinator", addr.as_str()]).collect::<Vec<_>>();
    let (coord, meta, target, mnt) =
        (roles.path("coord"), roles.path("meta"), roles.path("t1"), roles.path("mnt"));
    let coord = ["coord", "--dir", &coord, "--targets", "1", "--scheme", "single", "--listen"];
    // On any port: each start is at another one.
    let anywhere = ["--listen", "tcp:127.0.0.1:0"];
    let meta = [&["meta", "--dir", &meta][..], &anywhere, &given].concat();
    let storage = [&["storage", "--dir", &target][..], &anywhere, &given].concat();
    roles.start("coord", &[&coord[..], &[&coordinators[0], "--new"]].concat());
    roles.start("meta", &[&meta[..], &["--new"]].concat());
    roles.start("storage", &storage);
    fs::create_dir(&mnt).unwrap();
    roles.start("mount", &[&["mount", &mnt][..], &given].concat());
    let file = Path::new(&mnt).join("f");
    fs::write(&file, pattern(1, FILE_BYTES)).unwrap();
    let before = roles.addresses();
    roles.kill("coord");
    roles.kill("meta");
    roles.kill("storage");
    let mut waits = program(&format!("echo more >> {}", file.display()));
    roles.start("coord", &[&coord[..], &[&coordinators[1]]].concat());
    roles.start("meta", &meta);
    roles.start("storage", &storage);
    assert_ne!(roles.addresses(), before);
    assert!(ends("a program that writes", &mut waits, Duration::from_secs(60)).success());
    let expected = [&pattern(1, FILE_BYTES)[..], b"more\n"].concat();
    assert!(fs::read(&file).unwrap() == expected);
}
