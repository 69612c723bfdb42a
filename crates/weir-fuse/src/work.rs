//! Accounting of the mount: requests, bytes and time by volume, user, job and kind; and the waiting calls.
//!
//! The volume of an inode is requested from the leader in the background, once for each directory, so that no
//! request waits for it: the first rows of a directory have no volume. Knows nothing of what requests do.
use crate::counts;
use crate::log;
use crate::tree::from_kernel_ino;
use fuser::{INodeNo, Request};
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::runtime::Handle as Runtime;
use weir_client::Client;
use weir_proto::InodeId;
use weir_watch::{Counter, Family, Object, Reason, WaitGuard, WaitRecord, Watch};

/// The kernel's number of `FUSE_WRITE`, and the size of its header before the data.
const WRITE: u32 = 16;
const WRITE_HEADER_BYTES: u32 = 80;
/// Directories whose volume is known; beyond that it is requested again.
const DIRECTORIES_MAX: usize = 4096;
/// Threads whose job is known.
const THREADS_MAX: usize = 1024;
/// Known values are looked up again after this time: volumes are created, numbers of threads are reused.
const KNOWN_FOR_NS: u64 = 10_000_000_000;
/// Requests to the leader in flight, and look-ups of threads.
const ASKED_MAX: usize = 4;
/// The bytes read of a program's environment.
const ENVIRONMENT_BYTES_MAX: u64 = 64 << 10;
/// Variables by which batch systems name a job, the most usual first.
const JOB_VARIABLES: [&str; 4] = ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "_CONDOR_JOB_IDS"];
const KINDS: usize = 64;

/// A value that is known for a while.
struct Known<T> {
    of: T,
    since_ns: u64,
}

impl<T> Known<T> {
    /// Whether the value may have changed before the request at `now_ns`.
    fn is_old(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.since_ns) > KNOWN_FOR_NS
    }
}

#[derive(Default)]
struct Volumes {
    by_directory: BTreeMap<u64, Known<u32>>,
    asked: Vec<u64>,
}

#[derive(Default)]
struct Jobs {
    by_thread: BTreeMap<u32, Known<Arc<str>>>,
    asked: Vec<u32>,
}

pub struct Work {
    watch: Watch,
    client: Client,
    runtime: Runtime,
    volumes: Arc<Mutex<Volumes>>,
    jobs: Arc<Mutex<Jobs>>,
    seconds: Arc<Family>,
    read_bytes: Counter,
    written_bytes: Counter,
}

/// A request that waits.
pub struct Running {
    work: Arc<Work>,
    who: Who,
    opcode: u32,
    kind: &'static str,
    begun_ns: u64,
    _wait: WaitGuard,
}

/// Accounts for bytes read.
pub struct Reader {
    work: Arc<Work>,
    who: Who,
}

impl Reader {
    pub fn read(&self, bytes: usize) {
        self.work.add_read(&self.who, self.work.watch.now_ns(), bytes);
    }
}

