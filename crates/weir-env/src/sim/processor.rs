//! A node's processor: when each of its tasks gets its turn, and how much time that takes.
//!
//! Each poll of a task, each call to the kernel and each byte that is copied takes time on one of the node's
//! cores. Tasks get their turns in the order in which they became ready. A lane of its own
//! ([`super::node::Here::alone`]) has a core of its own, as a thread beside others under a fair scheduler.
//!
//! Time is counted in *work*: nanoseconds of a processor at full speed. A slower one does less work in the
//! same time, so a change of speed leaves the queue as it is; only the moments of turns change.
//!
//! Invariant: a task whose turn comes within [`SLACK_NS`] runs at once. So an idle node sets no timer, and
//! costs a run nothing.
use super::config::ProcessorConfig;
use std::{collections::BTreeMap, task::Waker, time::Duration};

/// Less than the cost of three polls: much longer waits than this are the subject, and each wait is a timer.
const SLACK_NS: u64 = 15_000;
/// A turn that comes so late counts as late: as long as a time slice of Linux's scheduler.
const LATE_NS: u64 = 3_000_000;
const MILLION: u64 = 1_000_000;

/// When a waiting task gets its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    Now,
    /// In nanoseconds of the world.
    At(u64),
    /// Not before the processor continues.
    Stopped,
}

/// A task's place in the queue: the work after which its turn begins, and when it became ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    begins: u64,
    ready_ns: u64,
    core: Core,
}

/// Whose queue: of all cores, or of a lane's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Core {
    Shared(usize),
    Alone(&'static str),
}

/// The processor of one life of a node.
pub(super) struct Processor {
    config: ProcessorConfig,
    work: WorkClock,
    /// In millionths of full speed; kept while it is stopped.
    ppm: u64,
    /// The work after which each core is free.
    free: Vec<u64>,
    free_alone: BTreeMap<&'static str, u64>,
    /// The core that runs now, or ran last.
    running: Core,
    /// Tasks that wait for their turn, by number.
    waiting: BTreeMap<u64, Waker>,
    late: u64,
}

/// Maps the world's time to work.
#[derive(Clone, Copy)]
struct WorkClock {
    at_ns: u64,
    work_ns: u64,
    ppm: u64,
}

impl WorkClock {
    fn now(&self, now_ns: u64) -> u64 {
        let passed = u128::from(now_ns.saturating_sub(self.at_ns));
        self.work_ns + (passed * u128::from(self.ppm) / u128::from(MILLION)) as u64
    }
    /// The first moment with at least this much work; `None`: it is stopped.
    fn moment(&self, work_ns: u64) -> Option<u64> {
        let left = u128::from(work_ns.saturating_sub(self.work_ns)) * u128::from(MILLION);
        (self.ppm > 0).then(|| self.at_ns + left.div_ceil(u128::from(self.ppm)) as u64)
    }
    fn at_speed(&self, ppm: u64, now_ns: u64) -> WorkClock {
        WorkClock { at_ns: now_ns, work_ns: self.now(now_ns), ppm }
    }
}

impl Processor {
    pub(super) fn new(config: ProcessorConfig, now_ns: u64) -> Processor {
        Processor {
            config,
            work: WorkClock { at_ns: now_ns, work_ns: 0, ppm: config.speed_ppm },
            ppm: config.speed_ppm,
            free: vec![0; config.cores.max(1)],
            free_alone: BTreeMap::new(),
            running: Core::Shared(0),
            waiting: BTreeMap::new(),
            late: 0,
        }
    }

    /// A task became ready: its place behind all that did before, on the core that is free first.
    pub(super) fn queue(&mut self, now_ns: u64, alone: Option<&'static str>) -> Place {
        let now = self.work.now(now_ns);
        let core = match alone {
            Some(lane) => Core::Alone(lane),
            None => Core::Shared((0..self.free.len()).min_by_key(|n| self.free[*n]).unwrap_or(0)),
        };
        let free = self.free_of(core);
        let begins = now.max(*free);
        *free = begins;
        self.spend(core, self.config.poll);
        Place { begins, ready_ns: now_ns, core }
    }

    /// When the task with this place gets its turn. Until then `waker` is woken when the speed changes.
    pub(super) fn turn(&mut self, place: Place, now_ns: u64, id: u64, waker: &Waker) -> Turn {
        let turn = match self.work.moment(place.begins) {
            None => Turn::Stopped,
            Some(at_ns) if at_ns <= now_ns + SLACK_NS => Turn::Now,
            Some(at_ns) => Turn::At(at_ns),
        };
        if turn != Turn::Now {
            self.waiting.insert(id, waker.clone());
            return turn;
        }
        if now_ns > place.ready_ns {
            self.waiting.remove(&id);
            self.late += u64::from(now_ns - place.ready_ns > LATE_NS);
        }
        self.running = place.core;
        Turn::Now
    }

