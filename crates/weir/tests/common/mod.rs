//! A cluster of the real binary for one test; nothing of it is left, also when the test fails.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]

pub mod locker;
pub mod machines;
pub mod relation;
pub mod rings;
pub mod s3;
pub mod writer;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Whether this machine can mount at all. A test that cannot run here is skipped, and reports that; where
/// nothing may be skipped, as in `make test`, it fails.
pub fn can_mount() -> bool {
    Path::new("/dev/fuse").exists() || left_out("/dev/fuse is missing: load the module fuse")
}

/// Whether a program exists; like `can_mount`.
pub fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap();
    found.status.success() || left_out(&format!("{program} is not installed: run `make setup`"))
}

/// A test tool that `make setup` keeps in a cache; like `has`.
pub fn tool(name: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("WEIR_TOOLS").map(PathBuf::from);
    let usual = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/weir-tools"));
    let found =
        cache.into_iter().chain(usual).map(|dir| dir.join("bin").join(name)).find(|path| path.exists());
    if found.is_none() {
        left_out(&format!("{name} is not installed: run `make setup`"));
    }
    found
}

/// A Python with h5py; like `has`.
pub fn h5py() -> Option<PathBuf> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    let works = Command::new(&python).args(["-c", "import h5py"]).output().is_ok_and(|o| o.status.success());
    (works || left_out("h5py is not in .venv: run `make setup`")).then_some(python)
}

/// Always false.
pub fn left_out(why: &str) -> bool {
    assert!(std::env::var_os("WEIR_TEST_ALL").is_none(), "this test cannot run: {why}");
    eprintln!("left out: {why}");
    false
}

/// The part of a long run: `all`, or the part that `variable` names, `first..end`.
pub fn part(variable: &str, all: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var(variable) else { return all };
    let ends = text.split_once("..").and_then(|(first, end)| Some((first.parse().ok()?, end.parse().ok()?)));
    let (first, end) = ends.unwrap_or_else(|| panic!("{variable}={text}: it is to be first..end"));
    first..end
}

pub fn weir(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir")).args(args).output().unwrap()
}

/// The program `weir-bench`, which is built beside `weir` when all tests are.
pub fn weir_bench() -> PathBuf {
    let beside = Path::new(env!("CARGO_BIN_EXE_weir")).with_file_name("weir-bench");
    let how = "`cargo test --workspace --test compare` builds it";
    assert!(beside.exists(), "{} is missing: {how}", beside.display());
    beside
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a shell script; panics with all its output if it fails.
pub fn shell(script: &str) -> String {
    let output = Command::new("bash").args(["-euo", "pipefail", "-c", script]).output().unwrap();
    assert!(
        output.status.success(),
        "{}\n--- script\n{script}\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Waits for a condition of the world outside.
pub fn wait_until(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Does something when the scope is left by a panic: other threads of a test must not wait for ever then.
pub struct OnPanic<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0)();
        }
    }
}

