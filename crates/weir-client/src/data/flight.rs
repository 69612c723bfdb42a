//! Stripes in flight to targets, of all files together, and the versions of their fragments.
//!
//! Invariant: no version is used twice: an abandoned one may be at a target.
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::{Semaphore, SemaphorePermit};
use weir_proto::Version;
use weir_proto::data::{FILL_COUNTER, SEAL_VERSIONS};

/// Stripes in flight to targets: enough to keep a dozen targets busy, few enough to bound the parity buffers.
/// Counted in parts, so that many small files may be in flight if targets are far.
const STRIPES_IN_FLIGHT_MAX: usize = 12;
pub const STRIPE_PARTS: u32 = 64;

pub struct Flight {
    permits: Semaphore,
    /// Lower half of fragment versions; one for all files, so it grows under every token epoch.
    version_counter: AtomicU32,
}

impl Default for Flight {
    fn default() -> Flight {
        Flight {
            permits: Semaphore::new(STRIPES_IN_FLIGHT_MAX * STRIPE_PARTS as usize),
            version_counter: AtomicU32::new((FILL_COUNTER + SEAL_VERSIONS + 2) & !1),
        }
    }
}

impl Flight {
    /// Waits until these parts of a stripe may be in flight.
    pub async fn enter(&self, parts: u32) -> SemaphorePermit<'_> {
        assert!((1..=STRIPE_PARTS).contains(&parts), "{parts} parts of a stripe");
        self.permits.acquire_many(parts).await.expect("never closed")
    }
    /// Writers use even counters, seals odd ones, below those of a writer (see `WriteMode::Prepare`).
    pub fn next_version(&self) -> u32 {
        self.version_counter.fetch_add(2, Relaxed)
    }
    /// The next version, or `lowest` if that is higher.
    pub fn next_version_from(&self, token_epoch: u32, lowest: Version) -> Version {
        if lowest.token_epoch() == token_epoch {
            self.version_counter.fetch_max(lowest.counter(), Relaxed);
        }
        lowest.max(Version::new(token_epoch, self.next_version()))
    }
}
