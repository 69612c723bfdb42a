//! Claim: for every fault of a cluster's parts, `weir status` reports it with its exit status, and `weir why`
//! names the cause within seconds. Each fault is done to real processes, disks and directories.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
#[path = "faults/causes.rs"]
mod causes;
mod common;
#[path = "faults/machines.rs"]
mod machines;
#[path = "faults/table.rs"]
mod table;

use common::relation::Bench;
use common::{Cluster, can_mount, has, left_out, pattern, shell, text, volume, wait_until, weir};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use table::{Expected, Table, slow};

const PATIENCE: Duration = Duration::from_secs(60);

/// A program of the test that is ended with it.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn start(script: &str) -> Program {
        Program::of(script, 0)
    }
    fn of(script: &str, uid: u32) -> Program {
        let mut bash = Command::new("bash");
        bash.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Program(bash.uid(uid).gid(uid).spawn().unwrap())
    }
    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

/// A file system of a test at a directory, until this goes.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: &Path, size: &str) -> Mounted {
        fs::create_dir_all(at).unwrap();
        shell(&format!("mount -t tmpfs -o size={size} weir-test {}", at.display()));
        Mounted(at.to_owned())
    }
    /// In an image, so that it can fail.
    fn ext4(image: &Path, at: &Path, size: &str) -> Mounted {
        let image = image.display();
        shell(&format!(
            "truncate -s {size} {image}; mkfs.ext4 -q {image}; mount -o loop {image} {}",
            at.display()
        ));
        Mounted(at.to_owned())
    }
    /// Again while the file system is busy: a mover may write there.
    fn do_to(&self, command: &str) {
        let command = command.replace("{}", &self.0.display().to_string());
        let works = || Command::new("sh").args(["-c", &command]).status().unwrap().success();
        wait_until(&command, table::PATIENCE, works);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let at = &self.0;
        let _ = Command::new("fsfreeze").arg("-u").arg(at).stderr(Stdio::null()).status();
        let _ = Command::new("umount").arg("-l").arg(at).status();
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root() || left_out("only root may mount file systems")
}

#[test]
fn stopped_and_dead_servers_are_named() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &[]);
    let mut table = Table::default();
    {
        let _stopped = cluster.stop("storage-2");
        table.check(&cluster, "storage process stopped", slow("storage-down", 1, &["storage-2 is down"]));
    }
    table.heal(&cluster);
    cluster.kill("storage-3");
    table.check(&cluster, "storage process killed", slow("storage-down", 1, &["storage-3 is down"]));
    cluster.kill("storage-4");
    cluster.kill("storage-5");
    let words = ["too few members of"];
    table.check(&cluster, "more targets lost than parity", slow("groups-unwritable", 2, &words));
    cluster.up();
    table.heal(&cluster);
    {
        let _stopped = cluster.stop("meta");
        let words = ["metadata server of namespace \"root\" does not answer"];
        table.check(&cluster, "metadata server stopped", slow("namespace-silent", 2, &words));
    }
    table.heal(&cluster);
    cluster.kill("meta");
    let words = ["no active metadata server"];
    table.check(&cluster, "metadata server killed", slow("namespace-without-leader", 2, &words));
    cluster.up();
    table.heal(&cluster);
    {
        let _stopped = cluster.stop("coord");
        table.check(&cluster, "coordinator stopped", slow("", 8, &["the coordinator does not answer"]));
    }
    table.heal(&cluster);
    cluster.kill("coord");
    table.check(&cluster, "coordinator killed", slow("", 8, &["the coordinator does not answer"]));
    cluster.up();
    table.heal(&cluster);
    table.finish("servers");
}

