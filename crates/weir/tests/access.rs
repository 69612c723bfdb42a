//! What other users of a machine cannot do: reach the cluster's servers under another identity, use a mover's
//! or root's rights through homes, make root act on their files, or exhaust a server.
//!
//! The tests are root's: they act as other users.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]

mod common;
#[path = "access/homes.rs"]
mod homes;

use bytes::Bytes;
use common::relation::{Bench, PATIENCE};
use common::{Cluster, can_mount, ends, errno, left_out, pattern, shell, text, wait_until, weir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use weir_proto::data::PassOn;
use weir_proto::frame::{FrameKind, HEADER_BYTES, Header, Hello};
use weir_proto::map::Role;
use weir_proto::methods::{self, Method};
use weir_proto::sender::Sender;
use weir_proto::version::LEVEL_MAX;
use weir_proto::{Error, ErrorKind, Request, TargetId, Wire};

const ADA: u32 = 1000;
const NOBODY: u32 = 65534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root() || left_out("only root can act as other users")
}

/// Lets other users come as far as the files of a test.
fn open_the_way(path: &Path) {
    fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
}

fn as_user(uid: u32, words: &[&str]) -> Output {
    let uid = uid.to_string();
    Command::new("setpriv")
        .args(["--reuid", &uid, "--regid", &uid, "--clear-groups"])
        .args(words)
        .output()
        .unwrap()
}

fn weir_as(uid: u32, cluster: &Cluster, args: &[&str]) -> Output {
    let dir = cluster.dir();
    as_user(uid, &[&[env!("CARGO_BIN_EXE_weir")], args, &["--dir", dir.to_str().unwrap()]].concat())
}

fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Exit code 5 is for what is not permitted.
fn denied(output: &Output, words: &str) {
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{}{printed}", text(&output.stdout));
    assert!(printed.contains(words), "{printed:?} lacks {words:?}");
}

#[test]
fn other_users_may_read_status_and_manage_their_own_volumes() {
    if !can_mount() || !is_root() {
        return;
    }
    let cluster = Cluster::start(1);
    open_the_way(&cluster.dir());
    cluster.run_weir(&["volume", "create", "hers", "--owner", "1000"]);
    cluster.run_weir(&["volume", "create", "ours"]);
    let as_ada = |args: &[&str]| weir_as(ADA, &cluster, args);
    assert!(succeeds(&as_ada(&["status"])).contains("healthy"));
    assert!(succeeds(&as_ada(&["volume", "list"])).contains("ours"));
    succeeds(&as_ada(&["volume", "quota", "hers", "--soft-bytes", "1GB"]));
    succeeds(&as_ada(&["volume", "snapshot", "hers", "one"]));
    // Files of the cluster, of the superuser or of another user.
    denied(&as_ada(&["target", "clear", "t1"]), "user 1000 may not do that here");
    denied(&as_ada(&["upgrade", "finish"]), "user 1000 may not do that here");
    denied(&as_ada(&["volume", "quota", "hers", "--bytes", "2GB"]), "only the superuser");
    denied(&as_ada(&["volume", "quota", "ours", "--soft-bytes", "1GB"]), "user 1000");
    denied(&as_ada(&["volume", "create", "more"]), "user 1000 may not do that here");
    // Its socket refuses others, and so does the door where a user claims to be another one.
    for name in ["coord", "meta", "storage-1"] {
        let refused =
            as_user(ADA, &["test", "-w", cluster.dir().join("socket").join(name).to_str().unwrap()]);
        assert!(!refused.status.success());
    }
    // Root of a user namespace is the user who made it.
    for args in [&["target", "clear", "t1"][..], &["volume", "create", "more"]] {
        let dir = cluster.dir();
        let words =
            [&["unshare", "-Ur", env!("CARGO_BIN_EXE_weir")], args, &["--dir", dir.to_str().unwrap()]];
        let output = as_user(NOBODY, &words.concat());
        denied(&output, "user 65534");
    }
    assert_eq!(cluster.status()["healthy"], true);
    // Bytes of files lie there without the files' rights.
    for name in ["t1", "meta", "coord", "log", "etc"] {
        let refused = as_user(ADA, &["ls", cluster.dir().join(name).to_str().unwrap()]);
        assert!(!refused.status.success(), "{name} is open");
    }
}

