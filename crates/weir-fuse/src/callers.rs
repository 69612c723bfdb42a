//! Calls that wait for servers, and the programs in them: a program that is being killed stops waiting at
//! once.
//!
//! Invariant: only the wait ends early. Work that has begun is completed, and its result (a lock, an open
//! file) is released if the program is gone. Knows nothing of the cause of a wait.
use fuser::{
    Errno, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyStatx, ReplyWrite, ReplyXattr,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle as Runtime;
use tokio::sync::Notify;

/// A call that has waited for less is not ended: an answer will arrive soon, and programs do not expect
/// `EINTR` of a file.
const LEFT_ALONE: Duration = Duration::from_secs(1);
/// The interval of checks whether a program is being ended.
const POLL_EVERY: Duration = Duration::from_millis(200);

/// An answer that can be an error.
pub trait Fails: Send + 'static {
    fn fail(self, errno: Errno);
}
macro_rules! fails {
    ($($reply:ty),*) => { $(
        impl Fails for $reply {
            fn fail(self, errno: Errno) {
                self.error(errno);
            }
        }
    )* };
}
fails!(
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEmpty,
    ReplyEntry,
    ReplyLock,
    ReplyLseek,
    ReplyOpen,
    ReplyStatfs,
    ReplyStatx,
    ReplyWrite,
    ReplyXattr
);

/// The waiting calls.
#[derive(Default)]
pub struct Callers(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Waiting calls, by the kernel's number of the request.
    calls: BTreeMap<u64, Call>,
    /// A task checks them.
    polling: bool,
    /// The mount ends: no call waits any more.
    closing: bool,
}

struct Call {
    pid: u32,
    since: Instant,
    /// The kernel reported a signal.
    interrupted: bool,
    end: Arc<Notify>,
}

/// A call in the list, as long as this lives.
pub struct Waiting {
    callers: Arc<Callers>,
    unique: u64,
    end: Arc<Notify>,
}

impl Waiting {
    /// Returns when the program is being ended, or the mount: with the error for the call.
    pub async fn ended(&self) -> Errno {
        self.end.notified().await;
        if self.callers.lock().closing { Errno::EIO } else { Errno::EINTR }
    }
}
impl Drop for Waiting {
    fn drop(&mut self) {
        self.callers.lock().calls.remove(&self.unique);
    }
}

impl Callers {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin(self: &Arc<Self>, runtime: &Runtime, unique: u64, pid: u32) -> Waiting {
        let end = Arc::<Notify>::default();
        let call = Call { pid, since: Instant::now(), interrupted: false, end: end.clone() };
        let mut known = self.lock();
        if known.closing {
            end.notify_one();
        }
        known.calls.insert(unique, call);
        if !std::mem::replace(&mut known.polling, true) {
            runtime.spawn(poll(self.clone()));
        }
        drop(known);
        Waiting { callers: self.clone(), unique, end }
    }

    /// The mount ends: all waiting calls end with an error, and those that would begin to wait. Returns their
    /// number.
    pub fn end_all(&self) -> usize {
        let mut known = self.lock();
        known.closing = true;
        known.calls.values().for_each(|call| call.end.notify_one());
        known.calls.len()
    }

    pub fn interrupt(&self, unique: u64) {
        if let Some(call) = self.lock().calls.get_mut(&unique) {
            call.interrupted = true;
        }
    }

    /// Ends the waits of programs that are being ended. False: no call waits.
    fn end_waits(&self) -> bool {
        let old: Vec<(u64, u32, bool)> = {
            let mut known = self.lock();
            known.polling = !known.calls.is_empty();
            let old = known.calls.iter().filter(|(_, call)| call.since.elapsed() >= LEFT_ALONE);
            old.map(|(unique, call)| (*unique, call.pid, call.interrupted)).collect()
        };
        let ending: Vec<u64> = old
            .into_iter()
            .filter(|(_, pid, interrupted)| is_ending(*pid, *interrupted))
            .map(|c| c.0)
            .collect();
        let known = self.lock();
        for call in ending.iter().filter_map(|unique| known.calls.get(unique)) {
            call.end.notify_one();
        }
        known.polling
    }
}

async fn poll(callers: Arc<Callers>) {
    loop {
        tokio::time::sleep(POLL_EVERY).await;
        if !callers.end_waits() {
            return;
        }
    }
}

/// Whether a process is being killed, or was asked to end. For a process that cannot be seen from here (in a
/// container) any signal counts.
fn is_ending(pid: u32, interrupted: bool) -> bool {
    let status = match pid {
        0 => None,
        pid => std::fs::read_to_string(format!("/proc/{pid}/status")).ok(),
    };
    let Some(status) = status else { return interrupted };
    let Some(signals) = Signals::read(&status) else { return interrupted };
    // A process that has ended has no memory any more when it closes its files. `stat` of one that executes
    // another program would wait until that has begun, which may itself wait for this mount.
    let has_memory = status.contains("VmSize:");
    signals.end_it()
        || !has_memory
            && std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| dies_of_signal(&stat))
}

/// Whether a thread belongs to a child of the process in which another thread runs. False where one of them
/// cannot be seen.
pub fn is_child_of(thread: u32, other: u32) -> bool {
    if thread == other
        || thread == 0
        || other == 0
        || Path::new(&format!("/proc/{thread}/task/{other}")).exists()
    {
        return false;
    }
    let number = |of: u32, name: &str| -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{of}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
    };
    number(other, "Tgid").is_some_and(|process| number(thread, "PPid") == Some(process))
}

