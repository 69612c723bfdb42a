//! Speeds and limits of the simulation.
use std::time::Duration;

/// Speeds and limits of the simulation.
#[derive(Clone, Copy, Debug)]
pub struct SimConfig {
    /// One-way latency, least and most.
    pub latency: (Duration, Duration),
    pub bandwidth_bytes_per_s: u64,
    /// Bytes that a stream buffers before its reader reads.
    pub window_bytes: usize,
    /// Duration of blocking work, least and most.
    pub disk_delay: (Duration, Duration),
    pub disk_capacity_bytes: u64,
    /// A run that simulates more has failed.
    pub time_max: Duration,
    /// Keep the trace as text too ([`World::trace_lines`]).
    pub log: bool,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            latency: (Duration::from_micros(20), Duration::from_micros(300)),
            bandwidth_bytes_per_s: 2_000_000_000,
            window_bytes: 1 << 20,
            disk_delay: (Duration::from_micros(10), Duration::from_micros(400)),
            disk_capacity_bytes: 16 << 30,
            time_max: Duration::from_secs(30 * 24 * 3600),
            log: false,
        }
    }
}
