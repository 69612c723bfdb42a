//! The machine: its clocks, kernel randomness, file systems, sockets and threads.
//!
//! It is made inside a tokio runtime with time and I/O enabled, and spawns and sleeps there from any thread
//! (those of a FUSE session do not belong to the runtime). Several `Env`s of one process share nothing.

// These methods and types may be used only here.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod actor;
mod allocator;
mod alone;
mod commands;
mod disk;
mod local_socket;
mod net;
mod pages;
mod processors;
mod roaming;
mod threads;
mod timers;

use crate::{
    BoxFuture, BufferPool, Clock, ClockSource, Env, Instant, PressureSource, Rng, RngSource, TaskHandle,
    Tasks, WallTime,
    pressure::Recent,
    tasks::{Alone, Lane, LaneRunner, TaskRunner},
};
pub use actor::Actor;
pub use allocator::Allocator;
pub use commands::{COMMAND_BYTES, CommandEnd, CommandRing, Exchange, RingWaker};
pub use pages::cached_bytes;
pub use processors::{stay_nowhere, stay_on};
use roaming::Roaming;
use rustix::time::{ClockId, clock_gettime};
use std::{
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};
use threads::ThreadPool;
use timers::Timers;
use tokio::runtime::Handle;
use weir_watch::Watch;

/// How a process uses its machine.
#[derive(Debug)]
pub struct RealConfig {
    /// Threads for blocking work (disk calls). Started on demand.
    pub disk_threads: usize,
    /// Idle buffer memory that is kept for reuse.
    pub buffer_cache_bytes: usize,
    pub kill_at: Option<KillAt>,
}

/// For tests: the process kills itself, as by SIGKILL, when it reaches a crash point for the n-th time.
/// Written `POINT:N`.
#[derive(Debug)]
pub struct KillAt {
    point: String,
    left: AtomicU32,
}

impl FromStr for KillAt {
    type Err = String;
    fn from_str(text: &str) -> Result<KillAt, String> {
        let parsed =
            text.split_once(':').and_then(|(point, n)| Some((point, n.parse().ok().filter(|n| *n > 0)?)));
        let (point, n) = parsed.ok_or_else(|| format!("{text:?} is not POINT:N, with N from 1 on"))?;
        Ok(KillAt { point: point.into(), left: AtomicU32::new(n) })
    }
}

impl KillAt {
    fn crash_point(&self, point: &'static str) {
        if self.point == point && self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}

impl Default for RealConfig {
    fn default() -> RealConfig {
        // 16 writers saturate one NVMe with positional direct writes (measured); twice that serves two
        // targets.
        RealConfig { disk_threads: 32, buffer_cache_bytes: 256 << 20, kill_at: None }
    }
}

/// How far all clocks of this process differ from the machine's.
static WALL_AHEAD_NS: AtomicI64 = AtomicI64::new(0);

/// For tests: from now on this process takes another time of day for the present one, as on a machine whose
/// clock is wrong. Monotonic time is the same.
pub fn set_wall_ahead(seconds: i64) {
    WALL_AHEAD_NS.store(seconds.saturating_mul(1_000_000_000), Ordering::Relaxed);
}

/// The machine, with defaults.
pub fn env() -> Env {
    env_with(RealConfig::default())
}

/// The machine.
pub fn env_with(config: RealConfig) -> Env {
    let home = Home(Handle::try_current().ok());
    Env {
        watch: machine_watch(),
        clock: Clock(Arc::new(MachineClock::new(&home))),
        rng: Rng(Arc::new(KernelRng(Mutex::new(Vec::new())))),
        disk: Arc::new(disk::MachineDisk),
        net: Arc::new(net::MachineNet),
        tasks: Tasks(Arc::new(MachineTasks {
            home,
            threads: ThreadPool::for_disks(config.disk_threads),
            kill_at: config.kill_at.map(Arc::new),
            blocked: AtomicUsize::new(0),
            alone: None,
        })),
        buffers: BufferPool::new(config.buffer_cache_bytes),
        pressure: {
            let recent = Recent::default();
            PressureSource(Arc::new(move || alone::pressure(&recent, monotonic())))
        },
        is_simulated: false,
    }
}

fn machine_watch() -> Watch {
    let mut process = [0; 8];
    fill_random(&mut process);
    Watch::new(weir_watch::Shared::new(u64::from_ne_bytes(process) | 1), Arc::new(|| monotonic().0))
}

/// The runtime in which the environment was made; without one, the caller's.
#[derive(Clone)]
struct Home(Option<Handle>);

impl Home {
    fn handle(&self) -> Handle {
        self.0.clone().unwrap_or_else(Handle::current)
    }
}

/// Without a runtime of its own, the caller's timers are used.
struct MachineClock(Option<Arc<Timers>>);

impl MachineClock {
    fn new(home: &Home) -> MachineClock {
        MachineClock(home.0.as_ref().map(|home| Timers::new(home, monotonic)))
    }
}

fn monotonic() -> Instant {
    let t = clock_gettime(ClockId::Monotonic);
    Instant(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

impl ClockSource for MachineClock {
    fn now(&self) -> Instant {
        monotonic()
    }
    fn wall(&self) -> WallTime {
        let t = clock_gettime(ClockId::Realtime);
        let machine = t.tv_sec * 1_000_000_000 + t.tv_nsec;
        WallTime(machine.saturating_add(WALL_AHEAD_NS.load(Ordering::Relaxed)))
    }
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        match at.since(self.now()) {
            Duration::ZERO => Box::pin(std::future::ready(())),
            wait => match &self.0 {
                Some(timers) => Box::pin(timers.sleep_until(at)),
                None => Box::pin(tokio::time::sleep(wait)),
            },
        }
    }
}

/// Bits from the kernel's generator, fetched 512 bytes at a time: ids made from them never repeat, and cannot
/// be guessed.
struct KernelRng(Mutex<Vec<u8>>);

impl RngSource for KernelRng {
    fn next_u64(&self) -> u64 {
        let mut ahead = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.len() < 8 {
            ahead.resize(512, 0);
            fill_random(&mut ahead);
        }
        let rest = ahead.len() - 8;
        let bits = ahead[rest..].try_into().expect("8 bytes");
        ahead.truncate(rest);
        u64::from_le_bytes(bits)
    }
}

fn fill_random(mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => bytes = &mut bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("the kernel gives no random bits: {e}"),
        }
    }
}

