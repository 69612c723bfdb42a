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
use weir_proto::{Error, InodeId};

/// The longest duration of an operation: its patience, and a little for the work after the last wait.
const OPERATION_MAX: Duration = Duration::from_secs(35);
/// The additional wait for movers that die.
const RECALL_MAX: Duration = Duration::from_secs(120);
pub const DIRS: usize = 3;

pub struct Context {
    pub world: World,
    pub client_states: Arc<ClientStates>,
    pub marks: Marks,
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

/// An operation in flight; its drop ends it.
pub struct UnderWay<'w> {
    context: &'w Context,
    pub op: u64,
    me: usize,
    begun: Instant,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.context.marks.ends(self.op);
    }
}

impl UnderWay<'_> {
    /// It returned, successfully or not: checks its duration.
    pub fn check_time(&self, what: &str) {
        let took = self.context.world.now().since(self.begun);
        let excused = self.context.client_states.excuses_all(self.me);
        assert!(
            excused
                || took
                    <= OPERATION_MAX + if self.context.home.is_some() { RECALL_MAX } else { Duration::ZERO },
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
        UnderWay { context: self, op, me, begun: self.world.now() }
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

    /// An error of an operation without a client: only too many dead targets excuse it.
    pub fn complain_of_none(&self, what: String, e: &Error) {
        self.world.trace(&format!("{what} failed: {e}"));
        if self.client_states.excuses_any() {
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
