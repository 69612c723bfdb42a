//! The simulated world: many nodes in one thread, one seed, no real time.
//!
//! All of a node's environment is simulated here, in an order that the seed determines: two runs with the
//! same seed end with the same [`World::trace_hash`]. Time advances only when no task can run. Nodes can be
//! killed, lose power, be cut off, slowed, and given failing disks.
//!
//! All of it must run inside [`World::run`]. Knows nothing of the nodes' work.
//!
//! ```
//! use weir_env::sim::{SimConfig, World};
//! let world = World::new(1, SimConfig::default());
//! let node = world.node("a");
//! world.run(async move { node.clock.sleep(std::time::Duration::from_secs(3600)).await });
//! ```

mod config;
mod core;
mod disk;
mod disk_state;
mod net;
mod node;
mod pages;
mod processor;
mod rng;
mod view;

use self::{
    core::Core,
    disk::SimDisk,
    disk_state::DiskState,
    node::{Here, Node, NodeClock, NodeRng},
    processor::Processor,
    rng::SplitMix,
};
use crate::{
    BoxFuture, BufferPool, Clock, ClockSource, Disk, Env, Instant, Pressure, PressureSource, Rng, Tasks,
    WallTime,
};
pub use config::{ProcessorConfig, SimConfig};
pub use disk_state::{DiskCopy, DiskFaults};
use std::{
    future::poll_fn,
    io,
    path::Path,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

/// Idle buffer memory that each simulated node keeps.
const NODE_CACHE_BYTES: usize = 16 << 20;

/// A world of simulated nodes. Cheap to clone.
#[derive(Clone)]
pub struct World(Arc<Core>);

impl World {
    pub fn new(seed: u64, config: SimConfig) -> World {
        World(Core::new(seed, config))
    }

    /// Runs `work`, and every task of every node, until it ends; then other tasks are dropped. Panics when a
    /// task panics, when everything waits for ever, or after `time_max`; the message names the seed.
    #[allow(clippy::disallowed_methods)]
    pub fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let main_woken = Arc::new(AtomicBool::new(false));
        // The world's wakers refer to the runtime: it must not refer back.
        let (world, woken) = (Arc::downgrade(&self.0), main_woken.clone());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .on_thread_park(move || {
                // `work` can run, though no task can: time does not advance.
                if !woken.load(Ordering::Relaxed)
                    && let Some(world) = world.upgrade()
                {
                    world.advance();
                }
            })
            .build()
            .expect("a runtime without drivers needs nothing of the machine");
        runtime.block_on(async {
            let mut work = pin!(work);
            let done = poll_fn(|cx| {
                if let Some(reason) = self.0.poll_failure(cx) {
                    panic!("seed {}, at {:?}: {reason}", self.0.seed, self.now());
                }
                main_woken.store(false, Ordering::Relaxed);
                let waker = Waker::from(Arc::new(MainWaker(cx.waker().clone(), main_woken.clone())));
                work.as_mut().poll(&mut Context::from_waker(&waker))
            })
            .await;
            self.0.lock().end_trace();
            done
        })
    }

    /// The node's present process: starts it (boots it, restarts its process with the same disk) if it is
    /// down.
    pub fn node(&self, name: &str) -> Env {
        let index = self.index_or_add(name);
        let mut state = self.0.lock();
        let mut wakers = Vec::new();
        if !state.nodes[index].up {
            state.note_away(index);
            if !state.nodes[index].powered {
                // Back from a power cut: answers packets of old connections with resets.
                let at_ns = state.now_ns + self.0.config.latency.1.as_nanos() as u64;
                wakers = state.net.reset(index, None, at_ns);
            }
            let now_ns = state.now_ns;
            let node = &mut state.nodes[index];
            node.life += 1;
            (node.up, node.powered) = (true, true);
            let rng = SplitMix::new(self.0.seed, &format!("{name}, life {}", node.life));
            node.rng = Arc::new(NodeRng(Mutex::new(rng)));
            node.buffers = BufferPool::new(NODE_CACHE_BYTES);
            node.watch = weir_watch::Shared::new((index as u64 + 1) << 32 | node.life);
            node.processor = self.0.config.processor.map(|config| {
                let mut processor = Processor::new(config, now_ns);
                drop(processor.set_speed(node.speed_ppm, now_ns)); // nothing waits yet
                processor
            });
            let life = node.life;
            state.trace("start", &[index as u64, life]);
        }
        let node = &state.nodes[index];
        let here = Here { core: self.0.clone(), node: index, life: node.life, lane: None };
        let pressed = here.clone();
        // A new one for each call: an `Env` stored here would keep the world alive for ever.
        let env = Env {
            clock: Clock(Arc::new(here.clone())),
            rng: Rng(node.rng.clone()),
            disk: Arc::new(SimDisk { here: Some(here.clone()), state: node.disk.clone() }),
            net: Arc::new(here.clone()),
            tasks: Tasks(Arc::new(here.clone())),
            buffers: node.buffers.clone(),
            watch: weir_watch::Watch::new(node.watch.clone(), Arc::new(move || here.now().0)),
            pressure: PressureSource(Arc::new(move || pressed.core.lock().nodes[index].pressure)),
            is_simulated: true,
        };
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        env
    }

    /// The world's own clock, which no node sees.
    pub fn clock(&self) -> Clock {
        Clock(Arc::new(WorldClock(self.0.clone())))
    }
    pub fn now(&self) -> Instant {
        Instant(self.0.lock().now_ns)
    }
    /// Waits until `d` of the world's time has passed.
    pub async fn sleep(&self, d: Duration) {
        self.0.sleep(d).await
    }
    /// A seeded stream for the test's own choices; the same `name` gives the same stream.
    pub fn rng(&self, name: &str) -> Rng {
        let rng = SplitMix::new(self.0.seed, &format!("test: {name}"));
        Rng(Arc::new(NodeRng(Mutex::new(rng))))
    }

    /// Ends the node's process as by SIGKILL: tasks end, connections are reset, the disk keeps all writes.
    pub fn kill(&self, name: &str) {
        self.end_life(name, true);
    }

    /// Cuts the node's power: tasks end, peers receive nothing, and the disk loses (all, some or parts of)
    /// unsynced writes and names. The machine stays off until [`World::node`].
    pub fn power_cut(&self, name: &str) {
        let index = self.end_life(name, false);
        let disk = self.0.lock().nodes[index].disk.clone();
        disk.lock().unwrap_or_else(PoisonError::into_inner).power_cut();
    }

    fn end_life(&self, name: &str, powered: bool) -> usize {
        let index = self.index_or_add(name);
        self.0.end_life(index, powered);
        index
    }

    /// Ends the node's process when it reaches a point (see [`Tasks::crash_point`]) for the `nth` time from
    /// now on, 1 being the next time. Cleared when the process ends otherwise.
    pub fn kill_at(&self, name: &str, point: &'static str, nth: u32) {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].kill_at = Some((point, nth.saturating_sub(1)));
    }
    /// Cancels [`World::kill_at`], if it has not taken effect.
    pub fn spare(&self, name: &str) {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].kill_at = None;
    }

    /// Stops the node's process as by SIGSTOP: no task runs, its connections stay, its clock continues.
    pub fn pause(&self, name: &str) {
        let index = self.index_or_add(name);
        let mut state = self.0.lock();
        let now_ns = state.now_ns;
        let node = &mut state.nodes[index];
        node.paused = node.up;
        if let Some(processor) = node.processor.as_mut().filter(|_| node.up) {
            processor.stop(now_ns);
        }
        state.trace("pause", &[index as u64]);
    }
    /// Ends a pause.
    pub fn resume(&self, name: &str) {
        let index = self.index_or_add(name);
        let mut state = self.0.lock();
        state.note_away(index);
        let now_ns = state.now_ns;
        let node = &mut state.nodes[index];
        node.paused = false;
        let held = std::mem::take(&mut node.held);
        let waiting = node.processor.as_mut().map(|processor| processor.go_on(now_ns));
        state.trace("resume", &[index as u64]);
        drop(state);
        held.into_values().chain(waiting.into_iter().flatten()).for_each(Waker::wake);
    }

    /// Whether the node's process runs.
    pub fn is_up(&self, name: &str) -> bool {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].up
    }

    /// Nothing arrives between `a` and `b`, in both directions; bytes in flight are held until
    /// [`World::heal`].
    pub fn partition(&self, a: &str, b: &str) {
        self.partition_one_way(a, b);
        self.partition_one_way(b, a);
    }
    /// Nothing arrives from `from` at `to`.
    pub fn partition_one_way(&self, from: &str, to: &str) {
        self.set_blocked(from, to, true);
    }
    pub fn heal(&self, a: &str, b: &str) {
        self.set_blocked(a, b, false);
        self.set_blocked(b, a, false);
    }
    /// Ends all partitions and slow links.
    pub fn heal_all(&self) {
        let mut state = self.0.lock();
        (0..state.nodes.len()).for_each(|index| state.note_away(index));
        let wakers = state.net.heal_all();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
    /// Adds `extra` to the latency from `from` to `to`.
    pub fn slow_link(&self, from: &str, to: &str, extra: Duration) {
        let (from, to) = (self.index_or_add(from), self.index_or_add(to));
        let mut state = self.0.lock();
        [from, to].into_iter().for_each(|end| state.note_away(end));
        state.net.set_slow(from, to, extra);
    }
    /// Breaks every connection between two nodes.
    pub fn reset_connections(&self, a: &str, b: &str) {
        let (a, b) = (self.index_or_add(a), self.index_or_add(b));
        let mut state = self.0.lock();
        let now_ns = state.now_ns;
        state.trace("reset", &[a as u64, b as u64]);
        let wakers = state.net.reset(a, Some(b), now_ns);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Breaks every connection from `from` to `to`, asymmetrically: `from` learns it at once and may retry
    /// over a new connection, while its earlier bytes arrive at `to` only after `delay`. So messages arrive
    /// twice and late.
    pub fn lose_connections(&self, from: &str, to: &str, delay: Duration) {
        let (from, to) = (self.index_or_add(from), self.index_or_add(to));
        let mut state = self.0.lock();
        let now_ns = state.now_ns;
        state.trace("lose", &[from as u64, to as u64, delay.as_nanos() as u64]);
        let wakers = state.net.lose(from, to, now_ns, delay.as_nanos() as u64);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The node's clock runs `ppm` millionths fast (or slow) from now on.
    pub fn set_clock_drift(&self, name: &str, ppm: i64) {
        assert!(ppm > -1_000_000, "a clock runs forward");
        let index = self.index_or_add(name);
        let mut state = self.0.lock();
        let now_ns = state.now_ns;
        let clock = &mut state.nodes[index].clock;
        *clock = clock.drifting(now_ns, ppm);
    }
    /// The node's wall clock is wrong by `offset_ns`.
    pub fn set_wall_offset(&self, name: &str, offset_ns: i64) {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].clock.wall_offset_ns = offset_ns;
    }

    /// The pressure that the node's machine reports; `None`, as at first: it measures none.
    pub fn set_pressure(&self, name: &str, pressure: Option<Pressure>) {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].pressure = pressure;
    }

    pub fn set_disk_faults(&self, name: &str, faults: DiskFaults) {
        let index = self.index_or_add(name);
        self.0.lock().note_away(index);
        self.with_disk(name, |disk| disk.faults = faults);
    }
    /// Number of writes and syncs of a node's disk that have failed with EIO.
    pub fn disk_errors(&self, name: &str) -> u64 {
        self.with_disk(name, |disk| disk.failed)
    }
    /// Number of faults of a node's disk, by [`DiskFaults`] or lack of space, that have taken effect.
    pub fn disk_hits(&self, name: &str) -> u64 {
        self.with_disk(name, |disk| disk.hits)
    }
    pub fn set_disk_capacity(&self, name: &str, bytes: u64) {
        let index = self.index_or_add(name);
        self.0.lock().note_away(index);
        self.with_disk(name, |disk| disk.set_capacity(bytes));
    }
    /// Silently flips one bit on a node's disk.
    pub fn flip_bit(&self, name: &str, path: &Path, offset: u64, bit: u8) -> io::Result<()> {
        self.with_disk(name, |disk| disk.flip_bit(path, offset, bit))
    }
    /// Gives the node, which is down, an empty disk.
    pub fn replace_disk(&self, name: &str) {
        assert!(!self.is_up(name), "a disk is replaced while its machine is off");
        self.with_disk(name, DiskState::replace);
    }
    pub fn copy_disk(&self, name: &str) -> DiskCopy {
        assert!(!self.is_up(name), "a disk is copied while its machine is off");
        self.with_disk(name, |disk| disk.copy())
    }
    /// Restores the disk from a copy.
    pub fn put_disk_back(&self, name: &str, copy: &DiskCopy) {
        assert!(!self.is_up(name), "a disk is put back while its machine is off");
        self.with_disk(name, |disk| disk.put_back(copy));
    }
    /// A node's disk as seen by the test, whether the node is up or not.
    pub fn disk(&self, name: &str) -> Arc<dyn Disk> {
        let index = self.index_or_add(name);
        Arc::new(SimDisk { here: None, state: self.0.lock().nodes[index].disk.clone() })
    }

    /// Folds an event of the test's own into the trace.
    pub fn trace(&self, event: &str) {
        self.0.lock().trace(event, &[]);
    }
    /// Hash of all events so far: equal for equal seeds.
    pub fn trace_hash(&self) -> u64 {
        self.0.lock().trace_hash()
    }
    /// The events as text, if [`SimConfig::log`] is set: for finding the first difference of two runs.
    pub fn trace_lines(&self) -> Vec<String> {
        self.0.lock().trace_lines()
    }

    /// Returns a check whether this world was dropped completely: otherwise there is a leak.
    pub fn ended(&self) -> impl Fn() -> bool + use<> {
        let core = Arc::downgrade(&self.0);
        move || core.strong_count() == 0
    }

    fn with_disk<T>(&self, name: &str, change: impl FnOnce(&mut DiskState) -> T) -> T {
        let index = self.index_or_add(name);
        let disk = self.0.lock().nodes[index].disk.clone();
        change(&mut disk.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn set_blocked(&self, from: &str, to: &str, blocked: bool) {
        let (from, to) = (self.index_or_add(from), self.index_or_add(to));
        let mut state = self.0.lock();
        [from, to].into_iter().for_each(|end| state.note_away(end));
        state.trace("block", &[from as u64, to as u64, u64::from(blocked)]);
        let wakers = state.net.set_blocked(from, to, blocked);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn index_or_add(&self, name: &str) -> usize {
        let mut state = self.0.lock();
        if let Some(index) = state.nodes.iter().position(|n| n.name == name) {
            return index;
        }
        let index = state.nodes.len();
        let rng = SplitMix::new(self.0.seed, &format!("disk of {name}"));
        let disk = DiskState::new(rng, self.0.config.disk_capacity_bytes);
        let clock = NodeClock::starting(state.now_ns, index);
        state.nodes.push(Node {
            name: name.into(),
            life: 0,
            up: false,
            powered: true,
            rng: Arc::new(NodeRng(Mutex::new(SplitMix::new(self.0.seed, name)))),
            buffers: BufferPool::new(NODE_CACHE_BYTES),
            watch: weir_watch::Shared::new(0),
            disk: Arc::new(Mutex::new(disk)),
            tasks: Default::default(),
            clock,
            pressure: None,
            processor: None,
            speed_ppm: Node::FULL_SPEED_PPM,
            away_ns: None,
            paused: false,
            held: Default::default(),
            kill_at: None,
        });
        index
    }
}

impl Core {
    fn end_life(&self, index: usize, powered: bool) {
        let mut state = self.lock();
        let now_ns = state.now_ns;
        let node = &mut state.nodes[index];
        (node.up, node.powered, node.kill_at) = (false, powered, None);
        if !powered {
            node.clock = node.clock.rebooted(now_ns);
        }
        node.processor = None;
        let tasks = std::mem::take(&mut node.tasks);
        let mut wakers: Vec<Waker> = std::mem::take(&mut node.held).into_values().collect();
        node.paused = false;
        let disk = node.disk.clone();
        state.net.close_listeners(index);
        if powered {
            let at_ns = now_ns + self.config.latency.0.as_nanos() as u64;
            wakers.extend(state.net.reset(index, None, at_ns));
        }
        state.trace(if powered { "kill" } else { "power cut" }, &[index as u64]);
        drop(state);
        disk.lock().unwrap_or_else(PoisonError::into_inner).unlock_all();
        tasks.into_values().for_each(|task| task.abort());
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Records that the main future can run.
struct MainWaker(Waker, Arc<AtomicBool>);

impl Wake for MainWaker {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Relaxed);
        self.0.wake_by_ref();
    }
}

struct WorldClock(Arc<Core>);

impl ClockSource for WorldClock {
    fn now(&self) -> Instant {
        Instant(self.0.lock().now_ns)
    }
    fn wall(&self) -> WallTime {
        WallTime(self.0.lock().now_ns as i64)
    }
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        Box::pin(self.0.sleep_until_ns(at.0))
    }
}