#[test]
fn mounts_leases_locks_and_hogs_are_named() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(2, &[]);
    let mut table = Table::default();
    let (here, there) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let writer = Program::start(&format!("exec 3> {}; echo a >&3; exec sleep 600", there.display()));
    wait_until("the file is there", PATIENCE, || here.exists());
    {
        let _stopped = cluster.stop("mount-2");
        let reader = Program::start(&format!("exec cat {}", here.display()));
        let words = ["mount-2:", "to return its lease"];
        let expected = Expected { code: "mount-silent", exit: 1, about: &reader.pid(), words: &words };
        table.check(&cluster, "lease not given back", expected);
        table.check(&cluster, "mount stopped", slow("mount-silent", 1, &["mount-2", "does not answer"]));
    }
    drop(writer);
    // On a slow machine it was stopped for longer than its lease, and names what it lost until it ends.
    cluster.kill("mount-2");
    cluster.up();
    table.heal(&cluster);

    let lock = |at: &Path, then: &str| format!("exec 3< {}; flock -x 3; {then}", at.display());
    let holder = Program::start(&lock(&there, "exec sleep 600"));
    let locks = || text(&weir(&["file", "locks", here.to_str().unwrap(), "--json"]).stdout);
    let held = || locks().contains("holds");
    wait_until("the lock is held", PATIENCE, held);
    let waiter = Program::start(&lock(&here, "true"));
    let expected = Expected {
        code: "",
        exit: 0,
        about: here.to_str().unwrap(),
        words: &["a lock on inode", "of mount-2:", "holds an exclusive flock lock"],
    };
    table.check(&cluster, "lock held by another program", expected);
    drop((holder, waiter));

    shell(&format!("chmod 777 {}", cluster.mount().display()));
    let dir = cluster.mount().display();
    let write = |name: &str, more: &str| {
        format!("while :; do dd if=/dev/zero of={dir}/{name} bs=1M count=40 conv=notrunc; {more} done")
    };
    let hogs: Vec<Program> = (0..3).map(|n| Program::of(&write(&format!("hog{n}"), ""), 4711)).collect();
    let modest = Program::of(&format!("while :; do ls -l {dir}; sleep 0.2; done"), 4712);
    let words = ["user 4711 has ", "% of the work", "mount-1:"];
    table.check(&cluster, "noisy neighbour", slow("", 0, &words));
    drop((hogs, modest));
    cluster.kill("mount-2");
    table.check(&cluster, "mount killed", slow("mount-dead", 1, &["mount-2", "is dead"]));
    cluster.up();
    table.finish("clients");
}

#[test]
fn volumes_homes_and_movers_are_named() {
    if !can_mount() || !is_root() {
        return;
    }
    let bench = Bench::start();
    let (cluster, mut table) = (&bench.cluster, Table::default());
    volumes(cluster, &mut table);
    homes(&bench, &mut table);
    movers(&bench, &mut table);
    table.finish("volumes, homes and movers");
}

fn volumes(cluster: &Cluster, table: &mut Table) {
    volume(cluster, &["create", "small", "--bytes", "1MiB", "--inodes", "20"]);
    let full = cluster.mount().join("small/f");
    fs::write(&full, pattern(1, 1 << 20)).unwrap();
    let about = full.to_str().unwrap();
    let words = ["volume small is full (1.00 MiB of 1.00 MiB)"];
    table.check(cluster, "volume full", Expected { code: "volume-full", exit: 1, about, words: &words });
    cluster.run_weir(&["volume", "quota", "small", "--bytes", "1GiB"]);
    (0..19).for_each(|n| fs::write(cluster.mount().join(format!("small/{n}")), "").unwrap());
    let words = ["volume small is full (20 files and directories of 20"];
    table.check(
        cluster,
        "volume out of inodes",
        Expected { code: "volume-full", exit: 1, about, words: &words },
    );
    cluster.run_weir(&["volume", "quota", "small", "--inodes", "1000"]);
    table.heal(cluster);
    let place = tempfile::tempdir().unwrap();
    let _full = Mounted::tmpfs(&place.path().join("exports"), "4k");
    let dir = place.path().join("exports");
    fs::write(dir.join("filler"), [1; 4096]).unwrap();
    cluster.run_weir(&["namespace", "export", dir.to_str().unwrap(), "--every", "1h"]);
    let words = ["the metadata of namespace \"root\" was not exported"];
    table.check(cluster, "disk of exports full", slow("export-failed", 1, &words));
    cluster.run_weir(&["namespace", "export", "--off"]);
    table.heal(cluster);
}

