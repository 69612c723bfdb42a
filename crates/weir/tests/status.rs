//! Claim: `weir status` names all troubles of a cluster, the worst first, and its exit status is the severity
//! of the worst one.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::Bench;
use common::{Cluster, can_mount, has, pattern, text, wait_until};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until a trouble of this severity about something is shown, and this is what `weir status` exits with.
fn wait_reported(cluster: &Cluster, severity: &str, about: &str, exit: i32) -> String {
    wait_shown(cluster, (severity, about), exit, "")
}

/// Waits until a trouble is shown with these words in it. A process that dies is silent first: its last thread holds its files.
fn wait_shown(cluster: &Cluster, (severity, about): (&str, &str), exit: i32, words: &str) -> String {
    let (mut shown, began) = (None, Instant::now());
    while began.elapsed() < PATIENCE {
        let (status, code) = cluster.status_and_exit();
        shown = find(&status, severity, about);
        if let Some(printed) = shown.take_if(|printed| printed.contains(words) && code == exit) {
            return printed;
        }
    }
    panic!("{severity} about {about} with {words:?} and exit status {exit}: {shown:?}");
}

fn find(status: &Value, severity: &str, about: &str) -> Option<String> {
    let mut troubles = status["troubles"].as_array().unwrap().iter();
    let found = troubles.find(|t| t["severity"] == severity && t["about"] == about);
    found.map(|t| format!("{}: {}", t["text"].as_str().unwrap(), t["action"].as_str().unwrap()))
}

fn wait_healthy(cluster: &Cluster) {
    let (mut last, began) = (Value::Null, Instant::now());
    while began.elapsed() < PATIENCE {
        let (status, code) = cluster.status_and_exit();
        if code == 0 && status["healthy"] == true && status["state"] == "healthy" {
            return;
        }
        last = status["troubles"].clone();
    }
    panic!("it is not healthy again: {last:#}");
}

/// Asks until a command prints this and ends so: on a busy machine one answer or another is late now and then,
/// and is a trouble of that moment.
fn wait_printed(cluster: &Cluster, args: &[&str], exit: i32, fits: impl Fn(&str) -> bool) -> String {
    let (mut last, began) = (String::new(), Instant::now());
    while began.elapsed() < PATIENCE {
        let output = cluster.try_run_weir(args);
        last = text(&output.stdout);
        if output.status.code() == Some(exit) && fits(&last) {
            return last;
        }
    }
    panic!("{args:?} never ends with {exit} and what is expected; last: {last}");
}

