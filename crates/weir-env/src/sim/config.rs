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
    /// Every node has a processor like this; `None`: tasks take no time.
    pub processor: Option<ProcessorConfig>,
}

/// A processor, and the cost of what tasks do on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessorConfig {
    pub cores: usize,
    /// In millionths of the speed that the costs are for.
    pub speed_ppm: u64,
    /// One poll of a task: it is woken, switched to, and does its part.
    pub poll: Duration,
    /// One call to the kernel: a read or write of a socket or a file.
    pub call: Duration,
    /// Bytes that a core copies and sums up in a second.
    pub bytes_per_s: u64,
}

impl Default for ProcessorConfig {
    /// A request costs its server some 30 µs with these: about as much as on a machine of 2024 (20 to 40 µs).
    fn default() -> ProcessorConfig {
        ProcessorConfig {
            cores: 2,
            speed_ppm: 1_000_000,
            poll: Duration::from_micros(5),
            call: Duration::from_micros(4),
            bytes_per_s: 1_000_000_000,
        }
    }
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
            processor: None,
        }
    }
}