/// Sets of signals, a bit for each.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Signals {
    pending: u64,
    blocked: u64,
    ignored: u64,
    caught: u64,
}

const fn set(signals: &[i32]) -> u64 {
    let (mut all, mut at) = (0, 0);
    while at < signals.len() {
        all |= 1 << (signals[at] - 1);
        at += 1;
    }
    all
}
/// Signals by which users and batch systems ask a program to end.
const ASK_TO_END: u64 = set(&[libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM]);
/// Signals that do not end a process by default.
const HARMLESS: u64 = set(&[
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGURG,
    libc::SIGWINCH,
    libc::SIGSTOP,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
]);

impl Signals {
    /// Reads the signals in `/proc/PID/status`.
    fn read(status: &str) -> Option<Signals> {
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            u64::from_str_radix(line.trim(), 16).ok()
        };
        Some(Signals {
            pending: of("SigPnd")? | of("ShdPnd")?,
            blocked: of("SigBlk")?,
            ignored: of("SigIgn")?,
            caught: of("SigCgt")?,
        })
    }
    /// Not signals that a program uses for itself, for instance timers: it does not expect a file's call to
    /// end by them.
    fn end_it(&self) -> bool {
        let pending = self.pending & !self.blocked;
        let fatal = pending & !self.ignored & !self.caught & !HARMLESS;
        fatal != 0 || pending & self.caught & ASK_TO_END != 0
    }
}

/// From `/proc/PID/stat`: the process ends because of a signal, and closes its files. A process that exits by
/// itself waits as at any close.
fn dies_of_signal(stat: &str) -> bool {
    const PF_EXITING: u64 = 4;
    // The name may contain anything; the third field follows its last bracket.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_ascii_whitespace().collect();
    let field = |n: usize| fields.get(n - 3).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let (flags, exit_code) = (field(9), field(52));
    flags & PF_EXITING != 0 && exit_code & 0x7f != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_being_ended_by_signals_that_are_meant_for_that() {
        let signals = |pending: &[i32], ignored: &[i32], caught: &[i32]| Signals {
            pending: set(pending),
            blocked: 0,
            ignored: set(ignored),
            caught: set(caught),
        };
        assert!(signals(&[libc::SIGKILL], &[], &[]).end_it());
        assert!(signals(&[libc::SIGINT], &[], &[libc::SIGINT]).end_it(), "its handler decides");
        assert!(!signals(&[libc::SIGINT], &[libc::SIGINT], &[]).end_it());
        assert!(signals(&[libc::SIGALRM], &[], &[]).end_it(), "nothing catches it");
        assert!(!signals(&[libc::SIGALRM], &[], &[libc::SIGALRM]).end_it(), "a timer of its own");
        assert!(!signals(&[libc::SIGCHLD, libc::SIGURG], &[], &[]).end_it());
        assert!(!Signals { blocked: set(&[libc::SIGTERM]), ..signals(&[libc::SIGTERM], &[], &[]) }.end_it());
        let own = Signals::read(&std::fs::read_to_string("/proc/self/status").unwrap()).unwrap();
        assert!(!own.end_it(), "{own:?}");
    }

    #[test]
    fn a_child_differs_from_its_parent_and_from_other_threads() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = [(child.id(), own), (own, child.id()), (own, own), (1, own), (own, 0)]
            .map(|(a, b)| is_child_of(a, b));
        let thread = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get() as u32);
        let other = thread.join().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, [true, false, false, false, false]);
        assert!(!is_child_of(other, own) && !is_child_of(own, other));
    }

    #[test]
    fn a_process_that_dies_of_a_signal_differs_from_one_that_ends() {
        let stat = |flags: u64, code: u64| {
            let zeros = |n| vec!["0"; n].join(" ");
            format!("7 (a) b) S {} {flags} {} {code}", zeros(5), zeros(42))
        };
        assert!(dies_of_signal(&stat(4, 9)));
        assert!(!dies_of_signal(&stat(4, 256)) && !dies_of_signal(&stat(0, 9)) && !dies_of_signal(""));
        assert!(!dies_of_signal(&std::fs::read_to_string("/proc/self/stat").unwrap()));
    }

    #[tokio::test]
    async fn a_call_of_an_unseen_program_ends_by_any_signal() {
        let callers = Arc::<Callers>::default();
        let waiting = callers.begin(&Runtime::current(), 1, 0);
        callers.interrupt(1);
        assert_eq!(waiting.ended().await, Errno::EINTR);
        drop(waiting);
        assert!(!callers.end_waits());
    }

    #[tokio::test]
    async fn when_the_mount_ends_no_call_waits_any_more() {
        let callers = Arc::<Callers>::default();
        let waiting = callers.begin(&Runtime::current(), 1, std::process::id());
        assert_eq!(callers.end_all(), 1);
        assert_eq!(waiting.ended().await, Errno::EIO);
        let late = callers.begin(&Runtime::current(), 2, std::process::id());
        assert_eq!(late.ended().await, Errno::EIO, "one that begins to wait afterwards");
    }
}
