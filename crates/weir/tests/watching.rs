//! Claims: `weir top` shows a hog within seconds, by user, client, volume and job; `weir why` names what
//! delays a program.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::Bench;
use common::{Cluster, can_mount, pattern, shell, text, volume, wait_until};
use serde_json::Value;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const HOG: u32 = 4711;

/// A program of the test that is ended with it.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn start(script: &str, uid: u32) -> Program {
        let mut bash = Command::new("bash");
        bash.args(["-c", script]).env("SLURM_JOB_ID", "815").stdout(Stdio::null()).stderr(Stdio::null());
        Program(bash.uid(uid).gid(uid).spawn().unwrap())
    }
}

fn json(cluster: &Cluster, args: &[&str]) -> Value {
    let all = [args, &["--json"]].concat();
    serde_json::from_str(&cluster.run_weir(&all)).unwrap()
}

fn first_of_top(cluster: &Cluster, by: &str) -> String {
    let top = json(cluster, &["top", "--once", "--by", by]);
    top["rows"][0]["name"].as_str().unwrap_or_default().to_owned()
}

/// All sentences of `weir why`, each with its remedy. On a busy machine others may come before the expected one.
fn why(cluster: &Cluster, what: &str) -> String {
    let why = json(cluster, &["why", what]);
    let chain = why["chain"].as_array().unwrap().iter();
    let of = |link: &Value, key: &str| link[key].as_str().unwrap().to_owned();
    let texts: Vec<String> =
        chain.map(|link| format!("{}\nto do: {}", of(link, "text"), of(link, "action"))).collect();
    texts.join("\n")
}

fn wait_why(cluster: &Cluster, what: &str, words: &[&str]) -> String {
    let mut printed = String::new();
    wait_until(&format!("`weir why {what}` says {words:?}"), PATIENCE, || {
        printed = why(cluster, what);
        words.iter().all(|word| printed.contains(word))
    });
    printed
}

#[test]
fn a_hog_is_seen_by_user_client_volume_and_job() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    shell(&format!("chmod 777 {}", top.display()));
    fs::write(top.join("other"), pattern(1, 1 << 16)).unwrap();
    let file = top.join("hog");
    let begun = Instant::now();
    let hog = Program::start(
        &format!("while :; do dd if=/dev/zero of={} bs=1M count=50 conv=notrunc; done", file.display()),
        HOG,
    );
    wait_until("the hog is the first user", PATIENCE, || first_of_top(&cluster, "user") == HOG.to_string());
    eprintln!("the hog was the first user after {:?}", begun.elapsed());
    wait_until("its volume is known", PATIENCE, || first_of_top(&cluster, "volume") == "data");
    assert_eq!(first_of_top(&cluster, "job"), "815");
    assert_eq!(first_of_top(&cluster, "kind"), "WRITE");
    let client = first_of_top(&cluster, "client");
    assert!(client.starts_with("mount-1:"), "{client}");
    wait_until("targets write for it", PATIENCE, || {
        let top = json(&cluster, &["top", "--once", "--by", "target"]);
        top["rows"][0]["bytes_per_s"].as_f64().is_some_and(|bytes| bytes > 1e5)
    });
    let spreads = json(&cluster, &["iohist"]);
    let has = |meter: &str| spreads["spreads"].as_array().unwrap().iter().any(|s| s["meter"] == meter);
    let meters = [
        "weir_rpc_seconds",
        "weir_store_sync_seconds",
        "weir_client_fuse_seconds",
        "weir_journal_sync_seconds",
    ];
    assert!(meters.iter().all(|meter| has(meter)), "{spreads:#}");
    drop(hog);
}

#[test]
fn a_stopped_target_is_why_a_write_waits() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    fs::write(top.join("f"), pattern(1, 8 << 20)).unwrap();
    // On a busy machine parts of the file are still being sent.
    wait_until("nothing waits", PATIENCE, || cluster.run_weir(&["why", "slow"]).contains("nothing waits"));
    let stopped = cluster.stop("storage-2");
    let printed = wait_why(&cluster, "slow", &["storage-2"]);
    assert!(
        printed.contains("to do: check the process of storage-2") || printed.contains("starts it again"),
        "{printed}"
    );
    drop(stopped);
}

#[test]
fn a_lease_that_is_not_returned_names_its_mount() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let (here, there) = (cluster.mounts[0].join("f"), cluster.mounts[1].join("f"));
    let writer = Program::start(&format!("exec 3> {}; echo a >&3; sleep 600", there.display()), 0);
    wait_until("the file is there", PATIENCE, || Path::new(&here).exists());
    let stopped = cluster.stop("mount-2");
    let reader = Program::start(&format!("exec cat {}", here.display()), 0);
    let printed = wait_why(&cluster, "slow", &["mount-2:", "to return its lease"]);
    assert!(printed.contains("mount-1:"), "the reader's call is the end of the chain: {printed}");
    let pid = reader.0.id().to_string();
    let of_process = json(&cluster, &["why", &pid]);
    let chain = of_process["chain"].to_string();
    // It may have got through by now: the lease of a silent client ends.
    assert!(chain.contains("mount-2:") || chain == "[]", "{of_process:#}");
    drop((stopped, reader, writer));
}

