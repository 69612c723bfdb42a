//! What this client brings back from home, as a mover.
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use weir_proto::InodeId;

/// What this client has been given to bring back, as a mover: by file and place, the token epoch.
#[derive(Default)]
pub struct Recalls {
    busy: Mutex<BTreeMap<(InodeId, u64), u32>>,
    /// One question for work at a time: it names what is being worked on.
    pub asking: tokio::sync::Mutex<()>,
}

impl Recalls {
    pub fn busy(&self) -> MutexGuard<'_, BTreeMap<(InodeId, u64), u32>> {
        self.busy.lock().expect("no holder panics")
    }
}