/// Through a mount: each user is refused at its own limit and sees it, and the volume's owner sees all.
#[test]
fn users_have_limits_of_their_own_and_see_them() {
    if !can_mount() || !is_root() {
        return;
    }
    let cluster = Cluster::start(1);
    open_the_way(&cluster.dir());
    cluster.run_weir(&["volume", "create", "work", "--owner", "1000", "--mode", "777"]);
    let limit = ["volume", "quota", "work", "--user", "65534", "--bytes", "1MiB", "--inodes", "2"];
    let printed = succeeds(&weir_as(ADA, &cluster, &limit));
    assert!(printed.contains("in work: 1.00 MiB and 2 files"), "{printed}");
    let work = cluster.mount().join("work");
    let fill = |uid, name: &str| {
        let line = format!("head -c 2000000 /dev/zero > {}", work.join(name).display());
        as_user(uid, &["sh", "-c", &line])
    };
    let refused = fill(NOBODY, "a");
    assert!(text(&refused.stderr).contains("quota"), "{refused:?}");
    assert_eq!(fs::metadata(work.join("a")).unwrap().len(), 1 << 20, "to the byte");
    succeeds(&fill(ADA, "b"));
    succeeds(&as_user(NOBODY, &["touch", work.join("c").to_str().unwrap()]));
    assert!(!as_user(NOBODY, &["touch", work.join("d").to_str().unwrap()]).status.success());
    // The owner of a file is charged, not the one who wrote it: a file given away helps.
    let rows = |output: Output| -> Vec<Value> { serde_json::from_str(&succeeds(&output)).unwrap() };
    let of = |rows: &[Value], id: u32, volume: Option<&str>| -> (u64, u64, String) {
        let is_it = |r: &&Value| r["kind"] == "user" && r["id"] == id && r["volume"].as_str() == volume;
        let row = rows.iter().find(is_it).unwrap_or_else(|| panic!("{rows:?}"));
        let number = |field: &str| row[field].as_u64().unwrap();
        (number("used_bytes"), number("files_and_directories"), row["state"].as_str().unwrap().into())
    };
    let all = rows(weir_as(ADA, &cluster, &["volume", "quota", "work", "--json"]));
    assert_eq!(of(&all, NOBODY, Some("work")), (1 << 20, 2, "full".into()));
    assert_eq!(of(&all, ADA, Some("work")), (2_000_000, 1, "ok".into()));
    // Users ask their mount, which knows who they are.
    let at = cluster.mount();
    let ask = |args: &[&str]| {
        let (weir, at) = (env!("CARGO_BIN_EXE_weir"), ["--json", "--at", at.to_str().unwrap()]);
        as_user(NOBODY, &[&[weir], args, &at].concat())
    };
    let own = rows(ask(&["quota"]));
    assert_eq!(of(&own, NOBODY, Some("work")), (1 << 20, 2, "full".into()));
    assert_eq!(of(&own, NOBODY, None).0, 1 << 20, "in all volumes");
    denied(&ask(&["quota", "--user", "1000"]), "user 65534 may not see the usage of user 1000");
    denied(&ask(&["volume", "quota", "work"]), "neither owns nor administers");
    denied(&ask(&["volume", "quota", "work", "--user", "65534", "--reset"]), "neither owns nor administers");
    chown(work.join("a"), Some(ADA), None).unwrap();
    succeeds(&as_user(NOBODY, &["touch", work.join("d").to_str().unwrap()]));
    cluster.run_weir(&["volume", "quota", "work", "--user", "65534", "--reset"]);
    succeeds(&fill(NOBODY, "c"));
}

/// The records of the audit log, by `weir audit show`: of each record what, on, role, uid and the result.
fn audited(cluster: &Cluster) -> Vec<(String, String, String, Option<u64>, String)> {
    let shown: Value = serde_json::from_str(&cluster.run_weir(&["audit", "show", "--json"])).unwrap();
    let word = |record: &Value, field: &str| record[field].as_str().unwrap().to_owned();
    let row =
        |r: &Value| (word(r, "what"), word(r, "on"), word(r, "role"), r["uid"].as_u64(), word(r, "result"));
    shown.as_array().unwrap().iter().map(row).collect()
}

/// The action, its object, the role, the beginning of its result; and the user.
fn has(cluster: &Cluster, [what, on, role, result]: [&str; 4], uid: Option<u64>) -> bool {
    audited(cluster)
        .iter()
        .any(|r| r.0 == what && r.1.contains(on) && r.2 == role && r.3 == uid && r.4.starts_with(result))
}

#[test]
fn the_audit_log_has_refusals_and_a_changed_byte_is_found() {
    if !is_root() {
        return;
    }
    let cluster = Cluster::with(0, &["--targets", "1"]);
    open_the_way(&cluster.dir());
    cluster.run_weir(&["volume", "create", "hers", "--owner", "1000"]);
    succeeds(&weir_as(ADA, &cluster, &["volume", "quota", "hers", "--soft-bytes", "1GB"]));
    denied(&weir_as(ADA, &cluster, &["volume", "quota", "hers", "--bytes", "2GB"]), "only the superuser");
    denied(
        &weir_as(ADA, &cluster, &["target", "clear", "t1"]),
        "user 1000 may not do that here: files are used through a mount",
    );
    assert!(!cluster.try_run_weir(&["target", "clear", "t9"]).status.success());
    let wanted = [
        (["Join", "storage-1", "storage node", "ok"], None),
        (["LeadNamespace", "root", "metadata server", "ok"], None),
        (["VolumeCreate", "volume hers at /hers, owner 1000", "console", "ok"], Some(0)),
        (["VolumeChange", "limits", "user", "ok"], Some(1000)),
        (["VolumeChange", "limits", "user", "refused: "], Some(1000)),
        (["ClearTarget", "", "user", "refused: user 1000 may not do that here"], Some(1000)),
        (["ClearTarget", "target t9", "console", "failed: "], None),
    ];
    for (want, uid) in wanted {
        wait_until(&format!("{want:?}"), PATIENCE, || has(&cluster, want, uid));
    }
    // Requests for data and names, and those that only look, are not in it.
    let whats: Vec<String> = audited(&cluster).into_iter().filter(|r| r.4 == "ok").map(|r| r.0).collect();
    let quiet = ["SessionOpen", "VolumeList", "GetStatus", "Heartbeat", "Lookup"];
    assert!(whats.iter().all(|what| !quiet.contains(&what.as_str())), "{whats:?}");
    let since = cluster.run_weir(&["audit", "show", "--since", "2100-01-01"]);
    assert_eq!(since.lines().count(), 1, "{since}");
    // It is for root and the user of the servers.
    denied(&weir_as(ADA, &cluster, &["audit", "show"]), "coord");

    // The chain continues after a restart, and a changed byte is found.
    let dir = cluster.dir();
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    let verify = |more: &[&str]| cluster.try_run_weir(&[&["audit", "verify"], more].concat());
    let first = text(&verify(&[]).stdout);
    let last = first.lines().find_map(|l| l.rsplit_once(" is ")).unwrap().1.to_owned();
    cluster.up();
    let again = verify(&["--expect", &last]);
    assert!(
        again.status.success() && text(&again.stdout) != first,
        "{}{}",
        text(&again.stdout),
        text(&again.stderr)
    );
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    let log = dir.join("meta/audit.jsonl");
    assert_eq!(fs::metadata(&log).unwrap().mode() & 0o777, 0o600);
    let whole = fs::read(&log).unwrap();
    let mut bytes = whole.clone();
    let at = bytes.windows(8).position(|w| w == b"refused:").unwrap();
    bytes[at] ^= 1;
    fs::write(&log, &bytes).unwrap();
    let found = verify(&[]);
    let line = whole[..at].iter().filter(|b| **b == b'\n').count() + 1;
    let words = format!("{} line {line}: the line was changed", log.display());
    assert!(
        found.status.code() == Some(1) && text(&found.stdout).contains(&words),
        "{}",
        text(&found.stdout)
    );
    // Records that were removed at the end are missing for a reader that kept the last one.
    let line_end = whole[..whole.len() - 1].iter().rposition(|b| *b == b'\n').unwrap();
    let tip = text(&whole[line_end + 1..]);
    let field = |name: &str| {
        tip.split(name).nth(1).unwrap().split(['"', ',']).find(|w| !w.is_empty()).unwrap().to_owned()
    };
    let kept = format!("{}:{}", field("\"number\":"), field("\"hash\":\""));
    fs::write(&log, &whole).unwrap();
    assert!(verify(&["--expect", &kept]).status.success());
    fs::write(&log, &whole[..=line_end]).unwrap();
    assert!(verify(&[]).status.success());
    assert_eq!(verify(&["--expect", &kept]).status.code(), Some(1));
}

