//! Claims about several coordinators that share an etcd, and several nodes that keep the metadata: any one of
//! them may die, and any member of etcd; the cluster keeps serving while etcd as a whole is down.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, has, left_out, pattern, text, wait_until};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const FILE_BYTES: usize = 1_300_001;
const PATIENCE: Duration = Duration::from_secs(60);
/// The claim is 5 s; the rest is for machines that do other work.
const NEXT_CHANGE_MAX: Duration = Duration::from_secs(10);

/// The coordinator that leads: the others do not listen.
fn leader(cluster: &Cluster) -> Option<String> {
    let listens = |name: &String| {
        UnixStream::connect(cluster.dir().join("socket").join(format!("{name}.sock"))).is_ok()
    };
    (1..=3).map(|n| format!("coord-{n}")).find(listens)
}

fn wait_for_leader(cluster: &Cluster) -> String {
    wait_until("a coordinator leads", PATIENCE, || leader(cluster).is_some());
    leader(cluster).unwrap()
}

/// A change of the map, as soon as it can be made. How long that took.
fn change_the_map(cluster: &Cluster, n: u32) -> Duration {
    let (place, begun) = (format!("file:///place-{n}"), Instant::now());
    wait_until("the map can be changed", PATIENCE, || {
        cluster.try_run_weir(&["home", "allow", &place]).status.success()
    });
    begun.elapsed()
}

fn write_file(dir: &Path, n: u64) -> std::io::Result<()> {
    let mut file = File::create(dir.join(format!("f{n}")))?;
    file.write_all(&pattern(n, FILE_BYTES))?;
    file.sync_all()
}

fn verify(dir: &Path, n: u64) {
    let found = fs::read(dir.join(format!("f{n}"))).unwrap_or_else(|e| panic!("read f{n}: {e}"));
    assert!(found == pattern(n, FILE_BYTES), "f{n} has other bytes");
}

/// Writes and reads files until it is dropped; an error of either ends the test.
struct Load {
    written: AtomicU64,
    stop: AtomicBool,
    slowest_ms: AtomicU64,
}

impl Load {
    fn run(&self, dir: &Path) {
        while !self.stop.load(Ordering::Acquire) {
            let (n, begun) = (self.written.load(Ordering::Acquire), Instant::now());
            write_file(dir, n).unwrap_or_else(|e| panic!("write f{n}: {e}"));
            verify(dir, n / 2);
            self.slowest_ms.fetch_max(begun.elapsed().as_millis() as u64, Ordering::AcqRel);
            self.written.store(n + 1, Ordering::Release);
        }
    }
    fn progress(&self, what: &str) {
        let before = self.written.load(Ordering::Acquire);
        wait_until(what, PATIENCE, || self.written.load(Ordering::Acquire) >= before + 5);
    }
    fn slowest(&self) -> Duration {
        Duration::from_millis(self.slowest_ms.swap(0, Ordering::AcqRel))
    }
}

struct StopsLoad<'a>(&'a Load);
impl Drop for StopsLoad<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Release);
    }
}

#[test]
fn coordinators_and_members_of_etcd_may_die() {
    if !can_mount() || !has("etcd") {
        return;
    }
    let cluster = Cluster::with(1, &["--etcd", "3"]);
    let dir = cluster.mount();
    let load = Load { written: 0.into(), stop: false.into(), slowest_ms: 0.into() };
    std::thread::scope(|scope| {
        let _stops = StopsLoad(&load);
        scope.spawn(|| load.run(dir));
        load.progress("files are written");
        let quiet = load.slowest();
        println!("slowest file without a fault: {quiet:?}");
        leading_coordinators_end(&cluster, &load);
        members_of_etcd_end(&cluster, &load);
    });
    for n in 0..load.written.load(Ordering::Acquire) {
        verify(dir, n);
    }
    let status = cluster.status();
    assert_eq!(status["health"]["targets_up"], 6, "{status}");
}

fn leading_coordinators_end(cluster: &Cluster, load: &Load) {
    let first = wait_for_leader(cluster);
    cluster.kill(&first);
    let took = change_the_map(cluster, 1);
    println!("{first} killed: next map change after {took:?}, slowest file {:?}", load.slowest());
    assert!(took < NEXT_CHANGE_MAX, "{took:?}");
    let second = wait_for_leader(cluster);
    assert_ne!(first, second);
    load.progress("writing goes on under the next coordinator");
    cluster.up();
    assert!(cluster.pid(&first).is_some(), "it waits");
    // One that is stopped finds out that it leads no more, and ends.
    let stopped = cluster.stop(&second);
    let took = change_the_map(cluster, 2);
    println!("{second} stopped: next map change after {took:?}, slowest file {:?}", load.slowest());
    drop(stopped);
    wait_until("the deposed coordinator ends", PATIENCE, || cluster.pid(&second).is_none());
    let log = text(&fs::read(cluster.dir().join(format!("log/{second}.log"))).unwrap());
    assert!(log.contains("error: lead the cluster:"), "{log}");
    cluster.up();
    // One that shuts down hands over at once.
    let third = wait_for_leader(cluster);
    cluster.signal(&third, "TERM");
    let begun = Instant::now();
    wait_until("another coordinator leads", PATIENCE, || leader(cluster).is_some_and(|now| now != third));
    println!("{third} ended in good order: the next one listens after {:?}", begun.elapsed());
    cluster.up();
    load.progress("writing goes on");
    load.slowest();
}

