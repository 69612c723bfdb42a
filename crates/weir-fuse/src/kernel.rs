//! The kernel's caches of one mount, and the notices that invalidate them: before a lease is returned, the
//! kernel must have dropped everything that the client drops.
//!
//! Invariant: no notice overtakes an answer. The kernel does not know an inode yet while the first answer
//! about it is in flight, so a notice of it would be lost; such a notice is repeated until the kernel has
//! processed the answer. Names have no notices: the kernel keeps them for a moment, and a lease waits for its
//! end (`weir-client/src/lent.rs`). A notice of a name takes its directory's lock, which an operation may
//! hold that waits for this very revoke; and invalidating all names detaches file systems that are mounted on
//! directories inside.
use crate::tree::to_kernel_ino;
use fuser::{INodeNo, Notifier};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
use weir_client::{Forget, KernelCache};
use weir_proto::InodeId;

/// Parts of the table of inodes, so that requests seldom contend.
const PARTS: usize = 16;
/// A thread in the kernel processes an answer within microseconds of being woken. One that has not done so by
/// then never will: the request had been abandoned when it was answered.
const TAKEN_UP_POLLS: u32 = 500;
const TAKEN_UP_PAUSE: Duration = Duration::from_micros(100);

/// The kernel's knowledge of an inode.
#[derive(Clone, Copy)]
struct Answered {
    answers: u64,
    last: Instant,
}

/// The kernel's caches of one mount. Empty until the mount exists, so nothing has to be invalidated before.
pub struct Notices {
    notifier: RwLock<Option<Notifier>>,
    /// Whether it may cache names.
    keeps_names: bool,
    /// The number of answers that gave the kernel each inode, and that it has not returned yet (`FORGET`).
    reported: [Mutex<HashMap<INodeNo, Answered>>; PARTS],
}

impl Default for Notices {
    fn default() -> Notices {
        Notices::new(true)
    }
}

impl Notices {
    pub fn new(keeps_names: bool) -> Notices {
        Notices { notifier: RwLock::default(), keeps_names, reported: Default::default() }
    }

    pub(super) fn mounted(&self, notifier: Notifier) {
        // One mount per client; another way to mount may have been tried before.
        *self.notifier.write().unwrap_or_else(PoisonError::into_inner) = Some(notifier);
    }

    fn part(&self, ino: INodeNo) -> MutexGuard<'_, HashMap<INodeNo, Answered>> {
        // Numbers of inodes created together are neighbours.
        let part = &self.reported[ino.0 as usize % PARTS];
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// An answer that gives the kernel an inode is about to be sent.
    pub fn note_answer(&self, ino: INodeNo) {
        let last = Instant::now();
        let mut part = self.part(ino);
        let reported = part.entry(ino).or_insert(Answered { answers: 0, last });
        *reported = Answered { answers: reported.answers + 1, last };
    }
    /// The kernel returned this number of answers. True: it knows nothing of the inode any more.
    pub fn forgotten(&self, ino: INodeNo, answers: u64) -> bool {
        let mut part = self.part(ino);
        let Some(reported) = part.get_mut(&ino) else { return true };
        reported.answers = reported.answers.saturating_sub(answers);
        let none = reported.answers == 0;
        if none {
            part.remove(&ino);
        }
        none
    }
    /// Whether the kernel got an inode less than `within` ago.
    pub fn is_fresh(&self, ino: INodeNo, within: Duration) -> bool {
        self.part(ino).get(&ino).is_some_and(|reported| reported.last.elapsed() < within)
    }
    fn is_reported(&self, ino: INodeNo) -> bool {
        self.part(ino).contains_key(&ino)
    }

    /// False: the kernel should know the inode, and does not.
    fn invalidate(&self, notifier: &Notifier, ino: INodeNo, offset: i64, len: i64) -> bool {
        for _ in 0..TAKEN_UP_POLLS {
            match notifier.inval_known_inode(ino, offset, len) {
                Ok(false) if self.is_reported(ino) => std::thread::sleep(TAKEN_UP_PAUSE),
                Ok(_) => return true,
                Err(e) => {
                    // The mount is detached: there is no cache left.
                    tracing::debug!("forget {ino} in the kernel: {e}");
                    return true;
                }
            }
        }
        false
    }
}

impl KernelCache for Notices {
    fn invalidate_inode(&self, ino: InodeId, what: Forget) {
        let notifier = self.notifier.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(notifier) = notifier else { return };
        // A negative offset means: attributes only. Length 0 means: to the end.
        let (offset, len) = match what {
            Forget::Attributes => (-1, 0),
            Forget::All => (0, 0),
            Forget::Part(offset, len) => (offset as i64, len as i64), // no file is longer
        };
        let ino = to_kernel_ino(ino);
        if !self.invalidate(&notifier, ino, offset, len) {
            self.part(ino).remove(&ino);
        }
    }

    fn keeps_names(&self) -> bool {
        self.keeps_names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_reported_until_all_answers_are_taken_back() {
        let (notices, ino) = (Notices::default(), INodeNo(77));
        notices.note_answer(ino);
        notices.note_answer(ino);
        assert!(notices.is_reported(ino) && !notices.is_reported(INodeNo(78)));
        assert!(!notices.forgotten(ino, 1));
        assert!(notices.forgotten(ino, 1) && !notices.is_reported(ino));
        assert!(notices.forgotten(ino, 1), "an answer that was given up");
    }
}