#[test]
fn no_server_listens_on_tcp_unless_asked() {
    let cluster = Cluster::start(0);
    let listens = |cluster: &Cluster| -> Vec<String> {
        let mut found = Vec::new();
        for name in cluster.names() {
            let pid = cluster.pid(&name).unwrap();
            let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
            let sockets: Vec<PathBuf> = links.flat_map(|fd| fs::read_link(fd.path())).collect();
            for table in ["tcp", "tcp6"] {
                let table = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
                for line in table.lines().skip(1) {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    let socket = PathBuf::from(format!("socket:[{}]", fields[9]));
                    if fields[3] == "0A" && sockets.contains(&socket) {
                        found.push(name.clone());
                    }
                }
            }
        }
        found
    };
    assert_eq!(listens(&cluster), Vec::<String>::new());
    let cluster = Cluster::with(0, &["--targets", "1", "--tcp"]);
    assert_eq!(listens(&cluster), ["coord", "meta", "storage-1"]);
}

#[test]
fn directories_of_another_user_are_refused() {
    if !is_root() {
        return;
    }
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("theirs");
    fs::create_dir(&dir).unwrap();
    chown(&dir, Some(ADA), Some(ADA)).unwrap();
    let path = dir.to_str().unwrap();
    denied(&weir(&["up", "--dir", path]), "belongs to user 1000");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    chown(&dir, Some(0), Some(0)).unwrap();
    denied(&weir(&["up", "--dir", path]), "can be changed by all users");

    // Of a whole cluster: each thing that a command would act on.
    let cluster = Cluster::with(0, &["--targets", "1"]);
    let dir = cluster.dir();
    let both = |words: &str| {
        for verb in ["up", "down"] {
            denied(&weir(&[verb, "--dir", dir.to_str().unwrap()]), words);
        }
    };
    for name in ["cluster.toml", "run", "etc", "log", "socket", ""] {
        chown(dir.join(name), Some(ADA), None).unwrap();
        both("belongs to user 1000");
        chown(dir.join(name), Some(0), None).unwrap();
    }
    let (run, renamed, precious) = (dir.join("run"), dir.join("run.aside"), top.path().join("precious"));
    fs::rename(&run, &renamed).unwrap();
    symlink(&renamed, &run).unwrap();
    both("run is a symbolic link");
    fs::remove_file(&run).unwrap();
    fs::rename(&renamed, &run).unwrap();
    // A file that is made there is made there, not where a link leads.
    fs::write(&precious, "kept").unwrap();
    let _ = fs::remove_file(run.join("up.lock"));
    symlink(&precious, run.join("up.lock")).unwrap();
    denied(&weir(&["up", "--dir", dir.to_str().unwrap()]), "up.lock is a symbolic link");
    assert_eq!(fs::read_to_string(&precious).unwrap(), "kept");
    fs::remove_file(run.join("up.lock")).unwrap();
    // Nothing is mounted over what is another user's.
    let point = top.path().join("point");
    fs::create_dir(&point).unwrap();
    chown(&point, Some(ADA), None).unwrap();
    let mount = ["up", "--dir", dir.to_str().unwrap(), "--mount", point.to_str().unwrap()];
    denied(&weir(&mount), "point belongs to user 1000");
}

/// A cluster whose volume `data` belongs to a user with homes below a directory.
struct Users {
    bench: Bench,
    allowed: tempfile::TempDir,
}

impl Users {
    fn start() -> Users {
        let allowed = tempfile::tempdir().unwrap();
        fs::set_permissions(allowed.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let place = format!("file://{}", allowed.path().display());
        let bench = Bench::with(&["--movers", "1", "--allow-home", &place]);
        open_the_way(&bench.cluster.dir());
        bench.run_weir(&["volume", "create", "data", "--owner", "1000"]);
        Users { bench, allowed }
    }
    fn add(&self, url: &str, more: &[&str]) -> Output {
        weir_as(ADA, &self.bench.cluster, &[&["relation", "add", "data", url], more].concat())
    }
    /// At a time when the place is allowed; the mover starts again when it is not any more.
    fn add_in_time(&self, url: &str, more: &[&str]) -> Output {
        self.bench.cluster.kill("mover-1");
        self.bench.run_weir(&["home", "allow", url]);
        let added = self.add(url, more);
        self.bench.run_weir(&["home", "forbid", url]);
        self.bench.cluster.up();
        added
    }
    /// All written data stays here, for this reason.
    fn is_held_back(&self, words: &str) {
        fs::write(self.bench.data.join("note"), b"note").unwrap();
        let mut last = String::new();
        wait_until(&format!("the home to be refused: {words}"), PATIENCE, || {
            let shown = self.bench.run_weir(&["relation", "list", "--json"]);
            let shown: Value = serde_json::from_str(&shown).unwrap();
            last = shown[0]["limited_by"].as_str().unwrap_or_default().to_owned();
            last.contains(words)
        });
    }
}

#[test]
fn a_user_has_a_home_where_users_may_and_it_is_the_users_own() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let hers = users.allowed.path().join("ada");
    fs::create_dir(&hers).unwrap();
    chown(&hers, Some(ADA), Some(ADA)).unwrap();
    succeeds(&users.add(&format!("file://{}", hers.display()), &[]));
    fs::write(users.bench.data.join("frame"), pattern(1, 1 << 20)).unwrap();
    users.bench.wait_state("synced");
    assert!(fs::read(hers.join("frame")).unwrap() == pattern(1, 1 << 20));
}

