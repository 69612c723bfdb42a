//! A simulated node: its clock, its randomness and the tasks of its present process.
//!
//! A process (a *life* of the node) ends with a kill or a power cut. Leftovers of an ended one (a destructor
//! that still runs) can no longer access disk or network, nor start tasks: a dead process writes nothing.

use super::{
    core::{Core, State, TimerKey},
    disk_state::DiskState,
    processor::{Place, Processor, Turn},
    rng::SplitMix,
};
use crate::{
    BoxFuture, BufferPool, Clock, ClockSource, Env, Instant, Pressure, RngSource, TaskHandle, Tasks,
    WallTime,
    tasks::{Alone, Lane, LaneRunner, TaskRunner},
};
use std::{
    collections::BTreeMap,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::task::AbortHandle;

/// Interval of checks whether a disk still hangs.
const STALL_POLL: Duration = Duration::from_millis(50);
/// 2026-01-01 00:00 UTC, when every run begins.
const WALL_START_NS: i64 = 1_767_225_600_000_000_000;

pub(super) struct Node {
    pub(super) name: String,
    /// Counts lives; 0 is before the first.
    pub(super) life: u64,
    /// A process runs.
    pub(super) up: bool,
    /// The machine answers (with a refusal if no process runs).
    pub(super) powered: bool,
    /// Randomness of the present life.
    pub(super) rng: Arc<NodeRng>,
    pub(super) buffers: BufferPool,
    pub(super) watch: Arc<weir_watch::Shared>,
    pub(super) disk: Arc<Mutex<DiskState>>,
    pub(super) tasks: BTreeMap<u64, AbortHandle>,
    pub(super) clock: NodeClock,
    /// As set by the test.
    pub(super) pressure: Option<Pressure>,
    pub(super) processor: Option<Processor>,
    /// Of the processor, in millionths of the configured speed; a restart does not change it.
    pub(super) speed_ppm: u64,
    /// See [`super::World::last_away`].
    pub(super) away_ns: Option<u64>,
    /// Stopped, as by SIGSTOP: no task runs.
    pub(super) paused: bool,
    /// Tasks that would have run meanwhile, in order.
    pub(super) held: BTreeMap<u64, Waker>,
    /// The crash point at which this life ends, and how often the node passes it before.
    pub(super) kill_at: Option<(&'static str, u32)>,
}

impl Node {
    /// The task that runs now calls the kernel, with this number of bytes.
    pub(super) fn call(&mut self, bytes: usize) {
        if let Some(processor) = &mut self.processor {
            processor.call(bytes);
        }
    }
}

/// One life of one node: all simulated interfaces are bound to it.
#[derive(Clone)]
pub(super) struct Here {
    pub(super) core: Arc<Core>,
    pub(super) node: usize,
    pub(super) life: u64,
    /// The thread of its own ([`Env::alone`]) to which the tasks that it starts belong: a load of the node's
    /// processor does not delay them.
    pub(super) lane: Option<&'static str>,
}

impl Here {
    /// Tasks that are started here belong to this life of this node, but do not wait behind its others for
    /// the processor: they run as on a thread of their own.
    pub(super) fn alone(&self, lane: &'static str) -> Here {
        Here { lane: Some(lane), ..self.clone() }
    }
    pub(super) fn lives_in(&self, state: &State) -> bool {
        let node = &state.nodes[self.node];
        node.up && node.life == self.life
    }
    pub(super) fn check_alive(&self) -> io::Result<()> {
        if self.lives_in(&self.core.lock()) { Ok(()) } else { Err(dead()) }
    }
    /// The node is paused: the task `id` is woken when it resumes.
    fn holds_back(&self, id: u64, cx: &Context<'_>) -> bool {
        let mut state = self.core.lock();
        let node = &mut state.nodes[self.node];
        let held = node.paused && node.life == self.life;
        if held {
            node.held.insert(id, cx.waker().clone());
        }
        held
    }
    /// The task `id` waits for its turn on the processor, and is woken then.
    fn waits_for_turn(
        &self,
        id: u64,
        place: &mut Option<Place>,
        timer: &mut Option<TimerKey>,
        cx: &Context<'_>,
    ) -> bool {
        let mut guard = self.core.lock();
        let state = &mut *guard;
        let node = &mut state.nodes[self.node];
        let Some(processor) = node.processor.as_mut().filter(|_| node.life == self.life) else {
            return false;
        };
        let own = *place.get_or_insert_with(|| processor.queue(state.now_ns, self.lane));
        match processor.turn(own, state.now_ns, id, cx.waker()) {
            Turn::Now => {
                *place = None;
                state.timers.clear(timer);
                false
            }
            Turn::At(at_ns) => {
                state.timers.set(timer, at_ns, cx.waker());
                true
            }
            Turn::Stopped => {
                state.timers.clear(timer);
                true
            }
        }
    }
    pub(super) fn trace(&self, event: &str, numbers: &[u64]) {
        self.core.lock().trace(event, numbers);
    }
}

pub(super) fn dead() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "this simulated process was killed")
}