    /// The task ended before its turn.
    pub(super) fn forget(&mut self, id: u64) {
        self.waiting.remove(&id);
    }

    /// The task that runs now calls the kernel, which copies or sums up this number of bytes.
    pub(super) fn call(&mut self, bytes: usize) {
        let copied = bytes as u64 * 1_000_000_000 / self.config.bytes_per_s.max(1);
        self.spend(self.running, self.config.call + Duration::from_nanos(copied));
    }

    fn spend(&mut self, core: Core, cost: Duration) {
        *self.free_of(core) += cost.as_nanos() as u64;
    }

    fn free_of(&mut self, core: Core) -> &mut u64 {
        match core {
            Core::Shared(n) => &mut self.free[n],
            Core::Alone(lane) => self.free_alone.entry(lane).or_default(),
        }
    }

    /// Its speed from now on, in millionths of the configured one. Returns the tasks that look again when
    /// their turn is.
    pub(super) fn set_speed(&mut self, ppm: u64, now_ns: u64) -> Vec<Waker> {
        self.ppm = (u128::from(self.config.speed_ppm) * u128::from(ppm) / u128::from(MILLION)) as u64;
        self.ppm = self.ppm.max(1);
        self.go_on(now_ns)
    }
    /// No task gets a turn until [`Processor::go_on`].
    pub(super) fn stop(&mut self, now_ns: u64) {
        self.work = self.work.at_speed(0, now_ns);
    }
    pub(super) fn go_on(&mut self, now_ns: u64) -> Vec<Waker> {
        self.work = self.work.at_speed(self.ppm, now_ns);
        std::mem::take(&mut self.waiting).into_values().collect()
    }

    /// How many turns have come late.
    pub(super) fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL_NS: u64 = 5_000;

    fn processor(cores: usize) -> Processor {
        let poll = Duration::from_nanos(POLL_NS);
        let config = ProcessorConfig { cores, poll, ..ProcessorConfig::default() };
        Processor::new(config, 1_000)
    }
    fn turn(processor: &mut Processor, place: Place, now_ns: u64) -> Turn {
        processor.turn(place, now_ns, 1, Waker::noop())
    }

    #[test]
    fn tasks_get_their_turns_in_order_on_the_first_free_core() {
        let mut two = processor(2);
        let places: Vec<u64> = (0..6).map(|_| two.queue(1_000, None).begins).collect();
        assert_eq!(places, [0, 0, POLL_NS, POLL_NS, 2 * POLL_NS, 2 * POLL_NS]);
        assert_eq!(two.queue(1_000 + 100 * POLL_NS, None).begins, 100 * POLL_NS, "idle time is not saved");
    }

    #[test]
    fn a_lane_of_its_own_does_not_wait_behind_others() {
        let mut one = processor(1);
        (0..1_000).for_each(|_| _ = one.queue(1_000, None));
        let place = one.queue(1_000, Some("life"));
        assert_eq!(turn(&mut one, place, 1_000), Turn::Now);
        one.call(1_000_000);
        assert_eq!(one.queue(1_000, Some("life")).begins, POLL_NS + 4_000 + 1_000_000, "but behind itself");
        assert_eq!(one.queue(1_000, None).begins, 1_000 * POLL_NS, "and the others not behind it");
    }

    #[test]
    fn a_slower_processor_makes_the_same_queue_take_longer() {
        let mut one = processor(1);
        (0..100).for_each(|_| _ = one.queue(1_000, None));
        let place = one.queue(1_000, None);
        assert_eq!(turn(&mut one, place, 1_000), Turn::At(1_000 + 100 * POLL_NS));
        assert_eq!(one.set_speed(MILLION / 100, 1_000).len(), 1, "its turn is computed again");
        assert_eq!(turn(&mut one, place, 1_000), Turn::At(1_000 + 100 * 100 * POLL_NS));
        // Half of it is done when the processor is well again.
        let half_ns = 1_000 + 50 * 100 * POLL_NS;
        one.set_speed(MILLION, half_ns);
        assert_eq!(turn(&mut one, place, half_ns), Turn::At(half_ns + 50 * POLL_NS));
        one.stop(half_ns);
        assert_eq!(turn(&mut one, place, half_ns + 1_000_000_000), Turn::Stopped);
        one.go_on(half_ns + 1_000_000_000);
        assert_eq!(
            turn(&mut one, place, half_ns + 1_000_000_000),
            Turn::At(half_ns + 1_000_000_000 + 50 * POLL_NS)
        );
        assert_eq!(one.late(), 0);
        assert_eq!(turn(&mut one, place, half_ns + 2_000_000_000), Turn::Now);
        assert_eq!(one.late(), 1);
    }
}