#[test]
fn a_link_to_a_foreign_directory_is_no_home() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let link = users.allowed.path().join("link");
    symlink(&users.bench.home, &link).unwrap(); // root's
    succeeds(&users.add(&format!("file://{}", link.display()), &[]));
    users.is_held_back("leads out of");
    assert_eq!(fs::read_dir(&users.bench.home).unwrap().count(), 0);
}

#[test]
fn a_directory_of_root_is_not_mirrored_for_a_user() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    fs::write(users.bench.home.join("shadow"), b"secret").unwrap();
    fs::set_permissions(&users.bench.home, fs::Permissions::from_mode(0o700)).unwrap();
    let url = users.bench.url();
    let mirror = ["--direction", "mirror"];
    let more = ["--direction", "mirror", "--map-uid", "1000=2000"];
    denied(&users.add_in_time(&url, &more), "only the superuser");
    denied(&users.add(&url, &mirror), &format!("user 1000 may not have the home {url}"));
    succeeds(&users.add_in_time(&url, &mirror));
    wait_until("the home to be refused", PATIENCE, || {
        let shown = users.bench.relation();
        shown["limited_by"].as_str().unwrap().contains("homes of users are allowed only in")
    });
    assert_eq!(users.bench.relation()["state"], "first scan", "nothing was seen of it");
}

/// The output of a program that fails; one that waits instead is an error of the test.
fn fails(words: &[&str]) -> String {
    let mut child = Command::new(words[0])
        .args(&words[1..])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = ends(&format!("{words:?}"), &mut child, PATIENCE);
    let mut printed = String::new();
    child.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(!status.success(), "{words:?} succeeded");
    printed
}

#[test]
fn programs_do_not_wait_for_a_home_that_the_mover_may_not_use() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let (bench, data) = (&users.bench, users.bench.data.to_str().unwrap());
    let frame = users.bench.data.join("frame");
    fs::write(bench.home.join("frame"), pattern(1, 1 << 20)).unwrap();
    succeeds(&users.add_in_time(&bench.url(), &["--direction", "mirror"]));
    for words in [&["ls", data][..], &["stat", frame.to_str().unwrap()]] {
        let printed = fails(words);
        assert!(printed.contains("Permission denied"), "{printed}");
    }
    let why = "user 1000 may not have the home";
    let log = fs::read_to_string(bench.cluster.dir().join("log/meta.log")).unwrap();
    assert!(log.contains("a home is not used: user 1000 may not have the home"), "{log}");
    let status = text(&bench.try_run_weir(&["status"]).stdout);
    assert!(status.contains("cannot be used") && status.contains(why), "{status}");
    // As soon as it may be used all continues.
    chown(&bench.home, Some(ADA), Some(ADA)).unwrap();
    bench.run_weir(&["up", "--allow-home", &bench.url()]);
    wait_until("the names to be there", PATIENCE, || frame.metadata().is_ok_and(|m| m.len() == 1 << 20));
    // Bytes that are at home only, likewise.
    chown(&bench.home, Some(0), Some(0)).unwrap();
    bench.cluster.kill("mover-1");
    bench.cluster.up();
    let printed = fails(&["cat", frame.to_str().unwrap()]);
    assert!(printed.contains("Input/output error"), "{printed}");
    chown(&bench.home, Some(ADA), Some(ADA)).unwrap();
    wait_until("the bytes to be there", PATIENCE, || {
        fs::read(&frame).is_ok_and(|b| b == pattern(1, 1 << 20))
    });
}

#[test]
fn a_home_in_the_cluster_itself_is_refused() {
    let cluster = Cluster::with(0, &["--targets", "1", "--tcp"]);
    cluster.run_weir(&["volume", "create", "data"]);
    let url = format!("weir://127.0.0.1:{}/elsewhere", cluster.port("coord"));
    for args in [&["relation", "add", "data", &url][..], &["volume", "create", "other", "--from", &url]] {
        let refused = cluster.try_run_weir(args);
        let printed = text(&refused.stderr);
        assert!(!refused.status.success() && printed.contains("in the very cluster"), "{args:?}: {printed}");
    }
    assert!(!cluster.run_weir(&["volume", "list"]).contains("other"));
}

#[test]
fn a_file_that_runs_as_its_owner_never_becomes_roots_at_home() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let bench = &users.bench;
    let program = bench.data.join("program");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    chown(&program, Some(ADA), Some(ADA)).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
    let url = bench.url();
    let to_root = bench.try_run_weir(&["relation", "add", "data", &url, "--map-uid", "1000=0"]);
    assert!(!to_root.status.success() && text(&to_root.stderr).contains("maps a user to root at home"));
    denied(&users.add_in_time(&url, &["--map-gid", "1000=2000"]), "only the superuser");
    // Whose home's own directory is was decided there.
    fs::set_permissions(&bench.home, fs::Permissions::from_mode(0o711)).unwrap();
    chown(&bench.home, Some(4242), Some(4243)).unwrap();
    bench.run_weir(&["relation", "add", "data", &url, "--map-uid", "1000=2000", "--map-gid", "1000=2001"]);
    let at_home = |path: &Path| {
        let meta = fs::metadata(path).unwrap();
        (meta.mode() & 0o7777, meta.uid(), meta.gid())
    };
    bench.wait_state("synced");
    assert_eq!(at_home(&bench.home.join("program")), (0o755, 2000, 2001));
    // Nor by a later change.
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(&bench.data, fs::Permissions::from_mode(0o777)).unwrap();
    wait_until("the mode to be at home", PATIENCE, || at_home(&bench.home.join("program")).0 == 0o711);
    bench.wait_state("synced");
    assert_eq!(at_home(&bench.home), (0o711, 4242, 4243));
}