#[test]
fn every_part_that_fails_is_named_and_counts() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    let cluster = &bench.cluster;
    wait_healthy(cluster);
    let healthy = "healthy; all 6 targets up, all 24 placement groups complete";
    let shown = wait_printed(cluster, &["status"], 0, |shown| shown.lines().next() == Some(healthy));
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines[1].contains(" free for files with ec:4+2, "), "{shown}");
    assert_eq!(lines[2], "any 2 more targets may fail without loss of data");
    wait_printed(cluster, &["status", "--brief"], 0, |shown| shown.lines().collect::<Vec<_>>() == [healthy]);
    // Schemes that no file has are of no interest.
    assert!(!shown.contains("replica:2"), "{shown}");

    // A mover, which a relation needs.
    cluster.kill("mover-1");
    wait_shown(cluster, ("warning", "mover-1"), 1, "mover-1 is not running: `weir up --dir ");
    wait_printed(cluster, &["status", "--brief"], 1, |shown| {
        let lines: Vec<&str> = shown.lines().map(str::trim_end).collect();
        lines[0].starts_with("warning: all data is available and redundant; all 6")
            && lines[1..] == ["  warning   mover-1 is not running"]
    });
    cluster.up();
    wait_healthy(cluster);

    // A home that is missing, and one that returns.
    bench.relate();
    bench.wait_state("synced");
    let elsewhere = bench.home.with_file_name("elsewhere");
    fs::rename(&bench.home, &elsewhere).unwrap();
    let words = format!("there is no directory {}", bench.url());
    wait_shown(cluster, ("warning", "r1"), 1, &words);
    fs::rename(&elsewhere, &bench.home).unwrap();
    wait_healthy(cluster);
    bench.run_weir(&["relation", "pause", "r1"]);
    wait_reported(cluster, "warning", "r1", 1);
    bench.run_weir(&["relation", "resume", "r1"]);

    // A volume at its limit.
    bench.run_weir(&["volume", "create", "small", "--bytes", "1MiB"]);
    fs::write(cluster.mount().join("small/f"), pattern(1, 1 << 20)).unwrap();
    wait_shown(cluster, ("warning", "small"), 1, "volume small is full (1.00 MiB of 1.00 MiB)");
    bench.run_weir(&["volume", "quota", "small", "--bytes", "10MiB"]);
    wait_healthy(cluster);

    // A mount whose process died.
    cluster.kill("mount-1");
    wait_shown(cluster, ("warning", "mount-1"), 1, "is dead (its process has ended)");
    cluster.up();
    wait_healthy(cluster);

    // A target: all data is available, with less redundancy; three: not all of it is.
    cluster.kill("storage-2");
    let words = "storage-2 is down: t2 is missing from 24 placement groups";
    wait_shown(cluster, ("degraded", "storage-2"), 1, words);
    let words = "degraded: data is available with reduced redundancy; 5 of 6 targets up";
    wait_printed(cluster, &["status"], 1, |shown| shown.contains(words));
    for name in ["storage-3", "storage-4"] {
        cluster.kill(name);
    }
    wait_reported(cluster, "critical", "placement groups", 2);
    cluster.up();
    wait_healthy(cluster);

    // The metadata server.
    cluster.kill("meta");
    // Until the coordinator knows it, the server does not answer.
    let words = "namespace \"root\" has no active metadata server; files are unavailable";
    wait_shown(cluster, ("critical", "root"), 2, words);
    let (status, _) = cluster.status_and_exit();
    assert_eq!(status["troubles"][0]["severity"], "critical", "the worst is first");
    cluster.up();
    wait_healthy(cluster);
}

/// A small file system in memory at a directory, until this goes.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn of(size: &str) -> Tmpfs {
        let at = tempfile::tempdir().unwrap();
        let size = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "weir-test"]).arg(at.path()).status();
        assert!(mounted.unwrap().success());
        Tmpfs(at)
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
}
impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_hanging_process_is_named_and_delays_no_answer() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--movers", "1"]);
    wait_healthy(&cluster);
    {
        let _mount = cluster.stop("mount-1");
        let printed = wait_reported(&cluster, "warning", "mount-1", 1);
        assert!(printed.contains("does not answer: see whether its process is stopped"), "{printed}");
    }
    wait_healthy(&cluster);
    {
        let _mover = cluster.stop("mover-1");
        let printed = wait_reported(&cluster, "warning", "mover-1", 1);
        assert!(printed.starts_with("mover mover-1 has reported nothing for "), "{printed}");
        assert!(printed.contains("see whether it is stopped; its log is "), "{printed}");
    }
    wait_healthy(&cluster);
    {
        let _meta = cluster.stop("meta");
        let asked = Instant::now();
        let (status, code) = cluster.status_and_exit();
        let took = asked.elapsed();
        assert_eq!(code, 2, "{status:#}");
        let printed = find(&status, "critical", "root").unwrap();
        assert!(printed.contains("the metadata server of namespace \"root\" does not answer"), "{printed}");
        // Two seconds, and what a busy machine adds.
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
    wait_healthy(&cluster);
}

#[test]
fn backups_and_exports_that_fail_are_named() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    let cluster = &bench.cluster;
    fs::write(bench.data.join("f"), pattern(1, 1 << 20)).unwrap();
    let place = bench.home.with_file_name("backups");
    fs::create_dir(&place).unwrap();
    let url = format!("file://{}", place.display());
    bench.run_weir(&["volume", "backup", "data", "--to", &url, "--every", "1h"]);
    wait_healthy(cluster);
    let elsewhere = place.with_file_name("elsewhere");
    fs::rename(&place, &elsewhere).unwrap();
    let printed = wait_reported(cluster, "warning", "data", 1);
    assert!(printed.contains("there is no directory"), "{printed}");
    fs::rename(&elsewhere, &place).unwrap();
    wait_healthy(cluster);

    // A disk for exports that has no room for one.
    let small = Tmpfs::of("4k");
    fs::write(small.path().join("filler"), [1; 4096]).unwrap();
    let dir = small.path().display().to_string();
    bench.run_weir(&["namespace", "export", &dir, "--every", "1h"]);
    let printed = wait_reported(cluster, "warning", "root", 1);
    assert!(
        printed.starts_with(&format!("the metadata of namespace \"root\" was not exported to {dir}: ")),
        "{printed}"
    );
    bench.run_weir(&["namespace", "export", "--off"]);
    wait_healthy(cluster);
}

