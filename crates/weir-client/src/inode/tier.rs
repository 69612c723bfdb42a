//! Bytes of a file that are elsewhere: at home only, or in older objects that snapshots hold.
//!
//! Invariants: these ranges are believed under a lease only (the caller reports its end); nothing is believed
//! of evicted bytes while this client itself evicts, nor across the beginning or end of that. Pure.
use weir_proto::snapshot::Layer;

/// Ranges in order, none empty; whole stripes.
pub type Ranges = Vec<(u64, u64)>;

pub fn touches(ranges: &Ranges, from: u64, to: u64) -> bool {
    ranges.iter().any(|(a, b)| *a < to.max(from.saturating_add(1)) && *b > from)
}

#[derive(Debug, Default)]
pub struct TierState {
    /// Stripes that are at home only, if they are known under the lease (see `recall.rs`).
    evicted: Option<Ranges>,
    /// The range that this client is evicting of a file that it writes (see `evict_own.rs`).
    evicting: Option<(u64, u64)>,
    /// Counts the beginnings and ends of such evictions.
    evictions: u64,
    /// Bytes in older objects, if they are known under the lease (see `layers.rs`).
    layers: Option<Vec<Layer>>,
}

impl TierState {
    pub fn evicted(&self) -> Option<&Ranges> {
        self.evicted.as_ref()
    }
    /// `evictions`: the count when the leader was asked.
    pub fn note_evicted(&mut self, ranges: &Ranges, evictions: u64) {
        if self.evictions == evictions && self.evicting.is_none() {
            self.evicted = Some(ranges.clone());
        }
    }
    pub fn forget_evicted(&mut self) {
        self.evicted = None;
    }
    /// Whether a part of a range is offline, or may be as far as is known, in a file that has such bytes.
    pub fn may_be_evicted(&self, from: u64, to: u64) -> bool {
        self.evicted.as_ref().is_none_or(|ranges| touches(ranges, from, to))
    }

    pub fn begin_evicting(&mut self, from: u64, to: u64) {
        assert!(self.evicting.is_none(), "one eviction at a time, under the file's lock on flushes");
        self.evicting = Some((from, to));
        self.eviction_turns();
    }
    pub fn end_evicting(&mut self) {
        assert!(self.evicting.is_some(), "an eviction that ends has begun");
        self.evicting = None;
        self.eviction_turns();
    }
    /// Bytes of a fetch in flight may be of either side.
    fn eviction_turns(&mut self) {
        self.evictions += 1;
        self.evicted = None;
    }
    pub fn is_evicting(&self) -> bool {
        self.evicting.is_some()
    }
    /// Whether a part of `from..to` is being evicted by this client.
    pub fn is_being_evicted(&self, from: u64, to: u64) -> bool {
        self.evicting.is_some_and(|(a, b)| a < to.max(from.saturating_add(1)) && from < b)
    }
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    pub fn layers(&self) -> Option<&Vec<Layer>> {
        self.layers.as_ref()
    }
    pub fn note_layers(&mut self, layers: Vec<Layer>) {
        self.layers = Some(layers);
    }
    pub fn take_layers(&mut self) -> Option<Vec<Layer>> {
        self.layers.take()
    }
    pub fn forget_layers(&mut self) {
        self.layers = None;
    }

    /// The lease is gone.
    pub fn forget_all(&mut self) {
        self.evicted = None;
        self.layers = None;
    }

    /// Panics where an invariant of this file does not hold.
    pub fn check(&self) {
        assert!(self.evicting.is_none_or(|(from, to)| from < to), "an eviction is of a range");
        assert!(self.evicting.is_none() || self.evicted.is_none(), "nothing is believed while it changes");
    }
}