fn homes(bench: &Bench, table: &mut Table) {
    let cluster = &bench.cluster;
    bench.relate();
    bench.wait_state("synced");
    let (path, elsewhere) = (bench.data.join("f"), bench.home.with_file_name("elsewhere"));
    fs::write(&path, pattern(2, 1 << 20)).unwrap();
    bench.wait_state("synced");
    fs::rename(&bench.home, &elsewhere).unwrap();
    let about = path.to_str().unwrap();
    let words = ["the home of volume data is missing"];
    table.check(cluster, "home missing", Expected { code: "home-missing", exit: 1, about, words: &words });
    fs::rename(&elsewhere, &bench.home).unwrap();
    table.heal(cluster);
    bench.run_weir(&["relation", "pause", "r1"]);
    let words = ["copying of volume data is paused"];
    table.check(
        cluster,
        "copying paused",
        Expected { code: "relation-paused", exit: 1, about, words: &words },
    );
    bench.run_weir(&["relation", "resume", "r1"]);

    // A home of its own file system, which gets full and then refuses writes.
    let at = bench.home.with_file_name("small-home");
    let home = Mounted::tmpfs(&at, "2m");
    volume(cluster, &["create", "filling"]);
    bench.run_weir(&["relation", "add", "filling", &format!("file://{}", at.display())]);
    let filling = cluster.mount().join("filling/f");
    fs::write(&filling, pattern(3, 4 << 20)).unwrap();
    let words = ["of volume filling cannot be used", "o space"];
    let about = filling.to_str().unwrap();
    table.check(cluster, "home full", Expected { code: "home-refused", exit: 1, about, words: &words });
    home.do_to("mount -o remount,ro,size=64m {}");
    let words = ["of volume filling cannot be used", "ead-only"];
    table.check(cluster, "home read-only", Expected { code: "home-refused", exit: 1, about, words: &words });
    home.do_to("mount -o remount,rw {}");
    table.heal(cluster);
    cluster.run_weir(&["relation", "remove", "r2"]);

    let place = bench.home.with_file_name("backups");
    fs::create_dir(&place).unwrap();
    let url = format!("file://{}", place.display());
    bench.run_weir(&["volume", "backup", "data", "--to", &url, "--every", "1h"]);
    // One that finds no place later would be a failure of its own.
    wait_until("the first backup", table::PATIENCE, || {
        let shown = bench.run_weir(&["volume", "show", "data", "--json"]);
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        shown["backups"][0]["last"]["date"].is_string()
    });
    table.heal(cluster);
    fs::rename(&place, place.with_file_name("moved")).unwrap();
    let words = ["backups of volume data cannot be made"];
    table.check(cluster, "place of backups missing", slow("backup-place-missing", 1, &words));
    bench.run_weir(&["volume", "backup", "data", "--off"]);
    table.heal(cluster);
}

fn movers(bench: &Bench, table: &mut Table) {
    let cluster = &bench.cluster;
    let path = bench.data.join("f");
    {
        let _stopped = cluster.stop("mover-1");
        table.check(cluster, "mover stopped", slow("mover-silent", 1, &["mover-1", "reported nothing"]));
    }
    table.heal(cluster);
    cluster.kill("mover-1");
    table.check(cluster, "mover killed", slow("mover-down", 1, &["mover-1 is not running"]));
    cluster.up();
    table.heal(cluster);
    bench.evict(&path);
    cluster.kill("mover-1");
    let about = path.to_str().unwrap();
    let words = ["mover-1 is not running", "1.00 MiB of this file exist only there"];
    let expected = Expected { code: "mover-down", exit: 2, about, words: &words };
    table.check(cluster, "evicted file, mover killed", expected);
}

