//! Attributes and pages of an inode that the kernel is to drop, soon: one task for each inode, for any number
//! of requests.
//!
//! Invariant: a drop begins after each request for it; requests that come while one runs share the next one.
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_proto::InodeId;

/// Inodes with a task, and the request for the next drop of each.
pub struct Drops<T>(Mutex<BTreeMap<InodeId, Option<T>>>);

impl<T> Default for Drops<T> {
    fn default() -> Drops<T> {
        Drops(Mutex::default())
    }
}

impl<T> Drops<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<InodeId, Option<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request. The first: a task has to begin with it, and calls [`Drops::next`] after each drop. The
    /// second: it is not needed, another one waits for the same drop.
    pub fn add(&self, ino: InodeId, request: T) -> (Option<T>, Option<T>) {
        let mut all = self.lock();
        match all.get_mut(&ino) {
            None => {
                all.insert(ino, None);
                (Some(request), None)
            }
            Some(next @ None) => {
                *next = Some(request);
                (None, None)
            }
            Some(Some(_)) => (None, Some(request)),
        }
    }

    /// The request that came during the drop; none: the task ends.
    pub fn next(&self, ino: InodeId) -> Option<T> {
        let mut all = self.lock();
        let next = all.get_mut(&ino).and_then(Option::take);
        if next.is_none() {
            all.remove(&ino);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_requests_during_a_drop_are_one_more_drop() {
        let (drops, ino, other) = (Drops::default(), InodeId(1), InodeId(2));
        assert_eq!(drops.add(ino, 0), (Some(0), None), "a task begins");
        assert_eq!(drops.add(ino, 1), (None, None), "it continues with this one");
        for n in 2..10_000 {
            assert_eq!(drops.add(ino, n), (None, Some(n)));
        }
        assert_eq!(drops.add(other, 0), (Some(0), None), "of another inode");
        assert_eq!(drops.next(ino), Some(1));
        assert_eq!(drops.add(ino, 10_000), (None, None), "it came after that drop began");
        assert_eq!((drops.next(ino), drops.next(ino)), (Some(10_000), None));
        assert_eq!(drops.lock().len(), 1);
        assert_eq!(drops.add(ino, 10_001), (Some(10_001), None));
    }
}
