//! Reads whose time the leader does not know of yet, and which reads change the access time.
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use weir_proto::InodeId;
use weir_proto::meta::{ACCESSES_MAX, Time};

/// An access time of this age is updated by every read.
const OLD_NANOS: i64 = 24 * 3600 * 1_000_000_000;
/// Noted and unreported: beyond that, reads leave no trace until some are reported.
const NOTED_MAX: usize = 64 * ACCESSES_MAX;

pub struct Accesses {
    /// Whether reads are noted at all.
    kept: AtomicBool,
    noted: Mutex<BTreeSet<InodeId>>,
    /// Held during a report: the leader knows all earlier notes after it.
    pub reporting: tokio::sync::Mutex<()>,
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
    pub fn are_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }
    /// False: too many are noted.
    pub fn note(&self, ino: InodeId) -> bool {
        let mut noted = self.lock();
        let has_space = noted.len() < NOTED_MAX;
        if has_space {
            noted.insert(ino);
        }
        has_space
    }
    pub fn has(&self, ino: InodeId) -> bool {
        self.lock().contains(&ino)
    }
    pub fn take(&self) -> Vec<InodeId> {
        let mut noted = self.lock();
        let rest = match noted.iter().nth(ACCESSES_MAX).copied() {
            Some(next) => noted.split_off(&next),
            None => BTreeSet::new(),
        };
        std::mem::replace(&mut *noted, rest).into_iter().collect()
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
