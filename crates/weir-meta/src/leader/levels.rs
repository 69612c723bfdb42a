//! Fill levels of volumes and of the targets, as the evictor has seen them.
//!
//! In memory only. Knows nothing of files.
use crate::evict::{self, Level, Percent, Watched};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::VolumeId;
use weir_proto::recall::EvictionLevel;

/// Targets' reports no longer include bytes that were evicted this long ago.
const DROPPED_WITHIN: Duration = Duration::from_secs(60);

/// Bytes that only snapshots hold now free space on targets when these are deleted: for this time no more is
/// evicted of files that they hold.
const LEFT_WITHIN: Duration = Duration::from_secs(3600);

/// Watched levels, by volume; the pool is `None`.
#[derive(Default)]
pub struct Evictor(Mutex<BTreeMap<Option<VolumeId>, Seen>>);

#[derive(Default)]
struct Seen {
    watched: Watched,
    shown: Option<EvictionLevel>,
    /// Evicted bytes that targets may still report as used.
    dropping: Vec<(Instant, u64)>,
    /// Evicted bytes that snapshots hold.
    left: Vec<(Instant, u64)>,
}

impl Evictor {
    fn seen(&self) -> MutexGuard<'_, BTreeMap<Option<VolumeId>, Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a fill level; returns the bytes to evict.
    pub fn weigh(&self, now: Instant, of: Option<VolumeId>, level: Level, set: Option<Percent>) -> u64 {
        let mut all = self.seen();
        let seen = all.entry(of).or_default();
        seen.dropping.retain(|(at, _)| now.since(*at) < DROPPED_WITHIN);
        // A volume's usage is exact; targets' reports lag behind.
        let dropping = if of.is_some() { 0 } else { seen.dropping.iter().map(|(_, n)| n).sum() };
        let level = Level { used: level.used.saturating_sub(dropping), ..level };
        seen.watched.note(now, level.used);
        let bytes_per_s = seen.watched.rate();
        let marks = evict::marks(level.capacity, bytes_per_s, set);
        let want = seen.watched.to_free(level, marks);
        seen.shown = Some(EvictionLevel {
            volume: of,
            capacity: level.capacity,
            used: level.used,
            high: marks.high,
            low: marks.low,
            is_set: set.is_some(),
            bytes_per_s,
            evicting: seen.watched.evicting,
            evicted: seen.watched.evicted(),
        });
        want
    }

    /// Bytes evicted recently from files that snapshots hold.
    pub fn left_to_snapshots(&self, now: Instant, of: Option<VolumeId>) -> u64 {
        let mut all = self.seen();
        let left = &mut all.entry(of).or_default().left;
        left.retain(|(at, _)| now.since(*at) < LEFT_WITHIN);
        left.iter().map(|(_, n)| n).sum()
    }
    pub fn note_left(&self, now: Instant, of: Option<VolumeId>, bytes: u64) {
        self.seen().entry(of).or_default().left.push((now, bytes));
    }

    pub fn note_evicted(&self, now: Instant, of: Option<VolumeId>, bytes: u64) {
        let mut all = self.seen();
        let seen = all.entry(of).or_default();
        seen.watched.note_evicted(bytes);
        seen.dropping.push((now, bytes));
    }

    /// All levels, as they are shown.
    pub fn shown(&self) -> Vec<EvictionLevel> {
        self.seen().values().filter_map(|seen| seen.shown.clone()).collect()
    }
}
