//! Directories of clones that operations wait for.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use tokio::sync::Notify;
use weir_env::Instant;
use weir_proto::{InodeId, SessionId};

/// Directories that operations wait for, and failures.
#[derive(Default)]
pub struct Clones {
    pub wanted: Mutex<BTreeSet<InodeId>>,
    pub failed: Mutex<BTreeMap<InodeId, (Instant, String)>>,
    pub asked: Mutex<Asked>,
    pub call: Notify,
}

/// The client that was asked last to recover a dead writer's leftovers, and whether it is working on it.
#[derive(Clone, Copy, Default)]
pub struct Asked {
    pub last: SessionId,
    pub under_way: bool,
}