/// Maps the world's time to the node's: a rate, an arbitrary start, and a wall clock that may be wrong.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeClock {
    world_ns: u64,
    node_ns: u64,
    drift_ppm: i64,
    pub(super) wall_offset_ns: i64,
}

impl NodeClock {
    /// Every machine's monotonic clock starts at another value, so that an instant sent to another node is
    /// detected.
    pub(super) fn starting(world_ns: u64, index: usize) -> NodeClock {
        let node_ns = 1_000_000_000_000 * (index as u64 + 1);
        NodeClock { world_ns, node_ns, drift_ppm: 0, wall_offset_ns: 0 }
    }
    pub(super) fn rebooted(self, world_ns: u64) -> NodeClock {
        NodeClock { world_ns, node_ns: 10_000_000_000, ..self }
    }
    pub(super) fn drifting(self, world_ns: u64, drift_ppm: i64) -> NodeClock {
        NodeClock { world_ns, node_ns: self.now_ns(world_ns), drift_ppm, ..self }
    }
    fn now_ns(&self, world_ns: u64) -> u64 {
        let passed = i128::from(world_ns - self.world_ns);
        let passed = passed + passed * i128::from(self.drift_ppm) / 1_000_000;
        self.node_ns + passed as u64
    }
    /// World time that passes while this clock advances by `node_ns`, rounded up.
    fn world_wait_ns(&self, node_ns: u64) -> u64 {
        (u128::from(node_ns) * 1_000_000).div_ceil((1_000_000 + self.drift_ppm) as u128) as u64
    }
}

impl ClockSource for Here {
    fn now(&self) -> Instant {
        let state = self.core.lock();
        Instant(state.nodes[self.node].clock.now_ns(state.now_ns))
    }
    fn wall(&self) -> WallTime {
        let state = self.core.lock();
        WallTime(WALL_START_NS + state.now_ns as i64 + state.nodes[self.node].clock.wall_offset_ns)
    }
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        let here = self.clone();
        Box::pin(async move {
            loop {
                let left = at.since(here.now()).as_nanos() as u64;
                if left == 0 {
                    return;
                }
                let wait_ns = here.core.lock().nodes[here.node].clock.world_wait_ns(left);
                let at_ns = here.core.lock().now_ns.saturating_add(wait_ns);
                here.core.sleep_until_ns(at_ns).await;
            }
        })
    }
}

impl LaneRunner for Here {
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()> {
        TaskRunner::blocking(self, work)
    }
}

/// A seeded stream of one life of one node.
pub(super) struct NodeRng(pub(super) Mutex<SplitMix>);

