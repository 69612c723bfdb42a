//! A client's counters, among the meters of its process.
use crate::Client;
use std::sync::Arc;
use weir_watch::{Kind, Watch};

impl Client {
    /// The meters of this client's process.
    pub fn watch(&self) -> &Watch {
        &self.inner.env.watch
    }

    /// Shows this client's counters from now on, instead of those of an earlier client of the process.
    pub(crate) fn with_meters(self) -> Client {
        let meters = &self.watch().meters;
        let show = |kind, name, read: fn(&crate::ClientStatus) -> u64| {
            let inner = Arc::downgrade(&self.inner);
            let value = move || inner.upgrade().map_or(0, |inner| read(&inner.status()) as i64);
            meters.observe(kind, name, ("", ""), Arc::new(value));
        };
        show(Kind::Counter, "weir_client_sent_bytes_total", |s| s.wire_sent_bytes);
        show(Kind::Counter, "weir_client_received_bytes_total", |s| s.wire_received_bytes);
        show(Kind::Counter, "weir_client_hedges_total", |s| s.hedged_reads);
        show(Kind::Counter, "weir_client_degraded_reads_total", |s| s.degraded_reads);
        show(Kind::Counter, "weir_client_degraded_writes_total", |s| s.degraded_writes);
        show(Kind::Counter, "weir_client_damaged_total", |s| s.crc_failures);
        show(Kind::Counter, "weir_client_recalled_leases_total", |s| s.revokes);
        show(Kind::Gauge, "weir_client_memory_bytes", |s| s.memory_used_bytes);
        self
    }
}
