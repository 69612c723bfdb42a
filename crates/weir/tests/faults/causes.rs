//! Causes that were once named wrongly or not at all: targets that leave, homes that hang, an etcd without
//! space, a mount that the kernel kills, a tree that another mount removes.
use crate::common::relation::Bench;
use crate::common::{Cluster, can_mount, has, left_out, pattern, shell, text, volume, wait_until};
use crate::table::{Expected, PATIENCE, Table, slow};
use crate::{Mounted, Program, is_root};
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn targets_that_leave_are_named() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--targets", "7"]);
    let mut table = Table::default();
    fs::write(cluster.mount().join("f"), pattern(1, 8 << 20)).unwrap();
    table.heal(&cluster);
    cluster.kill("storage-7");
    wait_until("t7 is down", PATIENCE, || cluster.status()["targets"][6]["state"] == "down");
    cluster.run_weir(&["target", "gone", "t7", "--yes"]);
    let words = ["t7 (storage-7) is given up, and other targets have all its data"];
    table.check(&cluster, "target given up and rebuilt", slow("target-unneeded", 0, &words));
    cluster.run_weir(&["target", "remove", "t7"]);
    table.heal(&cluster);
    // No seventh target is left to take its places.
    cluster.run_weir(&["target", "drain", "t1"]);
    let words = ["the drain of t1 (storage-1) waits", "it still serves its data"];
    table.check(&cluster, "drain without room", slow("drain-waits", 1, &words));
    cluster.run_weir(&["target", "undrain", "t1"]);
    table.heal(&cluster);
    table.finish("targets that leave");
}

#[test]
fn a_home_that_hangs_is_named() {
    if !can_mount() || !is_root() || !has("fsfreeze") || !has("mkfs.ext4") {
        return;
    }
    let bench = Bench::start();
    let (cluster, mut table) = (&bench.cluster, Table::default());
    let at = bench.home.with_file_name("hanging-home");
    fs::create_dir(&at).unwrap();
    let home = Mounted::ext4(&bench.home.with_file_name("image"), &at, "64m");
    let place = at.join("home");
    fs::create_dir(&place).unwrap();
    volume(cluster, &["create", "away"]);
    bench.run_weir(&["relation", "add", "away", &format!("file://{}", place.display())]);
    let path = cluster.mount().join("away/f");
    fs::write(&path, pattern(1, 1 << 20)).unwrap();
    wait_until("it is at home", PATIENCE, || place.join("f").exists());
    table.heal(cluster);
    home.do_to("fsfreeze -f {}");
    fs::write(cluster.mount().join("away/g"), pattern(2, 1 << 20)).unwrap();
    let about = path.to_str().unwrap();
    let words = ["the home of volume away does not answer"];
    table.check(cluster, "home hangs", Expected { code: "home-silent", exit: 1, about, words: &words });
    home.do_to("fsfreeze -u {}");
    wait_until("the rest is at home", 2 * PATIENCE, || place.join("g").exists());
    table.heal(cluster);
    bench.run_weir(&["relation", "remove", "r1"]);
    table.finish("homes that hang");
}

/// The port of the first member of etcd, as the cluster's directory has it.
fn port_of_etcd(cluster: &Cluster) -> String {
    let manifest = fs::read_to_string(cluster.dir().join("cluster.toml")).unwrap();
    let member = manifest.split("[[processes]]").find(|process| process.contains("\"etcd-1\"")).unwrap();
    let port = member.lines().find_map(|line| line.strip_prefix("port = ")).unwrap();
    port.to_owned()
}

/// Where a coordinator must write before it answers, as one that has just taken the lead, the answer is etcd's
/// own refusal.
#[test]
fn an_etcd_without_space_is_named() {
    if !can_mount() || !has("etcd") || !has("curl") || !has("python3") {
        return;
    }
    let cluster = Cluster::with(0, &["--etcd", "1", "--targets", "3", "--scheme", "replica:2"]);
    let table = Table::default();
    table.heal(&cluster);
    let url = format!("http://127.0.0.1:{}/v3/maintenance", port_of_etcd(&cluster));
    let member = format!(
        "$(curl -sf -X POST -d '{{}}' {url}/status | python3 -c 'import json,sys; print(json.load(sys.stdin)[\"header\"][\"member_id\"])')"
    );
    // As etcd does it when its quota is used up.
    let alarm = |action: &str| {
        shell(&format!(
            "m={member}; curl -sf -X POST -d '{{\"action\":\"{action}\",\"memberID\":\"'$m'\",\"alarm\":\"NOSPACE\"}}' {url}/alarm"
        ))
    };
    alarm("ACTIVATE");
    wait_until("etcd's lack of space is named", PATIENCE, || {
        let printed = cluster.try_run_weir(&["status"]);
        let (code, out, err) = (printed.status.code(), text(&printed.stdout), text(&printed.stderr));
        let is_trouble = code == Some(1) && out.contains("etcd has no space (alarm NOSPACE of ");
        is_trouble || code == Some(6) && err.contains("database space exceeded")
    });
    alarm("DEACTIVATE");
    table.heal(&cluster);
}

/// A memory cgroup of the test, which is removed with it.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn of(bytes: u64) -> Option<MemoryGroup> {
        let top = Path::new("/sys/fs/cgroup/memory");
        if !top.join("memory.limit_in_bytes").exists() {
            left_out("this machine has no memory cgroup of version 1");
            return None;
        }
        let group = top.join(format!("weir-test-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), bytes.to_string()).unwrap();
        Some(MemoryGroup(group))
    }
    fn take(&self, pid: i64) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0); // its process may not have ended yet
    }
}

#[test]
fn a_mount_that_is_killed_for_memory_is_named() {
    if !can_mount() || !is_root() {
        return;
    }
    let Some(group) = MemoryGroup::of(24 << 20) else { return };
    let cluster = Cluster::start(1);
    let mut table = Table::default();
    table.heal(&cluster);
    group.take(cluster.pid("mount-1").unwrap());
    let dir = cluster.mount().display();
    let load = Program::start(&format!("dd if=/dev/zero of={dir}/big bs=1M count=400"));
    wait_until("the kernel kills it", PATIENCE, || cluster.pid("mount-1").is_none());
    let words = ["mount-1", "the kernel killed its process for want of memory"];
    table.check(&cluster, "mount killed for want of memory", slow("mount-dead", 1, &words));
    drop(load);
    cluster.up();
    table.heal(&cluster);
    table.finish("memory");
}

#[test]
fn a_tree_that_another_mount_removes_is_named() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(2, &[]);
    let mut table = Table::default();
    table.heal(&cluster);
    let (here, there) = (cluster.mounts[0].display(), cluster.mounts[1].display());
    let tree =
        format!("mkdir {there}/tree; cd {there}/tree; seq 3000 | xargs touch; cd /; rm -rf {there}/tree");
    let removes = Program::start(&format!("while :; do {tree}; done"));
    let lists = Program::start(&format!("while :; do ls -l {here} > /dev/null; sleep 0.2; done"));
    let words = ["mount-2:", "% of the work of the last seconds"];
    table.check(&cluster, "tree of another mount removed", slow("", 0, &words));
    drop((removes, lists));
    table.finish("neighbours");
}