#[test]
fn disks_that_hang_fail_or_fill_up_are_named() {
    if !can_mount() || !is_root() || !has("fsfreeze") || !has("mkfs.ext4") || !has("python3") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let small = Mounted::tmpfs(&root.path().join("small"), "1400m");
    let cluster = Cluster::at(Some(small.0.join("cluster")), 1, &[]);
    let mut table = Table::default();
    table.heal(&cluster);

    // The disk of t2 becomes one that can hang and fail.
    let (t2, copy) = (cluster.dir().join("t2"), root.path().join("t2"));
    cluster.kill("storage-2");
    shell(&format!("cp -a {} {}", t2.display(), copy.display()));
    let disk = Mounted::ext4(&root.path().join("image"), &t2, "1g");
    shell(&format!("cp -a {}/. {}", copy.display(), t2.display()));
    cluster.up();
    table.heal(&cluster);
    disk.do_to("fsfreeze -f {}");
    let dir = cluster.mount().display();
    let load =
        Program::start(&format!("for n in 1 2 3 4; do dd if=/dev/zero of={dir}/l$n bs=1M count=16; done"));
    let words = ["the disk of t2 (storage-2) has completed nothing"];
    table.check(&cluster, "disk hangs", slow("target-stalled", 1, &words));
    disk.do_to("fsfreeze -u {}");
    drop(load);
    table.heal(&cluster);
    // Targets count the space that they share as free; so some of it has to be theirs.
    fs::write(cluster.mount().join("big"), pattern(5, 300 << 20)).unwrap();
    fs::write(cluster.mount().join("rest"), b"").unwrap(); // no name is created on a disk that is nearly full
    let free = |at: &Path| {
        let space = rustix::fs::statvfs(at).unwrap();
        space.f_bavail * space.f_frsize
    };
    let filler = small.0.join("filler");
    let file = fs::File::create(&filler).unwrap();
    let left = free(&small.0) - (16 << 20);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, left).unwrap();
    table.check(&cluster, "disk of a server full", slow("disk-full", 1, &["the disk of ", "% full"]));
    // Free space within their slabs is the targets' own: they are full when that is used, too.
    shell(&format!("dd if=/dev/urandom of={dir}/rest bs=1M 2>&1 || true"));
    table.check(&cluster, "targets full", slow("target-refuses", 1, &["refuses new data: ", "are free"]));
    fs::remove_file(&filler).unwrap();
    drop(file);
    fs::remove_file(cluster.mount().join("rest")).unwrap();
    table.heal(&cluster);
    // EXT4_IOC_SHUTDOWN: from now on everything there is an error.
    disk.do_to(
        "python3 -c \"import fcntl, os, struct; fcntl.ioctl(os.open('{}', 0), 0x8004587d, struct.pack('I', 2))\"",
    );
    let load = Program::start(&format!("dd if=/dev/zero of={dir}/more bs=1M count=16"));
    table.check(
        &cluster,
        "disk fails",
        slow("target-failed", 1, &["t2 (storage-2) failed with a disk error"]),
    );
    drop(load);
    table.finish("disks");
}

#[test]
fn standbys_and_copies_that_are_away_are_named() {
    if !can_mount() || !has("etcd") {
        return;
    }
    let options = ["--etcd", "3", "--copies", "3", "--targets", "3", "--scheme", "replica:2"];
    let cluster = Cluster::with(0, &options);
    let mut table = Table::default();
    table.heal(&cluster);
    let status = cluster.status();
    let leader = status["namespaces"][0]["leader"].as_u64().unwrap();
    let nodes = status["nodes"].as_array().unwrap().iter();
    let metas: Vec<_> = nodes.filter(|n| n["role"] == "meta").collect();
    let follower = metas.iter().find(|n| n["id"].as_u64() != Some(leader)).unwrap()["name"].as_str().unwrap();
    cluster.kill(follower);
    table.check(&cluster, "copy of the metadata lost", slow("copies-missing", 1, &[follower, "is down"]));
    cluster.up();
    table.heal(&cluster);
    cluster.kill("etcd-3");
    table.check(&cluster, "member of etcd killed", slow("standby-down", 1, &["etcd-3 is not running"]));
    cluster.up();
    table.heal(&cluster);
    cluster.kill("coord-3");
    table.check(&cluster, "standby coordinator killed", slow("standby-down", 1, &["coord-3 is not running"]));
    cluster.up();
    table.finish("standbys");
}