#[test]
fn a_disk_of_metadata_that_gets_full_is_named() {
    if !can_mount() {
        return;
    }
    let disk = Tmpfs::of("2g");
    let cluster = Cluster::at(Some(disk.path().join("cluster")), 1, &[]);
    wait_healthy(&cluster);
    let space = rustix::fs::statvfs(disk.path()).unwrap();
    let free = space.f_bavail * space.f_frsize;
    let all = space.f_blocks * space.f_frsize;
    let filler = fs::File::create(disk.path().join("filler")).unwrap();
    rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, free - all * 3 / 100).unwrap();
    // One after the other reports it.
    let mut printed = String::new();
    wait_until("both name their disk", PATIENCE, || {
        printed = wait_reported(&cluster, "warning", "coord", 1);
        printed.starts_with("the disk of coord, meta is 9")
    });
    assert!(printed.contains("% full (") && printed.contains(" free, directory "), "{printed}");
    drop(filler);
    fs::remove_file(disk.path().join("filler")).unwrap();
    wait_healthy(&cluster);
    drop(cluster);
}

/// What `weir events` lists of a code: when each began, and when it ended.
fn events_of(cluster: &Cluster, code: &str) -> Vec<(u64, Option<u64>)> {
    let log: Value = serde_json::from_str(&cluster.run_weir(&["events", "--json"])).unwrap();
    let events = log["events"].as_array().unwrap().iter().filter(|event| event["code"] == code);
    events.map(|e| (e["raised_s"].as_u64().unwrap(), e["cleared_s"].as_u64())).collect()
}

/// An answer of the console: its head and its body.
fn get(port: u16, path: &str, cookie: &str) -> (String, String) {
    get_as(&format!("127.0.0.1:{port}"), port, path, cookie)
}

fn get_as(host: &str, port: u16, path: &str, cookie: &str) -> (String, String) {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// The states that the console's stream has from now on.
fn states(port: u16, cookie: &str) -> impl Iterator<Item = Value> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let path = "/api/v1/events/stream";
    write!(stream, "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n").unwrap();
    let lines = BufReader::new(stream).lines().map(Result::unwrap);
    lines.filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
}

