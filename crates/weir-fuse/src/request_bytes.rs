//! The size of the largest request of the kernel, which root may raise (`fs.fuse.max_pages_limit`).
use std::sync::OnceLock;

/// Since Linux 6.13. Earlier kernels have [`PAGES_BEFORE`].
const LIMIT: &str = "/proc/sys/fs/fuse/max_pages_limit";
const PAGES_BEFORE: u64 = 256;
/// The smallest one of all machines.
const PAGE_BYTES: u64 = 4096;
/// A stripe of the usual size twice over: larger ones only keep more memory.
const BYTES_MAX: u64 = 4 << 20;
const BYTES_MIN: u64 = 128 << 10;

/// The largest request of the kernel, read once: all mounts of this process use it.
pub fn request_bytes() -> u32 {
    static BYTES: OnceLock<u32> = OnceLock::new();
    *BYTES.get_or_init(|| bytes_of(std::fs::read_to_string(LIMIT).ok().as_deref()))
}

fn bytes_of(limit: Option<&str>) -> u32 {
    let pages = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(PAGES_BEFORE);
    let bytes = pages.saturating_mul(PAGE_BYTES);
    bytes.clamp(BYTES_MIN, BYTES_MAX) as u32 // at most 4 MiB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_as_large_as_the_kernel_lets_them_be() {
        let page = PAGE_BYTES as u32;
        assert_eq!(bytes_of(None), 256 * page);
        assert_eq!(bytes_of(Some("512\n")), 512 * page);
        assert_eq!(bytes_of(Some("65535\n")), BYTES_MAX as u32);
        assert_eq!(bytes_of(Some("1\n")), BYTES_MIN as u32);
        assert_eq!(bytes_of(Some("many")), 256 * page);
    }
}
