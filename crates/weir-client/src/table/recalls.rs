//! Recalls that this client carries out, as a mover.
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use weir_proto::InodeId;

/// The recalls that were assigned to this client, as a mover: the token epoch by file and offset.
#[derive(Default)]
pub struct Recalls {
    busy: Mutex<BTreeMap<(InodeId, u64), u32>>,
    /// One request for work at a time: it names the work in progress.
    pub asking: tokio::sync::Mutex<()>,
}

impl Recalls {
    pub fn busy(&self) -> MutexGuard<'_, BTreeMap<(InodeId, u64), u32>> {
        self.busy.lock().expect("no holder panics")
    }
}
