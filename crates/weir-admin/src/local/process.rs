//! Background processes of the program `weir`: started, identified by pid and start time, and stopped.
//!
//! A process is known by its pid file, which it writes itself: the pid on a line of its own, as programs
//! expect it of such a file, then pid, start time and boot. A pid that was reused meanwhile has another start
//! time and is never signalled.
use crate::failure::{Doing, Failure, Outcome};
use crate::rotation;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use weir_proto::Error;

/// The interval of checks of a condition outside of this process.
const POLL: Duration = Duration::from_millis(5);

/// A background process's report on itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PidFile {
    pub pid: i32,
    /// Clock ticks between the machine's start and the process's.
    pub started: u64,
    pub boot: String,
    /// It serves: set when its addresses listen, or its mount answers.
    pub ready: bool,
    /// The calls of programs that waited and got an error when a mount ended.
    #[serde(default)]
    pub ended_calls: usize,
    /// What programs had written at a mount that ends, and that no target has yet, in bytes.
    #[serde(default)]
    pub unsaved_bytes: u64,
}

impl PidFile {
    /// The pid file of this very process.
    pub fn own(ready: bool) -> Outcome<PidFile> {
        PidFile::of(rustix::process::getpid().as_raw_nonzero().get(), ready)
    }
    fn of(pid: i32, ready: bool) -> Outcome<PidFile> {
        let started = start_time(pid).ok_or_else(|| {
            Error::unsupported("read the process's start time from /proc: is /proc mounted?")
        })?;
        Ok(PidFile { pid, started, boot: boot_id(), ready, ended_calls: 0, unsaved_bytes: 0 })
    }
    pub fn read(path: &Path) -> Option<PidFile> {
        let text = fs::read_to_string(path).ok()?;
        // Earlier releases wrote no line with the pid.
        let known = text.lines().find(|line| line.starts_with('{'))?;
        serde_json::from_str(known).ok()
    }
    pub fn write(&self, path: &Path) -> Outcome<()> {
        let tmp = path.with_extension("new");
        let known = serde_json::to_string(self).map_err(|e| Error::io(format!("write a pid file: {e}")))?;
        let text = format!("{}\n{known}\n", self.pid);
        fs::write(&tmp, text).doing(format_args!("write {}", tmp.display()))?;
        fs::rename(&tmp, path).doing(format_args!("write {}", path.display()))
    }
    /// The process still exists (a zombie does not count).
    pub fn alive(&self) -> bool {
        self.boot == boot_id() && start_time(self.pid) == Some(self.started)
    }
    /// Sends a signal to exactly this process; `false`: it is gone.
    pub fn signal(&self, signal: Signal) -> Outcome<bool> {
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(false) };
        // The descriptor pins the process: checked after it was opened, the pid cannot be reused any more.
        let Ok(descriptor) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return Ok(false) };
        if !self.alive() {
            return Ok(false);
        }
        match rustix::process::pidfd_send_signal(&descriptor, signal) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(e) => Err(e).doing(format_args!("signal process {}", self.pid)),
        }
    }
    /// Waits until the process is gone.
    pub fn gone_within(&self, patience: Duration) -> bool {
        wait_until(patience, || !self.alive())
    }
    /// Asks to stop, waits, then kills. `Ok(true)` if it had to be killed.
    pub fn stop(&self, patience: Duration) -> Outcome<bool> {
        if !self.signal(Signal::TERM)? || self.gone_within(patience) {
            return Ok(false);
        }
        self.signal(Signal::KILL)?;
        if self.gone_within(patience) {
            return Ok(true);
        }
        Err(Failure::new(
            Error::deadline(format!("process {} does not end, even by SIGKILL", self.pid)),
            "it waits for the kernel (a disk or another mount that hangs?)",
        ))
    }
}

/// This process, for another one of the same kernel: boot, process namespace, pid and start time. Empty:
/// unknown.
pub fn own_process() -> String {
    match (PidFile::own(true), pid_namespace()) {
        (Ok(own), Some(namespace)) => format!("{} {namespace} {} {}", own.boot, own.pid, own.started),
        _ => String::new(),
    }
}

/// Whether a process as named by [`own_process`] has definitely ended. One of another machine, another boot
/// or another namespace cannot be seen from here: no.
pub fn is_gone(process: &str) -> bool {
    let mut fields = process.split(' ');
    let mut next = || fields.next().unwrap_or_default();
    let (boot, namespace, pid, started) = (next(), next(), next(), next());
    let (Ok(pid), Ok(started)) = (pid.parse(), started.parse()) else { return false };
    let near = !boot.is_empty() && boot == boot_id() && Some(namespace) == pid_namespace().as_deref();
    near && pid_is_gone(pid, started)
}