impl RngSource for NodeRng {
    fn next_u64(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

impl TaskRunner for Here {
    fn spawn(&self, name: &'static str, work: BoxFuture<'static, ()>) -> TaskHandle {
        let mut state = self.core.lock();
        if !self.lives_in(&state) {
            drop(state); // dropping `work` may run code that takes this lock
            drop(work);
            return TaskHandle(start(async {}));
        }
        let id = state.next_id();
        let guarded = Guarded { here: self.clone(), id, name, work, place: None, timer: None };
        let handle = start(guarded);
        state.nodes[self.node].tasks.insert(id, handle.clone());
        TaskHandle(handle)
    }

    /// In place, after a delay that stands for the disk and both thread switches.
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()> {
        let config = self.core.config;
        let (delay, disk) = {
            let mut state = self.core.lock();
            let disk = state.nodes[self.node].disk.clone();
            let slow = disk.lock().unwrap_or_else(PoisonError::into_inner).faults.delay;
            (state.rng.duration(config.disk_delay) + slow, disk)
        };
        let (tx, rx) = tokio::sync::oneshot::channel::<()>();
        let here = self.clone();
        self.spawn(
            "blocking",
            Box::pin(async move {
                here.core.sleep(delay).await;
                while disk.lock().unwrap_or_else(PoisonError::into_inner).faults.hangs {
                    here.core.sleep(STALL_POLL).await;
                }
                work();
                let _ = tx.send(()); // the caller may have given up: the work has run to its end
            }),
        );
        Box::pin(async move {
            if rx.await.is_err() {
                std::future::pending::<()>().await // killed: the caller is dead too, or must get no result
            }
        })
    }

    /// Nothing hangs here that would need separate threads.
    fn lane(&self, _threads_max: usize) -> Lane {
        Lane(Arc::new(self.clone()))
    }

    fn alone(&self, name: &'static str, of: &Env) -> Alone {
        let tasks = Tasks(Arc::new(Here { lane: Some(name), ..self.clone() }));
        Alone { clock: Clock(of.clock.0.clone()), tasks }
    }

    /// In every other life of a node, so that both paths are run; not on a disk that is slow or hangs, and
    /// not on the one thread of [`Env::alone`].
    fn begin_block(&self) -> bool {
        let disk = self.core.lock().nodes[self.node].disk.clone();
        let is_well = {
            let faults = &disk.lock().unwrap_or_else(PoisonError::into_inner).faults;
            !faults.hangs && faults.delay.is_zero()
        };
        self.lane.is_none() && is_well && (self.node as u64 + self.life) % 2 == 1
    }
    fn end_block(&self) {}

    /// A killed task continues to its next await, but nothing that it does until then reaches disk or
    /// network.
    fn crash_point(&self, point: &'static str) {
        let mut state = self.core.lock();
        let node = &mut state.nodes[self.node];
        let Some((at, left)) = &mut node.kill_at else { return };
        if *at != point || !node.up || node.life != self.life {
            return;
        }
        match left {
            0 => {
                drop(state);
                self.core.end_life(self.node, true);
            }
            left => *left -= 1,
        }
    }
}

#[allow(clippy::disallowed_methods)] // the one place where simulated tasks are started
fn start(work: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
    tokio::spawn(work).abort_handle()
}

/// A task that is removed from the node's list at its end, and whose panic ends the run.
struct Guarded {
    here: Here,
    id: u64,
    name: &'static str,
    work: BoxFuture<'static, ()>,
    /// While it waits for its turn on the processor.
    place: Option<Place>,
    timer: Option<TimerKey>,
}

impl Future for Guarded {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.here.holds_back(this.id, cx)
            || this.here.waits_for_turn(this.id, &mut this.place, &mut this.timer, cx)
        {
            return Poll::Pending;
        }
        catch_unwind(AssertUnwindSafe(|| this.work.as_mut().poll(cx))).unwrap_or_else(|panic| {
            let panic_text = panic.downcast_ref::<String>().map(String::as_str);
            let panic_text =
                panic_text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no text)");
            let node = this.here.core.lock().nodes[this.here.node].name.clone();
            this.here.core.fail(format!("task {:?} of node {node:?} panicked: {panic_text}", this.name));
            Poll::Ready(())
        })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let mut state = self.here.core.lock();
        let node = &mut state.nodes[self.here.node];
        node.tasks.remove(&self.id);
        if let (Some(processor), Some(_)) = (&mut node.processor, self.place) {
            processor.forget(self.id);
        }
        state.timers.clear(&mut self.timer);
    }
}
