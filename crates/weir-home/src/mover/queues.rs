//! Ranges of files that wait for their turn.
//!
//! Invariant: a file is here as long as a task writes it, so it never has two.
use super::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use weir_proto::InodeId;
use weir_proto::relation::ExtentWork;

#[derive(Default)]
pub(super) struct FileQueues(Mutex<BTreeMap<InodeId, VecDeque<ExtentWork>>>);

impl FileQueues {
    /// True: no task writes this file yet.
    pub(super) fn add(&self, ino: InodeId, mut items: VecDeque<ExtentWork>) -> bool {
        let mut files = lock(&self.0);
        match files.get_mut(&ino) {
            Some(queue) => queue.append(&mut items),
            None => {
                files.insert(ino, items);
                return true;
            }
        }
        false
    }

    pub(super) fn files(&self) -> usize {
        lock(&self.0).len()
    }

    pub(super) fn bytes(&self, ino: InodeId) -> u64 {
        lock(&self.0).get(&ino).map_or(0, |queue| queue.iter().map(|item| item.len).sum())
    }

    /// The next range of a file, and whether there are more. None: its task ends.
    pub(super) fn next(&self, ino: InodeId) -> Option<(ExtentWork, bool)> {
        let mut files = lock(&self.0);
        let queue = files.get_mut(&ino)?;
        let next = queue.pop_front().map(|item| (item, !queue.is_empty()));
        if next.is_none() {
            files.remove(&ino);
        }
        next
    }
}
