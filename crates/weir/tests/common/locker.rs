//! A process that carries out the test's requests on files. No other process closes its files: a test that
//! starts programs has its own files closed in each child, and the mount gets every close, and saves then.
use super::{ends, shell};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// One command a line, one answer a line.
const LOCKER: &str = r#"
import errno, fcntl, os, signal, struct, sys
fds = {}
class Interrupted(Exception): pass
def on_signal(*_): raise Interrupted()
signal.signal(signal.SIGUSR1, on_signal)
KINDS = {'sh': fcntl.F_RDLCK, 'ex': fcntl.F_WRLCK, 'un': fcntl.F_UNLCK}
def lock(cmd, fd, kind, start, length):
    # struct flock of 64-bit Linux: type, whence, start, len, pid
    arg = struct.pack('hhqqi4x', KINDS[kind], 0, start, length, 0)
    return struct.unpack('hhqqi4x', fcntl.fcntl(fd, cmd, arg))
for line in sys.stdin:
    word = line.split()
    try:
        if word[0] == 'open': fds[word[1]] = os.open(word[2], os.O_RDWR | os.O_CREAT, 0o644); answer = 'ok'
        elif word[0] == 'close': os.close(fds.pop(word[1])); answer = 'ok'
        elif word[0] in ('set', 'wait', 'oset', 'owait'):
            cmd = {'set': fcntl.F_SETLK, 'wait': fcntl.F_SETLKW, 'oset': 37, 'owait': 38}[word[0]]
            print('begun', flush=True)
            lock(cmd, fds[word[1]], word[2], int(word[3]), int(word[4])); answer = 'ok'
        elif word[0] == 'get':
            kind, _, start, length, pid = lock(fcntl.F_GETLK, fds[word[1]], word[2], int(word[3]), int(word[4]))
            answer = 'free' if kind == fcntl.F_UNLCK else f'{kind} {start} {length} {pid}'
        elif word[0] in ('flock', 'flockw'):
            how = {'sh': fcntl.LOCK_SH, 'ex': fcntl.LOCK_EX, 'un': fcntl.LOCK_UN}[word[2]]
            print('begun', flush=True)
            fcntl.flock(fds[word[1]], how | (fcntl.LOCK_NB if word[0] == 'flock' else 0)); answer = 'ok'
        elif word[0] == 'write': os.pwrite(fds[word[1]], word[2].encode(), 0); answer = 'ok'
        elif word[0] == 'read': answer = os.pread(fds[word[1]], 100, 0).decode()
        elif word[0] == 'fsync': os.fsync(fds[word[1]]); answer = 'ok'
    except OSError as e: answer = {errno.EDEADLK: 'EDEADLK'}.get(e.errno) or errno.errorcode[e.errno]
    except Interrupted: answer = 'EINTR'
    print(answer, flush=True)
"#;

/// Such a process.
pub struct Locker {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Locker {
    pub fn new(file: &Path) -> Locker {
        let mut locker = Locker::start();
        assert_eq!(locker.ask(&format!("open f {}", file.display())), "ok");
        locker
    }
    pub fn start() -> Locker {
        let mut child = Command::new("python3")
            .args(["-u", "-c", LOCKER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tx, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    return;
                }
            }
        });
        Locker { child, input, answers }
    }
    pub fn begin(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
        let locks = ["set", "wait", "oset", "owait", "flock", "flockw"];
        if locks.contains(&command.split(' ').next().unwrap()) {
            assert_eq!(self.end(), "begun");
        }
    }
    pub fn end(&mut self) -> String {
        self.answers.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("no answer: {e}"))
    }
    pub fn ask(&mut self, command: &str) -> String {
        self.begin(command);
        self.end()
    }
    /// Waits for the end of one that was killed.
    pub fn ended(&mut self) {
        ends("a locker", &mut self.child, PATIENCE);
    }
    /// Still waiting as far as this process knows.
    pub fn waits(&self) -> bool {
        self.answers.try_recv().is_err()
    }
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    pub fn signal(&self, signal: &str) {
        shell(&format!("kill -{signal} {}", self.pid()));
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