#[test]
fn homes_do_not_lie_in_one_another_or_in_the_file_system() {
    if !can_mount() || !is_root() {
        return;
    }
    let bench = Bench::start();
    bench.run_weir(&["volume", "create", "other"]);
    bench.relate();
    fs::create_dir(bench.home.join("below")).unwrap();
    let url = bench.url();
    for taken in [url.clone(), format!("{url}/"), format!("{url}/below"), url.replace("/home", "")] {
        let refused = bench.try_run_weir(&["relation", "add", "other", &taken]);
        let printed = text(&refused.stderr);
        assert!(
            !refused.status.success() && printed.contains("the home of relation r1"),
            "{taken}: {printed}"
        );
    }
    let inside = bench.cluster.mount().join("other/inside");
    fs::create_dir(&inside).unwrap();
    bench.run_weir(&["relation", "remove", "r1"]);
    bench.run_weir(&["relation", "add", "data", &format!("file://{}", inside.display())]);
    fs::write(bench.data.join("note"), b"note").unwrap();
    wait_until("the home to be refused", PATIENCE, || {
        bench.run_weir(&["relation", "list"]); // it answers
        let shown = bench.run_weir(&["relation", "show", "r2", "--json"]);
        shown.contains("lies in the file system whose volume")
    });
    assert_eq!(fs::read_dir(&inside).unwrap().count(), 0);
}

fn framed(kind: FrameKind, payload_len: u32, body: &[u8]) -> Vec<u8> {
    let header = Header { body_len: body.len() as u32, payload_len, method: 110, ..Header::new(kind, 1) };
    [&header.encode(body)[..], body].concat()
}

/// A server's answers to requests by a node that claims this role; one for each method.
fn answers(
    port: u16,
    role: Role,
    calls: &[(&'static Method, u16, Vec<u8>)],
) -> BTreeMap<&'static str, Option<Error>> {
    let name = "anybody".to_owned();
    let hello =
        Hello { version_min: 1, version_max: 1, level: LEVEL_MAX, cluster: None, name, role, instance: 1 };
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&framed(FrameKind::Hello, 0, &hello.to_bytes())).unwrap();
    for (call, (_, method, body)) in calls.iter().enumerate() {
        let header = Header {
            method: *method,
            body_len: body.len() as u32,
            patience_ms: 60_000,
            ..Header::new(FrameKind::Request, call as u64)
        };
        stream.write_all(&[&header.encode(body)[..], body].concat()).unwrap();
    }
    let mut answers = BTreeMap::new();
    while answers.len() < calls.len() {
        let mut head = [0; HEADER_BYTES];
        stream.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut body = vec![0; header.body_len as usize + header.payload_len as usize];
        stream.read_exact(&mut body).unwrap();
        let answer = match header.kind {
            FrameKind::Response => None,
            FrameKind::ErrorResponse => Some(Error::from_bytes(&body).unwrap()),
            _ => continue,
        };
        assert!(answers.insert(calls[header.call as usize].0.name, answer).is_none());
    }
    answers
}

/// Each of these is refused with its name and the sender's role, unless it is for that role. Returns how many
/// are refused.
fn refuses_the_others(answers: &BTreeMap<&'static str, Option<Error>>, role: Role) -> usize {
    let (sender, mut refused) = (Sender::from(role), 0);
    for method in methods::all().filter(|m| answers.contains_key(m.name)) {
        let answer = &answers[method.name];
        let denied = answer.as_ref().filter(|e| e.kind == ErrorKind::Denied);
        let case = format!("{} from a {sender}: {answer:?}", method.name);
        assert_eq!(denied.is_some(), !method.by.has(sender), "{case}");
        let Some(denied) = denied else { continue };
        let is_named = denied.context.contains(method.name) && denied.context.contains(&sender.to_string());
        assert!(is_named, "{case}");
        refused += 1;
    }
    refused
}

#[test]
fn each_server_refuses_each_method_from_wrong_roles() {
    let cluster = Cluster::with(0, &["--targets", "1", "--tcp"]);
    let without_body: Vec<_> = methods::all().map(|m| (m, m.number, Vec::new())).collect();
    // To itself, by another way.
    let pass_on =
        |m: &Method| PassOn { target: TargetId(1), method: m.number, body: Bytes::new() }.to_bytes();
    let to_targets = methods::all().filter(|m| (200..300).contains(&m.number) && m.number != PassOn::METHOD);
    let passed_on: Vec<_> = to_targets.map(|m| (m, PassOn::METHOD, pass_on(m))).collect();
    let mut refused = 0;
    for role in Role::ALL {
        for server in ["coord", "meta", "storage-1"] {
            refused += refuses_the_others(&answers(cluster.port(server), *role, &without_body), *role);
        }
        let passed_on = match PassOn::BY.has((*role).into()) {
            true => answers(cluster.port("storage-1"), *role, &passed_on),
            false => BTreeMap::new(),
        };
        refused += refuses_the_others(&passed_on, *role);
    }
    assert!(refused > 3 * 200, "{refused}");
    assert!(cluster.run_weir(&["upgrade", "finish"]).contains(&format!("level {LEVEL_MAX}, the highest")));
    for method in ["Join", "FinishUpgrade", "VolumeDelete", "GetAttr"] {
        let want = [method, "", "coordinator", "refused: anybody at tcp:127.0.0.1:"];
        wait_until(&format!("{want:?}"), PATIENCE, || has(&cluster, want, None));
    }
    let verified = cluster.run_weir(&["audit", "verify"]);
    assert_eq!(verified.matches(" in one chain, the last one is ").count(), 2, "{verified}");
    assert_eq!(cluster.status()["healthy"], true);
}

fn resident_mib(pid: i64) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