/// Processes of `weir mount`, other than this one, that were called with `word` (their configuration, their
/// mount point) and are in another mount namespace: their mounts cannot be seen here. Only root sees those of
/// other users.
pub fn mounts_elsewhere(word: &Path) -> Vec<i32> {
    let namespace_of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let (Some(here), Ok(entries)) = (namespace_of("self"), fs::read_dir("/proc")) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let pids = names.filter_map(|name| name.parse::<i32>().ok());
    pids.filter(|pid| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|b| *b == 0).collect();
        let serves = words.get(1) == Some(&&b"mount"[..]) && words.contains(&word.as_os_str().as_bytes());
        serves && namespace_of(&pid.to_string()).is_some_and(|there| there != here)
    })
    .collect()
}

fn pid_is_gone(pid: i32, started: u64) -> bool {
    let Some(number) = Pid::from_raw(pid) else { return false };
    if rustix::process::test_kill_process(number) == Err(rustix::io::Errno::SRCH) {
        return true;
    }
    // A process hidden in /proc is not gone.
    fs::read(format!("/proc/{pid}/stat")).is_ok() && start_time(pid) != Some(started)
}

fn pid_namespace() -> Option<String> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    link.to_str().map(str::to_owned)
}

/// Checks a condition repeatedly; `false` if it did not become true in time.
pub fn wait_until(patience: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    while !condition() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// The program `weir`, if this process runs another one.
static WEIR: OnceLock<PathBuf> = OnceLock::new();

/// Names the program `weir` once, before anything starts.
pub fn use_weir(program: PathBuf) {
    let _ = WEIR.set(program); // the first one counts
}

fn weir() -> Outcome<PathBuf> {
    WEIR.get().map_or_else(|| std::env::current_exe().doing("find this binary"), |named| Ok(named.clone()))
}

/// The program to start.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// `weir`, usually this binary: it writes its pid file itself.
    Weir,
    /// Another one, which is ready when it listens at a port of the loopback address.
    Other { name: &'static str, port: u16 },
}

/// How a background process is to be started.
pub struct Launch {
    pub program: Program,
    /// Arguments after the binary's name.
    pub args: Vec<String>,
    pub pid_file: PathBuf,
    /// Receives standard output and error.
    pub log: PathBuf,
}

impl Launch {
    /// The bytes of its log before it starts, once a large one is rotated.
    pub fn log_before(&self) -> Outcome<u64> {
        rotation::begin(&self.log).doing(format_args!("rotate the log {}", self.log.display()))?;
        Ok(fs::metadata(&self.log).map_or(0, |metadata| metadata.len()))
    }
    /// Starts it, detached from the terminal and the caller's process group.
    pub fn start(&self) -> Outcome<Child> {
        let _ = fs::remove_file(&self.pid_file);
        let (binary, name) = match self.program {
            Program::Weir => (weir()?, "weir"),
            Program::Other { name, .. } => (PathBuf::from(name), name),
        };
        let log = rotation::open(&self.log).doing(format_args!("open the log {}", self.log.display()))?;
        let also = log.try_clone().doing("open the log twice")?;
        let mut command = Command::new(binary);
        command.args(&self.args);
        if self.program == Program::Weir {
            command.arg("--pid-file").arg(&self.pid_file).env("WEIR_LOG_FILE", &self.log);
        }
        command.current_dir("/").stdin(Stdio::null()).stdout(also).stderr(log).process_group(0);
        let child = command.spawn().map_err(|e| self.not_started(name, &e))?;
        if self.program != Program::Weir {
            let pid = i32::try_from(child.id()).map_err(|e| Error::io(format!("a pid: {e}")))?;
            PidFile::of(pid, false)?.write(&self.pid_file)?;
        }
        Ok(child)
    }
    fn not_started(&self, name: &str, e: &std::io::Error) -> Failure {
        let error = Error::from_io(format_args!("start `{name} {}`", self.args.join(" ")), e);
        match (self.program, e.kind()) {
            (Program::Other { .. }, std::io::ErrorKind::NotFound) => {
                Failure::new(error, format!("install the package of {name} (Debian: {name}-server)"))
            }
            (Program::Weir, std::io::ErrorKind::NotFound) => {
                Failure::new(error, "the program `weir` has to be beside this one, or in PATH")
            }
            _ => error.into(),
        }
    }
    /// Waits until the process reports that it serves; otherwise returns its last lines of log.
    pub fn wait_ready(&self, child: &mut Child, log_before: u64, patience: Duration) -> Outcome<PidFile> {
        let mut ended = None;
        let mut found = None;
        wait_until(patience, || {
            found = PidFile::read(&self.pid_file).filter(|p| p.ready || self.listens());
            ended = child.try_wait().ok().flatten();
            found.is_some() || ended.is_some()
        });
        match (found, ended) {
            (Some(file), None) if !file.ready => {
                let ready = PidFile { ready: true, ..file };
                ready.write(&self.pid_file)?;
                Ok(ready)
            }
            (Some(file), _) if file.ready => Ok(file),
            (_, Some(status)) => Err(self.last_words(log_before, &format!("ended ({status})"))),
            (_, None) => Err(self.last_words(log_before, &format!("is not ready after {patience:?}"))),
        }
    }
    /// For another program, which does not write its pid file itself.
    fn listens(&self) -> bool {
        let Program::Other { port, .. } = self.program else { return false };
        std::net::TcpStream::connect((std::net::Ipv4Addr::LOCALHOST, port)).is_ok()
    }
    fn last_words(&self, log_before: u64, what: &str) -> Failure {
        let role = match self.program {
            Program::Weir => format!("weir {}", self.args.first().map_or("process", String::as_str)),
            Program::Other { name, .. } => name.to_owned(),
        };
        let log = fs::read(&self.log).unwrap_or_default();
        let new = log.get(usize::try_from(log_before).unwrap_or(0)..).unwrap_or_default();
        let text = String::from_utf8_lossy(new);
        let last = |prefix: &str| text.lines().rev().find_map(|l| l.strip_prefix(prefix)).map(str::to_string);
        let error = match last("error: ") {
            Some(error) => format!("`{role}` {what}: {error}"),
            None => format!("`{role}` {what}"),
        };
        let hint = last("hint: ").unwrap_or_else(|| format!("its log is {}", self.log.display()));
        Failure::new(Error::unavailable(error), hint)
    }
}

/// Field 22 of `/proc/PID/stat`, or `None` when the process is gone or a zombie.
fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then_some(())?;
    fields.nth(18)?.parse().ok()
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_one_with_another_start_time_is_not() {
        let own = PidFile::own(true).unwrap();
        assert!(own.alive());
        let recycled = PidFile { started: own.started + 1, ..own.clone() };
        assert!(!recycled.alive());
        assert!(!recycled.signal(Signal::KILL).unwrap(), "a recycled pid is not signalled");
        assert!(!PidFile { boot: "another".into(), ..own }.alive());
    }

    #[test]
    fn a_pid_file_begins_with_the_pid_and_older_ones_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pid");
        let own = PidFile { ended_calls: 3, unsaved_bytes: 4, ..PidFile::own(true).unwrap() };
        own.write(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text.lines().next(),
            Some(own.pid.to_string().as_str()),
            "as `cat` and other programs read it"
        );
        assert_eq!(PidFile::read(&path), Some(own));
        fs::write(&path, r#"{"pid":7,"started":1,"boot":"b","ready":true}"#).unwrap();
        assert_eq!(PidFile::read(&path).map(|old| (old.pid, old.unsaved_bytes)), Some((7, 0)));
        fs::write(&path, "7\n").unwrap();
        assert_eq!(PidFile::read(&path), None, "of another program");
    }

    #[test]
    fn only_a_process_that_surely_ended_is_gone() {
        let own = own_process();
        assert!(!own.is_empty() && !is_gone(&own), "{own}");
        let mut fields: Vec<&str> = own.split(' ').collect();
        let later = "1".repeat(18);
        fields[3] = &later;
        assert!(is_gone(&fields.join(" ")), "another process has its pid");
        fields[0] = "another-boot";
        assert!(!is_gone(&fields.join(" ")));
        for unknown in ["", "x", "a b c d", &own[..own.len() / 2]] {
            assert!(!is_gone(unknown), "{unknown:?}");
        }
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let fields: Vec<&str> = own.split(' ').collect();
        let named = format!("{} {} {pid} {}", fields[0], fields[1], start_time(pid).unwrap());
        assert!(!is_gone(&named));
        child.kill().unwrap();
        assert!(wait_until(Duration::from_secs(10), || is_gone(&named)), "also before it is reaped");
        child.wait().unwrap();
        assert!(is_gone(&named));
    }

    #[test]
    fn an_ended_child_is_gone_before_it_is_reaped() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(wait_until(Duration::from_secs(10), || start_time(pid).is_none()));
        child.wait().unwrap();
    }
}