struct Who {
    volume: u32,
    uid: u32,
    job: Arc<str>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work {
    pub fn new(client: &Client, runtime: Runtime) -> Arc<Work> {
        let watch = client.watch().clone();
        log::count_in(&watch);
        let bytes = |direction| watch.counter("weir_client_bytes_total", ("direction", direction));
        Arc::new(Work {
            client: client.clone(),
            runtime,
            volumes: Arc::default(),
            jobs: Arc::default(),
            seconds: watch.meters.family("weir_client_fuse_seconds", "op", KINDS),
            read_bytes: bytes("read"),
            written_bytes: bytes("written"),
            watch,
        })
    }

    /// A request came.
    pub fn begun(&self, request: &Request) {
        let Some(kind) = counts::name(request.opcode()) else { return };
        let bytes = match request.opcode() {
            WRITE => u64::from(request.length().saturating_sub(WRITE_HEADER_BYTES)),
            _ => 0,
        };
        self.written_bytes.add(bytes);
        let now_ns = self.watch.now_ns();
        self.account(&self.who(request, now_ns), now_ns, (kind, 1, bytes));
    }
    /// Bytes were read for a request.
    pub fn read(&self, request: &Request, bytes: usize) {
        let now_ns = self.watch.now_ns();
        self.add_read(&self.who(request, now_ns), now_ns, bytes);
    }
    /// The reader, for a request that is answered later.
    pub fn reader(self: &Arc<Self>, request: &Request) -> Reader {
        Reader { work: self.clone(), who: self.who(request, self.watch.now_ns()) }
    }
    fn add_read(&self, who: &Who, now_ns: u64, bytes: usize) {
        self.read_bytes.add(bytes as u64);
        self.account(who, now_ns, ("READ", 0, bytes as u64));
    }
    fn account(&self, who: &Who, now_ns: u64, (kind, requests, bytes): (&'static str, u64, u64)) {
        let Who { volume, uid, job } = who;
        let (volume, uid) = (*volume, *uid);
        let work = weir_watch::Work { volume, uid, job, kind, requests, bytes, ns: 0 };
        self.watch.account(now_ns, &work);
    }
    /// A request waits from now on.
    pub fn waits(self: &Arc<Self>, request: &Request) -> Running {
        let begun_ns = self.watch.now_ns();
        let (who, opcode) = (self.who(request, begun_ns), request.opcode());
        let kind = counts::name(opcode).unwrap_or("OTHER");
        let object = Object::new("inode", from_kernel_ino(INodeNo(request.nodeid())).0);
        let wait = WaitRecord::new(Reason::Program, object).doing(kind).of(who.uid, request.pid());
        let wait = self.watch.wait_since(begun_ns, wait);
        Running { work: self.clone(), who, opcode, kind, begun_ns, _wait: wait }
    }

    fn who(&self, request: &Request, now_ns: u64) -> Who {
        let volume = self.volume(from_kernel_ino(INodeNo(request.nodeid())), now_ns);
        Who { volume, uid: request.uid(), job: self.job(request.pid(), now_ns) }
    }

    /// 0: not known yet.
    fn volume(&self, ino: InodeId, now_ns: u64) -> u32 {
        let directory = ino.0 >> 24;
        let mut volumes = lock(&self.volumes);
        let known = volumes.by_directory.get(&directory);
        let (volume, is_old) = known.map_or((0, true), |known| (known.of, known.is_old(now_ns)));
        if is_old && volumes.asked.len() < ASKED_MAX && !volumes.asked.contains(&directory) {
            volumes.asked.push(directory);
            let (volumes, client, watch) = (self.volumes.clone(), self.client.clone(), self.watch.clone());
            self.runtime.spawn(async move {
                let found = client.volume_at(ino).await;
                let mut volumes = lock(&volumes);
                volumes.asked.retain(|asked| *asked != directory);
                if volumes.by_directory.len() >= DIRECTORIES_MAX {
                    volumes.by_directory.clear();
                }
                let of = found.map_or(0, |volume| volume.id.0);
                volumes.by_directory.insert(directory, Known { of, since_ns: watch.now_ns() });
            });
        }
        volume
    }

    /// Empty: none, or not known yet. It is looked up in another thread: a thread that executes another
    /// program shows its environment when that has begun, and closes files of this mount before.
    fn job(&self, thread: u32, now_ns: u64) -> Arc<str> {
        let mut jobs = lock(&self.jobs);
        let known = jobs.by_thread.get(&thread);
        let is_old = known.is_none_or(|known| known.is_old(now_ns));
        let job = known.map_or_else(Arc::default, |known| known.of.clone());
        if is_old && jobs.asked.len() < ASKED_MAX && !jobs.asked.contains(&thread) {
            jobs.asked.push(thread);
            let (jobs, watch) = (self.jobs.clone(), self.watch.clone());
            self.runtime.spawn_blocking(move || {
                let of = job_of(thread).unwrap_or_default().into();
                let mut jobs = lock(&jobs);
                jobs.asked.retain(|asked| *asked != thread);
                if jobs.by_thread.len() >= THREADS_MAX {
                    jobs.by_thread.clear();
                }
                jobs.by_thread.insert(thread, Known { of, since_ns: watch.now_ns() });
            });
        }
        job
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let now_ns = self.work.watch.now_ns();
        let ns = now_ns.saturating_sub(self.begun_ns);
        let Who { volume, uid, job } = &self.who;
        let (volume, uid, kind) = (*volume, *uid, self.kind);
        let work = weir_watch::Work { volume, uid, job, kind, requests: 0, bytes: 0, ns };
        self.work.watch.account(now_ns, &work);
        self.work.seconds.add(&self.work.watch.meters, self.opcode as usize, kind, ns);
    }
}

/// The batch job of a thread, by its environment; none also for a thread that cannot be seen.
fn job_of(thread: u32) -> Option<String> {
    let file = std::fs::File::open(format!("/proc/{thread}/environ")).ok()?;
    let mut environment = Vec::new();
    file.take(ENVIRONMENT_BYTES_MAX).read_to_end(&mut environment).ok()?;
    job_in(&environment)
}

fn job_in(environment: &[u8]) -> Option<String> {
    let of = |name: &str| {
        let value = |line: &[u8]| line.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
        environment.split(|b| *b == 0).find_map(value)
    };
    let job = JOB_VARIABLES.into_iter().find_map(of)?;
    let shown = String::from_utf8_lossy(&job);
    Some(shown.chars().filter(|c| !c.is_control()).take(64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_newer_than_a_request_are_not_old() {
        let known = Known { of: 1, since_ns: 5 };
        assert!(!known.is_old(4) && !known.is_old(5 + KNOWN_FOR_NS) && known.is_old(6 + KNOWN_FOR_NS));
    }

    #[test]
    fn a_job_is_what_the_batch_system_calls_it() {
        assert_eq!(job_in(b"A=1\0SLURM_JOB_ID=4711\0B=2"), Some("4711".into()));
        assert_eq!(job_in(b"XSLURM_JOB_ID=1\0PBS_JOBID=7.host\0"), Some("7.host".into()));
        assert_eq!(job_in(b"SLURM_JOB_IDS=1\0"), None);
        assert_eq!(job_in(b""), None);
        let long = [&b"SLURM_JOB_ID="[..], &[b'x'; 200], b"\x1b\0"].concat();
        assert_eq!(job_in(&long).unwrap().len(), 64);
    }

    #[test]
    fn the_job_of_a_thread_is_in_its_environment() {
        let mut child =
            std::process::Command::new("sleep").arg("60").env("SLURM_JOB_ID", "815").spawn().unwrap();
        // The kernel shows the new environment once the program has begun.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let mut found = None;
        while found.is_none() && std::time::Instant::now() < until {
            found = job_of(child.id());
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.as_deref(), Some("815"));
        assert_eq!(job_of(0), None);
    }
}
