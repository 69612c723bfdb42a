//! The process's own statistics: meters, waits, tops and a history.
//!
//! Invariants: memory is fixed under any load; counting and a short wait take no shared lock and allocate
//! nothing; every figure is since the start of the process. Time comes from the caller: the simulator runs
//! this code. Knows nothing of files, messages or HTTP: objects are a kind and a number, peers and holders
//! are names.
#![forbid(unsafe_code)]

mod history;
mod lines;
mod meter;
mod top;
mod wait;

pub use history::{HOUR_POINTS, History, MINUTES_KEPT, SERIES_MAX};
pub use lines::{LeftOut, Lines};
pub use meter::{Counter, Family, Gauge, Histogram, Kind, Observed, Reading, Registry, bucket_bound};
pub use top::{Row, TOP_SECONDS, Tops, Work};
pub use wait::{EndedWait, KEPT_NS, Object, Reason, VISIBLE_NS, WaitGuard, WaitRecord, Waits};

use std::sync::{Arc, OnceLock};

/// Names and texts that a process shows of itself; rarely requested.
pub type Facts = Box<dyn Fn() -> Vec<(String, String)> + Send + Sync>;
/// Monotonic nanoseconds.
pub type Now = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The state that all handles of one process share. It holds no clock, so it outlives the one that reads it.
pub struct Shared {
    /// Differs between processes, so that one with two connections is counted once.
    pub process: u64,
    /// The name of the process; empty before it is known.
    pub name: OnceLock<String>,
    pub meters: Registry,
    pub waits: Arc<Waits>,
    pub tops: Tops,
    pub history: History,
    pub lines: Lines,
    /// Set by a program that has some.
    pub facts: OnceLock<Facts>,
}

impl Shared {
    pub fn new(process: u64) -> Arc<Shared> {
        Arc::new(Shared {
            process,
            name: OnceLock::new(),
            meters: Registry::default(),
            waits: Arc::new(Waits::new()),
            tops: Tops::default(),
            history: History::default(),
            lines: Lines::default(),
            facts: OnceLock::new(),
        })
    }
}

/// The watch of a process, with its clock. Cheap to clone.
#[derive(Clone)]
pub struct Watch {
    shared: Arc<Shared>,
    now: Now,
}

impl std::ops::Deref for Watch {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl Watch {
    pub fn new(shared: Arc<Shared>, now: Now) -> Watch {
        Watch { shared, now }
    }
    pub fn now_ns(&self) -> u64 {
        (self.now)()
    }
    /// A wait that begins now and ends when the guard is dropped.
    pub fn wait(&self, reason: Reason, object: Object) -> WaitGuard {
        self.wait_since(self.now_ns(), WaitRecord::new(reason, object))
    }
    /// A wait with all known fields that began at this time, for a caller that has just read the clock.
    pub fn wait_since(&self, since_ns: u64, record: WaitRecord) -> WaitGuard {
        WaitGuard::begin(self.shared.waits.clone(), self.now.clone(), since_ns, record)
    }
    pub fn counter(&self, name: &'static str, label: (&'static str, &str)) -> Counter {
        self.shared.meters.counter(name, label)
    }
    pub fn gauge(&self, name: &'static str, label: (&'static str, &str)) -> Gauge {
        self.shared.meters.gauge(name, label)
    }
    pub fn histogram(&self, name: &'static str, label: (&'static str, &str)) -> Histogram {
        self.shared.meters.histogram(name, label)
    }
    /// Whether a line of this kind is logged now, and how many like it were left out before it. For lines
    /// whose number follows from the number of requests.
    pub fn line(&self, kind: &'static str) -> Option<LeftOut> {
        self.shared.lines.admit(kind, self.now_ns())
    }
    /// Takes the samples that are due.
    pub fn sample(&self) {
        self.shared.history.sample(self.now_ns(), &self.shared.meters);
    }
    /// Accounts for work done by a request.
    pub fn account(&self, at_ns: u64, work: &Work<'_>) {
        self.shared.tops.add(at_ns, work);
    }
}
