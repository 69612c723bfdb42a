//! State shared by all workloads of a run: the world, the clients' excuses, the findings, and the operations
//! in flight.
//!
//! An error that nothing excuses breaks a promise.

use crate::client_states::ClientStates;
use crate::home::Home;
use crate::marks::Marks;
use crate::model::FileModel;
use crate::turn_file::TurnFile;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use weir_env::{Instant, Rng, sim::World};
use weir_proto::{Error, ErrorKind, InodeId};

/// The longest duration of an operation: its patience, and a little for the work after the last wait.
const OPERATION_MAX: Duration = Duration::from_secs(35);
/// The additional wait for movers that die.
const RECALL_MAX: Duration = Duration::from_secs(120);
pub const DIRS: usize = 3;

pub struct Context {
    pub world: World,
    pub client_states: Arc<ClientStates>,
    pub marks: Marks,
    pub load: Load,
    /// The home to which files are evicted.
    pub home: Option<Arc<Home>>,
    pub dirs: Vec<InodeId>,
    pub pause_us_max: u64,
    found: Mutex<Found>,
    /// Root directories of volumes that are made and deleted, by their names in the root volume's root
    /// directory.
    volumes: Mutex<BTreeMap<String, InodeId>>,
}

#[derive(Default)]
pub struct Found {
    pub operations: u64,
    pub errors: Vec<String>,
    pub excused: u64,
    /// Names of files with unknown outcome: they may exist or not.
    pub uncertain: BTreeSet<(usize, String)>,
    /// Files without a name; some clients still have them open.
    pub nameless: Vec<TurnFile>,
}

/// For how long nodes have starved or bursts have lasted.
#[derive(Default)]
pub struct Load(Mutex<LoadTime>);

#[derive(Default)]
struct LoadTime {
    under_way: u32,
    since: Instant,
    earlier: Duration,
}

impl Load {
    fn state(&self) -> MutexGuard<'_, LoadTime> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn begins(&self, now: Instant) {
        let mut state = self.state();
        if state.under_way == 0 {
            state.since = now;
        }
        state.under_way += 1;
    }
    pub fn ends(&self, now: Instant) {
        let mut state = self.state();
        state.under_way -= 1;
        if state.under_way == 0 {
            let begun = state.since;
            state.earlier += now.since(begun);
        }
    }
    pub fn so_far(&self, now: Instant) -> Duration {
        let state = self.state();
        state.earlier + if state.under_way > 0 { now.since(state.since) } else { Duration::ZERO }
    }
}

/// An operation in flight; its drop ends it.
pub struct UnderWay<'w> {
    context: &'w Context,
    pub op: u64,
    me: usize,
    begun: Instant,
    /// Of the run so far, when it began.
    load: Duration,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.context.marks.ends(self.op);
    }
}

impl UnderWay<'_> {
    /// It returned, successfully or not: checks its duration.
    pub fn check_time(&self, what: &str) {
        let now = self.context.world.now();
        let took = now.since(self.begun);
        let excused = self.context.client_states.excuses_all(self.me);
        let recall = if self.context.home.is_some() { RECALL_MAX } else { Duration::ZERO };
        // What queued up during a load is served after it.
        let load = 2 * (self.context.load.so_far(now) - self.load);
        assert!(
            excused || took <= OPERATION_MAX + recall + load,
            "operation {}, c{}: {what} took {took:?}",
            self.op,
            self.me
        );
    }
}

impl Context {
    pub fn new(
        world: &World,
        client_states: &Arc<ClientStates>,
        home: Option<Arc<Home>>,
        dirs: Vec<InodeId>,
        pause_us_max: u64,
    ) -> Context {
        Context {
            world: world.clone(),
            client_states: client_states.clone(),
            marks: Marks::default(),
            load: Load::default(),
            home,
            dirs,
            pause_us_max,
            found: Mutex::default(),
            volumes: Mutex::default(),
        }
    }

    pub fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn volumes(&self) -> MutexGuard<'_, BTreeMap<String, InodeId>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin(&self, me: usize, operation: &'static str) -> UnderWay<'_> {
        let op = {
            let mut found = self.found();
            found.operations += 1;
            found.operations
        };
        self.marks.begins(op, operation);
        let begun = self.world.now();
        UnderWay { context: self, op, me, begun, load: self.load.so_far(begun) }
    }

    /// An operation of `me` failed: broken, unless something excuses it.
    pub fn complain(&self, me: usize, is_excused: bool, what: impl Display, e: &Error) {
        self.world.trace(&format!("{what} failed, excused {is_excused}: {e}"));
        if is_excused || self.client_states.excuses(me, e) {
            self.found().excused += 1;
        } else {
            self.found().errors.push(format!("{:?} {what}: {e:?}", self.world.now()));
        }
    }

    /// An error of an operation without a client: only too many dead targets, or a full disk, excuse it.
    pub fn complain_of_none(&self, what: String, e: &Error) {
        self.world.trace(&format!("{what} failed: {e}"));
        let lacks_space = e.kind == ErrorKind::NoSpace && self.client_states.is_full();
        if lacks_space || self.client_states.excuses_any() {
            self.found().excused += 1;
            return;
        }
        self.found().errors.push(format!("{:?} {what}: {e:?}", self.world.now()));
    }

    pub fn log(&self, op: u64, what: impl Display) {
        tracing::trace!("{:?} operation {op}: {what}", self.world.now());
        self.world.trace(&format!("operation {op}: {what}"));
    }

    /// Whether the content must be read before it is known: a client may have lost bytes, or may lose them
    /// for lack of space when another one needs the file.
    pub fn is_doubtful(&self, model: &FileModel) -> bool {
        model.is_doubtful(|c| self.client_states.cuts(c))
            || (self.client_states.is_full() && model.is_pending())
    }

    pub async fn rest(&self, rng: &Rng) {
        self.world.sleep(Duration::from_micros(rng.below(rng.below(self.pause_us_max) + 1))).await;
    }
}