/// A program whose output goes to a file, and that is ended with this value.
struct Follower(Child);

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_console_of_weir_up_notes_events_that_can_be_muted() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--movers", "1", "--console"]);
    let file = cluster.dir().join("run/console.link");
    let link = || fs::read_to_string(&file).unwrap().trim().to_owned();
    let first = link();
    let (port, path) = first.strip_prefix("http://127.0.0.1:").unwrap().split_once('/').unwrap();
    let port = port.parse().unwrap();
    let (head, _) = get(port, &format!("/{path}"), "");
    let cookie = head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap().to_owned();
    let cookie = cookie.split(';').next().unwrap();
    assert!(get(port, &format!("/{path}"), "").0.starts_with("HTTP/1.1 401"), "a link works once");
    assert_ne!(link(), first, "and there is another one");
    let (began, parts) = (Instant::now(), ["/", "/console.js", "/dom.js", "/graph.js", "/console.css"]);
    let bytes: usize = parts.iter().map(|part| get(port, part, cookie).1.len()).sum();
    eprintln!("the page has {bytes} bytes and came within {:?}", began.elapsed());
    assert!(bytes < 200_000);

    assert!(get(port, "/api/v1/events/stream", "").0.starts_with("HTTP/1.1 401"));
    // Through a tunnel of ssh, and from a page whose name leads here.
    assert!(get_as("localhost:18080", port, "/", cookie).0.starts_with("HTTP/1.1 200"));
    assert!(get_as("other.example:18080", port, "/", cookie).0.starts_with("HTTP/1.1 403"));
    wait_healthy(&cluster);
    let followed = cluster.dir().join("followed");
    let follow = ["events", "--follow", "--dir", cluster.dir().to_str().unwrap()].map(str::to_owned);
    let mut follower = Command::new(env!("CARGO_BIN_EXE_weir"));
    follower.args(follow).stdout(fs::File::create(&followed).unwrap());
    let follower = Follower(follower.spawn().unwrap());
    let says = |word: &str| {
        let text = fs::read_to_string(&followed).unwrap();
        text.lines().any(|l| l.contains(word) && l.contains("warning   mover-down  mover-1 is not running"))
    };
    wait_until("it has begun", PATIENCE, || fs::metadata(&followed).unwrap().len() > 0);
    let mut states = states(port, cookie);
    let is_healthy = |s: &Value| s["status"]["healthy"] == true && s["troubles"] == Value::Array(vec![]);
    assert!(states.any(|state| is_healthy(&state)), "the stream ended");
    cluster.kill("mover-1");
    let troubles = |state: &Value| state["troubles"].to_string();
    assert!(states.any(|state| troubles(&state).contains("mover-down")), "the stream ended");
    let is_dead = |p: &Value| p["name"] == "mover-1" && p["answers"] == false && p["since_s"].is_u64();
    let stays = |state: Value| state["status"]["processes"].as_array().unwrap().iter().any(is_dead);
    assert!(states.any(stays), "a dead process does not stay");
    drop(states);
    wait_until("the event is followed", PATIENCE, || says("  raised  "));
    let lasts = || events_of(&cluster, "mover-down").last().is_some_and(|event| event.1.is_none());
    wait_until("the event is noted", PATIENCE, lasts);
    assert!(
        get(port, "/metrics", "").1.contains("weir_troubles{code=\"mover-down\",severity=\"warning\"} 1")
    );
    cluster.run_weir(&["events", "ack", "mover-down"]);
    assert!(cluster.run_weir(&["events"]).contains("lasts, known"));
    assert_eq!(cluster.status_and_exit().1, 1);
    cluster.run_weir(&["events", "mute", "mover-down", "mover-1", "--until", "1h"]);
    wait_printed(&cluster, &["status", "--brief"], 0, |brief| {
        brief.starts_with("healthy; ") && brief.ends_with("\nmuted: mover-down (mover-1)\n")
    });
    cluster.run_weir(&["events", "unmute", "mover-down"]);
    assert_eq!(cluster.status_and_exit().1, 1);
    let unknown = cluster.try_run_weir(&["events", "mute", "mover-dwon", "--until", "1h"]);
    assert!(text(&unknown.stderr).contains("`weir events kinds` lists them"));
    // The log is the coordinator's, and durable.
    cluster.kill("coord");
    cluster.up();
    let cleared = || events_of(&cluster, "mover-down").last().is_some_and(|event| event.1.is_some());
    wait_until("the event has ended", PATIENCE, cleared);
    wait_until("its end is followed, past the death of the coordinator", PATIENCE, || says("  cleared  "));
    drop(follower);
    let api = |path: &str| -> Value { serde_json::from_str(&get(port, path, cookie).1).unwrap() };
    let events = api("/api/v1/events");
    assert!(
        events["events"].as_array().unwrap().iter().any(|event| event["code"] == "mover-down"),
        "{events}"
    );
    for series in ["weir_rpc_seconds", "weir_store_disk_seconds:mean", "weir_target_used_bytes%7Bt1%7D"] {
        wait_until("a graph has points", PATIENCE, || {
            let read = api(&format!("/api/v1/history?series={series}&minutes=5"));
            read["points"].as_array().unwrap().iter().any(Value::is_number)
        });
    }
    assert_eq!(api("/api/v1/space")["days_to_full"], Value::Null, "an hour has not passed");
    assert_eq!(api("/api/v1/proof")["targets"].as_array().unwrap().len(), 6);
    cluster.kill("console");
    let printed = wait_reported(&cluster, "warning", "console", 1);
    assert!(printed.starts_with("the console is not running"), "{printed}");
}

