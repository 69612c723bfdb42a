//! Machines as network namespaces, with a cluster whose nodes have certificates.
use super::{can_mount, has, left_out, shell, text, wait_until};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const WEIR: &str = env!("CARGO_BIN_EXE_weir");
const PATIENCE: Duration = Duration::from_secs(60);

/// Machines on one network, 10.77.0.0/24. Nothing of it is seen outside: the network itself is in a
/// namespace, too.
pub struct Machines {
    pub dir: tempfile::TempDir,
    /// The network, then the machines: processes that hold their namespaces.
    holders: Vec<Child>,
    pub running: Vec<(String, Child)>,
    /// Of the clock of programs that are started from now on.
    pub clock_ahead_s: i64,
}

fn namespace() -> Child {
    let mut child = Command::new("unshare").args(["-n", "sleep", "3600"]).spawn().unwrap();
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    wait_until("a network namespace", PATIENCE, || {
        assert!(child.try_wait().unwrap().is_none(), "unshare ended");
        fs::read_link(format!("/proc/{}/ns/net", child.id())).is_ok_and(|of| of != own)
    });
    child
}

impl Machines {
    /// Three machines with a coordinator, metadata and three targets, a fourth that mounts, and a fifth that is
    /// not a node.
    pub fn cluster() -> Option<Machines> {
        let is_root =
            || rustix::process::geteuid().is_root() || left_out("only root makes network namespaces");
        if !(can_mount() && is_root() && has("ip") && has("nsenter")) {
            return None;
        }
        let mut machines = Machines::new(5);
        let dir = machines.path("coord");
        let init =
            ["init", "--dir", &dir, "--listen", "tcp:10.77.0.1:7000", "--targets", "3", "--scheme", "ec:2+1"];
        machines.done(1, &init);
        machines.start(1, "coord-role", &["coord", "--config", &format!("{dir}/coord.toml")]);
        machines.join(1, "meta1", "meta", &[]);
        for n in 1..=3 {
            machines.join(n, &format!("s{n}"), "storage", &[]);
        }
        let keep = ["access", "add", "admins", "--who", "n4", "--root", "keep", "--dir", &dir];
        machines.done(1, &keep);
        fs::create_dir(machines.mount()).unwrap();
        machines.join_mount();
        Some(machines)
    }

