//! Locks between kernel and client: requests, and the waits that a signal may end.
//!
//! Invariant: a request whose interrupt arrived first is interrupted from the start. The kernel never uses a
//! request's number twice, so a late interrupt does no harm.
use crate::log;
use crate::translate as tr;
use fuser::{Errno, LockOwner};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_client::{LockWish, Locked};
use weir_proto::Error;
use weir_proto::lock::{LOCK_END, LockKind, LockOwner as Owner, LockRange, LockSpace};

/// Interrupts remembered for requests that have not arrived yet: as many as requests can be in flight between
/// the kernel and this program's threads.
const EARLY_MAX: usize = 1024;

/// The requests that wait for a lock.
#[derive(Default)]
pub struct Waits(Mutex<Known>);

#[derive(Default)]
struct Known {
    waiting: BTreeMap<u64, Arc<Notify>>,
    early: VecDeque<u64>,
    /// The mount ends: no request waits any more.
    closing: bool,
}

impl Waits {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request begins to wait; ended by [`Waits::end`].
    pub fn begin(&self, unique: u64) -> Arc<Notify> {
        let mut known = self.lock();
        let interrupt = Arc::new(Notify::new());
        if known.closing || known.early.contains(&unique) {
            interrupt.notify_one();
        }
        known.waiting.insert(unique, interrupt.clone());
        interrupt
    }
    pub fn end(&self, unique: u64) {
        self.lock().waiting.remove(&unique);
    }
    /// The mount ends: all waits are interrupted, and those that would begin. Returns the number of waits.
    pub fn end_all(&self) -> usize {
        let mut known = self.lock();
        known.closing = true;
        known.waiting.values().for_each(|wait| wait.notify_one());
        known.waiting.len()
    }
    pub fn is_closing(&self) -> bool {
        self.lock().closing
    }
    pub fn interrupt(&self, unique: u64) {
        let mut known = self.lock();
        match known.waiting.get(&unique) {
            Some(wait) => wait.notify_one(),
            None => {
                if known.early.len() == EARLY_MAX {
                    known.early.pop_front();
                }
                known.early.push_back(unique);
            }
        }
    }
}

pub fn owner(owner: LockOwner, flock: bool) -> Owner {
    Owner { space: if flock { LockSpace::Flock } else { LockSpace::Fcntl }, id: owner.0 }
}

/// The kernel's request; `EINVAL` for values that it never uses.
pub fn wish(owner: Owner, start: u64, end: u64, typ: i32, pid: u32) -> Result<LockWish, Errno> {
    let kind = match typ {
        libc::F_RDLCK => Some(LockKind::Shared),
        libc::F_WRLCK => Some(LockKind::Exclusive),
        libc::F_UNLCK => None,
        _ => return Err(Errno::EINVAL),
    };
    let range = LockRange::new(start, end.min(LOCK_END)).map_err(|_| Errno::EINVAL)?;
    Ok(LockWish { owner, range, kind, pid })
}

pub fn kernel_type(kind: LockKind) -> i32 {
    match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    }
}

/// The answer for the caller.
pub fn answer(locked: Result<Locked, Error>) -> Result<(), Errno> {
    match locked {
        Ok(Locked::Granted) => Ok(()),
        Ok(Locked::Held) => Err(Errno::EAGAIN),
        Ok(Locked::Deadlock) => Err(Errno::EDEADLK),
        Ok(Locked::Full) => Err(Errno::ENOLCK),
        Ok(Locked::Interrupted) => Err(Errno::EINTR),
        Err(e) => {
            log::warn("a lock failed", &e);
            Err(tr::errno(&e))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_requests_of_the_kernel_are_decoded() {
        let who = owner(LockOwner(9), true);
        assert_eq!(who, Owner { space: LockSpace::Flock, id: 9 });
        let asked = wish(who, 0, u64::MAX, libc::F_WRLCK, 4).unwrap();
        assert_eq!((asked.range, asked.kind, asked.pid), (LockRange::WHOLE, Some(LockKind::Exclusive), 4));
        assert_eq!(wish(who, 3, 5, libc::F_UNLCK, 4).unwrap().kind, None);
        assert!(wish(who, 5, 3, libc::F_RDLCK, 4).is_err() && wish(who, 0, 3, 77, 4).is_err());
    }

    #[tokio::test]
    async fn an_interrupt_finds_its_wait_also_if_it_comes_first() {
        let waits = Waits::default();
        let wait = waits.begin(1);
        waits.interrupt(1);
        wait.notified().await;
        waits.interrupt(2);
        waits.begin(2).notified().await;
        waits.end(1);
        waits.end(2);
        assert!(waits.lock().waiting.is_empty());
        (0..5000).for_each(|n| waits.interrupt(n));
        assert_eq!(waits.lock().early.len(), EARLY_MAX);
    }
}
