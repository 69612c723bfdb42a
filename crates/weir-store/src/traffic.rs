//! Traffic of a target's slabs: bytes and time of reads, writes and syncs; and the space in use.
use weir_proto::TargetId;
use weir_watch::{Counter, Gauge, Histogram, Watch};

/// Counters of one target.
pub struct Traffic {
    watch: Watch,
    read_bytes: Counter,
    read_seconds: Histogram,
    write_bytes: Counter,
    write_seconds: Histogram,
    sync_seconds: Histogram,
    used: Gauge,
}

impl Traffic {
    pub fn new(watch: &Watch, target: TargetId) -> Traffic {
        let target = target.to_string();
        let label = ("target", target.as_str());
        Traffic {
            read_bytes: watch.counter("weir_store_read_bytes_total", label),
            read_seconds: watch.histogram("weir_store_read_seconds", label),
            write_bytes: watch.counter("weir_store_write_bytes_total", label),
            write_seconds: watch.histogram("weir_store_write_seconds", label),
            sync_seconds: watch.histogram("weir_store_sync_seconds", label),
            used: watch.gauge("weir_target_used_bytes", label),
            watch: watch.clone(),
        }
    }
    /// Space in use, as it is reported.
    pub fn note_used(&self, bytes: u64) {
        self.used.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
    pub fn read<T>(&self, bytes: usize, work: impl FnOnce() -> T) -> T {
        self.read_bytes.add(bytes as u64);
        self.timed(&self.read_seconds, work)
    }
    pub fn write<T>(&self, bytes: usize, work: impl FnOnce() -> T) -> T {
        self.write_bytes.add(bytes as u64);
        self.timed(&self.write_seconds, work)
    }
    pub fn sync<T>(&self, work: impl FnOnce() -> T) -> T {
        self.timed(&self.sync_seconds, work)
    }
    fn timed<T>(&self, seconds: &Histogram, work: impl FnOnce() -> T) -> T {
        let begun = self.watch.now_ns();
        let done = work();
        seconds.add(self.watch.now_ns().saturating_sub(begun));
        done
    }
}
