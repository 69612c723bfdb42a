//! Under which cluster maps was written, here and by others.
//!
//! A target that its group goes on without may not know that yet, for as long as it is cut off from the
//! coordinator. Whoever does not know it either would read there what is old, and nobody would tell. So who
//! writes tells the metadata leader under which map, before anybody is told that it is written; and who reads
//! has, from the answer that lets it read, the map that it must know first.
use std::sync::atomic::{AtomicU64, Ordering};

/// Versions of the cluster map.
#[derive(Default)]
pub struct MapsSeen {
    written: AtomicU64,
    reported: AtomicU64,
    needed: AtomicU64,
}

impl MapsSeen {
    /// All live members have something under that map.
    pub fn note_written(&self, version: u64) {
        self.written.fetch_max(version, Ordering::SeqCst);
    }
    /// Under which map was written last, if the leader does not know it.
    pub fn unreported(&self) -> Option<u64> {
        let written = self.written.load(Ordering::SeqCst);
        (written > self.reported.load(Ordering::SeqCst)).then_some(written)
    }
    pub fn note_reported(&self, version: u64) {
        self.reported.fetch_max(version, Ordering::SeqCst);
    }
    /// Nothing is read before this map is here, or a newer one.
    pub fn need(&self, version: u64) {
        self.needed.fetch_max(version, Ordering::SeqCst);
    }
    pub fn needed(&self) -> u64 {
        self.needed.load(Ordering::SeqCst)
    }
}