#[test]
fn a_thousand_strangers_cost_little_and_lock_no_client_out() {
    let cluster = Cluster::with(0, &["--targets", "1", "--tcp"]);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let name = "stranger".to_owned();
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        level: LEVEL_MAX,
        cluster: None,
        name,
        role: Role::Mount,
        instance: 1,
    };
    for name in ["coord", "meta", "storage-1"] {
        let (pid, port) = (cluster.pid(name).unwrap(), cluster.port(name));
        let soft = shell(&format!("awk '/Max open files/ {{ print $4, $5 }}' /proc/{pid}/limits"));
        let (soft, hard) = soft.trim().split_once(' ').unwrap();
        assert_eq!(soft, hard, "of {name}");
        let before = resident_mib(pid);
        let silent: Vec<TcpStream> =
            (0..1000).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        // Peers that send a hello, and then begin the largest frames and do not end them.
        let mut slow: Vec<TcpStream> =
            (0..150).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        for stream in &mut slow {
            let _ = stream.write_all(&framed(FrameKind::Hello, 0, &hello.to_bytes()));
            let _ = stream.write_all(&framed(FrameKind::Request, 8 << 20, &[]));
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write(&vec![1; 1 << 20]); // as much as the kernel takes
        }
        let at = format!("tcp:127.0.0.1:{}", cluster.port("coord"));
        assert!(weir(&["status", "--coordinator", &at]).status.success(), "a newcomer to {name} is shut out");
        let volumes = weir(&["volume", "list", "--coordinator", &at]);
        assert!(volumes.status.success(), "{}", text(&volumes.stderr));
        let after = resident_mib(pid);
        assert!(after <= before + 160, "{name} grew from {before} to {after} MiB");
        drop((silent, slow));
    }
}

#[test]
fn a_cluster_mounts_without_a_target_that_does_not_start() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let file = cluster.mount().join("file");
    fs::write(&file, pattern(1, 5 << 20)).unwrap();
    let dir = cluster.dir();
    let down = || assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    down();
    let away = |n: u32| fs::rename(dir.join(format!("t{n}")), dir.join(format!("away-{n}"))).unwrap();
    away(1);
    let output = cluster.try_up();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("continues without storage-1"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("5 of 6 targets up"), "{}", text(&output.stdout));
    assert!(fs::read(&file).unwrap() == pattern(1, 5 << 20));
    fs::write(cluster.mount().join("more"), pattern(2, 1 << 20)).unwrap();
    // With fewer than a file needs it is refused, by name.
    down();
    (2..=3).for_each(away);
    let output = cluster.try_up();
    assert!(
        !output.status.success() && text(&output.stderr).contains("storage-"),
        "{}",
        text(&output.stderr)
    );
    for n in 1..=3 {
        let _ = fs::remove_dir_all(dir.join(format!("t{n}")));
        fs::rename(dir.join(format!("away-{n}")), dir.join(format!("t{n}"))).unwrap();
    }
    cluster.up();
    assert!(fs::read(cluster.mount().join("more")).unwrap() == pattern(2, 1 << 20));
}

#[test]
fn a_mover_whose_home_is_gone_ends_when_asked() {
    if !can_mount() {
        return;
    }
    let other = Cluster::with(0, &["--targets", "1", "--tcp"]);
    let bench = Bench::start();
    bench.relate_to(&format!("weir://127.0.0.1:{}/", other.port("coord")));
    fs::write(bench.data.join("file"), b"bytes").unwrap();
    bench.wait_state("synced");
    assert!(weir(&["down", "--dir", other.dir().to_str().unwrap()]).status.success());
    let down = weir(&["down", "--json", "--dir", bench.cluster.dir().to_str().unwrap()]);
    let printed: Value = serde_json::from_slice(&down.stdout).unwrap();
    assert_eq!(printed["killed"], Value::Array(Vec::new()), "{}", bench.cluster.logs());
    let log = fs::read_to_string(bench.cluster.dir().join("log/mover-1.log")).unwrap();
    assert!(log.contains("the mover has stopped"), "{log}");
}

#[test]
fn a_mount_of_another_mount_namespace_is_named() {
    if !can_mount() || !is_root() {
        return;
    }
    let mut cluster = Cluster::with(0, &["--targets", "1"]);
    let point = cluster.dir().with_file_name("mnt1");
    fs::create_dir(&point).unwrap();
    cluster.mounts.push(point.clone());
    cluster.launcher = ["unshare", "-m"].map(String::from).to_vec();
    cluster.up();
    cluster.launcher.clear();
    let pid = cluster.pid("mount-1").unwrap();
    let here = cluster.try_up();
    let printed = text(&here.stderr);
    let words = format!("process {pid} serves mount-1 at {} in another mount namespace", point.display());
    assert!(!here.status.success() && printed.contains(&words), "{printed}");
    // Also where its pid file is gone.
    fs::remove_file(cluster.dir().join("run/mount-1.pid")).unwrap();
    assert!(text(&cluster.try_up().stderr).contains(&words));
    let down = weir(&["down", "--dir", cluster.dir().to_str().unwrap()]);
    assert!(text(&down.stdout).contains(&words.replace("serves", "still serves")), "{}", text(&down.stdout));
    shell(&format!("kill -TERM {pid}"));
    let is_gone = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('Z'))
    };
    wait_until("the process to be gone", PATIENCE, is_gone);
    cluster.up();
    assert!(fs::read_dir(&point).is_ok());
}

/// Two mounts of one cluster: rules name the first one.
struct Ruled {
    cluster: Cluster,
    here: PathBuf,
    there: PathBuf,
}

impl Ruled {
    fn start() -> Ruled {
        let cluster = Cluster::with(2, &["--targets", "1"]);
        for name in ["p1", "p2", "p3"] {
            cluster.run_weir(&["volume", "create", name]);
        }
        let (here, there) = (cluster.mounts[0].clone(), cluster.mounts[1].clone());
        open_the_way(&cluster.dir());
        Ruled { cluster, here, there }
    }
    fn access(&self, args: &[&str]) -> String {
        self.cluster.run_weir(&[&["access"], args].concat())
    }
    fn refused(&self, args: &[&str], code: i32, words: &str) {
        let output = self.cluster.try_run_weir(&[&["access"], args].concat());
        let printed = text(&output.stderr);
        assert!(output.status.code() == Some(code) && printed.contains(words), "{args:?}: {printed}");
    }
}