fn members_of_etcd_end(cluster: &Cluster, load: &Load) {
    cluster.kill("etcd-1");
    let took = change_the_map(cluster, 3);
    println!("a member of etcd killed: next map change after {took:?}, slowest file {:?}", load.slowest());
    cluster.up();
    // All are silent: there is no leader after the lease, and files are written and read all the same.
    let leads = wait_for_leader(cluster);
    let all: Vec<_> = (1..=3).map(|n| cluster.stop(&format!("etcd-{n}"))).collect();
    let begun = Instant::now();
    wait_until("the coordinator ends", PATIENCE, || cluster.pid(&leads).is_none());
    println!("etcd is silent: {leads} has ended after {:?}", begun.elapsed());
    while begun.elapsed() < Duration::from_secs(10) {
        load.progress("writing goes on without etcd");
    }
    println!("slowest file while etcd was away: {:?}", load.slowest());
    drop(all);
    let took = change_the_map(cluster, 4);
    println!("etcd is back: next map change after {took:?}");
    load.progress("writing goes on");
    cluster.up();
    wait_until("all targets are up", PATIENCE, || cluster.status()["health"]["targets_up"] == 6);
}

#[test]
fn a_machine_a_coordinator_and_a_member_of_etcd_may_die() {
    let is_root = || rustix::process::geteuid().is_root() || left_out("only root makes network namespaces");
    if !(can_mount() && is_root() && has("etcd") && has("ip") && has("nsenter")) {
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/demo_cluster.py");
    let args = [script, env!("CARGO_BIN_EXE_weir"), "--hz", "1", "--duration", "30"];
    let shown = Command::new("python3").args(args).stdin(Stdio::null()).output().unwrap();
    println!("{}", text(&shown.stdout));
    assert!(shown.status.success(), "{}", text(&shown.stderr));
}

/// The nodes that keep the namespace, by their states.
fn copies(cluster: &Cluster, state: &str) -> Vec<String> {
    let listed = cluster.try_run_weir(&["namespace", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap_or_default();
    let all = listed[0]["copies"].as_array().cloned().unwrap_or_default();
    let name = |copy: &serde_json::Value| copy["node"].as_str().unwrap_or("?").to_owned();
    all.iter().filter(|copy| copy["state"] == state).map(name).collect()
}

/// Waits until one of these nodes leads; which one.
fn leads(cluster: &Cluster, among: &[&str]) -> String {
    let found = || copies(cluster, "leads").into_iter().find(|name| among.contains(&name.as_str()));
    wait_until(&format!("one of {among:?} leads"), PATIENCE, || found().is_some());
    found().unwrap()
}

fn are_whole(cluster: &Cluster) {
    wait_until("all copies hold everything", PATIENCE, || copies(cluster, "current").len() == 2);
}

#[test]
fn one_of_three_metadata_nodes_may_be_lost_with_its_disk() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--copies", "3"]);
    let dir = cluster.mount();
    let load = Load { written: 0.into(), stop: false.into(), slowest_ms: 0.into() };
    std::thread::scope(|scope| {
        let _stops = StopsLoad(&load);
        scope.spawn(|| load.run(dir));
        load.progress("files are written");
        println!("slowest file without a fault: {:?}", load.slowest());
        let first = leads(&cluster, &["meta-1"]);
        cluster.kill(&first);
        let second = leads(&cluster, &["meta-2", "meta-3"]);
        load.progress("writing goes on under the next leader");
        println!("{first} killed: slowest file {:?}", load.slowest());
        let status = cluster.status();
        assert!(status["troubles"].to_string().contains("2 of 3 copies"), "{status}");
        metadata_directory_is_lost(&cluster, &first);
        load.progress("writing goes on with a new copy");
        // A copy that stands still is left out, one that is cut off as the leader finds that it leads no
        // more.
        let follower = copies(&cluster, "current").remove(0);
        load.slowest();
        let stopped = cluster.stop(&follower);
        load.progress("writing goes on without a copy");
        println!("{follower} stopped: slowest file {:?}", load.slowest());
        drop(stopped);
        are_whole(&cluster);
        let stopped = cluster.stop(&second);
        let others: Vec<&str> = ["meta-1", "meta-2", "meta-3"].into_iter().filter(|n| *n != second).collect();
        leads(&cluster, &others);
        load.progress("writing goes on under the third leader");
        println!("{second} stopped: slowest file {:?}", load.slowest());
        drop(stopped);
        are_whole(&cluster);
        load.progress("writing goes on with all copies");
    });
    for n in 0..load.written.load(Ordering::Acquire) {
        verify(dir, n);
    }
    // All end at once, and start again with what they have.
    cluster.kill_all();
    cluster.up();
    wait_until("all copies hold everything", PATIENCE, || copies(&cluster, "current").len() == 2);
    for n in 0..load.written.load(Ordering::Acquire) {
        verify(dir, n);
    }
}

/// Its directory is gone for good: it is refused while its place is its own, and filled from the others in a
/// new one.
fn metadata_directory_is_lost(cluster: &Cluster, node: &str) {
    let dir = cluster.dir().join(node);
    fs::remove_dir_all(&dir).unwrap();
    fs::create_dir(&dir).unwrap();
    let refused = cluster.try_up();
    assert!(!refused.status.success(), "an empty directory is not the one of a copy");
    let printed = text(&refused.stderr);
    assert!(
        printed.contains("file system may not be mounted") && printed.contains("--without NODE"),
        "{printed}"
    );
    cluster.run_weir(&["namespace", "copies", "root", "3", "--without", node, "--no-wait"]);
    cluster.up();
    are_whole(cluster);
}