/// The end of a process that was started by a test; kills it if that does not come in time.
pub fn ends(what: &str, child: &mut Child, patience: Duration) -> ExitStatus {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() >= deadline {
            let _ = child.kill();
            panic!("not within {patience:?}: the end of {what}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A stopped process of a cluster. It resumes when this value is dropped, when the test's process dies, and
/// after a minute in any case: a file on a mount whose process is stopped cannot even be closed, so a program
/// with an open one would otherwise wait for ever, also at its own end. Until then a test touches nothing of
/// that mount, and has nothing open there: to start a program would be to close it in that program.
pub struct Stopped(Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Runs commands. Started before this process has files of a mount open: to start a program is to close them
/// in that program, and a close saves, which waits for the very servers that the program may be to start.
pub struct Shell {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Shell {
    pub fn start() -> Shell {
        let mut bash = Command::new("bash");
        let mut child = bash.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Shell { child, output }
    }
    /// Whether it succeeded.
    pub fn run(&mut self, command: &str) -> bool {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{command} > /dev/null; echo status $?").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end() == "status 0"
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A cluster in a temporary directory, with its mounts.
pub struct Cluster {
    _root: TempDir,
    dir: PathBuf,
    pub mounts: Vec<PathBuf>,
    options: Vec<String>,
    /// With `WEIR_TEST_TRANSPORT=uring` all mounts have rings.
    _rings: Option<rings::Rings>,
    /// Words before those of `weir up`, which end in starting it.
    pub launcher: Vec<String>,
    /// That starts what is missing.
    pub program: PathBuf,
}

impl Cluster {
    /// 6 targets, 4+2.
    pub fn start(mounts: usize) -> Cluster {
        Cluster::with(mounts, &[])
    }

    /// One with a volume `data`, and where that is.
    pub fn with_volume() -> (Cluster, PathBuf) {
        let cluster = Cluster::start(1);
        volume(&cluster, &["create", "data"]);
        let top = cluster.mount().join("data");
        (cluster, top)
    }

    pub fn with(mounts: usize, options: &[&str]) -> Cluster {
        Cluster::at(None, mounts, options)
    }

    /// `dir`: where it keeps everything, if not in a temporary directory of its own.
    pub fn at(dir: Option<PathBuf>, mounts: usize, options: &[&str]) -> Cluster {
        Cluster::of(env!("CARGO_BIN_EXE_weir").into(), dir, mounts, options)
    }

    /// With a program of another release.
    pub fn of(program: PathBuf, dir: Option<PathBuf>, mounts: usize, options: &[&str]) -> Cluster {
        let root = tempfile::Builder::new().prefix("weir-test-").tempdir().unwrap();
        let (transport, rings) = transport(options);
        let cluster = Cluster {
            dir: dir.unwrap_or_else(|| root.path().join("cluster")),
            mounts: (1..=mounts).map(|n| root.path().join(format!("mnt{n}"))).collect(),
            options: options.iter().map(ToString::to_string).chain(transport).collect(),
            _rings: rings,
            launcher: Vec::new(),
            program,
            _root: root,
        };
        cluster.up();
        cluster
    }

    pub fn dir(&self) -> PathBuf {
        self.dir.clone()
    }

    pub fn mount(&self) -> &Path {
        &self.mounts[0]
    }

    /// Starts what is missing.
    pub fn up(&self) {
        let output = self.try_up();
        assert!(output.status.success(), "{}\n{}{}", text(&output.stdout), text(&output.stderr), self.logs());
    }

    pub fn try_up(&self) -> Output {
        let words = self.words_of_up();
        Command::new(&words[0]).args(&words[1..]).output().unwrap()
    }

    /// The command that starts what is missing; none of its words has to be quoted.
    pub fn words_of_up(&self) -> Vec<String> {
        let mut words = self.launcher.clone();
        words.push(self.program.display().to_string());
        words.extend(["up", "--dir"].map(String::from));
        words.push(self.dir.display().to_string());
        words.extend(self.options.iter().cloned());
        for mount in &self.mounts {
            words.extend(["--mount".into(), mount.display().to_string()]);
        }
        words
    }

    pub fn status(&self) -> serde_json::Value {
        self.status_and_exit().0
    }

    /// The output of `weir status`, and its exit status: 0 healthy, 1 degraded or a warning, 2 critical.
    pub fn status_and_exit(&self) -> (serde_json::Value, i32) {
        let output = self.try_run_weir(&["status", "--json"]);
        let code = output.status.code().unwrap();
        assert!(code <= 2, "{}", text(&output.stderr));
        (serde_json::from_slice(&output.stdout).unwrap(), code)
    }

    /// The output of a command that finds the cluster by `--dir`.
    pub fn run_weir(&self, args: &[&str]) -> String {
        let output = self.try_run_weir(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub fn try_run_weir(&self, args: &[&str]) -> Output {
        weir(&[args, &["--dir", self.dir.to_str().unwrap()]].concat())
    }

    /// Of all targets; none while one has not reported yet how full it is.
    pub fn used_bytes(&self) -> Option<u64> {
        let status = self.status();
        status["targets"].as_array().unwrap().iter().map(|t| t["used_bytes"].as_u64()).sum()
    }

    /// The last lines of every log, for a failing test.
    pub fn logs(&self) -> String {
        let mut all = String::new();
        for entry in fs::read_dir(self.dir().join("log")).into_iter().flatten().flatten() {
            let log = text(&fs::read(entry.path()).unwrap_or_default());
            let lines: Vec<&str> = log.lines().collect();
            all += &format!(
                "--- {}\n{}\n",
                entry.path().display(),
                lines[lines.len().saturating_sub(15)..].join("\n")
            );
        }
        all
    }

    /// The TCP port that a server of this cluster has.
    pub fn port(&self, name: &str) -> u16 {
        let config = fs::read_to_string(self.dir().join(format!("etc/{name}.toml"))).unwrap();
        let listen = config.lines().find(|line| line.starts_with("listen")).unwrap();
        listen.rsplit_once("tcp:127.0.0.1:").unwrap().1.trim_end_matches(['"', ']']).parse().unwrap()
    }

    /// The process of a pid file, if it is still the same one.
    pub fn pid(&self, name: &str) -> Option<i64> {
        let file = fs::read_to_string(self.dir().join("run").join(format!("{name}.pid"))).ok()?;
        // Below the line with the pid.
        let file: serde_json::Value = serde_json::from_str(file.lines().last()?).ok()?;
        let pid = file["pid"].as_i64()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        (fields[0] != "Z" && fields[19].parse() == Ok(file["started"].as_u64()?)).then_some(pid)
    }

    pub fn signal(&self, name: &str, signal: &str) {
        let pid = self.pid(name).unwrap_or_else(|| panic!("{name} does not run"));
        shell(&format!("kill -{signal} {pid}"));
    }

    /// Stops a process (SIGSTOP) until the value returned goes.
    pub fn stop(&self, name: &str) -> Stopped {
        let pid = self.pid(name).unwrap_or_else(|| panic!("{name} does not run"));
        // Another process, so that it works also when this one dies, whose end it sees as the end of its
        // input.
        let script = "kill -STOP $0; read -t 60; kill -CONT $0";
        let mut helper = Command::new("bash");
        let helper = helper.args(["-c", script, &pid.to_string()]).stdin(Stdio::piped()).spawn().unwrap();
        let stopped = Stopped(helper);
        let is_stopped = |task: PathBuf| {
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('T'))
        };
        wait_until(&format!("{name} stands still"), Duration::from_secs(10), || {
            fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(|task| is_stopped(task.unwrap().path()))
        });
        stopped
    }

    pub fn kill(&self, name: &str) {
        let pid = self.pid(name).unwrap_or_else(|| panic!("{name} does not run"));
        shell(&format!("kill -KILL {pid}"));
        wait_until(&format!("{name} is gone"), Duration::from_secs(60), || self.pid(name).is_none());
    }

    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir().join("run")).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|e| e.file_name().to_str()?.strip_suffix(".pid").map(str::to_string))
            .collect();
        names.sort();
        names
    }

    /// Of every process that runs.
    pub fn pids(&self) -> Vec<String> {
        self.names().iter().filter_map(|n| self.pid(n)).map(|p| p.to_string()).collect()
    }

    /// SIGKILL for every process at once.
    pub fn kill_all(&self) {
        let (names, pids) = (self.names(), self.pids());
        shell(&format!("kill -KILL {}", pids.join(" ")));
        wait_until("all are gone", Duration::from_secs(60), || names.iter().all(|n| self.pid(n).is_none()));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        let down = weir(&["down", "--lose-unsaved", "--dir", self.dir().to_str().unwrap()]);
        if !down.status.success() {
            eprintln!("weir down: {}", text(&down.stderr));
        }
        for name in self.names() {
            if let Some(pid) = self.pid(&name) {
                let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
            }
        }
        for mount in &self.mounts {
            let _ = Command::new("umount").arg("-l").arg(mount).output();
        }
    }
}

/// Words of `weir up` for the transport that `WEIR_TEST_TRANSPORT` names, unless a test names one.
fn transport(options: &[&str]) -> (Vec<String>, Option<rings::Rings>) {
    let wanted = std::env::var("WEIR_TEST_TRANSPORT").ok();
    let Some(wanted) = wanted.filter(|_| !options.contains(&"--transport")) else {
        return (Vec::new(), None);
    };
    let rings = (wanted == "uring").then(|| rings::Rings::allow().expect("this kernel can have no rings"));
    (vec!["--transport".into(), wanted], rings)
}

/// Bytes that differ with every seed and offset.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A copy of a tree, with all its attributes.
pub fn copy(from: &Path, to: &Path) {
    let output = Command::new("cp").arg("-a").args([from, to]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Two trees have the same names and contents.
pub fn same_contents(a: &Path, b: &Path) {
    let output = Command::new("diff").args(["-r", "--no-dereference"]).args([a, b]).output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

/// What `find` prints of everything in a tree, sorted.
pub fn find(top: &Path, args: &[&str]) -> Vec<String> {
    let output = Command::new("find").current_dir(top).arg(".").args(args).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The output of `weir volume …`.
pub fn volume(cluster: &Cluster, args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&cluster.run_weir(&[&["volume"], args, &["--json"]].concat())).unwrap()
}
/// Its message when it refuses.
pub fn refused_volume(cluster: &Cluster, args: &[&str]) -> String {
    let output = cluster.try_run_weir(&[&["volume"], args].concat());
    assert!(!output.status.success(), "{args:?}: {}", text(&output.stdout));
    text(&output.stderr)
}
pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}
