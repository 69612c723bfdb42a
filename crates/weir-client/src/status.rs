//! Counters of one client. Relaxed: each is exact, but together they are not a snapshot.
use crate::budget::Budget;
use crate::types::ClientStatus;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Default, Debug)]
pub struct Counters {
    pub written_bytes: AtomicU64,
    pub read_bytes: AtomicU64,
    pub wire_sent_bytes: AtomicU64,
    pub wire_received_bytes: AtomicU64,
    pub degraded_reads: AtomicU64,
    pub hedged_reads: AtomicU64,
    pub degraded_writes: AtomicU64,
    pub crc_failures: AtomicU64,
    pub asked: AtomicU64,
    pub revokes: AtomicU64,
    pub own_evictions: AtomicU64,
}

impl Counters {
    pub fn snapshot(&self, budget: &Budget, inodes: usize) -> ClientStatus {
        ClientStatus {
            written_bytes: self.written_bytes.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            wire_sent_bytes: self.wire_sent_bytes.load(Relaxed),
            wire_received_bytes: self.wire_received_bytes.load(Relaxed),
            degraded_reads: self.degraded_reads.load(Relaxed),
            hedged_reads: self.hedged_reads.load(Relaxed),
            degraded_writes: self.degraded_writes.load(Relaxed),
            crc_failures: self.crc_failures.load(Relaxed),
            memory_used_bytes: budget.used_bytes() + budget.names_bytes(),
            memory_peak_bytes: budget.peak_bytes(),
            asked: self.asked.load(Relaxed),
            revokes: self.revokes.load(Relaxed),
            own_evictions: self.own_evictions.load(Relaxed),
            inodes: inodes as u64,
        }
    }
}
