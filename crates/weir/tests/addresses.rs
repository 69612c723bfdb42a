//! Claim: nodes find their coordinators and each other by any address that answers: IPv4, IPv6, names, also
//! when a name gets other addresses, and in any order of their starts; a second node of the same name is
//! refused.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{can_mount, has, left_out, pattern, shell, text, wait_until};
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const WEIR: &str = env!("CARGO_BIN_EXE_weir");
const PATIENCE: Duration = Duration::from_secs(60);

/// Processes of a test, which end with it.
struct Roles {
    dir: tempfile::TempDir,
    running: Vec<(String, Child)>,
}

impl Roles {
    fn new() -> Roles {
        let dir = tempfile::Builder::new().prefix("weir-test-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Roles { dir, running: Vec::new() }
    }
    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }
    fn begin(&mut self, name: &str, mut command: Command) {
        let pid_file = self.path(&format!("{name}.pid"));
        let _ = fs::remove_file(&pid_file); // of the last start
        command.args(["--pid-file", &pid_file]).env_remove("WEIR_DIR").stdin(Stdio::null());
        command.stderr(File::create(self.path(&format!("{name}.log"))).unwrap());
        self.running.push((name.into(), command.spawn().unwrap()));
    }
    fn serves(&mut self, name: &str) {
        let (pid_file, log) = (self.path(&format!("{name}.pid")), self.path(&format!("{name}.log")));
        let child = &mut self.running.iter_mut().find(|(of, _)| of == name).unwrap().1;
        wait_until(&format!("{name} serves"), PATIENCE, || {
            let logged = || fs::read_to_string(&log).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "{name} ended: {}", logged());
            text(&fs::read(&pid_file).unwrap_or_default()).contains("\"ready\":true")
        });
    }
    fn end(&mut self, name: &str) {
        let at = self.running.iter().position(|(of, _)| of == name).unwrap();
        let (_, mut child) = self.running.remove(at);
        shell(&format!("kill -TERM {}", child.id()));
        common::ends(name, &mut child, PATIENCE);
    }
}

impl Drop for Roles {
    fn drop(&mut self) {
        for (name, child) in self.running.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
            if std::thread::panicking() {
                let log = fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default();
                eprintln!("--- {name}\n{log}");
            }
        }
    }
}

fn here(args: &[&str]) -> Command {
    let mut command = Command::new(WEIR);
    command.args(args);
    command
}
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
fn succeeds(command: &mut Command) -> String {
    let output = command.env_remove("WEIR_DIR").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn roles_meet_over_mixed_loopback_addresses_in_any_order() {
    let mut roles = Roles::new();
    let [six, four, nobody] = [free_port(), free_port(), free_port()];
    let (six, four) = (format!("tcp:[::1]:{six}"), format!("tcp:127.0.0.1:{four}"));
    let named = four.replace("127.0.0.1", "localhost");
    let absent = format!("tcp:no-such-host.invalid:{nobody}");
    let [coord, meta, target] = ["coord", "meta", "t1"].map(|name| roles.path(name));

    // Before any coordinator; the first of its addresses has no host, and the second one no listener.
    let silent = format!("tcp:127.0.0.1:{nobody}");
    let storage = ["storage", "--name", "s1", "--dir", &target, "--listen", "tcp:127.0.0.1:0"];
    let finds = ["--coordinator", &absent, "--coordinator", &silent, "--coordinator", &six];
    roles.begin("s1", here(&[&storage[..], &finds].concat()));
    wait_until("the storage role logs that it waits", PATIENCE, || {
        roles.log("s1").contains("wait for a coordinator")
    });
    let founds = ["coord", "--new", "--dir", &coord, "--targets", "1", "--scheme", "single"];
    roles.begin("coord", here(&[&founds[..], &["--listen", &six, "--listen", &four]].concat()));
    roles.serves("s1");
    let leads = ["meta", "--new", "--dir", &meta, "--listen", "tcp:localhost:0", "--coordinator", &named];
    roles.begin("meta", here(&leads));
    roles.serves("meta");
    for (n, at) in [&six, &four, &named].into_iter().enumerate() {
        let name = format!("v{n}");
        succeeds(&mut here(&["volume", "create", &name, &format!("/{name}"), "--coordinator", at]));
        let listed = succeeds(&mut here(&["volume", "list", "--coordinator", at]));
        assert!(listed.contains(&name), "{listed}");
    }

    // Another node of the same name, while the first lives.
    let other = roles.path("t2");
    let second =
        here(&["storage", "--name", "s1", "--dir", &other, "--listen", "tcp:[::1]:0", "--coordinator", &six])
            .output()
            .unwrap();
    let printed = text(&second.stderr);
    assert!(
        !second.status.success()
            && printed.contains("is running already")
            && printed.contains("another name"),
        "{printed}"
    );

    // The coordinator returns at one of its addresses only.
    roles.end("coord");
    roles.begin("coord", here(&["coord", "--dir", &coord, "--listen", &four]));
    roles.serves("coord");
    let healthy = || {
        let output = here(&["status", "--json", "--coordinator", &four]).output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout)
            .is_ok_and(|s| s["nodes"].to_string().matches("\"up\":true").count() >= 2)
    };
    wait_until("storage and metadata are back", PATIENCE, healthy);
}

