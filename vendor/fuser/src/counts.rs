//! How many requests of each kind came from the kernel, in this process.
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of requests end below.
const KINDS: usize = 64;
static COUNTS: [AtomicU64; KINDS] = [const { AtomicU64::new(0) }; KINDS];

pub(crate) fn count(opcode: u32) {
    if let Some(count) = COUNTS.get(opcode as usize) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Requests that came, by the kernel's number of their kind (`enum fuse_opcode`); none that never came.
pub fn request_counts() -> Vec<(u32, u64)> {
    let counts = COUNTS.iter().map(|count| count.load(Ordering::Relaxed));
    (0u32..).zip(counts).filter(|(_, count)| *count > 0).collect()
}
