//! Calls that wait for locks or recalls: a signal ends the wait.
//!
//! Invariants: only the wait ends early, never a write half done. A call whose interrupt arrived first is
//! interrupted from the start; the kernel never uses a request's number twice, so a late interrupt does no
//! harm. Calls that need not wait do not come here.
use crate::replies::refused;
use fuser::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_client::{Client, Handle};
use weir_proto::Result;

/// Interrupts remembered for requests that have not arrived yet: as many as requests can be in flight between
/// the kernel and this program's threads.
const EARLY_MAX: usize = 1024;

/// The calls that wait.
#[derive(Default)]
pub struct Interrupts(Mutex<Known>);

#[derive(Default)]
struct Known {
    waiting: BTreeMap<u64, Arc<Notify>>,
    early: VecDeque<u64>,
    /// The mount ends: no call waits any more.
    closing: bool,
}

impl Interrupts {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, unique: u64) -> Arc<Notify> {
        let mut known = self.lock();
        let signal = Arc::new(Notify::new());
        if known.closing || known.early.contains(&unique) {
            signal.notify_one();
        }
        known.waiting.insert(unique, signal.clone());
        signal
    }
    /// The mount ends: all waits are interrupted, and those that would begin. Returns the number of waits.
    pub fn end_all(&self) -> usize {
        let mut known = self.lock();
        known.closing = true;
        known.waiting.values().for_each(|wait| wait.notify_one());
        known.waiting.len()
    }
    fn is_closing(&self) -> bool {
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

/// A call in the list, as long as this lives.
pub struct Waiting {
    interrupts: Arc<Interrupts>,
    unique: u64,
    signal: Arc<Notify>,
}

impl Waiting {
    /// Notified by a signal for the program, or by the end of the mount.
    pub fn signal(&self) -> &Notify {
        &self.signal
    }
}
impl Drop for Waiting {
    fn drop(&mut self) {
        self.interrupts.lock().waiting.remove(&self.unique);
    }
}

/// A call that may have to wait.
pub struct Interruptible {
    interrupts: Arc<Interrupts>,
    unique: u64,
}

impl Interruptible {
    pub fn new(interrupts: Arc<Interrupts>, unique: u64) -> Interruptible {
        Interruptible { interrupts, unique }
    }

    /// The call begins to wait.
    pub fn begin(&self) -> Waiting {
        let (interrupts, unique) = (self.interrupts.clone(), self.unique);
        Waiting { signal: interrupts.begin(unique), interrupts, unique }
    }

    /// The end of a wait, or `EINTR`.
    pub async fn unless_interrupted<T>(
        &self,
        wait: impl Future<Output = Result<T>>,
    ) -> std::result::Result<T, Errno> {
        let waiting = self.begin();
        tokio::select! {
            biased;
            done = wait => done.map_err(|e| refused(&e)),
            () = waiting.signal().notified() => {
                Err(if self.interrupts.is_closing() { Errno::EIO } else { Errno::EINTR })
            }
        }
    }

    /// Returns when `len` bytes from `offset` (`None`: the end of the file) on are online.
    pub async fn recall(
        &self,
        client: &Client,
        file: Handle,
        offset: Option<u64>,
        len: usize,
    ) -> std::result::Result<(), Errno> {
        if !client.may_wait_for_home(file) {
            return Ok(());
        }
        self.unless_interrupted(client.recall(file, offset, len)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_interrupt_finds_its_wait_also_if_it_comes_first() {
        let interrupts = Arc::new(Interrupts::default());
        let begin = |unique| Interruptible::new(interrupts.clone(), unique).begin();
        let wait = begin(1);
        interrupts.interrupt(1);
        wait.signal().notified().await;
        interrupts.interrupt(2);
        let early = begin(2);
        early.signal().notified().await;
        drop((wait, early));
        assert!(interrupts.lock().waiting.is_empty());
        (0..5000).for_each(|n| interrupts.interrupt(n));
        assert_eq!(interrupts.lock().early.len(), EARLY_MAX);
    }
}
