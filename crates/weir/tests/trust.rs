//! A cluster of several machines: each is a network namespace with a process of its own, joined with a
//! token; and what a stranger without a certificate can do there.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::machines::Machines;
use common::{pattern, shell, text, wait_until};
use std::fs::{self, File};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn machines_join_with_tokens_and_share_a_file_system() {
    let Some(machines) = Machines::cluster() else { return };
    let file = machines.mount().join("f");
    fs::write(&file, pattern(1, 3_000_001)).unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    assert!(fs::read(&file).unwrap() == pattern(1, 3_000_001));

    let dir = machines.path("coord");
    let status: serde_json::Value =
        serde_json::from_str(&machines.done(1, &["status", "--dir", &dir, "--json"])).unwrap();
    assert_eq!(status["healthy"], true, "{:#}", status["troubles"]);
    assert!(!status["nodes"].to_string().contains("[::]"), "{}", status["nodes"]);
    let nodes = machines.done(1, &["node", "list", "--dir", &dir]);
    for node in ["admin", "meta1", "s1", "s2", "s3", "n4"] {
        assert!(nodes.contains(node), "{node} is not in {nodes}");
    }
    // An administrator elsewhere needs the certificate, and nothing else.
    let admin = format!("{dir}/admin.pem");
    machines.done(5, &["status", "--coordinator", "tcp:10.77.0.1:7000", "--certificate", &admin]);
    assert_eq!(machines.audited(&["Enrol", "node s2"]), 1);
    for (node, role) in [("coord", "coord"), ("meta1", "meta"), ("s1", "storage"), ("n4", "mount")] {
        let unit = fs::read_to_string(machines.path(&format!("{node}/weir-{node}-{role}.service"))).unwrap();
        assert!(unit.contains(&format!("{role} --config \"{}/{role}.toml\"", machines.path(node))), "{unit}");
    }
}

#[test]
fn root_of_a_joined_machine_is_not_root_without_a_rule() {
    let Some(machines) = Machines::cluster() else { return };
    let (dir, mount) = (machines.path("coord"), machines.mount());
    fs::write(mount.join("of-root"), b"secret").unwrap();
    shell(&format!("chmod 600 {}", mount.join("of-root").display()));
    machines.done(1, &["access", "remove", "admins", "--dir", &dir]);
    wait_until("root is not root", PATIENCE, || fs::write(mount.join("new"), b"").is_err());
    assert!(fs::read(mount.join("of-root")).is_err());
    let check = ["access", "check", "n4", "root", "0", "--from", "10.77.0.4", "--dir", &dir, "--json"];
    let decided: serde_json::Value = serde_json::from_str(&machines.done(1, &check)).unwrap();
    assert_eq!(decided["uid"], 65534, "{decided}");
}

#[test]
fn a_stranger_gets_nothing_over_the_network() {
    let Some(machines) = Machines::cluster() else { return };
    let there = "tcp:10.77.0.1:7000";
    let (code, printed) = machines.refused(5, &["status", "--coordinator", there]);
    assert!(code == 5 && printed.contains("certificate") && printed.contains("hint:"), "{code}: {printed}");
    let (_, printed) = machines.refused(5, &["volume", "create", "v", "/v", "--coordinator", there]);
    assert!(printed.contains("certificate"), "{printed}");
    let target = machines.path("stolen");
    let role = ["storage", "--dir", &target, "--coordinator", there];
    let (code, printed) = machines.refused(5, &role);
    assert!(
        code == 5 && printed.contains("without a certificate") && printed.contains("weir join"),
        "{code}: {printed}"
    );
    let (_, printed) = machines.refused(5, &[&role[..], &["--listen", "tcp:127.0.0.1:0"]].concat());
    assert!(printed.contains("takes only nodes that have a certificate"), "{printed}");

    // A node has only the roles of its certificate.
    let (code, printed) = machines.refused(4, &["node", "list", "--dir", &machines.path("n4")]);
    assert!(
        code == 5 && printed.contains("is a mount, which may not send GetEnrolment"),
        "{code}: {printed}"
    );
    let stolen = format!("{}/node.pem", machines.path("n4"));
    let posing = format!(
        "[cluster]\ncoordinators = [\"{there}\"]\n[node]\nname = \"s1\"\ncertificate = \"{stolen}\"\n[storage]\ntargets = [\"{target}\"]\n"
    );
    let config = machines.path("posing.toml");
    fs::write(&config, posing).unwrap();
    let (_, printed) = machines.refused(4, &["storage", "--config", &config]);
    assert!(printed.contains("is for mount, not for storage"), "{printed}");
    shell(&format!("chmod 644 {stolen}"));
    let (_, printed) = machines.refused(4, &["node", "list", "--dir", &machines.path("n4")]);
    assert!(
        printed.contains("others can read the private key") && printed.contains("chmod 600"),
        "{printed}"
    );
}

