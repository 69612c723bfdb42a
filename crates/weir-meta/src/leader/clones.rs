//! Directories of clones that operations wait for.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use tokio::sync::Notify;
use weir_env::Instant;
use weir_proto::{InodeId, SessionId};

/// Directories that are listed first because operations wait for them; each is checked in every step.
pub const WANTED_MAX: usize = 4096;

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

impl Clones {
    /// An operation waits for a directory. If too many do it comes in its turn.
    pub fn want(&self, dir: InodeId) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        if wanted.len() < WANTED_MAX {
            wanted.insert(dir);
        }
        drop(wanted);
        self.call.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_directories_have_a_bound() {
        let clones = Clones::default();
        (0..3 * WANTED_MAX as u64).for_each(|n| clones.want(InodeId(n)));
        let mut wanted = clones.wanted.lock().unwrap();
        assert_eq!(wanted.len(), WANTED_MAX);
        wanted.pop_first();
        drop(wanted);
        clones.want(InodeId(u64::MAX));
        assert!(clones.wanted.lock().unwrap().contains(&InodeId(u64::MAX)));
    }
}