#[test]
fn events_need_no_console_and_outlive_the_leading_coordinator() {
    if !can_mount() || !has("etcd") {
        return;
    }
    let cluster = Cluster::with(1, &["--etcd", "3"]);
    cluster.kill("storage-2");
    let last = || events_of(&cluster, "storage-down").last().copied();
    wait_until("the event is noted", PATIENCE, || last().is_some_and(|event| event.1.is_none()));
    let raised = last().unwrap().0;
    let leads = |n: &u32| {
        let socket = cluster.dir().join(format!("socket/coord-{n}.sock"));
        std::os::unix::net::UnixStream::connect(socket).is_ok()
    };
    let leader = (1..=3).find(leads).unwrap();
    cluster.kill(&format!("coord-{leader}"));
    wait_until("another coordinator leads", PATIENCE, || {
        (1..=3).any(|n| n != leader && leads(&n)) && cluster.try_run_weir(&["events"]).status.success()
    });
    assert_eq!(last(), Some((raised, None)), "the next leader continues the log");
    cluster.up();
    wait_until("its end is noted", PATIENCE, || last().is_some_and(|event| event.1.is_some()));
    assert_eq!(last().unwrap().0, raised);
}

#[test]
fn a_log_of_weir_up_is_rotated_and_loses_no_line() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(1);
    cluster.launcher = ["env", "WEIR_LOG_BYTES=5000", "WEIR_LOG=trace"].map(String::from).to_vec();
    cluster.kill("storage-2");
    cluster.up();
    let log = |n: usize| {
        cluster.dir().join(if n == 0 { "log/storage-2.log".into() } else { format!("log/storage-2.log.{n}") })
    };
    wait_until("three earlier files are kept", PATIENCE, || {
        // Each write is a line in the log of a target, at this level.
        fs::write(cluster.mount().join("f"), pattern(1, 1 << 20)).unwrap();
        log(3).exists()
    });
    assert!(!log(4).exists());
    // Every file begins and ends with a whole line; stderr leads to the newest one.
    for n in [2, 1] {
        let text = fs::read_to_string(log(n)).unwrap();
        assert!(text.ends_with('\n') && text.len() >= 5000, "{} bytes", text.len());
        assert!(text.starts_with("20"), "a line begins with its time: {text}");
    }
    let pid = cluster.pid("storage-2").unwrap();
    let opened = [1, 2].map(|fd| fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap());
    assert_eq!(opened, [log(0), log(0)]);
}

#[test]
fn clients_are_listed_with_what_they_hold() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--movers", "1"]);
    let mut file = fs::File::create(cluster.mount().join("f")).unwrap();
    file.write_all(&pattern(1, 100_000)).unwrap();
    let mut listed = Value::Null;
    wait_until("the mount reports", PATIENCE, || {
        listed = serde_json::from_str(&cluster.run_weir(&["client", "list", "--json"])).unwrap();
        let all = listed.as_array().unwrap();
        all.len() == 2 && all.iter().all(|client| client["release"].is_string())
    });
    let client = |role: &str| listed.as_array().unwrap().iter().find(|c| c["role"] == role).unwrap();
    let mount = client("mount");
    assert!(mount["client"].as_str().unwrap().starts_with("mount-1:"), "{listed:#}");
    assert_eq!((&mount["open_files"], &mount["open_to_write"]), (&1.into(), &1.into()), "{listed:#}");
    assert!(
        mount["leases"].as_u64() >= Some(1) && mount["last_contact_ms"].as_u64() < Some(60_000),
        "{listed:#}"
    );
    assert_eq!((&mount["connected"], &mount["locks"]), (&true.into(), &0.into()), "{listed:#}");
    assert_eq!(client("mover")["client"], "mover mover-1", "{listed:#}");
    let shown = cluster.run_weir(&["client", "list"]);
    assert!(shown.starts_with("CLIENT ") && shown.lines().count() == 3, "{shown}");
    // A program that asks for JSON gets it, also where there is an error.
    let failed = cluster.try_run_weir(&["volume", "show", "nope", "--json"]);
    let error: Value = serde_json::from_slice(&failed.stderr).unwrap();
    assert_eq!((failed.status.code(), &error["exit_status"]), (Some(3), &3.into()), "{error:#}");
    assert!(error["error"].as_str().unwrap().contains("nope") && error["hint"].is_string(), "{error:#}");
    drop(file);
}
