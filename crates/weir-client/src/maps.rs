//! The cluster maps under which this and other clients have written.
//!
//! A target that its group has dropped may not know that yet, for as long as it is cut off from the
//! coordinator. A reader that does not know it either would read old data there, without an error. So a
//! writer reports its map version to the metadata leader before its write is acknowledged; and a reader gets,
//! with the answer that lets it read, the map version that it must have first.
use std::sync::atomic::{AtomicU64, Ordering};

/// Versions of the cluster map.
#[derive(Default)]
pub struct MapsSeen {
    written: AtomicU64,
    reported: AtomicU64,
    needed: AtomicU64,
}

impl MapsSeen {
    /// All live members have data that was written under that map.
    pub fn note_written(&self, version: u64) {
        self.written.fetch_max(version, Ordering::SeqCst);
    }
    /// The newest map version of a write, if the leader does not know it.
    pub fn unreported(&self) -> Option<u64> {
        let written = self.written.load(Ordering::SeqCst);
        (written > self.reported.load(Ordering::SeqCst)).then_some(written)
    }
    pub fn note_reported(&self, version: u64) {
        self.reported.fetch_max(version, Ordering::SeqCst);
    }
    /// Reads wait until this client has this map, or a newer one.
    pub fn need(&self, version: u64) {
        self.needed.fetch_max(version, Ordering::SeqCst);
    }
    pub fn needed(&self) -> u64 {
        self.needed.load(Ordering::SeqCst)
    }
}