#[test]
fn a_full_volume_and_a_dead_home_are_named() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    let cluster = &bench.cluster;
    volume(cluster, &["create", "small", "--bytes", "1MiB"]);
    let full = cluster.mount().join("small/f");
    fs::write(&full, pattern(1, 1 << 20)).unwrap();
    let printed = wait_why(cluster, full.to_str().unwrap(), &["volume small is full (1.00 MiB of 1.00 MiB)"]);
    assert!(
        printed.contains("to do: delete files there, or raise the limit with `weir volume quota small`"),
        "{printed}"
    );

    bench.relate();
    bench.wait_state("synced");
    fs::rename(&bench.home, bench.home.with_file_name("elsewhere")).unwrap();
    fs::write(bench.data.join("new"), pattern(2, 1 << 20)).unwrap();
    let printed = wait_why(cluster, "slow", &[&format!("there is no directory {}", bench.url())]);
    assert!(printed.contains("to do: make or mount it"), "{printed}");
}

/// A home in memory that is full soon, and mounted until this goes.
struct SmallHome<'a>(&'a Path);
impl SmallHome<'_> {
    fn mount(at: &Path) -> SmallHome<'_> {
        shell(&format!("mount -t tmpfs -o size=1m weir-test {}", at.display()));
        SmallHome(at)
    }
}
impl Drop for SmallHome<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_support_archive_has_neither_names_of_files_nor_secrets() {
    if !can_mount() || !(rustix::process::geteuid().is_root() || common::left_out("only root may mount")) {
        return;
    }
    let bench = Bench::with(&["--movers", "1", "--console"]);
    let cluster = &bench.cluster;
    volume(cluster, &["create", "data"]);
    let home = bench.home.clone();
    let full = SmallHome::mount(&home);
    bench.relate();
    fs::write(bench.data.join("patient-7.h5"), pattern(1, 4 << 20)).unwrap();
    let status = || text(&cluster.try_run_weir(&["status", "--json"]).stdout);
    wait_until("the status names the file", PATIENCE, || status().contains("patient-7"));
    let key = fs::read_to_string(cluster.dir().join("run/console.link")).unwrap();
    let key = key.trim().rsplit_once('=').unwrap().1.to_owned();
    let out = tempfile::tempdir().unwrap();
    let made = |name: &str, more: &[&str]| {
        let archive = out.path().join(name);
        let output = archive.display().to_string();
        let printed = cluster.run_weir(&[&["support", "--output", &output], more].concat());
        let dir = out.path().join(format!("{name}-opened"));
        fs::create_dir(&dir).unwrap();
        shell(&format!("tar -xzf {output} -C {}", dir.display()));
        (printed, dir.join("weir-support"))
    };
    let (printed, dir) = made("plain.tar.gz", &[]);
    assert!(printed.contains("Names of files and secrets were removed"), "{printed}");
    let all = shell(&format!("cat $(find {} -type f)", dir.display()));
    assert!(!all.contains("patient-7"), "a name is in it");
    for secret in [key.as_str(), "PRIVATE KEY"] {
        assert!(!all.contains(secret), "a secret is in it");
    }
    let json = |name: &str| -> Value { serde_json::from_slice(&fs::read(dir.join(name)).unwrap()).unwrap() };
    assert_eq!(json("status.json")["targets"].as_array().unwrap().len(), 6);
    assert!(json("meters.json").as_array().unwrap().len() >= 9, "all processes");
    assert!(json("events.json")["events"].is_array() && json("waits.json")["waits"].is_array());
    let node = fs::read_to_string(dir.join("nodes/storage-1.txt")).unwrap();
    assert!(node.contains("Linux version") && node.contains("storage-1 serves"), "{node}");
    assert!(dir.join("logs/meta.log").exists() && dir.join("config/meta.toml").exists());
    let again =
        cluster.try_run_weir(&["support", "--output", out.path().join("plain.tar.gz").to_str().unwrap()]);
    assert!(!again.status.success(), "an archive is not overwritten");

    // A process notes its first point some seconds after its start.
    let mut tries = 0;
    wait_until("a support archive has a history", PATIENCE, || {
        tries += 1;
        let (_, dir) = made(&format!("try-{tries}.tar.gz"), &[]);
        let history = fs::read(dir.join("history.json")).unwrap();
        let history: Value = serde_json::from_slice(&history).unwrap();
        history.as_array().unwrap().iter().any(|s| s["series"] == "weir_rpc_seconds")
    });

    let (_, dir) = made("names.tar.gz", &["--names"]);
    let all = shell(&format!("cat $(find {} -type f)", dir.display()));
    assert!(all.contains("patient-7") && !all.contains(&key));
    drop(full);
}