struct MachineTasks {
    home: Home,
    threads: ThreadPool,
    kill_at: Option<Arc<KillAt>>,
    /// Threads of the runtime that are blocked.
    blocked: AtomicUsize,
    /// The one thread that all is done on, for [`Env::alone`].
    alone: Option<alone::Thread>,
}

impl TaskRunner for MachineTasks {
    fn spawn(&self, _name: &'static str, work: BoxFuture<'static, ()>) -> TaskHandle {
        TaskHandle(self.home.handle().spawn(work).abort_handle())
    }
    fn begin(&self, _name: &'static str, work: BoxFuture<'static, ()>) {
        match self.alone {
            None => Roaming::begin(self.home.handle(), work),
            Some(_) => drop(self.home.handle().spawn(work)),
        }
    }
    fn spawn_for_disk(&self, _name: &'static str, work: BoxFuture<'static, ()>) {
        match self.alone {
            None => Roaming::spawn(self.home.handle(), work),
            Some(_) => drop(self.home.handle().spawn(work)),
        }
    }
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()> {
        // The work reports its own end (`Tasks::blocking` waits for its result).
        self.threads.run(work);
        Box::pin(std::future::ready(()))
    }
    fn lane(&self, threads_max: usize) -> Lane {
        Lane(Arc::new(MachineLane(ThreadPool::new(threads_max))))
    }
    fn alone(&self, name: &'static str, of: &Env) -> Alone {
        match alone::start(name) {
            Ok((home, thread)) => {
                let home = Home(Some(home));
                let clock = Clock(Arc::new(MachineClock::new(&home)));
                let tasks = MachineTasks {
                    home,
                    threads: ThreadPool::new(1),
                    kill_at: self.kill_at.clone(),
                    blocked: AtomicUsize::new(0),
                    alone: Some(thread),
                };
                Alone { clock, tasks: Tasks(Arc::new(tasks)) }
            }
            // No thread can be started: the work is done with the other work.
            Err(_) => Alone { clock: of.clock.clone(), tasks: of.tasks.clone() },
        }
    }
    fn may_block(&self) -> bool {
        threads::may_block()
    }
    fn after(&self, work: Box<dyn FnOnce() + Send>) {
        if let Some(work) = threads::next_here(work) {
            self.threads.run(work);
        }
    }
    fn begin_block(&self) -> bool {
        if threads::may_block() {
            return true;
        }
        let workers = self.home.0.as_ref().map_or(0, |home| home.metrics().num_workers());
        let another = |blocked: usize| (blocked + 1 < workers).then_some(blocked + 1);
        self.blocked.fetch_update(Ordering::AcqRel, Ordering::Acquire, another).is_ok()
    }
    fn end_block(&self) {
        if !threads::may_block() {
            self.blocked.fetch_sub(1, Ordering::AcqRel);
        }
    }
    fn crash_point(&self, point: &'static str) {
        self.kill_at.iter().for_each(|order| order.crash_point(point));
    }
}

struct MachineLane(ThreadPool);

impl LaneRunner for MachineLane {
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()> {
        self.0.run(work);
        Box::pin(std::future::ready(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
    async fn all_but_one_thread_may_block() {
        let tasks = env().tasks;
        let one = tasks.block_here().expect("of three threads");
        let two = tasks.block_here().expect("two block");
        assert!(tasks.block_here().is_none(), "and one runs what others brought");
        drop(one);
        drop(tasks.block_here().expect("again"));
        drop(two);
    }

    #[tokio::test]
    async fn the_only_thread_never_blocks() {
        assert!(env().tasks.block_here().is_none());
    }

    #[tokio::test]
    async fn a_foreign_thread_may_spawn_and_sleep() {
        let env = env();
        let elsewhere = env.clone();
        let (tx, rx) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            let nap = elsewhere.clock.0.sleep_until(elsewhere.clock.now() + Duration::from_millis(1));
            elsewhere.tasks.spawn("from elsewhere", async move {
                nap.await;
                let _ = tx.send(7); // the test waits for it
            });
        });
        assert_eq!(env.clock.timeout(Duration::from_secs(20), rx).await, Ok(Ok(7)));
        thread.join().unwrap();
    }
}
