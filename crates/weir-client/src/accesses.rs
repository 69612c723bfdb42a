//! Access times: what was read here, told to the leader many at once.
//!
//! A read changes the access time as Linux's `relatime` has it: only one that is not newer than the last change, or a day
//! old. The new time is noted at the read, shown here at once, and told with others within a second, or before a lease on
//! the inode is given back. No read waits for it.
//!
//! Invariant: what was noted under a lease is told before the lease goes, so whoever sets a time elsewhere is later. What
//! cannot be told is dropped: the next read notes it again.
use crate::inner::Inner;
use crate::inode::{Inode, State};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use weir_proto::InodeId;
use weir_proto::meta::{ACCESSES_MAX, AccessTime, NoteAccess, Time};

/// An access time of this age follows every read.
const OLD_NANOS: i64 = 24 * 3600 * 1_000_000_000;
/// They are not worth a longer wait for the leader.
const PATIENCE: Duration = Duration::from_secs(5);
/// Noted and not told: beyond, reads leave no trace until some are told.
const NOTED_MAX: usize = 64 * ACCESSES_MAX;

pub struct Accesses {
    /// Whether reads are noted at all.
    kept: AtomicBool,
    noted: Mutex<BTreeSet<InodeId>>,
    /// Held while some are told: what was noted before is known to the leader after it.
    reporting: tokio::sync::Mutex<()>,
}

impl Default for Accesses {
    fn default() -> Accesses {
        Accesses { kept: AtomicBool::new(true), noted: Mutex::default(), reporting: Default::default() }
    }
}

impl Accesses {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<InodeId>> {
        self.noted.lock().expect("no holder panics")
    }
    pub fn keep(&self, kept: bool) {
        self.kept.store(kept, Ordering::Relaxed);
    }
    pub fn has(&self, ino: InodeId) -> bool {
        self.lock().contains(&ino)
    }
    fn take(&self) -> Vec<InodeId> {
        let mut noted = self.lock();
        let rest = match noted.iter().nth(ACCESSES_MAX).copied() {
            Some(next) => noted.split_off(&next),
            None => BTreeSet::new(),
        };
        std::mem::replace(&mut *noted, rest).into_iter().collect()
    }
}

/// Whether a read now changes the access time.
fn follows(atime: Time, mtime: Time, ctime: Time, now: Time) -> bool {
    let age = now.nanos.saturating_sub(atime.nanos);
    atime.nanos <= mtime.nanos.max(ctime.nanos) || age >= OLD_NANOS
}

impl State {
    /// Whether a read at `now` changes the access time, as far as the attributes are known.
    fn access_follows(&self, now: Time) -> bool {
        let (Some(attr), local) = (&self.attr, &self.local) else { return false };
        let change = local.map_or(i64::MIN, |l| l.mtime.nanos);
        let mtime = Time { nanos: attr.mtime.nanos.max(change) };
        follows(self.accessed.unwrap_or(attr.atime), mtime, attr.ctime, now)
    }
}

impl Inner {
    /// A read that a program made, or that fills pages for one.
    pub fn note_access(&self, ino: InodeId, st: &mut State) {
        if !self.accesses.kept.load(Ordering::Relaxed) {
            return;
        }
        let now = self.now();
        if !st.access_follows(now) {
            return;
        }
        let mut noted = self.accesses.lock();
        if noted.len() < NOTED_MAX {
            noted.insert(ino);
            st.accessed = Some(now);
        }
    }

    /// Whether the next read changes the access time, so that it has to come here.
    pub fn awaits_access(&self, st: &State) -> bool {
        self.accesses.kept.load(Ordering::Relaxed) && st.access_follows(self.now())
    }

    /// Before a lease on the inode is given back, and before its times are set.
    pub async fn report_access_of(&self, inode: &Inode) {
        if self.accesses.has(inode.ino) {
            self.report_accesses().await;
        } else if inode.lock().accessed.is_some() {
            drop(self.accesses.reporting.lock().await); // somebody is telling it
        }
    }

    /// Tells all that is noted.
    pub async fn report_accesses(&self) {
        let _one = self.accesses.reporting.lock().await;
        loop {
            let inodes = self.accesses.take();
            if inodes.is_empty() {
                return;
            }
            let at = |ino: InodeId| self.known_inode(ino)?.lock().accessed.map(|at| AccessTime { ino, at });
            let accesses: Vec<AccessTime> = inodes.into_iter().filter_map(at).collect();
            let report = |session| NoteAccess { session, accesses: accesses.clone() };
            let reported = self.session.ask(self.env.clock.now() + PATIENCE, report).await;
            if let Err(e) = &reported {
                tracing::debug!("access times were not told: {e}");
            }
            for access in &accesses {
                self.end_access(access, reported.is_ok());
            }
        }
    }

    fn end_access(&self, access: &AccessTime, reported: bool) {
        let Some(inode) = self.known_inode(access.ino) else { return };
        let mut st = inode.lock();
        if st.accessed != Some(access.at) {
            return; // read again meanwhile, or set
        }
        st.accessed = None;
        if let Some(attr) = st.attr.as_mut().filter(|_| reported) {
            attr.atime = access.at;
        }
    }
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
