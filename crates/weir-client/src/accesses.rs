//! Access times: reads made here, reported to the leader in batches.
//!
//! A read changes the access time as Linux's `relatime` does: only if it is not newer than the last change,
//! or is a day old. The new time is noted at the read, shown here at once, and reported in a batch within a
//! second, or before a lease on the inode is returned. No read waits for it.
//!
//! Invariant: times noted under a lease are reported before the lease ends, so a time that another client
//! sets is later. A time that cannot be reported is dropped: the next read notes it again.
use crate::inode::{Inode, State};
use crate::inodes::Inodes;
use crate::leader::Leader;
use crate::wall_time;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weir_env::Env;
use weir_proto::InodeId;
use weir_proto::meta::{ACCESSES_MAX, AccessTime, NoteAccess, Time};

/// Access times are not worth a longer wait for the leader.
const PATIENCE: Duration = Duration::from_secs(5);
/// An access time of this age is updated by every read.
const OLD_NANOS: i64 = 24 * 3600 * 1_000_000_000;
/// Noted and unreported: beyond that, reads leave no trace until some are reported.
const NOTED_MAX: usize = 64 * ACCESSES_MAX;

pub struct Accesses {
    env: Env,
    leader: Arc<Leader>,
    inodes: Arc<Inodes>,
    /// Whether reads are noted at all.
    kept: AtomicBool,
    noted: Mutex<BTreeSet<InodeId>>,
    /// Held during a report: the leader knows all earlier notes after it.
    reporting: tokio::sync::Mutex<()>,
}

impl State {
    /// Whether a read at `now` changes the access time, as far as the attributes are known.
    fn access_follows(&self, now: Time) -> bool {
        let (Some(attr), local) = (&self.attr, self.write.local()) else { return false };
        let change = local.map_or(i64::MIN, |l| l.mtime.nanos);
        let mtime = Time { nanos: attr.mtime.nanos.max(change) };
        follows(self.accessed.unwrap_or(attr.atime), mtime, attr.ctime, now)
    }
}

impl Accesses {
    pub fn new(env: Env, leader: Arc<Leader>, inodes: Arc<Inodes>) -> Accesses {
        let (noted, reporting) = Default::default();
        Accesses { env, leader, inodes, kept: AtomicBool::new(true), noted, reporting }
    }
    fn noted(&self) -> MutexGuard<'_, BTreeSet<InodeId>> {
        self.noted.lock().expect("no holder panics")
    }
    pub fn keep(&self, kept: bool) {
        self.kept.store(kept, Ordering::Relaxed);
    }
    fn are_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    /// A read that a program made, or that fills pages for one.
    pub fn note(&self, ino: InodeId, st: &mut State) {
        let now = wall_time(&self.env);
        if !self.are_kept() || !st.access_follows(now) {
            return;
        }
        let mut noted = self.noted();
        if noted.len() < NOTED_MAX {
            noted.insert(ino);
            st.accessed = Some(now);
        }
    }

    /// Whether the next read changes the access time, so that the kernel must send it here.
    pub fn awaits(&self, st: &State) -> bool {
        self.are_kept() && st.access_follows(wall_time(&self.env))
    }

    fn take(&self) -> Vec<InodeId> {
        let mut noted = self.noted();
        let rest = match noted.iter().nth(ACCESSES_MAX).copied() {
            Some(next) => noted.split_off(&next),
            None => BTreeSet::new(),
        };
        std::mem::replace(&mut *noted, rest).into_iter().collect()
    }

    /// Called before a lease on the inode is returned, and before its times are set.
    pub async fn report_of(&self, inode: &Inode) {
        if self.noted().contains(&inode.ino) {
            self.report().await;
        } else if inode.lock().accessed.is_some() {
            drop(self.reporting.lock().await); // another task is reporting it
        }
    }

    /// Reports all noted times.
    pub async fn report(&self) {
        let _one = self.reporting.lock().await;
        loop {
            let inodes = self.take();
            if inodes.is_empty() {
                return;
            }
            let at = |ino: InodeId| self.inodes.known(ino)?.lock().accessed.map(|at| AccessTime { ino, at });
            let accesses: Vec<AccessTime> = inodes.into_iter().filter_map(at).collect();
            let report = |session| NoteAccess { session, accesses: accesses.clone() };
            let reported = self.leader.ask_until(self.env.clock.now() + PATIENCE, report).await;
            if let Err(e) = &reported {
                tracing::debug!("access times were not reported: {e}");
            }
            for access in &accesses {
                self.end(access, reported.is_ok());
            }
        }
    }

    fn end(&self, access: &AccessTime, reported: bool) {
        let Some(inode) = self.inodes.known(access.ino) else { return };
        let mut st = inode.lock();
        if st.accessed != Some(access.at) {
            return; // read again meanwhile, or its times were set
        }
        st.accessed = None;
        if let Some(attr) = st.attr.as_mut().filter(|_| reported) {
            attr.atime = access.at;
        }
    }
}

/// Whether a read now changes the access time.
pub fn follows(atime: Time, mtime: Time, ctime: Time, now: Time) -> bool {
    let age = now.nanos.saturating_sub(atime.nanos);
    atime.nanos <= mtime.nanos.max(ctime.nanos) || age >= OLD_NANOS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_time_follows_as_relatime_says() {
        let t = |seconds: i64| Time { nanos: seconds * 1_000_000_000 };
        let now = t(1_000_000);
        for (atime, mtime, ctime, expected) in [
            (999_000, 998_000, 998_000, false),
            (999_000, 999_000, 998_000, true),
            (999_000, 998_000, 999_001, true),
            (1_000_000 - 24 * 3600, 5, 5, true),
            (1_000_000 - 24 * 3600 + 1, 5, 5, false),
            (1_000_500, 5, 5, false),
        ] {
            assert_eq!(follows(t(atime), t(mtime), t(ctime), now), expected, "{atime} {mtime} {ctime}");
        }
    }
}
