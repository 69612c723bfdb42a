//! Overlays between their arrival and their end, so that a truncation can wait for them, and an attempt at a
//! write for earlier ones.
use crate::recent_map::RecentMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_env::Instant;
use weir_proto::data::WriteOverlays;
use weir_proto::{Error, FileId, Result};

/// Retried writes whose last attempt is remembered.
const AGAIN_MAX: usize = 65_536;

/// Overlays between their arrival and their end.
#[derive(Default)]
pub struct UnderWay(Arc<Counts>);

#[derive(Default)]
struct Counts {
    all: Mutex<All>,
    fewer: Notify,
}

#[derive(Default)]
struct All {
    /// Number in flight by file and token epoch.
    of: BTreeMap<(FileId, u32), usize>,
    /// Writes in flight, and their attempts.
    attempts: BTreeSet<(u64, u32)>,
    /// The last attempt of retried writes.
    again: RecentMap<u64, u32, AGAIN_MAX>,
}

/// Counts an overlay until it is dropped.
pub struct Counted {
    counts: Arc<Counts>,
    of: (FileId, u32),
    attempt: (u64, u32),
}

impl Counts {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Returns when the condition holds; it is checked when one ends.
    async fn wait(&self, is_so: impl Fn(&All) -> bool) {
        loop {
            let ended = self.fewer.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if is_so(&self.lock()) {
                return;
            }
            ended.await;
        }
    }
}

impl All {
    /// Refuses attempts earlier than this one from now on.
    fn note_attempt(&mut self, write: u64, attempt: u32) -> Result<()> {
        let last = self.again.get(&write).copied();
        if last.unwrap_or_default() > attempt {
            return Err(Error::unavailable("the write was tried again since"));
        }
        if attempt > 0 {
            self.again.note(write, attempt);
        }
        Ok(())
    }
}

impl UnderWay {
    pub fn begin(&self, r: &WriteOverlays) -> Result<Counted> {
        let (of, attempt) = ((r.cell.file, r.token_epoch), (r.write, r.attempt));
        let mut all = self.0.lock();
        all.note_attempt(r.write, r.attempt)?;
        all.attempts.insert(attempt);
        *all.of.entry(of).or_default() += 1;
        Ok(Counted { counts: self.0.clone(), of, attempt })
    }
    /// Returns when no write of a file below this token epoch is in flight.
    pub async fn ended(&self, file: FileId, fence: u32) {
        self.0.wait(|all| all.of.range((file, 0)..(file, fence)).next().is_none()).await;
    }
}

impl Counted {
    /// Returns when no earlier attempt at the same write can be numbered any more.
    pub async fn earlier_ended(&self, clock: &weir_env::Clock, deadline: Instant) -> Result<()> {
        let (write, attempt) = self.attempt;
        if attempt == 0 {
            return Ok(());
        }
        let ended = self.counts.wait(|all| all.attempts.range((write, 0)..(write, attempt)).next().is_none());
        let waited = clock.timeout(deadline.since(clock.now()), ended).await;
        waited.map_err(|_| Error::deadline("an earlier attempt at the write has not ended"))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = self.counts.lock();
        all.attempts.remove(&self.attempt);
        let count = all.of.get(&self.of).copied().unwrap_or_default();
        assert!(count > 0, "a write ended that was not counted: a truncation would not wait for others");
        let left = count - 1;
        if left == 0 {
            all.of.remove(&self.of);
        } else {
            all.of.insert(self.of, left);
        }
        drop(all);
        self.counts.fewer.notify_waiters();
    }
}