#[test]
fn operators_and_auditors_may_less_than_administrators() {
    let Some(machines) = Machines::cluster() else { return };
    let dirs = ["operator", "auditor"].map(|role| {
        let dir = machines.path(role);
        let token = machines.token(&["--role", role]);
        machines.done(5, &["join", &token, "--dir", &dir, "--name", role]);
        dir
    });
    let [operator, auditor] = &dirs;
    for dir in &dirs {
        machines.done(5, &["status", "--dir", dir]);
        machines.done(5, &["node", "list", "--dir", dir]);
        machines.done(5, &["volume", "list", "--dir", dir]);
        let (code, printed) = machines.refused(5, &["volume", "create", "v", "/v", "--dir", dir]);
        assert!(code == 5 && printed.contains("which may not send"), "{code}: {printed}");
        let (code, printed) = machines.refused(5, &["token", "create", "--role", "storage", "--dir", dir]);
        assert!(
            code == 5 && (printed.contains("mounts only") || printed.contains("may not send TokenCreate")),
            "{printed}"
        );
    }
    machines.done(5, &["token", "create", "--role", "mount", "--dir", operator]);
    let (_, printed) = machines.refused(5, &["node", "remove", "s1", "--dir", operator]);
    assert!(printed.contains("mounts only"), "{printed}");
    machines.done(5, &["node", "remove", "n4", "--dir", operator]);
    let (code, printed) = machines.refused(5, &["token", "create", "--role", "mount", "--dir", auditor]);
    assert!(
        code == 5 && printed.contains("is an auditor, which may not send TokenCreate"),
        "{code}: {printed}"
    );
}

#[test]
fn a_token_admits_its_node_and_no_other() {
    let Some(machines) = Machines::cluster() else { return };
    let join = |machine: usize, token: &str, name: &str| {
        let dir = machines.path(&format!("try-{}", fs::read_dir(machines.dir.path()).unwrap().count()));
        machines.weir(machine, &["join", token, "--dir", &dir, "--name", name])
    };
    let refused = |machine, token: &str, name, why: &str| {
        let output = join(machine, token, name);
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains(why), "{printed} lacks {why:?}");
    };
    let once = machines.token(&["--role", "mount"]);
    assert!(join(5, &once, "n5").status.success());
    refused(5, &once, "n6", "used as often as it may be");
    let named = machines.token(&["--role", "mount", "--name", "gpu-*"]);
    refused(5, &named, "cpu-1", "for nodes called");
    let placed = machines.token(&["--role", "mount", "--from", "10.77.0.4"]);
    refused(5, &placed, "n7", "for another network");
    assert!(join(4, &placed, "n7").status.success());
    let twice = machines.token(&["--role", "mount"]);
    refused(5, &twice, "n5", "has a certificate already");
    let short = machines.token(&["--role", "mount", "--ttl", "1s"]);
    wait_until("the token is over", PATIENCE, || {
        text(&join(5, &short, "n5").stderr).contains("its time is over")
    });
    let revoked = machines.token(&["--role", "mount", "--uses", "7"]);
    let dir = machines.path("coord");
    let listed: serde_json::Value =
        serde_json::from_str(&machines.done(1, &["token", "list", "--dir", &dir, "--json"])).unwrap();
    let id = listed.as_array().unwrap().iter().find(|token| token["uses_left"] == 7).unwrap()["id"].clone();
    machines.done(1, &["token", "revoke", id.as_str().unwrap(), "--dir", &dir]);
    refused(5, &revoked, "n8", "or has revoked it");
    // A pin that is not the cluster's: another server answers at the address.
    let (rest, secret) = once.rsplit_once('.').unwrap();
    let (rest, _) = rest.rsplit_once('.').unwrap();
    let other = format!("{rest}.{}.{secret}", "00".repeat(16));
    refused(5, &other, "n9", "not the one that the token is for");
    assert!(machines.audited(&["Enrol", "refused"]) >= 3);
}