    pub fn new(count: usize) -> Machines {
        let dir = tempfile::Builder::new().prefix("weir-test-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut machines =
            Machines { dir, holders: vec![namespace()], running: Vec::new(), clock_ahead_s: 0 };
        machines.within(0, "ip link add lan type bridge && ip link set lan up");
        for n in 1..=count {
            machines.holders.push(namespace());
            let pid = machines.holders[n].id();
            machines.within(
                0,
                &format!(
                    "ip link add m{n} type veth peer name eth0 netns {pid} && ip link set m{n} master lan up"
                ),
            );
            machines.within(
                n,
                &format!("ip link set lo up && ip addr add 10.77.0.{n}/24 dev eth0 && ip link set eth0 up"),
            );
        }
        machines
    }
    pub fn within(&self, machine: usize, script: &str) -> String {
        shell(&format!("nsenter -t {} -n bash -euc '{script}'", self.holders[machine].id()))
    }
    pub fn command(&self, machine: usize, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holders[machine].id().to_string(), "-n", WEIR]).args(args);
        command.env("WEIR_CLOCK_AHEAD_S", self.clock_ahead_s.to_string());
        command.env_remove("WEIR_DIR").stdin(Stdio::null());
        command
    }
    pub fn weir(&self, machine: usize, args: &[&str]) -> Output {
        self.command(machine, args).output().unwrap()
    }
    /// The output of a command that succeeds.
    pub fn done(&self, machine: usize, args: &[&str]) -> String {
        let output = self.weir(machine, args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }
    /// The exit code and the message of a command that fails.
    pub fn refused(&self, machine: usize, args: &[&str]) -> (i32, String) {
        let output = self.weir(machine, args);
        assert!(!output.status.success(), "{args:?} did not fail: {}", text(&output.stdout));
        (output.status.code().unwrap(), text(&output.stderr))
    }
    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
    /// Runs a role, and waits until it serves.
    pub fn start(&mut self, machine: usize, name: &str, args: &[&str]) {
        let (pid_file, log) = (self.path(&format!("{name}.pid")), self.path(&format!("{name}.log")));
        let _ = fs::remove_file(&pid_file); // of the last start
        let mut command = self.command(machine, args);
        command.args(["--pid-file", &pid_file]).stderr(File::create(&log).unwrap());
        let mut child = command.spawn().unwrap();
        wait_until(&format!("{name} serves"), PATIENCE, || {
            let logged = || fs::read_to_string(&log).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "{name} ended: {}", logged());
            text(&fs::read(&pid_file).unwrap_or_default()).contains("\"ready\":true")
        });
        self.running.push((name.into(), child));
    }
    /// Kills a role.
    pub fn kill(&mut self, name: &str) {
        let at = self.running.iter().position(|(running, _)| running == name).unwrap();
        let (_, mut role) = self.running.remove(at);
        role.kill().unwrap();
        role.wait().unwrap();
    }
    /// Starts the role of a node that has joined.
    pub fn restart(&mut self, machine: usize, name: &str, role: &str) {
        let config = format!("{}/{role}.toml", self.path(name));
        self.start(machine, name, &[role, "--config", &config]);
    }
    /// A new node: joined with a token of its own, and started.
    pub fn join(&mut self, machine: usize, name: &str, role: &str, more: &[&str]) {
        let token = self.token(&["--role", role]);
        let dir = self.path(name);
        self.done(machine, &[&["join", &token, "--dir", &dir, "--name", name][..], more].concat());
        let config = format!("{dir}/{role}.toml");
        let new: &[&str] = if role == "meta" { &["--new"] } else { &[] };
        self.start(machine, name, &[&[role, "--config", &config][..], new].concat());
    }
    /// The fourth machine mounts the file system, with a socket for its users.
    pub fn join_mount(&mut self) {
        let (mount, socket) = (self.path("mnt"), self.path("users.sock"));
        self.join(4, "n4", "mount", &["--mount", &mount, "--socket", &socket]);
    }
    /// A command of a user of the fourth machine.
    pub fn as_user(&self, uid: u32, args: &[&str]) -> Output {
        let user = [format!("--reuid={uid}"), format!("--regid={uid}")];
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holders[4].id().to_string(), "-n", "setpriv"]).args(user);
        command.args(["--clear-groups", WEIR]).args(args).env_remove("WEIR_DIR").stdin(Stdio::null());
        command.current_dir(self.mount()).output().unwrap()
    }
    pub fn authorities(&self) -> serde_json::Value {
        serde_json::from_str(&self.done(1, &["ca", "list", "--dir", &self.path("coord"), "--json"])).unwrap()
    }
    pub fn token(&self, args: &[&str]) -> String {
        let dir = self.path("coord");
        self.done(1, &[&["token", "create", "--dir", &dir][..], args].concat()).trim().to_owned()
    }
    pub fn mount(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
    /// The records of the coordinator's audit log that have all these words.
    pub fn audited(&self, words: &[&str]) -> usize {
        let log = self.done(1, &["audit", "show", "--dir", &self.path("coord/coord"), "--json"]);
        let log: serde_json::Value = serde_json::from_str(&log).unwrap();
        let records = log.as_array().unwrap().iter().map(ToString::to_string);
        records.filter(|record| words.iter().all(|word| record.contains(word))).count()
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        let _ = Command::new(WEIR).args(["unmount", "--lazy"]).arg(self.mount()).output(); // it may not be mounted
        let running = self.running.iter_mut().rev().map(|(_, child)| child);
        for child in running.chain(&mut self.holders) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
