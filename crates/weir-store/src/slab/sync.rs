//! One slab file, and its syncs: a sync covers every write that ended before it began, so concurrent writers
//! share one.
//!
//! Invariant: one sync runs at a time. After a failed one every later one fails: the contents of the disk are
//! unknown.
use crate::traffic::Traffic;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use weir_env::File;

pub struct Slab {
    pub file: Arc<dyn File>,
    /// `file` through the page cache; opened on first use.
    pub cached: OnceLock<Arc<dyn File>>,
    group: Mutex<SyncGroup>,
    done: Condvar,
}

/// Tickets of writers: a sync covers all tickets issued before it began.
#[derive(Default)]
struct SyncGroup {
    tickets: u64,
    synced: u64,
    running: bool,
    /// A sync is queued for another thread. Only those that hold no thread wait for its begin.
    queued: bool,
    /// A sync failed, and so does every later one.
    failed: Option<String>,
    /// What waits for the end of the running sync without a thread.
    waiting: Vec<Waker>,
}

/// The state of the sync for a ticket.
enum Turn {
    Synced,
    Running,
    /// It needs a sync, and none is running.
    Free,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slab {
    pub fn new(file: Arc<dyn File>) -> Slab {
        Slab { file, cached: OnceLock::new(), group: Mutex::default(), done: Condvar::new() }
    }

    /// For a write that has ended.
    pub fn ticket(&self) -> u64 {
        let mut group = lock(&self.group);
        group.tickets += 1;
        group.tickets
    }

    /// Makes every write that ended before this call durable. Concurrent callers share a sync.
    pub fn sync(&self, traffic: Option<&Traffic>) -> io::Result<()> {
        self.sync_for(self.ticket(), traffic)
    }

    /// Returns when the write with this ticket is durable; blocks.
    pub fn sync_for(&self, mine: u64, traffic: Option<&Traffic>) -> io::Result<()> {
        let mut group = lock(&self.group);
        loop {
            match group.turn(mine)? {
                Turn::Synced => return Ok(()),
                Turn::Running => group = self.done.wait(group).unwrap_or_else(PoisonError::into_inner),
                Turn::Free => {
                    group.running = true;
                    let covered = group.tickets;
                    drop(group);
                    self.sync_now(covered, traffic);
                    group = lock(&self.group);
                }
            }
        }
    }

    /// Makes a sync that was queued. A caller that blocks does not wait for that, so one of them may
    /// have made the write durable before.
    pub fn sync_queued(&self, mine: u64, traffic: Option<&Traffic>) -> io::Result<()> {
        lock(&self.group).queued = false;
        let synced = self.sync_for(mine, traffic);
        let waiting = std::mem::take(&mut lock(&self.group).waiting);
        waiting.into_iter().for_each(Waker::wake);
        synced
    }

    /// True: the write with this ticket is durable. False: it needs a sync, which the caller makes, `here` or
    /// as a queued one for which the others wait.
    pub fn poll_turn(&self, mine: u64, cx: &Context<'_>, here: &mut bool) -> Poll<io::Result<bool>> {
        let mut group = lock(&self.group);
        match group.claim(mine, *here)? {
            Turn::Synced => Poll::Ready(Ok(true)),
            Turn::Free => Poll::Ready(Ok(false)),
            Turn::Running => {
                *here = false;
                group.waiting.push(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// For the one that has set `running`.
    fn sync_now(&self, covered: u64, traffic: Option<&Traffic>) {
        let sync = || self.file.sync_data();
        let synced = traffic.map_or_else(sync, |traffic| traffic.sync(sync));
        let waiting = {
            let mut group = lock(&self.group);
            assert!(group.running, "a sync ended that none began: two of one file may run at a time");
            assert!(group.synced <= covered, "a sync covers less than the one before it");
            assert!(covered <= group.tickets, "a sync covers writes that have not ended");
            group.running = false;
            match synced {
                Ok(()) => group.synced = covered,
                // Never retried: after a failed sync the contents of the disk are unknown.
                Err(e) => group.failed = Some(e.to_string()),
            }
            std::mem::take(&mut group.waiting)
        };
        self.done.notify_all();
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl SyncGroup {
    fn turn(&self, mine: u64) -> io::Result<Turn> {
        if let Some(why) = &self.failed {
            return Err(io::Error::other(why.clone()));
        }
        Ok(match self.synced >= mine {
            true => Turn::Synced,
            false if self.running => Turn::Running,
            false => Turn::Free,
        })
    }

    /// The turn of a caller that holds no thread while it waits: of several that need a sync, the first one
    /// makes it (`here`) or queues it.
    fn claim(&mut self, mine: u64, here: bool) -> io::Result<Turn> {
        Ok(match self.turn(mine)? {
            Turn::Free if self.queued => Turn::Running,
            Turn::Free => {
                self.queued = !here;
                Turn::Free
            }
            turn => turn,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_covers_what_was_written_before_it_and_no_more() {
        let mut group = SyncGroup { tickets: 2, ..SyncGroup::default() };
        assert!(matches!(group.turn(1), Ok(Turn::Free)));
        group.running = true;
        assert!(matches!(group.turn(2), Ok(Turn::Running)), "one sync at a time");
        (group.synced, group.running) = (2, false);
        assert!(matches!(group.turn(2), Ok(Turn::Synced)));
        assert!(matches!(group.turn(3), Ok(Turn::Free)), "written while the sync ran");
        assert!(matches!(group.claim(3, true), Ok(Turn::Free)), "made here");
        assert!(matches!(group.claim(3, false), Ok(Turn::Free)), "queued");
        assert!(matches!(group.claim(3, false), Ok(Turn::Running)), "one queues it for all");
        assert!(matches!(group.turn(3), Ok(Turn::Free)), "who blocks waits for no queue");
        group.failed = Some("the disk".into());
        for mine in [2, 3] {
            assert!(group.turn(mine).is_err(), "after a failed sync nothing is known to be durable");
        }
    }
}