#[test]
fn a_removed_node_is_cut_off() {
    let Some(mut machines) = Machines::cluster() else { return };
    let dir = machines.path("coord");
    let file = machines.mount().join("f");
    fs::write(&file, b"before").unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    machines.done(1, &["node", "remove", "n4", "--dir", &dir]);
    wait_until("the mount has lost its session", PATIENCE, || {
        fs::read_to_string(machines.path("n4.log")).unwrap().contains("n4 was removed from the cluster")
    });
    machines.done(4, &["unmount", "--lazy", machines.mount().to_str().unwrap()]);
    machines.kill("n4");
    let config = format!("{}/mount.toml", machines.path("n4"));
    let (code, printed) = machines.refused(4, &["mount", "--config", &config]);
    assert!(code == 5 && printed.contains("n4 was removed from the cluster"), "{code}: {printed}");
    // The name is free again.
    fs::rename(machines.path("n4"), machines.path("n4-before")).unwrap();
    machines.join_mount();
    assert_eq!(fs::read(&file).unwrap(), b"before");
}

#[test]
fn users_of_a_joined_machine_ask_through_their_mount() {
    let Some(machines) = Machines::cluster() else { return };
    let (dir, mount) = (machines.path("coord"), machines.path("mnt"));
    machines.done(1, &["volume", "create", "v", "/v", "--owner", "1000", "--dir", &dir]);
    // In the mount nothing else has to be named.
    let done = |uid, args: &[&str]| {
        let output = machines.as_user(uid, args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let refused = |uid, args: &[&str], why: &str| {
        let output = machines.as_user(uid, args);
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains(why), "{args:?}: {printed} lacks {why:?}");
    };
    assert!(done(1001, &["volume", "list"]).contains("/v"));
    let shown: serde_json::Value =
        serde_json::from_str(&done(1000, &["volume", "show", "v", "--at", &mount, "--json"])).unwrap();
    assert_eq!(shown["owner"], 1000, "{shown}");
    done(1000, &["status"]);
    done(1000, &["volume", "snapshot", "v", "one"]);
    assert!(done(1000, &["volume", "snapshots", "v"]).contains("one"));
    refused(1001, &["volume", "snapshot", "v", "two"], "user 1001");
    refused(1001, &["volume", "delete", "v"], "user 1001");
    refused(1000, &["volume", "create", "w", "/w"], "user 1000");
    // Root of that machine sees what others see, although its files are root's by rule.
    assert!(done(0, &["volume", "list"]).contains("/v"));
    refused(0, &["volume", "delete", "v"], "no administrator of the cluster");
    // Requests of administrators are not passed on, and no other socket of the machine helps.
    refused(1000, &["node", "list"], "may not do that here");
    refused(1000, &["token", "create", "--role", "mount"], "may not do that here");
    refused(0, &["node", "list"], "what users may ask for");
    let changes = machines.done(1, &["volume", "changes", "v", "--dir", &dir, "--cursor", "c"]);
    assert!(changes.is_empty(), "{changes}");
    machines.done(1, &["audit", "volumes", "v", "--opens", "--changes", "--dir", &dir]);
    let as_owner = "setpriv --reuid=1000 --regid=1000 --clear-groups";
    wait_until("opens and changes are recorded", PATIENCE, || {
        shell(&format!("cd {mount}/v && {as_owner} sh -c 'echo 1 > f && cat f && mv f g && mv g f'"));
        let records = machines.done(2, &["audit", "show", "--dir", &machines.path("meta1/meta"), "--json"]);
        let records: serde_json::Value = serde_json::from_str(&records).unwrap();
        let has = |what: &str, on: &str| {
            let fits = |r: &&serde_json::Value| {
                r["what"] == what && r["on"] == on && r["node"] == "n4" && r["uid"] == 1000
            };
            records.as_array().unwrap().iter().find(fits).is_some_and(|r| r["result"] == "ok")
        };
        has("Create", "volume v: f") && has("Open", "volume v: f") && has("Rename", "volume v: g")
    });
    machines.done(1, &["audit", "volumes", "v", "--off", "--dir", &dir]);
    let changes = machines.done(1, &["volume", "changes", "v", "--dir", &dir, "--cursor", "c"]);
    let by = r#""by":{"node":"n4","uid":1000}"#;
    assert!(changes.lines().any(|line| line.contains("made") && line.contains(by)), "{changes}");
}

#[test]
fn the_authority_is_replaced_while_nodes_run() {
    let Some(machines) = Machines::cluster() else { return };
    let (dir, file) = (machines.path("coord"), machines.mount().join("f"));
    fs::write(&file, pattern(3, 1_000_001)).unwrap();
    let (before, early) = (machines.authorities(), machines.token(&["--role", "mount"]));
    fs::create_dir(machines.path("old")).unwrap();
    let stolen = machines.path("old/node.pem");
    fs::copy(format!("{}/node.pem", machines.path("n4")), &stolen).unwrap();
    machines.done(1, &["ca", "rotate", "--dir", &dir]);
    // The administrator's certificate is renewed by the commands that have it.
    wait_until("all nodes have certificates of the new authority", PATIENCE, || {
        let now = machines.authorities();
        now["rotating"] == false && now["signs"] != before["signs"]
    });
    assert!(fs::read(&file).unwrap() == pattern(3, 1_000_001));
    fs::write(&file, b"after").unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    // Connections that were made with the old certificates have ended, and all nodes are back.
    wait_until("all nodes are back", PATIENCE, || {
        machines.weir(1, &["status", "--dir", &dir]).status.success()
    });

    // Certificates and tokens of the old one are worth nothing.
    let there = "tcp:10.77.0.1:7000";
    let (code, printed) = machines.refused(5, &["status", "--coordinator", there, "--certificate", &stolen]);
    assert!(code == 5 && printed.contains("authority"), "{code}: {printed}");
    let (_, printed) = machines.refused(5, &["join", &early, "--dir", &machines.path("n5"), "--name", "n5"]);
    assert!(printed.contains("not the one that the token is for"), "{printed}");
    let token = machines.token(&["--role", "mount"]);
    machines.done(5, &["join", &token, "--dir", &machines.path("n6"), "--name", "n6"]);
    let admin = format!("{dir}/admin.pem");
    machines.done(5, &["status", "--coordinator", there, "--certificate", &admin]);
    assert_eq!(machines.audited(&["RotateAuthority"]), 1);
}

/// A cluster of its own on the fifth machine.
struct Elsewhere<'a> {
    machines: &'a Machines,
    dir: String,
}