#[test]
fn an_address_that_others_cannot_use_is_refused_by_name() {
    let roles = Roles::new();
    let dir = roles.path("coord");
    for (listen, says) in [
        ("tcp:no-such-host.invalid:7", "look up the name in tcp:no-such-host.invalid:7"),
        ("tcp:1.2.3:7", "a name, an IPv4 or an [IPv6] address"),
    ] {
        let output = here(&["coord", "--new", "--dir", &dir, "--listen", listen]).output().unwrap();
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains(says), "{listen}: {printed}");
    }
}

/// Machines on one network, 10.78.0.0/24 and fd78::/64, each with names of its own (`/etc/hosts`).
struct Machines {
    roles: Roles,
    holders: Vec<Child>,
    mounts: Vec<(usize, PathBuf)>,
}

fn namespace(hosts: Option<&Path>) -> Child {
    let script = match hosts {
        Some(hosts) => format!("mount --bind {} /etc/hosts && exec sleep 3600", hosts.display()),
        None => "exec sleep 3600".into(),
    };
    let mut child = Command::new("unshare")
        .args(["-n", "-m", "--propagation", "private", "bash", "-c", &script])
        .spawn()
        .unwrap();
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    let name = || fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default();
    wait_until("a network namespace", PATIENCE, || {
        name().trim() == "sleep"
            && fs::read_link(format!("/proc/{}/ns/net", child.id())).is_ok_and(|of| of != own)
    });
    assert!(child.try_wait().unwrap().is_none(), "unshare ended");
    child
}

