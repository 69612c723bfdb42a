//! What all workloads of a run share: the world, who is excused, what was found, and the operations under
//! way.
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

/// What an operation may take: its patience, and a little for the work after the last wait.
const OPERATION_MAX: Duration = Duration::from_secs(35);
/// What the wait for movers that die may add to it.
const RECALL_MAX: Duration = Duration::from_secs(120);
pub const DIRS: usize = 3;

pub struct Context {
    pub world: World,
    pub client_states: Arc<ClientStates>,
    pub marks: Marks,
    /// Where files go that are evicted.
    pub home: Option<Arc<Home>>,
    pub dirs: Vec<InodeId>,
    pub pause_us_max: u64,
    found: Mutex<Found>,
    /// Topmost directories of volumes that are made and deleted, by their names in that of the volume around
    /// them.
    volumes: Mutex<BTreeMap<String, InodeId>>,
}

#[derive(Default)]
pub struct Found {
    pub operations: u64,
    pub errors: Vec<String>,
    pub excused: u64,
    /// Names whose files were given up: they may exist or not.
    pub uncertain: BTreeSet<(usize, String)>,
    /// Files that have lost their names; some have them open still.
    pub nameless: Vec<TurnFile>,
}

/// An operation under way; its drop ends it.
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
    /// It ended by itself, well or not.
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

    /// What nobody who can be cut off did: nothing excuses it but too many deaths.
    pub fn complain_of_nobody(&self, what: String, e: &Error) {
        self.world.trace(&format!("{what} failed: {e}"));
        if self.client_states.excuses_anybody() {
            self.found().excused += 1;
            return;
        }
        self.found().errors.push(format!("{:?} {what}: {e:?}", self.world.now()));
    }

    pub fn log(&self, op: u64, what: impl Display) {
        tracing::trace!("{:?} operation {op}: {what}", self.world.now());
        self.world.trace(&format!("operation {op}: {what}"));
    }

    /// Whether somebody must look before the bytes are known: a client may have lost some, or may lose them
    /// for want of space when another one needs the file.
    pub fn is_doubtful(&self, model: &FileModel) -> bool {
        model.is_doubtful(|c| self.client_states.cuts(c))
            || (self.client_states.is_full() && model.is_pending())
    }

    pub async fn rest(&self, rng: &Rng) {
        self.world.sleep(Duration::from_micros(rng.below(rng.below(self.pause_us_max) + 1))).await;
    }
}