#[test]
fn root_of_a_mount_is_nobody_where_a_rule_says_so() {
    if !can_mount() || !is_root() {
        return;
    }
    let ruled = Ruled::start();
    let (here, there) = (ruled.here.join("p1"), ruled.there.join("p1"));
    // A directory that root owns and all may search, a file of root's and one of a user's, and a directory
    // for all.
    let file = |name: &str, mode: u32, owner: Option<u32>| {
        fs::write(there.join(name), pattern(1, 100_000)).unwrap();
        fs::set_permissions(there.join(name), fs::Permissions::from_mode(mode)).unwrap();
        chown(there.join(name), owner, owner).unwrap();
    };
    fs::create_dir(there.join("d")).unwrap();
    file("d/public", 0o644, None);
    file("d/secret", 0o600, None);
    file("d/hers", 0o600, Some(ADA));
    file("d/program", 0o4777, None);
    fs::create_dir(there.join("all")).unwrap();
    // Without the sticky bit: with it the kernel may refuse what another user owns than the one who creates
    // it (fs.protected_regular).
    fs::set_permissions(there.join("all"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::create_dir(there.join("closed")).unwrap();
    fs::set_permissions(there.join("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(there.join("closed/in"), b"in").unwrap();
    // As long as there is no rule root is root. What this mount has cached by now is refused all the same.
    fs::write(here.join("d/by-root"), b"root").unwrap();
    assert!(fs::read(here.join("d/secret")).unwrap() == pattern(1, 100_000));

    ruled.access(&["add", "batch", "--who", "mount-1"]);
    let denied =
        || fs::write(here.join("d/more"), b"").is_err_and(|e| e.raw_os_error() == Some(libc::EACCES));
    wait_until("the rule to hold", PATIENCE, denied);
    for path in ["d/secret", "d/hers"] {
        assert_eq!(errno(fs::read(here.join(path))), libc::EACCES, "{path}");
        assert_eq!(errno(fs::OpenOptions::new().write(true).open(here.join(path))), libc::EACCES);
        assert_eq!(errno(chown(here.join(path), Some(ADA), None)), libc::EPERM);
        assert_eq!(
            errno(fs::set_permissions(here.join(path), fs::Permissions::from_mode(0o777))),
            libc::EPERM
        );
    }
    for (what, done) in [
        ("mkdir", fs::create_dir(here.join("d/new"))),
        ("unlink", fs::remove_file(here.join("d/public"))),
        ("rename", fs::rename(here.join("d/public"), here.join("d/other"))),
        ("rename out", fs::rename(here.join("d/public"), here.join("all/public"))),
        ("symlink", symlink("x", here.join("d/link"))),
        ("link", fs::hard_link(here.join("d/public"), here.join("d/again"))),
        ("truncate", fs::OpenOptions::new().write(true).open(here.join("d/public")).map(drop)),
        (
            "list",
            fs::read_dir(here.join("closed"))
                .map(|mut dir| dir.next())
                .and_then(|e| e.map_or(Ok(()), |e| e.map(drop))),
        ),
        ("search", fs::metadata(here.join("closed/in")).map(drop)),
    ] {
        assert_eq!(errno(done), libc::EACCES, "{what}");
    }
    assert!(fs::read(here.join("d/public")).unwrap() == pattern(1, 100_000), "what all may read it may, too");
    // Files that it makes belong to user 65534, and it sees the true owners.
    fs::write(here.join("all/mine"), b"mine").unwrap();
    fs::set_permissions(here.join("all/mine"), fs::Permissions::from_mode(0o600)).unwrap();
    let owner = |path: &str| fs::metadata(here.join(path)).map(|m| (m.uid(), m.gid())).unwrap();
    assert_eq!(
        (owner("all/mine"), owner("d/hers"), owner("d/secret")),
        ((NOBODY, NOBODY), (ADA, ADA), (0, 0))
    );
    // Users keep their ids. A write clears the privileges of a file.
    let program = here.join("d/program");
    succeeds(&as_user(ADA, &["cat", here.join("d/hers").to_str().unwrap()]));
    succeeds(&as_user(ADA, &["sh", "-c", &format!("echo >> {}", program.display())]));
    assert_eq!(fs::metadata(&program).unwrap().mode() & 0o7777, 0o777);
    // The other mount has lost nothing.
    fs::write(there.join("d/more"), b"more").unwrap();
    chown(there.join("d/more"), Some(ADA), None).unwrap();
    assert!(fs::read(there.join("d/secret")).unwrap() == pattern(1, 100_000));
    // A rule before it that keeps root is the one that counts, and without rules all is as before.
    ruled.access(&["add", "first", "--who", "mount-?", "--root", "keep", "--before", "batch"]);
    let kept = || fs::write(here.join("d/kept"), b"").is_ok();
    wait_until("the first rule to hold", PATIENCE, kept);
    assert!(fs::read(here.join("d/secret")).unwrap() == pattern(1, 100_000));
}

#[test]
fn a_read_only_volume_and_a_refused_one_are_that_for_a_mount() {
    if !can_mount() || !is_root() {
        return;
    }
    let ruled = Ruled::start();
    let (here, there) = (&ruled.here, &ruled.there);
    for volume in ["p1", "p2", "p3"] {
        fs::write(there.join(volume).join("file"), pattern(2, 100_000)).unwrap();
        fs::create_dir(there.join(volume).join("d")).unwrap();
    }
    let before = fs::OpenOptions::new().append(true).open(here.join("p2/file")).unwrap();
    ruled.access(&["add", "batch", "--who", "mount-1", "--volumes", "p1,p2:ro", "--root", "keep"]);
    let erofs = |done: std::io::Result<()>| assert_eq!(errno(done), libc::EROFS);
    let is_read_only =
        || fs::create_dir(here.join("p2/x")).is_err_and(|e| e.raw_os_error() == Some(libc::EROFS));
    wait_until("the volume to be read only", PATIENCE, || {
        let done = is_read_only();
        let _ = fs::remove_dir(there.join("p2/x"));
        done
    });
    erofs(fs::write(here.join("p2/new"), b"x"));
    erofs(fs::OpenOptions::new().write(true).open(here.join("p2/file")).map(drop));
    erofs(fs::remove_file(here.join("p2/file")));
    erofs(fs::rename(here.join("p2/file"), here.join("p2/d/file")));
    erofs(fs::set_permissions(here.join("p2/file"), fs::Permissions::from_mode(0o777)));
    fs::write(here.join("p1/new"), b"x").unwrap();
    // Between volumes nothing is renamed anyway; `mv` copies.
    assert!(fs::rename(here.join("p1/new"), here.join("p2/new")).is_err());
    assert!(!there.join("p2/new").exists());
    assert!(fs::read(here.join("p2/file")).unwrap() == pattern(2, 100_000));
    // A file that was open for writing is written no more.
    let mut before = before;
    let written = before.write_all(b"late").and_then(|()| before.sync_all());
    assert_eq!(errno(written), libc::EROFS);
    drop(before);
    assert_eq!(fs::metadata(there.join("p2/file")).unwrap().len(), 100_000);

    // The third volume and the root are named by no rule: nothing of them but the way.
    let eacces = |done: std::io::Result<()>| assert_eq!(errno(done), libc::EACCES);
    eacces(fs::read(here.join("p3/file")).map(drop));
    eacces(fs::metadata(here.join("p3/d")).map(drop));
    eacces(fs::write(here.join("p3/new"), b"x"));
    eacces(fs::read_dir(here).and_then(|mut dir| dir.next().map_or(Ok(()), |entry| entry.map(drop))));
    eacces(fs::write(here.join("top"), b"x"));
    assert!(fs::read(there.join("p3/file")).unwrap() == pattern(2, 100_000));
    // One record of each volume that refused something: the third one is not even found in the root.
    let of_mount = |words: &str| {
        let found = audited(&ruled.cluster).into_iter().filter(|r| r.2 == "mount" && r.1 == words);
        found.map(|r| r.4).collect::<Vec<_>>()
    };
    for (volume, words) in [("volume p2", "read only"), ("volume root", "refused")] {
        wait_until(volume, PATIENCE, || !of_mount(volume).is_empty());
        let records = of_mount(volume);
        assert!(records.len() == 1 && records[0].contains(words), "{volume}: {records:?}");
    }
    wait_until("the rule itself", PATIENCE, || {
        has(&ruled.cluster, ["AccessAdd", "rule batch", "console", "ok"], None)
    });

    // The leader is another one, the rule is the same.
    ruled.cluster.kill("meta");
    ruled.cluster.up();
    erofs(fs::create_dir(here.join("p2/y")));
    eacces(fs::write(here.join("p3/new"), b"x"));
    fs::write(here.join("p1/again"), b"x").unwrap();
    ruled.access(&["remove", "batch"]);
    wait_until("the rule to be gone", PATIENCE, || fs::create_dir(here.join("p2/z")).is_ok());
    fs::write(here.join("p3/new"), b"x").unwrap();
}

#[test]
fn rules_are_listed_checked_and_refused_with_reasons() {
    let cluster = Cluster::with(0, &["--targets", "1"]);
    let (here, there) = (PathBuf::new(), PathBuf::new());
    let ruled = Ruled { cluster, here, there };
    ruled.cluster.run_weir(&["volume", "create", "p1"]);
    assert!(ruled.access(&["list"]).contains("no rules for mounts"));
    ruled.access(&[
        "add",
        "batch",
        "--who",
        "node-*",
        "--from",
        "10.1.0.0/16,2001:db8::/32",
        "--volumes",
        "p*",
        "--read-only",
    ]);
    ruled.access(&[
        "add",
        "web",
        "--who",
        "*",
        "--volumes",
        "/p1:rw,*:none",
        "--as",
        "500:600",
        "--before",
        "batch",
    ]);
    let listed: Value = serde_json::from_str(&ruled.access(&["list", "--json"])).unwrap();
    let names: Vec<&str> = listed.as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["web", "batch"]);
    assert_eq!(listed[1]["from"], serde_json::json!(["10.1.0.0/16", "2001:db8::/32"]));
    assert!(ruled.access(&["list"]).contains("p*:ro"));
    ruled.access(&["remove", "web"]);
    let check = |args: &[&str]| -> Value {
        serde_json::from_str(&ruled.access(&[&["check", "--json"], args].concat())).unwrap()
    };
    let found = check(&["node-7", "p1", "0", "--from", "10.1.2.3"]);
    assert_eq!(
        (&found["access"], &found["rule"], &found["uid"]),
        (&"ro".into(), &"batch".into(), &65534.into())
    );
    assert_eq!(check(&["node-7", "p1", "0", "--from", "10.2.2.3"])["rule"], Value::Null);
    assert_eq!(check(&["node-7", "/p1/below", "5", "--from", "2001:db8::1"])["access"], "ro");
    let refused = ruled.access(&["check", "node-7", "root", "1000", "--from", "10.1.2.3"]);
    assert!(
        refused.contains("volume root: refused") && refused.contains("no rule for this node names"),
        "{refused}"
    );

    ruled.refused(&["add", "batch", "--who", "*"], 4, "there is a rule \"batch\" already");
    ruled.refused(&["add", "b", "--who", "*", "--before", "x"], 3, "weir access list");
    ruled.refused(&["remove", "x"], 3, "there is no rule \"x\"");
    ruled.refused(&["add", "b", "--who", ""], 2, "empty glob");
    ruled.refused(&["add", "b", "--who", "*", "--from", "10.1.2.3/16"], 2, "10.1.0.0/16");
    ruled.refused(&["add", "b", "--who", "*", "--as", "0:0"], 2, "superuser");
    ruled.refused(&["add", "b", "--who", "*", "--map", "u:1"], 2, "u:FROM:TO:COUNT");
    ruled.refused(&["check", "node-7", "absent", "0"], 3, "there is no volume");
}
