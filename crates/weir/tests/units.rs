//! Claim: a role is a service as systemd expects it: it notifies systemd when it serves, sends keep-alives,
//! ends on SIGTERM, and its log has priorities or is JSON.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{ends, shell};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const PROGRAM: &str = env!("CARGO_BIN_EXE_weir");

/// Ends with this value.
struct Role(Child);
impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

#[test]
fn a_role_notifies_systemd_that_it_serves_and_lives() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let systemd = UnixDatagram::bind(path("notify")).unwrap();
    systemd.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["coord", "--new", "--name", "c1", "--log-format", "json", "--dir"]).arg(path("coord"));
    command.arg("--listen").arg(format!("unix:{}", path("coord.sock").display()));
    command.env("NOTIFY_SOCKET", path("notify")).env("WATCHDOG_USEC", "300000").env_remove("WATCHDOG_PID");
    let mut role = Role(command.stderr(File::create(path("log")).unwrap()).spawn().unwrap());
    let (mut ready, mut beats) = (None, 0);
    while ready.is_none() || beats < 3 {
        let mut bytes = [0; 4096];
        let len = systemd.recv(&mut bytes).expect("the role says that it serves, and that it lives");
        let message = String::from_utf8_lossy(&bytes[..len]).into_owned();
        beats += usize::from(message == "WATCHDOG=1");
        ready = ready.or(message.strip_prefix("READY=1\nSTATUS=").map(str::to_owned));
    }
    assert!(ready.unwrap().contains("c1 serves: "));
    shell(&format!("kill -TERM {}", role.0.id()));
    assert!(ends("the role", &mut role.0, PATIENCE).success());
    let log = fs::read_to_string(path("log")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")));
    let lines: Vec<serde_json::Value> = lines.collect();
    let says = |what: &str| lines.iter().any(|line| line["message"].as_str().unwrap().contains(what));
    assert!(says("c1 serves") && says("asked to stop"), "{log}");
}

#[test]
fn an_error_in_the_journal_has_its_priority() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let file = File::create(&log).unwrap();
    let stream = file.metadata().map(|m| format!("{}:{}", m.dev(), m.ino())).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["storage", "--coordinator", "unix:/nowhere"]).env("JOURNAL_STREAM", stream).stderr(file);
    assert!(!command.status().unwrap().success());
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("<3>error: no target directory is named\n<3>hint: "), "{log}");
    assert!(log.lines().all(|line| line.starts_with('<')), "{log}");
    let ended = Command::new(PROGRAM).args(["storage"]).env("NOTIFY_SOCKET", "relative").output().unwrap();
    let printed = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(printed.contains("NOTIFY_SOCKET is \"relative\"") && printed.contains("hint: "), "{printed}");
}