impl Drop for Elsewhere<'_> {
    fn drop(&mut self) {
        let _ = self.machines.weir(5, &["down", "--dir", &self.dir]); // it may not run
    }
}

#[test]
fn a_cluster_with_certificates_is_a_home_of_another_one() {
    let Some(machines) = Machines::cluster() else { return };
    let coord = machines.path("coord");
    machines.done(1, &["volume", "create", "copy", "/copy", "--dir", &coord]);
    let token = machines.token(&["--role", "mover"]);
    machines.done(5, &["join", &token, "--dir", &machines.path("there"), "--name", "site-b"]);
    let b = Elsewhere { machines: &machines, dir: machines.path("b") };
    let mount = machines.path("b-mnt");
    machines.done(5, &["up", "--dir", &b.dir, "--mount", &mount, "--targets", "1"]);
    machines.done(5, &["volume", "create", "v", "--dir", &b.dir]);
    let home = format!("weir://10.77.0.1:7000/copy?credentials={}/node.pem", machines.path("there"));
    machines.done(5, &["relation", "add", "v", &home, "--dir", &b.dir]);
    fs::write(format!("{mount}/v/f"), pattern(9, 100_000)).unwrap();
    wait_until("the file is at home", PATIENCE, || {
        fs::read(machines.mount().join("copy/f")).is_ok_and(|found| found == pattern(9, 100_000))
    });
    // Without it nothing passes.
    machines.done(5, &["volume", "create", "w", "--dir", &b.dir]);
    machines.done(5, &["relation", "add", "w", "weir://10.77.0.1:7000/other", "--dir", &b.dir]);
    fs::write(format!("{mount}/w/g"), b"never there").unwrap();
    wait_until("the home is refused", PATIENCE, || {
        machines.done(5, &["relation", "show", "r2", "--dir", &b.dir]).contains("certificate")
    });
}