impl Machines {
    /// The third has IPv4 only, the fourth IPv6 only.
    fn new() -> Machines {
        let roles = Roles::new();
        let hosts = roles.dir.path().join("hosts");
        fs::write(&hosts, "127.0.0.1 localhost\n::1 localhost\n").unwrap();
        let mut machines = Machines { roles, holders: vec![namespace(None)], mounts: Vec::new() };
        machines.within(0, "ip link add lan type bridge && ip link set lan up");
        for n in 1..=4 {
            machines.holders.push(namespace(Some(&hosts)));
            let pid = machines.holders[n].id();
            let link =
                "ip link add m{n} type veth peer name eth0 netns {pid} && ip link set m{n} master lan up";
            machines.within(0, &link.replace("{n}", &n.to_string()).replace("{pid}", &pid.to_string()));
            machines.within(n, "ip link set lo up && ip link set eth0 up");
            if n != 4 {
                machines.within(
                    n,
                    &format!("ip addr add 10.78.0.{n}/24 dev eth0 && ip route add default dev eth0"),
                );
            }
            if n != 3 {
                machines.within(
                    n,
                    &format!("ip addr add fd78::{n}/64 dev eth0 nodad && ip -6 route add default dev eth0"),
                );
            }
        }
        machines
    }
    fn within(&self, machine: usize, script: &str) -> String {
        shell(&format!("nsenter -t {} -n -m bash -euc '{script}'", self.holders[machine].id()))
    }
    fn command(&self, machine: usize, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holders[machine].id().to_string(), "-n", "-m", WEIR]).args(args);
        command.env_remove("WEIR_DIR").stdin(Stdio::null());
        command
    }
    fn done(&self, machine: usize, args: &[&str]) -> String {
        succeeds(&mut self.command(machine, args))
    }
    /// In place: it is mounted elsewhere.
    fn coordinator_is_at(&self, last: u8) {
        let text =
            format!("127.0.0.1 localhost\n::1 localhost\n10.78.0.{last} coord.lan\nfd78::{last} coord.lan\n");
        fs::write(self.roles.dir.path().join("hosts"), text).unwrap();
    }
    fn join(&mut self, machine: usize, name: &str, role: &str, more: &[&str]) {
        let coord = self.roles.path("coord");
        let token = self.done(1, &["token", "create", "--dir", &coord, "--role", role]);
        let dir = self.roles.path(name);
        self.done(machine, &[&["join", token.trim(), "--dir", &dir, "--name", name][..], more].concat());
        let config = format!("{dir}/{role}.toml");
        let new: &[&str] = if role == "meta" { &["--new"] } else { &[] };
        let command = self.command(machine, &[&[role, "--config", &config][..], new].concat());
        self.roles.begin(name, command);
        self.roles.serves(name);
    }
    fn mount(&mut self, machine: usize) {
        let path = self.roles.dir.path().join(format!("mnt{machine}"));
        fs::create_dir(&path).unwrap();
        let socket = self.roles.path(&format!("users{machine}.sock"));
        self.mounts.push((machine, path.clone()));
        let mount = path.display().to_string();
        self.join(machine, &format!("n{machine}"), "mount", &["--mount", &mount, "--socket", &socket]);
    }
    /// Runs a script on a machine, with its mount as the working directory.
    fn at_mount(&self, machine: usize, script: &str) -> Output {
        let path = &self.mounts.iter().find(|(of, _)| *of == machine).unwrap().1;
        let script = format!("cd {} && {script}", path.display());
        let pid = self.holders[machine].id().to_string();
        Command::new("nsenter").args(["-t", &pid, "-n", "-m", "bash", "-euc", &script]).output().unwrap()
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for (machine, path) in &self.mounts {
            let path = path.display().to_string();
            let _ = self.command(*machine, &["unmount", "--lazy", &path]).output(); // it may not be mounted
        }
        for (_, child) in self.roles.running.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for holder in &mut self.holders {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

#[test]
fn ipv4_and_ipv6_machines_share_files_and_a_moved_name_is_found() {
    let is_root = || rustix::process::geteuid().is_root() || left_out("only root makes network namespaces");
    if !(can_mount() && is_root() && has("ip") && has("nsenter")) {
        return;
    }
    let mut machines = Machines::new();
    machines.coordinator_is_at(1);
    let dir = machines.roles.path("coord");
    let config = format!("{dir}/coord.toml");
    machines.done(
        1,
        &["init", "--dir", &dir, "--listen", "tcp:coord.lan:7000", "--targets", "1", "--scheme", "single"],
    );
    let coord = machines.command(1, &["coord", "--config", &config]);
    machines.roles.begin("coord", coord);
    machines.roles.serves("coord");
    let target = machines.roles.path("t1");
    machines.join(2, "s1", "storage", &["--target", &target]);
    machines.join(2, "meta1", "meta", &[]);
    let keep = ["access", "add", "admins", "--who", "n*", "--root", "keep", "--dir", &dir];
    machines.done(1, &keep);
    machines.mount(3);
    machines.mount(4);
    let bytes = machines.roles.dir.path().join("bytes");
    fs::write(&bytes, pattern(1, 3_000_001)).unwrap();
    let copied = machines.at_mount(3, &format!("cp {} f && sync f", bytes.display()));
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let compared = machines.at_mount(4, &format!("cmp {} f", bytes.display()));
    assert!(compared.status.success(), "{}", text(&compared.stderr));

    // The coordinator's machine gets other addresses; only the name resolves to them.
    machines.roles.end("coord");
    machines.within(1, "ip addr flush dev eth0 && ip addr add 10.78.0.9/24 dev eth0 && ip addr add fd78::9/64 dev eth0 nodad");
    machines.coordinator_is_at(9);
    let coord = machines.command(1, &["coord", "--config", &config]);
    machines.roles.begin("coord", coord);
    machines.roles.serves("coord");
    let up = || {
        let status = machines.command(1, &["status", "--json", "--dir", &dir]).output().unwrap();
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
        status["nodes"].to_string().matches("\"up\":true").count() >= 2
    };
    wait_until("all nodes are back", PATIENCE, up);
    let copied = machines.at_mount(4, &format!("cp {} g && sync g && cmp g f", bytes.display()));
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    assert!(machines.at_mount(3, "cmp g f").status.success());
}
